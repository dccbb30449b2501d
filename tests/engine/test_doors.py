"""E15: what is refused at the door, and what to write instead."""

from collections.abc import Mapping
from typing import Any

import pytest
from engine_kit import Price, Upstream, declare

from stillfresh import Cache, ConfigError, Resource


class TestE15Keys:
    async def test_a_string_where_many_keys_belong(self, prices: Resource[str, Price]) -> None:
        """Its letters are not its keys."""
        with pytest.raises(ConfigError, match=r"price.get_many: .* write get_many\(\['sku-1'\]\)"):
            await prices.get_many("sku-1")

    @pytest.mark.parametrize("key", [1, None, b"a", True, ["a"], 1.5])
    async def test_a_key_of_another_type(
        self, prices: Resource[str, Price], upstream: Upstream, key: Any
    ) -> None:
        """Declared str: the error names the resource, both types and the key."""
        if isinstance(key, list):
            with pytest.raises(TypeError, match="unhashable"):
                await prices(key)  # type: ignore[arg-type]
            return
        for ask in (prices, prices.get, prices.refresh, prices.invalidate, prices.delete):
            with pytest.raises(ConfigError, match=f"price: a key is str, not {type(key).__name__}"):
                await ask(key)
        assert upstream.calls == []

    @pytest.mark.parametrize("key", ["1", None, True])
    async def test_a_key_that_is_no_int(self, cache: Cache, key: Any) -> None:
        """Declared int: text and truth values are refused."""

        @cache.batched("number", fresh_for=60)
        async def numbers(keys: list[int]) -> dict[int, int]:
            return {key: key for key in keys}

        with pytest.raises(ConfigError, match="number: a key is int, not"):
            await numbers(key)
        assert await numbers(1) == 1

    @pytest.mark.parametrize(
        ("key", "said"),
        [("", "the key is empty"), ("x" * 70_000, "70,000 bytes long"), ("\ud800", "UTF-8")],
        ids=["empty", "huge", "surrogate"],
    )
    async def test_a_key_that_cannot_be_one(
        self, prices: Resource[str, Price], key: str, said: str
    ) -> None:
        """A clear, short error, and the cache goes on."""
        with pytest.raises(ConfigError, match=f"price: .*{said}") as caught:
            await prices(key)
        assert len(str(caught.value)) < 250
        assert (await prices("a")).version == 1

    @pytest.mark.parametrize("key", ["a\x00b", " ", "ключ", "'; DROP TABLE x; --", "x" * 60_000])
    async def test_any_other_text_is_a_key(self, prices: Resource[str, Price], key: str) -> None:
        """Whatever bytes it holds."""
        assert await prices(key) == Price(key, 1)
        prices._core.shelf.front.clear()
        assert await prices(key) == Price(key, 1)


class TestE15Arguments:
    async def test_one_call_has_one_key(self, cache: Cache) -> None:
        """Bound with their defaults, in whichever way they are written."""
        calls = []

        @cache.cached("report", fresh_for=60)
        async def report(year: int, region: str = "eu", *, draft: bool = False) -> int:
            calls.append((year, region, draft))
            return len(calls)

        same = [
            await report(2026),
            await report(2026, "eu"),
            await report(2026, region="eu"),
            await report(region="eu", year=2026),
            await report(2026, draft=False),
        ]
        assert same == [1] * 5
        assert [await report(2026, draft=True), await report(2025)] == [2, 3]

    async def test_equal_arguments_of_other_types_are_not_mixed_up(self, cache: Cache) -> None:
        """1, True and 1.0 are equal to Python and different to a function."""

        @cache.cached("kind", fresh_for=60)
        async def kind(value: Any) -> str:
            return type(value).__name__

        for _ in range(3):
            assert [await kind(1), await kind(value=True), await kind(1.0)] == [
                "int",
                "bool",
                "float",
            ]

    async def test_mutable_arguments_count_by_value(self, cache: Cache) -> None:
        """A list is what is in it, a dict whatever its order."""
        calls = []

        @cache.cached("total", fresh_for=60)
        async def total(numbers: list[int], extra: dict[str, int]) -> int:
            calls.append(extra)
            return sum(numbers)

        assert await total([1, 2], {"a": 1, "b": 2}) == 3
        assert await total([1, 2], {"b": 2, "a": 1}) == 3
        assert await total([1, 3], {}) == 4
        assert len(calls) == 2

    async def test_arguments_that_cannot_be_a_key(self, cache: Cache) -> None:
        """The error names the resource and the arguments."""

        @cache.cached("odd", fresh_for=60)
        async def odd(value: Any) -> int:
            return len(value)

        with pytest.raises(ConfigError, match=r"odd: the arguments .*object.* cannot be a key"):
            await odd(object())

    async def test_arguments_of_another_type(self, cache: Cache) -> None:
        """Annotated int means int."""

        @cache.cached("report", fresh_for=60)
        async def report(year: int) -> int:
            return year

        with pytest.raises(ConfigError, match="report: year is int, not str"):
            await report("2026")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"report\(year: int\).*missing"):
            await report()  # type: ignore[call-arg]


