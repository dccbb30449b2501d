"""How often was a read wrong? What is asked of a sample of reads, and how they are judged. Pure.

A read is *true* if the loader, asked again right after it, gives the same value. If not, time must
tell: a cache is allowed to be late. So after `true_within` cache and loader are asked once more.
The read was *wrong* if the cache still answers FRESH with an old value that neither look of the
loader gave. Otherwise it was *late*, but within its terms.

A copy that was requested after the first look is never called wrong. It may hold a third value, if
the data changes quickly, and it was true when it was requested.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

from msgspec import Struct

from stillfresh.checks import checked_share
from stillfresh.durations import Duration, seconds
from stillfresh.engine.rules_objective import Objective, TruthObjective, objectives_of
from stillfresh.errors import ConfigError, shown
from stillfresh.freshness import Verdict
from stillfresh.nines import supported_nines

V = TypeVar("V")

CALLS: Final = 10.0
"""Calls of the loader a second that checks may make, by default."""
MOST_STORIES: Final = 10
"""Wrong reads whose story is kept."""

Objectives: TypeAlias = str | Sequence[str] | None
"""The type of `objective=`: one sentence, or two."""


@dataclass(frozen=True, slots=True)
class CheckTerms:
    """What is checked: this share of the reads, judged after so many seconds, within a budget."""

    share: float
    true_within: float
    calls: float
    """Calls of the loader a second."""
    objective: TruthObjective | None


@dataclass(frozen=True, slots=True)
class WrongRead:
    """The story of a read that was wrong. Times are seconds since 1970."""

    key: str
    served_at: float
    age: float
    """The age of the copy when it was served, in seconds."""
    verdict: str
    origin: str
    fetched_at: float
    """When the loader was called for the copy."""
    fresh_for: float
    generation: str | None
    """The generation of the copy in the store; None: the copy was not in memory."""
    judged_at: float
    lease_until: float | None
    """When the lease on the key ends or has ended, if there is one."""
    changed_at: float | None
    """When this process last changed the key or learned of a change; None: it knows of none."""
    change: str | None
    """What that change was: `invalidated` or `put`."""

    def __str__(self) -> str:
        """One line for a log."""
        change = "no known change of the key"
        if self.change is not None and self.changed_at is not None:
            before = self.served_at - self.changed_at
            change = f"{self.change} {abs(before):.3g} s {'before' if before >= 0 else 'after'}"
        lease = "" if self.lease_until is None else ", a lease on it"
        return (
            f"{self.key}: served {self.verdict} from {self.origin} at an age of {self.age:.3g} s "
            f"(fresh for {self.fresh_for:g} s), {change}{lease}"
        )


@dataclass(frozen=True, slots=True)
class TruthStats:
    """How many reads were checked, and how they were judged."""

    true: int
    late: int
    """The loader gave another value, and the cache had caught up within `true_within`."""
    wrong: int
    failed: int
    """The loader failed, hung or gave nothing that can be compared: the read was not judged."""
    skipped: int
    """Reads of the sample that were not checked: the budget was used up."""
    pending: int
    """Reads that are being checked now."""
    true_within: float
    objective: TruthObjective | None
    wrong_reads: tuple[WrongRead, ...]
    """The stories of the last wrong reads."""

    @property
    def checked(self) -> int:
        """Reads that were judged."""
        return self.true + self.late + self.wrong

    @property
    def nines(self) -> float | None:
        """-log10 of the 95 % upper bound of wrong / checked; None: nothing was judged."""
        return supported_nines(self.wrong, self.checked)

    @property
    def burn_rate(self) -> float | None:
        """How often reads are wrong, as a multiple of what the objective allows."""
        if self.objective is None or not self.checked:
            return None
        return self.wrong / self.checked / (1 - self.objective.share)

    def __add__(self, other: "TruthStats") -> "TruthStats":
        """The counts of two processes that declare the same."""
        stories = sorted((*self.wrong_reads, *other.wrong_reads), key=lambda read: read.judged_at)
        return replace(
            self,
            true=self.true + other.true,
            late=self.late + other.late,
            wrong=self.wrong + other.wrong,
            failed=self.failed + other.failed,
            skipped=self.skipped + other.skipped,
            pending=self.pending + other.pending,
            wrong_reads=tuple(stories[-MOST_STORIES:]),
        )

    def __str__(self) -> str:
        """`1,204 checked, 3 late, 0 wrong, 2.6 nines`."""
        nines = "no nines yet" if self.nines is None else f"{self.nines:.1f} nines"
        return f"{self.checked:,} checked, {self.late:,} late, {self.wrong:,} wrong, {nines}"


class Look(Struct, Generic[V], frozen=True):
    """What cache or loader say of a key at one moment."""

    found: bool
    """False: it does not exist, or the loader raised an exception that is an answer."""
    value: V | None = None
    error: str | None = None
    """The class of the exception that is the loader's answer."""


