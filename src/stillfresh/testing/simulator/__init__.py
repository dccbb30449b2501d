"""The simulator: real code on a virtual loop, faults from a seed, promises at every step (T)."""

from stillfresh.testing.simulator.faults import Blow, Faults, Trouble
from stillfresh.testing.simulator.ledger import Promise, Version
from stillfresh.testing.simulator.process import Observed, Process
from stillfresh.testing.simulator.simulate import Simulated, SimulationFailed, simulate
from stillfresh.testing.simulator.world import World

__all__ = [
    "Blow",
    "Faults",
    "Observed",
    "Process",
    "Promise",
    "Simulated",
    "SimulationFailed",
    "Trouble",
    "Version",
    "World",
    "simulate",
]
