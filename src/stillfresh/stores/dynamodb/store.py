"""The DynamoDB store: rows in one table, values in S3.

It maps the contract to the steps of `steps.py` and `puts.py`. One request for each row, some at a
time: DynamoDB has no step for many rows that succeed or fail one by one. No work is done before
`open`.
"""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from copy import copy
from dataclasses import replace
from typing import Final
from uuid import uuid4

from stillfresh.checks import checked_unicode
from stillfresh.clock import Clock
from stillfresh.durations import Duration, seconds
from stillfresh.errors import STORE_CLOSED, ConfigError, NotOpen, shown
from stillfresh.stores.aws import AwsPlace, open_services
from stillfresh.stores.bodies import S3Bodies, Shape, Trash
from stillfresh.stores.capabilities import (
    CountsEntries,
    EvictsEntries,
    HasAddress,
    ListsEntries,
    SeparatesTenants,
    ShapesValues,
)
from stillfresh.stores.contract import (
    After,
    Ask,
    Copy,
    Failures,
    Generations,
    Grant,
    LateTags,
    Lease,
    Mark,
    Put,
    PutResult,
    Record,
    Store,
    StoredEntry,
    StoreStats,
)
from stillfresh.stores.dynamodb.admin import check_table
from stillfresh.stores.dynamodb.leases import Leases
from stillfresh.stores.dynamodb.puts import DynamoPut
from stillfresh.stores.dynamodb.scanning import TableScan
from stillfresh.stores.dynamodb.schema import TABLE_VARIABLE, Names
from stillfresh.stores.dynamodb.steps import DynamoSteps
from stillfresh.stores.dynamodb.table import each
from stillfresh.stores.meter import CostMeter
from stillfresh.stores.rules import checked_limit
from stillfresh.stores.tenants import checked_tenant

EVENTUALLY: Final = 1.0
"""Seconds of lag that an eventually consistent read needs to be allowed."""
LONGEST_PREFIX: Final = 200
"""Bytes: an S3 key has 1,024, also for the table, the tenant, a hash and a token."""


