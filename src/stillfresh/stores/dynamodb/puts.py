"""One put of one id: store a copy without a lease, in one transaction.

The body goes to S3 while META and LOCK are read. Then the rows of the tags are written, and one
transaction puts META and deletes LOCK, if both are as they were read. So a put that arrives late
does nothing to what came after it, and no clock is compared. A refusal brings the rows as they are
now, and the put is decided again. A reader of META knows its generation and the four before it:
so a put whose answer was lost recognises itself, even where the server has forgotten the name of
the transaction.
"""

from asyncio import gather
from collections.abc import Collection
from contextlib import suppress
from typing import Final
from uuid import uuid4

from stillfresh.errors import StoreError
from stillfresh.stores.aws import ConditionFailed
from stillfresh.stores.bodies import Body
from stillfresh.stores.contract import UNREAD, Copy, Put, PutOutcome, PutResult, When
from stillfresh.stores.dynamodb.leases import TAGGED_FOR
from stillfresh.stores.dynamodb.rows import NO_BODY, Row, lock_of, meta_item, name_beside
from stillfresh.stores.dynamodb.schema import Item
from stillfresh.stores.dynamodb.steps import DynamoSteps, PageOfOthers
from stillfresh.stores.dynamodb.table import EntryRows
from stillfresh.stores.rules import put_refusal, with_stored_parts

ATTEMPTS: Final = 10
"""Transactions of one put that other changes may refuse; then its caller decides (AGAIN)."""
ONCE: Final = frozenset({When.UNCHANGED, When.NO_LIVE_COPY})
"""Conditions that a put itself ends, so that its first attempt may be why the second is refused."""
AGAIN: Final = PutResult(PutOutcome.AGAIN)


