"""`make mutants`: put one small bug after another into our own code, and see a test fail (T12).

The seed chooses the bugs, the time limit how many. Each is tried in a fork of one process, with the
tests that touch the changed line. A bug that no test notices is printed with those tests. The exit
code is 0 if at least nine in ten were noticed.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tests.mutation.changes import Change, changes
from tests.mutation.touched import Touched
from tests.mutation.trial import LIBRARIES, Trial, cold, preload
from tests.mutation.warm import Order, Warm

ROOT = Path(__file__).parent.parent.parent
SOURCES = re.compile(
    r"^src/stillfresh/((engine|stores)/.*|(?!virtual_loop)[a-z_]*"
    r"|(systems/coordinator|systems/feed|systems/waiting|lab/plan|pages)/(rules\w*|model)"
    r"|http/(answer_fields|fields|freshness|serving|validation)|pages/(clients|routes|sharing))\.py$"
)
"""The rules, the engine and the stores. On the virtual loop, tests run."""
TESTS = re.compile(
    r"^tests/((engine|stores|simulation|sync|systems|lab|pages|http)/.*|gateway/server/(?=test_logs))?"
    r"test_(?!architecture|benchmarks|docs|guides|package|reference|walks)\w+\.py$"
)
LISTED = Path(__file__).with_name("listed.toml")
SHARE = 0.9
CHUNK = 3
"""Files of tests that are measured in one process."""
EVERY = 25
"""So often nothing is changed, to see that the tests pass by themselves."""
LONGEST = 15.0
"""Seconds of a core: a test that costs more is left out."""


class Work(NamedTuple):
    """A change (none: nothing is changed) and the tests to run."""

    change: Change | None
    tests: list[str]
    touching: int
    """How many tests touch the changed line."""
    measured: bool = False
    """True: the tests are files, and only what they touch is of interest."""


class Verdict(NamedTuple):
    """What became of one change."""

    change: Change | None
    """None: nothing was changed."""
    diff: list[str]
    tests: list[str]
    touching: int
    outcome: str
    """caught, timed out, survived, or void: it fails wherever it is called."""
    by: str = ""


@dataclass
class Mutants:
    """The changes of one seed, tried one after another."""

    root: Path
    sources: list[str]
    tests: list[str]
    seed: int
    kept: Path
    jobs: int = 2
    seconds: float = 30.0
    """What the tests of one change may cost, in seconds of a core."""
    listed: list[dict[str, str]] = field(default_factory=list)
    confirm: bool = True
    """Try survivors again in a copy of the project, where the processes of tests see them, too."""
    line: int = 0
    """Only the changes of this line."""
    left_out: int = 0
    """Changes that are listed with a reason, and were not tried."""

    def __post_init__(self) -> None:
        self.touched = Touched(self.root, self.kept)
        self.unmeasured: list[str] = []
        self._flaky: set[str] = set()
        self._catching: Counter[tuple[str, str]] = Counter()
        """Source and test: how often that test caught a change there."""
        self._texts = {path: (self.root / path).read_text() for path in self.sources}
        self._times = 1_000_000_000
        self._changed: dict[Path, str] = {}

    def measure(self, wanted: str = "") -> Iterator[tuple[int, int]]:
        """Which tests touch which lines; yields how many files are done, and of how many.

        Files of tests that are neither wanted nor known are left out.
        """
        missing = self.touched.missing(self.tests)
        files = [it for it in missing if re.search(wanted, it)]
        self.tests = [it for it in self.tests if it in files or it not in missing]
        chunks = [files[at : at + CHUNK] for at in range(0, len(files), CHUNK)]
        done = 0
        for work, found in self._tried(Work(None, chunk, 0, measured=True) for chunk in chunks):
            done += len(work.tests)
            for file in work.tests:
                if "timed_out" in found:
                    self.unmeasured.append(file)
                else:
                    its = {test: it for test, it in found.items() if test.startswith(f"{file}::")}
                    self.touched.keep(file, its)
            yield done, len(files)

    def chosen(self) -> Iterator[Change]:
        """Every change in the seed's order, without the listed ones."""
        every = [it for path in self.sources for it in changes(path, self._texts[path])]
        every = [it for it in every if self.line in {0, it.line}]
        random.Random(self.seed).shuffle(every)
        for change in every:
            diff = change.diff(self._texts[change.path])
            if any(is_listed(entry, change.path, diff) for entry in self.listed):
                self.left_out += 1
            else:
                yield change

    def verdicts(self) -> Generator[Verdict, None, None]:
        """Try every change, until the caller closes this."""
        for work, found in self._tried(self._works()):
            by = found.get("failed", "")
            if work.change:
                self._catching[work.change.path, by] += 1
            elif by:
                self._flaky.add(by)
            outcome = "caught" if by else "survived"
            if found.get("timed_out"):
                outcome = "timed out"
            elif found.get("stillborn"):
                outcome = "void"
            diff = work.change.diff(self._texts[work.change.path]) if work.change else []
            yield Verdict(work.change, diff, work.tests, work.touching, outcome, by)

    def _works(self) -> Iterator[Work]:
        for number, change in enumerate(self.chosen()):
            touching = [it for it in self.touched.tests_for(change) if it not in self._flaky]
            quick = [it for it in touching if self.touched.seconds[it] <= LONGEST]
            quick.sort(key=lambda it: -self._catching[change.path, it])
            tests = self.touched.within(quick, self.seconds)
            if number % EVERY == EVERY // 2:
                yield Work(None, tests, len(touching))
            yield Work(change, tests, len(touching))

    def _tried(self, works: Iterator[Work]) -> Iterator[tuple[Work, dict[str, Any]]]:
        """Run the works, so many at once; what is left is ended when the caller goes."""
        running: dict[Path, tuple[Work, Trial | None, bool]] = {}
        with ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)
            folder, warm = Path(stack.enter_context(temporary)), None
            free = [self._copy(folder / str(number)) for number in range(self.jobs)]
            try:
                while True:
                    while free and (work := next(works, None)):
                        if warm is None and not work.measured:
                            warm = Warm(self._copy(folder / "warm"), self.tests)
                            stack.callback(warm.end)
                        copy = free.pop()
                        running[copy] = work, self._started(copy, work, warm), True
                    if not running:
                        return
                    for copy, (work, trial, is_warm) in [*running.items()]:
                        if trial and not trial.is_over():
                            continue
                        found = trial.result() if trial else {}
                        if trial and is_warm and (again := self._again(work, found)).tests:
                            running[copy] = work, self._started(copy, again, None), False
                        else:
                            del running[copy]
                            free.append(copy)
                            yield work, found
                    time.sleep(0.1)
            finally:
                for _, trial, _ in running.values():
                    if trial:
                        trial.end()

    def _again(self, work: Work, found: dict[str, Any]) -> Work:
        """The tests to run anew: all if nothing could be changed, else those in other processes."""
        if work.change is None or "failed" in found:
            return work._replace(tests=[])
        if "starting" not in found:
            return work
        files = found["starting"] if self.confirm else []
        tests = [it for it in work.tests if it.partition("::")[0] in files]
        return work._replace(tests=tests)

    def _started(self, copy: Path, work: Work, warm: Warm | None) -> Trial | None:
        """Tests with the changed source; no tests: no run."""
        found = copy / "found.json"
        found.unlink(missing_ok=True)
        if work.measured:
            every = (copy / "src").rglob("*.py")
            sources = tuple(str(it) for it in every if SOURCES.search(str(it.relative_to(copy))))
            return cold(copy, work.tests, self._patience(180.0), measured=sources)
        if not work.tests:
            return None
        costs = [self.touched.seconds[test] for test in work.tests]
        limit, each = self._patience(sum(costs)), self._patience(max(costs))
        path = work.change.path if work.change else ""
        text = work.change.applied(self._texts[path]) if work.change else ""
        if warm:
            order = Order(path, text, work.tests, each, 5 + 5 * max(costs), found)
            return warm.trial(order, limit)
        self._mend(copy)
        self._write(copy / path, text)
        self._changed[copy] = path
        return cold(copy, work.tests, limit, each)

    def _mend(self, copy: Path) -> None:
        if path := self._changed.pop(copy, None):
            self._write(copy / path, self._texts[path])

    def _patience(self, seconds: float) -> float:
        """After how long tests that cost so much hang; longer where others keep the cores busy."""
        return (10 + 5 * seconds) * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

    def _write(self, path: Path, text: str) -> None:
        """With a time of its own: Python compiles it anew."""
        path.write_text(text)
        self._times += 1
        os.utime(path, (self._times, self._times))

    def _copy(self, copy: Path) -> Path:
        ignored = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
        shutil.copytree(self.root, copy, ignore=ignored, symlinks=True)
        if (self.root / ".venv").exists():
            (copy / ".venv").symlink_to(self.root / ".venv")
        return copy


