"""The counts of a resource, and a snapshot of them.

Reads are counted by the thread that answers them: each thread has a `ReadCounts` of its own, which
no other thread writes to. A snapshot adds them up. So a hit needs no lock, and none is lost.

A hit in memory is one addition. Its age is looked at once in sixteen hits, and counts for all of
them. Every other read is counted with its own age.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock, local
from typing import Any, Final
from weakref import ref

from stillfresh.bounded import BoundedDict
from stillfresh.engine.entry import Entry
from stillfresh.engine.model import HITS, Answer, Origin, Outcome
from stillfresh.engine.rules import AGE_BUCKETS, LONGEST_COOLDOWN, age_bucket
from stillfresh.engine.rules_objective import Objective
from stillfresh.engine.spans import Stopwatch, Timing
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict, age_of
from stillfresh.stores.contract import Failure, StoreStats

logger = logging.getLogger(__name__)

MOST_FAILING: Final = 1_000
"""Keys that are remembered as failing; beyond that the oldest are forgotten."""
LONGEST_ERROR: Final = 500  # characters of an error in the counts
SAMPLE: Final = 16
"""Hits in memory, of which the first one's age counts for all."""
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
    """The sum of all ages in seconds. Of hits in memory, one in sixteen was looked at."""
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


class ReadCounts:
    """The reads that one thread answered. Only that thread writes to it."""

    __slots__ = (
        "_age_sum",
        "_ages",
        "_bounds",
        "_last_age",
        "_last_bucket",
        "_reads",
        "_samples",
        "unsampled",
    )

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.unsampled = 1
        """How many hits until the next one whose age is looked at. A hit is a FRESH answer that
        memory gave alone. The hot paths count it down themselves."""
        self._samples = 0
        self._reads = {origin: dict.fromkeys(Verdict, 0) for origin in Origin}
        self._ages = [0] * (len(bounds) + 1)
        self._age_sum = 0.0
        self._last_age = 0.0
        self._last_bucket = 0

    def hit(self, entry: Entry[Any, Any], answer: Answer[Any], now: float) -> None:
        """Count a FRESH answer that memory gave alone. The hot paths have this written out."""
        self.unsampled -= 1
        if not self.unsampled or not entry.is_used:
            self.look_at(entry, answer, now)

    def look_at(self, entry: Entry[Any, Any], answer: Answer[Any], now: float) -> None:
        """Do what only some hits need: note that the entry is used, or look at its age.

        The age counts for this hit and for the fifteen that follow.
        """
        entry.is_used = True
        if self.unsampled:
            return
        self.unsampled = SAMPLE
        self._samples += 1
        age = age_of(answer.fetched_at, now)
        bucket = age_bucket(age, self._bounds)
        self._ages[bucket] += SAMPLE
        self._age_sum += SAMPLE * age
        self._last_age = age
        self._last_bucket = bucket

    def note(self, answer: Answer[Any], now: float) -> None:
        """Count a read that left memory, by its origin, verdict and age."""
        age = age_of(answer.fetched_at, now)
        self._reads[answer.origin][answer.verdict] += 1
        self._ages[age_bucket(age, self._bounds)] += 1
        self._age_sum += age

    def note_all(self, outcomes: Iterable[Outcome[Any]], now: float) -> None:
        """Count reads that left memory. One that failed is GONE, and has no age."""
        reads = self._reads
        fetched_at = now
        age = 0.0
        bucket = 0
        for outcome in outcomes:
            if isinstance(outcome, LoadFailed):
                reads[Origin.LOADED][Verdict.GONE] += 1
                continue
            if outcome.fetched_at != fetched_at:  # copies that were loaded together share it
                fetched_at = outcome.fetched_at
                age = age_of(fetched_at, now)
                bucket = age_bucket(age, self._bounds)
            reads[outcome.origin][outcome.verdict] += 1
            self._ages[bucket] += 1
            self._age_sum += age

    def add(self, other: "ReadCounts") -> None:
        """Add the counts of another thread."""
        for origin, reads in other.reads().items():
            for verdict, count in reads.items():
                self._reads[origin][verdict] += count
        for bucket, count in enumerate(other.ages()):
            self._ages[bucket] += count
        self._age_sum += other.age_sum()

    def reads(self) -> dict[Origin, dict[Verdict, int]]:
        """The reads by origin and verdict."""
        counts = {origin: dict(reads) for origin, reads in self._reads.items()}
        counts[Origin.MEMORY][Verdict.FRESH] += self._samples * SAMPLE - self._not_yet_hit()
        return counts

    def ages(self) -> list[int]:
        """The reads by age, as many as there were: the last sample may count for fewer hits."""
        ages = list(self._ages)
        ages[self._last_bucket] -= self._not_yet_hit()
        return ages

    def age_sum(self) -> float:
        return self._age_sum - self._not_yet_hit() * self._last_age

    def _not_yet_hit(self) -> int:
        """Hits that the last sample counts for, and that have not happened yet."""
        return self.unsampled - 1


