"""What a feed decides: what is stale, which days to ask for, what a new row keeps of the old one.

Pure (F3, F4, F6, F8, F9; seed 001): rows and times in, decisions out; `now` is an argument.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Final

from msgspec import Struct, ValidationError

from stillfresh.feed.model import Comment, Index, Topic, category_of
from stillfresh.feed.records import NAMED, Row, json_object, record_of
from stillfresh.freshness import is_fresh_inclusive

DAY: Final = 86_400
ENRICHED: Final = ("body", "tags", "verified")
"""F9: what a full topic has and an index has not."""


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
    """E7: how long the days that failed asked to be left alone."""


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


def merged(old: Row | None, topic: Topic, *, is_index: bool = False, is_full: bool = False) -> Row:
    """F9: the new row keeps fields of others, and from a full row what an index does not carry.

    An index may carry a preview: `is_index` says that its body, too, is none. Nor does a field of
    others that is null in it replace one that is not.
    """
    new, before = _object(topic), topic_of(old)
    others = _others(old or {}, Topic)
    new["category_id"] = category_of(topic.category_id)
    if (
        before is not None
        and (is_index or topic.body is None)
        and (is_full or before.body is not None)
    ):
        kept = _object(before)
        new = {
            name: value
            for name, value in new.items()
            if name not in ENRICHED and (value is not None or name not in others)
        }
        new |= {name: kept[name] for name in ENRICHED if name in kept}
    return others | new


def topic_of(row: Row | None) -> Topic | None:
    """None as well for a row of another shape (F12)."""
    try:
        return None if row is None else record_of(row, Topic, strict=False)
    except ValidationError:
        return None


def is_news(old: Row | None, new: Row) -> bool:
    """Not if a row says the same in another order, or leaves out what goes without saying."""
    before = topic_of(old)
    return before is None or before != topic_of(new)


def comment_rows(
    old: Iterable[Row], comments: Iterable[Comment], kept: Iterable[str] = ()
) -> list[Row]:
    """The new array keeps fields of others, and comments in `kept` that upstream has not yet."""
    before = {row.get("comment_uuid"): row for row in old}
    new = {
        comment.comment_uuid: _merged_comment(before.get(comment.comment_uuid), comment)
        for comment in comments
    }
    local = [before[uuid] for uuid in kept if uuid in before and uuid not in new]
    return [*new.values(), *local]


def with_comment(rows: Iterable[Row], comment: Comment) -> list[Row]:
    """Behind the others; an earlier version of it is replaced."""
    before = {row.get("comment_uuid"): row for row in rows}
    old = before.pop(comment.comment_uuid, None)
    return [*before.values(), _merged_comment(old, comment)]


def _merged_comment(old: Row | None, comment: Comment) -> Row:
    return _others(old or {}, Comment) | _object(comment)


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
    """As a row holds it: a named field of None is left out, one of others is kept."""
    extra = record.extra
    found = json_object(record).items()
    return {name: value for name, value in found if value is not None or name in extra}


def _others(row: Row, kind: type[Topic | Comment]) -> Row:
    return {name: value for name, value in row.items() if name not in NAMED[kind]}
