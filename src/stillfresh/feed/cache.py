"""FeedCache: topics, comments and when they were fetched, in one SQLite file (F1-F5, F11, F12).

The seed's C functions with Python manners: plain calls, from any thread. Reads take a failing file
for a miss; writes raise StoreError. `FeedEngine` is what a feed screen uses.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

import apsw

from stillfresh.clock import Clock, checked_clock
from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, StoreError, shown
from stillfresh.feed.file import FeedFile
from stillfresh.feed.model import (
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
from stillfresh.feed.reading import FeedMemory, FoundRows, Sliced, finished
from stillfresh.feed.rows import Writes
from stillfresh.feed.rules import (
    DAY,
    checked_comments,
    checked_topic,
    checked_topics,
    is_stale,
    window,
)
from stillfresh.feed.store import FeedTables, counted
from stillfresh.stores.sqlite import SLICE

T = TypeVar("T")

FEED_CACHE_TTL_SECONDS: Final = 300
"""F3: a list is fresh for so long."""
FEED_CACHE_EVICT_SECONDS: Final = 30 * DAY
"""F11: what was stored longer ago is forgotten."""

logger = logging.getLogger(__name__)


class FeedCache:
    """`with FeedCache.open("feed_cache.db") as cache:`; any number of processes share the file."""

    def __init__(self, file: FeedFile, *, clock: Clock, fresh_for: float, keep_for: float) -> None:
        self.file = file
        self.clock = clock
        self.fresh_for = fresh_for
        self.keep_for = keep_for
        self.tables = FeedTables(fresh_for, keep_for, clock)
        self._evict_at = 0.0

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        clock: Clock = time.time,
        fresh_for: Duration = FEED_CACHE_TTL_SECONDS,
        keep_for: Duration = FEED_CACHE_EVICT_SECONDS,
    ) -> Self:
        """Without a path: `feed_cache.db` in the user's data directory."""
        checked_clock(clock)
        fresh = seconds(fresh_for, name="fresh_for")
        keep = seconds(keep_for, name="keep_for", positive=True)
        file = FeedFile(_default_path() if path is None else _given_path(path))
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
        """What was being written is written; closing twice changes nothing."""
        if not self.file.is_closed:
            self.file.close()

    def __enter__(self) -> Self:
        self.file.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put_topic(self, topic: Topic) -> None:
        """A full topic and its meta row `topic:{uuid}`."""
        kept = checked_topic(topic)
        self._write(lambda writes: writes.put_topic(kept))

    def get_topic(self, uuid: str) -> Topic | None:
        """What is stored, deleted or not."""
        found = self._find(topic_key(checked_uuid(uuid)))
        return None if found is None else found.value

    def delete_topic(self, uuid: str) -> bool:
        """With its comments and meta rows; False if there was none."""
        name = checked_uuid(uuid)
        return self._write(lambda writes: writes.delete_topic(name)).topic is not None

    def put_topics(
        self, topics: Iterable[Topic], cache_key: str, *, complete: bool = False
    ) -> None:
        """An index result and its meta row; `complete`: what its window lacks is gone upstream."""
        key, kept = canonical(cache_key), checked_topics(topics)
        index = index_of(key)
        if complete and index is None:
            raise ConfigError(
                f"complete: only for an index key such as 'index:all:7', not {shown(cache_key)}"
            )
        covers = window(index.days, self.clock()) if complete and index is not None else None
        self._write(lambda writes: writes.put_topics(kept, key, covers))

    def get_topics_all(self, days_back: int) -> list[Topic] | None:
        """Newest first; `days_back` of 0 or less: all there are.

        None: a miss, the list was never fetched and has no rows; an empty list: it was fetched.
        """
        return self._list(Index(None, whole_days(days_back)).key)

    def get_topics_by_category(self, category: str, days_back: int) -> list[Topic] | None:
        """The same for one category."""
        return self._list(Index(named_category(category), whole_days(days_back)).key)

    def put_comments(self, topic_uuid: str, comments: Iterable[Comment]) -> None:
        """All comments of a topic, and their meta row `comments:{uuid}`."""
        name = checked_uuid(topic_uuid)
        kept = checked_comments(name, comments)
        self._write(lambda writes: writes.put_comments(name, kept))

    def get_comments(self, topic_uuid: str) -> list[Comment] | None:
        """None: never stored; an empty list: stored, and there are none."""
        return self._list(comments_key(checked_uuid(topic_uuid)))

    def invalidate_comments(self, topic_uuid: str) -> None:
        """They are served on, as stale."""
        key = comments_key(checked_uuid(topic_uuid))
        self._write(lambda writes: writes.forget([key]))

    def is_stale(self, cache_key: str) -> bool:
        """F3; a key that was never fetched is stale."""
        key, now = canonical(cache_key), self.clock()
        last_fetched = self._read(lambda memory, file: memory.last_fetched(file, key))
        return is_stale(last_fetched, self.fresh_for, now)

    def evict_expired(self) -> int:
        """F11: drop what was stored longer than `keep_for` ago; how many rows."""
        self._evict_at = self.clock() + DAY
        total, following = 0, cast("str | None", "")
        while following is not None:
            dropped, following = self.file.submit(self._evict_slice).result()
            total += dropped
        return total

    def _evict_slice(self, connection: apsw.Connection) -> tuple[int, str | None]:
        return self.tables.evict(connection, before=self.clock(), size=SLICE)

    def _evict_if_due(self) -> None:
        """F11: daily while open, behind whatever is asked of it."""
        if self.clock() >= self._evict_at:
            self._evict_at = self.clock() + DAY
            self._evict_behind()

    def _evict_behind(self) -> None:
        self.file.submit(self._evict_slice).add_done_callback(self._evict_on)

    def _evict_on(self, slice_: "Future[tuple[int, str | None]]") -> None:
        """On the writer's thread: the next slice, if there may be one."""
        if (error := slice_.exception()) is not None:
            logger.warning("the feed cache could not evict: %s", error)
        elif slice_.result()[1] is not None and not self.file.is_closed:
            self._evict_behind()

    def stats(self) -> FeedStats:
        before = self.clock() - self.keep_for
        return self.file.submit(
            lambda connection: counted(connection, before=before, skipped=self.file.skipped),
            writes=False,
        ).result()

    def _write(self, job: Callable[[Writes], T]) -> T:
        """Waits for the writer's thread."""
        now = self.clock()
        done = self.file.submit(lambda file: job(Writes(file, now, self.fresh_for)))
        result = done.result()
        self._evict_if_due()
        return result

    def _list(self, key: str) -> list[Any] | None:
        found = self._find(key)
        return list(found.value) if found is not None and found.is_hit else None

    def _find(self, key: str) -> FoundRows[Any] | None:
        now = self.clock()
        return self._read(lambda memory, file: memory.find(file, key, now))

    def _read(self, job: Callable[[FeedMemory, apsw.Connection], Sliced[T]]) -> T | None:
        """None: a miss, or a file that cannot be read."""
        self.file.check_open()
        self._evict_if_due()
        try:
            return finished(self.file.read(job))
        except StoreError as exc:
            logger.warning("the feed cache could not be read: %s", exc)
            return None


def _given_path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike) or str(path) in {"", ":memory:"}:
        raise ConfigError(f"path: must name a file, not {shown(path)}")
    if "\0" in str(path) or "://" in str(path):
        raise ConfigError(f"path: {shown(path)} names no file; a plain path, no address")
    return Path(path).absolute()


def _default_path() -> Path:
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    directory = Path(home) / "stillfresh"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(f"{directory}: cannot be made: {exc.strerror}; give a path") from exc
    return directory / "feed_cache.db"
