"""A store of your own: the store contract on a dict, in some hundred lines.

Every step below runs without an `await`, so nothing can come between its reading and its writing.
On a database, make each of them one transaction.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import TypeAlias

from msgspec.structs import replace

from stillfresh import Clock, NotOpen
from stillfresh.stores import EvictsEntries
from stillfresh.stores.contract import (
    REMEMBERED,
    Ask,
    Copy,
    Failure,
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
)
from stillfresh.stores.rules import is_gone, put_refusal, with_stored_parts

Key: TypeAlias = tuple[str, str]  # kind and id


@dataclass
class Row:
    """One entry: copy, lease, failure and tags."""

    copy: Copy | None = None
    token: str | None = None  # of the lease; None: nobody has it
    held_until: float = 0.0
    failure: Failure | None = None
    tags: tuple[str, ...] = ()  # of the last lease or put
    late_tags: tuple[str, ...] = ()  # that came with the copy

    def record(self) -> Record:
        held_until = None if self.token is None else self.held_until
        return Record(self.copy, held_until, self.failure)

    def replace_copy(self, copy: Copy, late_tags: tuple[str, ...] | None) -> None:
        """Store the copy, end the lease, forget the failure."""
        self.copy = copy
        self.token = None
        self.failure = None
        if late_tags is not None:
            self.late_tags = late_tags


class DictStore(Store):
    """What every store does, and nothing else."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._rows: dict[Key, Row] = {}
        self._is_open = False
        self._epoch = 0  # invalidations by tag, so far
        self._tag_epochs: dict[str, int] = {}  # when the last tags were invalidated

    async def open(self) -> None:
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        self._rows.clear()

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        del known, lag  # they allow a cheaper read, and need not be used
        rows = self._opened()
        return {id_: rows[kind, id_].record() for id_ in ids if (kind, id_) in rows}

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        rows = self._opened()
        now = self._clock()
        grants: dict[str, Grant] = {}
        for ask in asks:
            row = rows.get((kind, ask.id), Row())
            denial = ask.denied(row.record(), now, lease_for)
            if denial is not None:
                grants[ask.id] = denial
                continue
            lease = Lease(ask.id, token_hex(16), now + lease_for, self._epoch)
            row.token = lease.token
            row.held_until = lease.expires_at
            row.tags = ask.tags
            rows[kind, ask.id] = row
            grants[ask.id] = lease
        return grants

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        superseded: set[str] = set()
        for id_, (lease, copy) in copies.items():
            late_tags = None if tags is None else tags.get(id_)
            if late_tags and self._was_invalidated_since(lease, late_tags):
                await self.release(kind, [lease])
            row = self._held_row(kind, lease)
            if row is None:
                superseded.add(id_)
            else:
                row.replace_copy(with_stored_parts(copy, row.copy), late_tags)
        return superseded

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        rows = self._opened()
        now = self._clock()
        results: dict[str, PutResult] = {}
        for id_, put in puts.items():
            row = rows.get((kind, id_), Row())
            refusal = put_refusal(put, row.copy, now)  # its condition, and the versions
            if refusal is not None:
                results[id_] = refusal
                continue
            copy = with_stored_parts(put.copy, row.copy)  # what the put leaves as it is
            row.replace_copy(copy, put.late)
            if put.tags is not None:
                row.tags = put.tags
            rows[kind, id_] = row
            results[id_] = PutResult(PutOutcome.STORED, copy.version)
        return results

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        lost: set[str] = set()
        for lease in leases:
            row = self._held_row(kind, lease)
            if row is None:
                lost.add(lease.id)
            else:
                row.held_until = self._clock() + lease_for
        return lost

    async def release(self, kind: str, leases: Sequence[Lease], failures: Failures = None) -> None:
        for lease in leases:
            row = self._opened().get((kind, lease.id))
            if row is not None and row.token == lease.token:  # expired or not
                row.token = None
                row.failure = (failures or {}).get(lease.id, row.failure)
                self._drop_if_empty((kind, lease.id))

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        self._invalidate([(kind, id_) for id_ in ids], soft=soft)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[Key]:
        rows = self._opened()
        self._epoch += 1
        self._tag_epochs.pop(tag, None)  # so that it becomes the last one
        self._tag_epochs[tag] = self._epoch
        if len(self._tag_epochs) > REMEMBERED:
            self._tag_epochs.pop(next(iter(self._tag_epochs)))
        keys = [key for key, row in rows.items() if tag in row.tags or tag in row.late_tags]
        self._invalidate(keys, soft=soft)
        return keys

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        for id_ in ids:
            self._opened().pop((kind, id_), None)

    def _opened(self) -> dict[Key, Row]:
        if not self._is_open:
            raise NotOpen("this store is closed")
        return self._rows

    def _held_row(self, kind: str, lease: Lease) -> Row | None:
        """The row whose live lease this is; None if the lease ended or was voided."""
        row = self._opened().get((kind, lease.id))
        is_held = row is not None and row.token == lease.token and self._clock() < row.held_until
        return row if is_held else None

    def _was_invalidated_since(self, lease: Lease, tags: Iterable[str]) -> bool:
        """True if one of the tags was invalidated after the grant, or if it may have been."""
        is_too_old = lease.epoch < self._epoch - REMEMBERED
        return is_too_old or any(self._tag_epochs.get(tag, 0) > lease.epoch for tag in tags)

    def _invalidate(self, keys: Iterable[Key], *, soft: bool) -> None:
        mark = Mark.SOFT if soft else Mark.HARD
        for key in keys:
            row = self._opened().get(key)
            if row is None:
                continue
            row.token = None  # first the lease: no load that is under way may publish
            if row.copy is not None:
                row.copy = replace(row.copy, mark=max(row.copy.mark, mark))
            self._drop_if_empty(key)

    def _drop_if_empty(self, key: Key) -> None:
        if self._rows[key].record() == Record():
            del self._rows[key]


class SweptStore(DictStore, EvictsEntries):
    """The same, with one thing more: the cache drops old entries every hour."""

    async def evict(self, before: float) -> int:
        rows = self._opened()
        gone = [key for key, row in rows.items() if is_gone(row.record(), before)]
        for key in gone:
            del rows[key]
        return len(gone)
