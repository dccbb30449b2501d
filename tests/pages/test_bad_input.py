"""I24, I25: whatever site and client send, the RFC's answer, or 400 or 502; in both ways to ask."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from stillfresh.pages import IsrMiddleware, PageCache, Route
from stillfresh.pages.edge import Edge
from stillfresh.pages.upstream import Upstream
from stillfresh.testing import ManualClock
from tests.kit.gateway import running
from tests.kit.isr import Site, as_it_says

LOOPBACK = Path(__file__).parent.parent / "kit" / "tls" / "loopback.pem"
OK = b"HTTP/1.1 200 OK\r\n"
SHORT = OK + b"Cache-Control: max-age=60\r\nContent-Length: 2\r\n\r\nhi"
WAYS = pytest.mark.parametrize("forward", ["request", "key"])


class Wire:
    """A site that answers with bytes and closes, a cache before it, and a client of bytes."""

    def __init__(self, port: int, asked: list[bytes], clock: ManualClock) -> None:
        self._port = port
        self.asked = asked
        """Whole requests, as the site got them."""
        self.clock = clock

    async def send(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(data)
        async with asyncio.timeout(30):
            answer = await reader.read()
        writer.close()
        return answer

    async def get(self, *lines: str, path: str = "/a") -> bytes:
        head = "\r\n".join([f"GET {path} HTTP/1.1", "Host: h", "Connection: close", *lines])
        return await self.send(head.encode("latin-1") + b"\r\n\r\n")


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def number_in(head: bytes) -> int:
    return int(head.split()[1][1:])


def is_cut(answer: bytes) -> bool:
    """Whether its client sees that it is not whole."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(OK.strip()):
        return False
    is_chunked = b"transfer-encoding: chunked" in head
    return not body.endswith(b"0\r\n\r\n") if is_chunked else len(body) < 9


@asynccontextmanager
async def wired(answers: Callable[[bytes], bytes], **options: Any) -> AsyncIterator[Wire]:
    asked: list[bytes] = []

    async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            head += await reader.readuntil(b"0\r\n\r\n")
        asked.append(head)
        writer.write(answers(head))
        writer.close()

    async with await asyncio.start_server(site, "127.0.0.1", 0) as server:
        clock = ManualClock(start=1_700_000_000.0)
        upstream = Upstream(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", clock=clock, timeout=5.0
        )
        pages = PageCache("memory://", clock=clock)
        app = Edge(IsrMiddleware(upstream, pages, **options), host=b"h")
        async with running(app) as url:
            yield Wire(int(url.rpartition(":")[2]), asked, clock)


