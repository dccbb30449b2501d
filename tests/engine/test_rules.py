"""The engine's decisions, without an event loop: E2, E5, E6, E7, E10, E12."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import Policy, Verdict
from stillfresh.engine.model import Loaded
from stillfresh.engine.rules import (
    AGE_BUCKETS,
    Fail,
    Load,
    Serve,
    Terms,
    absent_believed_for,
    age_bucket,
    failed,
    fresh_until,
    jittered,
    own_policy,
    plan_read,
    plan_wait,
    unchanged_until,
    verdict_of,
)
from stillfresh.stores.contract import Copy, Failure, Mark, Record

POLICY = Policy(10, 20, 30)
COOLING = Failure(2, 1_000_000.0, "TimeoutError: slow")
ages = st.floats(0, 100)
marks = st.sampled_from(Mark)
policies = st.builds(Policy, *[st.floats(0, 50)] * 3)


def copy(mark: Mark = Mark.NONE, at: float = 0.0, policy: Policy = POLICY) -> Copy:
    return Copy("g1", at, policy, b"1", mark)


class TestE2Plan:
    @pytest.mark.parametrize(
        ("age", "plan"),
        [
            (9, Serve(copy(), Verdict.FRESH)),
            (10, Serve(copy(), Verdict.STALE, refresh=True)),
            (30, Load(fallback=copy())),
            (40, Load()),
        ],
    )
    def test_by_verdict(self, age: float, plan: object) -> None:
        """FRESH is served; STALE served and refreshed; EXPIRED and GONE wait for a load."""
        assert plan_read(Record(copy()), age) == plan

    def test_nothing_known_is_a_load(self) -> None:
        """A first read waits."""
        assert plan_read(Record(), 0) == Load()

    def test_what_another_is_loading_is_not_refreshed_again(self) -> None:
        """E5: STALE under somebody's lease is served; once the lease has ended it is refreshed."""
        assert plan_read(Record(copy(), held_until=15), 14.9) == Serve(copy(), Verdict.STALE)
        plan = plan_read(Record(copy(), held_until=15), 15)
        assert plan == Serve(copy(), Verdict.STALE, refresh=True)


class TestE6Marks:
    @pytest.mark.parametrize(
        ("mark", "age", "verdict"),
        [
            (Mark.SOFT, 0, Verdict.STALE),
            (Mark.HARD, 0, Verdict.EXPIRED),
            (Mark.SOFT, 30, Verdict.EXPIRED),
            (Mark.HARD, 39.9, Verdict.EXPIRED),
            (Mark.HARD, 40, Verdict.GONE),
        ],
    )
    def test_a_mark_makes_it_no_better(self, mark: Mark, age: float, verdict: Verdict) -> None:
        """Soft is STALE at best, hard is EXPIRED at best, and time goes on."""
        assert verdict_of(copy(mark), age) == verdict

    @given(marks, ages, policies)
    def test_an_invalidated_copy_is_never_fresh(
        self, mark: Mark, age: float, policy: Policy
    ) -> None:
        """Whatever its terms."""
        if mark is not Mark.NONE:
            assert verdict_of(copy(mark, policy=policy), age) is not Verdict.FRESH

    def test_an_invalidated_copy_has_no_freshness_left(self) -> None:
        """`explain` says so."""
        assert (fresh_until(copy()), fresh_until(copy(Mark.SOFT))) == (10, 0)


class TestE16Absence:
    def test_is_believed_for_a_tenth_of_the_freshness_unless_declared(self) -> None:
        """And for a second at least."""
        assert [absent_believed_for(it, None) for it in (300, 20, 10, 5)] == [30, 2, 1, 1]
        assert [absent_believed_for(300, it) for it in (60, 0.5)] == [60, 1]


