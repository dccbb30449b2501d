"""What goes wrong in a run, and when.

A plan is drawn from the seed before the run, so that a run can be repeated with fewer faults.
During the run, `Weather` says which faults are on.
"""

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Final

from stillfresh.checks import checked_whole
from stillfresh.clock import Clock
from stillfresh.errors import ConfigError, shown


class Trouble(StrEnum):
    """What may happen to one request to the store."""

    LOST = "lost before it took effect"
    UNANSWERED = "took effect, and the answer was lost"
    LATE = "took effect after its sender gave up"
    SLOW = "took seconds"
    TWICE = "took effect twice"
    HALF = "took effect for half of its keys"


class Blow(StrEnum):
    """What may happen to a process or to the store."""

    KILL = "is killed"
    PAUSE = "is paused"
    JUMP = "has its clock set"
    SLOW = "the store is slow"
    FULL = "the store is full"
    AWAY = "the store does not answer"


STRIKES_PROCESS: Final = frozenset({Blow.KILL, Blow.PAUSE, Blow.JUMP})
REQUESTS: Final = 400
"""The first requests, which may fail; later ones do not."""
RATES: Final = (0.0, 0.02, 0.1, 0.25)
CLOCKS: Final = 8
NODES: Final = 3
"""Nodes of a cluster."""
SLOWNESS: Final = 2.0
"""Seconds that a slow store adds, at most, each way."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A blow: at which second, to which process (if to one), how long or how far."""

    at: float
    blow: Blow
    process: int
    amount: float

    def __str__(self) -> str:
        whom = f"process {self.process} " if self.blow in STRIKES_PROCESS else ""
        by = "" if self.blow is Blow.KILL else f" ({self.amount:+.1f} s)"
        return f"{self.at:7.2f} s  {whom}{self.blow}{by}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Which faults a simulation may inject."""

    troubles: Collection[Trouble] | None = None
    """What may happen to requests; None: everything."""
    blows: Collection[Blow] | None = None
    most_blows: int = 6
    within: float = 30.0
    """Seconds from the start in which blows happen."""
    skew: float = 3.0
    """Seconds by which a clock may be wrong."""

    def __post_init__(self) -> None:
        for kinds, drawn in ((Trouble, self.troubles), (Blow, self.blows)):
            if drawn is not None and not all(isinstance(fault, kinds) for fault in drawn):
                raise ConfigError(f"faults: {kinds.__name__}s, not {shown(drawn)}")
        checked_whole("most_blows", self.most_blows, 0)
        for name in ("within", "skew"):
            value = getattr(self, name)
            if not isinstance(value, float | int) or value < 0:
                raise ConfigError(f"{name}: seconds, 0 or more, not {shown(value)}")

    @classmethod
    def none(cls) -> "Faults":
        """Return the faults of a world in which nothing fails."""
        return cls(troubles=(), blows=(), skew=0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: together with the scenario it determines everything that happens."""

    seed: int
    troubles: tuple[tuple[int, Trouble], ...] = ()
    """By the number of the request."""
    strikes: tuple[Strike, ...] = ()
    skews: tuple[float, ...] = field(default=(0.0,) * CLOCKS)
    resends: bool = False
    """A request without an answer is sent once more, as the real clients do."""
    shuffled: bool = True
    """Ready callbacks run in any order; otherwise in the order in which they came."""
    steps: int | None = None
    """At most so many steps of each loop over `world.steps(...)`."""
    processes: int | None = None
    salt: int = 0
    """For another run of the same plan, with other random numbers during the run."""

    def dice(self, what: str) -> random.Random:
        """The dice for one purpose, so that other draws do not change its results."""
        return random.Random(f"{what} {self.seed} {self.salt}")  # noqa: S311 (a seed, no secret)

    @property
    def size(self) -> tuple[int, ...]:
        """Smaller is simpler."""
        most = 1_000_000
        return (
            len(self.troubles) + len(self.strikes) + sum(1 for skew in self.skews if skew),
            self.processes or most,
            self.steps or most,
            int(self.resends),
            int(self.shuffled),
        )

    def __str__(self) -> str:
        lines = [f"request {number} {trouble}" for number, trouble in self.troubles]
        lines += [str(strike) for strike in self.strikes]
        skews = [f"{n + 1}: {skew:+.1f} s" for n, skew in enumerate(self.skews) if skew]
        if skews:
            lines.append(f"clocks are wrong by {', '.join(skews)}")
        if self.resends:
            lines.append("a request without an answer is sent again")
        if not self.shuffled:
            lines.append("what is ready runs in order")
        return "\n".join(f"  {line}" for line in lines) or "  nothing goes wrong"


def planned(seed: int, faults: Faults) -> Plan:
    """Draw a plan. The order of the draws matters: another order gives each seed another plan."""
    dice = random.Random(f"faults {seed}")  # noqa: S311 (a seed, no secret)
    troubles = sorted(Trouble if faults.troubles is None else faults.troubles)
    blows = sorted(Blow if faults.blows is None else faults.blows)
    rate = dice.choice(RATES) if troubles else 0.0
    troubled = [number for number in range(REQUESTS) if dice.random() < rate]
    count = dice.randint(0, faults.most_blows) if blows else 0
    skew = faults.skew if dice.random() < 0.5 else 0.0
    troubles_by_request = tuple((number, dice.choice(troubles)) for number in troubled)
    strikes = [_strike(dice, blows, faults.within) for _ in range(count)]
    return Plan(
        seed,
        troubles_by_request,
        tuple(sorted(strikes, key=attrgetter("at"))),
        tuple(round(dice.uniform(-skew, skew), 1) for _ in range(CLOCKS)),
        resends=bool(troubled) and dice.random() < 0.5,
    )


def _strike(dice: random.Random, blows: list[Blow], within: float) -> Strike:
    blow = dice.choice(blows)
    amount = dice.choice((0.5, 2.0, 7.0, 20.0))
    if blow is Blow.JUMP:
        amount *= dice.choice((-1, 1))
    return Strike(round(dice.uniform(0, within), 2), blow, dice.randint(1, 4), amount)


class Weather:
    """The present state of the store: slow, full, unavailable; and which requests fail."""

    def __init__(self, plan: Plan, time: Clock) -> None:
        self.dice = plan.dice("network")
        self.requests = 0
        self.faults = 0
        """Faults that have happened so far."""
        self._time = time
        self._troubles = dict(plan.troubles)
        self._until = {Blow.SLOW: 0.0, Blow.FULL: 0.0, Blow.AWAY: 0.0}
        self._struck: dict[Blow, int] = {}

    def next_request(self) -> tuple[int, Trouble | None]:
        number = self.requests
        self.requests += 1
        trouble = self._troubles.get(number)
        self.faults += trouble is not None
        return number, trouble

    def strikes(self, strike: Strike) -> bool:
        """False if the blow is for a process."""
        self.faults += 1
        if strike.blow in self._until:
            self._until[strike.blow] = self._time() + strike.amount
            self._struck[strike.blow] = strike.process
        return strike.blow in self._until

    def is_now(self, blow: Blow, node: int | None = None) -> bool:
        """`node`: in a cluster, only one node is struck."""
        return self._time() < self._until[blow] and node in {None, self._struck[blow] % NODES}

    def slowness(self) -> float:
        return self.dice.uniform(0, SLOWNESS) if self.is_now(Blow.SLOW) else 0.0
