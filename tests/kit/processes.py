"""A worker in a process of its own, its standard input and output in the test's hands."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


def command(worker: str, *arguments: object) -> list[str]:
    """Runs a program of `tests.kit.workers`, with `cwd=ROOT`."""
    return [
        sys.executable,
        "-W",
        "error",
        "-m",
        f"tests.kit.workers.{worker}",
        *map(str, arguments),
    ]


class Process:
    """Waits for `go`; ended with the stack, however a test ends."""

    def __init__(
        self, stack: ExitStack, worker: str, *arguments: object, is_ready: bool = True
    ) -> None:
        """Until it has said that it is ready, unless others are to start meanwhile."""
        self.process = subprocess.Popen(
            command(worker, *arguments),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(self._end)
        assert not is_ready or self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def _end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)
