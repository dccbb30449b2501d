"""I13, I16: what comes from outside takes so much room and no more, and locks nobody out."""

import pytest

from stillfresh.pages import IsrMiddleware, PageCache, Route
from stillfresh.pages.clients import UNUSED_FOR, BoundedNames, NamesOf
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, Visitor, as_it_says, in_front


async def kept(pages: PageCache) -> int:
    return (await pages.stats()).resources["page"].entries


class TestI13Seats:
    def test_the_name_unused_for_longest_is_replaced_after_a_while(self) -> None:
        """Not at once: whoever makes up names would push out those that are used."""
        names = BoundedNames(2)
        assert [names.has("a", 0.0), names.has("b", 1.0), names.has("c", 2.0)] == [
            True,
            True,
            False,
        ]
        assert names.has("a", 3.0)
        assert not names.has("c", UNUSED_FOR)
        assert names.has("c", 1.0 + UNUSED_FOR)
        assert names.has("a", 2.0 + UNUSED_FOR)
        assert not names.has("b", 2.5 + UNUSED_FOR)

    def test_a_name_requested_clearly_more_often_gets_a_place(self) -> None:
        """Names that are repeated just to hold their names keep out nobody who has visitors."""
        names = BoundedNames(10)
        now = 0.0
        for _ in range(5):
            for number in range(10):
                now += 40.0
                assert names.has(f"made up {number}", now)
        tries = [names.has("real", now + second) for second in range(10)]
        assert not any(tries[:2])
        assert all(tries[6:])

    def test_made_up_names_do_not_replace_used_ones(self) -> None:
        """However many they are, and however quiet the others."""
        names = BoundedNames(3)
        assert all(names.has(f"real {number}", 0.0) for number in range(3))
        assert not any(names.has(f"made up {number}", number / 10) for number in range(5_000))
        assert all(names.has(f"real {number}", UNUSED_FOR - 1) for number in range(3))
        assert len(names._waiting) <= 3

    def test_the_number_of_pages_with_places_is_bounded(self) -> None:
        """Who was asked for longest ago is forgotten first."""
        rooms = NamesOf(1, most=2)
        assert rooms.has("/a", "1", 0.0)
        assert rooms.has("/b", "1", 0.0)
        assert not rooms.has("/a", "2", 0.0)
        assert rooms.has("/c", "1", 0.0)  # in the place of /b
        assert not rooms.has("/a", "2", 0.0)
        assert rooms.has("/b", "2", 0.0)


class TestI13Bounds:
    async def test_a_new_variant_replaces_one_that_nobody_requests(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """Those who filled the page's places once do not keep others out for ever."""
        site.says("Vary: User-Agent")
        visit = in_front(site, pages, max_variants=2)

        async def text(agent: str) -> str:
            return (await visit(headers={"user-agent": agent} if agent else {})).text

        for agent in ("", "a", "b"):
            await text(agent)
        assert await text("new") != await text("new")
        clock.advance(UNUSED_FOR / 2)
        await text("a")
        clock.advance(UNUSED_FOR / 2)
        renders = [await text("new"), await text("new")]
        assert renders[0] == renders[1]
        assert await text("b") != await text("b")

    async def test_a_new_host_replaces_one_that_nobody_requests(
        self,
        pages: PageCache,
        site: Site,
        clock: ManualClock,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Made-up hosts keep a real one out for a while at most."""
        monkeypatch.setattr("stillfresh.pages.asgi.MAX_HOSTS", 3)
        visit = in_front(site, pages)
        for number in range(3):
            await visit(headers={"host": f"{number}.example"})
        real = {"host": "real.example"}
        assert "detail=full" in (await visit(headers=real)).headers["cache-status"]
        clock.advance(UNUSED_FOR)
        await visit(headers=real)
        assert "hit" in (await visit(headers=real)).headers["cache-status"]

    async def test_a_page_that_is_visited_keeps_its_places(
        self,
        pages: PageCache,
        site: Site,
        clock: ManualClock,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Also where every visit is a hit by the short way."""
        monkeypatch.setattr("stillfresh.pages.asgi.MAX_HOSTS", 2)
        routes = {"/blog/*": Route("1h", query=None)}
        visit = in_front(site, pages, routes=routes, max_queries=2)
        real = {"host": "real.example"}
        for host in ("real.example", "other.example"):
            for query in ("1", "2"):
                await visit(f"/blog/a?q={query}", headers={"host": host})
        for _ in range(15):
            clock.advance(60)
            for query in ("1", "2"):
                answer = await visit(f"/blog/a?q={query}", headers=real)
                assert "hit" in answer.headers["cache-status"]
            await visit("/blog/b", headers={"host": "other.example"})
        for query in ("3", "4"):
            passed = await visit(f"/blog/a?q={query}", headers=real)
            assert "bypass" in passed.headers["cache-status"]
        new = await visit("/blog/a", headers={"host": "new"})
        assert "detail=full" in new.headers["cache-status"]
        await visit("/blog/c", headers=real)
        assert "hit" in (await visit("/blog/c", headers=real)).headers["cache-status"]

    async def test_a_host_named_in_full_always_has_a_place(
        self, pages: PageCache, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those that a pattern allows share the places."""
        monkeypatch.setattr("stillfresh.pages.asgi.MAX_HOSTS", 1)
        visit = in_front(site, pages, hosts=["*.example.com", "example.com"])
        answers = [await visit(headers={"host": f"{it}.example.com"}) for it in range(3)]
        full = ["detail=full" in answer.headers["cache-status"] for answer in answers]
        assert full == [False, True, True]
        await visit(headers={"host": "example.com"})
        assert "hit" in (await visit(headers={"host": "example.com"})).headers["cache-status"]

    async def test_made_up_queries_beyond_the_limit_are_not_stored(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """So many for a path; those beyond pass for a while, other paths and no query do not."""
        routes = {"/blog/*": Route("60s", query=None)}
        visit = in_front(site, pages, routes=routes, max_queries=3)
        answers = [await visit(f"/blog/a?q={number}") for number in range(10)]
        assert {answer.status_code for answer in answers} == {200}
        assert await kept(pages) == 3
        assert answers[-1].headers["cache-status"] == "stillfresh; fwd=bypass; detail=full"
        assert "hit" in (await visit("/blog/a?q=0")).headers["cache-status"]
        for path in ("/blog/a", "/blog/b?q=9"):
            await visit(path)
            assert "hit" in (await visit(path)).headers["cache-status"]
        clock.advance(UNUSED_FOR)
        await visit("/blog/a?q=9")
        assert "hit" in (await visit("/blog/a?q=9")).headers["cache-status"]

    async def test_with_max_queries_zero_pages_with_a_query_are_not_cached(
        self, pages: PageCache, site: Site
    ) -> None:
        """Zero: pages with a query pass."""
        visit = as_it_says(site, pages, max_queries=0)
        site.says("Cache-Control: max-age=60")
        assert (await visit("/?a=1")).text != (await visit("/?a=1")).text

    async def test_long_urls_have_no_prepared_answer(self, pages: PageCache, site: Site) -> None:
        """They are served from the cache, and take no more memory than their pages do."""
        isr = IsrMiddleware(site, pages, routes={"/blog/*": "60s"})
        visit = Visitor(isr)
        for _ in range(3):
            for path in ("/blog/a", "/blog/" + "b" * 600, "/blog/c?" + "d" * 600):
                assert (await visit(path)).status_code == 200
        assert site.renders == 3
        assert [line[3] for line in isr._memo._known if line is not None] == ["/blog/a"]
