"""S1, S2, F7, F17, F19: the feed's store keeps every rule that the stores keep."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from stillfresh import ConfigError
from stillfresh.clock import Clock
from stillfresh.stores import capabilities_of
from stillfresh.stores.contract import Ask, Copy, Lease, Put, Record, Store, StoredEntry
from stillfresh.systems.feed import Comment, FeedCache
from stillfresh.systems.feed.rules import Fetched, value_of
from stillfresh.systems.feed.store import KIND, FeedStore
from stillfresh.testing import (
    CopyConformance,
    EvictionConformance,
    LeaseConformance,
    ListingConformance,
    ManualClock,
    StatisticsConformance,
)
from stillfresh.testing.conformance_kit import KIND as PRICES
from stillfresh.testing.conformance_kit import POLICY, on_open_stores
from tests.kit.feed import comment, elsewhere, full, said, topic
from tests.kit.feed_store import FeedAsStore


@on_open_stores
class TestF7FeedStore(
    CopyConformance,
    LeaseConformance,
    ListingConformance,
    EvictionConformance,
    StatisticsConformance,
):
    """S1, S2, F17: the suite's entries are comments of topics. A feed has no sizes to list.

    Without PutConformance: the store of a feed has no put. Its values are rows, which callers store
    through FeedCache.
    """

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "feed.db"

    async def new_store(self, clock: Clock) -> FeedAsStore:
        return FeedAsStore(self.path, clock, POLICY)

    async def test_a_listing_shows_each_entry_as_a_read_does_without_its_value(
        self, store: Store
    ) -> None:
        """Each key as a read would give it, unread; of what size, no listing looks."""
        listing = capabilities_of(store).require_listing()
        assert await listing.entries() == []
        copy = await self.published(store, "a", b"four")
        await self.published(store, "b", None)
        await self.lease(store, "a", copy.generation)
        await self.lease(store, "c")
        found = await listing.entries()
        assert [(entry.id, entry.size) for entry in found] == [
            ("a", None),
            ("b", None),
            ("c", None),
        ]
        held = [(await self.record(store, id_)).held_until for id_ in "abc"]
        assert [entry.record.held_until for entry in found] == held
        assert held[1] is None
        assert found[2] == StoredEntry(PRICES, "c", await self.record(store, "c"))


@pytest.fixture
async def store(cache: FeedCache, clock: ManualClock, path: Path) -> AsyncIterator[FeedStore]:
    store = FeedStore(cache, clock=clock)
    await store.open()
    yield store
    await store.close()


async def held(store: FeedStore, key: str) -> Lease:
    (grant,) = (await store.acquire(KIND, [Ask(key)], 10)).values()
    assert isinstance(grant, Lease)
    return grant


class TestF7FeedKeys:
    async def test_a_feed_has_one_kind(self, store: FeedStore, cache: FeedCache) -> None:
        """Of any other kind nothing is there, and nothing is changed through it."""
        cache.put_topic(full("a"))
        assert await store.read("price", ["topic:a"]) == {}
        await store.invalidate("price", ["topic:a"])
        await store.delete("price", ["topic:a"])
        assert not cache.is_stale("topic:a")
        assert list(await store.read(KIND, ["topic:a", "topic:b"])) == ["topic:a"]

    async def test_s13_a_value_is_not_put_through_the_store(
        self, store: FeedStore, cache: FeedCache
    ) -> None:
        """Its values are rows; the error names the methods that write them."""
        put = Put(Copy(store.new_generation(), 0.0, POLICY, b"value"))
        with pytest.raises(ConfigError, match="store them with put_topic"):
            await store.put(KIND, {"topic:a": put})
        assert cache.get_topic("a") is None

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


def fetched(*comments: Comment) -> Fetched:
    return Fetched(comments=comments)


class TestF19Store:
    """A copy is a meta row, and what was fetched is in the rows."""

    async def test_publishing_writes_rows_and_meta_row_and_ends_the_lease(
        self, store: FeedStore, cache: FeedCache, clock: ManualClock
    ) -> None:
        """The value of the copy is `last_fetched`, as every value is encoded."""
        lease = await held(store, "comments:a")
        store.hand_over("comments:a", clock(), fetched(comment("1")))
        copy = Copy(lease.token, clock(), POLICY, value_of(clock()))
        assert await store.publish(KIND, {"comments:a": (lease, copy)}) == set()
        assert said(cache.get_comments("a")) == ["1"]
        assert not cache.is_stale("comments:a")
        record = (await store.read(KIND, ["comments:a"]))["comments:a"]
        assert record.copy is not None
        assert isinstance(record.copy.value, bytes)
        assert msgspec.msgpack.decode(record.copy.value) == int(clock())
        assert record.held_until is None

    async def test_a_publication_without_a_fetch_stores_nothing(
        self, store: FeedStore, cache: FeedCache, clock: ManualClock
    ) -> None:
        """A load that handed nothing over is superseded: no reader may take its key for fetched."""
        lease = await held(store, "comments:a")
        copy = Copy(lease.token, clock(), POLICY, value_of(clock()))
        assert await store.publish(KIND, {"comments:a": (lease, copy)}) == {"comments:a"}
        assert cache.get_comments("a") is None
        assert cache.is_stale("comments:a")

    @pytest.mark.parametrize(
        "change",
        [
            "INSERT OR REPLACE INTO feed_cache_meta VALUES ('comments:a', 7)",
            "DELETE FROM feed_cache_meta",
        ],
    )
    async def test_another_programs_write_to_the_meta_row_voids_the_lease(
        self, store: FeedStore, cache: FeedCache, clock: ManualClock, path: Path, change: str
    ) -> None:
        """F8: it is neither renewed nor published under, and nobody sees it as held."""
        cache.put_comments("a", [comment("1")])
        clock.advance(301)
        seen = (await store.read(KIND, ["comments:a"]))["comments:a"].copy
        assert seen is not None
        grants = await store.acquire(KIND, [Ask("comments:a", seen.generation)], 10)
        lease = grants["comments:a"]
        assert isinstance(lease, Lease)
        assert await store.renew(KIND, [lease], 10) == set()
        elsewhere(path, f"db.execute({change!r})")
        assert await store.renew(KIND, [lease], 10) == {"comments:a"}
        record = (await store.read(KIND, ["comments:a"])).get("comments:a", Record())
        assert record.held_until is None
        assert record.copy is None or record.copy.generation != seen.generation
        store.hand_over("comments:a", clock(), fetched(comment("2")))
        copy = Copy(lease.token, clock(), POLICY, value_of(clock()))
        assert await store.publish(KIND, {"comments:a": (lease, copy)}) == {"comments:a"}
        assert said(cache.get_comments("a")) == ["1"]

    async def test_a_fetch_stays_for_readers_that_are_not_asking_for_a_later_one(
        self, store: FeedStore, clock: ManualClock
    ) -> None:
        """They are served from it while the file cannot be read."""
        store.hand_over("comments:a", clock(), fetched(comment("1")))
        assert store.last_fetch("comments:a", since=int(clock())) == fetched(comment("1"))
        assert store.last_fetch("comments:a", since=int(clock()) + 1) is None
        assert store.last_fetch("comments:b", since=0) is None

    async def test_leases_of_another_kind_are_refused(self, store: FeedStore) -> None:
        """A feed's file has one kind; the error names it."""
        with pytest.raises(ConfigError, match="'feed'"):
            await store.acquire("price", [Ask("topic:a")], 10)
