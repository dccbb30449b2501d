"""The decisions of the client cache: what is looked for, stored and served.

Pure. RFC 9111 §3 (storing), §4 (serving), §4.4 (invalidating), §5.2.1 (what requests ask for). The
rules that pages use too are in `stillfresh.http`.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import urljoin, urlsplit

from stillfresh.engine import HITS, Answer, Loaded, Origin
from stillfresh.errors import ConfigError
from stillfresh.freshness import Policy, Verdict
from stillfresh.http import (
    BY_GUESS,
    BY_ROUTE,
    CREDENTIALS,
    NEVER_STALE,
    OF_CONTENT,
    UNDERSTOOD,
    RangeAsked,
    Reason,
    ResponseTimes,
    Wish,
    age_at,
    cache_status,
    checked_credentials,
    controls,
    guessed,
    if_range_holds,
    initial_age,
    is_good_enough,
    is_unclear_refusal,
    not_modified,
    not_modified_headers,
    part_asked,
    private,
    stated,
    ttl_at,
    unfit,
    varies,
    wish_of,
    without_lifetime,
)
from stillfresh.http.fields import (
    Raw,
    directives,
    end_to_end,
    strings,
    tag_names,
    utf8_text,
    values,
    with_field,
)
from stillfresh.integrations.http_cache.keys import (
    MOST_KEY,
    SECRETS,
    clean_url,
    credentials_in,
    response_key,
    sender_of,
    variant_of,
)
from stillfresh.integrations.http_cache.model import (
    NO_CONTROLS,
    Controls,
    Forward,
    HttpRequest,
    Lookup,
    ResponseHead,
    StoredResponse,
    controls_from,
)
from stillfresh.stores.contract import Mark

CONTROL_FIELD: Final = b"x-stillfresh"
"""A request field with controls, for clients that have no other place. The site never sees it."""
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY"})
CONDITIONS: Final = frozenset({b"if-none-match", b"if-modified-since"})
OTHER_CONDITIONS: Final = frozenset({b"if-match", b"if-unmodified-since"})
NOT_STORED: Final = frozenset({b"age", b"content-length", b"set-cookie"})
"""Fields of one response: a stored cookie would put an old session back."""
CERTIFICATE: Final = b"client certificate"
"""Among the names of credentials; no field has a space in its name."""


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """How a cache reads requests and responses."""

    is_shared: bool = False
    is_heuristic: bool = False
    is_by_body: bool = False
    fresh_for: float | None = None
    stale_for: float = 0.0
    error_for: float = 0.0
    keep_for: float = 0.0
    max_body: int = 0
    credentials: frozenset[bytes] = checked_credentials(CREDENTIALS)
    secrets: frozenset[str] = SECRETS


def controls_in(headers: Raw) -> Controls:
    """The controls in the request's own field, such as `X-Stillfresh: fresh-for=600, no-cache`."""
    lines = values(headers, CONTROL_FIELD)
    if not lines:
        return NO_CONTROLS
    given: dict[str, object] = {}
    for directive, text in directives(lines).items():
        name = directive.replace("-", "_")
        if name == "tags":
            given[name] = text.split()
        elif name in {"fresh_for", "stale_for", "error_for"}:
            given[name] = float(text) if text.isascii() and text.isdigit() else text
        else:
            given[name] = True
    return controls_from(given)


def plan_request(
    request: HttpRequest, request_controls: Controls, settings: HttpSettings
) -> Lookup | Forward:
    """What to look for; or why the request goes to the site as without a cache."""
    headers = request.headers
    names = {name for name, _ in headers}
    is_by_body = (request_controls.by_body or settings.is_by_body) and request.method in {
        "POST",
        "QUERY",
    }
    if request.method not in {"GET", "HEAD"} and not is_by_body:
        return Forward(Reason.METHOD, "method")
    if is_by_body and request.body is None:
        return Forward(Reason.BODY)
    if not is_by_body and _has_body(headers):
        return Forward(Reason.BODY)
    wish = request_wish(headers, request_controls)
    if wish.no_store:
        return Forward(Reason.NO_STORE, "request")
    if not names.isdisjoint(OTHER_CONDITIONS):
        return Forward(Reason.CONDITION)
    try:
        url = clean_url(request.url, settings.secrets)
    except ConfigError:  # the client says what is wrong with it
        return Forward(Reason.PATH)
    carried = credentials_in(headers, settings.credentials)
    if request.certificate:
        carried |= {CERTIFICATE}
    sender = "" if settings.is_shared else sender_of(request, carried)
    key = response_key(request, url, sender, tags=request_controls.tags, is_by_body=is_by_body)
    if len(key.id) > MOST_KEY:
        return Forward(Reason.PATH)
    reason = None
    if request.method == "HEAD":
        reason = Reason.METHOD
    elif not names.isdisjoint(CONDITIONS):
        reason = Reason.CONDITION
    elif b"range" in names:
        reason = Reason.RANGE
    return Lookup(
        request,
        key,
        url,
        wish,
        request_controls,
        carried,
        reason,
    )


