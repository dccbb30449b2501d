"""S12: SQLite files on machines with other users, other programs and processes that stop."""

import asyncio
import fcntl
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import apsw
import pytest

from game_service import Games, Player
from stillfresh import Cache, ConfigError, StoreError
from stillfresh.stores.contract import Ask, Mark
from stillfresh.stores.sqlite import SqliteStore, database, read_only_copy
from stillfresh.stores.sqlite.connection import connect_viewer
from stillfresh.stores.sqlite.files import lock_holder
from stillfresh.stores.sqlite.steps import STORE
from stillfresh.stores.sqlite.view import SqliteView
from stillfresh.stores.sqlite.writer import MAX_GROUP, Writer
from stillfresh.systems.coordinator import Database
from stillfresh.systems.feed import FeedCache
from stillfresh.systems.feed.operator_file import is_feed
from stillfresh.testing import ManualClock
from tests.kit.engine import until
from tests.kit.processes import ROOT
from tests.kit.sqlite import NOW, elsewhere, neighbours, opened, publish, value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


Write: TypeAlias = Callable[[], Awaitable[object]]


@asynccontextmanager
async def a_store(path: Path) -> AsyncIterator[Write]:
    async with opened(path) as store:
        await publish(store, "a")
        yield partial(publish, store, "a")


@asynccontextmanager
async def a_database(path: Path) -> AsyncIterator[Write]:
    database = Database(path)
    await database.open()
    try:
        owners = {"post": "me"}
        await database.serve(owners, keep_other_owner=owners)
        yield partial(publish, database, "a")
    finally:
        await database.close()


@asynccontextmanager
async def a_feed(path: Path) -> AsyncIterator[Write]:
    with await asyncio.to_thread(FeedCache.open, path) as cache:
        cache.put_topics([], "index:all:7")
        yield partial(asyncio.to_thread, cache.put_topics, [], "index:all:7")


@asynccontextmanager
async def some_games(path: Path) -> AsyncIterator[Write]:
    async with Games(path) as games:
        await games.start("g", [Player("me")])
        yield partial(games.move, "g", "me")


FILES = {"store": a_store, "coordinator": a_database, "feed": a_feed, "games": some_games}
LOCKED = [name for name in FILES if name != "games"]


