"""What `stillfresh plan` decides: objectives, budgets, terms to try, and which are proposed.

Pure: text and figures in, decisions out. No replay, no clock, no files.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
"""The durations that are tried: the ones that people write."""
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
        below = duration(self.below) if self.name in AGES else percent(self.below)
        return f"{self.name}<{below}"


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
    match = LIMIT.fullmatch(part)
    if match is not None:
        age, most, name, share = match.groups()
        if age:
            with suppress(ConfigError):  # not a duration; the error below says what to write
                return Limit(age, seconds(most, positive=True))
        elif 0 < float(share) <= 100:
            return Limit(name, float(share) / 100)
    raise ConfigError(f"objective: cannot read {shown(part)}; {WRITE}")


def budget_of(text: str) -> float:
    """`50/s`, as requests a second."""
    match = BUDGET.fullmatch(text)
    if match is None or not float(match[1]):
        advice = "write requests and a unit of time: '50/s', '200/m', '1000/h'"
        raise ConfigError(f"budget: cannot read {shown(text)}; {advice}")
    requests, unit = match.groups()
    return float(requests) / SECONDS_PER_UNIT[unit]


def duration(value: float) -> str:
    """As a setting is written: `90s`, `5m`."""
    best_unit = "s"
    best_size = 1.0
    if value:
        for unit, size in SECONDS_PER_UNIT.items():
            if size > best_size and value % size == 0:
                best_unit = unit
                best_size = size
    return f"{value / best_size:g}{best_unit}"


def percent(share: float) -> str:
    """Return a share as text: `99.5%`."""
    return f"{share * 100:.3g}%"


def rungs(length: float) -> tuple[float, ...]:
    """Durations that a recording of this length can judge: half of it at most."""
    return tuple(rung for rung in LADDER if rung <= length / 2)


def search(
    length: float,
    limits: Sequence[Limit],
    replay: Callable[[Candidate], Figures],
    today: float = inf,
) -> list[Figures]:
    """Replay with different terms, and return the figures of each.

    Ages grow with `fresh_for`, so a binary search finds the longest that is fresh enough; a few
    others show what else there is. `today`: the share of reads that wait now.
    """
    ladder = rungs(length)
    tried: dict[Candidate, Figures] = {}

    def try_terms(place: int, times: float) -> Figures:
        fresh_for = ladder[place]
        stale_for = max((rung for rung in LADDER if rung <= fresh_for * times), default=0.0)
        terms = Candidate(fresh_for, stale_for)
        if terms not in tried:
            tried[terms] = replay(terms)
        return tried[terms]

    def find_longest(multiples: Sequence[float]) -> None:
        """For each multiple, find the longest `fresh_for` that is fresh enough."""
        for times in multiples:

            def is_fresh_enough(place: int, times: float = times) -> bool:
                return _is_met(ages, try_terms(place, times))

            _halve(len(ladder), is_fresh_enough)

    ages = [limit for limit in limits if limit.name in AGES]
    if ages:
        find_longest(STALE)
        fits = [figures for figures in tried.values() if _is_met(limits, figures)]
        if fits and _cheapest(fits).waited > waiting_allowed(limits, today):
            find_longest(MORE_STALE)
    for place in range(len(ladder) - 1, -1, -COARSE):
        for times in STALE[:2] if ages else STALE:
            try_terms(place, times)
    return list(tried.values())


def _halve(count: int, is_met: Callable[[int], bool]) -> None:
    """Call `is_met` with places by binary search. The places that meet it come first."""
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
    tried: Mapping[str, Sequence[Figures]],
    limits: Sequence[Limit],
    budget: float | None,
    today: Mapping[str, float] = NOT_RECORDED,
) -> Choice:
    """The fewest requests that meet the objective; without one, the freshest within the budget.

    `today`: the share of reads of each kind that wait now. No proposal lets more of them wait,
    unless the objective has a limit of its own for that.
    """
    allowed = {
        kind: _patient(tries, waiting_allowed(limits, today.get(kind, inf)))
        for kind, tries in tried.items()
    }
    within = _within(allowed, budget) if budget is not None else None
    if not limits and within is not None:
        return within
    chosen: dict[str, Figures] = {}
    missed: list[str] = []
    waiting: dict[str, Figures] = {}
    for kind, tries in allowed.items():
        right = [figures for figures in tries if _is_met(limits, figures)]
        if not right:
            missed.append(kind)
            right = _nearest(tries, limits)
            others = [figures for figures in tried[kind] if _is_met(limits, figures)]
            if others:
                waiting[kind] = min(others, key=lambda figures: (figures.waited, figures.requests))
        chosen[kind] = _cheapest(right)
    total = sum(figures.requests for figures in chosen.values())
    is_over = budget is not None and total > budget
    is_met = not missed and not is_over
    return Choice(chosen, total, is_met, tuple(missed), within if is_over else None, waiting)


def _nearest(tries: Sequence[Figures], limits: Sequence[Limit]) -> list[Figures]:
    """The tries that miss the objective by the least; within 5 %, all count as equal."""
    excess = {figures: max(limit.excess(figures) for limit in limits) for figures in tries}
    most = min(excess.values()) * NEAR
    return [figures for figures in tries if excess[figures] <= most]


def _is_met(limits: Sequence[Limit], figures: Figures) -> bool:
    return all(limit.excess(figures) < 1 for limit in limits)


def _patient(tries: Sequence[Figures], most: float) -> Sequence[Figures]:
    """The tries that let no more reads wait; if there is none, the one that lets the fewest."""
    patient = [figures for figures in tries if figures.waited <= most]
    return patient or [min(tries, key=lambda figures: figures.waited)]


def _cheapest(tries: Sequence[Figures]) -> Figures:
    """The try with the fewest requests; of those within 5 %, the one that lets the fewest wait."""
    most = min(figures.requests for figures in tries) * NEAR
    near = [figures for figures in tries if figures.requests <= most]
    return min(near, key=lambda figures: (figures.waited, figures.p99, -figures.terms.fresh_for))


def _within(tried: Mapping[str, Sequence[Figures]], budget: float) -> Choice | None:
    """The lowest p99 for all kinds whose requests are within the budget."""
    ages = sorted({figures.p99 for tries in tried.values() for figures in tries})
    for age in ages:
        fresh_enough = {
            kind: [figures for figures in tries if figures.p99 <= age]
            for kind, tries in tried.items()
        }
        if all(fresh_enough.values()):
            chosen = {kind: _cheapest(tries) for kind, tries in fresh_enough.items()}
            total = sum(figures.requests for figures in chosen.values())
            if total <= budget:
                return Choice(chosen, total)
    return None


def frontier(tried: Sequence[Figures]) -> list[Figures]:
    """Tries that no other beats in requests, ages and waiting; most requests first."""
    marks = {figures: (figures.requests, figures.p99, figures.waited) for figures in tried}
    best = [
        figures
        for figures, mark in marks.items()
        if not any(all(map(le, other, mark)) and other != mark for other in marks.values())
    ]
    return sorted(best, key=lambda figures: -figures.requests)
