"""One simulated process: its own clock, its own way to the store, its own caches.

The caches are real ones, and everything around them is simulated. A process may die (`is_alive`),
be cut off from the store, or have a clock that is wrong; the world decides when, by its seed. Its
loads ask the ledger's upstream, and its reads are handed to the ledger, which judges them:
`observe` wraps a resource so that each answer is compared with the invalidations before it.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stillfresh.engine import Answer, Cache, Loaded, Resource, Stored
from stillfresh.errors import LoadFailed, NotOpen, StoreError
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import PutOutcome, PutResult
from stillfresh.stores.versions import packed_version
from stillfresh.testing.simulator.changes import CALL, ChangeCall
from stillfresh.testing.simulator.ledger import Reading, Version
from stillfresh.testing.simulator.nodes import ClusterWire
from stillfresh.testing.simulator.wire import StoreWire
from stillfresh.virtual_loop import WORLD

if TYPE_CHECKING:
    from stillfresh.testing.simulator.world import World

T = TypeVar("T")

LOAD_TAKES: Final = (0.01, 0.05, 0.3, 2.0, 9.0)
FAILS: Final = 0.1
ABSENT: Final = "the key was absent, and an absence has no version"
FAILED: Final = "the load failed or the cache was closed, so there was no value"
GRACE: Final = 60.0
"""For a cache to close: longer than any answer of a slow store takes."""


class Process:
    """A simulated process, made by `world.process()` or `world.launch(...)`."""

    def __init__(self, world: "World", number: int, skew: float) -> None:
        self.world = world
        self.number = number
        self.is_alive = True
        self.is_closed = False
        self.is_cut_off = False
        """True while this process cannot reach the shared store. A scenario sets it."""
        self.failure_rate = FAILS
        self.dice = world.plan.dice(f"upstream of {number}")
        """The dice for the upstream's answers to this process."""
        self.store = StoreWire(self)
        """The shared store, over a network."""
        self.file_store = StoreWire(self, inline=True)
        """The same store, as a file that is read inline."""
        self._skew = skew
        self._set_back = 0.0
        """Seconds by which its clock went back: memory may lag behind by that much more."""
        self._closing = AsyncExitStack()
        self._ending = ExitStack()
        self.at_close = self._closing.push_async_callback
        """Registers a function for the end of the scenario if the process lives; last in, first."""
        self.at_end = self._ending.callback
        """Registers a function that is called however the process ends, to close files."""

    def clock(self) -> float:
        """Return the time of the process's wall clock, which may be wrong."""
        return self.world.wall() + self._skew

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a task of this process. The simulation ends when all tasks have ended."""
        with self.world.loop.acting(self.number):
            job: asyncio.Task[T] = self.world.loop.create_task(work)
        self.world.started(self, job)
        return job

    def cache(self, *, inline: bool = False, pushes: bool = False, cluster: bool = False) -> Cache:
        """Return a cache on the shared store, with this process's clock. The simulation closes it.

        `inline`: the store is a file. `pushes`: the store reports what others do. `cluster`: it is
        three nodes, any of which may be replaced by its replica.
        """
        if cluster:
            store: StoreWire = ClusterWire(self, pushes=pushes)
        elif pushes:
            store = StoreWire(self, pushes=pushes)
        else:
            store = self.file_store if inline else self.store
        cache = Cache(store, clock=self.clock, dice=self.dice.random, grace=GRACE)
        self.at_close(cache.close)
        return cache

    async def load(
        self, kind: str, ids: Sequence[str], *, leased: bool = True
    ) -> dict[str, Version | Exception]:
        """Ask the upstream, as a loader does. It takes time, and may fail for one id or for all.

        `leased`: the ids belong to a resource on the shared store, whose leases are checked.
        """
        world = self.world
        results: dict[str, Version | Exception] = {}
        for id_ in ids:
            results[id_] = world.ledger.load(
                self.number, (kind, id_), leased=leased, now=world.time()
            )
        world.note(self, f"loads {kind} {','.join(ids)}")
        await self.spend(ids, self.dice.choice(LOAD_TAKES) * self.dice.random())
        if self.dice.random() < self.failure_rate / 2:
            raise ConnectionError("upstream failed")
        for id_ in ids:
            if self.dice.random() < self.failure_rate:
                results[id_] = ConnectionError("upstream failed for this one")
        return results

    async def spend(self, ids: Sequence[str], seconds: float) -> None:
        """The time that the upstream takes to answer."""
        recorder = self.world.recorder
        if recorder is None:
            await asyncio.sleep(seconds)
            return
        span = recorder.begun(
            self.number, "load", f"process {self.number} asks the upstream for {', '.join(ids)}"
        )
        try:
            await asyncio.sleep(seconds)
        finally:
            span.ended = self.world.time()

    def observe(
        self, kind: str, resource: Resource[str, Version], *, lag: float = 0.0
    ) -> "Observed":
        """Return the resource with checks: no answer may be older than an invalidation.

        `lag` is the resource's `memory_for`.
        """
        return Observed(self, kind, resource, lag)

    def reading(self, kind: str, id_: str, *, lag: float = 0.0) -> Reading:
        """Begin a read; give the result to `served` with the answer."""
        late = lag + self._set_back if lag else 0.0
        return Reading(self.number, (kind, id_), self.world.time(), late)

    def served(
        self, reading: Reading, value: Version, verdict: Verdict, *, failed: bool = False
    ) -> None:
        """Check an answer. `failed`: it says that loading failed."""
        world = self.world
        kind, id_ = reading.key
        world.note(self, f"is served {kind} {id_}: version {value.number}, {verdict}")
        wrong = world.ledger.wrong
        world.ledger.served(reading, value, verdict, failed=failed, now=world.time())
        if world.recorder is not None:
            is_right = world.ledger.wrong == wrong
            text = f"process {self.number} is served {kind} {id_}: version {value.number}"
            world.recorder.happened(self.number, "read", text, verdict.name, is_right=is_right)

    @asynccontextmanager
    async def invalidating(
        self, kind: str, ids: Iterable[str], *, soft: bool = False, what: str | None = None
    ) -> AsyncIterator[dict[str, int]]:
        """Wrap an invalidation of these ids. After a StoreError in it, nothing is promised.

        Yields the versions that are promised afterwards; the block may take some out.
        """
        world = self.world
        began = world.time()
        versions = {id_: world.ledger.upstream[kind, id_] for id_ in ids}
        names = ",".join(versions)
        what = what or "invalidate"
        world.note(self, f"{what}s {kind} {names}")
        try:
            with self.calling(what):
                yield versions
        except StoreError:
            world.note(self, f"could not {what} {kind} {names}")
            return
        self.announced(kind, versions, soft=soft, began=began)

    @contextmanager
    def calling(self, what: str) -> Iterator[ChangeCall]:
        """Wrap a call that changes entries. No late message of it may undo a later change."""
        changes = self.world.ledger.changes
        call = changes.begin(self.number, what)
        before = CALL.get()
        CALL.set(call)
        try:
            yield call
        except BaseException:
            changes.end(call, acknowledged=False)
            raise
        finally:
            CALL.set(before)
        changes.end(call, acknowledged=True)

    def announced(
        self,
        kind: str,
        versions: Mapping[str, int],
        *,
        soft: bool = False,
        began: float | None = None,
    ) -> None:
        """Promise that from now on no older version is served as fresh.

        Nor as stale, unless `soft`, or loading fails. `began`: the promise counts from then, not
        from now.
        """
        world = self.world
        names = ", ".join(f"{id_} (version {version})" for id_, version in versions.items())
        if world.recorder is not None:
            text = f"the invalidation of {kind} {','.join(versions)} is acknowledged"
            world.recorder.happened(self.number, "invalidated", text)
        world.note(self, f"has announced {kind} {names}")
        keys = {(kind, id_): version for id_, version in versions.items()}
        world.ledger.invalidated(self.number, keys, soft=soft, ended=world.time(), began=began)

    def kill(self) -> None:
        """End the process as `kill -9` does: nothing is cleaned up."""
        self.world.note(self, "is killed")
        self._record_fault(f"process {self.number} is killed")
        self.is_alive = False
        self.world.ledger.changes.killed(self.number)
        self.world.loop.kill(self.number)
        self.world.killed(self)

    def pause(self, seconds: float) -> None:
        """Stop the process for a while, as SIGSTOP does."""
        self.world.note(self, f"is paused for {seconds:g} s")
        self._record_fault(f"process {self.number} is paused for {seconds:g} s")
        loop = self.world.loop
        loop.pause(self.number)
        with loop.acting(WORLD):
            loop.call_later(seconds, loop.resume, self.number)

    def _record_fault(self, text: str) -> None:
        if self.world.recorder is not None:
            self.world.recorder.happened(self.number, "fault", text)

    def jump(self, by: float) -> None:
        """Move the process's wall clock."""
        self.world.note(self, f"has its clock set by {by:+g} s")
        self._skew += by
        self._set_back += max(0.0, -by)

    def end(self) -> None:
        """The simulation has ended: close files, and forget what was not closed."""
        self._ending.close()
        self._closing.pop_all()

    async def close(self) -> None:
        """Close everything that the process opened."""
        self.is_closed = True
        await self._closing.aclose()


