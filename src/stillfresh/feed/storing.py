"""What a fetch has brought goes into the file: lists, a topic, its comments (F6, F7, F9).

Steps inside one transaction. What was written here a moment ago is not undone by a network that
lags: it is neither overwritten, nor deleted, nor brought back.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import apsw

from stillfresh.feed import notes
from stillfresh.feed.keys import comments_key, index_of, spelled, subject, topic_key
from stillfresh.feed.model import Comment, Topic
from stillfresh.feed.notes import Since
from stillfresh.feed.rows import (
    drop_topics,
    put_comments_row,
    put_topic_row,
    read_comments,
    topic_row,
)
from stillfresh.feed.rules import Fetched, Window, comment_rows
from stillfresh.feed.steps import PUT_META, mark

_COVERED: Final = """
    SELECT rowid, coalesce(CAST(topic_uuid AS BLOB), x''), coalesce(CAST(category_id AS BLOB), x'')
    FROM feed_topics WHERE created_at >= ? AND created_at < ?
"""
_IS_FETCHED: Final = "SELECT 1 FROM feed_cache_meta WHERE cache_key = ?"


def put_topics(
    connection: apsw.Connection,
    topics: Sequence[Topic],
    key: str,
    *,
    at: float,
    fresh_for: float,
    covers: Window | None,
) -> None:
    """An index result that somebody puts here by hand: it is newer than what was noted."""
    for topic in topics:
        notes.take_off(connection, topic.topic_uuid, "")
        _put_listed(connection, topic, at=at)
    _drop_gone(connection, topics, key, covers, Since(at - fresh_for, at))
    mark(connection, key, at)


def store(
    connection: apsw.Connection,
    key: str,
    fetched: Fetched,
    *,
    at: float,
    fresh_for: float,
    now: float,
) -> bool:
    """Whether it was news; F6: a part of a list is no reason for a meta row."""
    uuid, since = subject(key), Since(at - fresh_for, now)
    if index_of(key) is None and uuid in notes.left(connection, since, deleted=True):
        return False  # F8: nothing of a topic that was deleted here comes back
    if key == comments_key(uuid):
        changed = _store_comments(connection, uuid, fetched.comments, at, since)
    elif key == topic_key(uuid):
        changed = _store_topic(connection, uuid, fetched.topics, at, since)
    else:
        changed = _store_list(connection, key, fetched, at, since)
    if not fetched.failed:
        connection.execute(PUT_META, (key, int(at)))
    return changed


def _store_topic(
    connection: apsw.Connection, uuid: str, topics: Sequence[Topic], at: float, since: Since
) -> bool:
    if uuid in notes.left(connection, since, deleted=False):
        return False
    if topics:
        return put_topic_row(connection, topics[0], at=at)
    if topic_row(connection, uuid) is None:
        return False
    drop_topics(connection, [uuid])
    return True


def _store_comments(
    connection: apsw.Connection, uuid: str, comments: Iterable[Comment], at: float, since: Since
) -> bool:
    """Those that upstream has, and those written here that it may not know yet."""
    kept = notes.comments_left(connection, uuid, since)
    rows = comment_rows(read_comments(connection, uuid) or (), comments, kept)
    return put_comments_row(connection, uuid, rows, at=at)


def _store_list(
    connection: apsw.Connection, key: str, fetched: Fetched, at: float, since: Since
) -> bool:
    written = notes.left(connection, since, deleted=False)
    deleted = notes.left(connection, since, deleted=True)
    news = [
        _put_listed(connection, topic, at=at, is_index=True)
        for topic in {topic.topic_uuid: topic for topic in fetched.topics}.values()
        if topic.topic_uuid not in written | deleted
    ]
    gone = _drop_gone(connection, fetched.topics, key, fetched.covers, since)
    return any(news) or gone


def _put_listed(
    connection: apsw.Connection, topic: Topic, *, at: float, is_index: bool = False
) -> bool:
    """What is listed now is not absent, whatever was said before."""
    key = (topic_key(topic.topic_uuid),)
    if topic_row(connection, topic.topic_uuid) is None:
        connection.execute("DELETE FROM feed_cache_meta WHERE cache_key = ?", key)
    is_full = connection.execute(_IS_FETCHED, key).get is not None
    return put_topic_row(connection, topic, at=at, is_index=is_index, is_full=is_full)


def _drop_gone(
    connection: apsw.Connection,
    topics: Iterable[Topic],
    key: str,
    covers: Window | None,
    since: Since,
) -> bool:
    """F9: what upstream no longer has, of the time that was asked for; by row, for odd uuids."""
    if covers is None:
        return False
    index = index_of(key)
    category = None if index is None else index.category
    stays = {topic.topic_uuid for topic in topics} | notes.left(connection, since, deleted=False)
    kept = {uuid.encode() for uuid in stays}
    rows = connection.execute(_COVERED, (covers.since, covers.until))
    gone = [
        (rowid, uuid)
        for rowid, uuid, name in rows
        if uuid not in kept and category in {None, spelled(name)}
    ]
    connection.executemany("DELETE FROM feed_topics WHERE rowid = ?", [row[:1] for row in gone])
    drop_topics(connection, [uuid.decode(errors="replace") for _, uuid in gone])
    return bool(gone)
