"""I24: without a route's duration the site is asked with the visitor's own request, once."""

import asyncio
from typing import Any

import pytest

from stillfresh.errors import ConfigError
from stillfresh.pages import IsrMiddleware, PageCache, Route
from stillfresh.pages.model import App
from stillfresh.testing import ManualClock
from tests.kit.engine import idle, turns, until
from tests.kit.isr import Site, Visitor, as_it_says

FRESH = "Cache-Control: max-age=60"
KEY = {"x-api-key": "secret"}
GERMAN = {"accept-language": "de"}


def wants_a_key(site: Site) -> App:
    """A site that refuses requests without an `X-Api-Key`, and says how long that holds."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        site.status = 200 if b"x-api-key" in dict(scope["headers"]) else 401
        await site(scope, receive, send)

    return app


def speaks(site: Site) -> App:
    """A site that answers in the language it is asked for."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        site.body = dict(scope["headers"]).get(b"accept-language", b"en")
        await site(scope, receive, send)

    return app


class TestI24AsAsked:
    async def test_the_first_visit_carries_the_visitors_own_headers(
        self, pages: PageCache, site: Site
    ) -> None:
        """A client with a key is let in at its first visit, and the site is asked once."""
        site.says(FRESH)
        answer = await as_it_says(wants_a_key(site), pages)(headers=KEY)
        assert (answer.status_code, site.renders) == (200, 1)

    async def test_a_401_of_one_visitor_is_not_served_to_a_visitor_with_a_key(
        self, pages: PageCache, site: Site
    ) -> None:
        """A 401 that states freshness is not for a client that sends its key."""
        site.says(FRESH)
        visit = as_it_says(wants_a_key(site), pages)
        told = [(await visit(headers=it)).status_code for it in ({}, KEY, {}, KEY)]
        assert told == [401, 200, 401, 200]

    async def test_the_first_visit_in_each_language_is_answered_in_it(
        self, pages: PageCache, site: Site
    ) -> None:
        """One request for each language, and each is stored by what `Vary` names."""
        site.says(FRESH, "Vary: Accept-Language")
        visit = as_it_says(speaks(site), pages)
        told = [(await visit(headers=it)).text for it in (GERMAN, {}, GERMAN, {})]
        assert (told, site.renders) == (["de", "en", "de", "en"], 2)

    async def test_visitors_of_two_languages_that_share_a_load_each_get_their_own(
        self, pages: PageCache, site: Site
    ) -> None:
        """A visitor who waited for another's load is not served what was made for that one."""
        site.says(FRESH, "Vary: Accept-Language")
        visit = as_it_says(speaks(site), pages)
        site.hold()
        crowd = [asyncio.ensure_future(visit(headers=it)) for it in (GERMAN, {}, GERMAN)]
        await site.asked.wait()
        await turns(300)
        site.let_go()
        assert [it.text for it in await asyncio.gather(*crowd)] == ["de", "en", "de"]
        assert site.renders == 2

    @pytest.mark.parametrize("line", ["Set-Cookie: a=1", "Cache-Control: private", "X-Says: no"])
    async def test_concurrent_visitors_of_a_private_page_ask_once_each(
        self, pages: PageCache, site: Site, line: str
    ) -> None:
        """Nobody is given an answer to another visitor's request."""
        site.says(line)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            site.body = dict(scope["headers"]).get(b"x-who", b"nobody")
            await site(scope, receive, send)

        visit = as_it_says(app, pages)
        names = ["a", "b", "c", "d"]
        crowd = [asyncio.ensure_future(visit(headers={"x-who": name})) for name in names]
        assert [it.text for it in await asyncio.gather(*crowd)] == names
        assert site.renders == 4

    @pytest.mark.parametrize("status", [500, 503, 429])
    async def test_an_error_response_goes_only_to_the_visitor_that_requested_it(
        self, pages: PageCache, site: Site, status: int
    ) -> None:
        """I25: a failing page is requested once; those who waited ask for themselves."""
        site.says("X-Error: 1", status=status)
        visit = as_it_says(site, pages)
        site.hold()
        crowd = [asyncio.ensure_future(visit()) for _ in range(3)]
        await site.asked.wait()
        await turns(300)
        site.let_go()
        answers = await asyncio.gather(*crowd)
        assert {it.status_code for it in answers} == {status}
        assert len({it.text for it in answers}) == site.renders == 3
        assert ((await visit()).status_code, site.renders) == (status, 4)

    async def test_an_app_that_raises_is_called_once(self, pages: PageCache, site: Site) -> None:
        """I25: its exception reaches the visitor, as without a cache."""
        site.error = RuntimeError("bug")
        with pytest.raises(RuntimeError, match="bug"):
            await as_it_says(site, pages)()
        assert site.renders == 1

    async def test_a_page_too_big_to_cache_is_requested_once(
        self, pages: PageCache, site: Site
    ) -> None:
        """It streams on to the visitor, whether or not its length was announced."""
        for lines in ([FRESH], [FRESH, "Content-Length: 3000"]):
            site.says(*lines)
            site.body = b"b" * 3_000
            before = site.renders
            visit = as_it_says(site, pages, max_body=1_000)
            answer = await visit(f"/{len(lines)}")
            assert (len(answer.content), site.renders) == (3_000, before + 1)
            assert answer.headers["cache-status"] == "stillfresh; fwd=miss; detail=size"

    async def test_a_visitor_that_leaves_ends_its_own_uncached_response(
        self, pages: PageCache, site: Site
    ) -> None:
        """Nobody takes it over: the app's task ends, and the next visitor has an answer."""
        ends: list[str] = []

        async def endless(scope: Any, receive: Any, send: Any) -> None:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while True:
                    await send({"type": "http.response.body", "body": b"x", "more_body": True})
                    await asyncio.sleep(0)
            finally:
                ends.append("ended")

        visit = as_it_says(endless, pages)
        leaving = asyncio.ensure_future(visit())
        await turns(100)
        leaving.cancel()
        await until(lambda: ends == ["ended"])
        assert ((await as_it_says(site, pages)("/next")).text) == "page 1"

    async def test_an_app_that_stops_receiving_still_answers(
        self, pages: PageCache, site: Site
    ) -> None:
        """It listened for the visitor's leaving, and gave that up before he took the answer."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            listening = asyncio.ensure_future(receive())
            await asyncio.sleep(0)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(2):
                await asyncio.sleep(0)
            listening.cancel()
            await send({"type": "http.response.body", "body": b"all of it"})

        assert (await as_it_says(app, pages)()).text == "all of it"

    async def test_a_head_request_of_a_private_page_is_one_request_without_a_body(
        self, pages: PageCache, site: Site
    ) -> None:
        """One request, also where the page is not for all."""
        site.says("Cache-Control: private")
        head = await as_it_says(site, pages)(method="HEAD")
        assert (head.status_code, head.content, site.renders) == (200, b"", 1)

    @pytest.mark.parametrize(
        ("headers", "reason"),
        [
            ({"range": "bytes=0-1"}, "range"),
            ({"content-length": "2"}, "body"),
            ({"x-big": "a" * 9_000}, "headers"),
            ({"x-bell": "a\x07b"}, "headers"),
        ],
    )
    async def test_odd_requests_are_passed_through_and_never_stored(
        self, pages: PageCache, site: Site, headers: dict[str, str], reason: str
    ) -> None:
        """A site's refusal of an odd request (CPDoS) does not become everybody's page."""
        site.says(FRESH, status=400)
        visit = as_it_says(site, pages)
        odd = await visit(headers=headers)
        how = "miss" if reason == "range" else "bypass"
        assert odd.headers["cache-status"] == f"stillfresh; fwd={how}; detail={reason}"
        assert [site.seen(name) for name in headers] == [[it] for it in headers.values()]
        site.status = 200
        assert (await visit()).status_code == 200
        again = await visit(headers=headers)
        assert "hit" in again.headers["cache-status"]


class TestI24Credentials:
    @pytest.mark.parametrize(
        ("name", "says", "is_shared"),
        [
            ("authorization", "max-age=60", False),
            ("authorization", "public, max-age=60", True),
            ("authorization", "max-age=60, must-revalidate", True),
            ("x-api-key", "max-age=60", False),
            ("x-api-key", "s-maxage=60", True),
            ("cookie", "max-age=60", False),
            ("cookie", "max-age=60, must-revalidate", False),
            ("cookie", "s-maxage=60", True),
            ("cookie", "public, max-age=60", True),
        ],
    )
    async def test_a_response_to_credentials_is_shared_only_if_it_says_so(
        self, pages: PageCache, site: Site, name: str, says: str, *, is_shared: bool
    ) -> None:
        """`must-revalidate` allows it for credentials, not for cookies."""
        site.says(f"Cache-Control: {says}")
        visit = as_it_says(site, pages)
        assert (await visit(headers={name: "one"})).text == "page 1"
        assert site.seen(name) == ["one"]
        assert ((await visit(headers={name: "two"})).text == "page 1") is is_shared
        assert ((await visit()).text == "page 1") is is_shared

    @pytest.mark.parametrize("name", ["authorization", "x-api-key"])
    @pytest.mark.parametrize(("says", "renders"), [("max-age=60", 2), ("public, max-age=60", 1)])
    async def test_a_client_with_credentials_shares_a_load_only_if_the_response_allows_it(
        self, pages: PageCache, site: Site, name: str, says: str, renders: int
    ) -> None:
        """It waited for the load of a visitor without any, as it would find it stored."""
        site.says(f"Cache-Control: {says}")
        visit = as_it_says(site, pages)
        site.hold()
        crowd = [asyncio.ensure_future(visit(headers=it)) for it in ({}, {name: "one"}, {})]
        await site.asked.wait()
        await turns(300)
        site.let_go()
        texts = [it.text for it in await asyncio.gather(*crowd)]
        assert texts == ["page 1", f"page {renders}", "page 1"]
        assert site.renders == renders

    async def test_the_credentials_option_names_the_fields_that_are_credentials(
        self, pages: PageCache, site: Site
    ) -> None:
        """`credentials=` names them; their values never become part of a key."""
        site.says("Cache-Control: public, max-age=60", "Vary: X-Mine")
        visit = as_it_says(site, pages, credentials=["X-Mine"])
        texts = [(await visit(headers={"x-mine": it})).text for it in "aba"]
        assert texts == ["page 1", "page 2", "page 3"]
        assert all("mine" not in entry.id for entry in await pages.cache.entries("page"))

    async def test_a_stored_page_is_served_to_cookies_but_not_to_credentials(
        self, pages: PageCache, site: Site
    ) -> None:
        """A page made without a cookie serves visitors with one; credentials have their own."""
        site.says(FRESH)
        visit = as_it_says(site, pages)
        sent: list[dict[str, str]] = [{}, {"cookie": "a=1"}, KEY]
        assert [(await visit(headers=it)).text for it in sent] == ["page 1", "page 1", "page 2"]

    async def test_a_background_refresh_carries_no_cookie(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """The stored page was made without one, and stays so; its variant is asked for."""
        site.says("Cache-Control: max-age=10, stale-while-revalidate=60", "Vary: Accept-Language")
        visit = as_it_says(speaks(site), pages)
        await visit(headers=GERMAN)
        clock.advance(20)
        assert (await visit(headers={**GERMAN, "cookie": "a=1"})).text == "de"
        await until(lambda: site.renders == 2)
        assert (site.seen("cookie"), site.seen("accept-language")) == ([], ["de"])
        await idle(pages.cache)
        assert "hit; ttl=10" in (await visit(headers=GERMAN)).headers["cache-status"]

    async def test_an_expired_page_is_not_refreshed_by_a_visitor_with_a_cookie(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """His own request is passed on, once, and the next one without a cookie loads it."""
        site.says(FRESH)
        visit = as_it_says(site, pages)
        await visit()
        clock.advance(61)
        own = await visit(headers={"cookie": "a=1"})
        assert (own.text, site.seen("cookie")) == ("page 2", ["a=1"])
        assert own.headers["cache-status"] == "stillfresh; fwd=bypass; detail=cookie"
        assert (await visit()).text == (await visit()).text == "page 3"

    async def test_a_waiting_visitor_with_a_cookie_is_forwarded_with_it(
        self, pages: PageCache, site: Site, clock: ManualClock
    ) -> None:
        """Memory may still have a page that is gone: his answer is not made without his fields."""
        site.says(FRESH)
        visit = as_it_says(site, pages)
        await visit()
        clock.advance(90 * 86_400)
        site.says(status=503)
        own = await visit(headers={"cookie": "a=1"})
        assert (own.status_code, own.text, site.seen("cookie")) == (503, "page 2", ["a=1"])

    async def test_a_response_to_a_cookie_does_not_make_the_page_private(
        self, pages: PageCache, site: Site
    ) -> None:
        """What is noted of visitors with cookies is noted apart."""
        site.says(FRESH)
        visit = as_it_says(site, pages)
        await visit(headers={"cookie": "a=1"})
        assert [(await visit()).text for _ in range(2)] == ["page 2", "page 2"]


class TestI24Ways:
    @pytest.mark.parametrize(
        ("route", "forward", "reaches"),
        [
            (Route(None), None, True),
            (Route("60s"), None, False),
            (Route("60s", forward="request"), None, True),
            (Route(None, forward="key"), None, False),
            (Route("60s"), "request", True),
            (Route(None), "key", False),
            (Route("60s", forward="key"), "request", False),
        ],
    )
    async def test_a_route_sets_whether_the_site_gets_the_whole_request(
        self, pages: PageCache, site: Site, route: Route, forward: Any, *, reaches: bool
    ) -> None:
        """Else the site's own setting; else by its key only where the route has a duration."""
        site.says(FRESH)
        visit = as_it_says(site, pages, routes={"/*": route}, forward=forward)
        await visit(headers={"x-mine": "1"})
        assert (site.seen("x-mine") == ["1"]) is reaches

    async def test_a_routes_duration_counts_when_the_whole_request_is_forwarded(
        self, pages: PageCache, site: Site
    ) -> None:
        """As asked, too, a page that says nothing is kept for as long as its route says."""
        routes = {"/*": Route("60s", forward="request")}
        visit = as_it_says(site, pages, routes=routes)
        first, second = await visit(), await visit(headers={"cookie": "a=1"})
        assert (first.text, second.text) == ("page 1", "page 1")
        assert (await visit("/b", headers={"cookie": "a=1"})).text == "page 2"
        assert (await visit("/b")).text == "page 3"

    @pytest.mark.parametrize("way", ["both", 1, ""])
    def test_unknown_forward_values_and_bad_credentials_are_refused(
        self, site: Site, way: Any
    ) -> None:
        """Where it is written."""
        with pytest.raises(ConfigError, match="'request' or 'key'"):
            Route("60s", forward=way)
        with pytest.raises(ConfigError, match="'request' or 'key'"):
            as_it_says(site, PageCache("memory://"), forward=way)
        with pytest.raises(ConfigError, match="X-Api-Key"):
            as_it_says(site, PageCache("memory://"), credentials="X-Api-Key")
        with pytest.raises(ConfigError, match="not the name of a header field"):
            as_it_says(site, PageCache("memory://"), credentials=["a b"])


