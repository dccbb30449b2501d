"""What a watcher asks of its resource: when keys are due, and loads of those that are not fresh."""

from collections.abc import AsyncGenerator, Hashable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from stillfresh.engine import rules
from stillfresh.engine.model import Origin, Outcome
from stillfresh.engine.rules import Serve
from stillfresh.engine.work import Waiter
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Record

if TYPE_CHECKING:
    from stillfresh.engine.core import Core

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Renewals(Generic[K, V]):
    """Reads and loads of one resource, for its watcher."""

    def __init__(self, core: "Core[K, V]") -> None:
        self._core = core

    async def renew(self, keys: Sequence[K]) -> AsyncGenerator[dict[K, Outcome[V] | None]]:
        """Load the keys that are not fresh, here or elsewhere. Cooldowns are kept."""
        waiter: Waiter[K, V] = Waiter(each=True)
        records, times, now = await self._records_and_times(keys, waiter.notes.unread)
        stale = [key for key, at in times.items() if at <= now]
        fresh = [key for key, at in times.items() if at > now]
        texts = self._core.names.texts(stale)
        loads = self._core.loads
        self._core.reads.join(texts, {id_: records[key] for key, id_ in texts.items()}, waiter)
        try:
            if fresh:
                yield dict.fromkeys(fresh)
            while waiter.missing or waiter.outcomes:
                await loads.wait(waiter)
                ended = waiter.outcomes
                waiter.outcomes = {}
                stale = [key for key in stale if key not in ended]
                yield {**ended}
        finally:
            waiter.end()
            loads.leave(waiter, stale)

    async def refresh_times(self, keys: Sequence[K]) -> dict[K, float]:
        """When to refresh each key."""
        _, times, _ = await self._records_and_times(keys, set())
        return times

    async def _records_and_times(
        self, keys: Sequence[K], unread: set[K]
    ) -> tuple[dict[K, Record], dict[K, float], float]:
        """The copies that can be read now, when to refresh each, and the time of that.

        Watches receive fresh copies that another process published.
        """
        core = self._core
        memory = core.memory
        watcher = core.watcher
        terms = core.spec.terms
        runtime = await core.ready()
        texts = core.names.texts(keys)
        asked = memory.asked_now()
        records = memory.readable(texts, await core.store_reads.records(runtime, texts, unread))
        now = runtime.clock()
        for key, record in records.items():
            copy = record.copy
            if key in unread or copy is None or not watcher.is_news(key, copy):
                continue
            plan = Serve(copy, rules.verdict_of(copy, now))
            if plan.verdict is not Verdict.FRESH:
                continue
            answer = memory.serve(key, plan, now, asked, Origin.ANOTHER)
            if answer:
                watcher.landed(key, answer, rules.watched_until(copy, terms), now)
        times = rules.refresh_times(records, now, terms, watcher.absent)
        for key in times:
            if memory.is_refused(key):
                times[key] = memory.refused_until(key)
        return records, times, now
