"""Tasks that somebody looks after: none is forgotten when its owner closes.

An `EagerTask` runs its first step at once, inside the caller's step. Work that does not wait has
then ended, without a turn of the event loop. It is a task of its own all the same: a time-out, a
task group or a cancellation inside it does not touch the caller.
"""

import asyncio
import logging
import sys
from asyncio import futures, tasks
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any, Final, Generic, Self, TypeVar

from msgspec import Struct

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """Tasks that closing cancels, and tasks that it waits for."""

    def __init__(self) -> None:
        self._cancelled: set[asyncio.Task[Any]] = set()
        self._awaited: set[asyncio.Future[Any]] = set()
        self._blocks: set[AwaitedBlock] = set()

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
        hide_from_run(task)
        return task

    def waited_for(self) -> "AwaitedBlock":
        """Inside the block a caller's task or thread works, and closing waits for it."""
        return AwaitedBlock(self._blocks)

    def begin(
        self, work: Coroutine[Any, Any, Any], context: Context, *, waits: bool = False
    ) -> "EagerTask | None":
        """Start a task that closing waits for. Its first step runs before this returns.

        None: it has ended in that step. If not, its work must call `is_ending` in its last one.
        `waits`: its first step runs in the next turn of the loop.
        """
        loop = asyncio.get_running_loop()
        task = EagerTask(work, loop, context, waits=waits)
        if task.done():
            return None
        self._awaited.add(task)
        return task

    def stop_awaiting(self, task: "EagerTask") -> None:
        """This is the last step of a task that `begin` has started: closing need not wait for it.

        A done-callback would take a call in the next turn of the loop.
        """
        self._awaited.discard(task)

    def cancel(self) -> None:
        """Cancel the tasks that closing cancels."""
        for task in self._cancelled:
            task.cancel()

    async def end(self, grace: float) -> None:
        self.cancel()
        busy = self._cancelled | self._awaited | {block.ended() for block in self._blocks}
        if not busy:
            return
        _, late = await asyncio.wait(busy, timeout=grace)
        for task in late:
            logger.error("still running %g s after close: %r", grace, task)


class Ending(Struct, eq=False):
    """The end of some work, for others of the same loop to wait for.

    Mostly nobody does, so there is a future only if somebody asks for it.
    """

    _future: asyncio.Future[None] | None = None
    _is_over: bool = False

    def future(self) -> "asyncio.Future[None]":
        """Return the future that is done when the work is over. Call it on the loop."""
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
            if self._is_over:
                self._future.set_result(None)
        return self._future

    def note(self) -> None:
        """The work is over."""
        self._is_over = True
        future = self._future
        if future is not None and not future.get_loop().is_closed():
            future.set_result(None)


class AwaitedBlock(Struct, eq=False):
    """The block of `Tasks.waited_for`."""

    _blocks: "set[AwaitedBlock]"
    """Those that are entered now."""
    _end: Ending | None = None

    def __enter__(self) -> Self:
        self._blocks.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """From now on closing waits."""
        self._blocks.add(self)

    def leave(self) -> None:
        """Closing need not wait, until it is entered again."""
        self._blocks.discard(self)
        end = self._end
        if end is not None:
            self._end = None
            end.note()

    def ended(self) -> "asyncio.Future[None]":
        """On the loop: done when the block is left."""
        if self._end is None:
            self._end = Ending()
        return self._end.future()


def _tracked_task(
    tracked: set[Any], work: Coroutine[Any, Any, Any], context: Context | None
) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(work, context=context)
    tracked.add(task)
    task.add_done_callback(tracked.discard)
    return task


def hide_from_run(task: asyncio.Task[Any]) -> None:
    """`asyncio.run` cancels at its end all tasks that it knows. It shall not know this one."""
    tasks._unregister_task(task)  # noqa: SLF001 (documented for code that makes tasks)
    if HAS_EAGER_TASKS:  # in its first step it is in another list
        _unregister_eager_task(task)


