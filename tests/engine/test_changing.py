"""E36: a write-through that never stores a value older than somebody else's write."""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from stillfresh import (
    Cache,
    ConfigError,
    LoadFailed,
    Policy,
    StillfreshError,
    Stored,
    StoreError,
    SyncCache,
    Verdict,
)
from stillfresh.stores.contract import Ask, Copy, Grant, Held, Mark, Put
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
from tests.kit.held_store import SteppedStore, cache_on


class OvertakingStore(SteppedStore):
    """Other changes of the key always come first."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(MemoryStore(clock=clock))
        self._clock = clock
        self.asked = 0

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        del kind
        self.asked += 1
        return {ask.id: Held(self._clock() + lease_for) for ask in asks}


async def one_turn(_: float) -> None:
    await asyncio.sleep(0)


class TestE36Changing:
    async def test_the_value_is_stored_and_read(self, prices: Prices, upstream: Upstream) -> None:
        async with prices.changing("a") as change:
            assert await change.put(Price("a", 7)) == Stored(stored=True)
        answer = await prices.get("a")
        assert (answer.verdict, version(answer)) == (Verdict.FRESH, 7)
        assert upstream.calls == []

    async def test_inside_the_copy_is_stale_and_nobody_loads_it(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """So a process that dies inside leaves nothing fresh."""
        await prices("a")
        async with prices.changing("a") as change:
            answer = await prices.get("a")
            assert (answer.verdict, version(answer)) == (Verdict.STALE, 1)
            await change.put(Price("a", 7))
        assert len(upstream.calls) == 1

    async def test_a_load_of_the_key_inside_is_an_error_and_not_a_wait(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """It would wait for the lease that the block itself holds. Other keys are loaded."""
        async with prices.changing("a") as change:
            for read in (prices("a"), prices.get("a"), prices.refresh("a")):
                with pytest.raises(LoadFailed, match="read it before the block"):
                    await read
            many = await prices.get_many(["a", "b"])
            assert (many["a"].found, many["b"].found) == (False, True)
            await change.put(Price("a", 7))
            assert (await prices("a")).version == 7
        assert upstream.calls == [["b"]]

    async def test_a_task_that_the_block_has_started_does_not_wait_for_the_block(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """The block may wait for that task: each would wait for the other."""
        async with prices.changing("a") as change:
            mine, other = await asyncio.gather(
                prices.get("a"), prices.get("b"), return_exceptions=True
            )
            assert isinstance(mine, LoadFailed)
            assert "read it before the block" in str(mine)
            assert not isinstance(other, BaseException)
            await change.put(Price("a", 7))
        assert (await prices("a")).version == 7

    async def test_a_block_that_another_one_has_overtaken_does_not_end_its_protection(
        self, prices: Prices
    ) -> None:
        first = prices.changing("a")
        await first.__aenter__()
        async with prices.changing("a") as second:
            await first.__aexit__(None, None, None)
            with pytest.raises(LoadFailed, match="read it before the block"):
                await prices("a")
            await second.put(Price("a", 7))

    async def test_a_change_before_which_others_always_come_ends_with_an_error(
        self, clock: ManualClock, upstream: Upstream
    ) -> None:
        """After a hundred attempts: a program that waits for ever says nothing."""
        store = OvertakingStore(clock)
        async with Cache(store, clock=clock, sleep=one_turn, dice=lambda: 0.0) as cache:
            prices = declare(cache, upstream)
            with pytest.raises(StoreError, match="other changes keep coming first; try again"):
                await prices.changing("a").__aenter__()
        assert store.asked == 100

    async def test_a_block_that_is_given_up_renews_no_lease_any_more(
        self, here: Cache, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """A thread was interrupted before it came into the block."""
        prices = declare(here, upstream)
        change = prices.changing("a")
        await change.__aenter__()
        await turns()
        assert sleeper.sleeping == 1  # until the next renewal
        await change.give_up()
        await turns()
        assert sleeper.sleeping == 0
        assert (await prices("a")).version == 1

    async def test_without_a_put_the_key_is_invalidated(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        await prices("a")
        upstream.version = 2
        async with prices.changing("a"):
            pass
        assert (await prices("a")).version == 2

    async def test_with_an_exception_the_key_is_invalidated(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        """Even after a put: the write may have been rolled back."""
        upstream.version = 2

        async def write() -> None:
            async with prices.changing("a") as change:
                await change.put(Price("a", 7))
                raise RuntimeError("rolled back")

        assert isinstance(await outcome(write()), RuntimeError)
        assert (await prices("a")).version == 2

    @pytest.mark.parametrize("how", ["put", "invalidate", "delete", "changing"])
    async def test_a_change_in_between_voids_it(
        self, prices: Prices, upstream: Upstream, how: str
    ) -> None:
        """Nothing is stored, the key is invalidated, and the result says so."""
        await prices("a")
        upstream.version = 9
        async with prices.changing("a") as change:
            match how:
                case "put":
                    await prices.put("a", Price("a", 8))
                case "invalidate":
                    await prices.invalidate("a")
                case "delete":
                    await prices.delete("a")
                case _:
                    async with prices.changing("a") as other:
                        await other.put(Price("a", 8))
            assert await change.put(Price("a", 7)) == Stored(stored=False)
        assert (await prices("a")).version == 9

    async def test_a_load_under_way_is_superseded(self, prices: Prices, upstream: Upstream) -> None:
        waiting = await upstream.holding(prices.get("a"))
        async with prices.changing("a") as change:
            await change.put(Price("a", 7))
        upstream.let_go()
        await waiting
        assert (await prices("a")).version == 7

    async def test_a_copy_that_another_process_stores_first_is_marked_too(
        self,
        store: SteppedStore,
        here: Cache,
        upstream: Upstream,
        clock: ManualClock,
        sleeper: Sleeper,
    ) -> None:
        """The lease is granted only for the copy that was marked."""
        prices = declare(here, upstream)
        await prices("a")
        store.gates["acquire"] = asyncio.Event()
        entering = asyncio.create_task(prices.changing("a").__aenter__())
        await until(lambda: "acquire" in store.waiting)
        await store.inner.put("price", {"a": Put(Copy("other", clock(), Policy(30), b"\x90"))})
        store.gates.pop("acquire").set()
        await until(lambda: sleeper.sleeping > 0)
        sleeper.wake()
        await entering
        record = (await store.inner.read("price", ["a"]))["a"]
        assert record.copy is not None
        assert (record.copy.generation, record.copy.mark) == ("other", Mark.SOFT)

    async def test_the_lease_is_renewed_inside(
        self, prices: Prices, sleeper: Sleeper, clock: ManualClock, cache: Cache
    ) -> None:
        """Twenty seconds, with a lease of five."""

        def has_slept_again(before: int) -> bool:
            return len(sleeper.asked) > before

        async with prices.changing("a") as change:
            for _ in range(12):
                await until(lambda: sleeper.sleeping > 0)
                asked = len(sleeper.asked)
                clock.advance(5 / 3)
                sleeper.wake(5 / 3)
                await until(partial(has_slept_again, asked))
            assert (await change.put(Price("a", 7))).stored

    async def test_a_put_belongs_inside_the_block_and_is_one(self, prices: Prices) -> None:
        changing = prices.changing("a")
        with pytest.raises(StillfreshError, match="inside the block"):
            await changing.put(Price("a", 7))
        async with changing as change:
            await change.put(Price("a", 7))
            with pytest.raises(StillfreshError, match="call it once"):
                await change.put(Price("a", 8))
        with pytest.raises(StillfreshError, match="entered already"):
            await changing.__aenter__()

    async def test_a_value_that_cannot_be_stored_is_refused(self, prices: Prices) -> None:
        async with prices.changing("a") as change:
            wrong: Any = object()
            with pytest.raises(ConfigError, match="cannot be stored"):
                await change.put(wrong)
            assert (await change.put(Price("a", 7), fresh_for=5)).stored
        assert (await prices.get("a")).policy.fresh_for == 5

    async def test_a_cancelled_caller_invalidates(self, prices: Prices, upstream: Upstream) -> None:
        await prices("a")
        upstream.version = 2
        inside = asyncio.Event()

        async def write() -> None:
            async with prices.changing("a"):
                inside.set()
                await asyncio.Event().wait()

        writing = asyncio.create_task(write())
        await inside.wait()
        writing.cancel()
        assert isinstance(await asyncio.gather(writing, return_exceptions=True), list)
        assert (await prices("a")).version == 2

    @pytest.mark.parametrize("gate", ["acquire", "acquire:done"])
    async def test_a_caller_that_gives_up_before_the_block_leaves_no_lease_behind(
        self, store: SteppedStore, here: Cache, upstream: Upstream, gate: str
    ) -> None:
        """Its request takes the lease all the same; readers elsewhere would wait for its end."""
        prices = declare(here, upstream)
        entering = await store.holding(gate, prices.changing("a").__aenter__())
        entering.cancel()
        await asyncio.wait([entering])
        assert entering.cancelled()
        store.let_go(gate)
        await turns()
        assert (await prices.explain("a")).held_until is None
        assert await prices("a") == Price("a", 1)

    async def test_a_caller_that_gives_up_while_others_change_the_key_tries_no_more(
        self, store: SteppedStore, here: Cache, there: Cache, upstream: Upstream
    ) -> None:
        prices = declare(here, upstream)
        theirs = declare(there, upstream)
        entering = await store.holding("acquire", prices.changing("a").__aenter__())
        entering.cancel()
        await asyncio.wait([entering])
        async with theirs.changing("a") as change:
            assert (await change.put(Price("a", 7))).stored
        store.let_go("acquire")
        await turns()
        assert store.count("acquire") == 1
        assert (await theirs("a")).version == 7

    async def test_nothing_complains_if_the_cache_closes_when_a_caller_has_given_up(
        self, store: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, it: complaints.append(it))
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            entering = await store.holding("acquire", prices.changing("a").__aenter__())
            closing = asyncio.create_task(cache.close())
            await turns()
            entering.cancel()
            await asyncio.wait([entering])
            store.hold("release")
            store.let_go("acquire")
            await closing
            store.let_go("release")
            await turns()
        del entering
        gc.collect()
        assert complaints == []

    async def test_nothing_complains_of_the_failure_that_a_cancelled_caller_does_not_see(
        self, store: SteppedStore, here: Cache, upstream: Upstream
    ) -> None:
        """Its last invalidation failed after it had gone. Found by the simulator."""
        prices = declare(here, upstream)
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, it: complaints.append(it))
        inside = asyncio.Event()
        may_leave = asyncio.Event()

        async def write() -> None:
            async with prices.changing("a"):
                inside.set()
                await may_leave.wait()

        writing = asyncio.create_task(write())
        await inside.wait()
        store.hold("invalidate")
        store.broken.add("invalidate")
        may_leave.set()
        await store.reached("invalidate")
        writing.cancel()
        await asyncio.wait([writing])
        store.let_go("invalidate")
        await turns()
        gc.collect()
        assert complaints == []

    async def test_a_store_that_does_not_answer_raises(
        self, store: SteppedStore, here: Cache, upstream: Upstream
    ) -> None:
        """Before the write, so that nothing was written."""
        prices = declare(here, upstream)
        store.broken |= {"acquire"}
        error = await outcome(prices.changing("a").__aenter__())
        assert isinstance(error, StoreError)

    async def test_past_the_cache_nothing_is_stored(
        self, prices: Prices, cache: Cache, upstream: Upstream
    ) -> None:
        with cache.bypassed():
            async with prices.changing("a") as change:
                assert await change.put(Price("a", 7)) == Stored(stored=False)
        assert (await prices("a")).version == 1

    async def test_a_handle_has_it(self, cache: Cache) -> None:
        @cache.cached("report", fresh_for=30)
        async def report(year: int) -> int:
            return year

        async with report.of(2026).changing() as change:
            await change.put(7)
        assert await report(2026) == 7

    async def test_two_writers_never_leave_the_older_value(
        self, store: SteppedStore, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """The race of write-throughs: the first to write is the last to put."""
        database = Upstream()
        async with (
            cache_on(store, clock, sleeper) as here,
            cache_on(store, clock, sleeper) as there,
        ):
            mine = declare(here, database)
            theirs = declare(there, database)
            async with mine.changing("a") as my_change:
                database.version = 2
                async with theirs.changing("a") as their_change:
                    database.version = 3
                    assert (await their_change.put(Price("a", 3))).stored
                assert not (await my_change.put(Price("a", 2))).stored
            assert (await theirs("a")).version == 3
            assert (await mine("a")).version == 3


class TestE36Sync:
    @pytest.fixture(params=["memory", "sqlite"])
    def cache(self, request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[SyncCache]:
        url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/c.db"
        with SyncCache(url) as cache:
            yield cache

    def test_the_twin_is_with(self, cache: SyncCache) -> None:
        database = {"a": 1}

        @cache.batched("stock", fresh_for=30, error_for=60)
        def stock(keys: list[str]) -> dict[str, int]:
            return {key: database[key] for key in keys}

        assert stock("a") == 1
        with stock.changing("a") as change:
            database["a"] = 2
            assert change.put(2) == Stored(stored=True)
        assert stock.get("a").value == 2

        def write() -> None:
            with stock.of("a").changing():
                database["a"] = 3
                raise RuntimeError

        with pytest.raises(RuntimeError):
            write()
        assert stock("a") == 3
        with stock.changing("a") as change:
            stock.invalidate("a")
            assert not change.put(7).stored
        assert stock("a") == 3

    def test_a_load_of_the_key_inside_is_an_error_and_not_a_wait(self, cache: SyncCache) -> None:
        @cache.batched("stock", fresh_for=30)
        def stock(keys: list[str]) -> dict[str, int]:
            return dict.fromkeys(keys, 1)

        with stock.changing("a") as change:
            with pytest.raises(LoadFailed, match="read it before the block"):
                stock("a")
            assert stock("b") == 1
            change.put(2)
            assert stock("a") == 2
        stock.invalidate("a")
        assert stock("a") == 1
