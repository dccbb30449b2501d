"""The memory cache of a resource: decoded entries and their answers, a bounded number.

A hit adds one to a count on the entry and moves nothing. `evicting.py` uses that count to
decide which entries to drop.

A `Memo` notes what a response was made of, so that another layer can serve it again while it is
right. It holds the entries, not the answers: an entry that is dropped lets go of its value, whoever
still has a memo of it.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from msgspec.structs import replace

from stillfresh.bounded import BESIDE
from stillfresh.clock import Clock
from stillfresh.engine.causes import Causes
from stillfresh.engine.evicting import Evicting
from stillfresh.engine.keys import Spec
from stillfresh.engine.model import Answer, Origin
from stillfresh.engine.news import Notices
from stillfresh.engine.rules import (
    NOTHING,
    Outlook,
    Serve,
    age_bucket,
    failure_error,
    outlook_of,
    verdict_of,
    without_cause,
    without_store,
)
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict, age_of
from stillfresh.stores.contract import UNREAD, Copy, Failure, Mark, Record

if TYPE_CHECKING:
    from stillfresh.engine.blocks import Face

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NEVER, FRESH = float("-inf"), Verdict.FRESH
UNSTORED_FOR: Final = 1.0
"""Seconds for which memory serves a value that could not be stored without asking the store again.
It is STALE to those callers, and no longer than its own freshness lasts."""


class MemoryEntry(Generic[K, V]):
    """A decoded copy, and the answer that may be given unchanged while `now < until`.

    It is not a struct: a hit writes to it, and writing to a struct costs more.
    """

    __slots__ = (
        "answer",
        "bucket",
        "copy",
        "edition",
        "hits",
        "key",
        "marked",
        "since",
        "size",
        "stands",
        "tags",
        "unstored_over",
        "until",
        "vouched",
    )

    def __init__(  # noqa: PLR0917 (made for each key that is loaded)
        self,
        key: K,
        copy: Copy,
        answer: Answer[V],
        until: float,
        stands: float,
        bucket: int,
        since: float,
    ) -> None:
        self.key = key
        self.copy = copy
        self.answer = answer
        self.until = until  # memory answers without the store until then
        self.stands = stands  # the answer is right until then, if the store still has this copy
        self.bucket = bucket
        self.since = since  # when the store was asked, if it has announced no change since
        self.vouched = NEVER  # `memory_for` vouches for the copy until then
        self.unstored_over: str | None = None
        """The generation that the store still had when it could not store this copy."""
        self.hits, self.marked = 0, False
        self.edition = 0  # changes whenever the answer changes or is removed
        self.size = 0  # the bytes that it counts
        self.tags: Sequence[str | None] = ()


class Memory(Evicting[K, V]):
    """The entries of one resource: decodes, counts and keeps; decides nothing about loads."""

    def __init__(self, spec: Spec[K, V], clock: Clock, *, private: bool) -> None:
        super().__init__(spec.max_bytes, spec.objective)
        self.now = clock
        self._spec = spec
        self.stand_before(private=private)
        self._outlook: Outlook | None = None
        self.causes: Causes[K] = Causes(self._drop_cause)
        self.notices: Notices[K] | None = None  # announced changes of these keys

    def stand_before(self, *, private: bool) -> None:
        """No other process can change a private store, so memory need not ask it."""
        self.is_private = private
        self._memory_for = float("inf") if private else self._spec.memory_for
        self._from_store = Origin.MEMORY if private else Origin.STORE
        self._kept_origin = Origin.MEMORY if self._memory_for else Origin.STORE

    def peek(self, key: K, confirms: Callable[[Copy], bool]) -> Answer[V] | None:
        """The entry in memory, with its verdict of now; not counted as a read.

        `confirms`: whether the store still has this copy, if that can be said without waiting.
        """
        if (entry := self.entries.get(key)) is None:
            return None
        answer = entry.answer
        copy = entry.copy
        now = self.now()
        if copy is None or answer is None or now < entry.until:
            return answer  # None: a thread looks while the loop drops the entry
        verdict = verdict_of(copy, now)
        if verdict is Verdict.GONE:
            return None
        error = None if verdict is FRESH else answer.error
        if self.is_private or now < self._vouched_until(entry) or confirms(copy):
            return self.made(copy, answer.value, verdict, Origin.MEMORY, error)
        verdict = without_store(verdict)
        return self.made(copy, answer.value, verdict, Origin.MEMORY, error, unverified=True)

    def serve(
        self,
        key: K,
        plan: Serve,
        now: float,
        origin: Origin | None = None,
        since: float | None = None,
        *,
        unverified: bool = False,
    ) -> Answer[V] | None:
        """An answer from the plan's copy, kept in memory; None if the copy cannot be read.

        `unverified`: the copy is memory's own, since the store could not be asked.
        """
        copy, verdict = plan.copy, plan.verdict
        readable, value = self.value_of(key, copy)
        if not readable:
            return None
        if unverified:
            entry = self.entries.get(key)
            if entry is not None and self.is_trusted(entry, now):
                return entry.answer  # the store need not be asked again yet
        failure, outlook = plan.failure, self.outlook(copy, now)
        error = None if failure is None else self.failure_error(key, failure, now)
        if unverified and error is None and verdict is not FRESH:
            error = self._known_error(key, copy)
        origin = Origin.MEMORY if unverified else origin or self._from_store
        if verdict is Verdict.EXPIRED is not outlook.verdict:  # too old for this call alone
            return self.made(copy, value, verdict, origin, error, unverified=unverified)
        asked = now if since is None else since
        kept = self.keep(
            key, copy, value, outlook, None if unverified else asked, error, self._memory_for
        )
        if unverified or kept.origin is origin:
            return kept
        return self.made(copy, value, verdict, origin, error)

    def outlook(self, copy: Copy, now: float) -> Outlook:
        """Judge copies that were loaded or read together once: they share their times."""
        last = self._outlook
        if (
            last is None
            or last.policy is not copy.policy
            or last.fetched_at != copy.fetched_at
            or last.mark is not copy.mark
            or last.now != now
        ):
            last = self._outlook = outlook_of(copy, now, self.counts.bounds)
        return last

    def keep(  # noqa: PLR0917 (called for each key that is loaded)
        self,
        key: K,
        copy: Copy,
        value: V | None,
        outlook: Outlook,
        since: float | None,
        error: LoadFailed | None = None,
        lag: float = UNSTORED_FOR,
    ) -> Answer[V]:
        """Cache the answer: how long it may be served without the store, and how long if it agrees.

        `since`: when the store was asked; later changes by other processes are not known. None: it
        did not confirm the copy, which memory serves for `lag` seconds: as STALE, and
        while its own freshness lasts.
        """
        stands = until = NEVER
        if error is not None:
            until = min(outlook.until, error.retry_at or NEVER)
        elif outlook.verdict is FRESH:
            stands = until = outlook.until
        if unverified := since is None:
            since, stands, origin = outlook.now, NEVER, Origin.MEMORY
        else:
            lag, origin = self._memory_for, self._kept_origin
        limit = since + lag if lag else NEVER
        until = min(until, limit)
        found = copy.value is not None
        verdict = without_store(outlook.verdict) if unverified else outlook.verdict
        at, clock = copy.fetched_at, self.now
        kept: Answer[V] = Answer(
            value,  # type: ignore[arg-type]
            found,
            verdict,
            at,
            origin,
            clock,
            error,
            unverified,
            copy.policy,
            copy.mark,
        )
        told = None if unverified else self.notices
        is_known = told is not None and told.is_known(key, copy.generation, since)
        self.put(key, copy, kept, until, stands, outlook.bucket, since if is_known else NEVER)
        if lag and not unverified and not self.is_private:
            entry = self.entries.get(key)
            if entry is not None:  # None: it is too large for memory
                entry.vouched = limit
        return kept

    def keep_unstored(
        self, key: K, copy: Copy, value: V | None, outlook: Outlook, seen: str | None
    ) -> None:
        """Keep a loaded value that the store could not store, over the copy that the load saw.

        The store has an older one, if that copy was memory's own and not stored either.
        """
        entry = self.entries.get(key)
        over = seen
        if entry is not None and entry.copy.generation == seen:
            over = entry.unstored_over or seen
        self.keep(key, copy, value, outlook, None)
        entry = self.entries.get(key)
        if entry is not None:  # None: it is too large for memory
            entry.unstored_over = over

    def has(self, key: K, stored: Copy | None) -> bool:
        """True if memory has this very copy, with the same mark."""
        entry = self.entries.get(key)
        if entry is None or stored is None:
            return False
        copy = entry.copy
        return copy.generation == stored.generation and copy.mark == stored.mark

    def has_newer(self, key: K, stored: Copy | None) -> bool:
        """True if the store still has the copy that it could not replace by memory's.

        For example during an outage, or because the disk is full. Another copy counts more, and so
        does one that was invalidated since: memory's may have been loaded before that.
        """
        entry = self.entries.get(key)
        if entry is None or entry.unstored_over is None or stored is None:
            return False
        return stored.mark is Mark.NONE and stored.generation == entry.unstored_over

    def _vouched_until(self, entry: MemoryEntry[K, V]) -> float:
        """Until when memory may answer alone: by `memory_for`, or by the store's silence."""
        if self.notices is None:
            return entry.vouched
        return max(entry.vouched, self.notices.trusted_until(entry.since, self._memory_for))

    def is_trusted(self, entry: MemoryEntry[K, V], now: float) -> bool:
        """True if memory may answer alone again, with the verdict and the age bucket of now."""
        if entry.answer.verdict is not FRESH:
            return False
        until = self._vouched_until(entry)
        if now >= until or (outlook := self.outlook(entry.copy, now)).verdict is not FRESH:
            return False
        self.fold(entry)
        entry.bucket, entry.stands = outlook.bucket, outlook.until
        entry.until = min(outlook.until, until)
        return True

    def fallback(
        self, key: K, copy: Copy, *, unverified: bool = False
    ) -> Callable[[LoadFailed], Answer[V]] | None:
        """The answer that an EXPIRED copy gives if the load fails; decoded once."""
        readable, value = self.value_of(key, copy)
        if not readable:
            return None
        known = self._known_error(key, copy)
        self.put(key, copy, self.made(copy, value, Verdict.EXPIRED, Origin.MEMORY, known))
        origin = Origin.MEMORY if unverified else self._from_store
        return partial(self.made, copy, value, Verdict.EXPIRED, origin, unverified=unverified)

    def count(self, outcomes: Iterable[Answer[V] | LoadFailed], now: float) -> None:
        """Count one read for each answer, by its origin, verdict and age."""
        counts, age, fetched_at = self.counts, 0.0, now
        reads, ages, bucket = counts.reads, counts.ages, age_bucket(age, counts.bounds)
        for outcome in outcomes:
            if isinstance(outcome, LoadFailed):
                reads[Origin.LOADED][Verdict.GONE] += 1
                continue
            if outcome.fetched_at != fetched_at:
                fetched_at = outcome.fetched_at
                age = age_of(fetched_at, now)
                bucket = age_bucket(age, counts.bounds)
            reads[outcome.origin][outcome.verdict] += 1
            ages[bucket] += 1
            counts.age_sum += age

    def failure_error(self, key: K, failure: Failure, now: float) -> LoadFailed:
        """The error of a key's last failure, during its cooldown and after it.

        If this process saw it, with its cause and of the same class.
        """
        name, seen = f"{self._spec.kind} {key!r}", self.causes.error_of(key, failure)
        if seen is None:
            return failure_error(name, failure, now)
        error = failure_error(name, failure, now, type(seen))
        error.__cause__ = seen.__cause__
        return error

    def remember(self, key: K, failure: Failure, error: LoadFailed) -> None:
        """Keep the error of a load that failed in this process."""
        held = self._spec.held
        self.causes.note(key if held is None else held(key), failure, error)

    def _drop_cause(self, key: K) -> None:
        """The answer in memory must not hold an exception that is forgotten."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.answer = without_cause(entry.answer)

    def has_failed(self, key: K, failure: Failure | None) -> None:
        """A load has ended without a value, so the store must be asked before memory answers.

        `peek` tells the failure with an old copy, and so does memory while the store cannot be
        asked. None: the load was given up, which is no failure.
        """
        entry, now = self.entries.get(key), self.now()
        if entry is None:
            return
        entry.until = NEVER
        if failure is None or verdict_of(entry.copy, now) is FRESH:
            return
        self.fold(entry)
        entry.stands = NEVER
        entry.answer = replace(entry.answer, error=self.failure_error(key, failure, now))
        entry.edition += 1

    def _known_error(self, key: K, copy: Copy) -> LoadFailed | None:
        """The error that memory knows of the copy's last refresh."""
        entry = self.entries.get(key)
        if entry is None or entry.copy.generation != copy.generation:
            return None
        return entry.answer.error

    def made(
        self,
        copy: Copy,
        value: V | None,
        verdict: Verdict,
        origin: Origin,
        error: LoadFailed | None = None,
        *,
        unverified: bool = False,
    ) -> Answer[V]:
        return Answer(
            value,  # type: ignore[arg-type]
            copy.value is not None,
            verdict,
            copy.fetched_at,
            origin,
            self.now,
            error,
            unverified,
            copy.policy,
            copy.mark,
        )

    def readable(self, texts: Mapping[K, str], records: Mapping[str, Record]) -> dict[K, Record]:
        """By key. A copy that cannot be decoded is left out."""
        found = {key: records.get(id_, NOTHING) for key, id_ in texts.items()}
        return {
            key: it if it.copy is None or self.value_of(key, it.copy)[0] else replace(it, copy=None)
            for key, it in found.items()
        }

    def value_of(self, key: K, copy: Copy) -> tuple[bool, V | None]:
        """The value, decoded or from memory. A value of another shape is a miss."""
        if copy.value is None:
            return True, None
        entry = self.entries.get(key)
        if entry is not None and entry.copy.generation == copy.generation:
            return True, entry.answer.value
        if copy.value is UNREAD:
            return False, None
        try:
            return True, self._spec.codec.decode(copy.value)
        except Exception as exc:  # noqa: BLE001 (a codec may raise anything)
            return self.counts.misfit(self._spec.kind, exc), None

    def put(  # noqa: PLR0917 (called for each key that is loaded)
        self,
        key: K,
        copy: Copy,
        answer: Answer[V],
        until: float = NEVER,
        stands: float = NEVER,
        bucket: int = 0,
        since: float = NEVER,
        size: int = BESIDE,
    ) -> None:
        """Keep the copy and its answer, if there is room; an existing entry is changed.

        The bytes are dropped, unless a private store holds the same object. `size`: for a new entry
        whose value was not read.
        """
        entry, value, room = self.entries.get(key), copy.value, self.room
        if isinstance(value, bytes):
            size = BESIDE + len(value)
        elif entry is not None and value is UNREAD:
            size = entry.size
        if size > room.largest:
            self.drop(key)
            return
        if not self.is_private and value is not None and value is not UNREAD:
            copy = Copy(
                copy.generation, copy.fetched_at, copy.policy, UNREAD, copy.mark, copy.version
            )
        if entry is None:
            if len(self.entries) >= self._spec.max_entries:
                self._drop_one()
            full, key = key, key if self._spec.held is None else self._spec.held(key)
            entry = MemoryEntry(key, copy, answer, until, stands, bucket, since)
            self.entries[key] = entry
            if self._spec.tags is not None:
                entry.tags = self._spec.possible_tags(full)
                self._tagged.add(key, entry.tags)
        else:
            self.fold(entry)
            entry.marked = True
            entry.until = NEVER  # so that a thread never reads a half-changed entry
            if entry.copy.generation != copy.generation:
                entry.unstored_over = None
            entry.copy, entry.answer, entry.bucket = copy, answer, bucket
            entry.vouched = NEVER
            entry.until, entry.stands, entry.since = until, stands, since
            entry.edition += 1
        room.held += size - entry.size
        entry.size = size
        if room.held > room.most:
            room.shrink()

    def retag(self, key: K, generation: str, late: tuple[str, ...]) -> None:
        """The copy of that generation has these tags besides the key's own."""
        entry = self.entries.get(key)
        if entry is not None and entry.copy.generation == generation:
            self._tagged.remove(key, entry.tags)
            entry.tags = self._spec.possible_tags(key) + late  # without late ones, no other tuple
            self._tagged.add(entry.key, entry.tags)

    def clear(self) -> None:
        super().clear()
        self.causes.clear()

    def drop(self, key: K) -> None:
        """Remove the entry: code that still holds it gets no answer from it."""
        if (entry := self.entries.pop(key, None)) is not None:
            self._tagged.remove(key, entry.tags)
            self.room.held -= entry.size
            self._end(entry)

    def _end(self, entry: MemoryEntry[K, V]) -> None:
        self.fold(entry)
        entry.until = NEVER
        entry.edition += 1
        entry.answer = entry.copy = None  # type: ignore[assignment]

    def fold(self, entry: MemoryEntry[K, V]) -> None:
        """Hand the entry's hits over to the counts."""
        if entry.hits:
            hits, entry.hits = entry.hits, 0  # threads keep counting meanwhile
            self.counts.hit(entry.answer, entry.bucket, hits, self.now())
            entry.marked = True


