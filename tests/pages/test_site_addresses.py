"""I34: a site with several addresses, checks of their health, its own CA, and a base path."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from stillfresh.errors import ConfigError
from stillfresh.pages.site_addresses import (
    CHECKS_TO_FAIL,
    LEFT_OUT_FOR,
    AddressHealth,
    leaves_base,
)
from stillfresh.pages.upstream import Upstream
from tests.kit.engine import until
from tests.kit.http_site import Site, SiteAnswer, SiteRequest, serving_site
from tests.kit.serve import Proxy
from tests.kit.servers.valkey import free_port

LOOPBACK = Path(__file__).parent.parent / "kit" / "tls" / "loopback.pem"
NOBODY = LOOPBACK.with_name("nobody.pem")
OUTSIDE = (
    b"/..",
    b"/../admin",
    b"/a/../../admin",
    b"/%2e%2e/admin",
    b"/%2E./admin",
    b"/.%252e/admin",
    b"/..%2fadmin",
    b"/..\\admin",
    b"/a/..%5c..%5cadmin",
    b"/..;/admin",
    b"/..%3bx/admin",
    b"/./a",
)
INSIDE = (b"/", b"/a..b/", b"/..a", b"/a?x=/../b", b"/...", b"/%2e%2ex", b"/a;..", b"/100%")


@pytest.fixture
def sites() -> Iterator[list[Site]]:
    """Two, which say their number."""
    with ExitStack() as stack:
        sites = [stack.enter_context(serving_site()) for _ in range(2)]
        for number, site in enumerate(sites):
            site.answer("/", str(number).encode())
        yield sites


@asynccontextmanager
async def asking(*urls: str, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the site, without a cache between them."""
    upstream = Upstream(list(urls), clock=time.time, **options)
    async with running(upstream):
        transport = httpx.ASGITransport(upstream)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
            yield client


@asynccontextmanager
async def running(upstream: Upstream) -> AsyncIterator[None]:
    """Its lifespan."""
    to_app: asyncio.Queue[Any] = asyncio.Queue()
    from_app: asyncio.Queue[Any] = asyncio.Queue()
    task = asyncio.create_task(upstream({"type": "lifespan"}, to_app.get, from_app.put))
    for step in ("startup", "shutdown"):
        await to_app.put({"type": f"lifespan.{step}"})
        assert (await from_app.get())["type"] == f"lifespan.{step}.complete"
        if step == "startup":
            yield
    await task


def closing(_: SiteRequest) -> SiteAnswer:
    return SiteAnswer(is_closed=True)


