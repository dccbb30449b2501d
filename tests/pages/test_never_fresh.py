"""I31: pages that are never fresh, as FaceTheory and many others send them, cost little."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from stillfresh.pages import PageCache
from stillfresh.stores import WrappedStore
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, as_it_says

T = TypeVar("T")
NEVER = "Cache-Control: public, max-age=0, s-maxage=0, stale-if-error=60, must-revalidate"


class CountedStore(WrappedStore):
    """Counts the steps of a store."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(MemoryStore(clock=clock))
        self.steps: Counter[str] = Counter()

    async def step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        self.steps[name] += 1
        return await work()

    def writes(self) -> tuple[int, int]:
        return self.steps["acquire"], self.steps["publish"]


@pytest.fixture
def store(clock: ManualClock) -> CountedStore:
    return CountedStore(clock)


def visitor(site: Any, store: CountedStore, clock: ManualClock) -> Any:
    return as_it_says(site, PageCache(store, clock=clock))


class TestI31NeverFresh:
    @pytest.mark.parametrize("validates", [True, False])
    async def test_visits_within_half_a_minute_cost_one_lease_and_one_publication(
        self, site: Site, store: CountedStore, clock: ManualClock, validates: bool
    ) -> None:
        """Each visitor gets what the site says now, and the site is asked once for each."""
        site.says(NEVER, 'ETag: "one"')
        site.validates = validates
        visit = visitor(site, store, clock)
        assert (await visit()).text == "page 1"
        for number in range(2, 30):
            clock.advance(1)
            told = await visit()
            assert told.text == ("page 1" if validates else f"page {number}")
            assert told.headers["cache-status"] == "stillfresh; fwd=stale; detail=no-freshness"
            assert (site.renders, site.seen("if-none-match")) == (number, ['"one"'])
        assert store.writes() == (1, 1)
        clock.advance(2)
        await visit()
        assert store.writes() == (2, 2)

    async def test_a_visitor_who_has_the_page_already_gets_304(
        self, site: Site, store: CountedStore, clock: ManualClock
    ) -> None:
        """By the response of the site, not by the stored page."""
        site.says(NEVER, 'ETag: "one"')
        visit = visitor(site, store, clock)
        await visit()
        site.says(NEVER, 'ETag: "two"')
        clock.advance(1)
        assert (await visit(headers={"if-none-match": '"one"'})).status_code == 200
        assert (await visit(headers={"if-none-match": '"two"'})).status_code == 304

    async def test_the_stored_page_is_served_if_the_site_fails(
        self, site: Site, store: CountedStore, clock: ManualClock
    ) -> None:
        """Within `stale-if-error`. A load asks once more, with a lease, before that is decided."""
        site.says("Cache-Control: max-age=0, stale-if-error=60", 'ETag: "one"')
        visit = visitor(site, store, clock)
        await visit()
        clock.advance(1)
        site.says("Content-Type: text/plain", status=503)
        told = await visit()
        assert (told.status_code, told.text) == (200, "page 1")
        assert site.renders == 3
        clock.advance(61)
        assert (await visit()).status_code == 503

    async def test_an_invalidated_page_is_not_served_when_the_site_fails(
        self, site: Site, store: CountedStore, clock: ManualClock
    ) -> None:
        """The law: a page that was changed through its own URL is older than the change."""
        site.says("Cache-Control: max-age=0, stale-if-error=60", 'ETag: "one"')
        visit = visitor(site, store, clock)
        await visit()
        await visit(method="POST")
        clock.advance(1)
        site.says("Content-Type: text/plain", status=503)
        assert (await visit()).status_code == 503

    async def test_an_exception_of_the_app_reaches_the_visitor_of_a_no_cache_page(
        self, site: Site, store: CountedStore, clock: ManualClock
    ) -> None:
        """Where nothing may be served instead."""
        site.says("Cache-Control: no-cache", 'ETag: "one"')
        visit = visitor(site, store, clock)
        await visit()
        clock.advance(1)
        site.error = RuntimeError("no database")
        with pytest.raises(RuntimeError, match="no database"):
            await visit()

    async def test_a_never_fresh_page_that_becomes_private_goes_to_its_visitor(
        self, site: Site, store: CountedStore, clock: ManualClock
    ) -> None:
        """And says so."""
        site.says(NEVER, 'ETag: "one"')
        visit = visitor(site, store, clock)
        await visit()
        clock.advance(1)
        site.says("Cache-Control: private")
        told = await visit()
        assert told.text == "page 2"
        assert "detail=private" in told.headers["cache-status"]
        assert store.writes() == (1, 1)


class TestI12InvalidatedPages:
    async def test_an_invalidated_page_is_not_served_after_its_time_when_the_site_fails(
        self, site: Site, store: CountedStore, clock: ManualClock
    ) -> None:
        """I12: `stale-if-error` does not outlive a change through the page's own URL."""
        site.says("Cache-Control: max-age=10, stale-if-error=600", 'ETag: "one"')
        visit = visitor(site, store, clock)
        await visit()
        await visit(method="POST")
        site.says("Content-Type: text/plain", status=503)
        clock.advance(5)
        assert (await visit()).status_code == 503
        clock.advance(100)
        assert (await visit()).status_code == 503


class TestI31AskedAlone:
    """What was asked for without a lease is never stored, and holds nobody up."""

    async def test_an_older_error_is_not_stored_after_a_change(
        self, site: Site, store: CountedStore, clock: ManualClock
    ) -> None:
        """The law: it was asked for before the change, so nobody gets it after that as fresh."""
        gate = asyncio.Event()
        asked = asyncio.Event()
        gets = 0

        async def app(scope: Any, _: Any, send: Any) -> None:
            nonlocal gets
            status, field, body = 204, b"no-store", b""
            if scope["method"] == "GET":
                gets += 1
                status, field, body = 200, b"public, max-age=60", b"new"
                if gets == 1:
                    field = b"max-age=0"
                elif gets == 2:
                    asked.set()
                    await gate.wait()
                    status, body = 503, b"older"
            headers = [(b"cache-control", field)]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        visit = visitor(app, store, clock)
        await visit()
        clock.advance(1)
        early = asyncio.create_task(visit())
        await asked.wait()
        await visit(method="POST")
        gate.set()
        await early
        told = await visit()
        assert (told.status_code, told.text) == (200, "new")

    async def test_a_never_fresh_page_that_becomes_fresh_is_stored_by_the_next_visit(
        self, site: Site, store: CountedStore, clock: ManualClock
    ) -> None:
        """I34: this one says `remembered`, not `no-freshness`."""
        site.says(NEVER)
        visit = visitor(site, store, clock)
        await visit()
        clock.advance(1)
        site.says("Cache-Control: max-age=600")
        details = [(await visit()).headers["cache-status"] for _ in range(3)]
        assert details[0].endswith("detail=remembered")
        assert "stored" in details[1]
        assert details[2].startswith("stillfresh; hit")

    @pytest.mark.parametrize("wish", ["max-stale", "only-if-cached, max-stale=3600"])
    @pytest.mark.parametrize("lasts", [0, 1])
    async def test_an_invalidated_page_is_not_served_by_max_stale(
        self, site: Site, store: CountedStore, clock: ManualClock, wish: str, lasts: int
    ) -> None:
        """I12: whatever its own times are."""
        site.says(f"Cache-Control: public, max-age={lasts}")
        visit = visitor(site, store, clock)
        assert (await visit()).text == "page 1"
        await visit(method="POST")
        clock.advance(1.5)
        told = await visit(headers={"Cache-Control": wish})
        assert told.text != "page 1"
