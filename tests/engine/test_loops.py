"""E21: event loops come and go; and a forked child is told to open a cache of its own."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stillfresh import Cache, Origin, StillfreshError, Watch
from stillfresh.stores.memory import MemoryStore
from tests.kit.engine import Price, Upstream, declare, turns
from tests.kit.held_store import SteppedStore
from tests.kit.servers.valkey import Server

if TYPE_CHECKING:
    from tests.kit.servers.aws import Aws

Read = Callable[[], Awaitable[object]]


@pytest.fixture(params=["memory", "sqlite", "redis", "dynamodb"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Every store."""
    match request.param:
        case "memory":
            return "memory://"
        case "sqlite":
            return f"sqlite:///{tmp_path}/cache.db"
        case "redis":
            server: Server = request.getfixturevalue("valkey")
            return server.url()
        case _:
            aws: Aws = request.getfixturevalue("aws")
            return aws.address(aws.new_table())


def writers() -> list[threading.Thread]:
    return [it for it in threading.enumerate() if it.name == "stillfresh-sqlite"]


async def tasks_left() -> int:
    return len(asyncio.all_tasks()) - 1


class TestE21Loops:
    def test_each_run_opens_it_again(self, place: str) -> None:
        """`asyncio.run` twice, nobody closes it: every run reads, loads, invalidates; nothing of a
        run is left after it, and what was stored is there in the next one."""
        before = len(writers())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            upstream, cache = Upstream(), Cache(place)
            prices = declare(cache, upstream)
            assert asyncio.run(prices("a")) == Price("a", 1)
            assert len(writers()) == before

            async def again() -> Origin:
                return (await prices.get("a")).origin

            assert asyncio.run(again()) in {Origin.STORE, Origin.MEMORY}
            upstream.version = 2
            asyncio.run(prices.invalidate("a"))
            assert asyncio.run(prices("a")) == Price("a", 2)
            asyncio.run(cache.close())
            gc.collect()
        assert len(writers()) == before
        assert upstream.calls == [["a"]] * 2

    def test_a_load_that_the_end_of_the_loop_cut_off_is_begun_anew(self, place: str) -> None:
        """Its lease was given back: the next run does not wait for it."""
        upstream, cache = Upstream(), Cache(place)
        prices = declare(cache, upstream, lease_for="1h", load_timeout="1h")

        async def cut_off() -> None:
            upstream.asked, upstream.gate = asyncio.Event(), asyncio.Event()
            reading = asyncio.create_task(prices("a"))
            await upstream.asked.wait()
            reading.cancel()

        asyncio.run(cut_off())
        upstream.asked, upstream.gate = asyncio.Event(), None
        assert asyncio.run(asyncio.wait_for(prices("a"), 20)) == Price("a", 1)
        asyncio.run(cache.close())

    @pytest.mark.parametrize("name", ["memory", "sqlite"])
    def test_a_loop_that_was_closed_without_a_word_is_left_behind(
        self, tmp_path: Path, name: str
    ) -> None:
        """`loop.close()` alone, with a watch open and a load under way."""
        address = "memory://" if name == "memory" else f"sqlite:///{tmp_path}/cache.db"
        before = len(writers())
        upstream, cache = Upstream(), Cache(address)
        prices = declare(cache, upstream)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(prices("a"))
        watch = prices.watch("a")

        async def enter() -> None:
            watch.__enter__()
            await asyncio.sleep(0)

        loop.run_until_complete(enter())
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's complaint
        loop.close()

        async def used() -> tuple[Price, int]:
            with prices.watch("a"):
                return await prices("a"), len(writers())

        price, count = asyncio.run(used())
        assert price == Price("a", 1)
        assert count == before + (name == "sqlite")
        assert len(writers()) == before
        asyncio.run(cache.close())

    @pytest.mark.filterwarnings("ignore:.*was destroyed but it is pending")
    def test_a_watch_that_a_closed_loop_left_open_is_collected_quietly(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its pause ends when nobody can run anything on that loop any more."""
        complaints: list[object] = []
        watches: list[Watch[str, Price]] = []
        monkeypatch.setattr(sys, "unraisablehook", complaints.append)

        async def begin() -> None:
            prices = declare(Cache("memory://"), Upstream(), fresh_for=60)
            watches.append(prices.watch("a"))
            watches[0].__enter__()
            await prices.get("a")
            await turns()

        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        loop.close()
        del loop
        watches.clear()
        gc.collect()
        assert complaints == []

    @pytest.mark.filterwarnings("ignore:.*was destroyed but it is pending")
    @pytest.mark.parametrize("step", ["loader", "acquire", "publish", "put"])
    def test_a_load_or_put_that_a_closed_loop_left_unfinished_is_collected_quietly(
        self, step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It does nothing more: nobody waits, and nothing can run on that loop."""
        complaints: list[object] = []
        monkeypatch.setattr(sys, "unraisablehook", complaints.append)
        store = SteppedStore(MemoryStore())

        async def begin() -> None:
            upstream = Upstream()
            prices = declare(Cache(store), upstream)

            def work() -> Coroutine[Any, Any, object]:
                return prices.put("a", Price("a", 1)) if step == "put" else prices.get("a")

            if step == "loader":
                await upstream.holding(work())
            else:
                await store.holding(step, work())
            behind = asyncio.create_task(work())
            await turns()
            assert not behind.done()

        loop = asyncio.new_event_loop()
        loop.run_until_complete(asyncio.wait_for(begin(), 5))
        loop.close()
        del loop
        store.gates.clear()
        gc.collect()
        left = [record for record in caplog.records if record.name.startswith("stillfresh")]
        assert (complaints, left) == ([], [])

    def test_each_opening_of_a_store_is_closed_once(self) -> None:
        """By the end of the loop, or by hand; a store that was closed is not closed again."""
        store = SteppedStore(MemoryStore())
        cache = Cache(store)
        prices = declare(cache, Upstream())

        async def by_hand() -> None:
            async with cache:
                await prices("a")

        async def opened_again() -> None:
            await by_hand()
            await cache.open()

        asyncio.run(prices("a"))
        asyncio.run(by_hand())
        asyncio.run(opened_again())
        asyncio.run(prices("a"))
        steps = [it for it in store.calls if it in {"open", "close"}]
        assert steps == ["open", "close"] * 5

    def test_a_store_that_a_closed_loop_left_open_is_closed_once(self) -> None:
        """By the next loop, before it opens the store again, or by `close()`."""
        store = SteppedStore(MemoryStore())
        cache = Cache(store)
        prices = declare(cache, Upstream())

        def left() -> None:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(prices("a"))
            for task in asyncio.all_tasks(loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            loop.close()

        left()
        asyncio.run(prices("a"))
        left()
        for _ in range(2):
            asyncio.run(cache.close())
        steps = [it for it in store.calls if it in {"open", "close"}]
        assert steps == ["open", "close"] * 3

    def test_an_explicit_close_stays_closed(self, place: str) -> None:
        """E13: only a loop that ended is followed by another one; `close()` means it."""
        cache = Cache(place)
        prices = declare(cache, Upstream())

        async def closed() -> None:
            async with cache:
                await prices("a")

        asyncio.run(closed())
        with pytest.raises(StillfreshError, match="closed"):
            asyncio.run(prices.get("a"))
        asyncio.run(closed())

    def test_while_the_first_loop_is_alive_another_is_told_what_to_do(self) -> None:
        """Whatever it asks for."""
        cache = Cache("memory://")
        prices = declare(cache, Upstream())
        first = asyncio.new_event_loop()
        first.run_until_complete(prices("a"))

        async def said(read: Read) -> None:
            with pytest.raises(StillfreshError, match=r"another event loop.*from_thread"):
                await read()

        for read in (
            lambda: prices.refresh("a"),
            lambda: prices.get("b"),
            lambda: prices.invalidate("a"),
            lambda: prices.explain("a"),
            lambda: cache.invalidate_tag("shop"),
            cache.stats,
            cache.entries,
            cache.evict,
            cache.open,
            cache.close,
        ):
            asyncio.run(said(read))
        first.run_until_complete(cache.close())
        first.close()

    async def test_closing_leaves_no_generator_behind(self) -> None:
        """What waits for the end of the loop ends with the cache."""
        before = await tasks_left()
        async with Cache("memory://") as cache:
            await cache.stats()
        assert await tasks_left() == before


FORKS = """
import asyncio, os, sys, threading, warnings
from stillfresh import Cache

warnings.simplefilter("ignore")
cache = Cache(sys.argv[1])

@cache.batched("price", fresh_for=60)
async def prices(skus: list[str]) -> dict[str, int]:
    return dict.fromkeys(skus, 1)

async def child() -> None:
    async def watched():
        with prices.watch("a"):
            pass
    calls = [
        lambda: prices("a"), lambda: prices.get_many(["a"]), lambda: prices.refresh("a"),
        lambda: prices.invalidate("a"), lambda: prices.explain("a"), cache.stats, watched,
        cache.open, cache.close, lambda: asyncio.to_thread(cache.from_thread, prices, "a"),
    ]
    for call in calls:
        try:
            await asyncio.wait_for(call(), 60)
            print("no error")
        except Exception as exc:
            print(type(exc).__name__, str(exc))
    print("counted", cache.counts().resources["price"].loads)
    own = Cache(sys.argv[1])

    @own.batched("price", fresh_for=60)
    async def ours(skus: list[str]) -> dict[str, int]:
        return dict.fromkeys(skus, 2)

    async with own:
        print("own", await ours("b"))

async def main() -> None:
    assert await prices("a") == 1
    if (pid := os.fork()) == 0:
        code = 1
        try:
            thread = threading.Thread(target=asyncio.run, args=[child()])
            thread.start()
            thread.join()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    assert await asyncio.to_thread(os.waitpid, pid, 0) == (pid, 0)
    assert await prices("a") == 1
    await prices.invalidate("a")
    assert await prices("a") == 1
    await cache.close()

async def twice() -> None:
    if (pid := os.fork()) == 0:
        try:
            asyncio.run(prices("c"))
            print("closed before: used")
        finally:
            sys.stdout.flush()
            os._exit(0)
    await asyncio.to_thread(os.waitpid, pid, 0)

asyncio.run(main())
asyncio.run(cache.open())
asyncio.run(twice())
"""


@pytest.mark.parametrize("name", ["memory", "sqlite", "redis"])
class TestE21Forks:
    def test_a_forked_child_is_told_to_open_a_cache_of_its_own(
        self, request: pytest.FixtureRequest, tmp_path: Path, name: str
    ) -> None:
        """Whatever it asks of the parent's open cache; its own works, and so does the parent's. One
        that is not open at the fork can be used by both."""
        address = "memory://" if name == "memory" else f"sqlite:///{tmp_path}/cache.db"
        if name == "redis":
            address = request.getfixturevalue("valkey").url()
        done = subprocess.run(
            [sys.executable, "-c", FORKS, address],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        assert done.returncode == 0, done.stderr
        *refused, counted, own, used = done.stdout.splitlines()
        sentence = "open when the process forked; make a new Cache in the child process"
        assert set(refused) == {f"StillfreshError this cache was {sentence}"}
        assert len(refused) == 10
        assert counted == "counted 1"
        assert own == "own 2"
        assert used == "closed before: used"
