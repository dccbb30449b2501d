"""E6: `invalidate_all` reaches every entry of a store, and every load under way."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from stillfresh import Cache, Verdict
from stillfresh.stores import capabilities
from stillfresh.stores.contract import Ask
from stillfresh.stores.memory import MemoryStore
from tests.kit.engine import clear
from tests.kit.gates import Gated
from tests.kit.held_store import SteppedStore


class Upstream(Gated):
    """A number that grows with every load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = 0

    async def load(self) -> int:
        self.loads += 1
        found = self.loads
        await self.called()
        return found


async def test_e6_clearing_forgets_one_resource() -> None:
    """Every entry of it, and none of another."""
    async with Cache("memory://") as cache:

        @cache.batched("price", fresh_for="1h")
        async def prices(skus: list[str]) -> dict[str, int]:
            return dict.fromkeys(skus, 1)

        @cache.cached("report", fresh_for="1h")
        async def report() -> int:
            return 1

        await prices.get_many(["a", "b"])
        await report()
        await clear(prices)
        assert [entry.kind for entry in await cache.entries()] == ["report"]
        assert prices.peek("a") is None


@pytest.mark.parametrize("store", ["memory://", "sqlite:///all.db"])
class TestE6InvalidateAll:
    async def test_every_kind_is_invalidated(
        self, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In pages and slices; also kinds that this cache has not declared."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(capabilities, "WALKED", 7)
        monkeypatch.setattr("stillfresh.bounded.sliced.__init__.__defaults__", (7,))
        async with Cache(store) as cache:

            @cache.batched("price", fresh_for="1h", error_for="1h")
            async def prices(skus: list[str]) -> dict[str, int]:
                return dict.fromkeys(skus, 1)

            @cache.cached("report", fresh_for="1h", stale_for="1h")
            async def report() -> int:
                return 1

            keys = [f"sku-{number}" for number in range(20)]
            await prices.get_many(keys)
            await report()
            assert await cache.invalidate_all() == 21
            assert {entry.verdict for entry in await cache.entries("price")} == {Verdict.EXPIRED}
            await prices.get_many(keys)
            assert await cache.invalidate_all(soft=True) == 21
            assert {entry.verdict for entry in await cache.entries()} == {
                Verdict.STALE,
                Verdict.EXPIRED,
            }

    async def test_a_load_under_way_publishes_nothing(
        self, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its caller gets the value as STALE, and the next caller a new one."""
        monkeypatch.chdir(tmp_path)
        upstream = Upstream()
        async with Cache(store) as cache:
            report = cache.cached("report", fresh_for="1h")(upstream.load)
            loading = await upstream.holding(report.of().get())
            await cache.invalidate_all()
            upstream.let_go()
            assert (await loading).verdict is Verdict.STALE
            answer = await report.of().get()
            assert (answer.value, answer.verdict) == (2, Verdict.FRESH)


class TestE6InvalidateAllOfOthers:
    @pytest.fixture(params=["sqlite", "valkey", "postgres", "dynamodb"])
    def address(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        match request.param:
            case "sqlite":
                return f"sqlite:///{tmp_path / 'all.db'}"
            case "valkey":
                return f"{request.getfixturevalue('valkey').address}?prefix={uuid4().hex}"
            case "postgres":
                return str(request.getfixturevalue("postgres").new_store())
        aws = request.getfixturevalue("aws")
        return str(aws.address(aws.new_table()))

    async def test_a_cold_load_of_another_process_publishes_nothing(self, address: str) -> None:
        """Its lease is voided, though there is no copy yet."""
        upstream = Upstream()
        async with Cache(address) as cache, Cache(address) as other:
            report = other.cached("report", fresh_for="1h", tags=lambda: ["a"])(upstream.load)
            loading = await upstream.holding(report.of().get())
            assert await cache.invalidate_all() == 1
            upstream.let_go()
            assert (await loading).verdict is Verdict.STALE
            assert await report() == 2


class TestE6InvalidateAllInMemory:
    async def test_nothing_enters_memory_from_before(self) -> None:
        """A read that began before the end of the invalidation is not remembered."""
        store = SteppedStore(MemoryStore())
        upstream = Upstream()
        async with Cache(store) as cache:
            report = cache.cached("report", fresh_for="1h", memory_for="1h")(upstream.load)
            assert await report() == 1
            all_of_it = await store.holding("invalidate", cache.invalidate_all())
            assert await report() == 1
            store.let_go("invalidate")
            await all_of_it
            assert await report() == 2

    async def test_a_load_from_before_counts_as_old_from_the_start_on(self) -> None:
        """Also if it ends before the invalidation does."""
        store, upstream = SteppedStore(MemoryStore()), Upstream()
        async with Cache(store) as cache:
            report = cache.cached("report", fresh_for="1h")(upstream.load)
            loading = await upstream.holding(report.of().get())
            all_of_it = await store.holding("invalidate", cache.invalidate_all())
            upstream.let_go()
            assert (await loading).verdict is Verdict.STALE
            store.let_go("invalidate")
            await all_of_it

    async def test_kinds_that_lie_in_between_are_one_step_each(self) -> None:
        """A store may list kinds in any order; each kind of a page is invalidated in one step."""
        store = SteppedStore(MemoryStore())
        async with Cache(store) as cache:
            for kind in ("price", "stock") * 10:
                await store.acquire(kind, [Ask(uuid4().hex, None)], 5)
            assert await cache.invalidate_all() == 20
        assert store.count("invalidate") == 2


class NotedInvalidations(MemoryStore):
    """Notes which ids it is told of, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        self.ids += ids
        await super().invalidate(kind, ids, soft=soft)


async def test_t1_keys_that_are_loaded_are_invalidated_in_the_order_in_which_they_began() -> None:
    """A seed gives the same run in every process, whatever the order of its sets."""
    store = NotedInvalidations()
    gate = asyncio.Event()
    async with Cache(store) as cache:

        @cache.batched("price", fresh_for="1h")
        async def prices(skus: list[str]) -> dict[str, int]:
            await gate.wait()
            return dict.fromkeys(skus, 1)

        keys = [f"sku-{number}" for number in range(20)]
        reading = asyncio.create_task(prices.get_many(keys))
        while not prices.core.under_way():
            await asyncio.sleep(0)
        await cache.invalidate_all()
        gate.set()
        await reading
    assert store.ids[:20] == keys
