"""The demo's own decisions, without a loop: boards, what polling costs, paces (G8)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from game_service.boards import EMPTY, board_after, bot_cell, free, outcome
from stillfresh.demo.rules import Pace, polling
from stillfresh.errors import ConfigError


class TestG8Board:
    @pytest.mark.parametrize(
        ("board", "expected"),
        [
            (EMPTY, None),
            ("xxx......", "x"),
            ("o..o..o..", "o"),
            ("x...x...x", "x"),
            ("..o.o.o..", "o"),
            ("xoxxoxoxo", "draw"),
            ("xx.oo....", None),
        ],
    )
    def test_a_line_of_three_wins(self, board: str, expected: str | None) -> None:
        """Rows, columns and diagonals; a full board without one is a draw."""
        assert expected == outcome(board)

    def test_a_cell_is_played_once(self) -> None:
        """What is taken, or not on the board, cannot be played."""
        assert board_after("x........", 0, "o") is None
        assert board_after(EMPTY, 9, "x") is None
        assert board_after(EMPTY, -1, "x") is None
        assert board_after(EMPTY, 8, "x") == "........x"

    def test_the_bot_wins_before_it_defends(self) -> None:
        """Its own third in a row comes first, then the visitor's."""
        assert bot_cell("xx.oo....", min) == 5
        assert bot_cell("xx..o....", min) == 2

    @given(st.lists(st.integers(0, 8), max_size=5), st.integers(0, 8))
    def test_the_bot_plays_a_free_cell(self, cells: list[int], choice: int) -> None:
        """Whatever stands on the board, as long as there is room."""
        board = EMPTY
        for number, cell in enumerate(cells):
            board = board_after(board, cell, "xo"[number % 2]) or board
        if free(board):
            cell = bot_cell(board, lambda open_cells: open_cells[choice % len(open_cells)])
            assert cell in free(board)


class TestG8Cost:
    def test_polling_requests_every_item_when_its_freshness_ends(self) -> None:
        """A minute, two tabs, 240 posts fresh for 10 s: 2 x 6 rounds of 240, or of 12 batches."""
        assert polling(2 * 60, (240, 10.0, 20)) == (2880, 144)

    def test_polling_without_tabs_costs_nothing(self) -> None:
        """No open tab, no cost."""
        assert polling(0 * 60, (240, 10.0, 20), (24, 30.0, 20)) == (0, 0)


class TestG8Pace:
    def test_every_time_of_the_demo_can_be_made_faster(self) -> None:
        """For films and tests: everything by the same factor."""
        quick = Pace().faster(10)
        assert (quick.post_fresh_for, quick.lookup, quick.bot_thinks) == (1, (0.1, 0.3), (0.2, 1.2))

    @pytest.mark.parametrize("speed", [0, -1, 1000, "2", True, float("nan")])
    def test_a_bad_demo_speed_is_refused(self, speed: float) -> None:
        """Named, with what is allowed."""
        with pytest.raises(ConfigError, match=r"speed: a number from 0\.1 to 100"):
            Pace().faster(speed)
