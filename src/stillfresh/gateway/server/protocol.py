"""HTTP/1.1 as clients speak it to a gateway: uvicorn's protocol, within limits.

RFC 9112: a head has limits of size and time, a target that is a whole URL names the host (§3.2.2),
HTTP/1.0 clients get no chunks (§6.1). A request for a WebSocket of the site is passed on like
any other, with its connection. Needs `stillfresh[web]`.

`data_received` first looks for an answer to an equal request (`hits`), and sends it without the
parser and the app. For other requests, `_record` lets the app say how its answer may be given
again. A refusal by the head alone takes its turn behind the answers that are under way.

Requests that come before the answers to earlier ones wait for their turn (RFC 9112 §9.3.2).
uvicorn parses all of them, and reads on with each answer; a client could so fill memory. Here bytes
are parsed in slices, and only while no request waits; other bytes stay in `_waiting`, unread.

A request leaves no reference cycle behind, or the garbage collector would stop the server for as
long as it takes to find thousands of them. So what a request's own objects hold of its `cycle` is a
weak reference.
"""

import asyncio
import enum
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import unquote, urlsplit
from weakref import ref

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from stillfresh.gateway.server.access import AccessLog
from stillfresh.gateway.server.hits import WITH_MORE, Hits, Recorder, is_one_head
from stillfresh.gateway.server.tunnels import ClientEnd, head_of
from stillfresh.http.fields import Raw, http_date_text, lowered
from stillfresh.pages.edge import KEEP, LINGER, PROXY, TUNNEL, has_body, refuse
from stillfresh.pages.routes import INTERIM

LONGEST_HEAD: Final = 65_536
"""Bytes of a request line and its header fields; of trailers as well."""
SLICE: Final = 16_384
"""Bytes that are parsed at once: a few hundred of the shortest requests."""
HEAD_TIME: Final = 30.0
"""Seconds for a head to come, from its first byte, or from the start of the connection."""
TOO_LONG: Final = b"The request's head is too long.\n"
OTHER_VERSION: Final = b"This server speaks HTTP/1.1 and HTTP/1.0.\n"
NOT_HTTP: Final = b"This is not a valid HTTP request.\n"
OLD_CHUNKS: Final = b"An HTTP/1.0 request cannot have a transfer coding.\n"


logger = logging.getLogger(__name__)


