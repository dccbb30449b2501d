"""From "callers need these keys" to copies in the store and answers to all callers (E3-E8).

Drives the queue: `loader.py` does the work, the queue says which callers get the result, and
`rules.py` decides what another process's lease or a failure means.
"""

import asyncio
import logging
from collections.abc import Collection, Container, Coroutine, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stillfresh.engine import rules
from stillfresh.engine.flight import BEFORE, LOADED, SUPERSEDED, End, LoadEvent
from stillfresh.engine.loader import Loader, LoadResult
from stillfresh.engine.memory import NEVER
from stillfresh.engine.model import Answer, Origin, Outcome, RefreshEnd
from stillfresh.engine.queue import OVER, Batch, Flight, Waiter
from stillfresh.engine.rules import NOTHING, Fail, MustLoad, Outlook, Serve
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.spans import load_span, noted
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Copy, Failure, Held, Lease, Newer, Record

if TYPE_CHECKING:
    from stillfresh.engine.core import Core

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 1.0  # E5: seconds between two looks at another process's load
FORGET_EVERY = 60.0  # E30: seconds between two looks for exceptions that are kept for too long
OWN, ANOTHER, STALE = Origin.LOADED, Origin.ANOTHER, Verdict.STALE

logger = logging.getLogger(__name__)


