"""The table of a load in flight (E3, E5, E6): no event loop, no store, no clock."""

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stillfresh.engine.flight import (
    ENDINGS,
    JOINED,
    MAX_ROUNDS,
    NEXT,
    Again,
    End,
    LoadEvent,
    LoadState,
)
from stillfresh.engine.queue import OVER, Batch, Flight

VALUES = (End.LOADED, End.SUPERSEDED)
TOLD_FROM_STORE = (End.FOUND, End.FOUND_STALE)
ENDS = {
    LoadState.ASKING: [*TOLD_FROM_STORE, End.GIVEN_UP, End.FAILED],
    LoadState.LOOKING: [*TOLD_FROM_STORE, End.GIVEN_UP],
    LoadState.PUBLISHING: [*VALUES, End.FAILED],
}
LEADING_TO_A_LOAD = {
    LoadState.QUEUED: [],
    LoadState.ASKING: [LoadEvent.BEGIN],
    LoadState.HELD: [LoadEvent.BEGIN, LoadEvent.DENY],
    LoadState.LOOKING: [LoadEvent.BEGIN, LoadEvent.DENY, LoadEvent.LOOK],
    LoadState.LOADING: [LoadEvent.BEGIN, LoadEvent.GRANT],
    LoadState.PUBLISHING: [LoadEvent.BEGIN, LoadEvent.GRANT, LoadEvent.SEND],
}


def flight_in(state: LoadState, *waiters: str) -> Flight[str, str]:
    """A flight whose callers came before it began."""
    flight: Flight[str, str] = Flight("a", "a")
    for waiter in waiters:
        flight.join(waiter)
    batch = Batch([flight])
    for event in LEADING_TO_A_LOAD[state]:
        batch.step(event)
    assert batch.state is state
    return flight


def reachable(state: LoadState) -> set[LoadState]:
    found, left = {state}, [state]
    while left:
        new = set(NEXT[left.pop()].values()) - found
        found |= new
        left += new
    return found


class TestE3States:
    def test_every_state_can_be_reached_and_left_for_the_end(self) -> None:
        """No load is stuck."""
        assert reachable(LoadState.QUEUED) == set(LoadState)
        assert all(LoadState.ENDED in reachable(state) for state in LoadState)
        assert not NEXT[LoadState.ENDED]

    @pytest.mark.parametrize(("state", "event"), [*product(LoadState, LoadEvent)])
    def test_what_is_not_in_the_table_cannot_happen(
        self, state: LoadState, event: LoadEvent
    ) -> None:
        """A driver that does it fails at once."""
        batch = Batch([], state)
        if event in NEXT[state]:
            batch.step(event)
            assert batch.state is NEXT[state][event]
        else:
            with pytest.raises(KeyError):
                batch.step(event)

    def test_only_a_lease_or_a_store_that_is_away_leads_to_the_loader(self) -> None:
        """E5: a process that was denied the lease never loads."""
        leading = [
            (state, event)
            for state in NEXT
            for event in NEXT[state]
            if NEXT[state][event] == "loading"
        ]
        assert leading == [(LoadState.ASKING, LoadEvent.GRANT)]

    def test_every_end_has_a_meaning(self) -> None:
        assert set(ENDINGS) == set(product(End, (False, True)))


