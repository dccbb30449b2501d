"""The memory of a resource: the entries that this process knows, a bounded number.

Memory decodes copies, makes answers and keeps them; it decides nothing about loads. A hit is
answered without it, from the entry alone (`resource.py`).

When memory is full, entries leave it by CLOCK: they stand in a line, and the first one that was not
read since its last turn is dropped. One that was read goes to the end of the line instead. An entry
that is dropped for another reason stays in the line, empty, until its turn comes; there are never
more empty ones than a slice beside the others. Long work is done in slices.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from gc import is_tracked
from typing import Final, Generic, TypeVar

from msgspec.structs import replace

from stillfresh.bounded import BESIDE, SLICE, BoundedDict, Line, Room, TagIndex
from stillfresh.clock import Clock
from stillfresh.engine.causes import Causes
from stillfresh.engine.counts import Counts
from stillfresh.engine.entry import NEVER, NO_TROUBLE, NOTHING_HEARD, Entry
from stillfresh.engine.keys import Spec
from stillfresh.engine.model import Answer, EntryAnswer, Origin
from stillfresh.engine.news import Asked, Notices
from stillfresh.engine.rules import (
    FRESH,
    NOTHING,
    Outlook,
    Serve,
    failure_error,
    outlook_of,
    verdict_of,
    without_store,
)
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import UNREAD, Copy, Failure, Mark, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_REFUSED: Final = 10_000
"""Keys whose last load ended with an exception that `raises=` names."""
MOST_SIZES: Final = 512
SIZES: Final = tuple(range(BESIDE, BESIDE + MOST_SIZES))
"""What values of 0 to 511 bytes count: one number for all entries of a size."""
UNSTORED_FOR: Final = 1.0
"""Seconds for which memory serves a value that could not be stored without asking the store again.
It is STALE to those callers, and no longer than its own freshness lasts."""


class Memory(Generic[K, V]):
    """The entries of one resource, and the room that they take."""

    def __init__(self, spec: Spec[K, V], clock: Clock, *, private: bool) -> None:
        self.now = clock
        self._spec = spec
        self.stand_before(private=private)
        self.entries: dict[K, Entry[K, V]] = {}
        self._line: Line[Entry[K, V]] = Line()
        self._tagged: TagIndex[K] = TagIndex()
        self._cleared: list[tuple[dict[K, Entry[K, V]], TagIndex[K]]] = []
        self.on_clear: Callable[[], object] = bool
        """Called when `entries` is another dict."""
        self.room = Room(spec.max_bytes, self._free_slice)
        self.counts = Counts(spec.objective)
        self.causes: Causes[K] = Causes()
        self._refused: BoundedDict[K, float] = BoundedDict(MOST_REFUSED)
        self.notices: Notices[K] | None = None  # announced changes of these keys
        self._outlook: Outlook | None = None
        self.may_have_unstored = False
        """True once there was a value of unverified parts, of which the store has nothing."""

    def stand_before(self, *, private: bool) -> None:
        """No other process can change a private store, so memory need not ask it."""
        self.is_private = private
        self._memory_for = float("inf") if private else self._spec.memory_for
        self._from_store = Origin.MEMORY if private else Origin.STORE
        self._kept_origin = Origin.MEMORY if self._memory_for else Origin.STORE

    # Answers from a copy that was read.

    def asked_now(self) -> Asked:
        """For a request that the store gets from now on."""
        notices = self.notices
        return Asked(self.now(), 0 if notices is None else notices.heard)

    def serve(
        self,
        key: K,
        plan: Serve,
        now: float,
        asked: Asked,
        origin: Origin | None = None,
        *,
        unverified: bool = False,
    ) -> Answer[V] | None:
        """Make an answer of the plan's copy, keep it in memory, and return it.

        None if the copy cannot be read. `asked`: when the store was. `unverified`: the copy is
        memory's own, since the store could not be asked.
        """
        copy = plan.copy
        verdict = plan.verdict
        is_readable, value = self.value_of(key, copy)
        if not is_readable:
            return None
        failure = plan.failure
        if unverified:
            entry = self.entries.get(key)
            if entry is not None and self.is_trusted(entry, now):
                return entry.answer  # the store need not be asked again yet
            if failure is None and verdict is not FRESH:
                failure = self._known_failure(key, copy)
        error = None if failure is None else self.failure_error(key, failure, now)
        if unverified:
            origin = Origin.MEMORY
        elif origin is None:
            origin = self._from_store
        outlook = self.outlook(copy, now)
        if verdict is Verdict.EXPIRED is not outlook.verdict:  # too old for this call alone
            return self.new_answer(copy, value, verdict, origin, error, unverified=unverified)
        if unverified:
            answer = self.keep(key, copy, value, outlook, None, failure, self._memory_for)
            return answer if error is None else answer.with_error(error)
        answer = self.keep(key, copy, value, outlook, asked, failure, self._memory_for)
        if answer.origin is origin and error is None:
            return answer
        return self.new_answer(copy, value, verdict, origin, error)

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
            last = outlook_of(copy, now)
            self._outlook = last
        return last

    def keep(  # noqa: PLR0917 (called for each key that is loaded)
        self,
        key: K,
        copy: Copy,
        value: V | None,
        outlook: Outlook,
        asked: Asked | None,
        failure: Failure | None = None,
        lag: float = UNSTORED_FOR,
    ) -> Answer[V]:
        """Cache the answer: how long it may be served without the store, and how long if it agrees.

        `asked`: when the store was; later changes by other processes are not known. None: it did
        not confirm the copy, which memory serves for `lag` seconds: as STALE, and while its own
        freshness lasts. `failure`: of its last refresh.
        """
        unverified = asked is None
        if asked is None:
            since = outlook.now
            origin = Origin.MEMORY
            verdict = without_store(outlook.verdict)
        else:
            since = asked.at
            lag = self._memory_for
            origin = self._kept_origin
            verdict = outlook.verdict
        limit = since + lag if lag else NEVER
        answer_class = Answer if is_tracked(value) else EntryAnswer
        answer: Answer[V] = answer_class(  # as in `new_answer`; written out for each loaded key
            value,  # type: ignore[arg-type]
            copy.value is not None,
            verdict,
            copy.fetched_at,
            origin,
            self.now,
            None,
            unverified,
            copy.policy,
            copy.mark,
        )
        until = old_until = stands = NEVER
        if failure is not None:
            old_until = min(outlook.until, failure.retry_at, limit)
        elif verdict is FRESH:
            stands = outlook.until
            until = min(stands, limit)
        elif outlook.verdict is FRESH:
            old_until = min(outlook.until, limit)
        entry = self.insert(key, copy, answer)
        if entry is None:
            return answer
        entry.stands = stands
        if asked is not None:
            notices = self.notices
            if notices is not None and notices.is_known(key, copy.generation, asked.heard):
                entry.heard = asked.heard
            if lag and not self.is_private:
                entry.vouched = limit
        if failure is not None or old_until != NEVER:
            entry.trouble = replace(entry.trouble, old_until=old_until, failure=failure)
        entry.until = until  # last: from here on, threads read the entry
        return answer

    def keep_unstored(
        self,
        key: K,
        copy: Copy,
        value: V | None,
        outlook: Outlook,
        seen: str | None,
        *,
        is_of_unverified_parts: bool,
    ) -> None:
        """Keep a loaded value that is not stored, over the copy that the load saw.

        The store has an older one, if that copy was memory's own and not stored either.
        """
        entry = self.entries.get(key)
        over = seen
        if entry is not None and entry.copy.generation == seen and entry.trouble.is_unstored:
            over = entry.trouble.unstored_over
        self.keep(key, copy, value, outlook, None)
        entry = self.entries.get(key)
        if entry is not None:  # None: it is too large for memory
            self.may_have_unstored |= is_of_unverified_parts
            entry.trouble = replace(
                entry.trouble,
                unstored_over=over,
                is_of_unverified_parts=is_of_unverified_parts,
            )

    def fallback(
        self, key: K, copy: Copy, *, unverified: bool = False
    ) -> Callable[[LoadFailed], Answer[V]] | None:
        """The answer that an EXPIRED copy gives if the load fails; decoded once."""
        is_readable, value = self.value_of(key, copy)
        if not is_readable:
            return None
        failure = self._known_failure(key, copy)
        answer = self.new_answer(copy, value, Verdict.EXPIRED, Origin.MEMORY)
        entry = self.insert(key, copy, answer)
        if entry is not None and failure is not None:
            entry.trouble = replace(entry.trouble, failure=failure)
        origin = Origin.MEMORY if unverified else self._from_store

        def with_error(error: LoadFailed) -> Answer[V]:
            return self.new_answer(
                copy, value, Verdict.EXPIRED, origin, error, unverified=unverified
            )

        return with_error

    # Answers from an entry.

    def old_answer(self, entry: Entry[K, V], now: float) -> Answer[V] | None:
        """The answer that memory gives although it is not FRESH, without asking the store."""
        if now >= entry.trouble.old_until:
            return None
        return self._with_error(entry, now)

    def last_answer(self, key: K) -> Answer[V] | None:
        """What the entry's answer was when it was made, and the error of a refresh since then."""
        entry = self.entries.get(key)
        return None if entry is None else self._with_error(entry, self.now())

    def _with_error(self, entry: Entry[K, V], now: float) -> Answer[V]:
        """The entry's answer, with the error of its last refresh."""
        failure = entry.trouble.failure
        if failure is None:
            return entry.answer
        return entry.answer.with_error(self.failure_error(entry.key, failure, now))

    def peek(
        self, key: K, confirms: Callable[[Copy], bool], *, may_lag: bool = True
    ) -> Answer[V] | None:
        """The entry in memory, with its verdict of now; not counted as a read.

        `confirms`: whether the store still has this copy, if that can be said without waiting.
        `may_lag`: False if nothing else vouches for it.
        """
        entry = self.entries.get(key)
        if entry is None:
            return None
        answer = entry.answer
        copy = entry.copy
        now = self.now()
        vouches = may_lag or self.is_private
        if copy is None or answer is None or (vouches and now < entry.until):
            return answer  # None: a thread looks while the loop drops the entry
        if vouches and now < entry.trouble.old_until:
            return self._with_error(entry, now)
        verdict = verdict_of(copy, now)
        if verdict is Verdict.GONE:
            return None
        error = None
        failure = entry.trouble.failure
        if verdict is not FRESH and failure is not None:
            error = self.failure_error(key, failure, now)
        if self.is_private or (vouches and now < self._vouched_until(entry)) or confirms(copy):
            return self.new_answer(copy, answer.value, verdict, Origin.MEMORY, error)
        verdict = without_store(verdict)
        value = answer.value
        return self.new_answer(copy, value, verdict, Origin.MEMORY, error, unverified=True)

    def is_trusted(self, entry: Entry[K, V], now: float) -> bool:
        """True if memory may answer alone again: by `memory_for`, or by the store's silence."""
        if entry.answer.verdict is not FRESH:
            return False
        until = self._vouched_until(entry)
        if now >= until:
            return False
        outlook = self.outlook(entry.copy, now)
        if outlook.verdict is not FRESH:
            return False
        entry.stands = outlook.until
        entry.until = min(outlook.until, until)
        return True

    def _vouched_until(self, entry: Entry[K, V]) -> float:
        """Until when memory may answer alone: by `memory_for`, or by the store's silence."""
        if self.notices is None:
            return entry.vouched
        return max(entry.vouched, self.notices.trusted_until(entry.heard, self._memory_for))

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
        if entry is None:
            return False
        trouble = entry.trouble
        if stored is None:
            # A value that was not to be stored leaves nothing there. Another one was deleted.
            return trouble.is_of_unverified_parts and trouble.unstored_over is None
        return stored.mark is Mark.NONE and stored.generation == trouble.unstored_over

    def may_be_stored_now(self, key: K) -> bool:
        """True if a copy that the store could not take may be stored, if a lease is granted.

        One of unverified parts has to be made anew for that: not before it is stale, or an outage
        of the store of the parts would cost a load for each read.
        """
        entry = self.entries.get(key)
        return entry is None or not entry.trouble.is_of_unverified_parts

    def new_answer(
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

    # Failures.

    def failure_error(self, key: K, failure: Failure, now: float) -> LoadFailed:
        """The error of a key's last failure, during its cooldown and after it.

        If this process saw it, with its cause and of the same class.
        """
        name = f"{self._spec.kind} {key!r}"
        seen = self.causes.error_of(key, failure)
        if seen is None:
            return failure_error(name, failure, now)
        error = failure_error(name, failure, now, type(seen))
        error.__cause__ = seen.__cause__
        return error

    def remember(self, key: K, failure: Failure, error: LoadFailed) -> None:
        """Keep the error of a load that failed in this process."""
        if self._spec.held is not None:
            key = self._spec.held(key)
        self.causes.note(key, failure, error)

    def has_failed(self, key: K, failure: Failure | None) -> None:
        """A load has ended without a value, so the store must be asked before memory answers.

        `peek` tells the failure with an old copy, and so does memory while the store cannot be
        asked. None: the load was given up, which is no failure.
        """
        entry = self.entries.get(key)
        if entry is None:
            return
        entry.stop_answering()
        if failure is None or verdict_of(entry.copy, self.now()) is FRESH:
            return
        entry.stands = NEVER
        entry.trouble = replace(entry.trouble, failure=failure)
        entry.edition += 1

    def note_refusal(self, key: K, now: float) -> None:
        """A load of this key ended with an exception that `raises=` names.

        No refresh begins for `absent_for`, unless a caller waits for it.
        """
        if self._spec.held is not None:
            key = self._spec.held(key)
        self._refused.note(key, now + self._spec.terms.absent_for)

    def is_refused(self, key: K) -> bool:
        return bool(self._refused) and self.now() < self.refused_until(key)

    def refused_until(self, key: K) -> float:
        """No refresh begins until then, unless a caller waits for it."""
        return self._refused.get(key, NEVER)

    @property
    def has_failures(self) -> bool:
        """True if the last load of some key ended without a value."""
        return len(self.causes.seen) > 0 or len(self._refused) > 0

    def forget_failure(self, key: K) -> None:
        """The key was loaded."""
        self.causes.forget(key)
        self.forget_refusal(key)

    def forget_refusal(self, key: K) -> None:
        """The key was changed or loaded."""
        self._refused.pop(key, None)

    def _known_failure(self, key: K, copy: Copy) -> Failure | None:
        """The failure that memory knows of the copy's last refresh."""
        entry = self.entries.get(key)
        if entry is None or entry.copy.generation != copy.generation:
            return None
        return entry.trouble.failure

    # Values.

    def readable(self, texts: Mapping[K, str], records: Mapping[str, Record]) -> dict[K, Record]:
        """By key. A copy that cannot be decoded is left out."""
        readable: dict[K, Record] = {}
        for key, id_ in texts.items():
            record = records.get(id_, NOTHING)
            if record.copy is not None:
                is_readable, _ = self.value_of(key, record.copy)
                if not is_readable:
                    record = replace(record, copy=None)
            readable[key] = record
        return readable

    def overtaken_answer(self, key: K, plan: Serve, now: float) -> Answer[V] | None:
        """A STALE answer that memory does not keep, of a copy that was perhaps replaced since.

        None if the copy cannot be read.
        """
        is_readable, value = self.value_of(key, plan.copy)
        if not is_readable:
            return None
        error = None if plan.failure is None else self.failure_error(key, plan.failure, now)
        return self.new_answer(plan.copy, value, Verdict.STALE, Origin.ANOTHER, error)

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
            self.counts.unreadable.report(self._spec.kind, exc)
            return False, None

    # Entries come and go.

    def insert(
        self, key: K, copy: Copy, answer: Answer[V], size: int = BESIDE
    ) -> Entry[K, V] | None:
        """Keep the copy and its answer, if there is room; an existing entry is changed.

        Memory does not answer from it yet: all its times are NEVER. The bytes are dropped, unless a
        private store holds the same object. `size`: for a new entry whose value was not read.
        """
        entry = self.entries.get(key)
        value = copy.value
        room = self.room
        if isinstance(value, bytes):
            length = len(value)
            size = SIZES[length] if length < MOST_SIZES else length + BESIDE
        elif entry is not None and value is UNREAD:
            size = entry.size
        if size > room.largest:
            self.drop(key)
            return None
        if not self.is_private and value is not None and value is not UNREAD:
            copy = Copy(
                copy.generation, copy.fetched_at, copy.policy, UNREAD, copy.mark, copy.version
            )
        if entry is None:
            if len(self.entries) >= self._spec.max_entries:
                self._drop_one()
            full_key = key
            if self._spec.held is not None:
                key = self._spec.held(key)
            entry = Entry(key, copy, answer)
            self.entries[key] = entry
            self._line.append(entry)
            if self._spec.tags is not None:
                entry.tags = self._spec.possible_tags(full_key)
                self._tagged.add(key, entry.tags)
        else:
            entry.until = NEVER  # first: a thread never reads a half-changed entry
            entry.stands = entry.vouched = NEVER
            entry.heard = NOTHING_HEARD
            if entry.copy.generation != copy.generation:
                entry.trouble = NO_TROUBLE
            elif entry.trouble is not NO_TROUBLE:
                entry.trouble = entry.trouble.for_new_answer()
            entry.copy = copy
            entry.answer = answer
            entry.is_used = True
            entry.edition += 1
        room.held += size - entry.size
        entry.size = size
        if room.held > room.most:
            room.shrink()
            if entry.copy is None:  # it was dropped itself
                return None
        return entry

    def retag(self, key: K, generation: str, late: tuple[str, ...]) -> None:
        """The copy of that generation has these tags besides the key's own."""
        entry = self.entries.get(key)
        if entry is not None and entry.copy.generation == generation:
            self._tagged.remove(key, entry.tags)
            entry.tags = self._spec.possible_tags(key) + late  # without late ones, no other tuple
            self._tagged.add(entry.key, entry.tags)

    def tagged(self, tag: str) -> list[K]:
        """The entries that have this tag, or may have it."""
        return self._tagged.keys(tag) + self._tagged.keys(None)

    def keys(self) -> list[K]:
        return list(self.entries)

    def drop(self, key: K) -> None:
        """Remove the entry: code that still holds it gets no answer from it."""
        entry = self.entries.pop(key, None)
        if entry is None:
            return
        self._tagged.remove(key, entry.tags)
        self.room.held -= entry.size
        _empty(entry)
        if len(self._line) > 2 * len(self.entries) + SLICE:
            self._sweep_line()

    def clear(self) -> None:
        """Serve nothing from these entries any more; `freed` releases them in small steps."""
        self._cleared.append((self.entries, self._tagged))
        self.entries = {}
        self._line = Line()
        self._tagged = TagIndex()
        self.room.held = 0
        self.causes.clear()
        self._refused.clear()
        self.on_clear()

    def freed(self) -> Iterator[None]:
        """Release one cleared entry at each step."""
        for entries, tagged in self._cleared:
            while entries:
                _, entry = entries.popitem()
                _empty(entry)
                yield
            yield from tagged.freed()
        self._cleared.clear()

    # Eviction.

    def keeps(self, key: K) -> bool:
        """A private store asks before it drops a copy. If it was not read, memory drops it."""
        entry = self.entries.get(key)
        if entry is None:
            return False
        was_used = entry.is_used
        entry.is_used = False
        if not was_used:
            self.drop(key)
        return was_used

    def _drop_one(self) -> None:
        """Drop the first unread entry of a slice, or else any."""
        turns_left = SLICE
        while not self._take_turn(is_any=turns_left <= 0):
            turns_left -= 1

    def _free_slice(self) -> bool:
        """Drop entries until there is room, at most a slice. False if memory is empty."""
        for turns_left in range(SLICE, -1, -1):
            if not self.entries or self.room.is_enough:
                break
            self._take_turn(is_any=turns_left == 0)
        return bool(self.entries)

    def _take_turn(self, *, is_any: bool) -> bool:
        """The first entry in line has its turn. True if it was dropped.

        `is_any`: drop it even if it was read.
        """
        entry = self._next_in_line()
        if entry.is_used and not is_any:
            entry.is_used = False
            self._line.append(entry)
            return False
        self.counts.evicted_bytes += entry.size
        self.drop(entry.key)
        return True

    def _next_in_line(self) -> Entry[K, V]:
        """Take the first entry out of the line, and those before it that were dropped already."""
        while True:
            entry = self._line.popleft()
            if entry.copy is not None:
                return entry

    def _sweep_line(self) -> None:
        """Take dropped entries out of the line, a few for each that was dropped since."""
        for _ in range(4):
            entry = self._line.popleft()
            if entry.copy is not None:
                self._line.append(entry)


def _empty(entry: Entry[K, V]) -> None:
    """Drop the references to copy and answer."""
    entry.stop_answering()
    entry.edition += 1
    entry.answer = entry.copy = None  # type: ignore[assignment]
