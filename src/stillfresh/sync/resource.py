"""The objects that threads call: a resource without an event loop.

The hit is written out here, as in `engine/resource.py`. `engine/thread_face.py` says what else a
thread reads by itself. Everything else runs on the loop thread.
"""

from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, Never, ParamSpec, Protocol, TypeVar, Unpack

from stillfresh.durations import Duration
from stillfresh.engine import (
    Answer,
    Change,
    Explanation,
    Loaded,
    OwnTerms,
    Read,
    Refreshed,
    Resource,
    Stored,
)
from stillfresh.engine.thread_face import ThreadFace, in_caller
from stillfresh.stores.versions import Version

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")
P = ParamSpec("P")


class Run(Protocol):
    """Calls a coroutine function on the loop thread, and waits for it."""

    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...


class SyncHandle(Generic[V]):
    """One entry of a resource. Each method does what the resource's method does for its key."""

    __slots__ = ("_key", "_resource")

    def __init__(self, resource: "SyncResource[Any, V]", key: object) -> None:
        self._resource = resource
        self._key = key

    def get(self, max_age: Duration | None = None) -> Answer[V]:
        """Return the answer, as `Resource.get` does."""
        return self._resource.get(self._key, max_age)

    def peek(self) -> Answer[V] | None:
        """Return what memory holds, or None. Loads nothing."""
        return self._resource.peek(self._key)

    def refresh(self) -> Answer[V]:
        """Load it now, at any age, and return the answer. Raises LoadFailed."""
        return self._resource.refresh(self._key)[self._key]

    def put(
        self, value: V | Loaded[V], *, version: Version | None = None, **terms: Unpack[OwnTerms]
    ) -> Stored:
        """Store a value that you know, as `Resource.put` does."""
        return self._resource.put(self._key, value, version=version, **terms)

    def update(self, change: Change[V]) -> Answer[V] | None:
        """Change the present value, as `Resource.update` does."""
        return self._resource.update(self._key, change)

    def invalidate(self, *, soft: bool = False) -> None:
        """Invalidate it, as `Resource.invalidate` does."""
        self._resource.invalidate(self._key, soft=soft)

    def delete(self) -> None:
        """Delete the copy."""
        self._resource.delete(self._key)

    def explain(self) -> Explanation:
        """Return the state of the entry, as `Resource.explain` does."""
        return self._resource.explain(self._key)


