"""A site that reads through a cache whose memory lags: prints its port.

`shop_site STORE STOCK`: the address of the cache's store, and the file that is the database.
"""

import asyncio
import socket
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, RedirectResponse

from stillfresh import Cache
from stillfresh.integrations.fastapi import lifespan
from stillfresh.integrations.own_writes import ReadYourWrites

FORM = """<!doctype html><link rel="icon" href="data:,">
<form method=post><b>{}</b><button>Buy</button></form>"""


def site(store: str, stock: Path) -> FastAPI:
    cache = Cache(store)
    app = FastAPI(lifespan=lifespan(cache))
    app.add_middleware(ReadYourWrites, caches=[cache])

    @cache.cached("left", fresh_for="1h", memory_for="1m")
    async def left() -> int:
        return int(stock.read_text())

    @app.get("/tea")
    async def show() -> HTMLResponse:
        return HTMLResponse(FORM.format(await left()))

    @app.post("/tea")
    async def buy() -> RedirectResponse:
        stock.write_text(str(int(stock.read_text()) - 1))
        await left.of().invalidate()
        return RedirectResponse("/tea", 303)

    return app


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    app = site(sys.argv[1], Path(sys.argv[2]))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    asyncio.run(server.serve([listener]))
