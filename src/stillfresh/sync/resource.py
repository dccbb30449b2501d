"""The objects that threads call: a resource without an event loop.

The hit is written out here, as in `engine/resource.py`. `engine/thread_face.py` says what else a
thread reads by itself. Everything else runs on the loop thread.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, Never, ParamSpec, Protocol, Self, TypeVar, Unpack

from stillfresh.durations import Duration, seconds
from stillfresh.engine import (
    Answer,
    Change,
    Changing,
    Explanation,
    Loaded,
    OwnTerms,
    Read,
    Refreshed,
    Resource,
    Stored,
)
from stillfresh.engine.thread_face import ThreadFace, in_caller
from stillfresh.errors import StillfreshError, refuse_with
from stillfresh.stores.versions import Version

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")
P = ParamSpec("P")


class Run(Protocol):
    """Calls a coroutine function of the engine, in this thread or on the loop thread."""

    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...


class SyncChanging(Generic[V]):
    """Returned by `changing(key)`; used with `with`. `put` stores the value you wrote."""

    def __init__(self, run: Run, changing: Changing[Any, V]) -> None:
        self._run = run
        self._changing = changing

    @property
    def token(self) -> str:
        """The token of the change, when the value is stored or the block has ended."""
        return self._changing.token

    def __enter__(self) -> Self:
        try:
            self._run(self._changing.__aenter__)
            self._changing.note_inside()
            return self  # noqa: TRY300 (a handler may raise here, too)
        except StillfreshError:
            raise
        except BaseException:  # of a signal's handler: `with` does not call `__exit__` now
            self._changing.note_outside()
            with suppress(StillfreshError):
                self._run(self._changing.give_up)
            raise

    def put(
        self, value: V | Loaded[V], *, version: Version | None = None, **terms: Unpack[OwnTerms]
    ) -> Stored:
        """Store the value that you have written, unless somebody changed the key since `changing`.

        Then nothing is stored, the key is invalidated, and the result says so.
        """
        return self._run(self._changing.put, value, version=version, **terms)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._changing.note_outside()
            self._run(self._changing.__aexit__, kind, error, traceback)
        except StillfreshError:
            raise
        except BaseException:  # of a signal's handler: the change would stay open
            self._run(self._changing.__aexit__, kind, error, traceback)
            raise


class SyncHandle(Generic[V]):
    """One entry of a resource. Each method does what the resource's method does for its key."""

    __slots__ = ("_key", "_resource")

    def __init__(self, resource: "SyncResource[Any, V]", key: object) -> None:
        self._resource = resource
        self._key = key

    def get(
        self,
        max_age: Duration | None = None,
        patience: Duration | None = None,
        at_least: str | None = None,
    ) -> Answer[V]:
        """Return the answer, from memory, the store or a load. Raises LoadFailed.

        `max_age`: an older copy counts as EXPIRED. `patience`: wait no longer for a load, and take
        the old copy then. `at_least`: accept nothing older than the change with this token.
        """
        return self._resource.get(self._key, max_age, patience=patience, at_least=at_least)

    def peek(self) -> Answer[V] | None:
        """Return what memory holds, or None. Loads nothing."""
        return self._resource.peek(self._key)

    def refresh(self) -> Answer[V]:
        """Load it now, at any age, and return the answer. Raises LoadFailed."""
        return self._resource.refresh(self._key)[self._key]

    def put(
        self, value: V | Loaded[V], *, version: Version | None = None, **terms: Unpack[OwnTerms]
    ) -> Stored:
        """Store a value that you know, for example after a write. The last put wins.

        With `version`, a copy with a greater version stays. The terms are `fresh_for`, `stale_for`
        and `error_for`. Raises ConfigError or StoreError.
        """
        return self._resource.put(self._key, value, version=version, **terms)

    def update(self, change: Change[V]) -> Answer[V] | None:
        """Store what `change` makes of the present answer, or of None. No other change is lost.

        `change` may be called again. Returns the answer afterwards, or None.
        """
        return self._resource.update(self._key, change)

    def changing(self) -> SyncChanging[V]:
        """Write through: `with handle.changing() as change:`, and inside `change.put(value)`."""
        return self._resource.changing(self._key)

    def invalidate(self, *, soft: bool = False) -> str:
        """Invalidate it: the next read waits for a load, and gets the old copy if that fails.

        `soft`: reads get the old copy while it is refreshed. Returns the token of this change, for
        `get(at_least=…)`. Raises StoreError.
        """
        return self._resource.invalidate(self._key, soft=soft)

    def delete(self) -> str:
        """Delete the copy. Returns the token of this change."""
        return self._resource.delete(self._key)

    def explain(self) -> Explanation:
        """Return the state of the entry: its age, its verdict, who loads it, and when."""
        return self._resource.explain(self._key)


