"""SyncCache: the same cache for code without an event loop.

The calling thread answers a hit by itself. Everything else is a call on the loop thread, where the
async `Cache` runs. The loop thread runs no loader: a slow loader would hold up the calls of all
other threads. A thread that waits for a load runs the loader itself.
"""

import asyncio
import inspect
import random
import time
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Required, Self, TypedDict, TypeVar, Unpack

from stillfresh.clock import Clock
from stillfresh.durations import Duration
from stillfresh.engine import (
    Cache,
    CacheStats,
    Codec,
    Hook,
    Listed,
    Loaded,
    Resource,
    like_function,
)
from stillfresh.engine.keys import Spec, is_def
from stillfresh.engine.recordings import Recording
from stillfresh.errors import ConfigError, NotOpen, StillfreshError, refuse_with, shown
from stillfresh.stores import store_for
from stillfresh.stores.contract import Store
from stillfresh.sync.function import SyncFunction
from stillfresh.sync.loop_thread import PROCESS
from stillfresh.sync.resource import SyncResource

K = TypeVar("K", bound=str | int)
H = TypeVar("H", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")
P = ParamSpec("P")


class Options(TypedDict, total=False):
    """The options of both decorators, as in `Cache`."""

    fresh_for: Required[Duration]
    stale_for: Duration
    error_for: Duration
    concurrency: int
    max_entries: int
    max_bytes: int | str | None
    memory_for: Duration
    jitter: float
    tags: Callable[..., Sequence[str]] | None
    codec: Codec[Any] | None
    version: str | None
    lease_for: Duration
    load_timeout: Duration
    objective: str | None


class CallOptions(Options, total=False):
    """The options of `cached`, as in `Cache.cached`."""

    key: Callable[..., object] | None
    ignore: Iterable[str]


class BatchOptions(Options, total=False):
    """The options of `batched`, as in `Cache.batched`."""

    absent_for: Duration | None
    max_batch: int


class SyncCache:
    """The cache for code without an event loop: `cache = SyncCache("sqlite:///prices.db")`.

    Any thread may use it. The first read opens it. A thread that waits for a load runs the loader
    itself. The arguments are those of `Cache`. Raises ConfigError for one that cannot be used.
    """

    def __init__(
        self,
        store: str | Store,
        *,
        clock: Clock = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        dice: Callable[[], float] = random.random,
        grace: Duration = 5.0,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self._cache = Cache(store, clock=clock, sleep=sleep, dice=dice, grace=grace, hooks=hooks)
        self.clock = self._cache.clock
        if isinstance(store, str):
            self._cache.new_store = partial(store_for, store, clock)

    @property
    def on_loop(self) -> Cache:
        """The cache itself, for packages of stillfresh: call it with `run` only."""
        return self._cache

    def batched(
        self, name: str, **options: Unpack[BatchOptions]
    ) -> Callable[[Callable[[list[K]], Mapping[K, V | Loaded[V] | Exception]]], SyncResource[K, V]]:
        """Declare a resource. The decorated `def` takes a list of keys and returns a mapping.

        The options are those of `Cache.batched`. Returns a decorator that makes a `SyncResource`.
        """
        declared: Callable[[Any], Resource[Any, Any]] = self._cache.batched(name, **options)

        def decorate(
            loader: Callable[[list[K]], Mapping[K, V | Loaded[V] | Exception]],
        ) -> SyncResource[K, V]:
            async_resource = declared(_checked(name, loader))
            resource = SyncResource(self.run, async_resource)
            like_function(resource, loader, inspect.signature(async_resource))
            return resource

        return decorate

    def cached(
        self, name: str, **options: Unpack[CallOptions]
    ) -> Callable[[Callable[P, V | Loaded[V]]], SyncFunction[P, V]]:
        """Declare a resource. Each call of the decorated `def`, by its arguments, is an entry.

        The options are those of `Cache.cached`. Returns a decorator that makes a `SyncFunction`.
        """
        declared = self._cache.cached(name, **options)

        def decorate(function: Callable[P, V | Loaded[V]]) -> SyncFunction[P, V]:
            async_function = declared(_checked(name, function))
            resource = SyncResource(self.run, async_function.resource)
            return SyncFunction(resource, async_function.signature, function)

        return decorate

    def declare(
        self, spec: Spec[H, V], text: Callable[[H], str], key: Callable[[str], H]
    ) -> SyncResource[H, V]:
        """Declare a resource with keys of any type, as `Cache.declare` does."""
        return SyncResource(self.run, self._cache.declare(spec, text, key))

    def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        """Invalidate every entry that has this tag, as `Cache.invalidate_tag` does."""
        return self.run(self._cache.invalidate_tag, tag, soft=soft)

    def invalidate_all(self, *, soft: bool = False) -> int:
        """Invalidate every entry of the store, as `Cache.invalidate_all` does; return how many."""
        return self.run(self._cache.invalidate_all, soft=soft)

    def evict(self) -> int:
        """Delete entries from the store that can never be served again; return how many."""
        return self.run(self._cache.evict)

    def stats(self) -> CacheStats:
        """Return the counts of every resource, and the store's own (None if it failed)."""
        return self.run(self._cache.stats)

    def counts(self) -> CacheStats:
        """Return the counts of every resource, without asking the store; `store` is None."""
        return self._cache.counts()

    def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[Listed]:
        """List the entries of the store, as `Cache.entries` does."""
        return self.run(self._cache.entries, kind, search, after, limit)

    def bypassed(self) -> AbstractContextManager[None]:
        """Inside `with`, reads of this thread load and store nothing."""
        return self._cache.bypassed()

    def recording(self, recording: str | Path | Recording) -> AbstractContextManager[Recording]:
        """Inside `with`, record reads to a file, for `stillfresh plan`."""
        return self._cache.recording(recording)

    def is_bypassed(self) -> bool:
        """Return True if this thread is inside `bypassed()`."""
        return self._cache.is_bypassed()

    @contextmanager
    def override(self, store: str | Store) -> Iterator[None]:
        """Inside `with`, the cache uses this store."""
        block = self._cache.override(store)
        self._run(block.__aenter__)
        try:
            yield
        finally:
            self._run(block.__aexit__)

    def open(self) -> None:
        """Open the store; also after `close`. Otherwise the first call does. Raises StoreError."""
        self._run(self._cache.open)

    def close(self) -> None:
        """Close the cache. Publications that have started finish; the rest ends within `grace`."""
        self._cache.is_closed = True
        if self in PROCESS.open:
            try:
                self._run(self._cache.close)
            finally:
                PROCESS.leave(self)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a coroutine function on the cache's own thread; return its result."""
        return self._run(partial(function, *args, **kwargs), is_open=True)

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]], *, is_open: bool = False) -> T:
        """Run work on the loop thread. `is_open`: raise NotOpen if the cache was closed."""
        self.check_caller()
        loop, is_new = PROCESS.enter(self)
        if is_open and self._cache.is_closed:
            if is_new:  # else it is being closed, and needs the loop
                PROCESS.leave(self)
            raise NotOpen("this cache is closed; open it again with `with cache:`, or open()")
        return loop.run(work)

    def check_caller(self) -> None:
        """Raise StillfreshError if this thread runs an event loop, which a wait would block."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise StillfreshError(
            "this call of a SyncCache would hold the event loop that runs in this thread; "
            "use Cache in async code, or call it with asyncio.to_thread"
        )


refuse_with(
    Cache, "this is a Cache, for async code; write `async with`, or use SyncCache in sync code"
)
refuse_with(
    SyncCache,
    "this is a SyncCache, for sync code; write `with`, or use Cache in async code",
    is_async=True,
)


def _checked(name: str, loader: Callable[P, T]) -> Callable[P, T]:
    if not is_def(loader):
        raise ConfigError(
            f"{name}: a SyncCache's loader is a def function, not {shown(loader)}; "
            "write def, or use Cache for async functions"
        )
    return loader
