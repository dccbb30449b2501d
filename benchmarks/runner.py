"""Runs the parts one after the other, each in a process of its own.

So no part slows the next one by what it left in memory, the progress bar disturbs nobody, one that
fails or hangs says so in its section while the others go on, and nothing that a part started
outlives it.
"""

import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from benchmarks.harness import Progress, Section
from benchmarks.part import Step
from benchmarks.plan import Part

__all__ = ["run"]

ROOT = Path(__file__).parent.parent
GRACE = 10.0
"""Seconds for a part to end its servers."""


def run(part: Part, progress: Progress, root: Path = ROOT) -> Section:
    """Its section, in any case; `root`: the source tree that is measured, by its own benchmarks."""
    with tempfile.TemporaryFile() as errors:
        try:
            with started(part, errors, root) as process:
                found = heard(process, part.limit, progress)
        except TimeoutError:
            return Section(part.title, failed=f"it took more than {part.limit:g} s")
        if found is None:
            return Section(part.title, failed=last_word(errors) or "it ended without a word")
    return found


@contextmanager
def started(part: Part, errors: IO[bytes], root: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """In a group of its own, all of which is gone afterwards."""
    paths = os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.part", part.module],
        cwd=root,
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        try:
            os.kill(process.pid, signal.SIGINT)
            wait_for(process, GRACE)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # nobody is left
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def wait_for(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Until it has ended, without forgetting it: its group's number stays its own until then."""
    deadline = time.monotonic() + seconds
    options = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while os.waitid(os.P_PID, process.pid, options) is None and time.monotonic() < deadline:
        time.sleep(0.02)


def heard(process: "subprocess.Popen[bytes]", seconds: float, progress: Progress) -> Section | None:
    """Its last word; None if it ended without one. `TimeoutError` after so many seconds."""
    for line in lines(process, time.monotonic() + seconds):
        step = msgspec.json.decode(line, type=Step)
        if step.section is not None:
            wait_for(process, GRACE)
            return step.section
        progress(step.doing)
    return None


def lines(process: "subprocess.Popen[bytes]", deadline: float) -> Iterator[bytes]:
    assert process.stdout is not None  # noqa: S101 (it was started with one)
    pipe, rest = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            if not (chunk := os.read(pipe, 65536)):
                return
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
    raise TimeoutError


def last_word(errors: IO[bytes]) -> str:
    """The exception that ended it, the first line of it; else the last line of all."""
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().splitlines()
    raised = [line for line in said if re.match(r"[\w.]+(Error|Exception|Missing)\b", line)]
    return (raised or said or [""])[-1]
