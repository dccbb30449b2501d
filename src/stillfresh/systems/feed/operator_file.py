"""A feed's file for operators: looked into and left as it is, or opened to be changed.

The kind is `feed`, its ids are the cache keys. The commands do not know the settings of the program
that the file belongs to: the seed's five minutes and thirty days count.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Final, TypeVar

import apsw
from msgspec.structs import replace

from stillfresh.errors import ConfigError, NotOpen
from stillfresh.freshness import Policy
from stillfresh.stores import ListsEntries, WrappedStore
from stillfresh.stores.contract import (
    UNREAD,
    After,
    Copy,
    Generations,
    Mark,
    Record,
    StoredEntry,
    StoreStats,
)
from stillfresh.stores.sqlite import FAILED, connect_viewer, explained, open_viewer
from stillfresh.systems.feed.cache import FeedCache
from stillfresh.systems.feed.model import (
    FEED_CACHE_EVICT_SECONDS,
    FEED_CACHE_TTL_SECONDS,
    canonical,
    index_of,
)
from stillfresh.systems.feed.reading import FeedReader, count_rows
from stillfresh.systems.feed.schema import FEED, TABLES, add_missing_tables
from stillfresh.systems.feed.store import KIND, FeedStore

T = TypeVar("T")

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


class ViewedFile:
    """A feed's file that is only looked at, on the caller's thread."""

    fresh_for: float = FEED_CACHE_TTL_SECONDS
    keep_for: float = FEED_CACHE_EVICT_SECONDS

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader: FeedReader | None = None

    def open(self) -> None:
        connection = open_viewer(self.path, with_fields(FEED, is_begun=_holds_feed))
        add_missing_tables(connection)
        self._reader = FeedReader(connection)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.connection.close()
            self._reader = None

    def check_open(self) -> None:
        if self._reader is None:
            raise NotOpen("this view is closed; open it again with open()")

    @contextmanager
    def reading(self) -> Iterator[FeedReader]:
        if self._reader is None:
            raise NotOpen("this view is closed; open it again with open()")
        try:
            yield self._reader
        except FAILED as exc:
            raise explained(self.path, exc) from exc

    def submit(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> "Future[T]":
        """Run a job at once. One that writes fails: the connection cannot."""
        del writes, urgent
        done: Future[T] = Future()
        with self.reading() as reader:
            done.set_result(job(reader.connection))
        return done


class FeedView(WrappedStore):
    """A feed's file as operators see it: keys are shown as the rows complete them."""

    def __init__(self, path: str | Path) -> None:
        self._file = ViewedFile(Path(path).absolute())
        super().__init__(FeedStore(self._file, clock=time.time))

    async def open(self) -> None:
        self._file.open()

    async def close(self) -> None:
        self._file.close()

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        stored = await self.inner.read(kind, ids, known, lag)
        keys = {id_: canonical(id_) for id_ in ids} if kind == KIND else {}
        records = {
            id_: self._with_rows(key, stored.get(id_, Record())) for id_, key in keys.items()
        }
        return {id_: record for id_, record in records.items() if record != Record()}

    async def entries(
        self, kind: str | None = None, search: str = "", after: After = None, limit: int = 100
    ) -> list[StoredEntry]:
        entries = await super().entries(kind, search, after, limit)
        return [replace(entry, record=self._with_rows(entry.id, entry.record)) for entry in entries]

    walk = ListsEntries.walk  # through this view's entries

    async def stats(self) -> StoreStats:
        store = await super().stats()
        before = time.time() - FEED_CACHE_EVICT_SECONDS
        with self._file.reading() as reader:
            feed = count_rows(reader.connection, before=before, skipped=0)
        return FeedFileStats(
            store.copies, store.leases, store.bytes, topics=feed.topics, comments=feed.comments
        )

    def _with_rows(self, key: str, record: Record) -> Record:
        """The record, completed by the rows: there are some, none, or some that cannot be read."""
        copy = record.copy
        if copy is not None and index_of(key) is not None:
            return record  # a list that was fetched is a hit, whatever rows it has
        with self._file.reading() as reader:
            rows = reader.find_at_once(key, time.time())
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
