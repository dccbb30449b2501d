"""A site in a process of its own: prints its port, and answers by what the path asks for.

`/count?/path` tells how often a path was asked for; everything else is counted.
"""

import asyncio
import json
import socket
from collections import Counter
from typing import Any
from urllib.parse import parse_qsl

import uvicorn

COUNTS: Counter[str] = Counter()
FAILING: set[str] = set()


async def app(scope: Any, receive: Any, send: Any) -> None:
    path = scope["path"]
    query = scope["query_string"].decode()
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
    if path == "/count":
        await answer(send, 200, {"cache-control": "no-store"}, str(COUNTS[query]).encode())
        return
    if path == "/fail":
        FAILING.add(query)
        await answer(send, 200, {"cache-control": "no-store"}, b"")
        return
    COUNTS[path] += 1
    says = dict(parse_qsl(query))
    if path in FAILING:
        await answer(send, 500, {}, b"failed")
    elif path == "/echo":
        echo = {"headers": headers, "method": scope["method"], "body": body.decode()}
        await answer(send, 200, {"cache-control": "no-store"}, json.dumps(echo).encode())
    elif path == "/big":
        await send({"type": "http.response.start", "status": 200, "headers": fields(says)})
        for _ in range(300):
            await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    elif path == "/cut":
        says["content-length"] = "100"
        await send({"type": "http.response.start", "status": 200, "headers": fields(says)})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ConnectionError
    elif says.get("etag") and headers.get("if-none-match") == says["etag"]:
        await answer(send, 304, says, b"")
    else:
        await asyncio.sleep(float(says.pop("takes", 0)))
        status = int(says.pop("status", 200))
        await answer(send, status, says, f"{path} {COUNTS[path]}".encode())


def fields(says: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in says.items()]


async def answer(send: Any, status: int, says: dict[str, str], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": fields(says)})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", lifespan="off")

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(listener.getsockname()[1], flush=True)

    Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
