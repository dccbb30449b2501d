"""Lines that come by the hundred a second do not fill a log."""

import logging

import pytest

from stillfresh.repeated_lines import AT_ONCE, EVERY, RepeatedLines

logger = logging.getLogger("stillfresh.test")


@pytest.fixture
def lines() -> RepeatedLines:
    return RepeatedLines(logger)


@pytest.fixture
def flooded(lines: RepeatedLines, caplog: pytest.LogCaptureFixture) -> RepeatedLines:
    """At second 1,000 it wrote as many lines as it may, and left five out."""
    for _ in range(AT_ONCE + 5):
        lines.warn(1_000.0, "before")
    caplog.clear()
    return lines


def test_the_first_lines_are_all_written(
    lines: RepeatedLines, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(AT_ONCE):
        lines.warn(1_000.0, f"failure {number}")
    assert caplog.messages == [f"failure {number}" for number in range(AT_ONCE)]


def test_after_that_one_line_in_ten_seconds_says_how_many_were_left_out(
    lines: RepeatedLines, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(AT_ONCE + 300):
        lines.warn(1_000.0 + number * EVERY / 100, "page: the site is down")
    later = caplog.messages[AT_ONCE:]
    assert len(later) == 3
    assert all(
        line == "page: the site is down; 99 more like it were left out" for line in later[1:]
    )


def test_a_quiet_time_lets_lines_through_again(
    flooded: RepeatedLines, caplog: pytest.LogCaptureFixture
) -> None:
    """And the first of them says what was left out before."""
    flooded.warn(1_000.0 + 3_600, "after")
    flooded.warn(1_000.0 + 3_600, "after")
    assert caplog.messages == ["after; 5 more like it were left out", "after"]


def test_a_clock_that_is_set_back_neither_ends_the_lines_nor_lets_all_through(
    flooded: RepeatedLines, caplog: pytest.LogCaptureFixture
) -> None:
    flooded.warn(10.0, "set back")
    flooded.warn(20.0, "ten seconds later")
    assert caplog.messages == ["ten seconds later; 6 more like it were left out"]
