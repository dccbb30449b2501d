"""A store whose steps run in threads that have the turn of an event loop (`stillfresh.turns`)."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

from stillfresh.stores import WrappedStore
from stillfresh.stores.contract import Store
from stillfresh.turns import SharedLoop

__all__ = ["ThreadStore", "driven"]

T = TypeVar("T")


def driven(loop: SharedLoop, work: Callable[[], Awaitable[T]]) -> T:
    """In this thread, to its end: it may wait here, but not suspend."""
    with loop.borrowed():
        coroutine = cast("Coroutine[Any, Any, T]", work())
        try:
            while True:
                assert coroutine.send(None) is None
        except StopIteration as end:
            result: T = end.value
            return result


class ThreadStore(WrappedStore):
    """Opened and closed on the event loop, as a SyncCache does it."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._loop = SharedLoop()

    async def step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        if name in {"open", "close"}:
            return await work()
        return await asyncio.to_thread(driven, self._loop, work)

    def end(self) -> None:
        self._loop.close()
