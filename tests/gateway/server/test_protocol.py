"""G1, I13: what a connection to a gateway may take: time for a head, and requests in a row."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stillfresh.gateway.server.listening import Server
from stillfresh.gateway.server.protocol import LONGEST_HEAD, Protocol
from stillfresh.gateway.server.sockets import SocketProtocol
from stillfresh.pages.routes import INTERIM
from tests.kit.gateway import running

WHOLE = b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n"
UPLOAD = b"POST /p HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"GET /z HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"


EARLY = asyncio.Event()
EARLIEST = 300
GONE: "set[asyncio.Future[None]]" = set()


async def endless(receive: Receive, send: Send) -> None:
    left = asyncio.ensure_future(until_gone(receive))
    GONE.add(left)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while not left.done():
        await send({"type": "http.response.body", "body": b"x" * 1_000, "more_body": True})
        await asyncio.sleep(0)


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Says the target, the Host and the body back."""
    if scope["type"] == "http" and scope["path"] == "/endless":
        await endless(receive, send)
    elif scope["type"] == "http" and scope["path"] == "/early":
        for _ in range(EARLIEST):
            scope[INTERIM](103, ((b"link", b"x" * 60_000),))
            await asyncio.sleep(0)
        EARLY.set()
        await Response(b"done")(scope, receive, send)
    elif scope["type"] == "http":
        body = await Request(scope, receive).body()
        host = dict(scope["headers"]).get(b"host", b"")
        await Response(scope["raw_path"] + b" " + host + b" " + body)(scope, receive, send)
    else:
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with running(app) as url:
        yield int(url.rpartition(":")[2])


async def said(port: int, *parts: bytes) -> bytes:
    """All that comes back; each part is sent when the loop has turned a few times."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        for _ in range(5):
            await asyncio.sleep(0)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


class TestG1SlowHeads:
    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stillfresh.gateway.server.protocol.HEAD_TIME", 0.1)

    @pytest.mark.parametrize(
        "parts", [(WHOLE[:20],), (b"G",), (WHOLE[:5], WHOLE[5:9]), (WHOLE, WHOLE[:9])]
    )
    async def test_a_request_head_that_does_not_end_in_time_gets_408(
        self, port: int, parts: tuple[bytes, ...]
    ) -> None:
        """408, also for the second request of a connection."""
        answer = await said(port, *parts)
        assert b"HTTP/1.1 408 Request Timeout\r\n" in answer
        assert b"\r\ndate: " in answer
        assert answer.count(b"HTTP/1.1 200") == parts.count(WHOLE)

    @pytest.mark.parametrize("parts", [(), (b"\r\n",), (b"\r\n", b"\r\n\r\n")])
    async def test_a_connection_without_a_request_is_closed(
        self, port: int, parts: tuple[bytes, ...]
    ) -> None:
        """The connection is closed without a word."""
        assert await said(port, *parts) == b""

    async def test_a_slow_body_is_not_timed_out_as_a_head(self, port: int) -> None:
        """It may take longer: here, until the head's time is over for another connection."""
        upload = b"POST /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 2\r\n\r\nh"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(upload)
        assert await said(port) == b""
        assert await said(port) == b""
        writer.write(b"i")
        assert (await reader.read()).endswith(b"/a h hi")
        writer.close()


