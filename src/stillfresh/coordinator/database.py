"""Database: one SQLite file with the views and, in seed 000's tables, when each was asked for (C2).

For every kind a table of views (`post`) and one of times (`post_ttl(id, last_updated_at)`, in
milliseconds). Whose views they are is in the file too, and is compared in the same statement or
transaction as every read and write: one viewer's view is never shown to another.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from os import PathLike
from typing import Any, Final

import apsw
import msgspec

from stillfresh.coordinator.rules import overtaken
from stillfresh.engine.keys import checked_kind
from stillfresh.engine.tasks import looked_at
from stillfresh.stores.sqlite.connection import FAILED
from stillfresh.stores.sqlite.format import by_header
from stillfresh.stores.sqlite.store import SqliteFile

APPLICATION_ID: Final = 0x5F4E3002
VERSION: Final = 1
SLICE: Final = 500
"""Rows that one job of an eviction looks at, so that others' writes pass between them."""

_BEGIN: Final = f"""
    CREATE TABLE stillfresh_owner(kind TEXT PRIMARY KEY NOT NULL, owner TEXT NOT NULL)
        WITHOUT ROWID;
    PRAGMA application_id = {APPLICATION_ID};
    PRAGMA user_version = {VERSION};
"""
_CREATE: Final = """
    CREATE TABLE IF NOT EXISTS {views}(id TEXT PRIMARY KEY NOT NULL, view BLOB NOT NULL);
    CREATE TABLE IF NOT EXISTS {times}(
        id TEXT PRIMARY KEY NOT NULL, last_updated_at INTEGER NOT NULL
    ) WITHOUT ROWID;
"""
_OWNED: Final = "(SELECT owner FROM stillfresh_owner WHERE kind = ?1) = ?2"
_SLICE: Final = "SELECT id, last_updated_at < ? FROM {times} WHERE id >= ? ORDER BY id LIMIT ?"


@dataclass(frozen=True, slots=True)
class Statements:
    """The SQL of one kind: one text per step, so that each is prepared once and kept."""

    create: str
    row: str
    any_row: str
    rows: str
    view: str
    set_row: str
    set_view: str
    drop_row: str
    drop_view: str
    empty: str
    slice: str


@cache
def statements(kind: str) -> Statements:
    views, times = f'"{checked_kind(kind)}"', f'"{kind}_ttl"'

    def of(text: str) -> str:
        return text.format(views=views, times=times, owned=_OWNED)

    return Statements(
        create=of(_CREATE),
        row=of("SELECT CAST(last_updated_at AS INTEGER) FROM {times} WHERE {owned} AND id = ?3"),
        any_row=of("SELECT CAST(last_updated_at AS INTEGER) FROM {times} WHERE id = ?"),
        rows=of(
            "SELECT t.id, CAST(t.last_updated_at AS INTEGER) FROM json_each(?3) AS asked "
            "CROSS JOIN {times} AS t ON t.id = asked.value WHERE {owned}"
        ),
        view=of("SELECT view FROM {views} WHERE {owned} AND id = ?3"),
        set_row=of(
            "INSERT INTO {times}(id, last_updated_at) VALUES (?, ?) "
            "ON CONFLICT(id) DO UPDATE SET last_updated_at = excluded.last_updated_at"
        ),
        set_view=of(
            "INSERT INTO {views}(id, view) VALUES (?, ?) "
            "ON CONFLICT(id) DO UPDATE SET view = excluded.view"
        ),
        drop_row=of("DELETE FROM {times} WHERE id = ?"),
        drop_view=of("DELETE FROM {views} WHERE id = ?"),
        empty=of("DELETE FROM {views}; DELETE FROM {times}"),
        slice=of(_SLICE),
    )


