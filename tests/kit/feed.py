"""What the feed's tests share: a network held in the hand, files of others, ways to wait."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from stillfresh.systems.feed import Comment, FeedCacheUpdated, FeedEngine, Topic
from tests.kit.engine import until

T = TypeVar("T")
NOW = 1_700_000_000.0
DAY = 86_400
PATIENCE = 60.0
"""Seconds after which a test gives up waiting; nothing takes so long."""

SEED_SCHEMA = """
CREATE TABLE feed_topics (
    topic_uuid   TEXT PRIMARY KEY,
    topic_json   TEXT NOT NULL,
    category_id  TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    deleted      INTEGER DEFAULT 0,
    cached_at    INTEGER NOT NULL
);
CREATE INDEX idx_feed_topics_category ON feed_topics(category_id, created_at DESC);
CREATE INDEX idx_feed_topics_created  ON feed_topics(created_at DESC);
CREATE INDEX idx_feed_topics_cached   ON feed_topics(cached_at);

CREATE TABLE feed_comments (
    topic_uuid    TEXT PRIMARY KEY,
    comments_json TEXT NOT NULL,
    comment_count INTEGER DEFAULT 0,
    cached_at     INTEGER NOT NULL
);
CREATE INDEX idx_feed_comments_cached ON feed_comments(cached_at);

CREATE TABLE feed_cache_meta (
    cache_key    TEXT PRIMARY KEY,
    last_fetched INTEGER NOT NULL
);
"""
"""Literally the design's."""
PUT_TOPIC = "INSERT OR REPLACE INTO feed_topics VALUES (?, ?, ?, ?, ?, ?)"
PUT_COMMENTS = "INSERT OR REPLACE INTO feed_comments VALUES (?, ?, ?, ?)"
PUT_META = "INSERT OR REPLACE INTO feed_cache_meta VALUES (?, ?)"


def topic(uuid: str, age: float = 60, **fields: Any) -> Topic:
    """A topic created so many seconds ago."""
    given: dict[str, Any] = {"author": "ann", "title": f"about {uuid}", "category_id": "general"}
    return Topic(topic_uuid=uuid, created_at=int(NOW - age), **(given | fields))


def full(uuid: str, age: float = 60, **fields: Any) -> Topic:
    """With all that an index does not carry."""
    given: dict[str, Any] = {"body": f"the body of {uuid}", "tags": ["x", "y"], "verified": True}
    return topic(uuid, age, **(given | fields))


def comment(uuid: str, topic_uuid: str = "a", **fields: Any) -> Comment:
    given: dict[str, Any] = {"author": "bob", "body": f"says {uuid}", "created_at": int(NOW)}
    return Comment(comment_uuid=uuid, topic_uuid=topic_uuid, **(given | fields))


def uuids(topics: Iterable[Topic] | None) -> list[str]:
    assert topics is not None
    return [topic.topic_uuid for topic in topics]


def said(comments: Iterable[Comment] | None) -> list[str]:
    assert comments is not None
    return [comment.comment_uuid for comment in comments]


def day_of(moment: float) -> date:
    return datetime.fromtimestamp(moment, UTC).date()


def normal(category: str) -> str:
    return category.strip().casefold()


