"""Database: the file with the views, and when each was requested.

It is a store's file: the kind `post` has the tables `post` and `post_ttl(id, last_updated_at, …)`.
It also says whose views it holds, and which ids any process wrote lately.
"""

from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from secrets import token_hex
from typing import Final, NamedTuple, TypeAlias

import apsw
import msgspec

from stillfresh.clock import Clock
from stillfresh.stores.sqlite import (
    BEGIN_FILE,
    FAILED,
    STORE,
    Row,
    SqliteStore,
    own_kinds,
    own_tables,
)

FIRST_RELEASE: Final = 0x5F4E3002
"""The `application_id` of a coordinator's file before it was a store's."""
KEPT_FOR: Final = 315_360_000.0
"""Seconds: a view is kept until `evict` drops it. Ten years, whatever the TTL is."""
REMEMBERED: Final = 10_000
"""Changes; a process that missed more looks all ids up."""

_BEGIN: Final = """
    CREATE TABLE IF NOT EXISTS stillfresh_owner(kind TEXT PRIMARY KEY NOT NULL, owner TEXT NOT NULL)
        WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS stillfresh_changes(number INTEGER PRIMARY KEY, kind TEXT, id TEXT);
"""
_NOTE: Final = """
    CREATE TRIGGER IF NOT EXISTS "stillfresh_{kind}_{event}" AFTER {when} ON "{kind}_ttl"
        WHEN {row}.last_updated_at IS NOT NULL
    BEGIN
        INSERT INTO stillfresh_changes(kind, id) VALUES ('{kind}', {row}.id);
        DELETE FROM stillfresh_changes WHERE number <= last_insert_rowid() - {remembered};
    END;
"""
_EVENTS: Final = (
    ("insert", "INSERT", "new"),
    ("update", "UPDATE OF last_updated_at, mark", "new"),
    ("delete", "DELETE", "old"),
)
_EMPTY: Final = 'DELETE FROM "{kind}"; DELETE FROM "{kind}_ttl"'
_OWNER: Final = "SELECT owner FROM stillfresh_owner WHERE kind = ?"
_LAST: Final = "SELECT max(number) FROM stillfresh_changes"
_SINCE: Final = "SELECT number, kind, id FROM stillfresh_changes WHERE number >= ? ORDER BY number"
_CARRY: Final = """
    INSERT INTO "{kind}_ttl"
        (id, last_updated_at, generation, fresh_for, stale_for, error_for, absent)
    VALUES (?, ?, ?, 0, {kept_for}, 0, ?)
"""

Changes: TypeAlias = dict[str, list[str]]


class ChangesRead(NamedTuple):
    """The file, and how far its changes were read."""

    connection: apsw.Connection | None = None
    version: int = 0
    number: int = -1


class Database(SqliteStore):
    """The file of a coordinator: `Database("app.db")`. Its first use opens it."""

    evicts_hourly = False

    def __init__(self, path: str | PathLike[str]) -> None:
        kind = replace(
            STORE, is_begun=_is_begun, application_ids=(*STORE.application_ids, FIRST_RELEASE)
        )
        super().__init__(path, file_format=kind)
        self._seen = ChangesRead()

    def set_clock(self, clock: Clock) -> None:
        self._clock = clock

    @property
    def is_open(self) -> bool:
        return self._reader is not None

    def owner(self, kind: str) -> str | None:
        """The viewer whose views of this kind the file holds."""
        try:
            owner: str | None = self._execute(_OWNER, (kind,)).get
        except FAILED as exc:
            self._cannot_read(exc)
            return None
        return owner

    async def serve(self, owners: Mapping[str, str], *, keep_other_owner: Container[str]) -> None:
        """Make each kind's views belong to its owner, in one transaction.

        Views of another owner are deleted, with the leases of requests in flight for that owner. A
        kind in `keep_other_owner` gets the owner only if it has none: views of another owner stay.
        """

        def job(connection: apsw.Connection) -> ChangesRead:
            connection.execute(_BEGIN)
            for kind, owner in owners.items():
                own_tables(kind).ensure_tables(connection)
                _note_changes(connection, kind)
                known = connection.execute(_OWNER, (kind,)).get
                if known not in {None, owner}:
                    if kind in keep_other_owner:
                        continue
                    connection.execute(_EMPTY.format(kind=kind))
                connection.execute("REPLACE INTO stillfresh_owner VALUES (?, ?)", (kind, owner))
            return _changes(connection, ChangesRead())[1]

        read = await self.run(job)
        if self._seen.connection is None:
            self._seen = read

    async def changes(self) -> Changes | None:
        """The ids written since the last call, by kind; none if no other process wrote.

        None: any id may have been written. The file remembers fewer changes, or it is another file.
        """
        changes, self._seen = await self.run(
            lambda connection: _changes(connection, self._seen), writes=False
        )
        return changes


def _changes(connection: apsw.Connection, seen: ChangesRead) -> tuple[Changes | None, ChangesRead]:
    # Read before the version: a change after this one is seen by its other version.
    last = connection.execute(_LAST).get or 0
    version = int(connection.pragma("data_version"))
    if (connection, version) == seen[:2]:
        return {}, seen._replace(number=last)  # those between are our own
    rows: list[Row] = connection.execute(_SINCE, (seen.number,)).fetchall()
    numbers = [int(row[0]) for row in rows] or [0]
    now = ChangesRead(connection, version, numbers[-1])
    # The last one that was seen is read again: if it is gone, so are others.
    is_whole = numbers[0] == seen.number or (seen.number == 0 and numbers[0] == 1)
    if connection is not seen.connection or not is_whole:
        return None, now
    changes: Changes = {}
    for number, kind, id_ in rows:
        if number > seen.number:
            changes.setdefault(str(kind), []).append(str(id_))
    return changes, now


def _note_changes(connection: apsw.Connection, kind: str) -> None:
    for event, when, row in _EVENTS:
        text = _NOTE.format(kind=kind, event=event, when=when, row=row, remembered=REMEMBERED)
        connection.execute(text)


def _is_begun(connection: apsw.Connection, path: Path) -> bool:
    """A file of the first release becomes a store's: views, rows and owners are carried over."""
    if connection.pragma("application_id") != FIRST_RELEASE:
        return STORE.is_begun(connection, path)
    connection.execute("BEGIN IMMEDIATE")
    try:
        for kind in own_kinds(connection):
            _carry_over(connection, kind)
        connection.execute(f"{BEGIN_FILE}; COMMIT")
    finally:
        with suppress(apsw.Error):
            connection.execute("ROLLBACK")
    return True


def _carry_over(connection: apsw.Connection, kind: str) -> None:
    owner = connection.execute(_OWNER, (kind,)).get or ""
    for name in ("", "_ttl"):
        connection.execute(f'ALTER TABLE "{kind}{name}" RENAME TO "stillfresh_old{name}"')
    sql = own_tables(kind).ensure_tables(connection)
    rows: list[Row] = connection.execute(
        "SELECT t.id, t.last_updated_at, v.view FROM stillfresh_old_ttl t "
        "LEFT JOIN stillfresh_old v ON v.id = t.id"
    ).fetchall()
    carry = _CARRY.format(kind=kind, kept_for=KEPT_FOR)
    for id_, at, view in rows:
        connection.execute(carry, (id_, at, token_hex(16), view is None))
        value = None if view is None else msgspec.msgpack.encode((owner, msgspec.Raw(view)))
        connection.execute(sql.write_value, (id_, value))
    connection.execute("DROP TABLE stillfresh_old; DROP TABLE stillfresh_old_ttl")
