"""S11: reads, publications and leases through PostgreSQL, beside bare statements and our Redis.

`python -m benchmarks.postgres_store URL` is one of several processes that load: it says `ready`,
waits for a line, leases and publishes keys of its own for a while, and says how many.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from typing import IO, cast

from psycopg import AsyncConnection

from benchmarks import tried
from benchmarks.harness import Contender, Figures, Progress, Row, Section, race_on_loop
from benchmarks.redis_store import MEMORY, pushed
from benchmarks.redis_store import server as valkey
from stillfresh import Cache, Policy
from stillfresh.integrations.postgres import OutboxConsumer, create_outbox
from stillfresh.stores.contract import Ask, Copy, Lease, Store
from stillfresh.stores.postgres import create
from stillfresh.stores.urls import store_for
from tests.kit.servers.postgres import PostgresServer, postgres_serving

__all__ = ["section"]

SAFE = ("fsync=on", "full_page_writes=on", "synchronous_commit=on")
"""As a database is run; the tests' servers are not."""
KIND = "price"
KEY = "sku-1"
MANY = [f"sku-{number}" for number in range(100)]
VALUE = "x" * 200
SECONDS = 2.0
HIT, BARE_HIT = "`await prices.get(key)` through PostgreSQL", "a bare `SELECT` of one row"
BATCH, BARE_BATCH = "`get_many` of 100 keys", "a bare `SELECT` of 100 rows"
PUBLISH, BARE_PUBLISH = "`acquire` and `publish` of 100 keys", "two bare upserts of 100 rows"
LEASE, BARE_LEASE = "`acquire` and `release`", "a bare `INSERT` and `DELETE`"
WITHIN = "`await prices.get(key)` within `memory_for`"
PLAIN, MAPPED = "UPDATE of one row", "UPDATE of one row of a mapped table"
DELIVERED = "the same, until its tag is invalidated"
PUT, BARE_PUT = "`await prices.put(key, value)` through PostgreSQL", "a bare upsert of one row"
GONE, BARE_GONE = "`await prices.delete(key)` of a missing key", "a bare `DELETE` of a missing row"
REDIS = "the same on our Redis store"
TABLE = "CREATE TABLE bare (id text PRIMARY KEY, token text, value bytea)"
ONE = "SELECT value FROM bare WHERE id = %s"
SOME = "SELECT id, value FROM bare WHERE id = ANY (%s)"
UPSERT = """INSERT INTO bare SELECT id, %s, %s FROM unnest(%s::text[]) id
    ON CONFLICT (id) DO UPDATE SET token = excluded.token, value = excluded.value"""
UPSERT_ONE = """INSERT INTO bare VALUES (%s, 'token', %s)
    ON CONFLICT (id) DO UPDATE SET token = excluded.token, value = excluded.value"""
INSERT = "INSERT INTO bare VALUES (%s, 'token') ON CONFLICT DO NOTHING"


async def loaded(store: Store, ids: Sequence[str], seen: dict[str, str]) -> None:
    """One load of each: leased and published."""
    asks = [Ask(id_, seen.get(id_)) for id_ in ids]
    grants = await store.acquire(KIND, asks, 30)
    leases = [it for it in grants.values() if isinstance(it, Lease)]
    now = time.time()
    copies = {it.id: (it, Copy(it.token, now, Policy(3600), VALUE.encode())) for it in leases}
    if len(leases) < len(ids) or await store.publish(KIND, copies):
        raise AssertionError("a lease was denied")
    seen.update({it.id: it.token for it in leases})


async def leased(store: Store) -> None:
    lease = (await store.acquire(KIND, [Ask("lock")], 30))["lock"]
    if not isinstance(lease, Lease):
        raise AssertionError(lease)  # noqa: TRY004 (a broken store, not a wrong type)
    await store.release(KIND, [lease])


