"""Events: subscribe returns the unsubscribe, and telling never breaks the teller."""

import logging

import pytest

from stillfresh.events import Events


def test_listeners_are_called_in_the_order_of_their_subscription() -> None:
    """Everyone who subscribed is told, first come first."""
    events, told = Events[str](), list[str]()
    events.subscribe(lambda event: told.append(f"first {event}"))
    events.subscribe(lambda event: told.append(f"second {event}"))
    events.emit("a")
    assert told == ["first a", "second a"]


def test_unsubscribing_ends_that_subscription_only() -> None:
    """A listener that subscribed twice is told twice, then once, then not at all."""
    events, told = Events[int](), list[int]()
    first, second = events.subscribe(told.append), events.subscribe(told.append)
    events.emit(1)
    first()
    first()
    events.emit(2)
    second()
    events.emit(3)
    assert told == [1, 1, 2]
    assert len(events) == 0


def test_a_listener_that_raises_is_logged_and_the_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One broken listener costs a log line, not the others' news."""
    events, told = Events[int](), list[int]()

    def broken(_event: int) -> None:
        raise RuntimeError("broken listener")

    events.subscribe(broken)
    events.subscribe(told.append)
    with caplog.at_level(logging.ERROR):
        events.emit(1)
    assert told == [1]
    assert "broken listener" in caplog.text


def test_a_listener_may_unsubscribe_while_it_is_called() -> None:
    """Listeners change during an emit; those subscribed when it began are told."""
    events, told = Events[int](), list[int]()

    def once(event: int) -> None:
        told.append(event)
        unsubscribe()

    unsubscribe = events.subscribe(once)
    events.subscribe(told.append)
    events.emit(1)
    events.emit(2)
    assert told == [1, 1, 2]
