"""I10, I11, I12, I14, I15: `IsrMiddleware` in front of an ASGI app, by HTTP."""

import asyncio
from typing import Any

import pytest

from stillfresh import ConfigError, StoreError
from stillfresh.pages import IsrMiddleware, PageCache, Route
from stillfresh.pages.model import Message, Receive, Scope, Send
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import until
from tests.kit.isr import Site, Visitor, as_it_says, in_front


async def idle(pages: PageCache) -> None:
    while (await pages.stats()).resources["page"].loading:
        await asyncio.sleep(0)


class TestI12Methods:
    async def test_get_and_head_requests_share_a_page(self, pages: PageCache, site: Site) -> None:
        """HEAD tells what GET would, without the body."""
        visit = in_front(site, pages)
        head = await visit(method="HEAD")
        page = await visit()
        assert (head.status_code, head.content, page.text) == (200, b"", "page 1")
        assert head.headers["content-length"] == page.headers["content-length"] == "6"
        assert site.renders == 1

    async def test_paths_without_a_route_are_not_cached(self, pages: PageCache, site: Site) -> None:
        """What no route names is the app's own."""
        visit = in_front(site, pages)
        assert [(await visit("/other")).text for _ in range(2)] == ["page 1", "page 2"]

    async def test_a_successful_post_invalidates_its_own_url(
        self, pages: PageCache, site: Site
    ) -> None:
        """RFC 9111 §4.4: the next visitor waits for a new page; another URL is left alone."""
        visit = in_front(site, pages)
        await visit("/blog/a")
        await visit("/blog/b")
        assert (await visit("/blog/a", method="POST")).text == "page 3"
        assert (await visit("/blog/a")).text == "page 4"
        assert (await visit("/blog/b")).text == "page 2"

    async def test_a_failed_change_and_a_safe_method_invalidate_nothing(
        self, pages: PageCache, site: Site
    ) -> None:
        """Neither does a method that changes nothing."""
        visit = in_front(site, pages)
        await visit()
        site.status = 403
        await visit(method="DELETE")
        site.status = 200
        await visit(method="OPTIONS")
        assert (await visit()).text == "page 1"

    async def test_a_changed_page_is_not_served_when_its_render_fails(
        self, pages: PageCache, site: Site
    ) -> None:
        """The error is told, not what the page said before the change."""
        visit = in_front(site, pages)
        await visit()
        await visit(method="PUT")
        site.status = 500
        assert (await visit()).status_code == 500
        assert (await visit()).status_code == 503

    async def test_a_change_invalidates_every_variant(self, pages: PageCache, site: Site) -> None:
        """Not only the one that was asked for first."""
        visit = in_front(site, pages)
        site.says("Vary: Accept-Language")
        await visit()
        await visit(headers={"accept-language": "de"})
        await visit(method="PUT")
        before = site.renders
        await visit(headers={"accept-language": "de"})
        await visit()
        assert site.renders == before + 2

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("if-match", '"a"'),
            ("if-unmodified-since", "Mon, 01 Jan 2035 00:00:00 GMT"),
            ("cookie", "session=1"),
            ("accept-language", "x" * 2_000),
            ("authorization", "Basic x"),
        ],
    )
    async def test_a_change_invalidates_its_url_whatever_fields_it_has(
        self, pages: PageCache, site: Site, name: str, value: str
    ) -> None:
        """RFC 9111 §4.4 knows no exception: conditional, personal and long requests change too."""
        declared = Route("60s", vary=["cookie", "accept-language"])
        visit = in_front(site, pages, routes={"/pricing": declared})
        assert (await visit()).text == "page 1"
        await visit(method="PUT", headers={name: value})
        assert (await visit()).text == "page 3"

    async def test_a_cached_page_keeps_its_headers_except_hop_by_hop_fields(
        self, pages: PageCache, site: Site
    ) -> None:
        """Also those that Connection lists."""
        site.says("X-Kept: 1", "Keep-Alive: 5", "Connection: X-Secret", "X-Secret: 1")
        visit = in_front(site, pages)
        for _ in range(3):
            headers = (await visit()).headers
            assert headers["x-kept"] == "1"
            assert not {"keep-alive", "connection", "x-secret"} & set(headers)


