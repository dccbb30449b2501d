"""The file of one process: its two connections, and commits of groups of jobs.

Everything here runs on the writer's thread, except `claims`, which callers use to withdraw a job.

A group of jobs is one transaction, each job in its own savepoint: a failing job fails alone. A
corrupt file is renamed, and a new one begun. If the file was moved or replaced, or a symbolic link
leads elsewhere, the file is opened again.

A job begins when its transaction has the file's lock. Until then its caller may withdraw it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import apsw

from stillfresh.errors import ConfigError, StoreError
from stillfresh.stores.sqlite.connection import (
    BUSY,
    CORRUPT,
    FAILED,
    PATIENCE,
    Format,
    Patience,
    abandon,
    admit,
    check_is_database,
    check_log,
    check_owner,
    connect,
    connect_reader,
    explained,
    translated,
)
from stillfresh.stores.sqlite.files import (
    check_place,
    is_beheaded,
    locked,
    log_of,
    real,
    set_aside,
)

T = TypeVar("T")

CONCERNS_ALL: Final = (StoreError, *BUSY, *CORRUPT, apsw.ReadOnlyError, apsw.CantOpenError)
"""Not one job's fault: trying them one by one would fail as often."""
Identity: TypeAlias = tuple[int, int]
"""Device and inode of a file: a path may name another file later."""

log = logging.getLogger("stillfresh.sqlite")


