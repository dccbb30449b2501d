"""The feed's file as the SQLite store sees it: one kind, whose values are the seed's rows.

Leases, cooldowns and times are in our own tables beside the seed's. A copy stands for a meta row;
its data are the rows, which are written in the publishing transaction. Other implementations know
no leases: a lease notes the meta row's time, and is void if that time has changed or is gone.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import apsw

from stillfresh.bounded import BoundedDict
from stillfresh.clock import Clock
from stillfresh.engine.loader import looked_at
from stillfresh.errors import ConfigError, NotOpen, StoreError
from stillfresh.stores import sqlite
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Grant,
    LateTags,
    Lease,
    Put,
    PutResult,
    Record,
)
from stillfresh.systems.feed.model import FeedStats, canonical
from stillfresh.systems.feed.reading import FoundRows
from stillfresh.systems.feed.rows import Writes
from stillfresh.systems.feed.rules import DAY, Fetched
from stillfresh.systems.feed.schema import FEED, TIMES_TABLE

if TYPE_CHECKING:
    from stillfresh.systems.feed.cache import FeedCache

T = TypeVar("T")

logger = logging.getLogger(__name__)

KIND: Final = "feed"
"""The one kind there is: its ids are the feed's cache keys."""
IN_ROWS: Final = b"rows"

_FROM: Final = """
    LEFT JOIN feed_cache_meta m ON m.cache_key = k.id LEFT JOIN {times} t ON t.id = k.id
"""
_THERE: Final = "WHERE m.cache_key IS NOT NULL OR t.id IS NOT NULL"
_RECORD: Final = """
    SELECT CASE WHEN m.cache_key IS NOT NULL
            THEN CAST(m.last_fetched AS INTEGER) || ':' || coalesce(t.generation, '') END,
        CAST(m.last_fetched AS INTEGER) * 1000.0, {fresh_for}, {stale_for}, 0.0, 0,
        CASE WHEN t.lease_token IS NOT NULL AND t.last_updated_at IS m.last_fetched
            THEN t.lease_expires_at END,
        t.failures, t.retry_at, t.error, 0, {value}, NULL
"""
_IDS: Final = """
    SELECT cache_key AS id FROM feed_cache_meta WHERE cache_key >= ?1 %s
    UNION SELECT id FROM {times} WHERE id >= ?1 %s
"""
_UNTOUCHED: Final = """
    AND last_updated_at IS (SELECT last_fetched FROM feed_cache_meta WHERE cache_key = id)
"""
_HOLDS: Final = """
    SELECT 1 FROM stillfresh_feed_times t LEFT JOIN feed_cache_meta m ON m.cache_key = t.id
    WHERE id = ? AND lease_token = ? AND lease_expires_at > ? AND last_updated_at IS last_fetched
"""
_EVICT: Final = (
    """DELETE FROM feed_topics WHERE topic_uuid IN
        (SELECT topic_uuid FROM feed_topics WHERE cached_at < ? LIMIT ?)""",
    """DELETE FROM feed_comments WHERE topic_uuid IN
        (SELECT topic_uuid FROM feed_comments WHERE cached_at < ? LIMIT ?)""",
    """DELETE FROM feed_cache_meta WHERE cache_key IN
        (SELECT cache_key FROM feed_cache_meta WHERE last_fetched < ? LIMIT ?)""",
)
_FOUND: Final = """
    SELECT (SELECT count(*) FROM feed_topics), (SELECT sum(comment_count) FROM feed_comments),
        (SELECT count(*) FROM feed_topics WHERE cached_at < ?1)
        + (SELECT count(*) FROM feed_comments WHERE cached_at < ?1)
        + (SELECT count(*) FROM feed_cache_meta WHERE last_fetched < ?1),
        (SELECT page_count FROM pragma_page_count()) * (SELECT page_size FROM pragma_page_size())
"""
_EVICT_NOTES: Final = "DELETE FROM stillfresh_writes WHERE written_at < ?"
_EVICT_TIMES: Final = """
    DELETE FROM stillfresh_feed_times
    WHERE max(coalesce(lease_expires_at, 0), coalesce(retry_at, 0)) < ?
        AND id NOT IN (SELECT cache_key FROM feed_cache_meta)
"""


