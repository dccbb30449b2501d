"""The app behind the gateway, and its lifespan (G1)."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillfresh.errors import StillfreshError

ENDS_WITHIN: Final = 10.0
"""Seconds for the app behind the gateway to end; then it is cancelled."""

logger = logging.getLogger(__name__)


class NotStarted(StillfreshError):
    """The app behind the gateway failed to start."""


class Behind:
    """The app behind the gateway, and its lifespan.

    An app without a lifespan is used without one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._state: dict[str, Any] = {}
        self._told: asyncio.Queue[Message] = asyncio.Queue()
        self._said: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._has_started = False

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if self._state:
            scope = {**scope, "state": {**scope.get("state", {}), **self._state}}
        return self._app(scope, receive, send)

    async def start(self) -> None:
        """Start it; a second call changes nothing."""
        if self._task is not None:
            return
        self._state, self._has_started = {}, False
        self._told, self._said = asyncio.Queue(), asyncio.Queue()
        self._task = asyncio.create_task(self._run())
        await self._told.put({"type": "lifespan.startup"})
        said = await self._said.get()
        if said.get("type") == "lifespan.startup.failed":
            await self.end()
            raise NotStarted(f"the app behind the gateway did not start: {said.get('message', '')}")
        self._has_started = bool(said)

    async def end(self) -> None:
        """Tell the app to end, and cancel it after its time."""
        task, self._task = self._task, None
        if task is not None:
            await self._told.put({"type": "lifespan.shutdown"})
            await asyncio.wait([task], timeout=ENDS_WITHIN)
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        scope: Scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": self._state}
        try:
            await self._app(scope, self._told.get, self._said.put)
        except Exception as exc:
            if self._has_started:
                logger.exception("the gateway's app failed in its lifespan")
            else:  # as servers do: it counts as an app without a lifespan
                logger.warning("the gateway's app has no lifespan, or failed: %r", exc)
        finally:
            self._said.put_nowait({})
