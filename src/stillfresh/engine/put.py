"""Values that callers store themselves: put and update (E6, E17).

A put is a load without a loader, in two steps of the store: take the lease over, then publish with
its token. So the law covers it, and a late or repeated message changes nothing (S8, decision 0110).
An update is a put of a value made from the stored copy. It reads that copy again while it holds
the lease, and begins again if another change voids the lease.
"""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from inspect import isawaitable
from typing import Final, Generic, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from stillfresh.backoff import pause_after, spread
from stillfresh.bounded import sliced
from stillfresh.engine import rules
from stillfresh.engine.blocks import is_past
from stillfresh.engine.loader import looked_at
from stillfresh.engine.model import DELETE, LEAVE, Amended, Answer, Loaded, Origin
from stillfresh.engine.read import Reads
from stillfresh.engine.rules import NOTHING
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.store_reads import StoreStep
from stillfresh.engine.watcher import Watcher
from stillfresh.errors import ConfigError, StoreError, error_text, unconfirmed
from stillfresh.freshness import Policy, Verdict
from stillfresh.stores.contract import AWAY, Ask, Copy, Lease, Mark, Newer, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SLICE: Final = 100  # keys of a put in one step of the store
ATTEMPTS: Final = 10  # publications of others between a put's read and its lease that are tolerated
UPDATES: Final = 100  # how often an update begins again because another change came first
PATIENCE: Final = 12  # how often it waits for another's lease before it takes the lease over
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05  # seconds between two attempts of an update
FORGOTTEN: Final = Policy(0)  # of an update that deletes: an absence that is GONE at once

Change = Callable[[Answer[V] | None], object | Awaitable[object]]
"""The argument of `update`: takes the present answer or None, returns the value to store."""


class Known(Struct, Generic[K, V], frozen=True):
    """A caller's value for one key, ready to be published."""

    key: K
    id: str
    copy: Copy  # its generation is the lease's, once there is one
    value: V
    tags: tuple[str, ...]
    late: tuple[str, ...] | None = None  # I26: tags that came with the value