class FeedStatements(sqlite.Statements):
    """The statements of a feed's only kind, whose copies are meta rows."""

    create = sqlite.TIMES
    point = f"{_RECORD} FROM (SELECT ?2 AS id, ?1) k {_FROM} {_THERE}"
    many_of = (
        f"WITH k(id, known) AS (VALUES {{asked}}) {_RECORD}, k.id, k.known FROM k {_FROM} {_THERE}"
    )
    stretch = f"SELECT max(id) FROM ({_IDS % ('', '')} ORDER BY id LIMIT ?2)"  # noqa: S608
    listed = (
        f"{_RECORD}, k.id, NULL FROM ({_IDS % ('AND cache_key <= ?2', 'AND id <= ?2')}) k {_FROM} "
        "WHERE instr(k.id, ?3) ORDER BY k.id LIMIT ?4"
    )
    lease = """
        INSERT INTO {times}(id, lease_token, lease_expires_at, last_updated_at)
        VALUES (?1, ?2, ?3, (SELECT last_fetched FROM feed_cache_meta WHERE cache_key = ?1))
        ON CONFLICT(id) DO UPDATE SET lease_token = excluded.lease_token,
            lease_expires_at = excluded.lease_expires_at, last_updated_at = excluded.last_updated_at
    """
    lease_free = "DELETE FROM {times} WHERE FALSE AND ?4"  # the copy is the meta row: look at it
    publish = sqlite.Statements.publish + _UNTOUCHED
    renew = sqlite.Statements.renew + _UNTOUCHED
    # The end of a lease stays: it shows when a failure was noted, if the clock is set back.
    release = "UPDATE {times} SET lease_token = NULL WHERE id = ? AND lease_token = ?"
    # All at once, not in slices: a feed has few lists.
    count = """
        SELECT (SELECT count(*) FROM feed_cache_meta), (SELECT count(*) FROM {times}
            WHERE lease_token IS NOT NULL AND lease_expires_at > ?1), 0, ?2 || ?3
    """


class FeedTables(sqlite.KindTables):
    """Writes publications, invalidations and evictions to the seed's tables."""

    def __init__(self, fresh_for: float, keep_for: float, clock: Clock = time.time) -> None:
        # Rows are served until they are evicted, which happens once a day.
        sql = FeedStatements(
            "",
            TIMES_TABLE,
            fresh_for=float(fresh_for),
            stale_for=float(keep_for + DAY),
            value=f"x'{IN_ROWS.hex()}'",
        )
        super().__init__(KIND, sql)
        self.fresh_for = fresh_for
        self.keep_for = keep_for
        self._clock = clock

    def are_made(self, connection: apsw.Connection) -> bool:
        """Always True: they are made with the file, or beside one that cannot be written."""
        del connection
        return True

    def write_values(self, connection: apsw.Connection, copies: Mapping[str, Copy]) -> None:
        """Write rows and meta row in the transaction that has checked the lease."""
        for key, copy in copies.items():
            writes = Writes(connection, copy.fetched_at, self.fresh_for, self._clock())
            if isinstance(copy.value, InRows):
                copy.value.is_news = writes.store(key, copy.value.fetched)

    def invalidate_values(self, connection: apsw.Connection, ids: Sequence[str]) -> None:
        Writes(connection).forget(ids)

    def delete_values(self, connection: apsw.Connection, ids: Sequence[str]) -> None:
        Writes(connection).erase(ids)

    def evict(
        self, connection: apsw.Connection, start: str = "", *, before: float, size: int
    ) -> tuple[int, str | None]:
        """How many rows were dropped, and where to go on; None: nothing is left to drop."""
        dropped = 0
        for sql in _EVICT:
            connection.execute(sql, (before - self.keep_for, size - dropped))
            dropped += connection.changes()
        if dropped == size:
            return dropped, start
        connection.execute(_EVICT_NOTES, (before - self.fresh_for,))
        connection.execute(_EVICT_TIMES, (1000 * (before - self.fresh_for),))
        return dropped, None


def layout(tables: FeedTables, format_: sqlite.Format = FEED) -> sqlite.Layout:
    """The layout of a feed's file, which has one kind."""
    return sqlite.Layout(
        format_, lambda kind: tables if kind == KIND else sqlite.own_tables(kind), lambda _: [KIND]
    )


def count_rows(connection: apsw.Connection, *, before: float, skipped: int) -> FeedStats:
    """Count the rows of a feed's file; rows stored before `before` have expired."""
    topics, comments, expired, size = connection.execute(_FOUND, (before,)).get
    return FeedStats(topics, comments or 0, expired, size, skipped)


class InRows(bytes):
    """The store's value of every key: the data are in the rows.

    For a load it carries the fetched data, which the publication writes to the rows.
    """

    fetched: Fetched = Fetched()
    is_news: bool = False

    @classmethod
    def of(cls, fetched: Fetched) -> "InRows":
        value = cls(IN_ROWS)
        value.fetched = fetched
        return value


class AsItCame:
    """Passes values through: encoding a long list would block the loop."""

    @staticmethod
    def encode(value: bytes) -> bytes:
        return value

    decode = encode