def _has_body(headers: Raw) -> bool:
    is_sized = any(line != b"0" for line in values(headers, b"content-length"))
    return is_sized or bool(values(headers, b"transfer-encoding"))


def request_wish(headers: Raw, request_controls: Controls) -> Wish:
    """What a request asks for, by its own fields and by its controls."""
    wish = wish_of(headers)
    if request_controls is NO_CONTROLS:
        return wish
    return Wish(
        wish.max_age,
        wish.min_fresh,
        wish.max_stale,
        no_cache=wish.no_cache or request_controls.no_cache,
        no_store=wish.no_store or request_controls.no_store,
        only_if_cached=wish.only_if_cached or request_controls.only_if_cached,
    )


@dataclass(frozen=True, slots=True)
class Storable:
    """It may be stored, with these times, for requests that agree in the fields of `vary`."""

    terms: Policy
    vary: tuple[str, ...]
    variant: str
    stated_for: float
    """How long it is fresh by its own fields."""
    has_sender: bool
    """The request had credentials."""
    stale_by: float
    """Seconds past its lifetime when it came; 0 if it came fresh."""


def judge_response(
    lookup: Lookup, status: int, headers: Raw, fetched_at: float, settings: HttpSettings
) -> Storable | Reason:
    """§3: may the response to this request be stored, and for how long is it served?"""
    is_shared = settings.is_shared
    known = controls(headers, is_shared=is_shared)
    if "must-understand" in known and status not in UNDERSTOOD:
        return Reason.STATUS
    if "no-store" in known and "must-understand" not in known:
        return Reason.NO_STORE
    if is_unclear_refusal(values(headers, b"cache-control")):
        return Reason.NO_STORE
    reason = unfit(status, headers)
    if reason is None and is_shared:
        reason = private(status, headers) or _why_personal(headers, lookup.carried)
    if reason is not None:
        return reason
    vary = varies(headers)
    if "*" in vary:
        return Reason.VARY
    if is_shared and any(name.encode("latin-1", "replace") in lookup.carried for name in vary):
        return Reason.VARY
    variant = variant_of(vary, lookup.request.headers)
    if variant is None:
        return Reason.VARY
    times = _times(lookup.controls, status, headers, fetched_at, settings)
    if times is None:
        return Reason.NO_FRESHNESS
    own_times = stated(headers, fetched_at, is_shared=is_shared)
    stated_for = 0.0 if own_times is None else own_times.terms.fresh_for
    has_sender = bool(lookup.carried)
    return Storable(times.terms, vary, variant, stated_for, has_sender, times.stale_by)


def _why_personal(headers: Raw, carried: frozenset[bytes]) -> Reason | None:
    """§3.5; with a cookie only `public` and `s-maxage` count, as for pages."""
    known = controls(headers).keys()
    if b"cookie" in carried and known.isdisjoint({"public", "s-maxage"}):
        return Reason.COOKIE
    is_open = not known.isdisjoint({"public", "s-maxage", "must-revalidate"})
    return Reason.AUTHORIZATION if carried - {b"cookie"} and not is_open else None


def is_for_sender(response: StoredResponse, lookup: Lookup, settings: HttpSettings) -> bool:
    """True if a stored response may be given to a request with these credentials."""
    is_open = not settings.is_shared or not lookup.carried
    return is_open or _why_personal(response.head.headers, lookup.carried) is None


def is_open_now(
    answer: Answer[StoredResponse], lookup: Lookup, settings: HttpSettings, now: float
) -> bool:
    """§3.5, §4: may it be given to this request without asking the site with its credentials?

    `must-revalidate` and `s-maxage` let a shared cache store what was asked for with credentials,
    for as long as it is fresh by its own fields: after that the site decides for each sender.
    The times of the cache, `force_cache` and a load of another sender do not change that.
    """
    head = answer.value.head
    if not settings.is_shared or not (lookup.carried or head.has_sender):
        return True
    if "public" in controls(head.headers):
        return True
    is_fresh = answer.verdict is Verdict.FRESH
    return is_fresh and now - answer.fetched_at < head.stated_for


