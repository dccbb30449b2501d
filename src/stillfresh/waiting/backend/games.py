"""Games: the tables opened, read inline and written on one thread, and who hears of it (W12).

News is given out in the order of the commits, whether or not who caused it still waits.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Final, Self

import apsw

from stillfresh.clock import Clock
from stillfresh.engine.tasks import looked_at
from stillfresh.errors import ConfigError, NotOpen
from stillfresh.events import Events, Unsubscribe
from stillfresh.stores.sqlite.connection import check_log, connect, connect_reader, translated
from stillfresh.stores.sqlite.database import commit
from stillfresh.stores.sqlite.files import check_place, real
from stillfresh.stores.sqlite.format import not_ours
from stillfresh.waiting.backend import schema, steps
from stillfresh.waiting.backend.steps import GameView, Happened, Player
from stillfresh.waiting.model import LIMIT

MAX_QUEUED: Final = 1024
"""Steps that wait for the disk; more wait for room, since a slow disk must not fill memory."""


class Games:
    """`async with Games("games.db") as games:`; belongs to one event loop."""

    def __init__(self, path: str | PathLike[str], *, clock: Clock = time.time) -> None:
        self._path = Path(path).absolute()
        self._clock = clock
        self._happened = Events[Happened]()
        self._thread: ThreadPoolExecutor | None = None
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None
        self._room = asyncio.Semaphore(MAX_QUEUED)

    async def __aenter__(self) -> Self:
        if self._thread is not None:
            raise ConfigError(f"{self._path}: these games are open already")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stillfresh-games")
        loop = asyncio.get_running_loop()
        try:
            self._writer, self._reader = await loop.run_in_executor(
                self._thread, opened, self._path
            )
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """What is queued is done first."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        try:
            await asyncio.get_running_loop().run_in_executor(thread, self._end)
        finally:
            thread.shutdown(wait=False)

    def _end(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def on_happened(self, listener: Callable[[Happened], object]) -> Unsubscribe:
        """Told of every step, when it is on disk."""
        return self._happened.subscribe(listener)

    def waiting_longest(self, user_id: str, limit: int = LIMIT) -> list[str]:
        """W12: one walk along the index, inline: no thread is faster."""
        with translated(self._path):
            rows = self._read().execute(schema.WAITING_LONGEST, (user_id, limit))
            return [game_id for (game_id,) in rows]

    def view(self, game_id: str) -> GameView:
        with translated(self._path):
            return steps.view(self._read(), game_id)

    async def start(self, game_id: str, players: Sequence[Player]) -> GameView:
        return await self._write(partial(steps.start, game_id=game_id, players=players))

    async def move(
        self, game_id: str, user_id: str, *, version: int | None = None, keeps_turn: bool = False
    ) -> GameView:
        """`version`: the one that the player saw; a game that has moved on refuses."""
        job = partial(
            steps.move, game_id=game_id, user_id=user_id, version=version, keeps_turn=keeps_turn
        )
        return await self._write(job)

    async def end(self, game_id: str) -> GameView:
        return await self._write(partial(steps.finish, game_id=game_id, status="ended"))

    async def abandon(self, game_id: str) -> GameView:
        return await self._write(partial(steps.finish, game_id=game_id, status="abandoned"))

    async def leave(self, game_id: str, user_id: str) -> GameView:
        return await self._write(
            partial(steps.seat, game_id=game_id, user_id=user_id, is_active=False)
        )

    async def rejoin(self, game_id: str, user_id: str) -> GameView:
        return await self._write(
            partial(steps.seat, game_id=game_id, user_id=user_id, is_active=True)
        )

    def _read(self) -> apsw.Connection:
        if self._reader is None:
            raise NotOpen("these games are closed")
        return self._reader

    async def _write(self, step: Callable[..., Happened]) -> GameView:
        """Done to its end, whatever becomes of who awaits it."""
        loop = asyncio.get_running_loop()
        await self._room.acquire()
        if self._thread is None:
            self._room.release()
            raise NotOpen("these games are closed")
        future = loop.run_in_executor(self._thread, self._commit, step, loop)
        future.add_done_callback(lambda _: self._room.release())
        future.add_done_callback(looked_at)
        return await asyncio.shield(future)

    def _commit(self, step: Callable[..., Happened], loop: asyncio.AbstractEventLoop) -> GameView:
        assert self._writer is not None  # noqa: S101 (closed last, on this thread)
        now = round(self._clock() * 1000)
        with translated(self._path):
            (outcome,) = commit(self._writer, [partial(step, now=now)])
            if outcome.error is not None:
                raise outcome.error
        happened: Happened = outcome.result
        loop.call_soon_threadsafe(self._happened.emit, happened)
        return happened.game


def opened(path: Path) -> tuple[apsw.Connection, apsw.Connection]:
    """The connections that write and read; a file of another application is left alone."""
    path = real(path)
    with translated(path):
        check_place(path)
        check_log(path, schema.APPLICATION_ID)
        writer = connect(path)
        try:
            admitted(writer, path)
            return writer, connect_reader(path)
        except BaseException:
            writer.close()
            raise


def admitted(writer: apsw.Connection, path: Path) -> None:
    application = writer.pragma("application_id")
    if application == schema.APPLICATION_ID:
        return
    if application or writer.execute("SELECT count(*) FROM sqlite_schema").get:
        raise not_ours(path, application)
    writer.execute(f"BEGIN IMMEDIATE; {schema.CREATE}; COMMIT; PRAGMA journal_mode = wal")
