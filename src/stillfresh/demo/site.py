"""The demo's site: one page, the small API of its parts, and the state for open pages.

Requests that the gateway does not answer itself come here. If the upstream is unavailable, the
answer is not an HTTP error: the page shows it.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

import httpx2
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from stillfresh.demo.code_corners import code_corners
from stillfresh.demo.example_games import NO_SERVICE
from stillfresh.demo.playing import MoveRefused, freshness
from stillfresh.demo.rules import Pace, polling
from stillfresh.demo.upstream import BreakableUpstream
from stillfresh.demo.visitors import DemoVisitor, Visitors
from stillfresh.demo.world import UpstreamData
from stillfresh.engine import Function
from stillfresh.errors import StillfreshError
from stillfresh.gateway import Gateway
from stillfresh.systems.feed import Comment, FeedEngine
from stillfresh.systems.feed.http import FeedHttpError

COOKIE: Final = "stillfresh_demo"
STATIC: Final = Path(__file__).parent / "static"
GATEWAYS: Final = ("stillfresh.gateway", "static")
"""The look that the demo shares with the dashboard."""
EVERY: Final = 1.0
"""Seconds between two states that are sent to an open page."""
MAX_BATCH: Final = 20
DAYS: Final = 7
MOST_BODY: Final = 4_096
MOST_COMMENT: Final = 280
TRIED: Final = "stillfresh_demo_tried"
"""The cookie of a visitor that wants no more hints."""
TROUBLE: Final = {"failing": "answers with errors", "down": "does not answer"}
"""What is wrong with the upstream, for each mode with a fault."""
PRIVATE: Final = {"Cache-Control": "private, no-store"}


class PageRequest(msgspec.Struct, frozen=True):
    """What a page may send, with defaults."""

    mode: str = ""
    body: str = ""
    cell: int = -1


async def _read_request(request: Request) -> PageRequest:
    """The request's small JSON object; anything else counts as empty."""
    if int(request.headers.get("content-length") or MOST_BODY + 1) > MOST_BODY:
        return PageRequest()
    try:
        return msgspec.json.decode(await request.body(), type=PageRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PageRequest()


@dataclass
class Demo:
    """The site and its parts, which its maker opens and closes."""

    pace: Pace
    world: UpstreamData
    upstream: BreakableUpstream
    http: httpx2.AsyncClient
    engine: FeedEngine
    visitors: Visitors
    rate: Function[[str], float]
    codes: dict[str, tuple[str, str]]
    """The title and the code of each card."""
    app: Gateway = field(init=False)
    """Set once the site that it serves is made."""
    has_games: bool = True
    """False if there is no game service: it is an example, which only a clone has."""
    recovered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the upstream is switched on again, so that items on screen are refreshed at once."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _updates: int = 0
    """Refreshes of the feed so far; a page that shows a smaller number reads again."""
    _open_for: float = 0.0
    """Seconds, of all open tabs together."""
    _counted_until: float = field(default_factory=time.monotonic)
    _is_closing: bool = False

    def __post_init__(self) -> None:
        self.engine.on_updated(self._count_update)

    def site(self) -> Starlette:
        routes = [
            Route("/", self.front),
            Route("/prices", self.prices),
            Route("/demo/events", self.events),
            Route("/demo/state", self.state_once),
            Route("/demo/upstream", self.turn, methods=["POST"]),
            Route("/demo/topics", self.topics),
            Route("/demo/topics/{uuid}", self.topic),
            Route("/demo/topics/{uuid}/comments", self.comment, methods=["POST"]),
            Route("/demo/games", self.games),
            Route("/demo/games/{id}/open", self.open_game, methods=["POST"]),
            Route("/demo/games/play", self.play, methods=["POST"]),
            Route("/demo/rate", self.call_rate),
            Route("/demo/rate/invalidate", self.invalidate_rate, methods=["POST"]),
            Route("/demo/approvals/{id}", self.approve, methods=["POST"]),
            Mount("/demo/static", StaticFiles(directory=STATIC, packages=[GATEWAYS])),
        ]
        return Starlette(routes=routes)

    def close(self) -> None:
        self._is_closing = True
        self._tell()

    def _tell(self) -> None:
        """Send the state to every open page now, not only at the next second."""
        news = self._news
        self._news = asyncio.Event()  # before the old one is set: pages wait for the next news
        news.set()

    def _count_update(self, _: object) -> None:
        self._updates += 1
        self._tell()

    async def tick(self) -> None:
        """Count the time of open tabs, and close what left visitors held. Runs once a second."""
        now = time.monotonic()
        tabs = self.app.live.snapshot()["signed_in"]
        self._open_for += tabs * (now - self._counted_until)
        self._counted_until = now
        await self.visitors.sweep()

    def state(self) -> dict[str, Any]:
        requests = self.upstream.requests
        each, batched = polling(
            self._open_for,
            (len(self.world.posts), self.pace.post_fresh_for, MAX_BATCH),
            (len(self.world.users), self.pace.user_fresh_for, MAX_BATCH),
        )
        return {
            "mode": self.upstream.mode,
            "asked": requests["posts"] + requests["users"],
            "polled": round(each),
            "polled_in_batches": round(batched),
            "changes": self.world.changes,
            "news": self._updates,
        }

    def _visitor(self, request: Request) -> DemoVisitor | None:
        return self.visitors.find(request.cookies.get(COOKIE))

    async def front(self, request: Request) -> Response:
        token = (self._visitor(request) or self.visitors.welcome()).token
        posts = "\n".join(map(_post, self.world.posts))
        page = _template("demo.html").substitute(
            _spans(self.pace) | code_corners(self.codes),
            max_batch=MAX_BATCH,
            token=token,
            posts=posts,
            count=len(self.world.posts),
            mode=self.upstream.mode,
            tried=" hidden" if TRIED in request.cookies else "",
        )
        response = HTMLResponse(page, headers=PRIVATE)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict", path="/")
        return response

    async def prices(self, _: Request) -> Response:
        """The page of prices: slow, and failing with the upstream; the page cache makes it fast."""
        began_at = time.time()
        try:
            prices = (await self.http.get("/prices")).raise_for_status().json()
        except httpx2.HTTPError:
            return HTMLResponse(_template("away.html").substitute(trouble=self._trouble), 503)
        return HTMLResponse(_prices_page(prices, began_at, self.pace))

    async def state_once(self, _: Request) -> Response:
        """The state once, for scripts."""
        return _json(self.state())

    async def events(self, request: Request) -> Response:
        visitor = self._visitor(request)
        if visitor is None:
            return Response(status_code=204)  # so that the browser does not reconnect
        headers = {**PRIVATE, "X-Accel-Buffering": "no"}
        return StreamingResponse(self._state_events(visitor), 200, headers, "text/event-stream")

    async def _state_events(self, visitor: DemoVisitor) -> AsyncIterator[str]:
        """The state, once a second and at every news, until the demo closes."""
        while not self._is_closing:
            state = self.state() | {"approvals": visitor.approvals.show()}
            yield f"data: {json.dumps(state)}\n\n"
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await self._news.wait()

    async def turn(self, request: Request) -> Response:
        try:
            await self.upstream.turn((await _read_request(request)).mode)
        except StillfreshError as exc:
            return _json({"refused": str(exc)})
        if self.upstream.mode == "fine":
            self.recovered.set()
        self._tell()
        return _json(self.state())

    async def topics(self, _: Request) -> Response:
        """The topics, from the feed's file, at once."""
        return _json(await self._answer_or_reason(self._topics()))

    async def _topics(self) -> dict[str, Any]:
        feed = await self.engine.get_all(days_back=DAYS)
        rows = [
            {
                "id": topic.topic_uuid,
                "title": topic.title,
                "author": topic.author,
                "at": topic.created_at,
            }
            for topic in feed.topics
        ]
        return {"topics": rows, **freshness(feed)}

    async def topic(self, request: Request) -> Response:
        return _json(await self._answer_or_reason(self._comments(request.path_params["uuid"])))

    async def _comments(self, uuid: str) -> dict[str, Any]:
        answer = await self.engine.get_comments(uuid)
        rows = [
            {
                "id": comment.comment_uuid,
                "author": comment.author,
                "body": comment.body,
                "at": comment.created_at,
            }
            for comment in answer.comments
        ]
        return {"comments": rows, **freshness(answer)}

    async def comment(self, request: Request) -> Response:
        """Write a comment to the file at once, then upstream; undo it if upstream refuses it."""
        uuid = request.path_params["uuid"]
        text = (await _read_request(request)).body.strip()
        if not 1 <= len(text) <= MOST_COMMENT:
            why = f"a comment has 1 to {MOST_COMMENT} characters, this one has {len(text)}"
            return _json({"refused": why})
        comment = Comment(secrets.token_hex(8), uuid, "a visitor", int(time.time()), text)
        try:
            await self.engine.add_comment(uuid, comment)
            return _json(await self._comments(uuid))
        except FeedHttpError as exc:
            why = "does not answer" if exc.status is None else f"answered with {exc.status}"
            return _json({"refused": f"the upstream {why}"})
        except StillfreshError:
            return _json({"refused": f"the upstream {self._trouble}"})

    async def open_game(self, request: Request) -> Response:
        game_id = request.path_params["id"]
        return await self.games(request, lambda visitor: visitor.playing.open(game_id))

    async def play(self, request: Request) -> Response:
        cell = (await _read_request(request)).cell
        return await self.games(request, lambda visitor: visitor.playing.play(cell))

    async def games(
        self, request: Request, step: Callable[[DemoVisitor], Awaitable[None]] | None = None
    ) -> Response:
        """The games as they are after the step, whether or not it was made."""
        if not self.has_games:
            return _json({"no_service": NO_SERVICE})
        visitor = self._visitor(request)
        if visitor is None:
            return _json({"refused": "this session is over: reload the page"})
        refused: str | None = None
        try:
            if step is not None:
                await step(visitor)
        except StillfreshError as exc:
            is_for_visitor = isinstance(exc, MoveRefused)
            refused = str(exc) if is_for_visitor else f"the game service {self._trouble}"
        return _json({"refused": refused} | await self._answer_or_reason(visitor.playing.state()))

    async def call_rate(self, _: Request) -> Response:
        """Call the cached function, and say how old its value is and how long the call took."""
        return _json(await self._answer_or_reason(self._rate()))

    async def _rate(self) -> dict[str, Any]:
        began = time.perf_counter()
        answer = await self.rate.get("USD")
        took = time.perf_counter() - began
        return {"value": answer.value, "took": took, **freshness(answer)}

    async def invalidate_rate(self, _: Request) -> Response:
        await self.rate.of("USD").invalidate()
        return _json({"done": True})

    async def approve(self, request: Request) -> Response:
        visitor = self._visitor(request)
        is_done = visitor is not None and visitor.approvals.decide(request.path_params["id"])
        return _json({"done": is_done})

    @property
    def _trouble(self) -> str:
        return TROUBLE.get(self.upstream.mode, "has not answered yet")

    async def _answer_or_reason(self, answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """The answer, or a sentence why there is none."""
        try:
            return await answer
        except StillfreshError:
            return {"refused": f"There is no copy yet, and the upstream {self._trouble}."}


def _json(content: object) -> Response:
    return JSONResponse(content, headers=PRIVATE)


@cache
def _template(name: str) -> Template:
    return Template((STATIC / name).read_text())


def _spans(pace: Pace) -> dict[str, str]:
    """The times of the demo, in seconds, for the templates."""
    return {name: f"{span:g}" for name, span in asdict(pace).items() if isinstance(span, float)}


def _post(post_id: str) -> str:
    """The frame of a post; its content comes through the gateway once it is on screen."""
    author = escape(post_id.partition(":")[0])
    return _template("post.html").substitute(id=escape(post_id), author=author)


def _prices_page(prices: Mapping[str, int], rendered_at: float, pace: Pace) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="number">{cents / 100:.2f} €</td></tr>'
        for name, cents in prices.items()
    )
    return _template("prices.html").substitute(
        _spans(pace),
        rows=rows,
        rendered_at=f"{rendered_at:.3f}",
        time=time.strftime("%H:%M:%S", time.localtime(rendered_at)),
        took=f"{time.time() - rendered_at:.1f}",
    )
