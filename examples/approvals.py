"""Requests that wait for a person, and must not be approved after their time.

Run it: `make examples`. Three requests come in, each with three seconds to live. One is approved in
time, one too late, one by eight people at once. Then a million expired entries are swept while
the event loop goes on breathing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from stillfresh import Clock, Sweeper, TtlCache
from stillfresh.clock import monotonic
from stillfresh.testing import ManualClock

Sleep = Callable[[float], Awaitable[object]]


def approve(pending: TtlCache[str, str], request_id: str) -> str:
    """What a button does: `remove` hands the request to exactly one caller, and never late."""
    request = pending.remove(request_id)
    return f"approved: {request}" if request is not None else "nothing to approve"


async def requests(clock: Clock, sleep: Sleep) -> None:
    """Insert, read, approve, expire: the whole life of an entry."""
    began = clock()

    def say(text: str) -> None:
        print(f"{clock() - began:5.1f} s  {text}")

    pending = TtlCache[str, str](
        ttl="3s", clock=clock, on_evict=lambda key, _, reason: say(f"{key} dropped ({reason})")
    )
    async with Sweeper(pending, every="1s", sleep=sleep):
        for request_id, request in {"r1": "open the gate", "r2": "raise an army"}.items():
            pending.insert(request_id, request)
            say(f"{request_id} asks to {request}; it has 3 seconds")
        await sleep(1.5)
        say(f"r1 → {approve(pending, 'r1')}")
        say(f"r1 again → {approve(pending, 'r1')}")
        await sleep(1.6)
        say(f"r2 → {approve(pending, 'r2')} (it came 0.1 s too late)")

        pending.insert("r3", "ring the bell")
        with ThreadPoolExecutor(8) as people:
            answers = list(people.map(lambda _: approve(pending, "r3"), range(8)))
        won = sum(answer.startswith("approved") for answer in answers)
        say(f"r3 → eight people press at once: {won} approval")


async def million(entries: int) -> None:
    """Sweep a million expired entries; how long did the event loop have to wait at most?"""
    print(f"\nFilling a cache with {entries:,} entries …")
    clock = ManualClock()
    cache = TtlCache[int, int](ttl=1, clock=clock)
    for number in range(entries):
        cache.insert(number, number)
    clock.advance(1)

    longest = 0.0

    async def breathe() -> None:
        nonlocal longest
        while True:
            before = monotonic()
            await asyncio.sleep(0)
            longest = max(longest, monotonic() - before)

    breathing = asyncio.create_task(breathe())
    dropped = await Sweeper(cache, every=1).tick()
    breathing.cancel()
    await asyncio.wait([breathing])
    print(f"swept {dropped:,}; the loop never waited longer than {longest * 1000:.1f} ms")


async def main(
    clock: Clock = monotonic, sleep: Sleep = asyncio.sleep, entries: int = 1_000_000
) -> None:
    await requests(clock, sleep)
    await million(entries)


if __name__ == "__main__":
    asyncio.run(main())
