"""T5: an upstream on a raw socket: says the right thing, or an entry of the table, byte by byte."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.kit.bad_answers import Bad, good_answer

__all__ = ["RawUpstream", "raw_upstream", "text_frame"]

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455."""
REST = 0.01
"""Seconds between two bytes of one who is slow."""


class RawUpstream:
    """`views(path, asked)` is what is right; `bad`, if there is one, is said instead."""

    def __init__(self, views: Callable[[str, Any], Any]) -> None:
        self._views = views
        self.bad: Bad | None = None
        self.news: list[bytes] = []
        """Frames for who opens a WebSocket, after the welcome."""
        self.version = 1
        self.asked = 0
        self.joined = 0
        self.sent = 0
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, EOFError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        top = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", top)
        body = await reader.readexactly(int(length[1])) if length else b""
        if key := re.search(rb"(?i)sec-websocket-key: *(\S+)", top):
            await self._open_socket(key[1], reader, writer)
            return
        self.asked += 1
        path = top.split()[1].decode()
        right = json.dumps(self._views(path, json.loads(body) if body else None)).encode()
        if self.bad is None:
            writer.write(good_answer(right))
            await writer.drain()
            return
        await self._say(self.bad, right, reader, writer)

    async def _say(
        self, bad: Bad, right: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        for part in bad.say(right):
            if part is None:
                if await _has_left(reader):
                    return
                continue
            writer.write(part)
            self.sent += len(part)
            await writer.drain()

    async def _open_socket(
        self, key: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        accepted = base64.b64encode(hashlib.sha1(key + MAGIC).digest())  # noqa: S324 (RFC 6455)
        lines = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + accepted
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n" + lines + b"\r\n\r\n")
        for frame in [text_frame(b'{"type": "welcome"}'), *self.news]:
            writer.write(frame)
        self.news = []
        self.joined += 1
        await reader.read(1)  # a goodbye: nothing else is said here

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _has_left(reader: asyncio.StreamReader) -> bool:
    """Rests meanwhile."""
    try:
        async with asyncio.timeout(REST):
            await reader.read()
    except TimeoutError:
        return False
    return True


def text_frame(text: bytes) -> bytes:
    """From a server: unmasked."""
    size = bytes([len(text)]) if len(text) < 126 else b"\x7e" + len(text).to_bytes(2)
    return b"\x81" + size + text


@asynccontextmanager
async def raw_upstream(views: Callable[[str, Any], Any]) -> AsyncIterator[RawUpstream]:
    upstream = RawUpstream(views)
    server = await asyncio.start_server(upstream.handle, "127.0.0.1", 0)
    upstream.port = server.sockets[0].getsockname()[1]
    try:
        yield upstream
    finally:
        server.close()
        await upstream.end()
