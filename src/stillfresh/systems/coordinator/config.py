"""A coordinator's settings, kinds and snapshots.

Frozen data, checked when it is made. Posts and users are two kinds, declared by the functions that
fetch them. Their views differ by viewer: a post's bookmark, a user's relationship.
"""

import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Final, Protocol, Self, TypeAlias

from stillfresh.checks import checked_flag, checked_function, checked_whole
from stillfresh.durations import Duration, seconds
from stillfresh.engine import CALLS, Codec, Objectives, check_declared
from stillfresh.engine.keys import checked_kind
from stillfresh.errors import ConfigError, shown
from stillfresh.systems.coordinator.rules import View, by_id, post_id, user_id

POST: Final = "post"
USER: Final = "user"
MOST: Final = 315_360_000_000
"""Ten years in milliseconds; a longer time is refused as a mistake."""
WHOLE: Final = re.compile(r"\s*[+-]?[0-9]{1,18}\s*", re.ASCII)
FLAGS: Final = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(
    ("false", "0", "no", "off"), False
)

Fetch: TypeAlias = Callable[..., Awaitable[Mapping[str, Any]]]
"""`fetch(ids)`, or `fetch(ids, viewer_id)` for a kind whose views differ by viewer.

A mapping from id to view: an id left out is absent, one mapped to an exception failed alone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TtlConfig:
    """The settings of a coordinator. Each field is an environment variable in capitals."""

    post_ttl_ms: int = 300_000
    user_ttl_ms: int = 600_000
    batch_interval_ms: int = 5_000
    post_max_batch_size: int = 20
    user_max_batch_size: int = 20
    cooldown_ms: int = 10_000
    refresh_when_hidden: bool = False
    max_batches_per_tick: int = 1

    def __post_init__(self) -> None:
        for setting in fields(self):
            name = setting.name.upper()
            value = getattr(self, setting.name)
            if setting.type is bool:
                checked_flag(name, value)
            else:
                checked_whole(name, value, 0 if name == "COOLDOWN_MS" else 1, MOST)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Return the settings of the environment; others have defaults. Raises ConfigError."""
        given = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for setting in fields(cls):
            text = given.get(setting.name.upper())
            if text is None:
                continue
            # A text that cannot be read is passed on: the check of the settings shows it.
            if setting.type is bool:
                values[setting.name] = FLAGS.get(text.strip().lower(), text)
            else:
                values[setting.name] = int(text) if WHOLE.fullmatch(text) else text
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of item: how it is fetched, and how long a view of it is fresh.

    `fetch(ids)` (with `per_viewer`, `fetch(ids, viewer_id)`) returns the views by id. An id that it
    leaves out is absent; one mapped to an exception failed alone.

    A kind is declared for a coordinator or for a `Hub` (`stillfresh.gateway.live`). A coordinator
    ignores the fields whose text begins with "In a `Hub`".
    """

    name: str
    _: KW_ONLY
    fetch: Fetch
    fresh_for: Duration
    max_batch: int = 20
    counted: bool = False
    """True: an id stays subscribed until every subscriber has left. False: until one has."""
    per_viewer: bool = False
    """True: views differ by viewer, and are never shown to another viewer."""
    stale_for: Duration = "1d"
    """In a `Hub`: how long an old view is shown while it is refreshed."""
    error_for: Duration = "1d"
    """In a `Hub`: how long an old view is shown while refreshing fails."""
    absent_for: Duration | None = None
    """In a `Hub`: how long absence is remembered. None: a tenth of `fresh_for`, at least 1 s."""
    memory_for: Duration = 0
    """In a `Hub`: how long memory is believed without asking the store."""
    concurrency: int = 4
    """In a `Hub`: the most calls of `fetch` at once."""
    codec: Codec[Any] | None = None
    """In a `Hub`: turns views into bytes. `fetch` then also receives `stored=`.

    That is the stored bytes by id, so that it can ask whether they are still right.
    """
    objective: Objectives = None
    """In a `Hub`: the freshness objective, such as "99% of reads younger than 1m"."""
    check: float = 0.0
    """In a `Hub`: the share of reads that is compared with what `fetch` gives."""
    true_within: Duration | None = None
    """In a `Hub`: how late a view may be, for those checks. None: `fresh_for`."""
    check_calls: float = CALLS
    """In a `Hub`: the most calls of `fetch` a second that checks make."""
    ttl_ms: int = field(init=False)

    def __post_init__(self) -> None:
        checked_kind(self.name)
        ttl = seconds(self.fresh_for, name=f"{self.name}: fresh_for", positive=True)
        object.__setattr__(self, "ttl_ms", max(1, round(ttl * 1000)))
        for name in ("stale_for", "error_for", "absent_for", "memory_for"):
            duration = getattr(self, name)
            if duration is None and name == "absent_for":
                continue
            seconds(duration, name=f"{self.name}: {name}")
        checked_function(f"{self.name}: fetch", self.fetch, "an async function")
        for name in ("counted", "per_viewer"):
            checked_flag(f"{self.name}: {name}", getattr(self, name))
        for name in ("max_batch", "concurrency"):
            checked_whole(f"{self.name}: {name}", getattr(self, name))
        check_declared(
            self.name,
            self.objective,
            check=self.check,
            true_within=self.true_within,
            check_calls=self.check_calls,
            fresh_for=ttl,
        )

    @property
    def ttl(self) -> float:
        """`fresh_for` in seconds, to the millisecond."""
        return self.ttl_ms / 1000


def checked_kinds(kinds: Iterable[Kind]) -> dict[str, Kind]:
    """Return the kinds by name. Raises ConfigError if two have the same name."""
    listed = list(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, str) else [None]
    if not all(isinstance(kind, Kind) for kind in listed):
        raise ConfigError(f"kinds: takes a list of Kind(...), not {shown(kinds)}")
    by_name: dict[str, Kind] = {}
    for kind in listed:
        if kind.name in by_name:
            raise ConfigError(f"kinds: two are named {kind.name!r}; give each a name of its own")
        by_name[kind.name] = kind
    return by_name


@dataclass(frozen=True, slots=True)
class TtlSnapshot:
    """The state of a coordinator at one moment, by kind."""

    subscribed: Mapping[str, Mapping[str, int]]
    """Each subscribed id, and how many subscribe to it."""
    queued: Mapping[str, tuple[str, ...]]
    """The ids that wait for a fetch, the oldest first."""
    in_flight: Mapping[str, tuple[str, ...]]
    cooling: Mapping[str, Mapping[str, float]]
    """The ids that failed, and until when they are not tried, in seconds since 1970."""
    last_tick: float | None
    """When the last tick that did something began, in seconds since 1970."""
    requests_made: int
    requests_saved: int
    """How many more requests one request for each id would have been."""


class Nexus(Protocol):
    """A server of posts and users; `NexusClient` is the real one."""

    def posts_by_ids(
        self, post_ids: list[str], viewer_id: str | None
    ) -> Awaitable[Sequence[View]]: ...

    def users_by_ids(
        self, user_ids: list[str], viewer_id: str | None
    ) -> Awaitable[Sequence[View]]: ...


def nexus_kinds(nexus: Nexus, config: TtlConfig) -> list[Kind]:
    """Posts and users with the times of the configuration."""
    for method in ("posts_by_ids", "users_by_ids"):
        expected = f"a server with {method}(ids, viewer_id)"
        checked_function("nexus", getattr(nexus, method, None), expected)

    async def posts(ids: list[str], viewer_id: str | None) -> dict[str, Any]:
        return by_id(POST, ids, await nexus.posts_by_ids(ids, viewer_id), post_id)

    async def users(ids: list[str], viewer_id: str | None) -> dict[str, Any]:
        return by_id(USER, ids, await nexus.users_by_ids(ids, viewer_id), user_id)

    return [
        Kind(
            POST,
            fetch=posts,
            fresh_for=config.post_ttl_ms / 1000,
            max_batch=config.post_max_batch_size,
            per_viewer=True,
        ),
        Kind(
            USER,
            fetch=users,
            fresh_for=config.user_ttl_ms / 1000,
            max_batch=config.user_max_batch_size,
            counted=True,
            per_viewer=True,
        ),
    ]
