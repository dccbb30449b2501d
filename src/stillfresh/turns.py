"""The turn of an event loop: which thread may run the code that belongs to the loop.

The engine is written for one thread, that of its event loop. In programs without an event loop
(`SyncCache`) the loop has a thread of its own, which mostly waits. While it waits, a calling thread
may take its *turn* and run the engine's coroutines itself. Nothing else of the engine runs
meanwhile, so nothing in the engine needs a lock.

- The loop's thread has the turn while it runs callbacks, and gives it back while it waits for
  events (`RestingSelector`).
- A thread has the turn inside `SharedLoop.borrowed()`. The loop counts as running in that thread.
- Whatever waits runs `outside()`, where the thread has given the turn back: a request to a server,
  a user's function. `THIS_THREAD.has_turn` says whether this thread may do that.
- An exception that a signal's handler raises in the middle could keep the turn for ever. So signals
  are held while a thread has borrowed the loop; a user's function lets them through.

What a borrowing thread schedules on the loop wakes the loop up. A timer does not, if the loop looks
at its timers before: while threads set timers, it does so every `TICK`.
"""

import asyncio
import selectors
from asyncio import tasks
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import Context
from threading import Lock, get_ident, local
from types import TracebackType
from typing import Any, Final, TypeVarTuple, Unpack

from stillfresh.errors import StillfreshError
from stillfresh.held_signals import HeldSignals, LetThrough

Ts = TypeVarTuple("Ts")

TICK: Final = 0.02
"""Seconds. A timer that a thread sets for a later time costs no switch of threads."""


FORKED: Final = "the process forked while this thread used the cache; call again in the child"


class TurnLost(BaseException):
    """In a forked child: the loop's thread is not there, and its connections are the parent's.

    No Exception, so that nothing of the engine takes it for a failure and goes on. The call that
    the thread drives raises a StillfreshError instead.
    """


class Turn:
    """One thread at a time has it. A thread that waits for it comes before the one that gave it."""

    def __init__(self) -> None:
        self._next = Lock()
        """Of the thread that is next; others queue for this."""
        self._taken = Lock()
        self.is_lost = False
        """True in a forked child: the loop's thread does not exist there."""

    def take(self) -> None:
        if self.is_lost:
            raise TurnLost(FORKED)
        with self._next:
            self._taken.acquire()

    def give(self) -> None:
        if not self.is_lost:
            self._taken.release()


class RestingSelector(selectors.DefaultSelector):
    """Gives the turn back while its loop waits for events."""

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self._turn = turn

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turn.give()
        try:
            return super().select(timeout)
        finally:
            self._turn.take()


