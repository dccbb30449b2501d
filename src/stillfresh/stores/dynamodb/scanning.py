"""The whole table, entry by entry: listed, counted, evicted (S1, I5, I7).

The keys are hashes, so only rows that contain their kind and id can be listed by them: all rows of
stillfresh, unless the id is very long. Pages of other services are listed by their raw key, or by
the name of the row. A page costs a read unit for every 4 KB of its rows: reads
are consistent, to see leases of a moment ago (E6: `invalidate_all` lists to invalidate). A search
reads until it has found enough, at worst the whole table.

DynamoDB's TTL deletes rows by itself, free of charge, but not their bodies in S3. An eviction drops
GONE entries with their bodies, and bodies that no row points to: those of rows that TTL deleted,
and of processes that died between writing a body and publishing it. An entry that was written
within the last hour leaves a trace (S8), which a later eviction or TTL drops.
"""

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from typing import Any, Final, TypeAlias

from stillfresh.clock import Clock
from stillfresh.freshness import is_over
from stillfresh.stores.aws import ConditionFailed
from stillfresh.stores.bodies import S3Bodies
from stillfresh.stores.contract import After, StoredEntry, StoreStats
from stillfresh.stores.dynamodb.leases import Leases
from stillfresh.stores.dynamodb.rows import (
    META_FENCE,
    Lock,
    Row,
    is_copy,
    is_ended,
    is_trace,
    lock_of,
    merged,
    row_of,
    trace_item,
)
from stillfresh.stores.dynamodb.schema import (
    LOCK,
    LOCK_BUFFER,
    META,
    Item,
    key_of,
    number,
    text,
)
from stillfresh.stores.dynamodb.table import as_read, deletion, each, put_of, values
from stillfresh.stores.meter import CostMeter
from stillfresh.stores.rules import is_gone, is_listed

Rows: TypeAlias = dict[str, Item]
"""The rows of one entry, by their `sk`: META, LOCK, or both."""

FEWEST_ROWS: Final = 200
"""Rows in one request; an entry has one or two, with rows of tags between them."""
ORPHAN_AFTER: Final = 3600.0
"""Seconds; a body is written before the row that points to it."""
ENDED: Final = "NOT lease_expires_at >= :before"
"""Also without an end: such a row is not a lease."""
MOST_PAGES: Final = 4
"""Pages of a megabyte that a count reads (about 500 read units); beyond, it estimates."""


async def entries_of(
    table: Leases, *, after: Item | None = None, rows: int | None = None, consistent: bool = False
) -> AsyncIterator[list[Rows]]:
    """The rows of each entry together; an entry may be cut by the end of a page."""
    kept: list[Item] = []
    async for page in table.scan(after=after, rows=rows, consistent=consistent):
        found = [row for row in page["Items"] if row["sk"]["S"] in {META, LOCK}]
        groups = [list(group) for _, group in groupby([*kept, *found], lambda row: row["pk"])]
        kept = groups.pop() if groups else []
        yield [{row["sk"]["S"]: row for row in group} for group in groups]
    yield [{row["sk"]["S"]: row for row in kept}] if kept else []


