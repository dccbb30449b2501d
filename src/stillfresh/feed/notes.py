"""Notes of what was written or deleted here, which upstream may not show yet (F8, F9, F10).

A note stands for `fresh_for`. Each write leaves its own token on it, so that undoing one write
never undoes another's.
"""

from collections.abc import Iterable
from secrets import token_hex
from typing import Any, Final

import apsw
from msgspec import Struct

from stillfresh.freshness import MAX_SKEW

_LEAVE: Final = """
    INSERT OR REPLACE INTO stillfresh_writes(topic_uuid, comment_uuid, written_at, deleted, token)
    VALUES (?, ?, ?, ?, ?)
"""
_OF: Final = """
    SELECT topic_uuid, comment_uuid, written_at, deleted, token FROM stillfresh_writes
    WHERE topic_uuid = ?1 AND (?2 IS NULL OR comment_uuid = ?2)
"""
_TAKE_OFF: Final = """
    DELETE FROM stillfresh_writes WHERE topic_uuid = ?1 AND (?2 IS NULL OR comment_uuid = ?2)
"""
_LEFT: Final = """
    SELECT topic_uuid FROM stillfresh_writes
    WHERE comment_uuid = '' AND deleted = ? AND written_at > ? AND written_at <= ?
"""
_LEFT_ON: Final = """
    SELECT comment_uuid FROM stillfresh_writes
    WHERE topic_uuid = ? AND comment_uuid <> '' AND written_at > ? AND written_at <= ?
"""

Note = tuple[Any, ...]


class Since(Struct, frozen=True):
    """Notes of this time count: not the old ones, nor those from before the clock was set back."""

    begin: float
    now: float

    @property
    def bounds(self) -> tuple[float, float]:
        return self.begin, self.now + MAX_SKEW


def leave(
    connection: apsw.Connection, uuid: str, comment_uuid: str, *, at: float, deleted: bool
) -> str:
    """Returns its token."""
    token = token_hex(8)
    connection.execute(_LEAVE, (uuid, comment_uuid, at, int(deleted), token))
    return token


def left_on(connection: apsw.Connection, uuid: str, comment_uuid: str | None) -> list[Note]:
    """On a topic, or on one comment of it; None: on all of it."""
    return connection.execute(_OF, (uuid, comment_uuid)).fetchall()


def take_off(connection: apsw.Connection, uuid: str, comment_uuid: str | None) -> None:
    connection.execute(_TAKE_OFF, (uuid, comment_uuid))


def is_last(connection: apsw.Connection, uuid: str, comment_uuid: str, token: str) -> bool:
    """Whether nobody has written there since the write that left this token."""
    found = left_on(connection, uuid, comment_uuid)
    return bool(found) and found[0][4] == token


def put_back(
    connection: apsw.Connection,
    uuid: str,
    comment_uuid: str,
    token: str,
    before: Iterable[Note],
) -> bool:
    """Undo one write's note. False: another has written since, and that stands."""
    if not is_last(connection, uuid, comment_uuid, token):
        return False
    take_off(connection, uuid, comment_uuid)
    connection.executemany(_LEAVE, list(before))
    return True


def left(connection: apsw.Connection, since: Since, *, deleted: bool) -> set[str]:
    """F9: the topics written, or deleted, here."""
    rows = connection.execute(_LEFT, (int(deleted), *since.bounds))
    return {uuid for (uuid,) in rows}


def comments_left(connection: apsw.Connection, uuid: str, since: Since) -> list[str]:
    rows = connection.execute(_LEFT_ON, (uuid, *since.bounds))
    return [str(comment_uuid) for (comment_uuid,) in rows]
