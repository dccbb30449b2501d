"""I32: the query, and an encoded slash, are in key and request as the visitor sent them."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh.gateway.config import PagesSettings, settings_of
from stillfresh.pages import IsrMiddleware, PageCache, Route
from stillfresh.pages.routes import (
    canonical_path,
    canonical_url,
    plain_path,
    query_of,
    reached,
    readable_path,
)
from tests.kit.isr import Site, Visitor, as_it_says, in_front
from tests.kit.serve import Proxy, raw_site

PUBLIC = "Cache-Control: public, max-age=60"
ALL = {"/blog/*": Route("10m", query=None)}


class TestI32Query:
    @pytest.mark.parametrize("way", ["request", "key"])
    @pytest.mark.parametrize(
        "query", ["b=2&a=1&sig=x", "a=1&&b=2", "&a=1&", "b&a=%7e%2f;c=+", "=", "x=[]|'"]
    )
    async def test_a_query_reaches_the_site_byte_for_byte_and_is_a_key(
        self, pages: PageCache, site: Site, way: str, query: str
    ) -> None:
        """Sorted or not, with empty parts: a site may have signed it."""
        site.says(PUBLIC)
        visit = as_it_says(site, pages, forward=way)
        first = await visit(f"/signed?{query}")
        second = await visit(f"/signed?{query}")
        assert site.scopes[0]["query_string"] == query.encode()
        assert site.renders == 1
        assert first.text == second.text

    async def test_another_order_of_parameters_is_another_page(
        self, pages: PageCache, site: Site
    ) -> None:
        """Only the site knows whether the order counts."""
        visit = in_front(site, pages, routes=ALL)
        texts = [(await visit(f"/blog/a?{it}")).text for it in ("a=1&b=2", "b=2&a=1", "a=1&b=2")]
        assert texts == ["page 1", "page 2", "page 1"]

    async def test_declared_parameters_limit_key_and_request_and_keep_their_order(
        self, pages: PageCache, site: Site
    ) -> None:
        """Their bytes stay, too."""
        visit = in_front(site, pages, routes={"/pricing": Route("60s", query=["a", "b"])})
        await visit("/pricing?utm=1&b=%2f&x&a=1&b=2")
        await visit("/pricing?b=%2f&utm=2&a=1&b=2")
        assert [it["query_string"] for it in site.scopes] == [b"b=%2f&a=1&b=2"]

    async def test_normalise_query_sorts_parameters_by_name(
        self, pages: PageCache, site: Site
    ) -> None:
        """Parameters of one name keep their order, because that may mean something."""
        visit = in_front(site, pages, routes=ALL, normalise_query=True)
        for query in ("b=2&a=1&b=1", "a=1&b=2&b=1", "&b=2&&b=1&a=1"):
            await visit(f"/blog/a?{query}")
        assert [it["query_string"] for it in site.scopes] == [b"a=1&b=2&b=1"]

    async def test_normalise_query_sorts_declared_parameters_too(
        self, pages: PageCache, site: Site
    ) -> None:
        routes = {"/pricing": Route("60s", query=["a", "b"])}
        visit = in_front(site, pages, routes=routes, normalise_query=True)
        for query in ("b=2&utm=1&a=1", "a=1&b=2"):
            await visit(f"/pricing?{query}")
        assert [it["query_string"] for it in site.scopes] == [b"a=1&b=2"]

    async def test_normalise_query_sorts_by_decoded_names(
        self, pages: PageCache, site: Site
    ) -> None:
        """An encoded name is the same name; the bytes of each parameter stay."""
        visit = in_front(site, pages, routes=ALL, normalise_query=True)
        for query in ("%62=2&a=1&b=1", "a=1&%62=2&b=1", "%62=2&b=1&a=1"):
            await visit(f"/blog/a?{query}")
        assert [it["query_string"] for it in site.scopes] == [b"a=1&%62=2&b=1"]

    def test_the_query_of_a_key_keeps_its_bytes_or_is_none(self) -> None:
        """None if no request can have it."""
        assert query_of(b"b=2&utm=x&a=1&b=1", {"a", "b"}) == "b=2&a=1&b=1"
        assert query_of(b"%71=1", {"q"}) == "%71=1"
        assert query_of(b"q=%ff", {"q"}) == "q=%ff"
        assert query_of(b"a=1&&=2&", {"", "a"}) == "a=1&=2"  # an empty part is no parameter
        assert query_of(b"a b", None) is None
        assert query_of(b"\xff", None) is None

    @given(st.binary(max_size=60))
    def test_the_query_of_a_key_is_its_own_form(self, query: bytes) -> None:
        """Limited, sorted or neither."""
        for declared in (None, {"a", "b"}):
            for is_sorted in (False, True):
                form = query_of(query, declared, is_sorted=is_sorted)
                if form is not None:
                    assert query_of(form.encode(), declared, is_sorted=is_sorted) == form


class TestI32OnDemand:
    ASKED = ("/pricing?b=2&a=1", "http://example.com/pricing?b=2&a=1")

    @pytest.mark.parametrize("named", ASKED)
    @pytest.mark.parametrize("is_sorted", [False, True])
    async def test_revalidate_and_purge_find_a_page_by_the_visitors_query(
        self, pages: PageCache, site: Site, named: str, *, is_sorted: bool
    ) -> None:
        """A path with its query, or the whole URL; also where the cache sorts."""
        routes = {"/pricing": Route("60s", query=None)}
        visit = in_front(site, pages, routes=routes, normalise_query=is_sorted)
        await visit("/pricing?b=2&a=1")
        await visit("/pricing?b=3")
        assert len(await pages.revalidate(named)) == 1
        assert len(await pages.purge(named)) == 1
        assert (await visit("/pricing?b=3")).text == "page 2"
        assert (await visit("/pricing?b=2&a=1")).text == "page 3"

    async def test_purge_finds_every_variant_of_the_query(
        self, pages: PageCache, site: Site
    ) -> None:
        """And no page of another query."""
        site.says("Vary: Accept-Language", PUBLIC)
        visit = as_it_says(site, pages)
        for language in ("de", "en"):
            await visit("/pricing?q=1", {"accept-language": language})
        await visit("/pricing")
        assert len(await pages.purge("/pricing?q=1")) == 2
        assert len(await pages.purge("/pricing")) == 1

    async def test_purge_finds_a_page_that_an_older_version_stored_with_a_sorted_query(
        self, pages: PageCache, site: Site
    ) -> None:
        """The operator names it as visitors do."""
        visit = in_front(site, pages, routes={"/pricing": Route("60s", query=None)})
        await visit("/pricing?a=1&b=2")  # as the first releases wrote the key of b=2&a=1
        reached_ids = await pages.purge("http://example.com/pricing?b=2&a=1")
        assert reached_ids == ["http://example.com/pricing?a=1&b=2"]

    async def test_a_post_invalidates_the_url_with_its_exact_query(
        self, pages: PageCache, site: Site
    ) -> None:
        visit = in_front(site, pages, routes={"/pricing": Route("60s", query=None)})
        await visit("/pricing?b=2&a=1")
        await visit("/pricing?b=2&a=1", method="POST")
        assert (await visit("/pricing?b=2&a=1")).text == "page 3"

    @pytest.mark.parametrize("named", ["/blog/a%2Fb", "http://example.com/blog/a%2Fb"])
    async def test_purge_by_a_path_with_an_encoded_slash_reaches_no_other_page(
        self, pages: PageCache, site: Site, named: str
    ) -> None:
        """Neither that of a real slash nor that of an encoded percent sign."""
        visit = in_front(site, pages)
        others = ["/blog/a/b", "/blog/a%252Fb", "/blog/a%25252Fb", "/blog/a%2fb"]
        for path in ("/blog/a%2Fb", *others):
            await visit(path)
        assert await pages.purge(named) == ["http://example.com/blog/a%2Fb"]
        assert site.renders == 5
        for path in others:
            assert "hit" in (await visit(path)).headers["cache-status"]

    @pytest.mark.parametrize(
        ("asked", "name"),
        [
            ("/pricing", "/pricing?"),
            ("/pricing", "http://example.com/pricing?"),
            ("/pricing?", "/pricing?"),
            ("/pricing?q=caf%C3%A9%20au%20lait", "/pricing?q=caf\u00e9 au lait"),
            ("/pricing?q=caf%C3%A9", "http://example.com/pricing?q=caf\u00e9"),
            ("/caf%C3%A9", "/caf\u00e9?"),
            ("/caf%C3%A9?q=%C3%A9", "http://example.com/caf\u00e9?q=\u00e9"),
            ("/?q=1", "http://example.com?q=1"),
        ],
    )
    async def test_purge_reads_a_url_as_a_browser_would_send_it(
        self, pages: PageCache, site: Site, asked: str, name: str
    ) -> None:
        """Without an empty query, and with characters encoded that no URL has."""
        site.says(PUBLIC)
        visit = as_it_says(site, pages)
        await visit(asked)
        assert len(await pages.revalidate(name)) == 1
        assert len(await pages.purge(name)) == 1

    @pytest.mark.parametrize("key", ["/search?q=1", "/search?", "/search"])
    async def test_revalidate_by_path_reaches_a_programs_page_with_a_query(
        self, pages: PageCache, site: Site, key: str
    ) -> None:
        """As it does for the pages of the middleware."""
        await pages.get(key, site.render, revalidate=60)
        assert await pages.revalidate("/search") == [key]
        assert await pages.purge(key) == [key]

    @pytest.mark.parametrize(("key", "name"), [("/a%3Fb", "/a"), ("/p?x=1", "/p?&")])
    async def test_purge_reaches_no_page_of_another_path_or_query(
        self, pages: PageCache, site: Site, key: str, name: str
    ) -> None:
        """An encoded question mark begins no query, and an empty parameter is not the path."""
        await pages.get(key, site.render, revalidate=60)
        assert await pages.purge(name) == []

    @pytest.mark.parametrize("sent", ['/s?q="a"', "/s?q=%22a%22"])
    async def test_purge_finds_quotes_in_a_query_encoded_or_not(
        self, pages: PageCache, site: Site, sent: str
    ) -> None:
        """Browsers encode them; curl does not."""
        await pages.get(sent, site.render, revalidate=60)
        assert await pages.purge('/s?q="a"') == [sent]

    def test_a_url_or_path_reaches_these_tags_and_keys(self) -> None:
        """I21."""
        assert canonical_url("http://A.b/x%2fy?b=2&&a=1") == "http://a.b/x%2fy?b=2&&a=1"
        assert plain_path("/caf%c3%a9%2F%252f") == "/caf\u00e9%2F%252f"
        assert reached("/x?b=2&a=1") == (
            ["path:/x?b=2&a=1", "path:/x?a=1&b=2"],
            ["/x?b=2&a=1", "/x?a=1&b=2"],
        )
        assert reached("/x?") == (["path:/x"], ["/x?", "/x"])
        assert reached("/a/../b?") == (["path:/a/../b?"], ["/a/../b?"])
        assert reached("default::/x?") == (["path:default::/x?"], ["default::/x?"])


class TestI11Scan:
    """`scan=True`: by every cache key that other programs may have given to a page."""

    @pytest.mark.parametrize(
        ("key", "name"),
        [
            ("https://example.com/news/a%2Fb", "/news/a%2Fb"),
            ("https://example.com/news/a%2fb", "/news/a%2fb"),
            ("/news/a%2Fb", "/news/a%2Fb"),
            ("default::/news/{slug}?slug=a%252Fb", "/news/a%2Fb"),
            ("/caf%c3%a9", "/caf\u00e9"),
            ("/caf\u00e9?q=1", "/caf%C3%A9"),
            ("https://example.com/caf\u00e9", "/caf%c3%a9"),
            ("default::/{slug}?slug=caf%25C3%25A9", "/caf\u00e9"),
            ("/search?q=1", "/search?q=1"),
            ("https://example.com/search?b=2&a=1", "/search?b=2&a=1"),
            ("https://example.com/search?q=%c3%a9", "/search?q=\u00e9"),
            ("default::/search?a=1&q=a%20b", "/search?q=a+b&a=1"),
            ("default::/news/{slug}?slug=a&q=1#cookies=01", "/news/a?q=1"),
            ("/search?q=1", "/search?"),
            ("https://example.com/news/a/", "/news/a/"),
            ("https://example.com/files/", "/files"),
            ("default::/files/{rest+}?rest=a%2F", "/files/a/"),
            ("default::/files/{rest*}?", "/files/"),
            ("default::/news/{slug}?slug=a", "/news/a/"),
            ("HTTPS://example.com", "/"),
            ("https://example.com/caf%C3%A9?q=1", "https://EXAMPLE.com/caf\u00e9"),
            ("https://example.com/a%3Fb?q=1", "/a%3Fb"),
            ("https://example.com/a%3fb", "/a%3Fb"),
            ("default::/{slug}?slug=a%253Fb&q=1", "/a%3Fb"),
            ("/a%3Fb?q=1", "/a%3Fb"),
        ],
    )
    async def test_a_scan_finds_the_page_with_this_cache_key(
        self, pages: PageCache, site: Site, key: str, name: str
    ) -> None:
        """However the path is encoded, on either side."""
        await pages.get(key, site.render, revalidate=60)
        assert await pages.revalidate(name, scan=True) == [key]
        assert await pages.purge(name, scan=True) == [key]

    @pytest.mark.parametrize(
        ("key", "name"),
        [
            ("https://example.com/news/a%2Fb", "/news/a/b"),
            ("https://example.com/news/a/b", "/news/a%2Fb"),
            ("https://example.com/news/a%252Fb", "/news/a%2Fb"),
            ("default::/news/{slug}?slug=a%252Fb", "/news/a/b"),
            ("https://example.com/search?q=2", "/search?q=1"),
            ("https://example.com/search", "/search?q=1"),
            ("default::/news/{slug}?slug=a&q=2", "/news/a?q=1"),
            ("https://example.com/searching", "/search"),
            ("something else", "/something"),
            ("/a%3Fb", "/a"),
            ("https://example.com/a%3Fb", "/a"),
            ("https://example.com/a%3Fb", "/a?b"),
            ("default::/{slug}?slug=a%253Fb", "/a"),
            ("https://example.com/a%253Fb", "/a%3Fb"),
            ("/x?q=%FE", "/x?q=%FF"),
        ],
    )
    async def test_a_scan_leaves_the_page_with_this_cache_key(
        self, pages: PageCache, site: Site, key: str, name: str
    ) -> None:
        """It is another path, or another query."""
        await pages.get(key, site.render, revalidate=60)
        assert await pages.revalidate(name, scan=True) == []


class TestI32EncodedSlash:
    @pytest.mark.parametrize("way", ["request", "key"])
    @pytest.mark.parametrize(
        "path", ["/blog/a%2Fb", "/blog/a%2fb", "/blog/https%3A%2F%2Fexample.com%2Fx", "/blog/%2F"]
    )
    async def test_an_encoded_slash_is_kept_as_sent_in_key_and_request(
        self, pages: PageCache, site: Site, way: str, path: str
    ) -> None:
        """And never decoded."""
        site.says(PUBLIC)
        visit = as_it_says(site, pages, forward=way)
        texts = {(await visit(path)).text for _ in range(2)}
        assert texts == {"page 1"}
        assert site.scopes[0]["raw_path"] == path.encode()
        ids = await pages.purge(f"http://example.com{path}")
        assert ids == [f"http://example.com{path}"]

    async def test_a_path_with_an_encoded_slash_is_another_page(
        self, pages: PageCache, site: Site
    ) -> None:
        visit = in_front(site, pages)
        paths = ("/blog/a%2Fb", "/blog/a/b", "/blog/a%252Fb", "/blog/a%2Fb")
        texts = [(await visit(path)).text for path in paths]
        assert texts == ["page 1", "page 2", "page 3", "page 1"]

    @pytest.mark.parametrize(
        "path",
        [b"/a%2F..%2Fb", b"/a/..%2Fb", b"/a/.%2Fb", b"/a%2F.", b"/..%2fb", b"/a/%2e%2e%2Fb",
         b"/a%2F%2e%2E", b"/a%5Cb", b"/a%2F%5Cb", b"/a%2F%00"],
    )  # fmt: skip
    def test_a_path_with_a_dot_segment_after_an_encoded_slash_is_not_cached(
        self, path: bytes
    ) -> None:
        """A server that decodes it would read another path."""
        assert canonical_path(path) is None

    @given(
        *[
            st.lists(
                st.sampled_from(
                    ["a", "/", "%2F", "%2f", "%25", "25", "2F", "%3F", "3F", "3f", "%C3%A9"]
                )
            )
        ]
        * 2
    )
    def test_two_paths_never_have_the_same_readable_form(
        self, one: list[str], other: list[str]
    ) -> None:
        """Their tags would be the same."""
        paths = {"/x" + "".join(it) for it in (one, other)}
        assert len({readable_path(path) for path in paths}) == len(paths)

    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            ("/static%2Fx", "path"),
            ("/blog%2Fx/y", "path"),
            ("/about%2Fx", None),
            ("/blog/x%2Fy", None),
        ],
    )
    async def test_a_path_whose_route_depends_on_decoding_is_not_cached(
        self, pages: PageCache, site: Site, path: str, reason: str | None
    ) -> None:
        """The site may decode it: then another route's terms would be right."""
        site.says(PUBLIC)
        routes = {"*": None, "/static/*": "1h", "/blog/*": "1m"}
        visit = in_front(site, pages, routes=routes)
        said = (await visit(path)).headers["cache-status"]
        assert (f"detail={reason}" in said) is (reason is not None)

    async def test_an_app_gets_the_path_as_servers_decode_it(
        self, pages: PageCache, site: Site
    ) -> None:
        """ASGI: `path` is decoded, `raw_path` is as sent; a rewritten path is part of the key."""
        visit = in_front(site, pages)
        await visit("/blog/a%2Fb")
        assert site.scopes[0]["path"] == "/blog/a/b"

        async def rewriting(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "path": "/blog/else"}, receive, send)

        app = IsrMiddleware(site, pages, {"/blog/*": "10m"})
        await Visitor(rewriting)("/blog/a%2Fb")
        assert [it["path"] for it in site.scopes] == ["/blog/a/b", "/blog/else"]


