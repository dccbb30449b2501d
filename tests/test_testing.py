"""ManualClock: the clock of every test."""

from stillfresh import Clock
from stillfresh.testing import ManualClock


def test_a_manual_clock_stands_still_until_it_is_moved() -> None:
    """Reading it changes nothing; `advance` is the only way time passes."""
    clock = ManualClock(start=100)
    assert (clock(), clock()) == (100.0, 100.0)
    clock.advance(1.5)
    clock.advance("1m")
    assert clock() == 161.5


def test_a_manual_clock_can_be_set_back() -> None:
    """A wall clock jumps; so can this one."""
    clock = ManualClock()
    clock.advance(-3600)
    assert clock() == -3600.0


def test_a_manual_clock_is_a_clock() -> None:
    """Whatever takes `clock=` takes it."""
    clock: Clock = ManualClock()
    assert clock() == 0.0
