"""The rules one by one, as pure steps: W1 to W11, W15 and W16."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stillfresh.systems import waiting
from stillfresh.systems.waiting import Proof, Snapshot, State, step
from stillfresh.systems.waiting.model import (
    LIMIT,
    Answered,
    Event,
    Failed,
    GameState,
    Invalidated,
    MoveFailed,
    MoveSent,
    Opened,
    Pause,
    PauseOver,
    Played,
    Reconnected,
    Refetch,
    RefetchRequest,
    Screen,
    Started,
    YourTurn,
)
from stillfresh.systems.waiting.rules import (
    MEMORY,
    RULES,
    is_provable,
    navigation,
    restored,
    version_on_screen,
    with_version,
    without_move,
)
from stillfresh.systems.waiting.rules_refetch import LONGEST_PAUSE, PAUSE, is_blind, retry_pause
from tests.kit.waiting import Rules

GAMES = st.sampled_from("abcdefg")
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Started),
    st.builds(Opened, GAMES, st.booleans(), st.none() | st.integers(0, 4)),
    st.builds(MoveSent, GAMES),
    st.builds(YourTurn, GAMES, st.none() | st.integers(0, 4)),
    st.builds(GameState, GAMES, st.booleans(), st.none() | st.integers(0, 4)),
    st.builds(MoveFailed, GAMES),
    st.builds(Reconnected),
    st.builds(Invalidated),
    st.builds(Answered, st.lists(GAMES, max_size=8).map(tuple)),
    st.builds(Failed),
    st.builds(PauseOver),
)

ORDERS = {
    "not mine, message, mine": (False, None, True),
    "message, mine": (None, True),
    "mine, message": (True, None),
    "mine": (True,),
}
"""What comes after a move: a state (whether it is our turn), or None for `your_turn`."""


class TestW1Pure:
    """W1: frozen state in, state and effects out."""

    def test_the_first_state_has_an_empty_pool_and_no_snapshot(self) -> None:
        """An empty pool that does not claim to be complete, and no snapshot."""
        state = State()
        assert (state.pool, state.is_complete_from_server, state.snapshot) == ((), False, None)
        assert not state.is_restored

    def test_the_state_is_frozen(self) -> None:
        """Nobody can change what the rules have decided."""
        with pytest.raises(AttributeError):
            State().pool = ("a",)  # type: ignore[misc]

    @given(st.lists(EVENTS, max_size=30))
    def test_any_events_lead_to_one_state_of_at_most_five_games_and_one_flight(
        self, events: list[Event]
    ) -> None:
        """The same events lead to the same state; five games at most, none twice, one flight."""
        first, second, flights = State(), State(), 0
        for event in events:
            before = first
            (first, effects), (second, _) = step(first, event), step(second, event)
            flights -= isinstance(event, Answered | Failed) and before.in_flight is not None
            flights += sum(isinstance(effect, Refetch) for effect in effects)
            assert first == second
            assert flights == (first.in_flight is not None)
            assert len(set(first.pool)) == len(first.pool) <= LIMIT
            assert first.in_flight or not first.follows or Pause() in effects or before.follows

    def test_every_event_has_its_rule(self) -> None:
        """One function for each, and each says which rule it keeps."""
        assert {
            event.__name__: rule.__doc__ for event, rule in RULES.items() if not rule.__doc__
        } == {}
        assert len(RULES) == 11


class TestW2Answer:
    """W2: what the server's answer becomes."""

    def test_an_answer_is_cut_to_five_games_without_duplicates(self) -> None:
        """Five games at most, each once, in the order in which they came."""
        assert Rules("a", "b", "a", "c", "d", "e", "f").state.pool == ("a", "b", "c", "d", "e")

    @pytest.mark.parametrize("count", range(8))
    def test_a_pool_is_complete_if_fewer_than_five_games_came(self, count: int) -> None:
        """Five may have been cut."""
        rules = Rules()
        rules.hear(Started())
        assert rules.answer(*"abcdefgh"[:count]).is_complete_from_server is (count < 5)

    def test_five_that_came_may_have_been_cut_even_with_duplicates(self) -> None:
        """What counts is what came, not what is left of it."""
        assert not Rules("a", "a", "b", "c", "d").state.is_complete_from_server


class TestW3Refetch:
    """W3: one refetch at a time, and every wish comes true."""

    def test_requests_in_flight_become_one_that_follows(self) -> None:
        """However many ask while an answer is under way, one refetch follows it."""
        rules = Rules()
        rules.hear(Started(), Invalidated(), YourTurn("x"), Invalidated())
        assert rules.asked() == 1
        rules.answer("a")
        assert rules.asked() == 1
        rules.answer("a", "b")
        assert rules.asked() == 0
        assert not rules.state.is_busy

    @pytest.mark.parametrize(
        ("events", "expected"),
        [
            ((YourTurn("a"),), "a"),
            ((YourTurn("a"), YourTurn("b")), "b"),
            ((YourTurn("a"), Invalidated()), None),
            ((Invalidated(), YourTurn("a")), "a"),
            ((YourTurn("a"), MoveFailed("z")), None),
            ((YourTurn("a"), Reconnected()), None),
        ],
    )
    def test_the_last_request_decides_on_the_snapshot(
        self, events: tuple[Event, ...], expected: str | None
    ) -> None:
        """Who asked last, of those that were made one; and none after R1."""
        rules = Rules("a", "b", "c")
        rules.hear(Invalidated(), *events)
        rules.answer("a", "b", "c")
        rules.answer("a", "b", "c")
        snapshot = rules.state.snapshot
        assert (snapshot and snapshot.game_id) == expected

    def test_an_answer_nobody_waits_for_changes_nothing(self) -> None:
        """An answer applies only to the request that is in flight."""
        rules = Rules("a", "b")
        before = rules.state
        assert rules.answer("x", "y") == before
        assert rules.fail() == before

    def test_a_failure_keeps_the_pool_and_the_wish(self) -> None:
        """The pool stays as it was, and the refetch is due after a pause."""
        rules = Rules("a", "b", "c")
        rules.hear(YourTurn("a"))
        rules.asked()
        rules.fail()
        assert rules.effects == [Pause()]
        assert rules.state.pool == ("a", "b", "c")
        rules.hear(PauseOver())
        assert rules.asked() == 1
        assert rules.answer("b", "a").snapshot == Snapshot("a", ("b", "a"), True)  # noqa: FBT003

    def test_the_next_event_that_asks_ends_the_pause(self) -> None:
        """News does not wait for a pause; a pause that ends then asks nothing."""
        rules = Rules("a", "b", "c")
        rules.hear(Invalidated(), Failed())
        rules.asked()
        rules.hear(Invalidated())
        assert rules.asked() == 1
        rules.hear(PauseOver())
        rules.answer("a")
        rules.hear(PauseOver())
        assert rules.asked() == 0

    def test_what_was_asked_during_a_failing_flight_follows_it_at_once(self) -> None:
        """It is another request: it has not failed yet."""
        rules = Rules("a", "b", "c")
        rules.hear(Invalidated(), YourTurn("a"))
        rules.asked()
        rules.fail()
        assert rules.effects == [Refetch()]
        assert rules.state.in_flight == RefetchRequest("a")

    def test_pauses_grow_up_to_a_limit(self) -> None:
        """Each is twice the last, and none is longer than the longest."""
        pauses = [retry_pause(number) for number in range(1, 2_000)]
        assert pauses[:3] == [PAUSE, 2 * PAUSE, 4 * PAUSE]
        assert pauses[-1] == LONGEST_PAUSE
        assert pauses == sorted(pauses)


