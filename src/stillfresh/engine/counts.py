"""The counts of a resource, and a snapshot of them.

Reads are counted by the thread that answers them: each thread has a `ReadCounts` of its own, which
no other thread writes to. A snapshot adds them up. So a hit needs no lock, and none is lost.

A hit in memory takes one item of an iterator, which has an item for each hit until the next one
whose age is looked at: CPython counts in no cheaper way. One hit in sixteen is looked at, and its
age counts for all of them. These ages are noted as they come, and sorted into the buckets when
there are many. Every other read is counted with its own age.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import length_hint
from threading import Lock, local
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from stillfresh.bounded import BoundedDict
from stillfresh.engine.entry import Entry
from stillfresh.engine.model import HITS, Answer, Origin, Outcome
from stillfresh.engine.rules import AGE_BUCKETS, LONGEST_COOLDOWN, age_bucket
from stillfresh.engine.rules_objective import Objective
from stillfresh.engine.rules_truth import TruthStats
from stillfresh.engine.spans import Stopwatch, Timing
from stillfresh.engine.unreadable import UnreadableLog
from stillfresh.errors import LoadFailed, RaisedByLoader, shown
from stillfresh.freshness import Verdict, age_of
from stillfresh.stores.contract import Failure, StoreStats

if TYPE_CHECKING:
    from stillfresh.engine.truth import Sampler, Truth

MOST_FAILING: Final = 1_000
"""Keys that are remembered as failing; beyond that the oldest are forgotten."""
LONGEST_ERROR: Final = 500  # characters of an error in the counts
SAMPLE: Final = 16
"""Hits in memory, of which the first one's age counts for all."""
ITEMS: Final = (None,) * (SAMPLE - 1)
"""What hits take of an iterator until the next one that is looked at."""
MOST_SAMPLES: Final = 256
"""Ages of hits that wait to be sorted into the buckets."""
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
    truth: TruthStats | None = None
    """How the checked reads were judged; None: the resource has no `check`."""

    @property
    def reads(self) -> dict[Verdict, int]:
        """Reads by verdict."""
        origins = self.reads_by_origin.values()
        return {verdict: sum(reads[verdict] for reads in origins) for verdict in Verdict}

    @property
    def hits(self) -> int:
        """Reads that needed no load."""
        return sum(sum(self.reads_by_origin[origin].values()) for origin in HITS)

    @property
    def hit_ratio(self) -> float | None:
        """The share of reads that needed no load; None: there was no read yet."""
        reads = sum(self.reads.values())
        return self.hits / reads if reads else None

    @property
    def met_share(self) -> float | None:
        """The share of reads that met the objective; None: there is none, or no read yet."""
        reads = self.objective_met + self.objective_missed
        return self.objective_met / reads if reads else None

    def __str__(self) -> str:
        """One line: reads, hits, loads, failures, the age of what was served, entries in memory."""
        ratio = self.hit_ratio
        hits = "no hit ratio yet" if ratio is None else f"{100 * ratio:.1f} % hits"
        parts = [
            f"{sum(self.reads.values()):,} reads",
            hits,
            f"{self.loads:,} loads",
            f"{self.failed:,} failed",
        ]
        if sum(self.ages):
            parts.append(f"half of the answers at most {self.age_quantile(0.5):g} s old")
        parts.append(f"{self.entries:,} in memory")
        if self.truth is not None:
            parts.append(str(self.truth))
        if self.error is not None:
            parts.append(f"last error: {shown(self.error)}")
        return ", ".join(parts)

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

    def __str__(self) -> str:
        """One line for each resource."""
        return "\n".join(f"{name}: {stats}" for name, stats in self.resources.items())


class Ages:
    """Ages at serving: how many in each bucket, their sum, and samples that are in no bucket yet.

    Sorting the samples makes another object. So another thread that has one sees each of them once.
    """

    __slots__ = ("buckets", "samples", "total")

    def __init__(self, buckets: list[int], total: float = 0.0) -> None:
        self.buckets = buckets
        self.total = total
        self.samples: list[float] = []
        """Ages of hits, each of which counts for `SAMPLE` hits. The last one stays here until there
        is another."""

    def sorted_in(self, bounds: Sequence[float]) -> "Ages":
        """The same ages, with all samples in their buckets."""
        buckets = self.buckets.copy()
        ages = sorted(self.samples)
        if ages and ages[0] < 0.0:  # a clock was set back
            ages = [max(0.0, age) for age in ages]
        first = 0
        for bucket, bound in enumerate(bounds):
            end = bisect_left(ages, bound, first)
            buckets[bucket] += SAMPLE * (end - first)
            first = end
        buckets[-1] += SAMPLE * (len(ages) - first)
        return Ages(buckets, self.total + SAMPLE * sum(ages))


