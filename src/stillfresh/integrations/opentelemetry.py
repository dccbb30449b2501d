"""OpenTelemetry: a span for each load, step of the store and render, and metrics.

```python
telemetry = TelemetryHook()
cache = Cache("sqlite:///app.db", hooks=[telemetry])
telemetry.observe(cache)
```

Needs `stillfresh[opentelemetry]`.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Final

from stillfresh.engine import COUNTERS, GAUGES, Cache, CacheStats, Span
from stillfresh.errors import error_text, needs
from stillfresh.sync import SyncCache

with needs("opentelemetry", "stillfresh.integrations.opentelemetry"):
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context, attach, detach, get_current
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TracerProvider

__all__ = ["TelemetryHook"]

NAME: Final = "stillfresh"
COUNTED_EVERY: Final = 0.5
"""Seconds for which counts are reused, so that one collection shows one moment."""


class TelemetryHook:
    """A hook for `hooks=`: spans by your tracer, durations by your meter.

    Without providers it uses the global ones. A load that a caller waits for is a child of that
    caller's span, and linked to the spans of the other callers. A refresh in the background is a
    root, linked to the span of the caller that was served the stale copy.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        release = version(NAME)
        self._tracer = trace.get_tracer(NAME, release, tracer_provider)
        self._meter = metrics.get_meter(NAME, release, meter_provider)
        self._seconds = {
            "load": self._histogram("load", "Time that the loader took."),
            "store": self._histogram("store", "Time that a step of the store took."),
            "render": self._histogram("render", "Time that the app took to render a page."),
        }

    def _histogram(self, what: str, text: str) -> metrics.Histogram:
        return self._meter.create_histogram(f"{NAME}.{what}.duration", "s", text)

    @contextmanager
    def __call__(self, span: Span) -> Iterator[None]:
        parent, links = _place(span)
        attributes = {"stillfresh.kind": span.kind}
        if span.step:
            attributes["stillfresh.step"] = span.step
        kind = SpanKind.CLIENT if span.what == "store" else SpanKind.INTERNAL
        name = " ".join(filter(None, (NAME, span.step or span.what, span.kind)))
        otel_span = self._tracer.start_span(name, parent, kind, {**attributes}, links)
        otel_span.set_attribute("stillfresh.keys", len(span.keys))
        token = attach(trace.set_span_in_context(otel_span, parent))
        try:
            yield
        finally:
            detach(token)
            if span.verdict is not None:
                attributes[f"{NAME}.verdict"] = str(span.verdict)
            if span.origin is not None:
                attributes[f"{NAME}.origin"] = str(span.origin)
            otel_span.set_attributes({**attributes})
            if span.status is not None:
                otel_span.set_attribute("http.response.status_code", span.status)
            if span.error is not None:
                otel_span.record_exception(span.error)
                otel_span.set_status(Status(StatusCode.ERROR, error_text(span.error)))
            otel_span.end()
            self._seconds[span.what].record(span.seconds, {**attributes})

    def observe(self, cache: Cache | SyncCache) -> None:
        """Give the counts of `cache.stats()` to the meter, as `stillfresh.reads` and the others.

        Once for each cache. The names of the resources of all caches have to differ.
        """
        recent = _RecentCounts(cache.counts)
        counter = self._meter.create_observable_counter
        gauge = self._meter.create_observable_gauge
        counter(f"{NAME}.reads", [recent.reads], description="Reads by origin and verdict.")
        for name, what in COUNTERS:
            counter(f"{NAME}.{name}", [recent.of(name)], description=what)
        for name, what in GAUGES:
            gauge(f"{NAME}.{name}", [recent.of(name)], description=what)


class _RecentCounts:
    """The counts of a cache, as several instruments ask for them at once."""

    def __init__(self, count: Callable[[], CacheStats]) -> None:
        self._count = count
        self._due = float("-inf")

    def stats(self) -> CacheStats:
        now = time.monotonic()
        if now >= self._due:
            self._stats = self._count()
            self._due = now + COUNTED_EVERY
        return self._stats

    def reads(self, options: CallbackOptions) -> Iterable[Observation]:
        del options
        for kind, counts in self.stats().resources.items():
            for origin, reads in counts.reads_by_origin.items():
                for verdict, count in reads.items():
                    attributes = {
                        f"{NAME}.kind": kind,
                        f"{NAME}.origin": str(origin),
                        f"{NAME}.verdict": str(verdict),
                    }
                    yield Observation(count, attributes)

    def of(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            del options
            for kind, counts in self.stats().resources.items():
                yield Observation(getattr(counts, name), {f"{NAME}.kind": kind})

        return observe


def _place(span: Span) -> tuple[Context | None, list[Link]]:
    """The parent's context, and links. None: the current span, as for the steps of a load."""
    if trace.get_current_span().get_span_context().is_valid:
        return None, []
    callers: list[tuple[Context, trace.SpanContext]] = []
    for caller in span.callers:
        context = caller.run(get_current)
        caller_span = trace.get_current_span(context).get_span_context()
        if caller_span.is_valid:
            callers.append((context, caller_span))
    if not span.is_waited:
        return Context(), [Link(caller_span) for _, caller_span in callers]
    parent = callers[0][0] if callers else Context()
    return parent, [Link(caller_span) for _, caller_span in callers[1:]]
