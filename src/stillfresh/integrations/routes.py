"""What FastAPI's routes and Flask's views share: keys, and which responses may be stored for all.

No framework is imported here. The rule of the design: nothing personal is shared unless the key
says for whom it is.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from stillfresh.engine import Call, Spec, key_text
from stillfresh.engine.keys import checked_id
from stillfresh.errors import ConfigError, shown
from stillfresh.http.fields import directives, values

MARK: Final = "stillfresh.refresh"
"""Key in a scope or environ: the request refreshes a copy, and nobody gets its response."""
MAX_BODY: Final = 1_048_576
"""Bytes of the largest response that is stored."""
UNSHARED: Final = {"private", "no-store"}

Tags = str | Sequence[str] | Callable[..., str | Sequence[str]]
RouteSpec = Spec[Call[Any], Any]


class KeptResponse(msgspec.Struct, frozen=True):
    """A stored response, for any number of callers."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def check_cache(cache: object, of: type) -> None:
    """Refuse an address, and a Cache where a SyncCache is needed or the other way round."""
    if not isinstance(cache, of):
        raise ConfigError(
            f"cache: a {of.__name__} is needed here, not {cache!r}; "
            f'write cache = {of.__name__}("sqlite:///app.db")'
        )


def id_of(kind: str, parts: Sequence[object], what: object, advice: str) -> str:
    """The id of these parts; `what`: the parts that an error shows."""
    try:
        text = key_text(parts)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{kind}: {shown(what)} cannot be a key: {exc}; {advice}") from exc
    return checked_id(kind, text)


def is_for_all(status: int, headers: Iterable[tuple[bytes, bytes]], size: int) -> bool:
    """False if the response is only for the caller whose request made it."""
    fields = [(name.lower(), value) for name, value in headers]
    cache_control = directives(values(fields, b"cache-control")).keys()
    is_personal = values(fields, b"set-cookie") or not UNSHARED.isdisjoint(cache_control)
    return status == 200 and size <= MAX_BODY and not is_personal
