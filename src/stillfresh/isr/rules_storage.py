"""May this response be shared, what is stored of it, and what may be served of that? (I8, I13, I14)

Pure. RFC 9111 §3; §4.1 for Vary. A route's own duration replaces what a response says of its
freshness, never what it says of its privacy.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from stillfresh.freshness import Verdict
from stillfresh.http.fields import BAD, NAME, Raw, directives, end_to_end, members, values
from stillfresh.http.freshness import PageTerms, controls, initial_age, stated
from stillfresh.http.validation import etag_of
from stillfresh.isr.model import Head, Headers, Page, PageFailed, Reason, Rendered, Stored

BY_ROUTE: Final = frozenset({200, 203, 204, 300, 301, 302, 303, 307, 308, 404, 405, 410, 414})
"""A route's duration applies to these; not to refusals of one client, nor to bad requests."""
ABSENT: Final = frozenset({404, 410})
TOO_MANY: Final = 429
NEVER: Final = frozenset({428, TOO_MANY, 431})
"""RFC 6585: they depend on the client, and are not stored."""
MOST_HEADERS: Final = 32_768
"""Bytes; a response with more is passed on, not kept."""
DIRECTIVE: Final = re.compile(rb"""[^\s"=,;/]+(?:\s*=\s*(?:[^\s"=,;/]+|"(?:\\.|[^"\\])*"))?""")
REFUSAL: Final = re.compile(rb"(?<![\w-])(?:private|no-store)(?![\w-])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Shared:
    """For everybody, or, with `vary`, for all whose requests agree in these headers."""

    terms: PageTerms
    vary: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unshared:
    """For the client that asked, and nobody else."""

    reason: Reason


Judgement: TypeAlias = Shared | Unshared


def judged(status: int, headers: Raw, fetched_at: float, own: PageTerms | None) -> Judgement:
    """`own`: the route's own duration, if it has one."""
    if (reason := private(headers) or _unfit(status, headers)) is not None:
        return Unshared(reason)
    vary = _varies(headers)
    if "*" in vary:
        return Unshared(Reason.VARY)
    if own is not None:
        kept = own.absent() if status in ABSENT else own
        return Shared(kept, vary) if status in BY_ROUTE else Unshared(Reason.STATUS)
    terms = stated(headers, fetched_at)
    if terms is None:
        return Unshared(Reason.NO_FRESHNESS)
    if not (terms.fresh_for or terms.stale_for or terms.error_for or _has_validator(headers)):
        return Unshared(Reason.NO_FRESHNESS)
    return Shared(terms, vary)


def private(headers: Raw) -> Reason | None:
    """I13, whoever else allows it."""
    if values(headers, b"set-cookie"):
        return Reason.SET_COOKIE
    lines = values(headers, b"cache-control") + values(headers, b"cdn-cache-control")
    for line in lines:
        for name in ("private", "no-store"):
            if name in directives([line]):
                return Reason.PRIVATE
        if REFUSAL.search(line) and not all(map(DIRECTIVE.fullmatch, members([line]))):
            return Reason.PRIVATE
    return None


def is_of_gateway(headers: Raw) -> bool:
    """RFC 9209 §2.1.1: an error that was made here, of which nothing is anybody's."""
    told = values(headers, b"proxy-status")
    is_ours = any(line.startswith(b"stillfresh; error=") for line in told)
    return is_ours and not values(headers, b"set-cookie")


def _unfit(status: int, headers: Raw) -> Reason | None:
    """Not whole, not final, not well-formed, or not of an end."""
    if status < 200 or status in {206, 304} or status in NEVER or is_failure(status):
        return Reason.STATUS
    if sum(len(name) + len(value) for name, value in headers) > MOST_HEADERS:
        return Reason.HEADERS
    if not all(NAME.fullmatch(name) and not BAD.search(value) for name, value in headers):
        return Reason.HEADERS
    if len(set(values(headers, b"content-length"))) > 1:
        return Reason.HEADERS
    types = values(headers, b"content-type")
    is_stream = bool(types) and types[0].startswith(b"text/event-stream")
    return Reason.STREAM if is_stream else None


def _varies(headers: Raw) -> tuple[str, ...]:
    """Lower case and sorted; what is encoded varies by that, whether it says so or not.

    The host is in every key.
    """
    named = {it.decode("latin-1").lower() for it in members(values(headers, b"vary"))} - {"host"}
    coded = {it.lower() for it in members(values(headers, b"content-encoding"))} - {b"identity"}
    return tuple(sorted(named | ({"accept-encoding"} if coded else set())))


def is_answer_to(request: Raw, given: Mapping[str, str], answer: Raw) -> bool:
    """Whether the answer to a request with the headers `given` is the one to this request too."""
    varies = _varies(answer)
    sent = {name.decode("latin-1") for name, _ in request}
    return "*" not in varies and all(name not in sent or name in given for name in varies)


def _has_validator(headers: Raw) -> bool:
    return any(name in {b"etag", b"last-modified"} for name, _ in headers)


def is_failure(status: int) -> bool:
    """I8: says nothing of the page; the one before it goes on."""
    return status >= 500 or status == TOO_MANY


def allows_authorized(headers: Raw) -> bool:
    """§3.5: shared even with those who identify themselves."""
    return bool(controls(headers).keys() & {"public", "s-maxage", "must-revalidate"})


def forbids_stale(headers: Raw) -> bool:
    """§5.2.2.2, §5.2.2.8: not even to a request that would take it."""
    return bool(
        controls(headers).keys() & {"must-revalidate", "proxy-revalidate", "no-cache", "s-maxage"}
    )


def unshared(page: Page, reason: Reason, *, is_whole: bool = True) -> Rendered:
    stored = Stored(Head(page.status, _kept(page.headers.raw)), page.body)
    return Rendered(stored, is_whole=is_whole, reason=reason)


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


def refused(page: Stored) -> PageFailed:
    """I13: an error, too, may be for one alone; the others hear that there was one."""
    headers, whole = page.head.headers, opened(page)
    if private(headers) is None or is_of_gateway(headers):
        return PageFailed(whole)
    return PageFailed(bare(whole), own=whole)
