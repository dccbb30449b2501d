"""What keeps watched keys fresh: one lane and one pause for all of a resource (C3-C6, C14).

The lane says what is next; the core reads, leases and loads, so that one load serves every process
on the store (E5). No timer per key, and no work for a key before its time comes.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Final, Generic, Protocol, TypeVar

from stillfresh.engine.lane import Lane, State
from stillfresh.engine.memory import NEVER
from stillfresh.engine.model import Answer, Outcome, left_of
from stillfresh.engine.spec import Runtime
from stillfresh.engine.watch import Update, Watch
from stillfresh.errors import LoadFailed, StillfreshError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SLICE: Final = 50
"""Keys read, loaded or let go in one turn of the loop."""
SHORTEST_PAUSE: Final = 0.1
"""However short its freshness."""
MOST_LOADS: Final = 10
"""Of a watched key in any second, however often it is invalidated."""
LONGEST_PAUSE: Final = 30.0
"""A wall clock that was set is noticed after so long."""
COOLDOWN: Final = 1.0
LONGEST_COOLDOWN: Final = 60.0
"""Of a key that fails while the store, which remembers failures, is away (E7 otherwise)."""

logger = logging.getLogger(__name__)


class Watched(Protocol[K, V]):
    """What a watcher needs of its resource."""

    def check(self, keys: Iterable[K]) -> None:
        """ConfigError if one is no key."""

    def check_not_closed(self) -> None:
        """NotOpen if it is closed."""

    async def ready(self) -> Runtime:
        """Opens the cache if it was never opened."""

    async def refresh_times(self, keys: Sequence[K]) -> dict[K, float]:
        """When each is to be refreshed; in the past: now."""

    async def known(self, keys: Iterable[K]) -> dict[K, Outcome[V]]:
        """What can be said of each without a load."""

    def renew(self, keys: Sequence[K]) -> AsyncGenerator[dict[K, Outcome[V] | None]]:
        """Load what is not fresh; each as soon as it ends, and None for what is fresh."""


class Pace(Generic[K]):
    """When each key was taken of late; what was not, for a second, is forgotten little by little:
    ten thousand at once would hold up the loop."""

    def __init__(self) -> None:
        self._taken: OrderedDict[K, deque[float]] = OrderedDict()

    def note(self, keys: Sequence[K], now: float) -> None:
        for key in keys:
            self._taken.setdefault(key, deque(maxlen=MOST_LOADS)).append(now)
            self._taken.move_to_end(key)
        for _ in range(2 * len(keys)):
            if 0 <= now - next(iter(self._taken.values()))[-1] < 1:
                break
            self._taken.popitem(last=False)

    def free_at(self, key: K, now: float) -> float:
        """In the past: now. A clock that was set back holds up nothing."""
        taken = self._taken.get(key)
        if taken is None or len(taken) < MOST_LOADS or taken[0] > now:
            return now
        return taken[0] + 1

    def __len__(self) -> int:
        return len(self._taken)


class Watcher(Generic[K, V]):
    """All that is watched of one resource."""

    def __init__(self, watched: Watched[K, V], max_batch: int) -> None:
        self._watched = watched
        self._batches = max_batch * max(1, SLICE // max_batch)
        """Whole batches: a slice that cuts one would cost a request."""
        self.check = watched.check
        self._open: set[Watch[K, V]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lane: Lane[K] = _new_lane()
        self.watches: dict[K, dict[Watch[K, V], None]] = {}
        self.absent: dict[K, Answer[V]] = {}
        """What was heard last of what is watched, and does not exist."""
        self._pace: Pace[K] = Pace()
        self._stale_at: dict[K, float] = {}
        """Of what landed while it is being renewed: it need not be read again."""
        self._leaving: list[tuple[K, Watch[K, V]]] = []
        self._driver: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def begin(self, watch: Watch[K, V]) -> None:
        self._watched.check_not_closed()
        self._check_loop()
        self._open.add(watch)

    def enter(self, key: K, watch: Watch[K, V]) -> None:
        self._check_loop()
        self.watches.setdefault(key, {})[watch] = None
        self._lane.subscribe(key, counted=True)
        self._wake()
        if (answer := self.absent.get(key)) is not None:
            watch.tell(Update(key, answer))

    def leave(self, key: K, watch: Watch[K, V]) -> None:
        watches = self.watches.get(key, {})
        if watch not in watches:
            return
        del watches[watch]
        self._lane.unsubscribe(key)
        if not watches:
            del self.watches[key]
            self.absent.pop(key, None)
        self._changed.set()

    def leave_all(self, keys: Sequence[K], watch: Watch[K, V]) -> None:
        """Many at once would hold up the loop: the driver lets the rest go, slice by slice."""
        self._open.discard(watch)
        for key in keys[:SLICE]:
            self.leave(key, watch)
        self._leaving += [(key, watch) for key in keys[SLICE:]]
        self._changed.set()

    def landed(self, key: K, answer: Answer[V], stale_at: float, now: float) -> None:
        """A new copy is here: tell its watches, and plan its next refresh (E24)."""
        if (watches := self.watches.get(key)) is None:
            return
        self._changed.set()
        self._lane.refreshed(key, max(stale_at, now + SHORTEST_PAUSE), now)
        if self._lane.state(key) is State.FLYING:
            self._stale_at[key] = stale_at
        self.absent.pop(key, None)
        if not answer.found:
            self.absent[key] = answer
        update = Update(key, answer)
        for watch in tuple(watches):
            watch.tell(update)

    def look_again(self, keys: Iterable[K]) -> None:
        """E24: after an invalidation or a failure, a refresh may be due earlier than planned."""
        if self.watches:
            keys = list(keys)
            for key in keys:
                self._stale_at.pop(key, None)
            self._lane.recheck(keys)
            self._changed.set()

    def begin_anew(self) -> None:
        """E21: its loop was closed: nothing of it can be told."""
        for known in (self._open, self.watches, self.absent, self._stale_at, self._leaving):
            known.clear()
        self._lane, self._driver, self._changed = _new_lane(), None, asyncio.Event()

    def close(self) -> None:
        """The cache closes: whoever iterates comes to the end."""
        self.watches.clear()
        self.absent.clear()
        self._leaving.clear()
        self._lane.reset()
        for watch in tuple(self._open):
            watch.close()
        self._leaving.clear()
        if self._driver is not None:
            self._driver.cancel()

    def _check_loop(self) -> None:
        """Before anything is noted: what no driver will look after must not stay behind."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise StillfreshError("enter a watch inside a running event loop") from None
        if self._loop is not None and self._loop.is_closed():  # before the cache was open
            self.begin_anew()
            self._loop = None
        if self._open and loop is not self._loop:
            raise StillfreshError("this is watched by another event loop; enter the watch there")
        self._loop = loop

    def _wake(self) -> None:
        self._changed.set()
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        """The cache may have to be opened first; then the driver is one of its tasks."""
        try:
            runtime = await self._watched.ready()
        except StillfreshError as exc:
            logger.error("nothing is watched, since the cache did not open: %s", exc)  # noqa: TRY400
            self.close()
            return
        self._changed = asyncio.Event()  # of this loop; the cache may be opened on another later
        self._driver = runtime.spawn(self._drive(runtime), runtime.context)

    async def _drive(self, runtime: Runtime) -> None:
        while self.watches:
            self._changed.clear()
            while self._leaving:
                for key, watch in self._leaving[-SLICE:]:
                    self.leave(key, watch)
                del self._leaving[-SLICE:]
                await asyncio.sleep(0)
            while due := self._lane.due(runtime.clock(), SLICE):
                await self._look_up(runtime, due)
                await asyncio.sleep(0)
            while batch := self._lane.take(self._batches):
                self._pace.note(batch, runtime.clock())
                runtime.spawn(self._renew(runtime, batch), runtime.context)
                await asyncio.sleep(0)
            await self._pause(runtime)

    async def _look_up(self, runtime: Runtime, keys: Sequence[K]) -> None:
        times, now = await self._watched.refresh_times(keys), runtime.clock()
        for key in keys:
            self._lane.looked_up(key, max(times[key], self._pace.free_at(key, now)), now)

    async def _renew(self, runtime: Runtime, keys: Sequence[K]) -> None:
        """E24: each key is free again when its own load ends; a slow one holds up no other."""
        flying = dict.fromkeys(keys)
        try:
            async with aclosing(self._watched.renew(keys)) as renewed:
                async for outcomes in renewed:
                    await self._renewed(runtime, outcomes, flying)
        finally:
            self._land(flying)

    async def _renewed(
        self, runtime: Runtime, outcomes: Mapping[K, Outcome[V] | None], flying: dict[K, None]
    ) -> None:
        """Told by `landed` what came; here only when to look again.

        A key that was invalidated since it landed has no time: it is looked up at once (E24).
        """
        times = dict.fromkeys(outcomes, NEVER)
        if untold := [key for key in outcomes if key not in self._stale_at]:
            times |= await self._watched.refresh_times(untold)
        now = runtime.clock()
        times |= self._land(outcomes)
        for key in outcomes:
            del flying[key]
        failed = {key: it for key, it in outcomes.items() if isinstance(it, LoadFailed)}
        for key in outcomes:
            if key in failed:
                self._lane.failed(key, now)
                self._lane.looked_up(key, times[key], now)
            else:
                self._lane.refreshed(key, max(times[key], now + SHORTEST_PAUSE), now)
        await self._tell_failures(runtime, failed)

    def _land(self, keys: Iterable[K]) -> dict[K, float]:
        """Until when each is fresh that landed meanwhile."""
        self._lane.land(keys)
        self._changed.set()
        return {key: self._stale_at.pop(key) for key in keys if key in self._stale_at}

    async def _tell_failures(self, runtime: Runtime, failed: Mapping[K, LoadFailed]) -> None:
        """Once for all who want to hear of it, with what is left to show."""
        heard = [
            key for key in failed if any(it.hears_failures for it in self.watches.get(key, ()))
        ]
        left = await self._watched.known(heard) if heard else {}
        for key in heard:
            answer = left_of(left.get(key), failed[key], runtime.clock)
            update = Update(key, answer)
            for watch in tuple(self.watches.get(key, ())):
                watch.tell_failure(update)

    async def _pause(self, runtime: Runtime) -> None:
        """Until the next key's time comes, or something changes."""
        at, now = self._lane.next_time(), runtime.clock()
        pause = LONGEST_PAUSE if at is None else min(max(at - now, 0.0), LONGEST_PAUSE)
        waits = [
            asyncio.ensure_future(runtime.sleep(pause)),
            asyncio.ensure_future(self._changed.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


def _new_lane() -> Lane[K]:
    return Lane(cooldown=COOLDOWN, longest_cooldown=LONGEST_COOLDOWN)
