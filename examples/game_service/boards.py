"""Noughts and crosses: who has won, and how a bot plays. Pure.

A board is nine cells, row by row: `x` the visitor, `o` the bot, `.` free.
"""

from collections.abc import Callable
from typing import Final

EMPTY: Final = "." * 9
LINES: Final = (
    (0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6),
)  # fmt: skip


def free(board: str) -> tuple[int, ...]:
    return tuple(cell for cell in range(9) if board[cell] == ".")


def board_after(board: str, cell: int, mark: str) -> str | None:
    """The board after the move; None if the cell is not free."""
    return f"{board[:cell]}{mark}{board[cell + 1 :]}" if cell in free(board) else None


def outcome(board: str) -> str | None:
    """The winner `x` or `o`, `draw`, or None if the game goes on."""
    for a, b, c in LINES:
        if board[a] == board[b] == board[c] != ".":
            return board[a]
    return None if "." in board else "draw"


def bot_cell(board: str, choose: Callable[[tuple[int, ...]], int]) -> int:
    """The bot's move: it wins if it can, stops a win if it must, and else chooses at random."""
    for mark in ("o", "x"):
        for cell in free(board):
            if outcome(board_after(board, cell, mark) or board) == mark:
                return cell
    return choose(free(board))
