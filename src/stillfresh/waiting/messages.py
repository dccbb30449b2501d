"""What goes over the WebSocket between the games' service and its client (W12).

One JSON object each, told apart by `type`. Decoding refuses whatever does not fit.
"""

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

__all__ = [
    "EVENTS",
    "WAITING_LONGEST",
    "Command",
    "GameStateNews",
    "InvalidatedNews",
    "Move",
    "MoveFailedNews",
    "Moved",
    "News",
    "Watch",
    "WatchFailed",
    "Watching",
    "Welcome",
    "YourTurnNews",
    "encode",
    "read_command",
    "read_news",
]


WAITING_LONGEST: Final = "/api/games/waiting-longest"
EVENTS: Final = "/api/events"


class Welcome(Struct, frozen=True, tag="welcome"):
    """From now on nothing is missed."""


class YourTurnNews(Struct, frozen=True, tag="your_turn"):
    """A game has become yours to play."""

    game_id: str
    version: int


class InvalidatedNews(Struct, frozen=True, tag="long_wait_invalidated"):
    """A game of yours was started, ended or abandoned, or somebody left or rejoined."""


class GameStateNews(Struct, frozen=True, tag="game_state"):
    """The game that you watch has changed."""

    game_id: str
    my_turn: bool
    version: int


class Watching(Struct, frozen=True, tag="watching"):
    """The game that you watch from now on, as it is."""

    game_id: str
    my_turn: bool
    version: int


class Moved(Struct, frozen=True, tag="moved"):
    """Your move was made."""

    game_id: str
    goes_on: bool
    """Your turn has not ended."""
    version: int


class MoveFailedNews(Struct, frozen=True, tag="move_failed"):
    """Your move was refused."""

    game_id: str
    reason: str
    version: int | None = None
    """The one that the move was made for."""


class WatchFailed(Struct, frozen=True, tag="watch_failed"):
    """There is nothing to watch; what was watched before still is."""

    game_id: str
    reason: str


class Watch(Struct, frozen=True, tag="watch"):
    """Show me this game, and every change of it."""

    game_id: str


class Move(Struct, frozen=True, tag="move"):
    """I play; `version` is the one that I saw: a game that moved on refuses the move."""

    game_id: str
    version: int | None = None
    keeps_turn: bool = False
    """There is more to do in this turn."""


News: TypeAlias = (
    Welcome
    | YourTurnNews
    | InvalidatedNews
    | GameStateNews
    | Watching
    | WatchFailed
    | Moved
    | MoveFailedNews
)
Command: TypeAlias = Watch | Move

encode: Final = msgspec.json.Encoder().encode
read_news: Final = msgspec.json.Decoder(News).decode
read_command: Final = msgspec.json.Decoder(Command).decode
