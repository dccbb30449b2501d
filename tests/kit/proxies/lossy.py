"""A proxy in front of a DynamoDB server that counts requests, loses answers and makes some up."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

WRITES = {"PutItem", "UpdateItem", "DeleteItem", "TransactWriteItems"}


@dataclass
class LossyProxy:
    """What happens to the next requests of an operation, by its name (`PutItem`)."""

    upstream: str
    address: str = ""
    seen: Counter[str] = field(default_factory=Counter)
    lose: Counter[str] = field(default_factory=Counter)
    """So many answers are lost: the server has done it, and the connection is cut."""
    meanwhile: Callable[[], Awaitable[object]] | None = None
    """Called when the server has done it, before the client learns of the loss."""
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    """So many requests are answered with this error, and never reach the server."""
    delays: bool = False
    """Each write is held back when it first comes, and the connection is cut: it is sent again."""
    delayed: frozenset[str] = frozenset(WRITES)
    """The operations of which `delays` speaks."""
    delayed_row: str = ""
    """Only those that name a row which begins so."""
    held: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """What was held back, and may yet arrive."""
    forgets: bool = False
    """The server does not learn the names of transactions, so it does each as often as it comes."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(self.upstream)
        upstream = await asyncio.open_connection(parts.hostname, parts.port)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self.one(reader, writer, *upstream):
                pass
        upstream[1].close()
        writer.close()

    async def one(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> bool:
        """One request; whether the connection goes on."""
        request = await message(reader)
        operation = target(request)
        if self.forgets and operation == "TransactWriteItems":
            request = without_name(request)
        self.seen[operation] += 1
        if self.holds_back(operation, request):
            return False
        if (answer := self.refusal(operation)) is not None:
            writer.write(answer)
            return True
        up_writer.write(request)
        response = await message(up_reader)
        if self.lose[operation]:
            self.lose[operation] -= 1
            if self.meanwhile is not None:
                await self.meanwhile()
            return False
        writer.write(response)
        await writer.drain()
        return True

    def holds_back(self, operation: str, request: bytes) -> bool:
        """Only the first of those that write the same row in the same way."""
        if not self.delays or operation not in self.delayed:
            return False
        write = operation, row_of(json.loads(request.split(b"\r\n\r\n", 1)[1]))
        if write in self.held or not write[1].startswith(self.delayed_row):
            return False
        self.held[write] = request
        return True

    async def deliver(self) -> None:
        """All that was held back arrives, and is done when this returns."""
        parts = urlsplit(self.upstream)
        for request in self.held.values():
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(request)
            await message(reader)
            writer.close()
            await writer.wait_closed()

    def refusal(self, operation: str) -> bytes | None:
        left, code = self.refuse.get(operation, (0, ""))
        if not left:
            return None
        self.refuse[operation] = (left - 1, code)
        body = json.dumps({"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": code})
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/x-amz-json-1.0\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def row_of(asked: dict[str, Any]) -> str:
    """The keys that a request names: of a transaction, the keys of all its actions."""
    items = asked.get("TransactItems", ())
    actions = [action for item in items for action in item.values()] or [asked]
    keys = [action.get("Key") or action["Item"] for action in actions]
    return " ".join(f"{key['pk']['S']} {key['sk']['S']}" for key in keys)


def without_name(request: bytes) -> bytes:
    """The same transaction, without the name by which a server knows it again."""
    head, body = request.split(b"\r\n\r\n", 1)
    transaction = json.loads(body)
    transaction.pop("ClientRequestToken", None)
    nameless = json.dumps(transaction).encode()
    size = header(head, b"content-length").encode()
    lines = [
        b"Content-Length: %d" % len(nameless)
        if line.lower() == b"content-length: " + size
        else line
        for line in head.split(b"\r\n")
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + nameless


async def message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(int(header(head, b"content-length") or 0))


def header(head: bytes, name: bytes) -> str:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(name + b":"):
            return line.split(b":", 1)[1].strip().decode()
    return ""


def target(request: bytes) -> str:
    """`DynamoDB_20120810.PutItem` -> `PutItem`"""
    return header(request.split(b"\r\n\r\n", 1)[0], b"x-amz-target").rpartition(".")[2]


@asynccontextmanager
async def lossy(upstream: str) -> AsyncIterator[LossyProxy]:
    proxy = LossyProxy(upstream)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await proxy.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy.address = f"http://127.0.0.1:{port}"
    try:
        yield proxy
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
