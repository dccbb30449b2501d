"""Optional attributes beside the schema's, and how rows become records.

Pure. The schema's own attributes are authoritative. Ours are more exact (fractions of a second, the
kind of an invalidation), and count only where they do not contradict them: a service in another
language may have changed the row and left our attributes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Final
from uuid import uuid4

from stillfresh.freshness import LONGEST_LEASE, MAX_SKEW, Policy
from stillfresh.stores.bodies import Body
from stillfresh.stores.contract import UNREAD, Copy, Failure, Mark, Record
from stillfresh.stores.dynamodb.schema import (
    LOCK,
    LOCK_BUFFER,
    MAX_AHEAD,
    META,
    FaceTheoryCacheMetadata,
    Item,
    attributes,
    key_of,
    number,
    text,
)
from stillfresh.stores.versions import NO_VERSION, unpacked_version

CURRENT: Final = "current_sk"
RELEASED: Final = "released"
"""A token begins with it if nobody holds the lease: the row is kept for its failure, or as a trace
of what ended here. Random characters follow, so that no two such rows are alike."""
ENDED_AT: Final = 1
"""`lease_expires_at` of a row that nobody holds: in the past by every clock, and not a zero."""
VOIDED: Final = "voided"
"""On META: a random text that is new after each invalidation."""
VERSION: Final = "value_version"
"""On META, binary: the version of the value. TableTheory's own `version` is a number."""
META_FENCE: Final = (
    "s3_key",
    "generated_at",
    "revalidate_seconds",
    "etag",
    "generation",
    VOIDED,
    CURRENT,
)
"""Attributes of META; some change whenever any service replaces the copy or invalidates it."""
LOCK_FENCE: Final = ("lease_token", "failures")
"""Attributes of LOCK; the token changes whenever a lease is granted or ends."""
REPLACED_KEPT: Final = 4
"""Generations that were here before the present one, and are remembered."""
LONGEST_NAME: Final = 1_024
"""The most bytes of an id that is written beside its hash: a read is charged per 4 KB."""
FOR_EVER: Final = 100 * 366 * 86400.0
NO_BODY: Final = Body(b"")
ENDLESS: Final = Policy(0, FOR_EVER, FOR_EVER)
"""A row of another service has no end: without times of the cache it is stale until deleted."""


@dataclass(frozen=True, slots=True)
class Row:
    """A META row: a copy whose value is in S3 (UNREAD) or absent, and its other attributes.

    Without a row, all of it is empty.
    """

    copy: Copy | None = None
    meta: FaceTheoryCacheMetadata | None = None
    failure: Failure | None = None
    tags: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    """Tags that came with the copy."""
    extra: bytes = b""
    size: int = 0
    """Bytes of the body; 0 if not known."""
    token: str | None = None
    """The token of the lease that wrote our attributes."""
    replaced: tuple[str, ...] = ()
    """The generations before the present one, the last one first."""
    is_pointer: bool = False
    """TableTheory's pointer-swap recipe: the page belongs to other services, never replaced here.
    """

    @property
    def generation(self) -> str | None:
        return None if self.copy is None else self.copy.generation

    @property
    def version(self) -> bytes:
        return NO_VERSION if self.copy is None else self.copy.version

    @property
    def replaced_next(self) -> tuple[str, ...]:
        """The replaced generations for the row that replaces this one."""
        latest = () if self.token is None else (self.token,)
        return (*latest, *self.replaced)[:REPLACED_KEPT]

    @property
    def s3_key(self) -> str | None:
        return None if self.meta is None else self.meta.s3_key

    def is_fresh(self, now: float) -> bool:
        copy = self.copy
        return (
            copy is not None
            and copy.mark is Mark.NONE
            and now < copy.fetched_at + copy.policy.fresh_for
        )


@dataclass(frozen=True, slots=True)
class Lock:
    """A LOCK row; empty if there is none."""

    held_until: float | None = None
    failure: Failure | None = None
    tags: frozenset[str] = frozenset()
    token: str | None = None


