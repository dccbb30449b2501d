"""PageCache: pages by key, on any store, through the engine.

Loads, leases, cooldowns and memory are the engine's. Each read brings its render: of several
callers that ask for a page at once, the first caller's render is used.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Self
from weakref import WeakValueDictionary

from msgspec import structs

from stillfresh.checks import checked_flag
from stillfresh.clock import Clock, checked_clock
from stillfresh.durations import Duration, seconds
from stillfresh.engine import (
    HITS,
    Answer,
    Cache,
    CacheStats,
    Codec,
    CodecMaker,
    Explanation,
    Hook,
    Loaded,
    Private,
    Resource,
    Spec,
    no_loader,
    terms_of,
)
from stillfresh.engine.keys import checked_id
from stillfresh.engine.rules import may_retry
from stillfresh.errors import ConfigError, LoadFailed, StoreError, shown
from stillfresh.freshness import Policy, Verdict
from stillfresh.http import Reason, Wish, is_failure
from stillfresh.pages.asking import Beginning, PageAsking
from stillfresh.pages.clients import BoundedNames
from stillfresh.pages.model import (
    Busy,
    Full,
    Offer,
    OnlySiteCopy,
    Page,
    PageCaller,
    PageFailed,
    PageKey,
    PageRead,
    ReadOutcome,
    Render,
    Rendered,
    ServedPage,
    SiteCopy,
    StoredPage,
)
from stillfresh.pages.objects import is_misplaced, is_shared
from stillfresh.pages.on_demand import KIND, OnDemand
from stillfresh.pages.routes import checked_path, own_tags, plain_path
from stillfresh.pages.sharing import RouteTimes, judged, may_serve, suits
from stillfresh.pages.stored import (
    PageCodec,
    PageRender,
    PageStore,
    made_of,
    opened,
    page_of,
    refused,
    site_tags,
    too_busy,
)
from stillfresh.stores import MemoryStore, capabilities_of, for_tenant, store_for
from stillfresh.stores.contract import Mark, Store

UNSHARED_FOR: Final = 30.0
"""Seconds; after that, one background render checks whether the page is still private."""
UNSHARED_KEPT: Final = 86_400.0
"""Seconds that it counts as private after that: each visitor's own request is sent."""
CONCURRENCY: Final = 100
MAX_ENTRIES: Final = 10_000
"""Pages in memory, unless `max_entries` is given."""
ROW_NAME: Final = "CACHE#"
"""Begins the name of a row that another service stored. No page of ours has such a key."""
RETRY_AFTER: Final = 1.0
MAX_ERROR_PAGES: Final = 1_000
"""The most error pages of one process, because paths can be made up."""


