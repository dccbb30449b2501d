"""C14: many viewers, one refresh; per-viewer kinds by viewer; connections take theirs along."""

import asyncio
import gc
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stillfresh import Answer, Cache, ConfigError, LoadFailed, NotOpen, StillfreshError
from stillfresh.engine.lane import LaneState
from stillfresh.gateway.live import Connection, Hub, HubUpdate
from stillfresh.gateway.live import hub as live_hub
from stillfresh.gateway.live.resources import viewer_key
from stillfresh.systems.coordinator import Kind
from stillfresh.testing import ManualClock
from tests.kit.coordinator import START
from tests.kit.engine import Sleeper, turns, until
from tests.kit.processes import ROOT, command


class Upstream:
    """Prices for all, and inboxes for each."""

    def __init__(self) -> None:
        self.prices: list[list[str]] = []
        self.inboxes: list[tuple[str, list[str]]] = []
        self.version = 1
        self.missing = {"absent"}
        self.failing: set[str] = set()

    async def price(self, ids: list[str]) -> dict[str, int]:
        self.prices.append(ids)
        return {id_: self.version for id_ in ids if id_ not in self.missing}

    async def inbox(self, ids: list[str], viewer_id: str) -> dict[str, str]:
        self.inboxes.append((viewer_id, ids))
        if viewer_id in self.failing:
            raise ConnectionError(viewer_id)
        return {id_: f"{viewer_id}'s {id_}" for id_ in ids}

    def kinds(self) -> list[Kind]:
        return [
            Kind("price", fetch=self.price, fresh_for="30s", max_batch=50, counted=True),
            Kind("inbox", fetch=self.inbox, fresh_for="30s", per_viewer=True),
        ]


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


@pytest.fixture
async def hub(
    tmp_path: Path, clock: ManualClock, sleeper: Sleeper, upstream: Upstream
) -> AsyncIterator[Hub]:
    url = f"sqlite:///{tmp_path}/hub.db"
    async with Cache(url, clock=clock, sleep=sleeper, dice=lambda: 0.0) as cache:
        yield Hub(cache, kinds=upstream.kinds(), max_subscriptions=5)


async def news(connection: AsyncIterator[HubUpdate], count: int = 1) -> dict[str, Any]:
    async with asyncio.timeout(30):
        updates = [await anext(connection) for _ in range(count)]
    return {update.id: update.answer.value for update in updates}


async def passes(sleeper: Sleeper, clock: ManualClock, seconds: float) -> None:
    await turns()
    clock.advance(seconds)
    sleeper.wake()
    await turns()


