"""W13: the explorer itself, on worlds small enough to count by hand."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, TypeAlias

import pytest

from stillfresh import ConfigError
from stillfresh.testing import Explored, PromiseBroken, explore

At: TypeAlias = tuple[int, int]
Steps: TypeAlias = Callable[[At], Iterator[tuple[str, At]]]


def grid(size: int) -> Steps:
    """A walk to the right or up, on a square."""

    def steps(at: At) -> Iterator[tuple[str, At]]:
        x, y = at
        if x < size:
            yield "right", (x + 1, y)
        if y < size:
            yield "up", (x, y + 1)

    return steps


def test_explore_visits_each_state_once() -> None:
    """However many histories lead there."""
    assert explore((0, 0), grid(9), {}) == Explored(states=100, depth=18, is_whole=True)


def test_explore_stops_at_the_depth() -> None:
    """All states that so many steps reach, and no other."""
    found = explore((0, 0), grid(9), {}, depth=3)
    assert found == Explored(states=1 + 2 + 3 + 4, depth=3, is_whole=False)


def test_explored_says_how_much_it_saw() -> None:
    """In words, for a log or a page."""
    assert str(Explored(12_345, 7, is_whole=False)) == "12,345 states, every history, up to 7 steps"
    assert "all that can be reached" in str(Explored(4, 2, is_whole=True))


def test_explore_reports_the_shortest_history_that_breaks_a_promise() -> None:
    """Step by step, with the promise and the state."""
    promises = {"stays low": lambda at: at[1] < 2}
    with pytest.raises(PromiseBroken) as caught:
        explore((0, 0), grid(9), promises)
    assert caught.value.history == ("up", "up")
    assert caught.value.promise == "stays low"
    assert caught.value.state == (0, 2)
    assert str(caught.value) == "broken: stays low, after\n  1. up\n  2. up\nin (0, 2)"


def test_explore_checks_the_start_as_well() -> None:
    """A promise may be broken before anything happens."""
    with pytest.raises(PromiseBroken) as caught:
        explore((0, 0), grid(1), {"never": lambda _: False})
    assert caught.value.history == ()


def test_explore_refuses_a_world_that_is_too_large() -> None:
    """Before it fills the memory."""
    with pytest.raises(ConfigError, match="max_states=50 states within 9 steps"):
        explore((0, 0), grid(1_000), {}, max_states=50)


def test_explore_refuses_a_state_with_endless_steps() -> None:
    """Each new state is counted, not only each that has been gone through."""
    with pytest.raises(ConfigError, match="max_states=50 states within 1 steps"):
        explore(0, lambda _: (("on", number) for number in count()), {}, max_states=50)


def test_explore_allows_exactly_max_states() -> None:
    """The bound itself is allowed."""
    assert explore((0, 0), grid(9), {}, max_states=100).states == 100


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("start", []),
        ("steps", None),
        ("promises", ["stays low"]),
        ("promises", {"stays low": True}),
        ("depth", -1),
        ("depth", 1.5),
        ("depth", True),
        ("max_states", 0),
        ("max_states", None),
    ],
)
def test_bad_arguments_of_explore_are_named(name: str, given: object) -> None:
    """With what is allowed, before anything is explored."""
    good: dict[str, Any] = {"start": (0, 0), "steps": grid(1), "promises": {}}
    with pytest.raises(ConfigError, match=f"^{name}: must"):
        explore(**{**good, name: given})
