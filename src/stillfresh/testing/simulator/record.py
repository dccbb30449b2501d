"""What happened in a simulation, for a picture: messages, leases, loads, reads, and what broke.

A world without a recorder records nothing. The recorder only listens: it draws no dice and
schedules nothing, so a run with one is the same run. It keeps so many items and no more.
"""

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from stillfresh.clock import Clock

MOST: Final = 5_000
"""Items of each sort; later ones are only counted."""
STORE: Final = 0
"""The store's lane. Processes have their numbers."""
UPSTREAM: Final = -1
WORLD_LANE: Final = -2
"""What concerns everybody."""


class Message(Struct):
    """A message from one lane to another."""

    origin: int
    target: int
    sent: float
    arrived: float | None
    """None: it was lost."""
    text: str
    mark: str = ""
    """`late`: its sender had given up. `twice`: it arrives a second time. `lost`."""


class LaneSpan(Struct):
    """Something that lasted, in one lane: a lease or a load."""

    lane: int
    what: str
    begun: float
    ended: float | None
    text: str
    lease: str = ""
    ending: str = ""
    """How a lease ended: `published`, `voided`, `released`; empty: by its time."""


class Moment(Struct):
    """Something that happened at once."""

    lane: int
    what: str
    """`read`, `change`, `invalidated`, `law`, `broken` or `fault`."""
    at: float
    text: str
    verdict: str = ""
    is_right: bool = True


class RunRecorder:
    """Collects what happens, with the world's times."""

    def __init__(self) -> None:
        self.time: Clock = lambda: 0.0
        self.messages: list[Message] = []
        self.spans: list[LaneSpan] = []
        self.moments: list[Moment] = []
        self.left_out = 0

    def sent(
        self, origin: int, target: int, text: str, takes: float | None, mark: str = ""
    ) -> None:
        """A message is on its way; `takes`: the seconds until it arrives, or None."""
        now = self.time()
        arrived = None if takes is None else now + takes
        message = Message(origin, target, now, arrived, text, mark)
        self._keep(self.messages.append, len(self.messages), message)

    def begun(
        self, lane: int, what: str, text: str, lease: str = "", until: float | None = None
    ) -> LaneSpan:
        """Something begins; `until`: when it ends unless something ends it earlier."""
        span = LaneSpan(lane, what, self.time(), until, text, lease)
        self._keep(self.spans.append, len(self.spans), span)
        return span

    def lease_ended(self, lease: str, how: str) -> None:
        """The lease of this name ends now, if it has not ended yet."""
        now = self.time()
        for span in reversed(self.spans):
            if span.lease == lease and not span.ending:
                if span.ended is None or span.ended > now:
                    span.ended = now
                    span.ending = how
                return

    def happened(
        self, lane: int, what: str, text: str, verdict: str = "", *, is_right: bool = True
    ) -> None:
        moment = Moment(lane, what, self.time(), text, verdict, is_right)
        self._keep(self.moments.append, len(self.moments), moment)

    def _keep(self, keep: Callable[..., None], count: int, item: Struct) -> None:
        if count < MOST:
            keep(item)
        else:
            self.left_out += 1