class SharedLoop(asyncio.SelectorEventLoop):
    """An event loop whose turn other threads take while it waits.

    The thread that runs it must have taken its turn before, and gives it back afterwards.
    """

    def __init__(self) -> None:
        self.turn = Turn()
        self._runs_in = 0  # the thread's number
        self._looks_at = 0.0  # when it looks at its timers although nobody wakes it up; 0: never
        self._has_new_timers = False  # a thread has set one since the last look
        super().__init__(RestingSelector(self.turn))

    def borrowed(self) -> "Borrowed":
        """Inside the block this thread has the loop's turn, and the loop counts as running here."""
        return Borrowed(self)

    def run_forever(self) -> None:
        self._runs_in = get_ident()
        super().run_forever()

    async def shutdown_default_executor(self, *timeout: Any) -> None:  # noqa: ANN401 (passed on)
        """End the threads that looked up names of hosts.

        While the interpreter exits, they have ended already, and Python 3.12 starts no thread that
        could wait for them.
        """
        with suppress(RuntimeError):
            await super().shutdown_default_executor(*timeout)

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        if get_ident() == self._runs_in or not self.is_running():
            return super().call_soon(callback, *args, context=context)
        return self.call_soon_threadsafe(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        if get_ident() != self._runs_in:
            self._has_new_timers = True
            if not self._looks_at:
                self._look_in_a_tick()
                self.call_soon_threadsafe(bool)  # it must look at its timers
            elif when < self._looks_at:
                self.call_soon_threadsafe(bool)
        return timer

    def _look_in_a_tick(self) -> None:
        self._has_new_timers = False
        self._looks_at = self.time() + TICK
        super().call_at(self._looks_at, self._look)

    def _look(self) -> None:
        """The loop looks at its timers now. It does so again as long as threads set some."""
        self._looks_at = 0.0
        if self._has_new_timers:
            self._look_in_a_tick()

    def _check_thread(self) -> None:
        """In debug mode, asyncio refuses other threads. One that has the turn is none of them."""
        if THIS_THREAD.loop is not self:
            super()._check_thread()  # type: ignore[misc]


class BorrowingThread(local):
    """Which turn this thread has."""

    has_turn: bool = False
    """True while it has borrowed a loop's turn. False in a loop's own thread, also while that runs
    callbacks: it must never wait."""
    loop: SharedLoop | None = None
    outer: asyncio.AbstractEventLoop | None = None
    """The loop that runs in this thread otherwise."""
    held: HeldSignals | None = None
    """The signals that wait until this thread no longer borrows the loop."""


THIS_THREAD: Final = BorrowingThread()


class Borrowed(AbstractContextManager[None]):
    """The block of `SharedLoop.borrowed()`."""

    __slots__ = ("_held", "_loop", "_outer_held")

    def __init__(self, loop: SharedLoop) -> None:
        self._loop = loop
        self._held = HeldSignals()

    def __enter__(self) -> None:
        if THIS_THREAD.loop is not None:
            raise StillfreshError(
                "a hook, a codec or another function that a cache calls in the middle of its work "
                "has called a SyncCache; only loaders may do that"
            )
        self._held.__enter__()
        try:
            self._loop.turn.take()
        except TurnLost:
            self._held.__exit__()
            raise
        self._outer_held = THIS_THREAD.held
        THIS_THREAD.held = self._held
        THIS_THREAD.has_turn = True
        THIS_THREAD.loop = self._loop
        THIS_THREAD.outer = asyncio._get_running_loop()  # noqa: SLF001 (None, where others raise)
        asyncio._set_running_loop(self._loop)  # noqa: SLF001 (documented for event loops)

    def __exit__(self, *_: object) -> None:
        asyncio._set_running_loop(THIS_THREAD.outer)  # noqa: SLF001
        THIS_THREAD.has_turn = False
        THIS_THREAD.loop = None
        THIS_THREAD.outer = None
        THIS_THREAD.held = self._outer_held
        self._loop.turn.give()
        self._held.__exit__()


def signals_let_through() -> AbstractContextManager[None]:
    """Inside the block, which is `outside()` the turn, signals end a user's function at once."""
    signals = THIS_THREAD.held
    return LetThrough(signals) if signals is not None else nullcontext()


class outside:  # noqa: N801 (used as a function)
    """Inside the block this thread may wait: it has given the loop's turn back."""

    __slots__ = ("_loop", "_outer", "_task")

    def __enter__(self) -> None:
        loop = THIS_THREAD.loop
        if loop is None:
            raise RuntimeError("this thread has no turn to give back")
        if loop.turn.is_lost:
            raise TurnLost(FORKED)
        self._loop = loop
        self._outer = THIS_THREAD.outer
        self._task = asyncio.current_task(loop)
        if self._task is not None:
            tasks._leave_task(loop, self._task)  # noqa: SLF001 (documented for event loops)
        THIS_THREAD.has_turn = False
        THIS_THREAD.loop = None
        asyncio._set_running_loop(self._outer)  # noqa: SLF001
        loop.turn.give()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop = self._loop
        try:
            loop.turn.take()
        finally:  # without the turn, too: the stack that is left expects all this
            self._come_back(loop)

    def _come_back(self, loop: SharedLoop) -> None:
        THIS_THREAD.has_turn = True
        THIS_THREAD.loop = loop
        THIS_THREAD.outer = self._outer
        asyncio._set_running_loop(loop)  # noqa: SLF001
        if self._task is not None:
            tasks._enter_task(loop, self._task)  # noqa: SLF001
