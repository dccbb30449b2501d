"""E3, E5: what watches over a call of the loader."""

import pytest

from stillfresh import Cache, LoadFailed
from tests.kit.engine import Sleeper, Upstream, declare, turns
from tests.kit.held_store import SteppedStore


class TestE3Guard:
    async def test_a_lease_is_renewed_three_times_in_its_time(
        self, here: Cache, upstream: Upstream, store: SteppedStore, sleeper: Sleeper
    ) -> None:
        """Until `load_timeout`; then the load has failed."""
        prices = declare(here, upstream, lease_for=6, load_timeout=5)
        reading = await upstream.holding(prices.get("a"))
        await turns()
        for number in range(3):
            assert store.count("renew") == number
            sleeper.wake()
            await turns()
        assert sleeper.asked[:3] == [2, 2, 1]
        assert store.count("renew") == 2
        with pytest.raises(LoadFailed, match=r"no answer within 5 s \(load_timeout\)"):
            await reading
