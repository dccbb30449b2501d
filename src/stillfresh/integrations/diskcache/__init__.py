"""A cache in a directory for programs that use diskcache: without pickle, on SQLite.

`from stillfresh.integrations.diskcache import Cache` instead of `from diskcache import Cache`.
"""

from typing import NoReturn

from stillfresh.integrations.diskcache.cache import CachedItem, DiskCache
from stillfresh.integrations.diskcache.converting import Conversion, LeftOut, convert

Cache = DiskCache
"""The name that diskcache has for it."""

__all__ = ["CachedItem", "Conversion", "DiskCache", "LeftOut", "convert"]

MISSING_NAMES = {
    "FanoutCache": "use Cache: reads never wait for writes, and writes are grouped",
    "Deque": "use a queue or a table of your database",
    "Index": "use a table of your database, or Cache(directory, size_limit=None)",
    "Timeout": "catch stillfresh.StoreError",
    "Disk": "give codec= to Cache",
    "JSONDisk": "give codec=stillfresh.zstd() to Cache",
    "memoize_stampede": "use memoize of Cache, which runs a function once for all callers; or "
    "stillfresh.SyncCache.cached with stale_for=",
    "DjangoCache": "use stillfresh.integrations.django.StillfreshCache",
    "Lock": "use a lock of your database, or filelock",
    "RLock": "use a lock of your database, or filelock",
    "BoundedSemaphore": "use a semaphore of your database",
    "Averager": "use incr of Cache for the sum and the count",
    "throttle": "use a rate limiter",
    "barrier": "use memoize of Cache, which runs a function once for all callers",
}
"""Names of diskcache that are not here, and what to do instead."""


def __getattr__(name: str) -> NoReturn:
    """Say what to use instead; `from … import …` shows the text of an ImportError only."""
    if name in MISSING_NAMES:
        raise ImportError(f"stillfresh has no {name} of diskcache: {MISSING_NAMES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
