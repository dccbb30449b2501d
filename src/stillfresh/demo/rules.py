"""The demo's own decisions: how fast its world is, and what polling costs. Pure."""

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from stillfresh.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds, or the shortest and the longest; a visitor sees each happen within a minute."""

    post_fresh_for: float = 10.0
    user_fresh_for: float = 30.0
    feed_fresh_for: float = 20.0
    page_fresh_for: float = 15.0
    approval_for: float = 20.0
    lookup: tuple[float, float] = (1.0, 3.0)
    slow_lookup: tuple[float, float] = (5.0, 8.0)
    retry_after: float = 2.0
    """A lookup that failed is tried again after this."""
    change_every: float = 0.7
    """One thing in the upstream's world changes so often."""
    bot_thinks: tuple[float, float] = (2.0, 12.0)

    def faster(self, times: float) -> "Pace":
        """The same demo, so many times as fast."""
        is_number = isinstance(times, int | float) and not isinstance(times, bool)
        if not is_number or not 0.1 <= times <= 100:
            raise ConfigError(f"speed: a number from 0.1 to 100, not {shown(times)}")
        changed: dict[str, Any] = {}
        for name, span in asdict(self).items():
            if isinstance(span, tuple):
                changed[name] = tuple(limit / times for limit in span)
            else:
                changed[name] = span / times
        return Pace(**changed)


def polling(seconds: float, *kinds: tuple[int, float, int]) -> tuple[float, float]:
    """What polling costs: each open tab asks for every item each time its freshness ends.

    One request for each item, or in batches like those of stillfresh.
    `seconds`: of all tabs. `kinds`: how many items, for how long each is fresh, how many go
    into one request. stillfresh requests only items on a screen, once for all tabs.
    """
    each = sum(seconds / fresh_for * items for items, fresh_for, _ in kinds)
    batched = sum(seconds / fresh_for * ceil(items / most) for items, fresh_for, most in kinds)
    return each, batched
