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

from stillfresh.engine import MsgpackCodec, Spec, terms_of
from stillfresh.engine.counts import Counts
from stillfresh.engine.flight import (
    BEFORE,
    ENDINGS,
    JOINED,
    MAX_ROUNDS,
    NEXT,
    Again,
    End,
    LoadEvent,
    LoadState,
)
from stillfresh.engine.keys import no_loader
from stillfresh.engine.queue import CURRENT, OVER, Batch, Flight, Queue, Waiter
from stillfresh.engine.rules import NOTHING
from stillfresh.freshness import Policy
from stillfresh.stores.contract import Copy, Failure, Record

COPY = Copy("g1", 0.0, Policy(30), b"1")

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


async def one_loader() -> object:
    return 1


def queue_of(keys: str, *, max_batch: int = 10, concurrency: int = 1) -> Queue[str, int]:
    """With these keys, for each of which a caller waits."""
    spec: Spec[str, int] = Spec(
        "price",
        no_loader,
        MsgpackCodec[int](int, "price"),
        None,
        terms_of("price", 30, 60, 0, 30),
        max_batch=max_batch,
        concurrency=concurrency,
        max_entries=10,
        load_timeout=30,
    )
    queue: Queue[str, int] = Queue(spec, Counts())
    for key in keys:
        queue.join(key, key, NOTHING, Waiter())
    return queue


def taken(queue: Queue[str, int]) -> str:
    """The keys of the next batch; empty: none may begin."""
    batch = queue.take()
    return "" if batch is None else "".join(flight.key for flight in batch.flights)


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


