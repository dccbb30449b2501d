"""Tests of what a store keeps: copies, marks, tags and failures."""

from msgspec.structs import replace

from stillfresh.errors import NotOpen
from stillfresh.stores.contract import UNREAD, Ask, Failure, Lease, Mark, Record, Store
from stillfresh.testing.conformance_kit import IDS, KIND, ConformanceKit, on_open_stores


@on_open_stores
class CopyConformance(ConformanceKit):
    """Tests of copies: what is published is read, invalidated and deleted."""

    async def test_an_unknown_id_has_no_record(self, store: Store) -> None:
        """An id without anything is not in the answer."""
        assert await store.read(KIND, ["a", "b"]) == {}

    async def test_a_published_copy_is_read_as_it_was(self, store: Store) -> None:
        """Value, time, terms and generation come back as they were; the lease has ended."""
        copy = await self.published(store)
        assert await store.read(KIND, ["a", "b"]) == {"a": Record(copy)}

    async def test_an_absence_is_not_an_empty_value(self, store: Store) -> None:
        """An absence and an empty value are different."""
        for value in (None, b""):
            await self.published(store, value=value)
            assert (await self.kept(store)).value == value

    async def test_any_bytes_are_kept_under_any_id(self, store: Store) -> None:
        """Ids and values of every kind come back unchanged and are not mixed up."""
        ids = [*IDS, "x" * 5_000, "01"]
        for id_ in ids:
            await self.published(store, id_, value=id_.encode() + bytes(range(256)))
        assert set(await store.read(KIND, ids)) == set(ids)
        for id_ in ids:
            assert (await self.kept(store, id_)).value == id_.encode() + bytes(range(256))

    async def test_the_same_id_in_another_kind_is_another_entry(self, store: Store) -> None:
        """The same id in another kind is another thing."""
        await self.published(store)
        assert await store.read("other", ["a"]) == {}
        await store.delete("other", ["a"])
        await store.invalidate("other", ["a"])
        assert (await self.kept(store)).mark == Mark.NONE

    async def test_a_reader_that_knows_the_generation_may_get_no_value(self, store: Store) -> None:
        """A reader that knows the generation may get UNREAD; others get the value."""
        copy = await self.published(store)
        known = (await store.read(KIND, ["a"], {"a": copy.generation}))["a"].copy
        other = (await store.read(KIND, ["a"], {"a": "another"}))["a"].copy
        assert known is not None
        assert known.value in {UNREAD, copy.value}
        assert other == copy

    async def test_an_absence_is_read_by_readers_that_know_its_generation(
        self, store: Store
    ) -> None:
        """An absent copy is never UNREAD: there is nothing to spare."""
        copy = await self.published(store, value=None)
        assert (await store.read(KIND, ["a"], {"a": copy.generation}))["a"].copy == copy

    async def test_an_invalidation_marks_the_copy(self, store: Store) -> None:
        """Hard stays hard when a soft one follows; a new copy has no mark."""
        await self.published(store)
        for soft, expected in ((True, Mark.SOFT), (False, Mark.HARD), (True, Mark.HARD)):
            await store.invalidate(KIND, ["a", "unknown"], soft=soft)
            assert (await self.kept(store)).mark == expected
        assert (await self.published(store)).mark == Mark.NONE

    async def test_a_tag_reaches_copies_and_loads_that_were_leased_with_it(
        self, store: Store
    ) -> None:
        """E8: copies and loads under way, in every kind; others are left alone."""
        await self.published(store, "other")
        await self.publish(store, await self.lease(store, "copy", None, "eu", "shop"))
        loading = await self.lease(store, "loading", None, "eu")
        grant = (await store.acquire("page", [Ask("home", tags=("eu",))], self.LEASE))["home"]
        assert isinstance(grant, Lease)
        reached = await store.invalidate_tag("eu")
        assert sorted(reached) == [("page", "home"), (KIND, "copy"), (KIND, "loading")]
        assert await self.publish(store, loading) == {"loading"}
        assert await self.publish(store, grant, kind="page") == {"home"}
        assert (await self.kept(store, "copy")).mark == Mark.HARD
        assert (await self.kept(store, "other")).mark == Mark.NONE
        assert await store.invalidate_tag("unknown") == []

    async def test_tags_of_an_earlier_lease_no_longer_reach_the_entry(self, store: Store) -> None:
        """E8: the tags of the last lease are the tags: of a copy, and of a lease that ended."""
        first = await self.lease(store, "copy", None, "eu", "shop")
        await self.publish(store, first)
        await self.lease(store, "ended", None, "eu", "shop")
        await self.pass_time(self.LEASE * 1.1)
        copy = await self.lease(store, "copy", first.token, "shop")
        ended = await self.lease(store, "ended", None, "shop")
        assert await store.invalidate_tag("eu") == []
        assert await self.publish(store, copy, ended) == set()
        assert sorted(await store.invalidate_tag("shop")) == [(KIND, "copy"), (KIND, "ended")]

    async def test_a_tag_that_comes_with_the_copy_reaches_the_entry(self, store: Store) -> None:
        """I26: besides the tags of its lease, in every kind, and with other tagged entries."""
        assert await self.publish(store, await self.lease(store, "other"), tags=()) == set()
        lease = await self.lease(store, "a", None, "shop")
        assert await self.publish(store, lease, tags=("eu", "shop", "")) == set()
        assert await store.invalidate_tag("us") == []
        for tag in ("eu", "shop", ""):
            assert await store.invalidate_tag(tag, soft=True) == [(KIND, "a")]
        assert (await self.kept(store)).mark == Mark.SOFT
        assert (await self.kept(store, "other")).mark == Mark.NONE

    async def test_a_load_with_a_tag_that_was_invalidated_meanwhile_is_superseded(
        self, store: Store
    ) -> None:
        """I26, the law for tags that come with the load; the next caller gets the lease."""
        await self.publish(store, await self.lease(store, "tagged"), tags=("eu",))
        lease = await self.lease(store, "a", None, "shop")
        other = await self.lease(store, "b")
        assert await store.invalidate_tag("eu") == [(KIND, "tagged")]
        assert await self.publish(store, lease, other, tags=("us", "eu")) == {"a", "b"}
        assert await store.read(KIND, ["a", "b"]) == {}
        assert await store.invalidate_tag("us") == []
        again = await self.lease(store, "a", None, "shop")
        assert await self.publish(store, again, tags=("us", "eu")) == set()
        reached = await store.invalidate_tag("eu", soft=True)
        assert sorted(reached) == [(KIND, "a"), (KIND, "tagged")]

    async def test_a_superseded_load_leaves_the_copy_as_it_was(self, store: Store) -> None:
        """I26: the copy, its tags and its failure; and the tags of that load are nowhere."""
        first = await self.lease(store)
        await self.publish(store, first, tags=("eu", "shop"))
        lease = await self.lease(store, seen=first.token)
        await store.invalidate_tag("us")
        assert await self.publish(store, lease, tags=("us", "eu", "new")) == {"a"}
        assert await self.record(store) == Record(replace(self.copy(first), mark=Mark.NONE))
        assert await store.invalidate_tag("new") == []
        for tag in ("eu", "shop"):
            assert await store.invalidate_tag(tag, soft=True) == [(KIND, "a")]

    async def test_tags_of_a_copy_reach_the_entry_until_the_copy_is_replaced(
        self, store: Store
    ) -> None:
        """I26: while the next load runs, after it failed, and after a load without tags."""
        first = await self.lease(store, "a", None, "own")
        await self.publish(store, first, tags=("eu", "shop"))
        loading = await self.lease(store, "a", first.token, "own")
        assert await store.invalidate_tag("eu") == [(KIND, "a")]
        assert await self.publish(store, loading) == {"a"}
        failure = Failure(1, self.clock() + 1, "TimeoutError: upstream")
        failing = await self.lease(store, "a", first.token)
        await store.release(KIND, [failing], {"a": failure})
        assert await store.invalidate_tag("shop") == [(KIND, "a")]
        silent = await self.lease(store, "a", first.token)
        assert await self.publish(store, silent) == set()
        assert await store.invalidate_tag("shop", soft=True) == [(KIND, "a")]
        last = await self.lease(store, "a", silent.token)
        assert await self.publish(store, last, tags=("shop", "us")) == set()
        assert await store.invalidate_tag("eu") == []
        assert await store.invalidate_tag("shop", soft=True) == [(KIND, "a")]
        assert await store.invalidate_tag("us", soft=True) == [(KIND, "a")]
        bare = await self.lease(store, "a", last.token)
        assert await self.publish(store, bare, tags=()) == set()
        assert await store.invalidate_tag("shop") == []

    async def test_deleting_forgets_tags_that_came_with_the_copy(self, store: Store) -> None:
        """I26: a new copy is not reached by them."""
        await self.publish(store, await self.lease(store), tags=("eu",))
        await store.delete(KIND, ["a"])
        assert await store.invalidate_tag("eu") == []
        await self.published(store)
        assert await store.invalidate_tag("eu") == []

    async def test_a_failure_is_remembered_until_the_next_publication(self, store: Store) -> None:
        """E7: it is kept beside the unchanged copy, until a publication."""
        copy = await self.published(store)
        failure = Failure(3, self.clock() + 4, "TimeoutError: upstream")
        lease = await self.lease(store, seen=copy.generation)
        await store.release(KIND, [lease], {"a": failure})
        assert await self.record(store) == Record(copy, None, failure)
        again = await self.published(store)
        assert await self.record(store) == Record(again)

    async def test_a_failure_is_remembered_without_a_copy(self, store: Store) -> None:
        """There may never have been anything to serve."""
        failure = Failure(1, self.clock() + 1, "ConnectionError: refused")
        await store.release(KIND, [await self.lease(store)], {"a": failure})
        assert await self.record(store) == Record(None, None, failure)

    async def test_deleting_forgets_copy_lease_failure_and_tags(self, store: Store) -> None:
        """Copy, lease, failure and tags; a load under way is voided."""
        copy = await self.published(store)
        lease = await self.lease(store, "a", copy.generation, "tag")
        await store.delete(KIND, ["a", "unknown"])
        assert await store.read(KIND, ["a"]) == {}
        assert await self.publish(store, lease) == {"a"}
        assert await store.read(KIND, ["a"]) == {}
        assert await store.invalidate_tag("tag") == []

    async def test_a_store_opens_and_closes_any_number_of_times(self) -> None:
        """A closed store raises NotOpen; opened again, it works."""
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
