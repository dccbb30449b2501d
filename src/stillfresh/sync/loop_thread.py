"""The event loop of code that has none: one thread for all the SyncCaches of a process.

The thread starts when the first cache is used, and again in a forked child. It ends when the last
cache closes, or when the interpreter exits.

A fork copies only the thread that forks. So before a fork, `hold` makes the loop thread rest
between two steps, where it holds no lock; after the fork, `go_on` lets the parent's thread
continue. In the child the thread does not exist: `forked` ends the calls that waited for it.
"""

import asyncio
import atexit
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import copy_context
from typing import Any, Final, NoReturn, Protocol, TypeVar

from stillfresh.engine.thread_face import ThreadCall
from stillfresh.errors import NotOpen, StillfreshError
from stillfresh.forks import hold_for_forks, tell_of_forks
from stillfresh.turns import FORKED, THIS_THREAD, SharedLoop

T = TypeVar("T")

REST: Final = 5.0
"""Seconds that a fork, or the end, waits for the loop's turn to end."""

SHALLOW: Final = 200
"""Frames. A stack with fewer has room for a load in any case."""
NEEDED: Final = 200
"""Frames that a load takes at most, beside its loader's own."""

logger = logging.getLogger(__name__)


class LoopThread:
    """One event loop, in a daemon thread of its own."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._loop = SharedLoop()
        self._stop: asyncio.Event
        self._calls: set[ThreadCall[Any]] = set()
        self._rested = self._go_on = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stillfresh-loop", daemon=True)
        self._thread.start()
        self._started.wait()
        hold_for_forks(self)

    def _run(self) -> None:
        self._loop.turn.take()
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        finally:
            self._loop.turn.give()
        for call in tuple(self._calls):  # later callers find a closed loop
            call.end(_raise_closed)

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._started.set()
        await self._stop.wait()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the coroutine. While this thread waits, it runs its own loads."""
        _check_stack()
        call: ThreadCall[T] = ThreadCall()
        self._calls.add(call)
        try:
            self._begin(call, work)
            return call.wait()
        except BaseException:
            call.leave_from(self._loop)
            raise
        finally:
            self._calls.discard(call)

    def run_here(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The same, as far as possible in the calling thread: it takes the turn of the loop."""
        _check_stack()
        call: ThreadCall[T] = ThreadCall()
        self._calls.add(call)
        try:
            with self._loop.borrowed():
                call.drive(self._loop, work)
            return call.wait()
        except BaseException:
            call.leave_from(self._loop)
            raise
        finally:
            self._calls.discard(call)

    def turn(self) -> AbstractContextManager[None]:
        """Inside the block the calling thread has the loop's turn."""
        if threading.current_thread() is self._thread:
            return nullcontext()
        return self._loop.borrowed()

    def is_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """True if this thread runs that loop."""
        return self._loop is loop

    def _begin(self, call: ThreadCall[T], work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        def begin() -> None:
            if self._stop.is_set():
                call.end(_raise_closed)
            else:
                call.begin(work)

        try:
            self._loop.call_soon_threadsafe(begin, context=copy_context())
        except RuntimeError:  # the loop is closed
            _raise_closed()

    def stop(self) -> None:
        """End the loop, and wait for its thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(REST)

    def hold(self) -> None:
        """Before a fork: wait, so that the thread is not in the middle of a step with a lock."""
        self._rested = threading.Event()
        self._go_on = threading.Event()
        if THIS_THREAD.has_turn:  # this thread has the turn, so the loop's thread waits
            return
        if threading.current_thread() is not self._thread:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_rest, self._rested, self._go_on)
                self._rested.wait(REST)

    def go_on(self) -> None:
        """After a fork, in the parent: the thread continues."""
        self._go_on.set()

    def forked(self) -> None:
        """In the child: its thread does not exist here."""
        self._loop.turn.is_lost = True
        for call in tuple(self._calls):
            call.end(_raise_lost)


def _check_stack() -> None:
    """Raise RecursionError if a load would not have room on this thread's stack.

    In the middle of a load the error would leave it half done, and its key under way for ever.
    """
    try:
        sys._getframe(SHALLOW)  # noqa: SLF001 (there is no other way, and all our Pythons have it)
    except ValueError:  # the stack is not so deep
        return
    try:
        _descend(NEEDED)
    except RecursionError:
        raise RecursionError(
            "cached functions call one another too deeply for Python's stack; "
            "call the innermost first, or raise the limit with sys.setrecursionlimit()"
        ) from None


def _descend(frames: int) -> None:
    if frames:
        _descend(frames - 1)


def _rest(rested: threading.Event, go_on: threading.Event) -> None:
    rested.set()
    go_on.wait()


def _raise_closed() -> NoReturn:
    raise NotOpen("the cache was closed while this thread called it; open it again")


def _raise_lost() -> NoReturn:
    raise StillfreshError(FORKED)


class Closable(Protocol):
    """A cache that is closed at exit."""

    def close(self) -> None: ...


class SyncProcess:
    """The open caches of this process, and their loop thread."""

    def __init__(self) -> None:
        self.loop: LoopThread | None = None
        self.open: set[Closable] = set()
        self._lock = threading.Lock()

    def enter(self, cache: Closable) -> tuple[LoopThread, bool]:
        """The loop thread, for a cache that is about to be used; True if it was not in use."""
        with self._lock:
            if self.loop is None and sys.is_finalizing():
                # Python has ended its threads, and would wait for ever for a new one to start.
                raise NotOpen("Python is exiting, and a SyncCache cannot be opened any more")
            is_new = cache not in self.open
            self.open.add(cache)
            if self.loop is None:
                self.loop = LoopThread()
                tell_of_forks(self)
                atexit.register(self._exit)
            return self.loop, is_new

    def leave(self, cache: Closable) -> None:
        """The cache is closed. The last one ends the thread."""
        with self._lock:
            self.open.discard(cache)
            loop = None
            if not self.open:
                loop = self.loop
                self.loop = None
        if loop is not None:  # outside the lock: stopping waits for the thread
            atexit.unregister(self._exit)
            loop.stop()

    def forked(self) -> None:
        """In the child: a parent's thread may have held the lock."""
        self._lock = threading.Lock()
        self.open.clear()
        if self.loop is not None:
            self.loop = None
            atexit.unregister(self._exit)

    def _exit(self) -> None:
        for cache in tuple(self.open):
            try:
                cache.close()
            except Exception:
                logger.exception("a cache could not be closed at exit")


PROCESS: Final = SyncProcess()
