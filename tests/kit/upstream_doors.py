"""T5: every part of stillfresh that reads an upstream, behind one door: what it shows of a key."""

import asyncio
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from stillfresh.errors import StillfreshError
from stillfresh.gateway import gateway
from stillfresh.gateway.config import settings_of
from stillfresh.gateway.sources import kind_for
from stillfresh.http.client import new_client
from stillfresh.systems.coordinator import (
    Database,
    NexusClient,
    TtlConfig,
    TtlController,
    TtlCoordinator,
)
from stillfresh.systems.feed import FeedCache, FeedEngine
from stillfresh.systems.feed.http import HttpFeedSource
from stillfresh.systems.waiting.client import WaitingClient
from stillfresh.testing import ManualClock
from tests.kit.coordinator import VIEWER, post
from tests.kit.engine import until
from tests.kit.servers.raw import RawUpstream

__all__ = ["DOORS", "Door", "until"]

START = 1_700_000_000.0
PATIENCE = 30.0
MOST_BYTES = 100_000


class Door(ABC):
    """Opened on an upstream; `clock` is all the time it knows, but for `timeout`."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.folder = folder
        self.timeout = timeout
        self.clock = ManualClock(START)
        self.stack = AsyncExitStack()
        self._cold = count()
        self.upstream: RawUpstream

    @abstractmethod
    async def open(self) -> None:
        """The first good answer has not been asked for."""

    @abstractmethod
    async def version(self) -> int | None:
        """Of the copy that is shown, after the upstream was asked, if it was time to."""

    @abstractmethod
    async def cold(self) -> str | None:
        """What is said of a key that nothing is kept of; None if the upstream was believed."""

    @abstractmethod
    def views(self, path: str, asked: Any) -> Any:
        """What the upstream should say."""

    def another(self) -> str:
        """An id that nobody has asked for."""
        return f"cold{next(self._cold)}"

    def later(self) -> None:
        """It is time to ask again."""
        self.clock.advance("1h")


class GatewayDoor(Door):
    """`[kinds.post]` of a gateway, over its REST."""

    async def open(self) -> None:
        table = {
            "batch_url": f"{self.upstream.url}/by_ids",
            "fresh_for": "1m",
            "stale_for": 0,
            "error_for": "30d",
            "timeout": self.timeout,
            "max_bytes": MOST_BYTES,
        }
        settings = settings_of({"kinds": {"post": table}}, {})
        client = await self.stack.enter_async_context(new_client(30, idle_connections=2))
        app = gateway(kinds=[kind_for(settings.kinds[0], client, 0)], clock=self.clock)
        await self.stack.enter_async_context(app)
        self.client = await self.stack.enter_async_context(
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")
        )

    async def version(self) -> int | None:
        answer = await self.client.get("/v1/post/a")
        if answer.status_code != 200:
            return None
        version: int = answer.json()["version"]
        return version

    async def cold(self) -> str | None:
        answer = await self.client.get(f"/v1/post/{self.another()}")
        if answer.status_code in {200, 404}:
            return None
        assert (answer.status_code, answer.json()["code"]) == (503, "upstream_failed")
        assert "traceback" not in answer.text.lower()
        return answer.text

    def views(self, path: str, asked: Any) -> Any:
        return [{"id": id_, "version": self.upstream.version} for id_ in asked["ids"]]


class FeedDoor(Door):
    """A topic of a feed, over HTTP."""

    async def open(self) -> None:
        self.source = await self.stack.enter_async_context(
            HttpFeedSource(self.upstream.url, timeout=self.timeout, max_bytes=MOST_BYTES)
        )
        cache = FeedCache.open(self.folder / "feed.db", clock=self.clock)
        self.stack.callback(cache.close)
        self.engine = await self.stack.enter_async_context(FeedEngine(cache, self.source))

    async def version(self) -> int | None:
        try:
            answer = await self.engine.get_topic("a")
        except StillfreshError:
            return None
        before = self.upstream.asked
        async with asyncio.timeout(PATIENCE):
            while answer.verdict != "fresh" and answer.error is None:
                await asyncio.sleep(0.001)
                answer = await self.engine.get_topic("a")
        assert self.upstream.asked <= before + 6
        return None if answer.topic is None else int(answer.topic.title)

    async def cold(self) -> str | None:
        try:
            await self.engine.get_topic(self.another())
        except StillfreshError as exc:
            return str(exc)
        return None

    def views(self, path: str, asked: Any) -> Any:
        uuid = path.rpartition("/")[2]
        title = str(self.upstream.version)
        return {"topic_uuid": uuid, "author": "ann", "title": title, "created_at": int(START)}


class NexusDoor(Door):
    """A post of the coordinator's, asked for in a tick."""

    async def open(self) -> None:
        enter = self.stack.enter_async_context
        nexus = await enter(
            NexusClient(self.upstream.url, timeout=self.timeout, max_bytes=MOST_BYTES)
        )
        self.controller = await enter(
            TtlController(
                nexus=nexus, database=Database(self.folder / "nexus.db"), clock=self.clock
            )
        )
        self.ttl = await enter(TtlCoordinator(self.controller, TtlConfig()))
        self.ttl.sign_in(VIEWER)
        self.ttl.set_visible(True)
        self.ttl.subscribe_post(composite_post_id="a:1")

    async def version(self) -> int | None:
        await self.ttl.tick()
        view = await self.controller.get("post", "a:1")
        return None if view is None else int(view["counts"]["reposts"])

    async def cold(self) -> str | None:
        cold = f"{self.another()}:1"
        self.ttl.subscribe_post(composite_post_id=cold)
        await self.ttl.tick()
        cooling = self.ttl.snapshot().cooling["post"]
        self.ttl.unsubscribe_post(composite_post_id=cold)
        return "it is left alone for a while" if cold in cooling else None

    def views(self, path: str, asked: Any) -> Any:
        return [post(id_, self.upstream.version) for id_ in asked["post_ids"]]


class WaitingDoor(Door):
    """The pool of games, refetched over HTTP when a WebSocket says so."""

    async def open(self) -> None:
        self.pauses: list[asyncio.Event] = []
        self.waiting = await self.stack.enter_async_context(
            WaitingClient(self.upstream.url, timeout=self.timeout, sleep=self._sleep)
        )

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(asyncio.Event())
        await self.pauses[-1].wait()

    async def version(self) -> int | None:
        await until(lambda: self.waiting.is_connected)
        await self.waiting.cache.settled()
        pool = self.waiting.cache.state.pool
        return int(str(pool[0])) if pool else None

    async def cold(self) -> str | None:
        return "nothing is ever cold: without an answer there are no games"

    def views(self, path: str, asked: Any) -> Any:
        return {"game_ids": [str(self.upstream.version), "a"]}

    def later(self) -> None:
        for pause in self.pauses:
            pause.set()
        self.waiting.cache.invalidated()


DOORS: dict[str, type[Door]] = {
    "gateway": GatewayDoor,
    "feed": FeedDoor,
    "nexus": NexusDoor,
    "waiting": WaitingDoor,
}
