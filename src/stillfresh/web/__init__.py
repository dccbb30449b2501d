"""The gateway: entities and pages kept fresh, over HTTP and WebSocket (G1-G7).

`gateway(...)` is an ASGI app to run or to mount; `stillfresh serve` runs one from a TOML file.
Needs `stillfresh[web]`.
"""

from stillfresh.errors import needs

with needs("web", "stillfresh.web"):
    from stillfresh.live import Live
    from stillfresh.web.app import Gateway
    from stillfresh.web.dashboard import Dashboard

gateway = Gateway
"""`Gateway` under the name that reads well in a call: `app = gateway("sqlite:///site.db", …)`."""

__all__ = ["Dashboard", "Gateway", "Live", "gateway"]
