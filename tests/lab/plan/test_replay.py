"""Issue 22: recorded reads, replayed by the engine in virtual time."""

from pathlib import Path

import pytest

from stillfresh.lab.plan import Candidate, planned, replayed, traffic_of
from stillfresh.lab.plan.replay import Planned
from stillfresh.lab.plan.rules import Limit
from stillfresh.lab.plan.traffic import Traffic
from tests.kit.plan import recorded_shop


def the_traffic(file: Path, most: int = 1_000_000) -> Traffic:
    kinds, cut = traffic_of(file, most)
    assert cut is None
    (found,) = kinds.values()
    return found


class TestOwnTerms:
    """A recording replayed on the terms of its own run gives the numbers of that run."""

    @pytest.mark.parametrize(
        "shop",
        [
            {},
            {"stale_for": 0.0},
            {"fresh_for": 5.0, "stale_for": 300.0, "seed": 2},
            {"took": 3.0, "seed": 3},
            {"changes": 200, "seed": 4},
            {"watched": 30, "seed": 5},
            {"reads": 300, "keys": 5, "fails": lambda at: 100 < at < 150, "seed": 6},
        ],
        ids=["plain", "waits", "stale", "slow", "changed", "watched", "failing"],
    )
    def test_a_replay_on_its_own_terms_gives_the_runs_numbers(
        self, tmp_path: Path, shop: dict[str, object]
    ) -> None:
        """Requests within 1 %, ages within 1 % or 10 ms, shares within one in a hundred."""
        run = recorded_shop(tmp_path / "reads.jsonl", **shop)  # type: ignore[arg-type]
        traffic = the_traffic(tmp_path / "reads.jsonl")
        found = replayed(traffic, None)
        served = len(run.ages) + run.failed
        assert found.requests * traffic.seconds == pytest.approx(run.requests, rel=0.01, abs=1)
        assert found.failed == pytest.approx(run.failed / served, abs=0.01)
        if not shop.get("watched"):  # its viewers' ages count as well
            assert found.p50 == pytest.approx(run.age(0.5), rel=0.01, abs=0.01)
            assert found.p99 == pytest.approx(run.age(0.99), rel=0.01, abs=0.01)
            assert found.stale == pytest.approx(run.stale / served, abs=0.01)

    def test_a_replay_of_a_sample_is_scaled_up(self, tmp_path: Path) -> None:
        """A third of the keys tells of all of them."""
        evenly = {"keys": 1_500, "reads": 4_000, "fresh_for": 60.0}
        run = recorded_shop(tmp_path / "reads.jsonl", share=0.33, **evenly)  # type: ignore[arg-type]
        traffic = the_traffic(tmp_path / "reads.jsonl")
        assert traffic.share == 0.33
        found = replayed(traffic, None)
        assert found.requests * traffic.seconds == pytest.approx(run.requests, rel=0.15)


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    file = tmp_path_factory.mktemp("shop") / "reads.jsonl"
    recorded_shop(file)
    return the_traffic(file)


@pytest.fixture(scope="module")
def plan(traffic: Traffic) -> tuple[Planned, list[int]]:
    """A plan for young copies, and the progress that was told."""
    done: list[int] = []
    limits = [Limit("p99", 30.0), Limit("waited", 1.0)]
    return planned({"price": traffic}, limits, None, done.append), done


class TestOtherTerms:
    def test_replayed_longer_freshness_is_older_and_cheaper(self, traffic: Traffic) -> None:
        """And more copies are held."""
        found = [replayed(traffic, Candidate(it, 0)) for it in (2.0, 20.0, 100.0)]
        assert sorted(found, key=lambda it: -it.requests) == found
        assert sorted(found, key=lambda it: it.p99) == found
        assert sorted(found, key=lambda it: it.bytes) == found
        assert all(it.p99 < it.terms.fresh_for + 0.4 for it in found)

    def test_replayed_stale_serving_spares_waiting(self, traffic: Traffic) -> None:
        """For about as many requests, at a greater age."""
        waits, serves = (replayed(traffic, Candidate(20.0, it)) for it in (0.0, 60.0))
        assert serves.waited < waits.waited / 2
        assert serves.p99 > waits.p99
        assert serves.requests == pytest.approx(waits.requests, rel=0.1)

    def test_the_same_replay_gives_the_same_figures(self, traffic: Traffic) -> None:
        """Nothing is left to chance."""
        assert replayed(traffic, Candidate(7.0, 7.0)) == replayed(traffic, Candidate(7.0, 7.0))

    def test_a_plan_meets_its_objective_with_the_fewest_requests(
        self, traffic: Traffic, plan: tuple[Planned, list[int]]
    ) -> None:
        """The next longer freshness on the ladder would not; progress is told."""
        found, done = plan
        assert found.choice is not None
        chosen = found.choice.chosen["price"]
        assert chosen.p99 < 30
        assert chosen.terms == Candidate(30.0, 0.0)
        assert replayed(traffic, Candidate(45.0, 0.0)).p99 > 30
        assert len(found.tried["price"]) <= 24
        assert sum(done) == 1_000 * len(found.tried["price"]), "the recorded terms are among them"

    def test_g23_the_proposal_has_a_stale_for_that_spares_waiting(self, traffic: Traffic) -> None:
        """G23: as few reads wait as in the recording, at fewer requests, and within the limit."""
        found = planned({"price": traffic}, [Limit("p99", 90.0)], None)
        assert found.choice is not None
        chosen = found.choice.chosen["price"]
        recorded = found.recorded["price"]
        assert chosen.waited <= recorded.waited
        assert chosen.requests < recorded.requests
        assert chosen.p99 < 90
        assert chosen.terms.stale_for > 0

    def test_an_applied_proposal_gives_the_predicted_figures(
        self, traffic: Traffic, plan: tuple[Planned, list[int]], tmp_path: Path
    ) -> None:
        """A run on the proposed terms, with other readers: ages and requests as was said."""
        choice = plan[0].choice
        assert choice is not None
        said, terms = choice.chosen["price"], choice.chosen["price"].terms
        run = recorded_shop(
            tmp_path / "after.jsonl",
            fresh_for=terms.fresh_for,
            stale_for=terms.stale_for,
            seed=2,
        )
        assert run.age(0.99) < 30
        assert run.age(0.99) == pytest.approx(said.p99, rel=0.05)
        assert run.requests / traffic.seconds == pytest.approx(said.requests, rel=0.05)
