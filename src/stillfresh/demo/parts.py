"""What the demo is made of, and the state that every open page is told (G8)."""

import asyncio
import secrets
import time
from typing import Any, Final

import httpx2

from stillfresh.demo.pace import Pace
from stillfresh.demo.playing import freshness
from stillfresh.demo.rules import Polled, polling
from stillfresh.demo.upstream import BreakableUpstream
from stillfresh.demo.visitors import Visitors
from stillfresh.demo.world import UpstreamData
from stillfresh.errors import LoadFailed
from stillfresh.feed import Comment, FeedEngine
from stillfresh.web import Gateway

MAX_BATCH: Final = 20
DAYS: Final = 7


class Topics:
    """Topics and comments as the page is given them: from the feed's file, at once (seed 001)."""

    def __init__(self, engine: FeedEngine) -> None:
        self._engine = engine

    async def topics(self) -> dict[str, Any]:
        feed = await self._engine.get_all(days_back=DAYS)
        rows = [
            {"id": it.topic_uuid, "title": it.title, "author": it.author, "at": it.created_at}
            for it in feed.topics
        ]
        return {"topics": rows, **freshness(feed)}

    async def comments(self, uuid: str) -> dict[str, Any]:
        answer = await self._engine.get_comments(uuid)
        rows = [
            {"id": it.comment_uuid, "author": it.author, "body": it.body, "at": it.created_at}
            for it in answer.comments
        ]
        return {"comments": rows, **freshness(answer)}

    async def say(self, uuid: str, body: str) -> dict[str, Any]:
        """In the file at once, then upstream; taken back if upstream does not take it."""
        comment = Comment(secrets.token_hex(8), uuid, "a visitor", int(time.time()), body)
        await self._engine.add_comment(uuid, comment)
        return await self.comments(uuid)


class Demo:
    """A gateway to serve, and what stands behind it; its maker opens and closes the parts."""

    app: Gateway
    """Set once the site that it serves is made."""

    def __init__(
        self,
        *,
        pace: Pace,
        world: UpstreamData,
        upstream: BreakableUpstream,
        http: httpx2.AsyncClient,
        engine: FeedEngine,
        visitors: Visitors,
    ) -> None:
        self.pace = pace
        self.post_ids = tuple(world.posts)
        self.upstream = upstream
        self.visitors = visitors
        self.feed = Topics(engine)
        self.closing = asyncio.Event()
        self.recovered = asyncio.Event()
        """The upstream was switched on again: what is on a screen need not wait any longer."""
        self.polled = Polled()
        """What polling would have cost since the first open tab."""
        self._polled_until = time.monotonic()
        self._world = world
        self._http = http
        self._news = asyncio.Event()
        self._updates = 0
        """Revalidations that brought news: a page that shows a smaller number reads again."""
        engine.on_updated(lambda _: self._updated())

    def tell(self) -> None:
        """Every open page is told the state now, not only with the next second."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _updated(self) -> None:
        self._updates += 1
        self.tell()

    async def changed(self) -> None:
        await self._news.wait()

    def close(self) -> None:
        self.closing.set()
        self.tell()

    async def turn(self, mode: str) -> None:
        await self.upstream.turn(mode)
        if self.upstream.switch.mode == "fine":
            self.recovered.set()
        self.tell()

    async def tick(self) -> None:
        """Once a second."""
        now, tabs = time.monotonic(), self.app.live.snapshot()["signed_in"]
        kinds = (
            (len(self.post_ids), self.pace.seconds_of("post_fresh_for"), MAX_BATCH),
            (len(self._world.users), self.pace.seconds_of("user_fresh_for"), MAX_BATCH),
        )
        more = polling(now - self._polled_until, tabs, kinds)
        self.polled = Polled(*map(sum, zip(self.polled, more, strict=True)))
        self._polled_until = now
        await self.visitors.sweep()

    def state(self) -> dict[str, Any]:
        requests = self.upstream.switch.requests
        return {
            "mode": self.upstream.switch.mode,
            "asked": requests["posts"] + requests["users"],
            "requests": dict(requests),
            "polled": round(self.polled.each),
            "polled_in_batches": round(self.polled.in_batches),
            "watched": self.app.live.snapshot(),
            "changes": self._world.changes,
            "news": self._updates,
        }

    async def prices(self) -> tuple[dict[str, Any], float]:
        """As the upstream has them, and when it was asked."""
        asked_at = time.time()
        try:
            answer = (await self._http.get("/prices")).raise_for_status()
        except httpx2.HTTPError as exc:
            raise LoadFailed(f"no prices: {exc!r}") from exc
        said: dict[str, Any] = answer.json()
        return said, asked_at
