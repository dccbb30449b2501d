"""The decisions of a feed, and its records in JSON: rows and times in, decisions out.

They decide what is stale, which days to request, and what a new row keeps of the old one. They also
decide what may enter the file: our fields, and unknown fields as extras. A bad record raises
ConfigError for a caller, and makes a network's call fail. Pure: `now` is an argument.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, Generic, TypeVar, cast

import msgspec
from msgspec import UNSET, Raw, Struct, ValidationError, convert, defstruct, field, json, msgpack
from msgspec.structs import astuple, fields, replace

from stillfresh.errors import ConfigError, shown
from stillfresh.freshness import Policy, Verdict, is_fresh_inclusive, last_end
from stillfresh.stores.contract import Copy, Failure, Mark, Record
from stillfresh.systems.feed.model import EXTRA, Comment, Index, Topic, category_of, checked_uuid

R = TypeVar("R", Topic, Comment)
JsonObject = dict[str, Any]
"""A JSON object as a row holds it."""

DEEPEST: Final = 100
"""Levels of lists and objects in a field of others; far below Python's own limit."""
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
LARGEST: Final = 2**63
"""SQLite's whole numbers are below this."""
NAMED: Final = {kind: frozenset(kind.__struct_fields__) - {"extra"} for kind in (Topic, Comment)}
"""The fields that have names here."""


def _twin(kind: type[Topic | Comment]) -> type[Struct]:
    """A struct of the named fields alone, in their order."""
    make_field: Any = field
    named = [
        (
            info.name,
            info.type,
            make_field(default=info.default, default_factory=info.default_factory),
        )
        for info in fields(kind)
        if info.name in NAMED[kind]
    ]
    return defstruct(f"Named{kind.__name__}", named, frozen=True)


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
        """True if the last record had fields of others: the next one is read as if it had, too."""

    def one(self, text: bytes) -> R:
        if not self._has_others:
            try:
                return self._kind(*astuple(self._exact(text)))  # type: ignore[no-any-return]
            except ValidationError:
                pass  # a field of others, or a wrong one
        record: R = record_of(decoded_json(text), self._kind, strict=self._strict)
        self._note_others([record])
        return record

    def all(self, text: bytes) -> list[R]:
        """The records of an array."""
        if not self._has_others:
            try:
                return [self._kind(*astuple(named)) for named in self._exact_all(text)]
            except ValidationError:
                pass
        records = _records_of(decoded_json(text), self._kind, strict=self._strict)
        self._note_others(records)
        return records

    def _note_others(self, records: list[R]) -> None:
        self._has_others = any(record.extra for record in records)


def decoded_json(text: bytes) -> Any:  # noqa: ANN401 (whatever JSON can say)
    """Decode JSON, without the fields of an object that Python cannot hold.

    Such a field is a number out of range, for example.
    """
    try:
        return json.decode(text)
    except (ValidationError, RecursionError):
        pass
    text.decode()  # no decoder looks at the bytes of a field that it skips
    split = _RAW.decode(text)
    if isinstance(split, dict):
        return _decode_fields(split)
    return [_decode_fields(item) for item in split]


def _decode_fields(split: dict[str, Raw]) -> JsonObject:
    """Decode each field on its own, and leave out those that cannot be decoded."""
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
    record: R = _with_extra(convert(row, _TWINS[kind], strict=strict), row, kind)
    return record


def _records_of(rows: object, kind: type[R], *, strict: bool) -> list[R]:
    structs: list[Struct] = convert(rows, _MANY[kind], strict=strict)
    return [
        _with_extra(named, row, kind) for named, row in zip(structs, cast("Any", rows), strict=True)
    ]


def _with_extra(named: Struct, row: Any, kind: Any) -> Any:  # noqa: ANN401 (R, and its object)
    """The record: its named fields, and the other fields of its row as extras."""
    names = NAMED[kind]
    extra = {name: value for name, value in row.items() if name not in names and is_shallow(value)}
    return kind(*astuple(named), extra=extra or UNSET)


def json_object(record: Topic | Comment) -> JsonObject:
    """All fields of a record, in their order."""
    kind = Topic if isinstance(record, Topic) else Comment
    named = {name: getattr(record, name) for name in _TWINS[kind].__struct_fields__}
    return named | record.extra


def checked_topic(topic: object) -> Topic:
    """The topic with its category normalised, so that it has one name here and upstream."""
    checked = _checked(topic, Topic)
    checked_uuid(checked.topic_uuid)
    return replace(checked, category_id=category_of(checked.category_id))


def checked_topics(topics: Iterable[object]) -> list[Topic]:
    return [checked_topic(topic) for topic in each_of(topics, Topic)]


