"""Read a feed's rows as typed topics, with a memory in front that is never out of date.

SQLite's data version tells whether anything was committed since the last read. While it is the
same, every list in memory is up to date. When it changes, the rows are read again; a row with the
same bytes as before needs no decoding.

Long lists are built in slices, and a reader on an event loop gives the loop a turn between two
slices. A row that cannot be decoded is skipped and counted.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

import apsw
from msgspec import json

from stillfresh.engine.rules import failure_error
from stillfresh.errors import LoadFailed
from stillfresh.freshness import MAX_SKEW
from stillfresh.systems.feed import rules
from stillfresh.systems.feed.model import (
    Comment,
    FeedJson,
    FeedStats,
    Freshness,
    Index,
    Topic,
    index_of,
    spelled,
)

T = TypeVar("T")
ListedRow: TypeAlias = tuple[bytes, bytes, int, int]
"""uuid, JSON, created_at, cached_at."""

MAX_BYTES: Final = 64_000_000
"""Bytes of JSON of the topics that stay decoded, for each thread that reads."""
SLICE: Final = 4_000_000
"""The cost of one slice of a list, about in bytes: a few milliseconds."""
ROW_COST: Final = 2_000
"""The cost of a row besides its bytes."""
UNKNOWN: Final = rules.KeyState()
"""The state of a key that the file knows nothing of."""
INFINITY: Final = float("inf")

# Cast, since SQLite lets another implementation put any type into any column.
_STATE: Final = """
    CAST(m.last_fetched AS INTEGER), t.failures, t.retry_at, t.error, t.lease_expires_at,
        t.lease_token IS NOT NULL AND t.last_updated_at IS m.last_fetched, t.generation
    FROM (SELECT ?1 AS key, ?2 AS uuid)
    LEFT JOIN feed_cache_meta m ON m.cache_key = key
    LEFT JOIN stillfresh_feed_times t ON t.id = key
"""
_KEY: Final = f"SELECT {_STATE}"
_ROW: Final = f"""
    SELECT CAST(r.{{json}} AS BLOB), CAST(r.cached_at AS INTEGER), w.written_at, {_STATE}
    LEFT JOIN stillfresh_writes w ON w.topic_uuid = uuid AND w.comment_uuid = '' AND w.deleted
    LEFT JOIN {{table}} r ON r.topic_uuid = uuid
"""
_TOPIC: Final = _ROW.format(json="topic_json", table="feed_topics")
_COMMENTS: Final = _ROW.format(json="comments_json", table="feed_comments")
_LIST: Final = """
    SELECT coalesce(CAST(topic_uuid AS BLOB), x''), CAST(topic_json AS BLOB),
        CAST(created_at AS INTEGER), CAST(cached_at AS INTEGER)
    FROM feed_topics
    WHERE created_at >= ? {more}AND NOT coalesce(deleted, 0) ORDER BY created_at DESC
"""
_COUNT: Final = """
    SELECT (SELECT count(*) FROM feed_topics), (SELECT sum(comment_count) FROM feed_comments),
        (SELECT count(*) FROM feed_topics WHERE cached_at < ?1)
        + (SELECT count(*) FROM feed_comments WHERE cached_at < ?1)
        + (SELECT count(*) FROM feed_cache_meta WHERE last_fetched < ?1),
        (SELECT page_count FROM pragma_page_count()) * (SELECT page_size FROM pragma_page_size())
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
_topics: Final = rules.JsonRecords(Topic, strict=False)
_comments: Final = rules.JsonRecords(Comment, strict=False)


@dataclass(slots=True, eq=False)
class FoundRows(Generic[T]):
    """The rows of one key, when they were fetched, and how the last load failed."""

    value: T
    state: rules.KeyState = UNKNOWN
    cached_at: int | None = None
    """When the oldest of its rows was stored; None if there are none."""
    deleted_at: float | None = None
    """When it was deleted here."""
    broken: frozenset[bytes] = frozenset()
    """Rows that cannot be read."""

    @property
    def is_hit(self) -> bool:
        """True with rows or a meta row: an empty feed that was fetched is a hit."""
        return self.cached_at is not None or self.state.last_fetched is not None

    @property
    def fetched_at(self) -> float:
        """When upstream was asked, if known."""
        known = (self.state.last_fetched, self.cached_at, self.deleted_at)
        return float(next((moment for moment in known if moment is not None), 0))

    def is_fresh(self, fresh_for: float, now: float, known: frozenset[bytes] | None) -> bool:
        """True if it was fetched, or deleted here, within the last `fresh_for` seconds.

        Unreadable rows make it stale, so that they are fetched again, but only once: `known` are
        unreadable rows that a refetch has not replaced.
        """
        if self.deleted_at is not None and -MAX_SKEW <= now - self.deleted_at < fresh_for:
            return True
        if self.broken and known != self.broken:
            return False
        return not self.state.is_stale(fresh_for, now)

    def failure(self, key: str, now: float) -> LoadFailed | None:
        """The error of the last load, if it failed; `retry_at` says when its cooldown ends."""
        failure = self.state.failure(now)
        return None if failure is None else failure_error(key, failure, now)


