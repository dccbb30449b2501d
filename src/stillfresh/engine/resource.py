"""The public objects of a cache: `Resource` for batched loaders, and handles of entries.

The hit is written out twice, in `get` and in the call: one lookup, one clock reading, one count.
Python 3.11 reads a dict by `[...]` faster than by `get`, so a key that memory lacks is a KeyError.
What the hit calls has a local name first: an attribute of an instance is found faster than a method
that is one. Everything else is in `core.py`.
"""

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from functools import cached_property, update_wrapper
from typing import Any, Generic, Never, NoReturn, TypeAlias, TypeVar, Unpack, cast

from stillfresh.bounded import SLICE, sliced
from stillfresh.durations import Duration, seconds
from stillfresh.engine.at_least import at_least_of
from stillfresh.engine.changing import Changing
from stillfresh.engine.coroutine_names import class_named_after, name_of
from stillfresh.engine.counts import ResourceStats
from stillfresh.engine.explain import Explanation
from stillfresh.engine.face import Face
from stillfresh.engine.keys import MAX_KEY, checked_text
from stillfresh.engine.memo import Memo, memo_of
from stillfresh.engine.model import (
    KEEP,
    Answer,
    Loaded,
    Outcome,
    OwnLoad,
    OwnTerms,
    Read,
    Refreshed,
    RefreshEnd,
    Stored,
    all_answered,
    answered,
)
from stillfresh.engine.rules import FOR_EVER
from stillfresh.engine.update import Change
from stillfresh.engine.watch import Update, Watch
from stillfresh.engine.work import Waiter
from stillfresh.errors import ConfigError, LoadFailed, RaisedByLoader, shown
from stillfresh.freshness import Policy
from stillfresh.stores.contract import When
from stillfresh.stores.versions import Version

K = TypeVar("K", bound=Hashable)
B = TypeVar("B", bound=str | int)
V = TypeVar("V")

SMALL = 10**18  # an int that is surely no longer than a key may be
LEAST = -SMALL

LoadedBatch: TypeAlias = Mapping[B, V | Loaded[V] | Exception]
AsyncLoader: TypeAlias = Callable[[list[B]], Coroutine[Any, Any, LoadedBatch[B, V]]]
BatchLoader: TypeAlias = AsyncLoader[B, V] | Callable[[list[B]], LoadedBatch[B, V]]


def like_function(
    face: Any,  # noqa: ANN401 (its class has no such attributes)
    function: Callable[..., object],
    signature: inspect.Signature,
) -> None:
    """Give an object the name, signature and kind of the function that it stands for.

    From Python 3.11 on, `inspect` accepts any object that has all attributes of a function.
    """
    update_wrapper(face, function, updated=())
    for name, value in getattr(function, "__dict__", {}).items():
        if not hasattr(face, name):  # its `__dict__` stays unused: using it would slow down a hit
            setattr(face, name, value)
    face.__signature__ = signature
    face.__code__ = type(face).__call__.__code__
    face.__defaults__ = face.__kwdefaults__ = None


