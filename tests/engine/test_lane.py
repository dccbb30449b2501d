"""C3-C6, C8, C9: the next step for each watched id, without a clock, a store or a loop."""

import pytest

from stillfresh.engine.lane import MAX_REMEMBERED, Lane, LaneState

AT_ONCE = float("-inf")


def lane_of(keys: str = "", *, cooldown: float = 10, longest: float = 300) -> Lane[str]:
    """With these ids, each subscribed once and not looked up yet."""
    lane: Lane[str] = Lane(cooldown=cooldown, longest_cooldown=longest)
    for key in keys:
        assert lane.subscribe(key, counted=True)
    return lane


def stale(keys: str, now: float = 0) -> Lane[str]:
    """With these ids queued."""
    lane = lane_of(keys)
    for key in lane.due(now, 100):
        lane.looked_up(key, now, now)
    return lane


class TestC3Subscribed:
    def test_a_cooldown_is_as_short_as_it_is_declared(self) -> None:
        """C9: a pause that nobody asked for makes it no longer."""
        lane = lane_of("a", cooldown=0.5)
        lane.failed("a", 10)
        assert lane.cooling(10) == {"a": 10.5}
        lane.failed("a", 20, 3)
        assert lane.cooling(20) == {"a": 23}

    def test_only_the_first_subscription_asks_for_a_look(self) -> None:
        """Nobody else watched it: it is due at once."""
        lane = lane_of("a")
        assert not lane.subscribe("a", counted=True)
        assert lane.subscribed == {"a": 2}
        assert ("a" in lane, "b" in lane, len(lane)) == (True, False, 1)
        assert lane.next_time() == AT_ONCE
        assert lane.due(0, 10) == ["a"]

    def test_an_uncounted_subscription_is_there_or_not(self) -> None:
        """And takes nothing from a count."""
        lane = lane_of("a")
        lane.subscribe("a", counted=True)
        lane.subscribe("a", counted=False)
        lane.subscribe("b", counted=False)
        lane.subscribe("b", counted=False)
        assert lane.subscribed == {"a": 2, "b": 1}

    def test_a_fresh_id_is_looked_up_again_when_its_time_comes(self) -> None:
        """Neither before nor later; its time is known."""
        lane = lane_of("a")
        lane.looked_up("a", 5, 0)
        assert (lane.next_time(), lane.state("a")) == (5, LaneState.WAITING)
        assert lane.due(4.9, 10) == []
        assert lane.due(5, 10) == ["a"]
        assert (lane.next_time(), lane.state("a")) == (AT_ONCE, LaneState.DUE)

    def test_the_end_of_freshness_is_stale(self) -> None:
        """At that very moment it is queued."""
        lane = lane_of("ab")
        lane.looked_up("a", 5, 5)
        lane.looked_up("b", 5.1, 5)
        assert (lane.queued, lane.next_time()) == (["a"], 5.1)

    def test_a_new_time_replaces_the_old_one(self) -> None:
        """An earlier and a later one alike: only the last counts."""
        lane = lane_of("a")
        for at in (5, 50, 20):
            lane.looked_up("a", at, 0)
            assert lane.next_time() == at
        assert lane.due(19, 10) == []
        assert lane.due(20, 10) == ["a"]

    def test_ids_that_end_together_are_due_together(self) -> None:
        """In the order in which they were looked up, and no more than were asked for at once."""
        lane = lane_of("abc")
        for key in "bca":
            lane.looked_up(key, 5, 0)
        assert lane.due(5, 2) == ["b", "c"]
        assert lane.due(5, 10) == ["b", "c", "a"]

    def test_all_are_looked_up_after_a_clock_was_set_back(self) -> None:
        """Nothing that was planned can be trusted; a clock that goes on changes nothing."""
        lane = lane_of("ab")
        lane.looked_up("a", 50, 20)
        lane.looked_up("b", 60, 20)
        assert lane.due(20, 10) == lane.due(20, 10) == []
        assert lane.due(19, 10) == ["a", "b"]

    def test_all_that_wait_can_be_looked_up_again(self) -> None:
        """Or some of them; an id that has left meanwhile is not."""
        lane = lane_of("abc")
        for key in "abc":
            lane.looked_up(key, 50, 0)
        lane.recheck(["b", "unknown"])
        assert lane.due(1, 10) == ["b"]
        lane.looked_up("b", 50, 1)
        lane.recheck()
        assert lane.next_time() == AT_ONCE
        lane.unsubscribe("c")
        assert lane.due(1, 10) == ["a", "b"]


