"""Moves the lines below "Unreleased" into the page of a release: `python scripts/changes.py 0.2.0`.

CHANGELOG.md has a summary of each release that fits on a screen, and the lines that were added
since. All lines of a release are on its page in docs/changes. Whoever changes stillfresh adds one
line at the end of a section below Unreleased; before a release, this script moves them. Whatever
is summarised there by hand stays as it is.
"""

import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
CHANGELOG: Final = ROOT / "CHANGELOG.md"
SECTIONS: Final = ("Changed", "Removed", "Security", "Added", "Fixed")


def sections_of(text: str) -> dict[str, str]:
    """What stands below each heading of a section."""
    parts = re.split(r"^### (.+)\n", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def written(head: str, sections: dict[str, str]) -> str:
    """A page with these sections; every section is there, so that lines find their place."""
    blocks = [f"### {name}\n\n{sections.get(name, '')}".rstrip() for name in SECTIONS]
    return "\n\n".join([head.strip(), *blocks]) + "\n"


def moved(changelog: str, page: str) -> tuple[str, str]:
    """The changelog without the lines below Unreleased, and the page with them."""
    before, mark, after = changelog.partition("## Unreleased\n")
    unreleased, begin, releases = after.partition("\n## ")
    head = unreleased.partition("\n### ")[0]
    new = sections_of(unreleased)
    old = sections_of(page)
    both = {
        name: "\n".join(filter(None, [old.get(name, ""), with_links(new.get(name, ""))]))
        for name in SECTIONS
    }
    empty = written(head, {})
    return f"{before}{mark}\n{empty}{begin}{releases}", written(page.partition("\n### ")[0], both)


def with_links(lines: str) -> str:
    """Links that begin at the root, as they begin in docs/changes."""
    lines = lines.replace("](docs/", "](../")
    return re.sub(r"\]\(([A-Z]+\.md)", r"](../../\1", lines)


def main(version: str) -> None:
    path = ROOT / "docs" / "changes" / f"{version}.md"
    changelog, page = moved(CHANGELOG.read_text(), path.read_text())
    CHANGELOG.write_text(changelog)
    path.write_text(page)


if __name__ == "__main__":
    main(sys.argv[1])