class Part(enum.Enum):
    """The part of a message that comes next."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class HeldFlow(FlowControl):
    """Does not read on while bytes wait to be parsed."""

    is_held = False

    def hold(self) -> None:
        self.is_held = True
        self.pause_reading()

    def release(self) -> None:
        self.is_held = False
        self.resume_reading()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class Protocol(HttpToolsProtocol):
    """One connection; a server's own subclass has the `hits` that its connections share."""

    hits: Hits
    hits_of_proxies: Hits
    """For trusted proxies: the same head may mean another page there."""
    is_proxy: Callable[[str | None], bool]
    """Whether the client with this address is a trusted proxy."""
    is_site: Callable[[str], bool]
    """Whether a WebSocket for this path belongs to the site."""
    access: AccessLog | None
    is_draining = False
    """The server ends soon: each answer is the last one of its connection."""
    _head_is_refused = False
    """True once a request was refused by its head alone: that is the connection's last answer."""
    _tunnel: ClientEnd | None = None
    _part = Part.NOTHING
    _unread = 0
    _waiting = b""
    """Bytes behind a request that waits for its turn."""
    _is_hung_up = False
    _timer: asyncio.TimerHandle | None = None
    _cycles: Sequence[RequestResponseCycle] = ()
    _head: bytes | None = None
    """The received bytes, if they are one whole head."""
    _data = b""
    _answered_at = -math.inf
    _is_of_proxy = False
    _is_repeated_head = False
    """The parser reads the framing of a head again, whose upgrade is ignored."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: HeldFlow = HeldFlow(transport)
        self._choose_hits()
        self._allow_versions()
        self._start_timer()

    def _allow_versions(self) -> None:
        """RFC 9110 §2.5: HTTP/1.2 is read as 1.1; other versions are refused by `_refusal`."""
        self.parser.set_dangerous_leniencies(lenient_version=True)

    def _choose_hits(self) -> None:
        self._is_of_proxy = self.is_proxy(self.client[0] if self.client is not None else None)
        self.hits = self.hits_of_proxies if self._is_of_proxy else type(self).hits

    @classmethod
    def forget_hits(cls, connections: Iterable[object]) -> None:
        """The app was replaced: give no answer of the old one again. The new one may trust others.

        Requests that are still under way on the old app note their answers in the old memos.
        """
        cls.hits = Hits()
        cls.hits_of_proxies = Hits()
        for connection in connections:
            if isinstance(connection, cls):
                connection._choose_hits()  # noqa: SLF001 (of the same class)

    @classmethod
    def begin_drain(cls, connections: Iterable[object]) -> None:
        """From now on, close connections after their next answer; answers kept ready would not.

        `connections`: requests under way there are the last ones, too.
        """
        cls.is_draining = True
        cls.hits.clear()
        cls.hits_of_proxies.clear()
        for connection in connections:
            if isinstance(connection, cls):
                for cycle in connection._cycles:  # noqa: SLF001 (of the same class)
                    cycle.keep_alive = False

    @property
    def under_way(self) -> list[Any]:
        """The scopes of the requests of this connection that have no complete answer yet."""
        return [cycle.scope for cycle in self._cycles if not cycle.response_complete]

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        for cycle in self._cycles:
            _cut(cycle)
        if self._tunnel is not None:
            self._tunnel.inbox.end()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """A tunnel ends at once: it would not end by itself."""
        if self._tunnel is not None:
            self._tunnel.inbox.end()
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Answer from the memos if they have this request; else parse it."""
        if self._is_idle() and (answer := self.hits.text(data)) is not None:
            self._give_again(answer)
        elif self._waiting:
            self._waiting += data
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Parse these bytes, as long as no request waits for its turn."""
        for at in range(0, len(data), SLICE):
            if self._is_hung_up or (at and self.transport.get_protocol() is not self):
                return
            if self._tunnel is not None:
                self._tunnel.inbox.add(data[at:])
                return
            if self.pipeline:
                self._waiting = data[at:]
                self.flow.hold()
                return
            self._parse_slice(data[at : at + SLICE])

    def _parse_waiting(self) -> None:
        """The last request that waited has its turn now."""
        if not self.transport.is_closing():
            data = self._waiting
            self._waiting = b""
            self.flow.release()
            self._parse(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._waiting and not self.pipeline:
            self.loop.call_soon(self._parse_waiting)

    def _parse_slice(self, data: bytes) -> None:
        """Bytes of a head that the parser has not finished are counted, and limited."""
        self._head = data if self._is_idle() and is_one_head(data) else None
        if self._part is not Part.BODY:
            self._start_timer()
        self._unread += len(data)
        self._data = data
        super().data_received(data)
        if self._part is Part.HEAD:
            self._start_timer()
        if self._unread > LONGEST_HEAD:
            self._hang_up(431, TOO_LONG)

    def _is_idle(self) -> bool:
        """True if nothing is half read, running, or waiting to be written."""
        return (
            self._part is Part.NOTHING
            and not (self._unread or self._is_hung_up or self.pipeline or self._waiting)
            and not self.flow.write_paused
            and (self.cycle is None or self.cycle.response_complete)
            and not self.transport.is_closing()
        )

    def _give_again(self, answer: bytes) -> None:
        """Do what `data_received` and `on_response_complete` do, without the parser and the app."""
        if self._timer is not None:
            self._stop_timer()
        self._answered_at = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._keep_alive_for(self.timeout_keep_alive)
        self.server_state.total_requests += 1
        self.transport.write(answer)

    def _keep_alive_for(self, seconds: float) -> None:
        handler = self.timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(seconds, handler)

    def timeout_keep_alive_handler(self) -> None:
        """The timer is not set again for each kept answer: it looks when the last one was."""
        left = self._answered_at + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._keep_alive_for(left)
        else:
            super().timeout_keep_alive_handler()

    def on_message_begin(self) -> None:
        if self._is_repeated_head:
            return
        self._part = Part.HEAD
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_repeated_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """RFC 9110 §6.5.1: a trailer is no header field; §5.5: a value does not end in a space."""
        if self._part is not Part.HEAD:
            return
        name = lowered(name)
        value = value.rstrip(b" \t")
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_repeated_head:
            self._is_repeated_head = False
            return
        self._unread = 0
        self._stop_timer()
        refusal = self._refusal()
        if refusal is not None:
            # The refusal takes its turn after the answers that are under way: uvicorn has queued
            # each request with its own app. It replaces the app for the rest of the connection,
            # which ends with this answer (`is_last` in `_refuse`).
            self._head_is_refused = True
            self.app = refusal if self.access is None else self.access.around(refusal)
        self._name_host()
        if self.parser.should_upgrade() and self._should_upgrade():
            self._find_tunnel()
        super().on_headers_complete()
        self._part = Part.BODY
        if self.cycle is not None:
            self._follow(self.cycle)
            self._record(self.cycle)

    def _refusal(self) -> ASGIApp | None:
        """An app that refuses this request, if its head alone says that it must be refused."""
        version = self.parser.get_http_version()
        if not version.startswith("1."):  # RFC 9110 §15.6.6
            return partial(_refuse, 505, OTHER_VERSION)
        if version == "1.0" and any(name == b"transfer-encoding" for name, _ in self.headers):
            return partial(_refuse, 400, OLD_CHUNKS)  # RFC 9112 §6.1: its framing is faulty
        size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
        return partial(_refuse, 431, TOO_LONG) if size > LONGEST_HEAD else None

    def _find_tunnel(self) -> None:
        path = unquote(httptools.parse_url(self.url).path.decode("ascii"))
        if self.parser.get_method() == b"GET" and self.is_site(path):
            self._tunnel = ClientEnd(self.transport, self.flow)

    def _should_upgrade(self) -> bool:
        """False for a WebSocket of the site: the gateway does not speak it.

        Also false for a request with a body: it opens no WebSocket (RFC 6455 §4.1).
        """
        if self._tunnel is not None or self._head_is_refused or has_body(self.headers):
            return False
        return super()._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """The parser has stopped here: it has not seen the bytes after the head.

        They belong to the tunnel, or are the body of the request. Otherwise they are a request that
        is not answered, so the connection ends after this answer.
        """
        stopped = sys.exception()
        behind = self._data[stopped.args[0] :] if stopped is not None else b""
        if self._tunnel is not None:
            self._tunnel.inbox.add(behind)
        elif self._body_is_skipped():
            self._read_body(behind)
        elif behind and self.cycle is not None:
            self.cycle.keep_alive = False

    def _body_is_skipped(self) -> bool:
        """True if the parser takes a request to be over, although its body comes.

        It stops behind a head that asks for another protocol. With a body that is ignored (RFC 9110
        §7.8), so the body has to be read; otherwise it would be read as the next request.
        """
        return self.parser.should_upgrade() and has_body(self.headers)

    def _read_body(self, begun: bytes) -> None:
        """Continue with a new parser, which knows of this request only how long its body is."""
        framing = [
            name + b": " + value + b"\r\n"
            for name, value in self.headers
            if name in {b"content-length", b"transfer-encoding"}
        ]
        self.parser = httptools.HttpRequestParser(self)
        self._allow_versions()
        self._is_repeated_head = True
        self._data = b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n", begun])
        super().data_received(self._data)

    def _record(self, cycle: RequestResponseCycle) -> None:
        """Let the app keep its answer, unless the request has more than a head."""
        head = self._head
        self._head = None
        if head is None or self.is_draining or any(name in WITH_MORE for name, _ in self.headers):
            return
        recorder: Any = Recorder(self.transport)
        cycle.transport = recorder
        cycle.on_response = partial(self._note_answer, self.hits, head, recorder, ref(cycle))
        scope: Any = cycle.scope
        scope[KEEP] = recorder.keep
        scope[PROXY] = self._is_of_proxy

    def _note_answer(
        self, hits: Hits, head: bytes, recorder: Recorder, cycle_ref: "ref[RequestResponseCycle]"
    ) -> None:
        cycle = cycle_ref()
        recorded = recorder.recorded()
        if recorded is not None and cycle is not None and cycle.keep_alive:
            hits.note(head, *recorded)
        self.on_response_complete()

    def _follow(self, cycle: RequestResponseCycle) -> None:
        """If the client leaves, all its running requests must know, not just the last one."""
        running = [other for other in self._cycles if not other.response_complete]
        self._cycles = [*running, cycle]
        if self._tunnel is not None:
            self._tunnel.attach(cycle)
            cycle.scope.update({"type": TUNNEL, TUNNEL: self._tunnel})  # type: ignore[typeddict-item]
        if self.is_draining:
            cycle.keep_alive = False  # uvicorn then says so in the answer
        if cycle.scope["http_version"] not in {"1.0", "1.1"}:
            cycle.scope["http_version"] = "1.1"
        if cycle.scope["http_version"] == "1.0":
            send: Any = _send_unchunked(cycle)
            cycle.send = send  # type: ignore[method-assign]
        else:
            scope: Any = cycle.scope
            scope[INTERIM] = partial(_tell, ref(cycle))

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._body_is_skipped():
            return
        self._part = Part.NOTHING
        self._unread = 0
        super().on_message_complete()

    def _name_host(self) -> None:
        """The host in the target replaces the field. Several Hosts are left: they are refused."""
        hosts = [at for at, (name, _) in enumerate(self.headers) if name == b"host"]
        if len(hosts) == 1 and (named := _host_in_target(self.url)):
            self.headers[hosts[0]] = b"host", named

    def send_400_response(self, msg: str) -> None:
        """The parser has refused the bytes; `msg` is uvicorn's text for that."""
        del msg
        self._hang_up(400, NOT_HTTP)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIME, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self._part is Part.NOTHING:
            self.transport.close()
        else:
            self._hang_up(408, b"The request's head did not come.\n")

    def _hang_up(self, status: int, text: bytes) -> None:
        """Refuse. It reads on for a moment, or the answer might not reach the client."""
        self._is_hung_up = True
        self._stop_timer()
        if self.transport.is_closing():
            return
        if not self._may_speak():
            self.transport.close()
            return
        for cycle in self._cycles:
            _cut(cycle)
        self.transport.write(_last_words(status, text))
        # No warning: clients choose how many of these there are.
        logger.info("a request was refused with %d: %s", status, text.decode("ascii").rstrip())
        if self.access is not None:
            self.access.refused(status, len(text))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER, self.transport.abort)

    def _may_speak(self) -> bool:
        """False within another answer, or in place of one."""
        if self.pipeline or self.cycle is None:
            return not self.pipeline
        if self._part is Part.BODY:
            return not self.cycle.response_started
        return self.cycle.response_complete


