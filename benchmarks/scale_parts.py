"""What `python -m benchmarks.scale` measures: six parts, each in a process of its own.

Rounds are interleaved: each goes through all sizes, so that a machine that is busy for a while is
so for all of them. A hold is the longest turn of the event loop, in CPU time of its thread.
"""

import asyncio
import gc
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from itertools import count
from pathlib import Path
from statistics import median

from benchmarks import growth, live
from benchmarks.harness import Progress, Section
from benchmarks.postgres_store import loaded
from benchmarks.scale_kit import (
    MODEL,
    VALUE,
    Backend,
    Took,
    Worker,
    backend,
    declared,
    is_quick,
    resident,
    sizes,
)
from benchmarks.scale_worker import SECONDS
from stillfresh import Cache, Resource, Watch
from stillfresh.pages import Page, PageCache
from stillfresh.stores import capabilities_of
from stillfresh.stores.urls import store_for

__all__ = ["keys", "pages", "processes", "tags", "viewers", "watched"]

ROUNDS = 3 if is_quick() else 15
SLOW_ROUNDS = 1 if is_quick() else 3
"""For what walks over everything."""
STORES = ("memory", "SQLite", "Valkey", "PostgreSQL")
SHARED = ("SQLite", "Valkey", "Valkey cluster", "PostgreSQL")
ids = growth.id_of
PUBLISHED = {
    "CPU of the server for a publication, µs": "CPU of the server for a message, µs",
    "CPU of all listeners for a publication, µs": "CPU of a listener for a message, µs",
    "bytes sent for a publication": "bytes of a message",
}
"""By listeners; and what each listener adds."""


def _section(took: Took, title: str) -> Section:
    return Section(title, figures=took.figures())


class Held:
    """A cache on a store with so many entries, and what is done to it."""

    def __init__(self, cache: Cache, prices: Resource[str, str], size: int) -> None:
        self.cache, self.prices, self.size = cache, prices, size
        self._new = count(10**6)
        self._tagged = [ids(10**7 + number) for number in range(10)]
        self.quick = {"hit": (self.hit, 20), "cold read": (self.cold, 5)}
        self.quick |= {"`invalidate` of one": (self.invalidate, 3)}
        self.quick |= {"`invalidate_tag` of ten": (self.tag, 1)}
        self.slow: dict[str, Callable[[], Awaitable[object]]] = {
            "`entries()`, a page of 100": cache.entries,
            "`stats()`": cache.stats,
        }

    async def hit(self) -> None:
        await self.prices.get(MODEL)

    async def cold(self) -> None:
        await self.prices.get(ids(next(self._new)))

    async def invalidate(self) -> None:
        await self.prices.invalidate("invalidated")

    async def ready(self) -> None:
        await self.prices.get_many([MODEL, "invalidated", *self._tagged])

    async def tag(self) -> None:
        await self.cache.invalidate_tag(self._tagged[0][:-1])

    async def timed(self, took: Took, name: str, *, slow: bool) -> None:
        for what, (work, of) in self.quick.items():
            await self.ready()
            await took.time(what, name, self.size, work, of)
        for what, walk in self.slow.items() if slow else ():
            await took.time(what, name, self.size, walk)

    async def looked_at(self, took: Took, name: str) -> None:
        """How long each holds the loop."""
        for what, (work, _) in self.quick.items():
            await self.ready()
            await took.hold(what, name, self.size, work)
        for what, walk in {**self.slow, "`close()`": self.cache.close}.items():
            await took.hold(what, name, self.size, walk, of=1)


async def _held(stack: AsyncExitStack, made: Backend, size: int, took: Took) -> Held:
    """Filled; of memory, its cache and its store alike."""
    if made.name == "memory":
        gc.collect()
        before = resident()
        cache = await stack.enter_async_context(Cache("memory://?max_bytes=8GB"))
        prices = declared(cache, 2 * size, memory_for="1d")
        for start in range(0, size, 1000):
            some = [ids(number) for number in range(start, min(start + 1000, size))]
            await prices.get_many(some)
        each = (resident() - before) / size
    else:
        url = made.new_url()
        async with Cache(url) as first:
            await declared(first, 10).get(MODEL)
        each = await made.fill(url, size)
        cache = await stack.enter_async_context(Cache(url))
        prices = declared(cache, 1000)
    if size >= 100_000 or is_quick():
        took.note("bytes of an entry of 200 bytes", made.name, size, each)
    return Held(cache, prices, size)


