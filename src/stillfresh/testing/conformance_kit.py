"""What the conformance suites share, and the late requests that leases withstand.

A chapter is a short history of one entry. It is played once for every step and every later point:
the request of that step is sent, and arrives at the server a second time at that point. After each
step the entry is read. No late request may undo an invalidation or a publication; a late
invalidation or deletion may cost a load, and nothing else.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Final, TypeAlias, TypeVar
from unittest import SkipTest

from stillfresh.clock import Clock
from stillfresh.freshness import Policy
from stillfresh.stores import capabilities_of, running
from stillfresh.stores.contract import (
    Ask,
    Copy,
    Failure,
    Grant,
    Held,
    Lease,
    Mark,
    Put,
    PutOutcome,
    PutResult,
    Record,
    Store,
)
from stillfresh.testing.clocks import ManualClock

T = TypeVar("T")
Suite = TypeVar("Suite", bound="ConformanceKit")

KIND: Final = "price"
POLICY: Final = Policy(30, 60, 90)
LASTING: Final = Policy(300, 300, 300)
COSTLY: Final = frozenset({"invalidate", "invalidate_tag", "delete"})
"""Steps that may cost a load, and a published copy, if they arrive late."""
MOST_PUTS: Final = 1_000
"""How often a put is put again because the store answers AGAIN."""
TAKING: Final = frozenset({"acquire", "take_over"})
"""Steps that take the lease without a holder if they arrive late."""

IDS: Final = (
    "", "A", "a", " a", "a ", "a b", "a\x00b", "a:b", "a%", "a_", "a*", "[a]", "ключ", "'; --", "1",
)  # fmt: skip
"""Ids that a store may confuse with each other, or with something else."""

Deliver: TypeAlias = Callable[[], Awaitable[object]]
"""Lets a request arrive at the server once more; done when it returns."""


class ConformanceKit:
    """The store under test, its clock, and short ways to ask it."""

    LEASE: float = 10.0
    """Seconds of a lease; a store that counts whole seconds may need more."""

    LATE_VOIDS: bool = False
    """True: an invalidation or deletion that arrives late may void a put that came after it."""

    clock: ManualClock

    def setup_method(self) -> None:
        self.clock = ManualClock(start=1_700_000_000.0)

    async def new_store(self, clock: Clock) -> Store:
        """Return an empty store that is not opened yet."""
        raise NotImplementedError

    async def pass_time(self, seconds: float) -> None:
        """Let the store's clock move on."""
        self.clock.advance(seconds)

    async def set_back(self, seconds: float) -> None:
        """Set the store's clock back, if that is possible."""
        await self.pass_time(-seconds)

    async def delayed(self, step: Awaitable[T]) -> tuple[T, Deliver | None]:
        """Do a step of the store; returns its answer, and what delivers its requests again.

        Here: nothing can arrive when a step has ended, as in a store without a network. With one,
        record what the step sends to the server, or hold it back until it is sent again, and
        return a coroutine function that sends it to the server once more.
        """
        return await step, None

    async def unanswered(self, step: Awaitable[T], meanwhile: Deliver) -> T:
        """Do a step whose first answer gets lost; call `meanwhile` before it is sent again.

        Here: no answer gets lost, as in a store without a network.
        """
        result = await step
        await meanwhile()
        return result

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Store]:
        async with running(await self.new_store(self.clock)) as store:
            yield store

    def copy(self, lease: Lease, value: bytes | None = b"value") -> Copy:
        return Copy(lease.token, self.clock(), POLICY, value)

    async def lease(
        self, store: Store, id_: str = "a", seen: str | None = None, *tags: str
    ) -> Lease:
        grant = await self.ask(store, id_, seen, *tags)
        assert isinstance(grant, Lease), grant
        return grant

    async def ask(self, store: Store, id_: str = "a", seen: str | None = None, *tags: str) -> Grant:
        return (await store.acquire(KIND, [Ask(id_, seen, tags)], self.LEASE))[id_]

    async def record(self, store: Store, id_: str = "a") -> Record:
        return (await store.read(KIND, [id_])).get(id_, Record())

    async def kept(self, store: Store, id_: str = "a") -> Copy:
        copy = (await self.record(store, id_)).copy
        assert copy is not None
        return copy

    async def publish(
        self, store: Store, *leases: Lease, kind: str = KIND, tags: tuple[str, ...] | None = None
    ) -> set[str]:
        """A copy for each lease, with these tags; returns the ids that were superseded."""
        copies = {lease.id: (lease, self.copy(lease)) for lease in leases}
        late = None if tags is None else {lease.id: tags for lease in leases}
        return await store.publish(kind, copies, late)

    async def published(self, store: Store, id_: str = "a", value: bytes | None = b"value") -> Copy:
        known = (await self.record(store, id_)).copy
        lease = await self.lease(store, id_, None if known is None else known.generation)
        copy = self.copy(lease, value)
        assert await store.publish(KIND, {id_: (lease, copy)}) == set()
        return copy

    def new_put(self, store: Store, value: bytes | None = b"put", **options: Any) -> Put:  # noqa: ANN401
        """A put of a value that is fetched now; `options` are fields of the Put."""
        version = options.pop("version", b"")
        copy = Copy(store.new_generation(), self.clock(), LASTING, value, Mark.NONE, version)
        return Put(copy, **options)

    async def put(self, store: Store, put: Put, id_: str = "a") -> PutResult:
        """Put it until the store answers something else than AGAIN."""
        for _ in range(MOST_PUTS):
            result = (await store.put(KIND, {id_: put}))[id_]
            if result.outcome is not PutOutcome.AGAIN:
                return result
        raise AssertionError("the store answers AGAIN for ever")

    async def put_value(
        self,
        store: Store,
        value: bytes | None = b"put",
        id_: str = "a",
        **options: Any,  # noqa: ANN401
    ) -> PutOutcome:
        return (await self.put(store, self.new_put(store, value, **options), id_)).outcome


