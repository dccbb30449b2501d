"""Who a token belongs to, asked of an upstream: `[server] authenticate_url` (G1, G3).

POST `{"token": "…"}`; 200 with `{"viewer_id": "…"}`, or 401, 403 or 404 for a token that is none.
"""

from typing import Final

import httpx
import msgspec

from stillfresh.coordinator.endpoint import Endpoint, Refused
from stillfresh.errors import LoadFailed
from stillfresh.ttl_cache import TtlCache

__all__ = ["Authority"]

KNOWN_FOR: Final = "1m"
"""A token is asked about again after that: who was signed out is out by then."""
MOST_TOKENS: Final = 10_000
UNKNOWN: Final = frozenset({401, 403, 404})


class Viewer(msgspec.Struct):
    """What the upstream says."""

    viewer_id: str


class Authority:
    """`authenticate=Authority(client, url)`; tokens that were known are remembered a while."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._endpoint = Endpoint(client, url, max_bytes=65_536)
        self._known: TtlCache[str, str] = TtlCache(KNOWN_FOR, max_entries=MOST_TOKENS)

    async def __call__(self, token: str) -> str | None:
        if (viewer_id := self._known.get(token)) is not None:
            return viewer_id
        viewer_id = await self._asked(token)
        if viewer_id is not None:
            self._known.insert(token, viewer_id)
        return viewer_id

    async def _asked(self, token: str) -> str | None:
        try:
            body = await self._endpoint.ask({"token": token})
            return msgspec.json.decode(body, type=Viewer).viewer_id or None
        except Refused as exc:
            if exc.status in UNKNOWN:
                return None
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise LoadFailed(f"the answer of authenticate_url names no viewer: {exc}") from exc
