"""What a test of code that uses stillfresh needs."""

from stillfresh.testing.clocks import ManualClock

__all__ = ["ManualClock"]
