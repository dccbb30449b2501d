"""I8, I13, I14: what a big error, a slow app, a vague header or an outer layer must not change."""

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount
from starlette.routing import Route as At

from stillfresh.http.fields import Raw, end_to_end, normalised
from stillfresh.http.sharing import private
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.pages.model import App, Message, Receive, Scope, Send
from stillfresh.testing import ManualClock
from tests.kit.engine import turns, until
from tests.kit.isr import Site, Visitor, as_it_says, in_front


async def idle(pages: PageCache) -> None:
    while (await pages.stats()).resources["page"].loading:
        await asyncio.sleep(0)


def raw(*lines: str) -> Raw:
    pairs = (line.partition(": ") for line in lines)
    return tuple((name.lower().encode(), value.encode()) for name, _, value in pairs)


class TestI8BigErrors:
    @pytest.mark.parametrize("status", [500, 503, 429])
    async def test_an_error_page_of_any_size_keeps_the_old_page(
        self, pages: PageCache, site: Site, clock: ManualClock, status: int
    ) -> None:
        """Bigger than what is kept of a page, it is a failure all the same."""
        visit = in_front(site, pages, max_body=1_000)
        site.body = b"good"
        await visit()
        site.status, site.body = status, b"E" * 2_000
        clock.advance(61)
        assert (await visit()).text == "good"
        await idle(pages)
        kept = await visit()
        assert (kept.status_code, kept.text) == (200, "good")

    async def test_an_error_page_too_big_to_hold_is_served_as_its_status_only(
        self, pages: PageCache, site: Site
    ) -> None:
        """What is too big to be held for all who wait is not told; when to come again is."""
        visit = in_front(site, pages, max_body=1_000)
        site.says("Retry-After: 9", "X-Secret: 1", status=503)
        site.body = b"E" * 2_000
        answer = await visit()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "9")
        assert "x-secret" not in answer.headers
        assert len(answer.content) < 1_000
        assert site.renders == 1

    async def test_a_page_that_became_too_big_is_passed_through(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """It passes: what it said when it was small is not served for ever."""
        visit = in_front(site, pages, max_body=1_000)
        site.body = b"small"
        await visit()
        site.body = b"b" * 2_000
        clock.advance(61)
        assert (await visit()).text == "small"
        await idle(pages)
        for passed in (0, 10, 40):
            clock.advance(passed)
            assert len((await visit()).content) == 2_000
            await idle(pages)


class TestI8SlowApps:
    @pytest.mark.parametrize("is_routed", [True, False])
    async def test_an_app_that_times_out_is_called_once_for_all_waiting_visitors(
        self, pages: PageCache, site: Site, *, is_routed: bool
    ) -> None:
        """504 for each, after one wait."""
        site.error = TimeoutError("too slow")
        visit = in_front(site, pages) if is_routed else as_it_says(site, pages)
        site.hold()
        crowd = [asyncio.ensure_future(visit()) for _ in range(5)]
        await site.asked.wait()
        await turns(300)
        site.let_go()
        answers = await asyncio.gather(*crowd)
        assert {answer.status_code for answer in answers} == {504}
        assert site.renders == 1

    async def test_a_visitor_that_waits_too_long_for_an_unknown_page_is_forwarded(
        self, url: str, clock: ManualClock, site: Site
    ) -> None:
        """It may be private, and then nobody's render would ever be his."""
        rests: list[asyncio.Event] = []

        async def rest(_: float) -> None:
            rests.append(asyncio.Event())
            await rests[-1].wait()

        site.says("Cache-Control: private")
        async with PageCache(url, clock=clock, sleep=rest) as pages:
            visit = as_it_says(site, pages)
            site.hold()
            crowd = [asyncio.ensure_future(visit()) for _ in range(3)]
            await site.asked.wait()
            await turns(300)
            for one in rests:
                one.set()
            await until(lambda: site.renders >= 3)
            site.let_go()
            answers = await asyncio.gather(*crowd)
        assert {answer.status_code for answer in answers} == {200}


class TestI13OuterLayers:
    async def test_a_root_path_set_by_an_outer_layer_is_in_the_key(
        self, pages: PageCache, site: Site
    ) -> None:
        """Whatever an outer layer believes of a visitor, the others are not served it."""

        async def prefixed(scope: Scope, receive: Receive, send: Send) -> None:
            prefix = dict(scope["headers"]).get(b"x-forwarded-prefix", b"").decode()
            await isr({**scope, "root_path": prefix}, receive, send)

        isr = IsrMiddleware(site, pages, routes={"/pricing": 60})
        visit = Visitor(prefixed)
        evil = {"x-forwarded-prefix": "/evil"}
        texts = [(await visit(headers=it)).text for it in (evil, {}, evil, {}, evil)]
        assert texts == ["page 1", "page 2", "page 1", "page 2", "page 1"]
        assert [scope["root_path"] for scope in site.scopes] == ["/evil", ""]
        await visit(method="POST")
        assert (await visit()).text == "page 4"
        assert (await visit(headers=evil)).text == "page 5"

    async def test_a_render_is_requested_as_http_1_1(self, pages: PageCache, site: Site) -> None:
        """A render is asked for by HTTP/1.1, whoever came first."""

        async def old(scope: Scope, receive: Receive, send: Send) -> None:
            await isr({**scope, "http_version": "1.0"}, receive, send)

        isr = IsrMiddleware(site, pages, routes={"/pricing": 60})
        await Visitor(old)()
        assert site.scopes[0]["http_version"] == "1.1"

    @pytest.mark.parametrize("how", ["wrapped", "added"])
    async def test_a_mounted_app_builds_urls_below_its_mount(
        self, pages: PageCache, how: str
    ) -> None:
        """Its links begin with its mount, and the mount's own parameters reach it."""

        def page(request: Request) -> PlainTextResponse:
            return PlainTextResponse(f"{request.url_for('page')} {request.path_params['lang']}")

        inner = Starlette(routes=[At("/page", page, name="page")])
        app: App = inner
        if how == "wrapped":
            app = IsrMiddleware(inner, pages, routes={"/*": 60})
        else:
            inner.add_middleware(IsrMiddleware, pages=pages, routes={"/*": 60})
        visit = Visitor(Starlette(routes=[Mount("/{lang}/docs", app=app)]))
        for lang in ("de", "en"):
            answer = await visit(f"/{lang}/docs/page")
            assert answer.text == f"http://example.com/{lang}/docs/page {lang}"
        assert "hit" in (await visit("/de/docs/page")).headers["cache-status"]

    async def test_a_scope_without_a_scheme_is_http(self, pages: PageCache, site: Site) -> None:
        """ASGI: it is http then."""
        isr = IsrMiddleware(site, pages, routes={"/pricing": 60})
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/pricing", "query_string": b""}
        for _ in range(2):
            await isr({**scope, "headers": [(b"host", b"example.com")]}, receive, send)
        assert [it["body"] for it in sent if "body" in it] == [b"page 1"] * 2


class TestI13VagueHeaders:
    @pytest.mark.parametrize(
        "line",
        [
            "private max-age=0",
            "no-store; max-age=0",
            "max-age=60; private",
            'max-age=60, x="a, private',
            "max-age=60, =no-store",
            "NO-STORE/",
        ],
    )
    async def test_a_misspelt_private_or_no_store_counts_as_private(
        self, pages: PageCache, site: Site, line: str
    ) -> None:
        """A route's duration does not make up for a misspelt refusal."""
        site.says(f"Cache-Control: {line}")
        visit = in_front(site, pages)
        assert (await visit()).text != (await visit()).text

    @pytest.mark.parametrize(
        "line", ['max-age=60, x="private"', "max-age=60, x-private", "max age=60", "public, a b"]
    )
    def test_malformed_directives_without_privacy_are_not_private(self, line: str) -> None:
        """Nor is a line that is malformed and says nothing of privacy."""
        assert private(200, raw(f"cache-control: {line}")) is None

    @pytest.mark.parametrize("name", ["Vary", "Set-Cookie", "CDN-Cache-Control", "Expires"])
    def test_a_connection_field_does_not_hide_fields_that_decide_about_sharing(
        self, name: str
    ) -> None:
        """Whom a page is for is for every cache to know."""
        fields = raw(f"Connection: {name}, X-Own", f"{name}: a", "X-Own: 1")
        assert end_to_end(fields) == raw(f"{name}: a")

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            ("de;q=0, *", "*, de;q=0"),
            ("fr, *;q=0", "fr"),
            ("en, en-GB;q=0.0, de;q=0", "en, en-gb;q=0"),
            ("de;q=x, en", "en"),
        ],
    )
    def test_a_refused_language_stays_refused(self, asked: str, expected: str) -> None:
        """RFC 9110 §12.5.4: a weight of zero takes out of what else would be meant."""
        assert normalised("accept-language", raw(f"accept-language: {asked}")) == expected


class TestI14Dates:
    async def test_a_304_without_a_date_has_the_date_of_now(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """RFC 9110 §6.6.1: who receives it notes when; else the page's old date would age it."""
        dated = "Date: Tue, 14 Nov 2023 22:13:20 GMT"  # when the clock starts
        site.says('ETag: "v1"', "Cache-Control: max-age=10", dated)
        site.validates = True
        visit = as_it_says(site, pages)
        await visit()
        site.says('ETag: "v1"', "Cache-Control: max-age=10")
        for _ in range(2):
            clock.advance(10)
            first = await visit()
            assert first.headers["age"] == "0"
        clock.advance(9)
        again = await visit()
        assert "hit" in again.headers["cache-status"]
        assert again.headers["date"] == "Tue, 14 Nov 2023 22:13:40 GMT"
        assert site.renders == 3
