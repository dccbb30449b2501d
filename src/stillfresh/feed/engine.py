"""FeedEngine: a feed shown at once from the file, and refreshed behind it (F6-F8, F10; seed 001).

The engine's loads, leases and cooldowns do the work; here is what a feed adds: where the data is,
what a write changes, and which listeners are told.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self, cast

from stillfresh.checks import checked_function, checked_whole
from stillfresh.clock import Clock, checked_clock
from stillfresh.durations import Duration
from stillfresh.engine.loader import looked_at
from stillfresh.errors import ConfigError, NotOpen, StillfreshError, shown
from stillfresh.events import Events, Unsubscribe
from stillfresh.feed.cache import FeedCache
from stillfresh.feed.model import (
    Comment,
    CommentsAnswer,
    Feed,
    FeedCacheUpdated,
    FeedJson,
    Freshness,
    Index,
    Topic,
    TopicAnswer,
    checked_days,
    checked_uuid,
    comments_key,
    named_category,
    topic_key,
)
from stillfresh.feed.reading import FoundRows, ListedTopics
from stillfresh.feed.rows import Change, Writes
from stillfresh.feed.rules import checked_comments, checked_topic
from stillfresh.feed.serving import FeedServing
from stillfresh.feed.source import FeedSource

GRACE: Final = 5.0
"""Seconds in which everything ends when the engine is closed."""

logger = logging.getLogger(__name__)


class FeedEngine:
    """`async with FeedEngine(cache, source) as engine:`; the cache stays its opener's to close."""

    def __init__(
        self,
        cache: FeedCache,
        source: FeedSource,
        *,
        clock: Clock | None = None,
        lookups: int = 7,
        load_timeout: Duration = "30s",
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        checked_whole("lookups", lookups)
        if not isinstance(cache, FeedCache):
            raise ConfigError(f"cache: a FeedCache, by FeedCache.open(path), not {shown(cache)}")
        if not callable(getattr(source, "day_index", None)) or isinstance(source, type):
            raise ConfigError(
                f"source: an object with the methods of FeedSource, not {shown(source)}"
            )
        self._cache = cache
        self._source = source
        self._clock = cache.clock if clock is None else checked_clock(clock)
        self._updated: Events[FeedCacheUpdated] = Events()
        self._serving = FeedServing(
            cache,
            source,
            self._updated.emit,
            clock=self._clock,
            lookups=lookups,
            load_timeout=load_timeout,
            sleep=sleep,
        )
        self._tasks = self._serving.tasks
        self._writes: set[asyncio.Future[None]] = set()
        self._is_closed = False

    async def get_all(self, days_back: int = 7) -> Feed:
        """The whole feed of the last 1 to 30 days, newest first."""
        return await self._feed(Index(None, checked_days(days_back)))

    async def get_category(self, category: str, days_back: int = 7) -> Feed:
        return await self._feed(Index(named_category(category), checked_days(days_back)))

    async def get_all_json(self, days_back: int = 7) -> FeedJson:
        """The same as one JSON array, for an HTTP answer: no row that is known is decoded."""
        return await self._json(Index(None, checked_days(days_back)))

    async def get_category_json(self, category: str, days_back: int = 7) -> FeedJson:
        return await self._json(Index(named_category(category), checked_days(days_back)))

    async def get_topic(self, uuid: str) -> TopicAnswer:
        """The whole topic."""
        found, freshness = await self._served(topic_key(checked_uuid(uuid)))
        return TopicAnswer(found.value, freshness)

    async def get_comments(self, uuid: str) -> CommentsAnswer:
        """All comments of a topic."""
        found, freshness = await self._served(comments_key(checked_uuid(uuid)))
        return CommentsAnswer(list(found.value), freshness)

    async def _feed(self, index: Index) -> Feed:
        found, freshness = await self._served(index.key)
        return Feed(list(found.value), freshness)

    async def _json(self, index: Index) -> FeedJson:
        found, freshness = await self._served(index.key, raw=True)
        return cast("ListedTopics", found).as_json(freshness)

    async def _served(self, key: str, *, raw: bool = False) -> tuple[FoundRows[Any], Freshness]:
        self._check_open()
        return await self._serving.served(key, raw=raw)

    async def create_topic(self, topic: Topic) -> None:
        """Shown here at once, then published; taken back, and raised, if upstream refuses it."""
        new = checked_topic(topic)
        await self._write(
            lambda writes: writes.create_topic(new), lambda: self._source.create_topic(new)
        )

    async def delete_topic(self, uuid: str) -> None:
        """Gone here at once, then upstream; brought back, and raised, if upstream refuses."""
        name = checked_uuid(uuid)
        await self._write(
            lambda writes: writes.delete_topic(name), lambda: self._source.delete_topic(name)
        )

    async def add_comment(self, topic_uuid: str, comment: Comment) -> None:
        """Shown here at once, then published; taken back, and raised, if upstream refuses it."""
        name = checked_uuid(topic_uuid)
        (new,) = checked_comments(name, [comment])
        await self._write(
            lambda writes: writes.add_comment(new), lambda: self._source.add_comment(name, new)
        )

    async def _write(
        self, change: Callable[[Writes], Change], ask: Callable[[], Awaitable[object]]
    ) -> None:
        """F10: here, then there. Cancelled before upstream is asked, it is undone; while it is
        being asked, nobody can know: it stands, and what is refreshed from then on will tell.
        """
        self._check_open()
        changing, is_settled = self._tasks.child(self._serving.run(change), None), False
        changing.add_done_callback(looked_at)
        done = asyncio.get_running_loop().create_future()
        self._writes.add(done)
        try:
            await asyncio.shield(changing)
            is_settled = True
            await ask()
        except Exception:
            is_settled = False
            raise
        finally:
            again = change if is_settled else None
            ending = self._tasks.child(self._end_write(changing, again), None)
            ending.add_done_callback(lambda _: self._written(done))
            await asyncio.shield(ending)

    def _written(self, done: "asyncio.Future[None]") -> None:
        self._writes.discard(done)
        done.set_result(None)

    async def _end_write(
        self, changing: "asyncio.Task[Change]", again: Callable[[Writes], Change] | None
    ) -> None:
        """Settled, or undone. What upstream said is what the caller is told, whatever becomes of
        the file.
        """

        def end(writes: Writes) -> None:
            writes.undo(change) if again is None else writes.settle(change, again)

        try:
            change = await changing
            await self._serving.run(end)
        except StillfreshError as exc:
            logger.warning("the feed cache could not be written: %s", exc)

    def on_remote_comment(self, uuid: str) -> "asyncio.Task[None]":
        """Upstream tells of a new comment: what is here is stale. Await it, or go on."""
        self._check_open()
        task = self._tasks.child(self._remote_comment(comments_key(checked_uuid(uuid))), None)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return task

    async def _remote_comment(self, key: str) -> None:
        """By the engine, since what could not be stored is in its memory alone."""
        await self._serving.keys.invalidate(key)
        self._updated.emit(FeedCacheUpdated(key, changed=True))

    def on_updated(self, listener: Callable[[FeedCacheUpdated], object]) -> Unsubscribe:
        """Told, by call or as a coroutine, after each revalidation that was stored."""
        checked_function("on_updated", listener, "a function of the event")
        if inspect.iscoroutinefunction(listener):
            return self._updated.subscribe(lambda event: self._tell_later(listener, event))
        return self._updated.subscribe(listener)

    def _tell_later(
        self, listener: Callable[[FeedCacheUpdated], Any], event: FeedCacheUpdated
    ) -> None:
        async def tell() -> None:
            try:
                await listener(event)
            except Exception:
                logger.exception("listener %r failed on %r", listener, event)

        self._tasks.spawn(tell(), None)

    async def close(self) -> None:
        """Writes that upstream was asked for end first, within a grace; no revalidation is left."""
        self._is_closed = True
        if self._writes:
            await asyncio.wait(self._writes, timeout=GRACE)
        await self._serving.engine.close()
        await self._tasks.end(GRACE)

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotOpen("this feed engine is closed; make another one")
        self._cache.file.check_open()
