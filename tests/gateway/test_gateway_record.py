"""`stillfresh serve --record`: what several workers serve is recorded in one file."""

import json
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from stillfresh.gateway.config import Mistakes, settings_of
from stillfresh.lab.plan import planned, traffic_of
from tests.kit.cli import call
from tests.kit.serve import Proxy


class TestServe:
    @pytest.mark.parametrize("workers", ["1", "2"])
    def test_serve_records_every_visit_for_planning(self, tmp_path: Path, workers: str) -> None:
        """Visits of a page, by whatever worker; all of them are there when it has ended."""
        reads, store = tmp_path / "reads.jsonl", f"sqlite:///{tmp_path / 'site.db'}"
        options = ["--record", str(reads), "--route", "/*=1m", "--workers", workers]
        with ExitStack() as stack:
            proxy = Proxy(stack, "--store", store, *options)
            for number in range(30):
                assert proxy.get(f"/page-{number % 3}").status_code == 200
            proxy.process.send_signal(signal.SIGTERM)
            assert proxy.process.wait(30) == 0
        lines = [json.loads(line) for line in reads.read_text().splitlines()]
        assert sum(len(line[3]) for line in lines if line[-1] == "read") == 30
        assert len({line[3][0] for line in lines if line[-1] == "read"}) == 3
        assert [line[-1][0] for line in lines if line[0] == "load"] == [60.0] * 3
        kinds, cut = traffic_of(reads)
        assert (list(kinds), cut) == (["page"], None)
        assert planned(kinds, [], None).recorded["page"].terms.fresh_for == 60

    def test_a_recording_that_cannot_be_written_stops_the_start(self, tmp_path: Path) -> None:
        """One line, and exit code 1."""
        missing = str(tmp_path / "missing" / "reads.jsonl")
        found = call(
            "serve", "--upstream", "http://127.0.0.1:9", "--port", "0", "--record", missing
        )
        assert (found.exit_code, found.stdout) == (1, "")
        assert found.stderr == f"Error: {missing}: No such file or directory\n"

    @pytest.mark.parametrize("share", [0, 1.5, "most", True])
    def test_a_record_share_outside_0_to_1_is_refused(self, share: object) -> None:
        """The mistake names its key."""
        tables = {"pages": {"upstream": "http://127.0.0.1:9"}, "server": {"record_share": share}}
        with pytest.raises(Mistakes, match=r"^server\.record_share: "):
            settings_of(tables)
