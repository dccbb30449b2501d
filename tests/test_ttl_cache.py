"""TtlCache, rule by rule: M1, M2, M3, M4, M5, M6, M7, M9, M10, M11.

M8 is in test_sweeper.py, the speed of M11 in benchmarks/, M12 in typing/api.py.
"""

import logging
import sys
import time
import tracemalloc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from inspect import signature
from threading import Barrier, Event, get_ident
from types import FrameType
from typing import Any

import pytest

from stillfresh import ConfigError, TtlCache
from stillfresh.testing import ManualClock

Evictions = list[tuple[str, object, str]]


class Box:
    """A value that can be weakly referenced."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1000)


@pytest.fixture
def cache(clock: ManualClock) -> TtlCache[str, object]:
    return TtlCache(ttl=60, clock=clock)


def filled(clock: ManualClock, count: int, **options: Any) -> TtlCache[int, int]:
    """`count` entries, inserted one second apart, the first `count` seconds ago."""
    cache = TtlCache[int, int](ttl=1000, clock=clock, **options)
    for number in range(count):
        cache.insert(number, number)
        clock.advance(1)
    return cache


class TestM1Insert:
    def test_an_inserted_value_is_there(self, cache: TtlCache[str, object]) -> None:
        """What was inserted is there."""
        cache.insert("a", 1)
        assert cache.get("a") == 1

    def test_an_insert_replaces_the_value_of_its_key(self, cache: TtlCache[str, object]) -> None:
        """The last value counts, and there is one entry."""
        cache.insert("a", 1)
        cache.insert("a", 2)
        assert (cache.get("a"), len(cache)) == (2, 1)

    def test_an_insert_restarts_the_ttl_of_its_key(
        self, cache: TtlCache[str, object], clock: ManualClock
    ) -> None:
        """A replaced entry lives a full TTL from then."""
        cache.insert("a", 1)
        clock.advance(59)
        cache.insert("a", 2)
        clock.advance(59)
        assert cache.get("a") == 2
        clock.advance(1)
        assert cache.get("a") is None

    def test_a_restarted_entry_goes_to_the_end_of_the_order(
        self, cache: TtlCache[str, object], clock: ManualClock
    ) -> None:
        """After a restart the entry goes to the end of the order: older ones are dropped first."""
        cache.insert("a", 1)
        cache.insert("b", 1)
        clock.advance(30)
        cache.insert("a", 2)
        clock.advance(30)
        assert cache.cleanup_expired() == 1
        assert list(cache) == ["a"]

    def test_a_replaced_value_is_freed(self, cache: TtlCache[str, object]) -> None:
        """Nothing keeps a value that nobody can get any more."""
        value = Box()
        alive = weakref.ref(value)
        cache.insert("a", value)
        cache.insert("a", None)
        del value
        assert alive() is None


class TestM2Time:
    def test_an_entry_lives_before_its_ttl_and_not_at_it(
        self, cache: TtlCache[str, object], clock: ManualClock
    ) -> None:
        """At exactly `ttl` it is expired."""
        cache.insert("a", 1)
        clock.advance(59.999)
        assert cache.get("a") == 1
        clock.advance(0.001)
        assert cache.get("a") is None

    @pytest.mark.parametrize("start", [0.0, 0.1, 1e9 + 0.3, 123456.789])
    @pytest.mark.parametrize("ttl", [0.1, 0.3, 59.7])
    def test_an_entry_is_expired_at_exactly_its_ttl_for_any_clock_reading(
        self, start: float, ttl: float
    ) -> None:
        """Rounding of large clock readings grants nobody an extra moment."""
        clock = ManualClock(start)
        cache = TtlCache[str, int](ttl, clock=clock)
        cache.insert("a", 1)
        clock.advance(ttl)
        assert cache.get("a") is None

    def test_the_default_clock_is_monotonic(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A wall clock that jumps changes nothing."""
        cache = TtlCache[str, int](ttl="1h")
        cache.insert("a", 1)
        monkeypatch.setattr(time, "time", lambda: 1e12)
        assert cache.get("a") == 1
        assert signature(TtlCache).parameters["clock"].default is time.monotonic

    @pytest.mark.parametrize("ttl", ["1h", 3600, 3600.0, timedelta(hours=1)])
    def test_the_ttl_may_be_any_duration(self, ttl: Any) -> None:
        """One hour, however it is written."""
        clock = ManualClock()
        cache = TtlCache[str, int](ttl, clock=clock)
        cache.insert("a", 1)
        clock.advance(3599)
        assert "a" in cache
        clock.advance(1)
        assert "a" not in cache


