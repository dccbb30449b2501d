"""S10: a store that tells what other processes do, and how far memory trusts its silence."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from msgspec.structs import replace

from stillfresh import Cache, Origin, StoreError
from stillfresh.engine import news
from stillfresh.stores import Capabilities
from stillfresh.stores.channel import A_TAG, Channel, Tell
from stillfresh.stores.contract import Store
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Prices, Sleeper, Upstream, declare, version
from tests.kit.held_store import SteppedStore, cache_on


class TellingStore(SteppedStore):
    """Tells what the test tells it to tell; its beats come back while the channel is whole."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.tell: Tell | None = None
        self.is_whole = True
        self.beats = self.opened = 0

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), push=self)

    def listen(self, tell: Tell) -> AbstractAsyncContextManager[Channel]:
        return self._listening(tell)

    @asynccontextmanager
    async def _listening(self, tell: Tell) -> AsyncIterator[Channel]:
        if not self.is_whole:
            raise StoreError("away")
        self.tell, self.opened = tell, self.opened + 1
        try:
            yield TestChannel(self)
        finally:
            self.tell = None


class TestChannel(Channel):
    """See `TellingStore`."""

    __test__ = False

    def __init__(self, store: TellingStore) -> None:
        self._store = store

    async def beat(self) -> None:
        await asyncio.sleep(0)
        if not self._store.is_whole:
            raise StoreError("silent")
        self._store.beats += 1


class Bench:
    """A cache on a store that tells; and another process on the same store."""

    def __init__(self) -> None:
        self.clock, self.sleep, self.upstream = ManualClock(1_000.0), Sleeper(), Upstream()
        shared = MemoryStore(clock=self.clock)
        self.store = TellingStore(shared)
        self.cache = cache_on(self.store, self.clock, self.sleep)
        self.prices = declare(self.cache, self.upstream, memory_for=1, tags=lambda _: ["eu"])
        self.other = cache_on(SteppedStore(shared), self.clock, self.sleep)
        self.others = declare(self.other, self.upstream)

    async def pass_time(self, seconds: float) -> None:
        """In steps of a third of `memory_for`, with a beat in each."""
        for _ in range(round(seconds * 4)):
            beats = self.store.beats
            self.clock.advance(0.25)
            self.sleep.wake(0.25)
            for _ in range(20):
                await asyncio.sleep(0)
            assert self.store.beats >= beats

    async def generation(self, key: str) -> str:
        """Of the stored copy."""
        copy = (await self.store.inner.read("price", [key]))[key].copy
        assert copy is not None
        return copy.generation

    def asked(self) -> int:
        return self.store.count("read")

    def told(self, key: str, generation: str | None = None) -> None:
        assert self.store.tell is not None
        self.store.tell("price", key, generation)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    async with bench.cache, bench.other:
        await bench.pass_time(1)
        assert bench.store.opened == 1
        assert 1 / 3 in bench.sleep.asked  # between two beats
        yield bench


async def read(prices: Prices, key: str = "a") -> Price:
    return await prices(key)


