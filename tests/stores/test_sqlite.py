"""S1, S2, S4: the SQLite store passes the conformance suite, and keeps its own promises."""

import asyncio
import os
import random
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import apsw
import pytest
from msgspec.structs import replace

from game_service.steps import APPLICATION_ID as games_id  # noqa: N811
from stillfresh import Clock, ConfigError, NotOpen, StoreError
from stillfresh.stores.contract import (
    REMEMBERED,
    UNREAD,
    Ask,
    Copy,
    Failure,
    Lease,
    Mark,
    Put,
    PutOutcome,
    PutResult,
    Record,
    Store,
    When,
)
from stillfresh.stores.sqlite import SqliteStore, SqliteView
from stillfresh.stores.sqlite import store as sqlite_store
from stillfresh.stores.sqlite.connection import PATIENCE, Patience, explained
from stillfresh.stores.sqlite.database import WriteDatabase, WriteJob, commit
from stillfresh.stores.sqlite.files import network_filesystem
from stillfresh.stores.sqlite.ownership import Finding, OpenedFile, by_header, not_ours
from stillfresh.stores.sqlite.schema import (
    APPLICATION_ID,
    VERSION,
    at_least,
    at_most,
    record_of,
    statements,
)
from stillfresh.stores.sqlite.steps import STORE, listed_kinds, own_tables
from stillfresh.stores.sqlite.store import CHUNK
from stillfresh.stores.sqlite.tags import is_past
from stillfresh.stores.sqlite.writer import MAX_GROUP, MAX_QUEUED, Writer
from stillfresh.stores.versions import packed_version
from stillfresh.systems.coordinator.database import FIRST_RELEASE as coordinator_id  # noqa: N811
from stillfresh.testing import ManualClock, StoreConformance
from tests.kit.engine import turns, until
from tests.kit.sqlite import NOW, POLICY, elsewhere, neighbours, opened, publish, value
from tests.kit.thread_store import ThreadStore

T = TypeVar("T")

SETTINGS = {
    apsw.SQLITE_DBCONFIG_ENABLE_QPSG: 1,
    apsw.SQLITE_DBCONFIG_DEFENSIVE: 1,
    apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA: 0,
}
MOUNT, UMOUNT = shutil.which("mount"), shutil.which("umount")


class TestS1SqliteStore(StoreConformance):
    """S2: every sentence of the contract, on a real file."""

    path: Path

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "cache.db"

    async def new_store(self, clock: Clock) -> Store:
        return SqliteStore(self.path, clock=clock)


class TestS14SqliteStoreInThreads(TestS1SqliteStore):
    """E20, S2, S8: the same suite, each step in a thread that writes by itself."""

    async def new_store(self, clock: Clock) -> Store:
        self.stores.append(ThreadStore(SqliteStore(self.path, clock=clock)))
        return self.stores[-1]

    @pytest.fixture(autouse=True)
    def _ended(self) -> Iterator[None]:
        self.stores: list[ThreadStore] = []
        yield
        for store in self.stores:
            store.end()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


TIMES = """
    SELECT id, last_updated_at, generation, fresh_for, stale_for, error_for, mark,
        lease_token, lease_expires_at, failures, retry_at, error
    FROM post_ttl ORDER BY id
"""


