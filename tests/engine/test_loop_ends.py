"""E21: whatever is under way when an event loop ends, the next one finds a cache that works."""

import asyncio
import subprocess
import sys
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace

from stillfresh import Cache, Stored
from stillfresh.stores import Capabilities, capabilities_by_protocol
from stillfresh.stores.contract import Ask, Grant, Put, PutResult
from stillfresh.stores.memory import MemoryStore
from tests.kit.engine import Price, Upstream, declare, turns
from tests.kit.held_store import SteppedStore

T = TypeVar("T")


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/cache.db"


class SlowToAnswer(MemoryStore):
    """Its answers are under way for a while, as over a network."""

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        grants = await super().acquire(kind, asks, lease_for)
        await asyncio.sleep(0.01)
        return grants


class FirstIsSlow(MemoryStore):
    """The first put of a price takes a while; later ones are quick."""

    asked = 0

    def capabilities(self) -> Capabilities:
        return replace(capabilities_by_protocol(self), inline=None)

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        self.asked += 1
        await asyncio.sleep(0.05 if self.asked == 1 else 0)
        return await super().put(kind, puts)


class TestE35Ends:
    def test_puts_that_the_end_of_the_loop_cancelled_do_nothing_later(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """S8: both are under way as the loop ends; the next loop finds neither of them."""
        cache = Cache(FirstIsSlow())
        prices = declare(cache, Upstream())
        puts = list[asyncio.Task[Stored]]()

        async def cut_off() -> None:
            await cache.open()
            puts.extend(asyncio.create_task(prices.put("a", Price("a", n))) for n in (7, 8))
            for _ in range(5):
                await asyncio.sleep(0)

        async def looked() -> Price:
            async with cache:
                return await prices("a")

        asyncio.run(cut_off())
        assert all(put.cancelled() for put in puts)
        assert asyncio.run(looked()) == Price("a", 1)
        assert caplog.messages == []


class TestE21Ends:
    def test_an_opening_that_was_cancelled_is_begun_anew(self, place: str) -> None:
        """Somebody cancels every task of the loop, and goes on."""
        cache = Cache(place)
        prices = declare(cache, Upstream())

        async def used() -> Price:
            reading = asyncio.create_task(prices("a"))
            await asyncio.sleep(0)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.wait([reading])
            price = await prices("a")
            await cache.close()
            return price

        assert asyncio.run(used()) == Price("a", 1)

    @pytest.mark.parametrize("turns", [0, 1, 2, 3])
    def test_a_closing_that_was_cut_off_is_made_good(self, place: str, turns: int) -> None:
        """The loop ends before it has begun, or while it is under way."""
        cache, closing = Cache(place), []
        prices = declare(cache, Upstream())

        async def cut_off() -> None:
            await prices("a")
            closing.append(asyncio.create_task(cache.close()))
            for _ in range(turns):
                await asyncio.sleep(0)

        async def again() -> Price:
            async with cache:
                return await prices("a")

        asyncio.run(cut_off())
        assert asyncio.run(again()) == Price("a", 1)

    def test_a_store_whose_closing_was_cut_off_is_closed_before_it_is_opened_again(self) -> None:
        """The end of the loop cancelled `close()` in the middle of the store's step."""
        store = SteppedStore(MemoryStore())
        cache = Cache(store)
        prices = declare(cache, Upstream())

        async def cut_off() -> None:
            await prices("a")
            await store.holding("close", cache.close())

        async def again() -> None:
            async with cache:
                await prices("a")

        asyncio.run(cut_off())
        store.gates.clear()
        asyncio.run(again())
        steps = [it for it in store.calls if it in {"open", "close"}]
        assert steps == ["open", "close", "close", "open", "close"]

    def test_a_generator_may_use_the_cache_as_the_loop_ends(self, place: str) -> None:
        """`asyncio.run` closes the user's generators and ours at the same time; the cache works
        there, and in the next run."""
        upstream, cache = Upstream(), Cache(place)
        prices, seen = declare(cache, upstream), []

        async def viewer() -> AsyncGenerator[int, None]:
            try:
                yield 1
            finally:
                await asyncio.sleep(0)  # ours has begun
                await prices.invalidate("a")
                seen.append(await prices("a"))

        left = []

        async def used() -> None:
            upstream.version += 1
            await prices("a")
            left.append(viewer())
            await anext(left[-1])

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            asyncio.run(used())
            asyncio.run(used())
            asyncio.run(cache.close())
        assert [it.version for it in seen] == [2, 3]

    def test_a_generator_that_opens_the_cache_waits_until_the_end_of_the_loop_has_closed_it(
        self,
    ) -> None:
        """The store is closed once, and not opened in the middle of that."""
        store = SteppedStore(MemoryStore())
        steps: list[str] = []

        async def noted(name: str, work: Callable[[], Awaitable[T]]) -> T:
            steps.append(name)
            if name == "close":
                await turns()
            result = await step(name, work)
            steps.append(f"{name}:done")
            return result

        step = store.step
        store.step = noted  # type: ignore[method-assign]
        prices = declare(Cache(store), Upstream())

        async def viewer() -> AsyncGenerator[int, None]:
            try:
                yield 1
            finally:
                while "close" not in steps:
                    await asyncio.sleep(0)
                await prices("a")

        left: list[AsyncGenerator[int, None]] = []

        async def used() -> None:
            await prices("a")
            left.append(viewer())
            await anext(left[-1])

        asyncio.run(used())
        ends = [name for name in steps if name.startswith(("open", "close"))]
        assert ends == ["open", "open:done", "close", "close:done", "open", "open:done"]

    @pytest.mark.parametrize("turns", [0, 1, 2, 20])
    def test_a_watch_that_was_never_left_holds_up_no_later_one(
        self, place: str, turns: int
    ) -> None:
        """Also if the loop ends before the cache is open."""
        cache = Cache(place)
        prices, watches = declare(cache, Upstream()), []

        async def entered() -> None:
            watches.append(prices.watch("a"))
            watches[-1].__enter__()
            for _ in range(turns):
                await asyncio.sleep(0)

        async def seen() -> object:
            with prices.watch("a") as watch:
                await prices.refresh("a")
                return (await anext(watch)).answer.value

        asyncio.run(entered())
        assert asyncio.run(asyncio.wait_for(seen(), 20)) == Price("a", 1)
        asyncio.run(cache.close())

    def test_a_lease_whose_grant_was_under_way_is_given_back(self) -> None:
        """The next run need not wait until it has run out."""
        cache = Cache(SlowToAnswer())
        prices = declare(cache, Upstream(), lease_for="1h", load_timeout="1h")

        async def cut_off() -> None:
            reading = asyncio.create_task(prices("a"))
            while not (await cache.stats()).store.leases:  # type: ignore[union-attr]
                await asyncio.sleep(0)
            assert not reading.done()

        asyncio.run(cut_off())
        assert asyncio.run(asyncio.wait_for(prices("a"), 20)) == Price("a", 1)
        asyncio.run(cache.close())

    def test_a_fork_after_a_loop_that_left_its_store_open_is_refused(self, tmp_path: Path) -> None:
        """`loop.close()` alone: the store's thread is the parent's, and the child cannot wait."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LEFT_OPEN, f"sqlite:///{tmp_path}/cache.db"],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        sentence = "this cache was open when the process forked; make a new Cache in the child"
        assert done.stdout.startswith(sentence), done.stderr


LEFT_OPEN = """
import asyncio, os, signal, sys
from stillfresh import Cache

cache = Cache(sys.argv[1])

@cache.batched("price", fresh_for=60)
async def prices(skus: list[str]) -> dict[str, int]:
    return dict.fromkeys(skus, 1)

loop = asyncio.new_event_loop()
loop.run_until_complete(prices("a"))
for task in asyncio.all_tasks(loop):
    task.cancel()
loop.run_until_complete(asyncio.sleep(0))
loop.close()
if (pid := os.fork()) == 0:
    signal.alarm(10)
    try:
        asyncio.run(prices("a"))
    except Exception as exc:
        print(exc, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
asyncio.run(prices("a"))
asyncio.run(cache.close())
"""
