"""A consumer of an outbox in a process of its own: `DATABASE STORE STEPS`.

It says `ready` when it has caught up. Then it takes so many steps, says `here` and stands still, to
be killed there.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

from stillfresh import Cache
from stillfresh.integrations.postgres import OutboxConsumer
from stillfresh.integrations.postgres.database import OutboxLink


async def main(database: str, store: str, steps: int) -> None:
    left = [1_000_000]

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        async def counted_step(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                print("here", flush=True)
                time.sleep(3600)  # noqa: ASYNC251 (the whole process stands still)
            return await step(*args, **options)

        return counted_step

    OutboxLink.ask = counted(OutboxLink.ask)  # type: ignore[method-assign]
    async with Cache(store) as cache:
        cache.invalidate_tag = counted(cache.invalidate_tag)  # type: ignore[method-assign]
        async with OutboxConsumer(cache, database, "shop", poll="100ms") as consumer:
            await consumer.caught_up()
            left[0] = steps + 1
            print("ready", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