def _times(
    request_controls: Controls, status: int, headers: Raw, fetched_at: float, settings: HttpSettings
) -> ResponseTimes | None:
    """Its times: those of the request or the cache, else its own; None if it has none."""
    is_shared = settings.is_shared
    known = controls(headers, is_shared=is_shared)
    fresh_for = (
        settings.fresh_for if request_controls.fresh_for is None else request_controls.fresh_for
    )
    stale_for, error_for = _own_stale_times(known, request_controls, settings)
    if fresh_for is not None and status in BY_ROUTE:
        return ResponseTimes(Policy(fresh_for, stale_for, error_for))
    times = stated(
        headers, fetched_at, is_shared=is_shared, stale_for=stale_for, error_for=error_for
    )
    if times is None and settings.is_heuristic:
        times = guessed(
            status,
            headers,
            fetched_at,
            is_shared=is_shared,
            stale_for=stale_for,
            error_for=error_for,
        )
    has_validator = any(name in {b"etag", b"last-modified"} for name, _ in headers)
    if times is None:
        if not has_validator or (status not in BY_GUESS and "public" not in known):
            return None
        # Nobody knows when it stopped being fresh. The cache's own times count from its request;
        # for `max-stale` it has no lifetime, and is stale by all of its age.
        return ResponseTimes(Policy(0, stale_for, error_for), initial_age(headers, fetched_at))
    terms = times.terms
    is_served = terms.fresh_for or terms.stale_for or terms.error_for
    return times if is_served or has_validator else None


def _own_stale_times(
    known: dict[str, str], request_controls: Controls, settings: HttpSettings
) -> tuple[float, float]:
    """The cache's own `stale_for` and `error_for`, if the response does not forbid them."""
    if not NEVER_STALE.isdisjoint(known):
        return 0.0, 0.0
    stale_for = (
        settings.stale_for if request_controls.stale_for is None else request_controls.stale_for
    )
    error_for = (
        settings.error_for if request_controls.error_for is None else request_controls.error_for
    )
    return stale_for, error_for


def new_response(
    storable: Storable, status: int, headers: Raw, body: bytes, fetched_at: float
) -> StoredResponse:
    raw = tuple(field for field in end_to_end(headers) if field[0] not in NOT_STORED)
    terms = storable.terms
    head = ResponseHead(
        status,
        raw,
        initial_age(headers, fetched_at),
        terms.fresh_for,
        terms.stale_for,
        terms.error_for,
        storable.vary,
        storable.variant,
        storable.stated_for,
        storable.has_sender,
        storable.stale_by,
    )
    return StoredResponse(head, body)


def unstored_response(status: int, headers: Raw, body: bytes = b"") -> StoredResponse:
    """A response that is served once."""
    raw = tuple(field for field in end_to_end(headers) if field[0] != b"content-length")
    return StoredResponse(ResponseHead(status, raw), body)


def to_store(
    lookup: Lookup, response: StoredResponse, settings: HttpSettings
) -> Loaded[StoredResponse]:
    """After its times it is not served, but kept: to be validated, or on request."""
    head = response.head
    return Loaded(
        response,
        fresh_for=head.fresh_for,
        stale_for=head.stale_for,
        error_for=max(head.error_for, settings.keep_for),
        tags=response_tags(head.headers, lookup.url),
    )


def response_tags(headers: Raw, url: str) -> list[str]:
    """The tags that a response names. A group is of one origin (RFC 9875 §2)."""
    groups = strings(values(headers, b"cache-groups"))
    origin = group_origin(url)
    return [*(tag_names(headers) or ()), *(f"group:{origin} {group}" for group in groups)]


def group_origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def declared_length(headers: Raw) -> int | None:
    lines = values(headers, b"content-length")
    is_number = bool(lines) and lines[0].isdigit() and len(lines[0]) <= 18
    return int(lines[0]) if is_number else None


def is_good(
    answer: Answer[StoredResponse], lookup: Lookup, settings: HttpSettings, now: float
) -> bool:
    """May the stored response be served, without waiting for the site?"""
    if not is_open_now(answer, lookup, settings, now):
        return False
    if lookup.controls.force_cache:
        return answer.mark is not Mark.HARD
    wish = lookup.wish
    if answer.verdict is Verdict.EXPIRED:
        head = answer.value.head
        if answer.mark is not Mark.NONE or not wish.max_stale or forbids_stale(head, settings):
            return False
    return is_good_enough(
        wish,
        age=age_at(answer, now),
        ttl=ttl_at(answer, now),
        may_be_stale=answer.verdict is Verdict.STALE,
    )


