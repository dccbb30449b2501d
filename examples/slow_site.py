"""A slow site behind the page cache, to be asked for /pricing twice.

Run `uvicorn slow_site:site --app-dir examples`. Needs `stillfresh[web]` and FastAPI. POST /pricing
changes the price; its next visitor sees it.
"""

import asyncio
import time

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from stillfresh.pages import IsrMiddleware, PageCache, Route

app = FastAPI()
pages = PageCache("memory://")
prices = {"basic": 10}


@app.get("/pricing", response_class=HTMLResponse)
async def pricing() -> str:
    await asyncio.sleep(1)  # a slow database
    return f"<h1>{prices['basic']} a month</h1><p>rendered at {time.strftime('%X')}</p>"


@app.post("/pricing")
async def change(basic: int) -> dict[str, int]:
    prices["basic"] = basic
    return prices


@app.get("/blog/{slug}", response_class=HTMLResponse)
async def blog(slug: str, page: int = 1) -> str:
    await asyncio.sleep(1)
    return f"<h1>{slug}, page {page}</h1>"


@app.post("/admin/publish")
async def publish() -> str:
    await pages.revalidate_tag("blog")
    return "every article is rendered anew at its next visit"


site = IsrMiddleware(
    app,
    pages,
    routes={"/pricing": "60s", "/blog/*": Route("10m", query=["page"], tags=["blog"])},
)
