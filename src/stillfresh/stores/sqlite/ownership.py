"""Whose file is this? Asked before a file is opened, and again and again while it is open.

SQLite finds a file and its log (`-wal`), and the log's index (`-shm`), by name. If another file
takes the name of an open one, the next process that opens it finds our log beside it, takes it for
that file's own, and writes our pages into it. So one thing must never happen: **a file must not be
opened beside a log that is not its own.**

*Before it is opened*, the header tells. It is read without the log, because SQLite would read it
through the log. It must be ours, or the file is refused (`check_log`, `check_owner`) or set aside.
A new file's header is written before there is a log, so every file of ours has it. Where there is
no file, or an empty one, a log belongs to a file that is gone, and is removed.

*While it is open*, `OpenedFile.identify` compares the name with what was opened:

    SAME         the same file, with our header, and our log and index beside it
    ELSEWHERE    the name is a symbolic link that leads to another file now
    GONE         the file was deleted, or stillfresh has begun another one in its place
    MOVED        the file was moved, or another one was moved over it
    OVERWRITTEN  the same file, but its header is not ours: somebody has written into it
    LOG_LOST     the same file, but not our log or index beside it: half of the data is missing

A cache's file that is ELSEWHERE or GONE is opened again: the new file, or none, is whole in itself.
The other three are *lost*. We cannot know what somebody means to do with the files, so we part from
them, and touch them never again: reads and writes fail until the owner closes the file and opens it
again. Parting removes the danger for the next process that opens the name (`OpenedFile.part`):

    MOVED        our log is written back to our file, wherever that is, and removed from the name
    OVERWRITTEN  our log is removed; written back, it would destroy what is in the file now
    LOG_LOST     the file is set aside, with anything beside it: without its log it lacks changes

A file that is not a cache is never begun anew: every finding but SAME loses it. Its log is only
removed when all of it was written back.

How GONE is told from MOVED. If nothing has the name, the number of links of the file that we have
open is zero, or it was moved. If another file has the name, `<name>.lock` tells: it holds the
identity of the file that stillfresh began last, and every other file was brought by somebody else.

What nobody can see: a process that starts later finds a log and cannot know that it is another
file's, if both files have our header. And a store of ours that is copied *into* an open one has our
header, too. Close a file before you move it or write into it.
"""

import codecs
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from os import fspath, stat
from pathlib import Path
from typing import Final, TypeAlias

import apsw

from stillfresh.errors import ConfigError, StoreError
from stillfresh.stores.sqlite.files import has_log, index_of, lock_of, log_of, real, set_aside

Identity: TypeAlias = tuple[int, int]
"""Device and inode of a file: a path may name another file later."""
MAGIC: Final = b"SQLite format 3\0"
HEAD: Final = 4_096
"""Bytes at the beginning of a file that identify it."""
CONTROL: Final = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")
OTHERS: Final = (
    b"\x89PNG",
    b"\xff\xd8\xff",
    b"GIF8",
    b"%PDF",
    b"PK\x03\x04",
    b"\x1f\x8b",
    b"\x7fELF",
)
OURS: Final = {
    0x5F4E3001: "a cache's store",
    0x5F4E3002: "a coordinator's file",
    0x5F4E3003: "a games file",
}
"""The header of a file of stillfresh."""
DESCRIPTORS: Final = Path("/dev/fd")
"""The open files of this process, on Linux and macOS."""


@dataclass(frozen=True, slots=True)
class Format:
    """One format of file."""

    application_ids: tuple[int, ...]
    """Its own ids, and those of earlier releases, whose files `is_begun` converts."""
    begin: str
    """The SQL that turns an empty file into one of this format."""
    is_begun: Callable[[apsw.Connection, Path], bool]
    """False if `begin` must still be run; ConfigError for a file of another program."""
    is_cache: bool = True
    """False if the file is not a cache: it is never replaced, and commits are synced to disk."""


