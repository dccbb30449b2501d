"""S7: real processes on one store: contention, death, pauses; on SQLite, Valkey and PostgreSQL.

The clock is the machine's: what is proved here is what no manual clock can show.
"""

import asyncio
import random
import signal
import time
from collections import defaultdict
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stillfresh import Policy
from stillfresh.stores.contract import Ask, Copy, Lease, Mark, Record, Store
from stillfresh.stores.urls import store_for
from tests.kit.store_processes import working

KIND = "post"


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "redis":
            return str(request.getfixturevalue("valkey").url(timeout="10s"))
        case "postgres":
            return str(request.getfixturevalue("postgres").new_store())
        case _:
            return f"sqlite:///{tmp_path}/cache.db"


async def opened(url: str) -> Store:
    store = store_for(url, time.time)
    await store.open()
    return store


async def found(url: str, *keys: str) -> dict[str, Record]:
    store = await opened(url)
    try:
        return await store.read(KIND, keys)
    finally:
        await store.close()


async def taken_over(store: Store, key: str) -> Lease:
    """Asks until the lease is ours."""
    while True:
        record = (await store.read(KIND, [key])).get(key, Record())
        seen = record.copy.generation if record.copy is not None else None
        grant = (await store.acquire(KIND, [Ask(key, seen)], 30))[key]
        if isinstance(grant, Lease):
            return grant
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "url", ["sqlite", "redis", pytest.param("postgres", marks=pytest.mark.proof)], indirect=True
)
class TestS7Contention:
    async def test_eight_processes_on_one_store_agree(self, url: str) -> None:
        """No error, no two holders, no lost publication, and the law, for a second together."""
        with ExitStack() as stack:
            workers = [stack.enter_context(working("hammer", url, 1, n)) for n in range(8)]
            for worker in workers:
                assert worker.hear() == "ready"
            for worker in workers:
                worker.say("go")
            events = [event for worker in workers for event in worker.hear()]
            for worker in workers:
                worker.finish()
        by_key: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            by_key[event["key"]].append(event)
        records = await found(url, *"abcd")
        assert by_key.keys() == set("abcd")
        for key, happened in by_key.items():
            check_history(happened, records[key])

    async def test_thirty_two_contenders_load_once(self, url: str) -> None:
        """Four processes of eight tasks, fifty cold keys, one load each (E5: the copy seen)."""
        assert loads_of(50, "contend", url) == [1] * 50

    async def test_thirty_two_contenders_fail_once(self, url: str) -> None:
        """E7: upstream is down: one of them finds out, the others hear of it, each time."""
        assert loads_of(10, "fail", url) == [1] * 10


def loads_of(rounds: int, command: str, url: str) -> list[int]:
    """Of each key, by four processes of eight."""
    loads = []
    with ExitStack() as stack:
        workers = [stack.enter_context(working(command, url, 8)) for _ in range(4)]
        for worker in workers:
            assert worker.hear() == "ready"
        for number in range(rounds):
            for worker in workers:
                worker.say(f"key-{number}")
            loads.append(sum(worker.hear() for worker in workers))
        for worker in workers:
            worker.say("")
            worker.finish()
    return loads


def check_history(happened: list[dict[str, Any]], record: Record) -> None:
    """What one key lived through, by the machine's monotonic clock."""
    published = sorted((e for e in happened if e["what"] == "publish"), key=lambda e: e["began"])
    invalidated = [event for event in happened if event["what"] == "invalidate"]
    for one, next_one in pairwise(published):
        assert next_one["leased"] > one["began"], "two held the lease at once"
    for publication in published:
        assert not any(
            publication["leased"] < event["began"] and event["ended"] < publication["began"]
            for event in invalidated
        ), "published with a lease that an invalidation had voided"
    follows = {event["seen"]: event["token"] for event in published}
    assert len(follows) == len(published), "two publications replaced the same copy"
    last = None
    for _ in published:
        last = follows[last]
    assert record.copy is not None
    assert record.copy.generation == last, "a publication got lost"
    check_mark(record.copy, published[-1], invalidated)


def check_mark(copy: Copy, last: dict[str, Any], invalidated: list[dict[str, Any]]) -> None:
    if any(event["began"] > last["ended"] for event in invalidated):
        assert copy.mark == Mark.HARD
    if all(event["ended"] < last["began"] for event in invalidated):
        assert copy.mark == Mark.NONE


class TestS7Death:
    async def test_a_killed_holder_is_replaced_after_its_lease(self, url: str) -> None:
        """S2: not before, and by whoever asks then."""
        store = await opened(url)
        with working("hold", url, "a", 1) as worker:
            expires_at = worker.hear()
        await taken_over(store, "a")
        assert time.time() >= expires_at - 0.001
        await store.close()

    async def test_a_holder_paused_past_its_lease_publishes_nothing(self, url: str) -> None:
        """It wakes up, believes to hold the lease, and is told that it was superseded."""
        store = await opened(url)
        with working("hold", url, "a", 0.3) as worker:
            worker.hear()
            worker.process.send_signal(signal.SIGSTOP)
            lease = await taken_over(store, "a")
            copy = Copy(lease.token, time.time(), Policy(60), b"the new one's")
            assert await store.publish(KIND, {"a": (lease, copy)}) == set()
            worker.say("publish")
            worker.process.send_signal(signal.SIGCONT)
            assert worker.hear() is True
            worker.finish()
        kept = (await store.read(KIND, ["a"]))["a"].copy
        assert kept is not None
        assert (kept.generation, kept.value) == (lease.token, b"the new one's")
        await store.close()

    async def test_a_process_killed_while_publishing_leaves_a_whole_copy(self, url: str) -> None:
        """The old one or the new one; value and generation always belong together."""
        store = await opened(url)
        dice, generations = random.Random(7), set()
        for _ in range(3):
            with working("publish_for_ever", url, "a") as worker:
                for _ in range(dice.randint(1, 20)):
                    assert worker.hear() == "published"
            copy = (await store.read(KIND, ["a"]))["a"].copy
            assert copy is not None
            assert copy.value == copy.generation.encode() * 3_000
            generations.add(copy.generation)
        assert len(generations) == 3
        await store.close()
