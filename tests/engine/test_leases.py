"""Two processes, one store, one load: E5; and a store that fails (E26, the engine's half of S5)."""

import asyncio
import itertools
from pathlib import Path

import pytest

from stillfresh import Answer, Cache, LoadFailed, Origin, Policy, Resource, StoreError, Verdict
from stillfresh.stores.contract import Copy, Failure
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Sleeper,
    Upstream,
    declare,
    idle,
    outcome,
    turns,
    until,
    version,
)
from tests.kit.held_store import SteppedStore, cache_on, lease_of
from tests.kit.inline_store import InlineStore

FRESH, STALE = Verdict.FRESH, Verdict.STALE


def seen(answer: Answer[Price]) -> tuple[int, Verdict]:
    return version(answer), answer.verdict


async def passing(clock: ManualClock, *sleepers: Sleeper, by: float = 0.1) -> None:
    """Time goes on, for everybody."""
    clock.advance(by)
    for sleeper in sleepers:
        sleeper.wake()
    await turns()


class TestE5Lease:
    async def test_two_processes_share_one_load(
        self, ours: Prices, theirs: Prices, upstream: Upstream, naps: Sleeper
    ) -> None:
        """The other waits for the holder, and says whose load it was."""
        mine = await upstream.holding(ours.get("a"))
        other = asyncio.create_task(theirs.get("a"))
        await until(lambda: naps.sleeping > 0)
        upstream.let_go()
        assert (await mine).origin is Origin.LOADED
        naps.wake()
        answer = await other
        assert (seen(answer), answer.origin) == ((1, FRESH), Origin.ANOTHER)
        assert upstream.calls == [["a"]]

    async def test_stale_is_served_while_the_other_loads(
        self, ours: Prices, theirs: Prices, upstream: Upstream, clock: ManualClock, here: Cache
    ) -> None:
        """At once, and no second load begins."""
        await ours("a")
        clock.advance(30)
        upstream.version = 2
        upstream.hold()
        assert seen(await ours.get("a")) == (1, STALE)
        await upstream.asked.wait()
        assert [seen(await theirs.get("a")) for _ in range(3)] == [(1, STALE)] * 3
        upstream.let_go()
        await idle(here)
        assert seen(await theirs.get("a")) == (2, FRESH)
        assert len(upstream.calls) == 2

    async def test_the_newer_copy_is_the_answer(
        self, ours: Prices, theirs: Prices, upstream: Upstream, store: SteppedStore
    ) -> None:
        """Who asks for the lease with an old picture gets the copy instead of the lease."""
        late = await store.holding("acquire", ours.get("a"))
        await theirs("a")
        store.let_go("acquire")
        answer = await late
        assert (seen(answer), answer.origin) == ((1, FRESH), Origin.ANOTHER)
        assert upstream.calls == [["a"]]

    @pytest.mark.parametrize("max_batch", [1, 100])
    async def test_all_callers_of_one_turn_get_the_newer_copy(
        self,
        here: Cache,
        theirs: Prices,
        upstream: Upstream,
        store: SteppedStore,
        max_batch: int,
    ) -> None:
        """None of them asked after the load began, so none needs a load of its own."""
        prices = declare(here, upstream, max_batch=max_batch)

        async def read_at_once() -> list[Answer[Price]]:
            return await asyncio.gather(*(prices.get("a") for _ in range(4)))

        late = await store.holding("acquire", read_at_once())
        await theirs("a")
        store.let_go("acquire")
        assert {answer.origin for answer in await late} == {Origin.ANOTHER}
        assert upstream.calls == [["a"]]

    async def test_a_caller_that_joins_late_gets_the_newer_copy_without_a_load(
        self, here: Cache, upstream: Upstream, store: SteppedStore, clock: ManualClock
    ) -> None:
        """It has read before the copy was stored, and asked after the load began."""
        prices = declare(here, upstream)
        first = await store.holding("acquire", prices.get("a"))
        second = await store.holding("read:done", prices.get("a"))
        async with cache_on(store.inner, clock, Sleeper()) as there:
            await declare(there, upstream)("a")
            store.let_go("read:done")
            await turns()
            store.let_go("acquire")
            answers = [await first, await second]
        assert {answer.origin for answer in answers} == {Origin.ANOTHER}
        assert upstream.calls == [["a"]]

    async def test_a_waiting_process_polls_with_growing_jittered_pauses(
        self, clock: ManualClock, store: SteppedStore, upstream: Upstream
    ) -> None:
        """From 0.1 s, never more than ten reads a second, never further apart than 1.5 s."""
        await store.open()
        await lease_of(store.inner, "a", lasts=60)
        for dice in (0.0, 0.999):
            sleeper, thrown = Sleeper(), itertools.repeat(dice)
            cache = Cache(store, clock=clock, sleep=sleeper, dice=thrown.__next__)
            task = asyncio.create_task(declare(cache, upstream).get("a"))
            for _ in range(12):
                await turns()
                reads = store.count("read")
                sleeper.wake()
                await turns()
                assert store.count("read") == reads + 1
            assert sleeper.asked == sorted(sleeper.asked)
            assert sleeper.asked[0] == pytest.approx(0.1 * (1 + 0.5 * dice))
            assert sleeper.asked[-1] == pytest.approx(1 + 0.5 * dice)
            assert len(set(sleeper.asked)) > 5
            task.cancel()
            await turns()
        assert upstream.calls == []

    async def test_nobody_polls_when_nobody_waits(
        self, ours: Prices, store: SteppedStore, sleeper: Sleeper, here: Cache
    ) -> None:
        """The last who waits for another's load takes the polling along."""
        await lease_of(store.inner, "a", lasts=60)
        task = asyncio.create_task(ours.get("a"))
        await until(lambda: sleeper.sleeping > 0)
        task.cancel()
        await turns()
        for _ in range(3):
            sleeper.wake()
            await turns()
        assert len(sleeper.asked) <= 2
        assert (await here.stats()).resources["price"].loading == 0

    async def test_a_holder_that_died_is_replaced_when_its_lease_ends(
        self,
        ours: Prices,
        store: SteppedStore,
        sleeper: Sleeper,
        clock: ManualClock,
        upstream: Upstream,
    ) -> None:
        """Not before, and by one load."""
        await lease_of(store.inner, "a", lasts=5)
        tasks = [asyncio.create_task(ours.get("a")) for _ in range(3)]
        await until(lambda: sleeper.sleeping > 0)
        await passing(clock, sleeper, by=4.9)
        assert upstream.calls == []
        await passing(clock, sleeper, by=0.1)
        assert {version(answer) for answer in await asyncio.gather(*tasks)} == {1}
        assert upstream.calls == [["a"]]

    async def test_the_holders_failure_is_shared(
        self, ours: Prices, theirs: Prices, upstream: Upstream, naps: Sleeper
    ) -> None:
        """Who waits for another's load fails with it, and does not try at once."""
        mine = await upstream.holding(outcome(ours.get("a")))
        other = asyncio.create_task(outcome(theirs.get("a")))
        await until(lambda: naps.sleeping > 0)
        upstream.error = ConnectionError("down")
        upstream.let_go()
        await mine
        naps.wake()
        failure = await other
        assert isinstance(failure, LoadFailed)
        assert "ConnectionError: down" in str(failure)
        assert len(upstream.calls) == 1

    async def test_long_loads_renew_their_lease(
        self,
        ours: Prices,
        theirs: Prices,
        upstream: Upstream,
        clock: ManualClock,
        sleeper: Sleeper,
        naps: Sleeper,
    ) -> None:
        """After twice the lease it is still the holder's, and its copy is published."""
        mine = await upstream.holding(ours.get("a"))
        other = asyncio.create_task(theirs.get("a"))
        for _ in range(6):
            await until(lambda: sleeper.sleeping > 0 and naps.sleeping > 0)
            await passing(clock, sleeper, naps, by=5 / 3)
        upstream.let_go()
        assert seen(await mine) == (1, FRESH)
        await passing(clock, naps)
        assert seen(await other) == (1, FRESH)
        assert upstream.calls == [["a"]]

    async def test_a_holder_past_its_lease_publishes_nothing(
        self, ours: Prices, theirs: Prices, upstream: Upstream, clock: ManualClock, here: Cache
    ) -> None:
        """Its callers have an answer all the same, as STALE; the successor's copy stays."""
        mine = await upstream.holding(ours.get("a"))
        gate, upstream.gate = upstream.gate, None
        clock.advance(5)
        upstream.version = 2
        assert seen(await theirs.get("a")) == (2, FRESH)
        assert gate is not None
        gate.set()
        assert seen(await mine) == (1, STALE)
        await idle(here)
        assert seen(await ours.get("a")) == (2, FRESH)
        stats = (await here.stats()).resources["price"]
        assert (stats.superseded, len(upstream.calls)) == (1, 2)

    async def test_thirty_two_contenders_load_once_in_each_of_fifty_rounds(
        self, clock: ManualClock, upstream: Upstream
    ) -> None:
        """S7: on one cold key, exactly one load each."""
        store, sleeper = SteppedStore(MemoryStore(clock=clock)), Sleeper()
        caches = [cache_on(store, clock, sleeper) for _ in range(32)]
        resources = [declare(cache, upstream) for cache in caches]
        for number in range(50):
            tasks = [asyncio.create_task(one.get(f"k{number}")) for one in resources]
            while not all(task.done() for task in tasks):
                sleeper.wake()
                await asyncio.sleep(0)
            assert {task.result().verdict for task in tasks} == {FRESH}
        assert [call for call in upstream.calls if len(call) == 1] == [
            [f"k{number}"] for number in range(50)
        ]
        for cache in caches:
            await cache.close()
            await store.inner.open()

    async def test_leases_won_and_denied_are_counted(
        self,
        ours: Prices,
        theirs: Prices,
        upstream: Upstream,
        here: Cache,
        there: Cache,
        naps: Sleeper,
    ) -> None:
        """E12: won by the one, denied to the other."""
        mine = await upstream.holding(ours.get("a"))
        other = asyncio.create_task(theirs.get("a"))
        await until(lambda: naps.sleeping > 0)
        upstream.let_go()
        await mine
        naps.wake()
        await other
        one, two = [(await cache.stats()).resources["price"] for cache in (here, there)]
        assert (one.leases_won, one.leases_denied) == (1, 0)
        assert (two.leases_won, two.leases_denied) == (0, 1)

    async def test_a_refresh_that_waited_for_a_holder_that_died_loads(
        self,
        ours: Prices,
        store: SteppedStore,
        sleeper: Sleeper,
        clock: ManualClock,
        upstream: Upstream,
    ) -> None:
        """`refresh` means now: the copy that was there before is no answer to it."""
        await ours("a")
        copy = (await store.inner.read("price", ["a"]))["a"].copy
        assert copy is not None
        await lease_of(store.inner, "a", seen=copy.generation)
        upstream.version = 2
        sleeper.wake()
        task = asyncio.create_task(ours.refresh("a"))
        await until(lambda: sleeper.sleeping > 0)
        await passing(clock, sleeper, by=5)
        await task
        assert version(await ours.get("a")) == 2

    async def test_explain_says_who_loads(
        self, ours: Prices, store: SteppedStore, sleeper: Sleeper
    ) -> None:
        """Waiting for another's load is not loading."""
        await lease_of(store.inner, "a", lasts=60)
        task = asyncio.create_task(ours.get("a"))
        await until(lambda: sleeper.sleeping > 0)
        text = str(await ours.explain("a"))
        task.cancel()
        assert "Another process is loading it" in text

    async def test_memory_keeps_a_deleted_copy_until_its_load_ends(
        self, ours: Prices, theirs: Prices, upstream: Upstream
    ) -> None:
        """A copy that is being replaced is dropped by its load alone."""
        await ours("a")
        refreshing = await upstream.holding(ours.refresh("a"))
        await theirs.delete("a")
        reading = asyncio.create_task(ours.get("a"))
        await turns()
        assert ours.peek("a") is not None
        upstream.let_go()
        await asyncio.gather(refreshing, reading)


