"""G12: a live session outlives no token: checked every minute, and before anything private."""

import asyncio
import json
from typing import Any

import pytest

from stillfresh.gateway.live import Hub, Live
from stillfresh.systems.waiting.messages import InvalidatedNews, YourTurnNews
from stillfresh.testing import ManualClock
from tests.kit.engine import Sleeper, until
from tests.kit.live import Start, Upstream, Viewer, games, viewing

MINUTE = 60.0
BOUND = 300.0
"""Seconds without a confirmed token after which a viewer is a guest."""
SCOPE: dict[str, Any] = {"type": "websocket", "headers": [], "query_string": b"", "extensions": {}}


class People:
    """An `authenticate` hook: whom a token belongs to, until it is told otherwise."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {"a": "ann", "b": "bob"}
        self.asked: list[str] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.at_once = self.most_at_once = 0

    async def __call__(self, token: str) -> str | None:
        self.asked.append(token)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        found, gate = self.known.get(token), self.gate
        try:
            if gate is not None:
                await gate.wait()
            if self.error is not None:
                raise self.error
            return found
        finally:
            self.at_once -= 1


class Time(ManualClock):
    """What sleeps is woken by `passes`."""

    __slots__ = ("sleep",)

    def __init__(self) -> None:
        super().__init__()
        self.sleep = Sleeper()

    def passes(self, seconds: float) -> None:
        self.advance(seconds)
        self.sleep.wake()


@pytest.fixture
def people() -> People:
    return People()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def live(hub: Hub, people: People, time: Time) -> Live:
    options: dict[str, Any] = {"heartbeat": 3600, "patience": 3600}
    return games(Live(hub, authenticate=people, clock=time, sleep=time.sleep, **options))


async def signed_in(viewer: Viewer, token: str = "a") -> None:  # noqa: S107 (of a test)
    await viewer.sign_in(token)
    assert (await viewer.hear())["viewer_id"] is not None
    await viewer.watch("1", kind="inbox")
    assert "'s 1" in (await viewer.hear())["value"]


async def ended(viewer: Viewer, code: str = "signed_out") -> None:
    error, welcome = await viewer.hear_all(2)
    assert error["code"] == code
    assert error["message"]
    assert (welcome["type"], welcome["viewer_id"]) == ("welcome", None)


async def refreshed(hub: Hub, ids: str, viewer_id: str) -> None:
    """Each letter is an id; they are told at once."""
    await hub.resource("inbox").refresh(*(hub.named("inbox", it, viewer_id)[2] for it in ids))


class TestG12Revoked:
    async def test_a_revoked_token_is_noticed_at_the_next_private_subscription(
        self, start: Start, people: People, hub: Hub, upstream: Upstream
    ) -> None:
        """The viewer is a guest, the new id is refused, and what is for all goes on."""
        live, port = await start(authenticate=people)
        async with viewing(port) as viewer:
            await viewer.watch("w", kind="word")
            await viewer.hear()
            await signed_in(viewer)
            people.known.clear()
            await viewer.watch("2", kind="inbox")
            await ended(viewer)
            assert (await viewer.hear())["code"] == "sign_in_needed"
            assert upstream.inboxes == [("ann", ["1"])]
            await refreshed(hub, "1", "ann")
            await viewer.nothing()
            await hub.resource("word").refresh("w")
            assert (await viewer.hear())["id"] == "w"
            assert live.push("ann", InvalidatedNews()) == 0

    async def test_a_revoked_token_is_noticed_within_a_minute(
        self, start: Start, people: People, time: Time, hub: Hub
    ) -> None:
        """Also of a viewer that says nothing: nothing private is told from then on."""
        live, port = await start(authenticate=people, clock=time, sleep=time.sleep)
        async with viewing(port) as viewer:
            await signed_in(viewer)
            people.known.clear()
            time.passes(MINUTE)
            await until(lambda: live.snapshot()["signed_in"] == 0 or len(people.asked) == 2)
            await refreshed(hub, "1", "ann")
            heard = await viewer.hear()
            while heard["type"] in {"ping", "pong"}:
                heard = await viewer.hear()
            assert heard["code"] == "signed_out"
            assert (await viewer.hear())["viewer_id"] is None
            await viewer.nothing()
            assert live.snapshot()["subscriptions"]["inbox"] == 0

    async def test_a_valid_token_is_checked_once_a_minute(
        self, start: Start, people: People, time: Time, hub: Hub
    ) -> None:
        """And the viewer notices nothing."""
        _, port = await start(authenticate=people, clock=time, sleep=time.sleep, heartbeat=3600)
        async with viewing(port) as viewer:
            await signed_in(viewer)
            before = len(people.asked)
            for minutes in range(1, 8):
                time.passes(MINUTE)
                await until(lambda: len(people.asked) == before + minutes)  # noqa: B023
                await viewer.nothing()
            time.passes(1)
            await viewer.nothing()
            assert len(people.asked) == before + 7
            await refreshed(hub, "1", "ann")
            assert (await viewer.hear())["value"] == "ann's 1"

    async def test_a_token_that_now_names_another_viewer_signs_out(
        self, start: Start, people: People, upstream: Upstream
    ) -> None:
        """Nobody becomes another viewer without signing in."""
        _, port = await start(authenticate=people)
        async with viewing(port) as viewer:
            await signed_in(viewer)
            people.known["a"] = "eve"
            await viewer.watch("2", kind="inbox")
            await ended(viewer)
            await viewer.hear()
            assert {who for who, _ in upstream.inboxes} == {"ann"}

    async def test_signing_in_with_another_token_shows_private_views_again(
        self, start: Start, people: People
    ) -> None:
        """With a token that is good."""
        _, port = await start(authenticate=people)
        async with viewing(port) as viewer:
            await signed_in(viewer)
            del people.known["a"]
            await viewer.watch("2", kind="inbox")
            await ended(viewer)
            await viewer.hear()
            await signed_in(viewer, "b")


class TestG12Waiting:
    """What waits to be sent when a token is found to be revoked."""

    async def test_nothing_private_is_sent_after_a_token_was_revoked(
        self, live: Live, people: People, time: Time, hub: Hub
    ) -> None:
        """Neither views nor notices that waited; what is for all is still told."""
        wire = Wire(live)
        await wire.says("sign_in", token="a")  # noqa: S106 (of a test)
        await wire.says("subscribe", items=[["inbox", "1"], ["inbox", "2"], ["inbox", "3"]])
        await wire.says("subscribe", items=[["price", "p"]])
        await until(lambda: len(wire.of("update")) == 4)
        wire.may_send.clear()
        await refreshed(hub, "123", "ann")
        await until(lambda: wire.is_waiting)
        await hub.resource("price").refresh("p")
        assert live.push("ann", InvalidatedNews()) == 1
        sent = len(wire.sent)
        people.known.clear()
        time.passes(MINUTE)
        await until(lambda: live.snapshot()["signed_in"] == 0)
        wire.may_send.set()
        await until(lambda: wire.of("welcome", sent))
        await hub.resource("price").refresh("p")
        await until(lambda: wire.of("update", sent))
        late = wire.sent[sent:]  # the one before was handed over already
        assert not [it for it in late if "ann" in json.dumps(it)]
        assert not [it for it in late if it["type"] == "long_wait_invalidated"]
        assert {it["kind"] for it in late if it["type"] == "update"} == {"price"}
        await wire.leaves()

    async def test_nothing_private_is_sent_after_signing_out(self, live: Live, hub: Hub) -> None:
        """The same, where the viewer becomes somebody else."""
        wire = Wire(live)
        await wire.says("sign_in", token="a")  # noqa: S106 (of a test)
        await wire.says("subscribe", items=[["inbox", "1"], ["inbox", "2"]])
        await until(lambda: len(wire.of("update")) == 2)
        wire.may_send.clear()
        await refreshed(hub, "12", "ann")
        await until(lambda: wire.is_waiting)
        live.push("ann", InvalidatedNews())
        sent = len(wire.sent)
        await wire.says("sign_in", token="b")  # noqa: S106 (of a test)
        await until(lambda: live.push("bob", InvalidatedNews()))
        wire.may_send.set()
        await until(lambda: wire.of("long_wait_invalidated", sent))
        await wire.leaves()
        late = wire.sent[sent:]
        assert [it["type"] for it in late] == ["welcome", "long_wait_invalidated"]

    async def test_the_remaining_notices_of_a_batch_are_dropped_when_a_token_is_revoked(
        self, live: Live, people: People, time: Time
    ) -> None:
        """The first of them waits for room on the wire; the others are dropped."""
        wire = Wire(live)
        await wire.says("sign_in", token="a")  # noqa: S106 (of a test)
        await until(lambda: len(wire.of("welcome")) == 2)
        wire.may_send.clear()
        for game in "123":
            live.push("ann", YourTurnNews(game, 1))
        await until(lambda: wire.is_waiting)
        people.known.clear()
        time.passes(MINUTE)
        await until(lambda: live.snapshot()["signed_in"] == 0)
        wire.may_send.set()
        await until(lambda: len(wire.of("welcome")) == 3)
        await wire.leaves()
        assert [it["game_id"] for it in wire.of("your_turn")] == ["1"]

    async def test_a_token_revoked_during_a_subscription_shows_only_shared_views(
        self, live: Live, people: People, time: Time, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The connection goes on; what is for all is shown, what is private is not."""
        wire, gate = Wire(live), asyncio.Event()
        await wire.says("sign_in", token="a")  # noqa: S106 (of a test)
        for kind, key in (("word", "w"), ("inbox", hub.named("inbox", "1", "ann")[2])):
            resource = hub.resource(kind)
            await resource.get(key)
            slow = resource.known

            async def known(*given: Any, slow: Any = slow, **named: Any) -> Any:
                await gate.wait()
                return await slow(*given, **named)

            monkeypatch.setattr(resource, "known", known, raising=True)
        await wire.says("subscribe", items=[["word", "w"], ["inbox", "1"]])
        await until(lambda: live.snapshot()["subscriptions"]["inbox"] == 1)
        people.known.clear()
        time.passes(MINUTE)
        await until(lambda: live.snapshot()["signed_in"] == 0)
        gate.set()
        await until(lambda: wire.of("update"))
        await wire.leaves()
        assert [it["id"] for it in wire.of("update")] == ["w"]


