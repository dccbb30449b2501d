"""The FaceTheory cache schema, to the letter: names of rows and bodies, and their attributes.

A contract between languages: Go, TypeScript and Python services share the table. Pure: records
and rows in, rows and records out; kinds and ids in, names of rows and bodies out. Attributes that
only stillfresh writes are in `rows.py`. Times are whole seconds: `now` is floored and an end is
ceiled, so that a lease is never shorter than asked.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from stillfresh.stores.tenants import checked_tenant, tenant_prefix

Item: TypeAlias = dict[str, dict[str, Any]]
"""A row as DynamoDB speaks of it: `{"pk": {"S": "…"}, "generated_at": {"N": "…"}}`."""

TABLE_VARIABLE: Final = "FACETHEORY_CACHE_TABLE_NAME"
"""The environment variable that names the table."""
META: Final = "META"
"""The sort key of the item that describes a page."""
LOCK: Final = "LOCK"
"""The sort key of the item that holds a lease."""
EPOCH: Final = "EPOCH"
INVALIDATED: Final = "INVALIDATED"
"""Beside a tag's entries: in which epoch it was invalidated last."""
PAGE: Final = "page"
"""The kind whose ids are the cache keys themselves, so that other languages find the rows."""
S3: Final = "s3://"
LONGEST_PK: Final = 2_048
"""Bytes; DynamoDB's limit."""
HASHED: Final = re.compile("[0-9a-f]{64}")
ROW: Final = re.compile("CACHE#[0-9a-f]{64}")
"""The id of a page that another service stored under a hash: the row itself is named."""
RAW: Final = "~"
"""Begins a body's folder whose row cannot be found from it."""

ABOUT: Final = "facetheory-"
"""The prefix of the metadata that an S3 object has of its page."""
UNTYPED: Final = "application/octet-stream"
"""For a page without a type: other libraries would treat it as HTML, and run scripts in it."""
LONGEST_TYPE: Final = 255
MOST_METADATA: Final = 2_048
"""Bytes of names and values; S3's limit."""
PRINTABLE: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?")

LOCK_BUFFER: Final = 3600
"""Seconds that a lease's row outlives it."""
MAX_AHEAD: Final = 60
"""Seconds that a writer's clock may run ahead; a copy from further ahead is not fresh."""


def cache_pk(cache_key: str, tenant: str | None = None, *, raw: bool = False) -> str:
    """Return the partition key: `CACHE#<hash>`, or `TENANT#<tenant>#CACHE#<hash>`.

    With `raw`, FaceTheory's default, it holds the cache key itself, unless DynamoDB cannot take it
    or it looks like a hash. So no two keys share a row.
    """
    before = f"{tenant_prefix(checked_tenant(tenant))}CACHE#"
    is_written = raw and _is_name(before + cache_key) and not HASHED.fullmatch(cache_key)
    return before + (cache_key if is_written else _hash(cache_key))


def _is_name(pk: str) -> bool:
    try:
        return len(pk.encode()) <= LONGEST_PK
    except UnicodeEncodeError:
        return False


