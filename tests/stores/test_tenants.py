"""I17: one store for several tenants keeps the contract for each of them."""

import asyncio

import pytest

from stillfresh import Cache, Clock
from stillfresh.stores.contract import Ask, Store
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.redis import RedisStore
from stillfresh.stores.tenants import TenantStore, for_tenant
from stillfresh.testing import ManualClock, StoreConformance


class TestI17TenantStore(StoreConformance):
    async def new_store(self, clock: Clock) -> Store:
        return for_tenant(MemoryStore(clock=clock), "acme")


class TestI17Loops:
    def test_a_tenant_of_a_store_in_memory_outlives_its_loop(self) -> None:
        """As the store itself does: the second `asyncio.run` finds the copy of the first."""
        loads: list[int] = []
        cache = Cache("memory://?tenant=acme")

        @cache.cached("report", fresh_for="1h")
        async def report(year: int) -> int:
            loads.append(year)
            return year

        for _ in range(2):
            assert asyncio.run(report(2026)) == 2026
        assert loads == [2026]


class TestI17Listing:
    async def test_turns_page_by_page_past_the_others(self) -> None:
        """A page of a listing is full, however many entries of others stand between."""
        clock = ManualClock()
        store = MemoryStore(clock=clock)
        await store.open()
        for tenant in ("a", "b", "c"):
            asks = [Ask(f"{number:02}") for number in range(25)]
            await TenantStore(store, tenant).acquire("page", asks, 5)
        mine = TenantStore(store, "b")
        seen: list[str] = []
        after = None
        while page := await mine.entries("page", "", after, 10):
            seen += [entry.id for entry in page]
            after = page[-1].kind, page[-1].id
        assert seen == [f"{number:02}" for number in range(25)]
        assert [entry.id for entry in await mine.entries("page", "07")] == ["07"]
        assert await mine.entries("page", "TENANT") == []

    def test_reads_on_the_spot_where_the_store_does(self) -> None:
        """A wrapped store is as quick as the one inside, and offers no more than that one."""
        assert TenantStore(MemoryStore(), "a").reads_inline
        assert TenantStore(RedisStore("redis://localhost"), "a").reads_in_threads
        far = TenantStore(RedisStore("redis://localhost", nodes=[("localhost", 1)]), "a")
        assert not far.reads_inline
        assert not far.reads_in_threads
        with pytest.raises(TypeError, match="RedisStore does not read inline"):
            far.read_now("page", ["a"])
