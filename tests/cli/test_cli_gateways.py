"""G18: `warm` and `stats`, before a running gateway, a file of settings, and a store."""

import asyncio
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stillfresh.cli import counting, warming
from stillfresh.gateway import gateway
from stillfresh.systems.coordinator import Kind
from tests.kit.cli import call, interruptible, said
from tests.kit.gateway import api_config, running


class Site:
    """Pages that may be kept, some that may not, and one that is not there."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        self.asked.append(
            str(request.url.path) + (f"?{request.url.query}" if request.url.query else "")
        )
        kept = {"/own": "no-store", "/blog": ""}.get(scope["path"], "s-maxage=600")
        headers = {"cache-control": kept} if kept else {}
        reply: Response = PlainTextResponse(f"page {scope['path']}", headers=headers)
        if "none" in scope["path"]:
            reply = PlainTextResponse("no", 404)
        await reply(scope, receive, send)


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """In a thread of its own, since commands run event loops of theirs."""
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        config = api_config(app) if isinstance(app, Site) else None
        async with running(app, config) as found:
            ready.append(found)
            is_ready.set()
            await end.wait()

    ready: list[str] = []
    is_ready = threading.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert is_ready.wait(60)
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


@pytest.fixture
def site() -> Iterator[tuple[Site, str]]:
    found = Site()
    with served(found) as url:
        yield found, url


def counts_in(text: str) -> dict[str, int]:
    """The counts that `warm` prints, by what was counted."""
    return {name: int(number) for number, name in re.findall(r"(\d+) ([a-z ]+)", text)}


def listed(directory: Path, *lines: str) -> str:
    file = directory / "urls.txt"
    file.write_text("\n".join(lines))
    return str(file)


FAST = ["--rate", "10000"]
OPENING = """
import click
from stillfresh.cli import main
really = click.open_file
def opening(*given):
    click.echo("opening")
    return really(*given)
