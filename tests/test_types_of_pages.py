"""E34, D1, D2: what pyright and mypy say about the programs of the pages (issue 43).

`tests/typing` has the types that they infer, which `make check` asks mypy about.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TYPING = ROOT / "tests" / "typing"
PYRIGHT = Path(sys.prefix) / "servers" / "node_modules" / ".bin" / "pyright"
PAGES = ["fastapi", "flask", "celery", "sync", "http-clients", "diskcache", "guides/types"]
PAGES += ["guides/notebooks"]
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROJECTS = ["django", "guides/getting-started", "guides/several-workers"]
PROJECTS += [
    "guides/sqlalchemy",
    "guides/litestar",
    "guides/strawberry",
    "guides/mcp",
    "guides/llm",
]
"""Pages with files that import each other."""
FILE = re.compile(r"^```py(?:thon)?\n# (\S+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
UNTYPED = {"reportAttributeAccessIssue": False}
"""For Django: it ships no types, and pyright guesses none for managers and test clients."""


@pytest.fixture
def programs(tmp_path: Path) -> list[Path]:
    """The first program of each page, in a file whose name is no library's."""
    files: list[Path] = []
    for page in PAGES:
        program = PROGRAM.search((ROOT / "docs" / f"{page}.md").read_text())
        assert program is not None
        file = tmp_path / f"page_{page.replace('/', '_').replace('-', '_')}.py"
        file.write_text(program[1])
        files.append(file)
    return files


@pytest.fixture(params=PROJECTS)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the files of a page; of a file that the page shows twice, the last."""
    files = FILE.findall((ROOT / "docs" / f"{request.param}.md").read_text())
    assert files
    for name, source in files:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
    options = UNTYPED if request.param == "django" else {}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    return tmp_path


def checked(*command: str | Path, at: Path = ROOT) -> str:
    ended = subprocess.run(command, check=False, cwd=at, capture_output=True, text=True)
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


@pytest.mark.timeout(900)  # it takes seconds, unless the machine is busy
@pytest.mark.skipif(not PYRIGHT.exists(), reason="pyright is not installed here")
def test_e34_pyright_finds_no_error_in_the_programs_of_the_pages(programs: list[Path]) -> None:
    """Nor other types than those that the decorated functions have."""
    assert not checked(PYRIGHT, "--pythonpath", sys.executable, *TYPING.glob("*.py"), *programs)


@pytest.mark.timeout(900)
@pytest.mark.proof
def test_e34_mypy_finds_no_error_in_the_programs_of_the_pages(programs: list[Path]) -> None:
    """Celery ships no types."""
    options = ["--python-executable", sys.executable, "--ignore-missing-imports"]
    mypy = [sys.executable, "-m", "mypy", "--strict", "--allow-untyped-decorators", *options]
    assert not checked(*mypy, *programs, at=programs[0].parent)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYRIGHT.exists(), reason="pyright is not installed here")
def test_e34_pyright_finds_no_error_in_the_projects_of_the_pages(project: Path) -> None:
    """Their files import each other, as on the page."""
    assert not checked(PYRIGHT, "--pythonpath", sys.executable, "--project", project, at=project)


@pytest.mark.timeout(900)
@pytest.mark.proof
def test_e34_mypy_finds_no_error_in_the_projects_of_the_pages(project: Path) -> None:
    """Functions without annotations are checked, too."""
    options = ["--python-executable", sys.executable, "--ignore-missing-imports"]
    options += ["--check-untyped-defs", "--explicit-package-bases"]
    assert not checked(sys.executable, "-m", "mypy", *options, ".", at=project)
