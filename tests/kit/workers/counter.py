"""A process that adds to one number, from several tasks at once: `URL TASKS TIMES`."""

import asyncio
import sys

from stillfresh import Answer, Cache, Resource


def counters(cache: Cache) -> Resource[str, int]:
    @cache.batched("counter", fresh_for="1h")
    async def counters(keys: list[str]) -> dict[str, int]:
        return dict.fromkeys(keys, 0)

    return counters


def one_more(answer: Answer[int] | None) -> int:
    return 1 if answer is None else answer.value + 1


async def count(numbers: Resource[str, int], times: int) -> None:
    for _ in range(times):
        await numbers.update("hits", one_more)


async def main(url: str, tasks: int, times: int) -> None:
    async with Cache(url) as cache:
        numbers = counters(cache)
        print("ready", flush=True)
        sys.stdin.readline()
        await asyncio.gather(*(count(numbers, times) for _ in range(tasks)))
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
