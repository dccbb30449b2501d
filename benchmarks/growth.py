"""E28, C18, F18: what each operation costs, and how long it holds the event loop, at four sizes.

The cost is the time by the wall clock, the median of a few rounds. A hold is the longest turn of
the loop in CPU time, so that others on the machine do not count.
"""

import asyncio
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, cast

import msgspec

from benchmarks import tried
from benchmarks.harness import Progress, Row, Section
from stillfresh import Cache, Policy, Resource
from stillfresh.gateway import Gateway, gateway
from stillfresh.stores.contract import Ask, Copy, Lease, Store
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.systems.coordinator import Database, Kind, TtlConfig, TtlController, TtlCoordinator
from stillfresh.systems.feed import FeedCache, FeedEngine, FeedSource, Topic
from stillfresh.testing import ManualClock

__all__ = ["section"]

IN_MEMORY = (1_000, 10_000, 100_000, 1_000_000)
IN_FILE = (1_000, 10_000, 100_000, 300_000)
WATCHED = (1_000, 10_000, 30_000, 100_000)
LISTED = (100, 1_000, 3_000, 10_000)
VIEWERS = (250, 500, 1_000, 2_000)
STEP = 1_000
LONGEST = 20.0
"""E28: milliseconds that anything may hold the loop."""
FLAT = 4.0
"""What a thousand times as much may cost: memory beyond the processor's caches is slower."""
FRESH_FOR = 1.0
SECONDS = 2.5
UPDATE = '"type":"update"'
COLLECTION = "a full garbage collection"
TRIED = {COLLECTION: tried.COLLECTION}


@dataclass
class Operation:
    """Its cost in µs and its longest hold in ms, by size; `walks`: it looks at all, in slices."""

    held: str
    walks: bool = False
    costs: dict[int, float] = field(default_factory=dict)
    holds: dict[int, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.costs[max(self.costs)] / self.costs[min(self.costs)]

    def cells(self, name: str) -> list[str]:
        sizes = " / ".join(f"{size:,}" for size in self.costs)
        costs = " / ".join(f"{cost:,.{0 if cost >= 10 else 2}f}" for cost in self.costs.values())
        ends = f"{self.ratio:.2f} ×", f"{max(self.holds.values()):.1f}"
        return [name, f"{sizes} {self.held}", costs, *ends]

    def rows(self, name: str) -> list[Row]:
        longest, why = max(self.holds.values()), TRIED.get(name, "")
        hold = Row("E28", f"{name}: longest hold", longest, LONGEST, unit="ms", tried=why)
        if self.walks:
            return [hold]
        most = max(self.costs)
        what = f"{name}: with {most:,} {self.held}, against {min(self.costs):,}"
        return [Row("E28", what, self.ratio, FLAT), hold]


class Growth:
    """What was measured so far."""

    def __init__(self, progress: Progress) -> None:
        self.operations: dict[str, Operation] = {}
        self.progress = progress

    async def take(
        self,
        name: str,
        size: int,
        work: Callable[[], Awaitable[object]],
        *,
        held: str = "copies",
        times: int = 100,
        walks: bool = False,
    ) -> None:
        """Run the work so many times for its cost, and once more to look at the loop."""
        costs = []
        for _ in range(times):
            began = time.perf_counter_ns()
            await work()
            costs.append((time.perf_counter_ns() - began) / 1000)
        self.note(name, size, median(costs), await longest_turn(work()), held=held, walks=walks)

    def note(
        self, name: str, size: int, cost: float, hold: float, *, held: str, walks: bool = False
    ) -> None:
        operation = self.operations.setdefault(name, Operation(held, walks))
        operation.costs[size], operation.holds[size] = cost, hold


async def longest_turn(work: Awaitable[object]) -> float:
    """Milliseconds of this thread's CPU, while the work is under way."""
    task, longest = asyncio.ensure_future(work), 0.0
    while not task.done():
        began = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - began)
    await task
    return longest * 1000


def id_of(number: int) -> str:
    return f"sku-{number:07}"


async def fill(store: Store, size: int) -> None:
    """Straight into the store."""
    policy, now = Policy("1d"), time.time()
    for start in range(0, size, STEP):
        asks = [Ask(id_of(number)) for number in range(start, start + STEP)]
        leases = (await store.acquire("price", asks, 60)).values()
        copies = {
            it.id: (it, Copy(it.token, now, policy, b"\x01"))
            for it in leases
            if isinstance(it, Lease)
        }
        await store.publish("price", copies)


