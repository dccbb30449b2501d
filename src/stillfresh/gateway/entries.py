"""The entries of a gateway's caches, and an operator's actions on them.

A declared kind is used through its resource, so that memory and running loads see it. A kind that
is only in the store (of an older configuration) is used through the store.
"""

import codecs
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias

import msgspec

from stillfresh.engine import Cache, Resource
from stillfresh.engine.explain import PAGE, Listed, explain, listed
from stillfresh.engine.keys import checked_id, checked_kind
from stillfresh.errors import ConfigError, LoadFailed
from stillfresh.gateway.kind_fetch import FIRST
from stillfresh.gateway.replies import Problem
from stillfresh.pages import Page, page_in
from stillfresh.stores import capabilities_of
from stillfresh.stores.contract import Record, StoredEntry

ACTIONS: Final = ("refresh", "invalidate", "delete")
PAGES: Final = "pages"
INVALIDATED: Final = "Invalidated: no read is answered with this copy, unless loading fails."
INVALIDATED_PAGE: Final = "Invalidated: not served before it was validated."
CHUNK: Final = 100
"""Entries in one request to a store."""
MOST_LOOKED_AT: Final = 10_000
"""Entries read for one page, if another cache has filled the store."""
MOST_DECODED: Final = 1_000_000
"""Bytes of a value that is decoded; of a larger one only the size is shown."""
MOST_SHOWN: Final = 20_000
"""Characters of a value that are shown."""

Place: TypeAlias = tuple[str, str, str]
"""A cache's name, a kind and an id: where a page of entries ended."""


class Listing:
    """The caches by name. If two have a kind of one name, the first that declared it counts."""

    def __init__(self, caches: Mapping[str, Cache]) -> None:
        self._caches = caches

    def kinds(self) -> list[str]:
        return sorted({kind for cache in self._caches.values() for kind in cache.resources})

    async def entries(
        self, kind: str | None, search: str, after: Place | None, limit: int
    ) -> dict[str, Any]:
        """A page of entries, cache by cache; `next` is where the following one begins.

        Entries of another cache, perhaps on the same store, are skipped.
        """
        rows: list[dict[str, Any]] = []
        last = after
        looked_at = 0
        async for name, entry in self._from(kind, search, after):
            is_own = self._declared_in(entry.kind) in {None, name}
            if looked_at == MOST_LOOKED_AT or (is_own and len(rows) == limit):
                return {"entries": rows, "next": last}
            if is_own:
                rows.append(_row(name, entry, self._caches[name].clock()))
            last = (name, entry.kind, entry.id)
            looked_at += 1
        return {"entries": rows, "next": None}

    async def _from(
        self, kind: str | None, search: str, after: Place | None
    ) -> AsyncIterator[tuple[str, Listed]]:
        """Every entry from there on, with the name of its cache."""
        names = list(self._caches)
        first = names.index(after[0]) if after and after[0] in names else 0
        for name in names[first:]:
            begin = after[1:] if after and after[0] == name else None
            while chunk := await self._caches[name].entries(kind, search, begin, CHUNK):
                for entry in chunk:
                    yield name, entry
                begin = chunk[-1].kind, chunk[-1].id
                if len(chunk) < CHUNK:
                    break

    async def explain(self, kind: str, id_: str) -> dict[str, Any]:
        """Everything about one entry, and its value."""
        name, cache = await self._cache_of(kind, id_)
        store = await cache.store()
        resource = cache.resources.get(kind)
        record = (await store.read(kind, [id_])).get(id_, Record())
        now = cache.clock()
        if resource is None:
            explanation = explain(kind, id_, record, now, loading_here=False, in_memory=False)
        else:
            explanation = await resource.explain(_key(resource, id_))
        (row,) = listed([StoredEntry(kind, id_, record)], now)
        copy = record.copy
        return {
            **_row(name, row, now),
            "text": explanation.text,
            "loading_here": explanation.loading_here,
            "in_memory": explanation.in_memory,
            "is_declared": resource is not None,
            "can_refresh": resource is not None and resource.loads_by_key,
            "value": shown_value(copy.value, is_page=name == PAGES) if copy else None,
            "terms": copy.policy if copy else None,
        }

    async def act(self, action: str, kind: str, id_: str) -> str:
        """Do it, and say in a sentence what was done."""
        _, cache = await self._cache_of(kind, id_)
        resource = cache.resources.get(kind)
        if action == "refresh":
            return await _refresh(kind, resource, id_)
        store = await cache.store()
        if action == "delete":
            if resource is None:
                await store.delete(kind, [id_])
            else:
                await resource.delete(_key(resource, id_))
            return "Deleted."
        if resource is None:
            await store.invalidate(kind, [id_])
        else:
            await resource.invalidate(_key(resource, id_))
        return INVALIDATED_PAGE if kind == PAGE else INVALIDATED

    def _declared_in(self, kind: str) -> str | None:
        """The name of the cache that has this kind."""
        return next((name for name, cache in self._caches.items() if kind in cache.resources), None)

    async def _cache_of(self, kind: str, id_: str) -> tuple[str, Cache]:
        if (name := self._declared_in(kind)) is not None:
            return name, self._caches[name]
        try:
            checked_kind(kind)
            checked_id(kind, id_)
        except ConfigError as exc:
            raise Problem(404, "not_found", "Not found", str(exc)) from exc
        for name, cache in self._caches.items():
            store = await cache.store()
            listing = capabilities_of(store).listing
            if listing is not None and not await listing.entries(kind, "", None, 1):
                continue
            if await store.read(kind, [id_]):
                return name, cache
        raise Problem(404, "not_found", "Not found", f"no store knows {kind} {id_!r}")


