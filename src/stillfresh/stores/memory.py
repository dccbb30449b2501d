"""`memory://`: the contract in one process; the reference that other stores are compared with (S3).

Every step on one key is a few lines without an `await`, so on one event loop it is atomic as it
stands. What walks over many keys does it in slices, and counts are kept, not made (E28).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from secrets import token_hex
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from stillfresh.bounded import SLICE, TagIndex, sliced
from stillfresh.clock import Clock
from stillfresh.errors import ConfigError, NotOpen, shown
from stillfresh.freshness import is_lease_over, is_over
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Entry,
    Failure,
    Grant,
    Held,
    Lease,
    Mark,
    Newer,
    Record,
    Store,
    StoreStats,
    checked_limit,
    is_listed,
)

__all__ = ["MemoryStore"]

MAX_COPIES: Final = 100_000
PART: Final = 65_536
"""Rows in one dict, about: it grows in one step of 4 ms, a dict of a million in one of 50 ms."""

Key: TypeAlias = tuple[str, str]


class MemoryRow(Struct, eq=False, gc=False):
    """What the contract's Record says, and the token that only the holder may know."""

    copy: Copy | None = None
    token: str | None = None
    held_until: float = 0.0
    failure: Failure | None = None
    tags: tuple[str, ...] = ()

    def record(self, known: str | None) -> Record:
        copy = self.copy
        if copy is not None and copy.generation == known and copy.value is not None:
            copy = replace(copy, value=UNREAD)
        return Record(copy, self.held_until if self.token is not None else None, self.failure)

    def entry(self, kind: str, id_: str) -> Entry:
        if self.copy is None:
            return Entry(kind, id_, self.record(None))
        size = None if self.copy.value is None else _size(self.copy)
        return Entry(kind, id_, self.record(self.copy.generation), size)

    def holds(self, lease: Lease, now: float) -> bool:
        return self.token == lease.token and not is_over(self.held_until, now)


