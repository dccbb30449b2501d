"""Where copies and leases are kept: one contract, one conformance suite, several stores.

This module opens a store by its address, for a tenant (`urls`, `tenants`). `contract` defines what
a store is, and `capabilities` what only some can do. SQLite and DynamoDB have modules of their own
for other packages.

The way of a request: the engine calls a method of the contract for some keys of one kind. The
store's own `store` module turns it into atomic steps: `memory` takes them in place; `sqlite` queues
jobs for `writer`, which run `steps` in a transaction; `redis`, `postgres` and `dynamodb` send
scripts, functions or conditional requests over their `link` (DynamoDB: `aws`). The link limits the
time, sends a request again if its answer was lost, and translates errors (`server`, `breaker`).
What a stored row means is in `layout`, `schema` or `rows`; what all stores decide alike in `rules`.
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
    TellsEmptiness,
    WaitsInThreads,
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
__all__ += ["SeparatesTenants", "ShapesValues", "StatesCapabilities", "TellsEmptiness"]
__all__ += ["WaitsInThreads"]
