"""E20: `def` loaders of the async Cache run in a bounded pool of threads."""

import asyncio
import threading
from contextvars import ContextVar

import pytest

from stillfresh import Answer, Cache, Loaded, LoadFailed
from tests.kit.engine import Price, Sleeper, turns

REQUEST: ContextVar[str] = ContextVar("request", default="none")


def loader_threads() -> list[threading.Thread]:
    return [it for it in threading.enumerate() if it.name == "stillfresh-loader"]


class TestE22DefLoaders:
    async def test_a_bypassed_def_loader_leaves_no_thread(self, cache: Cache) -> None:
        """E13: whether the call ends or is cancelled."""
        begun, gate = threading.Event(), threading.Event()

        @cache.batched("price", fresh_for="1m")
        def prices(skus: list[str]) -> dict[str, Price]:
            begun.set()
            assert gate.wait(20)
            return {sku: Price(sku, 1) for sku in skus}

        with cache.bypassed():
            reading = asyncio.create_task(prices("a"))
            await asyncio.to_thread(begun.wait, 20)
            (thread,) = loader_threads()
            reading.cancel()
            gate.set()
            await asyncio.wait([reading])
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()


class TestE20DefLoaders:
    async def test_def_loaders_run_in_threads_and_do_not_hold_the_loop(self, cache: Cache) -> None:
        """The loop has its turns while the function waits; what it raises is a failed load."""
        gate = threading.Event()

        @cache.batched("price", fresh_for="1m")
        def prices(skus: list[str]) -> dict[str, Price]:
            assert gate.wait(20)
            return {sku: Price(sku, 1) for sku in skus if sku != "absent"}

        @cache.cached("report", fresh_for="1m")
        def report(year: int, region: str = "eu") -> list[str] | Loaded[list[str]]:
            if region == "none":
                raise ValueError(region)
            return Loaded([f"{year} {region}", threading.current_thread().name], fresh_for="1h")

        reading = asyncio.gather(prices("a"), prices.get("absent"))
        await asyncio.sleep(0)
        gate.set()
        price, absent = await reading
        assert (price, absent.found) == (Price("a", 1), False)
        assert await report(2026) == ["2026 eu", "stillfresh-loader"]
        with pytest.raises(LoadFailed, match="ValueError: none"):
            await report(2026, region="none")

    async def test_concurrency_says_how_many_threads(self, cache: Cache) -> None:
        """As many as loads may run at once, and they are used again."""
        running, most, lock = 0, 0, threading.Lock()

        @cache.cached("slow", fresh_for="1m", concurrency=3)
        def slow(number: int) -> int:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            threading.Event().wait(0.002)
            with lock:
                running -= 1
            return number

        assert await asyncio.gather(*(slow(number) for number in range(20))) == list(range(20))
        assert 1 <= most <= 3
        assert len(loader_threads()) <= 3
        await cache.close()
        assert loader_threads() == []

    async def test_a_hung_loader_keeps_its_thread(self, cache: Cache, sleeper: Sleeper) -> None:
        """Its callers get their time-out; others of the resource go on in the threads left, and
        wait for each other if these are too few."""
        gate, asked, slow = threading.Event(), threading.Event(), threading.Event()

        @cache.cached("hanging", fresh_for="1m", concurrency=2, lease_for="5s", load_timeout="5s")
        def hanging(key: str) -> str:
            if key == "hangs":
                asked.set()
                assert gate.wait(20)
            assert key not in "cd" or slow.wait(20)
            return key

        first = asyncio.create_task(hanging("hangs"))
        await asyncio.to_thread(asked.wait, 20)
        while not first.done():  # the store is asked to renew the lease in between
            await asyncio.sleep(0)
            sleeper.wake()
        with pytest.raises(LoadFailed, match="no answer within 5 s"):
            await first
        assert [await hanging(key) for key in "ab"] == ["a", "b"]
        both = asyncio.gather(hanging("c"), hanging("d"))
        await turns()
        assert len(loader_threads()) <= 2
        slow.set()
        assert [*await both] == ["c", "d"]
        gate.set()

    async def test_closing_ends_the_threads(self, cache: Cache) -> None:
        """E13: it waits for them; opened again, there are new ones."""

        @cache.cached("thread", fresh_for=0)
        def thread() -> str:
            return threading.current_thread().name

        for _ in range(2):
            await cache.open()
            await thread()
            assert len(loader_threads()) == 1
            await cache.close()
            assert loader_threads() == []

    async def test_a_def_loader_works_inside_bypassed(self, cache: Cache) -> None:
        """E22: every read runs the function, and no thread is left over."""
        calls: list[int] = []

        @cache.cached("counted", fresh_for="1m")
        def counted() -> int:
            calls.append(1)
            return len(calls)

        with cache.bypassed():
            assert [await counted(), await counted()] == [1, 2]
        assert loader_threads() == []

    async def test_a_loader_reads_the_cache_through_its_thread(self, cache: Cache) -> None:
        """`from_thread`: a load inside a load, with `concurrency` 1; a circle is told."""

        @cache.cached("sum_to", fresh_for="1m", concurrency=1)
        def sum_to(number: int) -> int:
            inner: int = cache.from_thread(sum_to, number - 1) if number else 0
            return number + inner

        assert await sum_to(4) == 10

        @cache.cached("circle", fresh_for="1m")
        def circle(number: int) -> int:
            answer: Answer[int] = cache.from_thread(circle.get, number)
            return answer.value

        with pytest.raises(LoadFailed, match="in a circle"):
            await circle(1)
