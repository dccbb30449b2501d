"""E30, E33: an upstream that is slow, down or wrong, for the tests of users."""

import asyncio
import threading

import pytest

from stillfresh import BadValue, Cache, LoadFailed, LoadTimeout, SyncCache
from stillfresh.testing import FakeUpstream


@pytest.fixture
def upstream() -> FakeUpstream[str, int]:
    return FakeUpstream({"tea": 300})


class TestE30FakeUpstream:
    def test_it_answers_and_counts_its_calls(self, upstream: FakeUpstream[str, int]) -> None:
        assert upstream.ask("tea") == 300
        assert upstream.ask_many(["tea", "rum"]) == {"tea": 300}
        with pytest.raises(KeyError, match="rum"):
            upstream.ask("rum")
        assert upstream.calls == ["tea", "tea", "rum", "rum"]

    async def test_down_is_an_error_until_the_block_ends(
        self, upstream: FakeUpstream[str, int]
    ) -> None:
        async with Cache("memory://") as cache:
            price = cache.cached("price", fresh_for=30)(upstream.ask_async)
            with upstream.down(ValueError("closed")), pytest.raises(LoadFailed) as caught:
                await price("tea")
            assert isinstance(caught.value.__cause__, ValueError)
            with upstream.down(), pytest.raises(ConnectionError):
                upstream.ask("tea")
            assert upstream.ask("tea") == 300

    async def test_slow_calls_wait_until_the_block_ends(
        self, upstream: FakeUpstream[str, int]
    ) -> None:
        """They are answered with the value from when they began."""
        with upstream.slow():
            asking = asyncio.create_task(upstream.ask_async("tea"))
            await asyncio.to_thread(upstream.wait_for_calls, 1)
            upstream.values["tea"] = 400
            assert not asking.done()
        assert await asking == 300
        assert await upstream.ask_async("tea") == 400

    def test_slow_calls_of_threads_wait_too(self, upstream: FakeUpstream[str, int]) -> None:
        with SyncCache("memory://") as cache:
            price = cache.cached("price", fresh_for=30)(upstream.ask)
            with upstream.slow(), pytest.raises(LoadTimeout):
                price.of("tea").get(patience="1ms")
            assert price("tea") == 300
        assert upstream.calls == ["tea"]

    async def test_a_cancelled_caller_does_not_hold_up_the_others(
        self, upstream: FakeUpstream[str, int]
    ) -> None:
        with upstream.slow():
            first, second = (asyncio.create_task(upstream.ask_async("tea")) for _ in range(2))
            await asyncio.to_thread(upstream.wait_for_calls, 2)
            first.cancel()
        assert await second == 300
        assert first.cancelled()

    def test_wrong_answers_are_the_given_value(self, upstream: FakeUpstream[str, int]) -> None:
        with SyncCache("memory://") as cache:

            @cache.cached("price", fresh_for=30)
            def price(sku: str) -> int:
                return upstream.ask(sku)

            with upstream.wrong("free"), pytest.raises(BadValue):
                price("tea")

    def test_waiting_for_calls_that_do_not_come_ends(
        self, upstream: FakeUpstream[str, int]
    ) -> None:
        threading.Thread(target=upstream.ask, args=("tea",)).start()
        upstream.wait_for_calls(1)
        with pytest.raises(TimeoutError, match="1 of 2 calls"):
            upstream.wait_for_calls(2, timeout="1ms")
