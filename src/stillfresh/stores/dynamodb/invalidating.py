"""One id, or all of a tag: invalidated, deleted; asked even of a service that is away (I3, I6)."""

from dataclasses import dataclass

from stillfresh.clock import Clock
from stillfresh.stores.bodies import Trash
from stillfresh.stores.contract import Mark
from stillfresh.stores.dynamodb.leases import Leases
from stillfresh.stores.dynamodb.names import Names
from stillfresh.stores.dynamodb.reading import Reader
from stillfresh.stores.dynamodb.rows import lock_of, row_of, tagged
from stillfresh.stores.dynamodb.schema import LOCK, META, text
from stillfresh.stores.dynamodb.table import Table
from stillfresh.stores.dynamodb.tags import Tags
from stillfresh.stores.dynamodb.workers import each


@dataclass(frozen=True, slots=True)
class Invalidator:
    """Its table is an urgent one: nobody else would do these steps later."""

    table: Table
    leases: Leases
    trash: Trash
    tags: Tags
    reader: Reader
    names: Names
    clock: Clock

    async def invalidate(self, pk: str, mark: Mark) -> bool:
        """I3: first the lease, then the copy; whether there was either."""
        self.reader.note_change(pk)
        was_leased = await self.leases.void(pk, now=self.clock())
        is_marked = await self.leases.mark(pk, mark)
        self.reader.note_change(pk)
        return was_leased or is_marked

    async def invalidate_tag(self, tag: str, mark: Mark) -> list[tuple[str, str]]:
        rows = {row["sk"]["S"]: row for row in await self.tags.rows(tag)}
        found = await each(rows, lambda pk: self.invalidate(pk, mark))
        reached = [row for pk, row in rows.items() if found[pk]]
        gone = [row for pk, row in rows.items() if not found[pk]]
        await each(range(len(gone)), lambda number: self.tags.drop(gone[number]))
        named = [(text(row, "kind"), text(row, "id") or "") for row in reached]
        return sorted((kind, id_) for kind, id_ in named if kind is not None)

    async def delete(self, pk: str) -> None:
        lock = await self.table.delete(pk, LOCK)
        meta = await self.table.delete(pk, META)
        self.reader.note_change(pk)
        row = row_of(meta, self.clock()) if meta is not None else None
        await self.tags.remove(tagged(row, lock_of(lock) if lock is not None else None), pk)
        if row is not None and row.meta is not None:
            self.trash.add(self.names.ours(row.meta.s3_key, pk))
