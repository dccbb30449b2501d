"""E34: small doors: what people write first works, or says what to write."""

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from stillfresh import Cache, ConfigError, SyncCache, Verdict
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Prices, Upstream, declare, turns, version

KEPT = SyncCache("memory://")


@KEPT.cached("kept", fresh_for=30)
def kept(number: int) -> int:
    return number


@KEPT.batched("many_kept", fresh_for=30)
def many_kept(numbers: list[int]) -> dict[int, int]:
    return dict.fromkeys(numbers, 1)


class Keeper:
    """An object with a cached method."""

    @KEPT.cached("method", fresh_for=30, ignore=("self",))
    def kept(self, number: int) -> int:
        return number


class TestE34InvalidateAll:
    async def test_every_entry_of_the_resource_and_no_other(
        self, cache: Cache, prices: Prices, upstream: Upstream
    ) -> None:
        others = cache.batched("other", fresh_for=30)(prices.__wrapped__)
        await prices.get_many(["a", "b"])
        await others("a")
        upstream.version = 2
        assert await prices.invalidate_all() == 2
        assert version(await prices.get("a")) == 2
        assert version(await others.get("a")) == 1

    async def test_a_soft_one_serves_the_old_copies(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        await prices("a")
        await prices.invalidate_all(soft=True)
        assert (await prices.get("a")).verdict is Verdict.STALE

    async def test_a_load_under_way_is_not_published(
        self, prices: Prices, upstream: Upstream
    ) -> None:
        waiting = await upstream.holding(prices.get("a"))
        await prices.invalidate_all()
        upstream.version = 2
        upstream.let_go()
        assert (await waiting).verdict is Verdict.STALE
        assert version(await prices.get("a")) == 2

    async def test_a_cached_function_has_it(self, cache: Cache) -> None:
        calls: list[int] = []

        @cache.cached("report", fresh_for=30)
        async def report(year: int) -> int:
            calls.append(year)
            return year

        await report(2025)
        await report(2026)
        assert await report.invalidate_all() == 2
        await report(2026)
        assert calls == [2025, 2026, 2026]

    def test_sync_caches_have_it(self) -> None:
        with SyncCache("memory://") as cache:
            calls: list[Any] = []

            @cache.cached("report", fresh_for=30)
            def report(year: int) -> int:
                calls.append(year)
                return year

            @cache.batched("many", fresh_for=30)
            def many(keys: list[str]) -> dict[str, int]:
                calls.append(keys)
                return dict.fromkeys(keys, 1)

            report(2026)
            many("a")
            assert report.invalidate_all() == many.invalidate_all() == 1
            report(2026)
            many("a")
            assert len(calls) == 4


class TestE34Tags:
    async def test_tags_may_be_a_list(self, cache: Cache, upstream: Upstream) -> None:
        """Then every entry has them."""
        prices = declare(cache, upstream, tags=["shop", "all"])

        @cache.cached("report", fresh_for=30, tags=["all"])
        async def report(year: int) -> int:
            return year

        await prices("a")
        await report(2026)
        tagged = await cache.invalidate_tag("all")
        assert sorted(tagged) == [("price", "a"), ("report", "[2026]")]

    async def test_a_text_is_no_list(self, cache: Cache) -> None:
        with pytest.raises(ConfigError, match=re.escape("price: tags is a list; write tags=['a']")):
            declare(cache, Upstream(), tags="a")


class TestE34Statistics:
    async def test_the_hit_ratio_is_a_number(self, prices: Prices) -> None:
        assert (await prices.stats()).hit_ratio is None
        for _ in range(4):
            await prices("a")
        assert (await prices.stats()).hit_ratio == 0.75

    async def test_statistics_are_one_readable_line_for_each_resource(
        self, cache: Cache, prices: Prices, upstream: Upstream
    ) -> None:
        cache.batched("other", fresh_for=30)(prices.__wrapped__)
        for _ in range(4):
            await prices("a")
        upstream.error = ConnectionError("down")
        with pytest.raises(Exception, match="down"):
            await prices("b")
        first, second = str(await cache.stats()).splitlines()
        assert first == (
            "price: 5 reads, 60.0 % hits, 2 loads, 1 failed, "
            "half of the answers at most 0.1 s old, 1 in memory, "
            "last error: 'ConnectionError: down'"
        )
        assert second.startswith("other: 0 reads, no hit ratio yet, 0 loads")


class TestE34OtherWords:
    @pytest.mark.parametrize(
        ("option", "meant"),
        [
            ("ttl", "write fresh_for"),
            ("expire", "write fresh_for"),
            ("timeout", "write fresh_for for how long a value is fresh, load_timeout for"),
            ("maxsize", "write max_entries"),
            ("key_builder", "write key"),
            ("fresh", "write fresh_for"),
            ("zzz", "write one of fresh_for, stale_for"),
        ],
    )
    @pytest.mark.parametrize("decorator", ["cached", "batched"])
    async def test_an_option_of_another_library_is_refused_with_its_name_here(
        self, decorator: str, option: str, meant: str
    ) -> None:
        for cache in (Cache("memory://"), SyncCache("memory://")):
            with pytest.raises(ConfigError, match=f"there is no option '{option}'; {meant}"):
                getattr(cache, decorator)("price", fresh_for=1, **{option: 60})

    @pytest.mark.parametrize("method", ["get", "set", "clear", "delete", "memoize"])
    def test_a_method_of_another_cache_says_what_to_write(self, method: str) -> None:
        for cache in (Cache("memory://"), SyncCache("memory://")):
            with pytest.raises(AttributeError, match=rf"Cache\.{method}: .*"):
                getattr(cache, method)


class TestE34Functions:
    @pytest.mark.parametrize("function", [kept, many_kept])
    def test_a_cached_function_is_pickled_by_its_import_path(self, function: Any) -> None:
        assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301 (our own)

    def test_a_cached_method_is_pickled_with_its_object(self) -> None:
        again = pickle.loads(pickle.dumps(Keeper().kept))  # noqa: S301 (our own)
        assert again(7) == 7

    async def test_a_function_that_cannot_be_imported_is_not_pickled(self, cache: Cache) -> None:
        @cache.cached("report", fresh_for=30)
        async def report(year: int) -> int:
            return year

        with pytest.raises((pickle.PicklingError, AttributeError), match="report"):
            pickle.dumps(report)

    async def test_the_repr_says_what_it_is(self, cache: Cache, prices: Prices) -> None:
        @cache.cached("report", fresh_for="10m")
        async def report(year: int) -> int:
            return year

        name = f"{__name__}.TestE34Functions.test_the_repr_says_what_it_is.<locals>.report"
        assert repr(report) == f"<cached function {name}: kind 'report', fresh for 600 s>"
        assert "<batched resource tests.kit.engine.declare" in repr(prices)
        assert repr(prices).endswith(": kind 'price', fresh for 30 s>")
        assert repr(kept).startswith("<cached function tests.engine.test_small_doors.kept: kind")
        assert repr(many_kept).startswith("<batched resource tests.engine.test_small_doors.many")


class TestE34SyncInALoop:
    async def test_it_works_with_one_warning_that_names_cache(self) -> None:
        """The call blocks the loop, so it says what to use there."""
        cache = SyncCache("memory://")

        @cache.cached("report", fresh_for=30)
        def report(year: int) -> int:
            return year

        with pytest.warns(RuntimeWarning, match="use Cache in async code"):
            assert report(2026) == 2026
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert report(2027) == 2027
            cache.close()

    async def test_in_ipython_it_works_without_a_word(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import sys  # noqa: PLC0415 (patched)

        class IPython:
            @staticmethod
            def get_ipython() -> object:
                return object()

        monkeypatch.setitem(sys.modules, "IPython", IPython)
        cache = SyncCache("memory://")

        @cache.cached("report", fresh_for=30)
        def report(year: int) -> int:
            return year

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert report(2026) == 2026
            cache.close()


class TestE34Redeclared:
    """A notebook cell that is run twice, or a module that is loaded again."""

    CELL = """
@cache.cached("price", fresh_for=30)
async def price(sku: str) -> str:
    return f"{sku} {version}"

@cache.batched("stock", fresh_for=30)
async def stock(skus: list[str]) -> dict[str, int]:
    return dict.fromkeys(skus, version)
"""

    def run(self, cache: Any, number: int, cell: str = CELL) -> Any:
        space: dict[str, Any] = {"cache": cache, "version": number, "__name__": "notebook"}
        exec(cell, space)  # noqa: S102 (a cell)
        return space

    async def test_the_new_function_replaces_the_old_one(self, cache: Cache) -> None:
        """The old object passes its calls on."""
        first = self.run(cache, 1)
        assert await first["price"]("tea") == "tea 1"
        assert await first["stock"]("tea") == 1
        second = self.run(cache, 2)
        for name, value in {"price": "coffee 2", "stock": 2}.items():
            assert await second[name]("coffee") == value
            assert await first[name]("coffee") == value
        await second["price"].of("tea").invalidate()
        assert await first["price"]("tea") == "tea 2"
        assert sorted(cache.resources) == ["price", "stock"]

    async def test_the_old_ones_watches_end(self, cache: Cache) -> None:
        first = self.run(cache, 1)
        ended: list[bool] = []
        with first["stock"].watch("tea", end=lambda: ended.append(True)):
            self.run(cache, 2)
            await turns()
            assert ended == [True]

    async def test_the_old_one_may_be_a_handle_and_hold_an_entry(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        first = self.run(cache, 1)
        handle = first["price"].of("tea")
        await handle.get()
        self.run(cache, 2)
        await handle.invalidate()
        assert (await handle.get()).value == "tea 2"

    async def test_another_place_is_refused(self, cache: Cache) -> None:
        """Another function, another module, or a function that is made again and again."""
        self.run(cache, 1)
        with pytest.raises(ConfigError, match="taken already"):
            self.run(cache, 2, self.CELL.replace("def price", "def prices"))

        def make() -> Any:
            @cache.cached("made", fresh_for=30)
            async def made(number: int) -> Price:
                return Price("a", number)

            return made

        make()
        with pytest.raises(ConfigError, match="taken already"):
            make()

    def test_sync_functions_are_replaced_too(self, tmp_path: Path) -> None:
        cell = self.CELL.replace("async def", "def")
        with SyncCache(f"sqlite:///{tmp_path}/cache.db") as cache:
            first = self.run(cache, 1, cell)
            assert first["price"]("tea") == "tea 1"
            assert first["stock"]("tea") == 1
            second = self.run(cache, 2, cell)
            for space in (first, second):
                assert space["price"]("coffee") == "coffee 2"
                assert space["stock"]("coffee") == 2
