"""SyncCache: the same cache for code without an event loop.

The calling thread answers a hit by itself. Everything else is a coroutine of the async `Cache`. If
the store's steps may run in any thread (`WaitsInThreads`: memory, SQLite, PostgreSQL, one Redis
server), the calling thread takes the loop's turn and runs the coroutine itself (`turns.py`). What
then must wait for something else, and everything on other stores, runs on the loop thread. The loop
thread runs no loader: a slow loader would hold up the calls of all other threads.
A thread that waits for a load runs the loader itself.
"""

import asyncio
import inspect
import random
import sys
import time
import warnings
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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, ParamSpec, Required, Self, TypedDict, TypeVar, Unpack

from stillfresh.clock import Clock
from stillfresh.durations import Duration
from stillfresh.engine import (
    Cache,
    CacheStats,
    Codec,
    CodecMaker,
    Hook,
    InvalidatedEntries,
    Listed,
    Loaded,
    Objectives,
    Resource,
    like_function,
)
from stillfresh.engine.keys import NOT_OF_A_CACHE, Raises, Spec, checks_options, is_def
from stillfresh.engine.recordings import Recording
from stillfresh.errors import (
    ConfigError,
    MissingMethod,
    NotOpen,
    StillfreshError,
    cannot_be_pickled,
    refuse_with,
    shown,
)
from stillfresh.stores import store_for
from stillfresh.stores.contract import Store
from stillfresh.sync.function import SyncFunction
from stillfresh.sync.loop_thread import PROCESS, LoopThread
from stillfresh.sync.resource import SyncResource
from stillfresh.sync.unshared import sync_function, sync_resource

