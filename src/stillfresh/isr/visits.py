"""From a visit to the page that it is served (I8, I13, I14): the driver of the HTTP rules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from stillfresh.engine import Answer, Origin
from stillfresh.engine.flights import Outcome
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict
from stillfresh.isr.model import Page, PageFailed, PageKey, Rendered, Stored
from stillfresh.isr.pages import RETRY_AFTER, Busy, PageCache, opened, told_to
from stillfresh.isr.rendering import Renderer, given_to
from stillfresh.isr.rules_bounds import SeatsOf
from stillfresh.isr.rules_fields import Raw
from stillfresh.isr.rules_freshness import is_good_enough
from stillfresh.isr.rules_heard import Heard, Word
from stillfresh.isr.rules_keys import variant
from stillfresh.isr.rules_pages import (
    age_at,
    hit_text,
    is_changed,
    is_of,
    may_serve,
    too_busy,
    ttl_at,
)
from stillfresh.isr.rules_routes import MOST_KEY, Visit, key_of_variant
from stillfresh.isr.rules_storage import (
    Shared,
    allows_authorized,
    forbids_stale,
    is_answer_to,
    is_of_gateway,
    judged,
)

__all__ = ["Found", "Seat", "Unavailable", "Visits"]

Seat: TypeAlias = tuple[str, str, str]
"""Host, path and query: the names from outside that a page is kept by."""

KNOWN_KEYS: Final = 10_000
"""Pages of which this process counts the variants."""
KNOWN_PATHS: Final = 256
"""Paths of which it counts the queries."""


@dataclass(frozen=True, slots=True)
class Found:
    """A stored page, and what to say of it."""

    key: PageKey
    stored: Stored
    age: float
    what: str
    is_outdated: bool = False
    """Stale though younger than it was to become."""
    of: PageKey | None = None
    """The key under which it was looked for first, and which has another variant."""

    @property
    def keys(self) -> Sequence[PageKey]:
        """What was asked for, one after the other."""
        return (self.key,) if self.of is None else (self.of, self.key)


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Nothing to serve but this."""

    page: Page
    what: str


