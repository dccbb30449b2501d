"""G3, G4: the live socket on a real port: what is told to whom, and when."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec
import pytest
from websockets.exceptions import InvalidStatus

from stillfresh import Cache, ConfigError
from stillfresh.gateway.live import Hub, Live
from stillfresh.systems.coordinator import Kind
from stillfresh.systems.waiting.messages import GameStateNews, InvalidatedNews, YourTurnNews
from stillfresh.testing import ManualClock
from tests.kit.engine import until
from tests.kit.live import Start, Upstream, viewing

TOKEN = "t"  # noqa: S105 (of a test)


async def ann_or_bob(token: str) -> str | None:
    return {"a": "ann", "b": "bob"}.get(token)


class TestG3Subscribe:
    async def test_a_subscription_is_answered_at_once(
        self, start: Start, upstream: Upstream
    ) -> None:
        """Loaded if it has to be, from memory if it is there; each message with its fields."""
        _, port = await start()
        async with viewing(port) as first, viewing(port) as second:
            await first.watch("a")
            update = await first.hear()
            assert update["value"]["n"] == 1
            assert set(update) == {"type", "kind", "id", "value", "fetched_at", "verdict", "age"}
            assert (update["type"], update["verdict"]) == ("update", "fresh")
            await second.watch("a", "absent")
            assert [it["type"] for it in await second.hear_all(2)] == ["update", "absent"]
        assert upstream.calls == [["a"], ["absent"]]

    async def test_a_subscribed_viewer_hears_of_changes(
        self, start: Start, hub: Hub, upstream: Upstream
    ) -> None:
        """Until it is not subscribed any more."""
        _, port = await start()
        async with viewing(port) as viewer:
            await viewer.watch("a")
            await viewer.hear()
            upstream.version = 2
            await hub.resource("price").invalidate("a")
            assert (await viewer.hear())["value"]["n"] == 2
            await viewer.say("unsubscribe", items=[["price", "a"], ["price", "never"], ["x", "y"]])
            await viewer.nothing()
            await hub.resource("price").refresh("a")
            await viewer.nothing()

    async def test_a_copy_that_the_client_has_is_not_sent_again(
        self, start: Start, hub: Hub, upstream: Upstream
    ) -> None:
        """After a reconnect a viewer says which copies it has, and is told what it missed."""
        _, port = await start()
        async with viewing(port) as viewer:
            await viewer.watch("a", "b")
            had = {it["id"]: it["fetched_at"] for it in await viewer.hear_all(2)}
        upstream.version = 2
        await hub.resource("price").refresh("b")
        async with viewing(port) as viewer:
            await viewer.say("subscribe", items=[["price", id_, at] for id_, at in had.items()])
            missed = await viewer.hear()
            assert (missed["id"], missed["value"]["n"]) == ("b", 2)
            await viewer.nothing()

    async def test_a_copy_that_the_client_has_is_sent_if_it_is_not_fresh_any_more(
        self, start: Start, hub: Hub, upstream: Upstream
    ) -> None:
        """It is not as good as the viewer thinks."""
        _, port = await start()
        async with viewing(port) as viewer:
            await viewer.watch("a")
            had = (await viewer.hear())["fetched_at"]
        await hub.resource("price").invalidate("a", soft=True)
        upstream.is_down = True
        async with viewing(port) as viewer:
            await viewer.say("subscribe", items=[["price", "a", had]])
            assert (await viewer.hear())["verdict"] == "stale"

    async def test_nothing_is_refreshed_for_hidden_clients(
        self, start: Start, hub: Hub, upstream: Upstream
    ) -> None:
        """And are told what changed when they look again."""
        _, port = await start()
        async with viewing(port) as viewer:
            await viewer.watch("a")
            await viewer.hear()
            await viewer.say("visible", visible=False)
            await viewer.nothing()
            upstream.version = 2
            await hub.resource("price").invalidate("a")
            await viewer.nothing()
            assert len(upstream.calls) == 1
            await viewer.say("visible", visible=True)
            assert (await viewer.hear())["value"]["n"] == 2

    async def test_a_change_of_route_ends_the_subscriptions(self, start: Start) -> None:
        """The first one, and the same one, do not (C8)."""
        live, port = await start()
        async with viewing(port) as viewer:
            await viewer.watch("a")
            await viewer.hear()
            for path, left in (("/", 1), ("/", 1), ("/other", 0)):
                await viewer.say("route", path=path)
                await viewer.nothing()
                assert live.snapshot()["subscriptions"]["price"] == left

    async def test_subscribing_twice_to_an_id_is_one_subscription(self, start: Start) -> None:
        """Twice is once, whatever the kind: a screen shows it or does not."""
        live, port = await start()
        async with viewing(port) as viewer:
            await viewer.watch("a", "a")
            await viewer.watch("a")
            await viewer.say("unsubscribe", items=[["price", "a"]])
            await until(lambda: live.snapshot()["subscriptions"]["price"] == 0)

    async def test_several_messages_may_come_and_go_in_one_frame(self, start: Start) -> None:
        """In their order; and with ?batch=1 the answers come together too."""
        _, port = await start()
        subscribe = {"type": "subscribe", "items": [["word", str(n)] for n in range(20)]}
        async with viewing(port) as viewer:
            await viewer.socket.send(json.dumps([subscribe, {"type": "ping"}]))
            kinds = [it["type"] for it in await viewer.hear_all(21)]
            assert sorted(kinds) == ["pong"] + ["update"] * 20
        async with viewing(port, "/v1/live?batch=1") as viewer:
            await viewer.socket.send(json.dumps(subscribe))
            frames: list[Any] = []
            while len(frames) < 20:
                frame: Any = await viewer.hear()
                assert len(frame) > 1
                frames += frame
            assert {it["value"] for it in frames} == {f"{n} 1" for n in range(20)}


class TestG3Failure:
    async def test_a_failure_is_sent_once_with_the_old_view_if_there_is_one(
        self, start: Start, hub: Hub, upstream: Upstream
    ) -> None:
        """The old view with an error, or an error alone; not again while it goes on failing."""
        _, port = await start()
        async with viewing(port) as viewer:
            await viewer.watch("a")
            await viewer.hear()
            upstream.is_down = True
            await hub.resource("price").invalidate("a")
            left = await viewer.hear()
            assert (left["type"], left["value"]["n"], left["verdict"]) == ("update", 1, "expired")
            assert "secret" not in left["error"]
            await viewer.watch("b")
            failed = await viewer.hear()
            assert (failed["code"], failed["kind"], failed["id"]) == ("load_failed", "price", "b")
            await hub.resource("price").invalidate("a")
            await viewer.nothing()
            upstream.is_down = False
            await hub.resource("price").refresh("a", "b")
            again = {it["id"]: it for it in await viewer.hear_all(2)}
            assert "error" not in again["a"]

    async def test_a_client_that_subscribes_during_a_cooldown_is_told_at_once(
        self, start: Start, upstream: Upstream
    ) -> None:
        """Without a request upstream: it is cooling."""
        _, port = await start()
        upstream.is_down = True
        async with viewing(port) as first, viewing(port) as second:
            await first.watch("a")
            await first.hear()
            calls = len(upstream.calls)
            await second.watch("a")
            assert (await second.hear())["code"] == "load_failed"
            assert len(upstream.calls) == calls


class TestG3SignIn:
    async def test_per_viewer_kinds_need_a_signed_in_viewer(self, start: Start) -> None:
        """A guest is refused; each sees their own; signing out drops them, and nothing else."""
        live, port = await start(authenticate=ann_or_bob)
        async with viewing(port) as viewer:
            await viewer.watch("1", kind="inbox")
            assert (await viewer.hear())["code"] == "sign_in_needed"
            await viewer.watch("w", kind="word")
            await viewer.hear()
            await viewer.sign_in("a")
            welcome = await viewer.hear()
            assert (welcome["viewer_id"], welcome["per_viewer"]) == ("ann", ["inbox"])
            await viewer.watch("1", kind="inbox")
            assert (await viewer.hear())["value"] == "ann's 1"
            await viewer.sign_in("b")
            assert (await viewer.hear())["viewer_id"] == "bob"
            assert live.snapshot()["subscriptions"] == {"price": 0, "word": 1, "inbox": 0}
            await viewer.watch("1", kind="inbox")
            assert (await viewer.hear())["value"] == "bob's 1"
            await viewer.say("sign_out")
            assert (await viewer.hear())["viewer_id"] is None
            assert live.snapshot() == {
                "connections": 1,
                "max_connections": 10_000,
                "signed_in": 0,
                "subscriptions": {"price": 0, "word": 1, "inbox": 0},
            }

    async def test_shared_subscriptions_continue_across_signing_in(
        self, start: Start, hub: Hub, upstream: Upstream
    ) -> None:
        """The subscription stays, nothing is asked for anew, and changes are told."""
        _, port = await start(authenticate=ann_or_bob)
        async with viewing(port) as viewer:
            await viewer.watch("a")
            await viewer.hear()
            await viewer.sign_in("a")
            await viewer.hear()
            assert upstream.calls == [["a"]]
            upstream.version = 2
            await hub.resource("price").refresh("a")
            assert (await viewer.hear())["value"]["n"] == 2

    async def test_without_an_authenticate_hook_signing_in_fails(self, start: Start) -> None:
        """And is told so."""
        _, port = await start()
        async with viewing(port) as viewer:
            await viewer.sign_in("a")
            assert (await viewer.hear())["code"] == "sign_in_failed"

    async def test_ten_wrong_tokens_close_the_connection(self, start: Start) -> None:
        """Ten wrong ones are ten bad messages."""
        _, port = await start(authenticate=ann_or_bob)
        async with viewing(port) as viewer:
            for _ in range(10):
                await viewer.sign_in("wrong")
            heard, code, _ = await viewer.end()
            assert [it["code"] for it in heard] == ["sign_in_failed"] * 10
            assert code == 1008

    @pytest.mark.parametrize("answer", ["raises", "hangs", "a number", "nothing"])
    async def test_a_broken_authenticate_hook_leaves_the_client_a_guest(
        self, start: Start, answer: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Signing in fails, in time, and the connection goes on as a guest's."""
        monkeypatch.setattr("stillfresh.gateway.live.sign_in.SIGN_IN_TIMEOUT", 0.05)

        async def hook(token: str) -> Any:
            if answer == "raises":
                raise ConnectionError(token)
            if answer == "hangs":
                await asyncio.Event().wait()
            return {"a number": 7, "nothing": ""}[answer]

        _, port = await start(authenticate=hook)
        async with viewing(port) as viewer:
            await viewer.sign_in("secret")
            error = await viewer.hear()
            assert error["code"] == "sign_in_unavailable"
            assert "secret" not in error["message"]
            await viewer.nothing()


