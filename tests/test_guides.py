"""The guides are true: the blocks of a page run in order, and print what the page shows.

A `python` block runs in the page's namespace, after those above it. One whose first line is
`# name.py` is saved under that name instead, for the blocks below. A `text` block is what the block
above it prints (`…` stands for anything); a `sh` block runs only if one follows.
"""

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\S+\.\w+)\n")
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory, whose files can be imported."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_block_of_a_guide_runs_and_prints_what_it_shows(page: Path, project: Path) -> None:
    """Every block runs; what it prints is what the page shows."""
    names: dict[str, Any] = {"__name__": "guide"}
    text = page.read_text()
    found = list(BLOCK.finditer(text))
    for block, after in zip_longest(found, found[1:]):
        language, source = block[1], block[2].replace("sleep(1)", "sleep(0)")
        said = after[2] if after is not None and _follows(text, block, after) else None
        where = f"{page.name}:{text[: block.start()].count(chr(10)) + 2}"
        printed = None
        if language == "python" and (name := FILE.match(source)):
            file = project / name[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        elif language == "python":
            printed = _ran(source, where, names)
        elif language == "sh" and said is not None:
            printed = _called(source, project)
        if printed is not None and said is not None:
            pattern = ".*?".join(map(re.escape, said.split("…")))
            assert re.fullmatch(pattern, printed, re.DOTALL), f"{where} prints\n{printed}"


def _follows(text: str, block: re.Match[str], after: re.Match[str]) -> bool:
    """A `text` block, with no more than a sentence between."""
    between = text[block.end() : after.start()].strip()
    return block[1] != "text" and after[1] == "text" and "\n" not in between


def _ran(source: str, where: str, names: dict[str, Any]) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, where, "exec"), names)  # noqa: S102 (our own pages)
    return printed.getvalue()


def _called(source: str, project: Path) -> str:
    """What the commands print, one after another, as a new user would see it."""
    new = {"PATH": PATH, "PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        ["/bin/sh", "-c", source],
        cwd=project,
        env={name: it for name, it in os.environ.items() if not name.startswith("PYTEST_")} | new,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout
