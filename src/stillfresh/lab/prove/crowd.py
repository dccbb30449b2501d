"""The processes of a proof: started, killed, paused, their clock moved, ended."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Final

from stillfresh.lab.prove.stage import Fault, Stage, lasting
from stillfresh.lab.prove.witness import Log, Seen, move_clock
from stillfresh.lab.prove.worker import LEASE_FOR, ProofJob, main

FORKS: Final = get_context("forkserver")
FORKS.set_forkserver_preload(["stillfresh.stores.dynamodb.store", "stillfresh.stores.redis"])
"""Libraries that are imported once; workers are forked after that."""
PATIENCE: Final = 60.0
"""Seconds within which all processes must work again after a fault, or end when told to."""
ENDED: Final = (0, -signal.SIGTERM)
"""Exit codes of processes that were told to end; the second one if they were not ready yet."""
MOVES: Final = (3600.0, -2.0, -20.0, 0.7)


class Crowd:
    """The processes, and the faults that they can have. Every second one uses threads."""

    def __init__(self, stage: Stage, folder: Path, seed: int) -> None:
        self._stage = stage
        self._folder = folder
        self._dice = random.Random(seed)  # noqa: S311 (no secret)
        self._processes: list[ForkServerProcess] = []
        self._started = 0
        self._complaints = folder / "complaints"
        self.clock = folder / "clock"
        self.log = folder / "log"
        self._complaints.touch()
        move_clock(self.clock, 0.0)
        resource_tracker.ensure_running()
        # The workers inherit this mask. Without it, a terminal's Ctrl-C would end them, too.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def start(self, count: int) -> None:
        for _ in range(count):
            stage = replace(self._stage, faults={})
            job = ProofJob(
                log=self.log,
                clock=self.clock,
                complaints=self._complaints,
                environment=dict(os.environ),
                seed=self._dice.random(),
                stage=stage,
                uses_threads=self._started % 2 == 1,
            )
            self._started += 1
            process = FORKS.Process(target=main, args=(job,))
            process.start()
            self._processes.append(process)

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._processes if process.pid is not None}

    def kill(self, count: int) -> None:
        """Kill so many processes with SIGKILL, whatever they do; others take their place."""
        for process in self._dice.sample(self._processes, count):
            process.kill()
            process.join(PATIENCE)
            self._processes.remove(process)
            self.start(1)

    def any_pid(self) -> int:
        """One of the processes, by the seed."""
        return self._dice.choice(sorted(self.pids))

    def finish(self) -> list[str]:
        """End all processes; return their errors."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(PATIENCE)
        codes = [process.exitcode for process in self._processes]
        bad_ends = [f"a process ended with {code}" for code in codes if code not in ENDED]
        lines = self._complaints.read_text().splitlines()
        return bad_ends + [line for line in lines if is_complaint(line)]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(PATIENCE)
            process.close()


def is_complaint(line: str) -> bool:
    """True for an error; a warning that the store is unavailable is expected."""
    return "Traceback" in line or "itself failed" in line or "never awaited" in line


def faults_of(stage: Stage, crowd: Crowd, workers: int, log: Log) -> dict[str, Fault]:
    """The faults of the processes, of their clock, and of this store."""

    @contextmanager
    def paused(dice: random.Random) -> Iterator[None]:
        pid = crowd.any_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(dice.uniform(1.5, 3) * LEASE_FOR)
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def moved(dice: random.Random) -> Iterator[None]:
        """Move the clock. Logged before and after: it moved at some time in between."""
        log.tell(Seen("moved", time.monotonic()))
        move_clock(crowd.clock, dice.choice(MOVES))
        log.tell(Seen("moved", time.monotonic()))
        yield

    faults = {
        "a process killed": lasting(lambda: crowd.kill(1), lambda: None, 0.0),
        "all processes killed": lasting(lambda: crowd.kill(workers), lambda: None, 0.0),
        "a process paused": paused,
        "the clock moved": moved,
        **stage.faults,
    }
    if stage.memory_for or not stage.moves_clock:  # set back, it makes every second longer
        del faults["the clock moved"]
    return faults