class TestW4Invalidated:
    """W4, R1."""

    def test_the_snapshot_goes_and_a_refetch_without_one_begins(self) -> None:
        """Games came or went: no old order is known to be right."""
        rules = with_snapshot()
        state = rules.hear(Invalidated())
        assert state.snapshot is None
        assert rules.asked() == 1
        assert rules.answer("a", "b").snapshot is None

    def test_an_answer_under_way_fills_the_pool_but_makes_no_snapshot(self) -> None:
        """It may be from before."""
        rules = Rules("a", "b", "c")
        rules.hear(YourTurn("c"), Invalidated())
        state = rules.answer("x", "y", "z")
        assert (state.pool, state.snapshot) == (("x", "y", "z"), None)
        assert state.in_flight == RefetchRequest()


class TestW5MoveSent:
    """W5, R2."""

    def test_the_game_leaves_and_its_move_is_pending(self) -> None:
        """The others keep their order."""
        rules = Rules("a", "b", "c")
        state = rules.hear(MoveSent("b"))
        assert (state.pool, state.pending) == (("a", "c"), ("b",))
        assert rules.asked() == 0

    def test_a_snapshot_of_another_game_goes(self) -> None:
        """It would bring back the game that was just played."""
        assert with_snapshot("c").hear(MoveSent("a")).snapshot is None
        assert with_snapshot("c").hear(MoveSent("c")).snapshot is not None

    def test_a_move_that_starves_the_pool_causes_a_refetch_unless_the_pool_is_complete(
        self,
    ) -> None:
        """Fewer than two, and the answer may have been cut: without a snapshot."""
        rules = Rules(*"abcde")
        rules.hear(*map(MoveSent, "abc"))
        assert rules.asked() == 0
        assert rules.hear(MoveSent("d")).in_flight == RefetchRequest()
        assert rules.asked() == 1
        few = Rules("a", "b")
        few.hear(MoveSent("a"), MoveSent("b"))
        assert few.asked() == 0

    def test_an_answer_leaves_out_pending_games(self) -> None:
        """It may have been read before the move came in; its snapshot leaves them out as well."""
        rules = Rules("a", "b", "c")
        rules.hear(YourTurn("c"), MoveSent("a"))
        state = rules.answer("a", "b", "c")
        assert state.pool == ("b", "c")
        assert state.snapshot == Snapshot("c", ("b", "c"), True)  # noqa: FBT003

    def test_an_answer_that_our_moves_emptied_is_asked_for_again(self) -> None:
        """Once at once; then, as long as the moves are not through, after growing pauses."""
        rules = Rules(*"abcde")
        rules.hear(*map(MoveSent, "abcd"))
        assert rules.asked() == 1
        rules.answer(*"abcde")
        assert rules.asked() == 1
        rules.answer(*"abcde")
        assert rules.effects == [Pause()]
        rules.effects.clear()
        rules.hear(PauseOver())
        assert rules.asked() == 1
        assert rules.answer(*"efghi").pool == tuple("efghi")
        assert not rules.state.is_busy

    def test_moves_are_remembered_within_bounds(self) -> None:
        """The oldest unconfirmed move is forgotten first."""
        rules = Rules("a", "b", "c")
        rules.hear(*(MoveSent(number) for number in range(MEMORY + 5)))
        assert rules.state.pending == tuple(range(5, MEMORY + 5))


