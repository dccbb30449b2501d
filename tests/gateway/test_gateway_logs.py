"""G16: what a real `stillfresh serve` logs: every request, no secret, and never in its own way."""

import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from stillfresh.gateway.config import LogSettings, Mistakes, load
from stillfresh.gateway.serving import secrets_of
from tests.kit.cli import COMMAND, call
from tests.kit.serve import raw_site

MARK = "s3cret"
"""In everything that is secret here."""
SITE = {"pages": {"upstream": "http://127.0.0.1:1"}}
FILE = """
[pages]
upstream = "{site}"
[server]
token = "operators-s3cret"
authenticate_url = "{site}/who?key=s3cret"
[kinds.post]
url = "{site}/posts/{{id}}?key=s3cret"
fresh_for = "1m"
headers = {{ Authorization = "Bearer api-s3cret" }}
[kinds.mine]
url = "{site}/mine/{{viewer_id}}/{{id}}"
fresh_for = "1m"
per_viewer = true
[outbox]
database = "postgresql://ann:database-s3cret@127.0.0.1:1/shop"
"""


@contextmanager
def serving(
    folder: Path, *arguments: str, run_by: Sequence[str] = ()
) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """A gateway whose log nobody reads before the test does, and its address."""
    command = [*run_by, *COMMAND, "serve", *arguments, "--port", "0"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, **pipes) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline().decode().split()
            assert said, process.communicate()
            yield process, said[0]
        finally:
            process.kill()


def ended(process: "subprocess.Popen[bytes]") -> str:
    """All that it said."""
    process.send_signal(signal.SIGTERM)
    said, logged = process.communicate(timeout=60)
    return (said + logged).decode()


def read_until(process: "subprocess.Popen[bytes]", said: str) -> str:
    """What it logs up to a line that says this."""
    assert process.stderr is not None
    lines = [process.stderr.readline().decode()]
    while lines[-1] and said not in lines[-1]:
        lines.append(process.stderr.readline().decode())
    return "".join(lines)


class TestG16NoSecretIsLogged:
    def test_a_gateway_whose_upstreams_fail_logs_no_secret(self, tmp_path: Path) -> None:
        """Neither the settings' secrets nor a visitor's nor an upstream's, at any level."""

        def answers(request: bytes) -> bytes:
            if request.startswith(b"GET /posts/moved"):
                return b"HTTP/1.1 302 Found\r\nlocation: http://u:s3cret@h/?t=s3cret\r\n\r\n"
            return (
                b"HTTP/1.1 200 s3cret\r\nset-cookie: sid=s3cret\r\ncontent-length: 99\r\n\r\ns3cret"
            )

        with ExitStack() as stack:
            file = tmp_path / "stillfresh.toml"
            file.write_text(FILE.format(site=raw_site(stack, answers)))
            options = "--log-level", "debug", "--log-format", "json", "--access-log", "json"
            process, url = stack.enter_context(serving(tmp_path, str(file), *options))
            fields = {"Authorization": "Bearer viewer-s3cret", "Cookie": "sid=s3cret"}
            client = stack.enter_context(httpx.Client(base_url=url, headers=fields, timeout=30))
            for path in ("/v1/post/1", "/v1/post/moved", "/v1/mine/1", "/metrics"):
                assert client.get(path, params={"token": MARK}).status_code in {401, 503}, path
            target = f"http://ann:{MARK}@{url.removeprefix('http://')}/page?reset={MARK}"
            with pytest.raises(httpx.RemoteProtocolError):  # cut, as the site's answer is
                client.get("/page", extensions={"target": target.encode()})
            file.write_text(file.read_text() + '[store]\nurl = "redis://:new-s3cret@127.0.0.1:1"\n')
            process.send_signal(signal.SIGHUP)
            logged = read_until(process, '"reloaded"') + ended(process)
        assert MARK not in logged
        told = [json.loads(line) for line in logged.splitlines() if line.startswith("{")]
        access = [(it["path"], it["status"]) for it in told if it["level"] == "access"]
        assert access[:3] == [("/v1/post/1", 503), ("/v1/post/moved", 503), ("/v1/mine/1", 503)]
        loggers = {it["logger"] for it in told if it["level"] != "access"}
        assert loggers >= {
            "stillfresh.integrations.postgres.consumer",
            "stillfresh.engine.loader",
            "stillfresh.pages.edge",
            "stillfresh.stores.redis.link",
        }

    def test_secrets_of_the_settings_are_known_to_the_log(self, tmp_path: Path) -> None:
        """Token, passwords and header fields."""
        file = tmp_path / "a.toml"
        text = FILE.format(site="http://127.0.0.1:2").replace("database-s3cret", "d%40ta")
        file.write_text(text + '[store]\nurl = "redis://u:redis-pass@h/0"\n')
        found = set(secrets_of(load(file, None, {})))
        assert found >= {"operators-s3cret", "api-s3cret", "d%40ta", "redis-pass"}
        file.write_text(text.replace("postgresql://ann:d%40ta@127.0.0.1:1/shop", "password=x1y2"))
        assert "x1y2" in set(secrets_of(load(file, None, {})))