class SyncResource(ThreadFace[K, V]):
    """Values by key, made by `@cache.batched`. `prices(key)` returns the value itself.

    The call raises KeyError if the upstream has no such key, and LoadFailed if there is nothing to
    serve and the load failed. Each method does what the method of `Resource` does.
    """

    __name__: str
    __wrapped__: Callable[..., Any]
    what = "batched resource"

    def __init__(self, run: Run, resource: Resource[K, V]) -> None:
        super().__init__(resource)
        self._run = run
        self._resource = resource

    def __call__(self, key: K, *others: Never) -> V:
        """Return the value. Raises KeyError if it does not exist, LoadFailed if loading fails."""
        if others:
            raise self._one_key(key, *others)
        try:
            entry = self.entry_by_key[key]
        except (KeyError, TypeError):  # as in `ThreadFace.hit`
            pass
        else:
            clock = self._clock
            answer = entry.answer
            now = clock()
            if now < entry.until and entry.answer is answer and answer.found:
                reads = self.thread_reads.counts
                if entry.is_used:
                    for _ in reads.unsampled:  # as in `ReadCounts.hit`
                        return answer.value
                reads.hit(entry, answer, now)
                return answer.value
            confirmed = self.confirmed(key, waits=_may_wait())
            if confirmed is not None and confirmed.found:
                return confirmed.value
        return self._run(self._resource, key)

    def get(
        self,
        key: K,
        max_age: Duration | None = None,
        patience: Duration | None = None,
        at_least: str | None = None,
    ) -> Answer[V]:
        """Return the answer, from memory, the store or a load. Raises LoadFailed.

        `max_age`: an older copy counts as EXPIRED, so the call waits for a load. `patience`: wait
        no longer for a load, and take the old copy then; the loader runs in another thread.
        `at_least`: accept nothing older than the change with this token.
        """
        if patience is not None:  # a mistake in it is told now, not when the upstream is slow
            patience = seconds(patience, name="patience")
        if max_age is None and at_least is None:
            answer = self.hit(key) or self.confirmed(key, waits=_may_wait())
            if answer is not None:
                return answer
        return self._run(self._resource.get, key, max_age, patience=patience, at_least=at_least)

    def get_nowait(self, key: K) -> Answer[V] | None:
        """Return the answer if this thread can give it by itself, or None. Counted as a read."""
        return self.hit(key) or self.confirmed(key)

    def get_stored(self, key: K) -> Answer[V] | None:
        """Return the stored copy, however old, or None if there is none. Loads nothing."""
        return self._run(self._resource.get_stored, key)

    def read(self, key: K, load: Callable[[], object]) -> Read[V]:
        """Return the answer; if a load is needed, `load` makes the value, as `Resource.read` does.

        `load` is a plain function. If this caller waits for it, it runs in this thread.
        """
        if (answer := self.get_nowait(key)) is not None:
            return answer
        return self._run(self._resource.read, key, load)

    def get_many(
        self,
        keys: Iterable[K],
        max_age: Duration | None = None,
        patience: Duration | None = None,
        at_least: str | None = None,
    ) -> dict[K, Answer[V]]:
        """Return an answer for each key. The answer of a failed load has `error`."""
        if patience is not None:
            patience = seconds(patience, name="patience")
        answers, others = self._split(keys, max_age, at_least)
        if isinstance(others, list) and not others:
            return answers
        loaded = self._run(
            self._resource.get_many, others, max_age, patience=patience, at_least=at_least
        )
        return answers | loaded if answers else loaded

    def known(self, keys: Iterable[K], *, max_age: Duration | None = None) -> dict[K, Answer[V]]:
        """Return the answers that memory or the store can give. Loads nothing."""
        answers, others = self._split(keys, max_age)
        if isinstance(others, list) and not others:
            return answers
        stored = self.stored(others) if max_age is None and isinstance(others, list) else None
        if stored is not None:
            return answers | stored
        return answers | self._run(self._resource.known, others, max_age=max_age)

    def _split(
        self, keys: Iterable[K], max_age: Duration | None, at_least: str | None = None
    ) -> tuple[dict[K, Answer[V]], Iterable[K]]:
        """The answers at hand, and the other keys. A caller's generator runs in its own thread."""
        if not _are_many(keys):  # the call on the loop refuses it
            return {}, keys
        if max_age is None and at_least is None:
            return self.at_hand(keys)
        return {}, list(keys)

    def peek(self, key: K) -> Answer[V] | None:
        """Return what memory holds, or None. Loads nothing."""
        return self._resource.peek(key)

    def refresh(self, *keys: K) -> dict[K, Answer[V]]:
        """Load the keys now, at any age; return their answers. Raises LoadFailed if one failed."""
        return self._run(self._resource.refresh, *keys)

    def refresh_many(self, keys: Iterable[K]) -> dict[K, Refreshed[V]]:
        """Load the keys now, at any age, and return what became of each."""
        if _are_many(keys):  # the call on the loop refuses other values
            keys = list(keys)  # a caller's generator runs in its own thread
        return self._run(self._resource.refresh_many, keys)

    def put(
        self,
        key: K,
        value: V | Loaded[V],
        *,
        version: Version | None = None,
        **terms: Unpack[OwnTerms],
    ) -> Stored:
        """Store a value that you know, for example after a write. The last put wins.

        With `version`, a copy with a greater version stays. The terms are `fresh_for`, `stale_for`
        and `error_for`. Raises ConfigError or StoreError.
        """
        return self._run(self._resource.put, key, value, version=version, **terms)

    def put_many(
        self,
        values: Mapping[K, V | Loaded[V]],
        *,
        version: Version | None = None,
        **terms: Unpack[OwnTerms],
    ) -> dict[K, Stored]:
        """Store many values. If one of them cannot be encoded, none is stored."""
        return self._run(self._resource.put_many, values, version=version, **terms)

    def add(
        self,
        key: K,
        value: V | Loaded[V],
        *,
        version: Version | None = None,
        **terms: Unpack[OwnTerms],
    ) -> Stored:
        """Store a value if there is no fresh copy; the result says whether it was stored."""
        return self._run(self._resource.add, key, value, version=version, **terms)

    def touch(self, key: K, **terms: Unpack[OwnTerms]) -> Stored:
        """Give a fresh copy new times that count from now, and leave its value."""
        return self._run(self._resource.touch, key, **terms)

    def update(self, key: K, change: Change[V]) -> Answer[V] | None:
        """Store what `change` makes of the present answer, or of None. No other change is lost.

        `change` is called in this thread.
        """

        async def change_in_caller(answer: Answer[V] | None) -> object:
            return await in_caller(partial(change, answer))

        return self._run(self._resource.update, key, change_in_caller)

    def changing(self, key: K) -> SyncChanging[V]:
        """Write through: `with prices.changing(key) as change:`, and inside `change.put(value)`.

        The key's copy is STALE, and its lease yours, before your write to the database begins. If
        anybody changes the key meanwhile, `change.put` stores nothing. Leaving the block without a
        stored value, or with an exception, invalidates the key.
        """
        return SyncChanging(self._run, self._resource.changing(key))

    def invalidate(self, *keys: K, soft: bool = False) -> str:
        """Invalidate the keys: the next read waits for a load, and gets the old copy if that fails.

        `soft`: reads get the old copy while it is refreshed. Returns the token of this change, for
        `get(at_least=…)`. Raises StoreError.
        """
        return self._run(self._resource.invalidate, *keys, soft=soft)

    def invalidate_all(self, *, soft: bool = False) -> int:
        """Invalidate every entry of this resource, in all processes; return how many there are.

        `soft`: reads get the old copies while they are refreshed. Raises StoreError.
        """
        return self._run(self._resource.invalidate_all, soft=soft)

    def delete(self, *keys: K) -> str:
        """Delete the copies. The next read loads, and has no old copy if the load fails.

        Returns the token of this change.
        """
        return self._run(self._resource.delete, *keys)

    def remove(self, key: K) -> bool:
        """Delete one copy; return True if it was fresh. Of many callers at once, one gets True."""
        return self._run(self._resource.remove, key)

    def clear(self) -> None:
        """Delete every entry of this resource, in all processes. Raises StoreError."""
        self._run(self._resource.clear)

    def of(self, key: K) -> SyncHandle[V]:
        """Return the handle of one entry."""
        self._resource.of(key)
        return SyncHandle(self, key)

    def explain(self, key: K) -> Explanation:
        """Return the state of an entry: its age, its verdict, who loads it, and when."""
        return self._run(self._resource.explain, key)


def _may_wait() -> bool:
    """False if this thread runs an event loop, which a wait would block."""
    return asyncio._get_running_loop() is None  # noqa: SLF001 (None, where others raise)


def _are_many(keys: Iterable[object]) -> bool:
    """False for a value that `get_many` refuses: a text, and what is no collection."""
    return isinstance(keys, Iterable) and not isinstance(keys, str | bytes)


refuse_with(SyncChanging, "this is a change of a SyncCache; write `with`", is_async=True)