class Puts(Reads[K, V]):
    """Changes of one resource that callers make, not loaders."""

    watcher: Watcher[K, V]

    async def put(
        self, values: Iterable[tuple[K, object]], check: Callable[[], None] = lambda: None
    ) -> None:
        """Publish values. Raises ConfigError, before any is stored, if one of them cannot be.

        `check` is called in each step while its leases are held; if it raises, the put ends there.
        """
        runtime = await self.ready()
        sent, ready = rules.stamped(runtime.clock()), list[list[Known[K, V]]]()
        async for group in sliced(values, SLICE):
            ready.append([self._known(runtime, key, given, sent) for key, given in group])
        while ready:  # what is done is freed: all at once would hold up the loop (E28)
            some = ready.pop(0)
            if is_past(self.owner):  # E22: store nothing, leave nothing old
                with self.overtaking([it.key for it in some]):
                    await runtime.store.invalidate(self.spec.kind, [it.id for it in some])
                continue
            step = runtime.step(self._put(runtime, some, check))
            step.add_done_callback(looked_at)
            await asyncio.shield(step)

    def _known(
        self, runtime: Runtime, key: K, given: object, sent: float, old: Copy | None = None
    ) -> Known[K, V]:
        """Encode the value; an amended value gets the age and times of `old`."""
        spec, id_ = self.spec, self.text(key)
        tags, nothing = spec.tags_of(key), cast("V", None)
        if given is DELETE:
            return Known(key, id_, Copy("", sent, FORGOTTEN, None), nothing, tags)
        value = given.value if isinstance(given, Amended) else given
        try:
            copy, kept = rules.kept(value, spec.terms, spec.codec, ("", sent), runtime.dice)
        except Exception as exc:  # the caller's mistake, not a failed load
            said = f"{spec.kind} {key!r}: the value cannot be stored: {error_text(exc)}"
            raise ConfigError(said) from exc
        if isinstance(given, Amended) and old is not None and old.mark is Mark.NONE:
            copy = replace(old, value=copy.value)
        return Known(key, id_, copy, kept, tags, value.tags if isinstance(value, Loaded) else None)

    async def update(self, key: K, change: Change[V]) -> Answer[V] | None:
        """Put the value that `change` makes of the stored copy, if that copy is still current.

        Returns the answer that is stored afterwards, or None.
        """
        runtime = await self.ready()
        step = runtime.step(self._update(runtime, key, change))
        step.add_done_callback(looked_at)
        there: Answer[V] | None = await asyncio.shield(step)
        return there

    async def _update(self, runtime: Runtime, key: K, change: Change[V]) -> Answer[V] | None:
        """One at a time in this process; repeated while other processes change the key."""
        try:
            async with _in_turn(self.loads.puts, [key]):
                for attempt in range(1, UPDATES + 1):
                    seen, answer = await self._at_hand(runtime, key)
                    if (said := await self._said(change, answer)) is LEAVE:
                        return answer
                    since, is_loading = runtime.clock(), self.queue.is_loading(key)
                    generation = None if seen is None else seen.generation
                    ask = Ask(self.text(key), generation, self.spec.tags_of(key))
                    ask = replace(ask, take_over=is_loading or attempt > PATIENCE)
                    with self.overtaking([key]) as step:
                        known = await self._replaced(runtime, key, ask, (seen, said), change)
                    if known is not None:
                        self._has_put(runtime, known, known.copy, step, since)
                        return self._shown(key, known.copy, runtime.clock())
                    pause = pause_after(attempt, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
                    await runtime.sleep(spread(pause, runtime.dice))
        except StoreError:
            self.memory.counts.store_errors += 1
            raise
        raise StoreError(f"{self.spec.kind} {key!r}: other processes keep changing it; try again")

    async def _replaced(
        self,
        runtime: Runtime,
        key: K,
        ask: Ask,
        made: tuple[Copy | None, object],
        change: Change[V],
    ) -> Known[K, V] | None:
        """Publish; None if another change came first. `made`: the copy seen, and the new value.

        To invalidate the copy, to delete it and to put another one all void the lease. So the copy
        that is read while the lease is held is the one that is replaced.
        """
        store, kind, (seen, said) = runtime.store, self.spec.kind, made
        lease = (await store.acquire(kind, [ask], self.spec.lease_for))[ask.id]
        if not isinstance(lease, Lease):
            return None
        known, superseded = None, {ask.id}
        try:
            copy, answer = await self._at_hand(runtime, key)
            if _edition(copy) != _edition(seen):
                said = await self._said(change, answer)
            if said is not LEAVE:
                sent = rules.stamped(runtime.clock())
                known = self._known(runtime, key, said, sent, copy)
                known = replace(known, copy=replace(known.copy, generation=lease.token))
                late = None if known.late is None else {ask.id: known.late}
                superseded = await store.publish(kind, {ask.id: (lease, known.copy)}, late)
        finally:
            if superseded:
                with suppress(StoreError):
                    await store.release(kind, [lease])
        return None if superseded else known

    async def _at_hand(self, runtime: Runtime, key: K) -> tuple[Copy | None, Answer[V] | None]:
        """The stored copy, and the answer that `change` is given."""
        id_ = self.text(key)
        copy = (await runtime.store.read(self.spec.kind, [id_])).get(id_, NOTHING).copy
        return copy, None if copy is None else self._shown(key, copy, runtime.clock())

    def _shown(self, key: K, copy: Copy, now: float) -> Answer[V] | None:
        """The answer, however old; None if the copy is GONE or cannot be decoded."""
        verdict, (is_readable, value) = rules.verdict_of(copy, now), self.memory.value_of(key, copy)
        if verdict is Verdict.GONE or not is_readable:
            return None
        return self.memory.made(copy, value, verdict, Origin.STORE)

    async def _put(
        self, runtime: Runtime, values: Sequence[Known[K, V]], check: Callable[[], None]
    ) -> None:
        """E6: memory takes the value only if nothing else changed the key meanwhile."""
        keys, entries, counts = [it.key for it in values], self.memory.entries, self.memory.counts
        try:
            async with _in_turn(self.loads.puts, keys):
                since, held = runtime.clock(), [it for it in values if it.key in entries]
                seen = {it.id: entries[it.key].copy.generation for it in held}
                with self.overtaking(keys) as step:
                    stored = await self._published(runtime, values, seen, check)
        except StoreError:
            counts.store_errors += 1
            raise
        counts.superseded += len(values) - len(stored)
        for it in values:
            if it.id in stored:
                self._has_put(runtime, it, stored[it.id], step, since)

    def _has_put(
        self, runtime: Runtime, it: Known[K, V], copy: Copy, step: StoreStep[K], since: float
    ) -> None:
        """The store has the value: update memory and watchers, unless it was overtaken."""
        memory = self.memory
        memory.counts.puts += 1
        memory.counts.mended([it.id])
        self.owner.note(self, [it.key], "delete" if copy.policy is FORGOTTEN else "put")
        if self._runtime is runtime and it.key not in step.dirty and copy.policy is not FORGOTTEN:
            outlook = memory.outlook(copy, memory.now())
            memory.keep(it.key, copy, it.value, outlook, since)
            if it.late is not None:
                memory.retag(it.key, copy.generation, it.late)
            self.loads.tell_watches(it.key, copy, it.value, outlook)

    async def _published(
        self,
        runtime: Runtime,
        values: Sequence[Known[K, V]],
        seen: dict[str, str],
        check: Callable[[], None],
    ) -> dict[str, Copy]:
        """The copies that are stored now, by id; overtaken ones are left out.

        `seen`: the generations that memory has. StoreError if the store did not confirm a step.
        """
        leases: dict[str, Lease] = {}
        try:
            await self._take_over(runtime, values, seen, leases)
            copies = {
                it.id: (lease := leases[it.id], replace(it.copy, generation=lease.token))
                for it in values
            }
            check()
            late = {it.id: it.late for it in values if it.late is not None}
            superseded = await runtime.store.publish(self.spec.kind, copies, late)
        except BaseException:  # so that others need not wait for the end of its leases
            with suppress(StoreError):
                await runtime.store.release(self.spec.kind, list(leases.values()))
            raise
        if superseded:
            await self._outdate(runtime, superseded, seen)
        return {id_: copy for id_, (_, copy) in copies.items() if id_ not in superseded}

    async def _take_over(
        self,
        runtime: Runtime,
        values: Sequence[Known[K, V]],
        seen: dict[str, str],
        leases: dict[str, Lease],
    ) -> None:
        """Take the leases over; if a copy has changed, ask again with the new one (`seen`)."""
        kind, lease_for = self.spec.kind, self.spec.lease_for
        asks = {it.id: Ask(it.id, seen.get(it.id), it.tags, take_over=True) for it in values}
        for _ in range(ATTEMPTS):
            grants = await runtime.store.acquire(kind, list(asks.values()), lease_for)
            for id_, grant in grants.items():
                match grant:
                    case Lease():
                        leases[id_] = grant
                        del asks[id_]
                    case Newer(Record(copy=Copy(generation=generation))):
                        seen[id_] = generation
                        asks[id_] = replace(asks[id_], seen=generation)
            if not asks:
                return
            if asks.keys() - grants.keys():
                raise StoreError(f"{kind}: the servers that hold {len(asks)} keys do not answer")
        raise StoreError(f"{kind}: other processes keep changing {len(asks)} keys; try again")

    async def _outdate(self, runtime: Runtime, ids: set[str], seen: Mapping[str, str]) -> None:
        """Invalidate the old copy, unless something newer overtook the put.

        The lease had run out then. To take it again would not be safe, because it cannot be told
        from a lease that was voided.
        """
        records = await runtime.store.read(self.spec.kind, sorted(ids))
        copies = {id_: it.copy for id_, it in records.items() if it.copy is not None}
        unmarked = [id_ for id_, copy in copies.items() if copy.mark is Mark.NONE]
        old = [id_ for id_ in unmarked if copies[id_].generation == seen.get(id_)]
        if old := old + [id_ for id_, it in records.items() if it is AWAY]:  # which raises
            await runtime.store.invalidate(self.spec.kind, old)

    @contextmanager
    def overtaking(self, keys: Sequence[K]) -> Iterator[StoreStep[K]]:
        """Mark keys before and after a step; the step notes which keys others change meanwhile."""
        self.overtake(keys)
        try:
            with self.step(keys) as step, unconfirmed():
                yield step
        finally:
            self.overtake(keys)

    def overtake(self, keys: Iterable[K]) -> None:
        """E6: drop them from memory; loads and steps that run now began too early to be kept."""
        keys = set(keys)
        self.watcher.look_again(keys)
        for key in keys:
            self.memory.drop(key)
            if (flight := self.queue.flights.get(key)) is not None:
                flight.overtake()
        for step in self._steps:
            step.dirty |= step.keys & keys

    async def _said(self, change: Change[V], answer: Answer[V] | None) -> object:
        """Call `change`, which may be async; it ends within `load_timeout` (E3)."""
        if not isawaitable(said := change(answer)):
            return said
        limit = asyncio.timeout(longest := self.spec.load_timeout)
        try:
            async with limit:
                return await said
        except TimeoutError as exc:
            if not limit.expired():
                raise
            why = f"took longer than {longest:g} s (load_timeout); it may not put its own key"
            raise TimeoutError(f"{self.spec.kind}: the change of an update {why}") from exc


def _edition(copy: Copy | None) -> tuple[str, Mark] | None:
    """Changes whenever the copy is replaced or invalidated."""
    return None if copy is None else (copy.generation, copy.mark)


@asynccontextmanager
async def _in_turn(last: dict[K, "asyncio.Future[None]"], keys: Sequence[K]) -> AsyncIterator[None]:
    """One put of a key at a time, in the order of the calls, so the last value stays."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    before = {last[key] for key in keys if key in last}
    last.update(dict.fromkeys(keys, done))
    try:
        if before:
            await asyncio.wait(before)
        yield
    finally:
        done.set_result(None)
        for key in keys:
            if last.get(key) is done:
                del last[key]