@asynccontextmanager
async def cached(
    store: str | Store, most: int, clock: Callable[[], float] = time.time
) -> AsyncIterator[tuple[Cache, Resource[str, int]]]:
    """Ten keys have one tag."""
    async with Cache(store, clock=clock) as cache:

        @cache.batched(
            "price",
            fresh_for="1d",
            memory_for="1d",
            max_batch=STEP,
            max_entries=most,
            tags=lambda sku: [sku[:-1]],
        )
        async def prices(skus: list[str]) -> dict[str, int]:
            return dict.fromkeys(skus, 1)

        yield cache, prices


async def in_memory(growth: Growth, size: int) -> None:
    """Entries in memory, copies in the memory store: as many of both."""
    new = count(10**6)
    store = MemoryStore(max_copies=2 * size)
    async with cached(store, 2 * size) as (cache, prices):
        for start in range(0, size, STEP):
            await prices.get_many(id_of(number) for number in range(start, start + STEP))
        hot, tagged = id_of(size // 2), [id_of(size // 2 + number) for number in range(10)]

        async def invalidate() -> None:
            await prices.get_many(tagged)
            await cache.invalidate_tag(hot[:-1])

        async def watch() -> None:
            prices.watch(hot).close()

        async def collect() -> None:
            gc.collect()

        await growth.take("hit", size, lambda: prices.get(hot))
        await growth.take("cold read", size, lambda: prices.get(id_of(next(new))))
        await growth.take("`invalidate_tag` of ten, and their load", size, invalidate)
        await growth.take("watch and unwatch", size, watch)
        await growth.take("`stats()`", size, cache.stats, times=5, walks=True)
        page = "`entries()`, a page of 100"
        await growth.take(page, size, cache.entries, times=3, walks=True)
        await growth.take("`evict()` of none", size, cache.evict, times=3, walks=True)
        await growth.take(COLLECTION, size, collect, times=3, walks=True)
        began = time.perf_counter()
        hold = await longest_turn(cache.close())
    took = (time.perf_counter() - began) * 1e6
    growth.note("`close()`", size, took, hold, held="copies", walks=True)


async def in_file(growth: Growth, folder: Path, size: int) -> None:
    path = folder / f"{size}.db"
    store, new = SqliteStore(path), count(10**6)
    await store.open()
    await fill(store, size)
    await store.close()
    later = 0.0
    async with cached(f"sqlite:///{path}", STEP, lambda: time.time() + later) as (cache, prices):

        async def beside() -> float:
            """Microseconds for a cold read that begins with a count, the last one forgotten."""
            nonlocal later
            later += 60
            counting = asyncio.ensure_future(cache.stats())
            began = time.perf_counter_ns()
            await prices.get(id_of(next(new)))
            took = (time.perf_counter_ns() - began) / 1000
            await counting
            return took

        cost = median([await beside() for _ in range(5)])
        hold = await longest_turn(beside())
        growth.note("SQLite: cold read beside `stats()`", size, cost, hold, held="copies")
        await growth.take("SQLite: hit", size, lambda: prices.get(id_of(0)))
        await growth.take("SQLite: cold read", size, lambda: prices.get(id_of(next(new))))
        await growth.take("SQLite: `stats()`", size, cache.stats, times=3, walks=True)
        page = "SQLite: `entries()`, a page of 100"
        await growth.take(page, size, cache.entries, times=21, walks=True)
        await growth.take("SQLite: `evict()` of none", size, cache.evict, times=1, walks=True)


async def nothing(ids: list[str]) -> dict[str, int]:
    return dict.fromkeys(ids, 1)


async def watched(growth: Growth, folder: Path, size: int) -> None:
    ids = [id_of(number) for number in range(size)]
    async with cached("memory://", size) as (_, prices):
        with prices.watch(tell=lambda _: None) as watch:
            for start in range(0, size, 100):
                watch.add(*ids[start : start + 100])
                await prices.get_many(ids[start : start + 100])

            async def other() -> None:
                prices.watch("other").close()

            await growth.take("watch and unwatch another", size, other, held="watched")
    clock = ManualClock(time.time())
    kind = Kind("price", fetch=nothing, fresh_for=300, max_batch=STEP)
    database = Database(folder / f"watched-{size}.db")
    async with TtlController(database=database, kinds=[kind], clock=clock) as controller:
        config = TtlConfig(max_batches_per_tick=size, batch_interval_ms=10**9)
        async with TtlCoordinator(controller, config) as ttl:
            ttl.set_visible(True)
            for id_ in ids:
                ttl.subscribe("price", id_)
            ttl.sign_in("viewer")
            await ttl.tick()
            await ttl.tick()
            await growth.take("coordinator: a tick, none due", size, ttl.tick, held="subscribed")


def topic(number: int) -> Topic:
    at = int(time.time()) - 60
    return Topic(f"{number:032x}", "alice", f"Topic {number}", at, body="x" * 300, category_id="a")


class Unasked:
    """A source that is asked for nothing: every list is fresh."""

    async def day_index(self, day: object, category: object) -> list[Topic]:
        raise AssertionError(f"{day}, {category}: not fresh")


async def listed(growth: Growth, folder: Path, size: int) -> None:
    """A list of so many topics, one of which is written before each read."""
    path = folder / f"feed-{size}.db"
    cache = FeedCache.open(path)
    cache.put_topics([topic(number) for number in range(size)], "index:all:7")
    engine = FeedEngine(cache, cast("FeedSource", Unasked()))
    new = count(size)

    async def read() -> None:
        cache.put_topic(topic(next(new)))
        await engine.get_all()

    await engine.get_all()
    name = "feed: write a topic, read its list"
    await growth.take(name, size, read, held="topics", times=10, walks=True)
    await engine.close()
    cache.close()


class Viewers:
    """So many of them on one gateway, in this process, without sockets."""

    def __init__(self) -> None:
        self.updates = 0

    async def look(self, app: Gateway, items: Iterable[str]) -> None:
        said = {"type": "subscribe", "items": [["post", id_] for id_ in items]}
        messages: list[dict[str, Any]] = [
            {"type": "websocket.connect"},
            {"type": "websocket.receive", "text": msgspec.json.encode(said).decode()},
        ]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop(0)
            await asyncio.get_running_loop().create_future()
            raise AssertionError("it is never set")

        async def send(message: MutableMapping[str, Any]) -> None:
            text = message.get("text") or (message.get("bytes") or b"").decode()
            self.updates += text.count(UPDATE)

        scope = {"type": "websocket", "path": "/v1/live", "query_string": b"batch=1", "headers": []}
        await app(scope, receive, send)


async def viewed(growth: Growth, name: str, size: int, items: Callable[[int], list[str]]) -> None:
    """For each update that a viewer is sent: µs of CPU, while everything changes each second."""
    version = count()

    async def fetch(ids: list[str]) -> dict[str, Any]:
        return {id_: {"id": id_, "n": next(version), "text": "x" * 100} for id_ in ids}

    viewers, kind = Viewers(), Kind("post", fetch=fetch, fresh_for=FRESH_FOR, max_batch=50)
    async with gateway("memory://", kinds=[kind]) as app:
        tasks = [asyncio.create_task(viewers.look(app, items(number))) for number in range(size)]
        await asyncio.sleep(2 * FRESH_FOR)
        seen, began = viewers.updates, time.process_time()
        await asyncio.sleep(SECONDS)
        cost = (time.process_time() - began) * 1e6 / max(1, viewers.updates - seen)
        growth.note(name, size, cost, await longest_turn(asyncio.sleep(SECONDS)), held="viewers")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measured(growth: Growth, folder: Path) -> None:
    for size in IN_MEMORY:
        growth.progress(f"growth: {size:,} copies in memory")
        await in_memory(growth, size)
    for size in IN_FILE:
        growth.progress(f"growth: {size:,} copies in a file")
        await in_file(growth, folder, size)
    for size in WATCHED:
        growth.progress(f"growth: {size:,} watched")
        await watched(growth, folder, size)
    for size in LISTED:
        growth.progress(f"growth: a list of {size:,} topics")
        await listed(growth, folder, size)
    for size in VIEWERS:
        growth.progress(f"growth: {size:,} viewers")
        shared = "an update to viewers of the same 20 ids"
        await viewed(growth, shared, size, lambda _: [f"p{it}" for it in range(20)])
        own = "an update to viewers of 5 ids of their own"
        await viewed(growth, own, size, lambda viewer: [f"p{viewer}-{it}" for it in range(5)])


def section(progress: Progress) -> Section:
    growth = Growth(progress)
    gc.collect()
    gc.disable()
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measured(growth, Path(name)))
    gc.enable()
    found = growth.operations
    head = ["operation", "held", "cost, µs", "largest / smallest", "longest hold, ms"]
    return Section(
        "Growth (E28)",
        [row for name, it in found.items() for row in it.rows(name)],
        words=[head, *(it.cells(name) for name, it in found.items())],
        notes=(
            "The cost of an update is CPU time for one update of one viewer. What walks over all "
            "that is held (`stats()`, `entries()`, `evict()`, `close()`, a whole list of a feed) "
            "does it in slices: its whole time grows, its hold does not. SQLite keeps a large "
            "count for 10 s, and a page of its `entries()` looks at 2,000 ids at most. The garbage "
            "collector is off, but for the line that measures it."
        ),
    )
