"""May this response be shared, with which clients, and may it be served now?

Pure. RFC 9111 §3 (what may be stored), §3.5 (Authorization), §4.1 (Vary). A route's duration
replaces the freshness that a response states, never its privacy.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Final, TypeAlias

from stillfresh.engine import Answer
from stillfresh.errors import ConfigError, shown
from stillfresh.freshness import Policy, Verdict
from stillfresh.http.fields import (
    BAD,
    NAME,
    Raw,
    directives,
    end_to_end,
    members,
    normalised,
    tag_names,
    values,
)
from stillfresh.http.freshness import Wish, controls, guessed, is_good_enough, stated, targeted
from stillfresh.pages.facetheory import is_old_copy
from stillfresh.pages.model import Head, Reason, StoredPage

BY_ROUTE: Final = frozenset({200, 203, 204, 300, 301, 302, 303, 307, 308, 404, 405, 410, 414})
"""Statuses to which a route's duration applies: not refusals of a client, nor bad requests."""
ABSENT: Final = frozenset({404, 410})
UNDERSTOOD: Final = frozenset(int(status) for status in HTTPStatus if status >= 200)
"""RFC 9111 §5.2.2.3: statuses whose meaning for caches is known here."""
TOO_MANY: Final = 429
NEVER: Final = frozenset({428, TOO_MANY, 431})
"""RFC 6585: these depend on the client, and are not stored."""
MOST_HEADERS: Final = 32_768
"""Bytes; a response with more is passed on uncached."""
DIRECTIVE: Final = re.compile(rb"""[^\s"=,;/]+(?:\s*=\s*(?:[^\s"=,;/]+|"(?:\\.|[^"\\])*"))?""")
REFUSAL: Final = re.compile(rb"(?<![\w-])(?:private|no-store)(?![\w-])", re.IGNORECASE)
POOL_FULL: Final = b"connection_limit_reached"
"""RFC 9209 §2.3.12."""
CREDENTIALS: Final = ("X-Api-Key", "Api-Key", "X-Auth-Token", "X-Access-Token")
"""Request fields, besides `Authorization` and `Cookie`, by which services identify clients."""
ALWAYS: Final = frozenset({b"authorization", b"cookie"})
"""A page that varies by these is shared only among clients that send none of them."""


@dataclass(frozen=True, slots=True)
class Shared:
    """For everybody or, with `vary`, for all clients whose requests agree in these fields."""

    terms: Policy
    vary: tuple[str, ...] = ()
    is_targeted: bool = False
    """RFC 9213: by `CDN-Cache-Control`."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """How a response's header fields may be read beyond the default."""

    heuristic: bool = False
    """RFC 9111 §4.2.2: without stated freshness, it is estimated from `Last-Modified`."""
    cdn_override: bool = False
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
    reason = private(status, headers, is_targeted=is_targeted) or _unfit(status, headers)
    if reason is None and is_old_copy(headers):
        reason = Reason.SITE_COPY
    if reason is not None:
        return reason
    vary = _varies(headers)
    if "*" in vary:
        return Reason.VARY
    if own is not None:
        if status not in BY_ROUTE:
            return Reason.STATUS
        return Shared(own[1] if status in ABSENT else own[0], vary, is_targeted)
    terms = stated(headers, fetched_at, is_targeted=is_targeted)
    if terms is None and allowed.heuristic and not is_targeted:
        terms = guessed(status, headers, fetched_at)
    if terms is None:
        return Reason.NO_FRESHNESS
    has_validator = any(name in {b"etag", b"last-modified"} for name, _ in headers)
    if not (terms.fresh_for or terms.stale_for or terms.error_for or has_validator):
        return Reason.NO_FRESHNESS
    return Shared(terms, vary, is_targeted)


def private(status: int, headers: Raw, *, is_targeted: bool = False) -> Reason | None:
    """Private, whatever else it says; §5.2.2.3: `must-understand` beats `no-store`."""
    if values(headers, b"set-cookie"):
        return Reason.SET_COOKIE
    common = [] if is_targeted else values(headers, b"cache-control")
    for lines in (common, values(headers, b"cdn-cache-control")):
        known = directives(lines).keys()
        if "must-understand" in known and status not in UNDERSTOOD:
            return Reason.STATUS
        if "private" in known or ("no-store" in known and "must-understand" not in known):
            return Reason.PRIVATE
        for line in filter(REFUSAL.search, lines):
            if not all(map(DIRECTIVE.fullmatch, members([line]))):
                return Reason.PRIVATE
    return None


