"""What only some stores can do, each as a small protocol beside the contract.

A store inherits from the protocols of what it can do. Whoever uses a store asks `capabilities_of`
once, when the store is opened, and then looks at the record: a field is None if the store cannot do
it.

Never ask with `isinstance`. A wrapper has every method, and can do only what the store inside can;
a Redis cluster has the methods of a single server. Such a store says itself what it can do
(`StatesCapabilities`).
"""

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from msgspec import Struct

from stillfresh.errors import ConfigError
from stillfresh.stores.channel import Channel, Tell
from stillfresh.stores.contract import After, Generations, Record, Store, StoredEntry, StoreStats

if TYPE_CHECKING:
    from stillfresh.stores.bodies import Shape

WALKED: Final = 500
"""Entries that a walk reads together."""


@runtime_checkable
class ReadsInline(Protocol):
    """A store that reads on the caller's thread in microseconds, without waiting."""

    @abstractmethod
    def read_now(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        """As `read`, at once."""


@runtime_checkable
class ReadsInThreads(Protocol):
    """A store that a thread without an event loop can read, while it waits."""

    @abstractmethod
    def read_in_thread(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        """As `read`, while the thread waits."""


@runtime_checkable
class WaitsInThreads(Protocol):
    """A store whose steps a thread can run if it has the turn of the event loop (`turns.py`).

    They wait in that thread, on connections of its own, and never suspend.
    """

    waits_in_threads: bool = True


@runtime_checkable
class TellsEmptiness(Protocol):
    """A store whose refused puts say whether there is nothing at all (`PutResult.is_empty`)."""

    tells_emptiness: bool = True


@runtime_checkable
class ListsEntries(Protocol):
    """A store that can list its entries, page by page."""

    @abstractmethod
    async def entries(
        self, kind: str | None = None, search: str = "", after: After = None, limit: int = 100
    ) -> list[StoredEntry]:
        """The next `limit` entries, of one kind or of all, whose id has `search` in it.

        Fewer mean that there are no more. `after` is the (kind, id) of the last one listed, which
        may be gone. By kind and id, where the store has an order. Reads no value; no step is long.
        """

    async def walk(self, kind: str | None) -> AsyncIterator[list[StoredEntry]]:
        """All entries, of one kind or of all, in any order, some at a time."""
        after: After = None
        while page := await self.entries(kind, "", after, WALKED):
            yield page
            after = page[-1].kind, page[-1].id


@runtime_checkable
class EvictsEntries(Protocol):
    """A store that can drop entries that can never be served again."""

    evicts_hourly: bool = True
    """The cache evicts every hour. False: only on request, as its server drops old entries."""

    @abstractmethod
    async def evict(self, before: float) -> int:
        """Drop entries that had nothing to serve and no lease before then; return how many."""


@runtime_checkable
class CountsEntries(Protocol):
    """A store that knows how much it holds."""

    @abstractmethod
    async def stats(self) -> StoreStats:
        """Count the present contents."""


@runtime_checkable
class LimitsBytes(Protocol):
    """A store that takes a limit, above which it drops the least recently used copies.

    Its statistics then have `held` and `evicted`.
    """

    max_bytes: int | None = None
    """The limit; None: it has none."""


@runtime_checkable
class PushesChanges(Protocol):
    """A store that reports changes by any process at once."""

    @abstractmethod
    def listen(self, tell: Tell) -> AbstractAsyncContextManager[Channel]:
        """Inside the block, report publications, invalidations and deletions, once or more."""


@runtime_checkable
class LivesInProcess(Protocol):
    """A store whose entries are objects of this process.

    No step waits, so steps are timed for hooks only. It is bound to no event loop, and stays open
    when the cache's loop ends without a close.
    """

    @abstractmethod
    def before_evicting(self, kind: str, keeps: Callable[[str], bool]) -> None:
        """Evict ids last for which `keeps(id)` is True: memory used them lately."""


@runtime_checkable
class SeparatesTenants(Protocol):
    """A store with partitions for tenants. Other stores are wrapped in a `TenantStore`."""

    tenant: str | None
    """It reads and writes entries of this tenant only; None: of no tenant."""

    @abstractmethod
    def for_tenant(self, tenant: str) -> Store:
        """The store of this tenant's own partitions, not opened yet."""


@runtime_checkable
class ShapesValues(Protocol):
    """A store whose values are read by programs in other languages."""

    shapes: "dict[str, Shape]"
    """By kind, how values lie where others read them."""


@runtime_checkable
class HasAddress(Protocol):
    """A store with an address. Caches with the same address share its entries."""

    address: str | None = None
    """Without the tenant; None: it was not opened by an address, or shares nothing."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """What one store can do beside the contract: the store as each protocol, or None."""

    store_name: str  # of its class
    inline: ReadsInline | None = None
    threads: ReadsInThreads | None = None
    listing: ListsEntries | None = None
    eviction: EvictsEntries | None = None
    statistics: CountsEntries | None = None
    push: PushesChanges | None = None
    process: LivesInProcess | None = None
    partitions: SeparatesTenants | None = None
    evicts_hourly: bool = False
    waits_in_threads: bool = False
    tells_emptiness: bool = False
    max_bytes: int | None = None
    tenant: str | None = None
    shapes: "dict[str, Shape] | None" = None
    address: str | None = None

    def require_listing(self) -> ListsEntries:
        """The store as a list of entries. Raises ConfigError if it has none."""
        if self.listing is None:
            raise self._refusal("list its entries", ListsEntries)
        return self.listing

    def require_eviction(self) -> EvictsEntries:
        """The store as one that evicts. Raises ConfigError if it cannot."""
        if self.eviction is None:
            raise self._refusal("evict entries", EvictsEntries)
        return self.eviction

    def require_statistics(self) -> CountsEntries:
        """The store as one that counts. Raises ConfigError if it cannot."""
        if self.statistics is None:
            raise self._refusal("count its entries", CountsEntries)
        return self.statistics

    def _refusal(self, action: str, protocol: type) -> ConfigError:
        return ConfigError(
            f"{self.store_name} cannot {action}: it lacks the protocol {protocol.__name__} "
            f"of stillfresh.stores; add its methods to the store"
        )


@runtime_checkable
class StatesCapabilities(Protocol):
    """A store whose abilities depend on its settings, or on a store inside it."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return what it can do, without asking a server."""


def capabilities_of(store: Store) -> Capabilities:
    """Return what this store can do: as it states itself, or by its protocols."""
    if isinstance(store, StatesCapabilities):
        return store.capabilities()
    return capabilities_by_protocol(store)


def capabilities_by_protocol(store: Store) -> Capabilities:
    """Return what the class of this store can do. An instance may be able to do less."""
    return Capabilities(
        store_name=type(store).__name__,
        inline=store if isinstance(store, ReadsInline) else None,
        threads=store if isinstance(store, ReadsInThreads) else None,
        listing=store if isinstance(store, ListsEntries) else None,
        eviction=store if isinstance(store, EvictsEntries) else None,
        statistics=store if isinstance(store, CountsEntries) else None,
        push=store if isinstance(store, PushesChanges) else None,
        process=store if isinstance(store, LivesInProcess) else None,
        partitions=store if isinstance(store, SeparatesTenants) else None,
        evicts_hourly=isinstance(store, EvictsEntries) and store.evicts_hourly,
        waits_in_threads=isinstance(store, WaitsInThreads) and store.waits_in_threads,
        tells_emptiness=isinstance(store, TellsEmptiness) and store.tells_emptiness,
        max_bytes=store.max_bytes if isinstance(store, LimitsBytes) else None,
        tenant=store.tenant if isinstance(store, SeparatesTenants) else None,
        shapes=store.shapes if isinstance(store, ShapesValues) else None,
        address=store.address if isinstance(store, HasAddress) else None,
    )


def capabilities_through(wrapper: Any, inner: Store) -> Capabilities:  # noqa: ANN401 (has all methods)
    """What the inner store can do, through a wrapper that has the methods of every protocol.

    A wrapper cannot make another of itself for a tenant, so it has no partitions.
    """
    can = capabilities_of(inner)
    return Capabilities(
        store_name=can.store_name,
        inline=wrapper if can.inline is not None else None,
        threads=wrapper if can.threads is not None else None,
        listing=wrapper if can.listing is not None else None,
        eviction=wrapper if can.eviction is not None else None,
        statistics=wrapper if can.statistics is not None else None,
        push=wrapper if can.push is not None else None,
        process=wrapper if can.process is not None else None,
        partitions=None,
        evicts_hourly=can.evicts_hourly,
        waits_in_threads=can.waits_in_threads,
        tells_emptiness=can.tells_emptiness,
        max_bytes=can.max_bytes,
        tenant=can.tenant,
        shapes=can.shapes,
        address=can.address,
    )
