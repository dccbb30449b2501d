"""What waits to be sent to one viewer: bounded, whatever the viewer does (G3).

Answers in their order, of an application's notices the newest of each, of the figures the last, and
the hub's news, of which the connection keeps the newest of each id.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from stillfresh.coordinator import Connection, HubUpdate
from stillfresh.web.frames import Frames, batched
from stillfresh.web.messages import Error, Notice, Ping, Pong, Welcome, encode

MOST_BEATS: Final = 100
"""Pings and pongs; beyond, the oldest are forgotten: who asks without reading."""
MOST_REPLIES: Final = 1_000
"""Welcomes and errors; beyond, the connection has missed something."""
MOST_NOTICES: Final = 100
"""Of an application, to one connection; beyond, the connection has missed something."""
AT_ONCE: Final = 100
"""News taken for one frame; what comes meanwhile replaces what still waits."""


class Outbox:
    """Filled by whoever has something to say, emptied by the one who sends."""

    def __init__(self, frames: Frames) -> None:
        self.wake = asyncio.Event()
        self.is_ending = False
        """Only answers are sent any more."""
        self._frames = frames
        self._replies: list[str] = []
        self._beats: deque[str] = deque(maxlen=MOST_BEATS)
        self._notices: dict[tuple[str, str], str] = {}
        self._figures: str | None = None

    def beat(self, message: Ping | Pong) -> None:
        self._beats.append(encode(message).decode())
        self.wake.set()

    def reply(self, message: Welcome | Error) -> bool:
        """False if too many wait already, of which none may be lost."""
        if len(self._replies) >= MOST_REPLIES:
            return False
        self._replies.append(encode(message).decode())
        self.wake.set()
        return True

    def notify(self, notice: Notice) -> bool:
        """False if too many wait already: this one is lost, and the viewer must look anew."""
        key = (type(notice).__name__, getattr(notice, "game_id", ""))
        self._notices.pop(key, None)
        if len(self._notices) >= MOST_NOTICES:
            return False
        self._notices[key] = encode(notice).decode()
        self.wake.set()
        return True

    def forget_notices(self) -> None:
        """The viewer is somebody else now: the notices were for the viewer before."""
        self._notices.clear()

    def show_figures(self, text: str) -> None:
        self._figures = text
        self.wake.set()

    def take(self, connection: Connection, now: float, *, together: bool) -> Iterator[str]:
        """What there is to send, frame by frame; news never hold up an answer, or the end."""
        yield from self._answers(together=together)
        while connection.is_open and not self.is_ending and (news := connection.take(AT_ONCE)):
            shared, own = connection.apart(news)
            yield from self._news(shared, now, together=together)
            yield from self._news(own, now, together=together, of=connection)

    def _news(
        self,
        news: Sequence[HubUpdate],
        now: float,
        *,
        together: bool,
        of: Connection | None = None,
    ) -> Iterator[str]:
        """G12: private news, which are `of` one connection, are dropped once that is closed:
        the viewer has become somebody else, and has another one."""
        for frame in self._frames.of(news, now, together=together) if news else ():
            if self.is_ending or (of is not None and not of.is_open):
                return
            yield frame
            yield from self._answers(together=together)

    def _answers(self, *, together: bool) -> Iterator[str]:
        """What is not news, until none is left."""
        while self._replies or self._beats or self._notices or self._figures is not None:
            yield from batched(self._others(), together=together)

    def _others(self) -> Iterator[str]:
        """G12: a notice waits here until its turn, so that it can still be dropped."""
        taken = [*self._replies, *self._beats]
        self._replies.clear()
        self._beats.clear()
        yield from taken
        while self._notices:
            yield self._notices.pop(next(iter(self._notices)))
        if self._figures is not None:
            figures, self._figures = self._figures, None
            yield figures
