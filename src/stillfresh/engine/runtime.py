"""What the resources of an open cache share: its store, clocks and tasks."""

import asyncio
from collections.abc import Awaitable, Callable

from stillfresh.clock import Clock
from stillfresh.engine.loader import Tasks
from stillfresh.engine.model import Hook
from stillfresh.engine.news import News
from stillfresh.engine.spans import Stopwatch, TimedStore
from stillfresh.engine.threads import LoaderThreads
from stillfresh.stores.contract import Record, Store


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
    ) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        # Timing a step that does not wait would take as long as the step.
        is_timed = hooks or not store.never_waits
        self.store = TimedStore(store, hooks, times) if is_timed else store
        self.hooks = hooks
        read_now = store.read_now
        self.read_now: Callable[..., dict[str, Record]] | None
        self.read_now = read_now if store.reads_inline else None
        """Reads inline, if the store can; for hits, so it is not timed."""
        # The same for a thread, which can wait for a round trip.
        self.read_in_thread = read_now if store.reads_in_threads else self.read_now
        self.clock = clock
        self.sleep = sleep
        self.dice = dice
        self.grace = grace  # seconds for its tasks to end when the cache closes
        self.threads = LoaderThreads()
        self.news = None

    async def end(self, grace: float) -> None:
        began = self.loop.time()
        await super().end(grace)
        await self.threads.end(max(0.0, began + grace - self.loop.time()))
