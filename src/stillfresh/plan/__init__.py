"""`stillfresh plan`: which terms would have suited the reads that were recorded.

A recording is read (`traffic`), replayed by the engine itself in virtual time (`replay`), and the
rules choose among what came out (`rules`).
"""

from stillfresh.plan.replay import Planned, planned, replayed
from stillfresh.plan.rules import (
    Candidate,
    Choice,
    Figures,
    budget_of,
    duration,
    frontier,
    objective_of,
    percent,
    rungs,
)
from stillfresh.plan.traffic import traffic_of

__all__ = [
    "Candidate",
    "Choice",
    "Figures",
    "Planned",
    "budget_of",
    "duration",
    "frontier",
    "objective_of",
    "percent",
    "planned",
    "replayed",
    "rungs",
    "traffic_of",
]
