"""What a test of code that uses stillfresh needs."""

from stillfresh.testing.clocks import ManualClock
from stillfresh.testing.conformance import StoreConformance
from stillfresh.testing.explore import Explored, PromiseBroken, explore

__all__ = ["Explored", "ManualClock", "PromiseBroken", "StoreConformance", "explore"]
