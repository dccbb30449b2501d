"""G14: the memory that workers share: what was written last is read whole, whatever happens."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh.gateway.server.worker_numbers import HEAD, WorkerNumbers
from tests.kit.processes import ROOT

SIZE = 40


class TestG14Board:
    @given(steps=st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=SIZE))))
    def test_each_place_of_the_board_holds_its_last_write(
        self, steps: list[tuple[int, bytes]]
    ) -> None:
        """And nothing of another place."""
        board, last = WorkerNumbers(3, SIZE), {0: b"", 1: b"", 2: b""}
        for place, data in steps:
            board.write(place, data)
            last[place] = data
        assert [text for text, _ in board.read_all()] == list(last.values())

    def test_a_text_that_does_not_fit_the_board_is_refused(self) -> None:
        """What was there stays."""
        board = WorkerNumbers(1, SIZE)
        board.write(0, b"old")
        with pytest.raises(ValueError, match="41 bytes do not fit into 40"):
            board.write(0, b"x" * (SIZE + 1))
        assert board.read(0) == b"old"

    def test_an_unfinished_write_to_the_board_is_not_read(self) -> None:
        """A worker that was killed within it leaves what it had written before."""
        board = WorkerNumbers(1, SIZE)
        board.write(0, b"old")
        hidden = 1 - board._memory[0]
        begin = 2 + hidden * (HEAD.size + SIZE)
        board._memory[begin : begin + 12] = HEAD.pack(30, 7) + b"half"
        assert board.read(0) == b"old"

    def test_a_worker_lives_from_its_first_write_until_the_parent_says_that_it_ended(self) -> None:
        """A place without a worker keeps its bytes, also while the next one starts."""
        board = WorkerNumbers(2, SIZE)
        board.write(0, b"a")
        assert board.read_all() == [(b"a", True), (b"", False)]
        board.ended(0)
        assert board.read_all() == [(b"a", False), (b"", False)]
        board.write(0, b"b")
        assert board.read_all() == [(b"b", True), (b"", False)]

    def test_a_reader_never_sees_a_torn_text(self) -> None:
        """Another process writes as fast as it can, and is killed: every text is one of its own."""
        script = f"""
import os, signal, time
from stillfresh.gateway.server.worker_numbers import WorkerNumbers
board = WorkerNumbers(1, {SIZE})
if not (pid := os.fork()):
    while True:
        for letter in b"abcdefgh":
            board.write(0, bytes([letter]) * {SIZE})
seen, end = set(), time.monotonic() + 20
while len(seen - {{b""}}) < 8 and time.monotonic() < end:
    seen.add(board.read(0))
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
assert seen <= {{b"", *(bytes([it]) * {SIZE} for it in b"abcdefgh")}}, seen
assert len(seen - {{b""}}) == 8 and board.read(0) in seen
"""
        command = [sys.executable, "-W", "error", "-c", script]
        subprocess.run(command, check=True, timeout=60, cwd=ROOT)
