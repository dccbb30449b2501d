"""A stored page: made of a response, as bytes in a store, and as a response again.

Bytes: four of length, the head in msgpack, the body as it is. Decoding copies nothing: the body is
a view of the bytes, so that memory holds a page once. A response is a 200, 304, 206 or 416, to a
GET or a HEAD.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeAlias, TypeVar

import msgspec

from stillfresh.engine import Answer, Origin
from stillfresh.errors import ConfigError, StoreError, shown
from stillfresh.freshness import Verdict
from stillfresh.http import (
    OF_CONTENT,
    RangeAsked,
    Reason,
    age_at,
    cache_status,
    etag_of,
    if_range_holds,
    initial_age,
    longest_lifetime,
    not_modified,
    not_modified_headers,
    part_asked,
    policy_headers,
    private,
    private_headers,
    ttl_at,
    without_lifetime,
)
from stillfresh.http.fields import Raw, end_to_end, strings, tag_names, untagged, values, with_field
from stillfresh.http.own_writes import FIELD_NAME
from stillfresh.pages.model import (
    FoundPage,
    Head,
    Headers,
    Page,
    PageFailed,
    PageKey,
    Rendered,
    Send,
    StoredPage,
)
from stillfresh.pages.parts import PART, cut
from stillfresh.pages.repeats import Response
from stillfresh.pages.routes import group_tag, own_tag
from stillfresh.pages.sharing import Judgement, is_of_gateway
from stillfresh.stores import WrappedStore
from stillfresh.stores.contract import Store

T = TypeVar("T")
PageRender: TypeAlias = Callable[[], Awaitable[Page] | Page]
BODILESS: Final = frozenset({204, 304})
encoded: Final = msgspec.msgpack.Encoder().encode
decoded: Final = msgspec.msgpack.Decoder(Head).decode


def made_of(
    page: Page, judgement: Judgement, fetched_at: float, given: Mapping[str, str], *, is_own: bool
) -> Rendered:
    """Return the page as it is stored, with what the HTTP rules say of it.

    `given`: request fields that it may vary by; `is_own`: a route's duration applies.
    """
    # Length and age are written again whenever it is served. A token is for one visitor only.
    raw = tuple(
        (name, value)
        for name, value in end_to_end(page.headers.raw)
        if name not in {b"content-length", b"age", FIELD_NAME}
    )
    born_at = None
    if values(page.headers.raw, b"age"):
        born_at = fetched_at - initial_age(page.headers.raw, fetched_at)
    if isinstance(judgement, Reason):
        head = Head(page.status, raw)
        return Rendered(StoredPage(head, page.body), judgement, given, born_at)
    terms = judgement.terms
    vary = judgement.vary
    head = Head(
        status=page.status,
        headers=raw,
        etag=None if values(raw, b"etag") else etag_of(page.body),
        initial_age=0.0 if is_own else initial_age(page.headers.raw, fetched_at),
        fresh_for=terms.fresh_for,
        stale_for=terms.stale_for,
        error_for=terms.error_for,
        is_own=is_own,
        vary=vary,
        variant=tuple((name, given[name]) for name in vary if given.get(name)),
        is_targeted=judgement.is_targeted,
        is_one_clients=judgement.is_one_clients,
        stale_by=judgement.stale_by,
    )
    return Rendered(StoredPage(head, page.body), None, given, born_at)


async def page_of(render: PageRender) -> Page:
    result = render()
    page = await result if inspect.isawaitable(result) else result
    if not isinstance(page, Page):
        raise ConfigError(f"a render returns a Page(body, status, headers), not {shown(page)}")
    return page


def opened(stored: StoredPage, *, is_unverified: bool = False) -> Page:
    """Return a stored page as a response; an unverified one without a lifetime for caches."""
    fields = _shown_fields(stored.head)
    if is_unverified:
        fields = without_lifetime(fields)
    return Page(bytes(stored.body), stored.head.status, Headers.of(fields))


def passed_on(page: StoredPage, born_at: float | None, now: float) -> Page:
    """A page that is not stored, with its age by now if the site sent one (RFC 9111 §5.1)."""
    response = opened(page)
    if born_at is None:
        return response
    age = b"%d" % max(0.0, now - born_at)
    fields = with_field(response.headers.raw, b"age", age)
    return Page(response.body, response.status, Headers.of(fields))


def _shown_fields(head: Head) -> Raw:
    return head.headers if head.shows_tags else untagged(head.headers)


def site_tags(headers: Raw, id_: str) -> tuple[str, ...]:
    """The tags that a response names, of a page that may have them (`sharing.judged`).

    RFC 9875 §2: a group is of one origin, by which alone it can be invalidated.
    """
    groups = strings(values(headers, b"cache-groups"))
    tags = map(own_tag, tag_names(headers) or ())
    return (*tags, *(group_tag(id_, group) for group in groups))


def notice(status: int, text: str, more: Raw = ()) -> Page:
    """A page of the cache itself, which no cache may store."""
    fields = ((b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store"))
    return Page(text, status, Headers.of((*fields, *more)))


def bare(status: int, headers: Raw) -> Page:
    """The part of one visitor's error that the other waiting visitors receive."""
    pause = tuple((name, value) for name, value in headers if name == b"retry-after")
    return notice(status, "This page cannot be shown now.\n", pause)