class TestW6NotMyTurn:
    """W6, R3."""

    def test_a_lost_turn_changes_nothing_after_our_own_move(self) -> None:
        """The game left when the move was sent."""
        rules = with_snapshot("c")
        rules.hear(Opened("c", my_turn=True), MoveSent("c"))
        before = rules.state
        state = rules.hear(GameState("c", my_turn=False, version=2))
        assert (state.pool, state.snapshot) == (before.pool, before.snapshot)
        assert rules.asked() == 0

    def test_a_game_that_was_played_elsewhere_leaves(self) -> None:
        """As by R2: a foreign snapshot goes with it."""
        rules = with_snapshot("c")
        state = rules.hear(Opened("a", my_turn=True), GameState("a", my_turn=False, version=2))
        assert (state.pool, state.snapshot) == (("b", "c"), None)

    def test_an_answer_in_flight_does_not_bring_back_a_game_that_was_played_elsewhere(self) -> None:
        """That answer may be older than the state; the next one is not."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("a", my_turn=True), Invalidated(), GameState("a", my_turn=False))
        assert rules.answer("a", "b", "c").pool == ("b", "c")
        rules.hear(Invalidated())
        assert rules.answer("a", "b", "c").pool == ("a", "b", "c")

    def test_a_game_played_elsewhere_that_starves_the_pool_causes_a_refetch(self) -> None:
        """As by R2."""
        rules = Rules(*"abcde")
        rules.hear(*map(MoveSent, "abc"), Opened("d", my_turn=True))
        rules.asked()
        rules.hear(GameState("d", my_turn=False))
        assert rules.asked() == 1

    def test_news_of_a_game_settles_moves_of_that_game_only(self) -> None:
        """A move in another game is still to be confirmed."""
        rules = Rules("a", "b", "c")
        rules.hear(MoveSent("a", 1), MoveSent("b", 1))
        assert rules.hear(YourTurn("a", 5)).pending == ("b",)


class TestW7YourTurn:
    """W7, R4."""

    def test_two_games_need_no_order(self) -> None:
        """A complete pool of one takes another, and nobody is asked."""
        rules = Rules("a")
        assert rules.hear(YourTurn("b"), YourTurn("a")).pool == ("a", "b")
        assert (rules.asked(), rules.state.is_complete_from_server) == (1, True)

    def test_a_pool_that_may_be_cut_asks_with_a_snapshot(self) -> None:
        """The game is shown at once, and the backend asked."""
        rules = Rules()
        state = rules.hear(YourTurn("a"))
        assert (state.pool, state.in_flight) == (("a",), RefetchRequest("a"))

    def test_an_answer_under_way_may_not_know_the_game(self) -> None:
        """So a refetch with snapshot follows it."""
        rules = Rules("a")
        rules.hear(Invalidated(), YourTurn("b"))
        rules.answer("a")
        assert rules.state.in_flight == RefetchRequest("b")

    def test_a_foreign_snapshot_goes_when_a_game_is_appended(self) -> None:
        """It does not know the new game."""
        rules = Rules("a", "b", "c")
        rules.hear(YourTurn("b"))
        rules.answer("a", "b")
        rules.hear(MoveSent("b"))
        assert rules.state.snapshot is not None
        assert rules.hear(YourTurn("c")).snapshot is None

    def test_a_game_that_we_played_and_that_comes_back_restores_the_snapshot(self) -> None:
        """Played by ourselves and back: pool and completeness are put back, nobody is asked."""
        rules = with_snapshot("c")
        for _ in range(3):
            assert rules.hear(MoveSent("c")).pool == ("a", "b")
            state = rules.hear(YourTurn("c"))
            assert (state.pool, state.is_complete_from_server) == (("a", "b", "c"), True)
        assert rules.asked() == 0

    def test_a_snapshot_that_we_did_not_play_since_is_not_put_back(self) -> None:
        """It may have been read while the game was away."""
        rules = with_snapshot("c")
        rules.hear(YourTurn("c"))
        assert rules.asked() == 1

    def test_a_move_from_before_the_snapshot_is_not_a_move_since(self) -> None:
        """Played while the answer was under way: the answer may or may not know the game."""
        rules = Rules("a", "b", "c")
        rules.hear(YourTurn("c"), MoveSent("c"))
        rules.answer("a", "b")
        rules.hear(MoveSent("c"), YourTurn("c"))
        assert rules.asked() == 2

    def test_a_snapshot_that_misses_its_game_is_never_put_back(self) -> None:
        """It was read while the game was away, whoever played it: what comes back has no place."""
        rules = Rules("a", "b", "c")
        rules.hear(YourTurn("c", 1), Opened("c", my_turn=True, version=1))
        rules.answer("a", "b")
        rules.hear(GameState("c", my_turn=False, version=2), Opened("c", my_turn=True, version=3))
        rules.hear(MoveSent("c"), YourTurn("c", 3))
        rules.asked()
        assert rules.hear(YourTurn("c", 5)).in_flight == RefetchRequest("c")

    def test_a_snapshot_of_a_cut_answer_is_put_back_though_it_misses_its_game(self) -> None:
        """A loop in the sixth game costs nothing either."""
        rules = with_snapshot("z", *"abcde")
        rules.hear(MoveSent("z"), YourTurn("z"), MoveSent("z"), YourTurn("z"))
        assert (rules.state.pool, rules.asked()) == (tuple("abcde"), 0)

    def test_no_snapshot_is_put_back_while_news_is_under_way(self) -> None:
        """Neither in flight nor due."""
        rules = with_snapshot("c")
        rules.hear(MoveSent("c"), MoveFailed("z"))
        assert rules.hear(YourTurn("c")).follows == RefetchRequest("c")
        due = with_snapshot("c")
        due.hear(MoveSent("c"), MoveFailed("z"), Failed())
        assert due.hear(YourTurn("c")).in_flight == RefetchRequest("c")

    def test_a_game_in_the_pool_is_asked_for_again(self) -> None:
        """It was played elsewhere and came back: its place may have changed."""
        rules = Rules("a", "b", "c")
        assert rules.hear(YourTurn("a")).in_flight == RefetchRequest("a")

    @pytest.mark.parametrize("version", [None, 7])
    @pytest.mark.parametrize("message_first", [True, False])
    def test_a_turn_told_twice_counts_once(self, version: int | None, message_first: bool) -> None:
        """By message and by state, in either order, with versions and without."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("c", my_turn=False))
        news: list[Event] = [YourTurn("c", version), GameState("c", my_turn=True, version=version)]
        rules.hear(*(news if message_first else reversed(news)))
        rules.answer("a", "b", "c")
        assert rules.asked() == 1

    def test_a_message_with_a_later_version_is_of_another_turn(self) -> None:
        """The state on screen showed the earlier one, whose message is still to come."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("c", my_turn=False), GameState("c", my_turn=True, version=5))
        rules.answer("a", "b", "c")
        rules.hear(YourTurn("c", 7))
        assert rules.asked() == 2

    def test_a_turn_after_one_that_ended_counts_again(self) -> None:
        """A turn that ended in between is not the same turn."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("c", my_turn=False), GameState("c", my_turn=True))
        rules.answer("a", "b", "c")
        rules.hear(GameState("c", my_turn=False), YourTurn("c"))
        assert rules.asked() == 2

    def test_a_message_that_is_not_newer_than_the_known_version_asks_nothing(self) -> None:
        """Not newer than the last version known of that game; a newer one counts."""
        rules = Rules("a", "b", "c")
        rules.hear(YourTurn("c", 5))
        rules.answer("a", "b", "c")
        before = rules.hear(MoveSent("c"))
        rules.asked()
        assert rules.hear(YourTurn("c", 5), YourTurn("c", 4)) == before
        assert rules.hear(YourTurn("c", 6)).pool == ("a", "b", "c")

    def test_the_turn_that_we_played_is_no_news(self) -> None:
        """Seen on screen and played before its message came."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("c", my_turn=True, version=5), MoveSent("c"))
        assert rules.hear(YourTurn("c", 5)).pending == ("c",)
        assert rules.asked() == 0

    @pytest.mark.parametrize(("opened_at", "asks"), [(None, 0), (5, 1)])
    def test_the_message_of_a_turn_that_was_seen_on_screen_is_no_news(
        self, opened_at: int | None, asks: int
    ) -> None:
        """Its message is no news; unless we know that it was opened before the message came."""
        rules = Rules("a", "b")
        rules.hear(Opened("c", my_turn=True, version=opened_at))
        rules.hear(GameState("c", my_turn=True, version=5), YourTurn("c", 4))
        assert rules.asked() == 0
        rules.hear(YourTurn("c", 5))
        assert rules.asked() == asks

    def test_versions_are_remembered_within_bounds(self) -> None:
        """Of the games with the latest news."""
        rules = Rules("a", "b", "c")
        rules.hear(*(YourTurn(number, 1) for number in range(MEMORY + 5)))
        assert len(rules.state.versions) == MEMORY
        rules.hear(YourTurn(MEMORY, 2))  # a game is remembered once
        assert len(dict(rules.state.versions)) == MEMORY


class TestW8GameState:
    """W8, R5."""

    def test_a_rising_turn_counts_as_your_turn(self) -> None:
        """It was not ours, and now it is."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("c", my_turn=False))
        assert rules.hear(GameState("c", my_turn=True, version=1)).in_flight == RefetchRequest("c")

    def test_opening_a_game_whose_turn_is_ours_changes_nothing(self) -> None:
        """`prev` begins with what was opened: looking at a game changes nothing."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("x", my_turn=True), GameState("x", my_turn=True, version=1))
        assert (rules.state.pool, rules.asked()) == (("a", "b", "c"), 0)

    def test_a_pending_move_alone_counts_as_a_turn_that_goes_on(self) -> None:
        """The game may have kept its place, so the snapshot fits only while the turn goes on."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("b", my_turn=True), MoveSent("b"))
        state = rules.hear(GameState("b", my_turn=True, version=2))
        assert (state.in_flight, state.pending) == (RefetchRequest("b", is_mid_turn=True), ())
        snapshot = rules.answer("a", "b", "c").snapshot
        assert snapshot is not None
        assert snapshot.is_mid_turn

    def test_a_pending_move_in_the_only_game_costs_nothing(self) -> None:
        """With fewer than two games any order is right."""
        rules = Rules("a")
        rules.hear(Opened("a", my_turn=True), MoveSent("a"))
        assert rules.hear(GameState("a", my_turn=True, version=2)).pool == ("a",)
        assert rules.asked() == 0

    @pytest.mark.parametrize("my_turn", [True, False])
    def test_a_state_of_another_game_changes_nothing_without_a_move_in_it(
        self, my_turn: bool
    ) -> None:
        """Not even the known version. A move in it is confirmed by W16."""
        rules = Rules("a", "b", "c")
        before = rules.hear(MoveSent("c", 1), Opened("a", my_turn=True))
        assert rules.hear(GameState("b", my_turn=my_turn, version=9)) == before
        assert rules.hear(Opened("a", my_turn=True)) == before

    @pytest.mark.parametrize("version", [4, 5])
    def test_a_state_that_is_not_newer_is_ignored_altogether(self, version: int) -> None:
        """Not newer than the last applied one."""
        rules = Rules("a", "b", "c")
        before = rules.hear(Opened("a", my_turn=True), GameState("a", my_turn=True, version=5))
        assert rules.hear(GameState("a", my_turn=False, version=version)) == before

    def test_a_state_without_a_version_is_applied(self) -> None:
        """Nobody can say that it is old."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("a", my_turn=True), GameState("a", my_turn=True, version=5))
        assert rules.hear(GameState("a", my_turn=False)).pool == ("b", "c")

    def test_a_state_older_than_what_was_opened_is_ignored(self) -> None:
        """A message of an earlier look may still be on its way."""
        rules = Rules("a", "b", "c")
        before = rules.hear(Opened("a", my_turn=True, version=5))
        assert rules.hear(GameState("a", my_turn=False, version=4)) == before
        assert rules.hear(GameState("a", my_turn=False, version=5)).pool == ("b", "c")

    def test_the_previous_turn_is_that_of_the_last_applied_state(self) -> None:
        """Ours, theirs, ours: the second rise counts as the first would."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("c", my_turn=True), GameState("c", my_turn=False, version=1))
        rules.hear(GameState("c", my_turn=True, version=2))
        assert rules.asked() == 1


