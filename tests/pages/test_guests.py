"""I12, I13, I15: clients that leave, stall, lie or speak an older HTTP, and what the site sees."""

import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPResponse

import httpx
import pytest

from tests.kit.serve import BRIEF, KeptSite, Proxy

ENDLESS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n3\r\none\r\n"
)
OK = b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: %d\r\n\r\n%b"
PLACES = 100
"""Connections to the site that visitors have."""


def answers(asked: bytes) -> bytes | None:
    """`/endless` never ends, `/never` never begins; else the request is said back."""
    target = asked.split(b" ", 2)[1]
    if target.startswith(b"/endless"):
        return ENDLESS
    if target == b"/streamed":
        return ENDLESS.replace(b"text/event-stream", b"text/plain") + b"0\r\n\r\n"
    return None if target.startswith(b"/never") else OK % (len(asked), asked)


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def site(stack: ExitStack) -> KeptSite:
    return KeptSite(stack, answers)


@pytest.fixture(scope="module")
def proxy(stack: ExitStack, site: KeptSite) -> Proxy:
    return Proxy(stack, "--timeout", "2", upstream=site.url)


def connected(proxy: Proxy, sent: bytes) -> socket.socket:
    port = int(proxy.url.rpartition(":")[2])
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(sent)
    return client


def read(client: socket.socket) -> bytes:
    answer = b""
    while part := client.recv(65_536):
        answer += part
    return answer


def ask(proxy: Proxy, head: str) -> bytes:
    return proxy.raw(head.replace("\n", "\r\n").encode() + b"Connection: close\r\n\r\n")


class TestI15Leaving:
    def test_a_client_that_posted_and_leaves_ends_the_response_of_the_site(
        self, stack: ExitStack
    ) -> None:
        """The site sees its connection closed, and the next visitor finds a place."""
        site = KeptSite(stack, answers)
        proxy = Proxy(stack, upstream=site.url)
        upload = b"POST /endless HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi"
        for _ in range(PLACES + 1):
            with connected(proxy, upload) as client:
                assert client.recv(1)
        assert site.until(lambda: site.open == 0)
        assert proxy.client.post("/next", content=b"x").status_code == 200

    def test_a_client_that_leaves_before_the_response_ends_the_request(
        self, stack: ExitStack
    ) -> None:
        """No need to wait until the site's time is over."""
        site = KeptSite(stack, answers)
        proxy = Proxy(stack, upstream=site.url)
        with connected(
            proxy, b"POST /never HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi"
        ):
            assert site.until(lambda: site.open == 1 and len(site.asked) == 1)
        assert site.until(lambda: site.open == 0)

    def test_a_cut_upload_is_not_logged(self, proxy: Proxy) -> None:
        """Nothing is said about it."""
        size = 1_000_000
        client = connected(
            proxy, b"POST /cut HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size
        )
        client.sendall(b"x" * 200_000)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        assert proxy.client.post("/after", content=b"x").status_code == 200
        assert "cannot be reached" not in proxy.log()


class TestI15SlowUploads:
    def test_stalled_uploads_take_no_connections_of_others(self, proxy: Proxy) -> None:
        """Pages are rendered and other uploads pass, while a hundred do not go on."""
        stalled = b"POST /up HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\na"
        clients = [connected(proxy, stalled) for _ in range(PLACES)]
        assert proxy.get("/fresh").status_code == 200
        assert proxy.client.post("/other", content=b"x").status_code == 200
        heads = [read(client).split(b"\r\n", 1)[0] for client in clients]
        assert heads == [b"HTTP/1.1 408 Request Timeout"] * PLACES
        for client in clients:
            client.close()

    def test_big_stalled_uploads_take_no_connections_of_pages(self, proxy: Proxy) -> None:
        """Renders have places of their own."""
        stalled = (
            b"POST /up HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
            + b"a" * 99_999
        )
        clients = [connected(proxy, stalled) for _ in range(PLACES)]
        assert proxy.get("/fresh-too").status_code == 200
        for client in clients:
            assert read(client).startswith(b"HTTP/1.1 408 ")
            client.close()

    def test_endless_responses_take_no_connections_of_pages(
        self, stack: ExitStack, site: KeptSite
    ) -> None:
        """I24: an answer that goes on to one visitor leaves the places of loads."""
        proxy = Proxy(stack, upstream=site.url)
        clients = []
        for number in range(PLACES):  # one after the other: each is a load at first
            asked = b"GET /endless?%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % number
            clients.append(connected(proxy, asked))
            assert clients[-1].recv(1)
        # Sooner than the streams end by the site's time, which would free their places.
        assert httpx.get(f"{proxy.url}/fresh-three", timeout=15).status_code == 200
        for client in clients:
            client.close()