class ReadCounts:
    """The reads that one thread answered. Only that thread writes to it."""

    __slots__ = ("_after_look", "_ages", "_bounds", "_hits", "_reads", "sampler", "unsampled")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.unsampled: Iterator[None] = iter(())
        """One item for each hit until the next look. A hit is a FRESH answer that memory gave
        alone. The hot paths take an item themselves, and call `hit` if there is none."""
        self._after_look = 0
        """How many hits the last sample still counts for when `unsampled` has ended."""
        self.sampler: Sampler | None = None
        """Chooses the reads that are checked, if any are."""
        self._hits = 0  # hits that the samples count for
        self._reads = {origin: dict.fromkeys(Verdict, 0) for origin in Origin}
        self._ages = Ages([0] * (len(bounds) + 1))

    def hit(self, entry: Entry[Any, Any], answer: Answer[Any], now: float) -> None:
        """Count a FRESH answer that memory gave alone. The hot paths have the usual case inline.

        Every sixteenth hit looks at its age, which counts for this hit and for the next fifteen.
        If reads are checked, there may be looks between that are only for the checks.
        """
        if not entry.is_used:
            entry.is_used = True
        for _ in self.unsampled:
            return
        left = self._after_look
        if left == 0:
            left = SAMPLE
            ages = self._ages
            if len(ages.samples) >= MOST_SAMPLES:
                ages = ages.sorted_in(self._bounds)
                self._ages = ages
            ages.samples.append(now - answer.fetched_at)
            self._hits += SAMPLE
        until_look = left
        if self.sampler is not None:
            until_look = self.sampler.next_look(entry, answer, now, left)
            self._after_look = left - until_look
        self.unsampled = iter(ITEMS[: until_look - 1])

    def note(self, key: object, answer: Answer[Any], now: float) -> None:
        """Count a read that left memory, by its origin, verdict and age."""
        if self.sampler is not None:
            self.sampler.note(key, answer, now)
        age = age_of(answer.fetched_at, now)
        ages = self._ages
        self._reads[answer.origin][answer.verdict] += 1
        ages.buckets[age_bucket(age, self._bounds)] += 1
        ages.total += age

    def note_failed(self, error: LoadFailed) -> None:
        """Count a read that failed: it is GONE, and has no age."""
        if isinstance(error, RaisedByLoader):  # an answer, as an absence is
            self._reads[Origin.LOADED][Verdict.FRESH] += 1
            self._ages.buckets[0] += 1
        else:
            self._reads[Origin.LOADED][Verdict.GONE] += 1

    def note_all(self, outcomes: Iterable[tuple[object, Outcome[Any]]], now: float) -> None:
        """Count reads that left memory, by key."""
        read: list[tuple[Origin, Verdict, float]] = []
        sampler = self.sampler
        for key, outcome in outcomes:
            if isinstance(outcome, LoadFailed):
                self.note_failed(outcome)
                continue
            if sampler is not None:
                sampler.note(key, outcome, now)
            read.append((outcome.origin, outcome.verdict, outcome.fetched_at))
        ages = self._ages
        for (origin, verdict, fetched_at), number in Counter(read).items():  # mostly one
            age = age_of(fetched_at, now)
            self._reads[origin][verdict] += number
            ages.buckets[age_bucket(age, self._bounds)] += number
            ages.total += number * age

    def add(self, other: "ReadCounts") -> None:
        """Add the counts of another thread."""
        for origin, reads in other.reads().items():
            for verdict, count in reads.items():
                self._reads[origin][verdict] += count
        buckets, total = other.ages()
        for bucket, count in enumerate(buckets):
            self._ages.buckets[bucket] += count
        self._ages.total += total

    def reads(self) -> dict[Origin, dict[Verdict, int]]:
        """The reads by origin and verdict."""
        counts = {origin: dict(reads) for origin, reads in self._reads.items()}
        counts[Origin.MEMORY][Verdict.FRESH] += self._hits - self._not_yet_hit()
        return counts

    def ages(self) -> tuple[list[int], float]:
        """The reads by age, as many as there were, and the sum of their ages.

        The last sample may count for fewer hits.
        """
        ages = self._ages
        samples = ages.samples
        age = max(0.0, samples[-1]) if samples else 0.0
        counted = ages.sorted_in(self._bounds)
        if samples:
            too_many = self._not_yet_hit()
            counted.buckets[age_bucket(age, self._bounds)] -= too_many
            counted.total -= too_many * age
        return counted.buckets, counted.total

    def _not_yet_hit(self) -> int:
        """Hits that the last sample counts for, and that have not happened yet."""
        return self._after_look + length_hint(self.unsampled)


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
        self.truth: Truth[Any, Any] | None = None
        """Checks a sample of the reads, if the resource declares that."""
        self._new_sampler: Callable[[], Sampler] | None = None
        self._ended_threads = ReadCounts(self.bounds)
        self._threads: list[tuple[ref[ThreadLife], ReadCounts]] = []
        self._lock = Lock()  # of the two above
        self.loads = self.loaded = self.largest_batch = self.failed = self.absent = self.puts = 0
        self.coalesced = self.superseded = self.leases_won = self.leases_denied = 0
        self.store_errors = self.evicted_bytes = 0
        self.slow_reported = False
        self.unreadable = UnreadableLog()
        self.load_seconds = Stopwatch()
        self.failing: BoundedDict[str, Failure] = BoundedDict(MOST_FAILING)
        """Ids whose last load failed, for statistics only: the store decides about cooldowns."""

    def check_reads(self, truth: "Truth[Any, Any]", new_sampler: "Callable[[], Sampler]") -> None:
        """Let samplers choose reads for `truth`, one for each thread."""
        self.truth = truth
        self._new_sampler = new_sampler
        self.on_loop.sampler = new_sampler()

    def new_thread(self, life: ThreadLife) -> ReadCounts:
        """The counts of another thread than the loop's. Threads that have ended are added up."""
        counts = ReadCounts(self.bounds)
        if self._new_sampler is not None:
            counts.sampler = self._new_sampler()
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
        ages, age_sum = total.ages()
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
            age_sum=age_sum,
            objective=objective,
            objective_met=met,
            objective_missed=missed,
            load_seconds=self.load_seconds.timing(),
            failing=len(failures),
            retry_at=min(pauses, default=None),
            error=failures[-1].error[:LONGEST_ERROR] if failures else None,
            largest_batch=self.largest_batch,
            truth=None if self.truth is None else self.truth.stats(),
            **counted,
            **figures,
        )
