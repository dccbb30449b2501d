"""All tests of a store in one class.

class TestMyStore(StoreConformance):
    async def new_store(self, clock):
        return MyStore(clock=clock)
"""

from stillfresh.testing.conformance_capabilities import (
    EvictionConformance,
    InlineConformance,
    ListingConformance,
    PushConformance,
    StatisticsConformance,
    TenantConformance,
)
from stillfresh.testing.conformance_copies import CopyConformance
from stillfresh.testing.conformance_leases import LeaseConformance
from stillfresh.testing.conformance_puts import PutConformance


class ContractConformance(CopyConformance, LeaseConformance, PutConformance):
    """Tests of what every store does, the protocol `Store`."""


class StoreConformance(
    ContractConformance,
    InlineConformance,
    ListingConformance,
    EvictionConformance,
    StatisticsConformance,
    PushConformance,
    TenantConformance,
):
    """Tests of every rule of a store. Inherit it, and return your store from `new_store`.

    Tests of a protocol that the store does not offer are skipped.
    """
