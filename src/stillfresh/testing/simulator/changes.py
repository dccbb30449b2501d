"""The judge of puts, invalidations and deletions: which call changed which entry, when.

A call of a caller begins, acts in the store, perhaps more than once, and ends: acknowledged, or
given up. Its messages may still be on their way then. The judge knows nothing of stamps. It looks
at the copies before and after each step of the store, and checks for each act:

- A call that was acknowledged and has acted acts no more. One that was given up acts only if
  nothing else has happened to the entry since it ended. One that was refused never acts; except a
  `touch` of a copy from the future, which is not live yet and has the same value afterwards.
- A put that is acknowledged as stored has acted; if it acted twice, more than four other changes
  came between, or a deletion. Its condition held when it acted.
- No smaller version replaces a greater one, and only a deletion or a load takes a version away.

Begin, act and end have positions in one order, because several may happen at the same time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from stillfresh.stores.contract import UNREAD, Copy, Mark, Put, PutOutcome, PutResult, When
from stillfresh.stores.rules import is_live
from stillfresh.testing.simulator.promises import Promise

Key: TypeAlias = tuple[str, str]

MOST_BETWEEN: Final = 4
"""Other changes after which a put whose answer was lost is still recognised."""


@dataclass(slots=True, eq=False)
class ChangeCall:
    """One call of a caller that changes entries."""

    process: int
    what: str
    began: int
    ended: int | None = None
    is_acknowledged: bool = False
    is_lost: bool = False
    """A failover without confirmed changes has undone a part of it."""

    def __str__(self) -> str:
        return f"{self.what} of process {self.process}"


CALL: ContextVar[ChangeCall | None] = ContextVar("CALL", default=None)
"""The caller's call, for the steps of the store that it causes."""


class Act(NamedTuple):
    """A change of an entry, or the invalidation of a tag, that the store has done."""

    position: int
    what: str
    call: ChangeCall | None
    """None for a load, or for a server that has lost everything."""
    version: bytes = b""
    """Of the copy afterwards."""


