"""E20 under gunicorn with `preload_app`: workers forked from a parent that has used the cache."""

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.sync import Calling, until


class Local(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(str(self._path))


def accepts_connections(socket_path: Path) -> bool:
    """The file exists as soon as the socket is bound, and refuses connections until it listens."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(socket_path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


@contextmanager
def gunicorn(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "2"]
    command += ["--bind", f"unix:{folder}/sock", "--worker-tmp-dir", str(folder)]
    command += [
        "--graceful-timeout",
        "10",
        "--no-control-socket",
        "tests.kit.workers.wsgi_prices:app",
    ]
    environment = {**os.environ, "PRICES_FOLDER": str(folder)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as master:
        try:
            until(lambda: accepts_connections(folder / "sock") or master.poll() is not None)
            yield master
        finally:
            master.kill()


def get(folder: Path, sku: str) -> tuple[int, str]:
    """The worker's process id, and what it says."""
    connection = Local(folder / "sock")
    try:
        connection.request("GET", f"/{sku}")
        pid, _, said = connection.getresponse().read().decode().partition(" ")
    finally:
        connection.close()
    return int(pid), said


@pytest.mark.skipif(sys.platform == "win32", reason="gunicorn needs forks")
class TestE20Gunicorn:
    def test_two_workers_load_one_key_once(self, tmp_path: Path) -> None:
        """Both serve it; a worker that is killed is replaced by one that finds it in the store."""
        with gunicorn(tmp_path) as master:
            calls = [Calling(get, tmp_path, "a") for _ in range(8)]
            answers = [call.result() for call in calls]
            assert {text for _, text in answers} == {"a costs 9"}
            workers = {pid for pid, _ in answers}
            while len(workers) < 2:
                # The kernel may give all connections to the worker that started first.
                workers.add(get(tmp_path, "a")[0])
            loads = (tmp_path / "loads").read_text().splitlines()
            assert loads[0] == f"warm {master.pid}"
            assert [line.split()[0] for line in loads] == ["warm", "a"]

            os.kill(killed := min(workers), signal.SIGKILL)
            until(lambda: len({get(tmp_path, "a")[0] for _ in range(4)} - {killed}) == 2)
            assert get(tmp_path, "warm")[1] == "warm costs 9"
            assert len((tmp_path / "loads").read_text().splitlines()) == 2

            master.terminate()
            _, errors = master.communicate(timeout=20)
        assert master.returncode == 0
        assert "Traceback" not in errors
