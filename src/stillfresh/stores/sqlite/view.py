"""A store's file, looked into and left as it is (S4, G10): for those who only want to see.

Never makes a file, never begins an empty one, never sets a damaged one aside, and takes no lock
that a writer would wait for.
"""

import os
import time
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import apsw

from stillfresh.clock import Clock
from stillfresh.errors import NotOpen, StoreError
from stillfresh.stores.contract import Entry, Generations, Record, StoreStats
from stillfresh.stores.listing import checked_limit
from stillfresh.stores.sqlite import steps
from stillfresh.stores.sqlite.connection import (
    FAILED,
    check_log,
    connect_viewer,
    explained,
)
from stillfresh.stores.sqlite.files import real
from stillfresh.stores.sqlite.schema import record_of


class SqliteView:
    """Reads on the caller's thread; a file that was damaged is an error, not an empty store."""

    reads_inline = outlives_loops = needs_eviction = False

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
            return steps.list_entries(
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
            return steps.count_slice(
                self._opened(), self._layout, None, now=self._clock(), size=-1
            )[0]
        except FAILED as exc:
            raise self._failed(exc) from exc

    def _failed(self, exc: Exception) -> StoreError:
        return explained(self._path, exc)

    def _opened(self) -> apsw.Connection:
        if self._connection is None:
            raise NotOpen("this view is closed")
        return self._connection
