"""A server without a cache of its own: it passes each request to a client that has one.

`python -m tests.kit.workers.client_proxy SITE private|shared httpx2|httpx`. Prints its address.
So the tests that judge proxies judge the cache of a client.
"""

import asyncio
import importlib
import sys
from typing import Any

import uvicorn

from stillfresh.http.fields import HOP_BY_HOP
from stillfresh.integrations.httpx import AsyncCacheTransport

SITE, MODE, LIBRARY = sys.argv[1:4]
library = importlib.import_module(LIBRARY)


async def app(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    query = scope["query_string"].decode()
    url = f"{SITE}{scope['raw_path'].decode()}{'?' if query else ''}{query}"
    dropped = HOP_BY_HOP | {b"host"}
    headers = [(name, value.strip()) for name, value in scope["headers"] if name not in dropped]
    headers = [(b"host", SITE.partition("//")[2].encode()), *headers]
    request = library.Request(scope["method"], url, headers=headers, content=body or None)
    client = scope["state"]["client"]
    try:
        response = await client.send(request, stream=True)
    except library.HTTPError:
        await send({"type": "http.response.start", "status": 502, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        return
    try:
        fields = [
            (name.lower(), value)
            for name, value in response.headers.raw
            if name.lower() not in HOP_BY_HOP
        ]
        start = {"type": "http.response.start", "status": response.status_code, "headers": fields}
        await send(start)
        async for part in response.aiter_raw():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        await response.aclose()


async def main() -> None:
    limits = library.Limits(max_connections=None, keepalive_expiry=0)
    inner = library.AsyncHTTPTransport(limits=limits)
    transport = AsyncCacheTransport("memory://", inner, shared=MODE == "shared", heuristic=True)
    async with library.AsyncClient(transport=transport, timeout=30) as client:

        async def stated(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                scope.setdefault("state", {})["client"] = client
                await app(scope, receive, send)

        config = uvicorn.Config(
            stated,
            http="h11",
            port=0,
            log_level="critical",
            lifespan="off",
            date_header=False,
            server_header=False,
        )
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        print(f"http://{host}:{port}", flush=True)
        await serving


asyncio.run(main())
