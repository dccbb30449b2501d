"""C7, C8, C13, C16, C19: when it ticks, what a route changes, and how it starts and stops."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stillfresh import ConfigError
from stillfresh.systems.coordinator import CoordinatorsManager, Kind, TtlConfig, coordinator
from stillfresh.testing import ManualClock
from tests.kit.coordinator import VIEWER, Site, made
from tests.kit.engine import turns, until


def subscribe(site: Site, *numbers: int) -> None:
    for number in numbers:
        site.ttl.subscribe_post(composite_post_id=f"a:{number}")


class TestC7Gate:
    @pytest.mark.parametrize("missing", ["start", "sign_in", "set_visible"])
    async def test_nothing_is_fetched_unless_started_signed_in_and_visible(
        self, tmp_path: Path, clock: ManualClock, missing: str
    ) -> None:
        """Started, signed in, and visible; visibility is not assumed."""
        site = made(tmp_path, clock)
        steps: dict[str, Callable[[], None]] = {
            "start": site.ttl.start,
            "sign_in": lambda: site.ttl.sign_in(VIEWER),
            "set_visible": lambda: site.ttl.set_visible(True),
        }
        last = steps.pop(missing)
        async with site.controller:
            for step in steps.values():
                step()
            subscribe(site, 1)
            await site.ttl.tick()
            await turns()
            assert site.nexus.posts == []
            last()
            await until(lambda: site.nexus.posts == [["a:1"]])
            await site.ttl.stop()

    async def test_the_first_tick_comes_at_once_if_the_page_is_shown_right_after_the_start(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """The first tick is not one interval late since a window was shown after the start."""
        shown = [False]
        config = TtlConfig(batch_interval_ms=3_600_000)
        site = made(tmp_path, clock, config, visible=lambda: shown[0])
        async with site.controller, site.ttl:
            site.ttl.sign_in(VIEWER)
            subscribe(site, 1)
            shown[0] = True
            await until(lambda: site.nexus.posts == [["a:1"]])

    async def test_the_visible_function_is_asked_at_every_tick_and_an_error_means_hidden(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """`visible=` is asked at every tick; one that fails is taken for hidden."""
        answers: list[bool | Exception] = [False]

        def visible() -> bool:
            if isinstance(answers[0], Exception):
                raise answers[0]
            return answers[0]

        site = made(tmp_path, clock, TtlConfig(batch_interval_ms=1), visible=visible)
        async with site.controller, site.ttl:
            site.ttl.sign_in(VIEWER)
            subscribe(site, 1)
            await site.ttl.tick()
            answers[0] = RuntimeError("who knows")
            await site.ttl.tick()
            assert site.nexus.posts == []
            answers[0] = True
            async with asyncio.timeout(30):
                while not site.nexus.posts:
                    await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="visible"):
            made(tmp_path, clock, visible=True)

    async def test_a_hidden_page_is_refreshed_with_refresh_when_hidden(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """REFRESH_WHEN_HIDDEN, also when it is turned on later."""
        site = made(tmp_path, clock)
        async with site.controller, site.ttl:
            site.ttl.sign_in(VIEWER)
            subscribe(site, 1)
            await site.ttl.tick()
            assert site.nexus.posts == []
            site.ttl.configure(refresh_when_hidden=True)
            await until(lambda: site.nexus.posts == [["a:1"]])

    async def test_hiding_keeps_the_subscriptions_and_showing_ticks_at_once(
        self, site: Site
    ) -> None:
        """Coming back to a page shows what is stale being refreshed."""
        subscribe(site, 1)
        await site.ttl.tick()
        site.ttl.set_visible(False)
        site.clock.advance(301)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 1
        assert site.subscribed() == {"a:1": 1}
        site.ttl.set_visible(True)
        await until(lambda: len(site.nexus.posts) == 2)

    async def test_signing_out_stops_and_resets_and_signing_in_resumes_without_a_start(
        self, site: Site
    ) -> None:
        """Without another start; the views are kept for the same viewer."""
        subscribe(site, 1)
        await site.ttl.tick()
        site.ttl.sign_out()
        assert site.subscribed() == {}
        subscribe(site, 1, 2)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 1
        site.ttl.sign_in(VIEWER)
        await until(lambda: len(site.nexus.posts) == 2)
        assert site.nexus.posts[1] == ["a:2"]

    async def test_signing_in_makes_everything_subscribed_due(self, site: Site) -> None:
        """Also what was found fresh for somebody else."""
        subscribe(site, 1)
        await site.ttl.tick()
        site.ttl.sign_in("another")
        assert site.subscribed() == {}
        subscribe(site, 1)
        await site.ttl.tick()
        assert site.nexus.viewers == [VIEWER, "another"]

    async def test_another_viewer_sees_nothing_of_the_first(self, site: Site) -> None:
        """Views and rows of kinds that differ by viewer are gone, in the file too."""
        subscribe(site, 1)
        await site.ttl.tick()
        site.ttl.sign_in("another")
        assert await site.controller.get("post", "a:1") is None
        await site.ttl.tick()
        assert site.rows("post_ttl") == {}
        site.ttl.sign_in(VIEWER)
        await site.ttl.tick()
        assert await site.controller.get("post", "a:1") is None

    async def test_a_refresh_in_flight_for_a_viewer_who_left_is_dropped(self, site: Site) -> None:
        """Nothing of it is stored or told, and nobody waits for it."""
        site.nexus.hold()
        subscribe(site, 1)
        await site.nexus.asked.wait()
        site.ttl.sign_out()
        await until(lambda: site.ttl.snapshot().in_flight["post"] == ())
        site.nexus.let_go()
        await turns()
        assert site.rows("post_ttl") == {}
        assert site.told == []

    async def test_the_next_viewer_does_not_wait_for_the_first_ones_request(
        self, site: Site
    ) -> None:
        """However slow it is."""
        site.nexus.hold()
        subscribe(site, 1)
        await site.nexus.asked.wait()
        site.nexus.gate = None
        site.ttl.sign_in("another")
        subscribe(site, 2)
        await until(lambda: site.nexus.posts[-1] == ["a:2"])
        await site.ttl.tick()
        assert set(site.rows("post_ttl")) == {"a:2"}

    async def test_signing_the_same_viewer_in_again_changes_nothing(self, site: Site) -> None:
        """Signing in twice is signing in."""
        subscribe(site, 1)
        site.ttl.sign_in(VIEWER)
        assert site.subscribed() == {"a:1": 1}
        site.ttl.sign_out()
        site.ttl.sign_out()

    @pytest.mark.parametrize("wrong", ["", None, 5])
    async def test_a_bad_viewer_is_refused(self, site: Site, wrong: str) -> None:
        """Nobody is signed in by an empty name."""
        with pytest.raises(ConfigError, match="viewer_id"):
            site.ttl.sign_in(wrong)


SAYS_HIDDEN = "set_visible(True)"


class TestC16Hidden:
    @pytest.mark.parametrize("by_hand", [True, False])
    async def test_a_coordinator_that_waits_to_be_seen_says_so_once(
        self, tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture, by_hand: bool
    ) -> None:
        """One line with both ways to tell it, at a tick by hand or after one interval."""
        site = made(tmp_path, clock, TtlConfig(batch_interval_ms=1))
        async with site.controller, site.ttl:
            site.ttl.sign_in(VIEWER)
            if by_hand:
                await site.ttl.tick()
            await turns()
            assert caplog.text == ""
            subscribe(site, 1)
            if by_hand:
                await site.ttl.tick()
                await site.ttl.tick()
            await until(lambda: bool(caplog.records))
            subscribe(site, 2)
            await turns()
            (line,) = caplog.messages
            assert SAYS_HIDDEN in line
            assert "visible=" in line
            site.ttl.set_visible(True)
            await until(lambda: site.nexus.posts == [["a:1", "a:2"]])

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({}, True),
            ({}, False),
            ({"visible": lambda: False}, None),
            ({"config": TtlConfig(batch_interval_ms=1, refresh_when_hidden=True)}, None),
        ],
    )
    async def test_a_coordinator_that_knows_its_visibility_logs_nothing(
        self,
        tmp_path: Path,
        clock: ManualClock,
        caplog: pytest.LogCaptureFixture,
        options: dict[str, Any],
        told: bool | None,
    ) -> None:
        """Visible or hidden, by a call or a function; and one that refreshes when hidden."""
        site = made(tmp_path, clock, **{"config": TtlConfig(batch_interval_ms=1), **options})
        async with site.controller, site.ttl:
            site.ttl.sign_in(VIEWER)
            subscribe(site, 1)
            if told is not None:
                site.ttl.set_visible(told)
            await site.ttl.tick()
            await turns()
        assert caplog.text == ""

    async def test_a_coordinator_that_is_shown_within_the_first_interval_logs_nothing(
        self, tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A page that says within the first interval that it is visible has forgotten nothing."""
        site = made(tmp_path, clock)
        async with site.controller, site.ttl:
            site.ttl.sign_in(VIEWER)
            subscribe(site, 1)
            await turns()
            site.ttl.set_visible(True)
            await until(lambda: site.nexus.posts == [["a:1"]])
        assert caplog.text == ""


