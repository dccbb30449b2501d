"""I26: a site tags its own pages, and they are reached by these tags."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh.http.fields import TAG_FIELDS, strings
from stillfresh.pages import Page, PageCache
from stillfresh.pages.stored import site_tags
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, Visitor, as_it_says, in_front

FRESH = "Cache-Control: max-age=60"
TAGGED = [
    "Surrogate-Key: shop  eu",
    "Cache-Tag: shop, two words , eu",
    'Cache-Groups: "shop", "eu";x=1',
]
FIELDS = sorted(TAG_FIELDS)
GROUP = "cache-group-invalidation"


async def bodies(visit: Visitor, *urls: str, **options: Any) -> list[str]:
    return [(await visit(url, **options)).text for url in urls]


class TestI26SiteTags:
    @pytest.mark.parametrize("line", TAGGED)
    async def test_a_page_is_invalidated_by_any_tag_that_the_site_names(
        self, pages: PageCache, site: Site, line: str
    ) -> None:
        """By any of them, as asked and under a route; other pages stay."""
        for visit, says in ((as_it_says(site, pages), [FRESH]), (in_front(site, pages), [])):
            site.says(FRESH)
            await visit("/blog/a")
            site.says(*says, line)
            await visit("/pricing")
            for tag in ("shop", "eu"):
                before = site.renders
                assert len(await pages.revalidate_tag(tag)) == 1
                await visit("/pricing")
                assert await pages.settled()
                await visit("/blog/a")
                assert site.renders == before + 1
            assert len(await pages.purge("/pricing")) == 1

    async def test_tags_of_the_site_are_not_sent_to_clients(
        self, pages: PageCache, site: Site
    ) -> None:
        """On a miss, a hit, and what passes; nor is a page's own header lost."""
        visit = as_it_says(site, pages)
        for says in ([FRESH], ["Cache-Control: private"]):
            site.says(*says, *TAGGED, "X-Own: 1")
            for _ in range(2):
                answer = await visit(f"/{says[0][-3:]}")
                assert answer.headers["x-own"] == "1"
                names = {"surrogate-key", "cache-tag", "cache-groups"}
                assert names.isdisjoint(answer.headers)
        site.says("Cache-Tag: shop")
        assert "cache-tag" not in (await visit("/", method="POST")).headers
        served = await pages.get("/own", lambda: Page("x", headers={"cache-tag": "shop"}), "60s")
        assert "cache-tag" not in served.headers
        assert {*await pages.revalidate_tag("shop")} == {"/own", "http://example.com/=60"}

    async def test_tags_of_the_site_are_sent_with_expose_tags(
        self, clock: ManualClock, site: Site
    ) -> None:
        """`expose_tags`, for a cache behind this one."""
        async with PageCache("memory://", clock=clock, expose_tags=True) as pages:
            visit = as_it_says(site, pages)
            site.says(FRESH, *TAGGED)
            for _ in range(2):
                assert (await visit()).headers["surrogate-key"] == "shop  eu"
            site.says("Cache-Tag: shop")
            assert (await visit("/other")).headers["cache-tag"] == "shop"

    async def test_invalidating_a_tag_of_the_site_supersedes_a_running_render(
        self, pages: PageCache, site: Site
    ) -> None:
        """The tag was invalidated while the site made the page."""
        visit = as_it_says(site, pages)
        site.says(FRESH, "Cache-Tag: shop")
        rendering = await site.holding(visit())
        assert await pages.revalidate_tag("shop") == []
        site.let_go()
        assert (await rendering).text == "page 1"
        assert (await visit()).text == "page 2"

    async def test_a_304_without_tags_keeps_the_tags_of_the_page(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """A 304 without tags keeps those of the page, one with tags replaces them."""
        visit, etag = as_it_says(site, pages), 'ETag: "a"'
        site.says(FRESH, etag, "Cache-Tag: shop")
        site.validates = True
        await visit()
        for says, tag in (([], "shop"), (["Cache-Tag: us"], "us")):
            clock.advance(61)
            site.says(FRESH, etag, *says)
            assert (await visit()).status_code == 200
            await pages.settled()
            assert len(await pages.revalidate_tag(tag)) == 1
        assert await pages.revalidate_tag("shop") == []

    async def test_a_page_with_too_many_tags_is_not_cached(
        self, pages: PageCache, site: Site
    ) -> None:
        """A page that could not be reached by all its tags passes, and says why (I28)."""
        visit = as_it_says(site, pages)
        for tags in (" ".join(map(str, range(101))), "x" * 1_025):
            site.says(FRESH, f"Surrogate-Key: {tags}")
            for _ in range(2):
                assert "detail=tags" in (await visit()).headers["cache-status"]
        site.says(FRESH, f"Surrogate-Key: {' '.join(map(str, range(100)))}")
        await visit("/more")
        assert len(await pages.revalidate_tag("99")) == 1


class TestI26Groups:
    async def test_a_change_invalidates_the_groups_it_names(
        self, pages: PageCache, site: Site
    ) -> None:
        """RFC 9875 §3: of its own origin; an answer to a safe request says nothing."""
        here = as_it_says(site, pages)
        there = Visitor(here.app, "http://other.example")
        site.says(FRESH, 'Cache-Groups: "prices"')
        assert await bodies(here, "/a", "/b") == ["page 1", "page 2"]
        assert await bodies(there, "/a") == ["page 3"]
        site.says(FRESH, f'{GROUP}: "prices"')
        assert await bodies(here, "/safe") == ["page 4"]
        assert await bodies(here, "/a") == ["page 1"]
        assert (await here("/change", method="POST")).status_code == 200
        assert await bodies(here, "/a", "/b") == ["page 6", "page 7"]
        assert await bodies(there, "/a") == ["page 3"]

    async def test_a_failed_change_invalidates_no_groups(
        self, pages: PageCache, site: Site
    ) -> None:
        """Nor does a field that is not a list of strings."""
        visit = as_it_says(site, pages)
        site.says(FRESH, 'Cache-Groups: "prices"')
        await visit("/a")
        for status, value in ((500, '"prices"'), (200, '"prices", 5'), (200, "prices")):
            site.says(f"{GROUP}: {value}", status=status)
            await visit("/change", method="POST")
        assert await bodies(visit, "/a") == ["page 1"]

    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            ([b'"a", "b"'], ["a", "b"]),
            ([b'"a"', b'"b";x;y="z, \\"";q=1.5'], ["a", "b"]),
            ([b' "a\\"b\\\\" ,\t"" '], ['a"b\\', ""]),
            ([b""], []),
            ([b'"a",'], []),
            ([b'"a" "b"'], []),
            ([b'"a'], []),
            ([b"a"], []),
            ([b'"a", 1'], []),
            ([b'("a" "b")'], []),
            ([b'"\xc3\xa9"'], []),
            ([b'"a\\x"'], []),
        ],
    )
    def test_a_groups_field_that_is_no_list_of_strings_is_ignored(
        self, lines: list[bytes], expected: list[str]
    ) -> None:
        """RFC 9651: what does not parse is ignored whole."""
        assert strings(lines) == expected

    @given(
        st.lists(
            st.tuples(
                st.sampled_from([b"cache-tag", b"surrogate-key", b"cache-groups"]),
                st.binary(max_size=60),
            ),
            max_size=5,
        )
    )
    def test_any_bytes_in_a_tag_field_become_storable_tags(
        self, headers: list[tuple[bytes, bytes]]
    ) -> None:
        """T5: whatever a site says, its tags are texts that every store can keep."""
        for tag in site_tags(tuple(headers), "https://a.example/x"):
            assert tag.encode()
            assert tag.startswith(("tag:", "group:https://a.example "))
