"""C2, C5, C6, C9: what a tick looks up, fetches and stores; and what a failure leaves behind."""

import asyncio
import logging
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stillfresh import LoadFailed, RetryAfter, StoreError
from stillfresh.engine.lane import NEXT, Event, Lane, LaneState
from stillfresh.engine.rules import results_of
from stillfresh.freshness import Policy
from stillfresh.stores.contract import Copy, Failure, Record
from stillfresh.systems.coordinator import Kind, TtlConfig
from stillfresh.systems.coordinator.rules import by_id, post_id, stale_at
from stillfresh.testing import ManualClock
from tests.kit.coordinator import VIEWER, Site, made, milliseconds
from tests.kit.engine import turns, until


def subscribe(site: Site, *numbers: int) -> None:
    for number in numbers:
        site.ttl.subscribe_post(composite_post_id=f"a:{number}")


def count_look_ups(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each read of the file asks for, from now on."""
    looked: list[int] = []
    read_now = site.controller.database.read_now

    def counted(kind: str, ids: list[str], known: dict[str, str] | None = None) -> Any:
        looked.append(len(ids))
        return read_now(kind, ids, known)

    monkeypatch.setattr(site.controller.database, "read_now", counted)
    return looked


class TestC2Tables:
    async def test_the_tables_are_those_of_the_seed(self, site: Site) -> None:
        """`post_ttl` and `user_ttl` hold an id and milliseconds, beside the views."""
        subscribe(site, 1)
        site.ttl.subscribe_user(pubky="ann")
        site.clock.advance(0.25)
        await site.ttl.tick()
        now = milliseconds(site.clock)
        assert site.rows("post_ttl") == {"a:1": now}
        assert site.rows("user_ttl") == {"ann": now}
        assert await site.version("a:1") == 1
        assert await site.version("ann", "user") == 1

    @given(st.integers(0, 2**41), st.integers(1, 10**9), st.integers(-(10**9), 10**9))
    def test_a_row_is_stale_past_its_ttl_or_if_it_is_from_the_future(
        self, row: int, ttl: int, age: int
    ) -> None:
        """Equality is fresh; the next millisecond is the first that is stale."""

        def is_stale(now: int) -> bool:
            return stale_at(record, ttl / 1000, 300, now / 1000) <= now / 1000

        record = Record(Copy("g", row / 1000, Policy(0), b""))
        assert is_stale(row + age) != (0 <= age <= ttl)
        assert not is_stale(row + ttl)
        assert is_stale(row + ttl + 1)
        record = Record()
        assert is_stale(row + age)

    def test_a_cooldown_that_is_too_long_to_be_true_is_over(self) -> None:
        """The clock was set back since."""
        for end, at in ((99, None), (150, 150), (400, 400), (401, None)):
            found = stale_at(Record(failure=Failure(1, end, "x")), 5, 300, 100)
            assert (found if found > 100 else None) == at

    async def test_a_tampered_row_is_stale_and_a_tampered_view_a_miss(self, site: Site) -> None:
        """What somebody else wrote into the file breaks nothing."""
        subscribe(site, 1)
        await site.ttl.tick()
        site.write("UPDATE post_ttl SET last_updated_at = 'yesterday'")
        site.write("UPDATE post SET value = X'FFFF00'")
        assert await site.version("a:1") is None
        await site.ttl.tick()
        assert await site.version("a:1") == 1


class TestC5Tick:
    @pytest.mark.parametrize("count", [0, 1, 19, 20, 21, 45])
    async def test_n_stale_items_take_ceil_n_by_batch_requests(
        self, site: Site, count: int
    ) -> None:
        """One batch a tick, the longest queued first, and none left."""
        subscribe(site, *range(count))
        for _ in range(4):
            await site.ttl.tick()
        assert len(site.nexus.posts) == ceil(count / 20)
        assert [id_ for batch in site.nexus.posts for id_ in batch] == [
            f"a:{number}" for number in range(count)
        ]

    async def test_a_tick_makes_as_many_batches_as_configured(self, site: Site) -> None:
        """As many as the configuration allows, one after the other."""
        site.ttl.configure(max_batches_per_tick=3)
        subscribe(site, *range(70))
        await site.ttl.tick()
        assert [len(batch) for batch in site.nexus.posts] == [20, 20, 20]

    async def test_kinds_never_share_a_request_and_run_side_by_side(self, site: Site) -> None:
        """A slow batch of posts does not hold up the users of the same tick."""
        subscribe(site, 1)
        site.ttl.subscribe_user(pubky="ann")
        site.nexus.hold()
        await until(lambda: len(site.nexus.viewers) == 2)
        assert (site.nexus.posts, site.nexus.users) == ([["a:1"]], [["ann"]])
        site.nexus.let_go()
        await site.ttl.tick()

    async def test_a_row_has_the_time_at_which_the_request_was_sent(self, site: Site) -> None:
        """Not when the answer came."""
        sent = milliseconds(site.clock)
        site.nexus.hold()
        subscribe(site, 1)
        await site.nexus.asked.wait()
        site.clock.advance(2)
        site.nexus.let_go()
        await site.ttl.tick()
        assert site.rows("post_ttl") == {"a:1": sent}

    async def test_ids_that_became_stale_join_the_queue(self, site: Site) -> None:
        """All that were refreshed together are due together, once their TTL has passed."""
        subscribe(site, *range(5))
        await site.ttl.tick()
        site.clock.advance(300)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 1
        site.clock.advance(0.001)
        await site.ttl.tick()
        assert [sorted(batch) for batch in site.nexus.posts] == [[f"a:{n}" for n in range(5)]] * 2

    async def test_a_queued_id_that_another_process_refreshed_is_not_fetched(
        self, site: Site
    ) -> None:
        """What waits in the queue is checked once more, and not fetched for nothing."""
        site.ttl.set_visible(False)
        subscribe(site, 1, 2)
        assert site.queued() == ("a:1", "a:2")
        site.write_row("post", "a:1", milliseconds(site.clock))
        site.ttl.set_visible(True)
        await site.ttl.tick()
        assert site.nexus.posts == [["a:2"]]

    async def test_a_row_that_another_process_removed_is_noticed_by_the_next_tick(
        self, site: Site
    ) -> None:
        """A row that was removed or set back elsewhere is noticed by the next tick."""
        subscribe(site, 1, 2)
        await site.ttl.tick()
        await site.ttl.tick()
        site.write("DELETE FROM post_ttl WHERE id = 'a:2'")
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1", "a:2"], ["a:2"]]

    async def test_a_batch_is_filled_up_when_another_writer_refreshed_part_of_it(
        self, site: Site
    ) -> None:
        """Those that another writer refreshed take no place."""
        site.ttl.set_visible(False)
        subscribe(site, *range(30))
        for number in range(8):
            site.write_row("post", f"a:{number}", milliseconds(site.clock))
        site.ttl.set_visible(True)
        await site.ttl.tick()
        assert [len(batch) for batch in site.nexus.posts] == [20]

    async def test_a_tick_during_a_tick_joins_it(self, site: Site) -> None:
        """Ids in flight are never taken twice, however often it is asked for."""
        site.nexus.hold()
        subscribe(site, *range(25))
        await site.nexus.asked.wait()
        ticks = [asyncio.create_task(site.ttl.tick()) for _ in range(3)]
        await turns()
        assert not any(tick.done() for tick in ticks)
        ticks.pop().cancel()
        site.nexus.let_go()
        await asyncio.gather(*ticks)
        assert len(site.nexus.posts) == 1

    async def test_start_ticks_at_once_and_then_at_every_interval(self, tmp_path: Path) -> None:
        """Without a call of tick: the first at once, the next an interval after its end."""
        site = made(tmp_path, ManualClock(1e9), TtlConfig(batch_interval_ms=1))
        site.ttl.sign_in(VIEWER)
        site.ttl.set_visible(True)
        subscribe(site, *range(41))
        async with site.controller, site.ttl:
            async with asyncio.timeout(30):
                while len(site.nexus.posts) < 3:
                    await asyncio.sleep(0)
        assert [len(batch) for batch in site.nexus.posts] == [20, 20, 1]

    async def test_a_clock_that_was_set_back_freezes_nothing(self, site: Site) -> None:
        """Rows from the future are stale at the next tick, and their cooldowns are over."""
        subscribe(site, 1)
        await site.ttl.tick()
        site.nexus.error = ConnectionError()
        subscribe(site, 2)
        await site.ttl.tick()
        site.nexus.error = None
        site.clock.advance(-3600)
        await site.ttl.tick()
        assert sorted(site.nexus.posts[-1]) == ["a:1", "a:2"]
        assert site.ttl.snapshot().cooling["post"] == {}

    async def test_a_tick_that_fails_is_not_the_last(
        self, site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who called it is told, so is the log, and the next one goes on."""

        async def broken(_: object) -> None:
            raise RuntimeError("a mistake of ours")

        await site.ttl.tick()
        subscribe(site, 1)
        with monkeypatch.context() as patched:
            patched.setattr(type(site.controller.database), "changes", broken)
            with pytest.raises(RuntimeError, match="of ours"):
                await site.ttl.tick()
        assert "the tick failed" in caplog.text
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1"]]

    async def test_a_listener_that_fails_stops_nothing(
        self, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is logged, and the others are told."""

        def broken(kind: str, ids: list[str]) -> None:
            raise RuntimeError(f"{kind} {ids}")

        told: list[tuple[str, list[str]]] = []
        site.controller.on_updated(broken)
        off = site.ttl.on_updated(lambda kind, ids: told.append((kind, ids)))
        subscribe(site, 1)
        await site.ttl.tick()
        assert told == [("post", ["a:1"])]
        assert "failed on" in caplog.text
        off()
        await site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER)
        assert len(told) == 1


class TestC6Cost:
    async def test_an_idle_tick_looks_nothing_up(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A tick costs what is due, not what is subscribed."""
        subscribe(site, *range(20))
        await site.ttl.tick()
        looked = count_look_ups(site, monkeypatch)
        for _ in range(10):
            site.clock.advance(5)
            await site.ttl.tick()
        assert looked == []

    async def test_many_due_at_once_are_looked_up_in_slices(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So that the loop has a turn between two of them."""
        site.ttl.sign_out()
        for number in range(1200):
            site.ttl.subscribe_post(composite_post_id=f"a:{number}")
        looked = count_look_ups(site, monkeypatch)
        site.ttl.sign_in(VIEWER)
        await site.ttl.tick()
        assert looked[:24] == [50] * 24
        assert max(looked) == 50

    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50)), max_size=200))
    @example([*[(0, 0)] * 10, (1, 1), (2, 2), (0, 0), (0, 0)])
    def test_the_plan_never_holds_more_than_twice_what_is_subscribed(
        self, calls: list[tuple[int, int]]
    ) -> None:
        """However often ids come, are planned anew, and go."""
        lane: Lane[int] = Lane(cooldown=1, longest_cooldown=1)
        for key, at in calls * 5:
            lane.subscribe(key, counted=False)
            lane.looked_up(key, at + 1, 0)
            if at % 3 == 0:
                lane.unsubscribe(key)
        assert len(lane._times) <= 2 * len(lane) + 64
        assert len(lane._planned) <= len(lane)

    def test_every_state_of_the_lane_can_be_left(self) -> None:
        """The table of states has no dead end, and names no state twice."""
        assert set(NEXT) == set(LaneState)
        assert all(NEXT[state] for state in LaneState)
        assert {event for events in NEXT.values() for event in events} == set(Event)
        assert {state for events in NEXT.values() for state in events.values()} == set(LaneState)


class TestC9Failure:
    async def test_a_failed_batch_leaves_its_rows_and_each_id_cools_down(
        self, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One line in the log; still subscribed, not queued until the cooldown is over."""
        site.nexus.error = ConnectionError("nobody there")
        subscribe(site, 1, 2)
        await site.ttl.tick()
        assert site.rows("post_ttl") == {}
        (line,) = (one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING)
        for part in ("2 of 2", "post 'a:1'", "ConnectionError: nobody there"):
            assert part in line
        assert site.ttl.snapshot().cooling["post"] == dict.fromkeys(
            ["a:1", "a:2"], site.clock() + 10
        )
        site.nexus.error = None
        site.clock.advance(9.999)
        await site.ttl.tick()
        assert (site.queued(), len(site.nexus.posts)) == ((), 1)
        site.clock.advance(0.001)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 2
        assert site.ttl.snapshot().cooling["post"] == {}

    async def test_the_cooldown_doubles_up_to_five_minutes(self, site: Site) -> None:
        """10, 20, 40, … 300 seconds, while it keeps failing; then 10 again after a success."""
        site.nexus.error = ConnectionError()
        subscribe(site, 1)
        pauses = []
        for _ in range(8):
            await site.ttl.tick()
            until_ = site.ttl.snapshot().cooling["post"]["a:1"]
            pauses.append(round(until_ - site.clock()))
            site.clock.advance(pauses[-1])
        assert pauses == [10, 20, 40, 80, 160, 300, 300, 300]
        site.nexus.error = None
        await site.ttl.tick()
        site.nexus.error = ConnectionError()
        site.clock.advance(301)
        await site.ttl.tick()
        assert site.ttl.snapshot().cooling["post"]["a:1"] == site.clock() + 10

    async def test_the_cooldown_survives_unsubscribing(self, site: Site) -> None:
        """Scrolling to and fro does not ask a failing server more often."""
        site.nexus.error = ConnectionError()
        subscribe(site, 1)
        await site.ttl.tick()
        site.ttl.unsubscribe_post(composite_post_id="a:1")
        subscribe(site, 1)
        await site.ttl.tick()
        assert (site.queued(), len(site.nexus.posts)) == ((), 1)
        site.clock.advance(10)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 2

    async def test_twenty_ids_that_always_fail_do_not_starve_the_twenty_first(
        self, site: Site
    ) -> None:
        """The failing ones queue behind it when their cooldown is over."""
        site.nexus.failing = {"a:0"}
        subscribe(site, *range(21))
        await site.ttl.tick()
        await site.ttl.tick()
        assert site.nexus.posts[1] == ["a:20"]
        assert await site.version("a:20") == 1

    @pytest.mark.parametrize("cooldown", [0, 10_000])
    @pytest.mark.parametrize("failing", [1, 19, 20])
    async def test_ids_that_fail_their_batch_are_found_by_halving_it(
        self, site: Site, failing: int, cooldown: int
    ) -> None:
        """What failed beside them is tried in halves, down to one by one."""
        site.ttl.configure(cooldown_ms=cooldown)
        site.nexus.failing = {f"a:{number}" for number in range(failing)}
        subscribe(site, *range(21))
        for _ in range(400):
            await site.ttl.tick()
            site.clock.advance(5)
        assert len(site.rows("post_ttl")) == 21 - failing

    async def test_ids_that_failed_are_never_in_a_batch_with_ids_that_did_not(
        self, site: Site
    ) -> None:
        """Also when there is room for both in one batch."""
        site.nexus.failing = {"a:0"}
        subscribe(site, 0, 1)
        await site.ttl.tick()
        site.clock.advance(10)
        subscribe(site, 2)
        for _ in range(3):
            await site.ttl.tick()
        assert sorted(site.nexus.posts[1:]) == [["a:0"], ["a:1"], ["a:2"]]

    async def test_an_id_that_the_server_leaves_out_is_absent_not_failed(self, site: Site) -> None:
        """Its view goes, its row is written, it waits a full TTL, and the screen is told."""
        subscribe(site, 1, 2)
        await site.ttl.tick()
        site.nexus.absent = {"a:2"}
        site.clock.advance(301)
        await site.ttl.tick()
        assert site.told == [
            ("updated", "post", ["a:1", "a:2"]),
            ("updated", "post", ["a:1"]),
            ("absent", "post", ["a:2"]),
        ]
        assert await site.controller.get("post", "a:2") is None
        assert site.rows("post_ttl")["a:2"] == milliseconds(site.clock)
        assert site.ttl.snapshot().cooling["post"] == {}
        site.clock.advance(299)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 2

    async def test_a_broken_view_fails_alone(self, site: Site) -> None:
        """The others of its batch are stored; only ids that may be it are in doubt."""
        site.nexus.special = {"a:2": {"details": {"author": "a"}}}
        site.nexus.absent = {"a:3"}
        subscribe(site, 1, 2, 3)
        await site.ttl.tick()
        assert set(site.rows("post_ttl")) == {"a:1"}
        assert set(site.ttl.snapshot().cooling["post"]) == {"a:2", "a:3"}
        assert site.told == [("updated", "post", ["a:1"])]

    async def test_a_view_that_cannot_be_stored_fails_alone(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """And so does one for which the fetch answers with an exception."""

        async def fetch(ids: list[str]) -> dict[str, object]:
            assert set(ids) == set("abcd")
            return {"a": 1, "b": object(), "c": ValueError("not c")}

        site = made(tmp_path, clock, kinds=[Kind("price", fetch=fetch, fresh_for=30)])
        async with site.controller, site.ttl as ttl:
            ttl.sign_in(VIEWER)
            ttl.set_visible(True)
            for sku in "abcd":
                ttl.subscribe("price", sku)
            await ttl.tick()
            assert set(site.rows("price_ttl")) == {"a", "d"}
            assert set(ttl.snapshot().cooling["price"]) == {"b", "c"}

    @pytest.mark.parametrize(
        "error", [asyncio.CancelledError(), TimeoutError("slow"), RetryAfter(60), KeyError("x")]
    )
    async def test_whatever_a_fetch_raises_stops_nothing(
        self, site: Site, error: BaseException
    ) -> None:
        """The batch has failed, and the next tick goes on."""
        site.nexus.error = error
        subscribe(site, 1)
        await site.ttl.tick()
        pause = site.ttl.snapshot().cooling["post"]["a:1"] - site.clock()
        assert pause == (60 if isinstance(error, RetryAfter) else 10)
        site.nexus.error = None
        site.clock.advance(60)
        await site.ttl.tick()
        assert await site.version("a:1") == 1

    async def test_a_full_disk_is_a_failure_like_any_other(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What cannot be stored is not called fresh."""

        async def full(*_: object, **__: object) -> None:
            raise StoreError("the disk is full")

        monkeypatch.setattr(site.controller.database, "publish", full)
        subscribe(site, 1)
        await site.ttl.tick()
        assert set(site.ttl.snapshot().cooling["post"]) == {"a:1"}
        monkeypatch.undo()
        site.clock.advance(10)
        await site.ttl.tick()
        assert await site.version("a:1") == 1

    async def test_a_tick_that_joins_a_load_which_cannot_be_stored_has_failed_too(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """E29: what it joined is unverified. It cools down, so the next tick asks nothing."""

        async def full(*_: object, **__: object) -> None:
            raise StoreError("the disk is full")

        monkeypatch.setattr(site.controller.database, "publish", full)
        subscribe(site, 1)
        forced = await site.nexus.holding(site.controller.force_refresh("post", ["a:1"]))
        tick = asyncio.create_task(site.ttl.tick())
        await turns()
        site.nexus.let_go()
        await asyncio.gather(forced, tick, return_exceptions=True)
        assert set(site.ttl.snapshot().cooling["post"]) == {"a:1"}
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1"]]

    def test_the_memory_of_failures_is_bounded(self) -> None:
        """Ids that failed and were never seen again are forgotten, the oldest first."""
        lane: Lane[int] = Lane(cooldown=10, longest_cooldown=300)
        for number in range(10_100):
            lane.failed(number, 0)
        assert len(lane.cooling(1)) == 10_000
        assert 0 not in lane.cooling(1)

    def test_an_answer_with_ids_nobody_asked_for_is_a_failure_and_no_absence(self) -> None:
        """A server that names its posts in another way loses nobody's view."""
        found = by_id("post", ["a:1"], [{"details": {"author": "b", "id": "1"}}], post_id)
        assert isinstance(results_of("post", ["a:1"], found)["a:1"], LoadFailed)
