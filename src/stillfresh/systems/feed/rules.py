"""The decisions of a feed, and its records in JSON: rows and times in, decisions out.

What is stale, which days to request, what a new row keeps of the old one (F3, F4, F6, F9); and what
may enter the file (F2, F12, F15): our fields, and unknown ones as extras. A bad record is a
ConfigError for a caller, and a failed call for a network. Pure: `now` is an argument.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, Generic, TypeVar, cast

import msgspec
from msgspec import UNSET, Raw, Struct, ValidationError, convert, defstruct, field, json
from msgspec.structs import astuple, fields, replace

from stillfresh.errors import ConfigError, shown
from stillfresh.freshness import is_fresh_inclusive
from stillfresh.systems.feed.model import EXTRA, Comment, Index, Topic, category_of, checked_uuid

R = TypeVar("R", Topic, Comment)
Row = dict[str, Any]
"""A JSON object as a row holds it."""

DEEPEST: Final = 100
"""Levels of lists and objects in a field of others; far below Python's own limit."""
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
LARGEST: Final = 2**63
"""SQLite's whole numbers are below this."""
NAMED: Final = {kind: frozenset(kind.__struct_fields__) - {"extra"} for kind in (Topic, Comment)}
"""The fields that have names here."""


def _twin(kind: type[Topic | Comment]) -> type[Struct]:
    """The named fields alone, in their order."""
    made: Any = field
    found = [
        (it.name, it.type, made(default=it.default, default_factory=it.default_factory))
        for it in fields(kind)
        if it.name in NAMED[kind]
    ]
    return defstruct(f"Named{kind.__name__}", found, frozen=True)


_TWINS: Final[dict[Any, Any]] = {kind: _twin(kind) for kind in NAMED}
_MANY: Final[dict[Any, Any]] = {kind: list[twin] for kind, twin in _TWINS.items()}  # type: ignore[valid-type]
_RAW: Final = json.Decoder(dict[str, Raw] | list[dict[str, Raw]])


class JsonRecords(Generic[R]):
    """Reads JSON as records of one kind; `strict` as `msgspec` means it, whose errors it raises."""

    def __init__(self, kind: type[R], *, strict: bool) -> None:
        name = f"Exact{kind.__name__}"
        exact: Any = defstruct(name, [], bases=(_TWINS[kind],), forbid_unknown_fields=True)
        self._kind: Any = kind
        self._strict = strict
        self._exact = json.Decoder(exact, strict=strict).decode
        self._exact_all: Any = json.Decoder(list[exact], strict=strict).decode
        self._has_others = False
        """Whether the last one had fields of others: the next one is read as if it had, too."""

    def one(self, text: bytes) -> R:
        if not self._has_others:
            try:
                return self._kind(*astuple(self._exact(text)))  # type: ignore[no-any-return]
            except ValidationError:
                pass  # a field of others, or a wrong one
        return self._noted([record_of(loaded(text), self._kind, strict=self._strict)])[0]

    def all(self, text: bytes) -> list[R]:
        """Those of an array."""
        if not self._has_others:
            try:
                return [self._kind(*astuple(found)) for found in self._exact_all(text)]
            except ValidationError:
                pass
        return self._noted(_records_of(loaded(text), self._kind, strict=self._strict))

    def _noted(self, found: list[R]) -> list[R]:
        self._has_others = any(record.extra for record in found)
        return found


def loaded(text: bytes) -> Any:  # noqa: ANN401 (whatever JSON can say)
    """Without the fields of an object that Python cannot hold: a number out of range, for one."""
    try:
        return json.decode(text)
    except (ValidationError, RecursionError):
        pass
    text.decode()  # no decoder looks at the bytes of a field that it skips
    split = _RAW.decode(text)
    return _held(split) if isinstance(split, dict) else [_held(it) for it in split]


def _held(split: dict[str, Raw]) -> Row:
    row = {}
    for name, raw in split.items():
        with suppress(ValidationError, RecursionError):
            row[name] = json.decode(raw)
    return row


def is_shallow(value: object, levels: int = DEEPEST) -> bool:
    """True if lists and objects are nested at most so many levels deep."""
    if type(value) is dict:
        return levels > 0 and all(is_shallow(item, levels - 1) for item in value.values())
    if type(value) is list:
        return levels > 0 and all(is_shallow(item, levels - 1) for item in value)
    return True


def record_of(row: object, kind: type[R], *, strict: bool = True) -> R:
    """The record of a JSON object; raises ValidationError."""
    found: R = _joined(convert(row, _TWINS[kind], strict=strict), row, kind)
    return found


def _records_of(rows: object, kind: type[R], *, strict: bool) -> list[R]:
    named: list[Struct] = convert(rows, _MANY[kind], strict=strict)
    return [_joined(it, row, kind) for it, row in zip(named, cast("Any", rows), strict=True)]


def _joined(named: Struct, row: Any, kind: Any) -> Any:  # noqa: ANN401 (R, and its object)
    names = NAMED[kind]
    extra = {name: it for name, it in row.items() if name not in names and is_shallow(it)}
    return kind(*astuple(named), extra=extra or UNSET)


def json_object(record: Topic | Comment) -> Row:
    """All fields of a record, in their order."""
    kind = Topic if isinstance(record, Topic) else Comment
    named = {name: getattr(record, name) for name in _TWINS[kind].__struct_fields__}
    return named | record.extra


