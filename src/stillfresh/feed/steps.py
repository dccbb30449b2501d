"""The feed's writes, as functions of the connection, each inside one transaction (F2, F8, F10).

Whatever changes what a key would show ends the lease of who is refreshing it: the law.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import apsw
from msgspec import Struct

from stillfresh.feed import notes
from stillfresh.feed.keys import (
    category_of,
    comments_key,
    index_of,
    spelled,
    subject,
    topic_key,
)
from stillfresh.feed.model import Comment, Topic
from stillfresh.feed.records import Row
from stillfresh.feed.rows import (
    Stored,
    comments_row,
    drop_topics,
    put_comments_row,
    put_topic_row,
    read_comments,
    restore,
    topic_row,
)
from stillfresh.feed.rules import comment_rows, with_comment, without_comment

PUT_META: Final = """
    INSERT INTO feed_cache_meta(cache_key, last_fetched) VALUES (?, ?)
    ON CONFLICT(cache_key) DO UPDATE SET last_fetched = excluded.last_fetched
"""
_VOID: Final = """
    UPDATE stillfresh_refreshes SET lease_token = NULL, lease_expires_at = NULL WHERE cache_key = ?
"""
_LISTS: Final = """
    SELECT CAST(cache_key AS BLOB) FROM feed_cache_meta
    WHERE cache_key >= 'index:' AND cache_key < 'index;'
    UNION SELECT CAST(cache_key AS BLOB) FROM stillfresh_refreshes
    WHERE cache_key >= 'index:' AND cache_key < 'index;'
