"""Tests of what only some stores can do: one small suite for each protocol.

A store that does not offer a protocol skips its tests, and the reason names the protocol.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from stillfresh.errors import ConfigError
from stillfresh.stores import (
    CountsEntries,
    EvictsEntries,
    LimitsBytes,
    ListsEntries,
    PushesChanges,
    ReadsInline,
    ReadsInThreads,
    SeparatesTenants,
    capabilities_of,
    running,
)
from stillfresh.stores.contract import UNREAD, Ask, Lease, Record, Store, StoredEntry
from stillfresh.testing.conformance_kit import (
    IDS,
    KIND,
    POLICY,
    ConformanceKit,
    evicting,
    on_open_stores,
    play_late,
    skip_unless,
)

PAUSES: Final = (0.0, 30.0, 90.0)
"""Seconds after a deletion: a store may keep a trace of it for a while."""


@on_open_stores
class InlineConformance(ConformanceKit):
    """Tests of `ReadsInline` and `ReadsInThreads`."""

    async def test_an_inline_read_gives_what_a_read_gives(self, store: Store) -> None:
        """Without a turn of the loop."""
        inline = skip_unless(capabilities_of(store).inline, ReadsInline)
        await self.published(store)
        await self.lease(store, "b")
        assert inline.read_now(KIND, ["a", "b", "c"]) == await store.read(KIND, ["a", "b"])

    async def test_a_thread_reads_what_a_read_gives(self, store: Store) -> None:
        """The thread waits for the answer; the event loop does not."""
        threads = skip_unless(capabilities_of(store).threads, ReadsInThreads)
        await self.published(store)
        await self.lease(store, "b")
        read = await asyncio.to_thread(threads.read_in_thread, KIND, ["a", "b", "c"])
        assert read == await store.read(KIND, ["a", "b"])


@on_open_stores
class ListingConformance(ConformanceKit):
    """Tests of `ListsEntries`."""

    LISTS_LOADS: bool = True
    """Whether an entry is listed before it has a copy."""

    async def publish_all(self, store: Store, kind: str, ids: Sequence[str]) -> None:
        """Publish a copy of each id, which had none."""
        grants = await store.acquire(kind, [Ask(id_) for id_ in ids], self.LEASE)
        leases = [grant for grant in grants.values() if isinstance(grant, Lease)]
        assert await self.publish(store, *leases, kind=kind) == set()

    async def listed(
        self, listing: ListsEntries, kind: str | None = None, search: str = "", limit: int = 2
    ) -> list[tuple[str, str]]:
        """Page by page to the end; a page that is not full is the last."""
        names: list[tuple[str, str]] = []
        while True:
            after = names[-1] if names else None
            page = await listing.entries(kind, search, after, limit)
            names += [(entry.kind, entry.id) for entry in page]
            if len(page) < limit:
                return names

    async def test_a_listing_shows_each_entry_as_a_read_does_without_its_value(
        self, store: Store
    ) -> None:
        """Each entry as a read would give it, without its value; the size is the value's."""
        listing = skip_unless(capabilities_of(store).listing, ListsEntries)
        assert await listing.entries() == []
        copy = await self.published(store, "a", b"four")
        absent = await self.published(store, "b", None)
        await self.lease(store, "a", copy.generation)
        await self.lease(store, "c")
        held_until = (await self.record(store, "a")).held_until
        loading = [StoredEntry(KIND, "c", await self.record(store, "c"))]
        entries = await listing.entries()
        assert sorted(entries, key=lambda entry: entry.id) == [
            StoredEntry(KIND, "a", Record(replace(copy, value=UNREAD), held_until), 4),
            StoredEntry(KIND, "b", Record(absent)),
            *(loading if self.LISTS_LOADS else ()),
        ]

    async def test_a_listing_has_every_entry_once_with_pages_of_any_size(
        self, store: Store
    ) -> None:
        """With pages of any size, in every kind, with any ids."""
        listing = skip_unless(capabilities_of(store).listing, ListsEntries)
        kinds = (KIND, f"{KIND}_1", f"{KIND}1")
        names = {(kind, id_) for kind in kinds for id_ in IDS}
        for kind in kinds:
            await self.publish_all(store, kind, IDS)
        for limit in (1, 5, 1_000):
            listed = await self.listed(listing, limit=limit)
            assert len(listed) == len(names)
            assert set(listed) == names
        assert {*await self.listed(listing, KIND)} == {(KIND, id_) for id_ in IDS}
        walked = [entry.id async for page in listing.walk(KIND) for entry in page]
        assert sorted(walked) == sorted(IDS)
        assert await self.listed(listing, "other") == []

    async def test_a_search_is_plain_text_within_the_id(self, store: Store) -> None:
        """Nothing in it has another meaning, and upper case is not lower case."""
        listing = skip_unless(capabilities_of(store).listing, ListsEntries)
        ids = ["", "post:1", "post:12", "Post:1", "p%st", "p_st", "p*st", "p?st", "p[o]st", "ключ"]
        await self.publish_all(store, KIND, ids)
        for search in ("", "post:1", "ost", "%", "_", "*", "?", "[o]", "люч", KIND, "\\", "^"):
            expected = {(KIND, id_) for id_ in ids if search in id_}
            assert {*await self.listed(listing, search=search)} == expected

    async def test_a_listing_goes_on_after_an_entry_that_was_deleted(self, store: Store) -> None:
        """The last entry of a page may be deleted before the next page is requested."""
        listing = skip_unless(capabilities_of(store).listing, ListsEntries)
        await self.publish_all(store, KIND, [f"{number:02}" for number in range(20)])
        first = await listing.entries(limit=10)
        await store.delete(KIND, [entry.id for entry in first])
        last = (first[-1].kind, first[-1].id)
        second = await listing.entries(after=last)
        assert {entry.id for entry in [*first, *second]} == {f"{n:02}" for n in range(20)}

    async def test_a_listing_refuses_a_limit_below_one_or_above_the_most(
        self, store: Store
    ) -> None:
        """A limit below 1, or too large, is refused."""
        listing = skip_unless(capabilities_of(store).listing, ListsEntries)
        for limit in (0, -1, 1_000_000, True, 1.5):
            try:
                await listing.entries(limit=limit)  # type: ignore[arg-type]
            except ConfigError:
                continue
            raise AssertionError(f"a limit of {limit!r} was taken")

    async def test_a_deleted_entry_is_not_listed(self, store: Store) -> None:
        """E35: also if the store keeps a trace of the deletion."""
        listing = skip_unless(capabilities_of(store).listing, ListsEntries)
        for pause in PAUSES:
            await self.published(store)
            await store.delete(KIND, ["a"])
            assert await listing.entries() == []
            await self.pass_time(pause)
            assert await listing.entries() == []


