"""How a page lies in a store (E11, I2), and how long the store is waited for (I10).

A page is four bytes of length, the head in msgpack, the body as it is. Decoding copies nothing: the
body is a view of what was read, so that memory holds a page once (I16). Where values lie in the
open (I2) the body is the object, and the head stands in the row.
"""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from stillfresh.errors import StoreError
from stillfresh.freshness import Policy
from stillfresh.http.fields import field_value, values
from stillfresh.isr.model import Head, Page, Stored
from stillfresh.isr.rules_storage import opened
from stillfresh.stores.contract import Store

if TYPE_CHECKING:
    from stillfresh.stores.bodies import Body

_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Head)


def packed(head: bytes, body: bytes | memoryview) -> bytes:
    return b"".join([len(head).to_bytes(4, "big"), head, body])


def parts(data: bytes) -> tuple[memoryview, memoryview]:
    view = memoryview(data)
    end = 4 + int.from_bytes(view[:4], "big")
    if len(view) < end:
        raise ValueError("cut short")
    return view[4:end], view[end:]


class PageBytes(bytes):
    """A body with its head beside it, for a store of this process: a hit sends it as it is."""

    head: Head


class PageCodec:
    """What the engine stores pages with; `is_packed`: the head is written before the body."""

    def __init__(self, *, is_packed: bool = True) -> None:
        self._is_packed = is_packed

    def encode(self, page: Stored, /) -> bytes:
        if self._is_packed:
            return packed(_encode(page.head), page.body)
        data = PageBytes(page.body)
        data.head = page.head
        return data

    def decode(self, data: bytes, /) -> Stored:
        if isinstance(data, PageBytes):
            return Stored(data.head, data)
        head, body = parts(data)
        return Stored(_decoder.decode(head), body)


def page_in(data: bytes) -> Page:
    """The page that a store keeps as these bytes."""
    return opened(PageCodec().decode(data))


class PageShape:
    """I2: how a page lies in S3, where services in other languages read and write it too."""

    def __init__(self, others: Policy | None = None) -> None:
        self.others = others
        """I19: the cache's own terms, for pages whose rows say none."""

    def outside(self, value: bytes) -> "Body":
        from stillfresh.stores.bodies import Body  # noqa: PLC0415 (only where S3 is used)

        head, body = parts(value)
        page = _decoder.decode(head)
        types, etags = (values(page.headers, it) for it in (b"content-type", b"etag"))
        etag = page.etag or (etags[0] if etags else None)
        return Body(
            bytes(body),
            types[0].decode("latin-1") if types else None,
            etag.decode("latin-1") if etag else None,
            bytes(head),
        )

    def inside(self, body: "Body") -> bytes:
        """I19: its freshness is the row's, which another may have changed."""
        terms = body.terms or Policy(0)
        if not body.extra:
            return packed(_encode(_of_another(body, terms)), body.data)
        try:
            head = _decoder.decode(body.extra)
        except msgspec.DecodeError:
            return packed(body.extra, body.data)  # the codec says what is wrong with it
        if head.fresh_for == terms.fresh_for:
            return packed(body.extra, body.data)
        head = msgspec.structs.replace(head, fresh_for=terms.fresh_for)
        return packed(_encode(head), body.data)


def _of_another(body: "Body", terms: Policy) -> Head:
    """Status 200, the object's content type, the row's ETag unchanged, its interval told."""
    told = {b"content-type": body.content_type, b"etag": body.etag}
    fields = ((name, field_value(text)) for name, text in told.items() if text)
    return Head(
        headers=tuple((name, value) for name, value in fields if value is not None),
        fresh_for=terms.fresh_for,
        stale_for=terms.stale_for,
        error_for=terms.error_for,
        is_own=True,
    )


def shaped(store: Store, terms: Policy) -> Store:
    """I2: where values lie in the open, a page does so as its body; I19: bound by our terms."""
    if store.shapes is not None:
        store.shapes.setdefault("page", PageShape(terms))
    return store


class BoundedStore:
    """Everything that the store has; the steps that visitors wait for end in time."""

    def __init__(self, store: Store, limits: dict[str, float]) -> None:
        self._store = store
        self._limits = limits

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        step = getattr(self._store, name)
        return partial(self._within, name, step) if name in self._limits else step

    async def _within(self, name: str, step: Any, *args: Any, **options: Any) -> object:  # noqa: ANN401
        limit = self._limits[name]
        try:
            async with asyncio.timeout(limit):
                return await step(*args, **options)
        except TimeoutError as exc:
            raise StoreError(f"{name}: no answer from the store within {limit:g} s") from exc


def bounded(store: Store, timeout: float, lease_for: float) -> Store:
    """A lease that took longer to get than it lasts is none: writes may take as long as that.

    Invalidations have no limit: their caller waits until they hold.
    """
    writes = dict.fromkeys(("acquire", "publish", "renew", "release"), max(timeout, lease_for))
    return cast("Store", BoundedStore(store, {"read": timeout, **writes}))
