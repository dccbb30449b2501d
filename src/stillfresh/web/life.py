"""The life of an app that stands behind another: started and ended by hand (G1)."""

import asyncio
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from stillfresh.errors import StillfreshError

__all__ = ["Life"]


class Life:
    """Speaks ASGI's lifespan protocol to `app`; one that knows none lives without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.state: dict[str, Any] = {}
        self._told: asyncio.Queue[Message] = asyncio.Queue(2)
        self._said: asyncio.Queue[Message] = asyncio.Queue(2)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        said = await self._step("lifespan.startup")
        if said.get("type") == "lifespan.startup.failed":
            await self.end()
            raise StillfreshError(f"the app behind did not start: {said.get('message', '')}")

    async def end(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        self._task = task
        await self._step("lifespan.shutdown")
        self._task = None
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _run(self) -> None:
        scope: Scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": self.state}
        # An app that knows no lifespan raises at once: that is an answer too.
        with suppress(Exception):
            await self._app(scope, self._told.get, self._said.put)

    async def _step(self, name: str) -> Message:
        """Its answer, or none if the app has ended."""
        if self._task is None or self._task.done():
            return {}
        await self._told.put({"type": name})
        answer = asyncio.ensure_future(self._said.get())
        await asyncio.wait([answer, self._task], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        answer.cancel()
        return {}
