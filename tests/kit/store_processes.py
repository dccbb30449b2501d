"""Real processes for the stores' tests: each is spoken to by lines, and ended by its own id."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.kit.processes import ROOT, command


class Worker:
    """A process of its own, spoken to by lines."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            command("store", *arguments),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def finish(self) -> None:
        """It ends by itself, without a word of complaint."""
        _, complaints = self.process.communicate(timeout=60)
        assert (self.process.returncode, complaints) == (0, "")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def working(*arguments: object) -> Iterator[Worker]:
    worker = Worker(*arguments)
    try:
        yield worker
    finally:
        worker.kill()
