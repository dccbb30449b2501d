"""M11: the optional compiled build passes the very tests that the plain one passes."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEADER = Path(sysconfig.get_paths()["include"]) / "Python.h"
NEEDED = {"a C compiler": shutil.which("cc") is not None, f"{HEADER.name}": HEADER.exists()}
MISSING = [what for what, there in NEEDED.items() if not there]


@pytest.mark.skipif(bool(MISSING), reason=f"the compiled build needs {' and '.join(MISSING)}")
def test_m11_the_compiled_build_passes_the_same_tests(tmp_path: Path) -> None:
    """A wheel built with STILLFRESH_COMPILED=1: all tests of TtlCache and Sweeper run on it."""
    source, wheel = tmp_path / "source", tmp_path / "wheel"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so"))
    shutil.copytree(ROOT / "scripts", source / "scripts")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(["-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], source)
    (built,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(built, wheel, "zip")
    found = run(["-c", "import stillfresh.ttl_cache as it; print(it.__file__)"], wheel)
    assert found.strip().startswith(str(wheel))
    assert found.strip().endswith(".so")
    tests = [str(path) for path in (ROOT / "tests").glob("test_ttl_cache*.py")]
    tests.append(str(ROOT / "tests" / "test_sweeper.py"))
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--config-file={ROOT}/pyproject.toml",
    ]
    said = run(["-m", "pytest", *options, *tests], wheel)
    assert " passed" in said
    assert "skipped" not in said


def run(arguments: list[str], folder: Path) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(folder),
        "STILLFRESH_COMPILED": "1",
        "MYPYC_OPT_LEVEL": "0",  # the C compiler's, which is most of the time
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