class TestI13Connection:
    def test_a_connection_field_cannot_remove_fields_that_the_proxy_adds(
        self, proxy: Proxy
    ) -> None:
        """Its Connection header names its own fields, not those that the proxy adds."""
        names = "close, X-Forwarded-For, X-Forwarded-Proto, Via, X-Mine"
        seen = proxy.raw(
            b"POST /who HTTP/1.1\r\nHost: localhost\r\nX-Mine: 1\r\nX-Forwarded-For: 6.6.6.6\r\n"
            b"Connection: " + names.encode() + b"\r\n\r\n"
        ).lower()
        assert b"x-forwarded-for: 127.0.0.1\r\n" in seen
        assert b"x-forwarded-proto: http\r\n" in seen
        assert b"via: 1.1 stillfresh\r\n" in seen
        assert b"x-mine" not in seen

    def test_a_connection_field_cannot_remove_the_body_framing(self, proxy: Proxy) -> None:
        """A body stays a body."""
        for framing, body in (
            (b"Content-Length: 5", b"hello"),
            (b"Transfer-Encoding: chunked", b"5\r\nhello\r\n0\r\n\r\n"),
        ):
            name = framing.partition(b":")[0]
            seen = proxy.raw(
                b"POST /who HTTP/1.1\r\nHost: localhost\r\nConnection: close, " + name + b"\r\n"
                + framing + b"\r\n\r\n" + body
            )  # fmt: skip
            assert seen.startswith(b"HTTP/1.1 200"), framing
            assert framing.lower() + b"\r\n" in seen.lower()


class TestI12OldClients:
    @pytest.mark.parametrize("method", ["GET", "POST"])
    def test_an_http_1_0_client_gets_no_chunked_body(self, proxy: Proxy, method: str) -> None:
        """RFC 9112 §6.1: the end of the connection is the end of the body."""
        head, _, body = ask(proxy, f"{method} /streamed HTTP/1.0\nHost: localhost\n").partition(
            b"\r\n\r\n"
        )
        assert b"transfer-encoding" not in head.lower()
        assert body == b"one"


class TestI12Dates:
    @pytest.mark.parametrize(
        ("head", "status"),
        [
            ("GET /x HTTP/1.1\nHost: a b\n", 400),
            ("OPTIONS /x HTTP/1.1\nHost: localhost\nMax-Forwards: 0\n", 200),
            ("nonsense\n", 400),
            ("POST /x HTTP/1.1\nHost: localhost\nTransfer-Encoding: gzip, chunked\n", 501),
        ],
    )
    def test_responses_of_the_proxy_itself_have_a_date(
        self, proxy: Proxy, head: str, status: int
    ) -> None:
        """RFC 9110 §6.6.1; and RFC 9112 §6.1: a coding that we do not know is 501."""
        answer = ask(proxy, head)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"\r\ndate: " in answer


class TestI12Names:
    def test_the_host_in_an_absolute_target_counts(self, stack: ExitStack, site: KeptSite) -> None:
        """RFC 9112 §3.2.2: where it is a whole URL, Host is not asked; two are still too many."""
        proxy = Proxy(stack, "--site-host", "a.test", "--site-host", "b.test", upstream=site.url)
        seen = ask(proxy, "GET http://b.test/who HTTP/1.1\nHost: a.test\n")
        assert b"\r\nhost: b.test\r\n" in seen
        assert seen.partition(b"\r\n\r\n")[2].startswith(b"GET /who HTTP/1.1\r\n")
        twice = ask(proxy, "GET http://b.test/who HTTP/1.1\nHost: a.test\nHost: b.test\n")
        assert twice.startswith(b"HTTP/1.1 400 ")

    @pytest.mark.parametrize("said", ["B.test.", "b.test.:80", "b.test"])
    def test_a_host_with_a_trailing_dot_is_the_same_host(
        self, stack: ExitStack, site: KeptSite, said: str
    ) -> None:
        """The page is the same, and so is what the site is told."""
        proxy = Proxy(stack, "--site-host", "b.test", upstream=site.url)
        first = ask(proxy, "GET /dot HTTP/1.1\nHost: b.test\n").partition(b"\r\n\r\n")[2]
        other = ask(proxy, f"GET /dot HTTP/1.1\nHost: {said}\n")
        assert b"stillfresh; hit" in other
        assert other.partition(b"\r\n\r\n")[2] == first


