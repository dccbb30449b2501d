"""The SQLite store's atomic steps, as methods of a kind's tables: each runs in one transaction.

The lease's token is the fence, checked in the statement that writes. The lease's time only permits
a takeover.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, TypeAlias

import apsw
from msgspec.structs import replace

from stillfresh.stores.contract import (
    UNREAD,
    After,
    Ask,
    Copy,
    Failure,
    Grant,
    LateTags,
    Lease,
    Mark,
    Newer,
    Put,
    PutOutcome,
    PutResult,
    Record,
    StoredEntry,
    StoreStats,
)
from stillfresh.stores.rules import is_deletion, may_be_refused, put_refusal, with_stored_parts
from stillfresh.stores.sqlite.connection import bytes_of
from stillfresh.stores.sqlite.leases import LeaseTable, changed_ids
from stillfresh.stores.sqlite.ownership import by_header
from stillfresh.stores.sqlite.schema import (
    APPLICATION_ID,
    BEGIN_FILE,
    BEGIN_POSITION,
    BEHIND_ID_AT,
    CREATE_POSITION,
    GENERATION_AT,
    HAS_TABLE,
    HELD,
    ID_AT,
    KINDS,
    LAYOUT_2,
    MOST_POSITIONS,
    SELECT_HELD,
    SELECT_POSITION,
    UPDATE_POSITION,
    VERSION,
    Row,
    Statements,
    at_least,
    at_most,
    is_version,
    lacks_versions,
    record_of,
    statements,
)
from stillfresh.stores.sqlite.tags import (
    FIRST,
    EntryName,
    begin_epoch,
    delete_tags,
    epoch_of,
    is_past,
    replace_late_tags,
    replace_tags,
    tagged,
)

Execute: TypeAlias = Callable[[str, tuple[Any, ...]], apsw.Cursor]
"""Of one cursor, which is used again for the next statement."""


class KindTables:
    """One kind in a file: a table of copies, and a table of times and leases."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.sql = statements(kind)
        self._leases = LeaseTable(self.sql.times_name)

    def ensure_tables(self, connection: apsw.Connection) -> Statements:
        """Create the tables, or give them layout 2, if they lack it. Return their statements."""
        try:
            connection.column_metadata("main", self.sql.times_table, "changed")
        except apsw.SQLError:
            self._create_missing(connection)
        return self.sql

    def _create_missing(self, connection: apsw.Connection) -> None:
        """Create tables and columns that are missing.

        Another process may have done it meanwhile: this connection's own schema may be older.
        """
        connection.execute(self.sql.create)
        table = self.sql.times_table
        columns = {row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')}
        for name, kind in LAYOUT_2.items():
            if name not in columns:
                connection.execute(f'ALTER TABLE "{table}" ADD COLUMN {name} {kind}')

    def has_tables(self, connection: apsw.Connection) -> bool:
        """True if the file has the tables now; the connection's own schema may be older."""
        return connection.execute(HAS_TABLE, (self.sql.times_table,)).get is not None

    def _write_values(self, connection: apsw.Connection, copies: Mapping[str, Copy]) -> None:
        """Write the values of copies that were stored; an UNREAD one stays as it is."""
        values: list[tuple[str, Any]] = [
            (id_, copy.value) for id_, copy in copies.items() if copy.value is not UNREAD
        ]
        connection.executemany(self.sql.write_value, values)

    def acquire(
        self,
        connection: apsw.Connection,
        asks: Sequence[Ask],
        lease_for: float,
        now: float,
        new_token: Callable[[], str],
    ) -> dict[str, Grant]:
        """Lease free ids by one statement each; then look at the others one by one."""
        sql = self.ensure_tables(connection)
        expires_at = at_least(now + lease_for)
        until = expires_at / 1000
        epoch = epoch_of(connection)
        leases = {ask.id: Lease(ask.id, new_token(), until, epoch) for ask in asks}
        rows = [(ask.id, (ask.id, leases[ask.id].token, expires_at, ask.seen)) for ask in asks]
        free = set(changed_ids(connection, sql.lease_free, rows))
        grants: dict[str, Grant] = {**leases}
        for ask in asks:
            if ask.id in free:
                continue
            row = connection.execute(sql.point, (ask.seen, ask.id)).get
            record = Record() if row is None else record_of(row, ask.seen)
            if row is not None and record == Record():
                # It cannot be read. A publication without a version would keep a damaged one.
                connection.execute(sql.delete_times, (ask.id,))
            refusal = ask.denied(record, at_most(now) / 1000, lease_for)
            if refusal is None:
                self._leases.grant(connection, leases[ask.id])
            elif isinstance(refusal, Newer) and row[GENERATION_AT] == ask.seen:
                # Another load failed. The copy was read without its value: read it in full.
                refusal = Newer(record_of(connection.execute(sql.point, (None, ask.id)).get, None))
            grants[ask.id] = refusal or leases[ask.id]
        leased = [ask for ask in asks if grants[ask.id] is leases[ask.id]]
        # An entry has the tags of its last lease.
        replace_tags(connection, self.kind, {ask.id: ask.tags for ask in leased})
        return grants

    def publish(
        self,
        connection: apsw.Connection,
        copies: Mapping[str, tuple[Lease, Copy]],
        now: float,
        tags: LateTags = None,
    ) -> set[str]:
        """Write the times, if the lease is valid; then the values of those ids."""
        sql = self.ensure_tables(connection)
        held_at = at_most(now)
        late = tags or {}
        position = next_position(connection)
        leases = [copies[id_][0] for id_ in late]
        past = [lease for lease in leases if is_past(connection, lease, late[lease.id])]
        if past:
            self.release(connection, past, {})
        rows = (
            (id_, (*_columns(id_, copy, position), lease.token, held_at))
            for id_, (lease, copy) in copies.items()
        )
        published = changed_ids(connection, sql.publish, rows)
        self._write_values(connection, {id_: copies[id_][1] for id_ in published})
        if late:
            late_tags = {id_: late[id_] for id_ in published if id_ in late}
            replace_late_tags(connection, self.kind, late_tags)
        return copies.keys() - published

    def put(
        self, connection: apsw.Connection, puts: Mapping[str, Put], now: float
    ) -> dict[str, PutResult]:
        """Decide by the stored row of each id; then write its times, value and tags.

        Most puts cannot be refused, and need to know the stored version only.
        Never AGAIN: nothing is late here, because a step is withdrawn when its caller gives up.
        """
        sql = self.ensure_tables(connection)
        execute = connection.cursor().execute
        results: dict[str, PutResult] = {}
        position = 0
        for id_, put in puts.items():
            if may_be_refused(put):
                stored = self._stored(execute, id_)
                refusal = put_refusal(put, stored, now)
                if refusal is not None:
                    results[id_] = refusal
                    continue
                copy = with_stored_parts(put.copy, stored)
            else:
                copy = self._with_version(execute, id_, put.copy)
            if position == 0:  # the same for all; a refusal takes none
                position = next_position(connection)
            execute(sql.put, _columns(id_, copy, position))
            if put.copy.value is not UNREAD:
                execute(sql.write_value, (id_, copy.value))
            self._write_tags(connection, id_, put)
            results[id_] = PutResult(PutOutcome.STORED, copy.version, position)
        return results

    def _write_tags(self, connection: apsw.Connection, id_: str, put: Put) -> None:
        """Replace the tags of the key and of the value, each unless the put leaves it alone."""
        if put.tags is not None:
            replace_tags(connection, self.kind, {id_: put.tags})
        if put.late is not None:
            replace_late_tags(connection, self.kind, {id_: put.late})

    def _with_version(self, execute: Execute, id_: str, copy: Copy) -> Copy:
        """The copy of a put that cannot be refused, with the version that is stored."""
        version = execute(self.sql.stored_version, (id_,)).get
        if version is None or not is_version(version) or is_deletion(copy):
            return copy
        return replace(copy, version=version)

    def _stored(self, execute: Execute, id_: str) -> Copy | None:
        """The stored copy of this id; its value is empty bytes, or None if it is absent."""
        row = execute(self.sql.stored, (id_,)).get
        return None if row is None else record_of(row, None).copy

    def renew(
        self, connection: apsw.Connection, leases: Sequence[Lease], lease_for: float, now: float
    ) -> set[str]:
        self.ensure_tables(connection)
        return self._leases.renew(connection, leases, lease_for, now)

    def release(
        self,
        connection: apsw.Connection,
        leases: Sequence[Lease],
        failures: Mapping[str, Failure],
    ) -> None:
        self.ensure_tables(connection)
        released = self._leases.release(connection, leases, failures)
        self._forget_if_empty(connection, released)

    def invalidate(self, connection: apsw.Connection, ids: Sequence[str], *, soft: bool) -> None:
        """One statement voids the lease and marks the copy; a hard mark stays hard."""
        if self.has_tables(connection):
            sql = self.ensure_tables(connection)
            position = next_position(connection)
            mark = int(Mark.SOFT if soft else Mark.HARD)
            connection.executemany(sql.invalidate, [(position, mark, id_) for id_ in ids])
            self._forget_if_empty(connection, ids)

    def delete(self, connection: apsw.Connection, ids: Sequence[str]) -> None:
        if self.has_tables(connection):
            rows = [(id_,) for id_ in ids]
            connection.executemany(self.sql.delete_times, rows)
            connection.executemany(self.sql.delete_copy, rows)
            delete_tags(connection, self.kind, ids)

    def _forget_if_empty(self, connection: apsw.Connection, ids: Iterable[str]) -> None:
        """Delete rows without copy, lease and failure, with their tags."""
        delete_tags(connection, self.kind, self._leases.forget_empty(connection, ids))

    def evict(
        self, connection: apsw.Connection, start: str, *, before: float, size: int
    ) -> tuple[int, str | None]:
        """Evict among the next `size` ids: how many were dropped, and where to go on."""
        sql = self.ensure_tables(connection)
        bindings = (before * 1000, start, size + 1)
        rows: list[Row] = connection.execute(sql.slice, bindings).fetchall()
        ids = [id_ for id_, is_gone in rows[:size] if is_gone]
        self.delete(connection, ids)
        next_start = rows[size][0] if len(rows) > size else None
        return len(ids), next_start

    def listed(
        self, connection: apsw.Connection, start: str, *, search: str, limit: int, size: int
    ) -> tuple[list[StoredEntry], str | None]:
        """List among the next `size` ids: those that match, and where to go on."""
        if not self.has_tables(connection):  # the file was renamed since the kinds were listed
            return [], None
        end = connection.execute(self.sql.stretch, (start, size)).get
        if end is None:
            return [], None
        rows = self._listed_rows(connection, (start, end, search, limit))
        entries = [
            StoredEntry(
                self.kind,
                row[ID_AT],
                record_of(row[:ID_AT], known=row[GENERATION_AT]),
                row[BEHIND_ID_AT],  # the length of the value
            )
            for row in rows
        ]
        return entries, following(end)

    def _listed_rows(self, connection: apsw.Connection, bindings: tuple[Any, ...]) -> list[Row]:
        try:
            return connection.execute(self.sql.listed, bindings).fetchall()
        except apsw.SQLError as exc:
            if not lacks_versions(exc):
                raise
            return connection.execute(self.sql.layout_1.listed, bindings).fetchall()


def _columns(id_: str, copy: Copy, position: int) -> tuple[str | float | bytes | None, ...]:
    """A copy as the statements `publish` and `put` take it.

    To `publish`, a NULL says that the stored absence or version stays.
    """
    return (
        copy.generation,
        round(copy.fetched_at * 1000),
        copy.policy.fresh_for,
        copy.policy.stale_for,
        copy.policy.error_for,
        copy.mark,
        None if copy.value is UNREAD else copy.value is None,
        copy.version or None,
        position,
        id_,
    )


def next_position(connection: apsw.Connection) -> int:
    """The position of this change; greater than that of every change before it.

    The count begins at the present microsecond. So it is greater than that of an earlier file, too,
    and than that of a counter which another program has spoilt.
    """
    try:
        last = connection.execute(SELECT_POSITION).get
    except apsw.SQLError:  # there is no such table yet
        connection.execute(CREATE_POSITION)
        last = None
    if type(last) is int and 0 < last < MOST_POSITIONS:
        position = last + 1
        connection.execute(UPDATE_POSITION, (position,))  # a fifth of what BEGIN_POSITION costs
    else:
        position = time.time_ns() // 1_000
        connection.execute(BEGIN_POSITION, (position,))
    return position


@cache
def own_tables(kind: str) -> KindTables:
    """Return the tables of a kind in a store's file."""
    return KindTables(kind)


def own_kinds(connection: apsw.Connection) -> list[str]:
    """Return the kinds that a store's file has."""
    return [kind for (kind,) in connection.execute(KINDS)]


STORE: Final = by_header(APPLICATION_ID, VERSION, BEGIN_FILE)
"""The format of a store's file."""


def invalidate_tag(
    connection: apsw.Connection, tag: str, after: EntryName, *, soft: bool, size: int
) -> tuple[list[EntryName], After]:
    """Invalidate the next `size` ids that have the tag; return them, and where to go on."""
    if after == FIRST:
        begin_epoch(connection, tag)
    tagged_keys, next_after = tagged(connection, tag, after, size)
    kinds = set(own_kinds(connection))
    keys = [key for key in tagged_keys if key[0] in kinds]
    for kind, group in groupby(keys, itemgetter(0)):
        own_tables(kind).invalidate(connection, [id_ for _, id_ in group], soft=soft)
    return keys, next_after


def listed_kinds(names: Iterable[str], kind: str | None, after: After) -> list[tuple[str, str]]:
    """Each kind that a listing goes through, and the first id of it that may be listed."""
    start = FIRST if after is None else (after[0], following(after[1]))
    return [
        (each, start[1] if each == start[0] else "")
        for each in sorted(names)
        if kind in {None, each} and each >= start[0]
    ]


def following(id_: str) -> str:
    """The first id that could follow it."""
    return f"{id_}\0"


def count_slice(
    connection: apsw.Connection, after: After, *, now: float, size: int
) -> tuple[StoreStats, After]:
    """Copies and live leases among the next `size` ids, and where to go on."""
    copies = 0
    leases = 0
    end: After = None
    left = size
    for kind, start in listed_kinds(own_kinds(connection), None, after):
        sql = own_tables(kind).sql.count
        kind_copies, kind_leases, ids, last = connection.execute(
            sql, (at_most(now), start, left)
        ).get
        copies += kind_copies
        leases += kind_leases
        left -= ids
        if left == 0:
            end = (kind, last)
            break
    stats = StoreStats(copies, leases, bytes_of(connection))
    if connection.execute(HAS_TABLE, (HELD,)).get is not None:
        held_bytes, evicted_bytes = connection.execute(SELECT_HELD).get
        stats = replace(stats, held=held_bytes, evicted=evicted_bytes)
    return stats, end
