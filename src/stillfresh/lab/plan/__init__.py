"""`stillfresh plan`: which times would have suited the recorded reads.

`traffic` reads a recording, `replay` replays it by the engine itself in virtual time, and `rules`
choose among the results.
"""

from stillfresh.lab.plan.replay import Planned, planned, replayed
from stillfresh.lab.plan.rules import (
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
from stillfresh.lab.plan.traffic import traffic_of

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
