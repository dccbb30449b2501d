"""Values that are too large for a row: objects in S3.

An object is written once under a key of its own and never changed. An object that no row
points to any more is deleted after a delay: a reader may have read the row just before.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from msgspec import Struct

from stillfresh.clock import Clock
from stillfresh.errors import StoreError
from stillfresh.freshness import Policy
from stillfresh.stores.aws import AwsRefused, AwsService

AT_ONCE: Final = 1_000
"""Keys in one DeleteObjects: S3 takes no more."""
MOST_WAITING: Final = 10_000
"""Keys that wait to be deleted; further ones are left to the next eviction."""
MISSING: Final = frozenset({"NoSuchKey", "404"})

logger = logging.getLogger(__name__)


class Body(Struct, frozen=True):
    """A value as S3 and the row hold it: the part that other services read, and our own part."""

    data: bytes
    content_type: str | None = None
    etag: str | None = None
    """Kept in the row, and served unchanged."""
    extra: bytes = b""
    """Kept in the row; only stillfresh reads it."""
    terms: Policy | None = None
    """The times of the row, when it is read."""
    encoding: str | None = None
    metadata: dict[str, str] = {}
    cache_control: str | None = None
    """The `Cache-Control` of an object of another service."""


class Shape(Protocol):
    """How values of one kind are stored for other services: a page is a body with a content type.

    For a kind without a shape, the value is the body.
    """

    @property
    def others(self) -> Policy | None:
        """How long a stale copy of another service is served; None: until it is deleted."""

    def outside(self, value: bytes) -> Body:
        """The value as it is stored."""

    def inside(self, body: Body) -> bytes:
        """The value as it was given; for an object of another service, the equivalent value."""


@dataclass(frozen=True, slots=True)
class S3Bodies:
    """The objects of one bucket."""

    service: AwsService
    bucket: str

    async def put(self, key: str, body: Body) -> None:
        fields = {
            "ContentType": body.content_type,
            "ContentEncoding": body.encoding,
            "Metadata": body.metadata,
        }
        about: dict[str, Any] = {name: value for name, value in fields.items() if value}
        await self.service.ask("put_object", Bucket=self.bucket, Key=key, Body=body.data, **about)

    async def get(self, key: str) -> Body | None:
        """None if there is no such object."""
        try:
            body: Body = await self.service.ask("get_object", _body, Bucket=self.bucket, Key=key)
        except AwsRefused as exc:
            if exc.code not in MISSING:
                raise
            return None
        return body

    async def size(self, key: str) -> int | None:
        """The bytes of an object; None if there is none."""
        try:
            answer = await self.service.ask("head_object", Bucket=self.bucket, Key=key)
        except AwsRefused as exc:
            if exc.code not in MISSING:
                raise
            return None
        return int(answer["ContentLength"])

    async def copy(self, source: str, key: str) -> bool:
        """Write the object `source`, with all that is said of it, once more under `key`.

        False if there is no such object.
        """
        origin = {"Bucket": self.bucket, "Key": source}
        try:
            await self.service.ask("copy_object", Bucket=self.bucket, Key=key, CopySource=origin)
        except AwsRefused as exc:
            if exc.code not in MISSING:
                raise
            return False
        return True

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete keys; a missing one is not an error."""
        for start in range(0, len(keys), AT_ONCE):
            objects = [{"Key": key} for key in keys[start : start + AT_ONCE]]
            answer = await self.service.ask(
                "delete_objects", Bucket=self.bucket, Delete={"Objects": objects, "Quiet": True}
            )
            errors = answer.get("Errors")
            if errors:
                raise StoreError(f"{self.service.target}: not deleted: {errors[0]}")

    async def older(self, prefix: str, before: float) -> AsyncIterator[list[str]]:
        """Keys of objects written before then, page by page."""
        start: dict[str, Any] = {}
        while True:
            page = await self.service.ask(
                "list_objects_v2", Bucket=self.bucket, Prefix=prefix, **start
            )
            objects = page.get("Contents", ())
            yield [each["Key"] for each in objects if each["LastModified"].timestamp() < before]
            token = page.get("NextContinuationToken")
            if not token:
                return
            start = {"ContinuationToken": token}


async def _body(response: dict[str, Any]) -> Body:
    async with response["Body"] as stream:
        data = await stream.read()
    return Body(
        data,
        response.get("ContentType"),
        response.get("ETag"),
        encoding=response.get("ContentEncoding"),
        metadata=response.get("Metadata", {}),
        cache_control=response.get("CacheControl"),
    )


@dataclass(eq=False)
class Trash:
    """Keys to delete, each after `delay`, by one task that ends when none is left."""

    bodies: S3Bodies
    delay: float
    clock: Clock
    sleep: Callable[[float], Awaitable[object]]
    _waiting: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MOST_WAITING))
    _task: asyncio.Task[None] | None = None
    _is_closed: bool = False

    def add(self, keys: Iterable[str]) -> None:
        if self._is_closed:
            return
        due = self.clock() + self.delay
        self._waiting.extend((due, key) for key in keys)
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._empty())

    async def _empty(self) -> None:
        while self._waiting:
            await self.sleep(max(0.0, self._waiting[0][0] - self.clock()))
            await self.delete_due()

    async def delete_due(self) -> None:
        """Delete keys whose time has come; after an error, the next eviction finds them."""
        now = self.clock()
        due = []
        while self._waiting and self._waiting[0][0] <= now:
            due.append(self._waiting.popleft()[1])
        try:
            await self.bodies.delete(due)
        except StoreError as exc:
            logger.warning("%d replaced bodies were not deleted: %s", len(due), exc)

    async def close(self) -> None:
        """Delete keys that are due; those that may still be read are left to the next eviction."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self.delete_due()
        self._waiting.clear()
