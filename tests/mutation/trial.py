"""One run of pytest in a copy of the project, in a forked process of its own (T12).

The process that forks has imported the libraries but nothing of the project, so a run starts in a
second. What it finds stands in a file: the test that failed, or which lines each test touched.
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = ("aiobotocore.session", "apsw", "psycopg", "redis.asyncio")
UNUSED = ("randomly", "xdist", "xdist.looponfail", "schemathesis", "cacheprovider")
"""Plugins of pytest that no run needs."""
QUIET = (
    *("-W", "ignore::pytest.PytestAssertRewriteWarning", "--tb=line", "-q"),
    *("-m", ""),  # also the tests that only `make proof` runs
    *(option for name in UNUSED for option in ("-p", f"no:{name}")),
)
FORK = multiprocessing.get_context("fork")
STILLBORN = re.compile(
    r"missing .*required|NameError|UnboundLocalError|SyntaxError|unsupported operand", re.IGNORECASE
)
"""An error that any test would have met: such a change says nothing about the tests."""
NEAREST = 4
"""Files of tests that run first: mostly they are enough, and importing the others takes longer."""
IDLE = 10.0
"""Seconds without any work, after which a run hangs: the tests' clocks are moved by hand."""
GRACE = 10.0
"""Seconds in which a run that is ended may stop the servers that it started."""
STARTED = "STILLFRESH_MUTANTS_STARTED"
"""Names the file that a Python process makes which a test starts."""
SITE = f"""import os, pathlib
if "{STARTED}" in os.environ:
    pathlib.Path(os.environ["{STARTED}"]).touch()
"""


def preload(libraries: tuple[str, ...] = LIBRARIES) -> None:
    """Import once what every run needs."""
    for plugin in entry_points(group="pytest11"):
        if plugin.name not in UNUSED:
            plugin.load()
    for name in ("coverage", "hypothesis", *libraries):
        with suppress(ImportError):
            import_module(name)


class Trial:
    """A process that runs tests, until the first that fails, and writes what it found."""

    def __init__(self, found: Path, limit: float, pid: int) -> None:
        self._found, self._pid = found, pid
        self._deadline = time.monotonic() + limit
        self._did, self._idle_since = "", time.monotonic()

    def is_over(self) -> bool:
        """Also when the time is up, or when it sleeps for good: then it is ended first."""
        now = time.monotonic()
        if (did := done_by(self._pid)) != self._did:
            self._did, self._idle_since = did, now
        if now > min(self._deadline, self._idle_since + IDLE):
            self.end()
        return not is_alive(self._pid)

    def end(self) -> None:
        """Ask first, so that fixtures stop their servers; then kill all that it started."""
        pids = [*descendants(self._pid), self._pid]
        for asked, ending in (([self._pid], signal.SIGINT), (pids, signal.SIGKILL)):
            for pid in filter(is_alive, asked):
                with suppress(ProcessLookupError):
                    os.kill(pid, ending)
            patience = time.monotonic() + GRACE
            while is_alive(self._pid) and time.monotonic() < patience:
                time.sleep(0.05)

    def result(self) -> dict[str, Any]:
        """What the run wrote; nothing if it was killed or died."""
        with suppress(FileNotFoundError, ValueError):
            found: dict[str, Any] = json.loads(self._found.read_text())
            return found
        return {"failed": "(the run)", "why": "ended by its time limit", "timed_out": True}


def done_by(pid: int) -> str:
    """What the kernel counts of a process, its threads and its children: the same if all sleep."""
    counts = ""
    for each in (pid, *descendants(pid)):
        with suppress(OSError):  # it has ended meanwhile
            for thread in Path(f"/proc/{each}/task").iterdir():
                counts += (thread / "schedstat").read_text()
                if (thread / "stat").read_text().rpartition(") ")[2].startswith("R"):
                    counts += f"{time.monotonic()}"  # it would work, if it had a core
    return counts


def is_alive(pid: int) -> bool:
    """Also takes note of the end of a child of this process."""
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    return Path(f"/proc/{pid}").exists()


def cold(
    copy: Path, tests: list[str], limit: float, each: float = 0, measured: tuple[str, ...] = ()
) -> Trial:
    """Pytest from its beginning, in a copy of the project."""
    found = copy / "found.json"
    found.unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        try:
            started(copy, tests, each, measured, found)
        finally:
            os._exit(0)
    return Trial(found, limit, pid)