async def _refresh(kind: str, resource: Resource[Any, Any] | None, id_: str) -> str:
    if resource is None:
        why = f"{kind} is declared nowhere here, so nobody knows how to load it"
        raise Problem(409, "not_loadable", "Cannot be loaded", why)
    key = _key(resource, id_)
    if not resource.loads_by_key:
        await resource.invalidate(key, soft=True)
        return "Marked stale: the next read loads a new copy."
    try:
        await resource.refresh(key)
    except LoadFailed as exc:
        raise Problem(502, "load_failed", "Loading failed", str(exc)) from exc
    return "Loaded again."


def _key(resource: Resource[Any, Any], id_: str) -> Any:  # noqa: ANN401 (each has its own)
    try:
        return resource.key_of(id_)
    except ConfigError as exc:
        raise Problem(404, "not_found", "Not found", str(exc)) from exc


def _row(cache: str, entry: Listed, now: float) -> dict[str, Any]:
    """Times are relative to now, because the browser's clock may differ."""
    ends = {"fresh_for": entry.fresh_until, "held_for": entry.held_until}
    ends["retry_in"] = entry.retry_at
    return {
        "cache": cache,
        "kind": entry.kind,
        "id": entry.id,
        "verdict": entry.verdict,
        "age": entry.age,
        "size": entry.size,
        "is_absent": entry.absent,
        "is_invalidated": entry.invalidated,
        "failures": entry.failures,
        "error": entry.error,
        **{name: None if at is None else at - now for name, at in ends.items()},
    }


def shown_value(value: object, *, is_page: bool = False) -> dict[str, Any]:
    """A value as an operator can read it: JSON, a page's text, or its size.

    `kind` is json, page, bytes or absent; `text` is at most 20,000 characters of it.
    """
    if value is None:
        return {"kind": "absent"}
    if not isinstance(value, bytes):
        return {"kind": "unread"}
    if len(value) <= MOST_DECODED:
        with suppress(msgspec.MsgspecError, TypeError, ValueError, RecursionError):
            return _page(page_in(value)) if is_page else _json(value)
    return {"kind": "bytes", "size": len(value)}


def _json(value: bytes) -> dict[str, Any]:
    is_json = len(value) > 1 and value[0] < 0x80  # Pydantic's: in msgpack it is a byte, and no more
    decode = msgspec.json.decode if is_json else msgspec.msgpack.decode
    plain = msgspec.json.encode(decode(value.removeprefix(FIRST)))
    text = msgspec.json.format(plain).decode()
    is_cut = len(text) > MOST_SHOWN
    return {"kind": "json", "size": len(value), "text": text[:MOST_SHOWN], "is_cut": is_cut}


def _page(page: Page) -> dict[str, Any]:
    headers = [
        [name.decode("latin-1"), value.decode("latin-1")] for name, value in page.headers.raw
    ]
    shown = {"kind": "page", "size": len(page.body), "status": page.status, "headers": headers}
    body = page.body[: MOST_SHOWN * 4]
    is_whole = len(body) == len(page.body)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(body, final=is_whole)
    except UnicodeDecodeError:
        return {**shown, "text": None, "is_cut": False}
    is_cut = len(text) > MOST_SHOWN or not is_whole
    return {**shown, "text": text[:MOST_SHOWN], "is_cut": is_cut}