def checked_comments(uuid: str, comments: Iterable[object]) -> list[Comment]:
    """The comments, checked to be on this topic."""
    checked = [_checked(comment, Comment) for comment in each_of(comments, Comment)]
    for comment in checked:
        checked_uuid(comment.comment_uuid)
        if comment.topic_uuid != uuid:
            raise ConfigError(
                f"comment {shown(comment.comment_uuid)}: is on topic {shown(comment.topic_uuid)}, "
                f"not on {shown(uuid)}"
            )
    return checked


def each_of(records: object, kind: type[R]) -> Iterable[object]:
    """The records, if they are several: an iterable that is not a text."""
    if not isinstance(records, Iterable) or isinstance(records, str | bytes):
        raise ConfigError(f"expected several {kind.__name__}s, not {shown(records)}")
    return records


def _checked(record: object, kind: type[R]) -> R:
    """A record of valid types and text; a subclass's own fields become extras."""
    if not isinstance(record, kind):
        raise ConfigError(f"expected a {kind.__name__}, not {shown(record)}")
    try:
        plain = msgspec.to_builtins(record, builtin_types=(bytes, bytearray, memoryview))
        checked = msgspec.convert(plain, kind)
        msgspec.json.encode(checked)  # raises for text that is not valid Unicode
        extra = _extra_of(plain, kind)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as exc:
        name = record.topic_uuid if isinstance(record, Topic) else record.comment_uuid
        raise ConfigError(f"{kind.__name__} with the uuid {shown(name)}: {exc}") from exc
    if not -LARGEST <= checked.created_at < LARGEST:
        raise ConfigError(f"{kind.__name__}: created_at is too large a number")
    return replace(checked, extra=extra) if extra else checked


def _extra_of(plain: JsonObject, kind: type[Topic | Comment]) -> JsonObject:
    """The extra fields as JSON returns them; raises ValueError."""
    own = {name: value for name, value in plain.items() if name not in NAMED[kind]}
    if not own:
        return {}
    given = own.pop(EXTRA, {})
    if taken := sorted(given.keys() & (NAMED[kind] | own.keys())):
        raise ValueError(f"extra: {', '.join(taken)} is a field of its own; set that one instead")
    extra: JsonObject = msgspec.json.decode(msgspec.json.encode(own | given))
    if not all(map(is_shallow, extra.values())):
        raise ValueError(f"extra: lists and objects may be {DEEPEST} levels deep at most")
    return extra


DAY: Final = 86_400
ENRICHED: Final = ("body", "tags", "verified")
"""Fields that a full topic has and an index lacks."""


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
    """Other topics of this time no longer exist; None: not known."""
    failed: str = ""
    """Why some days are missing."""
    pause: float | None = None
    """Seconds: the pause that the failed days asked for."""


def value_of(fetched_at: float) -> bytes:
    """The value of a key, as the engine stores it: the time in its meta row. The rows are apart."""
    return msgpack.encode(int(fetched_at))


def is_stale(last_fetched: float | None, fresh_for: float, now: float) -> bool:
    """True if it was never fetched, too long ago, or in the future."""
    return last_fetched is None or not is_fresh_inclusive(last_fetched, fresh_for, now)


class KeyState(Struct, frozen=True, gc=False):
    """What the file says of one key besides its rows: its meta row, its lease, its last failure.

    Here it is decided whether a key is stale, and nowhere else: `record` tells the engine the
    result. Other programs may write anything into any column, so nothing here is taken on trust.
    """

    last_fetched: int | None = None
    """The time in the meta row; None if there is none."""
    failures: Any = None
    """How many loads in a row have failed."""
    retry_at: Any = None
    """In milliseconds, as all times of loads."""
    error: Any = None
    lease_end: Any = None
    """When the last lease ends, or would have ended."""
    is_leased: int | None = None
    """True if a load has the lease, and no other program has written the meta row since."""
    token: Any = None
    """The token of the lease under which the last copy was stored."""

    def is_stale(self, fresh_for: float, now: float) -> bool:
        return is_stale(self.last_fetched, fresh_for, now)

    def failure(self, now: float) -> Failure | None:
        """The last failure. One from before a clock was set back does not count."""
        if not isinstance(self.failures, int | float) or not isinstance(self.retry_at, int | float):
            return None
        if isinstance(self.lease_end, int | float) and self.lease_end / 1000 > last_end(now, 0.0):
            return None  # the failed load's lease ends later than any lease can
        return Failure(int(self.failures), self.retry_at / 1000, str(self.error))

    @property
    def generation(self) -> str:
        """Names the copy; another one if the meta row was written by another program."""
        return f"{self.last_fetched}:{self.token if isinstance(self.token, str) else ''}"

    def record(self, policy: Policy, now: float) -> Record:
        """The key as the engine sees it.

        A copy from the future is stale here, and its times would let it pass: it has a mark.
        """
        copy = None
        if self.last_fetched is not None:
            fetched_at = float(self.last_fetched)
            looks_fresh = policy.verdict(fetched_at, now) is Verdict.FRESH
            is_marked = looks_fresh and self.is_stale(policy.fresh_for, now)
            mark = Mark.SOFT if is_marked else Mark.NONE
            copy = Copy(self.generation, fetched_at, policy, value_of(fetched_at), mark)
        is_held = self.is_leased and isinstance(self.lease_end, int | float)
        held_until = self.lease_end / 1000 if is_held else None
        return Record(copy, held_until, self.failure(now))


