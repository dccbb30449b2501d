"""FeedEngine: serves a feed from its file, and refreshes it in the background.

The engine's loads, leases and cooldowns do the work. A feed adds: which rows are fresh, stale or
missing, what a write changes, and which listeners are called.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self, TypeAlias, TypeVar, cast

from stillfresh.bounded import BoundedDict
from stillfresh.checks import checked_function, checked_whole
from stillfresh.clock import Clock, checked_clock
from stillfresh.durations import Duration
from stillfresh.engine import Answer, Cache, RetryAfter
from stillfresh.engine.rules import may_retry
from stillfresh.errors import (
    ConfigError,
    LoadFailed,
    NotOpen,
    StillfreshError,
    StoreError,
    shown,
)
from stillfresh.events import Events, Unsubscribe
from stillfresh.freshness import Verdict
from stillfresh.systems.feed.cache import FeedCache
from stillfresh.systems.feed.loop_reads import LoopReads
from stillfresh.systems.feed.model import (
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
from stillfresh.systems.feed.reading import FoundRows, ListedTopics, unstored
from stillfresh.systems.feed.rows import Change, Writes
from stillfresh.systems.feed.rules import DAY, checked_comments, checked_topic
from stillfresh.systems.feed.source import FeedSource, PartlyFailed, fetch, part_of
from stillfresh.systems.feed.store import KIND, FeedStore, Published
from stillfresh.tasks import Tasks, looked_at

T = TypeVar("T")
Served: TypeAlias = tuple[FoundRows[Any], Freshness]

GRACE: Final = 5.0
"""Seconds for everything to end when the engine is closed."""
AT_ONCE: Final = 16
"""Keys that are fetched at the same time."""
MAX_KEYS: Final = 1_000
"""Keys about which something is remembered: background refreshes, unreadable rows, due events."""
MAX_OVERTAKEN: Final = 3
"""Fetches that a miss waits for, if a write overtakes each of them."""

logger = logging.getLogger(__name__)


class FeedEngine:
    """Serves a feed from its file and refreshes it: `async with FeedEngine(cache, source):`.

    `lookups`: days fetched at once. A fetch fails after `load_timeout`. The cache stays open.
    """

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
        self._lookups = checked_whole("lookups", lookups)
        if not isinstance(cache, FeedCache):
            raise ConfigError(f"cache: must be FeedCache.open(path), not {shown(cache)}")
        if not callable(getattr(source, "day_index", None)) or isinstance(source, type):
            raise ConfigError(
                f"source: must be an object with the methods of FeedSource, not {shown(source)}"
            )
        self._file = cache
        self._source = source
        self._clock = cache.clock if clock is None else checked_clock(clock)
        self._store = FeedStore(cache, clock=self._clock, tell=self._tell)
        self._reads = LoopReads(cache)
        self._loads = Cache(self._store, clock=self._clock, sleep=sleep)
        self._keys = self._loads.batched(
            KIND,
            fresh_for=cache.fresh_for,
            stale_for=cache.keep_for + DAY,
            max_batch=1,
            concurrency=AT_ONCE,
            max_entries=AT_ONCE,
            load_timeout=load_timeout,
        )(self._load)
        self._updated: Events[FeedCacheUpdated] = Events()
        self._tasks = Tasks()
        self._refreshing: set[str] = set()
        """Keys with a running `_refresh`, which was started for a reader that got an old list.

        It starts one load however many readers there are. A key may leave before its load ends:
        the engine answers `get` of a stale key at once, and loads it in the background. Then the
        engine knows that the load is under way, and starts no second one.
        """
        self._first_fetches: BoundedDict[str, bool] = BoundedDict(MAX_KEYS)
        """By key: True while it is fetched for the first time. Its callers get the answer itself.

        False if a write overtook that fetch: the next one is reported.
        """
        self._broken: BoundedDict[str, frozenset[bytes]] = BoundedDict(MAX_KEYS)
        """Unreadable rows that a refetch has not replaced."""
        self._writes: set[asyncio.Future[None]] = set()
        self._is_closed = False

    async def get_all(self, days_back: int = 7) -> Feed:
        """Return the feed of the last 1 to 30 days, the newest first. Raises LoadFailed."""
        return await self._feed(None, days_back)

    async def get_category(self, category: str, days_back: int = 7) -> Feed:
        """Return the topics of one category, as `get_all` does."""
        return await self._feed(named_category(category), days_back)

    async def get_all_json(self, days_back: int = 7) -> FeedJson:
        """Return the feed as one JSON array, for an HTTP response."""
        return await self._json(None, days_back)

    async def get_category_json(self, category: str, days_back: int = 7) -> FeedJson:
        """Return the topics of one category as one JSON array."""
        return await self._json(named_category(category), days_back)

    async def get_topic(self, uuid: str) -> TopicAnswer:
        """Return the whole topic. Raises LoadFailed."""
        rows, freshness = await self._serve(topic_key(checked_uuid(uuid)))
        return TopicAnswer(rows.value, freshness)

    async def get_comments(self, uuid: str) -> CommentsAnswer:
        """Return all comments of a topic. Raises LoadFailed."""
        rows, freshness = await self._serve(comments_key(checked_uuid(uuid)))
        return CommentsAnswer(list(rows.value), freshness)

    async def _feed(self, category: str | None, days_back: int) -> Feed:
        rows, freshness = await self._serve(Index(category, checked_days(days_back)).key)
        return Feed(list(rows.value), freshness)

    async def _json(self, category: str | None, days_back: int) -> FeedJson:
        key = Index(category, checked_days(days_back)).key
        rows, freshness = await self._serve(key, raw=True)
        return cast("ListedTopics", rows).as_json(freshness)

    async def _serve(self, key: str, *, raw: bool = False) -> Served:
        """Return the stored data; if it is stale, start one background refresh."""
        self._check_open()
        now = self._clock()
        rows = await self._reads.find(key, now, raw=raw)
        if rows is None:
            return await self._load_and_serve(key, forces=not self._has_fetch(key), raw=raw)
        if rows.is_fresh(self._file.fresh_for, now, self._broken.get(key)):
            return rows, Freshness(Verdict.FRESH, rows.fetched_at, self._clock)
        error = rows.failure(key, now)
        is_cooling = error is not None and not may_retry(error, now)
        if not rows.is_hit:
            if error is not None and is_cooling:
                raise error
            return await self._load_and_serve(key, forces=bool(rows.broken), raw=raw)
        self._first_fetches.pop(key, None)  # a reader got an old list, so the next copy is news
        if not is_cooling and key not in self._refreshing and len(self._refreshing) < MAX_KEYS:
            self._refreshing.add(key)
            self._tasks.spawn(self._refresh(key, forces=bool(rows.broken)))
        return rows, Freshness(Verdict.STALE, rows.fetched_at, self._clock, error)

    async def _load_and_serve(self, key: str, *, forces: bool, raw: bool) -> Served:
        """Fetch. Return the rows of the file, or the fetched data if they could not be stored."""
        self._first_fetches.note(key, self._first_fetches.get(key, True))
        answer: Answer[int] | None = None
        error: LoadFailed | None = None
        try:
            answer = await self._load_answer(key, forces=forces)
        except LoadFailed as exc:
            error = exc
        now = self._clock()
        rows = await self._reads.find(key, now, raw=raw)
        if rows is not None:
            if rows.broken and answer is not None:
                self._broken.note(key, rows.broken)
            is_fresh = rows.is_fresh(self._file.fresh_for, now, self._broken.get(key))
            if is_fresh or rows.is_hit:
                verdict = Verdict.FRESH if is_fresh else Verdict.STALE
                return rows, Freshness(verdict, rows.fetched_at, self._clock, error)
        if answer is None:
            part = part_of(error)
            if part is None:
                raise error or LoadFailed(f"{key}: nothing came")
            return unstored(key, part, now), Freshness(Verdict.STALE, now, self._clock, error)
        fetched = self._store.last_fetch(key, since=answer.value)
        if fetched is None:
            raise LoadFailed(f"{key}: its rows cannot be read")
        freshness = Freshness(answer.verdict, answer.fetched_at, self._clock)
        return unstored(key, fetched, now), freshness

    def _has_fetch(self, key: str) -> bool:
        """True if memory has what was fetched last, so the file need not be read."""
        answer = self._keys.peek(key)
        return answer is not None and self._store.last_fetch(key, since=answer.value) is not None

    async def _load_answer(self, key: str, *, forces: bool) -> Answer[int]:
        """Load through the engine. If writes overtake a fetch, it fetches again a few times.

        `forces`: load even if the engine sees a fresh copy.
        """
        if forces:
            answers = await self._keys.refresh(key)
            answer = answers[key]
        else:
            answer = await self._keys.get(key)
        for _ in range(MAX_OVERTAKEN):
            is_overtaken = answer.verdict is Verdict.STALE and not answer.unverified
            if not is_overtaken or answer.error is not None:
                break
            answer = await self._keys.get(key)
        return answer

    async def _refresh(self, key: str, *, forces: bool) -> None:
        """Refresh a key; `forces` if it has unreadable rows.

        Rows that are still unreadable afterwards are not fetched again.
        """
        try:
            if not forces:
                await self._keys.get(key)
                return
            await self._keys.refresh(key)
            rows = await self._reads.find(key, self._clock())
            if rows is not None:
                self._broken.note(key, rows.broken)
        except StillfreshError as exc:
            logger.debug("%s: not refreshed: %s", key, exc)  # the engine has logged why
        finally:
            self._refreshing.discard(key)

    async def _load(self, keys: list[str]) -> dict[str, int]:
        """Fetch a key. Its value is the time; what was fetched goes to the store beside it."""
        (key,) = keys
        at = self._clock()
        fetched = await fetch(self._source, key, now=at, lookups=self._lookups)
        is_overtaken = False
        if fetched.failed:
            try:
                is_overtaken = not await self._store.store_part(key, fetched, at)
            except StoreError as exc:
                logger.warning("%s: could not be stored: %s", key, exc)
        if not fetched.failed or is_overtaken:
            # If a write overtook the fetch, its lease is lost, and the engine fetches again.
            self._store.hand_over(key, at, fetched)
            return {key: int(at)}
        error = PartlyFailed(fetched)
        if fetched.pause is None:
            raise error
        raise RetryAfter(fetched.pause, str(error)) from error

    def _tell(self, key: str, published: Published) -> None:
        """Report a refresh, unless its callers get the answer itself."""
        if published is Published.OVERTAKEN:
            self._first_fetches.note(key, value=False)
        elif not self._first_fetches.pop(key, False):
            self._updated.emit(FeedCacheUpdated(key, changed=published is Published.NEWS))

    async def create_topic(self, topic: Topic) -> None:
        """Show a topic at once, then publish it. If the upstream refuses, remove it and raise."""
        new = checked_topic(topic)
        await self._write(
            lambda writes: writes.create_topic(new), lambda: self._source.create_topic(new)
        )

    async def delete_topic(self, uuid: str) -> None:
        """Hide a topic at once, then delete it upstream. If that fails, restore it and raise."""
        name = checked_uuid(uuid)
        await self._write(
            lambda writes: writes.delete_topic(name), lambda: self._source.delete_topic(name)
        )

    async def add_comment(self, topic_uuid: str, comment: Comment) -> None:
        """Show a comment at once, then publish it. If the upstream refuses, remove it and raise."""
        name = checked_uuid(topic_uuid)
        (new,) = checked_comments(name, [comment])
        await self._write(
            lambda writes: writes.add_comment(new), lambda: self._source.add_comment(name, new)
        )

    async def _write(
        self, change: Callable[[Writes], Change], ask: Callable[[], Awaitable[object]]
    ) -> None:
        """Write to the file, then upstream. If cancelled before the request, undo it.

        If cancelled during the request, keep it: the next refresh shows what upstream did.
        """
        self._check_open()
        keeps_change = False
        changing = self._tasks.child(self._run(change))
        changing.add_done_callback(looked_at)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wait_when_closing(done)
        try:
            await asyncio.shield(changing)
            # From here on a cancellation does not undo it: the request may have reached upstream.
            keeps_change = True
            await ask()
        except Exception:
            keeps_change = False
            raise
        finally:
            ending = self._tasks.child(self._end_write(changing, change if keeps_change else None))
            ending.add_done_callback(lambda _: done.set_result(None))
            await asyncio.shield(ending)

    async def _end_write(
        self, changing: "asyncio.Task[Change]", again: Callable[[Writes], Change] | None
    ) -> None:
        """Settle or undo; the caller gets the upstream's error, not the file's."""

        def end(writes: Writes) -> None:
            if again is None:
                writes.undo(change)
            else:
                writes.settle(change, again)

        try:
            change = await changing
            await self._run(end)
        except StillfreshError as exc:
            logger.warning("the feed cache could not be written: %s", exc)

    async def _run(self, job: Callable[[Writes], T]) -> T:
        now = self._clock()
        fresh_for = self._file.fresh_for
        return await self._store.run(lambda file: job(Writes(file, now, fresh_for)))

    def _wait_when_closing(self, work: "asyncio.Future[None]") -> None:
        """Note work that `close` waits for."""
        self._writes.add(work)
        work.add_done_callback(self._writes.discard)

    def on_remote_comment(self, uuid: str) -> "asyncio.Task[None]":
        """The upstream has a new comment: the stored ones become stale, and are refreshed."""
        self._check_open()
        task = self._tasks.child(self._remote_comment(comments_key(checked_uuid(uuid))))
        self._wait_when_closing(task)
        return task

    async def _remote_comment(self, key: str) -> None:
        """Invalidate through the engine: its memory may have comments that could not be stored."""
        await self._keys.invalidate(key)
        self._updated.emit(FeedCacheUpdated(key, changed=True))

    def on_updated(self, listener: Callable[[FeedCacheUpdated], object]) -> Unsubscribe:
        """Call `listener`, plain or async, after each refresh. Returns a function that ends it."""
        checked_function("on_updated", listener, "a function of the event")
        if inspect.iscoroutinefunction(listener):
            return self._updated.subscribe(
                lambda event: self._tasks.spawn(_call_listener(listener, event))
            )
        return self._updated.subscribe(listener)

    async def close(self) -> None:
        """Wait a moment for writes that have started, and end all refreshes."""
        self._is_closed = True
        if self._writes:
            await asyncio.wait(self._writes, timeout=GRACE)
        await self._loads.close()
        await self._tasks.end(GRACE)

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotOpen("this feed engine is closed; make another one")
        self._file.check_open()


async def _call_listener(
    listener: Callable[[FeedCacheUpdated], Any], event: FeedCacheUpdated
) -> None:
    """Call an async listener, and log its error."""
    try:
        await listener(event)
    except Exception:
        logger.exception("listener %r failed on %r", listener, event)