@dataclass(slots=True, eq=False)
class ListedTopics(FoundRows[list[Topic]]):
    """A list as it was at `read_at`; until `until` none of its topics grows too old for it."""

    index: Index | None = None
    read_at: float = 0.0
    texts: list[bytes] | None = None
    """The topics' bytes, if they were asked for."""
    size: int = 0
    until: float = INFINITY
    version: int | None = None
    json: FeedJson | None = None

    def holds(self, version: int, now: float, *, raw: bool) -> bool:
        return (
            self.version == version
            and self.read_at <= now <= self.until
            and not (raw and self.texts is None)
        )

    def as_json(self, freshness: Freshness) -> FeedJson:
        """One JSON array from the bytes of the rows. It is made once."""
        if self.json is None or self.json.freshness != freshness:
            texts = list(self.texts or ()) or [b""]
            texts[0] = b"[" + texts[0]
            texts[-1] += b"]"
            self.json = FeedJson(b",".join(texts), freshness)
        return self.json


class FeedReader:
    """A connection for reading, and its memory. Used by one thread at a time."""

    def __init__(self, connection: apsw.Connection, epoch: int = 0) -> None:
        self.connection = connection
        self.epoch = epoch
        """Which opening of the file it belongs to."""
        self.execute = connection.execute
        self._lists: dict[str, ListedTopics] = {}
        self._known: dict[bytes, tuple[Topic | None, bytes]] = {}
        self.known_bytes = 0
        """Bytes of the topics that are known."""
        self.skipped = 0

    def find(self, key: str, now: float, *, raw: bool = False) -> Generator[FoundRows[Any] | None]:
        """Yield None after each slice, and at last the rows of the key. `raw`: with their bytes."""
        topics = self._lists.get(key)
        index = index_of(key) if topics is None else topics.index
        if index is None:
            yield self._read_item(key)
            return
        version: int = self.execute("PRAGMA data_version").get
        if topics is None or not topics.holds(version, now, raw=raw):
            old = topics
            topics = yield from self._read_list(index, now, raw=raw)
            topics.version = version
            if raw and old is not None and old.texts == topics.texts:
                topics.json = old.json
            self._remember(key, topics)
        yield topics

    def find_at_once(self, key: str, now: float) -> FoundRows[Any]:
        """All slices at once, for a caller that holds no event loop."""
        *_, rows = self.find(key, now)
        return cast("FoundRows[Any]", rows)

    @property
    def list_bytes(self) -> int:
        """Bytes of the lists in memory."""
        return sum(topics.size for topics in self._lists.values())

    def _remember(self, key: str, topics: ListedTopics) -> None:
        """Lists share their topics with what is known, and are bounded in the same way."""
        self._lists.pop(key, None)
        if self.list_bytes + topics.size > MAX_BYTES:
            self._lists.clear()
        if topics.size <= MAX_BYTES:
            self._lists[key] = topics

    def _read_list(
        self, index: Index, now: float, *, raw: bool
    ) -> Generator[None, None, ListedTopics]:
        """Read a list in slices.

        The meta row is read first. If both change meanwhile, the topics are newer than the meta row
        says, which is safe: they only count as stale too early.
        """
        state = self.state(index.key)
        sql = _ALL
        bindings: list[float | str] = [rules.window(index.days, now).since]
        if index.category is not None:
            names = self._spellings(index.category)
            sql = _LIST.format(more=f"AND category_id IN ({', '.join('?' * len(names))}) ")
            bindings += names
        result = ListedTopics([], state, index=index, read_at=now, texts=[] if raw else None)
        is_ordered = yield from self._fill(result, self.execute(sql, bindings))
        if not is_ordered:
            # Topics of the same time are sorted by uuid. SQLite copies every row to sort the few
            # that tie, so it sorts only if the rows did not come in order anyway.
            result = replace(result, value=[], texts=[] if raw else None)
            yield from self._fill(result, self.execute(f"{sql}, topic_uuid", bindings))
        if index.days > 0:
            result.until += index.days * rules.DAY
        return result

    def _fill(self, result: ListedTopics, rows: Iterable[ListedRow]) -> Generator[None, None, bool]:
        """Add the rows to the list. False if topics of the same time are not sorted by uuid.

        This is the hot loop of a read: a call for each row would cost time.
        """
        known = self._known
        topics = result.value
        texts = result.texts
        broken: list[bytes] = []
        last: float = INFINITY
        last_uuid = b""
        oldest: float = INFINITY
        is_ordered = True
        cost = 0
        pause_at = SLICE
        read = _topics.one
        for uuid, text, created_at, cached_at in rows:
            decoded = known.get(uuid)
            size = len(text)
            if decoded is None or decoded[1] != text:
                self.known_bytes += size if decoded is None else size - len(decoded[1])
                try:
                    decoded = known[uuid] = read(text), text
                except rules.UNREADABLE:
                    decoded = known[uuid] = None, text
                    self.skipped += 1
                if self.known_bytes > MAX_BYTES:
                    self._make_room(uuid, topics)
            topic = decoded[0]
            cost += size + ROW_COST
            if cost > pause_at:
                pause_at = cost + SLICE
                yield
            if topic is None:
                broken.append(text)
                continue
            topics.append(topic)
            if texts is not None:
                texts.append(decoded[1])
            if created_at == last and uuid < last_uuid:
                is_ordered = False
            last = created_at
            last_uuid = uuid
            if cached_at < oldest:  # noqa: PLR1730 (a call of min() for every row)
                oldest = cached_at
        result.until = last
        result.broken = frozenset(broken)
        result.size = cost - ROW_COST * (len(topics) + len(broken))
        result.cached_at = int(oldest) if topics else None
        return is_ordered

    def _make_room(self, uuid: bytes, topics: list[Topic]) -> None:
        """Drop topics that are not in this list; if that is not enough, this row."""
        known = self._known
        if len(known) > len(topics) + 1:
            names = (topic.topic_uuid.encode() for topic in topics)
            left = {name: known[name] for name in (*names, uuid) if name in known}
            self.known_bytes = sum(len(text) for _, text in left.values())
            known.clear()
            known.update(left)
        if self.known_bytes > MAX_BYTES:
            self.known_bytes -= len(known.pop(uuid)[1])

    def state(self, key: str) -> rules.KeyState:
        return read_state(self.connection, key)

    def _read_item(self, key: str) -> FoundRows[Any]:
        """A topic or its comments; rows that cannot be read are a miss."""
        kind, _, uuid = key.partition(":")
        is_topic = kind != "comments"
        text, cached_at, deleted_at, *state = self.execute(
            _TOPIC if is_topic else _COMMENTS, (key, uuid)
        ).get
        nothing: list[Comment] | None = None if is_topic else []
        if text is None:
            return FoundRows(nothing, rules.KeyState(*state), None, deleted_at)
        value: Topic | list[Comment] | None = None
        try:
            value = _topics.one(text) if is_topic else _comments.all(text)
        except rules.UNREADABLE:
            self.skipped += 1
        if value is None or (isinstance(value, Topic) and value.topic_uuid != uuid):
            unfetched = rules.KeyState(None, *state[1:])
            return FoundRows(nothing, unfetched, None, deleted_at, frozenset({text}))
        return FoundRows(value, rules.KeyState(*state), cached_at, deleted_at)

    def _spellings(self, category: str) -> list[str]:
        """All spellings of a category in the file, also of other implementations."""
        names = {name for (name,) in self.execute(_SPELLINGS) if spelled(name) == category}
        return sorted({category} | {name.decode(errors="replace") for name in names})


def read_state(connection: apsw.Connection, key: str) -> rules.KeyState:
    """Return what the file says of this key besides its rows."""
    return rules.KeyState(*connection.execute(_KEY, (key, None)).get)


def count_rows(connection: apsw.Connection, *, before: float, skipped: int) -> FeedStats:
    """Count the rows of a feed's file; rows stored before `before` have expired."""
    topics, comments, expired, size = connection.execute(_COUNT, (before,)).get
    return FeedStats(topics, comments or 0, expired, size, skipped)


def unstored(key: str, fetched: rules.Fetched, now: float) -> FoundRows[Any]:
    """A fetch that could not be stored, as if it had been read from the file."""
    if (index := index_of(key)) is not None:
        topics = rules.listed(fetched, index, now)
        return ListedTopics(
            topics, texts=[json.encode(rules.json_object(topic)) for topic in topics]
        )
    if key.startswith("comments:"):
        return FoundRows(list(fetched.comments))
    return FoundRows(fetched.topics[0] if fetched.topics else None)
