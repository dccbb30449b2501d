"""A route's load: by the request that waits for it, or by the same request again.

A request that waits runs the function itself, with its own dependencies, in its own context. A
refresh runs after its request has ended, when sessions and connections are closed. So the request
goes through the app again, with new dependencies, which are closed after it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, Final

import anyio
from fastapi import Request
from starlette.types import Message, Scope

from stillfresh.engine import Call, Private
from stillfresh.errors import LoadFailed
from stillfresh.integrations.routes import MARK
from stillfresh.tasks import is_cancelled

KEPT: Final = frozenset(
    {"type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"}
    | {"root_path", "headers", "client", "server"}
)
"""The request itself; everything else in its scope was added on its way through the app."""

Run = Callable[[], Coroutine[Any, Any, object]]


class Replay:
    """The same request again, for one entry, without a client."""

    def __init__(self, request: Request, call: Call[Any]) -> None:
        self._request = request
        self._call = call
        self._body = getattr(request, "_body", b"")  # as far as FastAPI has read it
        self._is_sent = False
        self._status: int | None = None
        self._ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def value(self) -> object:
        """Return or raise the function's result, after its dependencies are closed."""
        first_scope = self._request.scope
        scope: Scope = {name: value for name, value in first_scope.items() if name in KEPT}
        scope[MARK] = self
        scope["state"] = dict(first_scope.get("state", {}))
        await self._request.app(scope, self._receive, self._send)
        if not self._ended.done():
            raise LoadFailed(
                f"the request was answered with status {self._status} before its function ran"
            )
        return self._ended.result()

    async def run(self, call: Call[Any], run: Run) -> object:
        """Called in place of the route's read."""
        if call != self._call:
            raise LoadFailed(f"the request is for {call!r} now, and not for {self._call!r}")
        try:
            value = await run()
        except Exception as exc:
            self._ended.set_exception(exc)
            self._ended.exception()  # looked at: the app may raise it as well
            raise
        self._ended.set_result(value)
        return value.value if isinstance(value, Private) else value

    async def _receive(self) -> Message:
        if self._is_sent:
            await asyncio.get_running_loop().create_future()  # this client never disconnects
        self._is_sent = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]


class RouteLoad:
    """The loader that one request brings."""

    def __init__(self, run: Run, request: Request, call: Call[Any]) -> None:
        self._run = run
        self._request = request
        self._call = call
        self._context = copy_context()
        self._running: asyncio.Task[object] | None = None
        self._has_left = False

    async def __call__(self) -> object:
        """Run the function. A cancelled request ends its own run; other callers get a replay."""
        if not self._has_left:
            loop = asyncio.get_running_loop()
            self._running = loop.create_task(self._run(), context=self._context)
            try:
                return await self._running
            except asyncio.CancelledError:
                if is_cancelled() or not self._has_left:
                    raise
        return await Replay(self._request, self._call).value()

    def is_handled(self, error: Exception) -> bool:
        """True if the app has its own handler for it: then it is an answer, not a failure."""
        handlers = self._request.app.exception_handlers
        return any(kind in handlers for kind in type(error).__mro__ if kind is not Exception)

    async def leave(self) -> None:
        """The request ends, and its dependencies too: stop the run that uses them."""
        self._has_left = True
        if self._running is not None and not self._running.done():
            self._running.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self._running])