class TestM3ExpiredMeansAbsent:
    @pytest.mark.parametrize(
        ("look", "absent"),
        [
            (lambda cache: cache.get("a"), None),
            (lambda cache: cache.remove("a"), None),
            (lambda cache: "a" in cache, False),
            (list, []),
            (lambda cache: list(cache.items()), []),
            (len, 0),
            (lambda cache: cache.stats().size, 0),
            (repr, "<TtlCache ttl=60s size=0>"),
        ],
        ids=["get", "remove", "in", "iter", "items", "len", "stats", "repr"],
    )
    def test_no_method_finds_an_expired_entry(
        self,
        cache: TtlCache[str, object],
        clock: ManualClock,
        look: Callable[[TtlCache[str, object]], object],
        absent: object,
    ) -> None:
        """No way of asking finds an expired entry, swept or not."""
        cache.insert("a", 1)
        assert look(cache) != absent
        cache.insert("a", 1)
        clock.advance(60)
        assert look(cache) == absent

    def test_len_counts_only_live_entries(self, clock: ManualClock) -> None:
        """Of ten entries, four past their time, six are left; none was dropped by asking."""
        cache = filled(clock, 10)
        clock.advance(1000 - 10 + 3)
        assert len(cache) == 6
        assert cache.cleanup_expired() == 4

    def test_iteration_leaves_out_entries_that_expire_or_are_removed_meanwhile(
        self, cache: TtlCache[str, object], clock: ManualClock
    ) -> None:
        """A slow loop over the entries never meets one that has expired or was removed."""
        for key in "abc":
            cache.insert(key, key)
        seen = []
        for key, value in cache.items():
            seen.append((key, value))
            cache.remove("b")
        assert seen == [("a", "a"), ("c", "c")]
        met = []
        for key in cache:
            met.append(key)
            clock.advance(60)
        assert met == ["a"]


class TestM4Get:
    def test_get_never_deletes_an_expired_entry(
        self, cache: TtlCache[str, object], clock: ManualClock
    ) -> None:
        """Asking for an expired entry leaves the dropping to others, who then count it."""
        cache.insert("a", 1)
        clock.advance(60)
        assert cache.get("a") is None
        assert cache.cleanup_expired() == 1

    def test_a_stored_none_can_be_told_from_a_miss(self, cache: TtlCache[str, object]) -> None:
        """With a default of your own."""
        missing = object()
        cache.insert("a", None)
        assert cache.get("a", missing) is None
        assert cache.get("b", missing) is missing
        assert cache.remove("a", missing) is None
        assert cache.remove("a", missing) is missing


class TestM5Remove:
    def test_remove_returns_the_value_once(self, cache: TtlCache[str, object]) -> None:
        """The first gets it, the second does not."""
        cache.insert("a", 1)
        assert [cache.remove("a"), cache.remove("a")] == [1, None]

    def test_remove_never_returns_an_expired_value(
        self, cache: TtlCache[str, object], clock: ManualClock
    ) -> None:
        """A request cannot be approved after its time."""
        cache.insert("request", "approve me")
        clock.advance(60)
        assert cache.remove("request") is None

    def test_a_removed_value_is_freed(self, cache: TtlCache[str, object]) -> None:
        """The cache keeps nothing of what it handed out."""
        cache.insert("a", Box())
        alive = weakref.ref(cache.remove("a"))
        assert alive() is None

    def test_of_many_threads_that_remove_a_key_one_gets_the_value(self) -> None:
        """Eight threads race for each of 2,000 values: 2,000 get one, the others None."""
        cache = TtlCache[int, int](ttl="1h")
        for key in range(2_000):
            cache.insert(key, key)
        start = Barrier(8)

        def race() -> list[int]:
            start.wait(timeout=30)
            return [value for key in range(2_000) if (value := cache.remove(key)) is not None]

        with ThreadPoolExecutor(8) as pool:
            won = [future.result() for future in [pool.submit(race) for _ in range(8)]]
        assert sorted(value for values in won for value in values) == list(range(2_000))


