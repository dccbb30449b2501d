"""The whole table, entry by entry: listed, counted, evicted (S1, I5, I7).

The keys are hashes: only rows that say whose they are can be listed, which stillfresh's own do,
unless the id is very long. A page costs what its rows do, half a read unit for every 4 KB; a
search reads on until enough was found, at worst the whole table.

DynamoDB's TTL sweeps rows by itself, for nothing, and knows nothing of bodies in S3. An eviction
drops what is gone with its body, and bodies that no row points to: of rows that TTL swept, and
of processes that died between writing a body and publishing it.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import ceil
from typing import Any, Final

from stillfresh.clock import Clock
from stillfresh.freshness import is_over
from stillfresh.stores.bodies import S3Bodies
from stillfresh.stores.contract import Entry, StoreStats, is_listed
from stillfresh.stores.dynamodb.leases import Tags
from stillfresh.stores.dynamodb.names import Names
from stillfresh.stores.dynamodb.rows import Lock, Row, lock_of, merged, row_of, tagged
from stillfresh.stores.dynamodb.schema import LOCK, META, Item, key_of, text
from stillfresh.stores.dynamodb.table import Table, each, values
from stillfresh.stores.meter import CostMeter

FEWEST_ROWS: Final = 200
"""In one request; an entry is one row or two, and rows of tags stand between."""
ORPHAN_AFTER: Final = 3600.0
"""Seconds; a body is written before the row that points to it."""
ENDED: Final = "NOT lease_expires_at >= :before"
"""Also where there is no end: such a row is no lease."""
MOST_PAGES: Final = 4
"""Of a megabyte each, that counting reads: half a thousand read units; then it estimates."""


async def entries_of(
    table: Table, prefix: str, *, after: Item | None = None, rows: int | None = None
) -> AsyncIterator[list[list[Item]]]:
    """The rows of each entry together; an entry may be cut by the end of a page."""
    kept: list[Item] = []
    async for page in table.scan(prefix, after=after, rows=rows):
        found = [row for row in page["Items"] if row["sk"]["S"] in {META, LOCK}]
        groups = [list(group) for _, group in groupby([*kept, *found], pk_of)]
        kept = groups.pop() if groups else []
        yield groups
    yield [kept] if kept else []


def parsed(rows: Sequence[Item], now: float) -> tuple[Row | None, Lock | None]:
    by_role = {row["sk"]["S"]: row for row in rows}
    row, lock = by_role.get(META), by_role.get(LOCK)
    return (row_of(row, now) if row else None), (lock_of(lock) if lock else None)


def pk_of(item: Item) -> str:
    pk: str = item["pk"]["S"]
    return pk


@dataclass(frozen=True, slots=True)
class TableScan:
    table: Table
    bodies: S3Bodies
    tags: Tags
    names: Names
    clock: Clock

    async def entries(
        self, kind: str | None, search: str, after: tuple[str, str] | None, limit: int
    ) -> list[Entry]:
        start = None if after is None else key_of(self.names.pk(*after), META)
        rows = None if search else max(FEWEST_ROWS, 2 * limit)
        found: list[Entry] = []
        async for page in entries_of(self.table, self.names.pk_prefix, after=start, rows=rows):
            listed = [entry for group in page if (entry := self._entry(group)) is not None]
            found += [
                each for each in listed if is_listed((each.kind, each.id), kind, search, None)
            ]
            if len(found) >= limit:
                return found[:limit]
        return found

    def _entry(self, rows: Sequence[Item]) -> Entry | None:
        names = {self.names.named(row) for row in rows} - {None}
        name = names.pop() if names else None
        if name is None:
            return None
        row, lock = parsed(rows, self.clock())
        size = row.size if row is not None and row.copy is not None else None
        is_absent = row is not None and row.copy is not None and row.copy.value is None
        return Entry(*name, merged(row, lock), None if is_absent else size)

    async def evict(self, before: float) -> int:
        dropped = 0
        async for entries in entries_of(self.table, self.names.pk_prefix):
            gone = {pk_of(rows[0]): rows for rows in entries if self._is_gone(rows, before)}
            bodies = (await each(gone, partial(self._drop, gone, before))).values()
            went = [keys for keys in bodies if keys is not None]
            await self.bodies.delete([key for keys in went for key in keys])
            dropped += len(went)
        await self._drop_orphans()
        return dropped

    def _is_gone(self, rows: Sequence[Item], before: float) -> bool:
        """Nothing that anybody could be served, and nothing under way; a row of ours."""
        row, lock = parsed(rows, self.clock())
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

    async def _drop(
        self, gone: Mapping[str, Sequence[Item]], before: float, pk: str
    ) -> list[str] | None:
        """The body to delete, if there is one; None if the rows are not as they were read."""
        row, lock = parsed(gone[pk], self.clock())
        if not await self.table.transact_if(*_drops(pk, gone[pk], before)):
            return None
        await self.tags.remove(tagged(row, lock), pk)
        if row is None or row.meta is None:
            return []
        return self.names.ours(row.meta.s3_key, pk)

    async def _drop_orphans(self) -> None:
        before = self.clock() - ORPHAN_AFTER
        async for keys in self.bodies.older(self.names.bodies, before):
            pointers = {key: (self.names.pk_of_body(key), META) for key in keys}
            rows = await self.table.get_many(list(set(pointers.values())))
            used = {
                self.names.object_key(pointer)
                for row in rows.values()
                if (pointer := text(row, "s3_key")) is not None
            }
            orphans = [key for key in keys if key not in used]
            await self.bodies.delete(orphans)

    async def stats(self, meter: CostMeter) -> StoreStats:
        """Exact up to some megabytes of rows; beyond, by the table's own count (hours old)."""
        copies = leases = size = scanned = pages = 0
        is_whole = True
        async for page in self.table.scan(self.names.pk_prefix):
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
        now = self.clock()
        rows = [row_of(item, now) for item in items if item["sk"]["S"] == META]
        locks = [lock_of(item) for item in items if item["sk"]["S"] == LOCK]
        held = [lock for lock in locks if lock.held_until and not is_over(lock.held_until, now)]
        copies = [row for row in rows if row.copy is not None]
        return len(copies), len(held), sum(row.size for row in copies)

    async def _share(self, scanned: int) -> float:
        described: dict[str, Any] = await self.table.describe()
        return scanned / max(1, scanned, int(described.get("ItemCount", 0)))


def _drops(pk: str, rows: Sequence[Item], before: float) -> list[tuple[str, dict[str, Any]]]:
    """Both rows in one step, as they were read: a lease taken or renewed since keeps both."""
    by_role = {row["sk"]["S"]: row for row in rows}
    meta = _as_read(by_role.get(META), "s3_key")
    lock = _as_read(by_role.get(LOCK), "lease_token")
    if LOCK in by_role:
        lock = f"{lock[0]} AND {ENDED}", lock[1] | values(before=ceil(before))
    return [_drop(pk, META, *meta), _drop(pk, LOCK, *lock)]


def _as_read(row: Item | None, name: str) -> tuple[str, Item]:
    """The condition that the row is the one that was read, or that there is still none."""
    if row is None:
        return "attribute_not_exists(pk)", {}
    if (value := text(row, name)) is None:
        return f"attribute_not_exists({name})", {}
    return f"{name} = :{name}", values(**{name: value})


def _drop(pk: str, role: str, condition: str, given: Item) -> tuple[str, dict[str, Any]]:
    about = {"ExpressionAttributeValues": given} if given else {}
    return "Delete", {"Key": key_of(pk, role), "ConditionExpression": condition, **about}
