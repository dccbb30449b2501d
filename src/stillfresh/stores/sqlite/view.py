"""A view of a store's file, which reads it and never changes it.

`SqliteView` never creates a file, never writes to an empty one, never renames a damaged one, and
takes no lock that a writer would wait for.

`read_only_copy` is for other tools. Another SQLite library in this process, such as the standard
library's `sqlite3`, must not open the file itself: closing it there drops the locks that ours has
on it (POSIX), and what was committed can be lost.
"""

import asyncio
import math
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from os import PathLike
from pathlib import Path
from typing import TypeVar

import apsw

from stillfresh.errors import NotOpen, StoreError
from stillfresh.stores.sqlite.connection import (
    FAILED,
    connect_viewer,
    explained,
    translated,
)
from stillfresh.stores.sqlite.files import create_new, real
from stillfresh.stores.sqlite.ownership import Format, check_log
from stillfresh.stores.sqlite.store import SqliteStore

T = TypeVar("T")


class SqliteView(SqliteStore):
    """A file opened for reading only. A damaged file is a StoreError, not an empty store."""

    evicts_hourly = False

    async def open(self) -> None:
        self._look_at = math.inf  # the opened file is read to the end, whatever takes its name
        self._read_from(open_viewer(self.path, self._format))

    async def close(self) -> None:
        """Close the file. If it had no log before, it has none afterwards."""
        if self._reader is not None:
            self._reader.close()
        await super().close()

    async def run(
        self, job: Callable[[apsw.Connection], T], *, writes: bool = True, urgent: bool = True
    ) -> T:
        del writes, urgent
        return self.run_read(job)

    def run_read(self, job: Callable[[apsw.Connection], T]) -> T:
        """Read now, in the caller's thread."""
        if self._reader is None:
            raise NotOpen("this view is closed; open it again with open()")
        try:
            return job(self._reader)
        except FAILED as exc:
            raise explained(self.path, exc) from exc


def open_viewer(path: Path, file_format: Format) -> apsw.Connection:
    """Return a connection that only looks at a file of this format.

    Raises StoreError if there is none, or if it cannot be read.
    """
    _check_place(path)
    with ExitStack() as undoing:
        try:
            check_log(real(path), *file_format.application_ids)
            connection = connect_viewer(path)
            undoing.callback(connection.close)
            is_begun = file_format.is_begun(connection, path)
        except FAILED as exc:
            raise explained(path, exc) from exc
        if not is_begun:
            raise StoreError(f"{path}: is empty, and not a store yet")
        undoing.pop_all()
    return connection


def _check_place(path: Path) -> None:
    if not path.exists():
        raise StoreError(f"{path}: there is no such file")
    if not path.is_file():
        raise StoreError(f"{path}: is not a file")
    if not os.access(path, os.R_OK):
        raise StoreError(f"{path}: permission denied")


async def read_only_copy(path: str | PathLike[str], target: str | PathLike[str]) -> Path:
    """Copy a file of stillfresh (store, coordinator, feed or games) as it is at one moment.

    The target must not exist. It is one file with mode 0600. The file may be used meanwhile.
    """
    return await asyncio.to_thread(_copy, Path(path), Path(target))


def _copy(path: Path, target: Path) -> Path:
    path = real(path)
    target = target.absolute()
    if not path.is_file():
        raise StoreError(f"{path}: there is no such file")
    with translated(path):
        source = connect_viewer(path)
    with closing(source), translated(target):
        try:
            create_new(target)
        except FileExistsError as exc:
            raise StoreError(f"{target}: exists already; name a file that does not") from exc
        try:
            source.execute("PRAGMA query_only = 0")  # the flag also forbids writing a new file
            source.execute("VACUUM INTO ?", (str(target),))
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    return target
