"""May this response be shared, with which clients, and may it be served now?

Pure. RFC 9111 §3 (what may be stored), §3.5 (Authorization), §4.1 (Vary). A route's duration
replaces the freshness that a response states, never its privacy.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from stillfresh.engine import Answer
from stillfresh.freshness import Policy, Verdict
from stillfresh.http import (
    ABSENT,
    BY_ROUTE,
    NEVER_STALE,
    Reason,
    Wish,
    age_at,
    carried_in,
    controls,
    guessed,
    is_good_enough,
    private,
    selected,
    stated,
    targeted,
    ttl_at,
    unfit,
    varies,
)
from stillfresh.http.fields import (
    Raw,
    end_to_end,
    values,
)
from stillfresh.pages.facetheory import is_old_copy
from stillfresh.pages.model import Head, StoredPage

POOL_FULL: Final = b"connection_limit_reached"
"""RFC 9209 §2.3.12."""


@dataclass(frozen=True, slots=True)
class Shared:
    """For everybody or, with `vary`, for all clients whose requests agree in these fields."""

    terms: Policy
    vary: tuple[str, ...] = ()
    is_targeted: bool = False
    """RFC 9213: by `CDN-Cache-Control`."""
    is_one_clients: bool = False
    """True if its key has a client's credentials: other caches must not keep it."""
    stale_by: float = 0.0
    """Seconds past its lifetime when it came; 0 if it came fresh."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """How a response's header fields may be read beyond the default."""

    heuristic: bool = False
    """RFC 9111 §4.2.2: without stated freshness, it is estimated from `Last-Modified`."""
    cdn_override: bool = True
    """RFC 9213: `CDN-Cache-Control` replaces `Cache-Control` and `Expires`."""


BY_DEFAULT: Final = Allowed()
RouteTimes: TypeAlias = tuple[Policy, Policy]
"""A route's own times: for its pages, and for those that do not exist."""
Judgement: TypeAlias = Shared | Reason
"""Shared, or the reason why it is only for the client that asked."""


def judged(
    status: int,
    headers: Raw,
    fetched_at: float,
    own: RouteTimes | None,
    allowed: Allowed = BY_DEFAULT,
) -> Judgement:
    """Whether it may be shared, and for how long; `own`: the route's times, if it has any."""
    is_targeted = allowed.cdn_override and bool(targeted(headers))
    reason = private(status, headers, is_targeted=is_targeted) or unfit(status, headers)
    if reason is None and is_old_copy(headers):
        reason = Reason.SITE_COPY
    if reason is not None:
        return reason
    vary = varies(headers)
    if "*" in vary:
        return Reason.VARY
    if own is not None:
        if status not in BY_ROUTE:
            return Reason.STATUS
        return Shared(own[1] if status in ABSENT else own[0], vary, is_targeted)
    times = stated(headers, fetched_at, is_targeted=is_targeted)
    if times is None and allowed.heuristic and not is_targeted:
        times = guessed(status, headers, fetched_at)
    if times is None:
        return Reason.NO_FRESHNESS
    terms = times.terms
    has_validator = any(name in {b"etag", b"last-modified"} for name, _ in headers)
    if not (terms.fresh_for or terms.stale_for or terms.error_for or has_validator):
        return Reason.NO_FRESHNESS
    return Shared(terms, vary, is_targeted, stale_by=times.stale_by)


def is_of_gateway(headers: Raw) -> bool:
    """RFC 9209 §2.1.1: an error that the gateway made, so nothing in it is personal."""
    statuses = values(headers, b"proxy-status")
    is_ours = any(line.startswith(b"stillfresh; error=") for line in statuses)
    return is_ours and not values(headers, b"set-cookie")


