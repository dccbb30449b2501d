"""A feed's file for operators: looked into and left as it is, or opened to be changed.

The kind is `feed`, its ids are the cache keys. The commands do not know the settings of the program
that the file belongs to: the seed's five minutes and thirty days count.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Final

import apsw
from msgspec.structs import replace

from stillfresh.errors import ConfigError
from stillfresh.freshness import Policy
from stillfresh.stores.contract import (
    UNREAD,
    Copy,
    Generations,
    Mark,
    Record,
    StoredEntry,
    StoreStats,
)
from stillfresh.stores.sqlite import FAILED, Format, SqliteView, connect_viewer
from stillfresh.systems.feed.cache import FeedCache
from stillfresh.systems.feed.model import (
    FEED_CACHE_EVICT_SECONDS,
    FEED_CACHE_TTL_SECONDS,
    canonical,
    index_of,
)
from stillfresh.systems.feed.reading import FeedReader
from stillfresh.systems.feed.schema import FEED, TABLES, add_missing_tables
from stillfresh.systems.feed.store import KIND, FeedStore, FeedTables, count_rows, layout

TERMS: Final = Policy(FEED_CACHE_TTL_SECONDS, FEED_CACHE_EVICT_SECONDS)


def _holds_feed(connection: apsw.Connection, path: Path) -> bool:
    """A file of another implementation lacks our own tables."""
    FEED.is_begun(connection, path)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    return names >= TABLES.keys()


def is_feed(path: str) -> bool:
    """True for a feed's file, by its tables; False if it is not a file, or not readable."""
    if not Path(path).is_file():
        return False
    try:
        with closing(connect_viewer(Path(path))) as connection:
            return _holds_feed(connection, Path(path))
    except (ConfigError, *FAILED):
        return False


class FeedFileStats(StoreStats, frozen=True, kw_only=True):
    """The counts of a store, and those of a feed."""

    topics: int
    comments: int


class FeedView(SqliteView):
    """Reads on the caller's thread; changes nothing in the file."""

    def __init__(self, path: str | Path) -> None:
        tables = FeedTables(FEED_CACHE_TTL_SECONDS, FEED_CACHE_EVICT_SECONDS)
        super().__init__(path, layout=layout(tables, Format((0,), FEED.begin, _holds_feed)))

    async def open(self) -> None:
        await super().open()
        self.look(add_missing_tables)
        self._rows = self.look(FeedReader)

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        keys = {canonical(id_): id_ for id_ in ids} if kind == KIND else {}
        stored = await super().read(KIND, list(keys), known, lag)
        records = {
            id_: self._with_rows(key, stored.get(key, Record())) for key, id_ in keys.items()
        }
        return {id_: record for id_, record in records.items() if record != Record()}

    async def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[StoredEntry]:
        entries = await super().entries(kind, search, after, limit)
        return [replace(entry, record=self._with_rows(entry.id, entry.record)) for entry in entries]

    async def stats(self) -> StoreStats:
        store = await super().stats()
        now = self._clock()
        count = partial(count_rows, before=now - FEED_CACHE_EVICT_SECONDS, skipped=0)
        feed = self.look(count)
        return FeedFileStats(
            store.copies, store.leases, store.bytes, topics=feed.topics, comments=feed.comments
        )

    def _with_rows(self, key: str, record: Record) -> Record:
        """The record, completed by the rows: there are some, none, or some that cannot be read."""
        copy = record.copy
        now = self._clock()
        is_list = index_of(key) is not None
        if copy is not None and copy.fetched_at > now:
            # In a feed, a time in the future is stale. The engine would forgive a few seconds.
            copy = replace(copy, mark=Mark.SOFT)
        if copy is None or not is_list:
            rows = self.look(lambda _: self._rows.find_at_once(key, now))
            if copy is None and rows.cached_at is not None:
                copy = Copy("", float(rows.cached_at), TERMS, UNREAD, Mark.SOFT)
            elif copy is not None and not rows.is_hit:
                copy = replace(copy, mark=Mark.HARD)
            elif copy is not None and rows.cached_at is None:
                copy = replace(copy, value=None)
        return replace(record, copy=copy)


@asynccontextmanager
async def edited(path: str) -> AsyncIterator[FeedStore]:
    """Open a feed to change it. Evicts nothing: its own program may keep rows for longer."""
    cache = FeedCache(
        Path(path),
        clock=time.time,
        fresh_for=FEED_CACHE_TTL_SECONDS,
        keep_for=FEED_CACHE_EVICT_SECONDS,
    )
    with cache:
        yield FeedStore(cache, clock=cache.clock)
