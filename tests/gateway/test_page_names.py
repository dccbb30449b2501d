"""I37: pages of a gateway on loopback answer to its own names only, as `/v1/` does."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stillfresh.gateway.server import bound, bound_path, is_on_loopback
from tests.kit.serve import Proxy, raw_site

EVIL = ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", ""]
OWN = ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:8080"]
RESOLVED = "0x7f000001"
"""Every resolver reads this name as 127.0.0.1, without DNS and without a hosts file."""
CALLED = "the Host 'evil.example'"


def page(request: bytes) -> bytes:
    """Answer with the first line of the request; the connection then ends."""
    line = request.split(b"\r\n", 1)[0]
    length = b"%d" % len(line)
    return (
        b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: "
        + length
        + (b"\r\nConnection: close\r\n\r\n" + line)
    )


def asked(proxy: Proxy, host: str, *fields: str, line: str = "GET /secret HTTP/1.1") -> bytes:
    """The answer to a request with this Host, as bytes."""
    lines = [line, f"Host: {host}", *fields, "Connection: close", "", ""]
    return proxy.raw("\r\n".join(lines).encode())


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def upgrade(proxy: Proxy, host: str, origin: str) -> int:
    """The status of a request for a WebSocket of the site."""
    fields = ["Upgrade: websocket", "Sec-WebSocket-Version: 13", f"Origin: {origin}"]
    lines = ["GET /socket HTTP/1.1", f"Host: {host}", *fields, "Connection: Upgrade", "", ""]
    return status_of(proxy.raw("\r\n".join(lines).encode()))


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def proxy(stack: ExitStack) -> Proxy:
    return Proxy(stack, upstream=raw_site(stack, page))


def proxy_of(stack: ExitStack, tmp_path: Path, *options: str, settings: str = "") -> Proxy:
    """A gateway of its own, with a file of settings."""
    file = tmp_path / "stillfresh.toml"
    file.write_text(settings)
    return Proxy(stack, str(file), *options, upstream=raw_site(stack, page))


class TestI37Names:
    @pytest.mark.parametrize("host", EVIL)
    def test_pages_are_refused_under_another_host_name(self, proxy: Proxy, host: str) -> None:
        """A browser that was led to 127.0.0.1 by another name does not reach the site."""
        for method in ("GET", "POST", "DELETE", "OPTIONS", "PURGE"):
            answer = asked(proxy, host, line=f"{method} /secret HTTP/1.1")
            assert status_of(answer) == 421
            assert b"/secret" not in answer
            assert b"server.hosts" in answer
            assert b"no-store" in answer

    def test_the_host_name_in_an_absolute_target_counts(self, proxy: Proxy) -> None:
        """RFC 9112 §3.2.2: it replaces the field."""
        answer = asked(proxy, "localhost", line="GET http://evil.example/secret HTTP/1.1")
        assert status_of(answer) == 421

    @pytest.mark.parametrize("host", OWN)
    def test_pages_are_served_under_loopback_names(self, proxy: Proxy, host: str) -> None:
        assert status_of(asked(proxy, host)) == 200

    def test_a_stored_page_is_refused_under_another_host_name(self, proxy: Proxy) -> None:
        """A copy in memory is no way around the check."""
        asked(proxy, "localhost")
        assert b"; hit" in asked(proxy, "localhost")
        assert status_of(asked(proxy, "evil.example")) == 421

    def test_a_malformed_host_is_400_not_421(self, proxy: Proxy) -> None:
        """RFC 9112 §3.2; HTTP/1.0 may leave the Host out, and no browser does."""
        for host in ("a b", "user@localhost", "a\r\nHost: b"):
            assert status_of(asked(proxy, host)) == 400
        assert status_of(proxy.raw(b"GET /old HTTP/1.0\r\n\r\n")) == 200

    def test_one_log_line_says_how_to_allow_a_host_name(self, stack: ExitStack) -> None:
        """One, however many requests there are."""
        own = Proxy(stack, upstream=raw_site(stack, page))
        for host in ["evil.example", *EVIL]:
            asked(own, host)
        assert own.says(CALLED)
        [line] = [it for it in own.log().splitlines() if "server.hosts" in it]
        assert CALLED in line
        assert "STILLFRESH_SERVER__HOSTS" in line

    def test_server_hosts_allows_the_names_of_a_local_proxy(
        self, stack: ExitStack, tmp_path: Path
    ) -> None:
        """`server.hosts` allows these names and no others."""
        settings = '[server]\nhosts = ["shop.example", "*.shop.example"]\n'
        behind = proxy_of(stack, tmp_path, settings=settings)
        for host in ("shop.example", "www.shop.example:443", "localhost"):
            assert status_of(asked(behind, host)) == 200
        assert status_of(asked(behind, "evil.example")) == 421

    def test_a_site_that_receives_the_host_checks_it_itself(self, stack: ExitStack) -> None:
        """With `site_hosts` the site sees the Host as it came."""
        own = Proxy(stack, "--site-host", "shop.example", upstream=raw_site(stack, page))
        assert status_of(asked(own, "shop.example")) == 200
        assert status_of(asked(own, "evil.example")) == 200

    def test_a_gateway_on_the_network_accepts_any_host_name(self, stack: ExitStack) -> None:
        """Its visitors need no rebinding to reach it."""
        own = Proxy(stack, "--host", "0.0.0.0", upstream=raw_site(stack, page))  # noqa: S104
        assert status_of(asked(own, "evil.example")) == 200

    def test_a_host_name_that_resolves_to_loopback_is_checked_too(self, stack: ExitStack) -> None:
        """As the name of a machine often does, in its hosts file."""
        own = Proxy(stack, "--host", RESOLVED, upstream=raw_site(stack, page))
        assert status_of(asked(own, RESOLVED)) == 200
        assert status_of(asked(own, "evil.example")) == 421

    def test_a_websocket_of_the_site_is_checked_for_host_and_origin(
        self, stack: ExitStack, tmp_path: Path
    ) -> None:
        """As `/v1/live`: its own pages, named origins, and clients that are no browser."""
        own = proxy_of(stack, tmp_path, settings='[server]\norigins = ["https://a.example"]\n')
        host = own.url.removeprefix("http://")
        assert upgrade(own, "evil.example", "http://evil.example") == 421
        assert upgrade(own, host, "http://evil.example") == 403
        assert upgrade(own, host, "null") == 403
        assert upgrade(own, host, f"http://{host}") == 200
        assert upgrade(own, host, "https://a.example") == 200


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("LOCALHOST", True),
        ("0:0:0:0:0:0:0:1", True),
        ("::ffff:127.0.0.1", True),
        ("127.8.8.8", True),
        (RESOLVED, True),
        ("0.0.0.0", False),  # noqa: S104
        ("::", False),
    ],
)
def test_i37_loopback_is_known_by_the_address_of_the_socket(host: str, is_loopback: bool) -> None:
    """However the host is written, and whatever a name in the hosts file resolves to."""
    with bound(host, 0) as listener:
        assert is_on_loopback(listener) is is_loopback


def test_i37_a_unix_socket_is_not_on_loopback(tmp_path: Path) -> None:
    """A web page cannot lead a browser to it."""
    with bound_path(f"{tmp_path}/gateway.sock") as listener:
        assert not is_on_loopback(listener)
