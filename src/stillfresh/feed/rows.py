"""Rows of the seed's tables: read as JSON objects, merged, written (F1, F9). One at a time.

Called inside a transaction. A row that cannot be read counts as none (F12).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import apsw
import msgspec

from stillfresh.feed.keys import category_of, comments_key, topic_key
from stillfresh.feed.model import Topic
from stillfresh.feed.records import Row, loaded
from stillfresh.feed.rules import is_news, merged

Stored: TypeAlias = tuple[Any, ...]
"""A whole row, column by column."""

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# In and out as bytes: text that is no UTF-8 would raise before it can be replaced.
_SELECT_TOPIC: Final = """
    SELECT topic_uuid, CAST(topic_json AS BLOB), CAST(category_id AS BLOB), created_at, deleted,
        cached_at
    FROM feed_topics WHERE topic_uuid = ?
"""
_SELECT_COMMENTS: Final = """
    SELECT topic_uuid, CAST(comments_json AS BLOB), comment_count, cached_at
    FROM feed_comments WHERE topic_uuid = ?
"""
_PUT_TOPIC: Final = """
    INSERT INTO feed_topics(topic_uuid, topic_json, category_id, created_at, deleted, cached_at)
    VALUES (?, CAST(? AS TEXT), CAST(? AS TEXT), ?, ?, ?)
    ON CONFLICT(topic_uuid) DO UPDATE SET topic_json = excluded.topic_json,
        category_id = excluded.category_id, created_at = excluded.created_at,
        deleted = excluded.deleted, cached_at = excluded.cached_at
"""
_PUT_COMMENTS: Final = """
    INSERT INTO feed_comments(topic_uuid, comments_json, comment_count, cached_at)
    VALUES (?, CAST(? AS TEXT), ?, ?)
    ON CONFLICT(topic_uuid) DO UPDATE SET comments_json = excluded.comments_json,
        comment_count = excluded.comment_count, cached_at = excluded.cached_at
"""
_DROP: Final = (
    ("DELETE FROM feed_topics WHERE topic_uuid = ?", str),
    ("DELETE FROM feed_comments WHERE topic_uuid = ?", str),
    ("DELETE FROM feed_cache_meta WHERE cache_key = ?", topic_key),
    ("DELETE FROM feed_cache_meta WHERE cache_key = ?", comments_key),
)


def topic_row(connection: apsw.Connection, uuid: str) -> Stored | None:
    row: Stored | None = connection.execute(_SELECT_TOPIC, (uuid,)).get
    return row


def comments_row(connection: apsw.Connection, uuid: str) -> Stored | None:
    row: Stored | None = connection.execute(_SELECT_COMMENTS, (uuid,)).get
    return row


def put_topic_row(
    connection: apsw.Connection,
    topic: Topic,
    *,
    at: float,
    is_index: bool = False,
    is_full: bool = False,
) -> bool:
    """Merged with the row there is (`is_full`: read as a whole); whether it is news."""
    before = topic_row(connection, topic.topic_uuid)
    old = None if before is None else _object(before[1])
    new = merged(old, topic, is_index=is_index, is_full=is_full)
    row = (
        topic.topic_uuid,
        msgspec.json.encode(new),
        category_of(topic.category_id),
        topic.created_at,
        int(topic.deleted),
        int(at),
    )
    connection.execute(_PUT_TOPIC, row)
    return is_news(old, new)


def read_comments(connection: apsw.Connection, uuid: str) -> list[Row] | None:
    """The array as it stands; None if there is none."""
    row = comments_row(connection, uuid)
    try:
        found = None if row is None else loaded(row[1])
    except UNREADABLE:
        return None
    return found if isinstance(found, list) and all(map(_has_uuid, found)) else None


def put_comments_row(
    connection: apsw.Connection, uuid: str, rows: Sequence[Row], *, at: float
) -> bool:
    before, text = comments_row(connection, uuid), msgspec.json.encode(rows)
    connection.execute(_PUT_COMMENTS, (uuid, text, len(rows), int(at)))
    return before is None or before[1] != text


def drop_topics(connection: apsw.Connection, uuids: Iterable[str]) -> None:
    """With their comments and their own meta rows."""
    gone = list(uuids)
    for sql, key in _DROP:
        connection.executemany(sql, [(key(uuid),) for uuid in gone])


def restore(
    connection: apsw.Connection, uuid: str, topic: Stored | None, comments: Stored | None
) -> None:
    """What was dropped, unless something newer stands there."""
    if topic is not None and topic_row(connection, uuid) is None:
        connection.execute(_PUT_TOPIC, topic)
    if comments is not None and comments_row(connection, uuid) is None:
        connection.execute(_PUT_COMMENTS, comments)


def _object(text: bytes) -> Row | None:
    try:
        found = loaded(text)
    except UNREADABLE:
        return None
    return found if isinstance(found, dict) else None


def _has_uuid(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("comment_uuid"), str)