class TestG3Push:
    async def test_a_push_reaches_every_connection_of_its_viewer_and_no_other(
        self, start: Start
    ) -> None:
        """Typed as the contract of the waiting cache has them."""
        live, port = await start(authenticate=ann_or_bob)
        async with viewing(port) as one, viewing(port) as two, viewing(port) as bob:
            for viewer, token in ((one, "a"), (two, "a"), (bob, "b")):
                await viewer.sign_in(token)
                await viewer.hear()
            assert live.push("ann", YourTurnNews("g", 3)) == 2
            assert live.push("ann", InvalidatedNews()) == 2
            assert live.push("ann", GameStateNews("g", my_turn=True, version=4)) == 2
            for viewer in (one, two):
                assert await viewer.hear_all(3) == [
                    {"type": "your_turn", "game_id": "g", "version": 3},
                    {"type": "long_wait_invalidated"},
                    {"type": "game_state", "game_id": "g", "my_turn": True, "version": 4},
                ]
            await bob.nothing()
            assert live.push("nobody", InvalidatedNews()) == 0
            with pytest.raises(ConfigError, match="push: takes"):
                live.push("ann", "your_turn")  # type: ignore[arg-type]

    async def test_a_push_does_not_reach_a_viewer_that_signed_out_or_left(
        self, start: Start
    ) -> None:
        """Nor after leaving."""
        live, port = await start(authenticate=ann_or_bob)
        async with viewing(port) as viewer:
            await viewer.sign_in("a")
            await viewer.hear()
            await viewer.say("sign_out")
            await viewer.hear()
            assert live.push("ann", InvalidatedNews()) == 0
            await viewer.sign_in("a")
            await viewer.hear()
        await until(lambda: live.push("ann", InvalidatedNews()) == 0)


