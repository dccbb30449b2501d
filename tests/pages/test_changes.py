"""I12, RFC 9111 §4.4: a change through a page's own URL, on a store that is slow or away."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from stillfresh import StoreError
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.pages.model import Message
from stillfresh.pages.on_demand import FIRST_PAUSE
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import turns, until
from tests.kit.isr import Site, Visitor, in_front


class Slow(MemoryStore):
    """Invalidations wait, or fail so often."""

    gate: asyncio.Event | None = None
    failures = 0
    steps = 0
    running = 0

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        self.steps += 1
        async with self._step():
            if self.failures:
                self.failures -= 1
                raise StoreError("away")
            await super().invalidate(kind, ids, soft=soft)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        async with self._step():
            return await super().invalidate_tag(tag, soft=soft)

    @asynccontextmanager
    async def _step(self) -> AsyncIterator[None]:
        self.running += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            yield
        finally:
            self.running -= 1

    async def settled(self) -> None:
        """Until no invalidation runs, and nothing begins another one."""
        await until(lambda: self.running == 0)
        await turns()
        await until(lambda: self.running == 0)
        await turns()


async def start_and_end(app: IsrMiddleware) -> None:
    """Go through the app's lifespan, as a server does."""
    steps = iter(["startup", "shutdown"])

    async def receive() -> Message:
        return {"type": f"lifespan.{next(steps)}"}

    async def send(_: Message) -> None:
        pass

    await app({"type": "lifespan"}, receive, send)


class TestI12FailingSite:
    async def test_a_page_from_before_a_change_is_not_served_instead_of_an_error(
        self, pages: PageCache, site: Site
    ) -> None:
        """Not the first one, nor those while its load cools down."""
        visit = in_front(site, pages)
        await visit()
        await visit(method="POST")
        site.status = 500
        assert [(await visit()).status_code for _ in range(3)] == [500, 503, 503]


class TestI12SlowStore:
    async def test_a_page_from_before_a_change_is_not_served_while_the_store_is_slow(
        self, site: Site, clock: ManualClock
    ) -> None:
        """The change is answered, its URL passes, and is kept again when the store knows."""
        store = Slow(clock=clock)
        async with PageCache(store, clock=clock, memory_for="10s", store_timeout=0.01) as pages:
            isr = IsrMiddleware(site, pages, routes={"/pricing": "60s", "/other": "60s"})
            visit = Visitor(isr)
            for _ in range(3):
                assert (await visit()).text == "page 1"
            await visit("/other")
            store.gate = asyncio.Event()
            assert (await visit(method="POST")).text == "page 3"
            for number in (4, 5):
                answer = await visit()
                assert answer.text == f"page {number}"
                assert answer.headers["cache-status"] == "stillfresh; fwd=bypass; detail=changed"
            assert "hit" in (await visit("/other")).headers["cache-status"]
            store.gate.set()
            await store.settled()
            assert (await visit()).text == "page 6"
            assert "hit" in (await visit()).headers["cache-status"]

    async def test_no_page_of_a_changed_group_is_served_while_the_store_is_slow(
        self, site: Site, clock: ManualClock
    ) -> None:
        """RFC 9875 §3: until the store knows, no page of that origin; another's is."""
        store = Slow(clock=clock)
        async with PageCache(store, clock=clock, memory_for="10s", store_timeout=0.01) as pages:
            isr = IsrMiddleware(site, pages)
            visit = Visitor(isr)
            site.says("Cache-Control: max-age=60", 'Cache-Groups: "g"')
            assert [(await visit(url)).text for url in ("/a", "http://b.example/a")] == [
                "page 1",
                "page 2",
            ]
            store.gate = asyncio.Event()
            site.says('Cache-Group-Invalidation: "g"')
            await visit("/other", method="POST")
            site.says("Cache-Control: max-age=60", 'Cache-Groups: "g"')
            assert (await visit("/a")).headers["cache-status"].endswith("detail=changed")
            assert (await visit("http://b.example/a")).text == "page 2"
            store.gate.set()
            await store.settled()
            assert [(await visit("/a")).text for _ in range(2)] == ["page 5", "page 5"]

    async def test_a_change_during_another_change_invalidates_again(
        self, site: Site, clock: ManualClock
    ) -> None:
        """The store may have done the first one before the second was made."""
        store = Slow(clock=clock)
        async with PageCache(store, clock=clock, store_timeout=0.01) as pages:
            isr = IsrMiddleware(site, pages, routes={"/pricing": "60s"})
            visit = Visitor(isr)
            await visit()
            store.gate = asyncio.Event()
            for _ in range(3):
                await visit(method="POST")
            assert store.steps == 1
            store.gate.set()
            await store.settled()
            assert store.steps == 2

    async def test_an_invalidation_that_failed_is_retried_with_pauses(
        self, site: Site, clock: ManualClock
    ) -> None:
        """With pauses; the page of before is not served in the meantime."""
        store, pauses, go = Slow(clock=clock), [], asyncio.Event()

        async def rest(pause: float) -> None:
            if pause in {FIRST_PAUSE, 2 * FIRST_PAUSE}:
                pauses.append(pause)
                await go.wait()
            else:
                await asyncio.Event().wait()

        async with PageCache(store, clock=clock, sleep=rest, store_timeout=0.01) as pages:
            isr = IsrMiddleware(site, pages, routes={"/pricing": "60s"})
            visit = Visitor(isr)
            await visit()
            store.failures = 2
            await visit(method="DELETE")
            assert (await visit()).text == "page 3"
            go.set()
            await until(lambda: store.steps == 3)
            await store.settled()
            assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE]
            assert (await visit()).text == "page 4"

    async def test_the_number_of_pending_changes_is_bounded(
        self,
        site: Site,
        clock: ManualClock,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Whoever posts to made-up URLs fills no memory."""
        monkeypatch.setattr("stillfresh.pages.on_demand.MOST_CHANGES", 2)
        store = Slow(clock=clock)
        async with PageCache(store, clock=clock, store_timeout=0.001) as pages:
            isr = IsrMiddleware(site, pages, routes={"/*": "60s"})
            store.gate = asyncio.Event()
            before = asyncio.all_tasks()
            for number in range(4):
                await Visitor(isr)(f"/{number}", method="POST")
            assert store.running == 2
            await start_and_end(isr)
            assert store.running == 0
            assert asyncio.all_tasks() <= before
        assert caplog.text.count("not invalidated: 2 wait") == 2
