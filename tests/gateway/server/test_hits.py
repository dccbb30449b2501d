"""I29: an answer that is given again is what the long way would give, byte by byte."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from stillfresh.gateway.server.access import AccessLog
from stillfresh.gateway.server.hits import LONGEST_ANSWER, LONGEST_KEPT_HEAD, MOST_BYTES, MOST_HEADS
from stillfresh.gateway.server.listening import server_config
from stillfresh.gateway.server.protocol import Protocol
from stillfresh.logs import Hidden, LineWriter
from stillfresh.pages.clients import checked_networks
from stillfresh.pages.edge import Edge
from tests.kit.examples import examples
from tests.kit.page_world import SAYS, PageWorld, Step, changes

LINES = (
    b"Accept-Encoding: gzip",
    b"accept-encoding: gzip",
    b"Accept-Language: de",
    b"Authorization: Basic x",
    b"Cache-Control: no-cache",
    b"Cache-Control: only-if-cached",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Content-Length: 2",
    b"Cookie: session=1",
    b"Expect: 100-continue",
    b"Host: b.example",
    b'If-None-Match: "a"',
    b"If-Modified-Since: Tue, 14 Nov 2023 22:13:20 GMT",
    b"Range: bytes=1-3",
    b"Transfer-Encoding: chunked",
    b"Upgrade: h2c",
    b"X-Forwarded-Host: c.example",
    b"X-Lang: de",
)
TARGETS = (b"/own/a", b"/own/a?q=1", b"/own/a?z=1", b"/said/a", b"http://c.example/said/a")
METHODS = (b"GET", b"GET", b"GET", b"HEAD", b"POST", b"OPTIONS")


def head(target: bytes, *lines: bytes, method: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    fields = b"".join(line + b"\r\n" for line in (b"Host: a.example", *lines))
    return b"%s %s HTTP/%s\r\n%s\r\n" % (method, target, version, fields)


heads = st.builds(
    lambda target, lines, method, version: head(target, *lines, method=method, version=version),
    st.sampled_from(TARGETS),
    st.lists(st.sampled_from(LINES), max_size=2),
    st.sampled_from(METHODS),
    st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"]),
)
sent = st.tuples(
    st.just("send"),
    st.lists(heads, min_size=1, max_size=2),
    st.integers(1, 4),
    st.sampled_from(["whole", "whole", "together", "split"]),
)
steps = st.one_of(sent, sent, sent, changes)


def again(*heads_: bytes, times: int = 4, how: str = "whole") -> Step:
    return "send", list(heads_), times, how


class Wire(asyncio.Transport):
    """A connection's transport, in the hand."""

    def __init__(self, peer: str = "192.0.2.1") -> None:
        super().__init__({"peername": (peer, 4711), "sockname": ("192.0.2.2", 80)})
        self.written = b""
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class World(PageWorld):
    """As `serve` has it."""

    def __init__(
        self,
        *,
        keeps: bool = True,
        in_memory: bool = True,
        trusted: str = "",
        access: AccessLog | None = None,
    ) -> None:
        super().__init__(in_memory=in_memory)
        networks = checked_networks([trusted] if trusted else [])
        app = Edge(self.app, host=None, trusted=networks)
        self.config = server_config(app, access=access)
        self.config.load()
        self.type: type[Protocol] = self.config.http_protocol_class  # type: ignore[assignment]
        if not keeps:
            self.type.hits.note = lambda *_: None  # type: ignore[method-assign]
        self.wires: list[Wire] = []
        self.open: tuple[Protocol, Wire] | None = None

    def connect(self, peer: str = "192.0.2.1") -> tuple[Protocol, Wire]:
        protocol, wire = self.type(self.config, ServerState(), {}), Wire(peer)
        protocol.connection_made(wire)
        self.wires.append(wire)
        return protocol, wire

    async def step(self, what: str, *given_: Any) -> None:
        await (self.send(*given_) if what == "send" else self.change(what, *given_))

    async def learn(self, *requests: bytes) -> None:
        """Rendered, found, found at hand, at a moment between two seconds."""
        await self.send(requests, 1, "whole")
        self.clock.advance(0.25)
        await self.send(requests, 2, "whole")

    async def send(self, requests: Sequence[bytes], times: int, how: str) -> None:
        """On one connection while it lasts; then on another."""
        for _ in range(times):
            data = b"".join(requests) if how == "together" else None
            for request in [data] if data is not None else requests:
                parts = [request[:9], request[9:]] if how == "split" else [request]
                for part in parts:
                    await self.receive(part)

    async def receive(self, data: bytes) -> None:
        if self.open is None or self.open[1].is_closing():
            self.leave()
            self.open = self.connect()
        self.open[0].data_received(data)
        await self.settled()

    def leave(self) -> None:
        if self.open is not None:
            self.open[0].connection_lost(None)
            self.open = None

    async def settled(self) -> None:
        quiet = 0
        while quiet < 20:
            await asyncio.sleep(0)
            quiet = 0 if await self.is_loading() else quiet + 1


