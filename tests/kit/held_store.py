"""A store whose steps a test can hold, break and count; and two caches that share one."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from stillfresh import Cache, Policy, StoreError
from stillfresh.stores import Capabilities, WrappedStore
from stillfresh.stores.contract import (
    Ask,
    Copy,
    LateTags,
    Lease,
    Put,
    PutOutcome,
    PutResult,
    Store,
)
from stillfresh.testing import ManualClock
from tests.kit.engine import Sleeper

T = TypeVar("T")


class SteppedStore(WrappedStore):
    """Any store, without inline reads: every step takes a turn of the loop, as over a network.

    As on a server, a put that arrives after a change that came after its call is to be put again.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: list[str] = []
        self.broken: set[str] = set()
        self.alarms: dict[str, BaseException] = {}
        """Raised, once, in the middle of a step."""
        self.gates: dict[str, asyncio.Event] = {}
        self.waiting: set[str] = set()
        self._stamp = 0
        """The number of the last change."""
        self._changed: dict[tuple[str, str], int] = {}
        self._voided: dict[str, int] = {}
        """Of each tag, the number of its last invalidation."""

    def capabilities(self) -> Capabilities:
        """It is as far away as a server, whatever the store inside is."""
        return replace(super().capabilities(), inline=None, process=None)

    async def put(self, kind: str, puts: Mapping[str, Put]) -> dict[str, PutResult]:
        as_of = self._stamp

        def is_late(id_: str, put: Put) -> bool:
            tags = (*(put.tags or ()), *(put.late or ()))
            tag_stamps = [self._voided.get(tag, 0) for tag in tags]
            return max([self._changed.get((kind, id_), 0), *tag_stamps]) > as_of

        async def work() -> dict[str, PutResult]:
            late = {id_ for id_, put in puts.items() if is_late(id_, put)}
            results = dict.fromkeys(late, PutResult(PutOutcome.AGAIN))
            sent = {id_: put for id_, put in puts.items() if id_ not in late}
            self._note(kind, sent)
            return results | await self.inner.put(kind, sent)

        return await self.step("put", work)

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        async def work() -> set[str]:
            self._note(kind, copies)
            return await self.inner.publish(kind, copies, tags)

        return await self.step("publish", work)

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        async def work() -> None:
            self._note(kind, ids)
            await self.inner.invalidate(kind, ids, soft=soft)

        await self.step("invalidate", work)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        async def work() -> list[tuple[str, str]]:
            self._stamp += 1
            self._voided[tag] = self._stamp
            return await self.inner.invalidate_tag(tag, soft=soft)

        return await self.step("invalidate_tag", work)

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        async def work() -> None:
            self._note(kind, ids)
            await self.inner.delete(kind, ids)

        await self.step("delete", work)

    def _note(self, kind: str, ids: Iterable[str]) -> None:
        self._stamp += 1
        for id_ in ids:
            self._changed[kind, id_] = self._stamp

    def hold(self, *steps: str) -> None:
        """`"read"` waits before it is done, `"read:done"` before its answer arrives."""
        for step in steps:
            self.gates[step] = asyncio.Event()

    def let_go(self, *steps: str) -> None:
        for step in steps:
            self.gates.pop(step).set()

    async def holding(self, step: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work: it stands at this step, and waits for `let_go`."""
        self.hold(step)
        task = asyncio.create_task(work)
        await self.reached(step)
        return task

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

    async def step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
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


def cache_on(store: Store, clock: ManualClock, sleep: Sleeper, **options: Any) -> Cache:
    """A cache as a process of its own would have it."""
    return Cache(store, clock=clock, sleep=sleep, dice=lambda: 0.0, **options)


async def store_bytes(cache: Cache, kind: str, key: str, value: bytes) -> None:
    """Another release has stored this value."""
    assert cache.opened is not None
    store = cache.opened.store
    lease = (await store.acquire(kind, [Ask(key)], 5))[key]
    assert isinstance(lease, Lease)
    copy = Copy(lease.token, cache.opened.clock(), Policy(30), value)
    assert await store.publish(kind, {key: (lease, copy)}) == set()


async def lease_of(store: Store, key: str, *, seen: str | None = None, lasts: float = 5) -> Lease:
    """Another process takes the lease of a price, and does nothing with it yet."""
    grant = (await store.acquire("price", [Ask(key, seen)], lasts))[key]
    assert isinstance(grant, Lease)
    return grant