class FeedStore(sqlite.SqliteStore):
    """The file on the loop of one FeedEngine; it reports publications by `tell`."""

    def __init__(
        self,
        cache: "FeedCache",
        *,
        clock: Clock,
        tell: Callable[[str, bool | None], None] = lambda *_: None,
    ) -> None:
        super().__init__(cache.path, clock=clock, layout=layout(cache.tables))
        self._cache = cache
        self._tell = tell
        self._room = asyncio.Semaphore(sqlite.MAX_QUEUED)
        self._leases: BoundedDict[str, Lease] = BoundedDict(sqlite.MAX_QUEUED)
        self._building: dict[tuple[str, bool], asyncio.Event] = {}
        """Long lists that are being built, or wait to be."""
        self._alone = asyncio.Lock()

    async def open(self) -> None:
        self._cache.check_open()

    async def close(self) -> None:
        """Does nothing: the program that opened the file closes it."""

    async def run(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> T:
        """Run a job on the file's writer; it is done even if its caller gives up."""
        await self._room.acquire()
        try:
            done = asyncio.wrap_future(self._cache.submit(job, writes=writes, urgent=urgent))
        except NotOpen as exc:
            self._room.release()
            raise StoreError(str(exc)) from exc
        done.add_done_callback(lambda _: self._room.release())
        done.add_done_callback(looked_at)
        return await asyncio.shield(done)

    async def find(self, key: str, now: float, *, raw: bool = False) -> FoundRows[Any] | None:
        """The rows of a key; None if the file cannot be read: then upstream is asked."""
        try:
            while (building := self._building.get((key, raw))) is not None:
                await building.wait()  # then from memory, or what was written since
            with self._cache.reading() as reader:
                rows = next(reader.find(key, now, raw=raw))
            if rows is not None:
                return rows
            return await self._build(key, now, raw=raw)  # a long list: this was its first slice
        except StoreError as exc:
            logger.warning("%s: the feed cache could not be read: %s", key, exc)
            return None

    async def _build(self, key: str, now: float, *, raw: bool) -> FoundRows[Any] | None:
        """Build one long list at a time, because each needs a connection and memory.

        The loop has a turn between two slices.
        """
        rows = None
        building = asyncio.Event()
        self._building[key, raw] = building
        try:
            async with self._alone:
                with (
                    self._cache.reading() as reader,
                    closing(reader.find(key, now, raw=raw)) as slices,
                ):
                    for each in slices:
                        rows = each  # the last one is the list
                        await asyncio.sleep(0)
                building.set()  # callers that wait for this list are served before the next
        finally:
            del self._building[key, raw]
            building.set()
        return rows

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        """The records by id. Any spelling of a category is accepted."""
        del known
        point = self._tables(KIND).sql.point
        keys = ids if kind == KIND else ()
        with self._cache.reading() as reader:
            rows = {key: reader.execute(point, (None, canonical(key))).get for key in keys}
        return {id_: sqlite.record_of(row, None) for id_, row in rows.items() if row is not None}

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        for ask in asks:
            self._leases.pop(ask.id, None)
        grants = await super().acquire(kind, asks, lease_for)
        for key, grant in grants.items():
            if isinstance(grant, Lease):
                self._leases.note(key, grant)
        return grants

    async def store_part(self, key: str, fetched: Fetched, at: float) -> bool:
        """Store the days that succeeded, without a meta row. False if the lease is lost."""
        if (lease := self._leases.get(key)) is None:
            return True

        def store(file: apsw.Connection) -> bool | None:
            now = self._clock()
            if file.execute(_HOLDS, (key, lease.token, sqlite.at_most(now))).get is None:
                return None
            return Writes(file, at, self._cache.fresh_for, now).store(key, fetched)

        is_news = await self.run(store, urgent=False)
        if is_news is not None:
            self._tell(key, is_news)
        return is_news is not None

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        """Store, then report. A lost lease is noticed even if the disk is full."""
        try:
            superseded = await super().publish(kind, copies, tags)
        except StoreError:
            if not all(self._is_lost(lease) for lease, _ in copies.values()):
                raise
            superseded = set(copies)
        for key, (_, copy) in copies.items():
            is_news = isinstance(copy.value, InRows) and copy.value.is_news
            self._tell(key, None if key in superseded else is_news)
        return superseded

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        """Refused: a copy stands for rows, and a caller of `put` has none."""
        del kind, puts
        raise ConfigError(
            "a feed's values are rows: store them with put_topic(), put_topics() or "
            "put_comments() of its FeedCache"
        )

    def _is_lost(self, lease: Lease) -> bool:
        with suppress(StoreError, NotOpen), self._cache.reading() as reader:
            return reader.execute(_HOLDS, (lease.id, lease.token, 0)).get is None  # 0: at any time
        return False

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        """The rows are served on, as stale."""
        if kind == KIND:
            await super().invalidate(kind, [canonical(key) for key in ids], soft=soft)
