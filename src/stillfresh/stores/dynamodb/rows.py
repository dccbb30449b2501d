"""What rides beside the schema in optional attributes, and how rows become records (I2, I3, I6).

Pure. The schema's own attributes are the truth: what stands beside them is more exact (fractions
of a second, the kind of an invalidation) and counts only where it does not contradict them, since
a service in another language may have changed the row and left our attributes as they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from math import ceil
from typing import Final

from msgspec.structs import replace

from stillfresh.freshness import LONGEST_LEASE, MAX_SKEW, Policy
from stillfresh.stores.contract import UNREAD, Copy, Failure, Mark, Record
from stillfresh.stores.dynamodb.names import Names
from stillfresh.stores.dynamodb.schema import (
    LOCK,
    MAX_AHEAD,
    META,
    AnyItem,
    FaceTheoryCacheMetadata,
    Item,
    key_of,
    number,
    text,
    whole,
)

CURRENT: Final = "current_sk"
RELEASED: Final = "released"
"""In the place of a token: nobody's lease, kept for the failure that it remembers."""
LONGEST_NAME: Final = 1_024
"""Bytes of an id that is written beside its hash: a read is paid for by every 4 KB of a row."""
FOR_EVER: Final = 100 * 366 * 86400.0
ENDLESS: Final = Policy(0, FOR_EVER, FOR_EVER)
"""Another's row says no end: without terms of the cache's own it is stale until it is swept."""


@dataclass(frozen=True, slots=True)
class Row:
    """A META row: a copy whose value is in S3 (UNREAD) or absent, and what else it says."""

    copy: Copy | None
    meta: FaceTheoryCacheMetadata | None
    failure: Failure | None
    tags: frozenset[str]
    extra: bytes = b""
    size: int = 0
    """Bytes of the body; 0: nobody said."""
    token: str | None = None
    """Of the lease that wrote our attributes, whoever changed the row since."""
    is_pointer: bool = False
    """TableTheory's pointer-swap recipe: it belongs to others, and is never replaced."""

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
    if etag:
        item["own_etag"] = {"S": etag}
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


def _tags(item: AnyItem) -> frozenset[str]:
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


def _failure(item: AnyItem) -> Failure | None:
    count, retry_at = number(item, "failures"), number(item, "retry_at")
    if count is None or retry_at is None:
        return None
    return Failure(int(count), retry_at, text(item, "error") or "")


def lock_of(item: AnyItem) -> Lock:
    token = text(item, "lease_token")
    held_until = number(item, "lease_expires_at") if token != RELEASED else None
    return Lock(held_until, _failure(item), _tags(item), token)


def version_of(item: AnyItem) -> str | None:
    """I19: the row that a META of the pointer-swap recipe names, in the same partition."""
    current = text(item, CURRENT)
    return None if current in {META, LOCK} else current


def swapped(pointer: Item, version: Item) -> Item:
    return {**pointer, **version, "sk": pointer["sk"]}


def believed(lock: Lock, now: float, max_lease: float) -> Lock:
    """I19: another's lease of up to `max_lease` is live, though longer than the engine believes.

    So the engine is told an end that it believes, and a later one when it looks again.
    """
    until = lock.held_until
    if until is None or until > now + max_lease + MAX_SKEW:
        return lock
    return replace_fields(lock, held_until=min(until, now + LONGEST_LEASE))


def row_of(item: AnyItem, now: float, others: Policy = ENDLESS) -> Row:
    """Anybody's row; one that lacks what the schema requires has no copy.

    `others`: how long past its time a copy may be served that does not say so itself.
    """
    meta = FaceTheoryCacheMetadata.from_item(item)
    is_ours = meta is not None and _is_ours(meta, item)
    copy = None if meta is None else _copy(meta, item, now, others, is_ours=is_ours)
    token, size = text(item, "generation"), number(item, "body_size")
    return Row(
        copy,
        meta,
        _failure(item),
        _tags(item),
        extra=bytes(item.get("extra", {}).get("B", b"")) if is_ours else b"",
        size=int(size or 0) if is_ours or token is None else 0,
        token=token,
        is_pointer=CURRENT in item,
    )


