"""Rows that say which entries have a tag, and when it was last invalidated (I6, I26).

An entry's rows are written before its load begins; those of tags that come with the load, before it
publishes. An invalidation first notes that it begins, and then looks for rows; a publication first
writes its rows, and then looks for invalidations. So one of the two sees the other.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Final

from stillfresh.errors import LeaseLost, StoreError
from stillfresh.stores.aws import ConditionFailed
from stillfresh.stores.dynamodb.rows import Lock, Row, lock_of
from stillfresh.stores.dynamodb.schema import (
    EPOCH,
    INVALIDATED,
    LOCK,
    Item,
    attributes,
    key_of,
    number,
    text,
)
from stillfresh.stores.dynamodb.table import Table, each, values

OURS: Final = "lease_token = :token"
TAGGED_FOR: Final = 30 * 86400
"""Seconds that a tag's row stays after the last lease; longer if its copy does."""
UNCHANGED: Final = "attribute_not_exists(lease_token) OR lease_token IN (:seen, :token)"
TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class Claim:
    """What the holder of a lease must know until it publishes; if lost, eviction finds the body."""

    replaces: str | None = None
    tags: tuple[str, ...] = ()
    tagged_until: float = 0.0
    late: frozenset[str] = frozenset()
    wrote: str = ""
    """I26: the tags of the present copy, and the lease that wrote their rows."""


@dataclass(frozen=True, slots=True)
class TagRows(Table):
    """The rows of tags in one table."""

    async def write_tags(
        self, tags: Iterable[str], *, kind: str, id_: str, token: str, ttl: float, seen: str
    ) -> None:
        """I6: this entry is leased with these tags; rows of their own, so no index is needed.

        They are written before the load begins, outlive the copy, and are removed when they are
        found without an entry. `seen`: the lease that probably wrote the present ones.
        """
        beside = attributes(kind=kind, id=id_, lease_token=token, ttl=ceil(ttl))
        pk = self.names.pk(kind, id_)
        await each(tags, lambda tag: self._write_tag(self.names.tag(tag), pk, beside, token, seen))

    async def _write_tag(self, tag: str, pk: str, beside: Item, token: str, seen: str) -> None:
        """Replace only the row that was seen, so that a late write replaces no later row (S8).

        A holder whose lease was lost meanwhile stops: it cannot publish any more. A row that was
        seen while the lease was still ours is not from a later lease.
        """
        row = key_of(tag, sk := self.names.hashed(pk)) | beside
        for _ in range(TRIES):
            try:
                await self.put(row, UNCHANGED, values(seen=seen, token=token))
            except ConditionFailed as exc:
                seen = text(await self._met(exc, tag, sk), "lease_token") or ""
                if lock_of(await self.get(pk, LOCK)).token != token:
                    return
            else:
                return
        raise StoreError(
            f"{self.names.table}: other processes keep changing the row of a tag; try again"
        )

    async def _met(self, refused: ConditionFailed, pk: str, sk: str = LOCK) -> Item:
        """The row that failed the condition."""
        return refused.item or await self.get(pk, sk)

    @asynccontextmanager
    async def telling(
        self, claim: Claim, late: frozenset[str], *, kind: str, id_: str, token: str, ttl: float
    ) -> AsyncIterator[None]:
        """I26: the copy that is published in the block comes with these tags.

        Before it their rows are written, and afterwards those of the copy before go; if it is not
        published, those stay.
        """
        write, own = partial(self.write_tags, kind=kind, id_=id_, ttl=ttl), set(claim.tags)
        if ttl > claim.tagged_until:
            await write(claim.tags, token=token, seen=token)
        await write(late - own, token=token, seen=claim.wrote)
        pk = self.names.pk(kind, id_)
        try:
            yield
        except LeaseLost:
            await self.drop_tags(late - claim.late - own, pk, token)
            await write(late & claim.late, token=claim.wrote, seen=token)
            raise
        await self.drop_tags(claim.late - late - own, pk, claim.wrote)

    async def tagged(self, tag: str) -> dict[tuple[str, str], Item]:
        """The rows of entries that have the tag, by kind and id."""
        found = await self.partition(self.names.tag(tag))
        rows = [row for row in found if row["sk"]["S"] != INVALIDATED]
        return {(text(row, "kind") or "", text(row, "id") or ""): row for row in rows}

    async def remove_tags(self, pk: str, row: Row, lock: Lock, *, but: Iterable[str] = ()) -> None:
        """Remove rows that these leases wrote; rows of a later lease stay."""
        tokens = {row.token, lock.token} - {None}
        tags = (row.tags | row.late | lock.tags) - set(but)
        for token in tokens:
            await self.drop_tags(tags, pk, token)

    async def drop_tags(self, tags: Iterable[str], pk: str, token: str | None) -> None:
        sk = self.names.hashed(pk)
        await each(tags, lambda tag: self.drop_tag(self.names.tag(tag), sk, token))

    async def drop_tag(self, pk: str, sk: str, token: str | None) -> None:
        """Remove it unless the entry was leased again since the row was read."""
        with suppress(ConditionFailed):
            await self.delete(pk, sk, OURS, values(token=token or ""))

    async def epoch(self) -> int:
        """I26: the epoch of the last invalidation by tag, or an earlier one, which costs a load."""
        row = await self.get(self.names.tags, EPOCH, consistent=False)
        return int(number(row, "epoch") or 0)

    async def begin_epoch(self, tag: str, ttl: float) -> None:
        """Note that the tag is invalidated, until `ttl`: longer than any load takes."""
        raised = await self._ask(
            "update_item",
            Key=key_of(self.names.tags, EPOCH),
            UpdateExpression="ADD epoch :one",
            ExpressionAttributeValues=values(one=1),
            ReturnValues="UPDATED_NEW",
        )
        epoch = int(raised["Attributes"]["epoch"]["N"])
        row = key_of(self.names.tag(tag), INVALIDATED) | attributes(epoch=epoch, ttl=ceil(ttl))
        with suppress(ConditionFailed):  # by a later invalidation
            await self.put(row, "attribute_not_exists(pk) OR epoch < :epoch", values(epoch=epoch))

    async def is_past(self, tags: Iterable[str], epoch: int) -> bool:
        """True if one of them was invalidated after that epoch."""
        rows = await self.get_many([(self.names.tag(tag), INVALIDATED) for tag in tags])
        return any((number(row, "epoch") or 0) > epoch for row in rows.values())
