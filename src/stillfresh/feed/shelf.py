"""Reading the feed: rows to typed topics, with memory in front that is never out of date (F4, F13).

SQLite's data version tells whether anything at all was committed since; while it is the same, so
is every list. When it is another, rows are read again, and those that are the same byte by byte
need no decoding. A row that cannot be decoded is skipped and counted (F12).
"""

from collections.abc import Iterable
from typing import Any, Final, Generic, TypeAlias, TypeVar

import apsw

from stillfresh.feed.keys import (
    Index,
    comments_key,
    index_of,
    spelled,
    subject,
    topic_key,
)
from stillfresh.feed.model import Comment, FeedJson, Freshness, Topic
from stillfresh.feed.records import Records
from stillfresh.feed.rows import UNREADABLE
from stillfresh.feed.rules import DAY, window

T = TypeVar("T")
Row: TypeAlias = tuple[bytes, bytes, int, int]
"""uuid, JSON, created_at, cached_at."""

MAX_TOPICS: Final = 2_000
"""Topics kept decoded, with their bytes; of 5 KB each that is some 20 MB."""
INFINITY: Final = float("inf")

# Cast, since SQLite lets another implementation put any type into any column.
_META: Final = "SELECT CAST(last_fetched AS INTEGER) FROM feed_cache_meta WHERE cache_key = ?"
_LIST: Final = """
    SELECT coalesce(CAST(topic_uuid AS BLOB), x''), CAST(topic_json AS BLOB),
        CAST(created_at AS INTEGER), CAST(cached_at AS INTEGER)
    FROM feed_topics
    WHERE created_at >= ? {more}AND NOT coalesce(deleted, 0) ORDER BY created_at DESC
"""
_ALL: Final = _LIST.format(more="")
_SPELLINGS: Final = """
    WITH RECURSIVE spelling(name) AS (
        SELECT min(category_id) FROM feed_topics
        UNION ALL
        SELECT (SELECT min(category_id) FROM feed_topics WHERE category_id > name) FROM spelling
        WHERE name IS NOT NULL
    )
    SELECT CAST(name AS BLOB) FROM spelling WHERE name IS NOT NULL
"""
_TOPIC: Final = """
    SELECT CAST(t.topic_json AS BLOB), CAST(t.cached_at AS INTEGER),
        CAST(m.last_fetched AS INTEGER), w.written_at
    FROM (SELECT ?1 AS uuid, ?2 AS key)
    LEFT JOIN feed_topics t ON t.topic_uuid = uuid
    LEFT JOIN feed_cache_meta m ON m.cache_key = key
    LEFT JOIN stillfresh_writes w ON w.topic_uuid = uuid AND w.comment_uuid = '' AND w.deleted
"""
_COMMENTS: Final = """
    SELECT CAST(c.comments_json AS BLOB), CAST(c.cached_at AS INTEGER),
        CAST(m.last_fetched AS INTEGER), w.written_at
    FROM (SELECT ?1 AS uuid, ?2 AS key)
    LEFT JOIN feed_comments c ON c.topic_uuid = uuid
    LEFT JOIN feed_cache_meta m ON m.cache_key = key
    LEFT JOIN stillfresh_writes w ON w.topic_uuid = uuid AND w.comment_uuid = '' AND w.deleted
"""
# Not strict: another implementation may write 0 and 1 for false and true.
_topic: Final = Records(Topic, strict=False).one
_comments: Final = Records(Comment, strict=False).all


class Found(Generic[T]):
    """What the file has under one key, and since when."""

    __slots__ = ("broken", "cached_at", "deleted_at", "last_fetched", "value")

    def __init__(self, value: T, last_fetched: int | None, cached_at: int | None) -> None:
        self.value = value
        self.last_fetched = last_fetched
        self.cached_at = cached_at
        """When the oldest of its rows was stored; None if there are none."""
        self.broken: frozenset[bytes] = frozenset()
        """Rows that cannot be read."""
        self.deleted_at: float | None = None
        """When it was deleted here."""

    @property
    def is_hit(self) -> bool:
        """F6: rows, or a meta row: an empty feed that was fetched is a hit."""
        return self.cached_at is not None or self.last_fetched is not None

    @property
    def fetched_at(self) -> float:
        """When upstream was asked, as far as is known."""
        known = (self.last_fetched, self.cached_at, self.deleted_at)
        return float(next((moment for moment in known if moment is not None), 0))


class Listed(Found[list[Topic]]):
    """A list as it was at `read_at`; until `until` none of its topics grows too old for it."""

    __slots__ = ("json", "read_at", "texts", "until", "version")

    def __init__(self, last_fetched: int | None, read_at: float, *, raw: bool) -> None:
        super().__init__([], last_fetched, None)
        self.texts: list[bytes] | None = [] if raw else None
        """The topics' bytes, if they were asked for."""
        self.read_at = read_at
        self.until = INFINITY
        self.version: int | None = None
        self.json: FeedJson | None = None

    def holds(self, version: int, now: float, *, raw: bool) -> bool:
        return (
            self.version == version
            and self.read_at <= now <= self.until
            and not (raw and self.texts is None)
        )

    def as_json(self, freshness: Freshness) -> FeedJson:
        """F13: one array from the bytes of its rows, made once."""
        if self.json is None or self.json.freshness != freshness:
            texts = list(self.texts or ()) or [b""]
            texts[0] = b"[" + texts[0]
            texts[-1] += b"]"
            self.json = FeedJson(b",".join(texts), freshness)
        return self.json


