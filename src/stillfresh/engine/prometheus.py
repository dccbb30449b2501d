"""The counts of a cache as text for Prometheus (E12, G14). Numbers in, text out."""

import platform
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from itertools import accumulate
from typing import Final

from stillfresh.engine.counts import COUNTERS, GAUGES, CacheStats, Lag, ResourceStats
from stillfresh.engine.rules import AGE_BUCKETS
from stillfresh.engine.spans import TIME_BUCKETS, Timing

OBJECTIVE: Final = (
    ("objective_share", "gauge", "The share of reads that is to meet the objective."),
    ("objective_age_seconds", "gauge", "The age that those reads are to be younger than."),
    ("objective_met_total", "counter", "Reads that met the objective."),
    ("objective_missed_total", "counter", "Reads that were too old for the objective, or failed."),
)


def prometheus_text(stats: CacheStats) -> str:
    """Return statistics in Prometheus' text format: `prometheus_text(await cache.stats())`."""
    return "".join(f"{line}\n" for line in _lines(stats))


def _lines(stats: CacheStats) -> Iterator[str]:
    resources = stats.resources.items()
    yield from _head("build_info", "gauge", "Always 1: which version runs, on which Python.")
    yield f"stillfresh_build_info{{{_build()}}} 1"
    yield from _head("reads_total", "counter", "Reads by origin and verdict.")
    for name, one in resources:
        for origin, reads in one.reads_by_origin.items():
            labels = f'resource="{name}",origin="{origin}"'
            for verdict, count in reads.items():
                yield f'stillfresh_reads_total{{{labels},verdict="{verdict}"}} {count}'
    counters = [(f"{name}_total", "counter", name, what) for name, what in COUNTERS]
    for metric, kind, field, what in [*counters, *((it, "gauge", it, what) for it, what in GAUGES)]:
        yield from _head(metric, kind, what)
        for name, one in resources:
            yield f'stillfresh_{metric}{{resource="{name}"}} {getattr(one, field)}'
    yield from _head("age_seconds", "histogram", "Age at serving.")
    for name, one in resources:
        yield from _histogram(name, one)
    yield from _objective_lines(stats.resources)
    loads = {name: one.load_seconds for name, one in resources}
    yield from _timings("load_seconds", "Time that the loader took.", "resource", loads)
    what = "Time that steps of the store took. Reads of hits and memory:// are not timed."
    yield from _timings("store_seconds", what, "step", stats.store_seconds)
    if stats.lags:
        yield from _lag_lines(stats.lags)


@cache
def _build() -> str:
    return f'version="{version("stillfresh")}",python="{platform.python_version()}"'


def _objective_lines(resources: dict[str, ResourceStats]) -> Iterator[str]:
    told = {
        name: (it.objective.share, it.objective.age, it.objective_met, it.objective_missed)
        for name, it in resources.items()
        if it.objective is not None
    }
    for at, head in enumerate(OBJECTIVE if told else ()):
        yield from _head(*head)
        for name, numbers in told.items():
            yield f'stillfresh_{head[0]}{{resource="{name}"}} {numbers[at]}'


def _lag_lines(lags: dict[str, Lag]) -> Iterator[str]:
    yield from _head("outbox_lag_seconds", "gauge", "Commits that are longer ago were delivered.")
    for name, lag in lags.items():
        yield f'stillfresh_outbox_lag_seconds{{consumer="{name}"}} {lag.seconds:.3f}'


def _histogram(name: str, one: ResourceStats) -> Iterator[str]:
    bounds = [*(f"{bound:g}" for bound in AGE_BUCKETS), "+Inf"]
    for bound, count in zip(bounds, accumulate(one.ages), strict=True):
        yield f'stillfresh_age_seconds_bucket{{resource="{name}",le="{bound}"}} {count}'
    yield f'stillfresh_age_seconds_sum{{resource="{name}"}} {one.age_sum:.3f}'
    yield f'stillfresh_age_seconds_count{{resource="{name}"}} {sum(one.ages)}'


def _timings(metric: str, what: str, label: str, timings: Mapping[str, Timing]) -> Iterator[str]:
    yield from _head(metric, "histogram", what)
    for name, timing in timings.items():
        of = f'{label}="{name}"'
        for bound, count in zip((*TIME_BUCKETS, "+Inf"), accumulate(timing.counts), strict=True):
            yield f'stillfresh_{metric}_bucket{{{of},le="{bound}"}} {count}'
        yield f"stillfresh_{metric}_sum{{{of}}} {timing.seconds:.6f}"
        yield f"stillfresh_{metric}_count{{{of}}} {sum(timing.counts)}"


def _head(name: str, kind: str, what: str) -> Iterator[str]:
    yield f"# HELP stillfresh_{name} {what}"
    yield f"# TYPE stillfresh_{name} {kind}"
