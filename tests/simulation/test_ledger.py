"""T2: the ledger notices what it is there for, and knows what S5 allows."""

from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import pytest

from stillfresh import Policy, Verdict
from stillfresh.stores.contract import Copy, Held, Lease
from stillfresh.testing.simulator.ledger import Ledger, Reading, Version
from stillfresh.testing.simulator.promises import BrokenPromise, Promise

KEY = ("price", "a")
FRESH, STALE = Verdict.FRESH, Verdict.STALE


def lease(token: str, until: float = 10.0) -> Lease:
    return Lease("a", token, until)


def granted(ledger: Ledger, process: int, token: str, now: float = 0.0) -> None:
    grants = {"a": lease(token, now + 10)}
    ledger.acquired(process, "price", grants, now)
    ledger.granted(process, "price", grants)


def loaded(ledger: Ledger, process: int) -> Version:
    return ledger.load(process, KEY, leased=True, now=0.0)


def publish(ledger: Ledger, token: str, *, superseded: bool = False, now: float = 1.0) -> None:
    copy = Copy(token, 0.0, Policy(5), b"")
    lost = {"a"} if superseded else set()
    ledger.published("price", {"a": (lease(token), copy)}, lost, now)


def serve(
    ledger: Ledger, value: Version, verdict: Verdict = FRESH, *, process: int = 2, at: float = 5.0
) -> None:
    ledger.served(Reading(process, KEY, at, 0.0), value, verdict, failed=False, now=at)


def change(ledger: Ledger, *, soft: bool = False) -> None:
    """By process 1, done at 4."""
    ledger.invalidated(1, {KEY: ledger.change(KEY)}, soft=soft, ended=4.0)


@pytest.fixture
def ledger() -> Ledger:
    def fail(broken: BrokenPromise) -> NoReturn:
        raise broken

    return Ledger(fail)


def breaks(promise: Promise) -> AbstractContextManager[object]:
    return pytest.raises(BrokenPromise, match=promise)


class TestT2Leases:
    def test_two_holders_of_a_lease_break_a_promise(self, ledger: Ledger) -> None:
        granted(ledger, 1, "t1")
        with breaks(Promise.HOLDER):
            granted(ledger, 2, "t2", now=9)

    def test_a_holder_from_before_the_clock_was_set_back_may_not_publish(
        self, ledger: Ledger
    ) -> None:
        """Is none any more: neither a second holder, nor one who may publish."""
        granted(ledger, 1, "t1", now=3600)
        granted(ledger, 2, "t2")
        with breaks(Promise.LOST):
            publish(ledger, "t1")

    def test_a_lease_that_ended_was_voided_or_was_given_back_is_free(self, ledger: Ledger) -> None:
        granted(ledger, 1, "t1")
        granted(ledger, 2, "t2", now=10)
        ledger.voided("price", ["a"])
        granted(ledger, 3, "t3", now=11)
        ledger.released("price", [lease("t3")])
        granted(ledger, 4, "t4", now=12)

    def test_a_renewed_lease_is_not_free(self, ledger: Ledger) -> None:
        granted(ledger, 1, "t1")
        ledger.renewed("price", [lease("t1")], set(), until=20)
        with breaks(Promise.HOLDER):
            granted(ledger, 2, "t2", now=12)

    def test_a_load_without_a_lease_or_a_second_load_breaks_a_promise(self, ledger: Ledger) -> None:
        with breaks(Promise.LOAD):
            loaded(ledger, 1)
        granted(ledger, 1, "t1")
        loaded(ledger, 1)
        with breaks(Promise.LOAD):
            loaded(ledger, 1)

    def test_a_process_that_was_denied_a_lease_may_not_load(self, ledger: Ledger) -> None:
        ledger.granted(1, "price", {"a": Held(5.0)})
        with breaks(Promise.LOAD):
            loaded(ledger, 1)

    def test_a_process_that_could_not_ask_for_a_lease_may_load(self, ledger: Ledger) -> None:
        ledger.unleased(1, "price", ["a"])
        loaded(ledger, 1)

    def test_a_publication_after_losing_the_lease_breaks_a_promise(self, ledger: Ledger) -> None:
        granted(ledger, 1, "t1")
        ledger.voided("price", ["a"])
        with breaks(Promise.LOST):
            publish(ledger, "t1")

    def test_a_refused_publication_served_as_fresh_breaks_a_promise(self, ledger: Ledger) -> None:
        granted(ledger, 1, "t1")
        value = loaded(ledger, 1)
        publish(ledger, "t1", superseded=True)
        serve(ledger, value, STALE)
        with breaks(Promise.LOST):
            serve(ledger, value)


