"""T1: the engine in the simulator: several processes, a few keys, everything that may be asked."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from stillfresh import (
    Cache,
    Loaded,
    LoadFailed,
    NotOpen,
    RetryAfter,
    StoreError,
    Verdict,
    merge_tokens,
    noted_changes,
)
from stillfresh.engine import Resource
from stillfresh.testing import Blow, Observed, Process, Promise, Version, World
from stillfresh.testing.simulator.faults import Strike
from stillfresh.testing.simulator.process import GRACE
from stillfresh.testing.simulator.wire import StoreRequest, StoreWire

T = TypeVar("T")

KEYS = ("a", "b", "c")
SHOPS = {"eu": ("eu-1", "eu-2"), "us": ("us-1",)}
HOUR = 3600.0
LONG = 120.0
"""Seconds until loads of two processes that wait for each other, in a circle, give up."""
WATCHED = "watched"
QUIET = 60.0
"""Seconds after which every fault is over."""
TOLD = 10.0
"""Seconds in which a change is noticed, also if its channel has broken."""
ANYBODY = -1
"""Whose invalidation a process may miss while the store is away, even if it was its own (I26): the
store does not name a copy that is deleted, and memory does not know the tags of what it read."""


def prices(
    process: Process,
    cache: Cache,
    *,
    memory_for: float = 0.0,
    keys: Sequence[str] = KEYS,
    late: bool = False,
) -> Observed:
    """A resource with short terms, so that a minute sees all of them.

    `late`: its tags come with the load (I26).
    """
    jitter = process.world.dice.choice([0.0, 0.2])

    @cache.batched(
        "price",
        fresh_for=4,
        stale_for=6,
        error_for=10,
        max_batch=2,
        concurrency=2,
        memory_for=memory_for,
        lease_for=3,
        load_timeout=7,
        jitter=jitter,
        max_entries=len(keys) - 1,
        tags=None if late else shops,
    )
    async def price(ids: list[str]) -> dict[str, Version | Loaded[Version] | Exception]:
        given = dressed(process, await process.load("price", ids))
        return {id_: tagged(id_, it) for id_, it in given.items()} if late else given

    process.world.always(Promise.BOUND, lambda: too_many(price, len(keys) - 1))
    return process.observe("price", price, lag=memory_for)


def shops(key: str) -> list[str]:
    return [f"shop:{key[:2]}"]


def tagged(
    id_: str, given: Version | Loaded[Version] | Exception
) -> Version | Loaded[Version] | Exception:
    if isinstance(given, Exception):
        return given
    if isinstance(given, Loaded):
        return Loaded(given.value, fresh_for=given.fresh_for, tags=shops(id_))
    return Loaded(given, tags=shops(id_))


def dressed(
    process: Process, found: Mapping[str, Version | Exception]
) -> dict[str, Version | Loaded[Version] | Exception]:
    """Now and then with terms of its own, absent, or with the word to come back later."""
    given: dict[str, Version | Loaded[Version] | Exception] = {}
    for id_, it in found.items():
        match process.dice.randrange(20):
            case 0:
                given[id_] = RetryAfter(process.dice.choice([0.5, 5.0]))
            case 1 | 2 if isinstance(it, Version):
                given[id_] = Loaded(it, fresh_for=1, stale_for=1)
            case 3:
                pass
            case _:
                given[id_] = it
    return given


def too_many(resource: Resource[str, Version], most: int) -> str | None:
    """E9: memory holds no more than it may; nothing that is under way is forgotten there."""
    core = resource.core
    if (count := len(core.memory.entries)) > most:
        return f"memory holds {count} entries, {most} are allowed"
    if (count := len(core.changes._steps)) > 20:
        return f"{count} reads of the store are under way"
    return None


async def use(process: Process, resource: Observed, keys: Sequence[str]) -> None:
    """One visitor: reads mostly; changes, refreshes, gives up."""
    world = process.world
    for _ in world.steps(15):
        await asyncio.sleep(world.dice.choice([0, 0, 0.05, 0.5, 3.0]))
        key = world.dice.choice(keys)
        match world.dice.randrange(10):
            case 0 | 1:
                await resource.change(key, soft=world.dice.random() < 0.3)
            case 2:
                await resource.get_many(keys)
            case 3:
                await resource.refresh(key)
            case 4:
                await impatient(world, resource.get(key))
            case 5 if world.dice.random() < 0.3:
                await resource.delete(key)
            case 6 if world.dice.random() < 0.5:
                resource.peek(key)
            case _:
                await resource.get(key)


async def impatient(world: World, work: Awaitable[object]) -> bool:
    """False if it gave up."""
    with suppress(TimeoutError):
        async with asyncio.timeout(world.dice.choice([0.001, 0.03, 0.4])):
            await work
            return True
    return False


async def visited(process: Process, resources: Sequence[Observed]) -> None:
    """By as many at once."""
    async with asyncio.TaskGroup() as group:
        for resource in resources:
            group.create_task(use(process, resource, KEYS))


async def over_a_network(world: World) -> None:
    """E2-E7: on a store like Redis."""

    async def app(process: Process) -> None:
        await visited(process, [prices(process, process.cache())] * 3)

    world.launch(app, 3)


async def on_a_file(world: World) -> None:
    """The same on a store like SQLite, whose rows are read on the spot (E9)."""

    async def app(process: Process) -> None:
        await visited(process, [prices(process, process.cache(inline=True))] * 3)

    world.launch(app, 3)


async def from_memory(world: World) -> None:
    """With `memory_for`: another's invalidation may be missed for so long, one's own never (E9)."""

    async def app(process: Process) -> None:
        await visited(process, [prices(process, process.cache(), memory_for=1.0)] * 3)

    world.launch(app, 2)


async def cut_off(world: World) -> None:
    """E29: processes that cannot reach the store at times, while another invalidates there."""

    async def app(process: Process) -> None:
        is_inline = world.dice.random() < 0.3
        memory_for = world.dice.choice([0.0, 0.0, 1.0])
        resource = prices(process, process.cache(inline=is_inline), memory_for=memory_for)

        async def cut() -> None:
            for _ in world.steps(6):
                await asyncio.sleep(world.dice.choice([0.1, 1.0, 5.0]))
                process.is_cut_off = process.number > 0
                await asyncio.sleep(world.dice.choice([0.1, 1.0, 10.0]))
                process.is_cut_off = False

        async with asyncio.TaskGroup() as group:
            group.create_task(visited(process, [resource] * 4))
            group.create_task(cut())

    world.launch(app, 3)


async def on_a_store_that_tells(world: World) -> None:
    """S10: it says what others do: memory asks nothing, and is behind by `memory_for` at most."""

    is_watched, ended, often = world.dice.random() < 0.3, list[Process](), "ab" * 10 + "c"

    def declared(process: Process) -> Observed:
        cache = process.cache(pushes=True)

        @cache.batched("price", fresh_for=300, memory_for=1, lease_for=3, max_entries=2)
        async def price(ids: list[str]) -> dict[str, Version | Exception]:
            return await process.load("price", ids)

        return process.observe("price", price, lag=1.0)

    async def reads(process: Process) -> None:
        resource = declared(process)

        async def read() -> None:
            for _ in world.steps(80):
                await asyncio.sleep(world.dice.choice([0, 0.01, 0.5, 1.0]))
                with suppress(LoadFailed):
                    await resource.get(world.dice.choice(often))

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(read())

    async def changes(process: Process) -> None:
        resource = declared(process)
        for _ in world.steps(15):
            await asyncio.sleep(world.dice.choice([0, 1.0, 3.0, 5.0]))
            key = world.dice.choice(KEYS[:2])
            match world.dice.randrange(8):
                case 0:
                    await resource.delete(key)
                case 1:
                    await resource.change(key)
                case _:  # one after another, so that reads are on their way meanwhile
                    for _ in world.steps(2):
                        await resource.put(key)
        if is_watched:
            await asyncio.sleep(max(0.0, QUIET - world.time()))
            await noticed(world, resource)
            await noticed(world, resource)
        ended.append(process)

    async def watches(process: Process) -> None:
        process.failure_rate = 0.0
        with declared(process).resource.watch(WATCHED):
            while not ended:
                await asyncio.sleep(TOLD)

    if world.dice.random() < 0.5:
        world.weather.strikes(Strike(0, Blow.SLOW, 0, QUIET))
    world.launch(reads, 2)
    world.launch(changes, 1)
    if is_watched:
        world.launch(watches, 1)


async def noticed(world: World, resource: Observed) -> None:
    """Another process watches it: told of the change, or that the channel broke, it loads."""
    await asyncio.sleep(TOLD)
    began, faults = world.time(), world.weather.faults
    await resource.change(WATCHED)
    await asyncio.sleep(TOLD)
    is_late = world.ledger.loaded_at[resource.kind, WATCHED] < began
    if is_late and world.weather.faults == faults:
        world.broken(Promise.ASKED, f"another process changed it {TOLD} s ago, and nobody asked")


def launch_cluster(world: World) -> None:
    """Three processes that read, write and invalidate keys on three nodes."""

    async def app(process: Process) -> None:
        pushes = world.dice.random() < 0.3
        cache = process.cache(cluster=True, pushes=pushes)
        resource = prices(process, cache, memory_for=1.0 if pushes else 0.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(visited(process, [resource] * 2))
            group.create_task(write(process, resource))

    world.launch(app, 3)


async def over_a_cluster(world: World) -> None:
    """S9: one node of three is replaced by its replica now and then."""
    launch_cluster(world)
    for _ in world.steps(6):
        await asyncio.sleep(world.dice.uniform(0, 4))
        world.fail_over(world.dice.randrange(3))


async def while_slots_move(world: World) -> None:
    """S9: keys move between the nodes, which fail, too; a batch is done in part, then elsewhere."""
    launch_cluster(world)
    for _ in world.steps(20):
        await asyncio.sleep(world.dice.uniform(0, 1.5))
        world.move(world.dice.choice(KEYS), world.dice.randrange(3))
        if world.dice.random() < 0.2:
            world.fail_over(world.dice.randrange(3))


async def set_back(world: World) -> None:
    """T4, E5: clocks go back by an hour, and who loads is killed: others load what it had begun."""
    when = world.dice.uniform(0.5, 5)
    many = [f"k{number}" for number in range(15)]

    async def app(process: Process) -> None:
        if world.time() >= when:
            process.jump(-HOUR)
        resource = prices(process, process.cache(inline=True), keys=many)
        for number in world.steps(len(many)):
            await asyncio.sleep(world.dice.choice([0, 0.05, 0.5]))
            await resource.get(many[number])

    world.launch(app, 3)
    await asyncio.sleep(when)
    for process in [each for each in world.processes if each.is_alive]:
        process.jump(-HOUR)
        if world.dice.random() < 0.7:
            process.kill()


async def on_late_requests(world: World) -> None:
    """S8, T7: slow loads that another process invalidates while their requests are on their way."""
    many = [f"k{number}" for number in range(60)]

    def slow(process: Process) -> Observed:
        cache = process.cache()

        @cache.batched("price", fresh_for=60, max_batch=1, concurrency=len(many), lease_for=10)
        async def price(ids: list[str]) -> dict[str, Version | Exception]:
            found = await process.load("price", ids)
            await asyncio.sleep(process.dice.uniform(2, 9))
            return found

        return process.observe("price", price)

    async def loads(process: Process) -> None:
        resource = slow(process)

        async def read(key: str) -> None:
            await asyncio.sleep(world.dice.uniform(0, 3))
            await resource.get(key)

        async with asyncio.TaskGroup() as group:
            for number in world.steps(len(many)):
                group.create_task(resource.get(many[number]))
                group.create_task(read(many[number]))

    async def changes(process: Process) -> None:
        resource = slow(process)

        async def change(key: str) -> None:
            await asyncio.sleep(world.dice.uniform(0, 4))
            await resource.change(key)
            await asyncio.sleep(world.dice.uniform(0, 30))
            await resource.get(key)

        async with asyncio.TaskGroup() as group:
            for number in world.steps(len(many)):
                group.create_task(change(many[number]))

    world.launch(loads, 1)
    world.launch(changes, 1)


async def of_puts(
    world: World,
    keys: Sequence[str] = KEYS,
    updates: int = 2,
    visitors: int = 3,
    versioned: float = 0.0,
) -> None:
    """E17: values that a process knows, put while others load, invalidate and put the same keys."""

    async def app(process: Process) -> None:
        memory_for, inline, pushes = world.dice.choice(
            [(0.0, False, False), (1.0, False, False), (0.0, True, False), (1.0, False, True)]
        )
        cache = process.cache(inline=inline, pushes=pushes)
        resource = prices(process, cache, memory_for=memory_for)
        with resource.resource.watch(KEYS[0]):
            async with asyncio.TaskGroup() as group:
                for _ in range(visitors):
                    group.create_task(write(process, resource, keys, updates, versioned))

    world.launch(app, 3)


async def of_versioned_puts(world: World) -> None:
    """E35: the same; most puts have a version, and some have none."""
    await of_puts(world, versioned=0.8)


async def of_updates(world: World) -> None:
    """E17: one key that everybody updates: an acknowledged update is applied once."""
    await of_puts(world, KEYS[:1], updates=10, visitors=2)


class Saved(NamedTuple):
    """What a user saved, for the same user's next page."""

    key: str
    token: str
    number: int
    """Of the version that was saved."""


