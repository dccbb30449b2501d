"""The shared store as one process sees it: over a network, or as a file (T1, S1)."""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from stillfresh.errors import StoreError
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Entry,
    Failure,
    Generations,
    Grant,
    Lease,
    Record,
    Store,
    StoreStats,
)
from stillfresh.testing.simulator.sending import Sender, StoreRequest, finished

if TYPE_CHECKING:
    from stillfresh.testing.simulator.process import Process
    from stillfresh.testing.simulator.world import World

T = TypeVar("T")


@dataclass(slots=True)
class Asking:
    """A request for leases, however often it arrives: it knows those that it was granted (S8)."""

    world: "World"
    process: "Process"
    kind: str
    asks: dict[str, Ask]
    lease_for: float
    leases: dict[str, Lease] = field(default_factory=dict)

    def arrives(self, some: Sequence[str]) -> dict[str, Grant]:
        """A lease that it holds is its own; any other is a new one, with a new token."""
        ledger, now = self.world.ledger, self.world.store_now()
        own: dict[str, Grant] = {
            id_: lease
            for id_ in some
            if (lease := self.leases.get(id_)) and ledger.holds(self.kind, lease, now)
        }
        asked = [id_ for id_ in some if id_ not in own]
        grants = self.acquired(asked)
        taken = [id_ for id_ in asked if self.asks[id_].take_over]
        ledger.voided(self.kind, [id_ for id_ in taken if isinstance(grants[id_], Lease)])
        ledger.acquired(self.process.number, self.kind, grants, now)
        self.leases.update((id_, it) for id_, it in grants.items() if isinstance(it, Lease))
        return {id_: own.get(id_) or grants[id_] for id_ in some}

    def acquired(self, some: Sequence[str]) -> dict[str, Grant]:
        asks = [self.asks[id_] for id_ in some]
        return finished(self.world.store.acquire(self.kind, asks, self.lease_for))


class StoreWire(Store):
    """A store, as one process sees it over a network."""

    def __init__(self, world: "World", process: "Process") -> None:
        self._world = world
        self._process = process
        self._sender = Sender(world, process)

    async def open(self) -> None:
        """There is nothing to connect."""

    async def close(self) -> None:
        """What is kept is everybody's."""

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        del lag

        def effect(some: Sequence[str]) -> dict[str, Record]:
            return self._world.store.read_now(kind, some, known)

        return await self._sender.ask(StoreRequest("read", kind, ids, effect))

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        by_id = {ask.id: ask for ask in asks}
        asking, ids = Asking(self._world, self._process, kind, by_id, lease_for), list(by_id)
        is_put = any(ask.take_over for ask in asks)
        step = "take over" if is_put else "acquire"
        grants = await self._sender.ask(StoreRequest(step, kind, ids, asking.arrives))
        if not is_put:
            self._world.ledger.granted(self._process.number, kind, grants)
        return grants

    async def publish(self, kind: str, copies: Mapping[str, tuple[Lease, Copy]]) -> set[str]:
        def effect(some: Sequence[str]) -> set[str]:
            world, now = self._world, self._world.store_now()
            those = {id_: copies[id_] for id_ in some}
            superseded = finished(world.store.publish(kind, those))
            world.ledger.published(kind, those, superseded, now)
            if request.is_sent_again:  # S2: settled by what is there
                superseded -= self._published(kind, those)
            return superseded

        tokens = [lease.token for lease, _ in copies.values()]
        request = StoreRequest("publish", kind, list(copies), effect, tokens)
        return await self._sender.ask(request)

    def _published(self, kind: str, copies: Mapping[str, tuple[Lease, Copy]]) -> set[str]:
        found = self._world.store.read_now(kind, list(copies))
        there = {id_: it.copy.generation for id_, it in found.items() if it.copy is not None}
        return {id_ for id_, (_, copy) in copies.items() if there.get(id_) == copy.generation}

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        def effect(some: Sequence[str]) -> set[str]:
            world, now = self._world, self._world.store_now()
            those = [lease for lease in leases if lease.id in some]
            lost = finished(world.store.renew(kind, those, lease_for))
            world.ledger.renewed(kind, those, lost, now + lease_for)
            return lost

        return await self._sender.ask(StoreRequest("renew", kind, _ids(leases), effect))

    async def release(
        self, kind: str, leases: Sequence[Lease], failures: Mapping[str, Failure] | None = None
    ) -> None:
        def effect(some: Sequence[str]) -> None:
            those = [lease for lease in leases if lease.id in some]
            finished(self._world.store.release(kind, those, failures))
            self._world.ledger.released(kind, those)

        await self._sender.ask(StoreRequest("release", kind, _ids(leases), effect))

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        def effect(some: Sequence[str]) -> None:
            finished(self._world.store.invalidate(kind, some, soft=soft))
            self._world.ledger.voided(kind, some)

        await self._sender.ask(StoreRequest("invalidate", kind, ids, effect))

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        def effect(_: Sequence[str]) -> list[tuple[str, str]]:
            found = finished(self._world.store.invalidate_tag(tag, soft=soft))
            for kind, id_ in found:
                self._world.ledger.voided(kind, [id_])
            return found

        return await self._sender.ask(StoreRequest("invalidate_tag", tag, [], effect))

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        def effect(some: Sequence[str]) -> None:
            finished(self._world.store.delete(kind, some))
            self._world.ledger.voided(kind, some)

        await self._sender.ask(StoreRequest("delete", kind, ids, effect))

    async def evict(self, before: float) -> int:
        return await self._whole("evict", lambda: self._world.store.evict(before))

    async def stats(self) -> StoreStats:
        return await self._whole("stats", self._world.store.stats)

    async def entries(
        self,
        kind: str | None = None,
        search: str = "",
        after: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> list[Entry]:
        listed = partial(self._world.store.entries, kind, search, after, limit)
        return await self._whole("entries", listed)

    async def _whole(self, step: str, effect: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._sender.ask(StoreRequest(step, "", [], lambda _: finished(effect())))


class InlineWire(StoreWire):
    """A store that is read on the spot, as a file is."""

    reads_inline = True

    def read_now(
        self, kind: str, ids: Sequence[str], known: Mapping[str, str] | None = None
    ) -> dict[str, Record]:
        world = self._world
        if world.is_over or world.weather.is_away:
            self._sender.unanswered(StoreRequest("read", kind, ids, len))
            raise StoreError("the store is away")
        return world.store.read_now(kind, ids, known)


def _ids(leases: Iterable[Lease]) -> list[str]:
    return [lease.id for lease in leases]
