"""A bug in an application's own rule, found by simulating it, with the history that leads there.

`hasty` invalidates the cached price and then changes it. A reader in between loads the old price
again, and it is served as fresh for an hour. No test that does one thing after another sees it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from stillfresh import Resource, StoreError
from stillfresh.testing import Process, SimulationFailed, Version, World, simulate

Rule: TypeAlias = Callable[[Process, Resource[str, Version], str], Awaitable[None]]

SKUS = ("sku-1", "sku-2")


async def hasty(process: Process, prices: Resource[str, Version], sku: str) -> None:
    """Invalidated, then changed: wrong."""
    await prices.invalidate(sku)
    await asyncio.sleep(0.05)  # the database takes its time
    process.announced("price", process.world.change("price", sku))


async def careful(process: Process, prices: Resource[str, Version], sku: str) -> None:
    """Changed, then invalidated."""
    await asyncio.sleep(0.05)
    changed = process.world.change("price", sku)
    await prices.invalidate(sku)
    process.announced("price", changed)


def shop(reprice: Rule) -> Callable[[World], Awaitable[None]]:
    """Two processes that read prices, and now and then change one."""

    async def app(process: Process) -> None:
        cache = process.cache()
        dice = process.world.dice

        @cache.batched("price", fresh_for="1h")
        async def prices(skus: list[str]) -> dict[str, Version | Exception]:
            return await process.load("price", skus)

        seen = process.observe("price", prices)
        for _ in process.world.steps(30):
            await asyncio.sleep(dice.random() * 0.1)
            if dice.random() < 0.2:
                with suppress(StoreError):  # nothing was announced: it is tried again by hand
                    await reprice(process, prices, dice.choice(SKUS))
            else:
                await seen.get(dice.choice(SKUS))

    async def scenario(world: World) -> None:
        world.launch(app, 2)

    return scenario


def first_failure(rule: Rule, seeds: int = 25) -> SimulationFailed | None:
    for seed in range(seeds):
        try:
            simulate(shop(rule), seed=seed)
        except SimulationFailed as failed:
            return failed
    return None


def main() -> None:
    began = time.process_time()
    failed = first_failure(hasty)
    took = (time.process_time() - began) * 1000
    print(f"hasty:   found and made small in {took:.0f} ms of work\n{failed}\n")
    print(f"careful: {first_failure(careful) or 'nothing found in 25 seeds'}")


if __name__ == "__main__":
    main()
