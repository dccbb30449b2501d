"""One SQLite file of ours: read on the caller's thread, written by one thread of its own (S4).

What every part that keeps a file shares. The format says whose file it is and how it begins.
"""

import time
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final

import apsw

from stillfresh.errors import ConfigError, NotOpen, shown
from stillfresh.stores.sqlite.connection import CORRUPT, PATIENCE, abandon, explained
from stillfresh.stores.sqlite.files import Identity, identity_of
from stillfresh.stores.sqlite.format import Format
from stillfresh.stores.sqlite.writer import LoopWriter

LOOK_EVERY: Final = 0.1
"""Seconds after which a reader notices that another process has replaced the file."""


class SqliteFile:
    """Any number of processes may use one file; one object belongs to one event loop at a time."""

    def __init__(self, path: str | PathLike[str], kind: Format, patience: float = PATIENCE) -> None:
        if fspath(path) in {"", ":memory:"}:
            raise ConfigError(
                f"path: must name a file, not {shown(path)}; in memory use MemoryStore"
            )
        self._path = Path(path).absolute()
        self._kind = kind
        self._patience = patience
        self._writer: LoopWriter | None = None
        self._reader: apsw.Connection | None = None
        self._execute: Callable[[str, Sequence[Any]], apsw.Cursor] = _closed
        self._identity: Identity | None = None
        self._look_at = 0.0

    async def open(self) -> None:
        if self._writer is not None and self._writer.is_stopping:
            await self.close()
        if self._writer is None:
            self._writer = LoopWriter(self._path, self._kind, self._adopt, self._patience)
        writer = self._writer
        try:
            await writer.opened()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Waits for what is queued; the last to close leaves no log behind."""
        if (writer := self._writer) is None:
            return
        self._execute = _closed
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        await writer.stopped()
        if self._writer is writer:
            self._writer = None

    def _adopt(self, reader: apsw.Connection) -> None:
        """A connection for reading: the first, or that of a file that was opened anew."""
        if self._writer is None or self._writer.is_stopping:
            reader.close()
            return
        old, self._reader = self._reader, reader
        self._execute = reader.cursor().execute
        self._identity = self._writer.identity
        if old is not None:
            abandon(old)

    def _cannot_read(self, exc: Exception) -> None:
        """A table nobody wrote yet, or a file that is broken or gone, holds nothing."""
        if isinstance(exc, CORRUPT) and self._writer is not None and self._reader is not None:
            self._writer.mend(self._reader)
        elif not str(exc).startswith("no such table") and not self._look():
            raise explained(self._path, exc) from exc

    def _look(self) -> bool:
        """Another process may have set the file aside and begun a new one: then open that."""
        self._look_at = time.monotonic() + LOOK_EVERY
        is_replaced = self._reader is not None and identity_of(self._path) != self._identity
        if is_replaced:
            self._opened().wake()
        return is_replaced

    def _opened(self) -> LoopWriter:
        if self._writer is None:
            raise NotOpen("this store is closed")
        return self._writer


def _closed(_sql: str, _bindings: Sequence[Any]) -> apsw.Cursor:
    raise NotOpen("this store is closed")