class TestE7FailedAlone:
    async def test_a_key_that_fails_beside_others_cools_down_for_all_processes(
        self, tmp_path: Path, clock: ManualClock, sleeper: Sleeper, naps: Sleeper
    ) -> None:
        """E4: its lease is released as well, so nobody waits for its end, and nobody asks again."""
        url = f"sqlite:///{tmp_path}/cache.db"
        calls: list[list[str]] = []

        def declared_on(cache: Cache) -> Resource[str, int]:
            @cache.batched("stock", fresh_for=30)
            async def stock(skus: list[str]) -> dict[str, int | Exception]:
                calls.append(skus)
                return {sku: ValueError("bad row") if sku == "k3" else 7 for sku in skus}

            return stock

        async with (
            Cache(url, clock=clock, sleep=sleeper, dice=lambda: 0.0) as here,
            Cache(url, clock=clock, sleep=naps, dice=lambda: 0.0) as there,
        ):
            ours, theirs = declared_on(here), declared_on(there)
            keys = [f"k{number}" for number in range(10)]
            answers = await ours.get_many(keys)
            assert [key for key in keys if answers[key].error is not None] == ["k3"]
            for stock in (theirs, ours):
                told = asyncio.create_task(outcome(stock("k3")))
                while not told.done() and naps.sleeping + sleeper.sleeping == 0:
                    await asyncio.sleep(0)
                assert told.done(), "it waits for a lease that nobody needs any more"
                assert "not tried again for 1.0 s" in str(told.result())
            assert calls == [keys]
            clock.advance(1)
            await outcome(theirs("k3"))
            assert calls == [keys, ["k3"]]