async def measured(address: str, url: str, redis: str, rounds: int) -> Figures:
    """Nanoseconds for one of each."""
    bare = await AsyncConnection.connect(address, autocommit=True)
    await bare.execute(TABLE)
    await bare.execute(UPSERT, ("token", VALUE.encode(), MANY))

    async def fetched(statement: str, key: object) -> None:
        await (await bare.execute(statement.encode(), (key,))).fetchall()

    async def upserts(ids: list[str]) -> None:
        for _ in range(2):
            await bare.execute(UPSERT, ("token", VALUE.encode(), ids))

    async def locked(id_: str) -> None:
        await bare.execute(INSERT, (id_,))
        await bare.execute("DELETE FROM bare WHERE id = %s", (id_,))

    async def upserted(id_: str) -> None:
        await bare.execute(UPSERT_ONE, (id_, VALUE.encode()))

    async def deleted(id_: str) -> None:
        await bare.execute("DELETE FROM bare WHERE id = %s", (id_,))

    steps = {"fetched": fetched, "upserts": upserts, "locked": locked, "ONE": ONE, "SOME": SOME}
    steps |= {"upserted": upserted, "deleted": deleted}
    contenders = [
        Contender(BARE_HIT, "await fetched(ONE, key)", steps, [KEY] * 50),
        Contender(BARE_PUT, "await upserted(key)", steps, [KEY] * 30),
        Contender(BARE_GONE, "await deleted(key)", steps, ["none"] * 30),
        Contender(BARE_BATCH, "await fetched(SOME, key)", steps, [MANY] * 5),
        Contender(BARE_PUBLISH, "await upserts(key)", steps, [MANY] * 3),
        Contender(BARE_LEASE, "await locked(key)", steps, ["lock"] * 20),
    ]
    caches, stores = [Cache(url), Cache(redis)], [store_for(it, time.time) for it in (url, redis)]
    for mark, cache, store in zip(("", f", {REDIS}"), caches, stores, strict=True):

        @cache.batched(KIND, fresh_for=3600)
        async def prices(skus: list[str]) -> dict[str, str]:
            return dict.fromkeys(skus, VALUE)

        await prices.get_many(MANY)
        await store.open()
        names: dict[str, object] = {
            "prices": prices,
            "store": store,
            "seen": {},
            "loaded": loaded,
            "leased": leased,
        }
        names["value"] = VALUE
        fresh = [f"load-{number}" for number in range(100)]
        contenders += [
            Contender(HIT + mark, "await prices.get(key)", names, [KEY] * 50),
            Contender(PUT + mark, "await prices.put(key, value)", names, [KEY] * 30),
            Contender(GONE + mark, "await prices.delete(key)", names, ["none"] * 30),
            Contender(BATCH + mark, "await prices.get_many(key)", names, [MANY] * 5),
            Contender(PUBLISH + mark, "await loaded(store, key, seen)", names, [fresh] * 3),
            Contender(LEASE + mark, "await leased(store)", names, ["lock"] * 20),
        ]
    figures = await race_on_loop(contenders, rounds=rounds)
    for cache, store in zip(caches, stores, strict=True):
        await cache.close()
        await store.close()
    await bare.close()
    return figures


async def load_for_a_while(url: str) -> None:
    store, numbers, seen = store_for(url, time.time), count(), dict[str, str]()
    await store.open()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    name, deadline = time.monotonic_ns(), time.monotonic() + SECONDS

    async def loads() -> None:
        while time.monotonic() < deadline:
            await loaded(store, [f"{name}-{next(numbers)}"], seen)

    await asyncio.gather(*(loads() for _ in range(4)))
    print(len(seen), flush=True)
    await store.close()


def crowd(url: str, processes: int) -> float:
    """Loads a second, of all of them; each has four under way."""
    command = [sys.executable, "-m", "benchmarks.postgres_store", url]
    with ExitStack() as stack:
        crowd = []
        for _ in range(processes):
            pipe = subprocess.PIPE
            it = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
            crowd.append(stack.enter_context(it))
            stack.callback(it.kill)
        for it in crowd:
            cast("IO[str]", it.stdout).readline()
        for it in crowd:
            cast("IO[str]", it.stdin).write("go\n")
        return sum(int(cast("IO[str]", it.stdout).readline()) for it in crowd) / SECONDS


