"""What `stillfresh replay` can play: short histories, for people to look at.

Each is a scenario of the simulator. The first two are the same story, with and without the law: one
process loads a value, another one invalidates it meanwhile. `visitors` is different for each seed,
with all faults of the simulator.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from msgspec.structs import replace

from stillfresh.engine import Resource
from stillfresh.errors import ConfigError, LoadFailed, NotOpen, shown
from stillfresh.stores import MemoryStore
from stillfresh.stores.contract import Mark
from stillfresh.testing import Blow, Faults, Observed, Process, Trouble, Version, World
from stillfresh.testing.simulator.simulate import Scenario

SLOW_LOAD: Final = 2.0
"""Seconds that the upstream takes in the story of an invalidation during a load."""
SEEN_LATENCY: Final = (0.08, 0.16)
"""Seconds of a message, so that its arrow is seen to lean."""
KEYS: Final = ("a", "b")
VISITS: Final = 10


class LawlessStore(MemoryStore):
    """A deliberate bug: an invalidation marks the copy, and leaves the lease alive."""

    def _invalidate(self, keys: Iterable[tuple[str, str]], *, soft: bool) -> None:
        mark = Mark.SOFT if soft else Mark.HARD
        rows = self._opened()
        for key in keys:
            row = rows.get(key)
            if row is not None and row.copy is not None:
                row.copy = replace(row.copy, mark=max(row.copy.mark, mark))


@dataclass(frozen=True, slots=True)
class Play:
    """A scenario, the faults that may happen in it, and what a reader should know."""

    title: str
    story: str
    scenario: Scenario
    faults: Faults = field(default_factory=Faults.none)
    store_class: type[MemoryStore] = MemoryStore


def prices_of(process: Process, load: Callable[[list[str]], Any]) -> Observed:
    """The resource `price` of one process."""
    cache = process.cache()
    options: Mapping[str, Any] = {"fresh_for": 60, "stale_for": 60, "lease_for": 5}
    price: Resource[str, Version] = cache.batched("price", **options)(load)
    return process.observe("price", price)


async def invalidation_during_load(world: World) -> None:
    """Process 1 loads version 1. Process 2 changes it to 2 and invalidates. Who reads what?"""
    world.latency = SEEN_LATENCY
    first, second = (slow_prices(world.process()) for _ in range(2))
    world.change("price", "a")
    early = first.process.start(first.get("a"))
    await asyncio.sleep(1.0)
    await second.process.start(second.change("a"))
    await early
    await asyncio.sleep(0.4)
    for reader in (second, first, second):
        await reader.process.start(reader.get("a"))
        await asyncio.sleep(0.3)


def slow_prices(process: Process) -> Observed:
    """Its first load takes long; the others are quick."""
    pauses = iter([SLOW_LOAD if process.number == 1 else 0.2])

    async def load(ids: list[str]) -> dict[str, Version]:
        world = process.world
        loaded = {
            id_: world.ledger.load(process.number, ("price", id_), leased=True, now=world.time())
            for id_ in ids
        }
        await process.spend(ids, next(pauses, 0.2))
        return loaded

    return prices_of(process, load)


async def visitors(world: World) -> None:
    """Three processes read and change two keys, while messages, processes and clocks fail."""
    world.latency = SEEN_LATENCY
    world.longest_delay = 8.0
    world.launch(visitor, 3)


async def visitor(process: Process) -> None:
    async def load(ids: list[str]) -> dict[str, Version | Exception]:
        return await process.load("price", ids)

    prices = prices_of(process, load)
    dice = process.world.dice
    for _ in process.world.steps(VISITS):
        await asyncio.sleep(dice.choice([0.1, 0.3, 1.0]))
        key = dice.choice(KEYS)
        with suppress(LoadFailed, NotOpen):
            if dice.random() < 0.25:
                await prices.change(key)
            else:
                await prices.get(key)


SCENARIOS: Final[Mapping[str, Play]] = {
    "invalidation": Play(
        "An invalidation during a load",
        "Process 1 asks the upstream for a price, and the upstream is slow. Meanwhile the price "
        "changes, and process 2 invalidates it: that voids the lease of process 1. So the store "
        "refuses the old price when it arrives, and process 1 loads again.",
        invalidation_during_load,
    ),
    "invalidation-without-the-law": Play(
        "The same without the law: the old value comes back",
        "The same history with a deliberate bug: the invalidation leaves the lease alive. The "
        "store takes the old price after it was invalidated, and everybody is served the old "
        "price as fresh, for as long as it is fresh. The dashed bar is the lease as the law would "
        "have ended it.",
        invalidation_during_load,
        store_class=LawlessStore,
    ),
    "visitors": Play(
        "Three processes under faults",
        "Three processes read and change two prices. Messages are lost, late and doubled, "
        "processes are killed and paused, clocks are wrong. Every seed is another history.",
        visitors,
        Faults(
            troubles=[Trouble.LATE, Trouble.TWICE, Trouble.LOST, Trouble.UNANSWERED],
            blows=[Blow.KILL, Blow.PAUSE],
            most_blows=2,
            within=5.0,
        ),
    ),
}
"""By the name that `--scenario` takes."""


def play_of(name: str) -> Play:
    """The play of that name, or the scenario `package.module:function`. Raises ConfigError."""
    play = SCENARIOS.get(name)
    if play is not None:
        return play
    module, colon, function = name.partition(":")
    names = ", ".join(SCENARIOS)
    if not colon:
        raise ConfigError(f"--scenario: there is no {shown(name)}; there are {names}")
    try:
        scenario = getattr(import_module(module), function)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"--scenario: cannot import {shown(name)}: {exc}") from exc
    title = function.replace("_", " ")
    return Play(title.capitalize(), (scenario.__doc__ or "").strip(), scenario, Faults())