class TestM6Cleanup:
    def test_cleanup_returns_how_many_entries_it_dropped(self, clock: ManualClock) -> None:
        """Only what has expired goes."""
        cache = filled(clock, 10)
        clock.advance(1000 - 10 + 3)
        assert [cache.cleanup_expired(), cache.cleanup_expired()] == [4, 0]
        assert sorted(cache) == [4, 5, 6, 7, 8, 9]

    def test_cleanup_with_a_limit_drops_no_more_than_that(self, clock: ManualClock) -> None:
        """Seven expired in slices of three: three, three, one."""
        cache = filled(clock, 7)
        clock.advance(2000)
        assert [cache.cleanup_expired(limit=3) for _ in range(4)] == [3, 3, 1, 0]

    @pytest.mark.parametrize("limit", [0, -1])
    def test_cleanup_with_a_limit_below_one_drops_nothing(
        self, clock: ManualClock, limit: int
    ) -> None:
        """A budget that is used up is a limit like any other."""
        cache = filled(clock, 3)
        clock.advance(2000)
        assert cache.cleanup_expired(limit) == 0

    def test_cleanup_without_a_limit_drops_more_than_one_slice(self, clock: ManualClock) -> None:
        """Without a limit everything expired goes, however much."""
        cache = TtlCache[int, int](ttl=1, clock=clock)
        for number in range(2_500):
            cache.insert(number, number)
        clock.advance(1)
        assert cache.cleanup_expired() == 2_500

    def test_cleanup_costs_by_what_it_drops_and_not_by_what_it_keeps(
        self, clock: ManualClock
    ) -> None:
        """The instructions run for ten expired are the same among a hundred and ten thousand."""

        def cost(live: int) -> int:
            cache = filled(clock, 10)
            clock.advance(990)
            for number in range(live):
                cache.insert(-1 - number, 0)
            clock.advance(10)
            steps = 0

            def count(frame: FrameType, event: str, _arg: object) -> Any:
                nonlocal steps
                steps += event == "line" and frame.f_code.co_filename.endswith("ttl_cache.py")
                return count

            before = sys.gettrace()
            sys.settrace(count)
            try:
                cache.cleanup_expired()
            finally:
                sys.settrace(before)
            return steps

        assert cost(live=10_000) == cost(live=100)

    def test_cleanup_does_not_count_an_entry_that_was_removed_before(
        self, clock: ManualClock
    ) -> None:
        """Taking entries out anywhere in the order leaves the rest of it whole."""
        cache = filled(clock, 9)
        for key in (0, 4, 8):
            cache.remove(key)
        clock.advance(2000)
        assert cache.cleanup_expired() == 6


