"""I9: renders in real processes on one SQLite file; renderers are really killed and paused."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.processes import Process


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, folder: Path, *options: str, takes: float = 0.3) -> Process:
    files = [str(folder / "pages.db"), str(folder / "renders")]
    return Process(stack, "pages", *files, str(takes), *options)


def renders(folder: Path) -> list[str]:
    return (folder / "renders").read_text().split()


class TestI9Processes:
    def test_eight_processes_render_an_absent_page_once(
        self, tmp_path: Path, stack: ExitStack
    ) -> None:
        """All eight are served what the one has rendered."""
        processes = [start(stack, tmp_path) for _ in range(8)]
        for process in processes:
            process.go()
        assert {process.line() for process in processes} == set(renders(tmp_path))
        assert len(renders(tmp_path)) == 1

    def test_a_renderer_that_was_killed_is_replaced_when_its_lease_ends(
        self, tmp_path: Path, stack: ExitStack
    ) -> None:
        """`kill -9` in the middle of a render."""
        dying = start(stack, tmp_path, "die")
        dying.go()
        assert dying.line() == "rendering"
        waiting = start(stack, tmp_path, takes=0)
        waiting.go()
        dying.process.send_signal(signal.SIGKILL)
        assert waiting.line() == str(waiting.process.pid)

    def test_a_renderer_paused_past_its_lease_publishes_nothing(
        self, tmp_path: Path, stack: ExitStack
    ) -> None:
        """SIGSTOP during its render; another takes over; after SIGCONT the other's page stands."""
        paused = start(stack, tmp_path, takes=0.2)
        paused.go()
        while not (tmp_path / "renders").exists() or not renders(tmp_path):
            continue
        paused.process.send_signal(signal.SIGSTOP)
        other = start(stack, tmp_path, takes=0)
        other.go()
        assert other.line() == str(other.process.pid)
        paused.process.send_signal(signal.SIGCONT)
        paused.line()
        third = start(stack, tmp_path)
        third.go()
        assert third.line() == str(other.process.pid)
