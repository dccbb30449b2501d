"""An event loop in virtual time: one thread, no sockets; ready callbacks run in any order.

Every callback belongs to an owner, the simulated process in whose name it was scheduled. An owner
can be paused (its callbacks wait) or killed (they never run).
"""

import asyncio
import contextvars
import heapq
import random
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

T = TypeVar("T")

WORLD: Final = 0
"""The owner of everything outside processes: the network, the store, the scenario."""
ROUNDS: Final = 100
TASKS: Final = (asyncio.Task, asyncio.tasks._PyTask)  # type: ignore[attr-defined]  # noqa: SLF001
"""Both classes: of Python 3.11, a task that begins at once is of the second."""


class Deadlock(Exception):
    """A task waits, and nothing can ever run again."""


class ReadyHandle(NamedTuple):
    """A callback that is ready; a task has at most one at a time."""

    task: int
    number: int
    owner: int
    handle: asyncio.Handle


class VirtualLoop(asyncio.BaseEventLoop):
    """`dice` chooses the next callback; without it, they run in the order in which they came."""

    def __init__(self, dice: random.Random | None) -> None:
        super().__init__()
        self.owner = WORLD
        self.steps = 0
        self.errors: list[tuple[int, str]] = []
        """Errors that no code handled, with their owners."""
        self.tasks: dict[asyncio.Task[Any], tuple[int, int]] = {}
        """Tasks that have not ended: their number and their owner."""
        self._dice = dice
        self._now = 0.0
        self._count = 0
        self._queue: list[ReadyHandle] = []
        self._timers: list[tuple[float, int, int, asyncio.TimerHandle]] = []
        self._paused: dict[int, list[ReadyHandle]] = {}
        self._dead: dict[int, list[ReadyHandle]] = {}
        """Callbacks of killed owners, which are dropped at the end."""
        self._is_ending = False

    def time(self) -> float:
        return self._now

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self  # noqa: SLF001 (a loop's own business)

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, list(args), self, context)
        task = getattr(callback, "__self__", None)
        number = 0
        if isinstance(task, TASKS) and not task.done():
            if task not in self.tasks:
                self._adopt(task)
            number = self.tasks[task][0] if self._dice is not None else 0
        self._queue.append(ReadyHandle(number, self._next(), self.owner, handle))
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, list(args), self, context)
        heapq.heappush(self._timers, (when, self._next(), self.owner, handle))
        return handle

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
        **options: Any,  # noqa: ANN401 (newer Pythons have more)
    ) -> asyncio.Task[T]:
        return super().create_task(coro, name=name, context=context, **options)

    def _adopt(self, task: asyncio.Task[Any]) -> None:
        """A new task has its first callback. It need not come from `create_task`."""
        number = self._next()
        if task.get_name().startswith("Task-"):
            task.set_name(f"task-{number}")
        self.tasks[task] = number, self.owner
        task.add_done_callback(lambda done: self.tasks.pop(done, None))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_ending:
            error = context.get("exception")
            who = context.get("task") or context.get("future") or context.get("handle")
            self.errors.append((self.owner, f"{context['message']}: {error!r} of {who!r}"))

    def run_in_executor(self, *_: object) -> NoReturn:
        raise RuntimeError("a simulation has one thread: nothing can run in an executor")

    @contextmanager
    def acting(self, owner: int) -> Iterator[None]:
        """Callbacks that are scheduled in the block belong to this owner."""
        before = self.owner
        self.owner = owner
        try:
            yield
        finally:
            self.owner = before

    def pause(self, owner: int) -> None:
        self._paused.setdefault(owner, [])

    def resume(self, owner: int) -> None:
        self._queue += self._paused.pop(owner, [])

    def kill(self, owner: int) -> None:
        """Stop it in the middle of its work: no callback of it runs again, not even cleanup."""
        self._dead[owner] = self._paused.pop(owner, [])

    def run(self, main: Coroutine[Any, Any, T], after_step: Callable[[], None]) -> T:
        """Run until `main` has ended; `after_step` is called after every callback."""
        with self.running():
            task = self.create_task(main, name="scenario")
            while not task.done():
                self._step(self._choose())
                after_step()
            return task.result()

    def advance(self, until: float) -> None:
        """Inside `running()`: run everything that is due until then, and set the time to it."""
        while True:
            while self._queue:
                ready = self._queue
                self._queue = []
                for callback in ready:
                    if not callback.handle.cancelled():
                        callback.handle._run()  # noqa: SLF001
            if not self._timers or self._timers[0][0] > until:
                break
            self._now = max(self._now, self._timers[0][0])
            self._fire()
        self._now = max(self._now, until)

    def end(self) -> None:
        """Cancel all tasks that are left, also of killed owners, and let them end."""
        self._is_ending = True
        for left in (*self._dead.values(), *self._paused.values()):
            self._queue += left
        self._dead.clear()
        self._paused.clear()
        with self.running():
            for _ in range(ROUNDS):
                if not self.tasks:
                    break
                for task in tuple(self.tasks):
                    task.cancel()
                with suppress(Deadlock):
                    for _ in range(10 * ROUNDS):
                        self._step(self._choose())
        self.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside the block, it is this thread's running loop."""
        asyncio._set_running_loop(self)  # noqa: SLF001
        try:
            yield
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001

    def _step(self, chosen: ReadyHandle) -> None:
        self.steps += 1
        self.owner = chosen.owner
        try:
            chosen.handle._run()  # noqa: SLF001
        finally:
            self.owner = WORLD

    def _choose(self) -> ReadyHandle:
        while True:
            self._fire()
            if self._queue:
                break
            if not self._timers:
                raise Deadlock("nothing is left to run")
            self._now = max(self._now, self._timers[0][0])
        if self._dice is None:
            return self._queue.pop(0)
        # By the task's number: the order in which a set gave them differs from run to run.
        self._queue.sort(key=lambda callback: (callback.task, callback.number))
        return self._queue.pop(self._dice.randrange(len(self._queue)))

    def _fire(self) -> None:
        """Make due timers ready; set callbacks of paused and killed owners aside."""
        if not self._queue and not (self._timers and self._timers[0][0] <= self._now):
            return
        ready = self._queue
        self._queue = []
        while self._timers and self._timers[0][0] <= self._now:
            _, number, owner, handle = heapq.heappop(self._timers)
            ready.append(ReadyHandle(0, number, owner, handle))
        aside = {**self._paused, **self._dead}
        for callback in ready:
            if not callback.handle.cancelled():
                aside.get(callback.owner, self._queue).append(callback)

    def _next(self) -> int:
        self._count += 1
        return self._count
