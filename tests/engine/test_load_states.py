"""The table of a load (E3, E5, E6): at each stage of its life, what each event does to it.

A load waits for a place, asks for the lease, calls the loader and publishes. If another process has
the lease, it looks at the store from time to time instead. The tests stop the load of one key at a
stage, let something happen, and let it go on. Everything goes through the public cache: the stages
are those that a store, a loader and a second process can see.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

import pytest

from stillfresh import Answer, LoadFailed, Origin, Policy, Verdict
from stillfresh.engine import MsgpackCodec
from stillfresh.stores.contract import Copy, Failure, Lease
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Sleeper,
    Upstream,
    declare,
    outcome,
    turns,
    until,
    version,
)
from tests.kit.held_store import SteppedStore, cache_on, lease_of

FRESH, STALE = Verdict.FRESH, Verdict.STALE


class Stage(StrEnum):
    """Where the load stands."""

    QUEUED = "waits for a place"
    ASKING = "asks for the lease"
    GRANTED = "has the lease, and does not know it yet"
    FOLLOWING = "waits, since another process has the lease"
    LOOKING = "looks what that process has done"
    LOADING = "the loader runs"
    PUBLISHING = "sends the copy to the store"
    PUBLISHED = "is stored, and does not know it yet"


QUEUED, ASKING, GRANTED, FOLLOWING, LOOKING, LOADING, PUBLISHING, PUBLISHED = Stage

NOT_LOADED = [QUEUED, ASKING, GRANTED, FOLLOWING, LOOKING]
"""The loader has not been called: it is called after what happens now."""
LOADED = [LOADING, PUBLISHING, PUBLISHED]
"""The loader's value is older than what happens now."""
ELSEWHERE = [FOLLOWING, LOOKING]
"""Another process has the lease."""
STEPS = {
    ASKING: "acquire",
    GRANTED: "acquire:done",
    LOOKING: "read",
    PUBLISHING: "publish",
    PUBLISHED: "publish:done",
}
"""The step of the store at which a load stands."""


