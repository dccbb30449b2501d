"""S1, S2, S3: the memory store passes the conformance suite, and stays within its bounds."""

import pytest

from stillfresh import Clock, ConfigError
from stillfresh.stores.contract import Ask, Lease
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import StoreConformance


class TestS3MemoryStore(StoreConformance):
    async def new_store(self, clock: Clock) -> MemoryStore:
        return MemoryStore(clock=clock)

    async def test_holds_no_more_than_it_may(self) -> None:
        """One more publication drops the oldest; what is being loaded stays."""
        store = MemoryStore(clock=self.clock, max_copies=3)
        await store.open()
        loading = await self.lease(store, "loading")
        for id_ in "abcd":
            await self.published(store, id_)
        assert set(await store.read("price", ["loading", *"abcd"])) == {"loading", "c", "d"}
        assert await store.publish("price", {"loading": (loading, self.copy(loading))}) == set()

    async def test_leaves_nothing_of_what_is_forgotten(self) -> None:
        """Leases that end without a copy, and tags of deleted ids, take no room."""
        store = MemoryStore(clock=self.clock)
        await store.open()
        for number in range(10):
            grants = await store.acquire("price", [Ask(str(number), tags=(f"t{number}",))], 5)
            await store.release(
                "price", [grant for grant in grants.values() if isinstance(grant, Lease)]
            )
        assert (store._rows, store._tagged._keys) == ({}, {})

    @pytest.mark.parametrize("limit", [0, -1])
    def test_refuses_a_bad_limit(self, limit: int) -> None:
        """A store for nothing is a mistake."""
        with pytest.raises(ConfigError, match="max_copies: must be 1 or more"):
            MemoryStore(max_copies=limit)
