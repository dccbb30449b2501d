"""C14, E24: `watch` keeps any resource fresh while somebody looks, and tells what came."""

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stillfresh import (
    Cache,
    ConfigError,
    Loaded,
    LoadFailed,
    NotOpen,
    Resource,
    RetryAfter,
    StillfreshError,
    Update,
    Verdict,
)
from stillfresh.engine.lane import LaneState
from stillfresh.engine.model import left_of
from stillfresh.engine.rules import Terms
from stillfresh.engine.watcher import Driver
from stillfresh.freshness import Policy
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Sleeper,
    Upstream,
    declare,
    loading,
    turns,
    until,
    version,
    watcher_of,
)
from tests.kit.held_store import SteppedStore

MANY = [f"sku-{number}" for number in range(10)]
Passes = Callable[..., Awaitable[None]]


async def settled(*resources: Prices) -> None:
    """Until all that is watched waits for its time."""
    await turns()
    for prices in resources:
        await until(partial(is_settled, prices))
    await turns()


def is_settled(prices: Prices) -> bool:
    return loading(prices) == 0 and are_waiting(prices, *watcher_of(prices).lane.subscribed)


def are_waiting(prices: Resource[str, Any], *keys: str) -> bool:
    lane = watcher_of(prices).lane
    return all(lane.state(key) in {LaneState.WAITING, LaneState.COOLING} for key in keys)


@pytest.fixture
def passes(sleeper: Sleeper, clock: ManualClock) -> Passes:
    """Time passes, and the sleepers whose time is over do what is due."""

    async def passed(seconds: float, *resources: Prices) -> None:
        await settled(*resources)
        clock.advance(seconds)
        sleeper.wake(seconds)
        await settled(*resources)

    return passed


