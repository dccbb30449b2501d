"""D2, T9: diskcache's own tests, from its source distribution, judge DiskCache."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.kit.processes import ROOT

PAGE = ROOT / "docs" / "conformance.md"
SECTION = re.compile(r"^## diskcache's tests$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (`test_\w+`(?:, `test_\w+`)*) \| (.{20,}) \|$", re.MULTILINE)
FILE_ROW = re.compile(r"^\| `(test_\w+\.py)` \| (`test_.+`) \| (.{20,}) \|$", re.MULTILINE)
JUDGED = "test_core.py"
SHIM = '''\
"""What the tests import as diskcache."""
from stillfresh.integrations.diskcache import Cache


class EmptyDirWarning(UserWarning):
    """A mark of the test file names it."""


class Disk:
    """The base of a class in the test file."""


UNKNOWN = None
'''


@pytest.fixture
def folder() -> Path:
    """diskcache's tests; fetched if they are not there yet."""
    fetch = [str(ROOT / "scripts" / "diskcache_tests"), sys.prefix]
    fetched = subprocess.run(fetch, capture_output=True, text=True, check=False)
    if fetched.returncode:
        pytest.skip(f"diskcache's source distribution could not be had: {fetched.stderr[-200:]}")
    return Path(fetched.stdout.strip())


def section() -> str:
    match = SECTION.search(PAGE.read_text())
    assert match is not None
    return match[0]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", cell)


def names_of_tests(file: Path) -> list[str]:
    """The names of all tests in a file, in its classes too."""
    tree = ast.parse(file.read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [node.name for node in functions if node.name.startswith("test_")]


@pytest.mark.proof
@pytest.mark.timeout(400)
class TestD2Suite:
    def test_diskcaches_own_tests_pass_except_the_listed_ones(
        self, folder: Path, tmp_path: Path
    ) -> None:
        """Exactly these fail: our run fails if another one does, or if one of these passes."""
        package = tmp_path / "diskcache"
        package.mkdir()
        (package / "__init__.py").write_text(SHIM)
        (tmp_path / JUDGED).write_text((folder / JUDGED).read_text())
        (tmp_path / "empty.ini").write_text("[pytest]\n")
        report = tmp_path / "report.xml"
        options = ["-c", "empty.ini", "-q", "-p", "no:randomly", "-p", "no:schemathesis"]
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", JUDGED]
        ended = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert report.exists(), ended.stdout + ended.stderr
        cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314 (pytest has written it)
        failed: set[str] = set()
        passed: set[str] = set()
        for case in cases:
            has_failed = case.find("failure") is not None or case.find("error") is not None
            (failed if has_failed else passed).add(case.attrib["name"])
        listed = {name for cell, _ in ROW.findall(section()) for name in names_in(cell)}
        assert failed == listed, f"{failed ^ listed}\n{ended.stdout[-20_000:]}"
        count = len(failed) + len(passed)
        row = f"| 5.6.3 | {count} | {len(passed)} | {len(failed)} | 0 |"
        assert row in PAGE.read_text()

    def test_every_test_of_the_other_files_is_listed_with_a_reason(self, folder: Path) -> None:
        listed = {file: names_in(cell) for file, cell, _ in FILE_ROW.findall(section())}
        files = {path.name: path for path in folder.glob("test_*.py") if path.name != JUDGED}
        assert listed.keys() == files.keys()
        for name, path in files.items():
            assert sorted(listed[name]) == sorted(names_of_tests(path)), name