async def of_own_writes(world: World) -> None:
    """E37: users save in one process and look in another one, whose memory lags far behind.

    Some stores tell of changes, on a channel that breaks; some are three nodes that fail over, and
    acknowledge a change when a replica has it.
    """
    how = world.dice.choice([{}, {"pushes": True}, {"inline": True}, {"cluster": True}])
    saved: list[Saved] = []

    async def app(process: Process) -> None:
        cache = process.cache(**how)

        @cache.batched(
            "price",
            fresh_for=60,
            stale_for=60,
            error_for=60,
            memory_for=20,
            lease_for=3,
            load_timeout=7,
            tags=shops,
        )
        async def price(ids: list[str]) -> dict[str, Version | Exception]:
            return await process.load("price", ids)

        resource = process.observe("price", price, lag=20.0)
        async with asyncio.TaskGroup() as group:
            group.create_task(save(process, resource, saved))
            for _ in range(2):
                group.create_task(look(process, resource, saved))

    world.launch(app, 3)
    if "cluster" in how:
        for _ in world.steps(6):
            await asyncio.sleep(world.dice.uniform(0, 4))
            world.fail_over(world.dice.randrange(3))


async def save(process: Process, resource: Observed, saved: list[Saved]) -> None:
    """Change keys, and leave the token of each change that was acknowledged.

    The value of a put may be older than another process's change that came between. So one process
    alone changes the key that is put.
    """
    world = process.world
    *invalidated, put_key = KEYS
    for _ in world.steps(20):
        await asyncio.sleep(world.dice.choice([0, 0.05, 0.5, 3.0]))
        is_put = process.number == 1 and world.dice.random() < 0.5
        key = put_key if is_put else world.dice.choice(invalidated)
        number = world.ledger.upstream[resource.kind, key] + 1
        with noted_changes() as changes:
            match world.dice.randrange(4):
                case 0 | 1 if is_put:
                    await resource.put(key)
                case 1:
                    await resource.change(key, soft=True)
                case _:
                    await resource.change(key)
        if changes.token:
            saved.append(Saved(key, changes.token, number))


