"""T15: nginx with `proxy_cache` as a peer of `stillfresh prove`."""

import asyncio
import gc
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from stillfresh import ConfigError, LoadFailed, StoreError
from stillfresh.lab.prove import LOST, Stage, checked_peer
from stillfresh.lab.prove.nginx import NginxShelf, checked_nginx, nginx_stage
from stillfresh.lab.prove.proxy import HOST, stop_listening
from stillfresh.lab.prove.witness import Log, MovedClock, Seen, events_of, move_clock
from stillfresh.lab.prove.worker import ProofJob
from tests.kit.cli import call
from tests.kit.servers.cluster import until

UNPACKED = Path(sys.prefix) / "servers" / "nginx" / "usr" / "sbin"
"""Where `scripts/servers` puts it if this machine has none."""
NGINX_ALONE = """
import time
from stillfresh.lab.prove.nginx import nginx_stage

with nginx_stage() as stage:
    print(stage.url, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _has_nginx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{UNPACKED}")
    try:
        checked_nginx()
    except ConfigError as exc:
        pytest.skip(str(exc))


@pytest.fixture
def stage() -> Iterator[Stage]:
    with nginx_stage() as stage:
        yield stage


@asynccontextmanager
async def open_shelf(stage: Stage, folder: Path) -> AsyncIterator[NginxShelf]:
    """A visitor of nginx, which is also the site."""
    if not (folder / "clock").exists():
        move_clock(folder / "clock", 0.0)
    log = Log(folder / "log")
    job = ProofJob(folder / "log", folder / "clock", folder / "complaints", {}, 0.1, stage)
    shelf = NginxShelf(job, log, MovedClock(folder / "clock"))
    await shelf.open()
    try:
        yield shelf
    finally:
        await shelf.close()
        log.close()


def events(folder: Path, what: str) -> list[Seen]:
    return [event for event in events_of((folder / "log").read_bytes()) if event.what == what]


@pytest.mark.timeout(200)
def test_prove_judges_nginx_beside_stillfresh(tmp_path: Path) -> None:
    """T15: processes ask nginx, and answer it as the site; both end in one table."""
    told = tmp_path / "proof.json"
    arguments = ("--minutes", "0.01", "--seed", "1", "--workers", "2", "--json", str(told))
    result = call("prove", str(tmp_path / "cache.db"), "--peer", "nginx", *arguments)
    assert result.exit_code == 0, result.stdout
    _, report = json.loads(told.read_text())["reports"]
    assert report["store"] == "nginx"
    assert min(report["counts"][what] for what in ("served", "load", "loaded")) > 0
    assert LOST in report["broken"]
    assert sum(report["faults"].values()) > 0
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| stillfresh", "| nginx"]


def test_a_missing_nginx_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """T15: with the command that installs it; nothing is started."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("stillfresh.lab.prove.nginx.SYSTEM_FOLDERS", ())
    with pytest.raises(ConfigError, match=r"nginx is not installed.*apt-get install nginx-light"):
        checked_peer("nginx", "cache.db")
    result = call("prove", str(tmp_path / "cache.db"), "--peer", "nginx")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_an_nginx_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """T15: the run ends with nginx's own words."""
    settings = "stillfresh.lab.prove.nginx.SETTINGS"
    monkeypatch.setattr(settings, "no_such_word {port}{host}{folder}{user}{socket};")
    with pytest.raises(StoreError, match=r"nginx did not start: .*no_such_word"), nginx_stage():
        pytest.fail("nginx runs")


async def test_nginx_serves_its_page_until_it_is_invalidated(stage: Stage, tmp_path: Path) -> None:
    """T15: a hit asks the site nothing; an invalidation renders the page anew."""
    async with open_shelf(stage, tmp_path) as shelf:
        [first] = await shelf.read(["sku-1"])
        await shelf.invalidate("sku-1")
        [second] = await shelf.read(["sku-1"])
    names = [event.load for event in events(tmp_path, "load")]
    assert first.load == names[0]
    assert second.load in names[1:]
    [invalidated] = events(tmp_path, "invalidated")
    assert invalidated.key == "sku-1"


async def test_nginx_cannot_invalidate_while_the_site_is_away(stage: Stage, tmp_path: Path) -> None:
    """T15: the caller is told, and nothing is logged as invalidated. Nor is there a new page."""
    async with open_shelf(stage, tmp_path) as shelf:
        [first] = await shelf.read(["sku-1"])
        with stage.faults["the site out of reach"](random.Random(1)):
            with pytest.raises(StoreError, match="nginx answered 502"):
                await shelf.invalidate("sku-1")
            with pytest.raises(LoadFailed, match="nginx answered 502"):
                await shelf.read(["sku-2"])
            [last] = await shelf.read(["sku-1"])
    assert last.load == first.load
    assert events(tmp_path, "invalidated") == []


@pytest.mark.proof
async def test_reads_of_nginx_without_the_site_are_counted(stage: Stage, tmp_path: Path) -> None:
    """T15: the page is older than it may be, and nginx serves it all the same."""
    async with open_shelf(stage, tmp_path) as shelf:
        [first] = await shelf.read(["sku-1"])
        assert not first.blind
        with stage.faults["the site out of reach"](random.Random(1)):
            last = first
            while not last.blind:
                await asyncio.sleep(0.05)
                [last] = await shelf.read(["sku-1"])
        assert last.load == first.load
        assert last.wall - last.fetched_at > stage.fresh_for + stage.stale_for


async def test_a_part_of_the_site_stays_until_the_last_visitor_has_left(
    stage: Stage, tmp_path: Path
) -> None:
    """T15: a process that ends while others still read would make their reads fail."""
    async with AsyncExitStack() as stack:
        others = await stack.enter_async_context(open_shelf(stage, tmp_path))
        async with asyncio.TaskGroup() as group:
            is_open = asyncio.Event()
            leaves = asyncio.Event()

            async def visit() -> None:
                async with open_shelf(stage, tmp_path) as shelf:
                    await shelf.read(["sku-1"])
                    is_open.set()
                    await leaves.wait()

            visitor = group.create_task(visit())
            await is_open.wait()
            leaves.set()
            await others.read(["sku-2"])
            assert not visitor.done()
            await stack.aclose()
    assert len(events(tmp_path, "load")) == 2


def test_nginx_ends_with_a_command_that_was_killed() -> None:
    """T15: nobody is left to end it then."""
    arguments = [sys.executable, "-c", NGINX_ALONE]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        place = command.stdout.readline().strip()
        assert is_listening(place)
        command.kill()
    until(lambda: not is_listening(place), "nginx runs on")
    shutil.rmtree(Path(place).parent)


def is_listening(place: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(place) == 0


@pytest.mark.parametrize("turns", range(5))
async def test_a_server_that_stops_listening_loses_no_connection(turns: int) -> None:
    """T15: not one that it accepted just before either, which asyncio would never close."""
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), HOST, 0)
    with socket.create_connection(server.sockets[0].getsockname()):
        for _ in range(turns):
            await asyncio.sleep(0)
        await stop_listening(server)
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)
    gc.collect()  # warns of a connection that is not closed
