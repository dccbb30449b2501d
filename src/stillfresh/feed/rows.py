"""Rows of the seed's tables, meta rows, and notes of local writes: one at a time (F1, F8-F10).

A note says what was written or deleted here, which upstream may not show yet. Each write leaves
its own token on its note, so that undoing one write never undoes another's. A row that cannot be
read counts as none (F12). All of it inside the transaction of the step that calls it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from secrets import token_hex
from typing import Any, Final, TypeAlias

import apsw
import msgspec
from msgspec import Struct

from stillfresh.errors import StoreError
from stillfresh.feed.model import (
    Topic,
    category_of,
    comments_key,
    index_of,
    spelled,
    subject,
    topic_key,
)
from stillfresh.feed.records import UNREADABLE, Row, loaded
from stillfresh.feed.rules import is_news, merged
from stillfresh.freshness import MAX_SKEW

Stored: TypeAlias = tuple[Any, ...]
"""A whole row, column by column."""

# In and out as bytes: text that is no UTF-8 would raise before it can be replaced.
TOPIC: Final = """
    SELECT topic_uuid, CAST(topic_json AS BLOB), CAST(category_id AS BLOB), created_at, deleted,
        cached_at
    FROM feed_topics WHERE topic_uuid = ?
"""
COMMENTS: Final = """
    SELECT topic_uuid, CAST(comments_json AS BLOB), comment_count, cached_at
    FROM feed_comments WHERE topic_uuid = ?
"""
PUT_TOPIC: Final = """
    INSERT INTO feed_topics(topic_uuid, topic_json, category_id, created_at, deleted, cached_at)
    VALUES (?, CAST(? AS TEXT), CAST(? AS TEXT), ?, ?, ?)
    ON CONFLICT(topic_uuid) DO UPDATE SET topic_json = excluded.topic_json,
        category_id = excluded.category_id, created_at = excluded.created_at,
        deleted = excluded.deleted, cached_at = excluded.cached_at
"""
PUT_COMMENTS: Final = """
    INSERT INTO feed_comments(topic_uuid, comments_json, comment_count, cached_at)
    VALUES (?, CAST(? AS TEXT), ?, ?)
    ON CONFLICT(topic_uuid) DO UPDATE SET comments_json = excluded.comments_json,
        comment_count = excluded.comment_count, cached_at = excluded.cached_at
"""
PUT_META: Final = """
    INSERT INTO feed_cache_meta(cache_key, last_fetched) VALUES (?, ?)
    ON CONFLICT(cache_key) DO UPDATE SET last_fetched = excluded.last_fetched
"""
DROP_TOPIC: Final = "DELETE FROM feed_topics WHERE topic_uuid = ?"
DROP_COMMENTS: Final = "DELETE FROM feed_comments WHERE topic_uuid = ?"
DROP_META: Final = "DELETE FROM feed_cache_meta WHERE cache_key = ?"
_VOID: Final = "UPDATE stillfresh_feed_times SET lease_token = NULL WHERE id = ?"
_LISTS: Final = """
    SELECT CAST(cache_key AS BLOB) FROM feed_cache_meta
    WHERE cache_key >= 'index:' AND cache_key < 'index;'
    UNION SELECT CAST(id AS BLOB) FROM stillfresh_feed_times WHERE id >= 'index:' AND id < 'index;'
"""
LEAVE: Final = """
    INSERT OR REPLACE INTO stillfresh_writes(topic_uuid, comment_uuid, written_at, deleted, token)
    VALUES (?, ?, ?, ?, ?)
"""
_NOTES: Final = """
    SELECT topic_uuid, comment_uuid, written_at, deleted, token FROM stillfresh_writes
    WHERE topic_uuid = ?1 AND (?2 IS NULL OR comment_uuid = ?2)
"""
TAKE_OFF: Final = """
    DELETE FROM stillfresh_writes WHERE topic_uuid = ?1 AND (?2 IS NULL OR comment_uuid = ?2)
"""
_NOTED: Final = """
    SELECT topic_uuid FROM stillfresh_writes
    WHERE comment_uuid = '' AND deleted = ? AND written_at > ? AND written_at <= ?
