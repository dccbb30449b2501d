"""E20: what a read costs in a thread, against `TtlCache.get`; and a call of the loop thread."""

import gc
import importlib
import random
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import count
from statistics import median

from benchmarks import tried
from benchmarks.harness import Contender, Figures, Progress, Row, Section
from benchmarks.redis_store import server
from stillfresh import SyncCache, SyncResource, TtlCache

__all__ = ["section"]

HOUR = 3600
KEY = "sku-1"
ROUNDS = 51
UNIT = "`TtlCache.get(key)`"
CALL, GET, REPORT = "`prices(key)`", "`prices.get(key)`", '`report(2026, "eu")`'
WITHIN = "`prices.get(key)` on SQLite within `memory_for`"
SQLITE, KNOWN = "`prices(key)` on SQLite", "`prices.known([key])` on SQLite"
REDIS_GET, BARE_GET = "`prices.get(key)` on Redis", "`client.get(key)` of redis-py"
REDIS_PUT, BARE_SET = "`prices.put(key, value)` on Redis", "`client.set(key, value)` of redis-py"
MISS = "`prices(key)` of a cold key on `memory://`"
DOGPILE = "`get_or_create` of a cold key in dogpile.cache"
REDIS_MISS = "`prices(key)` of a cold key on Redis"
REDIS_DOGPILE = "`get_or_create` in dogpile.cache on Redis, with its lock"
HOP, LOAD = "a call of the loop thread", "`prices.refresh(key)`, loaded in the calling thread"


