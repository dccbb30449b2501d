"""The feed's writes, as functions of the connection: each runs inside one transaction (F2, F8-F10).

Whatever changes what a key would show ends the lease of who is refreshing it: the law.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import apsw
from msgspec import Struct

from stillfresh.feed.keys import (
    EVERYTHING,
    category_of,
    comments_key,
    index_of,
    is_index_of,
    spelled,
    subject,
    topic_key,
)
from stillfresh.feed.model import Comment, Topic
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
from stillfresh.feed.rules import (
    Fetched,
    Row,
    Window,
    comment_rows,
    with_comment,
    without_comment,
)

__all__ = [
    "Removed",
    "add_comment",
    "create_topic",
    "delete_topic",
    "forget",
    "forget_lists",
    "put_comments",
    "put_topic",
    "put_topics",
    "remove_comment",
    "restore_topic",
    "store",
    "uncreate_topic",
]

_PUT_META: Final = """
    INSERT INTO feed_cache_meta(cache_key, last_fetched) VALUES (?, ?)
    ON CONFLICT(cache_key) DO UPDATE SET last_fetched = excluded.last_fetched
"""
_VOID: Final = """
    UPDATE stillfresh_refreshes SET lease_token = NULL, lease_expires_at = NULL WHERE cache_key = ?
"""
_INDEX_KEYS: Final = """
    SELECT cache_key FROM feed_cache_meta WHERE cache_key >= ?1 AND cache_key < ?2
    UNION SELECT cache_key FROM stillfresh_refreshes WHERE cache_key >= ?1 AND cache_key < ?2
"""
_COVERED: Final = """
    SELECT topic_uuid, CAST(category_id AS BLOB) FROM feed_topics
    WHERE created_at >= ? AND created_at < ?
"""
_NOTE: Final = """
    INSERT OR REPLACE INTO stillfresh_writes(topic_uuid, comment_uuid, written_at, deleted)
    VALUES (?, ?, ?, ?)
"""
_UNNOTE: Final = "DELETE FROM stillfresh_writes WHERE topic_uuid = ? AND comment_uuid = ?"
_UNNOTE_DELETED: Final = "DELETE FROM stillfresh_writes WHERE topic_uuid = ? AND deleted"
_NOTED: Final = """
    SELECT topic_uuid FROM stillfresh_writes
    WHERE comment_uuid = '' AND written_at > ? AND deleted = ?
"""
_NOTED_COMMENTS: Final = """
    SELECT comment_uuid FROM stillfresh_writes
    WHERE topic_uuid = ? AND comment_uuid <> '' AND written_at > ?
