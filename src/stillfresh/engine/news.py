"""Changes by other processes, announced by the store, and how long silence proves none.

A beat goes through the store and comes back after every announcement made before it. So for
`memory_for` after a beat was sent, memory need not ask about an entry that it checked since it
began to listen: it would have heard of a change. After a gap in the channel, each entry is checked
again before it is trusted.

What came first, a read of the store or an announcement? The clock cannot say, because it may be set
back between them. So announcements are counted, and each request to the store notes the count
(`Asked`).
"""

import asyncio
import sys
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar

from msgspec import Struct

from stillfresh.backoff import pause_after, spread
from stillfresh.bounded import SLICE, sliced
from stillfresh.engine.entry import NOTHING_HEARD
from stillfresh.errors import StoreError
from stillfresh.stores import A_TAG, PushesChanges

if TYPE_CHECKING:
    from stillfresh.engine.core import Core
    from stillfresh.engine.runtime import Runtime

K = TypeVar("K", bound=Hashable)

SILENT: Final = float("-inf")
NOT_LISTENING: Final = sys.maxsize
"""No entry counts as checked."""
BEATS: Final = 3
"""Beats in one `memory_for`, so that one may be late."""
SHORTEST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 1.0
FIRST_RETRY: Final = 0.1
LONGEST_RETRY: Final = 5.0
MOST_NOTED: Final = 10_000
"""Announced keys of a resource that are remembered one by one."""


class Asked(Struct, frozen=True, gc=False):
    """When the store was asked: an answer says nothing of later changes."""

    at: float
    """By the clock."""
    heard: int
    """How many announcements had been heard."""


class News:
    """One channel to the store, for all resources of an open cache."""

    def __init__(
        self, runtime: "Runtime", push: PushesChanges, cores: "Mapping[str, Core[Any, Any]]"
    ) -> None:
        self._runtime = runtime
        self._push = push
        self._cores = cores
        self._is_wanted = asyncio.Event()
        self.heard = 0
        """Announcements so far, with the beginnings of channels."""
        self.since = NOT_LISTENING
        """The count with which it began to listen."""
        self.proved_at = SILENT
        """When the last beat was sent that has come back."""
        self._left = 0
        """Tags whose keys are not all doubted yet."""

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
                    self.since = self.count()
                    await self._look_again()
                    while True:
                        sent = self._runtime.clock()
                        await channel.beat()
                        while self._left:  # noqa: ASYNC110 (an event for each turn costs more)
                            await asyncio.sleep(0)
                        self.proved_at = sent
                        failures = 0
                        await self._runtime.sleep(self._pause())
            except StoreError:
                failures += 1
            finally:
                self.since = NOT_LISTENING
                self.proved_at = SILENT
            pause = pause_after(failures, first=FIRST_RETRY, longest=LONGEST_RETRY)
            await self._runtime.sleep(spread(pause, self._runtime.dice))

    def count(self) -> int:
        """Count one more. Requests that were sent to the store before have a smaller number."""
        self.heard += 1
        return self.heard

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
                core.memory.notices.doubt()
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
            notices.note(key, generation)
        if entry is not None and entry.copy.generation == generation:
            return  # memory has it already
        if entry is not None:
            entry.note_change()
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
        self._announced: dict[K, tuple[int, str | None, int]] = {}
        """The count of its announcement, the published generation, if any, and another's count."""
        self._others: tuple[int, str | None, int] = NOTHING_HEARD, None, NOTHING_HEARD
        """What counts as announced of any other key."""

    @property
    def heard(self) -> int:
        """A request that is sent now knows what was announced up to this number."""
        return self._news.heard

    def note(self, key: K, generation: str | None) -> None:
        if len(self._announced) >= MOST_NOTED:
            self.doubt()
        number = self._news.count()
        announced, published, other = self._announced.get(key, self._others)
        if published != generation:
            other = announced
        self._announced[key] = number, generation, other

    def doubt(self) -> None:
        """From now on, treat every key as announced."""
        number = self._news.count()
        self._announced.clear()
        self._others = number, None, number

    def is_known(self, key: K, generation: str, heard: int) -> bool:
        """True if nothing but its publication was announced since the store was asked for it."""
        announced, published, other = self._announced.get(key, self._others)
        return heard >= (other if generation == published else announced)

    def is_published(self, key: K, generation: str) -> bool:
        """True if this generation was the last that was announced for the key."""
        return key in self._announced and self._announced[key][1] == generation

    def trusted_until(self, heard: int, memory_for: float) -> float:
        """Until when an entry that was checked then may be served, if no change was announced."""
        news = self._news
        return news.proved_at + memory_for if heard >= news.since else SILENT
