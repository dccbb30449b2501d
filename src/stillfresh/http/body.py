"""Bodies of a bounded size: chunks in, bytes out, and never more held than allowed."""

import asyncio
import zlib
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Final

from stillfresh.errors import shown

if TYPE_CHECKING:
    import httpx2

GZIP_WINDOW: Final = 31


class Unreadable(ValueError):
    """The body cannot be used; the text says why."""


class BodyReader:
    """The bytes of a body, without their compression, and never more than `most` of them."""

    def __init__(self, most: int, encoding: str = "") -> None:
        name = encoding.strip().lower()
        if name not in {"", "identity", "gzip", "x-gzip"}:
            raise Unreadable(f"a body encoded as {shown(encoding)}, not as gzip or not at all")
        self.data = bytearray()
        self._most = most
        self._gzip = zlib.decompressobj(GZIP_WINDOW) if name.endswith("gzip") else None

    def add(self, chunk: bytes) -> None:
        """Add bytes. Decompresses no more than fits: a small answer can expand to gigabytes."""
        room = self._most + 1 - len(self.data)
        self.data += chunk[:room] if self._gzip is None else self._inflated(self._gzip, chunk, room)
        if len(self.data) > self._most:
            raise Unreadable(f"more than {self._most:,} bytes (max_bytes)")

    def _inflated(self, gzip: "zlib._Decompress", chunk: bytes, room: int) -> bytes:
        try:
            data = gzip.decompress(chunk, room)
        except zlib.error as exc:
            raise Unreadable(f"a broken gzip stream ({exc})") from exc
        if gzip.unused_data:
            raise Unreadable("data after the end of its gzip stream")
        return data

    def end(self) -> bytes:
        """Return the body. Raises Unreadable if its gzip stream is incomplete."""
        if self._gzip is not None and not self._gzip.eof:
            raise Unreadable("a gzip stream that was cut short")
        return bytes(self.data)


async def collected(chunks: AsyncIterable[bytes], most: int, encoding: str = "") -> bytes:
    """Read as it comes, so that more than is allowed is never held, packed or unpacked."""
    body = BodyReader(most, encoding)
    async for chunk in chunks:
        body.add(chunk)
        await asyncio.sleep(0)  # a thousand tiny chunks that came at once are not one step
    return body.end()


async def whole(response: "httpx2.Response", most: int) -> bytes:
    """The body of an upstream's answer."""
    encoding = response.headers.get("content-encoding", "")
    return await collected(response.aiter_raw(), most, encoding)
