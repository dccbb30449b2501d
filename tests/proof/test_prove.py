"""T11: `stillfresh prove`: what it does to a store, and that it finds what a store loses."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stillfresh import ConfigError
from stillfresh.prove import LOST, MEANING, ProofRun, Stage, checked_peer, proving
from stillfresh.prove.places import tcp_place, through
from stillfresh.prove.proxy import Proxy
from stillfresh.prove.witness import events_of
from tests.kit.cli import call
from tests.kit.servers.cluster import until
from tests.kit.servers.valkey import HOST, Server, binary_of, serving


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """A primary and its replica, which follows asynchronously."""
    binary = binary_of("valkey")
    assert binary is not None
    with ExitStack() as stack:
        primary, replica = (
            stack.enter_context(
                serving(binary, made(tmp_path / name), "--repl-diskless-sync-delay", "0")
            )
            for name in ("primary", "replica")
        )
        replica.command("REPLICAOF", HOST, str(primary.port))
        until(lambda: "link_status:up" in replica.command("INFO replication"), "no replica")
        yield primary, replica


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


class TestT11Prove:
    @pytest.mark.timeout(200)
    def test_a_failover_that_loses_an_invalidation_is_found(
        self, pair: tuple[Server, Server], tmp_path: Path
    ) -> None:
        """The replica takes over without what the primary had acknowledged after it fell behind."""
        primary, replica = pair

        @contextmanager
        def failover(_: random.Random) -> Iterator[None]:
            primary.command("WAIT", "1", "30000")
            replica.command("REPLICAOF", "NO", "ONE")
            since = time.monotonic()

            def lost() -> set[str]:
                events = events_of((tmp_path / "log").read_bytes().rpartition(b"\n")[0])
                return {it.key for it in events if it.what == "invalidated" and it.at > since}

            until(lambda: len(lost()) >= 5, "nobody invalidates")
            proxy.lead_to(HOST, replica.port)
            yield

        with Proxy(HOST, primary.port) as proxy:
            url = f"redis://{HOST}:{proxy.port}/0?prefix=failover&timeout=2s"
            stage = Stage(url, {"a failover": failover}, keys=8, fresh_for=120, moves_clock=False)
            report = ProofRun("valkey", stage, tmp_path, seed=1, workers=2).go(["a failover"])
        assert report.broken[LOST]
        assert "wait_replicas=1" in MEANING[LOST]

    @pytest.mark.timeout(200)
    def test_a_server_keeps_its_promises_and_no_trace(self, valkey: Server, tmp_path: Path) -> None:
        """Its connections go through a proxy; words, a JSON report, and exit code 0."""
        told = tmp_path / "proof.json"
        address = f"{valkey.address}?timeout=2s"
        options = ("--minutes", "0.01", "--seed", "5", "--workers", "2", "--json", str(told))
        found = call("prove", address, *options)
        assert (found.exit_code, found.stderr) == (0, "")
        assert "every promise was kept" in found.stdout
        (report,) = json.loads(told.read_text())["reports"]
        assert report["seed"] == 5
        assert report["counts"]["served"] > 0
        assert set(report["ages"]) == {"p50", "p99", "max"}
        assert "prove-" not in valkey.command("KEYS", "*")

    def test_a_file_is_proved_beside_itself(self, tmp_path: Path) -> None:
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
            (["memory://"], "memory:// is in one process"),
            (["redis://h/0?tenant=acme"], "tenant: a proof has its own"),
            (["cache.db", "--peer", "cashews"], "--peer: runs on one Redis or Valkey server"),
            (["redis://127.0.0.1:1/0?timeout=1s"], "127.0.0.1"),
        ],
    )
    def test_what_cannot_be_proved_is_told_at_once(self, arguments: list[str], said: str) -> None:
        """One line; no process is started."""
        found = call("prove", *arguments)
        assert found.exit_code in {1, 2}
        assert said in found.stderr
        assert len(found.stderr.splitlines()) == 1

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
    def test_a_proxy_stands_before_one_server(
        self, url: str, place: tuple[str, int] | None, behind: str
    ) -> None:
        """Not where a certificate or several servers would notice."""
        assert tcp_place(url) == place
        assert place is None or through(url, 9) == behind

    def test_a_peer_runs_the_same_history(self, valkey: Server, tmp_path: Path) -> None:
        """Its own loads, reads and invalidations are told and judged, as far as it promises any."""
        assert checked_peer("cashews", valkey.address) == "cashews"
        with proving(valkey.address, "cashews") as stage:
            report = ProofRun("cashews", stage, tmp_path, seed=1, workers=2).go([])
        assert min(report.counts[it] for it in ("served", "load", "loaded")) > 0
        assert LOST in report.broken
        with pytest.raises(ConfigError, match="the library is not installed"):
            checked_peer("no_such_library", valkey.address)
