"""FeedEngine: a feed shown at once from the file, and refreshed behind it (F6-F8, F10; seed 001).

The engine's flights, leases and cooldowns do the work; here is what a feed adds: where the data
is, what a write changes, who is told.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self, cast

import apsw
import msgspec

from stillfresh.clock import Clock, checked_clock
from stillfresh.durations import Duration
from stillfresh.engine.cache import Cache
from stillfresh.engine.model import Answer, Loaded
from stillfresh.engine.tasks import Tasks
from stillfresh.errors import ConfigError, LoadFailed, NotOpen, StillfreshError, StoreError, shown
from stillfresh.events import Events, Unsubscribe
from stillfresh.feed import steps
from stillfresh.feed.cache import FeedCache
from stillfresh.feed.checks import checked_comments, checked_topic
from stillfresh.feed.keys import (
    Index,
    checked_days,
    checked_uuid,
    comments_key,
    named_category,
    topic_key,
)
from stillfresh.feed.leases import CODEC
from stillfresh.feed.model import (
    Comment,
    CommentsAnswer,
    Feed,
    FeedCacheUpdated,
    FeedJson,
    Freshness,
    Topic,
    TopicAnswer,
)
from stillfresh.feed.records import json_object
from stillfresh.feed.rules import Fetched, listed
from stillfresh.feed.shelf import Found, Listed
from stillfresh.feed.source import FeedSource, fetch
from stillfresh.feed.steps import Change
from stillfresh.feed.store import KIND, FeedStore
from stillfresh.freshness import Verdict

AT_ONCE: Final = 16
"""Keys fetched side by side; and copies of what came that the engine keeps, the rows being here."""
GRACE: Final = 5.0
MAX_OVERTAKEN: Final = 3
"""F8: fetches that a miss waits for, if each is overtaken by a write."""

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
        if not isinstance(lookups, int) or isinstance(lookups, bool) or lookups < 1:
            raise ConfigError(f"lookups: must be a whole number of 1 or more, not {shown(lookups)}")
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
        self._store = FeedStore(cache, self._clock, self._updated.emit)
        self._engine = Cache(self._store, clock=self._clock, sleep=sleep)
        self._tasks = Tasks()
        self._writes: set[asyncio.Future[None]] = set()
        self._is_closed = False

        async def load(keys: list[str]) -> dict[str, Fetched | Loaded[Fetched]]:
            (key,) = keys
            fetched = await fetch(source, key, now=self._clock(), lookups=lookups)
            return {key: Loaded(fetched, fresh_for=0) if fetched.failed else fetched}

        self._keys = self._engine.batched(
            KIND,
            fresh_for=cache.fresh_for,
            stale_for=cache.keep_for,
            max_batch=1,
            concurrency=AT_ONCE,
            max_entries=AT_ONCE,
            load_timeout=load_timeout,
            codec=CODEC,
        )(load)

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
        if isinstance(found, Fetched):
            return TopicAnswer(found.topics[0] if found.topics else None, freshness)
        return TopicAnswer(found.value, freshness)

    async def get_comments(self, uuid: str) -> CommentsAnswer:
        """All comments of a topic."""
        found, freshness = await self._served(comments_key(checked_uuid(uuid)))
        comments = found.comments if isinstance(found, Fetched) else found.value
        return CommentsAnswer(list(comments), freshness)

    async def _feed(self, index: Index) -> Feed:
        found, freshness = await self._served(index.key)
        if isinstance(found, Fetched):
            return Feed(listed(found, index, self._clock()), freshness)
        return Feed(list(found.value), freshness)

    async def _json(self, index: Index) -> FeedJson:
        found, freshness = await self._served(index.key, raw=True)
        if isinstance(found, Fetched):
            topics = listed(found, index, self._clock())
            return FeedJson(msgspec.json.encode([*map(json_object, topics)]), freshness)
        return cast("Listed", found).as_json(freshness)

    async def _served(
        self, key: str, *, raw: bool = False
    ) -> tuple[Found[Any] | Fetched, Freshness]:
        """F6: the data first; then, if it is stale, one revalidation behind it."""
        self._check_open()
        now = self._clock()
        found = self._find(key, now, raw=raw)
        if found is not None and self._store.is_fresh(key, found, now):
            return found, self._freshness(Verdict.FRESH, found.fetched_at)
        answer = await self._keys.get(key)
        if found is not None and found.is_hit:
            self._store.owe(key)
            return found, self._freshness(Verdict.STALE, found.fetched_at, answer.error)
        for _ in range(MAX_OVERTAKEN):
            if not _is_overtaken(answer):
                break
            answer = await self._keys.get(key)
        return self._loaded(key, answer, raw=raw)

    def _loaded(
        self, key: str, answer: Answer[Fetched], *, raw: bool
    ) -> tuple[Found[Any] | Fetched, Freshness]:
        """A miss was fetched: as it stands in the file, or as it came if it could not be stored."""
        now = self._clock()
        found = self._find(key, now, raw=raw)
        if found is not None and found.is_hit:
            is_fresh = self._store.is_fresh(key, found, now)
            verdict = Verdict.FRESH if is_fresh else Verdict.STALE
            error = answer.error
            if answer.found and answer.value.failed:
                error = LoadFailed(f"{key}: {answer.value.failed}")
            return found, self._freshness(verdict, found.fetched_at, error)
        if answer.error is not None:
            raise answer.error
        return answer.value, self._freshness(answer.verdict, answer.fetched_at)

    def _find(self, key: str, now: float, *, raw: bool) -> Found[Any] | None:
        """None as well if the file cannot be read: then upstream has to do."""
        try:
            return self._store.find(key, now, raw=raw)
        except StoreError as exc:
            logger.warning("%s: the feed cache could not be read: %s", key, exc)
            return None

    def _freshness(
        self, verdict: Verdict, fetched_at: float, error: LoadFailed | None = None
    ) -> Freshness:
        return Freshness(verdict, fetched_at, self._clock, error)

    async def create_topic(self, topic: Topic) -> None:
        """Shown here at once, then published; taken back, and raised, if upstream refuses it."""
        new, now = checked_topic(topic), self._clock()
        await self._write(
            lambda file: steps.create_topic(file, new, at=now),
            lambda: self._source.create_topic(new),
            undo=lambda file, change: steps.uncreate_topic(file, new.topic_uuid, change),
            settle=lambda file, change: steps.settle_creation(file, new, change, at=self._clock()),
        )

    async def delete_topic(self, uuid: str) -> None:
        """Gone here at once, then upstream; brought back, and raised, if upstream refuses."""
        name, now = checked_uuid(uuid), self._clock()
        await self._write(
            lambda file: steps.delete_topic(file, name, at=now),
            lambda: self._source.delete_topic(name),
            undo=lambda file, change: steps.restore_topic(file, name, change),
            settle=lambda file, change: steps.settle_deletion(file, name, change, at=self._clock()),
        )

    async def add_comment(self, topic_uuid: str, comment: Comment) -> None:
        """Shown here at once, then published; taken back, and raised, if upstream refuses it."""
        name, now = checked_uuid(topic_uuid), self._clock()
        (new,) = checked_comments(name, [comment])
        await self._write(
            lambda file: steps.add_comment(file, name, new, at=now),
            lambda: self._source.add_comment(name, new),
            undo=lambda file, change: steps.remove_comment(
                file, name, new.comment_uuid, change, at=now
            ),
            settle=lambda file, change: steps.settle_comment(
                file, name, new, change, at=self._clock()
            ),
        )

    async def _write(
        self,
        change: Callable[[apsw.Connection], Change],
        ask: Callable[[], Awaitable[object]],
        *,
        undo: Callable[[apsw.Connection, Change], None],
        settle: Callable[[apsw.Connection, Change], None],
    ) -> None:
        """F10: here, then there. Cancelled before upstream is asked, it is undone; while it is
        being asked, nobody can know: it stands, and what is refreshed from then on will tell.
        """
        self._check_open()
        changing, last = self._tasks.child(self._store.run(change), None), undo
        done = asyncio.get_running_loop().create_future()
        self._writes.add(done)
        try:
            await asyncio.shield(changing)
            last = settle
            await ask()
        except Exception:
            last = undo
            raise
        finally:
            ending = self._tasks.child(self._end_write(changing, last), None)
            ending.add_done_callback(lambda _: self._written(done))
            await asyncio.shield(ending)

    def _written(self, done: "asyncio.Future[None]") -> None:
        self._writes.discard(done)
        done.set_result(None)

    async def _end_write(
        self, changing: "asyncio.Task[Change]", last: Callable[[apsw.Connection, Change], None]
    ) -> None:
        """What upstream said is what the caller is told, whatever becomes of the file."""
        try:
            change = await changing
            await self._store.run(lambda file: last(file, change))
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
        await self._keys.invalidate(key)
        self._updated.emit(FeedCacheUpdated(key, changed=True))

    def on_updated(self, listener: Callable[[FeedCacheUpdated], object]) -> Unsubscribe:
        """Told, by call or as a coroutine, after each revalidation that was stored."""
        if not callable(listener):
            raise ConfigError(f"on_updated: takes a function of the event, not {shown(listener)}")
        if inspect.iscoroutinefunction(listener):
            return self._updated.subscribe(lambda event: self._behind(listener, event))
        return self._updated.subscribe(listener)

    def _behind(self, listener: Callable[[FeedCacheUpdated], Any], event: FeedCacheUpdated) -> None:
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
        await self._engine.close()
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


def _is_overtaken(answer: Answer[Fetched]) -> bool:
    """Whole, and yet not FRESH: something was written while it was on its way."""
    return answer.verdict is Verdict.STALE and answer.error is None and not answer.value.failed
