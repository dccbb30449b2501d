"""E34 and D4 in a notebook: cells in a real Jupyter kernel, with `await` at the top level."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.guides import page_of

pytest.importorskip("ipykernel")

ASYNC = [
    "from stillfresh import Cache\ncache = Cache('sqlite:///notebook.db')\ncalls = []",
    (
        "@cache.cached('square', fresh_for='1h')\n"
        "async def square(number: int) -> int:\n"
        "    calls.append(number)\n"
        "    return number * number * factor"
    ),
    "factor = 1\nawait square(7)",
    "await square(7), calls",
    "await square.invalidate_all()\nfactor = 2\nawait square(7)",
    "square(8)",
    "await cache.close()",
]
SYNC = [
    "from stillfresh import SyncCache\ncache = SyncCache('memory://')",
    (
        "@cache.cached('double', fresh_for='1h')\ndef double(number: int) -> int:\n"
        "    return number * 2"
    ),
    "[double(21), double(21)]",
    "double",
    "print(cache.stats())",
    "cache.get('double')",
    "cache.close()",
]


def run_cells(folder: Path, cells: list[str]) -> list[dict[str, str]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.kit.workers.notebook"]
    root = Path(__file__).parents[2]
    start = f"import os; os.chdir({str(folder)!r})"
    ended = subprocess.run(
        command,
        check=True,
        cwd=root,
        input=json.dumps([start, *cells]),
        stdout=subprocess.PIPE,
        text=True,
    )
    results: list[dict[str, str]] = json.loads(ended.stdout)
    return results[1:]


class TestE34Notebook:
    def test_cells_await_and_can_be_run_again(self, tmp_path: Path) -> None:
        again = [*ASYNC[:5], ASYNC[1], *ASYNC[2:]]
        results = run_cells(tmp_path, again)
        assert [result["error"] for result in results] == [""] * len(again)
        assert [result["text"] for result in results[:-2]] == [""] * (len(again) - 2)
        values = [result["value"] for result in results]
        assert values[2] == "49"
        assert values[3] == "(49, [7])"
        assert values[4] == "98"
        assert values[5:8] == ["", "98", "(98, [7, 7])"]

    def test_a_sync_cache_works_without_a_word(self, tmp_path: Path) -> None:
        """Although the kernel runs an event loop."""
        results = run_cells(tmp_path, SYNC)
        assert results[2] == {"text": "", "value": "[42, 42]", "error": ""}
        assert "double" in results[3]["value"]
        assert "double: 2 reads, 50.0 % hits" in results[4]["text"]
        assert results[5]["error"].startswith("AttributeError: SyncCache.get: ")
        assert results[6] == {"text": "", "value": "", "error": ""}


class TestD4Notebook:
    def test_the_cells_of_the_guide_run_and_compute_nothing_after_a_restart(
        self, tmp_path: Path
    ) -> None:
        """The second kernel reads what the first one stored."""
        cells = re.findall(
            r"^```py(?:thon)?\n(.*?)^```$", page_of("notebooks"), re.MULTILINE | re.DOTALL
        )
        assert len(cells) == 4
        results = run_cells(tmp_path, cells)
        assert [result["error"] for result in results] == [""] * 4
        assert results[0]["text"].startswith("computing 2026\n")
        assert results[2]["text"] == "loading tea\n300 300\n"
        [again] = run_cells(tmp_path, cells[:1])
        assert again["error"] == ""
        assert again["text"] == "{'year': 2026, 'total': 42}\n" * 2
