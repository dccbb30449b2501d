"""The work of a load: leases, one call of the loader, publication (E3-E5, E7, E8, E25).

It knows no callers, and holds no policy: `rules.py` says what a failure, an absence or a value's
own terms mean, and the store keeps the law.
"""

import asyncio
import logging
from collections.abc import Coroutine, Hashable, Mapping
from secrets import token_hex
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct

from stillfresh.engine.flight import Batch, Flight
from stillfresh.engine.model import Dropped, OwnLoad, Private
from stillfresh.engine.queue import CURRENT, Waiter
from stillfresh.engine.rules import (
    Absent,
    absent_policy,
    failed,
    kept,
    pause_of,
    results_of,
    stamped,
)
from stillfresh.engine.spec import Spec
from stillfresh.engine.stats import Counts
from stillfresh.engine.tasks import Runtime, looked_at
from stillfresh.errors import LoadFailed, StoreError, error_text
from stillfresh.freshness import Policy
from stillfresh.stores.contract import Ask, Copy, Failure, Grant, Lease

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

PARTING: Final = 1.0
"""Seconds, within `grace`, that closing waits to hear whether a lease was granted."""
NO_VALUE: Final = (Absent, Private, BaseException)
RENEWALS: Final = 3
"""A lease is renewed when a third of it has passed, so that one lost renewal is survived."""

logger = logging.getLogger(__name__)


class LoadResult(Struct, Generic[V], frozen=True):
    """How a key's load ended: with a copy and its value, or with an error."""

    copy: Copy | None = None
    value: V | None = None
    failure: Failure | None = None
    error: LoadFailed | None = None
    is_kept: bool = True
    """False: told to the callers that wait, and not published."""
    private: Private[Any] | None = None
    """For the caller whose loader gave it."""


