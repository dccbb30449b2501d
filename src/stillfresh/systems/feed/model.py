"""The data of a feed: its topics and comments, its cache keys and its answers.

Pure data; only an answer's `age` reads a clock. Categories are normalised here and nowhere else, so
that `General` and ` general` are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from msgspec import UNSET, Struct, field

from stillfresh.checks import checked_unicode, is_whole
from stillfresh.errors import ConfigError, LoadFailed, shown
from stillfresh.freshness import Verdict, age_of

EXTRA: Final = "stillfresh:extra"
"""Where `msgspec` puts `extra` if it encodes a record. In a feed's JSON the fields stand alone."""

EVERYTHING: Final = "all"
"""Stands where a category would: the whole feed."""
MOST_DAYS: Final = 30
FEED_CACHE_TTL_SECONDS: Final = 300
"""How long a list is fresh."""
FEED_CACHE_EVICT_SECONDS: Final = 2_592_000
"""How long a row is kept."""


class _Extra(Struct, frozen=True, kw_only=True):
    """UNSET, not empty, so that a record without extras is encoded as its named fields."""

    extra: dict[str, Any] = field(default=cast("Any", UNSET), name=EXTRA)


_SLOT: Final[Any] = _Extra.__dict__["extra"]


class Extensible(_Extra, frozen=True):
    """A record that carries fields which stillfresh does not name."""

    @property  # type: ignore[misc]  # for readers it is never UNSET
    def extra(self) -> dict[str, Any]:
        """Fields that others added, by their names in JSON, such as a signature."""
        extra = _SLOT.__get__(self)
        return {} if extra is UNSET else extra

    def __eq__(self, other: object) -> bool:
        """No extra fields, given or not, are the same."""
        if type(self) is not type(other):
            return NotImplemented
        names = self.__struct_fields__
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # its lists cannot be hashed


class Topic(Extensible, frozen=True):
    """A topic. In a list, `body` is None. Callers share it: do not change it."""

    topic_uuid: str
    author: str
    title: str
    created_at: int
    body: str | None = None
    category_id: str = ""
    tags: list[str] = field(default_factory=list)
    deleted: bool = False
    deleted_at: int | None = None
    verified: bool = False


class Comment(Extensible, frozen=True):
    """A comment on a topic, or (with `parent_comment_uuid`) on another comment."""

    comment_uuid: str
    topic_uuid: str
    author: str
    created_at: int
    body: str = ""
    parent_comment_uuid: str | None = None
    mentions: list[str] = field(default_factory=list)
    verified: bool = False


@dataclass(frozen=True, slots=True)
class FeedCacheUpdated:
    """Sent to listeners: a refresh has stored what it fetched under this key."""

    cache_key: str
    changed: bool
    """False: the upstream sent the same as before."""


@dataclass(frozen=True, slots=True)
class FeedStats:
    """The contents of the file."""

    topics: int
    comments: int
    expired: int
    """Rows that eviction would drop now."""
    bytes: int
    """Bytes of the database, without its log."""
    skipped: int
    """How often an unreadable row was found since opening."""


class Freshness(Struct, frozen=True):
    """How fresh an answer is; shared by all kinds of answers."""

    verdict: Verdict
    fetched_at: float
    clock: Callable[[], float]
    error: LoadFailed | None = None


class Dated:
    """The freshness of an answer, besides its data."""

    freshness: Freshness

    @property
    def verdict(self) -> Verdict:
        """How fresh it was when it was served: FRESH or STALE."""
        return self.freshness.verdict

    @property
    def fetched_at(self) -> float:
        """When the upstream was asked, in seconds since 1970."""
        return self.freshness.fetched_at

    @property
    def error(self) -> LoadFailed | None:
        """The last refresh failed, and this is its error; None if it did not."""
        return self.freshness.error

    @property
    def age(self) -> float:
        """Seconds since `fetched_at`, at the moment you ask."""
        return age_of(self.freshness.fetched_at, self.freshness.clock())


