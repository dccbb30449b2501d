"""What the resources of an open cache share: its store, clocks and tasks."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Protocol, TypeAlias

from stillfresh.clock import Clock
from stillfresh.engine.model import Hook
from stillfresh.engine.news import News
from stillfresh.engine.spans import Stopwatch, TimedStore
from stillfresh.engine.threads import LoaderThreads
from stillfresh.stores import capabilities_of
from stillfresh.stores.contract import Record, Store
from stillfresh.tasks import Tasks
from stillfresh.turns import TICK

ReadNow: TypeAlias = Callable[..., dict[str, Record]]


class Startable(Protocol):
    """Something that starts if a load is not over soon."""

    def start(self) -> None: ...


class ThreadGuards:
    """The guards of loads whose loaders run in waiting threads.

    Most loaders are over in less than a tick. So there is one look a tick, at most, for all of
    them, and only the guards that are still here then are started.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._guards: dict[Startable, None] = {}
        self._is_look_planned = False

    def add(self, guard: Startable) -> None:
        self._guards[guard] = None
        if not self._is_look_planned:
            self._is_look_planned = True
            self._loop.call_later(TICK, self._look)

    def discard(self, guard: Startable) -> None:
        self._guards.pop(guard, None)

    def _look(self) -> None:
        self._is_look_planned = False
        guards = self._guards
        self._guards = {}
        for guard in guards:
            guard.start()


class Runtime(Tasks):
    """What all resources of a cache share while it is open."""

    news: News | None

    def __init__(
        self,
        store: Store,
        hooks: tuple[Hook, ...],
        times: dict[str, Stopwatch],
        *,
        clock: Clock,
        sleep: Callable[[float], Awaitable[object]],
        dice: Callable[[], float],
        grace: float,
        load_context: Callable[[], Context] = Context,
        is_timed: bool = True,
    ) -> None:
        """`is_timed`: False for a store whose steps nobody wants to see."""
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.new_generation = store.new_generation
        """Draws the generation of a copy that is to be put. It is no step, so it is not timed."""
        can = capabilities_of(store)
        self.store = store
        # Timing a step that does not wait would take as long as the step.
        if is_timed and (hooks or can.process is None):
            self.store = TimedStore(store, hooks, times)
        self.can = capabilities_of(self.store)
        """What the store can do beside the contract."""
        self.runs_in_threads = can.waits_in_threads
        """A thread without an event loop may run the engine itself (`turns.py`)."""
        self.hooks = hooks
        self.read_now: ReadNow | None = None if can.inline is None else can.inline.read_now
        """Reads inline, if the store can; for hits, so it is not timed."""
        self.read_in_thread: ReadNow | None = self.read_now
        """The same for a thread, which can wait for a round trip.

        With hooks there is none: they are told one thread at a time, which needs the loop's turn.
        """
        if self.can.threads is not None and not hooks:
            self.read_in_thread = self.can.threads.read_in_thread
        self.clock = clock
        self.sleep = sleep
        self.dice = dice
        self.grace = grace  # seconds for its tasks to end when the cache closes
        self.load_context = load_context
        """Makes the context of a load. It is empty, as the load may outlive its callers."""
        self.threads = LoaderThreads()
        self.thread_guards = ThreadGuards(self.loop)
        self.news = None

    def abandon(self) -> None:
        """Cancel all tasks, and wait for nothing."""
        self.cancel()
        self.threads.dismiss()

    async def end(self, grace: float) -> None:
        began = self.loop.time()
        await super().end(grace)
        await self.threads.end(max(0.0, began + grace - self.loop.time()))
