"""D6: servers that speak Redis's protocol; tests/stores/test_redis.py runs on each that is here."""

import re
import subprocess

import pytest

from tests.kit.processes import ROOT
from tests.kit.servers.valkey import SERVERS, binary_of

PAGE = (ROOT / "docs" / "redis-servers.md").read_text()
ROW = re.compile(r"^\| (\w+) \| ([\d.]+) \| .* \| passes", re.MULTILINE)


@pytest.mark.parametrize("name", SERVERS)
def test_the_page_names_the_server_that_the_suite_runs_on(name: str) -> None:
    """Its version is one that the page lists as passing."""
    binary = binary_of(name)
    if binary is None:
        pytest.skip(f"this machine has no {name}-server")
    command = [str(binary), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    [version] = re.findall(r"v=([\d.]+)", done.stdout)
    passing = {(server.lower(), number) for server, number in ROW.findall(PAGE)}
    assert (name, version) in passing, "run the suite, and write the version into the page"
