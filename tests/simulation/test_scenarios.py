"""T2: what must hold at every step holds: 200 seeds here, 10,000 by `make simulate`."""

import pytest

from stillfresh.testing import simulate
from tests.simulation.scenarios import SCENARIOS

SEEDS = 200
EACH = -(-SEEDS // len(SCENARIOS))


@pytest.mark.parametrize("name", SCENARIOS)
class TestT2Promises:
    def test_promises_hold_at_every_step_of_each_scenario(self, name: str) -> None:
        """Whatever is lost, late, killed, paused or wrong about the time."""
        runs = [simulate(SCENARIOS[name], seed=seed) for seed in range(EACH)]
        assert len({run.trace for run in runs}) == EACH


def test_c5_an_id_taken_from_the_queue_is_always_requested() -> None:
    """C5, seed 100506: with the file away an id cooled down unasked, and stayed stale."""
    simulate(SCENARIOS["of_a_coordinator"], seed=100506)


def test_c9_the_last_failure_says_when_an_id_is_tried_again() -> None:
    """C9, seed 930026: after a forced refresh failed, a longer cooldown of another process counted.

    That process's clock was ahead.
    """
    simulate(SCENARIOS["of_a_coordinator"], seed=930026)


def test_t2_every_system_has_a_scenario() -> None:
    """The engine in several scenarios, every system on it in one at least."""
    assert len(SCENARIOS) * EACH >= SEEDS
    systems = {"of_pages", "of_a_hub", "of_a_coordinator", "of_a_feed", "of_games"}
    assert len(SCENARIOS.keys() - systems) >= 5
    assert systems <= SCENARIOS.keys()
