"""Invalidating stored pages: stale, changed, deleted.

By path, URL or tag. Running renders of these pages are not published (the law).
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from stillfresh.backoff import pause_after
from stillfresh.engine import Cache, Resource, merge_tokens, note_token, noted_changes
from stillfresh.errors import NotOpen, StillfreshError, without_secrets
from stillfresh.pages.facetheory import is_variant
from stillfresh.pages.model import PageKey, StoredPage
from stillfresh.pages.routes import group_tag, name_in_key, own_tag, page_name, reached
from stillfresh.stores import ListsEntries, capabilities_of

if TYPE_CHECKING:
    from stillfresh.pages.page_cache import PageCache

KIND: Final = "page"
"""The kind of pages in a store."""
GROUP: Final = "group:"
MOST_CHANGES: Final = 1_000
"""URLs that may wait for a slow store at a time."""
ATTEMPT: Final = 30.0
"""Seconds after which an invalidation is tried again."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0

logger = logging.getLogger(__name__)


class ReachedPages(list[str]):
    """The ids of the pages that were invalidated or deleted."""

    def __init__(self, ids: Iterable[str], token: str) -> None:
        super().__init__(ids)
        self.token = token
        """For `get(at_least=…)` and for HTTP: no page from before this is served."""


class OnDemand:
    """The part of a `PageCache` that invalidates pages. Each method returns the ids reached."""

    cache: Cache
    resource: Resource[PageKey, StoredPage]

    async def revalidate(self, path: str, *, scan: bool = False) -> ReachedPages:
        """Make a page stale, in every variant; the next visit renders it again. Returns the ids.

        A path means all its queries; a path with a query, or a whole URL, means that query only.
        Pages that another program stored under the path itself are reached too. `scan`: list
        the whole store, to reach all variants that other programs stored.
        """
        return await self._reach(*reached(path), soft=True, scanned=path if scan else None)

    async def revalidate_tag(self, tag: str) -> ReachedPages:
        """Make every page with this tag stale, wherever the tag came from. Returns the ids."""
        return await self._reach([own_tag(tag)], [], soft=True)

    async def purge(self, key: str, *, scan: bool = False) -> ReachedPages:
        """Delete every variant of a path, or those of one query or URL. Returns the ids.

        `scan`: as in `revalidate`.
        """
        return await self._reach(*reached(key), soft=False, scanned=key if scan else None)

    async def purge_tag(self, tag: str) -> ReachedPages:
        """Delete every page with this tag. Returns the ids."""
        return await self._reach([own_tag(tag)], [], soft=False)

    async def _reach(
        self, tags: list[str], own: list[str], *, soft: bool, scanned: str | None = None
    ) -> ReachedPages:
        """Pages with a tag, and those that are stored under their `own` ids; `soft`: stale.

        `scanned`: the path or key whose variants are looked for among all pages of the store.
        """
        store = await self.cache.store()
        if scanned is not None:
            listing = capabilities_of(store).require_listing()
            own = list(dict.fromkeys([*own, *await self._scan(listing, scanned, own)]))
        records = await store.read(KIND, own) if own else {}
        stored = [id_ for id_, record in records.items() if record.copy is not None]
        tagged: list[str] = []
        tokens: list[str] = []
        for tag in tags:
            invalidated = await self.cache.invalidate_tag(tag, soft=soft)
            tagged += [id_ for kind, id_ in invalidated if kind == KIND]
            tokens.append(invalidated.token)
        if soft:
            token = await self.resource.invalidate(*map(PageKey, own), soft=True)
        else:
            keys = dict.fromkeys([*own, *tagged])
            token = await self.resource.delete(*map(PageKey, keys))
        return ReachedPages(dict.fromkeys([*stored, *tagged]), merge_tokens(*tokens, token))

    async def _scan(self, listing: ListsEntries, name: str, own: list[str]) -> list[str]:
        """The ids of all pages with this path, or of all variants of the `own` ids."""
        wanted = page_name(name) if name.startswith("/") else None
        ids: list[str] = []
        async for entries in listing.walk(KIND):
            for entry in entries:
                if wanted is None:
                    is_meant = any(is_variant(entry.id, id_) for id_ in own)
                else:
                    stored = name_in_key(entry.id)
                    is_meant = stored is not None and wanted.means(stored)
                if is_meant:
                    ids.append(entry.id)
        return ids

    async def invalidate(self, name: str) -> None:
        """Invalidate a page or a group that was changed through its URL: no older copy is served.

        A page that is known to be private has no copy: it becomes stale, and nobody waits.
        """
        if name.startswith(GROUP):
            await self.cache.invalidate_tag(name)
            return
        key = PageKey(name)
        answer = await self.resource.get_stored(key)
        is_known_private = answer is not None and not answer.found
        await self.resource.invalidate(key, soft=is_known_private)
        await self.cache.invalidate_tag(f"key:{name}")

    def forget(self, name: str) -> None:
        """Drop a URL (every variant) or a group from memory; its loads under way do not count."""
        if name.startswith(GROUP):
            self.resource.forget(tag=name)
        else:
            self.resource.forget(PageKey(name), tag=f"key:{name}")


class Changes:
    """RFC 9111 §4.4: after a change through a page's own URL, no older copy is served.

    The client that made it waits for the store, at most `store_timeout`. After that the
    invalidation goes on in the background. Until it is done, the URL is `pending` and not served
    from here; for a group, no page of its origin is. Bounded in number.
    """

    def __init__(self, pages: "PageCache") -> None:
        self._pages = pages
        self._again: set[str] = set()
        """URLs that were changed again while a step was running."""
        self.pending: dict[str, asyncio.Task[str]] = {}

    def concern(self, url: str) -> bool:
        """True if the stored page of this URL may be older than a change."""
        groups = group_tag(url, "")
        return url in self.pending or any(name.startswith(groups) for name in self.pending)

    async def invalidate(self, url: str) -> None:
        self._pages.forget(url)
        if url not in self.pending and len(self.pending) >= MOST_CHANGES:
            logger.warning("%s: not invalidated: %d wait", without_secrets(url), MOST_CHANGES)
            return
        self._again.add(url)
        if url not in self.pending:
            self.pending[url] = asyncio.ensure_future(self._run(url))
        task = self.pending[url]
        await asyncio.wait([task], timeout=self._pages.store_timeout)
        if not task.done():
            logger.warning("%s: not invalidated yet; it passes uncached", without_secrets(url))
        elif not task.cancelled():
            note_token(task.result())  # the task may be another client's, and was noted there

    async def _run(self, url: str) -> str:
        """Invalidate until no more changes of this URL wait; return the token of that."""
        failures = 0
        try:
            with noted_changes() as changes:
                while url in self._again:
                    self._again.discard(url)
                    if not await self._step(url):
                        self._again.add(url)
                        failures += 1
                        pause = pause_after(failures, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
                        await self._pages.rest(pause)
            return changes.token
        finally:
            self._again.discard(url)
            del self.pending[url]

    async def _step(self, url: str) -> bool:
        try:
            async with asyncio.timeout(ATTEMPT):
                await self._pages.invalidate(url)
        except NotOpen:
            pass  # a closed cache serves nothing
        except (StillfreshError, TimeoutError) as exc:
            logger.warning("%s: not invalidated yet: %r", without_secrets(url), exc)
            return False
        return True

    async def close(self) -> None:
        tasks = list(self.pending.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
