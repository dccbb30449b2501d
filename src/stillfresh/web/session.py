"""One viewer on `WS /v1/live`: what is heard is done, what is new is sent (G3).

Two tasks: the server's own sends, one more listens. Nothing here decides what is allowed
(`rules_live.py`) or what is a message (`messages.py`).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from starlette.types import Message, Receive, Scope, Send

from stillfresh.clock import Clock
from stillfresh.coordinator import Hub
from stillfresh.errors import NotOpen
from stillfresh.web.frames import Frames
from stillfresh.web.messages import (
    ClientMessage,
    Error,
    Ping,
    Pong,
    Refused,
    Route,
    SignIn,
    SignOut,
    Stats,
    Subscribe,
    Unsubscribe,
    Visible,
    Welcome,
    items_of,
    read,
)
from stillfresh.web.outbox import Outbox
from stillfresh.web.rules_live import Close, Limits, Pace, Pulse, pulse
from stillfresh.web.standing import Checked, SignInFailed, SignInUnavailable, Standing, ViewerOf
from stillfresh.web.viewing import Viewing

CLOSING = 3.0
"""Seconds that saying goodbye may take."""
WAITED: Final = 0.01
"""Seconds: sending took longer, so the viewer reads."""
IN_A_TURN: Final = 50
"""Frames to one viewer, after which it is the others' turn: sending need not wait for anything."""

logger = logging.getLogger(__name__)


class Moved(Protocol):
    """Told when a session has another viewer."""

    def __call__(self, session: "Session", before: str | None, now: str | None, /) -> None: ...


@dataclass(frozen=True, slots=True)
class House:
    """What all sessions share."""

    hub: Hub
    own_kinds: tuple[str, ...]
    """Kinds whose views differ by viewer."""
    frames: Frames
    limits: Limits
    clock: Clock
    viewer_of: ViewerOf
    is_operator: Callable[[Scope, str | None], bool]
    moved: Moved
    figures: Callable[["Session"], None]
    """This session wants to see the operator's figures."""


