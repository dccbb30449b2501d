"""G14: the numbers of several workers, added up."""

from collections.abc import Callable
from dataclasses import fields, replace
from random import Random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from stillfresh.engine import (
    Objective,
    Origin,
    ResourceStats,
    TruthObjective,
    TruthStats,
    WrongRead,
)
from stillfresh.engine.counts import COUNTERS, GAUGES, Counts
from stillfresh.engine.rules import AGE_BUCKETS
from stillfresh.engine.rules_truth import MOST_STORIES
from stillfresh.engine.spans import TIME_BUCKETS, Timing
from stillfresh.freshness import Verdict
from stillfresh.gateway.rules_totals import Totals, summed
from stillfresh.gateway.serving import NUMBERS_SIZE_BY_KIND
from stillfresh.stores.contract import Failure

COUNTED = ["reads_by_origin", "ages", "load_seconds", "objective_met", "objective_missed"]
COUNTED += ["age_sum", *(name for name, _ in COUNTERS)]
HELD = [name for name, _ in GAUGES]


def made(seed: int) -> ResourceStats:
    """Any numbers: what is drawn one by one takes seconds."""
    dice = Random(seed)
    drawn: dict[str, Any] = {
        name: dice.randrange(2**40) for name in [*COUNTED[3:], *HELD, "largest_batch", "max_batch"]
    }
    return ResourceStats(
        {origin: {it: dice.randrange(2**40) for it in Verdict} for origin in Origin},
        tuple(dice.randrange(2**40) for _ in range(len(AGE_BUCKETS) + 1)),
        **drawn,
        load_seconds=timing(seed),
        objective=dice.choice([None, Objective(0.99, dice.choice([60.0, 5.0]))]),
        retry_at=dice.choice([None, dice.uniform(1, 2**40)]),
        error=dice.choice([None, f"{seed}"]),
        truth=dice.choice([None, truth(dice)]),
    )


def truth(dice: Random) -> TruthStats:
    return truth_of(
        lambda: dice.randrange(2**40),
        TruthObjective(0.99, 5.0),
        tuple(wrong_read(f"{number}") for number in range(dice.randrange(3))),
    )


def truth_of(
    number: Callable[[], int], objective: TruthObjective, stories: tuple[WrongRead, ...]
) -> TruthStats:
    return TruthStats(
        true=number(),
        late=number(),
        wrong=number(),
        failed=number(),
        skipped=number(),
        pending=number(),
        true_within=objective.within,
        objective=objective,
        wrong_reads=stories,
    )


def wrong_read(key: str) -> WrongRead:
    times = (2 / 3, 1e9 / 3)
    return WrongRead(
        key=key,
        served_at=times[1],
        age=times[0],
        verdict="EXPIRED",
        origin="another",
        fetched_at=times[1],
        fresh_for=times[0],
        generation="0" * 32,
        judged_at=times[1],
        lease_until=times[1],
        changed_at=times[1],
        change="invalidated",
    )


def timing(seed: int) -> Timing:
    dice = Random(seed)
    times = tuple(dice.randrange(2**40) for _ in range(len(TIME_BUCKETS) + 1))
    return Timing(times, float(dice.randrange(2**40)))


counts = st.integers(0, 2**40)
live = st.fixed_dictionaries({"connections": counts, "subscriptions": st.just({"a": 1})})
totals = st.builds(
    Totals,
    st.floats(0, 2**40),
    st.dictionaries(st.sampled_from("ab"), st.builds(made, counts)).map(
        lambda it: {"entities": it}
    ),
    st.just({}) | live,
    st.dictionaries(st.sampled_from(["method", "host"]), counts),
    store_seconds=st.dictionaries(st.sampled_from(["read", "publish"]), st.builds(timing, counts)),
)
workers = st.lists(st.tuples(totals, st.booleans()), min_size=1, max_size=4)


def total(them: list[tuple[Totals, bool]]) -> Totals:
    found = summed([(msgspec.json.encode(it), is_alive) for it, is_alive in them])
    assert found is not None
    return found


def flat(value: Any) -> list[float]:
    if isinstance(value, Timing):
        return [*value.counts, value.seconds]
    if isinstance(value, dict):
        return [it for key in sorted(value) for it in flat(value[key])]
    return list(value) if isinstance(value, tuple) else [value]


