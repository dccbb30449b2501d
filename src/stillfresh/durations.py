"""Durations, as people write them: `30`, `"250ms"`, `"5m"`, `timedelta(hours=1)`.

Pure: a value in, seconds out, or a `ConfigError` that names the value and what is allowed.
"""

import math
import re
from contextlib import suppress
from datetime import timedelta
from typing import Final, TypeAlias

from stillfresh.errors import ConfigError, shown

Duration: TypeAlias = float | str | timedelta
"""Seconds as a number, a `timedelta`, or text: `"250ms"`, `"30s"`, `"5m"`, `"1h"`, `"30d"`."""

SECONDS_PER_UNIT: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
TEXT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
ALLOWED: Final = (
    "seconds as an int or float, a timedelta, or text such as '250ms', '30s', '5m', '1h', '30d'"
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
        case _:
            return None
