"""The limit of a file: how many bytes its copies take, and which are dropped above the limit.

The first process that opens a file with a limit adds triggers that count every write, for each
kind, and a column and an index of the last use. A read writes nothing: it is noted in memory, and
notes are written together, at most once a minute for each copy. An eviction spares the copies that
are noted, and writes their uses.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from heapq import merge
from itertools import islice
from threading import Lock
from typing import Final, NamedTuple

import apsw

from stillfresh.clock import Clock
from stillfresh.stores.contract import Copy
from stillfresh.stores.sqlite.schema import CREATE_HELD, SELECT_HELD, Row, at_most
from stillfresh.stores.sqlite.steps import own_kinds, own_tables

WRITTEN_EVERY: Final = 60.0
"""Seconds between writes of the notes; a use is exact to this."""
MOST_NOTED: Final = 100_000
"""Copies whose use is noted in that time: writing them takes half a second in all."""
SLICE: Final = 200
"""Copies that one step drops, or whose use it writes."""
SLICE_BYTES: Final = 4_000_000
"""Bytes that one step drops: SQLite visits the pages of long values one by one. A write of more
than half of this drops twice what it wrote."""

_USED: Final = "max(coalesce(last_used_at, 0), coalesce(last_updated_at, 0))"
_SIZE: Final = "(200 + 3 * octet_length({row}id) + coalesce(octet_length({row}value), 0))"
"""A value, and roughly the space of its rows in tables and indexes."""
_ROWS: Final = {"size": "", "new": "NEW.", "old": "OLD."}
_TEXTS: Final = {
    "is_counted": "SELECT 1 FROM stillfresh_held WHERE kind = '{kind}'",
    "begin": """
        ALTER TABLE "{kind}_ttl" ADD COLUMN last_used_at INTEGER;
        CREATE INDEX "stillfresh_{kind}_used" ON "{kind}_ttl"({used}) WHERE generation IS NOT NULL;
        INSERT INTO stillfresh_held(kind, bytes)
            SELECT '{kind}', coalesce(sum({size}), 0) FROM "{kind}";
        CREATE TRIGGER "stillfresh_{kind}_more" AFTER INSERT ON "{kind}" BEGIN
            UPDATE stillfresh_held SET bytes = bytes + {new} WHERE kind = '{kind}'; END;
        CREATE TRIGGER "stillfresh_{kind}_other" AFTER UPDATE ON "{kind}" BEGIN
            UPDATE stillfresh_held SET bytes = bytes + {new} - {old} WHERE kind = '{kind}'; END;
        CREATE TRIGGER "stillfresh_{kind}_less" AFTER DELETE ON "{kind}" BEGIN
            UPDATE stillfresh_held SET bytes = bytes - {old} WHERE kind = '{kind}'; END;
    """,
    "oldest": """
        SELECT {used}, '{kind}', id, (SELECT {size} FROM "{kind}" c WHERE c.id = t.id)
        FROM "{kind}_ttl" t INDEXED BY "stillfresh_{kind}_used"
        WHERE generation IS NOT NULL AND coalesce(lease_expires_at, 0) <= ? ORDER BY {used}
    """,
    "use": 'UPDATE "{kind}_ttl" SET last_used_at = ? WHERE id = ? AND generation IS NOT NULL',
    "evicted": "UPDATE stillfresh_held SET evicted = evicted + ? WHERE kind = '{kind}'",
}


@cache
def _sql(name: str, kind: str) -> str:
    sizes = {name: _SIZE.format(row=row) for name, row in _ROWS.items()}
    return _TEXTS[name].format(kind=kind, used=_USED, **sizes)


class ReadNotes:
    """The copies that were read since their use was last written. Any thread may call this."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ids: defaultdict[str, set[str]] = defaultdict(set)
        self._left = MOST_NOTED

    def add(self, kind: str, ids: Iterable[str]) -> None:
        with self._lock:
            noted = self._ids[kind]
            for id_ in ids:
                if id_ not in noted and self._left:
                    noted.add(id_)
                    self._left -= 1

    def take(self) -> dict[str, list[str]]:
        """All ids by kind; from now on, none is noted."""
        with self._lock:
            noted = self._ids
            self._ids = defaultdict(set)
            self._left = MOST_NOTED
        return {kind: list(ids) for kind, ids in noted.items()}

    def take_some(self, kind: str, ids: Iterable[str]) -> list[str]:
        """Those of these ids that are noted; they are noted no more."""
        with self._lock:
            noted = self._ids[kind]
            taken = [id_ for id_ in ids if id_ in noted]
            noted.difference_update(taken)
            self._left += len(taken)
        return taken

    def has(self, kind: str, id_: str) -> bool:
        with self._lock:
            return id_ in self._ids[kind]


class EvictionStep(NamedTuple):
    """What one step does with the least recently used copies: sizes by kind and id."""

    dropped: dict[str, dict[str, int]]
    spared: dict[str, dict[str, int]]
    """They were read since their use was last written."""
    excess: float
    """Bytes above the limit that are left."""


