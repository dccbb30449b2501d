"""SyncCache: the same cache for code without an event loop."""

from stillfresh.sync.cache import SyncCache
from stillfresh.sync.function import SyncFunction
from stillfresh.sync.resource import SyncCore, SyncHandle, SyncResource

__all__ = ["SyncCache", "SyncCore", "SyncFunction", "SyncHandle", "SyncResource"]
