"""A store of ours that was opened by its address, for tests that list, count, evict and listen."""

from typing import Protocol, cast

from stillfresh.clock import Clock
from stillfresh.stores import (
    CountsEntries,
    EvictsEntries,
    ListsEntries,
    PushesChanges,
    capabilities_of,
    store_for,
)
from stillfresh.stores.contract import Store


class FullStore(Store, ListsEntries, EvictsEntries, CountsEntries, Protocol):
    """A store that lists, evicts and counts."""


class PushingStore(FullStore, PushesChanges, Protocol):
    """A store that reports changes, too."""


def full_store_for(url: str, clock: Clock) -> FullStore:
    """The store of this address."""
    store = store_for(url, clock)
    can = capabilities_of(store)
    assert can.listing is not None
    assert can.eviction is not None
    assert can.statistics is not None
    return cast("FullStore", store)


def pushing_store_for(url: str, clock: Clock) -> PushingStore:
    """The store of this address, which reports changes."""
    store = full_store_for(url, clock)
    assert capabilities_of(store).push is not None
    return cast("PushingStore", store)
