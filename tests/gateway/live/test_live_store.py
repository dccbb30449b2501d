"""G3: over a store that keeps what it keeps in its own way, and fails now and then."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stillfresh import Cache, StoreError
from stillfresh.gateway.live import Hub, Live, connection
from tests.kit.cli import said
from tests.kit.live import Upstream, served, viewing


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'live.db'}"


@pytest.fixture
async def cache(url: str) -> AsyncIterator[Cache]:
    async with Cache(url) as cache:
        yield cache


@pytest.fixture
async def other(url: str) -> AsyncIterator[Hub]:
    """Another process's view of the same store."""
    async with Cache(url) as cache:
        yield Hub(cache, kinds=Upstream().kinds())


async def fail_once(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The next reads fail, as many as are in the list."""
    left: list[int] = []
    runtime = await cache.runtime()
    read, read_now = runtime.store.read, runtime.read_now
    assert read_now is not None

    def fail() -> None:
        if left:
            left.pop()
            raise StoreError("away for a moment")

    async def reads(*args: Any, **options: Any) -> Any:
        fail()
        return await read(*args, **options)

    def reads_now(*args: Any, **options: Any) -> Any:
        fail()
        return read_now(*args, **options)

    monkeypatch.setattr(runtime.store, "read", reads)
    object.__setattr__(runtime, "read_now", reads_now)
    monkeypatch.setattr(connection, "SHORTEST_PAUSE", 0.01)
    return left


class TestG3Store:
    async def test_a_pushed_copy_has_the_same_time_as_the_stored_one(self, cache: Cache) -> None:
        """As it was pushed, and as the store has it: one time, not two."""
        live = Live(Hub(cache, kinds=Upstream().kinds()))
        async with served(live, lifespan="off") as port:
            for number in range(5):
                async with viewing(port) as viewer:
                    await viewer.watch(f"p{number}")
                    had = (await viewer.hear())["fetched_at"]
                async with viewing(port) as viewer:
                    await viewer.say("subscribe", items=[["price", f"p{number}", had]])
                    await viewer.nothing()
        await live.close()

    async def test_a_subscription_is_answered_after_failed_store_reads(
        self, cache: Cache, other: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who subscribes meanwhile is told as soon as the store can say."""
        await other.get("word", "a")
        live = Live(Hub(cache, kinds=Upstream().kinds()))
        left = await fail_once(cache, monkeypatch)
        async with served(live, lifespan="off") as port, viewing(port) as viewer:
            for fails in (1, 2, 3):
                left[:] = [0] * fails
                await viewer.watch("a", kind="word")
                assert (await viewer.hear())["value"] == "a 1"
                await viewer.say("unsubscribe", items=[["word", "a"]])
        await live.close()

    async def test_a_client_that_returns_during_an_outage_hears_what_changed(
        self, cache: Cache, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Is told what changed, though memory has an old copy that is fresh."""
        live = Live(Hub(cache, kinds=Upstream().kinds()))
        upstream = Upstream()
        left = await fail_once(cache, monkeypatch)
        async with served(live, lifespan="off") as port, viewing(port) as viewer:
            await viewer.watch("a", kind="word")
            await viewer.hear()
            await viewer.say("visible", visible=False)
            await viewer.nothing()
            upstream.version = 2
            async with Cache(url) as second:
                await Hub(second, kinds=upstream.kinds()).resource("word").refresh("a")
            left[:] = [0]
            await viewer.say("visible", visible=True)
            assert (await viewer.hear())["value"] == "a 2"
        await live.close()


class TestS10Viewers:
    @pytest.mark.parametrize("server", ["valkey", "postgres"])
    async def test_a_viewer_sees_what_the_command_line_invalidates(
        self, server: str, request: pytest.FixtureRequest
    ) -> None:
        """At once, not at the end of freshness: the gateway hears of it from the server."""
        there, upstream = request.getfixturevalue(server), Upstream()
        url = there.new_store() if server == "postgres" else there.url()
        async with Cache(url) as cache:
            live = Live(Hub(cache, kinds=upstream.kinds()))
            async with served(live, lifespan="off") as port, viewing(port) as viewer:
                await viewer.watch("p1")
                assert (await viewer.hear())["value"]["n"] == 1
                news = (await cache.runtime()).news
                assert news is not None
                while news.proved_at < news.since:
                    await asyncio.sleep(0)
                upstream.version = 2
                await asyncio.to_thread(said, "invalidate", url, "price", "p1")
                assert (await viewer.hear())["value"]["n"] == 2
            await live.close()