def declared(cache: Cache, loader: Any, **options: Any) -> None:
    cache.batched("thing", **{"fresh_for": 1, **options})(loader)


async def good(keys: list[str]) -> dict[str, int]:
    return dict.fromkeys(keys, 1)


async def unannotated(keys):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    return keys


async def bytes_keys(keys: list[bytes]) -> dict[bytes, int]:
    return dict.fromkeys(keys, 1)


async def two(keys: list[str], more: int) -> dict[str, int]:
    return dict.fromkeys(keys, more)


async def a_list(keys: list[str]) -> list[int]:
    return [len(key) for key in keys]


async def unresolved(keys: list[str]) -> "Mapping[str, Nowhere]":  # type: ignore[name-defined]  # noqa: F821
    return dict.fromkeys(keys)


def blocking(keys: list[str]) -> dict[str, int]:
    return dict.fromkeys(keys, 1)


class TestE15Declarations:
    @pytest.mark.parametrize(
        ("loader", "said"),
        [
            (blocking, "an async function"),
            (unannotated, r"list\[str\] or list\[int\]"),
            (bytes_keys, r"list\[str\] or list\[int\]"),
            (two, "takes one parameter"),
            (a_list, "returns a mapping"),
            (unresolved, "cannot read the annotations"),
        ],
    )
    async def test_a_loader_that_cannot_work(self, cache: Cache, loader: Any, said: str) -> None:
        """Refused where it is declared."""
        with pytest.raises(ConfigError, match=f"thing: .*{said}"):
            declared(cache, loader)

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("fresh_for", "soon"),
            ("stale_for", -1),
            ("error_for", "x"),
            ("absent_for", "x"),
            ("max_batch", 0),
            ("concurrency", 0),
            ("max_entries", 1.5),
            ("memory_for", "x"),
            ("jitter", 1),
            ("jitter", -0.1),
            ("lease_for", 0),
            ("load_timeout", 0),
        ],
    )
    async def test_a_bad_option(self, cache: Cache, option: str, value: object) -> None:
        """The error names the option and the value."""
        with pytest.raises(ConfigError, match=option) as caught:
            declared(cache, good, **{option: value})
        assert repr(value) in str(caught.value)

    async def test_two_of_one_name(self, cache: Cache) -> None:
        """They would share their entries."""
        declared(cache, good)
        with pytest.raises(ConfigError, match="'thing': taken already"):
            declared(cache, good)

    @pytest.mark.parametrize("name", ["", "Price", "1st", "a-b", "post_ttl", "sqlite_x", "é"])
    async def test_a_bad_name(self, cache: Cache, name: str) -> None:
        """It names a table."""
        with pytest.raises(ConfigError, match=r"resource name .*lower-case word"):
            cache.batched(name, fresh_for=1)

    async def test_a_method(self, cache: Cache) -> None:
        """Refused by its `self`, with what to write instead; a bound method is fine."""
        with pytest.raises(ConfigError, match=r"is a method; .*__init__"):

            class Shop:
                @cache.batched("shop", fresh_for=1)  # type: ignore[arg-type]
                async def prices(self, keys: list[str]) -> dict[str, int]:
                    return dict.fromkeys(keys, 1)

        class Store:
            def __init__(self) -> None:
                self.prices = cache.batched("bound", fresh_for=1)(self._load)

            async def _load(self, keys: list[str]) -> dict[str, int]:
                return dict.fromkeys(keys, 7)

        assert await Store().prices("a") == 7

    async def test_a_resource_in_a_class(self, cache: Cache) -> None:
        """Decorated in a class body, without `self`: every instance would share it unawares."""
        with pytest.raises((ConfigError, RuntimeError)) as caught:

            class Shop:
                @cache.cached("static", fresh_for=1)
                async def one() -> int:
                    return 1

        error = caught.value.__cause__ or caught.value
        assert "Shop.one is a method" in str(error)

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "prices.db",
            "sqlite://",
            "sqlite:///",
            "sqlite://host/x",
            "memory://x",
            "mysql://a/b",
        ],
    )
    def test_an_address_of_no_store(self, url: str) -> None:
        """The error shows what is allowed."""
        with pytest.raises(ConfigError, match=r"store '.*': .*memory:// or sqlite:///"):
            Cache(url)

    async def test_a_type_that_cannot_be_stored(self, cache: Cache) -> None:
        """Known when it is declared."""

        @cache.batched("fine", fresh_for=1)
        async def fine(keys: list[str]) -> dict[str, set[int]]:
            return {key: {1} for key in keys}

        assert await fine("a") == {1}

        async def impossible(keys: list[str]) -> dict[str, int | str | list[int] | set[int]]:
            return dict.fromkeys(keys, 1)

        with pytest.raises(ConfigError, match=r"thing: cannot store values of type .*codec="):
            declared(cache, impossible)

    async def test_declaring_after_opening_works(self, cache: Cache, upstream: Upstream) -> None:
        """A resource may come late."""
        await cache.open()
        assert (await declare(cache, upstream)("a")).version == 1
