"""The shared store as one process sees it: over a network, or as a file (T1, S1).

A request is on its way, meets trouble, takes effect, and is answered or not. What the store does is
done by the real `MemoryStore`, in the name of nobody: a process that is killed or paused does not
take its requests back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from msgspec import MsgspecError, msgpack

from stillfresh.errors import StoreError
from stillfresh.stores import A_TAG, Channel, Tell
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Failure,
    Generations,
    Grant,
    Held,
    LateTags,
    Lease,
    Record,
    Superseded,
    WrappedStore,
)
from stillfresh.testing.simulator.channel import listening
from stillfresh.testing.simulator.faults import Blow, Trouble
from stillfresh.testing.simulator.ledger import PUTTING, Version
from stillfresh.virtual_loop import WORLD

if TYPE_CHECKING:
    from stillfresh.testing.simulator.process import Process

T = TypeVar("T")

READS: Final = frozenset({"read", "stats", "entries"})
LATENCY: Final = (0.0005, 0.02)
SLOW: Final = (1.0, 8.0)
PATIENCE: Final = (0.05, 2.0)
"""Seconds until a sender without an answer gives up."""


def finished(work: Awaitable[T]) -> T:
    """The result of a coroutine that never waits, such as a step of the memory store."""
    try:
        next(work.__await__())
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise RuntimeError("a step of the simulated store waits for something")


class NoAnswer(StoreError):
    """No answer: it is not known whether the store did the step."""


@dataclass(slots=True)
class StoreRequest(Generic[T]):
    """A request on its way: its step, its ids, and its effect."""

    step: str
    kind: str
    ids: Sequence[str]
    effect: Callable[[Sequence[str]], T]
    tokens: Sequence[str] = ()
    node: int | None = None
    """S9: the node that it goes to, in a cluster."""

    def __str__(self) -> str:
        return f"{self.step} {self.kind} {','.join(self.ids)}".rstrip()


def _told(result: object) -> str:
    if isinstance(result, dict):
        return " → " + ", ".join(f"{id_} {_grant(it)}" for id_, it in result.items())
    return f" → not {','.join(sorted(result))}" if isinstance(result, set) and result else ""


def _grant(grant: Grant) -> str:
    if isinstance(grant, Lease):
        return f"granted ({grant.token})"
    return "is held" if isinstance(grant, Held) else "has a newer copy"


@dataclass(slots=True)
class Asking:
    """A request for leases, which may arrive more than once: it knows its granted leases (S8)."""

    process: "Process"
    kind: str
    asks: dict[str, Ask]
    lease_for: float
    leases: dict[str, Lease] = field(default_factory=dict)

    def arrives(self, some: Sequence[str]) -> dict[str, Grant]:
        """A lease that it holds is its own; any other is a new one, with a new token."""
        ledger, now = self.process.world.ledger, self.process.world.store_now()
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
        return finished(self.process.world.store.acquire(self.kind, asks, self.lease_for))


class StoreWire(WrappedStore):
    """A store as one process sees it: over a network, or as a file, which is read inline."""

    def __init__(self, process: "Process", *, inline: bool = False, pushes: bool = False) -> None:
        super().__init__(process.world.store)
        self.reads_inline, self.pushes = inline, pushes
        self.outlives_loops = self.never_waits = False
        self._process, self._world = process, process.world
        self._store, self._ledger = process.world.store, process.world.ledger

    async def open(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do: the store is shared."""

    async def step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """A step without ids."""
        return await self._ask(name, "", (), lambda _: finished(work()))

    async def _ask(
        self, step: str, kind: str, ids: Iterable[str], effect: Callable[[Sequence[str]], T]
    ) -> T:
        return await self._asked(StoreRequest(step, kind, list(ids), effect))

    def read_now(
        self, kind: str, ids: Sequence[str], known: Generations = None
    ) -> dict[str, Record]:
        if self._world.is_over or self._world.weather.is_now(Blow.AWAY):
            self._unanswered(StoreRequest("read", kind, ids, len))
            raise StoreError("the store does not answer")
        return self._store.read_now(kind, ids, known)

    async def read(
        self, kind: str, ids: Sequence[str], known: Generations = None, lag: float = 0.0
    ) -> dict[str, Record]:
        del lag
        return await self._ask(
            "read", kind, ids, lambda some: self._store.read_now(kind, some, known)
        )

    async def acquire(self, kind: str, asks: Sequence[Ask], lease_for: float) -> dict[str, Grant]:
        asking = Asking(self._process, kind, {ask.id: ask for ask in asks}, lease_for)
        step = "take over" if any(ask.take_over for ask in asks) or PUTTING.get() else "acquire"
        grants = await self._ask(step, kind, asking.asks, asking.arrives)
        if step == "acquire":
            self._ledger.granted(self._process.number, kind, grants)
        return grants

    async def publish(
        self, kind: str, copies: Mapping[str, tuple[Lease, Copy]], tags: LateTags = None
    ) -> set[str]:
        def effect(some: Sequence[str]) -> set[str]:
            now = self._world.store_now()
            those = {id_: copies[id_] for id_ in some}
            late = {id_: tags[id_] for id_ in some if id_ in tags} if tags else None
            superseded = finished(self._store.publish(kind, those, late))
            self._ledger.published(kind, those, superseded, now)
            self._ledger.released(kind, [those[id_][0] for id_ in superseded & (late or {}).keys()])
            for id_ in sorted(those.keys() - superseded):
                self._world.tell(kind, id_, those[id_][1].generation)
                with suppress(MsgspecError):  # an absence, or not a value of `process.load`
                    value = msgpack.decode(cast("bytes", those[id_][1].value or b""), type=Version)
                    self._ledger.stored((kind, id_), value, self._world.time())
            found = self._store.read_now(kind, list(those))  # S2: one sent again is settled so
            there = {id_: it.copy and it.copy.generation for id_, it in found.items()}
            return superseded - {i for i, (_, it) in those.items() if there.get(i) == it.generation}

        tokens = [lease.token for lease, _ in copies.values()]
        return await self._asked(StoreRequest("publish", kind, list(copies), effect, tokens))

    async def renew(self, kind: str, leases: Sequence[Lease], lease_for: float) -> set[str]:
        def effect(some: Sequence[str]) -> set[str]:
            now = self._world.store_now()
            those = [lease for lease in leases if lease.id in some]
            lost = finished(self._store.renew(kind, those, lease_for))
            self._ledger.renewed(kind, those, lost, now + lease_for)
            return lost

        return await self._ask("renew", kind, (lease.id for lease in leases), effect)

    async def release(
        self, kind: str, leases: Sequence[Lease], failures: Mapping[str, Failure] | None = None
    ) -> None:
        def effect(some: Sequence[str]) -> None:
            those = [lease for lease in leases if lease.id in some]
            finished(self._store.release(kind, those, failures))
            self._ledger.released(kind, those)

        await self._ask("release", kind, (lease.id for lease in leases), effect)

    async def invalidate(self, kind: str, ids: Sequence[str], *, soft: bool = False) -> None:
        def effect(some: Sequence[str]) -> None:
            finished(self._store.invalidate(kind, some, soft=soft))
            self._voided(kind, some)

        await self._ask("invalidate", kind, ids, effect)

    async def invalidate_tag(self, tag: str, *, soft: bool = False) -> list[tuple[str, str]]:
        def effect(_: Sequence[str]) -> list[tuple[str, str]]:
            found = finished(self._store.invalidate_tag(tag, soft=soft))
            self._world.tell(A_TAG, tag, None)
            for kind, id_ in found:
                self._voided(kind, [id_])
            return found

        return await self._ask("invalidate_tag", tag, (), effect)

    async def delete(self, kind: str, ids: Sequence[str]) -> None:
        def effect(some: Sequence[str]) -> None:
            finished(self._store.delete(kind, some))
            self._voided(kind, some)

        await self._ask("delete", kind, ids, effect)

    def listen(self, tell: Tell) -> AbstractAsyncContextManager[Channel]:
        return listening(self._process, tell)

    def _voided(self, kind: str, ids: Sequence[str]) -> None:
        self._ledger.voided(kind, ids)
        for id_ in ids:
            self._world.tell(kind, id_, None)

    async def _asked(self, request: StoreRequest[T]) -> T:
        """Send it and wait; StoreError if there is no answer."""
        try:
            try:
                return await self._tried(request)
            except NoAnswer:
                if not self._world.plan.resends:
                    raise
            result: Any = await self._tried(request)
            # S2: as Redis and PostgreSQL, which cannot tell whether the first one was stored
            return Superseded(result, result) if request.step == "publish" else result  # type: ignore[return-value]
        except (StoreError, asyncio.CancelledError):
            self._unanswered(request)
            raise

    def _unanswered(self, it: StoreRequest[Any]) -> None:
        ledger, number = self._ledger, self._process.number
        match it.step:
            case "acquire":
                ledger.unleased(number, it.kind, it.ids)
            case "read":
                ledger.unread(number, it.kind, it.ids, self._world.time())
            case "publish":
                ledger.unstored(it.tokens)

    async def _tried(self, request: StoreRequest[T]) -> T:
        world = self._world
        if world.is_over:
            raise StoreError("the simulation is over")
        answer: asyncio.Future[T] = world.loop.create_future()
        number, trouble = world.weather.next_request()
        if trouble is not None:
            world.note(self._process, f"request {number} ({request}) {trouble}")
        self._send(request, trouble, answer)
        return await answer

    def _send(
        self, request: StoreRequest[Any], trouble: Trouble | None, answer: "asyncio.Future[Any]"
    ) -> None:
        weather = self._world.weather
        dice = weather.dice
        there = dice.uniform(*LATENCY) + weather.slowness()
        gives_up = dice.uniform(*PATIENCE)
        some, is_answered = request.ids, trouble in {None, Trouble.SLOW, Trouble.TWICE}
        back = dice.choice((0.0, dice.uniform(*SLOW))) if trouble is Trouble.SLOW else 0.0
        match trouble:
            case Trouble.SLOW if not back:
                there += dice.uniform(*SLOW)
            case Trouble.TWICE:
                self._arrive(there + dice.uniform(*SLOW), request, some, None)
            case Trouble.LATE:
                there = gives_up + dice.uniform(*SLOW)
            case Trouble.HALF:
                some = some[: len(some) // 2]
        if not is_answered:
            waits = gives_up if trouble in {Trouble.LOST, Trouble.LATE} else max(gives_up, there)
            self._settle(waits, answer, NoAnswer("no answer from the store"))
        if trouble is not Trouble.LOST:
            self._arrive(there, request, some, answer if is_answered else None, back)

    def _arrive(self, after: float, *arrived: Any) -> None:  # noqa: ANN401 (for _take_effect)
        with self._world.loop.acting(WORLD):
            self._world.loop.call_later(after, self._take_effect, *arrived)

    def _take_effect(
        self,
        request: StoreRequest[Any],
        some: Sequence[str],
        answer: "asyncio.Future[Any] | None",
        back: float = 0.0,
    ) -> None:
        weather = self._world.weather
        try:
            result = self._done(request, some)
        except StoreError as exc:
            result = exc
        if answer is not None:
            back += weather.dice.uniform(*LATENCY)
            back += 0.0 if isinstance(result, StoreError) else weather.slowness()
            self._settle(back, answer, result)

    def _done(self, request: StoreRequest[T], some: Sequence[str]) -> T:
        world = self._world
        if world.weather.is_now(Blow.AWAY, request.node):
            raise StoreError("the store does not answer")
        if world.weather.is_now(Blow.FULL, request.node) and request.step not in READS:
            raise StoreError("the store is full")
        world.asked_by = self._process
        try:
            result = request.effect(some)
        finally:
            world.asked_by = None
        if request.step != "read":
            world.note(self._process, f"{request}{_told(result)}")
        return result

    def _settle(self, after: float, answer: "asyncio.Future[T]", result: T | StoreError) -> None:
        def settle() -> None:
            if answer.done():
                return
            if isinstance(result, StoreError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        with self._world.loop.acting(self._process.number):
            self._world.loop.call_later(after, settle)