def meta_item(
    copy: Copy,
    *,
    pk: str,
    s3_key: str,
    retention: float,
    body: Body = NO_BODY,
    body_size: int | None = None,
    tags: Iterable[str] = (),
    late: Iterable[str] = (),
    replaced: Sequence[str] = (),
) -> Item:
    """The schema's attributes, and our own only for what these cannot express.

    `body_size`: the bytes of a body whose data is not at hand.
    """
    if body_size is None:
        body_size = len(body.data)
    terms = copy.policy
    kept_for = max(retention, terms.stale_for, terms.error_for)
    generated_at = floor(copy.fetched_at)
    fresh_for = floor(terms.fresh_for)
    ttl = generated_at + fresh_for + ceil(kept_for)
    interval = fresh_for if copy.mark is Mark.NONE else 0
    meta = FaceTheoryCacheMetadata(pk, META, s3_key, generated_at, interval, body.etag, ttl)
    item = meta.item() | attributes(
        fetched_at=copy.fetched_at or None,
        fresh_for=terms.fresh_for or None,
        stale_for=terms.stale_for or None,
        error_for=terms.error_for or None,
        mark=copy.mark or None,
        body_size=body_size or None,
        generation=copy.generation,
        own_etag=body.etag,
    )
    if copy.value is None:
        item["absent"] = {"BOOL": True}
    if body.extra:
        item["extra"] = {"B": body.extra}
    if copy.version:
        item[VERSION] = {"B": copy.version}
    if replaced:
        item["replaced"] = {"L": [{"S": generation} for generation in replaced]}
    return item | tag_set(tags) | tag_set(late, "late_tags")


def name_beside(kind: str, id_: str) -> Item:
    """Kind and id for listings, because the key is a hash; not if long or not valid Unicode."""
    try:
        size = len(id_.encode())
    except UnicodeEncodeError:
        return {}
    return attributes(kind=kind, id=id_) if size <= LONGEST_NAME else {}


def tag_set(tags: Iterable[str], name: str = "tags") -> Item:
    """DynamoDB has no empty set, and no empty text in a set."""
    texts = sorted({tag if tag and tag[0] != "\0" else f"\0{tag}" for tag in tags})
    return {name: {"SS": texts}} if texts else {}


def _tags(item: Item, name: str = "tags") -> frozenset[str]:
    return frozenset(tag.removeprefix("\0") for tag in item.get(name, {}).get("SS", ()))


def failure_attributes(failure: Failure) -> Item:
    """The failure as attributes; invalid Unicode in the error becomes a question mark."""
    error = failure.error.encode("utf-8", "replace").decode()
    return attributes(failures=failure.count, retry_at=failure.retry_at, error=error)


def _failure(item: Item) -> Failure | None:
    count = number(item, "failures")
    retry_at = number(item, "retry_at")
    if count is None or retry_at is None:
        return None
    return Failure(int(count), retry_at, text(item, "error") or "")


def lock_of(item: Item) -> Lock:
    token = text(item, "lease_token")
    held_until = None if is_ended(item) else number(item, "lease_expires_at")
    return Lock(held_until, _failure(item), _tags(item), token)


def is_copy(item: Item) -> bool:
    """True for a META row that has what the schema requires."""
    return FaceTheoryCacheMetadata.from_item(item) is not None


def is_ended(item: Item) -> bool:
    """True for a LOCK row that nobody holds: it is kept for its failure, or as a trace."""
    return (text(item, "lease_token") or "").startswith(RELEASED)


def is_trace(item: Item) -> bool:
    """True for a LOCK row that is kept only so that no late request takes it for a missing one."""
    return is_ended(item) and "failures" not in item


def has_lease_or_failure(item: Item) -> bool:
    """True for a LOCK row that says something of its entry."""
    return bool(item) and not is_trace(item)


def ended_attributes(now: float) -> Item:
    """The attributes of a LOCK row whose lease has ended; the row stays for an hour."""
    token = f"{RELEASED}:{uuid4()}"
    return attributes(lease_token=token, lease_expires_at=ENDED_AT, ttl=floor(now) + LOCK_BUFFER)


def trace_item(pk: str, now: float) -> Item:
    """A LOCK row of a lease that is over, in every language: something ended here.

    It stays for an hour. AWS refuses a signed request after 15 minutes at most, so a request that
    met neither META nor LOCK cannot arrive when the trace is gone.
    """
    return key_of(pk, LOCK) | ended_attributes(now)


def version_of(item: Item) -> str | None:
    """The row that a pointer-swap META names, in the same partition."""
    current = text(item, CURRENT)
    return None if current in {META, LOCK} else current