class Visits:
    """Finds pages for requests; None means that a request has to be answered by the app itself."""

    def __init__(
        self, pages: PageCache, renderer: Renderer, *, max_variants: int, max_queries: int
    ) -> None:
        self._pages = pages
        self._renderer = renderer
        self._variants = SeatsOf(max_variants, most=KNOWN_KEYS)
        self._queries = SeatsOf(max_queries, most=KNOWN_PATHS)
        self._unshared: dict[str, None] = {}
        self._heard = Heard(KNOWN_KEYS)

    async def find(self, visit: Visit, state: Mapping[str, Any]) -> Found | Unavailable | None:
        key = self._key(visit, state, visit.id, given_to(visit))
        if visit.wish.no_store or visit.wish.only_if_cached:
            return await self._only_stored(visit, state, key)
        if self._is_one_too_many(visit) or await self._is_the_apps(visit, key):
            return None
        found = await self._variant(visit, state, key)
        return found if not visit.is_authorized or _is_for_all(found) else None

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

    def hear(self, visit: Visit, status: int, headers: Raw) -> None:
        """What the app said of itself to one visitor, with whose request it was asked."""
        if visit.route.revalidate is not None:
            return
        now = self._pages.clock()
        is_for_all = not visit.is_authorized or allows_authorized(headers)
        if is_for_all and isinstance(judged(status, headers, now, None), Shared):
            self._heard.stated(visit.id, now, is_personal=visit.is_personal)

    async def _variant(
        self, visit: Visit, state: Mapping[str, Any], key: PageKey
    ) -> Found | Unavailable | None:
        """RFC 9111 §4.1: the page under the key, if it is this visitor's, or that of his own."""
        found = await self._answer(visit, key)
        if not isinstance(found, Found) or not found.stored.head.vary:
            return found
        values = variant(found.stored.head.vary, visit.headers)
        if is_of(found.stored, values):
            return found
        id_ = _variant_id(visit, found.stored.head.vary, values or {})
        if values is None or len(id_) > MOST_KEY:
            return None
        varied = self._key(visit, state, id_, {**given_to(visit), **values})
        if not self._has_room(key, varied, self._pages.clock()):
            return None
        found = await self._answer(visit, varied)
        if isinstance(found, Found):
            now = variant(found.stored.head.vary, visit.headers)
            return replace(found, of=key) if is_of(found.stored, now) else None
        return found

    def _key(
        self, visit: Visit, state: Mapping[str, Any], id_: str, given: Mapping[str, str]
    ) -> PageKey:
        revalidate = visit.route.revalidate
        own = None if revalidate is None else self._pages.terms(revalidate)

        async def render(old: Stored | None) -> Rendered:
            # What stands under the key stays of its variant, whoever asks for it to be refreshed.
            again = {**visit.declared, **dict(old.head.variant)} if old is not None else given
            return await self._renderer.render(visit, state, own, again, old)

        of = None if id_ == visit.url else visit.url
        key = self._pages.key(id_, visit.path, render, visit.route.tags, of=of)
        key.is_open = own is None
        return key

    async def _answer(self, visit: Visit, key: PageKey) -> Found | Unavailable | None:
        if visit.wish.max_stale and (kept := await self._taken_stale(visit, key)) is not None:
            return kept
        try:
            answer = await self._pages.ask(key)
        except Busy:
            if key.id in self._unshared or not self._is_for_many(visit, key):
                return None  # a page of each visitor's own: nobody's render is waited for
            raise
        self._note(key, answer)
        if self._is_too_old(visit, answer):
            answer = await self._pages.ask(key, anew=True)
        return self._found(visit, key, answer)

    def _is_for_many(self, visit: Visit, key: PageKey) -> bool:
        """By its route, or since it was."""
        entry = self._pages.core.shelf.front.entries.get(key)
        return visit.route.revalidate is not None or (entry is not None and entry.answer.found)

    def _note(self, key: PageKey, answer: Outcome[Stored]) -> None:
        """Which pages, when last seen, were not to be shared."""
        if isinstance(answer, LoadFailed):
            return
        self._unshared.pop(key.id, None)
        if key.is_open:
            self._heard.rendered(key.id, self._pages.clock(), is_shared=answer.found)
        elif not answer.found:
            if len(self._unshared) >= KNOWN_KEYS:
                self._unshared.clear()
            self._unshared[key.id] = None

    async def _taken_stale(self, visit: Visit, key: PageKey) -> Found | None:
        """RFC 9111 §5.2.1.2: older than we would serve, but not than the client takes."""
        answer = await self._pages.core.look(key)
        if answer is None or not answer.found or answer.verdict is not Verdict.EXPIRED:
            return None
        return self._hit(key, answer) if self._is_takeable(visit, answer) else None

    def _is_takeable(self, visit: Visit, answer: Answer[Stored]) -> bool:
        """EXPIRED, and all the same what this visitor takes."""
        made = answer.value, answer.fetched_at, self._pages.clock(), answer.verdict
        if is_changed(*made) or forbids_stale(answer.value.head.headers):
            return False
        return visit.wish.max_stale > 0 and self._suits(visit, answer)

    async def _only_stored(
        self, visit: Visit, state: Mapping[str, Any], key: PageKey
    ) -> Found | Unavailable | None:
        """RFC 9111 §5.2.1.5, §5.2.1.7: what is there, if it may be given; nothing is kept."""
        answer = await self._pages.core.look(key)
        if answer is not None and answer.found and (vary := answer.value.head.vary):
            values = variant(vary, visit.headers)
            if not is_of(answer.value, values):
                id_ = _variant_id(visit, vary, values or {})
                key = self._key(visit, state, id_, values or {})
                answer = None if values is None else await self._pages.core.look(key)
        if answer is not None and answer.found and self._may_have(visit, answer):
            return self._hit(key, answer)
        if visit.wish.only_if_cached:
            return Unavailable(_gateway_timeout("Not in the cache.\n"), "fwd=request")
        return None

    def _may_have(self, visit: Visit, answer: Answer[Stored]) -> bool:
        head = answer.value.head
        if visit.is_authorized and not allows_authorized(head.headers):
            return False
        if not is_of(answer.value, variant(head.vary, visit.headers)):
            return False
        if answer.verdict is Verdict.EXPIRED:
            return self._is_takeable(visit, answer)
        return self._suits(visit, answer)

    def _is_too_old(self, visit: Visit, answer: Outcome[Stored]) -> bool:
        if isinstance(answer, LoadFailed) or not answer.found or answer.error is not None:
            return False
        loaded = answer.origin in {Origin.LOADED, Origin.ANOTHER}
        return not loaded and not self._suits(visit, answer)

    def _suits(self, visit: Visit, answer: Answer[Stored]) -> bool:
        """A route's own duration is the site's decision, not the client's."""
        if answer.value.head.is_own:
            return True
        now = self._pages.clock()
        return is_good_enough(
            visit.wish,
            age=age_at(answer.value, answer.fetched_at, now),
            ttl=ttl_at(answer.value, answer.fetched_at, now, answer.verdict),
            may_be_stale=answer.verdict is Verdict.STALE,
        )

    def _found(
        self, visit: Visit, key: PageKey, answer: Outcome[Stored]
    ) -> Found | Unavailable | None:
        now = self._pages.clock()
        if isinstance(answer, LoadFailed):
            return self._failed(visit, key, answer)
        if not answer.found:
            return self._own(visit, key)
        made = answer.value, answer.fetched_at, now, answer.verdict
        if answer.error is not None and not may_serve(*made):
            return self._failed(visit, key, answer.error)
        return self._hit(key, answer)

    def _own(self, visit: Visit, key: PageKey) -> Unavailable | None:
        """The very answer, to who began its render, if his own request would have got the same."""
        if key.own is None or not key.is_open or visit.is_personal:
            return None
        page = opened(key.own)
        is_his = is_answer_to(visit.headers, given_to(visit), page.headers.raw)
        return Unavailable(page, "fwd=miss") if is_his else None

    def _hit(self, key: PageKey, answer: Answer[Stored]) -> Found:
        stored, now = answer.value, self._pages.clock()
        ttl = ttl_at(stored, answer.fetched_at, now, answer.verdict)
        what = hit_text(ttl)
        if answer.error is not None:
            what += "; detail=refresh-failed"
        elif answer.origin in {Origin.LOADED, Origin.ANOTHER}:
            why = "stale" if key.had_old else "miss"
            what = f"fwd={why}; {'stored' if answer.origin is Origin.LOADED else 'collapsed'}"
            what += f"; ttl={int(ttl)}"
        age = age_at(stored, answer.fetched_at, now)
        is_over = now - answer.fetched_at >= stored.head.fresh_for
        is_outdated = answer.verdict is not Verdict.FRESH and not is_over
        return Found(key, stored, age, what, is_outdated)

    def _failed(self, visit: Visit, key: PageKey, error: LoadFailed) -> Unavailable | None:
        """I8: the error itself; within a cooldown, when to come again.

        Where nobody said that the page is for all, it may only have failed for want of who asks.
        """
        cause = error.__cause__
        is_ours = isinstance(cause, TimeoutError) or (
            isinstance(cause, PageFailed) and is_of_gateway(cause.page.headers.raw)
        )
        if visit.route.revalidate is None and not is_ours:
            return None
        if isinstance(cause, PageFailed):
            return Unavailable(told_to(key, cause), "fwd=miss")
        if isinstance(cause, TimeoutError):
            return Unavailable(_gateway_timeout("The page took too long.\n"), "fwd=miss")
        if isinstance(cause, Exception):
            raise cause
        pause = RETRY_AFTER if error.retry_at is None else error.retry_at - self._pages.clock()
        return Unavailable(too_busy(pause), "fwd=miss; detail=cooling")

    def has_places(self, seat: Seat, keys: Sequence[PageKey], now: float) -> bool:
        """Whether a page that was found is still one of those that are kept."""
        first, last = keys[0], keys[-1]
        return self._has_seat(seat, now) and (first is last or self._has_room(first, last, now))

    def _has_room(self, key: PageKey, varied: PageKey, now: float) -> bool:
        """I13: whoever makes up header values does not fill the store."""
        return self._variants.has(key.id, varied.id, now)

    def _is_one_too_many(self, visit: Visit) -> bool:
        """I13: nor does who makes up queries."""
        seat = visit.host, visit.path, visit.query
        return not self._has_seat(seat, self._pages.clock())

    def _has_seat(self, seat: Seat, now: float) -> bool:
        host, path, query = seat
        return not query or self._queries.has(host + path, query, now)


def _is_for_all(found: Found | Unavailable | None) -> bool:
    """RFC 9111 §3.5: also for those who identify themselves."""
    return isinstance(found, Found) and allows_authorized(found.stored.head.headers)


def _variant_id(visit: Visit, vary: Sequence[str], values: Mapping[str, str]) -> str:
    return key_of_variant(visit.id, {f"vary {name}": values.get(name, "") for name in vary})


def _gateway_timeout(text: str) -> Page:
    return Page(text, 504, {"content-type": "text/plain", "cache-control": "no-store"})
