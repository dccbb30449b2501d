"""A store's file, looked into and left as it is (S4, G10): for those who only want to see.

Never makes a file, never begins an empty one, never sets a damaged one aside, and takes no lock
that a writer would wait for.
"""

import os
import time
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Final, TypeAlias

import apsw

from stillfresh.clock import Clock
from stillfresh.errors import NotOpen, StoreError
from stillfresh.stores.contract import Entry, Generations, Record, StoreStats
from stillfresh.stores.listing import checked_limit
from stillfresh.stores.sqlite import steps
from stillfresh.stores.sqlite.connection import (
    FAILED,
    bytes_of,
    check_log,
    connect_viewer,
    explained,
)
from stillfresh.stores.sqlite.files import real
from stillfresh.stores.sqlite.schema import Row, record_of

WALK: Final = 10_000
"""Ids that one step of a listing goes over."""
After: TypeAlias = tuple[str, str] | None
"""The kind and id of the last entry that was looked at."""


class SqliteView:
    """Reads on the caller's thread; a file that was damaged is an error, not an empty store."""

    reads_inline = outlives_loops = needs_eviction = False
    tenant = shapes = None

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        clock: Clock = time.time,
        layout: steps.Layout = steps.OWN,
    ) -> None:
        self._path = Path(path)
        self._layout = layout
        self._clock = clock
        self._connection: apsw.Connection | None = None

    async def open(self) -> None:
        self._check_place()
        try:
            check_log(real(self._path), self._layout.format.application_id)
            self._connection = connect_viewer(self._path)
            is_begun = self._layout.format.is_begun(self._connection, self._path)
        except FAILED as exc:
            raise self._failed(exc) from exc
        except BaseException:
            await self.close()
            raise
        if not is_begun:
            await self.close()
            raise StoreError(f"{self._path}: is empty, and not a store yet")

    def _check_place(self) -> None:
        if not self._path.exists():
            raise StoreError(f"{self._path}: there is no such file")
        if not self._path.is_file():
            raise StoreError(f"{self._path}: is not a file")
        if not os.access(self._path, os.R_OK):
            raise StoreError(f"{self._path}: permission denied")

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        del known, lag
        sql, connection = self._layout.tables(kind).sql, self._opened()
        try:
            if kind not in self._layout.kinds(connection):
                return {}
            rows = {id_: connection.execute(sql.point, (None, id_)).get for id_ in ids}
        except FAILED as exc:
            raise self._failed(exc) from exc
        return {id_: record_of(row, None) for id_, row in rows.items() if row is not None}

    async def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[Entry]:
        try:
            return list_entries(
                self._opened(),
                self._layout,
                kind=kind,
                search=search,
                after=after,
                limit=checked_limit(limit),
            )
        except FAILED as exc:
            raise self._failed(exc) from exc

    async def stats(self) -> StoreStats:
        try:
            return count_slice(self._opened(), self._layout, None, now=self._clock(), size=-1)[0]
        except FAILED as exc:
            raise self._failed(exc) from exc

    def _failed(self, exc: Exception) -> StoreError:
        return explained(self._path, exc)

    def _opened(self) -> apsw.Connection:
        if self._connection is None:
            raise NotOpen("this view is closed")
        return self._connection


def list_slice(
    connection: apsw.Connection,
    kind: steps.KindTables,
    start: str,
    *,
    search: str,
    limit: int,
    size: int,
) -> tuple[list[Entry], str | None]:
    """Of the next `size` ids: those that are listed, and where to go on."""
    sql = kind.sql
    if not kind.are_made(connection):  # the file was set aside since the kinds were listed
        return [], None
    end = connection.execute(sql.stretch, (start, size)).get
    if end is None:
        return [], None
    rows: list[Row] = connection.execute(sql.listed, (start, end, search, limit)).fetchall()
    found = [Entry(kind.kind, row[12], record_of(row[:12], row[0]), row[13]) for row in rows]
    return found, following(end)


def list_entries(
    connection: apsw.Connection,
    layout: steps.Layout,
    *,
    kind: str | None,
    search: str,
    after: After,
    limit: int,
) -> list[Entry]:
    """All at once, for who has nothing else to do meanwhile."""
    found: list[Entry] = []
    for each, start in listed_kinds(layout.kinds(connection), kind, after):
        tables, at = layout.tables(each), start
        while at is not None and (left := limit - len(found)) > 0:
            some, at = list_slice(connection, tables, at, search=search, limit=left, size=WALK)
            found += some
    return found


def listed_kinds(
    names: Iterable[str], kind: str | None, after: After
) -> list[tuple[str, str | None]]:
    """Each kind that a listing goes through, and the first id of it that may be listed."""
    start = ("", "") if after is None else (after[0], following(after[1]))
    return [
        (each, start[1] if each == start[0] else "")
        for each in sorted(names)
        if kind in {None, each} and each >= start[0]
    ]


def following(id_: str) -> str:
    """The first id that could stand behind it."""
    return f"{id_}\0"


def count_slice(
    connection: apsw.Connection, layout: steps.Layout, after: After, *, now: float, size: int
) -> tuple[StoreStats, After]:
    """Copies and live leases among the next `size` ids, and where to go on; -1 is all of them."""
    copies, leases, end = 0, 0, None
    for kind, start in listed_kinds(layout.kinds(connection), None, after):
        sql = layout.tables(kind).sql.count
        some, live, ids, last = connection.execute(sql, (steps.at_most(now), start, size)).get
        copies, leases, size = copies + some, leases + live, size - ids
        if size == 0:
            end = kind, last
            break
    return StoreStats(copies, leases, bytes_of(connection)), end
