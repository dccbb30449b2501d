"""E23: memory in front of a store holds at most `max_bytes`, and says what it holds."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillfresh import Cache, ConfigError, Resource, ResourceStats, SyncCache
from stillfresh.bounded import BESIDE, SLICE, Room
from stillfresh.checks import checked_bytes
from stillfresh.engine import MsgpackCodec
from stillfresh.pages import PageCache
from stillfresh.stores.memory import MemoryStore
from stillfresh.testing import ManualClock
from tests.kit.engine import turns
from tests.kit.examples import examples

MOST = 20_000


def declare(cache: Cache, **options: object) -> Resource[str, bytes]:
    """A text for each key: as long as its number says, encoded in a few bytes more."""

    @cache.batched("text", fresh_for=60, stale_for=600, **options)  # type: ignore[arg-type]
    async def texts(keys: list[str]) -> dict[str, bytes]:
        return {key: b"x" * int(key.partition("-")[2] or 1000) for key in keys}

    return texts


@pytest.fixture
async def cache(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Cache]:
    async with Cache(f"sqlite:///{tmp_path}/cache.db", clock=clock) as cache:
        yield cache


async def stats(cache: Cache) -> ResourceStats:
    return (await cache.stats()).resources["text"]


def in_memory(texts: Resource[str, bytes], keys: Iterable[str]) -> set[str]:
    return {key for key in keys if texts.peek(key) is not None}


def peeked(texts: Resource[str, bytes], key: str) -> bytes:
    answer = texts.peek(key)
    assert answer is not None
    return answer.value


def encoded(value: bytes) -> bytes:
    return MsgpackCodec[bytes](bytes, "text").encode(value)


class TestE23Memory:
    async def test_entries_that_were_not_read_go_first(self, cache: Cache) -> None:
        """Past the limit, until nine tenths of it are held; the store keeps them all."""
        texts = declare(cache, max_bytes="20KB")
        for number in range(12):
            await texts(f"{number}")
        for _ in range(2):
            await texts.get_many(["0", "1"])
        await texts("12")
        assert (await stats(cache)).bytes <= MOST
        for number in range(13, 40):
            await texts.get_many(["0", "1"])
            await texts(f"{number}")
        await turns()
        told = await stats(cache)
        assert 0.8 * MOST < told.bytes <= MOST
        assert told.evicted_bytes > MOST
        assert texts.peek("0") is not None is not texts.peek("39")
        assert texts.peek("5") is None
        assert (await cache.stats()).store.copies == 40  # type: ignore[union-attr]

    async def test_a_value_that_is_too_large_is_never_kept(self, cache: Cache) -> None:
        """It is served, and nothing goes for it."""
        texts = declare(cache, max_bytes=MOST)
        await texts("a")
        for _ in range(2):
            assert len(await texts(f"large-{MOST}")) == MOST
            await turns()
        assert (texts.peek("a") is not None, texts.peek(f"large-{MOST}")) == (True, None)
        assert (await stats(cache)).evicted_bytes == 0

    async def test_an_entry_that_grows_counts_with_its_new_size(self, cache: Cache) -> None:
        """Counted with its new size; too large by now, it is let go of."""
        texts = declare(cache, max_bytes=MOST)
        await texts.put("a", b"x" * 100)
        small = (await stats(cache)).bytes
        await texts.put("a", b"x" * 5_100)
        assert (await stats(cache)).bytes - small in range(4_990, 5_010)
        await texts.put("a", b"x" * MOST)
        assert (await stats(cache)).bytes == 0

    async def test_a_copy_that_the_store_confirms_keeps_its_size(
        self, cache: Cache, clock: ManualClock
    ) -> None:
        """Its value is not sent again; an absence has none."""
        gone = list[str]()

        @cache.batched("text", fresh_for=60, error_for=600)
        async def texts(keys: list[str]) -> dict[str, bytes]:
            return {key: b"x" * 1000 for key in keys if key not in gone}

        await texts("a")
        held = (await stats(cache)).bytes
        assert held > BESIDE + 1000
        clock.advance(5)
        await texts.get_many(["a"])
        assert (await stats(cache)).bytes == held
        gone.append("a")
        await texts.refresh("a")
        assert (await stats(cache)).bytes == BESIDE

    async def test_all_of_the_room_may_be_used(self, cache: Cache) -> None:
        """To the last byte: nothing goes before there is too much."""
        texts = declare(cache, max_bytes=10 * (BESIDE + 1003))
        await texts.get_many([f"{number}" for number in range(10)])
        await turns()
        told = await stats(cache)
        assert (told.entries, told.bytes) == (10, 10 * (BESIDE + 1003))
        await texts("10")
        await turns()
        assert (await stats(cache)).entries == 9

    async def test_room_for_a_large_value_is_made_in_as_many_slices_as_it_takes(
        self, cache: Cache
    ) -> None:
        """More entries have to go than one turn of the loop drops."""
        count = 2 * SLICE + 500
        most = count * (BESIDE + 4)
        texts = declare(cache, max_bytes=most, max_entries=count, max_batch=count)
        await texts.get_many([f"{number}-1" for number in range(count)])
        assert (await stats(cache)).entries == count
        await texts(f"large-{most * 3 // 4}")
        await turns()
        told = await stats(cache)
        assert told.bytes <= most
        assert told.entries < count - SLICE
        assert texts.peek(f"large-{most * 3 // 4}") is not None

    async def test_the_limits_of_bytes_and_of_entries_both_hold(self, cache: Cache) -> None:
        """So many entries, and so many bytes."""
        texts = declare(cache, max_bytes="1GB", max_entries=3)
        await texts.get_many([f"{number}" for number in range(10)])
        told = await stats(cache)
        assert (told.entries, told.bytes) == (3, 3 * (told.bytes // 3))
        await texts.invalidate("9")
        assert (await stats(cache)).bytes == told.bytes // 3 * 2

    async def test_closing_gives_all_room_back(self, tmp_path: Path, clock: ManualClock) -> None:
        """And it is used again afterwards."""
        cache = Cache(f"sqlite:///{tmp_path}/cache.db", clock=clock)
        texts = declare(cache, max_bytes=MOST)
        for _ in range(2):
            async with cache:
                await texts.get_many([f"{number}" for number in range(30)])
                await turns()
                assert 0 < (await stats(cache)).bytes <= MOST
            assert cache.counts().resources["text"].bytes == 0

    @pytest.mark.parametrize("wrong", ["2XB", "", "GB", 0, -1, 1.5, True, "1 000", "1e9", "inf"])
    async def test_a_wrong_max_bytes_is_named(self, cache: Cache, wrong: object) -> None:
        """At the declaration."""
        with pytest.raises(ConfigError, match="text: max_bytes: must be a whole number of bytes"):
            declare(cache, max_bytes=wrong)

    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("2GB", 2_000_000_000),
            ("64KiB", 65_536),
            ("64kib", 65_536),
            ("500 MB", 500_000_000),
            ("1.5kB", 1_500),
            ("7B", 7),
            ("7", 7),
            (7, 7),
            ("1TiB", 2**40),
        ],
    )
    def test_sizes_are_read_as_people_write_them(self, text: object, size: int) -> None:
        """Powers of a thousand; with an i, of 1,024."""
        assert checked_bytes("max_bytes", text) == size


class TestE23PrivateStore:
    async def test_what_memory_serves_stays_in_the_store(self, clock: ManualClock) -> None:
        """A hit never asks `memory://`, and counts as a use all the same; both let go at once."""
        async with Cache(f"memory://?max_bytes={MOST}", clock=clock) as cache:
            texts = declare(cache)
            await texts("hot")
            for number in range(60):
                await texts("hot")
                await texts(f"{number}")
                await turns(2)
            store = (await cache.stats()).store
            assert store is not None
            assert 0 < (store.held or 0) <= MOST
            assert (store.evicted or 0) > MOST
            listed = {entry.id for entry in await cache.entries()}
            assert "hot" in listed
            assert (await stats(cache)).loads == 61, "it was never loaded again"
            everything = ["hot", *map(str, range(60))]
            assert listed == in_memory(texts, everything)

    async def test_memory_with_more_room_drops_what_the_store_drops(
        self, clock: ManualClock
    ) -> None:
        """A copy that no store has any more is not served either."""
        async with Cache(f"memory://?max_bytes={MOST}", clock=clock) as cache:
            texts = declare(cache, max_bytes="1MB")
            for number in range(40):
                await texts(f"{number}")
                await turns(2)
            listed = {entry.id for entry in await cache.entries()}
            everything = set(map(str, range(40)))
            assert listed == in_memory(texts, everything) < everything

    async def test_the_copies_of_a_tenant_that_memory_serves_stay(self, clock: ManualClock) -> None:
        """Memory is asked by the tenant's own names."""
        async with Cache(f"memory://?tenant=acme&max_bytes={MOST}", clock=clock) as cache:
            texts = declare(cache)
            await texts("hot")
            for number in range(30):
                await texts("hot")
                await texts(f"{number}")
                await turns(2)
            assert (
                {"hot"}
                < {entry.id for entry in await cache.entries()}
                < set(map(str, range(30))) | {"hot"}
            )

    async def test_pages_have_a_limit_for_their_store_and_one_for_memory(
        self, clock: ManualClock
    ) -> None:
        """An address limits their store, `max_bytes` the memory in front of it."""
        async with PageCache("memory://?max_bytes=1MB", clock=clock, max_bytes="2MB") as pages:
            assert isinstance(pages.cache._store, MemoryStore)
            assert pages.cache._store.max_bytes == 1_000_000
            assert pages.resource.core.memory.room.most == 2_000_000


