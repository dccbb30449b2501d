"""I12: WebSockets pass through the proxy to the site, and what the two ends agreed on with them."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from stillfresh.gateway import gateway
from stillfresh.gateway.config import PagesSettings
from stillfresh.gateway.server import server_config
from stillfresh.gateway.sources import site_of
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.pages.tunnels import MOST_BUFFERED
from tests.kit.engine import until
from tests.kit.gateway import running
from tests.kit.serve import Proxy

CHAT = Subprotocol("chat")


class WebSocketSite:
    """Echoes; `/refused` is 403, `/bye` closes with 4001, `/flood` talks and never listens."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.closed: list[int | None] = []
        self.sent = 0
        self.url = ""

    async def __call__(self, connection: ServerConnection) -> None:
        path = connection.request.path if connection.request else ""
        try:
            if path == "/bye":
                await connection.close(4001, "enough")
            while path == "/flood":
                await connection.send(b"x" * 65_536)
                self.sent += 65_536
            async for message in connection:
                await connection.send(message)
        except ConnectionClosed:
            pass
        finally:
            await connection.wait_closed()
            self.closed.append(connection.close_code)

    def judge(self, connection: ServerConnection, request: Request) -> Response | None:
        self.requests.append(request)
        if request.path == "/refused":
            answer = connection.respond(403, "members only\n")
            answer.headers["Cache-Control"] = "max-age=60"
            return answer
        return None

    @asynccontextmanager
    async def open(self) -> AsyncIterator["WebSocketSite"]:
        options: Any = {
            "process_request": self.judge,
            "select_subprotocol": lambda _, offered: CHAT if CHAT in offered else None,
        }
        async with serve(self, "127.0.0.1", 0, **options) as server:
            self.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            yield self


@pytest.fixture
async def site() -> AsyncIterator[WebSocketSite]:
    async with WebSocketSite().open() as site:
        yield site


@asynccontextmanager
async def proxied(site: WebSocketSite, **options: Any) -> AsyncIterator[str]:
    """The address of a gateway in front of the site, for WebSockets."""
    pages = PageCache("memory://")
    app = gateway(pages=site_of(PagesSettings((site.url,), **options), pages), page_cache=pages)
    async with running(app, server_config(app, app.is_site)) as url:
        yield url.replace("http:", "ws:")


@pytest.fixture
async def url(site: WebSocketSite) -> AsyncIterator[str]:
    async with proxied(site) as url:
        yield url