class SyncResource(ThreadFace[K, V]):
    """Values by key, made by `@cache.batched`. `prices(key)` returns the value itself.

    The call raises KeyError if the upstream has no such key, and LoadFailed if there is nothing to
    serve and the load failed. Each method does what the method of `Resource` does.
    """

    __name__: str
    __wrapped__: Callable[..., Any]

    def __init__(self, run: Run, resource: Resource[K, V]) -> None:
        super().__init__(resource)
        self._run = run
        self._resource = resource

    def __call__(self, key: K, *others: Never) -> V:
        """Return the value. Raises KeyError if it does not exist, LoadFailed if loading fails."""
        if others:
            raise self._one_key(key, *others)
        try:
            entry = self.entry_of(key)
        except TypeError:  # as in `ThreadFace.hit`
            entry = None
        if entry is not None:
            answer = entry.answer
            now = self._clock()
            if now < entry.until and entry.answer is answer and answer.found:
                reads = self.thread_reads.counts
                unsampled = reads.unsampled - 1
                reads.unsampled = unsampled
                if not unsampled or not entry.is_used:
                    reads.look_at(entry, answer, now)
                return answer.value
            confirmed = self.confirmed(key)
            if confirmed is not None and confirmed.found:
                return confirmed.value
        return self._run(self._resource, key)

    def get(self, key: K, max_age: Duration | None = None) -> Answer[V]:
        """Return the answer, from memory, the store or a load, as `Resource.get` does."""
        if max_age is None and (answer := self.get_nowait(key)) is not None:
            return answer
        return self._run(self._resource.get, key, max_age)

    def get_nowait(self, key: K) -> Answer[V] | None:
        """Return the answer if this thread can give it by itself, or None. Counted as a read."""
        return self.hit(key) or self.confirmed(key)

    def get_stored(self, key: K) -> Answer[V] | None:
        """Return the stored copy, however old, as `Resource.get_stored` does. Loads nothing."""
        return self._run(self._resource.get_stored, key)

    def read(self, key: K, load: Callable[[], object]) -> Read[V]:
        """Return the answer; if a load is needed, `load` makes the value, as `Resource.read` does.

        `load` is a plain function. If this caller waits for it, it runs in this thread.
        """
        if (answer := self.get_nowait(key)) is not None:
            return answer
        return self._run(self._resource.read, key, load)

    def get_many(self, keys: Iterable[K], max_age: Duration | None = None) -> dict[K, Answer[V]]:
        """Return an answer for each key. The answer of a failed load has `error`."""
        answers, others = self._split(keys, max_age)
        if not others:
            return answers
        loaded = self._run(self._resource.get_many, others, max_age)
        return answers | loaded if answers else loaded

    def known(self, keys: Iterable[K], *, max_age: Duration | None = None) -> dict[K, Answer[V]]:
        """Return the answers that memory or the store can give. Loads nothing."""
        answers, others = self._split(keys, max_age)
        if not others:
            return answers
        stored = self.stored(others) if max_age is None and isinstance(others, list) else None
        if stored is not None:
            return answers | stored
        return answers | self._run(self._resource.known, others, max_age=max_age)

    def _split(
        self, keys: Iterable[K], max_age: Duration | None
    ) -> tuple[dict[K, Answer[V]], Iterable[K]]:
        """The answers at hand, and the other keys. A caller's generator runs in its own thread."""
        if isinstance(keys, str | bytes):  # the call on the loop refuses it
            return {}, keys  # type: ignore[return-value]
        if max_age is None:
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
        if not isinstance(keys, str | bytes):  # the call on the loop refuses it
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
        """Store a value that you know, for example after a write, as `Resource.put` does."""
        return self._run(self._resource.put, key, value, version=version, **terms)

    def put_many(
        self,
        values: Mapping[K, V | Loaded[V]],
        *,
        version: Version | None = None,
        **terms: Unpack[OwnTerms],
    ) -> dict[K, Stored]:
        """Store many values, as `Resource.put_many` does."""
        return self._run(self._resource.put_many, values, version=version, **terms)

    def add(
        self,
        key: K,
        value: V | Loaded[V],
        *,
        version: Version | None = None,
        **terms: Unpack[OwnTerms],
    ) -> Stored:
        """Store a value if there is no fresh copy, as `Resource.add` does."""
        return self._run(self._resource.add, key, value, version=version, **terms)

    def touch(self, key: K, **terms: Unpack[OwnTerms]) -> Stored:
        """Give a fresh copy new times that count from now, as `Resource.touch` does."""
        return self._run(self._resource.touch, key, **terms)

    def update(self, key: K, change: Change[V]) -> Answer[V] | None:
        """Publish what `change` makes of the present value, as `Resource.update` does.

        `change` is called in this thread.
        """

        async def change_in_caller(answer: Answer[V] | None) -> object:
            return await in_caller(partial(change, answer))

        return self._run(self._resource.update, key, change_in_caller)

    def invalidate(self, *keys: K, soft: bool = False) -> None:
        """Invalidate the keys: the next read waits for a load, and gets the old copy if that fails.

        `soft`: reads get the old copy while it is refreshed. Raises StoreError.
        """
        self._run(self._resource.invalidate, *keys, soft=soft)

    def delete(self, *keys: K) -> None:
        """Delete the copies. The next read loads, and has no old copy if the load fails."""
        self._run(self._resource.delete, *keys)

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
