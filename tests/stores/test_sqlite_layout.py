"""S13: files of layout 1, which knows no versions and no positions, are carried over.

The files here are written with the SQL of the last release that had that layout. A process of that
release may have the file open, too, so its own statements run beside ours.
"""

import asyncio
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import apsw
import pytest

from stillfresh import StoreError
from stillfresh.stores.contract import (
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
)
from stillfresh.stores.sqlite import SqliteStore, SqliteView
from stillfresh.stores.sqlite.steps import own_tables
from stillfresh.stores.sqlite.writer import Writer
from stillfresh.stores.versions import packed_version
from stillfresh.testing import ManualClock
from tests.kit.engine import until
from tests.kit.old_sqlite import (
    OLD_FILE,
    OLD_INVALIDATE,
    OLD_KIND,
    OLD_LEASE,
    OLD_PUBLISH,
    OLD_READ,
    OLD_ROWS,
    OLD_WRITE,
)
from tests.kit.sqlite import NOW, POLICY, elsewhere, opened, publish, value
from tests.kit.store_processes import working

NOW_MS = 1_700_000_000_000
IDS = ["a", "absent", "failed", "leased"]
RECORDS = {
    "a": Record(Copy("generation-a", NOW, POLICY, b"value")),
    "absent": Record(Copy("generation-b", NOW, POLICY, None, Mark.HARD)),
    "failed": Record(None, None, Failure(2, NOW + 5, "no")),
    "leased": Record(None, NOW + 10),
}
"""What the rows of `OLD_ROWS` are."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of layout 1, with rows in it."""
    path = tmp_path / "cache.db"
    old = apsw.Connection(str(path))
    old.execute(OLD_FILE)
    old.pragma("journal_mode", "wal")
    old.execute((OLD_KIND + OLD_ROWS).format(kind="post"))
    old.close()
    return path


def columns(path: Path, kind: str = "post") -> list[str]:
    with closing(apsw.Connection(str(path))) as connection:
        rows = connection.execute(f"PRAGMA table_info({kind}_ttl)").fetchall()
    return [str(row[1]) for row in rows]


def new_put(store: SqliteStore, value: bytes = b"put", version: int | None = None) -> Put:
    form = packed_version(version)
    return Put(Copy(store.new_generation(), NOW, POLICY, value, version=form))


async def put(
    store: SqliteStore, value: bytes = b"put", version: int | None = None, id_: str = "a"
) -> PutResult:
    return (await store.put("post", {id_: new_put(store, value, version)}))[id_]


def remount_read_only(disk: Path) -> None:
    mount = str(shutil.which("mount"))
    subprocess.run([mount, "-o", "remount,ro", str(disk)], check=True)