class TestE7Cooldown:
    @pytest.mark.parametrize(
        ("age", "plan"),
        [
            (9, Serve(copy(), Verdict.FRESH)),
            (10, Serve(copy(), Verdict.STALE, failure=COOLING)),
            (30, Serve(copy(), Verdict.EXPIRED, failure=COOLING)),
            (40, Fail(COOLING)),
        ],
    )
    def test_during_it_no_load_begins(self, age: float, plan: object) -> None:
        """STALE and EXPIRED are served with the error, GONE fails with it."""
        assert plan_read(Record(copy(), failure=COOLING), age) == plan

    def test_after_it_a_load_begins(self) -> None:
        """At its very end it is over."""
        over = Failure(1, 10, "x")
        assert plan_read(Record(copy(), failure=over), 10).__class__ is Serve
        assert plan_read(Record(None, failure=over), 10) == Load()

    def test_doubles_to_a_minute(self) -> None:
        """1 s, 2 s, 4 s, … 60 s, and stays there."""
        pauses, failure = [], None
        for _ in range(9):
            failure = failed(failure, "x", now=100, dice=0)
            pauses.append(failure.retry_at - 100)
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]

    @given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
    def test_is_jittered_and_bounded(self, count: int, dice: float) -> None:
        """Never longer than a minute, never less than nine tenths of what it would be."""
        failure = failed(Failure(count, 0, ""), "x", now=0, dice=dice)
        assert 0.9 <= failure.retry_at <= 60
        assert failure.count == count + 1

    def test_a_loader_may_ask_for_its_own_pause(self) -> None:
        """What upstream said is neither doubled nor jittered."""
        assert failed(COOLING, "x", now=5, dice=0.7, pause=120).retry_at == 125


class TestE5Waiting:
    def test_waits_while_the_holder_works(self) -> None:
        """Neither a copy nor an end of the lease: wait on."""
        assert plan_wait(Record(copy(), held_until=80), "g1", 70) is None

    def test_takes_the_copy_that_came(self) -> None:
        """A generation that was not seen before is the answer."""
        record = Record(copy(at=65), held_until=80)
        assert plan_wait(record, "g0", 70) == Serve(copy(at=65), Verdict.FRESH)

    def test_takes_over_when_the_lease_is_gone_or_has_ended(self) -> None:
        """A holder that died is replaced."""
        assert plan_wait(Record(), None, 70) == Load()
        assert plan_wait(Record(held_until=70), None, 70) == Load()

    def test_a_lease_that_ends_too_late_is_over(self) -> None:
        """The clock was set back since: nobody waits for it, nor spares the refresh for it."""
        far = Record(copy(), held_until=70 + 120 + 5.1)
        assert plan_wait(far, "g1", 70, lease_for=5) == Load()
        assert plan_wait(far, "g1", 70, lease_for=300) is None
        assert plan_read(far, 15, lease_for=5) == Serve(copy(), Verdict.STALE, refresh=True)
        near = Record(copy(), held_until=70 + 120 + 5)
        assert plan_wait(near, "g1", 70, lease_for=5) is None
        assert plan_read(near, 70 - 1, lease_for=5) == plan_read(near, 70 - 1)

    def test_shares_the_failure(self) -> None:
        """The holder failed: so has this one, for the length of the cooldown."""
        assert plan_wait(Record(failure=COOLING), None, 70) == Fail(COOLING)


class TestE10Jitter:
    @given(st.floats(0, 0.99), st.floats(0, 1, exclude_max=True))
    def test_only_shortens_freshness(self, jitter: float, dice: float) -> None:
        """By up to the share given; the other terms stay."""
        policy = jittered(POLICY, jitter, dice)
        assert 10 * (1 - jitter) <= policy.fresh_for <= 10
        assert (policy.stale_for, policy.error_for) == (20, 30)

    def test_applies_to_an_entrys_own_terms_too(self) -> None:
        """E8: what `Loaded` says is jittered the same way."""
        own = own_policy(Terms(POLICY, 1, 0.5), Loaded(1, fresh_for=100))
        assert jittered(own, 0.5, 0.5).fresh_for == 75
        assert jittered(own, 0, 0.5).fresh_for == 100


class TestE12Unchanged:
    @given(policies, st.floats(0, 200_000), st.floats(0, 1, exclude_max=True))
    def test_neither_verdict_nor_bucket_changes_before(
        self, policy: Policy, age: float, share: float
    ) -> None:
        """So that a hit may be counted on the entry and folded in later."""
        one = copy(policy=policy)
        until = unchanged_until(one, age)
        assert until > age
        later = age + (min(until, 1e7) - age) * share
        if later < until:
            assert verdict_of(one, later) == verdict_of(one, age)
            assert age_bucket(later) == age_bucket(age)

    def test_buckets_are_in_order(self) -> None:
        """An age on a bound belongs to the next bucket."""
        assert list(AGE_BUCKETS) == sorted(AGE_BUCKETS)
        assert [age_bucket(age) for age in (0, 0.1, 1e9)] == [0, 1, len(AGE_BUCKETS)]
