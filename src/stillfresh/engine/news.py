"""Changes by other processes, announced by the store, and how long silence proves none.

A beat goes through the store and comes back after every announcement made before it. So for
`memory_for` after a beat was sent, memory need not ask about an entry that it checked since it
began to listen: it would have heard of a change. After a gap in the channel, each entry is checked
again before it is trusted.
"""

import asyncio
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar

from stillfresh.backoff import pause_after, spread
from stillfresh.bounded import SLICE, sliced
from stillfresh.errors import StoreError
from stillfresh.stores import A_TAG, PushesChanges

if TYPE_CHECKING:
    from stillfresh.engine.core import Core
    from stillfresh.engine.runtime import Runtime

K = TypeVar("K", bound=Hashable)

SILENT: Final = float("-inf")
BEATS: Final = 3
"""Beats in one `memory_for`, so that one may be late."""
SHORTEST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 1.0
SET_BACK: Final = 10.0
"""Seconds; longer than the time from a beat to the moment when the next is missed."""
FIRST_RETRY: Final = 0.1
LONGEST_RETRY: Final = 5.0
MOST_NOTED: Final = 10_000
"""Announced keys of a resource that are remembered one by one."""


class News:
    """One channel to the store, for all resources of an open cache."""

    def __init__(
        self, runtime: "Runtime", push: PushesChanges, cores: "Mapping[str, Core[Any, Any]]"
    ) -> None:
        self._runtime = runtime
        self._push = push
        self._cores = cores
        self._is_wanted = asyncio.Event()
        self.since = float("inf")
        """When it began to listen."""
        self.proved_at = SILENT
        """When the last beat was sent that has come back."""
        self._left = 0
        """Tags whose keys are not all doubted yet."""
        self._latest = SILENT
        """`proved_at`, kept after a gap: it shows whether the clock was set back."""

    def want(self) -> None:
        """Listen from now on: memory or a watch needs it."""
        self._is_wanted.set()

    async def follow(self) -> NoReturn:
        """Listen until the cache closes; try again while the store is unavailable."""
        await self._is_wanted.wait()
        failures = 0
        while True:
            try:
                async with self._push.listen(self._tell) as channel:
                    self.since = self._checked_from(self._runtime.clock())
                    await self._look_again()
                    while True:
                        sent = self._runtime.clock()
                        await channel.beat()
                        while self._left:  # noqa: ASYNC110 (an event for each turn costs more)
                            await asyncio.sleep(0)
                        self.proved_at = self._latest = sent
                        failures = 0
                        await self._runtime.sleep(self._pause())
            except StoreError:
                failures += 1
            finally:
                self.since = float("inf")
                self.proved_at = SILENT
            pause = pause_after(failures, first=FIRST_RETRY, longest=LONGEST_RETRY)
            await self._runtime.sleep(spread(pause, self._runtime.dice))

    def _checked_from(self, now: float) -> float:
        """From when checked entries count. After a clock was set back, earlier ones do not."""
        return now if now >= self._latest else self._latest + SET_BACK

    def _pause(self) -> float:
        lags = [core.spec.memory_for for core in self._cores.values() if core.spec.memory_for]
        return min(max(min(lags, default=LONGEST_PAUSE) / BEATS, SHORTEST_PAUSE), LONGEST_PAUSE)

    def _tell(self, kind: str, id_: str, generation: str | None) -> None:
        if kind == A_TAG:
            for tagged_core in self._cores.values():
                if keys := tagged_core.tagged(id_):
                    self._doubt_all(tagged_core, keys)
        elif (core := self._cores.get(kind)) is not None:
            with suppress(ValueError):  # an id that is not a key of this release
                self._doubt(core, core.names.key(id_), generation)

    def _doubt_all(self, core: "Core[K, Any]", keys: list[K]) -> None:
        """A slice in a turn of the loop. No beat counts before the last slice."""
        if len(keys) > SLICE:
            if core.memory.notices is not None:
                core.memory.notices.doubt(self._runtime.clock())
            self._left += 1
            self._runtime.loop.call_soon(self._doubt_rest, core, keys[SLICE:])
        for key in keys[:SLICE]:
            self._doubt(core, key, None)

    def _doubt_rest(self, core: "Core[K, Any]", keys: list[K]) -> None:
        self._left -= 1
        self._doubt_all(core, keys)

    def _doubt(self, core: "Core[K, Any]", key: K, generation: str | None) -> None:
        entry = core.memory.entries.get(key)
        notices = core.memory.notices
        if notices is not None:
            notices.note(key, generation, self._runtime.clock())
        if entry is not None and entry.copy.generation == generation:
            return  # memory has it already
        if entry is not None:
            entry.until = entry.old_until = entry.since = entry.vouched = SILENT
        if key in core.watcher.watches:
            core.watcher.look_again([key])

    async def _look_again(self) -> None:
        """Check again: changes were not announced while the channel was down."""
        for core in tuple(self._cores.values()):
            async for keys in sliced(tuple(core.watcher.watches)):
                core.watcher.look_again(keys)


class Notices(Generic[K]):
    """The announced changes of one resource; a copy may have been read meanwhile."""

    def __init__(self, news: News) -> None:
        self._news = news
        self._announced: dict[K, tuple[float, str | None, float]] = {}
        """When it was announced, the published generation, if any, and when another one was."""
        self._others: tuple[float, str | None, float] = SILENT, None, SILENT
        """What counts as announced of any other key."""

    def note(self, key: K, generation: str | None, now: float) -> None:
        if len(self._announced) >= MOST_NOTED:
            self.doubt(now)
        announced_at, published, other_at = self._announced.get(key, self._others)
        self._announced[key] = (
            now,
            generation,
            other_at if published == generation else announced_at,
        )

    def doubt(self, now: float) -> None:
        """From now on, treat every key as announced."""
        self._announced.clear()
        self._others = now, None, now

    def is_known(self, key: K, generation: str, since: float) -> bool:
        """True if nothing but its publication was announced since the store was asked for it."""
        announced_at, published, other_at = self._announced.get(key, self._others)
        return since > (other_at if generation == published else announced_at)

    def is_published(self, key: K, generation: str) -> bool:
        """True if this generation was the last that was announced for the key."""
        return key in self._announced and self._announced[key][1] == generation

    def trusted_until(self, since: float, memory_for: float) -> float:
        """Until when an entry checked at `since` may be served, if no change was announced."""
        news = self._news
        return news.proved_at + memory_for if since >= news.since else SILENT