K = TypeVar("K", bound=str | int)
H = TypeVar("H", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")
P = ParamSpec("P")

CALLER_LEVEL: Final = 5
"""From `check_caller` up the stack to the code that called the resource."""


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
    tags: Callable[..., Sequence[str]] | Sequence[str] | None
    codec: Codec[Any] | CodecMaker | None
    version: str | None
    lease_for: Duration
    load_timeout: Duration
    objective: Objectives
    raises: Raises
    share: bool
    patience: Duration | None
    check: float
    true_within: Duration | None
    check_calls: float


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
        self._has_warned = False
        if isinstance(store, str):
            self._cache.new_store = partial(store_for, store, clock)

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(self)

    @property
    def on_loop(self) -> Cache:
        """The cache itself, for packages of stillfresh: call it with `run` only."""
        return self._cache

    @checks_options
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
            with self._declaring():
                async_resource = declared(_checked(name, loader))
            resource = sync_resource(self.run_here, async_resource)
            like_function(resource, loader, inspect.signature(async_resource))
            self._cache.publish_objects(async_resource, resource)
            return resource

        return decorate

    @checks_options
    def cached(
        self, name: str, **options: Unpack[CallOptions]
    ) -> Callable[[Callable[P, V | Loaded[V]]], SyncFunction[P, V]]:
        """Declare a resource. Each call of the decorated `def`, by its arguments, is an entry.

        The options are those of `Cache.cached`. Returns a decorator that makes a `SyncFunction`.
        """
        declared = self._cache.cached(name, **options)

        def decorate(function: Callable[P, V | Loaded[V]]) -> SyncFunction[P, V]:
            with self._declaring():
                async_function = declared(_checked(name, function))
            resource = sync_resource(self.run_here, async_function.resource)
            sync = sync_function(resource, async_function.signature, function)
            self._cache.publish_objects(async_function.resource, resource, sync)
            return sync

        return decorate

    def declare(
        self, spec: Spec[H, V], text: Callable[[H], str], key: Callable[[str], H]
    ) -> SyncResource[H, V]:
        """Declare a resource with keys of any type, as `Cache.declare` does."""
        with self._declaring():
            resource = self._cache.declare(spec, text, key)
        return sync_resource(self.run_here, resource)

    def pass_on(self, is_answer: Callable[[BaseException], bool]) -> None:
        """Give callers some exceptions of every loader as they are, as `Cache.pass_on` does."""
        self._cache.pass_on(is_answer)

    def _declaring(self) -> AbstractContextManager[None]:
        """A resource that is declared while the cache is open is opened at once."""
        loop = PROCESS.loop
        if loop is None or self not in PROCESS.open:
            return nullcontext()
        return loop.turn()

    def invalidate_tag(self, tag: str, *, soft: bool = False) -> InvalidatedEntries:
        """Invalidate every entry that has this tag, as `Cache.invalidate_tag` does."""
        return self.run_here(self._cache.invalidate_tag, tag, soft=soft)

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

    def at_least(self, token: str) -> AbstractContextManager[None]:
        """Inside `with`, reads of this thread have `at_least=token`."""
        return self._cache.at_least(token)

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
        return self._open_loop().run(partial(function, *args, **kwargs))

    def run_here(
        self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a method of the engine in this thread, as far as the store allows that.

        The cache's own thread does what is left.
        """
        work = partial(function, *args, **kwargs)
        loop = PROCESS.loop
        runtime = self._cache.opened
        if runtime is None or loop is None or not loop.is_of(runtime.loop):
            loop = self._open_loop()
            runtime = self._cache.opened
        elif self._cache.is_closed or asyncio._get_running_loop() is not None:  # noqa: SLF001 (None, where others raise)
            loop = self._open_loop()
        if runtime is not None and runtime.runs_in_threads and loop.is_of(runtime.loop):
            return loop.run_here(work)
        return loop.run(work)

    def _open_loop(self) -> LoopThread:
        """The loop thread. Raises NotOpen if the cache was closed."""
        self.check_caller()
        loop, is_new = PROCESS.enter(self)
        if self._cache.is_closed:
            if is_new:  # else it is being closed, and needs the loop
                PROCESS.leave(self)
            raise NotOpen("this cache is closed; open it again with `with cache:`, or open()")
        return loop

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run work on the loop thread, whether the cache is open or not."""
        self.check_caller()
        loop, _ = PROCESS.enter(self)
        return loop.run(work)

    def check_caller(self) -> None:
        """Warn once if this thread runs an event loop, which the call blocks.

        A notebook runs each cell on a loop that has nothing else to do: there, all is well. Raises
        StillfreshError in the middle of the cache's own work, which would wait for itself.
        """
        running = asyncio._get_running_loop()  # noqa: SLF001 (None, where others raise)
        if running is None:
            return
        if PROCESS.loop is not None and PROCESS.loop.is_of(running):
            raise StillfreshError(
                "this call of a SyncCache would hold the event loop that answers it; do not read "
                "the cache in tags=, codec= or clock="
            )
        if not self._has_warned and not _is_notebook():
            self._has_warned = True
            warnings.warn(
                "this call of a SyncCache blocks the event loop that runs in this thread; "
                "use Cache in async code, or call it with asyncio.to_thread",
                RuntimeWarning,
                stacklevel=CALLER_LEVEL,
            )


refuse_with(
    Cache, "this is a Cache, for async code; write `async with`, or use SyncCache in sync code"
)
refuse_with(
    SyncCache,
    "this is a SyncCache, for sync code; write `with`, or use Cache in async code",
    is_async=True,
)


for _method, _text in NOT_OF_A_CACHE.items():
    setattr(SyncCache, _method, MissingMethod(f"{{0}}.{_method}: {_text}"))


def _is_notebook() -> bool:
    """True if IPython runs this code: in a notebook or its shell."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def _checked(name: str, loader: Callable[P, T]) -> Callable[P, T]:
    if not is_def(loader):
        raise ConfigError(
            f"{name}: a SyncCache's loader is a def function, not {shown(loader)}; "
            "write def, or use Cache for async functions"
        )
    return loader
