"""C2, C10, C11, C17: the file and its viewers, forced refreshes, reposts, local edits that win."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh import ConfigError, LoadFailed, NotOpen, StillfreshError
from stillfresh.systems.coordinator import Database, Kind, TtlController, TtlCoordinator
from stillfresh.systems.coordinator.rules import original_of
from stillfresh.testing import ManualClock
from tests.kit.coordinator import VIEWER, Nexus, Site, made, milliseconds, post, reposting, user


class TestC10ForceRefresh:
    async def test_a_forced_refresh_fetches_whole_views_even_when_a_copy_is_present(
        self, site: Site
    ) -> None:
        """Details, counts, relationships, tags and bookmark, as the server has them now."""
        await site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER)
        site.nexus.version = 2
        views = await site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER)
        assert views == {"a:1": post("a:1", 2)}
        assert await site.controller.get("post", "a:1") == post("a:1", 2)
        assert site.rows("post_ttl") == {"a:1": milliseconds(site.clock)}

    async def test_a_forced_refresh_of_more_than_a_batch_is_split(self, site: Site) -> None:
        """A single id takes the same path; the same id twice is asked for once."""
        users = [f"u{number}" for number in range(41)]
        await site.controller.force_refresh_users_by_ids([*users, "u0"], VIEWER)
        await site.controller.force_refresh_users_by_ids(["u0"])
        assert [len(batch) for batch in site.nexus.users] == [20, 20, 1, 1]
        assert set(site.nexus.viewers) == {VIEWER}

    async def test_a_forced_refresh_raises_a_failure_when_all_batches_have_ended(
        self, site: Site
    ) -> None:
        """What could be fetched is stored."""
        site.nexus.failing = {"a:0"}
        ids = [f"a:{number}" for number in range(25)]
        with pytest.raises(LoadFailed, match="20 of 25 failed") as caught:
            await site.controller.force_refresh_posts_by_ids(ids, VIEWER)
        assert isinstance(caught.value.__cause__, ConnectionError)
        assert len(site.rows("post_ttl")) == 5

    async def test_a_view_that_is_not_equal_to_itself_is_reported_as_updated(
        self, site: Site
    ) -> None:
        """A `nan` is stored, returned and announced as any other value."""
        site.nexus.special["a:1"] = post("a:1", score=float("nan"))
        views = await site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER)
        assert set(views) == {"a:1"}
        assert site.told == [("updated", "post", ["a:1"])]

    async def test_an_absent_post_is_missing_from_the_result_of_a_forced_refresh(
        self, site: Site
    ) -> None:
        """It does not exist; that is no failure."""
        site.nexus.absent = {"a:2"}
        views = await site.controller.force_refresh_posts_by_ids(["a:1", "a:2"], VIEWER)
        assert set(views) == {"a:1"}

    async def test_a_subscribed_post_waits_a_full_ttl_after_a_forced_refresh(
        self, site: Site
    ) -> None:
        """The coordinator need not ask again, and a cooldown is over."""
        site.nexus.error = ConnectionError()
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        site.nexus.error = None
        await site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER)
        assert site.ttl.snapshot().cooling["post"] == {}
        site.clock.advance(300)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 2
        site.clock.advance(1)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 3

    async def test_view_and_row_are_one_transaction(self, site: Site) -> None:
        """If the view cannot be written, neither is its row."""
        await site.ttl.tick()
        site.write(
            "CREATE TRIGGER refuse BEFORE INSERT ON post BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        with pytest.raises(LoadFailed):
            await site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER)
        assert site.rows("post_ttl") == {}

    async def test_a_forced_refresh_refuses_one_text_another_viewer_and_an_empty_id(
        self, site: Site
    ) -> None:
        """A text where many ids belong, another viewer than the one who is signed in."""
        with pytest.raises(ConfigError, match="takes many ids"):
            await site.controller.force_refresh_posts_by_ids("a:1", VIEWER)
        with pytest.raises(ConfigError, match="is not the viewer that is signed in"):
            await site.controller.force_refresh_posts_by_ids(["a:1"], "another")
        with pytest.raises(ConfigError, match="the key is empty"):
            await site.controller.force_refresh_users_by_ids([""])
        assert site.nexus.viewers == []

    async def test_without_a_coordinator_the_viewer_is_that_of_the_last_call(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """The viewer is who it was asked for; nobody else is shown their views."""
        nexus, database = Nexus(), Database(tmp_path / "a.db")
        async with TtlController(nexus=nexus, database=database, clock=clock) as controller:
            await controller.force_refresh_posts_by_ids(["a:1"], "ann")
            assert await controller.get("post", "a:1") == post("a:1")
        async with TtlController(nexus=nexus, database=database, clock=clock) as controller:
            assert await controller.get("post", "a:1") is None

    async def test_a_fetch_that_hangs_is_given_up(self, tmp_path: Path) -> None:
        """After `fetch_timeout`, however the nexus behaves."""
        nexus = Nexus()
        nexus.hold()
        controller = TtlController(
            nexus=nexus, database=Database(tmp_path / "a.db"), fetch_timeout="1ms"
        )
        async with controller:
            with pytest.raises(LoadFailed, match=r"no answer within 0\.001 s"):
                await controller.force_refresh_posts_by_ids(["a:1"], "ann")

    @pytest.mark.parametrize(
        ("reposted", "original"),
        [
            ("pubky://ann/pub/pubky.app/posts/9", "ann:9"),
            ("ann:9", "ann:9"),
            ("pubky://ann/pub/pubky.app/files/9", None),
            ("pubky://", None),
            ("https://", None),
            ("ann:", None),
            ("", None),
            (None, None),
            (7, None),
        ],
    )
    def test_the_original_of_a_repost_is_read_from_its_uri_or_its_id(
        self, reposted: object, original: str | None
    ) -> None:
        """By the URI that Nexus gives, or by a composite id."""
        view = post("a:1", relationships={"reposted": reposted})
        assert original_of(view) == original

    @given(st.recursive(st.none() | st.text() | st.integers(), st.lists))
    def test_no_view_breaks_the_search_for_its_original(self, part: object) -> None:
        """What a server says is never a reason to crash."""
        original_of(part)
        original_of({"relationships": part})
        original_of({"relationships": {"reposted": part}})


class TestC17Reposts:
    async def test_the_original_of_a_repost_is_not_fetched_unless_it_is_subscribed(
        self, site: Site
    ) -> None:
        """The original of a repost is not on the screen, unless it is subscribed itself."""
        site.nexus.special = {"a:1": reposting("a:1", "b:9")}
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        await site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER)
        await site.ttl.tick()
        assert (site.nexus.posts, site.queued()) == ([["a:1"], ["a:1"]], ())

    async def test_with_follow_reposts_the_original_joins_the_queue(self, following: Site) -> None:
        """C10: fetched once with the next batch, although nobody subscribed to it."""
        site = following
        site.nexus.special = {"a:1": reposting("a:1", "b:9")}
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        assert site.queued() == ("b:9",)
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1"], ["b:9"]]
        assert site.subscribed() == {"a:1": 1}
        assert await site.version("b:9") == 1

    async def test_the_original_of_a_forced_repost_joins_the_queue_unless_it_is_fresh(
        self, following: Site
    ) -> None:
        """C10: it joins the queue of the coordinator that is running."""
        site = following
        site.nexus.special = {"a:1": reposting("a:1", "b:9")}
        await site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER)
        await site.ttl.tick()
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1"], ["b:9"]]
        await site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER)
        assert site.queued() == ()

    async def test_the_original_of_a_repost_that_was_forced_before_the_start_joins_the_queue(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """It waits in the queue for the first tick."""
        site = made(tmp_path, clock, follow_reposts=True)
        site.nexus.special = {"a:1": reposting("a:1", "b:9")}
        async with site.controller:
            site.ttl.sign_in(VIEWER)
            await site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER)
            assert site.queued() == ("b:9",)


class TestC11LocalWritesWin:
    async def test_a_refresh_sent_before_the_edit_does_not_overwrite_it(self, site: Site) -> None:
        """Even in the same millisecond."""
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        site.clock.advance(301)
        site.nexus.hold()
        site.nexus.version = 2
        ticking = asyncio.create_task(site.ttl.tick())
        await site.nexus.asked.wait()
        await site.controller.touch("post", "a:1", post("a:1", 99))
        site.nexus.let_go()
        await ticking
        assert await site.version("a:1") == 99
        assert site.rows("post_ttl") == {"a:1": milliseconds(site.clock)}
        assert site.told == [("updated", "post", ["a:1"])]

    async def test_an_edit_is_left_alone_for_one_ttl(self, site: Site) -> None:
        """An index that lags does not undo it; after that, the server is right."""
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        site.clock.advance(299)
        await site.controller.touch("post", "a:1")
        site.clock.advance(300)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 1
        site.clock.advance(0.001)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 2

    async def test_an_edit_by_another_process_wins_too(self, site: Site) -> None:
        """It takes the lease over: the request that was sent before it stores nothing."""
        site.ttl.subscribe_post(composite_post_id="a:1")
        site.nexus.hold()
        await site.nexus.asked.wait()
        site.clock.advance(2)
        other = made(site.folder, site.clock)
        async with other.controller:
            other.ttl.sign_in(VIEWER)
            await other.controller.touch("post", "a:1", post("a:1", 99))
        edited = milliseconds(site.clock)
        site.clock.advance(1)
        site.nexus.let_go()
        await site.ttl.tick()
        assert site.rows("post_ttl") == {"a:1": edited}
        assert await site.version("a:1") == 99
        assert site.told == []

    async def test_a_row_from_the_future_blocks_nothing(self, site: Site) -> None:
        """A clock that was set back must not freeze what is on screen."""
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        site.clock.advance(-3600)
        site.ttl.unsubscribe_post(composite_post_id="a:1")
        site.ttl.subscribe_post(composite_post_id="a:1")
        site.nexus.version = 2
        await site.ttl.tick()
        assert await site.version("a:1") == 2
        assert site.rows("post_ttl") == {"a:1": milliseconds(site.clock)}

    async def test_an_edit_of_a_new_post_makes_its_row_and_an_undeclared_kind_is_refused(
        self, site: Site
    ) -> None:
        """An edit of a new post makes its row; an undeclared kind is refused."""
        await site.controller.touch("post", "a:1")
        site.ttl.subscribe_post(composite_post_id="a:1")
        assert site.queued() == ()
        with pytest.raises(ConfigError, match="not declared"):
            await site.controller.touch("price", "a")
        with pytest.raises(ConfigError, match="not declared"):
            await site.controller.get("price", "a")


class TestC2File:
    async def test_a_corrupt_file_is_set_aside_and_begun_anew(self, site: Site) -> None:
        """It is a cache: what is on screen is fetched again."""
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        await site.controller.close()
        site.file.write_bytes(b"no\0database\xff" * 100)
        site.clock.advance(301)
        await site.ttl.tick()
        assert await site.version("a:1") == 1
        assert list(site.folder.glob("app.db.corrupt-*"))

    async def test_a_caller_that_gives_up_waiting_closes_the_file_for_nobody_else(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """While it is being opened, and when it is open."""
        site = made(tmp_path, clock)
        reading = [asyncio.create_task(site.controller.get("post", "a:1")) for _ in range(3)]
        await asyncio.sleep(0)
        reading[0].cancel()
        assert await asyncio.gather(*reading[1:]) == [None, None]
        await site.controller.close()
        reading = [asyncio.create_task(site.controller.get("post", "a:1"))]
        await asyncio.sleep(0)
        await site.controller.close()
        assert not site.controller.database.is_open
        with suppress(NotOpen):
            assert await reading[0] is None
        await site.controller.get("post", "a:1")
        for _ in range(20):
            touching = asyncio.create_task(site.controller.touch("post", "a:1"))
            await asyncio.sleep(0)
            touching.cancel()
            await asyncio.wait([touching])
            assert site.controller.database.is_open
        await site.controller.close()

    async def test_another_programs_file_is_refused(self, tmp_path: Path) -> None:
        """Without touching it."""
        path = tmp_path / "theirs.db"
        connection = apsw.Connection(str(path))
        connection.execute("CREATE TABLE post_ttl(id, mine)")
        connection.close()
        with pytest.raises(ConfigError, match="another application"):
            await Database(path).open()

    async def test_evict_deletes_views_and_rows_that_are_older_than_asked_for(
        self, site: Site
    ) -> None:
        """Views and rows that are older than asked for, in slices."""
        ids = [f"u{number}" for number in range(700)]
        site.ttl.configure(user_max_batch_size=1000)
        await site.controller.force_refresh_users_by_ids(ids)
        site.clock.advance("40d")
        await site.controller.force_refresh_users_by_ids(["u5"])
        assert await site.controller.evict() == 699
        assert set(site.rows("user_ttl")) == {"u5"}
        assert await site.controller.get("user", "u6") is None

    async def test_with_two_processes_the_file_serves_the_viewer_that_signed_in_last(
        self, tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The file serves who signed in last; the other stores nothing in it and sees nothing."""
        first, second = made(tmp_path, clock), made(tmp_path, clock)
        for site, viewer in ((first, "ann"), (second, "bob")):
            site.ttl.start()
            site.ttl.sign_in(viewer)
            site.ttl.set_visible(True)
            await site.ttl.tick()
        first.ttl.subscribe_post(composite_post_id="a:1")
        await first.ttl.tick()
        assert "serves another viewer" in caplog.text
        assert await second.controller.get("post", "a:1") is None
        assert await first.controller.get("post", "a:1") is None
        for site in (first, second):
            await site.ttl.stop()
            await site.controller.close()


