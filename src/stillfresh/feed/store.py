"""The feed's file as the SQLite store sees it: one kind, whose values are the seed's rows (F17).

Leases, cooldowns and times are the store's own, in tables of ours beside the seed's. A copy stands
for a meta row: what it brought is in the rows, which are written in the publishing transaction.
Another implementation knows no leases: a lease notes the meta row's time, and is void when that
has changed or gone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Final

import apsw
import msgspec

from stillfresh.clock import Clock
from stillfresh.errors import NotOpen, StoreError
from stillfresh.feed.file import usable
from stillfresh.feed.model import FeedCacheUpdated, FeedStats, canonical
from stillfresh.feed.rows import Writes
from stillfresh.feed.rules import DAY, Fetched
from stillfresh.feed.schema import FEED, TIMES_TABLE
from stillfresh.stores.contract import Copy, Generations, Lease, Record
from stillfresh.stores.sqlite.format import Format
from stillfresh.stores.sqlite.schema import TIMES, Statements, statements_on
from stillfresh.stores.sqlite.steps import KindTables, Layout, own_tables
from stillfresh.stores.sqlite.store import SqliteStore

KIND: Final = "feed"
"""The one kind there is: its ids are the feed's cache keys."""
IN_ROWS: Final = b"rows"
"""What the store says instead of a value: look into the rows."""

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
        t.failures, t.retry_at, t.error, 0, {value}
"""
_IDS: Final = """
    SELECT cache_key AS id FROM feed_cache_meta WHERE cache_key >= ?1 {end}
    UNION SELECT id FROM {times} WHERE id >= ?1 {more}
"""
_LEASE: Final = """
    INSERT INTO {times}(id, lease_token, lease_expires_at, last_updated_at)
    VALUES (?1, ?2, ?3, (SELECT last_fetched FROM feed_cache_meta WHERE cache_key = ?1))
    ON CONFLICT(id) DO UPDATE SET lease_token = excluded.lease_token,
        lease_expires_at = excluded.lease_expires_at, last_updated_at = excluded.last_updated_at
"""
_UNTOUCHED: Final = """
    AND last_updated_at IS (SELECT last_fetched FROM feed_cache_meta WHERE cache_key = id)
"""
# The end of a lease stays: it tells when a failure was noted, should the clock be set back.
_RELEASE: Final = "UPDATE {times} SET lease_token = NULL WHERE id = ? AND lease_token = ?"
# All at once, whatever the slice: a feed has few lists.
_COUNT: Final = """
    SELECT (SELECT count(*) FROM feed_cache_meta), (SELECT count(*) FROM {times}
        WHERE lease_token IS NOT NULL AND lease_expires_at > ?1), 0, ?2 || ?3
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


def _statements(fresh_for: float, stale_for: float) -> Statements:
    own, times = statements_on("", TIMES_TABLE), TIMES_TABLE
    record = _RECORD.format(
        fresh_for=float(fresh_for), stale_for=float(stale_for), value=f"x'{IN_ROWS.hex()}'"
    )
    joined = _FROM.format(times=times)
    ids = partial(_IDS.format, times=times)
    between = ids(end="AND cache_key <= ?2", more="AND id <= ?2")
    return replace(
        own,
        create=TIMES.format(times=times),
        point=f"{record} FROM (SELECT ?2 AS id, ?1) k {joined} {_THERE}",
        many_of=f"WITH k(id, known) AS (VALUES {{asked}}) {record}, k.id, k.known FROM k {joined} "
        + _THERE,
        stretch=f"SELECT max(id) FROM ({ids(end='', more='')} ORDER BY id LIMIT ?2)",  # noqa: S608
        listed=f"{record}, k.id, NULL FROM ({between}) k {joined} "
        "WHERE instr(k.id, ?3) ORDER BY k.id LIMIT ?4",
        lease=_LEASE.format(times=times),
        publish=own.publish + _UNTOUCHED,
        renew=own.renew + _UNTOUCHED,
        release=_RELEASE.format(times=times),
        count=_COUNT.format(times=times),
    )


