"""From a cache key to its rows: fresh, stale with a refresh behind, or fetched first (F6-F8, F12).

F3 says here what is stale. Leases, cooldowns and the load itself are the engine's.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar, cast

from stillfresh.bounded import BoundedDict
from stillfresh.clock import Clock
from stillfresh.durations import Duration
from stillfresh.engine import Answer, Cache, RetryAfter
from stillfresh.engine.loader import Tasks, looked_at
from stillfresh.engine.rules import cooling
from stillfresh.errors import LoadFailed, StillfreshError, StoreError
from stillfresh.feed.cache import FeedCache
from stillfresh.feed.model import FeedCacheUpdated, Freshness
from stillfresh.feed.reading import FeedMemory, FoundRows, Sliced, unstored
from stillfresh.feed.rows import Writes
from stillfresh.feed.rules import DAY, Fetched, is_stale
from stillfresh.feed.source import FeedSource, fetch
from stillfresh.feed.store import KIND, FeedStore, InRows
from stillfresh.freshness import MAX_SKEW, Verdict, last_end

T = TypeVar("T")

AT_ONCE: Final = 16
"""Keys fetched side by side."""
MAX_KEYS: Final = 1_000
"""Keys of which anything is remembered: refreshed behind a reader, unreadable still, owed news."""
MAX_OVERTAKEN: Final = 3
"""F8: fetches that a miss waits for, if each is overtaken by a write."""

logger = logging.getLogger(__name__)


class PartlyFailed(StillfreshError):
    """F6: some days failed; what came is stored without a meta row."""

    def __init__(self, fetched: Fetched) -> None:
        super().__init__(fetched.failed)
        self.fetched = fetched


class AsItCame:
    """What was fetched goes to the rows as it is: to encode a long list holds the loop (F18)."""

    @staticmethod
    def encode(value: bytes) -> bytes:
        return value

    decode = encode


class FeedServing:
    """The reads of one FeedEngine; `emit` is told of what was fetched behind readers."""

    def __init__(
        self,
        cache: FeedCache,
        source: FeedSource,
        emit: Callable[[FeedCacheUpdated], None],
        *,
        clock: Clock,
        lookups: int,
        load_timeout: Duration,
        sleep: Callable[[float], Awaitable[object]],
    ) -> None:
        self._cache = cache
        self._source = source
        self._emit = emit
        self._clock = clock
        self._lookups = lookups
        self.store = FeedStore(cache.file, cache.tables, clock=clock, tell=self._tell)
        self.engine = Cache(self.store, clock=clock, sleep=sleep)
        self.keys = self.engine.batched(
            KIND,
            fresh_for=cache.fresh_for,
            stale_for=cache.keep_for + DAY,
            max_batch=1,
            concurrency=AT_ONCE,
            max_entries=AT_ONCE,
            load_timeout=load_timeout,
            codec=AsItCame(),
        )(self._load)
        self.tasks = Tasks()
        self.behind: dict[str, asyncio.Task[None]] = {}
        """Refreshes for readers that were given something old."""
        self._building: dict[tuple[str, bool], asyncio.Task[FoundRows[Any]]] = {}
        """F18: long lists that are being built, or wait for it."""
        self._alone = asyncio.Lock()
        self._silent: BoundedDict[str, bool] = BoundedDict(MAX_KEYS)
        """True: fetched for the first time; callers get the answer, and need no event."""
        self._broken: BoundedDict[str, frozenset[bytes]] = BoundedDict(MAX_KEYS)
        """F12: the unreadable rows that a refetch of a key has not replaced."""

    async def served(self, key: str, *, raw: bool = False) -> tuple[FoundRows[Any], Freshness]:
        """F6: the data first; then, if it is stale, one revalidation behind it."""
        now = self._clock()
        found = await self._find(key, now, raw=raw)
        if found is None:
            return await self._missed(key, forces=True, raw=raw)
        if self._is_fresh(key, found, now):
            return found, self._freshness(Verdict.FRESH, found.fetched_at)
        error = self._cooling(key, found, now)
        if not found.is_hit:
            if error is not None:
                raise error
            return await self._missed(key, forces=_forces(found, now), raw=raw)
        self._silent.pop(key, None)  # a reader is given something old: the next copy is news
        if error is None:
            self._refresh_behind(key, found, now)
        return found, self._freshness(Verdict.STALE, found.fetched_at, error)

    async def _missed(
        self, key: str, *, forces: bool, raw: bool
    ) -> tuple[FoundRows[Any], Freshness]:
        """Fetched: as it stands in the file, or as it came if it could not be stored."""
        self._silent.note(key, self._silent.get(key, True))
        answer, error = None, None
        try:
            answer = await self._loaded(key, forces=forces)
        except LoadFailed as exc:
            error = exc
        now = self._clock()
        found = await self._find(key, now, raw=raw)
        if found is not None and found.broken and answer is not None:
            self._broken.note(key, found.broken)
        is_fresh = found is not None and self._is_fresh(key, found, now)
        if found is not None and (is_fresh or found.is_hit):
            verdict = Verdict.FRESH if is_fresh else Verdict.STALE
            return found, self._freshness(verdict, found.fetched_at, error)
        if answer is None:
            if (part := _part_of(error)) is None:
                raise error or LoadFailed(f"{key}: nothing came")
            return unstored(key, part, now), self._freshness(Verdict.STALE, now, error)
        if not isinstance(answer.value, InRows):
            raise LoadFailed(f"{key}: its rows cannot be read")
        freshness = self._freshness(answer.verdict, answer.fetched_at)
        return unstored(key, answer.value.fetched, now), freshness

    async def _loaded(self, key: str, *, forces: bool) -> Answer[bytes]:
        """`forces`: the engine takes for fresh, or for failed, what is not."""
        if forces:
            await self.keys.refresh(key)
        answer = await self.keys.get(key)
        for _ in range(MAX_OVERTAKEN):
            if answer.verdict is not Verdict.STALE or answer.error is not None:
                break
            answer = await self.keys.get(key)
        return answer

    def _refresh_behind(self, key: str, found: FoundRows[Any], now: float) -> None:
        if key not in self.behind and len(self.behind) < MAX_KEYS:
            work = self._refreshed(key, found, forces=_forces(found, now))
            self.behind[key] = self.tasks.spawn(work, None)

    async def _refreshed(self, key: str, found: FoundRows[Any], *, forces: bool) -> None:
        """F12: what is unreadable still, right after a refetch, is not worth another one."""
        try:
            if not forces:
                await self.keys.get(key)
                return
            await self.keys.refresh(key)
            if found.broken and (again := await self._find(key, self._clock())) is not None:
                self._broken.note(key, again.broken)
        except StillfreshError as exc:
            logger.debug("%s: not refreshed: %s", key, exc)  # the engine has said why
        finally:
            del self.behind[key]

    async def _load(self, keys: list[str]) -> dict[str, bytes]:
        (key,), at = keys, self._clock()
        fetched = await fetch(self._source, key, now=at, lookups=self._lookups)
        try:
            if not fetched.failed or not await self.store.store_part(key, fetched, at):
                return {key: InRows.of(fetched)}  # F8: one that was overtaken is fetched once more
        except StoreError as exc:
            logger.warning("%s: could not be stored: %s", key, exc)
        error = PartlyFailed(fetched)
        raise error if fetched.pause is None else RetryAfter(fetched.pause, str(error)) from error

    def _tell(self, key: str, changed: bool | None) -> None:
        """F7: of a revalidation; None: it was overtaken, and the next one is news."""
        if changed is None:
            self._silent.note(key, value=False)
        elif not self._silent.pop(key, False):
            self._emit(FeedCacheUpdated(key, changed))

    def _is_fresh(self, key: str, found: FoundRows[Any], now: float) -> bool:
        """F3; F12: unreadable rows are refetched, once; F8: what was deleted here stays away."""
        fresh_for = self._cache.fresh_for
        if found.deleted_at is not None and -MAX_SKEW <= now - found.deleted_at < fresh_for:
            return True
        return not is_stale(found.last_fetched, fresh_for, now) and (
            not found.broken or self._broken.get(key) == found.broken
        )

    def _cooling(self, key: str, found: FoundRows[Any], now: float) -> LoadFailed | None:
        """E7: why no load may begin now; a failure from before a clock was set back is none."""
        failure = cooling(found.failure, now)
        if failure is None or _is_ahead(found, now):
            return None
        error = LoadFailed(
            f"{key}: not tried again for {failure.retry_at - now:.1f} s, "
            f"since loading failed: {failure.error}"
        )
        error.retry_at = failure.retry_at
        return error

    async def _find(self, key: str, now: float, *, raw: bool = False) -> FoundRows[Any] | None:
        """None as well if the file cannot be read: then upstream has to do."""
        try:
            while (building := self._building.get((key, raw))) is not None:
                await asyncio.wait([building])  # then from memory, or what was written since
            find = partial(FeedMemory.find, key=key, now=now, raw=raw)
            work = self._cache.file.read(find)
            try:
                next(work)
            except StopIteration as end:
                return cast("FoundRows[Any]", end.value)
            if self._building:
                work.close()
                work = self._cache.file.read(find)
            building = self._building[key, raw] = self.tasks.child(self._built(work), None)
            building.add_done_callback(lambda _: self._building.pop((key, raw)))
            building.add_done_callback(looked_at)
            return await asyncio.shield(building)
        except StoreError as exc:
            logger.warning("%s: the feed cache could not be read: %s", key, exc)
            return None

    async def _built(self, work: Sliced[T]) -> T:
        """F18: one long list at a time, since each has a connection and a memory of its own.

        The loop has a turn between two slices.
        """
        async with self._alone:
            while True:
                await asyncio.sleep(0)
                try:
                    next(work)
                except StopIteration as end:
                    return cast("T", end.value)

    def _freshness(
        self, verdict: Verdict, fetched_at: float, error: LoadFailed | None = None
    ) -> Freshness:
        return Freshness(verdict, fetched_at, self._clock, error)

    async def run(self, job: Callable[[Writes], T]) -> T:
        now, fresh_for = self._clock(), self._cache.fresh_for
        return await self.store.run(lambda file: job(Writes(file, now, fresh_for)))


def _is_ahead(found: FoundRows[Any], now: float) -> bool:
    """The last lease ends later than any can: it is from before the clock was set back."""
    return found.leased_until is not None and found.leased_until > last_end(now, 0.0)


def _forces(found: FoundRows[Any], now: float) -> bool:
    """F3, F12: the engine would not load by itself what it takes for fresh, or for cooling."""
    is_from_the_future = found.last_fetched is not None and found.last_fetched > now
    return bool(found.broken) or is_from_the_future or _is_ahead(found, now)


def _part_of(error: BaseException | None) -> Fetched | None:
    """What came, if only some days failed."""
    while error is not None:
        if isinstance(error, PartlyFailed):
            return error.fetched
        error = error.__cause__
    return None
