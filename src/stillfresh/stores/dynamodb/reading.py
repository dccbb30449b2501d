"""The read path: the row, the lease's row only where it matters, the body only if unknown (I7)."""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from stillfresh.clock import Clock
from stillfresh.stores.bodies import Body, Opaque, S3Bodies, Shape
from stillfresh.stores.contract import UNREAD, Record
from stillfresh.stores.dynamodb.rows import Names, Row, lock_of, merged, row_of
from stillfresh.stores.dynamodb.schema import LOCK, META
from stillfresh.stores.dynamodb.table import Table
from stillfresh.stores.dynamodb.workers import each
from stillfresh.ttl_cache import TtlCache

__all__ = ["Reader"]

REMEMBERED: Final = 10_000
"""Rows of which this process knows that they were just leased or changed."""
LEASED_FOR: Final = 120
CHANGED_FOR: Final = 20
"""Seconds; an eventually consistent read is behind by less, as a rule by one."""
NOTHING: Final = Record()
OPAQUE: Final = Opaque()


class Reader:
    """Reads records; remembers for a while which rows it has to look at more closely."""

    def __init__(
        self,
        table: Table,
        bodies: S3Bodies,
        names: Names,
        shapes: Mapping[str, Shape],
        clock: Clock,
    ) -> None:
        self._table = table
        self._bodies = bodies
        self._names = names
        self._shapes = shapes
        self._clock = clock
        self._leased: TtlCache[str, bool] = TtlCache(LEASED_FOR, max_entries=REMEMBERED)
        self._changed: TtlCache[str, bool] = TtlCache(CHANGED_FOR, max_entries=REMEMBERED)

    def note_lease(self, pk: str) -> None:
        """Somebody holds a lease here: a fresh copy does not hide it from who waits for it."""
        self._leased.insert(pk, True)

    def forget_lease(self, pk: str) -> None:
        self._leased.remove(pk)

    def note_change(self, pk: str) -> None:
        """What this process has changed it reads consistently, whatever lag it allows."""
        self._changed.insert(pk, True)

    async def read(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str], *, lagging: bool = False
    ) -> dict[str, Record]:
        pks = {id_: self._names.pk(kind, id_) for id_ in ids}
        consistent = not lagging or any(self._changed.get(pk) for pk in pks.values())
        rows, records = await self._records(list(pks.values()), consistent=consistent)

        async def whole(id_: str) -> Record:
            row, record = rows.get(pks[id_]), records[pks[id_]]
            if row is None or row.copy is None or row.generation == known.get(id_):
                return record
            return await self.with_body(kind, pks[id_], row, record)

        found = await each(pks, whole)
        return {id_: record for id_, record in found.items() if record != NOTHING}

    async def _records(
        self, pks: Sequence[str], *, consistent: bool
    ) -> tuple[dict[str, Row], dict[str, Record]]:
        """One GetItem for a fresh copy; the lease is looked at where it could matter."""
        now = self._clock()
        metas = await self._table.get_many([(pk, META) for pk in pks], consistent=consistent)
        rows = {pk: row_of(item, now) for (pk, _), item in metas.items()}
        closer = [
            (pk, LOCK)
            for pk in pks
            if pk not in rows or not rows[pk].is_fresh(now) or self._leased.get(pk)
        ]
        locks = await self._table.get_many(closer, consistent=consistent)
        found = {pk: lock_of(item) for (pk, _), item in locks.items()}
        return rows, {pk: merged(rows.get(pk), found.get(pk)) for pk in pks}

    async def row(self, pk: str) -> Row | None:
        """As it is now, consistently."""
        item = await self._table.get(pk, META)
        return None if item is None else row_of(item, self._clock())

    async def with_body(self, kind: str, pk: str, row: Row, record: Record) -> Record:
        """I8: a row whose body is missing is a miss, unless the row was replaced meanwhile."""
        value = await self._value(kind, row)
        if value is UNREAD:
            fresh = await self.row(pk)
            if fresh is None or fresh.generation == row.generation:
                return replace(record, copy=None)
            row, value = fresh, await self._value(kind, fresh)
        if row.copy is None or value is UNREAD:
            return replace(record, copy=None)
        return replace(record, copy=replace(row.copy, value=value))

    async def _value(self, kind: str, row: Row) -> object:
        """None: absent upstream. UNREAD: nothing lies where the row points."""
        if row.copy is None or row.meta is None or row.copy.value is None:
            return None
        if self._names.is_anothers(row.meta.s3_key, row.meta.pk):
            return UNREAD
        body = await self._bodies.get(row.meta.s3_key)
        if body is None:
            return UNREAD
        open_body = Body(body.data, body.content_type, row.meta.etag, row.extra)
        return self.shape(kind).inside(open_body)

    def shape(self, kind: str) -> Shape:
        return self._shapes.get(kind, OPAQUE)