class Memo(Generic[K, V]):
    """The answers that something was made of, made by `Resource.memo`."""

    __slots__ = ("_entry_of", "_face", "_steps", "_verified")

    def __init__(
        self, face: "Face[K, V]", steps: Sequence[tuple[K, MemoryEntry[K, V], int]]
    ) -> None:
        """`steps`: each key, its entry, and the entry's edition."""
        self._face = face
        # Another one after memory was cleared, and while a block of `bypassed()` is open.
        self._entry_of: Callable[..., object] = face.entry_of
        self._steps = steps
        self._verified = face.core.reads.verified

    def read(self, now: float) -> Answer[V] | None:
        """Return the last of the answers, if none has changed; count one read of each.

        None: something changed, or the store must be asked. Then nothing is counted.
        """
        if self._face.entry_of is not self._entry_of:
            return None
        for key, entry, edition in self._steps:
            if entry.edition == edition:
                if now < entry.until:
                    entry.hits += 1
                    continue
                if self._verified(key, entry, now) is not None:  # which counts it
                    continue
            self._uncount_before(entry)
            return None
        return entry.answer

    def uncount(self) -> None:
        """Take back the counts of the last `read`, because its answer was not used."""
        for _, entry, _ in self._steps:
            entry.hits -= 1

    def _uncount_before(self, missed: MemoryEntry[K, V]) -> None:
        for _, entry, _ in self._steps:
            if entry is missed:
                return
            entry.hits -= 1


def memo_of(face: "Face[K, V]", keys: Iterable[K]) -> tuple[Memo[K, V], list[Answer[V]]] | None:
    """A memo and its answers; None if one may not be served again as it is."""
    steps: list[tuple[K, MemoryEntry[K, V], int]] = []
    answers: list[Answer[V]] = []
    for key in keys:
        entry = face.entry_of(key)
        if entry is None:
            return None
        answer = entry.answer
        if not answer.found or answer.verdict is not FRESH or answer.error is not None:
            return None
        steps.append((entry.key, entry, entry.edition))
        answers.append(answer)
    return Memo(face, tuple(steps)), answers
