"""Gateways on real sockets: an app under uvicorn, and an upstream API that fails as it is told."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stillfresh.gateway.server.listening import Server, server_config


@asynccontextmanager
async def running(app: ASGIApp, config: uvicorn.Config | None = None) -> AsyncIterator[str]:
    """The app's address; served as `stillfresh serve` does it, unless told otherwise."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(config or server_config(app), lambda: None)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(60):
            while not server.started and not task.done():
                await asyncio.sleep(0)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


@asynccontextmanager
async def client_of(app: ASGIApp, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Talks to the app over a socket."""
    async with (
        running(app) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, **options) as client,
    ):
        yield client


class Api:
    """An upstream: POST `{"ids": […]}`, a list of views; `status` and `body` replace an answer."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.headers_seen: list[dict[str, str]] = []
        self.version = 1
        self.absent: set[str] = set()
        self.status = 200
        self.body: bytes | None = None
        self.headers: dict[str, str] = {}
        self.silent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError
        request = msgspec.json.decode(await Request(scope, receive).body())
        self.asked.append(request)
        self.headers_seen.append({a.decode(): b.decode() for a, b in scope["headers"]})
        if self.silent:
            await receive()
            return
        body = self.views(request) if self.body is None else self.body
        headers = dict(self.headers)
        if headers.get("content-encoding") == "gzip":
            body = gzip.compress(body)
        await Response(body, self.status, headers, "application/json")(scope, receive, send)

    def views(self, asked: dict[str, Any]) -> bytes:
        ids = [id_ for id_ in asked.get("ids", ()) if id_ not in self.absent]
        return msgspec.json.encode([self.view(id_, asked.get("viewer_id")) for id_ in ids])

    def view(self, id_: str, viewer_id: str | None) -> dict[str, Any]:
        view: dict[str, Any] = {"id": id_, "version": self.version}
        return view if viewer_id is None else {**view, "viewer": viewer_id}


def api_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(app, lifespan="off", log_level="critical", ws="none")
