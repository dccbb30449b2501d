"""T10: `make test-all` runs the tests on every Python found."""

from pathlib import Path

import pytest

from scripts import pythons
from tests.kit.processes import ROOT

MAKE = """#!/bin/sh
echo "$@" >> calls
case "$*" in *VENV=.venvs/3.13*) exit 2;; esac
"""


def program(folder: Path, name: str, text: str = "#!/bin/sh\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / name
    made.write_text(text)
    made.chmod(0o755)
    return made


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with the folders `on-path`, `later-on-path` and `pyenv`."""
    monkeypatch.setattr(pythons, "ROOT", tmp_path)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("PATH", f"{tmp_path}/on-path:{tmp_path}/later-on-path:/usr/bin:/bin")
    monkeypatch.setattr(pythons, "VERSIONS", ("3.91", "3.92", "3.13", "3.94"))
    program(tmp_path / "on-path", "make", MAKE)
    return tmp_path


class TestT10Pythons:
    def test_pythons_are_found_on_the_path_and_in_pyenv(self, machine: Path) -> None:
        """The first that starts: a shim of pyenv whose version is not chosen is passed over."""
        shim = "#!/bin/sh\nexit 127\n"
        program(machine / "on-path", "python3.91", shim)
        first = program(machine / "later-on-path", "python3.91")
        program(machine / "on-path", "python3.92", shim)
        other = program(machine / "pyenv" / "versions" / "3.92.1" / "bin", "python3.92")
        free = program(machine / "on-path", "python3.14t")
        assert pythons.found() == {"3.91": first, "3.92": other, "3.14t": free}

    def test_each_python_has_its_line_and_one_failure_fails_all(
        self, machine: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """In a fresh environment of its own, with the tests that were named."""
        for version in ("3.91", "3.13"):
            program(machine / "on-path", f"python{version}")
        old = program(machine / ".venvs" / "3.91", "of-before")
        assert pythons.main(["tests/engine", "-x"]) == 1
        assert capfd.readouterr().out.splitlines() == [
            "Python 3.91: passed",
            "Python 3.92: not found",
            "Python 3.13: failed",
            "Python 3.94: not found",
        ]
        assert not old.exists()
        first, second = (machine / "calls").read_text().splitlines()
        asked = f"PYTHON={machine}/on-path/python3.91 TESTS=tests/engine -x suite"
        assert first == f"VENV=.venvs/3.91 {asked}"
        assert second.startswith("VENV=.venvs/3.13 ")

    def test_finding_no_python_at_all_is_a_failure(self, machine: Path) -> None:
        """Nothing was tested."""
        assert pythons.main([]) == 1
        assert not (machine / "calls").exists()

    def test_the_makefile_and_the_pythons_script_agree(self) -> None:
        """The target that the script calls runs all tests, in the environment that it names."""
        makefile = (ROOT / "Makefile").read_text()
        assert "\ntest: setup " in makefile
        assert "--no-print-directory suite\n" in makefile
        assert "\nsuite: $(VENV)/.servers $(VENV)/.docs " in makefile
        assert "scripts/pythons.py $(TESTS)" in makefile