class TestS13Layout:
    async def test_rows_of_layout_1_are_read_before_anything_is_written(self, path: Path) -> None:
        """One id, many ids, what is known, and a listing; no copy has a version."""
        async with opened(path) as store:
            assert store.read_now("post", ["a"]) == {"a": RECORDS["a"]}
            assert store.read_now("post", [*IDS, "unknown"]) == RECORDS
            known = store.read_now("post", ["a"], {"a": "generation-a"})["a"].copy
            assert known == Copy("generation-a", NOW, POLICY, UNREAD)
            assert [entry.id for entry in await store.entries()] == IDS
            assert (await store.stats()).copies == 2

    async def test_threads_read_rows_of_layout_1(self, path: Path) -> None:
        """E20: by connections of their own."""
        async with opened(path) as store:
            assert await asyncio.to_thread(store.read_now, "post", IDS) == RECORDS

    async def test_a_read_has_the_table_carried_over_soon(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The writer is asked once, however often the table is read meanwhile."""
        async with opened(path) as store:
            jobs: list[object] = []
            put_job = Writer.put

            def note_job(self: Writer, job: Callable[[apsw.Connection], object]) -> bool:
                jobs.append(job)
                return put_job(self, job)

            monkeypatch.setattr(Writer, "put", note_job)
            for _ in range(3):
                assert store.read_now("post", IDS) == RECORDS
            await store.invalidate("page", ["unknown"])  # behind it in the queue
            assert columns(path)[-2:] == ["version", "changed"]
            assert store.read_now("post", IDS) == RECORDS
            assert len(jobs) == 1

    async def test_a_changed_link_may_lead_to_another_file_of_layout_1(self, path: Path) -> None:
        """It is carried over as well."""
        other = path.with_name("other.db")
        link = path.with_name("link.db")
        shutil.copy(path, other)
        link.symlink_to(path)
        async with opened(link) as store:
            assert store.read_now("post", IDS) == RECORDS
            await put(store, id_="new")
            link.unlink()
            link.symlink_to(other)
            await until(lambda: value(store, "new") is ...)
            assert store.read_now("post", IDS) == RECORDS
            await store.invalidate("page", ["unknown"])
            assert columns(other)[-2:] == ["version", "changed"]

    async def test_a_full_disk_leaves_a_file_of_layout_1_as_it_is(
        self, path: Path, small_disk: Path
    ) -> None:
        """It is opened and read; a write raises, and carries it over when there is room."""
        moved = small_disk / "cache.db"
        shutil.copy(path, moved)
        ballast = small_disk / "ballast"
        async with opened(moved) as store:
            ballast.write_bytes(b"x" * 3_900_000)
            for _ in range(2):
                assert store.read_now("post", IDS) == RECORDS
                with pytest.raises(StoreError, match="the disk is full"):
                    await put(store, b"x" * 1_000_000)
            ballast.unlink()
            assert (await put(store, version=7)).outcome is PutOutcome.STORED
            assert value(store) == b"put"

    async def test_a_read_only_medium_leaves_a_file_of_layout_1_as_it_is(
        self, path: Path, small_disk: Path
    ) -> None:
        """It is opened and read; a write raises."""
        moved = small_disk / "cache.db"
        shutil.copy(path, moved)
        remount_read_only(small_disk)
        async with opened(moved) as store:
            for _ in range(2):
                assert store.read_now("post", IDS) == RECORDS
                assert [entry.id for entry in await store.entries()] == IDS
                with pytest.raises(StoreError, match="read-only"):
                    await put(store)

    @pytest.mark.parametrize("step", ["acquire", "put", "invalidate", "evict", "delete"])
    async def test_any_first_write_keeps_the_rows_of_layout_1(self, path: Path, step: str) -> None:
        """Values, marks, failures, leases and tags are as they were."""
        async with opened(path) as store:
            match step:
                case "acquire":
                    await store.acquire("post", [Ask("new")], 10)
                case "put":
                    assert (await put(store, id_="new")).outcome is PutOutcome.STORED
                case "invalidate":
                    await store.invalidate("post", ["new"])
                case "evict":
                    await store.evict(NOW)
                case _:
                    await store.delete("post", ["new"])
            assert store.read_now("post", IDS) == RECORDS
            assert await store.invalidate_tag("eu", soft=True) == [("post", "a")]
        async with opened(path) as store:
            assert value(store) == b"value"

    async def test_a_lease_from_before_the_carrying_over_publishes_after_it(
        self, path: Path
    ) -> None:
        """The load was under way when the file was carried over."""
        async with opened(path) as store:
            await put(store, id_="other")
            lease = Lease("leased", "token", NOW + 10)
            copy = Copy("token", NOW, POLICY, b"loaded", version=packed_version(3))
            assert await store.publish("post", {"leased": (lease, copy)}) == set()
            assert store.read_now("post", ["leased"]) == {"leased": Record(copy)}

    async def test_versions_work_on_a_file_of_layout_1(self, path: Path) -> None:
        """A row of before has none; positions go up."""
        async with opened(path) as store:
            results = [await put(store, version=number) for number in (7, 3, 9)]
            outcomes = [result.outcome for result in results]
            assert outcomes == [PutOutcome.STORED, PutOutcome.KEPT, PutOutcome.STORED]
            assert 0 < results[0].stamp < results[2].stamp
            assert results[1] == PutResult(PutOutcome.KEPT, packed_version(7))

    async def test_a_limit_of_bytes_counts_rows_of_layout_1(self, path: Path) -> None:
        """E23: the column of the last use stands beside those of layout 2."""
        store = SqliteStore(path, clock=ManualClock(NOW), max_bytes=100_000)
        await store.open()
        await put(store)
        assert ((await store.stats()).held or 0) > 400
        await store.close()
        assert set(columns(path)) > {"version", "changed", "last_used_at"}

    async def test_a_file_of_layout_1_that_cannot_be_written_is_read_as_it_is(
        self, path: Path
    ) -> None:
        """A view never changes a file."""
        before = path.read_bytes()
        view = SqliteView(path, clock=ManualClock(NOW))
        await view.open()
        for _ in range(2):
            assert view.read_now("post", ["a"]) == {"a": RECORDS["a"]}
            assert view.read_now("post", IDS) == RECORDS
            assert [entry.id for entry in await view.entries()] == IDS
        await view.close()
        assert path.read_bytes() == before

    async def test_a_process_that_read_the_old_schema_finds_the_new_one(self, path: Path) -> None:
        """Both have the file open, and one carries it over."""
        async with opened(path) as store, opened(path) as other:
            for each in (store, other):
                assert [entry.id for entry in await each.entries()] == IDS
            assert (await put(store, b"first", version=1)).outcome is PutOutcome.STORED
            assert (await put(other, b"second", version=2)).outcome is PutOutcome.STORED
            assert value(store) == value(other) == b"second"

    async def test_processes_that_open_a_file_of_layout_1_at_once_agree(self, path: Path) -> None:
        """Four real processes write it at once; each write is there, and so are the old rows."""
        with ExitStack() as stack:
            url = f"sqlite:///{path}"
            workers = [stack.enter_context(working("put_rounds", url)) for _ in range(4)]
            for worker in workers:
                assert worker.hear() == "ready"
            for number, worker in enumerate(workers):
                worker.say(f"new-{number}")
            assert [worker.hear() for worker in workers] == ["stored"] * 4
            for worker in workers:
                worker.say("")
                worker.finish()
        async with opened(path) as store:
            assert store.read_now("post", IDS) == RECORDS
            assert all(value(store, f"new-{number}") is not ... for number in range(4))
        assert columns(path)[-2:] == ["version", "changed"]


class TestS13MixedFleet:
    """A process of the old release has the file open, while this one uses it."""

    async def test_the_old_release_goes_on_using_the_file(self, path: Path) -> None:
        """Its load replaces a put, keeps the version, and its invalidation marks the copy."""
        with closing(apsw.Connection(str(path))) as old:
            assert len(old.execute(OLD_READ).fetchall()) == 4
            async with opened(path) as store:
                assert (await put(store, version=7)).outcome is PutOutcome.STORED
                old.execute("BEGIN IMMEDIATE")
                old.execute(OLD_LEASE, ("a", "theirs", NOW_MS + 10_000))
                times = ("theirs", NOW_MS, 30.0, 60.0, 90.0, 0, 0)
                old.execute(OLD_PUBLISH, (*times, "a", "theirs", NOW_MS))
                assert old.changes() == 1
                old.execute(OLD_WRITE, ("a", b"theirs"))
                old.execute("COMMIT")
                copy = store.read_now("post", ["a"])["a"].copy
                assert copy == Copy("theirs", NOW, POLICY, b"theirs", version=packed_version(7))
                assert (await put(store, version=3)).outcome is PutOutcome.KEPT
                old.execute(OLD_INVALIDATE, (2, "a"))
                copy = store.read_now("post", ["a"])["a"].copy
                assert copy is not None
                assert copy.mark is Mark.HARD

    async def test_a_put_voids_the_lease_of_the_old_release(self, path: Path) -> None:
        """The law: its load was granted before, and publishes nothing."""
        with closing(apsw.Connection(str(path))) as old:
            old.execute(OLD_LEASE, ("a", "theirs", NOW_MS + 10_000))
            async with opened(path) as store:
                await put(store)
                times = ("theirs", NOW_MS, 30.0, 60.0, 90.0, 0, 0)
                old.execute(OLD_PUBLISH, (*times, "a", "theirs", NOW_MS))
                assert old.changes() == 0
                assert value(store) == b"put"

    @pytest.mark.parametrize("writes", [False, True])
    async def test_the_old_release_makes_tables_of_layout_1(
        self, path: Path, *, writes: bool
    ) -> None:
        """Of a kind that is used for the first time: it is read, listed, and carried over."""
        async with opened(path) as store:
            await put(store)
            assert store.read_now("page", ["a"]) == {}
            with closing(apsw.Connection(str(path))) as old:
                old.execute((OLD_KIND + OLD_ROWS).format(kind="page"))
            if writes:
                await publish(store, "b", kind="page")
            assert store.read_now("page", IDS) == RECORDS
            listed = [entry.id for entry in await store.entries("page")]
            assert [id_ for id_ in listed if id_ != "b"] == IDS
            await store.invalidate("page", ["failed"])
            assert columns(path, "page")[-2:] == ["version", "changed"]

    async def test_a_transaction_that_fails_leaves_layout_1(self, path: Path) -> None:
        """What was added to the table goes with it; the next write adds it again."""

        def fails(connection: apsw.Connection) -> None:
            own_tables("post").ensure_tables(connection)
            raise ValueError("mine")

        async with opened(path) as store:
            with pytest.raises(ValueError, match="mine"):
                await store.run(fails)
            assert "version" not in columns(path)
            assert (await put(store, version=1)).outcome is PutOutcome.STORED

    def test_an_old_file_may_be_opened_while_it_is_carried_over(self, path: Path) -> None:
        """In another process, which reads all the time."""
        elsewhere(READS, path)


READS = """
import asyncio, sys, threading
import apsw
from stillfresh import Policy
from stillfresh.stores.contract import Copy, Put
from stillfresh.stores.sqlite import SqliteStore

path, values, is_over = sys.argv[1], set(), threading.Event()

def read():
    old = apsw.Connection(path)
    while not is_over.is_set():
        values.update(old.execute("SELECT value FROM post WHERE id = 'a'").fetchall())
    old.close()

async def main():
    store = SqliteStore(path)
    await store.open()
    for number in range(50):
        copy = Copy(store.new_generation(), 1.7e9, Policy(30), b"put")
        await store.put("post", {"a": Put(copy)})
    await store.close()

thread = threading.Thread(target=read)
thread.start()
try:
    asyncio.run(main())
finally:
    is_over.set()
    thread.join()
assert values <= {(b"value",), (b"put",)}, values
"""
