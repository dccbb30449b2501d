"""E20, S4, S14: a thread writes a SQLite file by itself, without the writer's or the loop's thread.

The store's steps in threads pass the whole conformance suite (`tests/stores/test_sqlite.py`).
"""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from stillfresh import NotOpen, StoreError, SyncCache
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.stores.sqlite.steps import STORE
from stillfresh.stores.sqlite.writer import Writer
from stillfresh.sync import SyncResource
from stillfresh.sync.loop_thread import LoopThread
from tests.kit.sync import Calling, until


def declared(cache: SyncCache, **options: Any) -> SyncResource[str, int]:
    @cache.batched("number", fresh_for=60, stale_for=60, **options)
    def numbers(keys: list[str]) -> dict[str, int]:
        return dict.fromkeys(keys, 0)

    return numbers


def value(numbers: SyncResource[str, int], key: str = "a") -> int | None:
    answer = numbers.known([key]).get(key)
    return getattr(answer, "value", None)


@contextmanager
def write_locked(path: Path) -> Iterator[None]:
    """Inside the block another process, as it were, is in the middle of a write."""
    with closing(apsw.Connection(str(path))) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def is_in_turn(store: SqliteStore) -> bool:
    """True while a thread uses the file."""
    assert store._writer is not None
    return store._writer._turn.locked()


