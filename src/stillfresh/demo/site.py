"""The demo's site: one page, and the small API behind its parts (G8).

What the gateway does not answer itself comes here. Answers to expected trouble (the upstream is
away) are no HTTP errors: the page shows them.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from stillfresh.checks import is_whole
from stillfresh.demo.pace import DURATIONS, Pace
from stillfresh.demo.parts import Demo
from stillfresh.demo.playing import MoveRefused
from stillfresh.demo.visitors import DemoVisitor
from stillfresh.errors import StillfreshError

COOKIE: Final = "stillfresh_demo"
STATIC: Final = Path(__file__).parent / "static"
LOOK: Final = Path(__file__).parent.parent / "web" / "static" / "stillfresh.css"
EVERY: Final = 1.0
"""Seconds between two states that are told to an open page."""
MOST_BODY: Final = 4_096
PRIVATE: Final = {"Cache-Control": "private, no-store"}


def site(demo: Demo) -> Starlette:
    """An ASGI app; what it shows is opened and closed by who made it."""
    it = _Handlers(demo)
    routes = [
        Route("/", it.front),
        Route("/prices", it.prices),
        Route("/demo/events", it.events),
        Route("/demo/state", it.state),
        Route("/demo/upstream", it.turn, methods=["POST"]),
        Route("/demo/topics", it.topics),
        Route("/demo/topics/{uuid}", it.topic),
        Route("/demo/topics/{uuid}/comments", it.comment, methods=["POST"]),
        Route("/demo/games", it.games),
        Route("/demo/games/{id}/open", it.open_game, methods=["POST"]),
        Route("/demo/games/play", it.play, methods=["POST"]),
        Route("/demo/approvals/{id}", it.approve, methods=["POST"]),
        Route("/demo/stillfresh.css", _look),
        Mount("/demo/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(routes=routes)


async def _look(_: Request) -> Response:
    return FileResponse(LOOK, headers={"Cache-Control": "no-cache"})


def _json(content: object) -> Response:
    return JSONResponse(content, headers=PRIVATE)


async def _asked(request: Request) -> dict[str, Any]:
    """A small JSON object; whatever else came is an empty one."""
    if int(request.headers.get("content-length") or MOST_BODY + 1) > MOST_BODY:
        return {}
    try:
        asked = json.loads(await request.body())
    except (ValueError, RecursionError):
        return {}
    return asked if isinstance(asked, dict) else {}


class _Handlers:
    def __init__(self, demo: Demo) -> None:
        self._demo = demo

    def _visitor(self, request: Request) -> DemoVisitor | None:
        return self._demo.visitors.find(request.cookies.get(COOKIE))

    async def front(self, request: Request) -> Response:
        visitor = self._visitor(request) or self._demo.visitors.welcome()
        page = front_page(visitor.token, self._demo.post_ids, self._demo.pace)
        answer = HTMLResponse(page, headers=PRIVATE)
        answer.set_cookie(COOKIE, visitor.token, httponly=True, samesite="strict", path="/")
        return answer

    async def prices(self, _: Request) -> Response:
        """Slow, and broken with the upstream: the page cache in front of it is what is fast."""
        try:
            said, rendered_at = await self._demo.prices()
        except StillfreshError:
            return HTMLResponse(_template("away.html").substitute(), 503)
        return HTMLResponse(prices_page(said["prices"], rendered_at, self._demo.pace))

    async def state(self, _: Request) -> Response:
        """Once, for who writes scripts."""
        return _json(self._demo.state())

    async def events(self, request: Request) -> Response:
        visitor = self._visitor(request)
        if visitor is None:
            return Response(status_code=204)  # tells the browser not to ask again
        headers = {**PRIVATE, "X-Accel-Buffering": "no"}
        return StreamingResponse(self._told(visitor), 200, headers, "text/event-stream")

    async def _told(self, visitor: DemoVisitor) -> AsyncIterator[str]:
        while not self._demo.closing.is_set():
            state = self._demo.state() | {"approvals": visitor.approvals.shown()}
            yield f"data: {json.dumps(state)}\n\n"
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await self._demo.changed()

    async def turn(self, request: Request) -> Response:
        mode = (await _asked(request)).get("mode")
        try:
            await self._demo.turn(str(mode))
        except StillfreshError as exc:
            return _json({"refused": str(exc)})
        return _json(self._demo.state())

    async def topics(self, _: Request) -> Response:
        return _json(await _or_away(self._demo.feed.topics()))

    async def topic(self, request: Request) -> Response:
        return _json(await _or_away(self._demo.feed.comments(request.path_params["uuid"])))

    async def comment(self, request: Request) -> Response:
        body = (await _asked(request)).get("body")
        text = body.strip()[:280] if isinstance(body, str) else ""
        if not text:
            return _json({"refused": "write something first"})
        try:
            return _json(await self._demo.feed.say(request.path_params["uuid"], text))
        except StillfreshError:
            return _json({"refused": "the upstream did not take it, so it was taken back"})

    async def games(self, request: Request) -> Response:
        return await self._played(request, None)

    async def open_game(self, request: Request) -> Response:
        game_id = request.path_params["id"]
        return await self._played(request, lambda visitor: visitor.playing.open(game_id))

    async def play(self, request: Request) -> Response:
        cell = (await _asked(request)).get("cell")
        if not is_whole(cell):
            return _json({"refused": "a cell is a number from 0 to 8"})
        return await self._played(request, lambda visitor: visitor.playing.play(cell))

    async def _played(
        self, request: Request, step: Callable[[DemoVisitor], Awaitable[None]] | None
    ) -> Response:
        """The games as they are after the step, whether or not it was made."""
        visitor = self._visitor(request)
        if visitor is None:
            return _json({"refused": "this session is over: reload the page"})
        refused: str | None = None
        try:
            if step is not None:
                await step(visitor)
        except StillfreshError as exc:
            refused = str(exc) if isinstance(exc, MoveRefused) else "the game service is away"
        state = await _or_away(visitor.playing.state())
        return _json({"refused": refused} | state)

    async def approve(self, request: Request) -> Response:
        visitor = self._visitor(request)
        is_done = visitor is not None and visitor.approvals.decide(request.path_params["id"])
        return _json({"done": is_done})


async def _or_away(asked: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Nothing kept, and nobody to ask: said in one sentence."""
    try:
        return await asked
    except StillfreshError:
        return {"refused": "nothing is kept of this yet, and the upstream is away"}


@cache
def _template(name: str) -> Template:
    return Template((STATIC / name).read_text())


def front_page(token: str, post_ids: Sequence[str], pace: Pace) -> str:
    posts = "\n".join(map(_post, post_ids))
    return _template("demo.html").substitute(
        token=escape(token), posts=posts, count=len(post_ids), **_spans(pace)
    )


def _spans(pace: Pace) -> dict[str, str]:
    return {name: f"{pace.seconds_of(name):g}" for name in DURATIONS}


def _post(post_id: str) -> str:
    """Empty until it has been on screen: what it says comes through the gateway."""
    author = escape(post_id.partition(":")[0])
    return _template("post.html").substitute(id=escape(post_id), author=author)


def prices_page(prices: Mapping[str, int], rendered_at: float, pace: Pace) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="number">{cents / 100:.2f} €</td></tr>'
        for name, cents in prices.items()
    )
    return _template("prices.html").substitute(
        rows=rows,
        rendered_at=f"{rendered_at:.3f}",
        time=time.strftime("%H:%M:%S", time.localtime(rendered_at)),
        took=f"{time.time() - rendered_at:.1f}",
        **_spans(pace),
    )
