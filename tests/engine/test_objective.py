"""G14: the freshness objective of a resource, and how old its answers were on average."""

import platform
from importlib.metadata import version
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import Cache, ConfigError, SyncCache, prometheus_text
from stillfresh.engine import Answer, Objective, Origin, ResourceStats
from stillfresh.engine.counts import MOST_SAMPLES, SAMPLE, Counts
from stillfresh.engine.entry import Entry
from stillfresh.engine.model import left_of
from stillfresh.engine.rules import AGE_BUCKETS
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Policy
from stillfresh.stores.contract import Copy
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Upstream, declare

NO_FIGURES = dict.fromkeys(("entries", "bytes", "loading", "queued", "watched", "max_batch"), 0)
WANTED = "99% of reads younger than 1m"


async def counts(cache: Cache) -> ResourceStats:
    return (await cache.stats()).resources["price"]


class TestG14ObjectiveText:
    @given(
        thousandths=st.integers(1, 99_999),
        age=st.sampled_from([("250ms", 0.25), ("1.5s", 1.5), ("1m", 60.0), ("30d", 2_592_000.0)]),
    )
    def test_an_objective_is_a_share_and_an_age(
        self, thousandths: int, age: tuple[str, float]
    ) -> None:
        """Both are read as they are written."""
        found = Objective.of(f"{thousandths / 1000:.3f}% of reads younger than {age[0]}")
        assert found.share == pytest.approx(thousandths / 100_000)
        assert found.age == age[1]

    @pytest.mark.parametrize(
        "wrong",
        [
            "100% of reads younger than 1m",
            "0% of reads younger than 1m",
            "-1% of reads younger than 1m",
            "99 of reads younger than 1m",
            "99% of reads younger than",
            "99% of reads older than 1m",
            "99%",
            "",
            99,
            None,
            b"99% of reads younger than 1m",
        ],
    )
    def test_an_objective_of_another_form_is_refused(self, wrong: str) -> None:
        """The error names the value, and says what to write."""
        with pytest.raises(ConfigError) as caught:
            Objective.of(wrong, name="price: objective")
        said = str(caught.value)
        assert said.startswith("price: objective: cannot read ")
        assert "write a share above 0% and below 100%" in said
        assert "'99% of reads younger than 1m'" in said

    @pytest.mark.parametrize("age", ["1 m", "soon", "0s", "1y"])
    def test_an_age_that_is_none_is_refused(self, age: str) -> None:
        """It is a duration like all others, and more than zero."""
        with pytest.raises(ConfigError, match="objective: "):
            Objective.of(f"99% of reads younger than {age}")

    def test_a_declaration_with_a_wrong_objective_is_refused(self, upstream: Upstream) -> None:
        """At once, with the resource's name."""
        with pytest.raises(ConfigError, match=r"^price: objective: cannot read 'always'"):
            declare(Cache("memory://"), upstream, objective="always")

    def test_a_burn_rate_of_one_is_what_the_objective_allows(self) -> None:
        """Of reads that all miss it is 100 for a 99% objective; of none there is no rate."""
        objective = Objective.of(WANTED)
        assert objective.burn_rate(99, 1) == pytest.approx(1)
        assert objective.burn_rate(0, 7) == pytest.approx(100)
        assert objective.burn_rate(7, 0) == 0
        assert objective.burn_rate(0, 0) is None


