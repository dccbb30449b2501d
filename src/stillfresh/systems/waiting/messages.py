"""The messages of the WebSocket between the games' service and its client.

One JSON object each, distinguished by `type`. Decoding refuses everything else. Five of them are
the cache's own events (`model`), so the rules take them as they come.
"""

from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from stillfresh.systems.waiting.model import GameState, Invalidated, MoveFailed, Opened, YourTurn

WAITING_LONGEST: Final = "/api/games/waiting-longest"
EVENTS: Final = "/api/events"


class Connected(Struct, frozen=True, tag="welcome"):
    """From now on no message is missed."""


class MoveMade(Struct, frozen=True, tag="moved"):
    """Your move was made; if you watch the game, its state has been sent before."""

    game_id: str
    goes_on: bool
    """Your turn has not ended."""


class WatchFailed(Struct, frozen=True, tag="watch_failed"):
    """There is nothing to watch; the game that was watched before still is."""

    game_id: str
    reason: str


class WatchGame(Struct, frozen=True, tag="watch"):
    """Show me this game, and every change of it."""

    game_id: str


class Move(Struct, frozen=True, tag="move"):
    """I play; `version` is the one that I saw. If the game has moved on, the move is refused."""

    game_id: str
    version: int | None = None
    keeps_turn: bool = False
    """There is more to do in this turn."""


News: TypeAlias = (
    Connected | YourTurn | Invalidated | GameState | Opened | WatchFailed | MoveMade | MoveFailed
)
Command: TypeAlias = WatchGame | Move
YourTurnNews: TypeAlias = YourTurn
InvalidatedNews: TypeAlias = Invalidated
GameStateNews: TypeAlias = GameState
"""Their names in an application that pushes them to its viewers."""

encode: Final = msgspec.json.Encoder().encode
read_news: Final = msgspec.json.Decoder(News).decode
read_command: Final = msgspec.json.Decoder(Command).decode
