"""G1: `stillfresh serve FILE`, as a process: pages, kinds and the rest; mistakes are lines."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.kit.gateway import Api, api_config, running

CLI = [sys.executable, "-W", "error", "-m", "stillfresh.cli"]


@asynccontextmanager
async def served(file: Path, *options: str) -> AsyncIterator[tuple[str, Process]]:
    """The address of a gateway of this file, once it listens; killed if it has not ended."""
    command = [*CLI, "serve", str(file), "--port", "0", *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, cwd=file.parent)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            said = (await process.stdout.readline()).decode()
            found = re.match(r"http://[\d.]+:\d+", said)
            assert found, said
            yield found[0], process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def at(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=30)


async def page(request: Request) -> Response:
    headers = {"cache-control": "max-age=60"}
    return PlainTextResponse(f"the page {request.url.path}", headers=headers)


@pytest.fixture
def api() -> Api:
    return Api()


@asynccontextmanager
async def a_file(folder: Path, api: Api, more: str = "") -> AsyncIterator[Path]:
    """Settings for a site and an API that run."""
    site = Starlette(routes=[Route("/{path:path}", page)])
    async with running(api, api_config(api)) as kinds, running(site) as pages:
        file = folder / "stillfresh.toml"
        file.write_text(f"""
            [store]
            url = "sqlite:///fresh.db"
            [pages]
            upstream = "{pages}"
            [kinds.post]
            batch_url = "{kinds}/by_ids"
            fresh_for = "5m"
            {more}
        """)
        yield file


class TestG1Serve:
    async def test_serve_caches_pages_and_kinds_of_one_file(self, tmp_path: Path, api: Api) -> None:
        """Each from its cache when it is asked for again; health and numbers beside."""
        async with a_file(tmp_path, api) as file, served(file) as (url, process):
            async with at(url) as client:
                pages = [await client.get("/blog/1") for _ in range(2)]
                posts = [await client.get("/v1/post/a") for _ in range(2)]
                ready = await client.get("/readyz")
                metrics = await client.get("/metrics")
                dashboard = await client.get("/_stillfresh/")
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        assert {it.text for it in pages} == {"the page /blog/1"}
        assert pages[1].headers["cache-status"].startswith("stillfresh; hit")
        assert posts[1].json() == {"id": "a", "version": 1}
        assert posts[1].headers["cache-status"].startswith("stillfresh; hit; ttl=")
        assert all(len(it.headers.get_list("date")) == 1 for it in [*pages, *posts, ready])
        assert ready.json()["stores"] == {"entities": "reachable", "pages": "reachable"}
        assert 'stillfresh_loads_total{resource="page"}' in metrics.text
        assert dashboard.status_code == 200
        assert api.asked == [{"ids": ["a"]}]

    async def test_stored_copies_outlive_the_process_and_the_upstream(
        self, tmp_path: Path, api: Api
    ) -> None:
        """Started again in front of an upstream that is dead: old, and it says so; else 503."""
        async with a_file(tmp_path, api) as file, served(file) as (url, _), at(url) as client:
            await client.get("/v1/post/a")
        async with served(file) as (url, _), at(url) as client:
            kept, none = await client.get("/v1/post/a"), await client.get("/v1/post/b")
            site = await client.get("/blog/2")
        assert (kept.status_code, none.status_code, site.status_code) == (200, 503, 502)
        assert int(none.headers["retry-after"]) >= 1

    async def test_a_token_from_the_environment_guards_the_metrics(
        self, tmp_path: Path, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Guards the numbers; nobody is shown it."""
        monkeypatch.setenv("STILLFRESH_TOKEN", "sesame")
        async with a_file(tmp_path, api) as file, served(file) as (url, _), at(url) as client:
            refused = await client.get("/metrics")
            shown = await client.get("/metrics", headers={"authorization": "Bearer sesame"})
        assert (refused.status_code, shown.status_code) == (401, 200)

    async def test_serve_starts_while_its_shared_store_is_unreachable(
        self, tmp_path: Path, api: Api
    ) -> None:
        """It starts, loads for itself, and is not ready; the password of the store is not shown."""
        store = "redis://:hush@127.0.0.1:1/0"
        async with (
            a_file(tmp_path, api) as file,
            served(file, "--store", store) as (url, process),
            at(url) as client,
        ):
            ready, post = await client.get("/readyz"), await client.get("/v1/post/a")
            process.send_signal(signal.SIGTERM)
            said = (await process.communicate())[0].decode()
        assert (ready.status_code, post.status_code) == (503, 200)
        assert "keeps post in redis://***@127.0.0.1:1/0" in said
        assert "hush" not in said


