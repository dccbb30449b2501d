"""T2, S8, S13: the judge of puts notices what it is there for; and what the fence decides."""

from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import pytest
from msgspec.structs import replace

from stillfresh import Policy
from stillfresh.stores.contract import UNREAD, Copy, Mark, Put, PutOutcome, PutResult, When
from stillfresh.stores.versions import packed_version
from stillfresh.testing.simulator import fence
from stillfresh.testing.simulator.changes import ChangeCall, ChangeJudge
from stillfresh.testing.simulator.fence import Bucket, Sent, StampedEntry
from stillfresh.testing.simulator.promises import BrokenPromise, Promise

KEY = ("price", "a")
NOW = 1_000.0
TERMS = Policy(60)


def copy(generation: str, version: int | None = None, **options: object) -> Copy:
    stored = Copy(generation, NOW, TERMS, b"value", version=packed_version(version))
    return replace(stored, **options)


@pytest.fixture
def changes() -> ChangeJudge:
    def fail(promise: Promise, what: str) -> NoReturn:
        raise BrokenPromise(promise, what)

    return ChangeJudge(fail)


def breaks(promise: Promise) -> AbstractContextManager[object]:
    return pytest.raises(BrokenPromise, match=promise)


def store(
    changes: ChangeJudge,
    call: ChangeCall,
    put: Put,
    before: Copy | None = None,
    after: Copy | None = None,
) -> None:
    changes.put(call, KEY, put, before=before, after=after or put.copy, now=NOW)


def put_and_end(changes: ChangeJudge, generation: str, before: Copy | None = None) -> ChangeCall:
    """A put that is stored and acknowledged."""
    call = changes.begin(1, "put")
    store(changes, call, Put(copy(generation)), before)
    changes.end(call, acknowledged=True)
    return call


def invalidate(changes: ChangeJudge, call: ChangeCall, before: Copy | None) -> None:
    after = None if before is None else replace(before, mark=Mark.HARD)
    changes.voided(call, "invalidation", KEY, before, after)


class TestT2LatePuts:
    def test_a_put_that_was_given_up_may_act_if_nothing_has_happened_since(
        self, changes: ChangeJudge
    ) -> None:
        put_and_end(changes, "g1")
        call = changes.begin(2, "put")
        changes.end(call, acknowledged=False)
        store(changes, call, Put(copy("g2")), copy("g1"))

    @pytest.mark.parametrize("later", ["put", "invalidation", "deletion", "load", "tag"])
    def test_a_put_that_was_given_up_may_not_act_after_a_later_change(
        self, changes: ChangeJudge, later: str
    ) -> None:
        """Also after an invalidation or deletion that found nothing."""
        late = changes.begin(2, "put")
        changes.end(late, acknowledged=False)
        call = changes.begin(1, later)
        match later:
            case "put":
                store(changes, call, Put(copy("g1")))
            case "load":
                changes.published(KEY, None, copy("g1"), b"")
            case "tag":
                changes.tag_invalidated(call, "eu", "")
            case _:
                changes.voided(call, later, KEY, None, None)
        with breaks(Promise.LATE):
            store(changes, late, Put(copy("g2"), ("eu",)))

    def test_a_put_that_still_runs_may_act_after_a_later_one(self, changes: ChangeJudge) -> None:
        call = changes.begin(2, "put")
        put_and_end(changes, "g1")
        store(changes, call, Put(copy("g2")), copy("g1"))

    def test_an_acknowledged_put_does_not_act_again(self, changes: ChangeJudge) -> None:
        call = put_and_end(changes, "g1")
        put_and_end(changes, "g2", copy("g1"))
        with breaks(Promise.LATE):
            store(changes, call, Put(copy("g1")), copy("g2"))

    @pytest.mark.parametrize("then", [None, PutOutcome.STORED])
    def test_a_put_that_was_refused_never_acts(
        self, changes: ChangeJudge, then: PutOutcome | None
    ) -> None:
        """Although nothing has happened since. But an update that was refused may be put again."""
        put_and_end(changes, "g1")
        call = changes.begin(2, "put")
        changes.settled(call, KEY, b"", PutResult(PutOutcome.REFUSED))
        if then is not None:
            store(changes, call, Put(copy("g2")), copy("g1"))
            changes.settled(call, KEY, b"", PutResult(then))
            return
        changes.end(call, acknowledged=True)
        with breaks(Promise.LATE):
            store(changes, call, Put(copy("g2")), copy("g1"))

    @pytest.mark.parametrize("is_visible", [True, False])
    def test_an_invalidation_does_not_void_a_put_that_began_after_its_end(
        self, changes: ChangeJudge, *, is_visible: bool
    ) -> None:
        """Unless there is no copy that it could void."""
        late = changes.begin(2, "invalidation")
        changes.end(late, acknowledged=False)
        put_and_end(changes, "g1")
        with breaks(Promise.LATE) if is_visible else nullcontext():
            invalidate(changes, late, copy("g1") if is_visible else None)

    def test_the_calls_of_a_killed_process_have_ended(self, changes: ChangeJudge) -> None:
        call = changes.begin(2, "put")
        changes.killed(2)
        put_and_end(changes, "g1")
        with breaks(Promise.LATE):
            store(changes, call, Put(copy("g2")), copy("g1"))


