"""The engine's decisions, without an event loop: E2, E5, E6, E7, E10, E12."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import LoadFailed, Policy, Verdict
from stillfresh.engine.model import Loaded, RetryAfter
from stillfresh.engine.rules import (
    ABSENT,
    AGE_BUCKETS,
    Fail,
    MustLoad,
    Serve,
    Terms,
    absent_believed_for,
    absent_pause,
    absent_policy,
    age_bucket,
    failed,
    failure_error,
    fresh_until,
    jittered,
    may_retry,
    outlook_of,
    own_policy,
    pause_of,
    plan_read,
    plan_wait,
    refresh_at,
    refresh_times,
    results_of,
    stamped,
    unchanged_until,
    verdict_of,
    watched_until,
)
from stillfresh.stores.contract import Copy, Failure, Mark, Record

POLICY = Policy(10, 20, 30)
NOW = float("-inf")
COOLING = Failure(2, 1_000_000.0, "TimeoutError: slow")
ages = st.floats(0, 100)
marks = st.sampled_from(Mark)
policies = st.builds(Policy, *[st.floats(0, 50)] * 3)


TERMS = Terms(POLICY, absent_for=4, jitter=0)


def copy(mark: Mark = Mark.NONE, at: float = 0.0, policy: Policy = POLICY) -> Copy:
    return Copy("g1", at, policy, b"1", mark)


def absence(at: float = 0.0, mark: Mark = Mark.NONE) -> Copy:
    """The copy of a key that does not exist: believed for four seconds."""
    return Copy("g1", at, absent_policy(TERMS, 0), None, mark)


class TestE2Plan:
    @pytest.mark.parametrize(
        ("age", "plan"),
        [
            (9, Serve(copy(), Verdict.FRESH)),
            (10, Serve(copy(), Verdict.STALE, refresh=True)),
            (30, MustLoad(fallback=copy())),
            (40, MustLoad()),
        ],
    )
    def test_a_read_is_planned_by_verdict(self, age: float, plan: object) -> None:
        """FRESH is served; STALE served and refreshed; EXPIRED and GONE wait for a load."""
        assert plan_read(Record(copy()), age) == plan

    def test_nothing_known_is_a_load(self) -> None:
        """A first read waits."""
        assert plan_read(Record(), 0) == MustLoad()

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

    def test_an_absence_counts_from_the_arrival_of_the_answer(self) -> None:
        """So the time of the load is added; a clock that was set back takes nothing away."""
        assert absent_policy(TERMS, 3) == Policy(7)
        assert absent_policy(TERMS, -3) == Policy(4)
        assert absent_policy(Terms(POLICY, 4, 0, absent_stale_for=9), 0) == Policy(4, 9)


class TestE24Refresh:
    """When a watcher asks for a new copy."""

    def test_a_copy_is_refreshed_at_the_end_of_its_freshness(self) -> None:
        """Until then nothing is done; then, or if there is none, at once."""
        assert refresh_at(Record(copy()), 9.9) == 10
        assert refresh_at(Record(copy()), 10) == NOW
        assert refresh_at(Record(copy(Mark.SOFT)), 5) == NOW
        assert refresh_at(Record(), 5) == NOW

    def test_a_failure_is_tried_again_at_the_end_of_its_cooldown(self) -> None:
        """A copy that is still fresh comes first."""
        cooling = Failure(1, 50, "x")
        assert refresh_at(Record(copy(), failure=cooling), 5) == 10
        assert refresh_at(Record(copy(), failure=cooling), 10) == 50
        assert refresh_at(Record(failure=cooling), 5) == 50

    def test_a_known_absence_is_asked_for_as_often_as_a_copy(self) -> None:
        """Its pause counts from when it was asked for, and ends on time."""
        record = Record(absence(at=100))
        assert refresh_at(record, 100, pause=10) == 110
        assert refresh_at(record, 109.9, pause=10) == 110
        assert refresh_at(record, 110, pause=10) == NOW

    def test_an_absence_that_is_news_is_asked_for_when_it_is_no_longer_believed(self) -> None:
        """The watcher does not know of it yet, so there is no pause."""
        assert refresh_at(Record(absence(at=100)), 103) == 104
        assert refresh_at(Record(absence(at=100)), 104) == NOW

    def test_only_an_absence_that_holds_is_waited_for(self) -> None:
        """Not one that was invalidated, not one from the future, and no copy with a value."""
        assert refresh_at(Record(absence(100, Mark.HARD)), 101, pause=10) == NOW
        assert refresh_at(Record(absence(100)), 90, pause=50) == NOW
        assert refresh_at(Record(copy()), 12, pause=50) == NOW

    def test_each_key_has_its_own_time(self) -> None:
        """The pause is only for keys that the watcher knows to be absent."""
        records = {"a": Record(copy()), "b": Record(absence()), "c": Record(absence())}
        times = refresh_times(records, 1, TERMS, {"c"})
        assert times == {"a": 10, "b": 4, "c": 10}
        brief = Record(Copy("g1", 0, Policy(0.5), None))
        assert refresh_times({"a": brief}, 0.2, TERMS, ()) == {"a": 0.5}

    @pytest.mark.parametrize(
        ("fresh_for", "absent_for", "pause"), [(10, 4, 10), (10, 15, 15), (300, 4, 30), (1, 4, 4)]
    )
    def test_an_absence_is_not_asked_for_more_often_than_a_copy(
        self, fresh_for: float, absent_for: float, pause: float
    ) -> None:
        """But every half minute, even if others are fresh for longer."""
        assert absent_pause(Terms(Policy(fresh_for), absent_for, 0)) == pause

    def test_a_copy_that_arrives_is_refreshed_when_its_own_freshness_ends(self) -> None:
        """However long the others of its kind are fresh."""
        assert watched_until(copy(at=100), TERMS) == 110
        assert watched_until(copy(at=100, policy=Policy(2)), TERMS) == 102
        assert watched_until(copy(Mark.SOFT, at=100), TERMS) == 100

    def test_a_copy_that_arrives_and_is_never_fresh_is_refreshed_as_the_others(self) -> None:
        """Or it would be loaded without end; one that was invalidated is loaded at once."""
        assert watched_until(copy(at=100, policy=Policy(0, 5)), TERMS) == 110
        assert watched_until(copy(Mark.HARD, at=100, policy=Policy(0, 5)), TERMS) == 100

    def test_an_absence_that_arrives_is_asked_for_again_after_its_pause(self) -> None:
        """Or when it is no longer believed, if that is later."""
        assert watched_until(absence(100), TERMS) == 110
        assert watched_until(absence(100), Terms(POLICY, 50, 0)) == 150


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
    def test_no_load_begins_during_a_cooldown(self, age: float, plan: object) -> None:
        """STALE and EXPIRED are served with the error, GONE fails with it."""
        assert plan_read(Record(copy(), failure=COOLING), age) == plan

    def test_a_load_begins_after_a_cooldown(self) -> None:
        """At its very end it is over."""
        over = Failure(1, 10, "x")
        assert plan_read(Record(copy(), failure=over), 10).__class__ is Serve
        assert plan_read(Record(None, failure=over), 10) == MustLoad()

    def test_the_failure_is_told_with_an_old_copy_until_a_load_succeeds(self) -> None:
        """E31: while the next load begins, while it runs, and with a copy that came before it."""
        over = Failure(1, 10, "x")
        record = Record(copy(), failure=over)
        assert plan_read(record, 9) == Serve(copy(), Verdict.FRESH)
        retried = Serve(copy(), Verdict.STALE, refresh=True, failure=over)
        assert plan_read(record, 10) == retried
        held = Record(copy(), held_until=15, failure=over)
        assert plan_read(held, 12) == Serve(copy(), Verdict.STALE, failure=over)
        assert plan_wait(record, "g0", 35) == Serve(copy(), Verdict.STALE, failure=over)

    def test_an_error_says_how_long_its_cooldown_lasts(self) -> None:
        """E31: and says nothing of a cooldown that is over."""
        failure = Failure(1, 10, "ValueError: x")
        cooling = failure_error("price 'a'", failure, 9)
        text = "price 'a': not tried again for 1.0 s, since loading failed: ValueError: x"
        assert (str(cooling), cooling.retry_at) == (text, 10)
        retried = failure_error("price 'a'", failure, 10)
        assert (str(retried), retried.retry_at) == ("price 'a': loading failed: ValueError: x", 10)
        assert [may_retry(cooling, now) for now in (9.9, 10, 11)] == [False, True, True]
        assert not may_retry(LoadFailed("a load was tried"), 11)

    def test_a_cooldown_doubles_to_a_minute(self) -> None:
        """1 s, 2 s, 4 s, … 60 s, and stays there."""
        pauses, failure = [], None
        for _ in range(9):
            failure = failed(failure, "x", now=100, dice=0)
            pauses.append(failure.retry_at - 100)
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]

    @given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
    def test_a_cooldown_is_jittered_and_bounded(self, count: int, dice: float) -> None:
        """Never longer than a minute, never less than nine tenths of what it would be."""
        failure = failed(Failure(count, 0, ""), "x", now=0, dice=dice)
        assert 0.9 <= failure.retry_at <= 60
        assert failure.count == count + 1

    def test_a_loader_may_ask_for_its_own_pause(self) -> None:
        """What upstream said is neither doubled nor jittered."""
        assert failed(COOLING, "x", now=5, dice=0.7, pause=120).retry_at == 125
        assert pause_of(RetryAfter("2m")) == 120

    def test_a_pause_that_cannot_be_read_is_none(self) -> None:
        """An error without one, or with nonsense, cools down as any other (E25)."""
        nonsense = RetryAfter(5)
        nonsense.seconds = "soon"  # type: ignore[assignment]
        assert [pause_of(ValueError("x")), pause_of(nonsense), pause_of(None)] == [None] * 3

    def test_a_resource_has_cooldowns_of_its_own(self) -> None:
        """The first is never longer than the longest."""
        pauses = [
            failed(Failure(count, 0, ""), "x", 0, 0, first=5, longest=12).retry_at
            for count in range(4)
        ]
        assert pauses == [5, 10, 12, 12]
        assert failed(None, "x", 0, 0, first=90, longest=60).retry_at == 90
        assert failed(None, "x", 0, dice=0.5, first=10).retry_at == 9.5


class TestE5Waiting:
    def test_a_process_waits_while_the_holder_works(self) -> None:
        """Neither a copy nor an end of the lease: wait on."""
        assert plan_wait(Record(copy(), held_until=80), "g1", 70) is None

    def test_a_waiting_process_takes_the_copy_that_came(self) -> None:
        """A generation that was not seen before is the answer."""
        record = Record(copy(at=65), held_until=80)
        assert plan_wait(record, "g0", 70) == Serve(copy(at=65), Verdict.FRESH)

    def test_takes_over_when_the_lease_is_gone_or_has_ended(self) -> None:
        """A holder that died is replaced."""
        assert plan_wait(Record(), None, 70) == MustLoad()
        assert plan_wait(Record(held_until=70), None, 70) == MustLoad()

    def test_a_lease_that_ends_too_late_is_over(self) -> None:
        """The clock was set back since: nobody waits for it, nor spares the refresh for it."""
        far = Record(copy(), held_until=70 + 120 + 5.1)
        assert plan_wait(far, "g1", 70, lease_for=5) == MustLoad()
        assert plan_wait(far, "g1", 70, lease_for=300) is None
        assert plan_read(far, 15, lease_for=5) == Serve(copy(), Verdict.STALE, refresh=True)
        near = Record(copy(), held_until=70 + 120 + 5)
        assert plan_wait(near, "g1", 70, lease_for=5) is None
        assert plan_read(near, 70 - 1, lease_for=5) == plan_read(near, 70 - 1)

    def test_a_copy_that_arrives_old_is_served_to_those_who_waited(self) -> None:
        """E16: EXPIRED or GONE already, it is STALE to them; unless it was invalidated hard."""
        for age in (35, 100):
            assert plan_wait(Record(copy()), "g0", age) == Serve(copy(), Verdict.STALE)
        hard, soft = copy(Mark.HARD), copy(Mark.SOFT)
        assert plan_wait(Record(hard), "g0", 5) == MustLoad(fallback=hard)
        assert plan_wait(Record(soft), "g0", 35) == Serve(soft, Verdict.STALE)
        assert plan_wait(Record(copy()), "g1", 35) == MustLoad(fallback=copy())

    def test_a_waiting_process_shares_the_failure(self) -> None:
        """The holder failed: so has this one, for the length of the cooldown."""
        assert plan_wait(Record(failure=COOLING), None, 70) == Fail(COOLING)


class TestE10Jitter:
    @given(st.floats(0, 0.99), st.floats(0, 1, exclude_max=True))
    def test_jitter_only_shortens_freshness(self, jitter: float, dice: float) -> None:
        """By up to the share given; the other terms stay."""
        policy = jittered(POLICY, jitter, dice)
        assert 10 * (1 - jitter) <= policy.fresh_for <= 10
        assert (policy.stale_for, policy.error_for) == (20, 30)

    def test_jitter_applies_to_an_entrys_own_terms_too(self) -> None:
        """E8: what `Loaded` says is jittered the same way."""
        own = own_policy(Terms(POLICY, 1, 0.5), Loaded(1, fresh_for=100))
        assert jittered(own, 0.5, 0.5).fresh_for == 75
        assert jittered(own, 0, 0.5).fresh_for == 100

    def test_what_a_loader_does_not_say_is_the_resources(self) -> None:
        """E8: each of the three times by itself."""
        assert own_policy(TERMS, Loaded(1)) == POLICY
        assert own_policy(TERMS, Loaded(1, fresh_for=1)) == Policy(1, 20, 30)
        assert own_policy(TERMS, Loaded(1, stale_for=2)) == Policy(10, 2, 30)
        assert own_policy(TERMS, Loaded(1, error_for=3)) == Policy(10, 20, 3)


class TestE12Unchanged:
    @given(policies, st.floats(0, 200_000), st.floats(0, 1, exclude_max=True))
    def test_a_verdict_does_not_change_before_it_may(
        self, policy: Policy, age: float, share: float
    ) -> None:
        """So that memory may answer until then. No metric decides how long."""
        one = copy(policy=policy)
        until = unchanged_until(one, age)
        assert until > age
        later = age + (min(until, 1e7) - age) * share
        if later < until:
            assert verdict_of(one, later) == verdict_of(one, age)

    def test_age_buckets_are_in_order(self) -> None:
        """An age on a bound belongs to the next bucket."""
        assert list(AGE_BUCKETS) == sorted(AGE_BUCKETS)
        assert [age_bucket(age) for age in (0, 0.1, 1e9)] == [0, 1, len(AGE_BUCKETS)]

    def test_a_verdict_ends_with_the_next_duration_of_its_policy(self) -> None:
        """After the last of them nothing changes any more."""
        assert unchanged_until(copy(at=100), 107) == 110
        assert unchanged_until(copy(at=100), 110) == 130
        assert unchanged_until(copy(at=100), 115) == 130
        assert unchanged_until(copy(at=100, policy=Policy(100, 0, 12)), 205) == 212
        assert unchanged_until(copy(at=100, policy=Policy(100, 12)), 205) == 212
        assert unchanged_until(copy(), 1e9) == float("inf")

    def test_an_outlook_is_what_can_be_said_now(self) -> None:
        """E16: to callers that waited, a copy is STALE at worst. From the future, it has age 0."""
        fresh, old = outlook_of(copy(at=100), 105), outlook_of(copy(at=100), 135)
        assert (fresh.verdict, fresh.at_arrival) == (Verdict.FRESH, Verdict.FRESH)
        assert fresh.until == 110
        assert (old.verdict, old.at_arrival) == (Verdict.EXPIRED, Verdict.STALE)
        assert outlook_of(copy(at=100), 97).verdict is Verdict.FRESH

    def test_stored_times_are_whole_milliseconds(self) -> None:
        """As every store keeps them; never in the future, and an exact one stays."""
        assert [stamped(it) for it in (1.0009, 1.001, 0.0)] == [1.0, 1.001, 0.0]
        assert stamped(1_700_000_000.0039) == 1_700_000_000.003
        exact = [(1_700_000_000_000 + number) / 1000 for number in range(100)]
        assert list(map(stamped, exact)) == exact


class TestE4Results:
    """What a loader's answer means for each key."""

    def test_a_key_that_is_left_out_is_absent(self) -> None:
        """Others have their results, which may be None or an exception."""
        error = ValueError("x")
        found = results_of("price", ["a", "b", "c"], {"a": None, "b": error})
        assert found == {"a": None, "b": error, "c": ABSENT}

    def test_more_than_was_asked_for_is_ignored(self) -> None:
        """If every key has its result."""
        assert results_of("price", ["a"], {"a": 1, "b": 2}) == {"a": 1}

    def test_a_loader_that_names_its_keys_in_another_way_has_failed(self) -> None:
        """Only the keys that it left out; the error names one that nobody asked for."""
        found = results_of("price", ["a", "b"], {"a": 1, "B": 2})
        assert found["a"] == 1
        assert str(found["b"]) == (
            "price 'b': the loader left it out and answered for 'B', which nobody asked for"
        )

    def test_an_answer_that_is_no_mapping_has_failed_for_all(self) -> None:
        """Each key is told what came instead."""
        found = results_of("price", ["a", "b"], [1, 2])
        assert list(found) == ["a", "b"]
        assert "the loader returned list, not a mapping" in str(found["a"])
