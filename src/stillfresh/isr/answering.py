"""From what a load gave to what a visit is served, and what is noted of it (I8, I13, I24).

What the app says to one visitor is heard as well: it tells whether the next answer is for all.
"""

from typing import Final

from stillfresh.engine import Answer
from stillfresh.engine.model import Private
from stillfresh.errors import LoadFailed
from stillfresh.isr.found import Finder, Passed, Served, Unavailable
from stillfresh.isr.model import Page, PageFailed, PageKey, Rendered, Stored
from stillfresh.isr.pages import RETRY_AFTER, Busy, PageCache, PageLoad, PageRead
from stillfresh.isr.rendering import given_to
from stillfresh.isr.rules_fields import Raw
from stillfresh.isr.rules_forward import judged_for
from stillfresh.isr.rules_freshness import Terms
from stillfresh.isr.rules_heard import Heard
from stillfresh.isr.rules_pages import may_serve, opened, too_busy
from stillfresh.isr.rules_reasons import Reason
from stillfresh.isr.rules_routes import Visit
from stillfresh.isr.rules_storage import (
    Judgement,
    Shared,
    Unshared,
    allows_authorized,
    is_answer_to,
    is_of_gateway,
    judged,
)

KNOWN_KEYS: Final = 10_000
"""Pages of which this process notes something."""


class Answering:
    """Asks the page cache for a key on behalf of a visit."""

    def __init__(self, pages: PageCache, credentials: frozenset[bytes]) -> None:
        self._pages = pages
        self._credentials = credentials
        self._finder = Finder(pages)
        self._unshared: dict[str, None] = {}
        self._heard = Heard(KNOWN_KEYS)

    async def _answer(self, visit: Visit, load: PageLoad, *, anew: bool = False) -> Served:
        key = load.key
        if visit.wish.max_stale and (kept := await self._finder.taken_stale(visit, key)):
            return kept
        try:
            read = await self._pages.ask(load, anew=anew)
        except Busy:
            if key.id in self._unshared or not self._is_for_many(visit, key):
                return Passed(Reason.BUSY)  # of each visitor's own: nobody's render is waited for
            raise
        self._note(visit, load, read)
        if self._finder.is_too_old(visit, read.outcome):
            read = await self._pages.ask(load, anew=True)
        return self._found(visit, load, read)

    def _is_for_many(self, visit: Visit, key: PageKey) -> bool:
        """By its route, or since it was."""
        if visit.is_as_asked:
            return False
        entry = self._pages.core.shelf.front.entries.get(key)
        return visit.route.revalidate is not None or (entry is not None and entry.answer.found)

    def _note(self, visit: Visit, load: PageLoad, read: PageRead) -> None:
        """Which pages, when last seen, were not to be shared."""
        key, outcome = load.key, read.outcome
        if isinstance(outcome, LoadFailed):
            return
        is_shared = isinstance(outcome, Answer) and outcome.found
        if visit.is_as_asked and not is_shared and not _tells_of_sharing(outcome):
            return
        self._unshared.pop(key.id, None)
        if load.is_open:
            mark = self._mark(visit) if visit.is_as_asked else key.id
            self._heard.rendered(mark, self._pages.clock(), is_shared=is_shared)
        elif not is_shared:
            if len(self._unshared) >= KNOWN_KEYS:
                self._unshared.clear()
            self._unshared[key.id] = None

    def _found(self, visit: Visit, load: PageLoad, read: PageRead) -> Served:
        match read.outcome:
            case LoadFailed() as error:
                return self._failed(visit, error, is_own=read.is_own)
            case Private(made):
                return self._own(visit, load, made)
            case answer if not answer.found:
                return Passed(Reason.PRIVATE, is_by_answer=True)
            case answer:
                now = self._pages.clock()
                kept = answer.value, answer.fetched_at, now, answer.verdict
                if answer.error is not None and not may_serve(*kept):
                    return self._failed(visit, answer.error, is_own=read.is_own)
                return self._finder.hit(load.key, answer, had_old=read.had_old)

    def _own(self, visit: Visit, load: PageLoad, made: Rendered) -> Served:
        """The very answer, to who began its render, if his own request would have got the same."""
        reason = made.reason or Reason.PRIVATE
        if not made.is_whole or not self._is_his_own(visit, load, made):
            return Passed(Reason.PRIVATE, is_by_answer=True)
        return Unavailable(opened(made.page), f"fwd=miss; detail={reason}", reason)

    def _is_his_own(self, visit: Visit, load: PageLoad, made: Rendered) -> bool:
        """One that is for all, and only had no place (I23), is anybody's."""
        if made.reason is Reason.FULL:
            return True
        is_same = is_answer_to(visit.headers, given_to(visit), made.page.head.headers)
        return load.is_open and not visit.is_personal and is_same

    def _failed(self, visit: Visit, error: LoadFailed, *, is_own: bool) -> Served:
        """I8: the error itself; within a cooldown, when to come again.

        Without a route's duration, and as asked, a request may fail because of the client that sent
        it. So only that client is told, and the others send their own requests.
        """
        cause = error.__cause__
        is_ours = isinstance(cause, TimeoutError) or (
            isinstance(cause, PageFailed) and is_of_gateway(cause.page.headers.raw)
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
        return Unavailable(too_busy(pause), "fwd=miss; detail=cooling")

    def judge(self, visit: Visit, status: int, headers: Raw) -> Judgement:
        """May what the app said to one visitor, of his own request, be shared?"""
        now, own = self._pages.clock(), self._terms(visit)
        if visit.is_as_asked:
            return judged_for(
                visit.headers, self._credentials, status, headers, fetched_at=now, own=own
            )
        if visit.is_authorized and not allows_authorized(headers):
            return Unshared(Reason.AUTHORIZATION)
        return judged(status, headers, now, own)

    def hear(self, visit: Visit, judgement: Judgement) -> None:
        """What the app said of itself to one visitor, with whose request it was asked."""
        is_told = visit.is_as_asked or visit.route.revalidate is None
        if is_told and isinstance(judgement, Shared):
            mark, now = self._mark(visit), self._pages.clock()
            is_personal = visit.is_personal and not visit.is_as_asked
            self._heard.stated(mark, now, is_personal=is_personal)

    def _mark(self, visit: Visit) -> str:
        """What is noted of a page; as asked, apart for those who say who they are."""
        is_apart = visit.is_as_asked and visit.is_personal
        return f"{visit.id}\npersonal" if is_apart else visit.id

    def _terms(self, visit: Visit) -> Terms | None:
        """By the route's own duration."""
        revalidate = visit.route.revalidate
        return None if revalidate is None else self._pages.terms(revalidate)


def _tells_of_sharing(outcome: Answer[Stored] | Private[Rendered]) -> bool:
    """Not the answer to another visitor's request, nor one that is only too big to be kept."""
    return isinstance(outcome, Private) and outcome.value.reason is not Reason.SIZE


def gateway_timeout(text: str) -> Page:
    return Page(text, 504, {"content-type": "text/plain", "cache-control": "no-store"})
