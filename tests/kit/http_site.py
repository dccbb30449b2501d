"""A site on this machine for clients: real sockets, and answers that a test writes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class SiteRequest:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case; of several lines the last one."""
    body: bytes = b""


@dataclass
class SiteAnswer:
    """What the site answers."""

    body: bytes = b"hello"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False
    """Break off after half of the body."""
    is_closed: bool = False
    """Close the connection instead of an answer."""
    length: int | None = None
    """A Content-Length that is not that of the body."""


Answering = Callable[[SiteRequest], SiteAnswer]


class Site:
    """`site.answer(path, ...)` says what a path answers; `requests` is what came."""

    def __init__(self) -> None:
        self.requests: list[SiteRequest] = []
        self.answers: dict[str, Answering] = {}
        self.gate = threading.Event()
        """While it is clear, answers wait."""
        self.gate.set()
        self.arrived = threading.Event()
        self.url = ""

    def answer(self, path: str, body: bytes = b"hello", status: int = 200, **says: Any) -> None:
        """Always the same. `says`: header fields with `_` for `-`, or fields of an answer."""
        own = {name: says.pop(name) for name in ("is_cut", "is_closed", "length") if name in says}
        headers = {name.replace("_", "-"): str(value) for name, value in says.items()}
        self.answers[path] = lambda _: SiteAnswer(body, status, headers, **own)

    def count(self, path: str) -> int:
        return sum(request.path == path for request in self.requests)

    def last(self, path: str) -> SiteRequest:
        return next(request for request in reversed(self.requests) if request.path == path)


@contextmanager
def serving_site() -> Iterator[Site]:
    """A site in threads of this process, on a free port."""
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1
        """Head and body in one piece: otherwise the kernel waits for an acknowledgement."""

        def log_message(self, *_: object) -> None:
            pass

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True

        def reply(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = SiteRequest(self.command, self.path, headers, self.rfile.read(size))
            site.requests.append(request)
            site.arrived.set()
            site.gate.wait(30)
            answering = site.answers.get(self.path) or site.answers.get(self.path.split("?")[0])
            answer = answering(request) if answering else SiteAnswer(b"nothing", 404)
            if answer.is_closed:
                self.close_connection = True
                return
            self.send_response_only(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            length = len(answer.body) if answer.length is None else answer.length
            is_chunked = "Transfer-Encoding" in answer.headers
            if answer.status not in {204, 304} and not is_chunked:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command == "HEAD" or answer.status in {204, 304}:
                return
            body = answer.body[: len(answer.body) // 2] if answer.is_cut else answer.body
            self.wfile.write(body)
            if answer.is_cut or length != len(answer.body):
                self.close_connection = True

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = reply  # noqa: N815 (of http.server)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        site.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
