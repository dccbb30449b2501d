"""I9, I12, I15: `stillfresh serve`, real processes and sockets, in front of a real site."""

import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from stillfresh.cli import main
from stillfresh.pages import PageCache
from tests.kit.serve import CLI, Proxy
from tests.kit.servers.valkey import free_port


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def proxy(stack: ExitStack) -> Proxy:
    return Proxy(stack)


class TestI12Proxy:
    def test_the_proxy_caches_a_page_as_it_says_itself(self, proxy: Proxy) -> None:
        """One request upstream; Age, Date, Via and Cache-Status are told."""
        answers = [proxy.get("/a", cache_control="max-age=60") for _ in range(3)]
        assert {answer.text for answer in answers} == {"/a 1"}
        last = answers[-1].headers
        assert last["cache-status"].startswith("stillfresh; hit; ttl=")
        assert last["via"] == "1.1 stillfresh"
        assert "date" in last
        assert "age" in last
        assert "warning" not in last

    def test_the_proxy_passes_through_pages_without_freshness(self, proxy: Proxy) -> None:
        """Each time anew."""
        assert proxy.get("/none").text != proxy.get("/none").text

    def test_the_proxy_removes_hop_by_hop_fields_in_both_directions(self, proxy: Proxy) -> None:
        """In both directions; what the client says of its own address is not believed."""
        sent = {"connection": "x-secret", "x-secret": "1", "te": "trailers", "x-kept": "1",
                "x-forwarded-for": "6.6.6.6", "x-forwarded-host": "evil"}  # fmt: skip
        seen = proxy.get("/echo", sent).json()["headers"]
        assert seen["x-kept"] == "1"
        assert not {"x-secret", "te"} & set(seen)
        assert seen["x-forwarded-host"] == seen["host"]
        assert seen["x-forwarded-for"] == "127.0.0.1"
        assert seen["via"] == "1.1 stillfresh"
        answer = proxy.get("/hop", keep_alive="5", connection="x-hop", x_hop="1", x_kept="1")
        assert answer.headers["x-kept"] == "1"
        assert not {"x-hop", "keep-alive"} & set(answer.headers)

    def test_the_proxy_passes_on_request_bodies(self, proxy: Proxy) -> None:
        """With a length, or in chunks."""
        whole = proxy.client.post("/echo", content=b"hello").json()
        chunks = proxy.client.post("/echo", content=iter([b"hel", b"lo"])).json()
        assert (whole["body"], whole["method"], chunks["body"]) == ("hello", "POST", "hello")

    def test_head_get_range_and_conditional_requests_share_a_page(self, proxy: Proxy) -> None:
        """One request upstream for all of them."""
        head = proxy.client.head("/h?cache-control=max-age%3D60")
        page = proxy.get("/h", cache_control="max-age=60")
        part = proxy.get("/h", {"range": "bytes=0-1"}, cache_control="max-age=60")
        same = proxy.get("/h", {"if-none-match": page.headers["etag"]}, cache_control="max-age=60")
        assert [it.status_code for it in (head, page, part, same)] == [200, 200, 206, 304]
        assert (head.content, part.text, proxy.count("/h")) == (b"", "/h", 1)

    def test_the_proxy_validates_a_no_cache_page_each_time(self, proxy: Proxy) -> None:
        """`no-cache` with an ETag: asked each time, sent once."""
        says = {"etag": '"v1"', "cache_control": "no-cache"}
        assert {proxy.get("/v", **says).text for _ in range(3)} == {"/v 1"}
        assert proxy.count("/v") == 3

    def test_a_post_through_the_proxy_invalidates_its_url(self, proxy: Proxy) -> None:
        """RFC 9111 §4.4."""
        proxy.get("/p", cache_control="max-age=60")
        proxy.client.post("/p?cache-control=max-age%3D60")
        assert proxy.get("/p", cache_control="max-age=60").text == "/p 3"

    def test_the_proxy_serves_a_stale_page_within_stale_if_error(self, proxy: Proxy) -> None:
        """stale-if-error."""
        says = {"cache_control": "max-age=0, stale-if-error=60"}
        assert proxy.get("/e", **says).text == "/e 1"
        proxy.client.get("/fail?/e")
        assert proxy.get("/e", **says).text == "/e 1"

    def test_sixteen_concurrent_clients_are_one_request_to_the_site(self, proxy: Proxy) -> None:
        """Sixteen clients at once, one request upstream."""
        url = f"{proxy.url}/c?cache-control=max-age%3D60&takes=0.3"
        with ThreadPoolExecutor(16) as pool:
            texts = list(pool.map(lambda _: httpx.get(url, timeout=30).text, range(16)))
        assert texts == ["/c 1"] * 16

    def test_the_proxy_caches_each_language_separately(self, proxy: Proxy) -> None:
        """The site is told the language that is asked for, and nothing else of who asks."""
        says = {"cache_control": "max-age=60", "vary": "Accept-Language"}
        german, english = {"accept-language": "de"}, {"accept-language": "en"}
        first = [proxy.get("/l", it, **says).text for it in (german, english)]
        again = [proxy.get("/l", it, **says).text for it in (german, english)]
        assert first == again
        assert first[0] != first[1]

    @pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
    def test_the_proxy_answers_curl(self, proxy: Proxy) -> None:
        """Compressed or not, a part, a condition, a HEAD, a cache that must have it."""
        modified = "Sun,%2006%20Nov%201994%2008:49:37%20GMT"
        url = f"{proxy.url}/curl?cache-control=max-age%3D60&last-modified={modified}"
        curl = ["curl", "--silent", "--output", "-", "--write-out", " %{http_code}", url]
        missing = ["curl", "--silent", "-H", "Cache-Control: only-if-cached", f"{proxy.url}/absent"]
        for options, said in (
            (["--compressed"], "/curl 1 200"),
            (["--range", "0-4"], "/curl 206"),
            (["--range", "99-"], " 416"),
            (["--head"], " 200"),
            (["--time-cond", "Sun, 06 Nov 1994 08:49:37 GMT"], " 304"),
            (["-H", "Cache-Control: only-if-cached"], "/curl 1 200"),
        ):
            done = subprocess.run([*curl, *options], capture_output=True, text=True, check=True)
            assert done.stdout.endswith(said), options
        done = subprocess.run(missing, capture_output=True, text=True, check=True)
        assert done.stdout == "Not in the cache.\n"

    def test_a_redirect_to_the_site_itself_leads_to_the_proxy(self, proxy: Proxy) -> None:
        """It may name itself by the address at which the proxy reaches it."""
        location = f"{proxy.upstream}/there"
        assert proxy.get("/r", status="302", location=location).headers["location"] == "/there"


