"""What may enter the file: topics and comments as they will come back from it (F2, F12).

For those who call, a ConfigError; for what a network answers, that call's failure. Pure.
"""

from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from stillfresh.errors import ConfigError, shown
from stillfresh.feed.keys import category_of, checked_uuid
from stillfresh.feed.model import EXTRA, Comment, Topic
from stillfresh.feed.records import DEEPEST, NAMED, Row, is_shallow

R = TypeVar("R", Topic, Comment)

LARGEST: Final = 2**63
"""SQLite's whole numbers are below this."""


def checked_topic(topic: object) -> Topic:
    """With its category normalised, so that here and upstream it has one name."""
    kept = _checked(topic, Topic)
    checked_uuid(kept.topic_uuid)
    return replace(kept, category_id=category_of(kept.category_id))


def checked_topics(topics: Iterable[object]) -> list[Topic]:
    return [checked_topic(topic) for topic in _each(topics, Topic)]


def checked_comments(uuid: str, comments: Iterable[object]) -> list[Comment]:
    """All of them on this topic."""
    kept = [_checked(comment, Comment) for comment in _each(comments, Comment)]
    for comment in kept:
        checked_uuid(comment.comment_uuid)
        if comment.topic_uuid != uuid:
            raise ConfigError(
                f"comment {shown(comment.comment_uuid)}: is on topic {shown(comment.topic_uuid)}, "
                f"not on {shown(uuid)}"
            )
    return kept


def _each(records: object, kind: type[R]) -> Iterable[object]:
    if not isinstance(records, Iterable) or isinstance(records, str | bytes):
        raise ConfigError(f"expected several {kind.__name__}s, not {shown(records)}")
    return records


def _checked(record: object, kind: type[R]) -> R:
    """Of the right types, and text that UTF-8 can say; a subclass's own fields are extras (F15)."""
    if not isinstance(record, kind):
        raise ConfigError(f"expected a {kind.__name__}, not {shown(record)}")
    try:
        plain = msgspec.to_builtins(record, builtin_types=(bytes, bytearray, memoryview))
        kept = msgspec.convert(plain, kind)
        msgspec.json.encode(kept)
        extra = _extra_of(plain, kind)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as exc:
        name = record.topic_uuid if isinstance(record, Topic) else record.comment_uuid
        raise ConfigError(f"{kind.__name__} with the uuid {shown(name)}: {exc}") from exc
    if not -LARGEST <= kept.created_at < LARGEST:
        raise ConfigError(f"{kind.__name__}: created_at is too large a number")
    return replace(kept, extra=extra) if extra else kept


def _extra_of(plain: Row, kind: type[Topic | Comment]) -> Row:
    """As they will come back from JSON; raises ValueError."""
    own = {name: value for name, value in plain.items() if name not in NAMED[kind]}
    if not own:
        return {}
    given = own.pop(EXTRA, {})
    if taken := sorted(given.keys() & (NAMED[kind] | own.keys())):
        raise ValueError(f"extra: {', '.join(taken)} is a field of its own; set that one instead")
    extra: Row = msgspec.json.decode(msgspec.json.encode(own | given))
    if not all(map(is_shallow, extra.values())):
        raise ValueError(f"extra: lists and objects may be {DEEPEST} levels deep at most")
    return extra
