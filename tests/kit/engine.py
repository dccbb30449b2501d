"""What the engine's tests share: an upstream held in the hand, a sleep, a way to wait."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from stillfresh import Answer, Cache, Resource
from stillfresh.engine import Outcome, OwnLoad, Read
from stillfresh.engine.watcher import Watcher
from tests.kit.gates import Gated

V = TypeVar("V")
PATIENCE = 60.0
"""Seconds: on a busy machine, a process may take half of that to start."""


class Price(msgspec.Struct, frozen=True):
    """A typed value."""

    sku: str
    version: int


Prices = Resource[str, Price]


class Upstream(Gated):
    """Answers with the version of the moment; can be held up, fail, and know nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []
        self.version = 1
        self.absent: set[str] = set()

    async def __call__(self, skus: list[str]) -> Mapping[str, Price]:
        self.calls.append(list(skus))
        version = self.version
        await self.called()
        return {sku: Price(sku, version) for sku in skus if sku not in self.absent}


class Sleeper:
    """A `sleep=` under the test's control: sleepers wait until `wake`."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.append((seconds, future))
        await future

    @property
    def sleeping(self) -> int:
        """How many sleeps have begun since the last `wake`, and those that it left.

        A sleep whose task was cancelled is over: waking it would wake nobody.
        """
        return sum(not future.done() for _, future in self._sleeping)

    def wake(self, passed: float = float("inf")) -> None:
        """So much time has passed: sleeps that are over end, the others go on."""
        sleeping = self._sleeping
        self._sleeping = []
        for left, future in sleeping:
            if future.done():
                continue
            if left > passed + 1e-6:
                self._sleeping.append((left - passed, future))
            else:
                future.set_result(None)


def declare(cache: Cache, upstream: Upstream, **options: Any) -> Prices:
    """`price`, fresh for 30 s, stale for a minute, kept against failure for an hour."""
    terms: dict[str, Any] = {"fresh_for": 30, "stale_for": 60, "error_for": 3600, **options}

    @cache.batched("price", **terms)
    async def prices(skus: list[str]) -> Mapping[str, Price]:
        return await upstream(skus)

    return prices


async def idle(cache: Cache) -> None:
    """Until nothing is being loaded."""
    while any(stats.loading for stats in (await cache.stats()).resources.values()):
        await asyncio.sleep(0)


async def turns(count: int = 50) -> None:
    """Let everything run that can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], object]) -> None:
    """Let the loop run until something has happened; threads and servers get time for it, too."""
    deadline = time.monotonic() + PATIENCE
    for turn in itertools.count():
        if is_so():
            return
        assert time.monotonic() < deadline, f"it did not happen within {PATIENCE} s"
        await asyncio.sleep(0 if turn < 100 else 0.002)


# Systems on the engine use more methods of a resource than applications do. Tests of these methods
# call them here, so that their place can change without the tests.


async def read_with(resource: Resource[Any, V], key: Any, load: OwnLoad) -> Read[V]:
    """Read a key with a loader for this read."""
    return await resource.core.reads.read(key, load)


async def is_live(resource: Resource[Any, Any], key: Any) -> bool:
    """A load is under way, and nothing has invalidated the key since it began."""
    return await resource.core.is_live(key)


def renew(
    resource: Resource[Any, V], keys: Sequence[Any]
) -> AsyncGenerator[dict[Any, Outcome[V] | None]]:
    """What a watch does: load the keys that are not fresh."""
    return resource.core.renewals.renew(keys)


async def clear(resource: Resource[Any, Any]) -> None:
    """Forget every entry of the resource."""
    await resource.core.clear()


async def is_settled_within(resource: Resource[Any, Any], seconds: float) -> bool:
    """Wait until no load runs; False if one still runs after that time."""
    return await resource.core.settled(seconds)


def watcher_of(resource: Resource[Any, Any]) -> Watcher[Any, Any]:
    """The driver of the resource's watches."""
    return resource.core.watcher


def loading(resource: Resource[Any, Any]) -> int:
    """How many keys are being loaded, or wait for that."""
    return resource.core.counted().loading


def version(answer: Answer[Price]) -> int:
    return answer.value.version


async def outcome(awaitable: Awaitable[Any]) -> object:
    """The value, or the error, of something awaited."""
    try:
        return await awaitable
    except Exception as exc:  # noqa: BLE001 (tests look at it)
        return exc


async def wrong(cache: Cache, prices: Prices, how: str) -> None:
    """Upstream has changed, and somebody says so."""
    match how:
        case "hard":
            await prices.invalidate("a")
        case "soft":
            await prices.invalidate("a", soft=True)
        case "twice":
            await prices.invalidate("a")
            await prices.invalidate("a")
        case "tag":
            await cache.invalidate_tag("all")
        case _:
            await prices.delete("a")
