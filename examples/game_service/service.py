"""The whole service: games, boards with bots, and their routes, as one ASGI app.

A request names its player in the header field `x-player`: fit for a demo, not for a real service.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from game_service.app import games_app
from game_service.games import Games
from game_service.steps import GameError
from game_service.tables import Tables

PLAYER: Final = "x-player"
"""The header field with the player's id."""


@asynccontextmanager
async def open_service(
    folder: Path, bot_thinks: tuple[float, float], dice: random.Random
) -> AsyncIterator[Starlette]:
    """Open the games in this folder, and let the bots play until the block ends."""
    async with Games(folder / "games.db") as games:
        tables = Tables(games, bot_thinks, dice)
        playing = asyncio.create_task(tables.run())
        try:
            yield service_app(games, tables)
        finally:
            playing.cancel()
            await asyncio.wait([playing])
        if not playing.cancelled():
            playing.result()


def service_app(games: Games, tables: Tables) -> Starlette:
    boards = BoardRoutes(tables)
    routes = [
        Route("/games", boards.sit, methods=["POST"]),
        Route("/games/{id}", boards.show),
        Route("/games/{id}/play", boards.play, methods=["POST"]),
        Mount("/", games_app(games, lambda request: request.headers.get(PLAYER) or None)),
    ]
    return Starlette(routes=routes)


class BoardRoutes:
    """Sitting down, looking at a board and playing, over HTTP."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def sit(self, request: Request) -> Response:
        await self._tables.sit(request.headers[PLAYER])
        return Response(status_code=204)

    async def show(self, request: Request) -> Response:
        board = self._tables.board_of(request.headers[PLAYER], request.path_params["id"])
        if board is None:
            return Response(status_code=404)
        return json_response(board)

    async def play(self, request: Request) -> Response:
        player = request.headers[PLAYER]
        game_id = request.path_params["id"]
        move = await request.json()
        try:
            await self._tables.play(player, game_id, move["cell"], move["version"])
        except GameError as exc:
            return json_response({"error": str(exc)}, 409)
        return await self.show(request)


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
