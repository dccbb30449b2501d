"""May a response be stored, for whom, and which fields of a request choose it?

Pure, and by header fields alone: pages and clients decide by it. RFC 9111 §3 (what may be stored),
§3.5 (Authorization), §4.1 (Vary).
"""

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Final

from stillfresh.errors import ConfigError, shown
from stillfresh.http.fields import (
    BAD,
    NAME,
    Raw,
    directives,
    members,
    normalised,
    tag_names,
    values,
)

BY_ROUTE: Final = frozenset({200, 203, 204, 300, 301, 302, 303, 307, 308, 404, 405, 410, 414})
"""Statuses to which a route's duration applies: not refusals of a client, nor bad requests."""
ABSENT: Final = frozenset({404, 410})
"""Statuses of a page that does not exist."""
UNDERSTOOD: Final = frozenset(int(status) for status in HTTPStatus if status >= 200)
"""RFC 9111 §5.2.2.3: statuses whose meaning for caches is known here."""
TOO_MANY: Final = 429
NEVER: Final = frozenset({428, TOO_MANY, 431})
"""RFC 6585: these depend on the client, and are not stored."""
MOST_HEADERS: Final = 32_768
"""Bytes; a response with more is passed on uncached."""
DIRECTIVE: Final = re.compile(rb"""[^\s"=,;/]+(?:\s*=\s*(?:[^\s"=,;/]+|"(?:\\.|[^"\\])*"))?""")
REFUSAL: Final = re.compile(rb"(?<![\w-])(?:private|no-store)(?![\w-])", re.IGNORECASE)
CREDENTIALS: Final = ("X-Api-Key", "Api-Key", "X-Auth-Token", "X-Access-Token")
"""Request fields, besides `Authorization` and `Cookie`, by which services identify clients."""
ALWAYS: Final = frozenset({b"authorization", b"cookie"})
"""A page that varies by these is shared only among clients that send none of them."""


class Reason(StrEnum):
    """Why a request passed uncached; docs/isr.md says what each word means."""

    AUTHORIZATION = "authorization"
    BODY = "body"
    BUSY = "busy"
    CHANGED = "changed"
    CONDITION = "condition"
    COOKIE = "cookie"
    ENCODED = "encoded"
    FAILED = "failed"
    FULL = "full"
    HEADERS = "headers"
    HOST = "host"
    HYDRATION = "hydration"
    METHOD = "method"
    NO_FRESHNESS = "no-freshness"
    NO_STORE = "no-store"
    PATH = "path"
    PRIVATE = "private"
    RANGE = "range"
    REMEMBERED = "remembered"
    ROUTE = "route"
    SAME_STORE = "same-store"
    SET_COOKIE = "set-cookie"
    SITE_COPY = "site-copy"
    SITE_FULL = "site-full"
    SIZE = "size"
    STATUS = "status"
    STORE = "store"
    STREAM = "stream"
    TAGS = "tags"
    VARY = "vary"


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
        if is_unclear_refusal(lines):
            return Reason.PRIVATE
    return None


def is_unclear_refusal(lines: Iterable[bytes]) -> bool:
    """True if a line with a mistake has the word `private` or `no-store` in it."""
    refusals = filter(REFUSAL.search, lines)
    return any(not all(map(DIRECTIVE.fullmatch, members([line]))) for line in refusals)


def unfit(status: int, headers: Raw) -> Reason | None:
    """Why it cannot be stored: interim, partial, malformed, too many tags, or endless."""
    if not 200 <= status <= 599 or status in {206, 304} or status in NEVER:
        return Reason.STATUS
    if sum(len(name) + len(value) for name, value in headers) > MOST_HEADERS:
        return Reason.HEADERS
    if not all(NAME.fullmatch(name) and not BAD.search(value) for name, value in headers):
        return Reason.HEADERS
    lengths = set(values(headers, b"content-length"))
    if len(lengths) > 1 or not all(length.isdigit() for length in lengths):
        return Reason.HEADERS
    if tag_names(headers) is None:
        return Reason.TAGS
    return Reason.STREAM if is_event_stream(headers) else None


def is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Server-sent events: a response that stays open, and may be silent for long."""
    types = values(headers, b"content-type")
    return bool(types) and types[0].lower().startswith(b"text/event-stream")


def varies(headers: Raw) -> tuple[str, ...]:
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
    names = varies(answer)
    is_same = all(normalised(name, request) == given.get(name, "") for name in names)
    return "*" not in names and is_same


def is_failure(status: int) -> bool:
    """A failure says nothing about the page; the old one is kept."""
    return status >= 500 or status == TOO_MANY


def checked_credentials(names: Iterable[str]) -> frozenset[bytes]:
    """Return the names of header fields in lower case. Raises ConfigError for a bad one."""
    if isinstance(names, str):
        raise ConfigError(f"credentials: must be a list such as ['X-Api-Key'], not {shown(names)}")
    checked = frozenset(name.lower().encode("latin-1", "replace") for name in names)
    bad = next((name for name in checked if not NAME.fullmatch(name)), None)
    if bad is not None:
        raise ConfigError(
            f"credentials: {shown(bad.decode('latin-1'))} is not the name of a header field; "
            "write one such as X-Api-Key"
        )
    return checked


def carried_in(headers: Raw, credentials: frozenset[bytes]) -> frozenset[bytes]:
    """The fields of this request that identify its sender."""
    return frozenset(name for name, _ in headers if name in ALWAYS or name in credentials)


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
