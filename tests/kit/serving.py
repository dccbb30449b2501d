"""An ASGI app on a port of its own, on the test's loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Where it listens; opened and closed by lifespan, as by any server."""
    config = uvicorn.Config(
        app, ws="websockets-sansio", lifespan="on", log_level="warning", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    # With the protocol, asyncio sends each part of an answer at once (`bound` says more).
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        async with asyncio.timeout(30):
            while not server.started:
                if running.done():
                    running.result()
                await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running
