"""T11: `stillfresh prove`: what it does to a store, and that it finds what a store loses."""

import asyncio
import json
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from stillfresh import ConfigError, LoadFailed, Policy
from stillfresh.cli.proving import ending, tell
from stillfresh.lab.prove import (
    CHECKS,
    LOST,
    MEANING,
    PEERS,
    ProofRun,
    Report,
    Stage,
    checked_peer,
    proving,
)
from stillfresh.lab.prove import crowd as prove_crowd
from stillfresh.lab.prove.crowd import Crowd
from stillfresh.lab.prove.places import tcp_place, through
from stillfresh.lab.prove.proxy import Proxy
from stillfresh.lab.prove.witness import Log, MovedClock, events_of, move_clock
from stillfresh.lab.prove.worker import KIND, LoopShelf, ProofJob, ThreadShelf
from stillfresh.stores.contract import Record
from stillfresh.stores.urls import store_for
from stillfresh.sync.loop_thread import LoopThread
from tests.kit.cli import call, put
from tests.kit.servers.cluster import until
from tests.kit.servers.valkey import HOST, Server, binary_of, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """A primary and its replica, which follows asynchronously and has a replica of its own."""
    binary = binary_of("valkey")
    assert binary is not None
    with ExitStack() as stack:
        primary, replica, last = (
            stack.enter_context(
                serving(binary, made(tmp_path / name), "--repl-diskless-sync-delay", "0")
            )
            for name in ("primary", "replica", "last")
        )
        follow(replica, primary)
        follow(last, replica)
        yield primary, replica


def follow(replica: Server, primary: Server) -> None:
    replica.command("REPLICAOF", HOST, str(primary.port))
    until(lambda: "link_status:up" in replica.command("INFO replication"), "no replica")


async def own_entries(address: str, *, is_new: bool = False) -> dict[str, Record]:
    store = store_for(address, time.time)
    await store.open()
    try:
        if is_new:
            await put(store, KIND, ["sku-0", "sku-1"], Policy(3600), time.time())
        return await store.read(KIND, ["sku-0", "sku-1"])
    finally:
        await store.close()


def await_keys(log: Path, what: str, count: int) -> None:
    """Until it was told of so many keys, by processes that could ask the store."""
    since = time.monotonic()

    def keys() -> set[str]:
        events = events_of(log.read_bytes().rpartition(b"\n")[0])
        told = (it for it in events if it.what == what and it.at > since)
        return {it.key for it in told if not it.blind}

    until(lambda: len(keys()) >= count, f"of few keys: {what}")


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


