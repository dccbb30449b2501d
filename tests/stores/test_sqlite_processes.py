"""S7, S4: real processes on one file: contention, death, pauses, and a file that breaks.

The clock is the machine's: what is proved here is what no manual clock can show.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stillfresh import Policy
from stillfresh.stores.contract import Ask, Copy, Held, Lease, Mark, Record
from stillfresh.stores.sqlite import SqliteStore

WORKER = Path(__file__).with_name("sqlite_worker.py")
KIND = "post"


class Worker:
    """A process of its own, spoken to by lines."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(WORKER), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        """It ends by itself, without a word of complaint."""
        _, complaints = self.process.communicate(timeout=60)
        assert (self.process.returncode, complaints) == (0, "")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def working(*arguments: object) -> Iterator[Worker]:
    worker = Worker(*arguments)
    try:
        yield worker
    finally:
        worker.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


async def found(path: Path, *keys: str) -> dict[str, Record]:
    store = SqliteStore(path)
    await store.open()
    try:
        return store.read_now(KIND, keys)
    finally:
        await store.close()


async def taken_over(store: SqliteStore, key: str) -> Lease:
    """Asks until the lease is ours."""
    while True:
        record = store.read_now(KIND, [key]).get(key, Record())
        seen = record.copy.generation if record.copy is not None else None
        grant = (await store.acquire(KIND, [Ask(key, seen)], 30))[key]
        if isinstance(grant, Lease):
            return grant
        await asyncio.sleep(0.01)


class TestS7Contention:
    async def test_eight_processes_agree(self, path: Path) -> None:
        """No error, no two holders, no lost publication, and the law, for three seconds."""
        with ExitStack() as stack:
            workers = [stack.enter_context(working("hammer", path, 3, n)) for n in range(8)]
            events = [event for worker in workers for event in worker.hear()]
            for worker in workers:
                worker.finish()
        by_key: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            by_key[event["key"]].append(event)
        records = await found(path, *"abcd")
        assert by_key.keys() == set("abcd")
        for key, happened in by_key.items():
            check_history(happened, records[key])

    async def test_thirty_two_contenders_load_once(self, path: Path) -> None:
        """Four processes of eight tasks, fifty cold keys, one load each (E5: the copy seen)."""
        with ExitStack() as stack:
            workers = [stack.enter_context(working("contend", path, 8)) for _ in range(4)]
            for worker in workers:
                assert worker.hear() == "ready"
            for number in range(50):
                for worker in workers:
                    worker.say(f"key-{number}")
                assert sum(worker.hear() for worker in workers) == 1
            for worker in workers:
                worker.say("")
                worker.finish()


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
    async def test_a_killed_holder_is_replaced_after_its_lease(self, path: Path) -> None:
        """S2: not before, and by whoever asks then."""
        store = SqliteStore(path)
        await store.open()
        with working("hold", path, "a", 1) as worker:
            expires_at = worker.hear()
        assert isinstance((await store.acquire(KIND, [Ask("a")], 30))["a"], Held)
        await taken_over(store, "a")
        assert time.time() >= expires_at - 0.001
        await store.close()

    async def test_a_holder_paused_past_its_lease_publishes_nothing(self, path: Path) -> None:
        """It wakes up, believes to hold the lease, and is told that it was superseded."""
        store = SqliteStore(path)
        await store.open()
        with working("hold", path, "a", 0.3) as worker:
            worker.hear()
            worker.process.send_signal(signal.SIGSTOP)
            lease = await taken_over(store, "a")
            copy = Copy(lease.token, time.time(), Policy(60), b"the new one's")
            assert await store.publish(KIND, {"a": (lease, copy)}) == set()
            worker.say("publish")
            worker.process.send_signal(signal.SIGCONT)
            assert worker.hear() is True
            worker.finish()
        kept = store.read_now(KIND, ["a"])["a"].copy
        assert kept is not None
        assert (kept.generation, kept.value) == (lease.token, b"the new one's")
        await store.close()

    async def test_killed_while_publishing_leaves_a_whole_copy(self, path: Path) -> None:
        """The old one or the new one; value and generation always belong together."""
        store = SqliteStore(path)
        await store.open()
        dice, generations = random.Random(7), set()
        for _ in range(6):
            with working("publish_for_ever", path, "a") as worker:
                for _ in range(dice.randint(1, 20)):
                    assert worker.hear() == "published"
            copy = store.read_now(KIND, ["a"])["a"].copy
            assert copy is not None
            assert copy.value == copy.generation.encode() * 3_000
            generations.add(copy.generation)
        assert len(generations) == 6
        await store.close()


DAMAGE = """
import os, sys
with open(sys.argv[1], "r+b") as file:
    file.seek(4096)
    file.write(b"\\xff" * (os.path.getsize(sys.argv[1]) - 4096))
"""


def damage(path: Path) -> None:
    """In another process: opening the file in this one would drop SQLite's locks."""
    subprocess.run([sys.executable, "-c", DAMAGE, str(path)], check=True, timeout=30)


class TestS4CorruptForSeveral:
    async def test_one_of_several_processes_sets_it_aside(self, path: Path) -> None:
        """All meet the damage; one renames, the others open the new file, one gets the lease."""
        store = SqliteStore(path)
        await store.open()
        asks = [Ask(f"id-{number}") for number in range(300)]
        await store.acquire(KIND, asks, 30)
        await store.close()
        damage(path)
        with ExitStack() as stack:
            workers = [stack.enter_context(working("meet_corruption", path)) for _ in range(4)]
            for worker in workers:
                assert worker.hear() == "ready"
            for worker in workers:
                worker.say("go")
            assert sum(worker.hear() for worker in workers) == 1
        aside = [each for each in path.parent.glob("cache.db.corrupt-*") if each.suffix[-1] == "Z"]
        assert len(aside) == 1
        assert set(await found(path, "new", "id-1")) == {"new"}
