"""Values that callers store themselves; updates are in `update.py`.

A put is one step of the store, which voids the lease and stores the copy. The store orders
puts and invalidations; the last one to arrive wins. If the store cannot rule out that a put is
late, it answers AGAIN, and the put is sent once more. Before each attempt the engine looks whether
this process has invalidated the key since the call: then the value may be wrong, and the put
invalidates the key instead of storing it.

A put runs in its caller's task, so it is cancelled with it. A store raises CancelledError only when
nothing more is done for that caller. Closing waits for puts that are under way.
"""

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar, cast

from msgspec import Struct, field
from msgspec.structs import replace

from stillfresh.backoff import pause_after, spread
from stillfresh.bounded import sliced
from stillfresh.engine import rules
from stillfresh.engine.changes import StoreStep
from stillfresh.engine.fence import Start
from stillfresh.engine.model import DELETE, KEEP, Amended, Loaded, OwnTerms, Stored
from stillfresh.engine.news import Asked
from stillfresh.engine.runtime import Runtime
from stillfresh.errors import ConfigError, StoreError, error_text, shown
from stillfresh.freshness import Policy
from stillfresh.stores.contract import UNREAD, Copy, Mark, Put, PutOutcome, PutResult, When
from stillfresh.stores.versions import NO_VERSION, packed_version, unpacked_version
from stillfresh.tasks import Ending

if TYPE_CHECKING:
    from stillfresh.engine.core import Core

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SLICE: Final = 100  # keys of a put in one step of the store
EAGER_ATTEMPTS: Final = 10  # attempts without a pause after the answer AGAIN
MOST_ATTEMPTS: Final = 1_000
FIRST_PAUSE: Final = 0.0005
LONGEST_PAUSE: Final = 0.02  # seconds between two later attempts
FORGOTTEN: Final = Policy(0)  # of an update that deletes: an absence that is GONE at once


class Known(Struct, Generic[K, V], frozen=True):
    """A caller's value for one key, ready to be stored."""

    key: K
    id: str
    copy: Copy
    value: V
    tags: tuple[str, ...] | None  # None: those of the stored copy stay
    late: tuple[str, ...] | None = None  # tags that came with the value

    @property
    def every_tag(self) -> tuple[str, ...]:
        """The tags of its key, and those that came with the value."""
        return (self.tags or ()) + (self.late or ())

    def as_put(self, when: When = When.ALWAYS, seen: Copy | None = None) -> Put:
        """The step of the store; `seen`: the copy that must be there, if `when` is UNCHANGED."""
        generation = None if seen is None else seen.generation
        mark = Mark.NONE if seen is None else seen.mark
        return Put(self.copy, self.tags, self.late, when, generation, mark)


class InTurn(Struct, Generic[K], eq=False):
    """`async with InTurn(last, keys)`: one change of a key at a time, in the order of the calls.

    No generator: the end of the loop would close it in the middle of its block.
    """

    _last: dict[K, Ending]
    _keys: Sequence[K]
    _done: Ending = field(default_factory=Ending)

    async def __aenter__(self) -> None:
        last = self._last
        before = {last[key].future() for key in self._keys if key in last}
        for key in self._keys:
            last[key] = self._done
        if not before:
            return
        try:
            await asyncio.wait(before)
        except BaseException:
            self._leave_line(before)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def _leave_line(self, before: "set[asyncio.Future[None]]") -> None:
        """The caller gives up before its turn. Changes behind it wait for those before it."""
        running = {done for done in before if not done.done()}

        def note_end(done: "asyncio.Future[None]") -> None:
            running.discard(done)
            if not running:
                self._end()

        for done in tuple(running):
            done.add_done_callback(note_end)
        if not running:
            self._end()

    def _end(self) -> None:
        self._done.note()
        for key in self._keys:
            if self._last.get(key) is self._done:
                del self._last[key]


