"""The threads that run `def` loaders: the callers' own, and a pool for the rest.

A load that a thread waits for runs in that thread, where it would run without a cache. A load for
which no thread waits runs in the pool. The event loop runs no loader itself.

A thread that runs the engine itself (`turns.py`) calls the loader in the middle of the load, and
nobody else is asked. Otherwise the load runs on the event loop, which decides which thread it asks.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Generator
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial
from queue import SimpleQueue
from threading import Lock, Semaphore, Thread, current_thread, local
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from stillfresh.engine.model import Dropped
from stillfresh.engine.work import CALLER, CURRENT
from stillfresh.errors import NotOpen, StillfreshError, error_text
from stillfresh.tasks import AwaitedBlock
from stillfresh.turns import (
    FORKED,
    THIS_THREAD,
    SharedLoop,
    TurnLost,
    outside,
    signals_let_through,
)

if TYPE_CHECKING:
    from stillfresh.engine.load import Load

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Raised(NamedTuple):
    """What was raised: a future does not accept a StopIteration as its exception."""

    error: Exception


class LoaderCall(Generic[T]):
    """A call of a function of the user, with the variables of the load that needs it."""

    __slots__ = ("_given", "_load", "_work")

    def __init__(self, work: Callable[[], T], load: "Load[Any, Any] | None" = None) -> None:
        """`load`: whose loader it calls, if any."""
        self._work = work
        self._load = load
        self._given: dict[ContextVar[Any], Any] = {}
        if load is not None:
            self._given.update(copy_context())
            self._given.pop(CALLER, None)

    def run(self) -> T:
        """Call it. A loader below on this thread's stack can end only after this one.

        It runs in a copy of the thread's context, so that a signal's handler that raises between
        two steps here cannot leave the load's variables in the thread.
        """
        outer = CURRENT.get()
        context = copy_context()
        for variable, value in self._given.items():
            context.run(variable.set, value)
        try:
            if outer is not None and self._load is not None:
                outer.threads[self] = self._load
            return context.run(self._work)
        finally:
            if outer is not None:
                outer.threads.pop(self, None)
            _take_over(context, self._given)


class Job(Generic[T]):
    """A call that the loop asks of a thread. The first thread that claims it runs it."""

    def __init__(self, work: Callable[[], T], load: "Load[Any, Any] | None" = None) -> None:
        """`load`: whose loader it calls, if any."""
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[T | Raised]
        self.outcome = self._loop.create_future()
        self._call = LoaderCall(work, load)
        self._unclaimed = Lock()

    async def result(self) -> T:
        outcome = await self.outcome
        if isinstance(outcome, Raised):
            raise outcome.error
        return outcome

    def claim(self) -> bool:
        """True for one thread, while the result is still wanted."""
        return self._unclaimed.acquire(blocking=False) and not self.outcome.done()

    def run(self) -> None:
        """Call it, and tell the loop how it ended."""
        try:
            outcome: T | Raised = self._call.run()
        except Exception as exc:  # noqa: BLE001 (the load has failed; it is reported as such)
            outcome = Raised(exc)
        self._tell(outcome)

    def drop(self, why: BaseException) -> None:
        """The thread was interrupted: this does not count as a failure of the upstream."""
        self._tell(Raised(_dropped(why)))

    def _tell(self, outcome: T | Raised) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no caller waits
            self._loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: T | Raised) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


def _dropped(why: BaseException) -> Dropped:
    return Dropped(f"the thread that ran it was interrupted: {error_text(why)}")


class Desk(local):
    """Where a waiting thread receives loads to run; one for all its calls, also nested ones."""

    def __init__(self) -> None:
        self.posts: SimpleQueue[Job[Any] | None] = SimpleQueue()


_DESK = Desk()


class Driving(local):
    """The call whose coroutine this thread runs itself."""

    call: "ThreadCall[Any] | None" = None


DRIVING: Final = Driving()


def note_interruption(error: BaseException) -> bool:
    """Raise this in the calling thread when its call has ended; False in a loop's own thread.

    A task would keep an exception such as gevent's, and the caller would never see it.
    """
    call = DRIVING.call
    if call is None or not THIS_THREAD.has_turn:
        return False
    call.interruption = error
    return True


class ThreadCall(Generic[T]):
    """A thread's call of a coroutine on the event loop. While it waits, the thread runs loads."""

    def __init__(self) -> None:
        self._posts = _DESK.posts
        self._jobs: list[tuple[Job[Any], Callable[[Job[Any]], None]]] = []
        self._task: asyncio.Task[T] | None = None
        self._outcome: Callable[[], T] | None = None
        self.interruption: BaseException | None = None
        """What ended a loader or a step that this thread ran itself, to end the program."""
        self._thread_context: Context
        """A copy of the thread's own: a loader cannot enter that while the engine runs below it."""
        self._has_run_loader = False
        self._runs_loader = False
        self.awaited: AwaitedBlock
        """Closing waits for the steps of its loads, but not for their loaders."""

    def begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """On the loop: start."""
        CALLER.set(self)
        self._task = asyncio.get_running_loop().create_task(work())
        self._task.add_done_callback(self._over)

    def drive(self, loop: SharedLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """In the thread, which has the loop's turn: run until something must be waited for.

        What is left then becomes a task of the loop.
        """
        outer = DRIVING.call
        DRIVING.call = self
        self._thread_context = copy_context()
        try:
            self._drive(loop, work)
        except TurnLost:
            raise StillfreshError(FORKED) from None
        finally:
            DRIVING.call = outer
            if self._has_run_loader:
                _take_over(self._thread_context)
            if isinstance(self.interruption, TurnLost):
                raise StillfreshError(FORKED) from None
            if self.interruption is not None:
                raise self.interruption

    def _drive(self, loop: SharedLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        context = copy_context()
        context.run(CALLER.set, self)
        coroutine = context.run(work)
        awaited = None
        try:
            while awaited is None:
                awaited = context.run(coroutine.send, None)
                if awaited is None:  # it only wants others to have a turn
                    with outside():
                        pass
            if self.interruption is not None:  # it leaves before others have a turn
                awaited = context.run(coroutine.throw, asyncio.CancelledError())
        except StopIteration as end:
            result: T = end.value
            self._outcome = lambda: result
            return
        except asyncio.CancelledError:
            if self.interruption is None:
                raise
            return
        self._task = loop.create_task(_rest_of(coroutine, awaited), context=context)
        self._task.add_done_callback(self._over)

    def waits_for(self, load: "Load[Any, Any]") -> bool:
        """True if its thread waits until this load ends, however long that takes."""
        for work in load.works:
            for waiter in work.waiters:
                if waiter.caller is self and waiter.patience is None:
                    return True
        return False

    def run_loader(self, call: LoaderCall[Any]) -> Any:  # noqa: ANN401 (whatever the loader returns)
        """Run a loader in this thread, which runs the engine. It gives its turn back meanwhile."""
        self._has_run_loader = True
        self._runs_loader = True
        self.awaited.leave()
        try:
            with outside(), signals_let_through():
                return self._thread_context.run(call.run)
        except Exception:
            raise
        except BaseException as exc:  # it ends the call of the thread, not the load
            self.interruption = exc
            raise _dropped(exc) from exc
        finally:
            self.awaited.enter()
            self._runs_loader = False

    def leave_from(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the thread: it no longer waits."""
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _over(self, task: "asyncio.Task[T]") -> None:
        if not task.cancelled():
            task.exception()  # looked at, also if the thread has left
        for job, otherwise in self._jobs:
            if not job.outcome.done():
                otherwise(job)
        self.end(task.result)

    def end(self, outcome: Callable[[], T]) -> None:
        self._outcome = outcome
        self._posts.put(None)

    @property
    def is_busy(self) -> bool:
        return self._runs_loader or any(not job.outcome.done() for job, _ in self._jobs)

    def ask(self, job: Job[Any], otherwise: Callable[[Job[Any]], None]) -> None:
        """On the loop: let the thread run it; `otherwise` runs it if the thread leaves first."""
        unfinished = [entry for entry in self._jobs if not entry[0].outcome.done()]
        self._jobs = [*unfinished, (job, otherwise)]
        self._posts.put(job)

    def wait(self) -> T:
        """In the thread: run the loads that any of its calls receives, until this call ends."""
        job: Job[Any] | None = None
        try:
            while self._outcome is None:
                if (post := self._posts.get()) is not None and post.claim():
                    job = post
                    job.run()
                    job = None
        except BaseException as exc:
            if job is not None:
                job.drop(exc)
            raise
        try:
            return self._outcome()
        except asyncio.CancelledError:
            raise NotOpen("the cache was closed while this thread waited; open it again") from None


def _take_over(changed: Context, but: Collection[ContextVar[Any]] = ()) -> None:
    """Set the variables of this thread's context that a loader has set in a copy of it.

    `but`: variables that stay as they are here.
    """
    now = copy_context()
    for variable, value in changed.items():
        if variable not in but and (variable not in now or now[variable] is not value):
            variable.set(value)


def note_awaited(block: AwaitedBlock) -> None:
    """The call that this thread drives begins loads inside this block."""
    if DRIVING.call is not None:
        DRIVING.call.awaited = block


def is_interrupted() -> bool:
    """True if something has ended the call that this thread drives: it begins nothing more."""
    return DRIVING.call is not None and DRIVING.call.interruption is not None


class Begun(Generic[T]):
    """A coroutine that was begun outside a task, and what it waits for: a task can await it."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], awaited: object) -> None:
        self._coroutine = coroutine
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, T]:
        awaited = self._awaited
        while True:
            try:
                value = yield awaited
            except BaseException as exc:  # noqa: BLE001 (as `yield from` does)
                step = partial(self._coroutine.throw, exc)
            else:
                step = partial(self._coroutine.send, value)
            try:
                awaited = step()
            except StopIteration as end:
                result: T = end.value
                return result


async def _rest_of(coroutine: Coroutine[Any, Any, T], awaited: object) -> T:
    return await Begun(coroutine, awaited)


async def in_caller(work: Callable[[], T]) -> T:
    """Run work in the thread that waits for this coroutine."""
    if THIS_THREAD.has_turn:
        with outside(), signals_let_through():
            return work()
    call: ThreadCall[Any] = CALLER.get()
    job = Job(work)
    call.ask(job, lambda job: job.drop(KeyboardInterrupt()))
    return await job.result()


class LoaderThreads:
    """A cache's pool of daemon threads, started when needed, ended when the cache closes.

    A thread cannot be ended from outside. If its loader hangs, it keeps its place.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._most = 0
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._idle = Semaphore(0)
        self._threads: dict[Thread, asyncio.Future[None]] = {}

    def allow(self, threads: int) -> None:
        """Allow so many more threads, for a resource whose loader is a plain function."""
        self._most += threads

    async def call(self, work: Callable[[], object], load: "Load[Any, Any]") -> object:
        """Run the loader in a thread that waits for it, or in the pool; return its result.

        A StopIteration is returned as `Raised`: Python makes a RuntimeError of one that leaves a
        coroutine, and callers would look for the coroutine in a program that has none.
        """
        here = DRIVING.call if THIS_THREAD.has_turn else None
        if here is not None and here.waits_for(load):
            load.waits_in_thread()
            try:
                return here.run_loader(LoaderCall(work, load))
            except StopIteration as exc:
                return Raised(exc)
            finally:
                load.is_in_thread = False
        job = Job(work, load)
        caller = _caller(load)
        if caller is not None:
            caller.ask(job, self._submit)
        else:
            self._submit(job, is_nested=not load.takes_place)
        outcome = await job.outcome
        if isinstance(outcome, Raised) and not isinstance(outcome.error, StopIteration):
            raise outcome.error
        return outcome

    async def run(self, work: Callable[[], T]) -> T:
        """Run a call of the loader that no load needs, in the pool; return its result."""
        job: Job[T] = Job(work)
        self._submit(job)
        return await job.result()

    def _submit(self, job: Job[Any], *, is_nested: bool = False) -> None:
        """A load inside a load needs no place: it uses the place of the outer one."""
        self._jobs.put(job)
        if not self._idle.acquire(blocking=False) and (
            is_nested or len(self._threads) < self._most
        ):
            thread = Thread(target=self._work, name="stillfresh-loader", daemon=True)
            self._threads[thread] = self._loop.create_future()
            thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.claim():
                try:
                    Context().run(job.run)
                except BaseException as exc:  # noqa: BLE001 (SystemExit ends the load, not the pool)
                    job.drop(exc)
            del job
            self._idle.release()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._gone, current_thread())

    def _gone(self, thread: Thread) -> None:
        self._threads.pop(thread).set_result(None)
        thread.join()

    def dismiss(self) -> None:
        """Let each thread end when it has nothing more to run."""
        for _ in self._threads:
            self._jobs.put(None)

    async def end(self, grace: float) -> None:
        """End the pool. A loader that still runs after `grace` is left alone."""
        self.dismiss()
        if self._threads:
            await asyncio.wait(list(self._threads.values()), timeout=grace)
        for thread in self._threads:
            logger.error("a loader still runs %g s after close, in %s", grace, thread.name)


def _caller(load: "Load[Any, Any]") -> ThreadCall[Any] | None:
    """The thread to run it: the one with its own loader, an idle one, or any that waits for it."""
    waiters = [waiter for work in load.works for waiter in work.waiters]
    waiters.sort(key=lambda waiter: waiter is not load.works[0].by)
    calls: list[ThreadCall[Any]] = [
        waiter.caller
        for waiter in waiters
        if waiter.caller is not None and waiter.patience is None  # else it would have to wait
    ]
    return next((call for call in calls if not call.is_busy), calls[0] if calls else None)