class TestG14Totals:
    @given(them=workers)
    def test_every_counter_is_summed_over_workers(self, them: list[tuple[Totals, bool]]) -> None:
        """Of workers that have ended, what they counted, and not what they held."""
        found = total(them)
        for kind, of_all in found.resources["entities"].items():
            own = [(it.resources["entities"].get(kind), lives) for it, lives in them]
            for name in COUNTED:
                rows = [flat(getattr(it, name)) for it, _ in own if it is not None]
                assert flat(getattr(of_all, name)) == [sum(row) for row in zip(*rows, strict=True)]
            for name in HELD:
                held = [getattr(it, name) for it, lives in own if it is not None and lives]
                assert getattr(of_all, name) == sum(held)
        alive = [it.live.get("connections", 0) for it, lives in them if lives]
        assert found.live.get("connections", 0) == sum(alive)
        for step, timed in found.store_seconds.items():
            own_times = [flat(it.store_seconds[step]) for it, _ in them if step in it.store_seconds]
            assert flat(timed) == [sum(row) for row in zip(*own_times, strict=True)]
        for reason in ("method", "host"):
            assert found.bypassed.get(reason, 0) == sum(
                it.bypassed.get(reason, 0) for it, _ in them
            )

    @given(them=workers)
    def test_maxima_and_first_times_are_not_summed(self, them: list[tuple[Totals, bool]]) -> None:
        """The largest batch, the first try that is due, the start of the first."""
        found = total(them)
        assert found.started_at == min(it.started_at for it, _ in them)
        for kind, of_all in found.resources["entities"].items():
            own = [
                (stats, lives)
                for it, lives in them
                if (stats := it.resources["entities"].get(kind)) is not None
            ]
            assert of_all.largest_batch == max(it.largest_batch for it, _ in own)
            assert of_all.max_batch == max(it.max_batch for it, _ in own)
            due = [it.retry_at for it, lives in own if lives and it.retry_at is not None]
            assert of_all.retry_at == min(due, default=None)
            errors = [it.error for it, lives in own if lives and it.error is not None]
            assert of_all.error == (errors[-1] if errors else None)
            said = [it.objective for it, lives in own if lives and it.objective is not None]
            assert of_all.objective == (said[-1] if said else None)
            checks = [it.truth for it, _ in own if it.truth is not None]
            assert (of_all.truth is None) == (not checks)
            if of_all.truth is not None:
                assert of_all.truth.wrong == sum(each.wrong for each in checks)
                assert of_all.truth.checked == sum(each.checked for each in checks)
                pending = [it.truth.pending for it, lives in own if lives and it.truth is not None]
                assert of_all.truth.pending == sum(pending)
                kept = sum(len(each.wrong_reads) for each in checks)
                assert len(of_all.truth.wrong_reads) == min(kept, MOST_STORIES)

    @given(them=workers)
    def test_a_new_worker_continues_the_counters_of_the_last(
        self, them: list[tuple[Totals, bool]]
    ) -> None:
        """No counter of the whole is lower when a worker has ended, or another has come."""
        (last, _), *others = them
        begun = total([(last, False), (last, True)])
        ended = total([(last, False), *others])
        for kind, before in total([(last, True), *others]).resources["entities"].items():
            for now in (ended, total([(begun, True), *others])):
                for name in COUNTED:
                    pairs = zip(
                        flat(getattr(now.resources["entities"][kind], name)),
                        flat(getattr(before, name)),
                        strict=True,
                    )
                    assert all(after >= first for after, first in pairs)

    def test_every_field_of_the_stats_has_a_rule_for_totals(self) -> None:
        """A field that is added to the numbers is counted, held, or named here."""
        others = {"largest_batch", "max_batch", "retry_at", "error", "objective", "truth"}
        assert {it.name for it in fields(ResourceStats)} == {*COUNTED, *HELD, *others}

    def test_the_numbers_of_a_kind_fit_into_its_place_on_the_board(self) -> None:
        """However large they are, and whatever the last error said."""
        counts = Counts()
        counts.failed_with("a", Failure(1, 2.0, "\0" * 100_000))
        numbers: dict[str, Any] = dict.fromkeys([*HELD, *COUNTED[3:]], 2**63)
        held = {name: 2**63 for name in [*HELD, "max_batch"] if name != "failing"}
        large = replace(
            counts.stats(1.0, **held),
            **numbers,
            ages=(2**63,) * (len(AGE_BUCKETS) + 1),
            load_seconds=Timing((2**63,) * (len(TIME_BUCKETS) + 1), 2 / 3),
            reads_by_origin={it: dict.fromkeys(Verdict, 2**63) for it in Origin},
            objective=Objective(0.12345678, 12345678.9),
            truth=truth_of(
                lambda: 2**63,
                TruthObjective(0.12345678, 12345678.9),
                (wrong_read("\u20ac" * 200),) * MOST_STORIES,
            ),
        )
        assert len(msgspec.json.encode({"a_kind": large})) < NUMBERS_SIZE_BY_KIND - 300

    def test_an_empty_place_adds_nothing_to_the_totals(self) -> None:
        """It is empty."""
        assert summed([(b"", True)]) is None
        one = Totals(1.0, {}, {"connections": 1}, {"host": 2})
        assert summed([(b"", False), (msgspec.json.encode(one), True), (b"", True)]) == one