"""


@contextmanager
def usable() -> Iterator[None]:
    """Rows of others may hold what no step can use: a StoreError, not a bug."""
    try:
        yield
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise StoreError(f"the feed's rows hold what cannot be used: {exc!r}") from exc


class Change(Struct, frozen=True):
    """What a write has done, and what stood there before: enough to undo it, and nothing else."""

    uuid: str
    comment_uuid: str
    """Empty where the topic itself was written."""
    token: str
    """On the note that the write left."""
    notes: list[Stored]
    topic: Stored | None = None
    comments: Stored | None = None
    array: list[Row] | None = None
    """The comments, where one was added."""
    categories: frozenset[str] = frozenset()
    """The categories whose lists it changes; none: not known, so all."""
    is_deletion: bool = False


class FeedRows:
    """The rows of one file, in one transaction.

    `at` is what new rows are stamped with: now, or when a fetch was sent. Notes left since
    `at - fresh_for` count, but none from after `now`: those are from before a clock was set back.
    """

    def __init__(
        self,
        connection: apsw.Connection,
        at: float = 0.0,
        fresh_for: float = 0.0,
        now: float | None = None,
    ) -> None:
        self.file = connection
        self.run = connection.execute
        self.at = at
        self.since = (at - fresh_for, (at if now is None else now) + MAX_SKEW)

    def forget(self, keys: Iterable[str]) -> None:
        """Stale from now on, and a load under way began too early."""
        rows = [(key,) for key in keys]
        self.file.executemany(DROP_META, rows)
        self.file.executemany(_VOID, rows)

    def erase(self, keys: Iterable[str]) -> None:
        """All that is known of them; topics that a list shows are not its own, and stay."""
        for key in keys:
            self.run(DROP_META, (key,))
            uuid = subject(key)
            if key == topic_key(uuid):
                self.drop_topics([uuid])
            elif key == comments_key(uuid):
                self.run(DROP_COMMENTS, (uuid,))

    def mark(self, key: str) -> None:
        """Fetched just now, by a caller without a lease: a load under way began earlier."""
        self.run(PUT_META, (key, int(self.at)))
        self.void([key])

    def void(self, keys: Iterable[str]) -> None:
        self.file.executemany(_VOID, [(key,) for key in keys])

    def lists(self, categories: frozenset[str]) -> list[str]:
        """F10: of the categories and of "all", whatever their days; all there are, if none."""
        keys = [key.decode(errors="replace") for (key,) in self.run(_LISTS)]
        shown = {None, *categories}
        return [
            key
            for key in keys
            if (index := index_of(key)) is not None and (not categories or index.category in shown)
        ]

    def row(self, select: str, uuid: str) -> Stored | None:
        row: Stored | None = self.run(select, (uuid,)).get
        return row

    def put_row(self, topic: Topic, *, is_index: bool = False, is_full: bool = False) -> bool:
        """Merged with the row there is (`is_full`: read as a whole); whether it is news."""
        before = self.row(TOPIC, topic.topic_uuid)
        old = None if before is None else _loaded(before[1], dict)
        new = merged(old, topic, is_index=is_index, is_full=is_full)
        self.run(
            PUT_TOPIC,
            (
                topic.topic_uuid,
                msgspec.json.encode(new),
                category_of(topic.category_id),
                topic.created_at,
                int(topic.deleted),
                int(self.at),
            ),
        )
        return is_news(old, new)

    def comment_array(self, uuid: str) -> list[Row] | None:
        """The array as it stands; None if there is none."""
        row = self.row(COMMENTS, uuid)
        found = None if row is None else _loaded(row[1], list)
        return found if found is not None and all(map(_has_uuid, found)) else None

    def put_array(self, uuid: str, rows: Sequence[Row]) -> bool:
        before, text = self.row(COMMENTS, uuid), msgspec.json.encode(rows)
        self.run(PUT_COMMENTS, (uuid, text, len(rows), int(self.at)))
        return before is None or before[1] != text

    def drop_topics(self, uuids: Sequence[str]) -> None:
        """With their comments and their own meta rows."""
        rows = [(uuid,) for uuid in uuids]
        keys = [(key(uuid),) for uuid in uuids for key in (topic_key, comments_key)]
        for sql, gone in ((DROP_TOPIC, rows), (DROP_COMMENTS, rows), (DROP_META, keys)):
            self.file.executemany(sql, gone)

    def notes(self, uuid: str, comment_uuid: str | None) -> list[Stored]:
        """On a topic, or on one comment of it; None: on all of it."""
        return self.run(_NOTES, (uuid, comment_uuid)).fetchall()

    def leave(self, uuid: str, comment_uuid: str, *, deleted: bool) -> str:
        token = token_hex(8)
        self.run(LEAVE, (uuid, comment_uuid, self.at, int(deleted), token))
        return token

    def is_last(self, change: Change) -> bool:
        """Nothing was written there since."""
        found = self.notes(change.uuid, change.comment_uuid)
        return bool(found) and found[0][4] == change.token

    def noted(self, *, deleted: bool) -> set[str]:
        """F9: the topics written, or deleted, here."""
        return {uuid for (uuid,) in self.run(_NOTED, (int(deleted), *self.since))}


def categories_of(row: Stored | None) -> list[str]:
    return [] if row is None else [spelled(row[2])]


def _loaded(text: bytes, kind: type) -> Any:  # noqa: ANN401 (an object, or a list of them)
    try:
        found = loaded(text)
    except UNREADABLE:
        return None
    return found if isinstance(found, kind) else None


def _has_uuid(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("comment_uuid"), str)