class TestC4Unsubscribed:
    def test_the_last_one_that_leaves_takes_it_along(self) -> None:
        """Nobody watches it: True. It is neither due, nor queued, nor planned."""
        for lane in (lane_of("a"), stale("a")):
            lane.subscribe("a", counted=True)
            assert not lane.unsubscribe("a")
            assert lane.subscribed == {"a": 1}
            assert lane.unsubscribe("a")
            assert lane.unsubscribe("a")
            assert (lane.subscribed, lane.queued, lane.due(0, 10)) == ({}, [], [])
            assert (lane.next_time(), lane.state("a")) == (None, LaneState.OUT)

    def test_a_time_goes_with_the_last_id_that_has_it(self) -> None:
        """The others keep theirs."""
        lane = lane_of("ab")
        lane.looked_up("a", 5, 0)
        lane.looked_up("b", 5, 0)
        lane.unsubscribe("a")
        assert lane.next_time() == 5
        lane.unsubscribe("b")
        assert lane.next_time() is None

    def test_an_id_in_flight_ends_its_flight(self) -> None:
        """Nobody looks at it then; whoever comes back meanwhile has it looked up."""
        lane = stale("ab")
        lane.take(10)
        lane.unsubscribe("a")
        lane.unsubscribe("b")
        assert lane.subscribe("b", counted=True) is False
        assert lane.in_flight == ["a", "b"]
        lane.land("ab")
        assert (lane.in_flight, lane.state("a"), lane.state("b")) == (
            [],
            LaneState.OUT,
            LaneState.DUE,
        )

    def test_a_reset_forgets_all_but_flights_and_cooldowns(self) -> None:
        """C8: somebody else is signed in; what failed is still left alone."""
        lane = lane_of("abcd")
        lane.looked_up("a", 0, 0)
        assert lane.take(1) == ["a"]
        lane.looked_up("b", 0, 0)
        lane.looked_up("c", 50, 0)
        lane.recheck()
        lane.failed("b", 0)
        lane.reset()
        assert (lane.subscribed, lane.queued, lane.in_flight) == ({}, [], ["a"])
        assert (lane.next_time(), lane.due(100, 10)) == (None, [])
        assert lane.cooling(0) == {"b": 10}
        assert lane.state("a") is LaneState.LEAVING


class TestC5Taken:
    def test_the_ids_that_were_queued_longest_are_taken_first(self) -> None:
        """As many as fit; never one in flight."""
        lane = stale("abc")
        assert lane.take(2) == ["a", "b"]
        assert (lane.take(2), lane.take(2)) == (["c"], [])
        assert (lane.queued, lane.in_flight) == ([], ["a", "b", "c"])

    def test_an_id_that_is_fresh_meanwhile_leaves_the_queue(self) -> None:
        """Another writer refreshed it; it waits for its new time."""
        lane = stale("ab")
        assert lane.refreshed("a", 30, 1)
        assert (lane.queued, lane.next_time()) == (["b"], 30)

    def test_an_id_in_flight_is_planned_when_it_lands(self) -> None:
        """A copy that arrives before that is not the end of the flight."""
        lane = stale("a")
        lane.take(1)
        assert not lane.refreshed("a", 30, 1)
        assert (lane.in_flight, lane.next_time()) == (["a"], None)
        lane.land(["a"])
        assert lane.due(1, 10) == ["a"]

    def test_an_original_is_fetched_once(self) -> None:
        """C10: nobody subscribed to it, so nothing is left of it; one that is cooling is not."""
        lane = lane_of()
        lane.failed("b", 0)
        lane.refer("a", 1)
        lane.refer("b", 1)
        assert lane.take(10) == ["a"]
        lane.land(["a"])
        assert (lane.in_flight, lane.state("a")) == ([], LaneState.OUT)
        lane.refer("b", 10)
        assert lane.take(10) == ["b"]


