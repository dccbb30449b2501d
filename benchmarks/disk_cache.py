"""DiskCache beside diskcache: reading, writing, and functions that many threads call (D2).

One thread's times are of the process's CPU: what else runs on the machine counts in none of them.
"""

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import diskcache

from benchmarks.harness import Contender, Progress, Row, Section, race
from stillfresh.integrations.diskcache import DiskCache

__all__ = ["section"]

VALUES: Final = {"text of 30 bytes": "x" * 30, "dict of 700 bytes": {"text": "x" * 680, "n": 1}}
STATEMENTS: Final = {
    "get": "cache.get(key)",
    "get, missing": "cache.get('missing')",
    "set": "cache.set(key, value)",
    "add, refused": "cache.add(key, value)",
}
CLOCK: Final = {"perf_counter_ns": time.process_time_ns}
"""In place of the clock by which `race` measures."""
COUNTER: Final = "cache.incr('counter')"
THREADS: Final = 16
KEYS: Final = 20
WRITES: Final = 50
"""Of each thread."""


def calls(cache: Any) -> int:  # noqa: ANN401 (ours, or diskcache's, which has no types)
    """How often a memoized function is called for sixteen threads."""
    called: list[int] = []
    start = threading.Barrier(THREADS)

    @cache.memoize()  # type: ignore[untyped-decorator]
    def slow(number: int) -> int:
        called.append(number)
        time.sleep(0.05)
        return number

    def ask(_: int) -> None:
        start.wait()
        slow(1)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(ask, range(THREADS)))
    return len(called)


def written(cache: Any) -> float:  # noqa: ANN401
    """Microseconds for one `set`, of sixteen threads at once."""
    start = threading.Barrier(THREADS)

    def write(thread: int) -> None:
        start.wait()
        for number in range(WRITES):
            cache.set((thread, number), "x" * 30)

    with ThreadPoolExecutor(THREADS) as pool:
        began = time.perf_counter()
        list(pool.map(write, range(THREADS)))
        return (time.perf_counter() - began) / (THREADS * WRITES) * 1e6


def section(progress: Progress) -> Section:
    rows: list[Row] = []
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ours = DiskCache(Path(folder) / "ours")
        theirs = diskcache.Cache(str(Path(folder) / "theirs"))
        caches = {"DiskCache": ours, "diskcache": theirs}
        for size, value in VALUES.items():
            for cache in caches.values():
                for key in range(KEYS):
                    cache.set(key, value)
            for what, statement in {**STATEMENTS, "incr": COUNTER}.items():
                progress(f"DiskCache: {what}, {size}")
                contenders = [
                    Contender(
                        name, statement, {**CLOCK, "cache": cache, "value": value}, range(KEYS)
                    )
                    for name, cache in caches.items()
                ]
                taken = race(contenders, rounds=31)
                figures[f"`{what}`, {size}, µs of CPU"] = {
                    name: ns / 1000 for name, ns in taken.items()
                }
                ratio = taken["DiskCache"] / taken["diskcache"]
                rows.append(Row("D2", f"`{what}` of a {size}, against diskcache", ratio))
        progress("DiskCache: threads")
        taken = {name: written(cache) for name, cache in caches.items()}
        figures[f"`set` of {THREADS} threads at once, µs each"] = taken
        ratio = taken["DiskCache"] / taken["diskcache"]
        rows.append(Row("D2", f"`set` of {THREADS} threads at once, against diskcache", ratio))
        called = {name: float(calls(cache)) for name, cache in caches.items()}
        figures[f"calls of a memoized function for {THREADS} threads"] = called
        what = f"calls of a memoized function for {THREADS} threads"
        rows.append(Row("D2", what, called["DiskCache"], 1.0, unit=""))
        ours.close()
        theirs.close()
    return Section(
        "DiskCache (D2)",
        rows,
        figures,
        "Every read asks the file, in both. diskcache stores text as it is and pickles dicts; "
        "DiskCache writes msgpack. Both write in the calling thread. The times of sixteen threads "
        "are by the wall clock.",
    )
