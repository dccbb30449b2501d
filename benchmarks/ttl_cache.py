"""M11: TtlCache against its peers, and against the same lookup written inline."""

import asyncio
import gc
import random
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

import cachebox
import cachetools
import moka_py
import theine

from benchmarks import tried
from benchmarks.harness import Contender, Figures, Progress, Row, Section, race
from benchmarks.memory import bytes_per_entry
from stillfresh import Sweeper, TtlCache
from stillfresh.testing import ManualClock

__all__ = ["section"]

MANY = 100_000
MILLION = 1_000_000
HOUR = 3600
HOLD = "dropping a million: longest hold of the loop (median of five rounds)"
INLINE = """entry = data.get(key)
        if entry is not None and clock() < entry: entry.value"""


def filled(keys: list[str]) -> dict[str, object]:
    """One cache of each kind with the same keys, filled one after the other."""
    room = 2 * len(keys)
    ours = TtlCache[str, object](HOUR)
    tools: cachetools.TTLCache[str, object] = cachetools.TTLCache(room, HOUR)
    box: cachebox.TTLCache[str, object] = cachebox.TTLCache(room, HOUR)
    moka: moka_py.Moka[str, object] = moka_py.Moka(room, ttl=HOUR)
    wheel: theine.Cache[str, object] = theine.Cache(room)
    fills: dict[str, tuple[object, Callable[[str], object]]] = {
        "TtlCache": (ours, lambda key: ours.insert(key, key)),
        "cachetools": (tools, lambda key: tools.__setitem__(key, key)),
        "cachebox": (box, lambda key: box.insert(key, key)),
        "moka-py": (moka, lambda key: moka.set(key, key)),
        "theine": (wheel, lambda key: wheel.set(key, key, timedelta(hours=1))),
    }
    counting = TtlCache[str, object](HOUR, count_reads=True)
    fills["TtlCache (counting)"] = (counting, lambda key: counting.insert(key, key))
    for _, fill in fills.values():
        for key in keys:
            fill(key)
    return {name: cache for name, (cache, _) in fills.items()}


def reads(caches: dict[str, object], asked: list[str], rounds: int) -> Figures:
    contenders = [
        Contender(name, "cache.get(key)", {"cache": cache}, asked) for name, cache in caches.items()
    ]
    ours = caches["TtlCache"]
    assert isinstance(ours, TtlCache)  # noqa: S101 (narrows the type)
    inside = {"data": ours._data, "clock": time.monotonic}
    contenders += [
        Contender("inline", INLINE, inside, asked),
        Contender("dict.get", "data.get(key)", inside, asked),
    ]
    return race(contenders, rounds=rounds)


INSERTS = {
    "TtlCache": "cache.insert(key, key)",
    "cachetools": "cache[key] = key",
    "cachebox": "cache[key] = key",
    "moka-py": "cache.set(key, key)",
}


def inserts(keys: list[str]) -> Figures:
    """Every key replaces its own earlier entry; there is room for all."""
    caches = filled(keys)
    contenders = [
        Contender(name, statement, {"cache": caches[name]}, keys)
        for name, statement in INSERTS.items()
        if name in caches
    ]
    return race(contenders, rounds=31)


async def longest_hold(work: Callable[[], object]) -> float:
    """Milliseconds that the event loop had to wait at most while `work` ran."""
    longest = 0

    async def breathe() -> None:
        nonlocal longest
        while True:
            before = time.perf_counter_ns()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter_ns() - before)

    breathing = asyncio.create_task(breathe())
    await asyncio.sleep(0)
    result = work()
    if asyncio.iscoroutine(result):
        await result
    await asyncio.sleep(0)
    breathing.cancel()
    await asyncio.wait([breathing])
    return longest / 1e6


def hold_of_ours() -> float:
    clock = ManualClock()
    cache = TtlCache[str, int](1, clock=clock)
    for number in range(MILLION):
        cache.insert(f"key-{number}", number)
    clock.advance(1)
    return asyncio.run(longest_hold(Sweeper(cache, every=1).tick))


def hold_of_cachetools() -> float:
    clock = ManualClock()
    cache: cachetools.TTLCache[str, int] = cachetools.TTLCache(MILLION, 1, timer=clock)
    for number in range(MILLION):
        cache[f"key-{number}"] = number
    clock.advance(1)
    return asyncio.run(longest_hold(cache.expire))


