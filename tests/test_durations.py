"""E1, M10: what is a duration, and what the error says when it is none."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError
from stillfresh.durations import ALLOWED, Duration, seconds


class TestE1Durations:
    """M10: what is taken as a duration, and what is refused by name."""

    @pytest.mark.parametrize(
        ("written", "expected"),
        [
            ("250ms", 0.25),
            ("30s", 30.0),
            ("5m", 300.0),
            ("1h", 3600.0),
            ("30d", 2_592_000.0),
            ("1.5h", 5400.0),
            ("1h30m", 5400.0),
            ("1d2h3m4s5ms", 93_784.005),
            ("10 minutes", 600.0),
            ("1 hour", 3600.0),
            ("1 hour 30 minutes", 5400.0),
            ("2 weeks", 1_209_600.0),
            ("1.5 days", 129_600.0),
            ("250 milliseconds", 0.25),
            (0, 0.0),
            (2, 2.0),
            (0.5, 0.5),
            (timedelta(hours=1, milliseconds=1), 3600.001),
        ],
    )
    def test_durations_are_read_as_people_write_them(
        self, written: Duration, expected: float
    ) -> None:
        """Numbers are seconds; text carries its unit; a timedelta is itself."""
        assert seconds(written) == expected

    @pytest.mark.parametrize(
        "rubbish",
        [
            "5 parsecs", "", " ", "30", "-5s", "5S", "5 s", " 5s", "5s\n", "30m1h", "1h1h",
            "1h 30m", "1hour", "10  minutes", "10 minutes ", "5 minutes 1 hour", "10 Minutes",
            "1e3s", ".5s",
            "5.s", "٣s", "inf", "nans", "s", None, True, b"5s", [5], 5 + 0j, float("nan"),
            float("inf"), -float("inf"), 10**400, "9" * 400 + "d", "1" * 5000 + "s",
        ],
    )  # fmt: skip
    def test_a_malformed_duration_is_refused_by_its_setting(self, rubbish: object) -> None:
        """The error names the setting, the value and what is allowed, and stays one short line."""
        with pytest.raises(ConfigError) as caught:
            seconds(rubbish, name="fresh_for")  # type: ignore[arg-type]
        message = str(caught.value)
        assert message.startswith("fresh_for: cannot read ")
        assert message.endswith(ALLOWED)
        assert len(message) < 250

    def test_a_duration_error_is_a_value_error_too(self) -> None:
        """Who catches ValueError catches it."""
        with pytest.raises(ValueError, match="cannot read"):
            seconds("soon")

    def test_a_duration_error_shows_the_text(self) -> None:
        """Who wrote "5 parsecs" reads "5 parsecs"."""
        with pytest.raises(ConfigError, match="'5 parsecs'"):
            seconds("5 parsecs")

    @pytest.mark.parametrize("negative", [-1, -0.001, timedelta(seconds=-1)])
    def test_a_negative_duration_is_refused(self, negative: Duration) -> None:
        """No time is shorter than none."""
        with pytest.raises(ConfigError, match="must be zero or more"):
            seconds(negative)

    @pytest.mark.parametrize("none", [0, 0.0, "0s", timedelta(0), -1])
    def test_a_zero_duration_is_refused_if_it_must_be_positive(self, none: Duration) -> None:
        """`positive` is for what cannot be zero, such as a TTL."""
        with pytest.raises(ConfigError, match="ttl: must be more than zero"):
            seconds(none, name="ttl", positive=True)

    @given(st.text(max_size=20) | st.floats() | st.integers() | st.timedeltas())
    def test_any_value_is_a_duration_or_refused(self, value: Duration) -> None:
        """Whatever comes in: finite seconds of zero or more, or a ConfigError, nothing else."""
        try:
            result = seconds(value)
        except ConfigError:
            return
        assert 0 <= result < float("inf")

    @given(
        st.integers(0, 10**9), st.sampled_from([("ms", 0.001), ("s", 1), ("m", 60), ("h", 3600)])
    )
    def test_durations_as_text_agree_with_numbers(
        self, count: int, unit: tuple[str, float]
    ) -> None:
        """`"5m"` and `5 * 60` are the same duration."""
        name, size = unit
        assert seconds(f"{count}{name}") == pytest.approx(seconds(count * size))
