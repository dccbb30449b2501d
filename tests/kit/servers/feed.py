"""A small real HTTP server of a feed, on a free loopback port, that can misbehave on purpose.

It runs on the test's own loop. What it is told to do for a path (`server.on`) comes before the
feed that it otherwise serves; a connection can be cut, held up, or never end.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

from stillfresh.systems.feed.rules import buckets
from tests.kit.servers.valkey import free_port


@dataclass(frozen=True)
class Seen:
    """A request as it came over the wire."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    writer: asyncio.StreamWriter = field(repr=False)

    @property
    def path(self) -> list[str]:
        return [unquote(part) for part in urlsplit(self.target).path.split("/")[1:]]

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.target).query)


Reply: TypeAlias = bytes | None
"""The bytes of a whole response; None: the connection is cut."""
Handler: TypeAlias = Callable[[Seen], Awaitable[Reply]]


def response(
    body: bytes | str | object = b"", status: int = 200, headers: Mapping[str, str] | None = None
) -> bytes:
    """A whole HTTP response; what is neither bytes nor text is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Content-Type": "application/json", "Content-Length": str(len(data))} | {
        **(headers or {})
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} Because\r\n{head}\r\n".encode() + data


def always(reply: Reply) -> Handler:
    async def handler(seen: Seen) -> Reply:
        del seen
        return reply

    return handler


def begun(start: bytes, more: bytes = b"") -> Handler:
    """Sends `start`, then `more` for ever; with nothing more, it falls silent."""

    async def handler(seen: Seen) -> Reply:
        seen.writer.write(start)
        await seen.writer.drain()
        while more:
            seen.writer.write(more)
            await seen.writer.drain()
            await asyncio.sleep(0)  # or it would fill the socket before anybody reads
        await asyncio.Event().wait()
        return None

    return handler


class Hold:
    """A handler that keeps requests waiting until `let_go`, and then passes them on."""

    def __init__(self, then: Handler) -> None:
        self._then = then
        self._gate = asyncio.Event()
        self.asked = asyncio.Event()

    async def __call__(self, seen: Seen) -> Reply:
        self.asked.set()
        await self._gate.wait()
        return await self._then(seen)

    def let_go(self) -> None:
        self._gate.set()


class FeedServer:
    """`async with FeedServer() as server:`; topics and comments are JSON objects of its own."""

    def __init__(self) -> None:
        self.topics: dict[str, dict[str, Any]] = {}
        self.comments: dict[str, list[dict[str, Any]]] = {}
        self.requests: list[Seen] = []
        self.connections = 0
        self._handlers: dict[str, Handler] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on(self, prefix: str, handler: Handler | Reply) -> None:
        """For "GET /days" and the like; the longest prefix that fits is taken."""
        is_reply = handler is None or isinstance(handler, bytes)
        self._handlers[prefix] = always(handler) if is_reply else handler  # type: ignore[arg-type, assignment]

    def mend(self) -> None:
        self._handlers.clear()

    def asked(self, prefix: str) -> list[str]:
        """The targets of the requests that begin so."""
        lines = ((f"{seen.method} {seen.target}", seen.target) for seen in self.requests)
        return [target for line, target in lines if line.startswith(prefix)]

    def put(self, uuid: str, created_at: float, **more: Any) -> None:
        self.topics[uuid] = {
            "topic_uuid": uuid,
            "author": "ann",
            "title": f"Title of {uuid}",
            "created_at": int(created_at),
            "category_id": "general",
            **more,
        }

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """From now on connections are refused, and those that are open are cut."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def start_again(self) -> None:
        """On the same port."""
        await self.__aenter__()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with _closing(writer):
                while (seen := await _read(reader, writer)) is not None:
                    self.requests.append(seen)
                    reply = await self._handler(f"{seen.method} {seen.target}")(seen)
                    if reply is None:
                        return
                    writer.write(reply)
                    await writer.drain()
        except ConnectionError:  # the client hung up, as it may
            return

    def _handler(self, line: str) -> Handler:
        fitting = [prefix for prefix in self._handlers if line.startswith(prefix)]
        return self._handlers[max(fitting, key=len)] if fitting else self.feed

    async def feed(self, seen: Seen) -> Reply:
        """The routes, as a well-behaved upstream serves them."""
        return self._read(seen) if seen.method == "GET" else self._write(seen)

    def _read(self, seen: Seen) -> Reply:
        match seen.path:
            case "days", day:
                return response(self._index(day, seen.query.get("category", [None])[0]))
            case "topics", uuid if uuid in self.topics:
                return response(self.topics[uuid])
            case "topics", uuid, "comments" if uuid in self.topics:
                return response(self.comments.get(uuid, []))
        return response({"error": "no such thing"}, 404)

    def _write(self, seen: Seen) -> Reply:
        match seen.method, *seen.path:
            case "POST", "topics":
                topic = json.loads(seen.body)
                self.topics[topic["topic_uuid"]] = topic
                return response(topic, 201)
            case "DELETE", "topics", uuid if self.topics.pop(uuid, None):
                return response(b"", 204)
            case "POST", "topics", uuid, "comments":
                self.comments.setdefault(uuid, []).append(json.loads(seen.body))
                return response(b"{}", 201)
        return response({"error": "no such thing"}, 404)

    def _index(self, day: str, category: str | None) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in topic.items() if name != "body"}
            for topic in self.topics.values()
            if buckets(1, topic["created_at"])[0].isoformat() == day
            and category in {None, topic["category_id"]}
        ]


@asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> Any:
    try:
        yield
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Seen | None:
    """The next request; None when the client hung up."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    method, target, _ = first.split(" ")
    return Seen(method, target, headers, body, writer)