def hold_of_cachebox() -> float:
    ttl = 5.0
    cache: cachebox.TTLCache[str, int] = cachebox.TTLCache(MILLION, ttl)
    for number in range(MILLION):
        cache[f"key-{number}"] = number
    time.sleep(ttl)  # it takes no clock but its own
    return asyncio.run(longest_hold(cache.expire))


HOLDS = {"TtlCache": hold_of_ours, "cachetools": hold_of_cachetools, "cachebox": hold_of_cachebox}


def holds(progress: Progress, rounds: int = 5) -> Figures:
    """The longest hold of each round, and of those the median: a neighbour's pause is not ours."""
    longest: dict[str, list[float]] = {name: [] for name in HOLDS}
    for _ in range(rounds):
        for name, hold in HOLDS.items():
            progress(f"dropping a million expired: {name}")
            longest[name].append(hold())
            gc.collect()
    return {name: median(values) for name, values in longest.items()}


def memory(progress: Progress) -> dict[str, Figures]:
    figures: dict[str, Figures] = {}
    for count in (10_000, MANY, 170_000, 500_000):
        progress(f"memory of {count:,} entries")
        figures[f"{count:,} entries"] = {
            name: bytes_per_entry(name, count) for name in ("stillfresh", "cachetools")
        }
    return figures


def section(progress: Progress) -> Section:
    """Everything M11 promises."""
    keys = [f"key-{number}" for number in range(MANY)]
    absent = [f"absent-{number}" for number in range(20_000)]
    few = filled(keys[:1000])
    full = filled(keys)
    progress("reading a hot key")
    hot = reads(few, keys[:1] * 20_000, rounds=101)
    progress("reading absent keys")
    miss = reads(few, absent, rounds=101)
    same_miss = reads(few, absent[:1] * 20_000, rounds=101)
    progress("reading 100,000 keys")
    many = reads(full, random.Random(1).sample(keys, MANY), rounds=31)
    few.clear()
    full.clear()
    progress("inserting")
    written = inserts(keys[:20_000])
    entry = memory(progress)
    hold = holds(progress)
    return Section(
        "TtlCache (M11)",
        [*speed_rows(hot, many, miss), *size_rows(entry, hold)],
        {
            "a hot key, ns": hot,
            "100,000 keys in random order, ns": many,
            "20,000 absent keys, ns": miss,
            "`insert` over 20,000 keys, ns": written,
            "the same absent key, ns": same_miss,
            **{f"memory, bytes for an entry, {size}": figures for size, figures in entry.items()},
            "dropping a million expired entries, longest hold of the loop, ms": hold,
        },
        notes=(
            "`TtlCache` is swept by a `Sweeper`; `cachetools` and `cachebox` drop in one go "
            "(`expire()`), `moka-py` and `theine` on threads of their own."
        ),
    )


def speed_rows(hot: Figures, many: Figures, miss: Figures) -> list[Row]:
    """Targets against peers; against inline code, a dict and Rust only what was measured."""
    ours = hot["TtlCache"]
    return [
        Row("M11", "hot key, `moka-py` against ours", hot["moka-py"] / ours, 1, at_least=True),
        Row(
            "M11", "hot key, `cachetools` against ours", hot["cachetools"] / ours, 5, at_least=True
        ),
        Row("M11", "hot key, `theine` against ours", hot["theine"] / ours),
        Row("M11", "hot key, ours against `cachebox` (Rust)", ours / hot["cachebox"]),
        Row("M11", "`get` of a hot key, against inline", ours / hot["inline"]),
        Row("M11", "`get` over 100,000 keys, against inline", many["TtlCache"] / many["inline"]),
        Row("M11", "a miss, against `dict.get`", miss["TtlCache"] / miss["dict.get"]),
    ]


def size_rows(entry: dict[str, Figures], hold: Figures) -> list[Row]:
    worst = max(figures["stillfresh"] / figures["cachetools"] for figures in entry.values())
    return [
        Row(
            "M11",
            "memory for an entry, against `cachetools` (worst of four sizes)",
            worst,
            0.65,
            tried=tried.MEMORY_ENTRY,
        ),
        Row("M11", HOLD, hold["TtlCache"], 5, unit="ms"),
    ]