class FeedTables(KindTables):
    """The hook: what a publication, an invalidation and an eviction do to the seed's tables."""

    def __init__(self, fresh_for: float, keep_for: float, clock: Clock = time.time) -> None:
        # Rows are served until they are evicted, which happens once a day.
        super().__init__(KIND, _statements(fresh_for, keep_for + DAY))
        self.fresh_for = fresh_for
        self.keep_for = keep_for
        self._clock = clock
        self.news: dict[str, bool] = {}
        """By generation, until the publication is told of: whether it changed anything."""

    def are_made(self, connection: apsw.Connection) -> bool:
        """With the file, or beside it where it cannot be written."""
        del connection
        return True

    def write(self, connection: apsw.Connection, copies: Mapping[str, Copy]) -> None:
        """Rows and meta row, in the transaction that has checked the lease."""
        for key, copy in copies.items():
            fetched = fetched_of(copy.value)  # type: ignore[arg-type]  # bytes, of a loader
            writes = Writes(connection, copy.fetched_at, self.fresh_for, self._clock())
            with usable():
                self.news[copy.generation] = writes.store(key, fetched)

    def invalidate(self, connection: apsw.Connection, ids: Sequence[str]) -> None:
        Writes(connection).forget(ids)

    def delete(self, connection: apsw.Connection, ids: Sequence[str]) -> None:
        Writes(connection).erase(ids)

    def evict(
        self, connection: apsw.Connection, start: str = "", *, before: float, size: int
    ) -> tuple[int, str | None]:
        """F11: how many rows were dropped; None: nothing is left to drop."""
        dropped = 0
        for sql in _EVICT:
            connection.execute(sql, (before - self.keep_for, size - dropped))
            dropped += connection.changes()
        if dropped == size:
            return dropped, start
        connection.execute(_EVICT_NOTES, (before - self.fresh_for,))
        connection.execute(_EVICT_TIMES, (1000 * (before - self.fresh_for),))
        return dropped, None


def layout(tables: FeedTables, format_: Format = FEED) -> Layout:
    """A feed's file has one kind; of any other there is nothing."""
    return Layout(
        format_, lambda kind: tables if kind == KIND else own_tables(kind), lambda _: [KIND]
    )


def counted(connection: apsw.Connection, *, before: float, skipped: int) -> FeedStats:
    topics, comments, expired, size = connection.execute(_FOUND, (before,)).get
    return FeedStats(topics, comments or 0, expired, size, skipped)


fetched_of: Final = msgspec.json.Decoder(Fetched).decode
"""What a network says in JSON may have numbers that msgpack cannot hold (F15)."""


class FeedStore(SqliteStore):
    """Belongs to one FeedEngine, which it tells of what was published."""

    def __init__(
        self,
        path: str | PathLike[str],
        tables: FeedTables,
        *,
        clock: Clock,
        tell: Callable[[FeedCacheUpdated], None] = lambda _: None,
        overtaken: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(path, clock=clock, layout=layout(tables))
        self._feed = tables
        self._tell = tell
        self._overtaken = overtaken

    async def publish(self, kind: str, copies: Mapping[str, tuple[Lease, Copy]]) -> set[str]:
        """F7: stored, then told. F8: a full disk does not hide that a lease was lost."""
        try:
            superseded = await super().publish(kind, copies)
        except StoreError:
            if not all(map(self._is_lost, copies)):
                raise
            superseded = set(copies)
        finally:
            news = {
                key: self._feed.news.pop(it.generation, False) for key, (_, it) in copies.items()
            }
        for key, changed in news.items():
            if key in superseded:
                self._overtaken(key)
            else:
                self._tell(FeedCacheUpdated(key, changed))
        return superseded

    def _is_lost(self, key: str) -> bool:
        with suppress(StoreError, NotOpen):
            return key not in (found := self.read_now(KIND, [key])) or not found[key].held_until
        return False

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        """F5: by any spelling of a category, as everywhere."""
        del lag
        keys = {canonical(id_): id_ for id_ in ids} if kind == KIND else {}
        found = self.read_now(KIND, list(keys), known)
        return {keys[key]: record for key, record in found.items()}

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        """The rows are served on, as stale."""
        if kind == KIND:
            await super().invalidate(kind, [canonical(key) for key in ids], soft=soft)