class TestW9Trouble:
    """W9: failed moves and lost connections."""

    def test_a_failed_move_is_not_pending_and_asks_without_a_snapshot(self) -> None:
        """The game was taken out on trust."""
        rules = Rules("a", "b", "c")
        state = rules.hear(MoveSent("a"), MoveFailed("a"))
        assert (state.pending, state.in_flight) == ((), RefetchRequest())
        assert rules.answer("a", "b", "c").pool == ("a", "b", "c")

    def test_a_refusal_takes_back_one_move_of_two(self) -> None:
        """Tapped twice, the first refused: the second is still under way, and hides the game."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("a", my_turn=True, version=1), MoveSent("a"), MoveSent("a"))
        state = rules.hear(MoveFailed("a"))
        assert (state.pending, state.in_flight) == (("a",), RefetchRequest())
        assert rules.answer("a", "b", "c").pool == ("b", "c")
        assert rules.hear(MoveFailed("a")).pending == ()
        assert rules.answer("a", "b", "c").pool == ("a", "b", "c")

    def test_a_late_refusal_is_not_of_a_newer_move(self) -> None:
        """The game was played elsewhere and came back before the refusal; we play it again."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("a", my_turn=True, version=1), MoveSent("a"))
        rules.hear(GameState("a", my_turn=False, version=2), YourTurn("a", 3))
        rules.hear(GameState("a", my_turn=True, version=3))
        assert rules.state.pending == ()
        rules.hear(MoveSent("a"), MoveFailed("a", 1))
        rules.answer("b", "c", "a")
        assert rules.answer("b", "c", "a").pool == ("b", "c")
        assert rules.hear(MoveFailed("a", 3)).pending == ()

    def test_a_confirmation_settles_all_that_was_played_before(self) -> None:
        """The first tap was made, so the second will be refused: neither hides the next turn."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("a", my_turn=True, version=1), MoveSent("a"), MoveSent("a"))
        assert rules.hear(YourTurn("a", 3)).pending == ()

    def test_a_move_at_a_newer_version_settles_the_older_ones(self) -> None:
        """We saw that our turn went on, whoever told us."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("a", my_turn=True, version=1), MoveSent("a"))
        rules.hear(Opened("b", my_turn=True), Opened("a", my_turn=True, version=2), MoveSent("a"))
        assert rules.hear(MoveFailed("a", 2)).pending == ()

    def test_after_reconnecting_nothing_is_pending_and_no_snapshot_left(self) -> None:
        """Messages may have been missed."""
        rules = with_snapshot("c")
        state = rules.hear(MoveSent("c"), Reconnected())
        assert (state.pending, state.snapshot, state.in_flight) == ((), None, RefetchRequest())

    def test_a_message_that_was_owed_is_not_waited_for(self) -> None:
        """It was lost with the connection: the next one is another turn's."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("c", my_turn=False), GameState("c", my_turn=True))
        rules.answer("a", "b", "c")
        rules.hear(Reconnected())
        rules.answer("a", "b", "c")
        rules.asked()
        rules.hear(YourTurn("c"))
        assert rules.asked() == 1


class TestW10Snapshots:
    """W10: where they come from and where they go."""

    def test_a_snapshot_comes_only_from_a_refetch_that_asked_for_one(self) -> None:
        """An answer to any other refetch leaves none, not even an old one."""
        rules = with_snapshot("c")
        rules.hear(MoveFailed("z"))
        assert rules.answer("a", "b", "c").snapshot is None

    def test_a_snapshot_never_contains_a_game_that_was_appended_here(self) -> None:
        """What was appended here is not the backend's order."""
        rules = Rules("a")
        assert rules.hear(YourTurn("b")).snapshot is None

    @given(st.lists(EVENTS, max_size=40))
    def test_a_snapshot_is_always_the_answer_to_its_own_request(self, events: list[Event]) -> None:
        """Whatever happens, a snapshot is what an answer to its own request became."""
        state = State()
        for event in events:
            before = state
            state, _ = step(state, event)
            if state.snapshot not in {None, before.snapshot}:
                assert isinstance(event, Answered)
                assert state.snapshot is not None
                assert before.in_flight == RefetchRequest(state.snapshot.game_id)
                assert set(state.snapshot.pool) <= set(event.game_ids)


