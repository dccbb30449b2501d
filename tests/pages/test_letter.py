"""I25: a shared cache by RFC 9111, in front of a site that is asked with the visitor's request."""

import asyncio
from typing import Any

import pytest

from stillfresh.http.fields import http_date_text
from stillfresh.pages import PageCache
from stillfresh.pages.parts import MOST_SPANS
from stillfresh.testing import ManualClock
from tests.kit.engine import idle, turns
from tests.kit.isr import Site, Visitor, as_it_says, in_front

FRESH = "Cache-Control: max-age=60"
ERRORS = [500, 501, 502, 503, 504, 599]


def date(clock: ManualClock, ago: float = 0.0) -> str:
    return http_date_text(clock() - ago).decode()


class TestI25Statuses:
    @pytest.mark.parametrize(
        "status", [200, 203, 204, 299, 301, 302, 303, 307, 308, 400, 404, 410, 451, 499, *ERRORS]
    )
    @pytest.mark.parametrize("forward", ["request", "key"])
    async def test_a_response_of_any_status_is_cached_as_long_as_it_says(
        self, pages: PageCache, site: Site, clock: ManualClock, status: int, forward: Any
    ) -> None:
        """RFC 9111 §3: with explicit freshness, one request until that is over, then another."""
        site.says(FRESH, status=status)
        visit = as_it_says(site, pages, forward=forward)
        assert {(await visit()).status_code for _ in range(3)} == {status}
        assert site.renders == 1
        clock.advance(60)
        await visit()
        assert site.renders == 2

    @pytest.mark.parametrize("status", ERRORS)
    async def test_concurrent_visitors_of_a_cacheable_error_are_one_request(
        self, pages: PageCache, site: Site, status: int
    ) -> None:
        """It is a page like any other."""
        site.says(FRESH, status=status)
        visit = as_it_says(site, pages)
        site.hold()
        crowd = [asyncio.ensure_future(visit()) for _ in range(4)]
        await site.asked.wait()
        await turns(300)
        site.let_go()
        assert {it.status_code for it in await asyncio.gather(*crowd)} == {status}
        assert site.renders == 1

    async def test_an_error_does_not_replace_a_page_within_stale_if_error(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """RFC 5861 §4: within `stale-if-error` the page goes on; past it, the error is kept."""
        site.says("Cache-Control: max-age=10, stale-if-error=20")
        visit = as_it_says(site, pages)
        await visit()
        site.says(FRESH, status=503)
        clock.advance(15)
        assert (await visit()).text == "page 1"
        clock.advance(20)
        assert [(await visit()).status_code for _ in range(2)] == [503, 503]
        assert site.renders == 3

    @pytest.mark.parametrize("status", [500, 503])
    async def test_under_a_route_no_error_is_cached(
        self, pages: PageCache, site: Site, status: int
    ) -> None:
        """I8: by a route's own duration an error is a failure, whatever it says."""
        site.says(FRESH, status=status)
        visit = in_front(site, pages)
        assert (await visit()).status_code == status
        assert (await visit()).status_code == 503
        assert site.renders == 1


class TestI25Heuristic:
    @pytest.mark.parametrize(
        ("status", "lines", "is_kept"),
        [
            (200, [], True),
            (203, [], True),
            (301, [], True),
            (404, [], True),
            (501, [], True),
            (201, [], False),
            (302, [], False),
            (403, [], False),
            (503, [], False),
            (302, ["Cache-Control: public"], True),
            (200, ["Cache-Control: no-cache"], False),
            (200, ["Cache-Control: private"], False),
            (200, ["Expires: 0"], False),
            (200, ["Vary: *"], False),
        ],
    )
    async def test_heuristic_freshness_is_for_some_responses_only(
        self,
        pages: PageCache,
        site: Site,
        clock: ManualClock,
        status: int,
        lines: list[str],
        *,
        is_kept: bool,
    ) -> None:
        """RFC 9111 §4.2.2: statuses that allow it, or `public`, and no word against it."""
        site.says(f"Last-Modified: {date(clock, 1_000)}", f"Date: {date(clock)}", *lines)
        site.status = status
        visit = as_it_says(site, pages, heuristic=True)
        clock.advance(99)
        await visit()
        assert ((await visit()).text == "page 1") is is_kept

    async def test_heuristic_freshness_is_a_tenth_of_the_age_and_a_day_at_most(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """And never without `heuristic=True`, nor without a date."""
        for ago, kept in ((1_000, 100), (100 * 86_400, 86_400), (-1_000, 0)):
            site.says(f"Last-Modified: {date(clock, ago)}", f"Date: {date(clock)}")
            visit = as_it_says(site, pages, heuristic=True)
            told = (await visit(f"/{ago}")).headers["cache-status"]
            assert told.endswith(f"ttl={kept}")
        before = site.renders
        for lines, options in (
            ([f"Last-Modified: {date(clock, 1_000)}"], {}),
            (["Last-Modified: yesterday"], {"heuristic": True}),
            (["X-Says: nothing"], {"heuristic": True}),
        ):
            site.says(*lines)
            visit = as_it_says(site, pages, **options)
            for _ in range(2):
                assert "no-freshness" in (await visit("/b")).headers["cache-status"]
        assert site.renders == before + 6


class TestI25Targeted:
    @pytest.mark.parametrize(
        ("field", "common", "is_kept"),
        [
            ("max-age=60", "max-age=0", True),
            ("max-age=60", "no-store", True),
            ("max-age=60", "private", True),
            ("max-age=60;a=b, ext=(a b);c", "no-store", True),
            ("max-age=0, max-age=60", "no-store", True),
            ("max-age=60, public=?1, s=:AAA=:, t=tok/en", "no-store", True),
            ("max-age=0", "max-age=60", False),
            ("no-store", "max-age=60", False),
            ("private", "max-age=60", False),
            ("public", "max-age=60", False),
            ("max-age=60, &&&", "no-store", False),
            ("max-age=60, &&&", "max-age=60", True),
            ("Max-Age=0", "max-age=60", True),
            ("max-age =0", "max-age=60", True),
            ("max-age= 0", "max-age=60", True),
            ('max-age="0"', "max-age=60", True),
            ("max-age=0.5", "max-age=60", True),
            ("max-age=0,", "max-age=60", True),
            ("", "max-age=60", True),
            ("max-age=-1", "max-age=60", False),
            ("max-age=99999999999", "no-store", True),
            ("max-age=1" + "0" * 15, "no-store", False),
        ],
    )
    async def test_a_well_formed_cdn_cache_control_replaces_cache_control_and_expires(
        self, pages: PageCache, site: Site, field: str, common: str, *, is_kept: bool
    ) -> None:
        """I34, RFC 9213 §2: a structured field; one that is malformed or empty is ignored whole."""
        lines = [f"CDN-Cache-Control: {field}", f"Cache-Control: {common}"]
        site.says(*lines, "Expires: Thu, 01 Jan 1970 00:00:00 GMT")
        visit = as_it_says(site, pages)
        page = await visit()
        assert page.headers["cdn-cache-control"] == field
        assert ((await visit()).text == "page 1") is is_kept

    @pytest.mark.parametrize(
        ("field", "common", "is_kept"),
        [
            ("max-age=60", "max-age=0", False),
            ("max-age=0", "max-age=60", True),
            ("max-age=60", "no-store", False),
            ("no-store", "max-age=60", False),
        ],
    )
    async def test_without_cdn_override_cdn_cache_control_can_only_forbid(
        self, pages: PageCache, site: Site, field: str, common: str, *, is_kept: bool
    ) -> None:
        """I34: `Cache-Control` decides; only a refusal counts from both (I13)."""
        site.says(f"CDN-Cache-Control: {field}", f"Cache-Control: {common}")
        visit = as_it_says(site, pages, cdn_override=False)
        await visit()
        assert ((await visit()).text == "page 1") is is_kept

    async def test_a_page_cached_by_cdn_cache_control_is_served_by_it(
        self, pages: PageCache, site: Site
    ) -> None:
        """RFC 9111 §3.5: `public` there allows it for clients with credentials, too."""
        site.says("CDN-Cache-Control: max-age=60, public", "Cache-Control: no-store")
        visit = as_it_says(site, pages)
        sent: list[dict[str, str]] = [{}, {"authorization": "Basic x"}, {"cookie": "a=1"}]
        assert {(await visit(headers=it)).text for it in sent} == {"page 1"}


class TestI25Directives:
    @pytest.mark.parametrize(
        ("status", "said", "is_kept"),
        [
            (200, "must-understand, no-store, max-age=60", True),
            (404, "no-store, must-understand, max-age=60", True),
            (299, "must-understand, no-store, max-age=60", False),
            (299, "must-understand, max-age=60", False),
            (299, "max-age=60", True),
            (200, "must-understand, private, max-age=60", False),
            (200, "must-understand, no-store", False),
        ],
    )
    async def test_must_understand_overrides_no_store_for_known_statuses(
        self, pages: PageCache, site: Site, status: int, said: str, *, is_kept: bool
    ) -> None:
        """RFC 9111 §5.2.2.3: it overrides `no-store` for statuses that are known here only."""
        site.says(f"Cache-Control: {said}", status=status)
        visit = as_it_says(site, pages)
        await visit()
        assert ((await visit()).text == "page 1") is is_kept

    @pytest.mark.parametrize(
        ("lines", "ttl"),
        [
            (["max-age=60, max-age=5"], 60),
            (["max-age=60", "max-age=5"], 60),
            (["max-age=5, max-age=60"], 5),
            (['max-age="60"'], 60),
            (["MAX-AGE=60"], 60),
            (["max-age=0060"], 60),
            (["max-age=60;5"], None),
            (["max-age=-60"], None),
            (["max-age=60.5"], None),
            (["max-age='60'"], None),
            (["max-age=6e1"], None),
            (["max-age="], None),
            (["max-age"], None),
            (["max-age=60s"], None),
            ([f"max-age={2**31}"], 2**31),
            ([f"max-age={10**40}"], 2**31),
            (['ext="max-age=600", max-age=60'], 60),
            (['ext="a, max-age=600, b=\\"c", max-age=60'], 60),
            ([",, max-age=60 ,,"], 60),
            (["max-age=60, s-maxage=5"], 5),
            (["max-age=60, s-maxage=x"], None),
            (["no-cache, max-age=60"], None),
            (['no-cache="x-a", max-age=60'], None),
        ],
    )
    async def test_the_first_of_duplicate_directives_counts_and_malformed_ones_are_stale(
        self, pages: PageCache, site: Site, lines: list[str], ttl: int | None
    ) -> None:
        """RFC 9111 §4.2.1: the first of several counts, what cannot be read leaves nothing."""
        site.says(*(f"Cache-Control: {line}" for line in lines))
        visit = as_it_says(site, pages)
        first = (await visit()).headers["cache-status"]
        if ttl is None:
            assert "no-freshness" in first
            assert (await visit()).text == "page 2"
        else:
            assert first.endswith(f"stored; ttl={ttl}")
            assert (await visit()).text == "page 1"

    @pytest.mark.parametrize(
        ("age", "ttl"),
        [
            (["10"], 50),
            (["10, 50"], 50),
            (["10", "50"], 50),
            (["-10"], 60),
            (["1.5"], 60),
            (["x"], 60),
            ([""], 60),
            (["060"], 0),
            (["300"], -240),
            ([str(10**30)], 60 - 2**31),
        ],
    )
    async def test_the_age_field_of_a_response_counts(
        self, pages: PageCache, site: Site, age: list[str], ttl: int
    ) -> None:
        """RFC 9111 §5.1: the first of several; what is no number is ignored; told on a miss."""
        site.says(FRESH, 'ETag: "v1"', *(f"Age: {it}" for it in age))
        page = await as_it_says(site, pages)()
        assert page.headers["age"] == str(60 - ttl)
        assert page.headers["cache-status"].endswith(f"; ttl={ttl}")

    @pytest.mark.parametrize(("age", "waits"), [(300, 0), (100, 200), (0, 300)])
    async def test_max_stale_counts_the_age_that_a_response_came_with(
        self, pages: PageCache, site: Site, clock: ManualClock, age: int, waits: float
    ) -> None:
        """§5.2.1.2: past its lifetime by 240 s, wherever it grew old."""
        site.says(FRESH, 'ETag: "v1"', f"Age: {age}")
        visit = as_it_says(site, pages)
        await visit()
        clock.advance(waits)
        accepted = await visit(headers={"cache-control": "max-stale=240"})
        assert accepted.headers["cache-status"] == "stillfresh; hit; ttl=-240"
        assert site.renders == 1
        asked = await visit(headers={"cache-control": "max-stale=239"})
        assert "fwd=stale" in asked.headers["cache-status"]
        assert site.renders == 2

    async def test_the_time_that_a_response_took_is_part_of_its_age(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """RFC 9111 §4.2.3: it counts from when it was asked for."""
        site.says(FRESH, "Age: 10")
        visit = as_it_says(site, pages)
        asking = await site.holding(visit())
        clock.advance(3)
        site.let_go()
        page = await asking
        assert (page.headers["age"], page.headers["cache-status"][-6:]) == ("13", "ttl=47")

    @pytest.mark.parametrize(
        ("ago", "age"), [(10, 10), (-10, 0), (0, 0)], ids=["behind", "ahead", "right"]
    )
    async def test_an_older_date_is_an_age_and_a_later_date_is_none(
        self, pages: PageCache, site: Site, clock: ManualClock, ago: float, age: int
    ) -> None:
        """RFC 9111 §4.2.3: an older Date is an age; one ahead of us is none."""
        site.says(FRESH, f"Date: {date(clock, ago)}")
        page = await as_it_says(site, pages)()
        assert int(page.headers["age"]) == age

    @pytest.mark.parametrize("said", ['no-cache="x-own"', 'private="x-own"'])
    async def test_private_and_no_cache_with_field_names_count_as_plain_ones(
        self, pages: PageCache, site: Site, said: str
    ) -> None:
        """RFC 9111 §5.2.2.4, §5.2.2.7: a field that is named goes to nobody but its visitor."""
        site.says(f"Cache-Control: max-age=60, {said}", "X-Own: 1")
        visit = as_it_says(site, pages)
        assert [(await visit()).text for _ in range(2)] == ["page 1", "page 2"]

    async def test_pragma_and_warning_of_a_response_are_passed_on_and_ignored(
        self, pages: PageCache, site: Site
    ) -> None:
        """RFC 9111 §5.4, §5.5: `Pragma` in a response, and `Warning`."""
        site.says(FRESH, "Pragma: no-cache", 'Warning: 110 - "stale"')
        visit = as_it_says(site, pages)
        for _ in range(2):
            page = await visit()
            assert page.text == "page 1"
            assert (page.headers["pragma"], page.headers["warning"][:3]) == ("no-cache", "110")


class TestI25Validation:
    async def test_without_last_modified_the_date_answers_if_modified_since(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """RFC 9111 §4.3.2: 304 for `If-Modified-Since` by `Date`, from then on."""
        site.says(FRESH, f"Date: {date(clock)}")
        visit = as_it_says(site, pages)
        await visit()
        for ago, status in ((0, 304), (-5, 304), (5, 200)):
            asked = {"if-modified-since": date(clock, ago)}
            assert (await visit(headers=asked)).status_code == status
        assert site.renders == 1

    async def test_a_no_cache_request_of_a_fresh_page_is_forwarded_as_fwd_request(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """RFC 9211 §2.2: `fwd=request`, not `fwd=stale`; the site is asked on conditions."""
        site.says(FRESH, 'ETag: "v1"')
        site.validates = True
        visit = as_it_says(site, pages)
        await visit()
        page = await visit(headers={"cache-control": "no-cache"})
        assert (page.text, site.seen("if-none-match")) == ("page 1", ['"v1"'])
        assert page.headers["cache-status"].startswith("stillfresh; fwd=request; stored")
        clock.advance(60)
        stale = await visit()
        assert stale.headers["cache-status"].startswith("stillfresh; fwd=stale; stored")

    async def test_a_variant_is_validated_with_its_own_fields(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """RFC 9111 §4.1, §4.3.1: the condition goes with the request fields that chose it."""
        visit = as_it_says(site, pages)
        for language in ("de", "en"):
            site.says(FRESH, f'ETag: "{language}"', "Vary: Accept-Language")
            await visit(headers={"accept-language": language})
        clock.advance(60)
        site.validates = True
        for language, text in (("en", "page 2"), ("de", "page 1")):
            site.says(FRESH, f'ETag: "{language}"', "Vary: Accept-Language")
            page = await visit(headers={"accept-language": f"{language.upper()};q=0.9"})
            assert (page.text, page.status_code) == (text, 200)
            assert site.seen("if-none-match") == [f'"{language}"']
            assert site.seen("accept-language") == [f"{language.upper()};q=0.9"]

    async def test_a_304_about_another_etag_is_not_used(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """RFC 9111 §4.3.4: the site is asked again, without the condition."""
        site.says("Cache-Control: max-age=10", 'ETag: "v1"')
        visit = as_it_says(site, pages)
        await visit()
        clock.advance(10)

        async def confused(scope: Any, receive: Any, send: Any) -> None:
            site.status = 304 if b"if-none-match" in dict(scope["headers"]) else 200
            site.headers = [(b"cache-control", b"max-age=10"), (b"etag", b'"v2"')]
            await site(scope, receive, send)

        page = await as_it_says(confused, pages)()
        assert (page.status_code, page.text, page.headers["etag"]) == (200, "page 3", '"v2"')

    @pytest.mark.parametrize("way", ["refused", "cut"])
    @pytest.mark.parametrize(
        ("said", "covers"),
        [
            ("max-age=10, stale-if-error=60", True),
            ("max-age=10, stale-while-revalidate=60", True),
            ("max-age=10", False),
            ("max-age=10, must-revalidate, stale-if-error=60", False),
            ("max-age=10, proxy-revalidate, stale-if-error=60", False),
            ("no-cache, stale-if-error=60", False),
        ],
    )
    async def test_a_stored_page_is_served_within_its_terms_if_the_connection_breaks(
        self,
        pages: PageCache,
        site: Site,
        clock: ManualClock,
        way: str,
        said: str,
        *,
        covers: bool,
    ) -> None:
        """RFC 9111 §4.2.4, RFC 5861 §4: what is stored is served, within its terms."""
        site.says(f"Cache-Control: {said}", 'ETag: "v1"')

        async def breaks(scope: Any, receive: Any, send: Any) -> None:
            if site.error is not None and way == "cut":
                start = {"type": "http.response.start", "status": 200, "headers": site.headers}
                await send(start)
                await send({"type": "http.response.body", "body": b"pa", "more_body": True})
            await site(scope, receive, send)

        visit = as_it_says(breaks, pages)
        await visit()
        clock.advance(20)
        site.error = ConnectionError("broken off")
        if covers:
            assert (await visit()).text == "page 1"
            await idle(pages.cache)
        else:
            with pytest.raises(ConnectionError):
                await visit()


class TestI25Changes:
    @pytest.mark.parametrize("field", ["Location", "Content-Location"])
    @pytest.mark.parametrize(
        ("said", "is_reached"),
        [
            ("/b", True),
            ("b", True),
            ("http://example.com/b", True),
            ("HTTP://EXAMPLE.com:80/b#part", True),
            ("//example.com/b", True),
            ("http://other.example/b", False),
            ("https://example.com/b", False),
            ("http://example.com:81/b", False),
            ("http://user@example.com/b", False),
            ("http://[::1/b", False),
            ("/c", False),
            ("", False),
        ],
    )
    async def test_a_change_invalidates_location_and_content_location(
        self, pages: PageCache, site: Site, field: str, said: str, *, is_reached: bool
    ) -> None:
        """RFC 9111 §4.4: `Location` and `Content-Location`, of the same origin only."""
        site.says(FRESH)
        visit = as_it_says(site, pages)
        before = [(await visit(path)).text for path in ("/a", "/b")]
        site.says(f"{field}: {said}", status=201)
        await visit("/a", method="POST")
        site.says(FRESH)
        assert (await visit("/a")).text != before[0]
        assert ((await visit("/b")).text != before[1]) is is_reached

    @pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "M-SEARCH", "BREW"])
    @pytest.mark.parametrize(("status", "is_reached"), [(204, True), (303, True), (409, False)])
    async def test_any_successful_unsafe_method_invalidates_its_url(
        self, pages: PageCache, site: Site, method: str, status: int, *, is_reached: bool
    ) -> None:
        """RFC 9111 §4.4: known or not, if it succeeds."""
        site.says(FRESH)
        visit = as_it_says(site, pages)
        await visit()
        site.says(status=status)
        await visit(method=method)
        site.says(FRESH)
        assert ((await visit()).text != "page 1") is is_reached


class TestI25Vary:
    @pytest.mark.parametrize(
        ("first", "second", "is_same"),
        [
            ({"x-a": "1"}, {"x-a": "1"}, True),
            ({"x-a": "1"}, {"x-a": " 1 "}, True),
            ({"x-a": "1, 2"}, {"x-a": "1,2"}, True),
            ({"x-a": "1"}, {"x-a": "2"}, False),
            ({"x-a": "1"}, {}, False),
            ({}, {"x-a": ""}, True),
            ({"x-a": "a"}, {"x-a": "A"}, False),
            ({"accept-language": "en, de"}, {"accept-language": "EN,  DE"}, True),
            ({"accept-language": "en;q=0.5, de"}, {"accept-language": "de, en;q=0.1"}, True),
            ({"accept-language": "en, de"}, {"accept-language": "de, en"}, True),
            ({"accept-language": "en, de;q=0.5"}, {"accept-language": "de, en;q=0.5"}, False),
        ],
    )
    async def test_equivalent_request_fields_choose_the_same_variant(
        self,
        pages: PageCache,
        site: Site,
        first: dict[str, str],
        second: dict[str, str],
        *,
        is_same: bool,
    ) -> None:
        """RFC 9111 §4.1: whitespace, lists, and the case and order of languages."""
        site.says(FRESH, "Vary: X-A", "Vary: accept-LANGUAGE")
        visit = as_it_says(site, pages)
        await visit(headers=first)
        assert ((await visit(headers=second)).text == "page 1") is is_same

    async def test_several_lines_of_a_field_are_one_list(
        self, pages: PageCache, site: Site
    ) -> None:
        """RFC 9110 §5.3."""
        site.says(FRESH, "Vary: X-A")
        client = as_it_says(site, pages).client
        asked = [[("x-a", "1"), ("x-a", "2")], [("x-a", "1, 2")], [("x-a", "2"), ("x-a", "1")]]
        texts = [(await client.get("/v", headers=it)).text for it in asked]
        assert texts == ["page 1", "page 1", "page 2"]

    async def test_several_variants_are_cached_and_found(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """None is asked for again, also after the first of them is over."""
        visit = as_it_says(site, pages)
        for number, name in enumerate("abc"):
            site.says(f"Cache-Control: max-age={60 + number * 60}", "Vary: X-A")
            await visit(headers={"x-a": name})
        told = [(await visit(headers={"x-a": name})).text for name in "cab"]
        assert (told, site.renders) == (["page 3", "page 1", "page 2"], 3)
        clock.advance(100)
        told = [(await visit(headers={"x-a": name})).text for name in "cb"]
        assert (told, site.renders) == (["page 3", "page 2"], 3)

    @pytest.mark.parametrize(
        "said", [["*"], ["*, *"], ["", "*"], ["X-A, *"], [", *"], ["*", "X-A"]]
    )
    async def test_a_vary_star_never_matches(
        self, pages: PageCache, site: Site, said: list[str]
    ) -> None:
        """RFC 9111 §4.1, wherever it stands."""
        site.says(FRESH, *(f"Vary: {it}" for it in said))
        visit = as_it_says(site, pages)
        assert [(await visit()).text for _ in range(2)] == ["page 1", "page 2"]


class Ranges:
    """A site with one file of ten bytes, which answers ranges; `asked` is what it was asked for."""

    def __init__(self, *lines: str) -> None:
        self.body, self.asked = b"0123456789", list[bytes | None]()
        pairs = (line.partition(": ") for line in (FRESH, *lines))
        self.headers = [(name.lower().encode(), value.encode()) for name, _, value in pairs]
        self.more: list[tuple[bytes, bytes]] = []
        self.takes_ranges = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asked = dict(scope["headers"]).get(b"range")
        self.asked.append(asked)
        status, body, more = 200, self.body, list(self.more)
        if asked is not None and self.takes_ranges:
            first, _, last = asked.removeprefix(b"bytes=").partition(b"-")
            begin = int(first) if first else len(body) - int(last)
            end = min(int(last) + 1, len(body)) if first and last else len(body)
            span = b"bytes %d-%d/%d" % (begin, end - 1, len(body))
            status, body, more = 206, body[begin:end], [(b"content-range", span), *more]
        headers = [*self.headers, *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def part(span: str, **more: str) -> dict[str, str]:
    return {"range": f"bytes={span}", **more}


class TestI25Parts:
    async def told(self, visit: Visitor, *spans: str) -> list[tuple[int, str]]:
        answers = [await visit(headers=part(span)) for span in spans]
        return [(it.status_code, it.text) for it in answers]

    @pytest.mark.parametrize("lines", [[], ['ETag: "v1"'], ['ETag: W/"v1"']])
    async def test_a_stored_part_answers_ranges_inside_it(
        self, pages: PageCache, lines: list[str]
    ) -> None:
        """RFC 9111 §3.3: the same range, and any inside it, without asking again."""
        site = Ranges(*lines)
        visit = as_it_says(site, pages)
        told = await self.told(visit, "4-8", "4-8", "5-6", "8-8", "99-")
        assert told == [(206, "45678"), (206, "45678"), (206, "56"), (206, "8"), (416, "")]
        assert site.asked == [b"bytes=4-8"]
        page = await visit(headers=part("5-6"))
        assert page.headers["content-range"] == "bytes 5-6/10"
        assert page.headers["cache-status"] == "stillfresh; hit; ttl=60"

    async def test_parts_with_the_same_strong_etag_are_combined(self, pages: PageCache) -> None:
        """RFC 9111 §3.4: by their strong ETag; what is complete is a page."""
        site = Ranges('ETag: "v1"')
        visit = as_it_says(site, pages)
        assert await self.told(visit, "0-2", "7-", "0-1", "8-9") == [
            (206, "012"), (206, "789"), (206, "01"), (206, "89"),
        ]  # fmt: skip
        assert len(site.asked) == 2
        joining = await visit(headers=part("2-7"))
        assert joining.headers["cache-status"].startswith("stillfresh; fwd=partial; stored")
        assert await self.told(visit, "0-9", "1-8", "-4") == [
            (206, "0123456789"), (206, "12345678"), (206, "6789"),
        ]  # fmt: skip
        assert len(site.asked) == 3

    @pytest.mark.parametrize("tags", [[], ["W/"], ["other"]])
    async def test_parts_without_the_same_strong_etag_are_not_combined(
        self, pages: PageCache, tags: list[str]
    ) -> None:
        """Without a strong ETag, or with another one, the new part stands alone."""
        site = Ranges()
        visit = as_it_says(site, pages)
        for number, span in enumerate(("0-4", "5-9")):
            names = {"W/": b'W/"v"', "other": b'"v%d"' % number}
            site.more = [(b"etag", names[tag]) for tag in tags]
            await visit(headers=part(span))
        await self.told(visit, "5-9", "0-4")
        assert site.asked == [b"bytes=0-4", b"bytes=5-9", b"bytes=0-4"]

    async def test_a_stored_part_never_answers_a_request_for_the_page(
        self, pages: PageCache
    ) -> None:
        """RFC 9111 §3.3: whole requests, HEAD, and other ranges ask the site."""
        site = Ranges('ETag: "v1"')
        visit = as_it_says(site, pages)
        await visit(headers=part("0-4"))
        for _ in range(2):
            assert ((await visit()).status_code, (await visit()).text) == (200, "0123456789")
        assert (await visit(method="HEAD")).headers["content-length"] == "10"
        assert site.asked == [b"bytes=0-4", None]
        assert await self.told(visit, "6-7") == [(206, "67")]
        assert site.asked == [b"bytes=0-4", None]

    async def test_a_page_of_a_site_without_ranges_is_cut_here(self, pages: PageCache) -> None:
        """Its page is kept, and cut here."""
        site = Ranges()
        site.takes_ranges = False
        assert await self.told(as_it_says(site, pages), "0-1", "8-") == [(206, "01"), (206, "89")]
        assert len(site.asked) == 1

    async def test_a_stored_part_is_as_fresh_as_it_says(
        self, pages: PageCache, clock: ManualClock
    ) -> None:
        """Then it is asked for again; a private one is kept for nobody."""
        site = Ranges('ETag: "v1"')
        visit = as_it_says(site, pages)
        await self.told(visit, "0-4")
        clock.advance(60)
        await self.told(visit, "0-4")
        assert len(site.asked) == 2
        site.headers = [(b"cache-control", b"private, max-age=60")]
        for _ in range(2):
            assert (await visit("/own", headers=part("0-4"))).text == "01234"
        assert len(site.asked) == 4

    @pytest.mark.parametrize(
        "more",
        [
            [(b"content-range", b"bytes 1-5/10")],
            [(b"content-range", b"bytes 0-4/*")],
            [(b"content-range", b"bytes 0-4")],
            [(b"content-range", b"rubbish")],
            [(b"content-range", b"bytes 4-0/10")],
            [(b"content-range", b"bytes 0-4/10"), (b"content-range", b"bytes 0-4/10")],
            [(b"content-type", b"multipart/byteranges; boundary=x")],
            [(b"content-range", b"bytes 0-4/10"), (b"content-length", b"7")],
        ],
    )
    async def test_a_malformed_part_goes_to_its_visitor_and_is_not_cached(
        self, pages: PageCache, more: list[tuple[bytes, bytes]]
    ) -> None:
        """RFC 9110 §14.4, §15.3.7: what it says of itself must be what was asked for."""
        asked = []

        async def odd(scope: Any, receive: Any, send: Any) -> None:
            asked.append(1)
            headers = [(b"cache-control", b"max-age=60"), *more]
            await send({"type": "http.response.start", "status": 206, "headers": headers})
            await send({"type": "http.response.body", "body": b"01234"})

        visit = as_it_says(odd, pages)
        assert await self.told(visit, "0-4", "0-4") == [(206, "01234")] * 2
        assert len(asked) == 2

    async def test_a_part_that_was_cut_short_is_not_cached(self, pages: PageCache) -> None:
        """RFC 9112 §8: nothing of it is kept."""
        site = Ranges('ETag: "v1"')

        async def short(scope: Any, receive: Any, send: Any) -> None:
            async def less(message: Any) -> None:
                if message["type"] == "http.response.body":
                    message["body"] = message["body"][:-1]
                await send(message)

            await site(scope, receive, less)

        with pytest.raises(ConnectionError):
            await as_it_says(short, pages)(headers=part("0-4"))
        assert await self.told(as_it_says(site, pages), "0-4") == [(206, "01234")]

    @pytest.mark.parametrize("span", ["0-1,4-5", "x-", "5-2", "-", ""])
    async def test_requests_for_several_or_odd_ranges_are_passed_through(
        self, pages: PageCache, span: str
    ) -> None:
        """As they were sent; nothing is kept of them."""
        site = Ranges()
        site.takes_ranges = False
        visit = as_it_says(site, pages)
        for _ in range(2):
            assert (await visit(headers=part(span))).status_code == 200
        assert site.asked == [f"bytes={span}".encode()] * 2

    async def test_concurrent_visitors_of_different_ranges_each_get_their_own(
        self, pages: PageCache
    ) -> None:
        """Each is given its own, with at most one request each."""
        site = Ranges('ETag: "v1"')
        visit = as_it_says(site, pages)
        spans = ["0-1", "2-3", "0-1", "8-9"]
        crowd = await asyncio.gather(*(visit(headers=part(span)) for span in spans))
        assert [it.text for it in crowd] == ["01", "23", "01", "89"]
        assert len(site.asked) <= 4

    async def test_if_range_and_if_none_match_work_on_a_stored_part(self, pages: PageCache) -> None:
        """RFC 9110 §13.1.5: `If-Range` by the strong ETag, `If-None-Match` as for the page."""
        site = Ranges('ETag: "v1"')
        visit = as_it_says(site, pages)
        await visit(headers=part("0-4"))
        same = await visit(headers=part("1-2", **{"if-range": '"v1"'}))
        known = await visit(headers=part("1-2", **{"if-none-match": '"v1"'}))
        assert (same.status_code, same.text, known.status_code) == (206, "12", 304)
        assert len(site.asked) == 1
        other = await visit(headers=part("1-2", **{"if-range": '"v0"'}))
        assert (len(site.asked), other.status_code) == (2, 200)

    async def test_if_range_is_obeyed_for_a_range_past_the_end(self, pages: PageCache) -> None:
        """Then the site is asked: the kept parts are no answer to another version."""
        site = Ranges('ETag: "v1"')
        visit = as_it_says(site, pages)
        await visit(headers=part("0-4"))
        site.takes_ranges = False
        other = await visit(headers=part("99-", **{"if-range": '"v0"'}))
        assert (other.status_code, other.text) == (200, "0123456789")

    async def test_the_number_of_stored_parts_of_a_page_is_bounded(self, pages: PageCache) -> None:
        """Whoever asks for every second byte makes no visit slow, and no row long."""
        site = Ranges('ETag: "v1"')
        site.body = bytes(1_000)
        visit = as_it_says(site, pages)
        for at in range(0, 2 * MOST_SPANS + 4, 2):
            await visit(headers=part(f"{at}-{at}"))
        requests = len(site.asked)
        last = 2 * MOST_SPANS + 2
        await self.told(visit, f"{last}-{last}", f"{last - 2}-{last - 2}")
        assert len(site.asked) == requests
        await self.told(visit, "0-0", f"{last - 4}-{last - 4}")
        assert len(site.asked) == requests + 2

    @pytest.mark.parametrize("first", [part("0-7"), {}])
    async def test_content_digest_is_not_sent_with_a_cut_part(
        self, pages: PageCache, first: dict[str, str]
    ) -> None:
        """RFC 9530 §2: `Content-Digest` is of one message, `Repr-Digest` of the whole page."""
        site = Ranges('ETag: "v1"')
        site.more = [(b"content-digest", b"sha-256=:a:"), (b"repr-digest", b"sha-256=:b:")]
        visit = as_it_says(site, pages)
        await visit(headers=first)
        cut = await visit(headers=part("2-4"))
        assert (cut.status_code, len(site.asked), cut.text) == (206, 1, "234")
        assert "content-digest" not in cut.headers
        assert cut.headers["repr-digest"] == "sha-256=:b:"

    async def test_a_change_or_a_purge_removes_stored_parts(self, pages: PageCache) -> None:
        """RFC 9111 §4.4, and a purge of the page."""
        site = Ranges('ETag: "v1"')
        visit = as_it_says(site, pages)
        for end in (lambda: visit(method="PUT"), lambda: pages.purge("/pricing")):
            await visit(headers=part("0-4"))
            before = len(site.asked)
            await end()
            await visit(headers=part("0-4"))
            assert site.asked[before:][-1] == b"bytes=0-4"
            assert len(site.asked) > before


class TestI34IfRange:
    async def test_the_answer_to_if_range_on_an_unstored_page_is_loaded_whole_and_stored(
        self, pages: PageCache
    ) -> None:
        """RFC 9110 §15.3.7: a 206 to `If-Range` may leave out fields, so the page is loaded."""
        site = Ranges('ETag: "v1"')
        visit = as_it_says(site, pages)
        first = await visit(headers=part("2-4", **{"if-range": '"v1"'}))
        assert (first.status_code, first.text) == (206, "234")
        assert first.headers["content-range"] == "bytes 2-4/10"
        assert first.headers["cache-status"] == "stillfresh; fwd=miss; stored; ttl=60"
        assert [(await visit()).text, (await visit(headers=part("8-"))).text] == [
            "0123456789",
            "89",
        ]
        assert site.asked == [None]

    @pytest.mark.parametrize(
        ("lines", "validator", "status"),
        [
            (['ETag: "v1"'], '"v1"', 206),
            (['ETag: "v1"'], '"v0"', 200),
            (['ETag: W/"v1"'], 'W/"v1"', 200),
            (['ETag: "v1"'], 'W/"v1"', 200),
            (['ETag: "v1"'], "rubbish", 200),
            ([], '"v1"', 200),
        ],
    )
    async def test_a_weak_or_other_etag_gets_the_whole_page(
        self, pages: PageCache, lines: list[str], validator: str, status: int
    ) -> None:
        """RFC 9110 §13.1.5: ETags are compared strongly; the page is stored in any case."""
        site = Ranges(*lines)
        visit = as_it_says(site, pages)
        texts = {200: "0123456789", 206: "234"}
        for _ in range(2):
            answer = await visit(headers=part("2-4", **{"if-range": validator}))
            assert (answer.status_code, answer.text) == (status, texts[status])
        assert site.asked == [None]

    @pytest.mark.parametrize(
        ("changed_ago", "asked_ago", "status"),
        [(86_400, 86_400, 206), (86_400, 86_399, 200), (86_400, 86_401, 200), (0, 0, 200)],
    )
    async def test_a_date_holds_only_if_it_is_exact_and_old_enough(
        self,
        pages: PageCache,
        clock: ManualClock,
        changed_ago: float,
        asked_ago: float,
        status: int,
    ) -> None:
        """RFC 9110 §8.8.2.2: a page may have changed twice in the second of its `Date`."""
        site = Ranges(f"Last-Modified: {date(clock, changed_ago)}", f"Date: {date(clock)}")
        visit = as_it_says(site, pages)
        texts = {200: "0123456789", 206: "234"}
        for _ in range(2):
            answer = await visit(headers=part("2-4", **{"if-range": date(clock, asked_ago)}))
            assert (answer.status_code, answer.text) == (status, texts[status])
        assert site.asked == [None]

    async def test_a_stored_part_answers_if_range_without_a_load(self, pages: PageCache) -> None:
        """Only what the stored parts lack makes the cache load the page."""
        site = Ranges('ETag: "v1"')
        visit = as_it_says(site, pages)
        await visit(headers=part("0-4"))
        inside = await visit(headers=part("1-2", **{"if-range": '"v1"'}))
        outside = await visit(headers=part("5-6", **{"if-range": '"v1"'}))
        assert (inside.text, outside.text) == ("12", "56")
        assert site.asked == [b"bytes=0-4", None]

    @pytest.mark.parametrize("field", ["private", "no-store", ""])
    async def test_a_page_that_is_not_shared_is_resumed_by_the_visitors_own_request(
        self, pages: PageCache, field: str
    ) -> None:
        """The client gets its range and not the whole page; once that is known, by one request."""
        site = Ranges('ETag: "v1"')
        site.headers = [(b"cache-control", field.encode()), (b"etag", b'"v1"')]
        visit = as_it_says(site, pages)
        for _ in range(2):
            answer = await visit(headers=part("2-4", **{"if-range": '"v1"'}))
            assert (answer.status_code, answer.text) == (206, "234")
            assert answer.headers["cache-status"].startswith("stillfresh; fwd=bypass; detail=")
        assert site.asked == [None, b"bytes=2-4", b"bytes=2-4"]

    async def test_a_page_that_is_too_big_is_resumed_by_the_visitors_own_request(
        self, pages: PageCache, clock: ManualClock
    ) -> None:
        """A resumed download goes on where it was; the whole page is tried again much later."""
        site = Ranges('ETag: "v1"')
        visit = as_it_says(site, pages, max_body=5)
        for _ in range(2):
            answer = await visit(headers=part("2-9", **{"if-range": '"v1"'}))
            assert (answer.status_code, answer.text) == (206, "23456789")
        assert site.asked == [None, b"bytes=2-9", b"bytes=2-9"]
        clock.advance(600)
        site.body = b"0123"
        small = await visit(headers=part("2-3", **{"if-range": '"v1"'}))
        assert (small.status_code, small.text, site.asked[3:]) == (206, "23", [None])

    async def test_an_error_goes_to_the_visitor_without_a_second_request(
        self, pages: PageCache, site: Site
    ) -> None:
        """It is no page from which a range could be cut."""
        site.says(status=503)
        visit = as_it_says(site, pages)
        answer = await visit(headers=part("2-4", **{"if-range": '"v1"'}))
        assert (answer.status_code, site.renders) == (503, 1)

    async def test_head_and_several_ranges_with_if_range_are_passed_through(
        self, pages: PageCache
    ) -> None:
        """RFC 9110 §14.2: only GET has ranges; several are the site's to answer."""
        site = Ranges('ETag: "v1"')
        site.takes_ranges = False
        visit = as_it_says(site, pages)
        await visit(headers=part("0-1,4-5", **{"if-range": '"v1"'}))
        await visit(headers=part("0-1", **{"if-range": '"v1"'}), method="HEAD")
        assert site.asked == [b"bytes=0-1,4-5", b"bytes=0-1"]

    async def test_concurrent_visitors_with_if_range_share_one_load(self, pages: PageCache) -> None:
        """As visitors of the page do."""
        site = Ranges('ETag: "v1"')
        visit = as_it_says(site, pages)
        asked = [part(f"{at}-{at}", **{"if-range": '"v1"'}) for at in range(8)]
        crowd = await asyncio.gather(*(visit(headers=headers) for headers in asked))
        assert [it.text for it in crowd] == [str(at) for at in range(8)]
        assert site.asked == [None]
