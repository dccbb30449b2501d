"""I13: known attacks on shared caches, each tried and each in vain."""

import asyncio
from contextlib import suppress

import pytest

from stillfresh.pages import IsrMiddleware, PageCache, Route
from stillfresh.pages.routes import Forward
from stillfresh.pages.upstream import Upstream
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, Visitor, as_it_says, in_front

PUBLIC = "Cache-Control: public, max-age=60"


class TestI13Poisoning:
    @pytest.mark.parametrize(
        "header",
        ["X-Forwarded-Host", "X-Forwarded-Scheme", "X-Original-URL", "X-Rewrite-URL", "Forwarded",
         "X-HTTP-Method-Override", "Cookie", "User-Agent", "Referer", "Origin", "X-Forwarded-For"],
    )  # fmt: skip
    async def test_a_header_that_is_not_in_the_key_does_not_reach_the_render(
        self, pages: PageCache, site: Site, header: str
    ) -> None:
        """What the app makes of it can therefore not be served to others."""
        visit = in_front(site, pages)
        await visit(headers={header: "evil"})
        assert site.seen(header) in ([], ["stillfresh"])

    async def test_another_host_has_pages_of_its_own(self, pages: PageCache, site: Site) -> None:
        """Whoever spoofs a host fools himself."""
        visit = in_front(site, pages)
        assert (await visit(headers={"host": "evil.example"})).text == "page 1"
        assert (await visit()).text == "page 2"
        assert site.seen("host") == ["example.com"]

    async def test_a_host_that_is_not_allowed_is_not_cached(
        self, pages: PageCache, site: Site
    ) -> None:
        """It passes, for the app to refuse."""
        visit = in_front(site, pages, hosts=["example.com"])
        for _ in range(2):
            await visit(headers={"host": "evil.example"})
        assert site.renders == 2
        assert [(await visit()).text for _ in range(2)] == ["page 3", "page 3"]
        assert (await pages.stats()).resources["page"].entries == 1

    async def test_made_up_hosts_beyond_the_limit_are_not_stored(
        self, pages: PageCache, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Past a number of them they pass."""
        monkeypatch.setattr("stillfresh.pages.asgi.MAX_HOSTS", 3)
        visit = in_front(site, pages)
        for number in range(6):
            await visit(headers={"host": f"{number}.example"})
        assert (await pages.stats()).resources["page"].entries == 3

    @pytest.mark.parametrize("host", ["example.com/evil", "a b", "example.com@evil", ""])
    async def test_a_malformed_host_is_not_cached(
        self, pages: PageCache, site: Site, host: str
    ) -> None:
        """Nothing of it becomes a key."""
        await in_front(site, pages)(headers={"host": host})
        assert (await pages.stats()).resources["page"].entries == 0

    async def test_a_400_for_an_odd_request_does_not_replace_the_page(
        self, pages: PageCache, site: Site
    ) -> None:
        """An app that answers 400 to one visitor's odd header answers 200 to the page's render."""
        visit = in_front(site, pages)
        site.status = 400
        assert (await visit(headers={"x-odd": "%" * 100})).status_code == 400
        site.status = 200
        await pages.purge("/pricing")
        assert (await visit()).status_code == 200

    async def test_a_response_header_with_a_line_break_is_not_cached(
        self, pages: PageCache, site: Site
    ) -> None:
        """A header with a line break in it is nobody's page."""
        site.headers.append((b"x-echo", b"a\r\nset-cookie: b=c"))
        await in_front(site, pages)()
        assert (await pages.explain("http://example.com/pricing")).age == 0
        assert not (await pages.stats()).resources["page"].leases_denied
        assert (await pages.stats()).resources["page"].absent == 1

    async def test_requests_with_oversized_urls_are_not_cached(
        self, pages: PageCache, site: Site
    ) -> None:
        """No key of that size is made."""
        visit = in_front(site, pages, routes={"/blog/*": Route("60s", query=None)})
        await visit("/blog/" + "a" * 9_000)
        await visit("/blog/a?q=" + "a" * 9_000)
        assert (await pages.stats()).resources["page"].entries == 0

    async def test_variants_beyond_the_limit_are_not_cached(
        self, pages: PageCache, site: Site
    ) -> None:
        """So many for a key; those beyond are answered by the app, and not kept."""
        site.says("Vary: User-Agent")
        visit = in_front(site, pages, max_variants=3)
        for number in range(10):
            assert (await visit(headers={"user-agent": f"agent {number}"})).status_code == 200
        assert (await pages.stats()).resources["page"].entries <= 4

    async def test_a_variant_of_many_long_headers_is_not_cached(
        self, pages: PageCache, site: Site
    ) -> None:
        """They pass."""
        names = [f"x-{number}" for number in range(30)]
        site.says(f"Vary: {', '.join(names)}")
        visit = in_front(site, pages)
        await visit()
        assert (await visit(headers=dict.fromkeys(names, "a" * 900))).status_code == 200
        assert (await pages.stats()).resources["page"].entries == 1

    async def test_a_variant_of_a_very_long_header_is_not_cached(
        self, pages: PageCache, site: Site
    ) -> None:
        """It passes."""
        site.says("Vary: X-Kind")
        visit = in_front(site, pages)
        await visit()
        await visit(headers={"x-kind": "a" * 5_000})
        assert (await pages.stats()).resources["page"].entries == 1


class TestI13Privacy:
    @pytest.mark.parametrize(
        "line",
        ["Set-Cookie: session=1", "Cache-Control: private", "Cache-Control: no-store", "Vary: *"],
    )
    async def test_a_private_response_goes_only_to_its_visitor(
        self, pages: PageCache, site: Site, line: str
    ) -> None:
        """Under a route too; and it is made from his own request, with his cookie."""
        site.says(line)
        visit = in_front(site, pages)
        alice = await visit(headers={"cookie": "user=alice"})
        assert site.seen("cookie") == ["user=alice"]
        bob = await visit(headers={"cookie": "user=bob"})
        assert site.seen("cookie") == ["user=bob"]
        assert alice.text != bob.text
        assert "hit" not in bob.headers["cache-status"]

    async def test_a_visitor_with_authorization_gets_its_own_response(
        self, pages: PageCache, site: Site
    ) -> None:
        """RFC 9111 §3.5: unless the stored page is explicitly for all."""
        visit = in_front(site, pages)
        await visit()
        own = await visit(headers={"authorization": "Bearer x"})
        assert (own.text, site.seen("authorization")) == ("page 2", ["Bearer x"])
        assert (await visit()).text == "page 1"

    @pytest.mark.parametrize(
        "says", ["public, max-age=60", "s-maxage=60", "max-age=60, must-revalidate"]
    )
    async def test_a_public_page_is_served_to_visitors_with_authorization(
        self, pages: PageCache, site: Site, says: str
    ) -> None:
        """`public`, `s-maxage` or `must-revalidate`."""
        site.says(f"Cache-Control: {says}")
        visit = as_it_says(site, pages)
        await visit()
        assert (await visit(headers={"authorization": "Bearer x"})).text == "page 1"

    async def test_a_public_page_is_stored_though_its_first_visitor_has_authorization(
        self, pages: PageCache, site: Site
    ) -> None:
        """By its key, rendered without who he is once his own answer said that it is for all."""
        site.says(PUBLIC)
        visit = as_it_says(site, pages, forward="key")
        texts = [(await visit(headers={"authorization": "Bearer x"})).text for _ in range(3)]
        assert texts == ["page 1", "page 2", "page 2"]
        assert site.seen("authorization") == []

    async def test_an_error_of_an_anonymous_render_is_not_served_to_authorization(
        self, pages: PageCache, site: Site
    ) -> None:
        """His own request is passed on."""
        visit = in_front(site, pages)
        site.status = 500
        await visit()
        site.status = 200
        assert (await visit(headers={"authorization": "Bearer x"})).status_code == 200

    async def test_each_value_of_a_declared_header_is_another_page(
        self, pages: PageCache, site: Site
    ) -> None:
        """Also when the page is in memory."""
        visit = in_front(site, pages, routes={"/*": Route("1m", vary=["Accept-Language"])})
        asked = ["fr", "de", "fr", "de", "", "fr"]
        said = [(await visit(headers={"accept-language": it} if it else {})).text for it in asked]
        assert said == ["page 1", "page 2", "page 1", "page 2", "page 3", "page 1"]

    @pytest.mark.parametrize(
        "line", ["Set-Cookie: session=1", "Cache-Control: private", "Cache-Control: no-store"]
    )
    async def test_a_personal_error_goes_to_one_visitor_only(
        self, pages: PageCache, site: Site, line: str
    ) -> None:
        """The others who waited hear that there was one, and nothing of it."""
        visit = in_front(site, pages)
        site.says(line, "X-Of: one", "Retry-After: 7", status=500)
        site.hold()
        visits = [asyncio.ensure_future(visit()) for _ in range(3)]
        await site.asked.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        site.let_go()
        told = await asyncio.gather(*visits)
        assert [page.status_code for page in told] == [500] * 3
        assert len([page for page in told if "x-of" in page.headers]) == 1
        assert len([page for page in told if page.text == "page 1"]) == 1
        assert len([page for page in told if "set-cookie" in page.headers]) <= 1
        assert {page.headers["retry-after"] for page in told} == {"7"}

    async def test_a_no_store_request_is_not_stored(self, pages: PageCache, site: Site) -> None:
        """`no-store`: nothing of it is kept."""
        visit = in_front(site, pages)
        await visit(headers={"cache-control": "no-store"})
        assert (await pages.stats()).resources["page"].entries == 0
        assert (await visit()).text == "page 2"

    async def test_a_page_that_varies_by_cookie_is_not_shared_with_cookies(
        self, pages: PageCache, site: Site
    ) -> None:
        """Those without one share; those with one have their own."""
        site.says("Vary: Cookie")
        visit = in_front(site, pages)
        texts = [(await visit(headers=it)).text for it in ({}, {"cookie": "a=1"}, {})]
        assert texts == ["page 1", "page 2", "page 1"]

    @pytest.mark.parametrize("scheme", ["NTLM", "Negotiate"])
    async def test_a_connection_authenticated_for_one_client_is_not_reused(
        self, pages: PageCache, scheme: str
    ) -> None:
        """RFC 4559 §6: sites take what follows on it for the same client's."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            name = b"nobody"
            with suppress(asyncio.IncompleteReadError):
                while head := await reader.readuntil(b"\r\n\r\n"):
                    name = b"alice" if b"authorization: " + scheme.encode() in head else name
                    said = b"Cache-Control: max-age=60\r\nContent-Length: %d\r\n\r\n" % len(name)
                    writer.write(b"HTTP/1.1 200 OK\r\n" + said + name)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            site = Upstream(f"http://127.0.0.1:{port}", clock=pages.clock)
            visit = in_front(site, pages)
            own = await visit("/mine", headers={"authorization": f"{scheme} abc"}, method="POST")
            texts = [(await visit(path)).text for path in ("/mine", "/pricing")]
            site.addresses.close()
        assert (own.text, texts) == ("alice", ["nobody", "nobody"])


class TestI13Deception:
    @pytest.mark.parametrize(
        "asked",
        ["/account/x.css", "/account%2Fx.css", "/account%2fx.css", "/account;x.css",
         "/account%3Fx.css", "/account%23x.css", "/account%00x.css", "/account%0Ax.css",
         "/static/..%2Faccount", "/static/%2e%2e/account", "/static//account", "/account/.css",
         "/static%2F..%2faccount", "/static/x%2F..%2F..%2Faccount", "/static%2fx%2Fy.css",
         "/account%2Fstatic%2Fx.css", "/account/a%2Fb.css"],
    )  # fmt: skip
    @pytest.mark.parametrize("way", [None, "request"])
    async def test_a_static_suffix_makes_no_personal_page_public(
        self, pages: PageCache, site: Site, asked: str, way: Forward | None
    ) -> None:
        """Alice's page, asked for under a name that looks static, is not served to Mallory."""
        routes = {"/static/*": "1h", "/account*": None}
        visit = in_front(site, pages, routes=routes, forward=way)
        site.body = b"alice's balance"
        await visit(asked, headers={"cookie": "user=alice"})
        site.body = b"please log in"
        assert (await visit(asked)).text == "please log in"

    async def test_a_page_marked_public_by_mistake_is_rendered_without_cookies(
        self, pages: PageCache, site: Site
    ) -> None:
        """By its key, pages that a site marks as public by mistake are rendered anonymously."""
        site.says(PUBLIC)
        visit = as_it_says(site, pages, forward="key")
        texts = [(await visit("/account/x.css", headers={"cookie": it})).text for it in "abc"]
        assert texts == ["page 1", "page 2", "page 2"]  # the first one's own is for him alone
        assert site.seen("cookie") == []

    async def test_the_app_gets_exactly_the_query_that_is_in_the_key(
        self, pages: PageCache, site: Site
    ) -> None:
        """The app sees the very query that is in the key."""
        visit = in_front(site, pages, routes={"/search": Route("60s", query=["q"])})
        for query in ("utm=1;q=evil&q=good", "q=good&utm=2", "utm=%26q%3Devil&q=good"):
            await visit(f"/search?{query}")
            assert site.scopes[-1]["query_string"] == b"q=good"
        assert site.renders == 1

    async def test_the_body_of_a_get_does_not_reach_the_render(
        self, pages: PageCache, site: Site
    ) -> None:
        """What is not in the key, the render does not read."""
        app = IsrMiddleware(site, pages, routes={"/pricing": 60})
        visitor = Visitor(app)
        await visitor.client.request("GET", "/pricing", content=b"evil=1")
        assert site.seen("content-length") == []


class TestI13Tenants:
    async def test_tenants_with_one_host_and_one_store_never_meet(
        self, url: str, clock: ManualClock, site: Site
    ) -> None:
        """The tenant is in every key, also in that of a variant."""
        if url == "memory://":
            pytest.skip("a store of one process has one tenant's cache in it")
        site.says("Vary: Accept-Language")
        async with (
            PageCache(url, clock=clock, tenant="a") as one,
            PageCache(url, clock=clock, tenant="b") as two,
        ):
            texts = [
                (await in_front(site, pages)(headers=headers)).text
                for pages in (one, two, one, two)
                for headers in ({}, {"accept-language": "de"})
            ]
        assert texts == [f"page {number}" for number in (1, 2, 3, 4, 1, 2, 3, 4)]
