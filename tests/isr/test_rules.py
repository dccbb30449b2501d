"""I12, I13: the pure rules of the page cache, by example and by property."""

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError
from stillfresh.freshness import Policy
from stillfresh.http.fields import ENCODINGS, end_to_end, normalised
from stillfresh.isr import Headers, Page, Route
from stillfresh.isr.clients import canonical_host, is_allowed
from stillfresh.isr.model import Reason
from stillfresh.isr.routes import Routes, Site, canonical_path, canonical_query, canonical_url
from stillfresh.isr.sharing import Shared, is_answer_to, judged, selected

NOW = 1_700_000_000.0
KEPT = Policy(60, 100, 100)
OWN = (KEPT, Policy(10))


def raw(*lines: str) -> tuple[tuple[bytes, bytes], ...]:
    pairs = (line.partition(": ") for line in lines)
    return tuple((name.lower().encode(), value.encode()) for name, _, value in pairs)


class TestI13Judged:
    @pytest.mark.parametrize(
        "lines",
        [
            ["set-cookie: a=b", "cache-control: public, max-age=60"],
            ["cache-control: private, max-age=60"],
            ['cache-control: private="x-a", max-age=60'],
            ["cache-control: max-age=60", "cache-control: no-store"],
            ["cache-control: private", "cdn-cache-control: max-age=60"],
            ["cdn-cache-control: no-store", "cache-control: max-age=60"],
            ["vary: *", "cache-control: max-age=60"],
            ["vary: Accept, *", "cache-control: max-age=60"],
            ["content-type: text/event-stream", "cache-control: max-age=60"],
            ["content-length: 3", "content-length: 4", "cache-control: max-age=60"],
            ["x-split: a\r\nset-cookie: b", "cache-control: max-age=60"],
            [f"x-big: {'x' * 40_000}", "cache-control: max-age=60"],
        ],
    )
    def test_is_never_shared(self, lines: list[str]) -> None:
        """Whatever the route says."""
        assert isinstance(judged(200, raw(*lines), NOW, OWN), Reason)
        assert isinstance(judged(200, raw(*lines), NOW, None), Reason)

    @pytest.mark.parametrize("status", [206, 304, 500, 503, 101])
    def test_some_statuses_are_never_kept(self, status: int) -> None:
        """Partial, not final, or an error."""
        assert isinstance(judged(status, raw("cache-control: max-age=60"), NOW, OWN), Reason)

    @pytest.mark.parametrize("status", [428, 429, 431])
    def test_what_is_about_who_asks_is_never_kept(self, status: int) -> None:
        """RFC 6585 §3 to §5, whatever it says of itself."""
        assert isinstance(judged(status, raw("cache-control: max-age=60"), NOW, None), Reason)

    @pytest.mark.parametrize("status", [400, 401, 403])
    def test_a_refusal_is_kept_only_if_it_says_so_itself(self, status: int) -> None:
        """A route's duration is for pages: one bad request must not take a page down."""
        assert isinstance(judged(status, (), NOW, OWN), Reason)
        assert isinstance(judged(status, raw("cache-control: max-age=60"), NOW, None), Shared)

    def test_a_routes_duration_overrides_what_a_response_says(self) -> None:
        """But never its privacy."""
        assert judged(200, raw("cache-control: max-age=5"), NOW, OWN) == Shared(KEPT)
        assert judged(200, raw("cache-control: max-age=5"), NOW, None) == Shared(Policy(5))

    def test_what_is_encoded_varies_by_encoding(self) -> None:
        """Whether it says so or not."""
        headers = raw("content-encoding: gzip", "vary: Accept-Language")
        assert judged(200, headers, NOW, OWN) == Shared(
            KEPT, ("accept-encoding", "accept-language")
        )

    def test_an_answer_is_everybodys_whom_it_does_not_vary_by(self) -> None:
        """RFC 9110 §12.5.5: by nothing that he sent, or by what the render was given, too."""
        request = raw("accept-language: de", "x-plan: gold")
        assert is_answer_to(request, {}, ())
        assert is_answer_to(request, {}, raw("vary: Accept, Host"))
        assert is_answer_to(request, {"accept-language": "de"}, raw("vary: Accept-Language"))
        assert not is_answer_to(request, {"accept-language": "de"}, raw("vary: X-Plan"))
        assert not is_answer_to(request, {}, raw("vary: *"))