def tests_of(only: str) -> str:
    """For a part alone, only its own tests are measured, and of those that build on it."""
    part, is_part, _ = only.partition("/")
    if not is_part:
        return "^tests/"
    return rf"^tests/({part}|test_\w+{'|systems|sync' if part == 'engine' else ''})(/|\.py)"


def is_listed(entry: dict[str, str], path: str, diff: list[str]) -> bool:
    """Whether a change is one that the list gives a reason for."""
    gone = "\n".join(line[1:].strip() for line in diff if line.startswith("-"))
    comes = "\n".join(line[1:].strip() for line in diff if line.startswith("+"))
    return (
        re.search(entry.get("path", ""), path) is not None
        and re.search(entry.get("gone", ""), gone) is not None
        and re.search(entry.get("comes", ""), comes) is not None
    )


def shown(it: Verdict) -> str:
    """A survivor, with the tests that were run."""
    if it.change is None:
        return f"[yellow]failed without a change, left out from now on:[/yellow] {escape(it.by)}"
    ran = f"{len(it.tests)} of {it.touching} tests that touch it" if it.tests else "no test"
    head = f"[red]survived[/red] {it.change.path}:{it.change.line} ({ran})"
    files = Counter(test.partition("::")[0] for test in it.tests)
    tests = ", ".join(f"{file} ({count})" for file, count in files.most_common(6))
    return "\n".join([head, *(escape(f"    {line}") for line in it.diff), f"    ran: {tests}"])


