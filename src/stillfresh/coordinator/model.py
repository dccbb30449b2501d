"""What the coordinator is told, and what can be looked at: kinds and snapshots (C5, C13).

Pure data: checked when it is made, and frozen.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from stillfresh.checks import checked_flag, checked_function, checked_whole
from stillfresh.durations import Duration, seconds
from stillfresh.engine.keys import checked_kind

Fetch: TypeAlias = Callable[..., Awaitable[Mapping[str, Any]]]
"""`fetch(ids)`, or `fetch(ids, viewer_id)` for a kind whose views differ by viewer.

A mapping from id to view: an id left out is absent, one mapped to an exception failed alone.
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of entity: how it is fetched, and how long a view of it is fresh."""

    name: str
    fetch: Fetch = field(kw_only=True)
    fresh_for: Duration = field(kw_only=True)
    max_batch: int = field(default=20, kw_only=True)
    counted: bool = field(default=False, kw_only=True)
    """One for each call of subscribe; else a set, in which twice is once."""
    per_viewer: bool = field(default=False, kw_only=True)
    """Its views differ by viewer, and are never shown to another."""
    stale_for: Duration = field(default="1d", kw_only=True)
    """In a `Hub`: an old view is shown for so long while its refresh runs;"""
    error_for: Duration = field(default="1d", kw_only=True)
    """and for so long while refreshing fails."""
    absent_for: Duration | None = field(default=None, kw_only=True)
    """In a `Hub`: for how long "it does not exist" is believed; None: a tenth of `fresh_for`."""
    memory_for: Duration = field(default=0, kw_only=True)
    """In a `Hub`: for how long a view in memory is served without asking the store."""

    def __post_init__(self) -> None:
        checked_kind(self.name)
        seconds(self.fresh_for, name=f"{self.name}: fresh_for", positive=True)
        for name in ("stale_for", "error_for", "absent_for", "memory_for"):
            if (duration := getattr(self, name)) is not None or name != "absent_for":
                seconds(duration, name=f"{self.name}: {name}")
        checked_function(f"{self.name}: fetch", self.fetch, "an async function")
        for name in ("counted", "per_viewer"):
            checked_flag(f"{self.name}: {name}", getattr(self, name))
        checked_whole(f"{self.name}: max_batch", self.max_batch)

    @property
    def ttl_ms(self) -> int:
        return max(1, round(seconds(self.fresh_for) * 1000))


@dataclass(frozen=True, slots=True)
class TtlSnapshot:
    """The coordinator's state at one moment, kind by kind."""

    subscribed: Mapping[str, Mapping[str, int]]
    """Each id, and how often."""
    queued: Mapping[str, tuple[str, ...]]
    """The longest queued first."""
    in_flight: Mapping[str, tuple[str, ...]]
    cooling: Mapping[str, Mapping[str, float]]
    """Until when each id is left alone, in seconds."""
    last_tick: float | None
    """When the last tick that did anything began, in seconds."""
    requests_made: int
    requests_saved: int
    """One request for each id would have been so many more."""
