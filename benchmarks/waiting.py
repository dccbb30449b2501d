"""W14: refetches in a hundred turns, against asking on every event and against an oracle.

No time is measured: the same sessions are replayed for everyone, and calls of the backend counted.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from benchmarks.harness import Progress, Row, Section
from stillfresh.systems.waiting.model import (
    LIMIT,
    Answered,
    Event,
    GameState,
    Invalidated,
    MoveSent,
    Opened,
    Reconnected,
    Refetch,
    Started,
    State,
    YourTurn,
)
from stillfresh.systems.waiting.rules import step

__all__ = ["section"]

TURNS = 1_000
SPEED = 0.35
"""How likely an opponent is to have played by our next turn."""


@dataclass
class Table:
    """A backend: which games are ours to play, in its order."""

    humans: list[str]
    bots: list[str]
    since: dict[str, int] = field(default_factory=dict)
    now: int = 0

    def __post_init__(self) -> None:
        for game in self.humans + self.bots:
            self.turn(game)

    def turn(self, game: str) -> None:
        self.now += 1
        self.since[game] = self.now

    def waiting(self) -> tuple[str, ...]:
        order = sorted(self.since, key=lambda game: (game in self.bots, self.since[game], game))
        return tuple(order[:LIMIT])

    def away(self) -> list[str]:
        return [game for game in self.humans + self.bots if game not in self.since]


Told: TypeAlias = tuple[Event, tuple[str, ...]]
"""What was heard, and what the backend would have answered then."""


def moved(table: Table, game: str) -> Iterator[Told]:
    del table.since[game]
    yield MoveSent(game), table.waiting()
    yield GameState(game, my_turn=False), table.waiting()


def came(table: Table, game: str) -> Iterator[Told]:
    table.turn(game)
    yield YourTurn(game), table.waiting()


def loop(table: Table, game: str) -> Iterator[Told]:
    """One game, again and again, while others wait."""
    yield Started(), table.waiting()
    yield Opened(game, my_turn=True), table.waiting()
    for _ in range(TURNS):
        yield from moved(table, game)
        yield from came(table, game)


def alternation(table: Table, first: str, second: str) -> Iterator[Told]:
    """Two games by turns: where the one comes back, the other has just been played."""
    yield Started(), table.waiting()
    for number in range(TURNS):
        game = (first, second)[number % 2]
        yield Opened(game, my_turn=True), table.waiting()
        yield from moved(table, game)
        yield from came(table, game)


def evening(table: Table, dice: random.Random) -> Iterator[Told]:
    """Mostly quick bots, some slow humans, now and then a lost connection or a game that ends."""
    yield Started(), table.waiting()
    game = dice.choice(sorted(table.since))
    for _ in range(TURNS):
        if game not in table.since or dice.random() < 0.2:
            game = dice.choice(table.waiting())
            yield Opened(game, my_turn=True), table.waiting()
        yield from moved(table, game)
        for other in table.away():
            if other in table.bots or dice.random() < SPEED or len(table.since) < 2:
                yield from came(table, other)
        if dice.random() < 0.02:
            news: Event = Invalidated() if dice.random() < 0.5 else Reconnected()
            yield news, table.waiting()


def cached(session: Iterator[Told]) -> int:
    """What the rules ask for, each answered at once."""
    state, count = State(), 0
    for event, answer in session:
        state, effects = step(state, event)
        while Refetch() in effects:
            count += 1
            state, effects = step(state, Answered(answer))
    return count


def on_every_event(session: Iterator[Told]) -> int:
    """Whatever may change the list asks for it: a move, a turn, structural news."""
    asks = Started | MoveSent | YourTurn | Invalidated | Reconnected
    return sum(isinstance(event, asks) for event, _ in session)


def oracle(session: Iterator[Told]) -> int:
    """Asks only when the answer would be another than what it has, without what it played."""
    has: tuple[str, ...] = ()
    count = 0
    for event, answer in session:
        if isinstance(event, MoveSent):
            has = tuple(game for game in has if game != event.game_id)
        if has != answer:
            has, count = answer, count + 1
    return count


def sessions() -> dict[str, Callable[[], Iterator[Told]]]:
    humans, bots = ["a", "b", "c", "d"], ["x", "y"]
    return {
        "one game, three others wait": lambda: loop(Table(humans, []), "d"),
        "one game against bots, seven others wait": lambda: loop(
            Table([*humans, "e"], ["w", *bots]), "y"
        ),
        "two games by turns, two others wait": lambda: alternation(Table(humans, []), "a", "b"),
        "a mixed evening, four with humans, two against bots": lambda: evening(
            Table(humans, bots), random.Random(3)
        ),
    }


def section(progress: Progress) -> Section:
    rows, words = [], [["session", "stillfresh", "asking on every event", "oracle"]]
    for name, session in sessions().items():
        progress(f"waiting: {name}")
        counts = [count(session()) for count in (cached, on_every_event, oracle)]
        words.append([name, *(f"{100 * count / TURNS:.1f}" for count in counts)])
        target = 0.01 if name.startswith("one game") else None
        rows.append(Row("W14", f"{name}: against every event", counts[0] / counts[1], target))
    return Section(
        "Longest-Waiting: refetches in a hundred turns (W14)",
        rows,
        words=words,
        notes=f"Replayed, not timed: {TURNS:,} turns each. The oracle knows when an answer would "
        "differ from what it has. If an answer lists only some games, even the oracle asks after "
        "most moves.",
    )