def stillfresh(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Ended by itself: what it says, and how."""
    command = [*CLI, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


class TestG1Mistakes:
    @pytest.mark.parametrize("command", ["serve", "check"])
    def test_a_bad_file_is_a_line_for_each_mistake_and_exit_2(
        self, command: str, tmp_path: Path
    ) -> None:
        """With its key; never a traceback."""
        file = tmp_path / "bad.toml"
        file.write_text(
            '[pages]\nupsteam = 1\n[kinds.Post]\nfresh_for = "soon"\n[server]\nport="x"'
        )
        done = stillfresh(command, str(file), cwd=tmp_path)
        keys = re.findall(r"(?:pages|kinds|server)\.[\w.]+(?=:)", done.stderr)
        assert keys == [
            "pages.upsteam",
            "pages.upstream",
            "kinds.Post",
            "kinds.Post.fresh_for",
            "kinds.Post.url",
            "server.port",
        ]
        assert len(done.stderr.strip().splitlines()) == len(keys)
        assert done.returncode == 2
        assert "did you mean upstream?" in done.stderr

    def test_a_mistake_in_an_option_names_the_option(self, tmp_path: Path) -> None:
        """And advised what an option can say; a key of the file keeps its name."""
        file = tmp_path / "stillfresh.toml"
        file.write_text('[pages]\nupstream = "http://127.0.0.1:1"\n[server]\nhosts = "x"')
        options = ("--host", "127.0.0.1", "--route", "/a=10")
        done = stillfresh("serve", str(file), *options, cwd=tmp_path)
        route, hosts = done.stderr.splitlines()
        assert route.startswith("Error: --route.\"/a\": cannot read '10'")
        assert hosts.startswith("Error: server.hosts: ")
        assert hosts.endswith("'x'")

    def test_a_taken_port_is_one_line(self, tmp_path: Path) -> None:
        """One line that names it."""
        file = tmp_path / "stillfresh.toml"
        file.write_text('[pages]\nupstream = "http://127.0.0.1:1"')
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            done = stillfresh("serve", str(file), "--port", port, cwd=tmp_path)
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
        assert "--port" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert done.returncode == 1

    @pytest.mark.parametrize(
        ("host", "says", "code"),
        [
            ("256.0.0.1", "server.host: must be", 2),
            ("::zz", "server.host: must be", 2),
            ("a" * 70, "server.host: must be", 2),
            ("no.such.host.invalid", "cannot listen on", 1),
            ("192.0.2.1", "cannot listen on", 1),
        ],
    )
    def test_an_address_that_cannot_be_bound_is_one_line(
        self, host: str, says: str, code: int, tmp_path: Path
    ) -> None:
        """One line, too: 2 if it can be nobody's, 1 if it is another's."""
        file = tmp_path / "stillfresh.toml"
        file.write_text(f'[pages]\nupstream = "http://127.0.0.1:1"\n[server]\nhost = "{host}"')
        done = stillfresh("serve", str(file), "--port", "0", cwd=tmp_path)
        assert says in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert done.returncode == code

    @pytest.mark.parametrize("store", ["sqlite:////proc/none/x.db", "sqlite:///folder"])
    def test_a_store_that_cannot_be_opened_stops_the_start(
        self, store: str, tmp_path: Path
    ) -> None:
        """Told before anything is served."""
        (tmp_path / "folder").mkdir()
        file = tmp_path / "stillfresh.toml"
        kind = '[kinds.post]\nbatch_url = "http://127.0.0.1:1/x"\nfresh_for = 1'
        file.write_text(f'[store]\nurl = "{store}"\n{kind}')
        done = stillfresh("serve", str(file), "--port", "0", cwd=tmp_path)
        assert done.returncode == 1, done
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert done.stdout == ""

    def test_check_opens_nothing(self, tmp_path: Path) -> None:
        """Nothing is opened: no file appears."""
        file = tmp_path / "good.toml"
        file.write_text('[store]\nurl = "sqlite:///x.db"\n[pages]\nupstream = "http://x"')
        done = stillfresh("check", str(file), cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert list(tmp_path.iterdir()) == [file]