click.open_file = opening
main()
"""


class TestG18Warm:
    def test_ctrl_c_ends_warm_while_its_list_is_a_pipe_without_a_writer(
        self, tmp_path: Path
    ) -> None:
        """Nothing is asked for yet, and opening the pipe waits."""
        os.mkfifo(tmp_path / "urls")
        command = [sys.executable, "-c", OPENING, "warm", "http://127.0.0.1:1", "--from"]
        with interruptible([*command, str(tmp_path / "urls")]) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "opening\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err.strip()) == (130, "", "")

    def test_warm_fills_a_store_from_its_site(self, site: tuple[Site, str], tmp_path: Path) -> None:
        """Each line is asked for once; what was kept is in the store, for the next gateway."""
        pages, url = site
        store = f"{tmp_path}/site.db"
        urls = listed(tmp_path, "# pages", "/a", "", "http://elsewhere.example/b?c=d", "/own")
        warm = ["warm", store, "--upstream", url, "--from", urls, *FAST]
        assert counts_in(said(*warm)) == {
            "stored": 2,
            "there already": 0,
            "not kept": 1,
            "failed": 0,
        }
        assert sorted(pages.asked) == ["/a", "/b?c=d", "/own"]
        assert counts_in(said(*warm)) == {
            "stored": 0,
            "there already": 2,
            "not kept": 1,
            "failed": 0,
        }
        found = json.loads(said("inspect", store, "--kind", "page", "--json"))
        assert [it["id"] for it in found["entries"] if not it["absent"]] == [
            "http://elsewhere.example/b?c=d",
            "http://localhost/a",
        ]

    def test_warm_stores_paths_for_the_first_host_of_the_site(
        self, site: tuple[Site, str], tmp_path: Path
    ) -> None:
        """I35: visitors name that host, and find the pages."""
        file = tmp_path / "stillfresh.toml"
        file.write_text(
            f'[store]\nurl = "{tmp_path}/x.db"\n[pages]\nupstream = "{site[1]}"\n'
            'site_hosts = ["*.shop.example", "shop.example"]\n'
        )
        said("warm", str(file), "--from", listed(tmp_path, "/a"), *FAST)
        found = json.loads(said("inspect", f"{tmp_path}/x.db", "--kind", "page", "--json"))
        assert [it["id"] for it in found["entries"]] == ["http://shop.example/a"]

    def test_warm_takes_a_file_of_settings(self, site: tuple[Site, str], tmp_path: Path) -> None:
        """Its store is filled as `serve` would, with its routes."""
        _, url = site
        file = tmp_path / "stillfresh.toml"
        file.write_text(
            f'[store]\nurl = "{tmp_path}/x.db"\n'
            f'[pages]\nupstream = "{url}"\nroutes = {{ "/blog" = "1h" }}\n'
        )
        urls = listed(tmp_path, "/blog", "/a")
        found = json.loads(said("warm", str(file), "--from", urls, "--json", *FAST))
        assert found == {"stored": 2, "there_already": 0, "not_kept": 0, "failed": 0}

    def test_warm_asks_a_running_gateway(self, tmp_path: Path) -> None:
        """Entities are warmed by their paths; whatever failed is named, and ends it with 1."""
        loaded: list[str] = []

        async def prices(ids: list[str]) -> dict[str, int]:
            loaded.extend(ids)
            return {id_: 1 for id_ in ids if id_ != "none"}

        app = gateway(kinds=[Kind("price", fetch=prices, fresh_for="1h")])
        urls = listed(tmp_path, "/v1/price/a", "/v1/price/a", "/v1/price/none", "x", "http:y")
        with served(app) as url:
            result = call("warm", url, "--from", urls, "--concurrency", "1", *FAST)
        assert (result.exit_code, loaded) == (1, ["a", "none"])
        counts = {"stored": 1, "there already": 1, "not kept": 0, "failed": 3}
        assert counts_in(result.stdout) == counts
        assert result.stderr.splitlines() == [
            "HTTP 404: /v1/price/none",
            "neither a path nor an address: x",
            "neither a path nor an address: http:y",
        ]

    def test_warm_reports_a_missing_list_before_opening_anything(self, tmp_path: Path) -> None:
        """Is told before anything is opened."""
        result = call("warm", f"{tmp_path}/x.db", "--upstream", "http://x", "--from", "none.txt")
        assert (result.exit_code, result.stderr) == (
            1,
            "Error: none.txt: No such file or directory\n",
        )
        assert list(tmp_path.iterdir()) == []

    def test_warm_counts_every_line_of_an_unreachable_gateway_as_failed(
        self, tmp_path: Path
    ) -> None:
        """Every line has failed."""
        urls = listed(tmp_path, "/a", "/b")
        result = call("warm", "http://127.0.0.1:1", "--from", urls, *FAST)
        assert result.exit_code == 1
        assert counts_in(result.stdout)["failed"] == 2
        assert result.stderr.count("\n") == 2

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["site.db"], "a store does not know where its entries come from"),
            (["http://x", "--upstream", "http://y"], "--upstream: goes with a STORE"),
            (["x.toml", "--upstream", "http://y"], "--upstream: goes with a STORE"),
            (["none.toml"], "none.toml: No such file"),
            (["site.db", "--upstream", "ftp://y"], "pages.upstream: "),
            (["memory://", "--upstream", "http://y"], "would be gone when this command ends"),
        ],
    )
    def test_wrong_use_of_warm_is_one_line(
        self, tmp_path: Path, arguments: list[str], says: str
    ) -> None:
        """Is a line, and 2."""
        result = call("warm", *arguments, "--from", listed(tmp_path, "/a"))
        assert (result.exit_code, result.stdout) == (2, "")
        assert says in result.stderr
        assert result.stderr.count("\n") == 1

    async def test_warm_obeys_its_rate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Turns are so far apart, however many wait for one; a pause is not made up for."""
        now = [100.0]
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
        turn = warming._turns(4)
        assert [turn() for _ in range(4)] == [0, 0.25, 0.5, 0.75]
        now[0] += 60
        assert [turn() for _ in range(2)] == [0, 0.25]


