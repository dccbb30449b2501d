"""The life of an app that stands behind another: started and ended by hand (G1)."""

import asyncio
import logging
from typing import Any, Final

from starlette.types import ASGIApp, Message, Scope

from stillfresh.errors import StillfreshError

ENDS_WITHIN: Final = 10.0
"""Seconds that the app has to end; then it is ended."""

logger = logging.getLogger(__name__)


class NotStarted(StillfreshError):
    """The app behind said so."""


class Life:
    """Speaks ASGI's lifespan protocol to `app`; one that knows none lives without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.state: dict[str, Any] = {}
        self._told: asyncio.Queue[Message] = asyncio.Queue()
        self._said: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._answer: Message = {}

    async def start(self) -> None:
        """Once; starting what has started changes nothing."""
        if self._task is not None:
            return
        self.state.clear()
        self._answer = {}
        self._told, self._said = asyncio.Queue(), asyncio.Queue()
        self._task = asyncio.create_task(self._run())
        self._answer = said = await self._step("lifespan.startup")
        if said.get("type") == "lifespan.startup.failed":
            await self.end()
            raise NotStarted(f"the app behind did not start: {said.get('message', '')}")

    async def end(self) -> None:
        """The app is told, and given its time; then it is over."""
        if (task := self._task) is None:
            return
        self._task = None
        if not task.done():
            await self._told.put({"type": "lifespan.shutdown"})
            await asyncio.wait([task], timeout=ENDS_WITHIN)
        task.cancel()
        await asyncio.wait([task])

    async def _step(self, name: str) -> Message:
        """What it says to that; nothing, if it has ended."""
        await self._told.put({"type": name})
        return await self._said.get()

    async def _run(self) -> None:
        scope: Scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": self.state}
        try:
            await self._app(scope, self._told.get, self._said.put)
        except Exception as exc:  # noqa: BLE001 (whatever an app raises; it is logged)
            self._note(exc)
        finally:
            self._said.put_nowait({})

    def _note(self, exc: Exception) -> None:
        """Before it said anything it is taken for an app that knows no lifespan, as servers do."""
        match self._answer.get("type"):
            case None:
                logger.warning("the app behind knows no lifespan, or failed in it: %r", exc)
            case "lifespan.startup.complete":
                logger.error("the app behind failed in its lifespan", exc_info=exc)
            case _:
                logger.debug("the app behind did not start", exc_info=exc)
