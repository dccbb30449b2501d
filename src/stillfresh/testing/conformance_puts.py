"""Tests of `put`, the step that stores a value without a lease.

    class TestMyStore(PutConformance):
        async def new_store(self, clock):
            return MyStore(clock=clock)

What a put replaces, under which conditions, by which version; that it voids a load under way; and
that a put, an invalidation or a deletion that arrives late does nothing to what came after it.
"""

import asyncio
from functools import partial
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from stillfresh.errors import StoreError
from stillfresh.freshness import Policy
from stillfresh.stores.contract import (
    UNREAD,
    Copy,
    Failure,
    Mark,
    PutOutcome,
    PutResult,
    Record,
    Store,
    When,
)
from stillfresh.stores.versions import packed_version
from stillfresh.testing.conformance_kit import (
    KIND,
    LASTING,
    ConformanceKit,
    History,
    on_open_stores,
    play_late,
    put_around,
    put_between_loads,
    put_twice,
)

STORED, REPLACED, KEPT, MIXED, REFUSED, _ = PutOutcome
ONE, TWO, TEN = (packed_version(number) for number in (1, 2, 10))
TEXT = packed_version("2026-11-18T00:22:00Z")


@on_open_stores
class PutConformance(ConformanceKit):
    """Tests of puts."""

    WRITERS: int = 8
    ROUNDS: int = 10
    """Of the test with writers at once."""

    async def test_a_put_copy_is_read_as_it_was(self, store: Store) -> None:
        """S13: value, time, terms, version and generation come back as they were."""
        put = self.new_put(store, b"put", version=TEN)
        result = await self.put(store, put)
        assert (result.outcome, result.version) == (STORED, TEN)
        assert await store.read(KIND, ["a", "b"]) == {"a": Record(put.copy)}

    async def test_an_absence_can_be_put(self, store: Store) -> None:
        """E4: None is an absence, and an empty value is none."""
        for value in (None, b""):
            assert await self.put_value(store, value) is STORED
            assert (await self.kept(store)).value == value

    async def test_the_last_of_two_puts_stays(self, store: Store) -> None:
        """E35: whatever was there before."""
        await self.published(store)
        for value in (b"first", b"second"):
            assert await self.put_value(store, value) is STORED
            assert (await self.kept(store)).value == value

    async def test_a_put_removes_the_mark_of_an_invalidation(self, store: Store) -> None:
        """E35: the value of the put was not invalidated."""
        for soft in (True, False):
            await self.published(store)
            await store.invalidate(KIND, ["a"], soft=soft)
            assert await self.put_value(store) is STORED
            assert (await self.kept(store)).mark is Mark.NONE

    async def test_a_put_voids_the_lease(self, store: Store) -> None:
        """The law, S13: a load that was granted before a put never publishes, cold or warm."""
        copy = await self.published(store, "warm")
        for id_, seen in (("cold", None), ("warm", copy.generation)):
            lease = await self.lease(store, id_, seen)
            put = self.new_put(store)
            assert (await self.put(store, put, id_)).outcome is STORED
            assert (await self.record(store, id_)).held_until is None
            assert await store.renew(KIND, [lease], self.LEASE) == {id_}
            assert await self.publish(store, lease) == {id_}
            await store.release(KIND, [lease], {id_: Failure(1, self.clock() + 5, "late")})
            assert await self.record(store, id_) == Record(put.copy)

    async def test_a_put_ends_the_cooldown(self, store: Store) -> None:
        """E7: the failure is forgotten, with a copy and without one."""
        copy = await self.published(store, "warm")
        for id_, seen in (("cold", None), ("warm", copy.generation)):
            failure = Failure(3, self.clock() + 50, "TimeoutError: upstream")
            await store.release(KIND, [await self.lease(store, id_, seen)], {id_: failure})
            assert await self.put_value(store, id_=id_) is STORED
            assert (await self.record(store, id_)).failure is None

    async def test_a_load_replaces_a_put(self, store: Store) -> None:
        """E5: the lease is granted for the put's copy, and the load is published."""
        put = self.new_put(store)
        await self.put(store, put)
        lease = await self.lease(store, seen=put.copy.generation)
        assert await self.publish(store, lease) == set()
        assert (await self.kept(store)).generation == lease.token

    async def test_each_of_many_puts_has_its_own_outcome(self, store: Store) -> None:
        """S1: one call, one stored, one refused, one kept; of many ids none is missing."""
        await self.put_value(store, id_="kept", version=TEN)
        await self.put_value(store, id_="refused")
        puts = {
            "stored": self.new_put(store),
            "kept": self.new_put(store, version=TWO),
            "refused": self.new_put(store, when=When.NO_LIVE_COPY),
        }
        many = {f"{number}": self.new_put(store) for number in range(150)}
        results = await store.put(KIND, puts | many)
        again = {id_ for id_, result in results.items() if result.outcome is PutOutcome.AGAIN}
        for id_ in again:
            results[id_] = await self.put(store, (puts | many)[id_], id_)
        outcomes = {id_: results[id_].outcome for id_ in puts}
        assert outcomes == {"stored": STORED, "kept": KEPT, "refused": REFUSED}
        assert {results[id_].outcome for id_ in many} == {STORED}
        assert (await self.record(store, "stored")).copy == puts["stored"].copy
        assert set(await store.read(KIND, list(many))) == set(many)

    async def test_the_tags_of_a_put_replace_the_tags_of_the_lease(self, store: Store) -> None:
        """E8: an invalidation by tag reaches a put by its own tags alone."""
        await self.publish(store, await self.lease(store, "a", None, "eu", "shop"))
        await self.put_value(store, tags=("shop", "us"))
        assert await store.invalidate_tag("eu") == []
        for tag in ("shop", "us"):
            assert await store.invalidate_tag(tag, soft=True) == [(KIND, "a")]
        assert (await self.kept(store)).mark is Mark.SOFT

    async def test_a_put_that_names_no_tags_keeps_the_stored_tags(self, store: Store) -> None:
        """E35, `touch`: of the key, and of the value; without a copy, there are none."""
        await self.publish(store, await self.lease(store, "a", None, "eu"), tags=("shop",))
        assert await self.put_value(store, tags=None) is STORED
        for tag in ("eu", "shop"):
            assert await store.invalidate_tag(tag, soft=True) == [(KIND, "a")]
        assert await self.put_value(store, id_="b", tags=None) is STORED
        assert await store.invalidate_tag("b") == []

    async def test_tags_of_the_value_stay_unless_the_put_brings_others(self, store: Store) -> None:
        """I26: a put without such tags keeps those of the old value."""
        await self.publish(store, await self.lease(store), tags=("eu", "shop"))
        await self.put_value(store)
        assert await store.invalidate_tag("shop", soft=True) == [(KIND, "a")]
        await self.put_value(store, late=("us",))
        assert await store.invalidate_tag("shop") == []
        assert await store.invalidate_tag("us", soft=True) == [(KIND, "a")]
        await self.put_value(store, late=())
        assert await store.invalidate_tag("us") == []

    async def test_a_put_after_an_invalidation_by_tag_stays(self, store: Store) -> None:
        """E35: the tag was invalidated before the put, so the put's value is right."""
        await self.put_value(store, tags=("eu",), late=("us",))
        await store.invalidate_tag("eu")
        await store.invalidate_tag("us")
        assert await self.put_value(store, b"after", tags=("eu",), late=("us",)) is STORED
        stored = await self.kept(store)
        assert (stored.value, stored.mark) == (b"after", Mark.NONE)

    async def test_a_put_on_the_condition_no_live_copy_is_refused_while_one_is_live(
        self, store: Store
    ) -> None:
        """E35, `add`: stored if there is no copy, an old, an absent or an invalidated one."""
        condition: dict[str, Any] = {"when": When.NO_LIVE_COPY}
        assert await self.put_value(store, b"first", **condition) is STORED
        assert await self.put_value(store, b"second", **condition) is REFUSED
        assert (await self.kept(store)).value == b"first"
        await store.invalidate(KIND, ["a"], soft=True)
        assert await self.put_value(store, b"third", **condition) is STORED
        await self.put_value(store, None)
        assert await self.put_value(store, b"fourth", **condition) is STORED
        await self.pass_time(LASTING.fresh_for + 1)
        assert await self.put_value(store, b"fifth", **condition) is STORED
        assert (await self.kept(store)).value == b"fifth"

    async def test_a_put_on_the_condition_live_copy_is_refused_without_one(
        self, store: Store
    ) -> None:
        """E35, `touch`: refused if there is no copy, an old, an absent or an invalidated one."""
        condition: dict[str, Any] = {"when": When.LIVE_COPY}
        assert await self.put_value(store, **condition) is REFUSED
        await self.put_value(store, None)
        assert await self.put_value(store, **condition) is REFUSED
        await self.put_value(store, b"value")
        assert await self.put_value(store, b"touched", **condition) is STORED
        await store.invalidate(KIND, ["a"])
        assert await self.put_value(store, **condition) is REFUSED
        await self.put_value(store, b"value")
        await self.pass_time(LASTING.fresh_for + 1)
        assert await self.put_value(store, **condition) is REFUSED
        assert (await self.kept(store)).value == b"value"

    async def test_a_put_of_an_unread_value_keeps_the_stored_value(self, store: Store) -> None:
        """E35, `touch`: the value stays, its times and its generation are new."""
        unread = self.new_put(store, when=When.LIVE_COPY)
        unread = replace(unread, copy=replace(unread.copy, value=UNREAD))
        assert (await self.put(store, unread)).outcome is REFUSED
        for value in (b"value", b"", b"x" * 5_000):
            lease = await self.lease(store, seen=(await self.generation(store)))
            await store.publish(KIND, {"a": (lease, self.copy(lease, value))}, {"a": ("eu",)})
            touched = Copy(store.new_generation(), self.clock(), LASTING, UNREAD)
            assert (await self.put(store, replace(unread, copy=touched))).outcome is STORED
            assert await self.kept(store) == replace(touched, value=value)
            assert await store.invalidate_tag("eu", soft=True) == [(KIND, "a")]

    async def test_a_put_on_the_condition_unchanged_is_refused_after_any_change(
        self, store: Store
    ) -> None:
        """E35, `incr`: stored only if the copy is the one seen, with the mark that was seen."""

        async def unchanged(seen: Copy | None) -> PutOutcome:
            generation = None if seen is None else seen.generation
            mark = Mark.NONE if seen is None else seen.mark
            put = self.new_put(store, when=When.UNCHANGED, seen=generation, seen_mark=mark)
            return (await self.put(store, put)).outcome

        assert await unchanged(None) is STORED
        first = await self.kept(store)
        assert await unchanged(None) is REFUSED
        assert await unchanged(first) is STORED
        assert await unchanged(first) is REFUSED
        second = await self.kept(store)
        await store.invalidate(KIND, ["a"])
        assert await unchanged(second) is REFUSED
        assert await unchanged(await self.kept(store)) is STORED
        await store.delete(KIND, ["a"])
        assert await unchanged(second) is REFUSED
        assert await unchanged(None) is STORED

    async def test_of_many_conditional_puts_at_once_one_is_stored(self, store: Store) -> None:
        """E35: no increment is lost, and one of many callers of `add` wins."""
        conditions: list[dict[str, Any]] = [
            {"when": When.NO_LIVE_COPY},
            {"when": When.UNCHANGED, "seen": None},
        ]
        for number, condition in enumerate(conditions):
            puts = [
                self.put_value(store, b"%d" % writer, f"{number}", **condition)
                for writer in range(self.WRITERS)
            ]
            outcomes = await asyncio.gather(*puts)
            refusals = ["refused"] * (self.WRITERS - 1)
            assert sorted(outcome.value for outcome in outcomes) == [*refusals, "stored"]

    async def test_a_put_of_a_smaller_version_is_not_stored(self, store: Store) -> None:
        """E35: smaller is not stored, equal and greater are; integers by their value."""
        for version, expected in (
            (TWO, STORED),
            (ONE, KEPT),
            (TWO, STORED),
            (TEN, STORED),
            (TWO, KEPT),
        ):
            result = await self.put(store, self.new_put(store, version, version=version))
            assert result.outcome is expected
            stored = await self.kept(store)
            assert stored.version == stored.value == result.version
        assert (await self.kept(store)).version == TEN

    async def test_versions_are_compared_byte_by_byte(self, store: Store) -> None:
        """E35: in the order of their stored forms, whatever the language of the server is."""
        numbers = [-(2**63), -256, -1, 0, 1, 9, 10, 255, 256, 2**31, 2**53 + 1, 2**63 - 1]
        texts = ["", "A", "Z", "a", "a\x00", "a\x00b", "a ", "aa", "b", "z", "à", "ö", "\U0001f600"]
        ordered = sorted(texts, key=str.encode)
        for versions in (numbers, ordered):
            await store.delete(KIND, ["a"])
            for smaller, greater in pairwise(map(packed_version, versions)):
                assert await self.put_value(store, version=smaller) is STORED
                assert await self.put_value(store, version=greater) is STORED
                assert await self.put_value(store, version=smaller) is KEPT

    async def test_versions_of_two_kinds_are_not_compared(self, store: Store) -> None:
        """E35: an integer and a text have no order: nothing is stored."""
        for stored, given in ((ONE, TEXT), (TEXT, ONE)):
            await store.delete(KIND, ["a"])
            put = self.new_put(store, version=stored)
            await self.put(store, put)
            assert await self.put(store, self.new_put(store, version=given)) == PutResult(
                MIXED, stored
            )
            assert (await self.kept(store)) == put.copy

    async def test_a_put_or_load_without_a_version_keeps_the_old_one(self, store: Store) -> None:
        """E35: the next smaller version is still not stored."""
        await self.put_value(store, version=TWO)
        assert await self.put_value(store, b"put") is STORED
        assert await self.put_value(store, version=ONE) is KEPT
        lease = await self.lease(store, seen=await self.generation(store))
        assert await self.publish(store, lease) == set()
        assert (await self.kept(store)).version == TWO
        assert await self.put_value(store, version=ONE) is KEPT

    async def test_a_load_stores_the_version_that_it_gives(self, store: Store) -> None:
        """E35: the loader knows best: its version stands, whether greater or smaller."""
        for version in (TWO, TEN, ONE):
            lease = await self.lease(store, seen=await self.generation(store))
            copy = replace(self.copy(lease), version=version)
            assert await store.publish(KIND, {"a": (lease, copy)}) == set()
            assert await self.kept(store) == copy
        assert await self.put_value(store, version=ONE) is STORED

    async def test_an_invalidated_copy_keeps_its_version(self, store: Store) -> None:
        """E35: an older value does not come back after an invalidation."""
        await self.put_value(store, version=TEN, tags=("eu",))
        await store.invalidate(KIND, ["a"])
        assert await self.put_value(store, version=TWO) is KEPT
        await store.invalidate_tag("eu")
        assert await self.put_value(store, version=TWO) is KEPT
        assert await self.put_value(store, version=TEN) is STORED

    async def test_a_deleted_copy_leaves_no_version(self, store: Store) -> None:
        """E35: nothing is known of it."""
        await self.put_value(store, version=TEN)
        await store.delete(KIND, ["a"])
        assert await self.put_value(store, version=ONE) is STORED

    async def test_a_put_that_deletes_leaves_no_version(self, store: Store) -> None:
        """E35: an update that deletes puts an absence that lasts no time."""
        for when in (When.ALWAYS, When.UNCHANGED):
            await self.put_value(store, version=TEN)
            put = self.new_put(store, None)
            expired = replace(put.copy, policy=Policy(0))
            seen = await self.generation(store)
            await self.put(store, replace(put, copy=expired, when=when, seen=seen))
            assert await self.put_value(store, version=TEXT) is STORED
            await store.delete(KIND, ["a"])

    async def test_of_many_puts_at_once_one_value_stays(self, store: Store) -> None:
        """E35: all are acknowledged, and one of them is there, whole and without a mark."""
        await self.published(store)
        for turn in range(self.ROUNDS):
            values = [b"%d of %d" % (writer, turn) for writer in range(self.WRITERS)]
            outcomes = await asyncio.gather(*(self.put_value(store, value) for value in values))
            assert set(outcomes) <= {STORED, REPLACED}
            stored = await self.kept(store)
            assert stored.value in values
            assert stored.mark is Mark.NONE

    async def test_a_put_after_a_deletion_is_stored(self, store: Store) -> None:
        """E35: also if the store keeps a trace of the deletion, and only for a while."""
        await self.put_value(store)
        for pause in (0.0, 30.0, 90.0):
            await store.delete(KIND, ["a"])
            assert await store.read(KIND, ["a"]) == {}
            await self.pass_time(pause)
            assert await self.put_value(store, b"after") is STORED
            assert (await self.kept(store)).value == b"after"

    async def test_late_requests_around_puts_and_loads_undo_nothing(self, store: Store) -> None:
        """S8: a late put neither undoes a publication nor a put, and revives no lease."""
        cold, warm = (partial(put_between_loads, is_cold=is_cold) for is_cold in (True, False))
        await play_late(self, store, cold, warm, put_twice)

    async def test_late_requests_around_puts_and_invalidations_undo_nothing(
        self, store: Store
    ) -> None:
        """S8: a late put is not shown after an invalidation; a late invalidation voids no put."""
        changes = (History.invalidate, History.invalidate_tag, History.delete)
        await play_late(self, store, *(partial(put_around, change=change) for change in changes))

    async def test_a_put_whose_answer_was_lost_is_recognised(self, store: Store) -> None:
        """S2, S8: it was stored, or stored and replaced; it never undoes what came after."""
        await self.put_value(store)  # a server may have to learn the step
        for changes in (0, 1, 4):
            put = self.new_put(store, b"unanswered %d" % changes)

            async def meanwhile(changes: int = changes) -> None:
                for number in range(changes):
                    assert await self.put_value(store, b"later %d" % number) is STORED

            result = await self.unanswered(self.put(store, put), meanwhile)
            stored = await self.kept(store)
            if changes:
                assert result.outcome in {REPLACED, STORED}
                assert stored.value == b"later %d" % (changes - 1)
            else:
                assert result.outcome is STORED
                assert stored == put.copy

    async def test_a_conditional_put_whose_answer_was_lost_is_not_done_twice(
        self, store: Store
    ) -> None:
        """S2, E35: it is told that it was stored, or raises; an update would be applied twice."""
        await self.put_value(store)  # a server may have to learn the step
        for changes in (0, 1, 6):
            seen = await self.kept(store)
            condition = {"when": When.UNCHANGED, "seen": seen.generation}
            put = self.new_put(store, b"unanswered", **condition)

            async def meanwhile(changes: int = changes) -> None:
                for number in range(changes):
                    assert await self.put_value(store, b"later %d" % number) is STORED

            try:
                result = await self.unanswered(self.put(store, put), meanwhile)
            except StoreError:
                assert changes > 4
            else:
                assert result.outcome in {STORED, REPLACED}
            if changes:
                assert (await self.kept(store)).value == b"later %d" % (changes - 1)

    async def generation(self, store: Store, id_: str = "a") -> str | None:
        copy = (await self.record(store, id_)).copy
        return None if copy is None else copy.generation
