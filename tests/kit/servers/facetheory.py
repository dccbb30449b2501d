"""A FaceTheory service on the table and the bucket that we share: a substitute for the real one.

FaceTheory and TableTheory are released on their own pages only: no package registry has them. This
substitute does what FaceTheory 4.0.2 does with its TableTheory store and its S3 store, in our own
words: cache keys, pointers, metadata, conditions, and the blocking regeneration of pages. It was
compared with the real one, side by side (docs/facetheory.md says when and how).
"""

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from math import ceil, floor
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode
from uuid import uuid4

from botocore.exceptions import ClientError

from stillfresh import Clock
from stillfresh.pages import Page
from tests.kit.servers.aws import Raw

HTML = "text/html; charset=utf-8"
JSON = "application/json; charset=utf-8"
POLICY = "content-security-policy"
INLINE_SCRIPT = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>", re.IGNORECASE)
SIDECAR = "__facetheory_isr_hydration"
"""The query parameter that names a page's hydration data."""
CREDENTIALS = ("authorization", "proxy-authorization", "x-amz-security-token", "x-api-key")
KNOWN_KEPT = 128
"""Rows that it remembers for times when the table cannot be reached."""

Render = Callable[[], Awaitable[Page]]


@dataclass(frozen=True)
class FaceAnswer:
    """The response to its visitor; `state` as in `x-facetheory-isr`, empty for an error."""

    status: int
    headers: dict[str, str]
    body: bytes
    state: str = ""


ERROR_PAGE = FaceAnswer(500, {"content-type": HTML}, b"<h1>Internal Server Error</h1>")
NOT_FOUND = FaceAnswer(
    404, {"content-type": "text/plain", "cache-control": "no-store"}, b"Not Found"
)


@dataclass(frozen=True)
class FaceRecord:
    """A META row as FaceTheory reads it."""

    pointer: str
    generated_at: float
    revalidate: float
    etag: str | None = None

    def is_fresh(self, now: float) -> bool:
        return now < self.generated_at + self.revalidate


class RegenerationFailed(Exception):
    """Its render failed, or could not be published."""


def raw_pk(cache_key: str) -> str:
    """Its default."""
    return f"CACHE#{cache_key}"


def component(text: str) -> str:
    """As JavaScript's `encodeURIComponent`."""
    return quote(text, safe="-_.!~*'()")


def default_key(
    pattern: str,
    params: Mapping[str, str],
    query: Sequence[tuple[str, str]] = (),
    headers: Mapping[str, str] | None = None,
    tenant: str = "default",
) -> str:
    """Its default cache key: parameters, then the query, both sorted, then digests of the visitor.

    The digests are of the credentials, and of all cookies, that the request carries.
    """
    sorted_query = sorted(query, key=lambda pair: pair[0])
    pairs = [*sorted(params.items()), *sorted_query]
    parts = "&".join(f"{component(name)}={component(value)}" for name, value in pairs)
    visitor = []
    given = headers or {}
    credentials = [f"{name}={given[name]}" for name in CREDENTIALS if name in given]
    cookies = sorted(part.strip() for part in given.get("cookie", "").split(";") if part.strip())
    if credentials:
        visitor.append(f"auth={_digest(credentials)}")
    if cookies:
        visitor.append(f"cookies={_digest(cookies)}")
    digests = "#" + "&".join(visitor) if visitor else ""
    return f"{tenant}::{pattern}?{parts}{digests}"


def _digest(lines: Sequence[str]) -> str:
    return sha256("\n".join(lines).encode()).hexdigest()[:24]


def cache_control(revalidate: float) -> str:
    """Its default `Cache-Control`, of the object and of every response: nothing is fresh."""
    return f"public, max-age=0, s-maxage=0, stale-if-error={revalidate:g}, must-revalidate"


def status_of(metadata: Mapping[str, str]) -> int:
    """The status in an object's metadata; one that is none counts as 200."""
    try:
        status = int(float(metadata.get("facetheory-status", "200")))
    except (ValueError, OverflowError):
        return 200
    return status if 100 <= status <= 599 else 200


