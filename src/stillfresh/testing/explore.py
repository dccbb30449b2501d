"""Every history of a small model, up to a depth: the shortest one that breaks a promise (W13).

For whatever is driven by events: write the world around it (what is on its way, what may fail) as
a frozen, hashable state and a function that lists every next one. Nothing here knows of caches.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from stillfresh.checks import checked_whole, is_whole
from stillfresh.errors import ConfigError, shown

S = TypeVar("S", bound=Hashable)
Steps: TypeAlias = Callable[[S], Iterable[tuple[object, S]]]
Promises: TypeAlias = Mapping[str, Callable[[S], bool]]


@dataclass(frozen=True, slots=True)
class Explored:
    """How much was seen, none of it broken."""

    states: int
    depth: int
    is_whole: bool
    """Nothing else can be reached, at any depth."""

    def __str__(self) -> str:
        how = "all that can be reached" if self.is_whole else "every history"
        return f"{self.states:,} states, {how}, up to {self.depth} steps"


class PromiseBroken(AssertionError):
    """Says which promise, after which steps, in which state; no shorter history breaks one."""

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
    """Breadth first, each state once. Raises `PromiseBroken` for the first that breaks a promise.

    `steps(state)` lists `(label, next state)`. Without a `depth`: until nothing new is found.
    """
    _check_arguments(start, steps, promises, depth, max_states)
    search = _Search(start, steps, promises, max_states)
    while search.frontier and (depth is None or search.depth < depth):
        search.go_deeper()
    return Explored(len(search.found), search.depth, is_whole=not search.frontier)


def _check_arguments(
    start: object, steps: object, promises: object, depth: object, most: object
) -> None:
    if not _is_hashable(start):
        raise ConfigError(f"start: must be hashable, frozen all through, not {shown(start)}")
    if not callable(steps):
        raise ConfigError(f"steps: must be a function of a state, not {shown(steps)}")
    if not isinstance(promises, Mapping) or not all(map(callable, promises.values())):
        raise ConfigError(f"promises: must map names to functions, not {shown(promises)}")
    if depth is not None and not is_whole(depth, 0):
        raise ConfigError(f"depth: must be a number of steps, or None for all, not {shown(depth)}")
    checked_whole("max_states", most)


def _is_hashable(given: object) -> bool:
    try:
        hash(given)
    except TypeError:
        return False
    return True


class _Search(Generic[S]):
    def __init__(self, start: S, steps: Steps[S], promises: Promises[S], max_states: int) -> None:
        self._steps = steps
        self._promises = tuple(promises.items())
        self._max_states = max_states
        self.found: dict[S, tuple[S, object] | None] = {start: None}
        """Each state with the one before it and the step between: the way back to the start."""
        self.depth = 0
        self.frontier = [start]
        self._check(start)

    def go_deeper(self) -> None:
        """One step further from every state of the frontier."""
        found, new = self.found, list[S]()
        for state in self.frontier:
            for label, after in self._steps(state):
                if after not in found:
                    self._make_room()
                    found[after] = (state, label)
                    self._check(after)
                    new.append(after)
        # An empty frontier is no depth of its own: nothing is that far away.
        self.depth += bool(new)
        self.frontier = new

    def _make_room(self) -> None:
        """Before each new state: even one state may have steps without end."""
        if len(self.found) >= self._max_states:
            raise ConfigError(
                f"explore: more than max_states={self._max_states:,} states within "
                f"{self.depth + 1} steps; give a smaller model, a depth, or more room"
            )

    def _check(self, state: S) -> None:
        for promise, holds in self._promises:
            if not holds(state):
                raise PromiseBroken(promise, self._history(state), state)

    def _history(self, state: S) -> tuple[object, ...]:
        labels = []
        while (before := self.found[state]) is not None:
            state, label = before
            labels.append(label)
        return tuple(reversed(labels))
