"""OpenTelemetry: a span for each load, step of the store and render, and metrics (G15).

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
        own = version(NAME)
        self._tracer = trace.get_tracer(NAME, own, tracer_provider)
        self._meter = metrics.get_meter(NAME, own, meter_provider)
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
        known = {"stillfresh.kind": span.kind}
        if span.step:
            known["stillfresh.step"] = span.step
        kind = SpanKind.CLIENT if span.what == "store" else SpanKind.INTERNAL
        name = " ".join(filter(None, (NAME, span.step or span.what, span.kind)))
        told = self._tracer.start_span(name, parent, kind, {**known}, links)
        told.set_attribute("stillfresh.keys", len(span.keys))
        token = attach(trace.set_span_in_context(told, parent))
        try:
            yield
        finally:
            detach(token)
            ended = {"verdict": span.verdict, "origin": span.origin}
            known |= {f"{NAME}.{name}": str(it) for name, it in ended.items() if it is not None}
            told.set_attributes({**known})
            if span.status is not None:
                told.set_attribute("http.response.status_code", span.status)
            if span.error is not None:
                told.record_exception(span.error)
                told.set_status(Status(StatusCode.ERROR, error_text(span.error)))
            told.end()
            self._seconds[span.what].record(span.seconds, {**known})

    def observe(self, cache: Cache | SyncCache) -> None:
        """Give the counts of `cache.stats()` to the meter, as `stillfresh.reads` and the others.

        Once for each cache. The names of the resources of all caches have to differ.
        """
        counted = _Recent(cache.counts)
        counter, gauge = self._meter.create_observable_counter, self._meter.create_observable_gauge
        counter(f"{NAME}.reads", [counted.reads], description="Reads by origin and verdict.")
        for name, what in COUNTERS:
            counter(f"{NAME}.{name}", [counted.of(name)], description=what)
        for name, what in GAUGES:
            gauge(f"{NAME}.{name}", [counted.of(name)], description=what)


class _Recent:
    """The counts of a cache, as several instruments ask for them at once."""

    def __init__(self, count: Callable[[], CacheStats]) -> None:
        self._count, self._due = count, float("-inf")

    def stats(self) -> CacheStats:
        if (now := time.monotonic()) >= self._due:
            self._stats, self._due = self._count(), now + COUNTED_EVERY
        return self._stats

    def reads(self, options: CallbackOptions) -> Iterable[Observation]:
        del options
        for kind, one in self.stats().resources.items():
            for origin, reads in one.reads_by_origin.items():
                for verdict, count in reads.items():
                    named = {"kind": kind, "origin": str(origin), "verdict": str(verdict)}
                    yield Observation(count, {f"{NAME}.{it}": of for it, of in named.items()})

    def of(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            del options
            for kind, one in self.stats().resources.items():
                yield Observation(getattr(one, name), {f"{NAME}.kind": kind})

        return observe


def _place(span: Span) -> tuple[Context | None, list[Link]]:
    """The parent's context, and links. None: the current span, as for the steps of a load."""
    if trace.get_current_span().get_span_context().is_valid:
        return None, []
    asked = [caller.run(get_current) for caller in span.callers]
    by = [(it, trace.get_current_span(it).get_span_context()) for it in asked]
    named = [(it, of) for it, of in by if of.is_valid]
    if not span.is_waited:
        return Context(), [Link(of) for _, of in named]
    parent = named[0][0] if named else Context()
    return parent, [Link(of) for _, of in named[1:]]
