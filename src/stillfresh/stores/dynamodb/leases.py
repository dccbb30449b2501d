"""The schema's recipes: leases, publication, invalidation, and rows of tags.

Each is one conditional request, or one transaction. It raises `LeaseHeld` (another process has it),
`LeaseLost` (no longer ours) or `StoreError` (the store failed), and never confuses them: a request
that is refused after a lost answer finds its own token in the row, and has won.

An entry's rows of tags are written before its load begins; those of tags that come with the load,
before it publishes; those of a put, before its transaction. An invalidation first notes that it
begins, and then looks for rows; a publication first writes its rows, and then looks for
invalidations. So one of the two sees the other.

Every row of a tag names its writer: the lease, or the generation of the put. A step drops a row
only under the name of a writer that it has seen in META or LOCK. So each writer replaces the row,
and a put, whose rows others may rely on by then, never drops its own.

No request that arrives late changes what came after it. A put, an invalidation and a deletion
first read META and LOCK, and are refused unless both are as they were read. No state of the two
rows comes back: bodies, tokens and marks of invalidations are random, and where META goes, or was
missing when something ended, LOCK stays as a trace for an hour.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil, floor
from typing import Any, Final
from uuid import uuid4

from stillfresh.errors import LeaseHeld, LeaseLost, StoreError
from stillfresh.freshness import MAX_SKEW
from stillfresh.stores.aws import ConditionFailed
from stillfresh.stores.contract import Failure, Mark
from stillfresh.stores.dynamodb.rows import (
    CURRENT,
    LOCK_FENCE,
    META_FENCE,
    VOIDED,
    Lock,
    Row,
    ended_attributes,
    failure_attributes,
    lock_of,
    trace_item,
    with_accepted_end,
)
from stillfresh.stores.dynamodb.schema import (
    EPOCH,
    INVALIDATED,
    LOCK,
    META,
    FaceTheoryCacheLease,
    Item,
    attributes,
    key_of,
    number,
    text,
)
from stillfresh.stores.dynamodb.table import (
    EntryRows,
    Table,
    as_read,
    changes_of,
    deletion,
    each,
    put_of,
    values,
)
from stillfresh.stores.versions import NO_VERSION

OURS: Final = "lease_token = :token"
TAGGED_FOR: Final = 30 * 86400
"""Seconds that a tag's row stays after the last lease; longer if its copy does."""
TRIES: Final = 8
"""Attempts of one step, each refused because another process was faster."""
FREE: Final = (
    "attribute_not_exists(pk) OR lease_expires_at <= :now"
    # Later than any lease ends (`max_lease`): from before the clock was set back.
    " OR lease_expires_at > :last"
    # A row without an end is not a lease: it would never end.
    " OR NOT attribute_type(lease_expires_at, :number)"
)
FREE_OR_OURS: Final = f"{FREE} OR {OURS}"
TAKE_OVERS: Final = 5
"""Attempts to take over from holders that follow each other."""
LIVE: Final = f"{OURS} AND lease_expires_at > :now"
FORGETTABLE: Final = "attribute_not_exists(failures)"


@dataclass(frozen=True, slots=True)
class Claim:
    """What the holder of a lease must know until it publishes; if lost, eviction finds the body."""

    replaces: str | None = None
    tags: tuple[str, ...] = ()
    tagged_until: float = 0.0
    late: frozenset[str] = frozenset()
    wrote: str = ""
    """The tags of the present copy, and the lease that wrote their rows."""
    version: bytes = NO_VERSION
    replaced: tuple[str, ...] = ()
    """The version for a copy that has none, and the generations that the copy replaces."""

    @property
    def has_copy(self) -> bool:
        """True if there is a META row. It stays while the lease does: to delete it voids that."""
        return self.replaces is not None


