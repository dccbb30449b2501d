"""What keeps the keys of a lane fresh: one driver, run in one of two ways.

The lane says which key is next. The driver looks it up, loads it, and plans it again. A `Watcher`
runs by itself, for `watch`; a coordinator's kind calls `tick` (seed 000). No key has a timer.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from stillfresh.bounded import SLICE as AT_ONCE
from stillfresh.bounded import BoundedDict
from stillfresh.clock import Clock
from stillfresh.engine.entry import NEVER
from stillfresh.engine.lane import Lane
from stillfresh.engine.model import Answer, Origin, left_of
from stillfresh.engine.rules import Outlook, Terms, watched_until, without_store
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.watch import Update, Watch
from stillfresh.errors import LoadFailed, RaisedByLoader, StillfreshError
from stillfresh.stores.contract import Copy

if TYPE_CHECKING:
    from stillfresh.engine.core import Core

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SLICE: Final = 50  # keys that are read or loaded in one turn of the loop
SHORTEST_PAUSE: Final = 0.1  # seconds between two loads of a key
LONGEST_PAUSE: Final = 30.0  # seconds that the driver sleeps
MOST_LOADS: Final = 10  # loads of a watched key in a second, however often it is invalidated
MOST_COUNTED: Final = 10_000  # keys whose loads are counted

logger = logging.getLogger(__name__)


class Driver(ABC, Generic[K]):
    """Looks up keys that are due and loads stale ones, for one lane.

    The lane remembers cooldowns as the store does, also while the store is unavailable.
    """

    def __init__(self, terms: Terms, clock: Clock) -> None:
        self.lane: Lane[K] = Lane(
            cooldown=terms.first_cooldown, longest_cooldown=terms.longest_cooldown
        )
        self.clock = clock
        self._stale_at: dict[K, float] = {}  # of copies that arrived while keys are renewed

    @abstractmethod
    async def refresh_times(self, keys: Sequence[K]) -> dict[K, float]:
        """When to refresh each key; a time in the past means now."""

    @abstractmethod
    def renew(self, keys: Sequence[K]) -> AsyncGenerator[Mapping[K, object]]:
        """Load keys that are not fresh, and yield each as it ends: a LoadFailed, or not."""

    async def tick(self, size: int, batches: int, is_open: Callable[[], bool]) -> None:
        """One look at due keys, then up to so many batches; nothing once it is shut."""
        while is_open() and await self.look_up():
            pass
        for _ in range(batches):
            if not is_open():
                return
            batch = await self._stale(size)
            if not batch:
                return
            await self.refresh(batch)

    async def _stale(self, size: int) -> list[K]:
        """Up to a batch of keys that are still stale; another writer may have refreshed one."""
        batch: list[K] = []
        while taken := self.lane.take(size - len(batch), batch):
            times = await self.refresh_times(taken)
            now = self.clock()
            for key in taken:
                if times[key] <= now and self.lane.cooling_until(key, now) is None:
                    batch.append(key)
                else:
                    self.lane.land([key])
                    self.lane.looked_up(key, times[key], now)
        return batch

    async def look_up(self) -> bool:
        """Look up a slice of due keys, and yield to the loop. False if none is due."""
        due = self.lane.due(self.clock(), SLICE)
        if not due:
            return False
        self.note(await self.refresh_times(due))
        await asyncio.sleep(0)
        return True

    def plan(self, times: Mapping[K, float]) -> None:
        """Note when keys that are being renewed are stale again, so that none is looked up."""
        self._stale_at |= times

    def note(self, times: Mapping[K, float]) -> None:
        """Queue stale keys, unless they cool down; fresh keys wait for their time."""
        now = self.clock()
        for key, at in times.items():
            self.lane.looked_up(key, at, now)

    async def refresh(self, keys: Sequence[K]) -> None:
        """Each key is free again when its own load ends; a slow one delays no other."""
        flying = dict.fromkeys(keys)
        try:
            async with aclosing(self.renew(keys)) as renewed:
                async for outcomes in renewed:
                    await self._plan_next(outcomes, flying, len(keys))
        finally:
            self._land(flying)

    async def _plan_next(
        self, outcomes: Mapping[K, object], flying: dict[K, None], of: int
    ) -> None:
        """When to look at each again.

        A key that was invalidated since its copy arrived has no time: it is looked up at once.
        """
        times = dict.fromkeys(outcomes, NEVER)
        unplanned = [key for key in outcomes if key not in self._stale_at]
        if unplanned:
            times |= await self.refresh_times(unplanned)
        now = self.clock()
        times |= self._land(outcomes)
        failed = {
            key: outcome for key, outcome in outcomes.items() if isinstance(outcome, LoadFailed)
        }
        cooling = {
            key: error for key, error in failed.items() if not isinstance(error, RaisedByLoader)
        }
        self.cool(cooling, of, now)
        for key in outcomes:
            del flying[key]
            if key in failed:
                self.lane.looked_up(key, times[key], now)
            else:
                self.lane.refreshed(key, max(times[key], now + SHORTEST_PAUSE), now)

    def cool(self, failed: Mapping[K, LoadFailed], of: int, now: float) -> None:  # noqa: ARG002
        """Each on its own cooldown; `of`: how many were loaded together."""
        for key in failed:
            self.lane.failed(key, now)

    def _land(self, keys: Iterable[K]) -> dict[K, float]:
        """Their loads have ended; return until when each copy that arrived meanwhile is fresh."""
        self.lane.land(keys)
        return {key: self._stale_at.pop(key) for key in keys if key in self._stale_at}


class Watcher(Driver[K], Generic[K, V]):
    """All watched keys of one resource. Its core loads, once for all processes."""

    def __init__(self, core: "Core[K, V]", clock: Clock) -> None:
        super().__init__(core.spec.terms, clock)
        self.core = core
        size = core.spec.max_batch
        self._batches = size * max(1, SLICE // size)  # whole ones: a cut one costs another request
        self._open: set[Watch[K, V]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.watches: dict[K, dict[Watch[K, V], None]] = {}
        self.absent: dict[K, Answer[V]] = {}  # watched keys that did not exist when last asked for
        self._fetched_at: dict[K, float] = {}  # when the known copy of each key was fetched
        self._loads: BoundedDict[K, tuple[float, int]] = BoundedDict(MOST_COUNTED)  # in this second
        self.late: deque[tuple[Watch[K, V], Iterable[K], dict[K, float]]] = deque()  # came or left
        self._driver: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def refresh_times(self, keys: Sequence[K]) -> dict[K, float]:
        return await self.core.renewals.refresh_times(keys)

    def renew(self, keys: Sequence[K]) -> AsyncGenerator[Mapping[K, object]]:
        return self.core.renewals.renew(keys)

    @property
    def watched(self) -> Mapping[K, object]:
        """The keys of all open watches, also those that the driver has not seen yet."""
        every = (key for watch in self._open for key in watch.keys)
        return dict.fromkeys(every) if self.late else self.watches

    def follow(self, watch: Watch[K, V], keys: Sequence[K], *, came: bool = False) -> None:
        """These keys came to the watch or left it; copies that are newer than now are news."""
        if not watch.is_open and watch not in self._open:
            return  # the cache closes, and nothing is watched any more
        entries = self.core.memory.entries if came else {}
        in_memory = filter(entries.__contains__, keys) if len(keys) < len(entries) else entries
        fetched_at = {key: entries[key].copy.fetched_at for key in in_memory}
        if watch.is_open:
            self._open.add(watch)
        else:
            self._open.discard(watch)
        self.late.append((watch, iter(keys), fetched_at))
        if len(self.late) == 1:
            self._take_over()
        loop = self._loop
        is_driven = self._driver is not None and not self._driver.done()
        if (self.watches or self.late) and not is_driven and loop and not loop.is_closed():
            self._driver = loop.create_task(self._start())

    def _take_over(self) -> None:
        """A slice of the keys that came to a watch or left it."""
        self._changed.set()
        watch, left, fetched_at = self.late.popleft()
        keys = list(islice(left, AT_ONCE))
        if len(keys) == AT_ONCE:
            self.late.appendleft((watch, left, fetched_at))
        for key in keys:
            self._match(key, watch, fetched_at)

    def _match(self, key: K, watch: Watch[K, V], fetched_at: dict[K, float]) -> None:
        """Watch the key for this watch, or no longer, as the watch has it now."""
        watches = self.watches.get(key, {})
        has = watch.has(key)
        if has is (watch in watches):
            return
        if not has:
            del watches[watch]
            if not watches:
                self.lane.unsubscribe(key)
                self.core.owner.note(self.core, [key], "unwatch")
                for known in (self.watches, self.absent, self._fetched_at):
                    known.pop(key, None)
            return
        if not watches:
            self.core.owner.note(self.core, [key], "watch")
            self.watches[key] = watches
            if key in fetched_at:
                self._fetched_at[key] = fetched_at[key]
        watches[watch] = None
        self.lane.subscribe(key, counted=False)
        if (answer := self.absent.get(key)) is not None:
            watch.tell(Update(key, answer))

    def _watches_of(self, key: K) -> tuple[Watch[K, V], ...]:
        """The watches of a key, also those whose keys the driver has not all seen."""
        for watch, _, fetched_at in tuple(self.late):
            self._match(key, watch, fetched_at)
        return tuple(self.watches.get(key, ()))

    def is_news(self, key: K, copy: Copy) -> bool:
        """True if it is newer than the known copy, or the store says so; the first is not news."""
        if key not in self.watches:
            return False
        at = copy.fetched_at
        notices = self.core.memory.notices
        late = at - self._fetched_at.setdefault(key, at)
        if late > 0:
            return True
        # A copy that is older by its time, and still was published after the known one.
        return bool(late and notices and notices.is_published(key, copy.generation))

    def landed(self, key: K, answer: Answer[V], stale_at: float, now: float) -> None:
        """A new copy arrived: tell its watches, and plan its next refresh."""
        watches = self._watches_of(key)
        if not watches:
            return
        self._changed.set()
        self._fetched_at[key] = answer.fetched_at
        if not self.lane.refreshed(key, max(stale_at, now + SHORTEST_PAUSE), now):
            self._stale_at[key] = stale_at  # in flight
        self.absent.pop(key, None)
        if not answer.found:
            self.absent[key] = answer
        update = Update(key, answer)
        for watch in watches:
            watch.tell(update)

    def tell(
        self, key: K, copy: Copy, value: V | None, outlook: Outlook, *, unverified: bool = False
    ) -> None:
        """A new copy was loaded, or put. `unverified`: the store did not confirm it."""
        if not self.watches and not self.late:  # nobody watches anything
            return
        verdict = outlook.at_arrival
        if unverified:  # a watch asked at no certain time, so perhaps after the load began
            verdict = without_store(verdict)
        answer = self.core.memory.new_answer(
            copy, value, verdict, Origin.LOADED, unverified=unverified
        )
        until = watched_until(copy, self.core.spec.terms)
        self.landed(key, answer, until, outlook.now)

    def look_again(self, keys: Iterable[K]) -> None:
        """After an invalidation or a failure, a refresh may be due earlier than planned."""
        if self.watches:
            keys = list(keys)
            for key in keys:
                self._stale_at.pop(key, None)
            self.lane.recheck(keys)
            self._changed.set()

    def begin_anew(self) -> None:
        """Watch nothing. Watches of a closed loop cannot be told."""
        for known in (self._open, self.watches, self.absent, self._fetched_at, self.late):
            known.clear()
        super().__init__(self.core.spec.terms, self.clock)
        self._driver = None
        self._changed = asyncio.Event()

    def close(self) -> None:
        """The cache closes: every loop over a watch ends."""
        driver = self._driver
        watches = tuple(self._open)
        self.begin_anew()  # first, or each of them would leave key by key
        for watch in watches:
            watch.close()
        if driver is not None:
            driver.cancel()

    def check_loop(self) -> None:
        """Check the loop before anything is noted that no driver would look after."""
        self.core.owner.check_not_closed()
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
        while self.watches or self.late:
            self._changed.clear()
            while self.late:
                self._take_over()
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
        """A key that was loaded too often may be loaded again at the end of the second."""
        late = dict(times)
        now = self.clock()
        for key in times.keys() & self._loads.keys():
            since, loads = self._loads[key]
            if loads >= MOST_LOADS and since <= now:
                late[key] = max(times[key], since + 1)
        super().note(late)

    async def _plan_next(
        self, outcomes: Mapping[K, object], flying: dict[K, None], of: int
    ) -> None:
        """Report failures to the watches that want them, with the copy that is left."""
        await super()._plan_next(outcomes, flying, of)
        failed = {
            key: outcome for key, outcome in outcomes.items() if isinstance(outcome, LoadFailed)
        }
        reported = [
            key for key in failed if any(watch.hears_failures for watch in self._watches_of(key))
        ]
        left = await self.core.reads.known(reported) if reported else {}
        for key in reported:
            update = Update(key, left_of(left.get(key), failed[key], self.clock))
            for watch in self._watches_of(key):
                watch.tell_failure(update)

    def _land(self, keys: Iterable[K]) -> dict[K, float]:
        self._changed.set()
        return super()._land(keys)

    async def _pause(self, runtime: Runtime) -> None:
        """Wait until the next key's time, or until something changes."""
        at = self.lane.next_time()
        now = self.clock()
        pause = LONGEST_PAUSE if at is None else min(max(at - now, 0.0), LONGEST_PAUSE)
        waits = [
            asyncio.ensure_future(runtime.sleep(pause)),
            asyncio.ensure_future(self._changed.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not runtime.loop.is_closed():  # an abandoned loop runs nothing any more
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