class TestE23Room:
    @settings(max_examples=examples(40), deadline=None)
    @given(
        steps=st.lists(
            st.tuples(
                st.sampled_from(["read", "put", "drop"]), st.integers(0, 9), st.integers(1, 8_000)
            )
        )
    )
    def test_the_bytes_held_are_the_sum_of_the_entries(
        self, steps: list[tuple[str, int, int]]
    ) -> None:
        """After any reads, puts and invalidations; and within the limit when the slices ran."""

        async def run() -> None:
            async with Cache("memory://") as cache:
                texts = declare(cache, max_bytes=MOST)
                for name, number, size in steps:
                    if name == "read":
                        await texts(f"{number}")
                    elif name == "put":
                        await texts.put(f"{number}", b"x" * size)
                    else:
                        await texts.invalidate(f"{number}")
                await turns(3)
                held = in_memory(texts, map(str, range(10)))
                sizes = {key: len(encoded(peeked(texts, key))) for key in held}
                total = (await stats(cache)).bytes
                assert total == sum(BESIDE + size for size in sizes.values())
                assert total <= MOST

        asyncio.run(run())

    async def test_room_is_made_slice_by_slice(self) -> None:
        """The first slice goes at once, the rest turn by turn; if nothing may go, nothing spins."""
        freed = list[int]()

        def free() -> bool:
            freed.append(room.held)
            room.held -= 10
            return room.held > 50

        room = Room(100, free)
        room.held = 102
        room.shrink()
        assert freed == [102]
        await asyncio.sleep(0)
        assert freed == [102, 92]
        await turns(3)
        assert (freed, room.held) == ([102, 92], 82)
        room.most, room.largest = 10.0, 9.0
        room.shrink()
        await turns()
        assert room.held == 42
        await turns()
        assert room.held == 42, "nothing spins"

    async def test_loads_that_wait_for_nothing_leave_room(self) -> None:
        """They give the loop no turn, and memory holds no more than its limit all the same."""
        async with Cache("memory://") as cache:

            @cache.cached("text", fresh_for=60, max_bytes=MOST)
            async def text(number: int) -> bytes:
                return b"x" * (1_000 + number)

            for number in range(40):
                await text(number)
                assert cache.counts().resources["text"].bytes <= MOST

    def test_an_entry_counts_for_its_bytes_and_a_constant(self) -> None:
        """Many small values take more than their own bytes."""
        assert 100 <= BESIDE <= 1_000


