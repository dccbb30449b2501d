"""Tests of the right to write: leases, the law, late requests; and the suite.

    class TestMyStore(LeaseConformance):
        async def new_store(self, clock):
            return MyStore(clock=clock)

The tests are coroutines: run them with pytest-asyncio or anyio. A store with a clock
of its own (a server's) overrides `pass_time`. A store over a network overrides `delayed`, so that
the suite can let requests arrive late, and `unanswered`, so that it can lose answers.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from msgspec.structs import replace

from stillfresh.errors import StoreError
from stillfresh.freshness import LONGEST_LEASE, MAX_SKEW
from stillfresh.stores.contract import (
    Ask,
    Failure,
    Grant,
    Held,
    Lease,
    Newer,
    Record,
    Store,
    Superseded,
)
from stillfresh.testing.conformance_kit import (
    KIND,
    ConformanceKit,
    History,
    given_up,
    on_open_stores,
    overtaken,
    play_late,
    tagged_late,
    taken_over,
)


@on_open_stores
class LeaseConformance(ConformanceKit):
    """Tests of leases: one holder at a time, and no publication without a live lease."""

    async def test_a_lease_that_is_held_is_denied_with_its_end(self, store: Store) -> None:
        """The second caller learns until when it is held."""
        lease = await self.lease(store)
        denied = await self.ask(store)
        assert isinstance(denied, Held)
        assert abs(denied.until - lease.expires_at) < 1
        assert (await self.record(store)).held_until == denied.until

    async def test_each_of_many_asked_ids_gets_its_own_answer(self, store: Store) -> None:
        """One call: one id granted, one held, one with a newer copy."""
        await self.lease(store, "held")
        newer = await self.published(store, "newer")
        asks = [Ask("free"), Ask("held"), Ask("newer", seen="an older one")]
        grants = await store.acquire(KIND, asks, self.LEASE)
        assert isinstance(grants["free"], Lease)
        assert isinstance(grants["held"], Held)
        assert grants["newer"] == Newer(Record(newer))

    async def test_a_lease_is_granted_only_for_the_copy_seen(self, store: Store) -> None:
        """E5: a late caller with an old sight gets the newer copy and loads nothing."""
        copy = await self.published(store)
        assert await self.ask(store, seen=None) == Newer(Record(copy))
        assert isinstance(await self.ask(store, seen=copy.generation), Lease)

    async def test_a_lease_is_granted_if_the_copy_that_was_seen_is_deleted(
        self, store: Store
    ) -> None:
        """Seen, deleted since: there is nothing newer, so the lease is granted."""
        copy = await self.published(store)
        await store.delete(KIND, ["a"])
        assert isinstance(await self.ask(store, seen=copy.generation), Lease)

    async def test_no_two_leases_have_the_same_token(self, store: Store) -> None:
        """A generation that came back could hide a change (no ABA)."""
        tokens = set()
        for _ in range(20):
            lease = await self.lease(store)
            tokens.add(lease.token)
            await store.release(KIND, [lease])
        assert len(tokens) == 20

    async def test_a_lease_that_ended_can_be_taken_over(self, store: Store) -> None:
        """S2: a dead holder is replaced when its lease ends, not before."""
        await self.lease(store)
        await self.pass_time(self.LEASE * 0.5)
        assert isinstance(await self.ask(store), Held)
        await self.pass_time(self.LEASE * 0.6)
        assert isinstance(await self.ask(store), Lease)

    async def test_a_lease_from_before_the_clock_was_set_back_is_over(self, store: Store) -> None:
        """S2: its end is later than any lease can end; its holder can do nothing any more."""
        old = await self.lease(store)
        await self.set_back(3600)
        new = await self.lease(store)
        assert isinstance(await self.ask(store), Held)
        assert await store.renew(KIND, [old], self.LEASE) == {"a"}
        assert await self.publish(store, old) == {"a"}
        assert await self.publish(store, new) == set()

    async def test_a_lease_longer_than_ours_is_not_taken_over(self, store: Store) -> None:
        """Another deployment's lease may be longer than ours, by as much as clocks may differ."""
        await store.acquire(KIND, [Ask("a")], LONGEST_LEASE)
        await self.set_back(MAX_SKEW)
        assert isinstance(await self.ask(store), Held)
        await store.acquire(KIND, [Ask("b")], 3600)
        assert isinstance((await store.acquire(KIND, [Ask("b")], 3600))["b"], Held)

    async def test_a_lease_that_ends_now_is_over(self, store: Store) -> None:
        """S2: held while `expires_at > now`; at its end nobody publishes, renews or holds it."""
        publishing = await self.lease(store, "a")
        renewing = await self.lease(store, "b")
        await self.lease(store, "c")
        await self.pass_time(self.LEASE)
        assert await self.publish(store, publishing) == {"a"}
        assert await store.renew(KIND, [renewing], self.LEASE) == {"b"}
        assert isinstance(await self.ask(store, "c"), Lease)

    async def test_a_holder_whose_lease_was_taken_can_do_nothing(self) -> None:
        """S2: neither publish, renew nor release: its lease ended, and another took it."""
        await self.check_replaced(is_live=False)

    async def test_a_holder_whose_live_lease_was_taken_over_can_do_nothing(self) -> None:
        """E17: its holder can neither publish, renew nor release from then on."""
        await self.check_replaced(is_live=True)

    async def check_replaced(self, *, is_live: bool) -> None:
        async with self.opened() as store, self.replaced(store, is_live=is_live) as old:
            assert await self.publish(store, old) == {"a"}
            assert await store.renew(KIND, [old], self.LEASE * 2) == {"a"}
            await store.release(KIND, [old])
            await store.release(KIND, [old], {"a": Failure(1, self.clock() + 5, "late")})
            record = await self.record(store)
            assert (record.copy, record.failure) == (None, None)

    async def test_a_lease_is_taken_over_only_for_the_copy_seen(self, store: Store) -> None:
        """E17, S8: a late takeover gets the newer copy, and the holder keeps its lease."""
        copy = await self.published(store)
        lease = await self.lease(store, seen=copy.generation)
        held_until = (await self.record(store)).held_until
        assert await self.take_over(store) == Newer(Record(copy, held_until))
        assert await self.publish(store, lease) == set()

    async def test_a_lease_that_is_taken_over_has_the_new_tags(self, store: Store) -> None:
        """E8, E17: an invalidation reaches the put by its own tags alone."""
        copy = await self.published(store)
        await self.lease(store, "a", copy.generation, "eu", "shop")
        lease = await self.take_over(store, copy.generation, "shop", "us")
        assert isinstance(lease, Lease)
        assert await store.invalidate_tag("eu") == []
        assert await self.publish(store, lease) == set()
        assert await store.invalidate_tag("shop") == [(KIND, "a")]
        assert await store.invalidate_tag("us") == [(KIND, "a")]

    async def test_a_free_lease_is_taken_over_in_spite_of_failures(self, store: Store) -> None:
        """E7, E17: the publication ends the cooldown."""
        failure = Failure(3, self.clock() + 50, "TimeoutError: upstream")
        await store.release(KIND, [await self.lease(store)], {"a": failure})
        lease = await self.take_over(store)
        assert isinstance(lease, Lease)
        assert await self.publish(store, lease) == set()
        assert await self.record(store) == Record(self.copy(lease))

    async def take_over(self, store: Store, seen: str | None = None, *tags: str) -> Grant:
        asks = [Ask("a", seen, tags, take_over=True)]
        return (await store.acquire(KIND, asks, self.LEASE))["a"]

    @asynccontextmanager
    async def replaced(self, store: Store, *, is_live: bool) -> AsyncIterator[Lease]:
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
        assert await self.kept(store) == self.copy(new, b"new")

    async def test_a_holder_past_its_lease_publishes_nothing(self, store: Store) -> None:
        """S7: also if nobody has taken the lease over."""
        lease = await self.lease(store)
        await self.pass_time(self.LEASE * 1.1)
        assert await self.publish(store, lease) == {"a"}
        assert await store.renew(KIND, [lease], self.LEASE) == {"a"}
        assert (await self.record(store)).copy is None

    async def test_a_renewed_lease_stays_live(self, store: Store) -> None:
        """A long load keeps its lease by renewing it."""
        lease = await self.lease(store)
        for _ in range(3):
            await self.pass_time(self.LEASE * 0.7)
            assert await store.renew(KIND, [lease], self.LEASE) == set()
        assert isinstance(await self.ask(store), Held)
        assert await self.publish(store, lease) == set()

    async def test_a_caller_that_did_not_see_the_last_failure_is_denied(self, store: Store) -> None:
        """E7: a caller that looked before the failure gets it, unless it ignores failures.

        With a copy, which is returned too, and without one.
        """
        copy = await self.published(store, "b")
        for id_, stored in (("a", None), ("b", copy)):
            seen = stored.generation if stored is not None else None
            failure = Failure(2, self.clock() + 50, "TimeoutError: upstream")
            lease = await self.lease(store, id_, seen)
            late = [Ask(id_, seen, failures=1)]
            assert isinstance((await store.acquire(KIND, late, self.LEASE))[id_], Held)
            await store.release(KIND, [lease], {id_: failure})
            for _ in range(2):
                denied = (await store.acquire(KIND, late, self.LEASE))[id_]
                assert denied == Newer(Record(stored, None, failure))
                assert await self.record(store, id_) == Record(stored, None, failure)
            informed = [Ask(id_, seen, failures=2)]
            granted = (await store.acquire(KIND, informed, self.LEASE))[id_]
            assert isinstance(granted, Lease)
            await store.release(KIND, [granted], {id_: replace(failure, count=3)})
            assert isinstance(await self.ask(store, id_, seen), Lease)

    async def test_a_lease_is_granted_if_the_failure_that_was_seen_is_forgotten(
        self, store: Store
    ) -> None:
        """Seen, forgotten since: there is nothing new."""
        grants = await store.acquire(KIND, [Ask("a", failures=4)], self.LEASE)
        assert isinstance(grants["a"], Lease)

    async def test_a_released_lease_is_granted_to_the_next_caller(self, store: Store) -> None:
        """The next caller gets it at once, and releasing twice changes nothing."""
        lease = await self.lease(store)
        await store.release(KIND, [lease])
        await store.release(KIND, [lease])
        assert (await self.record(store)).held_until is None
        assert isinstance(await self.ask(store), Lease)

    async def test_publishing_ends_the_lease(self, store: Store) -> None:
        """A lease serves for one publication."""
        lease = await self.lease(store)
        await self.publish(store, lease)
        assert await store.publish(KIND, {"a": (lease, self.copy(lease, b"again"))}) == {"a"}
        assert isinstance(await self.ask(store, seen=lease.token), Lease)

    async def test_a_superseded_publication_does_not_affect_the_others(self, store: Store) -> None:
        """A superseded id does not affect the others."""
        leases = [await self.lease(store, id_) for id_ in "abc"]
        await store.invalidate(KIND, ["b"])
        assert await self.publish(store, *leases) == {"b"}
        assert set(await store.read(KIND, ["a", "c"])) == {"a", "c"}
        assert (await self.record(store, "b")).copy is None

    async def test_a_publication_whose_answer_was_lost_is_not_called_superseded_for_sure(
        self, store: Store
    ) -> None:
        """S2: another copy replaced it before the store could look: it is known, or `unsure`."""
        await self.published(store, "other")  # a server may have to learn the step
        lease = await self.lease(store)
        superseded: set[str] = set()
        with suppress(StoreError):
            superseded = await self.unanswered(
                self.publish(store, lease), partial(self.published, store, "a", b"next")
            )
        assert superseded == unsure_of(superseded)
        assert (await self.kept(store)).value == b"next"

    async def test_a_publication_is_superseded_for_sure_if_no_answer_was_lost(
        self, store: Store
    ) -> None:
        """S2: no answer was lost, so an update may begin again."""
        lease = await self.lease(store)
        await store.invalidate(KIND, ["a"])
        superseded = await self.publish(store, lease)
        assert superseded == {"a"}
        assert unsure_of(superseded) == set()

    async def test_a_load_that_began_before_an_invalidation_never_publishes(
        self, store: Store
    ) -> None:
        """Invalidating voids the lease: a load that began before it can never publish."""
        for soft in (False, True):
            copy = await self.published(store)
            lease = await self.lease(store, seen=copy.generation)
            await store.invalidate(KIND, ["a"], soft=soft)
            assert await self.publish(store, lease) == {"a"}
            assert await store.renew(KIND, [lease], self.LEASE) == {"a"}
            stored = await self.kept(store)
            assert (stored.generation, stored.value) == (copy.generation, copy.value)

    async def test_a_first_load_that_began_before_an_invalidation_never_publishes(
        self, store: Store
    ) -> None:
        """A first load is overtaken just the same, and the trailing one gets the lease at once."""
        lease = await self.lease(store)
        await store.invalidate(KIND, ["a"])
        trailing = await self.lease(store)
        assert await self.publish(store, lease) == {"a"}
        assert await self.publish(store, trailing) == set()

    async def test_late_requests_around_an_invalidation_undo_nothing(self, store: Store) -> None:
        """S8: they neither revive a voided lease nor undo a publication."""
        cold = partial(overtaken, by=History.invalidate, is_cold=True)
        await play_late(self, store, cold, partial(cold, is_cold=False))

    async def test_late_requests_around_an_invalidation_by_tag_undo_nothing(
        self, store: Store
    ) -> None:
        """S8: the same for a tag."""
        tagged = partial(overtaken, by=History.invalidate_tag, is_cold=True)
        await play_late(self, store, tagged)

    async def test_late_requests_around_tags_that_come_with_a_copy_undo_nothing(
        self, store: Store
    ) -> None:
        """S8, I26: the same for a tag that comes with the copy."""
        await play_late(self, store, tagged_late)

    async def test_late_requests_around_a_deletion_undo_nothing(self, store: Store) -> None:
        """S8: the same for a deletion."""
        await play_late(self, store, partial(overtaken, by=History.delete, is_cold=False))

    async def test_late_requests_around_a_release_end_no_lease_of_another_holder(
        self, store: Store
    ) -> None:
        """S8: they end no other's lease; the same for a failure."""
        failure = Failure(1, self.clock(), "TimeoutError: upstream")
        await play_late(self, store, partial(given_up, failure=failure), given_up)

    async def test_late_requests_around_a_takeover_undo_nothing(self, store: Store) -> None:
        """S8, E17: a put that arrives late undoes nothing; it may cost the load under way."""
        cold, warm = (partial(taken_over, is_cold=is_cold) for is_cold in (True, False))
        await play_late(self, store, cold, warm)


def unsure_of(superseded: set[str]) -> set[str]:
    return set(superseded.unsure) if isinstance(superseded, Superseded) else set()