"""


class Removed(Struct, frozen=True):
    """What a deletion took away, so that it can be brought back."""

    topic: Stored | None
    comments: Stored | None

    @property
    def category(self) -> str | None:
        """None: nobody can say."""
        name = None if self.topic is None else self.topic[2]
        return name if isinstance(name, str) else None


def put_topic(connection: apsw.Connection, topic: Topic, *, at: float) -> None:
    """A full topic, written here."""
    put_topic_row(connection, topic, at=at)
    connection.execute(_NOTE, (topic.topic_uuid, "", at, 0))
    _mark(connection, topic_key(topic.topic_uuid), at)


def put_topics(
    connection: apsw.Connection,
    topics: Iterable[Topic],
    key: str,
    *,
    at: float,
    fresh_for: float,
    covers: Window | None,
) -> None:
    """An index result that somebody puts here by hand."""
    kept = list(topics)
    connection.executemany(_UNNOTE_DELETED, [(topic.topic_uuid,) for topic in kept])
    _put_list(connection, kept, key, covers, at=at, fresh_for=fresh_for)
    _mark(connection, key, at)


def put_comments(
    connection: apsw.Connection, uuid: str, comments: Sequence[Comment], *, at: float
) -> None:
    rows = comment_rows(read_comments(connection, uuid) or (), comments)
    put_comments_row(connection, uuid, rows, at=at)
    _mark(connection, comments_key(uuid), at)


def store(
    connection: apsw.Connection, key: str, fetched: Fetched, *, at: float, fresh_for: float
) -> bool:
    """F7, F9: what a fetch brought, and whether that is news; F6: no meta row for a part of it."""
    uuid = subject(key)
    if key == comments_key(uuid):
        changed = _put_all(connection, uuid, fetched.comments, at=at, fresh_for=fresh_for)
    elif key == topic_key(uuid):
        changed = _put_one(connection, uuid, fetched.topics, at=at, fresh_for=fresh_for)
    else:
        topics, covers = fetched.topics, fetched.covers
        changed = _put_list(connection, topics, key, covers, at=at, fresh_for=fresh_for)
    if not fetched.failed:
        connection.execute(_PUT_META, (key, int(at)))
    return changed


def create_topic(connection: apsw.Connection, topic: Topic, *, at: float) -> Stored | None:
    """F10: shown at once. Returns the row that it replaced, if there was one."""
    before = topic_row(connection, topic.topic_uuid)
    put_topic(connection, topic, at=at)
    forget_lists(connection, topic.category_id)
    return before


def uncreate_topic(connection: apsw.Connection, topic: Topic, before: Stored | None) -> None:
    """Upstream refused it."""
    uuid = topic.topic_uuid
    connection.execute(_UNNOTE, (uuid, ""))
    connection.execute("DELETE FROM feed_topics WHERE topic_uuid = ?", (uuid,))
    restore(connection, uuid, before, None)
    forget(connection, [topic_key(uuid)])
    forget_lists(connection, topic.category_id)


def delete_topic(connection: apsw.Connection, uuid: str, *, at: float) -> Removed:
    """F10: the row, its comments and meta rows go; a note stays that it must not come back."""
    removed = Removed(topic_row(connection, uuid), comments_row(connection, uuid))
    drop_topics(connection, [uuid])
    connection.execute("DELETE FROM stillfresh_writes WHERE topic_uuid = ?", (uuid,))
    connection.execute(_NOTE, (uuid, "", at, 1))
    forget(connection, [topic_key(uuid), comments_key(uuid)])
    forget_lists(connection, removed.category)
    return removed


def restore_topic(connection: apsw.Connection, uuid: str, removed: Removed) -> None:
    """Upstream refused to delete it."""
    connection.execute(_UNNOTE, (uuid, ""))
    restore(connection, uuid, removed.topic, removed.comments)
    forget(connection, [topic_key(uuid), comments_key(uuid)])
    forget_lists(connection, removed.category)


def add_comment(
    connection: apsw.Connection, uuid: str, comment: Comment, *, at: float
) -> list[Row] | None:
    """F10: shown at once, to be revalidated. Returns the comments as they were."""
    before = read_comments(connection, uuid)
    put_comments_row(connection, uuid, with_comment(before or [], comment), at=at)
    connection.execute(_NOTE, (uuid, comment.comment_uuid, at, 0))
    forget(connection, [comments_key(uuid)])
    return before


def remove_comment(
    connection: apsw.Connection,
    uuid: str,
    comment_uuid: str,
    before: list[Row] | None,
    *,
    at: float,
) -> None:
    """Upstream refused it: as it was before, but for what came since."""
    connection.execute(_UNNOTE, (uuid, comment_uuid))
    rows = without_comment(read_comments(connection, uuid) or [], comment_uuid, before or [])
    if rows or before is not None:
        put_comments_row(connection, uuid, rows, at=at)
    else:
        connection.execute("DELETE FROM feed_comments WHERE topic_uuid = ?", (uuid,))
    forget(connection, [comments_key(uuid)])


def forget(connection: apsw.Connection, keys: Iterable[str]) -> None:
    """Stale from now on, and whoever is refreshing it began too early."""
    rows = [(key,) for key in keys]
    connection.executemany("DELETE FROM feed_cache_meta WHERE cache_key = ?", rows)
    connection.executemany(_VOID, rows)


def forget_lists(connection: apsw.Connection, category: str | None) -> None:
    """F10: those of the category and of "all", whatever their days; None: all there are."""
    names = {EVERYTHING} if category is None else {EVERYTHING, category_of(category)}
    prefixes = ["index:"] if category is None else [f"index:{name}:" for name in names]
    for prefix in prefixes:
        bounds = (prefix, f"{prefix[:-1]};")
        keys = [key for (key,) in connection.execute(_INDEX_KEYS, bounds)]
        forget(
            connection,
            [key for key in keys if category is None or any(is_index_of(key, n) for n in names)],
        )


def _mark(connection: apsw.Connection, key: str, at: float) -> None:
    """Fetched just now, by one who did not ask for the lease: who holds it began earlier."""
    connection.execute(_PUT_META, (key, int(at)))
    connection.execute(_VOID, (key,))


def _put_one(
    connection: apsw.Connection,
    uuid: str,
    topics: Sequence[Topic],
    *,
    at: float,
    fresh_for: float,
) -> bool:
    """One topic as upstream has it, unless it was written or deleted here a moment ago."""
    if topics:
        is_deleted = uuid in _noted(connection, at - fresh_for, deleted=True)
        return not is_deleted and put_topic_row(connection, topics[0], at=at)
    if topic_row(connection, uuid) is None or uuid in _noted(
        connection, at - fresh_for, deleted=False
    ):
        return False
    drop_topics(connection, [uuid])
    return True


def _put_all(
    connection: apsw.Connection,
    uuid: str,
    comments: Iterable[Comment],
    *,
    at: float,
    fresh_for: float,
) -> bool:
    """The comments that upstream has, and those written here that it may not know yet."""
    noted = connection.execute(_NOTED_COMMENTS, (uuid, at - fresh_for))
    kept = [str(comment_uuid) for (comment_uuid,) in noted]
    rows = comment_rows(read_comments(connection, uuid) or (), comments, kept)
    return put_comments_row(connection, uuid, rows, at=at)


def _put_list(
    connection: apsw.Connection,
    topics: Iterable[Topic],
    key: str,
    covers: Window | None,
    *,
    at: float,
    fresh_for: float,
) -> bool:
    deleted = _noted(connection, at - fresh_for, deleted=True)
    found = {topic.topic_uuid: topic for topic in topics if topic.topic_uuid not in deleted}
    news = [put_topic_row(connection, topic, at=at) for topic in found.values()]
    if covers is None:
        return any(news)
    index = index_of(key)
    category = None if index is None else index.category
    rows = connection.execute(_COVERED, (covers.since, covers.until))
    there = {uuid for uuid, name in rows if category in {None, spelled(name)}}
    gone = there - found.keys() - _noted(connection, at - fresh_for, deleted=False)
    drop_topics(connection, gone)
    return any(news) or bool(gone)


def _noted(connection: apsw.Connection, since: float, *, deleted: bool) -> set[str]:
    """F9: the topics written, or deleted, here since then: upstream may not know yet."""
    return {uuid for (uuid,) in connection.execute(_NOTED, (since, int(deleted)))}