@dataclass(frozen=True, slots=True)
class TableScan:
    table: Leases
    bodies: S3Bodies
    clock: Clock

    async def entries(
        self, kind: str | None, search: str, after: After, limit: int
    ) -> list[StoredEntry]:
        start = None if after is None else key_of(self.table.names.pk(*after), META)
        rows = None if search else max(FEWEST_ROWS, 2 * limit)
        found: list[StoredEntry] = []
        async for page in entries_of(self.table, after=start, rows=rows, consistent=True):
            listed = [entry for one in page if (entry := self._entry(one)) is not None]
            found += [it for it in listed if is_listed((it.kind, it.id), kind, search, None)]
            if len(found) >= limit:
                return found[:limit]
        return found

    def _entry(self, rows: Rows) -> StoredEntry | None:
        names = {self.table.names.named(row) for row in rows.values()} - {None}
        if (name := names.pop() if names else self._of_another(rows)) is None:
            return None
        row, lock = self._parsed(rows)
        has_value = row.copy is not None and row.copy.value is not None
        return StoredEntry(*name, merged(row, lock), row.size if has_value else None)

    def _of_another(self, rows: Rows) -> tuple[str, str] | None:
        """I31: kind and id of a page, or of a first render, of another service."""
        meta = rows.get(META, {})
        if "generation" in meta or (not meta and is_ended(rows[LOCK])):
            return None
        pk = next(iter(rows.values()))["pk"]["S"]
        return self.table.names.of_another(pk, has_page=is_copy(meta))

    def _parsed(self, rows: Rows) -> tuple[Row, Lock]:
        return row_of(rows.get(META, {}), self.clock()), lock_of(rows.get(LOCK, {}))

    async def evict(self, before: float) -> int:
        dropped = 0
        async for entries in entries_of(self.table):
            dropped += await self._drop_some(entries, before)
        await self._drop_orphans()
        return dropped

    async def _drop_some(self, entries: list[Rows], before: float) -> int:
        traces = [rows[LOCK] for rows in entries if META not in rows and is_trace(rows[LOCK])]
        over = [trace for trace in traces if (number(trace, "ttl") or 0.0) < before]
        await each(range(len(over)), lambda at: self._drop_trace(over[at]))
        gone = [rows for rows in entries if self._is_gone(rows, before)]
        found = await each(range(len(gone)), lambda at: self._drop(gone[at], before))
        went = [keys for keys in found.values() if keys is not None]
        await self.bodies.delete([key for keys in went for key in keys])
        return len(went)

    async def _drop_trace(self, trace: Item) -> None:
        with suppress(ConditionFailed):
            await self.table.delete(trace["pk"]["S"], LOCK, *as_read(trace, ["lease_token"]))

    def _is_gone(self, rows: Rows, before: float) -> bool:
        """True if nothing can be served from it, no load runs, and the row is ours."""
        if META not in rows and is_trace(rows[LOCK]):
            return False  # there is no entry
        is_ours = META not in rows or "generation" in rows[META]
        return is_ours and is_gone(merged(*self._parsed(rows)), before)

    async def _drop(self, rows: Rows, before: float) -> list[str] | None:
        """Delete both rows in one step; return the body to delete, or None if the rows changed.

        A lease that was taken or renewed since keeps both.
        """
        pk: str = next(iter(rows.values()))["pk"]["S"]
        meta = rows.get(META, {})
        lock = rows.get(LOCK, {})
        ended, given = as_read(lock, ["lease_token"])
        if lock:
            ended = f"{ended} AND {ENDED}"
            given |= values(before=ceil(before))
        if self._is_young(meta, lock):
            end = put_of(trace_item(pk, self.clock()), ended, given)
        else:
            end = deletion(pk, LOCK, ended, given)
        row, old_lock = self._parsed(rows)
        try:
            await self.table.transact(deletion(pk, META, *as_read(meta, META_FENCE)), end)
        except ConditionFailed:
            return None
        await self.table.remove_tags(pk, row, old_lock)
        return [] if row.s3_key is None else self.table.names.ours(row.s3_key, pk)

    def _is_young(self, meta: Item, lock: Item) -> bool:
        """True if a put that saw neither row may still be on its way."""
        written_at = number(meta, "generated_at") or 0.0
        ended_at = (number(lock, "ttl") or 0.0) - LOCK_BUFFER
        return max(written_at, ended_at) > self.clock() - LOCK_BUFFER

    async def _drop_orphans(self) -> None:
        names, before = self.table.names, self.clock() - ORPHAN_AFTER
        async for keys in self.bodies.older(names.bodies, before):
            pks = {key: pk for key in keys if (pk := names.pk_of_body(key)) is not None}
            rows = await self.table.get_many([(pk, META) for pk in set(pks.values())])
            used = {names.object_key(text(row, "s3_key") or "") for row in rows.values()}
            await self.bodies.delete([key for key in pks if key not in used])

    async def stats(self, meter: CostMeter) -> StoreStats:
        """Exact up to some megabytes of rows; beyond that by the table's own count (hours old)."""
        now = self.clock()
        copies = leases = size = scanned = pages = 0
        share = 1.0
        async for page in self.table.scan():
            items = page["Items"]
            rows = [row_of(item, now) for item in items if item["sk"]["S"] == META]
            ends = [lock_of(item).held_until for item in items if item["sk"]["S"] == LOCK]
            copies += sum(row.copy is not None for row in rows)
            leases += sum(end is not None and not is_over(end, now) for end in ends)
            size += sum(row.size for row in rows if row.copy is not None)
            scanned, pages = scanned + page["ScannedCount"], pages + 1
            if pages == MOST_PAGES and "LastEvaluatedKey" in page:
                share = await self._share(scanned)
                break
        copies, leases, size = (round(count / share) for count in (copies, leases, size))
        return StoreStats(copies, leases, size, meter.costs())

    async def _share(self, scanned: int) -> float:
        described: dict[str, Any] = await self.table.describe()
        return scanned / max(1, scanned, int(described.get("ItemCount", 0)))