class TestG14Objective:
    @pytest.mark.parametrize("wanted", [60.0, 45.0, 0.05, 10_000_000.0])
    async def test_every_read_meets_it_or_misses_it(
        self, cache: Cache, upstream: Upstream, clock: ManualClock, wanted: float
    ) -> None:
        """By its age when it was served; the histogram keeps its bounds, whatever the objective."""
        text = f"99% of reads younger than {wanted:f}s"
        prices = declare(cache, upstream, fresh_for="2m", stale_for=0, objective=text)
        dice = Random(wanted)
        ages: list[float] = []
        for _ in range(60):
            clock.advance(dice.choice([0, 0, 0.01, 0.03, 1, 7, wanted if wanted < 100 else 3]))
            answer = await (prices.get("a") if dice.random() < 0.7 else prices.of("a").get())
            ages.append(answer.age)
            is_hit = answer.origin is not Origin.LOADED
            # So that hits of one age are counted together.
            ages += [(await prices.get("a")).age for _ in range(SAMPLE - is_hit)]
        found = await counts(cache)
        met = sum(age < wanted for age in ages)
        assert (found.objective_met, found.objective_missed) == (met, len(ages) - met)
        assert found.met_share == met / len(ages)
        assert len(found.ages) == len(AGE_BUCKETS) + 1
        for at, (low, high) in enumerate(pairwise((0, *AGE_BUCKETS, float("inf")))):
            assert found.ages[at] == sum(low <= age < high for age in ages)

    def test_of_a_sync_cache(self) -> None:
        """E20: the same option, the same counts."""
        cache = SyncCache("memory://")

        @cache.cached("price", fresh_for="30s", objective=WANTED)
        def price(sku: str) -> str:
            return sku

        assert [price("a"), price("a")] == ["a", "a"]
        found = cache.stats().resources["price"]
        cache.close()
        assert (found.objective, found.objective_met) == (Objective(0.99, 60.0), 2)

    async def test_a_read_that_fails_misses_it(self, cache: Cache, upstream: Upstream) -> None:
        """Nothing is not young."""
        prices = declare(cache, upstream, objective=WANTED)
        upstream.error = RuntimeError("down")
        with pytest.raises(LoadFailed):
            await prices.get("a")
        found = await counts(cache)
        assert (found.objective_met, found.objective_missed) == (0, 1)

    async def test_without_one_nothing_is_counted(self, cache: Cache, upstream: Upstream) -> None:
        """And `/metrics` does not name it."""
        await declare(cache, upstream)("a")
        found = await counts(cache)
        assert (found.objective, found.objective_met, found.objective_missed) == (None, 0, 0)
        assert found.met_share is None
        assert "objective" not in prometheus_text(await cache.stats())

    async def test_counters_and_the_target_for_prometheus(
        self, cache: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """From which a burn rate is one expression."""
        prices = declare(cache, upstream, fresh_for="2m", objective=WANTED)
        for _ in range(1 + SAMPLE):
            await prices("a")
        clock.advance(60)
        await prices("a")
        lines = prometheus_text(await cache.stats()).splitlines()
        for sample in (
            'stillfresh_objective_share{resource="price"} 0.99',
            'stillfresh_objective_age_seconds{resource="price"} 60.0',
            'stillfresh_objective_met_total{resource="price"} 17',
            'stillfresh_objective_missed_total{resource="price"} 1',
        ):
            assert sample in lines


class TestG14AgeSum:
    async def test_reads_of_the_store_and_of_loads_count_exactly(
        self, upstream: Upstream, clock: ManualClock, tmp_path: object
    ) -> None:
        """Each read has its own age."""
        async with Cache(f"sqlite:///{tmp_path}/a.db", clock=clock) as cache:
            prices = declare(cache, upstream, fresh_for="1h", max_entries=1)
            for pause in (0, 3, 40.5):
                clock.advance(pause)
                await prices("a")
                await prices.put("another", Price("another", 1))  # memory has room for one
            assert (await counts(cache)).age_sum == pytest.approx(0 + 3 + 43.5)

    async def test_one_hit_in_sixteen_is_looked_at_and_counts_for_all(
        self, upstream: Upstream, clock: ManualClock
    ) -> None:
        """E12: the first of sixteen, here at 610 s; the seventeenth at 625 s."""
        async with Cache("memory://", clock=clock) as cache:
            prices = declare(cache, upstream, fresh_for="1h")
            await prices("a")
            clock.advance(610)
            for _ in range(15):
                await prices("a")
                clock.advance(1)
            assert (await counts(cache)).age_sum == pytest.approx(15 * 610)
            await prices("a")
            assert (await counts(cache)).age_sum == pytest.approx(16 * 610)
            await prices("a")
            assert (await counts(cache)).age_sum == pytest.approx(16 * 610 + 625)

    @given(st.lists(st.tuples(st.floats(-10, 1e6), st.sampled_from(["hit", "note"]))))
    def test_each_read_has_an_age_and_the_sum_fits_the_buckets(
        self, reads: list[tuple[float, str]]
    ) -> None:
        """E12: however many were looked at, and whatever a clock that was set does."""
        counted = Counts()
        answer: Answer[None] = left_of(None, LoadFailed("x"), lambda: 0.0)
        entry: Entry[str, None] = Entry("a", Copy("g", 0.0, Policy(60), b""), answer)
        for now, how in reads:
            if how == "hit":
                counted.on_loop.hit(entry, answer, now)
            else:
                counted.on_loop.note("a", answer, now)
        stats = counted.stats(0.0, **NO_FIGURES)
        assert sum(stats.ages) == sum(stats.reads.values()) == len(reads)
        lows = (0.0, *AGE_BUCKETS)
        highs = (*AGE_BUCKETS, 1e6)
        low = sum(count * low for count, low in zip(stats.ages, lows, strict=True))
        high = sum(count * high for count, high in zip(stats.ages, highs, strict=True))
        assert low * 0.999 - 1 <= stats.age_sum <= high * 1.001

    def test_many_hits_keep_their_ages_and_their_number(self) -> None:
        """E12: ages that were looked at are sorted into the buckets when there are many."""
        counted = Counts()
        answer: Answer[None] = left_of(None, LoadFailed("x"), lambda: 0.0)
        entry: Entry[str, None] = Entry("a", Copy("g", 0.0, Policy(60), b""), answer)
        expected = dict.fromkeys((*AGE_BUCKETS, float("inf")), 0)
        hits = 0
        for number in range(3 * MOST_SAMPLES):
            age = float(number * number - 10)
            bound = next((bound for bound in AGE_BUCKETS if age < bound), float("inf"))
            for _ in range(SAMPLE):
                counted.on_loop.hit(entry, answer, age)
                hits += 1
                expected[bound] += 1
            stats = counted.stats(0.0, **NO_FIGURES)
            assert list(stats.ages) == list(expected.values())
            assert stats.hits == hits

    async def test_the_sum_stands_beside_the_buckets(
        self, cache: Cache, upstream: Upstream, clock: ManualClock
    ) -> None:
        """A mean age is `_sum` divided by `_count`."""
        prices = declare(cache, upstream, fresh_for="1h")
        await prices("a")
        clock.advance(2.5)
        await prices("b")
        lines = prometheus_text(await cache.stats()).splitlines()
        assert 'stillfresh_age_seconds_sum{resource="price"} 0.000' in lines
        assert 'stillfresh_age_seconds_count{resource="price"} 2' in lines


class TestG14Build:
    async def test_the_version_and_the_python(self, cache: Cache) -> None:
        """One sample, whose value is 1."""
        (line,) = [
            it
            for it in prometheus_text(await cache.stats()).splitlines()
            if it.startswith("stillfresh_build_info")
        ]
        release, python = version("stillfresh"), platform.python_version()
        assert line == f'stillfresh_build_info{{version="{release}",python="{python}"}} 1'