"""


class Change(Struct, frozen=True):
    """What a write has done, and what stood there before: enough to undo it, and nothing else."""

    token: str
    notes: list[notes.Note]
    topic: Stored | None = None
    comments: Stored | None = None
    rows: list[Row] | None = None
    """F10: the comments, where one was added."""
    categories: frozenset[str] = frozenset()
    """Whose lists it changes; none: nobody can say, so all."""


def put_topic(connection: apsw.Connection, topic: Topic, *, at: float) -> Change:
    """A full topic, written here; who is fetching a list that shows it began too early."""
    uuid = topic.topic_uuid
    before, noted = topic_row(connection, uuid), notes.left_on(connection, uuid, "")
    put_topic_row(connection, topic, at=at)
    token = notes.leave(connection, uuid, "", at=at, deleted=False)
    mark(connection, topic_key(uuid), at)
    categories = frozenset({category_of(topic.category_id), *_categories(before)})
    _void(connection, _lists(connection, categories))
    return Change(token, noted, before, categories=categories)


def create_topic(connection: apsw.Connection, topic: Topic, *, at: float) -> Change:
    """F10: shown at once; its lists are stale."""
    change = put_topic(connection, topic, at=at)
    forget_lists(connection, change.categories)
    return change


def settle_creation(
    connection: apsw.Connection, topic: Topic, change: Change, *, at: float
) -> None:
    """Upstream accepted it: shown again if a refresh, meanwhile, dropped it."""
    uuid = topic.topic_uuid
    if topic_row(connection, uuid) is None and notes.is_last(connection, uuid, "", change.token):
        put_topic(connection, topic, at=at)
    forget_lists(connection, change.categories)


def uncreate_topic(connection: apsw.Connection, uuid: str, change: Change) -> None:
    """Upstream refused it."""
    if notes.put_back(connection, uuid, "", change.token, change.notes):
        connection.execute("DELETE FROM feed_topics WHERE topic_uuid = ?", (uuid,))
        restore(connection, uuid, change.topic, None)
    forget(connection, [topic_key(uuid)])
    forget_lists(connection, change.categories)


def delete_topic(connection: apsw.Connection, uuid: str, *, at: float) -> Change:
    """F10: the row, its comments and meta rows go; a note stays that it must not come back."""
    noted = notes.left_on(connection, uuid, None)
    topic, comments = topic_row(connection, uuid), comments_row(connection, uuid)
    drop_topics(connection, [uuid])
    notes.take_off(connection, uuid, None)
    token = notes.leave(connection, uuid, "", at=at, deleted=True)
    categories = frozenset(_categories(topic))
    forget(connection, [topic_key(uuid), comments_key(uuid)])
    forget_lists(connection, categories)
    return Change(token, noted, topic, comments, categories=categories)


def settle_deletion(connection: apsw.Connection, uuid: str, change: Change, *, at: float) -> None:
    """Upstream accepted it: gone again if a refresh, meanwhile, brought it back."""
    rows = topic_row(connection, uuid), comments_row(connection, uuid)
    if any(rows) and notes.is_last(connection, uuid, "", change.token):
        delete_topic(connection, uuid, at=at)
    forget_lists(connection, change.categories)


def restore_topic(connection: apsw.Connection, uuid: str, change: Change) -> None:
    """Upstream refused to delete it."""
    if notes.put_back(connection, uuid, "", change.token, change.notes):
        restore(connection, uuid, change.topic, change.comments)
    forget(connection, [topic_key(uuid), comments_key(uuid)])
    forget_lists(connection, change.categories)


def put_comments(
    connection: apsw.Connection, uuid: str, comments: Sequence[Comment], *, at: float
) -> None:
    rows = comment_rows(read_comments(connection, uuid) or (), comments)
    put_comments_row(connection, uuid, rows, at=at)
    mark(connection, comments_key(uuid), at)


def add_comment(connection: apsw.Connection, uuid: str, comment: Comment, *, at: float) -> Change:
    """F10: shown at once, to be revalidated."""
    noted = notes.left_on(connection, uuid, comment.comment_uuid)
    before = read_comments(connection, uuid)
    put_comments_row(connection, uuid, with_comment(before or [], comment), at=at)
    token = notes.leave(connection, uuid, comment.comment_uuid, at=at, deleted=False)
    forget(connection, [comments_key(uuid)])
    return Change(token, noted, rows=before)


def settle_comment(
    connection: apsw.Connection, uuid: str, comment: Comment, change: Change, *, at: float
) -> None:
    """Upstream accepted it: shown again if a refresh, meanwhile, dropped it."""
    name, rows = comment.comment_uuid, read_comments(connection, uuid) or []
    is_gone = all(row.get("comment_uuid") != name for row in rows)
    if is_gone and notes.is_last(connection, uuid, name, change.token):
        add_comment(connection, uuid, comment, at=at)
    forget(connection, [comments_key(uuid)])


def remove_comment(
    connection: apsw.Connection, uuid: str, comment_uuid: str, change: Change, *, at: float
) -> None:
    """Upstream refused it: as it was before, but for what came since."""
    if notes.put_back(connection, uuid, comment_uuid, change.token, change.notes):
        before, now = change.rows, read_comments(connection, uuid) or []
        rows = without_comment(now, comment_uuid, before or [])
        if rows or before is not None:
            put_comments_row(connection, uuid, rows, at=at)
        else:
            connection.execute("DELETE FROM feed_comments WHERE topic_uuid = ?", (uuid,))
    forget(connection, [comments_key(uuid)])


def mark(connection: apsw.Connection, key: str, at: float) -> None:
    """Fetched just now, by one who did not ask for the lease: who holds it began earlier."""
    connection.execute(PUT_META, (key, int(at)))
    _void(connection, [key])


def forget(connection: apsw.Connection, keys: Iterable[str]) -> None:
    """Stale from now on, and whoever is refreshing it began too early."""
    rows = [(key,) for key in keys]
    connection.executemany("DELETE FROM feed_cache_meta WHERE cache_key = ?", rows)
    connection.executemany(_VOID, rows)


def erase(connection: apsw.Connection, keys: Sequence[str]) -> None:
    """All that is known of them; topics that a list shows are not its own, and stay."""
    forget(connection, keys)
    rows = [(key,) for key in keys]
    connection.executemany("DELETE FROM stillfresh_refreshes WHERE cache_key = ?", rows)
    for key in keys:
        uuid = subject(key)
        if key == topic_key(uuid):
            drop_topics(connection, [uuid])
        elif key == comments_key(uuid):
            connection.execute("DELETE FROM feed_comments WHERE topic_uuid = ?", (uuid,))


def forget_lists(connection: apsw.Connection, categories: frozenset[str]) -> None:
    """F10: those of the categories and of "all", whatever their days; all there are, if none."""
    forget(connection, _lists(connection, categories))


def _void(connection: apsw.Connection, keys: Iterable[str]) -> None:
    connection.executemany(_VOID, [(key,) for key in keys])


def _lists(connection: apsw.Connection, categories: frozenset[str]) -> list[str]:
    keys = [key.decode(errors="replace") for (key,) in connection.execute(_LISTS)]
    shown = {None, *categories}
    return [
        key
        for key in keys
        if (index := index_of(key)) is not None and (not categories or index.category in shown)
    ]


def _categories(row: Stored | None) -> list[str]:
    return [] if row is None else [spelled(row[2])]
