"""E14: the SQLite store against the bare statements, prepared, of the same queries."""

import asyncio
import gc
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import apsw

from benchmarks import tried
from benchmarks.harness import Contender, Figures, Progress, Row, race_on_loop
from stillfresh import Cache, Policy
from stillfresh.stores.contract import Ask, Copy, Lease, Store
from stillfresh.stores.urls import store_for

__all__ = ["measured"]

KIND = "price"
KEY = "sku-1"
COPIES = 100
READ, BARE_READ = "`await prices.get(key)` through SQLite", "the bare prepared statement"
STORE_READ = "`read_now` of the store alone"
CACHED = "`await report(key)` of `cached` through SQLite"
BATCHED = "`await prices(key)` of `batched` through SQLite"
PUBLISH, BARE_PUBLISH = "`publish` of 100 copies", "the bare grouped insert"


@contextmanager
def traced() -> Iterator[list[tuple[str, Any]]]:
    """Statements and bindings of all connections that are opened inside, while inside."""
    statements: list[tuple[str, Any]] = []
    connections: list[apsw.Connection] = []

    def note(_cursor: object, sql: str, bindings: object) -> bool:
        statements.append((sql, bindings))
        return True

    def hook(connection: apsw.Connection) -> None:
        connection.set_exec_trace(note)
        connections.append(connection)

    apsw.connection_hooks.append(hook)
    try:
        yield statements
    finally:
        apsw.connection_hooks.remove(hook)
        for connection in connections:
            connection.set_exec_trace(None)


def bare(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    connection.execute("PRAGMA journal_mode=WAL").fetchall()
    connection.execute("PRAGMA synchronous=NORMAL").fetchall()
    return connection


async def reads(path: Path) -> Figures:
    """One key, in the store and in memory: the row is read, the value need not be decoded."""
    with traced() as statements:
        cache = Cache(f"sqlite:///{path}")
        store: Any = cache._store

        @cache.batched(KIND, fresh_for=3600)
        async def prices(skus: list[str]) -> dict[str, str]:
            return {sku: sku * 20 for sku in skus}

        @cache.cached("report", fresh_for=3600)
        async def report(sku: str) -> str:
            return sku * 20

        await report(KEY)
        await prices.get(KEY)
        generation = store.read_now(KIND, [KEY])[KEY].copy.generation
        statements.clear()
        await prices.get(KEY)
        (sql, bindings), *more = statements
    if more:
        raise AssertionError(f"a read took {1 + len(more)} statements")
    cursor = bare(path).cursor()
    keys = [KEY] * 1000
    contenders = [
        Contender(READ, "await prices.get(key)", {"prices": prices}, keys),
        Contender(BATCHED, "await prices(key)", {"prices": prices}, keys),
        Contender(CACHED, "await report(key)", {"report": report}, keys),
        Contender(
            STORE_READ,
            "store.read_now(kind, [key], known)",
            {"store": store, "kind": KIND, "known": {KEY: generation}},
            keys,
        ),
        Contender(
            BARE_READ,
            "execute(sql, bindings).get",
            {"execute": cursor.execute, "sql": sql, "bindings": bindings},
            keys,
        ),
    ]
    figures = await race_on_loop(contenders, rounds=51)
    cursor.connection.close()
    await cache.close()
    return figures


class Inserts:
    """The rows that a store wrote, into tables like its own in another file."""

    def __init__(self, theirs: apsw.Connection, path: Path) -> None:
        self._theirs = theirs
        self._mine = bare(path)
        self._tables = [KIND, f"{KIND}_ttl"]
        made = "SELECT sql FROM sqlite_master WHERE tbl_name IN (?, ?) AND sql IS NOT NULL"
        for (sql,) in theirs.execute(made, self._tables).fetchall():
            self._mine.execute(str(sql))

    def again(self, like: str) -> float:
        """Microseconds for one transaction of the rows whose id is like that."""
        rows = {
            table: self._theirs.execute(f"SELECT * FROM {table} WHERE id LIKE ?", [like]).fetchall()  # noqa: S608
            for table in self._tables
        }
        inserts = {
            f"INSERT INTO {table} VALUES ({', '.join('?' * len(found[0]))})": found  # noqa: S608
            for table, found in rows.items()
        }
        began = time.perf_counter_ns()
        self._mine.execute("BEGIN IMMEDIATE")
        for sql, found in inserts.items():
            self._mine.executemany(sql, found)
        self._mine.execute("COMMIT")
        return (time.perf_counter_ns() - began) / 1000

    def close(self) -> None:
        self._theirs.close()
        self._mine.close()


async def publishes(folder: Path, rounds: int = 51) -> Figures:
    """New ids in every round; leases are taken outside the measured time."""
    store = store_for(f"sqlite:///{folder}/published.db", time.time)
    await store.open()
    times: dict[str, list[float]] = {PUBLISH: [], BARE_PUBLISH: []}
    await published(store, "first")
    inserts = Inserts(bare(folder / "published.db"), folder / "bare.db")
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            times[PUBLISH].append(await published(store, f"round-{number}"))
            times[BARE_PUBLISH].append(inserts.again(f"round-{number}-%"))
    finally:
        gc.enable()
    inserts.close()
    await store.close()
    return {name: median(values) for name, values in times.items()}


async def published(store: Store, prefix: str) -> float:
    """Microseconds for publishing 100 new copies."""
    ids = [f"{prefix}-{number}" for number in range(COPIES)]
    random.Random(prefix).shuffle(ids)
    grants = await store.acquire(KIND, [Ask(id_) for id_ in ids], 60.0)
    policy = Policy(fresh_for=3600)
    copies: dict[str, tuple[Lease, Copy]] = {
        id_: (lease, Copy(lease.token, time.time(), policy, id_.encode() * 10))
        for id_, lease in grants.items()
        if isinstance(lease, Lease)
    }
    began = time.perf_counter_ns()
    superseded = await store.publish(KIND, copies)
    elapsed = (time.perf_counter_ns() - began) / 1000
    if superseded:
        raise AssertionError(f"superseded: {superseded}")
    return elapsed


def measured(folder: Path, progress: Progress) -> tuple[list[Row], dict[str, Figures]]:
    """The rows, and the figures behind them."""
    progress("reading through SQLite")
    read = asyncio.run(reads(folder / "read.db"))
    progress("publishing to SQLite")
    write = asyncio.run(publishes(folder))
    rows = [
        Row(
            "E14",
            f"{READ}, against {BARE_READ}",
            read[READ] / read[BARE_READ],
            2,
            tried=tried.SQLITE_READ,
        ),
        Row(
            "E39",
            f"{CACHED}, against {BATCHED}",
            read[CACHED] / read[BATCHED],
            1.2,
            tried=tried.SQLITE_CACHED,
        ),
        Row(
            "E14",
            f"{PUBLISH}, against {BARE_PUBLISH}",
            write[PUBLISH] / write[BARE_PUBLISH],
            2,
            tried=tried.PUBLISH,
        ),
    ]
    return rows, {"SQLite, one row, ns": read, "SQLite, 100 copies, µs": write}