def raced(contenders: Iterable[Contender], rounds: int = ROUNDS) -> Figures:
    """As `harness.race`, without an event loop: a SyncCache would refuse to wait there."""
    loops = [(it.name, it.compiled()) for it in contenders]
    times: dict[str, list[float]] = {name: [] for name, _ in loops}
    dice = random.Random(1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            dice.shuffle(loops)
            for name, loop in loops:
                if isinstance(elapsed := loop(), float):
                    times[name].append(elapsed)
    finally:
        gc.enable()
    return {name: median(values) for name, values in times.items()}


def declared(stack: ExitStack, url: str, memory_for: int = 0) -> SyncResource[str, int]:
    cache = stack.enter_context(SyncCache(url))

    @cache.batched("price", fresh_for=HOUR, memory_for=memory_for)
    def prices(skus: list[str]) -> dict[str, int]:
        return {sku: len(sku) for sku in skus}

    prices(KEY)
    return prices


def hot(stack: ExitStack, folder: str) -> list[Contender]:
    """What is answered in the calling thread."""
    keys, memory = [KEY] * 2_000, declared(stack, "memory://")
    report = stack.enter_context(SyncCache("memory://")).cached("report", fresh_for=HOUR)(told)
    report(2026, "eu")
    held = TtlCache[str, int](HOUR)
    held.insert(KEY, 1)
    within = declared(stack, f"sqlite:///{folder}/within.db", HOUR)
    sqlite = declared(stack, f"sqlite:///{folder}/read.db")
    return [
        Contender(UNIT, "held.get(key)", {"held": held}, keys),
        Contender(CALL, "prices(key)", {"prices": memory}, keys),
        Contender(GET, "prices.get(key)", {"prices": memory}, keys),
        Contender(REPORT, 'report(2026, "eu")', {"report": report}, keys),
        Contender(WITHIN, "prices.get(key)", {"prices": within}, keys),
        Contender(SQLITE, "prices(key)", {"prices": sqlite}, keys),
        Contender(KNOWN, "prices.known([key])", {"prices": sqlite}, keys),
    ]


def told(year: int, region: str = "eu") -> str:
    return f"{region} {year}"


async def nothing() -> None:
    """A call of the loop thread that does nothing there."""


def called(stack: ExitStack) -> list[Contender]:
    """A switch to the loop thread and back, and a load."""
    keys, prices = [KEY] * 100, declared(stack, "memory://")
    cache = stack.enter_context(SyncCache("memory://"))
    return [
        Contender(HOP, "cache.run(nothing)", {"cache": cache, "nothing": nothing}, keys),
        Contender(LOAD, "prices.refresh(key)", {"prices": prices}, keys),
    ]


def on_redis(stack: ExitStack, port: int) -> list[Contender]:
    """What a thread asks of a Redis server, against redis-py on the same one."""
    client = importlib.import_module("redis").Redis(port=port)
    stack.callback(client.close)
    prices = declared(stack, f"redis://127.0.0.1:{port}/0")
    client.set(KEY, "1")
    region = importlib.import_module("dogpile.cache").make_region()
    locks = {"port": port, "distributed_lock": True, "thread_local_lock": False}
    region.configure("dogpile.cache.redis", expiration_time=HOUR, arguments=locks)
    names = {"prices": prices, "client": client, "region": region, "numbers": count()}
    keys = [KEY] * 100
    return [
        Contender(REDIS_GET, "prices.get(key)", names, keys),
        Contender(BARE_GET, "client.get(key)", names, keys),
        Contender(REDIS_PUT, "prices.put(key, 1)", names, keys),
        Contender(BARE_SET, "client.set(key, 1)", names, keys),
        Contender(REDIS_MISS, "prices(f'cold-{next(numbers)}')", names, keys[:20]),
        Contender(
            REDIS_DOGPILE,
            "region.get_or_create(f'cold-{next(numbers)}', lambda: 5)",
            names,
            keys[:20],
        ),
    ]


def missing(stack: ExitStack) -> list[Contender]:
    """A cold key with a cheap loader, against dogpile.cache in memory; CPU of all threads."""
    region = importlib.import_module("dogpile.cache").make_region()
    region.configure("dogpile.cache.memory", expiration_time=HOUR)
    prices = declared(stack, "memory://")
    names = {"prices": prices, "region": region, "numbers": count(), "made": lambda: 5}
    names["perf_counter_ns"] = time.process_time_ns  # what the compiled loop calls
    keys = [KEY] * 100
    return [
        Contender(MISS, "prices(f'cold-{next(numbers)}')", names, keys),
        Contender(DOGPILE, "region.get_or_create(f'cold-{next(numbers)}', made)", names, keys),
    ]


def section(progress: Progress) -> Section:
    """Everything E20 promises of speed."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        progress("reading a hot key in a thread")
        figures = raced(hot(stack, folder))
        progress("calling the loop thread")
        hops = raced(called(stack))
        progress("reading and writing Redis in a thread")
        asked = raced(on_redis(stack, stack.enter_context(server())))
        progress("a miss in a thread")
        missed = raced(missing(stack))
    unit = figures[UNIT]
    rows = [
        Row("E20", f"{what}, against {UNIT}", figures[what] / unit, 3)
        for what in (CALL, GET, REPORT, WITHIN)
    ]
    rows.append(
        Row("E20", f"{HOP}, against {SQLITE}", hops[HOP] / figures[SQLITE], 1, at_least=True)
    )
    rows += [
        Row("S14", f"{REDIS_GET}, against {BARE_GET}", asked[REDIS_GET] / asked[BARE_GET], 1.4),
        Row(
            "S14",
            f"{REDIS_PUT}, against {BARE_SET}",
            asked[REDIS_PUT] / asked[BARE_SET],
            1.7,
            tried=tried.SYNC_PUT,
        ),
        Row(
            "E39",
            f"{MISS}, against {DOGPILE}",
            missed[MISS] / missed[DOGPILE],
            2.0,
            tried=tried.SYNC_MISS,
        ),
        Row(
            "E39",
            f"{REDIS_MISS}, against {REDIS_DOGPILE}",
            asked[REDIS_MISS] / asked[REDIS_DOGPILE],
            2.0,
        ),
    ]
    all_figures = figures | hops | asked | missed
    microseconds = {name: nanoseconds / 1000 for name, nanoseconds in all_figures.items()}
    return Section("Threads (E20)", rows, {"a read in a thread, µs": microseconds})