class Shipped(msgspec.Struct, frozen=True, tag="order_shipped"):
    """An application's own notice."""

    order_id: str
    carrier: str = "post"


class Untagged(msgspec.Struct):
    """Nobody could tell it from others."""


class Faked(msgspec.Struct, tag="update"):
    """A name of the protocol's own."""


class Elsewhere(msgspec.Struct, tag="moved", tag_field="kind"):
    """A client looks for `type`."""


class Listed(msgspec.Struct, tag="listed", array_like=True):
    """A client takes an array for several messages."""


class Routed(msgspec.Struct, tag="routed"):
    """Told apart by a list."""

    stops: list[str]


class TestG3Notices:
    async def test_a_registered_notice_is_pushed_with_its_own_fields(self, start: Start) -> None:
        """Its tag is the message's type, its fields are the message's fields."""
        live, port = await start(authenticate=ann_or_bob)
        live.register(Shipped, newest_of="order_id")
        async with viewing(port) as viewer:
            await viewer.sign_in("a")
            await viewer.hear()
            assert live.push("ann", Shipped("7")) == 1
            told = {"type": "order_shipped", "order_id": "7", "carrier": "post"}
            assert await viewer.hear() == told

    async def test_notices_may_be_told_apart_by_a_field_that_cannot_be_hashed(
        self, start: Start
    ) -> None:
        """Also one that cannot be hashed."""
        live, port = await start(authenticate=ann_or_bob)
        live.register(Routed, newest_of="stops")
        async with viewing(port) as viewer:
            await viewer.sign_in("a")
            await viewer.hear()
            assert live.push("ann", Routed(["a", "b"])) == 1
            assert await viewer.hear() == {"type": "routed", "stops": ["a", "b"]}

    async def test_only_the_newest_notice_of_each_key_is_sent(self, hub: Hub) -> None:
        """By the fields that were named; without any, the newest of the type."""
        sent: dict[tuple[str, ...], list[str]] = {}
        for names in (("order_id",), ()):
            live = Live(hub, authenticate=ann_or_bob, sleep=never)
            live.register(Shipped, newest_of=names)
            inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
            reads, texts = asyncio.Event(), list[str]()
            reads.set()

            async def send(
                message: Any, texts: list[str] = texts, reads: asyncio.Event = reads
            ) -> None:
                texts.append(message.get("text", ""))
                await reads.wait()

            inbox.put_nowait({"type": "websocket.connect"})
            sign_in = json.dumps({"type": "sign_in", "token": "a"})
            inbox.put_nowait({"type": "websocket.receive", "text": sign_in})
            scope: Any = {"type": "websocket", "headers": [], "query_string": b""}
            serving = asyncio.create_task(live(scope, inbox.get, send))
            await until(lambda: live.snapshot()["signed_in"] == 1)  # noqa: B023
            await until(lambda: len(texts) == 3)  # noqa: B023
            reads.clear()
            live.push("ann", Shipped("first"))
            await until(lambda: len(texts) == 4)  # noqa: B023
            for order, carrier in (("1", "a"), ("2", "a"), ("1", "b")):
                live.push("ann", Shipped(order, carrier))
            reads.set()
            inbox.put_nowait({"type": "websocket.disconnect", "code": 1001})
            await serving
            sent[names] = [f"{it['order_id']}{it['carrier']}" for it in map(json.loads, texts[4:])]
        assert sent == {("order_id",): ["2a", "1b"], (): ["1b"]}

    @pytest.mark.parametrize(
        "strange", [Untagged, Faked, Elsewhere, Listed, dict, "your_turn", None]
    )
    async def test_registering_a_type_that_is_not_a_tagged_struct_is_refused(
        self, hub: Hub, strange: Any
    ) -> None:
        """No Struct, none with a tag as its type, and no name of the protocol's own."""
        with pytest.raises(ConfigError, match="register: takes"):
            Live(hub).register(strange)

    async def test_registering_a_notice_by_unknown_fields_is_refused(self, hub: Hub) -> None:
        """Their names are in the error."""
        with pytest.raises(ConfigError, match=r"order_shipped.*no field game_id"):
            Live(hub).register(Shipped, newest_of=["order_id", "game_id"])

    async def test_pushing_an_unregistered_type_is_refused(self, hub: Hub) -> None:
        """The error says what to do."""
        with pytest.raises(ConfigError, match="call register"):
            Live(hub).push("ann", Shipped("7"))


