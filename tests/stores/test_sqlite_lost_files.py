"""S4, S12: a SQLite file that is moved, replaced or overwritten while a cache has it open.

The cache never opens a file beside a log that is not its own. Until it is opened again it answers
from memory and loader, and writes raise. A deleted file is begun anew.
"""

import asyncio
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest

from stillfresh import Cache, ConfigError, StoreError
from tests.kit.engine import until
from tests.kit.sqlite import elsewhere, neighbours, opened, publish, value
from tests.kit.store_processes import working

KEYS = [f"our-{number}" for number in range(100)]
LONG = "x" * 2_000
"""With values of this length, the log has pages of all tables."""

CHECK_THEIRS = """
import sqlite3, sys
theirs = sqlite3.connect(sys.argv[1])
assert theirs.execute("PRAGMA integrity_check").fetchone() == ("ok",)
assert theirs.execute("SELECT count(*) FROM theirs").fetchone() == (1000,)
assert theirs.execute("SELECT count(*) FROM sqlite_schema").fetchone() == (1,)
theirs.close()
"""
CHECK_OURS = """
import sqlite3, sys
ours = sqlite3.connect(sys.argv[1])
assert ours.execute("PRAGMA integrity_check").fetchone() == ("ok",)
assert ours.execute("SELECT count(*) FROM price").fetchone() == (int(sys.argv[2]),)
ours.close()
"""
OVERWRITE = """
import sys
with open(sys.argv[1], "r+b") as file:
    file.write(bytes.fromhex(sys.argv[2]))
"""
TRUNCATE = "import os, sys; os.truncate(sys.argv[1], 0)"
COPY_INTO = "import shutil, sys; shutil.copyfile(sys.argv[1], sys.argv[2])"


@dataclass
class Site:
    """A directory with the cache's file and files that could take its place."""

    path: Path
    loads: list[str] = field(default_factory=list)

    @property
    def moved(self) -> Path:
        return self.path.with_name("moved.db")

    @property
    def another_store(self) -> Path:
        return self.path.with_name("another-store.db")

    @property
    def theirs(self) -> Path:
        """Another application's database."""
        return self.path.with_name("theirs.db")

    def neighbour(self, suffix: str) -> Path:
        return Path(f"{self.path}{suffix}")

    @asynccontextmanager
    async def cache(self, path: Path | None = None) -> AsyncIterator["Prices"]:
        async with Cache(f"sqlite:///{path or self.path}") as cache:

            @cache.batched("price", fresh_for="1h")
            async def prices(keys: list[str]) -> dict[str, str]:
                self.loads.extend(keys)
                return {key: f"{key} {LONG}" for key in keys}

            yield Prices(prices, prices.get_many, prices.put, prices.invalidate)


@dataclass
class Prices:
    """The methods of a resource."""

    get: Callable[[str], Awaitable[str]]
    get_many: Callable[[list[str]], Awaitable[object]]
    put: Callable[[str, str], Awaitable[object]]
    invalidate: Callable[[str], Awaitable[object]]


@pytest.fixture
async def site(tmp_path: Path) -> Site:
    site = Site(tmp_path / "cache.db")
    async with site.cache(site.another_store) as prices:
        await prices.put("another", "theirs")
        for suffix in ("", "-wal"):  # as a process leaves them that is killed
            shutil.copy(f"{site.another_store}{suffix}", f"{site.another_store}{suffix}-kept")
    connection = sqlite3.connect(site.theirs)
    connection.execute("CREATE TABLE theirs(x)")
    connection.executemany("INSERT INTO theirs VALUES (?)", [("x" * 50,)] * 1000)
    connection.commit()
    connection.close()
    return site


def move_away(site: Site) -> None:
    site.path.rename(site.moved)


def move_another_store_over(site: Site) -> None:
    site.another_store.rename(site.path)


def swap_with_another_store(site: Site) -> None:
    site.path.rename(site.moved)
    site.another_store.rename(site.path)


def move_another_store_over_with_its_log(site: Site) -> None:
    Path(f"{site.another_store}-wal-kept").rename(site.neighbour("-wal"))
    Path(f"{site.another_store}-kept").rename(site.path)


