"""Tests of what a store keeps: copies, marks, tags, failures, and listings."""

import asyncio
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from stillfresh.errors import ConfigError, NotOpen
from stillfresh.stores.contract import UNREAD, Ask, Failure, Lease, Mark, Record, Store, StoredEntry
from stillfresh.testing.conformance_kit import KIND, POLICY, ConformanceKit, on_open_stores

IDS: Final = (
    "", "A", "a", " a", "a ", "a b", "a\x00b", "a:b", "a%", "a_", "a*", "[a]", "ключ", "'; --", "1",
)  # fmt: skip
"""Ids that a store may confuse with each other, or with something else."""


@on_open_stores
class CopyConformance(ConformanceKit):
    """Tests of copies: what is published is read, listed, invalidated and deleted."""

    LISTS_LOADS: bool = True
    """Whether an entry is listed before it has a copy."""

    async def test_knows_nothing_at_first(self, store: Store) -> None:
        """An id without anything is not in the answer."""
        assert await store.read(KIND, ["a", "b"]) == {}

    async def test_what_is_published_is_read(self, store: Store) -> None:
        """Value, time, terms and generation come back as they were; the lease has ended."""
        copy = await self.published(store)
        assert await store.read(KIND, ["a", "b"]) == {"a": Record(copy)}

    async def test_absent_is_not_an_empty_value(self, store: Store) -> None:
        """An absence and an empty value are different."""
        for value in (None, b""):
            await self.published(store, value=value)
            assert (await self.kept(store)).value == value

    async def test_keeps_any_bytes_under_any_id(self, store: Store) -> None:
        """Ids and values of every kind come back unchanged and are not mixed up."""
        ids = [*IDS, "x" * 5_000, "01"]
        for id_ in ids:
            await self.published(store, id_, value=id_.encode() + bytes(range(256)))
        assert set(await store.read(KIND, ids)) == set(ids)
        for id_ in ids:
            assert (await self.kept(store, id_)).value == id_.encode() + bytes(range(256))

    async def test_kinds_are_apart(self, store: Store) -> None:
        """The same id in another kind is another thing."""
        await self.published(store)
        assert await store.read("other", ["a"]) == {}
        await store.delete("other", ["a"])
        await store.invalidate("other", ["a"])
        assert (await self.kept(store)).mark == Mark.NONE

    async def test_the_value_is_left_out_for_who_has_it(self, store: Store) -> None:
        """A reader that knows the generation may get UNREAD; others get the value."""
        copy = await self.published(store)
        known = (await store.read(KIND, ["a"], {"a": copy.generation}))["a"].copy
        other = (await store.read(KIND, ["a"], {"a": "another"}))["a"].copy
        assert known is not None
        assert known.value in {UNREAD, copy.value}
        assert other == copy

    async def test_absent_is_told_to_who_knows_it_too(self, store: Store) -> None:
        """An absent copy is never UNREAD: there is nothing to spare."""
        copy = await self.published(store, value=None)
        assert (await store.read(KIND, ["a"], {"a": copy.generation}))["a"].copy == copy

    async def test_reads_inline_what_it_reads(self, store: Store) -> None:
        """A store that declares it reads the same inline, without a turn of the loop."""
        await self.published(store)
        await self.lease(store, "b")
        if store.reads_inline:
            assert store.read_now(KIND, ["a", "b", "c"]) == await store.read(KIND, ["a", "b"])

    async def test_invalidating_marks_the_copy(self, store: Store) -> None:
        """Hard stays hard when a soft one follows; a new copy has no mark."""
        await self.published(store)
        for soft, expected in ((True, Mark.SOFT), (False, Mark.HARD), (True, Mark.HARD)):
            await store.invalidate(KIND, ["a", "unknown"], soft=soft)
            assert (await self.kept(store)).mark == expected
        assert (await self.published(store)).mark == Mark.NONE

    async def test_a_tag_reaches_what_was_leased_with_it(self, store: Store) -> None:
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

    async def test_tags_of_an_earlier_lease_are_gone(self, store: Store) -> None:
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

    async def test_a_tag_that_comes_with_the_copy_reaches_it(self, store: Store) -> None:
        """I26: besides the tags of its lease, in every kind, and with other tagged entries."""
        assert await self.publish(store, await self.lease(store, "other"), tags=()) == set()
        lease = await self.lease(store, "a", None, "shop")
        assert await self.publish(store, lease, tags=("eu", "shop", "")) == set()
        assert await store.invalidate_tag("us") == []
        for tag in ("eu", "shop", ""):
            assert await store.invalidate_tag(tag, soft=True) == [(KIND, "a")]
        assert (await self.kept(store)).mark == Mark.SOFT
        assert (await self.kept(store, "other")).mark == Mark.NONE

    async def test_a_tag_that_was_invalidated_while_loading_supersedes(self, store: Store) -> None:
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

    async def test_tags_of_a_copy_reach_it_until_it_is_replaced(self, store: Store) -> None:
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

    async def test_a_failure_is_remembered_until_a_success(self, store: Store) -> None:
        """E7: it is kept beside the unchanged copy, until a publication."""
        copy = await self.published(store)
        failure = Failure(3, self.clock() + 4, "TimeoutError: upstream")
        lease = await self.lease(store, seen=copy.generation)
        await store.release(KIND, [lease], {"a": failure})
        assert await self.record(store) == Record(copy, None, failure)
        again = await self.published(store)
        assert await self.record(store) == Record(again)

    async def test_a_failure_without_a_copy_is_remembered_too(self, store: Store) -> None:
        """There may never have been anything to serve."""
        failure = Failure(1, self.clock() + 1, "ConnectionError: refused")
        await store.release(KIND, [await self.lease(store)], {"a": failure})
        assert await self.record(store) == Record(None, None, failure)

    async def test_deleting_forgets_everything(self, store: Store) -> None:
        """Copy, lease, failure and tags; a load under way is voided."""
        copy = await self.published(store)
        lease = await self.lease(store, "a", copy.generation, "tag")
        await store.delete(KIND, ["a", "unknown"])
        assert await store.read(KIND, ["a"]) == {}
        assert await self.publish(store, lease) == {"a"}
        assert await store.read(KIND, ["a"]) == {}
        assert await store.invalidate_tag("tag") == []

    async def test_evicts_what_nobody_can_be_served(self, store: Store) -> None:
        """GONE copies are dropped; copies that can be served, and keys being loaded, stay."""
        await self.published(store, "old")
        terms = POLICY.lasts
        self.clock.advance(terms / 2)
        await self.published(store, "young")
        assert await store.evict(self.clock()) == 0
        assert await store.evict(self.clock() + terms / 2 + 1) == 1
        assert set(await store.read(KIND, ["old", "young"])) == {"young"}

    async def test_counts_what_it_holds(self, store: Store) -> None:
        """Copies, live leases, and some bytes."""
        before = (await store.stats()).copies
        await self.published(store, "a")
        await self.published(store, "b")
        await self.lease(store, "c")
        stats = await store.stats()
        assert (before, stats.copies, stats.leases) == (0, 2, 1)
        assert stats.bytes > 0

    async def test_keeps_to_its_bytes(self, store: Store) -> None:
        """E23: above `max_bytes` the least recently used are dropped soon; leased keys stay."""
        if (most := store.max_bytes) is None:
            return
        leased, *others, last = (f"{number:03}" for number in range(30))
        await self.published(store, leased, b"x" * (most // 10))
        await self.lease(store, leased, (await self.kept(store, leased)).generation)
        for id_ in (*others, last):
            await self.published(store, id_, b"x" * (most // 10))
        for _ in range(1_000):
            if ((await store.stats()).held or 0) <= most:
                break
            await asyncio.sleep(0.001)
        assert (await store.stats()).evicted
        assert set(await store.read(KIND, [leased, others[0], last])) == {leased, last}

    async def publish_all(self, store: Store, kind: str, ids: Sequence[str]) -> None:
        """Publish a copy of each id, which had none."""
        grants = await store.acquire(kind, [Ask(id_) for id_ in ids], self.LEASE)
        leases = [grant for grant in grants.values() if isinstance(grant, Lease)]
        assert await self.publish(store, *leases, kind=kind) == set()

    async def listed(
        self, store: Store, kind: str | None = None, search: str = "", limit: int = 2
    ) -> list[tuple[str, str]]:
        """Page by page to the end; a page that is not full is the last."""
        names: list[tuple[str, str]] = []
        while True:
            after = names[-1] if names else None
            page = await store.entries(kind, search, after, limit)
            names += [(entry.kind, entry.id) for entry in page]
            if len(page) < limit:
                return names

    async def test_lists_what_it_holds(self, store: Store) -> None:
        """Each entry as a read would give it, without its value; the size is the value's."""
        assert await store.entries() == []
        copy = await self.published(store, "a", b"four")
        absent = await self.published(store, "b", None)
        await self.lease(store, "a", copy.generation)
        await self.lease(store, "c")
        held_until = (await self.record(store, "a")).held_until
        loading = [StoredEntry(KIND, "c", await self.record(store, "c"))]
        entries = await store.entries()
        assert sorted(entries, key=lambda entry: entry.id) == [
            StoredEntry(KIND, "a", Record(replace(copy, value=UNREAD), held_until), 4),
            StoredEntry(KIND, "b", Record(absent)),
            *(loading if self.LISTS_LOADS else ()),
        ]

    async def test_a_listing_has_every_page_once(self, store: Store) -> None:
        """With pages of any size, in every kind, with any ids."""
        kinds = (KIND, f"{KIND}_1", f"{KIND}1")
        names = {(kind, id_) for kind in kinds for id_ in IDS}
        for kind in kinds:
            await self.publish_all(store, kind, IDS)
        for limit in (1, 5, 1_000):
            listed = await self.listed(store, limit=limit)
            assert len(listed) == len(names)
            assert set(listed) == names
        assert {*await self.listed(store, KIND)} == {(KIND, id_) for id_ in IDS}
        walked = [entry.id async for page in store.walk(KIND) for entry in page]
        assert sorted(walked) == sorted(IDS)
        assert await self.listed(store, "other") == []

    async def test_a_search_is_plain_text_within_the_id(self, store: Store) -> None:
        """Nothing in it has another meaning, and upper case is not lower case."""
        ids = ["", "post:1", "post:12", "Post:1", "p%st", "p_st", "p*st", "p?st", "p[o]st", "ключ"]
        await self.publish_all(store, KIND, ids)
        for search in ("", "post:1", "ost", "%", "_", "*", "?", "[o]", "люч", KIND, "\\", "^"):
            expected = {(KIND, id_) for id_ in ids if search in id_}
            assert {*await self.listed(store, search=search)} == expected

    async def test_a_listing_goes_on_behind_what_went(self, store: Store) -> None:
        """The last entry of a page may be deleted before the next page is requested."""
        await self.publish_all(store, KIND, [f"{number:02}" for number in range(20)])
        first = await store.entries(limit=10)
        await store.delete(KIND, [entry.id for entry in first])
        last = (first[-1].kind, first[-1].id)
        second = await store.entries(after=last)
        assert {entry.id for entry in [*first, *second]} == {f"{n:02}" for n in range(20)}

    async def test_a_listing_is_asked_for_by_the_page(self, store: Store) -> None:
        """A limit below 1, or too large, is refused."""
        for limit in (0, -1, 1_000_000, True, 1.5):
            try:
                await store.entries(limit=limit)  # type: ignore[arg-type]
            except ConfigError:
                continue
            raise AssertionError(f"a limit of {limit!r} was taken")

    async def test_opens_and_closes_any_number_of_times(self) -> None:
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
