"""E20: any thread reads a SQLite store on the spot, by a connection that it borrows."""

import asyncio
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import apsw
import pytest

from stillfresh.errors import NotOpen, StoreError
from stillfresh.freshness import Policy
from stillfresh.stores.contract import Ask, Copy, Lease, Record
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.stores.sqlite.connection import connect_reader
from stillfresh.stores.sqlite.readers import MOST, SpareReaders
from stillfresh.stores.sqlite.steps import STORE
from stillfresh.stores.sqlite.writer import Writer

KIND = "price"


async def stored(path: Path, *ids: str) -> SqliteStore:
    store = SqliteStore(path)
    await store.open()
    grants = await store.acquire(KIND, [Ask(id_, None) for id_ in ids], 5)
    copies = {}
    for id_, grant in grants.items():
        assert isinstance(grant, Lease)
        copies[id_] = grant, Copy(grant.token, 1.0, Policy(60), id_.encode())
    assert await store.publish(KIND, copies) == set()
    return store


def value(found: dict[str, Record], id_: str) -> object:
    copy = found[id_].copy
    return None if copy is None else copy.value


class TestE20SqliteThreads:
    async def test_threads_read_what_the_loop_reads(self, tmp_path: Path) -> None:
        """One key or many, side by side; what was invalidated before is seen as such."""
        store = await stored(tmp_path / "cache.db", "a", "b")

        def read(number: int) -> object:
            ids = ["a", "b"] if number % 2 else ["a"]
            return value(store.read_now(KIND, ids), "a")

        with ThreadPoolExecutor(8) as threads:
            reads = [asyncio.wrap_future(threads.submit(read, number)) for number in range(200)]
            assert set(await asyncio.gather(*reads)) == {b"a"}
            await store.invalidate(KIND, ["a"])
            there = await asyncio.wrap_future(threads.submit(store.read_now, KIND, ["a"]))
        assert there == store.read_now(KIND, ["a"])
        await store.close()

    async def test_connections_are_few_and_closed_when_they_are_given_back(
        self, tmp_path: Path
    ) -> None:
        """More threads than connections: the others are told, and ask the loop instead."""
        path = tmp_path / "cache.db"
        store = await stored(path, "a")
        spare = SpareReaders(path, partial(connect_reader, path))
        taken = [spare.take() for _ in range(MOST)]
        with pytest.raises(StoreError, match=rf"cache\.db: {MOST} threads"):
            spare.take()
        spare.give_back(taken[0])
        assert spare.take() is taken[0]
        spare.close()
        for reader in taken:
            assert reader.connection.execute("SELECT 1").get == 1
            spare.give_back(reader)
            with pytest.raises(apsw.ConnectionClosedError):
                reader.connection.execute("SELECT 1")
        with pytest.raises(StoreError):
            spare.take()
        await store.close()

    async def test_a_connection_that_an_interrupt_drops_takes_no_place(
        self, tmp_path: Path
    ) -> None:
        """A signal's handler may raise before the thread can give it back."""
        path = tmp_path / "cache.db"
        store = await stored(path, "a")
        spare = SpareReaders(path, partial(connect_reader, path))
        for _ in range(2 * MOST):
            spare.take()
            gc.collect()
        assert spare._open_count == 0  # a fork waits for nobody
        spare.close()
        await store.close()

    async def test_threads_are_told_that_the_store_is_closed(self, tmp_path: Path) -> None:
        """As the loop is."""
        store = await stored(tmp_path / "cache.db", "a")
        assert await asyncio.to_thread(store.read_now, KIND, ["a"])
        await store.close()
        with pytest.raises(NotOpen):
            await asyncio.to_thread(store.read_now, KIND, ["a"])

    async def test_the_last_store_to_close_leaves_no_log(self, tmp_path: Path) -> None:
        """Readers that threads borrowed do not keep it."""
        store = await stored(tmp_path / "cache.db", "a")
        assert await asyncio.to_thread(store.read_now, KIND, ["a"])
        await store.close()
        assert {it.name for it in tmp_path.iterdir()} == {"cache.db", "cache.db.lock"}

    async def test_threads_read_the_file_to_which_a_changed_link_leads(
        self, tmp_path: Path
    ) -> None:
        """A thread does not go on reading the old one."""
        link = tmp_path / "link.db"
        other = await stored(tmp_path / "other.db", "b")
        await other.close()
        link.symlink_to(tmp_path / "cache.db")
        store = await stored(link, "a")
        assert await asyncio.to_thread(store.read_now, KIND, ["a"])
        link.unlink()
        link.symlink_to(tmp_path / "other.db")

        def read() -> dict[str, Record]:
            try:
                return store.read_now(KIND, ["b"])
            except StoreError:  # the other file is being opened
                return {}

        while not (records := await asyncio.to_thread(read)):
            await asyncio.sleep(0.01)
        assert value(records, "b") == b"b"
        await store.close()

    def test_a_connection_that_cannot_be_made_takes_no_place(self, tmp_path: Path) -> None:
        """However often it fails: the reason stays the same."""

        def fail() -> apsw.Connection:
            raise StoreError("cache.db: cannot be opened")

        spare = SpareReaders(tmp_path / "cache.db", fail)
        for _ in range(MOST + 1):
            with pytest.raises(StoreError, match="cannot be opened"):
                spare.take()
        spare.close()

    async def test_a_fork_waits_for_reads_to_end(self, tmp_path: Path) -> None:
        """No thread is in the middle of one meanwhile; afterwards the connections are there."""
        path = tmp_path / "cache.db"
        store = await stored(path, "a")
        spare = SpareReaders(path, partial(connect_reader, path))
        busy, idle = spare.take(), spare.take()
        spare.give_back(idle)
        holding = threading.Thread(target=spare.hold)
        holding.start()
        holding.join(0.01)
        assert holding.is_alive()
        spare.give_back(busy)
        holding.join(20)
        assert not holding.is_alive()
        another = spare.take()
        assert another not in {busy, idle}
        spare.go_on()
        assert {spare.take(), spare.take()} == {busy, idle}
        for reader in (another, busy, idle):
            spare.give_back(reader)
        spare.close()
        await store.close()

    async def test_a_fork_does_not_wait_for_ever(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A read that takes too long is left alone."""
        monkeypatch.setattr("stillfresh.stores.sqlite.readers.REST", 0.0)
        path = tmp_path / "cache.db"
        store = await stored(path, "a")
        spare = SpareReaders(path, partial(connect_reader, path))
        busy = spare.take()
        spare.hold()
        spare.go_on()
        assert busy.connection.execute("SELECT 1").get == 1
        spare.give_back(busy)
        spare.close()
        await store.close()

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    async def test_a_forked_child_lets_go_of_the_parents_connections(self, tmp_path: Path) -> None:
        """SQLite would take the parent's locks for its own; the parent reads and writes on."""
        store = await stored(tmp_path / "cache.db", "a")
        await asyncio.to_thread(store.read_now, KIND, ["a"])
        child = os.fork()
        if child == 0:
            with ThreadPoolExecutor(1) as threads:
                error = threads.submit(store.read_now, KIND, ["a"]).exception()
                os._exit(7 if isinstance(error, StoreError) else 1)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        found = await asyncio.to_thread(store.read_now, KIND, ["a"])
        assert value(found, "a") == b"a"
        await store.invalidate(KIND, ["a"])
        await store.close()

    async def test_a_forked_child_closes_all_connections(self, tmp_path: Path) -> None:
        """All connections, of readers and of the writer; none if a step did not end in time."""
        path, readers = tmp_path / "cache.db", list[apsw.Connection]()
        writer = Writer(path, STORE, readers.append)
        writer.wait_until_open()
        writer.forked()
        spare = SpareReaders(path, partial(connect_reader, path))
        borrowed = [spare.take(), spare.take()]
        readers += [reader.connection for reader in borrowed]
        assert [it.execute("SELECT 1").get for it in readers] == [1, 1, 1]
        for borrowed_reader in borrowed:
            spare.give_back(borrowed_reader)
        for one in (writer, spare):
            one.hold()
            one.forked()
        for reader in readers:
            with pytest.raises(apsw.ConnectionClosedError):
                reader.execute("SELECT 1")
        with pytest.raises(StoreError):
            spare.take()
        writer.go_on()
        writer.stop()
