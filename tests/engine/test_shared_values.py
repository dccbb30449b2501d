"""E32: values that callers cannot spoil."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import json
from pydantic import BaseModel

from stillfresh import (
    Amended,
    Answer,
    Cache,
    ConfigError,
    Loaded,
    SyncCache,
    Update,
    encrypted,
    new_key,
)
from stillfresh.engine import cache as cache_module
from stillfresh.testing import ManualClock, unchanged_values
from tests.kit.engine import until


class Model(BaseModel):
    tags: list[str]


@dataclass
class Item:
    tags: list[str] = field(default_factory=list)


VALUES: list[Any] = [{"tags": ["a"]}, ["a"], Item(["a"]), Model(tags=["a"])]
TYPES: list[Any] = [dict[str, list[str]], list[str], Item, Model]


class DatedCodec:
    """A codec of a caller's, which writes something else each time."""

    def __init__(self) -> None:
        self._numbers = count()

    def encode(self, value: Any) -> bytes:
        return json.encode([next(self._numbers), value])

    def decode(self, data: bytes) -> Any:
        return json.decode(data)[1]


def spoil(value: Any) -> None:
    """What a careless caller does."""
    match value:
        case dict():
            value["tags"].append("spoilt")
        case list():
            value.append("spoilt")
        case _:
            value.tags.append("spoilt")


def declare(cache: Cache, of: Any = dict[str, list[str]], **options: Any) -> Any:
    """A resource whose loader makes a new value at each call."""
    terms: dict[str, Any] = {"fresh_for": 30, "stale_for": 60, "error_for": 3600, **options}

    async def load(keys: list[str]) -> Any:
        made = {dict[str, list[str]]: lambda: {"tags": ["a"]}, list[str]: lambda: ["a"]}
        new = made.get(of) or (lambda: of(tags=["a"]))
        return {key: new() for key in keys if key != "absent"}

    load.__annotations__["return"] = dict[str, of]
    return cache.batched("item", **terms)(load)


