"""E40: where it runs: without POSIX modules, as on Windows, and without the GIL."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from stillfresh import SyncCache, file_locks

ROOT = Path(__file__).parent.parent

AS_ON_WINDOWS = """
import asyncio, logging, subprocess, sys, tempfile, threading, types
HIDDEN = {"fcntl", "grp", "pwd", "resource", "termios"}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ModuleNotFoundError(name)
for name in HIDDEN:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hide())
import os
del os.register_at_fork, os.fork
locked = []
def locking(descriptor, mode, size):
    locked.append(descriptor)
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=locking)
from stillfresh import Cache, SyncCache, file_locks
import stillfresh.stores.redis
file_locks.sys = types.SimpleNamespace(platform="win32")

def use(url):
    with SyncCache(url) as cache:
        @cache.cached("price", fresh_for=30)
        def price(sku: str) -> int:
            return len(sku)
        assert price("tea") == price("tea") == 3
        price.of("tea").invalidate()
        assert price("tea") == 3

async def use_async(url):
    async with Cache(url) as cache:
        @cache.cached("price", fresh_for=30)
        async def price(sku: str) -> int:
            return len(sku)
        assert await price("coffee") == 6

for url in ("memory://", f"sqlite:///{sys.argv[1]}/cache.db"):
    use(url)
    asyncio.run(use_async(url))
assert locked, "the file was locked by what the platform has"
"""


class TestE40Windows:
    def test_memory_and_sqlite_work_without_posix_modules(self, tmp_path: Path) -> None:
        """With such modules hidden, no fork, and locks by a stand-in of `msvcrt`."""
        command = [sys.executable, "-c", AS_ON_WINDOWS, str(tmp_path)]
        subprocess.run(command, check=True, timeout=60)

    def test_a_lock_that_another_process_has_is_a_blocking_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Windows raises an OSError, which means the same."""

        def refuse(*_: object) -> None:
            raise OSError(13, "permission denied")

        monkeypatch.setattr(file_locks, "sys", SimpleNamespace(platform="win32"))
        stand_in = SimpleNamespace(LK_NBLCK=2, locking=refuse)
        monkeypatch.setitem(sys.modules, "msvcrt", stand_in)
        with pytest.raises(BlockingIOError):
            file_locks.lock_whole_file(3)


class TestE40FreeThreads:
    def test_fence_and_counters_are_right_under_many_threads(self) -> None:
        """Each thread reads its own writes, and no read is lost from the counts.

        With the GIL this is a weak test; `make test-all` runs it without one where it finds such a
        Python.
        """
        threads = 8
        rounds = 60
        database = dict.fromkeys(range(threads), 0)
        problems: list[str] = []
        with SyncCache("memory://") as cache:

            @cache.cached("number", fresh_for=3600)
            def number(of: int) -> int:
                return database[of]

            start = threading.Barrier(threads)

            def work(me: int) -> None:
                start.wait()
                for written in range(1, rounds + 1):
                    database[me] = written
                    number.of(me).invalidate()
                    for other in range(threads):
                        seen = number(other)
                        if other == me and seen != written:
                            problems.append(f"{me} wrote {written} and read {seen}")

            running = [threading.Thread(target=work, args=(me,)) for me in range(threads)]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
            stats = cache.counts().resources["number"]
        assert not problems
        assert sum(stats.reads.values()) == threads * rounds * threads


def test_e40_the_types_page_is_the_file_that_the_type_checkers_read() -> None:
    page = (ROOT / "docs" / "guides" / "types.md").read_text()
    code = (ROOT / "tests" / "typing" / "types_page.py").read_text()
    assert f"```python\n{code}```" in page
