"""I11, I14: what was outdated early is kept by nobody: other caches, browsers, other processes."""

import asyncio
from pathlib import Path

import pytest

from stillfresh.http.fields import http_date_text
from stillfresh.http.freshness import longest_lifetime
from stillfresh.pages import PageCache
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, as_it_says, in_front


async def idle(pages: PageCache) -> None:
    while (await pages.stats()).resources["page"].loading:
        await asyncio.sleep(0)


def lines(*fields: str) -> tuple[tuple[bytes, bytes], ...]:
    pairs = (field.partition(": ") for field in fields)
    return tuple((name.lower().encode(), value.encode()) for name, _, value in pairs)


class TestI14Outdated:
    @pytest.mark.parametrize(
        "says",
        [
            ["Cache-Control: max-age=60, stale-while-revalidate=60"],
            ["Cache-Control: max-age=600, s-maxage=60, stale-while-revalidate=60"],
            ["Cache-Control: max-age=60, stale-while-revalidate=60", "Age: 40"],
            [
                "Cache-Control: max-age=600",
                "CDN-Cache-Control: max-age=9, stale-while-revalidate=9",
            ],
        ],
    )
    async def test_an_invalidated_pages_age_shows_that_its_lifetime_is_over(
        self, pages: PageCache, site: Site, says: list[str]
    ) -> None:
        """RFC 9111 §5.2: what the site said is passed on as it is, so the age has to say it."""
        site.says(*says)
        visit = as_it_says(site, pages)
        first = await visit()
        told = longest_lifetime(lines(*says))
        assert int(first.headers["age"]) < told
        await pages.revalidate("/pricing")
        stale = await visit()
        assert stale.headers["cache-control"] == first.headers["cache-control"]
        assert int(stale.headers["age"]) >= told
        await idle(pages)
        assert int((await visit()).headers["age"]) < told

    @pytest.mark.parametrize(
        ("says", "expected"),
        [
            ((), 0),
            (("Cache-Control: no-cache",), 0),
            (("Cache-Control: max-age=5, s-maxage=7",), 7),
            (("Cache-Control: max-age=9", "CDN-Cache-Control: max-age=3"), 9),
            (
                (
                    f"Expires: {http_date_text(90.0).decode()}",
                    f"Date: {http_date_text(30.0).decode()}",
                ),
                60,
            ),
            ((f"Expires: {http_date_text(90.0).decode()}",), 0),
        ],
    )
    def test_the_longest_lifetime_covers_every_statement_of_a_response(
        self, says: tuple[str, ...], expected: float
    ) -> None:
        """By whichever of its statements a cache or a browser goes."""
        assert longest_lifetime(lines(*says)) == expected

    @pytest.mark.parametrize("says", ["max-age=0", "s-maxage=0", "max-age=60, s-maxage=0"])
    async def test_a_never_fresh_page_is_requested_at_each_visit(
        self, pages: PageCache, site: Site, says: str
    ) -> None:
        """With a validator it is kept to be compared, without one it is not kept at all."""
        site.says(f"Cache-Control: {says}")
        visit = as_it_says(site, pages)
        texts = [(await visit()).text for _ in range(3)]
        assert len(set(texts)) == 3
        site.says(f"Cache-Control: {says}", 'ETag: "v1"')
        site.validates = True
        await pages.purge("/pricing")
        visit = as_it_says(site, pages)
        before = site.renders
        assert len({(await visit()).text for _ in range(3)}) == 1
        assert site.renders == before + 3
        site.error = RuntimeError("away")
        with pytest.raises(RuntimeError):
            await visit()

    async def test_a_routes_duration_overrides_max_age_0(
        self, pages: PageCache, site: Site
    ) -> None:
        """Its duration is the site's own decision; what is told behind is by it."""
        site.says("Cache-Control: max-age=0, s-maxage=0")
        visit = in_front(site, pages)
        pages_told = [await visit() for _ in range(2)]
        assert {page.text for page in pages_told} == {"page 1"}
        assert "s-maxage=60" in pages_told[1].headers["cache-control"]

    async def test_a_page_with_only_stale_while_revalidate_is_served_and_refreshed(
        self, pages: PageCache, site: Site
    ) -> None:
        """RFC 5861 §3: `max-age=0, stale-while-revalidate=60` says exactly that."""
        site.says("Cache-Control: max-age=0, stale-while-revalidate=60")
        visit = as_it_says(site, pages)
        assert [(await visit()).text for _ in range(2)] == ["page 1", "page 1"]
        await idle(pages)
        assert (await visit()).text == "page 2"
        await idle(pages)


class TestI11TwoProcesses:
    @pytest.mark.parametrize("memory_for", [0, 1])
    async def test_a_page_purged_in_one_process_gets_no_304_in_another(
        self, tmp_path: Path, site: Site, clock: ManualClock, memory_for: int
    ) -> None:
        """No 304 for the ETag of a page that is gone, but for as long as memory may lag."""
        url = f"sqlite:///{tmp_path}/pages.db"
        async with (
            PageCache(url, clock=clock, memory_for=memory_for) as one,
            PageCache(url, clock=clock, memory_for=memory_for) as two,
        ):
            here, there = in_front(site, one), in_front(site, two)
            etag = (await here()).headers["etag"]
            asked = {"if-none-match": etag}
            assert (await there(headers=asked)).status_code == 304
            assert (await there()).text == "page 1"
            await one.purge("/pricing")
            clock.advance(memory_for)
            page = await there(headers=asked)
            assert (page.status_code, page.text) == (200, "page 2")
            assert page.headers["etag"] != etag

    async def test_a_page_purged_in_one_process_is_not_validated_by_another(
        self, tmp_path: Path, site: Site, clock: ManualClock
    ) -> None:
        """Gone is gone: the copy that memory still holds is not brought back by a 304."""
        url = f"sqlite:///{tmp_path}/pages.db"
        site.says('ETag: "v1"', "Cache-Control: max-age=60")
        site.validates = True
        async with PageCache(url, clock=clock) as one, PageCache(url, clock=clock) as two:
            here, there = as_it_says(site, one), as_it_says(site, two)
            await here()
            await there()
            await one.purge("/pricing")
            assert (await there()).text == "page 2"
            assert site.seen("if-none-match") == []
