"""TtlCoordinator: refreshes the items on screen in batches, with one tick for all.

It may tick while it is started, a viewer is signed in, and the page is visible. There is one timer
for everything and none per item. Each kind is a `Track`, a driver that runs at each tick.

Only one tick runs at a time. The next one is planned when it ends, so a slow tick delays the next
one and never overlaps it. What happens during a tick (a sign-in, a page that becomes visible) sets
`_tick_again`: then the next tick follows at once.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, Self

from stillfresh.checks import checked_flag, checked_function
from stillfresh.clock import Clock, checked_clock
from stillfresh.durations import Duration, seconds
from stillfresh.engine.keys import checked_id
from stillfresh.engine.rules import stamped
from stillfresh.errors import ConfigError, StillfreshError, shown
from stillfresh.systems.coordinator.config import POST, USER, Kind, TtlConfig, TtlSnapshot
from stillfresh.systems.coordinator.controller import TtlController
from stillfresh.systems.coordinator.rules import kept_fresh
from stillfresh.systems.coordinator.track import Track

LEAST_PATIENCE: Final = 1.0
"""Seconds for cancelled work to end."""

logger = logging.getLogger(__name__)


class TtlCoordinator:
    """Refreshes what is on screen, in batches: `async with TtlCoordinator(controller) as ttl:`.

    `config` are the settings, from the environment by default. `visible` is asked before each tick
    whether the page is visible. `follow_reposts` also fetches the posts that posts repost.
    `counted` counts the subscriptions of a post; otherwise the first unsubscription ends them all.
    `grace` is how long `stop` waits for the batch in flight.
    """

    def __init__(
        self,
        controller: TtlController,
        config: TtlConfig | None = None,
        *,
        kinds: Iterable[Kind] = (),
        counted: bool = False,
        visible: Callable[[], bool] | None = None,
        follow_reposts: bool = False,
        clock: Clock | None = None,
        grace: Duration = "5s",
    ) -> None:
        _check("controller", controller, TtlController)
        checked_flag("follow_reposts", follow_reposts)
        if visible is not None:
            checked_function("visible", visible, "a function that says whether")
        self._controller = controller
        self._config = TtlConfig.from_env() if config is None else config
        _check("config", self._config, TtlConfig)
        self._counted = checked_flag("counted", counted)
        self._asks_visible = visible
        self._grace = seconds(grace, name="grace")
        self._tracks = controller.tracks
        self._crowded: set[str] = set()
        """Kinds for which it has logged that more are subscribed than it can keep fresh."""
        self._is_started = False
        self._is_visible = False
        self._knows_visibility = visible is not None
        """Visibility was set, or its absence was logged."""
        self._has_said_not_started = False
        self._viewer: str | None = None
        self._route: str | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._tick_again = False
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick: float | None = None
        self.on_updated = controller.on_updated
        self.on_absent = controller.on_absent
        controller.coordinate(
            kinds, self._config, controller.clock if clock is None else checked_clock(clock)
        )
        if POST in self._tracks:
            self._tracks[POST].follows_reposts = follow_reposts

    def start(self) -> None:
        """Start: tick at once, and then at every interval. A second call changes nothing."""
        asyncio.get_running_loop()
        if not self._is_started:
            self._is_started = True
            self._tick_now()

    async def stop(self) -> None:
        """Stop: forget the subscriptions, and wait for the batch in flight, at most `grace`."""
        self._is_started = False
        self.reset()
        self._disarm()
        running = self._ticking
        if running is None:
            return
        try:
            _, late = await asyncio.wait([running], timeout=self._grace)
        except asyncio.CancelledError:
            self._drop()
            running.cancel()
            raise
        if late:
            self._drop()
            _, late = await asyncio.wait([running], timeout=LEAST_PATIENCE)
        if late:  # it waits for another process, whose load cannot be dropped from here
            running.cancel()
            await asyncio.wait([running], timeout=LEAST_PATIENCE)

    def _drop(self) -> None:
        """Wait for requests no longer, whether or not they can be cancelled."""
        for track in self._tracks.values():
            track.session.drop()

    def sign_in(self, viewer_id: str) -> None:
        """Sign a viewer in: ticks resume, and everything subscribed is due."""
        if checked_id("viewer_id", viewer_id) == self._viewer:
            return
        if self._viewer is not None:
            self.sign_out()
        self._viewer = viewer_id
        self._controller.begin_session(viewer_id)
        for track in self._tracks.values():
            track.lane.recheck()
        self._tick_now()

    def sign_out(self) -> None:
        """Sign the viewer out: ticks stop, and the viewer's requests in flight are dropped."""
        self._controller.begin_session(None)
        if self._viewer is not None:
            self._viewer = None
            self.reset()
            self._disarm()

    def set_visible(self, visible: bool) -> None:
        """Show or hide the page. Showing ticks at once; hiding keeps the subscriptions."""
        was_visible = self._is_visible
        self._is_visible = bool(visible)
        self._knows_visibility = True
        if self._is_visible and not was_visible:
            self._tick_now()

    def set_route(self, route: str) -> None:
        """Tell the coordinator the page's path. A new path resets the subscriptions."""
        previous = self._route
        self._route = checked_id("route", route)
        if previous not in {None, route}:
            self.reset()

    def reset(self) -> None:
        """Forget subscriptions, counts and queues. A batch in flight is still stored."""
        for track in self._tracks.values():
            track.lane.reset()

    def configure(self, config: TtlConfig | None = None, **changes: Any) -> None:  # noqa: ANN401
        """Change settings while it runs. Raises ConfigError for one that cannot be used."""
        old = self._config
        config = old if config is None else config
        _check("config", config, TtlConfig)
        try:
            self._config = replace(config, **changes)
        except TypeError as exc:
            raise ConfigError(f"configure: {exc}") from None
        self._controller.configure(self._config)
        self._crowded.clear()
        if self._config.batch_interval_ms != old.batch_interval_ms and self._timer is not None:
            is_due = self._timer.when() <= asyncio.get_running_loop().time()
            self._arm(0 if is_due else None)
        if self._is_open() and self._config.refresh_when_hidden and not old.refresh_when_hidden:
            self._tick_now()

    def subscribe_post(self, composite_post_id: str, *, counted: bool | None = None) -> None:
        """Keep a post fresh: `author:post`, on screen from now on."""
        self.subscribe(POST, composite_post_id, counted=counted)

    def unsubscribe_post(self, composite_post_id: str) -> None:
        """Stop keeping a post fresh."""
        self.unsubscribe(POST, composite_post_id)

    def subscribe_user(self, pubky: str) -> None:
        """Keep a user fresh. Each call counts."""
        self.subscribe(USER, pubky)

    def unsubscribe_user(self, pubky: str) -> None:
        """Stop keeping a user fresh, once every subscriber has left."""
        self.unsubscribe(USER, pubky)

    def subscribe(self, kind: str, id: str, *, counted: bool | None = None) -> None:  # noqa: A002
        """Keep an item of any kind fresh: a later tick fetches it if it is stale."""
        track = self._controller.track(kind)
        if counted is None:
            counted = track.kind.counted or (kind == POST and self._counted)
        self._controller.checked_item(kind, id)
        is_new = track.lane.subscribe(id, counted=counted)
        if is_new and self._viewer is not None and self._controller.database.is_open:
            track.note(track.times([id]))

    def unsubscribe(self, kind: str, id: str) -> None:  # noqa: A002 (as it is called)
        """Stop keeping an item fresh. An unknown one changes nothing."""
        track = self._controller.track(kind)
        track.lane.unsubscribe(self._controller.checked_item(kind, id))

    def snapshot(self) -> TtlSnapshot:
        """Return what is subscribed, queued, in flight and cooling, and the requests made."""
        now = stamped(self._controller.clock())
        lanes = {name: track.lane for name, track in self._tracks.items()}
        requests_made = sum(track.requests for track in self._tracks.values())
        ids_requested = sum(track.requested for track in self._tracks.values())
        return TtlSnapshot(
            subscribed={name: lane.subscribed for name, lane in lanes.items()},
            queued={name: tuple(lane.queued) for name, lane in lanes.items()},
            in_flight={name: tuple(lane.in_flight) for name, lane in lanes.items()},
            cooling={name: lane.cooling(now) for name, lane in lanes.items()},
            last_tick=self._last_tick,
            requests_made=requests_made,
            requests_saved=ids_requested - requests_made,
        )

    async def tick(self) -> None:
        """Fetch what is due now. Callers at the same time share one tick.

        It does nothing unless the coordinator is started, signed in and visible.
        """
        if self._ticking is None:
            if not self._is_started:
                self._say_not_started()
                return
            if not self._is_open():
                self._say_hidden()
                return
            self._begin_tick()
        running = self._ticking
        if running is not None:
            await asyncio.wait([running])
            if not running.cancelled():
                running.result()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _is_open(self) -> bool:
        """True if it may tick; asks `visible`."""
        if not self._is_started or self._viewer is None:
            return False
        return self._config.refresh_when_hidden or self._can_be_seen()

    def _can_be_seen(self) -> bool:
        if self._asks_visible is None:
            return self._is_visible
        try:
            return bool(self._asks_visible())
        except Exception:
            logger.exception("visible= failed; the coordinator counts as hidden")
            return False

    def _tick_now(self) -> None:
        """Tick at once, or as soon as the running tick ends."""
        self._tick_again = self._ticking is not None
        if self._ticking is None:
            self._arm(0 if self._knows_visibility or self._is_open() else None)

    def _arm(self, after: float | None = None) -> None:
        """One timer, also while hidden, because `visible` may have to be asked again."""
        self._disarm()
        if self._is_started and self._viewer is not None:
            pause = self._config.batch_interval_ms / 1000 if after is None else after
            self._timer = asyncio.get_running_loop().call_later(pause, self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._is_open():
            self._begin_tick()
        else:
            self._say_hidden()
            self._arm()

    def _say_not_started(self) -> None:
        """Log once. Only a tick by hand comes here, and its caller expects a refresh."""
        if not self._has_said_not_started:
            self._has_said_not_started = True
            logger.warning(
                "nothing is refreshed: the coordinator is not started; call start(), "
                "or use it with `async with`"
            )

    def _say_hidden(self) -> None:
        """Log once, if something would be refreshed and visibility was never set."""
        is_only_hidden = self._is_started and self._viewer is not None
        if not is_only_hidden or self._knows_visibility:
            return
        if any(len(track.lane) for track in self._tracks.values()):
            self._knows_visibility = True
            logger.warning(
                "nothing is refreshed: the coordinator was never told whether it is visible; "
                "call set_visible(True), or give TtlCoordinator a visible= function"
            )

    def _begin_tick(self) -> None:
        self._disarm()
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick(), name="stillfresh-tick")
            self._ticking.add_done_callback(self._end_tick)

    def _end_tick(self, tick: "asyncio.Task[None]") -> None:
        """Log the error, if any, and plan the next tick."""
        if self._ticking is not tick:
            return
        self._ticking = None
        if tick.done() and not tick.cancelled() and (error := tick.exception()) is not None:
            logger.error("the tick failed; the next one tries again", exc_info=error)
        is_wanted_now = self._tick_again
        self._tick_again = False
        self._arm(0 if is_wanted_now else None)

    async def _tick(self) -> None:
        began = self._controller.clock()
        try:
            await self._controller.prepare()
            changes = await self._controller.database.changes()
        except StillfreshError as exc:
            logger.warning("nothing is refreshed while the database is unavailable: %s", exc)
            return
        self._last_tick = began
        batches = self._config.max_batches_per_tick
        async with asyncio.TaskGroup() as group:
            for name, track in self._tracks.items():
                track.lane.recheck(None if changes is None else changes.get(name, ()))
                self._say_crowded(track)
                group.create_task(track.tick(track.kind.max_batch, batches, self._is_open))

    def _say_crowded(self, track: Track) -> None:
        """Log once for a kind, if more ids are subscribed than can be kept fresh."""
        name = track.kind.name
        most = kept_fresh(track.kind, self._config)
        if len(track.lane) > most and name not in self._crowded:
            self._crowded.add(name)
            logger.warning(
                "%s: %d are subscribed, and only %d can be kept fresh; "
                "raise MAX_BATCHES_PER_TICK, the batch size or the TTL",
                name,
                len(track.lane),
                most,
            )


def _check(name: str, given: object, of: type) -> None:
    if not isinstance(given, of):
        raise ConfigError(f"{name}: takes a {of.__name__}, not {shown(given)}")
