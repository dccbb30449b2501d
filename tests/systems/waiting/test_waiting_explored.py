"""Every interleaving, to a depth, keeps the promises, and every mutant breaks one: W13."""

import gc
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from stillfresh.systems.waiting import rules
from stillfresh.systems.waiting.model import Opened
from tests.systems.waiting import waiting_world as world
from tests.systems.waiting.waiting_explorations import EXPLORATIONS, FRESH, Exploration
from tests.systems.waiting.waiting_mutants import MUTANTS, Mutant
from tests.systems.waiting.waiting_page import PAGE, from_rules, marked, mutant_row, state_count


@pytest.fixture(autouse=True)
def _stays() -> Iterator[None]:
    """Every state stays to the end: looking for garbage among them is a fifth of the time."""
    gc.disable()
    yield
    gc.enable()


QUICK = 30_000
"""States that are explored in a second. Longer explorations are `make proof`'s."""
SLOW_TO_CATCH = {
    "a late refusal is of a newer move",
    "a refusal is of every move",
    "a snapshot is put back during a flight",
    "a snapshot survives a game added here",
    "a snapshot survives a move elsewhere",
    "a turn that never left us makes a snapshot",
    "an answer brings it back",
}
"""Mutants that only a long history shows."""


def marks(is_slow: bool) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.proof,) if is_slow else ()


def explorations() -> Iterator[Any]:
    """Each, the slow ones marked; one with everything that may happen is always among them."""
    counts = dict(re.findall(r"^\| (.*) \| \d+ \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE))
    for exploration in EXPLORATIONS:
        count = int(counts.get(exploration.name, "0").replace(",", ""))
        is_slow = count > QUICK and exploration is not FRESH
        yield pytest.param(exploration, id=exploration.name, marks=marks(is_slow))


@pytest.mark.timeout(600)  # two hundred thousand states take minutes on a very busy machine
class TestW13Explored:
    """W13: nothing that can happen shows a wrong order, or a game that is not ours."""

    @pytest.mark.parametrize("exploration", list(explorations()))
    def test_every_history_keeps_every_promise(self, exploration: Exploration) -> None:
        """And visits as many states as docs/waiting.md says."""
        explored = exploration.run()
        print(explored)
        assert state_count(exploration, explored) in PAGE.read_text()

    @pytest.mark.parametrize(
        "mutant",
        [
            pytest.param(mutant, id=mutant.what, marks=marks(mutant.what in SLOW_TO_CATCH))
            for mutant in MUTANTS
        ],
    )
    def test_every_mutant_is_caught(self, mutant: Mutant) -> None:
        """With the shortest history that breaks it, as docs/waiting.md shows it."""
        broken = mutant.caught()
        assert broken is not None
        print(broken)
        assert mutant_row(mutant, broken) in PAGE.read_text()

    @pytest.mark.parametrize("seed", range(8))
    def test_long_walks_keep_every_promise(self, seed: int) -> None:
        """Histories far longer than can be explored, with a rest now and then."""
        dice, steps = random.Random(seed), world.steps(*world.ALL)
        at, rests, is_calm = dice.choice(EXPLORATIONS).start, 0, False
        for _ in range(1_000):
            is_calm = (is_calm or dice.random() < 0.15) and not world.is_at_rest(at)
            choices = list(steps(at))
            at = dice.choice([step for step in choices if is_calm and settles(step[0])] or choices)[
                1
            ]
            rests += world.is_at_rest(at)
            assert [name for name, holds in world.PROMISES.items() if not holds(at)] == []
        assert rests > 20

    @pytest.mark.parametrize("name", from_rules())
    def test_the_tables_of_the_waiting_page_are_current(self, name: str) -> None:
        """Tables and diagrams of docs/waiting.md are as `waiting_page.py` would write them."""
        assert marked(name, from_rules()[name]()) in PAGE.read_text()

    def test_the_states_on_the_waiting_page_add_up(self) -> None:
        """The states of all explorations together."""
        counts = re.findall(r"^\| .* \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE)
        *parts, total = (int(count.replace(",", "")) for count in counts)
        assert len(parts) == len(EXPLORATIONS)
        assert sum(parts) == total

    def test_the_mutants_that_are_slow_to_catch_are_mutants(self) -> None:
        assert {mutant.what for mutant in MUTANTS} > SLOW_TO_CATCH

    def test_a_mutant_leaves_nothing_behind(self) -> None:
        """The rules are themselves again."""
        table, turn_came = rules.RULES, rules.turn_came
        for mutant in MUTANTS:
            with mutant.applied():
                pass
        assert rules.RULES is table
        assert rules.turn_came is turn_came


def settles(label: str) -> bool:
    """What is under way arrives; nothing new is set going."""
    ends = ("hears", "the answer", "the backend", "the move", "the pause", "reconnects")
    return label.startswith(ends)


class TestW13World:
    """W13: the model is the world that it claims to be."""

    def test_worlds_that_differ_only_in_version_numbers_are_one_state(self) -> None:
        """Versions count by their order only."""
        start = world.settled("A", "B", "C", "D", limit=3)
        client = rules.step(start.client, Opened("A", my_turn=True, version=8)).state
        later = replace(start, versions=(8, 6), client=client)
        assert world.renumbered(later) == world.renumbered(start)

    def test_a_human_game_comes_before_one_against_bots(self) -> None:
        """The order is the backend's: W12."""
        assert world.came(("B", "D"), "A") == ("B", "A", "D")

    def test_a_world_at_rest_comes_to_rest_again(self) -> None:
        """Promises about the rest are not kept by never resting."""
        start = world.settled("A", "B", "C", "D", limit=3)
        assert world.is_at_rest(start)
        rests = [
            after
            for _, one in world.steps(*world.ALL)(start)
            for _, after in world.steps(*world.ALL)(one)
            if world.is_at_rest(after)
        ]
        assert len(rests) >= 3
