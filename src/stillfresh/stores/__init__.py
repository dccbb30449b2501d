"""Where copies and leases are kept: one contract, one conformance suite, several stores.

The door: a store by its address, for a tenant. What a store is, and what it speaks of, is in
`contract`; SQLite and DynamoDB have doors of their own.
"""

from stillfresh.stores.channel import A_TAG, Channel, Tell
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.tenants import TenantStore, checked_tenant, for_tenant
from stillfresh.stores.urls import dynamodb_options, split_tenant, store_for

__all__ = ["A_TAG", "Channel", "MemoryStore", "Tell", "TenantStore", "checked_tenant"]
__all__ += ["dynamodb_options", "for_tenant", "split_tenant", "store_for"]
