"""S1, S2 and F7: the feed's store keeps every rule that the stores keep."""

import asyncio
from pathlib import Path

import pytest
from feed_kit import PATIENCE, comment, full, topic
from feed_store import FeedAsStore

from stillfresh.clock import Clock
from stillfresh.errors import StoreError
from stillfresh.feed import FeedCache
from stillfresh.feed.store import KIND, FeedStore
from stillfresh.stores.contract import Ask, Entry, Lease, Mark
from stillfresh.testing import ManualClock, StoreConformance
from stillfresh.testing.conformance import KIND as PRICES
from stillfresh.testing.conformance import POLICY


class TestF7FeedStore(StoreConformance):
    """The suite's entries are comments of topics. Marks, tags and listings differ in a feed."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "feed.db"

    async def new_store(self, clock: Clock) -> FeedAsStore:
        return FeedAsStore(self.path, clock, POLICY)

    async def test_invalidating_marks_the_copy(self) -> None:
        """Always softly, since a feed serves its rows on; a new copy has no mark."""
        async with self.opened() as store:
            await self.published(store)
            for soft in (True, False, True):
                await store.invalidate(PRICES, ["a", "unknown"], soft=soft)
                copy = (await self.record(store)).copy
                assert copy is not None
                assert copy.mark == Mark.SOFT
            await self.published(store)
            again = (await self.record(store)).copy
            assert again is not None
            assert again.mark == Mark.NONE

    async def test_a_tag_reaches_what_was_leased_with_it(self) -> None:
        """A feed has no tags: no tag reaches anything, and none disturbs a load."""
        async with self.opened() as store:
            lease = await self.lease(store, "a", None, "eu")
            assert await store.invalidate_tag("eu") == []
            assert await store.publish(PRICES, {"a": (lease, self.copy(lease))}) == set()
            assert await store.invalidate_tag("eu") == []
            copy = (await self.record(store)).copy
            assert copy is not None
            assert copy.mark == Mark.NONE

    async def test_tags_of_an_earlier_lease_are_gone(self) -> None:
        """A feed has no tags, so none can remain."""
        await self.test_a_tag_reaches_what_was_leased_with_it()

    async def test_a_lease_that_is_taken_over_has_the_new_tags(self) -> None:
        """The same."""
        await self.test_a_tag_reaches_what_was_leased_with_it()

    async def test_late_requests_around_an_invalidation_by_tag(self) -> None:
        """Nothing can be late without a network, and no tag reaches anything."""
        await self.test_a_tag_reaches_what_was_leased_with_it()

    async def test_lists_what_it_holds(self) -> None:
        """Each key as a read would give it, unread; of what size, no listing looks."""
        async with self.opened() as store:
            assert await store.entries() == []
            copy = await self.published(store, "a", b"four")
            await self.published(store, "b", None)
            await self.lease(store, "a", copy.generation)
            await self.lease(store, "c")
            found = await store.entries()
            assert [(entry.id, entry.size) for entry in found] == [
                ("a", None),
                ("b", None),
                ("c", None),
            ]
            held = [(await self.record(store, id_)).held_until for id_ in "abc"]
            assert [entry.record.held_until for entry in found] == held
            assert held[1] is None
            assert found[2] == Entry(PRICES, "c", await self.record(store, "c"))


@pytest.fixture
def store(cache: FeedCache, clock: ManualClock) -> FeedStore:
    return FeedStore(cache, clock, lambda _: None)


async def held(store: FeedStore, key: str) -> Lease:
    (grant,) = (await store.acquire(KIND, [Ask(key)], 10)).values()
    assert isinstance(grant, Lease)
    return grant


class TestF7FeedKeys:
    async def test_there_is_one_kind(self, store: FeedStore, cache: FeedCache) -> None:
        """Of any other kind nothing is there, and nothing is changed through it."""
        cache.put_topic(full("a"))
        assert await store.read("price", ["topic:a"]) == {}
        await store.invalidate("price", ["topic:a"])
        await store.delete("price", ["topic:a"])
        assert not cache.is_stale("topic:a")
        assert list(await store.read(KIND, ["topic:a", "topic:b"])) == ["topic:a"]

    async def test_an_invalidated_key_may_be_spelled_in_any_way(
        self, store: FeedStore, cache: FeedCache
    ) -> None:
        """As everywhere, a category is normalised at the door (F5)."""
        cache.put_topics([topic("a")], "index:general:7")
        await store.invalidate(KIND, ["index: General:7"])
        assert cache.is_stale("index:general:7")

    async def test_deleting_a_key_leaves_what_is_not_its_own(
        self, store: FeedStore, cache: FeedCache
    ) -> None:
        """A list's topics stay; comments go alone; a topic goes with its comments."""
        cache.put_topics([topic("a")], "index:all:7")
        cache.put_comments("a", [comment("1")])
        await store.delete(KIND, ["index:all:7"])
        assert cache.is_stale("index:all:7")
        assert cache.get_topic("a") is not None
        await store.delete(KIND, ["comments:a"])
        assert cache.get_comments("a") is None
        assert cache.get_topic("a") is not None
        cache.put_comments("a", [comment("1")])
        await store.delete(KIND, ["topic:a"])
        assert (cache.get_topic("a"), cache.get_comments("a")) == (None, None)
        assert await store.read(KIND, ["topic:a", "comments:a", "index:all:7"]) == {}


class TestF7Places:
    async def test_come_back_whatever_becomes_of_the_step(
        self, cache: FeedCache, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Done, failed, given up by its caller, or refused because the file is closed."""
        monkeypatch.setattr("stillfresh.feed.store.MAX_QUEUED", 2)
        store = FeedStore(cache, clock, lambda _: None)

        def fails(_: object) -> None:
            raise StoreError("a broken disk")

        async with asyncio.timeout(PATIENCE):
            for _ in range(5):
                assert await store.run(lambda _: 1) == 1
                with pytest.raises(StoreError, match="a broken disk"):
                    await store.run(fails)
                given_up = asyncio.create_task(store.run(lambda _: 1))
                await asyncio.sleep(0)
                given_up.cancel()
                await asyncio.wait([given_up])
            cache.close()
            for _ in range(5):
                with pytest.raises(StoreError, match="closed"):
                    await store.run(lambda _: 1)
