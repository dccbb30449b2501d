"""I24: what of a visitor's request goes to the site, and for whom the answer to it is.

Pure. *As asked*: the site sees the visitor's own request, less what clients may not claim. The
response is shared only if nothing in that request made it the visitor's own. *Key only*: the site
sees the page's key (`rules_keys`), so that nothing of the visitor can be in the response.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final, Literal, TypeAlias

from stillfresh.errors import ConfigError, shown
from stillfresh.isr.rules_edge import ANOTHER_PAGE, believed
from stillfresh.isr.rules_fields import Raw, values
from stillfresh.isr.rules_freshness import Terms, controls
from stillfresh.isr.rules_headers import end_to_end
from stillfresh.isr.rules_keys import normalised, variant
from stillfresh.isr.rules_reasons import Reason
from stillfresh.isr.rules_storage import (
    BAD,
    NAME,
    Judgement,
    Shared,
    Unshared,
    allows_authorized,
    judged,
)

Forward: TypeAlias = Literal["request", "key"]
CREDENTIALS: Final = ("X-Api-Key", "Api-Key", "X-Auth-Token", "X-Access-Token")
"""Besides `Authorization` and `Cookie`: request fields by which services know their clients."""
ALWAYS: Final = frozenset({b"authorization", b"cookie"})
MOST_FIELDS: Final = 8_192
"""Bytes of header fields; sites refuse more, and their refusal must not become the page."""
ASKED_ANEW: Final = frozenset(
    {
        b"accept-encoding",
        b"content-length",
        b"expect",
        b"host",
        b"if-modified-since",
        b"if-none-match",
        b"if-range",
        b"range",
    }
)
"""Fields that a cache sends in its own words: it wants the whole page, which has one host."""


def checked_forward(value: object, name: str = "forward") -> Forward | None:
    match value:
        case None | "request" | "key":
            return value
        case _:
            raise ConfigError(f"{name}: must be 'request' or 'key', not {shown(value)}")


def checked_credentials(names: Iterable[str]) -> frozenset[bytes]:
    """The names of header fields, in lower case."""
    if isinstance(names, str):
        raise ConfigError(f"credentials: must be a list such as ['X-Api-Key'], not {shown(names)}")
    found = frozenset(name.lower().encode("latin-1", "replace") for name in names)
    if bad := next((name for name in found if not NAME.fullmatch(name)), None):
        raise ConfigError(
            f"credentials: {shown(bad.decode())} is not the name of a header field; "
            "write one such as X-Api-Key"
        )
    return found


def carried_in(headers: Raw, credentials: frozenset[bytes]) -> frozenset[bytes]:
    """The fields of this request that say who its sender is."""
    return frozenset(name for name, _ in headers if name in ALWAYS or name in credentials)


def unfit_to_fill(headers: Raw) -> Reason | None:
    """Why this request must not fill the cache; None: it may."""
    if any(name == b"transfer-encoding" for name, _ in headers) or any(
        it != b"0" for it in values(headers, b"content-length")
    ):
        return Reason.BODY
    size = sum(len(name) + len(value) for name, value in headers)
    if size > MOST_FIELDS or any(BAD.search(value) for _, value in headers):
        return Reason.HEADERS
    return Reason.RANGE if values(headers, b"range") else None


def as_asked(headers: Raw, host: str, *, is_vouched: bool) -> Raw:
    """The visitor's header fields as the site gets them.

    `is_vouched`: our own edge has already taken out what this client may not claim.
    """
    claimed = believed(end_to_end(headers), is_trusted=is_vouched)
    kept = without(claimed, ASKED_ANEW | ANOTHER_PAGE)
    coding: Raw = ()
    if values(headers, b"accept-encoding"):
        offered = normalised("accept-encoding", headers) or "identity"
        coding = ((b"accept-encoding", offered.encode("latin-1")),)
    return ((b"host", host.encode("ascii")), *kept, *coding)


def without(headers: Raw, names: Collection[bytes]) -> Raw:
    return tuple(it for it in headers if it[0] not in names)


def is_for(answer: Raw, carried: frozenset[bytes]) -> Reason | None:
    """Why the response to a request that carried these may not be shared; None: it may.

    RFC 9111 §3.5 for `Authorization`. `must-revalidate` says nothing about cookies, and personal
    pages often carry it: for those, only `public` and `s-maxage` count.
    """
    if b"cookie" in carried and not controls(answer).keys() & {"public", "s-maxage"}:
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
    own: Terms | None,
) -> Judgement:
    """May the response to this visitor's own request be shared?"""
    judgement = judged(status, answer, fetched_at, own)
    if isinstance(judgement, Unshared):
        return judgement
    carried = carried_in(request, credentials)
    if (reason := is_for(answer, carried)) is not None:
        return Unshared(reason)
    judgement = _by_origin(judgement, request, answer)
    chosen = selected(judgement.vary, request, carried)
    if chosen is None or chosen != selected(judgement.vary, end_to_end(request), carried):
        return Unshared(Reason.VARY)  # in the second case `Connection` hid a field from the site
    names = {*credentials, *(name.encode("latin-1", "replace") for name in judgement.vary)}
    return Unshared(Reason.HEADERS) if _look_like(request, names) else judgement


def _look_like(request: Raw, names: Collection[bytes]) -> bool:
    """Whether a field, written with `_`, could be read as one of these names."""
    return any(b"_" in name and name.replace(b"_", b"-") in names for name, _ in request)


def _by_origin(judgement: Shared, request: Raw, answer: Raw) -> Shared:
    """A response that allows one origin depends on it, whether its `Vary` says so or not."""
    allowed = values(answer, b"access-control-allow-origin")
    is_open = not allowed or allowed == [b"*"] or not values(request, b"origin")
    if is_open or "origin" in judgement.vary:
        return judgement
    return replace(judgement, vary=tuple(sorted({*judgement.vary, "origin"})))


def selected(
    vary: Iterable[str], request: Raw, carried: frozenset[bytes]
) -> Mapping[str, str] | None:
    """RFC 9111 §4.1: the variant that a request selects; None: it is the visitor's own.

    Credentials never become part of a key.
    """
    names = tuple(vary)
    if any(name.encode("latin-1", "replace") in carried for name in names):
        return None
    return variant(names, request)