@dataclass
class Network:
    """A `FeedSource`: knows topics and comments, can be slow, fail, refuse, and lag."""

    topics: dict[str, Topic] = field(default_factory=dict)
    talk: dict[str, list[Comment]] = field(default_factory=dict)
    lookups: list[tuple[date, str | None]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Every call but the day lookups: `topic a`, `comments a`, `create a`, …"""
    error: Exception | None = None
    refusal: Exception | None = None
    failing_days: set[date] = field(default_factory=set)
    gate: asyncio.Event | None = None
    write_gate: asyncio.Event | None = None
    running: int = 0
    """Reads that wait, or take their turn."""
    writing: int = 0
    """Writes that wait."""
    peak: int = 0
    lags: bool = False
    """It accepts writes, and does not show them."""

    def have(self, *topics: Topic) -> None:
        self.topics |= {new.topic_uuid: new for new in topics}

    def hold(self) -> None:
        """From now on reads wait for `let_go`."""
        self.gate = asyncio.Event()

    def let_go(self) -> None:
        assert self.gate is not None
        self.gate.set()
        self.gate = None

    def hold_writes(self) -> None:
        self.write_gate = asyncio.Event()

    def let_writes_go(self) -> None:
        assert self.write_gate is not None
        self.write_gate.set()
        self.write_gate = None

    async def holding(self, work: Coroutine[Any, Any, T], *, calls: int = 7) -> asyncio.Task[T]:
        """Hold the reads, and start work: so many of its calls wait for `let_go`."""
        self.hold()
        task = asyncio.create_task(work)
        await until(lambda: self.running == calls)
        return task

    async def holding_writes(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Hold the writes, and start work: it has asked, and waits for `let_writes_go`."""
        self.hold_writes()
        task = asyncio.create_task(work)
        await until(lambda: self.writing == 1)
        return task

    async def _slow(self) -> None:
        self.running += 1
        self.peak = max(self.peak, self.running)
        error = self.error
        try:
            await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
        finally:
            self.running -= 1
        if error is not None:
            raise error

    async def day_index(self, day: date, category: str | None) -> Sequence[Topic]:
        self.lookups.append((day, category))
        topics = [
            msgspec.structs.replace(topic, body=None, tags=[], verified=False)
            for topic in self.topics.values()
            if day_of(topic.created_at) == day
            and (category is None or normal(topic.category_id) == normal(category))
        ]
        await self._slow()
        if day in self.failing_days:
            raise ConnectionError(f"no answer for {day}")
        return topics

    async def topic(self, uuid: str) -> Topic | None:
        self.asked.append(f"topic {uuid}")
        topic = self.topics.get(uuid)
        await self._slow()
        return topic

    async def comments(self, uuid: str) -> Sequence[Comment]:
        self.asked.append(f"comments {uuid}")
        comments = list(self.talk.get(uuid, []))
        await self._slow()
        return comments

    async def _write(self, what: str) -> bool:
        self.asked.append(what)
        if self.write_gate is not None:
            self.writing += 1
            try:
                await self.write_gate.wait()
            finally:
                self.writing -= 1
        if self.refusal is not None:
            raise self.refusal
        return not self.lags

    async def create_topic(self, new: Topic) -> None:
        if await self._write(f"create {new.topic_uuid}"):
            self.have(new)

    async def delete_topic(self, uuid: str) -> None:
        if await self._write(f"delete {uuid}"):
            self.topics.pop(uuid, None)
            self.talk.pop(uuid, None)

    async def add_comment(self, topic_uuid: str, new: Comment) -> None:
        if await self._write(f"comment {new.comment_uuid}"):
            self.talk.setdefault(topic_uuid, []).append(new)


class Heard:
    """The events of an engine, as they come."""

    def __init__(self, engine: FeedEngine) -> None:
        self.events: list[FeedCacheUpdated] = []
        self.stop = engine.on_updated(self.events.append)

    async def wait(self, count: int = 1) -> list[FeedCacheUpdated]:
        await until(lambda: len(self.events) >= count)
        return self.events


class Sleeper:
    """A `sleep=` under the test's control: whoever sleeps waits until `wake`."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._sleeping: list[asyncio.Future[None]] = []

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.append(future)
        await future

    def wake(self) -> None:
        sleeping = self._sleeping
        self._sleeping = []
        for future in sleeping:
            if not future.done():
                future.set_result(None)


async def is_loading(engine: FeedEngine) -> bool:
    """True while the engine loads a key."""
    stats = await engine._loads.stats()
    return any(resource.loading for resource in stats.resources.values())


async def idle(engine: FeedEngine) -> None:
    """Until nothing is being fetched or stored behind."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while engine._refreshing or await is_loading(engine):
        assert loop.time() < deadline, "still loading"
        await asyncio.sleep(0)


def written_by_another(path: Path, *steps: tuple[str, Sequence[object]]) -> None:
    """A file with the design's schema, by the interpreter's own sqlite3; nobody has it open."""
    connection = sqlite3.connect(path)
    try:
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            connection.executescript(SEED_SCHEMA)
        for sql, values in steps:
            connection.execute(sql, tuple(values))
        connection.commit()
    finally:
        connection.close()


def sql(path: Path, text: str, *values: Any) -> list[tuple[Any, ...]]:
    """On a connection of its own, with the library that has the file open: locks stay whole."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(10_000)
    try:
        return list(connection.execute(text, values))
    finally:
        connection.close()


def elsewhere(path: Path, script: str) -> None:
    """In another process, with the interpreter's own sqlite3 as `db`."""
    program = f"import sqlite3\ndb = sqlite3.connect({str(path)!r}, timeout=20)\n{script}\n"
    program += "db.commit()\ndb.close()\n"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def json_of(record: Topic | Comment, **others: object) -> str:
    """As another implementation might write it, with fields of its own."""
    return msgspec.json.encode(msgspec.to_builtins(record) | others).decode()


def row_of(record: Topic, cached_at: float = NOW, **others: object) -> tuple[object, ...]:
    """For PUT_TOPIC."""
    return (
        record.topic_uuid,
        json_of(record, **others),
        record.category_id,
        record.created_at,
        int(record.deleted),
        int(cached_at),
    )