class TestE7Missed:
    async def test_a_process_that_missed_a_failure_loads_nothing(
        self, store: SteppedStore, ours: Prices, theirs: Prices, upstream: Upstream
    ) -> None:
        """It looked before the other failed, and asks for the lease after: it hears of it."""
        upstream.error = ConnectionError("down")
        mine = await store.holding("acquire", outcome(ours.get("a")))
        await outcome(theirs.get("a"))
        store.let_go("acquire")
        assert "down" in str(await mine)
        assert upstream.calls == [["a"]]

    async def test_a_refresh_that_a_reader_joins_ignores_the_cooldown_all_the_same(
        self, store: SteppedStore, ours: Prices, theirs: Prices, upstream: Upstream
    ) -> None:
        """`refresh()` loads whatever failed; a reader that waits for the same load is served."""
        store.hold("acquire")
        refreshing = asyncio.create_task(outcome(ours.refresh("a")))
        reading = asyncio.create_task(outcome(ours("a")))
        await store.reached("acquire")
        upstream.error = ConnectionError("down")
        await outcome(theirs.get("a"))
        upstream.error = None
        store.let_go("acquire")
        assert not isinstance(await refreshing, Exception)
        assert await reading == Price("a", 1)
        assert upstream.calls == [["a"]] * 2

    @pytest.mark.parametrize("age", [0, 40, 200], ids=["fresh", "stale", "expired"])
    async def test_a_process_that_missed_a_failure_and_cannot_read_the_copy_loads_nothing(
        self,
        store: SteppedStore,
        ours: Prices,
        theirs: Prices,
        upstream: Upstream,
        clock: ManualClock,
        naps: Sleeper,
        age: float,
    ) -> None:
        """It waits for the other's load, which fails; the cooldown is for both."""
        lease = await lease_of(store.inner, "a", lasts=60)
        foreign = Copy(lease.token, clock(), Policy(30, 60, 3600), b"\xc1")
        await store.inner.publish("price", {"a": (lease, foreign)})
        clock.advance(age)
        mine = await upstream.holding(outcome(ours.get("a")))
        other = asyncio.create_task(outcome(theirs.get("a")))
        await until(lambda: naps.sleeping > 0)
        upstream.error = ConnectionError("down")
        upstream.let_go()
        await mine
        naps.wake()
        assert "down" in str(await other)
        assert upstream.calls == [["a"]]

    @pytest.mark.parametrize("way", ["refresh", "invalidate"])
    async def test_a_cooldown_beside_an_unreadable_copy_stops_no_refresh_and_no_invalidation(
        self, store: SteppedStore, ours: Prices, clock: ManualClock, upstream: Upstream, way: str
    ) -> None:
        """Both came about elsewhere while the lease was asked for: this process loads now."""
        work = ours.refresh("a") if way == "refresh" else ours.get("a")
        reading = await store.holding("acquire", outcome(work))
        lease = await lease_of(store.inner, "a", lasts=60)
        foreign = Copy(lease.token, clock(), Policy(30, 60, 3600), b"\xc1")
        await store.inner.publish("price", {"a": (lease, foreign)})
        lease = await lease_of(store.inner, "a", seen=lease.token, lasts=60)
        failure = Failure(1, clock() + 60, "down there")
        await store.inner.release("price", [lease], {"a": failure})
        if way == "invalidate":
            await ours.invalidate("a", soft=True)
        store.let_go("acquire")
        assert not isinstance(await reading, Exception)
        assert upstream.calls == [["a"]]

    async def test_a_stale_copy_is_served_with_the_failure_that_was_missed(
        self,
        store: SteppedStore,
        ours: Prices,
        theirs: Prices,
        upstream: Upstream,
        clock: ManualClock,
    ) -> None:
        """EXPIRED: who waits gets the old copy, and what was said."""
        await ours.get("a")
        clock.advance(100)
        upstream.error = ConnectionError("down")
        mine = await store.holding("acquire", ours.get("a"))
        await theirs.get("a")
        store.let_go("acquire")
        answer = await mine
        assert (seen(answer), str(answer.error)[-4:]) == ((1, Verdict.EXPIRED), "down")
        assert len(upstream.calls) == 2

    async def test_a_missed_failure_whose_cooldown_is_over_is_tried_again(
        self,
        store: SteppedStore,
        ours: Prices,
        theirs: Prices,
        upstream: Upstream,
        clock: ManualClock,
    ) -> None:
        """The lease is asked for once more, by one who knows."""
        upstream.error = ConnectionError("down")
        mine = await store.holding("acquire", ours.get("a"))
        await outcome(theirs.get("a"))
        clock.advance(2)
        upstream.error = None
        store.let_go("acquire")
        assert seen(await mine) == (1, FRESH)
        assert (store.count("acquire"), upstream.calls) == (2, [["a"]] * 2)

    async def test_refresh_loads_although_a_failure_was_missed(
        self, store: SteppedStore, ours: Prices, theirs: Prices, upstream: Upstream
    ) -> None:
        """It ignores the cooldown, also one that it did not know of."""
        upstream.error = ConnectionError("down")
        mine = await store.holding("acquire", ours.refresh("a"))
        await outcome(theirs.get("a"))
        upstream.error = None
        store.let_go("acquire")
        await mine
        assert (store.count("acquire"), upstream.calls) == (1, [["a"]] * 2)


