"""I25, RFC 9112 §9.5: a site that answers before it has read the body of a request."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

import httpx2
import pytest

from stillfresh.pages import site_connections
from stillfresh.pages.edge import Edge
from stillfresh.pages.site_connections import Pool, SiteTls
from stillfresh.pages.site_messages import SiteRequest
from stillfresh.pages.upstream import Upstream
from stillfresh.testing import ManualClock
from tests.kit.gateway import running

Site: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PART = b"x" * 100_000
TOO_LARGE = b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 4\r\n\r\nBig!"
UPLOAD = b"POST /up HTTP/1.1\r\nHost: h\r\nContent-Length: 50000000\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
NEVER = 600.0
"""Seconds of the site's time-out: a test that waits for it fails."""


@asynccontextmanager
async def visited(
    site: Site,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of a visitor, through the gateway, to this site."""
    running_sites: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running_sites.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await site(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream = Upstream(f"http://127.0.0.1:{port}", clock=ManualClock(), timeout=NEVER)
    try:
        async with asyncio.timeout(20), running(Edge(upstream, host=b"h")) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            try:
                yield reader, writer
            finally:
                writer.close()
    finally:
        server.close()
        for task in running_sites:
            task.cancel()
        await asyncio.gather(*running_sites, return_exceptions=True)


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def until_it_rests(writer: asyncio.StreamWriter) -> None:
    """Send parts of an upload until nobody reads them."""
    with suppress(TimeoutError):
        while True:
            writer.write(PART)
            async with asyncio.timeout(0.5):
                await writer.drain()


class TestI25EarlyAnswers:
    @pytest.mark.parametrize("status", [b"303 See Other", b"413 Too Large", b"503 Away"])
    async def test_an_early_refusal_reaches_a_visitor_that_still_uploads(
        self, status: bytes
    ) -> None:
        """The site reads no more and keeps its connection open; nobody waits for a time-out."""
        over = asyncio.Event()

        async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_head(reader)
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 4\r\n\r\nBig!")
            await over.wait()

        async with visited(site) as (reader, writer):
            writer.write(UPLOAD + PART)
            answer = await read_head(reader) + await reader.readexactly(4)
            over.set()
        assert answer.startswith(b"HTTP/1.1 " + status[:3])
        assert answer.endswith(b"Big!")

    async def test_the_rest_of_a_refused_upload_is_not_the_next_request(self) -> None:
        """The visitor's connection stays in step, and the site's is not used again."""
        connections = 0

        async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            head = await read_head(reader)
            if head.startswith(b"GET /next "):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnext")
                return
            writer.write(TOO_LARGE)
            await reader.read(-1)

        async with visited(site) as (reader, writer):
            writer.write(UPLOAD.replace(b"50000000", b"300000") + PART)
            await read_head(reader)
            await reader.readexactly(4)
            writer.write(PART + PART + NEXT)
            answer = await reader.read(-1)
        assert answer.endswith(b"next")
        assert connections == 2

    async def test_after_an_early_refusal_the_site_gets_no_more_of_the_body(self) -> None:
        """It would have to read and drop it."""
        came = b""
        has_answer = asyncio.Event()

        async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal came
            await read_head(reader)
            writer.write(TOO_LARGE)
            await has_answer.wait()
            came = await reader.read(-1)

        async with visited(site) as (reader, writer):
            writer.write(UPLOAD + PART)
            await read_head(reader)
            writer.write(PART * 10)
            await writer.drain()
            has_answer.set()
            await reader.readexactly(4)
        assert len(came) <= len(PART)

    async def test_a_site_that_succeeds_early_gets_the_whole_body(self) -> None:
        """A success may use what comes after it, so its answer waits for the upload."""
        size = 0

        async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal size
            await read_head(reader)
            writer.write(b"HTTP/1.1 202 Accepted\r\nContent-Length: 4\r\n\r\ndone")
            size = len(await reader.readexactly(3_000_000))

        async with visited(site) as (reader, writer):
            writer.write(UPLOAD.replace(b"50000000", b"3000000") + PART)
            for _ in range(29):
                await asyncio.sleep(0)
                writer.write(PART)
                await writer.drain()
            answer = await read_head(reader)
        assert answer.startswith(b"HTTP/1.1 202 ")
        assert size == 3_000_000

    async def test_an_early_success_of_a_site_that_reads_no_more_is_passed_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It takes nothing for a while: it does not want the body."""
        monkeypatch.setattr(site_connections, "PATIENCE", 0.05)
        over = asyncio.Event()

        async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_head(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine")
            await over.wait()

        async with visited(site) as (reader, writer):
            writer.write(UPLOAD)
            sending = asyncio.ensure_future(until_it_rests(writer))
            answer = await read_head(reader)
            over.set()
            sending.cancel()
        assert answer.startswith(b"HTTP/1.1 200 ")

    @pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n"])
    async def test_a_site_that_breaks_during_an_upload_is_502_at_once(self, answer: bytes) -> None:
        """The visitor need not send more to learn of it."""

        async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_head(reader)
            writer.write(answer)

        async with visited(site) as (reader, writer):
            writer.write(UPLOAD + PART)
            told = await read_head(reader)
        assert told.startswith(b"HTTP/1.1 502 ")

    async def test_the_answer_of_a_site_that_closes_at_once_is_read(self) -> None:
        """With bytes unread it resets the connection, so the next part cannot be written."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = httpx2.URL(f"http://127.0.0.1:{server.getsockname()[1]}")
            pool = Pool(url, NEVER, SiteTls(), 5.0)
            connection = await pool.take()
            end, _ = server.accept()

            async def body() -> AsyncIterator[bytes]:
                yield b"first"
                end.sendall(TOO_LARGE)
                end.close()
                while True:  # the event loop has not seen yet what came
                    yield b"more"

            fields = ((b"host", b"h"), (b"content-length", b"50000000"))
            head = await connection.ask(SiteRequest("POST", b"/up", fields), body())
            assert head.status_code == 413
            assert await connection.next_part() == b"Big!"
            pool.give(connection)
            assert not connection.is_open
            pool.close()

    async def test_interim_responses_during_an_upload_are_passed_on(self) -> None:
        """102 says that the site is at work."""

        async def site(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_head(reader)
            writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            await reader.readexactly(len(PART) * 2)
            writer.write(TOO_LARGE)
            await reader.read(-1)

        async with visited(site) as (reader, writer):
            writer.write(UPLOAD.replace(b"50000000", b"200000") + PART)
            assert (await read_head(reader)).startswith(b"HTTP/1.1 102 ")
            writer.write(PART)
            assert (await read_head(reader)).startswith(b"HTTP/1.1 413 ")
