"""What can be looked into (E12): counts, and why an entry is as it is.

Hits are counted on the entry itself and folded in here when its verdict or its age's bucket
changes, so that a hit costs one addition.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from stillfresh.bounded import BoundedDict
from stillfresh.engine import rules
from stillfresh.engine.model import HITS, Origin
from stillfresh.engine.rules import AGE_BUCKETS, FOR_EVER
from stillfresh.freshness import Verdict, age_of
from stillfresh.stores.contract import Entry, Failure, Mark, Record, StoreStats

MOST_FAILING: Final = 1_000
"""Keys that are remembered as failing; beyond that the oldest are forgotten."""
LONGEST_ERROR: Final = 500  # characters that the counts tell
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
GAUGES: Final = (
    ("entries", "Decoded values in memory."),
    ("bytes", "Bytes that those values take, as they are stored, and a constant for each."),
    ("loading", "Keys being loaded or waited for."),
    ("queued", "Keys whose load has not begun."),
    ("watched", "Keys that somebody watches."),
    ("failing", "Keys whose last load failed."),
)


@dataclass(frozen=True, slots=True)
class ResourceStats:
    """Counts since the cache was made, as `COUNTERS` says, and what `GAUGES` says of now.

    `ages` are reads by age at serving, bucket by bucket.
    """

    reads_by_origin: dict[Origin, dict[Verdict, int]]
    """A read that failed counts as loaded, and GONE."""
    ages: tuple[int, ...]
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
    """When the first of the failing that is left alone may be asked for again."""
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
class Lag:
    """How far a cache is behind a database that says what is stale (`stillfresh.contrib.postgres`).

    Every commit that is more than `seconds` ago has been delivered; past `limit`, it is too far.
    """

    seconds: float
    limit: float


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Every resource, and the store they share; `store` is None where it could not be asked."""

    resources: dict[str, ResourceStats]
    store: StoreStats | None
    lags: dict[str, Lag]
    """By the name of each outbox's consumer."""


class Counts:
    """The running counts of one resource."""

    def __init__(self) -> None:
        self.reads = {origin: dict.fromkeys(Verdict, 0) for origin in Origin}
        self.ages = [0] * (len(AGE_BUCKETS) + 1)
        self.loads = self.loaded = self.largest_batch = self.failed = self.absent = self.puts = 0
        self.coalesced = self.superseded = self.leases_won = self.leases_denied = 0
        self.store_errors = self.evicted_bytes = 0
        self.slow_reported = False
        self.failing: BoundedDict[str, Failure] = BoundedDict(MOST_FAILING)
        """Ids whose last load failed. For people who look at the whole of it: the store alone
        decides about cooldowns (E7)."""

    def failed_with(self, id_: str, failure: Failure) -> None:
        """A key's load failed."""
        self.failed += 1
        self.failing.note(id_, failure)

    def mended(self, ids: Iterable[str]) -> None:
        """They were loaded, or deleted."""
        for id_ in ids:
            self.failing.pop(id_, None)

    def stats(self, now: float, **held: int) -> ResourceStats:
        """A frozen picture, with what the resource holds at this moment by the names there."""
        old = now - rules.LONGEST_COOLDOWN  # nobody asked again, long after it might have been
        self.mended([id_ for id_, it in self.failing.items() if it.retry_at < old])
        failures = list(self.failing.values())
        pauses = [failure.retry_at for failure in failures if failure.retry_at > now]
        counted: dict[str, Any] = {name: getattr(self, name) for name, _ in COUNTERS}
        return ResourceStats(
            reads_by_origin={origin: dict(reads) for origin, reads in self.reads.items()},
            ages=tuple(self.ages),
            failing=len(failures),
            retry_at=min(pauses, default=None),
            error=failures[-1].error[:LONGEST_ERROR] if failures else None,
            largest_batch=self.largest_batch,
            **counted,
            **held,
        )


PAGE = "page"
"""The kind of the page cache's entries: they have words of their own, as RFC 9111 has rules."""

READS = {
    Verdict.FRESH: "a read is served and nothing else happens",
    Verdict.STALE: "a read is served at once, and one refresh begins behind it",
    Verdict.EXPIRED: "a read waits for a load, and gets this copy only if that fails",
    Verdict.GONE: "a read waits for a load, and fails if that fails",
}

COOLING = {
    **READS,
    Verdict.STALE: "a read is served at once, with the error",
    Verdict.EXPIRED: "a read is served at once, with the error",
    Verdict.GONE: "a read fails at once",
}