class Bench:
    """A process whose load of the key `a` is stopped at a stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.clock = ManualClock(1_700_000_000.0)
        self.store = SteppedStore(MemoryStore(clock=self.clock))
        self.sleeper = Sleeper()
        self.upstream = Upstream()
        self.cache = cache_on(self.store, self.clock, self.sleeper)
        self.prices = declare(self.cache, self.upstream, tags=lambda _: ["all"], concurrency=1)
        self._others_lease: Lease | None = None

    async def stop(self) -> "asyncio.Task[Answer[Price]]":
        """Read the key; return when its load stands at the stage."""
        if self.stage is QUEUED:
            busy = await self.upstream.holding(self.prices.get("busy"))
            busy.add_done_callback(asyncio.Task.exception)
        elif self.stage is LOADING:
            self.upstream.hold()
        elif self.stage in ELSEWHERE:
            await self.begin_elsewhere()
        else:
            self.store.hold(STEPS[self.stage])
        caller = self.reader()
        if self.stage in ELSEWHERE:
            await until(lambda: self.sleeper.sleeping > 0)
        if self.stage is QUEUED:
            await turns()
        elif self.stage is LOADING:
            await self.upstream.asked.wait()
        elif self.stage is LOOKING:
            self.store.hold("read")
            self.sleeper.wake()
            await self.store.reached("read")
        elif self.stage is not FOLLOWING:
            await self.store.reached(STEPS[self.stage])
        return caller

    def reader(self) -> "asyncio.Task[Answer[Price]]":
        return asyncio.create_task(self.prices.get("a"))

    async def go_on(self) -> None:
        """Let the load run to its end; another process that has the lease gives it back."""
        if self._others_lease is not None:
            await self.store.inner.release("price", [self._others_lease])
        self.let_go()
        await self.settle()

    def let_go(self) -> None:
        if self.stage in {QUEUED, LOADING}:
            self.upstream.let_go()
        elif self.stage in STEPS:
            self.store.let_go(STEPS[self.stage])

    async def settle(self) -> None:
        """Until nothing is being loaded; those that wait for another process look at once."""
        while any(stats.loading for stats in (await self.cache.stats()).resources.values()):
            if self.stage in ELSEWHERE:
                self.sleeper.wake()
            await turns()

    async def begin_elsewhere(self) -> None:
        """Another process takes the lease, or takes it again."""
        self._others_lease = await lease_of(self.store.inner, "a")

    async def stored_put(self, number: int) -> "asyncio.Task[object]":
        """A put of this process that is stored, and does not know it yet."""
        self.store.hold("put:done")
        putting = asyncio.create_task(self.prices.put("a", Price("a", number)))
        await self.store.reached("put:done")
        return putting

    async def publish_elsewhere(self, number: int) -> None:
        """The process that has the lease publishes."""
        assert self._others_lease is not None
        value = MsgpackCodec[Price](Price, "price").encode(Price("a", number))
        copy = Copy(self._others_lease.token, self.clock(), Policy(30, 60, 3600), value)
        lease = self._others_lease
        self._others_lease = None
        assert await self.store.inner.publish("price", {"a": (lease, copy)}) == set()

    async def fail_elsewhere(self) -> None:
        """The process that has the lease, or takes it now, fails to load."""
        lease = self._others_lease or await lease_of(self.store.inner, "a")
        self._others_lease = None
        failure = Failure(1, self.clock() + 60, "down there")
        await self.store.inner.release("price", [lease], {"a": failure})

    @property
    def calls(self) -> int:
        """How often the loader was called for the key."""
        return self.upstream.calls.count(["a"])


def stage_name(stage: Stage) -> str:
    return stage.name.lower()


def seen(answer: Answer[Price]) -> tuple[int, Verdict]:
    return version(answer), answer.verdict


@pytest.fixture(params=list(Stage), ids=stage_name)
def stage(request: pytest.FixtureRequest) -> Stage:
    assert isinstance(request.param, Stage)
    return request.param


@pytest.fixture
async def bench(stage: Stage) -> AsyncIterator[Bench]:
    bench = Bench(stage)
    async with bench.cache:
        yield bench


@asynccontextmanager
async def second_process(bench: Bench) -> AsyncIterator[tuple[Prices, Upstream]]:
    """It shares the store, and has a loader of its own."""
    upstream = Upstream()
    upstream.version = 7
    async with cache_on(bench.store.inner, bench.clock, Sleeper()) as cache:
        yield declare(cache, upstream), upstream


class TestE3AnotherCaller:
    async def test_a_caller_that_comes_at_any_stage_begins_no_second_load(
        self, bench: Bench
    ) -> None:
        """Both get the value of the one load, and it is fresh to both."""
        early = await bench.stop()
        late = bench.reader()
        await turns()
        await bench.go_on()
        assert [seen(await early), seen(await late)] == [(1, FRESH), (1, FRESH)]
        assert bench.calls == 1

    async def test_one_of_two_callers_may_leave_at_any_stage(self, bench: Bench) -> None:
        """The other one is answered, by the same load."""
        early = await bench.stop()
        late = bench.reader()
        await turns()
        early.cancel()
        await turns()
        await bench.go_on()
        assert seen(await late) == (1, FRESH)
        assert early.cancelled()
        assert bench.calls == 1


class TestE3LastCallerLeaves:
    async def test_a_load_that_runs_is_not_wasted_and_one_that_waits_is_dropped(
        self, bench: Bench
    ) -> None:
        """At no stage does it leave a lease behind."""
        caller = await bench.stop()
        caller.cancel()
        await turns()
        await bench.go_on()
        async with second_process(bench) as (theirs, upstream):
            answer = await theirs.get("a")
        if bench.stage in LOADED:
            assert (version(answer), bench.calls, upstream.calls) == (1, 1, [])
        elif bench.stage in {QUEUED, *ELSEWHERE}:
            assert (version(answer), bench.calls, upstream.calls) == (7, 0, [["a"]])
        else:  # its lease was asked for: it may go on or be dropped
            assert bench.calls + len(upstream.calls) == 1

    @pytest.mark.parametrize("stage", ELSEWHERE, ids=stage_name)
    async def test_the_store_is_no_longer_asked_what_the_other_process_does(
        self, bench: Bench
    ) -> None:
        """E5: nobody polls when nobody waits."""
        caller = await bench.stop()
        caller.cancel()
        if bench.stage is LOOKING:
            bench.let_go()
        bench.sleeper.wake()
        await turns()
        reads = bench.store.count("read")
        bench.sleeper.wake()
        await turns()
        assert bench.store.count("read") == reads


class TestE5TheOtherProcess:
    @pytest.mark.parametrize("stage", ELSEWHERE, ids=stage_name)
    async def test_the_copy_of_the_other_process_is_the_answer_to_all_who_wait(
        self, bench: Bench
    ) -> None:
        """No loader is called here."""
        early = await bench.stop()
        late = bench.reader()
        await turns()
        await bench.publish_elsewhere(5)
        bench.let_go()
        await bench.settle()
        answers = [await early, await late]
        assert [seen(answer) for answer in answers] == [(5, FRESH), (5, FRESH)]
        assert {answer.origin for answer in answers} <= {Origin.ANOTHER, Origin.STORE}
        assert bench.calls == 0

    @pytest.mark.parametrize("stage", ELSEWHERE, ids=stage_name)
    async def test_a_copy_that_was_invalidated_here_meanwhile_answers_nobody(
        self, bench: Bench
    ) -> None:
        """E6: although the other process had published it before that."""
        early = await bench.stop()
        await bench.publish_elsewhere(5)
        bench.upstream.version = 6
        await bench.prices.invalidate("a")
        late = bench.reader()
        await turns()
        bench.let_go()
        await bench.settle()
        assert [seen(await early), seen(await late)] == [(6, FRESH), (6, FRESH)]

    async def test_what_is_published_after_an_invalidation_here_answers_all_who_wait(self) -> None:
        """E5, E6: the other process loaded after that, so nobody loads here."""
        bench = Bench(FOLLOWING)
        async with bench.cache:
            early = await bench.stop()
            await bench.prices.invalidate("a")
            await bench.begin_elsewhere()
            late = bench.reader()
            await turns()
            await bench.publish_elsewhere(5)
            asked = bench.store.count("acquire")
            await bench.settle()
            answers = [await early, await late]
            assert [seen(answer) for answer in answers] == [(5, FRESH), (5, FRESH)]
            assert (bench.calls, bench.store.count("acquire")) == (0, asked)

    @pytest.mark.parametrize("is_over", [False, True], ids=["put under way", "put again"])
    async def test_a_copy_that_a_put_of_this_process_stores_meanwhile_is_never_loaded_over(
        self, *, is_over: bool
    ) -> None:
        """E2, E35: the load finds it before the put's caller does, and may not replace it."""
        bench = Bench(ASKING)
        async with bench.cache:
            reader = await bench.stop()
            putting = await bench.stored_put(7)
            if is_over:
                bench.store.let_go("put:done")
                await putting
                putting = await bench.stored_put(8)
            bench.let_go()
            await turns()
            bench.store.let_go("put:done")
            await putting
            await bench.settle()
            stored = 8 if is_over else 7
            assert version(await reader) == stored
            assert seen(await bench.prices.get("a")) == (stored, FRESH)
            assert bench.calls == 0

    async def test_a_reader_is_answered_although_puts_of_this_process_follow_one_another(
        self,
    ) -> None:
        """E5: it gets a value that was stored after it had asked, without waiting for their end."""
        bench = Bench(ASKING)
        async with bench.cache:
            reader = await bench.stop()
            putting = await bench.stored_put(7)
            bench.let_go()
            assert seen(await reader) == (7, STALE)
            assert not putting.done()
            bench.store.let_go("put:done")
            await putting
            assert seen(await bench.prices.get("a")) == (7, FRESH)
            assert bench.calls == 0

    async def test_an_invalidated_copy_in_its_cooldown_is_no_answer_beside_a_put_of_this_process(
        self,
    ) -> None:
        """E6: neither as STALE. The reader waits for the put. Found by the simulator."""
        bench = Bench(ASKING)
        async with bench.cache:
            reader = await bench.stop()
            await bench.begin_elsewhere()
            await bench.publish_elsewhere(5)
            await bench.store.inner.invalidate("price", ["a"])
            record = (await bench.store.inner.read("price", ["a"]))["a"]
            assert record.copy is not None
            lease = await lease_of(bench.store.inner, "a", seen=record.copy.generation)
            failure = Failure(1, bench.clock() + 60, "down there")
            await bench.store.inner.release("price", [lease], {"a": failure})
            bench.store.hold("put")
            putting = asyncio.create_task(bench.prices.put("a", Price("a", 7)))
            await bench.store.reached("put")
            bench.let_go()
            await turns()
            assert not reader.done()
            bench.store.let_go("put")
            await putting
            assert version(await reader) == 7
            assert bench.calls == 0

    async def test_a_key_that_is_loaded_here_does_not_wait_for_one_that_is_loaded_there(
        self,
    ) -> None:
        """Although both were asked for by one call."""
        bench = Bench(FOLLOWING)
        async with bench.cache:
            await lease_of(bench.store.inner, "a")
            many = asyncio.create_task(bench.prices.get_many(["a", "b"]))
            await until(lambda: bench.sleeper.sleeping > 0)
            assert version(await bench.prices.get("b")) == 1
            assert not many.done()
            many.cancel()
        assert bench.upstream.calls == [["b"]]


