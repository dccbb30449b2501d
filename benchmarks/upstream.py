"""An upstream over HTTP in a process of its own, its client, and what was asked of it (C6)."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

__all__ = ["CONNECTIONS", "Upstream", "server"]

CONNECTIONS = 8


class Upstream:
    """Requests over HTTP to a server in a process of its own, on a few connections.

    By hand, or by a `client` that users have. Done when `goal` ids were asked for.
    """

    def __init__(
        self, port: int, goal: int, *, looks: bool = False, client: httpx2.AsyncClient | None = None
    ) -> None:
        self.requests = self.refreshed = 0
        self.done = asyncio.Event()
        self.began = self.ended = self.longest_turn = 0.0
        self._looks = looks
        self._looking: asyncio.Task[None] | None = None
        self._port, self._goal, self._client = port, goal, client
        self._idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.Queue()
        )

    async def __aenter__(self) -> "Upstream":
        for _ in range(CONNECTIONS):
            self._idle.put_nowait(await asyncio.open_connection("127.0.0.1", self._port))
        return self

    async def __aexit__(self, *_exc: object) -> None:
        while not self._idle.empty():
            _reader, writer = self._idle.get_nowait()
            writer.close()
            await writer.wait_closed()

    async def _look(self) -> None:
        """From the first request until all are refreshed: opening and closing are apart."""
        while not self.done.is_set():
            began = time.thread_time()
            await asyncio.sleep(0)
            self.longest_turn = max(self.longest_turn, time.thread_time() - began)

    async def fetch(self, ids: list[str]) -> dict[str, int]:
        if not self.began:
            self.began = time.process_time()
            self._looking = asyncio.create_task(self._look()) if self._looks else None
        if self._client is None:
            answer = await self._by_hand(ids)
        else:
            url = f"http://127.0.0.1:{self._port}/"
            answer = (await self._client.post(url, json={"ids": ids})).json()
        self._count(len(ids))
        return answer

    async def _by_hand(self, ids: list[str]) -> dict[str, int]:
        reader, writer = connection = await self._idle.get()
        try:
            body = json.dumps({"ids": ids}).encode()
            writer.write(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.rpartition(b"content-length: ")[2].split()[0])
            answer: dict[str, int] = json.loads(await reader.readexactly(length))
        finally:
            self._idle.put_nowait(connection)
        return answer

    def _count(self, ids: int) -> None:
        """Until all are refreshed: what is still under way then counts for nobody."""
        if self.done.is_set():
            return
        self.requests += 1
        self.refreshed += ids
        if self.refreshed >= self._goal:
            self.ended = time.process_time()
            self.done.set()


SERVER = """
import asyncio, json

async def handle(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            length = int(head.lower().rpartition(b"content-length: ")[2].split()[0])
            ids = json.loads(await reader.readexactly(length))["ids"]
            body = json.dumps(dict.fromkeys(ids, 1)).encode()
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()

async def main():
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextmanager
def server() -> Iterator[int]:
    """Its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None  # noqa: S101 (it is a pipe)
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()
