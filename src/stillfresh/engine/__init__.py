"""The engine: the read path that all systems share, and the one law."""

from stillfresh.engine.cache import Cache
from stillfresh.engine.codec import Codec
from stillfresh.engine.listing import Listed
from stillfresh.engine.metrics import CacheStats, ResourceStats
from stillfresh.engine.model import Answer, Explanation, Loaded, Origin, RetryAfter
from stillfresh.engine.prometheus import prometheus_text
from stillfresh.engine.resource import Function, Handle, Resource
from stillfresh.engine.watch import Update, Watch

__all__ = [
    "Answer",
    "Cache",
    "CacheStats",
    "Codec",
    "Explanation",
    "Function",
    "Handle",
    "Listed",
    "Loaded",
    "Origin",
    "Resource",
    "ResourceStats",
    "RetryAfter",
    "Update",
    "Watch",
    "prometheus_text",
]
