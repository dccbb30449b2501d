"""C3, C4, C19: what subscribing and unsubscribing remember, queue and forget."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError, StoreError
from stillfresh.engine.lane import Lane
from stillfresh.systems.coordinator import Database, Kind, TtlController
from stillfresh.testing import ManualClock
from tests.kit.coordinator import START, VIEWER, Site, made, milliseconds


class TestC3Subscribe:
    async def test_a_subscribed_id_without_a_row_is_queued_at_once(self, site: Site) -> None:
        """Nothing is known of it, so it is the next batch's."""
        site.ttl.subscribe_post(composite_post_id="a:1")
        assert site.queued() == ("a:1",)

    @pytest.mark.parametrize(
        ("age", "queued"), [(-1, True), (0, False), (300_000, False), (300_001, True)]
    )
    async def test_the_age_of_the_row_decides_whether_a_subscribed_id_is_queued(
        self, site: Site, age: int, queued: bool
    ) -> None:
        """Fresh up to and at the TTL; stale past it, and from the future."""
        await site.ttl.tick()
        row = milliseconds(site.clock) - age
        site.write_row("post", "a:1", row)
        site.ttl.subscribe_post(composite_post_id="a:1")
        assert site.queued() == (("a:1",) if queued else ())

    async def test_a_fresh_id_is_fetched_by_the_first_tick_after_its_ttl(self, site: Site) -> None:
        """Not fetched before it is stale, and fetched by the first tick after."""
        await site.ttl.tick()
        site.write_row("post", "a:1", milliseconds(site.clock) - 1000)
        site.ttl.subscribe_post(composite_post_id="a:1")
        site.clock.advance(299)
        await site.ttl.tick()
        assert site.nexus.posts == []
        site.clock.advance(0.001)
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1"]]

    async def test_an_id_subscribed_before_the_file_is_open_is_looked_up_by_the_first_tick(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """Nobody waits for the disk, and nothing is forgotten."""
        site = made(tmp_path, clock)
        site.ttl.sign_in(VIEWER)
        site.ttl.subscribe_post(composite_post_id="a:1")
        site.ttl.start()
        site.ttl.set_visible(True)
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1"]]
        await site.ttl.stop()
        await site.controller.close()

    async def test_a_look_up_that_fails_counts_as_stale(
        self, site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A disk that cannot be read is no reason to show old data."""

        def broken(*_: object) -> dict[str, int]:
            raise StoreError("the disk is unavailable")

        monkeypatch.setattr(site.controller.database, "read_now", broken)
        site.ttl.subscribe_post(composite_post_id="a:1")
        assert site.queued() == ("a:1",)
        assert "the disk is unavailable" in caplog.text

    async def test_nothing_is_queued_while_nobody_is_signed_in(self, site: Site) -> None:
        """It is remembered, and due when somebody is."""
        site.ttl.sign_out()
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        assert site.subscribed() == {"a:1": 1}
        assert site.queued() == ()
        site.ttl.sign_in(VIEWER)
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1"]]

    async def test_a_post_never_subscribes_its_author(self, site: Site) -> None:
        """Users are subscribed explicitly."""
        site.ttl.subscribe_post(composite_post_id="ann:1")
        await site.ttl.tick()
        assert site.subscribed("user") == {}
        assert site.nexus.users == []

    async def test_a_post_subscribed_twice_is_gone_at_the_first_unsubscribe(
        self, site: Site
    ) -> None:
        """Subscribed twice, gone at the first unsubscribe."""
        site.ttl.subscribe_post(composite_post_id="a:1")
        site.ttl.subscribe_post(composite_post_id="a:1")
        site.ttl.unsubscribe_post(composite_post_id="a:1")
        assert site.subscribed() == {}
        assert site.queued() == ()

    async def test_a_post_is_counted_if_the_call_asks_for_it(self, site: Site) -> None:
        """For a post that stands on the screen twice."""
        for _ in range(2):
            site.ttl.subscribe_post(composite_post_id="a:1", counted=True)
        site.ttl.unsubscribe_post(composite_post_id="a:1")
        assert site.subscribed() == {"a:1": 1}

    async def test_a_coordinator_can_count_all_posts(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """`counted=True` is then the default of each call."""
        site = made(tmp_path, clock, counted=True)
        site.ttl.subscribe_post(composite_post_id="a:1")
        site.ttl.subscribe_post(composite_post_id="a:1")
        assert site.subscribed() == {"a:1": 2}

    async def test_a_user_stays_subscribed_until_every_subscriber_has_left(
        self, site: Site
    ) -> None:
        """One for each call: a header and a sidebar may show the same one."""
        site.ttl.subscribe_user(pubky="ann")
        site.ttl.subscribe_user(pubky="ann")
        site.ttl.unsubscribe_user(pubky="ann")
        assert site.subscribed("user") == {"ann": 1}
        site.ttl.unsubscribe_user(pubky="ann")
        assert site.subscribed("user") == {}

    async def test_a_declared_kind_has_its_own_terms_batches_and_table(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """A declared kind has its own terms, batches and table, and is fetched without a viewer."""
        asked: list[list[str]] = []

        async def fetch(ids: list[str]) -> dict[str, int]:
            asked.append(ids)
            return dict.fromkeys(ids, 5)

        price = Kind("price", fetch=fetch, fresh_for="30s", max_batch=2, counted=True)
        site = made(tmp_path, clock, kinds=[price])
        async with site.controller, site.ttl as ttl:
            ttl.sign_in(VIEWER)
            ttl.set_visible(True)
            for sku in ("a", "b", "c", "a"):
                ttl.subscribe("price", sku)
            assert ttl.snapshot().subscribed["price"] == {"a": 2, "b": 1, "c": 1}
            await ttl.tick()
            await ttl.tick()
            assert asked == [["a", "b"], ["c"]]
            assert await site.controller.get("price", "a") == 5
            assert set(site.rows("price_ttl")) == {"a", "b", "c"}

    async def test_a_kind_that_is_declared_while_it_runs_is_looked_up_and_fetched(
        self, site: Site
    ) -> None:
        """While it runs: it is looked up and fetched like the others."""

        async def fetch(ids: list[str]) -> dict[str, int]:
            return dict.fromkeys(ids, 5)

        await site.ttl.tick()
        site.controller.declare([Kind("price", fetch=fetch, fresh_for="30s")])
        site.ttl.subscribe("price", "a")
        await site.ttl.tick()
        assert await site.controller.get("price", "a") == 5

    @pytest.mark.parametrize("wrong", ["", None, 5, b"a:1", "a" * 1_000_001, "\ud800"])
    async def test_a_bad_id_is_refused(self, site: Site, wrong: str) -> None:
        """With what it was, and nothing is remembered."""
        with pytest.raises(ConfigError):
            site.ttl.subscribe_post(composite_post_id=wrong)
        with pytest.raises(ConfigError):
            site.ttl.unsubscribe_user(pubky=wrong)
        assert site.subscribed() == {}


class TestC19PostIds:
    """C19: the id of a post is `author:post`."""

    @pytest.mark.parametrize("wrong", ["post", ":post", "author:", ":", "a:b:c", "a::b", "a/b"])
    async def test_an_id_that_is_no_author_and_post_is_refused(
        self, site: Site, wrong: str
    ) -> None:
        """By every call that takes one, with the value and what is allowed; nothing is asked."""
        controller = site.controller
        calls: list[Callable[[], Any]] = [
            lambda: site.ttl.subscribe_post(composite_post_id=wrong),
            lambda: site.ttl.subscribe("post", wrong),
            lambda: site.ttl.unsubscribe_post(composite_post_id=wrong),
            lambda: site.ttl.unsubscribe("post", wrong),
            lambda: controller.get("post", wrong),
            lambda: controller.get_many("post", ["a:1", wrong]),
            lambda: controller.touch("post", wrong),
            lambda: controller.force_refresh_posts_by_ids(["a:1", wrong], VIEWER),
            lambda: controller.force_refresh("post", [wrong]),
        ]
        says = f"post: {wrong!r} is not the id of a post; write 'author:post'"
        for call in calls:
            with pytest.raises(ConfigError, match=re.escape(says)):
                await _awaited(call())
        assert (site.subscribed(), site.nexus.posts) == ({}, [])

    async def test_other_kinds_have_ids_of_any_text(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """Users, and kinds of one's own, also one that is named `post`."""

        async def fetch(ids: list[str]) -> dict[str, int]:
            return dict.fromkeys(ids, 5)

        kinds = [Kind("post", fetch=fetch, fresh_for="30s")]
        async with TtlController(database=Database(tmp_path / "own.db"), kinds=kinds) as own:
            assert await own.force_refresh("post", ["17"]) == {"17": 5}
            assert await own.get("post", "17") == 5
        site = made(tmp_path, clock)
        site.ttl.subscribe_user(pubky="ann")
        assert site.subscribed("user") == {"ann": 1}


async def _awaited(result: Any) -> None:
    """A call may be plain or a coroutine."""
    if inspect.isawaitable(result):
        await result


class TestC4Unsubscribe:
    async def test_an_unsubscribed_id_leaves_the_subscriptions_and_the_queue(
        self, site: Site
    ) -> None:
        """Scrolled away before its batch: it is never fetched."""
        site.ttl.subscribe_post(composite_post_id="a:1")
        site.ttl.subscribe_post(composite_post_id="a:2")
        site.ttl.unsubscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        assert site.nexus.posts == [["a:2"]]

    async def test_unsubscribing_an_unknown_id_or_too_often_changes_nothing(
        self, site: Site
    ) -> None:
        """Counts never go below zero."""
        for _ in range(3):
            site.ttl.unsubscribe_user(pubky="ann")
            site.ttl.unsubscribe_post(composite_post_id="a:1")
        site.ttl.subscribe_user(pubky="ann")
        assert site.subscribed("user") == {"ann": 1}

    async def test_an_id_unsubscribed_in_flight_is_stored_and_not_queued_again(
        self, site: Site
    ) -> None:
        """The data is still of use; the id is not asked for again."""
        site.nexus.hold()
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.nexus.asked.wait()
        site.ttl.unsubscribe_post(composite_post_id="a:1")
        assert site.ttl.snapshot().in_flight["post"] == ("a:1",)
        site.nexus.let_go()
        await site.ttl.tick()
        assert await site.version("a:1") == 1
        site.clock.advance(3600)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 1

    async def test_an_id_that_is_subscribed_again_in_flight_is_not_fetched_twice(
        self, site: Site
    ) -> None:
        """The fetch under way is as good for who came back."""
        site.nexus.hold()
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.nexus.asked.wait()
        site.ttl.unsubscribe_post(composite_post_id="a:1")
        site.ttl.subscribe_post(composite_post_id="a:1")
        site.nexus.let_go()
        await site.ttl.tick()
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1"]]
        site.clock.advance(301)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 2

    @given(st.lists(st.tuples(st.booleans(), st.booleans(), st.sampled_from("ab"))))
    def test_counts_of_subscriptions_match_a_naive_model(
        self, calls: list[tuple[bool, bool, str]]
    ) -> None:
        """Counted or not, in any order, they match a plain count that stops at zero."""
        lane: Lane[str] = Lane(cooldown=1, longest_cooldown=1)
        counts = dict.fromkeys("ab", 0)
        for subscribes, counted, key in calls:
            if subscribes:
                lane.subscribe(key, counted=counted)
                counts[key] = counts[key] + 1 if counted else max(1, counts[key])
            else:
                lane.unsubscribe(key)
                counts[key] = max(0, counts[key] - 1)
            assert lane.subscribed == {key: count for key, count in counts.items() if count}


def test_a_clock_that_cannot_be_called_is_refused(tmp_path: Path) -> None:
    """C3: a clock without its parentheses is refused."""
    with pytest.raises(ConfigError, match="clock"):
        made(tmp_path, START)  # type: ignore[arg-type]
