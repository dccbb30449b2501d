"""Issue 22: objectives, budgets, and which terms are proposed: pure rules."""

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError
from stillfresh.durations import seconds
from stillfresh.lab.plan.rules import (
    LADDER,
    NEAR,
    Candidate,
    Figures,
    Limit,
    budget_of,
    choose,
    duration,
    frontier,
    objective_of,
    rungs,
    search,
)


def figures(
    fresh_for: float, requests: float, p99: float, *, stale_for: float = 0.0, waited: float = 0.1
) -> Figures:
    terms = Candidate(fresh_for, stale_for)
    return Figures(terms, requests, p99 / 2, p99, 0.0, waited, 0.0, 10, 5_000)


class TestObjectives:
    def test_objectives_are_read_with_their_units(self) -> None:
        """Several, with spaces, each with its unit."""
        found = objective_of("p99<60s, p50 < 1.5m,stale<5%,waited<0.5%")
        assert found == (
            Limit("p99", 60),
            Limit("p50", 90),
            Limit("stale", 0.05),
            Limit("waited", 0.005),
        )
        assert ", ".join(map(str, found)) == "p99<1m, p50<90s, stale<5%, waited<0.5%"

    @pytest.mark.parametrize(
        "text",
        [
            *("", "p99", "p98<60s", "p99>60s", "p99<=60s", "p99<60", "p99<5%", "p99<0s"),
            *("stale<5", "stale<60s", "stale<0%", "stale<101%", "p99<60s,", "p99<60s;stale<5%"),
        ],
    )
    def test_malformed_objectives_are_refused(self, text: str) -> None:
        """The error names what was given, and shows how to write one."""
        with pytest.raises(ConfigError, match=r"^objective: cannot read .*'p99<60s, stale<5%'$"):
            objective_of(text)

    @given(st.text(max_size=30))
    def test_any_text_is_an_objective_or_refused(self, text: str) -> None:
        """T5: whatever is typed."""
        with suppress(ConfigError):
            assert objective_of(text)

    def test_budgets_are_read_as_requests_per_second(self) -> None:
        """As requests a second."""
        assert [budget_of(it) for it in ("50/s", "30 / m", "7.2/h")] == [50, 0.5, 0.002]

    @pytest.mark.parametrize("text", ["", "50", "50/", "50/sec", "-1/s", "0/s", "/s", "50/s 2/s"])
    def test_malformed_budgets_are_refused(self, text: str) -> None:
        """With what is allowed."""
        with pytest.raises(ConfigError, match=re.escape("write requests and a unit of time")):
            budget_of(text)


class TestTried:
    @pytest.mark.parametrize("value", [0.0, 0.25, 1.5, *LADDER])
    def test_proposed_times_can_be_copied_into_a_declaration(self, value: float) -> None:
        """What is proposed can be copied into a declaration."""
        assert seconds(duration(value)) == value

    def test_no_tried_time_is_longer_than_half_of_the_recording(self) -> None:
        """Nothing could be told of it."""
        assert rungs(120)[-1] == 60
        assert rungs(2) == (1,)
        assert list(LADDER) == sorted(set(LADDER))

    @given(st.floats(1.5, 3e6), st.floats(10, 3e6))
    def test_the_search_finds_the_longest_time_that_is_fresh_enough(
        self, below: float, length: float
    ) -> None:
        """By halves, with fewer than 40 tries, none of them twice."""
        tried: list[Candidate] = []

        def replay(terms: Candidate) -> Figures:
            tried.append(terms)
            return figures(
                terms.fresh_for,
                1 / terms.fresh_for,
                terms.fresh_for + terms.stale_for,
                stale_for=terms.stale_for,
            )

        found = search(length, [Limit("p99", below)], replay)
        best = max((it for it in rungs(length) if it < below), default=None)
        fits = [it.terms.fresh_for for it in found if it.p99 < below]
        assert max(fits, default=None) == best
        assert len(tried) == len(set(tried)) == len(found) < 40

    def test_the_search_without_an_objective_tries_every_fourth_time(self) -> None:
        """Without an objective, every fourth time from the longest on, with each `stale_for`."""
        tried = list[tuple[float, float]]()

        def replay(terms: Candidate) -> Figures:
            tried.append((terms.fresh_for, terms.stale_for))
            return figures(terms.fresh_for, 1, terms.fresh_for)

        search(20, [Limit("stale", 0.5)], replay)
        assert tried == [(10, 0), (10, 10), (10, 45), (2, 0), (2, 2), (2, 10)]
        tried.clear()
        search(20, [Limit("p99", 4), Limit("p50", 100)], replay)
        halves = [(3, 0), (7, 0), (5, 0), (3, 3), (7, 7), (5, 5), (3, 15), (7, 30), (5, 20)]
        assert tried == [*halves, (10, 0), (10, 10), (2, 0), (2, 2)]
        tried.clear()
        search(20, [Limit("p99", 3)], replay)
        assert tried[:3] == [(3, 0), (1, 0), (2, 0)], "at its limit it is not fresh enough"

    def test_candidate_terms_are_written_as_declarations(self) -> None:
        """In the largest unit that fits; less than a second in seconds."""
        assert str(Candidate(90, 3600)) == "fresh_for=90s, stale_for=1h"
        assert [duration(it) for it in (0, 0.002, 1.5, 120)] == ["0s", "0.002s", "1.5s", "2m"]