def _unfit(status: int, headers: Raw) -> Reason | None:
    """Why it cannot be stored: interim, partial, malformed, too many tags, or endless."""
    if not 200 <= status <= 599 or status in {206, 304} or status in NEVER:
        return Reason.STATUS
    if sum(len(name) + len(value) for name, value in headers) > MOST_HEADERS:
        return Reason.HEADERS
    if not all(NAME.fullmatch(name) and not BAD.search(value) for name, value in headers):
        return Reason.HEADERS
    if len(set(values(headers, b"content-length"))) > 1:
        return Reason.HEADERS
    if tag_names(headers) is None:
        return Reason.TAGS
    return Reason.STREAM if is_event_stream(headers) else None


def is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Server-sent events: a response that stays open, and may be silent for long."""
    types = values(headers, b"content-type")
    return bool(types) and types[0].lower().startswith(b"text/event-stream")


def _varies(headers: Raw) -> tuple[str, ...]:
    """The fields in lower case, sorted; an encoded body always varies by `Accept-Encoding`.

    The host is in every key.
    """
    named = {name.decode("latin-1").lower() for name in members(values(headers, b"vary"))}
    codings = {coding.lower() for coding in members(values(headers, b"content-encoding"))}
    if codings - {b"identity"}:
        named.add("accept-encoding")
    return tuple(sorted(named - {"host"}))


def is_answer_to(request: Raw, given: Mapping[str, str], answer: Raw) -> bool:
    """True if the answer to a request with the fields `given` also answers this request."""
    varies = _varies(answer)
    is_same = all(normalised(name, request) == given.get(name, "") for name in varies)
    return "*" not in varies and is_same


def is_failure(status: int) -> bool:
    """A failure says nothing about the page; the old one is kept."""
    return status >= 500 or status == TOO_MANY


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
    return says(head, "must-revalidate", "proxy-revalidate", "no-cache", "s-maxage")


def checked_credentials(names: Iterable[str]) -> frozenset[bytes]:
    """Return the names of header fields in lower case. Raises ConfigError for a bad one."""
    if isinstance(names, str):
        raise ConfigError(f"credentials: must be a list such as ['X-Api-Key'], not {shown(names)}")
    checked = frozenset(name.lower().encode("latin-1", "replace") for name in names)
    bad = next((name for name in checked if not NAME.fullmatch(name)), None)
    if bad is not None:
        raise ConfigError(
            f"credentials: {shown(bad.decode())} is not the name of a header field; "
            "write one such as X-Api-Key"
        )
    return checked


def carried_in(headers: Raw, credentials: frozenset[bytes]) -> frozenset[bytes]:
    """The fields of this request that identify its sender."""
    return frozenset(name for name, _ in headers if name in ALWAYS or name in credentials)


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


def judged_for(
    request: Raw,
    credentials: frozenset[bytes],
    status: int,
    answer: Raw,
    *,
    fetched_at: float,
    own: RouteTimes | None,
    allowed: Allowed,
) -> Judgement:
    """Whether the response to this visitor's own request may be shared."""
    judgement = judged(status, answer, fetched_at, own, allowed)
    if isinstance(judgement, Reason):
        return judgement
    carried = carried_in(request, credentials)
    head = Head(headers=answer, is_targeted=judgement.is_targeted)
    if (reason := is_for(head, carried)) is not None:
        return reason
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


def selected(
    vary: Iterable[str], request: Raw, carried: frozenset[bytes] = frozenset()
) -> Mapping[str, str] | None:
    """RFC 9111 §4.1: the request's values of these fields; None: the page is for this visitor only.

    Credentials never become part of a key.
    """
    result: dict[str, str] = {}
    for name in vary:
        value = normalised(name, request)
        field = name.encode("latin-1", "replace")
        if value is None or field in carried or (value and field in ALWAYS):
            return None
        if value:
            result[name] = value
    return result


def is_of(stored: StoredPage, request: Raw, carried: frozenset[bytes] = frozenset()) -> bool:
    """True if a stored page is the right variant for these request fields."""
    return dict(stored.head.variant) == selected(stored.head.vary, request, carried)


def age_at(answer: Answer[StoredPage], now: float) -> float:
    """RFC 9111 §4.2.3: the time since it was requested, and its age then."""
    return max(0.0, now - answer.fetched_at) + answer.value.head.initial_age


def ttl_at(answer: Answer[StoredPage], now: float) -> float:
    """Its remaining freshness; an invalidated page has none."""
    left = answer.value.head.fresh_for - (now - answer.fetched_at)
    return left if answer.verdict is Verdict.FRESH else min(left, 0.0)


def why_asked(stored: Answer[StoredPage] | None, now: float) -> str:
    """RFC 9211 §2.2: why the stored copy did not do."""
    if stored is None:
        return "miss"
    return "request" if ttl_at(stored, now) > 0 else "stale"


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
