"""Every history of a small model, up to a depth: the shortest one that breaks a promise.

For any code that is driven by events: write the world around it (messages on their way, possible
faults) as a frozen, hashable state, and a function that lists every next state. Nothing here knows
of caches.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from stillfresh.checks import checked_function, checked_whole
from stillfresh.errors import ConfigError, shown

S = TypeVar("S", bound=Hashable)
Steps: TypeAlias = Callable[[S], Iterable[tuple[object, S]]]
Promises: TypeAlias = Mapping[str, Callable[[S], bool]]


@dataclass(frozen=True, slots=True)
class Explored:
    """What `explore` returns if no promise was broken: how much it saw."""

    states: int
    depth: int
    is_whole: bool
    """True: no other state can be reached, at any depth."""

    def __str__(self) -> str:
        how = "all that can be reached" if self.is_whole else "every history"
        return f"{self.states:,} states, {how}, up to {self.depth} steps"


class PromiseBroken(AssertionError):
    """A promise does not hold: the message has the shortest history that breaks it."""

    def __init__(self, promise: str, history: tuple[object, ...], state: object) -> None:
        lines = [f"{number:3}. {label}" for number, label in enumerate(history, start=1)]
        super().__init__("\n".join([f"broken: {promise}, after", *lines, f"in {state!r}"]))
        self.promise = promise
        self.history = history
        self.state = state


def explore(
    start: S,
    steps: Steps[S],
    promises: Promises[S],
    *,
    depth: int | None = None,
    max_states: int = 1_000_000,
) -> Explored:
    """Visit each state once, breadth first. Raises `PromiseBroken` at the first broken promise.

    `steps(state)` lists `(label, next state)`. Without a `depth`: until nothing new is found.
    """
    _check_arguments(start, steps, promises, depth, max_states)
    origins: dict[S, tuple[S, object] | None] = {start: None}
    """Each state with the one before it and the step between: the way back to the start."""
    _check(start, promises, origins)
    frontier = [start]
    reached = 0
    while frontier and (depth is None or reached < depth):
        new: list[S] = []
        for state in frontier:
            for label, after in steps(state):
                if after in origins:
                    continue
                if len(origins) >= max_states:  # before each: one state may have steps without end
                    raise ConfigError(
                        f"explore: more than max_states={max_states:,} states within "
                        f"{reached + 1} steps; give a smaller model, a depth, or more room"
                    )
                origins[after] = (state, label)
                _check(after, promises, origins)
                new.append(after)
        frontier = new
        if new:  # an empty frontier is no depth of its own: nothing is that far away
            reached += 1
    return Explored(len(origins), reached, is_whole=not frontier)


def _check_arguments(
    start: object, steps: object, promises: object, depth: object, most: object
) -> None:
    try:
        hash(start)
    except TypeError as exc:
        raise ConfigError(
            f"start: must be hashable, frozen all through, not {shown(start)}"
        ) from exc
    checked_function("steps", steps, "a function of a state")
    if not isinstance(promises, Mapping) or not all(map(callable, promises.values())):
        raise ConfigError(f"promises: must map names to functions, not {shown(promises)}")
    if depth is not None:
        checked_whole("depth", depth, 0, or_else=", or None for all")
    checked_whole("max_states", most)


def _check(state: S, promises: Promises[S], origins: Mapping[S, tuple[S, object] | None]) -> None:
    for promise, holds in promises.items():
        if not holds(state):
            raise PromiseBroken(promise, _history_of(state, origins), state)


def _history_of(state: S, origins: Mapping[S, tuple[S, object] | None]) -> tuple[object, ...]:
    """The labels of the steps from the start to this state."""
    labels: list[object] = []
    origin = origins[state]
    while origin is not None:
        before, label = origin
        labels.append(label)
        origin = origins[before]
    return tuple(reversed(labels))
