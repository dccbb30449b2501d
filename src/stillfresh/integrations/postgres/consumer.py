"""The consumer of an outbox: it invalidates the tags in it, and loses none.

Of several processes with one consumer's name, one works at a time, and any of them continues where
another stopped. A cycle is one transaction: take the turn, read the rows of the transactions that
are not in `seen`, invalidate their tags, set `seen`. If it ends before its commit, the next cycle
does all of it again, which does no harm. A NOTIFY begins a cycle at once; a lost one costs `poll`.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Self

from stillfresh.backoff import pause_after, spread
from stillfresh.durations import Duration, seconds
from stillfresh.engine import MAX_TAGS, Cache, Lag, commit_token
from stillfresh.errors import ConfigError, NotOpen, StillfreshError, shown
from stillfresh.integrations.postgres.database import OutboxLink, connected
from stillfresh.integrations.postgres.rules import KEPT, covers, has_ended, is_yet_to_begin
from stillfresh.integrations.routes import check_cache
from stillfresh.pages import PageCache
from stillfresh.pages.routes import own_tag

NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,60}")
MOST_XIDS: Final = 1 << 64
ROWS: Final = 500
"""Rows that are read together."""
AT_ONCE: Final = 32
"""The most invalidations at once."""
SWEPT: Final = 10_000
"""Rows that are deleted together."""
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
LOOKED_EVERY: Final = 0.1
"""Seconds between two looks at another process's work, while a caller waits for it."""
TURN: Final = 0x5F0B
"""The first half of the advisory lock's number."""
IDLE: Final = "30s"
"""A process that holds the turn and is silent for this time has lost it."""
SAID_EVERY: Final = 10.0
"""Seconds of work between two signs of life."""

BEGIN: Final = f"""
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL idle_in_transaction_session_timeout = '{IDLE}'"""
TAKE_TURN: Final = "SELECT pg_try_advisory_xact_lock(%s, hashtext(%s))"
SYSTEM: Final = """(
SELECT hashtextextended(concat_ws(' ', system_identifier,
    greatest(timeline_id, min_recovery_end_timeline), d.oid,
    'stillfresh_outbox.consumer'::regclass::oid), 0)
FROM pg_control_system(), pg_control_checkpoint(), pg_control_recovery(), pg_database d
WHERE datname = current_database())"""
"""A number that changes after a restore or a failover: the data may have gone back in time."""
LOOK: Final = f"""
SELECT c.name IS NOT NULL AND c.system = s.system, c.seen::text,
    pg_current_snapshot()::text,
    extract(epoch FROM statement_timestamp() - c.caught_up_at)::float8
FROM (VALUES ({SYSTEM})) s (system) LEFT JOIN stillfresh_outbox.consumer c ON c.name = %s"""  # noqa: S608 (no value is in it)
REGISTER: Final = f"""
INSERT INTO stillfresh_outbox.consumer (name, system) VALUES (%s, {SYSTEM})
ON CONFLICT (name) DO UPDATE SET seen = NULL, system = excluded.system"""  # noqa: S608 (as above)
NEW_ROWS: Final = """
SELECT xid::text, number, tag FROM stillfresh_outbox.changed
WHERE (xid, number) > (%s::xid8, %s) AND xid < pg_snapshot_xmax(%s::pg_snapshot)
    AND NOT pg_visible_in_snapshot(xid, %s::pg_snapshot)
    AND pg_visible_in_snapshot(xid, %s::pg_snapshot)
ORDER BY xid, number LIMIT %s"""
DONE: Final = """
UPDATE stillfresh_outbox.consumer SET seen = %s::pg_snapshot, caught_up_at = now()
WHERE name = %s AND (%s OR NOT EXISTS (
    SELECT FROM stillfresh_outbox.changed WHERE xid >= pg_snapshot_xmin(%s::pg_snapshot)
    AND tag = '' AND NOT pg_visible_in_snapshot(xid, %s::pg_snapshot)))"""
"""Not if rows of this delivery may have been dropped, unless everything was made stale."""
DROP_LOST: Final = """
DELETE FROM stillfresh_outbox.consumer
WHERE caught_up_at < statement_timestamp() - %s::interval AND name <> %s"""
SWEEP: Final = """
DELETE FROM stillfresh_outbox.changed WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM stillfresh_outbox.changed c
    WHERE xid < (SELECT coalesce(pg_snapshot_xmax(seen), '0') FROM stillfresh_outbox.consumer
                 ORDER BY 1 LIMIT 1)
    AND NOT EXISTS (SELECT FROM stillfresh_outbox.consumer
                    WHERE NOT pg_visible_in_snapshot(c.xid, seen))
    ORDER BY xid, number LIMIT %s))"""

logger = logging.getLogger(__name__)


