"""The game service behind the demo: real games of noughts and crosses against bots (G8, W12).

`Games` keeps whose turn it is since when; here are the boards, and the bots, who move at their own
pace. Part of the upstream: down with it, and asked over HTTP like the rest.
"""

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import Any, Final

from stillfresh.clock import Clock
from stillfresh.demo import rules
from stillfresh.errors import StillfreshError
from stillfresh.waiting.backend import GameError, Games, Player

BOTS: Final = ("Ada", "Bo", "Cleo", "Dex", "Edda", "Fin")
MOST_PLAYERS: Final = 64
"""Beyond, who sat down first has to leave."""
REMATCH_AFTER: Final = 6.0
LOOK_EVERY: Final = 0.2

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class BotGame:
    game_id: str
    user: str
    seat: int
    cells: str = rules.EMPTY
    due: float | None = None

    @property
    def bot(self) -> str:
        return BOTS[self.seat]

    @property
    def result(self) -> str | None:
        return rules.outcome(self.cells)


class Tables:
    """`thinks`: how long the quickest and the slowest bot take for a move."""

    def __init__(
        self,
        games: Games,
        thinks: tuple[float, float],
        dice: random.Random,
        clock: Clock = time.monotonic,
    ) -> None:
        self._games = games
        self._thinks = thinks
        self._dice = dice
        self._clock = clock
        self._players: dict[str, list[str]] = {}
        self._tables: dict[str, BotGame] = {}
        self._games_begun = 0

    async def sit(self, user: str) -> list[str]:
        """Six games, each waiting for the visitor; who sits already keeps theirs."""
        if user not in self._players:
            while len(self._players) >= MOST_PLAYERS:
                await self.leave(next(iter(self._players)))
            self._players[user] = []
            for seat in range(len(BOTS)):
                await self._begin(user, seat)
        return list(self._players.get(user, ()))

    async def leave(self, user: str) -> None:
        for game_id in self._players.pop(user, ()):
            self._tables.pop(game_id, None)
            try:
                await self._games.abandon(game_id)
            except GameError:
                logger.debug("%s was over", game_id)

    def shown(self, user: str, game_id: str) -> dict[str, Any] | None:
        """As its player sees it; None: not theirs, or long over."""
        table = self._tables.get(game_id)
        if table is None or table.user != user:
            return None
        game = self._games.view(game_id)
        return {
            "id": game_id,
            "bot": table.bot,
            "cells": table.cells,
            "result": table.result,
            "my_turn": game.actor == user,
            "version": game.version,
        }

    async def play(self, user: str, game_id: str, cell: int, version: int) -> None:
        """GameError: not a move that can be made, or the game has moved on meanwhile."""
        table = self._tables.get(game_id)
        if table is None or table.user != user:
            raise GameError("there is no such game of yours")
        cells = rules.played(table.cells, cell, "x")
        if table.result is not None or cells is None:
            raise GameError("this cell cannot be played")
        await self._games.move(game_id, user, version=version)
        table.cells = cells
        await self._moved(table)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            now = self._clock()
            for table in [it for it in self._tables.values() if it.due is not None]:
                if table.due is not None and table.due <= now:
                    await self._act(table)

    async def _act(self, table: BotGame) -> None:
        table.due = None
        try:
            if table.result is None:
                await self._bot_plays(table)
            else:
                await self._again(table)
        except StillfreshError as exc:
            logger.warning("%s: %s", table.game_id, exc)

    async def _bot_plays(self, table: BotGame) -> None:
        cell = rules.bot_cell(table.cells, self._dice.choice)
        table.cells = rules.played(table.cells, cell, "o") or table.cells
        if table.result is None:
            await self._games.move(table.game_id, _bot_id(table))
        else:
            await self._moved(table)

    async def _moved(self, table: BotGame) -> None:
        """The bot thinks; or it is over, and after a while there is another one."""
        if table.result is None:
            quickest, slowest = self._thinks
            share = table.seat / (len(BOTS) - 1) * self._dice.uniform(0.6, 1.0)
            table.due = self._clock() + quickest + (slowest - quickest) * share
        else:
            table.due = self._clock() + REMATCH_AFTER
            await self._games.end(table.game_id)

    async def _again(self, table: BotGame) -> None:
        if (mine := self._players.get(table.user)) is None:
            return
        mine.remove(table.game_id)
        del self._tables[table.game_id]
        await self._begin(table.user, table.seat)

    async def _begin(self, user: str, seat: int) -> None:
        self._games_begun += 1
        table = BotGame(f"{BOTS[seat].lower()}-{self._games_begun}-{user[:8]}", user, seat)
        bot = Player(_bot_id(table), is_human=False)
        await self._games.start(table.game_id, [Player(user), bot])
        if (mine := self._players.get(user)) is not None:
            self._tables[table.game_id] = table
            mine.append(table.game_id)


def _bot_id(table: BotGame) -> str:
    return f"bot-{table.bot.lower()}"
