"""A copy of one of our files, to look inside with any tool (S12).

Another SQLite library in this process, such as the standard library's `sqlite3`, must not open the
file itself: closing it there drops the locks that ours has on it (POSIX), and what was committed
can be lost. The copy is made by our library, in another thread, while the file is read and written.
"""

import asyncio
from os import PathLike
from pathlib import Path

import apsw

from stillfresh.errors import StoreError
from stillfresh.stores.sqlite.connection import connect_viewer, translated
from stillfresh.stores.sqlite.files import create_new, real


async def read_only_copy(path: str | PathLike[str], target: str | PathLike[str]) -> Path:
    """Copy a store's, a coordinator's, a feed's or a games' file, as it is at one moment.

    The target is a new file with mode 0600, in one piece, without a log.
    """
    return await asyncio.to_thread(_copied, Path(path), Path(target))


def _copied(path: Path, target: Path) -> Path:
    path, target = real(path), target.absolute()
    if not path.is_file():
        raise StoreError(f"{path}: there is no such file")
    with translated(path):
        source = connect_viewer(path)
        try:
            _fill(source, target)
        finally:
            source.close()
    return target


def _fill(source: apsw.Connection, target: Path) -> None:
    with translated(target):
        try:
            create_new(target)
        except FileExistsError as exc:
            raise StoreError(f"{target}: exists already; name a file that does not") from exc
    try:
        with translated(target):
            source.execute("PRAGMA query_only = 0")  # it forbids to write a new file, too
            source.execute("VACUUM INTO ?", (str(target),))
    except BaseException:
        target.unlink(missing_ok=True)
        raise