def not_ours(path: Path, application: int) -> ConfigError:
    """Return the error for a file of another program or format."""
    what = OURS.get(application)
    if what is not None:
        return ConfigError(
            f"{path}: is {what} of stillfresh, which cannot be opened as any other; "
            "name another file"
        )
    return ConfigError(
        f"{path}: is another application's SQLite file (application_id {application}); "
        "give stillfresh a file of its own"
    )


def by_header(application_id: int, version: int, begin: str, *, is_cache: bool = True) -> Format:
    """Return a format that the file's header names. An empty file is begun, others refused."""

    def is_begun(connection: apsw.Connection, path: Path) -> bool:
        file_id = connection.pragma("application_id")
        file_version = connection.pragma("user_version")
        if file_id != application_id:
            tables = connection.execute("SELECT count(*) FROM sqlite_schema").get
            if (file_id, file_version, tables) != (0, 0, 0):
                raise not_ours(path, file_id)
            return False
        if file_version != version:
            raise ConfigError(
                f"{path}: is of schema version {file_version}, this release of stillfresh knows "
                f"{version}; use another file"
                + (", or delete this one: it is a cache" if is_cache else "")
            )
        return True

    return Format((application_id,), begin, is_begun, is_cache)


def check_log(path: Path, *application_ids: int) -> None:
    """A log beside a file that is not ours may be ours: SQLite would replay it into that file."""
    if has_log(path) and path.exists():
        check_owner(path, *application_ids)


def check_owner(path: Path, *application_ids: int) -> None:
    """Refuse a file whose header is whole and not ours; its log and its state do not matter."""
    head = _head(path)
    application = _application_of(head)
    if head.startswith(MAGIC) and application not in application_ids:
        raise not_ours(path, application)


def _application_of(head: bytes) -> int:
    return int.from_bytes(head[68:72])


def _head(path: Path) -> bytes:
    """Read through SQLite's own files, which keep their locks when one of them is closed."""
    flags = apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY
    file = apsw.VFSFile("", str(path), [flags, 0])
    head = file.xRead(min(file.xFileSize(), HEAD), 0)
    file.xClose()
    return head


def check_is_database(path: Path) -> None:
    """Before it is opened: SQLite takes a short text for an empty database."""
    if path.exists() and is_something_else(_head(path)):
        raise ConfigError(
            f"{path}: is a text, an image or an archive, not a SQLite file; it is left as it is: "
            "name a file of its own"
        )


def is_something_else(head: bytes) -> bool:
    """True if a file that begins like this is plainly no database, damaged or not.

    A text is UTF-8 without the control characters that texts have no use for. Zeros, noise and
    everything that begins as SQLite does are a database, whole or damaged.
    """
    if head.startswith(OTHERS):
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return bool(head) and CONTROL.search(head) is None


class Finding(Enum):
    """What the name of an open file leads to now; see the top of this module."""

    SAME = "is unchanged"
    ELSEWHERE = "is a symbolic link that was changed"
    GONE = "was deleted"
    MOVED = "was moved or replaced"
    OVERWRITTEN = "was overwritten by another program"
    LOG_LOST = "has lost its log: the -wal or -shm file beside it was moved, replaced or removed"


LOSSES: Final = frozenset([Finding.MOVED, Finding.OVERWRITTEN, Finding.LOG_LOST])
"""What makes a cache's file no longer ours."""


