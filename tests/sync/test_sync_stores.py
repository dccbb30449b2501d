"""E20: the same declarations and methods for code without an event loop, on every store."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stillfresh import (
    ConfigError,
    LoadFailed,
    NotOpen,
    Origin,
    RefreshEnd,
    Span,
    SyncCache,
    Verdict,
)
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import Price
from tests.kit.held_store import SteppedStore
from tests.kit.sync import PlainUpstream, SyncPrices, held, loop_held, until


@pytest.fixture
def address(every_store: str) -> str:
    return every_store


class TestE20EveryStore:
    def test_a_read_loads_once_and_then_hits(
        self, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """A call gives the value, `get` the answer; the second needs no load."""
        assert prices("a") == Price("a", 1)
        answer = prices.get("a")
        assert (answer.value, answer.verdict) == (Price("a", 1), Verdict.FRESH)
        assert upstream.loaded == [["a"]]

    def test_many_keys_are_loaded_together(
        self, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """One loader call for what is missing; a generator and a list are the same."""
        upstream.absent.add("c")
        prices("a")
        found = prices.get_many(sku for sku in ["a", "b", "c"])
        assert [found[sku].found for sku in "abc"] == [True, True, False]
        assert upstream.loaded == [["a"], ["b", "c"]]
        assert prices.get_many(["a", "b"])["b"].value == Price("b", 1)
        assert set(prices.known(["a", "b", "z"])) == {"a", "b"}
        assert len(upstream.calls) == 2
        with pytest.raises(KeyError):
            prices("c")

    def test_a_stale_copy_is_served_and_refreshed_behind(
        self, prices: SyncPrices, upstream: PlainUpstream, clock: ManualClock
    ) -> None:
        """The refresh runs in a thread of the pool, since nobody waits for it."""
        prices("a")
        clock.advance(31)
        upstream.version = 2
        assert prices.get("a").verdict is Verdict.STALE
        until(lambda: prices("a") == Price("a", 2))
        assert upstream.threads == ["MainThread", "stillfresh-loader"]

    def test_an_expired_copy_is_served_if_the_load_fails(
        self, prices: SyncPrices, upstream: PlainUpstream, clock: ManualClock
    ) -> None:
        """With the error; without a copy, LoadFailed from the loader's own error."""
        prices("a")
        clock.advance(100)
        upstream.error = ValueError("down")
        answer = prices.get("a")
        assert (answer.value, answer.verdict) == (Price("a", 1), Verdict.EXPIRED)
        assert answer.error is not None
        with pytest.raises(LoadFailed, match="price 'b': loading failed: ValueError: down") as info:
            prices("b")
        assert info.value.__cause__ is upstream.error

    def test_the_error_is_told_while_a_retry_is_under_way(
        self, prices: SyncPrices, upstream: PlainUpstream, clock: ManualClock
    ) -> None:
        """E31: also to a thread that reads the store itself."""
        prices("a")
        clock.advance(31)
        upstream.error = ValueError("down")
        prices.get("a")
        until(lambda: prices.get("a").error is not None)
        clock.advance(1)
        with held(upstream):
            for _ in range(3):
                answer = prices.get("a")
                assert (answer.verdict, "ValueError: down" in str(answer.error)) == (
                    Verdict.STALE,
                    True,
                )
            # A read while the failed load still ends begins no retry.
            until(lambda: prices.get("a").error is not None and len(upstream.calls) == 3)
            assert prices.get_many(["a"])["a"].error is not None
            assert prices.known(["a"])["a"].error is not None

    def test_the_cause_is_told_during_the_cooldown(
        self, prices: SyncPrices, upstream: PlainUpstream, clock: ManualClock
    ) -> None:
        """E30: raised without a copy, and in `answer.error` with one; the loader is not called."""
        prices("a")
        clock.advance(100)
        upstream.error = ValueError("down")
        for _ in range(2):
            error = prices.get("a").error
            assert error is not None
            assert error.__cause__ is upstream.error
            with pytest.raises(LoadFailed) as info:
                prices("b")
            assert info.value.__cause__ is upstream.error
        assert upstream.loaded == [["a"], ["a"], ["b"]]

    def test_puts_updates_and_invalidations_are_seen_at_once(
        self, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """Put, update, invalidate, delete, refresh: each is seen by the next read."""
        prices.put("a", Price("a", 10))
        assert prices("a") == Price("a", 10)
        prices.put_many({"b": Price("b", 20), "c": Price("c", 30)}, fresh_for="1h")
        assert prices.get("c").value == Price("c", 30)
        changed = prices.update("a", lambda old: Price("a", old.value.version + 1 if old else 0))
        assert changed is not None
        assert changed.value == prices("a") == Price("a", 11)
        prices.invalidate("a")
        assert prices("a") == Price("a", 1)
        prices.delete("b")
        assert prices("b") == Price("b", 1)
        upstream.version = 2
        prices.refresh("a", "b")
        assert prices.of("b").get().value == Price("b", 2)
        upstream.version = 3
        assert prices.refresh_many(["b"])["b"].end is RefreshEnd.STORED
        assert prices("b") == Price("b", 3)
        assert "fresh copy" in str(prices.explain("a"))

    def test_a_sync_get_takes_a_max_age(
        self, prices: SyncPrices, upstream: PlainUpstream, clock: ManualClock
    ) -> None:
        """E18: an older copy does not do for this call."""
        prices("a")
        clock.advance(5)
        upstream.version = 2
        assert prices.get("a", max_age="10s").value == Price("a", 1)
        assert prices.get("a", max_age="2s").value == Price("a", 2)

    def test_a_sync_cache_has_the_methods_of_a_cache(
        self, cache: SyncCache, upstream: PlainUpstream
    ) -> None:
        """Tags, everything, eviction, counts and the listing."""

        @cache.cached("report", fresh_for="1m", tags=lambda day: [f"day:{day}"])
        def report(day: str) -> list[str]:
            return [*upstream([day])]

        assert report("mon") == ["mon"]
        assert cache.invalidate_tag("day:mon") == [("report", '["mon"]')]
        assert report("mon") == ["mon"]
        assert len(upstream.calls) == 2
        assert cache.stats().resources["report"].loads == 2
        assert [it.kind for it in cache.entries()] == ["report"]
        assert cache.evict() == 0
        assert cache.invalidate_all() == 1
        assert report("mon") == ["mon"]
        assert len(upstream.calls) == 3

    def test_a_sync_cache_can_be_closed_and_opened_again(
        self, cache: SyncCache, prices: SyncPrices, upstream: PlainUpstream
    ) -> None:
        """A closed cache says so; `with` opens it again."""
        prices("a")
        cache.close()
        cache.close()
        with pytest.raises(NotOpen, match="this cache is closed; open it again with `with cache"):
            prices("a")
        with cache:
            assert prices("a") == Price("a", 1)


class TestE20SharedStores:
    def test_two_caches_share_one_load(self, shared_store: str, clock: ManualClock) -> None:
        """What one has loaded, the other reads from the store."""
        caches = [SyncCache(shared_store, clock=clock) for _ in range(2)]
        calls: list[str] = []

        def length(word: str) -> int:
            calls.append(word)
            return len(word)

        one, other = (it.cached("length", fresh_for="1m")(length) for it in caches)
        with caches[0], caches[1]:
            assert (one("word"), other("word")) == (4, 4)
            assert other.get("word").origin is Origin.STORE
        assert calls == ["word"]


class TestE20Doors:
    @pytest.fixture
    def address(self) -> str:
        return "memory://"

    def test_an_async_loader_is_refused(self, cache: SyncCache) -> None:
        """No loop of the caller's would run it."""

        async def load(keys: list[str]) -> dict[str, int]:
            return dict.fromkeys(keys, 1)

        with pytest.raises(ConfigError, match="price: a SyncCache's loader is a def function"):
            cache.batched("price", fresh_for=1)(load)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="price: a SyncCache's loader is a def function"):
            cache.cached("price", fresh_for=1)(load)

    def test_a_sync_cache_refuses_what_a_cache_refuses(self, prices: SyncPrices) -> None:
        """E15: the same words."""
        with pytest.raises(ConfigError, match=r"get_many: takes many keys; write get_many\(\['a'"):
            prices.get_many("a")
        with pytest.raises(ConfigError, match="price: a key is str, not int"):
            prices(5)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="price: a key is str, not list"):
            prices(["a"])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="price: a key is str, not list"):
            prices.get(["a"])  # type: ignore[arg-type]
        assert not hasattr(prices, "watch")