@pytest.fixture(autouse=True)
def _one_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the server's own say the time of day."""
    for module in ("stillfresh.gateway.server.listening", "stillfresh.gateway.server.protocol"):
        monkeypatch.setattr(f"{module}.http_date_text", lambda _: b"today")


async def lived(events: Sequence[Step], **options: Any) -> list[object]:
    world = World(**options)
    async with world.pages:
        for event in events:
            await world.step(*event)
        world.leave()
        await world.settled()
        told = [wire.written for wire in world.wires]
        return [*told, world.site.renders, await world.reads()]


class TestI29Hits:
    @settings(max_examples=examples(40), deadline=None)
    @given(events=st.lists(steps, min_size=3, max_size=14), in_memory=st.booleans())
    @example(
        events=[again(head(b"/own/a")), ("advance", 0.5), again(head(b"/own/a"))], in_memory=True
    )
    @example(
        events=[again(head(b"/own/a")), ("advance", 61.0), again(head(b"/own/a"))], in_memory=True
    )
    @example(
        events=[again(head(b"/own/a", b"Content-Length: 2")), again(head(b"/own/a"))],
        in_memory=True,
    )
    @example(
        events=[again(head(b"/own/a"), how="split"), again(head(b"/own/a"), how="together")],
        in_memory=False,
    )
    @example(
        events=[
            again(head(b"/own/a")),
            ("advance", 0.25),
            again(head(b"/own/a", LINES[8]), b"xx", head(b"/own/a")),
        ],
        in_memory=True,
    )
    @example(events=[("says", SAYS[6]), again(head(b"/said/a"))], in_memory=True)
    @example(
        events=[again(head(b"/own/a")), ("revalidate", "/own/a"), again(head(b"/own/a"))],
        in_memory=False,
    )
    @example(
        events=[("says", SAYS[1])]
        + [again(head(b"/said/a", line), head(b"/said/a")) for line in LINES[:2] * 2],
        in_memory=True,
    )
    def test_a_ready_answer_has_the_bytes_that_the_app_would_send(
        self, *, events: list[Step], in_memory: bool
    ) -> None:
        """And as many renders, and as many reads of each verdict."""
        fast = asyncio.run(lived(events, in_memory=in_memory))
        assert fast == asyncio.run(lived(events, keeps=False, in_memory=in_memory))

    @pytest.mark.parametrize("line", LINES)
    def test_ready_answers_obey_every_request_field(self, line: bytes) -> None:
        """Before and after plain requests for the same page."""
        plain, other = head(b"/own/a"), head(b"/own/a", line)
        events = [again(plain), ("advance", 0.25), again(other), again(plain), again(other)]
        assert asyncio.run(lived(events)) == asyncio.run(lived(events, keeps=False))


class TestG16AccessOfHits:
    async def test_a_ready_answer_is_a_line_of_the_access_log(self) -> None:
        """With the same status, bytes and cache status, and no time; a refusal is a line, too."""
        lines: list[dict[str, Any]] = []
        writer = LineWriter()
        writer.put = lambda render: lines.append(json.loads(render()))  # type: ignore[method-assign]
        world = World(access=AccessLog(writer, Hidden(), is_json=True))
        request = head(b"/own/a?token=s3cret")
        async with world.pages:
            await world.learn(request)
            del lines[:-1]
            refuse_app(world)
            await world.send([request], 2, "whole")
            given_again = [{**it, "time": "", "seconds": 0} for it in lines]
            assert given_again == [given_again[0]] * 3
            assert (lines[0]["path"], lines[0]["status"]) == ("/own/a", 200)
            assert lines[0]["cache"].startswith("hit")
            assert lines[-1]["seconds"] == 0
            await world.send([b"rubbish\r\n\r\n"], 1, "whole")
            assert (lines[-1]["path"], lines[-1]["status"]) == ("-", 400)
            world.leave()