class DynamoPut:
    """A put, from its first look at the entry to its last attempt."""

    def __init__(self, steps: DynamoSteps, kind: str, id_: str, put: Put) -> None:
        self._steps = steps
        self._kind = kind
        self._id = id_
        self._put = put
        self._pk = steps.names.pk(kind, id_)
        self._body = NO_BODY
        self._body_key = self._new_key()
        self._is_written = False
        self._copied_from: str | None = None
        """The `s3_key` whose body was copied, if the put keeps the stored value."""
        self._is_unsure = False
        """True if an answer was lost. DynamoDB knows a transaction by its name for ten minutes, and
        would have said that it was done; other servers may forget it."""

    async def run(self) -> PutResult:
        """Make some attempts. Unless it raises, nothing of the put is under way when it returns."""
        entry = await self._begin()
        for _ in range(ATTEMPTS):
            end = await self._attempt(entry)
            if isinstance(end, PutResult):
                return end
            entry = end
        return self._without_body(AGAIN)

    async def _attempt(self, entry: EntryRows) -> PutResult | EntryRows:
        """Store the copy, if it may be and the rows are as they were read.

        Returns the result, or the rows with which the next attempt begins.
        """
        table = self._steps.table
        now = self._steps.clock()
        row = self._steps.row_of(self._kind, entry.meta, now)
        if row.is_pointer:
            raise PageOfOthers(self._pk)
        result = await self._result_of(row, now)
        if result is not None:
            return self._without_body(result)
        copy = with_stored_parts(self._put.copy, row.copy)
        item = await self._item(entry, row, copy)
        if item is None:
            # The value that it keeps is gone: with its copy, or because that was replaced.
            entry_now = await table.entry(self._pk)
            if entry_now.meta.get("s3_key") == entry.meta.get("s3_key"):
                return self._without_body(PutResult(PutOutcome.REFUSED))
            return entry_now
        if not await self._write_tags(item, entry, row):
            return await table.entry(self._pk)
        try:
            await table.replace(item, entry, name=uuid4().hex)
        except ConditionFailed as exc:
            self._is_unsure = self._is_unsure or exc.follows_loss
            return await table.rows_met(exc, self._pk, entry)
        await self._clean_up(entry, row)
        return PutResult(PutOutcome.STORED, copy.version)

    def _new_key(self) -> str:
        """A key in the bucket that was never used."""
        return self._steps.names.body(self._pk, self._put.copy.generation, uuid4().hex)

    async def _begin(self) -> EntryRows:
        """Read both rows. A value that is stored in any case goes to S3 meanwhile."""
        value = self._put.copy.value
        if isinstance(value, bytes):
            self._body = self._steps.body_of(self._kind, value)
        if not isinstance(value, bytes) or self._put.when is not When.ALWAYS:
            return await self._steps.table.entry(self._pk)
        entry, failure = await gather(
            self._steps.table.entry(self._pk), self._write_body(), return_exceptions=True
        )
        if isinstance(entry, BaseException):  # both have ended
            raise entry
        if isinstance(failure, BaseException):
            raise failure
        return entry

    async def _write_body(self) -> None:
        await self._steps.bodies.put(self._body_key, self._body)
        self._is_written = True

    async def _result_of(self, row: Row, now: float) -> PutResult | None:
        """The result, if an earlier attempt stored the put, or it is refused; None: store it."""
        own = self._put.copy.generation
        if row.generation == own:
            return PutResult(PutOutcome.STORED, row.version)
        if own in {row.token, *row.replaced}:
            return PutResult(PutOutcome.REPLACED, row.version)
        refusal = put_refusal(self._put, row.copy, now)
        if refusal is None:
            return None
        # A copy whose body is gone is a miss to readers, and no reason to refuse a put.
        if refusal.outcome is PutOutcome.REFUSED and not await self._has_body(row):
            refusal = put_refusal(self._put, None, now)
        if refusal is not None and self._is_unsure and self._put.when in ONCE:
            raise StoreError(
                f"{self._pk}: the store did not confirm the put; it may have been done"
            )
        return refusal

    async def _has_body(self, row: Row) -> bool:
        """True if a reader would find the value of the copy."""
        if row.copy is None or row.copy.value is None:
            return True
        key = self._steps.readable_key(row)
        if key is None:
            return False
        size = await self._steps.bodies.size(key)
        return size is not None and size >= row.size

    async def _item(self, entry: EntryRows, row: Row, copy: Copy) -> Item | None:
        """The new META, with its body in S3; None if the stored value that it keeps is gone."""
        body = self._body
        body_size = None
        if copy.value is UNREAD:
            if not await self._copy_body(row):
                return None
            etag = None if row.meta is None else row.meta.etag
            body = Body(b"", etag=etag, extra=row.extra)
            body_size = row.size
        elif copy.value is not None and not self._is_written:
            await self._write_body()
        return name_beside(self._kind, self._id) | meta_item(
            copy,
            pk=self._pk,
            s3_key=self._steps.names.pointer(self._body_key),
            retention=self._steps.retention,
            body=body,
            body_size=body_size,
            tags=self._key_tags(entry, row),
            late=self._late_tags(row),
            replaced=row.replaced_next,
        )

    async def _copy_body(self, row: Row) -> bool:
        """Copy the stored body, because a body belongs to one generation; False if it is gone."""
        if row.s3_key == self._copied_from:
            return True
        source = self._steps.readable_key(row)
        if source is None:
            return False
        self._discard_body()
        self._body_key = self._new_key()
        if not await self._steps.bodies.copy(source, self._body_key):
            return False
        self._is_written = True
        self._copied_from = row.s3_key
        return True

    async def _write_tags(self, item: Item, entry: EntryRows, row: Row) -> bool:
        """Name the entry in its tags, so that an invalidation by tag finds it from now on.

        Each attempt does so: between two, a load may have dropped the rows of an earlier writer.
        """
        lock = lock_of(entry.lock)
        until = max(self._steps.clock() + TAGGED_FOR, float(item["ttl"]["N"]))
        return await self._steps.table.write_put_tags(
            self._tags(entry, row),
            kind=self._kind,
            id_=self._id,
            token=self._put.copy.generation,
            ttl=until,
            writers={row.token or "", lock.token or ""},
        )

    def _key_tags(self, entry: EntryRows, row: Row) -> Collection[str]:
        """The tags of the key: its own, or those of the copy and of a load under way."""
        if self._put.tags is not None:
            return self._put.tags
        return row.tags | lock_of(entry.lock).tags

    def _late_tags(self, row: Row) -> Collection[str]:
        """The tags of the value: its own, or those of the copy."""
        return row.late if self._put.late is None else self._put.late

    def _tags(self, entry: EntryRows, row: Row) -> set[str]:
        return {*self._key_tags(entry, row), *self._late_tags(row)}

    async def _clean_up(self, entry: EntryRows, row: Row) -> None:
        """The copy is stored: drop what it replaced. What stays behind does no harm."""
        self._steps.leased.remove(self._pk)
        self._steps.changed.insert(self._pk, True)
        self._steps.discard(self._pk, row.s3_key)
        lock = lock_of(entry.lock)
        with suppress(StoreError):
            await self._steps.table.remove_tags(self._pk, row, lock, but=self._tags(entry, row))

    def _without_body(self, result: PutResult) -> PutResult:
        """This put's own body is of no use, and nothing under way can point to it any more."""
        self._discard_body()
        self._steps.changed.insert(self._pk, True)
        return result

    def _discard_body(self) -> None:
        if self._is_written:
            self._steps.discard(self._pk, self._steps.names.pointer(self._body_key))
            self._is_written = False
