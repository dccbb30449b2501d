"""What other processes did to a store that says so at once, and how long its silence counts (S10).

A beat goes through the store and comes back behind everything that was done before it. So until
`memory_for` after a beat was sent, memory need not ask about an entry that it has checked since it
began to listen: of any change it would have been told. After a pause in the channel every entry is
checked again before it is trusted.
"""

import asyncio
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar

from stillfresh.backoff import pause_after, spread
from stillfresh.bounded import SLICE, sliced
from stillfresh.errors import StoreError
from stillfresh.stores import A_TAG

if TYPE_CHECKING:
    from stillfresh.engine.core import Core
    from stillfresh.engine.runtime import Runtime

K = TypeVar("K", bound=Hashable)

SILENT: Final = float("-inf")
BEATS: Final = 3
"""In one `memory_for`, so that one that is late does no harm."""
SHORTEST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 1.0
SET_BACK: Final = 10.0
"""Seconds, more than lie between a beat and the time when the next is missed."""
FIRST_RETRY: Final = 0.1
LONGEST_RETRY: Final = 5.0
MOST_NOTED: Final = 10_000
"""Keys of a resource that were told of, which are remembered one by one."""


class News:
    """One channel to the store, for all resources of an open cache."""

    def __init__(self, runtime: "Runtime", cores: "Mapping[str, Core[Any, Any]]") -> None:
        self._runtime = runtime
        self._cores = cores
        self._is_wanted = asyncio.Event()
        self.since = float("inf")
        """When it began to listen."""
        self.proved_at = SILENT
        """When the last beat was sent that came back."""
        self._left = 0
        """Tags whose keys are not all doubted yet."""
        self._latest = SILENT
        """The same, kept after a pause: a clock that was set back is known by it."""

    def want(self) -> None:
        """Somebody has a use for it: memory, or a watch."""
        self._is_wanted.set()

    async def follow(self) -> NoReturn:
        """Until the cache closes; a store that is unavailable is tried again."""
        await self._is_wanted.wait()
        failures = 0
        while True:
            try:
                async with self._runtime.store.listen(self._tell) as channel:
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
                self.since, self.proved_at = float("inf"), SILENT
            pause = pause_after(failures, first=FIRST_RETRY, longest=LONGEST_RETRY)
            await self._runtime.sleep(spread(pause, self._runtime.dice))

    def _checked_from(self, now: float) -> float:
        """Entries checked from then on count. After a clock was set back, earlier ones must not."""
        return now if now >= self._latest else self._latest + SET_BACK

    def _pause(self) -> float:
        lags = [core.spec.memory_for for core in self._cores.values() if core.spec.memory_for]
        return min(max(min(lags, default=LONGEST_PAUSE) / BEATS, SHORTEST_PAUSE), LONGEST_PAUSE)

    def _tell(self, kind: str, id_: str, generation: str | None) -> None:
        if kind == A_TAG:
            for one in self._cores.values():
                if keys := one.tagged(id_):
                    self._doubt_all(one, keys)
        elif (core := self._cores.get(kind)) is not None:
            with suppress(ValueError):  # an id that is no key of this release
                self._doubt(core, core.key(id_), generation)

    def _doubt_all(self, core: "Core[K, Any]", keys: list[K]) -> None:
        """A slice in a turn of the loop (E28). No beat counts before the last one is done."""
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
        entry, notices = core.memory.entries.get(key), core.memory.notices
        if notices is not None:
            notices.note(key, generation, self._runtime.clock())
        if entry is not None and entry.copy.generation == generation:
            return  # memory has it already
        if entry is not None:
            entry.until = entry.since = SILENT
        if key in core.watcher.watches:
            core.watcher.look_again([key])

    async def _look_again(self) -> None:
        """Nobody was told while the channel was unavailable."""
        for core in tuple(self._cores.values()):
            async for keys in sliced(tuple(core.watcher.watches)):
                core.watcher.look_again(keys)


class Notices(Generic[K]):
    """What was told of the keys of one resource: a copy may have been on its way meanwhile."""

    def __init__(self, news: News) -> None:
        self._news = news
        self._told: dict[K, tuple[float, str | None]] = {}
        """When, and the generation that was published, if one was."""
        self._told_before = SILENT
        """Others may have been told of before then."""

    def note(self, key: K, generation: str | None, now: float) -> None:
        if len(self._told) >= MOST_NOTED:
            self.doubt(now)
        self._told[key] = now, generation

    def doubt(self, now: float) -> None:
        """All keys count as told of."""
        self._told.clear()
        self._told_before = now

    def is_known(self, key: K, generation: str, since: float) -> bool:
        """Of a copy for which the store was asked at `since`: has no change been told of it?"""
        told_at, published = self._told.get(key, (self._told_before, None))
        return since > told_at or generation == published

    def is_published(self, key: K, generation: str) -> bool:
        """Was this the last that was told of the key?"""
        return key in self._told and self._told[key][1] == generation

    def trusted_until(self, since: float, memory_for: float) -> float:
        """What was checked at `since`, and not told of since then, may be served until then."""
        news = self._news
        return news.proved_at + memory_for if since >= news.since else SILENT
