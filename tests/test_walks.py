"""docs/architecture.md shows what a request really passes through."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
WALKS = (
    "cold_sqlite_read",
    "stale_redis_read",
    "tag_with_push",
    "stale_feed_list",
    "viewport",
    "page_request",
    "browser_watch",
)
FIGURES = r"(\d+) files, (\d+) functions, (\d+) hand-overs"


class Walk(NamedTuple):
    files: list[str]
    hand_overs: int


@pytest.fixture(scope="module")
def walked() -> dict[str, Walk]:
    """In a process of its own: a profiler sees every thread."""
    script = ROOT / "scripts" / "walks.py"
    command = [sys.executable, str(script), "--print"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    walks = re.findall(rf"^(\w+): {FIGURES}\n((?:  .+\n)+)", output, re.MULTILINE)
    return {name: Walk(files.split(), int(count)) for name, _, _, count, files in walks}


def section_of(walk: str) -> str:
    page = (ROOT / "docs" / "architecture.md").read_text()
    [section] = re.findall(rf"<!-- walk {walk} -->(.*?)<!-- /walk -->", page, re.DOTALL)
    return str(section)


@pytest.mark.parametrize("walk", WALKS)
def test_the_architecture_page_lists_the_files_of_a_walk(
    walk: str, walked: dict[str, Walk]
) -> None:
    """Neither more nor fewer: `make diagrams` writes them anew."""
    listed = re.findall(r"^1\. `(.+?)`", section_of(walk), re.MULTILINE)
    assert set(listed) == set(walked[walk].files)


@pytest.mark.parametrize("walk", [walk for walk in WALKS if walk != "tag_with_push"])
def test_the_architecture_page_shows_the_hand_overs_of_a_walk(
    walk: str, walked: dict[str, Walk]
) -> None:
    """A few depend on the version of Python.

    Those of `tag_with_push` depend on what arrives first, the reply to the tag or the push of it.
    """
    [(_, _, hand_overs)] = re.findall(FIGURES, section_of(walk))
    assert abs(int(hand_overs) - walked[walk].hand_overs) <= 3
