"""The DynamoDB store's steps on one id: read, lease, publish, release, invalidate.

A read reads the lease's row only where it matters, and the body only if it is unknown, because each
request is charged. The order of requests within a step matters, since other processes see every
state in between: a body is written before the row that points to it, and tags are written before a
load begins, so that an invalidation by tag finds it.
"""

from asyncio import gather
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as replace_field
from typing import Final, Self, TypeAlias
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
from stillfresh.stores.dynamodb.leases import TAGGED_FOR, TRIES, Claim, Leases
from stillfresh.stores.dynamodb.rows import (
    CURRENT,
    ENDLESS,
    NO_BODY,
    Lock,
    Row,
    has_lease_or_failure,
    is_copy,
    is_ended,
    lock_of,
    merged,
    meta_item,
    name_beside,
    row_of,
    tag_set,
    version_of,
    with_accepted_end,
)
from stillfresh.stores.dynamodb.schema import (
    LOCK,
    META,
    FaceTheoryCacheLease,
    Item,
    Names,
    text,
)
from stillfresh.stores.dynamodb.table import each
from stillfresh.stores.given_up import GivenUpRequests
from stillfresh.ttl_cache import TtlCache

REMEMBERED: Final = 10_000
"""Rows that this process has just leased or changed, and claims, that are remembered."""
LEASED_FOR: Final = 120
CHANGED_FOR: Final = 20
"""Seconds; eventually consistent reads are behind by less, usually by one second."""
NOTHING: Final = Record()
LONGEST_TOKEN: Final = 255
"""Characters: a token is compared as a whole, because each request draws its own."""
CLAIM_LASTS: Final = 3600.0
NO_CLAIM: Final = Claim()
TagRows: TypeAlias = Mapping[tuple[str, str], Item]
"""The rows of a tag, by kind and id of their entries."""


