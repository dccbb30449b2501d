"""T4: real faults on real stores; after each nothing is lost, nothing is wrong, and work goes on.

`make torture` does the same for minutes, and more of it. Holders that are killed or paused in the
midst of one load: `tests/engine/test_processes.py`, `tests/stores/test_store_processes.py`.
"""

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stillfresh import Cache, Verdict
from stillfresh.lab.prove import ProofRun, Stage
from stillfresh.stores.contract import Ask, Lease, Record
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.stores.urls import store_for
from stillfresh.testing import ManualClock
from tests.kit.processes import ROOT, command
from tests.kit.servers.valkey import Server
from tests.kit.workers import fault as fault_worker
from tests.kit.workers.fault import BIG, KEYS, KIND, LEASE_FOR, declared
from tests.proof.torture_stages import STAGES, NotHere

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws

FORKS = get_context("forkserver")
STRACE = shutil.which("strace")
FAULTS = {
    "sqlite": ["a process killed", "a full disk", "a process paused", "the clock moved"],
    "valkey": ["the store killed", "a full disk", "all processes killed"],
    "push": ["channels cut", "the store paused"],
    "cluster": ["a primary killed", "a slot moved"],
    "postgres": ["the store killed", "channels cut"],
    "dynamodb": ["the store killed", "a process killed"],
}
QUICK = ("sqlite", "valkey")
"""On the other stores a run takes ten seconds or more."""


@pytest.fixture
def staged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Stage]]:
    name: str = request.param
    with ExitStack() as stack:
        try:
            yield name, stack.enter_context(STAGES[name](tmp_path))
        except NotHere as exc:
            pytest.skip(str(exc))


@pytest.fixture(params=sorted(STAGES.keys() - {"cluster", "postgres", "push", "sentinel"}))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that others use as well; nothing is done to it."""
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/cache.db"
        case "valkey":
            valkey: Server = request.getfixturevalue("valkey")
            return valkey.url(timeout="10s")
        case _:
            aws: Aws = request.getfixturevalue("aws")
            return aws.address(aws.new_table())


class TestT4UnderLoad:
    @pytest.mark.parametrize(
        "staged",
        [pytest.param(name, marks=(pytest.mark.proof,) * (name not in QUICK)) for name in FAULTS],
        indirect=True,
    )
    @pytest.mark.timeout(400)
    def test_no_promise_is_broken_by_faults_under_load(
        self, staged: tuple[str, Stage], tmp_path: Path
    ) -> None:
        """Real processes read, load and invalidate all the while; the log shows no violation."""
        name, stage = staged
        run = ProofRun(name, stage, tmp_path, seed=4, workers=2)
        faults = [fault for fault in FAULTS[name] if fault in run.deck()]
        report = run.go(faults)
        assert report.sentences == []
        assert sorted(report.faults) == sorted(faults)
        assert report.counts["published"] > len(stage.keys)


class TestT4Killed:
    @pytest.mark.parametrize("step", ["load", "publish"])
    async def test_a_process_killed_in_a_batch_leaves_whole_copies(
        self, url: str, step: str
    ) -> None:
        """`kill -9`: what it had published is served, and the rest is loaded once more, once."""
        after = random.Random(step).uniform(0, 0.01)
        victim = FORKS.Process(
            target=fault_worker.die_in, args=(step, url, dict(os.environ), after)
        )
        victim.start()
        victim.join(60)
        assert victim.exitcode == -9
        loads: list[str] = []
        async with Cache(url) as cache:
            prices = declared(cache, loads)
            answers = await prices.get_many(KEYS)
            again = await prices.get_many(KEYS)
        assert {answer.verdict for answer in answers.values()} == {Verdict.FRESH}
        assert len(loads) == len(set(loads))
        for key, answer in answers.items():
            by = os.getpid() if key in loads else victim.pid
            assert answer.value == again[key].value == f"{by} {key}"
        assert step == "publish" or sorted(loads) == sorted(KEYS)


def traced(path: Path, trace: Path) -> "subprocess.CompletedProcess[str]":
    """Publishes; from the twelfth sync on, when all is opened, four fail."""
    calls = "fsync,fdatasync"
    inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:error=EIO:when=12..15"]
    worker = command("fault", path)
    return subprocess.run(
        [str(STRACE), "-f", "-qq", "-o", str(trace), *inject, *worker],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )


class TestT4FailingFsync:
    @pytest.mark.skipif(STRACE is None, reason="this machine has no strace")
    async def test_acknowledged_publications_survive_failing_syncs(self, tmp_path: Path) -> None:
        """Four syncs fail; the process goes on, and its file is whole."""
        path, trace = tmp_path / "cache.db", tmp_path / "trace"
        ran = traced(path, trace)
        if "ptrace" in ran.stderr:
            pytest.skip(f"tracing is not allowed here: {ran.stderr.strip()}")
        said = [line.split(maxsplit=2) for line in ran.stdout.splitlines()]
        assert (ran.returncode, ran.stderr, len(said)) == (0, "", len(KEYS))
        assert "(INJECTED)" in trace.read_text()
        assert said[-1][1] == "published"
        store = SqliteStore(path)
        await store.open()
        for key, outcome, *_ in said:
            copy = store.read_now(KIND, [key]).get(key, Record()).copy
            assert copy is not None or outcome != "published"
            assert copy is None or copy.value == key.encode() * BIG
        await store.close()


class TestT4ClockMoved:
    async def test_after_the_clock_is_set_back_a_copy_from_the_future_is_stale(
        self, url: str
    ) -> None:
        """By an hour: what is there is served as stale, once, and is loaded anew."""
        clock, loads = ManualClock(start=time.time()), list[str]()
        async with Cache(url, clock=clock) as cache:
            prices = declared(cache, loads)
            await prices.get("sku-0")
            clock.advance(-3600)
            assert (await prices.get("sku-0")).verdict is Verdict.STALE
            await prices.refresh("sku-0")
            answer = await prices.get("sku-0")
        assert (answer.verdict, answer.fetched_at) == (
            Verdict.FRESH,
            pytest.approx(clock(), rel=0, abs=0.001),
        )
        # The background refresh may be over before `refresh` asks: then that loads once more.
        assert loads in (["sku-0"] * 2, ["sku-0"] * 3)

    @pytest.mark.parametrize("by", [3600, -3600])
    async def test_a_lease_from_before_the_clock_moved_is_over(self, url: str, by: float) -> None:
        """By an hour: whoever held it has lost it, and publishes nothing over the new copy."""
        clock, loads = ManualClock(start=time.time()), list[str]()
        dead = store_for(url, clock)
        await dead.open()
        lease = (await dead.acquire(KIND, [Ask("sku-0")], LEASE_FOR))["sku-0"]
        assert isinstance(lease, Lease)
        clock.advance(by)
        async with Cache(url, clock=clock) as cache:
            answer = await declared(cache, loads).get("sku-0")
            copy = (await dead.read(KIND, ["sku-0"]))["sku-0"].copy
            assert copy is not None
            assert await dead.publish(KIND, {"sku-0": (lease, copy)}) == {"sku-0"}
        await dead.close()
        assert (answer.verdict, loads) == (Verdict.FRESH, ["sku-0"])