class TestC8Route:
    async def test_another_path_resets_and_the_same_or_the_first_does_not(self, site: Site) -> None:
        """Subscriptions, counts and queues go; the configuration stays."""
        site.ttl.configure(post_ttl_ms=1000)
        subscribe(site, 1)
        site.ttl.subscribe_user(pubky="ann")
        for route in ("/home", "/home"):
            site.ttl.set_route(route)
            assert site.subscribed() == {"a:1": 1}
        site.ttl.set_route("/profile")
        assert (site.subscribed(), site.subscribed("user"), site.queued()) == ({}, {}, ())
        subscribe(site, 1)
        await site.ttl.tick()
        site.clock.advance(1.001)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 2

    async def test_a_batch_in_flight_completes_and_nothing_is_queued_again(
        self, site: Site
    ) -> None:
        """The data is of use to the cache."""
        site.nexus.hold()
        subscribe(site, 1)
        await site.nexus.asked.wait()
        site.ttl.reset()
        site.nexus.let_go()
        await site.ttl.tick()
        assert await site.version("a:1") == 1
        site.clock.advance(3600)
        await site.ttl.tick()
        assert (site.queued(), len(site.nexus.posts)) == ((), 1)

    async def test_cooldowns_survive_a_reset(self, site: Site) -> None:
        """A route changed to and fro does not ask a failing server more often."""
        site.nexus.error = ConnectionError()
        subscribe(site, 1)
        await site.ttl.tick()
        site.ttl.reset()
        subscribe(site, 1)
        await site.ttl.tick()
        assert len(site.nexus.posts) == 1

    async def test_a_bad_route_is_refused(self, site: Site) -> None:
        """A path is text."""
        with pytest.raises(ConfigError, match="route"):
            site.ttl.set_route(None)  # type: ignore[arg-type]


