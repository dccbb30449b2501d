"""The store `memory://`: the contract in one process, and the reference for the other stores.

Every step on one key is a few lines without an `await`, so one event loop runs it atomically.
Methods that walk over many keys do so in slices, and let other tasks run in between. Counts are
kept up to date by each write, so that `stats` does not walk. With a limit of bytes, copies are
dropped in the order of the CLOCK algorithm, as in the memory cache in front of a store.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import count
from secrets import token_hex
from typing import Final

from msgspec.structs import replace

from stillfresh.bounded import BESIDE, SLICE, Room, sliced
from stillfresh.checks import checked_bytes, checked_whole
from stillfresh.clock import Clock
from stillfresh.errors import STORE_CLOSED, NotOpen
from stillfresh.freshness import is_over
from stillfresh.stores.capabilities import (
    CountsEntries,
    EvictsEntries,
    LimitsBytes,
    ListsEntries,
    LivesInProcess,
    ReadsInline,
    WaitsInThreads,
)
from stillfresh.stores.contract import (
    After,
    Ask,
    Copy,
    Failures,
    Generations,
    Grant,
    LateTags,
    Lease,
    Mark,
    Put,
    PutOutcome,
    PutResult,
    Record,
    Store,
    StoredEntry,
    StoreStats,
)
from stillfresh.stores.memory_rows import Key, MemoryRow, MemoryRows
from stillfresh.stores.rules import (
    checked_limit,
    is_gone,
    is_listed,
    put_refusal,
    with_stored_parts,
)

__all__ = ["MemoryStore"]

MAX_COPIES: Final = 100_000
MOST_COPIES: Final = 10_000_000
"""Whatever their size in bytes."""


class MemoryStore(
    Store,
    ReadsInline,
    WaitsInThreads,
    ListsEntries,
    EvictsEntries,
    CountsEntries,
    LimitsBytes,
    LivesInProcess,
):
    """Entries in this process, opened by `memory://`. Processes do not share them.

    It holds at most `max_copies`, and drops the oldest; or at most `max_bytes`, and drops the least
    recently used. Entries that are being loaded stay.
    """

    def __init__(
        self,
        *,
        clock: Clock = time.time,
        max_copies: int | None = None,
        max_bytes: int | str | None = None,
        new_token: Callable[[], str] | None = None,
    ) -> None:
        self._clock = clock
        if max_bytes is not None:
            self.max_bytes = checked_bytes("max_bytes", max_bytes)
        self._room = Room(self.max_bytes, self._free)
        if max_copies is None:  # as many as there is room for
            fit = MAX_COPIES if self.max_bytes is None else self.max_bytes // BESIDE + 1
            max_copies = min(fit, MOST_COPIES)
        self._max_copies = checked_whole("max_copies", max_copies)
        self._keeps: dict[str, Callable[[str], bool]] = {}
        self._passed = 0
        """Rows checked since one was last dropped."""
        numbers = map(f"{token_hex(5)}{{:x}}".format, count())
        self._new_token = new_token or numbers.__next__
        self._rows = MemoryRows(max_copies, self._room)
        self._open = False

    async def open(self) -> None:
        self._open = True

    async def close(self) -> None:
        """Drop everything: it existed only in this process."""
        self._open = False
        self._room = Room(self.max_bytes, self._free)
        old_rows = self._rows
        self._rows = MemoryRows(self._max_copies, self._room)
        async for _ in sliced(old_rows.freed()):
            pass

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        rows = self._opened()
        known = known or {}
        records: dict[str, Record] = {}
        for id_ in ids:
            key = (kind, id_)
            row = rows.get(key)
            if row is None:
                continue
            if self.max_bytes is not None:
                row.is_used = True
            records[id_] = rows.record(key, row, known.get(id_))
        return records

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        del lag
        return self.read_now(kind, ids, known)

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        rows = self._opened()
        now = self._clock()
        until = now + lease_for
        token = self._new_token()  # one for all: only a key's own tokens are compared
        grants: dict[str, Grant] = {}
        for ask in asks:
            id_ = ask.id
            key = (kind, id_)
            row = rows.get(key)
            if row is not None:
                refusal = ask.denied(rows.record(key, row, None), now, lease_for)
                if refusal is not None:
                    grants[id_] = refusal
                    continue
            lease = Lease(id_, token, until, rows.epoch)
            rows.lease(key, lease, ask.tags)
            grants[id_] = lease
        return grants

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        now = self._clock()
        rows = self._opened()
        late = tags or {}
        if late:
            past = [copies[id_][0] for id_ in late if rows.is_past(copies[id_][0], late[id_])]
            await self.release(kind, past)
        superseded: set[str] = set()
        for id_, (lease, copy) in copies.items():
            if not rows.publish((kind, id_), lease, copy, now, late.get(id_)):
                superseded.add(id_)
        if rows.count > self._max_copies:
            self._shrink()
        return superseded

    def new_generation(self) -> str:
        return self._new_token()

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        """Never AGAIN: nothing arrives late in one process."""
        rows = self._opened()
        now = self._clock()
        results: dict[str, PutResult] = {}
        for id_, put in puts.items():
            key = (kind, id_)
            row = rows.get(key)
            stored = None if row is None else row.copy
            refusal = put_refusal(put, stored, now)
            if refusal is not None:
                results[id_] = refusal
                continue
            copy = with_stored_parts(put.copy, stored)
            rows.put(key, copy, put.tags, put.late)
            results[id_] = PutResult(PutOutcome.STORED, copy.version)
        self._shrink()
        return results

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        rows = self._opened()
        now = self._clock()
        lost: set[str] = set()
        for lease in leases:
            key = (kind, lease.id)
            if rows.holds(key, lease, now):
                rows.leases[key] = replace(rows.leases[key], expires_at=now + lease_for)
            else:
                lost.add(lease.id)
        return lost

    async def release(self, kind: str, leases: Sequence[Lease], failures: Failures = None) -> None:
        rows = self._opened()
        failures = failures or {}
        for lease in leases:
            key = (kind, lease.id)
            row = rows.get(key)
            if row is not None and rows.has_lease(key, lease):
                rows.end_lease(key)
                row.failure = failures.get(lease.id, row.failure)
                self._forget_if_empty(key, row)
        self._shrink()

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        self._invalidate([(kind, id_) for id_ in ids], soft=soft)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[Key]:
        keys = self._opened().begin_epoch(tag)
        async for next_keys in sliced(keys):
            self._invalidate(next_keys, soft=soft)
        return keys

    def _invalidate(self, keys: Iterable[Key], *, soft: bool) -> None:
        mark = Mark.SOFT if soft else Mark.HARD
        rows = self._opened()
        for key in keys:
            row = rows.get(key)
            if row is None:
                continue
            rows.end_lease(key)
            if row.copy is not None:
                row.copy = replace(row.copy, mark=max(row.copy.mark, mark))
            self._forget_if_empty(key, row)

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        for id_ in ids:
            self._opened().drop((kind, id_))

    async def evict(self, before: float) -> int:
        rows = self._opened()
        dropped = 0
        async for items in sliced(rows.items()):
            for key, row in items:
                # Another task may have replaced the row since the slice was taken.
                if is_gone(rows.record(key, row, None), before) and rows.get(key) is row:
                    rows.drop(key)
                    dropped += 1
        return dropped

    async def stats(self) -> StoreStats:
        now = self._clock()
        rows = self._opened()
        live_leases = sum(not is_over(lease.expires_at, now) for lease in rows.leases.values())
        size = self._room.held
        stats = StoreStats(rows.copies, live_leases, size)
        if self.max_bytes is None:
            return stats
        return replace(stats, held=size, evicted=rows.evicted)

    async def entries(
        self, kind: str | None = None, search: str = "", after: After = None, limit: int = 100
    ) -> list[StoredEntry]:
        rows = self._opened()
        limit = checked_limit(limit)
        page: list[tuple[Key, MemoryRow]] = []
        async for items in sliced(rows.items()):
            is_full = len(page) == limit  # then most rows come after it, and need no other check
            near = [item for item in items if item < page[-1]] if is_full else items
            page += [item for item in near if is_listed(item[0], kind, search, after)]
            page = sorted(page)[:limit]
        return [rows.entry(key, row) for key, row in page]

    async def walk(self, kind: str | None) -> AsyncIterator[list[StoredEntry]]:
        """All entries in one walk: each page of `entries` would be another."""
        rows = self._opened()
        async for items in sliced(rows.items()):
            yield [rows.entry(key, row) for key, row in items if kind in {None, key[0]}]

    def _opened(self) -> MemoryRows:
        if not self._open:
            raise NotOpen(STORE_CLOSED)
        return self._rows

    def _forget_if_empty(self, key: Key, row: MemoryRow) -> None:
        if row.copy is None and row.failure is None and key not in self._rows.leases:
            self._rows.drop(key)

    def before_evicting(self, kind: str, keeps: Callable[[str], bool]) -> None:
        self._keeps[kind] = keeps

    def _free(self) -> bool:
        """Check a slice from the front of the line; rows that were used go to the end.

        True if there is room now, or if another call may find some.
        """
        rows = self._rows
        now = self._clock()
        used: list[Key] = []
        for key, row in rows.first(SLICE):
            if self._room.is_enough:
                return True
            is_held = rows.is_held(key, now)
            if row.copy is None or is_held or self._was_used(key, row):
                if row.copy is not None and not is_held:
                    used.append(key)
                rows.move_to_end(key)
                self._passed += 1
            else:
                rows.evict(key)
                self._passed = 0
        if self._passed >= SLICE and used:  # everything is in use
            rows.evict(used[0])
            self._passed = 0
        return self._passed <= rows.count

    def _was_used(self, key: Key, row: MemoryRow) -> bool:
        """True if the row was used since the last check; this begins the next period."""
        was_used = row.is_used
        row.is_used = False
        keeps = self._keeps.get(key[0])
        return was_used or (keeps is not None and keeps(key[1]))

    def _shrink(self) -> None:
        """Drop some more than needed, because finding the oldest walks over dropped rows."""
        over = self._rows.count - self._max_copies
        if over <= 0:
            return
        for key in self._rows.oldest(over + min(self._max_copies // 100, SLICE)):
            self._rows.drop(key)
