"""Validation: ETags, dates, what a 304 changes, and a part of a body (I14, I15).

Pure. RFC 9110 §8.8, §13 (conditions) and §14 (ranges), RFC 9111 §4.3.
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
        asked = members(lines)
        return b"*" in asked or (etag is not None and _weak(etag) in map(_weak, asked))
    asked_at = date_of(request, b"if-modified-since")
    changed_at = None if modified is None else http_date(modified)
    return asked_at is not None and changed_at is not None and changed_at <= asked_at


def _weak(tag: bytes) -> bytes:
    return tag.removeprefix(b"W/")


def if_range_holds(request: Raw, stored: Raw) -> bool:
    """§13.1.5: strong comparison; without the header there is no condition."""
    if not (lines := values(request, b"if-range")):
        return True
    asked = lines[0].strip()
    if ETAG.fullmatch(asked):
        return not asked.startswith(b"W/") and asked in values(stored, b"etag")
    modified, date = date_of(stored, b"last-modified"), date_of(stored, b"date")
    if modified is None or date is None or date - modified < 1:  # §8.8.2.2: weak
        return False
    return http_date(asked) == modified


def conditions(stored: Raw) -> Raw:
    """§4.3.1: the condition fields of a request, from the stored validators."""
    pairs = ((b"etag", b"if-none-match"), (b"last-modified", b"if-modified-since"))
    return tuple(
        (ask, found[0]) for field, ask in pairs if (found := values(stored, field)) and found[0]
    )


def is_refresh(stored: Raw, answer: Raw) -> bool:
    """§4.3.4: a 304 that names another validator than the stored one is not about it."""
    for field in (b"etag", b"last-modified"):
        ours, theirs = values(stored, field), values(answer, field)
        if theirs:
            return bool(ours) and _weak(ours[0]) == _weak(theirs[0])
    return True


def refreshed(stored: Raw, answer: Raw, received_at: float) -> Raw:
    """§3.2: the fields of the 304 in place of the stored ones, except those of the body.

    A 304 without a Date gets the time when it came (RFC 9110 §6.6.1). Fields by which the body was
    chosen stay in `Vary`, even if the 304 leaves them out.
    """
    new = tuple(it for it in end_to_end(answer) if it[0] not in KEPT)
    if said := {it.lower() for it in members(values(new, b"vary"))}:
        left_out = [it for it in members(values(stored, b"vary")) if it.lower() not in said]
        new = (*new, (b"vary", b", ".join(left_out))) if left_out else new
    if values(stored, b"date") and not values(new, b"date"):
        new = (*new, (b"date", http_date_text(received_at)))
    replaced = {name for name, _ in new} | {b"age"}
    return tuple(it for it in stored if it[0] not in replaced) + new


IN_304: Final = names_in(
    b"age cache-control cache-status cdn-cache-control content-location date etag expires "
    b"last-modified vary via"
)
"""RFC 9110 §15.4.5: fields about the page, not about its body."""


def not_modified_headers(headers: Raw) -> Raw:
    return tuple(it for it in headers if it[0] in IN_304)


SPEC: Final = re.compile(rb"bytes=[ \t]*([0-9]*)-([0-9]*)[ \t]*", re.IGNORECASE)
DIGITS: Final = 18
"""The most digits of a position; more are past the end of any page."""


class RangeAsked(Enum):
    """Answers to a range that are not a part."""

    WHOLE = 0
    UNSATISFIABLE = 1


def part_asked(value: bytes, length: int) -> tuple[int, int] | RangeAsked:
    """The first byte, and the one after the last."""
    found = SPEC.fullmatch(value)
    if found is None or not (found[1] or found[2]):
        return RangeAsked.WHOLE
    if not found[1]:
        size = _number(found[2])
        return (max(0, length - size), length) if size and length else RangeAsked.UNSATISFIABLE
    first = _number(found[1])
    last = _number(found[2]) if found[2] else length - 1
    if found[2] and last < first:
        return RangeAsked.WHOLE
    return (first, min(last + 1, length)) if first < length else RangeAsked.UNSATISFIABLE


def _number(digits: bytes) -> int:
    digits = digits.lstrip(b"0") or b"0"
    return int(digits) if len(digits) <= DIGITS else 10**DIGITS