class TestProposed:
    TRIED = (figures(10, 20, 11), figures(60, 8, 61), figures(300, 2, 301))

    def test_the_plan_is_the_cheapest_that_meets_the_objective(self) -> None:
        """Not the freshest."""
        choice = choose({"price": self.TRIED}, [Limit("p99", 90)], 50)
        assert choice.chosen == {"price": self.TRIED[1]}
        assert (choice.total, choice.missed, choice.within) == (8, (), None)

    def test_the_plan_spares_waiting_where_it_costs_little(self) -> None:
        """Requests within 5 % are the same."""
        kinder = figures(45, 8.3, 80, stale_for=45, waited=0.01)
        choice = choose({"price": (*self.TRIED, kinder)}, [Limit("p99", 90)], None)
        assert choice.chosen["price"] is kinder

    def test_of_equal_plans_the_longest_freshness_is_chosen(self) -> None:
        """A key that was read once in the recording may be read more often later."""
        same = [figures(fresh_for, 1, 0.5, waited=1.0) for fresh_for in (3, 7, 1)]
        choice = choose({"price": same}, [Limit("p99", 60)], None)
        assert choice.chosen["price"].terms.fresh_for == 7

    def test_the_plan_says_what_the_budget_allows_if_both_cannot_be_met(self) -> None:
        """The total of all kinds counts."""
        choice = choose({"a": self.TRIED, "b": self.TRIED}, [Limit("p99", 60)], 30)
        assert choice.total == 40
        assert choice.within is not None
        assert [it.p99 for it in choice.within.chosen.values()] == [61, 61]
        assert choice.within.total == 16

    def test_the_nearest_plan_is_chosen_if_none_meets_the_objective(self) -> None:
        """And the kind is named."""
        choice = choose({"a": self.TRIED}, [Limit("p99", 5)], None)
        assert (choice.missed, choice.chosen["a"]) == (("a",), self.TRIED[0])

    def test_with_a_budget_alone_the_freshest_plan_is_chosen(self) -> None:
        """Without an objective, freshness is what the budget is for."""
        assert choose({"a": self.TRIED}, [], 10).chosen["a"] is self.TRIED[1]
        over = choose({"a": self.TRIED}, [], 1)
        assert (over.chosen["a"], over.total, over.within) == (self.TRIED[2], 2, None)

    @pytest.mark.parametrize(
        ("below", "budget", "is_met"),
        [(90, None, True), (90, 8, True), (90, 7, False), (5, None, False), (5, 1, False)],
    )
    def test_the_plan_says_whether_objective_and_budget_are_met(
        self, below: float, budget: float | None, is_met: bool
    ) -> None:
        """A budget may be used up; an objective is met below its limit."""
        assert choose({"a": self.TRIED}, [Limit("p99", below)], budget).is_met is is_met

    def test_an_objective_at_its_limit_is_missed_and_five_percent_more_is_equal(self) -> None:
        """At its limit an objective is missed; requests of exactly 5 % more count as equal."""
        assert choose({"a": self.TRIED}, [Limit("p99", 61)], None).chosen["a"] is self.TRIED[0]
        near = figures(60, 8 * NEAR, 61, waited=0.01)
        assert choose({"a": [self.TRIED[1], near]}, [], None).chosen["a"] is near
        within = choose({"a": self.TRIED}, [], 8)
        assert (within.chosen["a"], within.is_met) == (self.TRIED[1], True)

    def test_of_several_objectives_the_worst_counts(self) -> None:
        """Where none of the tries meets both, and where a kind has none so fresh."""
        limits = [Limit("p99", 5), Limit("waited", 0.01)]
        near, far = figures(10, 20, 11, waited=0.02), figures(10, 20, 6, waited=0.5)
        assert choose({"a": [far, near]}, limits, None).chosen["a"] is near
        slow = (figures(60, 8, 61),)
        choice = choose({"a": self.TRIED, "b": slow}, [], 30)
        assert [it.p99 for it in choice.chosen.values()] == [61, 61]

    def test_g23_no_more_reads_wait_than_today(self) -> None:
        """G23: the cheapest would let more wait, so one with a `stale_for` is proposed."""
        patient = figures(45, 10, 80, stale_for=30, waited=0.05)
        tried = (*self.TRIED, patient)
        choice = choose({"a": tried}, [Limit("p99", 90)], None, today={"a": 0.05})
        assert choice.chosen["a"] is patient
        assert (choice.is_met, choice.missed, choice.waiting) == (True, (), {})

    def test_g23_more_may_wait_if_that_was_asked_for(self) -> None:
        """G23: a limit of `waited` replaces what was recorded."""
        limits = [Limit("p99", 90), Limit("waited", 0.2)]
        choice = choose({"a": self.TRIED}, limits, None, today={"a": 0.05})
        assert choice.chosen["a"] is self.TRIED[1]

    def test_g23_an_objective_that_takes_more_waiting_is_missed(self) -> None:
        """G23: the nearest that does not is proposed; the other one is named, not proposed."""
        patient = figures(60, 8, 120, stale_for=60, waited=0.05)
        tried = (*self.TRIED, patient)
        choice = choose({"a": tried}, [Limit("p99", 90)], None, today={"a": 0.05})
        assert choice.chosen["a"] is patient
        assert (choice.is_met, choice.missed) == (False, ("a",))
        assert choice.waiting == {"a": self.TRIED[1]}

    def test_g23_a_budget_is_no_reason_to_let_more_wait(self) -> None:
        """G23: neither alone nor beside an objective that it does not allow."""
        patient = figures(60, 9, 120, stale_for=60, waited=0.05)
        tried = (*self.TRIED, patient)
        today = {"a": 0.05}
        assert choose({"a": tried}, [], 10, today=today).chosen["a"] is patient
        both = choose({"a": tried}, [Limit("p99", 200)], 8.5, today=today)
        assert (both.chosen["a"], both.within, both.is_met) == (patient, None, False)

    def test_g23_more_of_stale_for_is_tried_where_too_many_would_wait(self) -> None:
        """G23: other shares of `fresh_for`, by halves."""
        tried = list[Candidate]()

        def replay(terms: Candidate) -> Figures:
            tried.append(terms)
            age = terms.fresh_for + terms.stale_for
            waited = 0.1 if terms.stale_for < 1.5 * terms.fresh_for else 0.01
            return figures(
                terms.fresh_for, 1 / terms.fresh_for, age, stale_for=terms.stale_for, waited=waited
            )

        limits = [Limit("p99", 100)]
        few = search(3_600, limits, replay)
        tried.clear()
        more = search(3_600, limits, replay, today=0.01)
        assert len(more) > len(few)
        assert len(tried) == len(set(tried)) < 60
        fits = [it for it in more if it.p99 < 100 and it.waited <= 0.01]
        assert max(it.terms.fresh_for for it in fits) == 30

    def test_the_frontier_has_only_unbeaten_plans(self) -> None:
        """Most requests first."""
        beaten = figures(70, 9, 71)
        assert frontier((beaten, *reversed(self.TRIED))) == list(self.TRIED)
