"""`simulate(scenario, seed=…)`: one run, exactly repeatable; a failing one made small."""

import asyncio
import gc
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from stillfresh.checks import checked_function, is_whole
from stillfresh.errors import ConfigError, shown
from stillfresh.nines import supported_nines
from stillfresh.stores import MemoryStore
from stillfresh.testing.simulator.faults import Faults, Plan, planned
from stillfresh.testing.simulator.files import inline_files
from stillfresh.testing.simulator.promises import BrokenPromise, Promise
from stillfresh.testing.simulator.record import RunRecorder
from stillfresh.testing.simulator.world import World
from stillfresh.virtual_loop import Deadlock

Scenario: TypeAlias = Callable[[World], Awaitable[object]]

SHOWN: Final = 60
"""Lines of the trace that an error shows, the last ones."""
MOST_RUNS: Final = 250
"""To make a failing plan smaller."""
SALTS: Final = 8
"""Runs of a plan without faults, because chance may hide an error in a single run."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """How a simulation went."""

    seed: int
    plan: Plan
    steps: int
    """Callbacks that were run. Every promise was checked after each."""
    seconds: float
    """Virtual seconds that passed."""
    requests: int
    loads: int
    faults: int
    """Faults that happened, out of those planned."""
    reads: int
    """Answers that were judged. None is left out because the store was away."""
    excused: Mapping[str, int]
    """Of these, how many were old, said so, and broke no promise, by the reason."""
    unjudged: Mapping[str, int]
    """Answers beside these that could not be judged, by the reason: they had no value."""
    trace: tuple[str, ...]
    broken: BrokenPromise | None = None

    @property
    def nines(self) -> float | None:
        """The nines that the judged reads support, if no promise was broken; None: no reads."""
        return None if self.broken is not None else supported_nines(0, self.reads)


class SimulationFailed(AssertionError):
    """A promise was broken: the message names it, the seed, and the smallest run that was found."""

    def __init__(self, first: Simulated, smallest: Simulated) -> None:
        self.seed = first.seed
        self.promise = smallest.broken.promise if smallest.broken else ""
        self.first = first
        self.smallest = smallest
        left = max(0, len(smallest.trace) - SHOWN)
        lines = [
            f"seed {self.seed}: {smallest.broken}",
            f"with (of {first.plan.size[0]} faults, {smallest.plan.size[0]} matter)",
            str(smallest.plan),
            f"this happened{f' ({left} lines left out)' if left else ''}",
            *smallest.trace[-SHOWN:],
        ]
        super().__init__("\n".join(lines))


def simulate(
    scenario: Scenario, *, seed: int, faults: Faults | None = None, shrink: bool = True
) -> Simulated:
    """Run `await scenario(world)` in a simulated world made from `seed`; return how it went.

    The same seed, scenario and code give the same run. Raises SimulationFailed if a promise is
    broken, with the smallest failing run, unless `shrink` is False.
    """
    _check(scenario, seed, faults)
    first = run(scenario, planned(seed, Faults() if faults is None else faults))
    if first.broken is None:
        return first
    smallest = first
    promise = first.broken.promise
    if shrink:

        def fails(plan: Plan) -> bool:
            broken = run(scenario, plan).broken
            return broken is not None and broken.promise == promise

        smallest = run(scenario, shrunk(first.plan, fails))
    raise SimulationFailed(first, smallest) from smallest.broken


def run(
    scenario: Scenario,
    plan: Plan,
    recorder: RunRecorder | None = None,
    store_class: type[MemoryStore] = MemoryStore,
) -> Simulated:
    """Run the scenario once, as planned. With a `recorder` to its end, whatever breaks."""
    world = World(plan, recorder, store_class)
    with alone(world):
        try:
            broken = _run_in(world, scenario) or world.first_broken
            return Simulated(
                seed=plan.seed,
                plan=plan,
                steps=world.loop.steps,
                seconds=world.time(),
                requests=world.weather.requests,
                loads=len(world.ledger.loads),
                faults=world.weather.faults,
                reads=world.ledger.reads,
                excused=dict(world.ledger.excused),
                unjudged=dict(world.ledger.unjudged),
                trace=tuple(world.trace),
                broken=broken,
            )
        finally:
            world.end()


def _run_in(world: World, scenario: Scenario) -> BrokenPromise | None:
    """Run the scenario; return the promise that it broke, or None."""
    try:
        world.run(scenario)
    except Deadlock as exc:
        return BrokenPromise(Promise.ALIVE, str(exc))
    except BrokenPromise as exc:
        return exc
    except Exception as exc:  # noqa: BLE001 (whatever a scenario raises has failed it)
        broken = BrokenPromise(Promise.WHOLE, f"the scenario failed: {exc!r}")
        broken.__cause__ = exc
        return broken
    return world.unheard()


def refuse_running_loop(caller: str) -> None:
    """Raise inside a running event loop."""
    if asyncio._get_running_loop() is not None:  # noqa: SLF001 (asks without raising)
        raise RuntimeError(f"{caller} runs a loop of its own; call it from plain code")


def _check(scenario: object, seed: object, faults: object) -> None:
    refuse_running_loop("simulate()")
    checked_function("scenario", scenario, "an async function of a world")
    if faults is not None and not isinstance(faults, Faults):
        raise ConfigError(f"faults: Faults(...), not {shown(faults)}")
    if not is_whole(seed):
        raise ConfigError(f"seed: a whole number, not {shown(seed)}")


class ProgramFreezes:
    """Whether the program itself has called `gc.freeze()`: a run must not undo that.

    Counting a million frozen objects takes most of a run's time. So a program that was once seen
    to freeze is not asked again.
    """

    _was_seen = False

    @classmethod
    def is_seen(cls) -> bool:
        cls._was_seen = cls._was_seen or gc.get_freeze_count() > 0
        return cls._was_seen


@contextmanager
def alone(world: World) -> Iterator[None]:
    """A run has its own dice, log, garbage and files; afterwards everything is as before.

    Only one run at a time in a program, because this patches global state. The global dice come
    from the seed too. Garbage is collected when the run ends, so that it is noticed at the same
    step; earlier garbage is skipped, which saves time.
    """
    dice_state = random.getstate()
    log = logging.getLogger("stillfresh")
    propagates = log.propagate
    listener = LogListener(world)
    is_collecting = gc.isenabled()
    skips_earlier = not ProgramFreezes.is_seen()
    random.seed(world.plan.seed)
    log.propagate = False
    log.addHandler(listener)
    gc.disable()
    if skips_earlier:
        gc.freeze()
    try:
        with inline_files(world):
            yield
    finally:
        random.setstate(dice_state)
        log.propagate = propagates
        log.removeHandler(listener)
        if skips_earlier:
            gc.unfreeze()
        if is_collecting:
            gc.enable()


class LogListener(logging.Handler):
    """An internal error in stillfresh's log breaks the simulation."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if not self._world.is_over:
            broken = BrokenPromise(Promise.WHOLE, record.getMessage())
            broken.__cause__ = record.exc_info[1] if record.exc_info else None
            self._world.fail(broken)