class TestE5FailingStore:
    @pytest.mark.parametrize("step", ["read", "acquire", "publish"])
    async def test_a_first_read_is_answered_by_the_loader(
        self, ours: Prices, store: SteppedStore, here: Cache, step: str
    ) -> None:
        """The cache does not raise; its stats say what is wrong."""
        store.broken = {step}
        assert seen(await ours.get("a")) == (1, FRESH)
        assert (await here.stats()).resources["price"].store_errors == 1

    async def test_what_another_process_deleted_leaves_memory(
        self, ours: Prices, theirs: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """It is not served when the store is unavailable after that."""
        await ours.get("a")
        await theirs.delete("a")
        upstream.error = ConnectionError("down")
        assert isinstance(await outcome(ours.get("a")), LoadFailed)
        assert ours.peek("a") is None
        store.broken = {"read", "acquire"}
        assert isinstance(await outcome(ours.get("a")), LoadFailed)

    async def test_memory_is_served_while_the_store_fails(
        self, ours: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """While the store cannot be read: as STALE, since nobody confirms it (E29)."""
        await ours("a")
        store.broken = {"read", "acquire", "publish", "renew", "release"}
        assert [seen(await ours.get("a")) for _ in range(3)] == [(1, STALE)] * 3
        assert upstream.calls == [["a"]]

    async def test_stale_is_served_and_refreshed_all_the_same(
        self, ours: Prices, store: SteppedStore, upstream: Upstream, clock: ManualClock, here: Cache
    ) -> None:
        """From memory; the loaded value is in memory afterwards."""
        await ours("a")
        store.broken = {"read", "acquire", "publish", "renew", "release"}
        clock.advance(30)
        upstream.version = 2
        assert seen(await ours.get("a")) == (1, STALE)
        await idle(here)
        assert seen(await ours.get("a")) == (2, STALE)
        await idle(here)
        assert len(upstream.calls) == 2

    async def test_what_could_not_be_stored_is_kept_for_a_moment(
        self, ours: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """So that a store that is unavailable does not mean a load for each read."""
        store.broken = {"read", "acquire", "publish"}
        await ours("a")
        await ours("a")
        assert upstream.calls == [["a"]]

    @pytest.mark.parametrize(
        ("broken", "served"),
        [({"publish"}, (2, FRESH)), ({"read", "acquire", "publish"}, (1, STALE))],
    )
    async def test_what_could_not_be_stored_is_fresh_no_longer_than_any_other(
        self,
        here: Cache,
        store: SteppedStore,
        upstream: Upstream,
        clock: ManualClock,
        broken: set[str],
        served: tuple[int, Verdict],
    ) -> None:
        """The moment for which memory keeps it may be longer than its freshness."""
        brief = declare(here, upstream, fresh_for=0.1)
        store.broken = broken
        assert seen(await brief.get("a")) == (1, FRESH)
        clock.advance(0.2)
        upstream.version = 2
        assert seen(await brief.get("a")) == served
        await idle(here)

    async def test_a_failing_release_leaves_the_failure_as_it_is(
        self, ours: Prices, store: SteppedStore, upstream: Upstream, here: Cache
    ) -> None:
        """The loader's error is raised, not the store's."""
        store.broken = {"release"}
        upstream.error = ConnectionError("down")
        with pytest.raises(LoadFailed, match="ConnectionError: down"):
            await ours.get("a")
        assert (await here.stats()).resources["price"].store_errors == 1

    async def test_a_failing_renewal_does_not_end_the_load(
        self, ours: Prices, store: SteppedStore, upstream: Upstream, sleeper: Sleeper, here: Cache
    ) -> None:
        """It goes on, and is published if the lease still lives."""
        store.broken = {"renew"}
        task = await upstream.holding(ours.get("a"))
        await until(lambda: sleeper.sleeping > 0)
        sleeper.wake()
        await turns()
        upstream.let_go()
        assert seen(await task) == (1, FRESH)
        assert (await here.stats()).resources["price"].store_errors == 1

    async def test_a_failing_poll_asks_for_the_lease_again(
        self,
        ours: Prices,
        store: SteppedStore,
        sleeper: Sleeper,
        clock: ManualClock,
        upstream: Upstream,
    ) -> None:
        """Who waits for another's load is not let down by one lost read."""
        await lease_of(store.inner, "a")
        task = asyncio.create_task(ours.get("a"))
        await until(lambda: sleeper.sleeping > 0)
        store.broken = {"read"}
        await passing(clock, sleeper, by=5)
        assert seen(await task) == (1, FRESH)
        assert upstream.calls == [["a"]]

    async def test_a_caller_that_can_read_the_store_again_waits_for_the_next_load(
        self, ours: Prices, theirs: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """E6: nothing voids a load without a lease, so it may miss another's invalidation.

        E29: for the same reason, a caller that joined it gets its value as STALE.
        """
        store.broken = {"read", "acquire"}
        tasks = [await upstream.holding(ours.get("a")), asyncio.create_task(ours.get("a"))]
        await turns()
        store.broken, upstream.version = set(), 2
        await theirs.invalidate("a")
        tasks.append(asyncio.create_task(ours.get("a")))
        await turns()
        upstream.let_go()
        assert [seen(await it) for it in tasks] == [(1, FRESH), (1, STALE), (2, FRESH)]
        assert upstream.calls == [["a"]] * 2

    async def test_a_cache_recovers_by_itself_from_a_store_that_failed(
        self, ours: Prices, store: SteppedStore, clock: ManualClock
    ) -> None:
        """When the store is back, what is loaded is stored again."""
        store.broken = {"read", "acquire", "publish"}
        await ours("a")
        store.broken = set()
        clock.advance(1)
        await ours("a")
        assert (await store.inner.read("price", ["a"]))["a"].copy is not None

    async def test_stats_go_on_without_the_store(
        self, ours: Prices, store: SteppedStore, here: Cache
    ) -> None:
        """The counts of this process, and None for the store's."""
        await ours("a")
        store.broken = {"stats"}
        stats = await here.stats()
        assert (stats.store, stats.resources["price"].loads) == (None, 1)

    @pytest.mark.parametrize("method", ["invalidate", "delete"])
    async def test_an_invalidation_raises_while_the_store_fails(
        self, ours: Prices, store: SteppedStore, method: str
    ) -> None:
        """Because silence there would be a lie."""
        store.broken = {method}
        with pytest.raises(StoreError, match=f"cannot {method}"):
            await getattr(ours, method)("a")

    async def test_a_lease_is_given_back_if_publishing_failed(
        self, ours: Prices, store: SteppedStore
    ) -> None:
        """The next caller need not wait for it to run out."""
        store.broken = {"publish"}
        await ours("a")
        assert (await store.inner.read("price", ["a"])) == {}

    async def test_a_caller_that_waits_for_another_process_is_answered_if_the_store_goes_away(
        self, ours: Prices, store: SteppedStore, sleeper: Sleeper
    ) -> None:
        """By a load without a lease."""
        await lease_of(store.inner, "a", lasts=60)
        task = asyncio.create_task(ours.get("a"))
        await until(lambda: bool(sleeper.asked))
        store.broken = {"read", "acquire", "publish"}
        sleeper.wake()
        assert (await task).value == Price("a", 1)

    async def test_two_values_that_could_not_be_stored_are_not_taken_for_one(
        self, ours: Prices, store: SteppedStore, clock: ManualClock, upstream: Upstream
    ) -> None:
        """Found by simulation: who read the first, and had its copy in hand while the second came
        (which said that there is none), was told that it is there, without a value.
        """
        store.broken = {"acquire", "publish"}
        await ours.get("a")
        clock.advance(2)
        upstream.absent = {"a"}
        renewing = await upstream.holding(ours.refresh("a"))
        reading = await store.holding("read", ours.get("a"))
        upstream.let_go()
        await renewing
        store.broken |= {"read"}
        store.let_go("read")
        answer = await reading
        assert (answer.found, answer.value) in [(True, Price("a", 1)), (False, None)]


def source(answer: Answer[Price]) -> tuple[Origin, bool]:
    return answer.origin, answer.unverified


UNVERIFIED = (Origin.MEMORY, True)
VERIFIED = (Origin.STORE, False)


@pytest.fixture(params=[SteppedStore, InlineStore])
def away(request: pytest.FixtureRequest, clock: ManualClock) -> SteppedStore:
    """A store that can be away: over a network, or read on the spot."""
    store: SteppedStore = request.param(MemoryStore(clock=clock))
    return store


class TestE26Origin:
    async def test_the_origin_is_memory_while_the_store_cannot_be_asked(
        self, away: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """And unverified, whatever way it is read; when the store is back it is neither."""
        async with cache_on(away, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            assert source(await prices.get("a")) == (Origin.LOADED, False)
            assert source(await prices.get("a")) == VERIFIED
            away.broken = {"read", "acquire", "publish", "release"}
            assert source(await prices.get("a")) == UNVERIFIED
            assert source((await prices.get_many(["a"]))["a"]) == UNVERIFIED
            assert source((await prices.known(["a"]))["a"]) == UNVERIFIED
            assert source(await prices.of("a").get()) == UNVERIFIED
            away.broken = set()
            assert [source(await prices.get("a")) for _ in range(2)] == [VERIFIED] * 2
        assert upstream.calls == [["a"]]

    async def test_old_copies_are_unverified_while_the_store_cannot_be_asked(
        self, away: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """STALE is served and refreshed, EXPIRED is served since loading fails."""
        async with cache_on(away, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            await prices("a")
            away.broken = {"read", "acquire", "publish", "release"}
            upstream.error = ConnectionError("down")
            clock.advance(30)
            assert source(await prices.get("a")) == UNVERIFIED
            await idle(cache)
            clock.advance(60)
            answer = await prices.get("a")
            assert answer.verdict is Verdict.EXPIRED
            assert source(answer) == UNVERIFIED
            assert answer.error is not None

    async def test_an_unverified_answer_stays_unverified_within_memory_for(
        self, store: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """Memory answers by itself again, and what it says was not confirmed by the store."""
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream, memory_for=1)
            await prices("a")
            assert source(await prices.get("a")) == (Origin.MEMORY, False)
            clock.advance(2)
            store.broken = {"read"}
            await prices.get("a")
            store.broken = set()
            reads = store.count("read")
            assert source(await prices.get("a")) == UNVERIFIED
            assert store.count("read") == reads
            clock.advance(1)
            assert source(await prices.get("a")) == VERIFIED
            assert source(await prices.get("a")) == (Origin.MEMORY, False)

    async def test_what_could_not_be_stored_is_unverified(
        self, away: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """It is kept in memory for a moment, and no other process has it."""
        async with cache_on(away, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            away.broken = {"read", "acquire", "publish"}
            assert source(await prices.get("a")) == (Origin.LOADED, False)
            assert source(await prices.get("a")) == UNVERIFIED

    async def test_a_load_that_the_store_did_not_confirm_is_unverified_for_those_who_joined_it(
        self, ours: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """They may have asked after another process's invalidation, which nobody could see."""
        first = await upstream.holding(ours.get("a"))
        await store.inner.invalidate("price", ["a"])
        second = asyncio.create_task(ours.get("a"))
        await turns()
        store.broken = {"publish"}
        upstream.let_go()
        assert source(await first) == (Origin.LOADED, False)
        assert source(await second) == (Origin.ANOTHER, True)

    async def test_the_origin_is_memory_on_a_private_store(
        self, clock: ManualClock, upstream: Upstream
    ) -> None:
        """Nobody else can change it."""
        async with Cache("memory://", clock=clock) as cache:
            prices = declare(cache, upstream)
            await prices("a")
            assert source(await prices.get("a")) == (Origin.MEMORY, False)
