"""The data of the Longest-Waiting cache: its state, its events, its effects.

Frozen data only; `rules` and `rules_refetch` decide what happens to it.
"""

from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from msgspec import Struct

GameId: TypeAlias = str | int
"""The id of a game."""
Pool: TypeAlias = tuple[GameId, ...]
Versions: TypeAlias = tuple[tuple[GameId, int], ...]
UnconfirmedMove: TypeAlias = tuple[GameId, int | None]
"""The game that we played, and the version that the move was made for, if it is known."""
Moves: TypeAlias = tuple[UnconfirmedMove, ...]

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
    """Read while the turn continued: the order fits only until the turn comes again."""


class Played(StrEnum):
    """When we played the snapshot's game."""

    NOT_SINCE = "not since"
    """Not since the snapshot was taken."""
    SINCE = "since"
    """Since it was taken: when the game comes back, the same order fits again."""
    BEFORE = "before"
    """It was not ours when the answer was read, or may not have been: its order is not known."""


class RefetchRequest(Struct, frozen=True):
    """A wanted refetch, and the game whose snapshot it becomes, if any."""

    snapshot_of: GameId | None = None
    is_mid_turn: bool = False
    """Wanted because the turn of that game continued, not because it came."""
    is_echo: bool = False
    """Wanted because of an answer, not of news: if its answer changes nothing, ask slower."""


class Screen(Struct, frozen=True):
    """The game on screen, as far as the backend has shown it."""

    game_id: GameId
    my_turn: bool
    opened_at: int | None = None
    """The version that was opened."""
    version: int | None = None
    """The version of the last state that was applied since."""
    awaits_message: bool = False
    """Its state showed the running turn; the `your_turn` of that turn is still to come."""


class State(Struct, frozen=True):
    """Everything that the cache knows."""

    pool: Pool = ()
    is_complete_from_server: bool = False
    """The last answer was not cut: there are no other games."""
    snapshot: Snapshot | None = None
    played: Played = Played.NOT_SINCE
    """When we played the snapshot's game."""
    is_restored: bool = False
    """The pool came from a snapshot, not from an answer."""
    in_flight: RefetchRequest | None = None
    follows: RefetchRequest | None = None
    """The next request: after the answer in flight, or after a pause."""
    moves: Moves = ()
    """Our unconfirmed moves, each with its version; oldest first."""
    away: Pool = ()
    """Games that are not ours to play, though the answer in flight may still list them."""
    screen: Screen | None = None
    versions: Versions = ()
    """For each game, the version up to which news of a turn is old; the oldest entry first."""
    limit: int = LIMIT

    @property
    def pending(self) -> Pool:
        """Games with a move of ours that the backend has not confirmed."""
        return tuple(dict.fromkeys(game_id for game_id, _ in self.moves))

    @property
    def is_busy(self) -> bool:
        """True if a request is under way or will follow."""
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
    """The backend says that it has become our turn in a game."""

    game_id: GameId
    version: int | None = None


class GameState(Struct, frozen=True, tag="game_state"):
    """The backend's view of a game."""

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
    """`long_wait_invalidated`: games came or went in a way that no turn shows."""


class Answered(Struct, frozen=True):
    """The refetch in flight brought these games, in the backend's order."""

    game_ids: Pool


class Failed(Struct, frozen=True):
    """The refetch in flight failed."""


class PauseOver(Struct, frozen=True):
    """The postponed request may be sent now."""


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
    """Wait, longer each time in a row; then send `PauseOver`."""


Effect: TypeAlias = Refetch | Pause


class Step(NamedTuple):
    """The new state after an event, and the effects to carry out."""

    state: State
    effects: tuple[Effect, ...] = ()
