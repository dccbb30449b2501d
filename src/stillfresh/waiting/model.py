"""What the Longest-Waiting cache knows, hears and asks for (seed 003; W1, W11).

Frozen data only; what happens to it is decided in `rules` and `rules_refetch`.
"""

from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from msgspec import Struct

GameId: TypeAlias = str | int
"""The id of a game."""
Pool: TypeAlias = tuple[GameId, ...]
Versions: TypeAlias = tuple[tuple[GameId, int], ...]
Moves: TypeAlias = tuple[tuple[GameId, int | None], ...]

LIMIT: Final = 5
"""Games in one answer of the backend: as many as this, and there may be more."""


class Proof(StrEnum):
    """Why the order that is shown is the backend's order."""

    IRRELEVANT = "irrelevant"
    """There are two games or fewer: any order leads to the same next game."""
    SERVER = "server"
    """It is the last response; games may have been removed since, which reorders nothing."""
    SNAPSHOT = "snapshot"
    """It is an earlier response, restored because only its own game has come and gone since."""


class Navigation(Struct, frozen=True):
    """Where "next game" may lead from the game on screen."""

    games: Pool
    proof: Proof
    pending: bool
    """True: a new response is on its way or due."""


class Snapshot(Struct, frozen=True):
    """A response of the backend, kept for the one game whose turn it was requested for."""

    game_id: GameId
    pool: Pool
    is_complete_from_server: bool
    is_mid_turn: bool = False
    """Read while the turn went on: the order fits only until the turn comes anew."""


class Played(StrEnum):
    """When we ourselves played the snapshot's game."""

    NOT_SINCE = "not since"
    """Not since the snapshot was taken."""
    SINCE = "since"
    """Since it was taken: when the game comes back, the same order fits again."""
    BEFORE = "before"
    """It was away when the answer was read, or may have been: no order of this game is known."""


class RefetchRequest(Struct, frozen=True):
    """A refetch that is wanted: the game whose snapshot it is to become, if any."""

    snapshot_of: GameId | None = None
    is_mid_turn: bool = False
    """Asked for because the turn of that game went on, not because it came."""
    is_echo: bool = False
    """Asked for by an answer, not by news: an answer to it that changes nothing asks slower."""


class Screen(Struct, frozen=True):
    game_id: GameId
    my_turn: bool
    opened_at: int | None = None
    """The version that was opened."""
    version: int | None = None
    """That of the last state that was applied since."""
    owes_message: bool = False
    """Its state told of the turn that is running; the `your_turn` of the same turn is to come."""


class State(Struct, frozen=True):
    """All that the cache knows."""

    pool: Pool = ()
    is_complete_from_server: bool = False
    """The last answer was not cut: there are no other games."""
    snapshot: Snapshot | None = None
    played: Played = Played.NOT_SINCE
    """The snapshot's game."""
    is_restored: bool = False
    """The pool was last put back from a snapshot, not answered."""
    in_flight: RefetchRequest | None = None
    follows: RefetchRequest | None = None
    """What is asked next: when the answer in flight is here, or else when a pause is over."""
    moves: Moves = ()
    """Our moves that nobody has confirmed, each with the version it was made for; oldest first."""
    away: Pool = ()
    """Games that are not ours to play, though the answer in flight may still say so."""
    screen: Screen | None = None
    versions: Versions = ()
    """For a game, the version up to which news of a turn is no news; the oldest entry first."""
    limit: int = LIMIT

    @property
    def pending(self) -> Pool:
        """Games with a move of ours that the backend has not confirmed."""
        return tuple(dict.fromkeys(game_id for game_id, _ in self.moves))

    @property
    def is_busy(self) -> bool:
        """True: a request is under way, or follows."""
        return self.in_flight is not None or self.follows is not None


class Started(Struct, frozen=True):
    """The first refetch."""


class Opened(Struct, frozen=True, tag="watching"):
    """A game came on screen."""

    game_id: GameId
    my_turn: bool
    version: int | None = None


class MoveSent(Struct, frozen=True):
    """We sent a move, made for that version; for the one on screen if none is given."""

    game_id: GameId
    version: int | None = None


class YourTurn(Struct, frozen=True, tag="your_turn"):
    """The backend says that a game has become ours to play."""

    game_id: GameId
    version: int | None = None


class GameState(Struct, frozen=True, tag="game_state"):
    """The backend's view of the game on screen."""

    game_id: GameId
    my_turn: bool
    version: int | None = None


class MoveFailed(Struct, frozen=True, tag="move_failed"):
    """The backend refused a move of ours, the one made for that version."""

    game_id: GameId
    version: int | None = None
    reason: str = ""


class Reconnected(Struct, frozen=True):
    """Messages may have been missed."""


class Invalidated(Struct, frozen=True, tag="long_wait_invalidated"):
    """`long_wait_invalidated`: games came or went in a way that no turn tells."""


class Answered(Struct, frozen=True):
    """The refetch in flight brought these games, in the backend's order."""

    game_ids: Pool


class Failed(Struct, frozen=True):
    """The refetch in flight brought nothing."""


class PauseOver(Struct, frozen=True):
    """What was put off may be asked now."""


Event: TypeAlias = (
    Started
    | Opened
    | MoveSent
    | YourTurn
    | GameState
    | MoveFailed
    | Reconnected
    | Invalidated
    | Answered
    | Failed
    | PauseOver
)


class Refetch(Struct, frozen=True):
    """Ask the backend now; answer with `Answered` or `Failed`."""


class Pause(Struct, frozen=True):
    """Wait a while, longer each time in a row; then say `PauseOver`."""


Effect: TypeAlias = Refetch | Pause


class Step(NamedTuple):
    """What an event made of the state, and what is to be done."""

    state: State
    effects: tuple[Effect, ...] = ()
