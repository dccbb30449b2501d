"""M11: the optional compiled build passes the very tests that the plain one passes."""

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
    """mypyc compiles the same source; every test of TtlCache runs on the result."""
    package = tmp_path / "stillfresh"
    shutil.copytree(ROOT / "src" / "stillfresh", package)
    run(["-m", "mypyc", "stillfresh/ttl_cache.py"], tmp_path)
    (package / "ttl_cache.py").unlink()
    tests = [
        str(ROOT / "tests" / name) for name in ("test_ttl_cache.py", "test_ttl_cache_model.py")
    ]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"--config-file={ROOT}/pyproject.toml",
    ]
    out = run(["-m", "pytest", *options, *tests], tmp_path)
    assert " passed" in out
    assert "skipped" not in out


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={
            "PATH": str(Path(sys.executable).parent) + ":/usr/bin:/bin",
            "PYTHONPATH": str(folder),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