class TestE6Invalidated:
    @pytest.mark.parametrize("how", ["invalidate", "delete", "tag", "all"])
    async def test_an_invalidation_here_at_any_stage_leaves_nothing_old_fresh(
        self, bench: Bench, how: str
    ) -> None:
        """Whoever asked before gets the value as STALE, whoever asks later the next load's.

        A loader that is called after the invalidation answers both.
        """
        early = await bench.stop()
        bench.upstream.version = 2
        match how:
            case "invalidate":
                await bench.prices.invalidate("a")
            case "delete":
                await bench.prices.delete("a")
            case "tag":
                await bench.cache.invalidate_tag("all")
            case _:
                await bench.cache.invalidate_all()
        late = bench.reader()
        await turns()
        await bench.go_on()
        if bench.stage in LOADED:
            assert seen(await early) == (1, STALE)
            assert bench.calls == 2
        else:
            assert version(await early) == 2
            assert bench.calls <= 2
        assert seen(await late) == (2, FRESH)
        assert seen(await bench.prices.get("a")) == (2, FRESH)

    async def test_an_invalidation_elsewhere_at_any_stage_leaves_nothing_old_fresh(
        self, bench: Bench
    ) -> None:
        """The store voids the lease: nobody that asks later gets the older value as FRESH."""
        early = await bench.stop()
        bench.upstream.version = 2
        await bench.store.inner.invalidate("price", ["a"])
        late = bench.reader()
        await turns()
        await bench.go_on()
        if bench.stage in {LOADING, PUBLISHING}:
            assert seen(await early) == (1, STALE)
        elif bench.stage is PUBLISHED:
            assert seen(await early) == (1, FRESH), "it asked before the invalidation"
        else:
            assert version(await early) == 2
        assert seen(await late) == (2, FRESH)
        assert seen(await bench.prices.get("a")) == (2, FRESH)
        assert bench.calls <= 2

    async def test_two_invalidations_at_one_stage_need_one_more_load(self, bench: Bench) -> None:
        """One more load is enough for both."""
        await bench.stop()
        bench.upstream.version = 2
        await bench.prices.invalidate("a")
        first = bench.reader()
        await turns()
        bench.upstream.version = 3
        await bench.prices.invalidate("a")
        second = bench.reader()
        await turns()
        await bench.go_on()
        assert [seen(await first), seen(await second)] == [(3, FRESH), (3, FRESH)]
        assert bench.calls <= 2

    @pytest.mark.parametrize("stage", LOADED, ids=stage_name)
    async def test_a_load_that_was_overtaken_is_repeated_although_nobody_waits(
        self, bench: Bench
    ) -> None:
        """The refresh was wanted, and its value was not kept."""
        caller = await bench.stop()
        bench.upstream.version = 2
        await bench.prices.invalidate("a")
        caller.cancel()
        await bench.go_on()
        assert bench.calls == 2
        known = await bench.prices.known(["a"])
        assert seen(known["a"]) == (2, FRESH)

    @pytest.mark.parametrize("stage", [LOADING, PUBLISHING], ids=stage_name)
    async def test_a_load_that_lost_its_lease_is_repeated_although_nobody_waits(
        self, bench: Bench
    ) -> None:
        """Another process invalidated the key: what was loaded before that is stored nowhere."""
        caller = await bench.stop()
        bench.upstream.version = 2
        await bench.store.inner.invalidate("price", ["a"])
        caller.cancel()
        await bench.go_on()
        assert bench.calls == 2
        known = await bench.prices.known(["a"])
        assert seen(known["a"]) == (2, FRESH)