class PageCache(OnDemand):
    """Pages in a store: `async with PageCache("sqlite:///pages.db") as pages:`.

    Without `async with`, the first read opens it. Raises ConfigError for an option that cannot be
    used.

    Args:
        store: An address, or a store object. Give all processes of a site the same one.
        tenant: Keeps the pages apart from those of other tenants of the store.
        stale_for: How long an old page is served while it is rendered again.
        error_for: How long an old page is served if rendering fails.
        absent_for: How long a `404` or `410` is kept; never longer than a page is fresh.
        wait: How long a visitor waits for a page that another process renders.
        memory_for: How long memory is believed without asking the store.
        max_entries: The most pages in memory.
        max_bytes: The most bytes of pages in memory.
        lease_for: How long a render whose process died blocks other processes.
        render_timeout: How long a render may take; after that it has failed.
        store_timeout: How long a read may take; after that the store counts as unavailable.
        clock: Returns seconds since 1970.
        sleep: Called to wait. Tests replace it.
        dice: Returns numbers from 0 to 1, for jitter. Tests replace it.
        grace: How long `close` waits for work under way.
        expose_tags: Send the tags of a page to visitors, for a CDN.
        objective: The freshness objective, which statistics count.
        hooks: Called around each load, store step and render.
        codec: `zstd()` or `encrypted(keys)`, for the stored pages; None: they are stored as they
            are. With one, services in other languages cannot read the pages.
    """

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
        max_entries: int = MAX_ENTRIES,
        max_bytes: int | str | None = None,
        lease_for: Duration = "5s",
        render_timeout: Duration = "30s",
        store_timeout: Duration = "1s",
        clock: Clock = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        dice: Callable[[], float] = random.random,
        grace: Duration = 5.0,
        expose_tags: bool = False,
        objective: str | None = None,
        hooks: Sequence[Hook] = (),
        codec: CodecMaker | None = None,
    ) -> None:
        self.expose_tags = checked_flag("expose_tags", expose_tags)
        self.clock = checked_clock(clock)
        self.wait = seconds(wait, name="wait", positive=True)
        self._stale_for = seconds(stale_for, name="stale_for")
        self._error_for = seconds(error_for, name="error_for")
        self.store_timeout = seconds(store_timeout, name="store_timeout", positive=True)
        self.rest = sleep
        self._absent_for = seconds(absent_for, name="absent_for")
        self._errors = BoundedNames(MAX_ERROR_PAGES)
        self.beginnings: WeakValueDictionary[PageKey, Beginning] = WeakValueDictionary()
        """The heads of pages that callers wait for."""
        self._bypassed = dict.fromkeys(map(str, Reason), 0)
        self.render_timeout = seconds(render_timeout, name="render_timeout")
        is_private = isinstance(store, str) and store.startswith("memory:")
        terms = terms_of(KIND, 0, stale_for, error_for, UNSHARED_FOR)
        spec: Spec[PageKey, StoredPage] = Spec(
            KIND,
            no_loader,
            _codec_of(codec, is_private=is_private),
            _tags_of,
            structs.replace(terms, absent_stale_for=UNSHARED_KEPT),
            concurrency=CONCURRENCY,
            max_entries=max_entries,
            max_bytes=max_bytes,
            memory_for=memory_for,
            lease_for=lease_for,
            load_timeout=render_timeout,
            by_id=False,
            objective=objective,
        )
        named = for_tenant(store_for(store, clock), tenant)
        self.is_shared = codec is None and is_shared(named, terms.policy)
        """True if services in other languages read the pages too."""
        chosen: Store = PageStore(named, self.store_timeout, spec.lease_for)
        if is_private:
            limit = capabilities_of(named).max_bytes
            limit = spec.max_bytes if limit is None else limit
            chosen = MemoryStore(clock=clock, max_copies=spec.max_entries, max_bytes=limit)
        self.cache = Cache(chosen, clock=clock, sleep=sleep, dice=dice, grace=grace, hooks=hooks)
        self.max_entries = spec.max_entries
        self.resource: Resource[PageKey, StoredPage] = self.cache.declare(
            spec, lambda key: key.id, PageKey, private=is_private
        )

    async def get(
        self,
        path: str,
        render: PageRender,
        revalidate: Duration,
        *,
        tags: Iterable[str] = (),
        at_least: str = "",
    ) -> ServedPage:
        """Return the page of this path: the stored one, or what `render` makes of it.

        `revalidate` is how long it is fresh; `tags` are for `revalidate_tag`. If rendering fails,
        the old page is returned with `error`. Without an old page, a render with a status of 500 or
        more is returned and not stored, and an exception of `render` is raised. A page that
        another process renders for longer than `wait` is a 503.

        `at_least`: a token of changes. No stored page from before them is returned, not even if
        rendering fails. What `render` reads from other caches is its own concern.
        """
        fresh_for = seconds(revalidate, name="revalidate", positive=True)

        async def rendering(_: StoredPage | None, __: Offer) -> Rendered:
            fetched_at = self.clock()
            page = await page_of(render)
            judgement = judged(page.status, page.headers.raw, fetched_at, self.terms(fresh_for))
            return made_of(page, judgement, fetched_at, {}, is_own=True)

        named_path = plain_path(checked_path(path))
        query = ""
        if named_path.startswith("/"):  # other texts are keys of one page, whatever they contain
            named_path, _, query = named_path.partition("?")
        key = self.key(path, named_path, tags, query=query)
        try:
            with self.at_least(at_least):
                read = await self.ask(key, rendering, PageCaller(), anew=False)
        except Busy:
            return _unstored(too_busy(RETRY_AFTER))
        except StoreError:
            return _unstored(await page_of(render))
        match read:
            case PageRead(LoadFailed() as error, is_own):
                return _unstored(self.error_page(error, is_own=is_own), error)
            case PageRead(Answer() as answer) if answer.found:
                page = opened(answer.value, is_unverified=answer.unverified)
                etag = answer.value.head.etag
                return ServedPage(
                    page,
                    verdict=answer.verdict,
                    age=answer.age,
                    etag=etag.decode() if etag else page.headers.get("etag"),
                    error=answer.error,
                    unverified=answer.unverified,
                )
            case PageRead(Private(Rendered(StoredPage() as stored))):
                return _unstored(opened(stored))
        return _unstored(await page_of(render))

    def at_least(self, token: str) -> AbstractContextManager[None]:
        """Inside `with`, reads of this task, and of tasks it starts, have `at_least=token`."""
        return self.cache.at_least(token)

    def terms(self, revalidate: Duration) -> RouteTimes:
        """Return the times of a page, and those of an absent one, which is never served stale."""
        own = Policy(revalidate, self._stale_for, self._error_for)
        return own, Policy(min(self._absent_for, own.fresh_for))

    def key(
        self,
        id_: str,
        path: str,
        tags: Iterable[str],
        *,
        query: str = "",
        of: str | None = None,
    ) -> PageKey:
        """Return the key of a page. `of`: the key that this one is a variant of.

        A page can be invalidated by its path, and with `query` also by path and query.
        """
        if id_.startswith(ROW_NAME):
            raise ConfigError(f"page {shown(id_)}: a key that begins with {ROW_NAME} names a row")
        named = [f"path:{path}"]
        if query:
            named.append(f"path:{path}?{query}")
        if of is not None:
            named.append(f"key:{of}")
        return PageKey(checked_id(KIND, id_), (*named, *own_tags(tags)))

    async def ask(
        self, key: PageKey, render: Render, caller: PageCaller, *, anew: bool
    ) -> PageRead:
        """Return the page from memory, the store or a render. `anew`: load in any case.

        A caller whose own render is not used waits at most `wait`. A copy that the request does not
        accept is loaded again, by the background refresh if one runs.
        """
        known = None if anew else self.known(key)
        if known is not None and self.takes(known, caller.wish):
            return PageRead(self.judged(known))
        if self.resource.is_full(key) and (await self.resource.get_stored(key)) is None:
            raise Full(f"{key!r}: {CONCURRENCY} pages are being rendered, the most at once")
        return await PageAsking(self, key, render, caller).answer(known, anew=anew)

    def judged(self, outcome: ReadOutcome) -> ReadOutcome:
        """Return the outcome of a read; the failure, if its old copy may not be served."""
        if not isinstance(outcome, Answer) or not outcome.found or outcome.error is None:
            return outcome
        return outcome if self._may_serve(outcome) else outcome.error

    def _may_serve(self, answer: Answer[StoredPage]) -> bool:
        """True if the old copy may be served after a failure: one that was invalidated may not."""
        return answer.mark is not Mark.HARD and may_serve(answer, self.clock())

    def takes(self, outcome: ReadOutcome, wish: Wish) -> bool:
        """Return True if the request accepts it, or if no load can bring a better one now."""
        if not isinstance(outcome, Answer) or not outcome.found:
            return True
        now = self.clock()
        if outcome.error is not None and not may_retry(outcome.error, now):
            return True
        return outcome.origin not in HITS or suits(outcome, wish, now)

    def known(self, key: PageKey) -> Answer[StoredPage] | None:
        """Return the answer that can be given without waiting, or None."""
        return self.resource.get_nowait(key)

    async def explain(self, key: str) -> Explanation:
        return await self.resource.explain(PageKey(key))

    def bypassed(self) -> dict[str, int]:
        """Return how many requests passed through uncached, by reason."""
        return {reason: count for reason, count in self._bypassed.items() if count}

    def count_bypass(self, reason: Reason) -> None:
        self._bypassed[reason] += 1

    async def stats(self) -> CacheStats:
        """Return the counts of the pages, and the store's own (None if it failed)."""
        return await self.cache.stats()

    async def settled(self, timeout: Duration = "30s") -> bool:  # noqa: ASYNC109 (not raised)
        """Wait until no page is rendered in the background. False if one still is."""
        return await self.resource.settled(seconds(timeout, name="timeout"))

    async def open(self) -> None:
        """Open the store, on the running event loop. Raises StoreError."""
        await self.cache.open()

    async def close(self) -> None:
        """Close the cache. Publications that have started finish; the rest ends within `grace`."""
        await self.cache.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def old(self, key: PageKey) -> StoredPage | None:
        """Return the page that memory holds, however old, or None."""
        answer = self.at_hand(key)
        return None if answer is None else answer.value

    def at_hand(self, key: PageKey) -> Answer[StoredPage] | None:
        answer = self.resource.last_answer(key)
        if answer is None or not answer.found:
            return None
        is_wrong = self.is_shared and is_misplaced(key, answer.value)
        return None if is_wrong else answer

    def shows(self, page: StoredPage) -> StoredPage:
        """Return the page; if `expose_tags` is set, it shows its tags."""
        if self.expose_tags:
            page.head = structs.replace(page.head, shows_tags=True)
        return page

    def loaded(
        self, key: PageKey, rendered: Rendered, *, is_noted: bool
    ) -> Loaded[StoredPage] | Private[Rendered]:
        """Return what is stored of a render. What cannot be shared goes to its own caller alone."""
        page = rendered.page
        old = self.at_hand(key)
        if page is not None:
            self.shows(page)
        # An error with its own freshness is a page, unless an older one can be served.
        is_covered = old is not None and self._may_serve(old)
        is_told = is_covered or rendered.reason is not None
        is_old = rendered.reason is Reason.SITE_COPY  # it says nothing new about the page
        is_failed = page is not None and is_told and is_failure(page.head.status)
        if page is not None and is_failed:
            raise refused(page)
        if is_old and old is not None:  # the stored page stays, even if it can only be validated
            failure = SiteCopy if is_covered else OnlySiteCopy
            # Without a page it was too big to be read, or went on to its visitor.
            raise failure(rendered, too_busy(RETRY_AFTER) if page is None else opened(page))
        if page is None or rendered.reason is not None:
            return Private(rendered, is_noted=is_noted and not is_old)
        if self.is_shared and is_misplaced(key, page):
            return Private(structs.replace(rendered, reason=Reason.ENCODED), is_noted=False)
        head = page.head
        if head.status >= 400 and not self._errors.has(key.id, self.clock()):
            return Private(structs.replace(rendered, reason=Reason.FULL), is_noted=False)
        # After its times it is not served, but kept: to be validated, or on request.
        kept_for = 0.0 if head.status >= 400 else max(self._stale_for, self._error_for)
        error_for = max(head.error_for, kept_for)
        return Loaded(
            page,
            fresh_for=head.fresh_for,
            stale_for=head.stale_for,
            error_for=error_for,
            tags=site_tags(head.headers, key.id),
        )

    def error_page(self, error: LoadFailed, *, is_own: bool) -> Page:
        """Return the error as a page, which is never stored; a cooldown says when to come again."""
        if isinstance(cause := error.__cause__, PageFailed):
            return cause.own if is_own else cause.page
        if isinstance(cause, Exception):
            raise cause
        pause = RETRY_AFTER if error.retry_at is None else error.retry_at - self.clock()
        return too_busy(pause)


def _codec_of(given: CodecMaker | None, *, is_private: bool) -> Codec[StoredPage]:
    if given is None:
        return PageCodec(is_packed=not is_private)
    if not isinstance(given, CodecMaker):
        raise ConfigError(f"codec: pages have zstd() or encrypted(keys), not {shown(given)}")
    return given.make(KIND, PageCodec)


def _unstored(page: Page, error: LoadFailed | None = None) -> ServedPage:
    return ServedPage(page, verdict=Verdict.GONE, age=0.0, stored=False, error=error)


def _tags_of(key: PageKey) -> tuple[str, ...]:
    if key.tags is None:
        raise LookupError(f"{key}: a page that is only named has no tags to tell")
    return key.tags