class TestM7Bounded:
    def test_each_insert_drops_a_few_expired(self, clock: ManualClock) -> None:
        """Without a sweeper the expired dwindle while new ones come."""
        cache = filled(clock, 100)
        clock.advance(2000)
        for number in range(50):
            cache.insert(1_000 + number, 0)
        assert cache.stats().expired == 100

    def test_a_full_cache_drops_the_oldest_entry_first(self, clock: ManualClock) -> None:
        """The newest stay, and a restarted entry counts as new."""
        cache = filled(clock, 3, max_entries=3)
        cache.insert(0, 0)
        cache.insert(3, 3)
        assert sorted(cache) == [0, 2, 3]

    def test_a_cache_for_one_entry_holds_the_last_insert(
        self, cache: TtlCache[str, object], clock: ManualClock
    ) -> None:
        """The smallest limit holds the last insert."""
        cache = TtlCache(ttl=60, max_entries=1, clock=clock)
        for key in "abc":
            cache.insert(key, key)
        assert list(cache.items()) == [("c", "c")]

    def test_on_evict_is_called_with_each_dropped_entry_and_the_reason(
        self, clock: ManualClock
    ) -> None:
        """`expired` or `full`, with key and value; once each, and never for a remove or replace."""
        told: Evictions = []
        cache = TtlCache[str, object](
            60, max_entries=2, clock=clock, on_evict=lambda *args: told.append(args)
        )
        cache.insert("a", 1)
        cache.insert("a", 2)
        cache.insert("b", 3)
        cache.insert("c", 4)
        cache.remove("b")
        assert told == [("a", 2, "full")]
        clock.advance(60)
        cache.cleanup_expired()
        cache.cleanup_expired()
        assert told == [("a", 2, "full"), ("c", 4, "expired")]

    @pytest.mark.parametrize("meet", ["insert", "remove"])
    def test_on_evict_is_called_for_an_expired_entry_that_is_replaced_or_removed(
        self, clock: ManualClock, meet: str
    ) -> None:
        """Replacing or removing what has expired is an expiry too, told and counted once."""
        told: Evictions = []
        cache = TtlCache[str, object](60, clock=clock, on_evict=lambda *args: told.append(args))
        cache.insert("a", 1)
        clock.advance(60)
        if meet == "insert":
            cache.insert("a", 2)
        else:
            cache.remove("a")
        cache.cleanup_expired()
        assert told == [("a", 1, "expired")]
        assert cache.stats().expired == 1

    def test_a_callback_that_raises_is_logged_and_breaks_nothing(
        self, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The others are still told, the entries are still dropped."""
        told = []

        def on_evict(key: int, _value: int, _reason: str) -> None:
            told.append(key)
            raise RuntimeError("broken callback")

        cache = filled(clock, 3, on_evict=on_evict)
        clock.advance(2000)
        with caplog.at_level(logging.ERROR):
            assert cache.cleanup_expired() == 3
        assert told == [0, 1, 2]
        assert caplog.text.count("RuntimeError: broken callback") == 3

    def test_a_callback_may_use_the_cache(self, clock: ManualClock) -> None:
        """It runs outside the lock: from here or another thread the cache answers."""
        cache: TtlCache[str, object]

        def on_evict(key: str, value: object, _reason: str) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(cache.insert, f"late {key}", value).result(timeout=30)

        cache = TtlCache(60, clock=clock, on_evict=on_evict)
        cache.insert("a", 1)
        clock.advance(60)
        cache.cleanup_expired()
        assert list(cache.items()) == [("late a", 1)]

    def test_a_finalizer_may_use_the_cache(self, clock: ManualClock) -> None:
        """A value that dies while it is dropped may insert and remove; nothing hangs or breaks."""
        cache = TtlCache[str, object](60, max_entries=2, clock=clock)

        class Dying:
            def __del__(self) -> None:
                cache.remove("b")
                cache.insert("last words", 1)

        def replace() -> None:
            cache.insert("a", 0)

        def remove() -> None:
            cache.remove("a")

        for ending in (replace, remove, cache.clear):
            cache.insert("a", Dying())
            cache.insert("b", 0)
            ending()
            assert cache.remove("last words") == 1
            assert "b" not in cache

    def test_memory_is_given_back_after_a_burst(self, clock: ManualClock) -> None:
        """The table that held ten thousand shrinks again while a few entries come and go."""
        cache = TtlCache[int, int](1, clock=clock)
        tracemalloc.start()
        try:
            for number in range(10_000):
                cache.insert(number, number)
            burst, _ = tracemalloc.get_traced_memory()
            clock.advance(1)
            cache.cleanup_expired()
            for number in range(10_000):
                clock.advance(1)
                cache.insert(number, number)
            left, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert left < burst / 10  # a table that had not shrunk would be a quarter of it

    def test_clear_drops_every_entry_and_does_not_call_on_evict(self, clock: ManualClock) -> None:
        """As a remove of every key; the cache goes on."""
        told: Evictions = []
        cache = filled(clock, 3, on_evict=lambda *args: told.append(args))
        cache.clear()
        assert (list(cache), len(cache), told) == ([], 0, [])
        cache.insert(1, 1)
        assert list(cache) == [1]


class TestM9Stats:
    def test_stats_count_what_became_of_the_entries(self, clock: ManualClock) -> None:
        """Size is what lives; the rest adds up."""
        cache = filled(clock, 5, max_entries=4)
        cache.remove(4)
        clock.advance(996)
        stats = cache.stats()
        assert (stats.size, stats.inserted, stats.evicted, stats.expired) == (2, 5, 1, 0)
        cache.cleanup_expired()
        assert (cache.stats().size, cache.stats().expired) == (2, 1)

    def test_stats_say_how_many_expired_entries_are_still_held(self, clock: ManualClock) -> None:
        """M13: what a sweep would free; they are absent from everything else."""
        cache = filled(clock, 5)
        assert cache.stats().expired_held == 0
        clock.advance(2000)
        assert (cache.stats().size, cache.stats().expired_held) == (0, 5)
        cache.cleanup_expired(limit=2)
        assert (cache.stats().expired, cache.stats().expired_held) == (2, 3)

    def test_reads_are_counted_only_with_count_reads(self, clock: ManualClock) -> None:
        """Counting costs; without `count_reads` there is no number, not a wrong one."""
        cache = TtlCache[str, int](60, clock=clock)
        cache.get("a")
        assert (cache.stats().hits, cache.stats().misses) == (None, None)

    def test_stats_count_hits_and_misses(self, clock: ManualClock) -> None:
        """An expired entry is a miss, and so is one that never was."""
        cache = TtlCache[str, int](60, clock=clock, count_reads=True)
        cache.insert("a", 1)
        assert [cache.get("a"), cache.get("a"), cache.get("b", 7)] == [1, 1, 7]
        clock.advance(60)
        assert cache.get("a") is None
        assert (cache.stats().hits, cache.stats().misses) == (2, 2)

    def test_only_get_counts_as_a_read(self, clock: ManualClock) -> None:
        """Only `get` counts: sweeps, iteration and `in` are the owner's."""
        cache = TtlCache[str, int](60, clock=clock, count_reads=True)
        cache.insert("a", 1)
        assert (len(cache), "a" in cache, list(cache.items())) == (1, True, [("a", 1)])
        assert (cache.stats().hits, cache.stats().misses) == (0, 0)

    def test_reads_of_every_thread_are_counted(self) -> None:
        """Eight threads, ten thousand reads each, none lost."""
        cache = TtlCache[str, int](ttl="1h", count_reads=True)
        cache.insert("a", 1)

        def read() -> None:
            for _ in range(5_000):
                cache.get("a")
                cache.get("b")

        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(read) for _ in range(8)]:
                future.result()
        assert (cache.stats().hits, cache.stats().misses) == (40_000, 40_000)


