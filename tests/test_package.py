"""What is published: the wheel, the source distribution, and the names that stay."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CORE = ("apsw", "msgspec")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, and the wheel that is made of it; without a network."""
    folder = tmp_path_factory.mktemp("built")
    build = sys.executable, "-m", "hatchling", "build", "-d", str(folder)
    run(*build, "-t", "sdist", cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    run(*build, "-t", "wheel", cwd=folder / archive.name.removesuffix(".tar.gz"))
    return folder


def run(*command: str, **options: Any) -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class TestPublishing:
    def test_the_wheel_has_everything_that_runs_and_nothing_else(self, built: Path) -> None:
        """Types, SQL and static files, and the licence; no tests, no benchmarks."""
        (wheel,) = built.glob("*.whl")
        names = set(zipfile.ZipFile(wheel).namelist())
        own = {it for it in names if ".dist-info/" not in it}
        files = (it for it in (ROOT / "src").rglob("*") if it.is_file())
        skipped = {"__pycache__"}
        expected = {
            str(it.relative_to(ROOT / "src"))
            for it in files
            if not skipped & {*it.parts} and it.suffix not in {".pyc", ".so"}
        }
        assert own == expected
        assert {"stillfresh/py.typed", "stillfresh/stores/postgres/steps.sql"} <= own
        assert {
            "stillfresh/gateway/static/dashboard.html",
            "stillfresh/gateway/static/stillfresh.js",
        } <= own
        assert any(it.endswith("licenses/LICENSE") for it in names)

    def test_the_source_distribution_has_what_its_tests_need(self, built: Path) -> None:
        """And the pages that say how it is licensed, how it changes, and how to report."""
        (archive,) = built.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            names = {it.partition("/")[2] for it in opened.getnames()}
        assert {"LICENSE", "CHANGELOG.md", "SECURITY.md", "pyproject.toml"} <= names
        assert {"tests/test_package.py", "src/stillfresh/py.typed", "docs/versions.md"} <= names
        assert not {it for it in names if it.endswith((".pyc", ".so"))}

    def test_the_wheel_works_in_a_fresh_environment_without_extras(
        self, built: Path, tmp_path: Path
    ) -> None:
        """It is imported and says its version; the other commands name the extra."""
        (wheel,) = built.glob("*.whl")
        run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env"))
        python = tmp_path / "env" / "bin" / "python"
        (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
        for name in CORE:
            for file in importlib.metadata.files(name) or ():
                if ".." not in file.parts:
                    (site / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(str(file.locate()), site / file)
        uv = [str(Path(sys.executable).parent / "uv"), "pip", "install", "--offline", "--no-deps"]
        run(*uv, "--python", str(python), str(wheel))
        clean = {it: os.environ[it] for it in ("PATH", "HOME") if it in os.environ}
        code = (
            "import stillfresh, sys; assert 'click' not in sys.modules; print(stillfresh.__file__)"
        )
        assert run(str(python), "-W", "error", "-c", code, env=clean).startswith(str(site))
        command = str(tmp_path / "env" / "bin" / "stillfresh")
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]
        assert version == ["version"]
        said = run(command, "--version", env=clean)
        assert said.strip() == f"stillfresh, version {importlib.metadata.version('stillfresh')}"
        done = subprocess.run([command, "demo"], capture_output=True, check=False, env=clean)
        assert (done.returncode, b"install stillfresh[cli]" in done.stderr) == (2, True)


class TestPromises:
    def test_no_promised_public_name_has_vanished(self) -> None:
        """Names, settings, options and messages of docs/promised.txt; see docs/versions.md."""
        path = ROOT / "scripts" / "promised.py"
        spec = importlib.util.spec_from_file_location("promised", path)
        assert spec is not None
        assert spec.loader is not None
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        kept = (ROOT / "docs" / "promised.txt").read_text().splitlines()
        assert len(kept) > 300
        assert set(kept) - set(script.promised()) == set()

    def test_the_changelog_has_the_version(self) -> None:
        """Every version is a heading with the same groups, the newest first."""
        text = (ROOT / "CHANGELOG.md").read_text()
        versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert versions[0] == "Unreleased"
        assert importlib.metadata.version("stillfresh") in {it.partition(" ")[0] for it in versions}
        groups = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
        assert groups <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}

    def test_every_test_file_that_the_threat_model_names_exists(self) -> None:
        """docs/security.md says which tests prove what it says."""
        page = (ROOT / "docs" / "security.md").read_text()
        named = re.findall(r"`([\w/]+/?test_\w+\.py)`", page)
        assert len(named) > 20
        assert [it for it in named if not (ROOT / "tests" / it).exists()] == []