class TestS4Schema:
    async def test_the_schema_is_what_the_documentation_says(self, path: Path) -> None:
        """Any SQLite reads it: a table of copies, one of times in milliseconds, one of tags."""
        async with opened(path) as store:
            generation = await publish(store, "a")
            asks = [Ask("b", tags=("eu",)), Ask("c")]
            grants = await store.acquire("post", asks, 10)
            lease, failing = grants["b"], grants["c"]
            assert isinstance(lease, Lease)
            assert isinstance(failing, Lease)
            await store.release("post", [failing], {"c": Failure(2, NOW + 1.5, "no")})
        found = sqlite3.connect(path)
        try:
            assert found.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
            assert found.execute("PRAGMA user_version").fetchone() == (VERSION,)
            assert found.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert found.execute("SELECT id, value FROM post").fetchall() == [("a", b"value")]
            assert found.execute(TIMES).fetchall() == [
                ("a", 1_700_000_000_000, generation, 30, 60, 90, 0, None, None, None, None, None),
                ("b", *[None] * 5, 0, lease.token, 1_700_000_010_000, None, None, None),
                ("c", *[None] * 5, 0, None, None, 2, 1_700_000_001_500, "no"),
            ]
            tags = found.execute("SELECT tag, kind, id FROM stillfresh_tags").fetchall()
            assert tags == [("eu", "post", "b")]
        finally:
            found.close()

    async def test_every_connection_has_our_settings(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Plans that stay, no schema that is trusted; `synchronous=NORMAL` for who writes."""
        found: list[apsw.Connection] = []
        monkeypatch.setattr(apsw, "connection_hooks", [found.append])
        async with opened(path) as store:
            await publish(store, "a")
            [writer] = [it for it in found if not it.pragma("query_only")]
            assert writer.pragma("synchronous") == 1  # NORMAL
            assert len(found) > 1
            for setting, value in SETTINGS.items():
                assert {it.config(setting, -1) for it in found} == {value}

    @pytest.mark.parametrize(
        "kind", ["", "Post", "1st", "a-b", 'a"b', "post_ttl", "sqlite_x", "stillfresh_tags", "é"]
    )
    async def test_a_kind_that_cannot_name_a_table_is_refused(self, path: Path, kind: str) -> None:
        """Reading and writing both say what is allowed; the store goes on."""
        async with opened(path) as store:
            with pytest.raises(ConfigError, match="kind: must be"):
                await store.read(kind, ["a"])
            with pytest.raises(ConfigError, match="kind: must be"):
                await store.acquire(kind, [Ask("a")], 10)
            await publish(store, "a")

    @pytest.mark.parametrize("kind", ["select", "order", "x", "ttl", "stillfresh", "a_1"])
    async def test_a_kind_may_be_a_word_of_sql(self, path: Path, kind: str) -> None:
        """A kind is a name, whatever it means in SQL."""
        async with opened(path) as store:
            await publish(store, "a", kind=kind)
            assert value(store, kind=kind) == b"value"

    async def test_a_lease_is_never_shorter_than_asked(self, path: Path) -> None:
        """Times are whole milliseconds on disk: an end is rounded up, now is rounded down."""
        clock = ManualClock(NOW + 0.0004)
        async with opened(path, clock) as store:
            lease = (await store.acquire("post", [Ask("a")], 0.0101))["a"]
            assert isinstance(lease, Lease)
            assert lease.expires_at >= NOW + 0.0105
            clock.advance(0.0100)
            assert await store.renew("post", [lease], 1) == set()
        assert (at_least(0.1 + 0.2), at_most(0.1 + 0.2)) == (300, 300)

    def test_a_path_that_names_no_file_is_refused(self) -> None:
        """For memory there is a store of its own."""
        with pytest.raises(ConfigError, match="must name a file"):
            SqliteStore(":memory:")


class TestS4Reads:
    async def test_many_ids_are_read_at_once(self, path: Path) -> None:
        """More than one statement takes, some twice, some unknown, some with what is known."""
        ids = [f"id-{number}" for number in range(3 * CHUNK + 5)]
        async with opened(path) as store:
            generation = await publish(store, *ids)
            known = {ids[-1]: generation, ids[0]: generation}
            found = store.read_now("post", [*ids, "unknown", ids[1]], known)
            assert list(found) == ids
            values = {id_: record.copy.value for id_, record in found.items() if record.copy}
            assert values.pop(ids[-1]) is UNREAD
            assert set(values.values()) == {b"value"}
            assert store.read_now("post", []) == {}
            assert store.read_now("page", ids) == {}

    async def test_a_mark_is_seen_by_a_reader_that_has_the_value(self, path: Path) -> None:
        """E9: the value is left out, what another process changed about it is not."""
        async with opened(path) as store, opened(path) as other:
            generation = await publish(store, "a")
            for soft, mark in ((True, Mark.SOFT), (False, Mark.HARD)):
                await other.invalidate("post", ["a"], soft=soft)
                copy = store.read_now("post", ["a"], {"a": generation})["a"].copy
                assert copy == Copy(generation, NOW, POLICY, UNREAD, mark)

    async def test_readers_do_not_wait_for_a_writer(self, path: Path) -> None:
        """While another holds the file, reads are answered and writes wait, without an error."""
        async with opened(path) as store:
            await publish(store, "a", value=b"old")
            other = apsw.Connection(str(path))
            other.execute("BEGIN IMMEDIATE")
            writing = asyncio.create_task(publish(store, "a", value=b"new"))
            for _ in range(100):
                await asyncio.sleep(0)
                assert value(store) == b"old"
            other.execute("COMMIT")
            other.close()
            await writing
            assert value(store) == b"new"

    def test_a_step_gives_up_waiting_for_a_locked_file_when_its_patience_ends(self) -> None:
        """Short pauses, shorter for who has waited longer, and not for ever."""
        clock, pauses = ManualClock(), []

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            clock.advance(seconds)

        patience = Patience(clock=clock, sleep=sleep)
        attempts = 0
        while patience(attempts):
            attempts += 1
        assert 29 < clock() < 31
        assert 0.0005 <= min(pauses) < 0.001 <= pauses[0] <= max(pauses) <= 0.005


def query_plan(text: str, bindings: tuple[object, ...], file: apsw.Connection) -> list[Any]:
    return file.execute(f"EXPLAIN QUERY PLAN {text}", bindings).fetchall()


class TestS4Listing:
    async def test_a_listing_follows_the_order_of_the_tables(self, path: Path) -> None:
        """No sorting, and no walk over what was listed already."""
        async with opened(path) as store:
            await publish(store, "a")
            sql = statements("post")
            for text, bindings in ((sql.stretch, ("a", 9)), (sql.listed, ("a", "b", "", 9))):
                steps = await store.run(partial(query_plan, text, bindings), writes=False)
                plan = " ".join(str(step[3]) for step in steps)
                assert "SEARCH" in plan
                assert "TEMP B-TREE" not in plan

    async def test_writers_pass_between_the_slices_of_a_listing(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A search through many entries is many small jobs."""
        monkeypatch.setattr(sqlite_store, "STRETCH", 10)
        async with opened(path) as store:
            await publish(store, *(f"{number:03}" for number in range(200)))
            search = asyncio.create_task(store.entries(search="nothing"))
            await publish(store, "new")
            assert not search.done()
            assert await search == []


class TestE28Stats:
    async def test_writers_pass_between_the_slices_of_a_count(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A count of many ids is many small jobs, and exact."""
        monkeypatch.setattr(sqlite_store, "STRETCH", 10)
        async with opened(path) as store:
            await publish(store, *(f"{number:03}" for number in range(200)))
            await publish(store, "other", kind="price")
            await store.acquire("post", [Ask("loading")], 10)
            counting = asyncio.create_task(store.stats())
            await store.invalidate("post", ["000"])
            assert not counting.done()
            stats = await counting
            assert (stats.copies, stats.leases) == (201, 1)

    async def test_writers_pass_between_the_slices_of_a_tag(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An invalidation of many ids is many small jobs, and reaches all of them."""
        monkeypatch.setattr(sqlite_store, "SLICE", 10)
        async with opened(path) as store:
            ids = [f"{number:03}" for number in range(25)]
            await store.acquire("post", [Ask(id_, None, ("all",)) for id_ in ids], 10)
            jobs, run = list[object](), store.run

            def noted(job: Callable[[apsw.Connection], object]) -> Awaitable[object]:
                jobs.append(job)
                return run(job)

            monkeypatch.setattr(store, "run", noted)
            assert await store.invalidate_tag("all") == [("post", id_) for id_ in ids]
            assert len(jobs) == 3 + 1  # what is left of it is looked at once more
            assert store.read_now("post", ids) == {}

    @pytest.mark.parametrize("column", ["kind", "id"])
    async def test_a_row_of_a_tag_that_names_no_text_is_passed_over(
        self, path: Path, column: str
    ) -> None:
        """S15: another program wrote it; the others are invalidated."""
        async with opened(path) as store:
            await publish(store, "a", "b", tags=("eu",))
            elsewhere(
                "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None); "
                "db.execute(f\"UPDATE stillfresh_tags SET {sys.argv[2]} = x'00' WHERE id = 'b'\")",
                path,
                column,
            )
            assert await store.invalidate_tag("eu") == [("post", "a")]

    async def test_a_large_file_is_not_counted_again_at_once(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However often it is asked for: the figures of a large file are up to 10 s old."""
        monkeypatch.setattr(sqlite_store, "STRETCH", 10)
        clock = ManualClock(NOW)
        async with opened(path, clock) as store:
            await publish(store, *(f"{number:03}" for number in range(10)))
            await publish(store, "more")
            assert (await store.stats()).copies == 11
            await publish(store, "new")
            clock.advance(9.9)
            assert (await store.stats()).copies == 11
            clock.advance(0.1)
            assert (await store.stats()).copies == 12


class TestS4Writer:
    async def test_many_steps_share_one_commit(self, path: Path) -> None:
        """What is queued in one turn of the loop costs a few transactions, not one each."""
        async with opened(path) as store:
            await publish(store, "a")
            before = Path(f"{path}-wal").stat().st_size
            await publish(store, "b")
            one = Path(f"{path}-wal").stat().st_size - before
            before += one
            await asyncio.gather(*(store.acquire("post", [Ask(f"{n}")], 10) for n in range(100)))
            assert Path(f"{path}-wal").stat().st_size - before < 10 * one

    async def test_a_step_that_fails_fails_alone(self, path: Path) -> None:
        """Those that share its transaction are committed; nothing of its own is."""

        def fails(connection: apsw.Connection) -> None:
            connection.execute("DELETE FROM post_ttl")
            raise ValueError("mine")

        def is_refused(connection: apsw.Connection) -> None:
            connection.execute("DELETE FROM post_ttl")
            connection.execute("INSERT INTO post_ttl(id) VALUES (NULL)")

        async with opened(path) as store:
            await publish(store, "a")
            outcomes = await asyncio.gather(
                store.acquire("post", [Ask("b")], 10),
                store.run(fails),
                store.run(is_refused),
                store.acquire("post", [Ask("c")], 10),
                return_exceptions=True,
            )
            assert [type(outcome) for outcome in outcomes] == [dict, ValueError, StoreError, dict]
            assert set(store.read_now("post", ["a", "b", "c"])) == {"a", "b", "c"}

    async def test_the_error_of_a_step_that_only_reads_is_raised(self, path: Path) -> None:
        """The file's errors name it; others come as they are."""

        def broken(_: apsw.Connection) -> None:
            raise KeyError("mine")

        async with opened(path) as store:
            with pytest.raises(StoreError, match=r"cache\.db: .*no such table: missing"):
                await store.run(lambda it: it.execute("SELECT * FROM missing"), writes=False)
            with pytest.raises(KeyError, match="mine"):
                await store.run(broken, writes=False)
            assert await store.run(lambda it: it.execute("SELECT 5").get, writes=False) == 5

    async def test_a_step_is_done_again_only_on_a_new_file(self, path: Path) -> None:
        """If the file was deleted meanwhile; otherwise the error is raised at once."""
        runs: list[str] = []

        def fail(_: apsw.Connection) -> None:
            runs.append("fail")
            raise apsw.IOError("disk I/O error")

        def fail_once(file: apsw.Connection) -> int:
            runs.append("fail once")
            if len(runs) == 2:
                path.unlink()
                raise apsw.IOError("disk I/O error")
            return int(file.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'post'").get)

        async with opened(path) as store:
            await publish(store, "a")
            with pytest.raises(StoreError, match=r"cache\.db: .*disk I/O error"):
                await store.run(fail, writes=False)
            assert await store.run(fail_once, writes=False) == 0
        assert runs == ["fail", "fail once", "fail once"]

    async def test_a_read_that_fails_names_the_file(self, path: Path) -> None:
        """A table that is not there yet counts as empty; any other error is raised."""
        async with opened(path) as store:
            assert store.read_now("post", ["a"]) == store.read_now("post", ["a", "b"]) == {}
            await publish(store, "a")
            elsewhere(RENAME_COLUMN, path)
            for ids in (["a"], ["a", "b"]):
                with pytest.raises(StoreError, match=r"cache\.db: .*no such column"):
                    store.read_now("post", ids)

    async def test_readers_look_at_the_file_now_and_then(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not at every read."""
        looks = count_looks(monkeypatch)
        async with opened(path) as store:
            now = SimpleNamespace(monotonic=lambda: 1e9)
            monkeypatch.setattr(sqlite_store, "time", now)
            looks.clear()
            for _ in range(5):
                store.read_now("post", ["a"])
            assert len(looks) == 1
            now.monotonic = lambda: 1e9 + sqlite_store.LOOK_EVERY
            store.read_now("post", ["a"])
            assert len(looks) == 1
            now.monotonic = lambda: 1e9 + 1.1 * sqlite_store.LOOK_EVERY
            store.read_now("post", ["a"])
            assert len(looks) == 2

    async def test_a_writer_that_is_woken_often_looks_at_the_file_once(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many readers find another file; then it can be woken again."""
        looks = count_looks(monkeypatch)
        readers: list[apsw.Connection] = []
        may_end = threading.Event()
        writer = Writer(path, STORE, readers.append)
        writer.wait_until_open()
        for _ in range(2):
            may_end.clear()
            began = threading.Event()

            def wait(_: apsw.Connection, began: threading.Event = began) -> None:
                began.set()
                may_end.wait(20)

            busy = writer.submit(wait)
            await asyncio.to_thread(began.wait, 20)
            looks.clear()
            for _ in range(3):
                writer.wake()
            may_end.set()
            await asyncio.wrap_future(busy)
            await asyncio.wrap_future(writer.submit(lambda _: None, writes=False))
            assert len(looks) == 2, "one for the readers, one for the last step"
        readers[0].close()
        writer.stop()

    async def test_more_steps_than_fit_in_the_queue_are_all_done(self, path: Path) -> None:
        """They wait for room and all are done; a burst takes several groups."""
        number = MAX_QUEUED + 2 * MAX_GROUP
        async with opened(path) as store:
            grants = await asyncio.gather(
                *(store.acquire("post", [Ask(f"{n}")], 10) for n in range(number))
            )
            assert len(grants) == number
            assert (await store.stats()).leases == number

    async def test_an_eviction_goes_in_slices(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many there are, others' steps pass between the slices."""
        monkeypatch.setattr("stillfresh.stores.sqlite.store.SLICE", 5)
        ids = [f"id-{number}" for number in range(501)]
        async with opened(path) as store:
            await publish(store, *ids)
            eviction = asyncio.create_task(store.evict(NOW + 1_000))
            await store.acquire("post", [Ask("under way")], 2_000)
            assert not eviction.done()
            assert await eviction == len(ids)
            assert set(store.read_now("post", [*ids, "under way"])) == {"under way"}


RENAME_COLUMN = """
import apsw, sys
apsw.Connection(sys.argv[1]).execute("ALTER TABLE post_ttl RENAME COLUMN retry_at TO other")
"""


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What every look at the file finds."""
    looks: list[Finding] = []
    identify = OpenedFile.identify

    def counted(self: OpenedFile) -> Finding:
        looks.append(identify(self))
        return looks[-1]

    monkeypatch.setattr(OpenedFile, "identify", counted)
    return looks


@dataclass
class Slow:
    """Jobs that begin, and do not go on before `may_end` is set."""

    has_begun: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)

    def job(self, inner: Callable[[apsw.Connection], T]) -> Callable[[apsw.Connection], T]:
        def slow(connection: apsw.Connection) -> T:
            self.has_begun.set()
            assert self.may_end.wait(20)
            return inner(connection)

        return slow

    async def began(self) -> None:
        await until(self.has_begun.is_set)


@asynccontextmanager
async def busy(store: SqliteStore) -> AsyncIterator[asyncio.Task[None]]:
    """In the block, the writer of the store is inside a transaction that does not end."""
    slow = Slow()
    task = asyncio.create_task(store.run(slow.job(lambda _: None)))
    await slow.began()
    try:
        yield task
    finally:
        slow.may_end.set()
    await task


def copy_in(store: SqliteStore, id_: str = "a") -> Copy | None:
    return store.read_now("post", [id_]).get(id_, Record()).copy


def put_of(store: SqliteStore, value: bytes = b"put", **fields: Any) -> Put:
    """A put of a value; `fields` are those of its copy."""
    return Put(Copy(store.new_generation(), NOW, POLICY, value, **fields))


async def new_put(store: SqliteStore) -> None:
    await store.put("post", {"a": put_of(store)})


GIVEN_UP: dict[str, Callable[[SqliteStore], Awaitable[object]]] = {
    "put": new_put,
    "invalidate": lambda store: store.invalidate("post", ["a"]),
    "invalidate_tag": lambda store: store.invalidate_tag("eu"),
    "delete": lambda store: store.delete("post", ["a"]),
}
"""Steps that would change what a later step has done (S8)."""


@pytest.mark.parametrize("step", GIVEN_UP)
class TestS8GivenUp:
    """S8, S13: nothing acts after its caller gave up."""

    async def test_a_queued_step_of_a_cancelled_caller_is_never_done(
        self, path: Path, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The caller is told at once; the file is as it was, and no place is lost."""
        monkeypatch.setattr("stillfresh.stores.sqlite.writer.MAX_QUEUED", 2)
        async with opened(path) as store:
            await publish(store, "a", tags=("eu",))
            for _ in range(2):
                async with busy(store) as running:
                    task = asyncio.ensure_future(GIVEN_UP[step](store))
                    await turns()
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    assert not running.done()
            async with asyncio.timeout(20):
                await store.invalidate("post", ["unknown"])
            copy = copy_in(store)
            assert copy is not None
            assert (copy.value, copy.mark) == (b"value", Mark.NONE)

    async def test_a_step_that_waits_for_a_locked_file_has_not_begun(
        self, path: Path, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another process writes: what it does after the caller gave up stays."""
        async with opened(path) as store:
            await publish(store, "a", tags=("eu",))
            waits = threading.Event()
            pause = Patience.__call__

            def note_wait(self: Patience, attempt: int) -> bool:
                waits.set()
                return pause(self, attempt)

            monkeypatch.setattr(Patience, "__call__", note_wait)
            other = apsw.Connection(str(path))
            other.execute("BEGIN IMMEDIATE")
            task = asyncio.ensure_future(GIVEN_UP[step](store))
            await until(waits.is_set)
            task.cancel()
            began = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - began < PATIENCE / 2, "it waited for the other process"
            other.execute("UPDATE post SET value = x'6f74686572'; COMMIT")
            other.close()
            await store.invalidate("post", ["unknown"])
            copy = store.read_now("post", ["a"])["a"].copy
            assert copy is not None
            assert (copy.value, copy.mark) == (b"other", Mark.NONE)

    async def test_the_caller_of_a_step_that_has_begun_waits_for_its_end(
        self, path: Path, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However often it is cancelled; then the step is done, and no place is lost."""
        monkeypatch.setattr("stillfresh.stores.sqlite.writer.MAX_QUEUED", 1)
        async with opened(path) as store:
            await publish(store, "a", tags=("eu",))
            slow = Slow()
            run = Writer.run
            monkeypatch.setattr(
                Writer, "run", lambda self, job, **how: run(self, slow.job(job), **how)
            )
            task = asyncio.ensure_future(GIVEN_UP[step](store))
            await slow.began()
            for _ in range(3):
                task.cancel()
                await turns()
            was_done = task.done()
            slow.may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not was_done
            copy = copy_in(store)
            stored = None if copy is None else (copy.value, copy.mark)
            hard = (b"value", Mark.HARD)
            expected = {"put": (b"put", Mark.NONE), "delete": None}
            assert stored == expected.get(step, hard)
            async with asyncio.timeout(20):
                await store.invalidate("post", ["unknown"])


class TestS13Put:
    """S13: what is SQLite's own about a put; the rest is in the conformance suite."""

    async def test_many_puts_are_one_transaction(self, path: Path) -> None:
        """A reader in another process sees none or all of them; all have one position."""
        async with opened(path) as store:
            ids = [f"{number:03}" for number in range(300)]
            commits = list[int]()

            def note() -> bool:
                commits.append(1)
                return False  # it may be committed

            await store.run(lambda connection: connection.set_commit_hook(note))
            commits.clear()
            results = await store.put("post", {id_: put_of(store) for id_ in ids})
            assert len(commits) == 1
            assert len({result.stamp for result in results.values()}) == 1
            assert set(store.read_now("post", ids)) == set(ids)

    async def test_puts_that_come_together_share_a_commit(self, path: Path) -> None:
        """A hundred callers cost a few transactions; one that is refused fails no other."""
        async with opened(path) as store:
            await store.put("post", {"0": put_of(store, version=packed_version(9))})
            before = Path(f"{path}-wal").stat().st_size
            await store.put("post", {"one": put_of(store)})
            one = Path(f"{path}-wal").stat().st_size - before
            before += one
            older = packed_version(1)
            results = await asyncio.gather(
                *(store.put("post", {f"{n}": put_of(store, version=older)}) for n in range(100))
            )
            outcomes = [result.outcome for each in results for result in each.values()]
            assert outcomes == [PutOutcome.KEPT] + [PutOutcome.STORED] * 99
            assert Path(f"{path}-wal").stat().st_size - before < 10 * one

    async def test_a_put_without_its_value_needs_a_copy(self, path: Path) -> None:
        """E35: also without a condition; an absence stays an absence."""
        async with opened(path) as store:
            unread = Put(Copy(store.new_generation(), NOW, POLICY, UNREAD))
            await store.acquire("post", [Ask("a")], 10)
            results = await store.put("post", {"a": unread, "b": unread})
            assert {result.outcome for result in results.values()} == {PutOutcome.REFUSED}
            absent = Put(Copy(store.new_generation(), NOW, POLICY, None))
            await store.put("post", {"a": absent})
            results = await store.put("post", {"a": unread})
            assert results["a"].outcome is PutOutcome.STORED
            assert value(store) is None

    async def test_every_change_has_a_position_of_its_own(self, path: Path) -> None:
        """E37: puts, publications and invalidations, of two processes; a refusal has none."""
        async with opened(path) as store, opened(path) as other:
            stamps = []
            for writer in (store, other, store):
                stamps.append((await writer.put("post", {"a": put_of(writer)}))["a"].stamp)
                await publish(writer, "b")
                stamps.append(changed(path, "b"))
                await writer.invalidate("post", ["b"])
                stamps.append(changed(path, "b"))
            assert stamps == list(range(stamps[0], stamps[0] + 9))
            refused = Put(put_of(store).copy, when=When.NO_LIVE_COPY)
            assert (await store.put("post", {"a": refused}))["a"].stamp == 0

    async def test_positions_of_a_new_file_are_greater(self, path: Path) -> None:
        """The file was deleted: what comes after is not older than what was."""
        stamps: list[int] = []
        for _ in range(2):
            async with opened(path) as store:
                puts = [await store.put("post", {"a": put_of(store)}) for _ in range(3)]
                stamps += [results["a"].stamp for results in puts]
            path.unlink()
        assert stamps == sorted(set(stamps))

    async def test_an_add_of_a_live_copy_needs_no_lock(self, path: Path) -> None:
        """S13: it writes nothing, so it does not wait for a process that writes."""
        async with opened(path) as store:
            await new_put(store)
            add = replace(put_of(store, b"add"), when=When.NO_LIVE_COPY)
            with closing(apsw.Connection(str(path))) as other:
                other.execute("BEGIN IMMEDIATE")
                results = await store.put("post", {"a": add})
                other.execute("ROLLBACK")
            assert results["a"] == PutResult(PutOutcome.REFUSED)
            assert value(store) == b"put"

    async def test_of_several_adds_those_of_new_ids_are_stored(self, path: Path) -> None:
        """S13: each id has its own outcome, also beside a live copy."""
        async with opened(path) as store:
            await new_put(store)
            add = replace(put_of(store, b"add"), when=When.NO_LIVE_COPY)
            results = await store.put("post", {"a": add, "b": add})
            outcomes = {id_: result.outcome for id_, result in results.items()}
            assert outcomes == {"a": PutOutcome.REFUSED, "b": PutOutcome.STORED}
            assert (value(store), value(store, "b")) == (b"put", b"add")

    async def test_a_put_waits_for_another_process(self, path: Path) -> None:
        """The busy handler is the same as for every write."""
        async with opened(path) as store:
            await publish(store, "a")
            with closing(apsw.Connection(str(path))) as other:
                other.execute("BEGIN IMMEDIATE")
                task = asyncio.ensure_future(new_put(store))
                await turns()
                assert value(store) == b"value"
                other.execute("COMMIT")
            await task
            assert value(store) == b"put"


def changed(path: Path, id_: str) -> int:
    with closing(apsw.Connection(str(path))) as connection:
        sql = "SELECT changed FROM post_ttl WHERE id = ?"
        return int(connection.execute(sql, (id_,)).get)


class TestS8Settled:
    async def test_a_caller_cancelled_when_its_step_is_done_does_not_wait_for_ever(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The step was done, and the loop has not told the caller yet."""
        async with opened(path) as store:
            loop = asyncio.get_running_loop()
            call_soon = loop.call_soon_threadsafe
            is_told = threading.Event()

            def note_call(callback: Callable[..., object], *arguments: Any) -> asyncio.Handle:
                handle = call_soon(callback, *arguments)
                is_told.set()
                return handle

            monkeypatch.setattr(loop, "call_soon_threadsafe", note_call)
            task = asyncio.create_task(store.invalidate("post", ["a"]))
            await asyncio.sleep(0)
            assert is_told.wait(20)  # the loop stands still meanwhile
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                async with asyncio.timeout(20):
                    await task

    async def test_a_step_whose_transaction_failed_may_be_withdrawn_again(self, path: Path) -> None:
        """Nothing is left of it, and it may be tried once more."""

        def fails(connection: apsw.Connection) -> None:
            connection.execute("ROLLBACK")  # as SQLite itself does when the disk is full
            raise apsw.FullError("the disk is full")

        with closing(apsw.Connection(str(path))) as connection:
            claims = threading.Lock()
            group = [WriteJob(fails), WriteJob(lambda _: None)]
            for works in (group, group[:1]):
                with pytest.raises(apsw.FullError):
                    commit(connection, works, claims)
            assert [work.has_begun for work in group] == [False, False]
            commit(connection, group[1:], claims)
            assert group[1].has_begun

    async def test_a_listing_of_a_cancelled_caller_is_not_waited_for(self, path: Path) -> None:
        """It changes nothing."""
        async with opened(path) as store:
            slow = Slow()
            task = asyncio.create_task(store.run(slow.job(lambda _: None), writes=False))
            await slow.began()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            slow.may_end.set()

    async def test_steps_that_share_a_transaction_are_withdrawn_one_by_one(
        self, path: Path
    ) -> None:
        """Of three that wait together, the one that was given up is left out."""
        async with opened(path) as store:
            await publish(store, "a", "b", "c")
            async with busy(store):
                tasks = [asyncio.create_task(store.delete("post", [id_])) for id_ in "abc"]
                await turns()
                tasks[1].cancel()
                await turns()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert set(store.read_now("post", ["a", "b", "c"])) == {"b"}


ALONE = """
import asyncio, os, sys
from stillfresh.stores.contract import Ask
from stillfresh.stores.sqlite import SqliteStore, SqliteView

path, opened = os.path.realpath(sys.argv[1]), []

def heard(event, args):
    if event in {"open", "os.open"} and isinstance(args[0], str):
        opened.append(os.path.realpath(args[0]))

async def main():
    for _ in range(2):
        store = SqliteStore(path)
        await store.open()
        await store.acquire("post", [Ask("a")], 10)
        await store.read("post", ["a"])
        await store.entries()
        await store.stats()
        await store.close()

sys.addaudithook(heard)
asyncio.run(main())
assert f"{path}.lock" in opened, opened
assert not {path, f"{path}-wal", f"{path}-shm"} & set(opened), opened
"""


class TestS4OpenAndClose:
    def test_nobody_but_sqlite_opens_the_file(self, path: Path) -> None:
        """Closing a file of Python's own would drop the locks that SQLite has on it."""
        elsewhere(ALONE, path)

    async def test_a_closed_store_leaves_no_log_and_no_thread(self, path: Path) -> None:
        """No log, no thread; what was queued is done."""
        threads = threading.active_count()
        store = SqliteStore(path, clock=ManualClock(NOW))
        assert not path.exists()
        await store.open()
        await publish(store, "a")
        queued = asyncio.create_task(store.acquire("post", [Ask("b")], 10))
        await asyncio.sleep(0)
        await asyncio.gather(store.close(), store.close())
        assert isinstance((await queued)["b"], Lease)
        assert neighbours(path) == set()
        assert threading.active_count() == threads

    async def test_every_method_of_a_closed_store_raises_not_open(self, path: Path) -> None:
        """Every method, before opening and after closing."""
        store = SqliteStore(path)
        for _ in range(2):
            for call in (
                store.read("post", ["a"]),
                store.read("post", ["a", "b"]),
                store.acquire("post", [Ask("a")], 10),
                store.publish("post", {}),
                store.put("post", {}),
                store.renew("post", [], 10),
                store.release("post", []),
                store.invalidate("post", ["a"]),
                store.invalidate_tag("tag"),
                store.delete("post", ["a"]),
                store.evict(NOW),
                store.stats(),
            ):
                with pytest.raises(NotOpen):
                    await call
            await store.open()
            await store.close()

    async def test_steps_that_wait_for_room_are_refused_when_the_store_closes(
        self, path: Path
    ) -> None:
        """Closing while the queue is full: what was queued is done, the rest is refused."""
        store = SqliteStore(path)
        await store.open()
        steps = [store.acquire("post", [Ask(f"{n}")], 10) for n in range(MAX_QUEUED + 50)]
        tasks = [asyncio.create_task(step) for step in steps]
        await asyncio.sleep(0)
        await store.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {dict, NotOpen}
        assert all(isinstance(outcome, dict) for outcome in outcomes[:MAX_QUEUED])

    async def test_a_store_may_be_opened_while_it_closes(self, path: Path) -> None:
        """It is closed first, then opened again."""
        store = SqliteStore(path, clock=ManualClock(NOW))
        await store.open()
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        await store.open()
        await closing
        await publish(store, "a")
        assert value(store) == b"value"
        await store.close()

    def test_a_store_opens_again_on_another_loop(self, path: Path) -> None:
        """What was published is there."""
        store = SqliteStore(path, clock=ManualClock(NOW))

        async def once() -> object:
            await store.open()
            before = value(store)
            await publish(store, "a")
            await store.close()
            return before

        assert [asyncio.run(once()) for _ in range(2)] == [..., b"value"]

    def test_the_writer_ends_after_a_loop_that_ended_without_closing(self, path: Path) -> None:
        """The thread sees at its next step that nobody is left, and ends."""
        threads = threading.active_count()
        store = SqliteStore(path)

        async def forgets_to_close() -> None:
            await store.open()

        asyncio.run(forgets_to_close())
        path.unlink()
        until = time.monotonic() + 20
        while threading.active_count() > threads:
            assert time.monotonic() < until, "its thread does not end"
            with suppress(StoreError):
                store.read_now("post", ["a"])  # which finds that the file was deleted
            time.sleep(0.001)

    async def test_a_store_that_several_tasks_open_has_one_thread(self, path: Path) -> None:
        """One thread, one file."""
        store = SqliteStore(path)
        threads = threading.active_count()
        await asyncio.gather(*(store.open() for _ in range(5)))
        assert threading.active_count() == threads + 1
        await store.close()

    async def test_a_place_where_no_file_can_be_is_refused(self, tmp_path: Path) -> None:
        """Said with the path and what to do; nothing is made, and nothing stays open."""
        threads = threading.active_count()
        for path, words in (
            (tmp_path / "missing" / "cache.db", "there is no directory .*missing; create it"),
            (tmp_path, "is a directory"),
        ):
            store = SqliteStore(path)
            with pytest.raises(StoreError, match=words):
                await store.open()
            with pytest.raises(NotOpen):
                await store.read("post", ["a"])
        assert list(tmp_path.iterdir()) == []
        assert not Path(f"{tmp_path}.lock").exists()
        assert threading.active_count() == threads

    async def test_a_symbolic_link_leads_to_the_same_store(self, path: Path) -> None:
        """Two names, one store."""
        link = path.with_name("link.db")
        link.symlink_to(path)
        async with opened(link) as one, opened(path) as other:
            await publish(one, "a")
            assert value(other) == b"value"


class TestS4View:
    async def test_a_view_reads_and_never_writes(self, path: Path) -> None:
        """Beside a process that writes; a step that would write is refused."""
        async with opened(path) as store:
            await publish(store, "a")
            view = SqliteView(path, clock=ManualClock(NOW))
            await view.open()
            assert value(view) == b"value"
            assert [entry.id for entry in await view.entries()] == ["a"]
            assert (await view.stats()).copies == 1
            with pytest.raises(StoreError, match=r"cache\.db: the file is read-only"):
                await view.invalidate("post", ["a"])
            with pytest.raises(StoreError, match="no such table: missing"):
                view.run_read(lambda file: file.execute("SELECT * FROM missing"))
            await publish(store, "b")
            assert value(view, "b") == b"value"
            await view.close()
            with pytest.raises(NotOpen, match="this view is closed"):
                await view.stats()
            with pytest.raises(NotOpen):
                value(view)

    async def test_a_view_reads_the_opened_file_to_the_end(self, path: Path) -> None:
        """Even if another takes its place."""
        other = path.with_name("other.db")
        for file, ids in ((path, ["a"]), (other, ["b"])):
            async with opened(file) as store:
                await publish(store, *ids)
        view = SqliteView(path)
        await view.open()
        other.replace(path)
        assert (value(view), value(view, "b")) == (b"value", ...)
        await view.close()

    async def test_a_view_of_a_damaged_file_raises(self, damaged: Path) -> None:
        """It is left as it is."""
        view = SqliteView(damaged)
        await view.open()
        for ids in (["id-1"], ["id-1", "id-2"]):
            with pytest.raises(StoreError, match="is not a SQLite file, or is corrupt"):
                view.read_now("post", ids)
        await view.close()
        assert neighbours(damaged) == set()

    async def test_a_file_that_cannot_be_viewed_is_refused_with_the_reason(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is made, begun or renamed."""
        await _refused(path, "there is no such file")
        assert not path.exists()
        await _refused(path.parent, "is not a file")
        path.touch()
        await _refused(path, "is empty, and not a store yet")
        assert (path.stat().st_size, neighbours(path)) == (0, set())
        path.write_bytes(b"no\0database\xff" * 1_000)
        await _refused(path, "is not a SQLite file, or is corrupt")
        assert neighbours(path) == set()
        monkeypatch.setattr(os, "access", lambda *_: False)
        await _refused(path, "permission denied")

    async def test_a_view_of_another_applications_file_is_refused(self, path: Path) -> None:
        """And left at once."""
        elsewhere(BEGIN_THEIRS, path)
        view = SqliteView(path)
        with pytest.raises(ConfigError, match="another application's SQLite file"):
            await view.open()
        with pytest.raises(NotOpen):
            view.run_read(lambda file: file)


BEGIN_THEIRS = """
import sqlite3, sys
theirs = sqlite3.connect(sys.argv[1])
theirs.execute("CREATE TABLE theirs(x)")
theirs.close()
"""


async def _refused(path: Path, words: str) -> None:
    view = SqliteView(path)
    with pytest.raises(StoreError, match=f"{path.name}: {words}"):
        await view.open()


class TestS4Rows:
    ROW = ("g", 2_000, 30.0, 60.0, 90.0, 1, 5_000, 2, 7_000, "no", 0, b"value", None)

    def test_a_row_is_a_record(self) -> None:
        """Times are milliseconds there; a value that is known already is not read again."""
        copy = Copy("g", 2.0, POLICY, b"value", Mark.SOFT)
        failure = Failure(2, 7.0, "no")
        assert record_of(self.ROW, None) == Record(copy, 5.0, failure)
        known = record_of((*self.ROW[:11], None, None), "g")
        assert known.copy is not None
        assert known.copy.value is UNREAD
        assert known.held_until == 5.0
        absent = record_of((*self.ROW[:10], 1, None, None), None)
        assert absent.copy is not None
        assert absent.copy.value is None
        leased = record_of((*[None] * 5, 0, 5_000, None, None, None, 0, None, None), None)
        assert leased == Record(None, 5.0, None)

    @pytest.mark.parametrize(
        ("column", "value"),
        [
            *[(0, 5), (0, b"g"), (1, "x"), (1, None), (2, "x"), (2, -1.0), (5, 9), (5, "x")],
            *[(6, "x"), (7, "x"), (8, None), (10, 1), (11, None), (11, "text"), (11, 5)],
            *[
                (12, 5),
                (12, 0.5),
                (12, "i"),
                (12, b""),
                (12, b"i1"),
                (12, b"x12345678"),
                (12, b"t\xff"),
            ],
        ],
    )
    def test_a_row_that_another_program_wrote_counts_as_none(
        self, column: int, value: object
    ) -> None:
        """A wrong type, a mark that there is not, a value that is absent and there."""
        row: list[object] = [*self.ROW]
        row[column] = value
        assert record_of(tuple(row), None) == Record()


class TestS4Steps:
    async def test_a_kind_whose_tables_are_gone_lists_nothing(self, path: Path) -> None:
        """The file was renamed since the kinds were listed."""
        listed = partial(own_tables("gone").listed, start="", search="", limit=5, size=5)
        async with opened(path) as store:
            assert await store.run(listed, writes=False) == ([], None)

    @pytest.mark.parametrize(
        ("epoch", "tags", "expected"),
        [
            (1, ("eu",), False),
            (0, ("eu",), True),
            (0, ("us",), False),
            (0, ("us", "eu"), True),
            (0, (), False),
            (1 - REMEMBERED, ("us",), False),
            (-REMEMBERED, ("us",), True),
            (-REMEMBERED, (), False),
        ],
    )
    async def test_i26_a_tag_is_past_if_that_is_known_or_no_longer_known(
        self, path: Path, epoch: int, tags: tuple[str, ...], *, expected: bool
    ) -> None:
        """It was invalidated since the grant, or so many tags were that it may have been."""
        async with opened(path) as store:
            await store.invalidate_tag("eu")
            lease = Lease("a", "t", 0.0, epoch)
            assert await store.run(lambda it: is_past(it, lease, tags)) is expected

    def test_a_listing_goes_on_behind_an_entry(self) -> None:
        """In its kind behind its id, in later kinds from the beginning."""
        kinds = ["c", "a", "b"]
        assert listed_kinds(kinds, None, None) == [("a", ""), ("b", ""), ("c", "")]
        assert listed_kinds(kinds, None, ("b", "x")) == [("b", "x\0"), ("c", "")]
        assert listed_kinds(kinds, "b", ("a", "x")) == [("b", "")]
        assert listed_kinds(kinds, "a", ("b", "x")) == []

    async def test_a_damaged_file_that_cannot_be_renamed_is_an_error(self, path: Path) -> None:
        """Where no lock file can be made, nothing can be renamed either."""
        path.write_bytes(b"no\0database\xff" * 1_000)
        Path(f"{path}.lock").mkdir()
        with pytest.raises(StoreError, match="is corrupt, and cannot be renamed or replaced here"):
            await SqliteStore(path).open()
        assert neighbours(path) == set()


class TestS4OtherVersion:
    @pytest.mark.parametrize(
        ("statements", "words"),
        [
            (f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 99", "99.* knows 1"),
            ("CREATE TABLE theirs(x)", "another application's"),
            ("PRAGMA user_version = 3", "another application's"),
            ("PRAGMA application_id = 7", r"application_id 7\)"),
        ],
    )
    async def test_a_file_of_another_version_is_refused_and_left_alone(
        self, path: Path, statements: str, words: str
    ) -> None:
        """Another version's file, or somebody else's, is not ours to change."""
        with sqlite3.connect(path) as theirs:
            theirs.executescript(statements)
        theirs.close()
        before = path.read_bytes()
        with pytest.raises(ConfigError, match=f"cache.db.*{words}"):
            await SqliteStore(path).open()
        assert path.read_bytes() == before
        assert neighbours(path) == set()

    @pytest.mark.parametrize(
        ("application_id", "words"),
        [
            (coordinator_id, "a coordinator's file of stillfresh"),
            (games_id, "a games file of stillfresh"),
        ],
    )
    async def test_a_file_of_another_part_of_stillfresh_is_named(
        self, path: Path, application_id: int, words: str
    ) -> None:
        """A coordinator's or a games file is ours, but no store: the error says which it is."""
        with sqlite3.connect(path) as theirs:
            theirs.execute(f"PRAGMA application_id = {application_id}")
        theirs.close()
        with pytest.raises(ConfigError, match=f"cache.db: is {words}.*; name another file"):
            await SqliteStore(path).open()

    async def test_a_damaged_file_of_another_application_is_left_alone(self, path: Path) -> None:
        """A valid header without our mark is refused, whatever state the rest is in."""
        with sqlite3.connect(path) as theirs:
            theirs.executescript("CREATE TABLE theirs(x); CREATE TABLE more(x)")
        theirs.close()
        header = path.read_bytes()[:100]
        path.write_bytes(header + b"\xff" * 8_000)
        with pytest.raises(ConfigError, match="another application's"):
            await SqliteStore(path).open()
        assert path.read_bytes()[:100] == header

    async def test_an_empty_file_is_begun(self, path: Path) -> None:
        """Made by `touch`, or by a process that died at once."""
        path.touch()
        async with opened(path) as store:
            await publish(store, "a")


NOISE = random.Random(7).randbytes(5_000)
DAMAGE = """
import os, sys
path = sys.argv[1]
with open(path, "r+b") as file:
    file.seek(4096)
    file.write(b"\\xff" * (os.path.getsize(path) - 4096))
"""


@pytest.fixture
async def damaged(path: Path) -> Path:
    """A file that was whole once: its first page still is."""
    async with opened(path) as store:
        await publish(store, *(f"id-{number}" for number in range(500)))
    elsewhere(DAMAGE, path)
    return path


class TestS4Corrupt:
    @pytest.mark.parametrize(
        "head",
        [
            b"[store]\nurl = 'x'\n",
            "größer → ключ 日本\n".encode() * 300,
            b"xy",
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
            b"PK\x03\x04\x14\0\0\0",
            b"%PDF-1.7\n%\xe2\xe3",
        ],
    )
    async def test_g18_a_file_that_is_plainly_no_database_is_left_alone(
        self, path: Path, head: bytes
    ) -> None:
        """A text, an image, an archive: refused, not renamed, and not a byte of it is changed."""
        path.write_bytes(head)
        with pytest.raises(ConfigError, match="not a SQLite file; it is left as it is"):
            await SqliteStore(path).open()
        assert (path.read_bytes(), neighbours(path)) == (head, set())

    @pytest.mark.parametrize("head", [b"\0" * 5_000, b"\0" * 16 + b"text" * 1_000, NOISE])
    async def test_g18_a_garbled_database_is_set_aside(self, path: Path, head: bytes) -> None:
        """Zeros, noise, a header that was overwritten: nothing else would look like that."""
        path.write_bytes(head)
        async with opened(path) as store:
            await publish(store, "a")
        assert len(neighbours(path)) == 1

    async def test_a_file_that_is_corrupt_at_opening_is_set_aside(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """No database at all: renamed, logged as an error, a new one begun."""
        path.write_bytes(b"no\0database\xff" * 1_000)
        async with opened(path) as store:
            await publish(store, "a")
            assert value(store) == b"value"
        (aside,) = neighbours(path)
        assert aside.startswith("cache.db.corrupt-2")
        assert (path.parent / aside).read_bytes() == b"no\0database\xff" * 1_000
        (record,) = caplog.records
        assert record.levelname == "ERROR"
        assert aside in record.getMessage()

    async def test_corruption_that_a_reader_finds_counts_as_empty(self, damaged: Path) -> None:
        """The answer is empty; the next step finds a new file."""
        async with opened(damaged) as store:
            assert store.read_now("post", ["id-1"]) == {}
            assert store.read_now("post", ["id-1", "id-2"]) == {}
            assert store.read_now("post", [f"id-{number}" for number in range(500)]) == {}
            assert (await store.stats()).copies == 0
            await publish(store, "id-1")
            assert value(store, "id-1") == b"value"
        assert len([name for name in neighbours(damaged) if name.endswith("Z")]) == 1

    @pytest.mark.parametrize("step", ["acquire", "invalidate", "evict", "stats"])
    async def test_a_step_that_finds_corruption_is_done_on_a_new_file(
        self, damaged: Path, step: str
    ) -> None:
        """On the new file: who asked does not notice."""
        async with opened(damaged) as store:
            match step:
                case "acquire":
                    assert isinstance((await store.acquire("post", [Ask("a")], 9))["a"], Lease)
                case "invalidate":
                    await store.invalidate("post", ["id-1"])
                case "evict":
                    assert await store.evict(NOW) == 0
                case _:
                    assert (await store.stats()).copies == 0
            await publish(store, "b")
        assert len([name for name in neighbours(damaged) if name.endswith("Z")]) == 1

    async def test_a_file_that_took_the_place_of_a_corrupt_one_is_not_set_aside(
        self, damaged: Path
    ) -> None:
        """Another process may have mended it already."""
        readers = list[apsw.Connection]()
        database = WriteDatabase(damaged, STORE, readers.append)
        database.open()
        database.damaged = readers[0]
        damaged.unlink()
        async with opened(damaged) as store:
            await publish(store, "a")
            database.open()
            assert [name for name in neighbours(damaged) if "corrupt" in name] == []
            database.damaged = readers[1]
            database.open()
            assert len([name for name in neighbours(damaged) if name.endswith("Z")]) == 1
        readers[2].close()
        database.close()

    async def test_one_of_several_stores_sets_a_corrupt_file_aside(self, damaged: Path) -> None:
        """The others open the new file, and share it."""
        async with opened(damaged) as one, opened(damaged) as other, opened(damaged) as third:
            stores = [one, other, third]
            assert [value(store, "id-1") for store in stores] == [...] * 3
            await asyncio.gather(*(store.stats() for store in stores))
            await publish(one, "id-1", value=b"shared")
            assert [value(store, "id-1") for store in stores] == [b"shared"] * 3
        assert len([name for name in neighbours(damaged) if name.endswith("Z")]) == 1

    async def test_a_deleted_file_is_begun_anew_for_readers_and_writers(self, path: Path) -> None:
        """Somebody emptied the cache with `rm`: noticed by who only reads, and by who writes."""
        async with opened(path) as store, opened(path) as writing:
            await publish(store, "a")
            for name in ("", "-wal", "-shm"):
                Path(f"{path}{name}").unlink()
            await until(lambda: value(store) is ...)
            await publish(writing, "b")
            assert value(store, "b") == value(writing, "b") == b"value"
            await publish(store, "a")
        async with opened(path) as store:
            assert value(store) == b"value"


class TestS4FullDisk:
    async def test_reads_go_on_while_the_disk_is_full_and_room_is_noticed(
        self, small_disk: Path
    ) -> None:
        """Writes raise StoreError while there is no room, and work again when there is."""
        ballast = small_disk / "ballast"
        ballast.write_bytes(b"x" * 2_000_000)
        async with opened(small_disk / "cache.db") as store:
            await publish(store, "a")
            lease = (await store.acquire("post", [Ask("big")], 10))["big"]
            assert isinstance(lease, Lease)
            big = Copy(lease.token, NOW, POLICY, b"x" * 3_000_000)
            for _ in range(2):
                with pytest.raises(StoreError, match="the disk is full") as caught:
                    await store.publish("post", {"big": (lease, big)})
                assert isinstance(caught.value.__cause__, apsw.FullError)
                assert value(store) == b"value"
                assert value(store, "big") is ...
            ballast.unlink()
            assert await store.publish("post", {"big": (lease, big)}) == set()
            assert value(store, "big") == big.value

    async def test_s13_a_put_that_does_not_fit_changes_nothing(self, small_disk: Path) -> None:
        """Of two ids in one call, neither is stored; the old copy and the lease stay."""
        async with opened(small_disk / "cache.db") as store:
            generation = await publish(store, "a", tags=("eu",))
            lease = (await store.acquire("post", [Ask("a", generation, ("eu",))], 10))["a"]
            assert isinstance(lease, Lease)
            before = store.read_now("post", ["a"])
            big = {"a": b"new", "big": b"x" * 5_000_000}
            puts = {id_: put_of(store, value) for id_, value in big.items()}
            with pytest.raises(StoreError, match="the disk is full"):
                await store.put("post", puts)
            assert store.read_now("post", ["a", "big"]) == before
            assert await store.renew("post", [lease], 10) == set()
            assert await store.invalidate_tag("eu", soft=True) == [("post", "a")]
            results = await store.put("post", {"a": puts["a"]})
            assert results["a"].outcome is PutOutcome.STORED
            assert value(store) == b"new"

    async def test_a_step_that_does_not_fit_on_the_disk_fails_alone(self, small_disk: Path) -> None:
        """They shared a transaction; the others are committed."""
        async with opened(small_disk / "cache.db") as store:
            grants = await store.acquire("post", [Ask("big"), Ask("small")], 10)
            steps = []
            for id_, size in (("big", 5_000_000), ("small", 10)):
                lease = grants[id_]
                assert isinstance(lease, Lease)
                copy = Copy(lease.token, NOW, POLICY, b"x" * size)
                steps.append(store.publish("post", {id_: (lease, copy)}))
            big, small = await asyncio.gather(*steps, return_exceptions=True)
            assert isinstance(big, StoreError)
            assert small == set()
            assert value(store, "small") == b"x" * 10


class TestS4ReadOnly:
    async def test_reads_go_on_while_the_file_is_read_only_and_its_end_is_noticed(
        self, small_disk: Path
    ) -> None:
        """Opened on a read-only medium: reads answer, writes raise, until it is writable."""
        path = small_disk / "cache.db"
        async with opened(path) as store:
            await publish(store, "a")
        remount(small_disk, "ro")
        async with opened(path) as store:
            assert value(store) == b"value"
            assert (await store.stats()).copies == 1
            for _ in range(2):
                with pytest.raises(StoreError, match="read-only"):
                    await store.invalidate("post", ["a"])
            remount(small_disk, "rw")
            await store.invalidate("post", ["a"])
            copy = store.read_now("post", ["a"])["a"].copy
            assert copy is not None
            assert copy.mark == Mark.HARD

    async def test_no_file_can_be_begun_on_a_read_only_medium(self, small_disk: Path) -> None:
        """Said with the path."""
        remount(small_disk, "ro")
        with pytest.raises(StoreError, match=r"cache\.db: cannot be opened"):
            await SqliteStore(small_disk / "cache.db").open()

    async def test_an_empty_file_that_is_read_only_cannot_become_a_cache(
        self, small_disk: Path
    ) -> None:
        """It was opened, and then taken for one that another program had overwritten."""
        (small_disk / "cache.db").touch()
        remount(small_disk, "ro")
        with pytest.raises(StoreError, match=r"cache\.db: is empty and read-only; make"):
            await SqliteStore(small_disk / "cache.db").open()

    @pytest.mark.parametrize(
        ("code", "words"),
        [
            (apsw.SQLITE_READONLY_DIRECTORY, "its directory must be writable"),
            (apsw.SQLITE_READONLY_DBMOVED, "the file is read-only"),
            (apsw.SQLITE_BUSY_SNAPSHOT, "another process keeps it locked for writing"),
            (apsw.SQLITE_IOERR_FSYNC, "IOError"),
        ],
    )
    def test_an_error_of_the_file_says_what_to_do(self, path: Path, code: int, words: str) -> None:
        """In words that name the file, never "database is locked"."""
        assert str(explained(path, apsw.exception_for(code))).startswith(f"{path}: {words}")


def remount(disk: Path, mode: str) -> None:
    subprocess.run([str(MOUNT), "-o", f"remount,{mode}", str(disk)], check=True)


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /srv rw,relatime shared:5 - nfs4 server:/srv rw,vers=4.2
31 30 0:41 / /srv/local rw - xfs /dev/vdb rw
32 22 0:42 / /mnt/with\\040space rw - cifs //server/share rw
33 22 0:43 / /mnt/hidden rw - nfs server:/old rw
34 33 0:44 / /mnt/hidden rw - tmpfs tmpfs rw
35 22 0:45 / /home/me/far rw - fuse.sshfs me@far: rw
36 22 0:46 / /sandbox rw - 9p host rw
"""


class TestS4NetworkFilesystem:
    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("/var/cache.db", None),
            ("/srv/cache.db", "nfs4"),
            ("/srv/local/cache.db", None),
            ("/srvother/cache.db", None),
            ("/mnt/with space/cache.db", "cifs"),
            ("/mnt/hidden/cache.db", None),
            ("/home/me/far/deep/cache.db", "fuse.sshfs"),
            ("/sandbox/cache.db", None),
        ],
    )
    def test_a_network_filesystem_is_known_by_its_mount(
        self, path: str, expected: str | None
    ) -> None:
        """The deepest mount over a path decides, and of two on one point the later."""
        assert network_filesystem(MOUNTS, Path(path)) == expected

    async def test_a_file_on_a_network_filesystem_is_refused_with_the_reason(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Locks and shared memory do not work there."""
        mounts = path.with_name("mountinfo")
        mounts.write_text(f"40 22 0:50 / {path.parent} rw - nfs server:/x rw\n")
        monkeypatch.setattr("stillfresh.stores.sqlite.files.MOUNTINFO", mounts)
        with pytest.raises(ConfigError, match=r"network filesystem \(nfs\).*use a local disk"):
            await SqliteStore(path).open()
        assert not path.exists()


class TestS4Header:
    """A format that the header of a file names."""

    def test_a_file_of_ours_is_named_for_what_it_is(self) -> None:
        """By the ids that the formats have."""
        for application, what in (
            (APPLICATION_ID, "a cache's store"),
            (coordinator_id, "a coordinator's file"),
            (games_id, "a games file"),
        ):
            assert f"a.db: is {what} of stillfresh" in str(not_ours(Path("a.db"), application))

    @pytest.mark.parametrize("is_cache", [True, False])
    def test_an_empty_file_is_begun_and_others_are_refused(self, is_cache: bool) -> None:
        """Of another version, of another program, or with tables and no name."""
        ours = by_header(77, 3, "", is_cache=is_cache)
        assert (ours.application_ids, ours.is_cache) == ((77,), is_cache)
        with closing(apsw.Connection(":memory:")) as file:
            assert not ours.is_begun(file, Path("a.db"))
            file.execute("PRAGMA application_id = 77; PRAGMA user_version = 3")
            assert ours.is_begun(file, Path("a.db"))
            file.execute("PRAGMA user_version = 4")
            with pytest.raises(
                ConfigError, match=r"a\.db: is of schema version 4, .* 3;"
            ) as caught:
                ours.is_begun(file, Path("a.db"))
            assert ("delete this one: it is a cache" in str(caught.value)) is is_cache
            for begun in ("application_id = 5", "application_id = 0"):
                file.execute(f"PRAGMA {begun}")
                with pytest.raises(ConfigError, match=r"a\.db: is "):
                    ours.is_begun(file, Path("a.db"))
            file.execute("PRAGMA user_version = 0; CREATE TABLE other (id)")
            with pytest.raises(ConfigError, match=r"a\.db: is "):
                ours.is_begun(file, Path("a.db"))