class TestG3Doors:
    async def test_only_named_origins_and_the_own_host_may_connect(self, start: Start) -> None:
        """Pages of this host and of named ones, and who is no browser."""
        _, port = await start(origins=["https://named.example"])
        for origin in (f"http://127.0.0.1:{port}", "https://named.example", None):
            async with viewing(port, origin=origin):
                pass
        for origin in ("https://evil.example", "null", f"https://127.0.0.1:{port + 1}"):
            with pytest.raises(InvalidStatus) as refused:
                async with viewing(port, origin=origin):
                    pass
            assert refused.value.response.status_code == 403

    async def test_connections_beyond_the_limit_get_503(self, start: Start) -> None:
        """The next one is told to come later; a place that is left is given away."""
        live, port = await start(max_connections=2)
        async with viewing(port):
            async with viewing(port):
                with pytest.raises(InvalidStatus) as refused:
                    async with viewing(port):
                        pass
                assert refused.value.response.status_code == 503
            await until(lambda: live.snapshot()["connections"] == 1)
            async with viewing(port):
                pass

    async def test_subscriptions_beyond_the_limit_are_refused_by_name(self, start: Start) -> None:
        """The others stand; each refused one is named; who leaves some may have others."""
        _, port = await start(max_subscriptions=2)
        async with viewing(port) as viewer:
            await viewer.watch("a", "b", "c", kind="word")
            heard = await viewer.hear_all(3)
            refused = [it for it in heard if it["type"] == "error"]
            assert [(it["code"], it["items"]) for it in refused] == [
                ("too_many_subscriptions", [["word", "c"]])
            ]
            await viewer.say("unsubscribe", items=[["word", "a"]])
            await viewer.watch("c", kind="word")
            assert (await viewer.hear())["id"] == "c"

    async def test_one_error_names_all_refused_subscriptions(self, start: Start) -> None:
        """However many: none is dropped in silence, nor the welcome."""
        _, port = await start(max_subscriptions=1)
        async with viewing(port) as viewer:
            await viewer.watch(*(f"p{number}" for number in range(500)), kind="word")
            heard = await viewer.hear_all(2)
            [refused] = [it for it in heard if it["type"] == "error"]
            assert refused["items"] == [["word", f"p{number}"] for number in range(1, 500)]
            await viewer.nothing()

    @pytest.mark.parametrize(
        "options",
        [
            {"max_message": 0},
            {"max_connections": True},
            {"max_subscriptions": "9"},
            {"heartbeat": 0},
            {"patience": "soon"},
            {"origins": "https://a.example"},
        ],
    )
    async def test_a_bad_setting_of_live_is_named(self, hub: Hub, options: dict[str, Any]) -> None:
        """When it is made, not when it is used."""
        with pytest.raises(ConfigError, match=next(iter(options))):
            Live(hub, **options)