@on_open_stores
class EvictionConformance(ConformanceKit):
    """Tests of `EvictsEntries`."""

    async def test_an_eviction_drops_only_copies_that_can_no_longer_be_served(
        self, store: Store
    ) -> None:
        """GONE copies are dropped; copies that can be served, and keys being loaded, stay."""
        eviction = skip_unless(capabilities_of(store).eviction, EvictsEntries)
        await self.published(store, "old")
        terms = POLICY.lasts
        self.clock.advance(terms / 2)
        await self.published(store, "young")
        assert await eviction.evict(self.clock()) == 0
        assert await eviction.evict(self.clock() + terms / 2 + 1) == 1
        assert set(await store.read(KIND, ["old", "young"])) == {"young"}

    async def test_late_requests_around_an_eviction_end_no_lease(self, store: Store) -> None:
        """S8: they end no lease of another holder."""
        skip_unless(capabilities_of(store).eviction, EvictsEntries)
        await play_late(self, store, evicting)


@on_open_stores
class StatisticsConformance(ConformanceKit):
    """Tests of `CountsEntries` and `LimitsBytes`."""

    async def test_copies_leases_and_bytes_are_counted(self, store: Store) -> None:
        """Copies, live leases, and some bytes."""
        counter = skip_unless(capabilities_of(store).statistics, CountsEntries)
        before = (await counter.stats()).copies
        await self.published(store, "a")
        await self.published(store, "b")
        await self.lease(store, "c")
        stats = await counter.stats()
        assert (before, stats.copies, stats.leases) == (0, 2, 1)
        assert stats.bytes > 0

    async def test_a_lease_that_ends_now_is_not_counted(self, store: Store) -> None:
        """S2: it is held while `expires_at > now`."""
        counter = skip_unless(capabilities_of(store).statistics, CountsEntries)
        await self.lease(store)
        await self.pass_time(self.LEASE)
        assert (await counter.stats()).leases == 0

    async def test_a_deleted_entry_is_not_counted(self, store: Store) -> None:
        """E35: also if the store keeps a trace of the deletion."""
        counter = skip_unless(capabilities_of(store).statistics, CountsEntries)
        for pause in PAUSES:
            await self.published(store)
            await store.delete(KIND, ["a"])
            await self.pass_time(pause)
            assert (await counter.stats()).copies == 0

    async def test_above_max_bytes_the_least_recently_used_copies_are_dropped(
        self, store: Store
    ) -> None:
        """E23: above `max_bytes` the least recently used are dropped soon; leased keys stay."""
        counter = skip_unless(capabilities_of(store).statistics, CountsEntries)
        most = skip_unless(capabilities_of(store).max_bytes, LimitsBytes)
        leased, *others, last = (f"{number:03}" for number in range(30))
        await self.published(store, leased, b"x" * (most // 10))
        await self.lease(store, leased, (await self.kept(store, leased)).generation)
        for id_ in (*others, last):
            await self.published(store, id_, b"x" * (most // 10))
        for _ in range(1_000):
            if ((await counter.stats()).held or 0) <= most:
                break
            await asyncio.sleep(0.001)
        assert (await counter.stats()).evicted
        assert set(await store.read(KIND, [leased, others[0], last])) == {leased, last}


@on_open_stores
class PushConformance(ConformanceKit):
    """Tests of `PushesChanges`."""

    async def test_every_change_is_reported_before_the_next_beat(self, store: Store) -> None:
        """S10: a publication or put with its generation, any other change with None."""
        push = skip_unless(capabilities_of(store).push, PushesChanges)
        reports: list[tuple[str, str, str | None]] = []
        async with push.listen(lambda *report: reports.append(report)) as channel:
            await channel.beat()
            lease = await self.lease(store, "a", None, "eu")
            await self.publish(store, lease)
            await channel.beat()
            assert (KIND, "a", lease.token) in reports
            put = self.new_put(store, tags=("eu",))
            await self.put(store, put)
            await channel.beat()
            assert (KIND, "a", put.copy.generation) in reports
            for step in (
                lambda: store.invalidate(KIND, ["a"], soft=True),
                lambda: store.invalidate_tag("eu"),
                lambda: store.delete(KIND, ["a"]),
                lambda: store.invalidate(KIND, ["a"]),
            ):
                reports.clear()
                await step()
                await channel.beat()
                assert (KIND, "a", None) in reports


@on_open_stores
class TenantConformance(ConformanceKit):
    """Tests of `SeparatesTenants`."""

    async def test_tenants_see_only_their_own_entries(self, store: Store) -> None:
        """I17: neither each other's, nor those of no tenant; deleting and tags stay apart too."""
        partitions = skip_unless(capabilities_of(store).partitions, SeparatesTenants)
        acme = partitions.for_tenant("acme")
        other = partitions.for_tenant("other")
        assert capabilities_of(acme).tenant == "acme"
        assert capabilities_of(store).tenant is None
        async with running(acme), running(other):
            await self.put_value(acme, b"acme", tags=("eu",))
            assert await store.read(KIND, ["a"]) == {}
            assert await other.read(KIND, ["a"]) == {}
            await other.delete(KIND, ["a"])
            assert await other.invalidate_tag("eu") == []
            assert await store.invalidate_tag("eu") == []
            assert (await self.kept(acme)).value == b"acme"
