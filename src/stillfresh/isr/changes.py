"""Changes through a page's own URL (I12, RFC 9111 §4.4): no copy of before is served after one.

Who made the change waits for the store, `store_timeout` at most. What then is not done goes on
behind, again and again; until it is, that URL is not served from here. Bounded in number.
"""

import asyncio
import logging
from typing import Final

from stillfresh.backoff import pause_after
from stillfresh.errors import NotOpen, StillfreshError
from stillfresh.isr.pages import PageCache

MOST: Final = 1_000
"""URLs that may wait for a slow store at a time."""
ATTEMPT: Final = 30.0
"""Seconds after which the store is asked again."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0

logger = logging.getLogger(__name__)


class Changes:
    """`pending`: URLs that were changed, and of which the store may not know yet."""

    def __init__(self, pages: PageCache) -> None:
        self._pages = pages
        self._changed: dict[str, int] = {}
        self.pending: dict[str, asyncio.Task[None]] = {}

    async def invalidate(self, url: str) -> None:
        self._pages.forget(url)
        if url not in self.pending and len(self.pending) >= MOST:
            logger.warning("%s: not invalidated: %d others wait for the store", url, MOST)
            return
        self._changed[url] = self._changed.get(url, 0) + 1
        if url not in self.pending:
            self.pending[url] = asyncio.ensure_future(self._run(url))
        task = self.pending[url]
        await asyncio.wait([task], timeout=self._pages.store_timeout)
        if not task.done():
            logger.warning("%s: not invalidated yet; it passes until it is", url)

    async def _run(self, url: str) -> None:
        """A change while this is under way needs a step of its own."""
        done = failures = 0
        try:
            while (changed := self._changed[url]) != done:
                if await self._step(url):
                    done = changed
                    continue
                failures += 1
                pause = pause_after(failures, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
                await self._pages.rest(pause)
        finally:
            del self._changed[url], self.pending[url]

    async def _step(self, url: str) -> bool:
        try:
            async with asyncio.timeout(ATTEMPT):
                await self._pages.invalidate(url)
        except NotOpen:
            pass  # nothing is served from a cache that is closed
        except (StillfreshError, TimeoutError) as exc:
            logger.warning("%s: not invalidated yet: %r", url, exc)
            return False
        return True

    async def close(self) -> None:
        tasks = list(self.pending.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
