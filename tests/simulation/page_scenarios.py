"""T1: the page cache: visitors, renders that fail and take long, pages that are purged."""

import asyncio
from contextlib import suppress

from stillfresh.errors import NotOpen
from stillfresh.freshness import Verdict
from stillfresh.pages import Page, PageCache, ServedPage
from stillfresh.testing import Process, Version, World
from stillfresh.testing.simulator.ledger import Reading

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
