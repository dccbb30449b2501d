"""A resource behind its public object: opening, watching, invalidating, statistics.

The read path is in `read.py`, loads are in `load.py`, put and update in `put.py` and `update.py`.
"""

from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from stillfresh.bounded import sliced
from stillfresh.engine import rules
from stillfresh.engine.blocks import is_past
from stillfresh.engine.counts import ResourceStats
from stillfresh.engine.explain import Explanation, explain
from stillfresh.engine.keys import Spec
from stillfresh.engine.lifecycle import Lifecycle
from stillfresh.engine.memory import Memory
from stillfresh.engine.model import Answer, Origin, Outcome
from stillfresh.engine.news import Notices
from stillfresh.engine.rules import FOR_EVER, NOTHING, Serve
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.update import Updates
from stillfresh.engine.watcher import Watcher
from stillfresh.engine.work import Waiter
from stillfresh.errors import NotOpen, StoreError
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Core(Updates[K, V]):
    """One resource: reads, loads, puts and watches of its keys."""

    def __init__(
        self,
        spec: Spec[K, V],
        owner: Lifecycle,
        memory: Memory[K, V],
        *,
        text: Callable[[K], str],
        key: Callable[[str], K],
    ) -> None:
        super().__init__(spec, owner, memory, text=text, key=key)
        self.watcher: Watcher[K, V] = Watcher(self, memory.now)
        memory.cleared = self._show_memory

    def open(self, runtime: Runtime) -> None:
        self.memory.notices = Notices(runtime.news) if runtime.news is not None else None
        if runtime.news is not None and self.spec.memory_for:
            runtime.news.want()
        self.begin_anew(runtime)
        if (memory := self.memory).is_private:
            memory.room.limit(self.spec.max_bytes or runtime.can.max_bytes)
            if runtime.can.process is not None:
                runtime.can.process.before_evicting(
                    self.spec.kind, lambda id_: memory.keeps(self.key(id_))
                )

    def close(self) -> None:
        """Stop answering from memory, and let all waiting callers fail."""
        self._runtime = None
        self.memory.clear()
        self.loads.close()
        self.watcher.close()

    def leave(self) -> None:
        """The event loop was closed, or is the parent process's: no caller waits here."""
        self.memory.clear()
        for _ in self.memory.freed():
            pass
        self.watcher.begin_anew()
        self.begin_anew()

    def _show_memory(self) -> None:
        for face in self.faces:
            face.stand_back(back=self.owner.blocks > 0)

    async def renew(self, keys: Sequence[K]) -> AsyncGenerator[dict[K, Outcome[V] | None]]:
        """For watchers: load the keys that are not fresh, here or elsewhere. Cooldowns are kept."""
        waiter: Waiter[K, V] = Waiter(each=True)
        records, times, now = await self._records_and_times(keys, waiter.unread)
        stale = [key for key, at in times.items() if at <= now]
        texts = self.texts(stale)
        self._join(texts, {id_: records[key] for key, id_ in texts.items()}, waiter)
        try:
            if fresh := [key for key, at in times.items() if at > now]:
                yield dict.fromkeys(fresh)
            while waiter.missing or waiter.outcomes:
                await self.loads.wait(waiter)
                ended = waiter.outcomes
                waiter.outcomes = {}
                stale = [key for key in stale if key not in ended]
                yield {**ended}
        finally:
            waiter.end()
            self.loads.leave(waiter, stale)

    async def refresh_times(self, keys: Sequence[K]) -> dict[K, float]:
        """For watchers: when to refresh each key."""
        return (await self._records_and_times(keys, set()))[1]

    async def _records_and_times(
        self, keys: Sequence[K], unread: set[K]
    ) -> tuple[dict[K, Record], dict[K, float], float]:
        """The copies that can be read now, and when to refresh each.

        Watches receive fresh copies that another process published.
        """
        runtime = await self.ready()
        texts = self.texts(keys)
        since = runtime.clock()
        terms = self.spec.terms
        records = self.memory.readable(texts, await self._records(runtime, texts, unread))
        now = runtime.clock()
        for key, record in records.items():
            copy = record.copy
            if key in unread or copy is None or not self.watcher.is_news(key, copy):
                continue
            plan = Serve(copy, rules.verdict_of(copy, now))
            if plan.verdict is not Verdict.FRESH:
                continue
            answer = self.memory.serve(key, plan, now, Origin.ANOTHER, since)
            if answer:
                self.watcher.landed(key, answer, rules.watched_until(copy, terms), now)
        return records, rules.refresh_times(records, now, terms, self.watcher.absent), now

    def read_in_thread(self, keys: Sequence[K]) -> dict[K, Answer[V]] | None:
        """Answer a thread from the store without a load; None if the loop must be asked.

        It must be where `hit` or `glance` use memory: only the loop keeps memory up to date.
        """
        runtime = None if self.owner.blocks or self.spec.memory_for else self._runtime
        if runtime is None or runtime.read_in_thread is None:
            return None
        if runtime.read_now is not None and not self.memory.entries.keys().isdisjoint(keys):
            return None
        texts = self.texts(keys)
        now = runtime.clock()
        answers: dict[K, Answer[V]] = {}
        try:
            records = runtime.read_in_thread(self.spec.kind, list(texts.values()))
        except (StoreError, NotOpen):
            return None
        for key, id_ in texts.items():
            record = records.get(id_, NOTHING)
            if record.failure is not None:
                return None
            plan = rules.plan_read(record, now, self.spec.lease_for)
            if isinstance(plan, Serve):
                is_readable, value = self.memory.value_of(key, plan.copy)
                if is_readable:
                    answers[key] = self.memory.made(plan.copy, value, plan.verdict, Origin.STORE)
        self.memory.count(answers.values(), now)
        return answers

    async def known(
        self, keys: Iterable[K], unread: set[K] | None = None, max_age: float = FOR_EVER
    ) -> dict[K, Outcome[V]]:
        """The answers that need no load; other keys are left out."""
        if self.owner.blocks and is_past(self.owner):
            return {}
        runtime = await self.ready()
        outcomes: dict[K, Outcome[V]] = {}
        unread = set() if unread is None else unread
        async for batch in sliced(keys):
            if self._runtime is not runtime:  # since the last slice
                self._check_open(runtime)
            now = runtime.clock()
            texts = self._unheld(batch, now, outcomes, max_age)
            records = await self._records(runtime, texts, unread) if texts else {}
            for key, id_ in texts.items():
                record = records.get(id_, NOTHING)
                unverified = key in unread
                if self.memory.has_newer(key, record.copy):
                    record = Record(self.memory.entries[key].copy, failure=record.failure)
                    unverified = True
                _, outcome = self._planned(key, record, now, max_age, unverified=unverified)
                if outcome is not None:
                    outcomes[key] = outcome
            self.memory.count([outcomes[key] for key in texts if key in outcomes], now)
        return outcomes

    async def look(self, key: K) -> Answer[V] | None:
        """The stored copy, however old; None if it is GONE. Loads nothing."""
        if self.owner.blocks and is_past(self.owner):
            return None
        runtime = await self.ready()
        id_ = self.text(key)
        unread: set[K] = set()
        now = runtime.clock()
        record = (await self._records(runtime, {key: id_}, unread)).get(id_, NOTHING)
        copy = record.copy
        if copy is None:
            return None
        verdict = rules.verdict_of(copy, now)
        if verdict is Verdict.GONE:
            return None
        failure = None if verdict is Verdict.FRESH else record.failure
        plan = Serve(copy, verdict, failure=failure)
        return self.memory.serve(key, plan, now, unverified=bool(unread))

    async def invalidate(self, keys: Sequence[K], *, soft: bool) -> None:
        """No step that began before this ended puts its result into memory."""
        runtime = await self.ready()
        async for batch in sliced(keys):
            ids = list(self.texts(batch).values())
            with self.overtaking(batch):
                await runtime.store.invalidate(self.spec.kind, ids, soft=soft)
            self.owner.note(self, batch, "soft" if soft else "invalidate")

    async def delete(self, keys: Sequence[K]) -> None:
        runtime = await self.ready()
        async for batch in sliced(keys):
            ids = list(self.texts(batch).values())
            with self.overtaking(batch):
                await runtime.store.delete(self.spec.kind, ids)
            self.owner.note(self, batch, "delete")
            self.memory.counts.mended(ids)
            for key in batch:
                self.memory.causes.forget(key)

    async def clear(self) -> None:
        """Forget every entry of this resource."""
        runtime = await self.ready()
        listing = runtime.can.require_listing()
        self.fence.void_all()
        await self.delete([*self.under_way(), *self.memory.keys()])  # a walk may miss them
        async for page in listing.walk(self.spec.kind):
            await self.delete([self.key(entry.id) for entry in page])
        self.fence.void_all()

    def tagged(self, tag: str) -> list[K]:
        """Keys in memory or being loaded that have this tag, or may have it."""
        if self.spec.tags is None:
            return self.memory.tagged(tag)
        tags_of = self.spec.possible_tags
        wanted = {tag, None}
        loading = [key for key in self.under_way() if not wanted.isdisjoint(tags_of(key))]
        return loading + self.memory.tagged(tag)

    def overtake_tag(self, tag: str) -> None:
        """Drop keys with this tag from memory. Loads, reads and puts that run now are void."""
        self.owner.fence_clock.void_tag(tag)
        self.overtake(self.memory.tagged(tag))

    async def is_live(self, key: K) -> bool:
        """A load is under way, and nothing has invalidated the key since it began."""
        runtime = await self.ready()
        lease = self.loads.lease_of(key)
        if lease is None:
            return False
        try:
            return not await runtime.store.renew(self.spec.kind, [lease], self.spec.lease_for)
        except StoreError:
            return False

    async def settled(self, within: float) -> bool:
        """Wait until no load runs. False if one still runs after that many seconds."""
        return self._runtime is None or await self.loads.settled(within)

    def under_way(self) -> set[K]:
        return {*self.loads.under_way, *(key for step in self._steps for key in step.keys)}

    async def explain(self, key: K) -> Explanation:
        runtime = await self.ready()
        id_ = self.text(key)
        records = await runtime.store.read(self.spec.kind, [id_])
        return explain(
            self.spec.kind,
            key,
            self.memory.readable({key: id_}, records)[key],
            runtime.clock(),
            loading_here=self.loads.is_loading(key),
            in_memory=key in self.memory.entries,
            lease_for=self.spec.lease_for,
        )

    async def stats(self) -> ResourceStats:
        await self.memory.fold_all()
        return self.counted()

    def counted(self) -> ResourceStats:
        """The counts so far, without hits that are not folded yet."""
        return self.memory.counts.stats(
            self.memory.now(),
            entries=len(self.memory.entries),
            bytes=self.memory.room.held,
            loading=len(self.loads.under_way),
            queued=self.loads.not_begun(),
            watched=len(self.watcher.watched),
            max_batch=self.spec.max_batch,
        )


async def overtake_all(keys: Iterable[tuple[Core[Any, Any], Any]]) -> None:
    """Mark all keys in slices.

    If this is cancelled, mark the rest at once: none may be missed.
    """
    left = iter(keys)
    try:
        async for batch in sliced(left):
            for core, key in batch:
                core.overtake([key])
    finally:
        for core, key in left:
            core.overtake([key])
