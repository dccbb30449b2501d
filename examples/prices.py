"""A slow, fragile upstream behind the engine: watch one load serve sixteen callers, and an outage.

Run it: `python examples/prices.py`. It takes about five seconds.
"""

import asyncio
import logging
import time
from collections.abc import Mapping

from stillfresh import Cache

cache = Cache("memory://")


class Upstream:
    """Half a second a call, and sometimes nothing at all."""

    calls = 0
    down = False


@cache.batched("price", fresh_for="1s", stale_for="1m", error_for="1h", max_batch=50)
async def prices(skus: list[str]) -> Mapping[str, int]:
    Upstream.calls += 1
    await asyncio.sleep(0.5)
    if Upstream.down:
        raise ConnectionError("the upstream is down")
    return dict.fromkeys(skus, 1000 + Upstream.calls)


async def show(title: str) -> None:
    began = time.perf_counter()
    answer = await prices.get("sku-1")
    took = (time.perf_counter() - began) * 1000
    print(
        f"{title:42} {answer.value}  {answer.verdict:7} age {answer.age:4.1f} s  in {took:6.1f} ms"
    )


async def main() -> None:
    async with cache:
        await asyncio.gather(*(prices("sku-1") for _ in range(16)))
        print(f"sixteen callers, one cold key: {Upstream.calls} call upstream")
        await show("again, from memory")
        await asyncio.sleep(1.1)
        await show("a second later: stale, served at once")
        await asyncio.sleep(0.6)
        await show("and refreshed behind that read")
        Upstream.down = True
        await asyncio.sleep(1.1)
        await show("the upstream goes down")
        await asyncio.sleep(0.6)
        await show("still served, and the answer says why")
        print((await prices.get("sku-1")).error)
        print(await prices.explain("sku-1"))
        Upstream.down = False
        await prices.refresh("sku-1")
        await show("back again, refreshed by hand")


if __name__ == "__main__":
    logging.getLogger("stillfresh").setLevel(logging.ERROR)  # the example itself says what failed
    asyncio.run(main())
