"""From what a load gave to what a visit is served, and what is noted of it (I8, I13, I14, I24).

What the app says to one visitor is heard as well: it tells whether the next answer is for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stillfresh.engine import Answer, Origin, Private
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict
from stillfresh.http.fields import Raw
from stillfresh.http.freshness import PageTerms, is_good_enough
from stillfresh.isr import rules_storage as storage
from stillfresh.isr.collecting import AppAnswer
from stillfresh.isr.model import (
    Page,
    PageFailed,
    PageKey,
    PageLoad,
    PageRead,
    Reason,
    Rendered,
    Stored,
)
from stillfresh.isr.pages import RETRY_AFTER, Busy, PageCache
from stillfresh.isr.rendering import given_to
from stillfresh.isr.rules_bounds import Heard, Word
from stillfresh.isr.rules_forward import judged_for, selected
from stillfresh.isr.rules_routes import Visit

KNOWN_KEYS: Final = 10_000
"""Pages of which this process notes something."""


@dataclass(frozen=True, slots=True)
class FoundPage:
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
    """Nothing to serve but this page."""

    page: Page
    what: str
    reason: Reason | None = None
    """Why it passed uncached; None: it did not."""


@dataclass(frozen=True, slots=True)
class Passed:
    """The app has to answer this request itself."""

    reason: Reason
    is_by_answer: bool = False
    """The last answer was not to be shared; this one says why, if it is not either."""


Served = FoundPage | Unavailable | AppAnswer | Passed
"""`AppAnswer` (I24): the app's response to this very request, which goes on."""


