"""Who refreshes a key of the feed: leases, publications and cooldowns in the file (F7, F8).

Steps inside one transaction, as in the stores. The token is the fence; and what another
implementation changed meanwhile, which knows no leases, shows by its meta row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import apsw
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from stillfresh.engine.rules import failed
from stillfresh.feed.rules import Fetched, is_stale
from stillfresh.feed.storing import store
from stillfresh.freshness import MAX_SKEW, Policy, is_over
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Failure,
    Grant,
    Held,
    Lease,
    Mark,
    Newer,
    Record,
    StoreStats,
)


class FetchedCodec:
    """JSON: what a network says in JSON may have numbers that msgpack cannot hold (F15)."""

    encode = staticmethod(msgspec.json.Encoder().encode)
    decode = staticmethod(msgspec.json.Decoder(Fetched).decode)


CODEC: Final = FetchedCodec()
EMPTY: Final = CODEC.encode(Fetched())
"""A copy's value: what it stands for is in the rows."""
FOREVER: Final = Policy(1e12)
"""F3 judges, and its verdict is the copy's mark; rows are served until they are evicted."""

_STATE: Final = """
    SELECT CAST(m.last_fetched AS INTEGER), r.generation, r.lease_token, r.lease_expires_at,
        r.leased_at, r.seen_fetched, r.failures, r.retry_at, r.error, r.failed_at
    FROM (SELECT ?1 AS key)
    LEFT JOIN feed_cache_meta m ON m.cache_key = key
    LEFT JOIN stillfresh_refreshes r ON r.cache_key = key
"""
_LEASE: Final = """
    INSERT INTO stillfresh_refreshes(
        cache_key, lease_token, lease_expires_at, leased_at, seen_fetched)
    VALUES (?, ?, ?, ?, ?)
    ON CONFLICT(cache_key) DO UPDATE SET lease_token = excluded.lease_token,
        lease_expires_at = excluded.lease_expires_at, leased_at = excluded.leased_at,
        seen_fetched = excluded.seen_fetched
"""
_END: Final = """
    UPDATE stillfresh_refreshes SET lease_token = NULL, lease_expires_at = NULL,
        generation = ?, failures = ?, retry_at = ?, error = ?, failed_at = ?
    WHERE cache_key = ?
"""
_RENEW: Final = """
    UPDATE stillfresh_refreshes SET lease_expires_at = ?, leased_at = ?
    WHERE cache_key = ? AND lease_token = ? AND lease_expires_at > ?
"""
_COUNT: Final = """
    SELECT (SELECT count(*) FROM feed_cache_meta),
        (SELECT count(*) FROM stillfresh_refreshes WHERE lease_expires_at > ?),
        (SELECT page_count FROM pragma_page_count()) * (SELECT page_size FROM pragma_page_size())
"""


_KEYS: Final = """
    SELECT cache_key FROM feed_cache_meta WHERE cache_key > ?1 AND instr(cache_key, ?2)
    UNION SELECT cache_key FROM stillfresh_refreshes WHERE cache_key > ?1 AND instr(cache_key, ?2)
    ORDER BY cache_key LIMIT ?3
"""


class State(Struct, frozen=True):
    """What the file says of one key, the data apart."""

    last_fetched: int | None
    generation: str | None
    token: str | None
    held_until: float | None
    seen_fetched: int | None
    failure: Failure | None

    def is_held(self, now: float) -> bool:
        return self.held_until is not None and not is_over(self.held_until, now)


class Published(Struct, frozen=True):
    """How a publication went: superseded, or stored and perhaps news."""

    superseded: frozenset[str]
    changed: frozenset[str]


def state(connection: apsw.Connection, key: str, now: float) -> State:
    """A lease or a failure from the future was noted before the clock was set back: it is over."""
    row: tuple[Any, ...] = connection.execute(_STATE, (key,)).get
    last_fetched, generation, token, held_until, leased_at, seen, failures, retry_at, error, at = (
        row
    )
    if not _are_numbers(held_until, leased_at) or leased_at - now > MAX_SKEW:
        held_until = None
    failure = None
    if _are_numbers(failures, retry_at, at):
        until = now if at - now > MAX_SKEW else retry_at
        failure = Failure(int(failures), until, str(error))
    return State(last_fetched, generation, token, held_until, seen, failure)


def _are_numbers(*values: object) -> bool:
    """What somebody else wrote there, or nobody, is no lease and no failure."""
    return all(isinstance(value, int | float) for value in values)


