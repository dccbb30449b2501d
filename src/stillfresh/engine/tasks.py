"""The tasks of an open cache: none is forgotten, and none outlives it unnamed (E13)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any

from stillfresh.clock import Clock
from stillfresh.stores.contract import Record, Store

logger = logging.getLogger(__name__)


class Tasks:
    """Those that closing cancels, and those that it waits for."""

    def __init__(self) -> None:
        self._cancelled: set[asyncio.Task[Any]] = set()
        self._awaited: set[asyncio.Task[Any]] = set()

    def spawn(
        self, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Closing cancels it."""
        return _kept(self._cancelled, work, context)

    def child(
        self, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Its parent cancels it; closing waits for it."""
        return _kept(self._awaited, work, context)

    def step(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """As `child`; and `asyncio.run`, which cancels all tasks it knows, does not cut it off.

        A request to the store that is cut off may have been done, with nobody to know it.
        """
        task = self.child(work)
        asyncio.tasks._unregister_task(task)  # noqa: SLF001 (documented for those who make tasks)
        return task

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Done to its end, whatever becomes of who awaits it."""
        await asyncio.shield(self.step(work))

    async def end(self, grace: float) -> None:
        for task in self._cancelled:
            task.cancel()
        if not (busy := self._cancelled | self._awaited):
            return
        _, late = await asyncio.wait(busy, timeout=grace)
        for task in late:
            logger.error("still running %g s after close: %r", grace, task)


class Runtime(Tasks):
    """What all resources of a cache share while it is open."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        sleep: Callable[[float], Awaitable[object]],
        dice: Callable[[], float],
        grace: float,
    ) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.store = store
        self.read_now: Callable[..., dict[str, Record]] | None = (
            store.read_now if store.reads_inline else None
        )
        """Reads on the spot, where the store can."""
        self.clock = clock
        self.sleep = sleep
        self.dice = dice
        self.grace = grace
        """Seconds in which its tasks have to end when the cache closes."""
        self.context = Context()


def _kept(
    tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, Any], context: Context | None
) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(work, context=context)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def is_cancelled() -> bool:
    """True if somebody ended this task; False if the cancellation came out of what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def looked_at(done: "asyncio.Future[Any]") -> None:
    """A done-callback: a failure that all who waited have given up on is nobody's news."""
    if not done.cancelled():
        done.exception()