def window(days_back: int, now: float) -> Window:
    """The time of a list's topics; without a limit if `days_back` is not positive."""
    return Window(now - days_back * DAY if days_back > 0 else float("-inf"))


def buckets(days: int, now: float) -> list[date]:
    """The days to look up, today first, by UTC."""
    today = datetime.fromtimestamp(now, UTC).date()
    return [today - timedelta(days=back) for back in range(days)]


def covered(days: Sequence[date]) -> Window:
    """The time that these days cover, if all of them were answered."""
    midnight = datetime.min.time()
    first = datetime.combine(days[-1], midnight, UTC)  # the days begin with today
    last = datetime.combine(days[0], midnight, UTC)
    return Window(first.timestamp(), last.timestamp() + DAY)


def merged(
    old: JsonObject | None, topic: Topic, *, is_index: bool = False, is_full: bool = False
) -> JsonObject:
    """The new row keeps unknown fields, and from a full row the fields that an index lacks.

    An index may carry a preview: with `is_index`, its body does not replace a full one. An unknown
    field that is null in it does not replace a value.
    """
    new = _object(topic)
    new["category_id"] = category_of(topic.category_id)
    before = topic_of(old)
    others = _others(old or {}, Topic)
    may_lack_fields = is_index or topic.body is None
    if before is not None and may_lack_fields and (is_full or before.body is not None):
        full = _object(before)
        new = {
            name: value
            for name, value in new.items()
            if name not in ENRICHED and (value is not None or name not in others)
        }
        new |= {name: full[name] for name in ENRICHED if name in full}
    return others | new


def topic_of(row: JsonObject | None) -> Topic | None:
    """The topic of a row; None for a row of another shape."""
    try:
        if row is None:
            return None
        return record_of(row, Topic, strict=False)
    except ValidationError:
        return None


def is_news(old: JsonObject | None, new: JsonObject) -> bool:
    """True if the topics differ; the order of fields and omitted defaults do not count."""
    before = topic_of(old)
    return before is None or before != topic_of(new)


def comment_rows(
    old: Iterable[JsonObject], comments: Iterable[Comment], local: Iterable[str] = ()
) -> list[JsonObject]:
    """The new array keeps unknown fields, and `local` comments that upstream lacks."""
    before = {row.get("comment_uuid"): row for row in old}
    new = {
        comment.comment_uuid: _merged_comment(before.get(comment.comment_uuid), comment)
        for comment in comments
    }
    local_rows = [before[uuid] for uuid in local if uuid in before and uuid not in new]
    return [*new.values(), *local_rows]


def with_comment(rows: Iterable[JsonObject], comment: Comment) -> list[JsonObject]:
    """Add the comment at the end; it replaces an earlier version."""
    before = {row.get("comment_uuid"): row for row in rows}
    old = before.pop(comment.comment_uuid, None)
    return [*before.values(), _merged_comment(old, comment)]


def _merged_comment(old: JsonObject | None, comment: Comment) -> JsonObject:
    return _others(old or {}, Comment) | _object(comment)


def without_comment(
    rows: Iterable[JsonObject], uuid: str, before: Iterable[JsonObject]
) -> list[JsonObject]:
    """Remove a comment; an earlier version of it is restored."""
    others = [row for row in rows if row.get("comment_uuid") != uuid]
    return [*others, *(row for row in before if row.get("comment_uuid") == uuid)]


def listed(fetched: Fetched, index: Index, now: float) -> list[Topic]:
    """The list of a fetch that could not be stored."""
    wanted = window(index.days, now)
    topics = [
        topic
        for topic in fetched.topics
        if not topic.deleted
        and topic.created_at in wanted
        and index.category in {None, category_of(topic.category_id)}
    ]
    return sorted(topics, key=lambda topic: (-topic.created_at, topic.topic_uuid))


def _object(record: Topic | Comment) -> JsonObject:
    """The record as a row: our own fields without None; unknown fields are all kept."""
    extra = record.extra
    return {
        name: value
        for name, value in json_object(record).items()
        if value is not None or name in extra
    }


def _others(row: JsonObject, kind: type[Topic | Comment]) -> JsonObject:
    return {name: value for name, value in row.items() if name not in NAMED[kind]}