class TestG1Requests:
    async def test_pipelined_requests_are_answered_in_order(self, port: int) -> None:
        """Pipelined, and cut anywhere: each is answered, in its order."""
        upload = (
            b"POST /p HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"
        )
        sent = WHOLE + upload + b"T: 1\r\n\r\n\r\n" + WHOLE + LAST
        for at in range(1, len(sent), 7):
            answer = await said(port, sent[:at], sent[at:])
            assert answer.count(b"HTTP/1.1 200 OK") == 4
            assert answer.endswith(b"/z h ")
            assert b"/p h hi" in answer

    async def test_requests_behind_an_unanswered_one_are_read_in_small_parts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They take memory only when their turn is near, and all are answered in their order."""
        parsed = 0
        may_answer = asyncio.Event()
        parse = Protocol.on_headers_complete

        def count_and_parse(self: Protocol) -> None:
            nonlocal parsed
            parsed += 1
            parse(self)

        async def wait_and_answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await may_answer.wait()
            await app(scope, receive, send)

        monkeypatch.setattr(Protocol, "on_headers_complete", count_and_parse)
        requests = [b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % number for number in range(5_000)]
        async with running(wait_and_answer) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(b"".join(requests[:1]))
            while not parsed:
                await asyncio.sleep(0)
            writer.write(b"".join(requests[1:]) + LAST)
            for _ in range(100):  # it may read on, each time the app receives
                await asyncio.sleep(0)
            assert parsed < 1_000
            may_answer.set()
            async with asyncio.timeout(60):
                answers = await reader.read()
            writer.close()
        bodies = [answer.partition(b"\r\n\r\n")[2] for answer in answers.split(b"HTTP/1.1 200 ")]
        assert bodies[1:] == [*(b"/%d h " % number for number in range(5_000)), b"/z h "]

    @pytest.mark.parametrize(
        ("target", "host"),
        [
            (b"/a", b"h"),
            (b"http://b/a", b"b"),
            (b"http://b:81/a?x=http://c/", b"b:81"),
            (b"HTTP://[::1]:8/a", b"[::1]:8"),
            (b"/a?x=http://c/", b"h"),
            (b"/http://c/a", b"h"),
        ],
    )
    async def test_the_host_of_an_absolute_target_replaces_the_host_field(
        self, port: int, target: bytes, host: bytes
    ) -> None:
        """RFC 9112 §3.2.2."""
        answer = await said(port, LAST.replace(b"/z", target))
        assert answer.endswith(b"a " + host + b" ")

    @pytest.mark.parametrize(
        "bad",
        [
            b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n",
            b"nonsense\r\n\r\n",
            UPLOAD + b"zz\r\n",
        ],
    )
    @pytest.mark.parametrize("before", [b"", WHOLE])
    async def test_a_malformed_request_gets_400_after_the_answers_before_it(
        self, port: int, before: bytes, bad: bytes
    ) -> None:
        """400 in its own place, also where an app already waits for the body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if before:
            writer.write(before)
            assert (await reader.readuntil(b"/a h ")).startswith(b"HTTP/1.1 200 OK")
        writer.write(bad)
        async with asyncio.timeout(30):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert answer.count(b"HTTP/1.1") == 1
        assert b"\r\ncache-control: no-store\r\n" in answer
        writer.close()

    async def test_a_long_body_in_parts_is_not_counted_as_a_head(self, port: int) -> None:
        """What has been read of it is forgotten, part by part."""
        head = b"POST /p HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        parts = [b"x" * 10_000] * (2 * LONGEST_HEAD // 10_000)
        body = b"".join(parts)
        answer = await said(port, head % len(body), *parts)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert answer.endswith(b"/p h " + body)

    async def test_a_trailer_does_not_change_the_host(self, port: int) -> None:
        """RFC 9110 §6.5.1: the Host stays that of the head."""
        answer = await said(port, UPLOAD + b"2\r\nhi\r\n0\r\nHost: evil\r\n\r\n" + LAST)
        assert b"/p h hi" in answer

    async def test_bytes_behind_a_refused_upgrade_are_not_read_as_a_request(
        self, port: int
    ) -> None:
        """RFC 9112 §9.3.2: what came with it is not read, so that nothing later is answered."""
        upgrade = WHOLE[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        answer = await said(port, upgrade + WHOLE.replace(b"/a", b"/b"), LAST)
        assert (answer.count(b"HTTP/1.1 200"), b"connection: close" in answer) == (1, True)
        answer = await said(port, upgrade, LAST)
        assert answer.count(b"HTTP/1.1 200") == 2

    @pytest.mark.parametrize("framing", ["length", "chunks"])
    @pytest.mark.parametrize("to", [b"h2c", b"foo", b"websocket"])
    async def test_the_body_of_a_request_for_another_protocol_is_no_request(
        self, port: int, framing: str, to: bytes
    ) -> None:
        """RFC 9110 §7.8: an upgrade may be ignored, and the body still ends where it says."""
        body = WHOLE.replace(b"/a", b"/evil")
        head = b"POST /p HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: " + to + b"\r\n"
        if framing == "length":
            request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        else:
            request = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body)
            request += body + b"\r\n0\r\nHost: evil\r\n\r\n"
        wire = request + request + LAST
        for place in (len(wire), *range(1, len(request), 7), request.index(body)):
            answer = await said(port, wire[:place], wire[place:])
            assert answer.count(b"HTTP/1.1 200 OK") == 3, place
            assert answer.count(b"/p h " + body) == 2, place
            assert answer.endswith(b"/z h "), place

    async def test_a_body_with_wrong_framing_behind_an_ignored_upgrade_gets_400(
        self, port: int
    ) -> None:
        """RFC 9112 §6.3: it is read as strictly as any other body."""
        upgrade = b"Host: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: "
        for coding, body in ((b"gzip", b"hi"), (b"chunked", b"zz\r\n"), (b"chunked, x", b"0")):
            answer = await said(
                port, b"POST /p HTTP/1.1\r\n" + upgrade + coding + b"\r\n\r\n" + body
            )
            assert answer.startswith(b"HTTP/1.1 400 "), coding
            assert answer.count(b"HTTP/1.1 ") == 1, coding

    async def test_interim_responses_are_not_queued_for_a_client_that_does_not_read(
        self, port: int
    ) -> None:
        """Interim responses do not pile up."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1_000)
        writer.write(LAST.replace(b"/z", b"/early"))
        async with asyncio.timeout(30):
            await EARLY.wait()
            answer = await reader.read()
        assert 0 < answer.count(b"HTTP/1.1 103") < EARLIEST
        assert answer.endswith(b"done")
        writer.close()

    @pytest.mark.parametrize("after", [b"", WHOLE, WHOLE * 3])
    async def test_a_client_that_leaves_disconnects_the_running_app(
        self, port: int, after: bytes
    ) -> None:
        """The app that is under way hears it, whatever was asked for behind it."""
        GONE.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(WHOLE.replace(b"/a", b"/endless") + after)
        assert await reader.read(1)
        writer.transport.abort()
        async with asyncio.timeout(30):
            await asyncio.gather(*GONE)


@pytest.mark.parametrize("ours", [Protocol, Server, SocketProtocol])
def test_every_extended_server_method_exists_in_uvicorn(ours: type) -> None:
    """A method that uvicorn renames or drops would silently not be called any more."""
    theirs = ours.__mro__[1]
    assert theirs.__module__.startswith("uvicorn.")
    extended = [name for name, it in vars(ours).items() if callable(it) and name[:1] != "_"]
    assert extended
    assert [name for name in extended if not hasattr(theirs, name)] == []
