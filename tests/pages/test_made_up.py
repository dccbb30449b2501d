"""I23: made-up paths below a route are cheap: kept for seconds, few at a time, and then gone."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stillfresh.pages import Page, PageCache, Route
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, as_it_says, in_front


def rows(file: Path) -> set[int]:
    """How many there are in each table of pages and tags."""
    named = "SELECT name FROM sqlite_master WHERE name LIKE '%page' OR name LIKE '%tags'"
    with closing(sqlite3.connect(file)) as connection:
        tables = [name for (name,) in connection.execute(named)]
        return {connection.execute(f'SELECT count(*) FROM "{it}"').fetchone()[0] for it in tables}


class TestI23MadeUpPaths:
    @pytest.mark.parametrize("status", [404, 410])
    @pytest.mark.parametrize("forward", ["request", "key"])
    async def test_a_missing_page_is_cached_for_absent_for(
        self, pages: PageCache, site: Site, clock: ManualClock, status: int, forward: Any
    ) -> None:
        """Ten seconds, whatever the route's duration; then it is asked for anew."""
        site.status = status
        visit = in_front(site, pages, routes={"/*": Route("1h", forward=forward)})
        first = await visit("/no")
        assert first.headers["cache-control"] == "public, max-age=0, s-maxage=10"
        clock.advance(9.5)
        assert (await visit("/no")).text == "page 1"
        clock.advance(1)
        site.status = 200
        assert (await visit("/no")).text == "page 2"

    async def test_a_missing_page_is_not_cached_longer_than_the_route_says(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """At most the route's duration; a function's page is no other."""
        site.status = 404
        visit = in_front(site, pages, routes={"/*": "2s"})
        await visit("/no")
        await pages.get("/fn", site.render, revalidate=2)
        clock.advance(3)
        assert (await visit("/no")).text == "page 3"
        assert (await pages.get("/fn", site.render, revalidate=2)).body == b"page 4"

    async def test_absent_for_sets_how_long_missing_pages_are_cached(
        self, site: Site, clock: ManualClock
    ) -> None:
        """`absent_for=`."""
        site.status = 404
        async with PageCache("memory://", clock=clock, absent_for="1m") as pages:
            visit = in_front(site, pages, routes={"/*": "1h"})
            await visit("/no")
            clock.advance(59)
            assert (await visit("/no")).text == "page 1"

    @pytest.mark.parametrize("route", [Route("1h"), Route()])
    async def test_rows_of_missing_pages_are_evicted(
        self, tmp_path: Path, site: Site, clock: ManualClock, route: Route
    ) -> None:
        """Once it is over nothing of it can be served, so eviction drops it."""
        site.says("Cache-Control: max-age=10", 'ETag: "1"', status=404)
        async with PageCache(f"sqlite:///{tmp_path}/p.db", clock=clock) as pages:
            visit = in_front(site, pages, routes={"/*": route})
            for number in range(20):
                await visit(f"/no/{number}")
            stats = (await pages.cache.stats()).store
            assert stats is not None
            assert stats.copies >= 20
            clock.advance(11)
            await pages.cache.evict()
        assert rows(tmp_path / "p.db") == {0}

    @pytest.mark.parametrize("route", [Route("1h"), Route("1h", forward="request"), Route()])
    async def test_the_number_of_cached_missing_pages_is_bounded(
        self,
        tmp_path: Path,
        site: Site,
        clock: ManualClock,
        monkeypatch: pytest.MonkeyPatch,
        route: Route,
    ) -> None:
        """Those beyond pass, each asked for once, and leave nothing; pages have their places."""
        monkeypatch.setattr("stillfresh.pages.page_cache.MAX_ERROR_PAGES", 3)
        site.says("Cache-Control: max-age=3600", status=404)
        async with PageCache(f"sqlite:///{tmp_path}/p.db", clock=clock) as pages:
            visit = as_it_says(site, pages, routes={"/*": route})
            answers = [await visit(f"/no/{number}") for number in range(10)]
            assert [it.text for it in answers] == [f"page {n + 1}" for n in range(10)]
            assert {it.status_code for it in answers} == {404}
            assert answers[-1].headers["cache-status"] == "stillfresh; fwd=miss; detail=full"
            assert pages.bypassed() == {"full": 7}
            site.status = 200
            for number in range(5):
                await visit(f"/yes/{number}")
                assert "hit" in (await visit(f"/yes/{number}")).headers["cache-status"]
            assert (await pages.get("/fn", lambda: Page("no", 404), revalidate=60)).status == 404
        assert max(rows(tmp_path / "p.db")) <= 2 * (3 + 5)

    async def test_a_page_that_became_404_is_not_served_though_the_limit_is_reached(
        self, site: Site, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What it said before is not served any more."""
        monkeypatch.setattr("stillfresh.pages.page_cache.MAX_ERROR_PAGES", 0)
        async with PageCache("memory://", clock=clock, stale_for=0) as pages:
            visit = in_front(site, pages)
            await visit()
            clock.advance(61)
            site.status = 404
            assert [(await visit()).status_code for _ in range(3)] == [404] * 3
