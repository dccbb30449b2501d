"""I15: server-sent events pass through the proxy as they come, and have places of their own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stillfresh.gateway import gateway
from stillfresh.gateway.config import PagesSettings
from stillfresh.gateway.server import server_config
from stillfresh.gateway.sources import site_of
from stillfresh.pages import PageCache
from tests.kit.engine import until
from tests.kit.gateway import running

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PAGE = b"HTTP/1.1 200 OK\r\nCache-Control: %b\r\nContent-Length: 4\r\n\r\npage"


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


class EventSite:
    """`/events` says what `say` puts in; other paths are pages, `/own…` private ones."""

    def __init__(self) -> None:
        self.streams: list[asyncio.StreamWriter] = []
        self.left = 0
        self.asked: list[bytes] = []
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        self.asked.append(path)
        if path == b"/events":
            writer.write(HEAD)
            self.streams.append(writer)
            await reader.read()
            self.left += 1
        else:
            writer.write(PAGE % (b"private" if path.startswith(b"/own") else b"max-age=60"))
        writer.close()

    @asynccontextmanager
    async def proxied(self, **options: Any) -> AsyncIterator["EventSite"]:
        """It, behind a gateway whose address is `url`."""
        async with await asyncio.start_server(self, "127.0.0.1", 0) as server:
            upstream = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            pages = PageCache("memory://")
            site = site_of(PagesSettings((upstream,), **options), pages)
            app = gateway(pages=site, page_cache=pages)
            async with running(app, server_config(app, app.is_site)) as self.url:
                yield self
                for stream in self.streams:
                    stream.close()

    async def get(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host = self.url.removeprefix("http://")
        reader, writer = await asyncio.open_connection(*host.split(":"))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return reader, writer


@pytest.fixture
async def site() -> AsyncIterator[EventSite]:
    async with EventSite().proxied(timeout=1) as site:
        yield site


class TestI15Events:
    async def test_server_sent_events_are_passed_on_as_they_come(self, site: EventSite) -> None:
        """Also after a silence that is too long for a page; the site's end is the client's."""
        reader, writer = await site.get("/events")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"detail=stream" in head
        for text in (b"data: 1\n\n", b"data: 2\n\n"):
            site.streams[0].write(chunk(text))
            assert await reader.readexactly(len(chunk(text))) == chunk(text)
            if text == b"data: 1\n\n":
                await asyncio.sleep(1.2)  # longer than a part of a page may take
        site.streams[0].write(b"0\r\n\r\n")
        assert await reader.read() == b"0\r\n\r\n"
        writer.close()

    async def test_a_client_that_leaves_ends_the_event_stream_of_the_site(
        self, site: EventSite
    ) -> None:
        """At once, though the site is silent; the next client asks for itself."""
        for left in (1, 2):
            reader, writer = await site.get("/events")
            await reader.readuntil(b"\r\n\r\n")
            assert site.left == left - 1
            writer.close()
            await until(lambda left=left: site.left == left)  # type: ignore[misc]

    async def test_an_event_stream_that_breaks_off_breaks_off_for_the_client(
        self, site: EventSite
    ) -> None:
        """Its end is not made to look like one."""
        reader, writer = await site.get("/events")
        await reader.readuntil(b"\r\n\r\n")
        site.streams[0].write(chunk(b"data: 1\n\n"))
        await site.streams[0].drain()
        site.streams[0].close()
        assert await reader.read() == chunk(b"data: 1\n\n")
        writer.close()

    async def test_event_streams_take_no_connection_of_a_page(self) -> None:
        """With one place for visitors: two streams are open, private pages pass, a third is 503."""
        options = {"max_streams": 2, "site_connections": 1, "pool_wait": 30.0}
        async with EventSite().proxied(**options, timeout=5) as site:
            streams = []
            for _ in range(2):
                streams.append(await site.get("/events"))
                await streams[-1][0].readuntil(b"\r\n\r\n")
            for path in ("/own/1", "/own/1", "/page"):
                reader, writer = await site.get(path)
                assert (await reader.read()).endswith(b"page")
                writer.close()
            reader, writer = await site.get("/events")
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
            writer.close()
            for _, writer in streams:
                writer.close()
            await until(lambda: site.left >= 3)
            reader, writer = await site.get("/events")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.close()
            await until(lambda: site.left >= 4)
