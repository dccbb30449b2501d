"""FeedCache: topics, comments and when they were fetched, in one SQLite file (F1-F5, F11, F12).

The seed's C functions in Python's style: plain calls, from any thread. Reads treat a failing file
as a miss; writes raise StoreError. `FeedEngine` is what a feed screen uses.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import apsw

from stillfresh.clock import Clock, checked_clock
from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, NotOpen, StoreError, shown
from stillfresh.forks import tell_of_forks
from stillfresh.stores import sqlite
from stillfresh.systems.feed import rules
from stillfresh.systems.feed.model import (
    FEED_CACHE_EVICT_SECONDS,
    FEED_CACHE_TTL_SECONDS,
    Comment,
    FeedStats,
    Index,
    Topic,
    canonical,
    checked_uuid,
    comments_key,
    index_of,
    named_category,
    topic_key,
    whole_days,
)
from stillfresh.systems.feed.reading import FeedReader, FoundRows
from stillfresh.systems.feed.rows import Writes
from stillfresh.systems.feed.schema import FEED, completed
from stillfresh.systems.feed.store import FeedTables, counted

T = TypeVar("T")

logger = logging.getLogger(__name__)


class FeedCache:
    """The file of a feed: `with FeedCache.open("feed_cache.db") as cache:`. Processes may share it.

    Reads run on the caller's thread, writes on another. A file that is corrupt is replaced.
    """

    def __init__(self, path: Path, *, clock: Clock, fresh_for: float, keep_for: float) -> None:
        """As `open`, for operators: nothing is checked and nothing evicted."""
        self.path = path
        self.clock = clock
        self.fresh_for = fresh_for
        self.keep_for = keep_for
        self.tables = FeedTables(fresh_for, keep_for, clock)
        self._evict_at = float("inf")
        self._idle: list[FeedReader] = []
        self._first: apsw.Connection | None = None
        self._epoch = self._skipped = 0
        self._look_at = 0.0
        self._is_closed = self._is_forked = False
        tell_of_forks(self)
        self._writer = sqlite.Writer(path, FEED, self._adopt)
        try:
            self._writer.wait_until_open()
        except BaseException:
            self._writer.stop()
            raise

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        clock: Clock = time.time,
        fresh_for: Duration = FEED_CACHE_TTL_SECONDS,
        keep_for: Duration = FEED_CACHE_EVICT_SECONDS,
    ) -> Self:
        """Open a file; without a path, `feed_cache.db` in the user's data directory.

        A list is fresh for `fresh_for`; rows are kept for `keep_for`. Raises ConfigError for a file
        of another program, and StoreError if it cannot be opened.
        """
        checked_clock(clock)
        fresh = seconds(fresh_for, name="fresh_for")
        keep = seconds(keep_for, name="keep_for", positive=True)
        file = _default_path() if path is None else _given_path(path)
        cache = cls(file, clock=clock, fresh_for=fresh, keep_for=keep)
        try:
            cache.evict_expired()
        except StoreError as exc:
            logger.warning("the feed cache could not evict: %s", exc)
        except BaseException:
            cache.close()
            raise
        return cache

    def close(self) -> None:
        """Write what is queued, and close the file."""
        is_first, self._is_closed = not self._is_closed, True
        if is_first and not self._is_forked:
            while self._idle:
                sqlite.abandon(self._idle.pop().connection)
            self._writer.stop()

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_open(self) -> None:
        if self._is_forked:
            raise NotOpen(
                "this feed cache was open when the process forked; open it in the child process "
                "with FeedCache.open(path)"
            )
        if self._is_closed:
            raise NotOpen("this feed cache is closed; open it with FeedCache.open(path)")

    def forked(self) -> None:
        """In the child: the writing thread and the connections are the parent's."""
        self._is_forked = True

    def put_topic(self, topic: Topic) -> None:
        """Store a whole topic."""
        kept = rules.checked_topic(topic)
        self._write(lambda writes: writes.put_topic(kept))

    def get_topic(self, uuid: str) -> Topic | None:
        """Return the stored topic, or None."""
        found = self._find(topic_key(checked_uuid(uuid)))
        return None if found is None else found.value

    def delete_topic(self, uuid: str) -> bool:
        """Delete a topic with its comments. Returns False if there was none."""
        name = checked_uuid(uuid)
        return self._write(lambda writes: writes.delete_topic(name)).topic is not None

    def put_topics(
        self, topics: Iterable[Topic], cache_key: str, *, complete: bool = False
    ) -> None:
        """Store the topics of a list. With `complete`, stored topics that it lacks are deleted."""
        key, kept = canonical(cache_key), rules.checked_topics(topics)
        index = index_of(key) if complete else None
        if complete and index is None:
            raise ConfigError(
                f"complete: only for an index key such as 'index:all:7', not {shown(cache_key)}"
            )
        covers = None if index is None else rules.window(index.days, self.clock())
        self._write(lambda writes: writes.put_topics(kept, key, covers))

    def get_topics_all(self, days_back: int) -> list[Topic] | None:
        """Return the stored topics of these days, the newest first; all of them for 0 or less.

        None means that the list was never fetched, an empty list that it was.
        """
        return self._list(Index(None, whole_days(days_back)).key)

    def get_topics_by_category(self, category: str, days_back: int) -> list[Topic] | None:
        """Return the stored topics of one category, as `get_topics_all` does."""
        return self._list(Index(named_category(category), whole_days(days_back)).key)

    def put_comments(self, topic_uuid: str, comments: Iterable[Comment]) -> None:
        """Store all comments of a topic."""
        name = checked_uuid(topic_uuid)
        kept = rules.checked_comments(name, comments)
        self._write(lambda writes: writes.put_comments(name, kept))

    def get_comments(self, topic_uuid: str) -> list[Comment] | None:
        """Return the stored comments; None if none were stored, an empty list if there are none."""
        return self._list(comments_key(checked_uuid(topic_uuid)))

    def invalidate_comments(self, topic_uuid: str) -> None:
        """Make the comments stale: they are served while they are refreshed."""
        key = comments_key(checked_uuid(topic_uuid))
        self._write(lambda writes: writes.forget([key]))

    def is_stale(self, cache_key: str) -> bool:
        """True if the list of this key is stale, or was never fetched."""
        key, now = canonical(cache_key), self.clock()
        found = self._read(lambda reader: reader.state(key))
        return found is None or rules.is_stale(found[0], self.fresh_for, now)

    def evict_expired(self) -> int:
        """Delete rows that were stored longer than `keep_for` ago; return how many."""
        total, is_done = 0, False
        while not is_done:
            dropped, following = self._evict_slice().result()
            total, is_done = total + dropped, following is None
        return total

    def _evict_slice(self) -> "Future[tuple[int, str | None]]":
        now = self.clock()
        self._evict_at = now + rules.DAY
        return self.submit(partial(self.tables.evict, before=now, size=sqlite.SLICE))

    def _evict_if_due(self) -> None:
        """F11: daily while open, one slice at a time, after other work."""
        if self.clock() >= self._evict_at:
            self._evict_slice().add_done_callback(self._evicted)

    def _evicted(self, slice_: "Future[tuple[int, str | None]]") -> None:
        """On the writer's thread."""
        if (error := slice_.exception()) is not None:
            logger.warning("the feed cache could not evict: %s", error)
        elif slice_.result()[1] is not None and not self._is_closed:
            self._evict_slice().add_done_callback(self._evicted)

    def stats(self) -> FeedStats:
        """Return what the file holds."""
        job = partial(counted, before=self.clock() - self.keep_for, skipped=self._skipped)
        return self.submit(job, writes=False).result()

    def _write(self, job: Callable[[Writes], T]) -> T:
        """Waits for the writer's thread."""
        now = self.clock()
        result = self.submit(lambda file: job(Writes(file, now, self.fresh_for))).result()
        self._evict_if_due()
        return result

    def submit(self, job: Callable[[apsw.Connection], T], **how: bool) -> "Future[T]":
        """On the writer's thread, in a savepoint of its own; others may share its commit.

        `how`: as the writer's own `submit`.
        """
        self.check_open()

        def guarded(connection: apsw.Connection) -> T:
            try:
                return job(connection)
            except (TypeError, ValueError, OverflowError, RecursionError) as exc:
                raise StoreError(f"the feed's rows cannot be read: {exc!r}") from exc

        return self._writer.submit(guarded, **how)

    def _list(self, key: str) -> list[Any] | None:
        found = self._find(key)
        return list(found.value) if found is not None and found.is_hit else None

    def _find(self, key: str) -> FoundRows[Any] | None:
        now = self.clock()
        return self._read(lambda reader: reader.found(key, now))

    def _read(self, job: Callable[[FeedReader], T]) -> T | None:
        """None for a miss, or a file that cannot be read."""
        self.check_open()
        self._evict_if_due()
        try:
            with self.reading() as reader:
                return job(reader)
        except StoreError as exc:
            logger.warning("the feed cache could not be read: %s", exc)
            return None

    @contextmanager
    def reading(self) -> Iterator[FeedReader]:
        """A reader for this thread; StoreError if the file cannot be read."""
        self.check_open()
        if time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + sqlite.LOOK_EVERY
            if sqlite.identity_of(self.path) != self._writer.database.identity:
                self._writer.wake()
        reader = self._take()
        try:
            yield reader
        except apsw.Error as exc:
            if isinstance(exc, sqlite.CORRUPT) and self._first is not None:
                self._writer.mend(self._first)
            raise sqlite.explained(self.path, exc) from exc
        finally:
            if reader.skipped:
                self._skipped, reader.skipped = self._skipped + reader.skipped, 0
            if self._is_closed or reader.epoch != self._epoch:
                sqlite.abandon(reader.connection)
            else:
                self._idle.append(reader)

    def _take(self) -> FeedReader:
        try:
            while (reader := self._idle.pop()).epoch != self._epoch:
                sqlite.abandon(reader.connection)
        except IndexError:
            reader = self._another()
        return reader

    def _another(self) -> FeedReader:
        """Under the lock, so that no process renames the file. It may be on an event loop."""
        epoch, path = self._epoch, sqlite.real(self.path)
        with sqlite.translated(path), sqlite.locked(path, sqlite.READ_PATIENCE):
            if sqlite.identity_of(path) != self._writer.database.identity:
                self._writer.wake()
                raise StoreError(f"{path}: was replaced; try again: the new file is opened next")
            connection = sqlite.connect_reader(path)
        completed(connection)
        return FeedReader(connection, epoch)

    def _adopt(self, connection: apsw.Connection) -> None:
        """On the writer's thread: the file was opened, perhaps again."""
        completed(connection)
        self._epoch += 1
        self._first = connection
        self._idle.append(FeedReader(connection, self._epoch))


def _given_path(path: str | os.PathLike[str]) -> Path:
    is_path = isinstance(path, str | os.PathLike) and str(path) not in {"", ":memory:"}
    if not is_path or "\0" in str(path) or "://" in str(path):
        raise ConfigError(f"path: must name a file by a plain path, not {shown(path)}")
    return Path(path).absolute()


def _default_path() -> Path:
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    directory = Path(home) / "stillfresh"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(f"{directory}: cannot be made: {exc.strerror}; give a path") from exc
    return directory / "feed_cache.db"