class TestM10BadInput:
    @pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), "5 parsecs", "0s", None])
    def test_a_bad_ttl_is_refused(self, ttl: Any) -> None:
        """Refused at the door, with the value."""
        with pytest.raises(ConfigError, match="ttl: ") as caught:
            TtlCache[str, int](ttl)
        assert repr(ttl) in str(caught.value)

    @pytest.mark.parametrize("limit", [0, -5])
    def test_a_limit_below_one_entry_is_refused(self, limit: int) -> None:
        """A cache for less than one entry is a mistake."""
        with pytest.raises(ConfigError, match=rf"max_entries: .* 1 or more, .* not {limit}"):
            TtlCache[str, int](60, max_entries=limit)

    @pytest.mark.parametrize("limit", [2.5, "10", [1]])
    def test_a_limit_that_is_no_whole_number_is_refused(self, limit: Any) -> None:
        """Refused too."""
        with pytest.raises((ConfigError, TypeError), match=r"max_entries|int or None"):
            TtlCache[str, int](60, max_entries=limit)

    @pytest.mark.parametrize("clock", [5, None, ManualClock, str])
    def test_a_bad_clock_is_refused(self, clock: Any) -> None:
        """Also the class where an instance was meant."""
        with pytest.raises(ConfigError, match=r"^clock: .*returns seconds"):
            TtlCache[str, int](60, clock=clock)

    def test_a_bad_on_evict_is_refused(self) -> None:
        """A coroutine function would never be awaited."""

        async def on_evict(*_: object) -> None: ...

        for callback in (on_evict, "print"):
            with pytest.raises(ConfigError, match=r"^on_evict: .*plain function"):
                TtlCache[str, int](60, on_evict=callback)  # type: ignore[arg-type]

    def test_an_unhashable_key_is_a_type_error_in_every_method(self) -> None:
        """TypeError from every method, and the cache goes on."""
        cache = TtlCache[Any, int](60)
        cache.insert("a", 1)
        for method in (
            cache.get,
            cache.remove,
            cache.__contains__,
            lambda key: cache.insert(key, 1),
        ):
            with pytest.raises(TypeError, match="unhashable"):
                method([])
        assert list(cache.items()) == [("a", 1)]

    def test_any_hashable_key_behaves_as_in_a_dict(self) -> None:
        """None and equal keys of other types behave as in a dict."""
        cache = TtlCache[Any, str](60)
        cache.insert(None, "none")
        cache.insert(1, "int")
        cache.insert(1.0, "float")
        assert (cache.get(None), cache.get(True), len(cache)) == ("none", "float", 2)


class TestM11Reads:
    def test_a_read_does_not_wait_for_a_writer(self) -> None:
        """M4: a lock on the way to a value would cost more than the lookup itself."""
        main_thread = get_ident()
        writer_is_inside = Event()
        writer_may_go_on = Event()

        def clock() -> float:
            if get_ident() != main_thread:
                writer_is_inside.set()
                assert writer_may_go_on.wait(30)
            return 0.0

        cache = TtlCache[str, int](60, clock=clock)
        cache.insert("a", 1)
        cache.insert("b", 2)
        with ThreadPoolExecutor(1) as pool:
            removing = pool.submit(cache.remove, "b")
            assert writer_is_inside.wait(30)
            value = cache.get("a")
            writer_may_go_on.set()
            assert removing.result() == 2
        assert value == 1