def _is_ours(meta: FaceTheoryCacheMetadata, item: AnyItem) -> bool:
    """I19: body, time and ETag are those that we wrote, so our attributes speak of them."""
    generation, fetched_at = text(item, "generation"), number(item, "fetched_at")
    return (
        generation is not None
        and meta.s3_key.rpartition("/")[2].startswith(f"{generation}.")
        and fetched_at is not None
        and whole(fetched_at) == meta.generated_at
        and text(item, "own_etag") in {None, meta.etag}
    )


def _copy(
    meta: FaceTheoryCacheMetadata,
    item: AnyItem,
    now: float,
    others: Policy,
    *,
    is_ours: bool,
) -> Copy:
    policy = _policy(meta, item, others, is_ours=is_ours)
    generation, fetched_at = text(item, "generation"), number(item, "fetched_at")
    if generation is None or fetched_at is None or not is_ours:
        generation = f"{meta.s3_key}@{meta.generated_at}"
        if meta.etag is not None:  # it tells two bodies apart that were written in one second
            generation = f"{generation}@{meta.etag}"
        fetched_at = float(meta.generated_at)
    elif _is_changed(meta, item):  # what memory made of the copy says how long it is fresh
        generation = f"{generation}@{meta.revalidate_seconds}"
    copy = Copy(generation, fetched_at, policy, UNREAD, _mark(meta, item, policy))
    if is_ours and item.get("absent", {}).get("BOOL"):
        copy = replace(copy, value=None)
    return replace(copy, fetched_at=now) if _is_ahead(fetched_at, now) else copy


def _is_changed(meta: FaceTheoryCacheMetadata, item: AnyItem) -> bool:
    """Another has set another interval; zero is an invalidation, and no interval."""
    return meta.revalidate_seconds not in {0, whole(number(item, "fresh_for") or 0.0)}


def _is_ahead(fetched_at: float, now: float) -> bool:
    """I3: a writer's clock may run ahead by more than the engine forgives; such a copy is new."""
    return MAX_SKEW < fetched_at - now <= MAX_AHEAD


def _policy(
    meta: FaceTheoryCacheMetadata,
    item: AnyItem,
    others: Policy,
    *,
    is_ours: bool,
) -> Policy:
    """More exact than `revalidate_seconds`, or from before an invalidation set that to zero."""
    fresh_for = max(0.0, number(item, "fresh_for") or 0.0)
    if _is_changed(meta, item):
        fresh_for = float(meta.revalidate_seconds)
    if not is_ours:
        return Policy(fresh_for, others.stale_for, others.error_for)
    stale_for, error_for = (number(item, name) or 0.0 for name in ("stale_for", "error_for"))
    return Policy(fresh_for, max(0.0, stale_for), max(0.0, error_for))


def _mark(meta: FaceTheoryCacheMetadata, item: AnyItem, policy: Policy) -> Mark:
    """`revalidate_seconds` of zero is an invalidation, whoever wrote it (I3)."""
    if meta.revalidate_seconds:
        return Mark.NONE
    if mark := number(item, "mark"):
        return Mark.HARD if mark >= Mark.HARD else Mark.SOFT
    return Mark.SOFT if policy.fresh_for >= 1 else Mark.NONE


def tagged(row: Row | None, lock: Lock | None) -> Tagged:
    """A copy's generation is the token of the lease that published it."""
    tags = (row.tags if row else frozenset()) | (lock.tags if lock else frozenset())
    tokens = {row.token if row else None, lock.token if lock else None}
    return Tagged(tags, frozenset(token for token in tokens if token is not None))


def merged(row: Row | None, lock: Lock | None) -> Record:
    held_until = lock.held_until if lock is not None else None
    failure = (row.failure if row is not None else None) or (lock.failure if lock else None)
    return Record(row.copy if row is not None else None, held_until, failure)
