"""Validate stored responses by ETag and date, apply a 304, and find a range of a body.

Everything here is pure. RFC 9110 §8.8, §13 (conditions) and §14 (ranges), RFC 9111 §4.3.
"""

import hashlib
import re
from enum import Enum
from typing import Final

from stillfresh.http.fields import (
    Raw,
    date_of,
    end_to_end,
    http_date,
    http_date_text,
    members,
    names_in,
    values,
)

ETAG: Final = re.compile(rb'(W/)?"[\x21\x23-\x7e\x80-\xff]*"')
KEPT: Final = names_in(
    b"content-digest content-encoding content-length content-md5 content-range repr-digest"
)
"""RFC 9111 §3.2: fields of the stored bytes, which a 304 does not change."""
OF_CONTENT: Final = names_in(b"content-digest content-md5 content-range")
"""RFC 9530 §2: fields of one message's bytes; a part or a combined page has other bytes."""


def etag_of(body: bytes | memoryview) -> bytes:
    """A strong ETag: other bytes have another one."""
    return b'"%s"' % hashlib.sha256(body).hexdigest()[:32].encode()


def not_modified(request: Raw, etag: bytes | None, modified: bytes | None) -> bool:
    """§13.2.2: If-None-Match by weak comparison, and only without it If-Modified-Since."""
    if lines := values(request, b"if-none-match"):
        client_tags = members(lines)
        if b"*" in client_tags:
            return True
        return etag is not None and _weak(etag) in map(_weak, client_tags)
    client_date = date_of(request, b"if-modified-since")
    changed_at = None if modified is None else http_date(modified)
    return client_date is not None and changed_at is not None and changed_at <= client_date


def _weak(tag: bytes) -> bytes:
    return tag.removeprefix(b"W/")


def if_range_holds(request: Raw, stored: Raw) -> bool:
    """§13.1.5: strong comparison; without the header there is no condition."""
    if not (lines := values(request, b"if-range")):
        return True
    validator = lines[0].strip()
    if ETAG.fullmatch(validator):
        return not validator.startswith(b"W/") and validator in values(stored, b"etag")
    modified = date_of(stored, b"last-modified")
    date = date_of(stored, b"date")
    if modified is None or date is None or date - modified < 1:  # §8.8.2.2: weak
        return False
    return http_date(validator) == modified


def conditions(stored: Raw) -> Raw:
    """§4.3.1: the condition fields of a request, from the stored validators."""
    pairs = ((b"etag", b"if-none-match"), (b"last-modified", b"if-modified-since"))
    result: list[tuple[bytes, bytes]] = []
    for field, condition in pairs:
        lines = values(stored, field)
        if lines and lines[0]:
            result.append((condition, lines[0]))
    return tuple(result)


def is_refresh(stored: Raw, answer: Raw) -> bool:
    """§4.3.4: a 304 that names another validator than the stored one is not about it."""
    for field in (b"etag", b"last-modified"):
        ours = values(stored, field)
        theirs = values(answer, field)
        if theirs:
            return bool(ours) and _weak(ours[0]) == _weak(theirs[0])
    return True


def refreshed(stored: Raw, answer: Raw, received_at: float) -> Raw:
    """§3.2: the fields of the 304 in place of the stored ones, except those of the body.

    A 304 without a Date gets the time when it came (RFC 9110 §6.6.1). Fields by which the body was
    chosen stay in `Vary`, even if the 304 leaves them out.
    """
    new = tuple(field for field in end_to_end(answer) if field[0] not in KEPT)
    new_vary = {name.lower() for name in members(values(new, b"vary"))}
    if new_vary:
        stored_vary = members(values(stored, b"vary"))
        left_out = [name for name in stored_vary if name.lower() not in new_vary]
        if left_out:
            new = (*new, (b"vary", b", ".join(left_out)))
    if values(stored, b"date") and not values(new, b"date"):
        new = (*new, (b"date", http_date_text(received_at)))
    replaced = {name for name, _ in new} | {b"age"}
    return tuple(field for field in stored if field[0] not in replaced) + new


IN_304: Final = names_in(
    b"age cache-control cache-status cdn-cache-control content-location date etag expires "
    b"last-modified vary via"
)
"""RFC 9110 §15.4.5: fields about the page, not about its body."""


def not_modified_headers(headers: Raw) -> Raw:
    """The fields that belong in a 304."""
    return tuple(field for field in headers if field[0] in IN_304)


SPEC: Final = re.compile(rb"bytes=[ \t]*([0-9]*)-([0-9]*)[ \t]*", re.IGNORECASE)
DIGITS: Final = 18
"""The most digits of a position; more are past the end of any page."""


class RangeAsked(Enum):
    """Answers to a range that are not a part."""

    WHOLE = 0
    UNSATISFIABLE = 1


def part_asked(value: bytes, length: int) -> tuple[int, int] | RangeAsked:
    """The position of the first byte, and the position after the last byte."""
    match = SPEC.fullmatch(value)
    if match is None or not (match[1] or match[2]):
        return RangeAsked.WHOLE
    if not match[1]:  # "bytes=-500": the last 500 bytes
        size = _number(match[2])
        if not size or not length:
            return RangeAsked.UNSATISFIABLE
        return max(0, length - size), length
    first = _number(match[1])
    last = _number(match[2]) if match[2] else length - 1
    if match[2] and last < first:
        return RangeAsked.WHOLE
    if first >= length:
        return RangeAsked.UNSATISFIABLE
    return first, min(last + 1, length)


def _number(digits: bytes) -> int:
    digits = digits.lstrip(b"0") or b"0"
    return int(digits) if len(digits) <= DIGITS else 10**DIGITS
