"""What people name pages by: a path, a whole URL, a tag of their own (I11, I21).

Pure.
"""

from collections.abc import Iterable
from typing import Final

from stillfresh.errors import ConfigError, shown
from stillfresh.isr.rules_keys import canonical_url, plain_path

MOST_PATH: Final = 65_536
"""Bytes; a longer path is a mistake."""


def checked_path(path: str) -> str:
    """A path, or a URL, as a page's key."""
    is_key = isinstance(path, str) and path.lower().startswith(("/", "http://", "https://"))
    if not is_key or any(ord(character) < 0x20 for character in path):
        raise ConfigError(f"path: begins with / (or is a whole URL), which {shown(path)} does not")
    if len(path.encode("utf-8", "surrogatepass")) > MOST_PATH:
        raise ConfigError(f"path: of at most {MOST_PATH:,} bytes, unlike {shown(path)}")
    return path


def reached(key: str) -> tuple[str, list[str]]:
    """I21: the tag of every variant of the page, and the ids that it may itself be kept under.

    Others write no tags: their pages are reached by the id alone.
    """
    is_path = checked_path(key).startswith("/")
    which, name = ("path", plain_path(key)) if is_path else ("key", canonical_url(key))
    return f"{which}:{name}", list(dict.fromkeys([key, name]))


def own_tag(tag: str) -> str:
    """A tag that the user gave, apart from ours: `path:…` and `key:…`."""
    if not isinstance(tag, str) or not tag:
        raise ConfigError(f"tag: a word such as 'blog', not {shown(tag)}")
    return f"tag:{tag}"


def own_tags(tags: Iterable[str]) -> list[str]:
    return [own_tag(tag) for tag in ([tags] if isinstance(tags, str) else tags)]
