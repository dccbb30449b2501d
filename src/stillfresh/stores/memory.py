"""`memory://`: the contract in one process; the reference that other stores are compared with (S3).

Every step is a few lines without an `await`, so on one event loop each is atomic as it stands.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from heapq import nsmallest
from itertools import islice
from secrets import token_hex
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

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
    StoreStats,
)
from stillfresh.stores.listing import checked_limit, is_listed
from stillfresh.tags import TagIndex

__all__ = ["MemoryStore"]

MAX_COPIES: Final = 100_000


class Row(Struct, eq=False):
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
        copy = self.copy
        if copy is None:
            return Entry(kind, id_, self.record(known=None))
        size = len(copy.value) if isinstance(copy.value, bytes) else None
        return Entry(kind, id_, self.record(copy.generation), size)

    def holds(self, lease: Lease, now: float) -> bool:
        """S2: the token is the fence; the time only permits a takeover."""
        return self.token == lease.token and not is_over(self.held_until, now)


class MemoryStore:
    """Holds at most `max_copies`: one more drops the oldest that nobody is loading."""

    outlives_loops = True
    """It is bound to no event loop: what it holds stays when the loop of its cache ends (E21)."""

    def __init__(
        self,
        *,
        clock: Clock = time.time,
        max_copies: int = MAX_COPIES,
        new_token: Callable[[], str] = lambda: token_hex(16),
    ) -> None:
        if max_copies < 1:
            raise ConfigError(f"max_copies: must be 1 or more, not {shown(max_copies)}")
        self._clock = clock
        self._max_copies = max_copies
        self._new_token = new_token
        self._rows: dict[tuple[str, str], Row] = {}
        self._tagged: TagIndex[tuple[str, str]] = TagIndex()
        self._open = False

    async def open(self) -> None:
        self._open = True

    async def close(self) -> None:
        """What was kept goes: it lived in this process only."""
        self._open = False
        self._rows.clear()
        self._tagged.clear()

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        rows, known = self._opened(), known or {}
        return {id_: row.record(known.get(id_)) for id_ in ids if (row := rows.get((kind, id_)))}

    async def read(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        return self.read_now(kind, ids, known)

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        now = self._clock()
        return {ask.id: self._acquire(kind, ask, now, lease_for) for ask in asks}

    def _acquire(self, kind: str, ask: Ask, now: float, lease_for: float) -> Grant:
        row = self._opened().setdefault((kind, ask.id), Row())
        if row.copy is not None and row.copy.generation != ask.seen:
            return Newer(row.record(known=None))
        is_held = row.token is not None and not is_lease_over(row.held_until, now, lease_for)
        if is_held and not ask.take_over:
            return Held(row.held_until)
        if ask.missed(row.failure):
            return Newer(row.record(known=None))
        row.token, row.held_until = self._new_token(), now + lease_for
        self._tagged.remove((kind, ask.id), row.tags)
        row.tags = ask.tags
        self._tagged.add((kind, ask.id), row.tags)
        return Lease(ask.id, row.token, row.held_until)

    async def publish(self, kind: str, copies: Mapping[str, tuple[Lease, Copy]]) -> set[str]:
        now, rows = self._clock(), self._opened()
        superseded = set()
        for id_, (lease, copy) in copies.items():
            row = rows.get((kind, id_))
            if row is None or not row.holds(lease, now):
                superseded.add(id_)
                continue
            row.copy, row.token, row.failure = copy, None, None
            rows[kind, id_] = rows.pop((kind, id_))
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
        failures = failures or {}
        for lease in leases:
            row = self._opened().get((kind, lease.id))
            if row is not None and row.token == lease.token:
                row.token = None
                row.failure = failures.get(lease.id, row.failure)
                self._forget_if_empty((kind, lease.id), row)
        self._shrink()

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        self._invalidate([(kind, id_) for id_ in ids], soft=soft)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        self._opened()
        keys = sorted(self._tagged.keys(tag))
        self._invalidate(keys, soft=soft)
        return keys

    def _invalidate(self, keys: Iterable[tuple[str, str]], *, soft: bool) -> None:
        mark = Mark.SOFT if soft else Mark.HARD
        for key in keys:
            if row := self._opened().get(key):
                row.token = None
                if row.copy is not None:
                    row.copy = replace(row.copy, mark=max(row.copy.mark, mark))
                self._forget_if_empty(key, row)

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        for id_ in ids:
            self._drop((kind, id_))

    async def evict(self, before: float) -> int:
        gone = [key for key, row in self._opened().items() if _is_gone(row, before)]
        for key in gone:
            self._drop(key)
        return len(gone)

    async def stats(self) -> StoreStats:
        now, rows = self._clock(), list(self._opened().values())
        values = [row.copy.value for row in rows if row.copy is not None]
        return StoreStats(
            copies=len(values),
            leases=sum(row.token is not None and not is_over(row.held_until, now) for row in rows),
            bytes=sum(len(value) for value in values if isinstance(value, Sized)),
        )

    async def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[Entry]:
        rows = self._opened()
        listed = (name for name in rows if is_listed(name, kind, search, after))
        return [rows[name].entry(*name) for name in nsmallest(checked_limit(limit), listed)]

    def _opened(self) -> dict[tuple[str, str], Row]:
        if not self._open:
            raise NotOpen("this store is closed")
        return self._rows

    def _drop(self, key: tuple[str, str]) -> None:
        if (row := self._opened().pop(key, None)) is not None:
            self._tagged.remove(key, row.tags)

    def _forget_if_empty(self, key: tuple[str, str], row: Row) -> None:
        if row.copy is None and row.token is None and row.failure is None:
            self._drop(key)

    def _shrink(self) -> None:
        """Oldest publication first; a row under lease is somebody's work.

        One in a hundred more than asked for: finding the oldest walks over what was dropped.
        """
        if (over := len(self._rows) - self._max_copies) > 0:
            idle = (key for key, row in self._rows.items() if row.token is None)
            for key in list(islice(idle, over + self._max_copies // 100)):
                self._drop(key)


def _is_gone(row: Row, before: float) -> bool:
    """Nothing that anybody could be served, and nothing under way."""
    if row.copy is not None:
        served = row.copy.fetched_at + row.copy.policy.lasts
    else:
        served = row.failure.retry_at if row.failure is not None else 0.0
    return max(served, row.held_until if row.token is not None else 0.0) < before