class TestC9Cooldowns:
    def test_a_cooldown_doubles_up_to_the_longest(self) -> None:
        """From the first on; a success ends it."""
        lane, pauses = lane_of("a", longest=60), list[float | None]()
        for _ in range(5):
            lane.failed("a", 100)
            pauses.append(lane.cooling_until("a", 100))
        assert pauses == [110, 120, 140, 160, 160]
        lane.refreshed("a", 200, 100)
        assert (lane.cooling(100), lane.next_time()) == ({}, 200)
        lane.failed("a", 100)
        assert lane.cooling(100) == {"a": 110}

    def test_a_pause_that_was_asked_for_is_the_least(self) -> None:
        """But no longer than the longest, and no shorter than the cooldown itself."""
        lane = lane_of(longest=60)
        for key, pause in (("a", 5), ("b", 30), ("c", 1_000)):
            lane.failed(key, 0, pause)
        assert lane.cooling(0) == {"a": 10, "b": 30, "c": 60}

    def test_a_first_cooldown_may_be_the_longest(self) -> None:
        """If the longest is shorter than it."""
        lane = lane_of(cooldown=90, longest=60)
        lane.failed("a", 0)
        assert lane.cooling_until("a", 0) == 90

    def test_a_stale_id_that_cools_down_is_due_at_the_end_of_it(self) -> None:
        """Not queued before; at its very end the cooldown is over."""
        lane = lane_of("a")
        lane.failed("a", 0)
        lane.looked_up("a", 0, 1)
        assert (lane.queued, lane.next_time(), lane.state("a")) == ([], 10, LaneState.COOLING)
        assert lane.due(10, 10) == ["a"]
        lane.looked_up("a", 0, 10)
        assert lane.queued == ["a"]

    def test_a_cooldown_that_ends_too_late_is_ignored(self) -> None:
        """It is from before the clock was set back."""
        lane = lane_of(longest=60)
        lane.failed("a", 1_000, 60)
        assert lane.cooling_until("a", 1_000) == 1_060
        assert lane.cooling_until("a", 999.9) is None
        assert lane.cooling(999.9) == {}

    def test_a_batch_that_failed_is_tried_in_halves(self) -> None:
        """Down to one by one, and never together with other ids: one starves no other."""
        lane = stale("abcd")
        for key in lane.take(10):
            lane.failed(key, 0, together=4)
        lane.land("abcd")
        for key in lane.due(20, 10):
            lane.looked_up(key, 20, 20)
        lane.subscribe("x", counted=True)
        lane.looked_up("x", 20, 20)
        assert lane.take(10) == ["a", "b"]
        for key in "ab":
            lane.failed(key, 20, together=2)
        assert lane.take(10) == ["c", "d"]
        assert lane.take(10) == ["x"]
        lane.land("ab")
        for key in lane.due(50, 10):
            lane.looked_up(key, 50, 50)
        assert (lane.take(10), lane.take(10)) == (["a"], ["b"])

    def test_others_first_if_they_have_waited_longer(self) -> None:
        """A suspect behind them does not join their batch."""
        lane = stale("axb")
        lane.failed("x", 0, together=2)
        assert lane.take(10) == ["a", "b"]
        assert lane.take(10) == ["x"]

    @pytest.mark.parametrize(("suspect", "taken"), [("x", ["a", "b"]), ("a", ["b"])])
    def test_what_was_taken_before_decides_who_may_join(
        self, suspect: str, taken: list[str]
    ) -> None:
        """A batch that has begun is of suspects or of others, whatever is first in the queue."""
        lane = stale("yab")
        lane.failed(suspect, 0, together=2)
        lane.subscribe("x", counted=True)
        assert lane.take(1) == ["y"]
        assert lane.take(10, ["y"]) == taken

    def test_nothing_joins_a_suspect(self) -> None:
        """Its batch was cut to the size that is tried."""
        lane = stale("ab")
        lane.failed("a", 0, together=2)
        assert lane.take(10) == ["a"]
        assert lane.take(10, ["a"]) == []
        assert lane.take(10) == ["b"]

    def test_a_suspect_that_succeeds_clears_the_others(self) -> None:
        """They are tried in full batches again, still apart from ids that never failed."""
        lane = stale("abcdefgh")
        for key in lane.take(10):
            lane.failed(key, 0, together=2)
        lane.land("abcdefgh")
        lane.refreshed("a", 100, 20)
        for key in lane.due(20, 10):
            lane.looked_up(key, 20, 20)
        assert lane.take(10) == list("bcdefgh")

    def test_a_failure_alone_suspects_nobody(self) -> None:
        """Others of its batch succeeded: it may be tried together with any."""
        lane = stale("ab")
        lane.failed("a", 0)
        assert lane.take(10) == ["a", "b"]

    def test_a_clock_that_is_set_back_clears_suspects(self) -> None:
        """Their cooldowns end too late to be believed; others stay suspects."""
        lane = stale("abc", now=1_000)
        lane.failed("a", 1_000, 300, together=2)
        lane.failed("b", 700, together=2)
        lane.due(900, 10)
        assert lane.take(10) == ["a", "c"]
        assert lane.take(10) == ["b"]

    def test_cooldowns_of_ids_that_are_gone_are_remembered_up_to_a_limit(self) -> None:
        """Beyond it the oldest are dropped; those of watched ids come on top."""
        lane: Lane[int] = Lane(cooldown=1, longest_cooldown=1)
        lane.subscribe(-1, counted=True)
        for number in range(MAX_REMEMBERED + 3):
            lane.failed(number, 0)
        assert list(lane.cooling(0))[0] == 2  # noqa: RUF015
        assert len(lane.cooling(0)) == MAX_REMEMBERED + 1
