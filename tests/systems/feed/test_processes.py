"""F1, F7, F8: real processes on one file: writes, one revalidation, and one that was killed.

The workers' clock is the machine's; this process has a manual one, set to it.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stillfresh import Verdict
from stillfresh.systems.feed import FeedCache, FeedEngine, Topic
from stillfresh.testing import ManualClock
from tests.kit.engine import turns
from tests.kit.feed import Heard, Network, sql, topic, uuids
from tests.kit.processes import ROOT, command

DEADLINE = 60.0


class Worker:
    """A process that answers each line with a line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def heard(self) -> Any:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE)
        assert line, "the worker ended"
        return json.loads(line)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def ask(self, line: str) -> Any:
        self.say(line)
        return await self.heard()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


class Crew:
    """The workers of one test; none outlives it."""

    def __init__(self, path: Path, log: Path, now: float) -> None:
        self.path, self.log, self.now = path, log, now
        self.workers: list[Worker] = []

    async def start(self, verb: str, *arguments: str) -> Worker:
        process = await asyncio.create_subprocess_exec(
            *command("feed", verb, self.path, self.now, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        self.workers.append(Worker(process))
        return self.workers[-1]

    async def visitor(self, *, is_hit: bool) -> Worker:
        """Reads the feed; on a hit, its first answer can be asked for with an empty word."""
        worker = await self.start("visit", str(self.log), *(["hit"] if is_hit else []))
        assert await worker.heard() == "began"
        return worker

    def fetches(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    async def fetching(self) -> None:
        """Until one of them asks for all seven."""
        async with asyncio.timeout(DEADLINE):
            while self.fetches() < 7:
                await asyncio.sleep(0.005)

    async def end(self) -> None:
        for worker in self.workers:
            if worker.process.returncode is None:
                worker.process.kill()
            await worker.process.communicate()


@pytest.fixture
def now() -> float:
    return time.time()


@pytest.fixture
async def crew(path: Path, tmp_path: Path, now: float) -> AsyncIterator[Crew]:
    crew = Crew(path, tmp_path / "log", now)
    yield crew
    await crew.end()


def recent(uuid: str, now: float) -> Topic:
    return Topic(topic_uuid=uuid, author="ann", title=uuid, created_at=int(now))


def stale_file(path: Path, now: float) -> None:
    """Fetched ten minutes ago."""
    with FeedCache.open(path, clock=ManualClock(now - 600)) as cache:
        cache.put_topics([recent("a", now)], "index:all:7")


class TestF1Processes:
    async def test_two_processes_see_each_others_writes_at_the_next_read(
        self, crew: Crew, path: Path, now: float
    ) -> None:
        """Topics put and deleted, comments, meta rows: whatever memory stands in front."""
        clock = ManualClock(now)
        with FeedCache.open(path, clock=clock) as cache:
            worker = await crew.start("operate")
            assert await worker.heard() == "ready"
            for number in range(10):
                cache.put_topics([topic(f"here{number}")], "index:all:7")
                assert f"here{number}" in await worker.ask("all")
                await worker.ask(f"put there{number}")
                assert f"there{number}" in uuids(cache.get_topics_all(0))
                await worker.ask(f"comments x {number}")
                found = cache.get_comments("x")
                assert found is not None
                assert found[0].comment_uuid == str(number)
            assert await worker.ask("delete here3") is True
            assert "here3" not in uuids(cache.get_topics_all(0))
            assert cache.is_stale("index:all:7")
            assert cache.delete_topic("there5")
            assert "there5" not in await worker.ask("all")
            assert len(await worker.ask("all")) == 18


class TestF7Processes:
    async def test_one_revalidation_across_processes(
        self, crew: Crew, path: Path, now: float
    ) -> None:
        """Four serve the stale feed, one of them fetches, all see what it brought."""
        stale_file(path, now)
        workers = [await crew.visitor(is_hit=True) for _ in range(4)]
        for worker in workers:
            assert await worker.ask("show") == ["a"]
        await crew.fetching()
        for worker in workers:
            assert await worker.ask("read") == ["a"]
        for worker in workers:
            assert await worker.ask("go a b") == ["a"]
        events = [await worker.ask("settle") for worker in workers]
        assert sorted(map(len, events)) == [0, 0, 0, 1]
        for worker in workers:
            assert await worker.ask("read") == ["a", "b"]
        assert crew.fetches() == 7

    async def test_one_fetch_of_a_cold_feed_across_processes(self, crew: Crew) -> None:
        """Who did not get the lease waits for who has it."""
        workers = [await crew.visitor(is_hit=False) for _ in range(3)]
        await crew.fetching()
        for worker in workers:
            worker.say("go a b")
        assert [await worker.heard() for worker in workers] == [["a", "b"]] * 3
        assert crew.fetches() == 7

    async def test_a_process_killed_in_the_middle_is_replaced_after_its_lease(
        self, crew: Crew, path: Path, now: float
    ) -> None:
        """Until then the old feed is served and nobody fetches; then one does."""
        stale_file(path, now)
        clock, network = ManualClock(now), Network()
        network.have(recent("a", now), recent("b", now))
        worker = await crew.visitor(is_hit=True)
        await crew.fetching()
        worker.signal(signal.SIGKILL)
        await worker.process.wait()
        with FeedCache.open(path, clock=clock) as cache:
            engine = FeedEngine(cache, network, clock=clock)
            heard = Heard(engine)
            for _ in range(5):
                feed = await engine.get_all()
                assert (uuids(feed.topics), feed.verdict) == (["a"], Verdict.STALE)
                await turns()
            assert network.lookups == []
            clock.advance(time.time() - now + 6)
            await engine.get_all()
            await heard.wait()
            feed = await engine.get_all()
            assert (uuids(feed.topics), feed.verdict) == (["a", "b"], Verdict.FRESH)
            assert len(network.lookups) == 7
            await engine.close()

    async def test_a_process_that_slept_through_its_lease_overwrites_nothing(
        self, crew: Crew, path: Path, now: float
    ) -> None:
        """Stopped, replaced, woken: its answer is older than what stands there."""
        stale_file(path, now)
        clock, network = ManualClock(now), Network()
        network.have(recent("a", now), recent("b", now))
        worker = await crew.visitor(is_hit=True)
        assert await worker.ask("show") == ["a"]
        await crew.fetching()
        worker.signal(signal.SIGSTOP)
        with FeedCache.open(path, clock=clock) as cache:
            engine = FeedEngine(cache, network, clock=clock)
            heard = Heard(engine)
            clock.advance(time.time() - now)
            sql(path, "UPDATE stillfresh_feed_times SET lease_expires_at = ?", 1000 * (now - 1))
            await engine.get_all()
            await heard.wait()
            worker.signal(signal.SIGCONT)
            assert await worker.ask("go a old") == ["a"]
            assert await worker.ask("settle") == []
            assert uuids((await engine.get_all()).topics) == ["a", "b"]
            await engine.close()


class TestF8Processes:
    async def test_a_delete_voids_a_revalidation_in_another_process(
        self, crew: Crew, path: Path, now: float
    ) -> None:
        """It is never brought back, and one more revalidation follows."""
        stale_file(path, now)
        with FeedCache.open(path, clock=ManualClock(now)) as cache:
            worker = await crew.visitor(is_hit=True)
            assert await worker.ask("show") == ["a"]
            await crew.fetching()
            assert cache.delete_topic("a")
            assert await worker.ask("go a b") == ["a"]
            assert await worker.ask("settle") == ["index:all:7"]
            assert crew.fetches() == 14
            assert await worker.ask("read") == ["b"]
            assert uuids(cache.get_topics_all(7)) == ["b"]
            assert cache.get_topic("a") is None