class TestC13Lifecycle:
    async def test_start_and_stop_may_be_called_in_any_order(self, site: Site) -> None:
        """Twice started is started; stopped it forgets subscriptions, not the viewer."""
        await site.ttl.stop()
        await site.ttl.stop()
        site.ttl.start()
        site.ttl.start()
        subscribe(site, 1)
        await site.ttl.tick()
        await site.ttl.stop()
        assert site.subscribed() == {}
        site.ttl.start()
        subscribe(site, 2)
        await site.ttl.tick()
        assert site.nexus.posts == [["a:1"], ["a:2"]]

    async def test_stop_waits_for_the_batch_in_flight(self, site: Site) -> None:
        """It is stored, and no task is left."""
        site.nexus.hold()
        subscribe(site, 1)
        await site.nexus.asked.wait()
        stopping = asyncio.create_task(site.ttl.stop())
        await turns()
        assert not stopping.done()
        site.nexus.let_go()
        await stopping
        assert await site.version("a:1") == 1
        assert [task.get_name() for task in asyncio.all_tasks()] == [
            task.get_name() for task in [asyncio.current_task()] if task
        ]

    async def test_stop_does_not_wait_for_ever(self, tmp_path: Path, clock: ManualClock) -> None:
        """Up to the grace; then what is in flight is cancelled."""
        site = made(tmp_path, clock, grace=0)
        async with site.controller:
            site.ttl.start()
            site.ttl.sign_in(VIEWER)
            site.ttl.set_visible(True)
            site.nexus.hold()
            subscribe(site, 1)
            await site.nexus.asked.wait()
            await site.ttl.stop()
            assert len(asyncio.all_tasks()) == 1
            assert site.ttl.snapshot().in_flight["post"] == ()
            site.nexus.gate = None
            site.ttl.start()
            subscribe(site, 1)
            await site.ttl.tick()
            assert await site.version("a:1") == 1
            await site.ttl.stop()

    async def test_stop_does_not_wait_for_another_process_longer_than_the_grace(
        self, tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its load cannot be dropped from here, so the tick is cancelled; nothing has failed."""
        other, site = made(tmp_path, clock), made(tmp_path, clock, grace=0)
        async with other.controller, other.ttl, site.controller:
            for each in (other, site):
                each.ttl.start()
                each.ttl.sign_in(VIEWER)
                each.ttl.set_visible(True)
            other.nexus.hold()
            subscribe(other, 1)
            await other.nexus.asked.wait()
            subscribe(site, 1)
            while not (await site.controller.cache.stats()).resources["post"].leases_denied:
                await asyncio.sleep(0)
            ticks = {it for it in asyncio.all_tasks() if it.get_name() == "stillfresh-tick"}
            await site.ttl.stop()
            assert [it.done() for it in ticks].count(True) == 1
            assert site.ttl.snapshot().in_flight["post"] == ()
            assert not caplog.records
            other.nexus.let_go()

    async def test_a_caller_that_waits_for_a_tick_goes_on_when_stop_cancels_the_tick(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """Nobody cancelled them."""
        site = made(tmp_path, clock, grace=0)
        async with site.controller:
            site.ttl.start()
            site.ttl.sign_in(VIEWER)
            site.ttl.set_visible(True)
            site.nexus.hold()
            subscribe(site, 1)
            await site.nexus.asked.wait()
            waiting = asyncio.create_task(site.ttl.tick())
            await turns()
            await site.ttl.stop()
            await waiting

    async def test_a_stop_that_is_cancelled_leaves_no_tick(self, site: Site) -> None:
        """Whoever loses patience with it meant it to end."""
        site.nexus.hold()
        subscribe(site, 1)
        await site.nexus.asked.wait()
        stopping = asyncio.create_task(site.ttl.stop())
        await turns()
        stopping.cancel()
        await asyncio.wait([stopping])
        await until(lambda: len(asyncio.all_tasks()) == 1)

    async def test_a_batch_that_fails_after_the_sign_out_queues_nothing(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """Also not by a batch that fails then."""
        asked, gate = asyncio.Event(), asyncio.Event()

        async def fetch(_: list[str]) -> dict[str, int]:
            asked.set()
            await gate.wait()
            raise ConnectionError

        config = TtlConfig(cooldown_ms=0)
        kinds = [Kind("price", fetch=fetch, fresh_for=30)]
        site = made(tmp_path, clock, config, kinds=kinds)
        async with site.controller, site.ttl as ttl:
            ttl.sign_in(VIEWER)
            ttl.set_visible(True)
            ttl.subscribe("price", "a")
            await asked.wait()
            ttl.sign_out()
            ttl.subscribe("price", "a")
            gate.set()
            await ttl.tick()
            assert site.queued("price") == ()

    async def test_a_start_during_a_stop_keeps_it_running(self, site: Site) -> None:
        """What it does next is what was asked for last."""
        site.nexus.hold()
        subscribe(site, 1)
        await site.nexus.asked.wait()
        stopping = asyncio.create_task(site.ttl.stop())
        await turns()
        site.ttl.start()
        subscribe(site, 2)
        site.nexus.let_go()
        await stopping
        await until(lambda: site.nexus.posts == [["a:1"], ["a:2"]])

    async def test_a_snapshot_shows_the_state_of_each_kind(self, site: Site) -> None:
        """Subscribed, queued, in flight, cooling, the last tick, requests made and saved."""
        subscribe(site, *range(30))
        site.ttl.subscribe_user(pubky="ann")
        site.ttl.subscribe_user(pubky="ann")
        began = site.clock()
        await site.ttl.tick()
        state = site.ttl.snapshot()
        assert len(state.subscribed["post"]) == 30
        assert state.subscribed["user"] == {"ann": 2}
        assert state.queued["post"] == tuple(f"a:{number}" for number in range(20, 30))
        assert (state.in_flight["post"], state.cooling["post"]) == ((), {})
        assert (state.last_tick, state.requests_made, state.requests_saved) == (began, 2, 19)

    async def test_the_manager_starts_routes_and_stops_its_coordinators_together(
        self, site: Site
    ) -> None:
        """Started, routed and stopped as one; one that fails to stop keeps none running."""
        calls: list[str] = []

        class Stream:
            def start(self) -> None:
                calls.append("start")

            async def stop(self) -> None:
                calls.append("stop")
                raise RuntimeError("a bad end")

            def set_route(self, route: str) -> None:
                calls.append(route)

        manager = CoordinatorsManager(Stream(), site.ttl)
        await manager.__aenter__()
        subscribe(site, 1)
        manager.set_route("/home")
        manager.set_route("/profile")
        assert site.subscribed() == {}
        with pytest.raises(RuntimeError, match="a bad end"):
            await manager.__aexit__(None, None, None)
        assert calls == ["start", "/home", "/profile", "stop"]
        await site.ttl.tick()
        assert site.nexus.posts == []
        with pytest.raises(ConfigError, match="one by one"):
            CoordinatorsManager([site.ttl])  # type: ignore[arg-type]

    async def test_a_start_that_fails_again_and_again_leaves_no_task(self, site: Site) -> None:
        """Whoever tries again until it works keeps no task of each time."""

        class Broken:
            def start(self) -> None:
                raise OSError("not yet")

            async def stop(self) -> None: ...

            def set_route(self, route: str) -> None: ...

        manager = CoordinatorsManager(site.ttl, Broken())
        before = len(asyncio.all_tasks())
        for _ in range(20):
            with pytest.raises(OSError, match="not yet"):
                manager.start()
            await until(lambda: len(asyncio.all_tasks()) <= before + 1)
        await manager.stop()

    async def test_the_manager_starts_all_coordinators_or_none(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        """One that cannot start leaves those before it as they were."""

        class Broken:
            def start(self) -> None:
                raise RuntimeError("a bad start")

            async def stop(self) -> None:
                raise AssertionError("was never started")

            def set_route(self, route: str) -> None: ...

        site = made(tmp_path, clock)
        site.ttl.sign_in(VIEWER)
        site.ttl.set_visible(True)
        with pytest.raises(RuntimeError, match="a bad start"):
            await CoordinatorsManager(site.ttl, Broken()).__aenter__()
        subscribe(site, 1)
        await site.ttl.tick()
        assert (site.nexus.posts, len(asyncio.all_tasks())) == ([], 1)

    async def test_a_fetch_that_cannot_be_cancelled_is_left_behind(
        self, tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody waits for it for ever."""
        monkeypatch.setattr(coordinator, "LEAST_PATIENCE", 0.01)
        asked, gate = asyncio.Event(), asyncio.Event()

        async def fetch(_: list[str]) -> dict[str, int]:
            asked.set()
            while not gate.is_set():
                with suppress(asyncio.CancelledError):
                    await gate.wait()
            return {}

        kinds = [Kind("price", fetch=fetch, fresh_for=30)]
        site = made(tmp_path, clock, kinds=kinds, grace=0)
        async with site.controller:
            site.ttl.start()
            site.ttl.sign_in(VIEWER)
            site.ttl.set_visible(True)
            site.ttl.subscribe("price", "a")
            await asked.wait()
            async with asyncio.timeout(30):
                await site.ttl.stop()
            gate.set()
            await until(lambda: len(asyncio.all_tasks()) == 1)

    async def test_a_database_that_does_not_open_is_logged_and_retried(
        self, tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nothing is fetched that could not be kept; when there is a place for it, it works."""
        folder = tmp_path / "later"
        site = made(folder, clock)
        with caplog.at_level(logging.WARNING):
            async with site.ttl:
                site.ttl.sign_in(VIEWER)
                site.ttl.set_visible(True)
                subscribe(site, 1)
                await site.ttl.tick()
                assert "no directory" in caplog.text
                assert site.nexus.posts == []
                folder.mkdir()
                clock.advance(10)
                await site.ttl.tick()
                assert site.nexus.posts == [["a:1"]]
        await site.controller.close()


SAYS_NOT_STARTED = "the coordinator is not started; call start()"


class TestC19NotStarted:
    async def test_a_tick_before_the_start_says_once_why_it_does_nothing(
        self, tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One line that names start(), however often it is called; then it works."""
        site = made(tmp_path, clock)
        site.ttl.sign_in(VIEWER)
        site.ttl.set_visible(True)
        subscribe(site, 1)
        await site.ttl.tick()
        await site.ttl.tick()
        (line,) = caplog.messages
        assert SAYS_NOT_STARTED in line
        assert site.nexus.posts == []
        async with site.controller, site.ttl:
            await site.ttl.tick()
        assert site.nexus.posts == [["a:1"]]
        assert len(caplog.messages) == 1

    async def test_a_tick_before_the_start_says_so_whatever_else_is_missing(
        self, tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nobody is signed in, nothing is visible or subscribed: start() comes first."""
        site = made(tmp_path, clock)
        await site.ttl.tick()
        (line,) = caplog.messages
        assert SAYS_NOT_STARTED in line

    async def test_a_tick_after_the_start_does_not_say_so(
        self, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Signed out, there is nothing to refresh, and that is known."""
        await site.ttl.tick()
        site.ttl.sign_out()
        await site.ttl.tick()
        assert caplog.messages == []


class PlainStream:
    """A coordinator as the seed has it: `stop(): void`."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def set_route(self, route: str) -> None:
        self.calls.append(route)


class TestC19Managed:
    async def test_a_plain_stop_is_called_and_a_coroutine_is_awaited(self, site: Site) -> None:
        """Both in one manager."""
        plain = PlainStream()
        async with CoordinatorsManager(plain, site.ttl) as manager:
            manager.set_route("/home")
            subscribe(site, 1)
        assert plain.calls == ["start", "/home", "stop"]
        assert site.subscribed() == {}

    async def test_a_stop_may_return_any_awaitable(self) -> None:
        """A task or a future is awaited as a coroutine is."""
        ended: list[str] = []

        async def end() -> None:
            await turns()
            ended.append("end")

        class Stream(PlainStream):
            def stop(self) -> asyncio.Task[None]:  # type: ignore[override]
                return asyncio.create_task(end())

        async with CoordinatorsManager(Stream()):
            pass
        assert ended == ["end"]

    async def test_a_plain_stop_that_fails_keeps_none_running(self, site: Site) -> None:
        """Its error is raised after all have ended."""

        class Broken(PlainStream):
            def stop(self) -> None:
                raise RuntimeError("a bad end")

        plain = PlainStream()
        with pytest.raises(RuntimeError, match="a bad end"):
            async with CoordinatorsManager(Broken(), site.ttl, plain):
                subscribe(site, 1)
        assert plain.calls == ["start", "stop"]
        assert site.subscribed() == {}

    async def test_coordinators_before_one_whose_start_fails_are_stopped(
        self, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Plain or not; one that cannot be stopped is logged, and the start's error is raised."""

        class CannotStop(PlainStream):
            def stop(self) -> None:
                raise RuntimeError("a bad end")

        class CannotStart(PlainStream):
            def start(self) -> None:
                raise OSError("a bad start")

        plain = PlainStream()
        manager = CoordinatorsManager(CannotStop(), plain, site.ttl, CannotStart())
        subscribe(site, 1)
        with pytest.raises(OSError, match="a bad start"):
            await manager.__aenter__()
        assert plain.calls == ["start", "stop"]
        assert site.subscribed() == {}
        assert "a bad end" in caplog.text

    def test_plain_coordinators_need_no_event_loop_to_start(self) -> None:
        """Nor to be stopped again if one cannot start."""

        class CannotStart(PlainStream):
            def start(self) -> None:
                raise OSError("a bad start")

        plain = PlainStream()
        with pytest.raises(OSError, match="a bad start"):
            CoordinatorsManager(plain, CannotStart()).start()
        assert plain.calls == ["start", "stop"]

    @pytest.mark.parametrize("wrong", [None, "ttl", [PlainStream()], PlainStream])
    def test_the_manager_refuses_an_object_that_is_no_coordinator(self, wrong: Any) -> None:
        """With what it was, and what is allowed."""
        says = r"takes coordinators one by one.*start\(\), stop\(\) and set_route\(route\), not "
        with pytest.raises(ConfigError, match=says):
            CoordinatorsManager(PlainStream(), wrong)
