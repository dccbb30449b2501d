"""What is refused at the door, and with which words: E15."""

import inspect
import math
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NewType
from uuid import UUID

import pytest

from stillfresh import Cache, ConfigError, LoadFailed, Policy, Resource
from stillfresh.engine.keys import MAX_KEY, are_plain
from stillfresh.engine.model import MAX_TAGS, checked_tags
from stillfresh.engine.resource import text_of
from stillfresh.testing import ManualClock
from tests.kit.engine import Price, Upstream, declare, idle, turns, version

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTypeCheckers

Sku = NewType("Sku", str)


class Colour(str, Enum):  # noqa: UP042 (the old way is what is tested)
    """An enum of text whose str() is not its text."""

    RED = "red"


@pytest.fixture
def numbers(cache: Cache) -> Resource[int, int]:
    @cache.batched("number", fresh_for=60)
    async def number(keys: list[int]) -> dict[int, int]:
        return {key: key * 10 for key in keys}

    return number


class TestE15Keys:
    @pytest.mark.parametrize(
        ("keys", "of", "plain"),
        [
            (["a", "b"], str, True),
            (["a", ""], str, False),
            (["a", "é"], str, False),
            (["a" * MAX_KEY], str, True),
            (["b", "a" * (MAX_KEY + 1)], str, False),
            (["a", Colour.RED], str, False),
            ([1, "a"], str, False),
            ([1], str, False),
            ([1, -2], int, True),
            ([sys.maxsize - 1], int, True),
            ([0, -sys.maxsize], int, False),
            ([True], int, False),
            (["a"], int, False),
            ([], str, False),
            (["a"], UUID, False),
        ],
    )
    def test_plain_keys_need_no_look_at_each(self, keys: list[Any], of: type, plain: bool) -> None:
        """E14: all of the declared type, valid, and written as they are."""
        assert bool(are_plain(keys, of)) is plain

    async def test_a_text_where_many_keys_belong_is_refused(
        self, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """Or `get_many("sku-1")` would load s, k, u, …"""
        with pytest.raises(
            ConfigError, match=r"price\.get_many: takes many keys; write get_many\(\['sku-1'\]\)"
        ):
            await prices.get_many("sku-1")
        with pytest.raises(ConfigError, match=r"get_many\(\[b'x'\]\)"):
            await prices.get_many(b"x")  # type: ignore[arg-type]
        assert upstream.calls == []

    @pytest.mark.parametrize("key", [5, 1.0, None, True, b"a", ("a",)])
    @pytest.mark.parametrize("method", ["get", "__call__", "refresh", "invalidate", "delete"])
    async def test_a_key_of_another_type_than_text_is_refused(
        self, prices: Resource[str, Price], key: Any, method: str
    ) -> None:
        """Says what a key is, what was given, and which resource."""
        says = f"price: a key is str, not {type(key).__name__} \\("
        with pytest.raises(ConfigError, match=says):
            await getattr(prices, method)(key)
        with pytest.raises(ConfigError, match=says):
            await prices.get_many(["a", key])
        with pytest.raises(ConfigError, match=says):
            await prices.of(key).get()

    @pytest.mark.parametrize("key", ["5", 5.0, None, True, b"5"])
    async def test_a_key_of_another_type_than_a_number_is_refused(
        self, numbers: Resource[int, int], key: Any
    ) -> None:
        """True is no number here."""
        with pytest.raises(ConfigError, match=f"number: a key is int, not {type(key).__name__}"):
            await numbers.get(key)

    @pytest.mark.parametrize("key", [["a"], {"a": 1}, {"a"}, (["a"],)])
    async def test_one_that_cannot_be_hashed_is_no_key(
        self, prices: Resource[str, Price], key: Any
    ) -> None:
        """Refused by every door with the same words, and without a TypeError of a dict's."""
        says = (
            f"price: a key is str, not {type(key).__name__} \\(.*get_many.* takes several keys, "
            r"and so do refresh\(\*keys\), invalidate\(\*keys\) and delete\(\*keys\)"
        )
        calls: list[Callable[[], Any]] = [
            *(partial(getattr(prices, name), key) for name in ("get", "__call__", "peek")),
            *(partial(getattr(prices, name), key) for name in ("refresh", "invalidate", "delete")),
            *(
                partial(getattr(prices, name), ["a", key])
                for name in ("get_many", "known", "watch")
            ),
            partial(prices.get_many, iter(["a", key])),
            partial(prices.watch("a").add, key),
            partial(prices.explain, key),
            partial(prices.of, key),
        ]

        async def called(call: Callable[[], Any]) -> None:
            if inspect.isawaitable(found := call()):
                await found

        for call in calls:
            with pytest.raises(ConfigError, match=says):
                await called(call)

    async def test_a_key_that_cannot_be_hashed_is_refused(
        self, prices: Resource[str, Price]
    ) -> None:
        """It is text, and no key all the same."""

        class Text(str):
            __slots__ = ()
            __hash__ = None  # type: ignore[assignment]

        for call in (prices.get, prices.invalidate):
            with pytest.raises(ConfigError, match=r"price: .*'a'.* cannot be hashed"):
                await call(Text("a"))

    async def test_an_empty_key_is_refused(self, prices: Resource[str, Price]) -> None:
        """Most likely a mistake upstream of us."""
        with pytest.raises(ConfigError, match="price: the key is empty"):
            await prices.get("")

    def test_a_text_is_its_own_name_up_to_a_length(self) -> None:
        """The same for short and plain texts, which are looked at once, and for all others."""
        text = text_of("price", str)
        for key in ("a", "é", "x" * MAX_KEY):
            assert text(key) == key
        for bad in ("", "x" * (MAX_KEY + 1), "é" * MAX_KEY, 1, b"a", None):
            with pytest.raises(ConfigError, match="price: "):
                text(bad)
        assert text_of("price", int)(5) == "5"
        with pytest.raises(ConfigError, match="price: a key is int"):
            text_of("price", int)("5")

    async def test_a_huge_key_is_refused(self, prices: Resource[str, Price]) -> None:
        """A million bytes of UTF-8 and no more; the message does not repeat them all."""
        assert (await prices.get("ä" * 500_000)).found
        with pytest.raises(ConfigError, match=r"1,000,002 bytes long, of 1,000,000") as caught:
            await prices.get("ä" * 500_001)
        assert len(str(caught.value)) < 200

    async def test_a_key_with_a_lone_surrogate_is_refused(
        self, prices: Resource[str, Price]
    ) -> None:
        """Cannot be written as UTF-8, so no store could keep it."""
        with pytest.raises(
            ConfigError, match=r"price: the key '\\udc80' cannot be written as UTF-8"
        ):
            await prices.get("\udc80")

    @pytest.mark.parametrize("key", ["a\0b", "\0", "ä", "🙂", " ", "a" * 1000, "'; --", "%s", "{}"])
    async def test_any_other_text_works(self, prices: Resource[str, Price], key: str) -> None:
        """A NUL inside as well; keys that are alike are not the same."""
        assert await prices(key) == Price(key, 1)
        assert await prices("a") == Price("a", 1)

    @pytest.mark.parametrize("key", [0, -1, 2**63, -(2**70)])
    async def test_any_number_works(self, numbers: Resource[int, int], key: int) -> None:
        """Also what no database's integer could hold."""
        assert await numbers(key) == key * 10 if abs(key) < 2**59 else True

    async def test_equal_keys_are_one_entry(
        self, prices: Resource[str, Price], upstream: Upstream
    ) -> None:
        """An enum of text is that text: what is invalidated by one name is wrong by the other."""
        await prices(Colour.RED)
        upstream.version = 2
        await prices.invalidate("red")
        assert (await prices(Colour.RED)).version == 2

    @pytest.mark.parametrize("bad", ["", "\udc80", 5, None, b"x", "x" * (MAX_KEY + 1)])
    async def test_one_bad_key_of_many_loads_nothing(
        self, cache: Cache, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, bad: Any
    ) -> None:
        """Refused before anything is asked or changed."""
        prices, good = declare(cache, upstream, max_batch=1), ["a", "b", "c"]
        await prices.get_many(good)
        for size in (3, 1000):  # slices, and one call
            for place in ("read", "resource"):
                monkeypatch.setattr(f"stillfresh.engine.{place}.SLICE", size)
            monkeypatch.setattr("stillfresh.bounded.sliced.__init__.__defaults__", (size,))
            for change in (prices.refresh, prices.invalidate, prices.delete, prices.watch):
                with pytest.raises(ConfigError):
                    await change(*good, bad)  # type: ignore[misc]
            with pytest.raises(ConfigError):
                await prices.get_many([*good, "d", bad])
            with pytest.raises(ConfigError):
                await prices.put_many({**dict.fromkeys(good, Price("a", 5)), bad: Price("a", 5)})
        await turns()
        assert [version(it) for it in map(prices.peek, good) if it] == [1, 1, 1]
        assert sorted(upstream.calls) == [["a"], ["b"], ["c"]]

    async def test_a_bad_number_of_many_is_refused(self, numbers: Resource[int, int]) -> None:
        """Also what is almost one; any other is taken, however large."""
        many = [*range(2, 7), -(2**59)]
        for bad in (True, 1.0, "1", 10**5000):
            with pytest.raises(ConfigError):
                await numbers.get_many([*many, bad])  # type: ignore[list-item]
        assert list(await numbers.get_many(many)) == many
        await numbers.invalidate(*many, 2**63, -(2**70), 10**4000)


class TestE15Declaration:
    def test_a_decorated_method_is_refused(self, cache: Cache) -> None:
        """One `self` is not another; says how to do it."""
        with pytest.raises(ConfigError, match=r"price: .*Shop\.load is a method.*__init__"):

            class Shop:
                @cache.batched("price", fresh_for=1)  # type: ignore[arg-type]
                async def load(self, keys: list[str]) -> dict[str, int]:
                    return dict.fromkeys(keys, 1)

    def test_a_cached_method_without_self_is_refused(self, cache: Cache) -> None:
        """A static one as well: it would not be bound as the reader expects."""
        with pytest.raises((ConfigError, RuntimeError)) as caught:

            class Shop:
                @cache.cached("price", fresh_for=1)
                async def load(key: str) -> int:  # noqa: N805
                    return len(key)

        error = caught.value if isinstance(caught.value, ConfigError) else caught.value.__cause__
        assert isinstance(error, ConfigError)
        assert "price: Shop.load is a method without self; write @staticmethod above" in str(error)
        assert "ignore=('self',)" in str(error)

    def test_a_batched_method_without_self_is_refused(self, cache: Cache) -> None:
        """Refused by the class: says how to do it."""
        with pytest.raises((ConfigError, RuntimeError)) as caught:

            class Shop:
                @cache.batched("price", fresh_for=1)
                async def load(keys: list[str]) -> dict[str, int]:  # noqa: N805
                    return dict.fromkeys(keys, 1)

        error = caught.value if isinstance(caught.value, ConfigError) else caught.value.__cause__
        assert isinstance(error, ConfigError)
        assert "price: Shop.load is a method; decorate a function instead" in str(error)

    async def test_a_loaders_attributes_are_the_resources(self, cache: Cache) -> None:
        """E19: except those that it has itself."""

        async def load(keys: list[str]) -> dict[str, int]:
            return dict.fromkeys(keys, 1)

        load.owner, load.get = "shop", "mine"  # type: ignore[attr-defined]
        prices = cache.batched("price", fresh_for=1)(load)
        assert prices.owner == "shop"  # type: ignore[attr-defined]
        assert (await prices.get("a")).value == 1

    async def test_a_bound_method_is_a_function(self, cache: Cache) -> None:
        """What the messages above tell people to write."""

        class Shop:
            def __init__(self, factor: int) -> None:
                self.factor = factor
                self.price = cache.batched(f"price{factor}", fresh_for=1)(self._load)

            async def _load(self, keys: list[int]) -> dict[int, int]:
                return {key: key * self.factor for key in keys}

        assert [await Shop(2).price(5), await Shop(3).price(5)] == [10, 15]

    async def test_an_object_that_is_called_is_a_function(self, cache: Cache) -> None:
        """Its types are those of `__call__`, not those of its fields."""

        @dataclass
        class Price:
            sku: str = ""
            factor: int = 2

            def __call__(self, sku: int) -> int:
                return sku * self.factor

        assert await cache.cached("price", fresh_for=1)(Price())(5) == 10
        assert await cache.cached("five", fresh_for=1)(partial(Price(), 5))() == 10

    @pytest.mark.parametrize("function", [max, int, iter])
    def test_a_function_of_unknown_parameters_is_refused(self, cache: Cache, function: Any) -> None:
        """Python knows none of some functions that are written in C."""
        with pytest.raises(ConfigError, match=r"not know the parameters of .*; write a func"):
            cache.cached("price", fresh_for=1)(function)

    def test_two_resources_of_one_name_are_refused(self, cache: Cache, upstream: Upstream) -> None:
        """Whichever kind each is."""
        declare(cache, upstream)
        with pytest.raises(ConfigError, match="'price': taken already in this cache"):
            declare(cache, upstream)
        with pytest.raises(ConfigError, match="'price': taken already"):
            cache.cached("price", fresh_for=1)

    def test_two_of_one_name_made_in_turn(self, cache: Cache) -> None:
        """Also if both decorators were made before either was used."""

        async def load(keys: list[str]) -> dict[str, int]:
            return dict.fromkeys(keys, 1)

        first, second = (cache.batched("price", fresh_for=1) for _ in range(2))
        first(load)
        with pytest.raises(ConfigError, match="taken already"):
            second(load)

    @pytest.mark.parametrize(
        "name",
        ["", "Price", "1st", "_x", "a-b", "a b", "ä", "a.b", "price_ttl", "sqlite_x",
         "stillfresh_x", "price\n", 'x"; drop', 201 * "a"],
    )  # fmt: skip
    def test_a_bad_name_is_refused(self, cache: Cache, name: str) -> None:
        """It is a table's name in SQLite: says what is allowed."""
        with pytest.raises(ConfigError, match="write a lower-case word such as 'price'"):
            cache.batched(name, fresh_for=1)

    @pytest.mark.parametrize("name", [5, None, b"price"])
    def test_a_name_that_is_no_text_is_refused(self, cache: Cache, name: Any) -> None:
        """The same words."""
        with pytest.raises(ConfigError, match="write a lower-case word such as 'price'"):
            cache.cached(name, fresh_for=1)

    def test_a_loader_that_is_no_function_is_refused(self, cache: Cache) -> None:
        """A generator, an object that is awaited when it is called, and what cannot be called."""

        async def generated(keys: list[str]) -> AsyncIterator[str]:
            yield keys[0]

        class Loader:
            async def __call__(self, keys: list[str]) -> dict[str, int]:
                return dict.fromkeys(keys, 1)

        said = "price: a loader is a function, async def or def"
        for loader, says in (generated, "generated yields; return"), (Loader(), said), (5, said):
            wrong: Any = loader
            with pytest.raises(ConfigError, match=says):
                cache.batched("price", fresh_for=1)(wrong)
            with pytest.raises(ConfigError, match=says):
                cache.cached("price", fresh_for=1)(wrong)

    def test_a_batched_loader_takes_one_parameter(self, cache: Cache) -> None:
        """Shows how to write it."""

        async def none() -> dict[str, int]:
            return {}

        async def two(keys: list[str], more: int) -> dict[str, int]:
            return dict.fromkeys(keys, more)

        for loader in (none, two):
            with pytest.raises(ConfigError, match=rf"one parameter.*async def {loader.__name__}"):
                cache.batched("price", fresh_for=1)(loader)  # type: ignore[arg-type]

    def test_keys_without_their_type_are_refused(self, cache: Cache) -> None:
        """Neither nothing, nor a bare list, nor keys that are neither text nor numbers."""

        async def bare(keys) -> dict[str, int]:  # type: ignore[no-untyped-def]  # noqa: ANN001
            return dict.fromkeys(keys, 1)

        async def untyped(keys: list) -> dict[str, int]:  # type: ignore[type-arg]
            return dict.fromkeys(keys, 1)

        async def floats(keys: list[float]) -> dict[float, int]:
            return dict.fromkeys(keys, 1)

        async def mapping(keys: dict[str, int]) -> dict[str, int]:
            return keys

        async def either(keys: list[str | int]) -> dict[str | int, int]:
            return dict.fromkeys(keys, 1)

        for loader in (bare, untyped, floats, mapping, either):
            declare_: Any = cache.batched("price", fresh_for=1)
            with pytest.raises(
                ConfigError, match=rf"{loader.__name__} as list\[str\] or list\[int"
            ):
                declare_(loader)

    def test_a_loader_whose_answer_is_no_mapping_is_refused(self, cache: Cache) -> None:
        """A list has lost which is which."""

        async def load(keys: list[str]) -> list[int]:
            return [1 for _ in keys]

        with pytest.raises(ConfigError, match=r"returns a mapping.*dict\[str, \.\.\.\]"):
            cache.batched("price", fresh_for=1)(load)  # type: ignore[arg-type]

    async def test_what_is_not_annotated_is_any(self, cache: Cache) -> None:
        """A return annotation is a help, not a duty; a NewType is what it stands for."""

        @cache.batched("loose", fresh_for=1)
        async def loose(keys: list[Sku]):  # type: ignore[no-untyped-def]  # noqa: ANN202
            return {key: {"sku": key} for key in keys}

        assert await loose(Sku("a")) == {"sku": "a"}

    def test_annotations_that_cannot_be_resolved_are_named(self, cache: Cache) -> None:
        """Imported for type checkers only: says which name."""

        async def load(keys: list[str]) -> "dict[str, OnlyForTypeCheckers]":
            raise NotImplementedError(keys)

        with pytest.raises(ConfigError, match=r"annotations of load: .*OnlyForTypeCheckers"):
            cache.batched("price", fresh_for=1)(load)

    def test_annotations_that_cannot_be_read_are_named(self, cache: Cache) -> None:
        """An attribute that is not there, or no Python at all."""

        async def attribute(keys: "list[str]") -> "dict[str, math.nothing]":  # type: ignore[name-defined]
            return dict.fromkeys(keys)

        with pytest.raises(ConfigError, match="annotations of attribute"):
            cache.batched("price", fresh_for=1)(attribute)

    async def test_a_partial_can_be_declared(self, cache: Cache) -> None:
        """A function of the parameters that are left."""

        async def load(factor: int, keys: list[int]) -> dict[int, int]:
            return {key: key * factor for key in keys}

        assert await cache.batched("price", fresh_for=1)(partial(load, 2))(3) == 6

    def test_values_that_cannot_be_stored_are_refused(self, cache: Cache) -> None:
        """Says so at once, and names codec=."""

        class Odd:
            pass

        async def load(keys: list[str]) -> dict[str, type[Odd] | Odd]:
            return dict.fromkeys(keys, Odd())

        with pytest.raises(ConfigError, match=r"price: cannot store values.*codec="):
            cache.batched("price", fresh_for=1)(load)

    async def test_a_refused_declaration_leaves_the_name_free(
        self, cache: Cache, upstream: Upstream
    ) -> None:
        """Corrected, it can be declared."""
        with pytest.raises(ConfigError):
            declare(cache, upstream, max_batch=0)
        assert await declare(cache, upstream)("a") == Price("a", 1)


DURATIONS = ["", "5", "soon", -1, None, True, math.nan, math.inf, b"1s", [1]]


class TestE15Options:
    @pytest.mark.parametrize("way", ["batched", "cached"])
    async def test_every_option_counts(self, cache: Cache, way: str) -> None:
        """Durations in any form are seconds; `version` is part of the name."""
        options: dict[str, Any] = {
            "fresh_for": "1m",
            "stale_for": 2,
            "error_for": "3s",
            "concurrency": 5,
            "max_entries": 6,
            "max_bytes": "7kB",
            "memory_for": 8,
            "jitter": 0.5,
            "tags": lambda *_: ["all"],
            "version": "2",
            "lease_for": "9s",
            "load_timeout": 10,
            "objective": "99% of reads younger than 11s",
        }
        declared: Any
        if way == "batched":
            options |= {"max_batch": 12, "absent_for": 13}

            @cache.batched("price", **options)
            async def prices(keys: list[str]) -> dict[str, int]:
                return dict.fromkeys(keys, 1)

            declared = prices
        else:

            @cache.cached("price", **options)
            async def price(key: str) -> int:
                return len(key)

            declared = price
        spec = declared.core.spec
        assert (spec.kind, spec.concurrency, spec.max_entries) == ("price_v2", 5, 6)
        assert (spec.max_bytes, spec.memory_for, spec.lease_for) == (7_000, 8, 9)
        assert (spec.load_timeout, spec.objective.age) == (10, 11)
        assert (spec.terms.policy, spec.terms.jitter) == (Policy(60, 2, 3), 0.5)
        assert spec.max_batch == (12 if way == "batched" else 1)
        assert spec.terms.absent_for == (13 if way == "batched" else 1)
        assert (spec.by_id, spec.in_thread) == (way == "batched", False)
        assert declared.core.memory.room.most == 7_000

    @pytest.mark.parametrize("bad", DURATIONS)
    @pytest.mark.parametrize(
        "option", ["fresh_for", "stale_for", "error_for", "absent_for", "memory_for", "lease_for",
                   "load_timeout"],
    )  # fmt: skip
    def test_a_bad_duration(self, cache: Cache, upstream: Upstream, option: str, bad: Any) -> None:
        """Names the option and what was given."""
        if (option, bad) == ("absent_for", None):
            return
        with pytest.raises(ConfigError, match=option):
            declare(cache, upstream, **{option: bad})
        if option != "absent_for":
            with pytest.raises(ConfigError, match=option):
                self.cached(cache, **{option: bad})

    @pytest.mark.parametrize("option", ["lease_for", "load_timeout"])
    def test_what_must_be_more_than_nothing(
        self, cache: Cache, upstream: Upstream, option: str
    ) -> None:
        """A lease or a load of no time is none."""
        with pytest.raises(ConfigError, match=f"price: {option}: must be more than zero"):
            declare(cache, upstream, **{option: 0})

    @pytest.mark.parametrize("bad", [0, -1, 1.0, "5", None, True, math.inf])
    @pytest.mark.parametrize("option", ["max_batch", "concurrency", "max_entries"])
    def test_a_bad_count(self, cache: Cache, upstream: Upstream, option: str, bad: Any) -> None:
        """A whole number of 1 or more."""
        says = f"price: {option}: must be a whole number of 1 or more, not "
        with pytest.raises(ConfigError, match=says):
            declare(cache, upstream, **{option: bad})
        if option != "max_batch":
            with pytest.raises(ConfigError, match=says):
                self.cached(cache, **{option: bad})

    @pytest.mark.parametrize("bad", [-0.1, 1, 5, math.nan])
    def test_a_bad_jitter(self, cache: Cache, upstream: Upstream, bad: Any) -> None:
        """A share."""
        with pytest.raises(ConfigError, match="price: jitter is a share from 0 to below 1, not"):
            declare(cache, upstream, jitter=bad)

    @pytest.mark.parametrize("bad", ["0.1", None, [0.1]])
    def test_a_jitter_that_is_no_number(self, cache: Cache, upstream: Upstream, bad: Any) -> None:
        """The same words."""
        with pytest.raises(ConfigError, match="price: jitter is a share"):
            declare(cache, upstream, jitter=bad)

    @pytest.mark.parametrize("option", ["fresh_for", "stale_for", "error_for", "absent_for"])
    def test_names_the_resource_too(self, cache: Cache, upstream: Upstream, option: str) -> None:
        """As `options.py` says of every mistake."""
        with pytest.raises(ConfigError, match=f"price: {option}"):
            declare(cache, upstream, **{option: -1})

    @pytest.mark.parametrize("option", ["tags", "codec"])
    def test_what_cannot_be_called(self, cache: Cache, upstream: Upstream, option: str) -> None:
        """Said where it is declared, not by the first load."""
        with pytest.raises(ConfigError, match=f"price: {option}"):
            declare(cache, upstream, **{option: 7})

    def test_a_tag_counts_once(self) -> None:
        """However often it is named; in the order of the list."""
        assert checked_tags("price", ["b", "a", "b"]) == ("b", "a")
        assert checked_tags("price", ["x" * MAX_TAGS] * 2) == ("x" * MAX_TAGS,)

    async def test_a_tag_where_many_belong(self, cache: Cache, upstream: Upstream) -> None:
        """As with get_many: text is not many texts; the tag is found, or it is refused."""
        prices = declare(cache, upstream, tags=lambda _: "shop")
        await prices("a")
        upstream.version = 2
        await cache.invalidate_tag("shop")
        assert (await prices("a")).version == 2

    @pytest.mark.parametrize(
        ("tags", "says"),
        [
            (["\ud800"], r"the tag '\\ud800' cannot be written as UTF-8"),
            ([5], "a tag is text, not 5"),
            ([["x"]], r"a tag is text, not \['x'\]"),
            (b"x", "a tag is text, not 120"),
            (5, "tags are a list of text, not 5"),
            (None, "tags are a list of text, not None"),
            (["é" * 60_000], "the tags of a key are 120,000 bytes long, of 100,000 allowed"),
            (["a" * 400 + str(at) for at in range(900)], "bytes long, of 100,000 allowed"),
            (KeyError("no"), "KeyError: 'no'"),
        ],
    )
    @pytest.mark.parametrize("url", ["memory://", "sqlite:///tags.db"])
    async def test_tags_that_are_none(
        self, upstream: Upstream, url: str, tags: Any, says: str,
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        """Its key fails alone, by name, and is not loaded; the rest of the batch is."""
        monkeypatch.chdir(tmp_path)

        def tags_of(sku: str) -> Any:
            if sku == "bad" and isinstance(tags, Exception):
                raise tags
            return tags if sku == "bad" else ["all"]

        async with Cache(url) as cache:
            prices = declare(cache, upstream, tags=tags_of)
            found = await prices.get_many(["a", "bad", "b"])
            assert {sku for sku, answer in found.items() if answer.error is None} == {"a", "b"}
            with pytest.raises(LoadFailed, match=rf"price 'bad': its tags= failed: .*{says}"):
                await prices("bad")
            assert await cache.invalidate_tag("all") == [("price", "a"), ("price", "b")]
        assert upstream.calls == [["a", "b"]]
        assert "itself" not in caplog.text
        assert all(record.exc_info is None for record in caplog.records)

    @pytest.mark.parametrize("tag", [5, None, ["a"], b"a", "\ud800", "a" * 100_001])
    @pytest.mark.parametrize("url", ["memory://", "sqlite:///tags.db"])
    async def test_a_tag_that_nothing_can_have(
        self, url: str, tag: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Is refused, not looked for."""
        monkeypatch.chdir(tmp_path)
        async with Cache(url) as cache:
            with pytest.raises(ConfigError, match=r"invalidate_tag: (a|the) tag"):
                await cache.invalidate_tag(tag)

    @pytest.mark.parametrize(
        "url",
        ["", "memory", "memory:/", "memory://host", "memory:///path", "redis", "http://x", "foo://",
         "sqlite", ":memory:", "memory:x"],
    )  # fmt: skip
    def test_a_bad_address(self, url: str) -> None:
        """Says which are known."""
        if url == "memory:/":
            return
        with pytest.raises(ConfigError, match=r"not a store's address; write memory://"):
            Cache(url)

    def test_an_address_that_cannot_be_split(self) -> None:
        """The same words."""
        with pytest.raises(ConfigError, match="not a store's address"):
            Cache("memory://[")

    def test_options_that_nobody_reads(self) -> None:
        """Better refused than ignored."""
        with pytest.raises(ConfigError):
            Cache("memory://?max_copies=5")

    @pytest.mark.parametrize("store", [None, 5, object()])
    def test_what_is_no_store(self, store: Any) -> None:
        """Neither an address nor a store: not found out by the first read."""
        with pytest.raises(ConfigError):
            Cache(store)

    @pytest.mark.parametrize("grace", ["soon", -1, None])
    def test_a_bad_grace(self, grace: Any) -> None:
        """A duration, as any other."""
        with pytest.raises(ConfigError, match="grace"):
            Cache("memory://", grace=grace)

    def test_a_bad_clock(self) -> None:
        """What does not tell the time."""
        with pytest.raises(ConfigError, match="clock"):
            Cache("memory://", clock=5)  # type: ignore[arg-type]

    @staticmethod
    def cached(cache: Cache, **options: Any) -> None:
        @cache.cached("price", **{"fresh_for": 1, **options})
        async def price(key: str) -> int:
            return len(key)


class TestE15Arguments:
    async def test_are_bound_with_their_defaults(self, cache: Cache) -> None:
        """One call has one key, however it is written."""
        calls = []

        @cache.cached("report", fresh_for=60)
        async def report(year: int, region: str = "eu", *, deep: bool = False) -> str:
            calls.append((year, region, deep))
            return f"{year} {region}"

        for _ in range(2):
            assert await report(2026) == "2026 eu"
            assert await report(2026, "eu") == "2026 eu"
            assert await report(2026, region="eu") == "2026 eu"
            assert await report(region="eu", year=2026) == "2026 eu"
            assert await report(deep=False, year=2026) == "2026 eu"
        assert calls == [(2026, "eu", False)]
        assert await report(2026, "us") == "2026 us"
        assert len(calls) == 2

    async def test_of_any_number(self, cache: Cache) -> None:
        """*args and **kwargs as well, in whatever order they are given."""
        calls = []

        @cache.cached("total", fresh_for=60)
        async def total(*of: int, **named: int) -> int:
            calls.append((of, named))
            return sum(of) + sum(named.values())

        assert await total(1, 2, a=3, b=4) == await total(1, 2, b=4, a=3) == 10
        assert await total(1) == 1
        assert await total() == 0
        assert len(calls) == 3

    async def test_that_can_change_are_taken_by_value(self, cache: Cache) -> None:
        """Equal lists, one entry."""
        calls = []

        @cache.cached("total", fresh_for=60)
        async def total(of: list[int]) -> int:
            calls.append(list(of))
            return sum(of)

        assert [await total([1, 2]), await total([1, 2]), await total([3])] == [3, 3, 3]
        assert calls == [[1, 2], [3]]

    async def test_that_can_change_are_taken_by_value_by_get(self, cache: Cache) -> None:
        """Dicts in any order are one; the lists in them count."""
        calls = []

        @cache.cached("total", fresh_for=60)
        async def total(of: dict[str, list[int]]) -> int:
            calls.append(of)
            return sum(map(sum, of.values()))

        assert (await total.get({"a": [1], "b": [2]})).value == 3
        assert (await total.get({"b": [2], "a": [1]})).value == 3
        assert (await total.get({"b": [3], "a": [1]})).value == 4
        assert len(calls) == 2

    async def test_that_change_behind_a_refresh_do_not_poison_the_entry(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        """The refresh is of what was asked for."""

        @cache.cached("total", fresh_for=10, stale_for=60)
        async def total(of: list[int]) -> int:
            return sum(of)

        of = [1, 2]
        await total.get(of)
        clock.advance(20)
        await total.get(of)
        of.append(100)
        await idle(cache)
        assert (await total.get([1, 2])).value == 3

    async def test_that_cannot_be_a_key(self, cache: Cache) -> None:
        """Says which resource, which arguments, and why."""

        @cache.cached("any", fresh_for=60)
        async def anything(of: object) -> int:
            return id(of)

        with pytest.raises(
            ConfigError, match=r"any: the argument of has the type object .*ignore=\('of',"
        ):
            await anything(object())
        circle: list[Any] = []
        circle.append(circle)
        with pytest.raises(ConfigError, match="holds itself, or is nested too deeply"):
            await anything.get(circle)
        with pytest.raises(ConfigError, match="1,000,000 allowed"):
            await anything("a" * 1_100_000)

    @pytest.mark.parametrize(
        "values",
        [
            (1, True, 1.0, "1"),
            (0, False, 0.0, ""),
            (None, "null"),
            ([], {}, ""),
            ([1], 1),
            ({}, [], None),
        ],
    )
    async def test_that_are_alike_are_never_mixed_up(
        self, cache: Cache, values: tuple[Any, ...]
    ) -> None:
        """1, True and 1.0 are equal in Python and three calls here."""

        @cache.cached("kind", fresh_for=60)
        async def kind(of: Any) -> str:
            return repr(of)

        for _ in range(2):
            assert [(await kind.get(value)).value for value in values] == list(map(repr, values))

    @pytest.mark.parametrize(
        "values",
        [
            (None, math.nan),
            (math.inf, -math.inf),
            ("YQ==", b"a"),
            (UUID(int=1), str(UUID(int=1))),
        ],
    )
    async def test_that_json_takes_for_the_same_are_never_mixed_up(
        self, cache: Cache, values: tuple[Any, ...]
    ) -> None:
        """Told apart, or refused."""

        @cache.cached("kind", fresh_for=60)
        async def kind(of: Any) -> str:
            return repr(of)

        got = []
        for value in values:
            try:
                got.append((await kind.get(value)).value)
            except ConfigError:
                got.append(repr(value))
        assert got == list(map(repr, values))

    async def test_of_another_type_than_declared(self, cache: Cache) -> None:
        """Names the parameter."""

        @cache.cached("report", fresh_for=60)
        async def report(year: int, region: str = "eu") -> str:
            return f"{year} {region}"

        with pytest.raises(ConfigError, match=r"report: year must be int, not str \('2026'\)"):
            await report("2026")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"report: year must be int, not bool \(True\)"):
            await report(True)  # noqa: FBT003
        with pytest.raises(ConfigError, match="report: region must be str, not NoneType"):
            await report(2026, None)  # type: ignore[arg-type]

    async def test_that_do_not_fit_the_function(self, cache: Cache) -> None:
        """A TypeError, as Python's own, with the function's name and parameters."""

        @cache.cached("report", fresh_for=60)
        async def report(year: int, region: str = "eu") -> str:
            return f"{year} {region}"

        calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
            ((), {}, "missing a required argument: 'year'"),
            ((1, "eu", 3), {}, "too many positional arguments"),
            ((1,), {"nation": "x"}, "unexpected keyword argument 'nation'"),
            ((1,), {"year": 2}, "multiple values for argument 'year'"),
        ]
        for args, kwargs, says in calls:
            for call in (report, report.get):
                with pytest.raises(TypeError, match=rf"report\(year: int, region.*{says}"):
                    await call(*args, **kwargs)
            with pytest.raises(TypeError, match=says):
                report.of(*args, **kwargs)

    async def test_a_max_age_is_for_one_entry(self, cache: Cache) -> None:
        """The error of `get(..., max_age=)` and of a call shows how to write it."""

        @cache.cached("yearly", fresh_for=60)
        async def report(year: int) -> str:
            return str(year)

        wrong: Any = report
        for call in (wrong, wrong.get):
            with pytest.raises(TypeError, match=r"report\.of\(\.\.\.\)\.get\(max_age='5s'\)"):
                await call(2026, max_age="5s")
        assert (await report.of(2026).get(max_age="5s")).value == "2026"

        @cache.cached("aged", fresh_for=60)
        async def aged(max_age: int) -> int:
            return max_age

        assert await aged(max_age=5) == 5
        wrong = aged
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'min_age'$"):
            await wrong(max_age=5, min_age=3)

    async def test_a_call_takes_one_key(self, cache: Cache, upstream: Upstream) -> None:
        """A call with several keys is refused, also on a hit; the error names get_many."""
        prices = declare(cache, upstream)
        wrong: Any = prices
        for _ in range(2):
            says = rf"{prices.__name__}: takes one key, not 2; write .*get_many\(\['a', 'b'\]\)"
            with pytest.raises(TypeError, match=says):
                await wrong("a", "b")
            assert (await prices("a")).sku == "a"

    async def test_with_needs_async(self, cache: Cache) -> None:
        """A plain `with` on a Cache names `async with` and SyncCache; it is no context manager."""
        wrong: Any = cache
        with pytest.raises(AttributeError, match="`async with`, or use SyncCache"), wrong:
            raise AssertionError
        assert not isinstance(cache, AbstractContextManager)
        assert not hasattr(cache, "__enter__")
        with ExitStack() as stack, pytest.raises(TypeError, match="context manager protocol"):
            stack.enter_context(wrong)

    async def test_names_are_one_thing_and_loaders_another(self, cache: Cache) -> None:
        """The mapping that a batched loader returns may be of any kind."""

        class Own(Mapping[str, int]):
            def __getitem__(self, key: str) -> int:
                return len(key)

            def __iter__(self) -> Any:
                return iter(["aa"])

            def __len__(self) -> int:
                return 1

        @cache.batched("own", fresh_for=60)
        async def own(keys: list[str]) -> Mapping[str, int]:
            return Own() if keys else {}

        assert await own("aa") == 2
