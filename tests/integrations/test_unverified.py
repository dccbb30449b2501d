"""E29 in FastAPI and Flask: what a route sends while the store cannot be asked."""

from typing import Any

import httpx2
from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse
from flask import Flask

from stillfresh import Cache, SyncCache
from stillfresh.integrations.fastapi import fresh, lifespan
from stillfresh.integrations.flask import Fresh
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.held_store import SteppedStore

AWAY = {"read", "acquire", "publish", "release", "renew"}
LIFETIME = "public, max-age=30, s-maxage=60, stale-if-error=9"
NO_LIFETIME = "public, max-age=0, s-maxage=0, stale-if-error=9"


def told(headers: Any) -> tuple[str, str, str]:
    return headers["cache-control"], headers["cache-status"], headers["age"]


class TestE29Routes:
    async def test_an_unverified_response_of_fastapi_has_no_lifetime(self) -> None:
        """Its fields, its `Cache-Status` and its verdict agree."""
        clock = ManualClock(1_000_000.0)
        store = SteppedStore(MemoryStore(clock=clock))
        cache = Cache(store, clock=clock)
        app = FastAPI(lifespan=lifespan(cache))

        @app.get("/page")
        @fresh(cache, "10m")
        async def page() -> Response:
            return HTMLResponse("hello", headers={"cache-control": LIFETIME})

        transport = httpx2.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://shop") as client,
        ):
            first = await client.get("/page")
            store.broken = AWAY
            clock.advance(7)
            second = await client.get("/page")
        status = "stillfresh; fwd=miss; stored; ttl=600; detail=fresh"
        assert told(first.headers) == (LIFETIME, status, "0")
        assert told(second.headers) == (NO_LIFETIME, "stillfresh; hit; ttl=0; detail=stale", "7")

    def test_an_unverified_response_of_flask_has_no_lifetime(self) -> None:
        """The same, from a thread."""
        clock = ManualClock(1_000_000.0)
        store = SteppedStore(MemoryStore(clock=clock))
        app = Flask("shop")
        with SyncCache(store, clock=clock) as cache:
            kept = Fresh(cache=cache)
            kept.init_app(app)

            @app.get("/page")
            @kept.view("10m")
            def page() -> tuple[str, dict[str, str]]:
                return "hello", {"Cache-Control": LIFETIME}

            first = app.test_client().get("/page")
            store.broken = AWAY
            clock.advance(7)
            second = app.test_client().get("/page")
        assert told(first.headers)[0] == LIFETIME
        assert told(second.headers) == (NO_LIFETIME, "stillfresh; hit; ttl=0; detail=stale", "7")
