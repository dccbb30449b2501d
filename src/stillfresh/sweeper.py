"""Sweeper: drops what has expired from several caches while the application runs (M8).

The timed loop is a few lines around `tick()`, which tests call themselves.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, Self

from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, StillfreshError
from stillfresh.ttl_cache import SLICE

__all__ = ["Sweepable", "Sweeper"]

logger = logging.getLogger(__name__)


class Sweepable(Protocol):
    """What a Sweeper can sweep: a TtlCache, or anything of yours with this method."""

    def cleanup_expired(self, limit: int | None = None) -> int:
        """Drop at most `limit` expired entries; return how many."""


class Sweeper:
    """`async with Sweeper(a, b, c, every="5m"):` all three are swept while the block runs."""

    def __init__(
        self,
        *caches: Sweepable,
        every: Duration,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        for cache in caches:
            if not callable(getattr(cache, "cleanup_expired", None)):
                raise ConfigError(
                    f"Sweeper: takes caches one by one, Sweeper(a, b, every=...), not {cache!r}"
                )
        self._caches = caches
        self._every = seconds(every, name="every", positive=True)
        self._sleep = sleep
        self._task: asyncio.Task[None] | None = None

    def cleanup_expired(self) -> int:
        """Sweep all caches now, in one go; return the sum of what they dropped."""
        return sum(_swept(cache, None) for cache in self._caches)

    async def tick(self) -> int:
        """Sweep all caches in slices, giving the loop a turn after each; return the sum."""
        total, busy = 0, list(self._caches)
        while busy:
            for cache in list(busy):
                dropped = _swept(cache, SLICE)
                total += dropped
                if dropped < SLICE:
                    busy.remove(cache)
                await asyncio.sleep(0)
        return total

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise StillfreshError("this Sweeper is already running; make another one")
        self._task = asyncio.create_task(self._run(), name="stillfresh-sweeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        try:
            while True:
                await self._sleep(self._every)
                await self.tick()
        except Exception:
            logger.exception("the sweeper stopped: its sleep= failed")


def _swept(cache: Sweepable, limit: int | None) -> int:
    try:
        return int(cache.cleanup_expired(limit))
    except (Exception, asyncio.CancelledError):  # raised, not delivered: nothing is awaited here
        logger.exception("sweeping %r failed; it is tried again next time", cache)
        return 0
