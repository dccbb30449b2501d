"""Blocks of code that read past the cache, or on another store.

Reads inside `bypassed()` come here instead of to memory and the store. A block counts for the task
that opened it, and for the tasks that this one starts. Other tasks are not affected.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stillfresh.engine.load import Load
from stillfresh.engine.load_states import LOADING
from stillfresh.engine.loader import Loader
from stillfresh.engine.loads import Loads
from stillfresh.engine.model import Origin, Outcome, RefreshEnd
from stillfresh.engine.spans import load_span, noted
from stillfresh.engine.work import Waiter, Work
from stillfresh.errors import StillfreshError, shown
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Store

if TYPE_CHECKING:
    from stillfresh.engine.core import Core
    from stillfresh.engine.lifecycle import Lifecycle

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Face(Generic[K, V]):
    """The public object of a resource. It answers hits from memory without its core."""

    def __init__(self, core: "Core[K, V]") -> None:
        self.core = core
        self._clock = core.memory.now
        self._reads = core.memory.counts.on_loop
        core.faces.append(self)
        self.stand_back(back=core.owner.blocks > 0)

    def stand_back(self, *, back: bool) -> None:
        """If `back`, leave every read to the core, which knows the caller's blocks."""
        entries = {} if back else self.core.memory.entries
        self.entry_of = entries.get

    def _one_key(self, *keys: object) -> TypeError:
        """Say how to write a call with several keys."""
        name = getattr(self, "__name__", self.core.spec.kind)
        many = f"{name}.get_many({shown([*keys])})"
        return TypeError(f"{name}: takes one key, not {len(keys)}; write {many}")


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
    cache.blocks += 1
    if cache.blocks == 1:
        _stand_back(cache, back=True)
    try:
        yield
    finally:
        cache.blocks -= 1
        if not cache.blocks:
            _stand_back(cache, back=False)


def _stand_back(cache: "Lifecycle", *, back: bool) -> None:
    for core in cache.cores.values():
        for face in core.faces:
            face.stand_back(back=back)


def is_past(cache: "Lifecycle") -> bool:
    """True if this code runs inside `bypassed()`."""
    return cache.blocks > 0 and any(block.cache is cache for block in OPEN.get())


async def loaded(
    core: "Core[K, V]", keys: Sequence[K], waiter: Waiter[K, V]
) -> dict[K, Outcome[V]]:
    """Load by the loader alone: no lease, no shared load, no cooldown; nothing is stored."""
    runtime = core.owner.apart()
    memory = core.memory
    loader: Loader[K, V] = Loader(core.spec, runtime, memory.counts)
    loads = Loads(core, runtime)
    by = None if waiter.load is None else waiter
    works = [Work(key, id_, {waiter: 0}, by=by) for key, id_ in core.names.texts(keys).items()]
    try:
        for start in range(0, len(works), core.spec.max_batch):
            load = Load(loads, works[start : start + core.spec.max_batch])
            load.state = LOADING
            with load_span(runtime.hooks, core.spec.kind, load):
                results = await loader.results(load, {})
                for result in results.values():
                    noted(load.span, Verdict.GONE if result.error else Verdict.FRESH, result.error)
            for work in load.works:
                result = results[work.id]
                waiter.private = waiter.private or result.private
                if result.error is not None:
                    waiter.outcomes[work.key] = result.error
                elif (copy := result.copy) is not None:
                    answer = memory.new_answer(copy, result.value, Verdict.FRESH, Origin.LOADED)
                    waiter.outcomes[work.key] = answer
                    waiter.not_stored[work.key] = RefreshEnd.UNSTORED
    except BaseException:  # a caller that gives up does not wait for its loader
        runtime.threads.dismiss()
        raise
    await runtime.threads.end(runtime.grace)
    memory.counts.on_loop.note_all(waiter.outcomes.values(), runtime.clock())
    return waiter.outcomes


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
