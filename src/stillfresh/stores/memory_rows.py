"""The rows of `memory://`: one for each id, their order, and their sums."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from stillfresh.bounded import BESIDE, BoundedDict, Room, TagIndex
from stillfresh.freshness import is_over
from stillfresh.stores.contract import REMEMBERED, UNREAD, Copy, Failure, Lease, Record, StoredEntry
from stillfresh.stores.rules import with_stored_parts

PART: Final = 131_072
"""Rows in one dict, about: it grows in steps of 8 ms, a dict of a million in one of 50 ms."""

Key: TypeAlias = tuple[str, str]


class RowTags(Struct, frozen=True, gc=False):
    """The tags of a key that has some."""

    key: Key
    """The object that the indexes have, so that the dict of rows keeps no other one."""
    leased: tuple[str, ...] = ()
    """Those of the last lease."""
    late: tuple[str, ...] = ()
    """Those that came with the copy."""


class MemoryRow(Struct, eq=False, gc=False):
    """What is stored of one key, but for its lease: few keys have one at a time."""

    copy: Copy | None = None
    failure: Failure | None = None
    tags: RowTags | None = None
    is_used: bool = False
    """True if it was used since it was last checked; only kept with a limit of bytes."""


class MemoryRows:
    """All rows, by kind and id, and their sums."""

    def __init__(self, most: int, room: Room) -> None:
        self.parts: list[dict[Key, MemoryRow]] = [{} for _ in range(-(-most // PART))]
        """Each in the order of publication; with a limit of bytes, in the order of use."""
        self.get: Callable[[Key], MemoryRow | None] = self._get
        self._only_part: dict[Key, MemoryRow] | None = None
        if len(self.parts) == 1:
            self._only_part = self.parts[0]
            self.get = self._only_part.get  # the same without a function of ours
        self.count = 0
        self.copies = 0
        self.evicted = 0
        self.room = room
        self.leases: dict[Key, Lease] = {}
        """Also those that are over, while nobody else has the key's lease."""
        self.tagged: TagIndex[Key] = TagIndex()
        self.late: TagIndex[Key] = TagIndex()
        self.epoch = 0
        self._epochs: BoundedDict[str, int] = BoundedDict(REMEMBERED)
        """The epoch of the last invalidation of each tag."""

    def part(self, key: Key) -> dict[Key, MemoryRow]:
        if self._only_part is not None:
            return self._only_part
        return self.parts[hash(key[1]) % len(self.parts)]

    def _get(self, key: Key) -> MemoryRow | None:
        return self.parts[hash(key[1]) % len(self.parts)].get(key)

    def record(self, key: Key, row: MemoryRow, known: str | None) -> Record:
        copy = row.copy
        if copy is not None and copy.generation == known and copy.value is not None:
            copy = replace(copy, value=UNREAD)
        lease = self.leases.get(key)
        return Record(copy, None if lease is None else lease.expires_at, row.failure)

    def entry(self, key: Key, row: MemoryRow) -> StoredEntry:
        kind, id_ = key
        copy = row.copy
        if copy is None:
            return StoredEntry(kind, id_, self.record(key, row, None))
        size = len(copy.value) if isinstance(copy.value, bytes) else None
        return StoredEntry(kind, id_, self.record(key, row, copy.generation), size)

    def add(self, key: Key, row: MemoryRow) -> None:
        """Add the row of a key that has none."""
        part = self._only_part
        if part is None:
            part = self.part(key)
        part[key] = row
        self.count += 1

    def lease(self, key: Key, lease: Lease, tags: tuple[str, ...]) -> None:
        row = self.get(key)
        if row is None:
            row = MemoryRow()
            self.add(key, row)
        if tags or row.tags is not None:
            self._tag(key, row, leased=tags)
        self.leases[key] = lease

    def _tag(
        self,
        key: Key,
        row: MemoryRow,
        *,
        leased: tuple[str, ...] | None = None,
        late: tuple[str, ...] | None = None,
    ) -> None:
        """Replace those tags that are given."""
        old = row.tags or RowTags(key)
        new = RowTags(
            old.key,
            old.leased if leased is None else leased,
            old.late if late is None else late,
        )
        if new.leased != old.leased:
            self.tagged.remove(old.key, old.leased)
            self.tagged.add(new.key, new.leased)
        if new.late != old.late:
            self.late.remove(old.key, old.late)
            self.late.add(new.key, new.late)
        row.tags = new if new.leased or new.late else None

    def end_lease(self, key: Key) -> None:
        self.leases.pop(key, None)

    def has_lease(self, key: Key, lease: Lease) -> bool:
        """True if it is the key's lease, which may be over."""
        own = self.leases.get(key)
        return own is not None and own.token == lease.token

    def holds(self, key: Key, lease: Lease, now: float) -> bool:
        """True if it is the key's lease, and not over."""
        own = self.leases.get(key)
        if own is None or own.token != lease.token:
            return False
        return not is_over(own.expires_at, now)

    def is_held(self, key: Key, now: float) -> bool:
        """True if the key has a lease that is not over."""
        lease = self.leases.get(key)
        return lease is not None and not is_over(lease.expires_at, now)

    def begin_epoch(self, tag: str) -> list[Key]:
        """Note that the tag is invalidated; return the keys that have it."""
        self.epoch += 1
        self._epochs.note(tag, self.epoch)
        keys = self.tagged.keys(tag)
        late_keys = self.late.keys(tag)
        if not late_keys:
            return keys
        return list(dict.fromkeys(keys + late_keys))  # a key may have the tag in both ways

    def is_past(self, lease: Lease, tags: tuple[str, ...]) -> bool:
        """True if one of the tags was invalidated since the grant, or if that is not known."""
        if tags and lease.epoch < self.epoch - REMEMBERED:
            return True
        return any(self._epochs.get(tag, 0) > lease.epoch for tag in tags)

    def publish(
        self, key: Key, lease: Lease, copy: Copy, now: float, tags: tuple[str, ...] | None = None
    ) -> bool:
        """Store the copy if the lease is live. False: it is not, and nothing was done."""
        row = self.get(key)
        if row is None or not self.holds(key, lease, now):
            return False
        stored = row.copy
        if stored is not None:
            copy = with_stored_parts(copy, stored)
        self._store(key, row, copy, tags)
        return True

    def put(
        self,
        key: Key,
        copy: Copy,
        tags: tuple[str, ...] | None,
        late: tuple[str, ...] | None,
    ) -> None:
        """Store the copy without a lease. If another caller has the lease, it becomes void."""
        row = self.get(key)
        if row is None:
            row = MemoryRow()
            self.add(key, row)
        if tags or (tags is not None and row.tags is not None):
            self._tag(key, row, leased=tags)
        self._store(key, row, copy, late)

    def _store(self, key: Key, row: MemoryRow, copy: Copy, late: tuple[str, ...] | None) -> None:
        """Replace the copy; the lease ends, and the failure is forgotten."""
        if late or (late is not None and row.tags is not None):
            self._tag(key, row, late=late)
        if row.tags is not None:
            key = row.tags.key
        room = self.room
        if row.copy is not None:
            room.held -= _size(row.copy)
            self.move_to_end(key)
        else:
            self.copies += 1
            if row.failure is not None or late:  # else it was added for this copy, near the end
                self.move_to_end(key)
        row.copy = copy
        row.failure = None
        self.leases.pop(key, None)
        size = _size(copy)
        room.held += size
        if size > room.largest:  # nothing else is dropped for it
            self.evict(key)
        elif room.held > room.most:
            room.shrink()

    def evict(self, key: Key) -> None:
        before = self.room.held
        self.drop(key)
        self.evicted += before - self.room.held

    def drop(self, key: Key) -> None:
        row = self.part(key).pop(key, None)
        if row is None:
            return
        self.count -= 1
        if row.copy is not None:
            self.copies -= 1
            self.room.held -= _size(row.copy)
        self.end_lease(key)
        if row.tags is not None:
            self.tagged.remove(key, row.tags.leased)
            self.late.remove(key, row.tags.late)

    def items(self) -> Iterator[tuple[Key, MemoryRow]]:
        """The rows of each part when it is reached; each may have been deleted since."""
        for part in self.parts:
            left = list(part.items())
            while left:  # dropped rows are freed in slices as well
                yield left.pop()

    def freed(self) -> Iterator[None]:
        """Free one row or tag at each step; for rows that the store no longer uses."""
        for part in self.parts:
            while part:
                part.popitem()
                yield
        yield from self.tagged.freed()
        yield from self.late.freed()

    def move_to_end(self, key: Key) -> None:
        part = self.part(key)
        part[key] = part.pop(key)

    def first(self, number: int) -> list[tuple[Key, MemoryRow]]:
        """The first rows of each part, `number` in all, about."""
        share = -(-number // len(self.parts))
        return [item for part in self.parts for item in islice(part.items(), share)]

    def oldest(self, number: int) -> list[Key]:
        """The oldest publications of each part, `number` in all, about; no rows under lease."""
        share = -(-number // len(self.parts))
        idle = ((key for key in part if key not in self.leases) for part in self.parts)
        return [key for keys in idle for key in islice(keys, share)]


def _size(copy: Copy) -> int:
    """The bytes by which a copy counts against the limit."""
    value = copy.value
    return BESIDE + len(value) if isinstance(value, bytes) else BESIDE
