"""The store's atomic steps, as functions of the connection: each runs inside one transaction.

S2: the token is the fence, checked in the statement that writes; its time only permits a takeover.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import apsw

from stillfresh.freshness import is_lease_over
from stillfresh.stores.contract import (
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
from stillfresh.stores.sqlite.schema import (
    DELETE_TAGS,
    HAS_TABLE,
    INSERT_TAG,
    KINDS,
    SELECT_TAG,
    Row,
    Statements,
    at_least,
    at_most,
    nearest,
    record_of,
    statements,
)

WALK: Final = 10_000


def tables(connection: apsw.Connection, kind: str) -> Statements:
    """The kind's statements; its tables are made when it is first used."""
    sql = statements(kind)
    if not connection.table_exists("main", f"{kind}_ttl"):
        connection.execute(sql.create)
    return sql


def has_tables(connection: apsw.Connection, kind: str) -> bool:
    """As the file says now: what the connection knows of it may be older."""
    return connection.execute(HAS_TABLE, (f"{kind}_ttl",)).get is not None


def acquire(
    connection: apsw.Connection,
    kind: str,
    asks: Iterable[Ask],
    lease_for: float,
    *,
    now: float,
    new_token: Callable[[], str],
) -> dict[str, Grant]:
    sql, expires_at = tables(connection, kind), at_least(now + lease_for)
    grants: dict[str, Grant] = {}
    for ask in asks:
        row = connection.execute(sql.point, (ask.seen, ask.id)).get
        grant = None if row is None else _denied(record_of(row, ask.seen), ask, now, lease_for)
        if isinstance(grant, Newer) and row[0] == ask.seen:  # it failed; the copy in full
            grant = Newer(record_of(connection.execute(sql.point, (None, ask.id)).get, None))
        if grant is None:
            grant = Lease(ask.id, new_token(), expires_at / 1000)
            connection.execute(sql.lease, (ask.id, grant.token, expires_at))
            _tag(connection, kind, ask, is_new=row is None)
        grants[ask.id] = grant
    return grants


def _denied(record: Record, ask: Ask, now: float, lease_for: float) -> Grant | None:
    """E5: only for the copy that was seen; who saw another one gets the one there is."""
    if record.copy is not None and record.copy.generation != ask.seen:
        return Newer(record)
    until = None if ask.take_over else record.held_until
    if until is not None and not is_lease_over(until, at_most(now) / 1000, lease_for):
        return Held(until)
    return Newer(record) if ask.missed(record.failure) else None


def _tag(connection: apsw.Connection, kind: str, ask: Ask, *, is_new: bool) -> None:
    """The tags of the last lease are the tags."""
    if not is_new:
        connection.execute(DELETE_TAGS, (kind, ask.id))
    if ask.tags:
        connection.executemany(INSERT_TAG, [(tag, kind, ask.id) for tag in ask.tags])


def publish(
    connection: apsw.Connection,
    kind: str,
    copies: Mapping[str, tuple[Lease, Copy]],
    *,
    now: float,
) -> set[str]:
    """Times first, fenced by the lease; then the values of those that passed the fence."""
    sql, held_at = tables(connection, kind), at_most(now)
    rows = {id_: _published(id_, lease, copy, held_at) for id_, (lease, copy) in copies.items()}
    passed = _passed(connection, sql.publish, rows.items())
    values: list[tuple[str, Any]] = [(id_, copies[id_][1].value) for id_ in passed]
    connection.executemany(sql.write_value, values)
    return copies.keys() - passed


def _published(id_: str, lease: Lease, copy: Copy, held_at: int) -> tuple[str | float, ...]:
    terms = copy.policy
    return (
        copy.generation,
        nearest(copy.fetched_at),
        terms.fresh_for,
        terms.stale_for,
        terms.error_for,
        int(copy.mark),
        copy.value is None,
        id_,
        lease.token,
        held_at,
    )


def renew(
    connection: apsw.Connection,
    kind: str,
    leases: Sequence[Lease],
    lease_for: float,
    *,
    now: float,
) -> set[str]:
    sql, expires_at, held_at = tables(connection, kind), at_least(now + lease_for), at_most(now)
    rows = [(lease.id, (expires_at, lease.id, lease.token, held_at)) for lease in leases]
    return {lease.id for lease in leases}.difference(_passed(connection, sql.renew, rows))


def release(
    connection: apsw.Connection,
    kind: str,
    leases: Sequence[Lease],
    failures: Mapping[str, Failure],
) -> None:
    sql = tables(connection, kind)
    rows = [(lease.id, (lease.id, lease.token)) for lease in leases]
    ids = _passed(connection, sql.release, rows)
    failed = [(failures[id_], id_) for id_ in ids if id_ in failures]
    connection.executemany(
        sql.fail,
        [
            (failure.count, at_least(failure.retry_at), failure.error, id_)
            for failure, id_ in failed
        ],
    )
    _forget_if_empty(connection, kind, ids)


