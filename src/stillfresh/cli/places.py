"""From STORE on the command line to a store that is there: looking never makes one (G10).

And what was probably meant, where a store knows nothing of a name that was given: on stderr, and
only for people. An id that is not there is no mistake, it may be loading just now.
"""

import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import quote, unquote, urlsplit

import click

from stillfresh.cli.output import plain
from stillfresh.errors import ConfigError
from stillfresh.quiet import quietly
from stillfresh.stores import TenantStore, split_tenant, store_for
from stillfresh.stores.contract import MOST_LISTED, Entry, Record, Store, StoreStats

LOOKED_AT: Final = 1_000
"""Entries whose kinds are named."""


class Readable(Protocol):
    """What looking needs of a store."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def read(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]: ...

    async def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[Entry]: ...

    async def stats(self) -> StoreStats: ...


@asynccontextmanager
async def looked_into(address: str) -> AsyncIterator[Readable]:
    """To read only: a file is not changed, not even one that is damaged."""
    path = file_of(address)
    async with _open(_view(path, address) if path is not None else _named(address)) as found:
        yield found


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[Store]:
    """To change what is in it."""
    if (path := file_of(address)) is not None:
        from stillfresh.feed.view import edited, is_feed  # noqa: PLC0415 (only when named)

        async with _open(_view(path, address)):
            pass  # it is there, and ours
        if is_feed(path):
            with quietly(logging.CRITICAL):
                async with edited(path) as feed:
                    yield feed
            return
        tenant = _tenant_of(address)
        named = "" if tenant is None else f"?tenant={quote(tenant, safe='')}"
        address = f"sqlite:///{quote(path)}{named}"
    store = _named(address)
    async with _open(store):
        yield store


@asynccontextmanager
async def _open(store: Readable) -> AsyncIterator[Readable]:
    with quietly(logging.CRITICAL):  # what it would log, the command's error says
        await store.open()
        try:
            yield store
        finally:
            await store.close()


def _named(address: str) -> Store:
    if address.startswith("memory:"):
        raise ConfigError(
            "store memory://: lives in the process that uses it; look at it there, on its dashboard"
        )
    return store_for(address, time.time)


def _view(path: str, address: str) -> Readable:
    from stillfresh.feed.view import FeedView, is_feed  # noqa: PLC0415 (only when named)
    from stillfresh.stores.sqlite import SqliteView  # noqa: PLC0415

    tenant = _tenant_of(address)
    if is_feed(path):
        if tenant is not None:
            raise ConfigError("tenant: a feed file has no tenants; leave '?tenant=' out")
        return FeedView(path)
    view = SqliteView(path)
    return view if tenant is None else TenantStore(view, tenant)


def _tenant_of(address: str) -> str | None:
    """I17: of `sqlite:///file?tenant=acme`; a bare file name has none."""
    return split_tenant(address)[1] if "://" in address else None


def file_of(address: str) -> str | None:
    """The file of a SQLite store; its name alone will do: what has a colon may be an address."""
    if address and (":" not in address or ("://" not in address and Path(address).is_file())):
        return address
    is_store = address.startswith("sqlite:") and store_for(address, time.time) is not None
    return unquote(urlsplit(address).path[1:]) if is_store else None


async def pages_of(
    store: Readable, kind: str | None, search: str, size: int = MOST_LISTED
) -> AsyncIterator[list[Entry]]:
    """All entries, a page at a time; the last one may be empty."""
    after: tuple[str, str] | None = None
    while True:
        page = await store.entries(kind, search, after, size)
        yield page
        if len(page) < size:
            return
        after = page[-1].kind, page[-1].id


async def about_names(store: Readable, kind: str) -> str:
    """Of ids of this kind none is there."""
    if await store.entries(kind, "", None, 1):
        return "the store has no such id; `inspect` lists those it has"
    return await about_kind(store, kind)


async def about_kind(store: Readable, kind: str) -> str:
    page = await store.entries(None, "", None, LOOKED_AT)
    kinds = sorted({entry.kind for entry in page}) + (["…"] if len(page) == LOOKED_AT else [])
    there = f"it has: {', '.join(kinds)}" if kinds else "it has no entries"
    return f"the store has no kind {kind}; {there}"


def about_tags(tags: Sequence[str]) -> str:
    return f"no entry has the tag {' or '.join(tags)}"


def say(hint: str | None, *, is_json: bool) -> None:
    if hint is not None and not is_json:
        click.echo(plain(f"Note: {hint}"), err=True)