def forbids_inline_scripts(policy: str) -> bool:
    """True if it checks the page's HTML before it serves a page with this security policy."""
    directives: dict[str, list[str]] = {}
    for directive in policy.split(";"):
        name, *sources = directive.lower().split() or [""]
        directives.setdefault(name, sources)
    allowed = directives.get("script-src", directives.get("default-src"))
    return allowed is not None and "'unsafe-inline'" not in allowed


@dataclass
class FaceTheory:
    raw: Raw
    clock: Clock
    pk_of: Callable[[str], str] = raw_pk
    pointer_prefix: str = "isr/"
    """`htmlPointerPrefix`: in `s3_key`, and so in the object's name."""
    key_prefix: str = ""
    """`S3HtmlStore({ keyPrefix })`: in the object's name, not in `s3_key`."""
    lease_seconds: float = 5
    revalidate: int = 60
    wait_seconds: float = 7
    """`regenerationWaitTimeoutMs`: how long it waits for the holder of a lease."""
    poll_seconds: float = 0.025
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    hydrates: bool = False
    """Its pages have hydration data, in an object beside the page."""
    renders: list[str] = field(default_factory=list)
    _known: dict[str, FaceRecord] = field(default_factory=dict)

    def _key(self, cache_key: str, sk: str) -> dict[str, Any]:
        return {"pk": {"S": self.pk_of(cache_key)}, "sk": {"S": sk}}

    async def meta(self, cache_key: str) -> dict[str, Any] | None:
        answer = await self.raw.dynamodb.get_item(
            TableName=self.raw.table, Key=self._key(cache_key, "META"), ConsistentRead=True
        )
        row: dict[str, Any] | None = answer.get("Item")
        return row

    async def record(self, cache_key: str) -> FaceRecord | None:
        row = await self.meta(cache_key)
        if row is None:
            return None
        record = FaceRecord(
            row["s3_key"]["S"],
            int(row["generated_at"]["N"]),
            float(row["revalidate_seconds"]["N"]),
            row["etag"]["S"] if "etag" in row else None,
        )
        self._remember(cache_key, record)
        return record

    def _remember(self, cache_key: str, record: FaceRecord) -> None:
        self._known.pop(cache_key, None)
        self._known[cache_key] = record
        if len(self._known) > KNOWN_KEPT:
            del self._known[next(iter(self._known))]

    async def try_lease(self, cache_key: str) -> str | None:
        """Its token; None: held by another."""
        token = str(uuid4())
        now = floor(self.clock())
        ends = now + ceil(self.lease_seconds)
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

    async def commit(
        self, cache_key: str, token: str, page: Page, generated_at: float, pointer: str
    ) -> FaceRecord:
        """The object first, then META and LOCK in one transaction.

        Raises RegenerationFailed if the lease is no longer its own.
        """
        kind = page.headers.get("content-type") or HTML
        metadata = {"facetheory-status": str(page.status), "facetheory-content-type": kind}
        policy = page.headers.get(POLICY)
        if policy:
            metadata[f"facetheory-{POLICY}"] = policy
        written = await self.raw.s3.put_object(
            Bucket=self.raw.bucket,
            Key=self.key_prefix + pointer,
            Body=page.body,
            ContentType=kind,
            CacheControl=cache_control(self.revalidate),
            Metadata=metadata,
        )
        etag = page.headers.get("etag") or written["ETag"]
        meta = {
            **self._key(cache_key, "META"),
            "s3_key": {"S": pointer},
            "generated_at": {"N": str(floor(generated_at))},
            "revalidate_seconds": {"N": str(self.revalidate)},
            "etag": {"S": etag},
        }
        now = {"N": str(floor(self.clock()))}
        end = {
            "Key": self._key(cache_key, "LOCK"),
            "ConditionExpression": "lease_token = :token AND lease_expires_at > :now",
            "ExpressionAttributeValues": {":token": {"S": token}, ":now": now},
        }
        table = {"TableName": self.raw.table}
        put = {"Put": {**table, "Item": meta}}
        delete = {"Delete": {**table, **end}}
        try:
            await self.raw.dynamodb.transact_write_items(TransactItems=[put, delete])
        except self.raw.dynamodb.exceptions.TransactionCanceledException as exc:
            raise RegenerationFailed("the lease is not its own") from exc
        return FaceRecord(pointer, generated_at, self.revalidate, etag)

    async def stored(self, record: FaceRecord | None, state: str) -> FaceAnswer | None:
        """The stored page: HTML with status 200, unless the object says more.

        None if there is no object. Raises RegenerationFailed if its policy forbids the page.
        """
        if record is None:
            return None
        key = self.key_prefix + record.pointer
        try:
            answer = await self.raw.s3.get_object(Bucket=self.raw.bucket, Key=key)
        except ClientError as exc:
            if exc.response["Error"]["Code"] != "NoSuchKey":
                raise
            return None
        async with answer["Body"] as stream:
            body = await stream.read()
        metadata = answer["Metadata"]
        kind = metadata.get("facetheory-content-type", "").strip() or HTML
        policy = metadata.get(f"facetheory-{POLICY}", "").strip()
        return self._response(record, status_of(metadata), kind, policy, body, state)

    def _response(
        self, record: FaceRecord, status: int, kind: str, policy: str, body: bytes, state: str
    ) -> FaceAnswer:
        if forbids_inline_scripts(policy) and INLINE_SCRIPT.search(body):
            raise RegenerationFailed("the page has an inline script, which its policy forbids")
        headers = {
            "cache-control": cache_control(record.revalidate),
            "content-type": kind,
            "x-facetheory-isr": state,
        }
        if policy:
            headers[POLICY] = policy
        if record.etag is not None:
            headers["etag"] = record.etag
        return FaceAnswer(status, headers, body, state)

    async def visit(self, cache_key: str, render: Render) -> FaceAnswer:
        """A fresh page, or one that it renders before it answers, or waits for; or an error."""
        try:
            return await self._visited(cache_key, render)
        except RegenerationFailed:
            return ERROR_PAGE

    async def _visited(self, cache_key: str, render: Render) -> FaceAnswer:
        try:
            record = await self.record(cache_key)
        except (ClientError, OSError) as exc:
            known = await self.stored(self._known.get(cache_key), "stale-metadata-error")
            if known is None:
                raise RegenerationFailed("the table cannot be reached") from exc
            return known
        if record is not None and record.is_fresh(self.clock()):
            hit = await self.stored(record, "hit")
            if hit is not None:
                return hit
        token = await self.try_lease(cache_key)
        if token is None:
            newer = await self._wait_for_another(cache_key, record)
            waited = await self.stored(newer, "wait-hit")
            if waited is not None:
                return waited
            token = await self.try_lease(cache_key)
        if token is not None:
            return await self._regenerate(cache_key, token, record, render)
        stale = await self.stored(record, "stale")
        if stale is None:
            raise RegenerationFailed("the lock is busy")
        return stale

    async def _wait_for_another(self, cache_key: str, old: FaceRecord | None) -> FaceRecord | None:
        """A newer row, or a fresh one; None if there is none within `wait_seconds`."""
        deadline = self.clock() + self.wait_seconds
        before = 0.0 if old is None else old.generated_at
        while self.clock() < deadline:
            await self.sleep(self.poll_seconds)
            record = await self.record(cache_key)
            if record is None:
                continue
            if record.generated_at > before or record.is_fresh(self.clock()):
                return record
        return None

    async def _regenerate(
        self, cache_key: str, token: str, old: FaceRecord | None, render: Render
    ) -> FaceAnswer:
        """Render and publish. If either fails, the old page, however old; without one, an error."""
        generated_at = self.clock()
        digest = sha256(cache_key.encode()).hexdigest()[:24]
        pointer = f"{self.pointer_prefix}{digest}/{floor(generated_at * 1000)}-{uuid4()}.html"
        self.renders.append(cache_key)
        try:
            page = await self._rendered(render)
            if self.hydrates:
                await self._write_sidecar(pointer)
            record = await self.commit(cache_key, token, page, generated_at, pointer)
            self._remember(cache_key, record)
            kind = page.headers.get("content-type") or HTML
            policy = page.headers.get(POLICY, "")
            return self._response(record, page.status, kind, policy, page.body, "miss")
        except RegenerationFailed:
            stale = await self.stored(old, "stale")
            if stale is None:
                raise
            return stale
        finally:
            await self.release(cache_key, token)

    async def _write_sidecar(self, pointer: str) -> None:
        await self.raw.s3.put_object(
            Bucket=self.raw.bucket,
            Key=self.key_prefix + sidecar_pointer(pointer),
            Body=json.dumps({"renders": len(self.renders)}).encode(),
            ContentType=JSON,
            CacheControl="no-store",
        )

    async def _rendered(self, render: Render) -> Page:
        try:
            page = await render()
        except Exception as exc:
            raise RegenerationFailed("the render raised") from exc
        if page.status >= 500:
            raise RegenerationFailed(f"the render answered {page.status}")
        return page


