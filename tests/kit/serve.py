"""What the proxy's tests share: `stillfresh serve` as a process, in front of a site in another."""

import contextlib
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO
from urllib.parse import urlencode

import httpx

from tests.kit.processes import ROOT, command

CLI = [sys.executable, "-m", "stillfresh.cli", "serve"]
IMPATIENT = """
from stillfresh.cli import main
from stillfresh.gateway.server import listening
listening.GRACE = 1
main()
"""
BRIEF = [sys.executable, "-c", IMPATIENT, "serve"]
"""The same, with a second instead of ten for requests under way when it is told to end."""


def started(
    stack: ExitStack, command: list[str], log: IO[bytes] | None = None
) -> tuple["subprocess.Popen[str]", str]:
    """A process, and the first line it says; ended when the test is over."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)

    def end() -> None:
        process.kill()
        process.communicate(timeout=30)

    stack.callback(end)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


class Proxy:
    """A site, a cache in front of it, and a client."""

    def __init__(
        self,
        stack: ExitStack,
        *options: str,
        upstream: str | None = None,
        program: list[str] = CLI,
    ) -> None:
        self._stack = stack
        if upstream is None:
            upstream = f"http://127.0.0.1:{started(stack, command('upstream'))[1]}"
        self.upstream = upstream
        self._log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        serve = [*program, "--upstream", self.upstream, "--port", "0", *options]
        self.process, first_line = started(stack, serve, self._log)
        match = re.match(r"(http://\S+) in front of", first_line)
        assert match, first_line + self.log()
        self.url = match[1]
        self.client = stack.enter_context(httpx.Client(base_url=self.url, timeout=30))

    def get(
        self, path: str, headers: dict[str, str] | None = None, /, **says: str
    ) -> httpx.Response:
        query = urlencode({name.replace("_", "-"): value for name, value in says.items()})
        return self.client.get(f"{path}?{query}" if says else path, headers=headers)

    def count(self, path: str) -> int:
        return int(self.client.get(f"/count?{path}").text)

    def log(self) -> str:
        """What it said on its standard error so far."""
        self._log.seek(0)
        return self._log.read().decode()

    def says(self, text: str) -> bool:
        """True once it has said this: a thread of its own writes the log."""
        deadline = time.monotonic() + 20
        while text not in self.log() and time.monotonic() < deadline:
            time.sleep(0.01)
        return text in self.log()

    def raw(self, request: bytes) -> bytes:
        """The answer to these very bytes, as it came."""
        port = int(self.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(request)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while part := client.recv(65_536):
                    answer += part
        return answer


class KeptSite:
    """A site that keeps its connections: bytes are answered with bytes; None: with nothing."""

    def __init__(self, stack: ExitStack, answers: Callable[[bytes], bytes | None]) -> None:
        self._answers = answers
        self.asked: list[bytes] = []
        self.open = 0
        self.changed = threading.Condition()
        self._site = socket.create_server(("127.0.0.1", 0), backlog=500)
        self.url = f"http://127.0.0.1:{self._site.getsockname()[1]}"
        stack.callback(self._site.close)
        threading.Thread(target=self._run, daemon=True).start()

    def until(self, holds: Callable[[], bool]) -> bool:
        """Whether it came to be so in time."""
        with self.changed:
            return self.changed.wait_for(holds, timeout=20)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # closed: the test is over
            while True:
                connection, _ = self._site.accept()
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        self._count(1)
        with connection, contextlib.suppress(OSError):
            while request := _one_request(connection):
                with self.changed:
                    self.asked.append(request)
                    self.changed.notify_all()
                if (answer := self._answers(request)) is not None:
                    connection.sendall(answer)
        self._count(-1)

    def _count(self, by: int) -> None:
        with self.changed:
            self.open += by
            self.changed.notify_all()


def _one_request(connection: socket.socket) -> bytes:
    """A head and its body, by length or in chunks; empty: the connection is over."""
    request = b""
    while b"\r\n\r\n" not in request:
        if not (part := connection.recv(65_536)):
            return b""
        request += part
    head, _, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    while length and len(body) < int(length[1]) and (part := connection.recv(65_536)):
        body += part
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    while is_chunked and not body.endswith(b"0\r\n\r\n") and (part := connection.recv(65_536)):
        body += part
    return head + b"\r\n\r\n" + body


def raw_site(stack: ExitStack, answers: Callable[[bytes], bytes]) -> str:
    """A site that answers a request's bytes with bytes, and closes; its address."""
    site = socket.create_server(("127.0.0.1", 0))
    stack.callback(site.close)

    def run() -> None:
        with contextlib.suppress(OSError):  # closed: the test is over
            while True:
                connection, _ = site.accept()
                with connection, contextlib.suppress(OSError):
                    request = b""
                    while b"\r\n\r\n" not in request and (part := connection.recv(65_536)):
                        request += part
                    connection.sendall(answers(request))

    threading.Thread(target=run, daemon=True).start()
    return f"http://127.0.0.1:{site.getsockname()[1]}"
