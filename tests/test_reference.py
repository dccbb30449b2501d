"""The reference is complete: every public name is in it, and says what it does."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def package() -> Any:
    """stillfresh, as the tool that writes the reference reads it."""
    griffe = pytest.importorskip("griffe", reason="make .venv/.docs installs the site's tools")
    return griffe.load("stillfresh", search_paths=[ROOT / "src"])


def found(package: Any, path: str) -> Any:
    """What a dotted name leads to, where it is written."""
    it = package[path.removeprefix("stillfresh.")]
    return it.final_target if it.is_alias else it


def public(module: Any) -> Iterator[str]:
    """Every name in the `__all__` of every module."""
    for name in module.exports or ():
        yield f"{module.path}.{name if isinstance(name, str) else name.name}"
    for below in module.modules.values():
        if not below.is_alias:
            yield from public(below)


def documented() -> list[str]:
    """The names that the pages of the reference list."""
    texts = [page.read_text() for page in sorted(REFERENCE.glob("*.md"))]
    return [name for text in texts for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]


def test_every_public_name_is_in_the_reference(package: Any) -> None:
    """Each once, by whatever path; and nothing that is not public."""
    listed = [found(package, name).canonical_path for name in documented()]
    assert len(listed) == len(set(listed))
    names = {found(package, name).canonical_path: name for name in public(package)}
    missing = sorted(names[path] for path in names.keys() - set(listed))
    assert missing == [], "add `::: name` to a page of docs/reference"
    assert set(listed) <= names.keys()