POISON = ["X-Forwarded-Host", "X-Forwarded-Scheme", "X-Original-URL", "X-Rewrite-URL", "Forwarded",
          "X-HTTP-Method-Override", "X-Forwarded-For", "X_Forwarded_Host", "X-Real-IP",
          "X-Original-Host", "Connection", "TE", "Proxy-Authorization"]  # fmt: skip


class TestI24Poisoning:
    @pytest.mark.parametrize("header", POISON)
    @pytest.mark.parametrize("forward", ["request", "key"])
    async def test_fields_that_clients_may_not_claim_do_not_reach_the_site(
        self, pages: PageCache, site: Site, header: str, forward: Any
    ) -> None:
        """Whichever way it is asked, and whatever `Vary` says."""
        site.says(FRESH)
        await as_it_says(site, pages, forward=forward)(headers={header: "evil"})
        assert site.seen(header) == []

    @pytest.mark.parametrize("forward", ["request", "key"])
    async def test_a_page_that_allows_one_origin_is_not_shared_with_another(
        self, pages: PageCache, site: Site, forward: Any
    ) -> None:
        """A site that reflects `Origin` and forgets `Vary` does not open the page to another."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            origin = dict(scope["headers"]).get(b"origin")
            allowed = [f"Access-Control-Allow-Origin: {origin.decode()}"] if origin else []
            site.says(FRESH, *allowed)
            await site(scope, receive, send)

        visit = as_it_says(app, pages, forward=forward)
        await visit(headers={"origin": "https://evil.example"})
        for headers in ({}, {"origin": "https://good.example"}):
            told = (await visit(headers=headers)).headers
            assert told.get("access-control-allow-origin") != "https://evil.example"

    @pytest.mark.parametrize("line", ["Vary: Accept-Language", "X-Says: nothing"])
    @pytest.mark.parametrize(
        "evil",
        [
            {"accept-language": "de", "connection": "close, Accept-Language"},
            {"accept-language": "de", "accept_language": "fr"},
            {"accept-language": "de", "accept_Language": "fr"},
        ],
    )
    async def test_a_variant_is_stored_only_for_fields_that_the_site_saw(
        self, pages: PageCache, site: Site, evil: dict[str, str], line: str
    ) -> None:
        """A field that `Connection` hides, or that another one imitates, fills no variant."""
        site.says(FRESH, line)
        routes = {"/*": Route(None, vary=["Accept-Language"])}
        visit = as_it_says(speaks(site), pages, routes=routes)
        await visit(headers=evil)
        assert ((await visit(headers=GERMAN)).text, site.renders) == ("de", 2)

    async def test_a_request_whose_field_imitates_a_credential_is_not_stored(
        self, pages: PageCache, site: Site
    ) -> None:
        """A site may read `X_Api_Key` as `X-Api-Key`."""
        site.says(FRESH)
        visit = as_it_says(site, pages)
        await visit(headers={"x_api_key": "secret"})
        assert [(await visit()).text for _ in range(3)] == ["page 2", "page 3", "page 3"]

    async def test_the_site_is_offered_only_encodings_that_are_cached(
        self, pages: PageCache, site: Site
    ) -> None:
        """A coding that no other visitor takes is not asked for."""
        visit = as_it_says(site, pages)
        for said, told in (("deflate, gzip;q=0.5, br", "br, gzip"), ("deflate", "identity")):
            await visit(f"/{told}", headers={"accept-encoding": said})
            assert site.seen("accept-encoding") == [told]

    async def test_a_mounted_app_gets_the_visitors_scope(
        self, pages: PageCache, site: Site
    ) -> None:
        """What an outer layer noted of the visitor is part of the visitor's own request."""
        isr = IsrMiddleware(site, pages)

        async def outer(scope: Any, receive: Any, send: Any) -> None:
            await isr({**scope, "user": "alice"}, receive, send)

        site.says("Cache-Control: private")
        await Visitor(outer)()
        assert site.scopes[0]["user"] == "alice"
