"""T5: anything over a gateway's WebSocket: frames of any kind, between good ones.

Each is answered as documented or closes the connection with a documented code; what was subscribed
before is still told, and who comes next finds everything working.
"""

import asyncio
import json
import logging
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stillfresh.gateway import gateway
from stillfresh.gateway.app import Gateway
from stillfresh.gateway.live.messages import Code
from stillfresh.systems.coordinator import Kind
from tests.kit.examples import examples

FEW = settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))

CODES = set(get_args(Code))
CLOSES = {1008, 1009}
"""What a viewer can bring about here; 1011 would be a mistake of ours."""
ANSWERS = {"welcome", "update", "absent", "error", "pong"}
TYPES = ["subscribe", "unsubscribe", "visible", "route", "sign_in", "sign_out", "stats", "ping"]
MOST_BAD = 10

TEXTS = st.text(max_size=12) | st.sampled_from(
    ["", "\0", "a" * 2_000, "post", "own", "é", "\u2028"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ITEMS = st.lists(
    st.tuples(st.sampled_from(["post", "own", "x"]), TEXTS)
    | st.tuples(st.just("post"), TEXTS, st.floats() | st.integers())
    | JSON,
    max_size=4,
)
FIELDS = {"items": ITEMS, "visible": JSON, "path": TEXTS | JSON, "token": TEXTS | JSON, "x": JSON}
NEAR = st.fixed_dictionaries({"type": st.sampled_from(TYPES) | JSON}, optional=FIELDS)
"""A message, or nearly one."""
ODD: list[str | bytes] = [
    "",
    b"",
    "[" * 50_000,
    '{"type":"subscribe","items":' + "[" * 50_000,
    "[" * 500 + "]" * 500,
    "[" + '{"type":"ping"},' * 100 + '{"type":"ping"}]',
    '{"type":"subscribe","items":[["post","\\ud800"]]}',
    '{"type":"subscribe","items":[["post","a",1e999]]}',
    '{"type":"subscribe","items":[["post","a",' + "9" * 5_000 + "]]}",
    '{"type":"ping","type":"pong"}',
    "\ufeff[]",
    "\ud800",
    '{"type":"sign_in","token":"\ud800"}',
    "é" * 70_000,
    b"\xff" * 140_000,
    "null",
    "NaN",
    '[{"type":"ping"},{"type":"nope"},5]',
    json.dumps({"type": "x" * 100_000}),
    json.dumps({"type": "ping", "y" * 100_000: 1}),
]
FRAMES = (
    st.text(max_size=40)
    | st.binary(max_size=40)
    | st.sampled_from(ODD)
    | (JSON | NEAR | st.lists(NEAR, max_size=3)).map(json.dumps)
)


class World:
    """An upstream of versions, and the gateway over it."""

    def __init__(self) -> None:
        self.version = 1
        kinds = [
            Kind("post", fetch=self._fetch, fresh_for="1h"),
            Kind("own", fetch=self._fetch, fresh_for="1h", per_viewer=True),
        ]
        self.app = gateway(kinds=kinds, authenticate=lambda token: token)

    async def _fetch(self, ids: list[str]) -> dict[str, Any]:
        return {id_: {"id": id_, "version": self.version} for id_ in ids}


class Socket:
    """A viewer, as a server hands it over."""

    def __init__(self, app: Gateway, query: bytes = b"") -> None:
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.heard: list[dict[str, Any]] = []
        self.code: int | None = None
        self._news = asyncio.Event()
        scope = {
            "type": "websocket",
            "path": "/v1/live",
            "raw_path": b"/v1/live",
            "query_string": query,
            "root_path": "",
            "scheme": "ws",
            "headers": [(b"host", b"site.test")],
            "client": ("10.1.1.1", 5),
            "server": ("10.1.1.2", 80),
            "subprotocols": [],
            "extensions": {},
        }
        self._inbox.put_nowait({"type": "websocket.connect"})
        self.serving = asyncio.ensure_future(app(scope, self._inbox.get, self._send))
        self.serving.add_done_callback(lambda _: self._news.set())

    async def _send(self, message: Any) -> None:
        match message["type"]:
            case "websocket.send":
                said = json.loads(message["text"])
                self.heard.extend(said if isinstance(said, list) else [said])
            case "websocket.close":
                self.code = message["code"]
            case other:
                assert other == "websocket.accept"
        self._news.set()

    def say(self, frame: str | bytes) -> None:
        field = "text" if isinstance(frame, str) else "bytes"
        self._inbox.put_nowait({"type": "websocket.receive", field: frame})

    async def until(self, type_: str, **fields: Any) -> bool:
        """False: it was closed before."""
        while not any(self._is(it, type_, fields) for it in self.heard):
            if self.serving.done():
                return False
            self._news.clear()
            await self._news.wait()
        return True

    def _is(self, message: dict[str, Any], type_: str, fields: dict[str, Any]) -> bool:
        return message["type"] == type_ and all(message.get(it) == fields[it] for it in fields)

    async def leave(self) -> None:
        self._inbox.put_nowait({"type": "websocket.disconnect", "code": 1001})
        await self.serving


def watch(id_: str) -> str:
    return json.dumps({"type": "subscribe", "items": [["post", id_]]})


async def told(world: World, frames: list[str | bytes], query: bytes) -> None:
    viewer = Socket(world.app, query)
    viewer.say(watch("mine"))
    assert await viewer.until("update", kind="post", id="mine")
    for frame in frames:
        viewer.say(frame)
    if any(map(is_an_end, frames)):
        viewer.say('{"type":"visible","visible":true}')
        viewer.say(watch("mine"))
    viewer.say(watch("last"))
    if await viewer.until("update", id="last"):
        world.version += 1
        await world.app.hub.resource("post").refresh("mine")
        view = {"id": "mine", "version": world.version}
        assert await viewer.until("update", id="mine", value=view)
    await viewer.leave()
    for it in viewer.heard:
        assert it["type"] in ANSWERS, it
        assert it["type"] != "error" or (it["code"] in CODES and len(it["message"]) < 1_000), it
        assert "Traceback" not in str(it)
    is_closed = viewer.code is not None
    assert not is_closed or viewer.code in CLOSES
    assert len(frames) >= MOST_BAD or viewer.code != 1008 or any(map(is_several, frames))


def is_an_end(frame: str | bytes) -> bool:
    """It may be a message after which less is told."""
    return isinstance(frame, str) and ("route" in frame or "visible" in frame)


def is_several(frame: str | bytes) -> bool:
    """A frame may hold many messages, and many ids."""
    return isinstance(frame, str) and frame.count("[") > 1


class TestT5Live:
    @FEW
    @given(st.lists(FRAMES, max_size=12), st.sampled_from([b"", b"batch=1", b"batch=\xff&batch"]))
    async def test_any_frames_are_answered_or_close_the_connection(
        self, caplog: pytest.LogCaptureFixture, frames: list[str | bytes], query: bytes
    ) -> None:
        """Answered or closed; and the next viewer is served."""
        caplog.clear()
        world = World()
        async with asyncio.timeout(30), world.app:
            await told(world, frames, query)
            assert len(world.app.hub) == 0
            await told(world, [], b"")
        assert [it for it in caplog.records if it.levelno >= logging.ERROR] == []

    @pytest.mark.parametrize("frame", ODD, ids=range(len(ODD)))
    async def test_each_known_odd_frame_is_answered_or_closes_the_connection(
        self, caplog: pytest.LogCaptureFixture, frame: str | bytes
    ) -> None:
        """The same, of each that is known to be odd."""
        world = World()
        async with asyncio.timeout(30), world.app:
            await told(world, [frame], b"")
        assert [it for it in caplog.records if it.levelno >= logging.ERROR] == []
