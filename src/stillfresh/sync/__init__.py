"""SyncCache: the same cache for code without an event loop."""

from stillfresh.sync.cache import SyncCache
from stillfresh.sync.function import SyncFunction
from stillfresh.sync.resource import SyncHandle, SyncResource

__all__ = ["SyncCache", "SyncFunction", "SyncHandle", "SyncResource"]
