"""One connection to a SQLite file: how it is opened, waits, and fails.

apsw's errors end here: `translated` turns them into `StoreError`.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

import apsw

from stillfresh.clock import Clock
from stillfresh.errors import ConfigError, StoreError
from stillfresh.stores.sqlite.files import create_private, has_log, log_of, on_read_only_mount, real
from stillfresh.stores.sqlite.ownership import Format, check_owner

CORRUPT: Final = (apsw.CorruptError, apsw.NotADBError, UnicodeDecodeError)
"""The errors of a damaged file; also text that is not UTF-8, which we never write."""
FAILED: Final = (apsw.Error, UnicodeDecodeError)
"""Errors that a step on a file may raise."""
BUSY: Final = (apsw.BusyError, apsw.LockedError)
PATIENCE: Final = 30.0
"""Seconds that a step waits for other processes to finish theirs."""
READ_PATIENCE: Final = 0.25
"""Seconds that a read waits for a lock; it may be on an event loop's thread."""

_PRAGMAS: Final = "PRAGMA synchronous = {}; PRAGMA journal_size_limit = 67108864"
_SETTINGS: Final = (
    (apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1),  # otherwise joins are prepared again on every bind
    (apsw.SQLITE_DBCONFIG_DEFENSIVE, 1),  # a damaged file must not be able to do more damage
    (apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0),
)
_REASONS: Final = {
    apsw.SQLITE_FULL: "the disk is full; writing works again when there is room",
    apsw.SQLITE_READONLY: "the file is read-only; it can be read, not written",
    apsw.SQLITE_READONLY_DIRECTORY: "its directory must be writable: SQLite keeps its log there",
    apsw.SQLITE_CANTOPEN: "cannot be opened; is its directory readable and writable?",
    apsw.SQLITE_BUSY: "another process keeps it locked for writing; is it stopped? "
    "It must continue or end before anything can be written",
}


class Patience:
    """The busy handler: short random pauses, shorter for a step that has waited longer.

    SQLite's own doubles its pauses up to 100 ms, so under load the newest step always wins. A lower
    `limit` applies at once, also to a step that waits already.
    """

    def __init__(
        self,
        limit: float = PATIENCE,
        *,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limit = limit
        self._clock = clock
        self._sleep = sleep
        self._began = 0.0

    def __call__(self, attempt: int) -> bool:
        now = self._clock()
        if attempt == 0:
            self._began = now
        pause = random.uniform(0.001, 0.005)  # noqa: S311 (no secret)
        self._sleep(max(pause / (1 + attempt / 8), 0.0005))
        return now < self._began + self.limit


def connect(path: Path, patience: Patience | None = None) -> apsw.Connection:
    """Connect for writing; on a read-only medium, without a log, as to an unchanging file."""
    if on_read_only_mount(path) and path.exists() and not log_of(path).exists():
        return _immutable(path)
    create_private(path)
    return _configured(apsw.Connection(str(path)), patience)


def _configured(connection: apsw.Connection, patience: Patience | None = None) -> apsw.Connection:
    """The connection, with our busy handler and settings."""
    connection.set_busy_handler(patience or Patience())
    for setting, value in _SETTINGS:
        connection.config(setting, value)
    return connection


def _immutable(path: Path) -> apsw.Connection:
    """Connect without a log and locks, because no process can write."""
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    url = f"file:{quote(str(path.absolute()))}?immutable=1"
    return _configured(apsw.Connection(url, flags=flags))


def connect_viewer(path: Path) -> apsw.Connection:
    """Return a connection that only looks at a file, even where nothing may be written beside it.

    It never writes back a log that it finds, which may belong to another file.
    """
    path = real(path)
    connection = _configured(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE))
    try:
        if has_log(path):
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            check_owner(path, connection.pragma("application_id"))
        return _read_only(connection)
    except (ConfigError, apsw.Error) as exc:
        abandon(connection)
        if not isinstance(exc, apsw.CantOpenError | apsw.ReadOnlyError) or log_of(path).exists():
            raise
        return _read_only(_immutable(path))


def _read_only(connection: apsw.Connection) -> apsw.Connection:
    """The connection, which can no longer write; it reads once, so a damaged file fails here."""
    connection.execute("PRAGMA query_only = 1; SELECT count(*) FROM sqlite_schema").fetchall()
    return connection


def connect_reader(path: Path) -> apsw.Connection:
    """Return a connection for reading, which has read once, while the path names this file."""
    connection = _read_only(connect(path))
    connection.set_busy_handler(Patience(READ_PATIENCE))
    return connection


def admit(connection: apsw.Connection, path: Path, file_format: Format) -> None:
    """Begin an empty file, take one of ours, refuse any other without touching it."""
    is_begun = file_format.is_begun(connection, path)
    is_read_only = connection.readonly("main")
    if is_read_only and path.stat().st_size == 0:
        raise StoreError(f"{path}: is empty and read-only; make it writable, or delete it")
    if not is_read_only:
        if not is_begun:  # before there is a log, so that the header itself says whose file it is
            connection.execute(f"BEGIN IMMEDIATE; {file_format.begin}; COMMIT")
        if connection.pragma("journal_mode") != "wal":
            connection.pragma("journal_mode", "wal")
        connection.execute(_PRAGMAS.format("NORMAL" if file_format.is_cache else "FULL"))
    connection.execute("SELECT count(*) FROM sqlite_schema").get  # noqa: B018 (reads the schema)


def abandon(connection: apsw.Connection) -> None:
    """Close without writing the log back: it is not the last, or the file is no longer ours."""
    with suppress(apsw.Error):
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.close()


def bytes_of(connection: apsw.Connection) -> int:
    """On disk: the file and its log."""
    files = [Path(connection.filename), Path(connection.filename_wal)]
    return sum(file.stat().st_size for file in files if file.exists())


def explained(path: Path, exc: Exception) -> StoreError:
    """Return an error that names the file, what went wrong, and what to do."""
    reason = "is not a SQLite file, or is corrupt" if isinstance(exc, CORRUPT) else repr(exc)
    for code in ("result", "extendedresult"):
        reason = _REASONS.get(getattr(exc, code, -1), reason)
    error = StoreError(f"{path}: {reason}")
    error.__cause__ = exc
    return error


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn SQLite's errors in the block into StoreError."""
    try:
        yield
    except FAILED as exc:
        raise explained(path, exc) from exc
    except OSError as exc:
        raise StoreError(f"{path}: {exc.strerror}") from exc