@dataclass(frozen=True, slots=True)
class Leases(Table):
    """The leases, copies and tags of one table; `now` is the caller's clock, read for this step."""

    max_lease: float = 0.0

    async def acquire(
        self,
        pk: str,
        *,
        end: float,
        now: float,
        new_token: Callable[[], str],
        is_left_behind: Callable[[str], bool] = lambda _: False,
        beside: Item | None = None,
        take_over: bool = False,
    ) -> tuple[FaceTheoryCacheLease, Lock]:
        """PutItem, unless it is held; with the lease that it replaced.

        Each attempt has a token of its own. One that arrives after the others can take the lease,
        but never bring back a token that was granted, and voided since. A request that takes a
        lease over names its holder, so that a late one voids no later lease. A lease under which
        nobody loads is taken over too.
        """
        attempts: list[FaceTheoryCacheLease] = []

        def attempt() -> Item:
            attempts.append(FaceTheoryCacheLease.until(pk, new_token(), end))
            return attempts[-1].item() | (beside or {})

        last = ceil(max(now + self.max_lease, ceil(end)) + MAX_SKEW)
        given = values(now=floor(now), last=last, number="N")
        condition = FREE
        take_overs_left = TAKE_OVERS
        while True:
            try:
                old = await self.put(attempt, condition, given)
            except ConditionFailed as exc:
                holder = lock_of(await self._refusing_row(exc, pk))
                for lease in attempts:
                    if holder.token == lease.lease_token:
                        return lease, Lock()  # it was ours at once, and the answer was lost
                if take_overs_left and holder.token and (take_over or is_left_behind(holder.token)):
                    take_overs_left -= 1
                    condition = FREE_OR_OURS
                    given |= values(token=holder.token)
                    continue
                until = with_accepted_end(holder, now, self.max_lease).held_until or now
                raise LeaseHeld(f"{pk}: held by another process until {until:.0f}", until) from exc
            return attempts[-1], lock_of(old)

    async def refresh(self, lease: FaceTheoryCacheLease, *, now: float) -> None:
        """UpdateItem: extend the lease if it is ours and live."""
        end = attributes(lease_expires_at=lease.lease_expires_at, ttl=lease.ttl)
        given = values(token=lease.lease_token, now=floor(now))
        if await self.update(lease.pk, LOCK, changes_of(end, LIVE, given)) is not None:
            raise _lost(lease.pk)

    async def release(self, pk: str, token: str, *, has_copy: bool, now: float) -> None:
        """DeleteItem, if the lease is ours. Without a copy a trace stays."""
        condition = f"{OURS} AND {FORGETTABLE}"
        given = values(token=token)
        try:
            if has_copy:
                await self.delete(pk, LOCK, condition, given)
            else:
                await self.put(lambda: trace_item(pk, now), condition, given)
        except ConditionFailed as exc:
            row = await self._refusing_row(exc, pk)
            if "failures" in row:
                await self._keep_ended(pk, token, {}, now=now)

    async def void(self, pk: str, lock: Item, *, has_copy: bool, now: float) -> None:
        """End the lease of any holder, if the row is as it was read.

        If it is not, the holder's lease has ended already. Without a copy a trace stays.
        """
        condition, given = as_read(lock, LOCK_FENCE)
        with suppress(ConditionFailed):
            if "failures" in lock:
                change = changes_of(ended_attributes(now), condition, given)
                await self.update(pk, LOCK, change)
            elif has_copy:
                await self.delete(pk, LOCK, condition, given)
            else:
                await self.put(lambda: trace_item(pk, now), condition, given)

    async def leave_trace(self, pk: str, lock: Item, *, now: float) -> None:
        """Replace the LOCK row, if it is as it was read, with a trace: all of it is deleted."""
        condition, given = as_read(lock, ["lease_token"])
        with suppress(ConditionFailed):
            await self.put(lambda: trace_item(pk, now), condition, given)

    async def delete_copy(self, pk: str, meta: Item) -> Item | None:
        """None if META was as it was read, and is deleted; else the row that is there."""
        try:
            await self.delete(pk, META, *as_read(meta, META_FENCE))
        except ConditionFailed as exc:
            return await self._refusing_row(exc, pk, META)
        return None

    async def _keep_ended(self, pk: str, token: str, noted: Item, *, now: float) -> None:
        """Keep the row for its failure, with no holder."""
        change = changes_of(ended_attributes(now) | noted, OURS, values(token=token))
        await self.update(pk, LOCK, change)

    async def fail(self, pk: str, token: str, failure: Failure, *, now: float) -> None:
        """End the lease and note the failure: with the copy, or in the lease's row without one."""
        noted = failure_attributes(failure)
        beside = {"Key": key_of(pk, META), **changes_of(noted, "attribute_exists(pk)")}
        end = deletion(pk, LOCK, OURS, values(token=token))
        try:
            await self.transact(("Update", beside), end)
        except ConditionFailed as exc:
            if exc.reasons[1:] == ("None",):  # it is ours, and there is no copy
                await self._keep_ended(pk, token, noted, now=now)

    async def note(self, pk: str, token: str, failure: Failure) -> None:
        """A new lease in the place of a row with a failure keeps that failure."""
        noted = failure_attributes(failure)
        await self.update(pk, LOCK, changes_of(noted, OURS, values(token=token)))

    async def publish(self, item: Item, token: str, *, name: str, now: float) -> None:
        """Put META, Delete LOCK, in one transaction; `LeaseLost`, and nothing was written."""
        pk = item["pk"]["S"]
        put = {"Item": item, "ConditionExpression": f"attribute_not_exists({CURRENT})"}
        end = deletion(pk, LOCK, LIVE, values(token=token, now=floor(now)))
        try:
            await self.transact(("Put", put), end, name=name)
        except ConditionFailed as exc:
            meta = await self.get(pk, META)
            if meta.get("s3_key") != item["s3_key"]:  # otherwise the first answer was lost
                raise _lost(pk) from exc

    async def replace(self, item: Item, entry: EntryRows, *, name: str) -> None:
        """Put META, Delete LOCK, in one transaction, if both rows are as they were read.

        ConditionFailed, and nothing was written.
        """
        pk = item["pk"]["S"]
        put = put_of(item, *as_read(entry.meta, META_FENCE))
        end = deletion(pk, LOCK, *as_read(entry.lock, ["lease_token"]))
        await self.transact(put, end, name=name)

    async def rows_met(self, refusal: ConditionFailed, pk: str, entry: EntryRows) -> EntryRows:
        """The rows as they are after `replace` was refused.

        They came with the refusal, except a row that is missing: then look again.
        """
        rows: list[Item] = []
        for reason, item, row in zip(
            refusal.reasons, refusal.items, (entry.meta, entry.lock), strict=False
        ):
            if reason == "None":  # its condition held: it is as it was read
                rows.append(row)
            elif item:
                rows.append(item)
        if len(rows) < 2:
            return await self.entry(pk)
        meta, lock = rows
        return EntryRows(meta, lock)

    async def mark(self, pk: str, meta: Item, mark: Mark) -> Item | None:
        """Set `revalidate_seconds` to zero if META is as it was read; a hard mark stays hard.

        None: it was done. Else the row that is there.
        """
        condition, given = as_read(meta, META_FENCE)
        return await self.update(pk, META, _marking(mark, condition, given))

    async def mark_version(self, pk: str, sk: str, mark: Mark) -> bool:
        """Mark a row of another service to which META points; True if there is such a row."""
        change = _marking(mark, "attribute_exists(revalidate_seconds)", {})
        return await self.update(pk, sk, change) is None

    async def write_tags(
        self, tags: Iterable[str], *, kind: str, id_: str, token: str, ttl: float, seen: str
    ) -> set[str]:
        """This entry is leased with these tags; rows of their own, so no index is needed.

        They are written before the load begins, outlive the copy, and are removed when they are
        found without an entry. `seen`: the lease that probably wrote the present ones. Returns the
        tags whose row somebody else had written meanwhile.
        """
        beside = attributes(kind=kind, id=id_, lease_token=token, ttl=ceil(ttl))
        pk = self.names.pk(kind, id_)

        async def write(tag: str) -> bool:
            return await self._write_tag(self.names.tag(tag), pk, beside, token, seen)

        taken = await each(tags, write)
        return {tag for tag, is_taken in taken.items() if is_taken}

    async def _write_tag(self, tag: str, pk: str, beside: Item, token: str, seen: str) -> bool:
        """Replace only the row that was seen, so that a late write replaces no later row.

        A holder whose lease was lost meanwhile stops: it cannot publish any more. A row that was
        seen while the lease was still ours is not from a later lease. True if the row was written
        by somebody else meanwhile: a put may rely on it.
        """
        sk = self.names.hashed(pk)
        row = key_of(tag, sk) | beside
        is_taken = False
        for _ in range(TRIES):
            other_writer = await self._replace_tag(row, {seen, token})
            if other_writer is None:
                return is_taken
            if lock_of(await self.get(pk, LOCK)).token != token:
                return is_taken
            seen = other_writer
            is_taken = True
        raise StoreError(
            f"{self.names.table}: other processes keep changing the row of a tag; try again"
        )

    async def write_put_tags(
        self,
        tags: Iterable[str],
        *,
        kind: str,
        id_: str,
        token: str,
        ttl: float,
        writers: Collection[str],
    ) -> bool:
        """The same for a put, which has no lease; False if other processes keep changing a row.

        `writers`: those that probably wrote the present rows.
        """
        pk = self.names.pk(kind, id_)
        beside = attributes(kind=kind, id=id_, lease_token=token, ttl=ceil(ttl))

        async def write(tag: str) -> bool:
            row = key_of(self.names.tag(tag), self.names.hashed(pk)) | beside
            expected = {*writers, token}
            for _ in range(TRIES):
                other_writer = await self._replace_tag(row, expected)
                if other_writer is None:
                    return True
                expected = {other_writer, token}
            return False

        return all((await each(tags, write)).values())

    async def _replace_tag(self, row: Item, writers: Collection[str]) -> str | None:
        """Write the row of a tag if it is missing or by one of these writers.

        Return None, or the other writer whose row is there.

        So a write that arrives late replaces no later row.
        """
        given = values(**{f"writer{at}": writer for at, writer in enumerate(sorted(writers))})
        condition = f"attribute_not_exists(lease_token) OR lease_token IN ({', '.join(given)})"
        try:
            await self.put(row, condition, given)
        except ConditionFailed as exc:
            other_row = await self._refusing_row(exc, row["pk"]["S"], row["sk"]["S"])
            return text(other_row, "lease_token") or ""
        return None

    async def _refusing_row(self, refusal: ConditionFailed, pk: str, sk: str = LOCK) -> Item:
        """The row that failed the condition."""
        return refusal.item or await self.get(pk, sk)

    async def publish_with_tags(
        self,
        publish: Callable[[], Awaitable[None]],
        claim: Claim,
        late: frozenset[str],
        *,
        kind: str,
        id_: str,
        token: str,
        ttl: float,
    ) -> None:
        """Run `publish`, which stores a copy that comes with the tags `late`.

        Their rows are written before it. Afterwards the rows of the replaced copy are dropped; if
        the lease was lost, these stay. No generator: a loop that ends would close it in the middle.
        """
        write = partial(self.write_tags, kind=kind, id_=id_, ttl=ttl)
        own = set(claim.tags)
        if ttl > claim.tagged_until:
            await write(claim.tags, token=token, seen=token)
        taken = await write(late - own, token=token, seen=claim.wrote)
        pk = self.names.pk(kind, id_)
        try:
            await publish()
        except LeaseLost:
            await self.drop_tags(late - claim.late - own - taken, pk, token)
            await write(late & claim.late, token=claim.wrote, seen=token)
            raise
        await self.drop_tags(claim.late - late - own, pk, claim.wrote)

    async def tagged(self, tag: str) -> dict[tuple[str, str], Item]:
        """The rows of entries that have the tag, by kind and id."""
        rows = await self.partition(self.names.tag(tag))
        return {
            (text(row, "kind") or "", text(row, "id") or ""): row
            for row in rows
            if row["sk"]["S"] != INVALIDATED
        }

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
        """The epoch of the last invalidation by tag, or an earlier one, which costs a load."""
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


def _marking(mark: Mark, condition: str, given: Item) -> dict[str, Any]:
    """The update that marks a copy; it remembers for how long the copy was fresh."""
    marked = ":mark" if mark is Mark.HARD else "if_not_exists(#mark, :mark)"
    changes = [
        "fresh_for = if_not_exists(fresh_for, revalidate_seconds)",
        "revalidate_seconds = :zero",
        f"#mark = {marked}",
        f"{VOIDED} = :invalidation",
    ]
    return {
        "UpdateExpression": "SET " + ", ".join(changes),
        "ConditionExpression": condition,
        "ExpressionAttributeNames": {"#mark": "mark"},
        "ExpressionAttributeValues": given
        | values(zero=0, mark=int(mark), invalidation=str(uuid4())),
    }


def _lost(pk: str) -> LeaseLost:
    return LeaseLost(f"{pk}: the lease is no longer ours: it ran out, or it was voided")
