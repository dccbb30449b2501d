"""The threads that run `def` loaders: the callers' own, and a pool for the rest.

A load that a thread waits for runs in that thread, where it would run without a cache. A load for
which no thread waits runs in the pool. The event loop decides which, and runs no loader itself.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, copy_context
from queue import SimpleQueue
from threading import Lock, Semaphore, Thread, current_thread, local
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from stillfresh.engine.model import Dropped
from stillfresh.engine.work import CALLER, CURRENT
from stillfresh.errors import NotOpen, error_text

if TYPE_CHECKING:
    from stillfresh.engine.load import Load

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Raised(NamedTuple):
    """What was raised: a future does not accept a StopIteration as its exception."""

    error: Exception


class Job(Generic[T]):
    """One call of a loader. The first thread that claims it runs it."""

    def __init__(self, work: Callable[[], T], load: "Load[Any, Any] | None" = None) -> None:
        """`load`: whose loader it calls, if any."""
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[T | Raised]
        self.outcome = self._loop.create_future()
        self._work = work
        self._load = load
        given = {} if load is None else copy_context().items()
        self._given = [(var, value) for var, value in given if var is not CALLER]
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
        """Run it. A loader below on this thread's stack can end only after this one."""
        outer = CURRENT.get()
        if outer is not None and self._load is not None:
            outer.threads[self] = self._load
        tokens = [(var, var.set(value)) for var, value in self._given]
        try:
            outcome: T | Raised = self._work()
        except Exception as exc:  # noqa: BLE001 (the load has failed; it is reported as such)
            outcome = Raised(exc)
        finally:
            for var, token in tokens:
                var.reset(token)
            if outer is not None:
                outer.threads.pop(self, None)
        self._tell(outcome)

    def drop(self, why: BaseException) -> None:
        """The thread was interrupted: this does not count as a failure of the upstream."""
        why_dropped = f"the thread that ran it was interrupted: {error_text(why)}"
        self._tell(Raised(Dropped(why_dropped)))

    def _tell(self, outcome: T | Raised) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no caller waits
            self._loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: T | Raised) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class Desk(local):
    """Where a waiting thread receives loads to run; one for all its calls, also nested ones."""

    def __init__(self) -> None:
        self.posts: SimpleQueue[Job[Any] | None] = SimpleQueue()


_DESK = Desk()


class ThreadCall(Generic[T]):
    """A thread's call of a coroutine on the event loop. While it waits, the thread runs loads."""

    def __init__(self) -> None:
        self._posts = _DESK.posts
        self._jobs: list[tuple[Job[Any], Callable[[Job[Any]], None]]] = []
        self._task: asyncio.Task[T] | None = None
        self._outcome: Callable[[], T] | None = None

    def begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """On the loop: start."""
        CALLER.set(self)
        self._task = asyncio.get_running_loop().create_task(work())
        self._task.add_done_callback(self._over)

    def leave(self) -> None:
        """On the loop: the thread no longer waits."""
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
        return any(not job.outcome.done() for job, _ in self._jobs)

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


async def in_caller(work: Callable[[], T]) -> T:
    """Run work in the thread that waits for this coroutine."""
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
        """Run the loader in a thread that waits for it, or in the pool; return its result."""
        job = Job(work, load)
        caller = _caller(load)
        if caller is not None:
            caller.ask(job, self._submit)
        else:
            self._submit(job, is_nested=not load.takes_place)
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
        waiter.caller for waiter in waiters if waiter.caller is not None
    ]
    return next((call for call in calls if not call.is_busy), calls[0] if calls else None)
