"""Which histories are explored, and how far (W13). `make explore` goes on from there.

`--deeper 2` explores two steps further: eight times the states.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stillfresh.testing import Explored, explore
from tests.systems.waiting import waiting_world as world
from tests.systems.waiting.waiting_world import ALL, PROMISES, Happening, World

__all__ = [
    "BLIND",
    "CUT",
    "EXPLORATIONS",
    "FORWARDED",
    "FORWARDED_LOOP",
    "FRESH",
    "GOES_ON",
    "LOOP",
    "PAIR",
    "TURN",
    "WISHES",
    "Exploration",
]

PLAY: tuple[Happening, ...] = (
    world.messages,
    world.refetches,
    world.user,
    world.moves,
    world.opponents,
)
BOTS: tuple[Happening, ...] = (*PLAY, world.returns)


@dataclass(frozen=True, slots=True)
class Exploration:
    """From one world, after a history, all that may happen of these kinds, up to so many steps."""

    name: str
    start: World
    happenings: Sequence[Happening]
    depth: int
    history: tuple[str, ...] = ()

    def run(self, deeper: int = 0) -> Explored:
        return explore(
            world.after(self.start, *self.history),
            world.steps(*self.happenings),
            PROMISES,
            depth=self.depth + deeper,
            max_states=20_000_000,
        )


FRESH = Exploration(
    "from the first refetch on, everything",
    world.begin("A", "B", "C", "D", limit=3),
    ALL,
    7,
)
CUT = Exploration(
    "from an answer that was cut, everything",
    world.settled("A", "B", "C", "D", limit=3),
    ALL,
    8,
)
TURN = Exploration(
    "from a turn that has just come, everything",
    world.turn("C", "A", "D", limit=4),
    ALL,
    7,
)
ELSEWHERE = Exploration(
    "from an answer that was cut, play here and elsewhere",
    world.settled("A", "B", "C", "D", limit=3),
    (*PLAY, world.elsewhere),
    8,
)
LOOP = Exploration(
    "from a turn that has just come, play",
    world.turn("C", "A", "D", limit=4),
    PLAY,
    12,
)
PAIR = Exploration(
    "from a turn with one other game, play",
    world.turn("A", "D", limit=4),
    PLAY,
    13,
)
BLIND = Exploration(
    "from a snapshot that misses its game, play",
    TURN.start,
    PLAY,
    9,
    (
        "the backend reads C A D",
        "plays A",
        "the answer comes",
        "the move in A is made",
        "hears GameState(A, False, 4)",
    ),
)
WISHES = Exploration(
    "from two refetches, the second without the snapshot once wished for, play",
    TURN.start,
    PLAY,
    9,
    (
        "the backend reads C A D",
        "the answer comes",
        "plays A",
        "the move in A fails",
        "hears MoveFailed(A, 2)",
        "B becomes ours",
        "hears YourTurn(B, 0)",
        "plays A",
        "the move in A fails",
        "hears MoveFailed(A, 2)",
    ),
)
WENT_ON = ("plays A", "the move in A is made, our turn goes on", "hears Kept(A, 2, 0)")
RENEWED = Exploration(
    "from a turn that has just come, play with bots, and each move renews the wait",
    world.turn("C", "A", "D", limit=4, renews=True),
    BOTS,
    10,
)
GOES_ON = Exploration(
    "from a turn that went on, play with bots",
    world.settled("A", "C", "D", limit=4),
    BOTS,
    9,
    (*WENT_ON, "the backend reads A C D", "the answer comes"),
)
GOES_ON_RENEWED = Exploration(
    "from a turn that went on, play with bots, and each move renews the wait",
    world.settled("A", "C", "D", limit=4, renews=True),
    BOTS,
    9,
    (*WENT_ON, "the backend reads C A D", "the answer comes"),
)
FORWARDED = Exploration(
    "from an answer that was cut, everything, and states of all games",
    world.settled("A", "B", "C", "D", limit=3, forwards=True),
    ALL,
    8,
)
FORWARDED_TURN = Exploration(
    "from a turn that has just come, everything, and states of all games",
    world.turn("C", "A", "D", limit=4, forwards=True),
    ALL,
    7,
)
FORWARDED_LOOP = Exploration(
    "from a turn that has just come, play, and states of all games",
    world.turn("C", "A", "D", limit=4, forwards=True),
    PLAY,
    11,
)
FORWARDED_PAIR = Exploration(
    "from a turn with one other game, play, and states of all games",
    world.turn("A", "D", limit=4, forwards=True),
    PLAY,
    11,
)
FORWARDED_BOTS = Exploration(
    "from a turn that has just come, play with bots and renewed waits, and states of all games",
    world.turn("C", "A", "D", limit=4, renews=True, forwards=True),
    BOTS,
    9,
)
EXPLORATIONS = [
    FRESH,
    CUT,
    TURN,
    ELSEWHERE,
    LOOP,
    PAIR,
    BLIND,
    WISHES,
    RENEWED,
    GOES_ON,
    GOES_ON_RENEWED,
    FORWARDED,
    FORWARDED_TURN,
    FORWARDED_LOOP,
    FORWARDED_PAIR,
    FORWARDED_BOTS,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deeper", type=int, default=0, help="steps beyond what the tests explore")
    deeper = parser.parse_args().deeper
    for exploration in EXPLORATIONS:
        began = time.perf_counter()
        explored = exploration.run(deeper)
        print(f"{exploration.name}: {explored} ({time.perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    main()
