"""E20, T7: threads in the simulator: what callers of a SyncCache do, one thread at a time.

A simulated thread is a real one that runs only while the virtual loop waits for it, and stops where
it would block. So the product's own code hands calls to the loop and loads to threads, in an order
that the seed decides. What two threads do at the same instant is not simulated.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import pytest

from stillfresh import LoadFailed, StoreError
from stillfresh.engine import threads
from stillfresh.sync import SyncResource
from stillfresh.sync.loop_thread import LoopThread
from stillfresh.testing import Process, Version, World
from stillfresh.turns import SharedLoop
from tests.simulation.engine_scenarios import HOUR, KEYS

T = TypeVar("T")


class Over(SystemExit):
    """The simulation has ended."""


class SimulatedThread(threading.Thread):
    """Runs while the loop waits for it, in the name of the process that made it."""

    world: ClassVar[World]

    def __init__(self, target: Callable[[], object], **_: Any) -> None:
        super().__init__(target=target, daemon=True)
        self._loop = self.world.loop
        self.process = self.world.processes[self._loop.owner - 1]
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._raises: BaseException | None = None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.process.at_end(self._end)

    def start(self) -> None:
        super().start()
        self.wake()

    def wake(self, raises: BaseException | None = None) -> None:
        """It goes on soon; `raises`: where it stopped."""
        self._raises = raises or self._raises
        with self._loop.acting(self.process.number):
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self.is_alive():
            self._raises = Over() if self.world.is_over else self._raises
            self._go.release()
            self._stopped.acquire()

    def run(self) -> None:
        self._go.acquire()
        try:
            with suppress(Over):
                if self._raises is None:
                    super().run()
            self._loop.call_soon(self.ended.set_result, None)
        except Exception as exc:  # noqa: BLE001 (whatever it is, the simulation has failed)
            self._loop.call_soon(self.ended.set_exception, exc)
        finally:
            self._stopped.release()

    def stop(self) -> None:
        """In the thread: until it is woken."""
        if not isinstance(self._raises, Over):
            self._stopped.release()
            self._go.acquire()
        if (error := self._raises) is not None:
            self._raises = error if isinstance(error, Over) else None
            raise error

    def blocked(self, work: Coroutine[Any, Any, T]) -> T:
        """In the thread: what the loop makes of it meanwhile."""
        task = self._loop.create_task(work)
        task.add_done_callback(lambda _: self.wake())
        try:
            while not task.done():
                self.stop()
            return task.result()
        finally:
            task.cancel()

    def _end(self) -> None:
        self._raises = Over()
        self._go.release()
        self.join()


class Posts:
    """A `SimpleQueue` from which simulated threads read."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._readers: deque[SimulatedThread] = deque()

    def put(self, item: object) -> None:
        self._items.append(item)
        if self._readers:
            self._readers.popleft().wake()

    def get(self) -> Any:
        while not self._items:
            self._readers.append(current())
            current().stop()
        return self._items.popleft()


def current() -> SimulatedThread:
    thread = threading.current_thread()
    assert isinstance(thread, SimulatedThread)
    return thread


class SimulatedLoopThread(LoopThread):
    """The virtual loop in its place."""

    def __init__(self, world: World) -> None:
        self._loop = cast("SharedLoop", world.loop)
        self._stop, self._calls = asyncio.Event(), set()

    def call(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        """As `SyncCache.run` does."""
        return self.run(partial(function, *args, **options))


async def of_threads(world: World) -> None:
    """E20: threads call, load, nest and give up; the pool loads what nobody waits for."""

    async def app(process: Process) -> None:
        cache, run = (
            process.cache(inline=world.dice.random() < 0.3),
            SimulatedLoopThread(world).call,
        )

        @cache.batched("price", fresh_for=4, stale_for=6, max_batch=2, load_timeout=HOUR)
        def price(ids: list[str]) -> dict[str, Version | Exception]:
            return current().blocked(process.load("price", ids))

        @cache.batched("menu", fresh_for=2, stale_for=2, concurrency=1, load_timeout=HOUR)
        def menu(ids: list[str]) -> dict[str, Version | Exception]:
            for id_ in ids:
                read(process, prices, id_)
            return current().blocked(process.load("menu", ids))

        prices: SyncResource[str, Version] = SyncResource(run, price)
        menus: SyncResource[str, Version] = SyncResource(run, menu)
        some = [SimulatedThread(partial(use, process, it)) for it in (prices, prices, menus)]
        for thread in some:
            thread.start()
        await asyncio.gather(*(thread.ended for thread in some))

    SimulatedThread.world, patch = world, pytest.MonkeyPatch()
    world.process().at_end(patch.undo)
    patch.setattr(threads, "SimpleQueue", Posts)
    patch.setattr(threads, "Thread", SimulatedThread)
    world.launch(app, 2)


def use(process: Process, resource: SyncResource[str, Version]) -> None:
    """In a thread: one visitor."""
    world, thread = process.world, current()
    for _ in world.steps(12):
        thread.blocked(asyncio.sleep(world.dice.choice([0, 0.05, 0.5, 3.0])))
        key = world.dice.choice(KEYS)
        match world.dice.randrange(7):
            case 0 | 1:
                change(process, resource, key)
            case 2:
                with suppress(LoadFailed):
                    resource.refresh(key)
            case 3:
                impatient(process, resource, key)
            case _:
                read(process, resource, key)


def change(process: Process, resource: SyncResource[str, Version], key: str) -> None:
    began, versions = process.world.time(), process.world.change(resource.core.spec.kind, key)
    with suppress(StoreError):
        resource.invalidate(key)
        process.announced(resource.core.spec.kind, versions, began=began)


def impatient(process: Process, resource: SyncResource[str, Version], key: str) -> None:
    """Interrupted, as by Ctrl-C or a task's time limit, wherever it waits, also in a loader."""
    patience = process.world.dice.choice([0.001, 0.03, 0.4])
    interrupt = process.world.loop.call_later(patience, current().wake, KeyboardInterrupt())
    with suppress(KeyboardInterrupt):
        read(process, resource, key)
    interrupt.cancel()


def read(process: Process, resource: SyncResource[str, Version], key: str) -> None:
    reading = process.reading(resource.core.spec.kind, key)
    with suppress(LoadFailed):
        answer = resource.get(key)
        if answer.found:
            failed = answer.error is not None
            process.served(reading, answer.value, answer.verdict, failed=failed)
