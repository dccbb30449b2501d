"""Walks over the whole DynamoDB table, entry by entry: listing, counting, evicting.

The keys are hashes, so only rows that contain their kind and id can be listed by them: all rows of
stillfresh, unless the id is very long. Pages of other services are listed by their raw key, or by
the name of the row. A page costs a read unit for every 4 KB of its rows: reads are consistent, to
see leases of a moment ago, because `invalidate_all` lists to invalidate. A search reads until it
has found enough, at worst the whole table.

DynamoDB's TTL deletes rows by itself, free of charge, but not their bodies in S3. An eviction drops
GONE entries with their bodies, and bodies that no row points to: those of rows that TTL deleted,
and of processes that died between writing a body and publishing it. An entry that was written
within the last hour leaves a trace, which a later eviction or TTL drops.
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
    last_group: list[Item] = []  # its other row may be on the next page
    async for page in table.scan(after=after, rows=rows, consistent=consistent):
        entry_rows = [row for row in page["Items"] if row["sk"]["S"] in {META, LOCK}]
        by_pk = groupby([*last_group, *entry_rows], lambda row: row["pk"])
        groups = [list(group) for _, group in by_pk]
        last_group = groups.pop() if groups else []
        yield [{row["sk"]["S"]: row for row in group} for group in groups]
    yield [{row["sk"]["S"]: row for row in last_group}] if last_group else []


@dataclass(frozen=True, slots=True)
class TableScan:
    """Lists, counts and evicts the entries of one store in the table."""

    table: Leases
    bodies: S3Bodies
    clock: Clock

    async def entries(
        self, kind: str | None, search: str, after: After, limit: int
    ) -> list[StoredEntry]:
        start = None if after is None else key_of(self.table.names.pk(*after), META)
        rows = None if search else max(FEWEST_ROWS, 2 * limit)
        entries: list[StoredEntry] = []
        async for page in entries_of(self.table, after=start, rows=rows, consistent=True):
            for entry_rows in page:
                entry = self._entry(entry_rows)
                if entry is not None and is_listed((entry.kind, entry.id), kind, search, None):
                    entries.append(entry)
            if len(entries) >= limit:
                return entries[:limit]
        return entries

    def _entry(self, rows: Rows) -> StoredEntry | None:
        names = {self.table.names.kind_and_id(row) for row in rows.values()} - {None}
        name = names.pop() if names else self._of_another(rows)
        if name is None:
            return None
        row, lock = self._parse(rows)
        has_value = row.copy is not None and row.copy.value is not None
        return StoredEntry(*name, merged(row, lock), row.size if has_value else None)

    def _of_another(self, rows: Rows) -> tuple[str, str] | None:
        """Kind and id of a page, or of a first render, of another service."""
        meta = rows.get(META, {})
        if "generation" in meta or (not meta and is_ended(rows[LOCK])):
            return None
        pk = next(iter(rows.values()))["pk"]["S"]
        return self.table.names.of_another(pk, has_page=is_copy(meta))

    def _parse(self, rows: Rows) -> tuple[Row, Lock]:
        return row_of(rows.get(META, {}), self.clock()), lock_of(rows.get(LOCK, {}))

    async def evict(self, before: float) -> int:
        dropped = 0
        async for entries in entries_of(self.table):
            dropped += await self._drop_gone(entries, before)
        await self._drop_orphans()
        return dropped

    async def _drop_gone(self, entries: list[Rows], before: float) -> int:
        """Drop entries that are gone, with their bodies, and old traces; how many entries."""
        traces = [rows[LOCK] for rows in entries if META not in rows and is_trace(rows[LOCK])]
        old_traces = [trace for trace in traces if (number(trace, "ttl") or 0.0) < before]
        await each(range(len(old_traces)), lambda at: self._drop_trace(old_traces[at]))
        gone_entries = [rows for rows in entries if self._is_gone(rows, before)]
        results = await each(
            range(len(gone_entries)), lambda at: self._drop(gone_entries[at], before)
        )
        body_keys = [keys for keys in results.values() if keys is not None]
        await self.bodies.delete([key for keys in body_keys for key in keys])
        return len(body_keys)

    async def _drop_trace(self, trace: Item) -> None:
        with suppress(ConditionFailed):
            await self.table.delete(trace["pk"]["S"], LOCK, *as_read(trace, ["lease_token"]))

    def _is_gone(self, rows: Rows, before: float) -> bool:
        """True if nothing can be served from it, no load runs, and the row is ours."""
        if META not in rows and is_trace(rows[LOCK]):
            return False  # there is no entry
        is_ours = META not in rows or "generation" in rows[META]
        return is_ours and is_gone(merged(*self._parse(rows)), before)

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
        row, old_lock = self._parse(rows)
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
        """Delete bodies to which no row points."""
        names = self.table.names
        before = self.clock() - ORPHAN_AFTER
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
            scanned += page["ScannedCount"]
            pages += 1
            if pages == MOST_PAGES and "LastEvaluatedKey" in page:
                share = await self._share(scanned)
                break
        return StoreStats(
            round(copies / share), round(leases / share), round(size / share), meter.costs()
        )

    async def _share(self, scanned: int) -> float:
        described: dict[str, Any] = await self.table.describe()
        return scanned / max(1, scanned, int(described.get("ItemCount", 0)))
