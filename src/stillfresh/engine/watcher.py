"""What keeps watched keys fresh: a driver that goes on by itself (C3-C6, C14, E24).

The core reads, leases and loads, so that one load serves every process on the store (E5). One
pause for all keys of a resource: no timer per key, and no work for a key before its time comes.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from stillfresh.clock import Clock
from stillfresh.engine.driver import SHORTEST_PAUSE, SLICE, Driver, new_lane
from stillfresh.engine.lane import LaneState
from stillfresh.engine.model import Answer, left_of
from stillfresh.engine.tasks import Runtime
from stillfresh.engine.watch import Update, Watch
from stillfresh.errors import LoadFailed, StillfreshError

if TYPE_CHECKING:
    from stillfresh.engine.core import Core

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_LOADS: Final = 10
"""Of a watched key in any second, however often it is invalidated."""
LONGEST_PAUSE: Final = 30.0
"""A wall clock that was set is noticed after so long."""

logger = logging.getLogger(__name__)


class LoadPace(Generic[K]):
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


class Watcher(Driver[K], Generic[K, V]):
    """All that is watched of one resource, for as long as it is."""

    def __init__(self, core: "Core[K, V]", clock: Clock) -> None:
        super().__init__(core, core.spec.terms, clock)
        self._core = core
        size = core.spec.max_batch
        self._batches = size * max(1, SLICE // size)
        """Whole batches: a slice that cuts one would cost a request."""
        self._open: set[Watch[K, V]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.watches: dict[K, dict[Watch[K, V], None]] = {}
        self.absent: dict[K, Answer[V]] = {}
        """What was heard last of what is watched, and does not exist."""
        self._heard: dict[K, float] = {}
        """When the copy was fetched that is known of each key."""
        self._pace: LoadPace[K] = LoadPace()
        self._leaving: list[tuple[K, Watch[K, V]]] = []
        self._driver: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def check(self, keys: Iterable[K]) -> None:
        """ConfigError if one is no key."""
        self._core.check(keys)

    def begin(self, watch: Watch[K, V]) -> None:
        self._core.check_not_closed()
        self._check_loop()
        self._open.add(watch)

    def enter(self, key: K, watch: Watch[K, V]) -> None:
        self._check_loop()
        if key not in self.watches and (entry := self._core.memory.entries.get(key)) is not None:
            self._heard[key] = entry.copy.fetched_at
        self.watches.setdefault(key, {})[watch] = None
        self.lane.subscribe(key, counted=True)
        self._wake()
        if (answer := self.absent.get(key)) is not None:
            watch.tell(Update(key, answer))

    def leave(self, key: K, watch: Watch[K, V]) -> None:
        watches = self.watches.get(key, {})
        if watch not in watches:
            return
        del watches[watch]
        self.lane.unsubscribe(key)
        if not watches:
            del self.watches[key]
            self.absent.pop(key, None)
            self._heard.pop(key, None)
        self._changed.set()

    def is_news(self, key: K, fetched_at: float) -> bool:
        """True if a later copy was published than the one that is known; the first is no news."""
        return key in self.watches and fetched_at > self._heard.setdefault(key, fetched_at)

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
        self._heard[key] = answer.fetched_at
        self.lane.refreshed(key, max(stale_at, now + SHORTEST_PAUSE), now)
        if self.lane.state(key) is LaneState.FLYING:
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
            self.lane.recheck(keys)
            self._changed.set()

    def begin_anew(self) -> None:
        """E21: its loop was closed: nothing of it can be told."""
        for known in (self._open, self.watches, self.absent, self._heard, self._stale_at):
            known.clear()
        self._leaving.clear()
        self.lane = new_lane(self._core.spec.terms)
        self._driver, self._changed = None, asyncio.Event()

    def close(self) -> None:
        """The cache closes: whoever iterates comes to the end."""
        self.watches.clear()
        self.absent.clear()
        self._heard.clear()
        self._leaving.clear()
        self.lane.reset()
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
            runtime = await self._core.ready()
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
            while await self.look_up():
                pass
            while batch := self.lane.take(self._batches):
                self._pace.note(batch, self.clock())
                runtime.spawn(self.refresh(batch), runtime.context)
                await asyncio.sleep(0)
            await self._pause(runtime)

    def note(self, times: Mapping[K, float]) -> None:
        now, free_at = self.clock(), self._pace.free_at
        super().note({key: max(at, free_at(key, now)) for key, at in times.items()})

    async def _ended(self, outcomes: Mapping[K, object], flying: dict[K, None], of: int) -> None:
        """Failures are told to the watches that hear of them, with what is left to show."""
        await super()._ended(outcomes, flying, of)
        failed = {key: it for key, it in outcomes.items() if isinstance(it, LoadFailed)}
        heard = [
            key for key in failed if any(it.hears_failures for it in self.watches.get(key, ()))
        ]
        left = await self._core.known(heard) if heard else {}
        for key in heard:
            update = Update(key, left_of(left.get(key), failed[key], self.clock))
            for watch in tuple(self.watches.get(key, ())):
                watch.tell_failure(update)

    def cool(self, failed: Mapping[K, LoadFailed], of: int, now: float) -> None:
        """The store, where it is not away, knows more of each failure (E7)."""
        del of
        for key in failed:
            self.lane.failed(key, now)

    def _land(self, keys: Iterable[K]) -> dict[K, float]:
        self._changed.set()
        return super()._land(keys)

    async def _pause(self, runtime: Runtime) -> None:
        """Until the next key's time comes, or something changes."""
        at, now = self.lane.next_time(), self.clock()
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
