"""A gateway in front of one page that uses stillfresh.js, and what the page says to it."""

import json
from contextlib import AsyncExitStack
from typing import Any

from playwright.async_api import Page
from starlette.responses import HTMLResponse
from starlette.types import Receive, Scope, Send

from stillfresh.gateway import Gateway, gateway
from tests.kit.live import Upstream, served
from tests.kit.servers.valkey import free_port

__all__ = ["AUTOMATIC", "PATIENCE", "Site", "show", "text_is"]

HEAD = """<!doctype html><html lang="en"><head><title>test</title><link rel="icon" href="data:,">
<style>body {margin: 0} li {height: 100px; list-style: none} ul {margin: 0; padding: 0}</style>
</head><body>"""
PATIENCE = 60_000
"""Milliseconds that a page may take for anything: a busy machine is no error."""
AUTOMATIC = '<script type="module" src="/stillfresh.js"></script>'


class Site:
    """A gateway in front of one page, on one port, through restarts."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.html = ""
        self.port = free_port()
        self.revoked: set[str] = set()
        self.is_identity_away = False
        self.gateway: Gateway
        self._stack = AsyncExitStack()

    async def start(self, fresh_for: float = 3600) -> None:
        self.gateway = gateway(
            kinds=self.upstream.kinds(fresh_for), pages=self._page, authenticate=self._viewer_of
        )
        await self._stack.enter_async_context(served(self.gateway, self.port))

    async def stop(self) -> None:
        await self._stack.aclose()

    def _viewer_of(self, token: str) -> str | None:
        """A token is its viewer's name; what follows a dash makes another token of it."""
        if self.is_identity_away:
            raise ConnectionError
        return None if token in self.revoked else token.partition("-")[0]

    async def check_tokens(self) -> None:
        """What happens every minute."""
        for session in tuple(self.gateway.live._sessions):
            await session.check_token()

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await HTMLResponse(HEAD + self.html)(scope, receive, send)

    @property
    def subscribed(self) -> dict[str, int]:
        counts: dict[str, int] = self.gateway.live.snapshot()["subscriptions"]
        return counts

    def watched(self) -> set[str]:
        return {
            id_
            for session in self.gateway.live._sessions
            for _, id_ in session.connection.subscribed
        }


async def show(page: Page, site: Site, html: str, path: str = "/") -> list[Any]:
    """The page, and the frames that it sends from now on, decoded."""
    site.html = html
    sent: list[Any] = []

    def noted(payload: str | bytes) -> None:
        frame = json.loads(payload)
        sent.append(frame if isinstance(frame, list) else [frame])

    page.on("websocket", lambda socket: socket.on("framesent", noted))
    await page.set_viewport_size({"width": 400, "height": 500})
    await page.goto(f"http://127.0.0.1:{site.port}{path}")
    return sent


async def text_is(page: Page, selector: str, text: str) -> None:
    await page.wait_for_function(
        "([selector, text]) => document.querySelector(selector).textContent === text",
        arg=[selector, text],
    )
