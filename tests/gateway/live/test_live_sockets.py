"""G3: below the messages, who is let go is gone, and frames that carry nothing have a limit."""

import asyncio
import random
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from starlette.types import Receive, Scope, Send
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode

from stillfresh.bounded import MessageRate
from stillfresh.gateway.live import Hub, Live
from stillfresh.gateway.server import sockets
from stillfresh.gateway.server.sockets import BURST, MOST_PARTS, RATE, SocketProtocol
from stillfresh.pages.edge import LINGER
from stillfresh.testing import ManualClock
from tests.kit.engine import until
from tests.kit.live import PATIENCE, Upstream, handshaken, never, sent_raw, served, viewing

pytestmark = pytest.mark.usefixtures("nothing_logged")


def frame(opcode: Opcode, data: bytes = b"", *, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[SocketProtocol]:
    """Every connection of the test."""
    found: list[SocketProtocol] = []
    before = SocketProtocol.connection_made

    def note(self: SocketProtocol, transport: asyncio.BaseTransport) -> None:
        found.append(self)
        before(self, transport)

    monkeypatch.setattr(SocketProtocol, "connection_made", note)
    return found


async def told_to_close(raw: Any) -> bytes:
    """All that is said until the server hangs up."""
    said = b""
    async with asyncio.timeout(PATIENCE):
        while more := await asyncio.get_running_loop().sock_recv(raw, 65_536):
            said += more
    return said


class TestG3LetGo:
    async def test_a_client_that_never_reads_is_cut_off_and_counted_until_then(
        self,
        hub: Hub,
        upstream: Upstream,
        made: list[SocketProtocol],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Its socket and what waited in it too, not only its session."""
        monkeypatch.setattr(sockets, "LINGER", 0.2)
        clock, upstream.padding = ManualClock(), "x" * 50_000
        live = Live(hub, clock=clock, sleep=never, patience=20)
        ids = [f"p{number}" for number in range(100)]
        async with served(live, lifespan="off", ws=SocketProtocol) as port:
            raw = await handshaken(port)
            try:
                items = [["word", id_] for id_ in ids]
                await sent_raw(raw, {"type": "subscribe", "items": items})
                await until(lambda: live.snapshot()["subscriptions"]["word"] == 100)
                [session] = live._sessions
                while session._sending_since is None:
                    await hub.resource("word").refresh(*ids)
                    await asyncio.sleep(0.01)
                clock.advance(20)
                live.tick()
                assert live.snapshot()["connections"] == 1
                await until(lambda: live.snapshot()["connections"] == 0)
                assert [it.disconnected for it in made] == [True]
            finally:
                raw.close()
            await live.close()

    async def test_the_server_ends_although_a_client_does_not_read(
        self, hub: Hub, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server ends within its grace, and no traceback tells of it."""
        monkeypatch.setattr(sockets, "LINGER", 0.2)
        upstream.padding = "x" * 50_000
        live = Live(hub, sleep=never)
        ids = [f"p{number}" for number in range(100)]
        options: dict[str, Any] = {"ws": SocketProtocol, "timeout_graceful_shutdown": None}
        async with asyncio.timeout(PATIENCE):
            async with served(live, lifespan="off", **options) as port:
                raw = await handshaken(port)
                items = [["word", id_] for id_ in ids]
                await sent_raw(raw, {"type": "subscribe", "items": items})
                await until(lambda: live.snapshot()["subscriptions"]["word"] == 100)
                [session] = live._sessions
                while session._sending_since is None:
                    await hub.resource("word").refresh(*ids)
                    await asyncio.sleep(0.01)
            raw.close()
            await live.close()

    async def test_a_refused_client_is_not_logged_as_an_error(self, hub: Hub) -> None:
        """An answer was given: nothing is to be logged."""
        live = Live(hub, sleep=never)
        async with served(live, lifespan="off", ws=SocketProtocol) as port:
            with pytest.raises(InvalidStatus) as refused:
                async with viewing(port, origin="https://evil.example"):
                    pass
            assert refused.value.response.status_code == 403
        await live.close()

    async def test_closing_a_socket_returns_when_its_connection_has_ended(
        self, made: list[SocketProtocol]
    ) -> None:
        """So the app counts a viewer until its socket is gone."""
        ended: list[bool] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            del scope
            await receive()
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close"})
            ended.append(made[0].disconnected)

        async with served(app, lifespan="off", ws=SocketProtocol) as port:
            raw = await handshaken(port)
            raw.close()
            await until(lambda: ended == [True])

    @pytest.mark.parametrize(
        "name",
        ["handle_close", "handle_parser_exception", "keepalive_timeout", "run_asgi", "shutdown"],
    )
    async def test_every_way_of_ending_a_socket_cuts_it_off_after_a_moment(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever ends it, uvicorn's own way comes first."""
        protocol, theirs = object.__new__(SocketProtocol), MagicMock()
        way = AsyncMock() if name == "run_asgi" else MagicMock()
        monkeypatch.setattr(SocketProtocol.__mro__[1], name, way)
        protocol.loop, protocol.transport, protocol.disconnected = theirs, theirs, False
        done = getattr(protocol, name)(*[None] if name == "handle_close" else [])
        if done is not None:
            await done
        assert way.call_count == 1
        theirs.call_later.assert_called_once_with(LINGER, theirs.abort)

    async def test_data_from_a_refused_client_is_not_parsed(self) -> None:
        """What it still sends is not even parsed."""
        protocol = object.__new__(SocketProtocol)
        protocol._is_refused, protocol.conn = True, MagicMock()
        protocol.data_received(frame(Opcode.TEXT, b"{}"))
        assert protocol.conn.mock_calls == []


class TestG3Frames:
    @pytest.mark.parametrize(
        ("opcode", "fin"), [(Opcode.PING, True), (Opcode.PONG, True), (Opcode.CONT, False)]
    )
    async def test_a_flood_of_empty_frames_closes_the_connection(
        self, hub: Hub, opcode: Opcode, *, fin: bool
    ) -> None:
        """Too many at once, and it is over: 1008."""
        live = Live(hub, sleep=never)
        async with served(live, lifespan="off", ws=SocketProtocol) as port:
            raw = await handshaken(port)
            begin = frame(Opcode.TEXT, b"{", fin=False) if opcode is Opcode.CONT else b""
            flood = begin + frame(opcode, fin=fin) * int(2 * BURST)
            await asyncio.get_running_loop().sock_sendall(raw, flood)
            assert b"\x03\xf0too many frames" in await told_to_close(raw)
            raw.close()
            await until(lambda: live.snapshot()["connections"] == 0)
        await live.close()

    async def test_a_message_of_too_many_parts_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However slowly they come: empty parts would never be too long."""
        protocol = object.__new__(SocketProtocol)
        protocol.frames = [b""] * MOST_PARTS
        protocol._rate = MessageRate(RATE, BURST, 0.0)
        refused: list[bool] = []
        monkeypatch.setattr(protocol, "_refuse", lambda: refused.append(True))
        protocol.loop = asyncio.get_running_loop()
        protocol.handle_cont(Frame(Opcode.CONT, b"", fin=False))
        assert refused

    async def test_no_pongs_are_written_to_a_client_that_does_not_read(
        self, hub: Hub, made: list[SocketProtocol]
    ) -> None:
        """What is owed to it does not grow."""
        live = Live(hub, sleep=never)
        async with served(live, lifespan="off", ws=SocketProtocol) as port:
            raw = await handshaken(port)
            await until(lambda: live.snapshot()["connections"] == 1)
            [protocol] = made
            protocol.pause_writing()
            before = protocol.transport.get_write_buffer_size()
            protocol.data_received(frame(Opcode.PING, random.randbytes(125)) * 100)
            assert protocol.transport.get_write_buffer_size() == before
            protocol.resume_writing()
            protocol.data_received(frame(Opcode.PING, b"now"))
            async with asyncio.timeout(PATIENCE):
                while b"\x8a\x03now" not in await asyncio.get_running_loop().sock_recv(raw, 65_536):
                    pass
            raw.close()
        await live.close()

    async def test_text_that_is_not_utf8_closes_with_1007(self, hub: Hub) -> None:
        """1007, and not a word in the log."""
        live = Live(hub, sleep=never)
        async with served(live, lifespan="off", ws=SocketProtocol) as port:
            raw = await handshaken(port)
            await asyncio.get_running_loop().sock_sendall(raw, frame(Opcode.TEXT, b"\xff"))
            assert b"\x03\xeftext is UTF-8" in await told_to_close(raw)
            raw.close()
        await live.close()


class TestE28Bytes:
    async def test_a_frame_for_many_clients_is_encoded_once(
        self, hub: Hub, made: list[SocketProtocol], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """G20: the same bytes, not equal ones, are written to each; they are a whole frame."""
        live = Live(hub, sleep=never)
        written: list[bytes] = []
        async with (
            served(live, lifespan="off", ws=SocketProtocol) as port,
            viewing(port, compression=None) as one,
            viewing(port, compression=None),
        ):
            for protocol in made:
                spy = _Spy(protocol.transport, written)
                monkeypatch.setattr(protocol, "transport", spy)
                await protocol.send({"type": "websocket.send", "text": '["é", "shared"]'})
            assert written[0] is written[1]
            assert await one.hear() == ["é", "shared"]  # type: ignore[comparison-overlap]
        await live.close()


class _Spy:
    """A transport that notes what is written to it."""

    def __init__(self, transport: Any, written: list[bytes]) -> None:
        self._transport = transport
        self._written = written

    def write(self, data: bytes) -> None:
        self._written.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