def skip_unless(capability: T | None, protocol: type) -> T:
    """Return what a store can do; a store that cannot do it skips the test."""
    if capability is None:
        raise SkipTest(f"the store does not offer {protocol.__name__}")
    return capability


def on_open_stores(suite: type[Suite]) -> type[Suite]:
    """A class decorator: each test that takes a store is given a new one, open while it runs."""
    for name, test in list(vars(suite).items()):
        if name.startswith("test_") and "store" in signature(test).parameters:
            setattr(suite, name, _on_an_open_store(test))
    return suite


def _on_an_open_store(test: Callable[[Any, Store], Awaitable[None]]) -> object:
    async def test_on_store(suite: ConformanceKit) -> None:
        async with suite.opened() as store:
            await test(suite, store)

    test_on_store.__name__ = test.__name__
    test_on_store.__qualname__ = test.__qualname__
    test_on_store.__doc__ = test.__doc__
    return test_on_store


@dataclass
class History:
    """One entry. The request of step number `late` arrives again after step number `point`."""

    suite: ConformanceKit
    store: Store
    id: str
    late: int = -1
    point: int = -1
    steps: list[str] = field(default_factory=list)
    can_be_late: bool = True
    """False: nothing of a step is left on its way when the step has ended."""
    _deliver: Deliver | None = None
    _version: int = 0
    """The upstream's version, one higher after each invalidation."""
    _versions: dict[str, int] = field(default_factory=dict)
    """The version that a lease's load sees, by the lease's token."""
    _stored: str | None = None
    """The generation that was published last."""
    _holder: str | None = None
    """The token of the last lease: a lease that was taken over is void."""
    _is_put: bool = False
    """True if the stored copy was put, not loaded."""
    _arrived: str = ""
    """The name of the late step, once its request has arrived again."""

    async def acquire(self, *, take_over: bool = False) -> Lease:
        """Take the lease, or take it over as a put does.

        A lease that a late request took ends by itself: its sender does not know of it.
        """
        known = {self.id: self._stored or ""}  # its value is not looked at
        copy = (await self.store.read(KIND, [self.id], known)).get(self.id, Record()).copy
        seen = None if copy is None else copy.generation
        asks = [Ask(self.id, seen, (f"tag of {self.id}",), take_over=take_over)]
        work = self.store.acquire(KIND, asks, self.suite.LEASE)
        grant = (await self._step("take_over" if take_over else "acquire", work))[self.id]
        if isinstance(grant, Held) and self._arrived in TAKING:
            await self.suite.pass_time(self.suite.LEASE * 1.1)
            grant = (await self.store.acquire(KIND, asks, self.suite.LEASE))[self.id]
        assert isinstance(grant, Lease), self._failure_text(f"the lease was denied: {grant}")
        self._versions[grant.token] = self._version
        self._holder = grant.token
        await self._look()
        return grant

    async def renew(self, lease: Lease) -> None:
        lost = await self._step("renew", self.store.renew(KIND, [lease], self.suite.LEASE))
        self._check_holds(lease, is_lost=bool(lost))
        await self._look()

    async def publish(self, lease: Lease, *tags: str) -> None:
        copy = Copy(lease.token, self.suite.clock(), LASTING, b"value")
        copies = {self.id: (lease, copy)}
        late = {self.id: tags} if tags else None
        superseded = await self._step("publish", self.store.publish(KIND, copies, late))
        self._check_holds(lease, is_lost=bool(superseded))
        if not superseded:
            self._stored = lease.token
            self._is_put = False
        await self._look()

    async def put(self, *tags: str) -> None:
        """Put a value. Its late request must not act after anything that came later."""
        put = self.suite.new_put(self.store, b"value", tags=(f"tag of {self.id}", *tags))
        work = self.suite.put(self.store, put, self.id)
        result = await self._step("put", work)
        assert result.outcome is PutOutcome.STORED, self._failure_text(
            f"a put was not stored: {result}"
        )
        self._versions[put.copy.generation] = self._version
        self._stored = put.copy.generation
        self._holder = None
        self._is_put = True
        await self._look()

    async def release(self, lease: Lease, failure: Failure | None = None) -> None:
        failures = {} if failure is None else {self.id: failure}
        await self._step("release", self.store.release(KIND, [lease], failures))
        await self._look()

    async def invalidate(self) -> None:
        await self._void("invalidate", self.store.invalidate(KIND, [self.id]))

    async def invalidate_tag(self, tag: str = "") -> None:
        await self._void("invalidate_tag", self.store.invalidate_tag(tag or f"tag of {self.id}"))

    async def delete(self) -> None:
        self._stored = None
        await self._void("delete", self.store.delete(KIND, [self.id]))

    async def _void(self, name: str, work: Awaitable[object]) -> None:
        await self._step(name, work)
        self._version += 1
        await self._look()

    async def evict(self) -> None:
        eviction = capabilities_of(self.store).require_eviction()
        await self._step("evict", eviction.evict(self.suite.clock()))
        await self._look()

    async def _step(self, name: str, work: Awaitable[T]) -> T:
        self.steps.append(name)
        if len(self.steps) - 1 != self.late:
            return await work
        result, self._deliver = await self.suite.delayed(work)
        self.can_be_late = self._deliver is not None
        return result

    async def _look(self) -> None:
        """After a step, and once more if the late request arrives now.

        Before that it would see what the history sees whose late request arrives there.
        """
        if (at := len(self.steps) - 1) >= self.point:
            await self._check()
        if at == self.point and self._deliver is not None:
            await self._deliver()
            self._arrived = self.steps[self.late]
            await self._check()

    async def _check(self) -> None:
        copy = (await self._record()).copy
        if copy is not None and copy.mark is Mark.NONE:
            is_current = self._versions.get(copy.generation) == self._version
            assert is_current, self._failure_text("an invalidated value is shown without its mark")
        if self._stored is not None and self._arrived not in COSTLY:
            is_there = copy is not None and copy.generation == self._stored
            assert is_there, self._failure_text("a publication was undone")
        if self._is_put and self._is_current() and not self.suite.LATE_VOIDS:
            is_shown = copy is not None and copy.mark is Mark.NONE
            assert is_shown, self._failure_text("a put was undone by an earlier request")

    def _is_current(self) -> bool:
        """True if nothing has invalidated or deleted the stored copy."""
        return self._stored is not None and self._versions[self._stored] == self._version

    def _check_holds(self, lease: Lease, *, is_lost: bool) -> None:
        is_held = self._holder == lease.token and self._versions[lease.token] == self._version
        assert is_lost or is_held, self._failure_text("a voided lease lives")
        may_be_lost = self._arrived in COSTLY or self._arrived == "take_over"
        assert not (is_lost and is_held) or may_be_lost, self._failure_text("a live lease was lost")

    async def _record(self) -> Record:
        return await self.suite.record(self.store, self.id)

    def _failure_text(self, what: str) -> str:
        shown = [
            f"{name} (late)" if at == self.late else name for at, name in enumerate(self.steps)
        ]
        if len(shown) > self.point >= 0:
            shown.insert(self.point + 1, f"the late {self.steps[self.late]} arrives")
        return f"{what}; the history: {', '.join(shown)}"


