"""A process that uses a DiskCache: `DIRECTORY WHAT LOG`.

`count` adds 1 to a counter 200 times, in two threads. `memoize` calls a slow function in four
threads; each call of it adds a line to LOG. `write` sets keys until it is killed, and says each.
"""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from stillfresh.integrations.diskcache import Cache


def main(directory: str, what: str, log: str) -> None:
    cache = Cache(directory)

    @cache.memoize(expire=60)
    def slow(number: int) -> int:
        with Path(log).open("a") as lines:
            lines.write("called\n")
        time.sleep(0.3)
        return number * 2

    def add(_: int) -> None:
        for _ in range(100):
            cache.incr("counter")

    def ask(_: int) -> int:
        start.wait()
        return slow(21)

    start = threading.Barrier(4)
    print("ready", flush=True)
    sys.stdin.readline()
    match what:
        case "count":
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(add, range(2)))
            print("counted", flush=True)
        case "memoize":
            with ThreadPoolExecutor(4) as pool:
                print(*pool.map(ask, range(4)), flush=True)
        case "write":
            for number in count():
                cache.set(number, "x" * 1_000, tag="many")
                print(number, flush=True)
    cache.close()


if __name__ == "__main__":
    main(*sys.argv[1:4])
