"""Leases and failures in a table of times: the process that may load an id, and its last failure.

The store keeps them for its own kinds. A store whose copies are rows of another design holds a
`LeaseTable` of its own. Each method is a part of the caller's transaction, so that a check of a
lease and the write that it permits are one atomic step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import apsw

from stillfresh.stores.contract import Failure, Lease
from stillfresh.stores.sqlite.schema import GRANT, at_least, at_most

_IS_HELD: Final = "SELECT 1 FROM {times} WHERE id = ? AND lease_token = ? AND lease_expires_at > ?"
_RENEW: Final = """
    UPDATE {times} SET lease_expires_at = ?
    WHERE id = ? AND lease_token = ? AND lease_expires_at > ?
"""
_VOID: Final = "UPDATE {times} SET lease_token = NULL, lease_expires_at = NULL WHERE id = ?"
_VOID_KEEPING_END: Final = "UPDATE {times} SET lease_token = NULL WHERE id = ?"
_IF_OWN: Final = " AND lease_token = ?"
_FAIL: Final = "UPDATE {times} SET failures = ?, retry_at = ?, error = ? WHERE id = ?"
_SUCCEED: Final = """
    UPDATE {times} SET lease_token = NULL, lease_expires_at = NULL,
        failures = NULL, retry_at = NULL, error = NULL
    WHERE id = ?
"""
_FORGET: Final = """
    DELETE FROM {times}
    WHERE id = ? AND generation IS NULL AND lease_token IS NULL AND failures IS NULL
"""


class LeaseTable:
    """The leases and failures in one table, which has the columns of `TIMES`.

    With `keeps_ends`, the row of a released or void lease goes on saying when that lease would have
    ended. Otherwise it says nothing, as if there had been no lease.
    """

    def __init__(self, table: str, *, keeps_ends: bool = False) -> None:
        void = _VOID_KEEPING_END if keeps_ends else _VOID
        self._grant = GRANT.format(times=table)
        self._is_held = _IS_HELD.format(times=table)
        self._renew = _RENEW.format(times=table)
        self._void = void.format(times=table)
        self._release = self._void + _IF_OWN
        self._fail = _FAIL.format(times=table)
        self._succeed = _SUCCEED.format(times=table)
        self._forget = _FORGET.format(times=table)

    def grant(self, connection: apsw.Connection, lease: Lease) -> None:
        """Grant a lease. An earlier one of the id is void."""
        connection.execute(self._grant, (lease.id, lease.token, at_least(lease.expires_at)))

    def is_held(self, connection: apsw.Connection, lease: Lease, now: float) -> bool:
        """True if the lease is live: not ended, not void, and not taken over."""
        row = connection.execute(self._is_held, (lease.id, lease.token, at_most(now))).get
        return row is not None

    def renew(
        self, connection: apsw.Connection, leases: Sequence[Lease], lease_for: float, now: float
    ) -> set[str]:
        """Extend live leases; return the ids whose lease was lost."""
        expires_at = at_least(now + lease_for)
        held_at = at_most(now)
        rows = [(lease.id, (expires_at, lease.id, lease.token, held_at)) for lease in leases]
        renewed = changed_ids(connection, self._renew, rows)
        return {lease.id for lease in leases}.difference(renewed)

    def release(
        self,
        connection: apsw.Connection,
        leases: Sequence[Lease],
        failures: Mapping[str, Failure],
    ) -> list[str]:
        """End leases whose token still holds, and note their failures; return the ids of these."""
        rows = [(lease.id, (lease.id, lease.token)) for lease in leases]
        released = changed_ids(connection, self._release, rows)
        notes = []
        for id_ in released:
            failure = failures.get(id_)
            if failure is not None:
                notes.append((failure.count, at_least(failure.retry_at), failure.error, id_))
        connection.executemany(self._fail, notes)
        return released

    def succeed(self, connection: apsw.Connection, id_: str) -> None:
        """End the lease after its copy was stored, and forget the failure."""
        connection.execute(self._succeed, (id_,))

    def void(self, connection: apsw.Connection, ids: Iterable[str]) -> None:
        """Void the leases: their holders can no longer publish. Failures stay."""
        connection.executemany(self._void, [(id_,) for id_ in ids])

    def forget_empty(self, connection: apsw.Connection, ids: Iterable[str]) -> list[str]:
        """Delete rows without copy, lease and failure; return the ids of these."""
        return changed_ids(connection, self._forget, [(id_, (id_,)) for id_ in ids])


def changed_ids(
    connection: apsw.Connection, text: str, rows: Iterable[tuple[str, tuple[Any, ...]]]
) -> list[str]:
    """Run the statement for each row; return the ids whose row it changed.

    Counted row by row: RETURNING costs as much as the write.
    """
    changed: list[str] = []

    def each() -> Iterator[tuple[Any, ...]]:
        for id_, row in rows:
            yield row  # SQLite runs the statement with it before it asks for the next row
            if connection.changes():
                changed.append(id_)

    connection.executemany(text, each())
    return changed
