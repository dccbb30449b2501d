"""G14, G15: how long loads and steps of the store take, and what hooks are told of them."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from typing import Any

import pytest

from stillfresh import (
    Cache,
    ConfigError,
    Hook,
    LoadFailed,
    Origin,
    Span,
    StoreError,
    SyncCache,
    Verdict,
    prometheus_text,
)
from stillfresh.engine.load import Load
from stillfresh.engine.rules import AGE_BUCKETS
from stillfresh.engine.spans import TIME_BUCKETS, Stopwatch, Timing, load_span, noted
from stillfresh.engine.work import Work
from stillfresh.pages import PageCache
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Prices, Sleeper, Upstream, declare, idle, until
from tests.kit.held_store import SteppedStore
from tests.kit.isr import Site

WHO: ContextVar[str] = ContextVar("who", default="nobody")
INSIDE: ContextVar[str] = ContextVar("inside", default="nothing")


class Ears:
    """A hook that keeps its spans as they end, and notes what is under way around each."""

    def __init__(self) -> None:
        self.ended: list[Span] = []
        self.around: dict[str, str] = {}

    @contextmanager
    def __call__(self, span: Span) -> Iterator[None]:
        name = f"{span.what} {span.step}".strip()
        self.around[name] = INSIDE.get()
        token = INSIDE.set(name)
        yield
        INSIDE.reset(token)
        self.ended.append(span)

    def told(self, what: str) -> list[Span]:
        return [span for span in self.ended if span.what == what]


@pytest.fixture
def ears() -> Ears:
    return Ears()


@pytest.fixture
def heard(store: SteppedStore, clock: ManualClock, sleeper: Sleeper, ears: Ears) -> Cache:
    """A cache on a store over a network, with that hook."""
    return Cache(store, clock=clock, sleep=sleeper, hooks=[ears])


class TestG14Times:
    @pytest.mark.parametrize("bounds", [AGE_BUCKETS, TIME_BUCKETS])
    def test_the_bounds_of_a_histogram_ascend(self, bounds: tuple[float, ...]) -> None:
        """G13, G14: a time is counted under the first bound that is not below it."""
        assert list(bounds) == sorted(set(bounds))

    async def test_the_loader_and_each_step_are_timed(
        self, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each in its bucket, with the sum; in `stats()` and as Prometheus reads it."""
        ticks = ManualClock()
        for module in ("spans", "load"):
            monkeypatch.setattr(f"stillfresh.engine.{module}.ticks", ticks)

        class Slow(SteppedStore):
            async def publish(self, *args: Any, **options: Any) -> set[str]:
                ticks.advance(0.5)
                return await super().publish(*args, **options)

        async with Cache(Slow(MemoryStore(clock=clock)), clock=clock) as cache:

            @cache.cached("price", fresh_for=60)
            async def price(sku: str) -> str:
                ticks.advance(2)
                return sku

            await price("a")
            await price("b")
            stats = await cache.stats()
        loads, publishes = stats.resources["price"].load_seconds, stats.store_seconds["publish"]
        bounds = [*TIME_BUCKETS, float("inf")]
        assert {bounds[at]: count for at, count in enumerate(loads.counts) if count} == {3: 2}
        assert {bounds[at]: count for at, count in enumerate(publishes.counts) if count} == {1: 2}
        assert (loads.seconds, publishes.seconds) == (4, 1)
        assert stats.store_seconds.keys() == {"read", "acquire", "publish"}
        text = prometheus_text(stats).splitlines()
        for line in (
            "# TYPE stillfresh_load_seconds histogram",
            'stillfresh_load_seconds_bucket{resource="price",le="1"} 0',
            'stillfresh_load_seconds_bucket{resource="price",le="3"} 2',
            'stillfresh_load_seconds_bucket{resource="price",le="+Inf"} 2',
            'stillfresh_load_seconds_sum{resource="price"} 4.000000',
            'stillfresh_load_seconds_count{resource="price"} 2',
            'stillfresh_store_seconds_bucket{step="publish",le="0.3"} 0',
            'stillfresh_store_seconds_sum{step="publish"} 1.000000',
            'stillfresh_store_seconds_count{step="publish"} 2',
        ):
            assert line in text

    async def test_what_fails_is_timed_too(self, clock: ManualClock) -> None:
        """A load that raises, and a step that the store fails."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with Cache(store, clock=clock) as cache:
            prices = declare(cache, upstream := Upstream())
            upstream.error = OSError("down")
            store.broken = {"invalidate"}
            with pytest.raises(LoadFailed):
                await prices("a")
            with pytest.raises(StoreError):
                await prices.invalidate("a")
            stats = await cache.stats()
        assert sum(stats.resources["price"].load_seconds.counts) == 1
        assert sum(stats.store_seconds["invalidate"].counts) == 1

    async def test_a_hit_is_not_timed(self, cache: Cache, prices: Prices, url: str) -> None:
        """Whether memory answers it or a row that is read on the spot."""
        await prices("a")
        before = (await cache.stats()).store_seconds
        for _ in range(5):
            await prices("a")
        if not url.startswith("redis"):
            assert (await cache.stats()).store_seconds == before

    async def test_memory_is_timed_for_hooks_only(self, clock: ManualClock, ears: Ears) -> None:
        """Its steps wait for nothing, and a stopwatch would take as long as they do."""
        for hooks, steps in ([], set()), ([ears], {"read", "acquire", "publish", "delete"}):
            async with Cache("memory://", clock=clock, hooks=hooks) as cache:
                prices = declare(cache, Upstream())
                await prices("a")
                await prices.delete("a")
                stats = await cache.stats()
            assert sum(stats.resources["price"].load_seconds.counts) == 1
            assert stats.store_seconds.keys() == steps

    async def test_times_stay_when_the_cache_is_opened_again(self, clock: ManualClock) -> None:
        """They count since the cache was made, as all counters do."""
        cache = Cache(SteppedStore(MemoryStore(clock=clock)), clock=clock)
        prices = declare(cache, Upstream())
        for opened in (1, 2):
            async with cache:
                await prices("a")
                assert sum((await cache.stats()).store_seconds["acquire"].counts) == opened


class TestG15Hooks:
    async def test_a_hook_is_told_of_a_load_and_its_steps(self, heard: Cache, ears: Ears) -> None:
        """Each is told with its kind, keys and outcome; the steps and the loader are inside."""
        inside = []

        async with heard:

            @heard.batched("price", fresh_for=30)
            async def prices(skus: list[str]) -> dict[str, int]:
                inside.append(INSIDE.get())
                return {sku: 1 for sku in skus if sku != "none"}

            await prices.get_many(["a", "none"])
        [load] = ears.told("load")
        assert (load.kind, load.keys, load.is_waited) == ("price", ["a", "none"], True)
        assert (load.verdict, load.origin, load.error) == (Verdict.FRESH, Origin.LOADED, None)
        steps = [(span.step, span.kind, span.keys) for span in ears.told("store")]
        assert steps == [(step, "price", ["a", "none"]) for step in ("read", "acquire", "publish")]
        assert all(span.seconds > 0 for span in ears.ended)
        assert inside == ["load"]
        assert ears.around == {
            "store read": "nothing",
            "load": "nothing",
            "store acquire": "load",
            "store publish": "load",
        }
        assert INSIDE.get() == "nothing"

    async def test_a_hook_is_not_told_of_a_hit(
        self, url: str, clock: ManualClock, ears: Ears
    ) -> None:
        """No hook is called, whether memory or a row that is read on the spot answers."""
        async with Cache(url, clock=clock, hooks=[ears]) as cache:
            prices = declare(cache, Upstream(), memory_for="10s")
            await prices("a")
            await until(lambda: bool(ears.told("load")))
            before = len(ears.ended)
            for _ in range(5):
                await prices("a")
        assert len(ears.ended) == before

    async def test_a_hook_is_told_of_a_load_that_fails(self, heard: Cache, ears: Ears) -> None:
        """GONE, with what the loader raised."""
        async with heard:
            prices = declare(heard, upstream := Upstream())
            upstream.error = OSError("down")
            with pytest.raises(LoadFailed):
                await prices("a")
        [load] = ears.told("load")
        assert (load.verdict, load.origin) == (Verdict.GONE, Origin.LOADED)
        assert load.error is upstream.error

    async def test_a_load_that_was_overtaken_is_stale(self, heard: Cache, ears: Ears) -> None:
        """As its caller is told."""
        async with heard:
            prices = declare(heard, upstream := Upstream())
            task = await upstream.holding(prices.get("a"))
            await prices.invalidate("a")
            upstream.let_go()
            assert (await task).verdict is Verdict.STALE
            await idle(heard)
        assert [load.verdict for load in ears.told("load")] == [Verdict.STALE, Verdict.FRESH]

    async def test_a_hook_is_told_of_a_load_of_another_process(
        self, heard: Cache, store: SteppedStore, ears: Ears, sleeper: Sleeper, clock: ManualClock
    ) -> None:
        """This one waits for it, which is a load of that origin."""
        upstream = Upstream()
        async with heard, Cache(store.inner, clock=clock) as there:
            prices, theirs = declare(heard, upstream), declare(there, upstream)
            other = await upstream.holding(theirs.get("a"))
            mine = asyncio.create_task(prices.get("a"))
            await until(lambda: bool(sleeper.asked))
            upstream.let_go()
            await other
            sleeper.wake()
            assert (await mine).origin is Origin.ANOTHER
        *_, load = ears.told("load")
        assert (load.verdict, load.origin) == (Verdict.FRESH, Origin.ANOTHER)

    async def test_a_hook_is_told_of_the_callers_that_wait(self, heard: Cache, ears: Ears) -> None:
        """The contexts of all of them, as they were; the load runs in none of them."""
        seen = []

        async def read(prices: Prices, who: str) -> None:
            WHO.set(who)
            await prices.get("a")
            WHO.set("later")

        async with heard:
            upstream = Upstream()

            @heard.batched("price", fresh_for=30)
            async def prices(skus: list[str]) -> dict[str, Price]:
                seen.append(WHO.get())
                return dict(await upstream(skus))

            upstream.hold()
            first = asyncio.create_task(read(prices, "one"))
            await until(lambda: heard.counts().resources["price"].queued == 1)
            second = asyncio.create_task(read(prices, "two"))
            await until(lambda: heard.counts().resources["price"].coalesced == 1)
            upstream.let_go()
            await asyncio.gather(first, second)
        [load], reads = ears.told("load"), ears.told("store")
        assert load.callers[0][WHO] == "one"
        assert reads[0].step == "read"
        assert [caller[WHO] for caller in reads[0].callers] == ["one"]
        assert seen == ["nobody"]

    async def test_a_hook_is_told_of_a_refresh_behind_a_stale_answer(
        self, heard: Cache, ears: Ears, clock: ManualClock
    ) -> None:
        """Nobody waits for it; the caller that was served is named."""
        async with heard:
            prices = declare(heard, Upstream())
            await prices("a")
            clock.advance(30)
            WHO.set("reader")
            assert (await prices.get("a")).verdict is Verdict.STALE
            await idle(heard)
        load = ears.told("load")[-1]
        assert not load.is_waited
        assert [caller[WHO] for caller in load.callers] == ["reader"]

    async def test_a_watch_waits_for_no_load(
        self, heard: Cache, ears: Ears, clock: ManualClock
    ) -> None:
        """Its refreshes are nobody's."""
        async with heard:
            prices = declare(heard, Upstream())
            WHO.set("viewer")
            with prices.watch("a") as watch:
                await anext(watch)
        assert [(load.is_waited, load.callers) for load in ears.told("load")] == [(False, ())]

    async def test_the_hourly_sweep_is_nobodys(
        self, heard: Cache, ears: Ears, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It goes on long after the request whose read has opened the cache."""
        monkeypatch.setattr("stillfresh.engine.lifecycle.EVICT_EVERY", 0)
        INSIDE.set("request")
        await declare(heard, Upstream())("a")
        await until(lambda: "store evict" in ears.around)
        await heard.close()
        assert ears.around["store evict"] == "nothing"

    async def test_loads_at_once_do_not_mix(self, ears: Ears, clock: ManualClock) -> None:
        """What a hook sets for one is not seen by the other, nor left behind."""
        seen, names = [], iter(["one", "two"])

        @contextmanager
        def named(span: Span) -> Iterator[None]:
            if span.what == "load":
                WHO.set(next(names))
            yield

        async with Cache("memory://", clock=clock, hooks=[named]) as cache:

            @cache.cached("price", fresh_for=30)
            async def price(sku: str) -> str:
                await asyncio.sleep(0)
                seen.append(WHO.get())
                return sku

            await asyncio.gather(price("a"), price("b"))
        assert sorted(seen) == ["one", "two"]
        assert WHO.get() == "nobody"

    async def test_a_hook_is_told_of_loads_past_the_cache(self, heard: Cache, ears: Ears) -> None:
        """A load inside `bypassed()` is told, without any step of the store."""
        async with heard:
            prices = declare(heard, Upstream())
            with heard.bypassed():
                await prices("a")
        assert [(it.what, it.verdict, it.origin) for it in ears.ended] == [
            ("load", Verdict.FRESH, Origin.LOADED)
        ]

    async def test_a_hook_that_raises_is_logged(
        self, ears: Ears, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """When it is called, as its block begins or ends: the read, and the other hooks, go on."""

        def calling(span: Span) -> AbstractContextManager[None]:
            raise OSError(f"called: {span.what}")

        @contextmanager
        def beginning(span: Span) -> Iterator[None]:
            raise OSError(f"begun: {span.what}")
            yield

        @contextmanager
        def ending(span: Span) -> Iterator[None]:
            yield
            raise OSError(f"ended: {span.what}")

        @contextmanager
        def ending_cancelled(span: Span) -> Iterator[None]:
            yield
            raise asyncio.CancelledError(f"cancelled: {span.what}")

        hooks: list[Hook] = [calling, beginning, ending, ending_cancelled, ears]
        with caplog.at_level(logging.ERROR, logger="stillfresh"):
            async with Cache("memory://", clock=clock, hooks=hooks) as cache:
                assert (await declare(cache, Upstream())("a")).version == 1
        assert ears.told("load")
        for what in ("OSError: called", "OSError: begun", "OSError: ended", "Error: cancelled"):
            for of in ("load", "store"):
                assert f"{what}: {of}" in caplog.text

    def test_the_error_is_told_and_not_thrown(self, clock: ManualClock) -> None:
        """A hook needs no `try`: its block ends the same way if the work has failed."""
        told = []

        @contextmanager
        def hook(span: Span) -> Iterator[None]:
            yield
            told.append((span.what, type(span.error)))

        store = SteppedStore(MemoryStore(clock=clock))
        store.broken = {"invalidate"}

        async def run() -> None:
            async with Cache(store, clock=clock, hooks=[hook]) as cache:
                with pytest.raises(StoreError):
                    await declare(cache, Upstream()).invalidate("a")

        asyncio.run(run())
        assert told == [("store", StoreError)]

    @pytest.mark.parametrize("hooks", ["hook", nullcontext, {"a": 1}, [1], [None]])
    def test_hooks_that_are_no_list_are_refused(self, hooks: Any) -> None:
        """Is refused by a sentence."""
        with pytest.raises(ConfigError, match="hook"):
            Cache("memory://", hooks=hooks)


class TestG15Threads:
    def test_a_def_loader_is_inside_its_load(self, ears: Ears, clock: ManualClock) -> None:
        """In the thread that waits, and in the pool; that thread's own context comes back."""
        inside = []
        with SyncCache("memory://", clock=clock, hooks=[ears]) as cache:

            @cache.cached("price", fresh_for=30, stale_for=30)
            def price(sku: str) -> str:
                inside.append((INSIDE.get(), WHO.get()))
                return sku

            def read() -> None:
                WHO.set("thread")
                price("a")
                assert INSIDE.get() == "nothing"

            copy_context().run(read)
            clock.advance(30)
            copy_context().run(read)
            while cache.stats().resources["price"].loading:
                pass
        assert inside == [("load", "thread"), ("load", "nobody")]
        first, behind = ears.told("load")
        assert (first.callers[0][WHO], first.is_waited) == ("thread", True)
        assert (behind.callers[0][WHO], behind.is_waited) == ("thread", False)


class TestG15Render:
    async def test_a_render_is_inside_its_load(self, ears: Ears, clock: ManualClock) -> None:
        """With the path, the app's status, and whether the page is kept."""
        site = Site(clock)
        async with PageCache("memory://", clock=clock, hooks=[ears]) as pages:
            await pages.get("/a", site.render, revalidate=60)
            site.says("Cache-Control: private")
            await pages.get("/b", site.render, revalidate=60)
            site.error = OSError("down")
            with pytest.raises(OSError, match="down"):
                await pages.get("/c", site.render, revalidate=60)
        told = [(it.keys, it.kind, it.status, it.verdict, it.error) for it in ears.told("render")]
        assert told == [
            (["/a"], "page", 200, Verdict.FRESH, None),
            (["/b"], "page", 200, Verdict.GONE, None),
            (["/c"], "page", None, None, site.error),
        ]
        assert ears.around["render"] == "load"


class TestG14Stopwatch:
    def test_a_time_on_a_bound_belongs_below_it(self) -> None:
        """As Prometheus counts; above all bounds there is a last bucket."""
        watch = Stopwatch()
        for seconds in (0.0, 0.0001, 0.0002, 30, 31):
            watch.note(seconds)
        timing = watch.timing()
        assert timing.counts == (2, 1, *[0] * 9, 1, 1)
        assert timing.seconds == pytest.approx(61.0003)
        both = timing + Timing((1,) * len(timing.counts), 2.0)
        assert both.counts == (3, 2, *[1] * 9, 2, 2)
        assert both.seconds == pytest.approx(63.0003)

    async def test_a_load_of_no_keys_has_no_span(self, ears: Ears, prices: Prices) -> None:
        """All its callers have left; and without hooks no span is made."""
        await prices("a")
        load: Load[str, Price] = Load(prices.core.loads, [Work("a", "a")])
        empty: Load[str, Price] = Load(prices.core.loads, [])
        with load_span([ears], "price", empty), load_span([], "price", load):
            pass
        assert (ears.ended, load.span) == ([], None)
        with load_span([ears], "price", load):
            pass
        assert ears.ended == [load.span]

    def test_a_span_has_the_worst_verdict_and_the_last_error(self) -> None:
        """Of all keys of its load; without hooks there is no span."""
        span, error = Span("load", "price", ["a"], "", (), is_waited=True), ValueError("x")
        assert (span.seconds, span.verdict, span.origin) == (0.0, None, None)
        assert (span.status, span.error) == (None, None)
        seen = []
        for verdict, raised in (
            (Verdict.STALE, None),
            (Verdict.FRESH, None),
            (Verdict.GONE, error),
            (Verdict.EXPIRED, None),
        ):
            noted(span, verdict, raised)
            seen.append((span.verdict, span.error))
        assert seen == [
            (Verdict.STALE, None),
            (Verdict.STALE, None),
            (Verdict.GONE, error),
            (Verdict.GONE, error),
        ]
        noted(None, Verdict.GONE, error)