class TestC2Viewers:
    async def test_the_views_outlive_a_restart(self, tmp_path: Path, clock: ManualClock) -> None:
        """The same viewer, in another process: what is fresh is not fetched again."""
        for calls in ([["a:1"]], []):
            site = made(tmp_path, clock)
            async with site.controller, site.ttl:
                site.ttl.sign_in(VIEWER)
                site.ttl.set_visible(True)
                site.ttl.subscribe_post(composite_post_id="a:1")
                await site.ttl.tick()
                assert site.nexus.posts == calls
                assert await site.version("a:1") == 1

    async def test_signing_out_hides_the_views_and_keeps_them(self, site: Site) -> None:
        """Nobody is shown them; the same viewer finds them again."""
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        site.ttl.sign_out()
        assert await site.controller.get("post", "a:1") is None
        with pytest.raises(StillfreshError, match="another viewer"):
            await site.controller.touch("post", "a:1")
        site.ttl.sign_in(VIEWER)
        assert await site.version("a:1") == 1

    async def test_the_views_of_a_guest_are_not_shown_to_a_viewer_who_signs_in(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """Gone when somebody signs in: they were nobody's."""
        site = made(tmp_path, clock)
        async with site.controller:
            await site.controller.force_refresh_users_by_ids(["ann"])
            assert await site.version("ann", "user") == 1
            assert site.nexus.viewers == [None]
            site.ttl.sign_in(VIEWER)
            assert await site.version("ann", "user") is None


class TestC7OneSession:
    async def test_a_forced_refresh_of_many_batches_is_for_one_viewer(self, site: Site) -> None:
        """Who came meanwhile is not asked for, and their views are not returned."""
        site.nexus.hold()
        ids = [f"a:{number}" for number in range(40)]
        forcing = asyncio.create_task(site.controller.force_refresh_posts_by_ids(ids, VIEWER))
        await site.nexus.asked.wait()
        site.ttl.sign_in("another")
        site.nexus.let_go()
        with pytest.raises(LoadFailed, match="signed out meanwhile"):
            await forcing
        assert site.nexus.viewers == [VIEWER]

    async def test_a_forced_refresh_that_a_sign_out_dropped_raises(self, site: Site) -> None:
        """Nothing found is another answer."""
        site.nexus.hold()
        forcing = asyncio.create_task(site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER))
        await site.nexus.asked.wait()
        site.ttl.sign_out()
        with pytest.raises(LoadFailed, match="signed out meanwhile"):
            await forcing

    async def test_a_viewer_that_a_listener_signs_in_gets_the_same_post(self, site: Site) -> None:
        """The rows that were read for the viewer before do not say when it is stale."""

        def switch(_kind: str, _ids: list[str]) -> None:
            off()
            site.ttl.sign_in("another")
            site.ttl.subscribe_post(composite_post_id="a:1")

        off = site.controller.on_updated(switch)
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        site.clock.advance(1)
        await site.ttl.tick()
        assert site.nexus.viewers == [VIEWER, "another"]
        assert await site.version("a:1") == 1

    async def test_an_edit_is_not_given_to_a_viewer_that_signs_in_meanwhile(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """Who signs in while it is on its way does not get it."""
        site = made(tmp_path, clock)
        async with site.controller:
            site.ttl.sign_in("ann")
            touching = asyncio.create_task(site.controller.touch("post", "a:1", post("a:1", 99)))
            await asyncio.sleep(0)
            site.ttl.sign_in("bob")
            with pytest.raises(LoadFailed, match="signed out meanwhile"):
                await touching
            await site.controller.prepare()
            assert await site.version("a:1") is None

    @pytest.mark.parametrize("turns", range(0, 12, 2))
    async def test_a_viewer_who_came_while_the_file_opened_is_served(
        self, tmp_path: Path, clock: ManualClock, turns: int
    ) -> None:
        """And not the one before, who was waiting for it too."""
        site = made(tmp_path, clock)
        site.ttl.sign_in("ann")
        opening = asyncio.create_task(site.controller.prepare())
        for _ in range(turns):
            await asyncio.sleep(0)
        site.ttl.sign_in("bob")
        await asyncio.gather(opening, site.controller.prepare())
        await site.controller.force_refresh_posts_by_ids(["a:1"], "bob")
        assert await site.version("a:1") == 1
        await site.controller.close()

    async def test_a_guest_is_answered_after_a_sign_out(self, site: Site) -> None:
        """Nothing of it is kept: the file waits for who was here."""
        await site.controller.force_refresh_users_by_ids(["ann"])
        site.ttl.sign_out()
        views = await site.controller.force_refresh_users_by_ids(["bob"])
        assert set(views) == {"bob"}
        assert set(site.rows("user_ttl")) == {"ann"}
        assert site.nexus.viewers == [VIEWER, None]

    async def test_a_forced_refresh_for_a_viewer_signs_nobody_in(self, site: Site) -> None:
        """It is stored for them, and shown when they come."""
        site.ttl.sign_out()
        await site.controller.force_refresh_posts_by_ids(["a:1"], "ann")
        assert await site.version("a:1") is None
        await site.controller.force_refresh_posts_by_ids(["a:2"], "bob")
        site.ttl.sign_in("bob")
        assert (await site.version("a:1"), await site.version("a:2")) == (None, 1)

    async def test_a_visit_ends_when_another_viewer_signs_in(self, site: Site) -> None:
        """Nobody waits for its request, which is cancelled, and nothing of it is kept."""
        site.ttl.sign_out()
        site.nexus.hold()
        visiting = asyncio.create_task(site.controller.force_refresh_posts_by_ids(["a:1"], "ann"))
        await site.nexus.asked.wait()
        site.ttl.sign_in("bob")
        with pytest.raises(LoadFailed, match="signed out meanwhile"):
            await visiting
        await site.controller.prepare()
        assert (site.rows("post_ttl"), site.told) == ({}, [])

    async def test_a_visit_that_is_being_prepared_asks_for_nobody(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """The file is still being opened when another viewer signs in: no request is sent."""
        site = made(tmp_path, clock)
        visiting = asyncio.create_task(site.controller.force_refresh_posts_by_ids(["a:1"], "ann"))
        await asyncio.sleep(0)
        assert not site.controller.database.is_open
        site.ttl.sign_in("bob")
        with pytest.raises(LoadFailed, match="signed out meanwhile"):
            await visiting
        assert site.nexus.viewers == []
        await site.controller.force_refresh_posts_by_ids(["a:1"], "bob")
        assert await site.version("a:1") == 1
        await site.controller.close()

    async def test_a_visit_goes_on_when_its_own_viewer_signs_in(self, site: Site) -> None:
        """It was for them."""
        site.ttl.sign_out()
        site.nexus.hold()
        visiting = asyncio.create_task(site.controller.force_refresh_posts_by_ids(["a:1"], "ann"))
        await site.nexus.asked.wait()
        site.ttl.sign_in("ann")
        site.nexus.let_go()
        assert set(await visiting) == {"a:1"}
        assert await site.version("a:1") == 1

    @pytest.mark.parametrize("when", ["before the write", "after the write"])
    async def test_the_views_of_a_viewer_who_leaves_while_they_are_stored_are_not_reported(
        self, site: Site, when: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next viewer is told nothing of it, and no id of it is cooling for them."""
        publish = site.controller.database.publish

        async def slow(*args: Any) -> set[str]:
            monkeypatch.undo()
            if when == "after the write":
                superseded = await publish(*args)
                site.ttl.sign_in("another")
                return superseded
            site.ttl.sign_in("another")
            await site.controller.prepare()
            return await publish(*args)

        monkeypatch.setattr(site.controller.database, "publish", slow)
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        assert site.told == []
        site.ttl.subscribe_post(composite_post_id="a:1")
        await site.ttl.tick()
        assert (site.nexus.viewers, site.told) == (
            [VIEWER, "another"],
            [("updated", "post", ["a:1"])],
        )

    async def test_a_controller_has_one_coordinator(self, site: Site) -> None:
        """Two would sign each other's viewers out, and change each other's terms."""
        with pytest.raises(ConfigError, match="a TtlController for each"):
            TtlCoordinator(site.controller)

    @pytest.mark.parametrize("wrong", [b"a:1", 5, None])
    async def test_an_id_and_a_viewer_must_be_text(self, site: Site, wrong: str) -> None:
        """And so is a viewer's."""
        with pytest.raises(ConfigError, match="must be text"):
            await site.controller.get("post", wrong)
        with pytest.raises(ConfigError, match="must be text"):
            await site.controller.touch("post", wrong)
        with pytest.raises(ConfigError, match="must be text"):
            await site.controller.force_refresh_posts_by_ids([wrong], VIEWER)
        if wrong is not None:
            with pytest.raises(ConfigError, match="viewer_id"):
                await site.controller.force_refresh_posts_by_ids(["a:1"], wrong)


class TestC19GetMany:
    """C19: many stored views at once, as `get` reads one."""

    async def test_get_many_reads_the_stored_views_by_id(self, site: Site) -> None:
        """Fresh or not; an id without a view is left out, and nothing is fetched."""
        site.nexus.absent = {"a:2"}
        await site.controller.force_refresh_posts_by_ids(["a:1", "a:2", "a:3"], VIEWER)
        site.clock.advance(100_000)
        requests = len(site.nexus.posts)
        views = await site.controller.get_many("post", ["a:3", "a:1", "a:2", "a:4", "a:1"])
        assert list(views.items()) == [("a:3", post("a:3")), ("a:1", post("a:1"))]
        assert len(site.nexus.posts) == requests
        assert await site.controller.get_many("post", []) == {}

    async def test_get_many_takes_any_iterable(self, site: Site) -> None:
        """A generator as well."""
        await site.controller.force_refresh_users_by_ids(["ann", "ben"], VIEWER)
        views = await site.controller.get_many("user", (name for name in ("ben", "eve")))
        assert views == {"ben": user("ben")}

    async def test_get_many_reads_more_ids_than_one_query_can_name(self, tmp_path: Path) -> None:
        """In slices, between which other tasks run."""

        async def fetch(ids: list[str]) -> dict[str, str]:
            return {id_: id_ for id_ in ids}

        kinds = [Kind("price", fetch=fetch, fresh_for="30s", max_batch=5_000)]
        async with TtlController(database=Database(tmp_path / "many.db"), kinds=kinds) as many:
            ids = [f"sku-{number}" for number in range(5_000)]
            await many.force_refresh("price", ids)
            reading = asyncio.create_task(many.get_many("price", [*ids, "none"]))
            turns = 0
            while not reading.done():
                turns += 1
                await asyncio.sleep(0)
            assert await reading == {id_: id_ for id_ in ids}
            assert turns > 3

    async def test_get_many_shows_another_viewer_none_of_the_views(self, site: Site) -> None:
        """The views are those of the viewer that is signed in."""
        await site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER)
        site.ttl.sign_in("another")
        assert await site.controller.get_many("post", ["a:1"]) == {}

    async def test_get_many_raises_if_the_viewer_leaves_meanwhile(self, site: Site) -> None:
        """Part of the views would be another viewer's."""
        ids = [f"a:{number}" for number in range(3_000)]
        reading = asyncio.create_task(site.controller.get_many("post", ids))
        await asyncio.sleep(0)
        site.ttl.sign_in("another")
        with pytest.raises(LoadFailed, match="signed out meanwhile"):
            await reading

    @pytest.mark.parametrize("wrong", ["a:1", b"a:1", 5, None])
    async def test_get_many_refuses_one_id_and_says_how_to_write_it(
        self, site: Site, wrong: Any
    ) -> None:
        """Refused with how to write it."""
        with pytest.raises(ConfigError, match=r"post: takes many ids; write \["):
            await site.controller.get_many("post", wrong)

    async def test_get_many_refuses_an_undeclared_kind(self, site: Site) -> None:
        """With the kinds that there are."""
        with pytest.raises(ConfigError, match="not declared; there are: post, user"):
            await site.controller.get_many("price", ["sku-1"])


class TestC11Edits:
    async def test_a_forced_request_that_was_sent_before_an_edit_does_not_overwrite_it(
        self, site: Site
    ) -> None:
        """It does not overwrite it either, however late its answer comes."""
        await site.ttl.tick()
        site.nexus.hold()
        forcing = asyncio.create_task(site.controller.force_refresh_posts_by_ids(["a:1"], VIEWER))
        await site.nexus.asked.wait()
        touching = asyncio.create_task(site.controller.touch("post", "a:1", post("a:1", 99)))
        await asyncio.sleep(0)
        site.nexus.let_go()
        await asyncio.gather(forcing, touching)
        assert await site.version("a:1") == 99

    async def test_an_edit_for_a_file_of_another_viewer_raises(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """The file is another viewer's by now, of another process."""
        first, second = made(tmp_path, clock), made(tmp_path, clock)
        async with first.controller, second.controller:
            for site, viewer in ((first, "ann"), (second, "bob")):
                site.ttl.sign_in(viewer)
                await site.controller.prepare()
            with pytest.raises(StillfreshError, match="another viewer"):
                await first.controller.touch("post", "a:1", post("a:1"))

    async def test_an_edit_that_cannot_be_stored_is_refused_and_the_refresh_in_flight_is_kept(
        self, site: Site
    ) -> None:
        """It is refused, and the refresh in flight is kept."""
        site.ttl.subscribe_post(composite_post_id="a:1")
        site.nexus.hold()
        await site.nexus.asked.wait()
        with pytest.raises(ConfigError, match="cannot be stored"):
            await site.controller.touch("post", "a:1", {"x": object()})
        site.nexus.let_go()
        await site.ttl.tick()
        assert await site.version("a:1") == 1