class Database(SqliteFile):
    """Opened by its first use; reads on the spot once it is open."""

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path, by_header(APPLICATION_ID, VERSION, _BEGIN))
        self._seen: tuple[apsw.Connection, int] | None = None
        self._opening: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._reader is not None

    async def open(self) -> None:
        """Once for all who wait: one of them giving up is no reason to close it."""
        if self.is_open:
            return
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(super().open())
            self._opening.add_done_callback(looked_at)
        await asyncio.shield(self._opening)

    async def close(self) -> None:
        """Also what is only being opened; opening itself closes what it could not open."""
        opening = self._opening
        is_ours = opening is asyncio.current_task()
        if opening is not None and not opening.done() and not is_ours:
            await asyncio.wait([opening])
        await super().close()

    def rows(self, kind: str, owner: str, ids: Sequence[str]) -> dict[str, int]:
        """`last_updated_at` of each id that has a row, in one query."""
        sql = statements(kind)
        try:
            if len(ids) == 1:
                row = self._execute(sql.row, (kind, owner, ids[0])).get
                return {} if row is None else {ids[0]: row}
            found = self._execute(sql.rows, (kind, owner, json.dumps(ids))).fetchall()
        except FAILED as exc:
            self._cannot_read(exc)
            return {}
        rows: list[tuple[Any, ...]] = found
        return {id_: row for id_, row in rows}  # noqa: C416 (typed)

    async def view(self, kind: str, owner: str, id_: str) -> Any:  # noqa: ANN401 (what JSON can say)
        """The stored view; None if there is none."""
        await self.open()
        try:
            data = self._execute(statements(kind).view, (kind, owner, id_)).get
        except FAILED as exc:
            self._cannot_read(exc)
            return None
        return None if data is None else decoded(data)

    async def serve(self, owners: Mapping[str, str]) -> None:
        """From now on each kind's views are its owner's: another's, and their rows, are gone.

        Not opened here: whose they are may be another's by the time it is open.
        """

        def job(connection: apsw.Connection) -> None:
            for kind, owner in owners.items():
                _serve(connection, kind, owner)

        await self._opened().run(job)

    async def persist(
        self,
        kind: str,
        owner: str,
        views: Mapping[str, bytes | None],
        *,
        sent: int,
        now: int,
        edited: Set[str],
    ) -> dict[str, int] | None:
        """C10: view and row of each id in one transaction; None: absent, its view goes.

        Returns the rows as they are then: `sent`, or a later one that was not ours to overwrite
        (C11); nothing of what is being edited. None if the file serves another viewer by now.
        """

        def job(connection: apsw.Connection) -> dict[str, int] | None:
            if not _owns(connection, kind, owner):
                return None
            left = {id_: view for id_, view in views.items() if id_ not in edited}
            return _persist(connection, kind, left, sent=sent, now=now)

        return await self._opened().run(job)

    async def touch(self, kind: str, owner: str, id_: str, now: int, view: bytes | None) -> bool:
        """C11: the copy is as new as this moment; the view is the edited one, if it is given.

        False if the file serves another viewer.
        """
        await self.open()

        def job(connection: apsw.Connection) -> bool:
            sql = statements(kind)
            if not _owns(connection, kind, owner):
                return False
            connection.execute(sql.set_row, (id_, now))
            if view is not None:
                connection.execute(sql.set_view, (id_, view))
            return True

        return await self._opened().run(job)

    async def changed(self) -> bool:
        """Has anybody else written to the file since this was asked last?"""
        await self.open()

        def job(connection: apsw.Connection) -> tuple[apsw.Connection, int]:
            return connection, int(connection.pragma("data_version"))

        before, self._seen = self._seen, await self._opened().run(job, writes=False)
        return before != self._seen

    async def evict(self, kind: str, before: int) -> int:
        """Drop what was asked for before then, in slices; returns how many."""
        await self.open()
        dropped, start = 0, ""
        while True:

            def job(connection: apsw.Connection, start: str = start) -> tuple[int, str | None]:
                return _evict_slice(connection, kind, start, before)

            number, following = await self._opened().run(job)
            dropped += number
            if following is None:
                return dropped
            start = following


def decoded(data: Any) -> Any:  # noqa: ANN401 (what is in the file, what JSON can say)
    """What somebody else wrote into the file is a miss, not a crash."""
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError):
        return None


def _serve(connection: apsw.Connection, kind: str, owner: str) -> None:
    """Rows that nobody is known to own are taken over: nobody's name was written with them."""
    sql = statements(kind)
    if not connection.table_exists("main", f"{kind}_ttl"):
        connection.execute(sql.create)
    known = connection.execute("SELECT owner FROM stillfresh_owner WHERE kind = ?", (kind,)).get
    if known not in {None, owner}:
        connection.execute(sql.empty)
    if known != owner:
        connection.execute("INSERT OR REPLACE INTO stillfresh_owner VALUES (?, ?)", (kind, owner))


def _owns(connection: apsw.Connection, kind: str, owner: str) -> bool:
    """A file that was begun anew meanwhile knows no owner: then it is who writes first."""
    known = connection.execute("SELECT owner FROM stillfresh_owner WHERE kind = ?", (kind,)).get
    if known is None:
        _serve(connection, kind, owner)
    return known in {None, owner}


def _persist(
    connection: apsw.Connection,
    kind: str,
    views: Mapping[str, bytes | None],
    *,
    sent: int,
    now: int,
) -> dict[str, int]:
    sql, rows = statements(kind), {}
    for id_, view in views.items():
        row = connection.execute(sql.any_row, (id_,)).get
        if overtaken(row, sent, now):
            rows[id_] = int(row)
            continue
        rows[id_] = sent
        connection.execute(sql.set_row, (id_, sent))
        if view is None:
            connection.execute(sql.drop_view, (id_,))
        else:
            connection.execute(sql.set_view, (id_, view))
    return rows


def _evict_slice(
    connection: apsw.Connection, kind: str, start: str, before: int
) -> tuple[int, str | None]:
    """Of the next rows: how many were dropped, and where to go on."""
    sql = statements(kind)
    if not connection.table_exists("main", f"{kind}_ttl"):
        return 0, None
    found = connection.execute(sql.slice, (before, start, SLICE + 1)).fetchall()
    old = [(id_,) for id_, is_old in found[:SLICE] if is_old]
    connection.executemany(sql.drop_row, old)
    connection.executemany(sql.drop_view, old)
    return len(old), str(found[SLICE][0]) if len(found) > SLICE else None
