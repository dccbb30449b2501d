"""T7, S13: the steps of the store itself, without the engine: puts of every kind, late and twice.

A `Writer` asks the store as the engine does: it draws one generation for a call, puts until the
store does not answer AGAIN, and does nothing more when it gives up.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from stillfresh import Policy, StoreError, Verdict
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Lease,
    Mark,
    Put,
    PutOutcome,
    PutResult,
    When,
)
from stillfresh.stores.versions import packed_version
from stillfresh.testing import Process, Promise, Version, World
from stillfresh.testing.simulator.changes import CALL
from stillfresh.testing.simulator.nodes import ClusterWire
from stillfresh.testing.simulator.promises import BrokenPromise
from stillfresh.testing.simulator.wire import StoreWire
from tests.simulation.engine_scenarios import impatient

KIND = "price"
KEYS = ("a", "b", "c")
MANY_KEYS = tuple(f"k{number}" for number in range(15))
SHOPS = ("shop:eu", "shop:us")
TAGS = {id_: SHOPS[number % 2] for number, id_ in enumerate(KEYS + MANY_KEYS)}
TERMS = Policy(5, 5, 5)
LEASE = 20.0
MOST_ATTEMPTS = 1_000
MOST_INCREMENTS = 100
PAUSES = (0.0, 0.0, 0.01, 0.1, 0.5, 3.0, 20.0)
"""Seconds between two calls of a writer; the longest lets very late messages come in between."""

Chances = Mapping[str, int]
"""How often a writer does what, in comparison."""
EVERYTHING: Chances = {
    "put": 5,
    "put_many": 2,
    "put_version": 4,
    "add": 1,
    "touch": 1,
    "increment": 2,
    "load": 2,
    "invalidate": 3,
    "invalidate_tag": 2,
    "delete": 1,
    "evict": 1,
    "read": 4,
}
OF_VERSIONS: Chances = {"put_version": 8, "put": 1, "invalidate": 2, "load": 1, "read": 2}
OF_COUNTERS: Chances = {"increment": 8, "add": 3, "touch": 3, "put": 1, "delete": 1, "read": 1}
OF_ADDS: Chances = {"add": 8, "put": 1, "touch": 1, "read": 1}
OF_TAGS: Chances = {"put": 6, "invalidate_tag": 6, "invalidate": 1, "delete": 1, "load": 1}
OF_LATE_MESSAGES: Chances = {
    "put": 5,
    "delete": 3,
    "invalidate": 3,
    "invalidate_tag": 3,
    "load": 1,
    "read": 2,
}


@dataclass
class Writer:
    """One caller of one process."""

    process: Process
    store: StoreWire
    keys: Sequence[str] = KEYS
    judges_reads: bool = True
    """False: a failover may lose acknowledged invalidations, so a read proves nothing."""
    has_other_tags: bool = False
    """A put has some tag, not always that of its key; so a read proves nothing about tags."""

    async def put(self) -> None:
        await self._put(self._key())

    async def put_many(self) -> None:
        await self._put(*self.keys)

    async def put_version(self) -> None:
        await self._put(self._key(), is_versioned=True)

    async def add(self) -> None:
        await self._put(self._key(), when=When.NO_LIVE_COPY)

    async def _put(self, *ids: str, is_versioned: bool = False, when: When = When.ALWAYS) -> None:
        """Change the ids upstream, and put the new versions."""
        process, ledger = self.process, self.process.world.ledger
        began = process.world.time()
        process.world.change(KIND, *ids)
        values = {id_: ledger.put(process.number, (KIND, id_)) for id_ in ids}
        puts = {
            id_: self._new_put(id_, value, is_versioned=is_versioned, when=when)
            for id_, value in values.items()
        }
        stored: dict[str, int] = {}
        try:
            with process.calling("put"):
                results = await self._settled(puts)
                ledger.acknowledged(values.values(), process.world.time())
                done = {PutOutcome.STORED, PutOutcome.REPLACED}
                stored = {id_: values[id_].number for id_ in ids if results[id_].outcome in done}
        finally:
            ledger.has_put(values.values(), process.world.time())
        if stored and self.judges_reads:
            process.announced(KIND, stored, soft=True, began=began)

    async def touch(self) -> None:
        """Give the stored value new times."""
        id_ = self._key()
        generation = self.store.new_generation()
        copy = Copy(generation, self.process.clock(), TERMS, UNREAD)
        with self.process.calling("touch"):
            await self._settled({id_: Put(copy, (TAGS[id_],), None, When.LIVE_COPY)})

    async def increment(self) -> None:
        """Make a value of the stored one, which nothing may replace meanwhile."""
        world, id_, update = self.process.world, self._key(), object()
        values: list[Version] = []
        try:
            with self.process.calling("increment"):
                for _ in range(MOST_INCREMENTS):
                    stored = await self._stored(id_)
                    made_of = None if stored is None else _version(stored).load
                    world.change(KIND, id_)
                    value = world.ledger.put(
                        self.process.number, (KIND, id_), update=update, made_of=made_of
                    )
                    values.append(value)
                    put = self._new_put(id_, value, when=When.UNCHANGED, seen=stored)
                    result = (await self._settled({id_: put}))[id_]
                    if result.outcome is not PutOutcome.REFUSED:
                        world.ledger.has_updated((KIND, id_), value)
                        return
        finally:
            world.ledger.has_put(values, world.time())

    async def load(self) -> None:
        """Load a key under a lease."""
        process, id_ = self.process, self._key()
        stored = await self._stored(id_)
        seen = None if stored is None else stored.generation
        ask = Ask(id_, seen, (TAGS[id_],))
        lease = (await self.store.acquire(KIND, [ask], LEASE)).get(id_)
        if not isinstance(lease, Lease):
            return
        try:
            value = (await process.load(KIND, [id_]))[id_]
        except ConnectionError:
            value = None
        if not isinstance(value, Version):
            await self.store.release(KIND, [lease])
            return
        version = packed_version(value.number) if process.dice.random() < 0.3 else b""
        data = msgspec.msgpack.encode(value)
        copy = Copy(lease.token, process.clock(), TERMS, data, Mark.NONE, version)
        late = {id_: (TAGS[id_],)} if process.dice.random() < 0.3 else None
        await self.store.publish(KIND, {id_: (lease, copy)}, late)

    async def invalidate(self) -> None:
        dice = self.process.world.dice
        ids = [self._key()] if dice.random() < 0.5 else list(self.keys)
        soft = dice.random() < 0.3
        await self._announce(ids, self.store.invalidate(KIND, ids, soft=soft), soft=soft)

    async def invalidate_tag(self) -> None:
        tag = self.process.world.dice.choice(SHOPS)
        ids = [id_ for id_ in self.keys if TAGS[id_] == tag]
        if self.has_other_tags:
            with self.process.calling("invalidation by tag"):
                await self.store.invalidate_tag(tag)
        else:
            await self._announce(ids, self.store.invalidate_tag(tag))

    async def delete(self) -> None:
        ids = [self._key()]
        await self._announce(ids, self.store.delete(KIND, ids))

    async def _announce(
        self, ids: Sequence[str], work: Awaitable[object], *, soft: bool = False
    ) -> None:
        """Change the ids upstream, and say so to the store."""
        process = self.process
        began = process.world.time()
        versions = process.world.change(KIND, *ids)
        with process.calling("invalidation"):
            await work
        if self.judges_reads:
            process.announced(KIND, versions, soft=soft, began=began)

    async def evict(self) -> None:
        await self.store.evict(self.process.clock())

    async def read(self) -> None:
        """What the store holds, and does not mark, was not invalidated before."""
        id_ = self._key()
        reading = self.process.reading(KIND, id_)
        stored = await self._stored(id_)
        if stored is not None and stored.mark is Mark.NONE and self.judges_reads:
            self.process.served(reading, _version(stored), Verdict.FRESH)

    async def _settled(self, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        """Put until the store has settled each."""
        changes, call = self.process.world.ledger.changes, CALL.get()
        assert call is not None
        results: dict[str, PutResult] = {}
        waiting = dict(puts)
        for _ in range(MOST_ATTEMPTS):
            answers = await self.store.put(KIND, waiting)
            if len(answers) < len(waiting):
                raise StoreError("a server does not answer")
            for id_, result in answers.items():
                if result.outcome is not PutOutcome.AGAIN:
                    changes.settled(call, (KIND, id_), puts[id_].copy.version, result)
                    results[id_] = result
                    del waiting[id_]
            if not waiting:
                return results
        raise BrokenPromise(Promise.ALIVE, f"{call}: the store answers AGAIN for ever")

    def _new_put(
        self,
        id_: str,
        value: Version,
        *,
        is_versioned: bool = False,
        when: When = When.ALWAYS,
        seen: Copy | None = None,
    ) -> Put:
        process = self.process
        version = packed_version(value.number) if is_versioned else b""
        data = msgspec.msgpack.encode(value)
        generation = self.store.new_generation()
        copy = Copy(generation, process.clock(), TERMS, data, Mark.NONE, version)
        tag = TAGS[id_]
        if self.has_other_tags:
            tag = process.world.dice.choice(SHOPS)
        put = Put(copy, (tag,), None, when)
        if process.world.dice.random() < 0.3:
            put = msgspec.structs.replace(put, tags=(), late=(tag,))
        if seen is not None:
            put = msgspec.structs.replace(put, seen=seen.generation, seen_mark=seen.mark)
        return put

    async def _stored(self, id_: str) -> Copy | None:
        record = (await self.store.read(KIND, [id_])).get(id_)
        return None if record is None else record.copy

    def _key(self) -> str:
        return self.process.world.dice.choice(self.keys)

    async def work(self, chances: Chances, calls: int) -> None:
        """Call one after the other; give up now and then, and act again at once."""
        world = self.process.world
        for _ in world.steps(calls):
            await asyncio.sleep(world.dice.choice(PAUSES))
            (name,) = world.dice.choices(list(chances), list(chances.values()))
            call: Callable[[], Awaitable[None]] = getattr(self, name)
            with suppress(StoreError):
                if world.dice.random() < 0.7:
                    await call()
                else:
                    await impatient(world, call())


def _version(copy: Copy) -> Version:
    assert isinstance(copy.value, bytes)
    return msgspec.msgpack.decode(copy.value, type=Version)


def launch_writers(
    world: World,
    chances: Chances,
    new_store: Callable[[Process], StoreWire],
    *,
    keys: Sequence[str] = KEYS,
    processes: int = 3,
    calls: int = 25,
    judges_reads: bool = True,
    has_other_tags: bool = False,
) -> None:
    """Processes of two writers each."""

    async def app(process: Process) -> None:
        store = new_store(process)
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                writer = Writer(process, store, keys, judges_reads, has_other_tags)
                group.create_task(writer.work(chances, calls))

    world.launch(app, processes)


def one_server(process: Process) -> StoreWire:
    return process.store


def a_cluster(process: Process) -> StoreWire:
    return ClusterWire(process)


def a_cluster_that_does_not_wait(process: Process) -> StoreWire:
    store = ClusterWire(process)
    store.waits = False
    return store


async def of_put_steps(world: World) -> None:
    """S13: every kind of put beside loads, invalidations, tags, deletions and evictions."""
    launch_writers(world, EVERYTHING, one_server)


async def of_late_puts(world: World) -> None:
    """S8: one key; messages that arrive after their caller gave up and others changed it."""
    launch_writers(world, OF_LATE_MESSAGES, one_server, keys=KEYS[:1], processes=4, calls=30)


async def of_tagged_puts(world: World) -> None:
    """E8, S8: a put whose tag was invalidated after its caller gave up does not act.

    Many keys, so that most of them have no copy with that tag, which would refuse the put as well.
    """
    launch_writers(world, OF_TAGS, one_server, keys=MANY_KEYS, processes=4, has_other_tags=True)


async def of_versions(world: World) -> None:
    """E35: one key; puts with and without versions."""
    launch_writers(world, OF_VERSIONS, one_server, keys=KEYS[:1])


async def of_counters(world: World) -> None:
    """E35: one key; `incr`, `add` and `touch` as conditions of a put."""
    launch_writers(world, OF_COUNTERS, one_server, keys=KEYS[:1])


async def of_adds(world: World) -> None:
    """E35, S8: many keys, so that an `add` which was refused often comes again undisturbed."""
    launch_writers(world, OF_ADDS, one_server, keys=MANY_KEYS, calls=50)


async def of_puts_on_a_file(world: World) -> None:
    """S13: a store like SQLite: no stamps; what is given up is taken out of its queue."""
    launch_writers(world, EVERYTHING, lambda process: process.file_store)


async def of_puts_over_a_cluster(world: World) -> None:
    """S9: slots move, and nodes are replaced by their replicas; no acknowledged put is lost."""
    launch_writers(world, EVERYTHING, a_cluster)
    await _shake(world)


async def of_puts_without_replicas(world: World) -> None:
    """S9: a failover loses acknowledged changes; what is late does nothing all the same."""
    world.longest_lag = world.dice.choice([0.5, 10.0, 10.0])
    store = a_cluster_that_does_not_wait
    launch_writers(world, OF_LATE_MESSAGES, store, keys=KEYS[:1], calls=35, judges_reads=False)
    await _shake(world, failovers=0.8)


async def _shake(world: World, failovers: float = 0.5) -> None:
    """Let nodes fail and slots move, for as long as the writers write."""
    for _ in world.steps(30):
        await asyncio.sleep(world.dice.choice([0.05, 0.3, 2.0, 10.0]))
        if world.dice.random() < failovers:
            world.fail_over(world.dice.randrange(3))
        else:
            world.move(world.dice.choice(KEYS), world.dice.randrange(3))


async def of_puts_under_another_clock(world: World) -> None:
    """S13: the server's clock is set back, or forward, now and then; stamps do not mind."""
    world.longest_delay = 25.0  # later than that, and with the clock set back, nothing is promised
    launch_writers(world, OF_LATE_MESSAGES, one_server)
    direction = world.dice.choice([-1, 1])
    for _ in world.steps(6):
        await asyncio.sleep(world.dice.uniform(0, 20))
        world.set_server_clock(direction * world.dice.choice([0.5, 7.0, 61.0, 3600.0]))


async def of_puts_on_a_server_that_forgets(world: World) -> None:
    """S13: it restarts empty, or is flushed: its counter begins anew, above the old one."""
    launch_writers(world, EVERYTHING, one_server)
    for _ in world.steps(6):
        await asyncio.sleep(world.dice.uniform(0, 20))
        world.lose_everything(restarts=world.dice.random() < 0.5)
