"""S14: writing to a SQLite file beside diskcache: one writer, and one to eight processes.

`python -m benchmarks.sqlite_store PATH WHOSE` is one of these processes: it says `ready`, waits for
a line, puts for a while, and says how often, and its longest wait in milliseconds. `WHOSE` is ours
or diskcache's.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import IO, Any, Final, NamedTuple, cast

import diskcache

from benchmarks import tried
from benchmarks.harness import Contender, Figures, Progress, Row, Section, race_on_loop
from benchmarks.sync import raced
from stillfresh import Cache, SyncCache, SyncResource

__all__ = ["section"]

VALUE: Final = "x" * 200
KEYS: Final = [f"sku-{number}" for number in range(20)]
MANY: Final = [f"many-{number}" for number in range(100)]
SECONDS: Final = 1.5
TURNS: Final = 3
OURS: Final = "stillfresh"
THEIRS: Final = "diskcache"
SYNC_PUT: Final = "`prices.put(key, value)` of a `SyncCache`"
ASYNC_PUT: Final = "`await prices.put(key, value)`"
SET: Final = "`cache.set(key, value)` of diskcache"
ONE: Final = "`prices.get(key)` of a row that is not in memory"
SHARE: Final = "its share of `get_many` of 100 rows"


class Crowd(NamedTuple):
    """What some processes did together."""

    rate: float
    """Puts a second, of all of them."""
    longest: float
    """The longest wait of all, in milliseconds."""


def declared(cache: SyncCache, max_entries: int = 1000) -> SyncResource[str, str]:
    @cache.batched("price", fresh_for=3600, max_entries=max_entries)
    def prices(skus: list[str]) -> dict[str, str]:
        return dict.fromkeys(skus, VALUE)

    return prices


def written(folder: str) -> Figures:
    """Nanoseconds for one write of a thread."""
    with ExitStack() as stack:
        theirs = stack.enter_context(diskcache.Cache(f"{folder}/theirs"))
        prices = declared(stack.enter_context(SyncCache(f"sqlite:///{folder}/ours.db")))
        names = {"prices": prices, "cache": theirs, "value": VALUE}
        contenders = [
            Contender(SYNC_PUT, "prices.put(key, value)", names, KEYS),
            Contender(SET, "cache.set(key, value)", names, KEYS),
        ]
        return raced(contenders)


async def put_on_loop(folder: str) -> Figures:
    """Nanoseconds for one put of a coroutine, beside the same `set`."""
    with diskcache.Cache(f"{folder}/beside") as theirs:
        async with Cache(f"sqlite:///{folder}/loop.db") as cache:

            @cache.batched("price", fresh_for=3600)
            async def prices(skus: list[str]) -> dict[str, str]:
                return dict.fromkeys(skus, VALUE)

            names = {"prices": prices, "cache": theirs, "value": VALUE}
            return await race_on_loop(
                [
                    Contender(ASYNC_PUT, "await prices.put(key, value)", names, KEYS),
                    Contender(SET, "cache.set(key, value)", names, KEYS),
                ]
            )


def read(folder: str) -> Figures:
    """Nanoseconds for one row; memory has room for none of the keys that are asked for next."""
    with SyncCache(f"sqlite:///{folder}/read.db") as cache:
        prices = declared(cache, max_entries=10)
        prices.get_many(MANY)
        names = {"prices": prices, "share": len(MANY)}
        figures = raced(
            [
                Contender(ONE, "prices.get(key)", names, MANY),
                Contender(SHARE, "prices.get_many(key)", names, [MANY] * 3),
            ]
        )
    return {ONE: figures[ONE], SHARE: figures[SHARE] / len(MANY)}


def main(path: str, whose: str) -> None:
    put: Callable[[str], object]
    with ExitStack() as stack:
        if whose == OURS:
            prices = declared(stack.enter_context(SyncCache(f"sqlite:///{path}.db")))

            def put(key: str) -> object:
                return prices.put(key, VALUE)

        else:
            cache: Any = stack.enter_context(diskcache.Cache(path))

            def put(key: str) -> object:
                return cache.set(key, VALUE)

        put("warm")
        print("ready", flush=True)
        sys.stdin.readline()
        longest = 0.0
        number = 0
        deadline = time.monotonic() + SECONDS
        while (began := time.monotonic()) < deadline:
            put(KEYS[number % len(KEYS)])
            longest = max(longest, time.monotonic() - began)
            number += 1
        print(json.dumps([number, 1000 * longest]), flush=True)


def crowd(path: Path, whose: str, processes: int) -> Crowd:
    command = [sys.executable, "-m", "benchmarks.sqlite_store", str(path), whose]
    with ExitStack() as stack:
        writers = []
        for _ in range(processes):
            writer = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            writers.append(stack.enter_context(writer))
            stack.callback(writer.kill)
        for writer in writers:
            cast("IO[str]", writer.stdout).readline()
        for writer in writers:
            cast("IO[str]", writer.stdin).write("go\n")
        ends = [json.loads(cast("IO[str]", writer.stdout).readline()) for writer in writers]
    return Crowd(sum(count for count, _ in ends) / SECONDS, max(longest for _, longest in ends))


def crowded(folder: str, processes: int) -> dict[str, Crowd]:
    """The medians of a few turns each."""
    taken: dict[str, list[Crowd]] = {OURS: [], THEIRS: []}
    for turn in range(TURNS):
        for whose, crowds in taken.items():
            path = Path(folder) / f"{whose}-{processes}-{turn}"
            crowds.append(crowd(path, whose, processes))
    return {
        whose: Crowd(median(each.rate for each in crowds), median(each.longest for each in crowds))
        for whose, crowds in taken.items()
    }


def section(progress: Progress) -> Section:
    with tempfile.TemporaryDirectory() as folder:
        progress("putting into a SQLite file, beside diskcache")
        writes = written(folder)
        on_loop = asyncio.run(put_on_loop(folder))
        progress("reading rows that are not in memory")
        reads = read(folder)
        crowds = {}
        for number in (1, 2, 4, 8):
            progress(f"{number} processes put into one SQLite file")
            crowds[number] = crowded(folder, number)
    rows = [
        Row(
            "S14",
            f"{SYNC_PUT} on SQLite, against {SET}",
            writes[SYNC_PUT] / writes[SET],
            1.5,
            tried=tried.SQLITE_PUT,
        ),
        Row(
            "S14",
            f"{ASYNC_PUT} on SQLite, against {SET}",
            on_loop[ASYNC_PUT] / on_loop[SET],
            1.5,
            tried=tried.SQLITE_PUT,
        ),
        Row(
            "S14",
            f"{ONE}, against {SHARE}",
            reads[ONE] / reads[SHARE],
            1.3,
            tried=tried.SQLITE_ROW,
        ),
    ]
    for number, by_whose in crowds.items():
        ours = by_whose[OURS]
        theirs = by_whose[THEIRS]
        title = f"{number} process{'es' if number > 1 else ''} put into one file"
        rate = ours.rate / theirs.rate
        rows.append(
            Row(
                "S14",
                f"{title}: rate, against diskcache",
                rate,
                0.8,
                at_least=True,
                tried=tried.SQLITE_PUT,
            )
        )
        longest = ours.longest / theirs.longest
        rows.append(
            Row(
                "S14",
                f"{title}: the longest wait, against diskcache",
                longest,
                1.0,
                tried=tried.SQLITE_PUT,
            )
        )
    microseconds = {name: ns / 1000 for name, ns in {**writes, **on_loop, **reads}.items()}
    rates = {
        f"{whose}, {number} processes": each.rate
        for number, by_whose in crowds.items()
        for whose, each in by_whose.items()
    }
    waits = {
        f"{whose}, {number} processes": each.longest
        for number, by_whose in crowds.items()
        for whose, each in by_whose.items()
    }
    return Section(
        "SQLite writers (S14)",
        rows,
        {
            "SQLite, one put or read, µs": microseconds,
            "Puts a second, of all processes": rates,
            "The longest wait of all, ms": waits,
        },
        "Text of 200 bytes. Both write with a log and `synchronous=NORMAL`, one transaction for "
        "each put. Processes put through a `SyncCache`.",
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
