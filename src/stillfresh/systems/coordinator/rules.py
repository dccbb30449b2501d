"""What rows, answers and views of a coordinator mean: when a row is stale, and which view is whose.

Pure: rows, views and times in seconds in, decisions out. No clock, database or asyncio.
"""

from collections.abc import Callable, Iterable, Mapping
from math import floor
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stillfresh.errors import ConfigError, LoadFailed, shown
from stillfresh.stores.contract import Mark, Record

if TYPE_CHECKING:
    from stillfresh.systems.coordinator.config import Kind, TtlConfig

View: TypeAlias = Any
"""A whole entity as the server shows it to one viewer: what JSON can say."""

BETWEEN: Final = 0.0005
"""Seconds: half of the smallest difference between rows, since sums of floats are not exact."""
NEVER: Final = float("-inf")
SHARED: Final = "shared"
GUEST: Final = "guest"


def stale_at(record: Record, ttl: float, longest: float, now: float) -> float:
    """When a new view is wanted: at once if the row is missing, too old or from the future.

    A view exactly as old as its TTL is fresh.
    """
    copy = record.copy
    failure = record.failure
    if copy is not None and copy.mark is Mark.NONE:
        until = fresh_until(copy.fetched_at, ttl, now)
        if until > now:
            return until
    return NEVER if failure is None else cools_until(failure.retry_at, longest, now)


def fresh_until(fetched_at: float, ttl: float, now: float) -> float:
    """When a view that was requested at that time is stale; NEVER if that is in the future."""
    return fetched_at + ttl + BETWEEN if fetched_at < now + BETWEEN else NEVER


def cools_until(retry_at: float | None, longest: float, now: float) -> float:
    """When an id that failed may be tried again; NEVER if it need not wait.

    A cooldown that ends later than any cooldown can was written before the clock was set back; it
    is ignored.
    """
    if retry_at is None or not now < retry_at <= now + longest:
        return NEVER
    return retry_at


def kept_fresh(kind: "Kind", config: "TtlConfig") -> int:
    """How many ids of a kind are refreshed in one TTL, at most."""
    ticks = max(1.0, kind.ttl_ms / config.batch_interval_ms)
    return floor(kind.max_batch * config.max_batches_per_tick * ticks)


def owner_of(viewer_id: str | None, *, per_viewer: bool) -> str:
    """The owner of a kind's rows: everybody, nobody, or one viewer."""
    if not per_viewer:
        return SHARED
    return GUEST if viewer_id is None else f"viewer:{viewer_id}"


def post_id(view: View) -> str:
    """`details.author:details.id`; KeyError or TypeError if the view is broken."""
    return f"{_text(view['details']['author'])}:{_text(view['details']['id'])}"


def check_post_id(id_: str) -> None:
    """Raise ConfigError unless the id is `author:post`.

    The server would leave out any other id, and the post would count as absent.
    """
    parts = id_.split(":")
    if len(parts) != 2 or not all(parts):
        raise ConfigError(
            f"post: {shown(id_)} is not the id of a post; write 'author:post', "
            "the author's id and the post's id with one colon between them"
        )


def user_id(view: View) -> str:
    return _text(view["details"]["id"])


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"an id must be text, not {value!r}")
    return value


_PARTS: Final[Mapping[str, type]] = {"details": dict, "counts": dict, "tags": list}
PARTS: Final[Mapping[str, Mapping[str, type]]] = {
    "post": {**_PARTS, "relationships": dict, "bookmark": dict},
    "user": {**_PARTS, "relationship": dict},
}


class SentViews(list[View]):
    """As a Nexus server sent them, to be checked; anybody's own are taken as they are."""


def by_id(
    kind: str, ids: Iterable[str], entries: Iterable[View], id_of: Callable[[View], str]
) -> dict[str, Any]:
    """Each id's view. An entry with a part of the wrong type fails alone.

    An entry without a readable id may be any of those that are missing. They have failed then,
    since they cannot be called absent.
    """
    part_types = PARTS.get(kind, {}) if isinstance(entries, SentViews) else {}
    error = LoadFailed(f"{kind}: its view in the answer is broken, or it may be one that is")
    views: dict[str, Any] = {}
    missing: dict[str, Any] = {}
    for entry in entries:
        try:
            id_ = id_of(entry)
        except (KeyError, TypeError, AttributeError, IndexError):
            missing = dict.fromkeys(ids, error)
        else:
            parts = ((entry[name], type_) for name, type_ in part_types.items() if name in entry)
            is_whole = all(part is None or isinstance(part, type_) for part, type_ in parts)
            views[id_] = entry if is_whole else error
    return missing | views


def original_of(view: View) -> str | None:
    """The post that this one reposts, by its URI (`pubky://author/…/posts/id`) or its id."""
    relationships = view.get("relationships") if isinstance(view, Mapping) else None
    uri = relationships.get("reposted") if isinstance(relationships, Mapping) else None
    if not isinstance(uri, str):
        return None
    before, separator, path = uri.partition("://")
    parts = path.split("/") if separator else before.split(":")
    author = parts[0]
    post = parts[-1]
    is_post = len(parts) == 2 or "posts" in parts[1:-1]
    return f"{author}:{post}" if is_post and author and post else None