@pytest.mark.parametrize("path", ["/%2Faccount/x", "/%2faccount%2Fx", "/%2Fexact", "/account%2Fx"])
async def test_i32_a_path_that_the_site_may_read_as_another_route_is_not_cached(
    path: str, pages: PageCache, site: Site
) -> None:
    """The site may decode the slash, and merge slashes."""
    routes = {"/*": "10m", "/account/*": "1s", "/exact": "2s"}
    told = await Visitor(IsrMiddleware(site, pages, routes))(path)
    assert told.headers["cache-status"] == "stillfresh; fwd=bypass; detail=path"


def signed(request: bytes) -> bytes:
    """A site that accepts one very target, and says what it got."""
    target = request.split(b" ", 2)[1]
    head = b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: %d\r\n\r\n"
    return head % len(target) + target


@pytest.mark.parametrize("options", [(), ("--route", "/*=1m")])
def test_i32_a_get_reaches_the_site_byte_for_byte_and_is_stored(options: tuple[str, ...]) -> None:
    """Through `stillfresh serve` on real sockets, as asked and key only."""
    targets = [b"/q?b=%zz&&a=1;c", b"/q?z=1&sig=%2fx&a=2", b"/a%2Fb?c", b"/a%2fb"]
    with ExitStack() as stack:
        proxy = Proxy(stack, *options, upstream=raw_site(stack, signed))
        for target in targets:
            ask = b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            first, second = proxy.raw(ask), proxy.raw(ask)
            assert first.endswith(b"\r\n\r\n" + target)
            assert second.endswith(b"\r\n\r\n" + target)
            assert b"stillfresh; hit" in second


def test_i32_normalise_query_is_an_option_of_serve() -> None:
    targets = [b"/q?b=1&a=2", b"/q?a=2&b=1"]
    with ExitStack() as stack:
        proxy = Proxy(stack, "--normalise-query", upstream=raw_site(stack, signed))
        for target in targets:
            ask = b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            assert proxy.raw(ask).endswith(b"/q?a=2&b=1")


def test_i32_an_empty_list_of_query_names_removes_every_parameter(tmp_path: Path) -> None:
    """`pages.query = []` means no parameter; without the setting, all of them count."""
    site = "http://127.0.0.1:9"
    assert pages_settings({"upstream": site}).query is None
    assert pages_settings({"upstream": site, "query": []}).query == ()
    with ExitStack() as stack:
        file = tmp_path / "stillfresh.toml"
        upstream = raw_site(stack, signed)
        file.write_text(f'[pages]\nupstream = "{upstream}"\nquery = []\n')
        proxy = Proxy(stack, str(file), upstream=upstream)
        ask = b"GET /q?page=2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert proxy.raw(ask).endswith(b"\r\n\r\n/q")


def pages_settings(given: dict[str, Any]) -> PagesSettings:
    pages = settings_of({"pages": given}).pages
    assert pages is not None
    return pages
