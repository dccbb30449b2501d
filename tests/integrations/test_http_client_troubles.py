"""D1 under trouble: a store that dies in the middle of requests, and eight processes at once."""

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import requests

from stillfresh.integrations.httpx import AsyncCacheTransport, CacheTransport
from stillfresh.integrations.requests import CacheAdapter
from tests.kit.http_site import Site, serving_site
from tests.kit.servers.valkey import Server, binary_of, serving

CALLERS = 16
PROCESSES = 8
PATHS = 5
LONG = 60  # seconds to wait for what comes in milliseconds, unless the machine is busy

PROCESS = """
import sys

import requests

from stillfresh.integrations.requests import CacheAdapter

store, url, paths = sys.argv[1], sys.argv[2], int(sys.argv[3])
session = requests.Session()
session.mount("http://", CacheAdapter(store))
print("ready", flush=True)
sys.stdin.readline()
for number in range(paths):
    print(session.get(f"{url}/items/{number}").text, flush=True)
sys.stdin.readline()
print(session.get(f"{url}/items/0").text, flush=True)
session.close()
"""


@pytest.fixture
def site() -> Iterator[Site]:
    with serving_site() as site:
        yield site


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Server]:
    """A Valkey server of this test alone."""
    binary = binary_of("valkey")
    if binary is None:
        pytest.skip("this machine has no valkey-server")
    with serving(binary, tmp_path) as server:
        yield server


def ask_in_threads(get: Callable[[], str], trouble: Callable[[], None], site: Site) -> list[str]:
    """What sixteen threads get if the trouble begins while the site's answer is awaited."""
    site.gate.clear()
    site.arrived.clear()
    with ThreadPoolExecutor(CALLERS) as threads:
        answers = [threads.submit(get) for _ in range(CALLERS)]
        try:
            assert site.arrived.wait(LONG)
            trouble()
        finally:
            site.gate.set()
        return [answer.result(LONG) for answer in answers]


class TestD1StoreThatDies:
    @pytest.mark.parametrize("how", ["stop", "pause"])
    def test_every_caller_of_requests_gets_the_answer(
        self, site: Site, mortal: Server, how: str
    ) -> None:
        """Also from a server that accepts connections and answers nothing."""
        site.answer("/a", b"one", cache_control="max-age=600")
        with requests.Session() as session:
            session.mount("http://", CacheAdapter(mortal.url(timeout="300ms")))
            session.get(f"{site.url}/nothing")

            def get() -> str:
                return session.get(f"{site.url}/a").text

            assert ask_in_threads(get, getattr(mortal, how), site) == ["one"] * CALLERS
            assert get() == "one"
            if how == "pause":
                mortal.go_on()

    @pytest.mark.parametrize("how", ["stop", "pause"])
    def test_every_caller_of_a_sync_client_gets_the_answer(
        self, site: Site, mortal: Server, how: str
    ) -> None:
        site.answer("/a", b"one", cache_control="max-age=600")
        store = mortal.url(timeout="300ms")
        with httpx.Client(transport=CacheTransport(store), timeout=LONG) as client:
            client.get(f"{site.url}/nothing")

            def get() -> str:
                return client.get(f"{site.url}/a").text

            assert ask_in_threads(get, getattr(mortal, how), site) == ["one"] * CALLERS
            assert get() == "one"
            if how == "pause":
                mortal.go_on()

    @pytest.mark.parametrize("how", ["stop", "pause"])
    async def test_every_task_of_an_async_client_gets_the_answer(
        self, site: Site, mortal: Server, how: str
    ) -> None:
        site.answer("/a", b"one", cache_control="max-age=600")
        store = mortal.url(timeout="300ms")
        transport = AsyncCacheTransport(store)
        async with httpx.AsyncClient(transport=transport, timeout=LONG) as client:
            await client.get(f"{site.url}/nothing")
            site.gate.clear()
            site.arrived.clear()
            tasks = [asyncio.create_task(client.get(f"{site.url}/a")) for _ in range(CALLERS)]
            try:
                assert await asyncio.to_thread(site.arrived.wait, LONG)
                await asyncio.to_thread(getattr(mortal, how))
            finally:
                site.gate.set()
            assert [each.text for each in await asyncio.gather(*tasks)] == ["one"] * CALLERS
            assert (await client.get(f"{site.url}/a")).text == "one"
            assert (await client.post(f"{site.url}/a")).status_code == 200
            if how == "pause":
                mortal.go_on()


@pytest.fixture(params=["sqlite", "valkey"])
def shared_store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/http.db"
    return str(request.getfixturevalue("valkey").url(prefix=f"p{uuid.uuid4().hex}"))


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(processes: list["subprocess.Popen[str]"]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


class TestD1Processes:
    def test_eight_processes_at_once_ask_the_site_once_and_see_changes(
        self, site: Site, shared_store: str
    ) -> None:
        """Each address once; a change by one process is a change for all."""
        for number in range(PATHS):
            body = f"body {number}".encode()
            site.answer(f"/items/{number}", body, cache_control="max-age=600")
        command = [sys.executable, "-c", PROCESS, shared_store, site.url, str(PATHS)]
        with ExitStack() as stack:
            processes: list[subprocess.Popen[str]] = []
            for _ in range(PROCESSES):
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                stack.enter_context(process)
                stack.callback(process.kill)
                processes.append(process)
            assert [line_of(process) for process in processes] == ["ready"] * PROCESSES
            go_on(processes)
            for number in range(PATHS):
                assert {line_of(process) for process in processes} == {f"body {number}"}
                assert site.count(f"/items/{number}") == 1
            site.answer("/items/0", b"changed", cache_control="max-age=600")
            with requests.Session() as session:
                session.mount("http://", CacheAdapter(shared_store))
                session.put(f"{site.url}/items/0")
                assert session.get(f"{site.url}/items/0").text == "changed"
            asked = site.count("/items/0")
            go_on(processes)
            assert [line_of(process) for process in processes] == ["changed"] * PROCESSES
            assert site.count("/items/0") == asked
            assert [process.wait(LONG) for process in processes] == [0] * PROCESSES
