"""Real games of noughts and crosses against bots.

`Games` keeps whose turn it is since when; this module has the boards, and the bots, which move at
their own pace.
"""

import asyncio
import logging
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from game_service import GameError, Games, Player, boards
from stillfresh.errors import StillfreshError

BOTS: Final = ("Ada", "Bo", "Cleo", "Dex", "Edda", "Fin")
MOST_PLAYERS: Final = 64
"""Beyond that, the player that came first must leave."""
REMATCH_AFTER: Final = 6.0
LOOK_EVERY: Final = 0.2

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class BotGame:
    game_id: str
    user: str
    seat: int
    cells: str = boards.EMPTY
    due: float = inf

    @property
    def bot_id(self) -> str:
        return f"bot-{BOTS[self.seat].lower()}"

    @property
    def result(self) -> str | None:
        return boards.outcome(self.cells)


class Tables:
    """`thinks`: how long the quickest and the slowest bot take for a move."""

    def __init__(self, games: Games, thinks: tuple[float, float], dice: random.Random) -> None:
        self._games = games
        self._thinks = thinks
        self._dice = dice
        self._players: dict[str, dict[str, BotGame]] = {}
        self._games_begun = 0

    async def sit(self, user: str) -> None:
        """Start six games that wait for the visitor; a seated visitor keeps the present ones."""
        if user in self._players:
            return
        while len(self._players) >= MOST_PLAYERS:
            await self._leave(next(iter(self._players)))
        self._players[user] = {}
        for seat in range(len(BOTS)):
            await self._begin(user, seat)

    async def _leave(self, user: str) -> None:
        for game_id in self._players.pop(user):
            with suppress(GameError):  # it was over
                await self._games.abandon(game_id)

    def board_of(self, user: str, game_id: str) -> dict[str, Any] | None:
        """The board as its player sees it; None for another player's game, or one long over."""
        table = self._players.get(user, {}).get(game_id)
        if table is None:
            return None
        game = self._games.view(game_id)
        return {
            "id": game_id,
            "bot": BOTS[table.seat],
            "cells": table.cells,
            "result": table.result,
            "my_turn": game.actor == user,
            "version": game.version,
        }

    async def play(self, user: str, game_id: str, cell: int, version: int) -> None:
        """GameError: not a move that can be made, or the game has moved on meanwhile."""
        table = self._players.get(user, {}).get(game_id)
        if table is None:
            raise GameError("there is no such game of yours")
        cells = boards.board_after(table.cells, cell, "x")
        if table.result is not None or cells is None:
            raise GameError("this cell cannot be played")
        await self._games.move(game_id, user, version=version)
        table.cells = cells
        await self._plan_next(table)

    async def run(self) -> None:
        """Let the bots play, for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            now = time.monotonic()
            # A list, since a bot's move may start another game meanwhile.
            tables = [table for own in self._players.values() for table in own.values()]
            for table in tables:
                if table.due <= now:
                    await self._act(table)

    async def _act(self, table: BotGame) -> None:
        table.due = inf
        try:
            if table.result is None:
                await self._bot_plays(table)
            elif self._players.get(table.user, {}).pop(table.game_id, None) is not None:
                await self._begin(table.user, table.seat)
        except StillfreshError as exc:
            logger.warning("%s: %s", table.game_id, exc)

    async def _bot_plays(self, table: BotGame) -> None:
        cell = boards.bot_cell(table.cells, self._dice.choice)
        table.cells = boards.board_after(table.cells, cell, "o") or table.cells
        if table.result is None:
            await self._games.move(table.game_id, table.bot_id)
        else:
            await self._plan_next(table)

    async def _plan_next(self, table: BotGame) -> None:
        """Plan the bot's move; or end a game that is over, and plan another one."""
        if table.result is None:
            quickest, slowest = self._thinks
            share = table.seat / (len(BOTS) - 1) * self._dice.uniform(0.6, 1.0)
            table.due = time.monotonic() + quickest + (slowest - quickest) * share
        else:
            table.due = time.monotonic() + REMATCH_AFTER
            await self._games.end(table.game_id)

    async def _begin(self, user: str, seat: int) -> None:
        self._games_begun += 1
        table = BotGame(f"{BOTS[seat].lower()}-{self._games_begun}-{user[:8]}", user, seat)
        players = [Player(user), Player(table.bot_id, is_human=False)]
        await self._games.start(table.game_id, players)
        if user in self._players:
            self._players[user][table.game_id] = table
