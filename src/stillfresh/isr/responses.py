"""From a stored page to an ASGI response: 200, 304, 206, 416; GET and HEAD (I12, I14, I15)."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

from stillfresh.http.fields import Raw, values
from stillfresh.http.freshness import PageTerms, cache_status, longest_lifetime, policy_headers
from stillfresh.http.validation import (
    RangeAsked,
    if_range_holds,
    not_modified,
    not_modified_headers,
    part_asked,
)
from stillfresh.isr.model import Page, Stored

Message: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
BODILESS = frozenset({204, 304})


class ReadyPage:
    """A page's header fields; `said`: those of a hit, from `begins` until `ends`."""

    __slots__ = ("before", "begins", "ends", "etag", "fields", "length", "modified", "said")

    def __init__(self, stored: Stored) -> None:
        head = stored.head
        fields = policy_headers(head.headers, stored.terms) if head.is_own else head.headers
        self.before = tuple(values(fields, b"cache-status"))
        kept = tuple(it for it in fields if it[0] != b"cache-status")
        if head.etag is not None:
            kept = (*kept, (b"etag", head.etag))
        self.fields: Raw = kept
        size = ((b"content-length", b"%d" % len(stored.body)),)
        self.length: Raw = () if head.status in BODILESS else size
        self.etag = next(iter(values(kept, b"etag")), None)
        self.modified = next(iter(values(kept, b"last-modified")), None)
        self.begins = self.ends = 0.0
        self.said: Raw = ()


def ready(stored: Stored) -> ReadyPage:
    """Made once for each copy in memory."""
    if stored.ready is None:
        stored.ready = ReadyPage(stored)
    made: ReadyPage = stored.ready
    return made


async def send_stored(
    send: Send,
    stored: Stored,
    fields: Raw,
    request: Iterable[tuple[bytes, bytes]],
    *,
    is_head: bool,
) -> None:
    """As the request's conditions ask for it (RFC 9110 §13.2.2)."""
    made, status, request = ready(stored), stored.head.status, tuple(request)
    if status == 200:
        if not_modified(request, made.etag, made.modified):
            return await send_whole(send, 304, not_modified_headers(fields), b"")
        ranges = values(request, b"range")
        if len(ranges) == 1 and not is_head and if_range_holds(request, made.fields):
            return await _send_part(send, stored, fields, ranges[0])
    body = b"" if is_head else bytes(stored.body)
    return await send_whole(send, status, (*fields, *made.length), body)


def told(stored: Stored, age: float, what: str) -> Raw:
    """With what this very answer says of itself."""
    made = ready(stored)
    status = cache_status(made.before, what)
    return (*made.fields, (b"age", b"%d" % age), (b"cache-status", status))


def told_outdated(stored: Stored, age: float, what: str) -> Raw:
    """Else a cache behind this one would keep it for the rest of its time.

    By our policy it is told so; what the site said is passed on, and the age says it (§5.2).
    """
    head = stored.head
    if head.is_own:
        gone = PageTerms(0.0, head.stale_for, head.error_for)
        return policy_headers(told(stored, age, what), gone)
    return told(stored, max(age, longest_lifetime(head.headers)), what)


async def _send_part(send: Send, stored: Stored, fields: Raw, asked: bytes) -> None:
    whole = len(stored.body)
    match part_asked(asked, whole):
        case RangeAsked.WHOLE:
            await send_whole(send, 200, sized(fields, whole), bytes(stored.body))
        case RangeAsked.UNSATISFIABLE:
            kept = not_modified_headers(fields)
            unsatisfied = (b"content-range", b"bytes */%d" % whole)
            await send_whole(send, 416, sized((*kept, unsatisfied), 0), b"")
        case (first, end):
            span = (b"content-range", b"bytes %d-%d/%d" % (first, end - 1, whole))
            part = bytes(stored.body[first:end])
            await send_whole(send, 206, sized((*fields, span), len(part)), part)


def sized(fields: Raw, length: int) -> Raw:
    return (*fields, (b"content-length", b"%d" % length))


async def send_page(send: Send, page: Page, what: str, *, is_head: bool) -> None:
    """A page that is not stored: an error, or one for this visitor alone."""
    status = (b"cache-status", cache_status(values(page.headers.raw, b"cache-status"), what))
    kept = tuple(it for it in page.headers.raw if it[0] not in {b"cache-status", b"content-length"})
    await send_whole(send, page.status, sized((*kept, status), len(page.body)), page.body, is_head)


async def send_whole(
    send: Send, status: int, fields: Raw, body: bytes, is_head: bool = False
) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(fields)})
    await send({"type": "http.response.body", "body": b"" if is_head else body})
