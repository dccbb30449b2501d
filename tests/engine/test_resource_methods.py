"""Methods of a resource that look, refresh, add and touch, on every store (E2, E12, E17)."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from weakref import ref

import msgspec
import pytest

from stillfresh import Cache, ConfigError, LoadFailed, Origin, Policy, Resource, Verdict
from stillfresh.stores.contract import Mark
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Prices, Sleeper, Upstream, declare, idle, turns, until, version
from tests.kit.held_store import SteppedStore, cache_on


class Body(msgspec.Struct, frozen=True, weakref=True):
    """A value whose end can be noticed."""

    text: str


@pytest.fixture(params=["memory", "sqlite"])
async def local(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock, upstream: Upstream
) -> AsyncIterator[Prices]:
    """Prices on a store that goes by the test's clock."""
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/local.db"
    async with Cache(url, clock=clock) as cache:
        yield declare(cache, upstream)


async def reads_of(prices: Prices) -> int:
    """How many reads were counted so far."""
    return sum((await prices.stats()).reads.values())


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
        assert await reads_of(prices) == 2

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
        before = await reads_of(prices)
        await prices.get_stored("a")
        assert await reads_of(prices) == before

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


class TestAnswers:
    async def test_an_answer_has_the_times_of_its_copy(self, prices: Prices) -> None:
        """Those of the resource, or those that the value came with."""
        loaded = await prices.get("a")
        assert loaded.policy == prices.policy == Policy(30, 60, 3600)
        await prices.put("b", Price("b", 1), fresh_for=5)
        for answer in (await prices.get("b"), await prices.get_stored("b"), prices.peek("b")):
            assert answer is not None
            assert answer.policy == Policy(5, 60, 3600)

    @pytest.mark.parametrize(("soft", "mark"), [(True, Mark.SOFT), (False, Mark.HARD)])
    async def test_an_answer_says_how_its_copy_was_invalidated(
        self, prices: Prices, soft: bool, mark: Mark
    ) -> None:
        await prices.get("a")
        await prices.invalidate("a", soft=soft)
        stored = await prices.get_stored("a")
        assert stored is not None
        assert stored.mark is mark
        assert (await prices.refresh("a"))["a"].mark is Mark.NONE

    async def test_the_answer_of_a_failed_load_has_no_times(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        upstream.error = RuntimeError("down")
        answer = (await prices.get_many(["a"]))["a"]
        assert answer.error is not None
        assert answer.policy == Policy(0)


class TestLastAnswer:
    async def test_it_is_the_answer_in_memory_however_old(
        self, local: Prices, clock: ManualClock
    ) -> None:
        assert local.last_answer("a") is None
        await local.get("a")
        last = local.last_answer("a")
        clock.advance(10_000)
        assert local.last_answer("a") is last
        assert last is not None
        assert last.verdict is Verdict.FRESH, "it is not judged again"

    async def test_it_is_none_after_an_invalidation(self, local: Prices) -> None:
        await local.get("a")
        await local.invalidate("a")
        assert local.last_answer("a") is None


class TestMemo:
    async def test_it_returns_the_last_answer_while_nothing_changes_and_counts_each_key(
        self, local: Prices, clock: ManualClock
    ) -> None:
        await local.get_many(["a", "b"])
        found = local.memo(["a", "b"])
        assert found is not None
        memo, answers = found
        assert [version(answer) for answer in answers] == [1, 1]
        before = await reads_of(local)
        for _ in range(3):
            assert memo.read(clock()) is answers[-1]
            memo.count(clock())
        assert await reads_of(local) == before + 6

    @pytest.mark.parametrize("changed", ["a", "b"])
    @pytest.mark.parametrize("how", ["invalidate", "delete", "put", "refresh", "clear", "stale"])
    async def test_it_returns_none_after_a_change_of_any_key_and_counts_nothing(
        self, local: Prices, clock: ManualClock, changed: str, how: str
    ) -> None:
        await local.get_many(["a", "b"])
        found = local.memo(["a", "b"])
        assert found is not None
        memo, _ = found
        match how:
            case "put":
                await local.put(changed, Price(changed, 9))
            case "clear":
                await local.clear()
            case "stale":
                clock.advance(31)
            case _:
                await getattr(local, how)(changed)
        before = await reads_of(local)
        assert memo.read(clock()) is None
        assert await reads_of(local) == before

    async def test_a_read_is_counted_only_if_its_answer_is_used(
        self, local: Prices, clock: ManualClock
    ) -> None:
        await local.get_many(["a", "b"])
        found = local.memo(["a", "b"])
        assert found is not None
        memo, _ = found
        before = await reads_of(local)
        memo.read(clock())
        assert await reads_of(local) == before

    async def test_it_returns_none_inside_a_block_and_on_another_store(
        self, cache: Cache, prices: Prices, clock: ManualClock
    ) -> None:
        await prices.get("a")
        found = prices.memo(["a"])
        assert found is not None
        memo, _ = found
        with cache.bypassed():
            assert memo.read(clock()) is None
            assert prices.memo(["a"]) is None
        async with cache.override("memory://"):
            assert memo.read(clock()) is None
        assert memo.read(clock()) is None

    async def test_there_is_none_of_a_key_that_is_not_in_memory(self, local: Prices) -> None:
        await local.get("a")
        assert local.memo(["a", "b"]) is None

    async def test_there_is_none_of_a_stale_or_absent_answer(
        self, local: Prices, clock: ManualClock, upstream: Upstream
    ) -> None:
        upstream.absent.add("b")
        await local.get_many(["a", "b"])
        assert local.memo(["b"]) is None
        clock.advance(31)
        upstream.hold()
        await local.get("a")
        assert local.memo(["a"]) is None
        upstream.let_go()

    async def test_a_dropped_value_is_not_kept_alive(self, cache: Cache) -> None:
        """Who remembers many responses holds none of their bytes."""

        @cache.batched("body", fresh_for=30)
        async def bodies(paths: list[str]) -> dict[str, Body]:
            return {path: Body(path) for path in paths}

        await bodies.get("a")
        found = bodies.memo(["a"])
        assert found is not None
        memo, answers = found
        value = ref(answers[0].value)
        del found, answers
        await bodies.delete("a")
        await turns()
        gc.collect()
        assert value() is None
        assert memo.read(cache.clock()) is None


class TestCountRead:
    async def test_a_read_that_another_layer_answered_is_counted_and_recorded(
        self, cache: Cache, prices: Prices, tmp_path: Path
    ) -> None:
        answer = await prices.get("a")
        path = tmp_path / "reads.jsonl"
        async with cache.recording(path):
            prices.count_read("a", answer)
            prices.count_read("a", answer, is_recorded=True)
        assert await reads_of(prices) == 3
        assert path.read_bytes().count(b'"read"') == 1


class TestForget:
    @pytest.mark.parametrize("by", ["key", "tag"])
    async def test_it_drops_an_entry_from_memory_and_leaves_the_store(
        self, cache: Cache, upstream: Upstream, by: str
    ) -> None:
        prices = declare(cache, upstream, tags=lambda sku: [f"tag:{sku}"])
        await prices.get_many(["a", "b"])
        if by == "key":
            prices.forget("a")
        else:
            prices.forget(tag="tag:a")
        assert prices.last_answer("a") is None
        assert prices.last_answer("b") is not None
        assert await prices.get_stored("a") is not None
        assert len(upstream.calls) == 1

    async def test_a_put_that_waits_for_its_turn_is_stored_all_the_same(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """The store is not told, so nothing that others wrote may be lost."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            first = await store.holding("put", prices.put("a", Price("a", 6)))
            second = asyncio.create_task(prices.put("a", Price("a", 7)))
            await turns()
            prices.forget("a")
            store.let_go("put")
            await first
            assert (await second).stored
            assert version(await prices.get("a")) == 7

    async def test_a_load_that_runs_is_not_kept(self, prices: Prices, upstream: Upstream) -> None:
        upstream.hold()
        getting = asyncio.create_task(prices.get("a"))
        await until(lambda: bool(upstream.calls))
        prices.forget("a")
        upstream.let_go()
        assert (await getting).verdict is Verdict.STALE
        # The next load follows at once, and finds the copy in the store.
        has_asked_again = (await prices.stats()).leases_denied == 1
        assert has_asked_again or prices.last_answer("a") is None


class TestLoadsUnderWay:
    async def test_it_is_full_for_other_keys_while_concurrency_keys_are_loaded(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        prices = declare(cache, upstream, concurrency=1, max_batch=1)
        assert not prices.is_full("a")
        upstream.hold()
        getting = asyncio.create_task(prices.get("a"))
        await until(lambda: bool(upstream.calls))
        assert prices.is_full("b")
        assert not prices.is_full("a")
        upstream.let_go()
        await getting

    async def test_a_load_is_live_until_its_key_is_invalidated(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        assert not await prices.has_live_load("a")
        upstream.hold()
        getting = asyncio.create_task(prices.get("a"))
        await until(lambda: bool(upstream.calls))
        assert await prices.has_live_load("a")
        await prices.invalidate("a")
        assert not await prices.has_live_load("a")
        upstream.let_go()
        await getting

    async def test_settled_waits_for_loads_for_a_limited_time(
        self, local: Prices, upstream: Upstream
    ) -> None:
        upstream.hold()
        getting = asyncio.create_task(local.get("a"))
        await until(lambda: bool(upstream.calls))
        assert not await local.settled(0.01)
        upstream.let_go()
        assert await local.settled("10s")
        await getting


class TestClearAndCount:
    async def test_clear_deletes_every_entry_of_its_resource_alone(
        self, cache: Cache, prices: Prices
    ) -> None:
        @cache.cached("other", fresh_for=30)
        async def other(number: int) -> int:
            return number

        await other(1)
        await prices.get_many(["a", "b"])
        await prices.clear()
        assert {entry.kind for entry in await cache.entries()} == {"other"}
        assert await prices.get_stored("a") is None

    async def test_stats_count_one_resource(self, cache: Cache, prices: Prices) -> None:
        await prices.get("a")
        stats = await prices.stats()
        assert (stats.reads[Verdict.FRESH], stats.loads) == (1, 1)
        assert stats == (await cache.stats()).resources["price"]


class TestKeysAndIds:
    async def test_the_key_of_an_id_is_found_only_by_its_own_spelling(self, cache: Cache) -> None:
        @cache.batched("number", fresh_for=30)
        async def numbers(keys: list[int]) -> dict[int, int]:
            return dict.fromkeys(keys, 1)

        assert numbers.key_of("7") == 7
        for wrong in ("07", "seven", ""):
            with pytest.raises(ConfigError, match="number"):
                numbers.key_of(wrong)

    async def test_a_function_cannot_be_loaded_by_a_key_alone(
        self, cache: Cache, prices: Prices
    ) -> None:
        @cache.cached("double", fresh_for=30)
        async def double(number: int) -> int:
            return 2 * number

        assert prices.loads_by_key
        assert not double.resource.loads_by_key


class TestCache:
    async def test_its_resources_are_known_by_name(self, cache: Cache, prices: Prices) -> None:
        @cache.cached("double", fresh_for=30)
        async def double(number: int) -> int:
            return 2 * number

        assert cache.resources == {"price": prices, "double": double.resource}

    async def test_its_store_is_open(self, cache: Cache, prices: Prices) -> None:
        await prices.get("a")
        store = await cache.store()
        assert (await store.read("price", ["a"]))["a"].copy is not None

    async def test_it_is_bypassed_only_inside_a_block_of_the_same_task(self, cache: Cache) -> None:
        async def look() -> bool:
            return cache.is_bypassed()

        with cache.bypassed():
            assert cache.is_bypassed()
            assert await asyncio.create_task(look())
        assert not cache.is_bypassed()

    async def test_it_is_recording_inside_a_block(self, cache: Cache, tmp_path: Path) -> None:
        async with cache.recording(tmp_path / "reads.jsonl"):
            assert cache.is_recording
        assert not cache.is_recording


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
