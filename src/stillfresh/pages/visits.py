"""From a visit to the page that it is served: drives the HTTP rules.

`Visits.find` answers one question: what is this visitor served? There are four answers (`Served`):

- a `FoundPage`: a stored page, or one that was loaded just now and could be shared;
- an `AppAnswer`: the app's response to this very request, which cannot be shared;
- an `Unavailable`: a response of the cache itself, such as a 504;
- a `Reason`: the cache cannot help, and the app must answer.

The way to the answer has three steps. *The variant* (`_variant`): the page under the URL's key says
in its `Vary` which request fields choose another page. If this visitor's fields choose another one,
the search goes on under the key of that variant. *The way to ask*: on a route with a duration the
app is asked by the page's key alone (`_find_by_key`), elsewhere by the visitor's own request
(`_find_as_asked`). The second reads the stored page itself, and goes on only if that is not fresh
or not good enough. *The read*: `PageCache.ask` answers with a stored page, waits for a load of this
key, or begins one; `_read` turns what came of it into one of the four answers.

One case takes no lease: a page that is never fresh (`max-age=0` with an `ETag`) is validated for
each visitor, and storing it again each time would be of no use (`_ask_without_lease`).

It also learns from the app's answers to single visitors whether the next answer can be shared
(`hear`): a page that was private once is not waited for by the next visitors.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

from stillfresh.bounded import BoundedDict
from stillfresh.engine import Answer, Private
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict
from stillfresh.http import Reason, is_failure, selected
from stillfresh.http.fields import Raw, values
from stillfresh.pages import sharing
from stillfresh.pages.answers import AppAnswer, Handover
from stillfresh.pages.clients import Heard, NamePlaces, unfit_to_fill
from stillfresh.pages.facetheory import SiteStore
from stillfresh.pages.model import (
    Busy,
    FoundPage,
    Head,
    Offer,
    PageCaller,
    PageFailed,
    PageKey,
    Render,
    Rendered,
    Scope,
    SiteCopy,
    StoredPage,
    Unavailable,
)
from stillfresh.pages.page_cache import PageCache
from stillfresh.pages.parts import covers, is_one, unfit_to_add
from stillfresh.pages.render import AppRequest, Renderer, given_to, is_ones_own
from stillfresh.pages.routes import MOST_KEY, ONLY_COOKIES, Visit, key_of_variant
from stillfresh.pages.sharing import Allowed, allows_authorized, is_for, is_good_for, is_of
from stillfresh.pages.stored import found_page, notice, passed_on, response_fields
from stillfresh.stores.contract import Mark

KNOWN_KEYS: Final = 10_000
"""Pages about which this process remembers something."""
STORE_AGAIN: Final = 30.0
"""Seconds before a page that is never fresh is stored again."""
ASKED_AT_ONCE: Final = 10
"""Visitors of one page that is never fresh for which the site is asked at the same time."""
TOO_BIG_FOR: Final = 600.0
"""Seconds for which a page that was too big is not loaded whole for a range."""
OK: Final = 200
ROUNDS: Final = 3
"""Loads that a visit waits for: each may turn out to be another variant."""
Served: TypeAlias = FoundPage | Unavailable | AppAnswer | Reason
"""`AppAnswer`: the app's response to this request itself. A reason: the app must answer."""
Way: TypeAlias = Callable[[Visit, PageKey, Mapping[str, str]], Awaitable[Served]]
"""The page under a key, in the variant that these request fields choose."""


