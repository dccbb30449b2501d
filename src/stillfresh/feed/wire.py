"""What is said to a feed's network over HTTP, and what its answers mean (F6).

Nothing here asks for anything: bytes and header texts in, records and seconds out.
"""

from collections.abc import Callable, Iterable
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec

from stillfresh.errors import ConfigError, StillfreshError, shown
from stillfresh.feed.model import Comment, Topic
from stillfresh.feed.rules import JsonRecords
from stillfresh.http.body import Unreadable

T = TypeVar("T")
R = TypeVar("R", Topic, Comment)

LONGEST: Final = 300
LAST_SECOND: Final = 2**63
"""SQLite counts in 64 bits."""

_TOPICS: Final = JsonRecords(Topic, strict=True)
_COMMENTS: Final = JsonRecords(Comment, strict=True)


class FeedHttpError(StillfreshError):
    """The network did not say what was asked of it; `status` is None where it said nothing."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class FeedRequest(msgspec.Struct, frozen=True):
    """What is asked, and how an error speaks of it; its URL holds no credentials."""

    method: str
    url: str
    expected: str
    content: bytes | None = None

    def said(self, came: str) -> str:
        return f"{self.method} {_cut(self.url)}: {_cut(came)}; expected {self.expected}"

    def failed(self, came: str, status: int | None = None) -> FeedHttpError:
        return FeedHttpError(self.said(came), status)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def index_topics(data: bytes) -> list[Topic]:
    """All of a day or none: one entry left out would look like a topic that is gone.

    An index carries no bodies: a preview or an empty one must not stand for the topic's own.
    """
    topics = _sound(_decoded(_TOPICS.all, data))
    return [
        topic if topic.body is None else msgspec.structs.replace(topic, body=None)
        for topic in topics
    ]


def topic_of(data: bytes) -> Topic:
    return _sound([_decoded(_TOPICS.one, data)])[0]


def comments_of(data: bytes) -> list[Comment]:
    return _sound(_decoded(_COMMENTS.all, data))


def _decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    try:
        return decode(data)
    except (ValueError, RecursionError) as exc:
        text = shown(data[:100].decode(errors="replace"))
        raise Unreadable(f"{text} ({exc})" if data else "nothing") from exc


def _sound(records: list[R]) -> list[R]:
    """What the types cannot say: a name that is not empty, a time that fits."""
    for place, record in enumerate(records):
        if not all(_names(record)):
            raise Unreadable(f"an empty uuid - at `$[{place}]`")
        if not -LAST_SECOND <= record.created_at < LAST_SECOND:
            raise Unreadable(f"a time beyond 64 bits - at `$[{place}].created_at`")
    return records


def _names(record: Topic | Comment) -> Iterable[str]:
    yield record.topic_uuid
    if isinstance(record, Comment):
        yield record.comment_uuid


def encoded(name: str, text: object) -> str:
    """One segment of a path or one value of a query, whatever characters it has."""
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{name}: must be text that is not empty, not {shown(text)}")
    try:
        segment = quote(text, safe="")
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{name}: {shown(text)} is no valid text: {exc.reason}") from exc
    return segment.replace(".", "%2E") if segment in {".", ".."} else segment