@pytest.fixture
async def world() -> Any:
    world = World()
    async with world.pages:
        yield world
        world.leave()


def refuse_app(world: World) -> None:
    """From now on nothing may reach the app."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(scope)

    assert world.open is not None
    world.open[0].app = app


class TestI29TheShortWay:
    @pytest.mark.parametrize(
        "lines", [(), (b"Accept-Encoding: gzip",), (b'If-None-Match: "x"',), (b"Range: bytes=0-1",)]
    )
    @pytest.mark.parametrize("method", [b"GET", b"HEAD"])
    async def test_the_fourth_answer_is_given_without_the_app(
        self, world: World, method: bytes, lines: tuple[bytes, ...]
    ) -> None:
        """Rendered, found, found at hand; then it is given again."""
        request = head(b"/own/a", *lines, method=method)
        await world.learn(request)
        refuse_app(world)
        before = world.wires[0].written
        await world.send([request], 3, "whole")
        assert len(world.wires) == 1
        given_again = world.wires[0].written.removeprefix(before)
        last = before[before.rindex(b"HTTP/1.1 ") :]
        assert given_again == last * 3

    async def test_another_connection_gets_the_ready_answer_at_once(self, world: World) -> None:
        """Its first request is answered at once; nothing runs, nothing waits."""
        await world.learn(head(b"/own/a"))
        world.leave()
        protocol, wire = world.connect()
        protocol.data_received(head(b"/own/a"))
        assert wire.written.startswith(b"HTTP/1.1 200 OK\r\n")

    @pytest.mark.parametrize(
        "begun",
        [
            head(b"/own/a")[:-2] + b"X: ",
            head(b"/other", b"Content-Length: 1000", method=b"POST"),
            head(b"/own/a", b"Content-Length: 1000"),
        ],
        ids=["a head", "a body", "a body that is not waited for"],
    )
    async def test_bytes_within_another_request_get_no_ready_answer(
        self, world: World, begun: bytes
    ) -> None:
        """The same bytes within another request belong to that."""
        await world.learn(head(b"/own/a"))
        await world.receive(begun)
        before = world.wires[0].written.count(b"200 OK")
        await world.receive(head(b"/own/a"))
        assert world.wires[0].written.count(b"200 OK") == before

    async def test_a_ready_answer_waits_for_the_answer_before_it(self, world: World) -> None:
        """A hit behind a request that is still being answered waits for it."""
        await world.learn(head(b"/own/a"))
        world.site.hold()
        assert world.open is not None
        protocol, wire = world.open
        before = len(wire.written)
        protocol.data_received(head(b"/own/b"))
        await world.site.asked.wait()
        protocol.data_received(head(b"/own/a"))
        assert len(wire.written) == before
        world.site.let_go()
        await world.settled()
        first, second = wire.written[before:].split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert b"page 2" in first
        assert b"page 1" in second

    async def test_no_ready_answer_is_written_to_a_full_buffer(self, world: World) -> None:
        """While its buffer is full it waits, as on the long way."""
        await world.learn(head(b"/own/a"))
        assert world.open is not None
        protocol, wire = world.open
        before = len(wire.written)
        protocol.pause_writing()
        protocol.data_received(head(b"/own/a"))
        await world.settled()
        assert len(wire.written) == before
        protocol.resume_writing()
        await world.settled()
        assert len(wire.written) > before

    async def test_a_ready_answer_is_not_shared_with_a_trusted_peer(self) -> None:
        """The same head names another host there, so nothing is given again."""
        world = World(trusted="198.51.100.0/24")
        request = head(b"/own/a", b"X-Forwarded-Host: c.example")
        async with world.pages:
            for peer in ("192.0.2.1", "198.51.100.7"):
                protocol, wire = world.connect(peer)
                for pause in (0.25, 0.0, 0.0):
                    protocol.data_received(request)
                    await world.settled()
                    world.clock.advance(pause)
                protocol.connection_lost(None)
                assert (b"page 1" in wire.written) is (peer == "192.0.2.1")

    async def test_a_page_that_varies_by_client_address_is_not_given_to_another_client(
        self, world: World
    ) -> None:
        """I13: a page that varies by the client's address is not another client's."""
        world.site.says("Cache-Control: max-age=30", "Vary: X-Forwarded-For")
        for number, peer in enumerate(["192.0.2.1", "198.51.100.7", "192.0.2.1"]):
            protocol, wire = world.connect(peer)
            for pause in (0.25, 0.0, 0.0, 0.0):
                protocol.data_received(head(b"/said/a"))
                await world.settled()
                world.clock.advance(pause)
            protocol.connection_lost(None)
            assert wire.written.count(b"page %d" % (1 + number % 2)) == 4


class TestI29Bounds:
    async def test_the_number_of_ready_answers_is_bounded(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(world.type.hits, "_most", 2)
        for number in range(5):
            await world.learn(head(b"/own/a", b"User-Agent: %d" % number))
        assert len(world.type.hits) == 2
        assert MOST_HEADS >= 1_000

    async def test_the_bytes_of_ready_answers_are_bounded(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of one page, asked for in many ways, not so many copies."""
        world.site.body = b"x" * 10_000
        monkeypatch.setattr(world.type.hits, "_most_bytes", 35_000, raising=False)
        for number in [*range(5), 4, 4]:
            await world.learn(head(b"/own/a", b"User-Agent: %d" % number))
        assert len(world.type.hits) == 3
        assert MOST_BYTES <= 32 * 1024 * 1024

    @pytest.mark.parametrize("excess", [0, 1])
    async def test_long_answers_are_not_kept_ready(self, world: World, excess: int) -> None:
        """What is held of a page that has left the cache is small."""
        world.site.body = b""
        await world.learn(head(b"/own/a"))
        [kept] = world.type.hits.values()
        room = LONGEST_ANSWER - len(kept.text) - 4  # the length has five figures then
        world.site.body = b"x" * (room + excess)
        world.type.hits.clear()
        await world.pages.purge("/own/a")
        await world.learn(head(b"/own/a"))
        assert len(world.type.hits) == (0 if excess else 1)

    @pytest.mark.parametrize("excess", [0, 1])
    async def test_answers_to_long_request_heads_are_not_kept_ready(
        self, world: World, excess: int
    ) -> None:
        filler = LONGEST_KEPT_HEAD - len(head(b"/own/a", b"X: ")) + excess
        await world.learn(head(b"/own/a", b"X: " + b"x" * filler))
        assert len(world.type.hits) == (0 if excess else 1)


