"""E39, E41, G24: a miss beside `async-lru` and cashews, many at once, what a key and a watch take.

A miss is timed with the garbage collector on, as a program has it, and with a new key each time.
Times are of the process's CPU: what else runs on the machine counts in none of them. Only a turn of
the loop is as long as its readers wait.
"""

import asyncio
import gc
import random
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from statistics import median
from typing import TypeAlias

import async_lru
import cashews

from benchmarks import tried
from benchmarks.harness import Figures, Progress, Row, Section
from stillfresh import Cache

__all__ = ["section"]

HOUR = 3600
MISSES = 1_000  # in one round
ROUNDS = 21
MANY = 100
AT_ONCE = 10_000
HELD = 100_000
WATCHED = 10_000
WATCHED_FOR = 2.0
"""Seconds of freshness: each watched key is refreshed so often."""
REFRESHES = 3 * WATCHED
LRU = "`async-lru`"
LRU_WAITS = "`async-lru`, a loader that waits once"
CACHED = "`cached`"
WAITS = "`cached`, a loader that waits once"
ONE = "`batched`, `max_batch=1`"
HUNDRED = "`batched`, `max_batch=100`"
COLD_MANY = "`get_many` of 100 cold keys"
CASHEWS_MANY = "cashews, `get_many` and `set_many` by hand"
BARE = "bare tasks"
REFRESH = "10,000 watched keys, batches of 100: CPU for each refresh"
REFRESH_SQLITE = f"{REFRESH}, on SQLite"
STARTS = {
    "import": "import stillfresh",
    "first use": "from stillfresh import Cache",
    "help": "import sys; sys.argv[1:] = ['--help']; from stillfresh.cli import main; main()",
    "peer": "import asyncio, msgspec",
}

Read: TypeAlias = Callable[[int], Awaitable[object]]


async def number(key: int) -> int:
    return key


async def number_later(key: int) -> int:
    await asyncio.sleep(0)
    return key


async def numbers(keys: list[int]) -> dict[int, int]:
    return {key: key for key in keys}


async def opened(stack: AsyncExitStack) -> Cache:
    return await stack.enter_async_context(Cache("memory://"))


async def miss_times() -> Figures:
    """Microseconds for a miss, one after the other."""
    async with AsyncExitStack() as stack:
        cache = await opened(stack)
        readers: dict[str, Read] = {
            LRU: async_lru.alru_cache(maxsize=10_000, ttl=HOUR)(number),
            LRU_WAITS: async_lru.alru_cache(maxsize=10_000, ttl=HOUR)(number_later),
            CACHED: cache.cached("number", fresh_for=HOUR)(number),
            WAITS: cache.cached("number_later", fresh_for=HOUR)(number_later),
            ONE: cache.batched("one", fresh_for=HOUR, max_batch=1)(numbers),
            HUNDRED: cache.batched("hundred", fresh_for=HOUR, max_batch=100)(numbers),
        }
        times: dict[str, list[float]] = {name: [] for name in readers}
        names = list(readers)
        dice = random.Random(1)
        for start in range(0, ROUNDS * MISSES, MISSES):
            dice.shuffle(names)
            for name in names:
                read = readers[name]
                began = time.process_time()
                for key in range(start, start + MISSES):
                    await read(key)
                times[name].append((time.process_time() - began) / MISSES * 1e6)
    return {name: median(taken) for name, taken in times.items()}


async def batch_times() -> Figures:
    """Microseconds for a key of a cold batch."""
    async with AsyncExitStack() as stack:
        cache = await opened(stack)
        many = cache.batched("many", fresh_for=HOUR, max_batch=MANY, max_entries=1_000_000)(numbers)
        peer = cashews.Cache()
        peer.setup("mem://", size=1_000_000)

        async def by_hand(keys: list[str]) -> None:
            known = await peer.get_many(*keys)
            missing = [key for key, value in zip(keys, known, strict=True) if value is None]
            await peer.set_many(dict.fromkeys(missing, 1), expire=HOUR)

        times: dict[str, list[float]] = {COLD_MANY: [], CASHEWS_MANY: []}
        for start in range(0, ROUNDS * 1000, MANY):
            keys = list(range(start, start + MANY))
            texts = [str(key) for key in keys]
            began = time.process_time()
            await many.get_many(keys)
            between = time.process_time()
            await by_hand(texts)
            times[COLD_MANY].append((between - began) / MANY * 1e6)
            times[CASHEWS_MANY].append((time.process_time() - between) / MANY * 1e6)
        await peer.close()
    return {name: median(taken) for name, taken in times.items()}


async def longest_turn(read: Read) -> float:
    """Milliseconds of the longest turn of the loop while all these reads are made at once.

    The turn in which their tasks are made counts, as in a program that gathers them.
    """
    loop = asyncio.get_running_loop()
    turns: list[float] = []
    is_over = False
    last = time.perf_counter()

    def note_turn() -> None:
        nonlocal last
        now = time.perf_counter()
        turns.append(now - last)
        last = now
        if not is_over:
            loop.call_soon(note_turn)

    note_turn()
    tasks = [asyncio.ensure_future(read(key)) for key in range(AT_ONCE)]
    await asyncio.gather(*tasks)
    is_over = True
    await asyncio.sleep(0)
    return max(turns) * 1000


async def turn_times(rounds: int = 7) -> Figures:
    times: dict[str, list[float]] = {BARE: [], ONE: [], HUNDRED: []}
    for _ in range(rounds):
        async with AsyncExitStack() as stack:
            cache = await opened(stack)
            one = cache.batched("one", fresh_for=HOUR, max_batch=1, max_entries=AT_ONCE)(numbers)
            hundred = cache.batched("hundred", fresh_for=HOUR, max_entries=AT_ONCE)(numbers)
            times[BARE].append(await longest_turn(number))
            times[ONE].append(await longest_turn(one.get))
            times[HUNDRED].append(await longest_turn(hundred.get))
    return {name: median(taken) for name, taken in times.items()}


