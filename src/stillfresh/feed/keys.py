"""The cache keys of a feed, and the names of its categories (F5; seed 001).

Pure. A category is normalised here and nowhere else, so that `General` and ` general` are one.
"""

from dataclasses import dataclass
from typing import Final

from stillfresh.errors import ConfigError, shown

EVERYTHING: Final = "all"
"""Stands where a category would: the whole feed."""
MOST_DAYS: Final = 30


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
    """As it is stored and compared."""
    return name.strip().casefold()


def spelled(stored: bytes) -> str:
    """The category that a column names, whatever another implementation has put there."""
    return category_of(stored.decode(errors="replace"))


def named_category(name: object) -> str:
    """A category that somebody asks for: a word of their own, and not the word for everything."""
    category = category_of(_sound("category", name)) if isinstance(name, str) else ""
    if category in {"", EVERYTHING}:
        raise ConfigError(
            f"category: a name other than {EVERYTHING!r}, not {shown(name)}; "
            "the whole feed is get_all() or get_topics_all()"
        )
    return category


def index_of(key: str) -> Index | None:
    """The list that a cache key names, or None: it names something else."""
    kind, _, rest = key.partition(":")
    category, _, days = rest.rpartition(":")
    if kind != "index" or not category or not is_number(days):
        return None
    category = category_of(category)
    return Index(None if category == EVERYTHING else category, int(days))


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def canonical(key: object) -> str:
    """A cache key with its category normalised."""
    if not isinstance(key, str) or not key:
        raise ConfigError(
            f"cache_key: text such as 'index:all:7' or 'topic:<uuid>', not {shown(key)}"
        )
    index = index_of(_sound("cache_key", key))
    return key if index is None else index.key


def checked_uuid(uuid: object) -> str:
    if not isinstance(uuid, str) or not uuid:
        raise ConfigError(f"uuid: must be text that is not empty, not {shown(uuid)}")
    return _sound("uuid", uuid)


def whole_days(days_back: object) -> int:
    """0 for all there are; and no more than a float can count in seconds."""
    if not isinstance(days_back, int) or isinstance(days_back, bool):
        raise ConfigError(f"days_back: must be a whole number of days, not {shown(days_back)}")
    return max(0, min(days_back, 10**9))


def checked_days(days_back: object) -> int:
    """F4: the engine's readers get 1 to 30."""
    return min(MOST_DAYS, max(1, whole_days(days_back)))


def _sound(name: str, text: str) -> str:
    """SQLite holds UTF-8, which has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{name}: {shown(text)} is no valid text: {exc.reason}") from exc
    return text
