"""One store for several tenants: each sees its own entries, and nothing of the others (I17).

A store without its own partitions for tenants is wrapped: ids and tags begin with
`TENANT#<tenant>#`.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar

from msgspec.structs import replace

from stillfresh.checks import checked_unicode
from stillfresh.errors import ConfigError, shown
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
    WrappedStore,
)

T = TypeVar("T")

LONGEST_TENANT: Final = 200
"""Bytes; the name is part of every key."""


def checked_tenant(tenant: str | None) -> str | None:
    """Return the name. Raises ConfigError if it is empty or has a `#`."""
    if tenant is None:
        return None
    if not isinstance(tenant, str) or not tenant or "#" in tenant:
        raise ConfigError(f"tenant: must be text, not empty and without '#', not {shown(tenant)}")
    if (size := len(checked_unicode("tenant", tenant))) > LONGEST_TENANT:
        raise ConfigError(
            f"tenant: must have at most {LONGEST_TENANT} bytes, not {size:,}: {shown(tenant)}"
        )
    return tenant


def tenant_prefix(tenant: str | None) -> str:
    """I1: the beginning of every key of this tenant."""
    return "" if tenant is None else f"TENANT#{tenant}#"


def for_tenant(store: Store, tenant: str | None) -> Store:
    """Return the store as a tenant sees it. Raises ConfigError if it has another tenant already."""
    if checked_tenant(tenant) is None or tenant is None or store.tenant == tenant:
        return store
    if (has := store.tenant) is not None:
        raise ConfigError(
            f"tenant: the store's own is {has!r}, and {tenant!r} is named as well; name one of them"
        )
    return store.for_tenant(tenant) or TenantStore(store, tenant)


class TenantStore(WrappedStore):
    """A store without the entries of other tenants; `stats` and `evict` cover the whole store."""

    def __init__(self, store: Store, tenant: str) -> None:
        super().__init__(store)
        self.tenant = tenant
        self._prefix = tenant_prefix(tenant)

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        found = await self.inner.read(kind, self._named(ids), self._keyed(known or {}), lag)
        return self._plain(found)

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        return self._plain(self.inner.read_now(kind, self._named(ids), self._keyed(known or {})))

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        named = [
            replace(ask, id=self._prefix + ask.id, tags=tuple(self._named(ask.tags)))
            for ask in asks
        ]
        grants = self._plain(await self.inner.acquire(kind, named, lease_for))
        return {
            id_: replace(grant, id=id_) if isinstance(grant, Lease) else grant
            for id_, grant in grants.items()
        }

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        named = {
            self._prefix + id_: (self._lease(lease), copy) for id_, (lease, copy) in copies.items()
        }
        late = {self._prefix + id_: tuple(self._named(some)) for id_, some in (tags or {}).items()}
        superseded = await self.inner.publish(kind, named, late)
        unsure = superseded.unsure if isinstance(superseded, Superseded) else ()
        return Superseded(self._bare(superseded), self._bare(unsure))

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        named = {}
        for id_, put in puts.items():
            late = None if put.late is None else tuple(self._named(put.late))
            tags = None if put.tags is None else tuple(self._named(put.tags))
            named[self._prefix + id_] = replace(put, tags=tags, late=late)
        return self._plain(await self.inner.put(kind, named))

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        named = [self._lease(lease) for lease in leases]
        return self._bare(await self.inner.renew(kind, named, lease_for))

    async def release(self, kind: str, leases: Sequence[Lease], failures: Failures = None) -> None:
        named = [self._lease(lease) for lease in leases]
        await self.inner.release(kind, named, self._keyed(failures or {}))

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        await self.inner.invalidate(kind, self._named(ids), soft=soft)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        found = await self.inner.invalidate_tag(self._prefix + tag, soft=soft)
        own = [(kind, id_) for kind, id_ in found if id_.startswith(self._prefix)]
        return [(kind, id_.removeprefix(self._prefix)) for kind, id_ in own]

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        await self.inner.delete(kind, self._named(ids))

    async def entries(
        self, kind: str | None = None, search: str = "", after: After = None, limit: int = 100
    ) -> list[StoredEntry]:
        """Read past the entries of other tenants until enough are found."""
        found: list[StoredEntry] = []
        place = None if after is None else (after[0], self._prefix + after[1])
        while True:
            page = await self.inner.entries(kind, self._prefix, place, limit)
            found += [entry for entry in self._own(page) if search in entry.id]
            if len(found) >= limit or len(page) < limit:
                return found[:limit]
            place = page[-1].kind, page[-1].id

    async def walk(self, kind: str | None) -> AsyncIterator[list[StoredEntry]]:
        async for page in self.inner.walk(kind):
            yield self._own(page)

    def before_evicting(self, kind: str, keeps: Callable[[str], bool]) -> None:
        prefix = self._prefix

        def asked(id_: str) -> bool:
            return id_.startswith(prefix) and keeps(id_.removeprefix(prefix))

        self.inner.before_evicting(kind, asked)

    def listen(self, tell: Tell) -> AbstractAsyncContextManager[Channel]:
        def told(kind: str, id_: str, generation: str | None) -> None:
            if id_.startswith(self._prefix):
                tell(kind, id_.removeprefix(self._prefix), generation)

        return self.inner.listen(told)

    def _own(self, entries: Iterable[StoredEntry]) -> list[StoredEntry]:
        own = [entry for entry in entries if entry.id.startswith(self._prefix)]
        return [replace(entry, id=entry.id.removeprefix(self._prefix)) for entry in own]

    def _lease(self, lease: Lease) -> Lease:
        return replace(lease, id=self._prefix + lease.id)

    def _named(self, names: Iterable[str]) -> list[str]:
        return [self._prefix + name for name in names]

    def _keyed(self, found: Mapping[str, T]) -> dict[str, T]:
        return {self._prefix + id_: it for id_, it in found.items()}

    def _plain(self, found: Mapping[str, T]) -> dict[str, T]:
        return {id_.removeprefix(self._prefix): it for id_, it in found.items()}

    def _bare(self, ids: Iterable[str]) -> set[str]:
        return {id_.removeprefix(self._prefix) for id_ in ids}
