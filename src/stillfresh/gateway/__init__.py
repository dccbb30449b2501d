"""The gateway: entities and pages kept fresh, over HTTP and WebSocket.

`gateway(...)` is an ASGI app to run or to mount; `stillfresh serve` runs one from a TOML file. Both
need `stillfresh[web]`. What is shown here is imported when it is first used, because
`stillfresh.gateway.live` works without that extra.

The way of a request: `server/protocol.py` receives its bytes, and answers from memory if an equal
request was answered before (`server/hits.py`). Otherwise `app.py` chooses by the path
(`own_paths.py`): the site's pages (`sources.py` puts them together from `stillfresh.pages`), reads
of kinds (`rest.py`), live updates (`live`), or the dashboard (`dashboard.py`). `serving.py` starts
all of it from the settings that `config.py` reads.
"""

from typing import TYPE_CHECKING

from stillfresh.errors import needs

if TYPE_CHECKING:
    from stillfresh.gateway.app import Gateway
    from stillfresh.gateway.dashboard import Dashboard
    from stillfresh.gateway.live import Live

    gateway = Gateway
    """`Gateway` under the name that reads well in a call: `app = gateway("sqlite:///site.db")`."""

__all__ = ["Dashboard", "Gateway", "Live", "gateway"]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("web", "stillfresh.gateway"):
        from stillfresh.gateway.app import Gateway  # noqa: PLC0415 (see above)
        from stillfresh.gateway.dashboard import Dashboard  # noqa: PLC0415
        from stillfresh.gateway.live import Live  # noqa: PLC0415
    public = {"Dashboard": Dashboard, "Gateway": Gateway, "Live": Live, "gateway": Gateway}
    globals().update(public)
    return public[name]
