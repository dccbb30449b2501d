"""T1: the page cache: visitors, renders that fail and take long, pages that are purged."""

import asyncio
from contextlib import suppress
from typing import Any, NamedTuple

from stillfresh.engine.work import CURRENT
from stillfresh.errors import LoadFailed, NotOpen, StoreError
from stillfresh.freshness import Verdict
from stillfresh.http.own_writes import FIELD_NAME
from stillfresh.integrations.own_writes import ReadYourWrites
from stillfresh.pages import IsrMiddleware, Page, PageCache, ServedPage
from stillfresh.pages.model import App
from stillfresh.testing import Process, Promise, Version, World
from stillfresh.testing.simulator.ledger import Reading
from tests.kit.asgi_client import ask, http_scope

PATHS = ("/", "/blog", "/pricing")


async def of_pages(world: World) -> None:
    """I8-I11: one render for all machines; what was purged is not served as fresh."""

    async def app(process: Process) -> None:
        pages = PageCache(
            process.store,
            clock=process.clock,
            dice=world.dice.random,
            stale_for=5,
            error_for=10,
            wait=2,
            lease_for=3,
            render_timeout=6,
            grace=60,
        )
        process.at_close(pages.close)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(visit(process, pages))
            if world.dice.random() < 0.3:
                group.create_task(reopen(world, pages))

    world.launch(app, 2)


async def reopen(world: World, pages: PageCache) -> None:
    """E13: closed in the midst of visits."""
    for _ in world.steps(2):
        await asyncio.sleep(world.dice.uniform(0, 6))
        await pages.close()
        await asyncio.sleep(world.dice.choice([0, 0.3]))
        await pages.open()


async def visit(process: Process, pages: PageCache) -> None:
    world = process.world
    for _ in world.steps(12):
        await asyncio.sleep(world.dice.choice([0, 0.05, 0.5, 3.0]))
        with suppress(NotOpen):
            await act(process, pages, world.dice.choice(PATHS))


async def act(process: Process, pages: PageCache, path: str) -> None:
    world = process.world
    match world.dice.randrange(8):
        case 0:
            world.change("page", path)
            async with process.invalidating("page", [path], soft=True):
                await pages.revalidate(path)
        case 1:
            world.change("page", path)
            async with process.invalidating("page", [path]):
                await pages.purge(path)
        case 2:
            world.change("page", path)
            async with process.invalidating("page", [path]):
                await pages.invalidate(path)
        case _:
            await see(process, pages, path)


async def see(process: Process, pages: PageCache, path: str) -> None:
    async def render() -> Page:
        found = (await process.load("page", [path]))[path]
        if isinstance(found, Exception):
            raise found
        return Page(f"{found.number} {found.load}".encode(), 200, {"content-type": "text/plain"})

    reading = process.reading("page", path)
    try:
        served = await pages.get(path, render, 3)
    except (ConnectionError, TimeoutError):
        return
    judge(process, reading, served)


def judge(process: Process, reading: Reading, served: ServedPage) -> None:
    if served.status != 200 or served.verdict is Verdict.GONE:
        return
    number, load = map(int, served.body.split())
    failed = served.error is not None
    process.served(reading, Version(number, load), served.verdict, failed=failed)


class SavedPage(NamedTuple):
    """A page that a user has changed, for the same user's next visit."""

    path: str
    token: str
    number: int
    """Of the version that was saved."""


async def of_own_pages(world: World) -> None:
    """E37: users save in one process and visit another one. Its pages and its data lag behind."""
    saved: list[SavedPage] = []

    async def app(process: Process) -> None:
        pages = PageCache(
            process.store,
            clock=process.clock,
            dice=world.dice.random,
            stale_for=60,
            error_for=60,
            wait=20,
            lease_for=3,
            render_timeout=20,
            store_timeout=5,
            memory_for=20,
            grace=60,
        )
        site = IsrMiddleware(shop(process), pages, routes={"/*": "30s"})
        process.at_close(site._close)  # as the end of the lifespan does it
        async with asyncio.TaskGroup() as group:
            group.create_task(save_pages(process, pages, site, saved))
            for _ in range(2):
                group.create_task(visit_own(process, site, saved))

    world.launch(app, 3)


def shop(process: Process) -> App:
    """A site of which each page shows the version of one value. A POST changes it.

    It is behind a network: of the load that asks it, it knows only the request.
    """
    cache = process.cache()

    @cache.batched("price", fresh_for=60, memory_for=20, lease_for=3, load_timeout=7)
    async def price(ids: list[str]) -> dict[str, Version | Exception]:
        return await process.load("price", ids)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del receive
        path = scope["path"]
        status = 200
        text = b""
        try:
            if scope["method"] == "POST":
                process.world.change("price", path)
                text = b"%d" % process.world.ledger.upstream["price", path]
                await price.invalidate(path)
            else:
                answer = await price.get(path)
                text = b"%d" % answer.value.number
        except (LoadFailed, NotOpen, StoreError):
            status = 503
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": text})

    site = ReadYourWrites(app, caches=[cache])

    async def behind_a_network(scope: Any, receive: Any, send: Any) -> None:
        load = CURRENT.set(None)
        try:
            await site(scope, receive, send)
        finally:
            CURRENT.reset(load)

    return behind_a_network


async def save_pages(
    process: Process, pages: PageCache, site: IsrMiddleware, saved: list[SavedPage]
) -> None:
    """Change pages. A change that is not in the store of pages yet has no token of theirs."""
    world = process.world
    for _ in world.steps(12):
        await asyncio.sleep(world.dice.choice([0, 0.05, 0.5, 3.0]))
        path = world.dice.choice(PATHS)
        answer = await ask(site, http_scope(path, method="POST"))
        token = answer.field(FIELD_NAME).decode()
        if answer.status == 200 and pages.cache.maker in token:
            saved.append(SavedPage(path, token, int(answer.body)))


async def visit_own(process: Process, site: IsrMiddleware, saved: list[SavedPage]) -> None:
    """Visit pages, sometimes one's own."""
    world = process.world
    for _ in world.steps(20):
        await asyncio.sleep(world.dice.choice([0, 0, 0.05, 0.5, 3.0]))
        await ask(site, http_scope(world.dice.choice(PATHS)))
        if not saved:
            continue
        last = world.dice.choice(saved[-3:])
        token = (FIELD_NAME, last.token.encode())
        answer = await ask(site, http_scope(last.path, headers=[token]))
        if answer.status == 200 and int(answer.body) < last.number:
            shown = answer.body.decode()
            world.broken(Promise.OWN, f"{last.path}: {shown} instead of {last.number}")