async def _keys(took: Took, name: str, progress: Progress) -> None:
    with backend(name) as made:
        async with AsyncExitStack() as stack:
            held = []
            for size in sizes(1_000, 10_000, 100_000, 1_000_000):
                progress(f"keys: {name}, filling {size:,}")
                held.append(await _held(stack, made, size, took))
            progress(f"keys: {name}")
            gc.collect()
            gc.freeze()
            for turn in range(ROUNDS):
                for it in held:
                    await it.timed(took, name, slow=turn < SLOW_ROUNDS)
            for it in held:
                await it.looked_at(took, name)


def keys(progress: Progress) -> Section:
    took = Took()
    gc.disable()
    for name in STORES:
        asyncio.run(_keys(took, name, progress))
        gc.unfreeze()
    return _section(took, "Keys held")


async def _tags(took: Took, made: Backend, size: int) -> None:
    name, url = made.name, made.new_url()
    skus, rounds = [ids(number) for number in range(size)], 1 if size > 10_000 else SLOW_ROUNDS
    with ExitStack() as stack:
        async with Cache(url) as cache, Cache(url) as other:
            prices = declared(cache, size, memory_for="1d", tag="all")
            theirs = declared(other, size, memory_for="1d", tag="all")
            worker = None if name == "memory" else Worker(stack, "pause", url)
            if worker is not None:
                await worker.heard()
                worker.go()
            for turn in range(rounds):
                await prices.get_many(skus)
                await theirs.get_many(skus)
                if not turn:
                    gc.collect()
                began = time.perf_counter_ns()
                hold = await growth.longest_turn(cache.invalidate_tag("all"))
                each = (time.perf_counter_ns() - began) / 1000 / size
                took.note("`invalidate_tag`, µs a key", name, size, each)
                took.note("`invalidate_tag`: hold, ms", name, size, hold)
            if worker is not None:
                worker.go()
                said = await worker.heard()
                took.note("another process's load, longest, ms", name, size, said["longest"])


def tags(progress: Progress) -> Section:
    took = Took()
    gc.disable()
    for name in ("memory", *SHARED):
        with backend(name) as made:
            for size in sizes(10, 100, 1_000, 10_000, 100_000):
                progress(f"tags: {name}, {size:,} keys")
                asyncio.run(_tags(took, made, size))
    return _section(took, "Keys of one tag")


def processes(progress: Progress) -> Section:
    """Their loads and reads a second; and what one costs the server, the client and listeners."""
    took = Took()
    with ExitStack() as stack:
        stores = [stack.enter_context(backend(name)) for name in SHARED]
        urls = {it.name: it.new_url() for it in stores}
        for number in sizes(1, 2, 4, 8, 16):
            for made in stores:
                progress(f"processes: {made.name}, {number}")
                _crowd(took, made, urls[made.name], number)
        for made in stores[1:]:
            for number in sizes(1, 4, 16, 64):
                progress(f"processes: {made.name}, {number} that listen")
                asyncio.run(_listened(took, made, number))
    return _section(took, "Processes")


def _crowd(took: Took, made: Backend, url: str, number: int) -> None:
    with ExitStack() as stack:
        workers = [Worker(stack, "crowd", url) for _ in range(number)]
        for it in workers:
            it.said()
        for what in ("loads", "reads"):
            before = made.cpu()
            for it in workers:
                it.go()
            said = [it.said() for it in workers]
            rate, own = sum(it["rate"] for it in said), median(it["cpu"] for it in said)
            took.note(f"{what} a second", made.name, number, rate)
            took.note(f"CPU of the client, µs ({what})", made.name, number, own)
            if (used := made.cpu() - before) > 0:  # of a process that ended, it is not known
                each = 1e6 * used / (SECONDS * rate)
                took.note(f"CPU of the server, µs ({what})", made.name, number, each)


