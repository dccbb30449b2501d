"""What a test of code that uses stillfresh needs."""

from stillfresh.testing.clocks import ManualClock
from stillfresh.testing.conformance_copies import CopyConformance
from stillfresh.testing.conformance_leases import LeaseConformance, StoreConformance
from stillfresh.testing.explore import Explored, PromiseBroken, explore
from stillfresh.testing.simulator import (
    Blow,
    Faults,
    Observed,
    Process,
    Promise,
    Simulated,
    SimulationFailed,
    Trouble,
    Version,
    World,
    simulate,
)

__all__ = [
    "Blow",
    "CopyConformance",
    "Explored",
    "Faults",
    "LeaseConformance",
    "ManualClock",
    "Observed",
    "Process",
    "Promise",
    "PromiseBroken",
    "Simulated",
    "SimulationFailed",
    "StoreConformance",
    "Trouble",
    "Version",
    "World",
    "explore",
    "simulate",
]
