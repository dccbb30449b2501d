"""What keeps the keys of a lane fresh (C3-C6, C14, E24): one driver, run in one of two ways.

The lane says which key is next. The driver looks it up, loads it, and plans it again. A `Watcher`
runs by itself, for `watch`; a coordinator's kind calls `tick` (seed 000). No key has a timer.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from stillfresh.bounded import BoundedDict
from stillfresh.clock import Clock
from stillfresh.engine.lane import Lane
from stillfresh.engine.memory import NEVER
from stillfresh.engine.model import Answer, left_of
from stillfresh.engine.rules import Terms
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.watch import Update, Watch
from stillfresh.errors import LoadFailed, StillfreshError
from stillfresh.stores.contract import Copy

if TYPE_CHECKING:
    from stillfresh.engine.core import Core

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SLICE: Final = 50
"""Keys that are read, loaded or dropped in one turn of the loop."""
SHORTEST_PAUSE: Final = 0.1
"""Seconds between two loads of a key, however short its freshness."""
LONGEST_PAUSE: Final = 30.0
"""Seconds; a wall clock that was set is noticed after this time."""
MOST_LOADS: Final = 10  # loads of a watched key in a second, however often it is invalidated
MOST_COUNTED: Final = 10_000
"""Keys whose loads are counted."""

logger = logging.getLogger(__name__)


class Driver(ABC, Generic[K]):
    """Looks up keys that are due and loads stale ones, for one lane.

    The lane remembers cooldowns as the store does (E7), also while the store is unavailable.
    """

    def __init__(self, terms: Terms, clock: Clock) -> None:
        self.lane: Lane[K] = new_lane(terms)
        self.clock = clock
        self._stale_at: dict[K, float] = {}
        """For keys whose copy arrived while they are renewed: they need not be read again."""

    @abstractmethod
    async def refresh_times(self, keys: Sequence[K]) -> dict[K, float]:
        """When to refresh each key; a time in the past means now."""

    @abstractmethod
    def renew(self, keys: Sequence[K]) -> AsyncGenerator[Mapping[K, object]]:
        """Load keys that are not fresh, and yield each as it ends: a LoadFailed, or not."""

    async def tick(self, size: int, batches: int, is_open: Callable[[], bool]) -> None:
        """C5: one look at due keys, then up to so many batches; nothing once it is shut."""
        while is_open() and await self.look_up():
            pass
        for _ in range(batches):
            if not is_open() or not (batch := await self._stale(size)):
                return
            await self.refresh(batch)

    async def _stale(self, size: int) -> list[K]:
        """C5: up to a batch of keys that are still stale; another writer may have refreshed one."""
        batch: list[K] = []
        while taken := self.lane.take(size - len(batch), batch):
            times, now = await self.refresh_times(taken), self.clock()
            for key in taken:
                if times[key] <= now and self.lane.cooling_until(key, now) is None:
                    batch.append(key)
                else:
                    self.lane.land([key])
                    self.lane.looked_up(key, times[key], now)
        return batch

    async def look_up(self) -> bool:
        """Look up a slice of due keys, and yield to the loop. False if none is due."""
        if not (due := self.lane.due(self.clock(), SLICE)):
            return False
        self.note(await self.refresh_times(due))
        await asyncio.sleep(0)
        return True

    def note(self, times: Mapping[K, float]) -> None:
        """C3: queue stale keys, unless they cool down; fresh keys wait for their time."""
        now = self.clock()
        for key, at in times.items():
            self.lane.looked_up(key, at, now)

    async def refresh(self, keys: Sequence[K]) -> None:
        """E24: each key is free again when its own load ends; a slow one delays no other."""
        flying = dict.fromkeys(keys)
        try:
            async with aclosing(self.renew(keys)) as renewed:
                async for outcomes in renewed:
                    await self._ended(outcomes, flying, len(keys))
        finally:
            self._land(flying)

    async def _ended(self, outcomes: Mapping[K, object], flying: dict[K, None], of: int) -> None:
        """When to look at each again.

        A key that was invalidated since its copy arrived has no time: it is looked up at once
        (E24).
        """
        times = dict.fromkeys(outcomes, NEVER)
        if untold := [key for key in outcomes if key not in self._stale_at]:
            times |= await self.refresh_times(untold)
        now = self.clock()
        times |= self._land(outcomes)
        failed = {key: it for key, it in outcomes.items() if isinstance(it, LoadFailed)}
        self.cool(failed, of, now)
        for key in outcomes:
            del flying[key]
            if key in failed:
                self.lane.looked_up(key, times[key], now)
            else:
                self.lane.refreshed(key, max(times[key], now + SHORTEST_PAUSE), now)

    def cool(self, failed: Mapping[K, LoadFailed], of: int, now: float) -> None:  # noqa: ARG002
        """C9: each on its own cooldown; `of`: how many were loaded together."""
        for key in failed:
            self.lane.failed(key, now)

    def _land(self, keys: Iterable[K]) -> dict[K, float]:
        """Their loads have ended; return until when each copy that arrived meanwhile is fresh."""
        self.lane.land(keys)
        return {key: self._stale_at.pop(key) for key in keys if key in self._stale_at}


class Watcher(Driver[K], Generic[K, V]):
    """All watched keys of one resource, while there are any.

    The core reads, leases and loads, so one load serves every process on the store (E5).
    """

    def __init__(self, core: "Core[K, V]", clock: Clock) -> None:
        super().__init__(core.spec.terms, clock)
        self.core = core
        size = core.spec.max_batch
        self._batches = size * max(1, SLICE // size)
        """Whole batches: a slice that cuts one would cost another request."""
        self._open: set[Watch[K, V]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.watches: dict[K, dict[Watch[K, V], None]] = {}
        self.absent: dict[K, Answer[V]] = {}
        """Watched keys that did not exist when last asked for."""
        self._heard: dict[K, float] = {}
        """When the known copy of each key was fetched."""
        self._loads: BoundedDict[K, tuple[float, int]] = BoundedDict(MOST_COUNTED)
        """How often each key was loaded within the current second."""
        self._leaving: list[tuple[K, Watch[K, V]]] = []
        self._driver: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def refresh_times(self, keys: Sequence[K]) -> dict[K, float]:
        return await self.core.refresh_times(keys)

    def renew(self, keys: Sequence[K]) -> AsyncGenerator[Mapping[K, object]]:
        return self.core.renew(keys)

    def begin(self, watch: Watch[K, V]) -> None:
        self.core.owner.check_not_closed()
        self._check_loop()
        self._open.add(watch)

    def enter(self, key: K, watch: Watch[K, V]) -> None:
        self._check_loop()
        if not (watches := self.watches.setdefault(key, {})):
            self.core.owner.note(self.core, [key], "watch")
            if (entry := self.core.memory.entries.get(key)) is not None:
                self._heard[key] = entry.copy.fetched_at
        watches[watch] = None
        self.lane.subscribe(key, counted=False)
        self._changed.set()
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._start())
        if (answer := self.absent.get(key)) is not None:
            watch.tell(Update(key, answer))

    def leave(self, key: K, watch: Watch[K, V]) -> None:
        watches = self.watches.get(key, {})
        if watch in watches:
            del watches[watch]
            if not watches:
                self.lane.unsubscribe(key)
                self.core.owner.note(self.core, [key], "unwatch")
                del self.watches[key]
                self.absent.pop(key, None)
                self._heard.pop(key, None)
            self._changed.set()

    def leave_all(self, keys: Sequence[K], watch: Watch[K, V]) -> None:
        """Stop watching many keys: the driver drops them in slices, so the loop is not blocked."""
        if watch not in self._open:  # the cache closes: nothing is watched any more
            return
        self._open.discard(watch)
        for key in keys[:SLICE]:
            self.leave(key, watch)
        self._leaving += [(key, watch) for key in keys[SLICE:]]
        self._changed.set()

    def is_news(self, key: K, copy: Copy) -> bool:
        """True if it is newer than the known copy, or the store says so; the first is not news."""
        if key not in self.watches:
            return False
        at, told = copy.fetched_at, self.core.memory.notices
        late = at - self._heard.setdefault(key, at)
        return late > 0 or bool(late and told and told.is_published(key, copy.generation))

    def landed(self, key: K, answer: Answer[V], stale_at: float, now: float) -> None:
        """A new copy arrived: tell its watches, and plan its next refresh (E24)."""
        if (watches := self.watches.get(key)) is None:
            return
        self._changed.set()
        self._heard[key] = answer.fetched_at
        if not self.lane.refreshed(key, max(stale_at, now + SHORTEST_PAUSE), now):
            self._stale_at[key] = stale_at  # in flight
        self.absent.pop(key, None)
        if not answer.found:
            self.absent[key] = answer
        update = Update(key, answer)
        for watch in tuple(watches):
            watch.tell(update)

    def look_again(self, keys: Iterable[K]) -> None:
        """E24: after an invalidation or a failure, a refresh may be due earlier than planned."""
        if self.watches:
            for key in (keys := list(keys)):
                self._stale_at.pop(key, None)
            self.lane.recheck(keys)
            self._changed.set()

    def begin_anew(self) -> None:
        """Watch nothing. E21: watches of a closed loop cannot be told."""
        for known in (self._open, self.watches, self.absent, self._heard, self._stale_at):
            known.clear()
        self._leaving.clear()
        self.lane = new_lane(self.core.spec.terms)
        self._driver, self._changed = None, asyncio.Event()

    def close(self) -> None:
        """The cache closes: every loop over a watch ends."""
        driver, watches = self._driver, tuple(self._open)
        self.begin_anew()  # first, or each of them would leave key by key (E28)
        for watch in watches:
            watch.close()
        if driver is not None:
            driver.cancel()

    def _check_loop(self) -> None:
        """Check the loop before anything is noted that no driver would look after."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise StillfreshError("enter a watch inside a running event loop") from None
        if self._loop is not None and self._loop.is_closed():  # before the cache was open
            self.begin_anew()
        elif self._open and loop is not self._loop:
            raise StillfreshError("this is watched by another event loop; enter the watch there")
        self._loop = loop

    async def _start(self) -> None:
        """Start the driver as a task of the cache, which may have to be opened first."""
        try:
            runtime = await self.core.ready()
        except StillfreshError as exc:
            logger.error("nothing is watched, since the cache did not open: %s", exc)  # noqa: TRY400
            self.close()
            return
        self._changed = asyncio.Event()  # of this loop; the cache may be opened on another later
        if runtime.news is not None:
            runtime.news.want()
        self._driver = runtime.spawn(self._drive(runtime))

    async def _drive(self, runtime: Runtime) -> None:
        while self.watches:
            self._changed.clear()
            while self._leaving:
                for key, watch in self._leaving[-SLICE:]:
                    self.leave(key, watch)
                del self._leaving[-SLICE:]
                await asyncio.sleep(0)
            while await self.look_up():
                pass
            while batch := self.lane.take(self._batches):
                self._count(batch)
                runtime.spawn(self.refresh(batch))
                await asyncio.sleep(0)
            await self._pause(runtime)

    def _count(self, keys: Sequence[K]) -> None:
        now = self.clock()
        for key in keys:
            since, loads = self._loads.get(key, (now, 0))
            self._loads.note(key, (since, loads + 1) if 0 <= now - since < 1 else (now, 1))

    def note(self, times: Mapping[K, float]) -> None:
        super().note({key: max(at, self._free_at(key)) for key, at in times.items()})

    def _free_at(self, key: K) -> float:
        """When a key that was loaded too often may be loaded again: at the end of the second."""
        since, loads = self._loads.get(key, (NEVER, 0))
        return since + 1 if loads >= MOST_LOADS and since <= self.clock() else NEVER

    async def _ended(self, outcomes: Mapping[K, object], flying: dict[K, None], of: int) -> None:
        """Report failures to the watches that want them, with the copy that is left."""
        await super()._ended(outcomes, flying, of)
        failed = {
            key: it
            for key, it in outcomes.items()
            if isinstance(it, LoadFailed)
            and any(watch.hears_failures for watch in self.watches.get(key, ()))
        }
        left = await self.core.known(list(failed)) if failed else {}
        for key, error in failed.items():
            update = Update(key, left_of(left.get(key), error, self.clock))
            for watch in tuple(self.watches.get(key, ())):
                watch.tell_failure(update)

    def _land(self, keys: Iterable[K]) -> dict[K, float]:
        self._changed.set()
        return super()._land(keys)

    async def _pause(self, runtime: Runtime) -> None:
        """Wait until the next key's time, or until something changes."""
        at, now = self.lane.next_time(), self.clock()
        pause = LONGEST_PAUSE if at is None else min(max(at - now, 0.0), LONGEST_PAUSE)
        waits = [asyncio.ensure_future(it) for it in (runtime.sleep(pause), self._changed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


def new_lane(terms: Terms) -> Lane[K]:
    return Lane(cooldown=terms.first_cooldown, longest_cooldown=terms.longest_cooldown)
