"""The schema's recipes: leases, publication, invalidation, tags (I3-I6).

Each is one conditional request, or one transaction. It raises `LeaseHeld` (another's),
`LeaseLost` (no longer yours) or `StoreError` (the store failed), and never takes one for another:
who is refused after a lost answer finds its own token in the row, and has won (S2).
"""

from collections.abc import Callable, Iterable
from math import ceil
from typing import Any, Final

from stillfresh.errors import LeaseHeld, LeaseLost, StoreError
from stillfresh.freshness import MAX_SKEW
from stillfresh.stores.aws import CONDITION, AwsRefused
from stillfresh.stores.contract import Failure, Mark
from stillfresh.stores.dynamodb.names import Names
from stillfresh.stores.dynamodb.rows import (
    CURRENT,
    RELEASED,
    Tagged,
    believed,
    failure_attributes,
    lock_of,
    tag_item,
    version_of,
)
from stillfresh.stores.dynamodb.schema import (
    LOCK,
    META,
    FaceTheoryCacheLease,
    Item,
    ended_at,
    key_of,
    text,
    whole,
)
from stillfresh.stores.dynamodb.table import FAILED_REASON, Table, changes_of, each, values

FREE: Final = (
    "attribute_not_exists(pk) OR lease_expires_at <= :now"
    # Further away than any lease ends (`max_lease`): from before the clock was set back.
    " OR lease_expires_at > :last"
    # A row without an end is no lease: nobody would ever be free of it.
    " OR NOT attribute_type(lease_expires_at, :number)"
)
OURS: Final = "lease_token = :token"
FREE_OR_OURS: Final = f"{FREE} OR {OURS}"
TAKE_OVERS: Final = 5
"""Holders in a row, each leasing before the last could be replaced."""
LIVE: Final = "lease_token = :token AND lease_expires_at > :now"
FORGETTABLE: Final = "attribute_not_exists(failures)"
TAGGED_FOR: Final = 30 * 86400
"""Seconds that a tag's row stays after the last lease; a copy that lives longer takes it along."""
UNCHANGED: Final = "attribute_not_exists(lease_token) OR lease_token IN (:seen, :token)"
TRIES: Final = 8


class Leases:
    """Of one table; `now` is the caller's clock, read for this step."""

    def __init__(self, table: Table, max_lease: float) -> None:
        self._table = table
        self._max_lease = max_lease

    async def acquire(
        self,
        pk: str,
        *,
        end: float,
        now: float,
        new_token: Callable[[], str],
        beside: Item | None = None,
        take_over: bool = False,
    ) -> tuple[FaceTheoryCacheLease, Item | None]:
        """I4: PutItem, unless it is held; with the row of the lease that it replaced.

        S8: each attempt has a token of its own. One that arrives after the others can take the
        lease, but never bring back a token that was granted, and voided since. E17: a request that
        takes a lease over names its holder, so that a late one voids no later lease.
        """
        attempts: list[FaceTheoryCacheLease] = []

        def attempt() -> Item:
            attempts.append(FaceTheoryCacheLease.until(pk, new_token(), end))
            return attempts[-1].item() | (beside or {})

        last = ended_at(max(now + self._max_lease, ended_at(end)) + MAX_SKEW)
        given = values(now=whole(now), last=last, number="N")
        free, left = FREE, TAKE_OVERS if take_over else 0
        while True:
            try:
                old = await self._table.put(attempt, free, given)
            except AwsRefused as exc:
                holder = await self._holder(exc, pk)
                token = text(holder, "lease_token")
                for lease in attempts:
                    if token == lease.lease_token:
                        return lease, None  # it was ours at once, and the answer got lost
                if left and token:
                    left, free, given = left - 1, FREE_OR_OURS, given | values(token=token)
                    continue
                until = believed(lock_of(holder), now, self._max_lease).held_until or now
                raise LeaseHeld(f"{pk}: held by another until {until:.0f}", until) from exc
            return attempts[-1], old

    async def _holder(self, exc: AwsRefused, pk: str) -> Item:
        """The row that failed the condition; any other refusal is the store's failure."""
        if exc.code != CONDITION:
            raise exc
        return exc.item or await self._table.get(pk, LOCK) or {}

    async def refresh(self, lease: FaceTheoryCacheLease, *, now: float) -> None:
        """I4: UpdateItem, to the lease's new end, if it is ours and live."""
        item = lease.item()
        change = changes_of(
            {name: item[name] for name in ("lease_expires_at", "ttl")},
            LIVE,
            values(token=lease.lease_token, now=whole(now)),
        )
        if not await self._table.update(lease.pk, LOCK, change):
            raise _lost(lease.pk)

    async def release(self, pk: str, token: str, *, now: float) -> None:
        """I4: DeleteItem, if it is ours; what is not ours is not ours to release."""
        await self._end(pk, f"{OURS} AND {FORGETTABLE}", token, now=now)

    async def void(self, pk: str, *, now: float) -> bool:
        """I3: whoever holds it; whether there was a row."""
        return await self._end(pk, FORGETTABLE, None, now=now)

    async def _end(self, pk: str, condition: str, token: str | None, *, now: float) -> bool:
        """A row that remembers a failure stays, as a lease that has ended."""
        given = {} if token is None else values(token=token)
        try:
            return await self._table.delete(pk, LOCK, condition, given) is not None
        except AwsRefused as exc:
            row = await self._holder(exc, pk)
            if "failures" not in row:
                return False
            return await self._keep_ended(pk, token or text(row, "lease_token"), {}, now=now)

    async def _keep_ended(self, pk: str, token: str | None, noted: Item, *, now: float) -> bool:
        """Nobody's any more, free for the next one, and remembering why."""
        ended = {"lease_token": {"S": RELEASED}, "lease_expires_at": {"N": str(whole(now))}}
        change = changes_of(ended | noted, OURS, values(token=token or RELEASED))
        return await self._table.update(pk, LOCK, change)

    async def fail(self, pk: str, token: str, failure: Failure, *, now: float) -> None:
        """End the lease and note the failure: with the copy, or in the lease's row without one."""
        noted = failure_attributes(failure)
        beside = {"Key": key_of(pk, META), **changes_of(noted, "attribute_exists(pk)")}
        end = _delete_lock(pk, OURS, values(token=token))
        try:
            await self._table.transact(("Update", beside), ("Delete", end))
        except AwsRefused as exc:
            if FAILED_REASON not in exc.reasons:
                raise
            if exc.reasons == (FAILED_REASON, "None"):
                await self._keep_ended(pk, token, noted, now=now)

    async def note(self, pk: str, token: str, failure: Failure) -> None:
        """A lease in the place of a row that remembered a failure goes on remembering it."""
        change = changes_of(failure_attributes(failure), OURS, values(token=token))
        await self._table.update(pk, LOCK, change)

    async def publish(self, item: Item, token: str, *, name: str, now: float) -> None:
        """I5: Put META, Delete LOCK, in one transaction; `LeaseLost`, and nothing was written."""
        pk = item["pk"]["S"]
        end = _delete_lock(pk, LIVE, values(token=token, now=whole(now)))
        try:
            put = {"Item": item, "ConditionExpression": f"attribute_not_exists({CURRENT})"}
            await self._table.transact(("Put", put), ("Delete", end), name=name)
        except AwsRefused as exc:
            if FAILED_REASON not in exc.reasons:
                raise
            stored = await self._table.get(pk, META) or {}
            if stored.get("s3_key") != item["s3_key"]:  # else the first answer got lost
                raise _lost(pk) from exc

    async def mark(self, pk: str, mark: Mark) -> bool:
        """I3: `revalidate_seconds` becomes zero if there is a row; a mark never goes down.

        I19: it stands in the row of the version where META only points there.
        """
        marked = ":mark" if mark is Mark.HARD else "if_not_exists(#mark, :mark)"
        change = {
            "UpdateExpression": "SET fresh_for = if_not_exists(fresh_for, revalidate_seconds),"
            f" revalidate_seconds = :zero, #mark = {marked}",
            "ConditionExpression": "attribute_exists(revalidate_seconds)"
            f" AND attribute_not_exists({CURRENT})",
            "ExpressionAttributeNames": {"#mark": "mark"},
            "ExpressionAttributeValues": values(zero=0, mark=int(mark)),
        }
        refused = await self._table.refused_by(pk, META, change)
        version = version_of(refused or {})
        if refused is None or version is None:
            return refused is None
        return await self._table.update(pk, version, change)