def collection_time() -> float:
    """Milliseconds of a full collection, the shortest of seven."""
    times = []
    for _ in range(7):
        began = time.process_time()
        gc.collect()
        times.append(time.process_time() - began)
    return min(times) * 1000


async def held_keys() -> Figures:
    """What 100,000 keys of ints take beside key and value, and what they cost the collector."""
    async with AsyncExitStack() as stack:
        cache = await opened(stack)
        held = cache.batched("held", fresh_for=HOUR, max_entries=HELD + 1)(numbers)
        await held(-1)
        empty = collection_time()
        keys = list(range(1_000, 1_000 + HELD))
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for start in range(0, HELD, 1_000):
            await held.get_many(keys[start : start + 1_000])
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        size = sys.getsizeof(keys[0])  # memory decodes a value of its own; the key is the caller's
        return {
            "bytes beside key and value": (after - before) / HELD - size,
            "collection without keys, ms": empty,
            "collection with keys, ms": collection_time(),
        }


async def refresh_time(url: str) -> float:
    """Microseconds of CPU for each refresh of 10,000 watched keys, in batches of 100."""
    async with Cache(url) as cache:
        loaded = 0
        is_enough = asyncio.Event()

        @cache.batched("kept", fresh_for=WATCHED_FOR, max_batch=MANY, max_entries=WATCHED)
        async def kept(keys: list[int]) -> dict[int, int]:
            nonlocal loaded
            loaded += len(keys)
            if loaded >= wanted:
                is_enough.set()
            return dict.fromkeys(keys, loaded)

        wanted = WATCHED
        with kept.watch(*range(WATCHED)):
            await is_enough.wait()
            is_enough.clear()
            wanted = loaded + REFRESHES
            first = loaded
            began = time.process_time()
            await is_enough.wait()
            return (time.process_time() - began) / (loaded - first) * 1e6


def refresh_times() -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        return {
            REFRESH: asyncio.run(refresh_time("memory://")),
            REFRESH_SQLITE: asyncio.run(refresh_time(f"sqlite:///{folder}/watched.db")),
        }


def used_by_children() -> float:
    """Seconds of CPU of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start_times(rounds: int = 15) -> Figures:
    """Milliseconds that a new interpreter takes until it has done it and ended."""
    times: dict[str, list[float]] = {name: [] for name in STARTS}
    for _ in range(rounds):
        for name, program in STARTS.items():
            before = used_by_children()
            subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
            times[name].append((used_by_children() - before) * 1000)
    return {name: median(taken) for name, taken in times.items()}


def section(progress: Progress) -> Section:
    """Everything that E39 and E41 promise of the engine, and of G24 the watched keys."""
    progress("one miss after the other")
    misses = asyncio.run(miss_times())
    progress("cold batches")
    batches = asyncio.run(batch_times())
    progress("10,000 reads in one turn")
    turns = asyncio.run(turn_times())
    progress("100,000 keys")
    held = asyncio.run(held_keys())
    progress("10,000 watched keys")
    refreshes = refresh_times()
    progress("starting the interpreter")
    starts = start_times()
    peer = starts["peer"]
    rows = [
        Row(
            "E39",
            f"one miss, {name}, against {LRU}",
            misses[name] / misses[LRU],
            target,
            tried=text,
        )
        for name, target, text in (
            (CACHED, 2, tried.MISS),
            (ONE, 2, tried.MISS),
            (HUNDRED, 3, tried.MISS_BATCHED),
        )
    ]
    rows += [
        Row(
            "E39",
            f"one miss, {WAITS}, against {LRU_WAITS}",
            misses[WAITS] / misses[LRU_WAITS],
            2.5,
            tried=tried.MISS_WAITS,
        ),
        Row(
            "E39",
            f"{COLD_MANY}, against {CASHEWS_MANY}",
            batches[COLD_MANY] / batches[CASHEWS_MANY],
            3,
            tried=tried.COLD_MANY,
        ),
        *(
            Row(
                "E41",
                f"10,000 reads in one turn, {name}: the longest turn against {BARE}",
                turns[name] / turns[BARE],
                3,
            )
            for name in (ONE, HUNDRED)
        ),
        Row(
            "E39",
            "100,000 keys of ints: memory for each beside key and value",
            held["bytes beside key and value"],
            600,
            unit="bytes",
            tried=tried.KEY_MEMORY,
        ),
        Row(
            "E39",
            "100,000 keys of ints: a full collection against that of an empty process",
            held["collection with keys, ms"] / held["collection without keys, ms"],
            2,
            tried=tried.COLLECTION,
        ),
        *(
            Row("G24", name, refreshes[name], target, unit="µs", tried=tried.WATCHED_REFRESH)
            for name, target in ((REFRESH, 31), (REFRESH_SQLITE, 55))
        ),
        Row(
            "E39",
            "`import stillfresh` against `import asyncio, msgspec`",
            starts["import"] / peer,
            1.25,
        ),
        Row("E39", "`stillfresh --help` against the same", starts["help"] / peer, 2.5),
        Row("E39", "`from stillfresh import Cache` against the same", starts["first use"] / peer),
    ]
    return Section(
        "Misses, and what a key takes (E39, E41, G24)",
        rows,
        {
            "one miss, µs": misses,
            "a cold batch, µs a key": batches,
            "the longest turn, ms": turns,
            "100,000 keys": held,
            "10,000 watched keys, µs of CPU": refreshes,
            "a new interpreter, ms": starts,
        },
    )
