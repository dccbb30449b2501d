"""Reading the feed: rows to typed topics, with memory in front that is never out of date (F4, F13).

SQLite's data version tells whether anything at all was committed since; while it is the same, so
is every list. When it is another, rows are read again, and those that are the same byte by byte
need no decoding (F18). Long lists are built in slices: a reader on an event loop gives the loop a
turn between them. A row that cannot be decoded is skipped and counted (F12).
"""

from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, Generic, TypeAlias, TypeVar

import apsw
from msgspec import json

from stillfresh.feed.model import (
    Comment,
    FeedJson,
    Freshness,
    Index,
    Topic,
    comments_key,
    index_of,
    spelled,
    subject,
    topic_key,
)
from stillfresh.feed.rules import DAY, UNREADABLE, Fetched, JsonRecords, json_object, listed, window
from stillfresh.stores.contract import Failure

T = TypeVar("T")
Sliced: TypeAlias = Generator[None, None, T]
"""Work that pauses between its slices, and returns its result."""
Row: TypeAlias = tuple[bytes, bytes, int, int]
"""uuid, JSON, created_at, cached_at."""

MAX_BYTES: Final = 64_000_000
"""F18: JSON of the topics kept decoded, for each thread that reads."""
SLICE: Final = 4_000_000
"""F18: what one slice of a list may cost: a few milliseconds."""
ROW_COST: Final = 2_000
"""What a row costs besides its bytes."""
NOTHING: Final = (None,) * 5
"""The state of a key of which nothing is known."""
INFINITY: Final = float("inf")

# Cast, since SQLite lets another implementation put any type into any column.
_STATE: Final = """
    CAST(m.last_fetched AS INTEGER), t.failures, t.retry_at, t.error, t.lease_expires_at
    FROM (SELECT ?1 AS key, ?2 AS uuid)
    LEFT JOIN feed_cache_meta m ON m.cache_key = key
    LEFT JOIN stillfresh_feed_times t ON t.id = key
"""
_DELETED: Final = """
    LEFT JOIN stillfresh_writes w ON w.topic_uuid = uuid AND w.comment_uuid = '' AND w.deleted
"""
_KEY: Final = f"SELECT {_STATE}"
_TOPIC: Final = f"""
    SELECT CAST(r.topic_json AS BLOB), CAST(r.cached_at AS INTEGER), w.written_at, {_STATE}
    {_DELETED} LEFT JOIN feed_topics r ON r.topic_uuid = uuid
"""
_COMMENTS: Final = f"""
    SELECT CAST(r.comments_json AS BLOB), CAST(r.cached_at AS INTEGER), w.written_at, {_STATE}
    {_DELETED} LEFT JOIN feed_comments r ON r.topic_uuid = uuid
"""
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
# Not strict: another implementation may write 0 and 1 for false and true.
_topics: Final = JsonRecords(Topic, strict=False)
_comments: Final = JsonRecords(Comment, strict=False)


def finished(work: Sliced[T]) -> T:
    """All slices at once, for a caller that holds no event loop."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: T = end.value
            return found


class FoundRows(Generic[T]):
    """What the file has under one key, since when, and how its last load failed."""

    __slots__ = (
        "broken",
        "cached_at",
        "deleted_at",
        "failure",
        "last_fetched",
        "leased_until",
        "value",
    )

    def __init__(self, value: T, cached_at: int | None, state: tuple[Any, ...]) -> None:
        self.value = value
        self.cached_at = cached_at
        """When the oldest of its rows was stored; None if there are none."""
        self.last_fetched: int | None = state[0]
        self.failure = _failure(*state[1:4])
        self.leased_until = state[4] / 1000 if isinstance(state[4], int | float) else None
        """When the last lease ended, or will."""
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


class ListedTopics(FoundRows[list[Topic]]):
    """A list as it was at `read_at`; until `until` none of its topics grows too old for it."""

    __slots__ = ("json", "read_at", "size", "texts", "until", "version")

    def __init__(self, state: tuple[Any, ...], read_at: float, *, raw: bool) -> None:
        super().__init__([], None, state)
        self.texts: list[bytes] | None = [] if raw else None
        """The topics' bytes, if they were asked for."""
        self.size = 0
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


