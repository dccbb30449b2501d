"""E29: what a process says and loads while it cannot ask the store.

"Their" process reaches the store; "our" process does not. So an invalidation can be acknowledged
while we read, and our process cannot know of it.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from stillfresh import Answer, Cache, LoadFailed, Origin, Verdict
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import (
    Price,
    Prices,
    Sleeper,
    Upstream,
    declare,
    idle,
    turns,
    until,
    version,
    wrong,
)
from tests.kit.held_store import SteppedStore, cache_on
from tests.kit.inline_store import InlineStore

FRESH, STALE, EXPIRED = Verdict.FRESH, Verdict.STALE, Verdict.EXPIRED
AWAY = {"read", "acquire", "publish", "release", "renew", "invalidate", "delete", "stats"}
WRITES = AWAY - {"read"}
FRESH_FOR = 30


def seen(answer: Answer[Price] | None) -> tuple[int, Verdict, bool]:
    """The version, how fresh it is said to be, and whether the store could not be asked."""
    assert answer is not None
    return version(answer), answer.verdict, answer.unverified


async def read_by_get(prices: Prices) -> Answer[Price] | None:
    return await prices.get("a")


async def read_by_get_many(prices: Prices) -> Answer[Price] | None:
    return (await prices.get_many(["a"]))["a"]


async def read_by_known(prices: Prices) -> Answer[Price] | None:
    return (await prices.known(["a"]))["a"]


async def read_by_handle(prices: Prices) -> Answer[Price] | None:
    return await prices.of("a").get()


async def read_by_max_age(prices: Prices) -> Answer[Price] | None:
    return await prices.get("a", max_age="20s")


async def read_by_peek(prices: Prices) -> Answer[Price] | None:
    return prices.peek("a")


WAYS = [
    read_by_get,
    read_by_get_many,
    read_by_known,
    read_by_handle,
    read_by_max_age,
    read_by_peek,
]


@pytest.fixture(params=[SteppedStore, InlineStore])
def away(request: pytest.FixtureRequest, clock: ManualClock) -> SteppedStore:
    """A store that can be away: over a network, or read inline as SQLite is."""
    store: SteppedStore = request.param(MemoryStore(clock=clock))
    return store


class TestE29NothingUncheckedIsFresh:
    @pytest.mark.parametrize("way", WAYS)
    async def test_a_read_without_the_store_is_stale_at_best(
        self,
        away: SteppedStore,
        clock: ManualClock,
        sleeper: Sleeper,
        upstream: Upstream,
        way: Callable[[Prices], Awaitable[Answer[Price] | None]],
    ) -> None:
        """Another process has invalidated the copy, and this one could not hear of it."""
        async with cache_on(away, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            await prices("a")
            await away.inner.invalidate("price", ["a"])
            away.broken = AWAY
            for _ in range(30):
                clock.advance(0.5)
                assert seen(await way(prices)) == (1, STALE, True)
        assert upstream.calls == [["a"]]

    async def test_it_is_fresh_again_when_the_store_confirms_it(
        self, away: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """At the very next read, without a load."""
        async with cache_on(away, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            await prices("a")
            away.broken = AWAY
            assert seen(await prices.get("a")) == (1, STALE, True)
            away.broken = set()
            assert seen(await prices.get("a")) == (1, FRESH, False)
        assert upstream.calls == [["a"]]

    async def test_a_key_that_was_absent_is_absent(
        self, away: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """Not a value that is None."""
        upstream.absent = {"a"}
        async with cache_on(away, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            assert not (await prices.get("a")).found
            away.broken = AWAY
            answer = await prices.get("a")
            assert (answer.found, answer.verdict, answer.unverified) == (False, STALE, True)
        assert upstream.calls == [["a"]]

    async def test_another_process_whose_clock_is_behind_is_believed(
        self, away: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """Its copy says that it was fetched before ours, and replaces it all the same."""
        behind = ManualClock(clock() - 2)
        async with (
            cache_on(away, clock, sleeper) as cache,
            cache_on(away.inner, behind, sleeper) as their_cache,
        ):
            prices = declare(cache, upstream)
            their_prices = declare(their_cache, upstream)
            await prices("a")
            away.broken = AWAY
            assert seen(await prices.get("a")) == (1, STALE, True)
            away.broken = set()
            await their_prices.invalidate("a")
            upstream.version = 2
            await their_prices("a")
            assert seen(await prices.get("a")) == (2, FRESH, False)

    async def test_a_value_loaded_meanwhile_is_stored_when_the_store_is_back(
        self, away: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """The first read gets the newest value that there is, and begins a load with a lease."""
        async with cache_on(away, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            await prices("a")
            away.broken = AWAY
            clock.advance(FRESH_FOR)
            upstream.version = 2
            await prices.get("a")
            await idle(cache)
            clock.advance(1)
            away.broken = set()
            upstream.version = 3
            assert seen(await prices.get("a")) == (2, STALE, True)
            await idle(cache)
            assert seen(await prices.get("a")) == (3, FRESH, False)
        assert len(upstream.calls) == 3

    async def test_memory_for_vouches_for_so_long_and_no_longer(
        self, away: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """The time counts from when the store was last asked."""
        async with cache_on(away, clock, sleeper) as cache:
            prices = declare(cache, upstream, memory_for=2)
            await prices("a")
            away.broken = AWAY
            clock.advance(1.9)
            assert seen(await prices.get("a")) == (1, FRESH, False)
            assert seen(prices.peek("a")) == (1, FRESH, False)
            clock.advance(0.2)
            assert seen(prices.peek("a")) == (1, STALE, True)
            for _ in range(30):
                assert seen(await prices.get("a")) == (1, STALE, True)
                clock.advance(0.4)
        assert upstream.calls == [["a"]]

    async def test_a_copy_that_was_invalidated_softly_stays_stale(
        self, ours: Prices, store: SteppedStore, upstream: Upstream, here: Cache
    ) -> None:
        """It is refreshed as ever: its own freshness is over."""
        await ours("a")
        await ours.invalidate("a", soft=True)
        store.broken = AWAY
        upstream.version = 2
        assert seen(await ours.get("a")) == (2, FRESH, False)  # memory forgot it, so this loaded
        assert seen(await ours.get("a")) == (2, STALE, True)
        await idle(here)
        assert len(upstream.calls) == 2

    async def test_reads_without_the_store_are_counted_as_stale(
        self, ours: Prices, store: SteppedStore, here: Cache
    ) -> None:
        """E12: the statistics say what the callers were told."""
        await ours("a")
        store.broken = AWAY
        for _ in range(3):
            await ours.get("a")
        reads = (await here.stats()).resources["price"].reads_by_origin[Origin.MEMORY]
        assert (reads[FRESH], reads[STALE]) == (0, 3)

    async def test_a_private_store_needs_no_check(
        self, clock: ManualClock, upstream: Upstream
    ) -> None:
        """Nobody else can change it, so memory's word is enough."""
        async with Cache("memory://", clock=clock) as cache:
            prices = declare(cache, upstream)
            await prices("a")
            clock.advance(29)
            assert seen(prices.peek("a")) == (1, FRESH, False)
            assert seen(await prices.get("a")) == (1, FRESH, False)


