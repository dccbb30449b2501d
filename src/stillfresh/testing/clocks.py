"""A clock that stands still until a test moves it."""

from stillfresh.durations import Duration, seconds


class ManualClock:
    """A clock for `clock=` that only `advance` moves."""

    __slots__ = ("_now",)

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(start)

    def __call__(self) -> float:
        return self._now

    def advance(self, by: Duration) -> None:
        """Move the clock by seconds or `"5m"`. A negative number sets it back."""
        self._now += by if isinstance(by, float | int) else seconds(by)

    def __repr__(self) -> str:
        return f"ManualClock({self._now!r})"
