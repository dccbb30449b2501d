"""One store for several tenants: each sees its own entries, and nothing of the others.

A store without its own partitions for tenants is wrapped: ids and tags begin with
`TENANT#<tenant>#`.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar

from msgspec.structs import replace

from stillfresh.checks import checked_unicode
from stillfresh.errors import ConfigError, shown
from stillfresh.stores.capabilities import Capabilities, capabilities_of
from stillfresh.stores.channel import Channel, Tell
from stillfresh.stores.contract import (
    After,
    Ask,
    Copy,
    Failures,
    Generations,
    Grant,
    LateTags,
    Lease,
    Put,
    PutResult,
    Record,
    Store,
    StoredEntry,
    Superseded,
)
from stillfresh.stores.wrapped import WrappedStore

T = TypeVar("T")

LONGEST_TENANT: Final = 200
"""Bytes; the name is part of every key."""


def checked_tenant(tenant: str | None) -> str | None:
    """Return the name. Raises ConfigError if it is empty or has a `#`."""
    if tenant is None:
        return None
    if not isinstance(tenant, str) or not tenant or "#" in tenant:
        raise ConfigError(f"tenant: must be text, not empty and without '#', not {shown(tenant)}")
    size = len(checked_unicode("tenant", tenant))
    if size > LONGEST_TENANT:
        raise ConfigError(
            f"tenant: must have at most {LONGEST_TENANT} bytes, not {size:,}: {shown(tenant)}"
        )
    return tenant


def tenant_prefix(tenant: str | None) -> str:
    """The beginning of every key of this tenant."""
    return "" if tenant is None else f"TENANT#{tenant}#"


def for_tenant(store: Store, tenant: str | None) -> Store:
    """Return the store as a tenant sees it. Raises ConfigError if it has another tenant already."""
    can = capabilities_of(store)
    if checked_tenant(tenant) is None or tenant is None or can.tenant == tenant:
        return store
    if can.tenant is not None:
        raise ConfigError(
            f"tenant: the store's own is {can.tenant!r}, and {tenant!r} is named as well; "
            f"name one of them"
        )
    if can.partitions is not None:
        return can.partitions.for_tenant(tenant)
    return TenantStore(store, tenant)


class TenantStore(WrappedStore):
    """A store without the entries of other tenants; `stats` and `evict` cover the whole store."""

    def __init__(self, store: Store, tenant: str) -> None:
        super().__init__(store)
        self._tenant = tenant
        self._prefix = tenant_prefix(tenant)

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), tenant=self._tenant)

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        records = await self.inner.read(kind, self._add(ids), self._add_to_keys(known or {}), lag)
        return self._remove_from_keys(records)

    def read_now(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        records = super().read_now(kind, self._add(ids), self._add_to_keys(known or {}))
        return self._remove_from_keys(records)

    def read_in_thread(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        records = super().read_in_thread(kind, self._add(ids), self._add_to_keys(known or {}))
        return self._remove_from_keys(records)

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        inner_asks = [
            replace(ask, id=self._prefix + ask.id, tags=tuple(self._add(ask.tags))) for ask in asks
        ]
        inner_grants = await self.inner.acquire(kind, inner_asks, lease_for)
        grants = self._remove_from_keys(inner_grants)
        return {
            id_: replace(grant, id=id_) if isinstance(grant, Lease) else grant
            for id_, grant in grants.items()
        }

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        inner_copies = {
            self._prefix + id_: (self._inner_lease(lease), copy)
            for id_, (lease, copy) in copies.items()
        }
        late = {self._prefix + id_: tuple(self._add(names)) for id_, names in (tags or {}).items()}
        superseded = await self.inner.publish(kind, inner_copies, late)
        unsure = superseded.unsure if isinstance(superseded, Superseded) else ()
        return Superseded(self._remove(superseded), self._remove(unsure))

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        inner_puts = {}
        for id_, put in puts.items():
            late = None if put.late is None else tuple(self._add(put.late))
            tags = None if put.tags is None else tuple(self._add(put.tags))
            inner_puts[self._prefix + id_] = replace(put, tags=tags, late=late)
        return self._remove_from_keys(await self.inner.put(kind, inner_puts))

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        inner_leases = [self._inner_lease(lease) for lease in leases]
        return self._remove(await self.inner.renew(kind, inner_leases, lease_for))

    async def release(self, kind: str, leases: Sequence[Lease], failures: Failures = None) -> None:
        inner_leases = [self._inner_lease(lease) for lease in leases]
        await self.inner.release(kind, inner_leases, self._add_to_keys(failures or {}))

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        await self.inner.invalidate(kind, self._add(ids), soft=soft)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        keys = await self.inner.invalidate_tag(self._prefix + tag, soft=soft)
        return [
            (kind, id_.removeprefix(self._prefix))
            for kind, id_ in keys
            if id_.startswith(self._prefix)
        ]

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        await self.inner.delete(kind, self._add(ids))

    async def entries(
        self, kind: str | None = None, search: str = "", after: After = None, limit: int = 100
    ) -> list[StoredEntry]:
        """Read past the entries of other tenants until enough are found."""
        entries: list[StoredEntry] = []
        place = None if after is None else (after[0], self._prefix + after[1])
        while True:
            page = await super().entries(kind, self._prefix, place, limit)
            entries += [entry for entry in self._own(page) if search in entry.id]
            if len(entries) >= limit or len(page) < limit:
                return entries[:limit]
            place = page[-1].kind, page[-1].id

    async def walk(self, kind: str | None) -> AsyncIterator[list[StoredEntry]]:
        async for page in super().walk(kind):
            yield self._own(page)

    def before_evicting(self, kind: str, keeps: Callable[[str], bool]) -> None:
        prefix = self._prefix

        def keeps_own(id_: str) -> bool:
            return id_.startswith(prefix) and keeps(id_.removeprefix(prefix))

        super().before_evicting(kind, keeps_own)

    def listen(self, tell: Tell) -> AbstractAsyncContextManager[Channel]:
        def tell_own(kind: str, id_: str, generation: str | None) -> None:
            if id_.startswith(self._prefix):
                tell(kind, id_.removeprefix(self._prefix), generation)

        return super().listen(tell_own)

    def _own(self, entries: Iterable[StoredEntry]) -> list[StoredEntry]:
        """The entries of this tenant, by their ids without the prefix."""
        own = [entry for entry in entries if entry.id.startswith(self._prefix)]
        return [replace(entry, id=entry.id.removeprefix(self._prefix)) for entry in own]

    def _inner_lease(self, lease: Lease) -> Lease:
        return replace(lease, id=self._prefix + lease.id)

    def _add(self, names: Iterable[str]) -> list[str]:
        """Ids or tags with the prefix."""
        return [self._prefix + name for name in names]

    def _add_to_keys(self, by_id: Mapping[str, T]) -> dict[str, T]:
        return {self._prefix + id_: value for id_, value in by_id.items()}

    def _remove(self, ids: Iterable[str]) -> set[str]:
        """Ids without the prefix."""
        return {id_.removeprefix(self._prefix) for id_ in ids}

    def _remove_from_keys(self, by_id: Mapping[str, T]) -> dict[str, T]:
        return {id_.removeprefix(self._prefix): value for id_, value in by_id.items()}