class Handle(Generic[V]):
    """One entry of a resource. Each method does what the resource's method does for its key."""

    __slots__ = ("_key", "_resource")

    def __init__(self, resource: "Resource[Any, V]", key: object) -> None:
        self._resource = resource
        self._key = key

    async def get(
        self,
        max_age: Duration | None = None,
        patience: Duration | None = None,
        at_least: str | None = None,
    ) -> Answer[V]:
        """Return the answer, from memory, the store or a load. Raises LoadFailed.

        `max_age`: an older copy counts as EXPIRED. `patience`: wait no longer for a load, and take
        the old copy then. `at_least`: accept nothing older than the change with this token.
        """
        return await self._resource.get(self._key, max_age, patience=patience, at_least=at_least)

    def peek(self) -> Answer[V] | None:
        """Return what memory holds, or None. Loads nothing."""
        return self._resource.peek(self._key)

    async def refresh(self) -> Answer[V]:
        """Load it now, at any age, and return the answer. Raises LoadFailed."""
        answers = await self._resource.refresh(self._key)
        return answers[self._key]

    async def put(
        self, value: V | Loaded[V], *, version: Version | None = None, **terms: Unpack[OwnTerms]
    ) -> Stored:
        """Store a value that you know, for example after a write. The last put wins.

        With `version`, a copy with a greater version stays. The terms are `fresh_for`, `stale_for`
        and `error_for`. Raises ConfigError or StoreError.
        """
        return await self._resource.put(self._key, value, version=version, **terms)

    async def update(self, change: Change[V]) -> Answer[V] | None:
        """Store what `change` makes of the present answer, or of None. No other change is lost.

        `change` may be called again. Returns the answer afterwards, or None.
        """
        return await self._resource.update(self._key, change)

    def changing(self) -> Changing[Any, V]:
        """Write through: `async with entry.changing() as change:`, and inside `change.put(…)`."""
        return self._resource.changing(self._key)

    async def invalidate(self, *, soft: bool = False) -> str:
        """Invalidate it: the next read waits for a load, and gets the old copy if that fails.

        `soft`: reads get the old copy while it is refreshed. Returns the token of this change, for
        `get(at_least=…)`. Raises StoreError.
        """
        return await self._resource.invalidate(self._key, soft=soft)

    async def delete(self) -> str:
        """Delete the copy. Returns the token of this change."""
        return await self._resource.delete(self._key)

    def watch(
        self,
        *,
        tell: Callable[[Update[Any, V]], object] | None = None,
        end: Callable[[], object] | None = None,
    ) -> Watch[Any, V]:
        """Keep it fresh inside `with`. Iterate over the watch to receive each new copy.

        Or give `tell`, which is called with each `Update`; `end` is called when the watch ends.
        """
        return self._resource.watch(self._key, tell=tell, end=end)

    async def explain(self) -> Explanation:
        """Return the state of the entry: its age, its verdict, who loads it, and when."""
        return await self._resource.explain(self._key)


