"""E29 for pages: what goes out while the store cannot be asked."""

from collections.abc import AsyncIterator

import pytest

from stillfresh import Verdict
from stillfresh.pages import PageCache
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Sleeper
from tests.kit.held_store import SteppedStore
from tests.kit.isr import Site, as_it_says, in_front

AWAY = {"read", "acquire", "publish", "release", "renew"}


@pytest.fixture
def store(clock: ManualClock) -> SteppedStore:
    return SteppedStore(MemoryStore(clock=clock))


@pytest.fixture
async def pages(
    store: SteppedStore, clock: ManualClock, sleeper: Sleeper
) -> AsyncIterator[PageCache]:
    async with PageCache(store, clock=clock, sleep=sleeper, dice=lambda: 0.0) as pages:
        yield pages


class TestE29Pages:
    @pytest.mark.parametrize("age", [5, 70])
    async def test_an_unverified_page_of_a_route_has_no_lifetime_in_shared_caches(
        self, pages: PageCache, site: Site, store: SteppedStore, clock: ManualClock, age: int
    ) -> None:
        """Before and after the end of its own freshness."""
        visit = in_front(site, pages)
        fresh = (await visit()).headers["cache-control"]
        assert fresh == "public, max-age=0, s-maxage=60, stale-while-revalidate=604800"
        store.broken = AWAY
        clock.advance(age)
        answer = await visit()
        said = answer.headers["cache-control"]
        assert said == "public, max-age=0, s-maxage=0, stale-while-revalidate=604800"
        assert (answer.text, answer.headers["age"]) == ("page 1", f"{age}")
        assert answer.headers["cache-status"].startswith("stillfresh; hit; ttl=")
        assert int(answer.headers["cache-status"].rpartition("ttl=")[2]) <= 0

    async def test_an_unverified_page_of_a_site_has_no_lifetime_either(
        self, pages: PageCache, site: Site, store: SteppedStore, clock: ManualClock
    ) -> None:
        """The site's own fields are changed, and its age says the same."""
        visit = as_it_says(site, pages)
        site.says(
            "cache-control: public, max-age=30, s-maxage=60, stale-if-error=9",
            "cdn-cache-control: max-age=90",
            "expires: Tue, 14 Nov 2023 23:13:20 GMT",
        )
        await visit()
        store.broken = AWAY
        clock.advance(5)
        answer = await visit()
        assert answer.text == "page 1"
        said = answer.headers["cache-control"]
        assert said == "public, max-age=0, s-maxage=0, stale-if-error=9"
        assert answer.headers["cdn-cache-control"] == "max-age=0"
        assert "expires" not in answer.headers
        assert int(answer.headers["age"]) >= 90

    async def test_the_visitor_that_waited_for_it_gets_it_with_its_lifetime(
        self, pages: PageCache, site: Site, store: SteppedStore
    ) -> None:
        """It was rendered after that visitor had asked, so nothing is unverified."""
        store.broken = AWAY
        visit = in_front(site, pages)
        assert "s-maxage=60" in (await visit()).headers["cache-control"]
        assert "s-maxage=0" in (await visit()).headers["cache-control"]
        assert site.renders == 1

    async def test_a_page_for_the_app_says_that_it_is_unverified(
        self, pages: PageCache, site: Site, store: SteppedStore
    ) -> None:
        """`PageCache.get`: the app writes the fields, so it is told."""
        site.says("cache-control: s-maxage=60")
        first = await pages.get("/a", site.render, "1m")
        assert (first.verdict, first.unverified) == (Verdict.FRESH, False)
        store.broken = AWAY
        again = await pages.get("/a", site.render, "1m")
        assert (again.verdict, again.unverified) == (Verdict.STALE, True)
        assert again.headers.get("cache-control") == "s-maxage=0"

    async def test_an_outage_costs_one_render_for_a_page_and_its_freshness(
        self, pages: PageCache, site: Site, store: SteppedStore, clock: ManualClock
    ) -> None:
        """Ten minutes of visits, each second one."""
        visit = in_front(site, pages)
        await visit()
        store.broken = AWAY
        for _ in range(600):
            clock.advance(1)
            await visit()
            await pages.settled()
        assert site.renders <= 11