class Answering:
    """Asks the page cache for a page on behalf of a visit."""

    def __init__(self, pages: PageCache, credentials: frozenset[bytes]) -> None:
        self._pages = pages
        self._credentials = credentials
        self._heard = Heard(KNOWN_KEYS)

    async def _answer(self, visit: Visit, load: PageLoad, *, anew: bool = False) -> Served:
        key = load.key
        if visit.wish.max_stale and (kept := await self._taken_stale(visit, key)):
            return kept

        def takes(outcome: object) -> bool:
            self._note(visit, load, outcome)
            return not self._is_too_old(visit, outcome)

        try:
            read = await self._pages.ask(load, anew=anew, takes=takes)
        except Busy:
            is_private = self._heard.of(key.id) is Word.PRIVATE
            if is_private or not self._is_for_many(visit, key):
                return Passed(Reason.BUSY)  # of each visitor's own: nobody's render is waited for
            raise
        return self._found(visit, load, read)

    async def _taken_stale(self, visit: Visit, key: PageKey) -> FoundPage | None:
        """RFC 9111 §5.2.1.2: older than we would serve, but not than the client takes."""
        answer = await self._pages.core.look(key)
        if answer is None or not answer.found or answer.verdict is not Verdict.EXPIRED:
            return None
        return self._hit(key, answer) if self._is_takeable(visit, answer) else None

    def _is_for_many(self, visit: Visit, key: PageKey) -> bool:
        """By its route, or since it was."""
        if visit.is_as_asked:
            return False
        return visit.route.revalidate is not None or self._pages.old(key) is not None

    def _note(self, visit: Visit, load: PageLoad, outcome: object) -> None:
        if isinstance(outcome, LoadFailed):
            return
        is_shared = isinstance(outcome, Answer) and outcome.found
        if visit.is_as_asked and not is_shared and not _tells_of_sharing(outcome):
            return
        mark = self._mark(visit) if visit.is_as_asked else load.key.id
        self._heard.rendered(mark, self._pages.clock(), is_shared=is_shared)

    def _found(self, visit: Visit, load: PageLoad, read: PageRead) -> Served:
        match read.outcome:
            case LoadFailed() as error:
                return self._failed(visit, error, is_own=read.is_own)
            case Private(made) if made.is_whole and _is_ones_own(visit, load, made):
                reason = made.reason or Reason.PRIVATE
                page = storage.opened(made.page)
                return Unavailable(page, f"fwd=miss; detail={reason}", reason)
            case Answer() as answer if answer.found:
                if answer.error is not None and not storage.may_serve(*self._at(answer)):
                    return self._failed(visit, answer.error, is_own=read.is_own)
                return self._hit(load.key, answer, had_old=read.had_old)
            case _:
                return Passed(Reason.PRIVATE, is_by_answer=True)

    def _hit(self, key: PageKey, answer: Answer[Stored], *, had_old: bool = False) -> FoundPage:
        made = stored, fetched_at, now, verdict = self._at(answer)
        ttl = storage.ttl_at(*made)
        what = storage.hit_text(ttl)
        if answer.error is not None:
            what += "; detail=refresh-failed"
        elif answer.origin in {Origin.LOADED, Origin.ANOTHER}:
            why = "stale" if had_old else "miss"
            what = f"fwd={why}; {'stored' if answer.origin is Origin.LOADED else 'collapsed'}"
            what += f"; ttl={int(ttl)}"
        is_over = now - fetched_at >= stored.head.fresh_for
        is_outdated = verdict is not Verdict.FRESH and not is_over
        return FoundPage(key, stored, storage.age_at(stored, fetched_at, now), what, is_outdated)

    def _at(self, answer: Answer[Stored]) -> tuple[Stored, float, float, Verdict]:
        return answer.value, answer.fetched_at, self._pages.clock(), answer.verdict

    def _is_takeable(self, visit: Visit, answer: Answer[Stored]) -> bool:
        """EXPIRED, and all the same what this visitor takes."""
        headers = answer.value.head.headers
        if storage.is_changed(*self._at(answer)) or storage.forbids_stale(headers):
            return False
        return visit.wish.max_stale > 0 and self._suits(visit, answer)

    def _may_have(self, visit: Visit, answer: Answer[Stored]) -> bool:
        headers = answer.value.head.headers
        if visit.is_authorized and not storage.allows_authorized(headers):
            return False
        if not self._is_of(visit, answer.value):
            return False
        if answer.verdict is Verdict.EXPIRED:
            return self._is_takeable(visit, answer)
        return self._suits(visit, answer)

    def _is_of(self, visit: Visit, stored: Stored) -> bool:
        return storage.is_of(stored, selected(stored.head.vary, visit.headers, visit.carried))

    def _is_too_old(self, visit: Visit, answer: object) -> bool:
        if not isinstance(answer, Answer) or not answer.found or answer.error is not None:
            return False
        loaded = answer.origin in {Origin.LOADED, Origin.ANOTHER}
        return not loaded and not self._suits(visit, answer)

    def _suits(self, visit: Visit, answer: Answer[Stored]) -> bool:
        """A route's own duration is the site's decision, not the client's."""
        made = stored, fetched_at, now, verdict = self._at(answer)
        return stored.head.is_own or is_good_enough(
            visit.wish,
            age=storage.age_at(stored, fetched_at, now),
            ttl=storage.ttl_at(*made),
            may_be_stale=verdict is Verdict.STALE,
        )

    def _failed(self, visit: Visit, error: LoadFailed, *, is_own: bool) -> Served:
        """I8: the error itself; within a cooldown, when to come again.

        Without a route's duration, and as asked, a request may fail because of the client that sent
        it. So only that client is told, and the others send their own requests.
        """
        cause = error.__cause__
        is_ours = isinstance(cause, TimeoutError) or (
            isinstance(cause, PageFailed) and storage.is_of_gateway(cause.page.headers.raw)
        )
        is_his = visit.is_as_asked and is_own and isinstance(cause, Exception)
        is_open = visit.is_as_asked or visit.route.revalidate is None
        if is_open and not is_ours and not is_his:
            return Passed(Reason.FAILED)
        if isinstance(cause, PageFailed):
            return Unavailable(cause.own if is_own else cause.page, "fwd=miss")
        if isinstance(cause, TimeoutError):
            return Unavailable(gateway_timeout("The page took too long.\n"), "fwd=miss")
        if isinstance(cause, Exception):
            raise cause
        pause = RETRY_AFTER if error.retry_at is None else error.retry_at - self._pages.clock()
        return Unavailable(storage.too_busy(pause), "fwd=miss; detail=cooling")

    def judge(self, visit: Visit, status: int, headers: Raw) -> storage.Judgement:
        """May what the app said to one visitor, of his own request, be shared?"""
        now, own = self._pages.clock(), self._terms(visit)
        if visit.is_as_asked:
            return judged_for(
                visit.headers, self._credentials, status, headers, fetched_at=now, own=own
            )
        if visit.is_authorized and not storage.allows_authorized(headers):
            return storage.Unshared(Reason.AUTHORIZATION)
        return storage.judged(status, headers, now, own)

    def hear(self, visit: Visit, judgement: storage.Judgement) -> None:
        """What the app said of itself to one visitor, with whose request it was asked."""
        is_told = visit.is_as_asked or visit.route.revalidate is None
        if is_told and isinstance(judgement, storage.Shared):
            mark, now = self._mark(visit), self._pages.clock()
            is_personal = visit.is_personal and not visit.is_as_asked
            self._heard.stated(mark, now, is_personal=is_personal)

    def _mark(self, visit: Visit) -> str:
        """What is noted of a page; as asked, apart for those who say who they are."""
        is_apart = visit.is_as_asked and visit.is_personal
        return f"{visit.id}\npersonal" if is_apart else visit.id

    def _terms(self, visit: Visit) -> PageTerms | None:
        """By the route's own duration."""
        revalidate = visit.route.revalidate
        return None if revalidate is None else self._pages.terms(revalidate)


def _tells_of_sharing(outcome: object) -> bool:
    """Not the answer to another visitor's request, nor one that is only too big to be kept."""
    return isinstance(outcome, Private) and outcome.value.reason is not Reason.SIZE


def _is_ones_own(visit: Visit, load: PageLoad, made: Rendered) -> bool:
    """His own request would have got the same; or it is for all, and only had no place (I23)."""
    if made.reason is Reason.FULL:
        return True
    is_same = storage.is_answer_to(visit.headers, given_to(visit), made.page.head.headers)
    return load.is_open and not visit.is_personal and is_same


def gateway_timeout(text: str) -> Page:
    return Page(text, 504, {"content-type": "text/plain", "cache-control": "no-store"})
