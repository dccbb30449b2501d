"""From STORE on the command line to an existing store: looking never creates one.

Also a hint on stderr, for people, if a store does not have the given name. A missing id is not an
error, because it may be loading just now.
"""

import logging
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

import click

from stillfresh.cli.program import plain
from stillfresh.engine.explain import PAGE
from stillfresh.errors import ConfigError
from stillfresh.logs import quietly
from stillfresh.stores import capabilities_of, for_tenant, running, split_tenant, store_for
from stillfresh.stores.contract import Store

TEMPORARY: Final = "sqlite:///"
LOOKED_AT: Final = 1_000
"""Entries whose kinds a hint names."""


@asynccontextmanager
async def opened(address: str, *, to_change: bool = False) -> AsyncIterator[Store]:
    """Open a store to read it; a file is not changed, even if damaged. `to_change`: to write."""
    with quietly(logging.CRITICAL):  # the command's own error says the same
        path = file_of(address)
        opening = _open_address(address) if path is None else _open_file(path, address, to_change)
        async with opening as store:
            yield store


@asynccontextmanager
async def _open_address(address: str) -> AsyncIterator[Store]:
    if address.startswith("memory:"):
        raise ConfigError(
            "store memory://: lives in the process that uses it; look at it there, on its dashboard"
        )
    async with running(store_for(address, time.time)) as store:
        yield store


@asynccontextmanager
async def _open_file(path: str, address: str, to_change: bool) -> AsyncIterator[Store]:
    """Open a file; before a change it is read first, to check that it exists and is ours."""
    from stillfresh.stores.sqlite import SqliteStore, SqliteView  # noqa: PLC0415
    from stillfresh.systems.feed.operator_file import FeedView, edited, is_feed  # noqa: PLC0415 (only when named)

    tenant = split_tenant(address)[1] if "://" in address else None
    is_of_feed = is_feed(path)
    if is_of_feed and tenant is not None:
        raise ConfigError("tenant: a feed file has no tenants; leave '?tenant=' out")
    view = FeedView(path) if is_of_feed else SqliteView(path)
    async with running(for_tenant(view, tenant)) as store:
        if not to_change:
            yield store
            return
    changed = edited(path) if is_of_feed else running(for_tenant(SqliteStore(path), tenant))
    async with changed as store:
        yield store


def file_of(address: str) -> str | None:
    """The file of a SQLite store, given by address or by name; None for another store.

    `store_for` takes only names that end in .db or .sqlite, because it may create the file. To look
    into an existing file, any name is accepted.
    """
    if address and (":" not in address or ("://" not in address and Path(address).is_file())):
        return address
    if not address.startswith("sqlite:"):
        return None
    store_for(address, time.time)  # raises ConfigError if the address is wrong
    return unquote(urlsplit(address).path[1:])


@contextmanager
def own_file(address: str, command: str) -> Iterator[str]:
    """For a SQLite store, a temporary file beside it, so that the store itself is not changed."""
    beside = None  # the system's directory for temporary files
    if address != TEMPORARY:
        path = file_of(address)
        if path is None:
            yield address
            return
        beside = Path(path).absolute().parent
    with tempfile.TemporaryDirectory(prefix=f".stillfresh-{command}-", dir=beside) as directory:
        yield f"sqlite:///{quote(str(Path(directory) / f'{command}.db'))}"


async def about_names(store: Store, kind: str) -> str:
    """A hint for an id that the store does not have."""
    listing = capabilities_of(store).require_listing()
    if await listing.entries(kind, "", None, 1):
        whole = "; a page's id is its whole URL" if kind == PAGE else ""
        return f"the store has no such id; `inspect` lists those it has{whole}"
    page = await listing.entries(None, "", None, LOOKED_AT)
    kinds = sorted({entry.kind for entry in page})
    hint = f"the store has no kind {kind};"
    for similar in get_close_matches(kind, kinds, 1):
        hint += f" did you mean {similar}?"
    if not kinds:
        return f"{hint} it is empty"
    if len(page) == LOOKED_AT:
        kinds.append("…")
    return f"{hint} it has: {', '.join(kinds)}"


def say(hint: str | None, *, is_json: bool) -> None:
    if hint is not None and not is_json:
        click.echo(plain(f"Note: {hint}"), err=True)
