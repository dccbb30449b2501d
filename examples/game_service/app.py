"""The games over HTTP: `GET /api/games/waiting-longest` and the user's events by WebSocket.

Needs the `web` extra. The application says who is signed in: `sign_in(connection)`.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

import msgspec
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from game_service.games import Games
from game_service.steps import Happened
from stillfresh.errors import StillfreshError
from stillfresh.systems.waiting.messages import (
    EVENTS,
    WAITING_LONGEST,
    Connected,
    Move,
    MoveMade,
    News,
    WatchFailed,
    encode,
    read_command,
)
from stillfresh.systems.waiting.model import GameState, MoveFailed, Opened

__all__ = ["SignIn", "games_app"]

SignIn: TypeAlias = Callable[[HTTPConnection], str | None]
"""Returns the id of the user that a request's headers name, or None."""

FAREWELL: Final = 5.0
"""Seconds for a slow connection to take the closing message."""
MAX_UNSENT: Final = 256
"""Messages that wait for one slow connection."""

logger = logging.getLogger(__name__)


def games_app(games: Games, sign_in: SignIn) -> Starlette:
    """Return an ASGI app for the games. It neither opens nor closes them."""
    service = _GamesService(games, sign_in)
    routes = [
        Route(WAITING_LONGEST, service.waiting_longest),
        WebSocketRoute(EVENTS, service.events),
    ]
    return Starlette(routes=routes)


class GameListener:
    """One connection of one user: the user's news, and the states of the game that it watches.

    A connection that reads too slowly is closed: its client reconnects and asks again.
    """

    def __init__(self, user_id: str) -> None:
        self.user_id = user_id
        self.watches: str | None = None
        self.is_lagging = asyncio.Event()
        self.unsent = asyncio.Queue[News](MAX_UNSENT)

    def hear(self, happened: Happened) -> None:
        """Send a turn's message before its state, so that the cache knows that the turn is new."""
        for user_id, news in happened.news:
            if user_id == self.user_id:
                self.tell(news)
        game = happened.game
        if game.game_id == self.watches:
            self.tell(GameState(game.game_id, game.actor == self.user_id, game.version))

    def tell(self, news: News) -> None:
        try:
            self.unsent.put_nowait(news)
        except asyncio.QueueFull:
            self.is_lagging.set()


class _GamesService:
    def __init__(self, games: Games, sign_in: SignIn) -> None:
        self._games = games
        self._sign_in = sign_in

    async def waiting_longest(self, request: Request) -> Response:
        """The games of one user: no cache may store the response."""
        user_id = self._sign_in(request)
        status = 401
        content: dict[str, object] = {"error": "sign in first"}
        if user_id is not None:
            status = 200
            content = {"game_ids": self._games.waiting_longest(user_id)}
        private = {"Cache-Control": "private, no-store"}
        return Response(encode(content), status, private, "application/json")

    async def events(self, socket: WebSocket) -> None:
        user_id = self._sign_in(socket)
        if user_id is None:
            await socket.close(1008, "sign in first")
            return
        await socket.accept()
        listener = GameListener(user_id)
        unsubscribe = self._games.on_happened(listener.hear)
        listener.tell(Connected())
        try:
            await self._serve(socket, listener)
        finally:
            unsubscribe()

    async def _serve(self, socket: WebSocket, listener: GameListener) -> None:
        """Serve until the client leaves, reads too slowly, or sends an invalid message."""
        works = [send(socket, listener), self._receive(socket, listener), lag(socket, listener)]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception) and not isinstance(error, WebSocketDisconnect):
                logger.warning("a connection of %s ended: %r", listener.user_id, error)

    async def _receive(self, socket: WebSocket, listener: GameListener) -> None:
        while True:
            text = await socket.receive_text()
            try:
                command = read_command(text)
            except msgspec.DecodeError as exc:
                await socket.close(1007, str(exc)[:100])
                return
            if isinstance(command, Move):
                listener.tell(await self._move(listener.user_id, command))
            else:
                listener.tell(self._watch(listener, command.game_id))

    def _watch(self, listener: GameListener, game_id: str) -> Opened | WatchFailed:
        try:
            game = self._games.view(game_id)
        except StillfreshError as exc:
            return WatchFailed(game_id, str(exc))
        listener.watches = game_id
        return Opened(game_id, game.actor == listener.user_id, game.version)

    async def _move(self, user_id: str, move: Move) -> MoveMade | MoveFailed:
        try:
            await self._games.move(
                move.game_id, user_id, version=move.version, keeps_turn=move.keeps_turn
            )
        except StillfreshError as exc:
            return MoveFailed(move.game_id, move.version, str(exc))
        return MoveMade(move.game_id, move.keeps_turn)


async def send(socket: WebSocket, listener: GameListener) -> None:
    """Send the messages in their order, for ever."""
    while True:
        await socket.send_text(encode(await listener.unsent.get()).decode())


async def lag(socket: WebSocket, listener: GameListener) -> None:
    """Wait until too many messages are unsent, then close the connection."""
    await listener.is_lagging.wait()
    logger.warning("a connection of %s reads too slowly; it is closed", listener.user_id)
    with suppress(TimeoutError):  # a client that does not read may never take it
        async with asyncio.timeout(FAREWELL):
            await socket.close(1013, "too slow")