class Resource(Face[K, V]):
    """Values by key, made by `@cache.batched`. `await prices(key)` returns the value itself.

    The call raises KeyError if the upstream has no such key, and LoadFailed if there is nothing to
    serve and the load failed.
    """

    __name__: str
    __wrapped__: Callable[..., Any]
    what = "batched resource"
    watch_of: type[Watch[Any, Any]] = Watch
    """What `watch` makes."""

    @cached_property
    def handle_class(self) -> type[Handle[V]]:
        """The class of handles; their coroutines are named after the function."""
        function = self.core.spec.function
        if function is None:
            return Handle
        return class_named_after(Handle, f"{name_of(function)}.of(...)")

    async def __call__(self, key: K, *others: Never) -> V:
        """Return the value. Raises KeyError if it does not exist, LoadFailed if loading fails."""
        if others:
            raise self._one_key(key, *others)
        try:
            entry = self.entry_by_key[key]
        except KeyError:
            pass
        except TypeError:
            raise self._no_key(key) from None
        else:
            clock = self._clock
            answer = entry.answer
            if clock() < entry.until and answer.found:
                if entry.is_used:
                    for _ in self._reads.unsampled:  # as in `ReadCounts.hit`
                        return answer.value
                self._reads.hit(entry, answer, clock())
                return answer.value
            known = self.core.reads.from_entry(key, entry, clock())
            if known is not None:
                return value_or_key_error(known, key)
        outcome = await self.core.reads.answer(key, FOR_EVER, self.core.spec.patience)
        return value_or_key_error(answer_or_raise(outcome), key)

    async def get(
        self,
        key: K,
        max_age: Duration | None = None,
        patience: Duration | None = None,
        at_least: str | None = None,
    ) -> Answer[V]:
        """Return the answer, from memory, the store or a load.

        `max_age`: for this call, an older copy counts as EXPIRED, so the call waits for a load.
        `patience`: wait no longer than this for a load, and then take the old copy, EXPIRED, if it
        may be served on an error; else LoadTimeout is raised. The load goes on, and is stored.
        `at_least`: a token of a change, which `put`, `invalidate` and others return. The answer is
        no older than that change, in any process that shares the store. A key that the upstream
        lacks has an answer with `found` False. Raises LoadFailed if there is nothing to serve and
        the load failed.
        """
        if patience is not None:  # a mistake in it is told now, not when the upstream is slow
            patience = seconds(patience, name="patience")
        try:
            entry = self.entry_by_key[key]
        except KeyError:
            pass
        except TypeError:
            raise self._no_key(key) from None
        else:
            if max_age is None and at_least is None:
                clock = self._clock
                if clock() < entry.until:
                    if entry.is_used:
                        for _ in self._reads.unsampled:  # as in `ReadCounts.hit`
                            return entry.answer
                    self._reads.hit(entry, entry.answer, clock())
                    return entry.answer
                known = self.core.reads.from_entry(key, entry, clock())
                if known is not None:
                    return known
        limit = FOR_EVER if max_age is None else _limit(max_age)
        seen = None if at_least is None else at_least_of(at_least)
        outcome = await self.core.reads.answer(key, limit, self._patience(patience), seen)
        return answer_or_raise(outcome)

    def _patience(self, patience: Duration | None) -> float | None:
        """The caller's own, or the resource's."""
        if patience is None:
            return self.core.spec.patience
        return seconds(patience, name="patience")

    async def get_many(
        self,
        keys: Iterable[K],
        max_age: Duration | None = None,
        patience: Duration | None = None,
        at_least: str | None = None,
    ) -> dict[K, Answer[V]]:
        """Return an answer for each key. Raises nothing for a failed load: its answer has `error`.

        `max_age`, `patience` and `at_least` are those of `get`.
        """
        wanted = await self._unique(keys, "get_many")
        answers: dict[K, Answer[V]] = {}
        waiter: Waiter[K, V] = Waiter(max_age=_limit(max_age), patience=self._patience(patience))
        waiter.at_least = None if at_least is None else at_least_of(at_least)
        outcomes = await self.core.reads.answers(wanted, waiter)
        async for batch in sliced(wanted):
            answers |= all_answered(outcomes, batch, self._clock)
        return answers

    def get_nowait(self, key: K) -> Answer[V] | None:
        """Return the answer that `get` would return without waiting, or None: then await `get`.

        It is from memory, and counted as a read.
        """
        try:
            entry = self.entry_by_key.get(key)
        except TypeError:
            raise self._no_key(key) from None
        if entry is None:
            return None
        return self.core.reads.from_entry(key, entry, self._clock())

    def last_answer(self, key: K) -> Answer[V] | None:
        """Return the answer that memory holds as it was made, however old by now, or None.

        It is neither checked nor counted as a read: for what a load should know of the old copy.
        """
        return self.core.memory.last_answer(key)

    def memo(self, keys: Sequence[K]) -> tuple[Memo[K, V], list[Answer[V]]] | None:
        """Return a memo of these keys' answers in memory, and the answers.

        A layer that builds something from these answers keeps the memo with it: while
        `Memo.read` confirms the memo, what was built can be served again.
        None if an answer is not in memory, or may not be served again as it is: it is not fresh,
        absent or failed.
        """
        return memo_of(self, keys)

    def count_read(self, key: K, answer: Answer[V], *, is_recorded: bool = False) -> None:
        """Count a read that the caller answered by itself, from this answer.

        `is_recorded`: a recording has this read already.
        """
        self._reads.note(key, answer, self._clock())
        if not is_recorded:
            self.core.owner.note(self.core, [key], "read")

    async def get_stored(self, key: K) -> Answer[V] | None:
        """Return the stored copy, however old, or None if there is none or it is GONE.

        Loads nothing, and is not counted as a read. While the store does not answer, the copy in
        memory is returned, with `unverified`. Inside `at_least()` the store alone answers, without
        waiting for an outbox. An invalidated copy is returned there, too: look at its `mark`.
        """
        return await self.core.reads.stored(key)

    async def read(self, key: K, load: OwnLoad, *, anew: bool = False) -> Read[V]:
        """Return the answer; if a load is needed, `load` makes the value.

        Of several callers at once, the first caller's `load` runs for all. `anew`: load at any age.
        If `load` returns a `Private`, its caller gets that, and the others find the key absent. A
        LoadFailed is returned, not raised. The resource must load one key at a time.
        """
        return await self.core.reads.read(key, load, anew=anew)

    async def known(
        self,
        keys: Iterable[K],
        *,
        unread: set[K] | None = None,
        max_age: Duration | None = None,
    ) -> dict[K, Answer[V]]:
        """Return the answers that memory or the store can give. Loads nothing, waits for no load.

        Keys that could not be read because the store failed are added to `unread`. Copies older
        than `max_age` are left out.
        """
        outcomes = await self.core.reads.known(
            await self._unique(keys, "known"), unread, _limit(max_age)
        )
        return all_answered(outcomes, outcomes, self._clock)

    def peek(self, key: K) -> Answer[V] | None:
        """Return what memory holds, or None. No await, no load.

        It is FRESH only if that is known without waiting: within `memory_for`, by push, or from a
        store that is read inline. Otherwise it is STALE at best, with `unverified`. For a token of
        another cache (`at_least`), and in a loader, only such a store says so.
        """
        try:
            entry = self.entry_by_key.get(key)
        except TypeError:
            raise self._no_key(key) from None
        if entry is not None:
            clock = self._clock
            if clock() < entry.until:
                return entry.answer
        return self.core.reads.peek(key)

    async def refresh(self, *keys: K) -> dict[K, Answer[V]]:
        """Load the keys now, at any age, and return their answers. Raises LoadFailed if one failed.

        A load that has begun already counts, unless the key was invalidated since then.
        """
        outcomes = await self.core.reads.answers(await self._unique(keys), anew=True)
        answers: dict[K, Answer[V]] = {}
        async for batch in sliced(outcomes.items()):
            for key, outcome in batch:
                answers[key] = answer_or_raise(outcome)
        return answers

    async def refresh_many(self, keys: Iterable[K]) -> dict[K, Refreshed[V]]:
        """Load the keys now, at any age, and return what became of each.

        Raises nothing for a failed load. The result says whether the store has the new copy.
        """
        wanted = await self._unique(keys, "refresh_many")
        waiter: Waiter[K, V] = Waiter()
        outcomes = await self.core.reads.answers(wanted, waiter, anew=True)
        results: dict[K, Refreshed[V]] = {}
        for start in range(0, len(wanted), SLICE):
            if start > 0:
                await asyncio.sleep(0)
            for key in wanted[start : start + SLICE]:
                results[key] = self._refreshed(outcomes[key], waiter.notes.not_stored.get(key))
        return results

    def _refreshed(self, outcome: Outcome[V], not_stored: RefreshEnd | None) -> Refreshed[V]:
        """`not_stored`: why the store does not have the copy, if so."""
        if isinstance(outcome, LoadFailed):
            return Refreshed(answered(outcome, self._clock), RefreshEnd.FAILED)
        if outcome.error is not None:
            return Refreshed(outcome, RefreshEnd.FAILED)
        return Refreshed(outcome, not_stored or RefreshEnd.STORED)

    async def put(
        self,
        key: K,
        value: V | Loaded[V],
        *,
        version: Version | None = None,
        **terms: Unpack[OwnTerms],
    ) -> Stored:
        """Store a value that you know, for example after a write. The last put wins.

        A load under way is superseded. The next read in every process gets the value. Watchers
        receive it; those in other processes at once if the store pushes changes. With `version`, an
        integer or a text, the value is not stored if the stored copy has a greater version; the
        result says so. Terms (`fresh_for`, `stale_for`, `error_for`) that are left out are the
        resource's. Raises ConfigError if the value cannot be stored, and StoreError if the store
        did not confirm it.
        """
        stored = await self.core.puts.put([(key, value)], terms, version=version)
        return stored[key]

    async def put_many(
        self,
        values: Mapping[K, V | Loaded[V]],
        *,
        version: Version | None = None,
        **terms: Unpack[OwnTerms],
    ) -> dict[K, Stored]:
        """Store many values, 100 keys in one step. If one value cannot be encoded, none is stored.

        `version` is for all of them; a `Loaded` may have its own.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{self.core.spec.kind}.put_many: takes a mapping from key to value, "
                f"not {shown(values)}"
            )
        return await self.core.puts.put(dict(values).items(), terms, version=version)

    async def add(
        self,
        key: K,
        value: V | Loaded[V],
        *,
        version: Version | None = None,
        **terms: Unpack[OwnTerms],
    ) -> Stored:
        """Store a value as `put` does, but only if there is no fresh copy.

        Of several callers at once, in any process, the result of one says that it was stored.
        """
        pairs = [(key, value)]
        stored = await self.core.puts.put(pairs, terms, version=version, when=When.NO_LIVE_COPY)
        return stored[key]

    async def touch(self, key: K, **terms: Unpack[OwnTerms]) -> Stored:
        """Give a fresh copy new times that count from now, and leave its value.

        Terms that are left out are the resource's. If there is no fresh copy, nothing is stored,
        and the result says so.
        """
        stored = await self.core.puts.put([(key, Loaded(KEEP))], terms, when=When.LIVE_COPY)
        return stored[key]

    async def update(self, key: K, change: Change[V]) -> Answer[V] | None:
        """Publish what `change` makes of the present value. No other change is lost.

        `change` is called with the answer there is, however old, or with None. It returns a value,
        a `Loaded`, an `Amended` (which keeps the copy's age and terms), `LEAVE` or `DELETE`. It is
        called again if another process changed the entry meanwhile. Returns the answer afterwards,
        or None.
        """
        return await self.core.updates.update(key, change)

    def changing(self, key: K) -> Changing[K, V]:
        """Write through: `async with prices.changing(key) as change:`, and inside `change.put(…)`.

        The key's copy is STALE, and its lease yours, before your write to the database begins. If
        anybody changes the key meanwhile, `change.put` stores nothing. Leaving the block without a
        stored value, or with an exception, invalidates the key.
        """
        return Changing(self.core, key)

    async def invalidate(self, *keys: K, soft: bool = False) -> str:
        """Invalidate the keys: the next read waits for a load, and gets the old copy if that fails.

        `soft`: reads get the old copy while it is refreshed. A load that began before is never
        published as fresh. Returns the token of this change, for `get(at_least=…)`. Raises
        StoreError.
        """
        wanted = await self._unique(keys)
        if sys.flags.dev_mode:
            await self.core.look_for_missing(wanted)
        return await self.core.invalidate(wanted, soft=soft)

    async def invalidate_all(self, *, soft: bool = False) -> int:
        """Invalidate every entry of this resource, in all processes; return how many there are.

        `soft` is that of `invalidate`. Raises StoreError.
        """
        return await self.core.invalidate_all(soft=soft)

    async def delete(self, *keys: K) -> str:
        """Delete the copies. The next read loads, and has no old copy if the load fails.

        Returns the token of this change. Raises StoreError.
        """
        return await self.core.delete(await self._unique(keys))

    async def remove(self, key: K) -> bool:
        """Delete one copy; return True if it was fresh. Of many callers at once, one gets True.

        Raises StoreError.
        """
        return await self.core.updates.remove(key)

    async def clear(self) -> None:
        """Delete every entry of this resource, in all processes. Raises StoreError."""
        await self.core.clear()

    def watch(
        self,
        *keys: K | Iterable[K],
        tell: Callable[[Update[K, V]], object] | None = None,
        fail: Callable[[Update[K, V]], object] | None = None,
        end: Callable[[], object] | None = None,
    ) -> Watch[K, V]:
        """Keep keys fresh inside `with`. Keys are given one by one, or as one list.

        Iterate over the watch (`async for update in watch`) to receive each new copy. Or give
        `tell`, which is called with each `Update`. `fail` is called when a refresh failed, with
        what is left and its `error`. `end` is called when the watch ends, by you or with the cache.
        """
        return self.watch_of(self.core.watcher, _flat(keys), tell=tell, fail=fail, end=end)

    @property
    def policy(self) -> Policy:
        """The times of copies that have none of their own."""
        return self.core.spec.terms.policy

    @property
    def loads_by_key(self) -> bool:
        """True if a key is enough to load its entry: not for a function, which needs arguments."""
        return self.core.spec.by_id

    def key_of(self, id_: str) -> K:
        """Return the key whose id in the store this is. Raises ConfigError if there is none."""
        try:
            key = self.core.names.key(id_)
            if self.core.names.text(key) == id_:  # not another spelling, such as 07
                return key
        except (ConfigError, ValueError):
            pass
        raise ConfigError(f"{self.core.spec.kind}: {shown(id_)} is not the id of a key")

    async def stats(self) -> ResourceStats:
        """Return the counts of this resource."""
        return await self.core.stats()

    @property
    def watched(self) -> tuple[K, ...]:
        """The keys that are watched now."""
        return tuple(self.core.watcher.watched)

    def of(self, key: K) -> Handle[V]:
        """Return the handle of one entry."""
        self.core.names.text(key)
        return self.handle_class(self, key)

    def forget(self, *keys: K, tag: str | None = None) -> None:
        """Drop keys, and entries with this tag, from memory; loads that run now are not kept.

        The store is not told: `invalidate` does that.
        """
        self.core.changes.overtake(keys, voids=False)
        if tag is not None:
            self.core.changes.overtake_tag(tag)

    def is_full(self, key: K) -> bool:
        """Return True if no load of this key runs, and `concurrency` other keys are loaded."""
        return self.core.is_full(key)

    async def has_live_load(self, key: K) -> bool:
        """Return True if this process loads the key, and nothing has invalidated it since then."""
        return await self.core.is_live(key)

    async def settled(self, within: Duration) -> bool:
        """Wait until no load runs. Return False if one still runs after that time."""
        return await self.core.settled(seconds(within, name="within"))

    async def explain(self, key: K) -> Explanation:
        """Return the state of an entry: its age, its verdict, who loads it, and when."""
        return await self.core.explain(key)

    async def _unique(self, keys: Iterable[K], method: str = "") -> list[K]:
        if isinstance(keys, str | bytes):
            why = f"{method}: takes many keys; write {method}([{keys!r}])"
            raise ConfigError(f"{self.core.spec.kind}.{why}")
        if not isinstance(keys, Iterable):
            why = f"{method}: takes many keys, such as a list, not {shown(keys)}"
            raise ConfigError(f"{self.core.spec.kind}.{why}")
        listed = list(keys)
        if len(listed) > SLICE:
            async for batch in sliced(listed):
                self.core.names.check(batch)  # before anything is done with one
        try:
            return listed if len(set(listed)) == len(listed) else list(dict.fromkeys(listed))
        except TypeError:
            raise self._no_key(*listed) from None

    def _no_key(self, *keys: K) -> ConfigError:
        """The error for an unhashable key, in the same words as for any other invalid key."""
        try:
            self.core.names.texts(keys)
        except ConfigError as exc:
            return exc
        except TypeError:  # a text of somebody's own class
            pass
        return ConfigError(f"{self.core.spec.kind}: {shown(keys)} cannot be hashed")

    def __set_name__(self, owner: type, name: str) -> NoReturn:
        raise ConfigError(
            f"{self.core.spec.kind}: {owner.__name__}.{name} is a method; decorate a function "
            f"instead, or decorate in __init__: self.{name} = cache.batched(...)(self._load)"
        )


def _limit(max_age: Duration | None) -> float:
    return FOR_EVER if max_age is None else seconds(max_age, name="max_age")


def text_of(resource: str, of: type[str] | type[int]) -> Callable[[object], str]:
    """The function that names keys of this type in the store; one call for most keys."""

    def text(key: object) -> str:
        if type(key) is int is of and LEAST < key < SMALL:
            return repr(key)
        if type(key) is str is of and 0 < len(key) <= MAX_KEY and key.isascii():
            return key
        return checked_text(resource, key, of)

    return text


def _flat(keys: Sequence[K | Iterable[K]]) -> Sequence[K]:
    """The keys, given one by one or in lists; a str is one key, not many letters."""
    if set(map(type, keys)) <= {str, int}:
        return cast("Sequence[K]", keys)
    flat: list[K] = []
    for key in keys:
        is_one = isinstance(key, str | int) or not isinstance(key, Iterable)
        flat.extend([cast("K", key)] if is_one else cast("Iterable[K]", key))
    return flat


def answer_or_raise(outcome: Outcome[V]) -> Answer[V]:
    """Return an answer; raise a new error for each caller, so that tracebacks do not pile up."""
    if isinstance(outcome, LoadFailed):
        if isinstance(outcome, RaisedByLoader):
            outcome.raise_cause()
        error = type(outcome)(*outcome.args)
        error.retry_at = outcome.retry_at
        raise error from outcome.__cause__
    return outcome


def value_or_key_error(answer: Answer[V], key: object) -> V:
    if not answer.found:
        missing = KeyError(key)
        missing.add_note(
            "The loader returned no value for this key. get() says so without an error."
        )
        raise missing
    return answer.value