class Tags:
    """Tags as rows of their own, so that no index is asked of the table (I6).

    A row says: this entry was leased with this tag. It is written before the load begins, outlives
    the copy, and is taken away when it is found to speak of nothing.
    """

    def __init__(self, table: Table, names: Names) -> None:
        self._table = table
        self._names = names

    async def write(
        self, tags: Iterable[str], *, kind: str, id_: str, token: str, ttl: float, seen: str
    ) -> None:
        """`seen`: the lease that probably wrote the rows that are there."""
        items = {
            tag: tag_item(self._names, tag, kind=kind, id_=id_, token=token, ttl=ceil(ttl))
            for tag in tags
        }
        await each(items, lambda tag: self._write(items[tag], seen))

    async def _write(self, item: Item, seen: str) -> None:
        """In the place of a row that was seen: one that arrives late replaces no later one (S8).

        Nor does a holder whose lease was lost meanwhile, and that cannot publish any more: a row
        that was seen while the lease still was ours is no later one's.
        """
        pk, sk, token = (item[name]["S"] for name in ("pk", "sk", "lease_token"))
        for _ in range(TRIES):
            try:
                await self._table.put(item, UNCHANGED, values(seen=seen, token=token))
            except AwsRefused as exc:
                if exc.code != CONDITION:
                    raise
                seen = text(exc.item or await self._table.get(pk, sk) or {}, "lease_token") or ""
                lock = await self._table.get(sk, LOCK) or {}
                if text(lock, "lease_token") != token:
                    return
            else:
                return
        raise StoreError(f"{self._names.table}: others keep changing the row of a tag")

    async def remove(self, tagged: Tagged, pk: str, *, but: Iterable[str] = ()) -> None:
        """Those that these leases wrote: a later one's speak of its load, and stay."""
        rows = [
            (self._names.tag(tag), token)
            for tag in tagged.tags - set(but)
            for token in tagged.tokens
        ]
        await each(rows, lambda row: self._table.delete_if(row[0], pk, lease_token=row[1]))

    async def rows(self, tag: str) -> list[Item]:
        return [row async for page in self._table.partition(self._names.tag(tag)) for row in page]

    async def drop(self, row: Item) -> None:
        """Of an entry that is gone; not if it was leased again since the row was read."""
        unchanged = {"lease_token": text(row, "lease_token") or ""}
        await self._table.delete_if(row["pk"]["S"], row["sk"]["S"], **unchanged)


def _delete_lock(pk: str, condition: str, given: Item) -> dict[str, Any]:
    return {
        "Key": key_of(pk, LOCK),
        "ConditionExpression": condition,
        "ExpressionAttributeValues": given,
    }


def _lost(pk: str) -> LeaseLost:
    return LeaseLost(f"{pk}: the lease is no longer ours: it ran out, or it was voided")