LIMIT = 65_536


class TestI13Heads:
    @pytest.mark.parametrize(
        "head",
        [
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * LIMIT,
            b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * (LIMIT // 6),
            b"GET /" + b"a" * LIMIT + b" HTTP/1.1\r\nHost: localhost\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
            + b"a" * LIMIT
            + b"\r\nConnection: close\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\nX: " + b"a" * 4 * LIMIT,
            b"GET / HTTP/1.1\r\nX: " + b"a" * 40 * LIMIT,
        ],
    )
    def test_a_request_head_above_64_kib_is_431(self, proxy: Proxy, head: bytes) -> None:
        """64 KiB; then 431 and the end, whether the head is whole or not."""
        client = connected(proxy, b"")
        try:
            client.sendall(head)
            answer = read(client)
        except ConnectionError:  # it hung up while we still spoke
            answer = b"431 Request Header Fields Too Large"
        assert b"431 Request Header Fields Too Large" in answer
        client.close()

    def test_trailers_are_limited_and_not_forwarded(self, proxy: Proxy) -> None:
        """They do not pile up, and are no header fields of the request."""
        head = b"POST /t HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        upload = head + b"1\r\na\r\n0\r\n"
        kept = proxy.raw(upload.replace(b"Host", b"Connection: close\r\nHost") + b"X-T: 1\r\n\r\n")
        assert kept.startswith(b"HTTP/1.1 200 ")
        assert b"x-t" not in kept.lower()
        assert b" 431 " in proxy.raw(upload + b"X: " + b"a" * 4 * LIMIT)

    def test_a_request_head_just_below_the_limit_is_served(self, proxy: Proxy) -> None:
        """In many parts, on a connection that is kept, twice."""
        with connected(proxy, b"") as client:
            for _ in range(2):
                head = (
                    b"POST /big HTTP/1.1\r\nHost: localhost\r\nX: "
                    + b"a" * (LIMIT - 100)
                    + b"\r\n\r\n"
                )
                for at in range(0, len(head), 10_000):
                    client.sendall(head[at : at + 10_000])
                answer = HTTPResponse(client)
                answer.begin()
                assert (answer.status, b"POST /big" in answer.read()) == (200, True)


class TestI12PastTheGrace:
    def test_waiting_requests_get_503_when_the_grace_ends(self, site: KeptSite) -> None:
        """503 to who has heard nothing yet, and no traceback for anybody."""
        with ExitStack() as stack:
            proxy = Proxy(stack, upstream=site.url, program=BRIEF)
            paths = ["/never-a", "/never-b"]
            streaming = connected(proxy, b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert streaming.recv(1)
            with ThreadPoolExecutor(4) as pool:
                asking = [pool.submit(httpx.get, proxy.url + it, timeout=30) for it in paths]
                asking += [pool.submit(httpx.post, proxy.url + it, timeout=30) for it in paths]
                wanted = {b"GET /never-a", b"GET /never-b", b"POST /never-a", b"POST /never-b"}
                assert site.until(lambda: wanted <= {it.split(b" HTTP")[0] for it in site.asked})
                proxy.process.send_signal(signal.SIGTERM)
                assert {it.result().status_code for it in asking} == {503}
            assert proxy.process.wait(timeout=30) == 0
            assert "Traceback" not in proxy.log()
            streaming.close()


class TestI8Hanging:
    def test_a_site_that_hangs_is_requested_once_for_all_waiting_visitors(
        self, stack: ExitStack
    ) -> None:
        """504 for all who wait, when the site's time is over."""
        site = KeptSite(stack, answers)
        proxy = Proxy(stack, "--timeout", "1.5", upstream=site.url)
        begun = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            url = f"{proxy.url}/never"
            asked = list(pool.map(lambda _: httpx.get(url, timeout=30).status_code, range(4)))
        assert asked == [504] * 4
        assert time.monotonic() - begun >= 1.5
        assert len(site.asked) == 1