class ThreadLife:
    """Ends with its thread, whatever started that: only a thread-local refers to it."""

    __slots__ = ("__weakref__",)


class CountsOfThread(local):
    """The `ReadCounts` of the thread that asks."""

    def __init__(self, counts: "Counts") -> None:
        self._life = ThreadLife()
        self.counts = counts.new_thread(self._life)


class Counts:
    """The running counts of one resource."""

    def __init__(self, objective: Objective | None = None) -> None:
        self.objective = objective
        own = set() if objective is None else {objective.age}
        self.bounds = tuple(sorted({*AGE_BUCKETS, *own}))
        self.on_loop = ReadCounts(self.bounds)
        """The reads of the event loop's thread."""
        self._ended_threads = ReadCounts(self.bounds)
        self._threads: list[tuple[ref[ThreadLife], ReadCounts]] = []
        self._lock = Lock()  # of the two above
        self.loads = self.loaded = self.largest_batch = self.failed = self.absent = self.puts = 0
        self.coalesced = self.superseded = self.leases_won = self.leases_denied = 0
        self.store_errors = self.evicted_bytes = 0
        self.slow_reported = False
        self.misfit_reported = False
        self.load_seconds = Stopwatch()
        self.failing: BoundedDict[str, Failure] = BoundedDict(MOST_FAILING)
        """Ids whose last load failed, for statistics only: the store decides about cooldowns."""

    def new_thread(self, life: ThreadLife) -> ReadCounts:
        """The counts of another thread than the loop's. Threads that have ended are added up."""
        counts = ReadCounts(self.bounds)
        with self._lock:
            running: list[tuple[ref[ThreadLife], ReadCounts]] = []
            for other, reads in self._threads:
                if other() is not None:
                    running.append((other, reads))
                else:
                    self._ended_threads.add(reads)
            running.append((ref(life), counts))
            self._threads = running
        return counts

    def _all_reads(self) -> ReadCounts:
        """The reads of all threads."""
        total = ReadCounts(self.bounds)
        total.add(self.on_loop)
        with self._lock:
            total.add(self._ended_threads)
            for _, reads in self._threads:
                total.add(reads)
        return total

    def report_misfit(self, kind: str, exc: Exception) -> None:
        """A stored value cannot be decoded: log the first one."""
        if not self.misfit_reported:
            self.misfit_reported = True
            message = (
                "%s: a stored value does not fit the declared type (%s), so it is loaded again. If "
                "the type has changed, write version='2'; if another function uses this name on "
                "the same store, rename one of them"
            )
            logger.warning(message, kind, type(exc).__name__)

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
        failures = [failure for failure in tuple(self.failing.values()) if failure.retry_at >= old]
        pauses = [failure.retry_at for failure in failures if failure.retry_at > now]
        counted: dict[str, Any] = {name: getattr(self, name) for name, _ in COUNTERS}
        total = self._all_reads()
        reads = total.reads()
        ages = total.ages()
        met = missed = 0
        objective = self.objective
        if objective is not None:
            at = self.bounds.index(objective.age)
            met = sum(ages[: at + 1])
            missed = sum(sum(by_verdict.values()) for by_verdict in reads.values()) - met
            if objective.age not in AGE_BUCKETS:
                ages[at : at + 2] = [ages[at] + ages[at + 1]]
        return ResourceStats(
            reads_by_origin=reads,
            ages=tuple(ages),
            age_sum=total.age_sum(),
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
