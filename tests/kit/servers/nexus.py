"""A Nexus server on a free loopback port: the two `by_ids` endpoints, and all the ways to fail.

Real HTTP over real sockets, on the test's own event loop. What an id is called says how it answers.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.kit.coordinator import post, user

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class NexusServer:
    """Counts what it was asked; `answers` replaces the next answer of a path by raw bytes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.open = 0
        self.version = 1
        self.absent: set[str] = set()
        self.raw: Answer | None = None
        self.status = 200
        self.headers: dict[str, str] = {}
        self.body: bytes | None = None
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode().lstrip("/")
            lines = head.decode().lower().split("\r\n")
            length = next(int(line[15:]) for line in lines if line.startswith("content-length:"))
            request = json.loads(await reader.readexactly(length))
            self.asked.append((path, request))
            if self.raw is not None:
                await self.raw(reader, writer)
            else:
                body = self.views(path, request) if self.body is None else self.body
                await answer(writer, self.status, body, **self.headers)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()

    def views(self, path: str, request: dict[str, Any]) -> bytes:
        make_view = {"v0/stream/posts/by_ids": post, "v0/stream/users/by_ids": user}.get(path)
        if make_view is None:
            self.status = 404
            return b"{}"
        ids = request["post_ids" if make_view is post else "user_ids"]
        return json.dumps(
            [make_view(id_, self.version) for id_ in ids if id_ not in self.absent]
        ).encode()


async def answer(writer: asyncio.StreamWriter, status: int, body: bytes, **headers: str) -> None:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    await writer.drain()


@asynccontextmanager
async def nexus_server() -> AsyncIterator[NexusServer]:
    nexus = NexusServer()
    server = await asyncio.start_server(nexus.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    nexus.url = f"http://127.0.0.1:{port}"
    async with server:
        yield nexus
        async with asyncio.timeout(30):
            while nexus.open:
                await asyncio.sleep(0)
