"""What a visit is served, and whether a stored page is good enough for it (I8, I14)."""

from collections.abc import Sequence
from dataclasses import dataclass

from stillfresh.engine import Answer, Origin
from stillfresh.freshness import Verdict
from stillfresh.isr.collecting import GoingAnswer
from stillfresh.isr.model import Page, PageKey, Stored
from stillfresh.isr.pages import PageCache
from stillfresh.isr.rules_forward import selected
from stillfresh.isr.rules_freshness import is_good_enough
from stillfresh.isr.rules_pages import age_at, hit_text, is_changed, is_of, ttl_at
from stillfresh.isr.rules_reasons import Reason
from stillfresh.isr.rules_routes import Visit
from stillfresh.isr.rules_storage import allows_authorized, forbids_stale


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
    """Nothing to serve but this page."""

    page: Page
    what: str
    reason: Reason | None = None
    """Why it passed uncached; None: it did not."""


@dataclass(frozen=True, slots=True)
class Going:
    """I24: the app's answer to this very request, which goes on."""

    answer: GoingAnswer
    reason: Reason


@dataclass(frozen=True, slots=True)
class Passed:
    """The app has to answer this request itself."""

    reason: Reason
    is_by_answer: bool = False
    """The last answer was not to be shared; this one says why, if it is not either."""


Served = Found | Unavailable | Going | Passed


class Finder:
    """From what the cache answers to what a visit is served."""

    def __init__(self, pages: PageCache) -> None:
        self._pages = pages

    def hit(self, key: PageKey, answer: Answer[Stored], *, had_old: bool = False) -> Found:
        stored, now = answer.value, self._pages.clock()
        ttl = ttl_at(stored, answer.fetched_at, now, answer.verdict)
        what = hit_text(ttl)
        if answer.error is not None:
            what += "; detail=refresh-failed"
        elif answer.origin in {Origin.LOADED, Origin.ANOTHER}:
            why = "stale" if had_old else "miss"
            what = f"fwd={why}; {'stored' if answer.origin is Origin.LOADED else 'collapsed'}"
            what += f"; ttl={int(ttl)}"
        age = age_at(stored, answer.fetched_at, now)
        is_over = now - answer.fetched_at >= stored.head.fresh_for
        is_outdated = answer.verdict is not Verdict.FRESH and not is_over
        return Found(key, stored, age, what, is_outdated)

    async def taken_stale(self, visit: Visit, key: PageKey) -> Found | None:
        """RFC 9111 §5.2.1.2: older than we would serve, but not than the client takes."""
        answer = await self._pages.core.look(key)
        if answer is None or not answer.found or answer.verdict is not Verdict.EXPIRED:
            return None
        return self.hit(key, answer) if self.is_takeable(visit, answer) else None

    def is_takeable(self, visit: Visit, answer: Answer[Stored]) -> bool:
        """EXPIRED, and all the same what this visitor takes."""
        made = answer.value, answer.fetched_at, self._pages.clock(), answer.verdict
        if is_changed(*made) or forbids_stale(answer.value.head.headers):
            return False
        return visit.wish.max_stale > 0 and self.suits(visit, answer)

    def may_have(self, visit: Visit, answer: Answer[Stored]) -> bool:
        head = answer.value.head
        if visit.is_authorized and not allows_authorized(head.headers):
            return False
        if not is_of(answer.value, selected(head.vary, visit.headers, visit.carried)):
            return False
        if answer.verdict is Verdict.EXPIRED:
            return self.is_takeable(visit, answer)
        return self.suits(visit, answer)

    def is_too_old(self, visit: Visit, answer: object) -> bool:
        if not isinstance(answer, Answer) or not answer.found or answer.error is not None:
            return False
        loaded = answer.origin in {Origin.LOADED, Origin.ANOTHER}
        return not loaded and not self.suits(visit, answer)

    def suits(self, visit: Visit, answer: Answer[Stored]) -> bool:
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
