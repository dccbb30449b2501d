"""The feed's writes, each inside one transaction: by callers, and by a fetch.

A write that changes what a key shows also voids the lease of the key's running load. That load
began before the write, so it must not store what it fetched.

A note says what was written or deleted here. For `fresh_for`, no fetch overwrites, deletes or
restores it: upstream may not show the write yet. Each write leaves its own token on its note, so
that undoing one write never undoes another.

A row that cannot be read counts as missing.
"""

from collections.abc import Callable, Iterable, Sequence
from secrets import token_hex
from typing import Any, TypeAlias, cast

import apsw
import msgspec
from msgspec import Struct

from stillfresh.freshness import MAX_SKEW
from stillfresh.systems.feed import rules
from stillfresh.systems.feed import schema as sql
from stillfresh.systems.feed.model import (
    Comment,
    Topic,
    category_of,
    comments_key,
    index_of,
    spelled,
    subject,
    topic_key,
)

TableRow: TypeAlias = tuple[Any, ...]
"""A whole row of one table, column by column."""


class Change(Struct, frozen=True):
    """What a write has done, and what was there before: just enough to undo it."""

    uuid: str
    comment_uuid: str
    """Empty if the topic itself was written."""
    token: str
    """The token on the note that the write left."""
    notes: list[TableRow]
    topic: TableRow | None = None
    comments: TableRow | None = None
    categories: frozenset[str] = frozenset()
    """The categories whose lists it changes; none: not known, so all."""
    is_deletion: bool = False


