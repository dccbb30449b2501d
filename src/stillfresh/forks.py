"""A fork copies open files, threads and event loops that are of no use in the child (E21, F2)."""

import os
from functools import cache
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """What is bound to the process that opened it."""

    def forked(self) -> None:
        """In the child: refuse everything from now on."""


_LIVE: WeakSet[Forkable] = WeakSet()


def tell_of_forks(one: Forkable) -> None:
    """Tell it in every child that is forked from now on."""
    _LIVE.add(one)
    _register()


@cache
def _register() -> None:
    """Once; not on import."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_tell)


def _tell() -> None:
    for one in tuple(_LIVE):
        one.forked()
