"""E22 for threads: past the cache, or on another store, for a block."""

import threading

from stillfresh import SyncCache
from tests.kit.engine import Price
from tests.kit.sync import Calling, PlainUpstream, SyncPrices


class TestE22SyncBlocks:
    def test_bypassed_loads_every_time_in_the_calling_thread(
        self, cache: SyncCache, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """Nothing is stored, and another thread is answered from memory meanwhile."""
        prices("a")
        upstream.version = 2
        with cache.bypassed():
            assert [prices("a"), prices.get("a").value] == [Price("a", 2)] * 2
            assert Calling(prices, "a").result() == Price("a", 1)
        assert prices("a") == Price("a", 1)
        assert upstream.threads == ["MainThread"] * 3
        assert not [it for it in threading.enumerate() if it.name == "stillfresh-loader"]

    def test_override_swaps_the_store(
        self, cache: SyncCache, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """What is put inside the block is gone after it."""
        prices("a")
        with cache.override("memory://"):
            prices.put("a", Price("a", 5))
            assert prices("a") == Price("a", 5)
        assert prices("a") == Price("a", 1)
