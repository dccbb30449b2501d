"""Creates and describes the table and the bucket: `stillfresh table create|describe`."""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from stillfresh.errors import StoreError
from stillfresh.stores.aws import DENIED, AwsPlace, AwsRefused, AwsService, open_services
from stillfresh.stores.dynamodb.table import Table
from stillfresh.stores.meter import CostMeter

KEYS: Final = {"pk": "HASH", "sk": "RANGE"}
NO_TABLE: Final = "ResourceNotFoundException"
LOOKS: Final = 120
PAUSE: Final = 0.5
"""A new table is ready within seconds; the command waits for up to a minute."""

logger = logging.getLogger(__name__)


async def check_table(table: Table) -> None:
    """Raise if the table is missing or has other keys. If it does not answer, its use will show."""
    try:
        described = await table.describe()
    except AwsRefused as exc:
        if exc.code not in DENIED:
            raise
        logger.info("%s; the table's keys were not checked", exc)
    except StoreError as exc:
        logger.warning("%s; the table's keys were not checked", exc)
    else:
        _check_keys(table.names.table, described)


def _check_keys(name: str, described: dict[str, Any]) -> None:
    keys = {each["AttributeName"]: each["KeyType"] for each in described["KeySchema"]}
    types = {
        each["AttributeName"]: each["AttributeType"] for each in described["AttributeDefinitions"]
    }
    if keys != KEYS or any(types.get(key) != "S" for key in KEYS):
        has = ", ".join(f"{key} ({kind}, {types.get(key)})" for key, kind in keys.items())
        raise StoreError(
            f"table {name!r}: its keys are {has}; they must be pk (HASH, S) and sk (RANGE, S)"
        )


@dataclass(frozen=True, slots=True)
class TableState:
    """What `table describe` shows of a table and its bucket."""

    table: str
    status: str
    ttl_attribute: str | None
    """The attribute that DynamoDB's TTL uses; None: TTL is off."""
    rows: int
    """DynamoDB's own count, some hours old."""
    bytes: int
    bucket: str | None
    bucket_exists: bool


async def create(table: str, bucket: str | None, place: AwsPlace) -> TableState:
    """Create the table and the bucket; existing ones are not changed."""
    async with AsyncExitStack() as stack:
        dynamodb, s3 = await open_services(stack, place, (table, bucket), CostMeter())
        if not await _succeeds(dynamodb, "describe_table", NO_TABLE, TableName=table):
            await _create_table(dynamodb, table)
        if bucket is not None and not await _has_bucket(s3, bucket):
            region = s3.client.meta.region_name
            where: dict[str, Any] = {}
            if region != "us-east-1":  # S3's oldest region must not be named
                where["CreateBucketConfiguration"] = {"LocationConstraint": region}
            await s3.ask("create_bucket", Bucket=bucket, **where)
        return await _state(dynamodb, s3, table, bucket)


async def describe(table: str, bucket: str | None, place: AwsPlace) -> TableState:
    async with AsyncExitStack() as stack:
        dynamodb, s3 = await open_services(stack, place, (table, bucket), CostMeter())
        return await _state(dynamodb, s3, table, bucket)


async def _has_bucket(s3: AwsService, bucket: str) -> bool:
    return await _succeeds(s3, "head_bucket", "404", "NoSuchBucket", Bucket=bucket)


async def _succeeds(service: AwsService, operation: str, *codes: str, **arguments: Any) -> bool:  # noqa: ANN401
    """Send the request. False if the service refuses it with one of these codes."""
    try:
        await service.ask(operation, **arguments)
    except AwsRefused as exc:
        if exc.code not in codes:
            raise
        return False
    return True


async def _create_table(dynamodb: AwsService, table: str) -> None:
    await _succeeds(
        dynamodb,
        "create_table",
        "ResourceInUseException",  # the first answer was lost
        TableName=table,
        KeySchema=[{"AttributeName": key, "KeyType": kind} for key, kind in KEYS.items()],
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"} for key in KEYS],
        BillingMode="PAY_PER_REQUEST",
    )
    await _wait_until_ready(dynamodb, table)
    if await _ttl_attribute(dynamodb, table) is None:
        ttl = {"Enabled": True, "AttributeName": "ttl"}
        await dynamodb.ask("update_time_to_live", TableName=table, TimeToLiveSpecification=ttl)


async def _wait_until_ready(dynamodb: AwsService, table: str) -> None:
    for _ in range(LOOKS):
        described = await dynamodb.ask("describe_table", TableName=table)
        if described["Table"]["TableStatus"] == "ACTIVE":
            return
        await asyncio.sleep(PAUSE)
    raise StoreError(f"table {table!r}: not ready after {LOOKS * PAUSE:.0f} s")


async def _ttl_attribute(dynamodb: AwsService, table: str) -> str | None:
    answer = await dynamodb.ask("describe_time_to_live", TableName=table)
    about = answer["TimeToLiveDescription"]
    is_on = about.get("TimeToLiveStatus") in {"ENABLED", "ENABLING"}
    return str(about["AttributeName"]) if is_on else None


async def _state(
    dynamodb: AwsService, s3: AwsService, table: str, bucket: str | None
) -> TableState:
    described = (await dynamodb.ask("describe_table", TableName=table))["Table"]
    _check_keys(table, described)
    return TableState(
        table=table,
        status=described["TableStatus"],
        ttl_attribute=await _ttl_attribute(dynamodb, table),
        rows=described.get("ItemCount", 0),
        bytes=described.get("TableSizeBytes", 0),
        bucket=bucket,
        bucket_exists=bucket is not None and await _has_bucket(s3, bucket),
    )
