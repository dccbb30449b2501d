"""The stamps that a Redis server has sent: the fence of puts and invalidations.

Every change of an entry has a stamp, the next number of its bucket's counter (`lua.py`). A step
that must not act late says which stamp its sender has heard last. A number that is too low is
always safe, and costs a round trip: the server answers AGAIN, with the newest one. A number of
another server could be too high. So the numbers belong to one server, in one of its lives, and are
filled in when the connection is known over which a command is sent.
"""

import time
from collections.abc import Sequence
from enum import Enum
from struct import Struct
from typing import Any, Final

from msgspec import Struct as MsgspecStruct

from stillfresh.stores.redis.layout import Command, base_of, stamp_of

AGAIN: Final = -2
"""The first part of a reply: nothing was done, because the sender may be late."""
GOOD_FOR: Final = 30.0
"""Seconds after which a put no longer creates an entry. The trace of a deletion lives longer."""


FENCE: Final = Struct(">ddB")
"""Of a put: the last stamp that was heard, the server's microsecond until which the put may create
an entry, and whether the server drops keys."""


class Blank(Enum):
    """A part of a command that is filled in when the command is sent."""

    AS_OF = "the last stamp of the bucket that was heard"


class PutFence(MsgspecStruct):
    """The fence of a put, filled in when it is sent, and what follows it in the same argument."""

    tail: bytes
    acts_once: bool = False
    """Sent again, it does nothing if the entry has changed since it was first sent.

    For a put on a condition: others may have changed the entry after the first request was stored,
    so that the condition holds again.
    """
    first_as_of: int | None = None

    def note_sent(self, last_stamp: int) -> int:
        """Return the stamp that is sent now; `last_stamp`: the last one from the server."""
        if not self.acts_once:
            return last_stamp
        if self.first_as_of is None:
            self.first_as_of = last_stamp
        # Another server may count lower, and a stamp that is too low is safe.
        return min(last_stamp, self.first_as_of)


class StampedCommand(tuple[Any, ...]):
    """A call of a script that replies with a stamp of its bucket, or with a code and a stamp."""

    __slots__ = ()

    @property
    def base(self) -> bytes:
        """What the keys of the bucket begin with."""
        return base_of(self[3])


class ReadCommand(tuple[Any, ...]):
    """A command that reads the strings of ids, or how they begin."""

    __slots__ = ()

    @property
    def keys(self) -> Sequence[bytes]:
        if self[0] == "MGET":
            return self[1:]
        if self[0] == "GETRANGE":
            return self[1:2]
        return self[3 : 3 + self[2]]


class HeardStamps:
    """The last stamp of each bucket, and the time, of one server in one life."""

    def __init__(self, base_size: int) -> None:
        """`base_size`: so many bytes of a key name its bucket."""
        self._base_size = base_size
        self._stamps: dict[bytes, int] = {}
        self._clock_ahead: float | None = None
        """Seconds from this process's monotonic clock to the server's clock, at least."""

    def as_of(self, base: bytes) -> int:
        return self._stamps.get(base, 0)

    def note_stamp(self, base: bytes, stamp: int) -> None:
        if stamp > self._stamps.get(base, 0):
            self._stamps[base] = stamp

    def note_time(self, seconds: float) -> None:
        """The server's clock has shown this a moment ago."""
        self._clock_ahead = seconds - time.monotonic()

    def filled(self, command: Command, *, drops_keys: bool) -> Command:
        """The command as it is sent now."""
        if not isinstance(command, StampedCommand):
            return command
        parts = list(command)
        for at, part in enumerate(parts):
            if part is Blank.AS_OF:
                parts[at] = self.as_of(command.base)
            elif isinstance(part, PutFence):
                as_of = part.note_sent(self.as_of(command.base))
                parts[at] = FENCE.pack(as_of, self._good_until(), drops_keys) + part.tail
        return tuple(parts)

    def hear(self, command: Command, reply: Any) -> None:  # noqa: ANN401 (whatever the server says)
        """Note the stamps that a reply brings."""
        if isinstance(command, ReadCommand):
            texts = reply if isinstance(reply, list) else [reply]
            for key, text in zip(command.keys, texts, strict=False):
                if isinstance(text, bytes):
                    self.note_stamp(key[: self._base_size], stamp_of(text))
        elif isinstance(command, StampedCommand) and isinstance(reply, int):
            self.note_stamp(command.base, reply)
        elif isinstance(command, StampedCommand) and isinstance(reply, list) and len(reply) > 1:
            code, stamp = reply[:2]
            if code == AGAIN:
                # It may be lower than before, if the server has lost its counter.
                self._stamps[command.base] = stamp
                if len(reply) > 2:
                    self.note_time(reply[2] / 1e6)
            else:
                self.note_stamp(command.base, stamp)

    def _good_until(self) -> float:
        if self._clock_ahead is None:
            return 0.0  # the server says its time with the answer
        return (time.monotonic() + self._clock_ahead + GOOD_FOR) * 1e6
