"""The tests of cache-tests.fyi, from npm: run on a cache, compared with a list in the docs."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.processes import ROOT
from tests.kit.serve import started
from tests.kit.servers.valkey import free_port

PAGE = ROOT / "docs" / "conformance.md"
ROW = re.compile(r"^\| (`[\w=-]+`(?:, `[\w=-]+`)*) \| .{20,} \|$", re.MULTILINE)


def fetched_suite() -> Path:
    """The suite; fetched if it is not there yet."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    fetch = [str(ROOT / "scripts" / "http_tests"), sys.prefix]
    process = subprocess.run(fetch, capture_output=True, text=True, check=False)
    if process.returncode:
        pytest.skip(f"http-cache-tests could not be fetched: {process.stderr[-200:]}")
    return Path(process.stdout.strip())


def serving_suite(stack: ExitStack, folder: Path, work: Path) -> str:
    """The suite's own site; its address."""
    port = free_port()
    names = {"protocol": "http", "port": str(port), "pidfile": str(work / "pid")}
    settings = [f"npm_config_{name}={value}" for name, value in names.items()]
    server = ["env", *settings, "node", str(folder / "server" / "server.mjs")]
    _, first_line = started(stack, server)
    assert first_line.startswith("Listening")
    return f"http://127.0.0.1:{port}"


def judged_by_suite(folder: Path, url: str) -> dict[str, object]:
    """How each test that judges ended: True, or what went wrong. Each runs once."""
    run = ["node", "--no-warnings", str(ROOT / "tests/kit/workers/http_suite.mjs")]
    command = [*run, str(folder), url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {id_: how for id_, (kind, how) in json.loads(done.stdout).items() if kind != "check"}


def failures(ended: dict[str, object]) -> set[str]:
    return {id_ for id_, how in ended.items() if how is not True}


def listed_tests(*titles: str) -> set[str]:
    """The tests in the tables below these headings of docs/conformance.md."""
    text = PAGE.read_text()
    names: set[str] = set()
    for title in titles:
        part = re.search(rf"^{re.escape(title)}$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
        assert part is not None, title
        names |= {id_.strip("` ") for row in ROW.findall(part[1]) for id_ in row.split(",")}
    return names