ODD_LINES = [
    b"OPTIONS * HTTP/1.1",
    b"GET /\xff\xfe HTTP/1.1",
    b"GET /a\x00b HTTP/1.1",
    b"GET /%zz HTTP/1.1",
    b"GET http://evil.example/x HTTP/1.1",
    b"GET //evil.example/x HTTP/1.1",
    b"GET /../x HTTP/1.1",
    b"BREW /pot HTTP/1.1",
    b"GET / HTTP/9.9",
    b"\x16\x03\x01\x02\x00",
]
ODD_HEADERS = [
    b"x: y",
    b"x: " + b"a" * 70_000,
    b'cache-control: max-age=,,="',
    b"range: bytes=--",
    b"host: a\r\nhost: b",
]


class TestI13RawRequests:
    @pytest.mark.parametrize("line", ODD_LINES)
    @pytest.mark.parametrize("header", ODD_HEADERS)
    def test_no_raw_request_breaks_the_proxy(
        self, proxy: Proxy, line: bytes, header: bytes
    ) -> None:
        """An answer or a closed connection, never a 500 of its own; and the next one is served."""
        port = int(proxy.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(
                line + b"\r\nhost: localhost\r\nconnection: close\r\n" + header + b"\r\n\r\n"
            )
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while part := client.recv(65_536):
                    answer += part
        assert not answer.startswith(b"HTTP/1.1 500")
        assert proxy.get("/alive").status_code == 200


class TestI15Streams:
    def test_the_proxy_streams_a_body_above_the_limit(self, proxy: Proxy) -> None:
        """Three megabytes, above the limit: whole each time, and not kept."""
        for _ in range(2):
            answer = proxy.get("/big", cache_control="max-age=60")
            assert len(answer.content) == 3_000_000

    def test_a_client_that_leaves_between_two_parts_ends_the_stream(self, stack: ExitStack) -> None:
        """The site sees its connection closed though it has no more to say for now."""
        with socket.create_server(("127.0.0.1", 0)) as site:
            site.settimeout(30)
            proxy = Proxy(stack, upstream=f"http://127.0.0.1:{site.getsockname()[1]}")
            with ThreadPoolExecutor(1) as pool:
                ended = pool.submit(self._endless, site)
                with proxy.client.stream("GET", "/events") as stream:
                    assert next(stream.iter_bytes()) == b"one"
                assert ended.result(timeout=20) == b""

    @staticmethod
    def _endless(site: socket.socket) -> bytes:
        """One part to the client that asks; what is heard of it afterwards."""
        kind = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        with site.accept()[0] as connection:
            connection.settimeout(60)
            connection.recv(65_536)
            connection.sendall(kind + b"Transfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
            return connection.recv(1)

    def test_a_response_that_was_cut_is_not_cached(self, proxy: Proxy) -> None:
        """Nor taken for whole."""
        try:
            status = proxy.get("/cut", cache_control="max-age=60").status_code
        except httpx.RemoteProtocolError:
            status = 502
        assert status >= 500


MISTAKES = [
    (["--upstream", ""], "--upstream: must be printable text"),
    (["--upstream", "ftp://x"], "write http://host:port"),
    (["--upstream", "http://x/path?page=1"], "write http://host:port"),
    (["--upstream", "http://x/%2e%2e/a"], "write http://host:port"),
    (["--upstream", "http://user@x"], "write it without a name and a password"),
    (["--upstream", "http://x:99999"], "not a URL"),
    (["--upstream", "http://[::1"], "not a URL"),
    (["--upstream", "http://a..b"], "not a host's name"),
    (["--upstream", f"http://{'a' * 64}.example"], "not a host's name"),
    (["--port", "x"], "--port"),
    (["--port", "65536"], "--port"),
    (["--port", "-1"], "--port"),
    (["--store", "ftp://x"], "not a store's address"),
    (["--store", "redis://x:99999/0"], "a port that is not a number"),
    (["--store", "dynamodb://"], "write dynamodb://table"),
    (["--site-host", ""], "--site-host: must be printable text"),
    (["--site-host", "a/b"], "--site-host: write example.com"),
    (["--site-host", "a:b"], "--site-host: write example.com"),
    (["--route", "/blog"], "PATH=DURATION"),
    (["--route", "blog=1m"], "route 'blog'"),
    (["--route", "/a*b=1m"], "* may stand only at the end"),
    (["--route", "/blog=soon"], "--route.\"/blog\": cannot read 'soon'"),
    (["--route", "/blog=0s"], '--route."/blog": must be more than zero'),
    (["--query", ""], "--query"),
    (["--memory-for", "soon"], "--memory-for: cannot read 'soon'"),
    (["--tenant", "a#b"], "tenant"),
    (["--tenant", ""], "tenant"),
    (["--tenant", "a", "--store", "sqlite:///x.db?tenant=b"], "--tenant: the store's own is 'b', "),
    (["--max-body", "x"], "--max-body"),
    (["--max-body", "0"], "--max-body"),
    (["--timeout", "x"], "--timeout"),
    (["--timeout", "0"], "--timeout: must be more than zero"),
    (["--timeout", "nan"], "--timeout: cannot read nan"),
    (["--trusted-proxy", "10.0.0.1/8"], "--trusted-proxy: '10.0.0.1/8'"),
    (["--nope"], "--nope"),
    (["more"], "more: No such file"),
]


class TestI12CommandLine:
    def test_serve_ends_cleanly_on_sigterm_and_sigint(self) -> None:
        """SIGTERM and SIGINT: no error, nothing left."""
        for number in (signal.SIGTERM, signal.SIGINT):
            with ExitStack() as stack:
                proxy = Proxy(stack)
                proxy.get("/a", cache_control="max-age=60")
                proxy.process.send_signal(number)
                assert proxy.process.wait(timeout=30) == 0

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_serve_ends_on_a_signal_while_it_starts(self, number: signal.Signals) -> None:
        """Also where its store takes the connection and says nothing."""
        with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as stack:
            silent.settimeout(30)
            store = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
            options = ["--upstream", "http://127.0.0.1:1", "--port", "0", "--store", store]
            process = stack.enter_context(subprocess.Popen([*CLI, *options]))
            stack.callback(process.kill)
            stack.enter_context(silent.accept()[0])
            process.send_signal(number)
            assert process.wait(timeout=60) == 0

    def test_an_unreachable_upstream_is_502(self, stack: ExitStack) -> None:
        """502, not kept."""
        proxy = Proxy(stack, upstream=f"http://127.0.0.1:{free_port()}")
        assert proxy.get("/a").status_code == 502

    @pytest.mark.parametrize(("wrong", "said"), MISTAKES)
    def test_a_wrong_option_of_serve_is_one_line(
        self, wrong: list[str], said: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """That says which option, and status 2; no usage, no traceback."""
        given = [*([] if "--upstream" in wrong else ["--upstream", "http://x"]), "--port", "0"]
        with pytest.raises(SystemExit) as ended:
            main(["serve", *given, *wrong])
        assert ended.value.code == 2
        told = capfd.readouterr().err
        assert said in told
        assert len(told.splitlines()) == 1

    def test_serve_without_a_site_is_refused(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Nothing can be guessed."""
        with pytest.raises(SystemExit) as ended:
            main(["serve"])
        assert ended.value.code == 2
        told = capfd.readouterr().err
        assert told.startswith("Error: name a FILE of settings, or --upstream URL.")

    def test_a_store_that_cannot_be_written_is_one_line(self, tmp_path: Path) -> None:
        """One line, and status 1: the words are right, the world is not."""
        (tmp_path / "file").write_text("")
        store = f"sqlite:///{tmp_path}/file/pages.db"
        done = subprocess.run(
            [*CLI, "--upstream", "http://x", "--port", "0", "--store", store],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 1
        assert "pages.db" in done.stderr
        assert len(done.stderr.splitlines()) == 1

    def test_a_taken_port_is_named_with_exit_status_1(self) -> None:
        """Is named, with status 1: it may be free tomorrow."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            done = subprocess.run(
                [*CLI, "--upstream", "http://x", "--port", port],
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
        assert done.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


class TestI9EightProcesses:
    @pytest.mark.proof
    async def test_eight_proxies_on_one_store_render_a_page_once(self, tmp_path: Path) -> None:
        """A page made stale, then asked for at all eight at once, twice."""
        url = f"sqlite:///{tmp_path}/pages.db"
        with ExitStack() as stack:
            options = ["--store", url, "--route", "/s=1h", "--site-host", "site"]
            first = Proxy(stack, *options)
            proxies = [first]
            proxies += [Proxy(stack, *options, upstream=first.upstream) for _ in range(7)]
            assert {seen(proxy) for proxy in proxies} == {"/s 1"}
            async with PageCache(url) as pages:
                await pages.revalidate("/s")
            assert at_once(proxies) == ["/s 1"] * 8
            while seen(first) != "/s 2":
                pass
            assert at_once(proxies) == ["/s 2"] * 8
            assert first.count("/s") == 2


def seen(proxy: Proxy) -> str:
    """As a visitor of the site sees it, who asks all proxies for the same host."""
    return proxy.get("/s", {"Host": "site"}, takes="0.3").text


def at_once(proxies: list[Proxy]) -> list[str]:
    with ThreadPoolExecutor(len(proxies)) as pool:
        return list(pool.map(seen, proxies))
