"""What is said of pages that are stored: stale, wrong, gone (I11, I12, I21, I26).

By path, URL or tag. Renders that are under way do not publish what was said to be wrong (the law).
"""

from typing import Final

from stillfresh.engine import Cache, Core
from stillfresh.isr.model import PageKey, Stored
from stillfresh.isr.routes import own_tag, reached

KIND: Final = "page"
"""The kind of pages in a store."""
GROUP: Final = "group:"


class OnDemand:
    """The part of a `PageCache` that others tell what has changed. Returns the ids reached."""

    cache: Cache
    core: Core[PageKey, Stored]

    async def revalidate(self, path: str) -> list[str]:
        """Make a page stale, in every variant; the next visit renders it anew. Returns the ids.

        Pages that another program stored under the path itself are reached too (I21).
        """
        tag, ids = reached(path)
        there = await self._there(ids)
        found = await self._invalidate_tag(tag, soft=True)
        await self.core.invalidate([PageKey(id_) for id_ in ids], soft=True)
        return list(dict.fromkeys([*there, *found]))

    async def revalidate_tag(self, tag: str) -> list[str]:
        """Make every page with this tag stale, wherever the tag came from. Returns the ids."""
        return await self._invalidate_tag(own_tag(tag), soft=True)

    async def purge(self, key: str) -> list[str]:
        """Delete every variant of a path, or the one page of a whole URL. Returns the ids."""
        tag, own = reached(key)
        return await self._purge(tag, own)

    async def purge_tag(self, tag: str) -> list[str]:
        """Delete every page with this tag. Returns the ids."""
        return await self._purge(own_tag(tag), [])

    async def _purge(self, tag: str, own: list[str]) -> list[str]:
        there = await self._there(own)
        found = await self._invalidate_tag(tag)
        await self.core.delete([PageKey(id_) for id_ in dict.fromkeys([*own, *found])])
        return list(dict.fromkeys([*there, *found]))

    async def _there(self, ids: list[str]) -> list[str]:
        """Those that are kept under their own id."""
        store = (await self.cache.runtime()).store
        records = await store.read(KIND, ids) if ids else {}
        return [id_ for id_, record in records.items() if record.copy is not None]

    async def _invalidate_tag(self, tag: str, *, soft: bool = False) -> list[str]:
        found = await self.cache.invalidate_tag(tag, soft=soft)
        return [id_ for kind, id_ in found if kind == KIND]

    async def invalidate(self, name: str) -> None:
        """I12: a page was changed through its own URL, or a group: none of before is served.

        Of a page that is not shared there is none: nobody need wait to know that it is still not.
        """
        if name.startswith(GROUP):
            await self.cache.invalidate_tag(name)
            return
        key = PageKey(name)
        kept = await self.core.look(key)
        await self.core.invalidate([key], soft=kept is not None and not kept.found)
        await self.cache.invalidate_tag(f"key:{name}")

    def forget(self, name: str) -> None:
        """What memory has of this URL, in every variant, or group, and what is under way for it."""
        if name.startswith(GROUP):
            self.core.overtake(self.core.tagged(name))
        else:
            self.core.overtake([PageKey(name), *self.core.tagged(f"key:{name}")])
