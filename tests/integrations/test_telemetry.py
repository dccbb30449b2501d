"""G15: the spans and metrics of OpenTelemetry, and a collector for prometheus-client's registry."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stillfresh import Cache, ConfigError, LoadFailed, SyncCache, Verdict, prometheus_text
from stillfresh.engine import CacheStats
from stillfresh.integrations.opentelemetry import TelemetryHook
from stillfresh.integrations.prometheus import CacheCollector
from stillfresh.pages import PageCache
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Upstream, declare, idle, until
from tests.kit.held_store import SteppedStore
from tests.kit.isr import Site


class Telemetry:
    """The SDK, with exporters in memory."""

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracing = TracerProvider()
        self.tracing.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.metering = MeterProvider([self.reader])
        self.tracer = self.tracing.get_tracer("test")
        self.hook = TelemetryHook(self.tracing, self.metering)

    def ended(self) -> dict[str, list[ReadableSpan]]:
        found: dict[str, list[ReadableSpan]] = {}
        for span in self.exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found

    def points(self) -> dict[str, list[Any]]:
        data = self.reader.get_metrics_data()
        assert data is not None
        [scope] = data.resource_metrics[0].scope_metrics
        return {it.name: list(it.data.data_points) for it in scope.metrics}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1_700_000_000.0)


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    telemetry = Telemetry()
    yield telemetry
    telemetry.tracing.shutdown()
    telemetry.metering.shutdown()


@pytest.fixture
def cache(clock: ManualClock, telemetry: Telemetry) -> Cache:
    """Over a network, so that reads of the store have callers too."""
    return Cache(SteppedStore(MemoryStore(clock=clock)), clock=clock, hooks=[telemetry.hook])


def said(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("stillfresh."): it for name, it in (span.attributes or {}).items()}


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    found: int = span.context.span_id
    return found


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


class TestG15OpenTelemetry:
    async def test_a_load_is_a_child_span_of_its_waiting_caller(
        self, cache: Cache, telemetry: Telemetry
    ) -> None:
        """Is a child of the caller's span; its steps and the loader's spans are its children."""
        async with cache:

            @cache.cached("price", fresh_for=30)
            async def price(sku: str) -> str:
                with telemetry.tracer.start_as_current_span("upstream"):
                    return sku

            with telemetry.tracer.start_as_current_span("request") as request:
                await price("a")
            await until(lambda: "stillfresh load price" in telemetry.ended())
        spans = {name: span for name, [span] in telemetry.ended().items()}
        load, caller = spans["stillfresh load price"], request.get_span_context().span_id
        assert parent_of(load) == parent_of(spans["stillfresh read price"]) == caller
        for name in ("stillfresh acquire price", "upstream", "stillfresh publish price"):
            assert parent_of(spans[name]) == id_of(load)
        assert said(load) == {"kind": "price", "keys": 1, "verdict": "fresh", "origin": "loaded"}
        assert said(spans["stillfresh publish price"]) == {
            "kind": "price",
            "step": "publish",
            "keys": 1,
        }

    async def test_further_callers_of_a_load_are_linked_to_its_span(
        self, cache: Cache, telemetry: Telemetry
    ) -> None:
        """The first is the parent, the others are linked."""
        callers = []

        async def read(prices: Any) -> None:
            with telemetry.tracer.start_as_current_span("request") as request:
                callers.append(request.get_span_context().span_id)
                await prices.get("a")

        async with cache:
            prices = declare(cache, Upstream())
            await asyncio.gather(read(prices), read(prices))
            await until(lambda: "stillfresh load price" in telemetry.ended())
        [load] = telemetry.ended()["stillfresh load price"]
        assert parent_of(load) == callers[0]
        assert [link.context.span_id for link in load.links] == callers[1:]

    async def test_a_background_refresh_is_a_root_span_linked_to_its_caller(
        self, cache: Cache, telemetry: Telemetry, clock: ManualClock
    ) -> None:
        """Is a root, linked to the span of the caller that was served the stale copy."""
        async with cache:
            prices = declare(cache, Upstream())
            await prices("a")
            clock.advance(30)
            with telemetry.tracer.start_as_current_span("request") as request:
                assert (await prices.get("a")).verdict is Verdict.STALE
            await idle(cache)
            await until(lambda: len(telemetry.ended()["stillfresh load price"]) == 2)
        *_, load = telemetry.ended()["stillfresh load price"]
        context = request.get_span_context()
        assert load.parent is None
        assert [link.context.span_id for link in load.links] == [context.span_id]
        assert load.context is not None
        assert load.context.trace_id != context.trace_id

    async def test_a_failed_load_has_an_error_span(
        self, cache: Cache, telemetry: Telemetry
    ) -> None:
        """Has the status of an error, and what the loader raised."""
        async with cache:
            prices = declare(cache, upstream := Upstream())
            upstream.error = OSError("down")
            with pytest.raises(LoadFailed):
                await prices("a")
            await until(lambda: "stillfresh load price" in telemetry.ended())
        [load] = telemetry.ended()["stillfresh load price"]
        assert (load.status.status_code, load.status.description) == (
            StatusCode.ERROR,
            "OSError: down",
        )
        assert [event.name for event in load.events] == ["exception"]
        assert said(load)["verdict"] == "gone"

    async def test_a_render_span_is_inside_the_load_of_its_page(
        self, telemetry: Telemetry, clock: ManualClock
    ) -> None:
        """Is inside the load of its page, with the app's status."""
        async with PageCache("memory://", clock=clock, hooks=[telemetry.hook]) as pages:
            await pages.get("/a", Site(clock).render, revalidate=60)
            await until(lambda: "stillfresh load page" in telemetry.ended())
        [render] = telemetry.ended()["stillfresh render page"]
        assert parent_of(render) == id_of(telemetry.ended()["stillfresh load page"][0])
        assert said(render)["http.response.status_code"] == 200
        assert (said(render)["verdict"], said(render)["origin"]) == ("fresh", "loaded")

    def test_a_def_loaders_span_is_inside_the_load_span(
        self, telemetry: Telemetry, clock: ManualClock
    ) -> None:
        """Request, load, the loader's own span: each inside the one before."""
        with SyncCache("memory://", clock=clock, hooks=[telemetry.hook]) as cache:

            @cache.cached("price", fresh_for=30)
            def price(sku: str) -> str:
                with telemetry.tracer.start_as_current_span("upstream"):
                    return sku

            with telemetry.tracer.start_as_current_span("request") as request:
                price("a")
                assert trace.get_current_span() is request
        [load] = telemetry.ended()["stillfresh load price"]
        assert parent_of(load) == request.get_span_context().span_id
        assert parent_of(telemetry.ended()["upstream"][0]) == id_of(load)

    async def test_durations_and_counts_are_observed_by_the_users_meter(
        self, cache: Cache, telemetry: Telemetry
    ) -> None:
        """Histograms by the hook; what `stats()` counts by instruments that are observed."""
        async with cache:
            telemetry.hook.observe(cache)
            prices = declare(cache, Upstream())
            await prices("a")
            await until(lambda: "stillfresh load price" in telemetry.ended())
            points = await asyncio.to_thread(telemetry.points)
        [load] = points["stillfresh.load.duration"]
        assert load.count == 1
        assert dict(load.attributes) == {
            "stillfresh.kind": "price",
            "stillfresh.verdict": "fresh",
            "stillfresh.origin": "loaded",
        }
        steps = {it.attributes["stillfresh.step"] for it in points["stillfresh.store.duration"]}
        assert steps == {"read", "acquire", "publish"}
        assert [it.value for it in points["stillfresh.loads"]] == [1]
        reads = {
            (it.attributes["stillfresh.origin"], it.attributes["stillfresh.verdict"]): it.value
            for it in points["stillfresh.reads"]
        }
        assert {named: count for named, count in reads.items() if count} == {("loaded", "fresh"): 1}


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class TestG15Prometheus:
    async def test_the_collector_yields_every_sample_of_the_text(self, clock: ManualClock) -> None:
        """Every sample of `prometheus_text`, by its name, labels and value."""
        async with Cache("memory://", clock=clock) as cache:
            prices = declare(cache, Upstream())
            registry = CollectorRegistry(auto_describe=True)
            registry.register(CacheCollector(cache))
            await prices("a")
            for _ in range(3):
                await prices("a")
            found = samples(generate_latest(registry).decode())
            assert found == samples(prometheus_text(await cache.stats()))
        hits = frozenset({"resource": "price", "origin": "memory", "verdict": "fresh"}.items())
        assert found["stillfresh_reads_total", hits] == 3

    async def test_the_collector_works_from_another_thread(self, clock: ManualClock) -> None:
        """As prometheus-client's own server collects: the loop counts, the thread waits."""
        async with Cache("memory://", clock=clock) as cache:
            counted_in = []
            declare(cache, Upstream())
            counted = cache.counted

            def noted() -> CacheStats:
                counted_in.append(threading.current_thread())
                return counted()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cache, "counted", noted)
                await asyncio.to_thread(list, CacheCollector(cache).collect())
        assert counted_in == [threading.main_thread()]

    def test_the_collector_takes_closed_and_sync_caches(self, clock: ManualClock) -> None:
        """Can be collected from before, while and after they are open; several are one."""
        stores = [SteppedStore(MemoryStore(clock=clock)) for _ in range(2)]
        one, other = Cache(stores[0], clock=clock), SyncCache(stores[1], clock=clock)

        @one.cached("a", fresh_for=1)
        async def a(n: int) -> int:
            return n

        @other.cached("b", fresh_for=1)
        def b(n: int) -> int:
            return n

        collector = CacheCollector(one, other)
        registry = CollectorRegistry(auto_describe=True)
        registry.register(collector)
        asyncio.run(a(1))
        with other:
            b(1)
            text = generate_latest(registry).decode()
        assert 'stillfresh_loads_total{resource="a"} 1.0' in text
        assert 'stillfresh_loads_total{resource="b"} 1.0' in text
        assert 'stillfresh_store_seconds_count{step="publish"} 2.0' in text
        assert 'stillfresh_loads_total{resource="b"} 1.0' in generate_latest(registry).decode()

    def test_the_collector_refuses_anything_but_caches(self) -> None:
        """Is refused by a sentence."""
        nothing: Any = "sqlite:///app.db"
        with pytest.raises(ConfigError, match="takes caches"):
            CacheCollector(nothing)
