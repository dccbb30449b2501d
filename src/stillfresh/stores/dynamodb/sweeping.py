"""Eviction and counting: the two that read the whole table (S1, I5, I7).

DynamoDB's TTL sweeps rows by itself, for nothing, and knows nothing of bodies in S3. An eviction
drops what is gone with its body, and bodies that no row points to: of rows that TTL swept, and
of processes that died between writing a body and publishing it.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

from stillfresh.clock import Clock
from stillfresh.freshness import is_over
from stillfresh.stores.aws import Meter
from stillfresh.stores.bodies import S3Bodies
from stillfresh.stores.contract import StoreStats
from stillfresh.stores.dynamodb.rows import Lock, Names, Row, lock_of, merged, row_of
from stillfresh.stores.dynamodb.schema import LOCK, META, Item, text
from stillfresh.stores.dynamodb.table import Table
from stillfresh.stores.dynamodb.tags import Tags
from stillfresh.stores.dynamodb.workers import each

__all__ = ["Sweeper"]

ORPHAN_AFTER: Final = 3600.0
"""Seconds; a body is written before the row that points to it."""
MOST_PAGES: Final = 4
"""Of a megabyte each, that counting reads: half a thousand read units; then it estimates."""


class Sweeper:
    def __init__(
        self, table: Table, bodies: S3Bodies, tags: Tags, names: Names, clock: Clock
    ) -> None:
        self._table = table
        self._bodies = bodies
        self._tags = tags
        self._names = names
        self._clock = clock

    async def evict(self, before: float) -> int:
        dropped = 0
        async for entries in self._entries():
            gone = {_pk(rows[0]): rows for rows in entries if self._is_gone(rows, before)}
            bodies = (await each(gone, partial(self._drop, gone))).values()
            went = [keys for keys in bodies if keys is not None]
            await self._bodies.delete([key for keys in went for key in keys])
            dropped += len(went)
        await self._drop_orphans()
        return dropped

    async def _entries(self) -> AsyncIterator[list[list[Item]]]:
        """The rows of each entry together; an entry may be cut by the end of a page."""
        kept: list[Item] = []
        async for page in self._table.scan(self._names.pk_prefix):
            rows = [row for row in page["Items"] if row["sk"]["S"] in {META, LOCK}]
            groups = [list(group) for _, group in groupby([*kept, *rows], _pk)]
            kept = groups.pop() if groups else []
            yield groups
        yield [kept] if kept else []

    def _is_gone(self, rows: Sequence[Item], before: float) -> bool:
        """Nothing that anybody could be served, and nothing under way; a row of ours."""
        row, lock = self._parsed(rows)
        ends = [0.0]
        if any(each_row["sk"]["S"] == META and "generation" not in each_row for each_row in rows):
            return False
        if row is not None and row.copy is not None:
            ends.append(row.copy.fetched_at + row.copy.policy.lasts)
        elif (failure := merged(row, lock).failure) is not None:
            ends.append(failure.retry_at)
        if lock is not None and lock.held_until is not None:
            ends.append(lock.held_until)
        return max(ends) < before

    def _parsed(self, rows: Sequence[Item]) -> tuple[Row | None, Lock | None]:
        by_role = {row["sk"]["S"]: row for row in rows}
        row, lock = by_role.get(META), by_role.get(LOCK)
        now = self._clock()
        return (row_of(row, now) if row else None), (lock_of(lock) if lock else None)

    async def _drop(self, gone: Mapping[str, Sequence[Item]], pk: str) -> list[str] | None:
        """The body to delete, if there is one; None if the rows are not as they were read."""
        row, lock = self._parsed(gone[pk])
        went = [await self._drop_row(each_row) for each_row in gone[pk]]
        if not all(went):
            return None
        tags = (row.tags if row else frozenset()) | (lock.tags if lock else frozenset())
        await self._tags.remove(tags, pk)
        key = row.meta.s3_key if row is not None and row.meta is not None else ""
        return [key] if self._names.is_ours(key) else []

    async def _drop_row(self, row: Item) -> bool:
        name = "lease_token" if row["sk"]["S"] == LOCK else "s3_key"
        value = text(row, name)
        unchanged = {} if value is None else {name: value}
        return await self._table.delete_if(_pk(row), row["sk"]["S"], **unchanged) is not None

    async def _drop_orphans(self) -> None:
        before = self._clock() - ORPHAN_AFTER
        async for keys in self._bodies.older(self._names.bodies, before):
            pointers = {key: (self._names.pk_of_body(key), META) for key in keys}
            rows = await self._table.get_many(list(set(pointers.values())))
            orphans = [
                key for key, at in pointers.items() if text(rows.get(at, {}), "s3_key") != key
            ]
            await self._bodies.delete(orphans)

    async def stats(self, meter: Meter) -> StoreStats:
        """Exact up to some megabytes of rows; beyond, by the table's own count (hours old)."""
        copies = leases = size = scanned = pages = 0
        is_whole = True
        async for page in self._table.scan(self._names.pk_prefix):
            counted = self._counted(page["Items"])
            copies, leases, size = copies + counted[0], leases + counted[1], size + counted[2]
            scanned, pages = scanned + page["ScannedCount"], pages + 1
            if pages == MOST_PAGES:
                is_whole = "LastEvaluatedKey" not in page
                break
        share = 1.0 if is_whole else await self._share(scanned)
        copies, leases, size = (round(count / share) for count in (copies, leases, size))
        return StoreStats(copies, leases, size, meter.costs())

    def _counted(self, items: Sequence[Item]) -> tuple[int, int, int]:
        now = self._clock()
        rows = [row_of(item, now) for item in items if item["sk"]["S"] == META]
        locks = [lock_of(item) for item in items if item["sk"]["S"] == LOCK]
        held = [lock for lock in locks if lock.held_until and not is_over(lock.held_until, now)]
        copies = [row for row in rows if row.copy is not None]
        return len(copies), len(held), sum(row.size for row in copies)

    async def _share(self, scanned: int) -> float:
        described: dict[str, Any] = await self._table.describe()
        return scanned / max(1, scanned, int(described.get("ItemCount", 0)))


def _pk(item: Item) -> str:
    pk: str = item["pk"]["S"]
    return pk
