"""E20: docs/django.md is true: its project runs, its options are those there are."""

import re
import subprocess
import sys
from pathlib import Path

from tests.kit import shop
from tests.kit.processes import ROOT

shop.configure()

from stillfresh.integrations.django import shared  # noqa: E402 (after settings)

PAGE = (ROOT / "docs" / "django.md").read_text()


def test_e20_the_project_in_the_docs_runs(tmp_path: Path) -> None:
    """Each block in the file that its first line names."""
    for name, source in re.findall(r"^```py\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
    done = subprocess.run(
        [sys.executable, "try_it.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ":1:prices" in done.stdout


def test_e20_every_option_is_documented_with_its_default() -> None:
    """With its default."""
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| `([^`]*)` \|", PAGE, re.MULTILINE))
    options = {**dict.fromkeys(shared.OWN, 0), **shared.SHARED}
    assert rows == {name: repr(value) for name, value in options.items()}
