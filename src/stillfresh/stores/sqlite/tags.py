"""The table of tags in a SQLite file: which ids have a tag, and when a tag was invalidated last.

The table is described in `schema.py`. Each function is a part of the caller's transaction.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import apsw

from stillfresh.stores.contract import REMEMBERED, After, Lease
from stillfresh.stores.sqlite.schema import (
    DELETE_TAGS,
    DELETE_TAGS_OF_KIND,
    EPOCH,
    FORGET_EPOCHS,
    INSERT_TAG,
    IS_PAST,
    SELECT_TAG,
    Row,
)

EntryName: TypeAlias = tuple[str, str]
"""A kind and an id."""
FIRST: Final[EntryName] = ("", "")
"""Before all kinds and ids."""


def replace_tags(connection: apsw.Connection, kind: str, tags: Mapping[str, Sequence[str]]) -> None:
    """Give each id of the kind these tags, and no others."""
    connection.executemany(DELETE_TAGS_OF_KIND, [(kind, id_) for id_ in tags])
    rows = [(tag, kind, id_) for id_, names in tags.items() for tag in names]
    if rows:
        connection.executemany(INSERT_TAG, rows)


def replace_late_tags(
    connection: apsw.Connection, kind: str, tags: Mapping[str, Sequence[str]]
) -> None:
    """Give each id of the kind these tags, which came with its copy, in place of the last ones."""
    replace_tags(connection, f"{kind}+", tags)


def delete_tags(connection: apsw.Connection, kind: str, ids: Iterable[str]) -> None:
    """Delete all tags of these ids."""
    connection.executemany(DELETE_TAGS, [(kind, id_) for id_ in ids])


def epoch_of(connection: apsw.Connection) -> int:
    """Return the epoch of the last invalidation by tag."""
    return connection.execute(EPOCH).get or 0


def begin_epoch(connection: apsw.Connection, tag: str) -> None:
    """Note that the tag is invalidated now: loads that began earlier may not publish with it."""
    epoch = epoch_of(connection) + 1
    connection.execute(FORGET_EPOCHS, (tag, _epoch_id(epoch - REMEMBERED)))
    connection.execute(INSERT_TAG, (tag, "!", _epoch_id(epoch)))


def is_past(connection: apsw.Connection, lease: Lease, tags: Sequence[str]) -> bool:
    """True if one of the tags was invalidated since the grant, or if that is not known."""
    if tags and lease.epoch < epoch_of(connection) - REMEMBERED:
        return True
    since = _epoch_id(lease.epoch)
    return any(connection.execute(IS_PAST, (tag, since)).get is not None for tag in tags)


def tagged(
    connection: apsw.Connection, tag: str, after: EntryName, size: int
) -> tuple[list[EntryName], After]:
    """Return the next `size` (kind, id) that have the tag, and where to go on.

    Every id that was leased with the tag before `begin_epoch` is among them.
    """
    rows: list[Row] = connection.execute(SELECT_TAG, (tag, *after, size)).fetchall()
    # Another program may have written a kind or an id that is no text.
    keys = [
        (kind.rstrip("+"), id_)
        for kind, id_ in rows
        if isinstance(kind, str) and isinstance(id_, str)
    ]
    next_after = rows[-1] if len(rows) == size else None
    return keys, next_after


def _epoch_id(epoch: int) -> str:
    """The epoch with leading zeros, because text is compared."""
    return f"{max(0, epoch):016}"
