"""The reference says what every public name does. That it lists them all: `tests/test_docs.py`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^::: (\S+)$((?:\n .*)*)", re.MULTILINE)


def shown() -> Iterator[tuple[str, str]]:
    """Each name that a page of the reference lists, and the options that it is shown with."""
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        yield from BLOCK.findall(page.read_text())


def parts(package: Any, name: str, options: str) -> Iterator[Any]:
    """What a name leads to; and the methods and properties that are shown of it."""
    it = package[name.removeprefix("stillfresh.")]
    it = it.final_target if it.is_alias else it
    yield it
    [hidden] = re.findall(r"\"!(\^\(.*?\$)\"", options) or ["^_"]
    if it.is_class and "members: false" not in options:
        members = it.all_members.values()
        for member in (alias.final_target if alias.is_alias else alias for alias in members):
            is_method = member.is_function or "property" in member.labels
            if is_method and not member.name.startswith("_") and not re.match(hidden, member.name):
                yield member


def test_every_public_name_has_a_docstring() -> None:
    """It has a docstring, and so has each method and property of it that is shown."""
    package = griffe.load("stillfresh", search_paths=[ROOT / "src"])
    found = [part for name, options in shown() for part in parts(package, name, options)]
    assert len(found) > 400
    assert [part.path for part in found if not part.has_docstring] == []
