"""One viewer on `WS /v1/live`: handles its messages, and sends news.

Two tasks: the server's own task sends, another one receives. `messages.py` defines messages and
limits, the outbox has the waiting messages, and a connection of the hub has the subscriptions.

To end, `end` sets the code and the reason and wakes the sender. The sender sends the answers that
wait, stops the receiver, and sends the closing message last.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stillfresh.bounded import MessageRate
from stillfresh.errors import ConfigError, NotOpen
from stillfresh.gateway.live import messages
from stillfresh.gateway.live.hub import Viewed
from stillfresh.gateway.live.messages import BadMessage, Close, Code, ErrorMessage, OnScreen
from stillfresh.gateway.live.outbox import Outbox
from stillfresh.gateway.live.sign_in import UNCONFIRMED_FOR, SignIn, SignInFailed
from stillfresh.http.own_writes import token_in

if TYPE_CHECKING:
    from stillfresh.gateway.live.app import Live

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BAD: Final = 10
CLOSING = 3.0
"""Seconds for the closing message."""
WAITED: Final = 0.01
"""Seconds; a send that took longer has waited for the viewer, so the viewer reads."""
IN_A_TURN: Final = 10
"""Frames to one viewer before others get their turn."""

logger = logging.getLogger(__name__)


class Session:
    """One WebSocket, from acceptance to end."""

    def __init__(self, live: "Live", scope: Scope, *, batches_frames: bool) -> None:
        self._live = live
        self._scope = scope
        self.outbox = Outbox(live.frames, batches_frames=batches_frames)
        self.connection = live.hub.connect(tell=self.outbox.wake.set)
        self.sign_in: SignIn | None = None
        self._path: str | None = None
        self._bad = 0
        self._heard_at = live.clock()
        self._own_until = -math.inf
        """Until then the viewer's own changes count."""
        self._see(token_in(tuple(scope["headers"])))
        self._rate = MessageRate(messages.RATE, messages.BURST, self._heard_at)
        self._asked_at: float | None = None
        self._sending_since: float | None = None
        self._ends: tuple[Close, str] | None = None
        self._is_gone = False
        self._patience = asyncio.timeout(None)

    async def run(self, receive: Receive, send: Send) -> None:
        """Run until either side ends it."""
        self._welcome()
        listening = asyncio.create_task(self._listen(receive))
        try:
            async with self._patience:
                await self._send_all(send)
        except (TimeoutError, OSError):  # it does not read, or has gone
            pass
        finally:
            listening.cancel()
            self.sign_in = None
            self.connection.close()
            self._live.moved(self, self.connection.viewer_id, None)
            await asyncio.gather(listening, return_exceptions=True)
        await self._say_goodbye(send)

    def end(self, code: Close, reason: str, *, within: float | None = None) -> None:
        """End.

        Waiting answers are still sent, if the viewer reads them `within` so many seconds.
        """
        if self._ends is None:
            self._ends = code, reason
            self.outbox.is_ending = True
            self.outbox.wake.set()
        if within is not None:
            with suppress(RuntimeError):  # it does not send yet, or not any more
                self._patience.reschedule(asyncio.get_running_loop().time() + within)

    def check(self, now: float) -> None:
        """Ask a silent viewer whether it is there; let go of one that is not.

        An outage of the identity service is bridged for a while, and no longer.
        """
        if now >= self._own_until:
            self.connection.token = ""
        if self.sign_in is not None and self.sign_in.has_lapsed(now):
            minutes = UNCONFIRMED_FOR / 60
            why = f"your sign-in could not be confirmed for {minutes:g} minutes; sign in again"
            self._complain("sign_in_unavailable", why)
            self._become(None)
        since_asked = None if self._asked_at is None else now - self._asked_at
        unread_for = None if self._sending_since is None else now - self._sending_since
        live = self._live
        match messages.pulse(
            now - self._heard_at, since_asked, unread_for, live.heartbeat, live.patience
        ):
            case "ask":
                self._asked_at = now
                self.outbox.put("beats", messages.PingMessage())
            case "gone":
                self.end(Close.SILENT, "nothing was heard, or read, for too long", within=0)

    async def check_token(self) -> bool:
        """A revoked token makes the viewer a guest. False if the hook could not answer."""
        if (sign_in := self.sign_in) is None:
            return True
        try:
            is_good = await sign_in.check()
        except SignInFailed:
            return sign_in is not self.sign_in
        if not is_good and sign_in is self.sign_in:  # else: signed in anew, or out, meanwhile
            self._complain("signed_out", "your sign-in is not valid any more; sign in again")
            self._become(None)
        return True

    async def _send_all(self, send: Send) -> None:
        outbox = self.outbox
        connection = self.connection
        clock = self._live.clock
        while not self._is_gone:
            await outbox.wake.wait()
            outbox.wake.clear()
            now = clock()
            count = 0
            while (frame := outbox.frame(connection, now)) is not None:
                self._sending_since = now
                await _send_or_reset(send, {"type": "websocket.send", "text": frame})
                begin = now
                now = clock()
                count += 1
                if now - begin >= WAITED:  # it waited for room, and found it: a sign of life
                    self._heard_at = now
                if count % IN_A_TURN == 0:
                    await asyncio.sleep(0)
            if not connection.is_open:
                self.end(Close.RESTART, "the service restarts")
            if self._ends is not None:
                return
            self._sending_since = None

    async def _say_goodbye(self, send: Send) -> None:
        if self._is_gone or self._ends is None:
            return
        code, reason = self._ends
        with suppress(TimeoutError, OSError):  # it has gone already
            async with asyncio.timeout(CLOSING):
                await _send_or_reset(
                    send, {"type": "websocket.close", "code": int(code), "reason": reason}
                )

    async def _listen(self, receive: Receive) -> None:
        try:
            while self._ends is None and not self._is_gone:
                await self._hear(await receive())
        except NotOpen:  # the cache closes, and this connection with it
            self.end(Close.RESTART, "the service restarts")
        except Exception:
            logger.exception("a live connection broke")
            self.end(Close.BROKEN, "internal error")

    async def _hear(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "websocket.disconnect":
            self._is_gone = True
            self.outbox.wake.set()
            return
        self._heard_at = self._live.clock()
        text = message.get("text")
        most = self._live.max_message
        binary = message.get("bytes") or b""
        body = binary if text is None else text.encode(errors="surrogatepass")
        if len(body) > most:
            self.end(Close.TOO_BIG, f"a message has at most {most:,} bytes")
            return
        received = messages.read(text)
        if not self._rate.spend(self._heard_at, messages.cost_of(received)):
            self._complain("flood", "too many messages; slow down")
            self.end(Close.POLICY, "too many messages")
            return
        for each in received:
            if self._ends is None:
                await self._do(each)

    async def _do(self, message: messages.ClientMessage | BadMessage) -> None:
        match message:
            case BadMessage(why):
                self._complain("bad_message", why, is_bad=True)
            case messages.SubscribeMessage(items):
                self._subscribe(await self._without_unconfirmed(items))
            case messages.SignInMessage(token):
                await self._sign_in(token)
            case messages.SignOutMessage():
                self._become(None)
            case messages.AskStatsMessage(token):
                if not self._live.show_stats(self, self._scope, token):
                    self._complain("forbidden", "the figures are for the operator", is_bad=True)
            case messages.PingMessage():
                self.outbox.put("beats", messages.PongMessage())
            case _:
                self._look(message)

    def _look(self, message: messages.ClientMessage) -> None:
        match message:
            case messages.UnsubscribeMessage(items):
                for item in items:
                    with suppress(ConfigError):  # it was never subscribed
                        self.connection.unsubscribe(item.kind, item.id)
            case messages.VisibleMessage(visible):
                self.connection.set_visible(visible)
            case messages.AtLeastMessage(token):
                self._see(token)
            case messages.RouteMessage(path):
                if self._path not in {None, path}:  # the first path resets nothing
                    self.connection.reset()
                self._path = path

    def _see(self, token: str) -> None:
        """The viewer has seen these changes, for as long as a browser would say so."""
        if token:
            self._own_until = self._live.clock() + messages.OWN_FOR
            self.connection.see(token)

    async def _without_unconfirmed(self, items: Sequence[OnScreen]) -> Sequence[OnScreen]:
        """Nothing private is subscribed unless the token was confirmed just now."""
        own = [item for item in items if item.kind in self._live.own_kinds]
        if not own or await self.check_token():
            return items
        why = "your sign-in could not be confirmed just now; try again later"
        self._complain("sign_in_unavailable", why, items=[(item.kind, item.id) for item in own])
        return [item for item in items if item.kind not in self._live.own_kinds]

    def _subscribe(self, items: Sequence[OnScreen]) -> None:
        """Subscribe each item once, and send its present view."""
        connection = self.connection
        most = self._live.max_subscriptions
        refused = {kind for kind in {item.kind for item in items} if not self._may_see(kind)}
        too_many: dict[tuple[str, str], None] = {}
        for item in items:
            if item.kind in refused or (viewed := self._viewed_item(item)) is None:
                continue
            if viewed not in connection:
                if connection.size >= most:
                    too_many[item.kind, item.id] = None
                    continue
                connection.add(viewed)
            connection.read_present(viewed, item.since)
        if too_many:
            why = f"a viewer has at most {most:,} subscriptions"
            self._complain("too_many_subscriptions", why, items=too_many)

    def _viewed_item(self, item: OnScreen) -> Viewed | None:
        try:
            if messages.is_id(item.id):
                return self._live.hub.find(item.kind, item.id, self.connection.viewer_id)
            why = messages.NO_ID
        except ConfigError as exc:
            why = str(exc)
        self._complain("bad_id", why, item.kind, item.id[:100], is_bad=True)
        return None

    def _may_see(self, kind: str) -> bool:
        hub = self._live.hub
        if kind not in hub.kinds:
            why = f"no such kind; there are: {', '.join(hub.kinds) or 'none'}"
            self._complain("unknown_kind", why, kind[:100], is_bad=True)
        elif hub.is_per_viewer(kind) and self.connection.viewer_id is None:
            self._complain("sign_in_needed", "its views differ by viewer: sign in first", kind)
        else:
            return True
        return False

    async def _sign_in(self, token: str) -> None:
        try:
            sign_in = await self._live.tokens.sign_in(token)
        except SignInFailed as exc:
            self._complain(exc.code, str(exc), is_bad=exc.is_bad)
        else:
            if self.connection.is_open:  # a hook may answer although it was cancelled
                self._become(sign_in)

    def _become(self, sign_in: SignIn | None) -> None:
        before = self.connection.viewer_id
        now = sign_in.viewer_id if sign_in else None
        self.sign_in = sign_in
        if now != before:
            self.outbox.forget_notices()
        self.connection.become(now)
        self._live.moved(self, before, now)
        self._welcome()

    def _welcome(self) -> None:
        live = self._live
        message = messages.WelcomeMessage(
            self.connection.viewer_id,
            live.hub.kinds,
            live.own_kinds,
            live.heartbeat,
            live.max_subscriptions,
        )
        self._reply(message)

    def _complain(
        self,
        code: Code,
        why: str,
        kind: str | None = None,
        id_: str | None = None,
        *,
        items: Iterable[tuple[str, str]] = (),
        is_bad: bool = False,
    ) -> None:
        """Report an error. Errors of the viewer (`is_bad`) are counted, and some are forgiven."""
        self._reply(ErrorMessage(code, why, kind, id_, tuple(items) or None))
        self._bad += is_bad
        if self._bad >= MAX_BAD:
            self.end(Close.POLICY, "too many bad messages")

    def _reply(self, message: messages.WelcomeMessage | ErrorMessage) -> None:
        if not self.outbox.put("replies", message):
            self.end(Close.SILENT, "too much was left unread", within=0)


async def _send_or_reset(send: Send, message: MutableMapping[str, Any]) -> None:
    """Send; a server that has closed the connection already raises its own error."""
    try:
        await send(message)
    except RuntimeError as exc:
        raise ConnectionResetError("the server has closed this connection") from exc
