"""What `stillfresh plan` decides: objectives, budgets, terms to try, and which are proposed.

Pure: text and figures in, decisions out. No replay, no clock, no files.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from operator import le
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from stillfresh.durations import SECONDS_PER_UNIT, seconds
from stillfresh.errors import ConfigError, shown

LADDER: Final = (
    *(1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0),
    *(420.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0, 7200.0, 10_800.0, 21_600.0, 43_200.0),
    *(86_400.0, 172_800.0, 604_800.0),
)
"""The durations that are tried: those that people write."""
STALE: Final = (0.0, 1.0, 5.0)
"""`stale_for`, as a multiple of `fresh_for`."""
MORE_STALE: Final = (0.5, 2.0, 20.0)
"""Further multiples, tried if more reads than today would wait otherwise."""
COARSE: Final = 4
"""Steps of the ladder between two tries, without an objective."""
NEAR: Final = 1.05
"""Requests within 5 % count as equal: then fewer waiting readers are better."""
AGES: Final = ("p50", "p99")
LIMIT: Final = re.compile(
    r"\s*(?:(p50|p99)\s*<\s*([\w.]+)|(stale|waited)\s*<\s*(\d+(?:\.\d+)?)%)\s*"
)
BUDGET: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*/\s*([smhd])\s*")
WAITED: Final = "waited"
NOT_RECORDED: Final[Mapping[str, float]] = MappingProxyType({})
"""Any number of reads may wait."""
WRITE: Final = "write p50 or p99 with a duration, stale or waited with a share: 'p99<60s, stale<5%'"


class Candidate(Struct, frozen=True):
    """Times to try, in seconds."""

    fresh_for: float
    stale_for: float

    def __str__(self) -> str:
        return f"fresh_for={duration(self.fresh_for)}, stale_for={duration(self.stale_for)}"


class Figures(Struct, frozen=True):
    """The result of a replay, scaled up to all keys."""

    terms: Candidate
    requests: float
    """Upstream requests per second."""
    p50: float
    p99: float
    """Seconds of age at serving."""
    stale: float
    waited: float
    failed: float
    """Shares of all reads."""
    copies: int
    bytes: int
    """The most at one time."""


class Limit(Struct, frozen=True):
    """`p99<60s`."""

    name: str
    below: float

    def excess(self, figures: Figures) -> float:
        """The value divided by the limit; below one, it is met."""
        value: float = getattr(figures, self.name)
        return value / self.below

    def __str__(self) -> str:
        return f"{self.name}<{duration(self.below) if self.name in AGES else percent(self.below)}"


class Choice(Struct, frozen=True):
    """The proposal for each kind; `total` requests per second."""

    chosen: Mapping[str, Figures]
    total: float
    is_met: bool = True
    missed: tuple[str, ...] = ()
    """Kinds for which no try meets the objective; the nearest is proposed."""
    within: "Choice | None" = None
    """If the proposal exceeds the budget: the freshest that does not, if there is one."""
    waiting: Mapping[str, Figures] = {}
    """Missed kinds whose objective can be met if more reads wait than today, and by what."""


def objective_of(text: str) -> tuple[Limit, ...]:
    """`p99<60s, stale<5%`; ConfigError that says what to write."""
    return tuple(_limit(part.strip()) for part in text.split(","))


def _limit(part: str) -> Limit:
    try:
        if (found := LIMIT.fullmatch(part)) is not None:
            age, most, name, share = found.groups()
            if age:
                return Limit(age, seconds(most, positive=True))
            if 0 < float(share) <= 100:
                return Limit(name, float(share) / 100)
    except ConfigError:
        pass
    raise ConfigError(f"objective: cannot read {shown(part)}; {WRITE}")


def budget_of(text: str) -> float:
    """`50/s`, as requests a second."""
    found = BUDGET.fullmatch(text)
    if found is None or not float(found[1]):
        said = "write requests and a unit of time: '50/s', '200/m', '1000/h'"
        raise ConfigError(f"budget: cannot read {shown(text)}; {said}")
    return float(found[1]) / SECONDS_PER_UNIT[found[2]]


def duration(value: float) -> str:
    """As a setting is written: `90s`, `5m`."""
    whole = [it for it in SECONDS_PER_UNIT.items() if it[1] >= 1 and value % it[1] == 0]
    unit, size = max(whole, key=lambda it: it[1]) if whole and value else ("s", 1.0)
    return f"{value / size:g}{unit}"


def percent(share: float) -> str:
    """Return a share as text: `99.5%`."""
    return f"{share * 100:.3g}%"


def rungs(length: float) -> tuple[float, ...]:
    """Durations that a recording of this length can judge: half of it at most."""
    return tuple(it for it in LADDER if it <= length / 2)


def search(
    length: float,
    limits: Sequence[Limit],
    tried: Callable[[Candidate], Figures],
    today: float = inf,
) -> list[Figures]:
    """Have terms tried. Ages grow with `fresh_for`, so its longest that is fresh enough is found
    by halves; a few others show what else there is. `today`: the share of reads that wait now.
    """
    ladder, found = rungs(length), dict[Candidate, Figures]()

    def at(place: int, times: float) -> Figures:
        stale_for = max((it for it in LADDER if it <= ladder[place] * times), default=0.0)
        terms = Candidate(ladder[place], stale_for)
        found[terms] = found.get(terms) or tried(terms)
        return found[terms]

    def halve(multiples: Sequence[float]) -> None:
        """For each multiple, find the longest `fresh_for` that is fresh enough."""
        for times in multiples:
            _halve(len(ladder), lambda place: _is_met(ages, at(place, times)))  # noqa: B023 (now)

    ages = [it for it in limits if it.name in AGES]
    if ages:
        halve(STALE)
        fits = [it for it in found.values() if _is_met(limits, it)]
        if fits and _cheapest(fits).waited > waiting_allowed(limits, today):
            halve(MORE_STALE)
    for place in range(len(ladder) - 1, -1, -COARSE):
        for times in STALE[:2] if ages else STALE:
            at(place, times)
    return list(found.values())


def _halve(count: int, is_met: Callable[[int], bool]) -> None:
    """Ask for places between those that meet it, which come first, and those that do not."""
    low = -1
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if is_met(middle):
            low = middle
        else:
            high = middle


def waiting_allowed(limits: Sequence[Limit], today: float) -> float:
    """The largest share of reads that may wait: as many as today, unless the objective says it."""
    return inf if any(limit.name == WAITED for limit in limits) else today


def choose(
    found: Mapping[str, Sequence[Figures]],
    limits: Sequence[Limit],
    budget: float | None,
    today: Mapping[str, float] = NOT_RECORDED,
) -> Choice:
    """The fewest requests that meet the objective; without one, the freshest within the budget.

    `today`: the share of reads of each kind that wait now. No proposal lets more of them wait,
    unless the objective has a limit of its own for that (G23).
    """
    allowed = {
        kind: _patient(tried, waiting_allowed(limits, today.get(kind, inf)))
        for kind, tried in found.items()
    }
    within = _within(allowed, budget) if budget is not None else None
    if not limits and within is not None:
        return within
    chosen: dict[str, Figures] = {}
    missed: list[str] = []
    waiting: dict[str, Figures] = {}
    for kind, tried in allowed.items():
        right = [it for it in tried if _is_met(limits, it)]
        if not right:
            missed.append(kind)
            right = _nearest(tried, limits)
            others = [it for it in found[kind] if _is_met(limits, it)]
            if others:
                waiting[kind] = min(others, key=lambda it: (it.waited, it.requests))
        chosen[kind] = _cheapest(right)
    total = sum(it.requests for it in chosen.values())
    is_over = budget is not None and total > budget
    is_met = not missed and not is_over
    return Choice(chosen, total, is_met, tuple(missed), within if is_over else None, waiting)


def _nearest(tried: Sequence[Figures], limits: Sequence[Limit]) -> list[Figures]:
    """Those that miss the objective by the least; within 5 %, all count as equal."""
    excess = {it: max(limit.excess(it) for limit in limits) for it in tried}
    most = min(excess.values()) * NEAR
    return [it for it in tried if excess[it] <= most]


def _is_met(limits: Sequence[Limit], figures: Figures) -> bool:
    return all(limit.excess(figures) < 1 for limit in limits)


def _patient(tried: Sequence[Figures], most: float) -> Sequence[Figures]:
    """The tries that let no more reads wait; if there is none, the one that lets the fewest."""
    return [it for it in tried if it.waited <= most] or [min(tried, key=lambda it: it.waited)]


def _cheapest(found: Sequence[Figures]) -> Figures:
    most = min(it.requests for it in found) * NEAR
    near = (it for it in found if it.requests <= most)
    return min(near, key=lambda it: (it.waited, it.p99, -it.terms.fresh_for))


def _within(found: Mapping[str, Sequence[Figures]], budget: float) -> Choice | None:
    """The lowest p99 for all kinds whose requests are within the budget."""
    for most in sorted({it.p99 for all_ in found.values() for it in all_}):
        right = {kind: [it for it in all_ if it.p99 <= most] for kind, all_ in found.items()}
        if all(right.values()):
            chosen = {kind: _cheapest(all_) for kind, all_ in right.items()}
            if (total := sum(it.requests for it in chosen.values())) <= budget:
                return Choice(chosen, total)
    return None


def frontier(tried: Sequence[Figures]) -> list[Figures]:
    """Tries that no other beats in requests, ages and waiting; most requests first."""
    marks = {it: (it.requests, it.p99, it.waited) for it in tried}
    best = [
        it
        for it, mark in marks.items()
        if not any(all(map(le, other, mark)) and other != mark for other in marks.values())
    ]
    return sorted(best, key=lambda it: -it.requests)
