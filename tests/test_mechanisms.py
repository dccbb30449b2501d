"""The small mechanisms that every package shares: checks, backoff, bounded dicts."""

import pytest

from stillfresh.backoff import pause_after, spread
from stillfresh.bounded import BoundedDict
from stillfresh.checks import (
    checked_bytes,
    checked_flag,
    checked_function,
    checked_share,
    checked_unicode,
    checked_whole,
    is_whole,
)
from stillfresh.errors import ConfigError


class TestChecks:
    @pytest.mark.parametrize("value", [0, -1, 11, True, 1.0, "1", None])
    def test_what_is_no_number_within_the_bounds_is_refused(self, value: object) -> None:
        """The error says the name, the bounds and the value."""
        says = f"^size: must be a whole number from 1 to 10, not {value!r}$"
        assert not is_whole(value, 1, 10)
        with pytest.raises(ConfigError, match=says):
            checked_whole("size", value, 1, 10)

    def test_the_bounds_themselves_are_allowed(self) -> None:
        """Of numbers, of sizes and of shares, which are more than nothing."""
        assert [checked_whole("size", value, 1, 10) for value in (1, 10)] == [1, 10]
        assert [checked_bytes("size", value, 1000) for value in (1000, "1KB")] == [1000, 1000]
        assert checked_share("share", 1) == 1.0
        with pytest.raises(ConfigError, match="at least 1,000, not 999"):
            checked_bytes("size", 999, 1000)
        with pytest.raises(ConfigError, match="must be a number above 0, up to 1, not 0"):
            checked_share("share", 0)

    def test_without_a_most_any_larger_number_will_do(self) -> None:
        """The error then says "or more"."""
        assert checked_whole("size", 10**30) == 10**30
        with pytest.raises(ConfigError, match=r"^size: must be a whole number of 1 or more, not 0"):
            checked_whole("size", 0)

    def test_a_flag_is_true_or_false(self) -> None:
        """1 is not True."""
        assert checked_flag("on", value=True)
        with pytest.raises(ConfigError, match=r"^on: must be True or False, not 1$"):
            checked_flag("on", 1)

    def test_a_function_can_be_called(self) -> None:
        """The error says which kind of function was wanted."""
        assert checked_function("load", len) is len
        with pytest.raises(ConfigError, match=r"^load: must be an async function, not 1$"):
            checked_function("load", 1, "an async function")

    def test_half_a_character_is_no_text(self) -> None:
        """A lone surrogate cannot be written as UTF-8."""
        assert checked_unicode("name", "é") == b"\xc3\xa9"
        with pytest.raises(ConfigError, match="lone surrogates"):
            checked_unicode("name", "\ud800")


class TestBackoff:
    def test_pauses_double_up_to_the_longest(self) -> None:
        """However many failures there were."""
        pauses = [pause_after(count, first=1.0, longest=5.0) for count in (1, 2, 3, 4, 10**6)]
        assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]

    def test_a_pause_is_spread_over_its_second_half(self) -> None:
        """Never shorter than half of it, never longer than it."""
        assert spread(4.0, lambda: 0.0) == 2.0
        assert spread(4.0, lambda: 1.0) == 4.0


def test_a_bounded_dict_drops_what_was_noted_longest_ago() -> None:
    """A key that is noted again is the newest."""
    known = BoundedDict[str, int](2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        known.note(key, value)
    assert known == {"a": 3, "c": 4}
