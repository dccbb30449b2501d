"""The file of one process: its two connections, and commits of groups of jobs.

The file is opened, used and closed by the thread that has the writer's turn: the writer's own, or a
calling thread that commits its job itself (`Writer.run_here`). Other threads may withdraw a job by
`claims`, ask `is_same`, read `file`, set `damaged`, and change how patient the connections are.

A group of jobs is one transaction, each job in its own savepoint: a failing job fails alone.

Before each group, `ownership` says whether the file is still ours. A file that was deleted, or to
which a symbolic link no longer leads, is opened again. A file that is lost stays so, and every job
fails. A corrupt file is renamed, and a new one begun.

A job begins when its transaction has the file's lock. Until then its caller may withdraw it.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

import apsw
from msgspec import Struct, field

from stillfresh.errors import ConfigError, StoreError
from stillfresh.stores.sqlite.connection import (
    BUSY,
    CORRUPT,
    FAILED,
    PATIENCE,
    Patience,
    abandon,
    admit,
    connect,
    connect_reader,
    explained,
    translated,
)
from stillfresh.stores.sqlite.files import (
    check_place,
    has_log,
    is_begun,
    locked,
    real,
    remove_log,
    set_aside,
)
from stillfresh.stores.sqlite.ownership import (
    Finding,
    Format,
    OpenedFile,
    check_is_database,
    check_log,
    check_owner,
    identity_of,
    note_begun,
)

T = TypeVar("T")
U = TypeVar("U")

CONCERNS_ALL: Final = (StoreError, *BUSY, *CORRUPT, apsw.ReadOnlyError, apsw.CantOpenError)
"""Not one job's fault: trying them one by one would fail as often."""

log = logging.getLogger("stillfresh.sqlite")


class WriteJob(Struct, eq=False):
    """A job, the callers that wait for it, and what it returned or raised.

    Urgent: tried even while the file is locked. Jobs are urgent unless they say otherwise, unlike
    steps on a server: a job that is added later must not be refused by mistake.
    """

    job: Callable[[apsw.Connection], Any]
    future: "asyncio.Future[Any] | Future[Any] | None" = None
    writes: bool = True
    urgent: bool = True
    queued_at: float = field(default_factory=monotonic)
    """By the monotonic clock."""
    result: Any = None
    error: Exception | None = None
    has_begun: bool = False
    """It runs, or has run. Like `is_withdrawn`, it changes under the database's `claims`."""
    is_withdrawn: bool = False
    """Its caller has given up, and it never runs."""
    is_settled: bool = False
    """Its callers were told. Like `settled`, it belongs to the event loop."""
    settled: asyncio.Event | None = None
    """Set when it is settled, for a caller that was cancelled after it had begun."""


