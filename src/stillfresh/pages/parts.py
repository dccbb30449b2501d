"""Parts of a page: which ranges are requested, stored, combined and served.

Pure. RFC 9110 §14 and §15.3.7, RFC 9111 §3.3 and §3.4. Parts are stored under keys of their own, so
that none is taken for a page. Two are combined only if both have the same strong ETag: then they
are of the same bytes.
"""

import re
from typing import Final

from msgspec import structs

from stillfresh.http import (
    OF_CONTENT,
    RangeAsked,
    Reason,
    etag_of,
    if_range_holds,
    part_asked,
    refreshed,
)
from stillfresh.http.fields import Raw, values
from stillfresh.pages.model import StoredPage

PART: Final = 206
MOST_SPANS: Final = 100
"""Pieces of one page, with gaps between them: each visit looks through them."""
TOLD: Final = re.compile(rb"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.IGNORECASE)


def is_one(request: Raw) -> bool:
    """True if it asks for one well-formed range."""
    ranges = values(request, b"range")
    return len(ranges) == 1 and part_asked(ranges[0], 1) is not RangeAsked.WHOLE


def unfit_to_add(request: Raw) -> Reason | None:
    """Why its answer must not be stored: after `If-Range` it may leave out header fields."""
    return Reason.RANGE if values(request, b"if-range") else None


def fits(request: Raw, answer: Raw) -> bool:
    """True if a 206 is the requested part, with the length that it announces."""
    content_range = _content_range(answer)
    if content_range is None:
        return False
    first, end, total = content_range
    is_asked = part_asked(values(request, b"range")[0], total) == (first, end)
    return is_asked and values(answer, b"content-length") in ([], [b"%d" % (end - first)])


def _content_range(answer: Raw) -> tuple[int, int, int] | None:
    """RFC 9110 §14.4: the first byte, the one after the last, and the length of the whole."""
    fields = values(answer, b"content-range")
    match = TOLD.fullmatch(fields[0]) if len(fields) == 1 else None
    return None if match is None else (int(match[1]), int(match[2]) + 1, int(match[3]))


def covers(page: StoredPage, request: Raw) -> bool:
    """True if the stored parts have everything that is asked for."""
    if page.head.status != PART:
        return True
    if not if_range_holds(request, page.head.headers):
        return False
    span = part_asked(values(request, b"range")[0], page.head.total)
    if span is RangeAsked.UNSATISFIABLE:
        return True
    return isinstance(span, tuple) and cut(page, *span) is not None


def cut(page: StoredPage, first: int, end: int) -> bytes | None:
    """These bytes of the whole; None if some are missing."""
    at = 0
    for begin, stop in page.head.spans or ((0, len(page.body)),):
        if begin <= first and end <= stop:
            return bytes(page.body[at + first - begin : at + end - begin])
        at += stop - begin
    return None


def joined(new: StoredPage, old: StoredPage | None, received_at: float, most: int) -> StoredPage:
    """Combine a new part with the stored ones; a page, if it is complete.

    Raises `ConnectionError` if the body is not as long as it says.
    """
    content_range = _content_range(new.head.headers)
    if content_range is None or len(new.body) != content_range[1] - content_range[0]:
        raise ConnectionError(f"{len(new.body):,} bytes came of {content_range}")
    first, _, total = content_range
    pieces = [(first, bytes(new.body))]
    headers = new.head.headers
    if old is not None and _is_same(new, old, total):
        old_spans = old.head.spans or ((0, len(old.body)),)
        old_pieces = [(at, cut(old, at, end) or b"") for at, end in old_spans]
        merged = _merge([*pieces, *old_pieces])
        if len(merged) <= MOST_SPANS and sum(len(data) for _, data in merged) <= most:
            pieces = merged
            headers = refreshed(old.head.headers, headers, received_at)
    headers = tuple((name, value) for name, value in headers if name not in OF_CONTENT)
    spans = tuple((begin, begin + len(data)) for begin, data in pieces)
    body = b"".join(data for _, data in pieces)
    if spans != ((0, total),):
        head = structs.replace(new.head, headers=headers, etag=None, spans=spans, total=total)
        return StoredPage(head, body)
    etag = None if values(headers, b"etag") else etag_of(body)
    return StoredPage(structs.replace(new.head, status=200, headers=headers, etag=etag), body)


def _is_same(new: StoredPage, old: StoredPage, total: int) -> bool:
    ours = values(old.head.headers, b"etag")
    theirs = values(new.head.headers, b"etag")
    is_strong = len(theirs) == 1 and theirs[0].startswith(b'"')
    length = old.head.total if old.head.status == PART else len(old.body)
    return is_strong and ours == theirs and length == total


def _merge(pieces: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """In order; pieces that touch or overlap become one."""
    result: list[tuple[int, bytes]] = []
    for first, data in sorted(pieces):
        begin, before = result[-1] if result else (0, b"")
        if not result or first > begin + len(before):
            result.append((first, data))
        else:
            result[-1] = begin, before + data[begin + len(before) - first :]
    return result
