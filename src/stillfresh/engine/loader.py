"""What a load asks of the store and of the loader, and the results as copies.

It knows no callers and decides nothing: `rules.py` says what a failure, an absence or a value's own
times mean, and the store enforces the law.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from contextvars import Context
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from msgspec import Struct

from stillfresh.engine import rules
from stillfresh.engine.codecs import advice_on
from stillfresh.engine.counts import Counts
from stillfresh.engine.keys import Spec
from stillfresh.engine.mistakes import LARGE_VALUE
from stillfresh.engine.model import Dropped, Loaded, Origin, Private
from stillfresh.engine.rules import ABSENT
from stillfresh.engine.threads import Raised
from stillfresh.engine.work import CURRENT, Work
from stillfresh.errors import (
    LONGEST_TEXT,
    BadValue,
    LoadFailed,
    RaisedByLoader,
    StoreError,
    error_text,
    without_secrets,
)
from stillfresh.freshness import Policy
from stillfresh.repeated_lines import RepeatedLines
from stillfresh.stores.contract import Ask, Copy, Failure, Grant, LateTags, Lease, Record
from stillfresh.tasks import forget_cancellations
from stillfresh.turns import THIS_THREAD

if TYPE_CHECKING:
    from stillfresh.engine.load import Load
    from stillfresh.engine.runtime import Runtime

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")

RENEWALS: Final = 3  # renewals in the time of a lease, so that one may be lost
UNGUARDED_TURNS: Final = 2  # turns of the loop in which a load may end without a guard

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

    @property
    def is_answered(self) -> bool:
        """True unless the load failed. An exception that `raises=` names is an answer."""
        return self.error is None or isinstance(self.error, RaisedByLoader)


class Loader(Generic[K, V]):
    """Asks the store and the loader of one resource; a store that fails is counted and logged."""

    def __init__(
        self,
        spec: Spec[K, V],
        runtime: "Runtime",
        counts: Counts,
        passes_on: Callable[[BaseException], bool],
    ) -> None:
        """`passes_on`: True for an exception of the loader that callers get as it is."""
        self.spec = spec
        self.runtime = runtime
        self._counts = counts
        self._passes_on = passes_on
        self._store_failures = RepeatedLines(logger)
        self._load_failures = RepeatedLines(logger)

    async def ask_store(self, what: str, step: Awaitable[T]) -> T | None:
        """The store's answer; None if it is unavailable."""
        try:
            return await step
        except StoreError as exc:
            self._note_failure(what, exc)
            return None

    def _note_failure(self, what: str, exc: StoreError) -> None:
        self._counts.store_errors += 1
        line = f"{self.spec.kind}: the store could not {what}: {exc}"
        self._store_failures.warn(self.runtime.clock(), line)

    def asks(self, works: Iterable[Work[K, V]]) -> tuple[list[Ask], dict[str, LoadResult[V]]]:
        """A key whose tags are unknown could not be invalidated by them: only it fails."""
        failed: dict[str, LoadResult[V]] = {}
        if self.spec.tags is None:
            return [Ask(work.id, work.seen, (), work.failures_seen) for work in works], failed
        asks: list[Ask] = []
        for work in works:
            try:
                tags = self.spec.tags_of(work.key)
                asks.append(Ask(work.id, work.seen, tags, work.failures_seen))
            except Exception as exc:  # noqa: BLE001 (a user's function may raise anything)
                failed[work.id] = self._load_failed_result(work, exc, "its tags= failed")
        if failed:
            self._log(failed)
        return asks, failed

    async def acquire(self, asks: list[Ask]) -> dict[str, Grant] | None:
        """Ask for leases; None if the store is unavailable."""
        try:
            return await self.runtime.store.acquire(self.spec.kind, asks, self.spec.lease_for)
        except StoreError as exc:
            self._note_failure("give leases", exc)
            return None

    async def read(self, ids: list[str]) -> dict[str, Record] | None:
        """What other processes have stored; None if the store is unavailable."""
        return await self.ask_store("be read", self.runtime.store.read(self.spec.kind, ids))

    async def publish(
        self, copies: dict[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str] | None:
        """Publish, and return the superseded ids; None if the store did not answer."""
        if not copies:
            return set()
        try:
            superseded = await self.runtime.store.publish(self.spec.kind, copies, tags)
        except StoreError as exc:
            self._note_failure("store the value", exc)
            return None
        self._counts.superseded += len(superseded)
        return superseded

    async def renew(self, leases: list[Lease]) -> None:
        store = self.runtime.store
        renewing = store.renew(self.spec.kind, leases, self.spec.lease_for)
        await self.ask_store("renew a lease", renewing)

    async def release(self, leases: list[Lease], failures: Mapping[str, Failure]) -> None:
        if leases:
            store = self.runtime.store
            await self.ask_store("release a lease", store.release(self.spec.kind, leases, failures))

    async def expire(self, leases: list[Lease]) -> None:
        """Invalidate these ids. An id whose lease was lost has a newer copy, which stays."""
        store = self.runtime.store
        kind = self.spec.kind
        renewing = store.renew(kind, leases, self.spec.lease_for)
        lost = await self.ask_store("renew a lease", renewing)
        if lost is None:
            return
        ids = [lease.id for lease in leases if lease.id not in lost]
        if ids:
            await self.ask_store("invalidate a copy", store.invalidate(kind, ids))

    def count_call(self, works: list[Work[K, V]]) -> None:
        """The loader is called for these keys."""
        counts = self._counts
        number = len(works)
        counts.loads += 1
        counts.loaded += number
        counts.largest_batch = max(counts.largest_batch, number)

    def results(
        self, load: "Load[K, V]", values: Mapping[K, object], seconds: float
    ) -> dict[str, LoadResult[V]]:
        """The results by id of what the loader returned or raised after so many seconds."""
        if load.is_over or load.is_stopped:  # whatever the loader made of its cancellation
            raise asyncio.CancelledError
        sent = rules.stamped(load.called_at)
        counts = self._counts
        counts.load_seconds.note(seconds)
        if load.span is not None:
            load.span.seconds = seconds
            load.span.origin = Origin.LOADED
        took = self.runtime.clock() - sent
        if took >= self.spec.terms.policy.fresh_for:
            self._report_slow(took)
        failed_before = counts.failed
        results = self._results(load.works, values, load.leases, sent, took)
        if counts.failing:
            counts.mended(id_ for id_, result in results.items() if result.is_answered)
        if counts.failed != failed_before:
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
        terms = self.spec.terms
        codec = self.spec.codec
        mistakes = self.spec.mistakes
        dice = self.runtime.dice
        absent_policy: Policy | None = None
        results: dict[str, LoadResult[V]] = {}
        for work in works:
            result = values[work.key]
            lease = leases.get(work.id)
            generation = lease.token if lease is not None else token_hex(16)
            try:
                if isinstance(result, BaseException):
                    results[work.id] = self._failed_result(work, result)
                elif result is not ABSENT and type(result) is not Private:
                    copy, value = rules.copy_and_value(
                        result, terms, codec, (generation, sent), dice
                    )
                    data = copy.value
                    is_large = isinstance(data, bytes) and len(data) > LARGE_VALUE
                    is_odd = mistakes.is_untyped and rules.odd_part(result) is not None
                    if is_large or is_odd:
                        mistakes.look_at_value(work.key, result, data)
                    tags = result.tags if isinstance(result, Loaded) else None
                    results[work.id] = LoadResult(copy, value, tags=tags)
                else:
                    self._counts.absent += 1
                    absent_policy = absent_policy or rules.absent_policy(terms, took)
                    copy = Copy(generation, sent, absent_policy, None)
                    private = result if type(result) is Private else None
                    is_kept = private is None or private.is_noted or work.seen is not None
                    results[work.id] = LoadResult(copy, is_kept=is_kept, private=private)
            except Exception as exc:  # noqa: BLE001 (the loader's mistake)
                results[work.id] = self._unstorable_result(work, result, exc)
        return results

    def _unstorable_result(
        self, work: Work[K, V], result: object, error: Exception
    ) -> LoadResult[V]:
        """The value is not what was declared; its key cools down like any that failed."""
        value = result
        if type(result) is Loaded:  # not isinstance, as in `advice_on`
            value = result.value
        advice = advice_on(self.spec.codec, value)
        text = f"the value cannot be stored: {error_text(error)}; {advice}"
        raised = BadValue(f"{self.spec.kind} {work.key!r}: {text}")
        raised.__cause__ = error
        return self._cooling_result(work, raised, text[:LONGEST_TEXT])

    def _failed_result(self, work: Work[K, V], error: BaseException) -> LoadResult[V]:
        """The loader raised this, or returned it for the key."""
        if self._passes_on(error):
            return LoadResult(error=RaisedByLoader(self._failure_text(work, error), error))
        return self._load_failed_result(work, error)

    def _load_failed_result(
        self, work: Work[K, V], error: BaseException, what: str = "loading failed"
    ) -> LoadResult[V]:
        raised = LoadFailed(self._failure_text(work, error, what))
        raised.__cause__ = error
        if isinstance(error, Dropped):
            return LoadResult(error=raised)
        return self._cooling_result(work, raised, error_text(error))

    def _failure_text(
        self, work: Work[K, V], error: BaseException, what: str = "loading failed"
    ) -> str:
        return f"{self.spec.kind} {work.key!r}: {what}: {error_text(error)}"

    def _cooling_result(self, work: Work[K, V], raised: LoadFailed, text: str) -> LoadResult[V]:
        """The load has failed, so its key cools down. `text`: what the store remembers."""
        runtime = self.runtime
        terms = self.spec.terms
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
        """Log once for a batch; not each one, if hundreds a second fail."""
        errors = [result.error for result in results.values() if result.failure is not None]
        if errors:
            of = f"{len(errors)} of {len(results)} failed; " if len(results) > 1 else ""
            line = f"{of}{without_secrets(str(errors[0]))}"
            self._load_failures.warn(self.runtime.clock(), line)

    async def call(self, load: "Load[K, V]") -> dict[K, object]:
        """The value or the error of each key. Runs to the end, whatever callers do.

        It is cut off at `load_timeout`, and when the cache closes; then CancelledError is raised.
        """
        keys = [work.key for work in load.works]
        kind = self.spec.kind
        error: BaseException
        task: Any = asyncio.current_task(self.runtime.loop)
        if load.task is not None:
            load.guard_loader(load.task)
        is_left = False
        # Only while the loader runs: what a store starts in its steps may outlive the load.
        token = CURRENT.set(load)
        try:
            if self.spec.in_thread or load.works[0].by is not None:
                value = await self._call_for(load, keys)
            else:
                value = await self.spec.load(list(keys))
            return rules.results_of(kind, keys, value)
        except asyncio.CancelledError:
            if load.is_ended(task):
                raise
            error = LoadFailed(f"{kind}: the loader cancelled itself")
        except Exception as exc:  # noqa: BLE001 (a loader may raise anything)
            error = exc
        except (KeyboardInterrupt, SystemExit) as exc:
            load.interruption = exc  # raised again when the leases are released
            error = exc
        except BaseException as exc:  # GeneratorExit, or somebody's own
            # A GeneratorExit from outside of the task: its loop is gone, and Python cleans up.
            is_left = asyncio.current_task(self.runtime.loop) is not task
            if is_left:
                raise
            error = exc
        finally:
            if not is_left:
                CURRENT.reset(token)
                if load.guard is not None:
                    load.end_guard()
                if task.cancelling() and not load.is_ended(task):
                    await forget_cancellations(task)  # the loader's own: the load goes on
        return dict.fromkeys(keys, error)

    def timed_out(self, works: list[Work[K, V]]) -> dict[str, LoadResult[V]]:
        """The results of a load that took too long."""
        self._counts.load_seconds.note(self.spec.load_timeout)
        error = TimeoutError(f"no answer within {self.spec.load_timeout:g} s (load_timeout)")
        # It is the cache's error, not the loader's: `raises=` does not name it.
        results = {work.id: self._load_failed_result(work, error) for work in works}
        self._log(results)
        return results

    async def _call_for(self, load: "Load[K, V]", keys: list[K]) -> object:
        """Call the resource's loader, or that of the caller; a plain function runs in a thread."""
        caller = load.works[0].by
        own = None if caller is None else caller.load
        if self.spec.in_thread:
            call = partial(self.spec.load, list(keys)) if own is None else own
            value = await self.runtime.threads.call(call, load)
            if isinstance(value, Raised):
                return dict.fromkeys(keys, value.error)
        elif own is None:
            return await self.spec.load(list(keys))
        else:
            value = await own()  # type: ignore[misc]  # an async function, as declared
        return value if own is None else {keys[0]: value}

    def _report_slow(self, took: float) -> None:
        """Nothing is fresh when it arrives: log that once for a resource."""
        fresh_for = self.spec.terms.policy.fresh_for
        if fresh_for > 0 and not self._counts.slow_reported:
            self._counts.slow_reported = True
            message = (
                "%s: the loader took %.3g s, and what it loads is fresh for %.3g s, which count "
                "from when it was asked: nothing is fresh when it arrives. Make fresh_for longer, "
                "or the loader faster."
            )
            logger.warning(message, self.spec.kind, took, fresh_for)


class LoadGuard:
    """Renews the leases of a load while its loader runs, and ends a load that takes too long.

    Most loads are over within a few turns of the event loop, and need none. So its task begins only
    after that.
    """

    def __init__(self, loader: "Loader[Any, Any]", load: "Load[Any, Any]") -> None:
        self._loader = loader
        self._load = load
        self._task: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._next_turn: asyncio.Handle | None = None
        if THIS_THREAD.has_turn:  # the loop has its turns meanwhile
            loader.runtime.thread_guards.add(self)
        else:
            loop = loader.runtime.loop
            self._next_turn = loop.call_soon(self._wait_turns, UNGUARDED_TURNS)

    def end(self) -> None:
        """The loader has ended."""
        if self._next_turn is not None:
            self._next_turn.cancel()
        else:
            self._loader.runtime.thread_guards.discard(self)
        if self._renewing is not None:
            self._renewing.cancel()
        if self._task is not None and not self._load.is_over:
            self._task.cancel()
        # A cancelled task keeps its exception, whose traceback leads to this guard.
        self._renewing = None
        self._task = None

    def _wait_turns(self, left: int) -> None:
        if left > 0:
            loop = self._loader.runtime.loop
            self._next_turn = loop.call_soon(self._wait_turns, left - 1)
        else:
            self.start()

    def start(self) -> None:
        """The load is not over yet."""
        self._task = self._loader.runtime.child(self._watch(), Context())

    async def _watch(self) -> None:
        """Renew the leases at intervals. When the time is over, end the load."""
        spec = self._loader.spec
        left = spec.load_timeout
        interval = spec.lease_for / RENEWALS
        while left > 0:
            await self._loader.runtime.sleep(min(interval, left))
            left -= interval
            leases = list(self._load.leases.values())
            if leases and left > 0:
                self._renew(leases)
        await self._load.end_late()

    def _renew(self, leases: list[Lease]) -> None:
        """Renew, unless the last request still runs. A slow store does not stop the clock."""
        if self._renewing is None or self._renewing.done():
            self._renewing = self._loader.runtime.child(self._loader.renew(leases), Context())
