"""From "somebody needs these keys" to copies in the store: leases, the load, the publication.

One Loader for a resource (E3-E8). It holds no policy: `rules.py` decides what a failure or a
foreign lease means, the store keeps the law, `flights.py` knows who is waiting.
"""

import asyncio
import logging
from collections.abc import Coroutine, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

from stillfresh.engine.flights import CURRENT, Batch, Flight, OwnLoad, Queue
from stillfresh.engine.landing import Land, Landing, Landings, Look
from stillfresh.engine.metrics import Meter
from stillfresh.engine.results import results_of
from stillfresh.engine.rules import absent_policy, plan_wait, stamped
from stillfresh.engine.spec import Runtime, Spec
from stillfresh.engine.tasks import looked_at
from stillfresh.errors import LoadFailed, StoreError
from stillfresh.stores.contract import Ask, Copy, Failure, Grant, Held, Lease, Newer, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SHORTEST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 1.0
"""E5: between two looks at another process's load; at most ten reads a second and key."""
RENEWALS: Final = 3
"""A lease is renewed when a third of it has passed, so that one lost renewal is survived."""
PARTING: Final = 1.0
"""Seconds, within `grace`, that closing waits to hear whether a lease was granted."""

logger = logging.getLogger(__name__)


class Loader(Generic[K, V]):
    """Leads flights; `land` is told how each ended, `look` what another process has done."""

    def __init__(
        self,
        spec: Spec[K, V],
        runtime: Runtime,
        *,
        queue: Queue[K, V],
        meter: Meter,
        land: Land[K, V],
        look: Look[K, V],
    ) -> None:
        self._spec = spec
        self._runtime = runtime
        self._queue = queue
        self._meter = meter
        self._land = land
        self._look = look
        self._landings = Landings(spec, runtime, meter)

    def flush(self) -> None:
        """Begin as many batches as there are places for."""
        while (taken := self._queue.take())[0]:
            self._runtime.spawn(self._lead(*taken), self._runtime.context)

    async def _lead(self, flights: list[Flight[K, V]], takes_place: bool) -> None:
        try:
            with self._told(flights):
                leases = await self._acquire(self._asks(flights))
                if mine := [flight for flight in flights if flight.id in leases]:
                    await self._load(mine, {id_: lease for id_, lease in leases.items() if lease})
        finally:
            if takes_place:
                self._queue.give_back()
            self.flush()

    @contextmanager
    def _told(self, flights: list[Flight[K, V]]) -> Iterator[None]:
        """E3: whatever ends this, nobody waits for ever."""
        try:
            yield
        except asyncio.CancelledError:
            self._fail(flights, "the cache was closed")
            raise
        except Exception:
            logger.exception("%s: stillfresh itself failed", self._spec.kind)
            self._fail(flights, "stillfresh itself failed; see the log")
        except BaseException:  # a signal's handler raises where it finds us; a task keeps it
            self._fail(flights, "the load was interrupted")
            raise

    def _fail(self, flights: list[Flight[K, V]], why: str) -> None:
        error = LoadFailed(f"{self._spec.kind}: {why}")
        open_ = [it for it in flights if self._queue.flights.get(it.key) is it]
        self._land(open_, dict.fromkeys((it.id for it in open_), Landing(error=error)))

    def _asks(self, flights: list[Flight[K, V]]) -> dict[Flight[K, V], Ask]:
        """E8: one whose tags cannot be said could not be invalidated by them: it fails, alone."""
        asks: dict[Flight[K, V], Ask] = {}
        landings: dict[str, Landing[V]] = {}
        for it in flights:
            try:
                asks[it] = Ask(it.id, it.seen, self._spec.tags_of(it.key), it.failures)
            except Exception as exc:  # noqa: BLE001 (a user's function may raise anything)
                landings[it.id] = self._landings.failed(it, exc, "its tags= failed")
        self._landings.log(landings)
        self._land([it for it in flights if it not in asks], landings)
        return asks

    async def _acquire(self, asks: dict[Flight[K, V], Ask]) -> dict[str, Lease | None]:
        """The leases for what is ours to load; None for each if the store is away (S5)."""
        if not asks:
            return {}
        since = self._runtime.clock()
        try:
            grants = await self._granted(list(asks.values()))
        except StoreError as exc:
            self._store_failed("lease", exc)
            return dict.fromkeys(it.id for it in asks)
        leases: dict[str, Lease | None] = {}
        held = []
        for flight in asks:
            match grants[flight.id]:
                case Lease() as lease:
                    leases[flight.id] = lease
                case Newer(record):
                    self._look(flight, record, since)
                case Held():
                    held.append(flight)
        self._meter.leases_won += len(leases)
        self._meter.leases_denied += len(asks) - len(leases)
        if held:
            self._runtime.spawn(self._follow(held), self._runtime.context)
        return leases

    async def _granted(self, asks: list[Ask]) -> dict[str, Grant]:
        """E13, E21: what is granted while the cache or its loop ends is given back."""
        work = self._runtime.store.acquire(self._spec.kind, asks, self._spec.lease_for)
        step = self._runtime.step(work)
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait([step], timeout=min(PARTING, self._runtime.grace / 2))
            if not step.cancel() and not step.cancelled() and step.exception() is None:
                grants: dict[str, Grant] = step.result()
                await self._release([it for it in grants.values() if isinstance(it, Lease)], {})
            raise

    async def _follow(self, flights: list[Flight[K, V]]) -> None:
        """E5: another process loads these; look now and then, with growing, jittered pauses."""
        pause, waiting = SHORTEST_PAUSE, flights
        with self._told(flights):
            while waiting := [flight for flight in waiting if self._is_waited_for(flight)]:
                await self._runtime.sleep(pause * (1 + 0.5 * self._runtime.dice()))
                pause = min(LONGEST_PAUSE, pause * 1.5)
                waiting = await self._look_around(waiting)

    async def _look_around(self, flights: list[Flight[K, V]]) -> list[Flight[K, V]]:
        """Which of these have to wait on."""
        for flight in flights:
            flight.include_late()
        since = self._runtime.clock()
        try:
            ids = [flight.id for flight in flights]
            records = await self._runtime.store.read(self._spec.kind, ids)
        except StoreError as exc:
            self._store_failed("read", exc)
            records = {}  # ask for the lease again, and load without one if that fails too
        now, waiting = self._runtime.clock(), []
        for flight in flights:
            record = records.get(flight.id, Record())
            if plan_wait(record, flight.seen, now, self._spec.lease_for) is None:
                waiting.append(flight)
            else:
                self._look(flight, record, since, waited=True)
        return waiting

    def _is_waited_for(self, flight: Flight[K, V]) -> bool:
        if flight.waiters:
            return True
        self._queue.end(flight)
        return False

    async def _load(self, flights: list[Flight[K, V]], leases: dict[str, Lease]) -> None:
        sent = stamped(self._runtime.clock())
        self._meter.batch(len(flights))
        try:
            results = await self._call(flights, list(leases.values()))
            took = self._runtime.clock() - sent
            self._landings.report_slow(took)
            gone, landing_of = absent_policy(self._spec.terms, took), self._landings.of
            landings = {
                it.id: landing_of(it, results[it.key], sent, leases.get(it.id), gone)
                for it in flights
            }
        except (asyncio.CancelledError, Exception):
            await self._release(list(leases.values()), {})
            raise
        self._meter.failing.ended(id_ for id_, it in landings.items() if it.error is None)
        self._landings.log(landings)
        await self._runtime.finish(self._settle(flights, leases, landings))

    async def _call(self, flights: list[Flight[K, V]], leases: list[Lease]) -> dict[K, object]:
        """E3: to its end, to `load_timeout`, or until the cache closes, whatever the callers do."""
        keys, batch = [flight.key for flight in flights], Batch()
        for flight in flights:
            flight.batch = batch
        context = self._runtime.context.copy()
        context.run(CURRENT.set, batch)
        load = self._runtime.child(self._work(flights, keys), context)
        try:
            await asyncio.sleep(0)
            if not load.done():
                await self._guarded(load, leases)
        finally:
            load.cancel()
            load.add_done_callback(looked_at)
        return self._results(keys, load)

    def _work(
        self, flights: list[Flight[K, V]], keys: list[K]
    ) -> Coroutine[Any, Any, Mapping[K, object]]:
        """The resource's loader, or that of the caller: then the batch is of one key."""
        by = flights[0].by
        if by is None or by.load is None:
            return self._spec.load(list(keys))
        return _alone(keys[0], by.load)

    async def _guarded(self, load: "asyncio.Task[Any]", leases: list[Lease]) -> None:
        guard = self._runtime.child(self._guard(leases), None)
        try:
            await asyncio.wait([load, guard], return_when=asyncio.FIRST_COMPLETED)
        finally:
            guard.cancel()

    def _results(self, keys: list[K], load: "asyncio.Task[Any]") -> dict[K, object]:
        kind = self._spec.kind
        if not load.done():
            pause = self._spec.load_timeout
            return dict.fromkeys(keys, TimeoutError(f"no answer within {pause:g} s (load_timeout)"))
        if load.cancelled():
            return dict.fromkeys(keys, LoadFailed(f"{kind}: the loader cancelled itself"))
        if (error := load.exception()) is not None:
            return dict.fromkeys(keys, error)
        try:
            return results_of(kind, keys, load.result())
        except Exception as exc:  # noqa: BLE001 (E25: a mapping of somebody else's)
            return dict.fromkeys(keys, exc)

    async def _guard(self, leases: list[Lease]) -> None:
        """Renew the leases while the load runs; ends when the load has run for too long."""
        left, step = self._spec.load_timeout, self._spec.lease_for / RENEWALS
        while left > 0:
            await self._runtime.sleep(min(step, left))
            left -= step
            if leases and left > 0:
                try:
                    await self._runtime.store.renew(self._spec.kind, leases, self._spec.lease_for)
                except StoreError as exc:
                    self._store_failed("renew", exc)

    async def _settle(
        self,
        flights: list[Flight[K, V]],
        leases: dict[str, Lease],
        landings: dict[str, Landing[V]],
    ) -> None:
        """Publish what came, release what failed, and tell those who wait."""
        for flight in flights:
            flight.sent = True
        copies = {
            id_: (lease, copy)
            for id_, lease in leases.items()
            if (copy := landings[id_].copy) and landings[id_].is_kept
        }
        since = self._runtime.clock()
        superseded, stored = await self._publish(copies)
        failures = {id_: it.failure for id_, it in landings.items() if it.failure is not None}
        published = copies.keys() if stored else ()
        await self._release([it for id_, it in leases.items() if id_ not in published], failures)
        self._land(flights, landings, stored=published, superseded=superseded, since=since)

    async def _publish(self, copies: dict[str, tuple[Lease, Copy]]) -> tuple[set[str], bool]:
        if not copies:
            return set(), True
        try:
            superseded = await self._runtime.store.publish(self._spec.kind, copies)
        except StoreError as exc:
            self._store_failed("publish", exc)
            return set(), False
        self._meter.superseded += len(superseded)
        return superseded, True

    async def _release(self, leases: list[Lease], failures: Mapping[str, Failure]) -> None:
        if not leases:
            return
        try:
            await self._runtime.store.release(self._spec.kind, leases, failures)
        except StoreError as exc:
            self._store_failed("release", exc)

    def _store_failed(self, what: str, error: StoreError) -> None:
        self._meter.store_errors += 1
        logger.warning("%s: the store could not %s: %s", self._spec.kind, what, error)


async def _alone(key: K, load: OwnLoad) -> dict[K, object]:
    return {key: await load()}
