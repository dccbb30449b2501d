"""All tests of a store in one class.

class TestMyStore(StoreConformance):
    async def new_store(self, clock):
        return MyStore(clock=clock)
"""

from stillfresh.testing.conformance_copies import CopyConformance
from stillfresh.testing.conformance_leases import LeaseConformance
from stillfresh.testing.conformance_puts import PutConformance


class StoreConformance(CopyConformance, LeaseConformance, PutConformance):
    """Tests of every rule of a store. Inherit it, and return your store from `new_store`."""
