"""G17: real processes: a Unix socket, SIGTERM that drains, SIGHUP that reloads."""

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.kit.cli import COMMAND, stillfresh
from tests.kit.sync import until

KIND = '[kinds.{name}]\nurl = "http://127.0.0.1:1/{{id}}"\nfresh_for = "1h"\n'
BOTH = pytest.mark.parametrize("workers", [1, 2])


@contextmanager
def serving(directory: Path, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A gateway on a Unix socket; what it logs is in `log`."""
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen(
            [*COMMAND, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=directory,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("unix:"), (directory / "log").read_text()
            yield process, directory / "log"
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=60)


def asking(path: Path) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(path))
    return httpx.Client(transport=transport, base_url="http://localhost", timeout=30)


def status(path: Path, url: str) -> int:
    """On a connection of its own: any worker may take it."""
    with asking(path) as client:
        return client.get(url).status_code


class TestG17Uds:
    def test_a_unix_socket_is_for_its_group_and_replaces_only_a_dead_one(
        self, tmp_path: Path
    ) -> None:
        """One that nobody listens on is replaced; one that is in use, or a file, is not."""
        place = tmp_path / "gateway.sock"
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(place))
        site = ["--upstream", "http://127.0.0.1:1", "--uds", "gateway.sock"]
        with serving(tmp_path, *site):
            assert place.stat().st_mode & 0o777 == 0o660
            with asking(place) as client:
                assert client.get("/healthz").status_code == 200
                assert client.get("/page").status_code == 502
                assert client.get("/_stillfresh/").status_code in {200, 401, 403}
            taken = stillfresh("serve", *site, cwd=tmp_path)
            assert (taken.returncode, taken.stderr.count("\n")) == (1, 1)
        assert not place.exists()
        place.write_text("mine")
        refused = stillfresh("serve", *site, cwd=tmp_path)
        assert (refused.returncode, place.read_text()) == (1, "mine")


class TestG17Drain:
    @BOTH
    def test_readyz_is_503_before_the_socket_closes(self, tmp_path: Path, workers: int) -> None:
        """Everything is answered meanwhile; a second SIGTERM does not wait."""
        place = tmp_path / "s.sock"
        site = ["--upstream", "http://127.0.0.1:1", "--uds", str(place), "--drain", "1h"]
        site += ["--store", "x.db", "--workers", str(workers)]
        with serving(tmp_path, *site) as (process, _):
            with asking(place) as client:
                assert client.get("/readyz").json()["status"] == "ready"
                process.send_signal(signal.SIGTERM)
                until(lambda: client.get("/readyz").status_code == 503)
                assert client.get("/readyz").json()["status"] == "draining"
                assert client.get("/healthz").status_code == 200
            process.send_signal(signal.SIGTERM if workers == 1 else signal.SIGINT)
            assert process.wait(timeout=60) == 0

    def test_the_server_ends_after_the_drain_time(self, tmp_path: Path) -> None:
        """After the time that it was told."""
        site = ["--upstream", "http://127.0.0.1:1", "--uds", "s.sock", "--drain", "300ms"]
        with serving(tmp_path, *site) as (process, _):
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0


class TestG17Reload:
    def test_a_sighup_during_the_start_is_not_lost(self, tmp_path: Path) -> None:
        """The settings may have been read before they were changed, in any worker that starts."""
        file, place = tmp_path / "s.toml", tmp_path / "s.sock"
        with socket.create_server(("127.0.0.1", 0)) as store:
            port = store.getsockname()[1]
            settings = f'[server]\nuds = "s.sock"\n[store]\nurl = "redis://127.0.0.1:{port}"\n'
            file.write_text(settings + KIND.format(name="old"))
            process = subprocess.Popen(
                [*COMMAND, "serve", "s.toml"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
            )
            with process:
                try:
                    connection, _ = store.accept()  # it waits for its store now
                    file.write_text(settings + KIND.format(name="new"))
                    process.send_signal(signal.SIGHUP)
                    connection.close()
                    store.close()
                    assert process.stdout is not None
                    assert process.stdout.readline().startswith("unix:")
                    until(lambda: status(place, "/v1/new/a") == 503)
                    assert status(place, "/v1/old/a") == 404
                finally:
                    process.terminate()
                    process.wait(timeout=60)

    @BOTH
    def test_sighup_reads_the_settings_file_again(self, tmp_path: Path, workers: int) -> None:
        """New kinds answer, a mistake changes nothing, and what takes a restart is told."""
        file, place = tmp_path / "s.toml", tmp_path / "s.sock"
        server = f'[server]\nworkers = {workers}\nuds = "s.sock"\n[store]\nurl = "x.db"\n'
        file.write_text(server + KIND.format(name="old"))
        with serving(tmp_path, "s.toml") as (process, log), asking(place) as client:
            assert client.get("/v1/old/a").status_code == 503
            file.write_text(server.replace("s.sock", "t.sock") + KIND.format(name="new"))
            process.send_signal(signal.SIGHUP)
            until(lambda: [status(place, "/v1/new/a") for _ in range(10)] == [503] * 10)
            until(lambda: [status(place, "/v1/old/a") for _ in range(10)] == [404] * 10)
            assert "server.uds: takes a restart; it stays s.sock" in log.read_text()
            file.write_text(server + '[kinds.new]\nfresh_for = "soon"\n')
            process.send_signal(signal.SIGHUP)
            until(lambda: "not reloaded: kinds.new.fresh_for" in log.read_text())
            assert status(place, "/v1/new/a") == 503
            assert os.path.exists(place)  # noqa: PTH110 (a socket)

    @BOTH
    def test_a_recording_continues_after_sighup(self, tmp_path: Path, workers: int) -> None:
        """In the same file, with what is read of the new kinds; another file takes a restart."""
        file, place = tmp_path / "s.toml", tmp_path / "s.sock"
        server = f'[server]\nworkers = {workers}\nuds = "s.sock"\nrecord = "r.jsonl"\n'
        server += '[store]\nurl = "x.db"\n'
        file.write_text(server + KIND.format(name="old"))
        with serving(tmp_path, "s.toml") as (process, log):
            assert status(place, "/v1/old/a") == 503
            file.write_text(server.replace("r.jsonl", "other.jsonl") + KIND.format(name="new"))
            process.send_signal(signal.SIGHUP)
            until(lambda: [status(place, "/v1/new/a") for _ in range(10)] == [503] * 10)
            assert re.search(r"server\.record: .*restart.* r\.jsonl", log.read_text())
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
        assert lines[0][0] == "stillfresh-recording"
        reads = [line[2] for line in lines if line[-1] == "read"]
        assert reads.count("old") == 1
        assert reads.count("new") >= 10
        assert not (tmp_path / "other.jsonl").exists()

    def test_sighup_without_a_settings_file_changes_nothing(self, tmp_path: Path) -> None:
        """It says so, and goes on."""
        site = ["--upstream", "http://127.0.0.1:1", "--uds", "s.sock"]
        with serving(tmp_path, *site) as (process, log), asking(tmp_path / "s.sock") as client:
            process.send_signal(signal.SIGHUP)
            until(lambda: "there is no file of settings" in log.read_text())
            assert client.get("/readyz").status_code == 200
