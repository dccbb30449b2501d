"""What is said to a feed's network over HTTP, and what its answers mean (F6).

Nothing here asks for anything: bytes and header texts in, records and seconds out.
"""

import re
import zlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec

from stillfresh.errors import ConfigError, StillfreshError, shown
from stillfresh.feed.model import Comment, Topic

__all__ = [
    "Body",
    "FeedHttpError",
    "Request",
    "Unreadable",
    "checked_headers",
    "comments_of",
    "encoded",
    "index_topics",
    "pause_of",
    "topic_of",
]

T = TypeVar("T")
R = TypeVar("R", Topic, Comment)

LONGEST: Final = 300
GZIP_WINDOW: Final = 31
LAST_SECOND: Final = 2**63
"""SQLite counts in 64 bits."""
LONGEST_PAUSE: Final = 86_400.0
"""An upstream that asks for more is asked again after a day: nobody meant for ever."""

_TOPIC: Final = msgspec.json.Decoder(Topic)
_TOPICS: Final = msgspec.json.Decoder(list[Topic])
_COMMENTS: Final = msgspec.json.Decoder(list[Comment])
_SECONDS: Final = re.compile(r"[0-9]+")
_HEADER_NAME: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e]*")


class FeedHttpError(StillfreshError):
    """The network did not say what was asked of it; `status` is None where it said nothing."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Request(msgspec.Struct, frozen=True):
    """What is asked, and how an error speaks of it; its URL holds no credentials."""

    method: str
    url: str
    expected: str
    content: bytes | None = None

    def said(self, came: str) -> str:
        return f"{self.method} {_cut(self.url)}: {_cut(came)}; expected {self.expected}"

    def failed(self, came: str, status: int | None = None) -> FeedHttpError:
        return FeedHttpError(self.said(came), status)


class Unreadable(ValueError):
    """What came is not what was asked for; the sentence says why."""


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


class Body:
    """The bytes of an answer, without their compression, and never more than `most` of them."""

    def __init__(self, encoding: str, most: int) -> None:
        name = encoding.strip().lower()
        if name not in {"", "identity", "gzip", "x-gzip"}:
            raise Unreadable(f"a body encoded as {shown(encoding)}, not as gzip or not at all")
        self.data = bytearray()
        self._most = most
        self._gzip = zlib.decompressobj(GZIP_WINDOW) if name.endswith("gzip") else None

    def add(self, chunk: bytes) -> None:
        """Inflates no more than fits: a small answer can stand for gigabytes."""
        room = self._most + 1 - len(self.data)
        self.data += chunk[:room] if self._gzip is None else self._inflated(self._gzip, chunk, room)
        if len(self.data) > self._most:
            raise Unreadable(f"more than {self._most:,} bytes (max_bytes)")

    def _inflated(self, gzip: "zlib._Decompress", chunk: bytes, room: int) -> bytes:
        try:
            data = gzip.decompress(chunk, room)
        except zlib.error as exc:
            raise Unreadable(f"a broken gzip stream ({exc})") from exc
        if gzip.unused_data:
            raise Unreadable("data after the end of its gzip stream")
        return data

    def end(self) -> bytes:
        """All of it has come; or has it?"""
        if self._gzip is not None and not self._gzip.eof:
            raise Unreadable("a gzip stream that was cut short")
        return bytes(self.data)


def index_topics(data: bytes) -> list[Topic]:
    """All of a day or none: one entry left out would look like a topic that is gone.

    An index carries no bodies: a preview or an empty one must not stand for the topic's own.
    """
    topics = _sound(_decoded(_TOPICS, data))
    return [
        topic if topic.body is None else msgspec.structs.replace(topic, body=None)
        for topic in topics
    ]


def topic_of(data: bytes) -> Topic:
    return _sound([_decoded(_TOPIC, data)])[0]


def comments_of(data: bytes) -> list[Comment]:
    return _sound(_decoded(_COMMENTS, data))


def _decoded(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
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


def checked_headers(headers: object) -> dict[str, str]:
    """Names only in the error: values are often secrets."""
    if not isinstance(headers, Mapping):
        raise ConfigError(f"headers: must map names to texts, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ConfigError(f"headers: {shown(name)} is no name of a header")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(f"headers: the value of {name!r} must be printable ASCII text")
    return dict(headers)


def encoded(name: str, text: object) -> str:
    """One segment of a path or one value of a query, whatever characters it has."""
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{name}: must be text that is not empty, not {shown(text)}")
    try:
        segment = quote(text, safe="")
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{name}: {shown(text)} is no valid text: {exc.reason}") from exc
    return segment.replace(".", "%2E") if segment in {".", ".."} else segment


def pause_of(retry_after: str, date: str, now: float) -> float | None:
    """Seconds to wait; None if it does not say, or says no time at all.

    A date is compared with the server's own (`now` where it tells none): clocks differ.
    """
    text = retry_after.strip()
    if _SECONDS.fullmatch(text):
        pause = float(text)
    elif (until := _moment(text)) is not None:
        told = _moment(date)
        pause = until - (now if told is None else told)
    else:
        return None
    return min(pause, LONGEST_PAUSE) if pause > 0 else None


def _moment(text: str) -> float | None:
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return _utc(moment).timestamp()


def _utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