async def look(process: Process, resource: Observed, saved: list[Saved]) -> None:
    """Read, sometimes as a user who has saved before, and sometimes as one who saved twice."""
    world = process.world
    for _ in world.steps(30):
        await asyncio.sleep(world.dice.choice([0, 0, 0.05, 0.5]))
        await resource.get(world.dice.choice(KEYS))
        if not saved:
            continue
        last = saved[-1]
        other = world.dice.choice(saved[-5:])
        token = last.token
        if other.key == last.key and world.dice.random() < 0.5:
            token = merge_tokens(other.token, last.token)
        answer = await resource.get(last.key, at_least=token)
        if answer is not None and answer.found and answer.value.number < last.number:
            what = f"{last.key}: version {answer.value.number} instead of {last.number}"
            world.broken(Promise.OWN, what)


async def of_own_menus(world: World) -> None:
    """E37: a menu is made of a part, and one tag names both: it is never older than the change.

    Anybody may have it loaded, on a process whose memory lags, or while the part is refreshed.
    Menus may have a cache of their own.
    """
    how = world.dice.choice([{}, {"pushes": True}, {"inline": True}])
    are_apart = world.dice.random() < 0.5
    saved: list[Saved] = []

    async def app(process: Process) -> None:
        cache = process.cache(**how)
        menus = process.cache(**how) if are_apart else cache
        terms: dict[str, Any] = {
            "fresh_for": 60,
            "stale_for": 60,
            "error_for": 60,
            "memory_for": 20,
            "lease_for": 3,
            "load_timeout": 7,
            "max_batch": 1,
            "tags": shops,
        }

        @cache.batched("part", **terms)
        async def part(ids: list[str]) -> dict[str, Version | Exception]:
            return await process.load("part", ids)

        @menus.batched("menu", **terms)
        async def menu(ids: list[str]) -> dict[str, Version | Exception]:
            answer = await part.get(ids[0])
            results = await process.load("menu", ids)
            result = results[ids[0]]
            if isinstance(result, Version):
                results[ids[0]] = Version(answer.value.number, result.load)
            return results

        async def change() -> None:
            for _ in world.steps(15):
                await asyncio.sleep(world.dice.choice([0, 0.05, 0.5, 3.0]))
                key = world.dice.choice(KEYS)
                (number,) = world.change("part", key).values()
                with suppress(StoreError):
                    soft = world.dice.random() < 0.5
                    tagged = await cache.invalidate_tag(*shops(key), soft=soft)
                    saved.append(Saved(key, tagged.token, number))

        async def visit() -> None:
            for _ in world.steps(30):
                await asyncio.sleep(world.dice.choice([0, 0, 0.05, 0.5]))
                with suppress(LoadFailed, NotOpen):
                    await world.dice.choice([part, menu]).get(world.dice.choice(KEYS))
                if not saved:
                    continue
                last = saved[-1]
                with suppress(LoadFailed, NotOpen):
                    answer = await menu.get(last.key, at_least=last.token)
                    if answer.found and answer.value.number < last.number:
                        what = f"{last.key}: version {answer.value.number}, not {last.number}"
                        world.broken(Promise.OWN, what)

        async with asyncio.TaskGroup() as group:
            group.create_task(change())
            for _ in range(2):
                group.create_task(visit())

    world.launch(app, 3)


