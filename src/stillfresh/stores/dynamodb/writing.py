"""One id at a time: leased, published, released, invalidated (I3-I6)."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as replace_field
from typing import Final, Self
from uuid import uuid4

from msgspec.structs import replace

from stillfresh.errors import LeaseHeld, LeaseLost, StoreError
from stillfresh.stores.bodies import Body, Trash
from stillfresh.stores.contract import Ask, Copy, Failure, Grant, Held, Lease, Mark, Newer, Record
from stillfresh.stores.dynamodb.leases import TAGGED_FOR
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
)
from stillfresh.stores.dynamodb.schema import LOCK, META, FaceTheoryCacheLease, text
from stillfresh.stores.dynamodb.table import each
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
class RowWriter(RowReader):
    """The steps that change rows; each reads the clock for itself."""

    trash: Trash
    retention: float
    new_token: Callable[[], str]
    claims: TtlCache[str, Claim] = field(
        default_factory=lambda: TtlCache(CLAIM_LASTS, max_entries=MOST_CLAIMS), kw_only=True
    )

    def urgent(self) -> Self:
        """The same steps, tried even while the service is away."""
        return replace_field(self, table=replace_field(self.table, urgent=True))

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
                beside=tag_set(ask.tags),
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
        row = await self.row(kind, pk)
        newer = await self._newer(kind, pk, row, ask.seen, grant)
        if isinstance(grant, Held):
            return newer or grant
        if newer is not None:
            await self.table.release(pk, grant.token, now=self.clock())
            return newer
        if row.is_pointer:
            raise StoreError(f"{pk}: META has current_sk, so only its own services publish it")
        if ask.missed(merged(row, before).failure):
            return await self._failed_since(kind, pk, grant, row, before)
        await self._claim(kind, ask, grant, row, before)
        return grant

    async def _newer(
        self, kind: str, pk: str, row: Row, seen: str | None, grant: Held | Lease
    ) -> Newer | None:
        """E5: a copy that is not the one seen, unless its body has vanished."""
        if row.copy is None or row.generation == seen:
            return None
        held_until = grant.until if isinstance(grant, Held) else None
        record = await self.with_body(kind, pk, row, Record(row.copy, held_until, row.failure))
        return None if record.copy is None else Newer(record)

    async def _failed_since(
        self, kind: str, pk: str, lease: Lease, row: Row, before: Lock
    ) -> Newer:
        """E7: the failure that the lease's row remembered is put back as the lease is."""
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
        """I6: the tags are written before the load begins, and those of before go."""
        pk = self.names.pk(kind, ask.id)
        await self.table.remove_tags(pk, row, before, but=ask.tags)
        until = lease.expires_at + TAGGED_FOR
        seen = before.token or row.generation or ""
        await self.table.write_tags(
            ask.tags, kind=kind, id_=ask.id, token=lease.token, ttl=until, seen=seen
        )
        self.claims.insert(lease.token, Claim(row.s3_key, ask.tags, until))
        if before.failure is not None and row.copy is None:
            await self.table.note(pk, lease.token, before.failure)

    async def publish(self, kind: str, id_: str, lease: Lease, copy: Copy) -> bool:
        """I5: the body first, then the transaction; False if the lease was lost."""
        pk, nonce = self.names.pk(kind, id_), uuid4().hex
        claim = self.claims.remove(lease.token, Claim())
        s3_key = self.names.body(pk, copy.generation, nonce)
        body, written = Body(b""), None
        if isinstance(copy.value, bytes):
            body, written = self.shape(kind).outside(copy.value), s3_key
            await self.bodies.put(s3_key, body)
        item = name_beside(kind, id_) | meta_item(
            copy,
            pk=pk,
            s3_key=s3_key,
            retention=self.retention,
            etag=body.etag,
            extra=body.extra,
            size=len(body.data),
            tags=claim.tags,
        )
        ttl, token = float(item["ttl"]["N"]), lease.token
        if ttl > claim.tagged_until:
            await self.table.write_tags(
                claim.tags, kind=kind, id_=id_, token=token, ttl=ttl, seen=token
            )
        try:
            await self.table.publish(item, token, name=nonce, now=self.clock())
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
        """I3: first the lease, then the copy; whether there was either."""
        self.changed.insert(pk, True)
        was_leased = await self.table.void(pk, now=self.clock())
        is_marked = await self.table.mark(pk, mark)
        self.changed.insert(pk, True)
        return was_leased or is_marked

    async def invalidate_tag(self, tag: str, mark: Mark) -> list[tuple[str, str]]:
        """A row of an entry that is gone goes too."""
        rows = {row["sk"]["S"]: row for row in await self.table.partition(self.names.tag(tag))}

        async def reached(pk: str) -> bool:
            is_there = await self.invalidate(pk, mark)
            if not is_there:
                row = rows[pk]
                await self.table.drop_tag(row["pk"]["S"], pk, text(row, "lease_token"))
            return is_there

        found = await each(rows, reached)
        there = [row for pk, row in rows.items() if found[pk]]
        named = [(text(row, "kind"), text(row, "id") or "") for row in there]
        return sorted((kind, id_) for kind, id_ in named if kind is not None)

    async def delete(self, pk: str) -> None:
        lock = lock_of(await self.table.delete(pk, LOCK) or {})
        row = row_of(await self.table.delete(pk, META) or {}, self.clock())
        self.changed.insert(pk, True)
        await self.table.remove_tags(pk, row, lock)
        self._discard(pk, row.s3_key)
