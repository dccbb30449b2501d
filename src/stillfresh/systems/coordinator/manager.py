"""CoordinatorsManager: starts, stops and routes several coordinators together."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Iterable
from typing import Final, Protocol, Self

from stillfresh.errors import ConfigError, shown

METHODS: Final = ("start", "stop", "set_route")

logger = logging.getLogger(__name__)


class Coordinator(Protocol):
    """A `TtlCoordinator`, or anything of yours with these methods. `stop` may be plain or async."""

    def start(self) -> None: ...

    def stop(self) -> Awaitable[object] | None: ...

    def set_route(self, route: str) -> None: ...


class CoordinatorsManager:
    """Starts and stops several coordinators: `async with CoordinatorsManager(posts, prices):`."""

    def __init__(self, *coordinators: Coordinator) -> None:
        for coordinator in coordinators:
            if not _is_coordinator(coordinator):
                raise ConfigError(
                    "CoordinatorsManager: takes coordinators one by one, (a, b), each with "
                    f"start(), stop() and set_route(route), not {shown(coordinator)}"
                )
        self._coordinators = coordinators
        self._undoing: set[asyncio.Future[object]] = set()

    def start(self) -> None:
        """Start all coordinators. If one cannot start, those before it are stopped again."""
        for number, coordinator in enumerate(self._coordinators):
            try:
                coordinator.start()
            except BaseException:
                self._undo(self._coordinators[:number])
                raise

    def _undo(self, started: Iterable[Coordinator]) -> None:
        """Stop them. A plain stop() has ended then; `stop` waits for the others."""
        for coordinator in started:
            try:
                ending = coordinator.stop()
            except Exception:
                logger.exception("%s could not be stopped again", shown(coordinator))
                continue
            if ending is not None and inspect.isawaitable(ending):
                task = asyncio.ensure_future(ending)
                self._undoing.add(task)
                task.add_done_callback(self._undoing.discard)

    async def stop(self) -> None:
        """Stop all coordinators at once. Raises the first error after all have ended."""
        await asyncio.gather(*self._undoing, return_exceptions=True)
        ended = await asyncio.gather(*map(_stop, self._coordinators), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    def set_route(self, route: str) -> None:
        """Tell every coordinator that another page is shown."""
        for coordinator in self._coordinators:
            coordinator.set_route(route)

    async def __aenter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            await asyncio.gather(*self._undoing, return_exceptions=True)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def _is_coordinator(given: object) -> bool:
    if isinstance(given, type):
        return False
    return all(callable(getattr(given, method, None)) for method in METHODS)


async def _stop(coordinator: Coordinator) -> None:
    """Call its stop(), and await what it returns if that can be awaited."""
    ending = coordinator.stop()
    if ending is not None and inspect.isawaitable(ending):
        await ending