class OutboxConsumer:
    """Invalidates tags by a database's outbox: `async with OutboxConsumer(cache, url, "shop"):`.

    Each name receives every change: use one name for each store. All processes that share a store
    may run a consumer of the same name. `/readyz` fails if it is more than `max_lag` behind. It
    looks for changes when it is notified, and every `poll`. `soft`: old copies are served while
    they are refreshed.
    """

    def __init__(
        self,
        cache: Cache | PageCache,
        database: str,
        name: str = "cache",
        *,
        poll: Duration = "5s",
        max_lag: Duration = "30s",
        soft: bool = False,
    ) -> None:
        self._named: Callable[[str], str] = own_tag if isinstance(cache, PageCache) else str
        cache = cache.cache if isinstance(cache, PageCache) else cache
        check_cache(cache, Cache)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError(
                f"consumer {shown(name)}: its name is 1 to 60 letters, digits, '-', '_' and '.'"
            )
        self.name = name
        self._cache = cache
        self._database = database
        self._poll = seconds(poll, name="poll")
        self._max_lag = seconds(max_lag, name="max_lag")
        self._soft = soft
        self._task: asyncio.Task[None] | None = None
        self._caught_up = time.monotonic()
        """Everything that was committed before this time, by our clock, was delivered."""
        self._looked: tuple[float, str] | None = None
        """When it last looked, and the snapshot then."""
        self._delivered: str | None = None
        """The last snapshot that is known to be delivered, by this process or another one."""
        self._last_look: tuple[float, str] | None = None
        """When the last cycle began, and the snapshot then."""
        self._wake = asyncio.Event()
        """Set if the next cycle is to begin at once."""
        self._cycled = asyncio.Event()
        """Set at the end of the current cycle; each cycle has an event of its own."""
        self._waiting = 0
        """Callers in `caught_up()`."""

    @property
    def lag(self) -> float:
        """Seconds that it is behind, as far as this process knows: older commits are delivered."""
        return time.monotonic() - self._caught_up

    def token(self, transaction: int | str) -> str:
        """Return the token of a transaction, for `get(at_least=…)` after its commit.

        `transaction` is the result of `SELECT pg_current_xact_id()` inside it. A read with the
        token waits until this consumer, in any process, has delivered the commit; at most 5 s.
        """
        try:
            xid = int(transaction)
        except (TypeError, ValueError):
            xid = -1
        if not 0 <= xid < MOST_XIDS:
            raise ConfigError(
                f"token: takes the result of pg_current_xact_id(), not {shown(transaction)}"
            )
        return commit_token(self.name, xid)

    async def caught_up(self) -> None:
        """Wait until every change that was committed before this call is delivered."""
        now = time.monotonic()
        await self._wait_until(lambda: self._caught_up >= now)

    async def _wait_for(self, xid: int) -> None:
        """Wait until this transaction is delivered. One that never began is not waited for."""
        now = time.monotonic()

        def is_settled() -> bool:
            if self._delivered is not None and has_ended(xid, self._delivered):
                return True
            if self._last_look is None:
                return False
            looked_at, snapshot = self._last_look
            return looked_at >= now and is_yet_to_begin(xid, snapshot)

        await self._wait_until(is_settled)

    async def _wait_until(self, is_settled: Callable[[], bool]) -> None:
        """Let cycles follow each other until one of them settles it."""
        if is_settled():
            return
        self._waiting += 1
        self._wake.set()
        try:
            while not is_settled():
                if self._task is None or self._task.get_loop() is not asyncio.get_running_loop():
                    raise NotOpen(
                        "this consumer is closed, or runs in another event loop; "
                        "use it within its own async with"
                    )
                await self._cycled.wait()
        finally:
            self._waiting -= 1

    async def __aenter__(self) -> Self:
        """Start. Tries again while the database is unavailable; without an outbox: ConfigError."""
        if self.name in self._cache.lags:
            raise ConfigError(
                f"consumer {self.name}: this cache has a consumer of this name; "
                "choose another name for each database"
            )
        self._caught_up = time.monotonic()
        self._wake = asyncio.Event()  # of this loop
        try:
            async with connected(self._database) as link:
                await link.ask(LOOK, self.name)
        except ConfigError:
            raise
        except StillfreshError as exc:
            logger.warning("outbox %s: failed, and is tried again: %s", self.name, exc)
        self._task = asyncio.create_task(self._run())
        self._cache.lags[self.name] = lambda: Lag(self.lag, self._max_lag)
        self._cache.outboxes.follow(self.name, self._wait_for)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cache.lags.pop(self.name, None)
        self._cache.outboxes.leave(self.name)
        task = self._task
        self._task = None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._wake_waiting_callers()

    async def _run(self) -> None:
        """Connect, and run cycles until the connection fails; then pause and connect again."""
        failures = 0
        while True:
            try:
                async with connected(self._database) as link:
                    self._looked = None
                    await link.ask("LISTEN stillfresh_outbox")
                    while True:
                        await self._cycle(link)
                        failures = 0
                        await self._pause(link)
            except StillfreshError as exc:
                logger.warning("outbox %s: failed, and is tried again: %s", self.name, exc)
            except Exception:
                logger.exception("outbox %s: internal error; it is tried again", self.name)
            self._wake_waiting_callers()
            failures += 1
            pause = pause_after(failures, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
            await asyncio.sleep(spread(pause, random.random))

    async def _cycle(self, link: OutboxLink) -> None:
        """One transaction: take the turn, deliver the new rows, and note that they are delivered.

        Without the turn, it only looks how far another process has come.
        """
        self._wake.clear()
        began = time.monotonic()
        await link.ask(BEGIN)
        [(is_ours,)] = await link.ask(TAKE_TURN, TURN, self.name)
        [(is_known, seen, now, behind)] = await link.ask(LOOK, self.name)
        self._last_look = began, now
        self._delivered = seen if is_known else None
        if is_known and seen is not None:
            self._caught_up = min(self._caught_up, began - behind)
            self._compare(began, seen, now)
        delivered = None
        if is_ours and not is_known:  # committed before it is used: others keep rows for it
            await link.ask(REGISTER, self.name)
            self._wake.set()
        elif is_ours:
            is_all = await self._deliver(link, seen, now)
            [(is_done,)] = await link.ask(DONE, now, self.name, is_all, now, now)
            if is_done:
                self._caught_up = began
                delivered = now
            await link.ask(DROP_LOST, KEPT, self.name)
            [(swept,)] = await link.ask(SWEEP, SWEPT)
            if not is_done or swept == SWEPT:
                self._wake.set()
        await link.ask("COMMIT")
        self._delivered = delivered or self._delivered
        self._wake_waiting_callers()

    def _compare(self, began: float, seen: str, now: str) -> None:
        """Note if another process has delivered everything that this one saw at its last look."""
        if self._looked is not None:
            at, snapshot = self._looked
            if not covers(seen, snapshot):
                return
            self._caught_up = max(self._caught_up, at)
        self._looked = began, now

    async def _deliver(self, link: OutboxLink, seen: str | None, now: str) -> bool:
        """Invalidate the tags in the snapshot `now` and not in `seen`. True if all entries were.

        A tag that the store refuses does not delay the others; the cycle fails after them.
        """
        if seen is None:
            await self._invalidate_all(link, "it is new, or its database was restored")
            return True
        is_all, tags, reached = await self._deliver_once(link, seen, now)
        if not is_all and tags > 1 and reached:
            # Tags are not invalidated at once. In between, a value whose tag is done may be made of
            # one whose tag is still to come.
            is_all, _, _ = await self._deliver_once(link, seen, now)
        return is_all

    async def _deliver_once(self, link: OutboxLink, seen: str, now: str) -> tuple[bool, int, int]:
        """What `_deliver` does, once; also returns how many tags and entries were invalidated."""
        failed: list[BaseException] = []
        place: tuple[str, int] = (seen.partition(":")[0], 0)
        count = 0
        reached: list[int] = []
        while True:
            rows = await link.ask(NEW_ROWS, *place, now, seen, now, ROWS)
            if not rows:
                break
            tags = sorted({tag for _, _, tag in rows})
            if "" in tags:
                why = "a table was emptied or mapped, or this consumer was too long behind"
                await self._invalidate_all(link, why)
                return True, 0, 0
            await self._while_alive(link, self._invalidate(tags, reached, failed))
            count += len(tags)
            last_xid, last_number, _ = rows[-1]
            place = (last_xid, last_number)
        if failed:
            raise failed[0]
        return False, count, sum(reached)

    async def _invalidate(
        self, tags: Sequence[str], reached: list[int], failed: list[BaseException]
    ) -> None:
        """Invalidate the tags, some at a time.

        Adds to `reached` how many entries each had, and the errors to `failed`.
        """
        cache_tags = [self._named(tag) for tag in tags]
        valid_tags = [tag for tag in cache_tags if len(tag.encode()) <= MAX_TAGS]
        for first in range(0, len(valid_tags), AT_ONCE):
            batch = valid_tags[first : first + AT_ONCE]
            steps = (self._cache.invalidate_tag(tag, soft=self._soft) for tag in batch)
            results = await asyncio.gather(*steps, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    failed.append(result)
                else:
                    reached.append(len(result))
            if len(failed) >= AT_ONCE:  # the store is unavailable
                raise failed[0]

    async def _invalidate_all(self, link: OutboxLink, why: str) -> None:
        logger.info("outbox %s: all entries are invalidated: %s", self.name, why)
        await self._while_alive(link, self._cache.invalidate_all(soft=self._soft))

    async def _while_alive(self, link: OutboxLink, work: Coroutine[Any, Any, object]) -> None:
        """Keep the turn while the work runs; it ends if the connection is lost."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait([task], timeout=SAID_EVERY)
                if done:
                    break
                await link.ask("SELECT 1")
        finally:
            task.cancel()
            await asyncio.wait([task])
        task.result()

    async def _pause(self, link: OutboxLink) -> None:
        """Wait until a change is notified, a caller waits for it, or `poll` is over."""
        longest = LOOKED_EVERY if self._waiting else self._poll
        notification = asyncio.ensure_future(link.notified())
        tasks = [notification, asyncio.ensure_future(self._wake.wait())]
        try:
            await asyncio.wait(tasks, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not notification.cancelled():
            notification.result()  # raises if the connection was lost

    def _wake_waiting_callers(self) -> None:
        """A cycle has ended: let `caught_up()` look, and give the next cycle its own event."""
        self._cycled.set()
        self._cycled = asyncio.Event()
