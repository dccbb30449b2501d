"""What stands in for an upstream in tests: it answers when a test lets it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Gated:
    """Its calls can be held and be made to fail."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.gate: asyncio.Event | None = None
        self.asked = asyncio.Event()

    def hold(self) -> None:
        """From now on calls wait for `let_go`."""
        self.gate = asyncio.Event()
        self.asked.clear()

    def let_go(self) -> None:
        assert self.gate is not None
        self.gate.set()
        self.gate = None

    async def holding(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Hold the calls, and start work: it has called, and waits for `let_go`."""
        self.hold()
        task = asyncio.create_task(work)
        await self.asked.wait()
        return task

    async def called(self) -> None:
        """What a call does before its answer."""
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
