"""Runs the tests on every Python found, each in a fresh environment of its own (T10).

Looks along PATH and among pyenv's versions. Ends with one line for each Python, and with status 1
if the tests failed on one of them. Arguments go to pytest: scripts/pythons.py tests/engine
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
ENVIRONMENTS: Final = ".venvs"
VERSIONS: Final = ("3.11", "3.12", "3.13", "3.14")
FREE_THREADED: Final = ("3.13t", "3.14t")
"""Run where they are found; most machines have none."""


def found() -> dict[str, Path]:
    """By version, the first interpreter that starts. pyenv's shims do not, unless chosen."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    folders = [*map(Path, os.get_exec_path()), *sorted(pyenv.glob("versions/*/bin"), reverse=True)]
    there: dict[str, Path] = {}
    for version in (*VERSIONS, *FREE_THREADED):
        programs = (folder / f"python{version}" for folder in folders)
        if program := next(filter(starts, programs), None):
            there[version] = program
    return there


def starts(program: Path) -> bool:
    try:
        return subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def passes(version: str, program: Path, tests: list[str]) -> bool:
    environment = f"{ENVIRONMENTS}/{version}"
    shutil.rmtree(ROOT / environment, ignore_errors=True)
    given = [f"VENV={environment}", f"PYTHON={program}", f"TESTS={shlex.join(tests)}"]
    command = ["make", *given, "suite"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main(tests: list[str]) -> int:
    there = found()
    wanted = (*VERSIONS, *(version for version in FREE_THREADED if version in there))
    ends = dict.fromkeys(wanted, "not found")
    for version, program in there.items():
        ends[version] = "passed" if passes(version, program, tests) else "failed"
    for version, end in ends.items():
        sys.stdout.write(f"Python {version}: {end}\n")
    return int("failed" in ends.values() or not there)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
