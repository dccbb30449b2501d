"""I12, I13: the two edges of `stillfresh serve`: what clients say, and what a site breaks."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, cast

import httpx
import pytest

from stillfresh.errors import ConfigError
from stillfresh.pages.clients import checked_networks, is_trusted
from tests.kit.serve import Proxy, raw_site


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def proxy(stack: ExitStack) -> Proxy:
    return Proxy(stack)


@pytest.fixture(scope="module")
def behind(stack: ExitStack, proxy: Proxy) -> Proxy:
    """Stands behind a proxy that it trusts: whoever comes from this machine."""
    options = ["--trusted-proxy", "127.0.0.0/8", "--site-host", "shop.example"]
    return Proxy(stack, *options, upstream=proxy.upstream)


def seen(proxy: Proxy, *lines: str, host: str = "localhost") -> dict[str, Any]:
    """The header fields that the site was sent."""
    sent = [("host", host), *(tuple(line.split(": ", 1)) for line in lines)]
    request = httpx.Request("GET", f"{proxy.url}/echo", headers=cast("list[tuple[str, str]]", sent))
    told: dict[str, Any] = proxy.client.send(request).raise_for_status().json()["headers"]
    return told


MADE_UP = [
    "X-Forwarded: for=6.6.6.6",
    "Forwarded: for=6.6.6.6;host=evil;proto=https",
    "X-Forwarded-For: 6.6.6.6",
    "X-Forwarded-Host: evil",
    "X-Forwarded-Proto: https",
    "X-Forwarded-Port: 666",
    "X-Forwarded-Prefix: /evil",
    "X-Forwarded-Server: evil",
    "X-Real-IP: 6.6.6.6",
    "X-Client-IP: 6.6.6.6",
    "True-Client-IP: 6.6.6.6",
    "CF-Connecting-IP: 6.6.6.6",
    "X-Original-URL: /evil",
    "X-Rewrite-URL: /evil",
    "X-Original-Host: evil",
    "X-Host: evil",
    "X-HTTP-Host-Override: evil",
    "X-HTTP-Method-Override: EVIL",
    "X-Method-Override: EVIL",
    "X-HTTP-Method: EVIL",
    "Proxy: http://evil",
    "X-Scheme: evil",
    "X-Url-Scheme: evil",
    "X-Envoy-Original-Path: /evil",
    "X-Matched-Path: /evil",
    "X-Invoke-Path: /evil",
    "X-Middleware-Subrequest: evil",
    "X-Nextjs-Data: evil",
    "X_Url_Scheme: evil",
    "X_Forwarded_Host: evil",
    "X_Forwarded-For: 6.6.6.6",
    "X_Real_IP: 6.6.6.6",
]


class TestI13Forwarded:
    @pytest.mark.parametrize("line", MADE_UP)
    def test_forwarding_fields_of_a_client_do_not_reach_the_site(
        self, proxy: Proxy, line: str
    ) -> None:
        """Nothing of it reaches the site; what the proxy itself saw does."""
        told = seen(proxy, line)
        value = line.partition(": ")[2]
        assert value not in told.values()
        assert (told["x-forwarded-for"], told["x-forwarded-proto"]) == ("127.0.0.1", "http")
        assert told["via"] == "1.1 stillfresh"
        assert told["x-forwarded-host"] == told["host"]

    @pytest.mark.parametrize("line", MADE_UP)
    def test_forwarding_fields_of_a_client_make_no_variant(self, proxy: Proxy, line: str) -> None:
        """Nor does any of it make a variant, even of a page that varies by it."""
        name = line.partition(":")[0]
        says = {"cache_control": "max-age=60", "vary": name, "made": name}
        first = proxy.get("/poison", dict([line.split(": ", 1)]), **says)
        second = proxy.get("/poison", **says)
        assert first.text == second.text
        assert "hit" in second.headers["cache-status"]

    def test_forwarding_fields_of_a_trusted_proxy_are_passed_on(self, behind: Proxy) -> None:
        """Its chain goes on by one, its scheme and host count, the rest is passed on."""
        told = seen(
            behind,
            "X-Forwarded-For: 9.9.9.9, 8.8.8.8",
            "X-Forwarded-Proto: https",
            "X-Forwarded-Host: shop.example",
            "X-Real-IP: 9.9.9.9",
            "X_Real_IP: 6.6.6.6",
        )
        assert told["x-forwarded-for"] == "9.9.9.9, 8.8.8.8, 127.0.0.1"
        assert told["x-forwarded-proto"] == "https"
        assert (told["host"], told["x-forwarded-host"]) == ("shop.example", "shop.example")
        assert told["x-real-ip"] == "9.9.9.9"
        assert "x_real_ip" not in told

    def test_the_scheme_is_part_of_the_key(self, behind: Proxy) -> None:
        """What the site is told is in the key."""
        sent = [{"host": "shop.example", "x-forwarded-proto": it} for it in ("http", "https")]
        pages = [behind.get("/s", it, cache_control="max-age=60").text for it in sent * 2]
        assert pages == ["/s 1", "/s 2"] * 2

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            ("X-Forwarded-Proto: javascript", "http"),
            ("X-Forwarded-Proto: https, http", "http"),
            ("X-Forwarded-Host: a b", "http"),
        ],
    )
    def test_of_a_trusted_proxys_muddled_fields_the_last_readable_value_counts(
        self, behind: Proxy, line: str, told: str
    ) -> None:
        """Only what can be read counts, and its own word is the last one."""
        headers = seen(behind, line, host="shop.example")
        assert headers["x-forwarded-proto"] == told
        assert headers["host"] == "shop.example"

    def test_a_peer_is_trusted_by_address_or_network(self) -> None:
        """By address or network, of both kinds, and an IPv4 address in the guise of the other."""
        trusted = checked_networks(["10.0.0.0/8", "::1", "fe80::/10"])
        for peer in ("10.1.2.3", "::1", "::ffff:10.1.2.3", "fe80::1%eth0"):
            assert is_trusted(peer, trusted), peer
        for other in ("11.0.0.1", "::2", "", "unix:", None):
            assert not is_trusted(other, trusted), other
        with pytest.raises(ConfigError, match=r"'10\.0\.0\.1/8'"):
            checked_networks(["10.0.0.1/8"])


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


class TestI12Host:
    @pytest.mark.parametrize(
        ("head", "status"),
        [
            (b"GET /alive HTTP/1.1\r\n", 400),
            (b"GET /alive HTTP/1.1\r\nHost: a\r\nHost: b\r\n", 400),
            (b"GET /alive HTTP/1.1\r\nHost: a\r\nHost: a\r\n", 400),
            (b"GET /alive HTTP/1.1\r\nHost: a b\r\n", 400),
            (b"GET /alive HTTP/1.1\r\nHost: evil.example/x?\r\n", 400),
            (b"GET /alive HTTP/1.1\r\nHost: user@evil\r\n", 400),
            (b"POST /alive HTTP/1.1\r\nHost: a, b\r\n", 400),
            (b"GET /alive HTTP/1.0\r\n", 200),
            (b"GET /alive HTTP/1.1\r\nHost: LocalHost:8080\r\n", 200),
            (b"GET /alive HTTP/1.1\r\nHost: [::1]:80\r\n", 200),
        ],
    )
    def test_a_missing_double_or_malformed_host_is_400(
        self, proxy: Proxy, head: bytes, status: int
    ) -> None:
        """RFC 9112 §3.2: missing, double or malformed is a bad request."""
        assert status_of(proxy.raw(head + b"Connection: close\r\n\r\n")) == status


class TestI12MaxForwards:
    def test_options_and_trace_with_max_forwards_0_are_answered_here(self, proxy: Proxy) -> None:
        """RFC 9110 §7.6.2; and §9.3.8: a TRACE comes back without what is secret."""
        last = "HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nMax-Forwards: 0\r\n"
        options = proxy.raw(f"OPTIONS /trace0 {last}\r\n".encode())
        trace = proxy.raw(f"TRACE /trace0?a=1 {last}Cookie: s=1\r\nX-A: 1\r\n\r\n".encode())
        assert (status_of(options), status_of(trace)) == (200, 200)
        assert b"content-type: message/http" in trace
        assert b"TRACE /trace0?a=1 HTTP/1.1\r\n" in trace
        assert b"x-a: 1" in trace
        assert b"s=1" not in trace
        assert proxy.count("/trace0") == 0

    @pytest.mark.parametrize(("said", "told"), [("3", "2"), ("1", "0"), ("x", "x"), ("-1", "-1")])
    def test_max_forwards_is_counted_down(self, proxy: Proxy, said: str, told: str) -> None:
        """What cannot be read is passed on as it is."""
        answer = proxy.client.request("OPTIONS", "/echo", headers={"max-forwards": said})
        assert answer.json()["headers"]["max-forwards"] == told

    def test_max_forwards_of_a_get_is_not_changed(self, proxy: Proxy) -> None:
        """It means nothing to a GET."""
        assert seen(proxy, "Max-Forwards: 0")["max-forwards"] == "0"


def answers(request: bytes) -> bytes:
    """`/which/3` breaks off like the third of these; other targets are said back."""
    target = request.split(b" ", 2)[1]
    which = target.rpartition(b"/")[2]
    if target.startswith(b"/broken/"):
        return BROKEN[int(which)]
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(target) + target


@pytest.fixture(scope="module")
def breaking(stack: ExitStack) -> Proxy:
    return Proxy(stack, upstream=raw_site(stack, answers))


@pytest.fixture(scope="module")
def routed(stack: ExitStack, breaking: Proxy) -> Proxy:
    return Proxy(stack, "--route", "/*=1m", upstream=breaking.upstream)


class TestI12Target:
    @pytest.mark.parametrize(
        "target",
        [
            b"/a%2Fb", b"/a%2fb", b"/%00", b"/%ff%FE", b"/a/../b", b"/./a", b"//a", b"/a%zz",
            b"/%41", b"/a[b]|c^`{}\"<>", b"/q?b=%zz&&a=1;c", b"/q?x=[]{}|'\"", b"/a;p=1",
        ],
    )  # fmt: skip
    def test_the_request_target_is_passed_on_byte_for_byte(
        self, breaking: Proxy, target: bytes
    ) -> None:
        """What escapes, dots and odd characters mean is the site's matter."""
        ask = b"POST " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert breaking.raw(ask).endswith(b"\r\n\r\n" + target)


