"""The app behind the gateway, and its lifespan."""

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


class AppBehind:
    """The app behind the gateway, and its lifespan.

    An app without a lifespan is used without one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._state: dict[str, Any] = {}
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        self._from_app: asyncio.Queue[Message] = asyncio.Queue()
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
        self._state = {}
        self._has_started = False
        self._to_app = asyncio.Queue()
        self._from_app = asyncio.Queue()
        self._task = asyncio.create_task(self._run())
        await self._to_app.put({"type": "lifespan.startup"})
        message = await self._from_app.get()
        if message.get("type") == "lifespan.startup.failed":
            await self.end()
            why = message.get("message", "")
            raise NotStarted(f"the app behind the gateway did not start: {why}")
        self._has_started = bool(message)  # empty: `_run` ended without an answer

    async def end(self) -> None:
        """Tell the app to end, and cancel it after its time."""
        task = self._task
        self._task = None
        if task is not None:
            await self._to_app.put({"type": "lifespan.shutdown"})
            await asyncio.wait([task], timeout=ENDS_WITHIN)
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        scope: Scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": self._state}
        try:
            await self._app(scope, self._to_app.get, self._from_app.put)
        except Exception as exc:
            if self._has_started:
                logger.exception("the gateway's app failed in its lifespan")
            else:  # as servers do: it counts as an app without a lifespan
                logger.warning("the gateway's app has no lifespan, or failed: %r", exc)
        finally:
            self._from_app.put_nowait({})
