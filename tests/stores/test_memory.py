"""S1, S2, S3: the memory store passes the conformance suite, and stays within its bounds."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from stillfresh import Clock, ConfigError, Policy
from stillfresh.bounded import BESIDE, SLICE
from stillfresh.stores.contract import Ask, Copy, Lease, Mark, Store, StoreStats
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.memory_rows import MemoryRows
from stillfresh.testing import ManualClock, StoreConformance

T = TypeVar("T")

MANY = 3 * SLICE + 1


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1_700_000_000.0)


class TestS1Contract:
    def test_a_store_without_a_step_cannot_be_made(self) -> None:
        """Python refuses it and names what is missing, before anything is cached in it."""

        class Forgetful(Store):
            async def open(self) -> None:
                pass

        with pytest.raises(TypeError, match="publish"):
            Forgetful()  # type: ignore[abstract]


class TestS3MemoryStore(StoreConformance):
    """S1, S2: every sentence of the contract, in memory; and its own bounds."""

    async def new_store(self, clock: Clock) -> MemoryStore:
        return MemoryStore(clock=clock)

    async def test_holds_no_more_than_it_may(self) -> None:
        """One more publication drops the oldest; what is being loaded stays."""
        store = MemoryStore(clock=self.clock, max_copies=3)
        await store.open()
        loading = await self.lease(store, "loading")
        for id_ in "abcd":
            await self.published(store, id_)
        assert set(await store.read("price", ["loading", *"abcd"])) == {"loading", "c", "d"}
        assert await store.publish("price", {"loading": (loading, self.copy(loading))}) == set()

    async def test_leaves_nothing_of_what_is_forgotten(self) -> None:
        """Leases that end without a copy, and tags of deleted ids, take no room."""
        store = MemoryStore(clock=self.clock)
        await store.open()
        for number in range(10):
            grants = await store.acquire("price", [Ask(str(number), tags=(f"t{number}",))], 5)
            await store.release(
                "price", [grant for grant in grants.values() if isinstance(grant, Lease)]
            )
        assert (len(store._rows), store._rows.tagged._keys, store._rows.leased) == (0, {}, {})

    @pytest.mark.parametrize("limit", [0, -1])
    def test_refuses_a_bad_limit(self, limit: int) -> None:
        """A store for nothing is a mistake."""
        with pytest.raises(ConfigError, match="max_copies: must be a whole number of 1 or more"):
            MemoryStore(max_copies=limit)


class Turns:
    """Counts the rows that a store touches between two turns of the loop."""

    def __init__(self, rows: MemoryRows, patch: pytest.MonkeyPatch) -> None:
        self.longest = self._now = 0
        for name in ("get", "drop"):
            patch.setattr(rows, name, self._counted(getattr(rows, name)))
        items = rows.items
        patch.setattr(rows, "items", lambda: (item for item in items() if self.touched()))

    def _counted(self, work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda key: work(key) if self.touched() else None

    def touched(self) -> bool:
        self._now += 1
        self.longest = max(self.longest, self._now)
        return True

    async def follow(self, work: Awaitable[T]) -> T:
        """Run the work, and begin a new count at each turn of the loop."""
        task = asyncio.ensure_future(work)
        while not task.done():
            self._now = 0
            await asyncio.sleep(0)
        return task.result()


async def publish(store: MemoryStore, clock: ManualClock, *ids: str) -> None:
    grants = await store.acquire("price", [Ask(id_) for id_ in ids], 5)
    leases = [grant for grant in grants.values() if isinstance(grant, Lease)]
    copies = {it.id: (it, Copy(it.token, clock(), Policy(10), b"12")) for it in leases}
    assert await store.publish("price", copies) == set()


class TestE28Growth:
    """At most a slice of the rows is touched in one turn of the event loop."""

    @pytest.fixture
    async def store(self, clock: ManualClock) -> MemoryStore:
        store = MemoryStore(clock=clock)
        await store.open()
        asks = [Ask(f"{number:04}", tags=("all",)) for number in range(MANY)]
        grants = await store.acquire("price", asks, 5)
        leases = [grant for grant in grants.values() if isinstance(grant, Lease)]
        policy, at = Policy(10), clock()
        copies = {it.id: (it, Copy(it.token, at, policy, b"12")) for it in leases}
        assert await store.publish("price", copies) == set()
        return store

    async def test_stats_touch_no_row(
        self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are counters, kept by whatever changes a copy or a lease."""
        monkeypatch.setattr(store._rows, "get", None)
        monkeypatch.setattr(store._rows, "items", None)
        assert await store.stats() == StoreStats(copies=MANY, leases=0, bytes=(2 + BESIDE) * MANY)

    async def test_entries_are_found_in_slices(
        self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In their order, and a page at a time, all the same."""
        turns = Turns(store._rows, monkeypatch)
        page = await turns.follow(store.entries(after=("price", "0004"), limit=3))
        assert [entry.id for entry in page] == ["0005", "0006", "0007"]
        assert turns.longest <= SLICE

    async def test_an_eviction_goes_in_slices(
        self, store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is published meanwhile is neither dropped nor in its way."""
        turns = Turns(store._rows, monkeypatch)
        clock.advance(11)
        evicting = asyncio.ensure_future(turns.follow(store.evict(clock())))
        grant = (await store.acquire("price", [Ask("new")], 5))["new"]
        await asyncio.sleep(0)
        assert isinstance(grant, Lease)
        await store.publish("price", {"new": (grant, Copy("new", clock(), Policy(10), b"1"))})
        assert await evicting == MANY
        assert turns.longest <= 3 * SLICE + 3, "walked over, looked at and dropped"
        assert (await store.stats()).copies == 1

    async def test_what_took_the_place_of_a_gone_copy_stays(self, clock: ManualClock) -> None:
        """It was deleted and published again while the eviction went on."""
        store = MemoryStore(clock=clock, max_copies=10 * MANY)  # in one part, seen as a whole
        await store.open()
        ids = [f"{number:04}" for number in range(MANY)]
        await publish(store, clock, *ids)
        clock.advance(11)
        evicting = asyncio.create_task(store.evict(clock()))
        await asyncio.sleep(0)
        await store.delete("price", ids[:1])
        await publish(store, clock, ids[0])
        assert await evicting == MANY - 1
        assert set(await store.read("price", ids)) == {ids[0]}

    async def test_a_tag_is_invalidated_in_slices(
        self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All are marked when it returns."""
        turns = Turns(store._rows, monkeypatch)
        keys = await turns.follow(store.invalidate_tag("all"))
        assert turns.longest <= SLICE
        found = await store.read("price", [id_ for _, id_ in keys])
        assert len(found) == MANY
        assert {record.copy.mark for record in found.values() if record.copy} == {Mark.HARD}

    async def test_closing_drops_in_slices(
        self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is empty at once, and frees its memory bit by bit."""
        rows = store._rows
        turns, freed = Turns(rows, monkeypatch), rows.freed
        monkeypatch.setattr(rows, "freed", lambda: (it for it in freed() if turns.touched()))
        await turns.follow(store.close())
        assert turns.longest == SLICE
        assert not any(rows.parts)
        await store.open()
        assert (await store.stats()).copies == 0

    async def test_a_full_store_drops_the_oldest_few(self, clock: ManualClock) -> None:
        """In the order of their publication, wherever they are kept."""
        store = MemoryStore(clock=clock, max_copies=1000)
        await store.open()
        for number in range(1_001):
            lease = (await store.acquire("price", [Ask(str(number))], 5))[str(number)]
            assert isinstance(lease, Lease)
            copy = Copy(lease.token, clock(), Policy(10), b"1")
            await store.publish("price", {lease.id: (lease, copy)})
        left = {entry.id for entry in await store.entries(limit=10_000)}
        assert left == {str(number) for number in range(11, 1_001)}