class TestS10Memory:
    async def test_memory_asks_nothing_while_the_channel_is_alive(self, bench: Bench) -> None:
        """Until the end of freshness, by one key and by many."""
        await read(bench.prices)
        before = bench.asked()
        for _ in range(5):
            await bench.pass_time(5)
            assert (await bench.prices.get("a")).origin is Origin.MEMORY
            assert (await bench.prices.get_many(["a"]))["a"].origin is Origin.MEMORY
        assert bench.asked() == before

    async def test_a_change_is_seen_when_it_is_told(self, bench: Bench) -> None:
        """Not `memory_for` later: at the very next read."""
        await read(bench.prices)
        await bench.others.put("a", Price("a", 7))
        assert (await read(bench.prices)).version == 1
        bench.told("a", "another generation")
        assert (await read(bench.prices)).version == 7

    async def test_a_change_during_a_cooldown_is_seen_when_it_is_told(self, bench: Bench) -> None:
        """Memory gives the old copy without asking the store, until it is told of another."""
        await read(bench.prices)
        bench.upstream.error = ConnectionError("down")
        await bench.pass_time(31)
        await read(bench.prices)
        await bench.pass_time(0.25)
        await read(bench.prices)
        before = bench.asked()
        cooling = await bench.prices.get("a")
        assert cooling.error is not None
        assert bench.asked() == before
        await bench.others.put("a", Price("a", 7))
        bench.told("a", "another generation")
        assert (await read(bench.prices)).version == 7

    async def test_an_invalidation_is_seen_when_it_is_told(self, bench: Bench) -> None:
        """The next read loads anew."""
        await read(bench.prices)
        bench.upstream.version = 2
        await bench.others.invalidate("a")
        bench.told("a")
        assert (await read(bench.prices)).version == 2

    async def test_a_silent_channel_is_trusted_for_memory_for(self, bench: Bench) -> None:
        """Then the store is asked, as if there were no channel."""
        await read(bench.prices)
        await bench.pass_time(3)
        await read(bench.prices)
        bench.store.is_whole = False
        await bench.others.put("a", Price("a", 7))
        bench.clock.advance(0.4)
        assert (await read(bench.prices)).version == 1
        bench.clock.advance(0.7)
        assert (await read(bench.prices)).version == 7

    async def test_memory_is_checked_after_a_pause(self, bench: Bench) -> None:
        """What was not told meanwhile is not served when the channel is back."""
        await read(bench.prices)
        bench.store.is_whole = False
        await bench.pass_time(2)
        await bench.others.put("a", Price("a", 7))
        bench.store.is_whole = True
        await bench.pass_time(7)
        assert bench.store.opened > 1
        assert (await read(bench.prices)).version == 7

    async def test_what_was_on_its_way_when_it_was_told_is_checked(self, bench: Bench) -> None:
        """The store was read before the change, and its answer came after the news of it."""
        await read(bench.others)
        reading = await bench.store.holding("read:done", read(bench.prices))
        await bench.others.put("a", Price("a", 7))
        bench.told("a", "another generation")
        bench.store.let_go("read:done")
        assert (await reading).version == 1
        await bench.pass_time(2)
        assert (await read(bench.prices)).version == 7

    async def test_what_was_looked_at_when_it_was_told_is_checked(self, bench: Bench) -> None:
        """`look` keeps what it finds, too: as old as its question, not as its answer."""
        await read(bench.others)
        looking = await bench.store.holding("read:done", bench.prices.get_stored("a"))
        await bench.others.put("a", Price("a", 7))
        bench.told("a", "another generation")
        bench.clock.advance(0.01)
        bench.store.let_go("read:done")
        assert await looking is not None
        await bench.pass_time(2)
        assert (await read(bench.prices)).version == 7

    async def test_what_was_on_its_way_when_its_tag_was_told_is_checked(self, bench: Bench) -> None:
        """Memory does not have it yet, and the tag may have been all that was told."""
        await read(bench.others)
        reading = await bench.store.holding("read:done", read(bench.prices))
        await bench.others.put("a", Price("a", 7))
        assert bench.store.tell is not None
        bench.store.tell(A_TAG, "eu", None)
        bench.store.let_go("read:done")
        await reading
        await bench.pass_time(2)
        assert (await read(bench.prices)).version == 7

    async def test_a_tag_of_many_keys_is_told_in_slices(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E28: no beat proves anything before the last key is doubted."""
        monkeypatch.setattr(news, "SLICE", 2)
        keys = [f"k{number}" for number in range(7)]
        await bench.prices.get_many(keys)
        await bench.others.put_many({key: Price(key, 7) for key in keys})
        assert bench.store.tell is not None
        bench.store.tell(A_TAG, "eu", None)
        await bench.pass_time(2)
        answers = await bench.prices.get_many(keys)
        assert {version(answer) for answer in answers.values()} == {7}

    async def test_a_slow_read_does_not_outlive_its_own_publication(self, bench: Bench) -> None:
        """The store was read before this process published, and its answer came after that."""
        await read(bench.others)
        reading = await bench.store.holding("read:done", read(bench.prices))
        slow = bench.store.gates.pop("read:done")
        bench.upstream.version = 5
        await bench.prices.refresh("a")
        bench.told("a", await bench.generation("a"))
        bench.clock.advance(0.01)
        slow.set()
        assert (await reading).version == 1
        await bench.pass_time(2)
        assert (await read(bench.prices)).version == 5

    async def test_what_many_were_told_of_is_checked(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """More keys than can be remembered one by one: all that was on its way is checked."""
        monkeypatch.setattr(news, "MOST_NOTED", 2)
        await read(bench.others)
        reading = await bench.store.holding("read:done", read(bench.prices))
        await bench.others.put("a", Price("a", 7))
        for key in ("a", "b", "c", "d"):
            bench.told(key)
        bench.store.let_go("read:done")
        await reading
        await bench.pass_time(2)
        assert (await read(bench.prices)).version == 7

    async def test_its_own_publication_is_no_news(self, bench: Bench) -> None:
        """Told before or after its own load has ended: memory need not ask."""
        await read(bench.prices)
        bench.told("a", await bench.generation("a"))
        before = bench.asked()
        await bench.pass_time(3)
        await read(bench.prices)
        assert bench.asked() == before

    async def test_its_own_publication_hides_no_change_that_was_told_before_it(
        self, bench: Bench
    ) -> None:
        """T7: announcements may arrive late, twice and in another order."""
        loading = await bench.store.holding("publish:done", read(bench.prices))
        await bench.others.invalidate("a")
        bench.upstream.version = 2
        record = (await bench.store.inner.read("price", ["a"]))["a"]
        assert record.copy is not None
        bench.told("a", None)
        bench.told("a", record.copy.generation)
        bench.store.let_go("publish:done")
        assert (await loading).version == 1
        await bench.pass_time(2)
        assert (await read(bench.prices)).version == 2

    async def test_a_clock_that_is_set_back_makes_nothing_newer(self, bench: Bench) -> None:
        """What was checked before the pause does not count as checked after it."""
        await read(bench.prices)
        bench.store.is_whole = False
        await bench.pass_time(1)
        await bench.others.put("a", Price("a", 7))
        bench.clock.advance(-4)
        bench.store.is_whole = True
        await bench.pass_time(7)
        assert (await read(bench.prices)).version == 7

    async def test_a_clock_that_is_set_back_makes_no_read_later(self, bench: Bench) -> None:
        """The store was read before the change, by a clock that was ahead of what it is now."""
        await read(bench.others)
        reading = await bench.store.holding("read:done", read(bench.prices))
        bench.clock.advance(-2)
        await bench.others.put("a", Price("a", 7))
        bench.told("a", "another generation")
        bench.store.let_go("read:done")
        assert (await reading).version == 1
        await bench.pass_time(4)
        assert (await read(bench.prices)).version == 7

    async def test_unknown_names_are_no_news(self, bench: Bench) -> None:
        """Of a kind or of an id that this release does not know."""
        assert bench.store.tell is not None
        bench.store.tell("shoes", "a", None)
        bench.told("nobody")
        assert (await read(bench.prices)).version == 1

    def test_a_copy_is_known_unless_a_change_was_announced_since(self) -> None:
        """The announced generation itself is known, also if the store was asked before."""
        channel = listening()
        notices: news.Notices[str] = news.Notices(channel)
        before = channel.heard
        notices.note("a", "g2")
        after = channel.heard
        assert [notices.is_known("a", "g1", heard) for heard in (before, after)] == [False, True]
        assert notices.is_known("a", "g2", before)
        assert notices.is_known("b", "g1", before)
        notices.note("b", None)
        invalidated = channel.heard
        notices.note("b", "g1")
        notices.note("b", "g1")
        assert not notices.is_known("b", "g1", invalidated - 1)
        assert notices.is_known("b", "g1", invalidated)
        told = [("a", "g2"), ("a", "g1"), ("b", "g2")]
        assert [notices.is_published(*it) for it in told] == [True, False, False]
        notices.doubt()
        assert not notices.is_known("b", "g1", channel.heard - 1)
        assert notices.is_known("b", "g1", channel.heard)
        assert not notices.is_published("a", "g2")

    def test_only_what_was_checked_since_it_listens_is_trusted(self) -> None:
        """For `memory_for` after the last beat that came back."""
        channel = listening()
        notices: news.Notices[str] = news.Notices(channel)
        assert notices.trusted_until(channel.since, 5) == 105
        assert notices.trusted_until(channel.since - 1, 5) == news.SILENT


def listening() -> news.News:
    """A channel that began to listen after some announcements; its last beat was sent at 100."""
    channel = news.News.__new__(news.News)
    channel.heard = 7
    channel.since = channel.count()
    channel.proved_at = 100
    return channel


class TestS10Watch:
    async def test_a_watch_hears_of_anothers_put(self, bench: Bench) -> None:
        """When it is told, not at the end of freshness."""
        with bench.prices.watch("a") as watch:
            updates = aiter(watch)
            assert (await anext(updates)).answer.value.version == 1
            await bench.pass_time(1)
            await bench.others.put("a", Price("a", 7))
            bench.told("a", "another generation")
            update = await asyncio.wait_for(anext(updates), 60)
            assert update.answer.value.version == 7

    async def test_a_watch_hears_of_a_put_from_a_clock_that_is_behind(self, bench: Bench) -> None:
        """Its copy says that it is older than the one that is known, and came later."""
        with bench.prices.watch("a") as watch:
            updates = aiter(watch)
            await anext(updates)
            await bench.pass_time(1)
            bench.clock.advance(-3)
            await bench.others.put("a", Price("a", 7))
            bench.clock.advance(3)
            record = (await bench.store.inner.read("price", ["a"]))["a"]
            assert record.copy is not None
            bench.told("a", record.copy.generation)
            update = await asyncio.wait_for(anext(updates), 60)
            assert update.answer.value.version == 7

    async def test_a_watch_refreshes_what_another_invalidated(self, bench: Bench) -> None:
        """At once."""
        with bench.prices.watch("a") as watch:
            updates = aiter(watch)
            await anext(updates)
            bench.upstream.version = 2
            await bench.others.invalidate("a")
            bench.told("a")
            update = await asyncio.wait_for(anext(updates), 60)
            assert update.answer.value.version == 2

    async def test_what_was_missed_is_looked_up_after_a_pause(self, bench: Bench) -> None:
        """A channel that comes back has told nothing of what was done meanwhile."""
        with bench.prices.watch("a") as watch:
            updates = aiter(watch)
            await anext(updates)
            bench.store.is_whole = False
            await bench.pass_time(2)
            await bench.others.put("a", Price("a", 7))
            bench.store.is_whole = True
            await bench.pass_time(7)
            update = await asyncio.wait_for(anext(updates), 60)
            assert update.answer.value.version == 7


class TestS10Wanted:
    async def test_nobody_listens_without_need(self) -> None:
        """A cache that keeps nothing in memory and watches nothing opens no channel."""
        clock, sleep = ManualClock(1_000.0), Sleeper()
        store = TellingStore(MemoryStore(clock=clock))
        cache: Cache = cache_on(store, clock, sleep)
        prices = declare(cache, Upstream())
        async with cache:
            await read(prices)
            for _ in range(10):
                await asyncio.sleep(0)
            assert store.opened == 0
