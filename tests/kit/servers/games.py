"""The games' service on a real port, and a wire to it that a test can cut."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import uvicorn
from starlette.requests import HTTPConnection

from game_service import Games
from game_service.app import games_app

__all__ = ["Served", "Wire", "served", "sign_in", "wired"]


def sign_in(connection: HTTPConnection) -> str | None:
    """The token is the user's name: fit for a test."""
    return connection.headers.get("Authorization", "").removeprefix("Bearer ") or None


class Served:
    """The service, and where it listens."""

    def __init__(self, games: Games, port: int) -> None:
        self.games = games
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    async def get(self, path: str, user: str | None) -> httpx.Response:
        headers = {} if user is None else {"Authorization": f"Bearer {user}"}
        async with httpx.AsyncClient(trust_env=False) as client:
            return await client.get(self.url + path, headers=headers)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Served]:
    """Listening before it is given out, so that nobody has to wait for it to start."""
    async with Games(folder / "games.db") as games:
        listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            games_app(games, sign_in), log_config=None, timeout_graceful_shutdown=5
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield Served(games, listening.getsockname()[1])
        finally:
            server.should_exit = True
            await task
            listening.close()


class Wire:
    """A TCP proxy: `cut` ends every connection and refuses new ones, until `mend`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers = set[asyncio.StreamWriter]()
        self._is_cut = False
        self.refused = asyncio.Event()
        """Somebody has tried since it was cut."""
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        self._is_cut = True
        self.refused.clear()
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        self._is_cut = False

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            self.refused.set()
            writer.transport.abort()
            return
        replies, upstream = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, upstream}
        try:
            await asyncio.gather(self._pump(reader, upstream), self._pump(replies, writer))
        finally:
            for side in (writer, upstream):
                self._writers.discard(side)
                side.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()


@asynccontextmanager
async def wired(target: int) -> AsyncIterator[Wire]:
    wire = Wire(target)
    server = await asyncio.start_server(wire.carry, "127.0.0.1", 0)
    wire.port = server.sockets[0].getsockname()[1]
    async with server:
        yield wire
        wire.cut()