class MemoryRows:
    """All rows, by kind and id, and what they add up to."""

    def __init__(self, most: int) -> None:
        self.parts: list[dict[Key, MemoryRow]] = [{} for _ in range(-(-most // PART))]
        """Each in the order of publication."""
        self.copies = self.bytes = 0
        self.leased: dict[Key, MemoryRow] = {}
        self.tagged: TagIndex[Key] = TagIndex()

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def part(self, key: Key) -> dict[Key, MemoryRow]:
        return self.parts[hash(key[1]) % len(self.parts)]

    def get(self, key: Key) -> MemoryRow | None:
        return self.parts[hash(key[1]) % len(self.parts)].get(key)

    def lease(self, key: Key, token: str, until: float, tags: tuple[str, ...]) -> None:
        row = self.leased[key] = self.part(key).setdefault(key, MemoryRow())
        if row.tags != tags:
            self.tagged.remove(key, row.tags)
            self.tagged.add(key, tags)
        row.token, row.held_until, row.tags = token, until, tags

    def end_lease(self, key: Key, row: MemoryRow) -> None:
        row.token = None
        self.leased.pop(key, None)

    def publish(self, key: Key, lease: Lease, copy: Copy, now: float) -> bool:
        """S2: the token is the fence; the time only permits a takeover."""
        part = self.part(key)
        row = part.get(key)
        if row is None or not row.holds(lease, now):
            return False
        if row.copy is None:
            self.copies += 1
        else:
            self.bytes -= _size(row.copy)
        self.bytes += _size(copy)
        row.copy, row.failure, row.token = copy, None, None
        self.leased.pop(key, None)
        part[key] = part.pop(key)
        return True

    def drop(self, key: Key) -> None:
        if (row := self.part(key).pop(key, None)) is not None:
            if row.copy is not None:
                self.copies -= 1
                self.bytes -= _size(row.copy)
            self.end_lease(key, row)
            self.tagged.remove(key, row.tags)

    def items(self) -> Iterator[tuple[Key, MemoryRow]]:
        """Those of a part as they are when it is reached; each may be gone since."""
        for part in self.parts:
            left = list(part.items())
            while left:  # what is dropped meanwhile is freed slice by slice as well
                yield left.pop()

    def freed(self) -> Iterator[None]:
        """Let go of one row or tag at each step, when nobody asks any more."""
        for part in self.parts:
            while part:
                part.popitem()
                yield
        yield from self.tagged.freed()

    def oldest(self, number: int) -> list[Key]:
        """Oldest publication first, as many of each part; a row under lease is somebody's work."""
        share = -(-number // len(self.parts))
        idle = ((key for key, row in part.items() if row.token is None) for part in self.parts)
        return [key for keys in idle for key in islice(keys, share)]


class MemoryStore(Store):
    """Holds at most `max_copies`: one more drops the oldest that nobody is loading."""

    reads_inline = outlives_loops = True

    def __init__(
        self,
        *,
        clock: Clock = time.time,
        max_copies: int = MAX_COPIES,
        new_token: Callable[[], str] | None = None,
    ) -> None:
        if max_copies < 1:
            raise ConfigError(f"max_copies: must be 1 or more, not {shown(max_copies)}")
        self._clock = clock
        self._max_copies = max_copies
        numbers = map(f"{token_hex(10)}{{:012x}}".format, count())
        self._new_token = new_token or numbers.__next__
        self._rows = MemoryRows(max_copies)
        self._open = False

    async def open(self) -> None:
        self._open = True

    async def close(self) -> None:
        """What was kept goes: it lived in this process only."""
        self._open = False
        rows, self._rows = self._rows, MemoryRows(self._max_copies)
        async for _ in sliced(rows.freed()):
            pass

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        rows, known = self._opened(), known or {}
        return {id_: row.record(known.get(id_)) for id_ in ids if (row := rows.get((kind, id_)))}

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        now = self._clock()
        return {ask.id: self._acquire(kind, ask, now, lease_for) for ask in asks}

    def _acquire(self, kind: str, ask: Ask, now: float, lease_for: float) -> Grant:
        rows, key = self._opened(), (kind, ask.id)
        if (row := rows.get(key)) is not None:
            if row.copy is not None and row.copy.generation != ask.seen:
                return Newer(row.record(known=None))
            is_held = row.token is not None and not is_lease_over(row.held_until, now, lease_for)
            if is_held and not ask.take_over:
                return Held(row.held_until)
            if ask.missed(row.failure):
                return Newer(row.record(known=None))
        lease = Lease(ask.id, self._new_token(), now + lease_for)
        rows.lease(key, lease.token, lease.expires_at, ask.tags)
        return lease

    async def publish(self, kind: str, copies: Mapping[str, tuple[Lease, Copy]]) -> set[str]:
        now, publish = self._clock(), self._opened().publish
        superseded = {
            id_
            for id_, (lease, copy) in copies.items()
            if not publish((kind, id_), lease, copy, now)
        }
        self._shrink()
        return superseded

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        now, lost = self._clock(), set()
        for lease in leases:
            row = self._opened().get((kind, lease.id))
            if row is not None and row.holds(lease, now):
                row.held_until = now + lease_for
            else:
                lost.add(lease.id)
        return lost

    async def release(
        self, kind: str, leases: Sequence[Lease], failures: Mapping[str, Failure] | None = None
    ) -> None:
        rows, failures = self._opened(), failures or {}
        for lease in leases:
            row = rows.get((kind, lease.id))
            if row is not None and row.token == lease.token:
                rows.end_lease((kind, lease.id), row)
                row.failure = failures.get(lease.id, row.failure)
                self._forget_if_empty((kind, lease.id), row)
        self._shrink()

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        self._invalidate([(kind, id_) for id_ in ids], soft=soft)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[Key]:
        keys = self._opened().tagged.keys(tag)
        async for some in sliced(keys):
            self._invalidate(some, soft=soft)
        return keys

    def _invalidate(self, keys: Iterable[Key], *, soft: bool) -> None:
        mark, rows = Mark.SOFT if soft else Mark.HARD, self._opened()
        for key in keys:
            if row := rows.get(key):
                rows.end_lease(key, row)
                if row.copy is not None:
                    row.copy = replace(row.copy, mark=max(row.copy.mark, mark))
                self._forget_if_empty(key, row)

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        for id_ in ids:
            self._opened().drop((kind, id_))

    async def evict(self, before: float) -> int:
        rows, dropped = self._opened(), 0
        async for some in sliced(rows.items()):
            for key, row in some:
                if _is_gone(row, before) and rows.get(key) is row:
                    rows.drop(key)
                    dropped += 1
        return dropped

    async def stats(self) -> StoreStats:
        now, rows = self._clock(), self._opened()
        live = sum(not is_over(row.held_until, now) for row in rows.leased.values())
        return StoreStats(rows.copies, live, rows.bytes)

    async def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[Entry]:
        rows, limit = self._opened(), checked_limit(limit)
        found: list[tuple[Key, MemoryRow]] = []
        async for some in sliced(rows.items()):
            last = found[limit - 1 :]
            near = [item for item in some if item < last[0]] if last else some
            found += [item for item in near if is_listed(item[0], kind, search, after)]
            found = sorted(found)[:limit]
        return [row.entry(*key) for key, row in found]

    def _opened(self) -> MemoryRows:
        if not self._open:
            raise NotOpen("this store is closed")
        return self._rows

    def _forget_if_empty(self, key: Key, row: MemoryRow) -> None:
        if row.copy is None and row.token is None and row.failure is None:
            self._rows.drop(key)

    def _shrink(self) -> None:
        """Some more than asked for: finding the oldest walks over what was dropped."""
        if (over := len(self._rows) - self._max_copies) > 0:
            for key in self._rows.oldest(over + min(self._max_copies // 100, SLICE)):
                self._rows.drop(key)


def _size(copy: Copy) -> int:
    return len(copy.value) if isinstance(copy.value, bytes) else 0


def _is_gone(row: MemoryRow, before: float) -> bool:
    """Nothing that anybody could be served, and nothing under way."""
    if row.copy is not None:
        served = row.copy.fetched_at + row.copy.policy.lasts
    else:
        served = row.failure.retry_at if row.failure is not None else 0.0
    return max(served, row.held_until if row.token is not None else 0.0) < before
