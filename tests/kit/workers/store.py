"""One of several processes on one store, told by stdin, telling by stdout (S7)."""

import asyncio
import json
import logging
import random
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack

from stillfresh import Cache, LoadFailed, Policy, RetryAfter, StoreError
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Lease,
    Put,
    PutOutcome,
    PutResult,
    Record,
    Store,
)
from stillfresh.stores.urls import store_for

POLICY = Policy(3_600)
KIND = "post"


def tell(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def told() -> str:
    return sys.stdin.readline().strip()


def copy_by(lease: Lease, times: int = 1) -> Copy:
    """Its value says its generation: a mix of two copies would show."""
    return Copy(lease.token, time.time(), POLICY, lease.token.encode() * times)


def generation(record: Record) -> str | None:
    if record.copy is None:
        return None
    assert isinstance(record.copy.value, bytes)
    token = record.copy.generation.encode()
    assert record.copy.value == token * (len(record.copy.value) // len(token))
    return record.copy.generation


async def record_of(store: Store, key: str) -> Record:
    return (await store.read(KIND, [key])).get(key, Record())


async def lease_of(store: Store, key: str, lease_for: float) -> Lease | None:
    seen = generation(await record_of(store, key))
    grant = (await store.acquire(KIND, [Ask(key, seen)], lease_for))[key]
    return grant if isinstance(grant, Lease) else None


async def hammer(store: Store, seconds: str, seed: str) -> None:
    """When told, four tasks that read, lease, publish and invalidate; what was done, and when."""
    tell("ready")
    told()
    dice = random.Random(seed)
    until = time.monotonic() + float(seconds)
    events: list[dict[str, object]] = []

    async def storm() -> None:
        while time.monotonic() < until:
            key = dice.choice("abcd")
            if dice.random() < 0.1:
                began = time.monotonic()
                await store.invalidate(KIND, [key])
                events.append(
                    {"what": "invalidate", "key": key, "began": began, "ended": time.monotonic()}
                )
                continue
            seen = generation(await record_of(store, key))
            grant = (await store.acquire(KIND, [Ask(key, seen)], 30))[key]
            if not isinstance(grant, Lease):
                await asyncio.sleep(0)
                continue
            leased = time.monotonic()
            await asyncio.sleep(dice.choice([0, 0, 0.001]))
            began = time.monotonic()
            if await store.publish(KIND, {key: (grant, copy_by(grant))}) == set():
                events.append(
                    {
                        "what": "publish",
                        "key": key,
                        "seen": seen,
                        "token": grant.token,
                        "leased": leased,
                        "began": began,
                        "ended": time.monotonic(),
                    }
                )

    await asyncio.gather(*(storm() for _ in range(4)))
    tell(events)


async def contend(store: Store, contenders: str) -> None:
    """For each key told: so many tasks want it; how many of them loaded it."""
    tell("ready")
    while key := told():
        loads = await asyncio.gather(*(want(store, key) for _ in range(int(contenders))))
        tell(sum(loads))


async def want(store: Store, key: str) -> int:
    """Reads first and asks then, however late: only the copy seen keeps it from loading again."""
    while generation(await record_of(store, key)) is None:
        await asyncio.sleep(0)
        grant = (await store.acquire(KIND, [Ask(key)], 30))[key]
        if isinstance(grant, Lease):
            assert await store.publish(KIND, {key: (grant, copy_by(grant))}) == set()
            return 1
        await asyncio.sleep(0.001)
    return 0


async def fail(store: Store, contenders: str) -> None:
    """For each key told: so many caches want it, and loading fails; how many of them loaded it."""
    loads: Counter[str] = Counter()
    url = sys.argv[2]
    logging.disable()

    async def load(ids: list[str]) -> dict[str, int]:
        loads.update(ids)
        await asyncio.sleep(0)
        raise RetryAfter(3_600)

    async with AsyncExitStack() as stack:
        caches = [Cache(url, sleep=soon) for _ in range(int(contenders))]
        posts = [cache.batched(KIND, fresh_for=60, lease_for=60)(load) for cache in caches]
        for cache in caches:
            await stack.enter_async_context(cache)
        tell("ready")
        while key := told():
            answers = await asyncio.gather(*(post(key) for post in posts), return_exceptions=True)
            assert all(isinstance(answer, LoadFailed) for answer in answers)
            tell(loads[key])


async def soon(_seconds: float) -> None:
    await asyncio.sleep(0.001)


async def hold(store: Store, key: str, lease_for: str) -> None:
    """Leases the key; publishes when told; whether that was superseded."""
    lease = await lease_of(store, key, float(lease_for))
    assert lease is not None
    tell(lease.expires_at)
    told()
    tell(await store.publish(KIND, {key: (lease, copy_by(lease))}) == {key})


async def publish_for_ever(store: Store, key: str) -> None:
    """Values of many pages, until killed."""
    while True:
        lease = await lease_of(store, key, 0.05)
        if lease is not None and await store.publish(KIND, {key: (lease, copy_by(lease, 3_000))}):
            continue
        tell("published")


async def put_rounds(store: Store) -> None:
    """For each key told: one put of it; what the store did."""
    tell("ready")
    while key := told():
        put = new_put(store)
        tell((await settled_put(store, key, put)).outcome.value)


def new_put(store: Store, times: int = 1) -> Put:
    """Its value says its generation: a mix of two copies would show."""
    generation = store.new_generation()
    return Put(Copy(generation, time.time(), POLICY, generation.encode() * times))


async def settled_put(store: Store, key: str, put: Put) -> PutResult:
    """Puts it until the store has decided."""
    while True:
        result = (await store.put(KIND, {key: put}))[key]
        if result.outcome is not PutOutcome.AGAIN:
            return result


async def put_for_ever(store: Store, key: str) -> None:
    """Values of many pages, until killed."""
    while True:
        await settled_put(store, key, new_put(store, 3_000))
        tell("put")


async def put_or_fail(store: Store) -> None:
    """Puts each key that it is told, and tells whether it was stored, or the error."""
    logging.disable()  # the parent takes any output for a complaint
    tell("ready")
    while key := told():
        try:
            await settled_put(store, key, new_put(store))
        except StoreError as exc:
            tell(str(exc))
        else:
            tell("stored")


async def meet_corruption(store: Store) -> None:
    """When told, reads what is damaged, then asks for the lease of one key."""
    tell("ready")
    told()
    assert await store.read(KIND, ["id-1"]) == {}
    tell(await lease_of(store, "new", 30) is not None)


async def main(command: str, url: str, *arguments: str) -> None:
    commands = (
        hammer,
        contend,
        fail,
        hold,
        publish_for_ever,
        put_rounds,
        put_for_ever,
        put_or_fail,
        meet_corruption,
    )
    store = store_for(url, time.time)
    await store.open()
    await {each.__name__: each for each in commands}[command](store, *arguments)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
