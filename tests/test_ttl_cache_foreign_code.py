"""M5, M6, M7: keys, values and callbacks run code of their own, at the worst moments."""

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Thread
from typing import Any

import pytest

from stillfresh import TtlCache
from stillfresh.testing import ManualClock
from stillfresh.ttl_cache import _unlink


def order_is_whole(cache: TtlCache[Any, Any]) -> bool:
    """The ring holds just what the dict holds, the same in both directions."""
    forwards: list[object] = []
    backwards: list[object] = []
    for found, way in ((forwards, "newer"), (backwards, "older")):
        entry = getattr(cache._ring, way)
        while entry is not cache._ring:
            found.append(entry)
            entry = getattr(entry, way)
    return forwards == backwards[::-1] and set(map(id, forwards)) == set(
        map(id, cache._data.values())
    )


def test_m5_an_entry_is_taken_out_of_the_order_once() -> None:
    """However often it is met; it still leads on to the next."""
    cache = TtlCache[str, int](60)
    for key in "abc":
        cache.insert(key, 1)
    entry = cache._data["b"]
    for _ in range(2):
        _unlink(entry)
        assert entry.newer is cache._data["c"]
    del cache._data["b"]
    assert order_is_whole(cache)


class Key:
    """A key with a hash in Python, as a UUID, an Enum or a frozen dataclass has."""

    failing: "Key | None" = None

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        if Key.failing is self:
            Key.failing = None
            raise KeyboardInterrupt
        return hash(frozenset([self.number]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.number == other.number


class TestM5KeysThatRunCode:
    @pytest.mark.parametrize("which", range(3))
    @pytest.mark.parametrize("method", ["remove", "insert", "cleanup_expired"])
    def test_an_exception_in_the_hash_of_a_key_leaves_the_order_whole(
        self, which: int, method: str
    ) -> None:
        """Wherever it strikes, the call fails and the order stays whole."""
        clock = ManualClock()
        cache = TtlCache[Key, int](1, clock=clock)
        keys = [Key(number) for number in range(3)]
        for key in keys:
            cache.insert(key, key.number)
        clock.advance(1 if method == "cleanup_expired" else 0)
        Key.failing = keys[which]
        arguments = {"remove": (keys[1],), "insert": (keys[1], 5), "cleanup_expired": ()}[method]
        with suppress(KeyboardInterrupt):
            getattr(cache, method)(*arguments)
        Key.failing = None
        assert order_is_whole(cache)
        clock.advance(1)
        cache.cleanup_expired()
        assert (len(cache), cache.stats().expired_held) == (0, 0)

    def test_a_key_that_removes_itself_while_it_expires_is_taken_out_once(self) -> None:
        """It is taken out once, and nothing is left in its place."""
        clock, leaving = ManualClock(), list[TtlCache[Key, int]]()

        class Leaving(Key):
            def __hash__(self) -> int:
                if leaving:
                    leaving.pop().remove(self)
                return super().__hash__()

        cache = TtlCache[Key, int](1, clock=clock)
        cache.insert(Leaving(1), 1)
        clock.advance(1)
        leaving.append(cache)
        cache.cleanup_expired()
        stats = cache.stats()
        assert (leaving, stats.size, stats.expired_held) == ([], 0, 0)
        assert order_is_whole(cache)

    def test_finalizers_may_use_the_cache_at_any_moment(self) -> None:
        """Garbage whose `__del__` removes and inserts, collected inside the cache's own steps."""
        clock = ManualClock()
        cache = TtlCache[Key, object](50, max_entries=40, clock=clock)
        numbers = iter(range(10**9))

        class Garbage:
            def __init__(self) -> None:
                self.me = self

            def __del__(self) -> None:
                number = next(numbers)
                cache.remove(Key(number % 60))
                cache.insert(Key(number % 45), number)
                cache.cleanup_expired(limit=1)
                len(cache)

        before = gc.get_threshold()
        gc.set_threshold(5, 2, 2)
        try:
            for number in range(3_000):
                Garbage()
                cache.insert(Key(number % 60), number)
                cache.remove(Key((number * 7) % 60))
                clock.advance(1)
                len(cache)
        finally:
            gc.set_threshold(*before)
        gc.collect()
        clock.advance(100)
        cache.cleanup_expired()
        assert order_is_whole(cache)
        assert len(cache) == 0

    def test_no_other_thread_enters_while_remove_waits_for_the_hash_of_a_key(self) -> None:
        """While one thread is inside `remove`, held up in the key's hash, no other gets in."""
        entered, go_on = Event(), Event()

        class Slow(Key):
            held = False

            def __hash__(self) -> int:
                if Slow.held:
                    Slow.held = False
                    entered.set()
                    assert go_on.wait(timeout=30)
                return self.number

        cache = TtlCache[Slow, str](60)
        cache.insert(Slow(1), "v")
        cache.insert(Slow(2), "w")
        Slow.held = True
        got: list[object] = []
        threads = [Thread(target=lambda: got.append(cache.remove(Slow(1)))) for _ in range(2)]
        threads[0].start()
        assert entered.wait(timeout=30)
        threads[1].start()
        with ThreadPoolExecutor(1) as pool:
            inserted = pool.submit(cache.insert, Slow(3), "x")
            assert not inserted.done()
            go_on.set()
            inserted.result(timeout=30)
        for thread in threads:
            thread.join(timeout=30)
        assert sorted(got, key=str) == [None, "v"]
        assert order_is_whole(cache)


class TestM7ValuesAndCallbacksThatRunCode:
    def test_dropped_values_are_freed_outside_the_lock(self) -> None:
        """Also those of a second slice: their finalizer may wait for a thread that inserts."""
        clock = ManualClock()
        cache = TtlCache[int, object](1, clock=clock)
        inserted: list[int] = []

        class Dying:
            def __del__(self) -> None:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(cache.insert, -1, 0).result(timeout=30)
                inserted.append(1)

        cache.insert(0, Dying())
        for number in range(1, 2_500):
            cache.insert(number, Dying() if number in {1_500, 2_400} else 0)
        clock.advance(1)
        cache.cleanup_expired()
        assert (cache.stats().expired, len(inserted)) == (2_500, 3)

    def test_a_callback_that_inserts_is_not_called_inside_itself(self) -> None:
        """What its own inserts drop is told after it: all are told, no stack grows."""
        clock = ManualClock()
        depth = deepest = 0
        told: list[int] = []

        def on_evict(key: int, value: int, _reason: str) -> None:
            nonlocal depth, deepest
            depth += 1
            deepest = max(deepest, depth)
            told.append(key)
            if key >= 0:
                cache.insert(-1 - key, value)
            depth -= 1

        cache = TtlCache[int, int](1, clock=clock, on_evict=on_evict)
        for number in range(3_000):
            cache.insert(number, number)
        clock.advance(1)
        cache.cleanup_expired(limit=10)
        assert (deepest, sorted(told)) == (1, list(range(3_000)))

    def test_an_interrupt_inside_a_callback_is_raised_and_the_next_eviction_told(self) -> None:
        """Ctrl-C in `on_evict` ends the call that was telling, not the telling for ever."""
        clock = ManualClock()
        told: list[int] = []

        def on_evict(key: int, _value: int, _reason: str) -> None:
            told.append(key)
            if key == 0:
                raise KeyboardInterrupt

        cache = TtlCache[int, int](1, clock=clock, on_evict=on_evict)
        cache.insert(0, 0)
        clock.advance(1)
        with pytest.raises(KeyboardInterrupt):
            cache.cleanup_expired()
        assert order_is_whole(cache)
        cache.insert(1, 1)
        clock.advance(1)
        assert cache.cleanup_expired() == 1
        assert told == [0, 1]

    def test_cleanup_with_a_limit_above_one_slice_drops_exactly_that_many(self) -> None:
        """M6: 2,500 expired, at most 1,500: exactly 1,500."""
        clock = ManualClock()
        cache = TtlCache[int, int](1, clock=clock)
        for number in range(2_500):
            cache.insert(number, number)
        clock.advance(1)
        assert [cache.cleanup_expired(limit=1_500), cache.cleanup_expired()] == [1_500, 1_000]

    def test_a_clock_that_fails_during_remove_loses_no_entry(self) -> None:
        """`remove` asks the time before it takes anything out."""
        failing = False

        def clock() -> float:
            if failing:
                raise OSError("no clock")
            return 0.0

        cache = TtlCache[str, int](1, clock=clock)
        cache.insert("a", 1)
        failing = True
        with pytest.raises(OSError, match="no clock"):
            cache.remove("a")
        failing = False
        assert cache.remove("a") == 1