KEPT = b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\n"
BROKEN = [
    b"",
    b"HTTP/1.1 200 OK\r\nContent-Le",
    b"garbage\r\n\r\n",
    b"HTTP/1.1 999 Odd\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    KEPT + b"Content-Length: 100\r\n\r\nabc",
    KEPT + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    KEPT + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
    KEPT + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
]
BEFORE, WITHIN = range(5), range(5, 9)


class TestI12BrokenOff:
    @pytest.mark.parametrize("which", BEFORE)
    def test_a_response_that_breaks_off_in_its_head_is_502(
        self, breaking: Proxy, routed: Proxy, which: int
    ) -> None:
        """502, and never a traceback."""
        for proxy in (breaking, routed):
            assert proxy.get(f"/broken/{which}").status_code == 502
            assert "Traceback" not in proxy.log()

    @pytest.mark.parametrize("which", WITHIN)
    def test_a_response_that_breaks_off_in_its_body_breaks_off_for_the_visitor(
        self, breaking: Proxy, which: int
    ) -> None:
        """502 where nothing was sent yet; what streams through breaks off for the visitor too."""
        assert breaking.get(f"/broken/{which}").status_code == 502
        with pytest.raises(httpx.RemoteProtocolError):
            breaking.get(f"/broken/{which}")
        assert breaking.says("broke off")
        assert "Traceback" not in breaking.log()

    @pytest.mark.parametrize("which", WITHIN)
    def test_under_a_route_a_response_that_breaks_off_is_502_then_503(
        self, routed: Proxy, which: int
    ) -> None:
        """There nothing was sent yet: 502, and then a pause."""
        statuses = [routed.get(f"/broken/{which}").status_code for _ in range(2)]
        assert statuses == [502, 503]
        assert "Traceback" not in routed.log()

    def test_an_unreachable_site_is_logged_once(self, stack: ExitStack) -> None:
        """Not for each request."""
        proxy = Proxy(stack, upstream="http://nowhere.invalid")
        assert {proxy.get(f"/{number}").status_code for number in range(3)} == {502}
        assert proxy.says("http://nowhere.invalid: cannot be reached")
        assert proxy.log().count("http://nowhere.invalid: cannot be reached") == 1
        assert "Traceback" not in proxy.log()


class TestI12Ending:
    def test_running_requests_of_the_proxy_are_answered_after_sigterm(self, proxy: Proxy) -> None:
        """SIGTERM closes the door, waits for who is inside, and ends with 0."""
        with ExitStack() as stack:
            ending = Proxy(stack, upstream=proxy.upstream)
            with ThreadPoolExecutor(4) as pool:
                urls = [f"{ending.url}/slow{it}?takes=1&cache-control=max-age%3D9" for it in "abcd"]
                asking = [pool.submit(httpx.get, url, timeout=30) for url in urls]
                while any(proxy.count(f"/slow{it}") == 0 for it in "abcd"):
                    pass
                ending.process.send_signal(signal.SIGTERM)
                assert {it.result().status_code for it in asking} == {200}
            assert ending.process.wait(timeout=30) == 0
            assert ending.log() == ""
