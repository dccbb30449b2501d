"""I15: which slow answers a visitor sees as they come, and which he waits for."""

import asyncio
from typing import Any

import pytest

from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.pages.model import App, Message, Receive, Scope, Send
from stillfresh.pages.upstream import Upstream
from stillfresh.testing import ManualClock
from tests.kit.engine import until
from tests.kit.isr import Visitor, as_it_says


class Slow:
    """An app that says one part, and the next when it is let go."""

    def __init__(self, *fields: tuple[bytes, bytes]) -> None:
        self.fields = list(fields)
        self.gate = asyncio.Event()
        self.said = asyncio.Event()

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.fields})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        self.said.set()
        await self.gate.wait()
        await send({"type": "http.response.body", "body": b"two"})


class Reader:
    """A visitor who notes what comes, when it comes."""

    def __init__(self, app: App) -> None:
        self.parts: list[bytes] = []
        self.first = asyncio.Event()
        self._is_heard = False
        scope: dict[str, Any] = {
            "type": "http",
            "method": "GET",
            "scheme": "http",
            "path": "/slow",
            "raw_path": b"/slow",
            "query_string": b"",
            "headers": [(b"host", b"example.com")],
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._is_heard:
            await asyncio.Event().wait()
        self._is_heard = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.parts.append(message.get("body", b""))
            self.first.set()


PRIVATE = (b"cache-control", b"private")


class TestI15Streams:
    @pytest.mark.parametrize(
        ("routes", "field"),
        [
            (None, (b"x-says", b"nothing")),
            (None, PRIVATE),
            ({"/slow": 60}, PRIVATE),
            ({"/slow": 60}, (b"set-cookie", b"a=1")),
            ({"/slow": 60}, (b"content-type", b"text/event-stream")),
            ({"/slow": 60}, (b"content-length", b"6")),  # above the limit below
            ({}, (b"x-on", b"no route")),
        ],
    )
    async def test_an_uncached_page_is_sent_part_by_part(
        self, pages: PageCache, routes: Any, field: tuple[bytes, bytes]
    ) -> None:
        """The first part reaches the visitor while the app still makes the second."""
        app = Slow(field)
        reader = Reader(IsrMiddleware(app, pages, routes, max_body=4))
        async with asyncio.timeout(60):
            await reader.first.wait()
        assert reader.parts == [b"one"]
        app.gate.set()
        await reader.task
        assert b"".join(reader.parts) == b"onetwo"


class TestI24Places:
    async def test_visitors_waiting_for_a_connection_do_not_hold_up_loads(
        self, pages: PageCache, clock: ManualClock
    ) -> None:
        """All places for visitors are taken: who needs one waits, and pages are loaded."""
        says = {b"/page": "max-age=60", b"/slow": "private", b"/own": "private"}
        paths: list[bytes] = []
        is_over = asyncio.Event()

        async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
            paths.append(path)
            head = f"HTTP/1.1 200 OK\r\nCache-Control: {says[path]}\r\nContent-Length: 4\r\n\r\n"
            writer.write(head.encode() + b"on")
            if path == b"/slow":
                await is_over.wait()
            writer.write(b"e.")
            writer.close()

        async with await asyncio.start_server(site, "127.0.0.1", 0) as server:
            upstream = Upstream(
                f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",
                clock=clock,
                connections=1,
                pool_wait=30,
            )
            isr = IsrMiddleware(upstream, pages)
            visit, reader = Visitor(isr), Reader(isr)
            await reader.first.wait()
            waiting = asyncio.ensure_future(visit("/own"))
            await until(lambda: len(paths) == 2)
            try:
                page = await visit("/page")
                assert (page.text, waiting.done()) == ("one.", False)
            finally:
                is_over.set()
            assert (await waiting).text == "one."
            await reader.task


class TestI25Framing:
    @pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
    @pytest.mark.parametrize("said", ["max-age=60", "private"])
    async def test_chunked_coding_wins_over_content_length(
        self, pages: PageCache, clock: ManualClock, method: str, said: str
    ) -> None:
        """RFC 9112 §6.3: the length is no part of such an answer, and its connection ends."""
        ends: list[bytes] = []

        async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = await reader.readuntil(b"\r\n\r\n")
            head = f"HTTP/1.1 200 OK\r\nCache-Control: {said}\r\nContent-Length: 3\r\n"
            writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            writer.write(b"" if asked.startswith(b"HEAD") else b"5\r\nhello\r\n0\r\n\r\n")
            ends.append(await reader.read(1))
            writer.close()

        async with await asyncio.start_server(site, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            visit = as_it_says(Upstream(f"http://127.0.0.1:{port}", clock=clock), pages)
            for _ in range(2):
                answer = await visit(method=method)
                assert answer.content == (b"" if method == "HEAD" else b"hello")
                assert answer.headers.get("content-length", "5") == "5"
            await until(lambda: ends == [b""] * (1 if "max" in said and method != "POST" else 2))
