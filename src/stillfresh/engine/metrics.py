"""What happened, counted exactly and without a lock (E12).

Hits are counted on the entry itself and folded in here when its verdict or its age's bucket
changes, so that a hit costs one addition.
"""

from dataclasses import dataclass

from stillfresh.engine.failing import Failing
from stillfresh.engine.model import HITS, Origin
from stillfresh.engine.rules import AGE_BUCKETS
from stillfresh.freshness import Verdict
from stillfresh.stores.contract import StoreStats


@dataclass(frozen=True, slots=True)
class ResourceStats:
    """Counts since the cache was made. `ages` are reads by age at serving, bucket by bucket."""

    reads_by_origin: dict[Origin, dict[Verdict, int]]
    """A read that failed counts as loaded, and GONE."""
    ages: tuple[int, ...]
    loads: int
    """Calls of the loader."""
    loaded: int
    """Keys that were asked of it."""
    largest_batch: int
    failed: int
    """Keys whose load failed."""
    absent: int
    coalesced: int
    """Reads that joined a load which another had asked for."""
    puts: int
    """Keys whose value a caller published by `put`."""
    superseded: int
    """Loads overtaken by an invalidation or by another holder."""
    leases_won: int
    leases_denied: int
    store_errors: int
    entries: int
    """In memory now."""
    loading: int
    """Keys being loaded, or waited for, now."""
    queued: int
    """Those of them whose load has not begun."""
    watched: int
    """Keys that somebody watches now."""
    failing: int
    """Keys whose last load here failed, and was not made good since."""
    retry_at: float | None
    """When the first of them that is left alone may be asked for again."""
    error: str | None
    """What the last of them said."""
    max_batch: int
    """The most keys that one call of the loader may be given."""

    @property
    def reads(self) -> dict[Verdict, int]:
        """By verdict alone."""
        origins = self.reads_by_origin.values()
        return {verdict: sum(reads[verdict] for reads in origins) for verdict in Verdict}

    @property
    def hits(self) -> int:
        """Reads that needed no load; divided by all reads, the hit ratio."""
        return sum(sum(self.reads_by_origin[origin].values()) for origin in HITS)

    def age_quantile(self, share: float) -> float:
        """The age (a bucket's upper bound) that this share of all reads was no older than."""
        wanted, seen = share * sum(self.ages), 0
        for bound, count in zip((*AGE_BUCKETS, float("inf")), self.ages, strict=True):
            seen += count
            if seen >= wanted:
                return bound
        return float("inf")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Every resource, and the store they share; `store` is None where it could not be asked."""

    resources: dict[str, ResourceStats]
    store: StoreStats | None


@dataclass(frozen=True, slots=True)
class Holding:
    """What a resource has in hand at one moment, by the names of `ResourceStats`."""

    entries: int
    loading: int
    queued: int
    watched: int
    max_batch: int


class Meter:
    """The running counts of one resource."""

    def __init__(self) -> None:
        self.reads = {origin: dict.fromkeys(Verdict, 0) for origin in Origin}
        self.ages = [0] * (len(AGE_BUCKETS) + 1)
        self.loads = self.loaded = self.largest_batch = self.failed = self.absent = 0
        self.coalesced = self.superseded = self.leases_won = self.leases_denied = 0
        self.store_errors = self.puts = 0
        self.slow_reported = False
        self.failing = Failing()

    def read(self, origin: Origin, verdict: Verdict, bucket: int, count: int) -> None:
        """So many answers of this origin, verdict and age went out."""
        self.reads[origin][verdict] += count
        self.ages[bucket] += count

    def batch(self, size: int) -> None:
        """One call of the loader."""
        self.loads += 1
        self.loaded += size
        self.largest_batch = max(self.largest_batch, size)

    def stats(self, now: float, held: Holding) -> ResourceStats:
        """A frozen picture."""
        failing = self.failing.seen(now)
        return ResourceStats(
            reads_by_origin={origin: dict(reads) for origin, reads in self.reads.items()},
            ages=tuple(self.ages),
            loads=self.loads,
            loaded=self.loaded,
            largest_batch=self.largest_batch,
            failed=self.failed,
            absent=self.absent,
            coalesced=self.coalesced,
            puts=self.puts,
            superseded=self.superseded,
            leases_won=self.leases_won,
            leases_denied=self.leases_denied,
            store_errors=self.store_errors,
            entries=held.entries,
            loading=held.loading,
            queued=held.queued,
            watched=held.watched,
            failing=failing.count,
            retry_at=failing.retry_at,
            error=failing.error,
            max_batch=held.max_batch,
        )