class CachedLook(Struct, Generic[V], frozen=True):
    """The cache's look, and what is known of its copy."""

    look: Look[V]
    verdict: Verdict
    fetched_at: float


def is_wrong(
    served_at: float,
    looked_at: float,
    cached: CachedLook[V] | None,
    looks: Sequence[Look[V]],
    same: Callable[[Look[V], Look[V]], bool],
) -> bool:
    """Whether a read was wrong whose value the first look of the loader did not give.

    `served_at`: the `fetched_at` of the copy that was served; `looked_at`: when the loader was
    first asked. `cached`: what the cache answers after `true_within`; `looks`: those of the loader.
    """
    if cached is None or cached.verdict is not Verdict.FRESH:
        return False
    if cached.fetched_at >= looked_at and cached.fetched_at != served_at:
        return False
    return not any(same(cached.look, look) for look in looks)


def gap_of(share: float, draw: float) -> int:
    """The number of reads until the next one of the sample, that one included.

    If each read is taken with this probability, whatever was taken before, the gaps are distributed
    like this. `draw` is from 0 to below 1.
    """
    if share >= 1:
        return 1
    return 1 + int(math.log1p(-draw) / math.log1p(-share))


class Budget:
    """Calls a second, saved up for one second at most."""

    def __init__(self, calls: float) -> None:
        self._calls = calls
        self._most = max(calls, 1.0)
        self._left = self._most
        self._since = -math.inf

    def take(self, now: float) -> bool:
        """True if another call is allowed at this time. A clock that was set back adds nothing."""
        earned = max(0.0, now - self._since) * self._calls
        self._left = min(self._most, self._left + earned)
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def spend(self) -> None:
        """A call that must be made, whatever is left: later ones wait for it."""
        self._left -= 1


def check_declared(kind: str, objective: Objectives, **options: Any) -> None:  # noqa: ANN401
    """Raise ConfigError for options that a resource could not declare. They are `Declared.of`'s."""
    Declared.of(kind, objective, **options)


class Declared(Struct, frozen=True):
    """What a resource declares of its objectives and checks."""

    objective: Objective | None
    check: CheckTerms | None

    @classmethod
    def of(
        cls,
        kind: str,
        objective: Objectives,
        *,
        check: float,
        true_within: Duration | None,
        check_calls: float,
        fresh_for: float,
    ) -> Self:
        """Read the options of a declaration. Raises ConfigError."""
        age, truth = objectives_of(objective, name=f"{kind}: objective")
        share = checked_share(f"{kind}: check", check) if check else 0.0
        within = None
        if true_within is not None:
            within = seconds(true_within, name=f"{kind}: true_within", positive=True)
        if not share:
            if within is not None or truth is not None:
                option = "true_within" if truth is None else "an objective of truth"
                raise ConfigError(f"{kind}: {option} needs check, such as check=0.001")
            return cls(age, None)
        is_number = isinstance(check_calls, int | float) and not isinstance(check_calls, bool)
        if not is_number or not 0 < check_calls <= 1_000_000:
            raise ConfigError(
                f"{kind}: check_calls is a number of calls a second above zero, "
                f"not {shown(check_calls)}"
            )
        if truth is not None and within is not None and within != truth.within:
            raise ConfigError(
                f"{kind}: true_within is {within:g} s, and the objective says {truth.within:g} s; "
                f"leave out true_within"
            )
        if truth is not None:
            within = truth.within
        return cls(age, CheckTerms(share, within or fresh_for, float(check_calls), truth))
