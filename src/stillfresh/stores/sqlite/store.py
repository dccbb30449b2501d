"""The SQLite store: reads inline on the caller's thread, writes through one writer (S1, S2, S4).

It maps the contract to steps and decides nothing. No work is done before `open`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from secrets import token_hex
from typing import Final

import apsw

from stillfresh.clock import Clock
from stillfresh.stores.contract import Ask, Copy, Entry, Failure, Grant, Lease, Record, StoreStats
from stillfresh.stores.listing import checked_limit
from stillfresh.stores.sqlite import steps
from stillfresh.stores.sqlite.connection import FAILED, PATIENCE
from stillfresh.stores.sqlite.file import SqliteFile
from stillfresh.stores.sqlite.format import STORE
from stillfresh.stores.sqlite.schema import Row, record_of, select_many, statements

SLICE: Final = 500
"""Ids that one job of an eviction looks at, so that others' writes pass between them."""
STRETCH: Final = 2_000
"""Ids that one job of a listing looks at."""
CHUNK: Final = 128
"""Ids in one statement; more are read in one transaction."""


class SqliteStore(SqliteFile):
    """Any number of processes may use one file; one store belongs to one event loop at a time."""

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        clock: Clock = time.time,
        new_token: Callable[[], str] = lambda: token_hex(16),
        patience: float = PATIENCE,
    ) -> None:
        """`patience`: seconds that a step waits for another process that is writing."""
        super().__init__(path, STORE, patience)
        self._clock = clock
        self._new_token = new_token

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        """In one thread at a time; a file that cannot be trusted any more holds nothing."""
        if time.monotonic() > self._look_at:
            self._look()
        if len(ids) != 1:
            return self._read_many(kind, ids, known or {})
        id_ = ids[0]
        generation = known.get(id_) if known else None
        try:
            row = self._execute(statements(kind).point, (generation, id_)).get
        except FAILED as exc:
            self._cannot_read(exc)
            return {}
        return {} if row is None else {id_: record_of(row, generation)}

    async def read(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        return self.read_now(kind, ids, known)

    def _read_many(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str]
    ) -> dict[str, Record]:
        asked = [(id_, known.get(id_)) for id_ in dict.fromkeys(ids)]
        try:
            rows = self._selected(kind, asked)
        except FAILED as exc:
            self._cannot_read(exc)
            return {}
        return {row[12]: record_of(row[:12], row[13]) for row in rows}

    def _selected(self, kind: str, asked: Sequence[tuple[str, str | None]]) -> list[Row]:
        """One statement, or one transaction of several: all rows are of one moment."""
        if len(asked) <= CHUNK:
            return self._select(kind, asked)
        chunks = [asked[start : start + CHUNK] for start in range(0, len(asked), CHUNK)]
        self._execute("BEGIN", ())
        try:
            return [row for chunk in chunks for row in self._select(kind, chunk)]
        finally:
            # Corruption has ended it already.
            if self._reader is not None and self._reader.in_transaction:
                self._execute("ROLLBACK", ())

    def _select(self, kind: str, asked: Sequence[tuple[str, str | None]]) -> list[Row]:
        """Filled up to a power of two with pairs that match nothing: few texts to prepare."""
        size = 1 << max(len(asked) - 1, 0).bit_length()
        pairs = [part for pair in asked for part in pair]
        pairs += [None] * (2 * (size - len(asked)))
        return self._execute(select_many(kind, size), pairs).fetchall()

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        def job(connection: apsw.Connection) -> dict[str, Grant]:
            return steps.acquire(
                connection, kind, asks, lease_for, now=self._clock(), new_token=self._new_token
            )

        return await self._opened().run(job, urgent=False)

    async def publish(self, kind: str, copies: Mapping[str, tuple[Lease, Copy]]) -> set[str]:
        return await self._opened().run(
            lambda connection: steps.publish(connection, kind, copies, now=self._clock()),
            urgent=False,
        )

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        return await self._opened().run(
            lambda connection: steps.renew(connection, kind, leases, lease_for, now=self._clock()),
            urgent=False,
        )

    async def release(
        self, kind: str, leases: Sequence[Lease], failures: Mapping[str, Failure] | None = None
    ) -> None:
        await self._opened().run(
            lambda connection: steps.release(connection, kind, leases, failures or {}),
            urgent=False,
        )

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        await self._opened().run(
            lambda connection: steps.invalidate(connection, kind, ids, soft=soft)
        )

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        return await self._opened().run(
            lambda connection: steps.invalidate_tag(connection, tag, soft=soft)
        )

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        await self._opened().run(lambda connection: steps.delete(connection, kind, ids))

    async def evict(self, before: float) -> int:
        """In slices, each a job of its own."""
        dropped = 0
        for kind in await self._opened().run(steps.kinds, writes=False):
            start: str | None = ""
            while start is not None:
                job = partial(steps.evict_slice, kind=kind, start=start, before=before, size=SLICE)
                number, start = await self._opened().run(job, urgent=False)
                dropped += number
        return dropped

    async def stats(self) -> StoreStats:
        return await self._opened().run(
            lambda connection: steps.count(connection, now=self._clock()), writes=False
        )

    async def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[Entry]:
        """Along the tables' own order, in slices."""
        checked_limit(limit)
        found: list[Entry] = []
        kinds = await self._opened().run(steps.kinds, writes=False)
        for each, start in steps.listed_kinds(kinds, kind, after):
            found += await self._listed(each, search, start, limit - len(found))
        return found

    async def _listed(self, kind: str, search: str, start: str | None, limit: int) -> list[Entry]:
        found: list[Entry] = []
        while start is not None and (left := limit - len(found)) > 0:
            job = partial(
                steps.list_slice, kind=kind, start=start, search=search, limit=left, size=STRETCH
            )
            some, start = await self._opened().run(job, writes=False)
            found += some
        return found
