"""I17: one store for several tenants keeps the contract for each of them."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

from stillfresh import Cache, Clock, ConfigError, Policy
from stillfresh.stores import WrappedStore, capabilities_of
from stillfresh.stores.contract import Ask, Copy, Lease, Mark, Store, Superseded
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.redis import RedisStore
from stillfresh.stores.tenants import LONGEST_TENANT, TenantStore, checked_tenant, for_tenant
from stillfresh.testing import ManualClock, StoreConformance


class TestI17TenantStore(StoreConformance):
    async def new_store(self, clock: Clock) -> Store:
        return for_tenant(MemoryStore(clock=clock), "acme")


class TestS2TenantIsUnsure:
    async def test_a_tenants_store_is_unsure_by_its_own_ids(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What may have been stored is told under the names that the tenant uses."""
        store = MemoryStore(clock=ManualClock())

        async def publish(_: str, copies: Mapping[str, object], __: object) -> set[str]:
            return Superseded(copies, copies)

        monkeypatch.setattr(store, "publish", publish)
        lease = Lease("a", "token", 5.0)
        copy = Copy("token", 0.0, Policy(30), b"value")
        told = await TenantStore(store, "acme").publish("page", {"a": (lease, copy)})
        assert isinstance(told, Superseded)
        assert told == {"a"}
        assert told.unsure == {"a"}


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
    async def test_a_tenants_listing_turns_pages_past_other_tenants(self) -> None:
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

    def test_a_tenants_store_reads_inline_if_its_store_does(self) -> None:
        """A wrapped store is as quick as the one inside, and offers no more than that one."""
        near = TenantStore(MemoryStore(), "a")
        assert capabilities_of(near).inline is near
        one_server = TenantStore(RedisStore("redis://localhost"), "a")
        assert capabilities_of(one_server).threads is one_server
        far = TenantStore(RedisStore("redis://localhost", nodes=[("localhost", 1)]), "a")
        assert capabilities_of(far).inline is None
        assert capabilities_of(far).threads is None


class TestI17Tenants:
    def test_a_tenant_has_a_plain_name(self) -> None:
        """Of so many bytes at most, since it is part of every key."""
        longest = "é" * (LONGEST_TENANT // 2)
        assert checked_tenant(longest) == longest
        assert checked_tenant(None) is None
        for bad in ("", "a#b", 5, longest + "a", "\ud800"):
            with pytest.raises(ConfigError, match="tenant"):
                checked_tenant(bad)  # type: ignore[arg-type]

    def test_a_store_has_one_tenant(self) -> None:
        """The same again changes nothing; another is refused."""
        store = MemoryStore()
        assert for_tenant(store, None) is store
        mine = for_tenant(store, "a")
        assert for_tenant(mine, "a") is mine
        with pytest.raises(ConfigError, match="the store's own is 'a', and 'b' is named as well"):
            for_tenant(mine, "b")
        with pytest.raises(ConfigError, match="tenant"):
            for_tenant(store, "a#b")

    def test_a_store_may_know_tenants_itself(self) -> None:
        """As DynamoDB's does, whose rows have a place for them."""
        store = Partitioned()
        own = for_tenant(store, "a")
        assert isinstance(own, Partitioned)
        assert capabilities_of(own).tenant == "a"
        assert isinstance(for_tenant(WrappedStore(store), "a"), TenantStore)
        with pytest.raises(ConfigError, match="the store's own is 'a', and 'b' is named as well"):
            for_tenant(WrappedStore(own), "b")

    async def test_invalidations_reach_their_own_entries(self) -> None:
        """By id and by tag; hard, unless a soft one is asked for."""
        store = MemoryStore(clock=ManualClock())
        await store.open()
        one, other = TenantStore(store, "a"), TenantStore(store, "b")
        for tenant in (one, other):
            (grant,) = (await tenant.acquire("page", [Ask("x", tags=("t",))], 5)).values()
            assert isinstance(grant, Lease)
            assert grant.id == "x"
            copy = Copy(grant.token, 0.0, Policy(60), b"value")
            assert await tenant.publish("page", {"x": (grant, copy)}) == set()
        assert await one.invalidate_tag("t", soft=True) == [("page", "x")]
        assert await self.marks(one, other) == [Mark.SOFT, Mark.NONE]
        await one.invalidate("page", ["x"])
        await other.invalidate_tag("t")
        assert await self.marks(one, other) == [Mark.HARD, Mark.HARD]

    async def marks(self, *stores: Store) -> list[Mark | None]:
        found = [(await store.read("page", ["x"]))["x"].copy for store in stores]
        return [None if copy is None else copy.mark for copy in found]

    async def test_memory_is_asked_for_its_own_entries(self) -> None:
        """E23: by their own ids, which others may have too."""
        store, asked = Noting(MemoryStore()), list[str]()

        def keeps(id_: str) -> bool:
            asked.append(id_)
            return True

        TenantStore(store, "a").before_evicting("page", keeps)
        ((kind, answer),) = store.told
        assert kind == "page"
        assert [answer("TENANT#a#x"), answer("TENANT#b#x"), answer("x")] == [True, False, False]
        assert asked == ["x"]

    def test_a_store_that_does_not_push_says_so(self) -> None:
        """S10: as the store inside."""
        assert capabilities_of(TenantStore(MemoryStore(), "a")).push is None
        pushing = TenantStore(RedisStore("redis://localhost"), "a")
        assert capabilities_of(pushing).push is pushing


class Partitioned(MemoryStore):
    """A store with a place for tenants."""

    def __init__(self, tenant: str | None = None) -> None:
        super().__init__()
        self.tenant = tenant

    def for_tenant(self, tenant: str) -> "Partitioned":
        return Partitioned(tenant)


class Noting(WrappedStore):
    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.told: list[tuple[str, Callable[[str], bool]]] = []

    def before_evicting(self, kind: str, keeps: Callable[[str], bool]) -> None:
        self.told.append((kind, keeps))