class Timer:
    """A loop's clock and its timers, in the hand."""

    def __init__(self, protocol: Protocol) -> None:
        self.now = 100.0
        self.due: list[tuple[float, Callable[[], None]]] = []
        protocol.loop = self  # type: ignore[assignment]

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, handler: Callable[[], None]) -> asyncio.TimerHandle:
        self.due.append((self.now + delay, handler))
        return asyncio.TimerHandle(self.now + delay, handler, (), asyncio.get_running_loop())

    def pass_to(self, now: float) -> None:
        self.now = now
        for timer in [it for it in self.due if it[0] <= now]:
            self.due.remove(timer)
            timer[1]()


class TestI29KeepAlive:
    async def test_a_used_connection_stays_open_and_an_idle_one_is_closed(
        self, world: World
    ) -> None:
        """Five seconds after the last answer, however that was given."""
        await world.learn(head(b"/own/a"))
        world.leave()
        protocol, wire = world.connect()
        protocol._stop_timer()
        timer = Timer(protocol)
        for now in (103.0, 106.0, 109.0):
            protocol.data_received(head(b"/own/a"))
            timer.pass_to(now)
            assert not wire.is_closing()
        timer.pass_to(111.0)
        assert wire.is_closing()
        assert wire.written.count(b"HTTP/1.1 200 OK\r\n") == 3