class Visits:
    """Finds pages for requests, or says why the app must answer."""

    def __init__(
        self,
        pages: PageCache,
        renderer: Renderer,
        credentials: frozenset[bytes],
        max_variants: int,
        max_queries: int,
        *,
        allowed: Allowed,
    ) -> None:
        self._pages = pages
        self._renderer = renderer
        self._credentials = credentials
        self._allowed = allowed
        self._heard = Heard(KNOWN_KEYS)
        self._site_store = SiteStore(pages.clock)
        self._asked_alone: Counter[str] = Counter()
        """Requests under way that take no lease, by page."""
        self._due: BoundedDict[str, None] = BoundedDict(KNOWN_KEYS)
        """Pages that were never fresh, and are now."""
        self._too_big: BoundedDict[str, float] = BoundedDict(KNOWN_KEYS)
        """Pages that were too big to be stored for a visitor of a range, and since when."""
        self.places = NamePlaces(max_variants, max_queries, most=KNOWN_KEYS)

    async def find(self, visit: Visit, scope: Scope, state: Mapping[str, Any]) -> Served:
        if visit.wish.no_store or visit.wish.only_if_cached:
            return await self._only_stored(visit)
        if self._site_store.is_ours:
            return await self._variant(visit, self._find_fresh)
        return await self._stored_or_asked(visit, scope, state)

    async def _stored_or_asked(
        self, visit: Visit, scope: Scope, state: Mapping[str, Any]
    ) -> Served:
        if not self.places.has_query(visit.host, visit.path, visit.query, self._pages.clock()):
            return Reason.FULL
        if visit.is_as_asked:
            served = await self._variant(visit, partial(self._find_as_asked, scope))
            if served is Reason.RANGE and not visit.is_head and is_one(visit.headers):
                served = await self._part_or_whole(visit, scope)
        elif await self._goes_to_app(visit):
            return Reason.PRIVATE
        else:
            served = await self._variant(visit, partial(self._find_by_key, state))
        if not visit.is_authorized:
            return served
        if visit.is_as_asked and not isinstance(served, FoundPage):
            return served  # no page, or the answer to the visitor's own request
        is_for_all = isinstance(served, FoundPage) and allows_authorized(served.stored.head)
        return served if is_for_all else Reason.AUTHORIZATION

    async def _part_or_whole(self, visit: Visit, scope: Scope) -> Served:
        """One range of a page that is not stored whole.

        With `If-Range`, a 206 may leave out header fields (RFC 9110 §15.3.7), so it is of no use
        for others. Then the whole page is loaded, and the range is cut from it.
        """
        served = await self._variant(visit.part(), partial(self._find_as_asked, scope))
        if isinstance(served, FoundPage) and not covers(served.stored, visit.headers):
            return Reason.RANGE  # another visitor's range was loaded
        if served is not Reason.RANGE or not values(visit.headers, b"if-range"):
            return served
        return await self._whole(visit, scope)

    async def _whole(self, visit: Visit, scope: Scope) -> Served:
        """Load the whole page for a visitor that asks for a range with `If-Range`.

        If the page cannot be stored, the visitor's own request is sent in its place: a client that
        resumes a large download must not get all of it again. Of a page that is too big this is
        remembered for a while; of others, `Heard` knows it.
        """
        now = self._pages.clock()
        too_big_since = self._too_big.get(visit.id, -math.inf)
        if 0 <= now - too_big_since < TOO_BIG_FOR:
            return Reason.RANGE
        served = await self._variant(visit.filling(), partial(self._find_as_asked, scope))
        if not isinstance(served, AppAnswer) or served.status != OK:
            return served
        served.abandon()
        if served.reason is Reason.SIZE:
            self._too_big.note(visit.id, now)
        return served.reason

    async def _variant(self, visit: Visit, way: Way) -> Served:
        """RFC 9111 §4.1: the page under the key, if it fits this visitor, or its own variant."""
        base_key = self._key(visit, visit.id)
        key = base_key
        # If others read the store, the page's own key has the uncompressed page.
        visit_to_app = visit.unencoded() if self._pages.is_shared else visit
        chosen: dict[str, str] = {}
        for _ in range(ROUNDS):
            served = await way(visit_to_app, key, chosen)
            if not isinstance(served, FoundPage):
                return served
            # One request for a visit; the next visit asks for the encoded form.
            compared = visit_to_app if served.is_new else visit
            if is_of(served.stored, compared.headers, visit.carried):
                return served if key is base_key else replace(served, keys=(base_key, key))
            vary = served.stored.head.vary
            choosing = selected(vary, visit.headers, visit.carried)
            if choosing is None:
                return Reason.VARY
            named = {f"vary {name}": choosing.get(name, "") for name in vary}
            id_ = key_of_variant(visit.id, named)
            if len(id_) > MOST_KEY:
                return Reason.HEADERS
            if not self.places.has_variant(base_key.id, id_, self._pages.clock()):
                return Reason.FULL
            visit_to_app = visit
            key = self._key(visit, id_)
            chosen = {**choosing}
        return Reason.VARY

    def _key(self, visit: Visit, id_: str) -> PageKey:
        of = None if id_ == visit.url else visit.url
        return self._pages.key(id_, visit.path, visit.route.tags, query=visit.query, of=of)

    async def _find_by_key(
        self, state: Mapping[str, Any], visit: Visit, key: PageKey, chosen: Mapping[str, str]
    ) -> Served:
        """The app gets the key, and nothing of the visitor."""
        if visit.wish.max_stale:
            answer = await self._pages.resource.get_stored(key)
            is_over = answer is not None and answer.found and answer.verdict is Verdict.EXPIRED
            if answer is not None and is_over and self._is_good(visit, answer):
                return self._hit(key, answer)
        base = {**state, "client": None}

        async def render(old: StoredPage | None, offer: Offer) -> Rendered:
            # The page under the key keeps its variant, whichever visitor triggers a refresh.
            given = {**given_to(visit), **chosen}
            if old is not None:
                given = {**visit.declared, **dict(old.head.variant)}
            own = self._terms(visit)
            asking = AppRequest(visit, base, own, given, offer=offer, allowed=self._allowed)
            return await self._render(key, asking, old, old)

        anew = visit.is_open and await self._is_shareable_again(visit, key)
        return await self._read(visit, key, render, anew=anew)

    async def _is_shareable_again(self, visit: Visit, key: PageKey) -> bool:
        """True if a visitor's answer may be shared, and there is no page yet.

        Then memory's note that an earlier answer was not shared does not count.
        """
        if self._heard.is_private(visit.id) is not False:
            return False
        answer = await self._pages.resource.get_stored(key)
        return answer is None or not answer.found

    async def _render(
        self, key: PageKey, asking: AppRequest, old: StoredPage | None, stored: StoredPage | None
    ) -> Rendered:
        """`old`: what the site compares with; `stored`: what the store has."""
        began = self._pages.clock()
        rendered = await self._renderer.render(asking, old)
        if self._pages.is_shared:
            self._site_store.rendered(key.id, rendered, stored, began)
        return rendered

    async def _find_as_asked(
        self, scope: Scope, visit: Visit, key: PageKey, _: Mapping[str, str]
    ) -> Served:
        """The stored page, if it is good enough, else the answer to this request itself."""
        answer = await self._read_stored(visit, key)
        unfit = (unfit_to_add if visit.is_part else unfit_to_fill)(visit.headers)
        if visit.is_filling and unfit is Reason.RANGE:
            unfit = None
        if answer is not None and answer.found:
            return await self._serve_or_ask(visit, scope, key, answer, unfit)
        if self._heard.is_private(self._mark(visit)):
            return Reason.PRIVATE
        if unfit is not None:
            return unfit
        return await self._ask(visit, scope, key, anew=answer is not None)

    async def _serve_or_ask(
        self,
        visit: Visit,
        scope: Scope,
        key: PageKey,
        answer: Answer[StoredPage],
        unfit: Reason | None,
    ) -> Served:
        """The stored page, if this visitor may have it and accepts its age.

        `unfit`: why this request must not fill the cache.
        """
        head = answer.value.head
        if not is_of(answer.value, visit.headers, visit.carried):
            return self._hit(key, answer)  # `_variant` goes on to the right one
        if visit.is_authorized and not allows_authorized(head):
            return Reason.AUTHORIZATION
        may_ask = unfit in {None, Reason.RANGE}
        is_good = self._is_good(visit, answer)
        if visit.is_part and not covers(answer.value, visit.headers):
            return unfit or await self._ask(visit, scope, key, anew=True)
        if is_good and not (answer.verdict is Verdict.STALE and may_ask):
            return self._hit(key, answer)
        why = is_for(head, visit.carried) if may_ask else unfit
        if not is_good and why is not None:
            return why
        if not is_good and not visit.is_part and self._is_not_due(key, answer):
            served = await self._ask_without_lease(visit, scope, key, answer.value)
            if served is not None:
                return served
        return await self._ask(visit, scope, key, is_behind=is_good)

    def _is_good(self, visit: Visit, answer: Answer[StoredPage]) -> bool:
        """Is the copy that was just read good enough for this request?

        `max-stale` accepts an old copy, and no copy that was invalidated. A visitor with a token
        accepts none either, not even while it is refreshed: it may be from before the change.
        """
        if visit.token and answer.mark is not Mark.NONE:
            return False
        if answer.verdict is Verdict.EXPIRED and answer.mark is not Mark.NONE:
            return False
        return is_good_for(answer, visit.wish, self._pages.clock())

    def _is_not_due(self, key: PageKey, answer: Answer[StoredPage]) -> bool:
        """A page that is never fresh is not stored for each visit. An old failure may cool.

        It is due if a later response was fresh, and while many visitors ask: loads are shared.
        """
        is_young = self._pages.clock() - answer.fetched_at < STORE_AGAIN
        if not is_young or answer.error is not None or key.id in self._due:
            return False
        is_crowded = self._asked_alone[key.id] >= ASKED_AT_ONCE
        return not is_crowded and sharing.is_never_fresh(answer.value.head)

    async def _ask_without_lease(
        self, visit: Visit, scope: Scope, key: PageKey, old: StoredPage
    ) -> Served | None:
        """Ask the site about a page that is never fresh. It takes no lease and stores nothing.

        A response that was asked for without a lease must not be stored: the page may have been
        invalidated meanwhile. None if the site fails or takes too long: a load asks it once more,
        with a lease, and decides what that means for the page.
        """
        handover = Handover()
        asking = self._app_request(visit, scope, handover)
        rendering = asyncio.ensure_future(self._renderer.render(asking, old))
        self._asked_alone[key.id] += 1
        try:
            await asyncio.wait([rendering], timeout=self._pages.render_timeout)
        except asyncio.CancelledError:
            rendering.cancel()
            handover.leave()
            raise
        finally:
            self._asked_alone -= Counter([key.id])
        if not rendering.done():
            rendering.cancel()
            handover.leave()
            return None
        own_answer = handover.take()
        if own_answer is not None:
            return own_answer
        return (
            self._judge_unleased(key, rendering.result()) if rendering.exception() is None else None
        )

    def _app_request(
        self, visit: Visit, scope: Scope, handover: Handover, offer: Offer | None = None
    ) -> AppRequest:
        """The visitor's own request to the app."""
        return AppRequest(
            visit,
            scope,
            self._terms(visit),
            request=visit.headers,
            credentials=self._credentials,
            handover=handover,
            offer=offer,
            allowed=self._allowed,
        )

    def _judge_unleased(self, key: PageKey, rendered: Rendered) -> Served | None:
        """The response to a request that took no lease; None if it is a failure."""
        page = rendered.page
        if page is None:
            return rendered.reason or Reason.PRIVATE
        if rendered.reason is Reason.SITE_COPY:  # a load would get the same old page
            return self._passed_on(rendered, page, "stale")
        if rendered.reason is not None or is_failure(page.head.status):
            return None
        reason = Reason.NO_FRESHNESS
        if not sharing.is_never_fresh(page.head):
            reason = Reason.REMEMBERED
            self._note_due(key)
        self._pages.count_bypass(reason)
        stored = self._pages.shows(page)
        fields = response_fields(stored, stored.head.initial_age, f"fwd=stale; detail={reason}")
        return FoundPage((key,), stored, fields, is_new=True)

    def _note_due(self, key: PageKey) -> None:
        """The next visit loads the page, because it is fresh for some time by now."""
        self._due.note(key.id, None)

    async def _read_stored(self, visit: Visit, key: PageKey) -> Answer[StoredPage] | None:
        """The stored page, however old; counted as a read if it can be served as it is."""
        known = None if visit.is_authorized else self._pages.known(key)
        if known is not None:
            return known
        answer = await self._pages.resource.get_stored(key)
        if answer is None or not answer.found or answer.verdict is not Verdict.FRESH:
            return answer
        if not visit.is_authorized or allows_authorized(answer.value.head):
            self._pages.resource.count_read(key, answer)
        return answer

    async def _ask(
        self,
        visit: Visit,
        scope: Scope,
        key: PageKey,
        *,
        anew: bool = False,
        is_behind: bool = False,
    ) -> Served:
        """`anew`: load in any case: it was private, or the stored parts lack the range.

        `is_behind`: the visitor gets the stored page, and nobody waits for the answer.
        """
        self._due.pop(key.id, None)
        handover = Handover()

        async def render(stored: StoredPage | None, offer: Offer) -> Rendered:
            old = stored
            asking = self._app_request(visit, scope, handover, offer)
            if old is not None and is_for(old.head, visit.carried) is not None:
                if is_behind:  # the page is rendered without credentials
                    request = tuple(
                        field for field in visit.headers if field[0] not in visit.carried
                    )
                    asking = replace(asking, request=request, handover=None)
                else:
                    old = None  # the visitor's own answer says nothing about it
            if old is not None and not is_of(old, asking.request):
                old = None  # of another variant, which was under this key before
            return await self._render(key, asking, old, stored)

        own_answer: AppAnswer | None = None
        try:
            served = await self._read(visit, key, render, anew=anew)
            if not isinstance(served, FoundPage):
                own_answer = handover.take()
        finally:
            if own_answer is None:
                handover.leave()
        return own_answer or served

    async def _goes_to_app(self, visit: Visit) -> bool:
        """True if the app gets this visitor's own request at once, and no request by the key.

        So nothing is requested twice, for example a link that works only once. In this order: a
        visitor with a token goes to the app if the page is private. A page that is likely shared is
        looked for. Otherwise the last answer decides, if there was one. If there was none, requests
        with cookies or credentials go to the app, unless the store has an entry for the page.
        """
        key = PageKey(visit.id)
        if visit.token and self._heard.is_private(key.id):
            return True  # there is no page to wait for, and loads would be waited for in turn
        if self._is_likely_shared(visit, key):
            return False
        is_private = self._heard.is_private(key.id)
        if is_private is not None:
            return is_private
        return bool(visit.carried) and await self._pages.resource.get_stored(key) is None

    def _is_likely_shared(self, visit: Visit, key: PageKey) -> bool:
        """True if its route has a duration, or memory has the page; never as asked."""
        is_shared = visit.route.revalidate is not None or self._pages.old(key) is not None
        return is_shared and not visit.is_as_asked

    async def _only_stored(self, visit: Visit) -> Served:
        """RFC 9111 §5.2.1.5, §5.2.1.7: the stored page, if it may be served; nothing is stored."""
        served = await self._variant(visit, self._find_stored)
        if visit.wish.only_if_cached and not isinstance(served, FoundPage):
            return Unavailable(notice(504, "Not in the cache.\n"), "fwd=request")
        return served

    async def _find_fresh(self, visit: Visit, key: PageKey, _: Mapping[str, str]) -> Served:
        """The site fills this store itself. A lease of ours would lock it out."""
        answer = await self._pages.resource.get_stored(key)
        if answer is None or not answer.found or answer.verdict is not Verdict.FRESH:
            return Reason.SAME_STORE
        if visit.is_authorized and not allows_authorized(answer.value.head):
            return Reason.AUTHORIZATION
        if not sharing.suits(answer, visit.wish, self._pages.clock()):
            return Reason.SAME_STORE
        return self._hit(key, answer)

    async def _find_stored(self, visit: Visit, key: PageKey, _: Mapping[str, str]) -> Served:
        answer = await self._pages.resource.get_stored(key)
        if answer is None or not answer.found:
            return Reason.NO_STORE
        is_for_all = not visit.is_authorized or allows_authorized(answer.value.head)
        is_given = is_for_all and self._is_good(visit, answer)
        if not is_given and is_of(answer.value, visit.headers, visit.carried):
            return Reason.NO_STORE
        return self._hit(key, answer)

    async def _read(
        self, visit: Visit, key: PageKey, render: Render, *, anew: bool = False
    ) -> Served:
        """From the page cache, or by the render."""
        try:
            caller = PageCaller(visit.wish, not visit.is_open, visit.reads_along)
            read = await self._pages.ask(key, render, caller, anew=anew)
        except Busy:
            if self._heard.is_private(key.id) or not self._is_likely_shared(visit, key):
                return Reason.BUSY  # a private page: no other visitor's render is waited for
            raise
        outcome = read.outcome
        is_shared = isinstance(outcome, Answer) and outcome.found
        # As asked, an answer to another visitor, or one that is too big, says nothing of sharing.
        is_told = isinstance(outcome, Private) and outcome.value.reason is not Reason.SIZE
        is_heard = is_shared or is_told or not visit.is_as_asked
        if is_heard and not isinstance(outcome, LoadFailed):
            mark = self._mark(visit) if visit.is_as_asked else key.id
            self._heard.rendered(mark, self._pages.clock(), is_shared=is_shared)
        match outcome:
            case LoadFailed() as error:
                return self._failed(visit, error, is_own=read.is_own)
            case Private(Rendered(StoredPage() as page) as rendered) if is_ones_own(
                visit, rendered
            ):
                return self._passed_on(rendered, page)
            case Answer() as answer if answer.found:
                if visit.is_as_asked and not read.is_own:
                    reason = _why_not_shared(visit, answer.value.head)
                    if reason is not None:
                        return reason
                before = read.before
                if visit.is_part and before == "request":
                    before = "partial"
                hit = self._hit(key, answer, before)
                if read.growing is None:
                    return hit
                return read.growing.lost or replace(hit, read=read)
            case _:
                return Reason.PRIVATE

    def _hit(self, key: PageKey, answer: Answer[StoredPage], before: str = "miss") -> FoundPage:
        self._site_store.note_found(key.id, answer.value)
        return found_page(key, answer, self._pages.clock(), before)

    def _failed(self, visit: Visit, error: LoadFailed, *, is_own: bool) -> Served:
        """The error itself; within a cooldown, when to come again.

        Without a route's duration, and as asked, a request may fail because of the client that sent
        it. So only that client is told, and the others send their own requests.
        """
        cause = error.__cause__
        page = cause.page if isinstance(cause, PageFailed) else None
        is_late = isinstance(cause, TimeoutError)
        is_ours = is_late or (page is not None and sharing.is_of_gateway(page.headers.raw))
        if page is not None and sharing.is_pool_full(page.headers.raw):
            what = f"fwd=miss; detail={Reason.SITE_FULL}"
            return Unavailable(self._pages.error_page(error, is_own=is_own), what, Reason.SITE_FULL)
        if isinstance(cause, SiteCopy):
            old_page = cause.rendered.page
            if old_page is None or not self._is_answered_by(visit, cause.rendered, is_own=is_own):
                return Reason.FAILED
            return self._passed_on(cause.rendered, old_page)
        is_his = visit.is_as_asked and is_own and isinstance(cause, Exception)
        if visit.is_open and not is_ours and not is_his:
            return Reason.FAILED
        if is_late:
            return Unavailable(notice(504, "The page took too long.\n"), "fwd=miss")
        what = "fwd=miss; detail=cooling" if page is None else "fwd=miss"
        return Unavailable(self._pages.error_page(error, is_own=is_own), what)

    def _passed_on(self, rendered: Rendered, page: StoredPage, before: str = "miss") -> Unavailable:
        """The site's response, which is not stored; `before`: why the site was asked."""
        response = passed_on(self._pages.shows(page), rendered.born_at, self._pages.clock())
        what = f"fwd={before}; detail={rendered.reason}"
        return Unavailable(response, what, rendered.reason)

    def _is_answered_by(self, visit: Visit, old_copy: Rendered, *, is_own: bool) -> bool:
        """True if the visitor's own request would get the same old page of the site.

        Without a route's duration, and as asked, only the visitor whose request brought it gets it.
        """
        if visit.is_open and not is_own:
            return False
        return visit.is_as_asked or is_ones_own(visit, old_copy)

    def hear(self, visit: Visit, status: int, headers: Raw) -> sharing.Judgement:
        """Note an answer of the app to one visitor's request: could it be shared?"""
        now = self._pages.clock()
        if self._pages.is_shared:
            self._site_store.passed(visit.id, headers)
        is_personal = bool(visit.carried) and not visit.is_as_asked
        asking = AppRequest(
            visit,
            {},
            self._terms(visit),
            request=visit.headers if visit.is_as_asked else (),
            credentials=self._credentials if visit.is_as_asked else frozenset(),
            allowed=self._allowed,
        )
        judgement = asking.judge(now, status, headers)
        if isinstance(judgement, sharing.Shared) and visit.is_authorized:
            head = Head(headers=headers, is_targeted=judgement.is_targeted)
            judgement = judgement if allows_authorized(head) else Reason.AUTHORIZATION
        if visit.is_open and isinstance(judgement, sharing.Shared):
            self._heard.stated(self._mark(visit), now, is_personal=is_personal)
        return judgement

    def _mark(self, visit: Visit) -> str:
        """The note about a page; as asked, kept apart for clients that identify themselves."""
        return f"{visit.id}\npersonal" if visit.is_as_asked and visit.carried else visit.id

    def _terms(self, visit: Visit) -> sharing.RouteTimes | None:
        """The times by the route's duration."""
        revalidate = visit.route.revalidate
        return None if revalidate is None else self._pages.terms(revalidate)


def _why_not_shared(visit: Visit, head: Head) -> Reason | None:
    """Why this visitor must not get the response to another's request; None if it may.

    A response that is shared at all was asked for without a cookie, or says that it is for all.
    """
    reason = is_for(head, visit.carried - ONLY_COOKIES)
    if reason is None and sharing.is_for_each_sender(head, visit.carried, head.fresh_for):
        return Reason.AUTHORIZATION
    return reason
