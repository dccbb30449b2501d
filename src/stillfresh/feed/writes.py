"""The feed's writes, each inside one transaction: by callers, and by a fetch (F2, F6-F10).

What changes what a key would show voids the lease of the load under way: the law. For `fresh_for`
after a write here no fetch overwrites or deletes what was written, or brings back what was deleted.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stillfresh.feed.model import (
    Comment,
    Topic,
    category_of,
    comments_key,
    index_of,
    spelled,
    subject,
    topic_key,
)
from stillfresh.feed.rows import (
    COMMENTS,
    DROP_COMMENTS,
    DROP_META,
    DROP_TOPIC,
    LEAVE,
    PUT_COMMENTS,
    PUT_META,
    PUT_TOPIC,
    TAKE_OFF,
    TOPIC,
    Change,
    FeedRows,
    categories_of,
)
from stillfresh.feed.rules import Fetched, Window, comment_rows, with_comment, without_comment

_META: Final = "SELECT CAST(last_fetched AS INTEGER) FROM feed_cache_meta WHERE cache_key = ?"
_COVERED: Final = """
    SELECT rowid, coalesce(CAST(topic_uuid AS BLOB), x''), coalesce(CAST(category_id AS BLOB), x'')
    FROM feed_topics WHERE created_at >= ? AND created_at < ?
"""
_NOTED_ON: Final = """
    SELECT comment_uuid FROM stillfresh_writes
    WHERE topic_uuid = ? AND comment_uuid <> '' AND written_at > ? AND written_at <= ?