class Shelf:
    """One connection's reads, and its memory of them. Used by one thread at a time."""

    def __init__(self) -> None:
        self._lists: dict[Index, Listed] = {}
        self._kept = 0
        self._known: dict[bytes, tuple[Topic | None, bytes | None]] = {}
        self.skipped = 0

    def find(
        self, connection: apsw.Connection, key: str, now: float, *, raw: bool = False
    ) -> Found[Any]:
        """Whatever a cache key names; `raw`: of a list, the bytes as well."""
        if (index := index_of(key)) is not None:
            return self.listed(connection, index, now, raw=raw)
        uuid = subject(key)
        if key == comments_key(uuid):
            return self.comments(connection, uuid)
        return self.topic(connection, uuid)

    def listed(
        self, connection: apsw.Connection, index: Index, now: float, *, raw: bool = False
    ) -> Listed:
        version: int = connection.execute("PRAGMA data_version").get
        old = self._lists.get(index)
        if old is not None and old.holds(version, now, raw=raw):
            return old
        found = self._read(connection, index, now, raw=raw)
        found.version = version
        if raw and old is not None and old.texts == found.texts:
            found.json = old.json
        self._keep(index, found)
        return found

    def _keep(self, index: Index, found: Listed) -> None:
        if (old := self._lists.pop(index, None)) is not None:
            self._kept -= len(old.value) + 1
        size = len(found.value) + 1
        if self._kept + size > MAX_TOPICS:
            self._lists.clear()
            self._kept = 0
        self._lists[index] = found  # one list, however long, is always kept
        self._kept += size

    def _read(self, connection: apsw.Connection, index: Index, now: float, *, raw: bool) -> Listed:
        """The meta row first: if both change meanwhile, the topics are newer than they say."""
        last_fetched = self.last_fetched(connection, index.key)
        sql = _ALL
        bindings: list[float | str] = [window(index.days, now).since]
        if index.category is not None:
            names = _spellings(connection, index.category)
            sql = _LIST.format(more=f"AND category_id IN ({', '.join('?' * len(names))}) ")
            bindings += names
        found = Listed(last_fetched, now, raw=raw)
        if not self._fill(found, connection.execute(sql, bindings)):
            # F4: ties by uuid. Only now, since SQLite copies every row to sort the few that tie.
            found = Listed(last_fetched, now, raw=raw)
            self._fill(found, connection.execute(f"{sql}, topic_uuid", bindings))
        if index.days > 0:
            found.until += index.days * DAY
        return found

    def _fill(self, found: Listed, rows: Iterable[Row]) -> bool:  # noqa: C901 (one hot loop)
        """The hot loop of a read: known bytes are known topics. False if ties are in disorder."""
        known, topics, texts, broken = self._known, found.value, found.texts, []
        last, last_uuid, oldest, is_ordered = INFINITY, b"", INFINITY, True
        for uuid, text, created_at, cached_at in rows:
            kept = known.get(uuid)
            if kept is None:  # bytes are kept of what is read a second time, or asked for
                kept = known[uuid] = (self._decoded(text), None if texts is None else text)
            elif kept[1] != text:
                kept = known[uuid] = (self._decoded(text), text)
            topic = kept[0]
            if topic is None:
                broken.append(text)
                continue
            topics.append(topic)
            if texts is not None:
                texts.append(text if kept[1] is None else kept[1])
            if created_at == last and uuid < last_uuid:
                is_ordered = False
            last, last_uuid = created_at, uuid
            if cached_at < oldest:  # noqa: PLR1730 (a call of min() for every row)
                oldest = cached_at
        found.until, found.broken = last, frozenset(broken)
        found.cached_at = int(oldest) if topics else None
        if len(known) > MAX_TOPICS:
            known.clear()
        return is_ordered

    def _decoded(self, text: bytes) -> Topic | None:
        try:
            return _topic(text)
        except UNREADABLE:
            self.skipped += 1
            return None

    def last_fetched(self, connection: apsw.Connection, key: str) -> int | None:
        found: int | None = connection.execute(_META, (key,)).get
        return found

    def topic(self, connection: apsw.Connection, uuid: str) -> Found[Topic | None]:
        row = connection.execute(_TOPIC, (uuid, topic_key(uuid))).get
        topic = None if row[0] is None else self._decoded(row[0])
        if topic is not None and topic.topic_uuid != uuid:
            topic = None
        found = Found(topic, row[2], None if topic is None else row[1])
        found.deleted_at = row[3]
        if topic is None and row[0] is not None:
            found.last_fetched = None  # what was fetched cannot be read: a miss
        return found

    def comments(self, connection: apsw.Connection, uuid: str) -> Found[list[Comment]]:
        row = connection.execute(_COMMENTS, (uuid, comments_key(uuid))).get
        text, cached_at, last_fetched, deleted_at = row
        try:
            found = Found([] if text is None else _comments(text), last_fetched, cached_at)
        except UNREADABLE:
            self.skipped += 1
            found = Found([], None, None)
        found.deleted_at = deleted_at
        return found


def _spellings(connection: apsw.Connection, category: str) -> list[str]:
    """F1, F5: as stillfresh writes it, and as another implementation may have."""
    names = {name for (name,) in connection.execute(_SPELLINGS) if spelled(name) == category}
    return sorted({category} | {name.decode(errors="replace") for name in names})
