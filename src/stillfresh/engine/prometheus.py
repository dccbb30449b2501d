"""The counts of a cache as text for Prometheus. Numbers in, text out."""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Final, TypeVar

from stillfresh.engine.counts import COUNTERS, GAUGES, CacheStats, ResourceStats
from stillfresh.engine.rules import AGE_BUCKETS
from stillfresh.engine.spans import TIME_BUCKETS, Timing

T = TypeVar("T")

OBJECTIVE: Final = (
    ("objective_share", "gauge", "The share of reads that is to meet the objective."),
    ("objective_age_seconds", "gauge", "The age that those reads are to be younger than."),
    ("objective_met_total", "counter", "Reads that met the objective."),
    ("objective_missed_total", "counter", "Reads that were too old for the objective, or failed."),
)
TRUTH: Final = (
    ("checked_total", "counter", "checked", "Reads that were compared with what the loader gave."),
    ("checked_late_total", "counter", "late", "Checked reads that were late, within their terms."),
    ("checked_wrong_total", "counter", "wrong", "Checked reads that were wrong."),
    ("checks_failed_total", "counter", "failed", "Checks in which the loader failed."),
    ("checks_skipped_total", "counter", "skipped", "Checks for which no call was left."),
    ("checks_pending", "gauge", "pending", "Reads that are being checked."),
    ("supported_nines", "gauge", "nines", "-log10 of the 95 % upper bound of wrong / checked."),
)
TRUTH_OBJECTIVE: Final = (
    ("objective_true_share", "share", "The share of reads that is to be true."),
    ("objective_true_within_seconds", "within", "How late those reads may be."),
)


def prometheus_text(stats: CacheStats) -> str:
    """Return statistics in Prometheus' text format: `prometheus_text(await cache.stats())`."""
    return "".join(f"{line}\n" for line in _lines(stats))


def _lines(stats: CacheStats) -> Iterator[str]:
    resources = stats.resources.items()
    what = "Always 1: which version runs, on which Python."
    yield from metric_lines("build_info", "gauge", what, {_build(): 1})
    reads = {
        f'resource="{name}",origin="{origin}",verdict="{verdict}"': count
        for name, resource in resources
        for origin, verdicts in resource.reads_by_origin.items()
        for verdict, count in verdicts.items()
    }
    yield from metric_lines("reads_total", "counter", "Reads by origin and verdict.", reads)
    counters = [(f"{name}_total", "counter", name, what) for name, what in COUNTERS]
    gauges = [(name, "gauge", name, what) for name, what in GAUGES]
    for metric, kind, field, what in [*counters, *gauges]:
        counts = {name: getattr(resource, field) for name, resource in resources}
        yield from metric_lines(metric, kind, what, labelled("resource", counts))
    bounds = [f"{bound:g}" for bound in AGE_BUCKETS]
    ages = {name: (resource.ages, f"{resource.age_sum:.3f}") for name, resource in resources}
    yield from _histogram("age_seconds", "Age at serving.", "resource", bounds, ages)
    yield from _objective_lines(stats.resources)
    yield from _truth_lines(stats.resources)
    loads = {name: resource.load_seconds for name, resource in resources}
    yield from _timings("load_seconds", "Time that the loader took.", "resource", loads)
    what = "Time that steps of the store took. Reads of hits and memory:// are not timed."
    yield from _timings("store_seconds", what, "step", stats.store_seconds)
    if stats.lags:
        what = "Commits that are longer ago were delivered."
        lags = {name: f"{lag.seconds:.3f}" for name, lag in stats.lags.items()}
        yield from metric_lines("outbox_lag_seconds", "gauge", what, labelled("consumer", lags))


@cache
def _build() -> str:
    from importlib.metadata import version  # noqa: PLC0415 (a twelfth of what an import costs)

    return f'version="{version("stillfresh")}",python="{platform.python_version()}"'


def _objective_lines(resources: dict[str, ResourceStats]) -> Iterator[str]:
    figures = {
        name: (
            resource.objective.share,
            resource.objective.age,
            resource.objective_met,
            resource.objective_missed,
        )
        for name, resource in resources.items()
        if resource.objective is not None
    }
    for at, head in enumerate(OBJECTIVE if figures else ()):
        numbers = {name: all_[at] for name, all_ in figures.items()}
        yield from metric_lines(*head, labelled("resource", numbers))


def _truth_lines(resources: dict[str, ResourceStats]) -> Iterator[str]:
    """What checks of reads have shown, for resources that have `check`."""
    checked = {name: of.truth for name, of in resources.items() if of.truth is not None}
    for metric, kind, figure, what in TRUTH if checked else ():
        figures = {name: getattr(truth, figure) for name, truth in checked.items()}
        known = {name: value for name, value in figures.items() if value is not None}
        yield from metric_lines(metric, kind, what, labelled("resource", known))
    objectives = {name: truth.objective for name, truth in checked.items() if truth.objective}
    for metric, figure, what in TRUTH_OBJECTIVE if objectives else ():
        figures = {name: getattr(objective, figure) for name, objective in objectives.items()}
        yield from metric_lines(metric, "gauge", what, labelled("resource", figures))


def _timings(metric: str, what: str, label: str, timings: Mapping[str, Timing]) -> Iterator[str]:
    histograms = {
        name: (timing.counts, f"{timing.seconds:.6f}") for name, timing in timings.items()
    }
    yield from _histogram(metric, what, label, map(str, TIME_BUCKETS), histograms)


def _histogram(
    metric: str,
    what: str,
    label: str,
    bounds: Iterable[str],
    samples: Mapping[str, tuple[Sequence[int], str]],
) -> Iterator[str]:
    """`samples`: the counts between the bounds, and the sum."""
    yield from metric_lines(metric, "histogram", what, {})
    bounds = [*bounds, "+Inf"]
    for of, (counts, total) in labelled(label, samples).items():
        for bound, count in zip(bounds, accumulate(counts), strict=True):
            yield f'stillfresh_{metric}_bucket{{{of},le="{bound}"}} {count}'
        yield f"stillfresh_{metric}_sum{{{of}}} {total}"
        yield f"stillfresh_{metric}_count{{{of}}} {sum(counts)}"


def labelled(label: str, samples: Mapping[str, T]) -> dict[str, T]:
    """Samples by one label, as it is written."""
    return {f'{label}="{name}"': sample for name, sample in samples.items()}


def metric_lines(name: str, kind: str, what: str, samples: Mapping[str, object]) -> Iterator[str]:
    """The lines of one metric; `samples` by their labels, as they are written."""
    yield f"# HELP stillfresh_{name} {what}"
    yield f"# TYPE stillfresh_{name} {kind}"
    for labels, sample in samples.items():
        yield f"stillfresh_{name}{f'{{{labels}}}' if labels else ''} {sample}"
