"""I33: slow clients stop nobody: a full pool is waited for briefly, uploads have a lowest rate."""

import math
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from stillfresh.cli import main
from stillfresh.pages import PageCache, Route
from stillfresh.pages.upstream import UploadRate, Upstream
from stillfresh.testing import ManualClock
from tests.kit.isr import as_it_says, in_front
from tests.kit.serve import KeptSite, Proxy
from tests.kit.sync import until

HURRIED = """
from stillfresh.cli import main
from stillfresh.pages import upstream
upstream.UPLOAD_WINDOW = 1.0
main()
"""
HURRIED_SERVE = [sys.executable, "-c", HURRIED, "serve"]
"""`stillfresh serve` that measures the rate of an upload each second."""
BIG = 30_000_000
OWN = b"HTTP/1.1 200 OK\r\nCache-Control: private\r\nContent-Length: %d\r\n\r\n"
KEPT = b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 4\r\n\r\nkept"
FULL = "stillfresh; error=connection_limit_reached"


def answers(asked: bytes) -> bytes | None:
    """`/never` never answers, `/broken` not in HTTP; `/big` is long and one's own, `/kept` kept."""
    target = asked.split(b" ", 2)[1]
    if target.startswith(b"/never"):
        return None
    if target.startswith(b"/broken"):
        return b"broken\r\n\r\n"
    if target.startswith(b"/big"):
        return OWN % BIG + b"x" * BIG
    return KEPT if target.startswith(b"/kept") else OWN % 3 + b"own"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def site(stack: ExitStack) -> KeptSite:
    return KeptSite(stack, answers)


def connected(stack: ExitStack, proxy: Proxy, sent: bytes) -> socket.socket:
    port = int(proxy.url.rpartition(":")[2])
    client = stack.enter_context(socket.socket())
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.settimeout(30)
    client.connect(("127.0.0.1", port))
    client.sendall(sent)
    return client


def request(method: str, target: str, length: int = 0) -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    return head.encode()


