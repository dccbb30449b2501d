"""Many keys with few calls: what is asked for at the same time is loaded together.

Use it when the upstream can answer for many keys at once: `WHERE id IN (…)`, or `?ids=1,2,3`.
"""

import asyncio

from stillfresh import Cache

cache = Cache("memory://")
calls: list[list[int]] = []


@cache.batched("user", fresh_for="5m", stale_for="1h", max_batch=100)
async def users(ids: list[int]) -> dict[int, str]:
    calls.append(ids)
    return {id_: f"user {id_}" for id_ in ids if id_ > 0}  # one that is left out does not exist


async def page(author: int, reader: int) -> str:
    return f"{await users(author)} is read by {await users(reader)}"


async def main() -> None:
    async with cache:
        pages = await asyncio.gather(*(page(1, reader) for reader in range(2, 50)))
        print(pages[0])  # user 1 is read by user 2
        print(len(pages), len(calls))  # 48 2
        try:
            await users(0)
        except KeyError:
            print("there is no user 0")  # there is no user 0


asyncio.run(main())