MALFORMED = [
    b"",
    b"\r\n\r\n",
    b"rubbish\r\n\r\n",
    b"HTTP/1.1\r\n\r\n",
    b"HTTP/1.1 20 OK\r\n\r\n",
    b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/9 200 OK\r\n\r\n",
    b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n",
    OK + b"Content-Length: two\r\n\r\nhi",
    OK + b"Content-Length: -2\r\n\r\nhi",
    OK + b"Content-Length: +2\r\n\r\nhi",
    OK + b"Content-Length: 2, 3\r\n\r\nhi",
    OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi",
    OK + b"Content-Length: 99999999999999999999999\r\n\r\nhi",
    OK + b"X Y: 1\r\nContent-Length: 2\r\n\r\nhi",
    OK + b"X-Y : 1\r\nContent-Length: 2\r\n\r\nhi",
    OK + b"no colon\r\nContent-Length: 2\r\n\r\nhi",
    OK + b"X-Y: a\x00b\r\nContent-Length: 2\r\n\r\nhi",
    OK + b"X-Y: a\x01b\r\nContent-Length: 2\r\n\r\nhi",
    OK + b"X-Y: \x7f\r\nContent-Length: 2\r\n\r\nhi",
    OK + b": 1\r\nContent-Length: 2\r\n\r\nhi",
    OK + b"Transfer-Encoding: gzip\r\n\r\nhi",
    OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    OK + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\nhi",
    OK + b"Content-Length: 9\r\n\r\nhi",
    OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhi\r\n0\r\n\r\n",
    OK + b"Transfer-Encoding: chunked\r\n\r\n-2\r\nhi\r\n0\r\n\r\n",
    OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi",
    OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n",
    OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nbad trailer\r\n\r\n",
]
ODD = [
    (b"Content-Length: 2\r\nContent-Length: 2\r\n", b"hi"),
    (b"Content-Length: 2, 2\r\n", b"hi"),
    (b"Content-Length: 02\r\n", b"hi"),
    (b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n", b"2\r\nhi\r\n0\r\n\r\n"),
    (b"Transfer-Encoding: Chunked\r\n", b"2;ext=1\r\nhi\r\n0\r\n\r\n"),
    (b"Transfer-Encoding: chunked\r\n", b"2\r\nhi\r\n0\r\nX-Trailer: 1\r\n\r\n"),
    (b"X-Fold: a\r\n b\r\nContent-Length: 2\r\n", b"hi"),
    (b"X-Empty:\r\nContent-Length: 2\r\n", b"hi"),
    (b"X-Obs: \xff\xfe\r\nContent-Length: 2\r\n", b"hi"),
    (b"", b"hi"),
]
BODILESS = [
    b"HTTP/1.1 204 No Content\r\nContent-Length: 4\r\n\r\nevil",
    b'HTTP/1.1 304 Not Modified\r\nETag: "a"\r\nContent-Length: 400\r\n\r\n',
    b"HTTP/1.1 103 Early Hints\r\nContent-Length: 5\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
]
UNREAD = [
    "Expires: soon",
    "Expires: 0",
    "Expires: -1",
    "Expires: Thu, 18 Aug 2050 02:01:18 UTC",
    "Expires: Thu, 18 Aug 2050 02:01:18 GMT\r\nExpires: Thu, 18 Aug 2050 02:01:19 GMT",
    "Cache-Control: max-age",
    "Cache-Control: max-age=ten",
    'Cache-Control: max-age="',
    "Cache-Control: =60",
    "Cache-Control: ,",
    "Cache-Control: max age=60",
    "Date: yesterday\r\nExpires: tomorrow",
    "Vary: ,*,",
    "Age: 9999999999999999999999\r\nCache-Control: max-age=60",
    "CDN-Cache-Control: max age=60",
]
REFUSED: list[tuple[bytes, int]] = [
    (b"GET /a HTTP/1.1\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: h/i\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost : h\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: h\r\nX Y: 1\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: h\r\nno colon\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: h\r\nX: a\x00b\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: h\r\nX: a\rb\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: h\r\nContent-Length: two\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    (b"GET /a b HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    (b"GET /a HTTP/1.1x\r\nHost: h\r\n\r\n", 400),
    (b"G@T /a HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    (b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (
        b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    (b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: identity\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
]
SMUGGLED = [
    b"Content-Length: 44\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 44\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    b"Transfer_Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    b"Connection: Content-Length\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    b"Content-Length: 0\r\nX: a\nContent-Length: 44\r\n\r\n",
]
MEANINGLESS = [
    "If-Modified-Since: yesterday",
    "If-Modified-Since: Thu, 18 Aug 2050 02:01:18 UTC",
    "If-None-Match: unquoted",
    'If-None-Match: "half',
    "If-None-Match: ,",
    "Range: bytes=-",
    "Range: bytes=5-1",
    "Range: lines=1-2",
    "Range: bytes=1-x",
    "If-Range: rubbish",
    "Cache-Control: ,,=,",
    "Cache-Control: min-fresh=x, max-stale=y",
    'Cache-Control: ext="',
    "Pragma: nothing",
    "Max-Forwards: x",
    "Accept-Language: ;;;q=,",
    "Accept-Encoding: ;q=9",
    "Trailing: space \t ",
]


@WAYS
class TestI25BadSites:
    @pytest.mark.parametrize("says", [b"max-age=60", b"private"])
    async def test_a_malformed_response_is_502_and_not_cached(
        self, says: bytes, forward: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """RFC 9112 §6.3, §8: or the connection breaks, if it had begun; one line in the log."""
        told = OK + b"Cache-Control: " + says + b"\r\n"
        cases = [it.replace(OK, told) for it in MALFORMED]
        caplog.set_level(logging.WARNING)
        async with wired(lambda head: cases[number_in(head)], forward=forward) as wire:
            for number, case in enumerate(cases):
                caplog.clear()
                wire.asked.clear()
                wire.clock.advance(10)  # a line of the log for each, though they are many
                first = await wire.get(path=f"/{number}")
                assert status_of(first) == 502 or is_cut(first), case
                lines = [it for it in caplog.records if it.name.startswith("stillfresh")]
                assert 1 <= len(lines) <= 2 * len(wire.asked), case
                assert not any(it.exc_info for it in lines), case
                assert len(wire.asked) == 1 or forward == "key", case

    async def test_an_odd_but_valid_response_is_read_as_the_rfc_says(self, forward: Any) -> None:
        """RFC 9112 §5.2, §6.3, §7.1: one length, chunked over a length, the end of a connection."""
        cases = [OK + b"Cache-Control: max-age=60\r\n" + it + b"\r\n" + body for it, body in ODD]
        async with wired(lambda head: cases[number_in(head)], forward=forward) as wire:
            for number, case in enumerate(cases):
                wire.asked.clear()
                for _ in range(2):
                    told = await wire.get(path=f"/{number}")
                    assert (status_of(told), told.endswith(b"\r\n\r\nhi")) == (200, True), case
                    assert b"x-trailer" not in told.lower(), case
                    assert told.lower().count(b"content-length: 2\r\n") == 1, case
                assert len(wire.asked) == 1, case

    async def test_a_response_with_unreadable_freshness_is_not_cached(self, forward: Any) -> None:
        """RFC 9111 §4.2.1, §5.3: the answer goes to its visitor, and the next one asks again."""
        cases = [OK + it.encode() + b"\r\nContent-Length: 2\r\n\r\nhi" for it in UNREAD]
        async with wired(lambda head: cases[number_in(head)], forward=forward) as wire:
            for number, case in enumerate(cases):
                wire.asked.clear()
                for _ in range(2):
                    assert status_of(await wire.get(path=f"/{number}")) == 200, case
                assert len(wire.asked) == 2 or (len(wire.asked) > 2 and forward == "key"), case


@WAYS
class TestI25EndsOfTls:
    @pytest.mark.parametrize("says_end", [True, False], ids=["end", "cut"])
    @pytest.mark.parametrize("has_length", [True, False], ids=["length", "until-end"])
    async def test_a_body_until_the_end_of_tls_is_whole_only_if_tls_says_so(
        self, forward: Any, has_length: bool, says_end: bool
    ) -> None:
        """RFC 9112 §9.8: whoever cuts the connection must not choose where a page ends."""
        asked = 0
        length = b"Content-Length: 9\r\n" if has_length else b""

        async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            asked += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK + b"Cache-Control: max-age=60\r\n" + length + b"\r\nnine_byte")
            await writer.drain()
            if says_end:
                writer.close()
            else:
                writer.transport.abort()

        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(LOOPBACK)
        async with await asyncio.start_server(site, "127.0.0.1", 0, ssl=tls) as server:
            clock = ManualClock(start=1_700_000_000.0)
            port = server.sockets[0].getsockname()[1]
            upstream = Upstream(f"https://127.0.0.1:{port}", clock=clock, ca=str(LOOPBACK))
            pages = PageCache("memory://", clock=clock)
            app = Edge(IsrMiddleware(upstream, pages, forward=forward), host=b"h")
            async with running(app) as url:
                wire = Wire(int(url.rpartition(":")[2]), [], clock)
                first = await wire.get()
                again = await wire.get()
        is_whole = has_length or says_end
        assert (status_of(first) == 502 or is_cut(first)) is not is_whole
        assert (again.endswith(b"\r\n\r\nnine_byte") and asked == 1) is is_whole


@WAYS
class TestI25BadClients:
    async def test_a_malformed_request_is_refused_and_not_forwarded(self, forward: Any) -> None:
        """RFC 9112 §2.2, §3, §5, §6: refused here, and the connection ends."""
        async with wired(lambda _: SHORT, forward=forward) as wire:
            for case, status in REFUSED:
                sent = case.replace(b"1.1\r\n", b"1.1\r\nConnection: close\r\n", 1)
                assert status_of(await wire.send(sent)) == status, case
                assert wire.asked == [], case

    async def test_no_second_request_can_be_smuggled_in_a_first(self, forward: Any) -> None:
        """RFC 9112 §11.2: whatever is taken for the body, `/evil` is no answer to `/a`."""
        evil = b"GET /evil HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 8 + b"\r\n\r\n"

        def answers(head: bytes) -> bytes:
            body = b"EVIL" if b"/evil" in head.split(b"\r\n")[0] else b"good"
            return OK + b"Cache-Control: max-age=60\r\nContent-Length: 4\r\n\r\n" + body

        async with wired(answers, forward=forward) as wire:
            for number, case in enumerate(SMUGGLED):
                line = f"POST /{number} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n".encode()
                await wire.send(line + case + evil)
                for _ in range(2):
                    assert (await wire.get(path=f"/{number}")).endswith(b"good"), case
                assert all(it.count(b" HTTP/1.1\r\n") == 1 for it in wire.asked), case

    async def test_an_unreadable_condition_or_range_is_ignored(self, forward: Any) -> None:
        """RFC 9110 §13.1.3, §14.2: what is stored is served whole."""
        async with wired(lambda _: SHORT, forward=forward) as wire:
            for number, line in enumerate(MEANINGLESS):
                wire.asked.clear()
                for lines in ([], [line], [line]):
                    told = await wire.get(*lines, path=f"/{number}")
                    assert (status_of(told), told.endswith(b"\r\n\r\nhi")) == (200, True), line
                assert len(wire.asked) == 1, line

    async def test_a_field_value_reaches_the_site_without_trailing_spaces(
        self, forward: Any
    ) -> None:
        """RFC 9112 §5.1: without them, also at the first visit."""
        async with wired(lambda _: SHORT, forward=forward) as wire:
            assert status_of(await wire.get("X-Mine: a b \t ")) == 200
            is_told = b"x-mine: a b\r\n" in wire.asked[0].lower()
            assert is_told is (forward == "request")


class TestI25Interim:
    @pytest.mark.parametrize("says", [b"max-age=60", b"private"])
    async def test_interim_responses_are_passed_to_the_waiting_visitor(self, says: bytes) -> None:
        """RFC 9110 §15.2: 103 and its like, to the visitor that waits; a hit has none of it."""
        early = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\nKeep-Alive: 5\r\n\r\n"
        early += b"HTTP/1.1 102 Processing\r\n\r\n"
        answer = early + SHORT.replace(b"max-age=60", says)
        async with wired(lambda _: answer) as wire:
            told = await wire.get()
            first = (
                b"HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
            )
            assert told.startswith(first + OK)
            is_hit = says == b"max-age=60"
            assert ((await wire.get()).startswith(OK)) is is_hit

    async def test_interim_responses_are_not_sent_to_http_1_0_clients(self) -> None:
        """Not a client of HTTP/1.0, nor what was not asked for (100)."""
        answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + SHORT
        async with wired(lambda _: answer.replace(b"max-age=60", b"private")) as wire:
            old = await wire.send(b"GET /a HTTP/1.0\r\nHost: h\r\n\r\n")
            assert (status_of(old), old.count(b"HTTP/1.")) == (200, 1)
            assert (await wire.get()).startswith(b"HTTP/1.1 103")

    @pytest.mark.parametrize("answer", BODILESS)
    async def test_a_length_is_not_passed_on_where_no_body_can_be(self, answer: bytes) -> None:
        """RFC 9110 §8.6: the visitor's connection stays, and the next answer is read rightly."""
        request = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"
        async with wired(lambda _: answer) as wire:
            told = await wire.send(
                request + request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            )
            status = b"HTTP/1.1 304 " if b" 304 " in answer else b"HTTP/1.1 204 "
            assert told.count(status) == 2
            assert b"content-length" not in told
            assert told.endswith(b"\r\n\r\n")

    async def test_a_site_that_sends_interim_responses_without_end_is_504(self) -> None:
        """The time for an answer is over, however much has come."""
        clock = ManualClock(start=1_700_000_000.0)

        async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            with suppress(ConnectionError):
                while True:
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 4_000)
                    await writer.drain()

        async with await asyncio.start_server(site, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            upstream = Upstream(f"http://127.0.0.1:{port}", clock=clock, timeout=0.05)
            async with running(Edge(upstream, host=b"h")) as url:
                told = await Wire(int(url.rpartition(":")[2]), [], clock).get()
        assert status_of(told) == 504

    async def test_interim_responses_are_dropped_when_the_site_is_asked_by_key(self) -> None:
        """The request is not the visitor's."""
        answer = b"HTTP/1.1 103 Early Hints\r\n\r\n" + SHORT
        async with wired(lambda _: answer, forward="key") as wire:
            assert status_of(await wire.get()) == 200


@WAYS
@pytest.mark.parametrize("duration", [None, "60s"])
class TestI24BothWays:
    """Known attacks, whichever way the site is asked, with a route's duration or without."""

    def visit(self, site: Any, pages: PageCache, forward: Any, duration: Any) -> Any:
        routes = {"*": Route(duration, None, forward=forward)}
        return as_it_says(site, pages, routes=routes)

    @pytest.mark.parametrize(
        "evil",
        [
            {"x-forwarded-host": "evil.example"},
            {"x-forwarded-scheme": "nothttps"},
            {"x-original-url": "/admin"},
            {"x-http-method-override": "DELETE"},
            {"x-big": "a" * 9_000},
            {"x-bell": "a\x07"},
            {"content-length": "4"},
            {"connection": "close, x-mine"},
            {"origin": "https://evil.example"},
        ],
        ids=lambda it: next(iter(it)),
    )
    async def test_no_request_field_poisons_the_page_of_the_next_visitor(
        self, pages: PageCache, site: Site, forward: Any, duration: Any, evil: dict[str, str]
    ) -> None:
        """Whatever one client sends, and the site makes of it, the next one's page is clean."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            sent = dict(scope["headers"])
            name = next(iter(evil)).encode()
            is_open = name == b"origin" and name in sent
            allowed = ["Access-Control-Allow-Origin: https://evil.example"] if is_open else []
            site.says("Cache-Control: max-age=60", *allowed)
            site.status = 400 if name in sent and not is_open else 200
            site.body = b"poisoned" if name in sent else b"clean"
            await site(scope, receive, send)

        visit = self.visit(app, pages, forward, duration)
        await visit(headers=evil)
        page = await visit()
        assert (page.status_code, page.text) == (200, "clean")
        assert "access-control-allow-origin" not in page.headers

    @pytest.mark.parametrize("path", ["/account/x.css", "/account;x.css", "/account%3Fx.css"])
    async def test_a_personal_page_under_a_static_name_is_not_shared(
        self, pages: PageCache, site: Site, forward: Any, duration: Any, path: str
    ) -> None:
        """A personal page under a name that looks static is served to nobody else."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            cookie = dict(scope["headers"]).get(b"cookie")
            site.body = b"secret of " + cookie if cookie else b"sign in"
            await site(scope, receive, send)

        visit = self.visit(app, pages, forward, duration)
        await visit(path, headers={"cookie": "alice"})
        for headers in ({}, {"cookie": "bob"}):
            assert "alice" not in (await visit(path, headers=headers)).text

    @pytest.mark.parametrize("name", ["authorization", "cookie", "x-api-key"])
    @pytest.mark.parametrize(
        "line", ["X-Says: nothing", "Cache-Control: max-age=60", "Set-Cookie: a=1", "Vary: *"]
    )
    async def test_no_users_response_goes_to_another_user(
        self, pages: PageCache, site: Site, forward: Any, duration: Any, name: str, line: str
    ) -> None:
        """One after the other, and all at once."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            site.says(line)
            site.body = dict(scope["headers"]).get(name.encode(), b"nobody")
            await site(scope, receive, send)

        visit = self.visit(app, pages, forward, duration)
        users = ["alice", "bob", "alice", "carol"]
        for told in (
            [await visit(headers={name: user}) for user in users],
            await asyncio.gather(*(visit("/b", headers={name: user}) for user in users)),
        ):
            for user, page in zip(users, told, strict=True):
                assert page.text in {user, "nobody"}
        assert (await self.visit(app, pages, forward, duration)()).text == "nobody"
