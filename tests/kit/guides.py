"""The programs of a guide, as files that a test can import or run."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.kit.processes import ROOT

__all__ = ["imported", "page_of", "run", "write_programs"]

PROGRAM = re.compile(r"^```py(?:thon)?\n# (\S+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_of(guide: str) -> str:
    return (ROOT / "docs" / "guides" / f"{guide}.md").read_text()


def write_programs(guide: str, folder: Path) -> None:
    """Save every block whose first line is a file's name."""
    for name, source in PROGRAM.findall(page_of(guide)):
        (folder / name).write_text(source)


def imported(guide: str, module: str, folder: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the guide, in its own folder; forgotten after the test."""
    write_programs(guide, folder)
    patch.chdir(folder)
    patch.syspath_prepend(folder)
    for name, _source in PROGRAM.findall(page_of(guide)):
        # Modules of this name from other guides are not meant.
        patch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    program = importlib.import_module(module)
    for name, _source in PROGRAM.findall(page_of(guide)):
        loaded = sys.modules.pop(name.removesuffix(".py"), None)
        if loaded is not None:
            patch.setitem(sys.modules, name.removesuffix(".py"), loaded)
    return program


def run(folder: Path, *command: str) -> str:
    """What a program of the guide prints."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
