"""Steps on one id: read, lease, publish, release, invalidate (I3-I8).

A read reads the lease's row only where it matters, and the body only if it is unknown (I7).
"""

from asyncio import gather
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as replace_field
from typing import Final, Self
from uuid import uuid4

from msgspec.structs import replace

from stillfresh.clock import Clock
from stillfresh.errors import LeaseHeld, LeaseLost, StoreError
from stillfresh.stores.bodies import Body, S3Bodies, Shape, Trash
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Failure,
    Grant,
    Held,
    Lease,
    Mark,
    Newer,
    Record,
)
from stillfresh.stores.dynamodb.leases import TAGGED_FOR, Claim, Leases
from stillfresh.stores.dynamodb.rows import (
    ENDLESS,
    NO_BODY,
    Lock,
    Row,
    believed,
    lock_of,
    merged,
    meta_item,
    name_beside,
    row_of,
    tag_set,
    version_of,
)
from stillfresh.stores.dynamodb.schema import LOCK, META, FaceTheoryCacheLease, Names, text
from stillfresh.stores.dynamodb.table import each
from stillfresh.ttl_cache import TtlCache

REMEMBERED: Final = 10_000
"""Rows that this process has just leased or changed, and claims, that are remembered."""
LEASED_FOR: Final = 120
CHANGED_FOR: Final = 20
"""Seconds; eventually consistent reads are behind by less, usually by one second."""
NOTHING: Final = Record()
CLAIM_LASTS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class DynamoSteps:
    """The store's steps; each reads the clock itself."""

    table: Leases
    bodies: S3Bodies
    shapes: Mapping[str, Shape]
    clock: Clock
    trash: Trash
    retention: float
    new_token: Callable[[], str]
    leased: TtlCache[str, bool] = field(
        default_factory=lambda: TtlCache(LEASED_FOR, max_entries=REMEMBERED)
    )
    """Ids with a lease: a fresh copy must not hide it from callers that wait for the load."""
    changed: TtlCache[str, bool] = field(
        default_factory=lambda: TtlCache(CHANGED_FOR, max_entries=REMEMBERED)
    )
    """Ids that this process changed: it reads them consistently, whatever lag is allowed."""
    claims: TtlCache[str, Claim] = field(
        default_factory=lambda: TtlCache(CLAIM_LASTS, max_entries=REMEMBERED)
    )

    def urgent(self) -> Self:
        """The same steps, sent even while the service is unavailable."""
        return replace_field(self, table=replace_field(self.table, urgent=True))

    @property
    def names(self) -> Names:
        return self.table.names

    async def read(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str], *, lagging: bool
    ) -> dict[str, Record]:
        """One GetItem for a fresh copy; the lease's row is read where it could matter."""
        now, pks = self.clock(), {id_: self.names.pk(kind, id_) for id_ in ids}
        consistent = not lagging or any(self.changed.get(pk) for pk in pks.values())
        rows = await self._rows(kind, [*pks.values()], now, consistent=consistent)
        closer = [
            (pk, LOCK) for pk, row in rows.items() if not row.is_fresh(now) or self.leased.get(pk)
        ]
        locks = await self.table.get_many(closer, consistent=consistent)

        async def whole(id_: str) -> Record:
            pk, row = pks[id_], rows[pks[id_]]
            lock = lock_of(locks.get((pk, LOCK), {}))
            record = merged(row, believed(lock, now, self.table.max_lease))
            if row.copy is None or row.generation == known.get(id_):
                return record
            return await self.with_body(kind, pk, row, record)

        found = await each(pks, whole)
        return {id_: record for id_, record in found.items() if record != NOTHING}

    async def _rows(
        self, kind: str, pks: Sequence[str], now: float, *, consistent: bool = True
    ) -> dict[str, Row]:
        """A META that points to a version's row is read together with that row (I19)."""
        metas = await self.table.get_many([(pk, META) for pk in pks], consistent=consistent)
        items = {pk: metas.get((pk, META), {}) for pk in pks}
        pointers = {pk: sk for pk, item in items.items() if (sk := version_of(item)) is not None}
        if pointers:
            versions = await self.table.get_many([*pointers.items()], consistent=consistent)
            for (pk, _), version in versions.items():
                items[pk] = {**items[pk], **version, "sk": items[pk]["sk"]}
        shape = self.shapes.get(kind)
        others = (None if shape is None else shape.others) or ENDLESS
        return {pk: row_of(item, now, others) for pk, item in items.items()}

    async def row(self, kind: str, pk: str) -> Row:
        """The row, read consistently."""
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
        """None: absent upstream. UNREAD: there is no body where the row points."""
        if row.copy is None or row.meta is None or row.copy.value is None:
            return None
        key = self.names.object_key(row.meta.s3_key)
        if key is None or self.names.is_anothers(key, row.meta.pk):
            return UNREAD
        body = await self.bodies.get(key)
        if body is None or len(body.data) < row.size:
            return UNREAD
        if (shape := self.shapes.get(kind)) is None:
            return body.data
        terms = row.copy.policy
        return shape.inside(replace(body, etag=row.meta.etag, extra=row.extra, terms=terms))

    async def acquire(self, kind: str, ask: Ask, lease_for: float) -> Grant:
        """E17: a holder is replaced only if the copy is the one seen."""
        grant = await self._acquire(kind, ask, lease_for)
        if isinstance(grant, Held) and ask.take_over:
            return await self._acquire(kind, ask, lease_for, take_over=True)
        return grant

    async def _acquire(
        self, kind: str, ask: Ask, lease_for: float, *, take_over: bool = False
    ) -> Grant:
        """I4, I6: the lease first, then a second, consistent look at the copy."""
        now, pk = self.clock(), self.names.pk(kind, ask.id)
        grant: Held | Lease
        before = Lock()
        try:
            lease, before = await self.table.acquire(
                pk,
                end=now + lease_for,
                now=now,
                new_token=self.new_token,
                beside=tag_set(ask.tags) | name_beside(kind, ask.id) if ask.tags else None,
                take_over=take_over,
            )
            grant = Lease(ask.id, lease.lease_token, float(lease.lease_expires_at))
        except LeaseHeld as exc:
            grant = Held(exc.until)
        self.leased.insert(pk, True)
        try:
            return await self._looked(kind, pk, ask, grant, before)
        except StoreError:
            if isinstance(grant, Lease):  # won, and of no use: others need not wait for its end
                with suppress(StoreError):
                    await self.table.release(pk, grant.token, now=now)
            raise

    async def _looked(
        self, kind: str, pk: str, ask: Ask, grant: Held | Lease, before: Lock
    ) -> Grant:
        if isinstance(grant, Held):
            return await self._newer(kind, pk, await self.row(kind, pk), ask.seen, grant) or grant
        row, epoch = await gather(self.row(kind, pk), self.table.epoch(), return_exceptions=True)
        if isinstance(row, BaseException):  # both have ended
            raise row
        if isinstance(epoch, BaseException):
            raise epoch
        newer = await self._newer(kind, pk, row, ask.seen, grant)
        if newer is not None:
            await self.table.release(pk, grant.token, now=self.clock())
            return newer
        if row.is_pointer:
            raise StoreError(f"{pk}: META has current_sk, so only its own services publish it")
        if ask.missed(merged(row, before).failure):
            return await self._failed_since(kind, pk, grant, row, before)
        await self._claim(kind, ask, grant, row, before)
        return replace(grant, epoch=epoch)

    async def _newer(
        self, kind: str, pk: str, row: Row, seen: str | None, grant: Held | Lease
    ) -> Newer | None:
        """E5: the copy, if it is not the one seen and its body exists."""
        if row.copy is None or row.generation == seen:
            return None
        held_until = grant.until if isinstance(grant, Held) else None
        record = await self.with_body(kind, pk, row, Record(row.copy, held_until, row.failure))
        return None if record.copy is None else Newer(record)

    async def _failed_since(
        self, kind: str, pk: str, lease: Lease, row: Row, before: Lock
    ) -> Newer:
        """E7: put back the failure that the lease's row had kept, and end the lease."""
        record = replace(merged(row, before), held_until=None)
        if row.copy is not None:
            record = await self.with_body(kind, pk, row, record)
        noted = before.failure if before.failure is record.failure else None
        await self._ended(pk, lease, noted)
        return Newer(record)

    async def _ended(self, pk: str, lease: Lease, failure: Failure | None) -> None:
        now = self.clock()
        if failure is None:
            await self.table.release(pk, lease.token, now=now)
        else:
            await self.table.fail(pk, lease.token, failure, now=now)

    async def _claim(self, kind: str, ask: Ask, lease: Lease, row: Row, before: Lock) -> None:
        """I6: write the tags before the load begins, and remove the earlier ones."""
        pk = self.names.pk(kind, ask.id)
        await self.table.remove_tags(pk, row, before, but=(*ask.tags, *row.late))
        until = lease.expires_at + TAGGED_FOR
        seen = before.token or row.generation or ""
        await self.table.write_tags(
            ask.tags, kind=kind, id_=ask.id, token=lease.token, ttl=until, seen=seen
        )
        claim = Claim(row.s3_key, ask.tags, until, row.late, row.token or "")
        self.claims.insert(lease.token, claim)
        if before.failure is not None and row.copy is None:
            await self.table.note(pk, lease.token, before.failure)

    async def publish(
        self, kind: str, id_: str, lease: Lease, copy: Copy, tags: tuple[str, ...] | None = None
    ) -> bool:
        """I5: write the body, then run the transaction; False if the lease was lost.

        I26: between them, write the rows of tags that came with it, and check whether one was
        invalidated.
        """
        pk, nonce = self.names.pk(kind, id_), uuid4().hex
        claim = self.claims.remove(lease.token, Claim())
        late = claim.late if tags is None else frozenset(tags)
        key = self.names.body(pk, copy.generation, nonce)
        s3_key, body, written = self.names.pointer(key), NO_BODY, None
        if isinstance(copy.value, bytes):
            shape, written = self.shapes.get(kind), s3_key
            body = Body(copy.value) if shape is None else shape.outside(copy.value)
            await self.bodies.put(key, body)
        item = name_beside(kind, id_) | meta_item(
            copy,
            pk=pk,
            s3_key=s3_key,
            retention=self.retention,
            body=body,
            tags=claim.tags,
            late=late,
        )
        ttl, token = float(item["ttl"]["N"]), lease.token

        async def stored() -> None:
            if await self.table.is_past(tags or (), lease.epoch):
                await self.table.release(pk, token, now=self.clock())
            await self.table.publish(item, token, name=nonce, now=self.clock())

        try:
            await self.table.told(stored, claim, late, kind=kind, id_=id_, token=token, ttl=ttl)
        except LeaseLost:
            self._discard(pk, written)
            return False
        self.leased.remove(pk)
        self.changed.insert(pk, True)
        self._discard(pk, claim.replaces)
        return True

    def _discard(self, pk: str, s3_key: str | None) -> None:
        if s3_key is not None:
            self.trash.add(self.names.ours(s3_key, pk))

    async def renew(self, kind: str, lease: Lease, lease_for: float) -> bool:
        now, pk = self.clock(), self.names.pk(kind, lease.id)
        self.leased.insert(pk, True)
        try:
            renewed = FaceTheoryCacheLease.until(pk, lease.token, now + lease_for)
            await self.table.refresh(renewed, now=now)
        except LeaseLost:
            return False
        return True

    async def release(self, kind: str, lease: Lease, failure: Failure | None) -> None:
        pk = self.names.pk(kind, lease.id)
        self.claims.remove(lease.token)
        await self._ended(pk, lease, failure)
        self.changed.insert(pk, True)

    async def invalidate(self, pk: str, mark: Mark) -> bool:
        """I3: void the lease, then mark the copy; return whether there was either."""
        self.changed.insert(pk, True)
        was_leased = await self.table.void(pk, now=self.clock())
        is_marked = await self.table.mark(pk, mark)
        self.changed.insert(pk, True)
        return was_leased or is_marked

    async def invalidate_tag(self, tag: str, mark: Mark) -> list[tuple[str, str]]:
        """Also deletes tag rows of entries that no longer exist."""
        await self.table.begin_epoch(tag, self.clock() + TAGGED_FOR)
        rows = await self.table.tagged(tag)

        async def reached(named: tuple[str, str]) -> bool:
            is_there, row = await self.invalidate(self.names.pk(*named), mark), rows[named]
            if not is_there:
                sk, token = row["sk"]["S"], text(row, "lease_token")
                await self.table.drop_tag(row["pk"]["S"], sk, token)
            return is_there

        there = await each(rows, reached)
        return sorted(named for named, is_there in there.items() if is_there)

    async def delete(self, pk: str) -> None:
        lock = lock_of(await self.table.delete(pk, LOCK))
        row = row_of(await self.table.delete(pk, META), self.clock())
        self.changed.insert(pk, True)
        await self.table.remove_tags(pk, row, lock)
        self._discard(pk, row.s3_key)
