"""From a plan that breaks a promise to the smallest one that breaks it still (T1)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from stillfresh.testing.simulator.faults import Plan

MOST_RUNS: Final = 250
SALTS: Final = 8
"""Runs of a plan without faults: what is left to chance may have to be drawn more than once."""


def shrunk(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Greedy: the first simpler plan that fails too is the next to be made simpler."""
    runs = 0
    found = True
    while found:
        found = False
        for simpler in simpler_than(plan):
            runs += 1
            if runs > MOST_RUNS:
                return plan
            if fails(simpler):
                plan, found = simpler, True
                break
    return plan


def simpler_than(plan: Plan) -> Iterator[Plan]:
    """The largest leaps first."""
    for simpler in (*_without_faults(plan), *_fewer(plan)):
        if simpler.size < plan.size:
            yield simpler


def _without_faults(plan: Plan) -> Iterator[Plan]:
    quiet = (0.0,) * len(plan.skews)
    for salt in range(SALTS):
        yield replace(plan, troubles=(), strikes=(), skews=quiet, salt=salt)
    yield replace(plan, troubles=())
    yield replace(plan, strikes=())
    yield replace(plan, skews=quiet)
    half = len(plan.troubles) // 2
    if half:
        yield replace(plan, troubles=plan.troubles[:half])
        yield replace(plan, troubles=plan.troubles[half:])
    for at in range(len(plan.strikes)):
        yield replace(plan, strikes=plan.strikes[:at] + plan.strikes[at + 1 :])
    if len(plan.troubles) <= 16:
        for at in range(len(plan.troubles)):
            yield replace(plan, troubles=plan.troubles[:at] + plan.troubles[at + 1 :])


def _fewer(plan: Plan) -> Iterator[Plan]:
    for count in (1, 2, 3):
        yield replace(plan, processes=count)
    for count in (1, 2, 3, 5, 8, 13, 21):
        for salt in range(SALTS):
            yield replace(plan, steps=count, salt=salt)
    yield replace(plan, resends=False)
    yield replace(plan, shuffled=False)