class Loader(Generic[K, V]):
    """Asks the store and the loader of one resource; a store that fails is counted and logged."""

    def __init__(self, spec: Spec[K, V], runtime: Runtime, counts: Counts) -> None:
        self._spec = spec
        self._runtime = runtime
        self._counts = counts

    async def results(self, batch: Batch, leases: Mapping[str, Lease]) -> dict[str, LoadResult[V]]:
        """By id. What was sent now is published under these leases, which are kept alive."""
        sent, counts = stamped(self._runtime.clock()), self._counts
        flights: list[Flight[K, Any]] = batch.flights
        counts.loads += 1
        counts.loaded += len(flights)
        counts.largest_batch = max(counts.largest_batch, len(flights))
        said = await self._call(batch, list(leases.values()))
        took = self._runtime.clock() - sent
        self._report_slow(took)
        results = self._results(flights, said, leases, sent, took)
        if counts.failing:
            counts.mended(id_ for id_, it in results.items() if it.error is None)
        self._log(results)
        return results

    def _results(
        self,
        flights: list[Flight[K, Any]],
        said: Mapping[K, object],
        leases: Mapping[str, Lease],
        sent: float,
        took: float,
    ) -> dict[str, LoadResult[V]]:
        """What was said of each key, as a copy. E25: one that cannot be stored fails alone."""
        terms, codec, dice = self._spec.terms, self._spec.codec, self._runtime.dice
        gone: Policy | None = None
        results: dict[str, LoadResult[V]] = {}
        for it in flights:
            result, lease = said[it.key], leases.get(it.id)
            generation = lease.token if lease is not None else token_hex(16)
            try:
                if not isinstance(result, NO_VALUE):
                    copy, value = kept(result, terms, codec, (generation, sent), dice)
                    results[it.id] = LoadResult(copy, value)
                elif isinstance(result, BaseException):
                    results[it.id] = self._failed(it, result)
                else:
                    gone = gone or absent_policy(terms, took)
                    copy = Copy(generation, sent, gone, None)
                    results[it.id] = self._absent(it, result, copy)
            except Exception as exc:  # noqa: BLE001 (a codec may raise anything)
                error = LoadFailed(f"the value cannot be stored: {error_text(exc)}")
                error.__cause__ = exc
                results[it.id] = self._failed(it, error)
        return results

    def _absent(self, flight: Flight[K, Any], result: object, copy: Copy) -> LoadResult[V]:
        self._counts.absent += 1
        if not isinstance(result, Private):
            return LoadResult(copy)
        is_kept = result.is_noted or flight.seen is not None
        return LoadResult(copy, is_kept=is_kept, private=result)

    def _failed(
        self, flight: Flight[K, Any], error: BaseException, what: str = "loading failed"
    ) -> LoadResult[V]:
        text, runtime, terms = error_text(error), self._runtime, self._spec.terms
        raised = LoadFailed(f"{self._spec.kind} {flight.key!r}: {what}: {text}")
        raised.__cause__ = error
        if isinstance(error, Dropped):
            return LoadResult(error=raised)
        failure = failed(
            flight.failure,
            text,
            runtime.clock(),
            runtime.dice(),
            pause_of(error),
            first=terms.first_cooldown,
            longest=terms.longest_cooldown,
        )
        self._counts.failed_with(flight.id, failure)
        return LoadResult(failure=failure, error=raised)

    def _log(self, results: Mapping[str, LoadResult[V]]) -> None:
        """E7: once for a batch."""
        errors = [it.error for it in results.values() if it.failure is not None]
        if errors:
            of = f"{len(errors)} of {len(results)} failed; " if len(results) > 1 else ""
            logger.warning("%s%s", of, errors[0])

    def store_failed(self, what: str, error: StoreError) -> None:
        self._counts.store_errors += 1
        logger.warning("%s: the store could not %s: %s", self._spec.kind, what, error)

    def asks(self, batch: Batch) -> tuple[list[Ask], dict[str, LoadResult[V]]]:
        """E8: one whose tags cannot be said could not be invalidated by them: it fails, alone."""
        asks: list[Ask] = []
        failed: dict[str, LoadResult[V]] = {}
        for it in batch.flights:
            try:
                tags = () if self._spec.tags is None else self._spec.tags_of(it.key)
                asks.append(Ask(it.id, it.seen, tags, it.failures))
            except Exception as exc:  # noqa: BLE001 (a user's function may raise anything)
                failed[it.id] = self._failed(it, exc, "its tags= failed")
        self._log(failed)
        return asks, failed

    async def acquire(self, asks: list[Ask]) -> dict[str, Grant] | None:
        """None if the store is away (S5)."""
        try:
            return await self._granted(asks)
        except StoreError as exc:
            self.store_failed("lease", exc)
            return None

    async def _granted(self, asks: list[Ask]) -> dict[str, Grant]:
        """E13, E21: what is granted while the cache or its loop ends is given back."""
        work = self._runtime.store.acquire(self._spec.kind, asks, self._spec.lease_for)
        step: asyncio.Task[dict[str, Grant]] = self._runtime.step(work)
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait([step], timeout=min(PARTING, self._runtime.grace / 2))
            if not step.cancel() and not step.cancelled() and step.exception() is None:
                granted = step.result().values()
                await self.release([it for it in granted if isinstance(it, Lease)], {})
            raise

    async def publish(self, copies: dict[str, tuple[Lease, Copy]]) -> tuple[set[str], bool]:
        """Which were superseded, and whether the store could be asked at all."""
        if not copies:
            return set(), True
        try:
            superseded = await self._runtime.store.publish(self._spec.kind, copies)
        except StoreError as exc:
            self.store_failed("publish", exc)
            return set(), False
        self._counts.superseded += len(superseded)
        return superseded, True

    async def release(self, leases: list[Lease], failures: Mapping[str, Failure]) -> None:
        if not leases:
            return
        try:
            await self._runtime.store.release(self._spec.kind, leases, failures)
        except StoreError as exc:
            self.store_failed("release", exc)

    async def _call(self, batch: Batch, leases: list[Lease]) -> dict[K, object]:
        """E3: to its end, to `load_timeout`, or until the cache closes, whatever the callers do."""
        keys = [flight.key for flight in batch.flights]
        context = self._runtime.context.copy()
        context.run(CURRENT.set, batch)
        load = self._runtime.child(self._work(batch, keys), context)
        try:
            await asyncio.sleep(0)
            if not load.done():
                await self._guarded(load, leases)
        finally:
            if load.done():
                looked_at(load)
            else:
                load.cancel()
                load.add_done_callback(looked_at)
        return self._said(keys, load)

    def _work(self, batch: Batch, keys: list[K]) -> Coroutine[Any, Any, Mapping[K, object]]:
        """The resource's loader, or that of the caller: then the batch is of one key."""
        by: Waiter[K, V] | None = batch.flights[0].by
        if by is None or by.load is None:
            return self._spec.load(list(keys))
        return _alone(keys[0], by.load)

    async def _guarded(self, load: "asyncio.Task[Any]", leases: list[Lease]) -> None:
        guard = self._runtime.child(self._guard(leases), None)
        try:
            await asyncio.wait([load, guard], return_when=asyncio.FIRST_COMPLETED)
        finally:
            guard.cancel()

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
                    self.store_failed("renew", exc)

    def _said(self, keys: list[K], load: "asyncio.Task[Any]") -> dict[K, object]:
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

    def _report_slow(self, took: float) -> None:
        """E16: once for a resource."""
        fresh_for = self._spec.terms.policy.fresh_for
        if 0 < fresh_for <= took and not self._counts.slow_reported:
            self._counts.slow_reported = True
            logger.warning(
                "%s: the loader took %.3g s, and what it loads is fresh for %.3g s, which count "
                "from when it was asked: nothing is fresh when it arrives. Make fresh_for longer, "
                "or the loader faster.",
                self._spec.kind,
                took,
                fresh_for,
            )


async def _alone(key: K, load: OwnLoad) -> dict[K, object]:
    return {key: await load()}
