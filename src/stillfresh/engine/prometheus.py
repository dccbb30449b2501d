"""`cache.stats()` in Prometheus' text format (E12). Pure: a picture in, text out."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from stillfresh.engine.metrics import CacheStats, ResourceStats
from stillfresh.engine.rules import AGE_BUCKETS

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
)
GAUGES: Final = (
    ("entries", "Decoded values in memory."),
    ("loading", "Keys being loaded or waited for."),
    ("queued", "Keys whose load has not begun."),
    ("watched", "Keys that somebody watches."),
    ("failing", "Keys whose last load failed."),
)


def prometheus_text(stats: CacheStats) -> str:
    """For a `/metrics` page: `prometheus_text(await cache.stats())`."""
    return "".join(f"{line}\n" for line in _lines(stats))


def _lines(stats: CacheStats) -> Iterator[str]:
    resources = stats.resources.items()
    yield from _head("stillfresh_reads_total", "counter", "Reads by origin and verdict.")
    for name, one in resources:
        yield from _reads(name, one)
    for field, what in COUNTERS:
        yield from _head(f"stillfresh_{field}_total", "counter", what)
        for name, one in resources:
            yield f'stillfresh_{field}_total{{resource="{name}"}} {getattr(one, field)}'
    for field, what in GAUGES:
        yield from _head(f"stillfresh_{field}", "gauge", what)
        for name, one in resources:
            yield f'stillfresh_{field}{{resource="{name}"}} {getattr(one, field)}'
    yield from _head("stillfresh_age_seconds", "histogram", "Age at serving.")
    for name, one in resources:
        yield from _histogram(name, one)


def _reads(name: str, one: ResourceStats) -> Iterator[str]:
    """The hit ratio: those of origin memory and store, divided by all."""
    for origin, reads in one.reads_by_origin.items():
        labels = f'resource="{name}",origin="{origin}"'
        for verdict, count in reads.items():
            yield f'stillfresh_reads_total{{{labels},verdict="{verdict}"}} {count}'


def _histogram(name: str, one: ResourceStats) -> Iterator[str]:
    """Without a sum: ages are counted by bucket."""
    bounds = [*(f"{bound:g}" for bound in AGE_BUCKETS), "+Inf"]
    for bound, count in zip(bounds, accumulate(one.ages), strict=True):
        yield f'stillfresh_age_seconds_bucket{{resource="{name}",le="{bound}"}} {count}'
    yield f'stillfresh_age_seconds_count{{resource="{name}"}} {sum(one.ages)}'


def _head(name: str, kind: str, what: str) -> Iterator[str]:
    yield f"# HELP {name} {what}"
    yield f"# TYPE {name} {kind}"