def checked_topic(topic: object) -> Topic:
    """The topic with its category normalised, so that it has one name here and upstream."""
    kept = _checked(topic, Topic)
    checked_uuid(kept.topic_uuid)
    return replace(kept, category_id=category_of(kept.category_id))


def checked_topics(topics: Iterable[object]) -> list[Topic]:
    return [checked_topic(topic) for topic in each_of(topics, Topic)]


def checked_comments(uuid: str, comments: Iterable[object]) -> list[Comment]:
    """The comments, checked to be on this topic."""
    kept = [_checked(comment, Comment) for comment in each_of(comments, Comment)]
    for comment in kept:
        checked_uuid(comment.comment_uuid)
        if comment.topic_uuid != uuid:
            raise ConfigError(
                f"comment {shown(comment.comment_uuid)}: is on topic {shown(comment.topic_uuid)}, "
                f"not on {shown(uuid)}"
            )
    return kept


def each_of(records: object, kind: type[R]) -> Iterable[object]:
    if not isinstance(records, Iterable) or isinstance(records, str | bytes):
        raise ConfigError(f"expected several {kind.__name__}s, not {shown(records)}")
    return records


def _checked(record: object, kind: type[R]) -> R:
    """A record of valid types and text; a subclass's own fields become extras (F15)."""
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
    """The extra fields as JSON returns them; raises ValueError."""
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


DAY: Final = 86_400
ENRICHED: Final = ("body", "tags", "verified")
"""F9: fields that a full topic has and an index lacks."""


class Window(Struct, frozen=True):
    """From `since` up to, not including, `until`."""

    since: float
    until: float = float("inf")

    def __contains__(self, moment: float) -> bool:
        return self.since <= moment < self.until


class Fetched(Struct, frozen=True):
    """The upstream's answer for one key."""

    topics: tuple[Topic, ...] = ()
    comments: tuple[Comment, ...] = ()
    covers: Window | None = None
    """F9: other topics of this time no longer exist; None: not known."""
    failed: str = ""
    """F6: why some days are missing."""
    pause: float | None = None
    """E7: the pause that the failed days asked for."""


def is_stale(last_fetched: float | None, fresh_for: float, now: float) -> bool:
    """F3: never fetched, too long ago, or in the future."""
    return last_fetched is None or not is_fresh_inclusive(last_fetched, fresh_for, now)


def window(days_back: int, now: float) -> Window:
    """F4: the time of a list's topics; without a limit if `days_back` is not positive."""
    return Window(now - days_back * DAY if days_back > 0 else float("-inf"))


def buckets(days: int, now: float) -> list[date]:
    """F6: the days to look up, today first, by UTC."""
    today = datetime.fromtimestamp(now, UTC).date()
    return [today - timedelta(days=back) for back in range(days)]


def covered(days: Sequence[date]) -> Window:
    """The time that these days cover, if all of them were answered."""
    since, last = (datetime.combine(day, datetime.min.time(), UTC) for day in (days[-1], days[0]))
    return Window(since.timestamp(), last.timestamp() + DAY)


def merged(old: Row | None, topic: Topic, *, is_index: bool = False, is_full: bool = False) -> Row:
    """F9: the new row keeps unknown fields, and from a full row the fields that an index lacks.

    An index may carry a preview: with `is_index`, its body does not replace a full one. An unknown
    field that is null in it does not replace a value.
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
    """The topic of a row; None for a row of another shape (F12)."""
    try:
        return None if row is None else record_of(row, Topic, strict=False)
    except ValidationError:
        return None


def is_news(old: Row | None, new: Row) -> bool:
    """True if the topics differ; the order of fields and omitted defaults do not count."""
    before = topic_of(old)
    return before is None or before != topic_of(new)


def comment_rows(
    old: Iterable[Row], comments: Iterable[Comment], kept: Iterable[str] = ()
) -> list[Row]:
    """The new array keeps unknown fields, and comments in `kept` that upstream lacks."""
    before = {row.get("comment_uuid"): row for row in old}
    new = {
        comment.comment_uuid: _merged_comment(before.get(comment.comment_uuid), comment)
        for comment in comments
    }
    local = [before[uuid] for uuid in kept if uuid in before and uuid not in new]
    return [*new.values(), *local]


def with_comment(rows: Iterable[Row], comment: Comment) -> list[Row]:
    """Add the comment at the end; it replaces an earlier version."""
    before = {row.get("comment_uuid"): row for row in rows}
    old = before.pop(comment.comment_uuid, None)
    return [*before.values(), _merged_comment(old, comment)]


def _merged_comment(old: Row | None, comment: Comment) -> Row:
    return _others(old or {}, Comment) | _object(comment)


def without_comment(rows: Iterable[Row], uuid: str, before: Iterable[Row]) -> list[Row]:
    """Remove a comment; an earlier version of it is restored."""
    others = [row for row in rows if row.get("comment_uuid") != uuid]
    return [*others, *(row for row in before if row.get("comment_uuid") == uuid)]


def listed(fetched: Fetched, index: Index, now: float) -> list[Topic]:
    """F4: the list of a fetch that could not be stored."""
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
    """The record as a row: our own fields without None; unknown fields are all kept."""
    extra = record.extra
    found = json_object(record).items()
    return {name: value for name, value in found if value is not None or name in extra}


def _others(row: Row, kind: type[Topic | Comment]) -> Row:
    return {name: value for name, value in row.items() if name not in NAMED[kind]}