class TestE32OwnValues:
    @pytest.mark.parametrize(("of", "value"), [*zip(TYPES, VALUES, strict=True)])
    async def test_each_caller_gets_a_value_of_its_own(
        self, cache: Cache, of: Any, value: Any
    ) -> None:
        """What one of them does to it, no other one sees: from a load, memory and the store."""
        items = declare(cache, of, share=False)
        for _ in range(3):
            seen = await items("x")
            assert seen == value
            spoil(seen)

    async def test_every_way_to_read_gives_a_value_of_its_own(self, cache: Cache) -> None:
        items = declare(cache, share=False)

        def first(answers: dict[str, Answer[Any]]) -> Answer[Any]:
            return answers["x"]

        async def ways() -> list[Answer[Any]]:
            refreshed = (await items.refresh_many(["x"]))["x"].answer
            return [
                await items.get("x"),
                await items.get("x", max_age=5),
                await items.of("x").get(),
                first(await items.get_many(["x"])),
                first(await items.known(["x"])),
                first(await items.refresh("x")),
                refreshed,
                await items.get_stored("x"),
                items.peek("x"),
                items.last_answer("x"),
                await items.read("x", lambda: asyncio.sleep(0, {"tags": ["a"]})),
            ]

        await items("x")
        answers = [*await ways(), *await ways()]
        for answer in answers:
            assert answer.value == {"tags": ["a"]}
        for answer in answers:
            spoil(answer.value)
        assert len({id(answer.value) for answer in answers}) == len(answers)
        assert (await items.get("x")).value == {"tags": ["a"]}

    async def test_callers_of_one_load_share_nothing(self, cache: Cache) -> None:
        items = declare(cache, share=False)
        first, second = await asyncio.gather(items("x"), items("x"))
        assert first == second
        assert first is not second

    async def test_an_absent_key_is_absent(self, cache: Cache) -> None:
        items = declare(cache, share=False)
        assert not (await items.get("absent")).found
        with pytest.raises(KeyError):
            await items("absent")

    async def test_puts_and_updates_take_values(self, cache: Cache) -> None:
        items = declare(cache, share=False)
        mine = {"tags": ["mine"]}
        await items.put("x", mine)
        spoil(mine)
        assert await items("x") == {"tags": ["mine"]}
        await items.put("x", Loaded({"tags": ["terms"]}, fresh_for=9))
        assert (await items.get("x")).policy.fresh_for == 9

        def longer(answer: Answer[Any] | None) -> object:
            assert answer is not None
            spoil(answer.value)
            return Amended(answer.value)

        changed = await items.update("x", longer)
        assert changed.value == {"tags": ["terms", "spoilt"]}
        spoil(changed.value)
        assert await items("x") == {"tags": ["terms", "spoilt"]}
        assert (await items.touch("x", fresh_for=60)).stored
        assert await items("x") == {"tags": ["terms", "spoilt"]}

    async def test_a_watch_is_given_values_of_its_own(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        items = declare(cache, share=False)
        told: list[Update[str, Any]] = []
        with items.watch("x", tell=told.append), items.watch("x", tell=told.append):
            await items.put("x", {"tags": ["put"]})
            await until(lambda: len(told) >= 2)
        assert told[-1].answer.value == {"tags": ["put"]}
        assert told[-1].answer.value is not told[-2].answer.value

    async def test_a_function_and_a_method(self, cache: Cache) -> None:
        class Shop:
            @cache.cached("report", fresh_for=30, share=False, ignore=("self",))
            async def report(self, year: int) -> dict[str, int]:
                return {"year": year}

        shop = Shop()
        for _ in range(3):
            report = await shop.report(2026)
            assert report == {"year": 2026}
            report.clear()

        @cache.cached("plain", fresh_for=30, share=False)
        async def plain(year: int) -> dict[str, int]:
            return {"year": year}

        for _ in range(3):
            report = await plain(2026)
            assert report == (await plain.of(2026).get()).value == {"year": 2026}
            report.clear()

    async def test_a_stored_value_of_another_shape_is_a_miss(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        items = declare(cache, share=False)
        await items.put("x", {"tags": ["a"]})
        await items.invalidate("x", soft=True)
        store = await cache.store()
        record = (await store.read("item", ["x"]))["x"]
        assert isinstance(record.copy.value if record.copy else None, bytes)
        codec: Any = items.core.spec.codec
        with pytest.raises(Exception, match="Expected"):
            codec.decode(b"\x01")

    async def test_hits_are_counted(self, cache: Cache) -> None:
        items = declare(cache, share=False)
        for _ in range(5):
            await items("x")
        stats = await items.stats()
        assert sum(stats.reads.values()) == 5
        assert stats.loads == 1

    @pytest.mark.parametrize("bad", [0, None, "no"])
    async def test_a_wrong_option_is_refused(self, cache: Cache, bad: Any) -> None:
        with pytest.raises(ConfigError, match="share is True or False"):
            declare(cache, share=bad)

    async def test_by_default_callers_share_the_value(self, cache: Cache) -> None:
        items = declare(cache)
        await items("x")
        first = items.peek("x")
        second = items.peek("x")
        assert first.value is second.value


class TestE32Sync:
    @pytest.fixture(params=["memory://", "sqlite"])
    def cache(self, request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[SyncCache]:
        url = request.param if ":" in request.param else f"sqlite:///{tmp_path}/cache.db"
        with SyncCache(url) as cache:
            yield cache

    def test_each_caller_gets_a_value_of_its_own(self, cache: SyncCache) -> None:
        @cache.batched("item", fresh_for=30, share=False)
        def items(keys: list[str]) -> dict[str, list[str]]:
            return {key: ["a"] for key in keys}

        for _ in range(3):
            for value in (
                items("x"),
                items.get("x").value,
                items.get_many(["x"])["x"].value,
                items.known(["x"])["x"].value,
                items.refresh("x")["x"].value,
                items.of("x").get().value,
            ):
                assert value == ["a"]
                value.append("spoilt")
        with pytest.raises(TypeError, match="takes one key"):
            items("x", "y")  # type: ignore[arg-type]

        def longer(answer: Answer[list[str]] | None) -> list[str]:
            assert answer is not None
            return [*answer.value, "b"]

        items.update("x", longer)
        assert items("x") == ["a", "b"]

    def test_a_function_and_a_method(self, cache: SyncCache) -> None:
        class Shop:
            @cache.cached("report", fresh_for=30, share=False, ignore=("self",))
            def report(self, year: int) -> list[int]:
                return [year]

        @cache.cached("plain", fresh_for=30, share=False)
        def plain(year: int) -> list[int]:
            return [year]

        shop = Shop()
        for _ in range(3):
            for value in (shop.report(2026), plain(2026), plain.get(2026).value):
                assert value == [2026]
                value.append(0)


class TestE32Checks:
    async def test_a_test_fails_when_a_shared_value_was_changed(self, cache: Cache) -> None:
        items = declare(cache)
        with (
            pytest.raises(AssertionError, match=r"item: a caller changed .* share=False"),
            unchanged_values(cache),
        ):
            spoil(await items("x"))

    async def test_values_that_were_in_memory_before_are_looked_at(self, cache: Cache) -> None:
        items = declare(cache, of=Model)
        await items("x")
        with (
            pytest.raises(AssertionError, match="item: a caller changed"),
            unchanged_values(cache),
        ):
            spoil(await items("x"))

    async def test_it_says_nothing_of_values_that_nobody_changed(self, cache: Cache) -> None:
        items = declare(cache)
        own = cache.batched("own", fresh_for=30, share=False)(items.__wrapped__)
        with unchanged_values(cache):
            await items.get_many([f"k{number}" for number in range(50)])
            await items.put("x", {"tags": []})
            await items.get("absent")
            spoil(await own("x"))
        spoil(await items("x"))  # outside of the block
        await items.refresh("x")

    async def test_a_value_that_can_no_longer_be_encoded_was_changed(self, cache: Cache) -> None:
        items = declare(cache)
        with (
            pytest.raises(AssertionError, match="a caller changed"),
            unchanged_values(cache),
        ):
            (await items("x"))["tags"].append(object())

    @pytest.mark.parametrize("codec", [encrypted(new_key()), DatedCodec()])
    async def test_a_codec_that_writes_other_bytes_each_time_is_no_change(
        self, cache: Cache, codec: Any
    ) -> None:
        @cache.cached("report", fresh_for=30, codec=codec)
        async def report(year: int) -> list[int]:
            return [year]

        with unchanged_values(cache):
            for year in range(50):
                await report(year)

    async def test_a_changed_value_is_noticed_behind_encryption(self, cache: Cache) -> None:
        @cache.cached("report", fresh_for=30, codec=encrypted(new_key()))
        async def report(year: int) -> list[int]:
            return [year]

        with pytest.raises(AssertionError, match="a caller changed"), unchanged_values(cache):
            (await report(2026)).append(1)

    def test_sync_caches_have_it_too(self) -> None:
        with SyncCache("memory://") as cache:

            @cache.cached("report", fresh_for=30)
            def report(year: int) -> list[int]:
                return [year]

            with (
                pytest.raises(AssertionError, match="report: a caller changed"),
                unchanged_values(cache),
            ):
                report(2026).append(1)

    async def test_in_development_mode_it_is_logged_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """With the next value that is loaded, or when the cache closes."""
        flags = SimpleNamespace(flags=SimpleNamespace(dev_mode=True))
        monkeypatch.setattr(cache_module, "sys", flags)
        async with Cache("memory://") as cache:
            items = declare(cache)
            spoil(await items("x"))
            assert not caplog.records
            spoil(await items("y"))
            assert [record.getMessage()[:24] for record in caplog.records] == [
                "item: a caller changed a"
            ]
        async with Cache("memory://") as cache:
            others = declare(cache)
            spoil(await others("x"))
            with pytest.raises(AssertionError), unchanged_values(cache):
                spoil(await others("z"))
        assert len(caplog.records) == 2

    async def test_outside_of_development_mode_nothing_is_compared(self, cache: Cache) -> None:
        items = declare(cache)
        assert not hasattr(items.core.spec.codec, "changed")