class ChangeJudge:
    """Every change of every entry in a run. `broken` is called with each broken promise."""

    def __init__(self, broken: Callable[[Promise, str], None]) -> None:
        self._broken = broken
        self._position = 0
        self._acts: defaultdict[Key, list[Act]] = defaultdict(list)
        self._open: dict[ChangeCall, None] = {}
        self._refused: set[tuple[ChangeCall, Key]] = set()
        """Puts whose callers were told that a condition does not hold."""
        self._lost_at = -1
        """When acknowledged changes were last lost, as they may be without replicas."""

    def begin(self, process: int, what: str) -> ChangeCall:
        """A caller begins a call."""
        call = ChangeCall(process, what, self._next())
        self._open[call] = None
        return call

    def end(self, call: ChangeCall, *, acknowledged: bool) -> None:
        """The caller has its answer, or has given up."""
        self._open.pop(call, None)
        if call.ended is None:
            call.ended = self._next()
            call.is_acknowledged = acknowledged

    def killed(self, process: int) -> None:
        """All its calls are given up."""
        for call in [call for call in self._open if call.process == process]:
            self.end(call, acknowledged=False)

    def put(
        self, call: ChangeCall, key: Key, put: Put, *, before: Copy | None, after: Copy, now: float
    ) -> None:
        """A put was stored. `now`: the store's clock in that step."""
        self._check_time(call, key, "put", (put.tags or ()) + (put.late or ()))
        if put.when is not When.LIVE_COPY:
            self._check_refused(call, key)
        if before is not None:  # without a copy it was deleted or evicted, and is not remembered
            self._check_once(call, key)
        self._check_condition(put, key, before, after, now)
        given = put.copy.version
        old = b"" if before is None else before.version
        if after.version != (given or old) or after.version < old:
            self._break(Promise.GREATEST, key, f"version {old!r} became {after.version!r}")
        self._act(key, "put", call, after.version)

    def voided(
        self, call: ChangeCall, what: str, key: Key, before: Copy | None, after: Copy | None
    ) -> None:
        """An invalidation or a deletion was done. What changed no copy is late for nobody."""
        if before != after:
            self._check_time(call, key, what, ())
        if after is not None and (before is None or after.version != before.version):
            self._break(Promise.GREATEST, key, f"{what} changed its version")
        self._act(key, what, call, b"" if after is None else after.version)

    def tag_invalidated(self, call: ChangeCall, tag: str, bucket: str) -> None:
        """A tag was invalidated: puts with it that have ended may not act in this bucket."""
        self._act(self.tag_key(tag, bucket), "invalidate_tag", call, b"")

    def published(self, key: Key, before: Copy | None, after: Copy, given: bytes) -> None:
        """A load was published."""
        old = b"" if before is None else before.version
        if after.version != (given or old):
            self._break(Promise.GREATEST, key, f"a load changed {old!r} to {after.version!r}")
        self._act(key, "publish", None, after.version)

    def lost(self) -> None:
        """The server has lost everything."""
        self._lost_at = self._next()
        for call in self._open:
            call.is_lost = True
        for key in self._acts:
            self._act(key, "loss", None, b"")

    def settled(self, call: ChangeCall, key: Key, given: bytes, result: PutResult) -> None:
        """The caller of a put was told this. An update may be told more than once."""
        self._refused.discard((call, key))
        if call.is_lost or self._lost_at > call.began:
            return
        acts = self._acts[key]
        match result.outcome:
            case PutOutcome.STORED | PutOutcome.REPLACED:
                if not self._has_acted(call, key):
                    self._break(Promise.STORED, key, f"{call} is acknowledged and was not stored")
            case PutOutcome.REFUSED:
                self._refused.add((call, key))
            case PutOutcome.KEPT:
                before = [act for act in acts if act.position < call.began][-1:]
                during = [act for act in acts if act.position > call.began]
                if all(act.version <= given for act in before + during):
                    self._break(Promise.GREATEST, key, f"{call} was refused by a smaller version")

    def tag_key(self, tag: str, bucket: str) -> Key:
        """Return the key under which invalidations of a tag are noted."""
        return f"#{tag}", bucket

    def count(self, key: Key) -> int:
        """Return how much has happened to a key."""
        return len(self._acts[key])

    def restore(self, key: Key, count: int, *, waits: bool) -> None:
        """A failover has undone later changes. `waits`: none of them may be acknowledged."""
        undone = self._acts[key][count:]
        del self._acts[key][count:]
        for call in [act.call for act in undone if act.call is not None]:
            if not waits:
                call.is_lost = True
                self._lost_at = self._next()
            elif call.is_acknowledged and not self._has_acted(call, key):
                self._break(Promise.STORED, key, f"a failover undid {call}, which is acknowledged")

    def _check_time(self, call: ChangeCall, key: Key, what: str, tags: Iterable[str]) -> None:
        if call.ended is None:
            return
        acts = list(self._acts[key])
        if call.is_acknowledged and self._has_acted(call, key):
            self._break(Promise.LATE, key, f"{call} is acknowledged, and its {what} acts again")
        for tag in tags:
            acts += self._acts[self.tag_key(tag, "")] + self._acts[self.tag_key(tag, key[1])]
        for act in acts:
            if act.position > call.ended and act.call is not call:
                by = act.what if act.call is None else str(act.call)
                self._break(
                    Promise.LATE, key, f"{call} was given up, and its {what} acts after {by}"
                )

    def _check_refused(self, call: ChangeCall, key: Key) -> None:
        is_over = call.is_acknowledged and self._lost_at < call.began
        if is_over and (call, key) in self._refused:
            self._break(Promise.LATE, key, f"{call} was refused, and its put acts")

    def _has_acted(self, call: ChangeCall, key: Key) -> bool:
        return any(act.call is call for act in self._acts[key])

    def _check_once(self, call: ChangeCall, key: Key) -> None:
        acts = self._acts[key]
        own = [number for number, act in enumerate(acts) if act.call is call and act.what == "put"]
        if not own:
            return
        between = acts[own[-1] + 1 :]
        is_forgotten = any(act.what in {"deletion", "loss"} for act in between)  # and put again
        if len(between) <= MOST_BETWEEN and not is_forgotten:
            self._break(Promise.STORED, key, f"{call} was stored twice")

    def _check_condition(
        self, put: Put, key: Key, before: Copy | None, after: Copy, now: float
    ) -> None:
        seen = None if before is None else before.generation
        mark = Mark.NONE if before is None else before.mark
        is_right = True
        match put.when:
            case When.NO_LIVE_COPY:
                is_right = not is_live(before, now)
            case When.LIVE_COPY:
                is_right = is_live(before, now)
            case When.UNCHANGED:
                is_right = (seen, mark) == (put.seen, put.seen_mark)
        if put.copy.value is UNREAD:
            is_right = is_right and before is not None and after.value == before.value
        if not is_right:
            self._break(
                Promise.STORED, key, f"a put replaced what its condition {put.when} forbids"
            )

    def _act(self, key: Key, what: str, call: ChangeCall | None, version: bytes) -> None:
        self._acts[key].append(Act(self._next(), what, call, version))

    def _break(self, promise: Promise, key: Key, what: str) -> None:
        self._broken(promise, f"{key[0]} {key[1]!r}: {what}")

    def _next(self) -> int:
        self._position += 1
        return self._position
