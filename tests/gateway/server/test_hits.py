"""I29: an answer that is given again is what the long way would give, byte by byte."""

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from stillfresh.gateway.server import hits as memos
from stillfresh.gateway.server.access import AccessLog
from stillfresh.gateway.server.hits import LONGEST_ANSWER, LONGEST_HEAD_REPEATED
from stillfresh.gateway.server.listening import server_config
from stillfresh.gateway.server.protocol import Protocol
from stillfresh.logs import Hidden, LineWriter
from stillfresh.pages.clients import checked_networks, is_trusted
from stillfresh.pages.edge import Edge
from tests.kit.examples import examples
from tests.kit.garbage import collector_off, unreachable
from tests.kit.page_world import SAYS, PageWorld, Step, changes

LINES = (
    b"Accept-Encoding: gzip",
    b"accept-encoding: gzip",
    b"Accept-Encoding: br, gzip;q=0.5",
    b"Accept-Language: de",
    b"Authorization: Basic x",
    b"Cache-Control: max-age=0",
    b"cache-control:no-cache",
    b"Cache-Control: only-if-cached",
    b"Connection: close",
    b"Connection: Close, keep-alive",
    b"Connection: keep-alive",
    b"Connection: keep-alive, x-lang",
    b"Connection: Keep-Alive ",
    b"Connection: upgrade",
    b"Content-Length: 0",
    b"Content-Length: 2",
    b"Cookie: session=1",
    b"Cookie: session=1; stillfresh_token=1~c.abc",
    b'cookie:stillfresh_token="1~c.abc"',
    b"Cookie: my_stillfresh_token=1~c.abc",
    b"Expect: 100-continue",
    b"Forwarded: host=c.example",
    b"Host: b.example",
    b"HTTP2-Settings: AAMAAABkAAQAAP__",
    b'If-Match: "a"',
    b'If-None-Match: "a"',
    b'IF-NONE-MATCH: "b", W/"a"',
    b"If-None-Match: *",
    b'If-Range: "a"',
    b"If-Modified-Since: Tue, 14 Nov 2023 22:13:20 GMT",
    b"If-Modified-Since: Tue, 14 Nov 2000 22:13:20 GMT",
    b"If-Unmodified-Since: Tue, 14 Nov 2000 22:13:20 GMT",
    b"Keep-Alive: timeout=1",
    b"Max-Forwards: 0",
    b"Origin: http://c.example",
    b"Pragma: no-cache",
    b"Proxy-Connection: close",
    b"Range: bytes=1-3",
    b"stillfresh-token: 1~c.abc",
    b"STILLFRESH-TOKEN:",
    b"range:bytes=1-3",
    b"TE: trailers",
    b"Trailer: X-Lang",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: identity",
    b"Upgrade: h2c",
    b"Upgrade-Insecure-Requests: 1",
    b"X-Api-Key: 1",
    b"X-Forwarded-For: 198.51.100.9",
    b"X-Forwarded-Host: c.example",
    b"X-Forwarded-Proto: https",
    b"x_forwarded_host: c.example",
    b"X-Lang: de",
    b"X-LANG:en",
    b"X-HTTP-Method-Override: POST",
    b"X-Original-URL: /said/a",
)
ODD_LINES = (
    b"X-Lang : de",
    b"X-Lang: d\x00e",
    b"X-Lang: d\re",
    b"X-Odd: 1\nX-Lang: de",
    b"X-Odd: 1\n X-Lang: de",
    b"X-Odd: 1\r\n Range: bytes=1-3",
    b"X-Odd: 1\r\n\tfolded",
    b"X-Odd: 1\r\n\r\nGET /said/a HTTP/1.1\r\nHost: a.example",
    b"X-Odd: \xff\x80",
    b"X-Odd:",
    b": nameless",
    b"no colon",
    b"Range\t: bytes=1-3",
    b"Content-Length : 2",
    b"Transfer-Encoding\x0b: chunked",
)
"""What no browser sends: attempts to make two readers see two requests."""
TARGETS = (b"/own/a", b"/own/a?q=1", b"/own/a?z=1", b"/said/a", b"http://c.example/said/a")
METHODS = (b"GET", b"GET", b"GET", b"HEAD", b"POST", b"OPTIONS")