def too_busy(retry_after: float) -> Page:
    """No render could end in time."""
    pause = ((b"retry-after", b"%d" % max(1, int(retry_after + 0.999))),)
    return notice(503, "This page is being prepared; please try again in a moment.\n", pause)


def refused(page: StoredPage) -> PageFailed:
    """Return the exception for a page that says that rendering failed.

    Of a private error, other visitors get only the status and `Retry-After`.
    """
    headers = page.head.headers
    whole = opened(page)
    if is_of_gateway(headers):  # its text says why; the site may not have been asked at all
        return PageFailed(whole, text=whole.body.decode("utf-8", "replace").strip())
    if private(page.head.status, headers) is None:
        return PageFailed(whole)
    return PageFailed(bare(whole.status, headers), own=whole)


def packed(head: bytes, body: bytes | memoryview) -> bytes:
    return b"".join([len(head).to_bytes(4, "big"), head, body])


def parts(data: bytes) -> tuple[memoryview, memoryview]:
    view = memoryview(data)
    end = 4 + int.from_bytes(view[:4], "big")
    if len(view) < end:
        raise ValueError("cut short")
    return view[4:end], view[end:]


class PageBytes(bytes):
    """A body with its head, for a store of this process: a hit sends it unchanged."""

    head: Head


class PageCodec:
    """The codec of pages; `is_packed`: the head is written before the body."""

    def __init__(self, *, is_packed: bool = True) -> None:
        self._is_packed = is_packed

    def encode(self, page: StoredPage, /) -> bytes:
        if self._is_packed:
            return packed(encoded(page.head), page.body)
        data = PageBytes(page.body)
        data.head = page.head
        return data

    def decode(self, data: bytes, /) -> StoredPage:
        if isinstance(data, PageBytes):
            return StoredPage(data.head, data)
        head, body = parts(data)
        return StoredPage(decoded(head), body)


def page_in(data: bytes) -> Page:
    """Return the page that a store keeps as these bytes. Raises an error for other bytes."""
    return opened(PageCodec().decode(data))


class PageStore(WrappedStore):
    """Steps that visitors wait for end in time.

    Writes may take as long as a lease: a lease that took longer to get is over. Invalidations have
    no limit: their caller waits until they are confirmed.
    """

    def __init__(self, inner: Store, timeout: float, lease_for: float) -> None:
        super().__init__(inner)
        writes = dict.fromkeys(
            ("acquire", "publish", "put", "renew", "release"), max(timeout, lease_for)
        )
        self._limits = {"read": timeout, **writes}

    async def step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        limit = self._limits.get(name)
        try:
            async with asyncio.timeout(limit):
                return await work()
        except TimeoutError as exc:
            raise StoreError(f"{name}: no answer from the store within {limit} s") from exc


def _stale_for_others(head: Head) -> float:
    """How long caches behind this one may serve it stale: another service's page, not at all."""
    return 0.0 if head.is_foreign else head.stale_for


def _with_terms(fields: Raw, head: Head, fresh_for: float) -> Raw:
    """What a route's duration says to browsers and caches in between."""
    if head.is_one_clients:
        return private_headers(fields)
    return policy_headers(fields, fresh_for, _stale_for_others(head))


class ReadyPage:
    """A page's header fields; `said`: those of a hit, from `begins` until `ends`.

    `whole` and `unmodified`: the same for a whole response, and for a 304.
    """

    __slots__ = (
        "before",
        "begins",
        "ends",
        "etag",
        "fields",
        "length",
        "modified",
        "said",
        "unmodified",
        "whole",
    )

    def __init__(self, stored: StoredPage) -> None:
        head = stored.head
        fields = _shown_fields(head)
        if head.is_own and not (head.is_foreign and values(fields, b"cache-control")):
            fields = _with_terms(fields, head, head.fresh_for)
        self.before = tuple(values(fields, b"cache-status"))
        fields = tuple((name, value) for name, value in fields if name != b"cache-status")
        if head.etag is not None:
            fields = (*fields, (b"etag", head.etag))
        self.fields: Raw = fields
        size = ((b"content-length", b"%d" % len(stored.body)),)
        self.length: Raw = () if head.status in BODILESS else size
        self.etag = next(iter(values(fields, b"etag")), None)
        dates = (*values(fields, b"last-modified"), *values(fields, b"date"))  # RFC 9111 §4.3.2
        self.modified = next(iter(dates), None)
        self.begins = self.ends = 0.0
        self.said: Raw = ()
        self.whole: Raw = ()
        self.unmodified: Raw = ()

    def begin(self, fields: Raw, begins: float, ends: float) -> None:
        """From now on, until `ends`, a hit has these fields."""
        self.begins = begins
        self.ends = ends
        self.said = fields
        self.whole = (*fields, *self.length)
        self.unmodified = not_modified_headers(fields)


