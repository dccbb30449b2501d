"""The processes under torture: started, killed, paused, their clock moved, ended (T4)."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from torture_stages import Fault, Stage, lasting
from torture_worker import LEASE_FOR
from witness import Event, Log, move_clock

__all__ = ["PATIENCE", "Crowd", "faults_of"]

WORKER: Final = Path(__file__).with_name("torture_worker.py")
PATIENCE: Final = 60.0
"""Seconds until everybody must work again after a fault, or have ended when told to."""
MOVES: Final = (3600.0, -2.0, -20.0, 0.7)


class Crowd:
    """The processes, and what can be done to them."""

    def __init__(self, stage: Stage, folder: Path, seed: int) -> None:
        self._stage = stage
        self._folder = folder
        self._dice = random.Random(seed)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._complaints = folder / "complaints"
        self.clock = folder / "clock"
        self.log = folder / "log"
        move_clock(self.clock, 0.0)

    def start(self, count: int) -> None:
        for _ in range(count):
            arguments = (self._stage.url, self.log, self.clock, self._dice.random())
            with self._complaints.open("ab") as complaints:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-W",
                        "error",
                        WORKER,
                        *map(str, (*arguments, self._stage.pace)),
                    ],
                    env=self._environment(),
                    stderr=complaints,
                )
            self._processes.append(process)

    def _environment(self) -> dict[str, str]:
        paths = os.pathsep.join([str(WORKER.parent), *sys.path])
        return {**self._stage.environment, "PYTHONPATH": paths}

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._processes}

    def kill(self, count: int) -> None:
        """`kill -9`, wherever they are; others take their place."""
        for process in self._dice.sample(self._processes, count):
            process.kill()
            process.wait(PATIENCE)
            self._processes.remove(process)
            self.start(1)

    def some(self) -> subprocess.Popen[bytes]:
        return self._dice.choice(self._processes)

    def finish(self) -> list[str]:
        """Each is told to end, and ends; what they complained of."""
        for process in self._processes:
            process.terminate()
        codes = [process.wait(PATIENCE) for process in self._processes]
        self._processes.clear()
        said = [line for line in self._complaints.read_text().splitlines() if is_complaint(line)]
        return [f"ended with {code}" for code in codes if code] + said

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(PATIENCE)


def is_complaint(line: str) -> bool:
    """A store that was away is a warning, and is meant to be said."""
    return "Traceback" in line or "itself failed" in line or "never awaited" in line


def faults_of(stage: Stage, crowd: Crowd, workers: int, log: Log) -> dict[str, Fault]:
    """What is done to the processes and their clock, and to this store."""

    @contextmanager
    def paused(dice: random.Random) -> Iterator[None]:
        process = crowd.some()
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(dice.uniform(1.5, 3) * LEASE_FOR)
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    @contextmanager
    def moved(dice: random.Random) -> Iterator[None]:
        """Told before and after: in between nobody knows."""
        log.tell(Event("moved", time.monotonic()))
        move_clock(crowd.clock, dice.choice(MOVES))
        log.tell(Event("moved", time.monotonic()))
        yield

    return {
        "a process killed": lasting(lambda: crowd.kill(1), lambda: None, 0.0),
        "all processes killed": lasting(lambda: crowd.kill(workers), lambda: None, 0.0),
        "a process paused": paused,
        "the clock moved": moved,
        **stage.faults,
    }
