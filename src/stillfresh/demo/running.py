"""One process, one address: the five systems, their upstream and the gateway put together.

Opened from the upstream up to the gateway, closed the other way round. All files lie in one
directory: the entries and boards, the pages, the feed, and the games of the game service.
"""

import asyncio
import logging
import random
import signal
import socket
import tempfile
import time
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx2
from starlette.types import ASGIApp

from stillfresh.demo.code_corners import script_of, source_of
from stillfresh.demo.example_games import find_game_service
from stillfresh.demo.guard import Guard
from stillfresh.demo.playing import Playing, boards_of
from stillfresh.demo.rates import rates_of
from stillfresh.demo.rules import Pace
from stillfresh.demo.site import MAX_BATCH, STATIC, Demo
from stillfresh.demo.upstream import BreakableUpstream, upstream_app
from stillfresh.demo.visitors import Approvals, Visitors, key_in
from stillfresh.demo.world import UpstreamData
from stillfresh.engine import Cache, RetryAfter
from stillfresh.errors import StillfreshError
from stillfresh.gateway import gateway
from stillfresh.gateway.live import Hub
from stillfresh.gateway.server import Server, address, bound, server_config
from stillfresh.logs import quietly
from stillfresh.pages import IsrMiddleware, PageCache
from stillfresh.systems.coordinator import Kind, NexusClient
from stillfresh.systems.coordinator.rules import by_id, post_id, user_id
from stillfresh.systems.feed import Comment, FeedCache, FeedEngine, Topic
from stillfresh.systems.feed.http import HttpFeedSource
from stillfresh.systems.waiting.messages import InvalidatedNews

PATIENCE: Final = "15s"
"""Longer than the slowest lookup: slow is not failing."""
GRACE: Final = 2
"""Seconds for running requests when the demo ends."""
NO_KEEPING: Final = httpx2.Limits(max_connections=100, max_keepalive_connections=0)
"""No idle connections: one to an upstream that was switched off would fail."""
SEED: Final = 7
"""Two runs begin alike."""

T = TypeVar("T")


def run(
    host: str = "127.0.0.1",
    port: int = 8000,
    store: str | None = None,
    say: Callable[[str], object] = print,
    open_browser: bool = False,
    *,
    speed: float = 1.0,
) -> None:
    """Run the demo until SIGINT or SIGTERM.

    `store` is a directory to keep; without one, nothing is kept. `speed` is for tests and films.
    """
    pace = Pace().faster(speed)
    # Its trouble is on purpose, and shown.
    with quietly(logging.ERROR), _directory(store) as directory, bound(host, port) as listener:
        where = address(host, listener.getsockname()[1])

        def listening() -> None:
            say(f"stillfresh demo: {where}/")
            say(f"its dashboard:   {where}/_stillfresh/")
            say("Ctrl-C ends it")
            if open_browser:
                asyncio.get_running_loop().run_in_executor(None, webbrowser.open, where)

        asyncio.run(_serve(directory, pace, host, listener, listening))


async def _serve(
    directory: Path, pace: Pace, host: str, listener: socket.socket, listening: Callable[[], None]
) -> None:
    """Serve the demo until a signal comes."""
    signalled = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    async with demo(directory, pace, (host,)) as parts:
        config = server_config(parts.app)
        config.lifespan = "off"
        config.timeout_graceful_shutdown = GRACE
        server = Server(config, listening)

        async def end() -> None:
            await signalled.wait()
            parts.close()
            server.should_exit = True

        async with running(end()):
            await server.serve(sockets=[listener])


@contextmanager
def _directory(store: str | None) -> Iterator[Path]:
    if store is None:
        with tempfile.TemporaryDirectory(prefix="stillfresh-demo-") as temporary:
            yield Path(temporary)
        return
    path = Path(store)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StillfreshError(f"store: {store} cannot be the demo's directory: {exc}") from exc
    yield path.absolute()


@asynccontextmanager
async def demo(directory: Path, pace: Pace, hosts: tuple[str, ...] = ()) -> AsyncIterator[Demo]:
    """The upstream, which forgets everything at its end, and the site in front of it."""
    dice = random.Random(SEED)  # noqa: S311 (likes and bots, no secrets)
    world = UpstreamData(int(time.time()), dice)
    with tempfile.TemporaryDirectory(prefix="upstream-", dir=directory) as own:
        async with AsyncExitStack() as stack:
            open_service = find_game_service()
            game_service = None
            if open_service is not None:
                opening = open_service(Path(own), pace.bot_thinks, dice)
                game_service = await stack.enter_async_context(opening)
            app = upstream_app(world, game_service)
            upstream = await stack.enter_async_context(BreakableUpstream(app, pace, world))
            await stack.enter_async_context(running(changes(world, pace)))
            site = site_of(directory, pace, hosts, world, upstream)
            parts = await stack.enter_async_context(site)
            parts.has_games = game_service is not None
            yield parts