def move_another_application_over(site: Site) -> None:
    shutil.copy(site.theirs, site.moved)
    site.moved.rename(site.path)


def copy_another_application_into(site: Site) -> None:
    elsewhere(COPY_INTO, site.theirs, site.path)


def destroy_header(site: Site) -> None:
    elsewhere(OVERWRITE, site.path, os.urandom(100).hex())


def truncate(site: Site) -> None:
    elsewhere(TRUNCATE, site.path)


def swap_log(site: Site) -> None:
    Path(f"{site.another_store}-wal-kept").replace(site.neighbour("-wal"))


def remove_log(site: Site) -> None:
    site.neighbour("-wal").unlink()


def copy_another_application_into_and_remove_the_log(site: Site) -> None:
    copy_another_application_into(site)
    remove_log(site)
    remove_index(site)


def remove_index(site: Site) -> None:
    site.neighbour("-shm").unlink()


Accident: TypeAlias = Callable[[Site], None]
MOVES: list[Accident] = [
    move_away,
    move_another_store_over,
    swap_with_another_store,
    move_another_application_over,
]
"""They leave our log beside what has the name now."""
ANOTHER_STORE: list[Accident] = [
    move_another_store_over,
    move_another_store_over_with_its_log,
    swap_with_another_store,
]
ANOTHER_APPLICATION: list[Accident] = [
    move_another_application_over,
    copy_another_application_into,
    copy_another_application_into_and_remove_the_log,
]
ACCIDENTS: list[Accident] = [
    *MOVES,
    move_another_store_over_with_its_log,
    copy_another_application_into,
    copy_another_application_into_and_remove_the_log,
    destroy_header,
    truncate,
    swap_log,
    remove_log,
    remove_index,
]
every_accident = pytest.mark.parametrize("happen", ACCIDENTS, ids=lambda each: each.__name__)
LOST = r"cache\.db: .* while it was open\. .* close the cache, .* open the cache again"


