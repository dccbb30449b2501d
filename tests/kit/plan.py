"""What the tests of recordings and plans share: a shop in virtual time that is recorded."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stillfresh import Cache, LoadFailed, Recording
from stillfresh.virtual_loop import VirtualLoop


@dataclass
class ShopRun:
    """What its customers and its upstream saw."""

    requests: int = 0
    ages: list[float] = field(default_factory=list)
    stale: int = 0
    failed: int = 0

    def age(self, share: float) -> float:
        return sorted(self.ages)[int(len(self.ages) * share)]


def recorded_shop(
    file: Path,
    *,
    reads: int = 1_000,
    keys: int = 50,
    seconds: float = 300.0,
    fresh_for: float = 20.0,
    stale_for: float = 40.0,
    took: float = 0.2,
    share: float = 1.0,
    seed: int = 1,
    name: str = "price",
    fails: Callable[[float], bool] = lambda _: False,
    changes: int = 0,
    watched: int = 0,
) -> ShopRun:
    """A few keys are read often, many now and then; each load takes about `took`."""
    loop = VirtualLoop(None)
    dice = random.Random(seed)
    run = ShopRun()
    cache = Cache("memory://", clock=loop.time, dice=lambda: 0.5)

    @cache.batched(name, fresh_for=fresh_for, stale_for=stale_for, max_batch=20)
    async def prices(skus: list[str]) -> dict[str, int]:
        run.requests += 1
        began = loop.time()
        await asyncio.sleep(took * dice.uniform(0.5, 1.5))
        if fails(began):
            raise ConnectionError("down")
        return dict.fromkeys(skus, 1999)

    async def read(key: str) -> None:
        try:
            answer = await prices.get(key)
        except LoadFailed:
            run.failed += 1
            return
        run.ages.append(loop.time() - answer.fetched_at)
        run.stale += answer.verdict != "fresh"

    names = [f"sku-{number}" for number in range(keys)]
    times = sorted(dice.uniform(0, seconds) for _ in range(reads))
    picks = dice.choices(names, [1 / (place + 1) for place in range(keys)], k=reads)
    steps = [(at, key, "read") for at, key in zip(times, picks, strict=True)]
    for number in range(changes):
        what = "put" if number % 2 else "invalidate"
        steps.append((dice.uniform(0, seconds), dice.choice(names), what))
    with loop.running():
        loop.create_task(cache.open())
        loop.advance(0)
        with cache.recording(Recording(file, share=share)):
            with prices.watch(names[:watched]):
                for at, key, what in sorted(steps):
                    loop.advance(at)
                    if what == "put":
                        loop.create_task(prices.put(key, 1))
                    elif what == "invalidate":
                        loop.create_task(prices.invalidate(key))
                    else:
                        loop.create_task(read(key))
                loop.advance(seconds)
            loop.advance(seconds + 5)
        loop.create_task(cache.close())
        loop.advance(seconds + 15)
    loop.end()
    return run
