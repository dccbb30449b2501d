"""CoordinatorsManager: starts, stops and routes several coordinators together (C13; seed 000)."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, Self

from stillfresh.errors import ConfigError


class Coordinator(Protocol):
    """A `TtlCoordinator`, or anything of yours with these methods."""

    def start(self) -> None: ...

    def stop(self) -> Coroutine[Any, Any, None]: ...

    def set_route(self, route: str) -> None: ...


class CoordinatorsManager:
    """Starts and stops several coordinators: `async with CoordinatorsManager(posts, prices):`."""

    def __init__(self, *coordinators: Coordinator) -> None:
        for one in coordinators:
            if not all(callable(getattr(one, it, None)) for it in ("start", "stop", "set_route")):
                raise ConfigError(
                    f"CoordinatorsManager: takes coordinators one by one, (a, b), not {one!r}"
                )
        self._coordinators = coordinators
        self._undoing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start all coordinators. If one cannot start, those before it are stopped again."""
        for number, coordinator in enumerate(self._coordinators):
            try:
                coordinator.start()
            except BaseException:
                for it in self._coordinators[:number]:
                    self._undoing.add(task := asyncio.create_task(it.stop()))
                    task.add_done_callback(self._undoing.discard)
                raise

    async def stop(self) -> None:
        """Stop all coordinators at once. Raises the first error after all have ended."""
        await asyncio.gather(*self._undoing, return_exceptions=True)
        ended = await asyncio.gather(
            *(it.stop() for it in self._coordinators), return_exceptions=True
        )
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