class FeedMemory:
    """One connection's reads, and its memory of them. Used by one thread at a time."""

    def __init__(self) -> None:
        self._lists: dict[Index, ListedTopics] = {}
        self._known: dict[bytes, tuple[Topic | None, bytes]] = {}
        self.kept = 0
        """Bytes of the topics that are known."""
        self.skipped = 0

    def find(
        self, connection: apsw.Connection, key: str, now: float, *, raw: bool = False
    ) -> Sliced[FoundRows[Any]]:
        """Whatever a cache key names; `raw`: of a list, the bytes as well."""
        if (index := index_of(key)) is not None:
            return self.listed(connection, index, now, raw=raw)
        uuid = subject(key)
        read = self.comments if key == comments_key(uuid) else self.topic
        return at_once(read(connection, uuid))

    def listed(
        self, connection: apsw.Connection, index: Index, now: float, *, raw: bool = False
    ) -> Sliced[ListedTopics]:
        version: int = connection.execute("PRAGMA data_version").get
        old = self._lists.get(index)
        if old is not None and old.holds(version, now, raw=raw):
            return old
        found = yield from self._read(connection, index, now, raw=raw)
        found.version = version
        if raw and old is not None and old.texts == found.texts:
            found.json = old.json
        self._keep(index, found)
        return found

    def _keep(self, index: Index, found: ListedTopics) -> None:
        """Lists share their topics with what is known, and are bounded in the same way."""
        self._lists.pop(index, None)
        if sum(kept.size for kept in self._lists.values()) + found.size > MAX_BYTES:
            self._lists.clear()
        if found.size <= MAX_BYTES:
            self._lists[index] = found

    def _read(
        self, connection: apsw.Connection, index: Index, now: float, *, raw: bool
    ) -> Sliced[ListedTopics]:
        """The meta row first: if both change meanwhile, the topics are newer than they say."""
        state = _state(connection, index.key)
        sql = _ALL
        bindings: list[float | str] = [window(index.days, now).since]
        if index.category is not None:
            names = _spellings(connection, index.category)
            sql = _LIST.format(more=f"AND category_id IN ({', '.join('?' * len(names))}) ")
            bindings += names
        found = ListedTopics(state, now, raw=raw)
        if not (yield from self._fill(found, connection.execute(sql, bindings))):
            # F4: ties by uuid. Only now, since SQLite copies every row to sort the few that tie.
            found = ListedTopics(state, now, raw=raw)
            yield from self._fill(found, connection.execute(f"{sql}, topic_uuid", bindings))
        if index.days > 0:
            found.until += index.days * DAY
        return found

    def _fill(self, found: ListedTopics, rows: Iterable[Row]) -> Sliced[bool]:
        """The hot loop of a read: known bytes are known topics. False if ties are in disorder."""
        topics, texts, broken = found.value, found.texts, []
        last, last_uuid, oldest, is_ordered = INFINITY, b"", INFINITY, True
        cost, pause_at = 0, SLICE
        for uuid, text, created_at, cached_at in rows:
            kept = self._known.get(uuid)
            if kept is None or kept[1] != text:
                kept = self._learn(uuid, text, topics)
            topic = kept[0]
            cost += len(text) + ROW_COST
            if cost > pause_at:
                pause_at = cost + SLICE
                yield
            if topic is None:
                broken.append(text)
                continue
            topics.append(topic)
            if texts is not None:
                texts.append(kept[1])
            if created_at == last and uuid < last_uuid:
                is_ordered = False
            last, last_uuid = created_at, uuid
            if cached_at < oldest:  # noqa: PLR1730 (a call of min() for every row)
                oldest = cached_at
        found.until, found.broken = last, frozenset(broken)
        found.size = cost - ROW_COST * (len(topics) + len(broken))
        found.cached_at = int(oldest) if topics else None
        return is_ordered

    def _learn(self, uuid: bytes, text: bytes, topics: list[Topic]) -> tuple[Topic | None, bytes]:
        """Decode a row, and keep it if there is room, made by dropping what is not in this list."""
        known, size = self._known, len(text)
        if (old := known.pop(uuid, None)) is not None:
            self.kept -= len(old[1])
        if self.kept + size > MAX_BYTES and len(known) > len(topics):
            names = [topic.topic_uuid.encode() for topic in topics]
            self._known = {name: known[name] for name in names if name in known}
            self.kept = sum(len(kept) for _, kept in self._known.values())
        learned = self._decoded(text), text
        if self.kept + size <= MAX_BYTES:
            self._known[uuid] = learned
            self.kept += size
        return learned

    def _decoded(self, text: bytes) -> Topic | None:
        try:
            return _topics.one(text)
        except UNREADABLE:
            self.skipped += 1
            return None

    def last_fetched(self, connection: apsw.Connection, key: str) -> Sliced[int | None]:
        return at_once(_state(connection, key)[0])

    def topic(self, connection: apsw.Connection, uuid: str) -> FoundRows[Topic | None]:
        def read(text: bytes) -> Topic | None:
            topic = self._decoded(text)
            return topic if topic is not None and topic.topic_uuid == uuid else None

        return _one(connection.execute(_TOPIC, (topic_key(uuid), uuid)).get, None, read)

    def comments(self, connection: apsw.Connection, uuid: str) -> FoundRows[list[Comment]]:
        def read(text: bytes) -> list[Comment] | None:
            try:
                return _comments.all(text)
            except UNREADABLE:
                self.skipped += 1
                return None

        return _one(connection.execute(_COMMENTS, (comments_key(uuid), uuid)).get, [], read)


