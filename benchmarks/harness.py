"""How every figure is taken: ratios of medians of interleaved rounds.

A machine's speed drifts, so contenders take turns, round by round, in shuffled order, and only
their ratios are reported. Each has a loop compiled for it alone: one loop shared by several types
is slower for all of them, since the interpreter specialises a call site for the type it sees.
"""

import asyncio
import gc
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

__all__ = ["Contender", "Figures", "Progress", "Row", "Section", "race", "race_on_loop"]

Progress: TypeAlias = Callable[[str], None]
Figures: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True)
class Contender:
    """`statement`, which may await, is run for each `key` of `keys`; `names` is what it can see."""

    name: str
    statement: str
    names: dict[str, object]
    keys: Sequence[object]

    def compiled(self) -> Callable[[], float | Awaitable[float]]:
        """A function that runs the loop once and returns nanoseconds for one key."""
        kind = "async def" if self.statement.startswith("await ") else "def"
        source = (
            f"{kind} loop():\n"
            "    began = perf_counter_ns()\n"
            "    for key in keys:\n"
            f"        {self.statement}\n"
            "    return (perf_counter_ns() - began) / len(keys)\n"
        )
        # As arguments, the names are locals: nobody pays for looking a global up.
        scope: dict[str, object] = {
            "keys": self.keys,
            "perf_counter_ns": time.perf_counter_ns,
            **self.names,
        }
        outer = f"def make({', '.join(scope)}):\n" + "".join(
            f"    {line}\n" for line in source.splitlines()
        )
        namespace: dict[str, Callable[..., Callable[[], float | Awaitable[float]]]] = {}
        exec(outer + "    return loop\n", namespace)  # noqa: S102 (our own text, a loop per type)
        return namespace["make"](**scope)


def race(contenders: Iterable[Contender], *, rounds: int = 51) -> Figures:
    """Nanoseconds for one key: the median of `rounds`, taken in turns."""
    return asyncio.run(race_on_loop(contenders, rounds=rounds))


async def race_on_loop(contenders: Iterable[Contender], *, rounds: int = 51) -> Figures:
    """The same for statements that await what belongs to the running event loop."""
    loops = [(contender.name, contender.compiled()) for contender in contenders]
    times: dict[str, list[float]] = {name: [] for name, _ in loops}
    dice = random.Random(1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            dice.shuffle(loops)
            await asyncio.sleep(0)  # where Ctrl-C is heard
            for name, loop in loops:
                elapsed = loop()
                times[name].append(elapsed if isinstance(elapsed, float) else await elapsed)
    finally:
        gc.enable()
    return {name: median(values) for name, values in times.items()}


@dataclass(frozen=True, slots=True)
class Row:
    """One promise: what was measured, against what, and the target if there is one.

    `tried`, from `tried.py`, is what has been done for a target that is missed.
    """

    rule: str
    what: str
    measured: float
    target: float | None = None
    at_least: bool = False
    unit: str = "×"
    tried: str = ""

    @property
    def kept(self) -> bool:
        """True as well where there is no target to miss."""
        if self.target is None:
            return True
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    def cells(self) -> list[str]:
        sign = "≥" if self.at_least else "≤"
        target = "–" if self.target is None else f"{sign} {self.target:g} {self.unit}"
        verdict = "–" if self.target is None else ("yes" if self.kept else "**no**")
        number = f"{self.measured:,.0f}" if self.measured >= 10_000 else f"{self.measured:.2f}"
        return [self.rule, self.what, f"{number} {self.unit}".strip(), target, verdict]


@dataclass(frozen=True, slots=True)
class Section:
    """A table of rows, and the plain figures behind it; or a table in words, its head first."""

    title: str
    rows: list[Row] = field(default_factory=list)
    figures: dict[str, Figures] = field(default_factory=dict)
    notes: str = ""
    words: list[list[str]] = field(default_factory=list)
    missing: str = ""
    """What could not be measured here, and why."""
    failed: str = ""
    """Why there is nothing to show at all."""