class TestT2StoredPuts:
    def test_a_put_that_is_acknowledged_was_stored(self, changes: ChangeJudge) -> None:
        call = changes.begin(1, "put")
        with breaks(Promise.STORED):
            changes.settled(call, KEY, b"", PutResult(PutOutcome.STORED))
        store(changes, call, Put(copy("g1")))
        changes.settled(call, KEY, b"", PutResult(PutOutcome.STORED))

    @pytest.mark.parametrize("between", [1, 4, 5])
    def test_a_put_is_stored_once(self, changes: ChangeJudge, between: int) -> None:
        """It is recognised until it was replaced more than four times."""
        call = changes.begin(1, "put")
        store(changes, call, Put(copy("g1")))
        for number in range(between):
            put_and_end(changes, f"other {number}")
        with breaks(Promise.STORED) if between <= 4 else nullcontext():
            store(changes, call, Put(copy("g1")), copy("other"))

    def test_a_put_is_stored_again_after_its_copy_was_evicted(self, changes: ChangeJudge) -> None:
        call = changes.begin(1, "put")
        store(changes, call, Put(copy("g1")))
        store(changes, call, Put(copy("g1")), before=None)

    def test_a_put_is_stored_again_after_a_failover_has_undone_it(
        self, changes: ChangeJudge
    ) -> None:
        call = changes.begin(1, "put")
        store(changes, call, Put(copy("g1")))
        changes.restore(KEY, 0, waits=True)
        store(changes, call, Put(copy("g1")))

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_failover_loses_no_acknowledged_put_if_replicas_confirm(
        self, changes: ChangeJudge, *, waits: bool
    ) -> None:
        put_and_end(changes, "g1")
        with breaks(Promise.STORED) if waits else nullcontext():
            changes.restore(KEY, 0, waits=waits)

    @pytest.mark.parametrize(
        ("put", "before"),
        [
            (Put(copy("g2"), when=When.NO_LIVE_COPY), copy("g1")),
            (Put(copy("g2"), when=When.LIVE_COPY), None),
            (Put(copy("g2"), when=When.LIVE_COPY), copy("g1", mark=Mark.SOFT)),
            (Put(copy("g2"), when=When.UNCHANGED, seen="g0"), copy("g1")),
            (Put(copy("g2"), when=When.UNCHANGED, seen="g1"), copy("g1", mark=Mark.SOFT)),
            (Put(copy("g2", value=UNREAD)), copy("g1", value=b"another")),
        ],
    )
    def test_a_put_acts_on_its_condition_only(
        self, changes: ChangeJudge, put: Put, before: Copy | None
    ) -> None:
        call = changes.begin(1, "put")
        with breaks(Promise.STORED):
            store(changes, call, put, before, copy("g2"))


class TestT2Versions:
    @pytest.mark.parametrize(
        ("before", "given", "after"), [(5, 4, 4), (5, None, None), (5, 6, None), (None, None, 3)]
    )
    def test_no_put_replaces_a_greater_version_or_takes_it_away(
        self, changes: ChangeJudge, before: int | None, given: int | None, after: int | None
    ) -> None:
        call = changes.begin(1, "put")
        with breaks(Promise.GREATEST):
            store(changes, call, Put(copy("g2", given)), copy("g1", before), copy("g2", after))

    def test_an_invalidation_keeps_the_version(self, changes: ChangeJudge) -> None:
        call = changes.begin(1, "invalidation")
        with breaks(Promise.GREATEST):
            changes.voided(call, "invalidation", KEY, copy("g1", 5), copy("g1", mark=Mark.HARD))

    def test_a_load_without_a_version_keeps_the_stored_version(self, changes: ChangeJudge) -> None:
        changes.published(KEY, copy("g1", 5), copy("g2", 3), packed_version(3))
        with breaks(Promise.GREATEST):
            changes.published(KEY, copy("g2", 3), copy("g3"), b"")

    def test_a_put_is_refused_by_a_greater_version_only(self, changes: ChangeJudge) -> None:
        first = changes.begin(1, "put")
        store(changes, first, Put(copy("g1", 5)))
        call = changes.begin(2, "put")
        kept = PutResult(PutOutcome.KEPT, packed_version(5))
        changes.settled(call, KEY, packed_version(4), kept)
        with breaks(Promise.GREATEST):
            changes.settled(call, KEY, packed_version(6), kept)


