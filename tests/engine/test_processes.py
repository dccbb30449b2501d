"""E5, S7: the engine in real processes on one SQLite file; holders are really killed and paused."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from process_kit import Process

WORKER = Path(__file__).parent / "process_worker.py"


@pytest.fixture
def started() -> Iterator[ExitStack]:
    """Ends every process that a test started, however the test ends."""
    with ExitStack() as stack:
        yield stack


def start(started: ExitStack, folder: Path, *options: str, takes: float = 0.3) -> Process:
    files = [str(folder / "cache.db"), str(folder / "loads")]
    return Process(started, WORKER, *files, str(takes), *options)


def loads(folder: Path) -> list[str]:
    return (folder / "loads").read_text().split()


class TestE5Processes:
    def test_eight_processes_one_cold_key_one_load(
        self, tmp_path: Path, started: ExitStack
    ) -> None:
        """All eight are served what the one has loaded."""
        processes = [start(started, tmp_path) for _ in range(8)]
        for process in processes:
            process.go()
        values = {process.line() for process in processes}
        assert len(loads(tmp_path)) == 1
        assert values == set(loads(tmp_path))

    def test_a_holder_that_was_killed_is_replaced_when_its_lease_ends(
        self, tmp_path: Path, started: ExitStack
    ) -> None:
        """`kill -9` in the middle of a load: the next one takes over, and answers."""
        dying = start(started, tmp_path, "die")
        dying.go()
        assert dying.line() == "loading"
        waiting = start(started, tmp_path, takes=0)
        waiting.go()
        dying.process.send_signal(signal.SIGKILL)
        assert waiting.line() == str(waiting.process.pid)
        assert loads(tmp_path) == [str(dying.process.pid), str(waiting.process.pid)]

    def test_a_holder_paused_past_its_lease_publishes_nothing(
        self, tmp_path: Path, started: ExitStack
    ) -> None:
        """SIGSTOP during its load; another takes over; after SIGCONT the other's copy stands."""
        paused = start(started, tmp_path, takes=0.2)
        paused.go()
        while not (tmp_path / "loads").exists() or not loads(tmp_path):
            continue
        paused.process.send_signal(signal.SIGSTOP)
        other = start(started, tmp_path, takes=0)
        other.go()
        assert other.line() == str(other.process.pid)
        paused.process.send_signal(signal.SIGCONT)
        paused.line()
        third = start(started, tmp_path)
        third.go()
        assert third.line() == str(other.process.pid)