def started(
    copy: Path, tests: list[str], each: float, measured: tuple[str, ...], found: Path
) -> None:
    os.setpgrp()
    quietly(copy / "output.txt")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    at_home(copy)
    plugin = Measuring(measured) if measured else Stopping(tests, each)
    files = [*dict.fromkeys(test.partition("::")[0] for test in tests)]
    steps = [files] if measured else [files[:NEAREST], files[NEAREST:]]
    for step in filter(None, steps):
        code = pytest.main([*step, *QUIET, *plugin.options], plugins=[plugin])
        if code == pytest.ExitCode.INTERRUPTED and "failed" not in plugin.found():
            return
        if "failed" in plugin.found():
            break
    found.write_text(plugin.told())


def quietly(output: Path) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def at_home(copy: Path) -> None:
    """Import the project from the copy, here and in every process that a test starts."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in {"tests", "stillfresh"}:
            del sys.modules[name]
    temporary = copy / "tmp"
    temporary.mkdir(exist_ok=True)
    os.environ |= {"PYTHONPATH": f"{copy / 'src'}:{copy}", "TMPDIR": str(temporary)}
    (copy / "src" / "sitecustomize.py").write_text(SITE)
    sys.path[:0] = [str(copy / "src"), str(copy)]
    os.chdir(copy)


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and theirs."""
    with suppress(OSError):
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [it for child in pids for it in (*descendants(int(child)), int(child))]
    return []


class Stopping:
    """Runs the named tests in their order, and notes the first failure.

    It also notes the files whose tests start Python processes: there, code that was changed in
    this process only is not changed.
    """

    def __init__(self, tests: list[str], each: float, started: Path | None = None) -> None:
        self.order = {test: number for number, test in enumerate(tests)}
        self.starting: dict[str, None] = {}
        self._found: dict[str, Any] = {}
        self._mark = started
        if started is not None:
            started.unlink(missing_ok=True)
            os.environ[STARTED] = str(started)
        self.options = ["-x", "--timeout", f"{each:.0f}"]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._mark is not None and self._mark.exists():
            self._mark.unlink()
            self.starting[nodeid.partition("::")[0]] = None

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed and not self._found:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else str(report.longrepr)
            self._found = {"failed": report.nodeid, "why": why[:2000]}
            self._found["timed_out"] = "Timeout" in why[:200]
            self._found["stillborn"] = bool(STILLBORN.search(why[-2000:]))

    def found(self) -> dict[str, Any]:
        return self._found

    def told(self) -> str:
        """What was found, and which files of tests start processes."""
        return json.dumps({"starting": [*self.starting], **self._found})


class Measuring:
    """Notes what each test cost, in seconds of a core, and which lines it ran, if it passed."""

    def __init__(self, sources: tuple[str, ...]) -> None:
        import coverage  # noqa: PLC0415 (only here, and only in the process that measures)

        self._cover = coverage.Coverage(data_file=None, config_file=False, include=sources)
        self._cover.start()
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self.options = ["--continue-on-collection-errors"]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._cover.switch_context(item.nodeid)
        began = sum(os.times()[:4])
        answer = yield
        self._seconds[item.nodeid] = sum(os.times()[:4]) - began
        self._cover.switch_context("between tests")
        return answer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not (report.passed or (report.when == "setup" and report.skipped)):
            self._failed.add(report.nodeid)

    def found(self) -> dict[str, Any]:
        """Test -> its seconds, and source -> the lines that it ran, as the bits of a number."""
        self._cover.stop()
        data = self._cover.get_data()
        lines: dict[str, dict[str, int]] = {}
        for source in data.measured_files():
            name = str(Path(source).relative_to(Path.cwd()))
            for line, tests in data.contexts_by_lineno(source).items():
                for test in tests:
                    ran = lines.setdefault(test, {})
                    ran[name] = ran.get(name, 0) | (1 << line)
        return {
            test: [seconds, {name: hex(bits) for name, bits in lines.get(test, {}).items()}]
            for test, seconds in self._seconds.items()
            if test not in self._failed
        }

    def told(self) -> str:
        return json.dumps(self.found())