class TestG3Heartbeat:
    async def test_silent_clients_are_pinged_and_then_closed(self, start: Start) -> None:
        """Any message is a sign of life."""
        clock = ManualClock()
        live, port = await start(clock=clock, sleep=never, heartbeat=25)
        async with viewing(port) as lively, viewing(port) as dead:
            clock.advance(25)
            live.tick()
            for viewer in (lively, dead):
                assert await viewer.hear() == {"type": "ping"}
            await lively.say("pong")
            await lively.nothing()
            clock.advance(25)
            live.tick()
            assert (await dead.end())[1] == 4408
            assert await lively.hear() == {"type": "ping"}

    async def test_a_ping_is_answered_with_a_pong(self, start: Start) -> None:
        """By either side."""
        _, port = await start()
        async with viewing(port) as viewer:
            await viewer.nothing()


async def never(_: float) -> None:
    """Tests tick themselves."""
    await asyncio.Event().wait()


class TestG3Stats:
    async def test_only_an_operator_may_subscribe_to_the_figures(self, start: Start) -> None:
        """Now and every second, one reading for all; others are refused."""
        taken = 0

        async def stats() -> dict[str, Any]:
            nonlocal taken
            taken += 1
            return {"reads": taken}

        ticks: asyncio.Queue[None] = asyncio.Queue()

        async def sleep(pause: float) -> None:
            if pause == 1:
                await ticks.get()
            else:
                await asyncio.Event().wait()

        _, port = await start(stats=stats, is_operator=lambda _, it: it == TOKEN, sleep=sleep)
        async with viewing(port) as one, viewing(port) as two, viewing(port) as other:
            await one.say("stats", token=TOKEN)
            assert await one.hear() == {"type": "stats", "reads": 1}
            await two.say("stats", token=TOKEN)
            await two.nothing()
            ticks.put_nowait(None)
            for viewer in (one, two):
                assert await viewer.hear() == {"type": "stats", "reads": 2}
            await other.say("stats")
            assert (await other.hear())["code"] == "forbidden"