class TestI14Freshness:
    async def test_a_hit_has_cache_status_age_etag_and_cache_control(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """RFC 9211, Age, ETag, and Cache-Control by the route's policy."""
        visit = in_front(site, pages)
        first = await visit()
        assert first.headers["cache-status"] == "stillfresh; fwd=miss; stored; ttl=60"
        clock.advance(20)
        for _ in range(2):  # the second one by the short way
            hit = await visit()
            assert hit.headers["cache-status"] == "stillfresh; hit; ttl=40"
            assert hit.headers["age"] == "20"
            assert hit.headers["etag"] == first.headers["etag"]
            assert "s-maxage=60, stale-while-revalidate=" in hit.headers["cache-control"]

    async def test_a_stale_page_is_served_and_rendered_in_the_background(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """The visitor does not wait, and is told how stale it is."""
        visit = in_front(site, pages)
        await visit()
        clock.advance(70)
        stale = await visit()
        assert (stale.text, stale.headers["cache-status"]) == ("page 1", "stillfresh; hit; ttl=-10")
        await idle(pages)
        assert (await visit()).text == "page 2"

    async def test_concurrent_visitors_share_one_render(self, pages: PageCache, site: Site) -> None:
        """I9: those who joined say so."""
        visit = in_front(site, pages)
        answers = await asyncio.gather(*(visit() for _ in range(8)))
        assert {answer.text for answer in answers} == {"page 1"}
        assert sum("collapsed" in answer.headers["cache-status"] for answer in answers) == 7

    async def test_conditional_requests_get_304(self, pages: PageCache, site: Site) -> None:
        """304 without a body for the ETag and the date that were told."""
        site.says("Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT", "X-Body: 1")
        visit = in_front(site, pages)
        etag = (await visit()).headers["etag"]
        same = await visit(headers={"if-none-match": etag})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", etag)
        assert "x-body" not in same.headers
        since = await visit(headers={"if-modified-since": "Sun, 06 Nov 1994 08:49:37 GMT"})
        assert since.status_code == 304
        assert (await visit(headers={"if-none-match": '"other"'})).status_code == 200
        assert site.renders == 1

    @pytest.mark.parametrize(
        ("says", "passed", "expected"),
        [
            ("max-age=60", 59, "page 1"),
            ("max-age=60", 60, "page 2"),
            ("max-age=60, s-maxage=10", 10, "page 2"),
            ("max-age=60, stale-while-revalidate=60", 60, "page 1"),
            ("max-age=60, stale-while-revalidate=60, must-revalidate", 60, "page 2"),
            ("max-age=60, stale-while-revalidate=60", 120, "page 2"),
        ],
    )
    async def test_the_responses_cache_control_counts_without_a_route(
        self,
        pages: PageCache,
        site: Site,
        clock: ManualClock,
        says: str,
        passed: float,
        expected: str,
    ) -> None:
        """Where no route overrides it."""
        site.says(f"Cache-Control: {says}")
        visit = as_it_says(site, pages)
        answer = await visit()
        assert answer.headers["cache-control"] == says
        clock.advance(passed)
        assert (await visit()).text == expected
        await idle(pages)

    async def test_a_response_without_freshness_is_not_cached(
        self, pages: PageCache, site: Site
    ) -> None:
        """With neither route nor statement, every visitor has the app's own answer."""
        visit = as_it_says(site, pages)
        answers = [await visit() for _ in range(2)]
        assert answers[0].text != answers[1].text
        assert "hit" not in answers[1].headers["cache-status"]

    async def test_a_page_is_served_during_stale_if_error_and_then_the_error(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """RFC 5861 §4; then the error itself."""
        site.says('ETag: "v1"', "Cache-Control: max-age=10, stale-if-error=20")
        visit = as_it_says(site, pages)
        await visit()
        site.status, site.body = 500, b"sorry"
        clock.advance(29)
        kept = await visit()
        assert (kept.status_code, kept.text) == (200, "page 1")
        clock.advance(2)
        assert (await visit()).status_code == 500

    @pytest.mark.parametrize("forward", ["request", "key"])
    async def test_an_expired_page_is_not_served_instead_of_an_error(
        self, pages: PageCache, site: Site, clock: ManualClock, forward: Any
    ) -> None:
        """Not the first one, nor those while its load cools down."""
        site.says("Cache-Control: max-age=10")
        visit = as_it_says(site, pages, forward=forward)
        await visit()
        clock.advance(11)
        site.status = 500
        assert [(await visit()).status_code for _ in range(3)] == [500, 500, 500]

    async def test_an_expired_page_is_validated_by_its_etag(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """By its own ETag; a 304 refreshes the stored headers and keeps the body."""
        site.says('ETag: "v1"', "Cache-Control: max-age=10", "X-Turn: 1")
        site.validates = True
        visit = as_it_says(site, pages)
        await visit()
        clock.advance(10)
        site.says('ETag: "v1"', "Cache-Control: max-age=30", "X-Turn: 2")
        answer = await visit()
        assert (answer.status_code, answer.text, answer.headers["x-turn"]) == (200, "page 1", "2")
        assert site.seen("if-none-match") == ['"v1"']
        assert "fwd=stale" in answer.headers["cache-status"]
        clock.advance(29)
        assert (await visit()).text == "page 1"
        assert site.renders == 2

    async def test_a_no_cache_page_is_validated_at_each_visit(
        self, pages: PageCache, site: Site
    ) -> None:
        """Stored, and never served unasked."""
        site.says('ETag: "v1"', "Cache-Control: no-cache")
        site.validates = True
        visit = as_it_says(site, pages)
        assert {(await visit()).text for _ in range(3)} == {"page 1"}
        assert site.renders == 3
        site.error = RuntimeError("away")
        with pytest.raises(RuntimeError):
            await visit()

    async def test_cache_control_of_a_request_is_obeyed(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """RFC 9111 §5.2.1, against a page of 10 s that is fresh for 60."""
        site.says("Cache-Control: max-age=60")
        visit = as_it_says(site, pages)
        await visit()
        clock.advance(10)
        for asked, expected in (
            ("max-age=10", "page 1"),
            ("min-fresh=50", "page 1"),
            ("only-if-cached", "page 1"),
            ("max-age=5", "page 2"),
            ("no-cache", "page 3"),
        ):
            assert (await visit(headers={"cache-control": asked})).text == expected
        clock.advance(10)
        assert (await visit(headers={"cache-control": "min-fresh=55"})).text == "page 4"
        clock.advance(70)
        assert (await visit(headers={"cache-control": "max-stale=10"})).text == "page 4"
        assert (await visit(headers={"cache-control": "max-stale=9"})).text == "page 5"
        missing = await visit("/other", headers={"cache-control": "only-if-cached"})
        assert missing.status_code == 504

    @pytest.mark.parametrize(
        ("asked", "status"),
        [
            ("only-if-cached", 504),
            ("only-if-cached, max-stale=9", 504),
            ("only-if-cached, max-stale=10", 200),
            ("only-if-cached, max-stale", 200),
            ("only-if-cached, max-stale, max-age=5", 200),
            ("only-if-cached, max-stale, min-fresh=1", 504),
            ("only-if-cached, max-stale, no-cache", 504),
        ],
    )
    async def test_only_if_cached_never_asks_the_site(
        self, pages: PageCache, site: Site, clock: ManualClock, asked: str, status: int
    ) -> None:
        """RFC 9111 §5.2.1.7, with a page that is past its time by ten seconds: nothing is asked."""
        site.says("Cache-Control: max-age=60")
        visit = as_it_says(site, pages)
        await visit()
        clock.advance(70)
        assert (await visit(headers={"cache-control": asked})).status_code == status
        assert site.renders == 1

    @pytest.mark.parametrize("field", ["Cache-Control", "CDN-Cache-Control"])
    @pytest.mark.parametrize("said", ["must-revalidate", "proxy-revalidate", "s-maxage=60"])
    async def test_pages_that_must_revalidate_are_never_served_stale(
        self, pages: PageCache, site: Site, clock: ManualClock, field: str, said: str
    ) -> None:
        """RFC 9111 §5.2.2.2 and §5.2.2.8, RFC 9213: whoever would take it."""
        site.says(f"{field}: max-age=60, {said}")
        visit = as_it_says(site, pages)
        await visit()
        clock.advance(61)
        stored = await visit(headers={"cache-control": "only-if-cached, max-stale"})
        assert stored.status_code == 504
        assert (await visit(headers={"cache-control": "max-stale"})).text == "page 2"

    async def test_only_if_cached_serves_the_visitors_own_variant_only(
        self, pages: PageCache, site: Site
    ) -> None:
        """RFC 9111 §4.1."""
        site.says("Cache-Control: max-age=60", "Vary: Accept-Language")
        visit = as_it_says(site, pages)
        for language in ("de", "en"):
            page = await visit(headers={"accept-language": language})
            asked = {"accept-language": language, "cache-control": "only-if-cached"}
            assert (await visit(headers=asked)).text == page.text
        asked = {"accept-language": "fr", "cache-control": "only-if-cached"}
        assert (await visit(headers=asked)).status_code == 504

    async def test_a_page_that_varies_by_host_is_rendered_once(
        self, pages: PageCache, site: Site
    ) -> None:
        """It is in the key already: no second Host is told to the app, no page rendered twice."""
        site.says("Cache-Control: max-age=60", "Vary: Host")
        visit = as_it_says(site, pages)
        answers = [await visit() for _ in range(2)]
        assert [it.text for it in answers] == ["page 1"] * 2
        assert site.seen("host") == ["example.com"]
        assert answers[1].headers["vary"] == "Host"

    @pytest.mark.parametrize(("status", "then"), [(429, 200), (403, 403), (404, 404), (410, 410)])
    async def test_a_429_keeps_the_page_and_a_403_or_410_replaces_it(
        self, pages: PageCache, site: Site, clock: ManualClock, status: int, then: int
    ) -> None:
        """The page before it stays; that a page is forbidden or gone is news, and replaces it."""
        visit = in_front(site, pages)
        await visit()
        clock.advance(61)
        site.says("Retry-After: 30", status=status)
        assert (await visit()).text == "page 1"
        await idle(pages)
        assert site.renders == 2
        assert (await visit()).status_code == then

    async def test_a_429_is_never_stored(self, pages: PageCache, site: Site) -> None:
        """RFC 6585 §4, whatever it says; who has nothing better is told, and when to come again."""
        site.says("Cache-Control: max-age=60", "Retry-After: 30", status=429)
        for visit in (in_front(site, pages), as_it_says(site, pages)):
            answer = await visit()
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "30")
        site.says("Cache-Control: max-age=60")
        assert (await as_it_says(site, pages)("/other")).status_code == 200

    async def test_a_no_cache_request_cannot_force_a_render_under_a_route(
        self, pages: PageCache, site: Site
    ) -> None:
        """The route's own duration is the site's decision."""
        visit = in_front(site, pages)
        await visit()
        assert (await visit(headers={"cache-control": "no-cache"})).text == "page 1"

    async def test_each_variant_named_by_vary_is_a_page_of_its_own(
        self, pages: PageCache, site: Site
    ) -> None:
        """RFC 9111 §4.1; the app is given what it varies by, normalised."""
        site.says("Vary: Accept-Language")
        visit = in_front(site, pages)
        german = {"accept-language": "de, en;q=0.5"}
        texts = [(await visit(headers=it)).text for it in ({}, german, {}, german)]
        assert texts == ["page 1", "page 2", "page 1", "page 2"]
        assert site.seen("accept-language") == ["de, en"]
        same = await visit(headers={"accept-language": "en;q=0.2,de;q=0.9"})
        assert same.text == "page 2"

    async def test_the_vary_field_names_declared_headers(
        self, pages: PageCache, site: Site
    ) -> None:
        """With what the page varies by itself, in every answer."""
        site.says("Vary: Origin")
        routes = {"/pricing": Route("60s", vary=["Accept-Language", "origin"])}
        visit = in_front(site, pages, routes=routes)
        for headers in ({}, {"accept-language": "de"}, {}):
            page = await visit(headers=headers)
            told = {it.strip().lower() for it in page.headers["vary"].split(",")}
            assert told == {"origin", "accept-language"}

    @pytest.mark.parametrize("path", ["/blog/caf%C3%A9", "/blog/café", "/blog/caf%c3%a9"])
    async def test_revalidate_and_purge_take_a_path_escaped_or_not(
        self, pages: PageCache, site: Site, path: str
    ) -> None:
        """Escaped or not, to be revalidated or purged."""
        visit = in_front(site, pages)
        await visit("/blog/caf%C3%A9")
        await pages.revalidate(path)
        assert (await visit("/blog/caf%C3%A9")).headers["cache-status"].endswith("ttl=0")
        await idle(pages)
        assert (await visit("/blog/caf%C3%A9")).text == "page 2"
        await pages.purge(path)
        assert (await visit("/blog/caf%C3%A9")).text == "page 3"
        await pages.purge(f"http://EXAMPLE.com:80{path}")
        assert (await visit("/blog/caf%C3%A9")).text == "page 4"

    async def test_a_page_revalidated_early_has_no_lifetime_in_caches_behind(
        self, pages: PageCache, site: Site
    ) -> None:
        """Its age alone would tell them that it is fresh."""
        visit = in_front(site, pages)
        await visit()
        await pages.revalidate("/pricing")
        assert "s-maxage=0" in (await visit()).headers["cache-control"]
        await idle(pages)
        assert "s-maxage=60" in (await visit()).headers["cache-control"]

    async def test_revalidate_reaches_every_host_query_and_variant(
        self, pages: PageCache, site: Site
    ) -> None:
        """I11: host, query, Vary."""
        site.says("Vary: Accept-Language")
        routes = {"/pricing": Route("60s", query=["page"])}
        visit = in_front(site, pages, routes=routes)
        asked = [
            ("/pricing", {}),
            ("/pricing", {"accept-language": "de"}),
            ("/pricing?page=2", {}),
            ("/pricing", {"host": "other.example"}),
        ]
        for url, headers in asked:
            await visit(url, headers)
        await pages.revalidate("/pricing")
        for url, headers in asked:
            answer = await visit(url, headers)
            assert answer.headers["cache-status"] == "stillfresh; hit; ttl=0"
        await idle(pages)


class TestI15BigAndSlow:
    async def test_a_body_above_the_limit_is_passed_through_uncached(
        self, pages: PageCache, site: Site
    ) -> None:
        """Above the limit nothing is stored, and nothing is cut."""
        site.body = b"x" * 2_000
        visit = in_front(site, pages, max_body=1_000)
        for _ in range(2):
            assert len((await visit()).content) == 2_000

    async def test_ranges_of_a_stored_page_are_served(self, pages: PageCache, site: Site) -> None:
        """206 with the part, 416 past the end, the whole where the condition fails."""
        visit = in_front(site, pages)
        etag = (await visit()).headers["etag"]
        part = await visit(headers={"range": "bytes=2-3"})
        assert (part.status_code, part.text) == (206, "ge")
        assert part.headers["content-range"] == "bytes 2-3/6"
        none = await visit(headers={"range": "bytes=9-"})
        assert (none.status_code, none.headers["content-range"]) == (416, "bytes */6")
        good = await visit(headers={"range": "bytes=0-0", "if-range": etag})
        other = await visit(headers={"range": "bytes=0-0", "if-range": '"other"'})
        assert (good.status_code, other.status_code, other.text) == (206, 200, "page 1")

    async def test_a_visitor_that_leaves_does_not_stop_the_render(
        self, pages: PageCache, site: Site
    ) -> None:
        """The render goes on for the others."""
        visit = in_front(site, pages)
        first = await site.holding(visit())
        second = asyncio.create_task(visit())
        first.cancel()
        await until(first.done)
        site.let_go()
        assert (await second).text == "page 1"
        assert site.renders == 1

    async def test_a_response_shorter_than_its_length_is_not_cached(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """RFC 9111 §3.3."""
        site.says("Content-Length: 100")
        visit = in_front(site, pages)
        with pytest.raises(ConnectionError):
            await visit()
        clock.advance(5)
        site.says("Content-Length: 6")
        assert (await visit()).text == "page 2"


class TestI10Middleware:
    async def test_visitors_are_answered_though_the_store_cannot_be_opened(
        self, site: Site
    ) -> None:
        """The site works without its cache."""

        class Broken(MemoryStore):
            async def open(self) -> None:
                raise StoreError("no disk")

        visit = in_front(site, PageCache(Broken()))
        assert [(await visit()).text for _ in range(2)] == ["page 1", "page 2"]

    async def test_an_exception_or_error_page_of_the_app_is_passed_on(
        self, pages: PageCache, site: Site
    ) -> None:
        """Raised through, as without a cache; its error page is passed on, never stored."""
        visit = in_front(site, pages)
        site.error = RuntimeError("bug")
        with pytest.raises(RuntimeError, match="bug"):
            await visit()
        site.error, site.status = None, 500
        assert (await visit("/blog/x")).status_code == 500
        cooling = await visit("/blog/x")
        assert (cooling.status_code, cooling.headers["retry-after"]) == (503, "1")

    @pytest.mark.parametrize("forward", ["request", "key"])
    async def test_an_app_that_needs_a_cookie_still_answers_its_visitor(
        self, pages: PageCache, site: Site, forward: Any
    ) -> None:
        """An app that wants a cookie gets it, whichever way it is asked."""

        async def wants_a_cookie(scope: Scope, receive: Receive, send: Send) -> None:
            site.status = 200 if b"cookie" in dict(scope["headers"]) else 500
            await site(scope, receive, send)

        visit = as_it_says(wants_a_cookie, pages, forward=forward)
        for _ in range(3):
            page = await visit("/me", headers={"cookie": "u=1"})
            assert page.status_code == 200
            assert "detail=no-freshness" in page.headers["cache-status"]

    def test_bad_arguments_of_the_middleware_are_refused(self, site: Site) -> None:
        """Where they are written."""
        with pytest.raises(ConfigError, match="PageCache"):
            IsrMiddleware(site, "memory://")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"route '/a': .*'soon'"):
            IsrMiddleware(site, PageCache("memory://"), routes={"/a": "soon"})
        for routes in (["/a"], "/a", {"/a"}):
            with pytest.raises(ConfigError, match=r"""routes: write \{"/blog/\*": "60s"\}, not """):
                IsrMiddleware(site, PageCache("memory://"), routes=routes)  # type: ignore[arg-type]

    @pytest.mark.parametrize("status", [600, 999])
    async def test_an_invalid_status_is_passed_through_uncached(
        self, pages: PageCache, site: Site, status: int
    ) -> None:
        """As the app said it, and not kept."""
        site.status = status
        assert (await in_front(site, pages)()).status_code == status


class TestI12Lifespan:
    @pytest.mark.parametrize("knows_lifespan", [True, False])
    async def test_the_page_cache_is_open_as_long_as_the_app(
        self, clock: ManualClock, *, knows_lifespan: bool
    ) -> None:
        """Opened after the app, closed after it; also where the app knows no lifespan."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "lifespan" or not knows_lifespan:
                raise ValueError("HTTP only")
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})

        store = MemoryStore(clock=clock)
        pages = PageCache(store, clock=clock)
        steps = iter(["startup", "shutdown"])
        said: list[tuple[str, bool]] = []

        async def receive() -> Message:
            return {"type": f"lifespan.{next(steps)}"}

        async def send(message: Message) -> None:
            said.append((str(message["type"]), pages.cache.opened is not None))

        await IsrMiddleware(app, pages)({"type": "lifespan"}, receive, send)
        assert said == [
            ("lifespan.startup.complete", True),
            ("lifespan.shutdown.complete", False),
        ]

    async def test_notes_of_outer_layers_do_not_reach_a_shared_render(
        self, pages: PageCache, site: Site
    ) -> None:
        """What an outer layer noted about a request does not reach a shared render."""
        isr = IsrMiddleware(site, pages, routes={"/pricing": 60})

        async def outer(scope: Scope, receive: Receive, send: Send) -> None:
            noted = {"user": "alice", "session": {"a": 1}, "state": {"user": "alice"}}
            await isr({**scope, **noted}, receive, send)

        await Visitor(outer)()
        assert not {"user", "session"} & set(site.scopes[0])
        assert site.scopes[0]["state"] == {}
        assert site.scopes[0]["client"] is None