Chapter: TypeAlias = Callable[[History], Awaitable[None]]


async def overtaken(history: History, by: Chapter, *, is_cold: bool) -> None:
    """A load that `by` overtakes, and the next one, which publishes."""
    if not is_cold:
        await history.publish(await history.acquire())
    lease = await history.acquire()
    if is_cold:
        await history.renew(lease)
    await by(history)
    await history.publish(lease)
    await history.publish(await history.acquire())


async def taken_over(history: History, *, is_cold: bool) -> None:
    """A load that a put overtakes, a put that an invalidation overtakes, and the next load."""
    if not is_cold:
        await history.publish(await history.acquire())
    loading = await history.acquire()
    putting = await history.acquire(take_over=True)
    await history.publish(loading)
    await history.publish(putting)
    putting = await history.acquire(take_over=True)
    await history.invalidate()
    await history.publish(putting)
    await history.publish(await history.acquire())


async def tagged_late(history: History) -> None:
    """I26: loads with a tag: one is overtaken, the next publishes, and the tag reaches it."""
    tag = f"late {history.id}"
    lease = await history.acquire()
    await history.invalidate_tag(tag)
    await history.publish(lease, tag)
    await history.publish(await history.acquire(), tag)
    lease = await history.acquire()
    await history.invalidate_tag(tag)
    await history.publish(lease, tag)
    await history.publish(await history.acquire(), tag)


