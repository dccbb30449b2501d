"""E14: what a read from memory costs, in units of an awaited empty coroutine; and a cold batch."""

import asyncio
import gc
import inspect
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import aiocache
import async_lru
import cachebox
import cashews
import diskcache
import moka_py
import theine
from dogpile.cache import make_region

from benchmarks import sqlite, tried
from benchmarks.harness import Contender, Figures, Progress, Row, Section, race_on_loop
from benchmarks.sqlite_writers import crowded
from stillfresh import Cache, Resource, TtlCache
from stillfresh.stores.contract import Store

__all__ = ["section"]

HOUR = 3600
KEY = "sku-1"
MANY = 1000
MAX_BATCH = 50
UNIT = "an awaited empty coroutine"
WITHIN = "`await prices.get(key)` on SQLite within `memory_for`"
GET, CALL, REPORT = "`await prices.get(key)`", "`await prices(key)`", '`await report(2026, "eu")`'
PEEK, TTL_GET = "`prices.peek(key)`", "`TtlCache.get(key)`"
BARE = "`cachebox`, a bare `get` in an async function that loads nothing"


async def nothing() -> None:
    """The unit."""


async def price(key: str) -> int:
    """What the peers cache."""
    return len(key)


async def ours(stack: AsyncExitStack, keys: list[str]) -> list[Contender]:
    cache = await stack.enter_async_context(Cache("memory://"))

    @cache.batched("price", fresh_for=HOUR)
    async def prices(skus: list[str]) -> dict[str, int]:
        return {sku: len(sku) for sku in skus}

    @cache.cached("report", fresh_for=HOUR)
    async def report(year: int, region: str = "eu") -> str:
        return f"{region} {year}"

    held = TtlCache[str, int](HOUR)
    held.insert(KEY, await prices(KEY))
    await report(2026, "eu")
    within = await in_front(stack)
    return [
        Contender(UNIT, "await nothing()", {"nothing": nothing}, keys),
        Contender(WITHIN, "await prices.get(key)", {"prices": within}, keys),
        Contender(GET, "await prices.get(key)", {"prices": prices}, keys),
        Contender(CALL, "await prices(key)", {"prices": prices}, keys),
        Contender(REPORT, 'await report(2026, "eu")', {"report": report}, keys),
        Contender(PEEK, "prices.peek(key)", {"prices": prices}, keys),
        Contender(TTL_GET, "held.get(key)", {"held": held}, keys),
    ]


async def in_front(stack: AsyncExitStack) -> Resource[str, int]:
    """Memory that answers for a shared store, for a while."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    cache = await stack.enter_async_context(Cache(f"sqlite:///{folder}/cache.db"))

    @cache.batched("price", fresh_for=HOUR, memory_for=HOUR)
    async def prices(skus: list[str]) -> dict[str, int]:
        return {sku: len(sku) for sku in skus}

    await prices(KEY)
    return prices


def decorated() -> dict[str, Any]:
    """An async function, cached as each peer's documentation says."""
    nuts = cashews.Cache()
    nuts.setup("mem://")

    def new() -> Any:  # noqa: ANN401 (peers ship no types)
        """A function of its own for each: some decorators write on what they decorate."""

        async def loader(key: str) -> int:
            return await price(key)

        return loader

    box: cachebox.TTLCache[str, int] = cachebox.TTLCache(1000, HOUR)
    return {
        "`moka-py`, `cached`": moka_py.cached(1000, ttl=HOUR)(new()),
        "`moka-py`, `cached(wait_concurrent=True)`": moka_py.cached(
            1000, ttl=HOUR, wait_concurrent=True
        )(new()),
        "`cachebox`, `cached`": cachebox.cached(box)(new()),
        "`async-lru`, `alru_cache`": async_lru.alru_cache(maxsize=1000, ttl=HOUR)(new()),
        "`theine`, `Memoize`": theine.Memoize(1000, timedelta(hours=1))(new()),
        "`cashews`, `cache` on `mem://`": nuts(ttl=HOUR, key="price:{key}")(new()),
        "`aiocache`, `cached` in memory": aiocache.cached(
            ttl=HOUR, key_builder=lambda _, key: f"price:{key}"
        )(new()),
    }


async def peers(stack: AsyncExitStack, keys: list[str]) -> list[Contender]:
    """Async functions; and two that only block, called as they are."""
    contenders = []
    for name, cached in decorated().items():
        await cached(KEY)
        contenders.append(Contender(name, "await cached(key)", {"cached": cached}, keys))
    region = make_region().configure("dogpile.cache.memory", expiration_time=HOUR)
    region.get_or_create(KEY, lambda: 1)
    disk = diskcache.Cache(stack.enter_context(tempfile.TemporaryDirectory()))
    stack.callback(disk.close)
    disk.set(KEY, 1, expire=HOUR)
    box: cachebox.TTLCache[str, int] = cachebox.TTLCache(1000, HOUR)
    box[KEY] = 1

    async def bare(key: str) -> int | None:
        found: int | None = box.get(key)
        return found

    return [
        *contenders,
        Contender(
            "`dogpile.cache` in memory, `get_or_create`, blocking",
            "region.get_or_create(key, creator)",
            {"region": region, "creator": lambda: 1},
            keys,
        ),
        Contender("`diskcache`, `get`, blocking", "disk.get(key)", {"disk": disk}, keys[:200]),
        Contender(BARE, "await bare(key)", {"bare": bare}, keys),
    ]