class TestS12LostFile:
    @every_accident
    async def test_a_cache_whose_file_is_lost_answers_from_memory_and_loader(
        self, site: Site, happen: Accident, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Also long after it was noticed; one line of the log says what to do."""
        async with site.cache() as prices:
            await prices.get_many(KEYS)
            happen(site)
            with pytest.raises(StoreError, match=LOST):
                await prices.put("put", "new")
            for number in range(3):
                assert (await prices.get("our-1")).startswith("our-1 ")
                assert (await prices.get(f"cold-{number}")).startswith(f"cold-{number} ")
            with pytest.raises(StoreError, match=LOST):
                await prices.invalidate("our-1")
            assert (await prices.get("our-1")).startswith("our-1 ")
        errors = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 1
        assert "cache.db" in errors[0].getMessage()

    @every_accident
    async def test_a_cache_that_only_reads_notices_that_its_file_is_lost(
        self, site: Site, happen: Accident, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Reads of the file look at it now and then."""
        async with site.cache() as prices:
            await prices.get_many(KEYS)
            happen(site)
            while not caplog.records:
                assert (await prices.get("our-1")).startswith("our-1 ")
                await asyncio.sleep(0.01)
            assert (await prices.get("our-1")).startswith("our-1 ")
            assert "cache.db" in caplog.records[0].getMessage()

    @every_accident
    @pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed", "not noticed"])
    async def test_a_cache_works_again_when_it_is_closed_and_opened(
        self, site: Site, happen: Accident, is_noticed: bool
    ) -> None:
        """On a whole file with the right rows, whether or not the accident was noticed before."""
        async with site.cache() as prices:
            await prices.get_many(KEYS)
            happen(site)
            if is_noticed:
                with pytest.raises(StoreError, match=LOST):
                    await prices.put("put", "new")
        if happen in ANOTHER_APPLICATION:
            with pytest.raises(ConfigError, match=r"cache\.db: is another application's"):
                await Cache(f"sqlite:///{site.path}").open()
            elsewhere(CHECK_THEIRS, site.path)
            site.path.unlink()
        site.loads.clear()
        async with site.cache() as prices:
            if happen in ANOTHER_STORE:
                assert await prices.get("another") == "theirs"
                assert site.loads == []
            await prices.get("our-1")
            assert site.loads == ["our-1"]
            await prices.put("put", "new")
        async with site.cache() as prices:
            assert await prices.get("put") == "new"
            assert (await prices.get("our-1")).startswith("our-1 ")
            assert site.loads == ["our-1"]

    @pytest.mark.parametrize("happen", MOVES, ids=lambda each: each.__name__)
    async def test_nothing_of_ours_is_left_beside_a_file_that_took_its_place(
        self, site: Site, happen: Accident
    ) -> None:
        """As soon as a write has failed, any process may open it."""
        async with site.cache() as prices:
            await prices.get_many(KEYS)
            happen(site)
            with pytest.raises(StoreError, match=LOST):
                await prices.put("put", "new")
            assert not site.neighbour("-wal").exists()
            assert not site.neighbour("-shm").exists()
            if happen is move_another_application_over:
                assert site.path.read_bytes() == site.theirs.read_bytes()
                elsewhere(CHECK_THEIRS, site.path)
            elif happen is not move_away:
                elsewhere(CHECK_OURS, site.path, 1)

    @pytest.mark.parametrize("happen", [move_away, swap_with_another_store])
    async def test_a_file_that_was_moved_has_all_that_was_written(
        self, site: Site, happen: Accident
    ) -> None:
        """The log is written back to it, so it may be put back and opened."""
        async with site.cache() as prices:
            await prices.get_many(KEYS)
            happen(site)
        elsewhere(CHECK_OURS, site.moved, len(KEYS))
        site.moved.rename(site.path)
        site.loads.clear()
        async with site.cache() as prices:
            await prices.get_many(KEYS)
        assert site.loads == []

    async def test_a_file_that_is_put_back_is_used_when_the_cache_is_opened_again(
        self, site: Site
    ) -> None:
        """Not before: nobody can know what was done to it meanwhile."""
        async with site.cache() as prices:
            await prices.get_many(KEYS)
            move_away(site)
            with pytest.raises(StoreError, match=LOST):
                await prices.put("put", "new")
            site.moved.rename(site.path)
            with pytest.raises(StoreError, match=LOST):
                await prices.put("put", "new")
        site.loads.clear()
        async with site.cache() as prices:
            await prices.get_many(KEYS)
        assert site.loads == []

    @pytest.mark.parametrize("happen", [swap_log, remove_log, remove_index])
    async def test_a_file_without_its_log_is_not_used_again(
        self, site: Site, happen: Accident
    ) -> None:
        """It lacks an invalidation that was acknowledged: the old value must not come back."""
        async with site.cache() as prices:
            await prices.put("price", "old")
        async with site.cache() as prices:
            assert await prices.get("price") == "old"
            await prices.invalidate("price")
            happen(site)
        async with site.cache() as prices:
            assert await prices.get("price") != "old"
        aside = [name for name in neighbours(site.path) if name.endswith("Z")]
        assert len(aside) == 1

    @every_accident
    async def test_every_process_that_has_the_file_open_refuses_to_write(
        self, site: Site, happen: Accident
    ) -> None:
        """Whichever notices first."""
        with working("put_or_fail", f"sqlite:///{site.path}") as worker:
            assert worker.hear() == "ready"
            worker.say("first")
            assert worker.hear() == "stored"
            async with site.cache() as prices:
                await prices.get_many(KEYS)
                happen(site)
                with pytest.raises(StoreError, match=LOST):
                    await prices.put("put", "new")
                worker.say("second")
                refusal = worker.hear()
                assert "cache.db" in refusal
                assert "open the cache again" in refusal
            worker.say("")
            worker.finish()

    async def test_the_index_of_our_log_is_not_taken_for_that_of_the_file_in_its_place(
        self, site: Site
    ) -> None:
        """It came with a log of its own, and another process still has our index open."""
        with working("put_or_fail", f"sqlite:///{site.path}") as worker:
            assert worker.hear() == "ready"
            async with site.cache() as prices:
                await prices.get_many(KEYS)
                move_another_store_over_with_its_log(site)
            site.loads.clear()
            async with site.cache() as prices:
                assert await prices.get("another") == "theirs"
                await prices.put("put", "new")
            assert site.loads == []
        elsewhere(CHECK_OURS, site.path, 2)

    async def test_another_process_uses_the_file_that_took_its_place(self, site: Site) -> None:
        """When the process that had the old one open has noticed: their rows do not mix."""
        async with site.cache() as prices:
            await prices.get_many(KEYS)
            move_another_store_over(site)
            with pytest.raises(StoreError, match=LOST):
                await prices.put("put", "new")
            with working("put_or_fail", f"sqlite:///{site.path}") as worker:
                assert worker.hear() == "ready"
                worker.say("new")
                assert worker.hear() == "stored"
                worker.say("")
                worker.finish()
        elsewhere(CHECK_OURS, site.path, 1)
        async with opened(site.path) as store:
            assert value(store, "another", "price") is not ...
            assert value(store, "new") is not ...

    async def test_threads_that_read_are_refused_a_lost_file(self, site: Site) -> None:
        """They have connections of their own."""
        async with opened(site.path) as store:
            await publish(store, "a")
            assert await asyncio.to_thread(value, store) == b"value"
            move_away(site)
            with pytest.raises(StoreError, match=LOST):  # noqa: PT012 (they look now and then)
                while await asyncio.to_thread(value, store) == b"value":
                    await asyncio.sleep(0.01)


class TestS4DeletedFile:
    @pytest.mark.parametrize("suffixes", [("", "-wal", "-shm"), ("",)], ids=["all", "only it"])
    async def test_a_deleted_file_is_begun_anew(
        self, site: Site, suffixes: tuple[str, ...]
    ) -> None:
        """Somebody emptied the cache with `rm`: it goes on without being opened again."""
        async with site.cache() as prices:
            await prices.get_many(KEYS)
            for suffix in suffixes:
                site.neighbour(suffix).unlink()
            await prices.put("put", "new")
            assert await prices.get("put") == "new"
        site.loads.clear()
        async with site.cache() as prices:
            assert await prices.get("put") == "new"
            await prices.get("our-1")
        assert site.loads == ["our-1"]

    async def test_processes_that_share_a_deleted_file_share_the_new_one(self, site: Site) -> None:
        """Whichever writes first begins it."""
        with working("put_or_fail", f"sqlite:///{site.path}") as worker:
            assert worker.hear() == "ready"
            async with opened(site.path) as store:
                await publish(store, "a")
                site.path.unlink()
                worker.say("theirs")
                assert worker.hear() == "stored"
                await publish(store, "ours")
                assert value(store, "theirs") is not ...
                assert value(store, "a") is ...
                worker.say("more")
                assert worker.hear() == "stored"
                assert value(store, "more") is not ...
            worker.say("")
            worker.finish()

    async def test_readers_notice_that_the_file_was_deleted(self, site: Site) -> None:
        """Without a write of their own."""
        async with opened(site.path) as store:
            await publish(store, "a")
            for suffix in ("", "-wal", "-shm"):
                site.neighbour(suffix).unlink()
            await until(lambda: value(store) is ...)
            assert await asyncio.to_thread(value, store) is ...

    async def test_what_is_left_of_a_deleted_file_never_meets_a_new_one(self, site: Site) -> None:
        """A process was killed, then its file was deleted, but not its log and index."""
        async with site.cache() as prices:
            await prices.get_many(KEYS)
            for suffix in ("-wal", "-shm"):
                shutil.copy(site.neighbour(suffix), site.neighbour(f"{suffix}-kept"))
        site.path.unlink()
        for suffix in ("-wal", "-shm"):
            site.neighbour(f"{suffix}-kept").rename(site.neighbour(suffix))
        async with site.cache() as prices:
            await prices.put("put", "new")
        elsewhere(CHECK_OURS, site.path, 1)
