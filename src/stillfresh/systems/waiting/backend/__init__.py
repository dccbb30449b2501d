"""The service behind `GET /api/games/waiting-longest`: games in SQLite, and their news (W12).

`Games` needs nothing but the core; `stillfresh.systems.waiting.backend.app` needs the `web` extra.
"""

from stillfresh.systems.waiting.backend.games import Games
from stillfresh.systems.waiting.backend.steps import GameError, GameView, Player

__all__ = ["GameError", "GameView", "Games", "Player"]
