"""G3: against rubbish, floods, huge messages and readers that do not read, all is bounded."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stillfresh.gateway.live import Hub, Live
from stillfresh.gateway.live.messages import BURST, ErrorMessage, PongMessage
from stillfresh.gateway.live.outbox import MOST, Frames, Outbox
from stillfresh.testing import ManualClock
from tests.kit.engine import until
from tests.kit.examples import examples
from tests.kit.live import Start, Upstream, handshaken, never, sent_raw, viewing

pytestmark = pytest.mark.usefixtures("nothing_logged")


class TestG3BadMessages:
    async def test_the_tenth_bad_message_closes_the_connection(self, start: Start) -> None:
        """Each has its error; nine are forgiven, and good ones between them change nothing."""
        _, port = await start()
        bad: list[str | bytes] = ["rubbish", b"\x00binary", "[" * 50_000, '{"type":"nope"}', "5"]
        async with viewing(port) as viewer:
            for message in (bad * 2)[:9]:
                await viewer.socket.send(message)
                assert (await viewer.hear())["code"] == "bad_message"
                await viewer.nothing()
            await viewer.socket.send("the tenth")
            heard, code, reason = await viewer.end()
            assert [it["code"] for it in heard] == ["bad_message"]
            assert (code, reason) == (1008, "too many bad messages")

    async def test_unknown_kinds_and_bad_ids_are_named_and_good_items_are_done(
        self, start: Start
    ) -> None:
        """Each says which, cut at a sane length; what is right in the same message is done."""
        _, port = await start()
        items = [
            ["nope", "1"],
            ["nope", "2"],
            ["word", ""],
            ["word", "x" * 1_001],
            ["word", "a\nb"],
            ["word", "a\u0085b"],
            ["word", "a\u2028b"],
            ["word", "\u00a0right\u200d"],
            ["n" * 5_000, "1"],
        ]
        async with viewing(port) as viewer:
            await viewer.socket.send(json.dumps({"type": "subscribe", "items": items}))
            heard = await viewer.hear_all(8)
            codes = sorted(it.get("code", it["type"]) for it in heard)
            assert codes == ["bad_id"] * 5 + ["unknown_kind"] * 2 + ["update"]
            assert all(len(json.dumps(it)) < 1_000 for it in heard)

    async def test_a_message_that_is_too_long_closes_with_1009(self, start: Start) -> None:
        """1009, whatever is in it."""
        _, port = await start(max_message=1_000)
        async with viewing(port) as viewer:
            await viewer.socket.send(" " * 1_001)
            assert (await viewer.end())[1] == 1009
        async with viewing(port) as viewer:
            await viewer.socket.send("é" * 501)
            assert (await viewer.end())[1:] == (1009, "a message has at most 1,000 bytes")

    async def test_a_flood_of_messages_closes_the_connection(self, start: Start) -> None:
        """Past the burst, and so soon, it is over; fast scrolling is far below."""
        clock = ManualClock()
        _, port = await start(clock=clock, sleep=never)
        async with viewing(port) as viewer:
            for _ in range(60 * 60):
                clock.advance(1 / 60)
            for _ in range(int(BURST) + 1):
                await viewer.say("pong")
            heard, code, _ = await viewer.end()
            assert [it["code"] for it in heard] == ["flood"]
            assert code == 1008

    async def test_a_minute_of_scrolling_is_no_flood(self, start: Start) -> None:
        """Sixty messages a second that swap twenty items each."""
        clock = ManualClock()
        live, port = await start(clock=clock, sleep=never)
        async with viewing(port) as viewer:
            for frame in range(60 * 60):
                clock.advance(1 / 60)
                swap = {"type": "unsubscribe", "items": [["price", str(frame)]] * 19}
                await viewer.socket.send(json.dumps(swap))
                if frame % 60 == 0:
                    await viewer.nothing()
            await viewer.nothing()
            assert live.snapshot()["connections"] == 1

    @settings(max_examples=examples(20), suppress_health_check=list(HealthCheck))
    @given(
        st.lists(
            st.one_of(
                st.text(max_size=50),
                st.binary(max_size=50),
                st.fixed_dictionaries(
                    {"type": st.sampled_from(["subscribe", "unsubscribe"])},
                    optional={
                        "items": st.lists(
                            st.tuples(
                                st.sampled_from(["price", "word", "inbox", "x"]),
                                st.sampled_from(["a", "b", "absent", ""]),
                            ),
                            max_size=5,
                        )
                    },
                ).map(json.dumps),
                st.sampled_from(
                    [
                        '{"type":"visible","visible":false}',
                        '{"type":"visible","visible":true}',
                        '{"type":"route","path":"/a"}',
                        '{"type":"route","path":"/b"}',
                        '{"type":"sign_in","token":"ann"}',
                        '{"type":"sign_out"}',
                        '{"type":"ping"}',
                    ]
                ),
            ),
            max_size=30,
        )
    )
    async def test_any_history_of_messages_is_answered_or_closed(
        self, hub: Hub, messages: list[str | bytes]
    ) -> None:
        """Answered or closed, never broken; and nothing is left behind."""
        live = Live(hub, authenticate=lambda token: token, sleep=never)
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        inbox.put_nowait({"type": "websocket.connect"})
        for message in messages:
            field = "text" if isinstance(message, str) else "bytes"
            inbox.put_nowait({"type": "websocket.receive", field: message})
        inbox.put_nowait({"type": "websocket.disconnect", "code": 1001})
        scope = {"type": "websocket", "headers": [], "query_string": b""}
        async with asyncio.timeout(30):
            await live(scope, inbox.get, send)
        assert sent[0] == {"type": "websocket.accept"}
        for frame in sent[1:]:
            assert frame["type"] in {"websocket.send", "websocket.close"}
        codes = [it["code"] for it in sent if it["type"] == "websocket.close"]
        assert set(codes) <= {1008}
        assert len(hub) == 0
        await live.close()


class TestG3SlowReaders:
    async def test_a_slow_reader_gets_only_the_newest_version(
        self, hub: Hub, upstream: Upstream
    ) -> None:
        """A hundred versions while it does not read: one more is waiting for it, the last."""
        live = Live(hub, sleep=never)
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        reads = asyncio.Event()
        reads.set()
        heard: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            await reads.wait()
            if message["type"] == "websocket.send":
                heard.append(json.loads(message["text"]))

        scope: Any = {"type": "websocket", "headers": [], "query_string": b""}
        serving = asyncio.create_task(live(scope, inbox.get, send))
        inbox.put_nowait({"type": "websocket.connect"})
        subscribe = {"type": "subscribe", "items": [["price", "a"]]}
        inbox.put_nowait({"type": "websocket.receive", "text": json.dumps(subscribe)})
        await until(lambda: len(heard) == 2)
        reads.clear()
        for version in range(2, 102):
            upstream.version = version
            await hub.resource("price").refresh("a")
            await asyncio.sleep(0)
        reads.set()
        await until(lambda: heard[-1]["value"]["n"] == 101)
        assert len(heard) <= 4
        inbox.put_nowait({"type": "websocket.disconnect", "code": 1001})
        await serving
        await live.close()

    async def test_a_socket_that_never_reads_is_closed(
        self, start: Start, hub: Hub, upstream: Upstream
    ) -> None:
        """When it has left what was sent unread for too long; what waits is bounded till then."""
        clock, upstream.padding = ManualClock(), "x" * 50_000
        live, port = await start(clock=clock, sleep=never, patience=20)
        raw = await handshaken(port)
        try:
            ids = [f"p{number}" for number in range(100)]
            items = [["word", id_] for id_ in ids]
            await sent_raw(raw, {"type": "subscribe", "items": items})
            await until(lambda: live.snapshot()["subscriptions"]["word"] == 100)
            [session] = live._sessions
            while session._sending_since is None:
                await hub.resource("word").refresh(*ids)
                await asyncio.sleep(0.01)
            for _ in range(20):
                await hub.resource("word").refresh(*ids)
            assert len(session.connection.waiting) <= 100
            clock.advance(20)
            live.tick()
            await until(lambda: live.snapshot()["connections"] == 0)
            assert len(hub) == 0
        finally:
            raw.close()

    async def test_a_half_open_connection_is_closed_after_two_heartbeats(
        self, start: Start, hub: Hub
    ) -> None:
        """It answers no ping: after two heartbeats its subscriptions are gone."""
        clock = ManualClock()
        live, port = await start(clock=clock, sleep=never)
        raw = await handshaken(port)
        try:
            await sent_raw(raw, {"type": "subscribe", "items": [["price", "a"]]})
            await until(lambda: live.snapshot()["subscriptions"]["price"] == 1)
            for _ in range(2):
                clock.advance(25)
                live.tick()
                await asyncio.sleep(0)
            await until(lambda: live.snapshot()["connections"] == 0)
            assert len(hub) == 0
        finally:
            raw.close()

    async def test_closing_live_does_not_wait_for_a_client_that_does_not_read(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They have a moment, and no more."""
        monkeypatch.setattr("stillfresh.gateway.live.app.GRACE", 0.05)
        monkeypatch.setattr("stillfresh.gateway.live.session.CLOSING", 0.05)
        live = Live(hub, sleep=never)
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        stuck = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] != "websocket.accept":
                stuck.set()
                await asyncio.Event().wait()

        scope: Any = {"type": "websocket", "headers": [], "query_string": b""}
        serving = asyncio.create_task(live(scope, inbox.get, send))
        inbox.put_nowait({"type": "websocket.connect"})
        await stuck.wait()
        async with asyncio.timeout(30):
            await live.close()
            await serving
        assert len(hub) == 0

    @pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("after websocket.close")])
    async def test_a_session_ends_if_the_server_has_closed_its_socket(
        self, hub: Hub, error: Exception
    ) -> None:
        """However it says so, the session ends, and nothing is left of it."""
        live = Live(hub, sleep=never)
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        inbox.put_nowait({"type": "websocket.connect"})

        async def send(message: Any) -> None:
            if message["type"] != "websocket.accept":
                raise error

        scope: Any = {"type": "websocket", "headers": [], "query_string": b""}
        async with asyncio.timeout(30):
            await live(scope, inbox.get, send)
        assert len(hub) == 0
        await live.close()

    async def test_a_cancelled_session_leaves_no_connection_and_no_task(self, hub: Hub) -> None:
        """Before it was accepted, or later: the hub forgets it, and no task is left."""
        for last in ("websocket.accept", "websocket.send"):
            live = Live(hub, sleep=never)
            inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
            inbox.put_nowait({"type": "websocket.connect"})
            arrived = asyncio.Event()

            async def send(
                message: Any, last: str = last, arrived: asyncio.Event = arrived
            ) -> None:
                if message["type"] == last:
                    arrived.set()
                    await asyncio.Event().wait()

            scope: Any = {"type": "websocket", "headers": [], "query_string": b""}
            before = asyncio.all_tasks()
            serving = asyncio.create_task(live(scope, inbox.get, send))
            await arrived.wait()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            assert len(hub) == 0
            await live.close()
            assert asyncio.all_tasks() == before

    async def test_the_messages_waiting_for_a_viewer_are_bounded(self, hub: Hub) -> None:
        """Pongs: so many; notices: the newest of each key, and so many."""
        outbox = Outbox(Frames(), batches_frames=False)
        for _ in range(1_000):
            outbox.put("beats", PongMessage())
        error, replies, notices = ErrorMessage("bad_message", ""), MOST["replies"], MOST["notices"]
        assert all(outbox.put("replies", error) for _ in range(replies))
        assert not outbox.put("replies", error)
        for version in range(1_000):
            assert outbox.put("notices", f"version {version}", "same")
        assert all(outbox.put("notices", "1", f"g{n}") for n in range(notices - 1))
        assert not outbox.put("notices", "1", "one too many")
        with hub.connect() as connection:
            texts = list(iter(lambda: outbox.frame(connection, 0.0), None))
        assert len(texts) == replies + MOST["beats"] + notices
        assert texts[replies + MOST["beats"]] == "version 999"

    async def test_replies_are_sent_before_updates(self, hub: Hub) -> None:
        """Nor does the end, however much is new."""
        outbox = Outbox(Frames(), batches_frames=False)
        with hub.connect() as connection:
            for number in range(200):
                connection.subscribe("word", str(number))
            await until(lambda: len(connection.waiting) == 200)

            def next_type() -> str:
                return str(json.loads(outbox.frame(connection, 0.0) or "{}")["type"])

            assert next_type() == "update"
            outbox.put("beats", PongMessage())
            assert [next_type(), next_type()] == ["pong", "update"]
            outbox.is_ending = True
            assert outbox.frame(connection, 0.0) is None

    async def test_a_client_that_reads_slowly_counts_as_alive(self, hub: Hub) -> None:
        """What it reads late is a sign of life, though it never says a word."""
        clock, sent = ManualClock(), 0
        live = Live(hub, clock=clock, sleep=never)
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def send(message: Any) -> None:
            nonlocal sent
            await asyncio.sleep(0)
            if message["type"] == "websocket.send":
                sent += 1
                clock.advance(10)

        scope: Any = {"type": "websocket", "headers": [], "query_string": b""}
        serving = asyncio.create_task(live(scope, inbox.get, send))
        inbox.put_nowait({"type": "websocket.connect"})
        subscribe = {"type": "subscribe", "items": [["word", str(n)] for n in range(30)]}
        inbox.put_nowait({"type": "websocket.receive", "text": json.dumps(subscribe)})
        while sent < 31:
            await asyncio.sleep(0)
            live.tick()
        assert live.snapshot()["connections"] == 1
        inbox.put_nowait({"type": "websocket.disconnect", "code": 1001})
        await serving
        await live.close()
