"""The connections to a site that may be in use at once, and what they are used for.

Visitors whose requests pass through, loads for the cache, and streams that stay open have places of
their own: slow visitors can take all of theirs, and pages are still loaded. A request waits briefly
for a place. Then it is refused, with its own reason, because the site is not at fault.
"""

import asyncio
import logging

logger = logging.getLogger(__name__)


class SiteFull(Exception):
    """All places of its group are taken."""


class PlaceGroup:
    """The places for one use of connections."""

    def __init__(self, use: str, most: int) -> None:
        self.use = use
        self.most = most
        self.in_use = 0
        self._free = asyncio.Semaphore(most)
        self._has_refused = False

    @property
    def is_full(self) -> bool:
        """True while all places are taken, and the last request waited in vain."""
        return self._has_refused and self._free.locked()

    async def take(self, wait: float) -> None:
        """Take a place, or raise SiteFull after so many seconds."""
        if await self.try_take():
            return
        try:
            async with asyncio.timeout(wait):
                await self._free.acquire()
        except TimeoutError:
            self._refuse(wait)
        self._has_refused = False
        self.in_use += 1

    async def take_now(self) -> None:
        """Take a place without waiting, or raise SiteFull."""
        if not await self.try_take():
            self._refuse(0.0)

    async def try_take(self) -> bool:
        """Take a place without waiting. False if there is none."""
        if self._free.locked():
            return False
        await self._free.acquire()  # returns at once
        self._has_refused = False
        self.in_use += 1
        return True

    def leave(self) -> None:
        self.in_use -= 1
        self._free.release()

    def _refuse(self, waited: float) -> None:
        if not self._has_refused:  # once, not for each request
            logger.warning(
                "all %d connections to the site for %s are in use: a request waited %g s for one, "
                "and got 503",
                self.most,
                self.use,
                waited,
            )
        self._has_refused = True
        raise SiteFull


class SitePlaces:
    """All places of one site, in this process."""

    def __init__(self, connections: int, streams: int) -> None:
        self.visitors = PlaceGroup("visitors", connections)
        self.loads = PlaceGroup("loads", connections)
        self.streams = PlaceGroup("streams", streams)

    def groups(self) -> tuple[PlaceGroup, ...]:
        return self.visitors, self.loads, self.streams

    @property
    def is_full(self) -> bool:
        """True if visitors, or loads, are refused. Streams stay open, so they do not count."""
        return self.visitors.is_full or self.loads.is_full


class Place:
    """The place of one exchange. It may move to another group, until it is left."""

    def __init__(self, group: PlaceGroup) -> None:
        self._group: PlaceGroup | None = group

    async def move(self, to: PlaceGroup) -> bool:
        """Never waits: otherwise waiting visitors would hold the places of loads."""
        if self._group is None:
            return True  # the site has sent everything: no place is needed any more
        if not await to.try_take():
            return False
        self.leave()
        self._group = to
        return True

    def leave(self) -> None:
        """Only the first call counts."""
        if self._group is not None:
            self._group.leave()
            self._group = None
