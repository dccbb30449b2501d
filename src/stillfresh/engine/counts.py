"""The counts of a resource, and a snapshot of them.

A hit is counted on its entry. The count moves here when the verdict or the age bucket changes, so a
hit costs one addition.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from stillfresh.bounded import BoundedDict
from stillfresh.engine.model import HITS, Answer, Origin
from stillfresh.engine.rules import AGE_BUCKETS, FOR_EVER, LONGEST_COOLDOWN
from stillfresh.engine.rules_objective import Objective
from stillfresh.engine.spans import Stopwatch, Timing
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import Failure, StoreStats

logger = logging.getLogger(__name__)

MOST_FAILING: Final = 1_000
"""Keys that are remembered as failing; beyond that the oldest are forgotten."""
LONGEST_ERROR: Final = 500  # characters of an error in the counts
COUNTERS: Final = (
    ("loads", "Calls of the loader."),
    ("loaded", "Keys asked of the loader."),
    ("failed", "Keys whose load failed."),
    ("absent", "Keys that the upstream does not have."),
    ("coalesced", "Reads that joined a load under way."),
    ("puts", "Keys whose value a caller published."),
    ("superseded", "Loads overtaken by an invalidation or another holder."),
    ("leases_won", "Leases that were granted."),
    ("leases_denied", "Leases that were not."),
    ("store_errors", "Steps that the store failed."),
    ("evicted_bytes", "Bytes of the values that memory dropped to make room."),
)
"""The names and meanings of the counts of a resource."""
GAUGES: Final = (
    ("entries", "Decoded values in memory."),
    ("bytes", "Bytes that those values take, as they are stored, and a constant for each."),
    ("loading", "Keys being loaded or waited for."),
    ("queued", "Keys whose load has not begun."),
    ("watched", "Keys that somebody watches."),
    ("failing", "Keys whose last load failed."),
)
"""Names and meanings of the current figures."""


@dataclass(frozen=True, slots=True)
class ResourceStats:
    """Counts of one resource since the cache was made, and its state now.

    `docs/monitoring.md` explains each count. `ages` has the reads by their age at serving, bucket
    by bucket.
    """

    reads_by_origin: dict[Origin, dict[Verdict, int]]
    """Reads by origin and verdict. A read that failed counts as LOADED and GONE."""
    ages: tuple[int, ...]
    age_sum: float
    """The sum of all ages in seconds. The part of hits in memory is an estimate."""
    objective: Objective | None
    objective_met: int
    objective_missed: int
    """Reads that missed the objective or failed; 0 without an objective."""
    load_seconds: Timing
    """How long the loader took."""
    loads: int
    loaded: int
    largest_batch: int
    failed: int
    absent: int
    coalesced: int
    puts: int
    superseded: int
    leases_won: int
    leases_denied: int
    store_errors: int
    evicted_bytes: int
    entries: int
    bytes: int
    loading: int
    queued: int
    watched: int
    failing: int
    retry_at: float | None
    """When the first cooldown ends, in seconds since 1970; None if no key cools down."""
    error: str | None
    """The error of the last load that failed."""
    max_batch: int
    """The most keys in one call of the loader, as declared."""

    @property
    def reads(self) -> dict[Verdict, int]:
        """Reads by verdict."""
        origins = self.reads_by_origin.values()
        return {verdict: sum(reads[verdict] for reads in origins) for verdict in Verdict}

    @property
    def hits(self) -> int:
        """Reads that needed no load. Divided by all reads: the hit ratio."""
        return sum(sum(self.reads_by_origin[origin].values()) for origin in HITS)

    @property
    def met_share(self) -> float | None:
        """The share of reads that met the objective; None: there is none, or no read yet."""
        reads = self.objective_met + self.objective_missed
        return self.objective_met / reads if reads else None

    def age_quantile(self, share: float) -> float:
        """Return the age in seconds that this share of reads did not exceed, rounded up."""
        wanted = share * sum(self.ages)
        bounds = (*AGE_BUCKETS, float("inf"))
        counted = zip(bounds, accumulate(self.ages), strict=True)
        return next((bound for bound, seen in counted if seen >= wanted), bounds[-1])


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a cache is behind the database that invalidates it (`integrations.postgres`).

    Every commit older than `seconds` has been delivered. Past `limit`, the cache is too far behind.
    """

    seconds: float
    limit: float


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The statistics of every resource, and of the store (None if it could not be reached)."""

    resources: dict[str, ResourceStats]
    store: StoreStats | None
    lags: dict[str, Lag]
    """How far each outbox consumer is behind, by its name."""
    store_seconds: dict[str, Timing]
    """How long the steps of the store took, by step."""


class Counts:
    """The running counts of one resource."""

    def __init__(self, objective: Objective | None = None) -> None:
        self.reads = {origin: dict.fromkeys(Verdict, 0) for origin in Origin}
        self.objective = objective
        own = set() if objective is None else {objective.age}
        self.bounds = tuple(sorted({*AGE_BUCKETS, *own}))
        self._edges = (0.0, *self.bounds, FOR_EVER)
        self.ages = [0] * (len(self.bounds) + 1)
        self.age_sum = 0.0
        self.folded_at = float("-inf")
        self.loads = self.loaded = self.largest_batch = self.failed = self.absent = self.puts = 0
        self.coalesced = self.superseded = self.leases_won = self.leases_denied = 0
        self.store_errors = self.evicted_bytes = 0
        self.slow_reported = False
        self.misfit_reported = False
        self.load_seconds = Stopwatch()
        self.failing: BoundedDict[str, Failure] = BoundedDict(MOST_FAILING)
        """Ids whose last load failed, for statistics only: the store decides about cooldowns."""

    def hit(self, answer: Answer[Any], bucket: int, hits: int, now: float) -> None:
        """Count the hits of one entry since it entered this bucket, or since all were last counted.

        Their exact times are not known. They count as spread evenly over that time.
        """
        self.reads[answer.origin][answer.verdict] += hits
        self.ages[bucket] += hits
        least = self._edges[bucket]
        most = self._edges[bucket + 1]
        last = max(least, min(most, now - answer.fetched_at))
        first = min(last, max(least, self.folded_at - answer.fetched_at))
        self.age_sum += hits * (first + last) / 2

    def misfit(self, kind: str, exc: Exception) -> bool:
        """A stored value cannot be decoded: log the first one. Always False, for no value."""
        if not self.misfit_reported:
            self.misfit_reported = True
            message = (
                "%s: a stored value does not fit the declared type (%s), so it is loaded again. If "
                "the type has changed, write version='2'; if another function uses this name on "
                "the same store, rename one of them"
            )
            logger.warning(message, kind, type(exc).__name__)
        return False

    def failed_with(self, id_: str, failure: Failure) -> None:
        """A key's load failed."""
        self.failed += 1
        self.failing.note(id_, failure)

    def mended(self, ids: Iterable[str]) -> None:
        """These keys were loaded or deleted."""
        for id_ in ids:
            self.failing.pop(id_, None)

    def stats(self, now: float, **figures: int) -> ResourceStats:
        """A frozen snapshot, with the current figures of the resource."""
        old = now - LONGEST_COOLDOWN  # long past its cooldown, and no caller has asked again
        self.mended([id_ for id_, failure in self.failing.items() if failure.retry_at < old])
        failures = list(self.failing.values())
        pauses = [failure.retry_at for failure in failures if failure.retry_at > now]
        counted: dict[str, Any] = {name: getattr(self, name) for name, _ in COUNTERS}
        ages = self.ages[:]
        met = missed = 0
        objective = self.objective
        if objective is not None:
            at = self.bounds.index(objective.age)
            met = sum(ages[: at + 1])
            missed = sum(sum(reads.values()) for reads in self.reads.values()) - met
            if objective.age not in AGE_BUCKETS:
                ages[at : at + 2] = [ages[at] + ages[at + 1]]
        return ResourceStats(
            reads_by_origin={origin: dict(reads) for origin, reads in self.reads.items()},
            ages=tuple(ages),
            age_sum=self.age_sum,
            objective=objective,
            objective_met=met,
            objective_missed=missed,
            load_seconds=self.load_seconds.timing(),
            failing=len(failures),
            retry_at=min(pauses, default=None),
            error=failures[-1].error[:LONGEST_ERROR] if failures else None,
            largest_batch=self.largest_batch,
            **counted,
            **figures,
        )