class Loads(Generic[K, V]):
    """The loads of one resource while its cache is open."""

    def __init__(self, core: "Core[K, V]", runtime: Runtime) -> None:
        self.puts: dict[K, asyncio.Future[None]] = {}  # E17: running, by key
        self._spec, self._memory, self._queue = core.spec, core.memory, core.queue
        self._watcher, self._owner, self._runtime = core.watcher, core.owner, runtime
        self._loader: Loader[K, V] = Loader(core.spec, runtime, core.memory.counts)
        self._is_flushing = False
        self._storing: dict[str, asyncio.Future[None]] = {}  # puts on their way, by id
        self._running: set[asyncio.Task[Any]] = set()
        self.leases: dict[str, Lease] = {}  # of the loads under way, by id
        self._forgetting: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Let all waiting callers fail."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        closed = LoadFailed(f"{self._spec.kind}: the cache was closed")
        for flight in self._queue.close():
            _settle(flight.key, flight.waiters, closed)

    async def wait(self, waiter: Waiter[K, V]) -> None:
        """Wait until the joined loads have ended."""
        if not waiter.missing or (waiter.each and waiter.outcomes):
            return
        self.flush_soon()
        woken = asyncio.Event()
        waiter.wake = woken.set
        await woken.wait()

    @contextmanager
    def storing(self, ids: Collection[str]) -> Iterator[None]:
        """Inside the block a put of these ids is on its way to the store."""
        ended = asyncio.get_running_loop().create_future()
        self._storing.update(dict.fromkeys(ids, ended))
        try:
            yield
        finally:
            ended.set_result(None)
            for id_ in ids:
                if self._storing.get(id_) is ended:
                    del self._storing[id_]

    async def _after_puts(self, batch: Batch) -> None:
        """Wait for puts of this process: their values are the answer, and a load would be void."""
        if not self._storing:
            return
        puts = {self._storing[it.id] for it in batch.flights if it.id in self._storing}
        if puts:
            await asyncio.wait(puts)

    def give_fallback(
        self, key: K, copy: Copy, waiters: Iterable[Waiter[K, V]], *, unverified: bool = False
    ) -> None:
        """E2: an EXPIRED copy is served if the load fails."""
        if (old := self._memory.fallback(key, copy, unverified=unverified)) is not None:
            for waiter in waiters:
                waiter.fallbacks[key] = old

    def flush_soon(self) -> None:
        """E4: keys that are requested in one turn of the loop go into one batch."""
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Start as many batches as `concurrency` allows."""
        self._is_flushing = False
        while (batch := self._queue.take()) is not None:
            self._spawn(self._lead(batch))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._runtime.spawn(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def settled(self, within: float) -> bool:
        """I22: wait until nothing is loading or about to; False if something still is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._running or self._is_flushing:
                    await asyncio.sleep(0)
                    if self._running:
                        await asyncio.wait(self._running)
        return not (self._running or self._is_flushing)

    async def _lead(self, batch: Batch) -> None:
        try:
            with self._told(batch):
                await self._after_puts(batch)
                leases = await self._acquire(batch)
                if batch.flights:
                    await self._load(batch, leases)
        finally:
            self._queue.running -= batch.takes_place
            self._flush()

    @contextmanager
    def _told(self, batch: Batch) -> Iterator[None]:
        """E3: however the batch ends, its callers get an answer."""
        try:
            with load_span(self._runtime.hooks, self._spec.kind, batch):
                yield
        except asyncio.CancelledError:
            self._fail(batch, "the cache was closed")
            raise
        except Exception:
            logger.exception("%s: internal error of stillfresh", self._spec.kind)
            self._fail(batch, "internal error of stillfresh; see the log")
        except BaseException:  # a signal handler may raise here; the task keeps the exception
            self._fail(batch, "the load was interrupted")
            raise

    def _fail(self, batch: Batch, why: str) -> None:
        failed = LoadResult[V](error=LoadFailed(f"{self._spec.kind}: {why}"))
        self._end(batch.flights, {it.id: failed for it in batch.flights})

    async def _acquire(self, batch: Batch) -> dict[str, Lease]:
        """Ask for the leases. If the store is unavailable, load all keys without one (S5)."""
        asks, failed = self._loader.asks(batch)
        if failed:
            self._end([it for it in batch.flights if it.id in failed], failed)
            batch.flights = [it for it in batch.flights if it.id not in failed]
        since = self._runtime.clock()
        grants = await self._loader.asked("give leases", self._loader.acquire(asks)) if asks else {}
        held, grants = list[Flight[K, Waiter[K, V]]](), grants or {}
        leases = {id_: it for id_, it in grants.items() if isinstance(it, Lease)}
        self._memory.counts.leases_won += len(leases)
        self._memory.counts.leases_denied += len(grants) - len(leases)
        for flight in [it for it in batch.flights if it.id not in leases]:
            match grants.get(flight.id):
                case Newer(record):
                    self._look(flight, record, since)
                case Held():
                    held.append(flight)
                case _:
                    if not self._queue.drop_unleased(flight):
                        flight.go_blind()
        if held:
            self._spawn(self._follow(batch.split(held, LoadEvent.DENY)))
        batch.flights = [it for it in batch.flights if it.id in leases or it.is_blind]
        batch.step(LoadEvent.GRANT)
        return leases

    async def _follow(self, batch: Batch) -> None:
        """E5: another process loads these keys: look at intervals that grow and vary."""
        pause = SHORTEST_PAUSE
        self._queue.drop_unwaited(batch)
        with self._told(batch):
            while batch.flights:
                await self._pause(batch, pause * (1 + 0.5 * self._runtime.dice()))
                pause = min(LONGEST_PAUSE, pause * 1.5)
                await self._look_around(batch)
                self._queue.drop_unwaited(batch)

    async def _pause(self, batch: Batch, seconds: float) -> None:
        """Wait, but end early if a put of this process, which may hold the lease, has ended."""
        puts = [self.puts[flight.key] for flight in batch.flights if flight.key in self.puts]
        if not puts:
            await self._runtime.sleep(seconds)
            return
        pause: asyncio.Future[Any] = asyncio.ensure_future(self._runtime.sleep(seconds))
        try:
            await asyncio.wait([pause, *puts], return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()

    async def _look_around(self, batch: Batch) -> None:
        """Look at all keys of the batch; those that must wait longer stay in it."""
        batch.step(LoadEvent.LOOK)
        since, ids = self._runtime.clock(), [flight.id for flight in batch.flights]
        # If this fails: ask for the lease again, and load without one if that fails too.
        records = await self._loader.read(ids) or {}
        for flight in batch.flights:
            if flight.batch is batch:
                self._look(flight, records.get(flight.id, NOTHING), since, waited=True)
        batch.flights = [flight for flight in batch.flights if flight.batch is batch]
        batch.step(LoadEvent.WAIT)

    def _look(
        self, flight: Flight[K, Waiter[K, V]], record: Record, since: float, *, waited: bool = False
    ) -> None:
        """E5: another process has published, failed or died: answer from that, or ask again.

        `waited`: for that process, which may still be loading.
        """
        memory, key, seen, span = self._memory, flight.key, flight.seen, flight.batch.span
        now, lease_for = memory.now(), self._spec.lease_for
        read, wait = rules.plan_read, rules.plan_wait
        plan = wait(record, seen, now, lease_for) if waited else read(record, now, lease_for)
        if plan is None:
            return
        flight.saw(record)
        entry, copy = memory.entries.get(key), record.copy
        if entry and copy and (entry.copy.generation, entry.copy.mark) == (flight.seen, copy.mark):
            flight.batch.overtaken.discard(key)  # E17: by a put, whose value this is
        match plan:
            case Serve(copy) if flight.takes(copy, seen) and (
                answer := memory.serve(key, plan, now, ANOTHER, since)
            ):
                ended = self._queue.end(flight, End.FOUND_STALE if plan.refresh else End.FOUND)
                _settle(key, ended.told, answer)
                noted(span, plan.verdict)
                if plan.verdict is Verdict.FRESH:  # C14: otherwise the next load tells the watches
                    until = rules.watched_until(copy, self._spec.terms)
                    self._watcher.landed(key, answer, until, now)
            case Fail(failure):
                self._tell_failure(flight, End.COOLING, memory.failure_error(key, failure, now))
            case Serve() if flight.is_bound and (pause := rules.cooling(record.failure, now)):
                self.give_fallback(key, plan.copy, flight.waiters)  # if it can be read
                self._tell_failure(flight, End.COOLING, memory.failure_error(key, pause, now))
            case plan:
                if isinstance(plan, MustLoad) and plan.fallback is not None:
                    self.give_fallback(key, plan.fallback, flight.waiters)
                self._queue.end(flight, End.GIVEN_UP)
        self.flush_soon()

    async def _load(self, batch: Batch, leases: dict[str, Lease]) -> None:
        self.leases |= leases
        began = self._runtime.clock()
        try:
            results = await self._loader.results(batch, leases)
        except (asyncio.CancelledError, Exception):
            await self._loader.release(list(leases.values()), {})
            raise
        finally:
            for id_ in leases:
                del self.leases[id_]
        if self._owner.recording_to is not None:
            self._owner.recording_to.loaded(self._spec, results, began)
        await asyncio.shield(self._runtime.step(self._finish(batch, leases, results)))

    async def _finish(
        self, batch: Batch, leases: dict[str, Lease], results: dict[str, LoadResult[V]]
    ) -> None:
        """Publish the values, release the leases of failed keys, and answer the callers."""
        batch.step(LoadEvent.SEND)
        copies = {
            id_: (lease, copy)
            for id_, lease in leases.items()
            if (copy := (it := results[id_]).copy) is not None and it.is_kept
        }
        since = self._runtime.clock()
        late = {id_: tags for id_ in copies if (tags := results[id_].tags) is not None}
        superseded = await self._loader.publish(copies, late)
        published: Container[str] = copies if superseded is not None else ()
        if superseded is None or len(copies) < len(leases):
            failures = {id_: it.failure for id_, it in results.items() if it.failure is not None}
            unused = [lease for id_, lease in leases.items() if id_ not in published]
            await self._loader.release(unused, failures)
        self._end(batch.flights, results, published, superseded or (), since)

    def _end(
        self,
        flights: Iterable[Flight[K, Waiter[K, V]]],
        results: Mapping[str, LoadResult[V]],
        published: Container[str] = (),
        superseded: Container[str] = (),
        since: float = NEVER,  # the store was asked to keep them, so nothing later is known
    ) -> None:
        """End each key as its result says; all at once, before the next loads begin."""
        now = self._memory.now()
        outlook: Outlook | None = None
        have_failed = len(self._memory.causes) > 0  # most loads have no failure to forget
        for flight in flights:
            if flight.batch is OVER:
                continue  # the cache was closed
            id_, result = flight.id, results[flight.id]
            if flight.by is not None:
                flight.by.private = result.private
            if (error := result.error) is not None:
                self._remember(flight, result.failure, error)
                self._memory.has_failed(flight.key, result.failure)
                self._tell_failure(flight, End.FAILED, error)
            elif (copy := result.copy) is not None:
                if have_failed:
                    self._memory.causes.forget(flight.key)
                how = SUPERSEDED if id_ in superseded else LOADED
                kept = since if id_ in published else None
                if outlook is None or copy.policy is not outlook.policy:
                    outlook = self._memory.outlook(copy, now)
                    noted(flight.batch.span, outlook.at_arrival)
                self._tell_value(flight, how, copy, result, outlook, kept)
        self.flush_soon()

    def _remember(
        self, flight: Flight[K, Waiter[K, V]], failure: Failure | None, error: LoadFailed
    ) -> None:
        """E30: keep the error with its cause for later callers of this process."""
        if failure is None:
            return
        if flight.by is not None and flight.by.load is not None:
            # The cause may hold a response that was meant for the caller with this loader alone.
            error = type(error)()
        self._memory.remember(flight.key, failure, error)
        if self._forgetting is None:
            self._forgetting = self._runtime.loop.call_later(FORGET_EVERY, self._forget_causes)

    def _forget_causes(self) -> None:
        """Let go of old exceptions, although nobody asks for their keys any more."""
        causes, self._forgetting = self._memory.causes, None
        causes.forget_old(self._memory.now())
        if causes:
            self._forgetting = self._runtime.loop.call_later(FORGET_EVERY, self._forget_causes)

    def _tell_value(  # noqa: PLR0917 (called for each key that is loaded)
        self,
        flight: Flight[K, Waiter[K, V]],
        how: End,
        copy: Copy,
        result: LoadResult[V],
        outlook: Outlook,
        since: float | None,
    ) -> None:
        """`since` is None if the store does not have the value."""
        if result.tags and not flight.batch.tags.isdisjoint(result.tags):
            flight.overtake()
        key, value, span, memory = flight.key, result.value, flight.batch.span, self._memory
        ended = self._queue.end(flight, how)
        verdict = STALE if ended.is_overtaken else outlook.at_arrival
        found, at, clock = copy.value is not None, copy.fetched_at, memory.now
        origin = OWN
        not_stored: RefreshEnd | None = None
        if ended.is_overtaken:
            not_stored = RefreshEnd.SUPERSEDED
        elif since is None:
            not_stored = RefreshEnd.UNSTORED
        for waiter in ended.told:  # the first caller started the load, the others share it
            # E29: a caller that came after the load began may know of an invalidation that the
            # store, which did not confirm the value, could not tell us.
            unverified = since is None and flight.waiters[waiter] is not BEFORE
            given = rules.without_store(verdict) if unverified else verdict
            answer = Answer(
                value, found, given, at, origin, clock, None, unverified, copy.policy, copy.mark
            )
            if not_stored is not None:
                waiter.not_stored[key] = not_stored
            waiter.settle(key, answer)  # type: ignore[arg-type]
            origin = ANOTHER
        if ended.is_overtaken:
            noted(span, STALE)
            return
        if since is None:
            memory.keep_unstored(key, copy, value, outlook, flight.seen)
        else:
            memory.keep(key, copy, value, outlook, since)
        if result.tags is not None:
            memory.retag(key, copy.generation, result.tags)
        if key in self._watcher.watches or self._watcher.late:
            self.tell_watches(key, copy, value, outlook, unverified=since is None)

    def tell_watches(
        self,
        key: K,
        copy: Copy,
        value: V | None,
        outlook: Outlook,
        *,
        unverified: bool = False,
    ) -> None:
        """A new copy was loaded, or put. `unverified`: the store did not confirm it."""
        verdict = outlook.at_arrival
        if unverified:  # E29: a watch asked at no certain time, so perhaps after the load began
            verdict = rules.without_store(verdict)
        answer = self._memory.made(copy, value, verdict, OWN, unverified=unverified)
        until = rules.watched_until(copy, self._spec.terms)
        self._watcher.landed(key, answer, until, outlook.now)

    def _tell_failure(self, flight: Flight[K, Waiter[K, V]], how: End, error: LoadFailed) -> None:
        noted(flight.batch.span, Verdict.GONE, error.__cause__ or error)
        _settle(flight.key, self._queue.end(flight, how).told, error)
        if flight.key in self._watcher.watches:
            self._watcher.look_again([flight.key])


def _settle(key: K, waiters: Iterable[Waiter[K, V]], outcome: Outcome[V]) -> None:
    for waiter in waiters:
        waiter.settle(key, outcome)
