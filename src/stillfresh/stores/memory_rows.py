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


class MemoryRow(Struct, eq=False, gc=False):
    """The contract's Record, and the token of the lease."""

    copy: Copy | None = None
    token: str | None = None
    held_until: float = 0.0
    failure: Failure | None = None
    tags: tuple[str, ...] = ()
    """The tags of the last lease."""
    late: tuple[str, ...] = ()
    """Tags that came with the copy."""
    is_used: bool = False
    """True if it was used since it was last checked; only kept with a limit of bytes."""
    key: Key = ("", "")  # one object, in whatever names it

    def record(self, known: str | None) -> Record:
        copy = self.copy
        if copy is not None and copy.generation == known and copy.value is not None:
            copy = replace(copy, value=UNREAD)
        return Record(copy, self.held_until if self.token is not None else None, self.failure)

    def entry(self, kind: str, id_: str) -> StoredEntry:
        if self.copy is None:
            return StoredEntry(kind, id_, self.record(None))
        size = len(self.copy.value) if isinstance(self.copy.value, bytes) else None
        return StoredEntry(kind, id_, self.record(self.copy.generation), size)

    def holds(self, lease: Lease, now: float) -> bool:
        return self.token == lease.token and not is_over(self.held_until, now)


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
        self.leased: dict[Key, MemoryRow] = {}
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

    def add(self, row: MemoryRow) -> None:
        """Add the row of a key that has none."""
        part = self._only_part
        if part is None:
            part = self.part(row.key)
        part[row.key] = row
        self.count += 1

    def lease(self, key: Key, token: str, until: float, tags: tuple[str, ...]) -> None:
        row = self.get(key)
        if row is None:
            row = MemoryRow(None, token, until, None, tags, key=key)
            self.add(row)
            if tags:
                self.tagged.add(key, tags)
        else:
            self._tag(row, tags)
            row.token = token
            row.held_until = until
        self.leased[key] = row

    def _tag(self, row: MemoryRow, tags: tuple[str, ...]) -> None:
        if row.tags != tags:
            self.tagged.remove(row.key, row.tags)
            self.tagged.add(row.key, tags)
            row.tags = tags

    def end_lease(self, key: Key, row: MemoryRow) -> None:
        row.token = None
        row.held_until = 0.0
        self.leased.pop(key, None)

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
        if row is None or not row.holds(lease, now):
            return False
        stored = row.copy
        if stored is not None:
            copy = with_stored_parts(copy, stored)
        self._store(row, copy, tags)
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
            row = MemoryRow(key=key)
            self.add(row)
        if tags is not None:
            self._tag(row, tags)
        self._store(row, copy, late)

    def _store(self, row: MemoryRow, copy: Copy, late: tuple[str, ...] | None) -> None:
        """Replace the copy; the lease ends, and the failure is forgotten."""
        key = row.key
        if late is not None and late != row.late:
            self.late.remove(key, row.late)
            self.late.add(key, late)
            row.late = late
        room = self.room
        if row.copy is not None:
            room.held -= _size(row.copy)
            self.move_to_end(key)
        else:
            self.copies += 1
            if row.failure is not None:  # else it was added for this copy, and is near the end
                self.move_to_end(key)
        row.copy = copy
        row.failure = None
        self.end_lease(key, row)
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
        self.end_lease(key, row)
        self.tagged.remove(key, row.tags)
        self.late.remove(key, row.late)

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
        idle = ((key for key, row in part.items() if row.token is None) for part in self.parts)
        return [key for keys in idle for key in islice(keys, share)]


def _size(copy: Copy | None) -> int:
    """The bytes by which a copy counts against the limit."""
    if copy is None:
        return 0
    value_size = len(copy.value) if isinstance(copy.value, bytes) else 0
    return BESIDE + value_size
