"""The FaceTheory cache schema, literally, in this one place (seed 004; I1, I2, I3).

A contract between languages: Go, TypeScript and Python services share the table. Pure: records
and rows in, rows and records out. What only stillfresh writes beside it is in `rows.py`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, Final, TypeAlias

from stillfresh.stores.tenants import tenant_prefix

Item: TypeAlias = dict[str, dict[str, Any]]
"""A row as DynamoDB speaks of it: `{"pk": {"S": "…"}, "generated_at": {"N": "…"}}`."""
AnyItem: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The same, to read only."""

TABLE_VARIABLE: Final = "FACETHEORY_CACHE_TABLE_NAME"
META: Final = "META"
LOCK: Final = "LOCK"

LOCK_BUFFER: Final = 3600
"""Seconds that a lease's row outlives it."""
MAX_AHEAD: Final = 60
"""I3: seconds that a writer's clock may run ahead; a copy from further ahead is not fresh."""


def cache_pk(cache_key: str, tenant: str | None = None) -> str:
    """I1: `CACHE#<hash>`, or `TENANT#<tenant>#CACHE#<hash>`."""
    return f"{tenant_prefix(tenant)}CACHE#{_hash(cache_key)}"


def tag_pk(tag: str, tenant: str | None = None) -> str:
    """I6: where the rows stand that say which entries have this tag."""
    return f"{tenant_prefix(tenant)}TAG#{_hash(tag)}"


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def key_of(pk: str, sk: str) -> Item:
    return {"pk": {"S": pk}, "sk": {"S": sk}}


def whole(now: float) -> int:
    """I3: `now` in whole seconds, never later than it is."""
    return floor(now)


def ended_at(end: float) -> int:
    """I3: an end in whole seconds, never sooner than asked."""
    return ceil(end)


def text(item: AnyItem, name: str) -> str | None:
    """The attribute, if it is there and a text that is not empty."""
    value = item.get(name, {}).get("S")
    return value if isinstance(value, str) and value else None


def number(item: AnyItem, name: str) -> float | None:
    """The attribute, if it is there and a number."""
    try:
        return float(item.get(name, {})["N"])
    except (KeyError, TypeError, ValueError):
        return None


def _integer(item: AnyItem, name: str) -> int | None:
    value = number(item, name)
    return None if value is None else floor(value)


@dataclass(frozen=True, slots=True)
class FaceTheoryCacheMetadata:
    """What was generated (`sk = "META"`): where the body is, since when, and fresh how long."""

    pk: str
    sk: str
    s3_key: str
    generated_at: int
    revalidate_seconds: int
    etag: str | None = None
    ttl: int | None = None

    def is_fresh(self, now: float) -> bool:
        """I3: DynamoDB's `ttl` has no say in it."""
        is_from_now = self.generated_at - now <= MAX_AHEAD
        return is_from_now and now < self.generated_at + self.revalidate_seconds

    def item(self) -> Item:
        """Absent means absent: neither NULL nor an empty text."""
        item = key_of(self.pk, self.sk) | {
            "s3_key": {"S": self.s3_key},
            "generated_at": {"N": str(self.generated_at)},
            "revalidate_seconds": {"N": str(self.revalidate_seconds)},
        }
        return item | _optional(etag=self.etag, ttl=self.ttl)

    @classmethod
    def from_item(cls, item: AnyItem) -> "FaceTheoryCacheMetadata | None":
        """Whoever wrote it; attributes that are not known are left alone. None: not usable."""
        s3_key, generated_at = text(item, "s3_key"), _integer(item, "generated_at")
        revalidate_seconds = _integer(item, "revalidate_seconds")
        if s3_key is None or generated_at is None or revalidate_seconds is None:
            return None
        return cls(
            pk=item["pk"]["S"],
            sk=item["sk"]["S"],
            s3_key=s3_key,
            generated_at=generated_at,
            revalidate_seconds=max(0, revalidate_seconds),
            etag=text(item, "etag"),
            ttl=_integer(item, "ttl"),
        )


@dataclass(frozen=True, slots=True)
class FaceTheoryCacheLease:
    """Who is regenerating (`sk = "LOCK"`)."""

    pk: str
    sk: str
    lease_token: str
    lease_expires_at: int
    ttl: int | None = None

    @classmethod
    def until(cls, pk: str, token: str, end: float) -> "FaceTheoryCacheLease":
        expires_at = ended_at(end)
        return cls(pk, LOCK, token, expires_at, expires_at + LOCK_BUFFER)

    def is_held(self, now: float) -> bool:
        """I3: iff `lease_expires_at > now`."""
        return self.lease_expires_at > whole(now)

    def item(self) -> Item:
        item = key_of(self.pk, self.sk) | {
            "lease_token": {"S": self.lease_token},
            "lease_expires_at": {"N": str(self.lease_expires_at)},
        }
        return item | _optional(ttl=self.ttl)

    @classmethod
    def from_item(cls, item: AnyItem) -> "FaceTheoryCacheLease | None":
        """None: not a lease that anybody could hold."""
        token, expires_at = text(item, "lease_token"), _integer(item, "lease_expires_at")
        if token is None or expires_at is None:
            return None
        return cls(item["pk"]["S"], item["sk"]["S"], token, expires_at, _integer(item, "ttl"))


def _optional(**attributes: str | int | None) -> Item:
    return {
        name: {"S": value} if isinstance(value, str) else {"N": str(value)}
        for name, value in attributes.items()
        if value
    }