def show_to_run(task: asyncio.Task[Any]) -> None:
    """`asyncio.run` may cancel this task again."""
    tasks._register_task(task)  # noqa: SLF001 (documented for code that makes tasks)


HAS_EAGER_TASKS: Final = sys.version_info >= (3, 12)
_unregister_eager_task: Final[Any] = getattr(tasks, "_unregister_eager_task", None)
_BASE: Final[Any] = asyncio.Task if HAS_EAGER_TASKS else tasks._PyTask  # type: ignore[attr-defined]  # noqa: SLF001


class EagerTask(_BASE):  # type: ignore[misc]
    """A task whose first step runs while it is made, unless `waits`."""

    def __init__(
        self,
        work: Coroutine[Any, Any, Any],
        loop: asyncio.AbstractEventLoop,
        context: Context,
        *,
        waits: bool = False,
    ) -> None:
        self.is_ended_by_loop = False
        """It was cancelled from outside the running loop, as `asyncio.run` does at its end."""
        if waits:
            super().__init__(work, loop=loop, context=context)
        elif HAS_EAGER_TASKS:
            super().__init__(work, loop=loop, context=context, eager_start=True)
        else:
            self._begin(work, loop, context)

    def _begin(
        self, work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop, context: Context
    ) -> None:
        """What `eager_start` does from Python 3.12 on, by asyncio's hooks for tasks of other kinds.

        The running task leaves, the first step runs, and the running task comes back. The base
        class is private; Python 3.11 gets security fixes only, so it will stay as it is.
        """
        futures._PyFuture.__init__(self, loop=loop)  # type: ignore[attr-defined]  # noqa: SLF001
        self._name = "stillfresh"
        self._num_cancels_requested = 0
        self._must_cancel = False
        self._fut_waiter = None
        self._coro = work
        self._context = context
        running = tasks.current_task(loop)
        if running is not None:  # None in a callback of the loop
            tasks._leave_task(loop, running)  # noqa: SLF001
        try:
            context.run(self._Task__step)
        finally:
            if running is not None:
                tasks._enter_task(loop, running)  # noqa: SLF001

    def cancel(self, msg: object = None) -> bool:
        if asyncio._get_running_loop() is None:  # noqa: SLF001 (None, where others raise)
            self.is_ended_by_loop = True
        return bool(super().cancel(msg))


def is_cancelled() -> bool:
    """True if this task was cancelled; False if something that it awaits cancelled itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def forget_cancellations(task: asyncio.Task[Any]) -> None:
    """This task, which was cancelled, goes on. A cancellation that is still to come, comes here."""
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while task.cancelling():
        task.uncancel()


class SharedResult(Generic[T]):
    """The result of a task, for callers of which none takes the task along if it is cancelled.

    What `asyncio.shield` does, a turn of the event loop sooner: the task itself tells the callers,
    in its last step. `note_end` must be a done-callback of the task.
    """

    def __init__(self) -> None:
        self._callers: list[asyncio.Future[T]] = []
        self._work: Coroutine[Any, Any, T]

    def wait(self) -> "asyncio.Future[T]":
        """What one more caller waits for."""
        caller: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._callers.append(caller)
        return caller

    def of(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, None]:
        """The coroutine for the task: it does the work, and tells its result."""
        self._work = work
        return self._tell()

    async def _tell(self) -> None:
        result = await self._work
        for caller in self._callers:
            if not caller.done():
                caller.set_result(result)

    def note_end(self, task: "asyncio.Task[None]") -> None:
        """Tell callers that got no result the task's error, or cancel them with it."""
        self._work.close()  # it has not begun if the task was cancelled before its first step
        error = None if task.cancelled() else task.exception()
        for caller in self._callers:
            if caller.done():
                continue
            if error is None:
                caller.cancel()
            else:
                caller.set_exception(error)
                looked_at(caller)  # the caller may be cancelled before it looks


def looked_at(done: "asyncio.Future[Any]") -> None:
    """A done-callback that marks an error as seen if no caller waits for it any more."""
    if not done.cancelled():
        done.exception()