def unstored(key: str, fetched: Fetched, now: float) -> FoundRows[Any]:
    """What was fetched and could not be stored, as it would have been found."""
    if (index := index_of(key)) is not None:
        found = ListedTopics(NOTHING, now, raw=True)
        found.value = listed(fetched, index, now)
        found.texts = [json.encode(json_object(topic)) for topic in found.value]
        return found
    if key == comments_key(subject(key)):
        return FoundRows(list(fetched.comments), None, NOTHING)
    return FoundRows(fetched.topics[0] if fetched.topics else None, None, NOTHING)


def _one(row: tuple[Any, ...], nothing: T, read: Callable[[bytes], T | None]) -> FoundRows[T]:
    """One row and its state; what was fetched and cannot be read is a miss."""
    text, cached_at, deleted_at, *state = row
    value = nothing if text is None else read(text)
    if value is None and text is not None:
        found = FoundRows(nothing, None, (None, *state[1:]))
        found.broken = frozenset({text})
    else:
        found = FoundRows(nothing if value is None else value, cached_at, tuple(state))
    found.deleted_at = deleted_at
    return found


def at_once(found: T) -> Sliced[T]:
    return found
    yield


def _state(connection: apsw.Connection, key: str) -> tuple[Any, ...]:
    state: tuple[Any, ...] = connection.execute(_KEY, (key, None)).get
    return state


def _failure(count: object, retry_at: object, error: object) -> Failure | None:
    """What somebody else wrote there, or nobody, is no failure."""
    if not isinstance(count, int | float) or not isinstance(retry_at, int | float):
        return None
    return Failure(int(count), retry_at / 1000, str(error))


def _spellings(connection: apsw.Connection, category: str) -> list[str]:
    """F1, F5: as stillfresh writes it, and as another implementation may have."""
    names = {name for (name,) in connection.execute(_SPELLINGS) if spelled(name) == category}
    return sorted({category} | {name.decode(errors="replace") for name in names})