class PageOfOthers(StoreError):
    """A page of other services, which stillfresh never replaces."""

    def __init__(self, pk: str) -> None:
        super().__init__(f"{pk}: META has current_sk, so only its own services publish it")


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
    given_up: GivenUpRequests = field(default_factory=lambda: GivenUpRequests(LONGEST_TOKEN))
    """Tokens of requests for a lease that this process no longer waits for."""
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
        now = self.clock()
        pks = {id_: self.names.pk(kind, id_) for id_ in ids}
        consistent = not lagging or any(self.changed.get(pk) for pk in pks.values())
        rows = await self._rows(kind, [*pks.values()], now, consistent=consistent)
        lock_keys = [
            (pk, LOCK) for pk, row in rows.items() if not row.is_fresh(now) or self.leased.get(pk)
        ]
        locks = await self.table.get_many(lock_keys, consistent=consistent)

        async def whole_record(id_: str) -> Record:
            pk = pks[id_]
            row = rows[pk]
            lock = lock_of(locks.get((pk, LOCK), {}))
            if lock.token is not None and self.given_up.is_left_behind(lock.token):
                lock = replace_field(lock, held_until=None)  # callers that wait for it ask again
            record = merged(row, with_accepted_end(lock, now, self.table.max_lease))
            if row.copy is None or row.generation == known.get(id_):
                return record
            return await self.with_body(kind, pk, row, record)

        records = await each(pks, whole_record)
        return {id_: record for id_, record in records.items() if record != NOTHING}

    async def _rows(
        self, kind: str, pks: Sequence[str], now: float, *, consistent: bool = True
    ) -> dict[str, Row]:
        """A META that points to a version's row is read together with that row."""
        metas = await self.table.get_many([(pk, META) for pk in pks], consistent=consistent)
        items = {pk: metas.get((pk, META), {}) for pk in pks}
        pointers = {pk: sk for pk, item in items.items() if (sk := version_of(item)) is not None}
        if pointers:
            versions = await self.table.get_many([*pointers.items()], consistent=consistent)
            for (pk, _), version in versions.items():
                items[pk] = {**items[pk], **version, "sk": items[pk]["sk"]}
        return {pk: self.row_of(kind, item, now) for pk, item in items.items()}

    def row_of(self, kind: str, item: Item, now: float) -> Row:
        """The META row as it is read; the kind says how long a stale copy of others is served."""
        shape = self.shapes.get(kind)
        others = None if shape is None else shape.others
        return row_of(item, now, others or ENDLESS)

    async def row(self, kind: str, pk: str) -> Row:
        """The row, read consistently."""
        return (await self._rows(kind, [pk], self.clock()))[pk]

    async def with_body(self, kind: str, pk: str, row: Row, record: Record) -> Record:
        """The record with its value. A row whose body is missing is a miss.

        If the row was replaced meanwhile, the body of the new one is read.
        """
        value = await self._value(kind, row)
        if value is UNREAD:
            fresh = await self.row(kind, pk)
            if fresh.generation == row.generation:
                return replace(record, copy=None)
            row = fresh
            value = await self._value(kind, fresh)
        if row.copy is None or value is UNREAD:
            return replace(record, copy=None)
        return replace(record, copy=replace(row.copy, value=value))

    async def _value(self, kind: str, row: Row) -> object:
        """None: absent upstream. UNREAD: there is no body where the row points."""
        if row.copy is None or row.meta is None or row.copy.value is None:
            return None
        key = self.readable_key(row)
        if key is None:
            return UNREAD
        body = await self.bodies.get(key)
        if body is None or len(body.data) < row.size:
            return UNREAD
        shape = self.shapes.get(kind)
        if shape is None:
            return body.data
        terms = row.copy.policy
        return shape.inside(replace(body, etag=row.meta.etag, extra=row.extra, terms=terms))

    def readable_key(self, row: Row) -> str | None:
        """Where the copy's body is; None if it is not a body that this row may show."""
        if row.meta is None:
            return None
        key = self.names.object_key(row.meta.s3_key)
        if key is None or self.names.is_anothers(key, row.meta.pk):
            return None
        return key

    async def acquire(self, kind: str, ask: Ask, lease_for: float) -> Grant:
        """Ask for the lease; a holder is replaced only if the copy is the one seen."""
        grant = await self._acquire(kind, ask, lease_for)
        if isinstance(grant, Held) and ask.take_over:
            return await self._acquire(kind, ask, lease_for, take_over=True)
        return grant

    async def _acquire(
        self, kind: str, ask: Ask, lease_for: float, *, take_over: bool = False
    ) -> Grant:
        """Ask for the lease, and remember requests that may take it later, with nobody to load."""
        sent: list[str] = []
        grant: Grant | None = None

        def new_token() -> str:
            sent.append(self.new_token())
            return sent[-1]

        try:
            grant = await self._ask_for_lease(kind, ask, lease_for, new_token, take_over=take_over)
        finally:
            if grant is None or len(sent) > 1:  # given up, or some were not answered
                granted = grant.token if isinstance(grant, Lease) else None
                self.given_up.give_up([token for token in sent if token != granted], lease_for)
        return grant

    async def _ask_for_lease(
        self,
        kind: str,
        ask: Ask,
        lease_for: float,
        new_token: Callable[[], str],
        *,
        take_over: bool,
    ) -> Grant:
        """Take the lease first, and then look at the copy once more, consistently."""
        now = self.clock()
        pk = self.names.pk(kind, ask.id)
        grant: Held | Lease
        before = Lock()
        try:
            lease, before = await self.table.acquire(
                pk,
                end=now + lease_for,
                now=now,
                new_token=new_token,
                is_left_behind=self.given_up.is_left_behind,
                beside=tag_set(ask.tags) | name_beside(kind, ask.id) if ask.tags else None,
                take_over=take_over,
            )
            grant = Lease(ask.id, lease.lease_token, float(lease.lease_expires_at))
        except LeaseHeld as exc:
            grant = Held(exc.until)
        self.leased.insert(pk, True)
        try:
            return await self._look_at_copy(kind, pk, ask, grant, before)
        except StoreError as exc:
            if isinstance(grant, Lease):  # won, and of no use: others need not wait for its end
                has_copy = isinstance(exc, PageOfOthers)
                with suppress(StoreError):
                    await self.table.release(pk, grant.token, has_copy=has_copy, now=now)
            raise

    async def _look_at_copy(
        self, kind: str, pk: str, ask: Ask, grant: Held | Lease, before: Lock
    ) -> Grant:
        """The grant, or the copy or failure that the caller has not seen; that ends the lease.

        `before`: the LOCK row that the lease replaced.
        """
        if isinstance(grant, Held):
            return await self._newer(kind, pk, await self.row(kind, pk), ask.seen, grant) or grant
        row, epoch = await gather(self.row(kind, pk), self.table.epoch(), return_exceptions=True)
        if isinstance(row, BaseException):  # both have ended
            raise row
        if isinstance(epoch, BaseException):
            raise epoch
        newer = await self._newer(kind, pk, row, ask.seen, grant)
        if newer is not None:
            await self.table.release(pk, grant.token, has_copy=True, now=self.clock())
            return newer
        if row.is_pointer:
            raise PageOfOthers(pk)
        if ask.missed(merged(row, before).failure):
            return await self._failed_since(kind, pk, grant, row, before)
        await self._claim(kind, ask, grant, row, before)
        return replace(grant, epoch=epoch)

    async def _newer(
        self, kind: str, pk: str, row: Row, seen: str | None, grant: Held | Lease
    ) -> Newer | None:
        """The copy, if it is not the one seen and its body exists."""
        if row.copy is None or row.generation == seen:
            return None
        held_until = grant.until if isinstance(grant, Held) else None
        record = await self.with_body(kind, pk, row, Record(row.copy, held_until, row.failure))
        return None if record.copy is None else Newer(record)

    async def _failed_since(
        self, kind: str, pk: str, lease: Lease, row: Row, before: Lock
    ) -> Newer:
        """Put back the failure that the lease's row had kept, and end the lease."""
        record = replace(merged(row, before), held_until=None)
        if row.copy is not None:
            record = await self.with_body(kind, pk, row, record)
        noted = before.failure if before.failure is record.failure else None
        await self._end_lease(pk, lease, noted, has_copy=row.meta is not None)
        return Newer(record)

    async def _end_lease(
        self, pk: str, lease: Lease, failure: Failure | None, *, has_copy: bool
    ) -> None:
        now = self.clock()
        if failure is None:
            await self.table.release(pk, lease.token, has_copy=has_copy, now=now)
        else:
            await self.table.fail(pk, lease.token, failure, now=now)

    async def _claim(self, kind: str, ask: Ask, lease: Lease, row: Row, before: Lock) -> None:
        """Write the tags before the load begins, and remove the earlier ones."""
        pk = self.names.pk(kind, ask.id)
        await self.table.remove_tags(pk, row, before, but=(*ask.tags, *row.late))
        until = lease.expires_at + TAGGED_FOR
        seen = before.token or row.generation or ""
        await self.table.write_tags(
            ask.tags, kind=kind, id_=ask.id, token=lease.token, ttl=until, seen=seen
        )
        self.claims.insert(lease.token, _claim_of(row, ask.tags, until))
        if before.failure is not None and row.copy is None:
            await self.table.note(pk, lease.token, before.failure)

    async def publish(
        self, kind: str, id_: str, lease: Lease, copy: Copy, tags: tuple[str, ...] | None = None
    ) -> bool:
        """Write the body, then run the transaction; False if the lease was lost.

        Between them, write the rows of tags that came with it, and check whether one was
        invalidated.
        """
        pk = self.names.pk(kind, id_)
        nonce = uuid4().hex
        claim = self.claims.remove(lease.token, None)
        if claim is None:  # forgotten: too many, or too long ago
            claim = _claim_of(await self.row(kind, pk))
        late = claim.late if tags is None else frozenset(tags)
        key = self.names.body(pk, copy.generation, nonce)
        s3_key = self.names.pointer(key)
        body = NO_BODY
        written_key: str | None = None
        if not copy.version and claim.version:
            copy = replace(copy, version=claim.version)
        if isinstance(copy.value, bytes):
            written_key = s3_key
            body = self.body_of(kind, copy.value)
            await self.bodies.put(key, body)
        item = name_beside(kind, id_) | meta_item(
            copy,
            pk=pk,
            s3_key=s3_key,
            retention=self.retention,
            body=body,
            tags=claim.tags,
            late=late,
            replaced=claim.replaced,
        )
        ttl = float(item["ttl"]["N"])
        token = lease.token

        async def publish() -> None:
            if await self.table.is_past(tags or (), lease.epoch):
                await self.table.release(pk, token, has_copy=claim.has_copy, now=self.clock())
            await self.table.publish(item, token, name=nonce, now=self.clock())

        try:
            await self.table.publish_with_tags(
                publish, claim, late, kind=kind, id_=id_, token=token, ttl=ttl
            )
        except LeaseLost:
            self.discard(pk, written_key)
            return False
        self.leased.remove(pk)
        self.changed.insert(pk, True)
        self.discard(pk, claim.replaces)
        return True

    def body_of(self, kind: str, value: bytes) -> Body:
        """The value as it is stored in S3."""
        shape = self.shapes.get(kind)
        return Body(value) if shape is None else shape.outside(value)

    def discard(self, pk: str, s3_key: str | None) -> None:
        """Delete the body later, if it is ours."""
        if s3_key is not None:
            self.trash.add(self.names.ours(s3_key, pk))

    async def renew(self, kind: str, lease: Lease, lease_for: float) -> bool:
        now = self.clock()
        pk = self.names.pk(kind, lease.id)
        self.leased.insert(pk, True)
        try:
            renewed = FaceTheoryCacheLease.until(pk, lease.token, now + lease_for)
            await self.table.refresh(renewed, now=now)
        except LeaseLost:
            return False
        return True

    async def release(self, kind: str, lease: Lease, failure: Failure | None) -> None:
        pk = self.names.pk(kind, lease.id)
        claim = self.claims.remove(lease.token, NO_CLAIM)
        await self._end_lease(pk, lease, failure, has_copy=claim.has_copy)
        self.changed.insert(pk, True)

    async def invalidate(self, pk: str, mark: Mark) -> bool:
        """Void the lease, then mark the copy; return whether there was either.

        Rows are changed only if they are as they were read, so a request that arrives late changes
        nothing that came after it. Without a copy a trace takes the place of the lease. So a put
        that saw no copy is refused from then on; one that was stored just before is found by the
        next look.
        """
        self.changed.insert(pk, True)
        now = self.clock()
        entry = await self.table.entry(pk)
        meta = entry.meta
        lock = entry.lock
        had_copy = False
        for _ in range(TRIES):
            if CURRENT in meta:
                had_copy = await self._invalidate_pointer(pk, meta, lock, mark)
                break
            if is_copy(meta):
                had_copy = True
                if lock and not is_ended(lock):
                    await self.table.void(pk, lock, has_copy=True, now=now)
                meta_now = await self.table.mark(pk, meta, mark)
                if meta_now is None:
                    break
            else:
                await self.table.void(pk, lock, has_copy=False, now=now)
                meta_now = await self.table.get(pk, META)
                if not is_copy(meta_now):
                    break
            # The copy was replaced since the last look, and is marked in the next round. The rounds
            # may end before: a process that replaced it once more had looked at the entry after
            # this call began.
            meta = meta_now
            lock = {}
        self.changed.insert(pk, True)
        return had_copy or has_lease_or_failure(entry.lock)

    async def _invalidate_pointer(self, pk: str, meta: Item, lock: Item, mark: Mark) -> bool:
        """Mark the row that META points to; return whether there is one."""
        if lock and not is_ended(lock):
            await self.table.void(pk, lock, has_copy=True, now=self.clock())
        version = version_of(meta)
        return version is not None and await self.table.mark_version(pk, version, mark)

    async def invalidate_tag(self, tag: str, mark: Mark) -> list[tuple[str, str]]:
        """Invalidate the tag's entries; also delete tag rows of entries that no longer exist.

        While the entries are marked one by one, a value may be made of an entry that is still to
        come, and be stored. So entries that were leased meanwhile are invalidated as well.
        """
        names, rows = await self._invalidate_tagged(tag, mark, {})
        if names:
            names |= (await self._invalidate_tagged(tag, mark, rows))[0]
        return sorted(names)

    async def _invalidate_tagged(
        self, tag: str, mark: Mark, done: TagRows
    ) -> tuple[set[tuple[str, str]], TagRows]:
        """Invalidate the tag's entries, but those that are as they were; return their names.

        The epoch begins first: a publication that writes its tag rows after this reads them sees
        the epoch, and is superseded.
        """
        await self.table.begin_epoch(tag, self.clock() + TAGGED_FOR)
        rows = await self.table.tagged(tag)

        async def invalidate_entry(name: tuple[str, str]) -> bool:
            kind, id_ = name
            exists = await self.invalidate(self.names.pk(kind, id_), mark)
            if not exists:
                row = rows[name]
                token = text(row, "lease_token")
                await self.table.drop_tag(row["pk"]["S"], row["sk"]["S"], token)
            return exists

        changed = [name for name, row in rows.items() if row != done.get(name)]
        results = await each(changed, invalidate_entry)
        return {name for name, exists in results.items() if exists}, rows

    async def delete(self, pk: str) -> None:
        """Delete both rows, if they are as they were read; a trace stays in the place of LOCK."""
        now = self.clock()
        entry = await self.table.entry(pk)
        meta = entry.meta
        lock = entry.lock
        deleted: Item = {}
        for _ in range(TRIES):
            await self.table.leave_trace(pk, lock, now=now)
            lock = {}
            if meta:
                meta_now = await self.table.delete_copy(pk, meta)
                if meta_now is None:
                    deleted = meta
                    break
            else:
                meta_now = await self.table.get(pk, META)
                if not meta_now:
                    break
            meta = meta_now  # it was replaced since the last look: as in `invalidate`
        self.changed.insert(pk, True)
        row = row_of(deleted, now)
        await self.table.remove_tags(pk, row, lock_of(entry.lock))
        self.discard(pk, row.s3_key)


def _claim_of(row: Row, tags: tuple[str, ...] = (), tagged_until: float = 0.0) -> Claim:
    """What a holder must know of the row that its copy will replace."""
    return Claim(
        replaces=row.s3_key,
        tags=tags,
        tagged_until=tagged_until,
        late=row.late,
        wrote=row.token or "",
        version=row.version,
        replaced=row.replaced_next,
    )
