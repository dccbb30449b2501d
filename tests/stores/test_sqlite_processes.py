"""S4: real processes on one file that breaks."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from stillfresh.stores.contract import Ask, Record
from stillfresh.stores.sqlite import SqliteStore
from tests.kit.store_processes import working

KIND = "post"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.db"


async def found(path: Path, *keys: str) -> dict[str, Record]:
    store = SqliteStore(path)
    await store.open()
    try:
        return store.read_now(KIND, keys)
    finally:
        await store.close()


DAMAGE = """
import os, sys
with open(sys.argv[1], "r+b") as file:
    file.seek(4096)
    file.write(b"\\xff" * (os.path.getsize(sys.argv[1]) - 4096))
"""


def damage(path: Path) -> None:
    """In another process: opening the file in this one would drop SQLite's locks."""
    subprocess.run([sys.executable, "-c", DAMAGE, str(path)], check=True, timeout=30)


class TestS4CorruptForSeveral:
    async def test_one_of_several_processes_sets_it_aside(self, path: Path) -> None:
        """All meet the damage; one renames, the others open the new file, one gets the lease."""
        store = SqliteStore(path)
        await store.open()
        asks = [Ask(f"id-{number}") for number in range(300)]
        await store.acquire(KIND, asks, 30)
        await store.close()
        damage(path)
        with ExitStack() as stack:
            workers = [
                stack.enter_context(working("meet_corruption", f"sqlite:///{path}"))
                for _ in range(4)
            ]
            for worker in workers:
                assert worker.hear() == "ready"
            for worker in workers:
                worker.say("go")
            assert sum(worker.hear() for worker in workers) == 1
        aside = [each for each in path.parent.glob("cache.db.corrupt-*") if each.suffix[-1] == "Z"]
        assert len(aside) == 1
        assert set(await found(path, "new", "id-1")) == {"new"}