class _FeedAnswer(Dated, Struct, frozen=True, eq=False):
    def __repr__(self) -> str:
        value = getattr(self, self.__struct_fields__[0])
        return f"<{type(self).__name__} {shown(value)} {self.verdict} age={self.age:.3g}s>"


class Feed(_FeedAnswer, frozen=True, eq=False):
    """The topics of a list, the newest first, and how fresh they are."""

    topics: list[Topic]
    freshness: Freshness


class TopicAnswer(_FeedAnswer, frozen=True, eq=False):
    """One topic, or None if the upstream has none; and how fresh it is."""

    topic: Topic | None
    freshness: Freshness


class CommentsAnswer(_FeedAnswer, frozen=True, eq=False):
    """All comments of a topic, in the upstream's order, and how fresh they are."""

    comments: list[Comment]
    freshness: Freshness


class FeedJson(Dated, bytes):
    """A list as one JSON array in bytes, for an HTTP response, and how fresh it is."""

    def __new__(cls, data: bytes, freshness: Freshness) -> "FeedJson":
        array = super().__new__(cls, data)
        array.freshness = freshness
        return array


@dataclass(frozen=True, slots=True)
class Index:
    """One list: a category (None: the whole feed) over so many days."""

    category: str | None
    days: int

    @property
    def key(self) -> str:
        return f"index:{EVERYTHING if self.category is None else self.category}:{self.days}"


def topic_key(uuid: str) -> str:
    return f"topic:{uuid}"


def comments_key(uuid: str) -> str:
    return f"comments:{uuid}"


def subject(key: str) -> str:
    """The uuid that a topic's or a comments' key names."""
    return key.partition(":")[2]


def category_of(name: str) -> str:
    """The category as it is stored and compared."""
    return name.strip().casefold()


def spelled(stored: bytes) -> str:
    """The category in a column that another implementation may have written."""
    return category_of(stored.decode(errors="replace"))


def named_category(name: object) -> str:
    """Check a category of a caller: not empty, and not the word for all categories."""
    category = category_of(name) if isinstance(name, str) else ""
    checked_unicode("category", category)
    if category in {"", EVERYTHING}:
        raise ConfigError(
            f"category: a name other than {EVERYTHING!r}, not {shown(name)}; "
            "the whole feed is get_all() or get_topics_all()"
        )
    return category


def index_of(key: str) -> Index | None:
    """The list that a cache key names, or None: it names something else."""
    kind, _, name = key.partition(":")
    category, _, days = name.rpartition(":")
    if kind != "index" or not category:
        return None
    if not (days.isascii() and days.isdigit() and len(days) < 10):
        return None
    category = category_of(category)
    return Index(None if category == EVERYTHING else category, int(days))


def canonical(key: object) -> str:
    """A cache key with its category normalised."""
    if not isinstance(key, str) or not key:
        raise ConfigError(
            f"cache_key: text such as 'index:all:7' or 'topic:<uuid>', not {shown(key)}"
        )
    checked_unicode("cache_key", key)
    index = index_of(key)
    return key if index is None else index.key


def checked_uuid(uuid: object, name: str = "uuid") -> str:
    if not isinstance(uuid, str) or not uuid:
        raise ConfigError(f"{name}: must be text that is not empty, not {shown(uuid)}")
    checked_unicode(name, uuid)
    return uuid


def whole_days(days_back: object) -> int:
    """0 for all there are; and no more than a float can count in seconds."""
    if not is_whole(days_back):
        raise ConfigError(f"days_back: must be a whole number of days, not {shown(days_back)}")
    return max(0, min(days_back, 10**9 - 1))


def checked_days(days_back: object) -> int:
    """The engine's readers get 1 to 30 days."""
    return min(MOST_DAYS, max(1, whole_days(days_back)))