def invalidate(connection: apsw.Connection, kind: str, ids: Sequence[str], *, soft: bool) -> None:
    """One statement voids the lease and marks the copy; a mark never goes down."""
    mark, sql = int(Mark.SOFT if soft else Mark.HARD), statements(kind)
    if not has_tables(connection, kind):
        return
    connection.executemany(sql.invalidate, [(mark, id_) for id_ in ids])
    _forget_if_empty(connection, kind, ids)


def invalidate_tag(connection: apsw.Connection, tag: str, *, soft: bool) -> list[tuple[str, str]]:
    rows: list[Row] = connection.execute(SELECT_TAG, (tag,)).fetchall()
    ours = set(kinds(connection))
    keys: list[tuple[str, str]] = [(kind, id_) for kind, id_ in rows if kind in ours]
    keys = [key for key in keys if isinstance(key[1], str)]
    for kind, group in groupby(keys, itemgetter(0)):
        invalidate(connection, kind, [id_ for _, id_ in group], soft=soft)
    return keys


def delete(connection: apsw.Connection, kind: str, ids: Iterable[str]) -> None:
    sql, rows = statements(kind), [(id_,) for id_ in ids]
    if not has_tables(connection, kind):
        return
    connection.executemany(sql.delete_times, rows)
    connection.executemany(sql.delete_copy, rows)
    connection.executemany(DELETE_TAGS, [(kind, id_) for (id_,) in rows])


def evict_slice(
    connection: apsw.Connection, kind: str, start: str, *, before: float, size: int
) -> tuple[int, str | None]:
    """Of the next `size` ids: how many were dropped, and where to go on."""
    sql = tables(connection, kind)
    rows: list[Row] = connection.execute(sql.slice, (before * 1000, start, size + 1)).fetchall()
    gone = [id_ for id_, is_gone in rows[:size] if is_gone]
    delete(connection, kind, gone)
    return len(gone), rows[size][0] if len(rows) > size else None


def kinds(connection: apsw.Connection) -> list[str]:
    return [kind for (kind,) in connection.execute(KINDS)]


def list_slice(
    connection: apsw.Connection, kind: str, start: str, *, search: str, limit: int, size: int
) -> tuple[list[Entry], str | None]:
    """Of the next `size` ids: those that are listed, and where to go on."""
    sql = statements(kind)
    if not has_tables(connection, kind):  # the file was set aside since the kinds were listed
        return [], None
    end = connection.execute(sql.stretch, (start, size)).get
    if end is None:
        return [], None
    rows: list[Row] = connection.execute(sql.listed, (start, end, search, limit)).fetchall()
    return [Entry(kind, row[12], record_of(row[:12], row[0]), row[13]) for row in rows], following(
        end
    )


def list_entries(
    connection: apsw.Connection,
    *,
    kind: str | None,
    search: str,
    after: tuple[str, str] | None,
    limit: int,
) -> list[Entry]:
    """All at once, for who has nothing else to do meanwhile."""
    found: list[Entry] = []
    for each, start in listed_kinds(kinds(connection), kind, after):
        at: str | None = start
        while at is not None and (left := limit - len(found)) > 0:
            some, at = list_slice(connection, each, at, search=search, limit=left, size=WALK)
            found += some
    return found


def listed_kinds(
    names: Iterable[str], kind: str | None, after: tuple[str, str] | None
) -> list[tuple[str, str]]:
    """Each kind that a listing goes through, and the first id of it that may be listed."""
    start = ("", "") if after is None else (after[0], following(after[1]))
    return [
        (each, start[1] if each == start[0] else "")
        for each in sorted(names)
        if kind in {None, each} and each >= start[0]
    ]


def following(id_: str) -> str:
    """The first id that could stand behind it."""
    return f"{id_}\0"


def count(connection: apsw.Connection, *, now: float) -> StoreStats:
    """Copies and live leases of all kinds; on disk, the file and its log."""
    copies = leases = 0
    for kind in kinds(connection):
        found = connection.execute(statements(kind).count, (at_most(now),)).get
        copies, leases = copies + found[0], leases + found[1]
    files = [Path(connection.filename), Path(connection.filename_wal)]
    return StoreStats(copies, leases, sum(file.stat().st_size for file in files if file.exists()))


def _forget_if_empty(connection: apsw.Connection, kind: str, ids: Iterable[str]) -> None:
    """A row without copy, lease and failure says nothing."""
    rows = [(id_, (id_,)) for id_ in ids]
    emptied = _passed(connection, statements(kind).forget_if_empty, rows)
    connection.executemany(DELETE_TAGS, [(kind, id_) for id_ in emptied])


def _passed(
    connection: apsw.Connection, text: str, rows: Iterable[tuple[str, tuple[str | float, ...]]]
) -> list[str]:
    """The ids whose row changed. Counted between the rows: RETURNING costs as much as the write."""
    passed: list[str] = []

    def each() -> Iterator[tuple[str | float, ...]]:
        before = connection.total_changes()
        for id_, row in rows:
            yield row
            after = connection.total_changes()
            if after > before:
                passed.append(id_)
            before = after

    connection.executemany(text, each())
    return passed