async def _listened(took: Took, made: Backend, number: int) -> None:
    """What a publication costs when so many are told of it; they share one process here."""
    publications, heard, url = 200 if is_quick() else 4_000, 0, made.new_url()

    def tell(*_: object) -> None:
        nonlocal heard
        heard += 1

    async with AsyncExitStack() as stack:
        writer = store_for(url, time.time)
        await writer.open()
        stack.push_async_callback(writer.close)
        stores = [store_for(url, time.time) for _ in range(number)]
        for store in stores:
            await store.open()
            stack.push_async_callback(store.close)
            push = capabilities_of(store).push
            if push is None:
                raise ValueError(f"{url} does not push changes")
            await stack.enter_async_context(push.listen(tell))
        before, used = made.cpu(), time.process_time()
        sent = await made.sent(writer)
        for start in range(0, publications, 100):
            await loaded(writer, [f"n{it}" for it in range(start, start + 100)], {})
        while heard < number * publications:  # noqa: ASYNC110 (an event for each costs more)
            await asyncio.sleep(0.01)
        server = 1e6 * (made.cpu() - before) / publications
        client = 1e6 * (time.process_time() - used) / publications
        traffic = (await made.sent(writer) - sent) / publications
    values = (
        (server, client, traffic) if traffic else (server, client)
    )  # PostgreSQL counts no bytes
    for (name, of_one), value in zip(PUBLISHED.items(), values, strict=False):
        took.note(name, made.name, number, value)
        if number > 1:  # for each listener beyond the first
            by_size = took.values[f"{name} | {made.name}"]
            each = (by_size[number][0] - by_size[1][0]) / (number - 1)
            took.note(of_one, made.name, number, max(0.0, each))  # too little to be measured


class Watched:
    """So many watched keys of one tag, and how often they were loaded."""

    def __init__(self, cache: Cache, size: int) -> None:
        self.loads, self.size = 0, size
        one_tag = cache.batched(
            "price", fresh_for="1d", max_batch=100, max_entries=size, tags=lambda _: ["all"]
        )
        self.prices = one_tag(self.load)

    async def load(self, skus: list[str]) -> dict[str, str]:
        self.loads += len(skus)
        return dict.fromkeys(skus, VALUE)

    async def loaded(self, wanted: int) -> None:
        while self.loads < wanted:  # noqa: ASYNC110 (its turns are what is measured)
            await asyncio.sleep(0)

    async def one(self) -> None:
        self.prices.watch("other").close()

    async def added(self, watch: Watch[str, str], skus: list[str]) -> None:
        watch.add(*skus)
        await self.loaded(len(skus))

    async def closed(self, watch: Watch[str, str]) -> None:
        watch.close()
        while self.prices.core.watcher.watches:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def _watched(took: Took, size: int) -> None:
    series = "memory"
    async with Cache("memory://?max_bytes=8GB") as cache:
        it = Watched(cache, size)
        with it.prices.watch(tell=lambda _: None) as watch:
            gc.collect()
            before, skus = resident(), list(map(ids, range(size)))
            await took.hold("`watch.add` of all", series, size, lambda: it.added(watch, skus), of=1)
            took.note("bytes of a watched key", series, size, (resident() - before) / size)
            for _ in range(ROUNDS):
                await took.time("watch and unwatch another", series, size, it.one, of=20)
            used = time.process_time()
            await asyncio.sleep(1)
            idle = 1000 * (time.process_time() - used)
            took.note("idle, ms of CPU a second", series, size, idle)
            used, wanted = time.process_time(), it.loads + size
            await cache.invalidate_tag("all")
            hold = await growth.longest_turn(it.loaded(wanted))
            each = 1e6 * (time.process_time() - used) / size
            took.note("refresh of all, µs of CPU a key", series, size, each)
            took.note("refresh of all: hold, ms", series, size, hold)
            await took.hold("close the watch", series, size, lambda: it.closed(watch), of=1)
        values = dict.fromkeys(skus, VALUE)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "get_many": lambda: it.prices.get_many(skus),
            "refresh": lambda: it.prices.refresh(*skus),
            "put_many": lambda: it.prices.put_many(values),
            "invalidate": lambda: it.prices.invalidate(*skus),
            "delete": lambda: it.prices.delete(*skus),
        }
        for name, call in calls.items():
            await took.hold(f"`{name}` of as many keys", series, size, call, of=1)


