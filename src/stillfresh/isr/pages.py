"""PageCache: pages by key, on any store, through the engine (I8-I11).

Flights, leases, cooldowns and memory are the engine's. A page's render comes with each read: of
several callers that ask for a page at once, the first one's is used.
"""

import asyncio
import inspect
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Self, TypeAlias

from msgspec import structs

from stillfresh.clock import Clock, checked_clock
from stillfresh.durations import Duration, seconds
from stillfresh.engine import (
    Answer,
    Cache,
    CacheStats,
    Core,
    Explanation,
    Loaded,
    Private,
    Spec,
    terms_of,
)
from stillfresh.engine.keys import checked_id
from stillfresh.errors import ConfigError, LoadFailed, StillfreshError, StoreError, shown
from stillfresh.freshness import Verdict
from stillfresh.http.freshness import PageTerms
from stillfresh.isr import rules_storage as storage
from stillfresh.isr.model import (
    Page,
    PageFailed,
    PageKey,
    PageLoad,
    PageRead,
    Reason,
    Rendered,
    ServedPage,
    Stored,
)
from stillfresh.isr.rules_bounds import BoundedNames
from stillfresh.isr.rules_keys import checked_path, own_tag, own_tags, plain_path, reached
from stillfresh.isr.storing import PageCodec, bounded, shaped
from stillfresh.stores import MemoryStore, for_tenant, store_for
from stillfresh.stores.contract import Store

KIND: Final = "page"
UNSHARED_FOR: Final = 30.0
"""Seconds; after that, one asks behind whether a page that may not be shared still may not."""
UNSHARED_KEPT: Final = 86_400.0
"""Seconds for which each visitor meanwhile has such a page rendered, side by side."""
CONCURRENCY: Final = 64
RETRY_AFTER: Final = 1.0
MAX_ERROR_PAGES: Final = 1_000
"""I23: paths that do not exist are made up; one process keeps so many error pages at a time."""
PageRender: TypeAlias = Callable[[], Awaitable[Page] | Page]


class Busy(StillfreshError):
    """I8: another renders it, and it took longer than `wait`."""


class Full(StoreError):
    """So many pages are being rendered that this one would only queue."""


