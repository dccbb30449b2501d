"""What keeps the keys of a lane fresh: one driver, whatever its pulse (C3-C5, C9, E24).

The lane says what is next; the source reads, leases and loads. `tick` is the seed's pulse: once,
when it is called. A `Watcher` goes on by itself.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Final, Generic, Protocol, TypeVar

from stillfresh.clock import Clock
from stillfresh.engine.lane import Lane
from stillfresh.engine.memory import NEVER
from stillfresh.engine.rules import Terms, pause_of
from stillfresh.errors import LoadFailed

K = TypeVar("K", bound=Hashable)

SLICE: Final = 50
"""Keys read, loaded or let go in one turn of the loop."""
SHORTEST_PAUSE: Final = 0.1
"""However short its freshness."""


class Source(Protocol[K]):
    """Where a driver looks keys up and has them loaded."""

    async def refresh_times(self, keys: Sequence[K]) -> dict[K, float]:
        """When each is to be refreshed; in the past: now."""

    def renew(self, keys: Sequence[K]) -> AsyncGenerator[Mapping[K, object]]:
        """Load what is not fresh, and tell of each as soon as it ends: a LoadFailed, or not."""


class Driver(Generic[K]):
    """Looks up what is due and loads what is stale, for the keys of one lane.

    The lane remembers cooldowns as the store does (E7), also while the store is away.
    """

    def __init__(self, source: Source[K], terms: Terms, clock: Clock) -> None:
        self.lane: Lane[K] = new_lane(terms)
        self.clock = clock
        self._source = source
        self._stale_at: dict[K, float] = {}
        """Of what landed while it is being renewed: it need not be read again."""

    async def tick(self, *, size: int, batches: int, is_open: Callable[[], bool]) -> None:
        """C5: one look at what is due, then up to so many batches; nothing once it is shut."""
        while is_open() and await self.look_up():
            pass
        for _ in range(batches):
            if not is_open() or not (batch := await self._stale(size)):
                return
            await self.refresh(batch)

    async def _stale(self, size: int) -> list[K]:
        """C5: up to a batch of what is still stale: another writer may have refreshed some."""
        batch: list[K] = []
        while taken := self.lane.take(size - len(batch), batch):
            times, now = await self._source.refresh_times(taken), self.clock()
            for key in taken:
                if times[key] <= now and self.lane.cooling_until(key, now) is None:
                    batch.append(key)
                else:
                    self.lane.land([key])
                    self.lane.looked_up(key, times[key], now)
        return batch

    async def look_up(self) -> bool:
        """A slice of what is due, and a turn for the loop; False if nothing is."""
        if not (due := self.lane.due(self.clock(), SLICE)):
            return False
        self.note(await self._source.refresh_times(due))
        await asyncio.sleep(0)
        return True

    def note(self, times: Mapping[K, float]) -> None:
        """C3: the stale are queued, unless they are cooling; the fresh wait for their time."""
        now = self.clock()
        for key, at in times.items():
            self.lane.looked_up(key, at, now)

    async def refresh(self, keys: Sequence[K]) -> None:
        """E24: each key is free again when its own load ends; a slow one holds up no other."""
        flying = dict.fromkeys(keys)
        try:
            async with aclosing(self._source.renew(keys)) as renewed:
                async for outcomes in renewed:
                    await self._ended(outcomes, flying, len(keys))
        finally:
            self._land(flying)

    async def _ended(self, outcomes: Mapping[K, object], flying: dict[K, None], of: int) -> None:
        """When to look at each again.

        A key that was invalidated since it landed has no time: it is looked up at once (E24).
        """
        times = dict.fromkeys(outcomes, NEVER)
        if untold := [key for key in outcomes if key not in self._stale_at]:
            times |= await self._source.refresh_times(untold)
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

    def cool(self, failed: Mapping[K, LoadFailed], of: int, now: float) -> None:
        """C9: each on its own cooldown. One of a whole batch may be why: they are tried apart."""
        together = of if len(failed) == of else None
        for key, error in failed.items():
            self.lane.failed(key, now, pause_of(error.__cause__) or 0.0, together=together)

    def _land(self, keys: Iterable[K]) -> dict[K, float]:
        """Until when each is fresh that landed meanwhile."""
        self.lane.land(keys)
        return {key: self._stale_at.pop(key) for key in keys if key in self._stale_at}


def new_lane(terms: Terms) -> Lane[K]:
    return Lane(cooldown=terms.first_cooldown, longest_cooldown=terms.longest_cooldown)