class TestE17Put:
    async def test_a_put_at_any_stage_is_what_later_callers_get(self, bench: Bench) -> None:
        """A load that began before never replaces it; one that has not begun is not needed."""
        early = await bench.stop()
        putting = asyncio.create_task(bench.prices.put("a", Price("a", 9)))
        await turns()
        late = bench.reader()
        await turns()
        await bench.go_on()
        await putting
        assert version(await early) == 9 or seen(await early) == (1, STALE)
        assert seen(await late) == (9, FRESH)
        assert seen(await bench.prices.get("a")) == (9, FRESH)
        if bench.stage is GRANTED:
            assert bench.calls <= 1
        else:
            assert bench.calls == (bench.stage in LOADED)


class TestE7Failed:
    @pytest.mark.parametrize("stage", [*NOT_LOADED, LOADING], ids=stage_name)
    async def test_a_failure_is_told_to_all_who_wait(self, bench: Bench) -> None:
        """Whoever asks next is told it at once, by its cooldown."""
        bench.upstream.error = ConnectionError("down")
        early = await bench.stop()
        late = bench.reader()
        await turns()
        await bench.go_on()
        assert isinstance(await outcome(early), LoadFailed)
        assert isinstance(await outcome(late), LoadFailed)
        assert isinstance(await outcome(bench.prices.get("a")), LoadFailed)
        assert bench.calls == 1

    @pytest.mark.parametrize("stage", [ASKING, *ELSEWHERE], ids=stage_name)
    async def test_a_failure_of_another_process_is_told_to_all_who_wait(self, bench: Bench) -> None:
        """Also to those that came while the lease was asked for; the cooldown is for all."""
        early = await bench.stop()
        late = bench.reader()
        await turns()
        await bench.fail_elsewhere()
        bench.let_go()
        await bench.settle()
        for failed in (await outcome(early), await outcome(late)):
            assert isinstance(failed, LoadFailed)
            assert "down there" in str(failed)
        assert bench.calls == 0


class TestE13Closed:
    async def test_closing_at_any_stage_answers_the_caller_and_leaves_no_lease(
        self, bench: Bench
    ) -> None:
        """A publication that had started finishes; another process need not wait for the rest."""
        caller = await bench.stop()
        bench.store.hold("close")
        closing = asyncio.create_task(bench.cache.close())
        await turns()
        if bench.stage in STEPS:
            bench.let_go()
        await bench.store.reached("close")
        assert isinstance(await outcome(caller), LoadFailed)
        if bench.stage not in ELSEWHERE:  # there the lease is another process's
            async with second_process(bench) as (theirs, upstream):
                answer = await theirs.get("a")
            is_stored = bench.stage in {PUBLISHING, PUBLISHED}
            expected = (1, []) if is_stored else (7, [["a"]])
            assert (version(answer), upstream.calls) == expected
        bench.store.let_go("close")
        await closing
