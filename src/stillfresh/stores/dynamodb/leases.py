"""The schema's recipes: leases, publication, invalidation (I3-I5); tags are in `tags.py`.

Each is one conditional request, or one transaction. It raises `LeaseHeld` (another process has it),
`LeaseLost` (no longer ours) or `StoreError` (the store failed), and never confuses them: a request
that is refused after a lost answer finds its own token in the row, and has won (S2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, Final

from stillfresh.errors import LeaseHeld, LeaseLost
from stillfresh.freshness import MAX_SKEW
from stillfresh.stores.aws import ConditionFailed
from stillfresh.stores.contract import Failure, Mark
from stillfresh.stores.dynamodb.rows import (
    CURRENT,
    RELEASED,
    Lock,
    believed,
    failure_attributes,
    lock_of,
    version_of,
)
from stillfresh.stores.dynamodb.schema import (
    LOCK,
    META,
    FaceTheoryCacheLease,
    Item,
    attributes,
    key_of,
    text,
)
from stillfresh.stores.dynamodb.table import changes_of, values
from stillfresh.stores.dynamodb.tags import OURS, TagRows

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
class Leases(TagRows):
    """The leases, copies and tags of one table; `now` is the caller's clock, read for this step."""

    max_lease: float = 0.0

    async def acquire(
        self,
        pk: str,
        *,
        end: float,
        now: float,
        new_token: Callable[[], str],
        beside: Item | None = None,
        take_over: bool = False,
    ) -> tuple[FaceTheoryCacheLease, Lock]:
        """I4: PutItem, unless it is held; with the lease that it replaced.

        S8: each attempt has a token of its own. One that arrives after the others can take the
        lease, but never bring back a token that was granted, and voided since. E17: a request that
        takes a lease over names its holder, so that a late one voids no later lease.
        """
        attempts: list[FaceTheoryCacheLease] = []

        def attempt() -> Item:
            attempts.append(FaceTheoryCacheLease.until(pk, new_token(), end))
            return attempts[-1].item() | (beside or {})

        last = ceil(max(now + self.max_lease, ceil(end)) + MAX_SKEW)
        given = values(now=floor(now), last=last, number="N")
        free, left = FREE, TAKE_OVERS if take_over else 0
        while True:
            try:
                old = await self.put(attempt, free, given)
            except ConditionFailed as exc:
                holder = lock_of(await self._met(exc, pk))
                for lease in attempts:
                    if holder.token == lease.lease_token:
                        return lease, Lock()  # it was ours at once, and the answer was lost
                if left and holder.token:
                    left, free = left - 1, FREE_OR_OURS
                    given |= values(token=holder.token)
                    continue
                until = believed(holder, now, self.max_lease).held_until or now
                raise LeaseHeld(f"{pk}: held by another process until {until:.0f}", until) from exc
            return attempts[-1], lock_of(old)

    async def refresh(self, lease: FaceTheoryCacheLease, *, now: float) -> None:
        """I4: UpdateItem: extend the lease if it is ours and live."""
        end = attributes(lease_expires_at=lease.lease_expires_at, ttl=lease.ttl)
        given = values(token=lease.lease_token, now=floor(now))
        if await self.update(lease.pk, LOCK, changes_of(end, LIVE, given)) is not None:
            raise _lost(lease.pk)

    async def release(self, pk: str, token: str, *, now: float) -> None:
        """I4: DeleteItem, if the lease is ours."""
        await self._end(pk, f"{OURS} AND {FORGETTABLE}", token, now=now)

    async def void(self, pk: str, *, now: float) -> bool:
        """I3: end the lease of any holder; return whether there was a row."""
        return await self._end(pk, FORGETTABLE, None, now=now)

    async def _end(self, pk: str, condition: str, token: str | None, *, now: float) -> bool:
        """A row with a failure stays, as a lease that has ended."""
        given = None if token is None else values(token=token)
        try:
            return bool(await self.delete(pk, LOCK, condition, given))
        except ConditionFailed as exc:
            row = await self._met(exc, pk)
            if "failures" not in row:
                return False
            return await self._keep_ended(pk, token or text(row, "lease_token"), {}, now=now)

    async def _keep_ended(self, pk: str, token: str | None, noted: Item, *, now: float) -> bool:
        """Keep the row for its failure, with no holder."""
        ended = attributes(lease_token=RELEASED, lease_expires_at=floor(now))
        change = changes_of(ended | noted, OURS, values(token=token or RELEASED))
        return await self.update(pk, LOCK, change) is None

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
        """I5: Put META, Delete LOCK, in one transaction; `LeaseLost`, and nothing was written."""
        pk = item["pk"]["S"]
        put = {"Item": item, "ConditionExpression": f"attribute_not_exists({CURRENT})"}
        end = deletion(pk, LOCK, LIVE, values(token=token, now=floor(now)))
        try:
            await self.transact(("Put", put), end, name=name)
        except ConditionFailed as exc:
            if (await self.get(pk, META)).get("s3_key") != item[
                "s3_key"
            ]:  # otherwise the first answer was lost
                raise _lost(pk) from exc

    async def mark(self, pk: str, mark: Mark) -> bool:
        """I3: `revalidate_seconds` becomes zero if there is a row; a hard mark stays hard.

        I19: if META points to a version's row, that row gets the mark.
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
        refused = await self.update(pk, META, change)
        if refused and (version := version_of(refused)) is not None:
            refused = await self.update(pk, version, change)
        return refused is None


def deletion(pk: str, sk: str, condition: str, given: Item) -> tuple[str, dict[str, Any]]:
    """A deletion as an action of a transaction."""
    what = {"Key": key_of(pk, sk), "ConditionExpression": condition}
    return "Delete", what | ({"ExpressionAttributeValues": given} if given else {})


def _lost(pk: str) -> LeaseLost:
    return LeaseLost(f"{pk}: the lease is no longer ours: it ran out, or it was voided")
