"""What rides beside the schema in optional attributes, and how rows become records (I2, I3, I6).

Pure. The schema's own attributes are the truth: what stands beside them is more exact (fractions
of a second, the kind of an invalidation) and counts only where it does not contradict them, since
a service in another language may have changed the row and left our attributes as they were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final
from urllib.parse import quote

from msgspec.structs import replace

from stillfresh.freshness import MAX_SKEW, Policy
from stillfresh.stores.contract import UNREAD, Copy, Failure, Mark, Record
from stillfresh.stores.dynamodb.schema import (
    MAX_AHEAD,
    META,
    FaceTheoryCacheMetadata,
    Item,
    cache_pk,
    key_of,
    number,
    tag_pk,
    text,
    whole,
)
from stillfresh.stores.tenants import tenant_prefix

__all__ = [
    "PAGE",
    "RELEASED",
    "Lock",
    "Names",
    "Row",
    "Tagged",
    "failure_attributes",
    "lock_of",
    "merged",
    "meta_item",
    "name_beside",
    "row_of",
    "tag_item",
    "tag_set",
    "tagged",
]

PAGE: Final = "page"
"""The kind whose ids are cache keys as they stand, so that other languages find the same rows."""
RELEASED: Final = "released"
"""In the place of a token: nobody's lease, kept for the failure that it remembers."""
LONGEST_NAME: Final = 1_024
"""Bytes of an id that is written beside its hash: a read is paid for by every 4 KB of a row."""
FOR_EVER: Final = 100 * 366 * 86400.0
"""Seconds; a row of another's says no end: it is served as stale until it is swept."""


