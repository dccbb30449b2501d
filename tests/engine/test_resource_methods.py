"""Methods of a resource that look, refresh, add and touch, on every store (E2, E12, E17)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stillfresh import Cache, ConfigError, LoadFailed, Origin, Resource, Verdict
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Prices, Upstream, declare, idle, version


@pytest.fixture(params=["memory", "sqlite"])
async def local(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock, upstream: Upstream
) -> AsyncIterator[Prices]:
    """Prices on a store that goes by the test's clock."""
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/local.db"
    async with Cache(url, clock=clock) as cache:
        yield declare(cache, upstream)


async def reads_of(cache: Cache) -> int:
    stats = (await cache.stats()).resources["price"]
    return sum(stats.reads.values())


class TestRefresh:
    async def test_a_refresh_returns_the_answers_of_its_loads(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        await prices.get("a")
        upstream.version = 2
        answers = await prices.refresh("a", "b", "a")
        assert {key: version(answer) for key, answer in answers.items()} == {"a": 2, "b": 2}
        assert version(await prices.of("a").refresh()) == 2

    async def test_a_refresh_raises_if_one_key_failed(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        await prices.get("a")
        upstream.error = RuntimeError("no answer")
        with pytest.raises(LoadFailed, match="no answer"):
            await prices.refresh("a")


class TestGetNowait:
    async def test_get_nowait_returns_none_before_the_first_load(self, prices: Prices) -> None:
        assert prices.get_nowait("a") is None

    async def test_it_returns_what_get_returns_and_counts_a_read(
        self, cache: Cache, prices: Prices, url: str
    ) -> None:
        await prices.get("a")
        answer = prices.get_nowait("a")
        if url.startswith("redis"):  # only its server knows whether the copy is still current
            assert answer is None
            return
        assert answer is not None
        assert version(answer) == 1
        assert await reads_of(cache) == 2

    async def test_it_returns_none_for_a_stale_copy_and_starts_no_load(
        self, local: Prices, clock: ManualClock, upstream: Upstream
    ) -> None:
        await local.get("a")
        clock.advance(31)
        assert local.get_nowait("a") is None
        assert len(upstream.calls) == 1

    async def test_get_nowait_returns_none_for_an_invalidated_copy(self, local: Prices) -> None:
        await local.get("a")
        await local.invalidate("a")
        assert local.get_nowait("a") is None

    async def test_it_returns_none_inside_a_block_that_bypasses_the_cache(
        self, cache: Cache, prices: Prices
    ) -> None:
        await prices.get("a")
        with cache.bypassed():
            assert prices.get_nowait("a") is None

    async def test_it_refuses_a_key_that_cannot_be_hashed(self, prices: Prices) -> None:
        with pytest.raises(ConfigError, match="price"):
            prices.get_nowait(["a"])  # type: ignore[arg-type]


class TestGetStored:
    async def test_it_returns_none_without_a_copy_and_loads_nothing(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        assert await prices.get_stored("a") is None
        assert upstream.calls == []

    @pytest.mark.parametrize(
        ("age", "verdict"), [(1, Verdict.FRESH), (31, Verdict.STALE), (91, Verdict.EXPIRED)]
    )
    async def test_get_stored_returns_the_copy_however_old(
        self,
        prices: Prices,
        clock: ManualClock,
        upstream: Upstream,
        age: float,
        verdict: Verdict,
    ) -> None:
        await prices.get("a")
        clock.advance(age)
        answer = await prices.get_stored("a")
        assert answer is not None
        assert answer.verdict is verdict
        assert len(upstream.calls) == 1

    async def test_it_returns_none_for_a_copy_that_is_gone(
        self, prices: Prices, clock: ManualClock
    ) -> None:
        await prices.get("a")
        clock.advance(30 + 3600)
        assert await prices.get_stored("a") is None

    async def test_get_stored_is_not_counted_as_a_read(self, cache: Cache, prices: Prices) -> None:
        await prices.get("a")
        before = await reads_of(cache)
        await prices.get_stored("a")
        assert await reads_of(cache) == before

    async def test_get_stored_refuses_an_invalid_key(self, prices: Prices) -> None:
        with pytest.raises(ConfigError, match="price"):
            await prices.get_stored(7)  # type: ignore[arg-type]


class TestAdd:
    async def test_a_value_is_added_where_there_is_none(
        self, local: Prices, upstream: Upstream
    ) -> None:
        assert (await local.add("a", Price("a", 7))).stored
        assert version(await local.get("a")) == 7
        assert upstream.calls == []

    async def test_add_leaves_a_fresh_copy(self, local: Prices) -> None:
        await local.get("a")
        assert not (await local.add("a", Price("a", 7))).stored
        assert version(await local.get("a")) == 1

    async def test_add_replaces_a_stale_copy(self, local: Prices, clock: ManualClock) -> None:
        await local.get("a")
        clock.advance(31)
        assert (await local.add("a", Price("a", 7))).stored

    async def test_add_replaces_an_invalidated_copy(self, local: Prices) -> None:
        await local.get("a")
        await local.invalidate("a")
        assert (await local.add("a", Price("a", 7))).stored

    async def test_one_of_several_callers_of_add_stores_its_value(self, local: Prices) -> None:
        values = [Price("a", number) for number in range(5)]
        results = await asyncio.gather(*(local.add("a", value) for value in values))
        assert [result.stored for result in results].count(True) == 1

    async def test_add_may_have_its_own_terms(self, local: Prices, clock: ManualClock) -> None:
        await local.add("a", Price("a", 7), fresh_for=5)
        clock.advance(6)
        answer = await local.get_stored("a")
        assert answer is not None
        assert answer.verdict is Verdict.STALE


class TestTouch:
    async def test_a_fresh_copy_gets_new_times_and_keeps_its_value(
        self, local: Prices, clock: ManualClock, upstream: Upstream
    ) -> None:
        await local.get("a")
        clock.advance(20)
        assert (await local.touch("a")).stored
        clock.advance(20)
        answer = await local.get("a")
        assert answer.verdict is Verdict.FRESH
        assert answer.age == 20
        assert len(upstream.calls) == 1

    async def test_touch_may_have_times_of_its_own(self, local: Prices, clock: ManualClock) -> None:
        await local.get("a")
        await local.touch("a", fresh_for=500)
        clock.advance(499)
        assert (await local.get("a")).verdict is Verdict.FRESH

    async def test_touch_stores_nothing_without_a_fresh_copy(
        self, local: Prices, clock: ManualClock
    ) -> None:
        assert not (await local.touch("a")).stored
        await local.get("a")
        clock.advance(31)
        assert not (await local.touch("a")).stored


async def test_a_declared_resource_has_keys_of_any_type(cache: Cache) -> None:
    """The keys of a cached function are its calls: any arguments that can be written as text."""

    @cache.cached("sum", fresh_for=30)
    async def total(first: int, second: int) -> int:
        return first + second

    resource: Resource[object, int] = total.resource
    call = total.signature.call(1, 2)
    assert await total(1, 2) == 3
    await idle(cache)
    stored = await resource.get_stored(call)
    assert stored is not None
    assert stored.value == 3
    assert stored.origin in {Origin.MEMORY, Origin.STORE}
