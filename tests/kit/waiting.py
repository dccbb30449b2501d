"""A backend that a test answers for by hand, and the rules with their effects counted."""

import asyncio
from collections.abc import Callable

from stillfresh.systems.waiting import State, WaitingCache
from stillfresh.systems.waiting.model import Answered, Event, Failed, Pause, Refetch, Started
from stillfresh.systems.waiting.rules import step

__all__ = ["Backend", "Rules", "Sleeper", "until"]


class Rules:
    """The state after each event, and what was asked for since a test last looked."""

    def __init__(self, *pool: str, limit: int = 5) -> None:
        self.state = State(limit=limit)
        self.effects: list[Refetch | Pause] = []
        if pool:
            self.hear(Started(), Answered(pool))
            self.effects.clear()

    def hear(self, *events: Event) -> State:
        for event in events:
            self.state, effects = step(self.state, event)
            self.effects += effects
        return self.state

    def asked(self) -> int:
        """Refetches since the last time; with a snapshot is for the state to say."""
        count = sum(isinstance(effect, Refetch) for effect in self.effects)
        self.effects.clear()
        return count

    def answer(self, *pool: str) -> State:
        return self.hear(Answered(pool))

    def fail(self) -> State:
        return self.hear(Failed())


class Backend:
    """`fetch` waits until the test answers; or answers at once from `games`."""

    def __init__(self, *games: str) -> None:
        self.games = list(games)
        self.calls = 0
        self.down = False
        self.slow = False
        self._waiting: list[asyncio.Future[list[str]]] = []

    async def fetch(self) -> list[str]:
        self.calls += 1
        if self.down:
            raise ConnectionError("the backend is down")
        if not self.slow:
            return self.games[:5]
        future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return await future

    @property
    def in_flight(self) -> int:
        return sum(not future.done() for future in self._waiting)

    def answer(self, *games: str) -> None:
        self._waiting.pop(0).set_result(list(games))

    def fail(self, error: BaseException) -> None:
        self._waiting.pop(0).set_exception(error)


class Sleeper:
    """Notes how long, and returns when the test says so."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self._over = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._over.clear()
        await self._over.wait()

    def wake(self) -> None:
        self._over.set()


async def until(cache: WaitingCache, holds: Callable[[], bool], within: float = 30) -> None:
    """Looks again whenever the cache changes."""
    changed = asyncio.Event()
    unsubscribe = cache.on_changed(lambda _: changed.set())
    try:
        async with asyncio.timeout(within):
            while not holds():
                changed.clear()
                await changed.wait()
    finally:
        unsubscribe()
