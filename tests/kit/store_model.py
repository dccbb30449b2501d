"""S3: a store answers as the memory store does, whatever is asked: what compares the two.

Both get the same operations, the same clock, and the memory store the tokens that the other drew.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from stillfresh import Policy
from stillfresh.clock import Clock
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Failure,
    Grant,
    Lease,
    Mark,
    Put,
    PutOutcome,
    Store,
    Unread,
    When,
)
from stillfresh.stores.memory import MemoryStore
from stillfresh.stores.versions import packed_version
from stillfresh.testing import ManualClock
from tests.kit.full_store import FullStore

IDS = ["a", "b", "c"]
KINDS = st.sampled_from(["post", "page"])
SOME_IDS = st.lists(st.sampled_from(IDS), min_size=1, max_size=3, unique=True)
SECONDS = st.sampled_from([1.0, 4.0, 10.0])
TAGS = st.lists(st.sampled_from(["eu", "us"]), max_size=2, unique=True)
VERSIONS = [packed_version(1), packed_version(2), packed_version("1")]
POLICIES = st.sampled_from([Policy(5), Policy(5, 10, 20), Policy(0.1234567, 1)])


def without_epochs(grants: dict[str, Grant]) -> dict[str, Grant]:
    return {
        id_: replace(grant, epoch=0) if isinstance(grant, Lease) else grant
        for id_, grant in grants.items()
    }


class StoreModel(RuleBasedStateMachine):
    """Subclass it with the store that is to be compared."""

    PUTS = True

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(start=1_700_000_000.0)
        count = itertools.count()
        self.store = self.new_store(self.clock, lambda: f"token-{next(count)}")
        self.drawn: list[str] = []
        self.memory = MemoryStore(clock=self.clock, new_token=lambda: self.drawn.pop(0))
        self.runner = asyncio.Runner()
        self.both(lambda store: store.open())
        self.leases: dict[str, list[Lease]] = {"post": [], "page": []}
        self.generations = ["unknown"]
        self.epochs: dict[str, int] = {}
        """Of the memory store's leases, by their tokens: each store counts for itself (I26)."""

    def new_store(self, clock: Clock, new_token: Callable[[], str]) -> FullStore:
        raise NotImplementedError

    def both(self, ask: Callable[[FullStore], Coroutine[Any, Any, Any]]) -> Any:
        """What both answered; they must agree."""
        answer = self.runner.run(ask(self.store))
        assert answer == self.runner.run(ask(self.memory))
        return answer

    def draw_leases(self, data: st.DataObject, kind: str) -> list[Lease]:
        """Any that were ever granted, one for an id: live, ended, voided or taken over."""
        if not self.leases[kind]:
            return []
        drawn = data.draw(st.lists(st.sampled_from(self.leases[kind][-8:]), max_size=3))
        return list({lease.id: lease for lease in drawn}.values())

    @rule(kind=KINDS, ids=SOME_IDS, lease_for=SECONDS, tags=TAGS, data=st.data())
    def acquire(
        self, kind: str, ids: list[str], lease_for: float, tags: list[str], data: st.DataObject
    ) -> None:
        records = self.memory.read_now(kind, ids)
        asks = []
        for id_ in ids:
            copy = records[id_].copy if id_ in records else None
            now = copy.generation if copy is not None else None
            seen = data.draw(st.sampled_from([now, now, None, self.generations[-1]]))
            failures = data.draw(st.sampled_from([None, 0, 2]))
            take_over = data.draw(st.sampled_from([False, False, True]))
            asks.append(Ask(id_, seen, tuple(tags), failures, take_over))
        grants = self.runner.run(self.store.acquire(kind, asks, lease_for))
        granted = [grant for grant in grants.values() if isinstance(grant, Lease)]
        tokens = {lease.id: lease.token for lease in granted}
        expected: dict[str, Grant] = {}
        for ask in asks:  # one by one, since the memory store draws one token for a request
            self.drawn = [tokens.get(ask.id, "not granted")]
            expected |= self.runner.run(self.memory.acquire(kind, [ask], lease_for))
        assert without_epochs(grants) == without_epochs(expected)
        own = [grant for grant in expected.values() if isinstance(grant, Lease)]
        self.epochs.update((lease.token, lease.epoch) for lease in own)
        self.leases[kind] += granted
        self.generations += [lease.token for lease in granted]

    @rule(
        kind=KINDS,
        value=st.sampled_from([None, b"", b"value", b"\x00" * 5_000]),
        policy=POLICIES,
        back=SECONDS,
        data=st.data(),
    )
    def publish(
        self, kind: str, value: bytes | None, policy: Policy, back: float, data: st.DataObject
    ) -> None:
        copies = {
            lease.id: (lease, Copy(lease.token, self.clock() - back, policy, value))
            for lease in self.draw_leases(data, kind)
        }
        late = {id_: tuple(data.draw(TAGS)) for id_ in copies if data.draw(st.booleans())}
        own = {
            id_: (replace(lease, epoch=self.epochs[lease.token]), copy)
            for id_, (lease, copy) in copies.items()
        }
        superseded = self.runner.run(self.store.publish(kind, copies, late))
        assert superseded == self.runner.run(self.memory.publish(kind, own, late))

    @rule(
        kind=KINDS,
        ids=SOME_IDS,
        value=st.sampled_from([None, b"", b"value", b"\x00" * 5_000, UNREAD]),
        policy=POLICIES,
        version=st.sampled_from([b"", b"", *VERSIONS]),
        data=st.data(),
    )
    def put(
        self,
        kind: str,
        ids: list[str],
        value: bytes | Unread | None,
        policy: Policy,
        version: bytes,
        data: st.DataObject,
    ) -> None:
        """S13: with any condition; the store may ask to put it again."""
        if not self.PUTS:
            return
        puts: dict[str, Put] = {}
        for id_ in ids:
            records = self.memory.read_now(kind, [id_])
            stored = records[id_].copy if id_ in records else None
            copy = Copy(self.store.new_generation(), self.clock(), policy, value, version=version)
            seen = None if stored is None else stored.generation
            seen = data.draw(st.sampled_from([seen, seen, self.generations[-1]]))
            late = data.draw(st.none() | TAGS.map(tuple))
            tags = self.draw_tags(data, id_)
            when = data.draw(st.sampled_from(When))
            puts[id_] = Put(copy, tags, late, when, seen, data.draw(st.sampled_from(Mark)))
            self.generations.append(copy.generation)
        expected = self.runner.run(self.memory.put(kind, puts))
        left = puts
        while left:
            results = self.runner.run(self.store.put(kind, left))
            left = {id_: puts[id_] for id_ in left if results[id_].outcome is PutOutcome.AGAIN}
            for id_ in results.keys() - left.keys():
                assert replace(results[id_], stamp=0, is_empty=False) == expected[id_]
                if results[id_].is_empty:  # some stores say so of a put that they refuse
                    assert not self.memory.read_now(kind, [id_])

    def draw_tags(self, data: st.DataObject, id_: str) -> tuple[str, ...]:
        """The tags with which this id is put."""
        del id_
        return tuple(data.draw(TAGS))

    @rule(kind=KINDS, lease_for=SECONDS, data=st.data())
    def renew(self, kind: str, lease_for: float, data: st.DataObject) -> None:
        leases = self.draw_leases(data, kind)
        self.both(lambda store: store.renew(kind, leases, lease_for))

    @rule(kind=KINDS, failed=st.booleans(), pause=SECONDS, data=st.data())
    def release(self, kind: str, failed: bool, pause: float, data: st.DataObject) -> None:
        leases = self.draw_leases(data, kind)
        failure = Failure(2, self.clock() + pause, "TimeoutError")
        failures = {lease.id: failure for lease in leases} if failed else None
        self.both(lambda store: store.release(kind, leases, failures))

    @rule(kind=KINDS, ids=SOME_IDS, soft=st.booleans())
    def invalidate(self, kind: str, ids: list[str], soft: bool) -> None:
        self.both(lambda store: store.invalidate(kind, ids, soft=soft))

    @rule(tag=st.sampled_from(["eu", "us"]), soft=st.booleans())
    def invalidate_tag(self, tag: str, soft: bool) -> None:
        """In whatever order each of them found them."""

        async def reached(store: Store) -> list[tuple[str, str]]:
            return sorted(await store.invalidate_tag(tag, soft=soft))

        self.both(reached)

    @rule(kind=KINDS, ids=SOME_IDS)
    def delete(self, kind: str, ids: list[str]) -> None:
        self.both(lambda store: store.delete(kind, ids))

    @rule(later=st.sampled_from([-10.0, 0.0, 1.0, 20.0, 60.0]))
    def evict(self, later: float) -> None:
        self.both(lambda store: store.evict(self.clock() + later))

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 10.0, -3600.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(kind=KINDS, ids=SOME_IDS, data=st.data())
    def read_what_is_known(self, kind: str, ids: list[str], data: st.DataObject) -> None:
        known = {id_: data.draw(st.sampled_from(self.generations[-8:])) for id_ in ids}
        self.both(lambda store: store.read(kind, ids, known))

    @rule(kind=st.sampled_from(["post", None]), search=st.sampled_from(["", "a"]), data=st.data())
    def list_entries(self, kind: str | None, search: str, data: st.DataObject) -> None:
        """In the same order, where the store has one."""
        after = data.draw(st.sampled_from([None, ("page", "b"), ("post", "a")]))
        limit = data.draw(st.sampled_from([1, 2, 100]))
        self.both(lambda store: store.entries(kind, search, after, limit))

    @invariant()
    def both_hold_the_same(self) -> None:
        for kind in ("post", "page"):
            self.both(lambda store, kind=kind: store.read(kind, IDS))  # type: ignore[misc]
            self.both(lambda store, kind=kind: store.read(kind, ["a"]))  # type: ignore[misc]
        stats, expected = (self.runner.run(each.stats()) for each in (self.store, self.memory))
        assert (stats.copies, stats.leases) == (expected.copies, expected.leases)

    def teardown(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()
