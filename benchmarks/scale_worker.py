"""One of several processes on a store: `python -m benchmarks.scale_worker MODE URL`.

It says `"ready"`, and begins at each line that it reads. `crowd`: loads keys of its own for a
while, then reads them. `pause`: loads keys until the next line. It says as JSON what came of it.
"""

import asyncio
import json
import sys
import threading
import time
from itertools import count
from statistics import median

from benchmarks.postgres_store import KIND, loaded
from stillfresh.stores.contract import Store
from stillfresh.stores.urls import store_for

SECONDS = 1.5
AT_ONCE = 4


async def crowd(store: Store) -> None:
    numbers, seen, name = count(), dict[str, str](), time.monotonic_ns()

    async def load() -> None:
        await loaded(store, [f"{name}-{next(numbers)}"], seen)

    async def read() -> None:
        await store.read(KIND, [f"{name}-{next(numbers) % len(seen)}"])

    for step in (load, read):
        await asyncio.to_thread(sys.stdin.readline)
        done, used, began = 0, time.process_time(), time.monotonic()

        async def go_on() -> None:
            nonlocal done
            while time.monotonic() < began + SECONDS:  # noqa: B023 (it ends before the next one)
                await step()  # noqa: B023
                done += 1

        await asyncio.gather(*(go_on() for _ in range(AT_ONCE)))
        took = time.monotonic() - began
        say({"rate": done / took, "cpu": 1e6 * (time.process_time() - used) / done})


async def pause(store: Store) -> None:
    """Milliseconds that the unluckiest load took."""
    await loaded(store, ["other"], {})
    await asyncio.to_thread(sys.stdin.readline)
    took, told = list[float](), threading.Thread(target=sys.stdin.readline)
    told.start()
    while told.is_alive():
        began = time.perf_counter()
        await loaded(store, [f"other-{len(took)}"], {})
        took.append(1000 * (time.perf_counter() - began))
        await asyncio.sleep(0.001)
    say({"longest": max(took), "median": median(took)})


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(mode: str, url: str) -> None:
    store = store_for(url, time.time)
    await store.open()
    say("ready")
    await {"crowd": crowd, "pause": pause}[mode](store)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
