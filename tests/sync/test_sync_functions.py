"""E19 for code without an event loop: functions, methods, keys and versions as `Cache` has them."""

import asyncio
import inspect
from contextlib import AbstractAsyncContextManager
from typing import Any

import pydantic
import pytest

from stillfresh import ConfigError, Origin, SyncCache


class Report(pydantic.BaseModel):
    year: int


class Session:
    """No part of any key."""


@pytest.fixture
def memory() -> SyncCache:
    return SyncCache("memory://")


class TestE19Sync:
    def test_a_decorated_def_function_keeps_its_name_and_signature(self, memory: SyncCache) -> None:
        """And no coroutine function, as it is none."""

        def report(year: int) -> Report:
            """A year's report."""
            return Report(year=year)

        def prices(skus: list[str]) -> dict[str, int]:
            """Many."""
            return dict.fromkeys(skus, 1)

        cached = memory.cached("report", fresh_for=60)(report)
        batched = memory.batched("price", fresh_for=60, version="2")(prices)
        assert (cached.__name__, cached.__doc__) == ("report", "A year's report.")
        assert inspect.signature(cached) == inspect.signature(report)
        assert (batched.__name__, str(inspect.signature(batched))) == (
            "prices",
            "(key: str) -> int",
        )
        assert not inspect.iscoroutinefunction(cached)
        with memory:
            assert cached(2026) == Report(year=2026)
            assert batched("a") == 1
            assert set(memory.stats().resources) == {"report", "price_v2"}

    def test_mistakes_of_a_call_show_what_to_write(self, memory: SyncCache) -> None:
        """`get_many` for several keys, `of(...).get` for a max_age, `with` for `async with`."""

        @memory.cached("yearly", fresh_for=60)
        def report(year: int) -> int:
            return year

        @memory.batched("price", fresh_for=60)
        def prices(skus: list[str]) -> dict[str, int]:
            return dict.fromkeys(skus, 1)

        async def entered(wrong: Any) -> None:
            async with wrong:
                raise AssertionError

        several: Any = prices
        aged: Any = report
        with memory:
            assert prices("a") == 1
            with pytest.raises(
                TypeError, match=r"prices: takes .*prices\.get_many\(\['a', 'b'\]\)"
            ):
                several("a", "b")
            with pytest.raises(TypeError, match=r"report\.of\(\.\.\.\)\.get\(max_age=5\)"):
                aged.get(2026, max_age=5)
        with pytest.raises(AttributeError, match="write `with`, or use Cache"):
            asyncio.run(entered(memory))
        assert not isinstance(memory, AbstractAsyncContextManager)

    def test_arguments_of_a_def_function_count_as_declared(self, memory: SyncCache) -> None:
        """`ignore=` and `key=`, and the refusals of `Cache`."""
        calls: list[Session] = []

        @memory.cached("report", fresh_for=60, ignore=("db",))
        def report(year: int, db: Session) -> int:
            calls.append(db)
            return year

        @memory.cached("total", fresh_for=60, key=lambda year, _: year)
        def total(year: int, db: Session) -> int:
            calls.append(db)
            return year

        one, other = Session(), Session()
        with memory:
            for cached in (report, total):
                assert [cached(1, one), cached(1, other)] == [1, 1]
                assert cached.get(1, other).origin is Origin.MEMORY
        assert calls == [one, one]
        with pytest.raises(ConfigError, match="no parameter of"):
            memory.cached("other", fresh_for=1, ignore=("dv",))(lambda db: db)

    def test_a_mistake_is_told_where_it_is_declared(self, memory: SyncCache) -> None:
        """As with `Cache`: `@cache.cached` without its options fails before any call."""

        def report(year: int) -> int:
            return year

        for declare in (memory.cached, memory.batched):
            with pytest.raises(TypeError, match="fresh_for"):
                declare(report)  # type: ignore[call-arg, arg-type]
            with pytest.raises(ConfigError, match="lower-case word"):
                declare("Price list", fresh_for=60)

    def test_a_method_of_a_sync_cache_can_be_decorated(self, memory: SyncCache) -> None:
        """Bound as any other."""

        class Shop:
            @memory.cached("price", fresh_for=60, ignore=("self",))
            def price(self, sku: str) -> int:
                return len(sku)

        shop = Shop()
        with memory:
            assert [shop.price("a"), Shop.price(shop, "a")] == [1, 1]
            assert Shop().price.get("a").origin is Origin.MEMORY
            shop.price.of("a").invalidate()
            assert shop.price("a") == 1
            assert memory.stats().resources["price"].loads == 2
        assert str(inspect.signature(shop.price)) == "(sku: str) -> int"
