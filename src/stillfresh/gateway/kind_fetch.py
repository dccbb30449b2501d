"""A kind that is fetched one by one: `GET url`, with validation of the stored copy.

The stored copy also has what the next request needs: validators and the stated freshness. Only this
module sees it: the engine reads the view. 304 renews the copy; 404 and 410 mean that it does not
exist.
"""

import re
import time
from collections.abc import Mapping, Set
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import msgspec

from stillfresh.engine import Loaded
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Policy
from stillfresh.gateway.config import KindSettings
from stillfresh.gateway.setting_readers import ID_SLOT
from stillfresh.http import (
    conditions,
    controls,
    initial_age,
    is_refresh,
    refreshed,
    stated,
    with_age,
)
from stillfresh.http.client import OK, Endpoint
from stillfresh.http.fields import Raw, names_in

NOT_MODIFIED: Final = 304
GONE: Final = (404, 410)
KEPT: Final = names_in(b"etag last-modified cache-control cdn-cache-control expires date age")
FIRST: Final = b"\xc1"
"""The first byte; no msgpack begins with it, so such a copy is never taken for a view."""
DOTS: Final = frozenset({".", ".."})
SEPARATORS: Final = re.compile(r"[/\\]")


class GotView(msgspec.Struct, frozen=True):
    """What is stored: a view, and the header fields for its next request."""

    view: Any
    fields: tuple[tuple[str, str], ...] = ()
    initial_age: float = 0.0
    """How old it was when it was requested, if the upstream says how long it is fresh."""

    @property
    def raw(self) -> Raw:
        return tuple(
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in self.fields
        )


class GotCodec:
    """Encodes a `GotView`, decodes the view, with its age if it was not new when it came."""

    def encode(self, value: GotView, /) -> bytes:
        return FIRST + msgspec.msgpack.encode(value)

    def decode(self, data: bytes, /) -> Any:  # noqa: ANN401 (whatever JSON can say)
        copy = got(data)
        return with_age(copy.view, copy.initial_age) if copy.initial_age else copy.view


def got(data: bytes) -> GotView:
    """Refuse copies that were stored in another way, as by `batch_url`: they count as a miss."""
    if not data.startswith(FIRST):
        raise ValueError("not stored by a GET")
    return msgspec.msgpack.decode(memoryview(data)[1:], type=GotView)


def address(template: str, **names: str | None) -> str | None:
    """The URL of one id, percent-encoded; None if no URL can name it.

    An id stays where it is written: one that would be read as `.` or `..` on the way, by a server
    that decodes `%2F` too, does not exist.
    """
    url = ID_SLOT.sub(lambda match: quote(names[match[1]] or "", safe=""), template)
    return None if DOTS & set(SEPARATORS.split(unquote(urlsplit(url).path))) else url


class GetFetch:
    """Fetches the views of one kind, one in each call."""

    def __init__(self, settings: KindSettings, endpoint: Endpoint) -> None:
        self._template = settings.url or ""
        self._is_stated = settings.terms == "upstream"
        self._unkept = {"no-store"} if settings.per_viewer else {"no-store", "private"}
        self._own = Policy(settings.fresh_for, settings.stale_for, settings.error_for)
        self._endpoint = endpoint

    async def __call__(
        self, ids: list[str], viewer_id: str | None = None, *, stored: Mapping[str, bytes]
    ) -> dict[str, Any]:
        (id_,) = ids
        url = address(self._template, id=id_, viewer_id=viewer_id)
        try:
            known = got(stored[id_]) if id_ in stored else None
        except (ValueError, msgspec.MsgspecError):
            known = None
        if url is None:
            return {}
        view = await self._fetch(url, known)
        return {} if view is None else {id_: view}

    async def _fetch(self, url: str, known: GotView | None) -> Loaded[GotView] | GotView | None:
        asked_if = () if known is None else conditions(known.raw)
        takes = (OK, *GONE, *((NOT_MODIFIED,) if asked_if else ()))
        sent = time.time()
        answer = await self._endpoint.answer(None, url, asked_if, takes=takes)
        if answer.status in GONE:
            return None
        fields = answer.headers
        if answer.status == NOT_MODIFIED and known is not None:
            if not is_refresh(known.raw, fields):  # RFC 9111 §4.3.4: it is about another one
                return await self._fetch(url, None)
            view = known.view
            fields = refreshed(known.raw, fields, time.time())
        else:
            view = decoded(answer.body)
        stored_fields = tuple(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in fields
            if name in KEPT
        )
        if not self._is_stated:
            return GotView(view, stored_fields)
        terms = terms_of(fields, sent, self._own, self._unkept)
        # With the file's own terms it counts as new, as a page with a route's duration does.
        age = 0.0 if terms is self._own else initial_age(fields, sent)
        return Loaded(
            GotView(view, stored_fields, age),
            fresh_for=terms.fresh_for,
            stale_for=terms.stale_for,
            error_for=terms.error_for,
        )


def decoded(body: bytes) -> Any:  # noqa: ANN401 (whatever JSON can say)
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise LoadFailed(f"the answer is not JSON: {exc}") from exc


def terms_of(fields: Raw, sent: float, own: Policy, unkept: Set[str]) -> Policy:
    """`terms = "upstream"`: the times that the answer states; `own` if it states none.

    An answer that must not be stored is only for waiting callers. Our own `error_for` applies,
    unless the answer states another or forbids it (RFC 9111 §4.2.4). It counts from the end of the
    answer's freshness, which may be in the past.
    """
    known = controls(fields)
    if known.keys() & unkept:
        return Policy(0)
    times = stated(fields, sent, error_for=own.error_for)
    return own if times is None else times.terms
