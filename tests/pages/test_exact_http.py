"""I34: exact reasons, dates, ages, versions and words, where the first releases were only near."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import create_connection, create_server, socket

import pytest

from stillfresh.freshness import Policy
from stillfresh.gateway.config import settings_of
from stillfresh.gateway.server import address
from stillfresh.gateway.serving import addresses_of
from stillfresh.http.fields import directives, http_date, http_date_text
from stillfresh.http.freshness import ResponseTimes, stated
from stillfresh.pages import PageCache
from stillfresh.testing import ManualClock
from tests.kit.isr import Site, as_it_says, in_front
from tests.kit.serve import KeptSite, Proxy, raw_site
from tests.kit.servers.valkey import free_port
from tests.kit.sync import until

NOBODY = Path(__file__).parent.parent / "kit" / "tls" / "nobody.pem"
"""A certificate that its own key has signed, and the key."""
KEPT = b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 4\r\n\r\nkept"


def detail(said: str) -> str:
    return said.rpartition("detail=")[2]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with ExitStack() as stack:
        yield Proxy(stack, upstream=raw_site(stack, lambda _: KEPT))


class TestI34Remembered:
    @pytest.mark.parametrize(
        "line", ["Cache-Control: private", "Set-Cookie: a=1", "X: no-freshness"]
    )
    @pytest.mark.parametrize("way", ["request", "key"])
    async def test_a_response_after_an_unshareable_one_says_that_it_was_remembered(
        self, pages: PageCache, site: Site, line: str, way: str
    ) -> None:
        """It is not private itself; the visit after it stores the page."""
        site.says(line)
        visit = as_it_says(site, pages, forward=way)
        before = [detail((await visit()).headers["cache-status"]) for _ in range(2)]
        assert "remembered" not in before
        visit.client.cookies.clear()
        site.says("Cache-Control: max-age=60")
        said = (await visit()).headers["cache-status"]
        assert said == "stillfresh; fwd=bypass; detail=remembered"
        assert (await visit()).headers["cache-status"] == "stillfresh; fwd=miss; stored; ttl=60"
        assert pages.bypassed()["remembered"] == 1

    async def test_under_a_route_an_unshareable_response_is_remembered_too(
        self, pages: PageCache, site: Site
    ) -> None:
        """For half a minute, until a render in the background looks again."""
        site.says("Set-Cookie: a=1")
        visit = in_front(site, pages)
        assert detail((await visit()).headers["cache-status"]) == "set-cookie"
        site.says("Content-Type: text/html")
        assert detail((await visit()).headers["cache-status"]) == "remembered"


class TestI34Dates:
    @pytest.mark.parametrize(
        "text",
        [b"sun, 06 nov 1994 08:49:37 gmt", b"SUNDAY, 06-NOV-94 08:49:37 GMT",
         b"sun nov  6 08:49:37 1994", b"Sun, 06 nOv 1994 08:49:37 Gmt"],
    )  # fmt: skip
    def test_http_dates_are_read_in_any_letter_case(self, text: bytes) -> None:
        assert http_date(text) == 784111777.0


class TestI34Age:
    @pytest.mark.parametrize("fraction", [0.0, 0.5, 0.99])
    async def test_a_page_with_max_age_1_is_fresh_for_a_second(
        self, pages: PageCache, site: Site, clock: ManualClock, fraction: float
    ) -> None:
        """A `Date` has whole seconds: what it leaves out is not age."""
        clock.advance(fraction)
        site.says("Cache-Control: max-age=1", f"Date: {http_date_text(clock()).decode()}")
        visit = as_it_says(site, pages)
        await visit()
        clock.advance(0.95)
        page = await visit()
        assert (page.text, page.headers["age"]) == ("page 1", "0")
        clock.advance(0.1)
        assert (await visit()).text == "page 2"

    def test_an_older_date_field_counts_as_age(self) -> None:
        """Also if our clock is between two seconds."""
        headers = ((b"cache-control", b"max-age=60"), (b"date", http_date_text(1_000.0)))
        assert stated(headers, 1_010.7) == ResponseTimes(Policy(50.0, 0.0, 0.0))
        assert stated(headers, 990.5) == ResponseTimes(Policy(60.0, 0.0, 0.0))


class TestI34Malformed:
    @pytest.mark.parametrize("said", ["max-age =300", "max-age= 300", "max-age\t=300"])
    async def test_a_directive_with_a_space_around_the_equals_sign_is_stale(
        self, pages: PageCache, site: Site, said: str
    ) -> None:
        """RFC 9111 §4.2.1, as docs/http.md says: a malformed value is stale."""
        site.says(f"Cache-Control: {said}")
        visit = as_it_says(site, pages)
        assert "no-freshness" in (await visit()).headers["cache-status"]
        assert (await visit()).text == "page 2"

    async def test_private_and_no_cache_count_with_a_malformed_argument(
        self, pages: PageCache, site: Site
    ) -> None:
        """`private` and `no-cache` count, however their argument is written."""
        known = directives([b'private ="a", no-cache= "b"'])
        assert known.keys() == {"private", "no-cache"}
        site.says('Cache-Control: max-age=60, private ="set-cookie"')
        visit = as_it_says(site, pages)
        assert detail((await visit()).headers["cache-status"]) == "private"


class TestI34Versions:
    @pytest.mark.parametrize("target", ["/up", "/healthz", "/_stillfresh/api/purge"])
    def test_http_1_0_with_a_transfer_encoding_is_400(self, proxy: Proxy, target: str) -> None:
        """RFC 9112 §6.1: its framing is faulty, and the connection ends."""
        head = f"POST {target} HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        hidden = "0\r\n\r\nGET /kept HTTP/1.1\r\nHost: localhost\r\n\r\n"
        answer = proxy.raw(f"{head}Connection: keep-alive\r\n\r\n{hidden}".encode())
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1

    @pytest.mark.parametrize("version", ["1.2", "1.9"])
    def test_a_later_1_x_is_treated_as_1_1(self, proxy: Proxy, version: str) -> None:
        """RFC 9110 §2.5: the connection stays open, and the second request is answered."""
        ask = f"GET /kept HTTP/{version}\r\nHost: localhost\r\n"
        answer = proxy.raw(f"{ask}\r\n{ask}Connection: close\r\n\r\n".encode())
        assert answer.count(b"HTTP/1.1 200 OK\r\n") == 2

    @pytest.mark.parametrize("version", ["2.0", "3.0", "0.9", "9.9"])
    @pytest.mark.parametrize("target", ["/kept", "/healthz", "/v1/live"])
    def test_another_major_version_is_505(self, proxy: Proxy, version: str, target: str) -> None:
        """RFC 9110 §15.6.6; also for who would like to upgrade."""
        upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        for more in ("", upgrade):
            head = f"GET {target} HTTP/{version}\r\nHost: localhost\r\n{more}\r\n"
            answer = proxy.raw(head.encode())
            assert answer.startswith(b"HTTP/1.1 505 ")
            assert b"\r\nconnection: close\r\n" in answer

    @pytest.mark.parametrize("version", ["1.11", "11.1", "1", "x.1", "1.x"])
    def test_a_malformed_http_version_is_400(self, proxy: Proxy, version: str) -> None:
        head = f"GET /kept HTTP/{version}\r\nHost: localhost\r\n\r\n"
        assert proxy.raw(head.encode()).startswith(b"HTTP/1.1 400 ")


def accepting(stack: ExitStack, handle: Callable[[socket], object]) -> str:
    """A listener that does this with each connection; its host and port."""
    listener = stack.enter_context(create_server(("127.0.0.1", 0)))

    def accept() -> None:
        with suppress(OSError):  # closed: the test is over
            while True:
                connection, _ = listener.accept()
                with suppress(OSError), connection:
                    handle(connection)

    threading.Thread(target=accept, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


class TestI34Certificates:
    def test_an_untrusted_certificate_has_its_own_proxy_status(self, stack: ExitStack) -> None:
        """RFC 9209 §2.3; and the log says so in our own words."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(NOBODY)
        place = accepting(stack, lambda it: context.wrap_socket(it, server_side=True).close())
        proxy = Proxy(stack, upstream=f"https://{place}")
        answer = proxy.get("/some/page")
        assert answer.status_code == 502
        assert answer.headers["proxy-status"] == "stillfresh; error=tls_certificate_error"
        assert proxy.says(f"https://{place}: cannot be reached: its certificate is not trusted:")

    def test_a_site_without_tls_has_its_own_proxy_status(self, stack: ExitStack) -> None:
        """RFC 9209 §2.3."""

        def speak_http(connection: socket) -> None:
            connection.recv(1)
            connection.sendall(KEPT)
            connection.recv(65_536)

        place = accepting(stack, speak_http)
        proxy = Proxy(stack, upstream=f"https://{place}")
        answer = proxy.get("/page")
        assert answer.status_code == 502
        assert answer.headers["proxy-status"] == "stillfresh; error=tls_protocol_error"


