"""The service behind `GET /api/games/waiting-longest`: games in SQLite, and their news.

It is an example: a small service of the kind that `stillfresh.systems.waiting` was made for. The
demo starts it from here (`game_service.service`). `Games` needs nothing but the core; `app` and
`service` need the `web` extra.
"""

from game_service.games import Games
from game_service.steps import GameError, GameView, Player

__all__ = ["GameError", "GameView", "Games", "Player"]
