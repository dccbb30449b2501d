"""What the site is made of, and the state that every open page is told (G8)."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx

from stillfresh.clock import Clock
from stillfresh.demo.pace import Pace
from stillfresh.demo.rules_cost import Polled, polling
from stillfresh.demo.topics import Topics
from stillfresh.demo.upstream import Upstream
from stillfresh.demo.visitors import Visitors
from stillfresh.errors import LoadFailed

MAX_BATCH: Final = 20


class Ledger:
    """What the feed's posts and users would have cost by polling, from the first open tab on."""

    def __init__(self, pace: Pace, posts: int, users: int, clock: Clock = time.monotonic) -> None:
        self._kinds = (
            (posts, pace.seconds_of("post_fresh_for"), MAX_BATCH),
            (users, pace.seconds_of("user_fresh_for"), MAX_BATCH),
        )
        self._clock = clock
        self._last = clock()
        self.polled = Polled()

    def tick(self, tabs: int) -> None:
        now = self._clock()
        self.polled += polling(now - self._last, tabs, self._kinds)
        self._last = now


class Parts:
    """Opened and closed by who made them."""

    def __init__(
        self,
        *,
        pace: Pace,
        post_ids: tuple[str, ...],
        users: int,
        upstream: Upstream,
        http: httpx.AsyncClient,
        feed: Callable[[Callable[[], None]], Topics],
        visitors: Visitors,
        watched: Callable[[], Mapping[str, Any]],
        changes: Callable[[], int],
    ) -> None:
        self.pace = pace
        self.post_ids = post_ids
        self.visitors = visitors
        self.closing = asyncio.Event()
        self.recovered = asyncio.Event()
        """The upstream was switched on again: what is on a screen need not wait any longer."""
        self.feed = feed(self.tell)
        self._upstream = upstream
        self._http = http
        self._watched = watched
        self._changes = changes
        self._ledger = Ledger(pace, len(post_ids), users)
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Every open page is told the state now, not only with the next second."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def changed(self) -> None:
        await self._news.wait()

    def close(self) -> None:
        self.closing.set()
        self.tell()

    async def turn(self, mode: str) -> None:
        await self._upstream.turn(mode)
        if self._upstream.switch.mode == "fine":
            self.recovered.set()
        self.tell()

    async def tick(self) -> None:
        """Once a second."""
        self._ledger.tick(self._watched()["signed_in"])
        await self.visitors.sweep()

    def state(self) -> dict[str, Any]:
        requests, polled = self._upstream.switch.requests, self._ledger.polled
        return {
            "mode": self._upstream.switch.mode,
            "asked": requests["posts"] + requests["users"],
            "requests": dict(requests),
            "polled": round(polled.each),
            "polled_in_batches": round(polled.in_batches),
            "watched": dict(self._watched()),
            "changes": self._changes(),
            "news": self.feed.news,
        }

    async def prices(self) -> tuple[dict[str, Any], float]:
        """As the upstream has them, and when it was asked."""
        asked_at = time.time()
        try:
            answer = await self._http.get("/prices")
        except httpx.HTTPError as exc:
            raise LoadFailed(f"no prices: {exc!r}") from exc
        if not answer.is_success:
            raise LoadFailed(f"no prices: HTTP {answer.status_code}")
        said: dict[str, Any] = answer.json()
        return said, asked_at