class Writes:
    """Steps on the rows of one file, in one transaction.

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

    def put_topic(self, topic: Topic) -> Change:
        """Store a full topic and its meta row; running loads of its lists began too early."""
        uuid = topic.topic_uuid
        before = self.row(sql.SELECT_TOPIC, uuid)
        notes = self.notes(uuid, "")
        self.put_row(topic)
        token = self.leave_note(uuid, "", deleted=False)
        self.mark(topic_key(uuid))
        names = {category_of(topic.category_id)}
        if before:
            names.add(spelled(before[2]))
        categories = frozenset(names)
        self.void(self.lists(categories))
        return Change(uuid, "", token, notes, before, categories=categories)

    def create_topic(self, topic: Topic) -> Change:
        """Show a topic at once; its lists become stale."""
        change = self.put_topic(topic)
        self.forget(self.lists(change.categories))
        return change

    def delete_topic(self, uuid: str) -> Change:
        """Delete the row, its comments and meta rows; a note keeps it from coming back."""
        notes = self.notes(uuid, None)
        topic = self.row(sql.SELECT_TOPIC, uuid)
        comments = self.row(sql.SELECT_COMMENTS, uuid)
        self.drop_topics([uuid])
        self.run(sql.TAKE_NOTE_OFF, (uuid, None))
        token = self.leave_note(uuid, "", deleted=True)
        categories = frozenset([spelled(topic[2])] if topic else [])
        self.forget([topic_key(uuid), comments_key(uuid), *self.lists(categories)])
        return Change(uuid, "", token, notes, topic, comments, categories, is_deletion=True)

    def put_comments(self, uuid: str, comments: Sequence[Comment]) -> None:
        """Store all comments of a topic, and their meta row."""
        self.put_array(uuid, lambda old: rules.comment_rows(old, comments))
        self.mark(comments_key(uuid))

    def add_comment(self, comment: Comment) -> Change:
        """Show a comment at once; the comments become stale."""
        uuid = comment.topic_uuid
        name = comment.comment_uuid
        notes = self.notes(uuid, name)
        before = self.row(sql.SELECT_COMMENTS, uuid)
        self.put_array(uuid, lambda old: rules.with_comment(old, comment))
        token = self.leave_note(uuid, name, deleted=False)
        self.forget([comments_key(uuid)])
        return Change(uuid, name, token, notes, comments=before)

    def settle(self, change: Change, again: Callable[["Writes"], Change]) -> None:
        """Upstream accepted it: write it again if a refresh has undone it meanwhile."""
        if self._shows(change) is change.is_deletion and self.is_last(change):
            again(self)
        self.forget(self._keys_showing(change))

    def undo(self, change: Change) -> None:
        """Upstream refused it: restore the state before, unless another write came since."""
        uuid = change.uuid
        if self.is_last(change):
            self.run(sql.TAKE_NOTE_OFF, (uuid, change.comment_uuid))
            self.file.executemany(sql.LEAVE_NOTE, change.notes)
            if change.comment_uuid:
                self._remove_comment(change)
            elif not change.is_deletion:
                self.run(sql.DROP_TOPIC, (uuid,))
            if change.topic is not None and self.row(sql.SELECT_TOPIC, uuid) is None:
                self.run(sql.PUT_TOPIC, change.topic)
            if change.comments is not None and self.row(sql.SELECT_COMMENTS, uuid) is None:
                self.run(sql.PUT_COMMENTS, change.comments)
        keys = self._keys_showing(change)
        if not change.comment_uuid:
            keys.append(topic_key(uuid))
            if change.is_deletion:
                keys.append(comments_key(uuid))
        self.forget(keys)

    def _remove_comment(self, change: Change) -> None:
        """Remove a comment; later ones stay."""
        uuid = change.uuid
        name = change.comment_uuid
        before = _array(change.comments)
        self.put_array(uuid, lambda now: rules.without_comment(now, name, before or []))
        if before is None and not _array(self.row(sql.SELECT_COMMENTS, uuid)):
            self.run(sql.DROP_COMMENTS, (uuid,))

    def _shows(self, change: Change) -> bool:
        """True if the written or deleted row is in the file."""
        if change.comment_uuid:
            rows = _array(self.row(sql.SELECT_COMMENTS, change.uuid)) or []
            return any(row.get("comment_uuid") == change.comment_uuid for row in rows)
        if change.is_deletion and self.row(sql.SELECT_COMMENTS, change.uuid) is not None:
            return True
        return self.row(sql.SELECT_TOPIC, change.uuid) is not None

    def _keys_showing(self, change: Change) -> list[str]:
        """The keys that show the topic or comment, besides its own."""
        if change.comment_uuid:
            return [comments_key(change.uuid)]
        return self.lists(change.categories)

    def put_topics(self, topics: Sequence[Topic], key: str, covers: rules.Window | None) -> None:
        """Store an index result of a caller; it is newer than the notes."""
        for topic in topics:
            self.run(sql.TAKE_NOTE_OFF, (topic.topic_uuid, ""))
            self.put_row(topic, is_listed=True)
        self._drop_missing(topics, key, covers)
        self.mark(key)

    def store(self, key: str, fetched: rules.Fetched) -> bool:
        """Store a fetch; True if it was news. It gets a meta row only if no day failed."""
        changed = self._store(key, fetched)
        if changed is not None and not fetched.failed:
            self.run(sql.PUT_META, (key, int(self.at)))
        return bool(changed)

    def _store(self, key: str, fetched: rules.Fetched) -> bool | None:
        """None if the topic was deleted here: it must not come back."""
        uuid = subject(key)
        deleted = self.topics_with_note(deleted=True)
        if index_of(key) is not None:
            return self._store_list(key, fetched, deleted)
        if uuid in deleted:
            return None
        if key == comments_key(uuid):
            notes = self.run(sql.SELECT_NOTED, self.since)
            local = [str(name) for topic, name, _ in notes if topic == uuid and name != ""]
            return self.put_array(
                uuid, lambda old: rules.comment_rows(old, fetched.comments, local)
            )
        if uuid in self.topics_with_note(deleted=False):
            return False
        if fetched.topics:
            return self.put_row(fetched.topics[0])
        if self.row(sql.SELECT_TOPIC, uuid) is None:
            return False
        self.drop_topics([uuid])
        return True

    def _store_list(self, key: str, fetched: rules.Fetched, deleted: set[str]) -> bool:
        written_here = deleted | self.topics_with_note(deleted=False)
        by_uuid = {topic.topic_uuid: topic for topic in fetched.topics}
        news = [
            self.put_row(topic, is_listed=True, is_index=True)
            for topic in by_uuid.values()
            if topic.topic_uuid not in written_here
        ]
        has_dropped = self._drop_missing(fetched.topics, key, fetched.covers)
        return any(news) or has_dropped

    def _drop_missing(self, topics: Iterable[Topic], key: str, covers: rules.Window | None) -> bool:
        """Drop topics of the requested time that upstream no longer has; True if there are any."""
        if covers is None:
            return False
        index = index_of(key)
        category = None if index is None else index.category
        staying = {topic.topic_uuid for topic in topics} | self.topics_with_note(deleted=False)
        staying_bytes = {uuid.encode() for uuid in staying}
        missing = [
            (rowid, uuid)
            for rowid, uuid, name in self.run(sql.SELECT_COVERED, (covers.since, covers.until))
            if uuid not in staying_bytes and category in {None, spelled(name)}
        ]
        # By row first: a uuid that is NULL or not valid UTF-8 is not found by its text.
        by_row = "DELETE FROM feed_topics WHERE rowid = ?"
        self.file.executemany(by_row, [(rowid,) for rowid, _ in missing])
        self.drop_topics([uuid.decode(errors="replace") for _, uuid in missing])
        return bool(missing)

    def forget(self, keys: Iterable[str]) -> None:
        """Make these keys stale; their running loads began too early."""
        names = list(keys)
        self.file.executemany(sql.DROP_META, [(key,) for key in names])
        self.void(names)

    def erase(self, keys: Iterable[str]) -> None:
        """Delete everything about these keys; the topics of a list stay."""
        for key in keys:
            self.run(sql.DROP_META, (key,))
            uuid = subject(key)
            if key == topic_key(uuid):
                self.drop_topics([uuid])
            elif key == comments_key(uuid):
                self.run(sql.DROP_COMMENTS, (uuid,))

    def mark(self, key: str) -> None:
        """A caller without a lease has just fetched it: a running load began earlier."""
        self.run(sql.PUT_META, (key, int(self.at)))
        self.void([key])

    def void(self, keys: Iterable[str]) -> None:
        """Void the leases of running loads: they may no longer store what they fetch."""
        sql.LEASES.void(self.file, keys)

    def lists(self, categories: frozenset[str]) -> list[str]:
        """The lists of these categories and of "all", for any days; without any, all lists."""
        keys = [key.decode(errors="replace") for (key,) in self.run(sql.SELECT_LISTS)]
        shown = {None, *categories}
        return [
            key
            for key in keys
            if (index := index_of(key)) is not None and (not categories or index.category in shown)
        ]

    def row(self, select: str, uuid: str) -> TableRow | None:
        return cast("TableRow | None", self.run(select, (uuid,)).get)

    def put_row(self, topic: Topic, *, is_listed: bool = False, is_index: bool = False) -> bool:
        """Store a topic, merged with its present row; return whether it is news.

        A listed topic is not absent, so a meta row without a row is dropped. With a meta row, the
        present row is a whole topic.
        """
        key = topic_key(topic.topic_uuid)
        before = self.row(sql.SELECT_TOPIC, topic.topic_uuid)
        if is_listed and before is None:
            self.run(sql.DROP_META, (key,))
        is_full = is_listed and self.row(sql.SELECT_META, key) is not None
        old = None if before is None else _decode(before[1], dict)
        new = rules.merged(old, topic, is_index=is_index, is_full=is_full)
        self.run(
            sql.PUT_TOPIC,
            (
                topic.topic_uuid,
                msgspec.json.encode(new),
                category_of(topic.category_id),
                topic.created_at,
                int(topic.deleted),
                int(self.at),
            ),
        )
        return rules.is_news(old, new)

    def put_array(
        self, uuid: str, change: Callable[[list[rules.JsonObject]], list[rules.JsonObject]]
    ) -> bool:
        """Store what `change` makes of the present comments; return whether it is news."""
        before = self.row(sql.SELECT_COMMENTS, uuid)
        rows = change(_array(before) or [])
        text = msgspec.json.encode(rows)
        self.run(sql.PUT_COMMENTS, (uuid, text, len(rows), int(self.at)))
        return before is None or before[1] != text

    def drop_topics(self, uuids: Sequence[str]) -> None:
        """Drop topics with their comments and their own meta rows."""
        rows = [(uuid,) for uuid in uuids]
        keys = [(key(uuid),) for uuid in uuids for key in (topic_key, comments_key)]
        self.file.executemany(sql.DROP_TOPIC, rows)
        self.file.executemany(sql.DROP_COMMENTS, rows)
        self.file.executemany(sql.DROP_META, keys)

    def notes(self, uuid: str, comment_uuid: str | None) -> list[TableRow]:
        """The notes on a topic (an empty `comment_uuid`), on one comment, or on both (None)."""
        return self.run(sql.SELECT_NOTES, (uuid, comment_uuid)).fetchall()

    def leave_note(self, uuid: str, comment_uuid: str, *, deleted: bool) -> str:
        """Leave a note, and return its token."""
        token = token_hex(8)
        self.run(sql.LEAVE_NOTE, (uuid, comment_uuid, self.at, int(deleted), token))
        return token

    def is_last(self, change: Change) -> bool:
        """True if nothing was written there since."""
        notes = self.notes(change.uuid, change.comment_uuid)
        return bool(notes) and notes[0][4] == change.token

    def topics_with_note(self, *, deleted: bool) -> set[str]:
        """The uuids of the topics written, or deleted, here."""
        notes = self.run(sql.SELECT_NOTED, self.since)
        return {uuid for uuid, name, is_deleted in notes if name == "" and is_deleted == deleted}


def evict_slice(
    connection: apsw.Connection, now: float, *, fresh_for: float, keep_for: float, size: int
) -> tuple[int, bool]:
    """Drop up to `size` rows older than `keep_for`: how many were dropped, and whether to go on."""
    dropped = 0
    for statement in sql.EVICT_ROWS:
        connection.execute(statement, (now - keep_for, size - dropped))
        dropped += connection.changes()
    if dropped == size:
        return dropped, True
    connection.execute(sql.EVICT_NOTES, (now - fresh_for,))
    connection.execute(sql.EVICT_TIMES, (1000 * (now - fresh_for),))
    return dropped, False


def _decode(text: bytes, kind: type) -> Any:  # noqa: ANN401 (an object, or a list of them)
    """The JSON of a row; None if it cannot be read, or is of another type."""
    try:
        value = rules.decoded_json(text)
    except rules.UNREADABLE:
        return None
    return value if isinstance(value, kind) else None


def _array(row: TableRow | None) -> list[rules.JsonObject] | None:
    """The comments of a row; None if there are none that can be read."""
    if row is None:
        return None
    comments: list[rules.JsonObject] | None = _decode(row[1], list)
    if comments is None:
        return None
    for comment in comments:
        if not isinstance(comment, dict) or not isinstance(comment.get("comment_uuid"), str):
            return None
    return comments