class TestE29Peek:
    async def test_what_peek_cannot_check_is_stale(
        self, ours: Prices, theirs: Prices, clock: ManualClock
    ) -> None:
        """Also while the store is there: `peek` does not ask it."""
        await ours("a")
        await theirs.invalidate("a")
        assert seen(ours.peek("a")) == (1, STALE, True)
        clock.advance(200)
        assert seen(ours.peek("a"))[1:] == (EXPIRED, True)

    async def test_peek_asks_a_store_that_is_read_inline(
        self, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """So it says FRESH if the row is unchanged, and counts no read."""
        store = InlineStore(MemoryStore(clock=clock))
        async with cache_on(store, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            await prices("a")
            assert seen(prices.peek("a")) == (1, FRESH, False)
            await store.inner.invalidate("price", ["a"])
            assert seen(prices.peek("a")) == (1, STALE, True)
            reads = (await cache.stats()).resources["price"].reads
            assert sum(reads.values()) == 1


class TestE29LoadsWithoutTheStore:
    async def test_a_value_is_fresh_to_those_who_asked_before_its_load_began(
        self, ours: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """Those who came later may know of an invalidation that nobody could tell us."""
        store.broken = AWAY
        upstream.hold()
        before = [asyncio.create_task(ours.get("a")) for _ in range(2)]
        await upstream.asked.wait()
        during = asyncio.create_task(ours.get("a"))
        await turns()
        upstream.let_go()
        assert [seen(await it) for it in before] == [(1, FRESH, False)] * 2
        assert seen(await during) == (1, STALE, True)
        assert seen(await ours.get("a")) == (1, STALE, True)
        assert upstream.calls == [["a"]]

    async def test_a_caller_that_came_while_the_lease_was_asked_for_came_before_the_load(
        self, ours: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """The loader was called only after the store had failed to give the lease."""
        store.broken = AWAY
        first = await store.holding("acquire", ours.get("a"))
        second = asyncio.create_task(ours.get("a"))
        await turns()
        store.let_go("acquire")
        assert seen(await first) == (1, FRESH, False)
        assert seen(await second) == (1, FRESH, False)
        assert upstream.calls == [["a"]]

    async def test_a_load_whose_publication_was_not_confirmed_is_fresh_to_the_same_callers(
        self, ours: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """Its lease may have been voided meanwhile: nobody said that it was not."""
        first = await upstream.holding(ours.get("a"))
        second = asyncio.create_task(ours.get("a"))
        await turns()
        store.broken = AWAY
        upstream.let_go()
        assert seen(await first) == (1, FRESH, False)
        assert seen(await second) == (1, STALE, True)
        assert seen(await ours.get("a")) == (1, STALE, True)

    async def test_a_watch_is_told_that_the_value_is_unverified(
        self, ours: Prices, store: SteppedStore, sleeper: Sleeper, clock: ManualClock
    ) -> None:
        """A watch has asked long ago, so nothing says that the load began after its question."""
        store.broken = AWAY
        told: list[tuple[int, Verdict, bool]] = []
        with ours.watch("a", tell=lambda update: told.append(seen(update.answer))):
            await until(lambda: bool(told))
        assert told == [(1, STALE, True)]


async def pass_a_second(clock: ManualClock, *sleepers: Sleeper) -> None:
    clock.advance(1)
    for sleeper in sleepers:
        sleeper.wake(1)
    await turns()


class TestE29Cost:
    """An outage costs the upstream one load for each key, process and `fresh_for`."""

    @pytest.mark.parametrize("is_warm", [True, False])
    @pytest.mark.parametrize("memory_for", [0, 2])
    async def test_reads_begin_one_load_for_a_key_and_its_freshness(
        self,
        away: SteppedStore,
        clock: ManualClock,
        sleeper: Sleeper,
        upstream: Upstream,
        is_warm: bool,
        memory_for: int,
    ) -> None:
        """Ten times `fresh_for` of outage, several reads of each key in every second."""
        keys = [f"key-{number}" for number in range(20)]
        async with cache_on(away, clock, sleeper) as cache:
            prices = declare(cache, upstream, memory_for=memory_for)
            if is_warm:
                await prices.get_many(keys)
            upstream.calls.clear()
            away.broken = AWAY
            for _ in range(10 * FRESH_FOR):
                await asyncio.gather(*(prices.get(key) for key in keys))
                await prices.get_many(keys)
                await pass_a_second(clock)
        loads = Counter(key for call in upstream.calls for key in call)
        assert max(loads.values()) <= (9 if is_warm else 10)

    async def test_a_read_that_the_store_failed_late_finds_what_was_loaded_meanwhile(
        self, ours: Prices, store: SteppedStore, upstream: Upstream
    ) -> None:
        """A store may take a second to fail; memory had nothing when this read asked it."""
        store.broken = AWAY
        late = await store.holding("read", ours.get("a"))
        ask_of_late = store.gates.pop("read")
        await ours.get("a")
        ask_of_late.set()
        assert seen(await late) == (1, STALE, True)
        assert upstream.calls == [["a"]]

    async def test_a_watched_key_costs_no_more(
        self,
        ours: Prices,
        store: SteppedStore,
        upstream: Upstream,
        clock: ManualClock,
        sleeper: Sleeper,
    ) -> None:
        """Its driver looks at the copy's own time."""
        with ours.watch("a"):
            await until(lambda: bool(upstream.calls))
            await turns()
            upstream.calls.clear()
            store.broken = AWAY
            for _ in range(10 * FRESH_FOR):
                await ours.get("a")
                await pass_a_second(clock, sleeper)
        assert 9 <= len(upstream.calls) <= 10

    async def test_a_part_costs_no_more_however_deep_the_loader_is_that_reads_it(
        self, here: Cache, store: SteppedStore
    ) -> None:
        """Memory has the part, and answers the loader of a value that another loader reads."""
        calls: list[str] = []

        @here.cached("rate", fresh_for=FRESH_FOR)
        async def rate() -> int:
            calls.append("rate")
            return 2

        @here.cached("item", fresh_for=FRESH_FOR)
        async def item(number: int) -> int:
            return number * await rate()

        @here.cached("page", fresh_for=FRESH_FOR)
        async def page(number: int) -> str:
            return f"<{await item(number)}>"

        await rate()
        store.broken = AWAY
        assert [await page(number) for number in range(3)] == ["<0>", "<2>", "<4>"]
        assert calls == ["rate"]

    async def test_an_absent_key_is_asked_for_once_in_absent_for(
        self, ours: Prices, store: SteppedStore, upstream: Upstream, clock: ManualClock
    ) -> None:
        """That is the freshness of such an answer: a tenth of `fresh_for`, here 3 s."""
        upstream.absent = {"a"}
        store.broken = AWAY
        for _ in range(30):
            assert not (await ours.get("a")).found
            await pass_a_second(clock)
        assert len(upstream.calls) <= 10

    async def test_an_upstream_that_fails_too_is_asked_after_growing_pauses(
        self, ours: Prices, store: SteppedStore, upstream: Upstream, clock: ManualClock
    ) -> None:
        """E7: the cooldown is kept in the store; without one, the process remembers its own."""
        await ours("a")
        store.broken = AWAY
        upstream.error = ConnectionError("down")
        upstream.calls.clear()
        clock.advance(FRESH_FOR)
        for _ in range(40):
            answer = await ours.get("a")
            assert (answer.verdict, answer.unverified) == (STALE, True)
            await pass_a_second(clock)
        assert 4 <= len(upstream.calls) <= 6  # after 1, 2, 4, 8, 16 s

    async def test_a_key_without_a_copy_fails_at_once_during_its_cooldown(
        self, ours: Prices, store: SteppedStore, upstream: Upstream, clock: ManualClock
    ) -> None:
        """As with a store: callers get the remembered error."""
        store.broken = AWAY
        upstream.error = ConnectionError("down")
        for _ in range(20):
            with pytest.raises(LoadFailed, match="down"):
                await ours.get("a")
        assert len(upstream.calls) == 1
        clock.advance(1)
        with pytest.raises(LoadFailed, match="down"):
            await ours.get("a")
        assert len(upstream.calls) == 2


class TestE29ReadOnly:
    """A store that can be read and not written, such as a file on a full disk."""

    async def test_a_stale_copy_costs_one_load_for_its_freshness(
        self, away: SteppedStore, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
    ) -> None:
        """What was loaded and not stored is newer than what the store has, and is served."""
        async with cache_on(away, clock, sleeper) as cache:
            prices = declare(cache, upstream)
            await prices("a")
            away.broken = WRITES
            clock.advance(FRESH_FOR)
            upstream.calls.clear()
            upstream.version = 2
            assert seen(await prices.get("a")) == (1, STALE, False)
            await idle(cache)
            for _ in range(10 * FRESH_FOR):
                assert seen(await prices.get("a")) == (2, STALE, True)
                await pass_a_second(clock)
        assert len(upstream.calls) <= 11

    @pytest.mark.parametrize("how", ["hard", "soft", "delete", "put"])
    async def test_a_change_in_the_store_counts_more(
        self,
        ours: Prices,
        theirs: Prices,
        store: SteppedStore,
        upstream: Upstream,
        here: Cache,
        there: Cache,
        clock: ManualClock,
        how: str,
    ) -> None:
        """Another process could write: its invalidation or value is seen."""
        await ours("a")
        store.broken = WRITES
        clock.advance(FRESH_FOR)
        await ours.get("a")
        await idle(here)
        clock.advance(1)
        upstream.version = 3
        if how == "put":
            await theirs.put("a", Price("a", 3))
        else:
            await wrong(there, theirs, how)
        if how == "soft":
            assert version(await ours.get("a")) < 3
            await idle(here)
        assert version(await ours.get("a")) == 3
