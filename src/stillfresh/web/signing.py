"""The viewer that a token belongs to, asked of an upstream: `[server] authenticate_url` (G1, G3).

POST `{"token": "…"}`; the upstream answers 200 with `{"viewer_id": "…"}`, or 401, 403 or 404 for an
unknown token.
"""

from typing import Final

import httpx2
import msgspec

from stillfresh.errors import LoadFailed
from stillfresh.http.client import Endpoint, Refused
from stillfresh.ttl_cache import TtlCache

KNOWN_FOR: Final = "1m"
"""For reads over HTTP: a revoked token is refused after that at the latest."""
MOST_TOKENS: Final = 10_000
UNKNOWN: Final = frozenset({401, 403, 404})


class Viewer(msgspec.Struct):
    """What the upstream says."""

    viewer_id: str


class Authority:
    """`authenticate=Authority(client, url)`; asks the upstream each time (G12)."""

    def __init__(self, client: httpx2.AsyncClient, url: str) -> None:
        self._endpoint = Endpoint(client, url, max_bytes=65_536)
        self._known: TtlCache[str, str] = TtlCache(KNOWN_FOR, max_entries=MOST_TOKENS)

    async def __call__(self, token: str) -> str | None:
        viewer_id = await self._asked(token)
        if viewer_id is None:
            self._known.remove(token)
        else:
            self._known.insert(token, viewer_id)
        return viewer_id

    async def remembered(self, token: str) -> str | None:
        """The last answer, for a minute: a read over HTTP sends its token each time."""
        viewer_id = self._known.get(token)
        return await self(token) if viewer_id is None else viewer_id

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