class TestG18Stats:
    def test_stats_shows_how_much_a_store_holds(
        self, tmp_path: Path, site: tuple[Site, str]
    ) -> None:
        """How much there is."""
        store, urls = f"{tmp_path}/site.db", listed(tmp_path, "/a")
        said("warm", store, "--upstream", site[1], "--from", urls, *FAST)
        assert re.search(r"^copies +1$", said("stats", store), re.MULTILINE)
        found = json.loads(said("stats", store, "--json"))
        assert (found["target"], found["store"]["copies"]) == (store, 1)

    def test_stats_shows_reads_hits_and_loads_of_a_gateway(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Reads, the share that needed no load, loads; with a token only to those who have it."""

        async def prices(ids: list[str]) -> dict[str, int]:
            return dict.fromkeys(ids, 1)

        app = gateway(kinds=[Kind("price", fetch=prices, fresh_for="1h")], token="open-sesame")  # noqa: S106
        urls = listed(tmp_path, *["/v1/price/a"] * 4)
        with served(app) as url:
            said("warm", url, "--from", urls, "--concurrency", "1", *FAST)
            refused = call("stats", url)
            monkeypatch.setenv("STILLFRESH_TOKEN", "open-sesame")
            table = said("stats", url)
            found = json.loads(said("stats", url, "--json"))
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert "set STILLFRESH_TOKEN" in refused.stderr
        kind = found["kinds"]["price"]
        assert (kind["reads"], kind["hits"], kind["loads"], kind["entries"]) == (4, 3, 1, 1)
        assert re.search(r"^price +4 +75.0 % +1 +0 +1 +0$", table, re.MULTILINE)

    def test_stats_watch_repeats_its_numbers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`--watch`: a line of JSON for each look, or the table anew with reads a second."""
        looks = iter(range(1, 10))
        pauses: list[float] = []

        async def looked(target: str) -> dict[str, object]:
            number = next(looks)
            kind = {"reads": 10.0 * number, "hits": 5.0, **dict.fromkeys(counting.SUMMED, 0.0)}
            whole = {"at": 2.0 * number, "target": target, "connections": 0.0, "bypassed": 0.0}
            return {**whole, "kinds": {"price": kind}}

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) % 2 == 0:
                raise KeyboardInterrupt

        monkeypatch.setattr(counting, "_report_of", looked)
        monkeypatch.setattr("stillfresh.cli.counting.time.sleep", sleep)
        lines = call("stats", "http://x", "--watch", "--json").stdout.splitlines()
        assert [json.loads(line)["at"] for line in lines] == [2, 4]
        result = call("stats", "http://x", "--watch", "--every", "5s")
        assert result.exit_code == 130
        assert re.search(r"^price +30 +16.7 %", result.stdout, re.MULTILINE)
        assert re.search(r"^price +40 +5.0 +12.5 %", result.stdout, re.MULTILINE)
        assert pauses == [2, 2, 5, 5]

    @pytest.mark.parametrize(
        ("arguments", "code", "says"),
        [
            (["http://127.0.0.1:1"], 1, "http://127.0.0.1:1: no gateway answers: Conn"),
            (["http://"], 2, "URL: must begin with http://"),
            (["x.db", "--every", "soon"], 2, "--every: "),
            (["none.db"], 1, "there is no such file"),
        ],
    )
    def test_stats_of_an_unusable_target_is_one_line(
        self, arguments: list[str], code: int, says: str
    ) -> None:
        """Is a line."""
        result = call("stats", *arguments)
        assert (result.exit_code, result.stdout) == (code, "")
        assert says in result.stderr
        assert result.stderr.count("\n") == 1

    def test_stats_refuses_a_server_that_is_not_a_gateway(self, site: tuple[Site, str]) -> None:
        """Its answer is not counted."""
        result = call("stats", site[1])
        assert (result.exit_code, "not a gateway" in result.stderr) == (1, True)
