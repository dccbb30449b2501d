"""Values that are kept fresh while somebody looks at them, and no longer.

Use it when a screen, a bot or a WebSocket shows what changes: you are told of each new value, and
nothing is asked for after the block has ended.
"""

import asyncio

from stillfresh import Cache

cache = Cache("memory://")
prices = {"tea": 300}  # your database


@cache.batched("price", fresh_for="5s")
async def price(skus: list[str]) -> dict[str, int]:
    return {sku: prices[sku] for sku in skus}


async def main() -> None:
    async with cache:
        with price.watch("tea") as screen:
            print(await price("tea"))  # 300
            prices["tea"] = 350
            await price.invalidate("tea")  # the watch loads it at once
            async for update in screen:
                if update.answer.value == 350:
                    break
        print(update.key, update.answer.value)  # tea 350


asyncio.run(main())
