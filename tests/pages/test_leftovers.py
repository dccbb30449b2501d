"""I12, I13: bytes that a site sends beyond an answer are nobody's page (RFC 9112 §9.2)."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from urllib.parse import unquote_to_bytes

import httpx2
import pytest

from stillfresh.pages.site_connections import Pool, SiteTls
from stillfresh.pages.site_messages import SiteRequest
from tests.kit.serve import KeptSite, Proxy

KEPT = b"HTTP/1.1 200 OK\r\nCache-Control: max-age=600\r\nContent-Length: 4\r\n\r\n"
EVIL = KEPT + b"EVIL"
PRIVATE = b"HTTP/1.1 200 OK\r\nCache-Control: private\r\n"
SIZED = PRIVATE + b"Content-Length: %05d\r\n\r\n"
UP_TO_A_READ = 65_536 - len(SIZED % 0)
TOO_MUCH = {
    "a body to HEAD": SIZED % len(EVIL) + EVIL,
    "a body in a 304": b'HTTP/1.1 304 Not Modified\r\nETag: "a"\r\n\r\n' + EVIL,
    "a body in a 204": b"HTTP/1.1 204 No Content\r\n\r\n" + EVIL,
    "more than Content-Length": SIZED % 3 + b"abc" + EVIL,
    "more than the last chunk": PRIVATE
    + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    + EVIL,
    "more than a read of 64 KiB": SIZED % UP_TO_A_READ + b"x" * UP_TO_A_READ + EVIL,
}


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    """Before a site that answers `/leaks?NAME` with too much, and anything else as it should."""

    def told(asked: bytes) -> bytes:
        method, target = asked.split(b" ", 2)[:2]
        path, _, name = unquote_to_bytes(target).partition(b"?")
        if path == b"/home":
            return KEPT + b"HOME"
        leaks = method == (b"HEAD" if name == b"a body to HEAD" else b"GET")
        return TOO_MUCH[name.decode()] if leaks else SIZED % 1 + b"p"

    with ExitStack() as stack:
        yield Proxy(stack, upstream=KeptSite(stack, told).url)


@pytest.fixture
async def site() -> AsyncIterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as site:
        yield site


class TestI13Leftovers:
    @pytest.mark.parametrize("name", sorted(TOO_MUCH))
    def test_extra_bytes_of_a_response_are_not_the_next_page(self, proxy: Proxy, name: str) -> None:
        """Not that of another URL, and not in the cache."""
        method = "HEAD" if name == "a body to HEAD" else "GET"
        for _ in range(3):
            proxy.client.request(method, f"/leaks?{name}", headers={"if-none-match": '"a"'})
        home = f"/home?{name}"
        assert [proxy.client.get(home).text for _ in range(2)] == ["HOME", "HOME"]

    @pytest.mark.parametrize("is_heard", [False, True])
    async def test_a_connection_with_unrequested_bytes_is_not_reused(
        self, site: socket.socket, is_heard: bool
    ) -> None:
        """A connection that hears something unasked is not used again, read or not."""
        port = site.getsockname()[1]
        pool = Pool(httpx2.URL(f"http://127.0.0.1:{port}"), 5.0, SiteTls(), 5.0)
        ask = SiteRequest("GET", b"/", ((b"host", b"x"),))
        first = await pool.take()
        with site.accept()[0] as end:
            end.sendall(KEPT + b"HOME")
            assert (await first.ask(ask, None)).status_code == 200
            assert [await first.next_part(), await first.next_part()] == [b"HOME", b""]
            pool.give(first)
            end.sendall(EVIL)
            while is_heard and first.is_open:
                await asyncio.sleep(0)
            second = await pool.take()
            assert (second is first, second.is_new) == (False, True)
            pool.give(second)
        pool.close()

    async def test_a_site_that_behaves_keeps_its_connection(self, site: socket.socket) -> None:
        """One for both requests."""
        pool = Pool(httpx2.URL(f"http://127.0.0.1:{site.getsockname()[1]}"), 5.0, SiteTls(), 5.0)
        ask = SiteRequest("GET", b"/", ((b"host", b"x"),))
        taken = []
        connection = await pool.take()
        with site.accept()[0] as end:
            for _ in range(2):
                end.sendall(KEPT + b"HOME")
                await connection.ask(ask, None)
                assert [await connection.next_part(), await connection.next_part()] == [
                    b"HOME",
                    b"",
                ]
                pool.give(connection)
                taken.append(connection)
                connection = await pool.take()
            assert {id(it) for it in taken} == {id(connection)}
            pool.give(connection)
        pool.close()