class TestE23Sync:
    def test_a_sync_cache_has_the_same_limit(self, tmp_path: Path) -> None:
        """Slices run on its loop's thread."""
        with SyncCache(f"sqlite:///{tmp_path}/cache.db?max_bytes=1MB") as cache:

            @cache.cached("text", fresh_for=60, max_bytes=MOST)
            def text(number: int) -> bytes:
                return b"x" * (1_000 + number)

            for number in range(40):
                assert len(text(number)) == 1_000 + number
            told = cache.stats()
            assert 0 < told.resources["text"].bytes <= MOST < told.resources["text"].evicted_bytes
            assert told.store is not None
            assert (told.store.held or 0) > 40_000


async def test_a_value_in_memory_takes_the_room_of_its_bytes() -> None:
    """E39: the encoder's spare room behind them, half as much again, is given back."""
    number = 100
    length = 100_000
    async with Cache("memory://") as cache:

        @cache.batched("text", fresh_for="1h")
        async def texts(keys: list[int]) -> dict[int, str]:
            return dict.fromkeys(keys, "x" * length)

        await texts.get_many(range(number))
        tracemalloc.start()
        try:
            await texts.get_many(range(number, 2 * number))
            size, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        both = 2 * length  # encoded and decoded
        assert both < size / number < both + length / 4