def watched(progress: Progress) -> Section:
    took = Took()
    gc.disable()
    for size in sizes(100, 1_000, 10_000, 100_000):
        progress(f"watched: {size:,} keys")
        asyncio.run(_watched(took, size))
        gc.collect()
    return _section(took, "Watched keys")


def viewers(progress: Progress) -> Section:
    """Over real sockets, of the same 200 ids; and without sockets, of ids that nobody shares."""
    took, seconds = Took(), 4.0
    live.SECONDS = growth.SECONDS = seconds
    growing = growth.Growth(progress)
    for size in sizes(100, 500, 1_000, 2_000, 5_000):
        progress(f"viewers: {size:,} of the same ids")
        with live.serving() as server:
            idle = server.figures()["resident"]
            held = asyncio.run(live.held(server, size))
        shared = "the same 200 ids"
        took.note("CPU of the gateway, % of a core", shared, size, held.cpu)
        took.note("updates a second", shared, size, held.updates)
        took.note("bytes of a connection", shared, size, (held.resident - idle) / size)
        p99 = 1000 * live.percentile(held.load.from_answer, 0.99)
        took.note("p99 from the upstream's answer, ms", shared, size, p99)
        took.note("bytes of an update", shared, size, held.load.bytes / held.load.updates)
        took.note("gateway: hold, ms", shared, size, held.hold)
        took.note("CPU of an update, µs", shared, size, 1e4 * held.cpu / held.updates)
        own = "5 ids of their own"
        progress(f"viewers: {size:,} of ids of their own")
        gc.disable()
        asyncio.run(
            growth.viewed(growing, own, size, lambda it: [f"p{it}-{number}" for number in range(5)])
        )
        gc.enable()
        found = growing.operations[own]
        took.note("CPU of an update, µs", own, size, found.costs[size])
        took.note("gateway: hold, ms", own, size, found.holds[size])
    return _section(took, "Viewers")


class Pages:
    """So many pages of 1 KB in a cache."""

    def __init__(self, cache: PageCache, size: int) -> None:
        self.cache, self.size = cache, size
        self._new = count(size)
        self.works = {"hit": (self.hit, 20), "render": (self.render, 5)}
        self.works |= {"`revalidate` of one": (self.revalidate, 3)}

    async def get(self, number: int) -> None:
        async def render() -> Page:
            return Page(b"x" * 1000, headers={"content-type": "text/html"})

        await self.cache.get(f"/{number}", render, "1h")

    async def fill(self) -> None:
        for start in range(0, self.size, 100):
            await asyncio.gather(*map(self.get, range(start, start + 100)))

    async def hit(self) -> None:
        await self.get(0)

    async def render(self) -> None:
        await self.get(next(self._new))

    async def revalidate(self) -> None:
        await self.cache.revalidate("/1")


async def _pages(took: Took, name: str, folder: Path, progress: Progress) -> None:
    async with AsyncExitStack() as stack:
        held = []
        for size in sizes(1_000, 10_000, 100_000):
            progress(f"pages: {name}, rendering {size:,}")
            gc.collect()
            before, file = resident(), folder / f"{name}-{size}.db"
            url = "memory://?max_bytes=8GB" if name == "memory" else f"sqlite:///{file}"
            cache = PageCache(url, max_entries=2 * size)
            it = Pages(await stack.enter_async_context(cache), size)
            await it.fill()
            each = (resident() - before) / size
            if name == "memory":
                took.note("bytes of memory for a page of 1 KB", name, size, each)
            held.append(it)
        for _ in range(ROUNDS):
            for it in held:
                for what, (work, of) in it.works.items():
                    await took.time(f"page: {what}", name, it.size, work, of)
        for it in held:
            for what, (work, _) in it.works.items():
                await took.hold(f"page: {what}", name, it.size, work)


def pages(progress: Progress) -> Section:
    took = Took()
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("memory", "SQLite"):
            asyncio.run(_pages(took, name, Path(folder), progress))
    return _section(took, "Pages")
