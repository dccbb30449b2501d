"""E38: how often a read was wrong, by checks of a sample of the reads."""

import asyncio
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stillfresh import Cache, ConfigError, LoadFailed, SyncCache, prometheus_text
from stillfresh.engine import Resource, ResourceStats, TruthObjective, TruthStats
from stillfresh.engine.truth import MOST_OFFERED, MOST_PENDING, Sampler
from stillfresh.testing import ManualClock
from tests.kit.engine import Sleeper

WITHIN = 5.0


class Source:
    """The data behind the cache: changes behind its back, fails, hangs."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.calls = 0
        self.error: BaseException | None = None
        self.gate: asyncio.Event | None = None

    async def __call__(self, keys: list[str]) -> Mapping[str, Any]:
        self.calls += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return {key: self.values[key] for key in keys if key in self.values}


class World:
    """A cache that checks every read, its source, a clock and a sleep in the hand."""

    def __init__(self, store: str = "memory://", **options: Any) -> None:
        self.clock = ManualClock(1_000_000)
        self.sleep = Sleeper()
        self.source = Source()
        self.source.values["a"] = "old"
        self.cache = Cache(store, clock=self.clock, sleep=self.sleep)
        terms: dict[str, Any] = {"fresh_for": "1h", "check": 1.0, "true_within": WITHIN, **options}

        @self.cache.batched("price", **terms)
        async def prices(keys: list[str]) -> dict[str, Any]:
            return dict(await self.source(keys))

        self.prices: Resource[str, Any] = prices

    async def stats(self) -> ResourceStats:
        return (await self.cache.stats()).resources["price"]

    async def truth(self) -> TruthStats:
        truth = (await self.stats()).truth
        assert truth is not None
        return truth

    async def until(self, reached: Callable[[TruthStats], bool]) -> TruthStats:
        """Give the loop turns until the statistics are like this."""
        for _ in range(10_000):
            truth = await self.truth()
            if reached(truth):
                return truth
            await asyncio.sleep(0)
        raise AssertionError(await self.truth())

    async def settled(self) -> TruthStats:
        """The statistics when no check is under way."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return await self.until(lambda truth: not truth.pending)

    async def waits(self) -> None:
        """A check has begun to wait for its second look."""
        for _ in range(10_000):
            if self.sleep.sleeping:
                return
            await asyncio.sleep(0)
        raise AssertionError("no check waits")

    async def later(self) -> TruthStats:
        """`true_within` has passed; the check ends."""
        await self.waits()
        self.clock.advance(WITHIN)
        self.sleep.wake()
        return await self.settled()


