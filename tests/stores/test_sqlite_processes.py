"""S4, S13: real processes on one file: that breaks, and that all put into at once."""

import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from stillfresh.stores.contract import Ask, Mark, Record
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


class TestS13PutsAtOnce:
    async def test_eight_processes_that_put_one_key_leave_one_of_the_values(
        self, path: Path
    ) -> None:
        """E35: sixty rounds on an existing key; all are acknowledged, the value is whole."""
        url, seen = f"sqlite:///{path}", set[str]()
        with ExitStack() as stack:
            workers = [stack.enter_context(working("put_rounds", url)) for _ in range(8)]
            for worker in workers:
                assert worker.hear() == "ready"
            store = await opened_store(path)
            for _ in range(60):
                for worker in workers:
                    worker.say("a")
                assert [worker.hear() for worker in workers] == ["stored"] * 8
                copy = store.read_now(KIND, ["a"])["a"].copy
                assert copy is not None
                assert copy.mark is Mark.NONE
                assert copy.value == copy.generation.encode()
                assert copy.generation not in seen
                seen.add(copy.generation)
            await store.close()
            for worker in workers:
                worker.say("")
                worker.finish()

    async def test_a_process_killed_while_putting_leaves_a_whole_copy(self, path: Path) -> None:
        """The old one or the new one; value and generation always belong together."""
        dice, generations = random.Random(13), set[str]()
        store = await opened_store(path)
        for _ in range(6):
            with working("put_for_ever", f"sqlite:///{path}", "a") as worker:
                for _ in range(dice.randint(1, 20)):
                    assert worker.hear() == "put"
            copy = store.read_now(KIND, ["a"])["a"].copy
            assert copy is not None
            assert copy.value == copy.generation.encode() * 3_000
            generations.add(copy.generation)
        assert len(generations) == 6
        await store.close()


async def opened_store(path: Path) -> SqliteStore:
    store = SqliteStore(path)
    await store.open()
    return store


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
    async def test_one_of_several_processes_sets_a_corrupt_file_aside(self, path: Path) -> None:
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