@dataclass
class Observed:
    """A resource of one process; each answer is compared with earlier invalidations."""

    process: Process
    kind: str
    resource: Resource[str, Version]
    lag: float

    async def get(self, key: str, *, at_least: str | None = None) -> Answer[Version] | None:
        """Return the answer; None if nothing may be served, or the cache is closed."""
        reading = self.process.reading(self.kind, key, lag=self.lag)
        try:
            answer = await self.resource.get(key, at_least=at_least)
        except (LoadFailed, NotOpen):
            self._leave_unjudged(FAILED)
            return None
        self._check(reading, answer)
        return answer

    def peek(self, key: str) -> Answer[Version] | None:
        """Return what memory holds."""
        answer = self.resource.peek(key)
        if answer is not None and answer.verdict is Verdict.FRESH:
            self._check(self.process.reading(self.kind, key, lag=self.lag), answer)
        return answer

    async def get_many(self, keys: Sequence[str]) -> dict[str, Answer[Version]]:
        """Return an answer for each key."""
        readings = {key: self.process.reading(self.kind, key, lag=self.lag) for key in keys}
        answers = await self.resource.get_many(keys)
        for key, answer in answers.items():
            self._check(readings[key], answer)
        return answers

    def _check(self, reading: Reading, answer: Answer[Version]) -> None:
        if answer.found:
            failed = answer.error is not None
            self.process.served(reading, answer.value, answer.verdict, failed=failed)
        else:
            self._leave_unjudged(ABSENT if answer.error is None else FAILED)

    def _leave_unjudged(self, reason: str) -> None:
        self.process.world.ledger.unjudged[reason] += 1

    async def refresh(self, *keys: str) -> None:
        """Load the keys now."""
        try:
            await self.resource.refresh(*keys)
        except LoadFailed:
            self.process.world.note(self.process, f"could not refresh {','.join(keys)}")

    async def change(self, *keys: str, soft: bool = False) -> None:
        """Change the keys upstream, and invalidate their copies."""
        self.process.world.change(self.kind, *keys)
        async with self.process.invalidating(self.kind, keys, soft=soft):
            await self.resource.invalidate(*keys, soft=soft)

    async def put(self, *keys: str, versioned: bool = False, only_if_absent: bool = False) -> None:
        """Change the keys upstream, and put the new versions.

        `versioned`: so that a greater version stays. `only_if_absent`: no live copy is replaced.
        """
        self.process.world.change(self.kind, *keys)
        values = {key: self._begin_put(key) for key in keys}
        given: dict[str, Version | Loaded[Version]] = dict(values)
        if versioned:
            given = {key: Loaded(value, version=value.number) for key, value in values.items()}
        async with self._putting("put", keys, values) as promised:
            if only_if_absent:
                results = {key: await self.resource.add(key, given[key]) for key in keys}
            else:
                results = await self.resource.put_many(given)
            for key, result in results.items():
                self._check_put(key, values[key], result)
                if not result.stored:
                    del promised[key]

    def _check_put(self, key: str, value: Version, result: Stored) -> None:
        """Check what the caller of a put was told."""
        call = CALL.get()
        version = packed_version(value.number)
        outcome = PutOutcome.STORED if result.stored else PutOutcome.REFUSED
        if not result.stored and isinstance(result.version, int) and result.version > value.number:
            outcome = PutOutcome.KEPT
        if call is not None:
            changes = self.process.world.ledger.changes
            changes.settled(call, (self.kind, key), version, PutResult(outcome))

    async def touch(self, key: str) -> None:
        """Give a live copy new times."""
        with suppress(StoreError), self.process.calling("touch"):
            await self.resource.touch(key)

    async def update(self, key: str) -> None:
        """Change the key upstream, and update its copy: once, if that is acknowledged."""
        self.process.world.change(self.kind, key)
        values: dict[str, Version] = {}

        def change(answer: Answer[Version] | None) -> Version:
            made_of = answer.value.load if answer is not None and answer.found else None
            values[key] = self._begin_put(key, update=values, made_of=made_of)
            return values[key]

        async with self._putting("update", [key], values):
            await self.resource.update(key, change)
            self.process.world.ledger.has_updated((self.kind, key), values[key])
            self._check_put(key, values[key], Stored(stored=True))

    async def write_through(self, key: str) -> None:
        """Change the key upstream inside `changing`, and put the new version."""
        world = self.process.world
        ledger = world.ledger
        name = (self.kind, key)
        began = world.time()
        pauses = [0, 0, 0.05, 0.5, 8.0]
        with suppress(StoreError):
            async with self.resource.changing(key) as change:
                entered = world.time()
                await asyncio.sleep(world.dice.choice(pauses))
                number = world.change(self.kind, key)[key]
                ledger.written(name, number, began)
                value = Version(number, self._begin_put(key).load)
                await asyncio.sleep(world.dice.choice(pauses))
                is_old = ledger.has_later_write(name, number, entered)
                result = await change.put(value)
                if result.stored:
                    ledger.stored(name, value, world.time())
                ledger.written_through(name, value, is_stored=result.stored, is_old=is_old)
            self.process.announced(self.kind, {key: number}, soft=True, began=began)

    def _begin_put(self, key: str, **how: object) -> Version:
        return self.process.world.ledger.put(self.process.number, (self.kind, key), **how)

    @asynccontextmanager
    async def _putting(
        self, what: str, keys: Sequence[str], values: Mapping[str, Version]
    ) -> AsyncIterator[dict[str, int]]:
        ledger = self.process.world.ledger
        announcing = self.process.invalidating(self.kind, keys, soft=True, what=what)
        try:
            async with announcing as promised:
                yield promised
                ledger.acknowledged(values.values(), self.process.world.time())
        finally:
            ledger.has_put(values.values(), self.process.world.time())

    async def delete(self, *keys: str) -> None:
        """Delete the copies."""
        async with self.process.invalidating(self.kind, keys):
            await self.resource.delete(*keys)