async def reads() -> Figures:
    """A hot key from memory: nanoseconds."""
    keys = [KEY] * 5000
    async with AsyncExitStack() as stack:
        contenders = [*await ours(stack, keys), *await peers(stack, keys)]
        return await race_on_loop(contenders, rounds=51)


class Stopwatch:
    """Nanoseconds inside what it wrapped."""

    def __init__(self) -> None:
        self.spent = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):
            return self._around_async(function)

        @wraps(function)
        def timed(*args: object, **kwargs: object) -> object:
            began = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += time.perf_counter_ns() - began

        return timed

    def _around_async(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        async def timed(*args: object, **kwargs: object) -> object:
            began = time.perf_counter_ns()
            try:
                return await function(*args, **kwargs)
            finally:
                self.spent += time.perf_counter_ns() - began

        return timed

    def around_store(self, store: Store) -> None:
        """Right because no step of the memory store lets another task run meanwhile."""
        for name in ("read", "read_now", "acquire", "publish", "renew", "release"):
            setattr(store, name, self.around(getattr(store, name)))


async def cold_batch() -> tuple[int, int, int]:
    """1,000 missing keys: loader calls; nanoseconds of ours; nanoseconds in the store."""
    calls = 0
    store_watch, loader_watch = Stopwatch(), Stopwatch()
    cache = Cache("memory://")
    store_watch.around_store(cache._store)

    async def load(skus: list[str]) -> dict[str, int]:
        nonlocal calls
        calls += 1
        return {sku: len(sku) for sku in skus}

    prices = cache.batched("price", fresh_for=HOUR, max_batch=MAX_BATCH)(loader_watch.around(load))
    async with cache:
        keys = [f"sku-{number}" for number in range(MANY)]
        began = time.perf_counter_ns()
        answers = await prices.get_many(keys)
        whole = time.perf_counter_ns() - began
    if len(answers) != MANY or not all(answer.found for answer in answers.values()):
        raise AssertionError("get_many left keys out")
    return calls, whole - store_watch.spent - loader_watch.spent, store_watch.spent


def cold_batches(rounds: int = 31) -> tuple[int, Figures]:
    """Loader calls, and microseconds a key."""
    gc.collect()
    gc.disable()
    try:
        taken = [asyncio.run(cold_batch()) for _ in range(rounds)]
    finally:
        gc.enable()
    calls, mine, store = (median(column) for column in zip(*taken, strict=True))
    return int(calls), {"our own": mine / MANY / 1000, "in the store": store / MANY / 1000}


def hit_rows(hot: Figures) -> list[Row]:
    unit = hot[UNIT]
    rows = [
        Row("E14", f"{name}, from memory, in awaited empty coroutines", hot[name] / unit, target)
        for name, target in ((GET, 3.3), (WITHIN, 3.3), (CALL, 4), (REPORT, 5))
    ]
    rows.append(Row("E14", f"{PEEK} against {TTL_GET}", hot[PEEK] / hot[TTL_GET], 1.5))
    mine = {UNIT, GET, WITHIN, CALL, REPORT, PEEK, TTL_GET, BARE}
    rows += [
        Row("E14", f"{name}, against {CALL}", nanoseconds / hot[CALL], 1, at_least=True)
        for name, nanoseconds in sorted(hot.items(), key=lambda item: item[1])
        if name not in mine
    ]
    return rows


def batch_rows(calls: int, key: Figures) -> list[Row]:
    fewest = math.ceil(MANY / MAX_BATCH)
    what = f"1,000 missing keys by `get_many`, `max_batch={MAX_BATCH}`"
    return [
        Row("E14", f"{what}: loader calls", calls, fewest, unit="calls"),
        Row(
            "E27",
            f"{what}: our own time a key, the store apart",
            key["our own"],
            7,
            unit="µs",
            tried=tried.COLD_BATCH,
        ),
    ]


def section(progress: Progress) -> Section:
    """Everything E14 promises."""
    progress("reading a hot key through the engine and its peers")
    hot = asyncio.run(reads())
    progress("1,000 missing keys")
    calls, key = cold_batches()
    with tempfile.TemporaryDirectory() as folder:
        rows, figures = sqlite.measured(Path(folder), progress)
        crowd_rows, crowd = crowded(Path(folder), progress)
    return Section(
        "The engine and SQLite (E14, S4)",
        [*hit_rows(hot), *batch_rows(calls, key), *rows, *crowd_rows],
        {
            f"a hot key, in units of {UNIT}": {
                name: nanoseconds / hot[UNIT] for name, nanoseconds in hot.items()
            },
            "a hot key, ns": hot,
            "1,000 missing keys, µs a key": key,
            **figures,
            **crowd,
        },
        notes=(
            "The peers' rows are the same job, an async function cached for an hour and read from "
            "memory, as their documentation writes it; `dogpile.cache` and `diskcache` have no "
            "async call and are called as they are."
        ),
    )
