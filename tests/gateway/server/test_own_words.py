"""I34: the server's log lines are in our own words, with the path and without the query."""

import asyncio
import logging
from contextlib import suppress

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from stillfresh.gateway.server.listening import finished, server_config
from tests.kit.gateway import running

TEXT = (b"content-type", b"text/plain")
START: Message = {"type": "http.response.start", "status": 200, "headers": [TEXT]}
PART: Message = {"type": "http.response.body", "body": b"a", "more_body": True}


class Broken(Exception):
    """A mistake in an app."""


async def live(receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Does wrong what its path says."""
    if scope["type"] == "lifespan":
        await live(receive, send)
    elif scope["path"] == "/raises":
        raise Broken
    elif scope["path"] == "/raises-later":
        await send(START)
        await send(PART)
        raise Broken
    elif scope["path"] == "/cuts":
        await send(START)
        await send(PART)
    elif scope["path"] == "/waits":
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stillfresh")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the log; none is uvicorn's."""
    assert [it.name for it in caplog.records if not it.name.startswith("stillfresh.")] == []
    return [
        it.getMessage() for it in caplog.records if it.name.startswith("stillfresh.gateway.server")
    ]


async def asked(url: str, client: httpx.AsyncClient) -> int | None:
    """The status; None if the answer broke off."""
    with suppress(httpx.RemoteProtocolError):
        return (await client.get(url)).status_code
    return None


class TestI34OwnWords:
    @pytest.mark.parametrize(
        ("path", "status", "line"),
        [
            ("/raises", 500, "GET /raises: internal error"),
            ("/raises-later", None, "GET /raises-later: internal error"),
            ("/silent", 500, "GET /silent: internal error: there is no answer"),
        ],
    )
    async def test_a_mistake_in_the_app_is_logged_with_the_path(
        self, caplog: pytest.LogCaptureFixture, path: str, status: int | None, line: str
    ) -> None:
        """Without the query, which may have a secret; an exception is logged with its place."""
        async with running(app) as url, httpx.AsyncClient(trust_env=False) as client:
            assert await asked(f"{url}{path}?token=secret", client) == status
        assert lines(caplog) == [line]
        [record] = caplog.records
        assert record.levelname == "ERROR"
        assert (record.exc_info is not None) is ("raises" in path)

    async def test_an_answer_that_was_cut_on_purpose_is_not_logged_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The part that cuts it says why."""
        async with running(app) as url, httpx.AsyncClient(trust_env=False) as client:
            assert await asked(f"{url}/cuts", client) is None
        assert lines(caplog) == []

    async def test_a_client_that_left_is_not_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        """An app that notices it returns without an answer."""
        is_over = asyncio.Event()

        async def leaving(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await live(receive, send)
                return
            while (await receive())["type"] != "http.disconnect":
                pass
            is_over.set()

        async with running(leaving) as url:
            port = int(url.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
            await writer.drain()
            writer.close()
            async with asyncio.timeout(30):
                await is_over.wait()
        assert lines(caplog) == []

    async def test_bytes_that_are_not_http_are_refused_in_our_words(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A client's mistake is no warning: clients choose how many there are."""
        async with running(app) as url:
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x00 not http\r\n\r\n")
            answer = await reader.read()
            writer.close()
        assert answer.endswith(b"\r\n\r\nThis is not a valid HTTP request.\n")
        [line] = lines(caplog)
        assert "refused with 400: " in line
        assert caplog.records[0].levelname == "INFO"

    async def test_a_request_that_outlives_the_server_is_logged_with_its_path(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = server_config(app)
        config.timeout_graceful_shutdown = 0.05  # type: ignore[assignment]
        line = "requests still under way when the server ended are cut off (1): GET /waits"
        async with httpx.AsyncClient(trust_env=False) as client:
            async with running(app, config) as url:
                asking = asyncio.create_task(client.get(f"{url}/waits?token=secret"))
                async with asyncio.timeout(30):
                    while not [it for it in asyncio.all_tasks() if "run_asgi" in repr(it)]:
                        await asyncio.sleep(0)
            assert (await asking).status_code == 503
        assert lines(caplog) == [line]

    async def test_a_request_whose_client_has_left_is_not_said_to_be_cut_off(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its app may go on until the server ends; there is nobody to tell."""
        client_has_left = asyncio.Event()

        async def lingering(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await live(receive, send)
                return
            while (await receive())["type"] != "http.disconnect":
                pass
            client_has_left.set()
            await asyncio.Event().wait()

        config = server_config(lingering)
        config.timeout_graceful_shutdown = 0.05  # type: ignore[assignment]
        async with running(lingering, config) as url, asyncio.timeout(30):
            port = int(url.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            await writer.drain()
            writer.close()
            await client_has_left.wait()
        assert lines(caplog) == []

    async def test_a_mistake_in_a_websocket_is_logged_with_its_path(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with running(app) as url:
            with pytest.raises(WebSocketException):
                await connect(f"ws{url.removeprefix('http')}/raises?token=secret")
        assert lines(caplog) == ["GET /raises: internal error"]

    @pytest.mark.parametrize(
        ("broken", "line"),
        [
            ("startup", "internal error at the start or the end of the server"),
            ("message", "the server could not start: no store"),
        ],
    )
    async def test_a_start_that_fails_is_logged_once(
        self, caplog: pytest.LogCaptureFixture, broken: str, line: str
    ) -> None:
        """By an exception, or by the app's own message."""

        async def failing(_: Scope, receive: Receive, send: Send) -> None:
            await receive()
            if broken == "message":
                await send({"type": "lifespan.startup.failed", "message": "no store"})
            raise Broken

        async def startup() -> Message:
            return {"type": "lifespan.startup"}

        async def heard(_: Message) -> None:
            pass

        # Uvicorn itself would end the process.
        with pytest.raises(Broken):
            await finished(failing)({"type": "lifespan"}, startup, heard)
        assert lines(caplog) == [line]
