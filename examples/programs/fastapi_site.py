"""A FastAPI route that is answered from a copy, and a change that the next visitor sees.

Use it when a route reads from something slow, and many visitors ask for the same. Start it with
`uvicorn fastapi_site:app`, and run as many workers as you like: they share the file.
"""

from fastapi import FastAPI

from stillfresh import Cache
from stillfresh.integrations.fastapi import fresh, lifespan

cache = Cache("sqlite:///fastapi.db")
app = FastAPI(lifespan=lifespan(cache))
prices = {"tea": 300}  # your database


@app.get("/prices/{sku}")
@fresh(cache, "10m", stale_for="1h", error_for="1d", tags=lambda sku: [f"sku:{sku}"])
async def price(sku: str) -> dict[str, int]:
    return {sku: prices[sku]}


@app.put("/prices/{sku}")
async def change(sku: str, cents: int) -> dict[str, int]:
    prices[sku] = cents  # first write, then invalidate
    await cache.invalidate_tag(f"sku:{sku}")
    return {sku: cents}
