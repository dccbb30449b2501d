"""Where copies and leases are kept: one contract, one conformance suite, several stores.

This module opens a store by its address, for a tenant. `contract` defines what a store is. SQLite
and DynamoDB have modules of their own for other packages.
"""

from stillfresh.stores.breaker import TRIED_AGAIN
from stillfresh.stores.capabilities import (
    Capabilities,
    CountsEntries,
    EvictsEntries,
    HasAddress,
    LimitsBytes,
    ListsEntries,
    LivesInProcess,
    PushesChanges,
    ReadsInline,
    ReadsInThreads,
    SeparatesTenants,
    ShapesValues,
    StatesCapabilities,
    capabilities_by_protocol,
    capabilities_of,
)
from stillfresh.stores.channel import A_TAG, Channel, Tell
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.rules import checked_limit
from stillfresh.stores.tenants import TenantStore, checked_tenant, for_tenant
from stillfresh.stores.urls import dynamodb_options, running, split_tenant, store_for
from stillfresh.stores.wrapped import WrappedStore

__all__ = ["A_TAG", "TRIED_AGAIN", "Channel", "MemoryStore", "Tell", "TenantStore"]
__all__ += ["checked_limit", "checked_tenant", "dynamodb_options", "for_tenant", "running"]
__all__ += ["split_tenant", "store_for"]
__all__ += ["Capabilities", "WrappedStore", "capabilities_by_protocol", "capabilities_of"]
__all__ += ["CountsEntries", "EvictsEntries", "HasAddress", "LimitsBytes", "ListsEntries"]
__all__ += ["LivesInProcess", "PushesChanges", "ReadsInThreads", "ReadsInline"]
__all__ += ["SeparatesTenants", "ShapesValues", "StatesCapabilities"]
