"""Durations, as people write them: `30`, `"250ms"`, `"1h30m"`, `timedelta(hours=1)`.

Pure: a value in, seconds out, or a `ConfigError` that names the value and what is allowed.
"""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Final, TypeAlias

from stillfresh.errors import ConfigError, shown

Duration: TypeAlias = float | str | timedelta
"""Seconds as a number, a `timedelta`, or text: `"250ms"`, `"30s"`, `"1h30m"`, `"10 minutes"`."""

SECONDS_PER_UNIT: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
WORDS: Final = {
    "millisecond": 0.001,
    "second": 1.0,
    "minute": 60.0,
    "hour": 3600.0,
    "day": 86400.0,
    "week": 604_800.0,
}
NUMBER: Final = r"([0-9]+(?:\.[0-9]+)?)"
TEXT: Final = re.compile(rf"{NUMBER}(ms|s|m|h|d)")
WORDED: Final = re.compile(rf"{NUMBER} ({'|'.join(WORDS)})s?")
ALLOWED: Final = (
    "seconds as an int or float, a timedelta, or text such as '250ms', '30s', '5m', '1h30m', "
    "'10 minutes'"
)


def seconds(value: Duration, *, name: str = "duration", positive: bool = False) -> float:
    """Seconds, finite and not negative; with `positive`, not zero either."""
    result = _read(value)
    if result is None or not math.isfinite(result):
        raise ConfigError(f"{name}: cannot read {shown(value)} as a duration; write {ALLOWED}")
    if result < 0 or (positive and result == 0):
        least = "more than zero" if positive else "zero or more"
        raise ConfigError(f"{name}: must be {least}, not {shown(value)}")
    return result


def _read(value: object) -> float | None:
    match value:
        case bool():
            return None
        case int() | float():
            with suppress(OverflowError):
                return float(value)
            return None
        case timedelta():
            return value.total_seconds()
        case str() if match := TEXT.fullmatch(value):
            return float(match[1]) * SECONDS_PER_UNIT[match[2]]
        case str():
            parts = _parts(value, TEXT, SECONDS_PER_UNIT) or _parts(value, WORDED, WORDS, " ")
            return sum(number * unit for number, unit in parts) if parts else None
        case _:
            return None


def _parts(
    text: str, part: re.Pattern[str], units: Mapping[str, float], between: str = ""
) -> list[tuple[float, float]]:
    """The numbers and units of text such as "1h30m", from large to small; empty if it is none."""
    parts: list[tuple[float, float]] = []
    at = 0
    while at < len(text):
        if parts:
            if not text.startswith(between, at):
                return []
            at += len(between)
        match = part.match(text, at)
        if match is None or (parts and units[match[2]] >= parts[-1][1]):
            return []
        parts.append((float(match[1]), units[match[2]]))
        at = match.end()
    return parts
