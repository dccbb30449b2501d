"""G3: what is a message, what is allowed, and when a connection has ended; no loop, no socket."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillfresh.bounded import MessageRate
from stillfresh.engine import Answer
from stillfresh.engine.model import Origin
from stillfresh.errors import LoadFailed
from stillfresh.freshness import Verdict
from stillfresh.gateway.live.hub import Viewed
from stillfresh.gateway.live.messages import (
    BURST,
    RATE,
    BadMessage,
    OnScreen,
    PingMessage,
    SignOutMessage,
    SubscribeMessage,
    cost_of,
    is_allowed_origin,
    pulse,
    read,
)
from stillfresh.gateway.live.outbox import FULL_FRAME, MOST_FRAMES, Frames, text_of
from stillfresh.http import with_age
from stillfresh.systems.coordinator import Kind
from stillfresh.testing import ManualClock

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner),
)
TYPES = ["subscribe", "unsubscribe", "visible", "route", "at_least", "sign_in", "sign_out"]
TYPES += ["stats", "ping"]


class TestG3Messages:
    def test_a_frame_is_one_message_or_an_array_of_messages(self) -> None:
        """A frame is a message, or an array of them."""
        assert read('{"type":"ping"}') == [PingMessage()]
        assert read('[{"type":"ping"},{"type":"sign_out"}]') == [PingMessage(), SignOutMessage()]
        [message] = read('{"type":"subscribe","items":[["price","a"],["price","b",1.5]]}')
        assert message == SubscribeMessage((OnScreen("price", "a"), OnScreen("price", "b", 1.5)))
        assert cost_of([message]) == 1

    @pytest.mark.parametrize(
        "text",
        [
            None,
            "",
            "rubbish",
            "null",
            "[]",
            "[[]]",
            "{}",
            '{"type":"nope"}',
            '{"type":1}',
            '{"type":"subscribe"}',
            '{"type":"subscribe","items":{}}',
            '{"type":"subscribe","items":["price:a"]}',
            '{"type":"subscribe","items":[["price"]]}',
            '{"type":"subscribe","items":[["price",1]]}',
            '{"type":"subscribe","items":[["price","a","yesterday"]]}',
            '{"type":"subscribe","items":[["price","a",1,2]]}',
            '{"type":"subscribe","items":[],"extra":1}',
            '{"type":"visible","visible":1}',
            '{"type":"route","path":""}',
            '{"type":"sign_in"}',
            '{"type":"sign_in","token":""}',
            '{"type":"ping"} {"type":"ping"}',
            json.dumps([{"type": "ping"}] * 101),
            "[" * 100_000,
            '{"type":"subscribe","items":' + "[" * 5_000 + "]" * 5_000 + "}",
        ],
    )
    def test_text_that_is_no_message_is_refused_with_a_reason(self, text: str | None) -> None:
        """Whatever it is: one error, one sentence."""
        [bad] = read(text)
        assert isinstance(bad, BadMessage)
        assert bad.why.startswith("not a message: ")

    def test_a_bad_message_of_an_array_is_refused_by_itself(self) -> None:
        """A page's path that is too long does not undo what it subscribes."""
        route = {"type": "route", "path": "/" * 3_000}
        items = {"type": "subscribe", "items": [["price", 1]]}
        first, second, third = read(json.dumps([route, {"type": "ping"}, items]))
        assert (second, type(third)) == (PingMessage(), BadMessage)
        assert isinstance(first, BadMessage)
        assert "path" in first.why

    @given(st.text() | JSON.map(json.dumps))
    def test_any_text_is_a_message_or_refused(self, text: str) -> None:
        """Nothing else is ever raised."""
        assert read(text)

    @given(st.sampled_from(TYPES), st.dictionaries(st.sampled_from(["items", "path"]), JSON))
    def test_a_type_with_any_fields_is_a_message_or_refused(
        self, type_: str, fields: dict[str, Any]
    ) -> None:
        """What was accepted can be unpacked: kinds and ids are text."""
        for message in read(json.dumps({"type": type_, **fields})):
            for item in getattr(message, "items", ()):
                assert isinstance(item.kind, str)
                assert isinstance(item.id, str)