@dataclass(eq=False, slots=True)
class Work:
    """A job, the callers that wait for it, and what it returned or raised.

    Urgent: tried even while the file is locked.
    """

    job: Callable[[apsw.Connection], Any]
    future: "asyncio.Future[Any] | Future[Any] | None" = None
    writes: bool = True
    urgent: bool = True
    began: float = field(default_factory=time.monotonic)
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
    """`adopt` is called with the connection for reading, whenever the file was opened."""

    def __init__(
        self,
        path: Path,
        kind: Format,
        adopt: Callable[[apsw.Connection], object],
        patience: float = PATIENCE,
    ) -> None:
        self._name = self._path = path
        """The file itself, if the name is a symbolic link."""
        self._kind = kind
        self._adopt = adopt
        self.patience = Patience(patience)
        self.claims = threading.Lock()
        """Held while jobs begin or are withdrawn."""
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None
        self.identity: Identity | None = None
        """The identity of the opened file; the name may lead to another file by now."""
        self._neighbours: dict[Path, Identity | None] = {}
        """The log beside the file, and the log's index."""
        self.damaged: apsw.Connection | None = None
        """The connection that found corruption; one of an earlier file does not count."""

    def open(self) -> None:
        """Under the lock: no process may open the file while another one renames it."""
        path = real(self._name)
        with translated(path):
            check_place(path)
            with locked(path, self.patience.limit) as is_locked:
                self._take_log_away()
                self._path = path
                self._open_whole(is_locked=is_locked)

    def _take_log_away(self) -> None:
        """The log of a file that another took the place of would be replayed into that one.

        Its index stays where the new file came with a log of its own, and would be taken for its.
        """
        if self._writer is None or self.identity == identity_of(self._path):
            return
        ours = [
            name
            for name, identity in self._neighbours.items()
            if identity and identity_of(name) == identity
        ]
        if log_of(self._path) in ours:
            with suppress(apsw.Error):  # so that the file is whole, wherever it was moved to
                self._writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        for name in ours:
            name.unlink(missing_ok=True)

    def _open_whole(self, *, is_locked: bool) -> None:
        if self._is_damaged() and self.identity == identity_of(self._path):
            self._set_aside(is_locked=is_locked)
        try:
            self._connect()
        except CORRUPT:
            check_owner(self._path, *self._kind.application_ids)
            self._set_aside(is_locked=is_locked)
            self._connect()

    def _is_damaged(self) -> bool:
        return self.damaged is not None and self.damaged in (self._reader, self._writer)

    def _connect(self) -> None:
        check_is_database(self._path)
        check_log(self._path, *self._kind.application_ids)
        before = identity_of(self._path)
        if not self._kind.is_cache and is_beheaded(self._path):
            raise self._corrupt()
        writer = connect(self._path, self.patience)
        try:
            admit(writer, self._path, self._kind)
            reader = connect_reader(self._path)
        except BaseException:
            abandon(writer)
            raise
        old_writer = self._writer
        self._writer = writer
        self._reader = reader
        self.identity = before or identity_of(self._path)  # replaced since: opened once more
        names = log_of(self._path), Path(f"{self._path}-shm")
        self._neighbours = {name: identity_of(name) for name in names}
        self._adopt(reader)
        if old_writer is not None:
            abandon(old_writer)

    def _set_aside(self, *, is_locked: bool) -> None:
        if not self._kind.is_cache:
            raise self._corrupt()
        if not is_locked:
            raise StoreError(f"{self._path}: is corrupt, and cannot be renamed or replaced here")
        log.error("%s is corrupt; renamed to %s", self._path, set_aside(self._path))

    def _corrupt(self) -> StoreError:
        return StoreError(
            f"{self._path}: is corrupt. It is no cache that could be begun anew, and is left as it "
            "is: restore it from a backup, or recover it with SQLite's own tools"
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def leave(self) -> None:
        """In a forked child: let go of the copies of the parent's connections."""
        for connection in (self._reader, self._writer):
            if connection is not None:
                abandon(connection)

    def look(self, work: Work) -> None:
        """Run a job that only reads, outside any transaction: it needs no lock or disk space."""
        try:
            work.result = self._mending(lambda: work.job(self._ready(writing=False)))
        except Exception as exc:  # noqa: BLE001 (handed to the caller)
            work.error = exc
            self._explain(work)

    def write(self, group: Sequence[Work]) -> None:
        """Run the jobs; each is committed, or gets its error."""
        try:
            self._mending(lambda: commit(self._ready(writing=True), group, self.claims))
        except Exception as exc:  # noqa: BLE001 (handed to the caller)
            for work in group:
                if len(group) == 1 or isinstance(exc, CONCERNS_ALL):
                    work.error = exc
                else:  # one of them broke the transaction: run each alone
                    self.write([work])
        for work in group:
            self._explain(work)

    def _mending(self, action: Callable[[], T]) -> T:
        """Run the action; once more on a new file, if this one is corrupt or missing."""
        try:
            return action()
        except FAILED as exc:
            if isinstance(exc, CORRUPT):
                self.damaged = self._writer
            elif self.identity == identity_of(self._name):
                raise
            return action()

    def _ready(self, *, writing: bool) -> apsw.Connection:
        """The connection; opens the file again if it is corrupt, gone, or maybe writable again."""
        writer = self._writer
        if (
            writer is None
            or self._is_damaged()
            or self.identity != identity_of(self._name)
            or (writing and writer.readonly("main"))
        ):
            self._refuse_another()
            try:
                self.open()
            except ConfigError as exc:  # another application's file in its place: not our caller's
                raise StoreError(str(exc)) from exc
        assert self._writer is not None  # noqa: S101 (open() has set it, or raised)
        return self._writer

    def _refuse_another(self) -> None:
        """Raise if a file that is not a cache was replaced: its data must not be mixed up."""
        if not self._kind.is_cache and self.identity != identity_of(self._name):
            raise StoreError(
                f"{self._name}: was moved, removed or replaced while it was open; put it back, "
                "or open it again"
            )

    def _explain(self, work: Work) -> None:
        if isinstance(work.error, FAILED):
            work.error = explained(self._path, work.error)


def identity_of(path: Path) -> Identity | None:
    """Return the identity of the file at this path; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def commit(connection: apsw.Connection, group: Sequence[Work], claims: threading.Lock) -> None:
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


def _begin(group: Sequence[Work], claims: threading.Lock) -> list[Work]:
    """Begin the jobs that were not withdrawn; from now on they cannot be. Return them."""
    with claims:
        begun = [work for work in group if not work.is_withdrawn]
        for work in begun:
            work.has_begun = True
    return begun


def attempt(connection: apsw.Connection, work: Work) -> None:
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