def is_pool_full(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """An error of the gateway: all connections to the site were in use."""
    return b"stillfresh; error=" + POOL_FULL in values(headers, b"proxy-status")


def says(head: Head, *names: str) -> bool:
    """True if one of these directives applies to this response.

    FaceTheory writes `public` on every object, so what it says decides nothing here.
    """
    if head.is_foreign:
        return False
    return not controls(head.headers, is_targeted=head.is_targeted).keys().isdisjoint(names)


def allows_authorized(head: Head) -> bool:
    """§3.5: True if it may be shared even with clients that identify themselves."""
    return says(head, "public", "s-maxage", "must-revalidate")


def forbids_stale(head: Head) -> bool:
    """§5.2.2.2, §5.2.2.8: never served stale, even if the request would accept it."""
    return says(head, "s-maxage", *NEVER_STALE)


def is_for(answer: Head, carried: frozenset[bytes]) -> Reason | None:
    """Why the response to a request with these fields may not be shared; None if it may.

    RFC 9111 §3.5 for `Authorization`. `must-revalidate` says nothing about cookies, and personal
    pages often carry it: with a cookie, only `public` and `s-maxage` count.
    """
    if b"cookie" in carried and not says(answer, "public", "s-maxage"):
        return Reason.COOKIE
    if carried - {b"cookie"} and not allows_authorized(answer):
        return Reason.AUTHORIZATION
    return None


def is_for_each_sender(head: Head, carried: frozenset[bytes], fresh_for: float) -> bool:
    """True if the site decides for each sender: one never gets the response to another.

    `must-revalidate` and `s-maxage` allow a shared response only while it is fresh (§3.5, §4), and
    this one never is. Visitors that ask at once would share it all the same.
    """
    return bool(carried) and fresh_for <= 0 and not says(head, "public")


def judged_for(
    request: Raw,
    credentials: frozenset[bytes],
    status: int,
    answer: Raw,
    *,
    fetched_at: float,
    own: RouteTimes | None,
    allowed: Allowed,
    keyed: frozenset[bytes] = frozenset(),
) -> Judgement:
    """Whether the response to this visitor's own request may be shared.

    `keyed`: credentials in the page's key. They allow sharing it with the same sender, and it need
    not vary by them once more.
    """
    judgement = judged(status, answer, fetched_at, own, allowed)
    if isinstance(judgement, Reason):
        return judgement
    all_carried = carried_in(request, credentials)
    carried = all_carried - keyed
    if keyed:
        vary = tuple(name for name in judgement.vary if name.encode("latin-1") not in keyed)
        is_one_clients = not keyed.isdisjoint(all_carried)
        judgement = replace(judgement, vary=vary, is_one_clients=is_one_clients)
    head = Head(headers=answer, is_targeted=judgement.is_targeted)
    if (reason := is_for(head, carried)) is not None:
        return reason
    if is_for_each_sender(head, carried, judgement.terms.fresh_for):
        return Reason.AUTHORIZATION
    judgement = _by_origin(judgement, request, answer)
    chosen = selected(judgement.vary, request, carried)
    if chosen is None or chosen != selected(judgement.vary, end_to_end(request), carried):
        return Reason.VARY  # in the second case `Connection` hid a field from the site
    names = {*credentials, *(name.encode("latin-1", "replace") for name in judgement.vary)}
    return Reason.HEADERS if _look_like(request, names) else judgement


def _look_like(request: Raw, names: Collection[bytes]) -> bool:
    """True if a field, written with `_`, could be read as one of these names."""
    return any(b"_" in name and name.replace(b"_", b"-") in names for name, _ in request)


def _by_origin(judgement: Shared, request: Raw, answer: Raw) -> Shared:
    """A response that allows one origin depends on it, even if its `Vary` does not say so."""
    allowed = values(answer, b"access-control-allow-origin")
    is_open = not allowed or allowed == [b"*"] or not values(request, b"origin")
    if is_open or "origin" in judgement.vary:
        return judgement
    return replace(judgement, vary=tuple(sorted({*judgement.vary, "origin"})))


def is_of(stored: StoredPage, request: Raw, carried: frozenset[bytes] = frozenset()) -> bool:
    """True if a stored page is the right variant for these request fields."""
    return dict(stored.head.variant) == selected(stored.head.vary, request, carried)


def is_changed(answer: Answer[StoredPage], now: float) -> bool:
    """EXPIRED before its time, because it was changed through its own URL."""
    head = answer.value.head
    is_early = now - answer.fetched_at < head.fresh_for + head.stale_for
    return answer.verdict is Verdict.EXPIRED and is_early


def is_never_fresh(head: Head) -> bool:
    """True if the site must be asked for each visit; it is stored for validation and for errors."""
    return not head.is_own and head.fresh_for <= 0 and head.stale_for <= 0


def may_serve(answer: Answer[StoredPage], now: float) -> bool:
    """True if it may be served after a failed refresh, not only validated."""
    head = answer.value.head
    is_over = now - answer.fetched_at >= head.fresh_for + max(head.stale_for, head.error_for)
    return not is_over and not is_changed(answer, now)


def suits(answer: Answer[StoredPage], wish: Wish, now: float) -> bool:
    """With a route's duration, the site decides, not the client's `Cache-Control`."""
    return answer.value.head.is_own or is_good_enough(
        wish,
        age=age_at(answer, now),
        ttl=ttl_at(answer, now),
        may_be_stale=answer.verdict is Verdict.STALE,
    )


def is_good_for(answer: Answer[StoredPage], wish: Wish, now: float) -> bool:
    """Also an EXPIRED copy, too old for us to serve, if the client accepts it (§5.2.1.2)."""
    if answer.verdict is Verdict.EXPIRED:
        is_refused = is_changed(answer, now) or forbids_stale(answer.value.head)
        if is_refused or not wish.max_stale:
            return False
    return suits(answer, wish, now)
