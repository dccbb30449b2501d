"""T4: the check of a torture's log can fail: for each promise a history that breaks it."""

from collections.abc import Iterable

import pytest
from msgspec import structs

from stillfresh.lab.prove.history import (
    CHECKS,
    PEER_CHECKS,
    ProofHistory,
    excused_reads,
    outdated_looks,
    uncertain_reads,
    unjudged_reads,
    violations,
    wrong_reads,
)
from stillfresh.lab.prove.run import Report, judge
from stillfresh.lab.prove.stage import Stage
from stillfresh.lab.prove.witness import Seen

LOAD = Seen("load", 1.0, key="a", load="7-1-a", lease="t1", wall=100.0)
LEASED = Seen("leased", 0.8, 0.9, key="a", lease="t1", wall=99.9, until=101.0)
PUBLISHING = Seen("publishing", 1.1, key="a", lease="t1")
PUBLISHED = Seen("published", 1.1, 1.2, key="a", lease="t1")
SERVED = Seen(
    "served", 3.0, 3.1, key="a", load="7-1-a", wall=100.5, verdict="fresh", fetched_at=100.0
)
INVALIDATED = Seen("invalidated", 2.0, 2.1, key="a")
GOOD = (LEASED, LOAD, PUBLISHING, PUBLISHED, SERVED, Seen("found", 4.0, key="a", lease="t1"))
SECOND = (
    Seen("leased", 1.3, 1.4, key="a", lease="t2", wall=100.4, until=102.0),
    Seen("load", 1.4, key="a", load="7-2-a", lease="t2", wall=100.4),
    Seen("publishing", 1.5, key="a", lease="t2"),
    Seen("published", 1.5, 1.6, key="a", lease="t2"),
)
MOVED = Seen("moved", 3.05)
LOST, REPLACED, AGE, ONE_LOAD, ONE_HOLDER, VOIDED, KEPT, ANSWERED, RECOVERED = CHECKS
BAD: dict[str, tuple[Seen, ...]] = {
    LOST: (*GOOD, INVALIDATED),
    REPLACED: (
        *GOOD[:-1],
        *SECOND,
        Seen("found", 4.0, key="a", lease="t2"),
    ),
    AGE: (
        *GOOD[:4],
        Seen(
            "served", 3.0, 3.1, key="a", load="7-1-a", wall=101.0, verdict="fresh", fetched_at=100.0
        ),
    ),
    ONE_LOAD: (
        *GOOD,
        Seen("load", 1.3, key="a", load="7-2-a", lease="t1"),
    ),
    ONE_HOLDER: (
        LEASED,
        LOAD,
        Seen("leased", 1.3, 1.4, key="a", lease="t2", wall=100.4, until=102.0),
    ),
    VOIDED: (*GOOD, Seen("invalidated", 0.95, 0.96, key="a")),
    KEPT: (*GOOD, Seen("found", 5.0, key="a")),
    ANSWERED: (*GOOD, Seen("failed", 3.0, key="a", text="LoadFailed()")),
    RECOVERED: (*GOOD, Seen("stuck", 3.0, text="a pause")),
}


def broken(events: Iterable[Seen]) -> set[str]:
    found = violations(ProofHistory(events, fresh_for=1.0))
    return {promise for promise, sentences in found.items() if sentences}