def with_accepted_end(lock: Lock, now: float, max_lease: float) -> Lock:
    """The lock, with an end that the engine accepts, and a later one at its next look.

    A lease of another service, of up to `max_lease`, is live, but too long for the engine.
    """
    until = lock.held_until
    if until is None or until > now + max_lease + MAX_SKEW:
        return lock
    return replace(lock, held_until=min(until, now + LONGEST_LEASE))


def row_of(item: Item, now: float, others: Policy = ENDLESS) -> Row:
    """Read any writer's row; without the schema's required attributes it has no copy.

    `others`: how long a stale copy may be served if the row does not say so.
    """
    meta = FaceTheoryCacheMetadata.from_item(item)
    own = None if meta is None else _own(meta, item)
    token = text(item, "generation")
    size = number(item, "body_size")
    return Row(
        None if meta is None else _copy(meta, item, now, others, own),
        meta,
        _failure(item),
        _tags(item),
        _tags(item, "late_tags"),
        extra=bytes(item.get("extra", {}).get("B", b"")) if own else b"",
        size=int(size or 0) if own or token is None else 0,
        token=token,
        replaced=_replaced_generations(item),
        is_pointer=CURRENT in item,
    )


def _replaced_generations(item: Item) -> tuple[str, ...]:
    listed = item.get("replaced", {}).get("L", ())
    generations = (generation.get("S") for generation in listed)
    return tuple(text for text in generations if isinstance(text, str))[:REPLACED_KEPT]


def _version(item: Item) -> bytes:
    """A damaged version is none: no other one could be compared with it."""
    form = bytes(item.get(VERSION, {}).get("B", NO_VERSION))
    return NO_VERSION if unpacked_version(form) is None else form


def _own(meta: FaceTheoryCacheMetadata, item: Item) -> tuple[str, float] | None:
    """Our generation and exact time, if body, time and ETag are those that we wrote."""
    generation = text(item, "generation")
    fetched_at = number(item, "fetched_at")
    if generation is None or fetched_at is None:
        return None
    is_ours = (
        meta.s3_key.rpartition("/")[2].startswith(f"{generation}.")
        and floor(fetched_at) == meta.generated_at
        and text(item, "own_etag") in {None, meta.etag}
    )
    return (generation, fetched_at) if is_ours else None


def _copy(
    meta: FaceTheoryCacheMetadata,
    item: Item,
    now: float,
    others: Policy,
    own: tuple[str, float] | None,
) -> Copy:
    """Our attributes are more exact, or from before an invalidation set the interval to zero."""
    fresh_for, stale_for, error_for = (
        max(0.0, number(item, name) or 0.0) for name in ("fresh_for", "stale_for", "error_for")
    )
    is_changed = meta.revalidate_seconds not in {0, floor(fresh_for)}  # by another service
    if is_changed:
        fresh_for = float(meta.revalidate_seconds)
    if own is not None:
        generation, fetched_at = own
        policy = Policy(fresh_for, stale_for, error_for)
        if is_changed:  # what memory made of the copy says how long it is fresh
            generation = f"{generation}@{meta.revalidate_seconds}"
    else:
        generation = f"{meta.s3_key}@{meta.generated_at}"
        fetched_at = float(meta.generated_at)
        if meta.etag is not None:  # it tells two bodies apart that were written in one second
            generation = f"{generation}@{meta.etag}"
        policy = Policy(fresh_for, others.stale_for, others.error_for)
    if MAX_SKEW < fetched_at - now <= MAX_AHEAD:  # further ahead than clocks may differ
        fetched_at = now
    is_absent = own is not None and item.get("absent", {}).get("BOOL")
    mark = _mark(meta, item, policy)
    value = None if is_absent else UNREAD
    # Another service's update leaves the version here; like a load without one, it keeps it.
    return Copy(generation, fetched_at, policy, value, mark, _version(item))


def _mark(meta: FaceTheoryCacheMetadata, item: Item, policy: Policy) -> Mark:
    """`revalidate_seconds` of zero is an invalidation by any service."""
    if meta.revalidate_seconds:
        return Mark.NONE
    mark = number(item, "mark")
    if mark:
        return Mark.HARD if mark >= Mark.HARD else Mark.SOFT
    return Mark.SOFT if policy.fresh_for >= 1 else Mark.NONE


def merged(row: Row, lock: Lock) -> Record:
    return Record(row.copy, lock.held_until, row.failure or lock.failure)