class Puts(Generic[K, V]):
    """Changes of one resource that callers make, not loaders."""

    def __init__(self, core: "Core[K, V]") -> None:
        self._core = core
        self._spec = core.spec
        self._memory = core.memory

    async def put(
        self,
        pairs: Collection[tuple[K, object]],
        terms: OwnTerms,
        *,
        version: object = None,
        when: When = When.ALWAYS,
    ) -> dict[K, Stored]:
        """Store values, given as pairs of a key and its value.

        Raises ConfigError, before any is stored, if one of them cannot be encoded; and if a stored
        version is of the other kind, when all others are stored. Nothing may change `pairs`
        meanwhile. A caller that gives up takes its put along: nothing of it acts after what the
        caller does next.
        """
        runtime = await self._core.ready()
        stored: dict[K, Stored] = {}
        mixed: list[ConfigError] = []
        with self._core.fence.starting() as start:
            slices = await self._prepare_all(runtime, pairs, terms, version)
            while slices:  # what is done is freed: all at once would hold up the loop
                values = slices.pop(0)
                if self._core.is_bypassed():
                    stored |= await self._put_past_the_cache(runtime, values)
                    continue
                with runtime.waited_for():
                    stored |= await self._put(runtime, values, start, when=when, mixed=mixed)
        if mixed:
            raise mixed[0]
        return stored

    async def _prepare_all(
        self,
        runtime: Runtime,
        pairs: Collection[tuple[K, object]],
        terms: OwnTerms,
        version: object,
    ) -> list[list[Known[K, V]]]:
        """All values, encoded, in slices of one step each."""
        sent = rules.stamped(runtime.clock())
        form = self._version_form(version)

        if len(pairs) <= SLICE:
            known = self._prepare_slice(runtime, pairs, terms, sent, form)
            return [known] if known else []
        return [
            self._prepare_slice(runtime, group, terms, sent, form)
            async for group in sliced(pairs, SLICE)
        ]

    def _prepare_slice(
        self,
        runtime: Runtime,
        group: Iterable[tuple[K, object]],
        terms: OwnTerms,
        sent: float,
        form: bytes,
    ) -> list[Known[K, V]]:
        return [
            self.prepare(runtime, key, self._spec.with_terms(given, terms), sent, version=form)
            for key, given in group
        ]

    def prepare_one(
        self, runtime: Runtime, key: K, given: object, terms: OwnTerms, version: object
    ) -> Known[K, V]:
        """Encode one value, on these terms. Raises ConfigError."""
        form = self._version_form(version)
        on_terms = self._spec.with_terms(given, terms)
        return self.prepare(runtime, key, on_terms, rules.stamped(runtime.clock()), version=form)

    def _version_form(self, version: object) -> bytes:
        if version is None:
            return NO_VERSION
        try:
            return packed_version(cast("int | str | None", version))
        except ConfigError as exc:
            raise ConfigError(f"{self._spec.kind}: {exc}") from None

    async def _put_past_the_cache(
        self, runtime: Runtime, values: Sequence[Known[K, V]]
    ) -> dict[K, Stored]:
        """Inside `bypassed()` nothing is stored, and nothing old is left."""
        keys = [known.key for known in values]
        with self._core.changes.overtaking(keys):
            await runtime.store.invalidate(self._spec.kind, [known.id for known in values])
        return {key: Stored(stored=False) for key in keys}

    def prepare(
        self,
        runtime: Runtime,
        key: K,
        given: object,
        sent: float,
        *,
        old: Copy | None = None,
        version: bytes = NO_VERSION,
    ) -> Known[K, V]:
        """Encode the value; an amended value gets the age and times of `old`."""
        spec = self._spec
        id_ = self._core.names.text(key)  # before the key is hashed: it may not be possible
        generation = runtime.new_generation()
        if given is DELETE:
            forgotten = Copy(generation, sent, FORGOTTEN, None)
            return Known(key, id_, forgotten, cast("V", None), spec.tags_of(key))
        value = given.value if isinstance(given, Amended) else given
        late: tuple[str, ...] | None = None
        if isinstance(value, Loaded):
            late = value.tags
            version = value.version_form or version
            if value.value is KEEP:
                policy = rules.own_policy(spec.terms, value)
                kept_value = Copy(generation, sent, policy, UNREAD, version=version)
                return Known(key, id_, kept_value, cast("V", None), None, late)
        try:
            copy, decoded = rules.copy_and_value(
                value, spec.terms, spec.codec, (generation, sent), runtime.dice
            )
        except Exception as exc:  # the caller's mistake, not a failed load
            why = f"{spec.kind} {key!r}: the value cannot be stored: {error_text(exc)}"
            raise ConfigError(why) from exc
        spec.mistakes.look_at_value(key, value, copy.value)
        if version:
            copy = replace(copy, version=version)
        if isinstance(given, Amended) and old is not None and old.mark is Mark.NONE:
            copy = replace(old, generation=generation, value=copy.value, version=version)
        return Known(key, id_, copy, decoded, spec.tags_of(key), late)

    async def _put(
        self,
        runtime: Runtime,
        values: Sequence[Known[K, V]],
        start: Start[K],
        *,
        when: When,
        mixed: list[ConfigError],
    ) -> dict[K, Stored]:
        """Memory takes a value only if nothing else changed the key meanwhile.

        `mixed` gets the error of each key whose stored version is of the other kind.
        """
        keys = [known.key for known in values]
        by_id = {known.id: known for known in values}
        puts = {known.id: known.as_put(when) for known in values}

        def is_void(id_: str) -> bool:
            known = by_id[id_]
            return start.is_void(known.key, known.every_tag)

        try:
            async with InTurn(self._core.loads.puts, keys):
                asked = self._memory.asked_now()
                with self._core.changes.overtaking(keys, voids=False) as step:
                    results = await self.settle(runtime, puts, is_void)
        except StoreError:
            self._memory.counts.store_errors += 1
            raise
        self._memory.counts.superseded += len(values) - len(results)
        stored: dict[K, Stored] = {}
        for known in values:
            result = results.get(known.id)
            if result is None:
                stored[known.key] = Stored(stored=False)
                continue
            if result.outcome is PutOutcome.MIXED:
                mixed.append(self.mixed_error(known, result))
            stored[known.key] = self._result_of(runtime, known, result, step, asked)
        return stored

    async def settle(
        self, runtime: Runtime, puts: Mapping[str, Put], is_void: Callable[[str], bool]
    ) -> dict[str, PutResult]:
        """Put until the store has settled each. Those that are void by then are left out.

        A void put is not stored, and its key is invalidated here: the invalidation that made it
        void may fail, and the copy from before both may not stay fresh then.
        """
        store = runtime.store
        kind = self._spec.kind
        results: dict[str, PutResult] = {}
        waiting = puts
        for attempt in range(1, MOST_ATTEMPTS + 1):
            void = [id_ for id_ in waiting if is_void(id_)]
            if void:
                await store.invalidate(kind, void)
                waiting = {id_: put for id_, put in waiting.items() if id_ not in void}
            if not waiting:
                return results
            answers = await self._put_once(runtime, waiting)
            missing = len(waiting) - len(answers)
            if missing:
                raise StoreError(f"{kind}: the servers that hold {missing} keys do not answer")
            again: dict[str, Put] = {}
            for id_, result in answers.items():
                if result.outcome is PutOutcome.AGAIN:
                    again[id_] = waiting[id_]
                else:
                    results[id_] = result
            if not again:
                return results
            waiting = again
            if attempt >= EAGER_ATTEMPTS:
                tries = attempt - EAGER_ATTEMPTS + 1
                pause = pause_after(tries, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
                await runtime.sleep(spread(pause, runtime.dice))
        raise StoreError(f"{kind}: other processes keep changing {len(waiting)} keys; try again")

    async def _put_once(self, runtime: Runtime, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        """One attempt; loads of this process that begin meanwhile wait for its end."""
        with self._core.loads.storing(puts):
            return await runtime.store.put(self._spec.kind, puts)

    def _result_of(
        self,
        runtime: Runtime,
        known: Known[K, V],
        result: PutResult,
        step: StoreStep[K],
        asked: Asked,
    ) -> Stored:
        """What the store did, for the caller; memory and watchers take a value that was stored."""
        token = ""
        if result.is_stored:
            self.note_stored(runtime, known, result, step, asked)
            token = self._core.owner.changed()
        version = unpacked_version(result.version) if result.version else None
        return Stored(stored=result.is_stored, version=version, token=token)

    def note_stored(
        self,
        runtime: Runtime,
        known: Known[K, V],
        result: PutResult,
        step: StoreStep[K],
        asked: Asked,
    ) -> None:
        """The store has stored the value: update memory and watchers, unless it was overtaken."""
        memory = self._memory
        copy = known.copy
        if copy.version != result.version:
            copy = replace(copy, version=result.version)
        memory.counts.puts += 1
        memory.counts.mended([known.id])
        memory.causes.forget(known.key)
        self._core.owner.note(
            self._core, [known.key], "delete" if copy.policy is FORGOTTEN else "put"
        )
        is_overtaken = known.key in step.changed or result.outcome is PutOutcome.REPLACED
        if self._core.runtime is not runtime or is_overtaken:
            return
        if copy.policy is FORGOTTEN or copy.value is UNREAD:
            return  # the next read asks the store
        outlook = memory.outlook(copy, memory.now())
        memory.keep(known.key, copy, known.value, outlook, asked)
        if known.late is not None:
            memory.retag(known.key, copy.generation, known.late)
        self._core.watcher.tell(known.key, copy, known.value, outlook)

    def mixed_error(self, known: Known[K, V], result: PutResult) -> ConfigError:
        given = unpacked_version(known.copy.version)
        stored = unpacked_version(result.version)
        return ConfigError(
            f"{self._spec.kind} {known.key!r}: version: {shown(given)} cannot be compared with "
            f"{shown(stored)}, which is stored; use integers only, or text only"
        )
