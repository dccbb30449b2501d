"""S1, S2, S3: the memory store passes the conformance suite, and stays within its bounds."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import Clock, ConfigError, Policy
from stillfresh.bounded import BESIDE, SLICE, Room
from stillfresh.stores.contract import (
    REMEMBERED,
    Ask,
    Copy,
    Lease,
    Mark,
    Record,
    Store,
    StoreStats,
)
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

    async def test_the_memory_store_holds_at_most_max_copies(self) -> None:
        """One more publication drops the oldest; what is being loaded stays."""
        store = MemoryStore(clock=self.clock, max_copies=3)
        await store.open()
        loading = await self.lease(store, "loading")
        for id_ in "abcd":
            await self.published(store, id_)
        assert set(await store.read("price", ["loading", *"abcd"])) == {"loading", "c", "d"}
        assert await store.publish("price", {"loading": (loading, self.copy(loading))}) == set()

    async def test_nothing_is_left_of_leases_without_a_copy(self) -> None:
        """Leases that end without a copy, and tags of deleted ids, take no room."""
        store = MemoryStore(clock=self.clock)
        await store.open()
        for number in range(10):
            grants = await store.acquire("price", [Ask(str(number), tags=(f"t{number}",))], 5)
            await store.release(
                "price", [grant for grant in grants.values() if isinstance(grant, Lease)]
            )
        assert await store.stats() == StoreStats(copies=0, leases=0, bytes=0)
        assert await store.entries() == []
        for number in range(10):
            assert await store.invalidate_tag(f"t{number}") == []

    @pytest.mark.parametrize("limit", [0, -1])
    def test_a_limit_below_one_is_refused(self, limit: int) -> None:
        """A store for nothing is a mistake."""
        with pytest.raises(ConfigError, match="max_copies: must be a whole number of 1 or more"):
            MemoryStore(max_copies=limit)


async def count_turns(work: Awaitable[T]) -> tuple[T, int]:
    """The result of the work, and how many turns of the loop others had meanwhile."""
    task = asyncio.ensure_future(work)
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    return task.result(), turns


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

    async def test_stats_of_the_memory_store_touch_no_row(
        self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are counters, kept by whatever changes a copy or a lease."""
        monkeypatch.setattr(store._rows, "get", None)
        monkeypatch.setattr(MemoryRows, "items", None)
        assert await store.stats() == StoreStats(copies=MANY, leases=0, bytes=(2 + BESIDE) * MANY)

    async def test_entries_are_found_in_slices(self, store: MemoryStore) -> None:
        """In their order, and a page at a time, all the same."""
        page, turns = await count_turns(store.entries(after=("price", "0004"), limit=3))
        assert [entry.id for entry in page] == ["0005", "0006", "0007"]
        assert turns >= MANY / SLICE

    async def test_an_eviction_goes_in_slices(self, store: MemoryStore, clock: ManualClock) -> None:
        """What is published meanwhile is neither dropped nor in its way."""
        clock.advance(11)
        evicting = asyncio.ensure_future(count_turns(store.evict(clock())))
        grant = (await store.acquire("price", [Ask("new")], 5))["new"]
        await asyncio.sleep(0)
        assert isinstance(grant, Lease)
        await store.publish("price", {"new": (grant, Copy("new", clock(), Policy(10), b"1"))})
        evicted, turns = await evicting
        assert evicted == MANY
        assert turns >= MANY / SLICE
        assert (await store.stats()).copies == 1

    async def test_a_copy_published_during_an_eviction_stays(self, clock: ManualClock) -> None:
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

    async def test_a_tag_is_invalidated_in_slices(self, store: MemoryStore) -> None:
        """All are marked when it returns."""
        keys, turns = await count_turns(store.invalidate_tag("all"))
        assert turns >= MANY / SLICE
        found = await store.read("price", [id_ for _, id_ in keys])
        assert len(found) == MANY
        assert {record.copy.mark for record in found.values() if record.copy} == {Mark.HARD}

    async def test_closing_drops_in_slices(self, store: MemoryStore) -> None:
        """It is empty at once, and frees its memory bit by bit."""
        _, turns = await count_turns(store.close())
        assert turns >= MANY / SLICE
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


