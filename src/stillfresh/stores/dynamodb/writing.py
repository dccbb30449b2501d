"""One id at a time: leased, published, released, invalidated (I3-I6)."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

from msgspec.structs import replace

from stillfresh.clock import Clock
from stillfresh.errors import LeaseHeld, LeaseLost, StoreError
from stillfresh.stores.bodies import Body, S3Bodies, Trash
from stillfresh.stores.contract import Ask, Copy, Failure, Grant, Held, Lease, Mark, Newer, Record
from stillfresh.stores.dynamodb.leases import TAGGED_FOR, Leases, Tags
from stillfresh.stores.dynamodb.names import Names
from stillfresh.stores.dynamodb.reading import RowReader
from stillfresh.stores.dynamodb.rows import (
    Lock,
    Row,
    lock_of,
    merged,
    meta_item,
    name_beside,
    row_of,
    tag_set,
    tagged,
)
from stillfresh.stores.dynamodb.schema import LOCK, META, FaceTheoryCacheLease, Item, text
from stillfresh.stores.dynamodb.table import Table, each
from stillfresh.ttl_cache import TtlCache

MOST_CLAIMS: Final = 10_000
CLAIM_LASTS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Claim:
    """What a holder has to know until it publishes; who forgets it leaves a body to eviction."""

    replaces: str | None = None
    tags: tuple[str, ...] = ()
    tagged_until: float = 0.0


@dataclass(frozen=True, slots=True)
class RowWriter:
    """The steps that change rows; each reads the clock for itself."""

    table: Table
    leases: Leases
    bodies: S3Bodies
    trash: Trash
    tags: Tags
    reader: RowReader
    names: Names
    retention: float
    clock: Clock
    new_token: Callable[[], str]
    claims: TtlCache[str, Claim] = field(
        default_factory=lambda: TtlCache(CLAIM_LASTS, max_entries=MOST_CLAIMS)
    )

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
        old: Item | None = None
        try:
            lease, old = await self.leases.acquire(
                pk,
                end=now + lease_for,
                now=now,
                new_token=self.new_token,
                beside=tag_set(ask.tags),
                take_over=take_over,
            )
            grant = Lease(ask.id, lease.lease_token, float(lease.lease_expires_at))
        except LeaseHeld as exc:
            grant = Held(exc.until)
        self.reader.note_lease(pk)
        try:
            return await self._looked(kind, ask, grant, old)
        except StoreError:
            if isinstance(grant, Lease):  # won, and of no use: others need not wait for its end
                with suppress(StoreError):
                    await self.leases.release(pk, grant.token, now=now)
            raise

    async def _looked(self, kind: str, ask: Ask, grant: Held | Lease, old: Item | None) -> Grant:
        pk, before = self.names.pk(kind, ask.id), lock_of(old) if old is not None else None
        row = await self.reader.row(kind, pk)
        newer = await self._newer(kind, pk, row, ask.seen, grant)
        if isinstance(grant, Held):
            return newer or grant
        if newer is not None:
            await self.leases.release(pk, grant.token, now=self.clock())
            return newer
        if row is not None and row.is_pointer:
            raise StoreError(f"{pk}: META has current_sk, so only its own services publish it")
        if ask.missed(merged(row, before).failure):
            return await self._failed_since(kind, grant, row, before)
        await self._claim(kind, ask, grant, row, before)
        return grant

    async def _newer(
        self, kind: str, pk: str, row: Row | None, seen: str | None, grant: Held | Lease
    ) -> Newer | None:
        """E5: a copy that is not the one seen, unless its body has vanished."""
        if row is None or row.copy is None or row.generation == seen:
            return None
        held_until = grant.until if isinstance(grant, Held) else None
        record = await self.reader.with_body(
            kind, pk, row, Record(row.copy, held_until, row.failure)
        )
        return None if record.copy is None else Newer(record)

    async def _failed_since(
        self, kind: str, lease: Lease, row: Row | None, before: Lock | None
    ) -> Newer:
        """E7: the failure that the lease's row remembered is put back as the lease is."""
        pk = self.names.pk(kind, lease.id)
        record = replace(merged(row, before), held_until=None)
        if row is not None and row.copy is not None:
            record = await self.reader.with_body(kind, pk, row, record)
        if before is not None and before.failure is not None and before.failure is record.failure:
            await self.leases.fail(pk, lease.token, before.failure, now=self.clock())
        else:
            await self.leases.release(pk, lease.token, now=self.clock())
        return Newer(record)

    async def _claim(
        self, kind: str, ask: Ask, lease: Lease, row: Row | None, before: Lock | None
    ) -> None:
        """I6: the tags are written before the load begins, and those of before go."""
        pk = self.names.pk(kind, ask.id)
        await self.tags.remove(tagged(row, before), pk, but=ask.tags)
        until = lease.expires_at + TAGGED_FOR
        seen = (before.token if before is not None else None) or (row.generation if row else None)
        await self.tags.write(
            ask.tags, kind=kind, id_=ask.id, token=lease.token, ttl=until, seen=seen or ""
        )
        replaced = row.meta.s3_key if row is not None and row.meta is not None else None
        self.claims.insert(lease.token, Claim(replaced, ask.tags, until))
        if before is not None and before.failure is not None and row is None:
            await self.leases.note(pk, lease.token, before.failure)

    async def publish(self, kind: str, id_: str, lease: Lease, copy: Copy) -> bool:
        """I5: the body first, then the transaction; False if the lease was lost."""
        pk, nonce = self.names.pk(kind, id_), uuid4().hex
        claim = self.claims.remove(lease.token, Claim())
        s3_key = self.names.body(pk, copy.generation, nonce)
        body = None
        if isinstance(copy.value, bytes):
            body = self.reader.shape(kind).outside(copy.value)
            await self.bodies.put(s3_key, body)
        item = self._meta(copy, pk, s3_key, body, claim) | name_beside(kind, id_)
        ttl = float(item["ttl"]["N"])
        if ttl > claim.tagged_until:
            token = lease.token
            await self.tags.write(claim.tags, kind=kind, id_=id_, token=token, ttl=ttl, seen=token)
        try:
            await self.leases.publish(item, lease.token, name=nonce, now=self.clock())
        except LeaseLost:
            self._discard(pk, s3_key if body is not None else None)
            return False
        self.reader.forget_lease(pk)
        self.reader.note_change(pk)
        self._discard(pk, claim.replaces)
        return True

    def _meta(self, copy: Copy, pk: str, s3_key: str, body: Body | None, claim: Claim) -> Item:
        return meta_item(
            copy,
            pk=pk,
            s3_key=s3_key,
            retention=self.retention,
            etag=body.etag if body else None,
            extra=body.extra if body else b"",
            size=len(body.data) if body else 0,
            tags=claim.tags,
        )

    def _discard(self, pk: str, s3_key: str | None) -> None:
        if s3_key is not None:
            self.trash.add(self.names.ours(s3_key, pk))

    async def renew(self, kind: str, lease: Lease, lease_for: float) -> bool:
        now, pk = self.clock(), self.names.pk(kind, lease.id)
        self.reader.note_lease(pk)
        renewed = FaceTheoryCacheLease.until(pk, lease.token, now + lease_for)
        try:
            await self.leases.refresh(renewed, now=now)
        except LeaseLost:
            return False
        return True

    async def release(self, kind: str, lease: Lease, failure: Failure | None) -> None:
        pk, now = self.names.pk(kind, lease.id), self.clock()
        self.claims.remove(lease.token)
        if failure is None:
            await self.leases.release(pk, lease.token, now=now)
        else:
            await self.leases.fail(pk, lease.token, failure, now=now)
        self.reader.note_change(pk)

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
