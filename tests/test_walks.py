"""docs/architecture.md shows what a request really passes through, and its files stay few."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
BUDGET = {
    "cold_sqlite_read": 24,
    "stale_redis_read": 28,
    "tag_with_push": 35,
    "stale_feed_list": 35,
    "viewport": 34,
    "page_request": 46,
    "browser_watch": 39,
}
"""Files at most. Most are two to four more than before the engine's loads became tasks that begin
at once: a read also passes through `core`, `store_reads` and `counts`. A walk may only become
shorter from here."""
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


@pytest.mark.parametrize("walk", BUDGET)
def test_the_architecture_page_lists_the_files_of_a_walk(
    walk: str, walked: dict[str, Walk]
) -> None:
    """Neither more nor fewer: `make diagrams` writes them anew."""
    listed = re.findall(r"^1\. `(.+?)`", section_of(walk), re.MULTILINE)
    assert set(listed) == set(walked[walk].files)


@pytest.mark.parametrize("walk", BUDGET)
def test_the_architecture_page_shows_the_hand_overs_of_a_walk(
    walk: str, walked: dict[str, Walk]
) -> None:
    """A few depend on the order of two messages, and on the version of Python."""
    [(_, _, hand_overs)] = re.findall(FIGURES, section_of(walk))
    assert abs(int(hand_overs) - walked[walk].hand_overs) <= 3


@pytest.mark.parametrize(("walk", "most"), BUDGET.items())
def test_a_walk_opens_few_files(walk: str, most: int, walked: dict[str, Walk]) -> None:
    """What a reader must open to follow one request has a limit."""
    assert len(walked[walk].files) <= most
