"""What a store that was away for a moment could not say to a viewer (C14): asked for again."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

SHORTEST_PAUSE: Final = 0.25
LONGEST_PAUSE: Final = 5.0
"""Seconds; twice as long each time."""


class Unread:
    """Ids by key, of each kind; `read` may add what failed again. One task for a kind."""

    def __init__(self, read: Callable[[str, dict[str, str]], Awaitable[None]]) -> None:
        self._read = read
        self._ids: dict[str, dict[str, str]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def add(self, kind: str, ids: Mapping[str, str]) -> None:
        self._ids.setdefault(kind, {}).update(ids)
        if kind not in self._tasks:
            self._tasks[kind] = asyncio.get_running_loop().create_task(self._try(kind))

    def stop(self) -> None:
        self._ids.clear()
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _try(self, kind: str) -> None:
        pause = SHORTEST_PAUSE
        try:
            while kind in self._ids:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                await self._read(kind, self._ids.pop(kind))
        finally:
            if self._tasks.get(kind) is asyncio.current_task():
                del self._tasks[kind]