def head(target: bytes, *lines: bytes, method: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    fields = b"".join(line + b"\r\n" for line in (b"Host: a.example", *lines))
    return b"%s %s HTTP/%s\r\n%s\r\n" % (method, target, version, fields)


heads = st.builds(
    lambda target, lines, method, version: head(target, *lines, method=method, version=version),
    st.sampled_from(TARGETS),
    st.lists(st.sampled_from(LINES), max_size=2)
    | st.lists(st.sampled_from(LINES + ODD_LINES), max_size=4),
    st.sampled_from(METHODS),
    st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"]),
)
sent = st.tuples(
    st.just("send"),
    st.lists(heads, min_size=1, max_size=2),
    st.integers(1, 4),
    st.sampled_from(["whole", "whole", "numbered", "numbered", "together", "split"]),
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
        is_normal: bool = False,
        in_memory: bool = True,
        trusted: str = "",
        access: AccessLog | None = None,
    ) -> None:
        super().__init__(in_memory=in_memory)
        networks = checked_networks([trusted] if trusted else [])
        app = Edge(self.app, host=None, trusted=networks)
        is_proxy = partial(is_trusted, trusted=networks)
        self.config = server_config(app, access=access, is_proxy=is_proxy)
        self.config.load()
        self.type: type[Protocol] = self.config.http_protocol_class  # type: ignore[assignment]
        if is_normal:
            for hits in (self.type.hits, self.type.hits_of_proxies):
                hits.note = lambda *_: None  # type: ignore[method-assign]
        self.sent = 0
        self.normal_answers = 0
        """Answers that went through the app."""
        inner = self.config.loaded_app

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            self.normal_answers += 1
            await inner(scope, receive, send)

        self.config.loaded_app = counted
        self.wires: list[Wire] = []
        self.open: tuple[Protocol, Wire] | None = None

    def connect(self, peer: str = "192.0.2.1") -> tuple[Protocol, Wire]:
        protocol, wire = self.type(self.config, ServerState(), {}), Wire(peer)
        protocol.connection_made(wire)
        self.wires.append(wire)
        return protocol, wire

    async def step(self, what: str, *given_: Any) -> None:
        await (self.send(*given_) if what == "send" else self.change(what, *given_))

    async def learn(self, *requests: bytes, how: str = "whole") -> None:
        """Rendered, found, found at hand, at a moment between two seconds."""
        await self.send(requests, 1, how)
        self.clock.advance(0.25)
        await self.send(requests, 2, how)

    async def send(self, requests: Sequence[bytes], times: int, how: str) -> None:
        """On one connection while it lasts; then on another.

        Numbered: no two requests have the same bytes, as those of two browsers.
        """
        for _ in range(times):
            if how == "numbered":
                for request in requests:
                    self.sent += 1
                    line, _, fields = request.partition(b"\r\n")
                    browser = b"User-Agent: Browser/%d" % self.sent
                    await self.receive(b"\r\n".join([line, browser, fields]))
                continue
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
def _one_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two caches whose answers are compared give the same tokens."""
    monkeypatch.setattr("stillfresh.engine.lifecycle.new_maker", lambda: "maker")


@pytest.fixture(autouse=True)
def _one_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the server's own say the time of day."""
    for module in ("hits", "listening", "protocol"):
        name = f"stillfresh.gateway.server.{module}.http_date_text"
        monkeypatch.setattr(name, lambda _: b"today")


async def lived(events: Sequence[Step], **options: Any) -> list[object]:
    world = World(**options)
    async with world.pages:
        for event in events:
            await world.step(*event)
        world.leave()
        await world.settled()
        told = [wire.written for wire in world.wires]
        return [*told, world.site.renders, await world.reads()]


def compare(events: Sequence[Step], *, in_memory: bool) -> None:
    """With both memos, and with none. Numbered requests are never found by their whole heads."""
    normal = asyncio.run(lived(events, is_normal=True, in_memory=in_memory))
    assert asyncio.run(lived(events, in_memory=in_memory)) == normal


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
        compare(events, in_memory=in_memory)

    @pytest.mark.parametrize("line", LINES + ODD_LINES)
    def test_ready_answers_obey_every_request_field(self, line: bytes) -> None:
        """Before and after plain requests for the same page, from one browser and from many."""
        events: list[Step] = [("says", SAYS[0])]
        for path in (b"/own/a", b"/said/a"):
            plain = head(path)
            other = head(path, line)
            events += [again(plain, times=3), again(other), again(plain, times=1), again(other)]
            events += [again(other, times=3, how="numbered"), again(plain, times=1)]
        compare(events, in_memory=True)


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


def refuse_app(world: World, protocol: Protocol | None = None) -> None:
    """From now on nothing may reach the app."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(scope)

    if protocol is None:
        assert world.open is not None
        protocol = world.open[0]
    protocol.app = app


class TestI29TheShortWay:
    @pytest.mark.parametrize(
        "lines", [(), (b"Accept-Encoding: gzip",), (b'If-None-Match: "x"',), (b"Range: bytes=0-1",)]
    )
    @pytest.mark.parametrize("method", [b"GET", b"HEAD"])
    async def test_the_fourth_answer_is_given_without_the_app(
        self, world: World, method: bytes, lines: tuple[bytes, ...]
    ) -> None:
        """Rendered, found, found at hand; then it is given again, also to other browsers."""
        request = head(b"/own/a", *lines, method=method)
        await world.learn(request)
        refuse_app(world)
        before = world.wires[0].written
        is_range = lines[:1] == (b"Range: bytes=0-1",)
        await world.send([request], 3, "whole" if is_range else "numbered")
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
        """The same head names another host there."""
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

    async def test_behind_a_trusted_proxy_ready_answers_go_by_its_claims(self) -> None:
        """I36: scheme and host as the proxy says them choose the page; its client's own claims,
        without a trusted proxy between, do not."""
        world = World(trusted="198.51.100.0/24")
        async with world.pages:
            protocol, wire = world.connect("198.51.100.7")
            number = 0
            for claim in (b"Host: a.example", b"Host: b.example", b"Proto: https"):
                for pause in (0.25, 0.0, 0.0, 0.0, 0.0):
                    number += 1
                    browser = b"User-Agent: %d" % number
                    protocol.data_received(head(b"/own/a", browser, b"X-Forwarded-" + claim))
                    await world.settled()
                    world.clock.advance(pause)
            assert [wire.written.count(b"page %d" % page) for page in (1, 2, 3)] == [5, 5, 5]
            assert len(world.type.hits) == 0
            assert len(world.type.hits_of_proxies.plain) == 3
            refuse_app(world, protocol)
            protocol.data_received(head(b"/own/a", b"X: y", b"X-Forwarded-Host: b.example"))
            assert wire.written.count(b"page 2") == 6
            protocol.connection_lost(None)

    async def test_a_replaced_app_gives_no_answer_again(self, world: World) -> None:
        """After a reload, other settings may hold. Nor does what is under way on the old app count:
        its pages are no longer told of purges."""
        is_released = asyncio.Event()
        app = world.config.loaded_app

        async def held(*given_: Any) -> None:
            await is_released.wait()
            await app(*given_)

        await world.learn(head(b"/own/b"))
        world.type.hits.clear()
        await world.learn(head(b"/own/a"))
        visits = [world.connect() for _ in range(3)]
        visits[0][0].app = held
        visits[0][0].data_received(head(b"/own/b"))
        world.type.forget_hits([protocol for protocol, _ in visits])
        visits[1][0].data_received(head(b"/own/a"))
        visits[2][0].data_received(head(b"/own/a", b"User-Agent: another"))
        assert [wire.written for _, wire in visits] == [b"", b"", b""]  # not at once
        is_released.set()
        await world.settled()
        assert [wire.written.count(b"; hit") for _, wire in visits] == [1, 1, 1]
        assert world.type.hits.by_head.get(head(b"/own/a")) is not None
        assert world.type.hits.by_head.get(head(b"/own/b")) is None
        for protocol, _ in visits:
            protocol.connection_lost(None)

    async def test_an_open_connection_of_a_proxy_that_is_trusted_now_goes_by_its_claims(
        self,
    ) -> None:
        """After a reload with other `trusted_proxies`."""
        world = World(trusted="198.51.100.0/24")
        is_proxy = world.type.is_proxy
        world.type.is_proxy = staticmethod(lambda _: False)
        async with world.pages:
            protocol, wire = world.connect("198.51.100.7")
            await world.learn(head(b"/own/a"))
            world.type.is_proxy = staticmethod(is_proxy)
            world.type.forget_hits([protocol])
            protocol.data_received(head(b"/own/a", b"X-Forwarded-Host: b.example"))
            await world.settled()
            assert b"page 2" in wire.written
            protocol.connection_lost(None)
            world.leave()

    async def test_an_answer_that_a_layer_changes_is_not_given_again(self) -> None:
        """What is given again is what the app says, so it must be what was sent."""
        world = World()
        inner = world.config.loaded_app

        async def numbered(scope: Any, receive: Any, send: Any) -> None:
            async def send_numbered(message: Any) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-number", b"%d" % world.sent)]
                await send(message)

            await inner(scope, receive, send_numbered)

        world.config.loaded_app = numbered
        async with world.pages:
            await world.learn(head(b"/own/a"))
            await world.send([head(b"/own/a")], 3, "numbered")
            for number in (1, 2, 3):
                assert world.wires[0].written.count(b"x-number: %d\r\n" % number) == 1
            world.leave()

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


class TestI36Bounds:
    @pytest.mark.parametrize("part", ["by_head", "plain", "chosen"])
    async def test_the_bytes_of_ready_answers_are_bounded(self, world: World, part: str) -> None:
        """Of heads, and of answers' heads: bodies are not copied."""
        world.site.body = b"x" * 10_000
        answers = getattr(world.type.hits, part)
        answers._most_bytes = 5_000
        for number in range(20):
            conditions = (b'If-None-Match: "%d"' % number,) if part == "chosen" else ()
            await world.learn(head(b"/own/%d" % number, *conditions))
        assert 2 <= len(answers) <= 6
        assert answers._bytes <= 5_000
        assert memos.MOST_BYTES + memos.MOST_BYTES_CHOSEN + memos.MOST_BYTES_BY_HEAD <= 50_000_000

    async def test_made_up_conditions_do_not_push_out_plain_pages(self, world: World) -> None:
        """They have a part of their own."""
        world.type.hits.chosen._most_bytes = 5_000
        await world.learn(head(b"/own/a"))
        for number in range(20):
            await world.learn(head(b"/own/a", b'If-None-Match: "%d"' % number))
        world.type.hits.by_head.clear()
        assert world.open is not None
        await world.learn(head(b"/own/a"))
        refuse_app(world)
        await world.send([head(b"/own/a")], 2, "numbered")

    async def test_one_page_more_than_fit_costs_that_page_and_not_all(self, world: World) -> None:
        """Pages that are visited in turn would otherwise push each other out."""
        pages = [head(b"/own/%d" % number) for number in range(8)]
        await world.learn(*pages)
        plain = world.type.hits.plain
        plain._most_bytes = plain._bytes - 1
        answered = []
        for _ in range(20):
            for page in pages:
                before = world.normal_answers
                await world.send([page], 1, "numbered")
                answered.append(world.normal_answers == before)
        assert sum(answered[-80:]) >= 60

    @pytest.mark.parametrize("excess", [0, 1])
    async def test_long_answers_are_not_kept_ready(self, world: World, excess: int) -> None:
        """They are sent in parts, as their reader takes them."""
        world.site.body = b""
        await world.learn(head(b"/own/a"))
        assert world.open is not None
        text = world.type.hits.text(head(b"/own/a"))
        assert text is not None
        room = LONGEST_ANSWER - len(text) - 4  # the length has five figures then
        world.site.body = b"x" * (room + excess)
        world.type.hits.clear()
        await world.pages.purge("/own/a")
        await world.learn(head(b"/own/a"))
        assert len(world.type.hits) == (0 if excess else 2)

    @pytest.mark.parametrize("excess", [0, 1])
    async def test_answers_to_long_request_heads_are_not_kept_ready(
        self, world: World, excess: int
    ) -> None:
        filler = LONGEST_HEAD_REPEATED - len(head(b"/own/a", b"X: ")) + excess
        await world.learn(head(b"/own/a", b"X: " + b"x" * filler))
        assert len(world.type.hits) == (0 if excess else 2)

    async def test_only_a_limited_number_of_fields_chooses_answers(self, world: World) -> None:
        """A site may name hundreds in its Vary; their pages are served in the normal way."""
        names = ", ".join(f"X-{number}" for number in range(memos.MOST_NAMES))
        world.site.says("Cache-Control: max-age=30", f"Vary: {names}")
        await world.learn(head(b"/said/a"))
        assert len(world.type.hits.plain) == len(world.type.hits.chosen) == 0
        assert len(world.type.hits.by_head) == 1


class TestI36Cycles:
    @pytest.mark.parametrize(
        "request_",
        [
            head(b"/own/a"),
            head(b"/own/a", method=b"HEAD"),
            head(b"/own/a", b"If-None-Match: *"),
            head(b"/own/a", b"Range: bytes=0-1"),
            head(b"/own/a", version=b"1.0"),
            head(b"/said/a"),
            head(b"/elsewhere"),
            head(b"/own/a", b"If-Match: x"),
            head(b"/own/a", b"Content-Length: 2", method=b"POST") + b"xx",
            head(b"/own/a", b"Host: b.example"),
            head(b"/own/a") + head(b"/own/b"),
        ],
        ids=lambda request: request[:40],
    )
    async def test_a_request_leaves_no_reference_cycle(self, world: World, request_: bytes) -> None:
        """Or the collector, which looks for them, would stop the server again and again."""
        world.site.says("Cache-Control: private")
        await world.learn(head(b"/own/a"), request_)
        with collector_off():
            for _ in range(3):
                await world.send([request_], 1, "numbered")
                world.leave()
                await world.settled()
            world.site.scopes.clear()  # it keeps what it was asked
            assert not unreachable()

    @pytest.mark.parametrize("says", ["max-age=60", "max-age=0", "private", "no-store"])
    async def test_a_page_that_is_new_leaves_no_reference_cycle(
        self, world: World, says: str
    ) -> None:
        """Whether it is stored, or goes on to its visitor."""
        world.site.says(f"Cache-Control: {says}", 'ETag: "a"')
        for number in range(3):  # what is made once is made by now
            await world.send([head(b"/said/%d" % number)], 1, "numbered")
        world.site.scopes.clear()
        with collector_off():
            for number in range(3, 6):
                await world.send([head(b"/said/%d" % number)], 1, "numbered")
            world.leave()
            await world.settled()
            world.site.scopes.clear()
            assert not unreachable()


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
