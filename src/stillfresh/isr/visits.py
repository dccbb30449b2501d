"""From a visit to the page that it is served (I8, I13, I14, I24): the driver of the HTTP rules."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from stillfresh.engine import Answer
from stillfresh.freshness import Verdict
from stillfresh.isr.answering import (
    KNOWN_KEYS,
    Answering,
    FoundPage,
    Passed,
    Served,
    Unavailable,
    gateway_timeout,
)
from stillfresh.isr.collecting import Handover
from stillfresh.isr.model import PageKey, PageLoad, Reason, Rendered, Stored
from stillfresh.isr.pages import PageCache
from stillfresh.isr.rendering import Renderer, by_key, by_request, given_to
from stillfresh.isr.rules_bounds import NamesOf, Word
from stillfresh.isr.rules_forward import is_for, selected, unfit_to_fill, without
from stillfresh.isr.rules_routes import MOST_KEY, Scope, Visit, key_of_variant
from stillfresh.isr.rules_storage import allows_authorized, is_of

PageAddress: TypeAlias = tuple[str, str, str]
"""Host, path and query: the names from outside that a page is kept by."""
KNOWN_PATHS: Final = 256
"""Paths of which it counts the queries."""
ROUNDS: Final = 3
"""Loads that a visit waits for: each may turn out to be of another variant."""


class Visits(Answering):
    """Finds pages for requests, or says why the app has to answer one itself."""

    def __init__(
        self,
        pages: PageCache,
        renderer: Renderer,
        *,
        credentials: frozenset[bytes],
        max_variants: int,
        max_queries: int,
    ) -> None:
        super().__init__(pages, credentials)
        self._renderer = renderer
        self._variants = NamesOf(max_variants, most=KNOWN_KEYS)
        self._queries = NamesOf(max_queries, most=KNOWN_PATHS)

    async def find(self, visit: Visit, scope: Scope, state: Mapping[str, Any]) -> Served:
        if visit.wish.no_store or visit.wish.only_if_cached:
            return await self._only_stored(visit)
        if not self._has_query((visit.host, visit.path, visit.query), self._pages.clock()):
            return Passed(Reason.FULL)
        if visit.is_as_asked:
            found = await self._as_asked(visit, scope)
            is_refused = isinstance(found, FoundPage) and not _is_for_all(found)
            return Passed(Reason.AUTHORIZATION) if visit.is_authorized and is_refused else found
        load = self._load(visit, state, visit.id, given_to(visit))
        if await self._is_the_apps(visit, load.key):
            return Passed(Reason.PRIVATE, is_by_answer=True)
        found = await self._variant(visit, state, load)
        if visit.is_authorized and not _is_for_all(found):
            return Passed(Reason.AUTHORIZATION)
        return found

    async def _as_asked(self, visit: Visit, scope: Scope) -> Served:
        """I24: what is stored for such a request, else the answer to this very request."""
        for _ in range(ROUNDS):
            base = key = self._key(visit, visit.id)
            kept = await self._kept(visit, key)
            if kept is not None and kept.found and not self._is_of(visit, kept.value):
                varied = self._varied(visit, kept.value.head.vary)
                if isinstance(varied, Reason):
                    return Passed(varied)
                key = self._key(visit, varied)
                if not self._has_room(base, key, self._pages.clock()):
                    return Passed(Reason.FULL)
                kept = await self._kept(visit, key)
                if kept is not None and kept.found and not self._is_of(visit, kept.value):
                    return Passed(Reason.VARY)
            found = await self._kept_or_asked(visit, scope, key, kept)
            if not isinstance(found, FoundPage) or self._is_of(visit, found.stored):
                return _beside(found, base)
        return Passed(Reason.VARY)

    async def _kept(self, visit: Visit, key: PageKey) -> Answer[Stored] | None:
        """What there is, however old; counted as a read if it can be given as it is (I28)."""
        known = None if visit.is_authorized else self._pages.known(key)
        if isinstance(known, Answer):
            return known
        answer = await self._pages.core.look(key)
        if answer is None or not answer.found or answer.verdict is not Verdict.FRESH:
            return answer
        if not visit.is_authorized or allows_authorized(answer.value.head.headers):
            self._pages.core.memory.count([answer], self._pages.clock())
        return answer

    def _varied(self, visit: Visit, vary: Sequence[str]) -> str | Reason:
        """The id of this visitor's variant."""
        if (values := selected(vary, visit.headers, visit.carried)) is None:
            return Reason.VARY
        id_ = key_of_variant(visit.id, {f"vary {name}": values.get(name, "") for name in vary})
        return id_ if len(id_) <= MOST_KEY else Reason.HEADERS

    async def _kept_or_asked(
        self, visit: Visit, scope: Scope, key: PageKey, kept: Answer[Stored] | None
    ) -> Served:
        """What is kept, if it is good enough; `unfit` requests never fill the cache."""
        unfit = unfit_to_fill(visit.headers)
        if kept is None or not kept.found:
            return await self._unkept(visit, scope, key, is_refused=kept is not None)
        head = kept.value.head
        if visit.is_authorized and not allows_authorized(head.headers):
            return Passed(Reason.AUTHORIZATION)
        is_over = kept.verdict is Verdict.EXPIRED
        is_good = not is_over and self._suits(visit, kept)
        is_final = is_good and (kept.verdict is Verdict.FRESH or unfit not in {None, Reason.RANGE})
        if is_final or (is_over and self._is_takeable(visit, kept)):
            return self._hit(key, kept)
        refused = is_for(head.headers, visit.carried)
        why = refused if unfit in {None, Reason.RANGE} else unfit
        if not is_good and why is not None:
            return Passed(why)
        return await self._asked(visit, scope, key)

    async def _unkept(
        self, visit: Visit, scope: Scope, key: PageKey, *, is_refused: bool
    ) -> Served:
        """`is_refused`: the last answer, to whatever request, was not to be shared."""
        if self._heard.of(self._mark(visit)) is Word.PRIVATE:
            return Passed(Reason.PRIVATE, is_by_answer=True)
        if (unfit := unfit_to_fill(visit.headers)) is not None:
            return Passed(unfit)
        return await self._asked(visit, scope, key, anew=is_refused)

    async def _asked(
        self, visit: Visit, scope: Scope, key: PageKey, *, anew: bool = False
    ) -> Served:
        handover = Handover()
        load = self._own_load(visit, scope, key, handover)
        try:
            found = await self._answer(visit, load, anew=anew)
            going = None if isinstance(found, FoundPage) else handover.take()
        finally:
            handover.close()
        return found if going is None else going

    def _own_load(self, visit: Visit, scope: Scope, key: PageKey, handover: Handover) -> PageLoad:
        """I24: it asks with the visitor's own request."""
        own, credentials = self._terms(visit), self._credentials

        async def render(old: Stored | None) -> Rendered:
            request, taker = visit.headers, handover
            if old is not None and is_for(old.head.headers, visit.carried) is not None:
                # A refresh behind: nobody waits for it, and the page is made without credentials.
                request, taker = without(request, visit.carried), Handover(is_open=False)
            if old is not None and not is_of(old, selected(old.head.vary, request, frozenset())):
                old = None  # of another variant, which stood under this key before
            asking = by_request(
                visit, scope, own, request=request, credentials=credentials, handover=taker
            )
            return await self._renderer.render(asking, old)

        return PageLoad(key, render, is_open=True)

    def _key(self, visit: Visit, id_: str) -> PageKey:
        of = None if id_ == visit.url else visit.url
        return self._pages.key(id_, visit.path, visit.route.tags, of=of)

    async def _is_the_apps(self, visit: Visit, key: PageKey) -> bool:
        """Nobody has called it shareable yet, and this request is one's own: its answer will tell.

        So nothing is asked for twice, as a link that works once must not be.
        """
        if self._is_for_many(visit, key):
            return False
        match self._heard.of(key.id):
            case Word.PRIVATE:
                return True
            case Word.STATED:
                return False
        return visit.is_personal and await self._pages.core.look(key) is None

    async def _variant(self, visit: Visit, state: Mapping[str, Any], load: PageLoad) -> Served:
        """RFC 9111 §4.1: the page under the key, if it is this visitor's, or that of his own."""
        found = await self._answer(visit, load)
        if not isinstance(found, FoundPage) or self._is_of(visit, found.stored):
            return found
        vary = found.stored.head.vary
        if isinstance(id_ := self._varied(visit, vary), Reason):
            return Passed(id_)
        values = selected(vary, visit.headers, visit.carried) or {}
        varied = self._load(visit, state, id_, {**given_to(visit), **values})
        if not self._has_room(load.key, varied.key, self._pages.clock()):
            return Passed(Reason.FULL)
        found = await self._answer(visit, varied)
        if not isinstance(found, FoundPage):
            return found
        return _beside(found, load.key) if self._is_of(visit, found.stored) else Passed(Reason.VARY)

    def _load(
        self, visit: Visit, state: Mapping[str, Any], id_: str, given: Mapping[str, str]
    ) -> PageLoad:
        own = self._terms(visit)

        async def render(old: Stored | None) -> Rendered:
            # What stands under the key stays of its variant, whoever asks for it to be refreshed.
            again = {**visit.declared, **dict(old.head.variant)} if old is not None else given
            return await self._renderer.render(by_key(visit, state, own, again), old)

        return PageLoad(self._key(visit, id_), render, is_open=own is None)

    async def _only_stored(self, visit: Visit) -> Served:
        """RFC 9111 §5.2.1.5, §5.2.1.7: what is there, if it may be given; nothing is kept."""
        key = PageKey(visit.id)
        answer = await self._pages.core.look(key)
        if answer is not None and answer.found and not self._is_of(visit, answer.value):
            id_ = self._varied(visit, answer.value.head.vary)
            key = PageKey(id_)
            answer = None if isinstance(id_, Reason) else await self._pages.core.look(key)
        if answer is not None and answer.found and self._may_have(visit, answer):
            return self._hit(key, answer)
        if visit.wish.only_if_cached:
            return Unavailable(gateway_timeout("Not in the cache.\n"), "fwd=request")
        return Passed(Reason.NO_STORE)

    def has_places(self, address: PageAddress, keys: Sequence[PageKey], now: float) -> bool:
        """Whether a page that was found is still one of those that are kept."""
        first, last = keys[0], keys[-1]
        return self._has_query(address, now) and (first is last or self._has_room(first, last, now))

    def _has_room(self, key: PageKey, varied: PageKey, now: float) -> bool:
        """I13: a client that makes up header values does not fill the store."""
        return self._variants.has(key.id, varied.id, now)

    def _has_query(self, address: PageAddress, now: float) -> bool:
        """I13: nor does one that makes up queries."""
        host, path, query = address
        return not query or self._queries.has(host + path, query, now)


def _beside(found: Served, base: PageKey) -> Served:
    """With the key that was looked under first."""
    if not isinstance(found, FoundPage) or found.key is base:
        return found
    return replace(found, of=base)


def _is_for_all(found: Served) -> bool:
    """RFC 9111 §3.5: also for those who identify themselves."""
    return isinstance(found, FoundPage) and allows_authorized(found.stored.head.headers)
