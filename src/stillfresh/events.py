"""Listeners and events: `subscribe` returns the unsubscribe; events are frozen and typed.

A listener that raises is logged, and the others still run.
"""

import logging
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

E = TypeVar("E")
Unsubscribe: TypeAlias = Callable[[], None]

logger = logging.getLogger(__name__)


class Events(Generic[E]):
    """The listeners for one kind of event."""

    __slots__ = ("_listeners",)

    def __init__(self) -> None:
        # Keyed by a token: a listener that subscribed twice is called twice, and each
        # unsubscribe ends its own subscription only.
        self._listeners: dict[object, Callable[[E], object]] = {}

    def subscribe(self, listener: Callable[[E], object]) -> Unsubscribe:
        """Call `listener` for each event, until the returned function is called."""
        token = object()
        self._listeners[token] = listener

        def unsubscribe() -> None:
            self._listeners.pop(token, None)

        return unsubscribe

    def emit(self, event: E) -> None:
        """Call every present subscriber, in the order in which they subscribed."""
        for listener in tuple(self._listeners.values()):
            try:
                listener(event)
            except Exception:
                logger.exception("listener %r failed on %r", listener, event)

    def __len__(self) -> int:
        return len(self._listeners)
