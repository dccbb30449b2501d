"""WebSockets as browsers speak them to a gateway: uvicorn's protocol, within limits.

A connection that is being closed is cut off after a moment, even if the client does not read. So is
one that sends only pings, or parts of a message without end. Needs `stillfresh[web]`.
"""

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State

from stillfresh.bounded import MessageRate
from stillfresh.pages.edge import LINGER

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

RATE: Final = 50.0
BURST: Final = 1_000.0
"""Control frames and parts of messages, a second and at once: browsers send hardly any."""
MOST_PARTS: Final = 1_000
"""Of one message: empty ones would never be too long."""


class SocketProtocol(WebSocketsSansIOProtocol):
    """One connection."""

    _is_refused = False
    _cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.close_timeout = LINGER
        self._gone = asyncio.Event()
        self._rate = MessageRate(RATE, BURST, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._cut is not None:
            self._cut.cancel()
        self._gone.set()

    def shutdown(self) -> None:
        super().shutdown()
        self._linger()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)

    def handle_ping(self) -> None:
        """Answer a ping only if the client has read the last answer."""
        answer = b"".join(self.conn.data_to_send())
        if self._may_send_another() and self.writable.is_set():
            self.transport.write(answer)

    def handle_pong(self, event: Frame) -> None:
        if self._may_send_another():
            super().handle_pong(event)

    def handle_cont(self, event: Frame) -> None:
        if not self._may_send_another():
            return
        if len(self.frames) >= MOST_PARTS:
            self._refuse()
        else:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """Invalid data is the client's mistake: close with a reason, without a log line."""
        try:
            if self.curr_msg_data_type == "text":
                b"".join(self.frames).decode()
        except UnicodeDecodeError:
            self._refuse(1007, "text is UTF-8")
        else:
            super().send_receive_event_to_app()

    def handle_close(self, event: Frame) -> None:
        super().handle_close(event)
        self._linger()

    def handle_parser_exception(self) -> None:
        super().handle_parser_exception()
        self._linger()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._linger()

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self._linger()

    async def send(self, message: "ASGISendEvent") -> None:
        """A close has happened when the connection is gone: until then the viewer is connected."""
        if message["type"] == "websocket.send" and (text := message.get("text")) is not None:
            await self.writable.wait()
            if self.conn.state is State.OPEN and not (self.close_sent or self.conn.extensions):
                self.transport.write(framed(text))
                return
        is_open = self.handshake_complete
        if message["type"] == "websocket.close":
            self._linger()
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True  # refused, which is an answer too
        elif message["type"] == "websocket.close" and is_open:
            await self._gone.wait()

    def _linger(self) -> None:
        if self._cut is None and not self.disconnected:
            self._cut = self.loop.call_later(LINGER, self.transport.abort)

    def _may_send_another(self) -> bool:
        if not self._is_refused and not self._rate.spend(self.loop.time()):
            self._refuse()
        return not self._is_refused

    def _refuse(self, code: int = 1008, reason: str = "too many frames") -> None:
        self._is_refused = True
        self.frames = []
        self.conn.fail(code, reason)
        self.handle_parser_exception()


@lru_cache(maxsize=32)
def framed(text: str) -> bytes:
    """A server's frames are not masked, so a message to many clients is encoded once."""
    return Frame(Opcode.TEXT, text.encode()).serialize(mask=False)
