"""What this process knows of one key.

A cache holds many entries, so the garbage collector does not look at them (`gc=False`). That is
safe only because an entry never leads to a task or a traceback: those could lead back to it, and
nothing would free the circle. So what is under way for a key is its `Work`, in a dict of its own,
and an error is kept as the `Failure` that the store has, not as an exception. A value that leads
back to its cache (only an own `codec=` can make one) keeps both until the cache is closed.

A hit reads three fields and writes none, but for `is_used` after each round of the eviction: to
write to a struct costs more than to read it.
"""

from collections.abc import Hashable, Sequence
from typing import Final, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from stillfresh.engine.model import Answer
from stillfresh.stores.contract import Copy, Failure

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NEVER: Final = float("-inf")
NOTHING_HEARD: Final = -1


class EntryTrouble(Struct, frozen=True, gc=False):
    """What went wrong with an entry's last refresh or publication; most entries share one."""

    old_until: float = NEVER
    """It is not FRESH, and memory gives it all the same until then: during a cooldown or outage."""
    failure: Failure | None = None
    """Why its last refresh failed."""
    unstored_over: str | None = None
    """The generation that the store still had when it could not store this copy."""
    is_of_unverified_parts: bool = False
    """It was made of copies that their store could not confirm, so it was not to be stored."""

    @property
    def is_unstored(self) -> bool:
        """True if memory has the copy, and the store does not."""
        return self.unstored_over is not None or self.is_of_unverified_parts

    def for_new_answer(self) -> "EntryTrouble":
        """What stays true of the same copy when its answer is made anew."""
        if not self.is_unstored:
            return NO_TROUBLE
        return replace(self, old_until=NEVER, failure=None)


NO_TROUBLE: Final = EntryTrouble()


class Entry(Struct, Generic[K, V], eq=False, gc=False):
    """The facts that memory holds of one key."""

    key: K
    copy: Copy
    answer: Answer[V]
    """Made once, without an error; given as it is while `now < until`."""
    until: float = NEVER
    """It is FRESH, and memory gives it without asking the store, until then."""
    stands: float = NEVER
    """It is FRESH until then, if the store still has this copy."""
    heard: int = NOTHING_HEARD
    """How many announcements had been heard when the store was asked; NOTHING_HEARD if it did not
    confirm the copy, or has announced a change since then."""
    vouched: float = NEVER
    """`memory_for` vouches for the copy until then."""
    trouble: EntryTrouble = NO_TROUBLE
    tags: Sequence[str | None] = ()
    size: int = 0
    """The bytes that it counts."""
    edition: int = 0
    """Changes whenever the answer changes or is removed."""
    is_used: bool = False
    """It was read since the eviction last looked at it."""

    def note_change(self) -> None:
        """Another process has changed it: what the store says counts, even if it has nothing."""
        self.stop_answering()
        self.vouched = NEVER
        self.heard = NOTHING_HEARD
        if self.trouble.is_of_unverified_parts:
            self.trouble = replace(self.trouble, is_of_unverified_parts=False)

    def stop_answering(self) -> None:
        """Memory gives no answer from now on without asking the store."""
        self.until = NEVER
        if self.trouble.old_until != NEVER:
            self.trouble = replace(self.trouble, old_until=NEVER)