@asynccontextmanager
async def site_of(
    directory: Path,
    pace: Pace,
    hosts: tuple[str, ...],
    world: UpstreamData,
    upstream: BreakableUpstream,
) -> AsyncIterator[Demo]:
    """The site in front of an upstream, with its caches in this directory."""
    pause = pace.retry_after
    feed_db = directory / "feed.db"
    with await asyncio.to_thread(FeedCache.open, feed_db, fresh_for=pace.feed_fresh_for) as feed:
        async with (
            httpx2.AsyncClient(base_url=upstream.url, timeout=15, limits=NO_KEEPING) as http,
            NexusClient(upstream.url, timeout=PATIENCE) as nexus,
            PatientSource(upstream.url, pause) as source,
            FeedEngine(feed, source) as engine,
            Cache(f"sqlite:///{directory / 'entries.db'}") as cache,
        ):
            boards = boards_of(cache, http, pause)
            rate = rates_of(cache, http)

            def playing_of(user: str) -> Playing:
                def tell() -> None:
                    parts.app.live.push(user, InvalidatedNews())

                return Playing(user, http, boards, tell, pause)

            visitors = Visitors(playing_of, pace.approval_for, world.dice, key_in(directory))
            codes = codes_of_cards()
            parts = Demo(pace, world, upstream, http, engine, visitors, rate, codes)
            pages = PageCache(f"sqlite:///{directory / 'pages.db'}")
            parts.app = gateway(
                cache,
                kinds=kinds_of(nexus, pace),
                pages=Guard(cached_pages(parts.site(), pages, pace), hosts),
                page_cache=pages,
                authenticate=visitors.authenticate,
                hosts=hosts,
            )
            parts.app.live.register(InvalidatedNews)
            async with parts.app, running(tick_each_second(parts), refresh_on_recovery(parts)):
                try:
                    yield parts
                finally:
                    parts.close()
                    await visitors.close()


def cached_pages(site: ASGIApp, pages: PageCache, pace: Pace) -> ASGIApp:
    return IsrMiddleware(site, pages, {"/prices": pace.page_fresh_for})


def codes_of_cards() -> dict[str, tuple[str, str]]:
    """The title and the code of each card: the source of what runs behind it."""
    return {
        "feed": ("Feed", source_of(kinds_of)),
        "games": ("Games", source_of(Playing.play)),
        "approvals": ("Approvals", source_of(Approvals.__init__, Approvals.decide)),
        "watching": ("On screen now", script_of(STATIC / "feed.js", "start")),
        "rate": ("A cached function", source_of(rates_of)),
        "page": ("A slow page", source_of(cached_pages, Demo.prices)),
        "topics": ("Topics", source_of(Demo._topics)),  # noqa: SLF001 (its source is shown)
    }


async def soon(response: Awaitable[T], pause: float) -> T:
    """Try a failing upstream again after `pause`: the visitor plays with its switch.

    Otherwise failures double the pause up to a minute, which is right everywhere else.
    """
    try:
        return await response
    except StillfreshError as exc:
        raise RetryAfter(pause, str(exc)) from exc


class PatientSource(HttpFeedSource):
    """Lookups that fail are tried again after the same pause each time."""

    def __init__(self, url: str, pause: float) -> None:
        super().__init__(url, timeout=PATIENCE)
        self._pause = pause

    async def day_index(self, day: date, category: str | None) -> list[Topic]:
        return await soon(super().day_index(day, category), self._pause)

    async def comments(self, uuid: str) -> list[Comment]:
        return await soon(super().comments(uuid), self._pause)


def kinds_of(nexus: NexusClient, pace: Pace) -> list[Kind]:
    async def posts(ids: list[str]) -> dict[str, object]:
        return by_id("post", ids, await soon(nexus.posts_by_ids(ids), pace.retry_after), post_id)

    async def users(ids: list[str]) -> dict[str, object]:
        return by_id("user", ids, await soon(nexus.users_by_ids(ids), pace.retry_after), user_id)

    return [
        Kind("post", fetch=posts, fresh_for=pace.post_fresh_for, max_batch=MAX_BATCH),
        Kind("user", fetch=users, fresh_for=pace.user_fresh_for, max_batch=MAX_BATCH),
    ]


async def changes(world: UpstreamData, pace: Pace) -> None:
    """Change the upstream's data, also while its server is down."""
    while True:
        await asyncio.sleep(pace.change_every)
        world.change(int(time.time()))


async def tick_each_second(parts: Demo) -> None:
    while True:
        await asyncio.sleep(1)
        await parts.tick()


async def refresh_on_recovery(parts: Demo) -> None:
    """When the upstream is back, refresh all watched items at once, not one by one."""
    hub = parts.app.hub
    while True:
        await parts.recovered.wait()
        parts.recovered.clear()
        await asyncio.gather(*(refresh_watched(hub, kind) for kind in hub.kinds))
        with suppress(StillfreshError):  # switched off again meanwhile
            await parts.rate.of("USD").refresh()


async def refresh_watched(hub: Hub, kind: str) -> None:
    resource = hub.resource(kind)
    with suppress(StillfreshError):  # switched off again meanwhile
        await resource.refresh(*resource.watched)


@asynccontextmanager
async def running(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these works while the block runs; an error of one is raised at its end."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
