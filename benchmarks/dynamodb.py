"""I7: the DynamoDB store against the bare client, asking the same server for the same rows."""

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Contender, Figures, Progress, Row, Section, race_on_loop
from stillfresh import Policy
from stillfresh.stores.contract import Ask, Copy, Lease

__all__ = ["section"]

KIND, KEY = "price", "sku-1"
KEYS = [KEY] * 20
HIT, BARE_HIT = "`read` of a fresh copy", "the bare `get_item` and `get_object`"
KNOWN, BARE_KNOWN = "`read` of a copy that the reader has", "the bare `get_item`"
LEASE, BARE_LEASE = "`acquire` and `release`", "the bare `put_item`, `get_item` and `delete_item`"
FREE = "attribute_not_exists(pk) OR lease_expires_at <= :now"


class Bare:
    """The requests that the store makes, and nothing around them."""

    def __init__(self, raw: Any, row: dict[str, Any]) -> None:  # noqa: ANN401 (untyped clients)
        self._raw = raw
        self._key = {name: row[name] for name in ("pk", "sk")}
        self._lock = {"pk": {"S": "CACHE#bare"}, "sk": {"S": "LOCK"}}
        self._s3_key = row["s3_key"]["S"]
        self._own = {"TableName": raw.table, "ReturnConsumedCapacity": "TOTAL"}

    async def get(self) -> None:
        await self._raw.dynamodb.get_item(Key=self._key, ConsistentRead=True, **self._own)

    async def get_both(self) -> None:
        await self.get()
        answer = await self._raw.s3.get_object(Bucket=self._raw.bucket, Key=self._s3_key)
        async with answer["Body"] as stream:
            await stream.read()

    async def lease(self) -> None:
        lease = {"lease_token": {"S": "token"}, "lease_expires_at": {"N": "2000000000"}}
        await self._raw.dynamodb.put_item(
            Item=self._lock | lease,
            ConditionExpression=FREE,
            ExpressionAttributeValues={":now": {"N": "1"}},
            **self._own,
        )
        await self.get()
        await self._raw.dynamodb.delete_item(
            Key=self._lock,
            ConditionExpression="lease_token = :token",
            ExpressionAttributeValues={":token": {"S": "token"}},
            **self._own,
        )


async def lease_round(store: Any) -> None:  # noqa: ANN401 (its library may not be there)
    grant = (await store.acquire(KIND, [Ask("leased")], 60))["leased"]
    await store.release(KIND, [grant])


async def measured(aws: Any) -> Figures:  # noqa: ANN401 (as above)
    table = aws.new_table()
    store = aws.store(table)
    await store.open()
    lease = (await store.acquire(KIND, [Ask(KEY)], 60))[KEY]
    if not isinstance(lease, Lease):
        raise TypeError(f"not granted: {lease}")
    copy = Copy(lease.token, time.time(), Policy(3600), b"x" * 10_000)
    await store.publish(KIND, {KEY: (lease, copy)})
    async with aws.raw(table) as raw:
        bare = Bare(raw, (await raw.rows())[0])
        await bare.get_both()  # the S3 server's first answer takes it seconds on a busy machine
        names = {"store": store, "kind": KIND, "known": {KEY: lease.token}, "bare": bare}
        contenders = [
            Contender(HIT, "await store.read(kind, [key])", names, KEYS),
            Contender(BARE_HIT, "await bare.get_both()", names, KEYS),
            Contender(KNOWN, "await store.read(kind, [key], known)", names, KEYS),
            Contender(BARE_KNOWN, "await bare.get()", names, KEYS),
            Contender(LEASE, "await round(store)", names | {"round": lease_round}, KEYS),
            Contender(BARE_LEASE, "await bare.lease()", names, KEYS),
        ]
        figures = await race_on_loop(contenders, rounds=21)
    await store.close()
    return figures


def section(progress: Progress) -> Section:
    title = "DynamoDB and S3 (S6)"
    try:
        from tests.kit.servers import (  # noqa: PLC0415 (where the servers are is the tests' knowledge)
            aws as aws_servers,
        )
    except ModuleNotFoundError as exc:
        return Section(title, missing=f"{exc.name} is not installed")
    if why := aws_servers.missing():
        return Section(title, missing=why)
    progress("asking DynamoDB and S3")
    os.environ.update(aws_servers.ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder, aws_servers.both(Path(folder)) as aws:
        figures = asyncio.run(measured(aws))
    pairs = [(HIT, BARE_HIT), (KNOWN, BARE_KNOWN), (LEASE, BARE_LEASE)]
    rows = [
        Row("I7", f"{ours}, against {bare}", figures[ours] / figures[bare]) for ours, bare in pairs
    ]
    micro = {name: value / 1000 for name, value in figures.items()}
    return Section(title, rows, {"One key, on loopback, µs": micro})