class TestG16AccessOfWorkers:
    def test_workers_answer_although_nobody_reads_their_log(self, tmp_path: Path) -> None:
        """More lines than a pipe holds; all are answered, and read later each is whole."""
        with ExitStack() as stack:
            page = b"HTTP/1.1 200 OK\r\ncache-control: max-age=60\r\ncontent-length: 2\r\n\r\nhi"
            site = raw_site(stack, lambda _: page)
            options = "--workers", "2", "--store", "sqlite:///a.db", "--access-log", "json"
            process, url = stack.enter_context(serving(tmp_path, "--upstream", site, *options))
            paths = ["/" + f"{number:03}" + "x" * 900 for number in range(50)]
            for _ in range(2):
                with httpx.Client(base_url=url, timeout=30) as client:
                    for path in paths:
                        assert client.get(path).text == "hi"
            logged = ended(process)
        told = [json.loads(line) for line in logged.splitlines() if line.startswith("{")]
        assert len(logged) > 65_536
        assert sorted(it["path"] for it in told) == sorted(paths * 2)
        assert {it["cache"].partition(";")[0] for it in told} == {"fwd=miss", "hit"}

    def test_workers_answer_although_standard_error_is_closed(self, tmp_path: Path) -> None:
        """Visitors are answered, whatever has its number now."""
        closed = "sh", "-c", 'exec "$0" "$@" 2>&-'
        with ExitStack() as stack:
            site = raw_site(stack, lambda _: b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
            options = "--workers", "2", "--store", "sqlite:///a.db", "--access-log", "text"
            process, url = stack.enter_context(
                serving(tmp_path, "--upstream", site, *options, run_by=closed)
            )
            with httpx.Client(base_url=url, timeout=30) as client:
                assert [client.get("/").text for _ in range(5)] == ["hi"] * 5
            ended(process)
            assert process.returncode == 0


class TestG16Settings:
    def test_log_settings_come_from_file_variable_and_option(self, tmp_path: Path) -> None:
        """Each overrides the one before it."""
        file = tmp_path / "a.toml"
        file.write_text('[log]\nlevel = "info"\nformat = "json"\naccess = "json"\n')
        environ = {"STILLFRESH_LOG__LEVEL": "error", "STILLFRESH_LOG__ACCESS": "text"}
        found = load(file, {**SITE, "log": {"access": "off"}}, environ)
        assert found.log == LogSettings("error", "json", "off")
        assert load(None, SITE, {}).log == LogSettings("warning", "text", "off")

    @pytest.mark.parametrize("option", ["--log-level", "--log-format", "--access-log"])
    def test_a_wrong_log_option_is_named(self, option: str) -> None:
        """And what is allowed."""
        result = call("serve", "--upstream", "http://127.0.0.1:1", option, "loud")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"Error: {option}: must be '")
        assert "not 'loud'" in result.stderr

    def test_a_wrong_log_setting_is_named(self) -> None:
        """Of a file as of a variable."""
        with pytest.raises(Mistakes, match=r"log\.format: .*'xml'"):
            load(None, {**SITE, "log": {"format": "xml"}}, {})
