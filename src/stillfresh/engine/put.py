"""Values that callers store themselves (E6, E17); updates are in `update.py`.

A put is a load without a loader, in two steps of the store: take the lease over, then publish with
its token. So the law covers it, and a late or repeated message changes nothing (S8, decision 0110).
"""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, Generic, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from stillfresh.bounded import sliced
from stillfresh.engine import rules
from stillfresh.engine.blocks import is_past
from stillfresh.engine.loader import looked_at
from stillfresh.engine.model import DELETE, Amended, Loaded, OwnTerms
from stillfresh.engine.read import Reads
from stillfresh.engine.runtime import Runtime
from stillfresh.engine.store_reads import InTurn, PutStep, StoreStep
from stillfresh.engine.watcher import Watcher
from stillfresh.errors import ConfigError, StoreError, error_text, unconfirmed
from stillfresh.freshness import Policy
from stillfresh.stores.contract import Ask, Copy, Lease, Mark, Newer, Record

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SLICE: Final = 100  # keys of a put in one step of the store
ATTEMPTS: Final = 10  # publications of others between a put's read and its lease that are tolerated
FORGOTTEN: Final = Policy(0)  # of an update that deletes: an absence that is GONE at once


class Known(Struct, Generic[K, V], frozen=True):
    """A caller's value for one key, ready to be published."""

    key: K
    id: str
    copy: Copy  # its generation is the lease's, once there is one
    value: V
    tags: tuple[str, ...]
    late: tuple[str, ...] | None = None  # I26: tags that came with the value

    @property
    def every_tag(self) -> tuple[str, ...]:
        """The tags of its key, and those that came with the value."""
        return self.tags + (self.late or ())


class Puts(Reads[K, V]):
    """Changes of one resource that callers make, not loaders."""

    watcher: Watcher[K, V]

    async def put(
        self,
        values: Mapping[K, object],
        terms: OwnTerms | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Publish values. Raises ConfigError, before any is stored, if one of them cannot be.

        `check` is called in each step while its leases are held; if it raises, the put ends there.
        Nothing may change `values` meanwhile.
        """
        runtime = await self.ready()
        began, step = PutStep(values.keys()), None
        self._puts.add(began)
        try:
            sent, ready = rules.stamped(runtime.clock()), list[list[Known[K, V]]]()
            async for group in sliced(values.items(), SLICE):
                own = ((key, self.spec.with_terms(given, terms or {})) for key, given in group)
                ready.append([self._known(runtime, key, given, sent) for key, given in own])
            while ready:  # what is done is freed: all at once would hold up the loop (E28)
                some = ready.pop(0)
                if is_past(self.owner):  # E22: store nothing, leave nothing old
                    with self.overtaking([it.key for it in some]):
                        await runtime.store.invalidate(self.spec.kind, [it.id for it in some])
                    continue
                step = runtime.step(self._put(runtime, some, check, began))
                step.add_done_callback(looked_at)
                await asyncio.shield(step)
        finally:
            if step is None or step.done():
                self._puts.discard(began)
            else:  # the caller gave up, and the step goes on
                step.add_done_callback(lambda _: self._puts.discard(began))

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

    async def _put(
        self,
        runtime: Runtime,
        values: Sequence[Known[K, V]],
        check: Callable[[], None],
        began: PutStep[K],
    ) -> None:
        """E6: memory takes the value only if nothing else changed the key meanwhile."""
        keys, entries, counts = [it.key for it in values], self.memory.entries, self.memory.counts
        try:
            async with InTurn(self.loads.puts, keys):
                since, held = runtime.clock(), [it for it in values if it.key in entries]
                seen = {it.id: entries[it.key].copy.generation for it in held}
                with self.overtaking(keys, voids=False) as step:
                    stored = await self._published(runtime, values, seen, check, began)
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
        memory.causes.forget(it.key)
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
        began: PutStep[K],
    ) -> dict[str, Copy]:
        """The copies that are stored now, by id; overtaken ones are left out.

        `seen`: the generations that memory has. StoreError if the store did not confirm a step.
        """
        store, kind, leases = runtime.store, self.spec.kind, dict[str, Lease]()
        try:
            await self._take_over(runtime, values, seen, leases)
            void = {it.id for it in values if began.is_void(it.key, it.every_tag)}
            copies = {
                it.id: (lease := leases[it.id], replace(it.copy, generation=lease.token))
                for it in values
                if it.id not in void
            }
            check()
            late = {it.id: it.late for it in values if it.late is not None and it.id in copies}
            superseded = await store.publish(kind, copies, late)
            leases = {id_: it for id_, it in leases.items() if id_ in superseded | void}
            if old := [it for it in values if it.id in leases and it.id in seen]:
                await self._outdate(runtime, old, seen, leases)
        finally:  # so that others need not wait for the end of its leases
            if leases:
                with suppress(StoreError):
                    await store.release(kind, list(leases.values()))
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

    async def _outdate(
        self,
        runtime: Runtime,
        values: Sequence[Known[K, V]],
        seen: Mapping[str, str],
        leases: dict[str, Lease],
    ) -> None:
        """Invalidate the old copies, unless something newer overtook the put.

        To publish now would not be safe: a lease that ran out cannot be told from one that was
        voided. A failover may undo all that is not confirmed (S9). So a newer copy counts once the
        lease that was taken over after it is confirmed, and a mark is made again. Where there was
        no copy, none can come back, and what overtook the put goes on.
        """
        store, kind, present = runtime.store, self.spec.kind, dict(seen)
        await self._take_over(runtime, values, present, leases)
        if old := [it.id for it in values if present[it.id] == seen[it.id]]:
            records = await store.read(kind, old)
            soft = {id_ for id_, it in records.items() if it.copy and it.copy.mark is Mark.SOFT}
            for some in filter(None, (soft, set(old) - soft)):
                await store.invalidate(kind, sorted(some), soft=some is soft)

    @contextmanager
    def overtaking(self, keys: Sequence[K], *, voids: bool = True) -> Iterator[StoreStep[K]]:
        """Mark keys before and after a step; the step notes which keys others change meanwhile."""
        self.overtake(keys, voids=voids)
        try:
            with self.step(keys) as step, unconfirmed():
                yield step
        finally:
            self.overtake(keys, voids=voids)

    def overtake(self, keys: Iterable[K], *, voids: bool = True) -> None:
        """E6: drop them from memory; loads and steps that run now began too early to be kept.

        `voids`: the keys are invalidated or deleted, so puts that began earlier are not published.
        """
        keys = set(keys)
        self.watcher.look_again(keys)
        for key in keys:
            self.memory.drop(key)
            if (flight := self.queue.flights.get(key)) is not None:
                flight.overtake()
        for step in self._steps:
            step.dirty |= step.keys & keys
        for put in self._puts if voids else ():
            put.void |= put.keys & keys