class TestE4Queue:
    """Which loads begin next, and together with which."""

    def test_the_oldest_first_in_full_batches(self) -> None:
        """No more calls than `concurrency` allows; one more begins when one has ended."""
        queue = queue_of("abcdefg", max_batch=2, concurrency=2)
        assert [taken(queue), taken(queue), taken(queue)] == ["ab", "cd", ""]
        assert queue.running == 2
        assert queue.not_begun() == 3
        queue.running -= 1
        assert [taken(queue), taken(queue)] == ["ef", ""]

    def test_a_key_whose_last_caller_left_is_dropped(self) -> None:
        """E3: before its load began; a background refresh needs no caller."""
        queue, waiter = queue_of(""), Waiter[str, int]()
        queue.join_missing({"a": "a", "b": "b"}, waiter)
        queue.want("c", "c", NOTHING, waiter)
        queue.leave(waiter, ["a", "c", "unknown"])
        assert taken(queue) == "bc"
        assert list(queue.flights) == ["b", "c"]

    def test_background_refreshes_have_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Callers that wait are queued beyond it."""
        monkeypatch.setattr("stillfresh.engine.queue.MAX_BEHIND", 2)
        queue = queue_of("a")
        for key in "bcd":
            queue.want(key, key, NOTHING, Waiter())
        queue.join("e", "e", NOTHING, Waiter())
        assert list(queue.flights) == ["a", "b", "e"]

    def test_a_load_that_a_loader_waits_for_needs_no_place(self) -> None:
        """That loader may hold the only one. It begins first, and once."""
        queue = queue_of("ab", concurrency=1)
        assert taken(queue) == "ab"
        queue.join("c", "c", NOTHING, Waiter())
        token = CURRENT.set(Batch([]))
        try:
            queue.join("d", "d", NOTHING, Waiter())
            queue.join("d", "d", NOTHING, Waiter())
        finally:
            CURRENT.reset(token)
        batch = queue.take()
        assert batch is not None
        assert ([it.key for it in batch.flights], batch.takes_place) == (["d"], False)
        assert (taken(queue), queue.running) == ("", 1)
        queue.running = 0
        assert taken(queue) == "c"

    def test_a_caller_that_joins_is_counted_and_waits_for_one_more(self) -> None:
        """E12: by the load under way, or by a new one."""
        queue, first, second = queue_of(""), Waiter[str, int](), Waiter[str, int](max_age=5)
        queue.join_missing({"a": "a", "b": "b"}, first)
        queue.join_missing({"b": "b", "c": "c"}, second)
        assert (first.missing, second.missing, queue._counts.coalesced) == (2, 2, 1)
        flights = queue.flights
        assert [list(flights[key].waiters) for key in "abc"] == [[first], [first, second], [second]]
        assert [flights[key].outgrown for key in "abc"] == [False, True, True]
        assert not any(flight.forced for flight in flights.values())

    def test_who_loads_is_known(self) -> None:
        """This process does, once it has the lease, until the copy is stored."""
        queue = queue_of("a")
        states = [queue.is_loading("a")]
        batch = queue.take()
        assert batch is not None
        for event in (LoadEvent.GRANT, LoadEvent.SEND):
            states.append(queue.is_loading("a"))
            batch.step(event)
        assert [*states, queue.is_loading("a")] == [False, False, True, True]
        assert not queue.is_loading("unknown")
        other = queue_of("a")
        batch = other.take()
        assert batch is not None
        batch.step(LoadEvent.DENY)
        assert not other.is_loading("a")

    def test_what_another_process_loads_for_nobody_is_dropped(self) -> None:
        """A following load of the same key is not."""
        queue, waiter = queue_of(""), Waiter[str, int]()
        for key in "ab":
            queue.want(key, key, NOTHING, waiter)
        queue.join("c", "c", NOTHING, waiter)
        batch = queue.take()
        assert batch is not None
        other = queue.flights["b"] = Flight("b", "b")
        queue.drop_unwaited(batch)
        assert [it.key for it in batch.flights] == ["c"]
        assert (list(queue.flights), queue.flights["b"]) == (["b", "c"], other)

    def test_a_following_load_is_of_a_caller_that_brought_its_own(self) -> None:
        """Of the first that waits for it; else of the one before."""
        mine, yours = Waiter[str, int](one_loader), Waiter[str, int](one_loader)
        plain = Waiter[str, int]()
        for late, by in ((yours, yours), (plain, mine)):
            queue = queue_of("")
            queue.join("a", "a", NOTHING, mine)
            batch = queue.take()
            assert batch is not None
            batch.step(LoadEvent.GRANT)
            queue.join("a", "a", NOTHING, late)
            flight = queue.flights["a"]
            flight.overtake()
            ended = queue.end(flight, End.LOADED)
            assert (list(ended.told), list(ended.left)) == ([mine], [late])
            assert queue.flights["a"].by is by
            assert flight.successor is queue.flights["a"]
            assert taken(queue) == ""
            queue.running = 0
            assert taken(queue) == "a"

    def test_a_closed_queue_begins_nothing(self) -> None:
        """All its flights have ended, and are returned once."""
        queue = queue_of("ab", max_batch=1)
        assert taken(queue) == "a"
        assert [it.key for it in queue.close()] == ["a", "b"]
        assert (taken(queue), queue.flights, queue.close()) == ("", {}, [])


class TestE5Seen:
    def test_a_lease_is_asked_for_with_what_was_seen(self) -> None:
        """E7: a failure that a caller missed counts; a `refresh()` is granted all the same."""
        flight: Flight[str, str] = Flight("a", "a")
        assert (flight.seen, flight.failures) == (None, 0)
        flight.saw(Record(COPY, failure=Failure(3, 5.0, "x")))
        assert (flight.seen, flight.failures) == ("g1", 3)
        flight.forced = True
        assert flight.failures is None
        flight.saw(NOTHING)
        assert (flight.seen, flight.failure) == (None, None)

    @pytest.mark.parametrize("wish", ["none", "forced", "outgrown"])
    def test_another_copy_is_good_enough(self, wish: str) -> None:
        """The same one is, unless a newer one is wanted; none is after an invalidation."""
        flight = flight_in(LoadState.LOADING)
        flight.forced, flight.outgrown = wish == "forced", wish == "outgrown"
        assert flight.takes(COPY, "g0")
        assert flight.takes(COPY, "g1") is (wish == "none")
        assert flight.is_bound is (wish != "forced")
        flight.overtake()
        assert not flight.takes(COPY, "g0")
        assert not flight.is_bound

    def test_a_load_without_a_lease_answers_only_those_that_came_before(self) -> None:
        """E6: nothing voids it; unless a caller knows no more than the load itself."""
        flight = flight_in(LoadState.LOADING, "early")
        flight.is_blind = True
        flight.join("knows")
        flight.join("store away", knows=False)
        ended = flight.end(End.LOADED)
        assert (list(ended.told), list(ended.left)) == (["early", "store away"], ["knows"])

    def test_a_circle_is_seen_through_any_number_of_loads(self) -> None:
        """E3: and through the load that follows one of them, for a caller that waits for that."""
        one, two, three = (Batch([Flight(key, key)]) for key in "abc")
        one.waiting_for["call"] = [two.flights[0]]
        two.waiting_for["call"] = [three.flights[0]]
        assert one.flights[0].waits_for(three)
        assert one.flights[0].waits_for(one)
        assert not three.flights[0].waits_for(one)
        following: Flight[str, str] = Flight("d", "d", {"left": BEFORE})
        four, ended = Batch([following]), Flight[str, str]("d", "d", successor=following)
        three.waiting_for["told"] = [ended]
        assert not one.flights[0].waits_for(four)
        three.waiting_for["left"] = [ended]
        assert one.flights[0].waits_for(four)
        three.waiting_for["call"] = [two.flights[0]]
        assert not two.flights[0].waits_for(one)


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
