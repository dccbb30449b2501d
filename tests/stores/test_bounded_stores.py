"""E23: a store with `max_bytes` drops what was used least recently, in slices, and counts."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillfresh import Cache, Clock, ConfigError
from stillfresh.bounded import BESIDE, SLICE, Room
from stillfresh.stores import capabilities_of
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Lease,
    Put,
    PutOutcome,
    Unread,
)
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.stores.sqlite import store as sqlite_store
from stillfresh.stores.sqlite.bounds import WRITTEN_EVERY, FileBounds
from stillfresh.stores.urls import store_for
from stillfresh.testing import ManualClock, StoreConformance
from tests.kit.examples import examples
from tests.kit.sqlite import POLICY, elsewhere

Bounded: TypeAlias = MemoryStore | SqliteStore
MOST = 100_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=1_700_000_000.0)


@asynccontextmanager
async def opened(kind: str, path: Path, clock: Clock, most: int = MOST) -> AsyncIterator[Bounded]:
    url = (
        f"memory://?max_bytes={most}" if kind == "memory" else f"sqlite:///{path}?max_bytes={most}"
    )
    store = store_for(url, clock)
    assert isinstance(store, MemoryStore | SqliteStore)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(params=["memory", "sqlite"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
) -> AsyncIterator[Bounded]:
    async with opened(request.param, tmp_path / "cache.db", clock) as store:
        yield store


async def lease(store: Bounded, id_: str, *tags: str) -> Lease:
    record = (await store.read("post", [id_])).get(id_)
    seen = record.copy.generation if record is not None and record.copy is not None else None
    grant = (await store.acquire("post", [Ask(id_, seen, tags, take_over=True)], 10))[id_]
    assert isinstance(grant, Lease)
    return grant


async def publish(store: Bounded, clock: Clock, id_: str, size: int = 4_000, *tags: str) -> None:
    held = await lease(store, id_, *tags)
    copy = Copy(held.token, clock(), POLICY, b"x" * size)
    assert await store.publish("post", {id_: (held, copy)}) == set()


async def put(store: Bounded, clock: Clock, id_: str, value: bytes | Unread) -> PutOutcome:
    copy = Copy(store.new_generation(), clock(), POLICY, value)
    return (await store.put("post", {id_: Put(copy)}))[id_].outcome


async def shrunk(store: Bounded, most: int = MOST) -> int:
    """The bytes held when the slices that were due have run."""
    for _ in range(10_000):
        if (held := (await store.stats()).held or 0) <= most:
            return held
        await asyncio.sleep(0)
    raise AssertionError("it is over its limit, and nothing goes")


async def kept(store: Bounded, ids: list[str]) -> set[str]:
    """Without using them: a listing is no use."""
    listed = [entry.id for entry in await store.entries("post", limit=10_000)]
    return set(ids) & set(listed)


class TestE23Memory(StoreConformance):
    async def new_store(self, clock: Clock) -> MemoryStore:
        return MemoryStore(clock=clock, max_bytes="1MB")


class TestE23Sqlite(StoreConformance):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "cache.db"

    async def new_store(self, clock: Clock) -> SqliteStore:
        return SqliteStore(self.path, clock=clock, max_bytes="1MB")


class TestE23Stores:
    async def test_the_least_recently_used_copies_are_dropped(
        self, store: Bounded, clock: ManualClock
    ) -> None:
        """Of copies that were published alike, those that were read stay."""
        ids = [f"{number:03}" for number in range(20)]
        for id_ in ids:
            await publish(store, clock, id_)
            clock.advance(1)
        clock.advance(100)
        await store.read("post", ids[:5])
        for number in range(15):
            clock.advance(1)
            await publish(store, clock, f"new-{number}")
        assert await shrunk(store) <= MOST
        assert await kept(store, ids[:5]) == set(ids[:5])
        assert await kept(store, ids[5:10]) == set()

    async def test_copies_are_dropped_until_nine_tenths_are_used(
        self, store: Bounded, clock: ManualClock
    ) -> None:
        """One copy too many makes room for more than one; what went is counted."""
        number, held, evicted = 0, 0, 0
        while not evicted:
            number += 1
            await publish(store, clock, f"{number:03}")
            held, evicted = await shrunk(store), (await store.stats()).evicted or 0
        assert 0.8 * MOST < held <= 0.9 * MOST
        assert MOST < held + evicted < 1.1 * MOST
        assert await kept(store, ["001", f"{number:03}"]) == {f"{number:03}"}

    async def test_a_copy_with_a_live_lease_stays(self, store: Bounded, clock: ManualClock) -> None:
        """Somebody is refreshing it; when the lease has ended it may go."""
        await publish(store, clock, "leased")
        await lease(store, "leased")
        clock.advance(5)
        for number in range(60):
            await publish(store, clock, f"{number}")
        await shrunk(store)
        assert await kept(store, ["leased", "0"]) == {"leased"}
        clock.advance(100)
        for number in range(100, 160):
            clock.advance(1)
            await publish(store, clock, f"{number}")
            await shrunk(store)
        assert await kept(store, ["leased"]) == set()

    async def test_copies_are_dropped_even_if_all_are_in_use(
        self, store: Bounded, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The limit holds, though every copy was read since it was looked at."""
        monkeypatch.setattr("stillfresh.stores.memory.SLICE", 4)
        if isinstance(store, MemoryStore):
            store.before_evicting("post", lambda _: True)
        ids: list[str] = []
        for number in range(40):
            ids.append(f"{number:03}")
            await publish(store, clock, ids[-1])
            clock.advance(1)
            await store.read("post", ids)
        assert 0.5 * MOST < await shrunk(store) <= MOST
        assert (await store.stats()).evicted

    async def test_nothing_is_left_of_a_dropped_copy(
        self, store: Bounded, clock: ManualClock
    ) -> None:
        """Its tags are gone with it."""
        for number in range(60):
            await publish(store, clock, f"{number}", 4_000, "all", f"tag-{number}")
        await shrunk(store)
        assert await store.invalidate_tag("tag-0") == []
        tagged = {id_ for _, id_ in await store.invalidate_tag("all")}
        assert tagged == await kept(store, [str(number) for number in range(60)])

    async def test_only_a_copy_that_is_too_large_is_dropped(
        self, store: Bounded, clock: ManualClock
    ) -> None:
        """It was published, and nothing else goes for it; what was there before it is gone."""
        for id_ in ("a", "b", "large"):
            await publish(store, clock, id_)
        before = (await store.stats()).evicted
        await publish(store, clock, "large", MOST)
        await shrunk(store)
        assert await kept(store, ["a", "b", "large"]) == {"a", "b"}
        assert before == 0 < ((await store.stats()).evicted or 0)
        assert isinstance((await store.acquire("post", [Ask("large")], 5))["large"], Lease)

    async def test_the_first_copy_may_be_too_large(
        self, store: Bounded, clock: ManualClock
    ) -> None:
        """It counts as evicted, as any other."""
        await publish(store, clock, "large", 2 * MOST)
        await shrunk(store)
        stats = await store.stats()
        assert (stats.copies, stats.held) == (0, 0)
        assert (stats.evicted or 0) >= 2 * MOST

    async def test_a_copy_of_nine_tenths_stays(self, store: Bounded, clock: ManualClock) -> None:
        """One that has a byte more is never kept."""
        largest = int(0.9 * MOST) - (BESIDE if isinstance(store, MemoryStore) else 0)
        for size, expected in ((largest, {"large"}), (largest + 1, set())):
            await publish(store, clock, "large", size)
            await shrunk(store)
            assert await kept(store, ["large"]) == expected

    async def test_s13_a_put_value_is_counted(self, store: Bounded, clock: ManualClock) -> None:
        """A larger value, a smaller one, and a new time for the same value."""
        held = []
        for value in (b"x" * 1_000, b"x" * 3_000, UNREAD, b"x" * 500):
            assert await put(store, clock, "a", value) is PutOutcome.STORED
            held.append((await store.stats()).held or 0)
        assert [each - held[0] for each in held] == [0, 2_000, 2_000, -500]

    async def test_s13_puts_make_room(self, store: Bounded, clock: ManualClock) -> None:
        """The copies that were put first go; a put of one call counts as many."""
        for number in range(60):
            clock.advance(1)
            await put(store, clock, f"{number:03}", b"x" * 4_000)
        assert await shrunk(store) <= MOST
        assert await kept(store, ["000", "059"]) == {"059"}
        copies = {
            f"{number:03}": Copy(store.new_generation(), clock(), POLICY, b"x" * 4_000)
            for number in range(100, 115)
        }
        await store.put("post", {id_: Put(copy) for id_, copy in copies.items()})
        assert await shrunk(store) <= MOST
        assert await kept(store, ["114"]) == {"114"}

    async def test_s13_a_put_that_is_too_large_goes_alone(
        self, store: Bounded, clock: ManualClock
    ) -> None:
        """It was stored, and nothing else goes for it."""
        for id_ in ("a", "b", "large"):
            await put(store, clock, id_, b"x" * 4_000)
        assert await put(store, clock, "large", b"x" * MOST) is PutOutcome.STORED
        await shrunk(store)
        assert await kept(store, ["a", "b", "large"]) == {"a", "b"}

    async def test_copies_with_live_leases_are_all_kept(
        self, store: Bounded, clock: ManualClock
    ) -> None:
        """Nothing may go: it stays as it is."""
        for number in range(30):
            await publish(store, clock, f"{number}")
            await lease(store, f"{number}")
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(await kept(store, [str(number) for number in range(30)])) == 30

    @settings(max_examples=examples(20), deadline=None)
    @given(
        kind=st.sampled_from(["memory", "sqlite"]),
        steps=st.lists(
            st.tuples(
                st.sampled_from(
                    ["publish", "put", "touch", "read", "delete", "lease", "evict", "invalidate"]
                ),
                st.integers(0, 11),
                st.integers(0, 30_000),
            ),
            max_size=40,
        ),
    )
    def test_held_is_the_sum_of_what_is_held(
        self, kind: str, steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """After any steps; and at most `max_bytes` when the slices ran, but for live leases."""

        async def run() -> None:
            clock = ManualClock(start=1_700_000_000.0)
            path = tmp_path_factory.mktemp("e23") / "cache.db"
            async with opened(kind, path, clock) as store:
                for name, number, size in steps:
                    clock.advance(1)
                    await step(store, clock, name, str(number), size)
                clock.advance(20)
                await publish(store, clock, "last", 10)
                held, stats = await shrunk(store), await store.stats()
                listed = [it for it in await store.entries() if it.record.copy is not None]
                beside = [BESIDE if kind == "memory" else 200 + 3 * len(it.id) for it in listed]
                assert len(listed) == stats.copies
                assert held == sum(it.size or 0 for it in listed) + sum(beside) <= MOST

        asyncio.run(run())


async def step(store: Bounded, clock: ManualClock, name: str, id_: str, size: int) -> None:
    match name:
        case "publish":
            await publish(store, clock, id_, size)
        case "put":
            await put(store, clock, id_, b"x" * size)
        case "touch":
            await put(store, clock, id_, UNREAD)
        case "read":
            await store.read("post", [id_])
        case "delete":
            await store.delete("post", [id_])
        case "lease":
            held = await lease(store, id_)
            await store.release("post", [held] if size % 2 else [])
            await store.invalidate("post", ["none"])
        case "evict":
            await store.evict(clock() - 2 * POLICY.lasts)
        case _:
            await store.invalidate("post", [id_])


def noted_ids(bounds: FileBounds) -> list[str]:
    """The ids whose use the next jobs would write."""
    ids: list[str] = []
    for job in bounds.uses():
        assert isinstance(job, partial)
        ids += job.keywords["ids"]
    return ids


class TestE23File:
    async def test_the_file_stays_near_its_limit(self, tmp_path: Path, clock: ManualClock) -> None:
        """While ever new keys are published: 1.5 times max_bytes, and the log beside it."""
        path, largest = tmp_path / "cache.db", 0
        async with opened("sqlite", path, clock, 1_000_000) as store:
            for number in range(60):
                clock.advance(1)
                sizes = {f"{os.urandom(8).hex()}": 100 + 997 * (number % 7) for _ in range(20)}
                grants = await store.acquire("post", [Ask(id_) for id_ in sizes], 10)
                leases = {id_: it for id_, it in grants.items() if isinstance(it, Lease)}
                copies = {
                    id_: (it, Copy(it.token, clock(), POLICY, os.urandom(sizes[id_])))
                    for id_, it in leases.items()
                }
                await store.publish("post", copies)
                await store.read("post", [id_ for id_ in copies if id_ < "4"])
                largest = max(largest, path.stat().st_size)
            assert await shrunk(store, 1_000_000) <= 1_000_000
            assert ((await store.stats()).evicted or 0) > 2_000_000
        assert 800_000 < largest < 1_500_000

    async def test_a_read_writes_nothing(
        self, tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Uses are noted in memory; all of a minute are one group, and each copy is in it once."""
        async with opened("sqlite", tmp_path / "cache.db", clock) as store:
            assert isinstance(store, SqliteStore)
            now = SimpleNamespace(monotonic=lambda: 1e9)
            monkeypatch.setattr(sqlite_store, "time", now)
            for id_ in ("a", "b"):
                await publish(store, clock, id_)
            await store.read("post", ["a"])
            await store.stats()
            changes = await store.run(lambda file: file.total_changes(), writes=False)
            for _ in range(100):
                store.read_now("post", ["a"])
                store.read_now("post", ["a", "b", "none"])
            assert await store.run(lambda file: file.total_changes(), writes=False) == changes
            now.monotonic = lambda: 1e9 + 1.1 * WRITTEN_EVERY
            store.read_now("post", ["a"])
            assert await store.run(lambda file: file.total_changes(), writes=False) <= changes + 3

    async def test_copies_that_were_read_before_closing_are_kept(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """The last reads are written when the file is closed."""
        path, ids = tmp_path / "cache.db", [f"{number:03}" for number in range(20)]
        async with opened("sqlite", path, clock) as store:
            for id_ in ids:
                await publish(store, clock, id_)
                clock.advance(1)
            clock.advance(100)
            await store.read("post", ids[:5])
        async with opened("sqlite", path, clock) as store:
            for number in range(15):
                clock.advance(1)
                await publish(store, clock, f"new-{number}")
            assert await shrunk(store) <= MOST
            assert await kept(store, ids[:10]) == set(ids[:5])

    async def test_a_copy_that_one_eviction_spares_outlives_the_next_ones(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """It was read, which was only noted in memory until then."""
        ids = [f"{number:03}" for number in range(20)]
        async with opened("sqlite", tmp_path / "cache.db", clock) as store:
            for id_ in ids:
                await publish(store, clock, id_)
                clock.advance(1)
            await store.read("post", ids[:5])
            evicted: set[int] = set()
            for number in range(10):
                await publish(store, clock, f"new-{number}")
                clock.advance(1)
                await shrunk(store)
                evicted.add((await store.stats()).evicted or 0)
            assert len(evicted - {0}) > 1  # more than one eviction
            assert await kept(store, ids[:5]) == set(ids[:5])

    async def test_a_copy_that_another_process_used_is_kept(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """Its uses are written when it closes, or after a minute."""
        path = tmp_path / "cache.db"
        async with opened("sqlite", path, clock) as store:
            for number in range(20):
                await publish(store, clock, f"{number:03}")
            elsewhere(
                "import asyncio, sys\n"
                "from stillfresh.stores.sqlite import SqliteStore\n"
                "async def main():\n"
                "    store = SqliteStore(sys.argv[1], max_bytes=100_000)\n"
                "    await store.open()\n"
                "    assert store.read_now('post', ['003'])\n"
                "    await store.close()\n"
                "asyncio.run(main())\n",
                path,
            )
            for number in range(10):
                await publish(store, clock, f"new-{number}")
            await shrunk(store)
            assert await kept(store, ["002", "003", "004"]) == {"003"}

    async def test_copies_that_others_write_are_counted(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """Copies from before the limit, and of processes without one."""
        path = tmp_path / "cache.db"
        free = SqliteStore(path, clock=clock)
        await free.open()
        for number in range(20):
            await publish(free, clock, f"{number:03}")
        async with opened("sqlite", path, clock) as store:
            await publish(store, clock, "first")
            for number in range(20):
                await publish(free, clock, f"more-{number:03}")
            assert ((await store.stats()).held or 0) > MOST
            await publish(store, clock, "last")
            assert await shrunk(store) <= MOST
            assert await kept(store, ["000", "last"]) == {"last"}
        await free.close()

    async def test_a_new_file_is_counted_from_the_beginning(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """The new one is counted from the beginning."""
        path = tmp_path / "cache.db"
        async with opened("sqlite", path, clock) as store:
            await publish(store, clock, "a")
            path.unlink()
            await publish(store, clock, "b")
            stats = await store.stats()
            assert (stats.copies, stats.held) == (1, 200 + 3 + 4_000)

    async def test_a_step_drops_no_more_than_a_slice(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """No step drops more than so many copies or bytes, however much is over."""
        async with opened("sqlite", tmp_path / "cache.db", clock, 50_000_000) as store:
            assert isinstance(store, SqliteStore)
            for number in range(12):
                await publish(store, clock, f"{number}", 900_000)
            bounds = FileBounds(2_000_000, clock)
            evicted = [(await store.stats()).evicted or 0]
            while await store.run(bounds.shrink):
                evicted.append((await store.stats()).evicted or 0)
            assert 4_000_000 <= evicted[1] - evicted[0] <= 5_000_000
            assert ((await store.stats()).held or 0) <= 2_000_000

    async def test_uses_may_be_noted_by_many_threads(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """While another one writes them: none is lost, and none is written twice."""
        bounds = FileBounds(MOST, clock)
        written: list[str] = []
        kinds = [f"kind{number}" for number in range(8)]
        has_ended = threading.Event()

        def note(kind: str) -> None:
            for number in range(2_000):
                bounds.note(kind, [f"{kind}-{number}"])

        def write() -> None:
            while not has_ended.is_set():
                written.extend(noted_ids(bounds))

        with ThreadPoolExecutor(len(kinds) + 1) as threads:
            writing = threads.submit(write)
            list(threads.map(note, kinds))
            has_ended.set()
            writing.result()
        written.extend(noted_ids(bounds))
        assert len(written) == len(set(written)) == 2_000 * len(kinds)


class TestE23Slices:
    async def test_room_that_cannot_be_freed_is_tried_once(self) -> None:
        """Nothing spins while everything is in use."""
        tries: list[float] = []

        def free() -> bool:
            tries.append(room.held)
            return False

        room = Room(100, free)
        room.held = 200
        room.shrink()
        for _ in range(20):
            await asyncio.sleep(0)
        assert tries == [200]

    async def test_the_memory_store_drops_copies_in_slices(self, clock: ManualClock) -> None:
        """A turn of the loop drops no more than a slice."""
        async with opened("memory", Path(), clock, 5_000 * BESIDE) as store:
            assert isinstance(store, MemoryStore)
            for start in range(0, 5_000, 100):
                ids = [str(start + number) for number in range(100)]
                grants = await store.acquire("post", [Ask(id_) for id_ in ids], 5)
                leases = [it for it in grants.values() if isinstance(it, Lease)]
                copies = {it.id: (it, Copy(it.token, clock(), POLICY, None)) for it in leases}
                await store.publish("post", copies)
            assert (await store.stats()).copies == 5_000
            await publish(store, clock, "large", 4_000 * BESIDE)
            seen = [(await store.stats()).copies]
            while seen[-1] > 600:
                await asyncio.sleep(0)
                seen.append((await store.stats()).copies)
            assert max(a - b for a, b in pairwise(seen)) <= SLICE
            assert await kept(store, ["large"]) == {"large"}


class TestE23Addresses:
    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("redis://localhost?max_bytes=2GB", "maxmemory"),
            ("dynamodb://table?bucket=b&max_bytes=2GB", "lifecycle"),
            ("memory://?max_bytes=2XB", "such as '500MB', '2GB' or '64KiB', at least 1, not '2XB'"),
            ("memory://?max_bytes=", "max_bytes: must be"),
            ("memory://?max_bytes=0", "at least 1"),
            ("sqlite:///a.db?max_bytes=-1", "max_bytes: must be"),
            ("sqlite:///a.db?max_byte=1", "its options are"),
            ("memory://?max_bytes=1&max_bytes=2", "its options are"),
        ],
    )
    def test_a_mistake_in_max_bytes_is_named(self, url: str, says: str) -> None:
        """Also where the limit is another program's: then what to do there."""
        with pytest.raises(ConfigError, match=says):
            Cache(url)

    def test_max_bytes_may_stand_beside_a_tenant(self) -> None:
        """In any order."""
        for query in ("tenant=acme&max_bytes=2GB", "max_bytes=2GB&tenant=acme"):
            store = store_for(f"memory://?{query}", lambda: 0.0)
            assert capabilities_of(store).max_bytes == 2_000_000_000
