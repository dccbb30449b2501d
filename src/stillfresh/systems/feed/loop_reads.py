"""Read a feed's rows on an event loop: a long list is built in slices, once for all its readers."""

import asyncio
import logging
from contextlib import closing
from typing import Any

from stillfresh.errors import StoreError
from stillfresh.systems.feed.cache import FeedCache
from stillfresh.systems.feed.reading import FoundRows

logger = logging.getLogger(__name__)


class LoopReads:
    """The reads of one FeedEngine."""

    def __init__(self, cache: FeedCache) -> None:
        self._cache = cache
        self._building: dict[tuple[str, bool], asyncio.Event] = {}
        """Long lists that are being built, or wait to be."""
        self._alone = asyncio.Lock()

    async def find(self, key: str, now: float, *, raw: bool = False) -> FoundRows[Any] | None:
        """The rows of a key; None if the file cannot be read: then upstream is asked."""
        try:
            while (building := self._building.get((key, raw))) is not None:
                await building.wait()  # then from memory, or what was written since
            with self._cache.reading() as reader:
                rows = next(reader.find(key, now, raw=raw))
            if rows is not None:
                return rows
            # A long list, of which this was the first slice. It is read again, because a read that
            # waits for its turn would hold a connection and keep the file's log from being written
            # back. Its topics stay decoded in the reader, so the second time is quicker.
            return await self._build(key, now, raw=raw)
        except StoreError as exc:
            logger.warning("%s: the feed cache could not be read: %s", key, exc)
            return None

    async def _build(self, key: str, now: float, *, raw: bool) -> FoundRows[Any] | None:
        """Build one long list at a time, because each needs a connection and memory.

        The loop has a turn between two slices.
        """
        rows = None
        building = asyncio.Event()
        self._building[key, raw] = building
        try:
            async with self._alone:
                with (
                    self._cache.reading() as reader,
                    closing(reader.find(key, now, raw=raw)) as slices,
                ):
                    for each in slices:
                        rows = each  # the last one is the list
                        await asyncio.sleep(0)
                building.set()  # callers that wait for this list are served before the next
        finally:
            del self._building[key, raw]
            building.set()
        return rows
