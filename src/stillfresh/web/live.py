"""`WS /v1/live`: what a viewer looks at, pushed when it changes (G3)."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.types import Receive, Scope, Send

from stillfresh.coordinator import Hub

__all__ = ["Live"]


class Live:
    """An ASGI websocket app over a hub."""

    def __init__(
        self,
        hub: Hub,
        *,
        authenticate: Callable[[str], str | Awaitable[str | None] | None] | None = None,
        origins: Iterable[str] = (),
        stats: Callable[[], Awaitable[dict[str, Any]]] | None = None,
        is_operator: Callable[[Scope, str | None], bool] | None = None,
    ) -> None:
        self._hub = hub
        self._authenticate = authenticate
        self._origins = tuple(origins)
        self._stats = stats
        self._is_operator = is_operator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await receive()
        await send({"type": "websocket.close", "code": 1013})

    def snapshot(self) -> dict[str, Any]:
        return {"connections": len(self._hub), "subscriptions": {}}

    async def close(self) -> None:
        """Nobody is connected."""
