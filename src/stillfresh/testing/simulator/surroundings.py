"""What a program has besides its loop: dice, a log, garbage, files; left as they were (T1)."""

import gc
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

from stillfresh.testing.simulator.files import inline_files
from stillfresh.testing.simulator.promises import Broken, Promise
from stillfresh.testing.simulator.world import World


@contextmanager
def alone(world: World) -> Iterator[None]:
    """One at a time in a program: what is patched here is everybody's."""
    with seeded(world.plan.seed), listening(world), uncollected(), inline_files(world):
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Dice that nobody was given come from the seed too."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


@contextmanager
def listening(world: World) -> Iterator[None]:
    """Warnings of a bad world stay inside; errors are the simulation's."""
    log, listener = logging.getLogger("stillfresh"), Listener(world)
    propagates, log.propagate = log.propagate, False
    log.addHandler(listener)
    try:
        yield
    finally:
        log.propagate = propagates
        log.removeHandler(listener)


class Listener(logging.Handler):
    """What stillfresh logs as an error of its own breaks the simulation."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if not self._world.is_over:
            broken = Broken(Promise.WHOLE, record.getMessage())
            broken.__cause__ = record.exc_info[1] if record.exc_info else None
            self._world.fail(broken)


@contextmanager
def uncollected() -> Iterator[None]:
    """Garbage is collected when a run ends: what it says of itself then, it says at the same step.

    What was there before is passed over: collecting a simulation's own takes no time.
    """
    was_enabled, is_first = gc.isenabled(), not gc.get_freeze_count()
    gc.disable()
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        if is_first:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