class Wire:
    """A viewer that speaks ASGI to `Live`: what is sent waits while it may not be sent."""

    def __init__(self, live: Live) -> None:
        self.sent: list[dict[str, Any]] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.is_waiting = False
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._said.put_nowait({"type": "websocket.connect"})
        self._task = asyncio.create_task(live({**SCOPE}, self._said.get, self._send))

    async def _send(self, message: Any) -> None:
        if message["type"] == "websocket.send":
            self.is_waiting = not self.may_send.is_set()
            self.sent.append(json.loads(message["text"]))
            await self.may_send.wait()

    async def says(self, type_: str, **fields: Any) -> None:
        text = json.dumps({"type": type_, **fields})
        await self._said.put({"type": "websocket.receive", "text": text})

    def of(self, type_: str, since: int = 0) -> list[dict[str, Any]]:
        return [it for it in self.sent[since:] if it["type"] == type_]

    async def leaves(self) -> None:
        await self._said.put({"type": "websocket.disconnect"})
        await self._task


class TestG12Unavailable:
    """The hook fails or takes too long: nobody can say whose the token is."""

    async def test_private_subscriptions_share_one_wait_for_a_hanging_hook(
        self, live: Live, people: People, time: Time
    ) -> None:
        """Forty private ones are refused after one wait, and what is for all is shown."""
        wire, gate = Wire(live), asyncio.Event()
        await wire.says("sign_in", token="a")  # noqa: S106 (of a test)
        await until(lambda: len(wire.of("welcome")) == 2)
        people.gate, people.error = gate, ConnectionError("away")
        for number in range(40):
            await wire.says("subscribe", items=[["inbox", f"{number}"]])
        await wire.says("subscribe", items=[["word", "w"]])
        await until(lambda: people.at_once == 1)
        time.passes(5)
        gate.set()
        await until(lambda: wire.of("update"))
        assert (len(wire.of("error")), len(people.asked)) == (40, 2)
        people.error = None
        time.passes(5)
        await wire.says("subscribe", items=[["inbox", "1"]])
        await until(lambda: len(wire.of("update")) == 2)
        await wire.leaves()

    async def test_viewers_stay_signed_in_for_five_minutes_while_the_hook_fails(
        self, start: Start, people: People, time: Time, hub: Hub
    ) -> None:
        """Until it has not been confirmed for five minutes; one confirmation starts them anew."""
        live, port = await start(
            authenticate=people, clock=time, sleep=time.sleep, heartbeat=3600, patience=3600
        )
        async with viewing(port) as viewer:
            await signed_in(viewer)
            people.error = ConnectionError("away")
            await self._minutes(3, people, time)
            await refreshed(hub, "1", "ann")
            assert (await viewer.hear())["value"] == "ann's 1"
            people.error = None
            await self._minutes(1, people, time)
            people.error = ConnectionError("away")
            await self._minutes(4, people, time)
            await viewer.nothing()
            assert live.snapshot()["signed_in"] == 1
            time.passes(BOUND - 4 * MINUTE)
            await ended(viewer, "sign_in_unavailable")
            await refreshed(hub, "1", "ann")
            await viewer.nothing()

    async def test_a_failing_hook_is_logged_once_for_all_viewers(
        self, live: Live, people: People, time: Time, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Not for each of ten thousand viewers, every minute."""
        wires = [Wire(live) for _ in range(3)]
        for wire in wires:
            await wire.says("sign_in", token="a")  # noqa: S106 (of a test)
        await until(lambda: live.snapshot()["signed_in"] == 3)
        people.error = ConnectionError("away")
        await self._minutes(2, people, time)
        for wire in wires:
            await wire.leaves()
        assert [it.getMessage() for it in caplog.records] == ["authenticate failed"]

    async def _minutes(self, count: int, people: People, time: Time) -> None:
        for _ in range(count):
            asked = len(people.asked)
            time.passes(MINUTE)
            await until(lambda: len(people.asked) > asked and not people.at_once)  # noqa: B023
            for _ in range(10):
                await asyncio.sleep(0)

    @pytest.mark.parametrize("how", ["raises", "hangs", "a number"])
    async def test_new_private_subscriptions_are_refused_while_the_hook_fails(
        self,
        start: Start,
        people: People,
        upstream: Upstream,
        monkeypatch: pytest.MonkeyPatch,
        how: str,
    ) -> None:
        """Refused by name; what was subscribed stays, and so does what is for all."""
        monkeypatch.setattr("stillfresh.gateway.live.sign_in.SIGN_IN_TIMEOUT", 0.05)
        live, port = await start(authenticate=people)
        async with viewing(port) as viewer:
            await signed_in(viewer)
            match how:
                case "raises":
                    people.error = ConnectionError("secret.internal:9")
                case "hangs":
                    people.gate = asyncio.Event()
                case _:
                    people.known["a"] = 7  # type: ignore[assignment]
            await viewer.say("subscribe", items=[["inbox", "2"], ["word", "w"], ["inbox", "3"]])
            error, update = await viewer.hear_all(2)
            assert (error["code"], error["items"]) == (
                "sign_in_unavailable",
                [["inbox", "2"], ["inbox", "3"]],
            )
            assert "secret" not in error["message"]
            assert update["id"] == "w"
            assert live.snapshot()["subscriptions"] == {"price": 0, "word": 1, "inbox": 1}
            assert upstream.inboxes == [("ann", ["1"])]


class TestG12OneCheck:
    async def test_a_session_has_one_token_check_at_a_time(
        self, live: Live, people: People, time: Time
    ) -> None:
        """However often a check is due, and whatever the viewer subscribes to meanwhile."""
        wire = Wire(live)
        await wire.says("sign_in", token="a")  # noqa: S106 (of a test)
        await until(lambda: live.snapshot()["signed_in"] == 1)
        people.gate = asyncio.Event()
        for _ in range(3):
            time.passes(MINUTE)
            await until(lambda: people.at_once == 1)
        await wire.says("subscribe", items=[["inbox", "1"]])
        await wire.says("subscribe", items=[["inbox", "2"]])
        for _ in range(20):
            await asyncio.sleep(0)
        assert people.most_at_once == 1
        people.gate.set()
        await until(lambda: len(wire.of("update")) == 2)
        assert people.most_at_once == 1
        await wire.leaves()

    async def test_a_late_check_of_an_earlier_token_does_not_sign_out(
        self, live: Live, people: People, time: Time
    ) -> None:
        """Its answer comes late, when the viewer is somebody else."""
        wire = Wire(live)
        await wire.says("sign_in", token="a")  # noqa: S106 (of a test)
        await until(lambda: live.snapshot()["signed_in"] == 1)
        people.known.pop("a")
        held = people.gate = asyncio.Event()
        time.passes(MINUTE)
        await until(lambda: people.at_once == 1)
        people.gate = None
        await wire.says("sign_in", token="b")  # noqa: S106 (of a test)
        await until(lambda: live.push("bob", InvalidatedNews()))
        held.set()
        await until(lambda: people.at_once == 0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert [it["viewer_id"] for it in wire.of("welcome")] == [None, "ann", "bob"]
        await wire.leaves()

    async def test_token_checks_of_many_sessions_run_a_hundred_at_a_time(
        self, live: Live, people: People, time: Time
    ) -> None:
        """Every token is asked about, a hundred at a time."""
        wires = [Wire(live) for _ in range(150)]
        for wire in wires:
            await wire.says("sign_in", token="a")  # noqa: S106 (of a test)
        await until(lambda: live.snapshot()["signed_in"] == 150)
        people.most_at_once, before = 0, len(people.asked)
        people.gate = asyncio.Event()
        time.passes(MINUTE)
        await until(lambda: people.at_once == 100)
        people.gate.set()
        await until(lambda: len(people.asked) == before + 150)
        assert people.most_at_once == 100
        for wire in wires:
            await wire.leaves()

    async def test_a_token_check_leaves_no_task_when_its_client_leaves(
        self, live: Live, people: People, time: Time
    ) -> None:
        """Not when the viewer leaves during one, nor when everything closes."""
        before = asyncio.all_tasks()
        leaving, staying = Wire(live), Wire(live)
        for wire in (leaving, staying):
            await wire.says("sign_in", token="a")  # noqa: S106 (of a test)
        await until(lambda: live.snapshot()["signed_in"] == 2)
        people.gate = asyncio.Event()
        time.passes(MINUTE)
        await until(lambda: people.at_once == 2)
        await leaving.leaves()
        await live.close()
        await staying.leaves()
        await until(lambda: asyncio.all_tasks() == before)
        assert people.at_once == 0
        assert len(live.hub) == 0
