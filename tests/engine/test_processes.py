"""E5, S7: the engine in real processes on one store; holders are really killed and paused."""

import asyncio
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from stillfresh import Cache
from tests.kit.processes import Process
from tests.kit.servers.valkey import Server


class Stage:
    """The processes of one test, on one store, and what they have loaded."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.url = url
        self._folder = folder
        self._stack = stack

    def start(self, *options: str, takes: float = 0.3, lease_for: float = 30) -> Process:
        (process,) = self.start_all(1, *options, takes=takes, lease_for=lease_for)
        return process

    def start_all(
        self, count: int, *options: str, takes: float = 0.3, lease_for: float = 30
    ) -> list[Process]:
        """Until each is ready."""
        given = (self.url, self._folder / "loads", takes, lease_for, *options)
        processes = [Process(self._stack, "cache", *given, is_ready=False) for _ in range(count)]
        assert [process.line() for process in processes] == ["ready"] * count
        return processes

    def loads(self) -> list[str]:
        log = self._folder / "loads"
        return log.read_text().split() if log.exists() else []


@pytest.fixture(params=["sqlite", "redis"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """Ends every process that a test started, however the test ends."""
    url = f"sqlite:///{tmp_path}/cache.db"
    if request.param == "redis":
        server: Server = request.getfixturevalue("valkey")
        url = server.url(timeout="10s")
    with ExitStack() as stack:
        yield Stage(url, tmp_path, stack)


async def store_an_old_copy(url: str) -> None:
    """Seventy seconds old: ten seconds past its freshness."""
    cache = Cache(url, clock=lambda: time.time() - 70)

    @cache.batched("price", fresh_for=60, stale_for=60, error_for=60)
    async def prices(skus: list[str]) -> Mapping[str, int]:
        return dict.fromkeys(skus, 0)

    async with cache:
        assert await prices("sku-1") == 0


class TestE5Processes:
    """S7: contention, and holders that die or pause."""

    def test_eight_processes_one_cold_key_one_load(self, stage: Stage) -> None:
        """All eight are served what the one has loaded."""
        processes = stage.start_all(8)
        for process in processes:
            process.go()
        values = {process.line() for process in processes}
        assert len(stage.loads()) == 1
        assert values == set(stage.loads())

    @pytest.mark.parametrize(
        "stage", ["sqlite", pytest.param("redis", marks=pytest.mark.proof)], indirect=True
    )
    def test_eight_processes_one_stale_key_one_load(self, stage: Stage) -> None:
        """All eight serve the old copy, one refreshes it, and all eight see the new one."""
        asyncio.run(store_an_old_copy(stage.url))
        processes = stage.start_all(8)
        for process in processes:
            process.go()
        values = {process.line() for process in processes}
        assert len(stage.loads()) == 1
        assert values == set(stage.loads())

    def test_a_holder_that_was_killed_is_replaced_when_its_lease_ends(self, stage: Stage) -> None:
        """`kill -9` in the middle of a load: the next one takes over, and answers."""
        dying = stage.start("die", lease_for=1)
        dying.go()
        assert dying.line() == "loading"
        waiting = stage.start(takes=0)
        waiting.go()
        dying.process.send_signal(signal.SIGKILL)
        assert waiting.line() == str(waiting.process.pid)
        assert stage.loads() == [str(dying.process.pid), str(waiting.process.pid)]

    def test_a_holder_paused_past_its_lease_publishes_nothing(self, stage: Stage) -> None:
        """SIGSTOP during its load; another takes over; after SIGCONT the other's copy stands."""
        paused = stage.start(takes=2, lease_for=1)
        paused.go()
        while not stage.loads():
            continue
        paused.process.send_signal(signal.SIGSTOP)
        other = stage.start(takes=0)
        other.go()
        assert other.line() == str(other.process.pid)
        paused.process.send_signal(signal.SIGCONT)
        paused.line()
        third = stage.start()
        third.go()
        assert third.line() == str(other.process.pid)
