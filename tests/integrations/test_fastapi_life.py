"""The caches and the dashboard of a FastAPI app, from its start to its end (E13, E21, G6)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel

from stillfresh import Cache, NotOpen
from stillfresh.integrations.fastapi import Dashboard, fresh, lifespan
from tests.kit.serving import served

TOKEN = "correct-horse"  # noqa: S105 (of the tests)


class Item(BaseModel):
    id: int


class TestE13Lifespan:
    async def test_an_own_lifespan_runs_around_the_caches(self) -> None:
        """It starts first and ends last, and its state reaches the requests."""
        first, second, seen = Cache("memory://"), Cache("memory://"), list[Any]()

        @asynccontextmanager
        async def own(app: FastAPI) -> AsyncIterator[dict[str, int]]:
            seen.append([first.opened, second.opened])
            yield {"pool": 7}
            seen.append([first.opened, second.opened])

        app = FastAPI(lifespan=lifespan(first, second, own=own))
        async with app.router.lifespan_context(app) as state:
            assert state == {"pool": 7}
            assert first.opened
            assert second.opened
        assert seen == [[None, None], [None, None]]
        with pytest.raises(NotOpen):
            await first.stats()

    def test_a_route_works_with_several_test_clients(self) -> None:
        """E21: each TestClient has an event loop of its own."""
        cache = Cache("memory://")
        app, calls = FastAPI(lifespan=lifespan(cache)), list[int]()

        @app.get("/items/{id}")
        @fresh(cache, "10m")
        def item(id: int) -> int:  # noqa: A002
            calls.append(id)
            return len(calls)

        for _ in range(2):
            with TestClient(app) as client:
                assert client.get("/items/1").json() == client.get("/items/1").json()
        assert calls == [1, 1]  # memory:// begins empty


class TestG6MountedDashboard:
    async def test_one_line_mounts_the_dashboard_in_fastapi(self) -> None:
        """It lists the route's entries, and its actions work, for the token alone."""
        cache, calls = Cache("memory://"), list[int]()
        app = FastAPI(lifespan=lifespan(cache))
        app.mount("/_stillfresh", Dashboard(cache, token=TOKEN))

        @app.get("/items/{id}")
        @fresh(cache, "10m")
        async def item(id: int) -> Item:  # noqa: A002
            calls.append(id)
            return Item(id=id)

        async with served(app) as address, httpx2.AsyncClient(base_url=address) as client:
            await client.get("/items/7")
            page = await client.get("/_stillfresh", follow_redirects=True)
            assert "stillfresh · dashboard" in page.text
            assert (await client.get("/_stillfresh/api/stats")).status_code == 401
            client.headers["Authorization"] = f"Bearer {TOKEN}"
            stats = (await client.get("/_stillfresh/api/stats")).json()
            assert (stats["has_live"], stats["live"]["connections"]) == (False, 0)
            assert [it["kind"] for it in stats["resources"]] == ["item"]
            assert (await client.get("/_stillfresh/api/history")).json()
            entry = (await client.get("/_stillfresh/api/entries/item/[7]")).json()
            assert entry["value"]["text"] == '{\n  "id": 7\n}'
            done = await client.post("/_stillfresh/api/entries/item/[7]/invalidate")
            assert done.json()["said"].startswith("Invalidated")
            await client.get("/items/7")
        assert calls == [7, 7]
        assert not [it for it in asyncio.all_tasks() if "note_now" in repr(it)]


class TestE19RouteServed:
    async def test_a_cached_route_works_behind_uvicorn(self, tmp_path: Any) -> None:
        """uvicorn, SQLite, real time: stale at once, then fresh, by a session of its own."""
        cache, sessions, loaded = (
            Cache(f"sqlite:///{tmp_path}/app.db"),
            list[list[str]](),
            list[str](),
        )
        app = FastAPI(lifespan=lifespan(cache))

        def session() -> Any:
            made = ["open"]
            sessions.append(made)
            yield made
            made[0] = "closed"

        @app.get("/items/{id}")
        @fresh(cache, "50ms", stale_for="1h", ignore=("db", "request"))
        def item(id: int, db: Annotated[list[str], Depends(session)], request: Request) -> int:  # noqa: A002
            loaded.append(f"{db[0]} {request.headers['x-trace']}")
            return len(loaded)

        async with served(app) as address, httpx2.AsyncClient(base_url=address) as client:
            client.headers["x-trace"] = "t1"
            first = await client.get("/items/1")
            assert first.json() == 1
            async with asyncio.timeout(10):
                while (answer := await client.get("/items/1")).json() < 3:
                    assert "hit" in answer.headers["cache-status"]
        assert set(loaded) == {"open t1"}
        assert {it[0] for it in sessions} == {"closed"}
