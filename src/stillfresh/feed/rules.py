"""What a feed decides: what is stale, which days to ask for, what a new row keeps of the old one.

Pure (F3, F4, F6, F8, F9; seed 001): rows and times in, decisions out; `now` is an argument.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from msgspec import Struct, ValidationError, convert, to_builtins

from stillfresh.feed.keys import Index, category_of
from stillfresh.feed.model import Comment, Topic
from stillfresh.freshness import is_fresh_inclusive

__all__ = [
    "DAY",
    "Fetched",
    "Row",
    "Window",
    "buckets",
    "comment_rows",
    "covered",
    "is_news",
    "is_stale",
    "listed",
    "merged",
    "window",
    "with_comment",
    "without_comment",
]

DAY: Final = 86_400
ENRICHED: Final = ("body", "tags", "verified")
"""F9: what a full topic has and an index has not."""
_TOPIC_FIELDS: Final = frozenset(Topic.__struct_fields__)
_COMMENT_FIELDS: Final = frozenset(Comment.__struct_fields__)

Row = dict[str, Any]
"""A JSON object as a row holds it."""


class Window(Struct, frozen=True):
    """From `since` up to, not including, `until`."""

    since: float
    until: float = float("inf")

    def __contains__(self, moment: float) -> bool:
        return self.since <= moment < self.until


class Fetched(Struct, frozen=True):
    """What upstream said of one key."""

    topics: tuple[Topic, ...] = ()
    comments: tuple[Comment, ...] = ()
    covers: Window | None = None
    """F9: topics of this time that are not among these are gone; None: nobody can say."""
    failed: str = ""
    """F6: why some days are missing."""
    pause: float | None = None
    """E7: how long those who failed asked to be left alone."""


def is_stale(last_fetched: float | None, fresh_for: float, now: float) -> bool:
    """F3: never fetched, too long ago, or in the future."""
    return last_fetched is None or not is_fresh_inclusive(last_fetched, fresh_for, now)


def window(days_back: int, now: float) -> Window:
    """F4: what a list holds; without a limit if it is not positive."""
    return Window(now - days_back * DAY if days_back > 0 else float("-inf"))


def buckets(days: int, now: float) -> list[date]:
    """F6: the days to look up, today first, by UTC."""
    today = datetime.fromtimestamp(now, UTC).date()
    return [today - timedelta(days=back) for back in range(days)]


def covered(days: Sequence[date]) -> Window:
    """The time that these days, all of them answered, speak for."""
    since, last = (datetime.combine(day, datetime.min.time(), UTC) for day in (days[-1], days[0]))
    return Window(since.timestamp(), last.timestamp() + DAY)


def merged(old: Row | None, topic: Topic) -> Row:
    """F9: the new row keeps fields of others, and from a full row what an index does not carry."""
    new = _object(topic)
    new["category_id"] = category_of(topic.category_id)
    before = topic_of(old)
    if topic.body is None and before is not None and before.body is not None:
        kept = _object(before)
        new |= {field: kept[field] for field in ENRICHED}
    return new | _others(old or {}, _TOPIC_FIELDS)


def topic_of(row: Row | None) -> Topic | None:
    """None as well for a row of another shape (F12)."""
    try:
        return None if row is None else convert(row, Topic, strict=False)
    except ValidationError:
        return None


def is_news(old: Row | None, new: Row) -> bool:
    """Not if a row says the same in another order, or leaves out what goes without saying."""
    before = topic_of(old)
    return before is None or (
        (before, _others(old or {}, _TOPIC_FIELDS)) != (topic_of(new), _others(new, _TOPIC_FIELDS))
    )


def comment_rows(
    old: Iterable[Row], comments: Iterable[Comment], kept: Iterable[str] = ()
) -> list[Row]:
    """The new array keeps fields of others, and comments in `kept` that upstream has not yet."""
    before = {row.get("comment_uuid"): row for row in old}
    new = {
        comment.comment_uuid: _object(comment)
        | _others(before.get(comment.comment_uuid, {}), _COMMENT_FIELDS)
        for comment in comments
    }
    local = [before[uuid] for uuid in kept if uuid in before and uuid not in new]
    return [*new.values(), *local]


def with_comment(rows: Iterable[Row], comment: Comment) -> list[Row]:
    others = [row for row in rows if row.get("comment_uuid") != comment.comment_uuid]
    return [*others, _object(comment)]


def without_comment(rows: Iterable[Row], uuid: str, before: Iterable[Row]) -> list[Row]:
    """Taken out again; an earlier version of the same comment comes back."""
    others = [row for row in rows if row.get("comment_uuid") != uuid]
    return [*others, *(row for row in before if row.get("comment_uuid") == uuid)]


def listed(fetched: Fetched, index: Index, now: float) -> list[Topic]:
    """F4, for what could not be stored: as the list would have been."""
    asked = window(index.days, now)
    topics = [
        topic
        for topic in fetched.topics
        if not topic.deleted
        and topic.created_at in asked
        and index.category in {None, category_of(topic.category_id)}
    ]
    return sorted(topics, key=lambda topic: (-topic.created_at, topic.topic_uuid))


def _object(record: Topic | Comment) -> Row:
    return {name: value for name, value in to_builtins(record).items() if value is not None}


def _others(row: Mapping[str, Any], ours: frozenset[str]) -> Row:
    return {name: value for name, value in row.items() if name not in ours}