def report(console: Console, found: list[Verdict], left_out: int, seed: int) -> float:
    """The sums in one line, and the share that was caught."""
    sums = Counter(it.outcome for it in found if it.change)
    caught = sums["caught"] + sums["timed out"]
    tried = caught + sums["survived"]
    share = caught / tried if tried else 0.0
    console.print(
        f"seed {seed}: {tried} tried, {caught} caught ({sums['timed out']} by a time limit), "
        f"{sums['survived']} survived: {share:.1%}. Not counted: {sums['void']} that fail wherever "
        f"they are called, {left_out} listed with a reason."
    )
    return share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--only", default="", help="engine/, or engine/read.py:40")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--seconds", type=float, default=30, help="of a core, for the tests of one change"
    )
    parser.add_argument("--quick", action="store_true", help="try survivors only once")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project's folder")
    parser.add_argument("--json", type=Path, help="write every verdict into this file")
    options = parser.parse_args()
    root = options.root.resolve()
    only, _, line = options.only.partition(":")
    paths = [str(it.relative_to(root)) for it in sorted(root.glob("*/**/*.py"))]
    mutants = Mutants(
        root,
        [it for it in paths if SOURCES.search(it) and f"src/stillfresh/{only}" in it],
        [it for it in paths if TESTS.search(it)],
        options.seed,
        root / "build" / "mutants",
        options.jobs,
        options.seconds,
        tomllib.loads(LISTED.read_text())["listed"],
        not options.quick,
        int(line or 0),
    )
    preload(LIBRARIES if root == ROOT else ())
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    console, found, code = Console(), list[Verdict](), 130
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=console))
        bar = progress.add_task("measuring which test touches what", total=None)
        for done, total in mutants.measure(tests_of(only)):
            progress.update(bar, completed=done, total=total)
        console.print(f"seed {options.seed}, {len(mutants.touched.seconds):,} tests known")
        for file in mutants.unmeasured:
            console.print(f"[yellow]could not be measured, left out:[/yellow] {file}")
        bar, began = progress.add_task("", total=options.minutes * 60), time.monotonic()
        verdicts = stack.enter_context(closing(mutants.verdicts()))
        for it in verdicts:
            found.append(it)
            if it.outcome == "survived" if it.change else it.by:
                console.print(shown(it), highlight=False, soft_wrap=True)
            took, sums = time.monotonic() - began, Counter(it.outcome for it in found if it.change)
            said = ", ".join(f"{count} {outcome}" for outcome, count in sums.most_common())
            progress.update(bar, completed=took, description=said)
            if not console.is_terminal and len(found) % EVERY == 0:
                console.print(f"{took / 60:.0f} min: {said}")
            if took > options.minutes * 60:
                break
        code = 0
    share = report(console, found, mutants.left_out, options.seed)
    if options.json:
        options.json.write_text(json.dumps([it._asdict() for it in found], indent=1))
    return code or int(share < SHARE)


if __name__ == "__main__":
    sys.exit(main())
