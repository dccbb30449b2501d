"""Sweeper: drops expired entries of several caches while the application runs.

The timed loop is a few lines around `tick()`, which tests call themselves.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from inspect import isawaitable, iscoroutinefunction, signature
from typing import Any, Final, Protocol, Self

from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, StillfreshError, shown
from stillfresh.ttl_cache import SLICE, TtlCache

PARTING: Final = 1.0
"""Seconds in which a cleanup that was cancelled has to end."""

logger = logging.getLogger(__name__)


class Sweepable(Protocol):
    """What a Sweeper can sweep: a TtlCache, or anything of yours with this method.

    It may be async. With a parameter `limit` it is called in slices, without one once a sweep.
    """

    def cleanup_expired(self) -> int | Awaitable[int]:
        """Drop expired entries, at most `limit` if it has one; return how many."""


class Sweeper:
    """Drops expired entries of several caches: `async with Sweeper(a, b, every="5m"):`."""

    def __init__(
        self,
        *caches: Sweepable,
        every: Duration,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._caches = [_Swept(cache) for cache in caches]
        self._every = seconds(every, name="every", positive=True)
        self._sleep = sleep
        self._task: asyncio.Task[None] | None = None

    def cleanup_expired(self) -> int:
        """Sweep all caches now; return how many entries were dropped.

        Raises StillfreshError if a cache's own method is async: use `tick`.
        """
        for swept in self._caches:
            if iscoroutinefunction(swept.clean):
                raise StillfreshError(
                    f"{shown(swept.cache)}: its cleanup_expired() is async and cannot be awaited "
                    "here; use await sweeper.tick()"
                )
        return sum(_sweep_and_log(swept.cache, swept.all) for swept in self._caches)

    async def tick(self) -> int:
        """Sweep all caches in slices, so that the event loop can do other work; return how many."""
        total = 0
        busy = list(self._caches)
        while busy:
            for swept in list(busy):
                dropped = await self._slice(swept)
                total += dropped
                if dropped < SLICE or not swept.takes_limit:
                    busy.remove(swept)
                await asyncio.sleep(0)
        return total

    async def _slice(self, swept: "_Swept") -> int:
        """Sweep in a task, so that a cancellation of the cache is not one of the sweeper.

        An async cleanup that takes longer than `every` is cancelled. One that refuses to end is
        left alone, and begun again when it has ended.
        """
        if swept.late is not None and not swept.late.done():  # it was cancelled, and goes on
            return self._given_up(swept)
        task = asyncio.create_task(swept.slice())
        try:
            await asyncio.wait([task], timeout=self._every)
        finally:
            if is_late := task.cancel():
                swept.late = task
                await asyncio.wait([task], timeout=min(self._every, PARTING))
        if is_late:
            self._given_up(swept)
        return _sweep_and_log(swept.cache, task.result) if task.done() else 0

    def _given_up(self, swept: "_Swept") -> int:
        logger.error("%r did not end within %g s (every)", swept.cache, self._every)
        return 0

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise StillfreshError("this Sweeper is already running; make another one")
        self._task = asyncio.create_task(self._run(), name="stillfresh-sweeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        task = self._task
        self._task = None
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


class _Swept:
    def __init__(self, cache: Sweepable) -> None:
        self.cache = cache
        self.clean, self.takes_limit = _cleanup_of(cache)
        self.late: asyncio.Task[int] | None = None

    def all(self) -> int:
        return _number(self._begun(None))

    async def slice(self) -> int:
        begun = self._begun(SLICE)
        return _number(await begun if isawaitable(begun) else begun)

    def _begun(self, limit: int | None) -> Any:  # noqa: ANN401 (foreign code: its number, or not)
        return self.clean(limit=limit) if self.takes_limit else self.clean()


def _number(dropped: object) -> int:
    if not isinstance(dropped, int):
        raise TypeError(
            f"cleanup_expired() must return how many entries it dropped, not {shown(dropped)}"
        )
    return dropped


def _sweep_and_log(cache: Sweepable, sweep: Callable[[], int]) -> int:
    """Log an error, and go on. A cancellation came from the cache: nothing is awaited here."""
    try:
        return sweep()
    except (Exception, asyncio.CancelledError):
        logger.exception("sweeping %r failed; it is tried again next time", cache)
        return 0


def _cleanup_of(cache: Sweepable) -> tuple[Callable[..., Any], bool]:
    """Its method, and whether that takes `limit`; other required parameters are refused."""
    clean = getattr(cache, "cleanup_expired", None)
    if callable(clean):
        try:
            form = signature(clean)
        except (TypeError, ValueError):  # a function in C may not say
            return clean, isinstance(cache, TtlCache)
        for takes_limit in (True, False) if "limit" in form.parameters else (False,):
            with suppress(TypeError):
                form.bind(**({"limit": SLICE} if takes_limit else {}))
                return clean, takes_limit
    raise ConfigError(
        f"Sweeper: {shown(cache)} has no cleanup_expired() without arguments, or with limit= "
        "alone; give objects that have one, one by one: Sweeper(a, b, every=...)"
    )
