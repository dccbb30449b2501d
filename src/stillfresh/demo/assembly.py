"""The five systems, their upstream and the gateway put together, opened and closed in order (G8).

All files lie in one directory: the entries and boards, the pages, the feed, the games.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import httpx2

from stillfresh.coordinator import Kind, NexusClient
from stillfresh.coordinator.rules import by_id, post_id, user_id
from stillfresh.demo.guard import Guard
from stillfresh.demo.pace import Pace
from stillfresh.demo.parts import MAX_BATCH, Demo
from stillfresh.demo.playing import Playing, boards_of
from stillfresh.demo.site import site
from stillfresh.demo.tables import Tables
from stillfresh.demo.upstream import BreakableUpstream, Switch, upstream_app
from stillfresh.demo.visitors import Visitors, key_in
from stillfresh.demo.world import UpstreamData
from stillfresh.engine import Cache, RetryAfter
from stillfresh.errors import StillfreshError
from stillfresh.feed import Comment, FeedCache, FeedEngine, Topic
from stillfresh.feed.http import HttpFeedSource
from stillfresh.feed.source import FeedSource
from stillfresh.isr import IsrMiddleware, PageCache
from stillfresh.live import Hub
from stillfresh.waiting.backend import Games
from stillfresh.waiting.messages import InvalidatedNews
from stillfresh.web import gateway

PATIENCE: Final = "15s"
"""Longer than the slowest lookup: slow is not failing."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def soon(asked: Awaitable[T], pause: float) -> T:
    """Ask a failing upstream again after `pause`: somebody is playing with its switch.

    Without this, failures double the pause up to a minute, as is right anywhere else.
    """
    try:
        return await asked
    except StillfreshError as exc:
        raise RetryAfter(pause, str(exc)) from exc


class Patient:
    """A `FeedSource` whose lookups are tried again after the same pause each time."""

    def __init__(self, source: FeedSource, pause: float) -> None:
        self._source = source
        self._pause = pause
        self.create_topic = source.create_topic
        self.delete_topic = source.delete_topic
        self.add_comment = source.add_comment

    async def day_index(self, day: date, category: str | None) -> Sequence[Topic]:
        return await soon(self._source.day_index(day, category), self._pause)

    async def topic(self, uuid: str) -> Topic | None:
        return await soon(self._source.topic(uuid), self._pause)

    async def comments(self, uuid: str) -> Sequence[Comment]:
        return await soon(self._source.comments(uuid), self._pause)


@asynccontextmanager
async def demo(directory: Path, pace: Pace, hosts: tuple[str, ...] = ()) -> AsyncIterator[Demo]:
    """Opened from the upstream up to the gateway, closed the other way round."""
    dice = random.Random(pace.seed)  # noqa: S311 (likes and bots, no secrets)
    world, switch = UpstreamData(int(time.time()), dice), Switch(pace, dice)
    with TemporaryDirectory(prefix="upstream-", dir=directory) as own:
        games = Games(Path(own) / "games.db")  # forgotten, as its world is
        tables = Tables(games, pace.bot_thinks, dice)
        async with (
            games,
            BreakableUpstream(upstream_app(world, games, tables), switch) as upstream,
            running(changes(world, pace)),
            running(tables.run()),
            site_of(directory, pace, hosts, world=world, upstream=upstream) as made,
        ):
            yield made


@asynccontextmanager
async def site_of(
    directory: Path,
    pace: Pace,
    hosts: tuple[str, ...],
    *,
    world: UpstreamData,
    upstream: BreakableUpstream,
) -> AsyncIterator[Demo]:
    """What stands in front of the upstream."""
    pause = pace.seconds_of("retry_after")
    feed_file = await asyncio.to_thread(
        FeedCache.open, directory / "feed.db", fresh_for=pace.feed_fresh_for
    )
    with feed_file:
        async with (
            httpx2.AsyncClient(base_url=upstream.url, timeout=15, limits=NO_KEEPING) as http,
            NexusClient(upstream.url, timeout=PATIENCE) as nexus,
            HttpFeedSource(upstream.url, timeout=PATIENCE) as source,
            FeedEngine(feed_file, Patient(source, pause)) as engine,
            Cache(f"sqlite:///{directory / 'entries.db'}") as cache,
        ):
            boards = boards_of(cache, http, pause)

            def playing_of(user: str) -> Playing:
                def tell() -> None:
                    made.app.live.push(user, InvalidatedNews())

                return Playing(user, http, boards, tell, pause=pause)

            visitors = Visitors(playing_of, pace.approval_for, world.dice, key_in(directory))
            made = Demo(
                pace=pace,
                world=world,
                upstream=upstream,
                http=http,
                engine=engine,
                visitors=visitors,
            )
            pages = PageCache(f"sqlite:///{directory / 'pages.db'}")
            routes = {"/prices": pace.page_fresh_for}
            made.app = gateway(
                cache,
                kinds=kinds_of(nexus, pace),
                pages=Guard(IsrMiddleware(site(made), pages, routes), hosts),
                page_cache=pages,
                authenticate=visitors.authenticate,
                hosts=hosts,
            )
            made.app.live.register(InvalidatedNews)
            async with made.app, running(ticks(made)), running(wakings(made)):
                try:
                    yield made
                finally:
                    made.close()
                    await visitors.close()


NO_KEEPING: Final = httpx2.Limits(max_connections=100, max_keepalive_connections=0)
"""An upstream that was switched off leaves no connection behind to stumble over."""


def kinds_of(nexus: NexusClient, pace: Pace) -> list[Kind]:
    pause = pace.seconds_of("retry_after")

    async def posts(ids: list[str]) -> dict[str, object]:
        return by_id("post", ids, await soon(nexus.posts_by_ids(ids), pause), post_id)

    async def users(ids: list[str]) -> dict[str, object]:
        return by_id("user", ids, await soon(nexus.users_by_ids(ids), pause), user_id)

    return [
        Kind("post", fetch=posts, fresh_for=pace.post_fresh_for, max_batch=MAX_BATCH),
        Kind("user", fetch=users, fresh_for=pace.user_fresh_for, max_batch=MAX_BATCH),
    ]


async def changes(world: UpstreamData, pace: Pace) -> None:
    """The upstream's data goes on changing, also while its server is down."""
    while True:
        await asyncio.sleep(pace.seconds_of("change_every"))
        logger.debug("upstream: %s", world.change(int(time.time())))


async def ticks(made: Demo) -> None:
    while True:
        await asyncio.sleep(1)
        await made.tick()


async def wakings(made: Demo) -> None:
    """C9 asks for what has failed one by one: here everybody knows that the upstream is back."""
    hub = made.app.hub
    while True:
        await made.recovered.wait()
        made.recovered.clear()
        await asyncio.gather(*(refresh_watched(hub, kind) for kind in hub.kinds))


async def refresh_watched(hub: Hub, kind: str) -> None:
    resource = hub.resource(kind)
    with suppress(StillfreshError):  # switched off again meanwhile
        await resource.refresh(*resource.watched)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """While the block runs; what it raised is raised at the end of it."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()
