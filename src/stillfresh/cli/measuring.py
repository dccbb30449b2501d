"""`stillfresh bench`: how fast the stores are on this machine; in a checkout, all of it."""

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Final, TypeAlias
from uuid import uuid4

import click

from stillfresh.cli.places import TEMPORARY, own_file
from stillfresh.cli.program import as_json, command, print_json, print_table, working
from stillfresh.engine import Cache
from stillfresh.errors import ConfigError, without_password
from stillfresh.logs import quietly
from stillfresh.stores import store_for

KIND: Final = "bench"
LASTS: Final = 5.0
"""Seconds for each measurement: seven of them are well within a minute."""
MOST: Final = 200_000
FEWEST: Final = 20
BATCH: Final = 100
"""Ids of one call that loads many."""
SLICE: Final = 500
DEFAULT: Final = ("memory://", TEMPORARY)

Step: TypeAlias = Callable[[str], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Measured:
    """How long one operation of one store took."""

    store: str
    operation: str
    times: int
    median_us: float
    p99_us: float


@command(
    "stillfresh bench",
    "stillfresh bench redis://localhost:6379/0 --seconds 1 --json",
    "stillfresh bench --all",
)
@click.argument("stores", nargs=-1, metavar="[STORE]...")
@click.option(
    "--seconds",
    default=LASTS,
    show_default=True,
    type=click.FloatRange(0, 3600, min_open=True),
    help="Time of each measurement.",
)
@click.option(
    "--all", "is_all", is_flag=True, help="Compare with other libraries, in a clone of stillfresh."
)
@as_json
def bench(*, stores: tuple[str, ...], seconds: float, is_all: bool, is_json: bool) -> None:
    """Measure stillfresh on this machine, in less than a minute.

    Measures hits, reads and misses on each STORE. Without a STORE: in memory, and on SQLite in a
    temporary file. The command deletes what it writes. For a SQLite store it measures a new file in
    the same directory.

    --all compares stillfresh with other libraries, in about 25 minutes. It needs a clone of
    stillfresh, after `make .venv/.bench`.
    """
    if is_all:
        if stores or is_json:
            raise click.UsageError("--all: takes no STORE, and prints tables; leave the rest out.")
        here = Path.cwd()
        if not (here / "benchmarks/__main__.py").exists() or not (here / "src/stillfresh").is_dir():
            raise ConfigError("--all: run it in a clone of stillfresh, beside `benchmarks`")
        sys.exit(subprocess.call([sys.executable, "-m", "benchmarks"], cwd=here))
    with working("Measuring:") as advance:
        results: list[Measured] = []
        for address in stores or DEFAULT:
            results += asyncio.run(_measure(address, seconds, advance))
    if is_json:
        print_json(results)
        return
    head = ("store", "operation", "a second", "median", "p99")
    rows = [
        (
            result.store,
            result.operation,
            f"{1e6 / result.median_us:,.0f}",
            _us(result.median_us),
            _us(result.p99_us),
        )
        for result in results
    ]
    print_table(head, rows, right=head[2:])


def _us(microseconds: float) -> str:
    return f"{microseconds:,.1f} µs" if microseconds < 1000 else f"{microseconds / 1000:,.2f} ms"


async def _measure(address: str, lasts: float, advance: Callable[[int], None]) -> list[Measured]:
    name = "sqlite (temporary file)" if address == TEMPORARY else without_password(address)
    results: list[Measured] = []
    with quietly(logging.CRITICAL), own_file(address, "bench") as place:
        async with _bench(place) as operations:
            for operation, step in operations.items():
                times = await _times_of(step, lasts, advance)
                p99 = quantiles(times, n=100)[98]
                results.append(Measured(name, operation, len(times), median(times), p99))
    return results


@asynccontextmanager
async def _bench(address: str) -> AsyncIterator[dict[str, Step]]:
    """The measured operations, each of one id; their entries are deleted at the end."""
    is_memory = address.startswith("memory:")
    store = store_for(address, time.time)
    ids = [uuid4().hex]
    """The id of the hits, and those of the misses so far."""
    cache = Cache(address if is_memory else store)

    @cache.batched(KIND, fresh_for="1h")
    async def load(keys: list[str]) -> dict[str, int]:
        return dict.fromkeys(keys, 1)

    async def hit(_: str) -> object:
        return await load(ids[0])

    async def miss(id_: str) -> object:
        ids.append(id_)
        return await load(id_)

    async def misses(id_: str) -> object:
        batch = [f"{id_}-{number}" for number in range(BATCH)]
        ids.extend(batch)
        return await load.get_many(batch)

    async def read(_: str) -> object:
        return await store.read(KIND, ids[:1])

    reads: dict[str, Step] = {} if is_memory else {"read of the store": read}
    try:
        await cache.open()
        for step in reads.values():
            await step("")  # raises now if the store is unavailable
        try:
            await load(ids[0])
            many = f"{BATCH} misses in one call"
            yield {"hit": hit, **reads, "miss, loaded and stored": miss, many: misses}
        finally:
            if not is_memory:
                for first in range(0, len(ids), SLICE):
                    await store.delete(KIND, ids[first : first + SLICE])
    finally:
        await cache.close()  # also waits for an opening that was given up


async def _times_of(step: Step, lasts: float, advance: Callable[[int], None]) -> list[float]:
    """Repeat the step for so many seconds; return the microseconds of each call."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < MOST and (time.perf_counter() - began < lasts or len(times) < FEWEST):
        id_ = uuid4().hex
        before = time.perf_counter_ns()
        await step(id_)
        times.append((time.perf_counter_ns() - before) / 1000)
        advance(1)
    return times
