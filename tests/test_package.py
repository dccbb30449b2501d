"""What is published: the wheel, the source distribution, and the names that stay."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import stillfresh

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


def script(name: str) -> Any:
    """A script, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
            "stillfresh/gateway/static/stillfresh.d.ts",
            "stillfresh/gateway/static/stillfresh-waiting.js",
        } <= own
        metadata = zipfile.ZipFile(wheel).read(
            f"{wheel.name.partition('-py3')[0]}.dist-info/METADATA"
        )
        assert metadata.decode().endswith((ROOT / "README.md").read_text())
        assert any(it.endswith("licenses/LICENSE") for it in names)

    def test_the_source_distribution_has_what_its_tests_need(self, built: Path) -> None:
        """And the pages that say how it is licensed, how it changes, and how to report."""
        (archive,) = built.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            names = {it.partition("/")[2] for it in opened.getnames()}
        assert {"LICENSE", "CHANGELOG.md", "SECURITY.md", "pyproject.toml"} <= names
        assert {"tests/test_package.py", "src/stillfresh/py.typed", "docs/versions.md"} <= names
        assert {"CITATION.cff", ".ci/publish", "deploy/Dockerfile"} <= names
        assert {"scripts/release_metadata.py", "examples/programs/script.py"} <= names
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
        said = run(command, "--version", env=clean)
        assert said.strip() == f"stillfresh, version {stillfresh.__version__}"
        done = subprocess.run([command, "demo"], capture_output=True, check=False, env=clean)
        assert (done.returncode, b"install stillfresh[cli]" in done.stderr) == (2, True)


class TestReleases:
    def test_one_variable_gives_the_package_its_links(self) -> None:
        """The links of the project, and those of the README, which lead to files of a version."""
        metadata = script("release_metadata")
        repository = "https://git.example.org/ann/stillfresh"
        links = metadata.urls(repository, "0.2.0")
        assert links["Changelog"] == f"{repository}/blob/v0.2.0/CHANGELOG.md"
        readme = "[a](docs/a.md#b) ![c](docs/c.png) [d](#e) [f](https://example.org)"
        assert metadata.with_whole_links(readme, repository, "0.2.0") == (
            f"[a]({repository}/blob/v0.2.0/docs/a.md#b) ![c]({repository}/raw/v0.2.0/docs/c.png) "
            "[d](#e) [f](https://example.org)"
        )

    def test_a_tree_that_is_no_release_is_refused_with_each_reason(self, tmp_path: Path) -> None:
        """Tag, changelog, citation, README and addresses are looked at before anything is built."""
        release = script("release")
        (tmp_path / "src" / "stillfresh").mkdir(parents=True)
        (tmp_path / "src" / "stillfresh" / "__init__.py").write_text('__version__ = "0.3.0"\n')
        (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n\n- a\n\n## 0.2.0\n")
        (tmp_path / "CITATION.cff").write_text("\nversion: 0.2.0\n")
        (tmp_path / "README.md").write_text("It is not on PyPI yet.")
        reasons = release.mistakes(tmp_path, ["v0.2.0"], {})
        assert reasons == [
            "the commit has no tag v0.3.0",
            "CHANGELOG.md has no heading '## 0.3.0'",
            "CHANGELOG.md has lines below Unreleased: move them to the release",
            "CITATION.cff is not of version 0.3.0",
            "README.md says that it is not published",
            "STILLFRESH_REPOSITORY is not set",
            "UV_PUBLISH_URL is not set",
        ]
        (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n\n## 0.3.0\n")
        (tmp_path / "CITATION.cff").write_text("\nversion: 0.3.0\n")
        (tmp_path / "README.md").write_text("pip install stillfresh")
        assert release.mistakes(tmp_path, ["v0.3.0"], dict.fromkeys(release.NEEDED, "x")) == []

    def test_what_publishes_names_no_host(self) -> None:
        """Addresses come from variables: the files would be the same anywhere."""
        files = [
            ".ci/publish",
            "scripts/release.py",
            "scripts/release_metadata.py",
            "pyproject.toml",
        ]
        for name in files:
            assert "://" not in (ROOT / name).read_text(), name


class TestPromises:
    def test_no_promised_public_name_has_vanished(self) -> None:
        """Names, settings, options and messages of docs/promised.txt; see docs/versions.md."""
        promised = (ROOT / "docs" / "promised.txt").read_text().splitlines()
        assert len(promised) > 300
        assert set(promised) - set(script("promised").promised()) == set()

    def test_the_changelog_has_the_version(self) -> None:
        """Unreleased first, with the sections of scripts/changes.py; then versions."""
        text = (ROOT / "CHANGELOG.md").read_text()
        versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert versions == ["Unreleased", stillfresh.__version__, "0.1.0"]
        assert re.findall(r"^### (.*)$", text, re.MULTILINE) == list(script("changes").SECTIONS)
        assert f"\nversion: {stillfresh.__version__}\n" in (ROOT / "CITATION.cff").read_text()

    def test_a_release_of_the_changelog_fits_on_a_screen(self) -> None:
        """A summary of at most 45 lines; every line of a version is on a page of its own."""
        text = (ROOT / "CHANGELOG.md").read_text()
        for release in re.split(r"^## ", text, flags=re.MULTILINE)[2:]:
            version = release.partition("\n")[0]
            advice = "run `git checkout main -- CHANGELOG.md`, and add your lines below Unreleased"
            assert len(release.splitlines()) <= 45, advice
            assert f"](docs/changes/{version}.md)" in release
            assert (ROOT / "docs" / "changes" / f"{version}.md").exists()

    def test_no_line_below_unreleased_is_on_the_page_of_a_version_already(self) -> None:
        """Moved lines come back when a conflict in CHANGELOG.md is resolved with the older text."""
        unreleased = (ROOT / "CHANGELOG.md").read_text().partition("\n## 0.")[0]
        lines = set(re.findall(r"^- .+$", script("changes").with_links(unreleased), re.MULTILINE))
        for page in (ROOT / "docs" / "changes").glob("*.md"):
            assert lines & set(page.read_text().splitlines()) == set(), f"delete what {page} has"

    def test_lines_below_unreleased_move_to_the_page_of_a_version(self) -> None:
        """Each into its section, behind what is there; links begin where the page is."""
        changelog = (
            "# Changelog\n\n## Unreleased\n\nAdd a line.\n\n### Changed\n\n- b\n\n### Removed\n\n"
            "### Security\n\n### Added\n\n- [d](docs/d.md)\n\n### Fixed\n\n## 0.2.0\n\nSummary.\n"
        )
        page = "# Changes\n\n### Changed\n\n- a\n\n### Fixed\n\n- c\n"
        left, moved = script("changes").moved(changelog, page)
        assert "Add a line.\n\n### Changed\n\n### Removed\n" in left
        assert left.endswith("### Fixed\n\n## 0.2.0\n\nSummary.\n")
        assert "### Changed\n\n- a\n- b\n\n" in moved
        assert "### Added\n\n- [d](../d.md)\n\n" in moved
        assert moved.endswith("### Fixed\n\n- c\n")

    def test_every_test_file_that_the_threat_model_names_exists(self) -> None:
        """docs/security.md says which tests prove what it says."""
        page = (ROOT / "docs" / "security.md").read_text()
        named = re.findall(r"`([\w/]+/?test_\w+\.py)`", page)
        assert len(named) > 20
        assert [it for it in named if not (ROOT / "tests" / it).exists()] == []