@dataclass(frozen=True, kw_only=True)
class EntryState:
    """What a record tells of its entry."""

    verdict: Verdict
    """GONE as well where there is no copy: there never was one, or it is being loaded."""
    age: float | None
    fresh_until: float | None
    invalidated: bool
    held_until: float | None
    """Somebody is loading it, here or elsewhere, until then at the latest."""
    failures: int
    retry_at: float | None
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Explanation(EntryState):
    """Why this value, why now, who refreshes it, when."""

    resource: str
    key: object
    loading_here: bool
    in_memory: bool
    text: str
    """The same in a sentence or two."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Listed(EntryState):
    """What `explain` says of one entry, as far as its row tells."""

    kind: str
    id: str
    fetched_at: float | None
    size: int | None
    """Bytes of the value as it is stored; None where there is none, or the store cannot tell."""
    absent: bool
    """Upstream says that there is no such thing."""


def explain(
    resource: str,
    key: object,
    record: Record,
    now: float,
    *,
    loading_here: bool,
    in_memory: bool,
    lease_for: float = FOR_EVER,
) -> Explanation:
    """Everything known about one entry."""
    state = _state(record, now, lease_for)
    record = replace(record, held_until=state.held_until)
    return Explanation(
        **vars(state),
        resource=resource,
        key=key,
        loading_here=loading_here,
        in_memory=in_memory,
        text=_text(resource, key, record, now, state.verdict, loading_here=loading_here),
    )


def _text(
    resource: str, key: object, record: Record, now: float, verdict: Verdict, *, loading_here: bool
) -> str:
    pause = rules.cooling(record.failure, now)
    reads = READS if pause is None else COOLING
    is_page = resource == PAGE
    then = _of_page(record, now, verdict) if is_page else None
    what = _what(record, now, verdict, is_page=is_page)
    parts = [f"{resource} {key!r}: {what}; {then or reads[verdict]}."]
    if loading_here:
        parts.append("It is being loaded by this process.")
    elif record.held_until is not None:
        parts.append(
            f"Another process is loading it, until {record.held_until - now:.1f} s from now."
        )
    if (failure := record.failure) is not None:
        loads = "load" if failure.count == 1 else f"{failure.count} loads"
        left = f"; no load begins for another {failure.retry_at - now:.1f} s" if pause else ""
        parts.append(f"The last {loads} failed ({failure.error}){left}.")
    return " ".join(parts)


def _of_page(record: Record, now: float, verdict: Verdict) -> str | None:
    """RFC 9111 §4.4: what a read of a page does that a read of nothing else does."""
    copy = record.copy
    if copy is None or verdict is Verdict.GONE:
        return None
    if copy.value is None:
        return "each caller is sent a response of its own"
    if copy.mark is not Mark.HARD:
        return None
    if rules.cooling(record.failure, now):
        return "it must be validated before it is served, so a read fails at once"
    return "it must be validated before it is served: a read waits for that, and fails if it fails"


def _what(record: Record, now: float, verdict: Verdict, *, is_page: bool) -> str:
    if (copy := record.copy) is None:
        return "there is no copy"
    absent = "not shared" if is_page else "known to be absent"
    article = "an" if verdict is Verdict.EXPIRED else "a"
    what = absent if copy.value is None else f"{article} {verdict} copy"
    if copy.mark is not Mark.NONE:
        return f"{what}, {age_of(copy.fetched_at, now):.1f} s old, invalidated"
    left = rules.fresh_until(copy) - now
    when = f"fresh for {left:.1f} s more" if left > 0 else f"fresh until {-left:.1f} s ago"
    return f"{what}, {age_of(copy.fetched_at, now):.1f} s old, {when}"


def listed(entries: Iterable[Entry], now: float) -> list[Listed]:
    return [
        Listed(
            **vars(_state(entry.record, now)),
            kind=entry.kind,
            id=entry.id,
            fetched_at=None if (copy := entry.record.copy) is None else copy.fetched_at,
            size=entry.size,
            absent=copy is not None and copy.value is None,
        )
        for entry in entries
    ]


def _state(record: Record, now: float, lease_for: float = FOR_EVER) -> EntryState:
    copy, failure = record.copy, record.failure
    return EntryState(
        verdict=Verdict.GONE if copy is None else rules.verdict_of(copy, now),
        age=None if copy is None else age_of(copy.fetched_at, now),
        fresh_until=None if copy is None else rules.fresh_until(copy),
        invalidated=copy is not None and copy.mark is not Mark.NONE,
        held_until=record.held_until if rules.is_held(record, now, lease_for) else None,
        failures=0 if failure is None else failure.count,
        retry_at=None if failure is None else failure.retry_at,
        error=None if failure is None else failure.error,
    )