class TestC14Watch:
    async def test_a_resource_knows_what_is_watched(self, prices: Prices) -> None:
        """Each key once, however many watch it, and only as long as somebody does."""
        with prices.watch("sku-1", "sku-2"), prices.watch("sku-2"):
            assert sorted(prices.watched) == ["sku-1", "sku-2"]
        assert prices.watched == ()

    async def test_a_cold_key_is_loaded_and_then_kept_fresh(
        self, prices: Prices, upstream: Upstream, passes: Passes
    ) -> None:
        """Each time its freshness ends, without anybody reading it."""
        with prices.watch("sku-1") as watch:
            assert (await anext(watch)).answer.value == Price("sku-1", 1)
            upstream.version = 2
            await passes(29, prices)
            assert len(upstream.calls) == 1
            await passes(1, prices)
            update = await anext(watch)
            assert (update.key, version(update.answer)) == ("sku-1", 2)
        assert upstream.calls == [["sku-1"]] * 2

    async def test_what_nobody_watches_any_more_is_left_alone(
        self, prices: Prices, upstream: Upstream, passes: Passes
    ) -> None:
        """After the block ends nothing is loaded, and no task waits for it."""
        with prices.watch("sku-1") as watch:
            await anext(watch)
        before = len(asyncio.all_tasks())
        await passes(3600, prices)
        assert len(upstream.calls) == 1
        assert len(asyncio.all_tasks()) <= before
        assert [update async for update in watch] == []

    async def test_many_watched_keys_are_loaded_by_one_call(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """One by one, in a list, or both; looked up and loaded together."""
        with prices.watch("a", ["b", "c"], "a") as watch:
            assert watch.keys == ("a", "b", "c")
            seen = [(await anext(watch)).key for _ in range(3)]
        assert sorted(seen) == ["a", "b", "c"]
        assert upstream.calls == [["a", "b", "c"]]

    async def test_a_fresh_copy_is_no_news(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, passes: Passes
    ) -> None:
        """Only what comes after; read it yourself for what there is."""
        await prices("sku-1")
        clock.advance(10)
        with prices.watch("sku-1") as watch:
            await turns()
            assert len(upstream.calls) == 1
            upstream.version = 2
            await passes(20, prices)
            assert version((await anext(watch)).answer) == 2

    async def test_a_fresh_copy_that_cannot_be_read_is_a_miss(
        self, tmp_path: Path, upstream: Upstream, clock: ManualClock
    ) -> None:
        """E11: another deployment's type stands in the store; who looks need not wait it out."""
        url = f"sqlite:///{tmp_path}/shared.db"
        async with Cache(url, clock=clock) as theirs:

            @theirs.batched("price", fresh_for=30)
            async def numbers(skus: list[str]) -> Mapping[str, int]:
                return dict.fromkeys(skus, 1)

            await numbers("a")
        async with Cache(url, clock=clock) as cache:
            with declare(cache, upstream).watch("a") as watch:
                assert (await anext(watch)).answer.value == Price("a", 1)
        assert upstream.calls == [["a"]]

    async def test_two_watches_of_one_key_cost_one_load(
        self, prices: Prices, upstream: Upstream, passes: Passes
    ) -> None:
        """Both are told; when one leaves the other goes on."""
        with prices.watch("sku-1") as second:
            with prices.watch("sku-1") as first:
                await anext(first)
            await anext(second)
            await passes(30, prices)
            await anext(second)
        assert len(upstream.calls) == 2

    async def test_the_newest_of_each_key_is_kept(self, prices: Prices, upstream: Upstream) -> None:
        """A reader that is slow sees the state, not a growing queue."""
        with prices.watch("a", "b") as watch:
            for upstream.version in (1, 2, 3):
                await prices.refresh("a", "b")
            updates = [await anext(watch), await anext(watch)]
            assert {update.key: version(update.answer) for update in updates} == {"a": 3, "b": 3}

    async def test_somebody_elses_load_is_news_too(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """Whoever asked for it."""
        await prices("sku-1")
        with prices.watch("sku-1") as watch:
            upstream.version = 2
            await prices.refresh("sku-1")
            assert version((await anext(watch)).answer) == 2

    async def test_an_invalidated_key_is_loaded_at_once(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """By name, by tag, softly or not: it is on somebody's screen."""
        prices = declare(cache, upstream, tags=lambda _sku: ["shop"])
        with prices.watch("sku-1") as watch:
            await anext(watch)
            for upstream.version, soft in ((2, False), (3, True)):
                await prices.invalidate("sku-1", soft=soft)
                assert version((await anext(watch)).answer) == upstream.version
            upstream.version = 4
            await cache.invalidate_tag("shop")
            assert version((await anext(watch)).answer) == 4

    async def test_a_copy_that_went_stale_meanwhile_is_no_news(
        self, ours: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """A load that knew no copy finds the one that was shown: only what comes next is told."""
        with ours.watch("sku-1") as watch:
            await anext(watch)
            upstream.version = 2
            store.hold("read:done")
            await ours.invalidate("sku-1", soft=True)
            await store.reached("read:done")  # when is it stale?
            reads = store.count("read")
            store.let_go("read:done")
            store.hold("read:done")
            await until(lambda: store.count("read") > reads)
            await store.reached("read:done")  # what is there to replace?
            await ours.invalidate("sku-1", soft=True)
            store.let_go("read:done")
            assert version((await anext(watch)).answer) == 2

    async def test_absence_is_news(
        self, prices: Prices, upstream: Upstream, passes: Passes
    ) -> None:
        """And it is asked about again no more often than what is there, though it is believed for
        a tenth of that time: who comes meanwhile is told at once."""
        upstream.absent = {"sku-1"}
        with prices.watch("sku-1") as watch:
            assert not (await anext(watch)).answer.found
            asked = len(upstream.calls)
            for _ in range(9):
                await passes(3, prices)
            assert len(upstream.calls) == asked
            with prices.watch("sku-1") as another:
                assert not (await anext(another)).answer.found
            assert len(upstream.calls) == asked
            upstream.absent = set()
            await passes(3, prices)
            assert (await anext(watch)).answer.found

    async def test_an_absent_key_that_is_invalidated_is_asked_about_at_once(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """And one that somebody begins to watch, if nobody did and it is not believed any more."""
        upstream.absent = {"sku-1"}
        with prices.watch("sku-1") as watch:
            assert not (await anext(watch)).answer.found
            upstream.absent = set()
            await prices.invalidate("sku-1")
            assert (await anext(watch)).answer.found

    async def test_a_watch_asks_again_for_a_key_whose_absence_is_over(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """An absence that is believed no longer is asked about by the first who looks."""
        upstream.absent = {"sku-1"}
        assert not (await prices.get("sku-1")).found
        clock.advance(4)
        upstream.absent = set()
        with prices.watch("sku-1") as watch:
            assert (await anext(watch)).answer.found

    async def test_an_absence_that_is_over_is_told_to_nobody_who_comes_later(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """The key exists by then, and its copy is at hand."""
        upstream.absent = {"sku-1"}
        told = list[Update[str, Price]]()
        with prices.watch("sku-1") as watch:
            assert not (await anext(watch)).answer.found
            upstream.absent = set()
            await prices.refresh("sku-1")
            with prices.watch("sku-1", tell=told.append):
                await settled(prices)
        assert told == []

    async def test_a_watched_key_that_failed_waits_for_its_cooldown(
        self, prices: Prices, upstream: Upstream, caplog: pytest.LogCaptureFixture, passes: Passes
    ) -> None:
        """1 s, then 2 s, as the store remembers it; the first success is news."""
        upstream.error = ConnectionError("down")
        with caplog.at_level(logging.ERROR), prices.watch("sku-1") as watch:
            await passes(0.5, prices)
            assert len(upstream.calls) == 1
            await passes(0.5, prices)
            assert len(upstream.calls) == 2
            await passes(1.5, prices)
            assert len(upstream.calls) == 2
            upstream.error = None
            await passes(0.5, prices)
            assert (await anext(watch)).answer.found

    async def test_a_freshness_of_nothing_is_no_storm(
        self, cache: Cache, upstream: Upstream, passes: Passes
    ) -> None:
        """At most ten loads a second and key."""
        prices = declare(cache, upstream, fresh_for=0)
        with prices.watch("sku-1"):
            await settled(prices)
            assert len(upstream.calls) == 1
            await passes(0.1, prices)
            assert len(upstream.calls) == 2

    async def test_many_invalidations_are_no_storm(
        self, prices: Prices, upstream: Upstream, passes: Passes
    ) -> None:
        """Ten loads of a key in any second, then it waits; other keys do not wait for it."""
        with prices.watch("a") as watch:
            await settled(prices)
            for _ in range(30):
                await prices.invalidate("a")
                await settled(prices)
            assert len(upstream.calls) == 10
            watch.add("b")
            await settled(prices)
            assert upstream.calls[10:] == [["b"]]
            await passes(0.9, prices)
            assert len(upstream.calls) == 11
            await passes(0.2, prices)
            assert upstream.calls[11:] == [["a"]]

    async def test_keys_come_and_go_while_it_is_open(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """`add` and `discard`, as a page scrolls; what was discarded is no news any more."""
        with prices.watch("a") as watch:
            watch.add("b")
            watch.discard("a", "unknown")
            await until(lambda: bool(upstream.calls))
            assert (await anext(watch)).key == "b"
            assert watch.keys == ("b",)
            with pytest.raises(ConfigError):
                watch.add("")

    async def test_a_watch_may_have_a_listener_instead_of_a_loop(
        self, prices: Prices, caplog: pytest.LogCaptureFixture
    ) -> None:
        """`tell` hears each update at once; one that raises is logged and stops nothing."""
        told: list[Update[str, Price]] = []
        ended: list[bool] = []

        def tell(update: Update[str, Price]) -> None:
            told.append(update)
            raise RuntimeError("a bad listener")

        with prices.watch("a", tell=tell, end=lambda: ended.append(True)):
            await until(lambda: bool(told))
            await prices.refresh("a")
        assert [update.key for update in told] == ["a", "a"]
        assert ended == [True]
        assert "a bad listener" in caplog.text

    async def test_a_cached_functions_entry_can_be_watched(self, cache: Cache) -> None:
        """Through its handle."""
        calls: list[int] = []

        @cache.cached("report", fresh_for="5m")
        async def report(year: int, region: str = "eu") -> str:
            calls.append(year)
            return f"{year} {region}"

        with report.of(2026).watch() as watch:
            assert (await anext(watch)).answer.value == "2026 eu"
        assert calls == [2026]

    async def test_closing_the_cache_ends_the_loop(self, cache: Cache, prices: Prices) -> None:
        """Cleanly, with what was not looked at yet; and a closed cache refuses another."""
        ended: list[bool] = []
        with (
            prices.watch("a", end=lambda: ended.append(True)) as watch,
            prices.watch([], end=lambda: ended.append(True)) as empty,
        ):
            await anext(watch)
            reading = [asyncio.create_task(_all(one)) for one in (watch, empty)]
            await turns()
            await cache.close()
            assert await asyncio.gather(*reading) == [[], []]
        assert ended == [True, True]
        with pytest.raises(NotOpen), prices.watch("a"):
            pass
        await cache.open()
        with prices.watch("a") as again:
            await prices.refresh("a")
            assert (await anext(again)).key == "a"

    async def test_closing_in_the_middle_of_a_load_leaves_nothing(
        self, cache: Cache, prices: Prices, upstream: Upstream
    ) -> None:
        """No task, no warning, no waiter."""
        upstream.hold()
        with prices.watch("a"):
            await upstream.asked.wait()
            await cache.close()
        assert len(asyncio.all_tasks()) == 1

    async def test_closing_with_many_entries_in_memory_leaves_no_error(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """Memory is freed in slices: no load that was under way asks the closed cache meanwhile."""
        untold: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, it: untold.append(it))
        prices = declare(cache, upstream, max_entries=10_000)
        await prices.get_many([f"sku-{number}" for number in range(5_000)])
        upstream.hold()
        upstream.asked.clear()
        with prices.watch("a"):
            await upstream.asked.wait()
            await cache.close()
        gc.collect()
        assert untold == []

    async def test_a_watch_opens_a_cache_that_was_never_opened(self) -> None:
        """As a read does."""
        upstream = Upstream()
        cache = Cache("memory://")
        prices = declare(cache, upstream)
        with prices.watch("a") as watch:
            assert (await anext(watch)).key == "a"
        await cache.close()

    async def test_a_watch_ends_if_the_cache_cannot_be_opened(
        self, store: SteppedStore, upstream: Upstream, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nobody waits for news for ever; the log says why."""
        store.broken = {"open"}
        cache = Cache(store)
        with declare(cache, upstream).watch("a") as watch:
            async with asyncio.timeout(5):
                assert [update async for update in watch] == []
        assert "nothing is watched, since the cache did not open: cannot open" in caplog.text

    async def test_wrong_arguments_of_watch_are_refused(self, prices: Prices) -> None:
        """A bad key, a watch entered twice, one that was never entered."""
        with pytest.raises(ConfigError, match="a key is str"):
            prices.watch(5)  # type: ignore[arg-type]
        watch = prices.watch("a")
        assert [update async for update in watch] == []
        with watch, pytest.raises(StillfreshError, match="entered already"), watch:
            pass

    async def test_a_watch_without_a_listener_is_told_of_no_failure(
        self, prices: Prices, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Another watch of the same key may have one."""
        with prices.watch("a") as watch:
            watch.tell_failure(Update("a", await prices.get("a")))
        assert caplog.records == []

    async def test_a_failure_is_told_with_what_is_left(
        self, prices: Prices, clock: ManualClock
    ) -> None:
        """The copy and this error, or the copy's own; without a copy, the error alone."""
        known, now, earlier = await prices.get("a"), LoadFailed("now"), LoadFailed("earlier")
        left = left_of(known, now, clock)
        assert (left.value, left.error) == (known.value, now)
        assert left_of(left, earlier, clock).error is now
        for nothing, error in ((None, now), (earlier, earlier)):
            left = left_of(nothing, now, clock)
            assert (left.found, left.verdict, left.error) == (False, Verdict.GONE, error)

    async def test_a_watch_that_was_left_is_told_nothing(self, prices: Prices) -> None:
        """Neither news nor a failure that was on its way; its end is told once."""
        told, ended = list[object](), list[int]()
        watch = prices.watch("a", tell=told.append, fail=told.append, end=lambda: ended.append(1))
        update = Update("a", await prices.get("a"))
        with watch:
            watch.tell(update)
            watch.tell_failure(update)
        watch.tell(update)
        watch.tell_failure(update)
        watch.close()
        assert (told, ended) == ([update, update], [1])

    @pytest.mark.parametrize("name", ["tell", "fail", "end"])
    async def test_a_listener_is_a_plain_function(self, prices: Prices, name: str) -> None:
        """Neither a number nor an async function, which nobody would await."""

        async def late(*_: object) -> None:
            """Never called."""

        class Late:
            async def __call__(self, *_: object) -> None:
                """Never called."""

        for bad in (5, late, partial(late, 1), Late()):
            instead = "iterate over" if name == "tell" else "start a task of your own"
            with pytest.raises(ConfigError, match=f"{name}: takes a plain function.*{instead}"):
                prices.watch("a", **{name: bad})  # type: ignore[arg-type]

    def test_a_watch_outside_a_running_loop_leaves_nothing(self) -> None:
        """It is refused, nothing is loaded for it later, and it may be entered inside one."""
        upstream = Upstream()
        cache = Cache("memory://")
        prices = declare(cache, upstream)
        watch = prices.watch("ghost")
        with pytest.raises(StillfreshError, match="inside a running event loop"), watch:
            pass
        assert prices.watched == ()
        assert len(watcher_of(prices).lane) == 0

        async def inside() -> None:
            async with cache:
                with prices.watch("real") as real:
                    assert (await anext(real)).key == "real"
                assert upstream.calls == [["real"]]
                with watch:
                    assert (await anext(watch)).key == "ghost"
                assert prices.watched == ()

        asyncio.run(inside())

    async def test_a_key_added_outside_the_loop_leaves_nothing(self, prices: Prices) -> None:
        """Refused from another thread, with or without a loop there."""
        with prices.watch("a") as watch:
            await anext(watch)
            for enter in (partial(watch.add, "b"), prices.watch("b").__enter__):
                for where in (asyncio.to_thread, _on_another_loop):
                    with pytest.raises(StillfreshError, match="event loop"):
                        await where(enter)
            assert watch.keys == ("a",)
            assert prices.watched == ("a",)

    async def test_watches_of_all_processes_share_one_load(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream, passes: Passes
    ) -> None:
        """E5: two caches on one store watch the same keys; each copy is loaded once."""
        store = MemoryStore(clock=clock)
        async with (
            Cache(store, clock=clock, sleep=sleeper) as first,
            Cache(store, clock=clock, sleep=sleeper) as second,
        ):
            one, two = declare(first, upstream), declare(second, upstream)
            with one.watch("a", "b") as here, two.watch("a", "b") as there:
                for round_ in range(1, 4):
                    await passes(0.2)
                    seen = [{(await anext(watch)).key for _ in "ab"} for watch in (here, there)]
                    assert seen == [{"a", "b"}] * 2
                    assert len(upstream.calls) == round_
                    await passes(29.8)

    async def test_a_copy_that_another_process_published_early_is_told(
        self,
        tmp_path: Path,
        upstream: Upstream,
        clock: ManualClock,
        sleeper: Sleeper,
        passes: Passes,
    ) -> None:
        """E17: when it is looked at; it was fresh, so nothing was loaded and nobody was told."""
        address = f"sqlite:///{tmp_path / 'shared.db'}"
        told: list[int] = []
        async with (
            Cache(address, clock=clock, sleep=sleeper) as one,
            Cache(address, clock=clock, sleep=sleeper) as other,
        ):
            here, there = declare(one, upstream), declare(other, upstream)
            await here("sku-1")
            with here.watch("sku-1", tell=lambda it: told.append(version(it.answer))):
                await passes(20, here)
                await there.put("sku-1", Price("sku-1", 77))
                await passes(10, here)
                assert told == [77]
                await passes(5, here)
                assert (told, upstream.calls) == ([77], [["sku-1"]])

    @pytest.mark.parametrize(
        ("max_batch", "together"), [(1, 50), (7, 49), (50, 50), (51, 51), (100, 100)]
    )
    async def test_keys_are_taken_in_whole_batches(
        self, cache: Cache, upstream: Upstream, max_batch: int, together: int
    ) -> None:
        """About 50 keys in a turn of the loop, and at least one batch (E28)."""
        prices = declare(cache, upstream, max_batch=max_batch)
        rounds: list[int] = []
        watcher = watcher_of(prices)
        refresh = watcher.refresh

        async def noted(keys: Sequence[str]) -> None:
            rounds.append(len(keys))
            await refresh(keys)

        watcher.refresh = noted  # type: ignore[method-assign]
        with prices.watch([f"sku-{number}" for number in range(101)]):
            await until(lambda: sum(rounds) >= 101)
        assert rounds[0] == together

    async def test_ten_thousand_keys_are_loaded_in_batches(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """C6: no timer for each, and no more calls than batches."""
        prices = declare(cache, upstream, max_entries=20_000)
        keys = [f"sku-{number}" for number in range(10_000)]
        with prices.watch(keys) as watch:
            seen = {(await anext(watch)).key for _ in keys}
            assert seen == set(keys)
            assert len(upstream.calls) == 100
            assert len(asyncio.all_tasks()) < 20
        watcher = watcher_of(prices)
        await until(lambda: not watcher.watches and len(watcher.lane) == 0)


class TestE24NeverLate:
    async def test_a_recovery_that_another_caller_brings_is_followed_up(
        self, cache: Cache, upstream: Upstream, passes: Passes
    ) -> None:
        """The key cooled down for a while when `refresh()` succeeded: its next load is when the new
        copy's freshness ends, not when the cooldown would have ended."""
        prices = declare(cache, upstream, fresh_for=2)
        upstream.error = ConnectionError("down")
        with prices.watch("a"):
            for pause in (1, 2, 4, 8):
                await passes(pause, prices)
            upstream.error = None
            await prices.refresh("a")
            asked = len(upstream.calls)
            await passes(2, prices)
            assert len(upstream.calls) == asked + 1

    async def test_a_copy_with_a_shorter_term_is_refreshed_when_that_ends(
        self, cache: Cache, passes: Passes
    ) -> None:
        """The driver slept until the end of the longer term."""
        calls: list[float] = []

        @cache.batched("price", fresh_for=20)
        async def prices(skus: list[str]) -> Mapping[str, str | Loaded[str]]:
            calls.append(20 if not calls else 1)
            return {sku: Loaded("value", fresh_for=calls[-1]) for sku in skus}

        with prices.watch("a"):
            await passes(0, prices)
            await prices.refresh("a")
            await passes(1, prices)
            assert calls == [20, 1, 1]

    async def test_a_failure_that_shortens_the_cooldown_is_followed_up(
        self, prices: Prices, upstream: Upstream, passes: Passes
    ) -> None:
        """Upstream says when to ask again, to another caller: that holds for the watch too."""
        upstream.error = RetryAfter(25)
        with prices.watch("a"):
            await passes(0, prices)
            upstream.error = RetryAfter(1)
            with pytest.raises(LoadFailed):
                await prices.refresh("a")
            upstream.error = None
            await passes(1, prices)
            assert len(upstream.calls) == 3

    async def test_an_invalidation_between_the_load_and_the_end_of_its_batch_is_followed_up(
        self, cache: Cache, passes: Passes
    ) -> None:
        """The key has its new copy, and another key of the same round is still being loaded."""
        gate, calls = asyncio.Event(), list[str]()

        @cache.batched("price", fresh_for=20, max_batch=1)
        async def prices(skus: list[str]) -> Mapping[str, str]:
            calls.extend(skus)
            if skus == ["slow"]:
                await gate.wait()
            return dict.fromkeys(skus, "value")

        with prices.watch("a", "slow"):
            await until(lambda: prices.peek("a") is not None)
            await prices.invalidate("a")
            await turns()
            gate.set()
            await until(lambda: prices.peek("slow") is not None)
            await passes(0.1, prices)
            assert calls.count("a") == 2

    async def test_a_slow_load_holds_up_no_other_key(
        self, cache: Cache, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """Keys are taken together and loaded apart: one that came, and one that failed, are each
        asked for when their own time comes, though the third is still being loaded."""
        gate, calls = asyncio.Event(), list[str]()
        failures: list[str] = []

        @cache.batched("price", fresh_for=2, max_batch=1)
        async def prices(skus: list[str]) -> Mapping[str, str | Exception]:
            calls.extend(skus)
            if skus == ["slow"]:
                await gate.wait()
            return {sku: ConnectionError("down") if sku == "bad" else "value" for sku in skus}

        def failed(update: Update[str, str]) -> None:
            failures.append(update.key)

        with prices.watch("a", "bad", "slow", fail=failed):
            await until(lambda: failures == ["bad"] and are_waiting(prices, "a", "bad"))
            await turns()
            clock.advance(2)
            sleeper.wake(2)
            await until(lambda: failures == ["bad"] * 2 and are_waiting(prices, "a", "bad"))
            assert Counter(calls) == {"a": 2, "bad": 2, "slow": 1}
            gate.set()

    async def test_a_key_that_fails_elsewhere_while_it_is_read_is_not_loaded(
        self, clock: ManualClock
    ) -> None:
        """C9: it cools down from then on."""
        asked = list[str]()

        class Late(Driver[str]):
            async def refresh_times(self, keys: Sequence[str]) -> dict[str, float]:
                for key in keys if self.lane.in_flight else ():
                    self.lane.failed(key, self.clock())
                return dict.fromkeys(keys, 0.0)

            async def renew(self, keys: Sequence[str]) -> AsyncGenerator[Mapping[str, object]]:
                asked.extend(keys)
                yield dict.fromkeys(keys)

        driver = Late(Terms(Policy(20), 0, 0), clock)
        driver.lane.subscribe("a", counted=True)
        await driver.tick(10, 1, lambda: True)
        assert (asked, driver.lane.state("a")) == ([], LaneState.COOLING)

    async def test_a_key_that_failed_cools_down_though_the_store_knows_nothing(
        self, clock: ManualClock
    ) -> None:
        """E7: it may be away; the other key is fresh for as long as it says."""

        class Away(Driver[str]):
            async def refresh_times(self, keys: Sequence[str]) -> dict[str, float]:
                return {key: self.clock() + 20 if key == "b" else 0.0 for key in keys}

            async def renew(self, keys: Sequence[str]) -> AsyncGenerator[Mapping[str, object]]:
                yield {key: LoadFailed("down") if key == "a" else None for key in keys}

        driver = Away(Terms(Policy(20), 0, 0, first_cooldown=3), clock)
        for key in "ab":
            driver.lane.subscribe(key, counted=True)
            driver.lane.looked_up(key, clock(), clock())
        await driver.refresh(driver.lane.take(10))
        assert driver.lane.cooling(clock()) == {"a": clock() + 3}
        assert driver.lane.next_time() == clock() + 3
        clock.advance(3)
        assert driver.lane.due(clock(), 10) == ["a"]
        clock.advance(17)
        assert sorted(driver.lane.due(clock(), 10)) == ["a", "b"]

    async def test_keys_of_a_round_that_was_cut_off_are_looked_at_again(
        self, clock: ManualClock
    ) -> None:
        """None of them stays in flight: those that ended have their time, the others are due."""

        class CutOff(Driver[str]):
            async def refresh_times(self, keys: Sequence[str]) -> dict[str, float]:
                return dict.fromkeys(keys, self.clock() + 20)

            async def renew(self, keys: Sequence[str]) -> AsyncGenerator[Mapping[str, object]]:
                yield {keys[0]: None}
                raise StillfreshError("closed")

        driver = CutOff(Terms(Policy(20), 0, 0), clock)
        for key in "ab":
            driver.lane.subscribe(key, counted=True)
            driver.lane.looked_up(key, clock(), clock())
        with pytest.raises(StillfreshError, match="closed"):
            await driver.refresh(driver.lane.take(10))
        assert driver.lane.in_flight == []
        assert [driver.lane.state(key) for key in "ab"] == [LaneState.WAITING, LaneState.DUE]

    async def test_a_load_that_ends_while_another_is_told_is_told_too(self, cache: Cache) -> None:
        """The round tells of every key, also if the last load ends before it is asked for more."""
        gate = asyncio.Event()

        @cache.batched("price", fresh_for=2, max_batch=1)
        async def prices(skus: list[str]) -> Mapping[str, str]:
            if skus == ["slow"]:
                await gate.wait()
            return dict.fromkeys(skus, "value")

        with prices.watch("a", "slow") as watch:
            first = await anext(watch)
            gate.set()
            await until(lambda: prices.peek("slow") is not None)
            second = await anext(watch)
            assert [first.key, second.key] == ["a", "slow"]
            await until(lambda: are_waiting(prices, "a", "slow"))

    async def test_a_key_that_lands_with_an_earlier_load_is_not_held_up(
        self, cache: Cache, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """Found by the simulator: somebody's `refresh()` loads it when the watch takes it, together
        with a key whose load is slow; what came is old by then, so it is asked for again."""
        gates = {"a": asyncio.Event(), "slow": asyncio.Event()}
        calls = list[str]()

        @cache.batched("price", fresh_for=2, max_batch=1)
        async def prices(skus: list[str]) -> Mapping[str, str]:
            calls.extend(skus)
            await gates[skus[0]].wait()
            return dict.fromkeys(skus, "value")

        refresh = asyncio.create_task(prices.refresh("a"))
        await until(lambda: calls == ["a"])
        with prices.watch("a", "slow"):
            await until(lambda: calls == ["a", "slow"])
            clock.advance(3)
            gates["a"].set()
            await refresh
            await until(lambda: are_waiting(prices, "a"))
            await turns()
            clock.advance(0.1)
            sleeper.wake(0.1)
            await until(lambda: len(calls) == 3)
            assert calls == ["a", "slow", "a"]
            gates["slow"].set()


class TestE28ManyKeys:
    """A watch of very many keys holds nothing up: the driver takes them over in slices."""

    @pytest.fixture(autouse=True)
    def _slices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stillfresh.engine.watcher.AT_ONCE", 3)

    async def test_all_keys_are_watched_at_once(
        self, cache: Cache, prices: Prices, upstream: Upstream
    ) -> None:
        """So the resource says from the first moment on; each key is loaded, in one batch."""
        with prices.watch(MANY) as watch, prices.watch(*MANY[5:], "other") as another:
            assert watcher_of(prices).late, "most are taken over later"
            assert set(prices.watched) == {*MANY, "other"}
            assert cache.counts().resources["price"].watched == 11
            assert {(await anext(watch)).key for _ in MANY} == set(MANY)
            assert {(await anext(another)).key for _ in range(6)} == {*MANY[5:], "other"}
            assert upstream.calls == [[*MANY, "other"]]
        assert prices.watched == ()
        watcher = watcher_of(prices)
        await until(lambda: not watcher.watches and not watcher.late and len(watcher.lane) == 0)

    async def test_a_copy_that_arrives_before_its_key_is_taken_over_is_told(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """C14: what is read after the watch was entered is known to be old. On `memory://` the put
        ends before the driver runs; the other stores take longer, and only the news counts."""
        await prices("sku-9")
        with prices.watch(MANY) as watch:
            upstream.version = 2
            await prices.put("sku-9", Price("sku-9", 2))
            told = {it.key: version(it.answer) for it in [await anext(watch) for _ in MANY]}
            assert told == dict.fromkeys(MANY, 2)

    async def test_many_copies_that_are_known_when_a_watch_is_entered_are_no_news(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """C14: what is loaded after that moment is, though its key was not taken over yet."""
        await prices.get_many(MANY)
        told: list[tuple[str, int]] = []

        def tell(update: Update[str, Price]) -> None:
            told.append((update.key, version(update.answer)))

        with prices.watch(MANY, tell=tell):
            upstream.version = 2
            await prices.refresh("sku-9")
            await settled(prices)
        assert told == [("sku-9", 2)]

    async def test_many_keys_that_leave_while_nothing_is_watched(self, prices: Prices) -> None:
        """E24: what is watched next is loaded all the same."""
        with prices.watch() as watch:
            watch.discard(*MANY)
            with prices.watch("sku-1") as next_one:
                assert (await anext(next_one)).key == "sku-1"
        await until(lambda: not watcher_of(prices).late)

    def test_a_watch_that_is_closed_after_its_loop(self) -> None:
        """E21: nobody can be told any more, and nothing is started."""
        cache, loop = Cache("memory://"), asyncio.new_event_loop()
        prices = declare(cache, Upstream())
        watches = [prices.watch(MANY), prices.watch("other")]

        async def entered() -> None:
            for watch in watches:
                watch.__enter__()
            await until(lambda: not watcher_of(prices).late)

        loop.run_until_complete(entered())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(turns())
        loop.close()
        for watch in watches:
            watch.discard("sku-1")
            watch.close()

    async def test_keys_that_leave_and_come_back_meanwhile(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """What the watch has in the end is watched, and nothing else."""
        with prices.watch(MANY) as watch:
            watch.discard(*MANY)
            assert (prices.watched, watch.keys) == ((), ())
            watch.add(*MANY[:5])
            watch.discard("sku-1", "unknown")
            left = ["sku-0", "sku-2", "sku-3", "sku-4"]
            assert list(prices.watched) == left
            await settled(prices)
            assert (list(prices.watched), upstream.calls) == (left, [left])
            for _ in left:
                await anext(watch)
            watch.discard(*left)
            await prices.refresh("sku-0")
            news = asyncio.ensure_future(anext(watch))
            await turns()
            assert not news.done()
            news.cancel()

    async def test_a_watch_that_ends_while_it_is_taken_over(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """Nothing is loaded for it, and its driver ends."""
        prices.watch(MANY).__enter__().close()
        watcher = watcher_of(prices)
        await until(lambda: not watcher.late and not watcher.watches)
        await until(lambda: not any("Watcher." in repr(task) for task in asyncio.all_tasks()))
        assert (upstream.calls, len(watcher.lane)) == ([], 0)


async def _all(watch: object) -> list[object]:
    return [update async for update in watch]  # type: ignore[attr-defined]


async def _on_another_loop(enter: Callable[[], object]) -> object:
    async def entered() -> object:
        return enter()

    return await asyncio.to_thread(lambda: asyncio.run(entered()))
