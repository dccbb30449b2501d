"""One of several processes on one table, spoken to through a pipe (S7, E5)."""

import asyncio
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stillfresh import Cache, Policy
from stillfresh.clock import wall
from stillfresh.stores import aws
from stillfresh.stores.contract import Ask, Copy, Lease, Put, PutOutcome, Record, Store
from stillfresh.stores.urls import store_for
from tests.kit.servers.aws import ENVIRONMENT

KIND = "post"
PAUSE = 0.05
MOST_PUTS = 1_000
"""How often a put is put again because the store answers AGAIN."""


def copy_by(lease: Lease, times: int = 1) -> Copy:
    """Its value says its generation: a mix of two copies would show."""
    return Copy(lease.token, time.time(), Policy(3600), lease.token.encode() * times)


async def heard(line: Connection) -> Any:
    """Without holding up the loop, on which connections are closed."""
    return await asyncio.get_running_loop().run_in_executor(None, line.recv)


async def seen_by(store: Store, key: str) -> str | None:
    copy = (await store.read(KIND, [key])).get(key, Record()).copy
    return None if copy is None else copy.generation


async def lease_of(store: Store, key: str, lease_for: float) -> Lease | None:
    seen = await seen_by(store, key)
    grant = (await store.acquire(KIND, [Ask(key, seen)], lease_for))[key]
    return grant if isinstance(grant, Lease) else None


async def contend(line: Connection, store: Store, contenders: int) -> None:
    """For each key told: so many tasks want it; how many of them loaded it."""
    line.send("ready")
    while key := await heard(line):
        loads = await asyncio.gather(*(want(store, key) for _ in range(contenders)))
        line.send(sum(loads))


async def want(store: Store, key: str) -> int:
    """Reads first and asks then, however late: only the second look keeps it from loading again."""
    while await seen_by(store, key) is None:
        grant = (await store.acquire(KIND, [Ask(key)], 30))[key]
        if isinstance(grant, Lease):
            assert await store.publish(KIND, {key: (grant, copy_by(grant))}) == set()
            return 1
        await asyncio.sleep(PAUSE)
    return 0


async def hold(line: Connection, store: Store, key: str, lease_for: float) -> None:
    """Leases the key; publishes when told; whether that was superseded."""
    lease = await lease_of(store, key, lease_for)
    assert lease is not None
    line.send(lease.expires_at)
    await heard(line)
    line.send(await store.publish(KIND, {key: (lease, copy_by(lease))}) == {key})


async def publish_for_ever(line: Connection, store: Store, key: str) -> None:
    """Values of some size, until killed."""
    while True:
        lease = await lease_of(store, key, 1)
        if lease is None:
            await asyncio.sleep(PAUSE)
        elif not await store.publish(KIND, {key: (lease, copy_by(lease, 3_000))}):
            line.send("published")


async def put(line: Connection, store: Store, writer: int) -> None:
    """For each key and round told: one put; what came of it, and after how many calls."""
    line.send("ready")
    while order := await heard(line):
        key, turn = order
        value = f"{writer} of {turn}".encode()
        known = Put(Copy(store.new_generation(), time.time(), Policy(3600), value), ("eu",))
        for calls in range(1, MOST_PUTS):
            outcome = (await store.put(KIND, {key: known}))[key].outcome
            if outcome is not PutOutcome.AGAIN:
                line.send((outcome.value, calls))
                break


async def serve(line: Connection, store: Store, log: Path, fresh_for: float) -> None:
    """The engine: one answer for each key told; every load adds a line to the log."""
    cache = Cache(store)

    @cache.batched(KIND, fresh_for=fresh_for, stale_for=60, error_for=60, lease_for="30s")
    async def posts(ids: list[str]) -> dict[str, int]:
        with log.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        await asyncio.sleep(0.1)
        return dict.fromkeys(ids, os.getpid())

    async with cache:
        line.send("ready")
        while key := await heard(line):
            answer = await posts.get(key)
            line.send((answer.value, str(answer.verdict)))


async def working(line: Connection, command: str, address: str, arguments: tuple[Any, ...]) -> None:
    store = store_for(address, wall)
    await store.open()
    commands = (contend, hold, publish_for_ever, put, serve)
    await {each.__name__: each for each in commands}[command](line, store, *arguments)
    await store.close()


def main(line: Connection, command: str, address: str, *arguments: Any) -> None:
    # The server of forks may have begun before the environment of the tests was set.
    os.environ.update(ENVIRONMENT)
    for name in ("PATIENCE", "CONNECT_TIMEOUT", "READ_TIMEOUT"):  # busy is not unavailable
        setattr(aws, name, 30.0)
    asyncio.run(working(line, command, address, arguments))
