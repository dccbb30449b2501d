"""How fast the demo's world is: how slow its upstream, how long a copy is fresh (G8).

Chosen so that a visitor sees each of them happen within a minute; tests choose shorter ones.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from stillfresh.durations import Duration, seconds
from stillfresh.errors import ConfigError, shown

DURATIONS: Final = (
    "post_fresh_for",
    "user_fresh_for",
    "feed_fresh_for",
    "page_fresh_for",
    "approval_for",
    "change_every",
    "retry_after",
)
SPANS: Final = ("lookup", "slow_lookup", "bot_thinks")


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds, or "10s"."""

    post_fresh_for: Duration = "10s"
    user_fresh_for: Duration = "30s"
    feed_fresh_for: Duration = "20s"
    page_fresh_for: Duration = "15s"
    approval_for: Duration = "20s"
    lookup: tuple[float, float] = (1.0, 3.0)
    """The shortest and the longest lookup of an upstream that is well."""
    slow_lookup: tuple[float, float] = (5.0, 8.0)
    retry_after: Duration = "2s"
    """A lookup that failed is tried again after this."""
    change_every: Duration = "700ms"
    """One thing in the upstream's world changes so often."""
    bot_thinks: tuple[float, float] = (2.0, 12.0)
    seed: int = 7

    def __post_init__(self) -> None:
        for name in DURATIONS:
            seconds(getattr(self, name), name=name, positive=True)
        for name in SPANS:
            _check_span(name, getattr(self, name))

    def faster(self, times: float) -> "Pace":
        is_number = isinstance(times, int | float) and not isinstance(times, bool)
        if not is_number or not 0.1 <= times <= 100:
            raise ConfigError(f"speed: a number from 0.1 to 100, not {shown(times)}")
        changed: dict[str, Any] = {name: self.seconds_of(name) / times for name in DURATIONS}
        for name in SPANS:
            changed[name] = tuple(it / times for it in getattr(self, name))
        return replace(self, **changed)

    def seconds_of(self, name: str) -> float:
        return seconds(getattr(self, name), name=name)


def _check_span(name: str, span: tuple[float, float]) -> None:
    is_pair = isinstance(span, tuple) and len(span) == 2
    if not is_pair or not 0 <= span[0] <= span[1] < 60:
        raise ConfigError(f"{name}: two numbers of seconds, as (1, 3), not {shown(span)}")
