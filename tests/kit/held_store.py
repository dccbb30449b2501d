"""A store whose steps a test can hold, break and count; and two caches that share one."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from stillfresh import Cache, StoreError
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Entry,
    Failure,
    Grant,
    Lease,
    Record,
    Store,
    StoreStats,
)
from stillfresh.testing import ManualClock
from tests.kit.engine import Sleeper

T = TypeVar("T")


class SteppedStore(Store):
    """Any store, without `read_now`: every step takes a turn of the loop, as over a network."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.calls: list[str] = []
        self.broken: set[str] = set()
        self.alarms: dict[str, BaseException] = {}
        """Raised, once, in the middle of a step."""
        self.gates: dict[str, asyncio.Event] = {}
        self.waiting: set[str] = set()

    def hold(self, *steps: str) -> None:
        """`"read"` waits before it is done, `"read:done"` before its answer arrives."""
        for step in steps:
            self.gates[step] = asyncio.Event()

    def let_go(self, *steps: str) -> None:
        for step in steps:
            self.gates.pop(step).set()

    def count(self, step: str) -> int:
        return self.calls.count(step)

    async def reached(self, step: str) -> None:
        """Until somebody stands at this gate."""
        while step not in self.waiting:
            await asyncio.sleep(0)

    async def _pass(self, step: str) -> None:
        if (gate := self.gates.get(step)) is not None:
            self.waiting.add(step)
            await gate.wait()
            self.waiting.discard(step)

    async def _step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        self.calls.append(name)
        await asyncio.sleep(0)
        await self._pass(name)
        if (alarm := self.alarms.pop(name, None)) is not None:
            raise alarm
        if name in self.broken:
            raise StoreError(f"cannot {name}")
        result = await work()
        await self._pass(f"{name}:done")
        return result

    async def open(self) -> None:
        await self._step("open", self.inner.open)

    async def close(self) -> None:
        await self._step("close", self.inner.close)

    async def read(
        self,
        kind: str,
        ids: Sequence[str],
        known: Mapping[str, str] | None = None,
        lag: float = 0.0,
    ) -> dict[str, Record]:
        return await self._step("read", lambda: self.inner.read(kind, ids, known, lag))

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        return await self._step("acquire", lambda: self.inner.acquire(kind, asks, lease_for))

    async def publish(self, kind: str, copies: Mapping[str, tuple[Lease, Copy]]) -> set[str]:
        return await self._step("publish", lambda: self.inner.publish(kind, copies))

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        return await self._step("renew", lambda: self.inner.renew(kind, leases, lease_for))

    async def release(
        self, kind: str, leases: Sequence[Lease], failures: Mapping[str, Failure] | None = None
    ) -> None:
        await self._step("release", lambda: self.inner.release(kind, leases, failures))

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        await self._step("invalidate", lambda: self.inner.invalidate(kind, ids, soft=soft))

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        return await self._step("invalidate_tag", lambda: self.inner.invalidate_tag(tag, soft=soft))

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        await self._step("delete", lambda: self.inner.delete(kind, ids))

    async def evict(self, before: float) -> int:
        return await self._step("evict", lambda: self.inner.evict(before))

    async def stats(self) -> StoreStats:
        return await self._step("stats", self.inner.stats)

    async def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[Entry]:
        return await self._step("entries", lambda: self.inner.entries(kind, search, after, limit))


def cache_on(store: Store, clock: ManualClock, sleep: Sleeper, **options: Any) -> Cache:
    """A cache as a process of its own would have it."""
    return Cache(store, clock=clock, sleep=sleep, dice=lambda: 0.0, **options)


async def lease_of(store: Store, key: str, *, seen: str | None = None, lasts: float = 5) -> Lease:
    """Another process takes the lease of a price, and does nothing with it yet."""
    grant = (await store.acquire("price", [Ask(key, seen)], lasts))[key]
    assert isinstance(grant, Lease)
    return grant