async def changed(address: str) -> Figures:
    """An UPDATE of one row, without and with tags, and until its tag is invalidated (E8)."""
    async with await AsyncConnection.connect(address, autocommit=True) as bare:
        for table in ("plain", "mapped"):
            await bare.execute(f"CREATE TABLE {table} AS SELECT 1 AS id, 0 AS n".encode())
        await create_outbox(address, {"mapped": "row:{id}"})
        async with Cache("memory://") as cache, OutboxConsumer(cache, address, "bench") as outbox:

            async def delivered(statement: str) -> None:
                await bare.execute(statement.encode())
                await outbox.caught_up()

            plain, mapped = (f"UPDATE {it} SET n = n + 1" for it in ("plain", "mapped"))  # noqa: S608
            names: dict[str, object] = {"execute": bare.execute, "delivered": delivered}
            contenders = [
                Contender(PLAIN, "await execute(key)", names, [plain] * 20),
                Contender(MAPPED, "await execute(key)", names, [mapped] * 20),
                Contender(DELIVERED, "await delivered(key)", names, [mapped] * 5),
            ]
            return await race_on_loop(contenders, rounds=15)


def crowds(server: PostgresServer, redis: str) -> Figures:
    silent, unlogged = (server.new_store(timeout="10s", max_connections="4") for _ in range(2))
    asyncio.run(create(silent, pushes=False))
    asyncio.run(create(unlogged, unlogged=True))
    stores = {
        "PostgreSQL": server.new_store(timeout="10s", max_connections="4"),
        "PostgreSQL, --no-push": silent,
        "PostgreSQL, --unlogged": unlogged,
        "our Redis store": f"{redis}?prefix=crowd&timeout=10s",
    }
    return {
        f"{name}, {number} process{'es' if number > 1 else ''}": crowd(url, number)
        for number in (1, 4, 16)
        for name, url in stores.items()
    }


def section(progress: Progress) -> Section:
    """Rows of batches and leases have no target: a round trip is what a round trip costs."""
    with postgres_serving(*SAFE) as server, valkey() as port:
        redis = f"redis://127.0.0.1:{port}/0"
        progress("reading, publishing and leasing through PostgreSQL")
        figures = asyncio.run(measured(server.address, server.new_store(), redis, rounds=15))
        hits = asyncio.run(pushed(WITHIN, server.new_store(), rounds=21))
        changes = asyncio.run(changed(server.new_database()))
        progress("1 to 16 processes that load through PostgreSQL")
        rates = crowds(server, redis)
    pairs = [
        (HIT, BARE_HIT),
        (PUT, BARE_PUT),
        (GONE, BARE_GONE),
        (BATCH, BARE_BATCH),
        (PUBLISH, BARE_PUBLISH),
        (LEASE, BARE_LEASE),
    ]
    targets = [(HIT, BARE_HIT, 1.6), (PUT, BARE_PUT, 2.0), (GONE, BARE_GONE, 1.5)]
    rows = [
        Row(
            "S14",
            f"{ours}, against {bare}",
            figures[ours] / figures[bare],
            target,
            tried=tried.POSTGRES_PUT,
        )
        for ours, bare, target in targets
    ]
    rows += [
        Row("S11", f"{ours}, against {other}", figures[ours] / figures[other])
        for ours, bare in pairs
        for other in (bare, f"{ours}, {REDIS}")
    ]
    rows.append(Row("E8", f"{MAPPED}, against {PLAIN}", changes[MAPPED] / changes[PLAIN]))
    within_row = Row("E27", f"{WITHIN}, against {MEMORY}", hits[WITHIN] / hits[MEMORY], 1.2)
    return Section(
        "PostgreSQL (S11)",
        [*rows, within_row],
        {
            "PostgreSQL on the loopback, µs": {
                name: it / 1000 for name, it in {**figures, **changes}.items()
            },
            "Loads (a lease and a publication) a second": rates,
        },
        "The server writes to the disk before it answers (`fsync`, `synchronous_commit`). A read "
        "asks it, as it must without `memory_for`; a value that memory has is not sent again.",
    )


if __name__ == "__main__":
    asyncio.run(load_for_a_while(sys.argv[1]))
