"""E20: which thread runs a load, and what the others see of it."""

import _thread
import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stillfresh import LoadFailed, NotOpen, SyncCache, Verdict
from stillfresh.stores import Capabilities, MemoryStore, WrappedStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Price
from tests.kit.sync import Calling, PlainUpstream, SyncPrices, declare, held, until

REQUEST: ContextVar[str] = ContextVar("request", default="none")


def loading(cache: SyncCache) -> int:
    return sum(it.loading for it in cache.stats().resources.values())


class LoopStore(WrappedStore):
    """A store that only the loop thread can ask, such as a cluster."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), inline=None, threads=None, waits_in_threads=False)


@pytest.fixture
def on_the_loop() -> Iterator[SyncCache]:
    """A cache whose loads run on the loop thread, which asks threads for their loaders."""
    with SyncCache(LoopStore(MemoryStore())) as cache:
        yield cache


class TestE20CallersRunTheirLoads:
    def test_a_load_runs_where_the_function_would(self, cache: SyncCache) -> None:
        """In the caller's thread, with its thread locals and its context variables."""
        own = threading.local()
        own.name = "mine"

        @cache.cached("seen", fresh_for="1m")
        def seen(key: str) -> list[str]:
            return [threading.current_thread().name, own.name, REQUEST.get()]

        token = REQUEST.set("r1")
        assert seen("a") == ["MainThread", "mine", "r1"]
        REQUEST.reset(token)

    def test_many_threads_share_one_load(
        self, cache: SyncCache, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """One of those that wait runs it, and all get the value."""
        with held(upstream):
            calls = [Calling(prices, "a", name=f"caller-{n}") for n in range(8)]
            until(lambda: cache.stats().resources["price"].coalesced == 7)
        assert [call.result() for call in calls] == [Price("a", 1)] * 8
        assert len(upstream.calls) == 1
        assert upstream.threads[0].startswith("caller-")

    def test_one_thread_loads_the_keys_of_many(
        self, cache: SyncCache, upstream: PlainUpstream
    ) -> None:
        """Keys that wait for their turn become one batch, which one of the threads runs."""
        prices = declare(cache, upstream, concurrency=1)
        with held(upstream):
            first = Calling(prices, "first")
            assert upstream.asked.acquire(timeout=20)
            others = [Calling(prices, f"k{n}", name=f"caller-{n}") for n in range(3)]
            until(lambda: loading(cache) == 4)
        assert {call.result().sku for call in [first, *others]} == {"first", "k0", "k1", "k2"}
        assert [sorted(skus) for skus in upstream.loaded] == [["first"], ["k0", "k1", "k2"]]
        assert upstream.threads[1] in {"caller-0", "caller-1", "caller-2"}

    def test_the_batches_of_one_caller_run_in_its_thread(
        self, cache: SyncCache, upstream: PlainUpstream
    ) -> None:
        """One after another, whatever `concurrency` allows."""
        prices = declare(cache, upstream, max_batch=2, concurrency=4)
        assert len(prices.get_many([f"k{n}" for n in range(7)])) == 7
        assert upstream.threads == ["MainThread"] * 4

    def test_a_load_goes_to_a_waiting_thread_that_runs_no_other(self, cache: SyncCache) -> None:
        """Of two threads that wait for one key, the first is busy with another load."""
        gates = {name: threading.Event() for name in ("first", "place")}
        began = {name: threading.Event() for name in ("first", "place")}
        threads: dict[str, str] = {}

        @cache.batched("price", fresh_for=60, max_batch=1, concurrency=2)
        def prices(skus: list[str]) -> dict[str, int]:
            (sku,) = skus
            threads[sku] = threading.current_thread().name
            if sku in gates:
                began[sku].set()
                assert gates[sku].wait(20)
            return {sku: 1}

        place = Calling(prices, "place", name="holds a place")
        assert began["place"].wait(20)
        busy = Calling(prices.get_many, ["first", "second"], name="busy")
        assert began["first"].wait(20)
        idle = Calling(prices, "second", name="idle")
        until(lambda: cache.stats().resources["price"].coalesced == 1)
        gates["place"].set()
        assert idle.result() == 1
        gates["first"].set()
        assert len(busy.result()) == 2
        place.result()
        assert threads == {"place": "holds a place", "first": "busy", "second": "idle"}

    def test_the_pool_takes_the_load_of_a_thread_that_left(self, on_the_loop: SyncCache) -> None:
        """It was interrupted before it came to it; another caller gets the value."""
        cache = on_the_loop
        asked, gate = threading.Semaphore(0), threading.Event()

        @cache.batched("slow", fresh_for="1m", max_batch=1)
        def slow(keys: list[str]) -> dict[str, str]:
            asked.release()
            if (name := threading.current_thread().name) == "one":
                assert gate.wait(20)
                raise KeyboardInterrupt
            return dict.fromkeys(keys, name)

        one = Calling(slow.get_many, ["a", "b"], name="one")
        assert asked.acquire(timeout=20)
        others = [Calling(slow, key, name="other") for key in "ab"]
        until(lambda: cache.stats().resources["slow"].coalesced == 2)
        gate.set()
        with pytest.raises(KeyboardInterrupt):
            one.result()
        with pytest.raises(LoadFailed, match="was interrupted"):
            others[0].result()
        assert others[1].result() == "stillfresh-loader"


class TestE20Errors:
    def test_an_exception_fails_the_load_for_all(
        self, cache: SyncCache, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """Each caller gets its own LoadFailed from the one cause."""
        upstream.error = ValueError("down")
        with held(upstream):
            calls = [Calling(prices, "a") for _ in range(3)]
            until(lambda: cache.stats().resources["price"].coalesced == 2)
        errors = []
        for call in calls:
            with pytest.raises(LoadFailed, match="ValueError: down") as info:
                call.result()
            errors.append(info.value)
        assert len({id(error) for error in errors}) == 3
        assert {error.__cause__ for error in errors} == {upstream.error}

    def test_a_stop_iteration_is_only_an_error(
        self, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """E25: no future takes it as its exception, and no coroutine raises it as it is (E30)."""
        upstream.error = StopIteration()
        with pytest.raises(LoadFailed, match="loading failed: StopIteration") as failed:
            prices("a")
        assert failed.value.__cause__ is upstream.error

    def test_every_waiting_thread_gets_a_stop_iteration_as_the_cause(
        self, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """E30: the function of one thread raises it, another thread waits."""
        upstream.error = StopIteration()
        with held(upstream):
            one = Calling(prices, "a")
            assert upstream.asked.acquire(timeout=20)
            other = Calling(prices, "a")
        for calling in (one, other):
            with pytest.raises(LoadFailed) as failed:
                calling.result()
            assert failed.value.__cause__ is upstream.error

    def test_the_others_get_their_time_out_in_time(
        self, cache: SyncCache, upstream: PlainUpstream
    ) -> None:
        """The function does not return; who runs it gets the same error when it does."""
        prices = declare(cache, upstream, load_timeout="50ms")
        with held(upstream):
            one = Calling(prices, "a")
            assert upstream.asked.acquire(timeout=20)
            other = Calling(prices, "a")
            with pytest.raises(LoadFailed, match=r"no answer within 0.05 s \(load_timeout\)"):
                other.result()
            assert not one.is_over
        with pytest.raises(LoadFailed, match="no answer within"):
            one.result()

    def test_each_hanging_loader_has_its_time_out(
        self, cache: SyncCache, upstream: PlainUpstream
    ) -> None:
        """One timer looks for all threads, also for loaders that begin after its look."""
        prices = declare(cache, upstream, load_timeout="50ms")
        loading: list[Calling] = []
        with held(upstream):
            for sku in ("a", "b", "c"):
                loading.append(Calling(prices, sku))
                assert upstream.asked.acquire(timeout=20)
                with pytest.raises(LoadFailed, match=r"no answer within 0.05 s \(load_timeout\)"):
                    Calling(prices, sku).result()
            assert not any(call.is_over for call in loading)
        for call in loading:
            with pytest.raises(LoadFailed, match="no answer within"):
                call.result()

    @pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
    def test_a_caller_that_is_interrupted_takes_nobody_along(
        self, cache: SyncCache, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """Ctrl-C while it waits for another thread's load: that goes on."""

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with held(upstream):
                other = Calling(prices, "a")
                assert upstream.asked.acquire(timeout=20)
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                with pytest.raises(KeyboardInterrupt):
                    prices("a")
        finally:
            signal.signal(signal.SIGALRM, before)
        assert other.result() == prices("a") == Price("a", 1)


class TestE20LoadsInLoads:
    def test_a_loader_reads_another_key(self, cache: SyncCache) -> None:
        """In the same thread, with `concurrency` 1 and any depth."""

        @cache.cached("sum_to", fresh_for="1m", concurrency=1)
        def sum_to(number: int) -> int:
            return number + sum_to(number - 1) if number else 0

        assert sum_to(20) == 210

    def test_a_loader_that_reads_its_own_key_is_told(self, cache: SyncCache) -> None:
        """An error that says so, and no hang."""

        @cache.cached("circle", fresh_for="1m")
        def circle(number: int) -> int:
            return circle((number + 1) % 3)

        with pytest.raises(LoadFailed, match="its loader waits, in a circle, for itself"):
            circle(0)

    def test_a_load_waits_for_another_batch_of_its_caller(self, cache: SyncCache) -> None:
        """Both batches belong to one thread: the inner read runs the second one."""

        @cache.batched("linked", fresh_for="1m", max_batch=1, concurrency=2)
        def linked(keys: list[int]) -> dict[int, int]:
            return {key: linked(1) + 1 if key == 0 else 5 for key in keys}

        answers = linked.get_many([0, 1])
        assert [answers[key].value for key in (0, 1)] == [6, 5]

    def test_a_load_on_top_of_another_cannot_wait_for_it(self, on_the_loop: SyncCache) -> None:
        """A thread that waits inside a load runs its next one, which cannot ask for the first."""
        cache = on_the_loop
        asked, gate, began = threading.Event(), threading.Event(), threading.Event()

        @cache.cached("slow", fresh_for="1m")
        def slow(key: str) -> int:
            asked.set()
            assert gate.wait(20)
            return 5

        @cache.batched("linked", fresh_for="1m", max_batch=1, concurrency=2)
        def linked(keys: list[int]) -> dict[int, int]:
            if keys == [0]:
                return {0: slow("x")}
            began.set()
            return {1: linked(0)}

        other = Calling(slow, "x")
        assert asked.wait(20)
        both = Calling(linked.get_many, [0, 1])
        assert began.wait(20)
        until(lambda: cache.stats().resources["linked"].failed == 1)
        gate.set()
        answers = both.result()
        assert (other.result(), answers[0].value) == (5, 5)
        assert "in a circle" in str(answers[1].error)

    def test_threads_that_wait_for_each_other_are_told(self, cache: SyncCache) -> None:
        """A circle through two threads is found as well."""
        both = threading.Barrier(2)

        @cache.cached("mutual", fresh_for="1m", error_for=0)
        def mutual(number: int) -> int:
            both.wait(20)
            return mutual(1 - number)

        calls = [Calling(mutual, number) for number in range(2)]
        errors = 0
        for call in calls:
            with pytest.raises(LoadFailed, match="circle"):
                call.result()
            errors += 1
        assert errors == 2


class TestE13Closing:
    def test_a_loader_that_calls_the_cache_meanwhile_disturbs_nothing(
        self, cache: SyncCache, clock: ManualClock
    ) -> None:
        """It is told that the cache is closed; closing needs the loop on which it runs."""
        refreshing, told = threading.Event(), list[Exception]()

        @cache.cached("outer", fresh_for="1s", stale_for="1h")
        def outer(number: int) -> int:
            if refreshing.is_set():
                until(lambda: is_refused(number))
            return number

        @cache.cached("inner", fresh_for="1m")
        def inner(number: int) -> int:
            return number

        def is_refused(number: int) -> bool:
            try:
                inner(number)
            except (NotOpen, LoadFailed) as exc:  # a load may have begun before the cache closed
                told.append(exc)
            return bool(told)

        outer(1)
        clock.advance(1)
        refreshing.set()
        outer(1)
        until(lambda: cache.stats().resources["outer"].loading == 1)
        cache.close()
        until(lambda: len(told) == 1)
        assert "closed" in str(told[0])


class TestE20EventLoops:
    async def test_a_hit_is_answered_and_a_wait_is_warned_of(
        self, address: str, upstream: PlainUpstream
    ) -> None:
        """E34: inside a running loop a call blocks it, and says so once; a thread may wait."""
        cache = SyncCache(address)
        prices = declare(cache, upstream)
        with pytest.warns(RuntimeWarning, match=r"blocks the event loop.*use Cache in async") as it:
            assert prices("a") == Price("a", 1)
        assert it[0].filename == __file__
        assert await asyncio.to_thread(prices, "b") == Price("b", 1)
        assert prices("a") == Price("a", 1)
        await asyncio.to_thread(cache.close)

    def test_a_function_of_the_key_cannot_read_the_cache(self, cache: SyncCache) -> None:
        """`tags=` runs in the middle of the engine's work, which would wait for itself."""

        @cache.cached("tagged", fresh_for="1m", tags=lambda day: [str(tagged(day))])
        def tagged(day: str) -> str:
            return day

        with pytest.raises(LoadFailed, match=r"its tags= failed.*would hold the event loop"):
            tagged("a")


class TestE20Closing:
    def test_closing_ends_the_callers_and_the_threads(
        self, address: str, clock: ManualClock, upstream: PlainUpstream
    ) -> None:
        """A caller that waits is told, and no thread is left."""
        before = set(threading.enumerate())
        SyncCache(address).close()
        cache = SyncCache(address, clock=clock)
        prices = declare(cache, upstream)
        prices("stale")
        clock.advance(31)
        assert prices.get("stale").verdict is Verdict.STALE
        until(lambda: len(upstream.calls) == 2 and not loading(cache))
        with held(upstream):
            one = Calling(prices, "a")
            assert upstream.asked.acquire(timeout=20)
            other = Calling(prices, "a")
            until(lambda: cache.stats().resources["price"].coalesced >= 1)
            cache.close()
            with pytest.raises((LoadFailed, NotOpen), match="closed"):
                other.result()
        with pytest.raises((LoadFailed, NotOpen), match="closed"):
            one.result()
        assert set(threading.enumerate()) <= before

    def test_a_hung_loader_does_not_hold_close(self, upstream: PlainUpstream) -> None:
        """Closing waits for `grace`, says so, and leaves the daemon thread to itself."""
        clock = ManualClock(start=1_700_000_000.0)
        cache = SyncCache("memory://", clock=clock, grace="50ms")
        prices = declare(cache, upstream)
        prices("a")
        clock.advance(31)
        with held(upstream):
            prices("a")
            until(lambda: len(upstream.calls) == 2)
            cache.close()
            hung = [it for it in threading.enumerate() if it.name == "stillfresh-loader"]
            assert [it.daemon for it in hung] == [True]
        until(lambda: not hung[0].is_alive())


class TestE6HitUnderWay:
    @pytest.mark.parametrize("way", ["call", "get", "function", "known"])
    def test_what_is_invalidated_during_a_hit_is_not_served(self, way: str) -> None:
        """The reader has found the entry and looks at the clock when another thread invalidates."""
        version, now = 1, 1_700_000_000.0
        during: list[Callable[[], object]] = []

        def clock() -> float:
            if during and threading.current_thread() is threading.main_thread():
                Calling(during.pop()).result()
            return now

        with SyncCache("memory://", clock=clock) as cache:

            @cache.batched("number", fresh_for="1m")
            def numbers(keys: list[str]) -> dict[str, int]:
                return dict.fromkeys(keys, version)

            @cache.cached("one", fresh_for="1m")
            def one(key: str) -> int:
                return version

            reads: dict[str, Callable[[], object]] = {
                "call": lambda: numbers("a"),
                "get": lambda: numbers.get("a").value,
                "function": lambda: one("a"),
                "known": lambda: [it.value for it in numbers.known(["a"]).values()],
            }
            assert [numbers("a"), one("a"), one("a"), one("a")] == [1] * 4
            version = 2
            handle = one.of("a") if way == "function" else numbers.of("a")
            during.append(handle.invalidate)
            assert reads[way]() in (2, [])
            assert not during


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
class TestE6Threads:
    @pytest.mark.parametrize("place", ["memory", "sqlite", "memory_for"])
    def test_nobody_is_served_what_was_invalidated_before(
        self, place: str, tmp_path: Path, upstream: PlainUpstream
    ) -> None:
        """Once `invalidate` has returned in any thread, no thread sees the old value as fresh."""
        address = "memory://" if place == "memory" else f"sqlite:///{tmp_path}/cache.db"
        options: dict[str, Any] = {"memory_for": "1h"} if place == "memory_for" else {}
        floor, over, reads = 1, threading.Event(), [0] * 4

        def read(number: int, prices: SyncPrices) -> None:
            while not over.is_set():
                least = floor
                answer = prices.get("a")
                assert answer.value.version >= least, (answer, least)
                assert answer.found
                reads[number] += 1

        with SyncCache(address) as cache:
            prices = declare(cache, upstream, **options)
            readers = [Calling(read, number, prices) for number in range(4)]
            for version in range(2, 60):
                upstream.version = version
                prices.invalidate("a")
                floor = version
                least = sum(reads) + 8
                until(lambda least=least: sum(reads) >= least)  # type: ignore[misc]
            over.set()
            for reader in readers:
                reader.result()


class TestE12ThreadsCount:
    def test_every_read_of_every_thread_is_counted(
        self, cache: SyncCache, prices: SyncPrices
    ) -> None:
        """Also of threads that have ended, of which no trace is kept but their counts."""
        prices("a")

        def read_often() -> None:
            for _ in range(100):
                prices("a")

        for _ in range(5):
            threads = [threading.Thread(target=read_often) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        stats = cache.stats().resources["price"]
        assert stats.reads[Verdict.FRESH] == sum(stats.ages) == 1 + 5 * 8 * 100

    def test_counts_of_threads_that_have_ended_are_added_up(
        self, cache: SyncCache, prices: SyncPrices
    ) -> None:
        """E28: also of threads that Python's `threading` does not know, as a server's may be."""
        prices("a")
        for _ in range(200):
            ended = threading.Lock()
            ended.acquire()

            def read_once(ended: threading.Lock = ended) -> None:
                prices("a")
                ended.release()

            _thread.start_new_thread(read_once, ())
            ended.acquire()
        counts = cache.on_loop.cores["price"].memory.counts
        assert len(counts._threads) < 20
        assert cache.stats().resources["price"].reads[Verdict.FRESH] == 201