def shrunk(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Greedy: the first simpler plan that fails too is the next to be made simpler."""
    runs = 0
    while True:
        for simpler in simpler_than(plan):
            if simpler.size >= plan.size:
                continue
            if runs == MOST_RUNS:
                return plan
            runs += 1
            if fails(simpler):
                plan = simpler
                break
        else:
            return plan


def simpler_than(plan: Plan) -> Iterator[Plan]:
    """The largest leaps first; some may be no simpler."""
    quiet = (0.0,) * len(plan.skews)
    for salt in range(SALTS):
        yield replace(plan, troubles=(), strikes=(), skews=quiet, salt=salt)
    yield replace(plan, troubles=())
    yield replace(plan, strikes=())
    yield replace(plan, skews=quiet)
    half = len(plan.troubles) // 2
    yield replace(plan, troubles=plan.troubles[:half])
    yield replace(plan, troubles=plan.troubles[half:])
    for at in range(len(plan.strikes)):
        yield replace(plan, strikes=plan.strikes[:at] + plan.strikes[at + 1 :])
    if len(plan.troubles) <= 16:
        for at in range(len(plan.troubles)):
            yield replace(plan, troubles=plan.troubles[:at] + plan.troubles[at + 1 :])
    for count in (1, 2, 3):
        yield replace(plan, processes=count)
    for count in (1, 2, 3, 5, 8, 13, 21):
        for salt in range(SALTS):
            yield replace(plan, steps=count, salt=salt)
    yield replace(plan, resends=False)
    yield replace(plan, shuffled=False)
