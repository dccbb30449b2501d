"""I25: the tests of cache-tests.fyi, from npm, judge `stillfresh serve`."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.processes import ROOT
from tests.kit.serve import Proxy, started
from tests.kit.servers.valkey import free_port

PAGE = ROOT / "docs" / "conformance.md"
ROW = re.compile(r"^\| (`[\w=-]+`(?:, `[\w=-]+`)*) \| .{20,} \|$", re.MULTILINE)


@pytest.fixture
def folder() -> Path:
    """The suite; fetched if it is not there yet."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    fetch = [str(ROOT / "scripts" / "http_tests"), sys.prefix]
    found = subprocess.run(fetch, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"http-cache-tests could not be fetched: {found.stderr[-200:]}")
    return Path(found.stdout.strip())


@pytest.mark.timeout(300)
class TestI25Suite:
    def test_the_public_http_cache_tests_pass_except_the_listed_ones(
        self, folder: Path, tmp_path: Path
    ) -> None:
        """Required and optimal ones; those that only gather information are not counted."""
        port = free_port()
        names = {"protocol": "http", "port": str(port), "pidfile": str(tmp_path / "pid")}
        settings = [f"npm_config_{name}={value}" for name, value in names.items()]
        with ExitStack() as stack:
            server = ["env", *settings, "node", str(folder / "server" / "server.mjs")]
            _, said = started(stack, server)
            assert said.startswith("Listening")
            site = f"http://127.0.0.1:{port}"
            proxy = Proxy(stack, "--heuristic", "--cdn-override", upstream=site)
            run = ["node", "--no-warnings", str(ROOT / "tests/kit/workers/http_suite.mjs")]
            command = [*run, str(folder), proxy.url]
            ended = suite(command)
            for _ in range(3):  # it sleeps for seconds: a busy machine may be late
                if late := failures(ended) - listed():
                    ended |= suite([*command, *late])
        failed = failures(ended)
        assert failed == listed(), {id_: ended.get(id_) for id_ in failed ^ listed()}
        said = f"| 0.4.5 | {len(ended)} | {len(ended) - len(failed)} | {len(failed)} | 0 |"
        assert said in PAGE.read_text()


def suite(command: list[str]) -> dict[str, object]:
    """How each test that judges ended: True, or what went wrong."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {id_: how for id_, (kind, how) in json.loads(done.stdout).items() if kind != "check"}


def failures(ended: dict[str, object]) -> set[str]:
    return {id_ for id_, how in ended.items() if how is not True}


def listed() -> set[str]:
    text = PAGE.read_text().partition("## HTTP cache tests")[2]
    return {id_.strip("` ") for row in ROW.findall(text) for id_ in row.split(",")}