class TestG3Close:
    async def test_closing_live_tells_every_client_and_leaves_no_task(
        self, start: Start, hub: Hub
    ) -> None:
        """1012: come again; no session and no task stays behind."""
        before = asyncio.all_tasks()
        live, port = await start()
        async with viewing(port) as one, viewing(port) as two:
            await one.watch("a")
            await one.hear()
            await live.close()
            for viewer in (one, two):
                assert (await viewer.end())[1] == 1012
        assert live.snapshot()["connections"] == 0
        assert len(hub) == 0
        names = {str(task.get_coro()) for task in asyncio.all_tasks() - before}
        assert not any("Session" in name or "Live." in name for name in names)

    async def test_a_sign_in_that_ends_after_its_client_left_leaves_no_viewer(
        self, start: Start
    ) -> None:
        """A hook may answer although it was cancelled, as `asyncio.wait_for` can."""
        asked = asyncio.Event()

        async def authenticate(_: str) -> str:
            asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return "ann"

        live, port = await start(authenticate=authenticate)
        async with viewing(port) as viewer:
            await viewer.sign_in("a")
            await asked.wait()
            await live.close()
        assert live.snapshot()["signed_in"] == 0

    async def test_closing_the_cache_closes_its_live_connections(
        self, start: Start, cache: Cache
    ) -> None:
        """Viewers are told, and who comes later is refused."""
        _, port = await start()
        async with viewing(port) as viewer:
            await viewer.watch("a")
            await viewer.hear()
            await cache.close()
            assert (await viewer.end())[1] == 1012
        with pytest.raises(InvalidStatus) as refused:
            async with viewing(port):
                pass
        assert refused.value.response.status_code == 503

    async def test_a_client_that_leaves_ends_its_subscriptions(
        self, start: Start, hub: Hub, upstream: Upstream
    ) -> None:
        """Nothing is refreshed for who has gone."""
        _, port = await start()
        async with viewing(port) as viewer:
            await viewer.watch("a")
            await viewer.hear()
        await until(lambda: len(hub) == 0)
        calls = len(upstream.calls)
        await hub.resource("price").invalidate("a")
        assert len(upstream.calls) == calls


