"""T6, T8: our own lines of the behaviours' table; that a bench measures what users run, and ends.

The peers are not here: they are installed with the benchmarks (`make bench`).
"""

import ast
import http.client
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from benchmarks import __main__ as command
from benchmarks import behaviours, scale
from benchmarks.compare import compared
from benchmarks.harness import Row, Section
from benchmarks.pages import serve
from benchmarks.plan import PARTS, Pace, Part
from benchmarks.report import page, page_with, summary
from benchmarks.runner import run
from benchmarks.scale_plots import plot
from benchmarks.subjects import OURS, Subject

ROOT = Path(__file__).parent.parent
SCENARIOS = list(behaviours.SCENARIOS)
EXPECTED = ["yes", "yes", "1", "1", "1", "yes, in "]
CASES = list(zip(SCENARIOS, EXPECTED, strict=True))


def unsaid(_: str) -> None:
    """Nobody watches."""


class TestT6Ours:
    @pytest.mark.parametrize(("name", "expected"), CASES)
    def test_stillfresh_does_well_in_every_scenario(
        self, name: str, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Cancelled waiter, fill after invalidate, three stampedes, a holder that is killed."""
        monkeypatch.setattr(behaviours, "ROUNDS", 1)
        monkeypatch.setattr(behaviours, "LEASE_FOR", 0.5)
        assert behaviours.examined(behaviours.SCENARIOS[name], OURS[0]).startswith(expected)

    def test_a_scenario_that_a_library_lacks_is_a_dash(self) -> None:
        """A line for each library under the scenarios, a cell for each scenario."""
        head, *lines = behaviours.compared([Subject("a", ""), Subject("b", "")], unsaid)
        assert head == ["library", *SCENARIOS]
        assert lines == [["a", *"——————"], ["b", *"——————"]]

    def test_a_scenario_that_fails_is_a_cell_of_the_table(self) -> None:
        """The others go on."""

        def hangs(_: Subject) -> str:
            raise TimeoutError

        def breaks(_: Subject) -> str:
            raise AssertionError("a process did not start")

        assert behaviours.examined(hangs, OURS[0]) == "**hangs**"
        assert behaviours.examined(breaks, OURS[0]) == "not examined: a process did not start"


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Part]:
    """A part whose `section(progress)` has that body."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def made(body: str) -> Part:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        text = "from benchmarks.harness import Row, Section\nimport subprocess, time\n"
        (tmp_path / "measured_here.py").write_text(f"{text}def section(progress):\n{lines}")
        return Part("here", "Here", "measured_here", 1, limit=30)

    return made


SERVER = """\
server = subprocess.Popen(["sleep", "600"])
progress(str(server.pid))
"""


def ended(pid: int) -> bool:
    """Gone, or nothing but a number that nobody has asked for yet."""
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = stat.read_text().rpartition(") ")[2][:1]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


class TestT6Bench:
    def test_a_benchmark_part_reports_its_steps_and_section(
        self, part: Callable[[str], Part]
    ) -> None:
        """What its servers print is not taken for one."""
        steps: list[str] = []
        body = "progress('first')\nsubprocess.run(['echo', '{}'])\nprint('{}')\n"
        found = run(part(f"{body}return Section('T', [Row('E1', 'a', 2.0, 3)])"), steps.append)
        assert found == Section("T", [Row("E1", "a", 2.0, 3)])
        assert steps == ["first"]

    def test_a_failing_benchmark_part_says_why(self, part: Callable[[str], Part]) -> None:
        """And leaves no server behind."""
        pids: list[str] = []
        found = run(part(f"{SERVER}raise RuntimeError('no wrk here')"), pids.append)
        assert found == Section("Here", failed="RuntimeError: no wrk here")
        assert ended(int(pids[0]))

    def test_a_hanging_benchmark_part_is_ended(self, part: Callable[[str], Part]) -> None:
        """With what it started."""
        hanging = part("time.sleep(600)")
        found = run(Part("here", "Here", hanging.module, 1, limit=0.01), unsaid)
        assert found.failed == "it took more than 0.01 s"

    def test_an_interrupted_benchmark_part_cleans_up(
        self, part: Callable[[str], Part], tmp_path: Path
    ) -> None:
        """Its `finally` runs, and no server is left."""
        pids: list[str] = []

        def interrupt(pid: str) -> None:
            pids.append(pid)
            raise KeyboardInterrupt

        away = f"open({str(tmp_path / 'away')!r}, 'w')"
        body = f"try:\n    {SERVER.replace(chr(10), chr(10) + '    ')}time.sleep(600)"
        with pytest.raises(KeyboardInterrupt):
            run(part(f"{body}\nfinally:\n    {away}"), interrupt)
        assert (tmp_path / "away").exists()
        assert ended(int(pids[0]))

    def test_missed_targets_come_first_on_the_benchmarks_page(self) -> None:
        """And what could not be measured is named beside them."""
        kept = Row("E14", "quick", 1.0, 2.0)
        missed = Row("M11", "slow", 3.0, 2.0, tried="a ring")
        three = Section("Three", [kept], missing="Next.js: no npm")
        text = page([Section("One", [kept, missed]), Section("Two", failed="no wrk"), three])
        first = text.partition("## The machine")[0]
        assert "| M11 | slow | 3.00 × | ≤ 2 × | a ring |" in first
        assert "quick" not in first
        assert "- Two: no wrk.\n- Three: Next.js: no npm." in first
        assert text.index("## The machine") < text.index("## One") < text.index("## Two")
        assert "None in this run." in summary([Section("One", [kept])])

    def test_sections_that_are_measured_again_replace_those_of_the_page(self) -> None:
        """T8: the targets that they miss, too; all else stays as it was measured."""
        kept = Row("E14", "quick", 1.0, 2.0)
        missed = Row("M11", "slow", 3.0, 2.0, tried="a ring")
        again = Row("S14", "put", 3.5, 2.0, tried="one script")
        two = Section("Two", [Row("S14", "get", 9.0, 2.0)], missing="nginx: not here")
        before = page([Section("One", [kept, missed]), two, Section("Three", failed="no wrk")])
        three = Section("Three", [kept])
        text = page_with(before, [Section("Two", [again]), three], "2026-11-19")
        expected = page([Section("One", [kept, missed]), Section("Two", [again]), three])
        assert text.replace("\n\nMeasured again on 2026-11-19.", "") == expected
        assert text.count("Measured again on 2026-11-19.") == 2

    def test_a_partial_benchmark_run_writes_its_sections_into_the_page(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        written = tmp_path / "page.md"
        titles = [part.title for part in PARTS]
        written.write_text(page([Section(title, notes="before") for title in titles]))
        monkeypatch.setattr(sys, "argv", ["benchmarks", "--write", "--only", PARTS[0].name])
        monkeypatch.setattr(command, "run", lambda part, _: Section(part.title, notes="again"))
        monkeypatch.setattr(command, "PAGE", written)
        assert command.main() == 0
        assert written.read_text().count("before") == len(PARTS) - 1
        assert f"## {PARTS[0].title}\n\nagain\n\nMeasured again on " in written.read_text()

    def test_an_interrupted_benchmark_run_writes_nothing(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        """What was measured until then is printed."""

        def interrupted(measured: Part, _: object) -> Section:
            if measured is PARTS[1]:
                raise KeyboardInterrupt
            return Section(measured.title, notes="measured")

        monkeypatch.setattr(sys, "argv", ["benchmarks", "--write"])
        monkeypatch.setattr(command, "run", interrupted)
        monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
        assert command.main() == 130
        told = capsys.readouterr()
        assert told.out == f"## {PARTS[0].title}\n\nmeasured\n"
        assert "interrupted: nothing was written" in told.err
        assert not (tmp_path / "page.md").exists()

    def test_every_benchmark_part_is_in_the_help(self) -> None:
        """With its rules and about how long it takes."""
        text = command.parser().format_help()
        assert all(f"{part.name:12} {part.title}" in text for part in PARTS)

    def test_the_estimated_time_left_follows_the_pace_so_far(self) -> None:
        """Twice as slow as expected until now: so is the rest."""
        pace = Pace([Part("a", "", "", 10), Part("b", "", "", 30)], began=100.0)
        assert pace.left(100.0) == 40
        assert pace.left(105.0) == 35
        pace.taken.append(20.0)
        assert pace.left(120.0) == 60
        assert pace.left(140.0) == 40
        assert pace.left(500.0) == pytest.approx(6)
        pace.taken.append(380.0)
        assert pace.left(500.0) == 0


class TestT8AsUsed:
    def test_benchmarked_pages_are_served_by_the_serve_command(self) -> None:
        """The port that wrk asks is that of `stillfresh serve`; no hit needs its site."""
        with serve(upstream=9) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/healthz")
            assert connection.getresponse().read() == b'{"status":"alive"}'
            connection.close()

    def test_benchmarks_make_caches_from_addresses(self) -> None:
        """`Cache(url)` and `SyncCache(url)`, but for growth: a million copies need more room."""
        made: dict[str, set[str]] = {}
        for file in (ROOT / "benchmarks").glob("*.py"):
            for call in ast.walk(ast.parse(file.read_text())):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in {"Cache", "SyncCache"}:
                    given = ast.unparse(call.args[0])
                    if not re.search(r"^f?'\w+://|^url$|^redis$", given):
                        made.setdefault(file.stem, set()).add(given)
        assert made == {"growth": {"store"}}
        assert "SyncCache(" in (ROOT / "benchmarks" / "sync.py").read_text()

    def test_a_benchmark_part_runs_alone(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The shortest one, as `--only` runs it: nothing but its own section is printed."""
        shortest = min(PARTS, key=lambda part: part.seconds)
        monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", shortest.name])
        assert command.main() == 0
        told = re.findall("^## (.*)$", capsys.readouterr().out, re.MULTILINE)
        assert [title.partition(":")[0] for title in told] == ["Targets missed", "Longest-Waiting"]

    def test_every_figure_of_speed_in_the_docs_was_measured(self) -> None:
        """Pages refer to docs/benchmarks.md; the README's figures are drawn from it."""
        pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        stated = {
            page.name
            for page in pages
            if re.search(r"\d (?:µs|ns)\b|requests/s\b", page.read_text())
        }
        # The rules state targets; tests/test_docs.py compares the README's with the written run.
        assert stated == {"README.md", "benchmarks.md", "comparison.md", "scale.md", "seeds.md"}


SAID_APART = {
    "heads of requests": ["different heads: rate", "identical heads: rate"],
    "reads of Redis": [
        "`await prices.get(key)` through Redis",
        "`prices.get(key)` on Redis",
    ],
    "misses": ["one miss, `cached`", "`get_many` of 100 cold keys"],
    "writes of Django": [
        f"Django, `{step}`"
        for step in ("get", "set", "incr", "touch", "add, new", "set and delete", "delete, missing")
    ],
    "modes of moka-py": ["`moka-py`, `cached`", "`moka-py`, `cached(wait_concurrent=True)`"],
    "writers of SQLite": ["8 processes put into one file: rate, against diskcache"],
    "live viewers": ["1,000 viewers of 200 ids", "if each watches 100 of 2,000 ids"],
}
"""What a reader might take for the same thing, and how the page calls each."""


class TestT16HonestFigures:
    @pytest.mark.parametrize("kind", SAID_APART)
    def test_the_benchmarks_say_of_what_each_figure_is(self, kind: str) -> None:
        """Where two figures might be taken for one, both are there, each by its name."""
        measured = command.PAGE.read_text()
        assert [what for what in SAID_APART[kind] if what not in measured] == []

    def test_the_comparison_says_whether_a_redis_read_is_async_and_how_moka_waits(self) -> None:
        """Its figures are of one of the two."""
        comparison = (ROOT / "docs" / "comparison.md").read_text()
        rows = [row for row in comparison.splitlines() if row.startswith("| ")]
        of_redis = [row for row in rows if "a value from Redis" in row or "in Redis," in row]
        assert of_redis
        assert [row for row in of_redis if "async code" not in row and "sync code" not in row] == []
        assert "`wait_concurrent=True`" in comparison

    def test_the_readme_compares_a_hit_with_every_mode_of_the_other_libraries(self) -> None:
        """The quickest and the slowest of them; the bare `get` of a library loads nothing."""
        lists = re.findall(r"- a hot key, ns:\n((?:  - .+\n)+)", command.PAGE.read_text())
        libraries = ("moka-py", "cachebox", "async-lru", "theine", "aiocache", "cashews")
        cached = rf"  - `(?:{'|'.join(libraries)})`, (?!a bare).+: (\S+)\n"
        times = [float(time) / 1000 for time in re.findall(cached, "".join(lists))]
        assert len(times) > len(libraries)
        least, most = f"{min(times):.2g}", f"{max(times):.2g}"
        readme = (ROOT / "README.md").read_text()
        [stated] = re.findall(r"against ([\d.]+) µs to ([\d.]+) µs in six other", readme)
        assert tuple(map(float, stated)) == (float(least), float(most))


class TestT6Compare:
    def test_two_trees_are_compared_by_medians(self) -> None:
        """A row that wants more is worse if it has less; what one tree lacks is left out."""

        def section(cost: float, rate: float) -> Section:
            rows = [Row("E14", "a hit", cost, 3), Row("G4", "rate", rate, 1, at_least=True)]
            return Section("T", rows, {"ns": {"dict": 5.0}})

        old = [section(1, 10), section(2, 10), section(90, 10)]
        new = [section(3, 5), Section("T", [Row("E14", "new", 1.0)])]
        assert compared(old, new).splitlines()[2:] == [
            "| E14: a hit | 2 | 3 | 1.500 | **worse** |",
            "| G4: rate | 10 | 5 | 0.500 | **worse** |",
            "| ns: dict | 5 | 5 | 1.000 |  |",
        ]

    def test_each_tree_is_measured_by_its_own_benchmarks(self, tmp_path: Path) -> None:
        """In a process that imports that tree's code."""
        (tmp_path / "benchmarks").mkdir()
        (tmp_path / "src").mkdir()
        (tmp_path / "src" / "answer.py").write_text("VALUE = 42.0\n")
        (tmp_path / "benchmarks" / "__init__.py").touch()
        (tmp_path / "benchmarks" / "part.py").write_text(
            "import answer\n"
            'row = \'{"rule": "E1", "what": "a", "measured": %s}\' % answer.VALUE\n'
            'print(\'{"section": {"title": "T", "rows": [%s]}}\' % row)\n'
        )
        found = run(Part("here", "Here", "any", 1, limit=30), unsaid, tmp_path)
        assert found == Section("T", [Row("E1", "a", 42.0)])


class TestE28Scale:
    def test_the_page_and_the_plots_are_drawn_from_the_figures(self) -> None:
        """docs/scale.json is what was measured; everything else comes from it."""
        measured = msgspec.json.decode(scale.FILE.read_bytes(), type=scale.Measured)
        page = scale.PAGE.read_text()
        assert scale.drawn(page, measured) == page
        plots = {it.name: it.read_text() for it in scale.IMAGES.iterdir()}
        assert plots == scale.plots(measured)
        assert [name for name in plots if f"images/scale/{name}" not in page] == []

    def test_a_plot_shows_every_line_and_the_limit(self) -> None:
        """In a box of its own, whatever the numbers are."""
        drawn = ET.fromstring(  # noqa: S314 (our own text)
            plot("a < b", "keys", {"one": {10.0: 3.0, 1000.0: 0.02}, "two": {10.0: 5.0}}, 20)
        )
        found = [it for it in drawn.iter() if it.tag.endswith("polyline")]
        across = [float(at.split(",")[0]) for it in found for at in it.attrib["points"].split()]
        assert len(found) == 2
        assert min(across) >= 0
        assert max(across) <= float(drawn.attrib["width"])
        assert sum("stroke-dasharray" in it.attrib for it in drawn.iter()) == 1