class WriteDatabase:
    """A file of this process that jobs write to.

    `adopt` is called with the connection for reading, whenever the file was opened.
    """

    def __init__(
        self,
        name: Path,
        file_format: Format,
        adopt: Callable[[apsw.Connection], object],
        patience: float = PATIENCE,
    ) -> None:
        self._name = name
        self._path = name
        """The file that the name leads to, if it is a symbolic link."""
        self._format = file_format
        self._adopt = adopt
        self.patience = Patience(patience)
        self.claims = threading.Lock()
        """Held while jobs begin or are withdrawn."""
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None
        self._file: OpenedFile | None = None
        self._lost_because: Finding | None = None
        """Why the file is no longer ours. It stays so until the owner opens it again."""
        self.damaged: apsw.Connection | None = None
        """The connection that found corruption; one of an earlier file does not count."""

    def open(self) -> None:
        """Under the lock: no process may open the file while another one renames it."""
        path = real(self._name)
        with translated(path):
            check_place(path)
            with locked(path, self.patience.limit) as lock:
                self._path = path
                is_ours = self._file is not None and self._file.identify() is Finding.SAME
                if is_ours and self._is_damaged():
                    self._set_aside(lock)
                try:
                    self._connect(lock)
                except CORRUPT:
                    check_owner(path, *self._format.application_ids)
                    self._set_aside(lock)
                    self._connect(lock)

    def _is_damaged(self) -> bool:
        return self.damaged is not None and self.damaged in (self._reader, self._writer)

    def _connect(self, lock: int | None) -> None:
        path = self._path
        check_is_database(path)
        check_log(path, *self._format.application_ids)
        is_new = not is_begun(path)
        if is_new:
            self._remove_leftover_log()
        before = identity_of(path)
        writer = connect(path, self.patience)
        try:
            admit(writer, path, self._format)
            reader = connect_reader(path)
        except BaseException:
            abandon(writer)
            raise
        identity = before or identity_of(path)
        if is_new and lock is not None and identity is not None:
            note_begun(lock, identity)
        old_writer = self._writer
        self._writer = writer
        self._reader = reader
        self._file = OpenedFile(self._name, path, identity, self._format)
        self._adopt(reader)
        if old_writer is not None:
            abandon(old_writer)

    def _remove_leftover_log(self) -> None:
        """Without a file, a log is what is left of one that was deleted or moved."""
        if has_log(self._path) and not self._format.is_cache:
            raise self._corrupt()
        remove_log(self._path)

    def _set_aside(self, lock: int | None) -> None:
        if not self._format.is_cache:
            raise self._corrupt()
        if lock is None:
            raise StoreError(f"{self._path}: is corrupt, and cannot be renamed or replaced here")
        log.error("%s is corrupt; renamed to %s", self._path, set_aside(self._path))

    def _corrupt(self) -> StoreError:
        return StoreError(
            f"{self._path}: is corrupt. It is no cache that could be begun anew, and is left as it "
            "is: restore it from a backup, or recover it with SQLite's own tools"
        )

    def close(self) -> None:
        """Close the file; the last process that closes it writes the log back."""
        if self._writer is None:
            return
        try:
            self._check_file()
            self._writer.close()
        except StoreError:  # lost, and logged; or another process keeps the lock
            if self._writer is not None:
                abandon(self._writer)
        self._writer = None

    def leave(self) -> None:
        """In a forked child: let go of the copies of the parent's connections."""
        for connection in (self._reader, self._writer):
            if connection is not None:
                abandon(connection)

    def is_same(self) -> bool:
        """True if the name still leads to our file. Raises StoreError if the file is lost.

        Any thread may ask. Only the thread that has the writer's turn decides that a file is lost,
        under the file's lock: a process that sets a corrupt file aside renames it, too, a moment
        before it begins the next.
        """
        if self._lost_because is not None:
            raise self.file.lost(self._lost_because)
        return self.file.identify() is Finding.SAME

    @property
    def file(self) -> OpenedFile:
        assert self._file is not None  # noqa: S101 (nobody asks before it is opened)
        return self._file

    def _check_file(self) -> Finding:
        """What has the name of our file. If that is lost, part from it, and raise StoreError."""
        file = self.file
        finding = self._lost_because or file.identify()
        if finding is Finding.SAME:
            return finding
        if self._lost_because is None and file.is_lost(finding):
            with translated(file.path), locked(file.path, self.patience.limit) as lock:
                finding = file.identify()
                if file.is_lost(finding):
                    self._part(finding, can_rename=lock is not None)
        if self._lost_because is not None:
            raise file.lost(self._lost_because)
        return finding

    def _part(self, finding: Finding, *, can_rename: bool) -> None:
        assert self._writer is not None  # noqa: S101 (it is open until now)
        self._lost_because = finding
        log.error("%s", self.file.lost(finding))
        self.file.part(finding, self._writer, can_rename=can_rename)
        abandon(self._writer)
        self._writer = None

    def run_read(self, work: WriteJob) -> None:
        """Run a job that only reads, outside any transaction: it needs no lock or disk space."""
        try:
            work.result = self._mending(lambda job: job(self._ready(writing=False)), work.job)
        except Exception as exc:  # noqa: BLE001 (handed to the caller)
            work.error = exc
            self._explain(work)

    def write(self, group: Sequence[WriteJob]) -> None:
        """Run the jobs; each is committed, or gets its error."""
        try:
            self._mending(self._commit, group)
        except Exception as exc:  # noqa: BLE001 (handed to the caller)
            for work in group:
                if len(group) == 1 or isinstance(exc, CONCERNS_ALL):
                    work.error = exc
                else:  # one of them broke the transaction: run each alone
                    self.write([work])
        for work in group:
            if work.error is not None:
                self._explain(work)

    def _commit(self, group: Sequence[WriteJob]) -> None:
        commit(self._ready(writing=True), group, self.claims)

    def _mending(self, action: Callable[[U], T], argument: U) -> T:
        """Run the action; once more, if it failed because the file is corrupt or not the same."""
        try:
            return action(argument)
        except FAILED as exc:
            if isinstance(exc, CORRUPT):
                self.damaged = self._writer
            elif self.file.identify() is Finding.SAME:
                raise
            return action(argument)

    def _ready(self, *, writing: bool) -> apsw.Connection:
        """The connection; opens the file again if it is corrupt, gone, or maybe writable again."""
        finding = self._check_file()
        assert self._writer is not None  # noqa: S101 (it was opened)
        may_be_writable = writing and self._writer.readonly("main")
        if finding is not Finding.SAME or self._is_damaged() or may_be_writable:
            try:
                self.open()
            except ConfigError as exc:  # another application's file in its place: not our caller's
                raise StoreError(str(exc)) from exc
        return self._writer

    def _explain(self, work: WriteJob) -> None:
        if isinstance(work.error, FAILED):
            work.error = explained(self._path, work.error)


def commit(connection: apsw.Connection, group: Sequence[WriteJob], claims: threading.Lock) -> None:
    """One transaction for all that were not withdrawn before it had the file's lock."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for work in _begin(group, claims):
            if len(group) == 1:  # the transaction is its savepoint
                work.result = work.job(connection)
                work.error = None
            else:
                attempt(connection, work)
        connection.execute("COMMIT")
    except BaseException:
        # Some errors have rolled it back already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        with claims:
            for work in group:
                work.has_begun = False  # nothing is left of it, and it may be tried once more
        raise


def _begin(group: Sequence[WriteJob], claims: threading.Lock) -> list[WriteJob]:
    """Begin the jobs that were not withdrawn; from now on they cannot be. Return them."""
    with claims:
        begun = [work for work in group if not work.is_withdrawn]
        for work in begun:
            work.has_begun = True
    return begun


def attempt(connection: apsw.Connection, work: WriteJob) -> None:
    """A savepoint for each; errors of the file itself concern the whole group."""
    connection.execute("SAVEPOINT job")
    try:
        work.result = work.job(connection)
        work.error = None
    except Exception as exc:
        if isinstance(exc, CORRUPT) or not connection.in_transaction:
            raise
        connection.execute("ROLLBACK TO job; RELEASE job")
        work.error = exc
    else:
        connection.execute("RELEASE job")