class TestS8Fence:
    bucket = Bucket(counter=12, birth=5, tags={"eu": 9})

    def test_a_put_that_was_stored_is_recognised_also_when_it_is_late(self) -> None:
        head = StampedEntry(8, ("g3", "g2"))
        for generation, outcome in (
            ("g4", PutOutcome.STORED),
            ("g2", PutOutcome.REPLACED),
            ("g1", PutOutcome.AGAIN),
        ):
            assert fence.put_outcome(generation, "g4", head, is_late=True) is outcome
        assert fence.put_outcome("g1", "g4", head, is_late=False) is None

    def test_a_message_is_late_if_the_entry_has_a_higher_stamp(self) -> None:
        head = StampedEntry(8)
        assert [fence.has_changed(head, as_of) for as_of in (7, 8, 9)] == [True, False, False]
        assert not fence.has_changed(None, 0)

    @pytest.mark.parametrize(
        ("as_of", "good_until", "expected"),
        [(12, NOW, False), (5, NOW, False), (4, NOW, True), (12, NOW - 1, True)],
    )
    def test_without_an_entry_a_put_must_be_young_and_sent_after_the_counter_began(
        self, as_of: int, good_until: float, *, expected: bool
    ) -> None:
        sent = Sent({"": as_of}, good_until)
        assert fence.is_forgotten(None, self.bucket, as_of, sent, NOW) is expected
        assert not fence.is_forgotten(StampedEntry(3), self.bucket, as_of, sent, NOW)

    def test_a_put_is_late_if_one_of_its_tags_has_a_higher_stamp(self) -> None:
        assert fence.was_tag_invalidated(self.bucket, ("us", "eu"), 8)
        assert not fence.was_tag_invalidated(self.bucket, ("us", "eu"), 9)
        assert not fence.was_tag_invalidated(self.bucket, ("us",), 0)

    @pytest.mark.parametrize(
        ("took", "now", "expected"),
        [
            (0, 60, False),
            (1, 60, True),
            (1, 59, False),
            (100, 59, False),
            (2, 61, True),
            (1, 61, False),
            (1e9, 1_000, True),
        ],
    )
    def test_an_add_is_late_if_the_copy_was_live_when_it_was_sent_and_is_not_now(
        self, took: float, now: float, *, expected: bool
    ) -> None:
        """It may have been refused. While the copy is live, it is refused in any case."""
        add = Put(copy("g2"), when=When.NO_LIVE_COPY)
        assert fence.may_be_refused_already(add, copy("g1"), took, NOW + now) is expected
        for when in (When.ALWAYS, When.LIVE_COPY, When.UNCHANGED):
            other = replace(add, when=when)
            assert not fence.may_be_refused_already(other, copy("g1"), took, NOW + now)

    @pytest.mark.parametrize(
        "stored",
        [
            None,
            copy("g1", value=None),
            copy("g1", mark=Mark.SOFT),
            copy("g1", policy=Policy(0, 60)),
            copy("g1", fetched_at=NOW + 3_600),
        ],
    )
    def test_what_was_never_live_has_refused_no_add(self, stored: Copy | None) -> None:
        add = Put(copy("g2"), when=When.NO_LIVE_COPY)
        assert not fence.may_be_refused_already(add, stored, 100, NOW + 60)

    def test_the_last_four_generations_are_remembered(self) -> None:
        head = None
        for number in range(6):
            head = fence.after_change(head, number, f"g{number}", NOW)
        assert head == StampedEntry(5, ("g5", "g4", "g3", "g2"), NOW + fence.TRACE)
        assert fence.after_change(head, 6, None, NOW).replaced == head.replaced
