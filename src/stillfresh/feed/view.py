"""A feed's file for operators: looked into and left as it is, or opened to be changed (F16, G10).

The kind is `feed`, its ids are the cache keys. Nobody here knows the settings of the program that
the file belongs to, so that the seed's five minutes and thirty days count.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import apsw
from msgspec.structs import replace

from stillfresh.errors import ConfigError
from stillfresh.feed import leases
from stillfresh.feed.cache import FEED_CACHE_EVICT_SECONDS, FEED_CACHE_TTL_SECONDS, FeedCache
from stillfresh.feed.file import FeedFile, completed
from stillfresh.feed.keys import canonical, index_of
from stillfresh.feed.schema import FEED, TABLES
from stillfresh.feed.shelf import Shelf
from stillfresh.feed.store import KIND, FeedStore, start_of
from stillfresh.feed.upkeep import count
from stillfresh.freshness import Policy
from stillfresh.stores.contract import UNREAD, Copy, Entry, Mark, Record, StoreStats
from stillfresh.stores.listing import checked_limit
from stillfresh.stores.sqlite.connection import FAILED, connect_viewer
from stillfresh.stores.sqlite.format import Format
from stillfresh.stores.sqlite.view import SqliteView

TERMS: Final = Policy(FEED_CACHE_TTL_SECONDS, FEED_CACHE_EVICT_SECONDS)


def _holds_feed(connection: apsw.Connection, path: Path) -> bool:
    """A file of another implementation lacks our own tables."""
    FEED.is_begun(connection, path)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    return names >= TABLES.keys()


def is_feed(path: str) -> bool:
    """By its tables; False as well for what is no file, or none that can be read."""
    if not Path(path).is_file():
        return False
    try:
        connection = connect_viewer(Path(path))
    except (ConfigError, *FAILED):
        return False
    try:
        return _holds_feed(connection, Path(path))
    except (ConfigError, *FAILED):
        return False
    finally:
        connection.close()


class FeedFileStats(StoreStats, frozen=True, kw_only=True):
    """And what a feed has besides."""

    topics: int
    comments: int


class FeedView(SqliteView):
    """Reads on the caller's thread; changes nothing in the file."""

    FORMAT: Format = Format(FEED.application_id, FEED.begin, _holds_feed)

    async def open(self) -> None:
        await super().open()
        completed(self._opened())
        self._shelf = Shelf()

    async def read(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        del known
        if kind != KIND:
            return {}
        try:
            found = {id_: self._record(canonical(id_), looks=True) for id_ in ids}
        except FAILED as exc:
            raise self._failed(exc) from exc
        return {id_: record for id_, record in found.items() if record != Record()}

    async def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[Entry]:
        checked_limit(limit)
        if (start := start_of(kind, after)) is None:
            return []
        try:
            keys = leases.keys(self._opened(), search, start, limit)
            return [Entry(KIND, key, self._record(key, looks=False)) for key in keys]
        except FAILED as exc:
            raise self._failed(exc) from exc

    async def stats(self) -> StoreStats:
        now = self._clock()
        try:
            held = leases.count(self._opened(), now=now)
            rows = count(self._opened(), before=now - FEED_CACHE_EVICT_SECONDS, skipped=0)
        except FAILED as exc:
            raise self._failed(exc) from exc
        return FeedFileStats(
            held.copies, held.leases, held.bytes, topics=rows.topics, comments=rows.comments
        )

    def _record(self, key: str, *, looks: bool) -> Record:
        """`looks`: at the rows as well, where the meta row alone would do for a listing."""
        connection, now = self._opened(), self._clock()
        with connection:
            state = leases.state(connection, key, now)
            is_list = index_of(key) is not None
            if is_list and state.last_fetched is not None and not looks:
                return Record(_copy(state.last_fetched, now), state.held_until, state.failure)
            found = self._shelf.find(connection, key, now)
        copy = None
        if not found.is_hit and state.last_fetched is not None:  # its row cannot be read
            copy = replace(_copy(state.last_fetched, now), mark=Mark.HARD)
        elif state.last_fetched is not None:
            copy = _copy(state.last_fetched, now)
            is_absent = found.cached_at is None and not is_list
            copy = replace(copy, value=None) if is_absent else copy
        elif found.cached_at is not None:
            copy = Copy("", float(found.cached_at), TERMS, UNREAD, Mark.SOFT)
        return Record(copy, state.held_until, state.failure)


def _copy(last_fetched: int, now: float) -> Copy:
    """F3: a time from the future is stale, where E1 forgives a few seconds."""
    is_ahead = last_fetched > now
    return Copy("", float(last_fetched), TERMS, UNREAD, Mark.SOFT if is_ahead else Mark.NONE)


def _unevicted(path: str) -> FeedCache:
    fresh_for, keep_for = FEED_CACHE_TTL_SECONDS, FEED_CACHE_EVICT_SECONDS
    file = FeedFile(Path(path).absolute())
    return FeedCache(file, clock=time.time, fresh_for=fresh_for, keep_for=keep_for)


@asynccontextmanager
async def edited(path: str) -> AsyncIterator[FeedStore]:
    """To change it. Nothing is evicted on opening: its own program may keep rows for longer."""
    cache = await asyncio.to_thread(_unevicted, path)
    store = FeedStore(cache, time.time, lambda _: None)
    try:
        yield store
    finally:
        await store.close()
        await asyncio.to_thread(cache.close)
