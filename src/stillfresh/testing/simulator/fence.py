"""The fence of stamps: no message acts after a change that came after it was sent.

Each change of an entry takes a stamp, the next number of the counter of its bucket. A message says
the highest stamp that its sender had heard from that bucket (`as_of`). If the entry has changed
since then, the message may be late: it does nothing, and its sender must ask again.

Where there is no entry, there is no stamp to compare with. So a deletion leaves a trace for a
minute, and a put without an entry must be younger than that (`good_until`), and sent after the
counter began.

An entry also changes by its age: a copy that has refused an `add` is fresh no longer. So an `add`
that was sent while the copy was fresh may have been refused already, and must be sent again.

This is what Redis decides in Lua and PostgreSQL in SQL. Pure: numbers in, a decision out.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from stillfresh.stores.contract import ACTS_ONCE, Copy, Put, PutOutcome, When
from stillfresh.stores.rules import has_ended_since

REPLACED_IDS: Final = 4
"""Generations that an entry remembers after they were replaced."""
TRACE: Final = 60.0
"""Seconds for which an entry without a copy keeps its stamp, by the server's clock."""
GOOD_FOR: Final = 30.0
"""Seconds after its sending in which a put is accepted where there is no entry."""


class StampedEntry(Struct, frozen=True):
    """What the fence knows of an entry."""

    changed: int
    """The stamp of its last change."""
    replaced: tuple[str, ...] = ()
    """The generations that were replaced last, the newest first."""
    kept_until: float = 0.0
    """When it may be forgotten if it has no copy."""


class Bucket(Struct, frozen=True):
    """The counter of a server, or of one slot of a cluster."""

    counter: int
    birth: int
    """Its first number: the server's time, so that it is higher than any number before a loss."""
    tags: Mapping[str, int] = {}
    """The stamp of the last invalidation of each tag."""


class Sent(Struct, frozen=True):
    """What a message says about the time at which it was sent."""

    as_of: Mapping[str, int]
    """By bucket: the highest stamp that its sender had heard."""
    good_until: float
    """By the server's clock, as its sender had heard it."""
    first_as_of: Mapping[str, int] | None = None
    """What it said when it was first sent, if it is sent again."""

    def stamp(self, bucket: str, when: When = When.ALWAYS) -> int:
        """Return the stamp by which a message counts as late.

        What the sender has heard since it first sent a put on a condition must not let it act: the
        first request may have been stored, and changes since then may let the condition hold again.
        """
        stamp = self.as_of.get(bucket, 0)
        if self.first_as_of is None or when not in ACTS_ONCE:
            return stamp
        return min(stamp, self.first_as_of.get(bucket, 0))


def put_outcome(
    generation: str, stored: str | None, head: StampedEntry | None, *, is_late: bool
) -> PutOutcome | None:
    """Return what a put is told before its condition and its version are looked at; None: go on."""
    if generation == stored:
        return PutOutcome.STORED
    if head is not None and generation in head.replaced:
        return PutOutcome.REPLACED
    return PutOutcome.AGAIN if is_late else None


def has_changed(head: StampedEntry | None, as_of: int) -> bool:
    """Return True if the entry has changed since the message was sent, perhaps."""
    return head is not None and head.changed > as_of


def is_forgotten(
    head: StampedEntry | None, bucket: Bucket, as_of: int, sent: Sent, now: float
) -> bool:
    """Return True if a change since the sending may have left no trace."""
    if head is not None:
        return False
    return as_of < bucket.birth or sent.good_until < now


def may_be_refused_already(put: Put, stored: Copy | None, took: float, now: float) -> bool:
    """Return True if the put's condition holds by now, and did not when it was sent.

    `took`: seconds for which it was on its way, or more. `now`: by the clock that judges copies.
    """
    return put.when is When.NO_LIVE_COPY and has_ended_since(stored, now - took, now)


def was_tag_invalidated(bucket: Bucket, tags: Iterable[str], as_of: int) -> bool:
    """Return True if one of the tags was invalidated since the message was sent, perhaps."""
    return any(bucket.tags.get(tag, 0) > as_of for tag in tags)


def after_change(
    head: StampedEntry | None, stamp: int, old: str | None, now: float
) -> StampedEntry:
    """Return the head after a change, which replaced the generation `old`, if it replaced one."""
    replaced = () if head is None else head.replaced
    if old is not None:
        replaced = (old, *replaced)
    return StampedEntry(stamp, replaced[:REPLACED_IDS], now + TRACE)
