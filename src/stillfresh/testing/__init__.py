"""Tools for tests of code that uses stillfresh."""

from stillfresh.testing.clocks import ManualClock
from stillfresh.testing.conformance import ContractConformance, StoreConformance
from stillfresh.testing.conformance_capabilities import (
    EvictionConformance,
    InlineConformance,
    ListingConformance,
    PushConformance,
    StatisticsConformance,
    TenantConformance,
)
from stillfresh.testing.conformance_copies import CopyConformance
from stillfresh.testing.conformance_leases import LeaseConformance
from stillfresh.testing.conformance_puts import PutConformance
from stillfresh.testing.explore import Explored, PromiseBroken, explore
from stillfresh.testing.fixtures import (
    async_cache_fixture,
    cache_fixture,
    django_fixture,
    flask_fixture,
)
from stillfresh.testing.simulator.faults import Blow, Faults, Trouble
from stillfresh.testing.simulator.ledger import Version
from stillfresh.testing.simulator.process import Observed, Process
from stillfresh.testing.simulator.promises import Promise
from stillfresh.testing.simulator.simulate import Simulated, SimulationFailed, simulate
from stillfresh.testing.simulator.world import World
from stillfresh.testing.upstream import FakeUpstream
from stillfresh.testing.values import unchanged_values

__all__ = [
    "Blow",
    "ContractConformance",
    "CopyConformance",
    "EvictionConformance",
    "Explored",
    "FakeUpstream",
    "Faults",
    "InlineConformance",
    "LeaseConformance",
    "ListingConformance",
    "ManualClock",
    "Observed",
    "Process",
    "Promise",
    "PromiseBroken",
    "PushConformance",
    "PutConformance",
    "Simulated",
    "SimulationFailed",
    "StatisticsConformance",
    "StoreConformance",
    "TenantConformance",
    "Trouble",
    "Version",
    "World",
    "async_cache_fixture",
    "cache_fixture",
    "django_fixture",
    "explore",
    "flask_fixture",
    "simulate",
    "unchanged_values",
]