async def of_write_throughs(world: World) -> None:
    """E36: processes write the same keys at once, inside `changing`, and are killed meanwhile."""

    async def visit(process: Process, resource: Observed) -> None:
        for _ in world.steps(20):
            await asyncio.sleep(world.dice.choice([0, 0.05, 0.5, 3.0]))
            key = world.dice.choice(KEYS[:2])
            match world.dice.randrange(4):
                case 0 | 1:
                    work: Awaitable[object] = resource.write_through(key)
                case _:
                    work = resource.get(key)
            if world.dice.random() < 0.8:
                await work
            else:
                await impatient(world, work)

    async def app(process: Process) -> None:
        memory_for, inline = world.dice.choice([(0.0, False), (1.0, False), (0.0, True)])
        resource = prices(process, process.cache(inline=inline), memory_for=memory_for)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(visit(process, resource))

    world.launch(app, 3)


async def write(
    process: Process,
    resource: Observed,
    keys: Sequence[str] = KEYS,
    updates: int = 2,
    versioned: float = 0.0,
) -> None:
    """One visitor that puts and updates, too. If it gives up, it may invalidate or put instead.

    `versioned`: the share of its puts that have a version.
    """
    world = process.world
    for _ in world.steps(20):
        await asyncio.sleep(world.dice.choice([0, 0.05, 0.5, 3.0]))
        key = world.dice.choice(keys)
        some = (key,) if world.dice.random() < 0.3 else keys
        work: Awaitable[object]
        match world.dice.randrange(10 + updates):
            case 0 | 1:
                work = resource.put(*some, versioned=world.dice.random() < versioned)
            case 2:
                work = resource.change(*some, soft=world.dice.random() < 0.3)
            case 3:
                work = resource.refresh(key)
            case 4 | 5 | 6 | 7:
                work = resource.get(key)
            case 8:
                work = resource.put(*some, only_if_absent=True)
            case 9:
                work = resource.touch(key) if world.dice.random() < 0.5 else resource.delete(key)
            case _:
                work = resource.update(key)
        if world.dice.random() < 0.8:
            await work
        elif not await impatient(world, work) and world.dice.random() < 0.5:
            if world.dice.random() < 0.7:
                await resource.change(key)
            else:
                await resource.put(key)