class TestI34Words:
    def test_an_unreachable_site_is_logged_with_the_path_and_no_query(
        self, stack: ExitStack
    ) -> None:
        """Not its query, which may be a secret."""
        url = f"http://127.0.0.1:{free_port()}"
        proxy = Proxy(stack, upstream=url)
        assert proxy.get("/a/b?token=secret").status_code == 502
        words = f"{url}: cannot be reached: it refuses connections (GET /a/b)"
        assert proxy.says(words)
        assert "secret" not in proxy.log()
        assert "Errno" not in proxy.log()

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (b"Content-Length: 9\r\n\r\nab", "it closed the connection too early"),
            (b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "its answer is not valid HTTP/1.1"),
        ],
    )
    def test_a_response_that_broke_off_is_logged_with_the_path(
        self, stack: ExitStack, answer: bytes, words: str
    ) -> None:
        """In our own words; the library's come after them, if at all."""
        url = raw_site(stack, lambda _: b"HTTP/1.1 200 OK\r\n" + answer)
        proxy = Proxy(stack, upstream=url)
        with suppress(Exception):
            proxy.client.post("/some/page?token=secret")
        assert proxy.says(f"POST /some/page: {url}: broke off its answer: {words}")
        assert "secret" not in proxy.log()


class TestI34Drain:
    def test_answers_during_a_drain_close_the_connection(self, stack: ExitStack) -> None:
        """RFC 9112 §9.6; also those that are kept ready, and those of the gateway itself."""
        site = KeptSite(stack, lambda _: KEPT)
        proxy = Proxy(stack, "--drain", "1h", upstream=site.url)
        for _ in range(3):
            assert "connection" not in proxy.get("/kept").headers
        proxy.process.terminate()
        until(lambda: proxy.get("/readyz").status_code == 503)
        for path in ("/kept", "/readyz", "/kept"):
            answer = proxy.get(path)
            assert answer.headers["connection"] == "close", path
        raw = proxy.raw(b"GET /kept HTTP/1.1\r\nHost: localhost\r\n\r\n")  # ends by itself
        assert raw.endswith(b"kept")
        assert raw.count(b"\r\nconnection: close\r\n") == 1

    def test_a_running_response_at_the_end_closes_its_connection(self, stack: ExitStack) -> None:
        """Without a drain, too."""
        go = threading.Event()

        def answers(_: bytes) -> bytes:
            go.wait(20)
            return KEPT

        site = KeptSite(stack, answers)
        proxy = Proxy(stack, upstream=site.url)
        raw: list[bytes] = []
        ask = b"GET /kept HTTP/1.1\r\nHost: localhost\r\n\r\n"
        thread = threading.Thread(target=lambda: raw.append(proxy.raw(ask)))
        thread.start()
        assert site.until(lambda: len(site.asked) == 1)
        proxy.process.terminate()
        until(lambda: is_refused(proxy.url))  # else the answer may come before the signal
        go.set()
        thread.join(20)
        assert raw[0].endswith(b"kept")
        assert b"\r\nconnection: close\r\n" in raw[0]


def is_refused(url: str) -> bool:
    """True once nothing listens there any more."""
    _, _, port = url.rpartition(":")
    try:
        create_connection(("127.0.0.1", int(port))).close()
    except ConnectionRefusedError:
        return True
    return False


def test_i34_a_failed_load_of_an_unreachable_site_names_no_status() -> None:
    """The line about the failed load says what happened, and no status of the site."""
    with ExitStack() as stack:
        proxy = Proxy(stack, "--route", "/*=1m", upstream="http://127.0.0.1:9")
        assert proxy.client.get("/x").status_code == 502
        assert proxy.says("loading failed: The site cannot be reached.")
        assert "answered with status" not in proxy.log()


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("web", "web")],  # noqa: S104
)
def test_the_printed_dashboard_address_can_be_opened_here(host: str, shown: str) -> None:
    settings = settings_of({"server": {"host": host}, "pages": {"upstream": "http://127.0.0.1:9"}})
    *_, last = addresses_of(settings, address(host, 8080))
    assert last == f"http://{shown}:8080/_stillfresh/ shows what it does"
