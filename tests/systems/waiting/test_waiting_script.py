"""D7: the waiting rules in JavaScript take the steps of the rules in Python.

Both get the same histories: the first steps of the explorations, and drawn ones. Every state and
every effect must be the same.
"""

import random
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache

import pytest

from stillfresh.systems.waiting import rules
from stillfresh.systems.waiting.model import (
    Answered,
    Event,
    Failed,
    GameId,
    GameState,
    Invalidated,
    MoveFailed,
    MoveSent,
    Opened,
    PauseOver,
    Reconnected,
    Started,
    State,
    Step,
    YourTurn,
)
from tests.kit.processes import ROOT
from tests.kit.waiting_script import Script, as_json_step, running_script
from tests.systems.waiting.waiting_mutants import MUTANTS, Mutant
from tests.systems.waiting.waiting_page import observed

NODE = shutil.which("node")
GAMES: tuple[GameId, ...] = ("a", "b", "c", "d", 1, "1")
"""A number and the text of the same number are two games."""
HISTORIES = 800
LENGTH = 60

needs_node = pytest.mark.skipif(NODE is None, reason="this machine has no node")


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with running_script(NODE or "") as script:
        yield script


def drawn_event(dice: random.Random, state: State, *, focus: float, has_versions: bool) -> Event:
    """Any event; more often one that this state waits for.

    `focus` is how likely it is about the game on screen.
    """
    if state.in_flight is not None and dice.random() < 0.3:
        answer = dice.choices(GAMES, k=dice.randrange(state.limit + 2))
        return Answered(tuple(answer)) if dice.random() < 0.8 else Failed()
    game_id = dice.choice(GAMES)
    if state.screen is not None and dice.random() < focus:
        game_id = state.screen.game_id
    version = dice.choice([None, dice.randrange(8)]) if has_versions else None
    my_turn = dice.random() < 0.6
    kinds: list[Event] = [
        Opened(game_id, my_turn, version),
        MoveSent(game_id, version),
        MoveSent(game_id),
        YourTurn(game_id, version),
        YourTurn(game_id),
        GameState(game_id, my_turn, version),
        GameState(game_id, my_turn, version),
        MoveFailed(game_id, version),
        PauseOver(),
    ]
    rare: list[Event] = [Started(), Invalidated(), Reconnected(), Failed(), Answered(GAMES[:2])]
    return dice.choice(rare if dice.random() < 0.1 else kinds)


def drawn_history(seed: int) -> tuple[State, list[Event]]:
    """A start, and events that are drawn knowing the state that each of them meets."""
    dice = random.Random(seed)
    start = State(limit=dice.choice([3, 5]))
    focus = dice.choice([0.4, 0.95])
    has_versions = dice.random() < 0.7
    state = start
    events: list[Event] = []
    for _ in range(LENGTH):
        event = drawn_event(dice, state, focus=focus, has_versions=has_versions)
        events.append(event)
        state = rules.step(state, event).state
    return start, events


@cache
def drawn_steps() -> list[tuple[State, Event, Step]]:
    """Every step of every drawn history, in Python."""
    steps = []
    for seed in range(HISTORIES):
        state, events = drawn_history(seed)
        for event in events:
            step = rules.step(state, event)
            steps.append((state, event, step))
            state = step.state
    return steps


@needs_node
class TestD7Differential:
    def test_the_script_takes_every_step_that_the_explorations_begin_with(
        self, script: Script
    ) -> None:
        """From the states that the exhaustive check of the rules visits first."""
        for (state, event), expected in observed().items():
            assert script.steps(state, [event]) == [as_json_step(expected)], (state, event)

    @pytest.mark.parametrize("first", range(0, HISTORIES, 100))
    def test_drawn_histories_give_the_same_states_in_both_languages(
        self, script: Script, first: int
    ) -> None:
        """Sixty events each, most of them such as the state may meet."""
        for seed in range(first, first + 100):
            state, events = drawn_history(seed)
            for event, actual in zip(events, script.steps(state, events), strict=True):
                expected = rules.step(state, event)
                assert actual == as_json_step(expected), (seed, state, event)
                state = expected.state


class TestD7Histories:
    @pytest.mark.parametrize("mutant", [pytest.param(it, id=it.what) for it in MUTANTS])
    def test_a_difference_in_any_rule_would_be_noticed(self, mutant: Mutant) -> None:
        """Each known mistake changes a step that the comparison above looks at."""
        cases = [(state, event, step) for (state, event), step in observed().items()]
        cases += drawn_steps()
        with mutant.applied():
            assert any(rules.step(state, event) != step for state, event, step in cases)

    def test_the_drawn_histories_have_every_event(self) -> None:
        """And both effects, and orders that are restored from a snapshot."""
        steps = drawn_steps()
        assert {type(event) for _, event, _ in steps} == set(rules.RULES)
        assert {type(effect).__name__ for *_, step in steps for effect in step.effects} == {
            "Pause",
            "Refetch",
        }
        assert any(step.state.is_restored for *_, step in steps)


@needs_node
class TestD7Driver:
    def test_the_cache_in_javascript_asks_retries_and_closes(self) -> None:
        """Its own tests, in Node: tests/systems/waiting/waiting_cache.test.mjs."""
        file = ROOT / "tests" / "systems" / "waiting" / "waiting_cache.test.mjs"
        done = subprocess.run(
            [NODE or "", "--test", "--test-reporter=tap", str(file)],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
