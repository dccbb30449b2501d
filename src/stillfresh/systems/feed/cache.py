"""FeedCache: topics, comments and when they were fetched, in one SQLite file.

Plain calls, from any thread. Reads treat a failing file as a miss; writes raise StoreError.
`FeedEngine` is what a feed screen uses.

Threads: one writer thread owns the writing connection and runs every job that `submit` queues.
Reads run on the caller's thread, each with a reader of its own from the idle list, so two threads
never share a connection. When the writer opens the file again, `_epoch` grows, and readers of the
old file are closed instead of being reused.
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
from stillfresh.systems.feed.reading import FeedReader, FoundRows, count_rows
from stillfresh.systems.feed.rows import Writes, evict_slice
from stillfresh.systems.feed.schema import FEED, add_missing_tables

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
        was_closed = self._is_closed
        self._is_closed = True
        if not was_closed and not self._is_forked:
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
        """Note a fork, in the child: the writing thread and the connections are the parent's."""
        self._is_forked = True

    def put_topic(self, topic: Topic) -> None:
        """Store a whole topic."""
        checked = rules.checked_topic(topic)
        self._write(lambda writes: writes.put_topic(checked))

    def get_topic(self, uuid: str) -> Topic | None:
        """Return the stored topic, or None."""
        rows = self._find(topic_key(checked_uuid(uuid)))
        return None if rows is None else rows.value

    def delete_topic(self, uuid: str) -> bool:
        """Delete a topic with its comments. Returns False if there was none."""
        name = checked_uuid(uuid)
        return self._write(lambda writes: writes.delete_topic(name)).topic is not None

    def put_topics(
        self, topics: Iterable[Topic], cache_key: str, *, complete: bool = False
    ) -> None:
        """Store the topics of a list. With `complete`, stored topics that it lacks are deleted."""
        key = canonical(cache_key)
        checked = rules.checked_topics(topics)
        index = index_of(key) if complete else None
        if complete and index is None:
            raise ConfigError(
                f"complete: only for an index key such as 'index:all:7', not {shown(cache_key)}"
            )
        covers = None if index is None else rules.window(index.days, self.clock())
        self._write(lambda writes: writes.put_topics(checked, key, covers))

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
        checked = rules.checked_comments(name, comments)
        self._write(lambda writes: writes.put_comments(name, checked))

    def get_comments(self, topic_uuid: str) -> list[Comment] | None:
        """Return the stored comments; None if none were stored, an empty list if there are none."""
        return self._list(comments_key(checked_uuid(topic_uuid)))

    def invalidate_comments(self, topic_uuid: str) -> None:
        """Make the comments stale: they are served while they are refreshed."""
        key = comments_key(checked_uuid(topic_uuid))
        self._write(lambda writes: writes.forget([key]))

    def is_stale(self, cache_key: str) -> bool:
        """True if the list of this key is stale, or was never fetched."""
        key = canonical(cache_key)
        now = self.clock()
        state = self._read(lambda reader: reader.state(key))
        return state is None or state.is_stale(self.fresh_for, now)

    def evict_expired(self) -> int:
        """Delete rows that were stored longer than `keep_for` ago; return how many."""
        total = 0
        while True:
            dropped, goes_on = self._evict_slice().result()
            total += dropped
            if not goes_on:
                return total

    def _evict_slice(self) -> "Future[tuple[int, bool]]":
        now = self.clock()
        self._evict_at = now + rules.DAY
        job = partial(
            evict_slice,
            now=now,
            fresh_for=self.fresh_for,
            keep_for=self.keep_for,
            size=sqlite.SLICE,
        )
        return self.submit(job)

    def _evict_if_due(self) -> None:
        """Evict daily while open, one slice at a time, after other work."""
        if self.clock() >= self._evict_at:
            self._evict_slice().add_done_callback(self._evict_next)

    def _evict_next(self, slice_: "Future[tuple[int, bool]]") -> None:
        """Evict the next slice, if one is left. Runs on the writer's thread."""
        error = slice_.exception()
        if error is not None:
            logger.warning("the feed cache could not evict: %s", error)
            return
        _, goes_on = slice_.result()
        if goes_on and not self._is_closed:
            self._evict_slice().add_done_callback(self._evict_next)

    def stats(self) -> FeedStats:
        """Return what the file holds."""
        job = partial(count_rows, before=self.clock() - self.keep_for, skipped=self._skipped)
        return self.submit(job, writes=False).result()

    def _write(self, job: Callable[[Writes], T]) -> T:
        """Run a job on the writer's thread, and wait for it."""
        now = self.clock()
        result = self.submit(lambda file: job(Writes(file, now, self.fresh_for))).result()
        self._evict_if_due()
        return result

    def submit(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> "Future[T]":
        """Run a job on the writer's thread, in a savepoint of its own; others may share its commit.

        The options are those of the writer's own `submit`.
        """
        self.check_open()

        def run_guarded(connection: apsw.Connection) -> T:
            try:
                return job(connection)
            except (TypeError, ValueError, OverflowError, RecursionError) as exc:
                raise StoreError(f"the feed's rows cannot be read: {exc!r}") from exc

        return self._writer.submit(run_guarded, writes=writes, urgent=urgent)

    def _list(self, key: str) -> list[Any] | None:
        rows = self._find(key)
        if rows is None or not rows.is_hit:
            return None
        return list(rows.value)

    def _find(self, key: str) -> FoundRows[Any] | None:
        now = self.clock()
        return self._read(lambda reader: reader.find_at_once(key, now))

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
            self._writer.check_file()
            self._look_at = time.monotonic() + sqlite.LOOK_EVERY
        reader = self._take()
        try:
            yield reader
        except sqlite.FAILED as exc:
            if isinstance(exc, sqlite.CORRUPT) and self._first is not None:
                self._writer.mend(self._first)
            raise sqlite.explained(self.path, exc) from exc
        finally:
            if reader.skipped:
                self._skipped += reader.skipped
                reader.skipped = 0
            if self._is_closed or reader.epoch != self._epoch:
                sqlite.abandon(reader.connection)
            else:
                self._idle.append(reader)

    def _take(self) -> FeedReader:
        """An idle reader of the present file, or a new one."""
        try:
            while (reader := self._idle.pop()).epoch != self._epoch:
                sqlite.abandon(reader.connection)
        except IndexError:
            reader = self._connect()
        return reader

    def _connect(self) -> FeedReader:
        """A new reader."""
        epoch = self._epoch  # before connecting: if the file is opened again, the reader is too old
        connection = self._writer.connect_reader()
        add_missing_tables(connection)
        return FeedReader(connection, epoch)

    def _adopt(self, connection: apsw.Connection) -> None:
        """The file was opened, perhaps again. Runs on the writer's thread."""
        add_missing_tables(connection)
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