class TestW11Navigation:
    """W11: what is shown, and why it may be."""

    def test_the_current_game_is_left_out(self) -> None:
        """Of the pool, in its order; no current game leaves out none."""
        state = Rules("a", "b", "c").state
        assert navigation(state, "b").games == ("a", "c")
        assert navigation(state, "x").games == navigation(state, None).games == ("a", "b", "c")

    def test_an_order_is_proved_by_the_server_a_snapshot_or_by_being_irrelevant(self) -> None:
        """SERVER, also with a game taken out; SNAPSHOT once put back; IRRELEVANT for two."""
        rules = with_snapshot("d", "a", "b", "c", "d")
        events: list[tuple[Event, ...]] = [
            (),
            (MoveSent("d"),),
            (YourTurn("d"),),
            (MoveSent("a"),),
            (MoveSent("b"),),
        ]
        proofs = [navigation(rules.hear(*heard), None).proof for heard in events]
        expected = [Proof.SERVER, Proof.SERVER, Proof.SNAPSHOT, Proof.SNAPSHOT, Proof.IRRELEVANT]
        assert proofs == expected

    def test_there_is_no_fourth_proof(self) -> None:
        """Nothing is shown that cannot be proved."""
        assert set(Proof) == {"irrelevant", "server", "snapshot"}

    def test_pending_means_under_way_or_due(self) -> None:
        """In flight, and in a pause after a failure; not at rest."""
        rules = Rules("a", "b", "c")
        assert not navigation(rules.state, None).pending
        assert navigation(rules.hear(Invalidated()), None).pending
        assert navigation(rules.fail(), None).pending
        rules.hear(PauseOver())
        assert not navigation(rules.answer("a"), None).pending


