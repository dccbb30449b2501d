"""The freshness objective of a resource: which share of reads must be how young.

Pure: text in, the objective out, or a `ConfigError` that says what to write.
"""

import re
from dataclasses import dataclass
from typing import Final, Self

from stillfresh.durations import seconds
from stillfresh.errors import ConfigError, shown

WRITTEN: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?% of reads younger than (\S+)")
ALLOWED: Final = (
    "write a share above 0% and below 100%, and a duration above zero, "
    "as '99% of reads younger than 1m' or '99.9% of reads younger than 250ms'"
)


@dataclass(frozen=True, slots=True)
class Objective:
    """`share` of the reads (0.99) are answered by a copy younger than `age` seconds."""

    share: float
    age: float

    @classmethod
    def of(cls, text: str, *, name: str = "objective") -> Self:
        """Read the text of a declaration."""
        match = WRITTEN.fullmatch(text) if isinstance(text, str) else None
        if match is None or not 0 < float(match[1]) < 100:
            raise ConfigError(f"{name}: cannot read {shown(text)} as an objective; {ALLOWED}")
        age = seconds(match[2], name=name, positive=True)
        return cls(round(float(match[1]) / 100, 8), age)

    def burn_rate(self, met: int, missed: int) -> float | None:
        """How often reads miss the objective, as a multiple of what it allows."""
        reads = met + missed
        return missed / reads / (1 - self.share) if reads else None
