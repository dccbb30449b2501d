"""The tables of a load: its states, and which callers get its result.

`NEXT` has the states of a load, `ENDINGS` has the meaning of each end. docs/engine.md draws both
from here. `load.py` uses the first and `work.py` the second. Nothing but tables and what they
decide may live here.
"""

from collections.abc import Collection, Hashable
from enum import IntEnum, StrEnum
from typing import Final, Generic, NamedTuple, TypeVar

from msgspec import Struct

W = TypeVar("W", bound=Hashable)

MAX_ROUNDS: Final = 2
"""How often in a row a load that lost its lease is repeated if no caller waits."""


class LoadState(StrEnum):
    """The state of a load."""

    QUEUED = "queued"
    ASKING = "asking"
    """The store is asked for the lease."""
    HELD = "held"
    """Another process has the lease, or an earlier load of this one."""
    LOOKING = "looking"
    """The store is asked what that process has done."""
    LOADING = "loading"
    """The loader runs: with a lease, or without one because the store is unavailable."""
    PUBLISHING = "publishing"
    """The copy is on its way to the store."""
    ENDED = "ended"


class LoadEvent(StrEnum):
    """What happens to a load."""

    BEGIN = "its turn comes"
    GRANT = "the lease is granted, or the store is unavailable"
    DENY = "another process has the lease"
    LOOK = "the pause is over"
    WAIT = "that process is still loading"
    SEND = "the loader has answered"
    LEAVE = "nobody waits any more"
    END = "the outcome is known"


QUEUED, ASKING, HELD, LOOKING, LOADING, PUBLISHING, ENDED = LoadState

NEXT: Final[dict[LoadState, dict[LoadEvent, LoadState]]] = {
    QUEUED: {LoadEvent.BEGIN: ASKING, LoadEvent.LEAVE: ENDED},
    ASKING: {LoadEvent.GRANT: LOADING, LoadEvent.DENY: HELD, LoadEvent.END: ENDED},
    HELD: {LoadEvent.LOOK: LOOKING, LoadEvent.LEAVE: ENDED, LoadEvent.END: ENDED},
    LOOKING: {LoadEvent.WAIT: HELD, LoadEvent.END: ENDED},
    LOADING: {LoadEvent.SEND: PUBLISHING, LoadEvent.END: ENDED},
    PUBLISHING: {LoadEvent.END: ENDED},
    ENDED: {},
}
"""From state and event to state. An event that is not listed cannot happen. Closing the cache ends
every load, whatever its state."""


class Told(IntEnum):
    """Which callers get the result, by when they asked. Others wait for the next load.

    A caller may know of a change that came before it asked.
    """

    NOBODY = 0
    EARLY = 1
    """Those that asked before the load began: whose number is at most that of its beginning. The
    fence advances then, so callers that join later have a greater one. A load that follows another
    process begins anew each time it looks what that process has done."""
    IN_TIME = 2
    """Those that asked before its copy was sent to the store."""
    ALL = 3


class End(StrEnum):
    """How the load of one key ended."""

    LOADED = "loaded"
    SUPERSEDED = "loaded, and the lease was lost"
    FAILED = "failed"
    FOUND = "another process has published"
    FOUND_STALE = "another process has published, and it is stale by now"
    COOLING = "another process has failed"
    GIVEN_UP = "nothing was found that may be served"


class Again(IntEnum):
    """Whether another load of the key follows. It always does if callers still wait."""

    IF_WAITED = 0
    AS_WANTED = 1
    """Also if this load was a background refresh."""
    LIMITED = 2
    """At most `MAX_ROUNDS` times: a loader slower than its lease would be called for ever."""
    ALWAYS = 3


class EndRule(NamedTuple):
    """The meaning of an end."""

    told: Told
    again: Again = Again.IF_WAITED
    is_overtaken: bool = False
    """The value may be out of date: callers get it as STALE, and memory does not keep it."""


LOADED, SUPERSEDED, FAILED, FOUND, FOUND_STALE, COOLING, GIVEN_UP = End
IF_WAITED, AS_WANTED, LIMITED, ALWAYS = Again
NOBODY, EARLY, IN_TIME, ALL = Told

ENDINGS: Final[dict[tuple[End, bool], EndRule]] = {
    (LOADED, False): EndRule(IN_TIME),
    (LOADED, True): EndRule(EARLY, ALWAYS, is_overtaken=True),
    (SUPERSEDED, False): EndRule(EARLY, LIMITED, is_overtaken=True),
    (SUPERSEDED, True): EndRule(EARLY, ALWAYS, is_overtaken=True),
    (FAILED, False): EndRule(IN_TIME),
    (FAILED, True): EndRule(EARLY),
    (FOUND, False): EndRule(EARLY),
    (FOUND, True): EndRule(EARLY, AS_WANTED, is_overtaken=True),
    (FOUND_STALE, False): EndRule(EARLY, ALWAYS),
    (FOUND_STALE, True): EndRule(EARLY, ALWAYS, is_overtaken=True),
    (COOLING, False): EndRule(ALL),
    (COOLING, True): EndRule(ALL),
    (GIVEN_UP, False): EndRule(NOBODY, AS_WANTED),
    (GIVEN_UP, True): EndRule(NOBODY, AS_WANTED),
}
"""By how a load ended, and by whether this process changed the key since it began."""


class Ended(Struct, Generic[W]):
    """The end of a work: callers that get the result, and callers that wait for the next load."""

    told: Collection[W]
    left: Collection[W]
    again: bool
    is_overtaken: bool
