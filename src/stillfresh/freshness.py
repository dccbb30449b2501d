"""May this copy be served? The verdict of a policy on an age, and the end of a lease or a cooldown.

Pure: times in, verdict out. Nothing else may live here: no clock, no store, no asyncio.
Other times are compared where they count: a caller's `max_age` in `engine/rules.py`, what a request
of HTTP accepts in `http/serving.py`, an entry of `TtlCache` in its own file, for speed.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stillfresh.durations import Duration, seconds

MAX_SKEW: Final = 5.0
"""Machines' clocks differ: a copy from the future by up to this many seconds is new, not wrong."""
LONGEST_LEASE: Final = 120.0
"""Seconds that another deployment, or another language, may lease a key for, unknown to us."""


class Verdict(StrEnum):
    """How fresh a copy is, and what a read may do with it."""

    FRESH = "fresh"
    """Serve it."""
    STALE = "stale"
    """Serve it, and refresh it in the background."""
    EXPIRED = "expired"
    """Load a new copy first. Serve this one only if that fails."""
    GONE = "gone"
    """Never serve it."""


def age_of(fetched_at: float, now: float) -> float:
    """How old a copy is; never negative, whatever the clocks say."""
    return max(0.0, now - fetched_at)


def is_fresh(fetched_at: float, fresh_for: float, now: float) -> bool:
    """Fresh up to, not including, the end; beyond the skew the future is never fresh."""
    age = now - fetched_at
    return (0.0 if -MAX_SKEW <= age < 0.0 else age) < fresh_for and age >= -MAX_SKEW


def is_fresh_inclusive(fetched_at: float, fresh_for: float, now: float) -> bool:
    """Their seeds count the last moment as fresh, and anything from the future as stale."""
    return 0.0 <= now - fetched_at <= fresh_for


def is_over(until: float, now: float) -> bool:
    """A lease or a cooldown is over at its very end: what lasts "until" excludes that moment."""
    return now >= until


def last_end(now: float, lease_for: float) -> float:
    """The latest end of a lease that is live now, if clocks are right and none is longer."""
    return now + max(lease_for, LONGEST_LEASE) + MAX_SKEW


def is_lease_over(until: float, now: float, lease_for: float) -> bool:
    """True at its end, or if its end is too far away for leases of `lease_for` to be true.

    Such a lease is from before the clock was set back: its holder may be dead. A holder that lives
    cannot publish, because the new lease has another token.
    """
    return is_over(until, now) or until > last_end(now, lease_for)


@dataclass(frozen=True, slots=True, init=False)
class Policy:
    """How long a copy may be served.

    A copy is FRESH for `fresh_for`. After that it is served while it is refreshed for `stale_for`,
    and served if its refresh fails for `error_for`. Both count from the end of freshness, as
    `stale-while-revalidate` and `stale-if-error` do in RFC 5861.
    """

    fresh_for: float
    stale_for: float
    error_for: float

    def __init__(
        self, fresh_for: Duration, stale_for: Duration = 0, error_for: Duration = 0
    ) -> None:
        object.__setattr__(self, "fresh_for", seconds(fresh_for, name="fresh_for"))
        object.__setattr__(self, "stale_for", seconds(stale_for, name="stale_for"))
        object.__setattr__(self, "error_for", seconds(error_for, name="error_for"))

    @property
    def lasts(self) -> float:
        """The age in seconds from which a copy is GONE."""
        return self.fresh_for + max(self.stale_for, self.error_for)

    def verdict(self, fetched_at: float, now: float) -> Verdict:
        """Return how fresh the copy is: FRESH, later STALE, then EXPIRED, then GONE."""
        if is_fresh(fetched_at, self.fresh_for, now):
            return Verdict.FRESH
        if fetched_at - now > MAX_SKEW:
            return Verdict.STALE
        age = age_of(fetched_at, now)
        if age < self.fresh_for + self.stale_for:
            return Verdict.STALE
        return Verdict.EXPIRED if age < self.fresh_for + self.error_for else Verdict.GONE
