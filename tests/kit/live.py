"""A gateway on a real port, an upstream that counts, and a viewer on its WebSocket."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from stillfresh.gateway.live import Live
from stillfresh.systems.coordinator import Kind
from stillfresh.systems.waiting.messages import GameStateNews, InvalidatedNews, YourTurnNews

__all__ = [
    "Start",
    "Upstream",
    "Viewer",
    "free_socket",
    "games",
    "handshaken",
    "never",
    "sent_raw",
    "served",
    "viewing",
]

PATIENCE = 30.0
"""Seconds that a test waits for what must come."""
Start = Callable[..., Awaitable[tuple[Live, int]]]


class Upstream:
    """Prices for all and an inbox for each; every call is counted."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.inboxes: list[tuple[str, list[str]]] = []
        self.version = 1
        self.is_down = False
        self.padding = ""

    async def price(self, ids: list[str]) -> dict[str, Any]:
        self.calls.append(list(ids))
        if self.is_down:
            raise ConnectionError("the upstream is at secret.internal:9")
        return {
            id_: {"name": id_, "n": self.version, "details": {"content": f"<b>{id_}</b>"}}
            for id_ in ids
            if id_ != "absent"
        }

    async def word(self, ids: list[str]) -> dict[str, str]:
        return {id_: f"{id_} {self.version}{self.padding}" for id_ in ids}

    async def inbox(self, ids: list[str], viewer_id: str) -> dict[str, str]:
        self.inboxes.append((viewer_id, list(ids)))
        return {id_: f"{viewer_id}'s {id_}" for id_ in ids}

    def kinds(self, fresh_for: float = 3600) -> list[Kind]:
        return [
            Kind("price", fetch=self.price, fresh_for=fresh_for, max_batch=50),
            Kind("word", fetch=self.word, fresh_for=fresh_for),
            Kind("inbox", fetch=self.inbox, fresh_for=fresh_for, per_viewer=True),
        ]

    @property
    def asked(self) -> set[str]:
        """Every id that was ever asked for."""
        return {id_ for ids in self.calls for id_ in ids}


def games(live: Live) -> Live:
    """With the notices of the games' service (contract W)."""
    for notice in (YourTurnNews, GameStateNews):
        live.register(notice, newest_of=["game_id"])
    live.register(InvalidatedNews)
    return live


def free_socket(port: int = 0) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen(2048)
    return listening


@asynccontextmanager
async def served(app: ASGIApp, port: int = 0, **options: Any) -> AsyncIterator[int]:
    """On this port, or a free one: listening before it is given out."""
    listening = free_socket(port)
    settings = {"log_config": None, "lifespan": "on", "timeout_graceful_shutdown": 5, **options}
    server = uvicorn.Server(uvicorn.Config(app, **settings))
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listening.close()


class Viewer:
    """Speaks and hears in messages."""

    def __init__(self, socket_: ClientConnection) -> None:
        self.socket = socket_

    async def say(self, type_: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": type_, **fields}))

    async def sign_in(self, token: str) -> None:
        await self.say("sign_in", token=token)

    async def watch(self, *ids: str, kind: str = "price") -> None:
        await self.say("subscribe", items=[[kind, id_] for id_ in ids])

    async def hear(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE):
            message: dict[str, Any] = json.loads(await self.socket.recv())
        return message

    async def hear_all(self, count: int) -> list[dict[str, Any]]:
        return [await self.hear() for _ in range(count)]

    async def nothing(self) -> None:
        """Said so far; what follows a ping is answered after it."""
        await self.say("ping")
        message = await self.hear()
        if message != {"type": "pong"}:
            raise AssertionError(message)

    async def end(self) -> tuple[list[dict[str, Any]], int, str]:
        """What is heard until the server closes, and how it closed."""
        messages = []
        try:
            while True:
                messages.append(await self.hear())
        except ConnectionClosed as exc:
            if exc.rcvd is None:
                return messages, 1006, ""
            return messages, exc.rcvd.code, exc.rcvd.reason


@asynccontextmanager
async def viewing(port: int, path: str = "/v1/live", **options: Any) -> AsyncIterator[Viewer]:
    """Welcomed already."""
    url = f"ws://127.0.0.1:{port}{path}"
    async with connect(url, open_timeout=PATIENCE, proxy=None, **options) as socket_:
        viewer = Viewer(socket_)
        first: Any = await viewer.hear()
        if (first[0] if isinstance(first, list) else first)["type"] != "welcome":
            raise AssertionError(first)
        yield viewer


async def never(_: float) -> None:
    """A sleep without an end."""
    await asyncio.Event().wait()


async def handshaken(port: int) -> socket.socket:
    """A raw socket after the handshake; nobody reads from it but for that."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)  # noqa: FBT003 (as it is called)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", port))
    request = (
        f"GET /v1/live HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        "Sec-WebSocket-Version: 13\r\n\r\n"
    )
    await loop.sock_sendall(raw, request.encode())
    await loop.sock_recv(raw, 100)
    return raw


async def sent_raw(raw: socket.socket, message: dict[str, Any]) -> None:
    """As one masked text frame."""
    body = json.dumps(message).encode()
    mask = random.randbytes(4)
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(body))
    size = bytes([0x80 | len(body)]) if len(body) < 126 else b"\xfe" + len(body).to_bytes(2)
    await asyncio.get_running_loop().sock_sendall(raw, b"\x81" + size + mask + masked)