class TestE20ThreadsWriteFiles:
    def test_every_change_stays_in_its_thread(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither the loop thread nor the writer's thread is asked."""

        def refuse(*_: object) -> None:
            raise AssertionError("another thread was asked")

        with SyncCache(f"sqlite:///{tmp_path}/cache.db") as cache:
            numbers = declared(cache, tags=lambda key: [f"tag-{key}"])
            with monkeypatch.context() as patch:
                patch.setattr(LoopThread, "run", refuse)
                patch.setattr(Writer, "_put", refuse)
                assert numbers.put("a", 1).stored
                assert not numbers.add("a", 2).stored
                assert numbers.touch("a", fresh_for=90).stored
                numbers.update("a", lambda answer: answer.value + 4 if answer else 0)
                assert numbers.get("a").value == 5
                numbers.put_many({"b": 6, "c": 7})
                assert numbers.remove("b")
                numbers.delete("c")
                assert set(numbers.known(["a", "b", "c", "none"])) == {"a"}
                assert cache.invalidate_tag("tag-a") == [("number", "a")]
                assert numbers.known(["a"]) == {}
                numbers.put("a", 8)
                numbers.invalidate("a")
                assert numbers.known(["a"]) == {}

    def test_threads_at_once_lose_no_change(self, tmp_path: Path) -> None:
        """Sixteen threads on two caches, which are as two processes to the file."""
        url = f"sqlite:///{tmp_path}/cache.db"
        with SyncCache(url) as first, SyncCache(url) as second:
            resources = [declared(first), declared(second)]
            resources[0].put("a", 0)

            def add(thread: int) -> None:
                for _ in range(10):
                    resources[thread % 2].update(
                        "a", lambda answer: answer.value + 1 if answer else 1
                    )

            calls = [Calling(add, thread) for thread in range(16)]
            for call in calls:
                call.result()
            assert value(resources[0]) == 160

    def test_a_file_that_stays_locked_ends_the_wait_of_a_thread(self, tmp_path: Path) -> None:
        """StoreError names the file; afterwards threads write again."""
        path = tmp_path / "cache.db"
        with SyncCache(SqliteStore(path, patience=0.01)) as cache:
            numbers = declared(cache)
            numbers.put("a", 1)
            with write_locked(path), pytest.raises(StoreError, match=r"cache\.db"):
                numbers.put("a", 2)
            assert value(numbers) == 1

            def stored() -> bool:
                try:
                    return numbers.put("a", 3).stored
                except StoreError:
                    return False

            until(stored)
            assert value(numbers) == 3

    def test_a_thread_that_waits_for_a_file_holds_no_other_up(self, tmp_path: Path) -> None:
        """Others read meanwhile, and use other caches: the waiting thread gave its turn back."""
        path = tmp_path / "cache.db"
        store = SqliteStore(path)
        with SyncCache(store) as cache, SyncCache("memory://") as other:
            numbers = declared(cache)
            others = declared(other)
            numbers.put("a", 1)
            with write_locked(path):
                put = Calling(lambda: numbers.put("a", 2))
                until(lambda: is_in_turn(store))
                assert value(numbers) == 1
                assert others.put("a", 5).stored
                assert not put.is_over
            assert put.result().stored
            assert value(numbers) == 2

    def test_a_writer_that_has_closed_refuses_threads(self, tmp_path: Path) -> None:
        """Before they wait for their turn, and after."""
        writer = Writer(tmp_path / "cache.db", STORE, lambda _: None)
        writer.wait_until_open()
        done: list[object] = []
        with writer._turn:
            late = Calling(lambda: writer.run_here(done.append))
            stopping = Calling(writer.stop)
            until(lambda: writer.is_stopping)
            with pytest.raises(NotOpen):
                writer.run_here(done.append)
        stopping.result()
        try:
            late.result()
        except NotOpen:
            assert done == []
        else:
            assert len(done) == 1
        with writer._turn:
            writer.is_stopping = False  # as if it had been admitted before the end
        with pytest.raises(NotOpen):
            writer.run_here(done.append)

    async def test_a_step_that_opens_another_file_ends_when_that_is_read(
        self, tmp_path: Path
    ) -> None:
        """Else the thread could read the old file next, as if nothing had been invalidated."""
        path = tmp_path / "cache.db"
        events: list[str] = []
        loop = asyncio.get_running_loop()
        writer = Writer(path, STORE, lambda _: events.append("adopted"), loop)
        await writer.opened()
        for file in tmp_path.glob("cache.db*"):
            file.unlink()

        def step() -> None:
            writer.run_here(lambda file: file.execute("CREATE TABLE price(id)"))
            events.append("ended")

        calling = Calling(step)
        calling.wait(0.1)  # meanwhile, the loop does nothing
        while not calling.is_over:
            await asyncio.sleep(0)
        calling.result()
        assert events == ["adopted", "adopted", "ended"]
        await writer.stopped()

    async def test_a_step_does_not_wait_for_a_loop_that_has_ended(self, tmp_path: Path) -> None:
        """Nobody reads the other file then."""
        path = tmp_path / "cache.db"
        loop = asyncio.new_event_loop()
        writer = Writer(path, STORE, lambda _: None, loop)
        writer.wait_until_open()
        loop.close()
        path.unlink()
        assert writer.run_here(lambda _: "done") == "done"
        writer.stop()

    def test_closing_waits_for_a_put_of_another_thread(self, tmp_path: Path) -> None:
        """It ends as if the cache had been closed after it."""
        path = tmp_path / "cache.db"
        store = SqliteStore(path)
        with SyncCache(store) as cache:
            numbers = declared(cache)
            numbers.put("a", 1)
            with write_locked(path):
                put = Calling(lambda: numbers.put("a", 2))
                until(lambda: is_in_turn(store))
                closing_call = Calling(cache.close)
            closing_call.result()
            assert put.result().stored
        with SyncCache(f"sqlite:///{path}") as cache:
            assert value(declared(cache)) == 2


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
class TestE20ThreadsForkFiles:
    def test_a_fork_waits_for_the_write_of_another_thread(self, tmp_path: Path) -> None:
        """The child opens the file anew, and finds what was written; the parent goes on."""
        path = tmp_path / "cache.db"
        go_on = threading.Event()
        writing = threading.Event()
        with SyncCache(f"sqlite:///{path}") as cache:
            numbers = declared(cache)
            numbers.put("a", 1)
            store: Any = cache.on_loop._store

            def slow(_: apsw.Connection) -> None:
                writing.set()
                assert go_on.wait(20)

            step = Calling(lambda: store._writer.run_here(slow))
            assert writing.wait(20)
            reading, sending = os.pipe()
            threading.Timer(0.01, go_on.set).start()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                numbers.put("b", 3)
                os.write(sending, f"{value(numbers)} {value(numbers, 'b')}".encode())
                os._exit(0)
            os.close(sending)
            with os.fdopen(reading) as pipe:
                assert pipe.read() == "1 3"
            os.waitpid(pid, 0)
            assert go_on.is_set()
            step.result()
            assert value(numbers, "b") == 3
            assert numbers.put("a", 4).stored
