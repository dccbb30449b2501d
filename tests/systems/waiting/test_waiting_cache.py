"""The driver: what it asks and when, how it retries, rests and ends (W1, W3, W11, W14)."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from stillfresh import ConfigError, NotOpen
from stillfresh.systems.waiting import Navigation, Proof, WaitingCache
from tests.kit.engine import turns
from tests.kit.waiting import Backend, Sleeper, until


@pytest.fixture
def backend() -> Backend:
    return Backend("a", "b", "c")


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


@pytest.fixture
async def cache(backend: Backend, sleeper: Sleeper) -> AsyncIterator[WaitingCache]:
    async with WaitingCache(backend.fetch, sleep=sleeper) as cache:
        cache.start()
        await cache.settled()
        yield cache


class TestW11Navigation:
    """W11: reading, which asks nobody."""

    async def test_navigation_shows_the_pool_with_its_proof(self, cache: WaitingCache) -> None:
        """As the seed renders it: the pool without the current game."""
        expected = Navigation(("b", "c"), Proof.SERVER, pending=False)
        assert cache.navigation(current="a") == expected
        assert cache.navigation().games == cache.state.pool == ("a", "b", "c")

    async def test_before_the_first_answer_the_pool_is_empty_and_pending(
        self, backend: Backend
    ) -> None:
        """Empty, and pending as soon as it was started."""
        backend.slow = True
        async with WaitingCache(backend.fetch) as cache:
            assert not cache.navigation().pending
            cache.start()
            assert cache.navigation() == Navigation((), Proof.IRRELEVANT, pending=True)

    async def test_listeners_are_told_of_changes(self, cache: WaitingCache) -> None:
        """After each, with the cache as it is then; not of events that change nothing."""
        seen: list[tuple[object, ...]] = []
        unsubscribe = cache.on_changed(lambda told: seen.append(told.state.pool))
        cache.move_sent("a")
        cache.game_state("zzz", my_turn=True)
        unsubscribe()
        cache.move_sent("b")
        assert seen == [("b", "c")]

    async def test_a_listener_may_send_events_to_the_cache(self, cache: WaitingCache) -> None:
        """What it does is done when it returns, and others are told of the newest state."""
        seen = []

        def act(told: WaitingCache) -> None:
            if "b" in told.state.pool:
                told.move_sent("b")

        cache.on_changed(act)
        cache.on_changed(lambda told: seen.append(told.state.pool))
        cache.move_sent("a")
        assert seen == [("c",), ("c",)]


class TestW3Flights:
    """W3: one call of `fetch` at a time."""

    async def test_a_burst_of_events_makes_one_fetch_and_one_that_follows(
        self, cache: WaitingCache, backend: Backend
    ) -> None:
        """However many events come."""
        backend.slow = True
        for _ in range(20):
            cache.invalidated()
            await turns(2)
        assert backend.in_flight == 1
        backend.answer("x", "y", "z")
        await turns()
        assert (backend.in_flight, backend.calls) == (1, 3)
        backend.answer("a", "b")
        await cache.settled()
        assert (backend.calls, cache.state.pool) == (3, ("a", "b"))

    async def test_settled_waits_for_the_fetch_that_follows_as_well(
        self, cache: WaitingCache, backend: Backend
    ) -> None:
        """Not only for the answer that is under way."""
        backend.slow = True
        cache.invalidated()
        cache.your_turn("b")
        waiting = asyncio.create_task(cache.settled())
        await turns()
        backend.answer("a")
        await turns()
        assert not waiting.done()
        backend.answer("a", "b")
        await waiting

    async def test_settled_at_rest_returns_at_once(self, backend: Backend) -> None:
        """Also before anything was started."""
        await WaitingCache(backend.fetch).settled()

    async def test_a_failing_fetch_is_tried_again_after_growing_pauses(
        self, cache: WaitingCache, backend: Backend, sleeper: Sleeper
    ) -> None:
        """The pool stays; `settled` does not wait for a pause."""
        backend.down = True
        cache.invalidated()
        for pauses in range(1, 5):
            await cache.settled()
            await turns()
            assert len(sleeper.slept) == pauses
            assert (cache.navigation().pending, cache.state.pool) == (True, ("a", "b", "c"))
            sleeper.wake()
            await turns()
        assert sleeper.slept == [0.5, 1.0, 2.0, 4.0, 8.0]
        backend.down = False
        backend.games = ["z"]
        sleeper.wake()
        await turns()
        assert (cache.state.pool, cache.navigation().pending) == (("z",), False)

    async def test_after_a_success_the_pauses_between_retries_begin_short_again(
        self, cache: WaitingCache, backend: Backend, sleeper: Sleeper
    ) -> None:
        """The next failure begins anew."""
        for _ in range(2):
            backend.down = True
            cache.invalidated()
            await turns()
            backend.down = False
            sleeper.wake()
            await turns()
        assert sleeper.slept == [0.5, 0.5]

    async def test_the_next_event_ends_a_pause_and_fetches_at_once(
        self, cache: WaitingCache, backend: Backend, sleeper: Sleeper
    ) -> None:
        """The pause is given up, and asks nothing later."""
        backend.down = True
        cache.invalidated()
        await turns()
        backend.down = False
        cache.invalidated()
        await cache.settled()
        calls = backend.calls
        sleeper.wake()
        await turns()
        assert (backend.calls, cache.navigation().pending) == (calls, False)

    @pytest.mark.parametrize(
        "answer",
        [
            "abc",
            5,
            None,
            {"game_ids": ["a"]},
            [["a"]],
            [True],
            {"a", "b"},
            frozenset("ab"),
        ],
    )
    async def test_an_invalid_answer_of_fetch_is_a_failure(
        self, sleeper: Sleeper, answer: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Logged, with what was wrong; the pool stays."""

        async def fetch() -> Any:
            return answer

        async with WaitingCache(fetch, sleep=sleeper) as cache:
            with caplog.at_level(logging.WARNING):
                cache.start()
                await cache.settled()
            assert cache.navigation().pending
        assert "must" in caplog.text

    async def test_a_fetch_that_is_cancelled_from_within_has_failed(
        self, cache: WaitingCache, backend: Backend, sleeper: Sleeper
    ) -> None:
        """Only closing the cache cancels for good."""
        backend.slow = True
        cache.invalidated()
        await turns()
        backend.fail(asyncio.CancelledError())
        await cache.settled()
        await turns()
        assert sleeper.slept == [0.5]

    async def test_a_sleep_that_is_cancelled_from_within_does_not_lose_the_retry(
        self, backend: Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The pause is then made by the loop: a wanted refetch always comes."""
        sleeper = Sleeper()

        async def cancelled(_seconds: float) -> None:
            raise asyncio.CancelledError

        backend.down = True
        async with WaitingCache(backend.fetch, sleep=cancelled) as cache:
            with monkeypatch.context() as patched:
                patched.setattr("stillfresh.systems.waiting.cache.asyncio.sleep", sleeper)
                cache.start()
                await cache.settled()
            backend.down = False
            await turns()
            assert sleeper.slept == [0.5]
            sleeper.wake()
            await until(cache, lambda: not cache.navigation().pending)
            assert cache.state.pool == ("a", "b", "c")

    async def test_a_sleep_that_fails_loses_the_retry_and_the_next_event_fetches(
        self, backend: Backend, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is logged, and the next event asks."""

        async def broken(_seconds: float) -> None:
            raise OSError("no timer")

        async with WaitingCache(backend.fetch, sleep=broken) as cache:
            backend.down = True
            cache.start()
            await turns()
            assert "no timer" in caplog.text
            backend.down = False
            cache.invalidated()
            await cache.settled()
            assert cache.state.pool == ("a", "b", "c")

    async def test_a_move_that_stays_unconfirmed_causes_no_storm_of_fetches(
        self, backend: Backend, sleeper: Sleeper
    ) -> None:
        """W5: an answer that our moves empty is asked for again at once, then slowly."""
        backend.games = list("abcde")
        async with WaitingCache(backend.fetch, sleep=sleeper) as cache:
            cache.start()
            await cache.settled()
            for game in "abcd":
                cache.move_sent(game)
            await cache.settled()
            await turns(100)
            assert (backend.calls, len(sleeper.slept)) == (3, 1)


class TestW14Worth:
    """W14: what a loop costs."""

    async def test_a_one_game_loop_costs_one_refetch(
        self, cache: WaitingCache, backend: Backend
    ) -> None:
        """The first turn that comes back asks; a hundred after it do not."""
        cache.opened("c", my_turn=True)
        for version in range(2, 202, 2):
            cache.move_sent("c")
            cache.game_state("c", my_turn=False, version=version)
            cache.your_turn("c", version=version + 1)
            cache.game_state("c", my_turn=True, version=version + 1)
            await cache.settled()
            assert cache.navigation("c").games == ("a", "b")
        assert backend.calls == 2

    async def test_two_games_played_by_turns_are_fetched_every_time(
        self, cache: WaitingCache, backend: Backend
    ) -> None:
        """As the seed says it should: nobody here knows which of two waits longer."""
        for number in range(10):
            game = "ab"[number % 2]
            cache.move_sent(game)
            cache.your_turn(game)
            await cache.settled()
        assert backend.calls == 11


class TestW1Driver:
    """W1: it only carries out what the rules decide, and ends cleanly."""

    async def test_closing_ends_a_fetch_and_the_callers_that_wait_for_it(
        self, backend: Backend
    ) -> None:
        """No task is left, and who waits for rest is let go."""
        backend.slow = True
        cache = WaitingCache(backend.fetch)
        before = asyncio.all_tasks()
        cache.start()
        waiting = asyncio.create_task(cache.settled())
        await turns()
        await cache.close()
        await cache.close()
        await waiting
        assert asyncio.all_tasks() == before

    async def test_closing_ends_a_pause(self, backend: Backend) -> None:
        """However long it would be."""
        backend.down = True
        before = asyncio.all_tasks()
        async with WaitingCache(backend.fetch) as cache:
            cache.start()
            await cache.settled()
        assert asyncio.all_tasks() == before

    async def test_a_closed_cache_refuses_events(self, cache: WaitingCache) -> None:
        """And still shows what it knew."""
        await cache.close()
        with pytest.raises(NotOpen, match="closed"):
            cache.your_turn("a")
        assert cache.navigation("a").games == ("b", "c")

    def test_an_event_outside_a_running_loop_is_refused_and_changes_nothing(
        self, backend: Backend
    ) -> None:
        """An event outside a running loop is refused before it is applied."""
        cache = WaitingCache(backend.fetch)
        with pytest.raises(RuntimeError):
            cache.move_sent("a")
        assert cache.state.pending == ()

    @pytest.mark.parametrize(
        ("act", "says"),
        [
            (lambda cache: cache.opened(None), "game_id: must be a string"),
            (lambda cache: cache.move_sent(["a"]), "game_id: must be a string"),
            (lambda cache: cache.your_turn(b"a"), "game_id: must be a string"),
            (lambda cache: cache.navigation(["a"]), "game_id: must be a string"),
            (lambda cache: cache.navigation(current=b"a"), "game_id: must be a string"),
            (lambda cache: cache.move_sent("a", version="1"), "version: must be a whole number"),
            (lambda cache: cache.move_failed(True), "game_id: must be a string"),  # noqa: FBT003
            (lambda cache: cache.opened("a", my_turn="yes"), "my_turn: must be True or False"),
            (lambda cache: cache.game_state("a", my_turn=None), "my_turn: must be True or False"),
            (lambda cache: cache.your_turn("a", version="2"), "version: must be a whole number"),
            (lambda cache: cache.your_turn("a", version=2.0), "version: must be a whole number"),
        ],
    )
    async def test_a_bad_argument_is_refused_and_changes_nothing(
        self, cache: WaitingCache, act: Callable[[Any], object], says: str
    ) -> None:
        """With what was wrong and what is allowed; nothing changes."""
        before = cache.state
        with pytest.raises(ConfigError, match=says):
            act(cache)
        assert cache.state == before

    @pytest.mark.parametrize("name", ["fetch", "sleep"])
    def test_a_function_that_cannot_be_called_is_refused_at_construction(self, name: str) -> None:
        """Found out where it is declared."""

        async def fetch() -> list[str]:
            return []

        options: dict[str, Any] = {"fetch": fetch, "sleep": asyncio.sleep} | {name: "no"}
        with pytest.raises(ConfigError, match=name):
            WaitingCache(options["fetch"], sleep=options["sleep"])

    async def test_game_ids_may_be_numbers(self) -> None:
        """Many backends number their games."""

        async def fetch() -> list[int]:
            return [3, 1, 2]

        async with WaitingCache(fetch) as cache:
            cache.start()
            await cache.settled()
            assert cache.navigation(1).games == (3, 2)
