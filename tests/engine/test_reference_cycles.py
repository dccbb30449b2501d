"""A load leaves nothing that only the garbage collector could free: it would stop busy programs."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from stillfresh import Cache, LoadFailed
from tests.kit.garbage import collector_off, unreachable


async def at_once(key: str) -> str:
    return key


async def later(key: str) -> str:
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return key


async def much_later(key: str) -> str:
    for _ in range(20):  # it gets a guard
        await asyncio.sleep(0)
    return key


async def failing(key: str) -> str:
    await asyncio.sleep(0)
    raise LookupError(key)


@pytest.mark.parametrize("load", [at_once, later, much_later])
async def test_a_miss_leaves_no_reference_cycle(
    load: Callable[[str], Coroutine[Any, Any, str]],
) -> None:
    """Whether its loader answers at once, or waits, with a guard and without."""
    async with Cache("memory://") as cache:
        words = cache.cached("word", fresh_for="1m")(load)
        for key in ("a", "b", "c"):
            assert await words(key) == key  # what is made once is made by now
        with collector_off():
            assert await words("d") == "d"
            await asyncio.sleep(0)
            assert unreachable() == []


async def test_many_callers_of_one_miss_leave_no_reference_cycle() -> None:
    """Those that join its load, and those that leave."""
    async with Cache("memory://") as cache:
        words = cache.cached("word", fresh_for="1m")(much_later)
        await asyncio.gather(*(words("a") for _ in range(5)))
        with collector_off():
            await asyncio.gather(*(words("b") for _ in range(5)))
            await asyncio.sleep(0)
            assert unreachable() == []


async def test_a_failed_load_leaves_no_load_behind() -> None:
    """Its error has a traceback, which Python frees by the collector; but no load is part of it."""
    async with Cache("memory://") as cache:
        words = cache.cached("word", fresh_for="1m")(failing)
        for key in ("a", "b"):
            with pytest.raises(LoadFailed):
                await words(key)
        with collector_off():
            with pytest.raises(LoadFailed):
                await words("c")
            await asyncio.sleep(0)
            kinds = {thing.partition(" ")[0] for thing in unreachable()}
            assert not kinds & {"Load", "LoadGuard", "Work"}
