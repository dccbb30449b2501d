"""The behaviour that every store has, as a suite (S1, S2): subclass it for a store of your own.

    class TestMyStore(StoreConformance):
        async def new_store(self, clock):
            return MyStore(clock=clock)

The tests are coroutines: run them with pytest-asyncio or anyio. A store whose clock is not ours
to give (a server's) overrides `pass_time`. A store that is reached over a network overrides
`delayed`, so that the suite can let requests arrive late (S8).
"""

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from msgspec.structs import replace

from stillfresh.clock import Clock
from stillfresh.errors import ConfigError, NotOpen
from stillfresh.freshness import LONGEST_LEASE, MAX_SKEW, Policy
from stillfresh.stores.contract import (
    UNREAD,
    Ask,
    Copy,
    Entry,
    Failure,
    Grant,
    Held,
    Lease,
    Mark,
    Newer,
    Record,
    Store,
)
from stillfresh.testing.clocks import ManualClock
from stillfresh.testing.conformance_late import (
    Deliver,
    History,
    evicting,
    given_up,
    overtaken,
    play_late,
    taken_over,
)

T = TypeVar("T")

KIND: Final = "price"
POLICY: Final = Policy(30, 60, 90)


class StoreConformance:
    """One sentence, one test; every store passes all of them."""

    LEASE: float = 10.0
    """How long a lease is asked for; a store that counts whole seconds may need more."""

    LISTS_LOADS: bool = True
    """Whether an entry is listed before it has a copy."""

    clock: ManualClock

    def setup_method(self) -> None:
        self.clock = ManualClock(start=1_700_000_000.0)

    async def new_store(self, clock: Clock) -> Store:
        """A store with nothing in it, not opened yet."""
        raise NotImplementedError

    async def pass_time(self, seconds: float) -> None:
        """Let the store's clock move on."""
        self.clock.advance(seconds)

    async def set_back(self, seconds: float) -> None:
        """Let the store's clock go back, where that can be done."""
        await self.pass_time(-seconds)

    async def delayed(self, step: Awaitable[T]) -> tuple[T, Deliver | None]:
        """Do a step of the store; returns its answer, and what delivers its requests again.

        Here: nothing can arrive when a step has ended, as in a store without a network. With one,
        record what the step sends to the server, or hold it back until it is sent again, and
        return a coroutine function that sends it to the server once more.
        """
        return await step, None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Store]:
        store = await self.new_store(self.clock)
        await store.open()
        try:
            yield store
        finally:
            await store.close()

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

    async def published(self, store: Store, id_: str = "a", value: bytes | None = b"value") -> Copy:
        record = (await store.read(KIND, [id_])).get(id_, Record())
        seen = record.copy.generation if record.copy is not None else None
        lease = await self.lease(store, id_, seen)
        copy = self.copy(lease, value)
        assert await store.publish(KIND, {id_: (lease, copy)}) == set()
        return copy

    async def record(self, store: Store, id_: str = "a") -> Record:
        return (await store.read(KIND, [id_])).get(id_, Record())

    async def test_knows_nothing_at_first(self) -> None:
        """An id without anything is not in the answer."""
        async with self.opened() as store:
            assert await store.read(KIND, ["a", "b"]) == {}

    async def test_what_is_published_is_read(self) -> None:
        """Value, time, terms and generation come back as they were; the lease has ended."""
        async with self.opened() as store:
            copy = await self.published(store)
            assert await store.read(KIND, ["a", "b"]) == {"a": Record(copy)}

    async def test_absent_is_not_an_empty_value(self) -> None:
        """That upstream has no such thing, and a value of no bytes, are two things."""
        async with self.opened() as store:
            for value in (None, b""):
                await self.published(store, value=value)
                copy = (await self.record(store)).copy
                assert copy is not None
                assert copy.value == value

    async def test_keeps_any_bytes_under_any_id(self) -> None:
        """Ids and values of every kind come back unchanged and are not mixed up."""
        ids = [
            "a",
            "A",
            " a",
            "a ",
            "",
            "a\x00b",
            "a%",
            "a_",
            "ключ",
            "'; --",
            "x" * 5_000,
            "1",
            "01",
        ]
        async with self.opened() as store:
            for id_ in ids:
                await self.published(store, id_, value=id_.encode() + bytes(range(256)))
            found = await store.read(KIND, ids)
            assert set(found) == set(ids)
            for id_, record in found.items():
                assert record.copy is not None
                assert record.copy.value == id_.encode() + bytes(range(256))

    async def test_kinds_are_apart(self) -> None:
        """The same id in another kind is another thing."""
        async with self.opened() as store:
            await self.published(store)
            assert await store.read("other", ["a"]) == {}
            await store.delete("other", ["a"])
            await store.invalidate("other", ["a"])
            assert (await self.record(store)).copy is not None

    async def test_the_value_is_left_out_for_who_has_it(self) -> None:
        """Who knows the generation may be spared the value; who knows another one gets it."""
        async with self.opened() as store:
            copy = await self.published(store)
            known = (await store.read(KIND, ["a"], {"a": copy.generation}))["a"].copy
            other = (await store.read(KIND, ["a"], {"a": "another"}))["a"].copy
            assert known is not None
            assert known.value in {UNREAD, copy.value}
            assert other == copy

    async def test_absent_is_told_to_who_knows_it_too(self) -> None:
        """An absent copy is never UNREAD: there is nothing to spare."""
        async with self.opened() as store:
            copy = await self.published(store, value=None)
            assert (await store.read(KIND, ["a"], {"a": copy.generation}))["a"].copy == copy

    async def test_one_lease_at_a_time(self) -> None:
        """The second who asks is told until when it is held."""
        async with self.opened() as store:
            lease = await self.lease(store)
            denied = await self.ask(store)
            assert isinstance(denied, Held)
            assert abs(denied.until - lease.expires_at) < 1
            assert (await self.record(store)).held_until == denied.until

    async def test_many_ids_are_answered_each_on_its_own(self) -> None:
        """One call: one id granted, one held, one with a newer copy."""
        async with self.opened() as store:
            await self.lease(store, "held")
            newer = await self.published(store, "newer")
            asks = [Ask("free"), Ask("held"), Ask("newer", seen="an older one")]
            grants = await store.acquire(KIND, asks, self.LEASE)
            assert isinstance(grants["free"], Lease)
            assert isinstance(grants["held"], Held)
            assert grants["newer"] == Newer(Record(newer))

    async def test_a_lease_is_granted_only_for_the_copy_seen(self) -> None:
        """E5: who comes late with an old sight gets the newer copy and loads nothing."""
        async with self.opened() as store:
            copy = await self.published(store)
            assert await self.ask(store, seen=None) == Newer(Record(copy))
            assert isinstance(await self.ask(store, seen=copy.generation), Lease)

    async def test_a_copy_that_went_is_no_reason_to_deny(self) -> None:
        """Seen, deleted since: there is nothing newer, so the lease is granted."""
        async with self.opened() as store:
            copy = await self.published(store)
            await store.delete(KIND, ["a"])
            assert isinstance(await self.ask(store, seen=copy.generation), Lease)

    async def test_tokens_are_never_the_same(self) -> None:
        """A generation that came back could hide a change (no ABA)."""
        async with self.opened() as store:
            tokens = set()
            for _ in range(20):
                lease = await self.lease(store)
                tokens.add(lease.token)
                await store.release(KIND, [lease])
            assert len(tokens) == 20

    async def test_a_lease_that_ended_can_be_taken_over(self) -> None:
        """S2: a dead holder is replaced when its lease ends, not before."""
        async with self.opened() as store:
            await self.lease(store)
            await self.pass_time(self.LEASE * 0.5)
            assert isinstance(await self.ask(store), Held)
            await self.pass_time(self.LEASE * 0.6)
            assert isinstance(await self.ask(store), Lease)

    async def test_a_lease_from_before_the_clock_was_set_back_is_over(self) -> None:
        """S2: it ends further away than a lease can; who holds it still can do nothing."""
        async with self.opened() as store:
            old = await self.lease(store)
            await self.set_back(3600)
            new = await self.lease(store)
            assert isinstance(await self.ask(store), Held)
            assert await store.renew(KIND, [old], self.LEASE) == {"a"}
            assert await store.publish(KIND, {"a": (old, self.copy(old))}) == {"a"}
            assert await store.publish(KIND, {"a": (new, self.copy(new))}) == set()

    async def test_who_leases_for_longer_is_not_disturbed(self) -> None:
        """Another deployment's lease may be longer than ours, by as much as clocks may differ."""
        async with self.opened() as store:
            await store.acquire(KIND, [Ask("a")], LONGEST_LEASE)
            await self.set_back(MAX_SKEW)
            assert isinstance(await self.ask(store), Held)
            await store.acquire(KIND, [Ask("b")], 3600)
            assert isinstance((await store.acquire(KIND, [Ask("b")], 3600))["b"], Held)

    async def test_a_lease_that_ends_now_is_over(self) -> None:
        """S2: `expires_at > now` is held; at its very end nobody publishes, renews or holds it."""
        async with self.opened() as store:
            publishing, renewing = await self.lease(store, "a"), await self.lease(store, "b")
            await self.lease(store, "c")
            await self.pass_time(self.LEASE)
            copies = {"a": (publishing, self.copy(publishing))}
            assert await store.publish(KIND, copies) == {"a"}
            assert await store.renew(KIND, [renewing], self.LEASE) == {"b"}
            assert (await store.stats()).leases == 0
            assert isinstance(await self.ask(store, "c"), Lease)

    async def test_a_replaced_holder_cannot_publish(self) -> None:
        """S2: nothing of it shows, and its successor's lease is as it was."""
        async with self.opened() as store, self.replaced(store) as old:
            assert await store.publish(KIND, {"a": (old, self.copy(old))}) == {"a"}
            assert (await self.record(store)).copy is None

    async def test_a_replaced_holder_cannot_renew(self) -> None:
        """S2: it is told that its lease is lost, and its successor's lease is as it was."""
        async with self.opened() as store, self.replaced(store) as old:
            assert await store.renew(KIND, [old], self.LEASE * 2) == {"a"}

    async def test_a_replaced_holder_cannot_release(self) -> None:
        """S2: neither with a failure, which is not noted, nor without one."""
        async with self.opened() as store, self.replaced(store) as old:
            await store.release(KIND, [old])
            await store.release(KIND, [old], {"a": Failure(1, self.clock() + 5, "late")})
            assert (await self.record(store)).failure is None

    async def test_a_live_lease_can_be_taken_over(self) -> None:
        """E17: its holder can neither publish, renew nor release from then on."""
        async with self.opened() as store, self.replaced(store, is_live=True) as old:
            assert await store.renew(KIND, [old], self.LEASE * 2) == {"a"}
            await store.release(KIND, [old], {"a": Failure(1, self.clock() + 5, "late")})
            assert await store.publish(KIND, {"a": (old, self.copy(old))}) == {"a"}
            assert (await self.record(store)).copy is None
            assert (await self.record(store)).failure is None

    async def test_a_lease_is_taken_over_only_for_the_copy_seen(self) -> None:
        """E17, S8: a late request for it gets the newer copy, and the holder keeps its lease."""
        async with self.opened() as store:
            copy = await self.published(store)
            lease = await self.lease(store, seen=copy.generation)
            held_until = (await self.record(store)).held_until
            assert await self.take_over(store) == Newer(Record(copy, held_until))
            assert await store.publish(KIND, {"a": (lease, self.copy(lease))}) == set()

    async def test_a_lease_that_is_taken_over_has_the_new_tags(self) -> None:
        """E8, E17: an invalidation reaches the put by its own tags alone."""
        async with self.opened() as store:
            copy = await self.published(store)
            await self.lease(store, "a", copy.generation, "eu", "shop")
            lease = await self.take_over(store, copy.generation, "shop", "us")
            assert isinstance(lease, Lease)
            assert await store.invalidate_tag("eu") == []
            assert await store.publish(KIND, {"a": (lease, self.copy(lease))}) == set()
            assert await store.invalidate_tag("shop") == [(KIND, "a")]
            assert await store.invalidate_tag("us") == [(KIND, "a")]

    async def test_a_free_lease_is_taken_over_in_spite_of_failures(self) -> None:
        """E7, E17: what is published then ends the cooldown."""
        async with self.opened() as store:
            failure = Failure(3, self.clock() + 50, "TimeoutError: upstream")
            await store.release(KIND, [await self.lease(store)], {"a": failure})
            lease = await self.take_over(store)
            assert isinstance(lease, Lease)
            copy = self.copy(lease)
            assert await store.publish(KIND, {"a": (lease, copy)}) == set()
            assert await self.record(store) == Record(copy)

    async def take_over(self, store: Store, seen: str | None = None, *tags: str) -> Grant:
        asks = [Ask("a", seen, tags, take_over=True)]
        return (await store.acquire(KIND, asks, self.LEASE))["a"]

    @asynccontextmanager
    async def replaced(self, store: Store, *, is_live: bool = False) -> AsyncIterator[Lease]:
        """A lease that was taken over, live or ended; the block leaves the new one as it is."""
        old = await self.lease(store)
        if not is_live:
            await self.pass_time(self.LEASE * 1.1)
        new = await self.take_over(store) if is_live else await self.lease(store)
        assert isinstance(new, Lease)
        held_until = (await self.record(store)).held_until
        yield old
        assert (await self.record(store)).held_until == held_until
        assert isinstance(await self.ask(store), Held)
        assert await store.publish(KIND, {"a": (new, self.copy(new, b"new"))}) == set()
        assert (await self.record(store)).copy == self.copy(new, b"new")

    async def test_who_is_past_the_lease_publishes_nothing(self) -> None:
        """S7: also when nobody has taken over."""
        async with self.opened() as store:
            lease = await self.lease(store)
            await self.pass_time(self.LEASE * 1.1)
            assert await store.publish(KIND, {"a": (lease, self.copy(lease))}) == {"a"}
            assert await store.renew(KIND, [lease], self.LEASE) == {"a"}
            assert (await self.record(store)).copy is None

    async def test_a_renewed_lease_lives_on(self) -> None:
        """A long load keeps its lease by renewing it."""
        async with self.opened() as store:
            lease = await self.lease(store)
            for _ in range(3):
                await self.pass_time(self.LEASE * 0.7)
                assert await store.renew(KIND, [lease], self.LEASE) == set()
            assert isinstance(await self.ask(store), Held)
            assert await store.publish(KIND, {"a": (lease, self.copy(lease))}) == set()

    async def test_a_failure_that_was_not_seen_denies_the_lease(self) -> None:
        """E7: who looked before it failed is told of the failure; who asks in spite of it is not.

        With a copy, which comes along, and without one.
        """
        async with self.opened() as store:
            copy = await self.published(store, "b")
            for id_, kept in (("a", None), ("b", copy)):
                seen = kept.generation if kept is not None else None
                failure = Failure(2, self.clock() + 50, "TimeoutError: upstream")
                lease = await self.lease(store, id_, seen)
                late = [Ask(id_, seen, failures=1)]
                assert isinstance((await store.acquire(KIND, late, self.LEASE))[id_], Held)
                await store.release(KIND, [lease], {id_: failure})
                for _ in range(2):
                    denied = (await store.acquire(KIND, late, self.LEASE))[id_]
                    assert denied == Newer(Record(kept, None, failure))
                    assert await self.record(store, id_) == Record(kept, None, failure)
                informed = [Ask(id_, seen, failures=2)]
                granted = (await store.acquire(KIND, informed, self.LEASE))[id_]
                assert isinstance(granted, Lease)
                await store.release(KIND, [granted], {id_: replace(failure, count=3)})
                assert isinstance(await self.ask(store, id_, seen), Lease)

    async def test_a_failure_that_went_is_no_reason_to_deny(self) -> None:
        """Seen, forgotten since: there is nothing new."""
        async with self.opened() as store:
            grants = await store.acquire(KIND, [Ask("a", failures=4)], self.LEASE)
            assert isinstance(grants["a"], Lease)

    async def test_a_released_lease_is_free(self) -> None:
        """The next who asks gets it at once, and releasing twice is nothing."""
        async with self.opened() as store:
            lease = await self.lease(store)
            await store.release(KIND, [lease])
            await store.release(KIND, [lease])
            assert (await self.record(store)).held_until is None
            assert isinstance(await self.ask(store), Lease)

    async def test_publishing_ends_the_lease(self) -> None:
        """A lease serves for one publication."""
        async with self.opened() as store:
            lease = await self.lease(store)
            await store.publish(KIND, {"a": (lease, self.copy(lease))})
            assert await store.publish(KIND, {"a": (lease, self.copy(lease, b"again"))}) == {"a"}
            assert isinstance(await self.ask(store, seen=lease.token), Lease)

    async def test_of_many_publications_each_stands_alone(self) -> None:
        """One superseded id takes none of the others with it."""
        async with self.opened() as store:
            leases = {id_: await self.lease(store, id_) for id_ in "abc"}
            await store.invalidate(KIND, ["b"])
            copies = {id_: (lease, self.copy(lease)) for id_, lease in leases.items()}
            assert await store.publish(KIND, copies) == {"b"}
            assert set(await store.read(KIND, ["a", "c"])) == {"a", "c"}
            assert (await self.record(store, "b")).copy is None

    async def test_the_law(self) -> None:
        """Invalidating voids the lease: a load that began before it can never publish."""
        async with self.opened() as store:
            for soft in (False, True):
                copy = await self.published(store)
                lease = await self.lease(store, seen=copy.generation)
                await store.invalidate(KIND, ["a"], soft=soft)
                late = self.copy(lease, b"old value")
                assert await store.publish(KIND, {"a": (lease, late)}) == {"a"}
                assert await store.renew(KIND, [lease], self.LEASE) == {"a"}
                kept = (await self.record(store)).copy
                assert kept is not None
                assert (kept.generation, kept.value) == (copy.generation, copy.value)

    async def test_the_law_for_a_key_without_a_copy(self) -> None:
        """A first load is overtaken just the same, and the trailing one gets the lease at once."""
        async with self.opened() as store:
            lease = await self.lease(store)
            await store.invalidate(KIND, ["a"])
            trailing = await self.lease(store)
            assert await store.publish(KIND, {"a": (lease, self.copy(lease))}) == {"a"}
            assert await store.publish(KIND, {"a": (trailing, self.copy(trailing))}) == set()

    async def test_invalidating_marks_the_copy(self) -> None:
        """Hard stays hard when a soft one follows; a new copy has no mark."""
        async with self.opened() as store:
            await self.published(store)
            for soft, expected in ((True, Mark.SOFT), (False, Mark.HARD), (True, Mark.HARD)):
                await store.invalidate(KIND, ["a", "unknown"], soft=soft)
                copy = (await self.record(store)).copy
                assert copy is not None
                assert copy.mark == expected
            assert (await self.published(store)).mark == Mark.NONE

    async def test_late_requests_around_an_invalidation(self) -> None:
        """S8: they neither revive a voided lease nor undo what was published."""
        cold = overtaken(History.invalidate, is_cold=True)
        warm = overtaken(History.invalidate, is_cold=False)
        async with self.opened() as store:
            await play_late(self, store, cold, warm)

    async def test_late_requests_around_an_invalidation_by_tag(self) -> None:
        """S8: the same for a tag."""
        async with self.opened() as store:
            await play_late(self, store, overtaken(History.invalidate_tag, is_cold=True))

    async def test_late_requests_around_a_deletion(self) -> None:
        """S8: the same for a deletion."""
        async with self.opened() as store:
            await play_late(self, store, overtaken(History.delete, is_cold=False))

    async def test_late_requests_around_a_release(self) -> None:
        """S8: they end no other's lease; the same for a failure and an eviction."""
        failure = Failure(1, self.clock(), "TimeoutError: upstream")
        async with self.opened() as store:
            await play_late(self, store, given_up(failure), given_up(None), evicting)

    async def test_late_requests_around_a_put(self) -> None:
        """S8, E17: a put that arrives late undoes nothing; it may cost the load under way."""
        async with self.opened() as store:
            await play_late(self, store, taken_over(is_cold=True), taken_over(is_cold=False))

    async def test_a_tag_reaches_what_was_leased_with_it(self) -> None:
        """E8: copies and loads under way, in every kind; others are left alone."""
        async with self.opened() as store:
            await self.published(store, "other")
            copy_lease = await self.lease(store, "copy", None, "eu", "shop")
            await store.publish(KIND, {"copy": (copy_lease, self.copy(copy_lease))})
            loading = await self.lease(store, "loading", None, "eu")
            grant = (await store.acquire("page", [Ask("home", tags=("eu",))], self.LEASE))["home"]
            assert isinstance(grant, Lease)
            reached = await store.invalidate_tag("eu")
            assert sorted(reached) == [("page", "home"), (KIND, "copy"), (KIND, "loading")]
            assert await store.publish(KIND, {"loading": (loading, self.copy(loading))}) == {
                "loading"
            }
            assert await store.publish("page", {"home": (grant, self.copy(grant))}) == {"home"}
            copy = (await self.record(store, "copy")).copy
            other = (await self.record(store, "other")).copy
            assert copy is not None
            assert other is not None
            assert (copy.mark, other.mark) == (Mark.HARD, Mark.NONE)
            assert await store.invalidate_tag("unknown") == []

    async def test_tags_of_an_earlier_lease_are_gone(self) -> None:
        """E8: the tags of the last lease are the tags: of a copy, and of a lease that ended."""
        async with self.opened() as store:
            first = await self.lease(store, "copy", None, "eu", "shop")
            await store.publish(KIND, {"copy": (first, self.copy(first))})
            await self.lease(store, "ended", None, "eu", "shop")
            await self.pass_time(self.LEASE * 1.1)
            leases = {
                "copy": await self.lease(store, "copy", first.token, "shop"),
                "ended": await self.lease(store, "ended", None, "shop"),
            }
            assert await store.invalidate_tag("eu") == []
            copies = {id_: (lease, self.copy(lease)) for id_, lease in leases.items()}
            assert await store.publish(KIND, copies) == set()
            assert sorted(await store.invalidate_tag("shop")) == [(KIND, "copy"), (KIND, "ended")]

    async def test_a_failure_is_remembered_until_a_success(self) -> None:
        """E7: it stands beside the copy, which it leaves alone, until a publication."""
        async with self.opened() as store:
            copy = await self.published(store)
            failure = Failure(3, self.clock() + 4, "TimeoutError: upstream")
            lease = await self.lease(store, seen=copy.generation)
            await store.release(KIND, [lease], {"a": failure})
            assert await self.record(store) == Record(copy, None, failure)
            again = await self.published(store)
            assert await self.record(store) == Record(again)

    async def test_a_failure_without_a_copy_is_remembered_too(self) -> None:
        """There may never have been anything to serve."""
        async with self.opened() as store:
            failure = Failure(1, self.clock() + 1, "ConnectionError: refused")
            await store.release(KIND, [await self.lease(store)], {"a": failure})
            assert await self.record(store) == Record(None, None, failure)

    async def test_deleting_forgets_everything(self) -> None:
        """Copy, lease, failure and tags; a load under way is voided."""
        async with self.opened() as store:
            copy = await self.published(store)
            lease = await self.lease(store, "a", copy.generation, "tag")
            await store.delete(KIND, ["a", "unknown"])
            assert await store.read(KIND, ["a"]) == {}
            assert await store.publish(KIND, {"a": (lease, self.copy(lease))}) == {"a"}
            assert await store.read(KIND, ["a"]) == {}
            assert await store.invalidate_tag("tag") == []

    async def test_evicts_what_nobody_can_be_served(self) -> None:
        """Copies past all their terms go; what may still be served, or is being loaded, stays."""
        async with self.opened() as store:
            await self.published(store, "old")
            terms = POLICY.lasts
            self.clock.advance(terms / 2)
            await self.published(store, "young")
            assert await store.evict(self.clock()) == 0
            assert await store.evict(self.clock() + terms / 2 + 1) == 1
            assert set(await store.read(KIND, ["old", "young"])) == {"young"}

    async def test_counts_what_it_holds(self) -> None:
        """Copies, live leases, and some bytes."""
        async with self.opened() as store:
            before = (await store.stats()).copies
            await self.published(store, "a")
            await self.published(store, "b")
            await self.lease(store, "c")
            stats = await store.stats()
            assert (before, stats.copies, stats.leases) == (0, 2, 1)
            assert stats.bytes > 0

    async def publish_all(self, store: Store, kind: str, ids: Sequence[str]) -> None:
        """A copy of each, which had none."""
        grants = await store.acquire(kind, [Ask(id_) for id_ in ids], self.LEASE)
        leases = [grant for grant in grants.values() if isinstance(grant, Lease)]
        copies = {lease.id: (lease, self.copy(lease)) for lease in leases}
        assert await store.publish(kind, copies) == set()

    async def listed(
        self,
        store: Store,
        kind: str | None = None,
        search: str = "",
        limit: int = 2,
    ) -> list[tuple[str, str]]:
        """Page by page to the end; a page that is not full is the last."""
        names: list[tuple[str, str]] = []
        while True:
            after = names[-1] if names else None
            page = await store.entries(kind, search, after, limit)
            names += [(entry.kind, entry.id) for entry in page]
            if len(page) < limit:
                return names

    async def test_lists_what_it_holds(self) -> None:
        """Each entry as a read would give it, without its value; the size is the value's."""
        async with self.opened() as store:
            assert await store.entries() == []
            copy = await self.published(store, "a", b"four")
            absent = await self.published(store, "b", None)
            await self.lease(store, "a", copy.generation)
            await self.lease(store, "c")
            held = (await self.record(store, "a")).held_until
            loading = [Entry(KIND, "c", await self.record(store, "c"))]
            found = await store.entries()
            assert sorted(found, key=lambda entry: entry.id) == [
                Entry(KIND, "a", Record(replace(copy, value=UNREAD), held), 4),
                Entry(KIND, "b", Record(absent)),
                *(loading if self.LISTS_LOADS else ()),
            ]

    async def test_a_listing_has_every_page_once(self) -> None:
        """However small the pages are, in every kind, whatever the ids are."""
        ids = ["", "A", "a", "a b", "a\x00b", "a:b", "a%", "a_", "a*", "[a]", "ключ", "'; --", "1"]
        names = {(kind, id_) for kind in (KIND, f"{KIND}_1", f"{KIND}1") for id_ in ids}
        async with self.opened() as store:
            for kind in {name[0] for name in names}:
                await self.publish_all(store, kind, ids)
            for limit in (1, 5, 1_000):
                listed = await self.listed(store, limit=limit)
                assert len(listed) == len(names)
                assert set(listed) == names
            assert {*await self.listed(store, KIND)} == {(KIND, id_) for id_ in ids}
            assert await self.listed(store, "other") == []

    async def test_a_search_is_plain_text_within_the_id(self) -> None:
        """Nothing in it has another meaning, and upper case is not lower case."""
        ids = ["", "post:1", "post:12", "Post:1", "p%st", "p_st", "p*st", "p?st", "p[o]st", "ключ"]
        async with self.opened() as store:
            await self.publish_all(store, KIND, ids)
            for search in ("", "post:1", "ost", "%", "_", "*", "?", "[o]", "люч", KIND, "\\", "^"):
                expected = {(KIND, id_) for id_ in ids if search in id_}
                assert {*await self.listed(store, search=search)} == expected

    async def test_a_listing_goes_on_behind_what_went(self) -> None:
        """The entry that a page ended with may be deleted before the next is asked for."""
        async with self.opened() as store:
            await self.publish_all(store, KIND, [f"{number:02}" for number in range(20)])
            first = await store.entries(limit=10)
            await store.delete(KIND, [entry.id for entry in first])
            last = (first[-1].kind, first[-1].id)
            rest = await store.entries(after=last)
            assert {entry.id for entry in [*first, *rest]} == {f"{n:02}" for n in range(20)}

    async def test_a_listing_is_asked_for_by_the_page(self) -> None:
        """A limit that is none, or beyond all reason, is refused."""
        async with self.opened() as store:
            for limit in (0, -1, 1_000_000, True, 1.5):
                try:
                    await store.entries(limit=limit)  # type: ignore[arg-type]
                except ConfigError:
                    continue
                raise AssertionError(f"a limit of {limit!r} was taken")

    async def test_opens_and_closes_any_number_of_times(self) -> None:
        """Closed, it says so; opened again, it works."""
        store = await self.new_store(self.clock)
        for _ in range(2):
            await store.open()
            await store.open()
            await self.published(store)
            await store.close()
            await store.close()
            try:
                await store.read(KIND, ["a"])
            except NotOpen:
                continue
            raise AssertionError("a closed store answered")
