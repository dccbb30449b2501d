"""The operator's page, under `/_stillfresh/` (G6)."""

from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from stillfresh.coordinator import Hub
from stillfresh.engine import Cache
from stillfresh.isr import PageCache
from stillfresh.web.replies import Problem, problem_reply

__all__ = ["Dashboard"]


class Dashboard:
    """An ASGI app; `scope["root_path"]` ends where its own paths begin."""

    def __init__(
        self,
        cache: Cache,
        hub: Hub,
        *,
        live: Callable[[], dict[str, Any]],
        page_cache: PageCache | None = None,
        token: str | None = None,
    ) -> None:
        self._cache = cache
        self._hub = hub
        self._live = live
        self._page_cache = page_cache
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        await problem_reply(Problem(404, "not_found", "Not found")).send(scope, send)

    async def snapshot(self) -> dict[str, Any]:
        """Live's numbers."""
        return {"live": self._live()}
