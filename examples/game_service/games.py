"""Games: tables in a file, read inline and written on one thread, and their listeners.

Listeners are called in the order of the commits, whether or not the caller still waits.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Final, Self

import apsw

from game_service import steps
from game_service.steps import GameView, Happened, Player
from stillfresh.clock import Clock
from stillfresh.errors import ConfigError, NotOpen
from stillfresh.events import Events, Unsubscribe
from stillfresh.stores.sqlite import Writer, abandon, by_header, translated
from stillfresh.systems.waiting.model import LIMIT
from stillfresh.tasks import Tasks, looked_at

FORMAT: Final = by_header(steps.APPLICATION_ID, 0, steps.CREATE, is_cache=False)


class Games:
    """Games in a SQLite file: `async with Games("games.db") as games:`. For one event loop.

    Steps that a game does not allow raise GameError.
    """

    def __init__(self, path: str | PathLike[str], *, clock: Clock = time.time) -> None:
        self._path = Path(path).absolute()
        self._clock = clock
        self._happened = Events[Happened]()
        self._tasks = Tasks()
        self._writer: Writer | None = None
        self._reader: apsw.Connection | None = None

    async def __aenter__(self) -> Self:
        if self._writer is not None:
            raise ConfigError(f"{self._path}: these games are open already")
        self._writer = Writer(self._path, FORMAT, self._adopt, asyncio.get_running_loop())
        try:
            await self._writer.opened()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish steps that have started, and close the file."""
        writer = self._writer
        reader = self._reader
        self._writer = None
        self._reader = None
        if reader is not None:
            reader.close()
        if writer is not None:
            await asyncio.sleep(0)  # a step that was begun in this turn is in the queue by now
            await writer.stopped()

    def _adopt(self, reader: apsw.Connection) -> None:
        """Use this connection for reading; another one after the file was opened again."""
        if self._writer is None:
            reader.close()
            return
        old = self._reader
        self._reader = reader
        if old is not None:
            abandon(old)

    def on_happened(self, listener: Callable[[Happened], object]) -> Unsubscribe:
        """Call `listener` after every step that is committed. Returns a function that ends it."""
        return self._happened.subscribe(listener)

    def waiting_longest(self, user_id: str, limit: int = LIMIT) -> list[str]:
        """Return the games in which it is this user's turn, at most `limit`.

        Games with other humans come first, then those that wait longest.
        """
        with translated(self._path):
            rows = self._read().execute(steps.WAITING_LONGEST, (user_id, limit))
            return [game_id for (game_id,) in rows]

    def view(self, game_id: str) -> GameView:
        """Return the state of a game. Raises GameError if there is none."""
        with translated(self._path):
            return steps.view(self._read(), game_id)

    async def start(self, game_id: str, players: Sequence[Player]) -> GameView:
        """Start a game."""
        return await self._write(steps.start, game_id, players)

    async def move(
        self, game_id: str, user_id: str, *, version: int | None = None, keeps_turn: bool = False
    ) -> GameView:
        """Play a move. Raises GameError if the game is no longer at `version`."""
        move = partial(steps.move, version=version, keeps_turn=keeps_turn)
        return await self._write(move, game_id, user_id)

    async def end(self, game_id: str) -> GameView:
        """End a game."""
        return await self._write(steps.finish, game_id, "ended")

    async def abandon(self, game_id: str) -> GameView:
        """Abandon a game."""
        return await self._write(steps.finish, game_id, "abandoned")

    async def leave(self, game_id: str, user_id: str) -> GameView:
        """Take a player out of a game."""
        return await self._write(partial(steps.seat, is_active=False), game_id, user_id)

    async def rejoin(self, game_id: str, user_id: str) -> GameView:
        """Let a player return to a game."""
        return await self._write(partial(steps.seat, is_active=True), game_id, user_id)

    def _read(self) -> apsw.Connection:
        if self._reader is None:
            raise NotOpen("these games are closed")
        return self._reader

    async def _write(self, step: Callable[..., Happened], *given: object) -> GameView:
        """Run the step to its end and report it, even if the caller leaves."""
        if self._writer is None:
            raise NotOpen("these games are closed")
        now = round(self._clock() * 1000)
        job = self._run_and_report(self._writer, lambda file: step(file, *given, now))
        writing = self._tasks.child(job)
        writing.add_done_callback(looked_at)
        game: GameView = await asyncio.shield(writing)
        return game

    async def _run_and_report(self, writer: Writer, job: Callable[..., Happened]) -> GameView:
        happened = await writer.run(job)
        self._happened.emit(happened)
        return happened.game