async def by_tags(world: World, *, late: bool = False) -> None:
    """E8: an invalidation by tag reaches what is stored, in memory, and on its way."""

    async def app(process: Process) -> None:
        keys = [key for keys in SHOPS.values() for key in keys]
        pushes = world.dice.random() < 0.5
        cache = process.cache(pushes=pushes)
        memory_for = 1.0 if pushes else 0.0
        resource = prices(process, cache, memory_for=memory_for, keys=keys, late=late)
        for _ in world.steps(25):
            await asyncio.sleep(world.dice.choice([0, 0.05, 0.5, 3.0]))
            if world.dice.random() < 0.2:
                shop = world.dice.choice(sorted(SHOPS))
                world.change("price", *SHOPS[shop])
                async with process.invalidating("price", SHOPS[shop]):
                    await cache.invalidate_tag(f"shop:{shop}")
            elif world.dice.random() < 0.3:
                await resource.get_many(keys)
            else:
                await resource.get(world.dice.choice(keys))

    world.launch(app, 3)


async def by_late_tags(world: World) -> None:
    """I26: the same for tags that only the load can tell."""
    await by_tags(world, late=True)


class SlowAnswers(StoreWire):
    """Its steps are done at once. Answers to reads and publications may come late, or not at all.

    Nor does a request for a lease always arrive: then its sender loads without one.
    """

    async def _attempt(self, request: StoreRequest[T]) -> T:
        if request.step in {"acquire", "read"} and self._world.dice.random() < 0.25:
            raise StoreError("the store does not answer")
        return await super()._attempt(request)

    def _arrive(self, after: float, *arrived: Any) -> None:
        request, ids, answer, *delay = arrived
        slow = {"publish": (0.2, 1.0, 3.0), "read": (0.0, 0.0, 0.3, 1.0)}.get(request.step, (0.0,))
        super()._arrive(after, request, ids, answer, sum(delay) + self._world.dice.choice(slow))