@pytest.mark.parametrize("way", ["all", "tag"])
def test_e20_soft_is_soft_for_threads_too(way: str, clock: ManualClock) -> None:
    """E6: the old copy is served while it is refreshed."""
    with SyncCache("memory://", clock=clock) as cache:

        @cache.cached("report", fresh_for="1m", stale_for="1m", tags=lambda _: ["days"])
        def report(day: str) -> str:
            return day

        report("mon")
        if way == "all":
            assert cache.invalidate_all(soft=True) == 1
        else:
            cache.invalidate_tag("days", soft=True)
        assert report.get("mon").verdict is Verdict.STALE


def test_e20_clearing_forgets_a_resource(clock: ManualClock) -> None:
    """In memory and in the store."""
    with SyncCache("memory://", clock=clock) as cache:

        @cache.batched("price", fresh_for="1m")
        def prices(skus: list[str]) -> dict[str, int]:
            return dict.fromkeys(skus, 1)

        prices("a")
        with loop_held(cache):
            assert prices("a") == 1, "a hit asks nobody"
        prices.clear()
        assert (prices.peek("a"), cache.entries()) == (None, [])


def test_e14_a_hit_of_a_function_does_not_leave_the_calling_thread(clock: ManualClock) -> None:
    """It is counted all the same."""
    with SyncCache("memory://", clock=clock) as cache:

        @cache.cached("report", fresh_for="1m")
        def report(day: str) -> str:
            return day

        assert [report("mon"), report("mon")] == ["mon", "mon"]
        with loop_held(cache):
            assert report("mon") == "mon"
        assert cache.stats().resources["report"].hits == 2


def test_e20_closing_closes_the_store(clock: ManualClock) -> None:
    """Once, however often it is closed, and though another cache needs the loop."""
    store = SteppedStore(MemoryStore(clock=clock))
    cache = SyncCache(store, clock=clock)
    with SyncCache("memory://"):
        cache.open()
        cache.close()
        cache.close()
        assert (store.count("open"), store.count("close")) == (1, 1)


def test_g15_hooks_are_told_of_loads_of_threads(clock: ManualClock) -> None:
    """As those of a cache on a loop are."""
    told = list[str]()

    @contextmanager
    def hook(span: Span) -> Iterator[None]:
        told.append(f"{span.what} {span.kind}")
        yield

    with SyncCache("memory://", clock=clock, hooks=[hook]) as cache:

        @cache.cached("report", fresh_for="1m")
        def report(day: str) -> str:
            return day

        report("mon")
    assert "load report" in told