class TestG3Pace:
    def test_messages_may_come_in_a_burst_and_then_at_the_rate(self) -> None:
        """A thousand at once, then a hundred a second; time that passes refills it."""
        rate = MessageRate(RATE, BURST, now=0.0)
        assert all(rate.spend(0.0) for _ in range(int(BURST)))
        assert not rate.spend(0.0)
        rate = MessageRate(RATE, BURST, now=0.0)
        assert all(rate.spend(number / RATE) for number in range(3 * int(BURST)))

    def test_a_message_of_many_items_costs_more(self) -> None:
        """A message of many items is worth more than one of one."""
        items = (OnScreen("price", "a"),)
        many = cost_of([SubscribeMessage(items * 20 * int(BURST))])
        assert not MessageRate(RATE, BURST, now=0.0).spend(0.0, many)
        assert cost_of([SubscribeMessage(items * 19)]) == 1
        assert cost_of([SubscribeMessage(items * 20)]) == 2

    def test_a_clock_set_back_does_not_lower_the_message_rate(self) -> None:
        """Only time that passed counts."""
        rate = MessageRate(RATE, BURST, now=100.0)
        assert all(rate.spend(50.0) for _ in range(int(BURST)))


class TestG3Pulse:
    @pytest.mark.parametrize(
        ("heard", "asked", "sending", "now", "expected"),
        [
            (0.0, None, None, 24.9, "fine"),
            (0.0, None, None, 25.0, "ask"),
            (0.0, 25.0, None, 49.9, "fine"),
            (0.0, 25.0, None, 50.0, "gone"),
            (26.0, 25.0, None, 50.0, "fine"),
            (26.0, 25.0, None, 51.0, "ask"),
            (25.0, 25.0, None, 50.0, "ask"),
            (10.0, None, 0.0, 19.9, "fine"),
            (10.0, None, 0.0, 20.0, "gone"),
            (0.0, 25.0, 49.0, 50.0, "fine"),
        ],
    )
    def test_a_silent_client_is_pinged_and_then_gone(
        self, heard: float, asked: float | None, sending: float | None, now: float, expected: str
    ) -> None:
        """Asked after a heartbeat, gone after two; who does not read is gone sooner."""
        since_asked = None if asked is None else now - asked
        since_sent = None if sending is None else now - sending
        assert pulse(now - heard, since_asked, since_sent, 25.0, 20.0) == expected


class TestG3Origin:
    @pytest.mark.parametrize(
        ("origin", "host", "expected"),
        [
            ("", "shop.example", True),
            ("https://shop.example", "shop.example", True),
            ("https://shop.example", "shop.example:443", True),
            ("http://shop.example:8000", "shop.example:8000", True),
            ("http://SHOP.example", "shop.EXAMPLE", True),
            ("http://[::1]:8000", "[::1]:8000", True),
            ("https://named.example", "shop.example", True),
            ("https://evil.example", "shop.example", False),
            ("https://shop.example.evil", "shop.example", False),
            ("http://shop.example:8001", "shop.example:8000", False),
            ("http://shop.example", "shop.example:8000", False),
            ("https://shop.example@evil.example", "shop.example", False),
            ("https://evil@shop.example", "shop.example", False),
            ("https://shop.example/", "shop.example", False),
            ("https://shop.example?query", "shop.example", False),
            ("https://shop.example#part", "shop.example", False),
            ("http://shop.example:0", "shop.example", False),
            ("http://shop.example", "shop.example:0", False),
            ("http://", "", False),
            ("null", "shop.example", False),
            ("file://", "", False),
            ("chrome-extension://shop.example", "shop.example", False),
            ("http://[bad", "shop.example", False),
            ("http://shop.example:port", "shop.example", False),
        ],
    )
    def test_an_origin_is_allowed_if_it_is_the_own_host_or_named(
        self, origin: str, host: str, expected: bool
    ) -> None:
        """Who sends no origin is no browser."""
        assert is_allowed_origin(origin, host, {"https://named.example"}) is expected


def made(value: object, clock: ManualClock, **options: Any) -> Answer[Any]:
    given_ = {
        "found": True,
        "verdict": Verdict.FRESH,
        "fetched_at": clock() - 1.5,
        "origin": Origin.LOADED,
        **options,
    }
    return Answer(value, clock=clock, **given_)


def viewed(id_: str = "a") -> Viewed:
    async def fetch(_: list[str]) -> dict[str, Any]:
        return {}

    return Viewed(Kind("price", fetch=fetch, fresh_for=1), id_, id_)