async def on_slow_answers(world: World) -> None:
    """E6: keys change, one by one, by tag and all at once, and are put, during reads and loads.

    A load without a lease is void because of the change in its process, and of nothing else.
    """
    warm = [f"w{number}" for number in range(5)]
    cold = [f"c{number}" for number in range(25)]

    async def app(process: Process) -> None:
        store = SlowAnswers(process)
        cache = Cache(store, clock=process.clock, dice=process.dice.random, grace=GRACE)
        process.at_close(cache.close)
        memory_for = world.dice.choice([0.0, 5.0])

        @cache.batched(
            "price",
            fresh_for=60,
            max_batch=1,
            concurrency=len(warm + cold),
            memory_for=memory_for,
            tags=lambda key: [f"shop:{key}"],
        )
        async def price(ids: list[str]) -> dict[str, Version | Exception]:
            return await process.load("price", ids)

        resource = process.observe("price", price, lag=memory_for)

        async def read(key: str, *pauses: float) -> None:
            await asyncio.sleep(world.dice.choice(pauses))
            await resource.get(key)

        async def change_tag(key: str) -> None:
            await asyncio.sleep(world.dice.uniform(0, 0.5))
            world.change("price", key)
            async with process.invalidating("price", [key]):
                await cache.invalidate_tag(f"shop:{key}")

        async def change_all() -> None:
            world.change("price", *warm, *cold)
            async with process.invalidating("price", warm + cold):
                await (cache.invalidate_all() if world.dice.random() < 0.5 else price.clear())

        async def visit_cold(key: str) -> None:
            """The store knows nothing of the key when its tag is invalidated."""
            await asyncio.sleep(world.dice.uniform(0, 10))
            async with asyncio.TaskGroup() as group:
                group.create_task(read(key, 0))
                group.create_task(change_tag(key))
                for _ in range(3):
                    group.create_task(read(key, 0.3, 0.6, 1.0, 3.0))

        async def visit_warm(key: str) -> None:
            for _ in world.steps(9):
                await asyncio.sleep(world.dice.choice([0, 0.1, 0.5, 2.0]))
                async with asyncio.TaskGroup() as group:
                    for _ in range(3):
                        group.create_task(read(key, 0, 0.05, 0.3, 1.0))
                    match world.dice.randrange(10):
                        case 0 | 1 | 2 | 3:
                            group.create_task(resource.change(key))
                        case 4 | 5 | 6:
                            group.create_task(resource.put(key))

        async def shake() -> None:
            for _ in world.steps(6):
                await asyncio.sleep(world.dice.uniform(0.5, 5))
                async with asyncio.TaskGroup() as group:
                    group.create_task(change_all())
                    for key in warm:
                        group.create_task(read(key, 0.01, 0.03, 0.06))
                async with asyncio.TaskGroup() as group:
                    for key in warm:
                        group.create_task(read(key, 0))

        async with asyncio.TaskGroup() as group:
            group.create_task(shake())
            for key in warm:
                group.create_task(visit_warm(key))
            for key in [key for key in cold if world.dice.random() < 0.5]:
                group.create_task(visit_cold(key))

    world.launch(app, 2)