class DynamoStore(
    Store, ListsEntries, EvictsEntries, CountsEntries, SeparatesTenants, ShapesValues, HasAddress
):
    """Items in a DynamoDB table, values in an S3 bucket. Any number of machines may share them.

    Opened by its address, `dynamodb://table?bucket=name`, or made here. Raises ConfigError.

    Args:
        table: The table's name; None: from `FACETHEORY_CACHE_TABLE_NAME`.
        bucket: The bucket for values.
        tenant: Keeps entries apart from those of other tenants.
        pk: How a partition key is made: `"sha256"`, or `"raw"` as FaceTheory does.
        s3_prefix: What object keys begin with; empty: the table's name.
        s3_key: `"whole"`: an item names the whole object key; `"short"`: without the prefix.
        region: The AWS region; None: from AWS's settings.
        endpoint: The address of another DynamoDB server.
        s3_endpoint: The address of another S3 server.
        retention: How long DynamoDB keeps an item after it is stale; longer if its terms are.
        delete_after: How long a replaced value stays in S3 for readers that are under way.
        max_lease: A lease that ends later than this from now is over.
        shapes: How the values of a kind are stored, where not as they are.
    """

    evicts_hourly = False
    """The table's TTL deletes rows. `evict` reads the whole table, so it runs only on request."""

    def __init__(
        self,
        table: str | None = None,
        *,
        bucket: str,
        tenant: str | None = None,
        pk: str = "sha256",
        s3_prefix: str = "",
        s3_key: str = "whole",
        region: str | None = None,
        endpoint: str | None = None,
        s3_endpoint: str | None = None,
        retention: Duration = "7d",
        delete_after: Duration = "60s",
        max_lease: Duration = "15m",
        shapes: Mapping[str, Shape] | None = None,
        clock: Clock = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        dice: Callable[[], float] = random.random,
        new_token: Callable[[], str] = lambda: str(uuid4()),  # the form in every language
    ) -> None:
        bucket = _checked_name(bucket, "bucket")
        self.tenant = checked_tenant(tenant)
        self._names = Names(
            table_name(table),
            self.tenant,
            bucket,
            is_raw=_is_other("pk", pk, "sha256", "raw"),
            prefix=_checked_prefix(s3_prefix),
            is_short=_is_other("s3_key", s3_key, "whole", "short"),
        )
        self._place = AwsPlace(region, endpoint, s3_endpoint)
        self._retention = seconds(retention, name="retention")
        self._delete_after = seconds(delete_after, name="delete_after")
        self._max_lease = seconds(max_lease, name="max_lease", positive=True)
        self.shapes: dict[str, Shape] = dict(shapes or {})
        """A kind that is not in it is stored unchanged."""
        self._clock = clock
        self._sleep = sleep
        self._dice = dice
        self._new_token = new_token
        self._meter = CostMeter()
        self._steps: DynamoSteps | None = None
        self._stack = AsyncExitStack()

    def for_tenant(self, tenant: str) -> "DynamoStore":
        """The same table and bucket for this tenant; a store of its own, not opened yet."""
        other = copy(self)
        other.shapes = dict(self.shapes)
        other.tenant = checked_tenant(tenant)
        names = replace(self._names, tenant=tenant)
        closed = {"_steps": None, "_stack": AsyncExitStack(), "_meter": CostMeter()}
        vars(other).update(closed, _names=names)
        return other

    async def open(self) -> None:
        """Raise if the table is missing or has other keys; an unavailable one raises later."""
        if self._steps is not None:
            return
        async with AsyncExitStack() as stack:
            steps = await self._connect(stack)
            if self._steps is None:  # otherwise another call was quicker
                self._steps = steps
                self._stack = stack.pop_all()

    async def _connect(self, stack: AsyncExitStack) -> DynamoSteps:
        """The steps, over clients that the stack closes."""
        names = self._names
        dynamodb, s3 = await open_services(
            stack,
            self._place,
            (names.table, names.bucket),
            self._meter,
            sleep=self._sleep,
            dice=self._dice,
        )
        table = Leases(dynamodb, names, max_lease=self._max_lease)
        await check_table(table)
        bodies = S3Bodies(s3, names.bucket)
        trash = Trash(bodies, self._delete_after, self._clock, self._sleep)
        stack.push_async_callback(trash.close)
        return DynamoSteps(
            table, bodies, self.shapes, self._clock, trash, self._retention, self._new_token
        )

    async def close(self) -> None:
        """Bodies that may still be read are left to the next eviction."""
        self._steps = None
        stack = self._stack
        self._stack = AsyncExitStack()
        await stack.aclose()

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        """With enough allowed lag, an eventually consistent read at half the price."""
        return await self._opened().read(kind, ids, known or {}, lagging=lag >= EVENTUALLY)

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        for ask in asks:
            _check_tagged(kind, ask)
        steps = self._opened()
        by_id = {ask.id: ask for ask in asks}
        return await each(by_id, lambda id_: steps.acquire(kind, by_id[id_], lease_for))

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        steps = self._opened()
        late = tags or {}
        for id_, late_tags in late.items():
            _check_tagged(kind, Ask(id_, tags=late_tags))
        stored = await each(
            copies, lambda id_: steps.publish(kind, id_, *copies[id_], late.get(id_))
        )
        return {id_ for id_, is_stored in stored.items() if not is_stored}

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        """AGAIN only if other processes change the entry faster than the put comes through."""
        steps = self._opened()
        for id_, put in puts.items():
            _check_tagged(kind, Ask(id_, tags=(*(put.tags or ()), *(put.late or ()))))
        return await each(puts, lambda id_: DynamoPut(steps, kind, id_, puts[id_]).run())

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        steps = self._opened()
        renewed = await each(leases, lambda lease: steps.renew(kind, lease, lease_for))
        return {lease.id for lease, is_renewed in renewed.items() if not is_renewed}

    async def release(self, kind: str, leases: Sequence[Lease], failures: Failures = None) -> None:
        steps = self._opened()
        failed = failures or {}
        await each(leases, lambda lease: steps.release(kind, lease, failed.get(lease.id)))

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        urgent = self._opened().urgent()
        mark = Mark.SOFT if soft else Mark.HARD
        await each(ids, lambda id_: urgent.invalidate(self._names.pk(kind, id_), mark))

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        urgent = self._opened().urgent()
        return await urgent.invalidate_tag(tag, Mark.SOFT if soft else Mark.HARD)

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        urgent = self._opened().urgent()
        await each(ids, lambda id_: urgent.delete(self._names.pk(kind, id_)))

    async def evict(self, before: float) -> int:
        """Read the whole table and list the bucket: run it in one place, once a day."""
        return await self._scan().evict(before)

    async def stats(self) -> StoreStats:
        return await self._scan().stats(self._meter)

    async def entries(
        self, kind: str | None = None, search: str = "", after: After = None, limit: int = 100
    ) -> list[StoredEntry]:
        """Read rows until enough are found; pages of other services are listed by their rows."""
        return await self._scan().entries(kind, search, after, checked_limit(limit))

    def _opened(self) -> DynamoSteps:
        if self._steps is None:
            raise NotOpen(STORE_CLOSED)
        return self._steps

    def _scan(self) -> TableScan:
        steps = self._opened()
        return TableScan(steps.table, steps.bodies, steps.clock)


def table_name(table: str | None) -> str:
    """The given name, or that of the environment variable."""
    name = os.environ.get(TABLE_VARIABLE, "") if table in {None, ""} else table
    if not name:
        raise ConfigError(f"table: name it in the address, or in {TABLE_VARIABLE}")
    return _checked_name(name, "table")


def _is_other(name: str, given: object, usual: str, other: str) -> bool:
    if given not in {usual, other}:
        raise ConfigError(f"{name}: must be {usual} or {other}, not {shown(given)}")
    return given == other


def _checked_prefix(prefix: object) -> str:
    """The prefix with exactly one slash at its end."""
    if not isinstance(prefix, str) or len(checked_unicode("s3_prefix", prefix)) > LONGEST_PREFIX:
        raise ConfigError(
            f"s3_prefix: must be text such as isr/, of at most {LONGEST_PREFIX} bytes, "
            f"not {shown(prefix)}"
        )
    bare = prefix.strip("/")
    return f"{bare}/" if bare else ""


def _check_tagged(kind: str, ask: Ask) -> None:
    """Kind and id are stored as hashes, unless there are tags: then they are read back."""
    if ask.tags:
        for what, given in [("kind", kind), ("id", ask.id), *(("tag", tag) for tag in ask.tags)]:
            checked_unicode(what, given)


def _checked_name(name: object, what: str) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what}: must be a name, not {shown(name)}")
    return name
