"""S12: SQLite files on machines with other users, other programs and processes that stop."""

import asyncio
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from sqlite_kit import opened, publish

from stillfresh import StoreError
from stillfresh.coordinator import Database
from stillfresh.feed import FeedCache
from stillfresh.stores.sqlite import SqliteStore
from stillfresh.stores.sqlite.files import identity_of, lock_holder
from stillfresh.waiting.backend import Games, Player


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


@asynccontextmanager
async def a_store(path: Path) -> AsyncIterator[None]:
    async with opened(path) as store:
        await publish(store, "a")
        yield


@asynccontextmanager
async def a_database(path: Path) -> AsyncIterator[None]:
    database = Database(path)
    await database.open()
    try:
        await database.serve({"post": "me"})
        yield
    finally:
        await database.close()


@asynccontextmanager
async def a_feed(path: Path) -> AsyncIterator[None]:
    with await asyncio.to_thread(FeedCache.open, path) as cache:
        cache.put_topics([], "index:all:7")
        yield


@asynccontextmanager
async def some_games(path: Path) -> AsyncIterator[None]:
    async with Games(path) as games:
        await games.start("g", [Player("me")])
        yield


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


class TestS12Lock:
    @pytest.mark.parametrize("kind", LOCKED)
    async def test_opening_gives_up_and_names_the_holder(
        self, path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A lock that somebody keeps is a StoreError, the event loop is free meanwhile."""
        monkeypatch.setattr("stillfresh.stores.sqlite.files.LOCK_LIMIT", 0.1)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        counting = asyncio.create_task(count())
        with lock_held(path):
            with pytest.raises(StoreError, match=rf"cache.db\.lock.*process {os.getpid()}\b"):
                async with FILES[kind](path):
                    pass
            assert turns > 10
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

    def test_the_holder_is_found_by_its_inode(self, path: Path) -> None:
        """The kernel's list names it; a list without it, or none, does not."""
        path.touch()
        identity = identity_of(path)
        assert identity is not None
        device, inode = identity
        place = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
        text = (
            f"1: POSIX  ADVISORY  WRITE 11 {place} 0 EOF\n"
            f"2: FLOCK  ADVISORY  WRITE 12 {place}7 0 EOF\n"
            f"3: FLOCK  ADVISORY  WRITE 13 {place} 0 EOF\n"
            f"3: -> FLOCK  ADVISORY  WRITE 14 {place} 0 EOF\n"
        )
        assert lock_holder(text, identity) == 13
        assert lock_holder(text.replace("WRITE 13", "WRITE -1"), identity) is None
        assert lock_holder("", identity) is None
        assert lock_holder(text, None) is None


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
    async def test_new_files_are_their_owners_alone(self, path: Path, kind: str) -> None:
        """The file, its log, its index and its lock: 0600 where the umask is 022."""
        async with FILES[kind](path):
            found = modes(path)
        assert {"cache.db", "cache.db-wal", "cache.db-shm"} <= found.keys()
        assert set(found.values()) == {0o600}

    async def test_a_file_that_is_there_keeps_its_mode(self, path: Path) -> None:
        """Somebody shares it with a group: so are its log and its index."""
        async with opened(path):
            pass
        path.chmod(0o664)
        async with a_store(path):
            found = modes(path)
        assert found.pop("cache.db.lock") == 0o600
        assert set(found.values()) == {0o664}

    async def test_what_follows_a_damaged_file_is_private(self, path: Path) -> None:
        """The set-aside file keeps its mode; the new one is 0600."""
        path.write_bytes(b"not a database" * 1_000)
        path.chmod(0o640)
        async with a_store(path):
            found = modes(path)
        (aside,) = (name for name in found if ".corrupt-" in name)
        assert found.pop(aside) == 0o640
        assert set(found.values()) == {0o600}

    async def test_a_link_to_a_file_that_is_not_there_yet(self, path: Path) -> None:
        """The file that it leads to is made, 0600."""
        (path.parent / "real").mkdir()
        path.symlink_to(path.parent / "real" / "target.db")
        async with a_store(path):
            found = modes(path.parent / "real" / "target.db")
        assert set(found.values()) == {0o600}