class OpenedFile:
    """A file that this process has open, and what has its name now."""

    def __init__(
        self, name: Path, path: Path, identity: Identity | None, file_format: Format
    ) -> None:
        """`path` is the file that `name` leads to. Call this when SQLite has opened its log."""
        self.path = path
        self._name = fspath(name)  # text: a file is looked at for each write
        self._identity = identity
        self._format = file_format
        neighbours = {fspath(each): identity_of(each) for each in (log_of(path), index_of(path))}
        # On a read-only medium there is neither log nor index.
        self._neighbours = {each: known for each, known in neighbours.items() if known is not None}
        self._intact: tuple[int, int] | None = None
        """Size and time of the file when its header was ours; SQLite writes to it now and then."""

    def identify(self) -> Finding:
        """Compare the name with what was opened. Any thread may ask."""
        status = _status_of(self._name)
        if status is None or _identity(status) != self._identity:
            return self._identify_successor()
        for neighbour, known in self._neighbours.items():
            if identity_of(neighbour) != known:
                # A file that others have written over is theirs, whatever became of our log.
                return Finding.LOG_LOST if self._has_our_header() else Finding.OVERWRITTEN
        state = (status.st_size, status.st_mtime_ns)
        if state != self._intact:
            if not self._has_our_header():
                return Finding.OVERWRITTEN
            self._intact = state
        return Finding.SAME

    def _identify_successor(self) -> Finding:
        if real(Path(self._name)) != self.path:
            return Finding.ELSEWHERE
        successor = identity_of(self.path)
        if successor is None:
            return Finding.GONE if self._is_deleted() else Finding.MOVED
        return Finding.GONE if successor == begun_last(self.path) else Finding.MOVED

    def _is_deleted(self) -> bool:
        """True if no directory names it any more. False if the system cannot tell."""
        return any(
            _identity(status) == self._identity and status.st_nlink == 0 for status in _open_files()
        )

    def _has_our_header(self) -> bool:
        try:
            head = _head(self.path)
        except apsw.Error:  # it was moved a moment ago, as the next check will find
            return True
        return head.startswith(MAGIC) and _application_of(head) in self._format.application_ids

    def is_lost(self, finding: Finding) -> bool:
        """True if a file of which this was found must not be used any more."""
        if self._format.is_cache:
            return finding in LOSSES
        return finding is not Finding.SAME

    def lost(self, finding: Finding) -> StoreError:
        """Return the error for every use of a lost file."""
        return StoreError(
            f"{self.path}: {finding.value} while it was open. It is neither read nor written until "
            "it is opened again: close the cache, make sure that the right file has this name, "
            "and open the cache again"
        )

    def part(self, finding: Finding, writer: apsw.Connection, *, can_rename: bool) -> None:
        """Make the name safe for the next process that opens it. Call it once, under the lock."""
        is_cache = self._format.is_cache
        if finding is Finding.LOG_LOST:
            if is_cache and can_rename:
                set_aside(self.path)
        elif finding is Finding.OVERWRITTEN:
            if is_cache:
                self._remove_log()
        elif _write_log_back(writer) or is_cache:
            self._remove_log()

    def _remove_log(self) -> None:
        """Remove our log and its index, unless others have their names by now."""
        for neighbour, identity in self._neighbours.items():
            if identity_of(neighbour) == identity:
                Path(neighbour).unlink(missing_ok=True)


def _write_log_back(writer: apsw.Connection) -> bool:
    """Write the log back to the file, wherever that was moved. True if all of it was written."""
    try:
        in_log, written = writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
    except apsw.Error:
        return False
    return in_log == written


def identity_of(path: str | Path) -> Identity | None:
    """Return the identity of the file at this path; None if there is none."""
    try:
        status = stat(path)  # noqa: PTH116 (as below)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def _status_of(path: str | Path) -> os.stat_result | None:
    try:
        return stat(path)  # noqa: PTH116 (a third faster, and called three times for each write)
    except OSError:
        return None


def _open_files() -> Iterator[os.stat_result]:
    """The files that this process has open. None of them is opened or closed for it."""
    descriptors = list(DESCRIPTORS.iterdir()) if DESCRIPTORS.exists() else []
    for descriptor in descriptors:
        with suppress(OSError):  # closed meanwhile
            yield os.fstat(int(descriptor.name))


def begun_last(path: Path) -> Identity | None:
    """The identity of the file that stillfresh began last at this path, as its lock file says."""
    try:
        device, inode = lock_of(path).read_text().split()
        return int(device), int(inode)
    except (OSError, ValueError):
        return None


def note_begun(lock: int, identity: Identity) -> None:
    """Write into the lock file, which is locked, that the file of this identity was begun."""
    device, inode = identity
    os.lseek(lock, 0, os.SEEK_SET)
    os.ftruncate(lock, 0)
    os.write(lock, f"{device} {inode}\n".encode())