class FaceSite:
    """The service as an ASGI app: each path is a route, `key_of` makes its cache key.

    Pages show the number of the render.
    """

    def __init__(self, face: FaceTheory, key_of: Callable[[str], str] | None = None) -> None:
        self.face = face
        self.key_of = key_of
        self.status = 200
        self.requests: list[str] = []
        self.error: Exception | None = None

    async def render(self) -> Page:
        if self.error is not None:
            raise self.error
        text = f"page {len(self.face.renders)}"
        return Page(text, self.status, {"content-type": HTML})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        path = scope["path"]
        query = parse_qsl(scope["query_string"].decode("ascii"), keep_blank_values=True)
        self.requests.append(f"{path}?{urlencode(query)}" if query else path)
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        tokens = [value for name, value in query if name == SIDECAR]
        page_query = [pair for pair in query if pair[0] != SIDECAR]
        if self.key_of is None:
            cache_key = default_key(path, {}, page_query, headers)
        else:
            cache_key = self.key_of(path)
        if tokens:
            answer = await self._sidecar(cache_key, tokens)
        else:
            answer = await self.face.visit(cache_key, self.render)
        fields = [
            (name.encode(), value.encode("latin-1")) for name, value in answer.headers.items()
        ]
        start = {"type": "http.response.start", "status": answer.status, "headers": fields}
        await send(start)
        await send({"type": "http.response.body", "body": answer.body})

    async def _sidecar(self, cache_key: str, tokens: Sequence[str]) -> FaceAnswer:
        padded = tokens[0] + "=" * (-len(tokens[0]) % 4)
        try:
            pointer = base64.urlsafe_b64decode(padded).decode()
        except ValueError:
            return NOT_FOUND
        digest = sha256(cache_key.encode()).hexdigest()[:24]
        if len(tokens) > 1 or not pointer.startswith(f"{self.face.pointer_prefix}{digest}/"):
            return NOT_FOUND
        key = self.face.key_prefix + pointer
        answer = await self.face.raw.s3.get_object(Bucket=self.face.raw.bucket, Key=key)
        async with answer["Body"] as stream:
            body = await stream.read()
        headers = {"cache-control": "no-store", "content-type": JSON, "etag": answer["ETag"]}
        return FaceAnswer(200, headers, body)


def sidecar_pointer(pointer: str) -> str:
    """The hydration data of the page with this pointer."""
    return f"{pointer.removesuffix('.html')}.hydration.json"


def sidecar_token(pointer: str) -> str:
    """The value of the query parameter that names it."""
    return base64.urlsafe_b64encode(sidecar_pointer(pointer).encode()).decode().rstrip("=")
