"""Builds a release, looks at it, and uploads it: `.ci/publish`, or `--dry-run` to upload nothing.

No host stands here. The variable STILLFRESH_REPOSITORY has the address of the repository (see
scripts/release_metadata.py). Where the upload goes, and with which right, is what uv reads from
UV_PUBLISH_URL and UV_PUBLISH_TOKEN, or from the identity that the machine of the run gives it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
UV: Final = Path(sys.executable).with_name("uv")
NEEDED: Final = ("STILLFRESH_REPOSITORY", "UV_PUBLISH_URL")


def version_of(root: Path) -> str:
    """The version that the package has in its source."""
    source = (root / "src" / "stillfresh" / "__init__.py").read_text()
    [version] = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return str(version)


def mistakes(root: Path, tags: list[str], environment: Mapping[str, str]) -> list[str]:
    """Each thing that must be put right before this tree is a release, as a sentence."""
    version = version_of(root)
    changelog = (root / "CHANGELOG.md").read_text()
    citation = (root / "CITATION.cff").read_text()
    unreleased = changelog.partition("## Unreleased\n")[2].partition("\n## ")[0]
    checks = {
        f"the commit has no tag v{version}": f"v{version}" in tags,
        f"CHANGELOG.md has no heading '## {version}'": f"\n## {version}\n" in changelog,
        "CHANGELOG.md has lines below Unreleased: move them to the release": (
            "\n- " not in unreleased
        ),
        f"CITATION.cff is not of version {version}": f"\nversion: {version}\n" in citation,
    }
    readme = (root / "README.md").read_text()
    checks["README.md says that it is not published"] = "is not on PyPI yet" not in readme
    unset = {f"{name} is not set": bool(environment.get(name)) for name in NEEDED}
    return [mistake for mistake, is_right in {**checks, **unset}.items() if not is_right]


def build(root: Path, folder: Path) -> None:
    """A source distribution, and the wheel that is made of it."""
    call(UV, "build", "--quiet", "--out-dir", folder, root)


def try_out(folder: Path) -> None:
    """Install the wheel beside nothing else, and run the program that a new user runs first."""
    [wheel] = folder.glob("*.whl")
    readme = (ROOT / "README.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as place:
        call(UV, "venv", "--quiet", "--python", sys.executable, f"{place}/env")
        python = Path(place, "env", "bin", "python")
        call(UV, "pip", "install", "--quiet", "--python", python, wheel)
        call(python, "-W", "error", "-c", program, cwd=Path(place))


def call(*command: str | Path, cwd: Path = ROOT) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="build and look, upload nothing")
    is_dry = parser.parse_args().dry_run
    tags = subprocess.run(
        ["git", "tag", "--points-at", "HEAD"],  # noqa: S607 (the git of this machine)
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    for mistake in mistakes(ROOT, tags, os.environ):
        sys.stderr.write(f"release: {mistake}\n")
        if not is_dry:
            return 1
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        build(ROOT, folder)
        try_out(folder)
        files = sorted(path for path in folder.iterdir() if path.suffix in {".gz", ".whl"})
        sys.stdout.write("".join(f"release: {path.name}\n" for path in files))
        if not is_dry:
            call(UV, "publish", *files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