class TestS14ProveThreads:
    """The faults meet a SyncCache too, whose threads have connections of their own."""

    @pytest.mark.parametrize("shelf_class", [LoopShelf, ThreadShelf])
    async def test_threads_log_what_tasks_log(
        self,
        shelf_class: type[LoopShelf] | type[ThreadShelf],
        valkey: Server,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Threads load, publish and invalidate by themselves: the loop thread is not asked."""
        move_clock(tmp_path / "clock", 0.0)
        log, clock = Log(tmp_path / "log"), MovedClock(tmp_path / "clock")
        stage = Stage(valkey.url(prefix=f"prove-{shelf_class.__name__}"), {}, fresh_for=60)
        job = ProofJob(tmp_path / "log", tmp_path / "clock", tmp_path / "said", {}, 0.1, stage)
        shelf = shelf_class(job, log, clock)
        await shelf.open()
        with monkeypatch.context() as patch:
            patch.setattr(LoopThread, "run", None)
            first = await shelf.read(["sku-1"])
            await shelf.invalidate("sku-1")
            both = await shelf.read(["sku-1", "sku-2"])
        await shelf.close()
        log.close()
        assert [(it.verdict, it.blind) for it in first + both] == [("fresh", False)] * 3
        assert len({it.load for it in first + both}) == 3
        events = events_of((tmp_path / "log").read_bytes())
        assert Counter(event.what for event in events) == {
            "leased": 3,
            "load": 3,
            "loaded": 3,
            "publishing": 3,
            "published": 3,
            "invalidating": 1,
            "invalidated": 1,
        }
        leases = {event.lease for event in events if event.what == "leased"}
        assert {event.lease for event in events if event.what == "load"} == leases
        assert len(leases) == 3

    def test_every_second_process_of_a_proof_uses_threads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        jobs: list[ProofJob] = []

        class Process:
            pid = None

            def __init__(self, target: object, args: tuple[ProofJob]) -> None:
                jobs.extend(args)

            def start(self) -> None: ...

        crowd = Crowd(Stage("memory://", {}), tmp_path, seed=1)
        monkeypatch.setattr(prove_crowd.FORKS, "Process", Process)
        crowd.start(3)
        crowd.start(1)
        assert [job.uses_threads for job in jobs] == [False, True, False, True]


class TestT11Prove:
    @pytest.mark.timeout(200)
    @pytest.mark.parametrize(
        ("replicas", "outcome", "times"), [(0, "invalidated", 5), (1, "refused", 1)]
    )
    def test_prove_finds_a_failover_that_loses_an_invalidation(
        self, chain: tuple[Server, Server], tmp_path: Path, replicas: int, outcome: str, times: int
    ) -> None:
        """The replica takes over without what came last; with `wait_replicas` that was refused."""
        primary, replica = chain

        @contextmanager
        def failover(_: random.Random) -> Iterator[None]:
            primary.command("WAIT", "1", "30000")
            replica.command("REPLICAOF", "NO", "ONE")
            await_keys(tmp_path / "log", outcome, times)
            proxy._to = HOST, replica.port
            proxy.cut()
            await_keys(tmp_path / "log", "served", len(stage.keys))
            yield

        with Proxy(HOST, primary.port) as proxy:
            url = f"redis://{HOST}:{proxy.port}/0?timeout=1s&wait_replicas={replicas}"
            stage = Stage(url, {"a failover": failover}, count=8, fresh_for=120, moves_clock=False)
            report = ProofRun("valkey", stage, tmp_path, seed=1, workers=2).go(["a failover"])
        assert bool(report.broken[LOST]) is (replicas == 0)

    @pytest.mark.timeout(200)
    def test_prove_leaves_nothing_on_a_server(self, valkey: Server, tmp_path: Path) -> None:
        """Its connections go through a proxy; the user's own entries, even of these ids, stay."""
        told = tmp_path / "proof.json"
        address = valkey.url(timeout="2s")
        before = asyncio.run(own_entries(address, is_new=True))
        of_others = valkey.command("KEYS", "*").split("\r\n")
        options = ("--minutes", "0.01", "--seed", "5", "--workers", "2", "--json", str(told))
        found = call("prove", address, *options)
        begun = "Proving stillfresh for 0.6 s, seed 5. Ctrl-C ends it early, with the report.\n"
        assert (found.exit_code, found.stderr) == (0, begun)
        assert "every promise was kept" in found.stdout
        assert re.search(r"^fresh_for +1.0 s$", found.stdout, re.MULTILINE)
        (report,) = json.loads(told.read_text())["reports"]
        assert report["seed"] == 5
        assert report["counts"]["served"] > 0
        assert set(report["ages"]) == {"p50", "p99", "max"}
        left = set(valkey.command("KEYS", "*").split("\r\n")) - set(of_others)
        for key in left:
            if "prove-" not in key:  # the length of another
                continue
            # A deletion leaves a trace for a minute.
            assert 0 < int(valkey.command("PTTL", key).strip(":\r\n")) <= 60_000
        assert asyncio.run(own_entries(address)) == before

    def test_prove_of_a_file_uses_another_file(self, tmp_path: Path) -> None:
        """Nothing is left, and the file is not made."""
        found = call(
            "prove",
            str(tmp_path / "cache.db"),
            "--minutes",
            "0.01",
            "--workers",
            "2",
            "--seed",
            "1",
        )
        assert found.exit_code == 0
        assert "invalidations lost" in found.stdout
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["memory://"], "memory:// is in one process; name a store that processes share\n"),
            (["redis://h/0?tenant=acme"], "a proof has its own; leave '?tenant=' out"),
            (
                ["cache.db", "--peer", "cashews"],
                "--peer cashews: runs on one Redis or Valkey server",
            ),
            (
                ["redis://127.0.0.1:1/0?timeout=1s"],
                "('127.0.0.1', 1); is it running, and is the port right?",
            ),
            (
                ["cache.db", "--json", "no/such/folder/proof.json"],
                "No such file or directory. Try: main prove --help",
            ),
            (["cache.db", "--json"], "Option '--json' requires an argument. Try: main prove"),
            (["cache.db", "--minutes", "20s"], "'20s' is not a number of minutes, such as 0.33"),
            (["cache.db", "--minutes", "0"], "'0' is not a number of minutes, such as 0.33"),
            (["cache.db", "--minutes", "nan"], "'nan' is not a number of minutes, such as 0.33"),
        ],
    )
    def test_prove_refuses_what_it_cannot_prove_in_one_line(
        self, arguments: list[str], said: str
    ) -> None:
        """One line; no process is started."""
        found = call("prove", *arguments)
        assert found.exit_code in {1, 2}
        assert said in found.stderr
        assert len(found.stderr.splitlines()) == 1

    def test_a_first_signal_ends_prove_with_its_report_and_a_second_at_once(self) -> None:
        """The first is for the report; afterwards signals do what they did before."""
        before = signal.getsignal(signal.SIGTERM)
        with ending() as over:
            signal.raise_signal(signal.SIGTERM)
            assert over.is_set()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is before

    def test_a_run_that_ended_early_is_judged(self, tmp_path: Path) -> None:
        """No fault is begun."""
        over = threading.Event()
        over.set()
        stage = Stage(f"sqlite:///{tmp_path}/cache.db", {})
        run = ProofRun("sqlite", stage, tmp_path, seed=1, workers=2, over=over)
        report = run.go(run.decks(1_000))
        assert report.is_cut_short
        assert (report.sentences, sum(report.faults.values())) == ([], 0)

    def test_prove_reports_though_the_store_is_gone_at_the_end(self, tmp_path: Path) -> None:
        """The stage says which entries could not be deleted."""
        binary = binary_of("valkey")
        assert binary is not None
        with serving(binary, tmp_path) as server, proving(f"{server.address}?timeout=1s") as stage:
            server.stop()
        assert stage.left.startswith("the entries of prove-")

    @pytest.mark.parametrize("promise", CHECKS)
    def test_the_report_of_prove_names_a_broken_promise(
        self, promise: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With an example, and with what it says of the store where that is known."""
        report = Report("valkey", 1, 2, counts=Counter(served=1))
        report.broken = {LOST: [], promise: ["sku-1: was lost"]}
        tell([report])
        said = capsys.readouterr().out
        assert f"valkey: broken (1): {promise}.\n  sku-1: was lost\n" in said
        assert MEANING.get(promise, "") in said
        assert "every promise was kept" not in said

    def test_the_report_of_prove_explains_its_counts(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """T15: the nines that the reads support, and what was excused or not judged, if any was."""
        report = Report("valkey", 1, 2, counts=Counter(served=2000, blind=1000), broken={LOST: []})
        tell([report])
        said = capsys.readouterr().out
        assert "1,000 of 2,000 reads were without the store" in said
        assert re.search("2,000 reads were judged.*2.8 nines", said)
        assert "StoreError" not in said
        assert "were gone" not in said
        report.counts.update(together=1, refused=1, forgotten=3, excused=7, uncertain=11, failed=5)
        report.unjudged["the read failed, and gave no answer"] = 5
        report.wrong = 2
        tell([report])
        said = capsys.readouterr().out
        assert re.search(r"^copies that were gone +3$", said, re.MULTILINE)
        assert "7 reads got an older copy" in said
        assert "11 reads got a copy from before an invalidation that was never confirmed" in said
        assert "5 reads were not judged: the read failed, and gave no answer." in said
        assert "2,000 reads were judged, 2 of them wrong: 2.5 nines." in said
        assert "loaded again" in said
        assert "`invalidate` raised StoreError" in said
        assert "while the store is out of reach" in said

    @pytest.mark.parametrize(("failed", "fails"), [(10, False), (11, True)])
    def test_prove_fails_if_more_than_a_percent_of_the_reads_is_not_judged(
        self, failed: int, fails: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """T15: then nothing is proved; the sentence names the reasons."""
        counts = Counter(served=1000 - failed, failed=failed)
        report = Report("valkey", 1, 2, counts=counts, broken={LOST: []})
        report.unjudged["the read failed, and gave no answer"] = failed
        tell([report])
        said = capsys.readouterr().out
        assert bool(report.sentences) == fails
        assert ("1.1% of the reads were not judged, and at most 1% may be" in said) == fails

    def test_prove_ends_in_one_table_for_a_readme(self, capsys: pytest.CaptureFixture[str]) -> None:
        """T15: each library with its judged reads, those that were wrong, and the nines."""
        own = Report("stillfresh", 1, 2, counts=Counter(served=30_000), broken={LOST: []})
        peer = Report("other", 1, 2, peer="other", counts=Counter(served=90, failed=10))
        peer.broken = {LOST: ["sku-1: was lost"]}
        peer.unjudged["the read failed, and gave no answer"] = 10
        peer.wrong = 1
        tell([own, peer])
        table = capsys.readouterr().out.splitlines()[-4:]
        assert table == [
            "| | reads judged | not judged | wrong | supported nines |",
            "| --- | ---: | ---: | ---: | ---: |",
            "| stillfresh | 30,000 | 0.0% | 0 | 4.0 |",
            "| other | 90 | 10.0% | 1 | 1.2 |",
        ]
        tell([own])
        assert "supported nines |" not in capsys.readouterr().out

    @pytest.mark.parametrize("promise", CHECKS)
    def test_each_promise_of_prove_is_documented(self, promise: str) -> None:
        """In the words of the report."""
        page = (ROOT / "docs" / "reliability.md").read_text()
        assert f". {promise}.\n" in page

    @pytest.mark.parametrize(
        ("url", "place", "behind"),
        [
            ("redis://u:p@h:7/1?prefix=a", ("h", 7), "redis://u:p@127.0.0.1:9/1?prefix=a"),
            ("valkey://h", ("h", 6379), "valkey://127.0.0.1:9"),
            ("postgresql://u@h/d?schema=s", ("h", 5432), "postgresql://u@127.0.0.1:9/d?schema=s"),
            (
                "dynamodb://t?bucket=b&endpoint=http://h:8",
                ("h", 8),
                "dynamodb://t?bucket=b&endpoint=http%3A%2F%2F127.0.0.1%3A9",
            ),
            ("rediss://h", None, ""),
            ("redis+cluster://h:1", None, ""),
            ("postgresql://a,b/d", None, ""),
            ("postgresql://h/d?sslmode=verify-full", None, ""),
            ("dynamodb://t?bucket=b", None, ""),
            ("sqlite:///a.db", None, ""),
        ],
    )
    def test_prove_puts_a_proxy_before_a_single_plain_server_only(
        self, url: str, place: tuple[str, int] | None, behind: str
    ) -> None:
        """Not where a certificate or several servers would notice."""
        assert tcp_place(url) == place
        assert place is None or through(url, 9) == behind

    def test_prove_runs_and_judges_a_peer_library(self, valkey: Server, tmp_path: Path) -> None:
        """Its own loads, reads and invalidations are told and judged, as far as it promises any."""
        assert checked_peer("cashews", valkey.address) == "cashews"
        with proving(valkey.address, "cashews") as stage:
            report = ProofRun("cashews", stage, tmp_path, seed=1, workers=2).go([])
        assert min(report.counts[it] for it in ("served", "load", "loaded")) > 0
        assert LOST in report.broken
        with pytest.raises(ConfigError, match="pip install no_such"):
            checked_peer("no_such_library", valkey.address)

    @pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning")
    @pytest.mark.parametrize("name", sorted(set(PEERS) - {"nginx"}))
    async def test_prove_notes_that_a_peer_could_not_reach_the_store(
        self, name: str, valkey: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its answer is judged all the same: its caller takes it as it is."""
        monkeypatch.setattr(Redis, "execute_command", Redis.execute_command)  # put back after it
        move_clock(tmp_path / "clock", 0.0)
        log, clock = Log(tmp_path / "log"), MovedClock(tmp_path / "clock")
        with Proxy(HOST, valkey.port) as proxy:
            stage = Stage(f"redis://{HOST}:{proxy.port}/0?tenant=prove-x", {}, peer=name)
            job = ProofJob(tmp_path / "log", tmp_path / "clock", tmp_path / "said", {}, 0.1, stage)
            shelf = PEERS[name](job, log, clock)
            assert [it.blind for it in await shelf.read(["sku-1"])] == [False]
            proxy.set_away(True)
            try:
                outcome = f"blind: {(await shelf.read(['sku-1']))[0].blind}"
            except LoadFailed:
                outcome = "failed"
            await shelf.close()
        log.close()
        assert outcome == {"cashews": "blind: True", "aiocache": "failed"}[name]
        assert shelf.troubles > 0
