"""One visitor's games as the site shows them: the header's next game, and a board.

A `WaitingClient` keeps the order of the games that wait, from the service's events, and asks it
only when the order cannot be proved. Boards are entries of the gateway's cache: while the service
is unavailable, old ones are shown.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2

from stillfresh.demo.upstream import PLAYER
from stillfresh.engine import Answer, Cache, Function, RetryAfter
from stillfresh.errors import LoadFailed, StillfreshError
from stillfresh.systems.feed.model import Dated
from stillfresh.systems.waiting import WaitingCache
from stillfresh.systems.waiting.client import WaitingClient

PATIENCE: Final = "2s"
"""To wait for the service before a game is shown as it was."""

AHEAD: Final = 7.0
"""Seconds; a board on screen is refreshed before its freshness ends."""

Boards = Function[[str, str], dict[str, Any]]


class MoveRefused(StillfreshError):
    """The move was not made; the sentence is for the visitor."""


def boards_of(cache: Cache, http: httpx2.AsyncClient, pause: float) -> Boards:
    @cache.cached("board", fresh_for="10s", stale_for="1h", error_for="1h", max_entries=1_000)
    async def board(user: str, game_id: str) -> dict[str, Any]:
        try:
            response = await http.get(f"/games/{game_id}", headers={PLAYER: user})
            content: dict[str, Any] = response.raise_for_status().json()
        except httpx2.HTTPError as exc:
            raise RetryAfter(pause, f"the game service {_trouble(exc)}") from exc
        return content

    return board


@dataclass(eq=False)
class Playing:
    """The games of one visitor, from the first look to the end; `tell` is called on each change."""

    user: str
    http: httpx2.AsyncClient
    boards: Boards
    tell: Callable[[], object]
    pause: float
    current: str | None = None
    _client: WaitingClient | None = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _beginning: asyncio.Lock = field(default_factory=asyncio.Lock)
    _is_seated: bool = False
    _is_outdated: bool = False
    """True if the service sent an event since the board was requested."""
    _over: dict[str, Any] = field(default_factory=dict)
    """The board on screen, once its game has ended."""
    _looked_at: str | None = None
    """The game that the service knows to be on screen."""

    async def state(self) -> dict[str, Any]:
        """The games of the header, why their order is right, and the board on screen."""
        waiting = await self._begin()
        await self._look()
        board = await self._board_on_screen()
        navigation = waiting.navigation(self.current)
        return {
            "next": [{"id": game, "bot": _bot_of(str(game))} for game in navigation.games],
            "proof": str(navigation.proof),
            "pending": navigation.pending,
            "connected": self._client is not None and self._client.is_connected,
            "current": self.current,
            "current_bot": None if self.current is None else _bot_of(self.current),
            "board": board,
        }

    async def open(self, game_id: str) -> None:
        """Show a game; while the service is unavailable, the old board."""
        waiting = await self._begin()
        if game_id not in waiting.state.pool:
            raise MoveRefused("this game does not wait for you any more")
        self.current = game_id
        await self._look()

    async def play(self, cell: int) -> None:
        """Play. The header moves on at once; a move that fails is taken back."""
        waiting = await self._begin()
        game_id = self.current
        if game_id is None:
            raise MoveRefused("open a game first")
        version = (await self._board(game_id))["version"]
        waiting.move_sent(game_id, version)
        try:
            await self._send(game_id, cell, version)
        except MoveRefused:
            waiting.move_failed(game_id, version)
            raise
        self._is_outdated = True

    async def close(self) -> None:
        await self._stack.aclose()

    async def _look(self) -> None:
        """Tell the service which game is on screen; later, if it is unavailable now."""
        game_id = self.current
        client = self._client
        if game_id is None or game_id == self._looked_at or client is None:
            return
        if client.is_connected:
            with suppress(StillfreshError):
                await client.look(game_id)
                self._looked_at = game_id

    async def _begin(self) -> WaitingCache:
        """Connect and seat the visitor. While the service is unavailable, later calls retry."""
        async with self._beginning:
            if self._client is None:
                url = str(self.http.base_url)
                headers = {PLAYER: self.user}
                client = WaitingClient(url, headers=headers, timeout=PATIENCE, sleep=self._nap)
                self._client = await self._stack.enter_async_context(client)
                client.cache.on_changed(self._note_change)
            if not self._is_seated:
                with suppress(httpx2.HTTPError):
                    answer = await self.http.post("/games", headers={PLAYER: self.user})
                    self._is_seated = answer.is_success
        return self._client.cache

    async def _nap(self, seconds: float) -> None:
        """A short pause: the visitor plays with the upstream's switch."""
        await asyncio.sleep(min(seconds, self.pause))

    def _note_change(self, _: WaitingCache) -> None:
        self._is_outdated = True
        self.tell()

    async def _board_on_screen(self) -> dict[str, Any] | None:
        """The board; None if there is none. An ended game is not loaded again."""
        if self.current is None or self._over.get("id") == self.current:
            return self._over or None
        try:
            board = await self._board(self.current)
        except LoadFailed:
            return None
        self._over = board if board["result"] else {}
        return board

    async def _board(self, game_id: str) -> dict[str, Any]:
        board = self.boards.of(self.user, game_id)
        is_outdated = self._is_outdated
        self._is_outdated = False  # before the request: an event during it makes it outdated again
        if is_outdated or (await board.get()).age > AHEAD:
            with suppress(LoadFailed):  # then it is shown as it was, with its age
                await board.refresh()
        answer = await board.get()
        return {**answer.value, **freshness(answer)}

    async def _send(self, game_id: str, cell: int, version: int) -> None:
        path = f"/games/{game_id}/play"
        move = {"cell": cell, "version": version}
        try:
            response = await self.http.post(path, json=move, headers={PLAYER: self.user})
            if response.status_code == 409:
                raise MoveRefused(response.json()["error"])
            response.raise_for_status()
        except httpx2.HTTPError as exc:
            why = f"the game service {_trouble(exc)}: your move was taken back"
            raise MoveRefused(why) from exc


def _trouble(error: httpx2.HTTPError) -> str:
    """What the game service did, in a visitor's words."""
    is_answer = isinstance(error, httpx2.HTTPStatusError)
    return "answered with an error" if is_answer else "does not answer"


def freshness(answer: Answer[Any] | Dated) -> dict[str, Any]:
    """How fresh an answer is, for the page."""
    error = None if answer.error is None else str(answer.error)
    return {"verdict": str(answer.verdict), "age": round(answer.age, 1), "error": error}


def _bot_of(game_id: str) -> str:
    return game_id.partition("-")[0].capitalize()
