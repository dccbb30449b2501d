"""Freshness for one call: E18."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import Cache, ConfigError, LoadFailed, Policy, Verdict
from stillfresh.engine.rules import MustLoad, Plan, Serve, cooling, plan_read, verdict_of
from stillfresh.stores.contract import Copy, Failure, Mark, Record
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Prices, Sleeper, Upstream, declare, idle, turns, version
from tests.kit.held_store import SteppedStore, cache_on, lease_of

FRESH, STALE, EXPIRED, GONE = Verdict

SECONDS = st.integers(0, 40).map(float)
COPIES = st.builds(
    Copy,
    st.just("g"),
    SECONDS,
    st.builds(Policy, SECONDS, SECONDS, SECONDS),
    st.sampled_from([b"", None]),
    st.sampled_from(Mark),
)
FAILURES = st.none() | st.builds(Failure, st.just(1), SECONDS, st.just("down"))
RECORDS = st.builds(Record, st.none() | COPIES, st.none() | SECONDS, FAILURES)


class TestE18Rule:
    @given(record=RECORDS, now=SECONDS, max_age=SECONDS)
    def test_a_copy_that_is_too_old_is_at_best_expired(
        self, record: Record, now: float, max_age: float
    ) -> None:
        """Any other is judged as without `max_age`."""
        plan, usual = plan_read(record, now, max_age=max_age), plan_read(record, now)
        copy, expected = record.copy, usual
        if copy is not None and now - copy.fetched_at > max_age and not is_gone(copy, now):
            expected = expired(copy, record.failure, now)
        assert plan == expected

    @given(record=RECORDS, now=SECONDS)
    def test_no_limit_is_no_limit(self, record: Record, now: float) -> None:
        assert plan_read(record, now, max_age=float("inf")) == plan_read(record, now)


def is_gone(copy: Copy, now: float) -> bool:
    return verdict_of(copy, now) is GONE


def expired(copy: Copy, failure: Failure | None, now: float) -> Plan:
    return Serve(copy, EXPIRED, failure=failure) if cooling(failure, now) else MustLoad(copy)


class TestE18MaxAge:
    async def test_an_older_copy_waits_for_a_load(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """FRESH or STALE by its terms; all who ask later have the new one."""
        for after in (20, 40):
            await prices.refresh("a")
            upstream.version += 1
            clock.advance(after)
            answer = await prices.get("a", max_age="10s")
            assert (version(answer), answer.verdict, answer.age) == (upstream.version, FRESH, 0)
            assert version(await prices.get("a")) == upstream.version

    async def test_a_copy_of_that_age_is_served(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """From memory and from the store, and nothing is loaded."""
        await prices("a")
        clock.advance(10)
        for _ in range(2):
            assert (await prices.get("a", max_age=10)).verdict is FRESH
        clock.advance(30)
        assert (await prices.get("a", max_age="1h")).verdict is STALE
        assert upstream.calls[0] == ["a"]

    async def test_callers_without_a_max_age_are_served_as_before(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """The limit is one call's: meanwhile the copy is fresh to anyone else."""
        await prices("a")
        clock.advance(20)
        waiting = await upstream.holding(prices.get("a", max_age=5))
        answer = await prices.get("a")
        assert (version(answer), answer.verdict, answer.error) == (1, FRESH, None)
        upstream.let_go()
        assert (await waiting).age == 0

    async def test_of_many_only_the_older_ones_are_loaded(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """In one call of the loader; also by handle, and by the handle of a function."""
        await prices.get_many(["a", "b"])
        clock.advance(20)
        await prices.refresh("c")
        answers = await prices.get_many(["a", "b", "c"], max_age=10)
        assert [it.age for it in answers.values()] == [0, 0, 0]
        assert upstream.calls[2:] == [["a", "b"]]
        clock.advance(5)
        assert (await prices.of("a").get(max_age=5)).age == 5
        assert (await prices.of("a").get(max_age=4)).age == 0

    async def test_known_leaves_the_older_ones_out(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """Nothing is loaded."""
        await prices("a")
        clock.advance(20)
        assert await prices.known(["a"], max_age=10) == {}
        assert list(await prices.known(["a"], max_age=20)) == ["a"]
        assert len(upstream.calls) == 1

    async def test_if_loading_fails_the_older_copy_is_served(
        self, prices: Prices, upstream: Upstream, clock: ManualClock, cache: Cache
    ) -> None:
        """As EXPIRED, with the error; in the cooldown at once; to anyone else as before."""
        await prices("a")
        clock.advance(20)
        upstream.error = ConnectionError("down")
        for _ in range(2):
            answer = await prices.get("a", max_age=5)
            assert (version(answer), answer.verdict) == (1, EXPIRED)
            assert "down" in str(answer.error)
            usual = await prices.get("a")
            assert (usual.verdict, usual.error) == (FRESH, None)
        await idle(cache)
        assert len(upstream.calls) == 2

    async def test_what_is_gone_is_not_served(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """A limit makes nothing better."""
        await prices("a")
        clock.advance(4000)
        upstream.error = ConnectionError("down")
        with pytest.raises(LoadFailed):
            await prices.get("a", max_age="1d")

    async def test_a_load_under_way_is_joined(
        self, prices: Prices, upstream: Upstream, clock: ManualClock
    ) -> None:
        """One load serves both."""
        first = await upstream.holding(prices.get("a"))
        second = asyncio.create_task(prices.get("a", max_age=0))
        upstream.let_go()
        assert (await first).value == (await second).value
        assert len(upstream.calls) == 1

    async def test_a_failure_elsewhere_is_a_cooldown_here(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """E7: another process failed to load it since this one looked, and no load begins."""
        store = SteppedStore(MemoryStore(clock=clock))
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            await prices("a")
            clock.advance(20)
            asking = await store.holding("acquire", prices.get("a", max_age=5))
            copy = (await store.inner.read("price", ["a"]))["a"].copy
            assert copy is not None
            lease = await lease_of(store.inner, "a", seen=copy.generation)
            failure = Failure(1, clock() + 60, "down")
            await store.inner.release("price", [lease], {"a": failure})
            store.let_go("acquire")
            answer = await asking
            assert (answer.verdict, answer.age) == (EXPIRED, 20)
            assert "down" in str(answer.error)
            assert len(upstream.calls) == 1

    async def test_a_queued_load_is_for_the_copy_that_is_too_old(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """Another process has published it since that load was queued."""
        store = SteppedStore(MemoryStore(clock=clock))
        other = cache_on(store, clock, sleeper)
        async with cache_on(store, clock, sleeper) as cache, other:
            prices = declare(cache, upstream, concurrency=1)
            upstream.hold()
            loading = [asyncio.create_task(prices.get("b"))]
            await upstream.asked.wait()
            loading.append(asyncio.create_task(prices.get("a")))
            await turns()
            await declare(other, Upstream())("a")
            clock.advance(20)
            loading.append(asyncio.create_task(prices.get("a", max_age=5)))
            await turns()
            upstream.let_go()
            assert (await asyncio.gather(*loading))[-1].age == 0

    async def test_memory_and_store_are_both_judged(
        self, url: str, clock: ManualClock, upstream: Upstream
    ) -> None:
        """E9: within `memory_for` too."""
        async with Cache(url, clock=clock) as cache:
            prices = declare(cache, upstream, memory_for=60)
            await prices("a")
            clock.advance(2)
            assert (await prices.get("a", max_age=1)).age == 0
            assert len(upstream.calls) == 2

    @pytest.mark.parametrize("max_age", ["soon", -1, float("nan"), True, object()])
    async def test_what_is_no_duration_is_refused(self, prices: Prices, max_age: Any) -> None:
        """Wherever it is given."""
        await prices("a")
        for ask in (
            prices.get("a", max_age=max_age),
            prices.get_many(["a"], max_age=max_age),
            prices.known(["a"], max_age=max_age),
            prices.of("a").get(max_age=max_age),
        ):
            with pytest.raises(ConfigError, match="max_age"):
                await ask
