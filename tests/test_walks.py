"""docs/architecture.md shows the files that a request really passes through, and they stay few."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUDGET = {
    "cold_sqlite_read": 21,
    "stale_feed_list": 32,
    "viewport": 32,
    "page_request": 42,
    "browser_watch": 36,
}
"""Files at most. SQLite's leases, tags and question of ownership, and the engine's fence, work and
load became files of their own; a walk may only become shorter from here."""


@pytest.fixture(scope="module")
def walked() -> dict[str, list[str]]:
    """In a process of its own: a profiler sees every thread."""
    script = ROOT / "scripts" / "walks.py"
    command = [sys.executable, str(script), "--print"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    parts = re.split(r"^(\w+): \d+\n", told, flags=re.MULTILINE)[1:]
    return {
        walk: [line.strip() for line in files.splitlines()]
        for walk, files in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("walk", BUDGET)
def test_the_architecture_page_lists_the_files_of_a_walk(
    walk: str, walked: dict[str, list[str]]
) -> None:
    """Neither more nor fewer: `make diagrams` writes them anew."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    [section] = re.findall(rf"<!-- walk {walk} -->(.*?)<!-- /walk -->", page, re.DOTALL)
    assert set(re.findall(r"^1\. `(.+?)`", section, re.MULTILINE)) == set(walked[walk])


@pytest.mark.parametrize(("walk", "most"), BUDGET.items())
def test_a_walk_opens_few_files(walk: str, most: int, walked: dict[str, list[str]]) -> None:
    """What a reader must open to follow one request has a limit."""
    assert len(walked[walk]) <= most