@pytest.fixture
def stores(tmp_path: Path) -> dict[str, str]:
    return {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/truth.db"}


class TestE38Verdicts:
    @pytest.mark.parametrize("store", ["memory", "sqlite"])
    async def test_a_read_whose_value_the_loader_gives_again_is_true(
        self, stores: dict[str, str], store: str
    ) -> None:
        """The loader was asked once more, and nothing was stored or counted as a load."""
        world = World(stores[store])
        async with world.cache:
            await world.prices("a")
            assert (await world.settled()).checked == 0  # it was loaded: no copy was served
            fetched_at = (await world.prices.get("a")).fetched_at
            truth = await world.settled()
            assert (truth.true, truth.late, truth.wrong) == (1, 0, 0)
            assert world.source.calls == 2
            assert (await world.stats()).loads == 1
            world.clock.advance(1)
            assert (await world.prices.get("a")).fetched_at == fetched_at

    @pytest.mark.parametrize("store", ["memory", "sqlite"])
    async def test_a_change_without_an_invalidation_is_a_wrong_read(
        self, stores: dict[str, str], store: str
    ) -> None:
        """The data changed behind the cache's back, which goes on to call the old value fresh."""
        world = World(stores[store])
        async with world.cache:
            await world.prices("a")
            world.source.values["a"] = "new"
            world.clock.advance(10)
            await world.prices("a")
            truth = await world.later()
            assert (truth.true, truth.late, truth.wrong) == (0, 0, 1)

    @pytest.mark.parametrize("store", ["memory", "sqlite"])
    async def test_a_change_that_is_invalidated_in_time_is_late_but_within_its_terms(
        self, stores: dict[str, str], store: str
    ) -> None:
        """The next read loads the new value before `true_within` has passed."""
        world = World(stores[store])
        async with world.cache:
            await world.prices("a")
            world.source.values["a"] = "new"
            await world.prices("a")
            await world.waits()
            await world.prices.invalidate("a")
            assert await world.prices("a") == "new"
            truth = await world.later()
            assert (truth.true, truth.late, truth.wrong) == (0, 1, 0)

    async def test_an_invalidated_copy_that_nobody_has_read_since_is_late(self) -> None:
        """The cache does not call it fresh any more."""
        world = World()
        async with world.cache:
            await world.prices("a")
            world.source.values["a"] = "new"
            await world.prices("a")
            await world.waits()
            await world.prices.invalidate("a")
            truth = await world.later()
            assert (truth.late, truth.wrong) == (1, 0)

    async def test_a_value_that_changes_and_comes_back_is_not_wrong(self) -> None:
        """What the cache still has is what the loader gives at its second look."""
        world = World()
        async with world.cache:
            await world.prices("a")
            world.source.values["a"] = "new"
            await world.prices("a")
            await world.waits()
            world.source.values["a"] = "old"
            truth = await world.later()
            assert (truth.late, truth.wrong) == (1, 0)

    async def test_a_third_value_that_was_loaded_after_the_first_look_is_not_wrong(self) -> None:
        """Data that changes faster than `true_within` is judged by when the copy was requested."""
        world = World()
        async with world.cache:
            await world.prices("a")
            world.source.values["a"] = "second"
            await world.prices("a")
            await world.waits()
            world.clock.advance(1)
            world.source.values["a"] = "third"
            await world.prices.refresh("a")
            world.source.values["a"] = "fourth"
            truth = await world.later()
            assert (truth.late, truth.wrong) == (1, 0)

    async def test_an_old_value_that_was_published_after_the_change_is_wrong(self) -> None:
        """Another copy than the one that was served, and as old."""
        world = World(check=1.0)
        async with world.cache:
            await world.prices("a")
            await world.prices("a")
            await world.settled()
            world.source.values["a"] = "second"
            world.clock.advance(1)
            await world.prices("a")
            await world.waits()
            world.clock.advance(-0.5)  # a load that had begun before the first look
            await world.prices.put("a", "stale")
            world.clock.advance(0.5)
            truth = await world.later()
            assert (truth.true, truth.late, truth.wrong) == (1, 0, 1)

    async def test_a_plain_ttl_is_not_wrong_for_being_a_ttl(self) -> None:
        """`true_within` is `fresh_for` by default, and by then the copy is no longer fresh."""
        world = World(true_within=None, fresh_for=WITHIN)
        async with world.cache:
            await world.prices("a")
            world.source.values["a"] = "new"
            world.clock.advance(1)
            await world.prices("a")
            truth = await world.later()
            assert truth.true_within == WITHIN
            assert (truth.late, truth.wrong) == (1, 0)

    async def test_an_absence_is_compared_like_a_value(self) -> None:
        """A key that appeared behind the cache's back was wrongly called absent."""
        world = World(absent_for="1h")
        async with world.cache:
            assert not (await world.prices.get("b")).found
            assert not (await world.prices.get("b")).found
            assert (await world.settled()).true == 1
            world.source.values["b"] = "new"
            await world.prices.get("b")
            assert (await world.later()).wrong == 1

    async def test_an_exception_that_raises_names_is_an_answer(self) -> None:
        """The cache gives a value, and the loader now raises `KeyError`, as callers should see."""
        world = World(raises=KeyError)
        async with world.cache:
            await world.prices("a")
            world.source.error = KeyError("gone")
            await world.prices("a")
            truth = await world.later()
            assert (truth.wrong, truth.failed) == (1, 0)

    @pytest.mark.parametrize("share", [True, False])
    async def test_values_are_equal_if_they_are_stored_alike(self, share: bool) -> None:
        """A tuple and the list that a store returns are one value; the order of keys is none."""
        world = World(share=share)
        world.source.values["a"] = {"x": (1, 2), "y": 3}
        async with world.cache:
            await world.prices("a")
            world.source.values["a"] = {"y": 3, "x": [1, 2]}
            await world.prices("a")
            assert (await world.settled()).true == 1


class TestE38Loaders:
    async def test_a_loader_that_fails_at_its_first_look_is_no_wrong_read(self) -> None:
        """The check is counted as failed, and no cooldown begins."""
        world = World()
        async with world.cache:
            await world.prices("a")
            world.source.error = RuntimeError("down")
            await world.prices("a")
            truth = await world.settled()
            assert (truth.checked, truth.failed) == (0, 1)
            assert (await world.stats()).failed == 0

    async def test_a_loader_that_fails_at_its_second_look_is_no_wrong_read(self) -> None:
        """What it would have said is not known."""
        world = World()
        async with world.cache:
            await world.prices("a")
            world.source.values["a"] = "new"
            await world.prices("a")
            await world.waits()
            world.source.error = RuntimeError("down")
            truth = await world.later()
            assert (truth.checked, truth.failed) == (0, 1)

    @pytest.mark.parametrize("error", [asyncio.CancelledError(), LoadFailed("no")])
    async def test_a_loader_that_cancels_itself_has_failed(self, error: BaseException) -> None:
        """And the check ends."""
        world = World()
        async with world.cache:
            await world.prices("a")
            world.source.error = error
            await world.prices("a")
            assert (await world.settled()).failed == 1

    async def test_a_loader_that_hangs_is_no_wrong_read(self) -> None:
        """It is given up after `load_timeout`."""
        world = World(load_timeout="10ms")
        async with world.cache:
            await world.prices("a")
            world.source.gate = asyncio.Event()
            await world.prices("a")
            for _ in range(1_000):
                if (await world.truth()).failed:
                    break
                await asyncio.sleep(0.01)
            truth = await world.truth()
            assert (truth.checked, truth.failed, truth.pending) == (0, 1, 0)

    async def test_a_value_that_cannot_be_stored_is_not_compared(self) -> None:
        """The loader returned something that is no value of the cache."""
        world = World()
        async with world.cache:
            await world.prices("a")
            world.source.values["a"] = object()
            await world.prices("a")
            assert (await world.settled()).failed == 1

    async def test_closing_cancels_the_checks_that_wait(self) -> None:
        """No task is left, and the counts that were made stay."""
        world = World()
        async with world.cache:
            await world.prices("a")
            await world.prices("a")
            await world.settled()
            world.source.values["a"] = "new"
            await world.prices("a")
            await world.waits()
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        async with world.cache:
            truth = await world.truth()
            assert (truth.true, truth.late, truth.wrong, truth.pending) == (1, 0, 0, 0)


class TestE38Budget:
    async def test_checks_call_the_loader_so_often_a_second_and_skip_the_rest(self) -> None:
        """The next second allows as many again."""
        world = World(check_calls=2)
        async with world.cache:
            await world.prices("a")
            for _ in range(5):
                await world.prices("a")
                await world.settled()
            truth = await world.settled()
            assert (truth.true, truth.skipped) == (2, 3)
            world.clock.advance(1)
            for _ in range(5):
                await world.prices("a")
                await world.settled()
            truth = await world.settled()
            assert (truth.true, truth.skipped) == (4, 6)

    async def test_second_looks_are_paid_for_as_well(self) -> None:
        """Two calls for one read that was late: the next second allows one check less."""
        world = World(check_calls=2)
        async with world.cache:
            await world.prices("a")
            world.source.values["a"] = "new"
            await world.prices("a")
            await world.waits()
            world.sleep.wake()
            await world.settled()
            before = world.source.calls
            await world.prices("a")
            await world.settled()
            assert world.source.calls == before

    async def test_reads_that_wait_for_their_second_look_are_bounded(self) -> None:
        """Beyond that, reads are skipped before the first look."""
        world = World(check_calls=100_000)
        keys = [f"k{number}" for number in range(MOST_PENDING + 20)]
        world.source.values = dict.fromkeys(keys, "old")
        async with world.cache:
            await world.prices.get_many(keys)
            world.source.values = dict.fromkeys(keys, "new")
            for key in keys:
                await world.prices(key)
                await world.until(lambda truth: len(world.sleep.asked) + truth.skipped > 0)
                for _ in range(5):
                    await asyncio.sleep(0)
            truth = await world.truth()
            assert truth.pending == MOST_PENDING
            assert truth.skipped == 20

    async def test_a_burst_of_reads_in_one_turn_is_bounded(self) -> None:
        """No more than so many wait for the loop."""
        world = World(check_calls=100_000)
        async with world.cache:
            await world.prices("a")
            for _ in range(10 * MOST_OFFERED):
                await world.prices("a")  # a hit gives the loop no turn
            truth = await world.settled()
            assert truth.checked <= MOST_OFFERED
            assert truth.checked + truth.skipped == 10 * MOST_OFFERED


class TestE38Sample:
    @pytest.mark.parametrize("share", [0.5, 0.1, 0.01])
    @pytest.mark.parametrize("store", ["memory", "sqlite"])
    async def test_the_sample_is_the_share_that_was_asked_for(
        self, stores: dict[str, str], store: str, share: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Within five standard deviations, whatever other reads are counted together. The dice are
        those of a seed, so a run cannot have bad luck."""
        dice = random.Random(38)
        monkeypatch.setattr("stillfresh.engine.core.Sampler", partial(Sampler, dice=dice.random))
        world = World(stores[store], check=share, check_calls=1_000_000)
        reads = 4_000
        async with world.cache:
            await world.prices("a")
            for number in range(reads):
                await world.prices("a")
                if number % 16 == 0:
                    await asyncio.sleep(0)
            await world.settled()
            stats = await world.stats()
            assert stats.truth is not None
            checked = stats.truth.checked + stats.truth.skipped
            assert abs(checked - reads * share) < 5 * (reads * share * (1 - share)) ** 0.5
            assert sum(stats.reads.values()) == reads + 1
            assert sum(stats.ages) == reads + 1

    async def test_reads_inside_bypassed_are_not_checked(self) -> None:
        """They are loads, not copies."""
        world = World()
        async with world.cache:
            await world.prices("a")
            with world.cache.bypassed():
                await world.prices("a")
            assert (await world.settled()).checked == 0


class TestE38Story:
    async def test_a_wrong_read_keeps_its_story(self, caplog: pytest.LogCaptureFixture) -> None:
        """The copy, its age, where it came from, the lease, and the last change of the key."""
        world = World()
        async with world.cache:
            await world.prices("a")
            world.clock.advance(2)
            await world.prices.invalidate("a")
            await world.prices("a")
            loaded_at = world.clock()
            world.source.values["a"] = "new"
            world.clock.advance(10)
            await world.prices("a")
            truth = await world.later()
            (story,) = truth.wrong_reads
            assert story.key == "'a'"
            assert story.served_at == loaded_at + 10
            assert (story.age, story.verdict, story.origin) == (10, "FRESH", "memory")
            assert (story.fetched_at, story.fresh_for) == (loaded_at, 3600)
            assert story.generation
            assert story.judged_at == loaded_at + 10 + WITHIN
            assert (story.changed_at, story.change) == (loaded_at, "invalidated")
            assert story.lease_until is None
            assert "price: a read was wrong: 'a': served FRESH from memory" in caplog.text
            assert "invalidated 10 s before" in caplog.text

    async def test_a_change_after_the_wrong_read_is_said_to_be_after_it(self) -> None:
        """It came before the loader was asked, so it does not excuse the read (E38)."""
        world = World()
        async with world.cache:
            await world.prices("a")
            world.source.values["a"] = "new"
            await world.prices("a")
            (story,) = (await world.later()).wrong_reads
            after = replace(story, change="put", changed_at=story.served_at + 1)
            assert "put 1 s after" in str(after)
            before = replace(story, change="put", changed_at=story.served_at - 1)
            assert "put 1 s before" in str(before)

    async def test_only_the_last_stories_are_kept(self) -> None:
        """The count goes on."""
        world = World(check_calls=100_000)
        keys = [f"k{number}" for number in range(15)]
        world.source.values = dict.fromkeys(keys, "old")
        async with world.cache:
            await world.prices.get_many(keys)
            world.source.values = dict.fromkeys(keys, "new")
            for key in keys:
                await world.prices(key)
                await world.later()
            truth = await world.truth()
            assert truth.wrong == 15
            assert [story.key for story in truth.wrong_reads] == [repr(key) for key in keys[5:]]


class TestE38Statistics:
    async def test_statistics_metrics_and_text_show_the_supported_nines(self) -> None:
        """3,000 clean reads would support three; ten support half a nine."""
        world = World(objective="99.99% of reads true within 5s", true_within=None)
        async with world.cache:
            await world.prices("a")
            for _ in range(10):
                await world.prices("a")
                await world.settled()
            stats = await world.stats()
            assert stats.truth is not None
            assert stats.truth.nines == pytest.approx(0.5229, abs=1e-4)
            assert stats.truth.objective == TruthObjective(0.9999, 5.0)
            assert stats.truth.burn_rate == 0
            assert "10 checked, 0 late, 0 wrong, 0.5 nines" in str(stats)
            lines = prometheus_text(await world.cache.stats()).splitlines()
            for sample in (
                'stillfresh_checked_total{resource="price"} 10',
                'stillfresh_checked_late_total{resource="price"} 0',
                'stillfresh_checked_wrong_total{resource="price"} 0',
                'stillfresh_objective_true_share{resource="price"} 0.9999',
                'stillfresh_objective_true_within_seconds{resource="price"} 5.0',
            ):
                assert sample in lines
            (nines,) = [line for line in lines if line.startswith("stillfresh_supported_nines{")]
            assert float(nines.split()[1]) == pytest.approx(0.5229, abs=1e-4)

    async def test_without_check_nothing_is_shown(self) -> None:
        """Neither in the statistics nor in `/metrics`."""
        cache = Cache("memory://")

        @cache.cached("report", fresh_for="1m")
        async def report(year: int) -> int:
            return year

        async with cache:
            await report(2026)
            stats = await cache.stats()
            assert stats.resources["report"].truth is None
            assert "checked" not in prometheus_text(stats)

    async def test_an_objective_of_age_stands_beside_one_of_truth(self) -> None:
        """Each is counted by itself."""
        age = "99% of reads younger than 1m"
        truth = "99.9% of reads true within 5s"
        world = World(objective=(age, truth), true_within=None)
        async with world.cache:
            await world.prices("a")
            await world.prices("a")
            await world.settled()
            stats = await world.stats()
            assert (stats.objective_met, stats.objective_missed) == (2, 0)
            assert stats.truth is not None
            assert stats.truth.true_within == 5.0


class TestE38Options:
    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"check": 2}, "check: must be a number above 0, up to 1, not 2"),
            ({"check": -0.1}, "check: must be a number above 0"),
            ({"check": True}, "check: must be a number above 0"),
            ({"check": 0.1, "true_within": 0}, "true_within"),
            ({"check": 0.1, "check_calls": 0}, "check_calls is a number of calls a second"),
            ({"check": 0.1, "check_calls": True}, "check_calls is a number of calls a second"),
            ({"true_within": "5s"}, "true_within needs check"),
            ({"objective": "99% of reads true within 5s"}, "an objective of truth needs check"),
            (
                {"check": 0.1, "true_within": 4, "objective": "99% of reads true within 5s"},
                "leave out true_within",
            ),
            (
                {"check": 0.1, "objective": ["99% of reads true within 5s"] * 2},
                "a second objective of the same form",
            ),
            (
                {"objective": ["99% of reads younger than 5s"] * 2},
                "a second objective of the same form",
            ),
            ({"check": 0.1, "objective": "100% of reads true within 5s"}, "cannot read"),
            ({"check": 0.1, "objective": "99% of reads true within 0s"}, "objective"),
            ({"check": 0.1, "objective": "always"}, "true within 5s"),
        ],
    )
    def test_options_that_cannot_be_used_are_refused(
        self, options: dict[str, Any], why: str
    ) -> None:
        """At the declaration, with what to write."""
        with pytest.raises(ConfigError) as caught:
            World(**{"check": 0.0, "true_within": None, **options})
        assert why in str(caught.value)
        assert str(caught.value).startswith("price: ")

    def test_a_function_that_ignores_arguments_cannot_be_checked(self) -> None:
        """The cache could not call it again."""
        cache = Cache("memory://")
        with pytest.raises(ConfigError, match="leave out key and ignore, or check"):

            @cache.cached("report", fresh_for="1m", check=0.1, ignore=["session"])
            async def report(session: object, year: int) -> int:
                return year


class TestE38CachedFunctions:
    async def test_a_cached_function_is_called_again_with_its_arguments(self) -> None:
        """Of a method `of(...)` and of the call alike."""
        sleep = Sleeper()
        cache = Cache("memory://", sleep=sleep)
        calls: list[tuple[int, str]] = []

        @cache.cached("report", fresh_for="1h", check=1.0)
        async def report(year: int, region: str = "eu") -> str:
            calls.append((year, region))
            return f"{year} {region}"

        async with cache:
            await report(2026)
            await report(2026, region="eu")
            for _ in range(20):
                await asyncio.sleep(0)
            await report(2026)
            for _ in range(20):
                await asyncio.sleep(0)
            truth = (await cache.stats()).resources["report"].truth
            assert truth is not None
            assert truth.true == 2
            assert calls == [(2026, "eu")] * 3


class TestE38Sync:
    @pytest.mark.parametrize("store", ["memory", "sqlite"])
    def test_reads_of_threads_are_checked_in_a_thread(
        self, stores: dict[str, str], store: str
    ) -> None:
        """E20: the loader runs in the pool, and no caller waits for it."""
        cache = SyncCache(stores[store])
        looked = threading.Semaphore(0)
        threads: set[str] = set()
        values = {"a": "old"}

        @cache.batched("price", fresh_for="1h", check=1.0, true_within="1ms")
        def prices(keys: list[str]) -> dict[str, str]:
            threads.add(threading.current_thread().name)
            looked.release()
            return {key: values[key] for key in keys}

        def truth() -> TruthStats:
            truth = cache.stats().resources["price"].truth
            assert truth is not None
            return truth

        def wait_until(reached: Callable[[TruthStats], bool]) -> None:
            pause = threading.Event()
            for _ in range(3_000):
                if reached(truth()):
                    return
                pause.wait(0.01)
            raise AssertionError(truth())

        assert prices("a") == "old"
        assert looked.acquire(timeout=30)
        assert prices("a") == "old"
        assert looked.acquire(timeout=30)
        wait_until(lambda stats: stats.true == 1)
        values["a"] = "new"
        assert prices("a") == "old"
        wait_until(lambda stats: stats.wrong == 1)
        cache.close()
        assert any(name.startswith("stillfresh-loader") for name in threads)
