"""May this response be shared? (I13, RFC 9111 §3; §4.1 for Vary.)

Pure: status and header fields in, a judgement out. A route's own duration replaces what a response
says of its freshness, never what it says of its privacy.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from stillfresh.isr.rules_fields import Raw, directives, members, values
from stillfresh.isr.rules_freshness import Terms, controls, stated
from stillfresh.isr.rules_reasons import Reason

BY_ROUTE: Final = frozenset({200, 203, 204, 300, 301, 302, 303, 307, 308, 404, 405, 410, 414})
"""What a route's duration applies to: not refusals, which are about who asks, nor bad requests."""
ABSENT: Final = frozenset({404, 410})
TOO_MANY: Final = 429
NEVER: Final = frozenset({428, TOO_MANY, 431})
"""RFC 6585: about who asks, and not to be stored."""
MOST_HEADERS: Final = 32_768
"""Bytes; a response with more is passed on, not kept."""
NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
DIRECTIVE: Final = re.compile(rb"""[^\s"=,;/]+(?:\s*=\s*(?:[^\s"=,;/]+|"(?:\\.|[^"\\])*"))?""")
REFUSAL: Final = re.compile(rb"(?<![\w-])(?:private|no-store)(?![\w-])", re.IGNORECASE)
BAD: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def field_value(text: str) -> bytes | None:
    """RFC 9110 §5.5: as a header field's value; None if it can be none."""
    try:
        value = text.encode("latin-1")
    except UnicodeEncodeError:
        return None
    return None if BAD.search(value) or value != value.strip() else value


@dataclass(frozen=True, slots=True)
class Shared:
    """For everybody, or, with `vary`, for all whose requests agree in these headers."""

    terms: Terms
    vary: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unshared:
    """For who asked, and nobody else."""

    reason: Reason


Judgement: TypeAlias = Shared | Unshared


def judged(status: int, headers: Raw, fetched_at: float, own: Terms | None) -> Judgement:
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
