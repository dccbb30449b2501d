"""E1: verdicts, and the two ways to read "still fresh"."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError, Policy, Verdict
from stillfresh.freshness import (
    LONGEST_LEASE,
    MAX_SKEW,
    age_of,
    is_fresh,
    is_fresh_inclusive,
    is_lease_over,
    is_over,
)

times = st.floats(-1e9, 1e9)
spans = st.floats(0, 1e6)
policies = st.builds(Policy, spans, spans, spans)
ORDER = [Verdict.FRESH, Verdict.STALE, Verdict.EXPIRED, Verdict.GONE]


class TestE1Verdict:
    @pytest.mark.parametrize(
        ("age", "expected"),
        [
            (0, Verdict.FRESH),
            (29.9, Verdict.FRESH),
            (30, Verdict.STALE),
            (89.9, Verdict.STALE),
            (90, Verdict.EXPIRED),
            (129.9, Verdict.EXPIRED),
            (130, Verdict.GONE),
        ],
    )
    def test_the_verdict_follows_from_the_age_of_a_copy(
        self, age: float, expected: Verdict
    ) -> None:
        """`stale_for` and `error_for` count from the end of freshness; ends are exclusive."""
        assert Policy("30s", stale_for="1m", error_for=100).verdict(1000, 1000 + age) == expected

    def test_without_stale_or_error_time_a_copy_goes_from_fresh_to_gone(self) -> None:
        """The defaults are zero, so the plain policy is a plain TTL."""
        policy = Policy(10)
        assert [policy.verdict(0, now) for now in (9.999, 10)] == [Verdict.FRESH, Verdict.GONE]

    def test_a_copy_that_may_be_served_stale_is_never_expired(self) -> None:
        """An `error_for` within `stale_for` adds nothing."""
        policy = Policy(10, stale_for=60, error_for=30)
        assert [policy.verdict(0, now) for now in (69.9, 70)] == [Verdict.STALE, Verdict.GONE]
        assert (policy.lasts, Policy(10, 30, 60).lasts) == (70, 70)

    def test_a_copy_exactly_five_seconds_ahead_has_age_zero(self) -> None:
        """Exactly five seconds ahead is age zero, which a policy without freshness calls GONE."""
        assert Policy(0).verdict(1005, 1000) == Verdict.GONE

    @pytest.mark.parametrize("ahead", [0.1, 5.0])
    def test_a_copy_from_the_near_future_has_age_zero(self, ahead: float) -> None:
        """Machines' clocks differ by a little: such a copy is new."""
        assert age_of(1000 + ahead, 1000) == 0
        assert Policy(10).verdict(1000 + ahead, 1000) == Verdict.FRESH

    def test_a_copy_from_the_near_future_is_not_fresh_without_fresh_for(self) -> None:
        """With `fresh_for=0` age zero is stale already."""
        assert Policy(0, stale_for=1).verdict(1001, 1000) == Verdict.STALE

    @pytest.mark.parametrize("ahead", [5.001, 1e6])
    @pytest.mark.parametrize("policy", [Policy(10), Policy(1e9, 1e9, 1e9), Policy(0)])
    def test_a_copy_from_the_far_future_is_stale(self, policy: Policy, ahead: float) -> None:
        """Beyond the skew a copy is served and refreshed, never fresh for ever."""
        assert policy.verdict(1000 + ahead, 1000) == Verdict.STALE

    @given(policies, times, st.lists(spans, min_size=2, max_size=5))
    def test_the_verdict_of_a_copy_never_improves_with_time(
        self, policy: Policy, at: float, ages: list[float]
    ) -> None:
        """As time passes the verdict never goes back."""
        ranks = [ORDER.index(policy.verdict(at, at + age)) for age in sorted(ages)]
        assert ranks == sorted(ranks)

    @given(policies, times, times)
    def test_the_verdict_fresh_and_is_fresh_agree(
        self, policy: Policy, at: float, now: float
    ) -> None:
        """The verdict and the predicate are one rule."""
        fresh = policy.verdict(at, now) == Verdict.FRESH
        assert fresh == is_fresh(at, policy.fresh_for, now)


class TestS2Leases:
    def test_a_lease_and_a_cooldown_are_over_at_their_end(self) -> None:
        """A lease, and a cooldown."""
        for ended in (is_over, lambda until, now: is_lease_over(until, now, 5.0)):
            assert [ended(10.0, now) for now in (9.999, 10.0, 11.0)] == [False, True, True]

    @pytest.mark.parametrize(("lease_for", "longest"), [(5.0, LONGEST_LEASE), (300.0, 300.0)])
    def test_a_lease_that_ends_too_late_is_over(self, lease_for: float, longest: float) -> None:
        """None lasts so long: the clock was set back. Clocks may differ by a little."""
        last = 100.0 + longest + MAX_SKEW
        assert not is_lease_over(last, 100.0, lease_for)
        assert is_lease_over(last + 0.001, 100.0, lease_for)


class TestE1TwoPredicates:
    def test_the_two_freshness_predicates_differ_at_the_end_of_freshness(self) -> None:
        """E counts the last moment as over, C and F as fresh."""
        assert not is_fresh(0, 300, 300)
        assert is_fresh_inclusive(0, 300, 300)
        assert not is_fresh_inclusive(0, 300, 300.001)

    def test_the_two_freshness_predicates_differ_for_the_near_future(self) -> None:
        """E forgives clocks that differ by a little, C and F take any future for stale."""
        assert is_fresh(MAX_SKEW, 300, 0)
        assert is_fresh(MAX_SKEW, 0.1, 0), "as if it were new"
        assert not is_fresh_inclusive(0.001, 300, 0)

    @given(times, spans, times)
    def test_the_two_freshness_predicates_agree_elsewhere(
        self, at: float, fresh_for: float, now: float
    ) -> None:
        """Anywhere but at the end and in the future there is one answer."""
        age = now - at
        if age >= 0 and age != fresh_for:
            assert is_fresh(at, fresh_for, now) == is_fresh_inclusive(at, fresh_for, now)


class TestE1Policy:
    def test_a_policy_takes_durations(self) -> None:
        """What people write is seconds inside."""
        assert Policy("5m", "1h", error_for="1d") == Policy(300, 3600, 86400)

    @pytest.mark.parametrize("name", ["fresh_for", "stale_for", "error_for"])
    def test_a_policy_refuses_a_bad_duration_at_declaration(self, name: str) -> None:
        """The error names the argument and the text."""
        arguments = {"fresh_for": "1m", name: "soon"}
        with pytest.raises(ConfigError, match=f"{name}: cannot read 'soon'"):
            Policy(**arguments)

    def test_a_policy_is_frozen(self) -> None:
        """A policy is shared: nobody changes it under the others."""
        with pytest.raises(AttributeError):
            Policy(1).fresh_for = 2  # type: ignore[misc]
