"""What a test of code that uses stillfresh needs."""

from stillfresh.testing.clocks import ManualClock
from stillfresh.testing.conformance import StoreConformance

__all__ = ["ManualClock", "StoreConformance"]
