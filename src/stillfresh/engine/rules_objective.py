"""The objectives of a resource: which share of reads must be how young, and which share true.

Pure: text in, the objective out, or a `ConfigError` that says what to write.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from stillfresh.durations import seconds
from stillfresh.errors import ConfigError, shown

WRITTEN: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?% of reads younger than (\S+)")
WRITTEN_TRUTH: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?% of reads true within (\S+)")
ALLOWED: Final = (
    "write a share above 0% and below 100%, and a duration above zero, "
    "as '99% of reads younger than 1m' or '99.9% of reads younger than 250ms'"
)
ALLOWED_TRUTH: Final = "or, of a resource with check=, '99.99% of reads true within 5s'"


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


@dataclass(frozen=True, slots=True)
class TruthObjective:
    """`share` of the reads (0.9999) are true, or become so within this many seconds."""

    share: float
    within: float


def objectives_of(
    written: str | Sequence[str] | None, *, name: str
) -> tuple[Objective | None, TruthObjective | None]:
    """The objective of age and that of truth; each may be there once. Raises ConfigError."""
    if written is None:
        return None, None
    texts: list[Any] = list(written) if isinstance(written, tuple | list) else [written]
    age: Objective | None = None
    truth: TruthObjective | None = None
    for text in texts:
        match = WRITTEN_TRUTH.fullmatch(text) if isinstance(text, str) else None
        is_repeated = truth is not None if match is not None else age is not None
        if is_repeated:
            raise ConfigError(f"{name}: {shown(text)} is a second objective of the same form")
        if match is None:
            age = _objective_of_age(text, name)
        elif not 0 < float(match[1]) < 100:
            raise ConfigError(f"{name}: cannot read {shown(text)} as an objective; {ALLOWED}")
        else:
            within = seconds(match[2], name=name, positive=True)
            truth = TruthObjective(round(float(match[1]) / 100, 8), within)
    return age, truth


def _objective_of_age(text: str, name: str) -> Objective:
    try:
        return Objective.of(text, name=name)
    except ConfigError as exc:
        raise ConfigError(f"{exc}; {ALLOWED_TRUTH}") from exc
