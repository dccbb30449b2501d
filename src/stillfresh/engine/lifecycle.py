"""A cache's life: opened once, closed cleanly, one event loop at a time; forks.

The first read, or `open()`, opens the store and makes the runtime that all resources share. Closing
goes the other way: `opened` becomes None first, so that no later read uses the runtime. Then its
tasks end, memory is freed in slices, and the store is closed last.

`_loop` is the loop on which the cache is open, opening or closing; other loops are refused. A loop
can end in three ways:

- The cache is closed on it. Nothing is left.
- `asyncio.run` ends it, and closes the async generators of the loop. `_stay` started one of them,
  the keeper, and that closes the cache.
- It is closed while the cache is open. The next call notices that (`_leave_closed_loop`), and
  `_is_left` says that the store is still open: the next loop closes it before it opens it again.

A forked child has a copy of an open cache, of which it may use nothing. `forked` makes the copy
refuse all calls, or begin again with a new store.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, ParamSpec, TypeVar

from stillfresh.bounded import sliced
from stillfresh.clock import Clock
from stillfresh.engine.at_least import AtLeast, Outboxes, demanded, new_maker, note_change
from stillfresh.engine.counts import CacheStats, Lag
from stillfresh.engine.fence import FenceClock
from stillfresh.engine.model import Hook
from stillfresh.engine.news import News
from stillfresh.engine.running_loaders import RUNNING_LOADERS
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.spans import Stopwatch, Timing
from stillfresh.errors import NotOpen, StillfreshError, StoreError, cannot_be_pickled
from stillfresh.forks import tell_of_forks
from stillfresh.stores import EvictsEntries, capabilities_of
from stillfresh.stores.contract import Store
from stillfresh.tasks import looked_at

if TYPE_CHECKING:
    from stillfresh.engine.core import Core
    from stillfresh.engine.recorded import RecordingBlock
    from stillfresh.engine.recordings import What

P = ParamSpec("P")
T = TypeVar("T")

EVICT_EVERY: Final = 3600.0
COUNTED_WITHIN: Final = 10.0  # seconds that a thread waits for the loop to count
_LEFT: Final[list[object]] = []
"""Objects that a fork left to the parent. Kept, because to free them would close them."""

logger = logging.getLogger(__name__)


class Lifecycle:
    """The open parts of a cache, and their event loop."""

    def __init__(
        self,
        store: Store,
        new_runtime: Callable[..., Runtime],
        hooks: tuple[Hook, ...],
        *,
        clock: Clock,
        is_private: bool = False,
    ) -> None:
        self.clock = clock
        self.opened: Runtime | None = None
        self.cores: dict[str, Core[Any, Any]] = {}
        """The declared resources, by name."""
        self.fence_clock = FenceClock(
            lambda: any(core.fence.is_busy for core in tuple(self.cores.values()))
        )
        self.is_private = is_private
        """True if no other cache uses this store."""
        self.maker = ""
        """Names this opening of the cache in the tokens of its changes. A fork has another one."""
        self._own_change = AtLeast()
        """A change by this maker, and its token: the same for all of them."""
        self._own_token = ""
        self.blocks = 0
        """Open blocks of `bypassed()` and `recording()`, in any task."""
        self.watched_blocks = 0
        """Open blocks of `at_least()`, in any task."""
        self.running_loaders = RUNNING_LOADERS
        """Of all caches of this process."""
        self.passing_on: list[Callable[[BaseException], bool]] = []
        """Each says of an exception of a loader whether callers get it as it is."""
        self.recording_to: RecordingBlock | None = None
        self._store = store
        self._can = capabilities_of(store)
        self._new_runtime = new_runtime
        self.hooks = hooks
        self._times: dict[str, Stopwatch] = {}
        self.outboxes = Outboxes()
        self.lags: dict[str, Callable[[], Lag]] = {}
        """By the name of each outbox consumer that works for this cache."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop on which the cache is open, opening or closing."""
        self._opening: asyncio.Task[Runtime] | None = None
        self._closing: asyncio.Task[None] | None = None
        """May be a finished task: one that was cancelled before it started is never cleared."""
        self._keeper: AsyncGenerator[None, None] | None = None
        self._ending: asyncio.Future[None] | None = None
        """Done when the closing that the end of the loop began is over."""
        self._ended_loop: asyncio.AbstractEventLoop | None = None
        """This loop closes its generators, so no new keeper can start on it."""
        self.is_closed = self._is_forked = self._is_left = False
        self.new_store: Callable[[], Store] | None = None
        """Creates the store again in a forked child; None: the child is refused."""

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(self)

    def count_blocks(self, opened: int, watched: int) -> None:
        """So many blocks of both kinds were opened, or closed if it is negative."""
        with self.running_loaders.lock:  # threads open blocks, too
            before = (self.blocks > 0, self.watched_blocks > 0)
            self.blocks += opened
            self.watched_blocks += watched
            if before == (self.blocks > 0, self.watched_blocks > 0):
                return
            for core in tuple(self.cores.values()):
                for face in core.faces:
                    face.stand_back()

    @contextmanager
    def watching_reads(self) -> Iterator[None]:
        """While a block is open, each read looks at its context before memory answers it."""
        self.count_blocks(0, 1)
        try:
            yield
        finally:
            self.count_blocks(0, -1)

    def leaves_memory(self) -> bool:
        """True if memory may not answer reads of this code without the core."""
        return self.blocks > 0 or demanded() is not None

    def changed(self) -> str:
        """This cache has changed something: return the token, and note it for its caller."""
        note_change(self._own_change)
        return self._own_token

    async def open(self) -> None:
        """Open the store, on the running event loop; also after `close`. Raises StoreError."""
        self._check_here()
        if self._closing is not None and not self._closing.done():
            await asyncio.wait([self._closing])
        self.is_closed = False
        await self.runtime()

    async def runtime(self) -> Runtime:
        """The shared parts of an open cache; opens the store at the first call."""
        self._check_here()
        if self.opened is not None:
            return self.opened
        self.check_not_closed()
        if self._opening is None or self._opening.done():
            self._loop = asyncio.get_running_loop()
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(looked_at)
        return await asyncio.shield(self._opening)

    async def close(self) -> None:
        """Close the cache. Publications that have started finish; the rest ends within `grace`."""
        self._check_here()
        self.is_closed = True
        if self._closing is None or self._closing.done():
            self._loop = asyncio.get_running_loop()
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def from_thread(
        self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a coroutine function on the cache's event loop, from another thread.

        Returns its result. Raises NotOpen if the loop does not run.
        """
        self.check_not_forked()
        runtime = self.opened
        if runtime is None or not runtime.loop.is_running():
            raise NotOpen(
                "from_thread: this cache is not open; open it on a running event loop first"
            )
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is runtime.loop:
            raise StillfreshError(
                "from_thread was called on the cache's own loop; await it instead"
            )
        return asyncio.run_coroutine_threadsafe(function(*args, **kwargs), runtime.loop).result()

    async def swap(self, store: Store, *, is_private: bool, is_closed: bool, keeps: bool) -> Store:
        """Switch to another store from the next read on; return the previous one.

        `keeps`: the previous store stays open, unless it is bound to an event loop.
        """
        self._check_here()
        self.is_closed = True
        self._loop = asyncio.get_running_loop()
        try:
            await self._close(keeps=keeps and self._is_loop_free)
        finally:
            before = self._store
            self._store = store
            self._can = capabilities_of(store)
            self.is_private = is_private
            self.is_closed = is_closed
        return before

    def note(self, core: "Core[Any, Any]", keys: Iterable[Any], what: "What") -> None:
        """Record a change of these keys, if a recording is open."""
        if self.recording_to is not None:
            self.recording_to.note(core, keys, what)

    def note_invalid(self, kind: str, ids: Iterable[str], *, soft: bool) -> None:
        if (core := self.cores.get(kind)) is not None:
            self.note(core, map(core.names.key, ids), "soft" if soft else "invalidate")

    def new_runtime(self, store: Store, **options: Any) -> Runtime:  # noqa: ANN401
        """Return what all resources on this store share. The options are those of `Runtime`."""
        return self._new_runtime(store, self.hooks, self._times, **options)

    def counts(self) -> CacheStats:
        """Return the counts, from any thread, without asking the store: `store` is None.

        A thread other than the cache's own waits for its event loop, at most 10 s.
        """
        runtime = self.opened
        here = None
        with suppress(RuntimeError):
            here = asyncio.get_running_loop()
        loop = None if runtime is None or self._is_forked else runtime.loop
        if loop is not None and loop is not here and loop.is_running():
            counting = asyncio.run_coroutine_threadsafe(self._counted_on_loop(), loop)
            return counting.result(COUNTED_WITHIN)
        return self.counted()

    async def _counted_on_loop(self) -> CacheStats:
        return self.counted()

    def counted(self) -> CacheStats:
        """Return the counts so far. Call it in the thread of the event loop."""
        resources = {kind: core.counted() for kind, core in tuple(self.cores.items())}
        lags = {name: lag() for name, lag in self.lags.items()}
        return CacheStats(resources, None, lags, self.store_seconds())

    def store_seconds(self) -> dict[str, Timing]:
        """The time that the store took, by step."""
        timings = {step: times.timing() for step, times in self._times.items()}
        return {step: timing for step, timing in timings.items() if any(timing.counts)}

    def check_not_closed(self) -> None:
        """Raise if the cache was closed by hand: a read does not open it again."""
        self.check_not_forked()
        self._leave_closed_loop()
        if self.is_closed:
            raise NotOpen("this cache is closed; open it again with async with, or open()")

    def check_not_forked(self) -> None:
        if self._is_forked:
            raise StillfreshError(
                "this cache was open when the process forked; make a new Cache in the child process"
            )

    def forked(self) -> None:
        """In the child: the loop, the threads and the connections belong to the parent."""
        is_live = self._loop is not None and not self._loop.is_closed()
        is_left = self._is_left or self._loop is not None
        if not is_live and not (is_left and not self._is_loop_free):
            return
        self.running_loaders.forked()
        for core in self.cores.values():
            core.leave()
        if self.new_store is None:
            self._is_forked = True
            return
        _LEFT.append((self._store, self._loop, self.opened, self._keeper))
        self._store = self.new_store()
        self._can = capabilities_of(self._store)
        self._loop = self._opening = self._closing = self._keeper = self._ending = None
        self.opened = None
        self._is_left = False

    @property
    def _is_loop_free(self) -> bool:
        """True if the store is bound to no event loop, and stays open when one ends."""
        return self._can.process is not None

    def _check_here(self) -> None:
        """Refuse a call on another loop than the one on which the cache is open."""
        self.check_not_forked()
        self._leave_closed_loop()
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise StillfreshError(
                "this cache was opened by another event loop, which is not closed yet; use "
                "cache.from_thread(...) from other threads, or close the cache there first"
            )

    def _leave_closed_loop(self) -> None:
        """Leave a loop that was closed: nothing on it can be awaited.

        The next loop closes its store.
        """
        if self._loop is None or not self._loop.is_closed():
            return
        self._is_left = self._is_left or self.opened is not None or self._opening is not None
        self._loop = self._opening = self._closing = self._keeper = self.opened = None
        for core in self.cores.values():
            core.leave()

    async def _open(self) -> Runtime:
        try:
            await self._wait_for_ending()
            if self._is_left:
                await self._close_left()
            await self._store.open()
        except BaseException:
            self._opening = self._loop = None
            raise
        self.maker = new_maker()
        self._own_change = AtLeast(frozenset([self.maker]))
        self._own_token = self._own_change.text()
        runtime = self.opened = self.new_runtime(self._store)
        if runtime.can.push is not None and not self._is_ended_loop():
            runtime.news = News(runtime, runtime.can.push, self.cores)
            runtime.spawn(runtime.news.follow())
        for core in self.cores.values():
            core.open(runtime)
        eviction = runtime.can.eviction
        if eviction is not None and runtime.can.evicts_hourly and not self._is_ended_loop():
            runtime.spawn(_evict_now_and_then(eviction, runtime.clock))
        await self._stay()
        self._opening = None
        return runtime

    async def _stay(self) -> None:
        """Start a generator, which `asyncio.run` closes as the loop ends: that closes the cache."""
        tell_of_forks(self)
        tell_of_forks(self.running_loaders)
        if sys.get_asyncgen_hooks().finalizer is not None and not self._is_ended_loop():
            self._keeper = self._until_the_loop_ends()
            await anext(self._keeper)

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            if self._keeper is not None:
                self._keeper = None
                self._ended_loop = asyncio.get_running_loop()
                ending = self._ending = self._ended_loop.create_future()
                try:
                    await self._end(keeps=self._is_loop_free)
                finally:
                    ending.set_result(None)
                    self._ending = None
                    if self._opening is None:
                        self._loop = None

    def _is_ended_loop(self) -> bool:
        loop = asyncio.get_running_loop()
        return loop is self._ended_loop or getattr(loop, "_asyncgens_shutdown_called", False)

    async def _wait_for_ending(self) -> None:
        """Wait until the ending loop has closed the cache; a generator there may open it again."""
        if self._ending is not None:
            await asyncio.wait([self._ending])

    async def _close(self, *, keeps: bool = False) -> None:
        """Close completely, even if the caller is cancelled."""
        try:
            if self._opening is not None:
                await asyncio.wait([self._opening])
            await self._wait_for_ending()
            if self.opened is not None:
                await self._end(keeps=keeps)
            elif self._is_left:
                await self._close_left()
        finally:
            self._closing = self._loop = None

    async def _end(self, *, keeps: bool = False) -> None:
        """`keeps`: the store is not bound to the loop that ends, and stays open."""
        keeper = self._keeper
        self._keeper = None
        runtime = self.opened
        self.opened = None
        self._is_left = not keeps  # until the store is closed: this task may be cancelled
        for core in self.cores.values():
            core.close()
        if runtime is not None:  # before the loop has a turn: no task may use what is closed
            await runtime.end(runtime.grace)
        for core in tuple(self.cores.values()):  # a resource may be declared between two slices
            async for _ in sliced(core.memory.freed()):
                pass
        if not keeps:
            await self._store.close()
            self._is_left = False
        if keeper is not None:
            await keeper.aclose()

    async def _close_left(self) -> None:
        """Close the store that a closed loop left open; it may complain about that loop."""
        self._is_left = False
        if not self._is_loop_free:
            with suppress(RuntimeError):
                await self._store.close()


async def _evict_now_and_then(eviction: EvictsEntries, clock: Clock) -> NoReturn:
    """Evict at intervals until cancelled. If the store fails, try again the next time."""
    while True:
        await asyncio.sleep(EVICT_EVERY)
        try:
            await eviction.evict(clock())
        except StoreError as exc:
            logger.warning("the store could not evict: %s", exc)