class Session:
    """One connection, from its acceptance to its end."""

    def __init__(self, house: House, scope: Scope, *, together: bool) -> None:
        self._house = house
        self._scope = scope
        self._together = together
        self.outbox = Outbox(house.frames)
        self.viewing = Viewing(house.hub, house.limits, self.outbox.wake.set, self._complain)
        self.standing = Standing(house.viewer_of, house.limits, house.clock)
        self._bad = 0
        now = house.clock()
        self._pace = Pace(house.limits, now)
        self._heard_at = now
        self._asked_at: float | None = None
        self._sending_since: float | None = None
        self._ends: tuple[Close, str] | None = None
        self._is_gone = False
        self._patience = asyncio.timeout(None)
        self._is_sending = False

    @property
    def viewer_id(self) -> str | None:
        return self.viewing.connection.viewer_id

    async def run(self, receive: Receive, send: Send) -> None:
        """Until either side has had enough."""
        self._welcome()
        listening = asyncio.create_task(self._listen(receive))
        try:
            async with self._patience:
                self._is_sending = True
                await self._send_all(send)
        except (TimeoutError, OSError):  # it does not read, or has gone
            pass
        finally:
            self._is_sending = False
            listening.cancel()
            self.standing.sign_out()
            self.viewing.connection.close()
            self._house.moved(self, self.viewer_id, None)
            await asyncio.gather(listening, return_exceptions=True)
        await self._say_goodbye(send)

    def end(self, code: Close, reason: str, *, within: float | None = None) -> None:
        """Answers that wait are still sent, if the viewer reads them `within` so many seconds."""
        if self._ends is None:
            self._ends = code, reason
            self.outbox.is_ending = True
            self.outbox.wake.set()
        if within is not None and self._is_sending and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time() + within)

    def check_pulse(self, now: float) -> None:
        """Ask a silent viewer whether it is there; let go of one that is not."""
        match pulse(self._heard_at, self._asked_at, self._sending_since, self._house.limits, now):
            case Pulse.ASK:
                self._asked_at = now
                self.outbox.beat(Ping())
            case Pulse.GONE:
                self.end(Close.SILENT, "nothing was heard, or read, for too long", within=0)
            case Pulse.FINE:
                pass

    async def check_token(self) -> bool:
        """G12: a revoked token makes the viewer a guest. False: nobody could say whose it is."""
        found = await self.standing.check()
        if found is Checked.REVOKED:
            why = "your sign-in is not valid any more; sign in again"
            self._become_guest(Error("signed_out", why))
        return found is not Checked.UNKNOWN

    def check_standing(self, now: float) -> None:
        """G12: an outage of the identity service is bridged for a while, and no longer."""
        if self.standing.has_lapsed(now):
            minutes = self._house.limits.unconfirmed_for / 60
            why = f"your sign-in could not be confirmed for {minutes:g} minutes; sign in again"
            self._become_guest(Error("sign_in_unavailable", why))

    def _become_guest(self, why: Error) -> None:
        """Not asked for by the viewer, so it is told why."""
        self._complain(why, is_bad=False)
        try:
            self._become(None)
        except NotOpen:  # the cache closes, and this connection with it
            self.end(Close.RESTART, "the service restarts")

    async def _send_all(self, send: Send) -> None:
        outbox = self.outbox
        while not self._is_gone:
            await outbox.wake.wait()
            outbox.wake.clear()
            self._sending_since = now = self._house.clock()
            frames = outbox.take(self.viewing.connection, now, together=self._together)
            for count, frame in enumerate(frames, start=1):
                await self._send_text(send, frame)
                if count % IN_A_TURN == 0:
                    await asyncio.sleep(0)
            if not self.viewing.connection.is_open:
                self.end(Close.RESTART, "the service restarts")
            if self._ends is not None:
                return
            self._sending_since = None

    async def _send_text(self, send: Send, text: str) -> None:
        """One that had to wait for room, and found it, has been read: a sign of life."""
        begin = self._sending_since = self._house.clock()
        await _sent(send, {"type": "websocket.send", "text": text})
        now = self._sending_since = self._house.clock()
        if now - begin >= WAITED:
            self._heard_at = now

    async def _say_goodbye(self, send: Send) -> None:
        if self._is_gone or self._ends is None:
            return
        code, reason = self._ends
        try:
            async with asyncio.timeout(CLOSING):
                await _sent(send, {"type": "websocket.close", "code": int(code), "reason": reason})
        except (TimeoutError, OSError):  # it has gone already
            pass

    async def _listen(self, receive: Receive) -> None:
        try:
            while self._ends is None:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    self._is_gone = True
                    self.outbox.wake.set()
                    return
                self._heard_at = self._house.clock()
                await self._hear(message)
        except NotOpen:  # the cache closes, and this connection with it
            self.end(Close.RESTART, "the service restarts")
        except Exception:
            logger.exception("a live connection broke")
            self.end(Close.BROKEN, "a mistake of ours")

    async def _hear(self, message: Message) -> None:
        text = message.get("text")
        if _size(text or message.get("bytes") or b"") > self._house.limits.max_message:
            self.end(
                Close.TOO_BIG, f"a message has at most {self._house.limits.max_message:,} bytes"
            )
            return
        try:
            heard = read(text)
        except Refused as exc:
            self._spend(0)
            self._refuse(exc)
            return
        if self._spend(items_of(heard)):
            for it in heard:
                if self._ends is None:
                    await self._do(it)

    def _spend(self, items: int) -> bool:
        if self._pace.spend(items, self._heard_at):
            return True
        self._complain(Error("flood", "too many messages; slow down"), is_bad=False)
        self.end(Close.POLICY, "too many messages")
        return False

    def _refuse(self, why: Refused) -> None:
        self._complain(Error("bad_message", str(why)), is_bad=True)

    async def _do(self, message: ClientMessage | Refused) -> None:
        match message:
            case Refused():
                self._refuse(message)
            case Subscribe() | Unsubscribe() | Visible() | Route():
                await self._look(message)
            case SignIn(token):
                await self._sign_in(token)
            case SignOut():
                self._become(None)
            case Stats(token):
                self._show_figures(token)
            case Ping():
                self.outbox.beat(Pong())
            case Pong():
                pass

    async def _look(self, message: Subscribe | Unsubscribe | Visible | Route) -> None:
        if isinstance(message, Subscribe):
            message = Subscribe(await self._allowed(message.items))
        await self.viewing.look(message)

    async def _allowed(self, items: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Any, ...], ...]:
        """G12: nothing private is subscribed unless the token was confirmed just now."""
        own = [it for it in items if it[0] in self._house.own_kinds]
        if not own or self.viewer_id is None or await self.check_token():
            return items
        why = "your sign-in could not be confirmed just now; try again later"
        refused = tuple((kind, id_) for kind, id_, *_ in own)
        self._complain(Error("sign_in_unavailable", why, items=refused), is_bad=False)
        return tuple(it for it in items if it[0] not in self._house.own_kinds)

    async def _sign_in(self, token: str) -> None:
        try:
            viewer_id = await self.standing.sign_in(token)
        except SignInUnavailable as exc:
            self._complain(Error("sign_in_unavailable", str(exc)), is_bad=False)
            return
        except SignInFailed as exc:
            self._complain(Error("sign_in_failed", str(exc)), is_bad=False)
            return
        if viewer_id is None:
            unknown = Error("sign_in_failed", "nobody is known by this token")
            self._complain(unknown, is_bad=True)
        else:
            self._become(viewer_id)

    def _become(self, viewer_id: str | None) -> None:
        before = self.viewer_id
        if viewer_id is None:
            self.standing.sign_out()
        if viewer_id != before:
            self.outbox.forget_notices()
        self.viewing.become(viewer_id)
        self._house.moved(self, before, viewer_id)
        self._welcome()

    def _show_figures(self, token: str | None) -> None:
        if self._house.is_operator(self._scope, token):
            self._house.figures(self)
        else:
            forbidden = Error("forbidden", "the figures are for the operator")
            self._complain(forbidden, is_bad=True)

    def _welcome(self) -> None:
        limits, hub = self._house.limits, self._house.hub
        most = min(limits.max_subscriptions, hub.max_subscriptions)
        own = self._house.own_kinds
        self._reply(Welcome(self.viewer_id, hub.kinds, own, limits.heartbeat, most))

    def _reply(self, message: Welcome | Error) -> None:
        if not self.outbox.reply(message):
            self.end(Close.SILENT, "too much was left unread", within=0)

    def _complain(self, error: Error, *, is_bad: bool) -> None:
        """A mistake of the viewer's (`is_bad`): so many are forgiven."""
        self._reply(error)
        self._bad += is_bad
        if self._bad >= self._house.limits.max_bad:
            self.end(Close.POLICY, "too many bad messages")


def _size(message: str | bytes) -> int:
    """Bytes."""
    if isinstance(message, bytes) or message.isascii():
        return len(message)
    return len(message.encode(errors="surrogatepass"))


async def _sent(send: Send, message: Message) -> None:
    """A server that has closed by itself, before we heard of it, says so in its own way."""
    try:
        await send(message)
    except RuntimeError as exc:
        raise ConnectionResetError("the server has closed this connection") from exc