def planned_step(
    oldest: Iterable[Row], was_read: Callable[[str, str], bool], excess: float, most_bytes: int
) -> EvictionStep:
    """Drop copies, the oldest first, until the excess is gone, but no more bytes than that."""
    dropped = defaultdict[str, dict[str, int]](dict)
    spared = defaultdict[str, dict[str, int]](dict)
    left = most_bytes
    for _, kind, id_, size in oldest:
        if excess <= 0 or left <= 0:
            break
        if was_read(kind, id_):
            spared[kind][id_] = size
            continue
        dropped[kind][id_] = size
        excess -= size
        left -= size
    if spared and not dropped:  # all are in use, and still one must go
        kind, sizes = next(iter(spared.items()))
        id_, size = sizes.popitem()
        dropped[kind][id_] = size
        excess -= size
    return EvictionStep(dropped, spared, excess)


class FileBounds:
    """The part of one process. Any thread may call `note` and `uses`, the writer's the rest."""

    def __init__(self, most: int, clock: Clock) -> None:
        self._most = most
        self._goal = 0.9 * most
        self._clock = clock
        self._notes = ReadNotes()
        self._connection: apsw.Connection | None = None
        self._ready: set[str] = set()
        """Kinds that are counted in this file."""
        self._is_evicting = False

    def note(self, kind: str, ids: Iterable[str]) -> None:
        """Note that these copies were read."""
        self._notes.add(kind, ids)

    def uses(self) -> list[Callable[[apsw.Connection], None]]:
        """Jobs that write the notes since the last time, one slice each."""
        jobs: list[Callable[[apsw.Connection], None]] = []
        for kind, ids in self._notes.take().items():
            jobs += [
                partial(self._write_uses, kind=kind, ids=ids[start : start + SLICE])
                for start in range(0, len(ids), SLICE)
            ]
        return jobs

    def make_room(self, connection: apsw.Connection, kind: str, copies: Mapping[str, Copy]) -> bool:
        """Call after these copies were written, in the same transaction. True if more must go.

        Each write drops up to twice as many copies as it wrote, and a few more, so that no backlog
        grows.
        """
        sizes = {
            id_: len(copy.value) for id_, copy in copies.items() if isinstance(copy.value, bytes)
        }
        large = {id_: size for id_, size in sizes.items() if size > self._goal}
        if large:
            self._drop(connection, kind, large)  # nothing else is dropped for it
        # Without a noted use, a copy counts as used when it was fetched, which may be long ago.
        old = self._clock() - WRITTEN_EVERY
        self._write_uses(
            connection, kind, [id_ for id_, copy in copies.items() if copy.fetched_at < old]
        )
        return self.shrink(connection, 2 * len(copies) + 8, 2 * sum(sizes.values()))

    def count(self, connection: apsw.Connection, *kinds: str) -> None:
        """Begin to count these kinds, unless another process did so before."""
        if connection is not self._connection:
            self._connection = connection
            self._ready = set()
            connection.execute(CREATE_HELD)
        for kind in kinds:
            if kind in self._ready:
                continue
            own_tables(kind).ensure_tables(connection)
            if connection.execute(_sql("is_counted", kind)).get is None:
                connection.execute(_sql("begin", kind))
            self._ready.add(kind)

    def shrink(
        self, connection: apsw.Connection, most: int = SLICE, most_bytes: int = SLICE_BYTES
    ) -> bool:
        """Drop up to so many least recently used copies if needed. True if more must go."""
        kinds = own_kinds(connection)
        self.count(connection, *kinds)
        size_now = connection.execute(SELECT_HELD).get[0]
        # Once begun, it goes on to below the limit, so that not every write has to evict.
        self._is_evicting = size_now > (self._goal if self._is_evicting else self._most)
        if not self._is_evicting:
            return False
        oldest = islice(self._oldest(connection, kinds), min(most, SLICE))
        excess = size_now - self._goal
        step = planned_step(oldest, self._notes.has, excess, max(most_bytes, SLICE_BYTES))
        for kind, sizes in step.dropped.items():
            self._notes.take_some(kind, sizes)
            self._drop(connection, kind, sizes)
        for kind, sizes in step.spared.items():
            # Written now: without a note, the next step would find it the oldest again.
            self._write_uses(connection, kind, self._notes.take_some(kind, sizes))
        return step.excess > 0 and bool(step.dropped or step.spared)

    def _oldest(self, connection: apsw.Connection, kinds: Iterable[str]) -> Iterable[Row]:
        now = at_most(self._clock())
        return merge(*(connection.execute(_sql("oldest", kind), (now,)) for kind in kinds))

    def _write_uses(self, connection: apsw.Connection, kind: str, ids: Iterable[str]) -> None:
        self.count(connection, kind)
        now = at_most(self._clock())
        connection.executemany(_sql("use", kind), [(now, id_) for id_ in ids])

    def _drop(self, connection: apsw.Connection, kind: str, sizes: Mapping[str, int]) -> None:
        own_tables(kind).delete(connection, list(sizes))
        connection.execute(_sql("evicted", kind), (sum(sizes.values()),))
