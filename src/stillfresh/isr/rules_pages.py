"""From what a render said to what is stored of it, and what may be served of that (I8, I14).

Pure.
"""

from collections.abc import Mapping

from stillfresh.freshness import Verdict
from stillfresh.isr.model import Head, Headers, Page, Rendered, Stored
from stillfresh.isr.rules_fields import Raw, values
from stillfresh.isr.rules_freshness import Terms, initial_age
from stillfresh.isr.rules_headers import end_to_end
from stillfresh.isr.rules_reasons import Reason
from stillfresh.isr.rules_storage import Judgement, Unshared, judged
from stillfresh.isr.rules_validation import etag_of


def rendered(
    page: Page, fetched_at: float, own: Terms | None, given: Mapping[str, str], keep_for: float
) -> Rendered:
    """`given`: the request headers that the render saw; `own`: the route's own duration."""
    judgement = judged(page.status, page.headers.raw, fetched_at, own)
    return made_of(page, judgement, fetched_at, given, is_own=own is not None, keep_for=keep_for)


def unshared(page: Page, reason: Reason, *, is_whole: bool = True) -> Rendered:
    stored = Stored(Head(page.status, _kept(page.headers.raw)), page.body)
    return Rendered(stored, is_shared=False, is_whole=is_whole, reason=reason)


def made_of(
    page: Page,
    judgement: Judgement,
    fetched_at: float,
    given: Mapping[str, str],
    *,
    is_own: bool,
    keep_for: float,
) -> Rendered:
    """`given`: the request headers that it may vary by; `is_own`: by a route's own duration."""
    if isinstance(judgement, Unshared):
        return unshared(page, judgement.reason)
    raw, terms, vary = page.headers.raw, judgement.terms, judgement.vary
    variant = tuple((name, given[name]) for name in vary if given.get(name))
    head = Head(
        status=page.status,
        headers=_kept(raw),
        etag=None if values(raw, b"etag") else etag_of(page.body),
        initial_age=0.0 if is_own else initial_age(raw, fetched_at),
        fresh_for=terms.fresh_for,
        stale_for=terms.stale_for,
        error_for=terms.error_for,
        is_own=is_own,
        vary=vary,
        variant=variant,
    )
    return Rendered(Stored(head, page.body), keep_for=0.0 if page.status >= 400 else keep_for)


def _kept(raw: Raw) -> Raw:
    """The length is counted anew, and the age told anew, whenever it is served."""
    return tuple(it for it in end_to_end(raw) if it[0] not in {b"content-length", b"age"})


def is_of(stored: Stored, variant: Mapping[str, str] | None) -> bool:
    """Whether a stored page is the one for these request headers."""
    return variant is not None and dict(stored.head.variant) == variant


def age_at(stored: Stored, fetched_at: float, now: float) -> float:
    """RFC 9111 §4.2.3: since it was asked for, and what it was old then."""
    return max(0.0, now - fetched_at) + stored.head.initial_age


def ttl_at(stored: Stored, fetched_at: float, now: float, verdict: Verdict) -> float:
    """What is left of its freshness; an invalidated page has none."""
    left = stored.head.fresh_for - (now - fetched_at)
    return left if verdict is Verdict.FRESH else min(left, 0.0)


def hit_text(ttl: float) -> str:
    """RFC 9211 §2.4: served as it was stored."""
    return f"hit; ttl={int(ttl)}"


def is_changed(stored: Stored, fetched_at: float, now: float, verdict: Verdict) -> bool:
    """I12: EXPIRED before its time, since it was changed through its own URL."""
    head = stored.head
    return verdict is Verdict.EXPIRED and now - fetched_at < head.fresh_for + head.stale_for


def may_serve(stored: Stored, fetched_at: float, now: float, verdict: Verdict) -> bool:
    """I8: with refreshing having failed; what is kept only to be validated may not."""
    head = stored.head
    if is_changed(stored, fetched_at, now, verdict):
        return False
    return now - fetched_at < head.fresh_for + max(head.stale_for, head.error_for)


def bare(page: Page) -> Page:
    """I13: of an error that is one visitor's, what the others who waited are told."""
    raw = page.headers.raw
    kept = tuple((name, value) for name, value in raw if name == b"retry-after")
    told = ((b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store"))
    return Page(b"This page cannot be shown now.\n", page.status, Headers.of((*told, *kept)))


def too_busy(retry_after: float) -> Page:
    """I8: nobody could render it in time."""
    headers = {
        "content-type": "text/plain; charset=utf-8",
        "cache-control": "no-store",
        "retry-after": str(max(1, int(retry_after + 0.999))),
    }
    return Page(b"This page is being prepared; please try again in a moment.\n", 503, headers)


def opened(stored: Stored) -> Page:
    return Page(bytes(stored.body), stored.head.status, Headers.of(stored.head.headers))