def object_metadata(status: int, fields: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a page's S3 object: status, type, and these header fields.

    Values that are not printable ASCII, or for which S3 has no room, are left out.
    """
    kind = fields.get("content-type", "")
    is_type = len(kind) <= LONGEST_TYPE and PRINTABLE.fullmatch(kind)
    described = {"status": str(status), **fields, "content-type": kind if is_type else UNTYPED}
    metadata: dict[str, str] = {}
    room = MOST_METADATA
    for name in dict.fromkeys(["status", "content-type", *described]):
        value = described[name]
        size = len(f"x-amz-meta-{ABOUT}{name}{value}")
        if PRINTABLE.fullmatch(value) and size <= room:
            metadata[f"{ABOUT}{name}"] = value
            room -= size
    return metadata


def tag_pk(tag: str, tenant: str | None = None) -> str:
    """The partition with the rows of the entries that have this tag."""
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
    """The attributes without empty ones: absent means absent, not NULL or an empty text."""
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
    """The META item of a page: where its body is, when it was made, and how long it is fresh."""

    pk: str
    sk: str
    s3_key: str
    generated_at: int
    revalidate_seconds: int
    etag: str | None = None
    ttl: int | None = None

    def is_fresh(self, now: float) -> bool:
        """True for a fresh page; DynamoDB's `ttl` has no say in it."""
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
        """Read any writer's item; unknown attributes are ignored. None: not usable."""
        s3_key = text(item, "s3_key")
        generated_at = _integer(item, "generated_at")
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
    """The LOCK item of a page: its holder, and until when."""

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
        """True if and only if `lease_expires_at > now`."""
        return self.lease_expires_at > floor(now)

    def item(self) -> Item:
        return key_of(self.pk, self.sk) | attributes(
            lease_token=self.lease_token,
            lease_expires_at=self.lease_expires_at,
            ttl=self.ttl or None,
        )

    @classmethod
    def from_item(cls, item: Item) -> "FaceTheoryCacheLease | None":
        """None if it is not a valid lease."""
        token = text(item, "lease_token")
        expires_at = _integer(item, "lease_expires_at")
        if token is None or expires_at is None:
            return None
        return cls(item["pk"]["S"], item["sk"]["S"], token, expires_at, _integer(item, "ttl"))


@dataclass(frozen=True, slots=True)
class Names:
    """From kind and id to the names in the table and in the bucket."""

    table: str
    tenant: str | None = None
    bucket: str = ""
    is_raw: bool = False
    """A page's `pk` contains its cache key unchanged."""
    prefix: str = ""
    """The keys of all bodies begin with it."""
    is_short: bool = False
    """Rows leave the prefix out of `s3_key`, because FaceTheory's S3 store adds it."""

    def pk(self, kind: str, id_: str) -> str:
        if kind == PAGE and ROW.fullmatch(id_):
            return tenant_prefix(self.tenant) + id_
        return cache_pk(cache_key(kind, id_), self.tenant, raw=self.is_raw and kind == PAGE)

    def hashed(self, pk: str) -> str:
        """The `pk` with a hash of its name, for the `sk` of a tag's row.

        DynamoDB allows an `sk` half as many bytes as a `pk`.
        """
        name = pk.removeprefix(self.pk_prefix)
        return pk if HASHED.fullmatch(name) else f"{self.pk_prefix}{_hash(name)}"

    def kind_and_id(self, item: Item) -> tuple[str, str] | None:
        """The kind and the id of a row; None if they are missing or wrong."""
        kind = text(item, "kind")
        id_ = text(item, "id") or ""
        if kind is None or self.pk(kind, id_) != text(item, "pk"):
            return None
        return kind, id_

    def of_another(self, pk: str, *, has_page: bool) -> tuple[str, str] | None:
        """The kind and the id of a row that another service wrote: its key, if it is raw.

        A hash with a page is named by its row. Without one it may be a lease of ours, of any kind.
        """
        name = pk.removeprefix(self.pk_prefix)
        if name == pk or not name:
            return None
        if HASHED.fullmatch(name):
            return (PAGE, f"CACHE#{name}") if has_page else None
        return (PAGE, name) if self.is_raw else None

    def tag(self, tag: str) -> str:
        return tag_pk(tag, self.tenant)

    @property
    def tags(self) -> str:
        """The partition with the epoch of all tags."""
        return f"{tenant_prefix(self.tenant)}TAG#"

    @property
    def pk_prefix(self) -> str:
        return f"{tenant_prefix(self.tenant)}CACHE#"

    @property
    def bodies(self) -> str:
        """The folder of all bodies of this table and tenant, and of no others."""
        owner = "cache" if self.tenant is None else f"tenant={quote(self.tenant, safe='')}"
        return f"{self.prefix}{self.table}/{owner}/"

    def body(self, pk: str, generation: str, nonce: str) -> str:
        """A new key: two publications under one lease write two bodies."""
        return f"{self._own(pk)}{generation}.{nonce}"

    def pointer(self, key: str) -> str:
        """The body's name in a row."""
        return key.removeprefix(self.prefix) if self.is_short else key

    def object_key(self, pointer: str) -> str | None:
        """The key of a body, from a key or from `s3://bucket/key` of our own bucket.

        None for any other bucket: the writer of a row must not choose what our permissions read.
        """
        if not pointer.startswith(S3):
            return self.prefix + pointer if self.is_short else pointer
        bucket, _, key = pointer.removeprefix(S3).partition("/")
        return key if key and bucket == self.bucket else None

    def ours(self, s3_key: str, pk: str) -> list[str]:
        """The body to delete with this row: only one that we wrote for it."""
        key = self.object_key(s3_key)
        return [key] if key is not None and key.startswith(self._own(pk)) else []

    def is_anothers(self, s3_key: str, pk: str) -> bool:
        """True for a body of this table, of any tenant, that was written for another row."""
        roots = (f"{self.prefix}{self.table}/{owner}" for owner in ("cache/", "tenant="))
        return s3_key.startswith(tuple(roots)) and not s3_key.startswith(self._own(pk))

    def _own(self, pk: str) -> str:
        hashed = self.hashed(pk)
        name = hashed.removeprefix(self.pk_prefix)
        return f"{self.bodies}{'' if hashed == pk else RAW}{name}/"

    def pk_of_body(self, s3_key: str) -> str | None:
        """None if its row has a raw key, which the hash does not reveal."""
        name = s3_key.removeprefix(self.bodies).partition("/")[0]
        return None if name.startswith(RAW) else f"{self.pk_prefix}{name}"


def cache_key(kind: str, id_: str) -> str:
    """A page's id is its cache key; keys of other kinds begin with a character that no URL has."""
    return id_ if kind == PAGE and not id_.startswith("\0") else f"\0{kind}\0{id_}"