def new_protocol(
    is_site: Callable[[str], bool],
    access: AccessLog | None,
    is_proxy: Callable[[str | None], bool],
) -> type[Protocol]:
    """The protocol of one server."""
    own = {
        "hits": Hits(),
        "hits_of_proxies": Hits(),
        "is_site": staticmethod(is_site),
        "is_proxy": staticmethod(is_proxy),
        "access": access,
    }
    return type("Protocol", (Protocol,), own)


def _cut(cycle: RequestResponseCycle) -> None:
    """Tell its app that the client has left."""
    if not cycle.response_complete:
        cycle.disconnected = True
    cycle.message_event.set()


def _tell(cycle_ref: "ref[RequestResponseCycle]", status: int, fields: Raw) -> None:
    """RFC 9110 §15.2: send an interim response before the answer; HTTP/1.0 has none.

    A client that does not read gets none: it can do without.
    """
    cycle = cycle_ref()
    if cycle is not None and not (
        cycle.response_started or cycle.disconnected or cycle.flow.write_paused
    ):
        cycle.transport.write(head_of(status, fields))


def _last_words(status: int, text: bytes) -> bytes:
    fields = [
        (b"content-type", b"text/plain"),
        (b"cache-control", b"no-store"),
        (b"content-length", b"%d" % len(text)),
        (b"connection", b"close"),
        (b"date", http_date_text(time.time())),
    ]
    return head_of(status, fields) + text


def _host_in_target(target: bytes) -> bytes | None:
    """The host and port in `http://host:port/path`; None if there is none."""
    if target[:1] in {b"/", b"*"} or b"://" not in target:
        return None
    return urlsplit(target).netloc.rpartition(b"@")[2]


async def _refuse(status: int, text: bytes, scope: Scope, receive: Receive, send: Send) -> None:
    del scope, receive
    await refuse(send, status, text, is_last=True)


def _send_unchunked(cycle: RequestResponseCycle) -> Send:
    """An answer of unknown length ends with the connection, which 1.0 closes anyway."""
    cycle_ref = ref(cycle)
    is_open_ended = False

    async def tell(message: Message) -> None:
        nonlocal is_open_ended
        cycle = cycle_ref()
        if cycle is None:
            return  # its request is over
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            is_open_ended = not names & {b"content-length", b"transfer-encoding"}
            if is_open_ended:
                cycle.chunked_encoding = False
        elif is_open_ended:
            left = math.inf if message.get("more_body") else len(message.get("body", b""))
            cycle.expected_content_length = left  # type: ignore[assignment]
        await RequestResponseCycle.send(cycle, message)  # type: ignore[arg-type]

    return tell
