"""The life of the app around which the cache stands: opened after it, closed after it (E13)."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from stillfresh.errors import StillfreshError
from stillfresh.isr.collecting import App, Receive
from stillfresh.isr.responses import Message, Send
from stillfresh.isr.rules_routes import Scope

SHARED: Final = ("asgi", "path_params", "server", "app")
"""Of a request's scope, what says nothing about who asks; a mount's parameters are in its path."""

logger = logging.getLogger(__name__)


class Lifespan:
    """Passes on what is not a request, and knows what the app's requests have in common."""

    def __init__(
        self,
        app: App,
        opens: Callable[[], Awaitable[None]],
        closes: Callable[[], Awaitable[None]],
    ) -> None:
        self._app = app
        self._opens = opens
        self._closes = closes
        self._state: dict[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        self._state = scope.get("state", {})
        heard = False

        async def hears() -> Message:
            nonlocal heard
            heard = True
            return await receive()

        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._open()
            elif message["type"].startswith("lifespan.shutdown."):
                await self._closes()
            await send(message)

        try:
            await self._app(scope, hears, told)
        except Exception:
            if heard:
                raise
            await self._alone(receive, told)

    async def _alone(self, receive: Receive, send: Send) -> None:
        """For an app that knows no lifespan (Django): the cache has one all the same."""
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})

    def shared(self, scope: Scope) -> dict[str, Any]:
        """For a render: what the app set up at its start, not what was noted for this request."""
        kept = {name: scope[name] for name in SHARED if name in scope}
        return {**kept, "state": dict(self._state)}

    async def _open(self) -> None:
        """I10: a store that is away does not keep the site from starting."""
        try:
            await self._opens()
        except StillfreshError as exc:
            self.warn(f"the page cache could not be opened, and is tried again: {exc}")

    def warn(self, text: str) -> None:
        logger.warning("%s", text)
