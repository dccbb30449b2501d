"""NexusClient: the two `by_ids` endpoints of a Nexus server, over HTTP (C12).

Plain: a request, its status and its shape. How much is read, and how long, is bounded. httpx's
errors end here: a request that failed is `LoadFailed`, one that was told when to come back is
`RetryAfter`.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from stillfresh.coordinator.rules import (
    POST_PARTS,
    USER_PARTS,
    Views,
    post_id,
    sorted_out,
    user_id,
)
from stillfresh.durations import Duration, seconds
from stillfresh.engine.model import RetryAfter
from stillfresh.errors import ConfigError, LoadFailed, shown

try:
    import httpx
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "NexusClient needs httpx: install stillfresh[web]", name=exc.name
    ) from exc

__all__ = ["NexusClient"]

MAX_BYTES: Final = 8 * 1024 * 1024
NOTHING: Final = 204
LONGEST_PAUSE: Final = 86_400
ACCEPT: Final = {"accept": "application/json", "accept-encoding": "gzip"}


class NexusClient:
    """`NexusClient("https://nexus.example")`; no connection is kept open between two requests."""

    def __init__(
        self,
        url: str,
        *,
        timeout: Duration = "10s",
        max_bytes: int = MAX_BYTES,
        client: "httpx.AsyncClient | None" = None,
    ) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"url: must begin with http:// or https://, not {shown(url)}")
        if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
            raise ConfigError(f"max_bytes: must be a whole number above 0, not {shown(max_bytes)}")
        self._url = url.rstrip("/")
        self._timeout = seconds(timeout, name="timeout", positive=True)
        self._max_bytes = max_bytes
        self._client = client or httpx.AsyncClient(
            timeout=self._timeout, limits=httpx.Limits(max_keepalive_connections=0)
        )

    async def posts_by_ids(self, post_ids: list[str], viewer_id: str | None = None) -> Views:
        """Whole posts; what was broken in the answer is noted beside the list."""
        return await self._views("v0/stream/posts/by_ids", "post_ids", post_ids, viewer_id)

    async def users_by_ids(self, user_ids: list[str], viewer_id: str | None = None) -> Views:
        """Whole users; the same."""
        return await self._views("v0/stream/users/by_ids", "user_ids", user_ids, viewer_id)

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _views(self, path: str, field: str, ids: list[str], viewer_id: str | None) -> Views:
        asked: dict[str, Any] = {field: ids}
        if viewer_id is not None:
            asked["viewer_id"] = viewer_id
        entries = await self._asked(path, asked)
        if field == "post_ids":
            return sorted_out(entries, post_id, POST_PARTS)
        return sorted_out(entries, user_id, USER_PARTS)

    async def _asked(self, path: str, asked: dict[str, Any]) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout), self._response(path, asked) as response:
                _check_status(response)
                body = b"[]" if response.status_code == NOTHING else await self._body(response)
        except TimeoutError as exc:
            raise LoadFailed(f"{path}: no whole answer within {self._timeout:g} s") from exc
        except (httpx.HTTPError, httpx.InvalidURL, zlib.error) as exc:
            raise LoadFailed(f"{path}: {type(exc).__name__}: {exc}") from exc
        return _listed(path, body)

    @asynccontextmanager
    async def _response(self, path: str, asked: dict[str, Any]) -> AsyncIterator["httpx.Response"]:
        url = f"{self._url}/{path}"
        async with self._client.stream("POST", url, json=asked, headers=ACCEPT) as response:
            yield response

    async def _body(self, response: "httpx.Response") -> bytes:
        """Read as it comes, so that more than is allowed is never held, packed or unpacked."""
        body, packed = bytearray(), _packed(response)
        async for part in response.aiter_raw():
            body += packed.decompress(part, self._max_bytes + 1 - len(body)) if packed else part
            if len(body) > self._max_bytes:
                raise LoadFailed(f"the answer is longer than {self._max_bytes:,} bytes (max_bytes)")
        if packed and not packed.eof:
            raise LoadFailed("the answer is cut off: what is packed has no end")
        return bytes(body)


def _packed(response: "httpx.Response") -> "zlib._Decompress | None":
    """httpx would unpack a part whole: a few bytes can be a thousand times as many."""
    match response.headers.get("content-encoding", "identity").lower():
        case "identity":
            return None
        case "gzip":
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        case other:
            raise LoadFailed(f"the answer is packed as {other}, which was not asked for")


def _check_status(response: "httpx.Response") -> None:
    """200 with a list, or 204: nothing found. Whoever says when to come back is listened to."""
    if response.status_code in {200, NOTHING}:
        return
    pause = response.headers.get("retry-after", "")
    said = f"{response.request.url.path}: HTTP {response.status_code}"
    if pause.isascii() and pause.isdigit():
        is_sane = len(pause) <= len(str(LONGEST_PAUSE))
        raise RetryAfter(min(int(pause), LONGEST_PAUSE) if is_sane else LONGEST_PAUSE, said)
    raise LoadFailed(said)


def _listed(path: str, body: bytes) -> list[Any]:
    """An empty body is an answer that broke off, not one that found nothing."""
    try:
        return msgspec.json.decode(body, type=list[Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise LoadFailed(f"{path}: the answer is not a list of views: {exc}") from exc