class TestT4History:
    def test_a_good_history_breaks_no_promise(self) -> None:
        assert broken(GOOD) == set()

    @pytest.mark.parametrize("promise", CHECKS)
    def test_each_broken_promise_is_named(self, promise: str) -> None:
        """And it is that one which is named."""
        assert broken(BAD[promise]) == {promise}

    def test_a_store_that_may_forget_must_not_return_older_copies(self) -> None:
        """A copy that is gone is a miss; one that was replaced must not come back."""
        gone = ProofHistory(BAD[KEPT], fresh_for=1.0, may_forget=True)
        older = Seen("found", 5.0, key="a", lease="t1")
        back = ProofHistory([*GOOD[:-1], *SECOND, older], fresh_for=1.0, may_forget=True)
        assert (violations(gone)[KEPT], len(list(outdated_looks(gone)))) == ([], 1)
        assert len(violations(back)[KEPT]) == 1

    def test_a_lost_invalidation_is_reported_once_for_each_copy(self) -> None:
        """With the load, and how long after the invalidation the first reader got it."""
        again = structs.replace(SERVED, at=9.0, ended=9.1)
        told = violations(ProofHistory([*GOOD, INVALIDATED, again], fresh_for=9.0))[LOST]
        [sentence] = told
        assert sentence.startswith("a: load 1 of process 7 ")
        assert "1 s after it was invalidated" in sentence

    def test_a_value_of_another_key_is_a_broken_promise(self) -> None:
        """A value says what it was loaded for."""
        mixed = Seen("served", 3.0, 3.1, key="b", load="7-1-a", wall=100.5, verdict="fresh")
        assert broken([*GOOD, mixed]) == {AGE}

    def test_a_value_newer_than_its_load_is_a_broken_promise(self) -> None:
        """`fetched_at` is when it was asked for."""
        newer = Seen(
            "served", 3.0, 3.1, key="a", load="7-1-a", wall=100.5, verdict="stale", fetched_at=100.1
        )
        assert broken([*GOOD, newer]) == {AGE}

    def test_a_fresh_value_from_the_future_is_a_broken_promise(self) -> None:
        """The clock was set back: what came before is not fresh."""
        ahead = Seen(
            "served", 5.0, 5.1, key="a", load="7-1-a", wall=90.0, verdict="fresh", fetched_at=100.0
        )
        assert broken([*GOOD, ahead]) == {AGE}

    def test_a_reader_that_waited_for_a_load_may_get_it_as_fresh(self) -> None:
        """However long it took."""
        late = Seen(
            "served", 0.5, 9.5, key="a", load="7-1-a", wall=91.0, verdict="fresh", fetched_at=100.0
        )
        assert broken([*GOOD, late]) == set()

    @pytest.mark.parametrize(
        "events",
        [
            (*GOOD, Seen("invalidating", 2.0, key="a")),
            (*GOOD, Seen("invalidated", 2.9, 3.01, key="a")),
            (LEASED, LOAD, Seen("publishing", 1.1, key="a", lease="t1"), *SECOND),
            (
                *GOOD[:4],
                *SECOND[:3],
                Seen("found", 4.0, key="a", lease="t2"),
            ),
        ],
        ids=[
            "an invalidation that may never have been done",
            "an invalidation that ended after the question",
            "a lease that may have been published",
            "a publication that may have been done",
        ],
    )
    def test_an_unknown_outcome_breaks_no_promise(self, events: tuple[Seen, ...]) -> None:
        """A process that was killed did not say whether it was done."""
        assert broken(events) == set()

    @pytest.mark.parametrize(
        ("verdict", "unverified", "promises"),
        [("stale", True, set()), ("stale", False, {LOST}), ("fresh", True, {LOST})],
    )
    def test_e29_a_read_without_the_store_must_be_stale_and_unverified(
        self, verdict: str, unverified: bool, promises: set[str]
    ) -> None:
        """Memory answers then, and does not know of invalidations elsewhere: it says so."""
        blind = structs.replace(SERVED, verdict=verdict, blind=True, unverified=unverified)
        assert broken([*GOOD[:4], INVALIDATED, blind]) == promises

    @pytest.mark.parametrize(("asked", "promises"), [(0.99, set()), (3.0, {LOST})])
    def test_e29_a_load_without_the_store_is_fresh_only_to_earlier_readers(
        self, asked: float, promises: set[str]
    ) -> None:
        """Its value is judged like any other, though no lease was given for it."""
        load = structs.replace(LOAD, lease="")
        read = structs.replace(SERVED, at=asked, blind=True)
        assert broken([load, INVALIDATED, read]) == promises

    def test_e29_a_load_without_the_store_is_not_fresh_after_a_newer_copy(self) -> None:
        """Another process has stored one meanwhile."""
        load = structs.replace(LOAD, lease="")
        assert broken([load, *SECOND, SERVED]) == {REPLACED}

    def test_e29_reads_that_were_old_and_said_so_are_counted(self) -> None:
        """All others are judged, and none is left out because the store was away."""
        said = structs.replace(SERVED, verdict="stale", blind=True, unverified=True)
        early = structs.replace(said, at=1.5)
        history = ProofHistory([*GOOD, INVALIDATED, said, early], fresh_for=1.0)
        assert list(excused_reads(history)) == [said]
        assert wrong_reads(history) == 1  # the one of GOOD, which did not say so

    def test_a_copy_from_before_an_unconfirmed_invalidation_is_judged_against_both(self) -> None:
        """T15: right if it was not done. If it was confirmed, the read is wrong."""
        begun = structs.replace(INVALIDATED, what="invalidating", ended=0.0)
        history = ProofHistory([*GOOD, begun], fresh_for=1.0)
        assert [event.load for event in uncertain_reads(history)] == ["7-1-a"]
        assert not unjudged_reads(history)
        assert wrong_reads(history) == 0
        confirmed = ProofHistory([*GOOD, begun, INVALIDATED], fresh_for=1.0)
        assert list(uncertain_reads(confirmed)) == []
        assert wrong_reads(confirmed) == 1
        early = structs.replace(begun, at=1.9)
        known = ProofHistory([*GOOD, early, begun, INVALIDATED], fresh_for=1.0)
        assert list(uncertain_reads(known)) == []  # a later one was confirmed: the read is wrong

    def test_reads_that_cannot_be_judged_are_counted_with_their_reason(self) -> None:
        """T15: an answer that says that it is expired, an unknown copy, and no answer."""
        expired = structs.replace(SERVED, verdict="expired")
        unknown = structs.replace(SERVED, load="7-9-a")
        failed = Seen("failed", 3.0, 3.1, key="a", text="LoadFailed()")
        history = ProofHistory([*GOOD, expired, unknown, failed], fresh_for=1.0)
        assert unjudged_reads(history) == {
            "the answer said that it was expired": 1,
            "nothing is known of the copy": 1,
            "the read failed, and gave no answer": 1,
        }

    def test_a_moved_clock_excuses_an_age(self) -> None:
        """The answer was judged by the clock before or after."""
        old = Seen(
            "served", 3.0, 3.1, key="a", load="7-1-a", wall=110.0, verdict="fresh", fetched_at=100.0
        )
        assert broken([*GOOD[:4], old, MOVED]) == set()
        assert broken([*GOOD[:4], old]) != set()

    @pytest.mark.parametrize(("peer", "checks"), [("", CHECKS), ("cashews", PEER_CHECKS)])
    def test_a_report_has_wrong_and_unjudged_reads_and_broken_promises(
        self, peer: str, checks: Iterable[str]
    ) -> None:
        """T15: as the events say; a peer is judged by what it promises."""
        report = Report("any", 1, 2, peer=peer)
        failed = Seen("failed", 3.0, 3.1, key="a", text="LoadFailed()")
        judge(report, [*GOOD, INVALIDATED, failed], Stage("redis://any", {}, peer=peer))
        assert (report.reads, report.judged, report.wrong) == (2, 1, 1)
        assert report.unjudged == {"the read failed, and gave no answer": 1}
        assert list(report.broken) == list(checks)
        assert len(report.broken[LOST]) == 1
        assert report.ages["max"] == pytest.approx(0.5)