def ready(stored: StoredPage) -> ReadyPage:
    """Made once for each copy in memory."""
    if stored.ready is None:
        stored.ready = ReadyPage(stored)
    page: ReadyPage = stored.ready
    return page


def hit_text(ttl: float) -> str:
    """RFC 9211 §2.4: served as it was stored."""
    return f"hit; ttl={int(ttl)}"


def response_fields(
    stored: StoredPage,
    age: float,
    what: str,
    *,
    is_outdated: bool = False,
    is_unverified: bool = False,
) -> Raw:
    """The header fields of a stored page in one response, with its age and `Cache-Status`.

    `is_outdated`: a cache behind this one must not keep it for the rest of its time. With a route's
    duration our own fields say so; else the site's fields stay, and `Age` says so (RFC 9111 §5.2).
    `is_unverified`: the store could not be asked about it, so the site's fields say so too.
    """
    page = ready(stored)
    head = stored.head
    if is_outdated and not head.is_own:
        age = max(age, longest_lifetime(head.headers))
    status = cache_status(page.before, what)
    fields = (*page.fields, (b"age", b"%d" % age), (b"cache-status", status))
    if is_outdated and head.is_own:
        return _with_terms(fields, head, 0.0)
    return without_lifetime(fields) if is_unverified else fields


def found_page(key: PageKey, answer: Answer[StoredPage], now: float, before: str) -> FoundPage:
    """The served page and its header fields; `before`: why the app was asked."""
    stored = answer.value
    age = age_at(answer, now)
    ttl = ttl_at(answer, now)
    what = hit_text(ttl)
    if answer.error is not None:
        what += "; detail=refresh-failed"
    elif answer.origin in {Origin.LOADED, Origin.ANOTHER}:
        how = "stored" if answer.origin is Origin.LOADED else "collapsed"
        what = f"fwd={before}; {how}; ttl={int(ttl)}"
    is_over = now - answer.fetched_at >= stored.head.fresh_for
    is_unverified = answer.unverified
    is_outdated = answer.verdict is not Verdict.FRESH and (is_unverified or not is_over)
    fields = response_fields(
        stored, age, what, is_outdated=is_outdated, is_unverified=is_unverified
    )
    return FoundPage((key,), stored, fields, is_new=answer.origin is Origin.LOADED)


def answer_to(
    stored: StoredPage, fields: Raw, request: Iterable[tuple[bytes, bytes]], *, is_head: bool
) -> Response:
    """The page as the request's conditions ask for it (RFC 9110 §13.2.2)."""
    page = ready(stored)
    status = stored.head.status
    request = tuple(request)
    if status in {200, PART}:
        if not_modified(request, page.etag, page.modified):
            return Response(304, not_modified_headers(fields), b"")
        ranges = values(request, b"range")
        if len(ranges) == 1 and not is_head and if_range_holds(request, page.fields):
            return _part_of(stored, fields, ranges[0])
    body = b"" if is_head else body_of(stored)
    return Response(status, (*fields, *page.length), body)


def body_of(stored: StoredPage) -> bytes:
    """All bytes of the body: those in memory, if they are bytes there."""
    return stored.body if isinstance(stored.body, bytes) else bytes(stored.body)


def _part_of(stored: StoredPage, fields: Raw, range_field: bytes) -> Response:
    whole = stored.head.total or len(stored.body)
    match part_asked(range_field, whole):
        case RangeAsked.WHOLE:
            return Response(200, sized(fields, whole), body_of(stored))
        case RangeAsked.UNSATISFIABLE:
            headers = not_modified_headers(fields)
            unsatisfied = (b"content-range", b"bytes */%d" % whole)
            return Response(416, sized((*headers, unsatisfied), 0), b"")
        case (first, end):
            span = (b"content-range", b"bytes %d-%d/%d" % (first, end - 1, whole))
            part = cut(stored, first, end) or b""
            headers = tuple((name, value) for name, value in fields if name not in OF_CONTENT)
            return Response(206, sized((*headers, span), len(part)), part)


async def send_stored(
    send: Send,
    stored: StoredPage,
    fields: Raw,
    request: Iterable[tuple[bytes, bytes]],
    *,
    is_head: bool,
) -> None:
    """Send it as the request's conditions ask."""
    response = answer_to(stored, fields, request, is_head=is_head)
    await send_whole(send, response.status, response.fields, response.body)


async def send_page(send: Send, page: Page, what: str, *, is_head: bool) -> None:
    """Send a page that is not stored: an error, or a private one."""
    status = cache_status(values(page.headers.raw, b"cache-status"), what)
    fields = sized(with_field(page.headers.raw, b"cache-status", status), len(page.body))
    await send_whole(send, page.status, fields, b"" if is_head else page.body)


def sized(fields: Raw, length: int) -> Raw:
    return with_field(fields, b"content-length", b"%d" % length)


async def send_whole(send: Send, status: int, fields: Raw, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(fields)})
    await send({"type": "http.response.body", "body": body})