class TestI34SeveralAddresses:
    async def test_requests_take_turns_over_all_addresses(self, sites: list[Site]) -> None:
        async with asking(*(site.url for site in sites)) as client:
            texts = [(await client.get("/")).text for _ in range(4)]
        assert texts == ["0", "1", "0", "1"]

    @pytest.mark.parametrize("method", ["GET", "POST"])
    async def test_an_address_without_a_connection_is_left_out(
        self, method: str, sites: list[Site], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nothing was sent to it, so a whole POST goes on to the next one. The log has one line."""
        dead = f"http://127.0.0.1:{free_port()}"
        async with asking(dead, sites[0].url) as client:
            for _ in range(3):
                answer = await client.request(method, "/", content=b"x" * 100_000)
                assert (answer.status_code, answer.text) == (200, "0")
        assert [len(request.body) for request in sites[0].requests] == [100_000] * 3
        (line,) = caplog.messages
        assert line == f"{dead}: cannot be reached: it refuses connections ({method} /)"

    async def test_a_broken_get_goes_to_one_more_address_and_a_post_to_none(
        self, sites: list[Site]
    ) -> None:
        """What a site breaks by must not be sent to all of its addresses."""
        for site in sites:
            site.answers["/breaks"] = closing
        with serving_site() as third:
            third.answer("/breaks")
            async with asking(sites[0].url, sites[1].url, third.url) as client:
                assert (await client.get("/breaks")).status_code == 502
                assert [site.count("/breaks") for site in sites] == [1, 1]
                assert (await client.post("/breaks")).status_code == 502
                assert [site.count("/breaks") for site in sites] == [1, 2]
            assert third.count("/breaks") == 0

    async def test_a_slow_address_is_not_asked_again_elsewhere(self, sites: list[Site]) -> None:
        """Otherwise a slow page would be made on each of them."""
        sites[0].gate.clear()
        async with asking(*(site.url for site in sites), timeout=0.2) as client:
            assert (await client.get("/")).status_code == 504
            assert sites[1].count("/") == 0

    async def test_all_addresses_are_asked_if_none_is_well(
        self, sites: list[Site], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A wrong check or a short break of the network must not take the site away."""
        urls = [site.url for site in sites]
        dead = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        async with asking(*dead) as client:
            assert [(await client.get("/")).status_code for _ in range(2)] == [502, 502]
        assert len(caplog.messages) == 2  # one for each address, not for each request
        async with asking(*urls, health_path="/none", health_every=0.01) as client:
            await until(lambda: all(site.count("/none") > 4 for site in sites))
            assert (await client.get("/")).status_code == 200

    def test_addresses_are_checked_before_they_are_used(self) -> None:
        for urls in ([], ["http://x", "http://x/"], ["http://x", "ftp://x"], ["http://x"] * 101):
            with pytest.raises(ConfigError, match=r"^upstream: "):
                Upstream(urls, clock=time.time)


class TestI34AddressHealth:
    def test_an_address_without_a_connection_is_left_out_for_a_while(self) -> None:
        health = AddressHealth()
        health.note_no_connection(100.0)
        asked = [health.is_asked(now) for now in (100.0, 99.9 + LEFT_OUT_FOR, 100.0 + LEFT_OUT_FOR)]
        assert asked == [False, False, True]

    def test_an_answer_or_a_passed_check_ends_the_pause(self) -> None:
        health = AddressHealth()
        health.note_no_connection(100.0)
        health.note_answer()
        assert health.is_asked(100.0)
        health.note_no_connection(100.0)
        health.note_check(is_well=True)
        assert health.is_asked(100.0)

    def test_only_checks_that_fail_in_a_row_leave_an_address_out(self) -> None:
        """And then an answer to a visitor does not bring it back, but one passed check does."""
        health = AddressHealth()
        for is_well in (False, True, *[False] * (CHECKS_TO_FAIL - 1)):
            health.note_check(is_well=is_well)
            assert health.is_asked(0.0)
        health.note_check(is_well=False)
        health.note_answer()
        assert not health.is_asked(0.0)
        health.note_check(is_well=True)
        assert health.is_asked(0.0)


class TestI34HealthChecks:
    async def test_an_address_that_fails_its_check_is_left_out_until_it_passes(
        self, sites: list[Site], caplog: pytest.LogCaptureFixture
    ) -> None:
        for site in sites:
            site.answer("/health")
        urls = [site.url for site in sites]
        async with asking(*urls, health_path="/health", health_every=0.01) as client:
            sites[0].answer("/health", status=500)
            out = f"{urls[0]}: fails its check, and is left out: it answers 500 to /health"
            await until(lambda: out in caplog.messages)
            assert {(await client.get("/")).text for _ in range(4)} == {"1"}
            sites[0].answer("/health", status=204)
            back = f"{urls[0]}: passes its check, and is asked again"
            await until(lambda: back in caplog.messages)
            assert {(await client.get("/")).text for _ in range(4)} == {"0", "1"}
        assert caplog.messages == [out, back]

    async def test_addresses_that_are_all_left_out_still_take_turns(
        self, sites: list[Site], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A wrong `health_path` does not send all visitors to the first address."""
        urls = [site.url for site in sites]
        for site in sites:
            site.answer("/health", status=404)
        async with asking(*urls, health_path="/health", health_every=0.01) as client:
            out = {
                f"{url}: fails its check, and is left out: it answers 404 to /health"
                for url in urls
            }
            await until(lambda: out <= set(caplog.messages))
            assert {(await client.get("/")).text for _ in range(4)} == {"0", "1"}

    async def test_a_check_that_gets_no_answer_has_failed(
        self, sites: list[Site], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A process that hangs still accepts connections."""
        sites[1].answer("/health")
        sites[0].gate.clear()
        urls = [site.url for site in sites]
        async with asking(*urls, health_path="/health", health_every=0.01, timeout=0.1) as client:
            out = f"{urls[0]}: fails its check, and is left out: no answer within 0.1 s"
            await until(lambda: out in caplog.messages)
            assert {(await client.get("/")).text for _ in range(4)} == {"1"}

    async def test_checks_end_with_the_gateway(self, sites: list[Site]) -> None:
        sites[0].answer("/health")
        async with asking(sites[0].url, health_path="/health", health_every=0.01):
            await until(lambda: sites[0].count("/health") > 1)
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not tasks

    @pytest.mark.parametrize("host", [None, "shop.example"])
    async def test_a_check_names_the_host_that_visitors_use(
        self, host: str | None, sites: list[Site]
    ) -> None:
        """Frameworks refuse a Host that they do not know. Without one it is the address's own."""
        options: dict[str, Any] = {"health_path": "/health?a", "health_host": host}
        async with asking(f"{sites[0].url}/shop", **options):
            await until(lambda: sites[0].count("/shop/health?a") > 0)
        own = sites[0].url.removeprefix("http://")
        assert sites[0].last("/shop/health?a").headers["host"] == (host or own)


class TestI34OwnCertificates:
    @pytest.mark.parametrize(("ca", "status"), [(LOOPBACK, 200), (NOBODY, 502), (None, 502)])
    async def test_a_site_is_trusted_by_the_certificates_of_the_file_only(
        self, ca: Path | None, status: int
    ) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(LOOPBACK)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with asking(url, ca=None if ca is None else str(ca)) as client:
                answer = await client.get("/")
        assert answer.status_code == status
        fault = "stillfresh; error=tls_certificate_error" if status == 502 else None
        assert answer.headers.get("proxy-status") == fault


class TestI34BasePath:
    async def test_a_redirect_of_the_site_to_itself_never_leads_to_another_host(
        self, sites: list[Site]
    ) -> None:
        """Without a base path: `//evil.example` alone would name a host."""
        sites[0].answer("/a", status=302, Location=f"{sites[0].url}//evil.example/a")
        async with asking(sites[0].url) as client:
            answer = await client.get("/a", follow_redirects=False)
        assert answer.headers["location"] == "/.//evil.example/a"

    async def test_the_site_is_asked_below_its_base_path(self, sites: list[Site]) -> None:
        """The query and the escapes as they came."""
        sites[0].answer("/shop", b"home")
        sites[0].answer("/shop/a%2Fb", b"page")
        for base in ("/shop", "/shop/"):
            async with asking(f"{sites[0].url}{base}") as client:
                assert (await client.get("/a%2Fb?b=1&a=%20")).text == "page"
            assert sites[0].requests[-1].path == "/shop/a%2Fb?b=1&a=%20"

    @pytest.mark.parametrize(
        ("link", "seen"),
        [
            ("/shop/cart?a#b", "/cart?a#b"),
            ("/shop", "/"),
            ("/shop?a", "/?a"),
            ("/shopping", "/shopping"),
            ("/login", "/login"),
            ("//cdn.example/shop/a", "//cdn.example/shop/a"),
            ("cart", "cart"),
            ("SITE/shop/cart", "/cart"),
            ("SITE/login", "/login"),
            ("http://shop.example/shop/cart", "http://shop.example/cart"),
            ("https://SHOP.example/shop/cart", "https://SHOP.example/cart"),
            ("https://other.example/shop/cart", "https://other.example/shop/cart"),
            ("/shop//evil.example", "/.//evil.example"),
            ("/shop/\\evil.example", "/./\\evil.example"),
            ("SITE/shop//evil.example", "/.//evil.example"),
            ("SITE//evil.example", "/.//evil.example"),
            ("http://shop.example/shop//a", "http://shop.example//a"),
        ],
    )
    async def test_links_of_the_site_lose_the_base_path(
        self, link: str, seen: str, sites: list[Site]
    ) -> None:
        """A path that begins with two slashes would name another host."""
        link = link.replace("SITE", sites[0].url)
        sites[0].answer("/shop/a", status=302, Location=link)
        async with asking(f"{sites[0].url}/shop") as client:
            answer = await client.get("/a", follow_redirects=False)
        assert answer.headers["location"] == seen

    @pytest.mark.parametrize(
        ("cookie", "seen"),
        [
            ("a=1; Path=/shop; HttpOnly", "a=1; Path=/; HttpOnly"),
            ("a=1;path=/shop/cart", "a=1;path=/cart"),
            ("a=1; Path=/", "a=1; Path=/"),
            ("a=1; Path=/shopping", "a=1; Path=/shopping"),
            ("path=/shop; Secure", "path=/shop; Secure"),
        ],
    )
    async def test_cookies_of_the_base_path_are_for_the_paths_that_visitors_know(
        self, cookie: str, seen: str, sites: list[Site]
    ) -> None:
        sites[0].answer("/shop/a", Set_Cookie=cookie)
        async with asking(f"{sites[0].url}/shop") as client:
            assert (await client.get("/a")).headers["set-cookie"] == seen

    def test_a_path_that_leaves_the_base_path_is_recognised_however_it_is_written(self) -> None:
        assert [path for path in OUTSIDE if not leaves_base(path)] == []
        assert [path for path in INSIDE if leaves_base(path)] == []

    def test_no_path_outside_of_the_base_path_reaches_the_site(self, sites: list[Site]) -> None:
        """A visitor gets 400; without a base path, such paths reach the site as they came."""
        with ExitStack() as stack:
            proxy = Proxy(stack, upstream=f"{sites[0].url}/shop")
            for path in OUTSIDE:
                head = b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                assert proxy.raw(head).startswith(b"HTTP/1.1 400 ")
            assert sites[0].requests == []


class TestI34ServedAddresses:
    def test_serve_goes_on_while_one_address_is_away_and_metrics_name_it(
        self, sites: list[Site]
    ) -> None:
        dead = f"http://127.0.0.1:{free_port()}"
        sites[0].answer("/page", b"page")
        with ExitStack() as stack:
            proxy = Proxy(stack, "--upstream", sites[0].url, upstream=dead)
            assert {proxy.get("/page").text for _ in range(3)} == {"page"}
            lines = proxy.get("/metrics").text.splitlines()
            assert f'stillfresh_site_addresses{{address="{dead}"}} 0' in lines
            assert f'stillfresh_site_addresses{{address="{sites[0].url}"}} 1' in lines

    def test_serve_takes_the_ca_and_the_health_path_as_options(self, sites: list[Site]) -> None:
        sites[0].answer("/ok", status=500)
        with ExitStack() as stack:
            proxy = Proxy(stack, "--health-path", "/ok", upstream=sites[0].url)
            assert proxy.says("fails its check, and is left out: it answers 500 to /ok")
            assert proxy.get("/").text == "0"
