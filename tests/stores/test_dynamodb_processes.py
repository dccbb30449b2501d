"""S7, S6, I9: real processes on one table over HTTP: contention, death, pauses, a server that goes.

The clock is the machine's: what is proved here is what no manual clock can show.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from stillfresh import Cache, Policy, StoreError
from stillfresh.stores.contract import Ask, Copy, Lease, Mark, Record
from stillfresh.stores.dynamodb import DynamoStore
from tests.kit.servers import aws as aws_servers
from tests.kit.servers.aws import Aws
from tests.kit.servers.valkey import free_port
from tests.kit.workers import dynamodb as dynamodb_worker

KIND = "post"
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["stillfresh.stores.dynamodb.store"])
"""The libraries are imported once, and the workers forked from there."""


class Worker:
    """A process of its own, spoken to through a pipe."""

    def __init__(self, *arguments: object) -> None:
        self.line, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=dynamodb_worker.main, args=(theirs, *arguments))
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.line.poll(60), "no word within a minute"
        return self.line.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(60)
        self.process.close()
        self.line.close()


@contextmanager
def working(*arguments: object, times: int = 1) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        workers = []
        for _ in range(times):
            workers.append(Worker(*arguments))
            stack.callback(workers[-1].end)
        yield workers


@asynccontextmanager
async def opened(aws: Aws, table: str, **options: Any) -> AsyncIterator[DynamoStore]:
    store = aws.store(table, **options)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def record_of(store: DynamoStore, key: str) -> Record:
    return (await store.read(KIND, [key])).get(key, Record())


async def taken_over(store: DynamoStore, key: str) -> Lease:
    """Asks until the lease is ours."""
    while True:
        copy = (await record_of(store, key)).copy
        seen = copy.generation if copy is not None else None
        grant = (await store.acquire(KIND, [Ask(key, seen)], 30))[key]
        if isinstance(grant, Lease):
            return grant
        await asyncio.sleep(0.01)


class TestS7Contention:
    @pytest.mark.timeout(400)
    @pytest.mark.parametrize("rounds", [8, pytest.param(50, marks=pytest.mark.proof)])
    def test_thirty_two_contenders_load_once(self, aws: Aws, rounds: int) -> None:
        """I6: two processes of sixteen tasks; each cold key is loaded once, over HTTP."""
        address = aws.address(aws.new_table())
        with working("contend", address, 16, times=2) as workers:
            for worker in workers:
                assert worker.hear() == "ready"
            for number in range(rounds):
                for worker in workers:
                    worker.line.send(f"key-{number}")
                assert sum(worker.hear() for worker in workers) == 1

    def test_eight_processes_one_stale_key_one_load(self, aws: Aws, tmp_path: Path) -> None:
        """Loaded once, then stale: all are served at once, and one of them loads (I9)."""
        log = tmp_path / "loads"
        address = aws.address(aws.new_table())
        with working("serve", address, log, 0, times=1) as (first,):
            assert first.hear() == "ready"
            first.line.send("a")
            first.hear()
        assert len(log.read_text().split()) == 1
        with working("serve", address, log, 3600, times=8) as workers:
            for worker in workers:
                assert worker.hear() == "ready"
            for worker in workers:
                worker.line.send("a")
            answers = [worker.hear() for worker in workers]
            assert {verdict for _, verdict in answers} <= {"stale", "fresh"}
            deadline = time.monotonic() + 30
            while any(verdict == "stale" for _, verdict in answers):
                assert time.monotonic() < deadline
                for worker in workers:
                    worker.line.send("a")
                answers = [worker.hear() for worker in workers]
        assert len(log.read_text().split()) == 2
        assert len({value for value, _ in answers}) == 1


class TestE35Puts:
    @pytest.mark.timeout(400)
    @pytest.mark.proof
    async def test_eight_processes_put_one_key_at_once(self, aws: Aws) -> None:
        """All are acknowledged, and one of the values is there, whole and without a mark."""
        table = aws.new_table()
        with ExitStack() as stack:
            workers = []
            for writer in range(8):
                (worker,) = stack.enter_context(working("put", aws.address(table), writer))
                workers.append(worker)
            for worker in workers:
                assert worker.hear() == "ready"
            async with opened(aws, table) as store:
                for turn in range(10):
                    for worker in workers:
                        worker.line.send(("a", turn))
                    answers = [worker.hear() for worker in workers]
                    assert {outcome for outcome, _ in answers} <= {"stored", "replaced"}
                    copy = (await record_of(store, "a")).copy
                    assert copy is not None
                    assert copy.value in {b"%d of %d" % (writer, turn) for writer in range(8)}
                    assert copy.mark is Mark.NONE
                assert await store.invalidate_tag("eu") == [(KIND, "a")]


class TestS7Death:
    async def test_a_killed_holder_is_replaced_after_its_lease(self, aws: Aws) -> None:
        """S2: `kill -9`; not before its end, and by whoever asks then."""
        table = aws.new_table()
        async with opened(aws, table) as store:
            with working("hold", aws.address(table), "a", 1) as (worker,):
                expires_at = worker.hear()
            await taken_over(store, "a")
            assert time.time() >= expires_at - 0.001

    async def test_a_holder_paused_past_its_lease_publishes_nothing(self, aws: Aws) -> None:
        """SIGSTOP; it wakes up, believes to hold the lease, and is told that it was superseded."""
        table = aws.new_table()
        async with opened(aws, table) as store:
            with working("hold", aws.address(table), "a", 0.3) as (worker,):
                worker.hear()
                worker.signal(signal.SIGSTOP)
                lease = await taken_over(store, "a")
                copy = Copy(lease.token, time.time(), Policy(60), b"the new one's")
                assert await store.publish(KIND, {"a": (lease, copy)}) == set()
                worker.line.send("publish")
                worker.signal(signal.SIGCONT)
                assert worker.hear() is True
            assert (await record_of(store, "a")).copy == copy

    async def test_killed_while_publishing_leaves_a_whole_copy(self, aws: Aws) -> None:
        """The old one or the new one; value and generation always belong together."""
        table, dice = aws.new_table(), random.Random(7)
        async with opened(aws, table) as store:
            for _ in range(2):
                with working("publish_for_ever", aws.address(table), "a") as (worker,):
                    for _ in range(dice.randint(1, 10)):
                        assert worker.hear() == "published"
                copy = (await record_of(store, "a")).copy
                assert copy is not None
                assert copy.value == copy.generation.encode() * 3_000


class TestS6ServerGone:
    async def test_stopped_and_started_under_load(self, aws: Aws, tmp_path: Path) -> None:
        """Reads go on from memory, only an invalidation raises, and it recovers by itself."""
        port, file = free_port(), tmp_path / "table.db"
        loads = 0
        with aws_servers.dynamodb(port, file) as url:
            own = Aws(url, aws.s3_endpoint)
            table = own.new_table()
            cache = Cache(own.store(table))

            @cache.batched(KIND, fresh_for=3600, error_for=3600)
            async def posts(ids: list[str]) -> dict[str, int]:
                nonlocal loads
                loads += 1
                return dict.fromkeys(ids, loads)

            await cache.open()
            assert await posts("a") == 1
        stop = asyncio.Event()

        async def reading() -> int:
            count = 0
            while not stop.is_set():
                assert await posts("a") >= 1
                count += 1
            return count

        readers = [asyncio.create_task(reading()) for _ in range(4)]
        with pytest.raises(StoreError, match="no answer"):
            await posts.invalidate("a")
        assert await posts("new") >= 2
        with aws_servers.dynamodb(port, file):
            await posts.invalidate("a")
            before = loads
            assert await posts("a") > before
            stop.set()
            assert sum(await asyncio.gather(*readers)) > 0
            async with opened(own, table) as other:
                assert (await record_of(other, "a")).copy is not None
            stats = await cache.stats()
            await cache.close()
        assert stats.resources[KIND].store_errors > 0
