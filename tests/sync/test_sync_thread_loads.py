"""E20, E39, S14: a thread that waits for a load runs all of it, without the loop thread.

It asks for the lease, calls the loader and publishes, in that order, and gives the loop's turn away
while it waits. `memory://` and a Redis server are such stores.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from stillfresh import LoadFailed, NotOpen, StillfreshError, StoreError, SyncCache
from stillfresh.stores.redis import threads as redis_threads
from stillfresh.stores.redis.replies import packed
from stillfresh.sync.loop_thread import PROCESS, LoopThread
from stillfresh.turns import TICK, SharedLoop
from tests.kit.engine import Price
from tests.kit.proxies.flaky import FlakyProxy
from tests.kit.servers.valkey import HOST, Server, binary_of, serving
from tests.kit.sync import Calling, PlainUpstream, SyncPrices, declare, held, until
from tests.sync.conftest import place

NOTE: ContextVar[str] = ContextVar("note", default="nothing")

address = pytest.fixture(params=["memory", "redis"])(place)


class Interruption(BaseException):
    """Neither an Exception nor one that asyncio knows, as gevent's Timeout and GreenletExit."""


def interruptions() -> list[BaseException]:
    return [KeyboardInterrupt(), SystemExit(3), Interruption()]


@pytest.fixture
def without_loop(cache: SyncCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The loop thread is asked for nothing."""

    def run(*_: object) -> None:
        raise AssertionError("the loop thread was asked")

    cache.open()
    with monkeypatch.context() as patch:
        patch.setattr(LoopThread, "run", run)
        yield


class TestE20ThreadsLoad:
    def test_a_miss_stays_in_its_thread(
        self, without_loop: None, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """E39: one key, many keys, a loader of the caller, and a load after an invalidation."""
        assert prices("a") == Price("a", 1)
        assert set(prices.get_many(["a", "b", "c"])) == {"a", "b", "c"}
        own = prices.read("d", lambda: Price("d", 7))
        assert getattr(own, "value", None) == Price("d", 7)
        upstream.version = 2
        prices.invalidate("a")
        assert prices("a") == Price("a", 2)
        assert prices.refresh("b")["b"].value == Price("b", 2)
        assert upstream.loaded == [["a"], ["b", "c"], ["a"], ["b"]]
        assert set(upstream.threads) == {threading.current_thread().name}

    def test_a_failed_load_stays_in_its_thread(
        self, without_loop: None, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """E7: its key cools down, and the cause is the loader's."""
        upstream.error = ValueError("down")
        for _ in range(2):
            with pytest.raises(LoadFailed, match="ValueError: down") as info:
                prices("a")
            assert info.value.__cause__ is upstream.error
        assert upstream.loaded == [["a"]]

    def test_the_loads_of_other_keys_do_not_wait_for_a_slow_loader(
        self, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """E3: each thread runs its own, while the first one's loader holds no turn."""
        with held(upstream):
            slow = Calling(prices, "slow")
            assert upstream.asked.acquire(timeout=20)
            others = [Calling(prices, f"k{number}") for number in range(3)]
            for _ in others:
                assert upstream.asked.acquire(timeout=20)
        assert slow.result() == Price("slow", 1)
        assert [call.result().sku for call in others] == ["k0", "k1", "k2"]

    def test_a_loader_that_reads_keys_of_the_same_resource_gets_them(
        self, without_loop: None, cache: SyncCache
    ) -> None:
        """E3: with `concurrency` 1 as well, and the inner load is in the same thread."""

        @cache.cached("sum_to", fresh_for="1m", concurrency=1)
        def sum_to(number: int) -> int:
            return number + sum_to(number - 1) if number else 0

        assert sum_to(4) == 10

    def test_a_thread_runs_its_loads_one_after_another(
        self, without_loop: None, cache: SyncCache
    ) -> None:
        """E20: so a later one may read the key of an earlier one."""

        @cache.batched("linked", fresh_for="1m", max_batch=1, concurrency=2)
        def linked(keys: list[int]) -> dict[int, int]:
            return {key: 5 if key == 0 else linked(0) + 1 for key in keys}

        answers = linked.get_many([0, 1])
        assert (answers[0].value, answers[1].value) == (5, 6)

    def test_a_key_of_an_interrupted_thread_is_loaded_by_another_that_waits(
        self, cache: SyncCache
    ) -> None:
        """E3: its second key is not lost with it."""
        asked = threading.Semaphore(0)
        gate = threading.Event()

        @cache.batched("slow", fresh_for="1m", max_batch=1, concurrency=1)
        def slow(keys: list[str]) -> dict[str, str]:
            asked.release()
            name = threading.current_thread().name
            if name == "one":
                assert gate.wait(20)
                raise KeyboardInterrupt
            return dict.fromkeys(keys, name)

        one = Calling(slow.get_many, ["a", "b"], name="one")
        assert asked.acquire(timeout=20)
        other = Calling(slow, "b", name="other")
        until(lambda: cache.stats().resources["slow"].coalesced == 1)
        gate.set()
        with pytest.raises(KeyboardInterrupt):
            one.result()
        assert other.result() == "other"

    def test_a_read_of_another_thread_waits_for_a_change_of_its_key(
        self, prices: SyncPrices
    ) -> None:
        """E36: only the thread that is inside its own `changing` is told that it cannot load."""
        with prices.changing("a") as change:
            other = Calling(prices, "a")
            until(lambda: "a" in prices._resource.core.loads.under_way)
            with pytest.raises(LoadFailed, match=r"inside its own changing\(\)"):
                prices("a")
            assert not other.is_over
            assert change.put(Price("a", 7)).stored
        assert other.result() == Price("a", 7)

    def test_what_a_loader_sets_in_its_context_stays_set(self, cache: SyncCache) -> None:
        """E3: as if the function had been called without a cache."""

        @cache.cached("noted", fresh_for="1m")
        def noted(key: str) -> str:
            before = NOTE.get()
            NOTE.set(f"loaded {key}")
            return before

        token = NOTE.set("mine")
        try:
            assert noted("a") == "mine"
            assert NOTE.get() == "loaded a"
        finally:
            NOTE.reset(token)

    def test_closing_does_not_wait_for_a_loader_in_a_thread(
        self,
        address: str,
        cache: SyncCache,
        prices: SyncPrices,
        upstream: PlainUpstream,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """E13: its lease is given back, and its caller learns that the cache was closed."""
        with held(upstream):
            call = Calling(prices, "a")
            assert upstream.asked.acquire(timeout=20)
            cache.close()
            upstream.gate, gate = None, upstream.gate
            with SyncCache(address) as other:
                assert declare(other, upstream)("a") == Price("a", 1)
            assert not call.is_over
            upstream.gate = gate
        with pytest.raises((LoadFailed, NotOpen), match="closed"):
            call.result()
        with cache:
            assert prices("a") == Price("a", 1)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


class TestE20ThreadsAreInterrupted:
    @pytest.mark.parametrize("error", interruptions(), ids=lambda error: type(error).__name__)
    def test_the_thread_gets_what_its_loader_raised_and_others_an_error(
        self, cache: SyncCache, prices: SyncPrices, upstream: PlainUpstream, error: BaseException
    ) -> None:
        """E20, E25: no cooldown begins, the lease is given back, and the next read loads."""
        upstream.error = error
        with held(upstream):
            one = Calling(prices, "a")
            assert upstream.asked.acquire(timeout=20)
            other = Calling(prices, "a")
            until(lambda: cache.stats().resources["price"].coalesced == 1)
        with pytest.raises(type(error)):
            one.result()
        with pytest.raises(LoadFailed, match=f"was interrupted: {type(error).__name__}"):
            other.result()
        upstream.error = None
        assert prices("a") == Price("a", 1)

    def test_an_interrupted_thread_begins_no_more_loads(self, cache: SyncCache) -> None:
        """Its other batches go to the pool, if somebody else waits for them."""
        loaded: list[str] = []

        @cache.batched("single", fresh_for="1m", max_batch=1)
        def single(keys: list[str]) -> dict[str, int]:
            loaded.extend(keys)
            raise Interruption

        with pytest.raises(Interruption):
            single.get_many(["a", "b", "c"])
        assert loaded == ["a"]


class TestS2InterruptedExchanges:
    @pytest.mark.parametrize("error", interruptions(), ids=lambda error: type(error).__name__)
    @pytest.mark.parametrize("at", ["request", "reply"])
    @pytest.mark.parametrize("step", range(6))
    def test_no_connection_with_half_an_answer_is_used_again(
        self,
        valkey: Server,
        monkeypatch: pytest.MonkeyPatch,
        error: BaseException,
        at: str,
        step: int,
    ) -> None:
        """S2: whatever ends an exchange of any step, later calls get the replies of their own.

        The steps are a read, ACQUIRE and PUBLISH of a miss, a put, an update's read and its put.
        """
        exchanges = 0
        exchange = redis_threads.exchange

        def interrupted(connection: Any, commands: Any) -> list[Any]:
            nonlocal exchanges
            exchanges += 1
            if exchanges != step + 1:
                return exchange(connection, commands)
            if at == "reply":
                connection.send_packed_command([packed(commands)])
            raise error

        with SyncCache(valkey.url()) as cache:
            numbers: list[int] = []

            @cache.cached("number", fresh_for="1m", lease_for="300ms")
            def number(key: str) -> int:
                numbers.append(len(numbers))
                return len(numbers)

            def add_one(answer: Any) -> int:
                return int(answer.value) + 1 if answer else 1

            calls: list[Callable[[], object]] = [
                lambda: number("a"),
                lambda: number.of("b").put(10),
                lambda: number.of("b").update(add_one),
            ]
            number("warm")  # a connection is open, and the scripts are known
            monkeypatch.setattr("stillfresh.stores.redis.link.exchange", interrupted)
            raised = 0
            for call in calls:
                try:
                    call()
                except type(error):
                    raised += 1
            assert raised == 1
            monkeypatch.undo()
            assert number("warm") == 1
            number.of("b").put(20)
            assert number("b") == 20
            assert number("a") >= 2  # a lease that is left behind ends, or is recognised
            number.of("a").put(30)
            assert (number("a"), number("b"), number("warm")) == (30, 20, 1)


class TestS8LostReplies:
    async def test_a_lost_reply_in_a_load_of_a_thread_is_settled(self, valkey: Server) -> None:
        """S2: the lease is recognised, the publication is found, and the loader ran once each."""
        async with FlakyProxy(HOST, valkey.port) as proxy:
            url = valkey.url().replace(f":{valkey.port}/", f":{proxy.port}/")
            upstream = PlainUpstream()
            cache = SyncCache(url)
            await asyncio.to_thread(cache.open)
            try:
                prices = declare(cache, upstream)
                await asyncio.to_thread(prices, "warm")
                for lost in range(1, 3):
                    proxy.lose("replies", to=b"EVALSHA", times=1)
                    key = f"k{lost}"
                    assert await asyncio.to_thread(prices, key) == Price(key, 1)
                    assert await asyncio.to_thread(prices, key) == Price(key, 1)
                    assert proxy.lost == lost
                assert upstream.loaded == [["warm"], ["k1"], ["k2"]]
            finally:
                await asyncio.to_thread(cache.close)

    def test_a_server_that_hangs_in_the_middle_of_a_load_ends_at_its_time_out(
        self, tmp_path: Path
    ) -> None:
        """E29: the thread gets the loader's value, and no hang."""
        binary = binary_of("valkey")
        assert binary is not None
        with (
            serving(binary, tmp_path) as server,
            SyncCache(server.url(timeout="500ms")) as cache,
        ):
            upstream = PlainUpstream()
            prices = declare(cache, upstream)
            with held(upstream):
                call = Calling(prices, "a")
                assert upstream.asked.acquire(timeout=20)
                server.pause()
            try:
                assert call.result() == Price("a", 1)
                with pytest.raises(StoreError):
                    prices.put("a", Price("a", 2))
            finally:
                server.go_on()


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
class TestE20LoadersFork:
    def test_a_child_of_a_loader_sends_nothing_on_its_parents_connection(
        self, cache: SyncCache, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """S2: it holds the parent's lease and connection; only the parent goes on."""
        reading, writing = os.pipe()
        child = 0

        @cache.cached("forking", fresh_for="1m")
        def forking(key: str) -> str:
            nonlocal child
            child = os.fork()
            return key

        prices("a")  # a connection is open
        try:
            text = forking("k")
        except StillfreshError as exc:
            text = str(exc)
        if child == 0:
            os.write(writing, text.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            assert pipe.read().startswith("the process forked while this thread used the cache")
        os.waitpid(child, 0)
        assert text == "k"
        assert forking("k") == "k"
        assert prices.refresh("a")["a"].value == Price("a", 1)


class TestE20LoopsLookAtTimers:
    @pytest.fixture
    def loop(self) -> Iterator[SharedLoop]:
        with SyncCache("memory://"):
            assert PROCESS.loop is not None
            yield PROCESS.loop._loop

    def test_a_timer_of_a_thread_is_seen_although_it_wakes_nobody(self, loop: SharedLoop) -> None:
        """The first one wakes the loop; the others are seen when it looks."""
        rung = threading.Semaphore(0)
        with loop.borrowed():
            for delay in (TICK, 2 * TICK, 5 * TICK, TICK / 4):
                loop.call_later(delay, rung.release)
        for _ in range(4):
            assert rung.acquire(timeout=20)
        with loop.borrowed():
            loop.call_later(TICK, rung.release)
        assert rung.acquire(timeout=20)


class TestE20LoopsEnd:
    def test_a_loop_ends_without_an_error_when_python_starts_no_more_threads(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Python 3.12, while it exits; asyncio wants one if it has looked up a host's name."""
        loop = SharedLoop()
        loop.turn.take()

        async def look_up() -> None:
            await loop.run_in_executor(None, int)

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        try:
            loop.run_until_complete(look_up())
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()
            loop.turn.give()