class TestW15TurnsThatGoOn:
    """W15: a turn that goes on, or comes back at once, is cheap."""

    @pytest.mark.parametrize("answers_between", [True, False], ids=["fast", "slow"])
    @pytest.mark.parametrize("is_kept", [True, False], ids=["place kept", "place renewed"])
    @pytest.mark.parametrize("versions", ["none", "states", "all"])
    @pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
    def test_fifty_turns_cost_two_refetches_at_most(
        self, order: tuple[bool | None, ...], versions: str, is_kept: bool, answers_between: bool
    ) -> None:
        """With five games, in every order of messages, and the order shown is the backend's."""
        backend, rules = list("abcde"), Rules(*"abcde")
        rules.hear(Opened("b", my_turn=True, version=0 if versions == "all" else None))
        for turn in range(1, 51):
            rules.hear(MoveSent("b"))
            if None in order or not is_kept:
                backend.append(backend.pop(backend.index("b")))
            for said in order:
                version = None if versions == "none" else turn * 2 - (said is False)
                rules.hear(
                    YourTurn("b", version) if said is None else GameState("b", said, version)
                )
                while answers_between and rules.state.in_flight:
                    rules.answer(*backend)
            while rules.state.in_flight:
                rules.answer(*backend)
            assert rules.state.pool == tuple(backend)
        assert rules.asked() <= 2

    def test_the_order_of_mid_turn_is_not_put_back_when_the_turn_comes_anew(self) -> None:
        """The game comes back last, and the snapshot has it where it was."""
        rules = went_on()
        rules.hear(MoveSent("b"), GameState("b", my_turn=False, version=4))
        assert rules.hear(YourTurn("b", 5)).in_flight == RefetchRequest("b")

    @pytest.mark.parametrize("version", [None, 4])
    def test_a_turn_that_seemed_to_go_on_is_asked_for_when_its_message_comes(
        self, version: int | None
    ) -> None:
        """Bots played at once: the state looks as if our turn had gone on."""
        rules = went_on()
        assert rules.hear(MoveSent("b"), GameState("b", my_turn=True, version=version)).pool == (
            "a",
            "b",
            "c",
        )
        assert rules.hear(YourTurn("b", version)).in_flight == RefetchRequest("b")

    def test_a_message_too_late_to_count_still_ends_the_snapshot_of_mid_turn(self) -> None:
        """We have played on by then, and the next order of mid-turn is another one."""
        rules = went_on()
        rules.hear(MoveSent("b"), GameState("b", my_turn=True, version=4), MoveSent("b"))
        state = rules.hear(YourTurn("b", 4))
        assert (state.snapshot, state.pending, rules.asked()) == (None, ("b",), 0)