class TestI12WebSockets:
    async def test_websocket_messages_pass_both_ways(self, url: str) -> None:
        """Texts and bytes, short ones and ones above what is buffered, in their order."""
        big = os.urandom(3 * MOST_BUFFERED)
        async with connect(f"{url}/echo", max_size=None, compression=None) as client:
            sent: list[str | bytes] = ["hello", b"\x00\xff", big, "", big[:70_000]]
            for message in sent:
                await client.send(message)
            assert [await client.recv() for _ in sent] == sent

    async def test_subprotocol_and_compression_are_negotiated_between_the_two_ends(
        self, url: str, site: WebSocketSite
    ) -> None:
        """Subprotocol and compression of messages; the Origin and the target reach the site."""
        options: Any = {"subprotocols": [CHAT], "origin": "https://shop.example"}
        async with connect(f"{url}/echo?room=1%2F2", **options) as client:
            await client.send("x" * 10_000)
            assert await client.recv() == "x" * 10_000
            assert client.subprotocol == CHAT
            assert [it.name for it in client.protocol.extensions] == ["permessage-deflate"]
        seen = site.requests[0]
        assert seen.path == "/echo?room=1%2F2"
        assert seen.headers["origin"] == "https://shop.example"

    async def test_a_websocket_request_loses_fields_that_clients_may_not_claim(
        self, url: str, site: WebSocketSite
    ) -> None:
        """I24: hop-by-hop fields, and who the client is, are as for any other request."""
        claims = {"X-Forwarded-For": "6.6.6.6", "X-Real-IP": "6.6.6.6", "X-Forwarded-Host": "evil",
                  "Proxy-Connection": "x", "X-Kept": "1", "Cookie": "a=1"}  # fmt: skip
        async with connect(f"{url}/echo", additional_headers=claims):
            pass
        seen = site.requests[0].headers
        assert (seen["x-forwarded-for"], seen["x-kept"], seen["cookie"]) == (
            "127.0.0.1",
            "1",
            "a=1",
        )
        assert not {"x-real-ip", "proxy-connection"} & {it.lower() for it in seen}
        assert seen["x-forwarded-host"] == seen["host"]
        assert seen["via"] == "1.1 stillfresh"

    async def test_websocket_close_codes_pass_both_ways(
        self, url: str, site: WebSocketSite
    ) -> None:
        """What the site closes with, the client hears, and the other way round."""
        async with connect(f"{url}/bye") as client:
            with pytest.raises(ConnectionClosed) as closed:
                await client.recv()
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4001, "enough")
        async with connect(f"{url}/echo") as client:
            await client.close(4002)
        await until(lambda: site.closed == [4001, 4002])

    async def test_the_sites_refusal_of_a_websocket_is_passed_on(
        self, url: str, site: WebSocketSite
    ) -> None:
        """With its status and its body, and it is not kept, whatever it says."""
        for _ in range(2):
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"{url}/refused").__aenter__()
            assert refused.value.response.status_code == 403
            assert refused.value.response.body == b"members only\n"
        assert len(site.requests) == 2

    async def test_a_websocket_to_an_unreachable_site_is_502(self) -> None:
        """As for any other request."""
        site = WebSocketSite()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            site.url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with proxied(site) as url:
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"{url}/echo").__aenter__()
        assert refused.value.response.status_code == 502

    async def test_the_number_of_websockets_is_limited(self, site: WebSocketSite) -> None:
        """One more is 503, and the site is not asked; a place that is left is free again."""
        async with (
            proxied(site, max_streams=2) as url,
            connect(f"{url}/echo"),
            connect(f"{url}/echo") as second,
        ):
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"{url}/echo").__aenter__()
            assert refused.value.response.status_code == 503
            await second.close()
            await until(lambda: len(site.closed) == 1)
            async with connect(f"{url}/echo") as third:
                await third.send("here")
                assert await third.recv() == "here"
        assert len(site.requests) == 3

    async def test_a_websocket_client_that_does_not_read_stops_the_site(
        self, url: str, site: WebSocketSite
    ) -> None:
        """What nobody takes is not collected: the site can send no more."""
        async with connect(f"{url}/flood", max_queue=1, compression=None) as client:
            before = -1
            while (before < site.sent or not site.sent) and site.sent < 100 * MOST_BUFFERED:
                before = site.sent
                await asyncio.sleep(0.1)
            assert site.sent < 100 * MOST_BUFFERED
            client.transport.abort()

    async def test_a_websocket_client_that_leaves_ends_the_connection_to_the_site(
        self, url: str, site: WebSocketSite
    ) -> None:
        """Without a word, too."""
        async with connect(f"{url}/echo") as client:
            client.transport.abort()
            await until(lambda: len(site.closed) == 1)

    async def test_a_silent_websocket_is_ended(
        self, url: str, site: WebSocketSite, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its place is somebody else's then."""
        monkeypatch.setattr("stillfresh.pages.tunnels.IDLE", 0.05)
        async with connect(f"{url}/echo") as client:
            with pytest.raises(ConnectionClosed):
                await client.recv()
        await until(lambda: len(site.closed) == 1)

    async def test_websockets_on_the_gateways_own_paths_do_not_reach_the_site(
        self, url: str, site: WebSocketSite
    ) -> None:
        """`/v1/live` speaks the live protocol, and nothing of it reaches the site."""
        async with connect(f"{url}/v1/live"):
            pass
        for path in ("/_stillfresh/x", "/metrics"):
            with pytest.raises(InvalidStatus):
                await connect(url + path).__aenter__()
        assert not site.requests

    async def test_websocket_bytes_sent_with_the_head_are_not_lost(
        self, site: WebSocketSite
    ) -> None:
        """Whether in the same packet or in the next, in its order."""

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 101 Yes\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            writer.write(await reader.readexactly(6))
            writer.close()

        async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
            site.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with proxied(site) as url, asyncio.timeout(30):
                host = url.removeprefix("ws://")
                reader, writer = await asyncio.open_connection(*host.split(":"))
                fields = f"Host: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
                writer.write(f"GET /echo HTTP/1.1\r\n{fields}one".encode())
                await writer.drain()
                await asyncio.sleep(0)
                writer.write(b"two")
                assert (await reader.read()).endswith(b"\r\n\r\nonetwo")
                writer.close()

    async def test_a_stored_page_does_not_answer_a_websocket_request(
        self, site: WebSocketSite
    ) -> None:
        """A path whose page is at hand is asked for all the same, and the page stays."""
        plain = b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 4\r\n\r\npage"
        refusal = b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            asked.append(head)
            writer.write(refusal if b"upgrade" in head.lower() else plain)
            writer.close()

        asked: list[bytes] = []
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            site.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with proxied(site) as url:
                host = url.removeprefix("ws://")
                get = f"GET /echo HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
                for _ in range(2):
                    assert b"page" in await raw(host, get, b"page")
                with pytest.raises(InvalidStatus) as refused:
                    await connect(f"{url}/echo").__aenter__()
                assert refused.value.response.status_code == 404
                assert b"hit" in await raw(host, get, b"page")
        assert len(asked) == 2


async def raw(host: str, request: bytes, last: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*host.split(":"))
    writer.write(request)
    answer = await reader.readuntil(last)
    writer.close()
    return answer


class TestI12WebSocketsOfProcesses:
    async def test_workers_pass_on_websockets_and_end_them_on_sigterm(
        self, site: WebSocketSite, tmp_path: Path
    ) -> None:
        """SIGTERM ends open tunnels at once, on both sides, and the process with them."""
        with ExitStack() as stack:
            options = ("--workers", "2", "--store", f"sqlite:///{tmp_path}/pages.db")
            proxy = await asyncio.to_thread(Proxy, stack, *options, upstream=site.url)
            url = proxy.url.replace("http:", "ws:")
            async with connect(f"{url}/echo") as one, connect(f"{url}/echo") as other:
                for client in (one, other):
                    await client.send("hello")
                    assert await client.recv() == "hello"
                proxy.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(9):  # of the ten seconds that requests have
                    for client in (one, other):
                        with pytest.raises(ConnectionClosed):
                            await client.recv()
                    assert await asyncio.to_thread(proxy.process.wait) == 0
            await until(lambda: len(site.closed) == 2)
            assert "Traceback" not in proxy.log()


class TestI12WebSocketsOfApps:
    async def test_a_websocket_reaches_an_app_behind_the_middleware(self) -> None:
        """With any server: the gateway, the edge and the cache hand the WebSocket on."""
        heard: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "websocket":
                heard.append(scope["path"])
                await receive()
                await send({"type": "websocket.accept"})
                await send({"type": "websocket.send", "text": (await receive())["text"]})
            elif scope["type"] == "lifespan":
                while (message := await receive())["type"] != "lifespan.shutdown":
                    await send({"type": f"{message['type']}.complete"})
                await send({"type": "lifespan.shutdown.complete"})

        pages = PageCache("memory://")
        async with (
            running(gateway(pages=IsrMiddleware(app, pages), page_cache=pages)) as url,
            connect(url.replace("http:", "ws:") + "/chat") as client,
        ):
            await client.send("hello")
            assert await client.recv() == "hello"
        assert heard == ["/chat"]
