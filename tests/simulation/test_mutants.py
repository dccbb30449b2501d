"""T2, T7: each promise has a deliberate bug that breaks it, and the simulator catches it."""

import pytest

from stillfresh.testing import Promise, SimulationFailed, simulate
from tests.simulation.mutants import MUTANTS, Mutant

SEEDS = 100
SEEDS_OF_THE_FENCE = 20
"""One step of the engine's fence is left out: a scenario is made for it, and finds it sooner."""
SLOW = {
    "a_load_inside_a_load_takes_a_place",
    "a_watcher_sleeps_on_after_a_load_landed",
    "an_update_without_an_answer_begins_again",
}
"""Found only after many seeds. Another mutant breaks the same promise sooner."""


def caught(mutant: Mutant, seeds: int) -> list[str]:
    """The promises that were seen to be broken, until it is the one that was meant."""
    seen: list[str] = []
    for seed in range(seeds):
        try:
            simulate(mutant.scenario, seed=seed, shrink=False)
        except SimulationFailed as failed:
            seen.append(failed.promise)
            if failed.promise == mutant.promise:
                break
    return seen


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=(pytest.mark.proof,) * (name in SLOW)) for name in MUTANTS]
)
class TestT2Mutants:
    """T7: a deliberate bug for each promise, late and duplicated requests among them."""

    def test_the_simulator_catches_each_mutant(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E6: within a few seeds, and for what it is."""
        mutant = MUTANTS[name]
        mutant.patch(monkeypatch)
        seeds = SEEDS_OF_THE_FENCE if name.startswith("the_fence_") else SEEDS
        assert mutant.promise in caught(mutant, seeds)


def test_t2_every_promise_has_a_mutant() -> None:
    assert {mutant.promise for mutant in MUTANTS.values()} == set(Promise)
    quick = MUTANTS.keys() - SLOW
    assert {MUTANTS[name].promise for name in quick} == set(Promise)
    assert len(quick) == len(MUTANTS) - len(SLOW)


class TestT2Found:
    def test_a_failure_after_its_caller_was_cancelled_is_retrieved(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found by the simulator: a store that fails after its caller was cancelled made asyncio
        complain of an exception that nobody had looked at.
        """
        mutant = MUTANTS["a_read_fails_and_nobody_is_told"]
        simulate(mutant.scenario, seed=5)
        mutant.patch(monkeypatch)
        with pytest.raises(SimulationFailed, match="never retrieved"):
            simulate(mutant.scenario, seed=5, shrink=False)
