"""WaitingCache: takes events, asks the rules, and does the refetches that they order.

It holds no policy. It belongs to one event loop. Every method except `settled` and `close` is done
when it returns; requests that it starts run in the background.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Self, TypeAlias

from stillfresh.checks import checked_flag, checked_function, is_whole
from stillfresh.errors import ConfigError, NotOpen, shown
from stillfresh.events import Events, Unsubscribe
from stillfresh.systems.waiting import rules
from stillfresh.systems.waiting.model import (
    Answered,
    Event,
    Failed,
    GameId,
    GameState,
    Invalidated,
    MoveFailed,
    MoveSent,
    Navigation,
    Opened,
    PauseOver,
    Pool,
    Reconnected,
    Refetch,
    Started,
    State,
    YourTurn,
)
from stillfresh.systems.waiting.rules_refetch import retry_pause
from stillfresh.tasks import is_cancelled

Fetch: TypeAlias = Callable[[], Awaitable[Iterable[GameId]]]

logger = logging.getLogger(__name__)


class WaitingCache:
    """The order of the games that wait for a player. Call `start` first.

    `fetch()` requests up to five ids from the backend, in its order.
    """

    def __init__(
        self, fetch: Fetch, *, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        self._fetch = checked_function("fetch", fetch, "an async function")
        self._sleep = checked_function("sleep", sleep, "an async function")
        self._state = State()
        self._tasks = set[asyncio.Task[None]]()
        self._pause: asyncio.Task[None] | None = None
        self._pauses = 0
        self._is_closed = False
        self._resting = asyncio.Event()
        self._resting.set()
        self._changed = Events["WaitingCache"]()

    @property
    def state(self) -> State:
        """Everything that is known, frozen: `pool`, `is_complete_from_server`, `snapshot`, …"""
        return self._state

    def navigation(self, current: GameId | None = None) -> Navigation:
        """Return where "next game" leads, and why that order can be trusted."""
        return rules.navigation(self._state, None if current is None else checked_id(current))

    def on_changed(self, listener: Callable[["WaitingCache"], object]) -> Unsubscribe:
        """Call `listener(cache)` after every change. Returns a function that ends it."""
        return self._changed.subscribe(listener)

    def start(self) -> None:
        """Request the first order."""
        self.hear(Started())

    def opened(self, game_id: GameId, my_turn: bool = True, version: int | None = None) -> None:
        """Report that a game is on screen; `version` is the one shown, if games have versions."""
        self.hear(Opened(game_id, my_turn, version))

    def move_sent(self, game_id: GameId, version: int | None = None) -> None:
        """Report a move of ours, at this version; without one, at the version on screen."""
        self.hear(MoveSent(game_id, version))

    def your_turn(self, game_id: GameId, version: int | None = None) -> None:
        """Report that the backend says that it is our turn in a game."""
        self.hear(YourTurn(game_id, version))

    def game_state(self, game_id: GameId, my_turn: bool, version: int | None = None) -> None:
        """Report the backend's state of a game. Forward every state that arrives.

        A state confirms an earlier move in its game. Only the game on screen changes further.
        """
        self.hear(GameState(game_id, my_turn, version))

    def move_failed(self, game_id: GameId, version: int | None = None) -> None:
        """Report that the backend refused our move, or that the move did not end our turn."""
        self.hear(MoveFailed(game_id, version))

    def reconnected(self) -> None:
        """Report that the connection was lost and is back: messages may have been missed."""
        self.hear(Reconnected())

    def invalidated(self) -> None:
        """Report that the backend sent `long_wait_invalidated`."""
        self.hear(Invalidated())

    async def settled(self) -> None:
        """Wait until no request is under way or due, except after a pause."""
        while not self._resting.is_set():  # it may have been cleared before this task woke
            await self._resting.wait()

    async def close(self) -> None:
        """End running requests. Events are refused from then on."""
        self._is_closed = True
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._resting.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def hear(self, event: Event) -> None:
        """Handle any of the events above, as it came over the wire."""
        check_event(event)
        if self._is_closed:
            raise NotOpen("this WaitingCache is closed; make another one")
        loop = asyncio.get_running_loop()
        before = self._state
        self._state, effects = rules.step(before, event)
        for effect in effects:
            self._stop_pausing()
            if isinstance(effect, Refetch):
                self._spawn(loop, self._refetch())
            else:
                self._pause = self._spawn(loop, self._wait())
        if self._state.in_flight is None:
            self._resting.set()
        else:
            self._resting.clear()
        if self._state != before:
            self._changed.emit(self)

    def _spawn(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        task = loop.create_task(work, name="stillfresh-waiting")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stop_pausing(self) -> None:
        pause = self._pause
        self._pause = None
        if pause is not None and pause is not asyncio.current_task():
            pause.cancel()

    async def _refetch(self) -> None:
        """Ask the backend, and handle its answer as an event."""
        event = await self._ask()
        if self._is_closed:
            return
        self.hear(event)
        if isinstance(event, Answered) and self._pause is None:
            self._pauses = 0

    async def _ask(self) -> Answered | Failed:
        try:
            return Answered(checked_answer(await self._fetch()))
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            logger.warning("fetch= cancelled its own task; it is tried again")
        except Exception as exc:  # noqa: BLE001 (a fetch may raise anything)
            logger.warning("refetching failed; it is tried again: %r", exc)
        return Failed()

    async def _wait(self) -> None:
        """Wait before a refetch is tried again; the pause grows with every failure."""
        self._pauses += 1
        seconds = retry_pause(self._pauses)
        try:
            await self._sleep(seconds)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            logger.warning("sleep= cancelled its own task; the pause begins again")
            await asyncio.sleep(seconds)
        except Exception:
            logger.exception("the pause before a refetch failed; the next event asks again")
            return
        if not self._is_closed:
            self.hear(PauseOver())


def checked_id(game_id: GameId) -> GameId:
    if not isinstance(game_id, str) and not is_whole(game_id):
        raise ConfigError(f"game_id: must be a string or a whole number, not {shown(game_id)}")
    return game_id


def check_event(event: Event) -> None:
    """Check the fields that callers give."""
    checked_id(getattr(event, "game_id", ""))
    checked_flag("my_turn", getattr(event, "my_turn", False))
    version = getattr(event, "version", None)
    if version is not None and not is_whole(version):
        raise ConfigError(f"version: must be a whole number or None, not {shown(version)}")


def checked_answer(answer: Iterable[GameId]) -> Pool:
    """Refuse a string or mapping, whose parts look like ids, and a set, which has no order."""
    is_other = isinstance(answer, str | bytes | Mapping | set | frozenset)
    if is_other or not isinstance(answer, Iterable):
        raise ConfigError(f"fetch: must return the ids of games, in order, not {shown(answer)}")
    return tuple(checked_id(game_id) for game_id in answer)