class TestW16Confirmed:
    """W16: a newer state of any game confirms our move in it, whichever game is on screen."""

    def test_a_state_of_a_game_that_was_left_confirms_the_move(self) -> None:
        """The pool, the screen and the snapshot stay, and nothing is asked."""
        rules = left_after_a_move()
        before = rules.state
        state = rules.hear(GameState("a", my_turn=False, version=2))
        assert state == replace(before, moves=())
        assert rules.asked() == 0

    def test_the_snapshot_of_the_game_that_was_left_stays(self) -> None:
        """The game comes back by its message, and the order is restored."""
        rules = with_snapshot("c")
        rules.hear(Opened("c", my_turn=True, version=1), MoveSent("c"), Opened("a", my_turn=True))
        before = rules.state
        state = rules.hear(GameState("c", my_turn=False, version=2))
        assert (state.snapshot, state.screen) == (before.snapshot, before.screen)
        assert state.snapshot is not None
        assert rules.hear(YourTurn("c", 3)).pool == ("a", "b", "c")
        assert rules.asked() == 0

    def test_a_confirmed_game_is_shown_by_every_later_answer(self) -> None:
        """The reported case: play chess, open go; the state of chess comes."""
        rules = Rules("chess", "go")
        rules.hear(Opened("chess", my_turn=True, version=1), MoveSent("chess"))
        rules.hear(Opened("go", my_turn=True, version=1))
        rules.hear(GameState("chess", my_turn=False, version=2), Invalidated())
        state = rules.answer("go", "chess")
        assert (state.pool, state.is_complete_from_server) == (("go", "chess"), True)

    def test_a_game_that_is_still_ours_is_asked_for(self) -> None:
        """It left the pool on trust. The pool itself changes only with the answer."""
        rules = left_after_a_move()
        before = rules.state
        state = rules.hear(GameState("a", my_turn=True, version=2))
        assert (state.pool, state.screen) == (before.pool, before.screen)
        assert (state.moves, state.in_flight) == ((), RefetchRequest())
        assert rules.answer("a", "b", "c").pool == ("a", "b", "c")

    @pytest.mark.parametrize("version", [0, 1])
    @pytest.mark.parametrize("kind", [GameState, Opened])
    def test_a_state_that_is_not_newer_confirms_nothing(
        self, kind: type[GameState | Opened], version: int
    ) -> None:
        """The move was made at version 1; the backend may have sent this state before it."""
        rules = left_after_a_move()
        assert rules.hear(kind("a", my_turn=True, version=version)).pending == ("a",)
        assert rules.asked() == 0

    def test_a_state_without_a_version_confirms(self) -> None:
        """A client that forwards states in order can do no better."""
        rules = left_after_a_move()
        assert rules.hear(GameState("a", my_turn=False)).pending == ()

    def test_opening_without_a_version_confirms_nothing(self) -> None:
        """What was opened may have been read before the move."""
        rules = left_after_a_move()
        assert rules.hear(Opened("a", my_turn=True)).pending == ("a",)
        assert rules.asked() == 0

    def test_opening_confirms_nothing_if_the_move_has_no_version(self) -> None:
        """No version is known to be newer. A state is pushed, so it confirms."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("a", my_turn=True), MoveSent("a"), Opened("b", my_turn=True))
        assert rules.hear(Opened("a", my_turn=True, version=5)).pending == ("a",)
        rules.hear(Opened("b", my_turn=True))
        assert rules.hear(GameState("a", my_turn=False, version=5)).pending == ()

    @pytest.mark.parametrize(("version", "pending"), [(4, ("a",)), (5, ("a",)), (6, ())])
    @pytest.mark.parametrize("kind", [GameState, Opened])
    def test_a_move_without_a_version_is_as_new_as_the_last_message(
        self, kind: type[GameState | Opened], version: int, pending: tuple[str, ...]
    ) -> None:
        """The turn's message had a version, though the client opens games without one."""
        rules = Rules("a", "b", "c")
        rules.hear(YourTurn("a", 5), Opened("a", my_turn=True), MoveSent("a"))
        rules.hear(Opened("b", my_turn=True))
        assert rules.hear(kind("a", my_turn=True, version=version)).pending == pending

    @pytest.mark.parametrize(("version", "pending"), [(5, ("a",)), (6, ())])
    def test_a_message_before_the_move_makes_its_own_state_old(
        self, version: int, pending: tuple[str, ...]
    ) -> None:
        """The screen showed version 4, the message told of 5, and then we moved."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("a", my_turn=False, version=4), YourTurn("a", 5), MoveSent("a"))
        rules.hear(Opened("b", my_turn=True))
        assert rules.hear(GameState("a", my_turn=True, version=version)).pending == pending

    @pytest.mark.parametrize(("my_turn", "asks"), [(True, 1), (False, 0)])
    def test_opening_a_newer_version_confirms(self, my_turn: bool, asks: int) -> None:
        """A game that is still ours is asked for; the screen is the one that was opened."""
        rules = left_after_a_move()
        state = rules.hear(Opened("a", my_turn=my_turn, version=2))
        assert (state.pending, state.pool) == ((), ("b", "c"))
        assert state.screen == Screen("a", my_turn, opened_at=2)
        assert rules.asked() == asks

    def test_earlier_moves_are_confirmed_and_later_ones_are_not(self) -> None:
        """And moves in other games stay unconfirmed."""
        rules = Rules("a", "b", "c")
        rules.hear(MoveSent("b", 1), Opened("c", my_turn=True))
        moves = (("a", 3), ("a", 5), ("b", 1))
        state = replace(rules.state, moves=moves)
        after = step(state, GameState("a", my_turn=False, version=4))[0]
        assert after.moves == (("a", 5), ("b", 1))

    @pytest.mark.parametrize("kind", [GameState, Opened])
    def test_an_answer_in_flight_does_not_bring_a_confirmed_game_back(
        self, kind: type[GameState | Opened]
    ) -> None:
        """The backend may have read it before the move; the next answer is newer."""
        rules = left_after_a_move()
        rules.hear(Invalidated(), kind("a", my_turn=False, version=2))
        assert rules.answer("a", "b", "c").pool == ("b", "c")
        rules.hear(Invalidated())
        assert rules.answer("b", "c", "a").pool == ("b", "c", "a")

    def test_an_answer_in_flight_is_followed_by_another_if_the_game_is_ours(self) -> None:
        """The one in flight may be older than the state."""
        rules = left_after_a_move()
        rules.hear(Invalidated())
        assert rules.hear(GameState("a", my_turn=True, version=2)).follows == RefetchRequest()

    def test_an_old_state_of_the_game_on_screen_confirms_too(self) -> None:
        """It moves neither the turn that is shown nor its version."""
        rules = Rules("a", "b", "c")
        rules.hear(Opened("a", my_turn=True), MoveSent("a"), Opened("a", my_turn=True, version=5))
        before = rules.state
        state = rules.hear(GameState("a", my_turn=False, version=4))
        assert (state.pending, state.screen, state.pool) == ((), before.screen, before.pool)
        assert rules.asked() == 1

    def test_a_move_that_a_state_confirmed_cannot_be_refused(self) -> None:
        """A late refusal asks, and takes back no other move."""
        rules = left_after_a_move()
        rules.hear(GameState("a", my_turn=True, version=2), MoveSent("a", 2))
        assert rules.hear(MoveFailed("a", 1)).pending == ("a",)

    def test_the_types_of_a_snapshot_are_exported_by_the_waiting_package(self) -> None:
        """The mapping page names them under `stillfresh.systems.waiting`."""
        assert waiting.RefetchRequest is RefetchRequest
        assert waiting.Screen is Screen


class TestStates:
    """W1: single steps, from a state to the next."""

    def test_w3_what_is_away_is_forgotten_with_the_answer_that_may_list_it(self) -> None:
        """Whether it failed, came, or may have been lost."""
        state = State(in_flight=RefetchRequest(), away=("x",))
        forgetting: tuple[Event, ...] = (Failed(), Answered(("a", "b")), Reconnected())
        others: tuple[Event, ...] = (YourTurn("y"), Invalidated())
        assert {step(state, event)[0].away for event in forgetting} == {()}
        assert {step(state, event)[0].away for event in others} == {("x",)}
        assert step(state, YourTurn("x"))[0].away == ()

    def test_w6_a_game_that_is_not_ours_settles_our_earlier_moves_in_it(self) -> None:
        """And no later ones; it is away only while an answer may list it."""
        screen = Screen("a", my_turn=True)
        state = State(screen=screen, moves=(("a", 3), ("a", 5), ("b", 1)))
        after = step(state, GameState("a", my_turn=False, version=4))[0]
        assert (after.moves, after.away, after.versions) == (
            (("a", 5), ("b", 1)),
            (),
            (("a", 4),),
        )
        flying = replace(state, in_flight=RefetchRequest(), away=("a", "c"))
        assert step(flying, GameState("a", my_turn=False, version=4))[0].away == ("c", "a")

    def test_w7_a_turn_in_another_game_leaves_the_screen_as_it_is(self) -> None:
        """The game on screen is shown as ours, and owes no message any more."""
        screen = Screen("a", my_turn=False, awaits_message=True)
        state = State(pool=("b", "c"), screen=screen)
        assert step(state, YourTurn("b"))[0].screen == screen
        assert step(state, YourTurn("a"))[0].screen == Screen("a", my_turn=True)

    def test_w7_an_order_is_proved_by_the_snapshot_of_its_game(self) -> None:
        """Which we played since; a mid-turn one proves only a turn that goes on."""
        own = Snapshot("a", ("a", "b", "c"), is_complete_from_server=False)
        mid = replace(own, is_mid_turn=True)
        for snapshot, played, wanted, is_proved in (
            (own, Played.SINCE, RefetchRequest("a"), True),
            (own, Played.SINCE, RefetchRequest("b"), False),
            (own, Played.NOT_SINCE, RefetchRequest("a"), False),
            (None, Played.SINCE, RefetchRequest("a"), False),
            (mid, Played.SINCE, RefetchRequest("a"), False),
            (mid, Played.SINCE, RefetchRequest("a", is_mid_turn=True), True),
        ):
            state = State(snapshot=snapshot, played=played)
            assert is_provable(state, wanted) is is_proved
            assert not is_provable(replace(state, in_flight=RefetchRequest()), wanted)

    @pytest.mark.parametrize("is_new_turn", [True, False])
    def test_w7_a_restored_order_is_all_of_the_answer(self, is_new_turn: bool) -> None:
        """Its games, and whether there are others; a new turn is not played yet."""
        snapshot = Snapshot("a", ("a", "b", "c"), is_complete_from_server=True)
        after, effects = restored(
            State(snapshot=snapshot, played=Played.SINCE), is_new_turn=is_new_turn
        )
        assert (after.pool, after.is_complete_from_server) == (("a", "b", "c"), True)
        assert after.played is (Played.NOT_SINCE if is_new_turn else Played.SINCE)
        assert (after.is_restored, effects) == (True, ())

    def test_w7_versions_only_grow(self) -> None:
        """What is known already changes nothing, not even the order."""
        versions = (("a", 5), ("b", 1))
        for version in (None, 4, 5):
            assert with_version(versions, "a", version) == versions
        assert with_version(versions, "a", 6) == (("b", 1), ("a", 6))
        assert with_version(versions, "c", 0) == (*versions, ("c", 0))

    def test_w8_a_turn_that_rises_is_news_up_to_its_version(self) -> None:
        """With a move of ours pending, too; old news owes no message, and asks for nothing."""
        state = State(pool=("b", "c"), screen=Screen("a", my_turn=False), moves=(("a", 3),))
        after = step(state, GameState("a", my_turn=True, version=5))[0]
        assert (after.versions, after.moves) == ((("a", 5),), ())
        assert after.screen == Screen("a", my_turn=True, version=5, awaits_message=True)
        late = replace(state, versions=(("a", 5),))
        after, effects = step(late, GameState("a", my_turn=True, version=5))
        assert after.screen == Screen("a", my_turn=True, version=5)
        assert (effects, after.in_flight) == ((), None)

    def test_w8_a_turn_that_stays_away_owes_nothing(self) -> None:
        """And is old news up to its version, whatever was opened."""
        state = State(screen=Screen("a", my_turn=False, opened_at=1))
        after = step(state, GameState("a", my_turn=False, version=4))[0]
        assert after.screen == Screen("a", my_turn=False, opened_at=1, version=4)
        assert after.versions == (("a", 4),)

    def test_w5_only_the_game_on_screen_was_seen(self) -> None:
        """At its last version, or at the one that was opened."""
        screen = Screen("a", my_turn=True, opened_at=3)
        assert (
            version_on_screen(screen, "a"),
            version_on_screen(screen, "b"),
            version_on_screen(None, "a"),
        ) == (3, None, None)
        assert version_on_screen(replace(screen, version=5), "a") == 5

    def test_w7_an_answer_is_blind_to_a_game_that_was_played_meanwhile(self) -> None:
        """Here, or elsewhere; and an answer is no restored order."""
        snapshot = Snapshot("a", ("a", "b"), is_complete_from_server=True)
        assert not is_blind(State(), snapshot)
        assert is_blind(State(moves=(("a", 1),)), snapshot)
        assert is_blind(State(away=("a",)), snapshot)
        assert is_blind(State(), replace(snapshot, game_id="c"))
        restored_one = State(in_flight=RefetchRequest(), is_restored=True)
        assert not step(restored_one, Answered(("a", "b")))[0].is_restored

    def test_w9_a_refusal_takes_back_the_oldest_move_that_it_can_be(self) -> None:
        """Of its game; one without a version can be any."""
        moves = (("a", 1), ("b", 1), ("b", None), ("b", 2))
        assert without_move(moves, "b", 1) == (("a", 1), ("b", None), ("b", 2))
        assert without_move(moves, "b", 2) == (("a", 1), ("b", 1), ("b", 2))
        assert without_move(moves, "b", None) == (("a", 1), ("b", None), ("b", 2))
        assert without_move(moves, "c", 1) == moves

    def test_w10_a_move_in_another_game_is_no_move_since_the_snapshot(self) -> None:
        """It ends the snapshot; and without one, nothing was played before it."""
        snapshot = Snapshot("a", ("a", "b", "c"), is_complete_from_server=False)
        state = State(pool=("a", "b", "c"), snapshot=snapshot)
        after = step(state, MoveSent("b"))[0]
        assert (after.snapshot, after.played) == (None, Played.NOT_SINCE)
        assert step(state, MoveSent("a"))[0].played is Played.SINCE
        asked = State(in_flight=RefetchRequest(), moves=(("a", 1),))
        assert step(asked, Answered(("a", "b")))[0].played is Played.NOT_SINCE

    def test_w15_late_news_ends_the_mid_turn_snapshot_of_its_own_game(self) -> None:
        """And no other."""
        for game, is_mid_turn, is_kept in (
            ("a", True, False),
            ("b", True, True),
            ("a", False, True),
        ):
            snapshot = Snapshot(game, (), is_complete_from_server=False, is_mid_turn=is_mid_turn)
            state = State(snapshot=snapshot, versions=(("a", 5),))
            assert step(state, YourTurn("a", 5))[0].snapshot == (snapshot if is_kept else None)


def left_after_a_move() -> Rules:
    """We played `a` at version 1 and opened `b`; the move is not confirmed."""
    rules = Rules("a", "b", "c")
    rules.hear(Opened("a", my_turn=True, version=1), MoveSent("a"))
    rules.hear(Opened("b", my_turn=True, version=1))
    return rules


def went_on() -> Rules:
    """We moved in `b`, our turn went on, and the answer has it in its old place."""
    rules = Rules("a", "b", "c")
    rules.hear(Opened("b", my_turn=True, version=1), MoveSent("b"))
    rules.hear(GameState("b", my_turn=True, version=3))
    rules.answer("a", "b", "c")
    rules.asked()
    return rules


def with_snapshot(game: str = "c", *pool: str) -> Rules:
    """A settled pool that was asked for when `game` became ours."""
    rules = Rules(*(pool or ("a", "b", "c")))
    rules.hear(YourTurn(game))
    rules.answer(*(pool or ("a", "b", "c")))
    rules.asked()
    return rules
