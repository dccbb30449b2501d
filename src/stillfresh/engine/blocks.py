"""Blocks of code that read past the cache, or on another store.

A read inside `bypassed()` goes to a second resource, which keeps nothing. A block counts for the
task that opened it, and for the tasks that this one starts. Other tasks are not affected.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from stillfresh.engine.model import Outcome, RefreshEnd
from stillfresh.engine.work import Waiter
from stillfresh.errors import StillfreshError
from stillfresh.stores import store_for
from stillfresh.stores.contract import Store

if TYPE_CHECKING:
    from stillfresh.engine.core import Core
    from stillfresh.engine.lifecycle import Lifecycle

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


OPEN: ContextVar[tuple["Bypass", ...]] = ContextVar("stillfresh_bypass", default=())


class Bypass:
    """One block. A task that outlives the block reads from the cache again."""

    def __init__(self, cache: "Lifecycle") -> None:
        self.cache: Lifecycle | None = cache


@contextmanager
def past(cache: "Lifecycle") -> Iterator[None]:
    """While a block is open, only the core answers hits: it knows whose block it is."""
    block = Bypass(cache)
    OPEN.set((*OPEN.get(), block))
    try:
        with standing_back(cache):
            yield
    finally:
        block.cache = None
        OPEN.set(tuple(other for other in OPEN.get() if other is not block))


@contextmanager
def standing_back(cache: "Lifecycle") -> Iterator[None]:
    """While a block is open, every read in any task goes to its core."""
    cache.count_blocks(1, 0)
    try:
        yield
    finally:
        cache.count_blocks(-1, 0)


def is_past(cache: "Lifecycle") -> bool:
    """True if this code runs inside `bypassed()`."""
    return cache.blocks > 0 and any(block.cache is cache for block in OPEN.get())


async def read_past(
    core: "Core[K, V]", keys: Sequence[K], waiter: Waiter[K, V]
) -> dict[K, Outcome[V]]:
    """Read from a second resource, on a store and a memory that exist for this read alone.

    So the loader is called, no load is shared, and nothing is stored. The loads run in the caller's
    context: what their loader reads is past the cache too.
    """
    store = store_for("memory://", core.owner.clock)
    await store.open()
    runtime = core.owner.new_runtime(store, load_context=copy_context, is_timed=False)
    second = core.apart(runtime)
    try:
        outcomes = await second.reads.answers(keys, waiter)
    except BaseException:  # a caller that gives up does not wait for its loader
        second.close()
        runtime.abandon()
        raise
    second.close()
    runtime.cancel()  # a loader that ignores its time limit may still run
    await runtime.threads.end(runtime.grace)
    waiter.notes.not_stored = dict.fromkeys(keys, RefreshEnd.UNSTORED)
    return outcomes


class Override:
    """Returned by `cache.override(...)`; used with `async with` or `with`."""

    def __init__(self, cache: "Lifecycle", store: Store, *, is_private: bool) -> None:
        self._cache = cache
        self._store = store
        self._is_private = is_private

    async def __aenter__(self) -> None:
        cache = self._cache
        self._was_private = cache.is_private
        self._was_closed = cache.is_closed
        self._fronts = {core: core.memory.is_private for core in cache.cores.values()}
        self._before = await cache.swap(
            self._store, is_private=self._is_private, is_closed=False, keeps=True
        )
        for core in cache.cores.values():
            core.memory.stand_before(private=self._is_private)

    async def __aexit__(self, *_: object) -> None:
        cache = self._cache
        was = self._was_private
        try:
            await cache.swap(self._before, is_private=was, is_closed=self._was_closed, keeps=False)
        finally:
            for core in cache.cores.values():
                core.memory.stand_before(private=self._fronts.get(core, was))

    def __enter__(self) -> None:
        _run(self.__aenter__)

    def __exit__(self, *_: object) -> None:
        _run(self.__aexit__)


def _run(step: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run on an event loop of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(step())
        finally:
            loop.close()
        return
    raise StillfreshError("an event loop is running: write async with cache.override(...)")
