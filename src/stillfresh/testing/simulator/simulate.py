"""`simulate(scenario, seed=…)`: one run, exactly repeatable; a failing one made small (T1, T3)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from stillfresh.checks import is_whole
from stillfresh.errors import ConfigError, shown
from stillfresh.testing.simulator.faults import Faults, Plan, planned
from stillfresh.testing.simulator.loop import Deadlock
from stillfresh.testing.simulator.promises import Broken, Promise
from stillfresh.testing.simulator.shrink import shrunk
from stillfresh.testing.simulator.surroundings import alone
from stillfresh.testing.simulator.world import World

Scenario: TypeAlias = Callable[[World], Awaitable[object]]

SHOWN: Final = 60
"""Lines of the trace that an error shows, the last ones."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """How a run went."""

    seed: int
    plan: Plan
    steps: int
    """Callbacks that were run, with every promise looked at after each."""
    seconds: float
    """That passed, all of them virtual."""
    requests: int
    loads: int
    faults: int
    """That came to pass, of those that were planned."""
    trace: tuple[str, ...]
    broken: Broken | None = None


class SimulationFailed(AssertionError):
    """Says which promise, of which seed, in the smallest run that was found, and what happened."""

    def __init__(self, first: Simulated, smallest: Simulated) -> None:
        self.seed = first.seed
        self.promise = smallest.broken.promise if smallest.broken else ""
        self.first = first
        self.smallest = smallest
        left = max(0, len(smallest.trace) - SHOWN)
        lines = [
            f"seed {self.seed}: {smallest.broken}",
            f"with (of {_count(first.plan)} faults, {_count(smallest.plan)} matter)",
            str(smallest.plan),
            f"this happened{f' ({left} lines left out)' if left else ''}",
            *smallest.trace[-SHOWN:],
        ]
        super().__init__("\n".join(lines))


def simulate(
    scenario: Scenario, *, seed: int, faults: Faults | None = None, shrink: bool = True
) -> Simulated:
    """Run `await scenario(world)` in a world made from the seed; SimulationFailed if it breaks.

    The same seed, scenario and code give the same run, to the letter. `shrink=False` leaves a
    failing run as it is.
    """
    plan = planned(_checked(scenario, seed, faults), Faults() if faults is None else faults)
    first = run(scenario, plan)
    if first.broken is None:
        return first
    smallest = first
    if shrink:
        promise = first.broken.promise
        smallest = run(scenario, shrunk(plan, lambda it: _breaks(scenario, it, promise)))
    raise SimulationFailed(first, smallest) from smallest.broken


def run(scenario: Scenario, plan: Plan) -> Simulated:
    """Once, as planned."""
    world = World(plan)
    with alone(world):
        try:
            return _simulated(world, _broken(world, scenario))
        finally:
            world.end()


def _broken(world: World, scenario: Scenario) -> Broken | None:
    try:
        world.run(scenario)
    except Deadlock as exc:
        return Broken(Promise.ALIVE, str(exc))
    except Broken as exc:
        return exc
    except Exception as exc:  # noqa: BLE001 (whatever a scenario raises has failed it)
        broken = Broken(Promise.WHOLE, f"the scenario failed: {exc!r}")
        broken.__cause__ = exc
        return broken
    return world.unheard()


def _simulated(world: World, broken: Broken | None) -> Simulated:
    return Simulated(
        world.plan.seed,
        world.plan,
        world.loop.steps,
        world.time(),
        world.weather.requests,
        len(world.ledger.loads),
        world.weather.faults,
        tuple(world.trace),
        broken,
    )


def _breaks(scenario: Scenario, plan: Plan, promise: str) -> bool:
    broken = run(scenario, plan).broken
    return broken is not None and broken.promise == promise


def _checked(scenario: object, seed: object, faults: object) -> int:
    if asyncio._get_running_loop() is not None:  # noqa: SLF001 (asks without raising)
        raise RuntimeError("simulate() runs a loop of its own; call it from plain code")
    if not callable(scenario):
        raise ConfigError(f"scenario: an async function of a world, not {shown(scenario)}")
    if faults is not None and not isinstance(faults, Faults):
        raise ConfigError(f"faults: Faults(...), not {shown(faults)}")
    if not is_whole(seed):
        raise ConfigError(f"seed: a whole number, not {shown(seed)}")
    return seed


def _count(plan: Plan) -> int:
    return plan.size[0]