async def put_between_loads(history: History, *, is_cold: bool) -> None:
    """A put overtakes a load; the load publishes nothing; the next load replaces the put."""
    if not is_cold:
        await history.publish(await history.acquire())
    lease = await history.acquire()
    await history.put()
    await history.publish(lease)
    await history.publish(await history.acquire())
    await history.put()


async def put_twice(history: History) -> None:
    """Two puts, one after the other: the last one stays."""
    await history.put()
    await history.put()


async def put_around(history: History, change: Chapter) -> None:
    """A put, a change that takes it away, and a put after that."""
    await history.put()
    await change(history)
    await history.put()
    await change(history)


async def given_up(history: History, failure: Failure | None = None) -> None:
    """A load that fails, or is given up, and the next one."""
    await history.release(await history.acquire(), failure)
    await history.publish(await history.acquire())


async def evicting(history: History) -> None:
    """An eviction that finds nothing to drop, while a load is under way."""
    lease = await history.acquire()
    await history.evict()
    await history.publish(lease)


async def play_late(suite: ConformanceKit, store: Store, *chapters: Chapter) -> None:
    """Each once for every step and every point; once in all where nothing can be late."""
    for number, chapter in enumerate(chapters):
        first = History(suite, store, f"{number}", late=0)
        await chapter(first)
        count = len(first.steps) if first.can_be_late else 0
        for late in range(count):
            for point in range(late, count):
                await chapter(History(suite, store, f"{number}: {late} at {point}", late, point))
