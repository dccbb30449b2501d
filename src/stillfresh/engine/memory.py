"""The memory cache of a resource: decoded entries and their answers, a bounded number (E9, E23).

A hit adds one to a count on the entry (E12), and moves nothing. `evicting.py` uses that count to
decide which entries to drop.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from msgspec.structs import replace

from stillfresh.bounded import BESIDE
from stillfresh.clock import Clock
from stillfresh.engine.evicting import Evicting
from stillfresh.engine.keys import Spec
from stillfresh.engine.model import Answer, Origin
from stillfresh.engine.news import Notices
from stillfresh.engine.rules import NOTHING, Outlook, Serve, age_bucket, outlook_of, verdict_of
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict, age_of
from stillfresh.stores.contract import UNREAD, Copy, Failure, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NEVER, FRESH = float("-inf"), Verdict.FRESH
UNSTORED_FOR: Final = 1.0  # S5: seconds that memory serves a value that is not stored, if fresh


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
        "until",
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
        self.since = since  # S10: when the store was asked, if it has announced no change since
        self.hits, self.marked = 0, False
        self.edition = 0  # changes whenever the answer changes or is removed
        self.size = 0  # E23: the bytes that it counts
        self.tags: Sequence[str | None] = ()


class Memory(Evicting[K, V]):
    """The entries of one resource: decodes, counts and keeps; decides nothing about loads."""

    def __init__(self, spec: Spec[K, V], clock: Clock, *, private: bool) -> None:
        super().__init__(spec.max_bytes, spec.objective)
        self.now = clock
        self._spec = spec
        self.stand_before(private=private)
        self._outlook: Outlook | None = None
        self.notices: Notices[K] | None = None  # S10: announced changes of these keys

    def stand_before(self, *, private: bool) -> None:
        """E9: no other process can change a private store, so memory need not ask it."""
        self.is_private = private
        self._memory_for = float("inf") if private else self._spec.memory_for
        self._from_store = Origin.MEMORY if private else Origin.STORE
        self._kept_origin = Origin.MEMORY if self._memory_for else Origin.STORE

    def hit(self, key: K, now: float) -> Answer[V] | None:
        """What memory can answer without asking the store."""
        entry = self.entries.get(key)
        if entry is None or now >= entry.until:
            return None
        entry.hits += 1
        return entry.answer

    def peek(self, key: K) -> Answer[V] | None:
        """The entry in memory, with its verdict of now; not counted as a read."""
        if (entry := self.entries.get(key)) is None:
            return None
        now = self.now()
        if now < entry.until:
            return entry.answer
        verdict = verdict_of(entry.copy, now)
        if verdict is Verdict.GONE:
            return None
        return self.made(entry.copy, entry.answer.value, verdict, Origin.MEMORY)

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

        `unverified`: the copy is memory's own, since the store could not be asked (E26).
        """
        copy, verdict = plan.copy, plan.verdict
        readable, value = self.value_of(key, copy)
        if not readable:
            return None
        failure, outlook = plan.failure, self.outlook(copy, now)
        error = None if failure is None else self.cooling(key, failure, now)
        origin = origin or self._from_store
        if verdict is Verdict.EXPIRED is not outlook.verdict:  # E18: too old for this call alone
            return self.made(copy, value, verdict, origin, error)
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
        """Keep an answer; E9: until when memory may give it, alone or if the store agrees.

        `since`: when the store was asked; later changes by other processes are not known. None: it
        did not confirm the copy, which memory serves for `lag` seconds if it is fresh (E26).
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
        if not lag:
            until = NEVER
        elif (limit := since + lag) < until:
            until = limit
        found, verdict = copy.value is not None, outlook.verdict
        at, clock = copy.fetched_at, self.now
        kept: Answer[V] = Answer(value, found, verdict, at, origin, clock, error, unverified)  # type: ignore[arg-type]
        told = None if unverified else self.notices
        is_known = told is not None and told.is_known(key, copy.generation, since)
        self.put(key, copy, kept, until, stands, outlook.bucket, since if is_known else NEVER)
        return kept

    def is_trusted(self, entry: MemoryEntry[K, V], now: float) -> bool:
        """S10: the store would have announced a change, so memory may answer alone again."""
        if self.notices is None or entry.answer.verdict is not FRESH:
            return False
        until = self.notices.trusted_until(entry.since, self._memory_for)
        if now >= until or (outlook := self.outlook(entry.copy, now)).verdict is not FRESH:
            return False
        self.fold(entry)
        entry.bucket, entry.stands = outlook.bucket, outlook.until
        entry.until = min(outlook.until, until)
        return True

    def fallback(
        self, key: K, copy: Copy, *, unverified: bool = False
    ) -> Callable[[LoadFailed], Answer[V]] | None:
        """E2: the answer that an EXPIRED copy gives if the load fails; decoded once."""
        readable, value = self.value_of(key, copy)
        if not readable:
            return None
        self.put(key, copy, self.made(copy, value, Verdict.EXPIRED, Origin.MEMORY))
        origin = Origin.MEMORY if unverified else self._from_store
        return partial(self.made, copy, value, Verdict.EXPIRED, origin, unverified=unverified)

    def count(self, outcomes: Iterable[Answer[V] | LoadFailed], now: float) -> None:
        """E12: count one read for each answer, by its origin, verdict and age."""
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

    def cooling(self, key: K, failure: Failure, now: float) -> LoadFailed:
        """E7: the error for a key that cools down, from its last failure."""
        error = LoadFailed(
            f"{self._spec.kind} {key!r}: not tried again for {failure.retry_at - now:.1f} s, "
            f"since loading failed: {failure.error}"
        )
        error.retry_at = failure.retry_at
        return error

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
        found = copy.value is not None
        at, clock = copy.fetched_at, self.now
        return Answer(value, found, verdict, at, origin, clock, error, unverified)  # type: ignore[arg-type]

    def readable(self, texts: Mapping[K, str], records: Mapping[str, Record]) -> dict[K, Record]:
        """By key. A copy that cannot be decoded is left out."""
        found = {key: records.get(id_, NOTHING) for key, id_ in texts.items()}
        return {
            key: it if it.copy is None or self.value_of(key, it.copy)[0] else replace(it, copy=None)
            for key, it in found.items()
        }

    def value_of(self, key: K, copy: Copy) -> tuple[bool, V | None]:
        """The value, decoded or from memory. A value of another shape is a miss (E11)."""
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

    def put(  # noqa: C901, PLR0917 (called for each key that is loaded)
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
            copy = Copy(copy.generation, copy.fetched_at, copy.policy, UNREAD, copy.mark)
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
            entry.until = NEVER  # E20: so that a thread never reads a half-changed entry
            entry.copy, entry.answer, entry.bucket = copy, answer, bucket
            entry.until, entry.stands, entry.since = until, stands, since
            entry.edition += 1
        room.held += size - entry.size
        entry.size = size
        if room.held > room.most:
            room.shrink()

    def retag(self, key: K, generation: str, late: tuple[str, ...]) -> None:
        """I26: the copy of that generation has these tags besides the key's own."""
        entry = self.entries.get(key)
        if entry is not None and entry.copy.generation == generation:
            self._tagged.remove(key, entry.tags)
            entry.tags = self._spec.possible_tags(key) + late  # without late ones, no other tuple
            self._tagged.add(entry.key, entry.tags)

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
            hits, entry.hits = entry.hits, 0  # E20: threads keep counting meanwhile
            self.counts.hit(entry.answer, entry.bucket, hits, self.now())
            entry.marked = True
