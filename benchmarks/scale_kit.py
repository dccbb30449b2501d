"""What the measurements of scale share: real stores, filled quickly, and what was measured.

A store is filled with copies of one entry, in the server's own language: a million take seconds.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any, cast
from urllib.parse import parse_qs, urlsplit

import apsw
import psycopg

from benchmarks.growth import longest_turn
from benchmarks.harness import Figures
from stillfresh import Cache, Resource
from stillfresh.stores.contract import Store
from stillfresh.stores.redis import RedisStore
from stillfresh.stores.urls import store_for
from tests.kit.servers.cluster import clustered
from tests.kit.servers.postgres import postgres_serving
from tests.kit.servers.valkey import Server, binary_of, serving

__all__ = ["Backend", "Took", "Worker", "backend", "declared", "is_quick", "resident", "sizes"]

VALUE = "x" * 200
MODEL = "model"
SAFE = (
    "fsync=on",
    "full_page_writes=on",
    "synchronous_commit=on",
    "autovacuum_naptime=60s",
    "max_connections=400",
)
TICKS = os.sysconf("SC_CLK_TCK")
FILLED = 20_000
FILL = """
for at = 3, #ARGV do redis.call('SET', ARGV[1] .. ARGV[at], ARGV[2], 'PX', 86400000) end
"""


def is_quick() -> bool:
    return "STILLFRESH_SCALE_QUICK" in os.environ


def sizes(*wanted: int) -> tuple[int, ...]:
    """Of a quick run the first ones: it only shows that everything runs."""
    return wanted[:2] if is_quick() else wanted


@dataclass
class Took:
    """What was measured, by name and size; of several rounds the median, of holds the longest."""

    values: dict[str, dict[int, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def note(self, name: str, series: str, size: int, value: float) -> None:
        self.values[f"{name} | {series}"][size].append(value)

    async def time(
        self, name: str, series: str, size: int, work: Callable[[], Awaitable[object]], of: int = 1
    ) -> None:
        """Microseconds for one of so many."""
        began = time.perf_counter_ns()
        for _ in range(of):
            await work()
        self.note(f"{name}, µs", series, size, (time.perf_counter_ns() - began) / 1000 / of)

    async def hold(
        self, name: str, series: str, size: int, work: Callable[[], Awaitable[object]], of: int = 3
    ) -> None:
        for _ in range(of):
            self.note(f"{name}: hold, ms", series, size, await longest_turn(work()))

    def figures(self) -> dict[str, Figures]:
        return {
            name: {
                str(size): (max if ": hold" in name or "longest" in name else median)(found)
                for size, found in by_size.items()
            }
            for name, by_size in self.values.items()
        }


@dataclass(frozen=True)
class Backend:
    """A server, or none: makes empty stores, fills them, and says what they cost."""

    name: str
    new_url: Callable[[], str]
    fill: Callable[[str, int], Awaitable[float]]
    """With so many entries more; bytes for each of them."""
    pids: Callable[[], list[int]] = list

    async def sent(self, store: Store) -> float:
        """Bytes that a Valkey has sent to its clients so far."""
        if not isinstance(store, RedisStore):
            return 0.0
        servers = await store._opened().servers()
        infos = [(await it.run([("INFO", "stats")]))[0] for it in servers]
        return float(sum(int(it.partition(b"net_output_bytes:")[2].split()[0]) for it in infos))

    def cpu(self) -> float:
        """Seconds that its processes have used."""
        return sum(_cpu(pid) for pid in self.pids())


def _cpu(pid: int) -> float:
    """With its children, which PostgreSQL has one of for each connection."""
    total, below = 0.0, [str(pid)]
    while below:
        own = below.pop()
        try:
            fields = Path(f"/proc/{own}/stat").read_text().rpartition(") ")[2].split()
            below += Path(f"/proc/{own}/task/{own}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ended = int(fields[13]) + int(fields[14]) if own == str(pid) else 0
        total += (int(fields[11]) + int(fields[12]) + ended) / TICKS
    return total


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def backend(name: str) -> Iterator[Backend]:
    with ExitStack() as stack:
        yield MADE[name](name, stack)


def _memory(name: str, _: ExitStack) -> Backend:
    async def fill(_: str, __: int) -> float:
        raise AssertionError("memory is filled through its cache")

    return Backend(name, lambda: "memory://?max_bytes=8GB", fill)


def _sqlite(name: str, stack: ExitStack) -> Backend:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    numbers = iter(range(1000))

    async def fill(url: str, size: int) -> float:
        path = url.removeprefix("sqlite:///")
        before = os.stat(path).st_size  # noqa: PTH116 (nothing else runs on this loop)
        connection = apsw.Connection(path)
        with connection as file:
            for table in ("price_ttl", "price"):
                columns = [row[1] for row in file.execute(f"PRAGMA table_info({table})")][1:]
                file.execute(
                    "WITH RECURSIVE s(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM s WHERE n < ?) "  # noqa: S608 (our own names)
                    f"INSERT INTO {table}(id, {','.join(columns)}) SELECT printf('held-%07d', n), "
                    f"{','.join(f't.{it}' for it in columns)} FROM s, {table} t WHERE t.id = ?",
                    (size - 1, MODEL),
                )
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.close()
        return (os.stat(path).st_size - before) / size  # noqa: PTH116

    return Backend(name, lambda: f"sqlite:///{folder}/{next(numbers)}.db", fill)


def _valkey(name: str, stack: ExitStack) -> Backend:
    """A server for each store: a walk over one passes over all that the server has."""
    binary, servers = binary_of("valkey"), list[Server]()
    assert binary is not None  # noqa: S101 (it comes with a package)

    def new_url() -> str:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers.append(stack.enter_context(serving(binary, folder)))
        return servers[-1].url(timeout="20s")

    def pids() -> list[int]:
        return [it.process.pid for it in servers if it.process is not None]

    return Backend(name, new_url, _fill_redis, pids)


def _cluster(name: str, stack: ExitStack) -> Backend:
    made = stack.enter_context(clustered(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
    numbers = iter(range(1000))

    def pids() -> list[int]:
        return [it.process.pid for it in made.nodes if it.process is not None]

    return Backend(
        name, lambda: f"{made.url}?timeout=20s&prefix=s{next(numbers)}", _fill_redis, pids
    )


async def _fill_redis(url: str, size: int) -> float:
    store = store_for(url, time.time)
    assert isinstance(store, RedisStore)  # noqa: S101 (its address says so)
    await store.open()
    link, (model,) = store._opened(), store._place.of("price", [MODEL])

    async def used() -> int:
        infos = [(await it.run([("INFO", "memory")]))[0] for it in await link.servers()]
        return sum(int(it.partition(b"used_memory:")[2].split()[0]) for it in infos)

    (value,), before = await link.run([("GET", model.key)]), await used()
    for start in range(0, size, FILLED):
        names = [f"held-{number:07}" for number in range(start, min(start + FILLED, size))]
        by_base: dict[bytes, list[bytes]] = defaultdict(list)
        for place in store._place.of("price", names):
            by_base[place.base].append(place.member)
        for base, members in by_base.items():
            await link.run([("EVAL", FILL, 1, base + members[0], base, value, *members)])
    found = await used() - before
    await store.close()
    return found / size


def _postgres(name: str, stack: ExitStack) -> Backend:
    server = stack.enter_context(postgres_serving(*SAFE))

    async def fill(url: str, size: int) -> float:
        schema = parse_qs(urlsplit(url).query)["schema"][0]
        with psycopg.connect(server.address, autocommit=True) as connection:
            rows = connection.execute(
                "SELECT column_name FROM information_schema.columns WHERE table_name = 'entry' "
                "AND table_schema = %s AND column_name <> 'key'",
                (schema,),
            ).fetchall()
            others = ", ".join(row[0] for row in rows)
            table, of = f'"{schema}".entry', f"pg_total_relation_size('\"{schema}\".entry')"
            before = connection.execute(f"SELECT {of}".encode()).fetchone()
            connection.execute(
                f"INSERT INTO {table} (key, {others}) SELECT convert_to('held-' || "  # noqa: S608 (our own names)
                f"to_char(n, 'FM0000000'), 'UTF8'), {others} FROM {table}, "
                f"generate_series(0, {size - 1}) n WHERE key = '{MODEL}'::bytea".encode()
            )
            connection.execute(f"VACUUM ANALYZE {table}".encode())
            after = connection.execute(f"SELECT {of}".encode()).fetchone()
        return float(cast("Any", after)[0] - cast("Any", before)[0]) / size

    def pids() -> list[int]:
        return [server.process.pid] if server.process is not None else []

    return Backend(name, lambda: server.new_store(timeout="20s", max_connections="4"), fill, pids)


MADE: dict[str, Callable[[str, ExitStack], Backend]] = {
    "memory": _memory,
    "SQLite": _sqlite,
    "Valkey": _valkey,
    "Valkey cluster": _cluster,
    "PostgreSQL": _postgres,
}


def declared(
    cache: Cache, most: int, *, memory_for: str = "0s", tag: str = ""
) -> Resource[str, str]:
    """Ten keys have one tag; with `tag`, all have that one."""

    @cache.batched(
        "price",
        fresh_for="1d",
        memory_for=memory_for,
        max_batch=500,
        max_entries=most,
        tags=lambda sku: [tag or sku[:-1]],
    )
    async def prices(skus: list[str]) -> dict[str, str]:
        return dict.fromkeys(skus, VALUE)

    return prices


class Worker:
    """`benchmarks.scale_worker` in a process of its own."""

    def __init__(self, stack: ExitStack, mode: str, url: str) -> None:
        command = [sys.executable, "-m", "benchmarks.scale_worker", mode, url]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self._process = stack.enter_context(process)
        stack.callback(process.kill)

    def go(self) -> None:
        cast("IO[str]", self._process.stdin).write("go\n")

    def said(self) -> Any:  # noqa: ANN401 (what it has measured)
        return json.loads(cast("IO[str]", self._process.stdout).readline())

    async def heard(self) -> Any:  # noqa: ANN401
        return await asyncio.to_thread(self.said)