def forbids_stale(head: ResponseHead, settings: HttpSettings) -> bool:
    """§5.2.2.2, §5.2.2.8: never served stale, even if the request would accept it."""
    known = controls(head.headers, is_shared=settings.is_shared).keys()
    return not known.isdisjoint(NEVER_STALE | {"s-maxage"})


def may_serve_on_error(
    answer: Answer[StoredResponse] | None, lookup: Lookup, settings: HttpSettings, now: float
) -> bool:
    """True if it may be served although the site could not be asked, or answered with an error."""
    if answer is None or not answer.found or answer.mark is Mark.HARD or lookup.wish.no_cache:
        return False
    if not is_open_now(answer, lookup, settings, now):
        return False
    head = answer.value.head
    served_for = head.fresh_for + max(head.stale_for, head.error_for)
    return now - answer.fetched_at < served_for


def status_text(answer: Answer[StoredResponse], now: float, before: str, why: str = "") -> str:
    """RFC 9211: the parameters of `Cache-Status`. `why`: why an old response is served."""
    ttl = int(ttl_at(answer, now))
    if answer.origin in HITS or why:
        return f"hit; ttl={ttl}{f'; detail={why}' if why else ''}"
    how = "stored" if answer.origin is Origin.LOADED else "collapsed"
    return f"fwd={before}; {how}; ttl={ttl}"


def answer_fields(answer: Answer[StoredResponse], now: float, what: str) -> Raw:
    """The fields of a stored response in one answer, with its age and `Cache-Status`."""
    response = answer.value
    fields = response.plain_fields
    if fields is None:
        fields = plain_fields(response)
        response.plain_fields = fields
    before = values(response.head.headers, b"cache-status")
    age = b"%d" % age_at(answer, now)
    fields = (*fields, (b"age", age), (b"cache-status", cache_status(before, what)))
    return without_lifetime(fields) if answer.unverified else fields


def plain_fields(response: StoredResponse) -> Raw:
    """Its fields, with the length of its body."""
    head = response.head
    raw = tuple(field for field in head.headers if field[0] != b"cache-status")
    if head.status in {204, 304}:
        return raw
    return (*raw, (b"content-length", b"%d" % len(response.body)))


def part_for(
    request: HttpRequest, response: StoredResponse, fields: Raw
) -> tuple[StoredResponse, Raw]:
    """The stored response as the request's condition or range asks (RFC 9110 §13.2.2)."""
    if response.head.status != 200:
        return response, fields
    lines = dict(reversed(fields))
    modified = lines.get(b"last-modified") or lines.get(b"date")
    if not_modified(request.headers, lines.get(b"etag"), modified):
        return unstored_response(304, ()), not_modified_headers(fields)
    ranges = values(request.headers, b"range")
    is_part = len(ranges) == 1 and request.method == "GET"
    if not is_part or not if_range_holds(request.headers, fields):
        return response, fields
    whole = len(response.body)
    match part_asked(ranges[0], whole):
        case RangeAsked.UNSATISFIABLE:
            unsatisfied = (b"content-range", b"bytes */%d" % whole)
            return unstored_response(416, ()), (*not_modified_headers(fields), unsatisfied)
        case (first, end):
            others = tuple(field for field in fields if field[0] not in OF_CONTENT)
            span = (b"content-range", b"bytes %d-%d/%d" % (first, end - 1, whole))
            sized = with_field((*others, span), b"content-length", b"%d" % (end - first))
            return unstored_response(206, (), bytes(response.body[first:end])), sized
    return response, fields


def changed_urls(method: str, url: str, status: int, headers: Raw) -> list[str]:
    """§4.4: the addresses that an unsafe request has changed, all of the same origin."""
    if method in SAFE or not 200 <= status <= 399:
        return []
    urls = [url]
    for name in (b"location", b"content-location"):
        for value in values(headers, name)[:1]:
            with suppress(ValueError, ConfigError):  # it is no address
                target = urljoin(url, utf8_text(value))
                if group_origin(clean_url(target)) == group_origin(clean_url(url)):
                    urls.append(target)
    return list(dict.fromkeys(urls))


def changed_groups(method: str, url: str, status: int, headers: Raw) -> list[str]:
    """RFC 9875 §3: the groups that the answer to an unsafe request invalidates."""
    if method in SAFE or not 200 <= status <= 399:
        return []
    groups = strings(values(headers, b"cache-group-invalidation"))
    return [f"group:{group_origin(url)} {group}" for group in groups]