class TestI13Keys:
    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            (b"/a/b", "/a/b"),
            (b"/%7Euser", "/~user"),
            (b"/caf%c3%a9", "/caf%C3%A9"),
            (b"/a%3Fb", "/a%3Fb"),
            (b"/a;b=c", "/a;b=c"),
            (b"/blog/", "/blog/"),
            (b"/a%2fb", None),
            (b"/a%5Cb", None),
            (b"/a\\b", None),
            (b"/a/../b", None),
            (b"/a/%2e%2e/b", None),
            (b"/a/..", None),
            (b"/a//b", None),
            (b"//evil.example/a", None),
            (b"/a%00.css", None),
            (b"/a%0d%0ab", None),
            (b"/a%zz", None),
            (b"/a b", None),
            (b"*", None),
            (b"/" + b"a" * 9000, None),
        ],
    )
    def test_a_path_has_one_form_or_none(self, path: bytes, expected: str | None) -> None:
        """What another server might read as another path is not kept."""
        assert canonical_path(path) == expected

    @pytest.mark.parametrize(
        ("url", "expected"),
        [
            ("HTTP://Shop.example:80/caf%c3%a9?b=2&a=1", "http://shop.example/caf%C3%A9?a=1&b=2"),
            ("http://Shop.example:80/%7Eann?b=2&a=1", "http://shop.example/~ann?a=1&b=2"),
            ("https://shop.example", "https://shop.example/"),
            ("https://shop.example/a/../b", "https://shop.example/a/../b"),
            ("https://no host/a%7Eb", "https://no host/a%7Eb"),
        ],
    )
    def test_a_url_to_purge_is_that_of_visits(self, url: str, expected: str) -> None:
        """I11; one that no visit can have stays as it is, whole."""
        assert canonical_url(url) == expected

    @given(st.binary(max_size=60).map(lambda tail: b"/" + tail))
    def test_the_form_of_a_form_is_itself(self, path: bytes) -> None:
        """And it holds nothing that could start a new line or a new request."""
        form = canonical_path(path)
        if form is not None:
            assert canonical_path(form.encode()) == form
            assert form.isascii()
            assert not set(form) & set("\r\n\0 \\?#")

    def test_a_query_is_sorted_and_limited(self) -> None:
        """Names that are not declared make no other page; equal names keep their order."""
        assert canonical_query(b"b=2&utm=x&a=1&b=1", {"a", "b"}) == "a=1&b=2&b=1"
        assert canonical_query(b"b=2&a=1", None) == "a=1&b=2"
        assert canonical_query(b"a=1", set()) == ""

    def test_no_parameter_hides_in_another(self) -> None:
        """`;` and encoded `&` are part of a value, and stay so behind the cache."""
        assert canonical_query(b"utm=1;q=evil&q=good", {"q"}) == "q=good"
        assert canonical_query(b"q=a%26admin%3D1;b=2", {"q"}) == "q=a%26admin%3D1%3Bb%3D2"
        assert canonical_query(b"%71=1", {"q"}) == "q=1"
        assert canonical_query(b"q=%ff", {"q"}) == "q=%FF"

    @given(st.binary(max_size=60))
    def test_a_query_written_anew_is_the_same(self, query: bytes) -> None:
        """Whatever was asked, the limited form is stable."""
        form = canonical_query(query, {"a", "b"})
        if form is not None:
            assert canonical_query(form.encode(), {"a", "b"}) == form

    @pytest.mark.parametrize(
        ("hosts", "expected"),
        [
            ([b"Example.com"], "example.com"),
            ([b"example.com:80"], "example.com"),
            ([b"example.com:8080"], "example.com:8080"),
            ([b"[::1]:80"], "[::1]"),
            ([b"a", b"b"], None),
            ([], None),
            ([b"evil.com/x"], None),
            ([b"a b"], None),
            ([b"user@host"], None),
            ([b"a" * 255], "a" * 255),
            ([b"a" * 256], None),
            ([b""], None),
        ],
    )
    def test_a_host_is_one_and_well_formed(self, hosts: list[bytes], expected: str | None) -> None:
        """Without the port that goes without saying."""
        assert canonical_host(tuple((b"host", host) for host in hosts), "http") == expected

    def test_pages_of_one_host_share_its_text(self) -> None:
        """I16: and a text that a visitor made up is freed again, which an interned one may not be.

        Python 3.12.0 to 3.12.4 keep interned texts for ever.
        """
        one, same = (canonical_host(((b"host", b"A.%b" % it),), "http") for it in (b"x", b"x"))
        assert one is not None
        assert one is same
        assert sys.intern("".join([*one])) is not one

    def test_hosts_are_allowed_by_name(self) -> None:
        """Or below a name; another's is not."""
        allowed = {"example.com", "*.shop.example"}
        assert is_allowed("example.com", allowed)
        assert is_allowed("example.com:8000", allowed)
        assert is_allowed("de.shop.example", allowed)
        assert not is_allowed("shop.example", allowed)
        assert not is_allowed("evilexample.com", allowed)
        assert not is_allowed("notshop.example", allowed)

    def test_the_end_of_an_ipv6_address_is_no_port(self) -> None:
        """With brackets or without, another address is not allowed."""
        assert is_allowed("[fe80::1]:8000", {"[fe80::1]"})
        assert is_allowed("fe80::1", {"fe80::1"})
        assert not is_allowed("[fe80::1:8]", {"[fe80::1]"})
        assert not is_allowed("fe80::1:8", {"fe80::1"})

    @pytest.mark.parametrize(
        ("asked", "offered"),
        [
            ("gzip, deflate, br, zstd", "br, zstd, gzip"),
            ("br;q=0.1, GZIP", "br, gzip"),
            ("gzip,br", "br, gzip"),
            ("br;q=0, gzip", "gzip"),
            ("br;q=0.0, *", "zstd, gzip"),
            ("gzip, *;q=0", "gzip"),
            ("gzip, gzip;q=0", ""),
            ("gzip;q=0.00001", ""),
            ("gzip;q=no, br; q=1.000", "br"),
            ("x-gzip", "gzip"),
            ("identity, made-up", ""),
            ("", ""),
        ],
    )
    def test_an_app_is_offered_what_the_client_takes(self, asked: str, offered: str) -> None:
        """I13, RFC 9110 §12.5.3: whichever it chooses, the client can read it."""
        assert normalised("accept-encoding", raw(f"accept-encoding: {asked}")) == offered

    @given(st.lists(st.sampled_from([*"brzstdgip,;q=01.* -x"]), max_size=40).map("".join))
    def test_nobody_is_offered_what_he_did_not_name(self, asked: str) -> None:
        """And there are eight variants at most, whatever is asked for."""
        offered = normalised("accept-encoding", raw(f"accept-encoding: {asked}"))
        assert offered is not None
        chosen = offered.split(", ") if offered else []
        assert chosen == [it for it in ENCODINGS if it in chosen]
        assert all(it in asked or "*" in asked for it in chosen)

    def test_headers_that_mean_the_same_are_the_same(self) -> None:
        """Encodings by what an app is offered, languages by rank, others by their words."""
        assert normalised("accept-encoding", raw("accept-encoding: deflate, GZIP;q=0.5")) == "gzip"
        assert normalised("accept-encoding", raw("accept-encoding: gzip;q=0, br")) == "br"
        languages = raw("accept-language: en;q=0.5, de-DE, fr;q=0")
        assert normalised("accept-language", languages) == "de-de, en"
        assert normalised("x-kind", raw("x-kind:  a   b ,c")) == "a b, c"
        assert normalised("x-kind", raw(f"x-kind: {'a' * 2000}")) is None

    def test_letters_of_a_header_stay_whole(self) -> None:
        """In UTF-8 the second byte of "à" is what Latin-1 has for a space."""
        city = " d'à  côté ".encode()
        assert normalised("x-city", ((b"x-city", city),)) == "d'à côté".encode().decode("latin-1")

    def test_who_varies_by_a_cookie_is_shared_among_those_without(self) -> None:
        """A cookie is somebody's."""
        assert selected(["cookie", "accept"], raw("accept: a")) == {"accept": "a"}
        assert selected(["cookie"], raw("cookie: a=b")) is None