def copy_of(found: State, *, fresh_for: float, now: float) -> Copy | None:
    """The copy that a meta row stands for, or None."""
    if found.last_fetched is None:
        return None
    generation = f"{found.last_fetched}:{found.generation or ''}"
    mark = Mark.SOFT if is_stale(found.last_fetched, fresh_for, now) else Mark.NONE
    return Copy(generation, float(found.last_fetched), FOREVER, EMPTY, mark)


def record_of(found: State, *, fresh_for: float, now: float) -> Record:
    """For a listing: without the value."""
    copy = copy_of(found, fresh_for=fresh_for, now=now)
    return Record(copy and replace(copy, value=UNREAD), found.held_until, found.failure)


def keys(connection: apsw.Connection, search: str, after: str, limit: int) -> list[str]:
    """Whatever there is a meta row or a lease of; a feed has a few hundred."""
    return [key for (key,) in connection.execute(_KEYS, (after, search, limit))]


def acquire(
    connection: apsw.Connection,
    asks: Sequence[Ask],
    *,
    lease_for: float,
    fresh_for: float,
    now: float,
    new_token: Callable[[], str],
) -> dict[str, Grant]:
    """E5: only for the copy that was seen; E7: not to one that missed a failure."""
    grants: dict[str, Grant] = {}
    for ask in asks:
        found = state(connection, ask.id, now)
        grant = _denied(found, ask, copy_of(found, fresh_for=fresh_for, now=now), now)
        if grant is None:
            grant = Lease(ask.id, new_token(), now + lease_for)
            row = (ask.id, grant.token, grant.expires_at, now, found.last_fetched)
            connection.execute(_LEASE, row)
        grants[ask.id] = grant
    return grants


def _denied(found: State, ask: Ask, copy: Copy | None, now: float) -> Grant | None:
    if copy is not None and copy.generation != ask.seen:
        return Newer(Record(copy, found.held_until, found.failure))
    if found.held_until is not None and found.is_held(now) and not ask.take_over:
        return Held(found.held_until)
    if ask.missed(found.failure):
        return Newer(Record(copy, None, found.failure))
    return None


def publish(
    connection: apsw.Connection,
    copies: Mapping[str, tuple[Lease, Copy]],
    *,
    fresh_for: float,
    now: float,
) -> Published:
    superseded, changed = set(), set()
    for key, (lease, copy) in copies.items():
        found = state(connection, key, now)
        if found.token != lease.token or not found.is_held(now):
            superseded.add(key)
        elif found.seen_fetched != found.last_fetched:
            superseded.add(key)
            _end(connection, key, found.generation, found.failure, now)
        elif _publish_one(connection, key, lease, copy, found, fresh_for=fresh_for, now=now):
            changed.add(key)
    return Published(frozenset(superseded), frozenset(changed))


def _publish_one(
    connection: apsw.Connection,
    key: str,
    lease: Lease,
    copy: Copy,
    found: State,
    *,
    fresh_for: float,
    now: float,
) -> bool:
    fetched = CODEC.decode(copy.value)  # type: ignore[arg-type]  # bytes
    changed = store(connection, key, fetched, at=copy.fetched_at, fresh_for=fresh_for, now=now)
    failure = None
    if fetched.failed:
        failure = failed(found.failure, fetched.failed, now, 0.0, fetched.pause)
    _end(connection, key, lease.token, failure, now)
    return changed


def renew(
    connection: apsw.Connection, leases: Sequence[Lease], *, lease_for: float, now: float
) -> set[str]:
    lost = set()
    for lease in leases:
        connection.execute(_RENEW, (now + lease_for, now, lease.id, lease.token, now))
        if not connection.changes():
            lost.add(lease.id)
    return lost


def release(
    connection: apsw.Connection,
    leases: Sequence[Lease],
    failures: Mapping[str, Failure],
    *,
    now: float,
) -> None:
    for lease in leases:
        found = state(connection, lease.id, now)
        if found.token == lease.token:
            failure = failures.get(lease.id, found.failure)
            _end(connection, lease.id, found.generation, failure, now)


def _end(
    connection: apsw.Connection,
    key: str,
    generation: str | None,
    failure: Failure | None,
    now: float,
) -> None:
    parts: tuple[float | str | None, ...] = (None,) * 4
    if failure is not None:
        parts = (failure.count, failure.retry_at, failure.error, now)
    connection.execute(_END, (generation, *parts, key))


def count(connection: apsw.Connection, *, now: float) -> StoreStats:
    return StoreStats(*connection.execute(_COUNT, (now,)).get)
