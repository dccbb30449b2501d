"""The read path: the row, the lease's row only where it matters, the body only if unknown (I7)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from stillfresh.clock import Clock
from stillfresh.stores.bodies import Body, Opaque, S3Bodies, Shape
from stillfresh.stores.contract import UNREAD, Record
from stillfresh.stores.dynamodb.leases import Leases
from stillfresh.stores.dynamodb.rows import (
    ENDLESS,
    Lock,
    Row,
    believed,
    lock_of,
    merged,
    row_of,
    version_of,
)
from stillfresh.stores.dynamodb.schema import LOCK, META, Names
from stillfresh.stores.dynamodb.table import each
from stillfresh.ttl_cache import TtlCache

REMEMBERED: Final = 10_000
"""Rows of which this process knows that they were just leased or changed."""
LEASED_FOR: Final = 120
CHANGED_FOR: Final = 20
"""Seconds; an eventually consistent read is behind by less, as a rule by one."""
NOTHING: Final = Record()
OPAQUE: Final = Opaque()


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads records; remembers for a while which rows it has to look at more closely."""

    table: Leases
    bodies: S3Bodies
    shapes: Mapping[str, Shape]
    clock: Clock
    leased: TtlCache[str, bool] = field(
        default_factory=lambda: TtlCache(LEASED_FOR, max_entries=REMEMBERED), kw_only=True
    )
    """Somebody holds a lease here: a fresh copy does not hide it from who waits for it."""
    changed: TtlCache[str, bool] = field(
        default_factory=lambda: TtlCache(CHANGED_FOR, max_entries=REMEMBERED), kw_only=True
    )
    """What this process has changed it reads consistently, whatever lag it allows."""

    @property
    def names(self) -> Names:
        return self.table.names

    async def read(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str], *, lagging: bool
    ) -> dict[str, Record]:
        pks = {id_: self.names.pk(kind, id_) for id_ in ids}
        consistent = not lagging or any(self.changed.get(pk) for pk in pks.values())
        rows, records = await self._records(kind, list(pks.values()), consistent=consistent)

        async def whole(id_: str) -> Record:
            row, record = rows[pks[id_]], records[pks[id_]]
            if row.copy is None or row.generation == known.get(id_):
                return record
            return await self.with_body(kind, pks[id_], row, record)

        found = await each(pks, whole)
        return {id_: record for id_, record in found.items() if record != NOTHING}

    async def _records(
        self, kind: str, pks: Sequence[str], *, consistent: bool
    ) -> tuple[dict[str, Row], dict[str, Record]]:
        """One GetItem for a fresh copy; the lease is looked at where it could matter."""
        now = self.clock()
        rows = await self._rows(kind, pks, now, consistent=consistent)
        closer = [(pk, LOCK) for pk in pks if not rows[pk].is_fresh(now) or self.leased.get(pk)]
        items = await self.table.get_many(closer, consistent=consistent)
        locks = {
            pk: believed(lock_of(item), now, self.table.max_lease)
            for (pk, _), item in items.items()
        }
        return rows, {pk: merged(rows[pk], locks.get(pk, Lock())) for pk in pks}

    async def _rows(
        self, kind: str, pks: Sequence[str], now: float, *, consistent: bool = True
    ) -> dict[str, Row]:
        """A META that points to a version's row is read together with it (I19)."""
        metas = await self.table.get_many([(pk, META) for pk in pks], consistent=consistent)
        items = {pk: metas.get((pk, META), {}) for pk in pks}
        pointers = {pk: sk for pk, item in items.items() if (sk := version_of(item)) is not None}
        if pointers:
            versions = await self.table.get_many([*pointers.items()], consistent=consistent)
            for (pk, _), version in versions.items():
                items[pk] = {**items[pk], **version, "sk": items[pk]["sk"]}
        others = self.shape(kind).others or ENDLESS
        return {pk: row_of(item, now, others) for pk, item in items.items()}

    async def row(self, kind: str, pk: str) -> Row:
        """As it is now, consistently."""
        return (await self._rows(kind, [pk], self.clock()))[pk]

    async def with_body(self, kind: str, pk: str, row: Row, record: Record) -> Record:
        """I8: a row whose body is missing is a miss, unless the row was replaced meanwhile."""
        value = await self._value(kind, row)
        if value is UNREAD:
            fresh = await self.row(kind, pk)
            if fresh.generation == row.generation:
                return replace(record, copy=None)
            row, value = fresh, await self._value(kind, fresh)
        if row.copy is None or value is UNREAD:
            return replace(record, copy=None)
        return replace(record, copy=replace(row.copy, value=value))

    async def _value(self, kind: str, row: Row) -> object:
        """None: absent upstream. UNREAD: nothing lies where the row points."""
        if row.copy is None or row.meta is None or row.copy.value is None:
            return None
        key = self.names.object_key(row.meta.s3_key)
        if key is None or self.names.is_anothers(key, row.meta.pk):
            return UNREAD
        body = await self.bodies.get(key)
        if body is None or len(body.data) < row.size:
            return UNREAD
        terms = row.copy.policy
        open_body = Body(body.data, body.content_type, row.meta.etag, row.extra, terms)
        return self.shape(kind).inside(open_body)

    def shape(self, kind: str) -> Shape:
        return self.shapes.get(kind, OPAQUE)
