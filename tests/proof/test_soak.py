"""How `make soak` judges what it saw."""

import pytest

from tests.proof.soak import Minute, is_flat, shapes_of


@pytest.mark.parametrize(
    ("sizes", "flat"),
    [
        ([50, 90, 100, 100, 105, 100], False),
        ([50, 98, 100, 101, 105, 100], True),
        ([50, 100, 100, 100, 105, 111], False),
        ([100], True),
    ],
)
def test_memory_may_grow_by_a_tenth_after_the_first_third(sizes: list[int], flat: bool) -> None:
    """What a process needs at first says nothing."""
    assert is_flat([Minute(size, 1, 0.0, 0.0) for size in sizes]) is flat


def test_log_lines_that_differ_in_their_numbers_only_count_as_one_line() -> None:
    """An operator sees which lines come often."""
    log = "12:00 key 'a7' failed after 1.5 s\n12:01 key 'a9' failed after 20 s\nended\n"
    assert shapes_of(log) == {"N:N key 'aN' failed after N s": 2, "ended": 1}