class TestT2Updates:
    def put(self, ledger: Ledger, update: object = None, made_of: Version | None = None) -> Version:
        ledger.change(KEY)
        return ledger.put(1, KEY, update=update, made_of=made_of and made_of.load)

    def test_an_update_stored_twice_breaks_a_promise(self, ledger: Ledger) -> None:
        """Also if another value was stored in between."""
        first, other, again = self.put(ledger, "it"), self.put(ledger), self.put(ledger, "it")
        ledger.stored(KEY, first, 1.0)
        ledger.stored(KEY, other, 2.0)
        with breaks(Promise.ONCE):
            ledger.stored(KEY, again, 3.0)

    def test_an_update_that_replaces_another_value_breaks_a_promise(self, ledger: Ledger) -> None:
        first, other = self.put(ledger), self.put(ledger)
        ledger.stored(KEY, first, 1.0)
        ledger.stored(KEY, other, 2.0)
        with breaks(Promise.ONCE):
            ledger.stored(KEY, self.put(ledger, "it", first), 3.0)

    def test_an_update_acknowledged_but_not_stored_breaks_a_promise(self, ledger: Ledger) -> None:
        """S9: a failover has undone it."""
        value, kept = self.put(ledger, "it"), ledger.snapshot(KEY)
        ledger.stored(KEY, value, 1.0)
        ledger.has_updated(KEY, value)
        ledger.restore(KEY, kept)
        with breaks(Promise.ONCE):
            ledger.has_updated(KEY, value)

    @pytest.mark.parametrize("gave_up", [False, True])
    def test_a_running_put_may_take_effect_after_an_invalidation(
        self, ledger: Ledger, *, gave_up: bool
    ) -> None:
        """Until it is stored; but not after one of its own process, once its caller gave up."""
        value = self.put(ledger)
        if gave_up:
            ledger.has_put([value], 3.0)
        change(ledger)
        ledger.stored(KEY, value, 4.5)
        with breaks(Promise.FRESH) if gave_up else nullcontext():
            serve(ledger, value)

    def test_a_stored_put_comes_before_a_later_invalidation(self, ledger: Ledger) -> None:
        """Also while its caller waits for the answer."""
        value = self.put(ledger)
        ledger.stored(KEY, value, 3.0)
        change(ledger)
        with breaks(Promise.FRESH):
            serve(ledger, value)

    def test_a_refused_put_that_is_served_breaks_a_promise(self, ledger: Ledger) -> None:
        stored, refused = self.put(ledger), self.put(ledger)
        ledger.stored(KEY, stored, 1.0)
        ledger.acknowledged([stored, refused], 2.0)
        serve(ledger, stored)
        with breaks(Promise.LOST):
            serve(ledger, refused)


class TestT2Freshness:
    def old(self, ledger: Ledger) -> Version:
        granted(ledger, 2, "t1")
        value = loaded(ledger, 2)
        publish(ledger, "t1")
        return value

    @pytest.mark.parametrize("verdict", [FRESH, STALE])
    def test_the_old_value_served_after_an_invalidation_breaks_a_promise(
        self, ledger: Ledger, verdict: Verdict
    ) -> None:
        value = self.old(ledger)
        change(ledger)
        serve(ledger, value, verdict, at=3.9)
        with breaks(Promise.FRESH):
            serve(ledger, value, verdict)

    def test_after_a_soft_invalidation_the_old_value_may_be_stale_only(
        self, ledger: Ledger
    ) -> None:
        value = self.old(ledger)
        change(ledger, soft=True)
        serve(ledger, value, STALE)
        with breaks(Promise.FRESH):
            serve(ledger, value)

    def test_a_value_loaded_after_an_invalidation_may_be_fresh(self, ledger: Ledger) -> None:
        change(ledger)
        serve(ledger, self.old(ledger))

    def test_s5_a_process_without_the_store_may_serve_stale_from_memory(
        self, ledger: Ledger
    ) -> None:
        """But not past what was invalidated by the same process."""
        value = self.old(ledger)
        change(ledger)
        for process in (1, 2):
            ledger.unread(process, "price", ["a"], now=5.0)
        serve(ledger, value, STALE, process=2)
        with breaks(Promise.FRESH):
            serve(ledger, value, STALE, process=1)

    def test_e29_a_process_without_the_store_may_not_call_an_old_value_fresh(
        self, ledger: Ledger
    ) -> None:
        """A read that says FRESH must be right also while the store is away."""
        value = self.old(ledger)
        change(ledger)
        ledger.unread(2, "price", ["a"], now=5.0)
        serve(ledger, value, at=3.9)
        with breaks(Promise.FRESH):
            serve(ledger, value)

    def test_e29_a_load_without_the_store_is_fresh_to_earlier_callers_only(
        self, ledger: Ledger
    ) -> None:
        """Its version is then that of every invalidation before; later callers get it as STALE."""
        ledger.unleased(2, "price", ["a"])
        value = loaded(ledger, 2)
        change(ledger)
        serve(ledger, value, at=3.9)
        serve(ledger, value, STALE)
        with breaks(Promise.FRESH):
            serve(ledger, value)

    def test_e29_reads_that_are_not_judged_are_counted_with_their_reason(
        self, ledger: Ledger
    ) -> None:
        """All that is FRESH is judged; old and STALE is excused only without the store."""
        value = self.old(ledger)
        serve(ledger, value)
        change(ledger)
        ledger.unread(2, "price", ["a"], now=5.0)
        serve(ledger, value, STALE)
        assert (ledger.reads, ledger.excused) == (2, {"stale, and the store was away": 1})

    def test_s5_an_unstored_value_may_be_served_by_its_loader_only(self, ledger: Ledger) -> None:
        granted(ledger, 2, "t1")
        value = loaded(ledger, 2)
        ledger.unstored("price", [Lease("a", "t1", 5.0)])
        change(ledger)
        serve(ledger, value, STALE, process=2)
        with breaks(Promise.FRESH):
            serve(ledger, value, STALE, process=3)