def metric(proxy: Proxy, name: str, use: str) -> float:
    found = re.search(rf'^{name}{{use="{use}"}} (\S+)$', proxy.get("/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


class TestI33FullPool:
    def test_a_request_beyond_a_hundred_long_polls_gets_503_soon(
        self, stack: ExitStack, site: KeptSite
    ) -> None:
        """503 with its own reason after a second, not 504 after the site's time."""
        proxy = Proxy(stack, "--timeout", "20", upstream=site.url)
        for number in range(110):
            connected(stack, proxy, request("POST", f"/never{number}"))
        assert site.until(lambda: len(site.asked) == 100)
        began = time.monotonic()
        answer = proxy.client.post("/own")
        assert answer.status_code == 503
        assert time.monotonic() - began < 15
        assert answer.headers["proxy-status"] == FULL
        assert answer.headers["cache-status"] == "stillfresh; fwd=method; detail=site-full"
        assert answer.headers["retry-after"] == "1"
        assert proxy.get("/kept").status_code == 200

    def test_visitors_that_leave_in_the_middle_of_a_download_are_no_warning(
        self, stack: ExitStack, site: KeptSite
    ) -> None:
        """The exchange with the site ends because they left: nothing is wrong with the site."""
        proxy = Proxy(stack, upstream=site.url)
        readers = ExitStack()
        for number in range(3):
            client = connected(readers, proxy, request("GET", f"/big{number}"))
            assert client.recv(1) == b"H"
        readers.close()
        assert site.until(lambda: len(site.asked) == 3 and site.open == 0)
        assert proxy.get("/broken").status_code == 502
        assert proxy.says("GET /broken")  # what comes later in the log comes later here
        assert "/big" not in proxy.log()

    def test_slow_downloads_fill_a_small_pool_until_they_leave(
        self, stack: ExitStack, site: KeptSite
    ) -> None:
        """Stored pages are served, `/readyz` and `/metrics` know; later visitors find a place."""
        options = ("--site-connections", "3", "--pool-wait", "0.2s", "--max-spill", "0")
        proxy = Proxy(stack, *options, upstream=site.url)
        assert proxy.get("/kept").status_code == 200
        readers = ExitStack()
        for number in range(3):
            client = connected(readers, proxy, request("POST", f"/big{number}"))
            assert client.recv(1) == b"H"
        refused = proxy.get("/own")
        passed = proxy.client.get("/own", headers={"if-match": "x"})
        kept = proxy.get("/kept")
        ready = proxy.get("/readyz")
        use = metric(proxy, "stillfresh_site_connections", "visitors")
        readers.close()
        assert (refused.status_code, passed.status_code, kept.status_code) == (503, 503, 200)
        assert "detail=site-full" in refused.headers["cache-status"]
        assert "fwd=bypass; detail=site-full" in passed.headers["cache-status"]
        assert kept.headers["cache-status"].startswith("stillfresh; hit")
        assert (ready.status_code, ready.json()["site"]) == (503, "full")
        assert use == metric(proxy, "stillfresh_max_site_connections", "visitors") == 3
        assert site.until(lambda: site.open <= 1)
        until(lambda: proxy.get("/readyz").status_code == 200)
        assert proxy.get("/own").text == "own"
        assert proxy.get("/readyz").json() == {"status": "ready", "stores": ready.json()["stores"]}
        assert 'stillfresh_bypassed_total{reason="site-full"} 2' in proxy.get("/metrics").text
        assert proxy.log().count("all 3 connections to the site") == 1

    async def test_a_load_without_a_free_connection_is_refused_with_the_reason(
        self, pages: PageCache, clock: ManualClock
    ) -> None:
        """Under a route with a duration, and as asked."""
        upstream = Upstream("http://127.0.0.1:9", clock=clock, connections=1, pool_wait=0.01)
        await upstream.places.loads.take(1.0)
        by_route = in_front(upstream, pages, routes={"/pricing": Route("60s")})
        as_asked = as_it_says(upstream, pages)
        for visit, path in ((by_route, "/pricing"), (as_asked, "/other")):
            answer = await visit(path)
            assert answer.status_code == 503
            assert answer.headers["proxy-status"] == FULL
            assert answer.headers["cache-status"] == "stillfresh; fwd=miss; detail=site-full"
        assert pages.bypassed() == {"site-full": 2}

    @pytest.mark.parametrize("options", [("--pool-wait", "x"), ("--site-connections", "0")])
    def test_a_wrong_connection_limit_is_named_by_its_option(
        self, options: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Named by its option."""
        with pytest.raises(SystemExit):
            main(["serve", "--upstream", "http://127.0.0.1:9", *options])
        assert options[0] in capsys.readouterr().err


class TestI33SlowUploads:
    def test_trickled_uploads_are_ended_and_free_their_connections(
        self, stack: ExitStack, site: KeptSite
    ) -> None:
        """408; a byte now and then does not hold a connection for ever."""
        options = ("--site-connections", "10", "--timeout", "30")
        proxy = Proxy(stack, *options, upstream=site.url, program=HURRIED_SERVE)
        clients = []
        for number in range(10):
            sent = request("POST", f"/up{number}", 200_000) + b"x" * 100_000
            clients.append(connected(stack, proxy, sent))
        assert site.until(lambda: site.open == 10)
        is_over = threading.Event()

        def trickle() -> None:
            while not is_over.wait(0.05):
                for client in clients:
                    try:
                        client.send(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            heads = [client.recv(100).split(b"\r\n", 1)[0] for client in clients]
        finally:
            is_over.set()
            thread.join()
        assert heads == [b"HTTP/1.1 408 Request Timeout"] * 10
        assert site.until(lambda: site.open == 0)
        assert proxy.client.post("/own").text == "own"

    def test_the_minimum_upload_rate_can_be_switched_off(
        self, stack: ExitStack, site: KeptSite
    ) -> None:
        options = ("--min-upload-rate", "0", "--timeout", "30")
        proxy = Proxy(stack, *options, upstream=site.url, program=HURRIED_SERVE)
        client = connected(stack, proxy, request("POST", "/up", 6))
        for _ in range(6):
            time.sleep(0.5)  # longer than the window, in all
            client.send(b"x")
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")

    def test_the_upload_rate_is_that_of_the_last_ten_seconds(self) -> None:
        """500 bytes a second over ten seconds: an earlier burst does not count for later."""
        rate = UploadRate(500)
        rate.note(2.0, 100_000)
        assert rate.patience() == 10.0
        rate.note(9.0, 4_999)
        assert rate.patience() == 1.0
        rate.note(0.5, 1)
        assert rate.patience() == 10.0

    def test_time_that_the_site_takes_does_not_count_as_slow_upload(self) -> None:
        """Only waiting for the client counts: who receives says how long that was."""
        rate = UploadRate(500)
        for _ in range(100):
            rate.note(0.0, 1)
        assert rate.patience() == 10.0

    def test_without_a_minimum_rate_no_upload_is_too_slow(self) -> None:
        rate = UploadRate(0)
        rate.note(1e9, 0)
        assert rate.patience() == math.inf