class TestG4OneRefresh:
    async def test_forty_viewers_cause_as_many_requests_as_one(
        self, start: Start, hub: Hub, upstream: Upstream
    ) -> None:
        """Forty viewers of two hundred ids: the same requests upstream as for one."""
        ids = [f"p{number}" for number in range(200)]
        _, port = await start()
        async with viewing(port) as first:
            await first.watch(*ids)
            await first.hear_all(200)
            one = len(upstream.calls)
            async with AsyncExitStack() as stack:
                others = [await stack.enter_async_context(viewing(port)) for _ in range(40)]
                for viewer in others:
                    await viewer.watch(*ids)
                for viewer in others:
                    await viewer.hear_all(200)
                assert len(upstream.calls) == one
                upstream.version = 2
                await hub.resource("price").refresh(*ids)
                for viewer in (first, *others):
                    heard = await viewer.hear_all(200)
                    assert {it["value"]["n"] for it in heard} == {2}
        assert len(upstream.calls) == 2 * one


PRICES = [f"p{number}" for number in range(200)]
SUBSCRIBE = json.dumps({"type": "subscribe", "items": [["price", id_] for id_ in PRICES]})


async def view(live: Live, sent: Callable[[str], None], leave: asyncio.Event) -> None:
    """Watch two hundred ids without a network, until told to leave."""
    scope: Any = {"type": "websocket", "headers": [], "query_string": b"batch=1"}
    messages = iter(
        [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": SUBSCRIBE}]
    )

    async def receive() -> Any:
        for message in messages:
            return message
        await leave.wait()
        return {"type": "websocket.disconnect", "code": 1001}

    async def send(message: Any) -> None:
        if "text" in message:
            sent(message["text"])

    await live(scope, receive, send)


class TestG20Frames:
    async def test_the_news_of_one_moment_are_one_frame_that_is_encoded_once_for_all_viewers(
        self, upstream: Upstream
    ) -> None:
        """Twenty viewers of two hundred ids, which one load refreshes: one frame for each."""
        price = Kind("price", fetch=upstream.price, fresh_for="1h", max_batch=200)
        async with Cache("memory://", clock=ManualClock()) as cache:
            hub = Hub(cache, kinds=[price])
            live = Live(hub, sleep=never)
            leave = asyncio.Event()
            frames: list[str] = []
            viewers = [asyncio.create_task(view(live, frames.append, leave)) for _ in range(20)]
            await until(lambda: "".join(frames).count('"type":"update"') == 20 * 200)
            frames.clear()
            await hub.resource("price").refresh(*PRICES)
            await until(lambda: "".join(frames).count('"type":"update"') == 20 * 200)
            leave.set()
            await asyncio.gather(*viewers)
            await live.close()
        assert [frame.count('"type":"update"') for frame in frames] == [200] * 20
        assert len({id(frame) for frame in frames}) == 1


class TestG20Memory:
    async def test_a_session_with_two_hundred_ids_takes_at_most_28_kib(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Takes at most 28 KiB of ours: 60 KiB with what the server has for a connection."""
        monkeypatch.setattr("stillfresh.gateway.live.outbox.MOST_FRAMES", 1)
        live = Live(hub, sleep=never)
        leave = asyncio.Event()
        updates = 0

        def count(frame: str) -> None:
            nonlocal updates
            updates += frame.count('"type":"update"')

        async def connected(viewers: int) -> list[asyncio.Task[None]]:
            before = updates + 200 * viewers
            connections = [asyncio.create_task(view(live, count, leave)) for _ in range(viewers)]
            await until(lambda: updates == before)
            await hub.resource("price").refresh(*PRICES)
            await until(lambda: updates == before + 200 * live.snapshot()["connections"])
            return connections

        serving, used = list[asyncio.Task[None]](), list[int]()
        tracemalloc.start()
        for _ in range(2):
            serving += await connected(50)
            gc.collect()
            used.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert (used[1] - used[0]) / 50 / 1024 < 28
        leave.set()
        await asyncio.gather(*serving)
        await live.close()
