"""Tasks that somebody looks after: none is forgotten when its owner closes."""

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from typing import Any

logger = logging.getLogger(__name__)


class Tasks:
    """Tasks that closing cancels, and tasks that it waits for."""

    def __init__(self) -> None:
        self._cancelled: set[asyncio.Task[Any]] = set()
        self._awaited: set[asyncio.Task[Any]] = set()

    def spawn(
        self, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Start a task that closing cancels.

        It runs in no caller's context, as it may outlive it.
        """
        return _tracked_task(self._cancelled, work, context or Context())

    def child(
        self, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Start a task that its parent cancels, and that closing waits for."""
        return _tracked_task(self._awaited, work, context)

    def step(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Like `child`, but a task that `asyncio.run` does not cancel at its end.

        A cancelled request to the store may have been done, and nobody would know.
        """
        task = self.child(work)
        asyncio.tasks._unregister_task(task)  # noqa: SLF001 (documented for those who make tasks)
        return task

    def cancel(self) -> None:
        """Cancel the tasks that closing cancels."""
        for task in self._cancelled:
            task.cancel()

    async def end(self, grace: float) -> None:
        self.cancel()
        if not (busy := self._cancelled | self._awaited):
            return
        _, late = await asyncio.wait(busy, timeout=grace)
        for task in late:
            logger.error("still running %g s after close: %r", grace, task)


def _tracked_task(
    tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, Any], context: Context | None
) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(work, context=context)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def is_cancelled() -> bool:
    """True if this task was cancelled; False if something that it awaits cancelled itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def looked_at(done: "asyncio.Future[Any]") -> None:
    """A done-callback that marks an error as seen if no caller waits for it any more."""
    if not done.cancelled():
        done.exception()
