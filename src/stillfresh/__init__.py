"""stillfresh keeps cached data fresh.

A read is answered at once from the copy at hand, every answer says how old it is, and each refresh
happens once, for data that somebody is using.
"""

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
    Explanation,
    Function,
    Handle,
    Hook,
    Listed,
    Loaded,
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
    prometheus_text,
)
from stillfresh.engine.recordings import Recording
from stillfresh.errors import (
    BadValue,
    ConfigError,
    LeaseHeld,
    LeaseLost,
    LoadFailed,
    NotOpen,
    StillfreshError,
    StoreError,
)
from stillfresh.freshness import Policy, Verdict
from stillfresh.sweeper import Sweeper
from stillfresh.sync import SyncCache, SyncFunction, SyncHandle, SyncResource
from stillfresh.ttl_cache import EvictReason, TtlCache, TtlStats

__version__ = "0.1.0"
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
    "ConfigError",
    "Duration",
    "EvictReason",
    "Explanation",
    "Function",
    "Handle",
    "Hook",
    "LeaseHeld",
    "LeaseLost",
    "Listed",
    "LoadFailed",
    "Loaded",
    "NotOpen",
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
    "prometheus_text",
]
