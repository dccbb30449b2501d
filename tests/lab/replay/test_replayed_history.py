"""T15: a history of the simulator as data and as a page: what it tells, and that it is repeated."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stillfresh.errors import ConfigError
from stillfresh.lab.replay import SCENARIOS, ReplayHistory, page_of, play_of, replayed
from stillfresh.testing.simulator.faults import planned
from stillfresh.testing.simulator.record import MOST, RunRecorder
from stillfresh.testing.simulator.simulate import run
from tests.kit.cli import call
from tests.kit.processes import ROOT

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def reads_of(history: ReplayHistory) -> list[tuple[str, str, bool]]:
    return [
        (moment["text"], moment["verdict"], moment["is_right"])
        for moment in history.moments
        if moment["what"] == "read"
    ]


def test_the_law_refuses_a_value_from_before_an_invalidation() -> None:
    """The lease was voided, the publication refused, and later readers get the new version."""
    history = replayed(play_of("invalidation"), 3)
    assert history.broken is None
    assert history.law_at is not None
    voided = [span for span in history.spans if span["ending"] == "voided"]
    assert len(voided) == 1
    assert voided[0]["ended"] < history.law_at
    early, *later = reads_of(history)
    assert early[:2] == ("process 1 is served price a: version 1", "STALE")
    assert all("version 2" in text and verdict == "FRESH" for text, verdict, _ in later)
    assert all(is_right for _, _, is_right in reads_of(history))


def test_without_the_law_the_old_value_comes_back() -> None:
    """Every reader after the invalidation is served version 1 as fresh, which is wrong."""
    history = replayed(play_of("invalidation-without-the-law"), 3)
    assert history.broken is not None
    assert history.law_at is not None
    _, *later = reads_of(history)
    assert later
    assert all("version 1" in text for text, _, _ in later)
    assert all(verdict == "FRESH" and not is_right for _, verdict, is_right in later)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_seed_gives_the_same_page(name: str) -> None:
    """Byte by byte, and its steps are in the order of time."""
    first = replayed(play_of(name), 11)
    assert page_of(first) == page_of(replayed(play_of(name), 11))
    assert [step.at for step in first.steps] == sorted(step.at for step in first.steps)
    assert first.steps


@pytest.mark.parametrize("seed", range(5))
def test_a_recorder_changes_nothing_about_a_run(seed: int) -> None:
    """It draws no dice and schedules nothing."""
    play = play_of("visitors")
    plan = planned(seed, play.faults)
    plain = run(play.scenario, plan)
    recorded = run(play.scenario, plan, RunRecorder())
    assert (plain.steps, plain.trace) == (recorded.steps, recorded.trace)


def test_late_doubled_and_lost_messages_are_marked() -> None:
    """Over a few seeds each of them happens, and a lost one never arrives."""
    marks: dict[str, bool] = {}
    for seed in range(12):
        for message in replayed(play_of("visitors"), seed).messages:
            marks[message["mark"]] = message["arrived"] is not None
    assert marks == {"": True, "late": True, "twice": True, "lost": False}


def test_a_recorder_is_bounded() -> None:
    """What is beyond the limit is counted."""
    recorder = RunRecorder()
    for _ in range(MOST + 3):
        recorder.happened(1, "read", "a read")
    assert (len(recorder.moments), recorder.left_out) == (MOST, 3)


def test_data_cannot_end_the_script_of_the_page() -> None:
    """A key may contain any text."""
    history = replayed(play_of("invalidation"), 3)
    history.story = "</script><script>alert(1)</script>"
    page = page_of(history)
    assert "<script>alert" not in page
    [data] = DATA.findall(page)
    assert json.loads(data)["story"] == history.story


def test_a_scenario_of_your_own_is_named_by_its_import_path() -> None:
    """And one that is not there is refused, with the names that are."""
    play = play_of("tests.simulation.engine_scenarios:over_a_network")
    assert replayed(play, 1).steps
    with pytest.raises(ConfigError, match="there are invalidation,"):
        play_of("nothing")
    with pytest.raises(ConfigError, match="cannot import"):
        play_of("stillfresh:nothing")


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    """It says where, how many steps, and whether a promise was broken."""
    page = tmp_path / "page.html"
    done = call("replay", "--scenario", "invalidation", "--out", str(page))
    assert "every promise was kept" in done.output
    assert page.read_text().startswith("<!doctype html>")
    wrong = call("replay", "--scenario", "nothing")
    assert wrong.exit_code == 2
    assert "there are invalidation" in wrong.output


def test_the_command_finds_a_scenario_in_the_current_folder(tmp_path: Path) -> None:
    """As `python -m` does: the installed program has only its own folder on the path."""
    (tmp_path / "my_tests").mkdir()
    (tmp_path / "my_tests" / "scenarios.py").write_text(
        "from stillfresh.lab.replay.scenarios import visitors as of_orders\n"
    )
    program = Path(sys.executable).with_name("stillfresh")
    command = [str(program), "replay", "--scenario", "my_tests.scenarios:of_orders"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "replay.html").exists()


@pytest.mark.parametrize("name", ["invalidation", "invalidation-without-the-law"])
def test_the_pages_in_the_docs_tell_what_the_code_plays(name: str) -> None:
    """T15: `make diagrams` writes them; another Python may give other times."""
    page = (ROOT / "docs" / "histories" / f"{name}.html").read_text()
    played = replayed(play_of(name), 3)
    [data] = DATA.findall(page)
    told = json.loads(data)
    assert DATA.sub("", page) == DATA.sub("", page_of(played))
    assert (told["broken"] is None) == (played.broken is None)
    reads = [
        (moment["text"], moment["verdict"], moment["is_right"])
        for moment in told["moments"]
        if moment["what"] == "read"
    ]
    assert reads == reads_of(played)
