"""`stillfresh plan`, on the recording that comes with the docs."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stillfresh.cli import planning
from stillfresh.lab.plan import Candidate, replay, traffic_of
from stillfresh.lab.plan.rules import Figures
from stillfresh.lab.plan.traffic import Traffic
from tests.kit.cli import call, said

ROOT = Path(__file__).parent.parent.parent
READS = str(ROOT / "docs" / "examples" / "reads.jsonl")
PAGE = (ROOT / "docs" / "plan.md").read_text()


def shown() -> list[tuple[str, str]]:
    blocks = re.findall(
        r"```sh\n(stillfresh plan [^\n]*)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL
    )
    assert len(blocks) == 3
    return blocks


@pytest.fixture(scope="module", autouse=True)
def _each_replay_runs_once() -> Iterator[None]:
    """Most plans try the same times on the same recording, and a replay gives the same figures."""
    replayed = replay.replayed
    figures: dict[tuple[int, Candidate | None], tuple[Traffic, Figures]] = {}

    def replayed_once(
        traffic: Traffic, terms: Candidate | None, advance: Callable[[int], None] = lambda _: None
    ) -> Figures:
        key = (id(traffic), terms)
        if key not in figures:
            figures[key] = (traffic, replayed(traffic, terms, advance))
        return figures[key][1]

    read_once = cache(traffic_of)

    def traffic_of_file(file: str | Path) -> tuple[dict[str, Traffic], int | None]:
        is_of_the_docs = Path(file).resolve() == Path(READS)
        return read_once(READS) if is_of_the_docs else traffic_of(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "replayed", replayed_once)
        patch.setattr(planning, "traffic_of", traffic_of_file)
        yield


class TestPlan:
    @pytest.mark.parametrize(("command", "output"), shown(), ids=["met", "not met", "more waiting"])
    def test_the_output_of_plan_in_the_docs_is_real(
        self, command: str, output: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each command of docs/plan.md is run, and each line of its output is there."""
        monkeypatch.chdir(ROOT)
        lines = said(*shlex.split(command)[1:]).splitlines()
        assert [it for it in output.splitlines() if it not in lines] == []
        assert any(it.startswith("P  ") and "fresh_for=" in it for it in lines)
        assert "age at serving, p99 (R as recorded, P proposed, . tried)" in lines
        assert any(re.match(r" +\|.*[PR.]", it) for it in lines)

    @pytest.mark.parametrize("objective", ["p99<20s", "p99<60s", "p99<5m", "p50<2s", "stale<50%"])
    def test_g23_plan_never_lets_more_reads_wait(self, objective: str) -> None:
        """G23: whatever is asked for, except for less waiting; both times are proposed."""
        found = json.loads(said("plan", READS, "--objective", objective, "--json"))
        proposed = found["choice"]["chosen"]["price"]
        assert proposed["waited"] <= found["recorded"]["price"]["waited"]
        assert set(proposed["terms"]) == {"fresh_for", "stale_for"}

    def test_g23_plan_says_what_more_waiting_would_allow(self) -> None:
        """G23: and how to ask for it; what it says to write is then met."""
        told = said("plan", READS, "--objective", "p99<10s")
        match = re.search(r"--objective \"(p99<10s, waited<[\d.]+%)\"", told)
        assert match is not None, told
        assert "more reads wait than today (30.7%)" in told
        asked = json.loads(said("plan", READS, "--objective", match[1], "--json"))
        assert "price" not in asked["choice"]["missed"]
        assert asked["choice"]["chosen"]["price"]["waited"] > asked["recorded"]["price"]["waited"]

    def test_g23_the_help_of_plan_lists_the_objectives(self) -> None:
        """G23: each name that can be written, with what it means."""
        told = said("plan", "--help")
        for name in ("p50<10s", "p99<60s", "stale<5%", "waited<20%"):
            assert re.search(rf"^  +{name} +\w", told, re.MULTILINE), name

    def test_plan_json_has_every_figure_of_every_policy(self) -> None:
        """With every figure of every policy that was tried."""
        found = json.loads(said("plan", READS, "--budget", "1/s", "--json"))
        assert found["choice"]["is_met"] is True
        assert found["choice"]["total"] <= found["budget"] == 1
        assert found["recorded"]["price"]["terms"] == {"fresh_for": 10.0, "stale_for": 10.0}
        proposed = found["choice"]["chosen"]["price"]
        assert proposed in found["tried"]["price"]
        assert set(proposed) >= {"requests", "p50", "p99", "stale", "waited", "bytes"}

    def test_the_html_report_of_plan_loads_nothing(self, tmp_path: Path) -> None:
        """No script, nothing from elsewhere, light and dark; a name is text, whatever is in it."""
        page, reads = tmp_path / "plan.html", tmp_path / "<b>.jsonl"
        reads.write_text(Path(READS).read_text()[:9_999].rpartition("\n")[0] + "\n")
        said("plan", str(reads), "--objective", "p99<30s", "--html", str(page))
        text = page.read_text()
        parser = Tags()
        parser.feed(text)
        assert not parser.names & {"script", "link", "img", "iframe", "b"}
        assert "://" not in text
        assert "color-scheme: light dark" in text
        assert text.count("<td>P</td>") == text.count("<td>R</td>") == text.count("<table>") == 2
        assert "requests a second, 99% of reads younger than" in text

    @pytest.mark.parametrize(
        ("arguments", "code", "told"),
        [
            ([READS, "--objective", "p99"], 2, "objective: cannot read 'p99'; write p50 or p99"),
            ([READS, "--budget", "fast"], 2, "budget: cannot read 'fast'; write requests and"),
            ([str(ROOT / "README.md")], 2, "README.md: line 1: not a recording of stillfresh"),
            (["missing.jsonl"], 1, "missing.jsonl: No such file or directory"),
        ],
    )
    def test_mistakes_of_plan_are_one_line(
        self, arguments: list[str], code: int, told: str
    ) -> None:
        """With the exit codes of every command."""
        result = call("plan", *arguments)
        assert result.exit_code == code
        assert told in result.stderr
        assert len(result.stderr.splitlines()) == 1

    def test_plan_notes_a_line_that_is_cut_off(self, tmp_path: Path) -> None:
        """The rest is planned with; a file without reads is an error."""
        cut = tmp_path / "cut.jsonl"
        cut.write_text(Path(READS).read_text()[:9_999])
        result = call("plan", str(cut), "--objective", "p99<20s")
        assert result.exit_code == 0
        lines = cut.read_text().count("\n") + 1
        assert result.stderr == f"Note: line {lines} is cut off, and left out\n"
        cut.write_text('["stillfresh-recording",1,1.0]\n')
        assert "no reads were recorded" in call("plan", str(cut)).stderr

    def test_plan_refuses_a_recording_that_is_too_short(self, tmp_path: Path) -> None:
        """One read says nothing of any policy; the error says how long to record."""
        short = tmp_path / "short.jsonl"
        kind, read = '["kind","p",9,0,0,0,9,4,30]', '["use",1.0,"p",["a"],"read"]'
        short.write_text(f'["stillfresh-recording",1,1.0]\n{kind}\n{read}\n')
        told = call("plan", str(short), "--budget", "1/s").stderr
        assert "covers 0.001 s, too short" in told
        assert "record 2 s" in told


class Tags(HTMLParser):
    """The names of all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        self.names.add(tag)
