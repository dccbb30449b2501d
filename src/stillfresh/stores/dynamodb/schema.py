"""The FaceTheory cache schema, literally, in this one place (seed 004; I1-I3, I5, I17, I19).

A contract between languages: Go, TypeScript and Python services share the table. Pure: records
and rows in, rows and records out; kinds and ids in, names of rows and bodies out. What only
stillfresh writes beside it is in `rows.py`. Times are whole seconds: `now` is floored and an end
is ceiled, so that a lease is never shorter than asked (I3).
"""

import hashlib
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from stillfresh.stores.tenants import tenant_prefix

Item: TypeAlias = dict[str, dict[str, Any]]
"""A row as DynamoDB speaks of it: `{"pk": {"S": "…"}, "generated_at": {"N": "…"}}`."""

TABLE_VARIABLE: Final = "FACETHEORY_CACHE_TABLE_NAME"
META: Final = "META"
LOCK: Final = "LOCK"
PAGE: Final = "page"
"""The kind whose ids are cache keys as they stand, so that other languages find the same rows."""
S3: Final = "s3://"

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


def typed(value: str | float) -> dict[str, str]:
    """A text or a number as DynamoDB writes it."""
    if isinstance(value, str):
        return {"S": value}
    return {"N": str(int(value)) if value == int(value) else repr(value)}


def attributes(**given: str | float | None) -> Item:
    """Absent means absent: neither NULL nor an empty text."""
    return {
        name: typed(value) for name, value in given.items() if value is not None and value != ""
    }


def text(item: Item, name: str) -> str | None:
    """The attribute, if it is there and a text that is not empty."""
    value = item.get(name, {}).get("S")
    return value if isinstance(value, str) and value else None


def number(item: Item, name: str) -> float | None:
    """The attribute, if it is there and a number."""
    try:
        return float(item.get(name, {})["N"])
    except (KeyError, TypeError, ValueError):
        return None


def _integer(item: Item, name: str) -> int | None:
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
        return key_of(self.pk, self.sk) | attributes(
            s3_key=self.s3_key,
            generated_at=self.generated_at,
            revalidate_seconds=self.revalidate_seconds,
            etag=self.etag,
            ttl=self.ttl or None,
        )

    @classmethod
    def from_item(cls, item: Item) -> "FaceTheoryCacheMetadata | None":
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
        expires_at = ceil(end)
        return cls(pk, LOCK, token, expires_at, expires_at + LOCK_BUFFER)

    def is_held(self, now: float) -> bool:
        """I3: iff `lease_expires_at > now`."""
        return self.lease_expires_at > floor(now)

    def item(self) -> Item:
        return key_of(self.pk, self.sk) | attributes(
            lease_token=self.lease_token,
            lease_expires_at=self.lease_expires_at,
            ttl=self.ttl or None,
        )

    @classmethod
    def from_item(cls, item: Item) -> "FaceTheoryCacheLease | None":
        """None: not a lease that anybody could hold."""
        token, expires_at = text(item, "lease_token"), _integer(item, "lease_expires_at")
        if token is None or expires_at is None:
            return None
        return cls(item["pk"]["S"], item["sk"]["S"], token, expires_at, _integer(item, "ttl"))


@dataclass(frozen=True, slots=True)
class Names:
    """From kind and id to the names in the table and in the bucket (I1, I5)."""

    table: str
    tenant: str | None = None
    bucket: str = ""

    def pk(self, kind: str, id_: str) -> str:
        return cache_pk(cache_key(kind, id_), self.tenant)

    def named(self, item: Item) -> tuple[str, str] | None:
        """The kind and the id of a row; None if it does not say them, or wrongly."""
        kind, id_ = text(item, "kind"), text(item, "id") or ""
        if kind is None or self.pk(kind, id_) != text(item, "pk"):
            return None
        return kind, id_

    def tag(self, tag: str) -> str:
        return tag_pk(tag, self.tenant)

    @property
    def pk_prefix(self) -> str:
        return f"{tenant_prefix(self.tenant)}CACHE#"

    @property
    def bodies(self) -> str:
        """Every body of this table and tenant stands under it, and nobody else's does."""
        owner = "cache" if self.tenant is None else f"tenant={quote(self.tenant, safe='')}"
        return f"{self.table}/{owner}/"

    def body(self, pk: str, generation: str, nonce: str) -> str:
        """Never used before: whoever publishes twice with one lease writes two bodies."""
        return f"{self._own(pk)}{generation}.{nonce}"

    def object_key(self, pointer: str) -> str | None:
        """I19: a key, or `s3://bucket/key` of our own bucket.

        None for any other bucket: whoever can write a row would choose what our rights read.
        """
        if not pointer.startswith(S3):
            return pointer
        bucket, _, key = pointer.removeprefix(S3).partition("/")
        return key if key and bucket == self.bucket else None

    def ours(self, s3_key: str, pk: str) -> list[str]:
        """The body to delete with this row: one that we wrote for it, and no other's."""
        key = self.object_key(s3_key)
        return [key] if key is not None and key.startswith(self._own(pk)) else []

    def is_anothers(self, s3_key: str, pk: str) -> bool:
        """A body of this table, of any tenant, that was written for another row than this."""
        roots = (f"{self.table}/cache/", f"{self.table}/tenant=")
        return s3_key.startswith(roots) and not s3_key.startswith(self._own(pk))

    def _own(self, pk: str) -> str:
        return f"{self.bodies}{pk.rpartition('#')[2]}/"

    def pk_of_body(self, s3_key: str) -> str:
        return f"{self.pk_prefix}{s3_key.removeprefix(self.bodies).partition('/')[0]}"


def cache_key(kind: str, id_: str) -> str:
    """A page's id is its cache key; other kinds stand apart behind a character no URL has."""
    return id_ if kind == PAGE and not id_.startswith("\0") else f"\0{kind}\0{id_}"