@contextmanager
def lock_held(path: Path) -> Iterator[None]:
    """By another open of the lock file, as another process has one."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def locks_on(path: Path) -> int:
    """How many locks the kernel knows on this file."""
    return Path("/proc/locks").read_text().count(f":{path.stat().st_ino} ")


class TestS12Lock:
    @pytest.mark.parametrize("kind", LOCKED)
    async def test_opening_gives_up_and_names_the_holder(
        self, path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A lock that somebody keeps is a StoreError, the event loop is free meanwhile."""
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        minutes = SimpleNamespace(monotonic=lambda: turns // 10 * 60, sleep=time.sleep)
        monkeypatch.setattr("stillfresh.stores.sqlite.files.time", minutes)
        counting = asyncio.create_task(count())
        said = rf"cache.db\.lock.*process {os.getpid()}\b"
        with lock_held(path), pytest.raises(StoreError, match=said):
            async with FILES[kind](path):
                pass
        counting.cancel()
        async with FILES[kind](path):
            pass

    async def test_opening_waits_for_a_short_while(self, path: Path) -> None:
        """Two that open at the same time both succeed."""
        store = SqliteStore(path)
        with lock_held(path):
            opening = asyncio.create_task(store.open())
            await asyncio.sleep(0.01)
            assert not opening.done()
        await opening
        await store.close()

    @pytest.mark.parametrize("how", [os.symlink, os.link], ids=["symlink", "hard link"])
    async def test_a_lock_file_that_leads_to_the_file_is_refused(
        self, path: Path, how: Callable[[Path, str], None]
    ) -> None:
        """Closing it would drop SQLite's locks on the file (POSIX)."""
        async with opened(path) as store:
            await publish(store, "a")
            Path(f"{path}.lock").unlink()
            how(path, f"{path}.lock")
            before = locks_on(path)
            with pytest.raises(StoreError, match=r"cache\.db\.lock: .*; remove it"):
                await SqliteStore(path).open()
            assert locks_on(path) == before > 0
            assert value(store) == b"value"

    async def test_a_lock_file_that_leads_elsewhere_makes_no_file_there(self, path: Path) -> None:
        """Whoever may write to the directory would choose what we create."""
        Path(f"{path}.lock").symlink_to(path.with_name("elsewhere"))
        with pytest.raises(StoreError, match=r"cache\.db\.lock: .*; remove it"):
            await SqliteStore(path).open()
        assert not path.with_name("elsewhere").exists()

    def test_the_holder_of_a_lock_is_found_by_the_inode(self, path: Path) -> None:
        """The kernel's list names it; a list without it, or none, does not."""
        path.touch()
        lock = path.stat()
        place = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
        text = (
            f"1: POSIX  ADVISORY  WRITE 11 {place} 0 EOF\n"
            f"2: FLOCK  ADVISORY  WRITE 12 {place}7 0 EOF\n"
            f"3: FLOCK  ADVISORY  WRITE 13 {place} 0 EOF\n"
            f"3: -> FLOCK  ADVISORY  WRITE 14 {place} 0 EOF\n"
        )
        assert lock_holder(text, lock) == "process 13"
        assert lock_holder(text.replace("WRITE 13", "WRITE -1"), lock) is None
        assert lock_holder("", lock) is None


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(path: Path) -> dict[str, int]:
    return {found.name: stat.S_IMODE(found.stat().st_mode) for found in path.parent.iterdir()}


@pytest.mark.usefixtures("usual_umask")
class TestS12Private:
    @pytest.mark.parametrize("kind", FILES)
    async def test_new_files_are_private(self, path: Path, kind: str) -> None:
        """The file, its log, its index and its lock: 0600 where the umask is 022."""
        async with FILES[kind](path):
            found = modes(path)
        assert {"cache.db", "cache.db-wal", "cache.db-shm"} <= found.keys()
        assert set(found.values()) == {0o600}

    async def test_an_existing_file_keeps_its_mode(self, path: Path) -> None:
        """Somebody shares it with a group: so are its log and its index."""
        async with opened(path):
            pass
        path.chmod(0o664)
        async with a_store(path):
            found = modes(path)
        assert found.pop("cache.db.lock") == 0o600
        assert set(found.values()) == {0o664}

    async def test_the_file_after_a_damaged_one_is_private(self, path: Path) -> None:
        """The set-aside file keeps its mode; the new one is 0600."""
        path.write_bytes(b"no\0database\xff" * 1_000)
        path.chmod(0o640)
        async with a_store(path):
            found = modes(path)
        (aside,) = (name for name in found if ".corrupt-" in name)
        assert found.pop(aside) == 0o640
        assert set(found.values()) == {0o600}

    async def test_a_link_to_a_missing_file_makes_a_private_one(self, path: Path) -> None:
        """The file that it leads to is made, 0600."""
        (path.parent / "real").mkdir()
        path.symlink_to(path.parent / "real" / "target.db")
        async with a_store(path):
            found = modes(path.parent / "real" / "target.db")
        assert set(found.values()) == {0o600}


def swing(link: Path, target: Path) -> None:
    """As `ln -sfn` does: at no moment there is no link."""
    new = link.with_name("new-link")
    new.symlink_to(target)
    new.replace(link)


class TestS12Link:
    async def test_a_link_that_was_swung_is_followed(self, path: Path) -> None:
        """Noticed by the store's reads and writes; the file before it is left as it was."""
        old, new = path.with_name("old.db"), path.with_name("new.db")
        for target in (old, new):
            async with opened(target) as store:
                await publish(store, "a", value=target.name.encode())
        path.symlink_to(old)
        async with opened(path) as reading, opened(path) as writing:
            assert value(reading) == value(writing) == b"old.db"
            swing(path, new)
            await publish(writing, "b")
            await until(lambda: value(reading) == b"new.db")
            assert value(reading, "b") == b"value"
        async with opened(old) as store:
            assert (value(store), value(store, "b")) == (b"old.db", ...)

    async def test_a_link_that_was_swung_again_meanwhile_is_followed(self, path: Path) -> None:
        """The event loop is busy while the first new file is opened, and nobody writes."""
        targets = [path.with_name(f"{name}.db") for name in ("first", "second", "third")]
        for target in targets:
            async with opened(target) as store:
                await publish(store, "a", value=target.name.encode())
        path.symlink_to(targets[0])
        async with opened(path) as store:
            swing(path, targets[1])
            while not Path(f"{targets[1]}-shm").exists():  # until the writer has opened it
                value(store)
                time.sleep(0.001)  # noqa: ASYNC251 (the loop is busy)
            swing(path, targets[2])
            await until(lambda: value(store) == b"third.db")

    async def test_a_link_that_leads_to_itself_is_an_error_of_the_store(self, path: Path) -> None:
        """At opening, and while it is open: then it works again when the link is mended."""
        loop, target = path.with_name("loop.db"), path.with_name("target.db")
        loop.symlink_to(loop)
        with pytest.raises(StoreError, match="cannot be opened"):
            await SqliteStore(loop).open()
        path.symlink_to(target)
        async with opened(path) as store:
            await publish(store, "a")
            swing(path, loop)
            with pytest.raises(StoreError, match="cannot be opened"):
                await store.invalidate("post", ["a"])
            swing(path, target)
            await store.invalidate("post", ["a"])

    def test_a_feed_whose_link_leads_to_itself_says_so(self, path: Path) -> None:
        """Also a read that needs another connection, since the first one is taken."""
        loop = path.with_name("loop.db")
        loop.symlink_to(loop)
        path.symlink_to(path.with_name("target.db"))
        file = FeedCache.open(path)
        swing(path, loop)

        refused = pytest.raises(StoreError, match="no longer the file that was opened")
        with file.reading(), refused, file.reading():
            pass
        file.close()

    @pytest.mark.parametrize("kind", LOCKED)
    async def test_a_changed_link_to_a_missing_file_begins_it(self, path: Path, kind: str) -> None:
        """That file is begun, and what was written before stays where it is."""
        old, new = path.with_name("old.db"), path.with_name("new.db")
        path.symlink_to(old)
        async with FILES[kind](path) as write:
            swing(path, new)
            await write()
            assert new.stat().st_size > 0
        async with FILES[kind](old) as write:
            await write()


CHECK = """
import sqlite3, sys
found = sqlite3.connect(sys.argv[1])
assert found.execute("PRAGMA integrity_check").fetchone() == ("ok",)
assert found.execute("SELECT count(*) FROM theirs").fetchone() == (1000,)
assert found.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (1,)
found.close()
"""


@pytest.fixture(params=[0, 7], ids=["unmarked", "marked"])
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Another application's database, with or without an application id."""
    place = tmp_path / "foreign.db"
    theirs = sqlite3.connect(place)
    theirs.execute(f"PRAGMA application_id = {request.param}")
    theirs.execute("CREATE TABLE theirs(x)")
    theirs.executemany("INSERT INTO theirs VALUES (?)", [("x" * 50,)] * 1000)
    theirs.commit()
    theirs.close()
    return place


async def viewed(path: Path) -> bool:
    try:
        view = SqliteView(path)
        await view.open()
    except ConfigError:
        return False
    await view.close()
    return True


async def asked_for_a_feed(path: Path) -> bool:
    return is_feed(str(path))


async def copied(path: Path) -> bool:
    with pytest.raises((ConfigError, StoreError), match="another application's"):
        await read_only_copy(path, path.with_name("copy.db"))
    return path.with_name("copy.db").exists()


LOOKS = {"view": viewed, "feed": asked_for_a_feed, "copy": copied}


class TestS12Foreign:
    @pytest.mark.parametrize("kind", FILES)
    async def test_another_applications_file_moved_over_an_open_one_is_left_alone(
        self, path: Path, kind: str, foreign: Path
    ) -> None:
        """Writes fail with the reason until the file is opened again; not a byte changes."""
        before = foreign.read_bytes()
        async with FILES[kind](path) as write:
            foreign.rename(path)
            for _ in range(2):
                with pytest.raises(StoreError, match=r"cache\.db: was moved or replaced"):
                    await write()
            assert not Path(f"{path}-wal").exists()
            elsewhere(CHECK, path)
        assert path.read_bytes() == before
        path.rename(path.with_name("theirs.db"))
        async with FILES[kind](path) as write:
            await write()
        assert path.with_name("theirs.db").read_bytes() == before

    @pytest.mark.parametrize("kind", LOCKED)
    async def test_a_link_to_another_applications_file_is_not_followed(
        self, path: Path, kind: str, foreign: Path
    ) -> None:
        """Writes fail with the reason; not a byte changes; afterwards a new file is begun."""
        before = foreign.read_bytes()
        path.symlink_to(path.with_name("target.db"))
        async with FILES[kind](path) as write:
            swing(path, foreign)
            for _ in range(2):
                with pytest.raises(StoreError, match=r"another application's|without the tables"):
                    await write()
            elsewhere(CHECK, path)
            path.unlink()
            await write()
        assert foreign.read_bytes() == before

    @pytest.mark.parametrize("kind", ["store", "coordinator", "games"])
    async def test_another_applications_file_beside_our_log_is_refused(
        self, path: Path, kind: str, foreign: Path
    ) -> None:
        """It is refused before SQLite would replay the log into it."""
        async with FILES[kind](path):
            shutil.copy(f"{path}-wal", path.with_name("kept"))
        foreign.rename(path)
        path.with_name("kept").rename(f"{path}-wal")
        before = path.read_bytes()
        with pytest.raises(ConfigError, match="another application's"):
            async with FILES[kind](path):
                pass
        assert path.read_bytes() == before

    async def test_a_view_of_another_applications_file_beside_our_log_changes_nothing(
        self, path: Path, foreign: Path
    ) -> None:
        """`stillfresh inspect` on a file whose log is another's."""
        async with a_store(path):
            shutil.copy(f"{path}-wal", path.with_name("kept"))
        foreign.rename(path)
        path.with_name("kept").rename(f"{path}-wal")
        before = path.read_bytes()
        with pytest.raises(ConfigError, match="another application's"):
            await SqliteView(path).open()
        assert path.read_bytes() == before
        assert neighbours(path) == {"cache.db-wal"}

    @pytest.mark.parametrize("look", LOOKS)
    async def test_no_look_writes_our_log_into_another_applications_file(
        self, path: Path, foreign: Path, look: str
    ) -> None:
        """By a view of a link, by the question whether it is a feed, by a copy: it is unchanged."""
        link = path.with_name("link.db")
        link.symlink_to(path)
        before = foreign.read_bytes()
        async with a_store(path):
            foreign.rename(path)
            assert not await LOOKS[look](link)
            assert path.read_bytes() == before
        assert path.read_bytes() == before

    async def test_a_look_at_a_file_of_ours_leaves_its_log(self, path: Path) -> None:
        """A killed process left it; what only looks reads it, and writes nothing back."""
        async with a_store(path):
            for name in (path, Path(f"{path}-wal")):
                shutil.copy(name, name.with_name(f"kept{name.name}"))
        kept = path.with_name(f"kept{path.name}")
        before = kept.read_bytes()
        view = SqliteView(kept)
        await view.open()
        assert (await view.stats()).copies == 1
        await view.close()
        assert kept.read_bytes() == before


HOLD = """
import apsw, sys
found = apsw.Connection(sys.argv[1])
found.execute("BEGIN IMMEDIATE; CREATE TABLE other(x)")
print("ready", flush=True)
sys.stdin.readline()
found.execute("ROLLBACK")
found.close()
"""


@contextmanager
def stopped_while_writing(path: Path) -> Iterator[Callable[[], None]]:
    """A process that is paused inside a write transaction; what it gives lets it go on."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def go_on() -> None:
        process.send_signal(signal.SIGCONT)
        process.communicate("\n", timeout=30)

    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        yield go_on
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each transaction that was tried had."""
    found, write = list[int](), database.WriteDatabase.write

    def counted(self: database.WriteDatabase, group: Sequence[database.WriteJob]) -> None:
        found.append(len(group))
        write(self, group)

    monkeypatch.setattr(database.WriteDatabase, "write", counted)
    return found


@asynccontextmanager
async def impatient(path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, clock=ManualClock(NOW), patience=0.1)
    await store.open()
    try:
        await publish(store, "a")
        yield store
    finally:
        await store.close()


class TestS12Stopped:
    async def test_no_step_waits_for_a_locked_file_after_the_first_failure(
        self, path: Path, tries: list[int], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Steps fail at once, but for one in a while; reads go on; then it works by itself."""
        async with impatient(path) as store:
            with stopped_while_writing(path) as go_on:
                tries.clear()
                for _ in range(200):
                    with pytest.raises(StoreError, match="another process"):
                        await store.acquire("post", [Ask("b")], 10)
                    assert value(store) == b"value"
                assert len(tries) <= 5
                assert (await store.stats()).copies == 1
                go_on()
            await store.invalidate("post", ["unknown"])  # does not wait for a pause to end
            await publish(store, "b")
            assert value(store, "b") == b"value"
        said = [record.getMessage().partition(": ")[2] for record in caplog.records]
        assert [text.partition(";")[0] for text in said] == [
            "another process keeps it locked for writing",
            "can be written again",
        ]

    async def test_steps_that_waited_for_a_locked_file_fail_with_the_first(
        self, path: Path, tries: list[int]
    ) -> None:
        """More than one transaction takes: they are not tried group after group."""
        async with impatient(path) as store:
            with stopped_while_writing(path):
                tries.clear()
                steps = [store.acquire("post", [Ask(f"{n}")], 10) for n in range(3 * MAX_GROUP)]
                outcomes = await asyncio.gather(*steps, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {StoreError}
        assert len(tries) <= 2

    async def test_closing_waits_for_a_locked_file_not_as_long_as_a_step(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A step that waits already gives up, too."""
        monkeypatch.setattr("stillfresh.stores.sqlite.writer.CLOSING", 0.1)
        store = SqliteStore(path, patience=60)
        await store.open()
        with stopped_while_writing(path):
            step = asyncio.create_task(store.invalidate("post", ["a"]))
            await asyncio.sleep(0)
            await asyncio.wait_for(store.close(), 10)
            with pytest.raises(StoreError, match="another process"):
                await step

    async def test_an_invalidation_is_tried_every_time_on_a_locked_file(self, path: Path) -> None:
        """It raises while it cannot be delivered, and is delivered as soon as it can."""
        async with impatient(path) as store:
            with stopped_while_writing(path) as go_on:
                for _ in range(3):
                    with pytest.raises(StoreError, match="another process"):
                        await store.invalidate("post", ["a"])
                go_on()
            await store.invalidate("post", ["a"])
            copy = store.read_now("post", ["a"])["a"].copy
            assert copy is not None
            assert copy.mark == Mark.HARD

    async def test_threads_that_wait_for_a_step_on_a_locked_file_get_the_error(
        self, path: Path
    ) -> None:
        """The feed's writer is the same: a step that can be done without fails at once."""
        readers: list[apsw.Connection] = []
        writer = Writer(path, STORE, readers.append, patience=0.1)
        writer.wait_until_open()
        with stopped_while_writing(path):
            with pytest.raises(StoreError, match="another process"):
                await asyncio.to_thread(writer.submit(lambda _: None).result)
            refused = writer.submit(lambda _: None, urgent=False)
            assert isinstance(refused.exception(0), StoreError)
            assert not writer.put(lambda _: None)  # nor is one that nobody waits for
        readers[0].close()
        writer.stop()

    async def test_a_cache_on_a_locked_file_answers_from_memory_and_its_loader(
        self, path: Path, tries: list[int]
    ) -> None:
        """Copies are read, cold keys are loaded, invalidations raise; afterwards all is stored."""
        loads: list[str] = []
        async with Cache(SqliteStore(path, patience=0.1)) as cache:

            @cache.batched("price", fresh_for="1h", max_batch=1)
            async def prices(skus: list[str]) -> dict[str, str]:
                loads.extend(skus)
                return {sku: sku.upper() for sku in skus}

            assert await prices("warm") == "WARM"
            with stopped_while_writing(path) as go_on:
                tries.clear()
                for number in range(100):
                    assert await prices(f"cold-{number}") == f"COLD-{number}"
                    assert await prices("warm") == "WARM"
                assert len(tries) <= 10
                with pytest.raises(StoreError):
                    await prices.invalidate("warm")
                go_on()
            await prices.invalidate("warm")
            assert await prices("warm") == "WARM"
        assert loads == ["warm", *(f"cold-{number}" for number in range(100)), "warm"]
        async with opened(path) as store:
            assert value(store, "warm", "price") is not ...


LOOKS_AND_DIES = """
import asyncio, os, signal, sqlite3, sys
from tests.kit.sqlite import opened, publish
from pathlib import Path
from stillfresh.stores.sqlite import read_only_copy

path = Path(sys.argv[1])

async def main():
    async with opened(path) as store:
        await publish(store, "0000")
        published = 1
        async def go_on():
            nonlocal published
            while True:
                await publish(store, f"{published:04}")
                published += 1
        writing = asyncio.create_task(go_on())
        for number in range(3):
            seen = published
            copy = await read_only_copy(path, path.with_name(f"copy-{number}.db"))
            found = sqlite3.connect(copy)
            assert found.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert found.execute("SELECT count(*) FROM post").fetchone()[0] >= seen
            found.close()
            while published < seen + 20:
                await asyncio.sleep(0)
        print(published, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def looked_and_died(path: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", LOOKS_AND_DIES, str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )


class TestS12Copy:
    async def test_looking_into_a_copy_loses_nothing(self, path: Path) -> None:
        """Copied while it is written, opened by `sqlite3`, closed; then the process is killed."""
        ran = looked_and_died(path)
        assert (ran.returncode, ran.stderr) == (-signal.SIGKILL, "")
        async with opened(path) as store:
            ids = [f"{number:04}" for number in range(int(ran.stdout))]
            assert store.read_now("post", ids).keys() == set(ids)
            assert len(ids) >= 60

    @pytest.mark.usefixtures("usual_umask")
    @pytest.mark.parametrize("kind", FILES)
    async def test_every_file_of_ours_can_be_copied(
        self, path: Path, tmp_path: Path, kind: str
    ) -> None:
        """While it is open; the copy is private, whole, and one of the same kind."""
        (tmp_path / "copies").mkdir()
        copy = tmp_path / "copies" / "copy.db"
        async with FILES[kind](path) as write:
            assert await read_only_copy(path, copy) == copy
            await write()
        assert modes(copy) == {"copy.db": 0o600}
        found = sqlite3.connect(copy)
        assert found.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found.close()

    async def test_one_of_two_copies_to_one_target_succeeds(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other is told that the target exists, and leaves it alone."""
        copy, both = path.with_name("copy.db"), threading.Barrier(2)

        def connected(path: Path) -> apsw.Connection:
            both.wait(10)
            return connect_viewer(path)

        monkeypatch.setattr("stillfresh.stores.sqlite.view.connect_viewer", connected)
        async with a_store(path):
            made = await asyncio.gather(
                read_only_copy(path, copy), read_only_copy(path, copy), return_exceptions=True
            )
        assert sorted("exists already" in str(it) for it in made) == [False, True]
        assert copy in made
        found = sqlite3.connect(copy)
        assert found.execute("SELECT count(*) FROM post").fetchone() == (1,)
        found.close()

    async def test_half_a_copy_is_removed(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next one may have its name."""

        class Full:
            """A connection to a disk without room."""

            def execute(self, sql: str, *_: object) -> None:
                if sql.startswith("VACUUM"):
                    raise apsw.FullError("database or disk is full")

            def close(self) -> None:
                """Nothing is open."""

        async with a_store(path):
            copy = path.with_name("copy.db")
            with monkeypatch.context() as patch:
                patch.setattr("stillfresh.stores.sqlite.view.connect_viewer", lambda _: Full())
                with pytest.raises(StoreError, match=r"copy\.db: .*full"):
                    await read_only_copy(path, copy)
            assert not copy.exists()
            assert await read_only_copy(path, copy) == copy

    async def test_a_file_that_cannot_be_copied_raises_with_the_reason(self, path: Path) -> None:
        """No file, a target that exists, a target without a directory: nothing is left behind."""
        with pytest.raises(StoreError, match=r"cache\.db: there is no such file"):
            await read_only_copy(path, path.with_name("copy.db"))
        text = path.with_name("text.db")
        text.write_text("no database, and longer than the header of one would be" * 10)
        with pytest.raises(StoreError, match=r"text\.db: is not a SQLite file, or is corrupt"):
            await read_only_copy(text, path.with_name("copy.db"))
        text.unlink()
        async with a_store(path):
            with pytest.raises(StoreError, match="exists already; name a file that does not"):
                await read_only_copy(path, path)
            with pytest.raises(StoreError, match=r"missing/copy\.db: No such file"):
                await read_only_copy(path, path.with_name("missing") / "copy.db")
        assert neighbours(path) == set()