class TestG4Frames:
    def test_an_update_is_encoded_once_for_all_viewers(self) -> None:
        """The same text, not an equal one, for every viewer of the same copy."""
        clock, price = ManualClock(100.0), viewed()
        answer = made({"n": 1}, clock)
        texts = [text_of(price, answer, 0.0) for _ in range(3)]
        assert texts[0] is texts[1] is texts[2]
        assert json.loads(texts[0]) == {
            "type": "update",
            "kind": "price",
            "id": "a",
            "value": {"n": 1},
            "fetched_at": 98.5,
            "verdict": "fresh",
            "age": 1.5,
        }

    def test_the_age_in_an_update_is_that_of_the_moment_it_is_sent(self) -> None:
        """A copy sent later is older."""
        clock, price = ManualClock(100.0), viewed()
        answer = made(1, clock)
        text_of(price, answer, 0.0)
        clock.advance(10)
        assert json.loads(text_of(price, answer, 10.0))["age"] == 11.5

    def test_the_age_in_an_update_begins_with_the_upstreams(self) -> None:
        """A view with terms from the upstream had an age when it came; it is a dict or a list."""
        clock = ManualClock(100.0)
        updates = [
            json.loads(text_of(viewed(), made(with_age(view, 50.0), clock), 0.0))
            for view in ({"n": 1}, [1, 2], "text")
        ]
        assert [update["value"] for update in updates] == [{"n": 1}, [1, 2], "text"]
        assert [update["age"] for update in updates] == [51.5, 51.5, 1.5]

    def test_a_changed_copy_is_encoded_again(self) -> None:
        """By time, verdict, error or value."""
        clock, price = ManualClock(100.0), viewed()
        same = {"n": 1}
        changes: list[dict[str, Any]] = [
            {},
            {"fetched_at": 1.0},
            {"verdict": Verdict.STALE},
            {"error": LoadFailed("secret")},
        ]
        texts = [text_of(price, made(same, clock, **change), 0.0) for change in changes]
        assert len(set(texts)) == 4
        assert "secret" not in "".join(texts)
        assert "error" in json.loads(texts[3])

    def test_absent_failed_and_unencodable_views_have_their_own_messages(self) -> None:
        """Absent, failed, or no JSON at all."""
        clock, price = ManualClock(100.0), viewed()
        absent = made(None, clock, found=False)
        failed = made(None, clock, found=False, error=LoadFailed("secret"))
        strange = made(object(), clock)
        said = [json.loads(text_of(price, it, 0.0)) for it in (absent, failed, strange)]
        assert said[0] == {"type": "absent", "kind": "price", "id": "a", "fetched_at": 98.5}
        assert [it.get("code") for it in said[1:]] == ["load_failed"] * 2
        assert "secret" not in str(said)

    @given(st.lists(st.integers(1, FULL_FRAME), min_size=1, max_size=8))
    def test_frames_hold_all_updates_in_order(self, sizes: list[int]) -> None:
        """Each is closed as soon as it is full."""
        clock, frames = ManualClock(100.0), Frames()
        waiting = {viewed(str(n)): made("1" * size, clock) for n, size in enumerate(sizes)}
        heard = []
        while waiting:
            text, count = frames.of(waiting, 0.0)
            heard += [len(it["value"]) for it in json.loads(text)]
            held = sum(heard[-count:-1])
            assert held < FULL_FRAME
            for done in list(waiting)[:count]:
                del waiting[done]
        assert heard == sizes


class TestE28Frames:
    def test_viewers_that_are_sent_the_same_share_one_frame(self) -> None:
        """G20: the same text for each, as long as its ages are as good as the same."""
        clock, frames = ManualClock(100.0), Frames()
        news = {viewed(str(n)): made(n, clock) for n in range(3)}
        first, again, late = (frames.of(dict(news), now)[0] for now in (0.0, 0.04, 0.06))
        assert first is again
        assert late is not first
        assert frames.of(dict(list(news.items())[:2]), 0.0)[0] != first

    def test_the_number_of_stored_frames_is_bounded(self) -> None:
        """However many viewers are sent something of their own."""
        clock, frames = ManualClock(100.0), Frames()
        updates = [{viewed(str(number)): made(number, clock)} for number in range(1_000)]
        texts = [frames.of(dict(update), 0.0)[0] for update in updates]
        newest_first = zip(reversed(updates), reversed(texts), strict=True)
        is_stored = [frames.of(dict(update), 0.0)[0] is text for update, text in newest_first]
        assert is_stored.index(False) == MOST_FRAMES
