"""Bytes that a cache adds for one entry, each measured in a process of its own.

`python -m benchmarks.memory NAME COUNT` prints the figure. Keys and values exist beforehand, so
only what the cache itself allocates counts.
"""

import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Callable

__all__ = ["bytes_per_entry"]


def fill_stillfresh(keys: list[str], values: list[object]) -> object:
    from stillfresh import TtlCache  # noqa: PLC0415 (only the measured library is imported)

    cache = TtlCache[str, object](3600)
    for key, value in zip(keys, values, strict=True):
        cache.insert(key, value)
    return cache


def fill_cachetools(keys: list[str], values: list[object]) -> object:
    from cachetools import TTLCache  # noqa: PLC0415

    cache: TTLCache[str, object] = TTLCache(2 * len(keys), 3600)
    for key, value in zip(keys, values, strict=True):
        cache[key] = value
    return cache


FILLS: dict[str, Callable[[list[str], list[object]], object]] = {
    "stillfresh": fill_stillfresh,
    "cachetools": fill_cachetools,
}


def bytes_per_entry(name: str, count: int) -> float:
    """Measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.memory", name, str(count)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure(name: str, count: int) -> float:
    keys = [f"key-{number}" for number in range(count)]
    values = [object() for _ in range(count)]
    FILLS[name](keys[:1], values[:1])  # imports happen outside the measurement
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cache = FILLS[name](keys, values)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    del cache
    return used / count


if __name__ == "__main__":
    print(measure(sys.argv[1], int(sys.argv[2])))
