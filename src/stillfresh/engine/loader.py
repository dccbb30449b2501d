"""What a load asks of the store and of the loader, and the results as copies.

It knows no callers and decides nothing: `rules.py` says what a failure, an absence or a value's own
times mean, and the store enforces the law.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from contextvars import copy_context
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct

from stillfresh.clock import monotonic as ticks
from stillfresh.engine import rules
from stillfresh.engine.codecs import advice_on
from stillfresh.engine.counts import Counts
from stillfresh.engine.keys import Spec
from stillfresh.engine.model import Dropped, Loaded, Origin, Private
from stillfresh.engine.rules import Absent
from stillfresh.engine.work import CURRENT, Work
from stillfresh.errors import (
    LONGEST_TEXT,
    BadValue,
    LoadFailed,
    StoreError,
    error_text,
    without_secrets,
)
from stillfresh.freshness import Policy
from stillfresh.stores.contract import Ask, Copy, Failure, Grant, LateTags, Lease, Record
from stillfresh.tasks import looked_at

if TYPE_CHECKING:
    from stillfresh.engine.load import Load
    from stillfresh.engine.runtime import Runtime

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")

PARTING: Final = 1.0  # seconds, within `grace`, that closing waits for a lease request to end
NO_VALUE: Final = (Absent, Private, BaseException)
RENEWALS: Final = 3  # renewals in the time of a lease, so that one may be lost

logger = logging.getLogger(__name__)


class LoadResult(Struct, Generic[V], frozen=True):
    """How the load of a key ended: with a copy and its value, or with an error."""

    copy: Copy | None = None
    value: V | None = None
    failure: Failure | None = None
    error: LoadFailed | None = None
    is_kept: bool = True
    """False: waiting callers get the value, and it is not stored."""
    private: Private[Any] | None = None
    """Only for the caller that brought the loader."""
    tags: tuple[str, ...] | None = None  # tags that came with the value


class Loader(Generic[K, V]):
    """Asks the store and the loader of one resource; a store that fails is counted and logged."""

    def __init__(self, spec: Spec[K, V], runtime: "Runtime", counts: Counts) -> None:
        self._spec = spec
        self._runtime = runtime
        self._counts = counts

    async def asked(self, what: str, step: Awaitable[T]) -> T | None:
        """The store's answer; None if it is unavailable."""
        try:
            return await step
        except StoreError as exc:
            self._counts.store_errors += 1
            logger.warning("%s: the store could not %s: %s", self._spec.kind, what, exc)
            return None

    def asks(self, works: Iterable[Work[K, V]]) -> tuple[list[Ask], dict[str, LoadResult[V]]]:
        """A key whose tags are unknown could not be invalidated by them: only it fails."""
        asks: list[Ask] = []
        failed: dict[str, LoadResult[V]] = {}
        for work in works:
            try:
                tags = () if self._spec.tags is None else self._spec.tags_of(work.key)
                asks.append(Ask(work.id, work.seen, tags, work.failures))
            except Exception as exc:  # noqa: BLE001 (a user's function may raise anything)
                failed[work.id] = self._failed_result(work, exc, "its tags= failed")
        self._log(failed)
        return asks, failed

    async def acquire(self, asks: list[Ask]) -> dict[str, Grant]:
        """Release a lease that is granted while the cache or its loop ends."""
        work = self._runtime.store.acquire(self._spec.kind, asks, self._spec.lease_for)
        step: asyncio.Task[dict[str, Grant]] = self._runtime.step(work)
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait([step], timeout=min(PARTING, self._runtime.grace / 2))
            if not step.cancel() and not step.cancelled() and step.exception() is None:
                granted = step.result().values()
                await self.release([grant for grant in granted if isinstance(grant, Lease)], {})
            raise

    async def read(self, ids: list[str]) -> dict[str, Record] | None:
        """What other processes have stored; None if the store is unavailable."""
        return await self.asked("be read", self._runtime.store.read(self._spec.kind, ids))

    async def publish(
        self, copies: dict[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str] | None:
        """Publish, and return the superseded ids; None if the store did not answer."""
        if not copies:
            return set()
        publishing = self._runtime.store.publish(self._spec.kind, copies, tags)
        superseded = await self.asked("store the value", publishing)
        self._counts.superseded += len(superseded or ())
        return superseded

    async def release(self, leases: list[Lease], failures: Mapping[str, Failure]) -> None:
        if leases:
            store = self._runtime.store
            await self.asked("release a lease", store.release(self._spec.kind, leases, failures))

    async def results(
        self, load: "Load[K, V]", leases: Mapping[str, Lease]
    ) -> dict[str, LoadResult[V]]:
        """Load, renew the leases meanwhile, and return the results by id."""
        sent = rules.stamped(self._runtime.clock())
        counts = self._counts
        works = load.works
        counts.loads += 1
        counts.loaded += len(works)
        counts.largest_batch = max(counts.largest_batch, len(works))
        began = ticks()
        values = await self._call(load, list(leases.values()))
        seconds = ticks() - began
        counts.load_seconds.note(seconds)
        if load.span is not None:
            load.span.seconds = seconds
            load.span.origin = Origin.LOADED
        took = self._runtime.clock() - sent
        self._report_slow(took)
        results = self._results(works, values, leases, sent, took)
        if counts.failing:
            counts.mended(id_ for id_, result in results.items() if result.error is None)
        self._log(results)
        return results

    def _results(
        self,
        works: list[Work[K, V]],
        values: Mapping[K, object],
        leases: Mapping[str, Lease],
        sent: float,
        took: float,
    ) -> dict[str, LoadResult[V]]:
        """The loader's result for each key, as a copy.

        A value that cannot be stored fails alone.
        """
        terms = self._spec.terms
        codec = self._spec.codec
        dice = self._runtime.dice
        absent_policy: Policy | None = None
        results: dict[str, LoadResult[V]] = {}
        for work in works:
            result = values[work.key]
            lease = leases.get(work.id)
            generation = lease.token if lease is not None else token_hex(16)
            try:
                if not isinstance(result, NO_VALUE):
                    copy, value = rules.kept(result, terms, codec, (generation, sent), dice)
                    tags = result.tags if isinstance(result, Loaded) else None
                    results[work.id] = LoadResult(copy, value, tags=tags)
                elif isinstance(result, BaseException):
                    results[work.id] = self._failed_result(work, result)
                else:
                    self._counts.absent += 1
                    absent_policy = absent_policy or rules.absent_policy(terms, took)
                    copy = Copy(generation, sent, absent_policy, None)
                    private = result if isinstance(result, Private) else None
                    is_kept = private is None or private.is_noted or work.seen is not None
                    results[work.id] = LoadResult(copy, is_kept=is_kept, private=private)
            except Exception as exc:  # noqa: BLE001 (the loader's mistake)
                results[work.id] = self._unstorable_result(work, exc)
        return results

    def _unstorable_result(self, work: Work[K, V], error: Exception) -> LoadResult[V]:
        """The value is not what was declared; its key cools down like any that failed."""
        text = f"the value cannot be stored: {error_text(error)}; {advice_on(self._spec.codec)}"
        raised = BadValue(f"{self._spec.kind} {work.key!r}: {text}")
        raised.__cause__ = error
        return self._cooling_result(work, raised, text[:LONGEST_TEXT])

    def _failed_result(
        self, work: Work[K, V], error: BaseException, what: str = "loading failed"
    ) -> LoadResult[V]:
        text = error_text(error)
        raised = LoadFailed(f"{self._spec.kind} {work.key!r}: {what}: {text}")
        raised.__cause__ = error
        if isinstance(error, Dropped):
            return LoadResult(error=raised)
        return self._cooling_result(work, raised, text)

    def _cooling_result(self, work: Work[K, V], raised: LoadFailed, text: str) -> LoadResult[V]:
        """The load has failed, so its key cools down. `text`: what the store remembers."""
        runtime = self._runtime
        terms = self._spec.terms
        failure = rules.failed(
            work.failure,
            text,
            runtime.clock(),
            runtime.dice(),
            rules.pause_of(raised.__cause__),
            first=terms.first_cooldown,
            longest=terms.longest_cooldown,
        )
        self._counts.failed_with(work.id, failure)
        return LoadResult(failure=failure, error=raised)

    def _log(self, results: Mapping[str, LoadResult[V]]) -> None:
        """Log once for a batch."""
        errors = [result.error for result in results.values() if result.failure is not None]
        if errors:
            of = f"{len(errors)} of {len(results)} failed; " if len(results) > 1 else ""
            logger.warning("%s%s", of, without_secrets(str(errors[0])))

    async def _call(self, load: "Load[K, V]", leases: list[Lease]) -> dict[K, object]:
        """Run to the end, to `load_timeout`, or until the cache closes, whatever callers do."""
        keys = [work.key for work in load.works]
        context = copy_context()
        context.run(CURRENT.set, load)
        task = self._runtime.child(self._work(load, keys), context)
        guard = None
        task.add_done_callback(looked_at)
        try:
            await asyncio.sleep(0)
            if not task.done():
                guard = self._runtime.child(self._guard(leases))
                await asyncio.wait([task, guard], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in (task, guard):
                if part is not None and not part.done():
                    part.cancel()
        return self._values_of(keys, task)

    async def _work(self, load: "Load[K, V]", keys: list[K]) -> object:
        """Call the resource's loader, or that of the caller; a plain function runs in a thread."""
        caller = load.works[0].by
        own = None if caller is None else caller.load
        call: Callable[[], Any] = partial(self._spec.load, list(keys)) if own is None else own
        if self._spec.in_thread:
            value = await self._runtime.threads.call(call, load)
        else:
            value = await call()
        return value if own is None else {keys[0]: value}

    async def _guard(self, leases: list[Lease]) -> None:
        """Renew the leases while the load runs; ends when the load has run for too long."""
        left = self._spec.load_timeout
        step = self._spec.lease_for / RENEWALS
        while left > 0:
            await self._runtime.sleep(min(step, left))
            left -= step
            if leases and left > 0:
                kind = self._spec.kind
                renewing = self._runtime.store.renew(kind, leases, self._spec.lease_for)
                await self.asked("renew a lease", renewing)

    def _values_of(self, keys: list[K], load: "asyncio.Task[Any]") -> dict[K, object]:
        """The value or the error of each key."""
        kind = self._spec.kind
        pause = self._spec.load_timeout
        error: BaseException | None
        if not load.done():
            error = TimeoutError(f"no answer within {pause:g} s (load_timeout)")
        elif load.cancelled():
            error = LoadFailed(f"{kind}: the loader cancelled itself")
        elif (error := load.exception()) is None:
            try:
                return rules.results_of(kind, keys, load.result())
            except Exception as exc:  # noqa: BLE001 (a mapping of somebody else's)
                error = exc
        return dict.fromkeys(keys, error)

    def _report_slow(self, took: float) -> None:
        """Log once for a resource."""
        fresh_for = self._spec.terms.policy.fresh_for
        if 0 < fresh_for <= took and not self._counts.slow_reported:
            self._counts.slow_reported = True
            message = (
                "%s: the loader took %.3g s, and what it loads is fresh for %.3g s, which count "
                "from when it was asked: nothing is fresh when it arrives. Make fresh_for longer, "
                "or the loader faster."
            )
            logger.warning(message, self._spec.kind, took, fresh_for)
