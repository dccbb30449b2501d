"""E20: forks and exits, with real processes."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

from stillfresh import StillfreshError, SyncCache, SyncFunction
from stillfresh.stores import MemoryStore
from tests.kit.engine import Price
from tests.kit.servers.valkey import Server
from tests.kit.sync import Calling, PlainUpstream, declare

FORK = get_context("fork")
LOADED_BY: SyncFunction[[str], int]

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)


def in_child(work: Callable[[], object]) -> str:
    """What it returns in a forked child, as text, or what it raised there."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            said = str(work())
        except BaseException as exc:  # noqa: BLE001 (told to the parent)
            said = f"{type(exc).__name__}: {exc}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, in which every warning is an error."""
    command = [sys.executable, "-W", "error", "-c", script, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


class TestE20Forks:
    def test_a_child_begins_anew(self, every_store: str, upstream: PlainUpstream) -> None:
        """Its own loop thread, its own connections, an empty memory; the parent goes on."""
        with SyncCache(every_store) as cache:
            prices = declare(cache, upstream)
            assert prices("a") == Price("a", 1)

            def child() -> object:
                before = prices.peek("a"), len(threading.enumerate())
                upstream.version = 2
                return *before, prices("a").version, prices("b").version, prices("a").version

            is_shared = every_store != "memory://"
            assert (
                in_child(child) == f"(None, 1, {1 if is_shared else 2}, 2, {1 if is_shared else 2})"
            )
            assert prices("b").version == (2 if is_shared else 1)
            prices.invalidate("a")
            assert prices("a") == Price("a", 1)

    def test_a_child_of_a_child_begins_anew(self, tmp_path: Path, upstream: PlainUpstream) -> None:
        """Each sees what the others stored, and an invalidation of theirs."""
        with SyncCache(f"sqlite:///{tmp_path}/cache.db") as cache:
            prices = declare(cache, upstream)
            prices("a")

            def grandchild() -> object:
                prices.invalidate("a")
                return prices("b")

            def child() -> object:
                upstream.version = 2
                return prices("a"), in_child(grandchild), prices("a")

            said = Price("a", 1), str(Price("b", 2)), Price("a", 2)
            assert in_child(child) == str(said)
            assert prices("a") == Price("a", 2)

    def test_a_child_has_locks_of_its_own(self, tmp_path: Path, upstream: PlainUpstream) -> None:
        """SQLite remembers the parent's, which do not hold here: without them the parent's close
        would take the log away in which the child writes."""
        cache = SyncCache(f"sqlite:///{tmp_path}/cache.db")
        prices = declare(cache, upstream)
        prices("a")
        opened, closed = FORK.Event(), FORK.Event()

        def child() -> None:
            prices("b")
            opened.set()
            assert closed.wait(20)
            prices.put("c", Price("c", 7))

        worker = FORK.Process(target=child)
        worker.start()
        assert opened.wait(20)
        cache.close()
        closed.set()
        worker.join(20)
        with cache:
            assert prices.known(["c"])["c"].value == Price("c", 7)

    def test_a_fork_in_the_middle_of_everything_hangs_nobody(
        self, tmp_path: Path, upstream: PlainUpstream
    ) -> None:
        """Threads read, load, write and hold locks; no child hangs, and no load is lost."""
        over = threading.Event()
        with SyncCache(f"sqlite:///{tmp_path}/cache.db") as cache:
            prices = declare(cache, upstream)
            prices("a")

            def busy(number: int) -> int:
                count = 0
                while not over.is_set():
                    prices("a")
                    prices.refresh(f"k{number}")
                    prices.invalidate("a")
                    count += 1
                return count

            threads = [Calling(busy, number) for number in range(3)]
            said = [in_child(lambda n=n: prices(f"c{n}")) for n in range(8)]  # type: ignore[misc]
            over.set()
            assert all(thread.result() > 0 for thread in threads)
            assert said == [str(Price(f"c{n}", 1)) for n in range(8)]
            assert set(prices.known([f"c{n}" for n in range(8)])) == {f"c{n}" for n in range(8)}

    def test_a_child_counts_no_load_of_its_parent(self, upstream: PlainUpstream) -> None:
        """No thread of the child runs it."""
        upstream.gate = threading.Event()
        with SyncCache("memory://") as cache:
            prices = declare(cache, upstream)
            reading = Calling(prices, "a")
            assert upstream.asked.acquire(timeout=20)
            said = in_child(lambda: cache.counts().resources["price"].loading)
            assert cache.counts().resources["price"].loading == 1
            upstream.gate.set()
            assert reading.result() == Price("a", 1)
        assert said == "0"

    def test_a_child_that_a_loader_forked_is_told_that_its_call_is_lost(
        self, upstream: PlainUpstream
    ) -> None:
        """The child's call is lost with the parent's loop, and is told so."""
        with SyncCache("memory://") as cache:

            @cache.cached("forking", fresh_for="1m")
            def forking(key: str) -> str:
                if (pid := os.fork()) == 0:
                    return "child"
                os.waitpid(pid, 0)
                return "parent"

            parent, reading, writing = os.getpid(), *os.pipe()
            try:
                said = forking("a")
            except StillfreshError as exc:
                said = str(exc)
            if os.getpid() != parent:
                os.write(writing, f"{said}; {forking.of('b')}".partition(" <")[0].encode())
                os._exit(0)
            os.close(writing)
            with os.fdopen(reading) as pipe:
                assert pipe.read().startswith(
                    "the process forked while this thread used the cache; call"
                )
            assert said == "parent"

    def test_multiprocessing_children_share_the_store(
        self, tmp_path: Path, upstream: PlainUpstream
    ) -> None:
        """Workers of a fork pool share the parent's store: one load for one key."""
        with SyncCache(f"sqlite:///{tmp_path}/cache.db") as cache:
            global LOADED_BY  # noqa: PLW0603 (inherited by the workers)
            LOADED_BY = cache.cached("loaded_by", fresh_for="1m")(loaded_by)
            LOADED_BY("warm")
            with FORK.Pool(2) as pool:
                found = pool.map(read_shared, ["warm", "a", "a", "b"] * 5)
            assert [sku for sku, _ in found] == ["warm", "a", "a", "b"] * 5
            pids = {sku: {pid for it, pid in found if it == sku} for sku in ("warm", "a", "b")}
            assert pids["warm"] == {os.getpid()}
            assert [len(pids[sku]) for sku in "ab"] == [1, 1]

    def test_a_child_of_a_store_that_cannot_be_made_again_is_refused(
        self, upstream: PlainUpstream
    ) -> None:
        """An object is the parent's; the child is told what to do."""
        with SyncCache(MemoryStore()) as cache:
            prices = declare(cache, upstream)
            prices("a")
            assert "open when the process forked; make a new" in in_child(lambda: prices("a"))
            assert prices("a") == Price("a", 1)


def loaded_by(sku: str) -> int:
    return os.getpid()


def read_shared(sku: str) -> tuple[str, int]:
    return sku, LOADED_BY(sku)


EXITING = """
import sys, threading, time
from stillfresh import SyncCache

cache = SyncCache(sys.argv[1], grace=1)
begun = threading.Event()

@cache.cached("slow", fresh_for=1, stale_for=60, lease_for="1h")
def slow(key: str) -> str:
    if key == "hangs":
        begun.set()
        time.sleep(1e6)
    return key

assert slow("a") == "a"
if sys.argv[2].startswith("loading"):
    threading.Thread(target=slow, args=("hangs",), daemon=True).start()
    begun.wait()
    if sys.argv[2] == "loading and guarded":
        time.sleep(0.3)  # its guard begins, which renews the lease
elif sys.argv[2] == "error":
    raise SystemExit(7)
"""


class TestE20Example:
    def test_the_example_runs(self) -> None:
        """What `make examples` shows: one load for sixteen threads, and a child that goes on."""
        example = Path(__file__).parents[2] / "examples" / "threads.py"
        ended = run(example.read_text())
        assert (ended.returncode, ended.stderr) == (0, "")
        first, put, child, again = ended.stdout.splitlines()
        assert first.startswith("sixteen threads, one cold key: 1 load, in Thread-")
        assert put == "put after a write: 1200, fresh"
        assert child == "a forked child reads the same store: 1200"
        assert again == "and what it invalidated is loaded again here: 1000"


CLOSING = """
import threading
from stillfresh import NotOpen, SyncCache

caches = [SyncCache("memory://") for _ in range(2)]
one, other = (it.cached("one", fresh_for=60)(lambda: 1) for it in caches)
assert threading.active_count() == 1
assert (one(), other()) == (1, 1)
caches[0].close()
assert other.of().refresh().value == 1
assert threading.active_count() == 2
caches[1].close()
assert threading.active_count() == 1
try:
    one()
except NotOpen:
    assert threading.active_count() == 1
with caches[0]:
    assert one() == 1
assert threading.active_count() == 1
"""

FINALIZING = """
from stillfresh import NotOpen, SyncCache

@SyncCache("memory://").cached("one", fresh_for=60)
def one() -> int:
    return 1

class Session:
    def __del__(self) -> None:
        try:
            one()
        except NotOpen as exc:
            print(type(exc).__name__)

session = Session()
one()
"""

NAMED_HOST = """
import sys
from stillfresh import SyncCache

cache = SyncCache(sys.argv[1])

@cache.cached("named_host", fresh_for=60)
def one() -> int:
    return 1

one.of().refresh()
"""


class TestE20Exits:
    def test_the_last_cache_ends_the_loop_thread(self) -> None:
        """Nothing starts it before the first call; a cache that is opened again starts it again."""
        ended = run(CLOSING)
        assert (ended.returncode, ended.stderr) == (0, "")

    @pytest.mark.parametrize("ends", ["idle", "loading", "loading and guarded", "error"])
    def test_the_interpreter_exits(self, tmp_path: Path, ends: str) -> None:
        """No hang, no warning, nothing said, and the lease of a load that was cut off is free."""
        address = f"sqlite:///{tmp_path}/cache.db"
        ended = run(EXITING, address, ends)
        assert (ended.returncode, ended.stderr) == (7 if ends == "error" else 0, "")
        with SyncCache(address) as cache:
            slow = cache.cached("slow", fresh_for=60)(slow_now)
            assert slow("hangs") == "now"

    def test_the_interpreter_exits_after_a_hosts_name_was_looked_up(self, valkey: Server) -> None:
        """asyncio looks it up in a thread of its own, for which it waits at the end."""
        ended = run(NAMED_HOST, f"redis://localhost:{valkey.port}/0")
        assert (ended.returncode, ended.stderr) == (0, "")

    def test_a_finalizer_that_reads_at_the_exit_gets_an_error(self) -> None:
        """No thread can be started then: the process would wait for it for ever."""
        ended = run(FINALIZING)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout == "NotOpen\n"

    def test_a_forked_child_exits(self, tmp_path: Path) -> None:
        """By `sys.exit`, as a worker of gunicorn does."""
        script = EXITING + "\nimport os\nif os.fork() == 0:\n    slow('b'); sys.exit(0)\nos.wait()"
        ended = run(script, f"sqlite:///{tmp_path}/cache.db", "idle")
        assert (ended.returncode, ended.stderr) == (0, "")


def slow_now(key: str) -> str:
    return "now"
