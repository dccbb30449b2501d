"""A fork copies open files, threads and event loops that are of no use in the child.

Threads that use them pause during the fork, so that the child finds no lock taken and no step half
done.
"""

import os
from functools import cache
from threading import Lock
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """An object that is bound to the process that opened it."""

    def forked(self) -> None:
        """In the child: refuse everything from now on, or start again."""


class Holdable(Forkable, Protocol):
    """An object that works in its own thread."""

    def hold(self) -> None:
        """In the parent, before the fork: return when its thread pauses."""

    def go_on(self) -> None:
        """In the parent, after the fork: continue."""


_LIVE: WeakSet[Forkable] = WeakSet()
_HELD: WeakSet[Holdable] = WeakSet()
_ONE_FORK = Lock()


def tell_of_forks(forkable: Forkable) -> None:
    """Call its `forked` in every child that is forked from now on."""
    _LIVE.add(forkable)
    _register()


def hold_for_forks(holdable: Holdable) -> None:
    """The same, and pause its thread during each fork."""
    _HELD.add(holdable)
    tell_of_forks(holdable)


@cache
def _register() -> None:
    """Once; not on import."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_tell)


def _before() -> None:
    _ONE_FORK.acquire()
    for holdable in tuple(_HELD):
        holdable.hold()


def _after() -> None:
    for holdable in tuple(_HELD):
        holdable.go_on()
    _ONE_FORK.release()


def _tell() -> None:
    _HELD.clear()
    for forkable in tuple(_LIVE):
        forkable.forked()
    _ONE_FORK.release()