class TestE6Callers:
    @pytest.mark.parametrize("state", list(LEADING_TO_A_LOAD))
    def test_are_known_by_when_they_came(self, state: LoadState) -> None:
        """Before it began, since then, or when its copy was on its way."""
        flight = flight_in(state)
        flight.join("me")
        assert flight.waiters["me"] is JOINED[state] is flight.last

    @pytest.mark.parametrize("how", End)
    @pytest.mark.parametrize("is_overtaken", [False, True])
    def test_each_is_told_or_waits_for_the_next_load(self, how: End, is_overtaken: bool) -> None:
        """Nobody is forgotten, and nobody hears twice."""
        flight = flight_in(LoadState.LOADING, "early")
        flight.join("late")
        flight.batch.step(LoadEvent.SEND)
        flight.join("after")
        if is_overtaken:
            flight.overtake()
        ended = flight.end(how)
        assert [*ended.told, *ended.left] == ["early", "late", "after"]
        assert ended.again or not ended.left
        assert flight.batch is OVER

    @pytest.mark.parametrize("how", [End.LOADED, End.FAILED])
    def test_a_caller_that_comes_while_the_copy_is_on_its_way_waits_for_the_next(
        self, how: End
    ) -> None:
        """Another process may have invalidated it in the store by then."""
        flight = flight_in(LoadState.PUBLISHING, "early")
        flight.join("after")
        ended = flight.end(how)
        assert (list(ended.told), list(ended.left)) == (["early"], ["after"])

    @pytest.mark.parametrize("how", VALUES)
    def test_a_value_that_was_invalidated_goes_to_those_who_came_before(self, how: End) -> None:
        """Stale, not kept, and another load follows although nobody waits."""
        flight = flight_in(LoadState.LOADING, "early")
        flight.overtake()
        flight.join("late")
        ended = flight.end(how)
        assert (list(ended.told), list(ended.left)) == (["early"], ["late"])
        assert ended.is_overtaken
        assert ended.again

    @pytest.mark.parametrize("how", TOLD_FROM_STORE)
    def test_a_copy_that_was_read_before_an_invalidation_answers_nobody(self, how: End) -> None:
        """E5, E6: it may be the one that was invalidated."""
        flight = flight_in(LoadState.LOOKING, "early")
        flight.overtake()
        assert not flight.end(how).told

    def test_an_invalidation_before_it_began_changes_nothing(self) -> None:
        """Its load is yet to come."""
        flight = flight_in(LoadState.QUEUED, "early")
        flight.overtake()
        flight.batch.step(LoadEvent.BEGIN)
        assert not flight.end(End.LOADED).is_overtaken

    def test_a_new_look_is_new_to_all(self) -> None:
        """Whoever joined while another process loads is answered by what is read now."""
        flight = flight_in(LoadState.HELD, "early")
        flight.overtake()
        flight.join("late")
        flight.batch.step(LoadEvent.LOOK)
        assert list(flight.end(End.FOUND).told) == ["early", "late"]

    def test_what_goes_another_way_takes_its_invalidations_along(self) -> None:
        """E5: and a look of one half does not clear those of the other."""
        first, second = Flight[str, str]("a", "a"), Flight[str, str]("b", "b")
        batch = Batch([first, second], LoadState.ASKING)
        first.overtake()
        second.overtake()
        held = batch.split([second], LoadEvent.DENY)
        held.step(LoadEvent.LOOK)
        assert batch.flights == [first]
        assert first.end(End.LOADED).is_overtaken
        assert not second.end(End.FOUND).is_overtaken

    def test_a_lease_that_is_lost_again_and_again_is_given_up(self) -> None:
        """Unless somebody waits."""
        flight = flight_in(LoadState.LOADING)
        flight.rounds = MAX_ROUNDS
        assert not flight.end(End.SUPERSEDED).again
        assert ENDINGS[End.SUPERSEDED, True].again is Again.ALWAYS


class Reference(RuleBasedStateMachine):
    """One key, any history; `version` is what the upstream holds, raised by each invalidation."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.version = self.known = 0
        self.came: dict[str, int] = {}
        """The version that was true when each caller came."""
        self.begin_anew([])

    def begin_anew(self, waiters: list[str]) -> None:
        self.flight: Flight[str, str] = Flight("a", "a")
        for waiter in waiters:
            self.flight.join(waiter)
        self.batch = Batch([self.flight])
        self.look()

    def look(self) -> None:
        """What is learnt from now on is as true as this."""
        self.seen, self.known_at, self.is_void = self.version, self.known, False

    def moves(self) -> Iterator[LoadEvent]:
        yield from (
            event for event in NEXT[self.batch.state] if NEXT[self.batch.state][event] != "ended"
        )

    @rule()
    def a_caller_comes(self) -> None:
        self.count += 1
        name = f"caller {self.count}"
        self.came[name] = self.version
        self.flight.join(name)

    @precondition(lambda self: self.flight.waiters)
    @rule(data=st.data())
    def a_caller_leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.flight.waiters)))
        del self.flight.waiters[name], self.came[name]

    @rule()
    def it_is_invalidated(self) -> None:
        self.version += 1
        self.known += 1
        self.flight.overtake()

    @rule()
    def it_is_invalidated_by_another_process(self) -> None:
        """The store voids the lease; a copy that it has by then may still be told as published."""
        self.version += 1
        self.is_void |= self.batch.state in {LoadState.ASKING, LoadState.LOADING}

    @precondition(lambda self: any(self.moves()))
    @rule(data=st.data())
    def it_moves_on(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(list(self.moves())))
        self.batch.step(event)
        if event in {LoadEvent.BEGIN, LoadEvent.LOOK}:
            self.look()

    @precondition(lambda self: self.batch.state in ENDS)
    @rule(data=st.data())
    def it_ends(self, data: st.DataObject) -> None:
        """What is told was true when, or after, its caller came, or is told as stale."""
        how = data.draw(st.sampled_from(ENDS[self.batch.state]))
        if how is End.LOADED and self.is_void:
            how = End.SUPERSEDED
        before = dict(self.flight.waiters)
        ended = self.flight.end(how)
        assert {*ended.told, *ended.left} == set(before)
        for caller in ended.told:
            assert self.came.pop(caller) <= self.seen or how is End.FAILED, "it knew better"
        is_kept = how is End.LOADED or (how in TOLD_FROM_STORE and bool(ended.told))
        if is_kept and not ended.is_overtaken:
            assert self.known_at == self.known, "kept although it was invalidated here"
        self.begin_anew(list(ended.left))

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert self.flight.waiters.keys() == self.came.keys()


class TestE6AnyHistory:
    def test_nobody_is_told_what_they_knew_to_be_wrong(self) -> None:
        """Callers, invalidations here and elsewhere, and ends in any order."""
        run_state_machine_as_test(Reference, settings=settings(max_examples=200, deadline=None))