@dataclass(frozen=True, slots=True)
class Names:
    """From kind and id to the names in the table and in the bucket (I1, I5)."""

    table: str
    tenant: str | None = None

    def pk(self, kind: str, id_: str) -> str:
        return cache_pk(cache_key(kind, id_), self.tenant)

    def named(self, item: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
        """The kind and the id of a row; None if it does not say them, or wrongly."""
        kind, id_ = text(item, "kind"), text(item, "id") or ""
        is_true = kind is not None and self.pk(kind, id_) == text(item, "pk")
        return (kind, id_) if kind is not None and is_true else None

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
        return f"{self.bodies}{pk.rpartition('#')[2]}/{generation}.{nonce}"

    def ours(self, *s3_keys: str) -> list[str]:
        """To delete; bodies of others are theirs: they may use a key again."""
        return [s3_key for s3_key in s3_keys if s3_key.startswith(self.bodies)]

    def is_anothers(self, s3_key: str, pk: str) -> bool:
        """One of our bodies, written for another row: somebody has changed this one."""
        return s3_key.startswith(self.bodies) and self.pk_of_body(s3_key) != pk

    def pk_of_body(self, s3_key: str) -> str:
        return f"{self.pk_prefix}{s3_key.removeprefix(self.bodies).partition('/')[0]}"


def cache_key(kind: str, id_: str) -> str:
    """A page's id is its cache key; other kinds stand apart behind a character no URL has."""
    return id_ if kind == PAGE and not id_.startswith("\0") else f"\0{kind}\0{id_}"


@dataclass(frozen=True, slots=True)
class Row:
    """A META row: a copy whose value is in S3 (UNREAD) or absent, and what else it says."""

    copy: Copy | None
    meta: FaceTheoryCacheMetadata | None
    failure: Failure | None
    tags: frozenset[str]
    extra: bytes = b""
    size: int = 0

    @property
    def generation(self) -> str | None:
        return None if self.copy is None else self.copy.generation

    def is_fresh(self, now: float) -> bool:
        copy = self.copy
        return (
            copy is not None
            and copy.mark is Mark.NONE
            and now < copy.fetched_at + copy.policy.fresh_for
        )


@dataclass(frozen=True, slots=True)
class Lock:
    """A LOCK row, as a reader needs it."""

    held_until: float | None
    failure: Failure | None
    tags: frozenset[str]
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Tagged:
    """The tags of an entry, and the leases that may have written their rows."""

    tags: frozenset[str]
    tokens: frozenset[str]


def meta_item(
    copy: Copy,
    *,
    pk: str,
    s3_key: str,
    retention: float,
    etag: str | None = None,
    extra: bytes = b"",
    size: int = 0,
    tags: Sequence[str] = (),
) -> Item:
    """The schema's attributes, and beside them only what they cannot say."""
    terms = copy.policy
    kept = max(retention, terms.stale_for, terms.error_for)
    generated_at, fresh_for = whole(copy.fetched_at), whole(terms.fresh_for)
    ttl = generated_at + fresh_for + ceil(kept)
    revalidate_seconds = fresh_for if copy.mark is Mark.NONE else 0
    meta = FaceTheoryCacheMetadata(pk, META, s3_key, generated_at, revalidate_seconds, etag, ttl)
    beside = {
        "fetched_at": copy.fetched_at,
        "fresh_for": terms.fresh_for,
        "stale_for": terms.stale_for,
        "error_for": terms.error_for,
        "mark": int(copy.mark),
        "body_size": size,
    }
    item = meta.item() | {name: {"N": _digits(value)} for name, value in beside.items() if value}
    item["generation"] = {"S": copy.generation}
    if copy.value is None:
        item["absent"] = {"BOOL": True}
    if extra:
        item["extra"] = {"B": extra}
    return item | tag_set(tags)


def _digits(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def name_beside(kind: str, id_: str) -> Item:
    """Whose row it is, for listings: the key is a hash. Not what is no Unicode, or long."""
    try:
        size = len(id_.encode())
    except UnicodeEncodeError:
        return {}
    if size > LONGEST_NAME:
        return {}
    return {"kind": {"S": kind}} | ({"id": {"S": id_}} if id_ else {})


def tag_set(tags: Sequence[str]) -> Item:
    """DynamoDB knows no empty set, and no empty text in one."""
    named = sorted({tag if tag and tag[0] != "\0" else f"\0{tag}" for tag in tags})
    return {"tags": {"SS": named}} if named else {}


def _tags(item: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(tag.removeprefix("\0") for tag in item.get("tags", {}).get("SS", ()))


def tag_item(names: Names, tag: str, *, kind: str, id_: str, token: str, ttl: int) -> Item:
    """I6: the row of an entry under its tag."""
    item = key_of(names.tag(tag), names.pk(kind, id_)) | {
        "kind": {"S": kind},
        "lease_token": {"S": token},
        "ttl": {"N": str(ttl)},
    }
    return item | ({"id": {"S": id_}} if id_ else {})


def failure_attributes(failure: Failure) -> Item:
    """The error's text is anybody's: what is no Unicode in it becomes a question mark."""
    item = {"failures": {"N": str(failure.count)}, "retry_at": {"N": _digits(failure.retry_at)}}
    error = failure.error.encode("utf-8", "replace").decode()
    return item | ({"error": {"S": error}} if error else {})


def _failure(item: Mapping[str, Mapping[str, Any]]) -> Failure | None:
    count, retry_at = number(item, "failures"), number(item, "retry_at")
    if count is None or retry_at is None:
        return None
    return Failure(int(count), retry_at, text(item, "error") or "")


def lock_of(item: Mapping[str, Mapping[str, Any]]) -> Lock:
    token = text(item, "lease_token")
    held_until = number(item, "lease_expires_at") if token != RELEASED else None
    return Lock(held_until, _failure(item), _tags(item), token)


def row_of(item: Mapping[str, Mapping[str, Any]], now: float) -> Row:
    """Anybody's row; one that lacks what the schema requires has no copy."""
    meta = FaceTheoryCacheMetadata.from_item(item)
    copy = None if meta is None else _copy(meta, item, now)
    extra, size = item.get("extra", {}).get("B", b""), number(item, "body_size")
    return Row(copy, meta, _failure(item), _tags(item), bytes(extra), int(size or 0))


def _copy(meta: FaceTheoryCacheMetadata, item: Mapping[str, Mapping[str, Any]], now: float) -> Copy:
    generation, fetched_at = text(item, "generation"), number(item, "fetched_at")
    is_ours = (
        generation is not None
        and meta.s3_key.rpartition("/")[2].startswith(f"{generation}.")
        and fetched_at is not None
        and whole(fetched_at) == meta.generated_at
    )
    if generation is None or fetched_at is None or not is_ours:
        generation = f"{meta.s3_key}@{meta.generated_at}"
        if meta.etag is not None:  # it tells two bodies apart that were written in one second
            generation = f"{generation}@{meta.etag}"
        fetched_at = float(meta.generated_at)
    policy = _policy(meta, item, is_ours=is_ours)
    copy = Copy(generation, fetched_at, policy, UNREAD, _mark(meta, item, policy))
    if is_ours and item.get("absent", {}).get("BOOL"):
        copy = replace(copy, value=None)
    return replace(copy, fetched_at=now) if _is_ahead(fetched_at, now) else copy


def _is_ahead(fetched_at: float, now: float) -> bool:
    """I3: a writer's clock may run ahead by more than the engine forgives; such a copy is new."""
    return MAX_SKEW < fetched_at - now <= MAX_AHEAD


def _policy(
    meta: FaceTheoryCacheMetadata, item: Mapping[str, Mapping[str, Any]], *, is_ours: bool
) -> Policy:
    """More exact than `revalidate_seconds`, or from before an invalidation set that to zero."""
    fresh_for = max(0.0, number(item, "fresh_for") or 0.0)
    if meta.revalidate_seconds not in {0, whole(fresh_for)}:
        fresh_for = float(meta.revalidate_seconds)
    if not is_ours:
        return Policy(fresh_for, FOR_EVER, FOR_EVER)
    stale_for, error_for = (number(item, name) or 0.0 for name in ("stale_for", "error_for"))
    return Policy(fresh_for, max(0.0, stale_for), max(0.0, error_for))


def _mark(
    meta: FaceTheoryCacheMetadata, item: Mapping[str, Mapping[str, Any]], policy: Policy
) -> Mark:
    """`revalidate_seconds` of zero is an invalidation, whoever wrote it (I3)."""
    if meta.revalidate_seconds:
        return Mark.NONE
    if mark := number(item, "mark"):
        return Mark.HARD if mark >= Mark.HARD else Mark.SOFT
    return Mark.SOFT if policy.fresh_for >= 1 else Mark.NONE


def tagged(row: Row | None, lock: Lock | None) -> Tagged:
    """A copy's generation is the token of the lease that published it."""
    tags = (row.tags if row else frozenset()) | (lock.tags if lock else frozenset())
    tokens = {row.generation if row else None, lock.token if lock else None}
    return Tagged(tags, frozenset(token for token in tokens if token is not None))


def merged(row: Row | None, lock: Lock | None) -> Record:
    """All that is known of an id."""
    held_until = lock.held_until if lock is not None else None
    failure = (row.failure if row is not None else None) or (lock.failure if lock else None)
    return Record(row.copy if row is not None else None, held_until, failure)