def leased(rows: MemoryRows, id_: str, tags: tuple[str, ...] = (), until: float = 5.0) -> Lease:
    lease = Lease(id_, f"t-{id_}", until, rows.epoch)
    rows.lease(("price", id_), lease, tags)
    return lease


class TestS3Rows:
    """The rows of `memory://`, and the sums and indexes beside them."""

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["lease", "publish", "drop", "end"]),
                st.sampled_from("abc"),
                st.sampled_from([(), ("x",), ("y",), ("x", "y")]),
                st.sampled_from([b"", b"123", None]),
            ),
            max_size=20,
        )
    )
    def test_sums_and_indexes_are_those_of_the_rows(
        self, steps: list[tuple[str, str, tuple[str, ...], bytes | None]]
    ) -> None:
        """After any history: copies, bytes, leases, and the keys of each tag."""
        rows = MemoryRows(100, Room(None, bool))
        leases: dict[tuple[str, str], Lease] = {}
        for step, id_, tags, value in steps:
            key = "price", id_
            match step:
                case "lease":
                    leases[key] = leased(rows, id_, tags)
                case "publish":
                    copy = Copy("g", 0.0, Policy(10), value)
                    done = rows.publish(key, Lease(id_, f"t-{id_}", 5.0), copy, 0.0, tags)
                    assert done is (leases.pop(key, None) is not None)
                case "drop":
                    rows.drop(key)
                    leases.pop(key, None)
                case _:
                    rows.end_lease(key)
                    leases.pop(key, None)
        every = dict(rows.items())
        assert rows.count == len(every)
        copies = [it.copy for it in every.values() if it.copy is not None]
        assert rows.copies == len(copies)
        sizes = [len(it.value) for it in copies if isinstance(it.value, bytes)]
        assert rows.room.held == BESIDE * len(copies) + sum(sizes)
        assert rows.leases == leases
        tagged = {key: it.tags for key, it in every.items() if it.tags is not None}
        for tag in ("x", "y"):
            by_lease = {key for key, it in tagged.items() if tag in it.leased}
            by_copy = {key for key, it in tagged.items() if tag in it.late}
            assert set(rows.tagged.keys(tag)) == by_lease
            assert set(rows.late.keys(tag)) == by_copy
            assert sorted(rows.begin_epoch(tag)) == sorted(by_lease | by_copy)
        assert rows.evicted == 0

    def test_a_lease_holds_until_its_end(self) -> None:
        """S2: by its token, for the one that has it."""
        rows = MemoryRows(100, Room(None, bool))
        lease, copy = leased(rows, "a"), Copy("g", 0.0, Policy(10), b"1")
        assert not rows.publish(("price", "b"), lease, copy, 0.0), "there is no such row"
        assert not rows.publish(("price", "a"), Lease("a", "other", 5.0), copy, 0.0)
        assert not rows.publish(("price", "a"), lease, copy, 5.0), "it is over"
        assert rows.publish(("price", "a"), lease, copy, 4.999)
        row = rows.get(("price", "a"))
        assert row is not None
        assert rows.record(("price", "a"), row, None) == Record(copy), "no lease is left"

    async def test_keys_that_are_leased_together_are_published_and_released_apart(
        self, clock: ManualClock
    ) -> None:
        """S2: they share a token, which proves the lease of each of them alone."""
        store = MemoryStore(clock=clock)
        await store.open()
        grants = await store.acquire("price", [Ask("a"), Ask("b"), Ask("c")], 5)
        leases = {id_: it for id_, it in grants.items() if isinstance(it, Lease)}
        await store.invalidate("price", ["a"])
        await store.release("price", [leases["b"]])
        token = leases["a"].token
        assert {it.token for it in leases.values()} == {token}
        copy = Copy(token, clock(), Policy(10), b"1")
        copies = {id_: (it, copy) for id_, it in leases.items()}
        assert await store.publish("price", copies) == {"a", "b"}
        assert await store.renew("price", list(leases.values()), 5) == {"a", "b", "c"}

    async def test_a_token_of_one_request_is_no_other_request_s(self, clock: ManualClock) -> None:
        """S2: a lease that ended does not come back with the next lease of its key."""
        store = MemoryStore(clock=clock)
        await store.open()
        first = (await store.acquire("price", [Ask("a"), Ask("b")], 5))["a"]
        assert isinstance(first, Lease)
        await store.release("price", [first])
        await store.acquire("price", [Ask("a"), Ask("c")], 5)
        copy = Copy(first.token, clock(), Policy(10), b"1")
        assert await store.publish("price", {"a": (first, copy)}) == {"a"}

    @pytest.mark.parametrize("tags", [("x",), ()])
    @pytest.mark.parametrize("late", [("late",), ()])
    def test_a_row_and_the_indexes_of_its_tags_share_one_key(
        self, tags: tuple[str, ...], late: tuple[str, ...]
    ) -> None:
        """E39: a key is a tuple and a text; a refreshed row does not have two of them."""
        rows = MemoryRows(100, Room(None, bool))
        for token in ("first", "second", "third"):
            id_ = "a"
            lease = Lease(id_, token, 5.0, rows.epoch)
            rows.lease(("price", id_), lease, tags)
            copy = Copy(lease.token, 0.0, Policy(10), b"1")
            assert rows.publish(("price", id_), lease, copy, 0.0, late)
            [(key, _)] = rows.items()
            tagged = rows.tagged.keys("x") + rows.late.keys("late")
            assert len(tagged) == len(tags + late)
            assert all(it is key for it in tagged)

    def test_late_tags_count_from_the_grant(self) -> None:
        """I26: an invalidation before it does not; one that nobody remembers does."""
        rows = MemoryRows(100, Room(None, bool))
        rows.begin_epoch("x")
        lease = leased(rows, "a")
        assert not rows.is_past(lease, ("x",))
        rows.begin_epoch("x")
        assert rows.is_past(lease, ("y", "x"))
        assert not rows.is_past(lease, ("y",))
        rows.epoch = lease.epoch + REMEMBERED
        assert not rows.is_past(lease, ("y",))
        rows.epoch += 1
        assert rows.is_past(lease, ("y",))
        assert not rows.is_past(lease, ())

    async def test_invalidations_are_hard_by_default(self, clock: ManualClock) -> None:
        """E6: an invalidation is hard by default, and lists have 100 entries."""
        store = MemoryStore(clock=clock)
        await store.open()
        await publish(store, clock, *map(str, range(101)))
        await store.invalidate("price", ["1"])
        found = await store.read("price", ["1"])
        assert found["1"].copy is not None
        assert found["1"].copy.mark is Mark.HARD
        assert len(await store.entries()) == 100

    def test_the_oldest_publications_come_first(self) -> None:
        """A lease moves nothing, and what is being loaded is not among them."""
        rows = MemoryRows(100, Room(None, bool))
        for id_ in "abcd":
            rows.publish(("price", id_), leased(rows, id_), Copy("g", 0.0, Policy(10), b"1"), 0.0)
        leased(rows, "b")
        rows.move_to_end(("price", "a"))
        assert [id_ for _, id_ in rows.oldest(2)] == ["c", "d"]
        assert [id_ for (_, id_), _ in rows.first(3)] == ["b", "c", "d"]

    def test_a_copy_beyond_the_room_goes_alone(self) -> None:
        """E23: and counts as evicted, with its bytes."""
        rows = MemoryRows(100, Room(10 * BESIDE, bool))
        small, large = (
            Copy("g", 0.0, Policy(10), b"1" * it) for it in (8 * BESIDE, 8 * BESIDE + 1)
        )
        assert rows.publish(("price", "a"), leased(rows, "a"), small, 0.0)
        assert rows.publish(("price", "b"), leased(rows, "b"), large, 0.0)
        assert [key for key, _ in rows.items()] == [("price", "a")]
        assert (rows.room.held, rows.evicted) == (9 * BESIDE, 9 * BESIDE + 1)
