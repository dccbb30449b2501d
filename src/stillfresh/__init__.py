"""stillfresh keeps cached data fresh.

A read is answered at once from the copy at hand, every answer says how old it is, and each refresh
happens once, for data that somebody is using.

What is shown here is imported when it is first used: a program that only starts, or prints its
help, does not wait for it.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from stillfresh.clock import Clock
    from stillfresh.durations import Duration
    from stillfresh.engine import (
        DELETE,
        LEAVE,
        Amended,
        Answer,
        Cache,
        CacheStats,
        Codec,
        CodecMaker,
        Explanation,
        Function,
        Handle,
        Hook,
        InvalidatedEntries,
        Listed,
        Loaded,
        NotedChanges,
        Origin,
        Refreshed,
        RefreshEnd,
        Resource,
        ResourceStats,
        RetryAfter,
        Span,
        Stored,
        Update,
        Watch,
        arrow,
        encrypted,
        merge_tokens,
        new_key,
        noted_changes,
        prometheus_text,
        zstd,
    )
    from stillfresh.engine.recordings import Recording
    from stillfresh.errors import (
        BadValue,
        ConfigError,
        LeaseHeld,
        LeaseLost,
        LoadFailed,
        LoadTimeout,
        NotOpen,
        StillfreshError,
        StoreError,
    )
    from stillfresh.freshness import Policy, Verdict
    from stillfresh.sweeper import Sweeper
    from stillfresh.sync import SyncCache, SyncFunction, SyncHandle, SyncResource
    from stillfresh.ttl_cache import EvictReason, TtlCache, TtlStats

__version__ = "0.2.0"
__all__ = [
    "DELETE",
    "LEAVE",
    "Amended",
    "Answer",
    "BadValue",
    "Cache",
    "CacheStats",
    "Clock",
    "Codec",
    "CodecMaker",
    "ConfigError",
    "Duration",
    "EvictReason",
    "Explanation",
    "Function",
    "Handle",
    "Hook",
    "InvalidatedEntries",
    "LeaseHeld",
    "LeaseLost",
    "Listed",
    "LoadFailed",
    "LoadTimeout",
    "Loaded",
    "NotOpen",
    "NotedChanges",
    "Origin",
    "Policy",
    "Recording",
    "RefreshEnd",
    "Refreshed",
    "Resource",
    "ResourceStats",
    "RetryAfter",
    "Span",
    "StillfreshError",
    "StoreError",
    "Stored",
    "Sweeper",
    "SyncCache",
    "SyncFunction",
    "SyncHandle",
    "SyncResource",
    "TtlCache",
    "TtlStats",
    "Update",
    "Verdict",
    "Watch",
    "arrow",
    "encrypted",
    "merge_tokens",
    "new_key",
    "noted_changes",
    "prometheus_text",
    "zstd",
]

_HOMES = (
    "stillfresh.errors",
    "stillfresh.durations",
    "stillfresh.freshness",
    "stillfresh.clock",
    "stillfresh.ttl_cache",
    "stillfresh.sweeper",
    "stillfresh.engine",
    "stillfresh.engine.recordings",
    "stillfresh.sync",
)
"""Where the public names are, the cheapest to import first."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name in __all__:
        for home in _HOMES:
            public = getattr(importlib.import_module(home), name, None)
            if public is not None:
                globals()[name] = public
                return public
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