class TestI12Routes:
    def test_the_nearest_route_counts(self) -> None:
        """An exact path, else the longest prefix."""
        routes = Routes({"/blog/*": 1, "/blog/new": 2, "/*": 3, "/blog/old/*": 4})
        paths = ("/blog/a", "/blog/new", "/x", "/blog/old/a")
        assert [route.revalidate for path in paths if (route := routes.of(path))] == [1, 2, 3, 4]
        assert Routes({"/a": 1}).of("/a/b") is None

    @pytest.mark.parametrize("pattern", ["blog", "/a/*/b", 5])
    def test_a_bad_route_is_refused(self, pattern: Any) -> None:
        """With what is allowed."""
        with pytest.raises(ConfigError, match="route"):
            Routes({pattern: 1})

    def test_bad_options_are_refused(self) -> None:
        """A duration that is none, a text where a list belongs, a host list that is none."""
        for bad in ({"revalidate": "soon"}, {"revalidate": 0}, {"query": "page"}):
            with pytest.raises(ConfigError):
                Route(**bad)
        with pytest.raises(ConfigError, match="hosts"):
            Site(None, "example.com")

    def test_hop_by_hop_headers_stay_behind(self) -> None:
        """Those with a name for it, and those that Connection lists; but not what others keep."""
        headers = raw("connection: X-Secret, cache-control", "x-secret: 1", "keep-alive: 5")
        kept = raw("cache-control: max-age=5", "content-type: text/html")
        assert end_to_end((*headers, *kept)) == kept


class TestI12Page:
    def test_headers_are_found_in_any_case(self) -> None:
        """And several of a name are one list."""
        headers = Headers([("Link", "</a>"), ("link", "</b>")])
        assert headers["LINK"] == "</a>, </b>"
        assert headers == {"Link": "</a>, </b>"}
        assert len(headers) == 1

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Page(5),  # type: ignore[arg-type]
            lambda: Page("a", 99),
            lambda: Page("a", 200, {"x": "a\r\nset-cookie: b"}),
            lambda: Page("a", 200, {"bad name": "x"}),
            lambda: Page("a", 200, {"x": "€"}),
        ],
    )
    def test_what_is_no_page_is_refused(self, make: Any) -> None:
        """No header can be smuggled into another."""
        with pytest.raises(ConfigError):
            make()

    def test_equal_pages_are_equal(self) -> None:
        """By body, status and headers."""
        assert Page("a", 200, {"A": "b"}) == Page(b"a", 200, [("a", "b")])
        assert Page("a") != Page("b")
        assert Page("a") != "a"