"""


class Writes(FeedRows):
    """Steps on the feed's rows."""

    def put_topic(self, topic: Topic) -> Change:
        """A full topic and its meta row; loads of lists that show it began too early."""
        uuid = topic.topic_uuid
        before, notes = self.row(TOPIC, uuid), self.notes(uuid, "")
        self.put_row(topic)
        token = self.leave(uuid, "", deleted=False)
        self.mark(topic_key(uuid))
        categories = frozenset({category_of(topic.category_id), *categories_of(before)})
        self.void(self.lists(categories))
        return Change(uuid, "", token, notes, before, categories=categories)

    def create_topic(self, topic: Topic) -> Change:
        """F10: shown at once; its lists are stale."""
        change = self.put_topic(topic)
        self.forget(self.lists(change.categories))
        return change

    def delete_topic(self, uuid: str) -> Change:
        """F10: the row, its comments and meta rows go; a note stays that it must not come back."""
        notes = self.notes(uuid, None)
        topic, comments = self.row(TOPIC, uuid), self.row(COMMENTS, uuid)
        self.drop_topics([uuid])
        self.run(TAKE_OFF, (uuid, None))
        token = self.leave(uuid, "", deleted=True)
        categories = frozenset(categories_of(topic))
        self.forget([topic_key(uuid), comments_key(uuid), *self.lists(categories)])
        return Change(
            uuid, "", token, notes, topic, comments, categories=categories, is_deletion=True
        )

    def put_comments(self, uuid: str, comments: Sequence[Comment]) -> None:
        self.put_array(uuid, comment_rows(self.comment_array(uuid) or (), comments))
        self.mark(comments_key(uuid))

    def add_comment(self, comment: Comment) -> Change:
        """F10: shown at once, to be revalidated."""
        uuid, name = comment.topic_uuid, comment.comment_uuid
        notes, before = self.notes(uuid, name), self.comment_array(uuid)
        self.put_array(uuid, with_comment(before or [], comment))
        token = self.leave(uuid, name, deleted=False)
        self.forget([comments_key(uuid)])
        return Change(uuid, name, token, notes, array=before)

    def settle(self, change: Change, again: Callable[["Writes"], Change]) -> None:
        """Upstream accepted it: done again if a refresh, meanwhile, undid it."""
        if self._shows(change) is change.is_deletion and self.is_last(change):
            again(self)
        self.forget(self._shown_by(change))

    def undo(self, change: Change) -> None:
        """Upstream refused it: as it was before, unless another write came since."""
        uuid = change.uuid
        if self.is_last(change):
            self.run(TAKE_OFF, (uuid, change.comment_uuid))
            self.file.executemany(LEAVE, change.notes)
            if change.comment_uuid:
                self._take_out(change)
            elif not change.is_deletion:
                self.run(DROP_TOPIC, (uuid,))
            if change.topic is not None and self.row(TOPIC, uuid) is None:
                self.run(PUT_TOPIC, change.topic)
            if change.comments is not None and self.row(COMMENTS, uuid) is None:
                self.run(PUT_COMMENTS, change.comments)
        own = [topic_key(uuid), *([comments_key(uuid)] if change.is_deletion else [])]
        self.forget([*([] if change.comment_uuid else own), *self._shown_by(change)])

    def _take_out(self, change: Change) -> None:
        """A comment; what came since stays."""
        uuid, before, now = change.uuid, change.array, self.comment_array(change.uuid)
        rows = without_comment(now or [], change.comment_uuid, before or [])
        if rows or before is not None:
            self.put_array(uuid, rows)
        else:
            self.run(DROP_COMMENTS, (uuid,))

    def _shows(self, change: Change) -> bool:
        """What was written, or deleted, is there."""
        if change.comment_uuid:
            rows = self.comment_array(change.uuid) or []
            return any(row.get("comment_uuid") == change.comment_uuid for row in rows)
        is_left = change.is_deletion and self.row(COMMENTS, change.uuid) is not None
        return is_left or self.row(TOPIC, change.uuid) is not None

    def _shown_by(self, change: Change) -> list[str]:
        """The keys that show it besides its own."""
        return [comments_key(change.uuid)] if change.comment_uuid else self.lists(change.categories)

    def put_topics(self, topics: Sequence[Topic], key: str, covers: Window | None) -> None:
        """An index result that a caller puts here: it is newer than what was noted."""
        for topic in topics:
            self.run(TAKE_OFF, (topic.topic_uuid, ""))
            self._put_listed(topic)
        self._drop_gone(topics, key, covers)
        self.mark(key)

    def store(self, key: str, fetched: Fetched) -> bool:
        """What a fetch of the whole key brought, and its meta row; True if it was news."""
        changed = self._store(key, fetched)
        if changed is not None:
            self.run(PUT_META, (key, int(self.at)))
        return bool(changed)

    def store_part(self, key: str, fetched: Fetched) -> bool:
        """F6: what some days brought, without a meta row; nothing if a newer fetch was whole."""
        last_fetched: int | None = self.run(_META, (key,)).get
        return (last_fetched or 0) < int(self.at) and bool(self._store(key, fetched))

    def _store(self, key: str, fetched: Fetched) -> bool | None:
        """None: F8, nothing of a topic that was deleted here comes back."""
        uuid, deleted = subject(key), self.noted(deleted=True)
        if index_of(key) is not None:
            return self._store_list(key, fetched, deleted)
        if uuid in deleted:
            return None
        if key == comments_key(uuid):
            noted = self.run(_NOTED_ON, (uuid, *self.since))
            kept = [str(name) for (name,) in noted]
            rows = comment_rows(self.comment_array(uuid) or (), fetched.comments, kept)
            return self.put_array(uuid, rows)
        if uuid in self.noted(deleted=False):
            return False
        if fetched.topics:
            return self.put_row(fetched.topics[0])
        is_there = self.row(TOPIC, uuid) is not None
        self.drop_topics([uuid] if is_there else [])
        return is_there

    def _store_list(self, key: str, fetched: Fetched, deleted: set[str]) -> bool:
        written = self.noted(deleted=False)
        news = [
            self._put_listed(topic, is_index=True)
            for topic in {topic.topic_uuid: topic for topic in fetched.topics}.values()
            if topic.topic_uuid not in written | deleted
        ]
        gone = self._drop_gone(fetched.topics, key, fetched.covers)
        return any(news) or gone

    def _put_listed(self, topic: Topic, *, is_index: bool = False) -> bool:
        """What is listed now is not absent, whatever was said before."""
        key = (topic_key(topic.topic_uuid),)
        if self.row(TOPIC, topic.topic_uuid) is None:
            self.run(DROP_META, key)
        is_full = self.run(_META, key).get is not None
        return self.put_row(topic, is_index=is_index, is_full=is_full)

    def _drop_gone(self, topics: Iterable[Topic], key: str, covers: Window | None) -> bool:
        """F9: what upstream no longer has, of the time asked for; by row, for odd uuids."""
        if covers is None:
            return False
        index = index_of(key)
        category = None if index is None else index.category
        stays = {topic.topic_uuid for topic in topics} | self.noted(deleted=False)
        kept = {uuid.encode() for uuid in stays}
        gone = [
            (rowid, uuid)
            for rowid, uuid, name in self.run(_COVERED, (covers.since, covers.until))
            if uuid not in kept and category in {None, spelled(name)}
        ]
        by_row = "DELETE FROM feed_topics WHERE rowid = ?"
        self.file.executemany(by_row, [(rowid,) for rowid, _ in gone])
        self.drop_topics([uuid.decode(errors="replace") for _, uuid in gone])
        return bool(gone)
