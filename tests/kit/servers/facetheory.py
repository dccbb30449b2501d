"""A FaceTheory service on the table and the bucket that we share: a stand-in, for want of the real.

FaceTheory and TableTheory are released on their own pages only: no package registry has them. So
this is written from the schema (seed 004) and from how their public source (TypeScript) behaves:
keys, pointers, metadata, conditions, and the blocking regeneration of pages.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from uuid import uuid4

from botocore.exceptions import ClientError

from stillfresh import Clock
from stillfresh.isr import Page
from tests.kit.servers.aws import Raw

HTML = "text/html; charset=utf-8"
POLICY = "content-security-policy"


@dataclass(frozen=True)
class FaceAnswer:
    """What its visitor gets; `state` as in `x-facetheory-isr`."""

    status: int
    headers: dict[str, str]
    body: bytes
    state: str


def raw_pk(cache_key: str) -> str:
    """Its default."""
    return f"CACHE#{cache_key}"


@dataclass
class FaceTheory:
    raw: Raw
    clock: Clock
    pk_of: Callable[[str], str] = raw_pk
    pointer_prefix: str = "isr/"
    """`htmlPointerPrefix`: in `s3_key`, and so in the object's name."""
    key_prefix: str = ""
    """`S3HtmlStore({ keyPrefix })`: in the object's name, not in `s3_key`."""
    lease_seconds: int = 5
    revalidate: int = 60
    renders: list[str] = field(default_factory=list)

    def _key(self, cache_key: str, sk: str) -> dict[str, Any]:
        return {"pk": {"S": self.pk_of(cache_key)}, "sk": {"S": sk}}

    async def meta(self, cache_key: str) -> dict[str, Any] | None:
        found = await self.raw.dynamodb.get_item(
            TableName=self.raw.table, Key=self._key(cache_key, "META"), ConsistentRead=True
        )
        row: dict[str, Any] | None = found.get("Item")
        return row

    async def try_lease(self, cache_key: str) -> str | None:
        """Its token; None: held by another."""
        token, now = str(uuid4()), int(self.clock())
        ends = now + self.lease_seconds
        row = {
            **self._key(cache_key, "LOCK"),
            "lease_token": {"S": token},
            "lease_expires_at": {"N": str(ends)},
            "ttl": {"N": str(ends + 3600)},
        }
        try:
            await self.raw.dynamodb.put_item(
                TableName=self.raw.table,
                Item=row,
                ConditionExpression="attribute_not_exists(#pk) OR #exp <= :now",
                ExpressionAttributeNames={"#pk": "pk", "#exp": "lease_expires_at"},
                ExpressionAttributeValues={":now": {"N": str(now)}},
            )
        except self.raw.dynamodb.exceptions.ConditionalCheckFailedException:
            return None
        return token

    async def release(self, cache_key: str, token: str) -> None:
        with suppress(self.raw.dynamodb.exceptions.ConditionalCheckFailedException):
            await self.raw.dynamodb.delete_item(
                TableName=self.raw.table,
                Key=self._key(cache_key, "LOCK"),
                ConditionExpression="lease_token = :token",
                ExpressionAttributeValues={":token": {"S": token}},
            )

    async def commit(self, cache_key: str, token: str, page: Page) -> None:
        """The object first, then META and LOCK in one transaction."""
        now, digest = int(self.clock()), sha256(cache_key.encode()).hexdigest()[:24]
        pointer = f"{self.pointer_prefix}{digest}/{now * 1000}-{uuid4()}.html"
        kind = page.headers.get("content-type", HTML)
        about = {"facetheory-status": str(page.status), "facetheory-content-type": kind}
        if policy := page.headers.get(POLICY):
            about[f"facetheory-{POLICY}"] = policy
        written = await self.raw.s3.put_object(
            Bucket=self.raw.bucket,
            Key=self.key_prefix + pointer,
            Body=page.body,
            ContentType=kind,
            Metadata=about,
        )
        meta = {
            **self._key(cache_key, "META"),
            "s3_key": {"S": pointer},
            "generated_at": {"N": str(now)},
            "revalidate_seconds": {"N": str(self.revalidate)},
            "etag": {"S": page.headers.get("etag") or written["ETag"]},
        }
        end = {
            "Key": self._key(cache_key, "LOCK"),
            "ConditionExpression": "lease_token = :token AND lease_expires_at > :now",
            "ExpressionAttributeValues": {":token": {"S": token}, ":now": {"N": str(now)}},
        }
        table = {"TableName": self.raw.table}
        put, delete = {"Put": {**table, "Item": meta}}, {"Delete": {**table, **end}}
        await self.raw.dynamodb.transact_write_items(TransactItems=[put, delete])

    async def stored(self, row: dict[str, Any] | None, state: str) -> FaceAnswer | None:
        """As it answers from what lies there: HTML with status 200, unless the object says more."""
        if row is None:
            return None
        key = self.key_prefix + row["s3_key"]["S"]
        try:
            found = await self.raw.s3.get_object(Bucket=self.raw.bucket, Key=key)
        except ClientError:
            return None
        async with found["Body"] as stream:
            body = await stream.read()
        about = found["Metadata"]
        headers = {"content-type": about.get("facetheory-content-type", HTML)}
        if policy := about.get(f"facetheory-{POLICY}"):
            headers[POLICY] = policy
        if "etag" in row:
            headers["etag"] = row["etag"]["S"]
        return FaceAnswer(int(about.get("facetheory-status", 200)), headers, body, state)

    async def visit(self, cache_key: str, render: Callable[[], Awaitable[Page]]) -> FaceAnswer:
        """A fresh page, or one that it renders before it answers, or waits for."""
        while True:
            row = await self.meta(cache_key)
            seconds = ("generated_at", "revalidate_seconds")
            ends = 0 if row is None else sum(int(row[name]["N"]) for name in seconds)
            if self.clock() < ends and (hit := await self.stored(row, "hit")):
                return hit
            if (token := await self.try_lease(cache_key)) is not None:
                break
            await asyncio.sleep(0.02)
        try:
            self.renders.append(cache_key)
            await self.commit(cache_key, token, await render())
        finally:
            await self.release(cache_key, token)
        made = await self.stored(await self.meta(cache_key), "miss")
        assert made is not None
        return made