class TestC14Hub:
    async def test_an_id_of_a_shared_kind_is_refreshed_once_for_all_viewers(
        self, hub: Hub, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """A hundred viewers of one price cost what one costs."""
        connections = [hub.connect(f"viewer-{number}") for number in range(100)]
        for connection in connections:
            connection.subscribe("price", "a")
        for connection in connections:
            assert await news(connection) == {"a": 1}
        upstream.version = 2
        await passes(sleeper, clock, 30)
        for connection in connections:
            assert await news(connection) == {"a": 2}
        assert upstream.prices == [["a"]] * 2
        assert len(hub) == 100

    async def test_views_of_a_per_viewer_kind_go_only_to_their_viewer(
        self, hub: Hub, upstream: Upstream
    ) -> None:
        """Keyed by viewer and id: nobody is shown another's."""
        with hub.connect("ann") as ann, hub.connect("bob") as bob:
            ann.subscribe("inbox", "1")
            bob.subscribe("inbox", "1")
            assert await news(ann) == {"1": "ann's 1"}
            assert await news(bob) == {"1": "bob's 1"}
            assert (await bob.get("inbox", "1")).value == "bob's 1"
        assert sorted(upstream.inboxes) == [("ann", ["1"]), ("bob", ["1"])]

    async def test_one_viewers_failed_fetch_does_not_fail_another_viewers(
        self, hub: Hub, upstream: Upstream
    ) -> None:
        """Although they were asked for together."""
        upstream.failing = {"ann"}
        with hub.connect("ann") as ann, hub.connect("bob") as bob:
            ann.subscribe("inbox", "1")
            bob.subscribe("inbox", "1")
            assert await news(bob) == {"1": "bob's 1"}

    @pytest.mark.parametrize("broken", ["no mapping", "raises at the call", "cancels itself"])
    async def test_one_viewers_malformed_answer_does_not_fail_another_viewers(
        self, tmp_path: Path, broken: str
    ) -> None:
        """Whatever the fetch of one does, the others that were asked for with it have theirs."""

        async def answered(ids: list[str], viewer_id: str) -> Any:
            if viewer_id == "bob":
                return dict.fromkeys(ids, viewer_id)
            if broken == "cancels itself":
                raise asyncio.CancelledError
            return None

        def fetch(ids: list[str], viewer_id: str) -> Awaitable[Any]:
            if viewer_id == "ann" and broken == "raises at the call":
                raise ConnectionError(viewer_id)
            return answered(ids, viewer_id)

        async with Cache(f"sqlite:///{tmp_path}/broken.db") as cache:
            hub = Hub(cache, kinds=[Kind("inbox", fetch=fetch, fresh_for="30s", per_viewer=True)])
            with hub.connect("ann") as ann, hub.connect("bob") as bob:
                ann.subscribe("inbox", "1")
                bob.subscribe("inbox", "1")
                assert await news(bob) == {"1": "bob"}
                with pytest.raises(LoadFailed):
                    await ann.get("inbox", "1")

    async def test_a_guest_may_subscribe_to_shared_kinds_only(self, hub: Hub) -> None:
        """And at nothing that differs by viewer."""
        with hub.connect() as guest:
            guest.subscribe("price", "a")
            assert await news(guest) == {"a": 1}
            with pytest.raises(ConfigError, match="sign in first"):
                guest.subscribe("inbox", "1")

    async def test_a_view_may_be_read_without_a_connection(
        self, hub: Hub, upstream: Upstream
    ) -> None:
        """One or many, as that viewer sees them; a guest's are those for all."""
        one = await hub.get("inbox", "a", "ann")
        many = await hub.get_many("price", ["a", "absent"])
        assert one.value == "ann's a"
        assert {id_: answer.found for id_, answer in many.items()} == {"a": True, "absent": False}
        with pytest.raises(ConfigError, match="sign in"):
            await hub.get("inbox", "a")
        with pytest.raises(ConfigError, match="not declared"):
            await hub.get_many("cost", [])
        assert (len(hub), upstream.inboxes) == (0, [("ann", ["a"])])

    async def test_each_kind_has_its_own_stale_for_and_absent_for(
        self, clock: ManualClock, upstream: Upstream
    ) -> None:
        """How long it is served stale, and how long absence is believed."""
        terms: dict[str, Any] = {"fresh_for": 10, "stale_for": 5, "error_for": 0, "absent_for": 3}
        async with Cache("memory://", clock=clock) as cache:
            hub = Hub(cache, kinds=[Kind("price", fetch=upstream.price, **terms)])
            await hub.get_many("price", ["a", "absent"])
            clock.advance(4)
            await hub.get("price", "absent")
            assert upstream.prices == [["a", "absent"], ["absent"]]
            clock.advance(12)
            upstream.version = 2
            assert (await hub.get("price", "a")).value == 2

    async def test_subscriptions_end_with_the_connection(
        self, hub: Hub, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """Nothing is refreshed for who has gone; iterating comes to its end."""
        with hub.connect("ann") as ann:
            ann.subscribe("price", "a")
            await news(ann)
        assert len(hub) == 0
        await passes(sleeper, clock, 3600)
        assert len(upstream.prices) == 1
        assert [update async for update in ann] == []
        with pytest.raises(NotOpen):
            ann.subscribe("price", "a")

    async def test_an_id_stays_subscribed_until_each_of_its_subscriptions_has_ended(
        self, hub: Hub
    ) -> None:
        """As many unsubscribes as subscribes; unknown ones change nothing."""
        with hub.connect("ann") as ann:
            ann.subscribe("price", "a")
            ann.subscribe("price", "a")
            ann.subscribe("inbox", "1")
            ann.subscribe("inbox", "1")
            assert ann.subscribed == {("price", "a"): 2, ("inbox", "1"): 1}
            for _ in range(2):
                ann.unsubscribe("price", "a")
                ann.unsubscribe("price", "unknown")
            assert ann.subscribed == {("inbox", "1"): 1}
            ann.reset()
            assert ann.subscribed == {}

    async def test_nothing_is_refreshed_for_a_hidden_viewer(
        self, hub: Hub, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """Their subscriptions stay, and are refreshed when they look again."""
        with hub.connect("ann", visible=False) as ann:
            ann.subscribe("price", "a")
            await turns()
            assert upstream.prices == []
            ann.set_visible(True)
            assert await news(ann) == {"a": 1}
            ann.set_visible(False)
            await passes(sleeper, clock, 31)
            assert len(upstream.prices) == 1
            ann.set_visible(True)
            await news(ann)
            assert len(upstream.prices) == 2

    async def test_a_viewer_hears_of_changes_while_it_was_hidden(
        self, hub: Hub, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """By others' refreshes, however long it stays fresh; what did not change is no news."""
        with hub.connect("ann") as ann, hub.connect("bob") as bob:
            for viewer in (ann, bob):
                viewer.subscribe("price", "a")
                viewer.subscribe("inbox", "1")
            for viewer in (ann, bob):
                await news(viewer, 2)
            ann.set_visible(False)
            upstream.version = 2
            await passes(sleeper, clock, 30)
            assert (await news(bob, 2))["a"] == 2
            ann.set_visible(True)
            assert (await news(ann, 2)) == {"a": 2, "1": "ann's 1"}
            for _ in range(2):
                ann.set_visible(False)
                ann.set_visible(True)
                await turns()
            ann.close()
            assert [update async for update in ann] == []
        assert len(upstream.prices) == 2

    async def test_a_viewer_hears_of_another_process_refresh_while_it_was_hidden(
        self, tmp_path: Path, upstream: Upstream, clock: ManualClock
    ) -> None:
        """It is read again from the store, not loaded again; also if it was never told."""
        url = f"sqlite:///{tmp_path}/shared.db"
        async with Cache(url, clock=clock) as here, Cache(url, clock=clock) as there:
            hub, other = (Hub(cache, kinds=upstream.kinds()) for cache in (here, there))
            with hub.connect("ann") as ann, hub.connect(visible=False) as guest:
                ann.subscribe("price", "a")
                guest.subscribe("price", "a")
                await news(ann)
                ann.set_visible(False)
                upstream.version = 2
                await other.resource("price").refresh("a")
                ann.set_visible(True)
                assert await news(ann) == {"a": 2}
                guest.set_visible(True)
                assert await news(guest) == {"a": 2}
        assert len(upstream.prices) == 2

    async def test_a_copy_read_while_hidden_is_not_sent_again(
        self, hub: Hub, upstream: Upstream
    ) -> None:
        """The viewer has it; and who hides, leaves or closes in the middle is told nothing."""
        with hub.connect("ann", visible=False) as ann:
            ann.subscribe("price", "a")
            assert (await ann.get("price", "a")).value == 1
            ann.set_visible(True)
            await turns()
            ann.subscribe("inbox", "1")
            await news(ann)
            ann.set_visible(False)
            await hub.resource("inbox").refresh('["ann","1"]')
            ann.set_visible(True)
            ann.unsubscribe("inbox", "1")
            ann.set_visible(False)
            ann.set_visible(True)
        await turns()
        assert [update async for update in ann] == []
        assert upstream.prices == [["a"]]

    async def test_a_viewer_hears_that_an_id_is_absent(self, hub: Hub) -> None:
        """`found` is False."""
        with hub.connect() as guest:
            guest.subscribe("price", "absent")
            assert not (await anext(guest)).answer.found

    async def test_a_viewer_hears_only_once_that_an_id_is_absent(
        self, hub: Hub, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """That it is still so is no news, also not to who looks again; to who comes it is."""
        with hub.connect() as guest:
            guest.subscribe("price", "absent")
            assert not (await anext(guest)).answer.found
            lane = hub.resource("price").core.watcher.lane
            for count in (2, 3, 4):
                await until(lambda: lane.state("absent") is LaneState.WAITING)
                clock.advance(31)
                while len(upstream.prices) < count:
                    sleeper.wake()
                    await asyncio.sleep(0)
            await until(lambda: lane.state("absent") is LaneState.WAITING)
            with hub.connect() as another:
                another.subscribe("price", "absent")
                assert not (await anext(another)).answer.found
            guest.set_visible(False)
            guest.set_visible(True)
            await turns()
            assert guest.take(10) == []

    async def test_an_absence_is_forgotten_when_the_last_visible_viewer_hides(
        self, hub: Hub, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """Nobody watches the item then, and it may come back: the next viewer is told what is."""
        with hub.connect("ann") as ann, hub.connect("bob") as bob:
            ann.subscribe("price", "absent")
            assert not (await anext(ann)).answer.found
            ann.set_visible(False)
            upstream.missing = set()
            await passes(sleeper, clock, 3600)
            bob.subscribe("price", "absent")
            assert await news(bob) == {"absent": 1}
            ann.set_visible(True)
            assert await news(ann) == {"absent": 1}
            assert upstream.prices == [["absent"]] * 2

    async def test_bad_kinds_bad_ids_and_too_many_subscriptions_are_refused(
        self, hub: Hub, tmp_path: Path
    ) -> None:
        """An unknown kind, a bad id, too many subscriptions, a limit of nothing."""
        with hub.connect("ann") as ann:
            with pytest.raises(ConfigError, match="not declared"):
                ann.subscribe("post", "a:1")
            with pytest.raises(ConfigError, match="empty"):
                ann.subscribe("price", "")
            for number in range(5):
                ann.subscribe("price", str(number))
            with pytest.raises(StillfreshError, match="5 subscriptions, the most"):
                ann.subscribe("price", "5")
            ann.subscribe("price", "0")
        cache = Cache(f"sqlite:///{tmp_path}/other.db")
        with pytest.raises(ConfigError, match="max_subscriptions"):
            Hub(cache, kinds=[], max_subscriptions=0)
        with pytest.raises(ConfigError, match="viewer_id"):
            hub.connect("")

    async def test_a_refused_id_is_not_subscribed(self, hub: Hub) -> None:
        """Whether the viewer looks or not; looking again later goes well."""
        for visible in (True, False):
            with hub.connect("ann", visible=visible) as ann:
                for kind in ("price", "inbox"):
                    for bad in (b"x", 5, None, ["a"], "", "\ud800", "x" * 1_000_001):
                        with pytest.raises(ConfigError):
                            ann.subscribe(kind, bad)  # type: ignore[arg-type]
                with pytest.raises(ConfigError, match="allowed"):
                    ann.subscribe("inbox", "x" * 999_999)
                assert ann.subscribed == {}
                ann.set_visible(not visible)
                ann.set_visible(True)

    def test_connecting_outside_an_event_loop_is_refused(self, tmp_path: Path) -> None:
        """Refused before it is noted."""
        hub = Hub(Cache(f"sqlite:///{tmp_path}/none.db"), kinds=Upstream().kinds())
        with pytest.raises(StillfreshError, match="running event loop"):
            hub.connect("ann")
        assert len(hub) == 0

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_hub_outlives_its_event_loop(self, upstream: Upstream) -> None:
        """Connections of a loop that was closed are over; others come on the next one."""
        self.outlive_loops(upstream)
        gc.collect()  # asyncio complains here about the tasks of the closed loops, in no other test

    def outlive_loops(self, upstream: Upstream) -> None:
        hub = Hub(Cache("memory://"), kinds=upstream.kinds())
        left: list[Connection] = []

        async def look() -> dict[str, Any]:
            left.append(hub.connect())
            left[-1].subscribe("price", "a")
            await hub.resource("price").refresh("a")
            return await news(left[-1])

        for _ in range(2):
            loop = asyncio.new_event_loop()  # closed without a word to what runs on it
            assert loop.run_until_complete(look()) == {"a": 1}
            loop.close()
        assert (len(hub), hub.subscriptions["price"], left[0].is_open) == (1, 1, False)
        left[0].close()
        assert len(hub) == 1

    async def test_viewers_ids_and_kinds_that_are_not_text_are_refused(self, hub: Hub) -> None:
        """Viewers, ids and kinds, wherever they are named."""
        bad: Any
        for bad in (5, b"ann", ["x"], True):
            with pytest.raises(ConfigError, match="viewer_id"):
                hub.connect(bad)
        with hub.connect("ann") as ann:
            for bad in (5, b"a", ["a"], None):
                with pytest.raises(ConfigError, match="price"):
                    ann.unsubscribe("price", bad)
                with pytest.raises(ConfigError, match="price"):
                    await ann.get("price", bad)
                with pytest.raises(ConfigError, match="not declared"):
                    ann.subscribe(bad, "a")
        assert len(hub) == 0

    def test_bad_kinds_are_refused_before_any_kind_is_declared(self, upstream: Upstream) -> None:
        """None, a text, something else among them, two of one name."""
        cache, (price, inbox) = Cache("memory://"), upstream.kinds()
        bad_kinds: list[tuple[Any, str]] = [
            (None, "takes a list of Kind"),
            ("price", "takes a list of Kind"),
            ("", "takes a list of Kind"),
            (price, "takes a list of Kind"),
            ([price, "x"], "takes a list of Kind"),
            ([price, inbox, price], "two are named 'price'"),
        ]
        for kinds, message in bad_kinds:
            with pytest.raises(ConfigError, match=message):
                Hub(cache, kinds=kinds)
        assert Hub(cache, kinds=iter([price, inbox])).kinds == ("price", "inbox")

    async def test_closing_the_cache_ends_the_connections(
        self, tmp_path: Path, upstream: Upstream
    ) -> None:
        """Whoever iterates comes to the end, and no task is left."""
        async with Cache(f"sqlite:///{tmp_path}/closing.db", clock=ManualClock(START)) as cache:
            hub = Hub(cache, kinds=upstream.kinds())
            ann = hub.connect("ann")
            ann.subscribe("price", "a")
            await news(ann)
            guest = hub.connect()
        assert [update async for update in ann] == []
        assert [update async for update in guest] == []
        assert len(hub) == 0
        with pytest.raises(NotOpen):
            hub.connect()
        assert len(asyncio.all_tasks()) == 1


async def comes(is_so: Callable[[], object]) -> None:
    """What must come to be, soon."""
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0)


class TestC14Take:
    async def test_a_listener_is_called_once_and_takes_the_newest_of_each_id(
        self, hub: Hub, upstream: Upstream
    ) -> None:
        """A listener is told once, and takes the newest of each, some at a time."""
        told: list[None] = []
        with hub.connect(tell=lambda: told.append(None)) as connection:
            for id_ in ("a", "b", "c"):
                connection.subscribe("price", id_)
            await comes(lambda: len(connection.waiting) == 3)
            assert len(told) == 1
            upstream.version = 2
            await hub.resource("price").refresh("a")
            await turns()
            first = connection.take(2)
            taken = {update.id: update.answer.value for update in first + connection.take(2)}
            assert len(first) == 2
            assert taken == {"a": 2, "b": 1, "c": 1}
            assert connection.take(2) == []

    async def test_a_viewer_that_returns_with_unread_news_gets_the_newest_copy(
        self, hub: Hub, upstream: Upstream, clock: ManualClock
    ) -> None:
        """Hidden with news unread, and shown again: the newest is read, not what waited."""
        with hub.connect() as connection:
            connection.subscribe("price", "a")
            await comes(lambda: connection.waiting)
            connection.set_visible(False)
            upstream.version = 2
            clock.advance(1)
            await hub.resource("price").refresh("a")
            await turns()
            connection.set_visible(True)
            await comes(lambda: [it.value for it in connection.waiting.values()] == [2])
            assert [update.answer.value for update in connection.take(2)] == [2]

    async def test_unsubscribing_after_close_takes_nothing_from_other_viewers(
        self, hub: Hub
    ) -> None:
        """Unsubscribed afterwards, it takes nothing from the viewers that are still here."""
        ann, bob = hub.connect("ann"), hub.connect("bob")
        for connection in (ann, bob):
            connection.subscribe("price", "a")
        assert await news(bob) == {"a": 1}
        await comes(lambda: ann.waiting)
        ann.close()
        assert [update.id async for update in ann] == ["a"]
        assert ann.subscribed == {}
        ann.unsubscribe("price", "a")
        assert hub.subscriptions["price"] == 1
        await hub.resource("price").refresh("a")
        assert await news(bob) == {"a": 1}
        bob.close()

    async def test_a_listener_that_raises_is_logged_and_others_are_called(
        self, hub: Hub, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is logged, and the others are told."""
        told: list[None] = []
        with hub.connect(tell=lambda: 1 / 0) as one, hub.connect(tell=lambda: told.append(None)):
            one.subscribe("price", "a")
            await comes(lambda: one.waiting)
            await turns()
            with hub.connect(tell=lambda: told.append(None)) as other:
                other.subscribe("price", "b")
                await comes(lambda: told)
        assert "ZeroDivisionError" in caplog.text

    async def test_a_new_viewer_gets_stored_copies_that_it_does_not_have(self, hub: Hub) -> None:
        """Without a load; not the copy that the viewer has, and not what is not subscribed."""
        fetched_at = (await hub.get("price", "a")).fetched_at
        await hub.get("price", "b")
        with hub.connect() as connection:
            for id_ in ("a", "b", "new"):
                connection.subscribe("price", id_)
            had = {"a": fetched_at, "b": None, "new": None, "no": None}
            for id_, since in had.items():
                connection.read_present(hub.find("price", id_, None), since)
            assert await news(connection, 2) == {"b": 1, "new": 1}
            assert connection.take(9) == []

    async def test_take_returns_a_failure_once_with_the_view_that_is_left(
        self, hub: Hub, upstream: Upstream
    ) -> None:
        """Once for a row of them, with the view that is left."""
        with hub.connect("ann") as ann:
            ann.subscribe("inbox", "1")
            assert await news(ann) == {"1": "ann's 1"}
            upstream.failing = {"ann"}
            for _ in range(2):
                await hub.resource("inbox").invalidate(viewer_key("ann", "1"))
                await comes(lambda: ann.waiting)
            await turns()
            [failed] = ann.take(9)
            assert failed.answer.value == "ann's 1"
            assert failed.answer.error is not None
            upstream.failing = set()
            await hub.resource("inbox").refresh(viewer_key("ann", "1"))
            await turns()
            [well] = ann.take(9)
            assert well.answer.error is None

    async def test_a_viewer_that_returns_during_a_retry_is_not_told_the_failure_twice(
        self, hub: Hub, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """E31: it has not ended, so it is no news when the retry fails too."""
        with hub.connect("ann") as ann:
            ann.subscribe("inbox", "1")
            assert await news(ann) == {"1": "ann's 1"}
            upstream.failing = {"ann"}
            await passes(sleeper, clock, 31)
            await comes(lambda: ann.waiting)
            [failed] = ann.take(9)
            assert failed.answer.error is not None
            ann.set_visible(False)
            await passes(sleeper, clock, 2)
            ann.set_visible(True)
            inbox = hub.resource("inbox").core
            await comes(lambda: len(upstream.inboxes) == 3 and not inbox.loads.under_way)
            await passes(sleeper, clock, 0)
            assert ann.take(9) == []

    async def test_a_connection_does_not_hold_the_exception_of_a_failure(
        self, hub: Hub, upstream: Upstream, clock: ManualClock, sleeper: Sleeper
    ) -> None:
        """E30: it lives as long as its viewer, and an exception holds the frames of the load."""
        with hub.connect("ann") as ann:
            ann.subscribe("inbox", "1")
            assert await news(ann) == {"1": "ann's 1"}
            upstream.failing = {"ann"}
            await passes(sleeper, clock, 31)
            await comes(lambda: ann.waiting)
            [failed] = ann.take(9)
            await ann.get("inbox", "1")
            kept = [failed.answer, *ann._last_sent.values()]
            ann.read_present(hub.find("inbox", "1", "ann"))
            await comes(lambda: ann.waiting)
            kept += ann.waiting.values()
            errors = [it.error for it in kept if isinstance(it, Answer)]
            assert [str(it).endswith("ConnectionError: ann") for it in errors] == [True] * 3
            assert [it.__cause__ for it in errors if it is not None] == [None] * 3

    async def test_iterating_a_connection_passes_over_failures(
        self, hub: Hub, upstream: Upstream
    ) -> None:
        """A failure is passed over, and takes no view away that was not seen yet."""
        with hub.connect("ann") as ann:
            ann.subscribe("inbox", "1")
            await comes(lambda: ann.waiting)
            upstream.failing = {"ann"}
            await hub.resource("inbox").invalidate(viewer_key("ann", "1"))
            await comes(lambda: len(upstream.inboxes) == 2)
            await turns()
            assert await news(ann) == {"1": "ann's 1"}
            upstream.failing = set()
            seen = asyncio.ensure_future(anext(ann))
            await hub.resource("inbox").refresh(viewer_key("ann", "1"))
            assert (await seen).answer.error is None

    async def test_becoming_another_viewer_keeps_shared_subscriptions_only(
        self, hub: Hub, upstream: Upstream
    ) -> None:
        """A viewer that signs in keeps what is for all, and its news; nothing of another's."""
        with hub.connect("ann") as viewer:
            viewer.subscribe("price", "a")
            viewer.subscribe("price", "a")
            viewer.subscribe("inbox", "1")
            await comes(lambda: len(viewer.waiting) == 2)
            viewer.become("bob")
            assert viewer.subscribed == {("price", "a"): 2}
            assert [(it.kind, it.answer.value) for it in viewer.take(9)] == [("price", 1)]
            upstream.version = 2
            await hub.resource("price").refresh("a")
            await turns()
            assert [it.answer.value for it in viewer.take(9)] == [2]
        assert hub.subscriptions == {"price": 0, "inbox": 0}

    async def test_becoming_another_viewer_while_catching_up_shows_nothing_private(
        self, hub: Hub, upstream: Upstream
    ) -> None:
        """What changed while nobody looked is told to the new viewer; nothing private is."""
        with hub.connect("ann") as viewer:
            viewer.subscribe("price", "a")
            viewer.subscribe("inbox", "1")
            await news(viewer, 2)
            viewer.set_visible(False)
            upstream.version = 2
            await hub.resource("price").refresh("a")
            await hub.resource("inbox").refresh(viewer_key("ann", "1"))
            viewer.set_visible(True)
            viewer.become("bob")
            assert await news(viewer) == {"a": 2}
            await turns()
            assert viewer.take(9) == []


class TestE28Viewers:
    async def test_a_viewer_is_told_the_news_of_one_moment_at_once(self, hub: Hub) -> None:
        """However many ids it looks at, and however many look at them."""
        told: list[int] = []
        ids = [f"p{number}" for number in range(5)]

        def connected() -> Connection:
            connection = hub.connect(tell=lambda: told.append(len(connection.waiting)))
            return connection

        viewers = [connected() for _ in range(120)]
        for viewer in viewers:
            for id_ in ids:
                viewer.subscribe("price", id_)
        await comes(lambda: len(told) == 120)
        assert told == [5] * 120
        for viewer in viewers:
            viewer.close()

    @pytest.mark.parametrize("most_compared", [1_000, 100])
    async def test_no_turn_of_the_event_loop_serves_too_many_viewers(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch, most_compared: int
    ) -> None:
        """So many viewers are found, and so many told, in a turn; others run in between (G24)."""
        monkeypatch.setattr(live_hub, "COMPARED", most_compared)
        monkeypatch.setattr(live_hub, "GATHERED", 0)
        monkeypatch.setattr(live_hub, "FOUND", 40)
        monkeypatch.setattr(live_hub, "TOLD", 7)
        turn, told = 0, dict[int, int]()

        def tell() -> None:
            told[turn] = told.get(turn, 0) + 1

        viewers = [hub.connect(tell=tell) for _ in range(30)]
        for viewer in viewers:
            for number in range(5):
                viewer.subscribe("price", f"p{number}")
        while not hub._coming:
            await asyncio.sleep(0)
        while hub._spreading is not None and not hub._spreading.done():
            turn += 1
            await asyncio.sleep(0)
        assert list(told.values()) == [7, 7, 7, 7, 2]
        # 120 viewers can be compared. 150 are too many, and are found in turns of 60 before.
        assert min(told) == (2 if most_compared == 1_000 else 4)
        for viewer in viewers:
            viewer.close()


class TestG24DifferentIds:
    async def test_each_viewer_gets_the_news_of_its_own_ids_once_for_a_moment(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is collected is what is sent: no viewer is looked at for ids of others."""
        sizes: list[int] = []
        push_copies = Connection.push_copies

        def counted(connection: Connection, copies: Any, *, is_shared: bool) -> None:
            sizes.append(len(copies))
            push_copies(connection, copies, is_shared=is_shared)

        monkeypatch.setattr(Connection, "push_copies", counted)
        viewers = [hub.connect() for _ in range(20)]
        for number, viewer in enumerate(viewers):
            viewer.subscribe("price", f"p{number}")
            viewer.subscribe("price", f"p{(number + 1) % 20}")
        await comes(lambda: all(viewer.waiting for viewer in viewers))
        assert sizes == [2] * 20
        for number, viewer in enumerate(viewers):
            ids = {update.id for update in viewer.take(9)}
            assert ids == {f"p{number}", f"p{(number + 1) % 20}"}
            viewer.close()

    async def test_an_id_that_is_subscribed_while_news_are_collected_is_not_lost(
        self, hub: Hub, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also if the collection has passed the id already, and other news wait for the viewer."""
        monkeypatch.setattr(live_hub, "FOUND", 1)
        viewers = [hub.connect() for _ in range(5)]
        bob = viewers[0]
        bob.subscribe("price", "first")
        viewers[1].subscribe("price", "second")
        later = [f"p{number}" for number in range(15)]  # looked at in 15 turns of the loop
        for number, id_ in enumerate(later):
            viewers[2 + number % 3].subscribe("price", id_)
        ids = ["first", "second", *later]
        await comes(lambda: sum(len(viewer.waiting) for viewer in viewers) == len(ids))
        bob.take(9)
        upstream.version = 2
        await hub.resource("price").refresh_many(ids)
        second = hub.find("price", "second", None)
        while bob not in hub._untold or second in hub._moment:
            await asyncio.sleep(0)
        bob.subscribe("price", "second")
        bob.read_present(second)
        seen: dict[str, Any] = {}
        while len(seen) < 2:
            await asyncio.sleep(0)
            seen |= {update.id: update.answer.value for update in bob.take(9)}
        assert seen == {"first": 2, "second": 2}
        for viewer in viewers:
            viewer.close()

    async def test_a_viewer_gets_nothing_that_it_unsubscribed_while_news_were_collected(
        self, hub: Hub, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(live_hub, "FOUND", 1)
        with hub.connect() as ann, hub.connect() as bob:
            for id_ in ("a", "b", "c"):
                ann.subscribe("price", id_)
            bob.subscribe("price", "c")
            await comes(lambda: len(ann.waiting) == 3 and bob.waiting)
            ann.take(9)
            upstream.version = 2
            await hub.resource("price").refresh_many(["a", "b", "c"])
            while not (hub._moment and "a" not in {viewed.id for viewed in hub._moment}):
                await asyncio.sleep(0)
            ann.unsubscribe("price", "a")
            await comes(lambda: ann.waiting)
            assert {update.id for update in ann.take(9)} == {"b", "c"}


class TestC14Processes:
    def test_processes_on_one_store_fetch_each_copy_once(self, tmp_path: Path) -> None:
        """Four real processes watch the same ids on one file: each copy is fetched once."""
        workers = [
            subprocess.Popen(
                command("hub", tmp_path / "hub.db", tmp_path / "loads"),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(4)
        ]
        try:
            for worker in workers:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "ready\n"
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.flush()
            told = [worker.communicate(timeout=60)[0].split() for worker in workers]
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGKILL)
                worker.wait(timeout=30)
        assert [sorted(lines) for lines in told] == [["a", "b"]] * 4
        assert sorted((tmp_path / "loads").read_text().split()) == ["a", "b"]