class PageCache:
    """`async with PageCache("sqlite:///pages.db") as pages:`; without it, the first read opens."""

    def __init__(
        self,
        store: str | Store,
        *,
        tenant: str | None = None,
        stale_for: Duration = "7d",
        error_for: Duration = "7d",
        absent_for: Duration = "10s",
        wait: Duration = "7s",
        memory_for: Duration = 0,
        max_entries: int = 10_000,
        lease_for: Duration = "5s",
        render_timeout: Duration = "30s",
        store_timeout: Duration = "1s",
        clock: Clock = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        dice: Callable[[], float] = random.random,
        grace: Duration = 5.0,
    ) -> None:
        self.clock = checked_clock(clock)
        self._wait = seconds(wait, name="wait", positive=True)
        self._stale_for = seconds(stale_for, name="stale_for")
        self._error_for = seconds(error_for, name="error_for")
        self.store_timeout = seconds(store_timeout, name="store_timeout", positive=True)
        self.rest = sleep
        self._absent_for = seconds(absent_for, name="absent_for")
        self._errors = BoundedNames(MAX_ERROR_PAGES)
        self._bypassed = dict.fromkeys(map(str, Reason), 0)
        self.keep_for = max(self._stale_for, self._error_for)
        is_private = isinstance(store, str) and store.startswith("memory:")
        most = self.store_timeout, seconds(lease_for, name="lease_for", positive=True)
        terms = terms_of(KIND, 0, stale_for, error_for, UNSHARED_FOR)
        spec: Spec[PageKey, Stored] = Spec(
            KIND,
            _nobody,
            PageCodec(is_packed=not is_private),
            _tags_of,
            structs.replace(terms, absent_stale_for=UNSHARED_KEPT),
            max_batch=1,
            concurrency=CONCURRENCY,
            max_entries=max_entries,
            memory_for=memory_for,
            lease_for=lease_for,
            load_timeout=render_timeout,
            by_id=False,
        )
        named = for_tenant(store_for(store, clock), tenant)
        own = MemoryStore(clock=clock, max_copies=spec.max_entries)
        chosen = own if is_private else bounded(shaped(named, terms.policy), *most)
        self.cache = Cache(chosen, clock=clock, sleep=sleep, dice=dice, grace=grace)
        self.core: Core[PageKey, Stored] = self.cache.declare(
            spec, lambda key: key.id, PageKey, private=is_private
        )

    async def get(
        self, path: str, render: PageRender, revalidate: Duration, *, tags: Iterable[str] = ()
    ) -> ServedPage:
        """The page of this path: what is there, or what `render` makes, fresh for `revalidate`."""
        own = self.terms(revalidate)

        async def rendering(_: Stored | None) -> Rendered:
            fetched_at, page = self.clock(), await _page(render)
            judgement = storage.judged(page.status, page.headers.raw, fetched_at, own)
            return storage.made_of(
                page, judgement, fetched_at, {}, is_own=True, keep_for=self.keep_for
            )

        key = self.key(checked_path(path), plain_path(path), tags)
        try:
            read = await self.ask(PageLoad(key, rendering), takes=lambda _: True)
        except Busy:
            return _unstored(storage.too_busy(RETRY_AFTER))
        except StoreError:
            return _unstored(await _page(render))
        match read.outcome:
            case LoadFailed() as error:
                return self._failed(error, is_own=read.is_own)
            case Private(made):
                return _unstored(storage.opened(made.page))
            case answer if answer.found:
                return self._served(answer, is_own=read.is_own)
            case _:
                return _unstored(storage.opened((await rendering(None)).page))

    def terms(self, revalidate: Duration) -> PageTerms:
        fresh_for = seconds(revalidate, name="revalidate", positive=True)
        return PageTerms(fresh_for, self._stale_for, self._error_for, self._absent_for)

    def key(self, id_: str, path: str, tags: Iterable[str], *, of: str | None = None) -> PageKey:
        """`of`: the key that this one is a variant of."""
        own = [] if of is None else [f"key:{of}"]
        named = (f"path:{path}", *own, *own_tags(tags))
        return PageKey(checked_id(KIND, id_), named)

    async def ask(
        self,
        load: PageLoad,
        *,
        anew: bool = False,
        takes: Callable[[object], bool],
    ) -> PageRead:
        """I8: a caller whose render is not used waits at most `wait`; `anew`: not from here.

        `takes` is told what came first; if that is not good enough, the page is loaded anew, by
        the refresh that was begun behind it, if one was.
        """
        key, is_own, had_old = load.key, False, False
        made: Loaded[Stored] | Private[Rendered] | None = None
        known = None if anew else self.known(key)
        if known is not None and takes(known):
            return PageRead(known)
        if self.core.is_full(key) and (await self.core.look(key)) is None:
            raise Full(f"{key!r}: {CONCURRENCY} pages are being rendered")

        async def render() -> Loaded[Stored] | Private[Rendered]:
            nonlocal is_own, had_old, made
            old = self.old(key)
            is_own, had_old = True, old is not None
            made = self._loaded(load, await load.render(old))
            return made

        async def read() -> Answer[Stored] | Private[Rendered] | LoadFailed:
            if known is None:
                outcome = await self.core.read(key, render, anew=anew)
                if takes(outcome) or anew:
                    return outcome
            outcome = await self.core.read(key, render, anew=True)
            return made if isinstance(made, Private) else outcome

        asking = asyncio.ensure_future(read())
        resting = asyncio.ensure_future(self.rest(self._wait))
        try:
            await asyncio.wait([asking, resting], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and not is_own:
                raise Busy(f"{key!r}: not rendered by another within {self._wait:g} s")
            return PageRead(await asking, is_own, had_old)
        finally:
            resting.cancel()
            asking.cancel()

    def known(self, key: PageKey) -> Answer[Stored] | None:
        """What can be answered on the spot."""
        return self.core.memory.hit(key, self.clock()) or self.core.glance(key)

    async def revalidate(self, path: str) -> None:
        """I11: stale from now, in every variant; rendered anew at the next visit.

        I21: by our tags, and by the key itself, under which others may have written it.
        """
        tag, ids = reached(path)
        await self.cache.invalidate_tag(tag, soft=True)
        await self.core.invalidate([PageKey(id_) for id_ in ids], soft=True)

    async def revalidate_tag(self, tag: str) -> None:
        """The same for every page with this tag."""
        await self.cache.invalidate_tag(own_tag(tag), soft=True)

    async def purge(self, key: str) -> None:
        """I11: gone. A path means every variant of it, a whole URL (`https://…`) that one page."""
        tag, own = reached(key)
        found = await self.cache.invalidate_tag(tag)
        ids = dict.fromkeys([*own, *(id_ for kind, id_ in found if kind == KIND)])
        await self.core.delete([PageKey(id_) for id_ in ids])

    async def invalidate(self, id_: str) -> None:
        """I12: a page was changed through its own URL: no copy of before is served any more.

        Of a page that is not shared there is none: nobody need wait to know that it is still not.
        """
        key = PageKey(id_)
        kept = await self.core.look(key)
        await self.core.invalidate([key], soft=kept is not None and not kept.found)
        await self.cache.invalidate_tag(f"key:{id_}")

    def forget(self, id_: str) -> None:
        """What memory has of this URL, in every variant, and what is under way for it."""
        self.core.overtake([PageKey(id_)])
        self.core.overtake(self.core.tagged(f"key:{id_}"))

    async def explain(self, key: str) -> Explanation:
        """Why this page, why now, who renders it, when."""
        return await self.core.explain(PageKey(key))

    def bypassed(self) -> dict[str, int]:
        """I28: requests that passed uncached through a cache of these pages, by reason."""
        return {reason: count for reason, count in self._bypassed.items() if count}

    def count_bypass(self, reason: Reason) -> None:
        self._bypassed[reason] += 1

    async def stats(self) -> CacheStats:
        return await self.cache.stats()

    async def open(self) -> None:
        await self.cache.open()

    async def close(self) -> None:
        """Publications that had started finish; the rest ends within `grace`."""
        await self.cache.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def old(self, key: PageKey) -> Stored | None:
        """The page that memory has."""
        entry = self.core.memory.entries.get(key)
        return entry.answer.value if entry is not None and entry.answer.found else None

    def _loaded(self, load: PageLoad, made: Rendered) -> Loaded[Stored] | Private[Rendered]:
        """What may not be shared is for the caller whose render it is."""
        page, head = made.page, made.page.head
        if storage.is_failure(head.status):
            raise storage.refused(page)
        if made.reason is not None:
            return Private(made, is_noted=not load.is_open)
        if head.status >= 400 and not self._errors.has(load.key.id, self.clock()):
            return Private(structs.replace(made, reason=Reason.FULL), is_noted=False)
        error_for = max(head.error_for, made.keep_for)
        terms = {"stale_for": head.stale_for, "error_for": error_for}
        return Loaded(page, fresh_for=head.fresh_for, **terms)

    def _served(self, answer: Answer[Stored], *, is_own: bool) -> ServedPage:
        stored = answer.value
        made = stored, answer.fetched_at, self.clock(), answer.verdict
        if answer.error is not None and not storage.may_serve(*made):
            return self._failed(answer.error, is_own=is_own)
        page, etag = storage.opened(stored), stored.head.etag
        return ServedPage(
            page,
            verdict=answer.verdict,
            age=answer.age,
            etag=etag.decode() if etag else page.headers.get("etag"),
            error=answer.error,
        )

    def _failed(self, error: LoadFailed, *, is_own: bool) -> ServedPage:
        """I8: the error itself, never stored; within a cooldown, when to come again."""
        if isinstance(cause := error.__cause__, PageFailed):
            return _unstored(cause.own if is_own else cause.page, error)
        if isinstance(cause, Exception):
            raise cause
        pause = RETRY_AFTER if error.retry_at is None else error.retry_at - self.clock()
        return _unstored(storage.too_busy(pause), error)


async def _nobody(keys: list[PageKey]) -> dict[PageKey, Loaded[Stored]]:
    raise LoadFailed(f"{keys}: nobody said how to render it")


def _unstored(page: Page, error: LoadFailed | None = None) -> ServedPage:
    return ServedPage(page, verdict=Verdict.GONE, age=0.0, stored=False, error=error)


async def _page(render: PageRender) -> Page:
    made = render()
    page = await made if inspect.isawaitable(made) else made
    if not isinstance(page, Page):
        raise ConfigError(f"a render returns a Page(body, status, headers), not {shown(page)}")
    return page


def _tags_of(key: PageKey) -> tuple[str, ...]:
    if key.tags is None:
        raise LookupError(f"{key}: a page that is only named has no tags to tell")
    return key.tags
