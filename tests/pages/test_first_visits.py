"""I13, I14: the first visit of a page that no route calls shareable; what is left in the store."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stillfresh.pages import Page, PageCache
from stillfresh.pages.clients import STANDS_FOR, Heard
from stillfresh.testing import ManualClock
from tests.kit.engine import turns
from tests.kit.isr import Site, as_it_says

COOKIE = {"cookie": "session=1"}


class TestI13FirstVisit:
    @pytest.mark.parametrize("line", ["Set-Cookie: a=1", "Cache-Control: private", "X-Nothing: 1"])
    @pytest.mark.parametrize("headers", [{}, COOKIE, {"authorization": "Basic x"}])
    @pytest.mark.parametrize("forward", ["request", "key"])
    async def test_a_first_visit_asks_the_site_once_if_the_response_is_personal(
        self, pages: PageCache, site: Site, line: str, headers: dict[str, str], forward: Any
    ) -> None:
        """The site is asked once for each visit, from the first on."""
        visit = as_it_says(site, pages, forward=forward)
        site.says(line)
        for number in (1, 2, 3):
            answer = await visit("/login?token=x", headers=headers)
            assert (answer.text, site.renders) == (f"page {number}", number)
            assert line.partition(":")[0] in answer.headers

    async def test_a_first_head_request_is_shared_with_get(
        self, pages: PageCache, site: Site
    ) -> None:
        """Also at the first visit, and the site is asked once."""
        visit = as_it_says(site, pages)
        site.says("Cache-Control: max-age=60")
        head = await visit(method="HEAD")
        assert (head.content, (await visit()).text, site.renders) == (b"", "page 1", 1)
        site.says("Cache-Control: no-store")
        assert (await visit("/private", method="HEAD")).content == b""
        assert site.renders == 2

    @pytest.mark.parametrize("forward", ["request", "key"])
    async def test_a_personal_first_response_goes_to_one_visitor_only(
        self, pages: PageCache, site: Site, forward: Any
    ) -> None:
        """Of a crowd, each has an answer of his own, and the site is asked no more than that."""
        visit = as_it_says(site, pages, forward=forward)
        site.says("Set-Cookie: a=1")
        site.hold()
        crowd = [asyncio.ensure_future(visit()) for _ in range(5)]
        await site.asked.wait()
        await turns(300)
        site.let_go()
        answers = await asyncio.gather(*crowd)
        assert len({answer.text for answer in answers}) == 5
        assert site.renders == 5

    async def test_a_response_that_varies_by_a_stripped_field_is_requested_again(
        self, pages: PageCache, site: Site
    ) -> None:
        """RFC 9110 §12.5.5: by its Vary, the visitor's own request would have got another."""
        visit = as_it_says(site, pages, forward="key")
        site.says("Set-Cookie: a=1", "Vary: Accept-Language, User-Agent")
        await visit(headers={"accept-language": "de"})
        assert site.seen("accept-language") == ["de"]
        await visit("/other")
        assert site.renders == 3

    async def test_a_visitor_with_a_cookie_is_passed_through_until_a_response_is_public(
        self, pages: PageCache, site: Site
    ) -> None:
        """Then it is rendered without who he is, once for everybody."""
        visit = as_it_says(site, pages, forward="key")
        site.says("Cache-Control: max-age=60")
        told = [(await visit(headers=COOKIE)).headers["cache-status"] for _ in range(3)]
        assert told == [
            "stillfresh; fwd=bypass; detail=remembered",
            "stillfresh; fwd=miss; stored; ttl=60",
            "stillfresh; hit; ttl=60",
        ]
        assert site.seen("cookie", 1) == []

    async def test_a_stored_page_is_served_to_visitors_with_cookies(
        self, pages: PageCache, site: Site
    ) -> None:
        """Whoever rendered it, in whichever process."""
        site.says("Cache-Control: max-age=60")
        await as_it_says(site, pages)()
        another = as_it_says(site, pages)
        assert "hit" in (await another(headers=COOKIE)).headers["cache-status"]

    async def test_a_private_page_that_becomes_public_is_shared(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """By the word of an answer; of one that knew who asked, a while after a private render."""
        visit = as_it_says(site, pages, forward="key")
        site.says("Cache-Control: private")
        await visit()
        site.says("Cache-Control: max-age=60")
        for _ in range(3):
            assert "bypass" in (await visit(headers=COOKIE)).headers["cache-status"]
        clock.advance(STANDS_FOR)
        told = [(await visit(headers=COOKIE)).headers["cache-status"] for _ in range(3)]
        assert ["bypass" in it for it in told] == [True, False, False]
        assert "hit" in told[2]
        site.says("Cache-Control: private")
        await visit("/b")
        clock.advance(5)
        site.says("Cache-Control: max-age=60")
        told = [(await visit("/b")).headers["cache-status"] for _ in range(3)]
        assert ["bypass" in it for it in told] == [True, False, False]

    async def test_a_public_page_that_becomes_private_is_not_served_any_more(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """Not even if the site fails later."""
        visit = as_it_says(site, pages)
        site.says('ETag: "1"', "Cache-Control: max-age=10, stale-if-error=600")
        await visit()
        clock.advance(11)
        site.says("Cache-Control: private")
        assert (await visit()).text != "page 1"
        site.status = 500
        assert (await visit()).status_code == 500

    def test_what_is_remembered_of_a_page_is_bounded_in_time_and_number(self) -> None:
        """No answer to one visitor outweighs a render; the oldest is forgotten."""
        heard = Heard(2)
        heard.rendered("a", 0.0, is_shared=False)
        heard.stated("a", STANDS_FOR - 1, is_personal=True)
        assert heard.is_private("a") is True
        heard.stated("a", STANDS_FOR, is_personal=True)
        assert heard.is_private("a") is False
        heard.rendered("a", 50.0, is_shared=True)
        assert heard.is_private("a") is None
        for name in "bcd":
            heard.rendered(name, 60.0, is_shared=False)
        assert [heard.is_private(name) for name in "bcd"] == [None, True, True]


class TestI13NothingLeft:
    async def test_unknown_paths_leave_nothing_in_the_store(
        self, tmp_path: Path, clock: ManualClock, site: Site
    ) -> None:
        """Whoever makes up paths makes no rows, in any table."""
        site.status = 404
        async with PageCache(f"sqlite:///{tmp_path}/p.db", clock=clock) as pages:
            visit = as_it_says(site, pages)
            for number in range(20):
                assert (await visit(f"/no/{number}")).status_code == 404
        with closing(sqlite3.connect(tmp_path / "p.db")) as file:
            named = "SELECT name FROM sqlite_master WHERE name LIKE '%page' OR name LIKE '%tags'"
            tables = [name for (name,) in file.execute(named)]
            rows = [file.execute(f'SELECT count(*) FROM "{it}"').fetchone()[0] for it in tables]
        assert len(tables) >= 2
        assert set(rows) == {0}

    async def test_memory_keeps_at_most_max_entries_pages(
        self, clock: ManualClock, site: Site
    ) -> None:
        """`max_entries` holds for `memory://` itself, too."""
        async with PageCache("memory://", clock=clock, max_entries=10) as pages:
            visit = as_it_says(site, pages)
            site.says("Cache-Control: max-age=60")
            for number in range(40):
                await visit(f"/{number}")
                await pages.get(f"/fn/{number}", lambda: Page("x"), revalidate=60)
            stats = await pages.stats()
        assert stats.store is not None
        assert stats.store.copies <= 10