async def inside_another(world: World) -> None:
    """E3, E4: loaders that ask other resources, and now and then one another, in a circle.

    I26: a menu is made of a part, and has a tag for it: who changes the part invalidates both.
    """

    async def app(process: Process) -> None:
        cache = process.cache()

        @cache.batched(
            "page", fresh_for=3, stale_for=3, max_batch=2, concurrency=1, load_timeout=LONG
        )
        async def page(ids: list[str]) -> dict[str, Version | Exception]:
            for id_ in ids:
                with suppress(LoadFailed):
                    await (part.get(id_) if id_ != "c" else page.get("a"))
            return await process.load("page", ids)

        @cache.batched(
            "part", fresh_for=2, stale_for=2, max_batch=1, concurrency=1, load_timeout=LONG
        )
        async def part(ids: list[str]) -> dict[str, Version | Exception]:
            if "b" in ids:
                with suppress(LoadFailed):
                    await page.get("b")
            return await process.load("part", ids)

        @cache.batched("menu", fresh_for=60, max_batch=1, lease_for=3)
        async def menu(ids: list[str]) -> dict[str, Version | Loaded[Version] | Exception]:
            answer = await part.get(ids[0], max_age=2)
            (it,) = (await process.load("menu", ids)).values()
            is_sure = answer.verdict is Verdict.FRESH and not answer.unverified
            if isinstance(it, Exception) or not is_sure or is_unstored(world, answer.value):
                raise ConnectionError("the part may be an old one")
            made = Version(answer.value.number, it.load)
            return {ids[0]: Loaded(made, tags=[f"part:{ids[0]}"])}

        async def cook() -> None:
            for _ in world.steps(15):
                await asyncio.sleep(world.dice.choice([0, 0.05, 0.5, 3.0]))
                key = world.dice.choice(KEYS)
                match world.dice.randrange(6):
                    case 0 | 1:
                        versions = world.change("part", key)
                        with suppress(StoreError):  # a load between the two has the new part
                            await part.invalidate(key)
                            await cache.invalidate_tag(f"part:{key}")
                            process.announced("part", versions)
                            world.ledger.invalidated(
                                ANYBODY,
                                {("menu", key): versions[key]},
                                soft=False,
                                ended=world.time(),
                            )
                    case 2:
                        await menus.delete(key)
                    case _:
                        await menus.get(key)

        menus = process.observe("menu", menu)
        pages, parts = process.observe("page", page), process.observe("part", part)
        async with asyncio.TaskGroup() as group:
            group.create_task(visited(process, [pages, pages, parts]))
            group.create_task(cook())

    world.launch(app, 2)


def is_unstored(world: World, value: Version) -> bool:
    """S5: loaded while the store was away, which may have missed an invalidation."""
    return world.ledger.loads[value.load].is_unstored


async def closed_and_opened(world: World) -> None:
    """E13: a cache that is closed in the midst of everything, and opened again."""

    async def app(process: Process) -> None:
        cache = process.cache()
        resource = prices(process, cache)

        async def read() -> None:
            for _ in world.steps(25):
                await asyncio.sleep(world.dice.choice([0, 0.05, 0.5]))
                await resource.get(world.dice.choice(KEYS))

        async def watch() -> None:
            for _ in world.steps(5):
                await asyncio.sleep(world.dice.choice([0, 1.0]))
                try:
                    with resource.resource.watch(*KEYS) as watch:
                        async for _ in watch:
                            await asyncio.sleep(world.dice.choice([0, 0.1]))
                            if world.dice.random() < 0.3:
                                break
                except NotOpen:
                    pass

        async def close() -> None:
            for _ in world.steps(3):
                await asyncio.sleep(world.dice.uniform(0, 5))
                await cache.close()
                await asyncio.sleep(world.dice.choice([0, 0.3]))
                await cache.open()
            await asyncio.sleep(10)
            await cache.close()

        async with asyncio.TaskGroup() as group:
            for work in (read(), read(), watch(), close()):
                group.create_task(work)

    world.launch(app, 2)
